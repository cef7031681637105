"""MLtuner's results beside the figures that its paper publishes. A program that prints them, measured [published]:

    python -m reports.papers.mltuner [PART ...] [--seeds 10] [--kept FILE]

MLtuner plays twice: as printed, and in our default form. Ratios are over the printed form, as in the paper.

`contest`: time to the best accuracy on two tasks, one of which over-fits, against the paper's rivals. `other`: the sequence
model. `ideal`: distance from the best of a grid of fixed settings, and how the time is spent. `spread`: variation over ten
runs. `starts`: bad start settings, re-tuned; `ends`: those at the ends of the space. `copies`: twice the tunables.
`adaptive`: the initial rate chosen for adaptive optimizers. `rates`: how much that rate matters in matrix factorisation.

With `--kept` runs are stored in a file and not repeated; delete the file when the code has changed. All parts take about an
hour on one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import harness.scenario as scenario
from reports.papers.mltuner_runs import (
    Lab,
    RunRequest,
    RunResult,
    convergence,
    count,
    median,
    shares,
    short,
    times,
    trial_shares,
    variation,
)
from reports.verdicts.statistics import Bounds, censored, compare, median_interval, paired_t, ratios

__all__ = ["PUBLISHED", "main", "whole_run"]

_DIGITS, _CLOUDS, _ROWS, _RATINGS = (f"mltuner-{name}" for name in ("digits", "clouds", "rows", "ratings"))
_OURS, _PRINTED = "mltuner", "mltuner[as_printed=true]"
_TUNERS = (_PRINTED, _OURS, "hyperband", "spearmint", "asha")
_VARIANTS = ("mltuner[as_printed=true,bound=retune]", "mltuner[as_printed=true,snapshot=none]")
PUBLISHED = {"hyperband": 9, "spearmint": 3}  # times MLtuner's, Cifar10 to 76 %, Section 5.2
_RATE_ONLY = "mltuner[as_printed=true,tuned=rate,retune=false]"
_EARLIER = {_DIGITS: (0.90, 0.94, 0.95, 0.96), _CLOUDS: (0.80, 0.83, 0.85, 0.86)}
_ADAPTIVE = ("rmsprop", "nesterov", "adam", "adadelta", "adagrad", "adarevision")

# --------------------------------------------------------------------------------------------------------------- contest


def _contest_lines(lab: Lab, seeds: int, names: Sequence[str] = (_DIGITS, _CLOUDS)) -> Iterator[str]:
    """Section 5.2: MLtuner against its rivals."""
    for name in names:
        cases = [
            whole_run(name, t) if "as_printed" in t else RunRequest(scenario=name, tuner=t) for t in (*_TUNERS, *_VARIANTS)
        ]
        runs, target = {case.tuner: lab.each(case, seeds) for case in cases}, scenario.load(name).target.value
        found = {t: times(mine, target) for t, mine in runs.items()}
        yield f"{name}: seconds to {target:.1%}, medians with 95 % intervals over {seeds} seeds"
        for t in runs:
            ratio = median(ratios(found[t], found[_PRINTED]), ".2f")
            said = "" if t == _PRINTED else f"; {ratio} x mltuner as printed [{PUBLISHED.get(t, '-')}]"
            yield f"   {t:40} {count(found[t])} {median(found[t])}{said}"
        yield from _difference_lines({t: found[t] for t in _TUNERS})
        for earlier in _EARLIER[name]:
            there = {t: times(mine, earlier) for t, mine in runs.items()}
            yield f"   to {earlier:.1%}: " + "; ".join(
                f"{t} {count(f)} {short(median_interval(f))}" for t, f in there.items()
            )
        yield f"   until the target, mltuner as printed spends {shares(runs[_PRINTED], found[_PRINTED])}"
        yield f"   ours spends {trial_shares(runs[_OURS])}"


def whole_run(name: str, tuner: str = _PRINTED, **more: Any) -> RunRequest:
    """A run until it has reached the target and the tuner has ended. Ours never ends."""
    return RunRequest(scenario=name, tuner=tuner, until="both", **more)


def _difference_lines(found: Mapping[str, Bounds]) -> Iterator[str]:
    """The mean times of tuners, and which are told apart from the least."""
    # A run that missed its target counts its budget, which is its lower bound.
    made = compare(tuple(found), np.log(np.column_stack([f.least for f in found.values()])), paired_t)
    rows = zip(made.tuners, made.means, strict=True)
    yield "   Mean times, s: " + ", ".join(f"{t} {np.exp(m):.0f} ({made.standing(t)})" for t, m in rows)


def _other_lines(lab: Lab, seeds: int, name: str = _ROWS) -> Iterator[str]:
    """The sequence model: MLtuner against the start setting."""
    target = scenario.load(name).target.value
    yield f"{name}: seconds to {target:.1%}, {seeds} seeds"
    for t in (_PRINTED, _OURS, "fixed"):
        runs = lab.each(RunRequest(scenario=name, tuner=t), seeds)
        taken = times(runs, target)
        said = {_PRINTED: f"; {shares(runs, taken)}", _OURS: f"; {trial_shares(runs)}"}.get(t, "")
        yield f"   {t:24} {count(taken)} {median(taken)}{said}"


# ----------------------------------------------------------------------------------------------------------------- ideal

_GRID = {
    "learning_rate": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "momentum": (0.0, 0.5, 0.9),
    "batch_size": (4, 16, 64),
    "staleness": (0, 7),
}


_BEST = 12  # of the grid with one seed, which are played with all seeds


def _best_of_grid(lab: Lab, name: str, seeds: int) -> tuple[dict[str, Any], int]:
    """The best of the grid: the least time to the target with one seed, then the least median over seeds among the best."""
    quality = scenario.load(name).target.value
    screened = list[tuple[float, dict[str, Any]]]()
    for values in product(*_GRID.values()):
        start = dict(zip(_GRID, values, strict=True))
        # The best setting needs less than half of this.
        ran = lab(RunRequest(scenario=name, tuner="fixed", start=start, budgets=1 / 12))
        screened.append((ran.reached(quality), start))
    screened.sort(key=lambda found: found[0])
    reached = sum(math.isfinite(s) for s, _ in screened)
    finals = [(_median_seconds(lab, name, seeds, start), start) for s, start in screened[:_BEST] if math.isfinite(s)]
    return min(finals, key=lambda found: found[0])[1], reached


def _fixed(lab: Lab, name: str, seeds: int, start: dict[str, Any]) -> list[RunResult]:
    """Runs under one fixed setting."""
    return lab.each(RunRequest(scenario=name, tuner="fixed", start=start, budgets=1 / 4), seeds)


def _median_seconds(lab: Lab, name: str, seeds: int, start: dict[str, Any]) -> float:
    """The median seconds to the target under one fixed setting."""
    quality = scenario.load(name).target.value
    return statistics.median(r.reached(quality) for r in _fixed(lab, name, seeds, start))


def _ideal_lines(lab: Lab, seeds: int, names: Sequence[str] = (_DIGITS, _CLOUDS)) -> Iterator[str]:
    """MLtuner against the best setting of the grid, and how its time is spent."""
    for name in names:
        start, reached = _best_of_grid(lab, name, seeds)
        target, points = scenario.load(name).target.value, math.prod(map(len, _GRID.values()))
        theirs, ours = _fixed(lab, name, seeds, start), lab.each(whole_run(name), seeds)
        best, mine = times(theirs, target), times(ours, target)
        yield f"{name}: {reached} of {points} settings reach {target:.1%} within a twelfth of the budget; the best {start}"
        yield f"   to the target {median(best)} s, mltuner {median(mine)} s: {median(ratios(mine, best), '.1f')} x [5]"
        yield f"      of which {shares(ours, mine)} [large jobs: initial 2 to 6 %]"
        frugal = lab.each(RunRequest(scenario=name, tuner=_OURS), seeds)
        taken = times(frugal, target)
        said = f"{median(ratios(taken, best), '.1f')} x; {trial_shares(frugal)}"
        yield f"      our form {count(taken)} {median(taken)} s: {said}"
        trained = lab.each(RunRequest(scenario=name, tuner="train", start=start, until="finished"), seeds)
        best, mine = convergence(trained), convergence(ours)
        yield f"   to convergence {median(best)} s, mltuner {median(mine)} s: {median(ratios(mine, best), '.1f')} x [5]"
        yield f"      of which {shares(ours, mine)}"
        peaks = [median([r.peak for r in runs], ".3f") for runs in (trained, ours)]
        yield f"   accuracy {peaks[0]}, mltuner {peaks[1]} [the same]"


# -------------------------------------------------------------------------------------------------------- mltuner by itself


def _spread_lines(lab: Lab, seeds: int, name: str = _DIGITS) -> Iterator[str]:
    """Variation over seeds of jobs, and over seeds of searches."""
    target, plain = scenario.load(name).target.value, whole_run(name)
    ideal_case = RunRequest(scenario=name, tuner="train", start=_best_of_grid(lab, name, seeds)[0], until="finished")
    kinds = {
        "mltuner, distinct seeds": (lab.each(plain, seeds), 0.22),
        "mltuner, one job, distinct searches": ([lab(replace(plain, tuner_seed=100 + s)) for s in range(seeds)], 0.22),
        "the ideal setting, distinct seeds": (lab.each(ideal_case, seeds), 0.18),
    }
    for label, (runs, published) in kinds.items():
        converged = [r.converged for r in runs if math.isfinite(r.converged)]
        reached = [r.reached(target) for r in runs if math.isfinite(r.reached(target))]
        yield f"{name}, {label}"
        for what, found in (("converge", converged), ("reach the target", reached)):
            yield f"   {len(found)}/{seeds} {what}, with a CoV of their times of {variation(found):.2f} [{published}]"
        yield f"   accuracy {median([r.peak for r in runs], '.3f')}, CoV {variation([r.peak for r in runs]):.3f} [0.01]"


def _starts_lines(lab: Lab, seeds: int, names: Sequence[str] = (_DIGITS, _CLOUDS)) -> Iterator[str]:
    """Section 5.5: random start settings, as they are and re-tuned."""
    for name in names:
        target, space = scenario.load(name).target.value, scenario.job(scenario.load(name)).space
        rng = np.random.default_rng(7)
        starts = [dict(space.sample(rng)) for _ in range(seeds)]
        alone = [lab(RunRequest(scenario=name, tuner="fixed", start=s, budgets=1 / 4)) for s in starts]
        again = [lab(whole_run(name, "mltuner[as_printed=true,initial=false]", start=s)) for s in starts]
        frugal = [lab(RunRequest(scenario=name, tuner=_OURS, start=s)) for s in starts]
        tuned = lab.each(whole_run(name), seeds)
        yield f"{name}: {seeds} random starting settings [all converge]"
        good = statistics.median(r.best for r in tuned) - 0.02
        for label, runs in (("as they are", alone), ("re-tuned", again), ("our form", frugal), ("tuned at first", tuned)):
            taken, best = times(runs, target), [r.best for r in runs]
            yield f"   {label:15} {count(taken)} reach the target, in {median(taken)} s; accuracy {median(best, '.3f')}"
            near = sum(b >= good for b in best)
            yield f"      {near}/{seeds} within .02 of what tuning ends with, the least {min(best):.3f}"


_ENDS = (  # learning rate, momentum, staleness
    *((1e-5, momentum, staleness) for momentum in (0.0, 0.99) for staleness in (0, 7)),
    *((1.0, momentum, staleness) for momentum in (0.0, 0.9) for staleness in (0, 7)),
    (1e-4, 0.5, 3),
    (0.3, 0.99, 1),
)


def _ends_lines(lab: Lab, seeds: int, name: str = _ROWS) -> Iterator[str]:
    """Section 5.5: our form from the ends of the space, and with a mini-batch that the arena holds, where jobs over-fit."""
    target = scenario.load(name).target.value
    starts = [dict(zip(("learning_rate", "momentum", "staleness"), end, strict=True)) for end in _ENDS]
    runs = [lab(RunRequest(scenario=name, tuner=_OURS, seed=i, start=start)) for i, start in enumerate(starts)]
    taken = times(runs, target)
    yield f"{name}, our form from {len(starts)} ends of its space: {count(taken)} reach {target:.1%}, in {median(taken)} s"
    yield f"   of these, the least {taken.least.min():.0f} s, the most {taken.least.max():.0f} s"
    plain = lab.each(RunRequest(scenario=name, tuner="fixed"), seeds)
    yield f"   its own start under fixed: {count(times(plain, target))}"
    held: dict[str, Any] = {"batch_size": 64, "staleness": 7}
    for tuner, rate in ((_OURS, 1e-5), ("fixed", 0.164), ("fixed", 0.655)):
        mine = lab.each(RunRequest(scenario=name, tuner=tuner, start={"learning_rate": rate, **held}), seeds)
        found = times(mine, target)
        missed = sorted(r.best for r in mine if not math.isfinite(r.reached(target)))
        said = f"; the others get to {missed[0]:.3f} to {missed[-1]:.3f}" if missed else ""
        yield f"   with mini-batches of 64, {tuner} from a rate of {rate:g}: {count(found)} {median(found)} s{said}"


def _copies_lines(lab: Lab, seeds: int, name: str = _DIGITS) -> Iterator[str]:
    """Section 5.6: four tunables against twice as many."""
    one, two = (lab.each(RunRequest(scenario=name, tuner=t), seeds) for t in (_OURS, "mltuner[copies=2]"))
    spent = [censored([r.trial_seconds for r in runs], [True] * seeds) for runs in (one, two)]
    yield f"{name}, our form, trials: 4 tunables {median(spent[0])} s, 8 {median(spent[1])} s [2 x]"
    one, two = (lab.each(whole_run(name, t), seeds) for t in (_PRINTED, "mltuner[as_printed=true,copies=2]"))
    for what, kind in (("initial tuning", "search 1"), ("all tuning", "search")):
        four, eight = (censored([r.spent(kind) for r in runs], [True] * seeds) for runs in (one, two))
        mean = eight.least.mean() / four.least.mean()
        yield f"{name}, {what}: 4 tunables {median(four)} s, 8 {median(eight)} s"
        yield f"   {median(ratios(eight, four), '.2f')} x in pairs, {mean:.2f} x on average [2]"
    target = scenario.load(name).target.value
    for label, runs in (("4", one), ("8", two)):
        tried, taken = [r.tried("search 1") for r in runs], times(runs, target)
        peaks = median([r.peak for r in runs], ".3f")
        yield f"   {label} tunables: {median(tried)} settings at first; {count(taken)} {median(taken)} s; accuracy {peaks}"


# ----------------------------------------------------------------------------------------------------------------- rates


def _adaptive_lines(lab: Lab, seeds: int, name: str = _DIGITS, plateau: int = 20) -> Iterator[str]:
    """Section 5.3: initial rates of adaptive optimizers; momentum .9, the largest mini-batch, no staleness, as the paper."""
    base = {"momentum": 0.9, "batch_size": 64, "staleness": 0}
    rates = [float(np.round(10.0**power, 7)) for power in np.linspace(-5, 0, 11)]
    yield f"{name}: accuracy once {plateau} epochs have not made it better, over {seeds} seeds [within .02 for all six]"
    for optimizer in _ADAPTIVE:
        plain = RunRequest(scenario=name, tuner="train", optimizer=optimizer, until="finished", plateau=plateau)
        runs = [lab.each(replace(plain, start={**base, "learning_rate": rate}), seeds) for rate in rates]
        found = np.array([[r.peak for r in row] for row in runs])
        mine = np.array([r.peak for r in lab.each(replace(plain, tuner=_RATE_ONLY, start=base, until="plateau"), seeds)])
        means, gaps = found.mean(axis=1), found.max(axis=0) - mine
        near = f"{(means > means.max() - 0.02).sum()} of {len(rates)} rates within .02"
        yield f"   {optimizer:9} the best rate, {rates[means.argmax()]:g}: {means.max():.3f}; mltuner's: {mine.mean():.3f}"
        yield f"      below each seed's best by {gaps.mean():.3f}, {gaps.max():.3f} at most; {near}"


def _rates_lines(lab: Lab, seeds: int, name: str = _RATINGS) -> Iterator[str]:
    """Matrix factorisation: how much time a bad initial rate costs, and what MLtuner picks."""
    quality, rates = -scenario.load(name).target.value, [float(10.0**p) for p in np.linspace(-5, 0, 21)]
    for optimizer in ("adarevision", "adagrad"):
        plain = RunRequest(scenario=name, tuner="fixed", optimizer=optimizer)
        # The best rate needs less than a tenth of this.
        taken = times([lab(replace(plain, start={"learning_rate": r}, budgets=1 / 2)) for r in rates], quality)
        best = float(taken.least.min())
        slow = (taken.least > 10 * best).mean()
        found = rates[taken.least.argmin()]
        yield f"{name}, {optimizer}: the best rate, {found:.3g}, takes {best:.0f} s; {count(taken)} get there"
        yield f"   slower than 10 times that: {slow:.0%} [> 40 %]; the median {median(taken)} s"
        start = times(lab.each(plain, seeds), quality)
        yield f"   at the scenario's own rate {count(start)} {median(start)} s"
        for t in ("mltuner[as_printed=true,tuned=rate]", _PRINTED, "mltuner[tuned=rate]", _OURS):
            mine = times(lab.each(replace(plain, tuner=t), seeds), quality)
            close = f"{np.median(mine.least) / best:.1f} x the best rate's [close to 1]"
            yield f"   {t}: {count(mine)} {median(mine)} s, {close}"
            yield f"      untuned over that: {median(ratios(start, mine), '.1f')} [> 10]"


# ------------------------------------------------------------------------------------------------------------------ main

_PARTS: dict[str, Callable[[Lab, int], Iterator[str]]] = {
    "contest": _contest_lines,
    "other": _other_lines,
    "ideal": _ideal_lines,
    "spread": _spread_lines,
    "starts": _starts_lines,
    "ends": _ends_lines,
    "copies": _copies_lines,
    "adaptive": _adaptive_lines,
    "rates": _rates_lines,
}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(_PARTS), choices=_PARTS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kept", type=Path)
    options = parser.parse_args()
    lab = Lab(options.kept)
    for part in options.parts:
        for line in _PARTS[part](lab, options.seeds):
            print(line, flush=True)  # noqa: T201  # a script
    print(f"code as of {lab.commits()}")  # noqa: T201


if __name__ == "__main__":
    main()
