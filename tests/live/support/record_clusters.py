"""Records live jobs on clusters with known links and CPUs, to compare the simulator with. A script, for root:

    python tests/live/support/record_clusters.py [homogeneous heterogeneous stragglers reconfigurations] [--clocks 60]

Each cluster is five hosts (network namespaces) with links of tens of Mbit/s, slow enough that what the machine does besides
matters little. One job visits every setting of a design and trains so many clocks per worker under each. Its windows become
a trace, a folder that `harness calibrate` and `harness fidelity` read. Its section of the page beside it says what was set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import tests.live.conftest  # noqa: F401 (Ray's settings, before it is imported)
from harness.live.driver.system import LiveSystem
from harness.live.worker.spec import Spec
from harness.record import MADE_BY
from tests.live.support.faults import deployed
from tests.live.support.namespaces import NamespaceCluster, why_not
from tests.live.support.recording_pages import described, with_section
from traces.exchanges import Exchange
from traces.parts import Origin, TraceWriter
from traces.record import Recorder
from tuners.actions import Method, Reconfigure, Run, Setting, Window

_NODES = 5
_ROLES = '{ choice = ["worker", "server", "both", "idle"] }'
_SCENARIO = """
summary = "Handwritten digits on five hosts with slow links."
[cluster]
nodes = [{ type = "process", count = 5, prefix = "n" }]
[workload]
name = "digits-mlp"
[start]
workers = ["n0", "n1", "n2"]
servers = ["n3", "n4"]
policy = "bsp"
learning_rate = 0.01
[free]
ROLES
policy = { choice = ["bsp", "asp", "ssp"] }
staleness = { integer = [0, 4] }
batch_size = { choice = [8, 16, 64, 256] }
transfer_bits = { choice = [16, 32] }
[target]
metric = "clocks"
value = 1_000_000
check_clocks = 1_000_000
[budget]
seconds = 100_000
""".replace("ROLES", "\n".join(f'"role/n{i}" = {_ROLES}' for i in range(_NODES)))


@dataclass(frozen=True, slots=True)
class Design:
    """A cluster, and the settings that its job visits."""

    says: str
    megabits_per_second: tuple[float, ...]  # of each host's link
    cpus: tuple[float | None, ...]  # of each host; None: no quota
    visits: tuple[tuple[Setting, Method], ...]
    slow_cpus: float | None = None  # of host 1, for two seconds out of ten


def _settings() -> tuple[Setting, ...]:
    """Workers and servers on hosts of their own; fast ones first."""
    names = [f"n{i}" for i in range(_NODES)]
    made = []
    for workers, servers in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)):
        base = Setting(workers=tuple(names[:workers]), servers=tuple(names[_NODES - servers :]))
        made += [replace(base, policy=p, batch_size=b) for p, b in product(("bsp", "asp"), (16, 256))]
    return tuple(m for m in made if len(m.workers) > 1 or m.policy == "asp")


def _designs() -> dict[str, Design]:
    alike = _settings()
    methods: tuple[Method, ...] = ("migrate", "relocate", "checkpoint")
    moved = [(alike[(7 * i) % len(alike)], method) for i, method in enumerate(methods * 4)]
    plain: tuple[float | None, ...] = (None,) * _NODES
    return {
        "homogeneous": Design("Five equal hosts.", (8.0,) * _NODES, plain, tuple((s, "migrate") for s in alike)),
        "heterogeneous": Design(
            "Links and CPUs differ.",
            (16.0, 8.0, 8.0, 4.0, 8.0),
            (None, 0.5, 0.3, 0.3, None),
            tuple((s, "migrate") for s in alike),
        ),
        "stragglers": Design(
            "Five equal hosts, of which n1 has a twentieth of a CPU for two seconds out of ten.",
            (8.0,) * _NODES,
            plain,
            tuple((s, "migrate") for s in alike),
            slow_cpus=0.05,
        ),
        "reconfigurations": Design(
            "Five equal hosts; settings come by migrating, relocating and from a checkpoint, in turn.",
            (8.0,) * _NODES,
            plain,
            tuple(moved),
        ),
    }


def _visit(live: LiveSystem, name: str, design: Design, folder: Path, clocks: int) -> None:
    live.perform(Run(clocks=1))  # takes the pushes from before the links were shaped, so that they are not recorded
    with TraceWriter(folder, _origin(name)) as writer:
        recorder = Recorder(writer, name, start=live.job.start, nodes=[node.name for node in live.job.nodes])
        for setting, method in design.visits:
            for action in (Reconfigure(setting, method=method), Run(clocks=clocks * len(setting.workers))):
                answer = live.perform(action)
                exchange = Exchange(live.now, action, answer)
                recorder(exchange)
                _tell(exchange)
        recorder.end(status=live.status, seconds=live.now, workload=live.job.name, seed=0, nodes=_given(design))


def _given(design: Design) -> dict[str, dict[str, float | None]]:
    """What each host was given, as calibration reads it."""
    each = zip(design.megabits_per_second, design.cpus, strict=True)
    return {f"n{i}": {"nic_bytes_per_second": rate * 1e6 / 8, "cpus": cpus} for i, (rate, cpus) in enumerate(each)}


@contextmanager
def _straggling(cluster: NamespaceCluster, cpus: float | None) -> Iterator[None]:
    over = threading.Event()

    def take_and_give() -> None:
        while not over.wait(8.0):
            cluster.set_quota(2, cpus)  # the cluster's host 2 is the scenario's n1
            over.wait(2.0)
            cluster.set_quota(2, None)

    thread = threading.Thread(target=take_and_give)
    if cpus is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if cpus is not None:
            thread.join()


def record(name: str, design: Design, folder: Path, clocks: int) -> None:
    """Record one design; replaces `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    spec = Spec(name, f"{name}.toml", _SCENARIO, 0)
    cluster = NamespaceCluster()
    try:
        cluster.add_hosts(_NODES + 1)
        cluster.start(range(_NODES + 1))
        with cluster.inside(0), deployed(spec, cluster) as job:
            for i, (rate, cpus) in enumerate(zip(design.megabits_per_second, design.cpus, strict=True), 1):
                cluster.set_rate(i, rate)
                cluster.set_quota(i, cpus)
            with _straggling(cluster, design.slow_cpus):
                _visit(job.live, name, design, folder, clocks)
    finally:
        cluster.end()


def _origin(name: str) -> Origin:
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return Origin("harness", MADE_BY, f"live {name}, on one machine of {cores} cores at a load of {load:.0f}", "Apache-2.0")


def _tell(exchange: Exchange) -> None:
    answer = exchange.answer
    if isinstance(answer, Window) and answer.setting is not None:
        setting, rate = answer.setting, answer.clocks / answer.seconds
        said = (
            f"{len(setting.workers)} workers, {len(setting.servers)} servers, {setting.policy}, batch {setting.batch_size}"
        )
    else:
        said, rate = f"{type(exchange.action).__name__}: {answer}", float("nan")
    print(f"{exchange.seconds:8.1f} s  {rate:6.1f}/s  {said}", flush=True)  # noqa: T201


def _about(design: Design, folder: Path) -> str:
    cpus = ", ".join("all" if c is None else f"{c:g}" for c in design.cpus)
    return (
        f"{design.says} Links of n0 to n4: {', '.join(f'{m:g}' for m in design.megabits_per_second)} Mbit/s; "
        f"CPUs: {cpus}. {len(design.visits)} settings. {described(folder)}"
    )


def main() -> None:
    """Record the designs that the command line names, and write the section of each in the README."""
    designs = _designs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(designs), help="designs (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[3] / "traces" / "data")
    parser.add_argument("--clocks", type=int, default=60, help="per worker and setting (default: 60)")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"Cannot record: {reason}.")
    for name in options.names:
        record(name, designs[name], options.out / name, options.clocks)
        page = options.out / "README.md"
        text = page.read_text() if page.is_file() else "# Recordings of live jobs\n"
        page.write_text(with_section(text, name, _about(designs[name], options.out / name)))


if __name__ == "__main__":
    main()
