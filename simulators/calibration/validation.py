"""The error of the simulator's predictions, on recorded rows that it was fitted to and on rows that were held out.

A combination is a policy, a number of workers and a number of servers. Held out are whole combinations, with all batch sizes
and all runs, so that nothing is predicted from a setting that differs in its batch alone:

* cross-validation: the combinations of each workload are shuffled once, and combination i is in fold i mod N;
* small to large: fitted to the lower half of the numbers of workers, the rows with more workers are predicted;
* equal to unlike hosts: fitted to rows whose machines are all alike, the other rows are predicted;
* other recordings (`check_other`): fitted to some recordings, another one is predicted. Where most of its rows are of larger
  clusters, or of hosts unlike in their speeds, links or delays while those of the fit are alike, this is one of the
  extrapolations above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.calibration.fit import Fit, closed_form_computing, fit_all
from simulators.calibration.links import Sharing
from simulators.calibration.model import Constants
from simulators.calibration.output import Provenance
from simulators.calibration.predictions import (
    HELD_OUT,
    LARGER,
    OTHER,
    UNLIKE,
    Forms,
    Prediction,
    forms_of,
    left_out,
    order_of,
    predictions_of,
    with_speeds_by,
)
from simulators.calibration.recorded.efforts import LEVEL, Effort
from simulators.calibration.recorded.recordings import Recording, with_links_of
from simulators.calibration.recorded.row import Row
from simulators.calibration.staleness import fitted_rate, proxy_ratio, ratio
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.reconfiguration import Load, plan_of
from tuners.actions import Setting

__all__ = [
    "FOLDS",
    "STALE",
    "Ablation",
    "Check",
    "Lack",
    "ablated",
    "as_chosen",
    "check",
    "check_other",
    "extrapolations",
    "in_folds",
    "lacking",
    "split_of_others",
]

FOLDS = 5
STALE = "mini-batches, asynchronous over synchronous"
_NOTICED = 0.1  # of a cycle: a difference of computing that is told
_UNITS = 100.0  # factor between recorded and predicted cycles beyond which they may have different units
_DISCIPLINES = {
    "uneven": "uneven shares of links",
    "fifo": "links that serve first come, first served",
    "serial": "servers that do one thing at a time",
}
"""What an ablation calls each way to share links, but the even one that stands for it."""


class Lack(NamedTuple):
    """What a fit begins with, where one part of the physics may be left out."""

    given: Mapping[str, Constants]  # by workload
    without: tuple[str, ...] = ()  # constants that stay as given
    links: tuple[Sharing, ...] = ()  # forms to choose from, in every fit


class Ablation(NamedTuple):
    """The same predictions of cycles by a simulator that lacks one part of its physics; the constants were fitted again."""

    lacks: str
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """A recording and its predictions."""

    origin: Provenance
    predictions: tuple[Prediction, ...]
    fits: Mapping[str, Fit]
    undivided: tuple[str, ...]  # workloads with one combination, of which nothing can be held out
    folds: int  # 0: fitted to other recordings
    caveats: tuple[str, ...]
    fitted_to: str = ""  # the other recordings
    ablations: tuple[Ablation, ...] = ()


def check(
    recording: Recording,
    given: Mapping[str, Constants],
    origin: Provenance,
    folds: int = FOLDS,
    watch: Callable[[str], None] = lambda _: None,
    links: Sequence[Sharing] = (),
) -> Check:
    """Fit to all rows, and to the rows of every split; predict. Raises ValueError without rows, and for one fold.

    How links are shared is chosen from `links` in each fit, so that no held-out row takes part in it. `watch` is told what
    is fitted next.
    """
    if folds < 2:
        raise ValueError(f"Cannot hold out with {folds} folds: give at least 2, which are halves.")
    fits = fit_all(recording.rows, given, watch=watch, links=links)
    rows = _in_order(recording)
    _, undivided = in_folds(rows, folds)
    network = fit_all(recording.rows, as_chosen(given, fits), engine=False)
    fitted = forms_of(fits, network, rows, rows, range(len(rows)))
    made: list[Prediction] = []
    for split, out, held in _held_out(rows, Lack(given, links=tuple(links)), folds, watch):
        made += predictions_of(rows, out, split, fitted.at(out), held)
    others = (*_switches(recording.switch_seconds, folds), *_stale(recording.efforts))
    return Check(origin, (*made, *others), fits, undivided, folds, recording.caveats)


def ablated(
    recording: Recording, lack: Lack, folds: int = FOLDS, watch: Callable[[str], None] = lambda _: None
) -> tuple[Prediction, ...]:
    """What `check` predicts of cycles that are not fitted by the simulator, where a part of the physics is left out."""
    rows, made = _in_order(recording), list[Prediction]()
    for split, out, held in _held_out(rows, lack, folds, watch, alone=True):
        made += predictions_of(rows, out, split, Forms.empty(len(out)), held, whole=False)
    return tuple(made)


def _in_order(recording: Recording) -> list[Row]:
    return sorted(recording.rows, key=lambda r: (r.workload, order_of(r), r.run))


def _held_out(
    rows: Sequence[Row], lack: Lack, folds: int, watch: Callable[[str], None], *, alone: bool = False
) -> Iterator[tuple[str, list[int], Forms]]:
    """For every split, its name, the rows that it holds out, and their predictions.

    `alone`: of cycles only, by the simulator and the plain form.
    """

    def told(kept: Sequence[Row], out: Sequence[int]) -> Forms:
        found = fit_all(kept, lack.given, without=lack.without, links=lack.links, wanted=[rows[i] for i in out])
        shared = as_chosen(lack.given, found)
        network = {} if alone else fit_all(kept, shared, without=lack.without, engine=False)
        return forms_of(found, network, kept, rows, out, whole=not alone)

    held, (fold_of, _) = Forms.empty(len(rows)), in_folds(rows, folds)
    for fold in range(folds):
        out = [i for i, f in enumerate(fold_of) if f == fold]
        kept = [r for r, f in zip(rows, fold_of, strict=True) if f != fold]
        if out and kept:
            watch(f"fold {fold + 1} of {folds}: fitting {len(kept)} rows, predicting {len(out)}")
            held.put(out, told(kept, out))
    yield HELD_OUT, list(range(len(rows))), held._replace(plain=left_out(rows))
    for split, kept_at, out in extrapolations(rows):
        watch(f"{split}: fitting {len(kept_at)} rows, predicting {len(out)}")
        yield split, out, told([rows[i] for i in kept_at], out)


def check_other(
    fits: Mapping[str, Fit],
    known: Recording,
    other: Recording,
    origin: Provenance,
    fitted_to: str = "",
    *,
    network: Mapping[str, Fit] | None = None,
    whole: bool = True,
) -> Check:
    """Predict every row of another recording with `fits`, which were made of `known`; `origin` is that of the other one.

    `network` are fits of the closed form to `known` (`fit_all` without engine); None: it predicts nothing. One workload on
    each side counts as the same job, whatever its names. Without `whole`, only cycles are predicted.

    Raises ValueError if otherwise no workload is common to both, or if a row is in both.
    """
    jobs, caveats = {row.workload for row in other.rows}, []
    same_job = len(jobs) == len(fits) == 1
    if not (jobs & fits.keys() or same_job):
        raise ValueError(
            f"Cannot predict {', '.join(sorted(jobs)) or 'a recording without rows'} from a fit to {', '.join(fits)}: "
            "name recordings that have a workload in common."
        )
    linked = with_links_of(other, known)
    seen = {row.identity for row in known.rows}
    if common := sum(row.identity in seen for row in linked.rows):
        raise ValueError(
            f"Cannot predict {common} rows that are fitted as well: select others, for example with [runs=...]."
        )
    known_rows = known.rows
    if same_job and jobs != fits.keys():
        (ours,), (theirs,) = fits, jobs
        caveats.append(f"{theirs} is predicted as the same job as {ours}")
        fits = {theirs: fits[ours]}
        network = {theirs: network[ours]} if network else None
        known_rows = tuple(replace(row, workload=theirs) for row in known.rows)
    rows = _in_order(linked)
    everything = range(len(rows))
    held = forms_of(fits, network or {}, known_rows, rows, everything, whole=whole)
    caveats += linked.caveats
    if missing := sorted(jobs - fits.keys()):
        caveats.append(f"not predicted, as no fitted recording has them: {', '.join(missing)}")
    caveats += _other_units(rows, held.simulator.cycle.seconds)
    caveats += _other_speeds(rows, fits)
    split = split_of_others(known_rows, rows)
    made = predictions_of(rows, everything, split, Forms.empty(len(rows)), held, whole=whole)
    return Check(origin, tuple(made), fits, (), 0, tuple(caveats), fitted_to)


def _other_units(rows: Sequence[Row], predicted: NDArray[np.float64]) -> list[str]:
    """A note where the recorded cycles of `rows` may have another unit than those `predicted`, [n]; none where they are
    near."""
    known = [r.cycle_seconds / at for r, at in zip(rows, predicted, strict=True) if at > 0]
    times = median(known) if known else 1.0
    if 1 / _UNITS < times < _UNITS:
        return []
    return [
        f"recorded cycles take {times:.3g} times as long as predicted ones: are the times of both recordings in seconds?"
    ]


def _other_speeds(rows: Sequence[Row], fits: Mapping[str, Fit]) -> list[str]:
    """Notes where the machines of `rows` may compute faster or slower than those fitted to: a run tells its workers' speeds
    only relative to each other."""
    found = []
    for name, fit in fits.items():
        # Whether recorded computing has the delays of links in it, only fitted rows with delayed links tell.
        known = [r for r in rows if r.workload == name and (not r.delays or "delay_messages" in fit.intervals)]
        timed = [r for r in with_speeds_by(fit, known) if r.has_parts]
        if not timed:
            continue
        told = closed_form_computing(fit.constants, timed)
        recorded, cycle = np.array([(r.compute_seconds, r.cycle_seconds) for r in timed]).T
        if abs(float(np.median((recorded - told) / cycle))) > _NOTICED:
            found.append(
                f"mini-batches took {float(np.median(recorded / told)):.2g} times as long to compute as by the fit: are the "
                "machines as fast as those fitted to? Speeds are told of the workers of a run, relative to each other"
            )
    return found


def split_of_others(known: Sequence[Row], rows: Sequence[Row]) -> str:
    """What it is to predict `rows` from `known` ones: most of them may be of a kind that no known row is of."""
    largest = max(r.workers for r in known)
    if 2 * sum(r.workers > largest for r in rows) > len(rows):
        return LARGER
    seen = frozenset[str]().union(*(r.unlike for r in known))
    return UNLIKE if 2 * sum(bool(r.unlike - seen) for r in rows) > len(rows) else OTHER


def as_chosen(given: Mapping[str, Constants], fits: Mapping[str, Fit]) -> dict[str, Constants]:
    """The initial constants with links that are shared as the `fits` have them."""
    shared = {name: Sharing.of(fit.constants) for name, fit in fits.items()}
    return {name: shared[name].put_into(c) if name in shared else c for name, c in given.items()}


def lacking(given: Mapping[str, Constants], rows: Sequence[Row] = ()) -> dict[str, Lack]:
    """What to fit without one part of the physics, by the name of the part: of those that the initial constants and `rows`
    have."""
    shared = next((c.discipline for c in given.values()), "maxmin")
    parts: dict[str, Callable[[Constants], Constants]] = {
        "requests behind queued pushes": lambda c: replace(c, control_queue=0.0),
        _DISCIPLINES.get(shared, "shares of links"): lambda c: replace(c, discipline="maxmin", uneven_bytes=0.0),
        "pauses of computing": lambda c: replace(c, sleeps=None),
        "the switch in the middle": lambda c: replace(c, switch="none"),
        "threads of servers": lambda c: replace(c, server_threads=1),
        "updates that grow with workers": lambda c: replace(c, updates_grow=False),
    }
    if any(r.unlike_servers for r in rows):
        parts["flows that end by themselves"] = lambda c: replace(c, independent_flows=False)
    if any(r.sleeps for r in rows):
        parts["how stragglers' sleeps vary"] = lambda c: replace(c, sleeps_vary=False)
    if any(r.snapshot_clocks for r in rows):
        parts["snapshots of the servers"] = lambda c: replace(c, snapshots=False)
    made = {part: Lack({job: without(c) for job, c in given.items()}) for part, without in parts.items()}
    found = {part: less for part, less in made.items() if less.given != dict(given)}
    if any(r.delays for r in rows):
        undelayed = {job: replace(c, delay_messages=0.0) for job, c in given.items()}
        found["delays of links"] = Lack(undelayed, ("delay_messages",))  # fitted, where runs with and without tell it
    return found | {
        "updates at the servers": Lack(given, ("apply_seconds", "apply_exponent")),
        "messages of a coordinator": Lack(given, ("commit_seconds",)),
        "the cost of a synchronous step": Lack(given, ("step_seconds", "master_sample_seconds")),
    }


def in_folds(rows: Sequence[Row], count: int) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The fold of each row, -1 for none, and the workloads with one combination only."""
    folds, undivided = np.full(len(rows), -1), []
    for name in dict.fromkeys(r.workload for r in rows):
        mine = [i for i, r in enumerate(rows) if r.workload == name]
        found = sorted({rows[i].combination for i in mine})
        if len(found) == 1:
            undivided.append(name)
            continue
        # In their order, every second combination may have the same number of servers, and a half would never see another.
        order = np.random.default_rng(0).permutation(len(found))
        fold_of = {found[k]: i % count for i, k in enumerate(order)}
        folds[mine] = [fold_of[rows[i].combination] for i in mine]
    return folds, tuple(undivided)


def extrapolations(rows: Sequence[Row]) -> list[tuple[str, list[int], list[int]]]:
    """The name, the rows to fit and the rows to predict of each extrapolation that the rows allow."""
    middle: dict[str, int] = {}  # most workers of the lower half, where a workload has several numbers of workers
    for name in {r.workload for r in rows}:
        sizes = sorted({r.workers for r in rows if r.workload == name})
        middle[name] = sizes[(len(sizes) - 1) // 2]
    large = [r.workers > middle[r.workload] for r in rows]
    unlike = [bool(r.unlike) for r in rows]
    found = []
    for split, far in ((LARGER, large), (UNLIKE, unlike)):
        kept = [i for i, f in enumerate(far) if not f]
        jobs = {rows[i].workload for i in kept}
        out = [i for i, f in enumerate(far) if f and rows[i].workload in jobs]
        if kept and out:
            found.append((split, kept, out))
    return found


def _switches(recorded: Sequence[float], folds: int) -> tuple[Prediction, ...]:
    """Predictions of a change of the policy, by the simulator's own plan; the baseline is the mean."""
    if not recorded:
        return ()
    before = Setting(workers=("a",), servers=("b",), policy="bsp")
    after = replace(before, policy="asp")

    def planned(known: Sequence[float]) -> float:
        costs = Costs(policy_restart_seconds=median(known))
        plan = plan_of(before, after, "checkpoint", Load(0.0, 0, 0.0), costs)
        return sum(step.seconds for step in plan.steps)

    made = []
    for i, seconds in enumerate(recorded):
        others = [s for j, s in enumerate(recorded) if j % folds != i % folds] or [float("nan")]
        plain = (float(np.mean(recorded)), float(np.mean(others)))
        made.append(Prediction("switch of policy", str(i), "switch", seconds, planned(recorded), planned(others), *plain))
    return tuple(made)


def _stale(recorded: Sequence[Effort]) -> tuple[Prediction, ...]:
    """Predictions of the staleness ratio in each half of the runs from the other half; the baseline ignores staleness: 1."""
    made = []
    for name in dict.fromkeys(e.workload for e in recorded):
        mine = [e for e in recorded if e.workload == name]
        halves: tuple[list[Effort], list[Effort]] = ([], [])
        for policy in ("asp", "bsp"):
            alike = [e for e in mine if e.policy == policy]
            for half in (0, 1):
                halves[half].extend(alike[half::2])
        known = [(half, ratio(half), ratio(rest)) for half, rest in (halves, halves[::-1])]
        if not all(np.isfinite(value) for _, *values in known for value in values):
            continue
        workers = mine[0].workers
        fitted = proxy_ratio(fitted_rate(ratio(mine), workers), workers)
        for i, (_, seen, others) in enumerate(known):
            held = proxy_ratio(fitted_rate(others, workers), workers)
            made.append(Prediction(STALE, str(i), f"{name}, {100 * LEVEL:g} % of the best", seen, fitted, held, 1.0, 1.0))
    return tuple(made)
