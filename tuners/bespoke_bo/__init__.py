"""The bespoke optimiser (Dalibard et al., 2017): schedules of synchronous SGD by a structured model."""

from tuners.bespoke_bo.tuner import bespoke_bo

__all__ = ["bespoke_bo"]
