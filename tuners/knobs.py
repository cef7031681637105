"""Knobs: what a tuner can set, and over what range.

Part of the contract, re-exported by `tuners.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Choice", "Integer", "Knob", "Real", "Scalar"]

Scalar: TypeAlias = float | int | bool | str


@dataclass(frozen=True, slots=True)
class Real:
    """A knob over an interval, searched on a logarithmic scale if `log`."""

    name: str
    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self.name, self.low, self.high, self.log)

    def contains(self, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def nearest(self, value: float) -> float:
        """The value of this knob that is nearest to `value`."""
        return float(min(max(value, self.low), self.high))

    def sample(self, rng: np.random.Generator) -> float:
        if self.log:
            # Rounding of exp(log(x)) may step over the ends by one unit in the last place.
            return float(np.clip(np.exp(rng.uniform(np.log(self.low), np.log(self.high))), self.low, self.high))
        return float(rng.uniform(self.low, self.high))


@dataclass(frozen=True, slots=True)
class Integer:
    """A knob over whole numbers, both ends included."""

    name: str
    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self.name, self.low, self.high, self.log)

    def contains(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def nearest(self, value: float) -> int:
        """The whole number of this knob that is nearest to `value`."""
        return int(min(max(round(value), self.low), self.high))

    def sample(self, rng: np.random.Generator) -> int:
        if self.log:
            # Half a unit on both sides, so that the ends are as likely as their neighbours.
            x = np.exp(rng.uniform(np.log(self.low - 0.5), np.log(self.high + 0.5)))
            return int(np.clip(round(x), self.low, self.high))
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class Choice:
    """A knob with listed values, whose order has no meaning. Raises ValueError for none, and for one that comes twice."""

    name: str
    options: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if not self.options or len(set(self.options)) != len(self.options):
            raise ValueError(f"Knob {self.name!r} has options {self.options}: give at least one, each once.")

    def contains(self, value: Any) -> bool:
        return any(type(value) is type(o) and value == o for o in self.options)

    def nearest(self, value: float) -> float | int:
        """The option that is nearest to `value`, of equals the first. Raises ValueError where no option is a number."""
        numbers = [o for o in self.options if isinstance(o, int | float) and not isinstance(o, bool)]
        if not numbers:
            raise ValueError(f"Cannot set knob {self.name!r} near {value:g}: its options are {self.options}, no numbers.")
        return min(numbers, key=lambda o: abs(o - value))

    def sample(self, rng: np.random.Generator) -> Scalar:
        return self.options[int(rng.integers(len(self.options)))]


Knob: TypeAlias = Real | Integer | Choice


def _check_range(name: str, low: float, high: float, log: bool) -> None:
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError(f"Knob {name!r} runs from {low} to {high}: both must be finite.")
    if not low <= high:
        raise ValueError(f"Knob {name!r} runs from {low} to {high}: low must not exceed high.")
    if log and not low > 0:
        raise ValueError(f"Knob {name!r} is logarithmic from {low}: low must be positive.")
