"""How a benchmark is judged: rounds of what is measured and what it is compared with, in turn, until the answer is certain.

A single run on a machine with neighbours cannot tell a regression from a neighbour. So both sides run in turn (A B A B ...),
each round gives one ratio, and the verdict is on their median: *reached* or *missed* as soon as its whole interval is on one
side of the reach, *undecided* where it never is. The interval is made of order statistics, which asks of the noise only that
rounds are independent. It is looked at after 8, 16, 32 and 64 rounds, each time at a level of 98.75 %, so that all looks
together are wrong in at most 5 % of benchmarks.

Seconds are CPU seconds wherever all work is done in one process: neighbours change them less than wall seconds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import pytest

from tests.bench.reaches import REACHES, Reach

__all__ = ["LOOKS", "Finding", "Verdict", "finding", "interval", "judge", "measured", "settled", "timed", "verdict"]

Verdict = Literal["reached", "missed", "undecided"]

LOOKS = (8, 16, 32, 64)
_ERROR = 0.05 / len(LOOKS)  # of a look
_CLOSE = 0.03
"""An interval that is no further than this from the reach, on both sides, counts as reached: it will not get any clearer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a benchmark has found."""

    name: str  # in `REACHES`
    value: float  # the median over rounds
    low: float
    high: float
    rounds: int
    verdict: Verdict

    @property
    def reach(self) -> Reach:
        return REACHES[self.name]

    def __str__(self) -> str:
        reach, bound = self.reach, "at least" if self.reach.at_least else "at most"
        unit = "" if reach.unit == "ratio" else f" {reach.unit}"
        line = (
            f"fails beyond {reach.line:g}, should be {bound} {reach.value:g}" if reach.limit else f"{bound} {reach.value:g}"
        )
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        return f"{self.said}. {reach.what}: {self.value:.4g}{unit} ({self.low:.4g} to {self.high:.4g}, {rounds}; {line})"

    @property
    def said(self) -> str:
        """The verdict in words. What is within its limit, but not at its reach, is not called reached."""
        if self.verdict == "undecided":
            return "undecided: the machine is too noisy"
        at_reach = verdict(self.low, self.high, self.reach.value, at_least=self.reach.at_least)
        return "not reached, within the limit" if self.verdict == "reached" != at_reach else self.verdict


def interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval of the median from order statistics, at the level of one look; infinite with fewer than 8 values."""
    n = len(values)
    below, drop = 0.5**n, 0  # the chance that all values are on one side of the median; values to leave out at each end
    if 2 * below > _ERROR:
        return -math.inf, math.inf
    while 2 * (below + math.comb(n, drop + 1) * 0.5**n) <= _ERROR:
        drop += 1
        below += math.comb(n, drop) * 0.5**n
    ordered = sorted(values)
    return ordered[drop], ordered[n - 1 - drop]


def verdict(low: float, high: float, line: float, *, at_least: bool) -> Verdict:
    """What an interval of the median says of a line."""
    if at_least:
        low, high, line = -high, -low, -line
    close = _CLOSE * abs(line)
    if high <= line or (line - close <= low and high <= line + close):
        return "reached"
    return "missed" if low > line else "undecided"


def measured(name: str, round_: Callable[[], float], *, most: int = LOOKS[-1]) -> Finding:
    """Rounds until the verdict on the reach `name` is certain, at most `most`. `round_` makes one and returns its value."""
    values: list[float] = []
    for look in (n for n in LOOKS if n <= most):
        values += [round_() for _ in range(look - len(values))]
        made = finding(name, *values)
        if made.verdict != "undecided":
            break
    return made


def finding(name: str, *values: float) -> Finding:
    """The finding of one value per round. A single value counts as certain: CPU seconds of something long, for example."""
    reach = REACHES[name]
    low, high = interval(values) if len(values) > 1 else (values[0], values[0])
    decided = verdict(low, high, reach.line, at_least=reach.at_least)
    return Finding(name, statistics.median(values), low, high, len(values), decided)


def timed(job: Callable[[], Any], clock: Callable[[], float] | None = None) -> Callable[[], float]:
    """A function that runs `job` and returns its seconds by `clock`, until its results are computed.

    CPU seconds by default, because wall seconds also count what other processes do. Jobs in other processes need another
    clock. Where JAX computes on an accelerator, wall seconds are the default.
    """
    clock = clock or (time.process_time if jax.default_backend() == "cpu" else time.perf_counter)

    def run() -> float:
        begin = clock()
        jax.block_until_ready(job())
        return clock() - begin

    return run


def judge(
    benchmark: Any,
    name: str,
    mine: Callable[[], float],
    theirs: Callable[[], float] | None = None,
    *,
    most: int = LOOKS[-1],
    scale: float = 1.0,
) -> Finding:
    """Measure, store the finding with the benchmark, and end the test by it: a miss fails, undecided is skipped.

    `mine` and `theirs` run once and return what they measure, mostly seconds; both run once before they count. The value
    of a round is the ratio of both, or `mine` alone, times `scale`. The benchmark's own table has a round of `mine`.
    """
    benchmark.pedantic(mine, rounds=1)
    if theirs is not None:
        theirs()
    return settled(benchmark, measured(name, lambda: scale * mine() / (1.0 if theirs is None else theirs()), most=most))


def settled(benchmark: Any, made: Finding) -> Finding:
    """Store a finding with its benchmark, and end the test by it."""
    benchmark.extra_info["finding"] = asdict(made)
    if made.verdict == "missed":
        pytest.fail(str(made), pytrace=False)
    if made.verdict == "undecided":
        pytest.skip(str(made))
    return made
