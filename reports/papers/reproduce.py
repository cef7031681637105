"""`harness reproduce`: what each paper prints beside what is measured here, as claims with verdicts, a table and a page.

The five functions below say what of a paper is compared, in the order of its tables and figures. How a figure is measured is
in the paper's own files of this folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from reports.figures.drawing import BLUE, MUTED, ORANGE, Drawing, canvas, drawn, label_inches, logarithmic
from reports.papers import bespoke_bo, grid, mltuner, mltuner_runs, rlp, rlp_runs
from reports.papers import cruise_and_bo_online as online
from reports.papers.claims import RULES, Claim, frame, headline, interval_shown, shown
from reports.papers.cruise_reach import MODELS
from reports.templates.rendering import fill
from reports.verdicts.statistics import Bounds, coverage_limit, median_interval, ratios
from traces.store import write_bytes
from tuners import policies
from tuners.actions import Method
from tuners.bo_online import bo_online
from tuners.cruise import cruise
from tuners.rlp import policy_file, tuner

__all__ = ["PAPERS", "Paper", "Scale", "page", "write"]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: `seeds` per run of a tuner, and the folder where long runs are kept and found again."""

    seeds: int
    kept: Path


@dataclass(frozen=True, slots=True)
class Paper:
    """One paper: its title and what of it is compared."""

    title: str
    claims: Callable[[Scale], Iterator[Claim]]
    minutes: float  # of one core, for five seeds


# ---------------------------------------------------------------------------------------------------------------- Cruise


def _cruise(scale: Scale) -> Iterator[Claim]:
    """Tables Ia to Ic and III, Figs. 7 and 8, Sec. V-F. Timing only and without noise between seeds: one seed says it."""
    del scale
    tables = {"nmf-32": "Table Ia", "mlr-32": "Table Ia", "lda-32": "Tables Ia, Ib", "lda-4k-32": "Table Ib"}
    for name, cells in grid.CRUISE.items():
        found = grid.grid(name)
        best, short = min(found.values()), name.removeprefix("cruise-")
        for split, ratio in cells.items():
            yield Claim(
                where=tables.get(short, "Table Ic"),
                what=f"{short}, {split[0]} workers and {split[1]} servers",
                unit="epoch time over the best split's",
                published=ratio,
                measured=found[split] / best,
                kind="fitted",
                why="one constant per scenario",
            )
    for name, start, choice, _, performance, drop in grid.TABLE_III:
        found, begin = grid.grid(name), grid.loaded(name)[1].space.setting({"worker_count": start[0]})
        for label, made in (("", MODELS["default"]), (", the paper's Eq. 4", MODELS["paper"])):
            end = online.last_setting(online.tuned(name, made, start=begin))
            chosen = (len(end.workers), len(end.servers))
            what, why = f"{name.removeprefix('cruise-')} from {start}{label}", f"chose {chosen}, published {choice}"
            yield Claim(
                where="Table III", what=what, unit="best split's epoch time over the chosen one's", published=performance,
                measured=grid.relative_performance(name, chosen), why=why,
            )  # fmt: skip
            yield Claim(
                where="Sec. V-C", what=what, unit="fall of the epoch time", published=drop,
                measured=1 - found[chosen] / found[start], why=why,
            )  # fmt: skip
    for (before, after), seconds in online.MIGRATIONS.items():
        yield Claim(
            where="Secs. V-D, V-F", what=f"NMF, {before} to {after}", unit="seconds of the reconfiguration",
            published=seconds,
            measured=online.migration(before, after).seconds, kind="fitted", why="four constants, five values",
        )  # fmt: skip
    for label, (roles, even, seconds) in grid.FIGURE_8.items():
        yield Claim(
            where="Fig. 8", what=f"NMF on two kinds of machines, {label}", unit="seconds per epoch", published=seconds,
            measured=grid.mixed_epoch_seconds(roles, even=even), kind="fitted", why="two constants, three values",
        )  # fmt: skip
    for name, drop in online.MIXED_DROPS.items():
        run = online.tuned(f"cruise-{name}-mixed", cruise)
        rates = [
            online.seconds_per_push(grid.played(f"cruise-{name}-mixed", s, learns=False))
            for s in (run.job.start, online.last_setting(run))
        ]
        yield Claim(
            where="Sec. V-E", what=f"{name.upper()} on two kinds of machines", unit="fall of the time per push",
            published=drop,
            measured=1 - rates[1] / rates[0], why="the paper's start, our default model",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- TensorFlowOnline


_FITTED_CONSTANTS = {
    "tf36-logr": "three constants, four values",
    "tf36-svm": "two constants, three values",
    "tf36-cifar": "two constants, four values",
    "tf36-imagenet8": "four constants, four values",
}
"""To Table III's seconds per iteration, see `simulators/workloads/workloads.toml`."""


def _bo_online(scale: Scale) -> Iterator[Claim]:
    """Tables III and V, and Fig. 5. Table VI takes hours: `reports.papers.cruise_and_bo_online`."""
    for name, rows in grid.TENSORFLOWONLINE.items():
        for label, row in rows.items():
            alone = (name, label) == ("tf36-svm", "worst")
            yield Claim(
                where="Table III", what=f"{name.removeprefix('tf36-')}, {label}", unit="seconds per iteration",
                published=row[6], measured=grid.iteration_seconds(name, row), kind="value" if alone else "fitted",
                why="left out of the fit" if alone else _FITTED_CONSTANTS[name],
            )  # fmt: skip
    for name, (times, checkpoint, relocation) in online.TABLE_V.items():
        job_seconds = {label: row[5] * row[6] for label, row in grid.TENSORFLOWONLINE[name].items()}
        short = name.removeprefix("tf36-")
        start = [grid.run_to_target(name, grid.loaded(name)[1].start, seed)[1] for seed in range(scale.seeds)]
        methods: tuple[tuple[Method, int], ...] = (("relocate", relocation), ("checkpoint", checkpoint))
        for method, published in methods:
            runs = [online.tuned(name, partial(bo_online, method=method), seed) for seed in range(scale.seeds)]
            costs = [cost.seconds for run in runs for _, _, cost in online.reconfigurations(run)]
            yield Claim(
                where="Table V", what=f"{short}, by {method}", unit="seconds of one reconfiguration",
                published=float(published), measured=statistics.fmean(costs) if costs else math.nan, kind="fitted",
                why="two constants for four values; here those that the tuner asked for",
            )  # fmt: skip
            if method == "checkpoint":
                continue
            yield Claim(
                where="Table V", what=short, unit="reconfigurations in a job", published=float(times),
                measured=len(costs) / len(runs), why="our default tuner, which stops trying what does not pay",
            )  # fmt: skip
            gain = median_interval(_exact(np.array(start) / [run.outcome.seconds for run in runs]))
            yield Claim(
                where="Fig. 5", what=f"{short}, over the start, the paper's Average", unit="speed-up of the job",
                published=job_seconds["average"] / job_seconds["tfonline"],
                measured=gain.estimate, low=gain.low, high=gain.high,
                kind="gain", why="proxies of the jobs, on embedded data",
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- MLtuner

_PRINTED = "mltuner[as_printed=true]"


def _mltuner(scale: Scale) -> Iterator[Claim]:
    """Sec. 5.2 and Figs. 9 and 11: rivals, spread over seeds, and twice the tunables; MLtuner as printed, and our form."""
    lab = mltuner_runs.Lab(scale.kept / "mltuner.jsonl")
    name, request = "mltuner-digits", mltuner_runs.RunRequest
    target = grid.loaded(name)[0].target.value
    printed = lab.each(mltuner.whole_run(name), scale.seeds)
    frugal = lab.each(request(scenario=name, tuner="mltuner"), scale.seeds)  # until the target: it never ends by itself
    forms = {"as printed": mltuner_runs.times(printed, target), "our form": mltuner_runs.times(frugal, target)}
    for rival, published in mltuner.PUBLISHED.items():
        theirs = mltuner_runs.times(lab.each(request(scenario=name, tuner=rival), scale.seeds), target)
        for form, mine in forms.items():
            found = median_interval(ratios(theirs, mine))
            yield Claim(
                where="Sec. 5.2", what=f"small CNN, {rival} over MLtuner, {form}", unit="time to the target",
                published=float(published), measured=found.estimate, low=found.low, high=found.high, kind="gain",
                why="digits in place of Cifar10" + ("; a lower bound" if found.bound == ">" else ""),
            )  # fmt: skip
    converged = [run.converged for run in printed if math.isfinite(run.converged)]
    yield Claim(
        where="Fig. 9", what="convergence time over seeds, as printed", unit="coefficient of variation", published=0.22,
        measured=mltuner_runs.variation(converged) if len(converged) > 2 else math.nan, kind="limit",
        why=f"{len(converged)} of {len(printed)} runs converged",
    )  # fmt: skip
    reached = [seconds for seconds in (run.reached(target) for run in frugal) if math.isfinite(seconds)]
    spread = f" by {mltuner_runs.variation(reached):.2f}" if len(reached) > 2 else ""
    yield Claim(
        where="Fig. 9", what="convergence time over seeds, our form", unit="coefficient of variation", published=0.22,
        measured=math.nan, kind="limit",
        why=f"it does not end by itself; times to the target vary{spread}, {len(reached)} of {len(frugal)} runs reach it",
    )  # fmt: skip
    yield Claim(
        where="Fig. 9", what="accuracy over seeds, as printed", unit="coefficient of variation", published=0.01,
        measured=mltuner_runs.variation([run.peak for run in printed]) if len(printed) > 2 else math.nan, kind="limit",
        why="our form's runs end at the target",
    )  # fmt: skip
    spent: tuple[tuple[str, list[mltuner_runs.RunResult], Callable[[mltuner_runs.RunResult], float]], ...] = (
        ("as printed", printed, lambda run: run.spent("search")),
        ("our form", frugal, lambda run: run.trial_seconds),
    )
    twice = {
        "as printed": mltuner.whole_run(name, "mltuner[as_printed=true,copies=2]"),
        "our form": request(scenario=name, tuner="mltuner[copies=2]"),
    }
    for form, once, seconds_of in spent:
        four, eight = (np.array([seconds_of(r) for r in runs]) for runs in (once, lab.each(twice[form], scale.seeds)))
        some = four > 0
        found = median_interval(_exact(eight[some] / four[some]))
        yield Claim(
            where="Fig. 11", what=f"8 tunables over 4, {form}", unit="tuning time", published=2.0, measured=found.estimate,
            low=found.low, high=found.high, kind="limit",
            why="" if some.all() else f"{some.sum()} of {len(some)} runs made a trial",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------- RLP


def _rlp(scale: Scale) -> Iterator[Claim]:
    """Figs. 2(a) to 2(c): speed-ups of the paper's form and of ours, on its class of instances and at the edge.

    Only the paper's form was trained on the paper's class of instances, with the paper's values: the page says beside each
    figure how the policy was trained.
    """
    kept = scale.kept / "rlp.jsonl"
    learned = {
        "rlp[as_printed=true]": tuner.policy_of(policy_file.shipped_as_printed()),
        "rlp": tuner.policy_of(policy_file.shipped()),
    }
    trained = {
        "rlp[as_printed=true]": "; the paper's form, trained with its values",
        "rlp": "; our form and training",
    }
    bounds = {policies.ssp(b).name: policies.ssp(b) for b in rlp_runs.BOUNDS}
    fixed = {"bsp": policies.bsp(), "asp": policies.asp()} | bounds
    for kind in ("paper", "edge"):
        instances = rlp_runs.drawn(kind, range(200, 200 + 4 * scale.seeds))
        found = rlp_runs.runs(kind, instances, fixed | learned, kept)
        best = rlp_runs.best_of(found, tuple(bounds))
        for name, (base, published) in product(learned, rlp.FIG_2.items()):
            ratio = rlp_runs.speed_up(found, rlp_runs.by_seed(found, best if base == "best ssp" else base), name)
            yield Claim(
                where="Fig. 2(a)", what=f"class {kind}, {name} over {base}", unit="speed-up", published=published,
                measured=ratio.mean, low=ratio.low, high=ratio.high, kind="gain",
                why=f"{ratio.both} pairs" + (f", {ratio.failed} runs of RLP did not end" if ratio.failed else "")
                + (f", {ratio.base_failed} of {base}" if ratio.base_failed else "") + trained[name],
            )  # fmt: skip
        for name, (label, published) in product(learned, rlp.BY_STRAGGLERS.items()):
            part = [run for run in found if run.stragglers in rlp.STRAGGLERS[label]]
            if len({run.seed for run in part}) < 3:
                continue
            base = rlp_runs.best_of(part, list(fixed))
            ratio = rlp_runs.speed_up(part, rlp_runs.by_seed(part, base), name)
            yield Claim(
                where="Fig. 2(c)", what=f"class {kind}, {label} stragglers, {name} over {base}", unit="speed-up",
                published=published, measured=ratio.mean, low=ratio.low, high=ratio.high, kind="gain",
                why=f"{ratio.both} pairs; the best of BSP, ASP and SSP for these instances{trained[name]}",
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ Bespoke BO


def _bespoke_bo(scale: Scale) -> Iterator[Claim]:
    """Fig. 2 under three assumptions about network interfaces; both models of communication."""
    best, uniform, generic = (bespoke_bo.FIG_2[name] for name in ("best", "uniform GPUs", "generic"))
    for nics in bespoke_bo.ASSUMPTIONS:
        case = bespoke_bo.Experiment("c", "speechnet", 16, nics)
        least, gpus = case.seconds(bespoke_bo.best(case)), bespoke_bo.uniform(case, "gpu")
        for what, published, seconds in (
            ("best schedule", best, least),
            ("uniform GPUs", uniform, case.seconds(gpus) if gpus else math.nan),
        ):
            yield Claim(
                where="Fig. 2", what=f"{what}, {nics} speeds of NICs", unit="seconds per iteration", published=published,
                measured=seconds, kind="fitted", why="two constants, two values",
            )  # fmt: skip
        ends: dict[str, list[float]] = {}
        for label, spec, count in (
            ("ours", "bespoke_bo[stop_early=false]", 10),
            ("as printed", "bespoke_bo[communication=as_printed,stop_early=false]", 10),
            ("OpenTuner's bandit", "schedule_search[kind=bandit,evaluations=30]", 30),
        ):
            runs = [bespoke_bo.evaluated(case, spec, count, seed) for seed in range(min(scale.seeds, 3))]
            ends[label] = [bespoke_bo.chosen(run).seconds for run in runs if run]
        for label in ("ours", "as printed"):
            found = median_interval(_exact(ends[label]))
            yield Claim(
                where="Fig. 2", what=f"bespoke, {label}, ten evaluations, {nics} speeds of NICs",
                unit="seconds per iteration", published=best, measured=found.estimate, low=found.low, high=found.high,
            )  # fmt: skip
            gain = median_interval(_exact(np.median(ends["OpenTuner's bandit"]) / np.array(ends[label])))
            yield Claim(
                where="Fig. 2", what=f"generic search after thirty over bespoke, {label}, {nics} speeds of NICs",
                unit="seconds per iteration", published=generic / best, measured=gain.estimate, low=gain.low, high=gain.high,
                kind="gain",
            )  # fmt: skip


def _exact(values: Sequence[float] | np.ndarray) -> Bounds:
    """Measured values, none of them a bound."""
    found = np.asarray(values, dtype=np.float64)
    return Bounds(found, found)


PAPERS = {
    "cruise": Paper("Cruise (Lee et al., ICDCS 2019)", _cruise, 1),
    "bo_online": Paper("TensorFlowOnline (Liu et al., 2020)", _bo_online, 7),
    "mltuner": Paper("MLtuner (Cui, Ganger and Gibbons, 2018)", _mltuner, 2),
    "rlp": Paper("RLP (Zhu et al., 2020)", _rlp, 1),
    "bespoke_bo": Paper("Bespoke BO (Dalibard et al., 2017)", _bespoke_bo, 2),
}
"""The papers by the name of their tuner."""


# ------------------------------------------------------------------------------------------------------------------ page


def write(name: str, claims: Sequence[Claim], seeds: int, out: Path) -> Path:
    """Write the page and the table of a paper's claims to the folder `out`, and return the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / f"{name}.csv", frame(claims).write_csv(float_precision=6).encode())
    write_bytes(out / f"{name}.html", page(name, claims, seeds).encode())
    return out / f"{name}.html"


def page(name: str, claims: Sequence[Claim], seeds: int) -> str:
    """The page: what came out first, then a drawing and a table for each table and figure of the paper."""
    places = list(dict.fromkeys((c.where, c.unit) for c in claims))
    sections = []
    for i, (where, unit) in enumerate(places):
        mine = [c for c in claims if (c.where, c.unit) == (where, unit)]
        rows = [
            (c.what, shown(c.published), shown(c.measured), interval_shown(c.low, c.high), c.verdict, c.kind, c.why)
            for c in mine
        ]
        sections.append((f"{where}: {unit}", _beside(mine, f"claims{i}"), rows))
    return fill(
        "paper.html.j2",
        title=PAPERS[name].title,
        headline=headline(claims),
        command=f"harness reproduce {name} --seeds {seeds}",
        sections=sections,
        limits=[(runs, coverage_limit(runs)) for runs in (3, 5)],
        rules=list(RULES.items()),
    )


def _beside(claims: Sequence[Claim], name: str) -> Drawing | None:
    """Published and measured on one axis, a row per figure; None where there is only one."""
    if len(claims) < 2:
        return None
    labels = [claim.what for claim in claims]
    with canvas(0.9 + 0.26 * len(claims), left=min(label_inches(labels), 4.0), top=0.3) as figure:
        axes = figure.add_subplot()
        values = [v for c in claims for v in (c.published, c.measured) if not math.isnan(v)]
        if min(values) > 0 and max(values) > 8 * min(values):
            logarithmic(axes, horizontal=True)
        for y, claim in enumerate(claims):
            if not math.isnan(claim.low) and math.isfinite(claim.high):
                axes.plot([claim.low, claim.high], [y, y], color=BLUE, linewidth=3, alpha=0.4)
            axes.plot([claim.published, claim.measured], [y, y], color=MUTED, linewidth=0.8, alpha=0.6)
            axes.plot([claim.published], [y], "D", color=ORANGE, markersize=6, fillstyle="none")
            axes.plot([claim.measured], [y], "o", color=BLUE, markersize=6)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.7)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=MUTED, alpha=0.25, linewidth=0.6)
        axes.set_xlabel(claims[0].unit)
        caption = "Orange diamonds: the paper. Blue: measured here, with its interval where there are several runs."
        return drawn(figure, name, caption, frame(claims))
