"""MLtuner (Cui et al., 2018): training tunables tried in branches of the running job."""

from tuners.mltuner.tuner import mltuner

__all__ = ["mltuner"]
