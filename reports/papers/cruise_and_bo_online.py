"""Cruise and TensorFlowOnline beside the figures that they publish. A program that prints them, measured [published]:

    python -m reports.papers.cruise_and_bo_online [cruise] [bo_online] [rank] [--settings 100]

`cruise`: the choice of Cruise from every start of its Table III, on its mixed cluster (Fig. 8) and when machines join and
leave (Fig. 7), with the paper's model (Eq. 4, pulls added to compute), the public code's, and our default (the servers' own
rates, overlapping pulls). `bo_online`: completion against random settings, and the cost of reconfigurations by relocation
and by checkpoint (Table V). `rank`: the rank of the estimated optimum (Table VI), at the tuner's own options. The last two
run `--settings` random settings of each tf36 scenario and take minutes each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

import harness.scenario as scenario
from harness.drive import Played, play
from reports.papers.grid import TABLE_III, TENSORFLOWONLINE, grid, loaded, played, relative_performance
from tuners.actions import Cost, Job, Method, Pushes, Reconfigure, Rejected, Run, Setting, System, TunerFactory, Window
from tuners.baselines.best_fixed import candidates
from tuners.bo_online import bo_online
from tuners.bo_online.convergence import Estimator, Segment
from tuners.bo_online.job_fit import Levels, fitted_job, likeness, measured_levels, never_rising
from tuners.bo_online.repository import Stretch, threshold, triples
from tuners.bo_online.tuner import kind_of, stretch_clocks
from tuners.cruise import cruise

__all__ = [
    "TABLE_V",
    "estimates",
    "last_setting",
    "main",
    "migration",
    "rank_of_estimate",
    "reconfigurations",
    "seconds_per_push",
    "tuned",
]

_MOST_CLOCKS = 60_000  # of a random setting; one that takes more counts as not reaching the target
_ESTIMATOR = Estimator()

# Table V: number of reconfigurations; seconds of one by checkpoint and by relocation. Table VI: rank among 100 settings.
TABLE_V = {"tf36-logr": (37, 47, 12), "tf36-svm": (50, 13, 2), "tf36-cifar": (26, 16, 2), "tf36-imagenet8": (24, 40, 6)}
_TABLE_VI = {"tf36-logr": 3.3, "tf36-svm": 2.0, "tf36-cifar": 22.0, "tf36-imagenet8": 13.0}


# ---------------------------------------------------------------------------------------------------------------- Cruise


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


def _cruise_lines() -> Iterator[str]:
    """Cruise: Table III, Figs. 8 and 7, and costs of plans."""
    models: dict[str, TunerFactory] = {
        "paper": partial(cruise, server_term="paper", overlap=False),
        "code": partial(cruise, server_term="sum", overlap=False),
        "default": cruise,
    }
    for name, start, choice, _, performance, _ in TABLE_III:
        job = loaded(name)[1]
        begin = job.space.setting({"worker_count": start[0]})
        found = grid(name)
        yield f"{name} {start}: best {min(found, key=found.__getitem__)} [Cruise chose {choice}, {performance:.1%}]"
        for label, tuner in models.items():
            end = last_setting(tuned(name, tuner, start=begin))
            chosen = (len(end.workers), len(end.servers))
            fell = 1 - found[chosen] / found[start]
            yield f"   {label:9} {chosen}, {relative_performance(name, chosen):.1%} of the best; epoch fell by {fell:.1%}"
    for name, published in (("nmf", "(20+4, 8+0), fell by 35.2"), ("mlr", "fell by 58.3"), ("lda", "fell by 41.3")):
        name = f"cruise-{name}-mixed"
        yield f"{name} [{published} %]"
        for label, tuner in models.items():
            run = tuned(name, tuner)
            last = last_setting(run)
            roles = [sum(n.startswith(p) for n in group) for group in (last.workers, last.servers) for p in ("n", "big")]
            rates = [seconds_per_push(played(name, s, learns=False)) for s in (run.job.start, last)]
            yield f"   {label:9} ({roles[0]}+{roles[1]}, {roles[2]}+{roles[3]}); epoch fell by {1 - rates[1] / rates[0]:.1%}"
    yield "cruise-nmf-opportunistic [(14, 2) -> (25, 7) 87.3 s -> (12, 4) 98.4 s -> (25, 7)]"
    for label, tuner in models.items():
        steps = [
            f"{seconds:.0f} s: ({len(s.workers)}, {len(s.servers)}) in {cost.seconds:.0f} s"
            for seconds, s, cost in reconfigurations(tuned("cruise-nmf-opportunistic", tuner))
        ]
        yield f"   {label:9} " + "; ".join(steps)
    yield "costs of plans, published 31.3, 87.3 and 98.4 s"
    for before, after in (((18, 14), (22, 10)), ((14, 2), (25, 7)), ((25, 7), (12, 4))):
        yield f"   {before} -> {after}: {migration(before, after).seconds:.1f} s"


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


def _bo_online_lines(count: int, seeds: int = 5) -> Iterator[str]:
    """TensorFlowOnline: completion, and Table V."""
    for name, (times, checkpoint, relocation) in TABLE_V.items():
        random = sorted(s for _, _, s in _random_settings(name, count) if np.isfinite(s))
        worst, average, best = random[-1], statistics.fmean(random), random[0]
        rows = {label: row[5] * row[6] for label, row in TENSORFLOWONLINE[name].items()}
        yield f"{name}: {len(random)} of {count} random settings get there: {worst:.0f}, {average:.0f}, {best:.0f} s"
        by_method: tuple[tuple[Method, float], ...] = (("relocate", relocation), ("checkpoint", checkpoint))
        for method, published in by_method:
            runs = [tuned(name, partial(bo_online, method=method), seed) for seed in range(seeds)]
            took = statistics.median(r.outcome.seconds for r in runs)
            costs = [c for r in runs for _, _, c in reconfigurations(r)]
            each = statistics.fmean(c.seconds for c in costs)
            gain = rows["average"] / rows["tfonline"]
            yield (
                f"   {method:10} {took:6.0f} s, {average / took:.2f} x over Average [{gain:.2f}], "
                f"{worst / took:.1f} x over Worst [{rows['worst'] / rows['tfonline']:.1f}]; {len(costs) / seeds:.0f} "
                f"reconfigurations [{times}] of {each:.1f} s [{published}]"
            )


def _rank_lines(count: int) -> Iterator[str]:
    """Table VI."""
    for name, published in _TABLE_VI.items():
        job, runs = loaded(name)[1], _random_settings(name, count)
        actual = [seconds if np.isfinite(seconds) else np.nan for _, _, seconds in runs]
        yield f"{name} [{published} of 100]"
        for label, pooled in (("tuner", True), ("each segment alone, as in the paper", False)):
            table = estimates([(setting, pushes) for setting, pushes, _ in runs], job, pooled=pooled)
            most = (~np.isnan(table)).sum(axis=1) >= len(runs) / 2
            yield (
                f"   {label}: rank {rank_of_estimate(table, actual):.1f} of {len(runs)}; "
                f"{rank_of_estimate(table[most], actual):.1f} while half of the settings run"
            )


def estimates(
    runs: Sequence[tuple[Setting, Pushes]],
    job: Job,
    *,
    per: Literal["nodes", "workers"] = "nodes",
    estimator: Estimator = _ESTIMATOR,
    pooled: bool = True,
) -> NDArray[np.float64]:
    """The remaining seconds that the tuner would estimate, [segments, runs]; nan after the end of a run.

    The defaults are the tuner's, and so is the length of segments. If `pooled`, all settings are estimated together from
    what has been seen of them by then, as the tuner does from its stretches; else each from one segment.
    """
    cut = [
        list(_stretches(i, setting, pushes, stretch_clocks(setting, len(job.nodes), per=per), estimator))
        for i, (setting, pushes) in enumerate(runs)
    ]
    table = np.full((max(map(len, cut)), len(runs)), np.nan)
    end = threshold(job.target, [], np.nan)
    for at, row in enumerate(table):
        present = [stretches[: at + 1] for stretches in cut if len(stretches) > at]
        efficiency, left = _together(present, end, estimator) if pooled else (None, 0.0)
        for i, stretches in enumerate(present):
            now = stretches[-1]
            if efficiency is None:
                (alone,) = triples([now], job.target, job.budget_seconds, end, estimator).triples
                row[int(now.row[0])] = alone.seconds
            else:
                row[int(now.row[0])] = now.seconds / len(now.segment.losses) * left / efficiency[i]
    return table


def _together(
    runs: Sequence[Sequence[Stretch]], end: float, estimator: Estimator
) -> tuple[NDArray[np.float64] | None, float]:
    """The efficiency of the setting of each run, and the remaining clocks, fitted to all runs as if they were of one job."""
    kinds = list(dict.fromkeys((r[0].segment.workers, r[0].kind) for r in runs))
    of = [kinds.index((r[0].segment.workers, r[0].kind)) for r in runs]
    each = [
        measured_levels([s.segment for s in r], [kind] * len(r), len(kinds), estimator.outliers, most=3)
        for r, kind in zip(runs, of, strict=True)
    ]
    levels = Levels(*(np.concatenate(parts) for parts in zip(*each, strict=True)))
    last = runs[0][-1].segment
    fit = fitted_job(levels, likeness(kinds), last.clocks_before + len(last.losses), end)
    if fit is None:
        return None, 0.0
    spent = np.sum([e.under[-1] for e in each], axis=0)
    return never_rising(kinds, fit.efficiency, spent)[of], fit.clocks_left


def _stretches(column: int, setting: Setting, pushes: Pushes, clocks: int, estimator: Estimator) -> Iterator[Stretch]:
    """A run cut into segments of so many clocks."""
    workers, kind = len(setting.workers), kind_of(setting)
    before = estimator.level(pushes.loss[:clocks], workers, first=True)
    for begin in range(0, len(pushes.loss) - clocks + 1, clocks):
        losses, seconds = pushes.loss[begin : begin + clocks], pushes.seconds[begin : begin + clocks]
        after = estimator.level(losses, workers)
        took = float(seconds[-1] - (pushes.seconds[begin - 1] if begin else 0.0))
        yield Stretch(np.array([float(column)]), Segment(losses, before, begin, workers), took, after, kind)
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
    parser.add_argument("parts", nargs="*", default=["cruise"], choices=["cruise", "bo_online", "rank"])
    parser.add_argument("--settings", type=int, default=100)
    options = parser.parse_args()
    made: dict[str, Callable[[], Iterator[str]]] = {
        "cruise": _cruise_lines,
        "bo_online": partial(_bo_online_lines, options.settings),
        "rank": partial(_rank_lines, options.settings),
    }
    for part in options.parts:
        for line in made[part]():
            print(line, flush=True)  # noqa: T201  # a script


if __name__ == "__main__":
    main()
