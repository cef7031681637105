"""Tables of Cruise and TensorFlowOnline: published, the paper's form, the public code's, and ours.

    python -m reports.papers.cruise_and_bo_online [table_i] [table_iii] [fig_8] [fig_7] [table_v] [table_vi]

prints a Markdown table for each part; all figures but the published ones are measured now. Of Cruise: the ratios of Table I
as its models predict them from the scenario's constants, what it chooses from every start of Table III, on its mixed
cluster (Fig. 8), and when machines join and leave (Fig. 7). Of TensorFlowOnline: completion, and changes by relocation and
by checkpoint (Tables III and V), and the rank of the estimated optimum (Table VI). Fig. 4 of either paper has no figures.

The last two parts take from minutes to hours: `--seeds 0 1` names the seeds of Table V, `--settings` is the number of random
settings of Table VI, `--every 10` looks at every tenth of its segments, and `--arenas tf36-svm` and `--forms ours` leave the
other scenarios and forms out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

import harness.scenario as scenario
from harness.drive import Played, play
from reports.papers.cruise_reach import MODELS, kinds_of
from reports.papers.grid import (
    CRUISE,
    TABLE_III,
    TENSORFLOWONLINE,
    grid,
    loaded,
    played,
    relative_performance,
    run_to_target,
)
from tuners.actions import Cost, Job, Method, Pushes, Reconfigure, Rejected, Run, Setting, System, TunerFactory, Window
from tuners.baselines.best_fixed import candidates
from tuners.bo_online import bo_online
from tuners.bo_online.convergence import ESTIMATORS, Estimator, Form, LossCurve
from tuners.bo_online.job_fit import Levels, fitted_job, likeness, measured_levels, never_rising
from tuners.bo_online.repository import Stretch, threshold, triples
from tuners.bo_online.tuner import kind_of, stretch_clocks
from tuners.cruise.placement import Problem, ServerTerm
from tuners.cruise.split import epoch_seconds as model_seconds

__all__ = [
    "FORMS",
    "MIGRATIONS",
    "MIXED_DROPS",
    "TABLE_V",
    "estimate_options",
    "estimates",
    "last_setting",
    "main",
    "migration",
    "model_ratios",
    "rank_of_estimate",
    "reconfigurations",
    "seconds_per_push",
    "tuned",
]

# TensorFlowOnline as its paper says, as its public code does, and by default. Options that neither names are the defaults.
_NOT_OURS: dict[str, Any] = {"pooled": False, "careful": False, "apart": False}
FORMS: dict[str, dict[str, Any]] = {
    "paper": _NOT_OURS
    | {
        "clocks_per_worker": 3,
        "per": "workers",
        "design": "random",
        "estimator": "paper",
        "surrogate": "paper",
    },
    "code": _NOT_OURS
    | {
        "counting": "code",
        "design": "centred",
        "repeats": "contiguous",
        "state": "last",
        "incumbent": "last",
        "gate": False,
        "estimator": "code",
        "surrogate": "code",
    },
    "ours": {},
}

_MOST_CLOCKS = 60_000  # of a random setting; one that takes more counts as not reaching the target

# Table V: number of reconfigurations; seconds of one by checkpoint and by relocation. Table VI: rank among 100 settings.
TABLE_V = {"tf36-logr": (37, 47, 12), "tf36-svm": (50, 13, 2), "tf36-cifar": (26, 16, 2), "tf36-imagenet8": (24, 40, 6)}
_TABLE_VI = {"tf36-logr": 3.3, "tf36-svm": 2.0, "tf36-cifar": 22.0, "tf36-imagenet8": 13.0}


# ---------------------------------------------------------------------------------------------------------------- Cruise

MIGRATIONS = {((18, 14), (22, 10)): 31.3, ((14, 2), (25, 7)): 87.3, ((25, 7), (12, 4)): 98.4}
"""Secs. V-D and V-F: seconds of a reconfiguration of NMF between two numbers of workers and servers."""
MIXED_DROPS = {"nmf": 0.352, "mlr": 0.583, "lda": 0.413}
"""Sec. V-E: fall of the time per push on two kinds of machines."""


def tuned(name: str, tuner: TunerFactory, seed: int = 0, start: Setting | None = None) -> Played:
    """One run of the tuner on the scenario."""
    return play(tuner, scenario.system(scenario.load(name), seed, start))


def last_setting(run: Played) -> Setting:
    """The setting at the end of a run."""
    found = [e.answer.setting for e in run.exchanges if isinstance(e.answer, Window) and e.answer.setting is not None]
    return found[-1] if found else run.job.start


def reconfigurations(run: Played) -> Iterator[tuple[float, Setting, Cost]]:
    """The end of each reconfiguration in seconds, its new setting, and its cost."""
    for e in run.exchanges:
        if isinstance(e.action, Reconfigure) and isinstance(e.answer, Cost):
            yield e.seconds, e.action.setting, e.answer


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield _row(*("---" for _ in names))


def model_ratios(name: str, term: ServerTerm) -> dict[int, float]:
    """By number of workers: the epoch that a cost model, told the scenario's constants, predicts over that of its best."""
    found = scenario.load(name)
    job = scenario.job(found)
    (kind,), _ = kinds_of(found)
    problem = Problem(
        kinds=(kind,),
        samples=job.samples,
        batch_size=job.start.batch_size,
        model_bytes=job.model_bytes,
        # At a barrier all workers pull at once.
        server_term="own" if term == "queue" and job.start.waits_for_all else term,
    )
    epochs = {w: model_seconds(w, kind.count - w, problem) for w in range(1, kind.count)}
    return {w: seconds / min(epochs.values()) for w, seconds in epochs.items()}


def _table_i() -> Iterator[str]:
    """Epoch over that of the best split: the simulator's, and the models' own."""
    yield from _head("Table I", "(workers, servers)", "published", "simulated", "paper's model", "public code", "ours")
    terms: tuple[ServerTerm, ...] = ("paper", "sum", "queue")
    for name, rows in CRUISE.items():
        simulated, models = grid(name), [model_ratios(name, term) for term in terms]
        least = min(simulated.values())
        for split, ratio in rows.items():
            predicted = (f"{model[split[0]]:.3f}" for model in models)
            yield _row(name, split, f"{ratio:.3f}", f"{simulated[split] / least:.3f}", *predicted)


def _table_iii() -> Iterator[str]:
    """The split at the end, and its epoch beside that of the best."""
    yield from _head("Table III", "start", "best here", "published", "paper's model", "public code", "ours")
    for name, start, choice, _, performance, fell in TABLE_III:
        begin = loaded(name)[1].space.setting({"worker_count": start[0]})
        found = grid(name)
        cells = []
        for tuner in (MODELS["paper"], MODELS["code"], MODELS["default"]):
            end = last_setting(tuned(name, tuner, start=begin))
            chosen = (len(end.workers), len(end.servers))
            cells.append(_chosen(chosen, relative_performance(name, chosen), 1 - found[chosen] / found[start]))
        yield _row(name, start, min(found, key=found.__getitem__), _chosen(choice, performance, fell), *cells)


def _chosen(split: tuple[int, int], performance: float, fell: float) -> str:
    return f"{split}: {performance:.1%} of the best, epoch {-fell or 0.0:+.1%}"


def _fig_8() -> Iterator[str]:
    """The mixed cluster: (slow + fast workers, slow + fast servers), and the epoch after the change."""
    yield from _head("Fig. 8, Sec. V-E", "published", "paper's model", "public code", "ours")
    for short, drop in MIXED_DROPS.items():
        name, published = f"cruise-{short}-mixed", f"{'(20+4, 8+0), ' if short == 'nmf' else ''}{-drop:.1%}"
        cells = []
        for tuner in (MODELS["paper"], MODELS["code"], MODELS["default"]):
            run = tuned(name, tuner)
            last = last_setting(run)
            roles = [sum(n.startswith(p) for n in group) for group in (last.workers, last.servers) for p in ("n", "big")]
            rates = [seconds_per_push(played(name, s, learns=False)) for s in (run.job.start, last)]
            cells.append(f"({roles[0]}+{roles[1]}, {roles[2]}+{roles[3]}), {rates[1] / rates[0] - 1:+.1%}")
        yield _row(name, published, *cells)


def _fig_7() -> Iterator[str]:
    """Machines that join and leave, and the cost of the published plans alone."""
    yield from _head("Fig. 7", "published", "paper's model", "public code", "ours")
    steps = (
        "; ".join(
            f"{seconds:.0f} s: ({len(s.workers)}, {len(s.servers)}) in {cost.seconds:.0f} s"
            for seconds, s, cost in reconfigurations(tuned("cruise-nmf-opportunistic", tuner))
        )
        for tuner in (MODELS["paper"], MODELS["code"], MODELS["default"])
    )
    yield _row("cruise-nmf-opportunistic", "(14, 2); (25, 7) in 87.3 s; (12, 4) in 98.4 s; (25, 7)", *steps)
    for (before, after), published in MIGRATIONS.items():
        yield _row(f"plan {before} to {after}", f"{published} s", "", "", f"{migration(before, after).seconds:.1f} s")


def seconds_per_push(system: System) -> float:
    """Seconds per push, in steady state."""
    workers = len(system.job.start.workers)
    system.perform(Run(clocks=25 * workers))
    window = system.perform(Run(clocks=60 * workers))
    return float(window.seconds / window.clocks)


def migration(start: tuple[int, int], end: tuple[int, int]) -> Cost:
    """The cost of Cruise's plan from one split of NMF's machines to another; machines outside a split are idle."""
    found = scenario.load("cruise-nmf-32")
    names = [n for n, _ in found.cluster.nodes]
    first, then = (
        replace(scenario.job(found).start, workers=tuple(names[:w]), servers=tuple(names[w : w + s]))
        for w, s in (start, end)
    )
    system = scenario.system(found, 0, first)
    system.perform(Run(clocks=25 * start[0]))
    return system.perform(Reconfigure(then, method="migrate"))


# ------------------------------------------------------------------------------------------------------- TensorFlowOnline


@cache
def _random_settings(name: str, count: int) -> tuple[tuple[Setting, Pushes, float], ...]:
    """Random settings of a scenario, each with its pushes and the seconds to the target (infinite if not reached)."""
    found = []
    for setting in candidates(loaded(name)[1], count=count + 1, seed=1)[1:]:
        try:
            window = played(name, setting).perform(Run(clocks=_MOST_CLOCKS))
        except Rejected:
            continue
        found.append((setting, window.pushes, window.end_seconds if window.status == "target" else float("inf")))
    return tuple(found)


def _table_v(arenas: Sequence[str], forms: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    """TensorFlowOnline: completion (Table III), and the cost of changes (Table V), medians and means over seeds."""
    yield from _head("Tables III and V", "method", "published", *forms)
    for name in arenas:
        times, checkpoint, relocation = TABLE_V[name]
        rows = {label: row[5] * row[6] for label, row in TENSORFLOWONLINE[name].items()}
        start = statistics.median(run_to_target(name, loaded(name)[1].start, seed)[1] for seed in seeds)
        yield _row(name, "start setting", f"{rows['average']:.0f} s (Average)", *(f"{start:.0f} s" for _ in forms))
        by_method: tuple[tuple[Method, int], ...] = (("relocate", relocation), ("checkpoint", checkpoint))
        for method, each in by_method:
            cells = [_completion(name, FORMS[form], method, seeds) for form in forms]
            took = f"{rows['tfonline']:.0f} s; " if method == "relocate" else ""
            yield _row(name, method, f"{took}{times} changes of {each} s", *cells)


def _completion(name: str, options: Mapping[str, Any], method: Method, seeds: Sequence[int]) -> str:
    runs = [tuned(name, partial(bo_online, **options, method=method), seed) for seed in seeds]
    costs = [c.seconds for r in runs for _, _, c in reconfigurations(r)]
    took = statistics.median(r.outcome.seconds for r in runs)
    late = sum(r.outcome.status != "target" for r in runs)
    missed = f" ({late} of {len(seeds)} not there)" if late else ""
    return f"{took:.0f} s{missed}; {len(costs) / len(seeds):.0f} changes of {statistics.fmean(costs or [0.0]):.1f} s"


def _table_vi(arenas: Sequence[str], forms: Sequence[str], count: int, every: int) -> Iterator[str]:
    """The mean true rank of the setting that is estimated best, over segments, or over every `every`-th of them."""
    yield from _head("Table VI", "published, of 100", *(f"{form}, of {count}" for form in forms))
    for name in arenas:
        job, runs = loaded(name)[1], _random_settings(name, count)
        actual = [seconds if np.isfinite(seconds) else np.nan for _, _, seconds in runs]
        seen = [(setting, pushes) for setting, pushes, _ in runs]
        cells = []
        for form in forms:
            table = estimates(seen, job, every=every, **estimate_options(form))
            most = (~np.isnan(table)).sum(axis=1) >= len(runs) / 2
            half = rank_of_estimate(table[most], actual)
            cells.append(f"{rank_of_estimate(table, actual):.1f} ({half:.1f} while half of them run)")
        yield _row(name, _TABLE_VI[name], *cells)


def estimate_options(form: str) -> dict[str, Any]:
    """The options of `estimates` that a form of the tuner has."""
    return {name: value for name, value in FORMS[form].items() if name in signature(estimates).parameters}


def estimates(
    runs: Sequence[tuple[Setting, Pushes]],
    job: Job,
    *,
    clocks_per_worker: int | None = None,
    per: Literal["nodes", "workers"] | None = None,
    estimator: Form = "ours",
    pooled: bool = True,
    every: int = 1,
) -> NDArray[np.float64]:
    """The remaining seconds that the tuner would estimate, [segments, runs]; nan after the end of a run.

    After every `every`-th segment only, where `every` is more than 1: each takes the time of all before it.

    The options and their defaults are the tuner's, and so is the length of segments. If `pooled`, all settings are estimated
    together from what has been seen of them by then, as the tuner does from its stretches; else each from one segment.
    """
    how = ESTIMATORS[estimator]
    cut = [
        list(_stretches(i, setting, pushes, stretch_clocks(setting, len(job.nodes), clocks_per_worker, per), how))
        for i, (setting, pushes) in enumerate(runs)
    ]
    table = np.full((max(map(len, cut)), len(runs)), np.nan)
    end = threshold(job.target, [], np.nan)
    for at in range(every - 1, len(table), every):
        row = table[at]
        present = [stretches[: at + 1] for stretches in cut if len(stretches) > at]
        efficiency, left = _together(present, end, how) if pooled else (None, 0.0)
        for i, stretches in enumerate(present):
            now = stretches[-1]
            if efficiency is None:
                (alone,) = triples([now], job.target, job.budget_seconds, end, how).triples
                row[int(now.row[0])] = alone.seconds
            else:
                row[int(now.row[0])] = now.seconds / len(now.curve.losses) * left / efficiency[i]
    return table[every - 1 :: every]


def _together(
    runs: Sequence[Sequence[Stretch]], end: float, estimator: Estimator
) -> tuple[NDArray[np.float64] | None, float]:
    """The efficiency of the setting of each run, and the remaining clocks, fitted to all runs as if they were of one job."""
    kinds = list(dict.fromkeys((r[0].curve.workers, r[0].kind) for r in runs))
    of = [kinds.index((r[0].curve.workers, r[0].kind)) for r in runs]
    each = [
        measured_levels([s.curve for s in r], [kind] * len(r), len(kinds), estimator.outliers, most=3)
        for r, kind in zip(runs, of, strict=True)
    ]
    levels = Levels(*(np.concatenate(parts) for parts in zip(*each, strict=True)))
    last = runs[0][-1].curve
    fit = fitted_job(levels, likeness(kinds), last.clocks_before + len(last.losses), end)
    if fit is None:
        return None, 0.0
    spent = np.sum([e.under[-1] for e in each], axis=0)
    return never_rising(kinds, fit.efficiency, spent)[of], fit.clocks_left


def _stretches(column: int, setting: Setting, pushes: Pushes, clocks: int, estimator: Estimator) -> Iterator[Stretch]:
    """A run cut into segments of `clocks`."""
    workers, kind = len(setting.workers), kind_of(setting)
    before = estimator.level(pushes.loss[:clocks], workers, first=True)
    for begin in range(0, len(pushes.loss) - clocks + 1, clocks):
        losses, seconds = pushes.loss[begin : begin + clocks], pushes.seconds[begin : begin + clocks]
        after = estimator.level(losses, workers)
        took = float(seconds[-1] - (pushes.seconds[begin - 1] if begin else 0.0))
        yield Stretch(np.array([float(column)]), LossCurve(losses, before, begin, workers), took, after, kind)
        before = after


def rank_of_estimate(estimated: ArrayLike, actual: ArrayLike) -> float:
    """The mean true rank of the setting that is estimated best, over segments: 1 is a perfect estimate (Table VI).

    `estimated` has a row of remaining seconds per segment and a column per setting. `actual` is either one row, completion
    times (the paper's text), or a row per segment, the seconds that truly remained (its public code). A setting that is nan
    in either has no part in that segment. Equal actual seconds share their mean rank; of equal estimates the truly best
    counts.
    """
    guesses = np.atleast_2d(np.asarray(estimated, float))
    truths = np.broadcast_to(np.asarray(actual, float), guesses.shape)
    ranks = []
    for guess, truth in zip(guesses, truths, strict=True):
        known = ~np.isnan(guess) & ~np.isnan(truth)
        if known.any():
            best = guess[known] == guess[known].min()
            ranks.append(rankdata(truth[known])[best].min())
    return float(np.mean(ranks)) if ranks else np.nan


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cruises = {"table_i": _table_i, "table_iii": _table_iii, "fig_8": _fig_8, "fig_7": _fig_7}
    parser.add_argument("parts", nargs="*", default=list(cruises), choices=[*cruises, "table_v", "table_vi"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--arenas", nargs="+", default=list(TABLE_V), choices=list(TABLE_V))
    parser.add_argument("--settings", type=int, default=100)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    options = parser.parse_args()
    made: dict[str, Callable[[], Iterator[str]]] = {
        **cruises,
        "table_v": partial(_table_v, options.arenas, options.forms, options.seeds),
        "table_vi": partial(_table_vi, options.arenas, options.forms, options.settings, options.every),
    }
    for part in options.parts:
        for line in made[part]():
            print(line, flush=True)  # noqa: T201  # a script
        print(flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
