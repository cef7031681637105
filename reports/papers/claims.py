"""A figure that a paper prints beside the one measured here, and the verdict that follows from both by rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from reports.verdicts.numbers import relative

__all__ = ["CLOSE", "COLUMNS", "RULES", "Claim", "Verdict", "frame", "headline", "interval_shown", "shown"]

CLOSE = 0.1
"""A measured value reproduces a published one where both differ by this share at most."""

_NEAR = 2.0  # in part: at most this factor apart

Verdict = Literal["reproduced", "in part", "refuted", "cannot be told", "fitted", "missed although fitted"]
_VERDICTS: tuple[Verdict, ...] = ("reproduced", "in part", "refuted", "cannot be told", "fitted", "missed although fitted")

RULES = {
    "value": f"reproduced: within {CLOSE:.0%}, or the published value is in our interval; in part: within a factor of "
    f"{_NEAR:g}; refuted: otherwise",
    "gain": "a ratio that the paper says is above 1. Cannot be told where our interval holds 1; refuted where it is below "
    f"1; reproduced where its upper end reaches the published ratio less {CLOSE:.0%} (ours itself, where the interval is "
    "open or there is one run); in part: a smaller gain",
    "limit": f"a bound from above. Reproduced where ours exceeds it by at most {CLOSE:.0%}; in part: by at most a factor of "
    f"{_NEAR:g}; refuted: otherwise",
    "fitted": "a constant of the simulator was fitted to this figure, so it shows how well the model describes it, and is "
    f"no reproduction. Missed although fitted: more than {CLOSE:.0%} apart",
}
"""What each kind of claim is judged by."""

COLUMNS: dict[str, pl.DataType] = {
    "where": pl.String(),  # of the paper
    "what": pl.String(),
    "unit": pl.String(),
    "kind": pl.String(),  # key of RULES
    "published": pl.Float64(),
    "measured": pl.Float64(),
    "low": pl.Float64(),  # of the interval; nan where there is none
    "high": pl.Float64(),
    "verdict": pl.String(),
    "why": pl.String(),
}
"""Columns of `frame`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One published figure and ours. `why` says what a reader must know of a difference, or how ours was measured."""

    where: str
    what: str
    unit: str
    published: float
    measured: float
    low: float = math.nan
    high: float = math.nan
    kind: Literal["value", "gain", "limit", "fitted"] = "value"
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        """What follows from both figures, see `RULES`."""
        close = math.isclose(self.measured, self.published, rel_tol=CLOSE)
        if self.kind == "fitted":
            return "fitted" if close else "missed although fitted"
        if math.isnan(self.measured):
            return "cannot be told"
        if self.kind == "gain":
            return self._of_gain()
        if self.kind == "limit":
            ratio = self.measured / self.published
            return "reproduced" if ratio <= 1 + CLOSE else "in part" if ratio <= _NEAR else "refuted"
        if close or self.low <= self.published <= self.high:
            return "reproduced"
        if self.measured * self.published <= 0:
            return "refuted"
        apart = abs(math.log(self.measured / self.published))
        return "in part" if apart <= math.log(_NEAR) else "refuted"

    def _of_gain(self) -> Verdict:
        low, high = (self.measured if math.isnan(end) else end for end in (self.low, self.high))
        if low <= 1 <= high:
            return "cannot be told"
        if high < 1:
            return "refuted"
        most = self.measured if math.isinf(high) else high  # an open interval says nothing of how large the gain is
        return "reproduced" if most >= self.published * (1 - CLOSE) else "in part"


def frame(claims: Sequence[Claim]) -> pl.DataFrame:
    """The claims as a table, with their verdicts; columns: `COLUMNS`."""
    rows = [{name: getattr(claim, name) for name in COLUMNS} for claim in claims]
    return pl.DataFrame(rows, schema=COLUMNS)


def headline(claims: Sequence[Claim]) -> str:
    """How many figures were compared, and what came out."""
    counts = Counter(claim.verdict for claim in claims)
    said = ", ".join(f"{counts[v]} {v}" for v in _VERDICTS if counts[v])
    return f"{len(claims)} figure{'' if len(claims) == 1 else 's'}: {said or 'none'}."


def shown(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A figure with its interval."""
    interval = interval_shown(low, high)
    return ("-" if math.isnan(value) else relative(value)) + (f" ({interval})" if interval else "")


def interval_shown(low: float, high: float) -> str:
    """The ends of an interval; "" where there is none."""
    return "" if math.isnan(low) else f"{relative(low)}\u2013{relative(high)}"
