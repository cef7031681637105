"""How far above the best setting of a grid Cruise ends, in its arenas and on two clusters of three kinds of machines.

    python -m reports.papers.cruise_reach [--arenas cruise-nmf-mixed three-a] [--seeds 5]

prints, for our model, the limit of busy servers, the public code's model and the paper's: how much longer the job takes
under the setting at the end of a run than under the best setting of the grid, median and worst of the seeds [the paper's
claim of 6.5 %, for machines of one kind]. Both are simulated without a tuner, with two other seeds. For machines of one
kind the grid is every number of workers. For several it is what four models, told the true constants, like best of all roles
and shares. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path

import harness.scenario as scenario
from harness.drive import play
from simulators.cluster.profiles import node_seconds
from tuners.actions import Reconfigure, Run, Setting, TunerFactory, Window
from tuners.cruise import cruise
from tuners.cruise.placement import MachineKind, Problem, ServerTerm, place, splits

__all__ = ["ARENAS", "MODELS", "best_seconds", "candidates", "kinds_of", "main", "reached"]

MODELS: dict[str, TunerFactory] = {
    "default": cruise,
    "limit": partial(cruise, server_term="own", overlap=True),
    "code": partial(cruise, server_term="sum", overlap=False),
    "paper": partial(cruise, server_term="paper", overlap=False),
}
ARENAS = (
    "cruise-nmf-32",
    "cruise-mlr-32",
    "cruise-lda-32",
    "cruise-lda-4k-32",
    "cruise-nmf-52-m4-large",
    "cruise-nmf-52-m4-xlarge",
    "cruise-nmf-mixed",
    "cruise-mlr-mixed",
    "cruise-lda-mixed",
    "three-a",
    "three-b",
)
_SEEDS = (100, 101)  # of settings that are simulated without a tuner
_THREE_KINDS = """
summary = "NMF on a cluster of three kinds of machines"
cluster.nodes = [{nodes}]
cluster.discipline = "{discipline}"
workload.name = "cruise-nmf"
start = {{ workers = {workers}, servers = {servers}, policy = "asp", batch_size = 10000 }}
free."role/*" = {{ choice = ["worker", "server"] }}
target = {{ metric = "clocks", value = 1900, by_share = true, check_clocks = 19 }}
budget.seconds = 40000
conditions.jitter = 0.2
"""
_CLUSTERS = {
    "three-a": ("fifo", (("r4.xlarge", 12, "n"), ("m4.large", 8, "slim"), ("r4.4xlarge", 4, "big"))),
    "three-b": ("maxmin", (("m4.xlarge", 8, "n"), ("m4.large", 10, "slim"), ("c4.8xlarge", 3, "wide"))),
}


def _three_kinds(name: str) -> scenario.Scenario:
    """A scenario on one of the two clusters. At the start two thirds of each kind are workers."""
    discipline, kinds = _CLUSTERS[name]
    nodes = ", ".join(f'{{ type = "{kind}", count = {count}, prefix = "{of}" }}' for kind, count, of in kinds)
    working = [f"{of}{i}" for _, count, of in kinds for i in range((2 * count + 2) // 3)]
    serving = [f"{of}{i}" for _, count, of in kinds for i in range((2 * count + 2) // 3, count)]
    text = _THREE_KINDS.format(nodes=nodes, discipline=discipline, workers=working, servers=serving)
    return scenario.parse(text.replace("'", '"'), name=name, origin=Path(f"{name}.toml"))


@cache
def _loaded(name: str) -> scenario.Scenario:
    return _three_kinds(name) if name in _CLUSTERS else scenario.load(name)


def _seconds(name: str, setting: Setting, seeds: tuple[int, ...] = _SEEDS) -> float:
    """Mean seconds to the target under one setting."""

    def once(seed: int) -> float:
        window = scenario.system(_loaded(name), seed, setting).perform(Run(clocks=10**7))
        return window.end_seconds if window.status == "target" else float("inf")

    return statistics.fmean(once(seed) for seed in seeds)


def candidates(name: str, most: int = 8) -> list[Setting]:
    """The grid: every number of workers, or the `most` best roles and shares of each model with the true constants."""
    found = _loaded(name)
    job = scenario.job(found)
    kinds, machines = kinds_of(found)
    if len(kinds) == 1:
        workers = range(1, len(machines))
        return [replace(job.start, workers=tuple(machines[:w]), servers=tuple(machines[w:])) for w in workers]
    terms: tuple[tuple[ServerTerm, bool], ...] = (("queue", False), ("own", True), ("own", False), ("sum", False))
    settings = []
    for term, overlap in terms:
        problem = Problem(
            kinds=kinds,
            samples=job.samples,
            batch_size=job.start.batch_size,
            model_bytes=job.model_bytes,
            server_term=term,
            overlap=overlap,
        )
        for split in islice(splits(problem), most):
            at = place(problem, split)
            settings.append(
                replace(
                    job.start,
                    workers=tuple(machines[i] for i in at.workers),
                    servers=tuple(machines[j] for j in at.servers),
                    data_shares=tuple(d / sum(at.data) for d in at.data),
                    model_shares=tuple(m / sum(at.model) for m in at.model),
                )
            )
    return settings


def kinds_of(found: scenario.Scenario) -> tuple[tuple[MachineKind, ...], list[str]]:
    """The machines as Cruise would see them if it measured without error, and their names in this order."""
    batch, demand = scenario.job(found).start.batch_size, scenario.workload_of(found).demand
    types = {kind.name: kind for _, kind in found.cluster.nodes}
    names = {kind: [n for n, of in found.cluster.nodes if of.name == kind] for kind in types}
    made = tuple(
        MachineKind(
            count=len(names[of]),
            compute_seconds=node_seconds(kind, demand, (batch, *[0] * (len(kind.devices) - 1)))[0] / batch,
            bytes_per_second=kind.nic_bytes_per_second,
            service_bytes_per_second=min(kind.nic_bytes_per_second, kind.service_bytes_per_second),
        )
        for of, kind in types.items()
    )
    return made, [n for of in types for n in names[of]]


@cache
def best_seconds(name: str) -> float:
    """Seconds to the target under the best setting of the grid: one seed for all, two for the best six."""
    ranked = sorted(candidates(name), key=lambda s: _seconds(name, s, _SEEDS[:1]))
    return min(_seconds(name, s) for s in ranked[:6])


def reached(name: str, tuner: TunerFactory, seed: int) -> tuple[float, Setting, int]:
    """Seconds to the target under the setting at the end of a run over the best of the grid; that setting; and changes."""
    run = play(tuner, scenario.system(_loaded(name), seed))
    windows = [e.answer for e in run.exchanges if isinstance(e.answer, Window)]
    end = windows[-1].setting or run.job.start
    asked = sum(isinstance(e.action, Reconfigure) for e in run.exchanges)
    return _seconds(name, end) / best_seconds(name), end, asked


def _lines(names: list[str], seeds: int) -> Iterator[str]:
    for name in names:
        types = {n: kind.name for n, kind in _loaded(name).cluster.nodes}
        yield f"{name}: best of {len(candidates(name))} settings {best_seconds(name):.1f} s"
        for label, tuner in MODELS.items():
            runs = [reached(name, tuner, seed) for seed in range(seeds)]
            off = [ratio - 1 for ratio, _, _ in runs]
            roles = [
                "+".join(str(sum(types[n] == of for n in group)) for of in dict.fromkeys(types.values()))
                for group in (runs[0][1].workers, runs[0][1].servers)
            ]
            yield (
                f"   {label:8} {statistics.median(off):5.1%} off, worst {max(off):5.1%} [6.5 %]; seed 0: "
                f"({roles[0]}, {roles[1]}) after {runs[0][2]} changes"
            )


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arenas", nargs="+", default=list(ARENAS), choices=ARENAS)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for line in _lines(options.arenas, options.seeds):
        print(line, flush=True)  # noqa: T201  # a script


if __name__ == "__main__":
    main()
