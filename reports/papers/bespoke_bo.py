"""The bespoke optimiser's results beside the figures that its paper publishes. A program that prints Markdown:

    python -m reports.papers.bespoke_bo optimum|table|convergence|drawn [--nics middle] [--nets ...] [--settings c] ...

`optimum`: the best schedule of each of the 36 experiments, which no tuner knows (`reports.papers.bespoke_optimum`). `table`:
Fig. 1, the time per input of uniform devices, of uniform GPUs and of the schedule that a tuner finds in ten evaluations,
over the best of the sub-graph; and the tuner's distance from the optimum. `convergence`: Fig. 2, setting C and SpeechNet
with a batch of 2^16, three runs of each tuner. Both tables have a row for either model of communication: ours, in which
workers that have the model early compute early, and the paper's, `as_printed`. All evaluations are made, as in the paper.
`drawn`: what each model ends with, over the optimum, on clusters of the paper's machines that the paper does not have.

The paper gives no speeds of network interfaces (NICs). Each of three assumptions has its own speeds of GPU and CPU, fitted
so that uniform GPUs take 9.82 s and the best schedule 4.31 s in the experiment of Fig. 2. That is a description, not a
prediction: two constants for two figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from matplotlib.figure import Figure

from harness.drive import drive
from harness.scenario import Scenario, building, scenario
from reports.papers.bespoke_optimum import iteration_seconds, optimum
from simulators.cluster.profiles import NodeType
from simulators.workloads.catalogue import workload
from tuners import resolve
from tuners.actions import Run, Setting, Window
from tuners.bespoke_bo.schedules import devices, evenly, setting

__all__ = [
    "ASSUMPTIONS",
    "FIG_2",
    "NETS",
    "Assumption",
    "Evaluated",
    "Experiment",
    "best",
    "chosen",
    "drawn_case",
    "evaluated",
    "main",
    "uniform",
]

NETS = {"googlenet": range(6, 10), "alexnet": range(8, 12), "speechnet": range(13, 17)}  # Table 2: log2 of the batches
_TYPES = ("g2.2xlarge", "c4.2xlarge", "c4.4xlarge", "c4.8xlarge")
_SETTINGS = ("a", "b", "c")
_PEAKS = 20.8 / 46  # peak of a hyperthread of g2 over that of c4

_OURS = ("bespoke_bo[stop_early=false]", 10)
_AS_PRINTED = ("bespoke_bo[communication=as_printed,stop_early=false]", 10)
_OTHERS = tuple((f"schedule_search[kind={kind},evaluations=30]", 30) for kind in ("bandit", "gp", "cmaes", "tpe", "random"))
_ALL = (_OURS, _AS_PRINTED, *_OTHERS)

FIG_2 = {"best": 4.31, "uniform GPUs": 9.82, "generic": 8.71}
"""Seconds per iteration: the best schedule, uniform GPUs, and the generic search's best after thirty evaluations."""


class Assumption(NamedTuple):
    """Speeds of NICs in Gbit/s, one per machine type, and the fitted speeds of devices, in reference cores."""

    nics: tuple[float, float, float, float]
    gpu: float
    hyperthread: float  # of c4


ASSUMPTIONS = {
    "low": Assumption((1.0, 1.0, 2.0, 8.5), 60.33, 1.199),
    "middle": Assumption((1.5, 1.0, 2.0, 8.5), 57.20, 1.053),
    "high": Assumption((2.5, 2.5, 5.0, 8.5), 54.92, 0.9245),
}


class Experiment(NamedTuple):
    """One of the paper's 36 experiments, or one on another cluster of its machines, under an assumption about NICs."""

    setting: str  # a | b | c, or numbers of machines of each type, as "2-0-3-1"
    net: str
    log2: int  # of the batch
    nics: str = "middle"

    @property
    def batch(self) -> int:
        """Samples per iteration."""
        return 1 << self.log2

    @property
    def scenario(self) -> Scenario:
        """The arena of the experiment, with the assumed speeds."""
        like = self.setting if self.setting in _SETTINGS else "c"
        found = scenario.load(f"boat-{like}-{self.net}[global_batch_size={self.batch}]")
        if like != self.setting:
            counts = dict(zip("gsmb", map(int, self.setting.split("-")), strict=True))
            kinds = [(kind, *of) for kind, of in zip(_TYPES, counts.items(), strict=True) if of[1]]
            groups = [{"type": kind, "count": count, "prefix": prefix} for kind, prefix, count in kinds]
            names = [f"{prefix}{i}" for prefix, count in counts.items() for i in range(count)]
            found = building.scenario(found, cluster={"nodes": groups}, start={"workers": names, "servers": names})
        nodes = tuple((name, _assumed(kind, ASSUMPTIONS[self.nics])) for name, kind in found.cluster.nodes)
        return replace(found, cluster=replace(found.cluster, nodes=nodes))

    def seconds(self, under: Setting) -> float:
        """Seconds of an iteration under a setting, without noise."""
        return iteration_seconds(self.scenario.cluster, workload(f"bespoke-{self.net}").demand, under)


def _assumed(kind: NodeType, given: Assumption) -> NodeType:
    """The node type with the assumed speeds."""
    at = _TYPES.index(kind.name)
    cpu = given.hyperthread * (_PEAKS if at == 0 else 1)
    speeds = [msgspec.structs.replace(d, speed=given.gpu if d.kind == "gpu" else cpu) for d in kind.devices]
    return msgspec.structs.replace(kind, nic_bytes_per_second=given.nics[at] * 125e6, devices=tuple(speeds))


def _experiments(settings: Sequence[str], nets: Sequence[str], nics: str) -> list[Experiment]:
    """The experiments of some settings and networks."""
    return [Experiment(s, net, log2, nics) for s in settings for net in nets for log2 in NETS[net]]


def drawn_case(number: int, nics: str = "middle") -> Experiment:
    """An experiment that the paper does not have, drawn: 4 to 10 machines of two types or more, a network, and a batch."""
    rng = np.random.default_rng(number)
    while True:
        counts = rng.integers(0, 5, size=len(_TYPES))
        net = str(rng.choice(list(NETS)))
        log2 = int(rng.choice(NETS[net]))
        if 4 <= counts.sum() <= 10 and (counts > 0).sum() > 1:
            return Experiment("-".join(map(str, counts)), net, log2, nics)


@cache
def best(case: Experiment) -> Setting:
    """The setting with the shortest iteration."""
    made = case.scenario
    return optimum(made.cluster, workload(f"bespoke-{case.net}").demand, case.batch, scenario.job(made).start)


def uniform(case: Experiment, kind: str = "") -> Setting | None:
    """The batch evenly on all devices of one kind ("": of any kind); None if there is no such device."""
    job = scenario.job(case.scenario)
    chosen = [(i, d) for i, d in devices(job) if kind in ("", job.nodes[i].devices[d])]
    return setting(job, evenly(job, chosen)) if chosen else None


# ---------------------------------------------------------------------------------------------------------------- tuning


class Evaluated(NamedTuple):
    """One evaluation by a tuner: its measured seconds of an iteration, and the seconds without noise."""

    setting: Setting
    measured: float
    seconds: float


def evaluated(case: Experiment, tuner: str, count: int, seed: int) -> list[Evaluated]:
    """The first `count` evaluations of a tuner: two runs of equal length under one setting, of which the second counts."""
    system = scenario.system(case.scenario, seed)
    found: list[Evaluated] = []
    before: Window | None = None
    for exchange in drive(resolve(tuner).factory(system.job), system):
        seen = exchange.answer if isinstance(exchange.action, Run) and isinstance(exchange.answer, Window) else None
        if seen is None or seen.setting is None:
            before = None
        elif before is None or (before.setting, before.clocks) != (seen.setting, seen.clocks):
            before = seen
        else:
            iterations = seen.clocks / len(seen.setting.workers)
            found.append(Evaluated(seen.setting, seen.seconds / iterations, case.seconds(seen.setting)))
            before = None
        if len(found) == count:
            break
    return found


def chosen(found: Sequence[Evaluated]) -> Evaluated:
    """The evaluation that a tuner would choose: the one with the least measured seconds."""
    return min(found, key=lambda e: e.measured)


# --------------------------------------------------------------------------------------------------------------- printed


def _roles(job_names: Sequence[str], under: Setting) -> str:
    """Numbers of machines by role and first letter of the name: "work gx2 cx4" means two of g and four of c."""
    parts = []
    for role, names in (
        ("work", set(under.workers) - set(under.servers)),
        ("serve", set(under.servers) - set(under.workers)),
        ("both", set(under.workers) & set(under.servers)),
    ):
        counted = {p: sum(n[0] == p for n in names) for p in dict.fromkeys(n[0] for n in job_names)}
        if names:
            parts.append(f"{role} " + " ".join(f"{p}x{c}" for p, c in counted.items() if c))
    return ", ".join(parts)


def _optimum_lines(options: argparse.Namespace) -> Iterator[str]:
    """The best schedule of each experiment."""
    yield "| NICs | case | uniform devices | uniform GPUs | optimum | workers | roles |\n|---|---|---|---|---|---|---|"
    for nics in options.nics:
        for case in _experiments(options.settings, options.nets, nics):
            under, gpus, even = best(case), uniform(case, "gpu"), uniform(case)
            names = [n for n, _ in case.scenario.cluster.nodes]
            shown = "" if gpus is None else f"{case.seconds(gpus):.3f}"
            yield (
                f"| {nics} | {case.setting.upper()} {case.net} 2^{case.log2} | {case.seconds(even or under):.3f} | {shown} "
                f"| {case.seconds(under):.3f} | {len(under.workers)} | {_roles(names, under)} |"
            )


def _table_lines(options: argparse.Namespace) -> Iterator[str]:
    """Fig. 1, with a row per tuner."""
    yield "| NICs | case | tuner | ms/input | uniform devices | uniform GPUs | found | workers | over the optimum | host s |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    over: dict[tuple[str, str], list[float]] = {}
    for nics in options.nics:
        for s in options.settings:
            for net in options.nets:
                for tuner in options.tuner:
                    kept = over.setdefault((nics, tuner), [])
                    yield from _subgraph(_experiments([s], [net], nics), tuner, options, kept)
    for (nics, tuner), found in over.items():
        within = sum(x <= 1.1 for x in found)
        median = statistics.median(found)
        yield f"\n{nics}, {tuner}: within 10 % of the optimum in {within} of {len(found)}; median {median:.3f}"


def _drawn_lines(options: argparse.Namespace) -> Iterator[str]:
    """Seconds of the chosen schedule over the optimum's, without noise, on clusters that are drawn; a column per tuner."""
    yield f"| NICs | cluster ({', '.join(_TYPES)}), network, batch | {' | '.join(options.tuner)} |"
    yield "|---|---|" + "---|" * len(options.tuner)
    for nics in options.nics:
        over: list[list[float]] = []
        for number in range(options.clusters):
            case = drawn_case(number, nics)
            ends = [chosen(evaluated(case, tuner, options.evaluations, options.seed)).seconds for tuner in options.tuner]
            over.append([end / case.seconds(best(case)) for end in ends])
            shown = " | ".join(f"{x:.3f}" for x in over[-1])
            yield f"| {nics} | {case.setting}, {case.net}, 2^{case.log2} | {shown} |"
        for name, of in (
            ("median", np.median),
            ("geometric mean", lambda x, axis: np.exp(np.mean(np.log(x), axis))),
            ("largest", np.max),
        ):
            yield f"| {nics} | {name} | {' | '.join(f'{x:.3f}' for x in of(np.array(over), axis=0))} |"


def _subgraph(four: Sequence[Experiment], tuner: str, options: argparse.Namespace, over: list[float]) -> Iterator[str]:
    """One sub-graph of Fig. 1: the four batches of a network in a setting, over the least time per input among them."""
    started = [time.perf_counter()]
    found = []
    for case in four:
        found.append(chosen(evaluated(case, tuner, options.evaluations, options.seed)))
        started.append(time.perf_counter())
    norm = min(e.seconds / c.batch for c, e in zip(four, found, strict=True))
    for i, (case, end) in enumerate(zip(four, found, strict=True)):
        even, gpus = uniform(case), uniform(case, "gpu")
        over.append(end.seconds / case.seconds(best(case)))
        shares = ["" if u is None else f"{case.seconds(u) / case.batch / norm:.2f}" for u in (even, gpus, end.setting)]
        yield (
            f"| {case.nics} | {case.setting.upper()} {case.net} 2^{case.log2} | {tuner} | {1e3 * norm:.3f} "
            f"| {' | '.join(shares)} | {len(end.setting.workers)} | {over[-1]:.3f} | {started[i + 1] - started[i]:.0f} |"
        )


def _convergence_lines(options: argparse.Namespace) -> Iterator[str]:
    """Fig. 2, as a table and optionally as a picture."""
    yield "| NICs | tuner | evaluations | best, three runs (s, without noise) | median | over the optimum | best so far |"
    yield "|---|---|---|---|---|---|---|"
    for nics in options.nics:
        case = Experiment("c", "speechnet", 16, nics)
        found: dict[str, list[list[float]]] = {}
        least = case.seconds(best(case))
        gpus = case.seconds(uniform(case, "gpu") or best(case))
        printed = f"[{FIG_2['uniform GPUs']}]"
        yield f"| {nics} | optimum | | {least:.3f} | [{FIG_2['best']}] | 1 | uniform GPUs {gpus:.3f} {printed} |"
        for tuner, count in options.tuners:
            runs = [evaluated(case, tuner, count, seed) for seed in range(3)]
            ends = [chosen(r).seconds for r in runs]
            marks = [n for n in (1, 5, 10, 20, 30) if n <= count]
            curves = "; ".join(
                f"{n}: " + "/".join(f"{chosen(r[:n]).seconds:.2f}" for r in runs) for n in marks if all(len(r) for r in runs)
            )
            median = statistics.median(ends)
            shown = "/".join(f"{e:.2f}" for e in ends)
            yield f"| {nics} | {tuner} | {count} | {shown} | {median:.2f} | {median / least:.2f} | {curves} |"
            found[tuner] = [[chosen(r[:n]).seconds for n in range(1, len(r) + 1)] for r in runs if r]
        if options.picture:
            _draw_convergence(options.picture.with_stem(f"{options.picture.stem}-{nics}"), found, least)


def _draw_convergence(path: Path, found: Mapping[str, list[list[float]]], least: float) -> None:
    """Fig. 2 as a picture: the best schedule so far, in seconds without noise, over evaluations; one line per run."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (tuner, runs) in enumerate(found.items()):
        for run, seconds in enumerate(runs):
            label = _short(tuner) if run == 0 else None
            axes.step(range(1, len(seconds) + 1), seconds, where="post", color=f"C{number}", label=label)
    axes.axhline(least, color="0.5", linestyle=":", label="optimum")
    axes.set(xlabel="evaluations", ylabel="seconds per iteration, best so far", ylim=(0, None))
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


def _short(tuner: str) -> str:
    """A tuner's name for a legend: without the options that all of its kind have."""
    for common in ("schedule_search[kind=", ",evaluations=30]", "[stop_early=false]", ",stop_early=false"):
        tuner = tuner.replace(common, "")
    return tuner


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("optimum", "table", "convergence", "drawn"))
    parser.add_argument("--nics", nargs="+", default=["middle"], choices=tuple(ASSUMPTIONS))
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=tuple(NETS))
    parser.add_argument("--settings", nargs="+", default=list(_SETTINGS), choices=_SETTINGS)
    parser.add_argument(
        "--tuner", nargs="+", default=[_OURS[0], _AS_PRINTED[0]], help="tuners of the table, and on drawn clusters"
    )
    parser.add_argument("--clusters", type=int, default=12, metavar="N", help="how many are drawn (default: 12)")
    parser.add_argument("--evaluations", type=int, default=_OURS[1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuners", nargs="+", default=[name for name, _ in _ALL], help="tuners of the convergence")
    parser.add_argument(
        "--picture", type=Path, help="PNG or SVG file for the picture of the convergence, one per assumption"
    )
    options = parser.parse_args()
    counts = dict(_ALL)
    options.tuners = [(name, counts.get(name, 10 if "bespoke" in name else 30)) for name in options.tuners]
    of = {"optimum": _optimum_lines, "table": _table_lines, "convergence": _convergence_lines, "drawn": _drawn_lines}
    lines = of[options.what]
    for line in lines(options):
        print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
