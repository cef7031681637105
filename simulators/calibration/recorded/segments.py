"""The pushes of a recording, split into segments: all pushes under one setting of a run, while all workers push."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import t

from simulators.calibration.recorded.recorded_settings import first_of, moments
from simulators.calibration.recorded.selection import Selection

__all__ = ["FEW", "FEWEST", "RARE", "SYNCHRONOUS", "Segment", "segments_of", "variance_of"]

SYNCHRONOUS = ("bsp",)
"""Policies under which all workers wait for each other."""
FEWEST = 3
"""A segment with fewer cycles per worker gives no row."""
RARE = 0.002
"""A smaller share of times that are far longer than the others is ignored."""
FEW = 5
"""Events of which a rate is told: of fewer, its standard error is half of it or more (Poisson)."""

_WARM_UP = 0.2  # share at the start of a segment that is left out, while workers fall out of step
_SILENT = 3.0  # times its longest time between two pushes, for which a worker is silent before its first or after its last
_ENDED = 0.05  # share of a segment in which not all workers push, in its middle or at its end, that is left out
_UNSTEADY = 0.1  # difference of the logarithms of early and late cycles, from which it is told
_MOSTLY = 0.5  # share of a worker's clocks that others have, too, from which they are its own numbers
_ALL = 1.1  # numbers over rows, from which some of a job's steps have no row
_UNEVEN = 0.1  # difference of pushes of workers that wait for each other, over the most, from which it is told
_BY_CHANCE = 0.01  # chance that any setting of a recording is told to be so although its cycles are steady


def _with_moments(iterations: pl.DataFrame, caveats: list[str]) -> pl.DataFrame:
    """The iterations with the second of each push; where only durations were recorded, each worker's are added up."""
    timed = iterations.filter(pl.col("seconds").is_not_null())
    whole = iterations.filter(pl.col("seconds").is_null(), pl.col("step_seconds") > 0)
    if timed.height or not whole.height:
        if untimed := {*iterations["run"]} - {*timed["run"]}:
            caveats.append(
                f"{len(untimed)} runs are left out: their iterations have no seconds, so that cycles are not known; write "
                "for all runs seconds, or step_seconds, how long each iteration took"
            )
        return timed
    caveats.append(
        "pushes have no times, only durations: a worker's iterations are taken to follow each other from second 0 on"
    )
    whole = whole.sort("run", "branch", "worker", "clock", maintain_order=True)
    whole = whole.with_columns(pl.col("step_seconds").cum_sum().over("run", "branch", "worker").alias("seconds"))
    return whole.sort("run", "branch", "seconds", maintain_order=True)


def _outside_changes(iterations: pl.DataFrame, changes: pl.DataFrame | None) -> pl.DataFrame:
    """The pushes that were completed while no reconfiguration was in progress; `after` is the number of the one before."""
    # A push during a reconfiguration belongs to neither setting.
    if changes is None or not changes.height:
        return iterations.with_columns(after=pl.lit(None, pl.UInt32))
    made = changes.sort("seconds").select("run", "branch", "seconds").with_row_index("after")
    last_change = {"on": "seconds", "by": ["run", "branch"], "check_sortedness": False}
    iterations = iterations.sort("seconds", maintain_order=True).join_asof(made, **last_change)  # type: ignore[arg-type]
    timed = changes.filter(pl.col("total_seconds") > 0).sort("seconds")
    over = timed.select("run", "branch", "seconds", over="seconds", begun=pl.col("seconds") - pl.col("total_seconds"))
    next_change = {"on": "seconds", "by": ["run", "branch"], "strategy": "forward", "check_sortedness": False}
    joined = iterations.join_asof(over, **next_change)  # type: ignore[arg-type]
    kept = pl.col("begun").is_null() | (pl.col("seconds") <= pl.col("begun"))
    return joined.filter(kept).select(iterations.columns)


class Segment(NamedTuple):
    """The pushes under one setting of a run between two reconfigurations: whole cycles of all workers, after the warm-up."""

    setting: dict[str, Any]  # its row in the table of settings
    pushes: pl.DataFrame  # with the one before them, whose time is the beginning
    branches: int  # of the run; those of several share its seconds
    pushing: int  # number of workers that push
    lacking: int  # number of pushes that have no row
    all_pushes: int  # number of pushes under the setting, warm-up included
    all_seconds: float  # from the first to the last of these

    @property
    def barrier(self) -> bool:
        """Whether all workers wait for each other."""
        return self.setting["policy"] in SYNCHRONOUS

    @property
    def cycles(self) -> NDArray[np.float64]:
        """Seconds of each cycle of all workers, [n]."""
        return np.diff(self.pushes["seconds"].to_numpy()[:: self.setting["workers"]])


def variance_of(cycles: NDArray[np.float64]) -> tuple[float, int]:
    """The variance of a cycle over its squared mean, and by how many batches it is told; nan by one or none.

    Successive cycles are not independent, so means of batches are compared (Law, Simulation Modeling and Analysis, Section
    9.5.3).
    """
    size = max(math.isqrt(len(cycles)), 1)
    means = cycles[: len(cycles) // size * size].reshape(-1, size).mean(axis=1)
    if len(means) < 2 or not cycles.mean() > 0:
        return math.nan, len(means)
    return size * float(means.var(ddof=1)) / float(cycles.mean()) ** 2, len(means)


def segments_of(
    tables: Mapping[str, pl.DataFrame],
    settings: pl.DataFrame,
    left_out: pl.DataFrame,
    wanted: Selection,
    caveats: list[str],
) -> list[Segment]:
    """The pushes of a trace's `tables`, split into segments at every reconfiguration, failed ones too.

    Only `wanted` settings have segments, and only those in which no more workers push than they have. `settings` and
    `left_out` are as `settings_of` returns them.
    """
    every = tables["iterations"]
    iterations = _outside_changes(_with_moments(every, caveats), tables.get("reconfigurations"))
    branches = dict(iterations.group_by("run").agg(pl.col("branch").n_unique()).iter_rows())
    chosen = {s["segment"]: s for s in settings.to_dicts() if wanted.has(s)}
    parts = list(_parts(iterations, moments(settings, left_out), chosen, caveats))
    odd = _Odd(set(), [], [], [], [], [], [])
    sampled = _sampled(iterations)
    split = [
        _segment(setting, pushes, stops, branches[setting["run"]], setting["run"] in sampled, odd)
        for (setting, pushes), stops in zip(parts, _rare_stops(parts, branches, sampled), strict=True)
    ]
    found = [segment for segment in split if segment is not None]
    short = {s["segment"] for s, _ in parts} - odd.crowded - {s.setting["segment"] for s in found}
    silent = {s["run"] for s in chosen.values()} - {*every["run"]}
    caveats += _notes(odd, found, short=len(short), silent=len(silent))
    return found


def _parts(
    iterations: pl.DataFrame, known: pl.DataFrame, chosen: Mapping[int, dict[str, Any]], caveats: list[str]
) -> Iterator[tuple[dict[str, Any], pl.DataFrame]]:
    """The `chosen` settings, by number, with their pushes: once more after a reconfiguration that failed. `known` is when
    settings began, as `moments` tells."""
    joined = iterations.sort("seconds", maintain_order=True).join_asof(
        known.with_columns(begun=True), on="seconds", by=["run", "branch"], check_sortedness=False
    )
    runs = [s["run"] for s in chosen.values()]
    if early := joined.filter(pl.col("begun").is_null(), pl.col("run").is_in(runs)).height:
        caveats.append(
            f"{early} iterations before the first setting of their run are left out: give the first setting second 0, and "
            "times of both tables from the same moment"
        )
    # By `after` as well: a reconfiguration that failed has no row among settings, but its stall is between two segments.
    apart = joined.filter(pl.col("segment").is_not_null()).group_by("segment", "after", maintain_order=True)
    for (segment, _), pushes in apart:
        if segment in chosen:
            yield chosen[segment], _without_late(pushes, chosen[segment]["workers"])


class _Odd(NamedTuple):
    """What is odd in the pushes of some settings; `_segment` adds to it."""

    crowded: set[int]  # numbers of settings in which more workers pushed than they have
    quiet: list[str]  # runs in which fewer workers pushed than a setting has, once for each setting
    gaps: list[float]  # part of the iterations that has no row, of each setting in which some have none
    partly: list[str]  # the time in which all workers push, of each setting in which some begin late or end early
    stopped: list[str]  # how long a worker stood still, of each setting in which one did
    unclear: list[str]  # the run of each setting of which it is not clear whether rows are missing
    uneven: list[str]  # how often workers pushed, of each setting with a barrier in which that differs


def _segment(
    setting: dict[str, Any],
    pushes: pl.DataFrame,
    stops: Sequence[tuple[float, float]],
    branches: int,
    sampled: bool,
    odd: _Odd,
) -> Segment | None:
    """The segment of a setting's pushes; None where they are too few, or of more workers than the setting has. `sampled` as
    in `_sampled`, of its run."""
    if stops:
        odd.stopped.append(f"{setting['run']} for {max(high - low for low, high in stops):.3g} s")
        pushes = _between(pushes, stops)
    alone = branches == 1
    if alone:
        pushes, told = _while_all_push(setting["run"], pushes)
        odd.partly.extend([told] if told else [])
    each = max(setting["workers"], 1)
    cycles, pushing = pushes.height // each, pushes["worker"].n_unique()
    if pushing > each:
        odd.crowded.add(setting["segment"])
    if cycles < FEWEST or pushing > each:
        return None
    if pushing < each:
        odd.quiet.append(setting["run"])
    first = max(1, int(_WARM_UP * cycles)) * each
    kept = pushes.slice(first - 1, (cycles * each) - first + 1)
    absent, lacking = (_not_recorded(part, sampled) if alone else 0 for part in (pushes, kept.slice(1)))
    if alone and not absent and _are_unclear(pushes, sampled):
        odd.unclear.append(setting["run"])
    counts = kept["worker"].value_counts()["count"].sort().to_list()
    if alone and not absent and setting["policy"] in SYNCHRONOUS and counts[-1] - counts[0] > max(1.0, _UNEVEN * counts[-1]):
        odd.uneven.append(f"{setting['run']} {counts[0]} and {counts[-1]} times")
    if absent:
        odd.gaps.append(absent / (pushes.height + absent))
    seconds = float(pushes["seconds"][-1] - pushes["seconds"][0])
    return Segment(setting, kept, branches, pushing, lacking, pushes.height + absent, seconds)


def _notes(odd: _Odd, found: Sequence[Segment], *, short: int, silent: int) -> Iterator[str]:
    """What is not used, or is odd, in sentences; `short` settings and `silent` runs gave no segment."""
    if odd.crowded:
        count = len(odd.crowded)
        yield f"{count} settings are left out: more workers pushed than they have; record the change of the setting"
    if odd.gaps:
        yield (
            f"in {len(odd.gaps)} settings some iterations have no row, {median(odd.gaps):.1%} in the median, by the numbers "
            "of the others: cycles are counted with them"
        )
    if odd.unclear:
        yield (
            f"in {len(odd.unclear)} settings clocks count neither each worker's iterations nor those of all together: "
            f"{first_of(sorted({*odd.unclear}))}; every iteration is taken to have a row: if only some do, cycles are "
            "shorter; number the iterations of each worker, from 0"
        )
    if odd.uneven:
        yield (
            f"in {len(odd.uneven)} settings of {' or '.join(SYNCHRONOUS)} some workers pushed more often than others: "
            f"{first_of(odd.uneven)}; do they wait for each other? If none waits, the policy is asp"
        )
    if odd.partly:
        yield (
            f"in {len(odd.partly)} settings some workers begin to push late or end early: only the time is used in which "
            f"all push: {first_of(odd.partly)}; were workers lost, or do the clocks of machines differ?"
        )
    if odd.stopped:
        yield (
            f"in {len(odd.stopped)} settings a worker stood still by itself: {first_of(odd.stopped)}; only the longest time "
            "without such a stop is used, and predictions have none: how often they occur is not told by so few"
        )
    if drifting := _drifting(found):
        yield (
            f"in {len(drifting)} of {len(found)} settings cycles are not steady: {first_of(drifting)}; "
            "record for longer, or leave out what is not like the rest, such as a slow start"
        )
    if short:
        yield f"{short} settings are left out: they have less than {FEWEST} iterations of each worker"
    if silent:
        yield f"{silent} runs are left out: they have no iterations, and others have; calibrate to them alone"
    if odd.quiet:
        yield (
            f"in {len(odd.quiet)} settings fewer workers pushed than they have: cycles are those of the ones that did; was "
            "one lost, or is it not recorded?"
        )


class _Drift(NamedTuple):
    """How a segment's cycles, without the warm-up, go on."""

    run: str
    early: float  # mean of the first third, seconds
    late: float  # of the second half
    varies: float  # relative variance of the latter, of a cycle, by means of batches
    counts: tuple[int, int]  # cycles of both
    batches: int
    barrier: bool


def _drifting(segments: Sequence[Segment]) -> list[str]:
    """The segments whose early cycles differ from late ones by more than how the late ones vary explains (Geweke 1992,
    Evaluating the accuracy of sampling-based approaches): a t-test of each, by Bonferroni's correction.

    Few batches may be alike by chance: they count as varying as those of the usual segment, at least.
    """
    seen = [drift for drift in map(_drift, segments) if drift is not None]
    usual = {kind: median([d.varies for d in seen if d.barrier == kind] or [0.0]) for kind in (False, True)}
    found = []
    for drift in seen:
        error = math.sqrt(max(drift.varies, usual[drift.barrier]) * sum(1 / n for n in drift.counts))
        by_chance = error * float(t.ppf(1 - _BY_CHANCE / 2 / len(seen), drift.batches - 1))
        if abs(math.log(drift.early / drift.late)) > max(_UNSTEADY, by_chance):
            found.append(f"{drift.run} from {drift.early:.3g} to {drift.late:.3g} s")
    return found


def _drift(segment: Segment) -> _Drift | None:
    cycles = segment.cycles
    early, late = cycles[: len(cycles) // 3], cycles[len(cycles) // 2 :]
    varies, batches = variance_of(late)
    if segment.branches > 1 or batches < FEWEST or not min(early.mean(), late.mean()) > 0:
        return None
    counts = len(early), len(late)
    return _Drift(segment.setting["run"], float(early.mean()), float(late.mean()), varies, counts, batches, segment.barrier)


def _sampled(iterations: pl.DataFrame) -> set[str]:
    """The runs whose clocks number each worker's own iterations although they mostly do not follow each other, as where
    every tenth was logged: workers have the same clocks. Numbers of the job's steps are of one worker each."""
    crowd = pl.col("worker").n_unique()
    shared = iterations.select("run", "worker", "clock", both=crowd.over("run", "clock") > 1)
    each = shared.group_by("run", "worker").agg(pl.col("both").mean())
    runs = each.group_by("run").agg(most=pl.col("both").max(), workers=pl.len())
    return {*runs.filter((pl.col("workers") == 1) | (pl.col("most") > _MOSTLY))["run"]}


def _not_recorded(pushes: pl.DataFrame, sampled: bool) -> int:
    """How many pushes between the first and the last of each worker have no row, by the gaps in a worker's clocks.

    0 of a worker whose clocks mostly do not follow each other, unless its run is `sampled`: they are numbers of the job's
    steps, then.
    """
    apart = pl.col("clock").diff().drop_nulls()
    each = pushes.group_by("worker").agg(missing=(apart - 1).sum(), usual=apart.median(), least=apart.min())
    return int(each.filter((pl.col("usual") == 1) | sampled, pl.col("least") >= 1)["missing"].sum())


def _are_unclear(pushes: pl.DataFrame, sampled: bool) -> bool:
    """Whether clocks are numbered neither for each worker, one after the other, nor for all workers together: then nobody
    knows how many iterations have no row."""
    usual = pushes.group_by("worker").agg(pl.col("clock").diff().drop_nulls().median())["clock"]
    numbers = int(pushes["clock"].max()) - int(pushes["clock"].min()) + 1  # type: ignore[arg-type]
    return not sampled and (usual > 1).any() and numbers > _ALL * pushes.height


def _without_late(pushes: pl.DataFrame, workers: int) -> pl.DataFrame:
    """The pushes without those of workers that end in the warm-up, where more pushed than there are: these belong to the
    setting before. They were in flight when it ended, or a machine's clock is late."""
    if pushes["worker"].n_unique() <= workers:
        return pushes
    later = pushes.slice(max(1, int(_WARM_UP * pushes.height)))["worker"].unique()
    return pushes.filter(pl.col("worker").is_in(later.implode())) if len(later) == workers else pushes


def _stops(pushes: pl.DataFrame, sampled: bool) -> list[tuple[float, float]]:
    """From when to when a worker of a segment stood still: a few times between two of its pushes that are far longer than
    all others of it, and a good part of the segment. Those that begin within a cycle are one, as all wait at a barrier or
    for a server, unless each has computed for that long."""
    least = _ENDED * float(pushes["seconds"][-1] - pushes["seconds"][0])
    found, usual = list[tuple[float, float, bool]](), 0.0
    for _, own in pushes.group_by("worker", maintain_order=True):
        seconds, clocks = own["seconds"].to_numpy(), np.diff(own["clock"].to_numpy())
        # Where rows are missing, a time is that of several mini-batches.
        each = np.diff(seconds) / (np.maximum(clocks, 1) if len(clocks) and (sampled or np.median(clocks) == 1) else 1)
        longest = np.argsort(-each, kind="stable")[: FEW + 1]
        count = max(
            (k for k, (i, j) in enumerate(pairwise(longest), 1) if each[i] > max(_SILENT * each[j], least)), default=0
        )
        usual = max([usual, *each[longest[count : count + 1]]])
        computed = own["compute_seconds"].fill_null(0.0).to_numpy()[1:] > each / 2
        found += [(seconds[i], seconds[i + 1], bool(computed[i])) for i in longest[:count]]
    apart, alone = list[tuple[float, float]](), True
    for low, high, computing in sorted(found):
        if apart and low - apart[-1][0] <= usual and not (alone and computing):
            apart[-1] = (apart[-1][0], max(high, apart[-1][1]))
            alone |= computing
        else:
            apart.append((low, high))
            alone = computing
    return apart


def _rare_stops(
    parts: Sequence[tuple[dict[str, Any], pl.DataFrame]], branches: Mapping[str, int], sampled: Collection[str]
) -> list[list[tuple[float, float]]]:
    """The `_stops` of each part, a setting and its pushes; none where they are so many that they are a part of what a cycle
    takes, or where all are within the warm-up."""
    stops = [_stops(of, s["run"] in sampled) if branches[s["run"]] == 1 else [] for s, of in parts]
    # One within the warm-up, which is left out, does not count; but a time without stops must not have it inside.
    warm = [float(pushes["seconds"][int(_WARM_UP * pushes.height)]) for _, pushes in parts]
    counted = [sum(high > over for _, high in of) for of, over in zip(stops, warm, strict=True)]
    if not 0 < sum(counted) < max(FEW, RARE * sum(pushes.height for _, pushes in parts)):
        return [[]] * len(parts)
    return [of if count else [] for of, count in zip(stops, counted, strict=True)]


def _between(pushes: pl.DataFrame, stops: Sequence[tuple[float, float]]) -> pl.DataFrame:
    """The pushes of the longest time without `stops`, which are in the order of their beginnings."""
    begins = [pushes["seconds"][0], *accumulate((high for _, high in stops), max)]
    ends = [*(low for low, _ in stops), pushes["seconds"][-1]]
    low, high = max(zip(begins, ends, strict=True), key=lambda part: part[1] - part[0])
    return pushes.filter(pl.col("seconds").is_between(low, high))


def _while_all_push(run: str, pushes: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The pushes from when all workers have begun to push until the first one ends; and of which run and seconds these are,
    in words, or "" where all push in the whole time.

    A worker has ended, or not begun, where it is silent for far longer than between any two of its pushes: it was lost, or
    has done as many mini-batches as each was to do. What begins late is left out with the warm-up.
    """
    begin, end = pushes["seconds"][0], pushes["seconds"][-1]
    each = pushes.group_by("worker", maintain_order=True).agg(
        pl.col("seconds").first().alias("first"),
        pl.col("seconds").last().alias("last"),
        apart=_SILENT * pl.col("seconds").diff().max(),
    )
    late = each.filter(pl.col("first") - begin > pl.max_horizontal("apart", _WARM_UP * (end - begin)))
    ended = each.filter(end - pl.col("last") > pl.max_horizontal("apart", _ENDED * (end - begin)))
    if not late.height and not ended.height:
        return pushes, ""
    low, high = max([begin, *late["first"]]), min([end, *ended["last"]])
    kept = pushes.filter(pl.col("seconds").is_between(low, high))
    if low > high:
        return kept, f"{run}, in which they never do"
    return kept, f"{run} from {low - begin:.3g} to {high - begin:.3g} of {end - begin:.3g} s"
