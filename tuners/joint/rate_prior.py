"""Which heats of a rate are probable before a job has begun, learned from other jobs: `rate_prior.toml`."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["RateShare", "rate_prior"]


class RateShare(NamedTuple):
    """The best heat (`tuners.joint.heat`) over the highest rate of its knob: a log-normal distribution."""

    median: float
    deviation: float  # of the logarithm


@cache
def rate_prior() -> RateShare:
    """The distribution that ships; `python -m harness.training.learn_rates` makes it from drawn jobs."""
    read = tomllib.loads(files("tuners.joint").joinpath("rate_prior.toml").read_text(encoding="utf-8"))
    return RateShare(math.exp(read["mean_log_share"]), float(read["deviation_log_share"]))
