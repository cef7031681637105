"""TensorFlowOnline (Liu et al., 2020): Bayesian optimisation of the settings of a running job."""

from tuners.bo_online.tuner import bo_online

__all__ = ["bo_online"]
