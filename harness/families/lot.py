"""Draws of a member: random numbers that depend on the member's name only, and on no version of a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

__all__ = ["Lot", "rounded"]

T = TypeVar("T")


class Lot:
    """Random draws from a text. Every draw uses `random.Random.random` alone, whose sequence Python keeps for ever."""

    def __init__(self, name: str) -> None:
        self._random = Random(name)

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self._random.random() < probability

    def share(self, low: float, high: float) -> float:
        """Uniform in [low, high), rounded to two significant digits."""
        return rounded(low + (high - low) * self._random.random())

    def log(self, low: float, high: float) -> float:
        """Uniform in the logarithm, rounded to two significant digits."""
        return rounded(math.exp(math.log(low) + (math.log(high) - math.log(low)) * self._random.random()))

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + math.floor((high - low + 1) * self._random.random())

    def among(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[self.whole(0, len(options) - 1)]

    def some(self, options: Sequence[T], count: int) -> tuple[T, ...]:
        """`count` of `options`, each at most once, in their order."""
        left = list(range(len(options)))
        drawn = [left.pop(self.whole(0, len(left) - 1)) for _ in range(min(count, len(options)))]
        return tuple(options[i] for i in sorted(drawn))


def rounded(value: float, digits: int = 2, *, up: bool | None = None) -> float:
    """`value` with `digits` significant digits, to the nearest, or up or down; exact in decimal: files are short."""
    if value == 0 or not math.isfinite(value):
        return value
    places = digits - 1 - math.floor(math.log10(abs(value)))
    scale = 10.0**places
    # The tiny part keeps a value that is such a decimal already from being moved by its rounding error.
    count = (
        round(value * scale) if up is None else math.ceil(value * scale - 1e-9) if up else math.floor(value * scale + 1e-9)
    )
    return float(round(count / scale, max(places, 0)))
