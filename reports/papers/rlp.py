"""RLP's results beside the figures that its paper publishes. A program that prints Markdown, measured [published]:

    python -m reports.papers.rlp [fig2] [fig3] [table1] [axis] [--classes NAME ...] [--depth H] [--instances 100]
        [--first 200] [--stragglers N] [--few] [--policy FILE ...] [--out FOLDER]

`fig2`: speed-ups over BSP, ASP and the best SSP, overall and by depth and stragglers, of all policies of the project, RLP
included, on the classes of instances (`reports.papers.rlp_runs.kind`). `fig3`: on 2, 5 and 8 workers, at depth 6, on other
data, and with all three changes. `table1`: steps, idle and inference shares on one instance with several stragglers, and the
picture of Fig. 4 as `fig4.html`. `axis`: how close each class is to the edge of stability. Runs are stored in `--out` and
not repeated; 100 instances of one class take about a quarter of an hour on two cores, a third of that with `--few`.

Instances have 100 seeds from `--first` on. The policy that ships was trained on seeds from 10**6 on and selected on seeds
below 200.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from harness.training.instances import Instance
from reports.figures.workers import WORKERS_NOTE, workers_over_time
from reports.papers.rlp_runs import (
    BOUNDS,
    CLASSES,
    USUAL_MOST,
    FinishedRun,
    InstanceRun,
    Ratio,
    baselines,
    best_of,
    by_seed,
    drawn,
    kind,
    oracle,
    runs,
    speed_up,
    stability_edge,
    staleness_of,
    table_of,
    with_stragglers,
)
from simulators.engine.learning import mean_loss
from tuners import policies
from tuners.actions import Pushes, SyncPolicy
from tuners.rlp import policy_file, tuner

__all__ = ["BY_STRAGGLERS", "FIG_2", "STRAGGLERS", "main"]

STRAGGLERS: dict[str, Container[int]] = {"no": (0,), "one": (1,), "several": range(2, 99)}
"""The instances that Fig. 2(c) tells apart, by their number of stragglers."""

# Published speed-ups.
FIG_2 = {"bsp": 1.56, "asp": 1.86, "best ssp": 1.44}
_BY_DEPTH = {0: 1.48, 3: 1.43}
BY_STRAGGLERS = {"no": 1.02, "one": 1.22, "several": 1.51}
_FIG_3 = {"depth 6": 1.33, "other data": 1.22, "all, 2 workers": 1.69, "all, 5 workers": 1.19, "all, 8 workers": 1.20}
_SSPS = tuple(policies.ssp(bound).name for bound in BOUNDS)
_FIXED = ("bsp", "asp", *_SSPS)  # the policies that the paper compares RLP with


class _Asked(NamedTuple):
    """The options of the command line."""

    classes: Sequence[str]
    depth: int | None  # of all instances; None: drawn per instance
    first: int
    instances: int
    stragglers: int | None  # of every instance; None: as drawn
    few: bool  # only the policies of the paper, and the best fixed rule
    learned: Mapping[str, SyncPolicy]
    stored: Path  # the file of runs
    say: Callable[[str], None]

    @property
    def seeds(self) -> Sequence[int]:
        """Seeds of the instances."""
        if self.stragglers is None:
            return range(self.first, self.first + self.instances)
        return with_stragglers(self.stragglers, self.instances, self.first)


def _ratio_text(found: Ratio) -> str:
    """A speed-up with its interval and the number of runs behind it."""
    ended = f"{found.both} pairs" + (
        f", {found.base_failed} + {found.failed} did not end" if found.base_failed + found.failed else ""
    )
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), median {found.median:.2f}; {ended}"


def _learned(files: Sequence[str]) -> dict[str, SyncPolicy]:
    """The shipped policies, or those in `files`, by name."""
    if not files:
        return {
            "rlp": tuner.policy_of(policy_file.shipped()),
            "rlp[as_printed]": tuner.policy_of(policy_file.shipped_as_printed()),
        }
    return {f"rlp[{Path(f).stem}]": tuner.policy_of(policy_file.load(f)) for f in files}


# ---------------------------------------------------------------------------------------------------------- Figs. 2 and 3


def _fig2(asked: _Asked) -> Iterator[str]:
    """Fig. 2: every policy on the classes of instances."""
    everything = baselines()
    under = {name: everything[name] for name in (*_FIXED, "k_async(7)")} if asked.few else everything
    for name in asked.classes:
        found = runs(name, drawn(name, asked.seeds, asked.depth), under | dict(asked.learned), asked.stored, asked.say)
        yield from ("", f"## {name}, {asked.instances} instances from seed {asked.first} on", "", *_ranking(found))
        for policy in (*asked.learned, "k_async(7)"):
            yield from ("", f"### {policy}", "", *_comparisons(found, policy), *_by_part(found, policy))


def _ranking(found: Sequence[InstanceRun]) -> Iterator[str]:
    """A table of all policies, the fastest first."""
    base = by_seed(found, "bsp")
    yield "| policy | median s | median pushes | did not end | idle | speed-up over BSP |"
    yield "|---|---|---|---|---|---|"
    for policy in sorted({r.policy for r in found}, key=lambda p: np.median(list(by_seed(found, p).values()))):
        own = [r for r in found if r.policy == policy]
        lost, idle = sum(r.status != "target" for r in own), np.mean([r.idle_to_end for r in own])
        middle = [np.median([getattr(r, field) for r in own]) for field in ("seconds", "pushes")]
        faster = _ratio_text(speed_up(found, base, policy))
        yield f"| {policy} | {middle[0]:.0f} | {middle[1]:.0f} | {lost} | {idle:.0%} | {faster} |"


def _comparisons(found: Sequence[InstanceRun], policy: str, published: Mapping[str, float] = FIG_2) -> Iterator[str]:
    """Speed-ups of `policy` over the paper's baselines; the best SSP and the best fixed policy are one for all instances."""
    bound, best = best_of(found, _SSPS), best_of(found, _FIXED)
    bases = {"bsp": by_seed(found, "bsp"), "asp": by_seed(found, "asp"), "best ssp": by_seed(found, bound)}
    for base, seconds in bases.items():
        note = f" = {bound}" if base == "best ssp" else ""
        printed = f" [{published[base]:.2f}]" if base in published else ""
        yield f"- over {base}{note}: {_ratio_text(speed_up(found, seconds, policy))}{printed}"
    yield f"- over the best of BSP, ASP, SSP for all = {best}: {_ratio_text(speed_up(found, by_seed(found, best), policy))}"
    yield f"- over the best SSP of each instance, in hindsight: {_ratio_text(speed_up(found, oracle(found, _SSPS), policy))}"
    yield f"- over the best of all these of each instance: {_ratio_text(speed_up(found, oracle(found, _FIXED), policy))}"


def _by_part(found: Sequence[InstanceRun], policy: str) -> Iterator[str]:
    """Speed-ups by depth and by stragglers, over the best of BSP, ASP and SSP in each part."""
    for depth in sorted({r.depth for r in found}):
        yield f"- depth {depth}: " + _over_best([r for r in found if r.depth == depth], policy, _BY_DEPTH.get(depth))
    for label, wanted in STRAGGLERS.items():
        part = [r for r in found if r.stragglers in wanted]
        if part:
            yield f"- {label} stragglers: " + _over_best(part, policy, BY_STRAGGLERS[label])


def _over_best(found: Sequence[InstanceRun], policy: str, published: float | None = None) -> str:
    """The speed-up of `policy` over the fixed policy with the least median."""
    best = best_of(found, [p for p in _FIXED if any(r.policy == p for r in found)])
    note = "" if published is None else f" [{published:.2f}]"
    return f"over {best}: {_ratio_text(speed_up(found, by_seed(found, best), policy))}{note}"


def _fig3(asked: _Asked) -> Iterator[str]:
    """Figs. 3(a) to (c); published are speed-ups over the best fixed policy of each case."""
    cases: dict[str, dict[str, object]] = {f"{k} workers": {"workers": k, "depth": 1} for k in (2, 5, 8)}
    cases |= {"depth 6": {"depth": 6}, "other data": {"depth": 1, "data": "clouds-mlp"}}
    cases |= {f"all, {k} workers": {"workers": k, "depth": 6, "data": "clouds-mlp"} for k in (2, 5, 8)}
    fixed = [policies.bsp(), policies.asp(), *map(policies.ssp, BOUNDS)]
    for name, (case, options) in product(asked.classes, cases.items()):
        group = policies.k_async(max(1, round(0.7 * int(str(options.get("workers", 10))))))
        instances = drawn(name, asked.seeds, **options)  # type: ignore[arg-type]
        under = {p.name: p for p in (*fixed, group)} | dict(asked.learned)
        found = runs(f"{name}, {case}", instances, under, asked.stored, asked.say)
        yield f"\n## {name}, {case}: {asked.instances} instances from seed {asked.first} on\n"
        for policy in (*asked.learned, group.name):
            yield f"### {policy}, {_over_best(found, policy, _FIG_3.get(case))}"
            yield from _comparisons(found, policy, {})


# ------------------------------------------------------------------------------------------------------ Table 1, Fig. 4


def _table1(asked: _Asked) -> Iterator[str]:
    """Table 1: one instance with several stragglers of each class; published: 279, 659, 252 and 380 pushes."""
    drawings = []
    for name in asked.classes:
        instance = next(i for i in drawn(name, asked.seeds, depth=1) if name == "even" or sum(i.straggles) == 4)
        yield f"\n## {name}, seed {instance.seed}, stragglers {[i + 1 for i, s in enumerate(instance.straggles) if s]}\n"
        yield "| policy | steps of W1..W10 | pushes | seconds | idle | inference | correlation of steps and step times |"
        yield "|---|---|---|---|---|---|---|"
        for label, policy in (
            {p.name: p for p in (policies.bsp(), policies.asp(), policies.ssp(7))} | dict(asked.learned)
        ).items():
            run = table_of(instance, policy)
            yield _table1_row(label, run, policy.seconds)
            columns = [run.table[:, i] for i in range(9)]
            columns[1] = columns[1].astype(np.int32)
            drawing = workers_over_time(Pushes(*columns), f"{name}-{label}".replace("(", "-").strip(")"))  # type: ignore[arg-type]
            drawings += [f"<h2>{name}: {label}</h2>{drawing.svg}<p>{drawing.caption}</p>"] if drawing else []
    picture = asked.stored.with_name("fig4.html")
    picture.write_text(f"<body style='max-width: 60em'><p>{WORKERS_NOTE}</p>{''.join(drawings)}", "utf-8")
    yield f"\nThe pictures: {picture}"


def _table1_row(label: str, run: FinishedRun, decision_seconds: float) -> str:
    """One row of Table 1."""
    status, table, workers = run.status, run.table, len(run.last_wait_seconds)
    worker, end = table[:, 1].astype(int), float(table[-1, 0])
    steps = np.bincount(worker, minlength=workers)
    step_seconds = np.bincount(worker, table[:, 3:6].sum(1), minlength=workers) / np.maximum(steps, 1)
    inference = decision_seconds * len(table) / end
    alike = np.corrcoef(steps, step_seconds)[0, 1] if steps.std() else float("nan")
    seconds = f"{end:.0f}" if status == "target" else f"> {end:.0f}"
    counts = " ".join(map(str, steps))
    return f"| {label} | {counts} | {len(table)} | {seconds} | {run.idle:.1%} | {inference:.2%} | {alike:.2f} |"


# -------------------------------------------------------------------------------------------------------------- stability


def _axis(asked: _Asked) -> Iterator[str]:
    """Stability in workers x rate x curvature: the edge of each policy on a quadratic; then the value of each class, at the
    start and where ASP ends, and ASP's pushes and time over BSP's."""
    yield "| policy | edge without stragglers | with stragglers: three instances |"
    yield "|---|---|---|"
    groups = [policies.k_async(2), policies.k_async(4), policies.k_async(7), policies.k_sync(7)]
    for policy in (policies.bsp(), policies.asp(), policies.ssp(4), policies.ssp(16), *groups):
        even = stability_edge(staleness_of(0, policy, stragglers=False), 10)
        uneven = [stability_edge(staleness_of(seed, policy, stragglers=True), 10) for seed in (12, 16, 20)]
        yield f"| {policy.name} | {even:.2f} | {', '.join(f'{e:.2f}' for e in uneven)} |"
    yield ""
    yield "| class | depth | k rate curvature at first | at ASP's end | ASP's pushes over BSP's | ASP's time over BSP's |"
    yield "|---|---|---|---|---|---|"
    for name, depth in product(asked.classes, (0, 1, 2, 3)):
        instances = drawn(name, asked.seeds, depth=depth)
        both = {"bsp": policies.bsp(), "asp": policies.asp()}
        found = runs(name, instances, both, asked.stored, asked.say)
        rate = float(kind(name, depth).overrides["learning_rate"])
        ends = [10 * rate * _curvature(i, at_end=end) for end in (False, True) for i in instances[:3]]
        pushes, seconds = (
            np.median([b / a for a, b in zip(*(_values(found, p, field) for p in both), strict=True) if a < np.inf])
            for field in ("pushes", "seconds")
        )
        first, last = np.median(ends[:3]), np.median(ends[3:])
        yield f"| {name} | {depth} | {first:.2f} | {last:.2f} | {pushes:.2f} | {seconds:.2f} |"


def _values(found: Sequence[InstanceRun], policy: str, field: str) -> list[float]:
    """One field of each run of `policy`, in order; infinite for a run that did not reach the target."""
    return [float(getattr(r, field)) if r.status == "target" else np.inf for r in found if r.policy == policy]


_SAMPLES, _ITERATIONS = 256, 25  # of a power iteration: training samples, and steps


def _curvature(instance: Instance, *, at_end: bool) -> float:
    """The largest eigenvalue of the Hessian of the training loss, by power iteration."""
    b = instance.begin(policies.asp())
    model, parameters = b.program.model, instance.parameters
    if model is None or b.state.learned is None:
        raise ValueError(f"Cannot compute the curvature of seed {instance.seed}: it is timing-only; draw one with a model.")
    if at_end:
        b.advance(USUAL_MOST, float("inf"), USUAL_MOST)
        parameters = b.state.learned.parameters
    rows = tuple(column[:_SAMPLES] for column in instance.context.data.train)
    slope = jax.grad(partial(mean_loss, model._replace(batch=_SAMPLES), rows=rows, count=jnp.asarray(_SAMPLES)))

    @jax.jit
    def again(direction: object) -> tuple[object, jax.Array]:
        _, bent = jax.jvp(slope, (parameters,), (direction,))
        size = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(bent)))
        return jax.tree.map(lambda x: x / size, bent), size

    leaves, tree = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    direction: object = jax.tree.unflatten(
        tree, [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )
    size = jnp.zeros(())
    for _ in range(_ITERATIONS):
        direction, size = again(direction)
    return float(size)


_FIGURES = {"fig2": _fig2, "fig3": _fig3, "table1": _table1, "axis": _axis}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(_FIGURES))
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=CLASSES)
    parser.add_argument("--depth", type=int, help="of all instances of fig2; otherwise drawn per instance")
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--first", type=int, default=200, help="seed of the first instance")
    parser.add_argument("--stragglers", type=int, help="of all instances; the first seeds with this number are taken")
    parser.add_argument("--few", action="store_true", help="only BSP, ASP, SSP, k_async(7) and RLP in fig2")
    parser.add_argument("--policy", action="append", default=[], help="a policy file; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("results/published-rlp"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = (given.classes, given.depth, given.first, given.instances, given.stragglers, given.few)
    asked = _Asked(*wanted, _learned(given.policy), given.out / "runs.jsonl", partial(print, flush=True))
    for what in given.what:
        text = "\n".join(_FIGURES[what](asked))
        (given.out / f"{what}.md").write_text(text + "\n", "utf-8")
        asked.say(f"\n# {what}\n\n{text}")


if __name__ == "__main__":
    main()
