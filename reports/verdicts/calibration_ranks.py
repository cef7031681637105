"""Which ranks of a comparison hold under the uncertainty of a calibration, and which the calibration does not decide.

`harness compare --calibration-draws K` plays a scenario under K draws of its calibrated constants besides the fitted ones,
with the same tuners and seeds. A rank is a difference that the seeds show at the fitted constants: of a tuner and the
leader, or of a tuner and `fixed`. It *holds* if at least 95 % of the draws have it (mean of logarithms over seeds; a tie
counts half); else it is *not decided by this calibration*. No test takes draws for blocks: its p value would fall with the
number of draws, which costs only computing, while the share of draws tends to what the recording knows.

Draws move the fitted constants, all together, and in turn one that the recording does not determine. They do not move what
the simulator lacks: `harness fidelity` tells that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from reports.verdicts.numbers import relative
from reports.verdicts.statistics import LEVEL, first_chances
from reports.verdicts.summary import REFERENCE, log_minimised, side_of_reference
from traces.schema import NOT_APPLICABLE
from traces.store import Results

__all__ = ["NOT_DECIDED", "CalibrationRank", "CalibrationRanks", "ranks", "ratio_text", "sentences", "share_text"]

NOT_DECIDED = "not decided by this calibration"
_HOLDS = "holds"


class CalibrationRank(NamedTuple):
    """One tuner under the draws."""

    tuner: str
    standing: str  # at the fitted constants: leader; not told apart, behind or ahead of it
    first: float  # share of draws and seeds in which it is first; nan without a draw
    ratio: float  # to the leader's time: geometric mean over draws; *_low, *_high: 2.5th and 97.5th percentile of draws
    ratio_low: float
    ratio_high: float
    draws: int  # in which both were run
    agree: float  # of these, how many have the rank of the fitted constants; nan where seeds show none
    verdict: str  # `NOT_DECIDED`, "holds", or "" where seeds show no rank
    side: str  # of fixed, at the fitted constants: faster, slower or ""
    side_agree: float
    side_verdict: str


class CalibrationRanks(NamedTuple):
    """The tuners of one scenario under the draws of its constants."""

    scenario: str
    leader: str
    draws: int
    rows: tuple[CalibrationRank, ...]  # in the order of the scenario's table


def ranks(results: Results, rows: pl.DataFrame) -> CalibrationRanks | None:
    """The ranks of one scenario, from its `rows` of `summary.summary`; None without draws, or without a leader."""
    scenario = str(rows["scenario"][0])
    names = results.manifest.get("draws", {}).get(scenario, [])
    played = results.draws.filter(pl.col("scenario").is_in(names), pl.col("status") != NOT_APPLICABLE)
    by_name = {str(name): runs for (name,), runs in played.group_by(["scenario"])}
    found = [by_name[name] for name in names if name in by_name]
    table = rows.filter(pl.col("standing") != "")
    led = table.filter(pl.col("standing") == "leader")["tuner"].to_list()
    if not found or not led:
        return None
    leader, tuners = str(led[0]), table["tuner"].to_list()
    seconds = [log_minimised(runs, tuners) for runs in found]
    means = np.array([_over_seeds(each) for each in seconds])
    first = np.nanmean(first_chances(seconds), axis=0)
    base = means[:, tuners.index(REFERENCE)] if REFERENCE in tuners else np.full(len(found), np.nan)
    made = [
        _rank(row, float(first[i]), means[:, i], means[:, tuners.index(leader)], base)
        for i, row in enumerate(table.iter_rows(named=True))
    ]
    return CalibrationRanks(scenario, leader, len(found), tuple(made))


def _over_seeds(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of [seeds, tuners] over the seeds of every tuner, [tuners]; nan for a tuner without a run."""
    count = (~np.isnan(values)).sum(axis=0)
    return np.where(count > 0, np.nansum(values, axis=0) / np.maximum(count, 1), np.nan)


def _rank(
    row: dict[str, object],
    first: float,
    mine: NDArray[np.float64],
    leaders: NDArray[np.float64],
    base: NDArray[np.float64],
) -> CalibrationRank:
    """A tuner under the draws, by logarithms of its time, of the leader's and of the reference's, one per draw."""
    standing, side = str(row["standing"]), side_of_reference(row)
    slower = mine - leaders
    slower = slower[~np.isnan(slower)]
    low, high = np.exp(np.quantile(slower, [0.025, 0.975])) if len(slower) else (np.nan, np.nan)
    agree, verdict = _agreement(slower, {"behind": 1, "ahead": -1}.get(standing, 0))
    side_agree, side_verdict = _agreement(mine - base, {"slower": 1, "faster": -1}.get(side, 0))
    ratio = float(np.exp(slower.mean())) if len(slower) else np.nan
    name = str(row["tuner"])
    return CalibrationRank(
        name, standing, first, ratio, float(low), float(high), len(slower), agree, verdict, side, side_agree, side_verdict
    )


def _agreement(differences: NDArray[np.float64], sign: int) -> tuple[float, str]:
    """How many `differences` have the `sign`, and whether that is enough; nan and "" for no sign."""
    some = sign * differences[~np.isnan(differences)]
    if not sign or not len(some):
        return float("nan"), ""
    agree = float((some > 0).sum() + 0.5 * (some == 0).sum())
    return agree, _HOLDS if agree >= LEVEL * len(some) else NOT_DECIDED


def sentences(found: CalibrationRanks) -> list[str]:
    """What holds, what does not, and how much this number of draws can tell."""
    others = [r for r in found.rows if r.tuner != found.leader]
    held = [r.tuner for r in others if r.verdict == _HOLDS]
    lost = [f"{found.leader} and {r.tuner} ({share_text(r.agree, r.draws)})" for r in others if r.verdict == NOT_DECIDED]
    lost += [
        f"{r.tuner} {r.side} than {REFERENCE} ({share_text(r.side_agree, r.draws)})"
        for r in others
        if r.side_verdict == NOT_DECIDED and found.leader != REFERENCE
    ]
    chance = next((r.first for r in found.rows if r.tuner == found.leader), float("nan"))
    said = [
        f"Under {found.draws} draws of the calibrated constants, on the same seeds, {found.leader} is first in {chance:.0%} "
        "of runs."
    ]
    if held:
        said.append(f"Behind it in at least {LEVEL:.0%} of the draws: {', '.join(held)}.")
    if lost:
        said.append(f"{NOT_DECIDED[0].upper()}{NOT_DECIDED[1:]}: {', '.join(lost)}.")
    elif held:
        said.append("The calibration decides every rank that the seeds show.")
    sure = 0.05 ** (1 / found.draws)
    if sure < LEVEL:
        said.append(
            f"With {found.draws} draws, a rank that all of them have holds in at least {sure:.0%} of all draws (with 95 % "
            "confidence); 59 draws would tell 95 %."
        )
    return said


def share_text(agree: float, draws: int) -> str:
    """How many of the draws agree."""
    return f"{agree:g} of {draws} draws"


def ratio_text(rank: CalibrationRank) -> tuple[str, str]:
    """The ratio to the leader, and its range over draws; "-" and "" without a draw."""
    if np.isnan(rank.ratio):
        return "-", ""
    return relative(rank.ratio), f"{relative(rank.ratio_low)}\u2013{relative(rank.ratio_high)}"
