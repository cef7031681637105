"""Cruise (Lee et al., ICDCS 2019): workers, servers and their shares, chosen by a cost model of an epoch."""

from tuners.cruise.tuner import cruise

__all__ = ["cruise"]
