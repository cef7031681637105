"""Records live jobs with the nodes, links and conditions of a scenario, to compare the simulator with. A script, for root:

    chrt --rr 1 python tests/live/support/record_emulated.py [six-equal six-unlike six-delays ...]

`chrt --rr 1` gives it real-time priority: whatever else the machine does, a mini-batch begins when its worker has slept. At
usual priority, also at the highest, a kernel may let a process of lower priority go on for some milliseconds first.

Each design is a cluster of up to six workers and three servers, emulated as by `harness deploy --live --emulate`: sockets
behind shaped links, mini-batches that last as long as the simulator draws. A mini-batch of the model takes a core about a
millisecond, and its worker sleeps for the rest of its time. So six workers compute at the same time on two cores, which
quotas of CPU time could not give.

Where the machine is busy with something else, mini-batches take longer than they should. Such a window is measured again, up
to `_TRIES` times in all, and the one with the least excess is recorded: nothing but the excess decides.

A design is recorded three times, each time by a job of its own that visits all settings in another order. Its windows become
a trace, a folder that `harness calibrate` and `harness fidelity` read, and a section of the `README.md` beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from harness.live.driver.system import LiveSystem
from harness.live.links.emulated_links import EmulatedLinks, emulated_links, why_not
from harness.live.processes import launch
from harness.live.worker.spec import Spec
from harness.record import MADE_BY
from simulators.cluster.profiles import node_seconds
from tests.live.support.recording_pages import described, with_section
from traces.exchanges import Exchange
from traces.parts import Origin, TraceWriter
from traces.record import Recorder
from tuners.actions import Pushes, Reconfigure, Run, Setting, Window

_WORKERS, _SERVERS = ("n0", "n1", "n2", "n3", "n4", "n5"), ("n6", "n7", "n8")
_NODES = (*_WORKERS, *_SERVERS)
_USUAL_RATE = 6e6  # bytes per second: the model takes 13 ms
_REPETITIONS = 3
_TRIES, _BUSY = 3, 0.15  # excess of computing, relative, from which a window is measured again
_TICKS_PER_SECOND = 2**14  # recorded times are multiples of 61 microseconds, which makes files smaller
_ROLES = '{ choice = ["worker", "server", "both", "idle"] }'
_SCENARIO = """
summary = "Handwritten digits on emulated hosts."
[cluster]
profiles = "PROFILES"
nodes = [NODES]
[workload]
name = "digits-mlp"
[workload.overrides.demand]
model_bytes = 76_840 # 19,210 parameters
fixed_seconds = 3e-3
sample_seconds = 4e-4
serial_fraction = 0.0
[start]
workers = ["n0"]
servers = ["n6"]
policy = "asp"
learning_rate = 0.01
batch_size = 8
[free]
ROLES
policy = { choice = ["bsp", "asp", "ssp"] }
staleness = { integer = [0, 4] }
batch_size = { choice = [8, 32, 64, 160] }
[target]
metric = "clocks"
value = 1_000_000
check_clocks = 1_000_000
[budget]
seconds = 100_000
[conditions]
jitter = 0.1
CONDITIONS
"""
_PROFILE = """
[NAME]
cores = 1
memory_bytes = 1e9
nic_bytes_per_second = RATE
devices = [{ kind = "cpu", speed = SPEED }]
source = "emulated"
"""


@dataclass(frozen=True, slots=True)
class Design:
    """A cluster, and the settings that its jobs visit."""

    says: str
    settings: tuple[Setting, ...]
    rates: tuple[float, ...] = (_USUAL_RATE,) * len(_NODES)  # bytes per second, of each node's link
    speeds: tuple[float, ...] = (1.0,) * len(_NODES)
    conditions: str = ""  # of the scenario, besides the noise of mini-batches
    delays: tuple[float, ...] = (0.0,) * len(_NODES)  # seconds in each direction, of each node's link
    congestion_control: str = ""  # of TCP, as Linux calls it; "": the machine's own, which was BBR

    def rate_of(self) -> dict[str, float]:
        """Bytes per second of each node's link, by its name."""
        return dict(zip(_NODES, self.rates, strict=True))

    def scenario(self, profiles: Path) -> str:
        """The scenario's text; the types of nodes are written to a file that it names."""
        kinds = list(zip(_NODES, self.rates, self.speeds, strict=True))
        of_each = [{"NAME": f"host-{n}", "RATE": f"{r:g}", "SPEED": f"{s:g}"} for n, r, s in kinds]
        profiles.write_text("".join(_filled(_PROFILE, values) for values in of_each))
        nodes = ", ".join(f'{{ type = "host-{n}", count = 1, prefix = "n" }}' for n in _NODES)
        roles = "\n".join(f'"role/{n}" = {_ROLES}' for n in _NODES)
        return _filled(_SCENARIO, {"NODES": nodes, "PROFILES": profiles, "ROLES": roles, "CONDITIONS": self.conditions})


def _filled(text: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def setting_of(policy: str, workers: int, servers: int, batch: int, first: int = 0) -> Setting:
    """So many workers, the first of which is number `first`, and so many servers."""
    mine = (_WORKERS[first:] + _WORKERS[:first])[:workers]
    return Setting(
        workers=mine,
        servers=_SERVERS[:servers],
        policy=policy,
        staleness=2 if policy == "ssp" else 0,
        batch_size=batch,
        learning_rate=0.01,
    )


_MANY = (
    *(setting_of("asp", w, 1, b) for w, b in ((1, 8), (1, 32), (2, 8), (3, 8), (3, 32), (5, 8))),
    *(setting_of("asp", w, s, b) for w, s, b in ((2, 2, 8), (4, 2, 8), (4, 2, 32), (6, 2, 8), (3, 3, 8), (6, 3, 32))),
    *(setting_of("bsp", w, s, b) for w, s, b in ((2, 1, 8), (3, 1, 32), (5, 1, 8), (2, 2, 32), (4, 2, 8), (6, 2, 32))),
    *(setting_of("bsp", w, s, b) for w, s, b in ((3, 3, 8), (6, 3, 8))),
    *(setting_of("ssp", w, s, b) for w, s, b in ((3, 1, 8), (4, 2, 8), (6, 2, 8), (6, 3, 32))),
)
_UNLIKE = (
    *(setting_of("asp", 1, 1, 8, first) for first in (0, 1, 3)),
    *(setting_of("asp", 2, 1, 8, first) for first in (0, 2, 3)),
    *(setting_of("asp", w, s, b) for w, s, b in ((3, 1, 8), (4, 1, 8), (2, 2, 8), (4, 2, 8), (4, 2, 32))),
    *(setting_of("asp", w, s, b) for w, s, b in ((6, 2, 8), (6, 3, 32))),
    *(setting_of("bsp", w, s, b) for w, s, b in ((2, 1, 8), (3, 1, 32), (2, 2, 32), (4, 2, 8), (6, 2, 32), (6, 3, 8))),
    *(setting_of("ssp", w, s, b) for w, s, b in ((3, 1, 8), (4, 2, 8), (6, 3, 32))),
)
_FEW = tuple(
    setting_of(p, w, s, 8)
    for p, (w, s) in product(("asp", "bsp", "ssp"), ((2, 1), (3, 1), (4, 2), (6, 3)))
    if not (p == "ssp" and w == 2)
)
_COMPUTING = (
    *(setting_of("asp", w, s, b) for w, s, b in ((1, 1, 64), (1, 1, 160), (2, 1, 64), (3, 1, 160), (4, 2, 64), (6, 3, 160))),
    *(setting_of("bsp", w, s, b) for w, s, b in ((2, 1, 64), (3, 1, 160), (4, 2, 64), (6, 3, 160), (6, 2, 64))),
    *(setting_of("ssp", w, s, b) for w, s, b in ((3, 1, 160), (6, 3, 64))),
)
_DELAYED = (
    *(
        setting_of("asp", w, s, 8, first)
        for w, s, first in ((1, 1, 0), (1, 1, 1), (1, 1, 4), (2, 1, 0), (2, 1, 2), (2, 1, 4))
    ),
    *(setting_of("asp", w, s, 8) for w, s in ((3, 1), (4, 2), (6, 3))),
    *(setting_of("bsp", w, s, 8, first) for w, s, first in ((2, 1, 0), (2, 1, 2), (3, 1, 0), (4, 2, 0), (6, 3, 0))),
    *(setting_of("ssp", w, s, 8) for w, s in ((3, 1), (4, 2), (6, 3))),
)
_DELAYS = (0.0, 0.01, 0.0, 0.0, 0.004, 0.0, 0.0, 0.0, 0.0)
DESIGNS = {
    "six-equal": Design("Hosts are equal.", _MANY),
    "six-unlike": Design(
        "Links and speeds differ.",
        _UNLIKE,
        rates=(12e6, 6e6, 6e6, 3e6, 6e6, 4.5e6, 6e6, 12e6, 4.5e6),
        speeds=(1.0, 1.0, 0.5, 1.0, 0.7, 1.0, 1.0, 1.0, 1.0),
    ),
    "six-stragglers": Design(
        "Hosts are equal, but n1 and n4 sleep in every mini-batch, for 20 ms with a deviation of 10.",
        _FEW,
        conditions='stragglers = { nodes = ["n1", "n4"], mean_seconds = 0.02, sd_seconds = 0.01 }',
    ),
    "six-computing": Design("Hosts are equal; mini-batches are large, so that computing takes most of a cycle.", _COMPUTING),
    "six-delays": Design(
        "Hosts are equal, but the links of n1 and n4 delay what they carry, in both directions, by 10 and 4 ms.",
        _DELAYED,
        delays=_DELAYS,
    ),
    "six-delays-reno": Design(
        "As `six-delays`, with Reno's congestion control in place of BBR.",
        _DELAYED,
        delays=_DELAYS,
        congestion_control="reno",
    ),
}


def _orders(settings: tuple[Setting, ...], repetition: int) -> Iterator[Setting]:
    """All settings in random order, but those with the same processes one after the other: starting some takes seconds."""
    rng = np.random.default_rng(repetition)
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.workers, setting.servers), []).append(setting)
    several = list(groups.values())
    for at in rng.permutation(len(several)):
        for i in rng.permutation(len(several[at])):
            yield several[at][i]


def record(name: str, design: Design, folder: Path, cycles: int) -> None:
    """Record one design; replaces `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    profiles = folder.parent / f"{name}-hosts.toml"
    spec = Spec(name, str(folder.parent / f"{name}.toml"), design.scenario(profiles), 0)
    delays = {node: seconds for node, seconds in zip(_NODES, design.delays, strict=True) if seconds}
    given = {n: {"nic_bytes_per_second": r, "speed": s} for n, r, s in zip(_NODES, design.rates, design.speeds, strict=True)}
    for node, seconds in delays.items():
        given[node]["link_delay_seconds"] = seconds
    try:
        with launch.cluster(None) as offers, TraceWriter(folder, _origin(name), part_rows=1 << 20) as writer:
            placement = launch.place_nodes(spec.job.nodes, offers)
            for repetition in range(_REPETITIONS):
                spec = replace(spec, seed=repetition)
                rates = design.rate_of()
                with (
                    _controlled(design.congestion_control),
                    launch.launch(placement, spec, emulates=True, rates=rates, delays=delays) as processes,
                    LiveSystem(spec, processes, emulates=True) as live,
                ):
                    run = f"{name}/{repetition}"
                    recorder = Recorder(writer, run, start=live.job.start, nodes=_NODES)
                    _visit(live, spec, recorder, _orders(design.settings, repetition), cycles)
                    load = round(os.getloadavg()[0], 1)
                    recorder.end(
                        status=live.status, seconds=live.now, workload=live.job.name, seed=repetition, nodes=given, load=load
                    )
    finally:
        profiles.unlink()


@contextmanager
def _controlled(congestion_control: str) -> Iterator[None]:
    """Have the sockets of emulated links use that congestion control, unless it is ""."""

    @contextmanager
    def made(rates: Mapping[str, float], delays: Mapping[str, float] | None) -> Iterator[EmulatedLinks]:
        with emulated_links(rates, delays) as links:
            for node in (*rates, "") if congestion_control else ():
                write = f"echo {congestion_control} > /proc/sys/net/ipv4/tcp_congestion_control"
                subprocess.run(["nsenter", f"--net={links.of(node)[1]}", "sh", "-c", write], check=True)  # noqa: S603, S607
            yield links

    with patch.object(launch, "emulated_links", made):
        yield


def _visit(live: LiveSystem, spec: Spec, recorder: Recorder, settings: Iterator[Setting], cycles: int) -> None:
    live.perform(Run(clocks=1))
    for setting in settings:
        change, run = Reconfigure(setting, method="migrate"), Run(clocks=cycles * len(setting.workers))
        changed = live.perform(change)
        begun = live.now
        recorder(Exchange(begun, change, changed))
        measured = []
        while len(measured) < _TRIES and not (measured and measured[-1][0] < _BUSY):
            window = live.perform(run)
            measured.append((_excess(spec, window), live.now, window))
            _tell(*measured[-1])
        _, now, window = min(measured, key=lambda m: m[0])
        recorder(Exchange(now, run, replace(window, pushes=_rounded(window.pushes, begun))))


def _excess(spec: Spec, window: Window) -> float:
    """How much longer mini-batches took than they should, as a share: a mean over pushes, without the first fifth."""
    setting, pushes = window.setting, window.pushes
    assert setting is not None
    slow = spec.scenario.conditions.stragglers
    wanted = []
    for name, kind in spec.scenario.cluster.nodes:
        computing, _ = node_seconds(kind, spec.workload.demand, (setting.batch_size,), 0, 0)
        wanted.append(computing + (slow.mean_seconds if slow and name in slow.nodes else 0.0))
    late = pushes.seconds > np.quantile(pushes.seconds, 0.2)
    return float(pushes.compute_seconds[late].mean() / np.array(wanted)[pushes.worker[late]].mean() - 1)


def _rounded(pushes: Pushes, begun: float) -> Pushes:
    """With times in ticks, without losses, and without pushes of before: they may follow a window that is not kept."""
    pushes = Pushes(*(values[pushes.seconds >= begun] for values in pushes))
    seconds = {n: getattr(pushes, n) for n in Pushes._fields if n.endswith("seconds")}
    ticks = {n: np.round(s * _TICKS_PER_SECOND) / _TICKS_PER_SECOND for n, s in seconds.items()}
    return pushes._replace(**ticks, loss=np.full(len(pushes.loss), np.nan))


def _origin(name: str) -> Origin:
    return Origin("harness", MADE_BY, f"live {name}, emulated on one machine of {os.cpu_count()} cores", "Apache-2.0")


def _tell(excess: float, seconds: float, window: Window) -> None:
    of = window.setting
    assert of is not None
    cycle = window.seconds / max(window.clocks, 1) * len(of.workers)
    said = f"{of.policy} {len(of.workers)}x{len(of.servers)} batch {of.batch_size}: {1000 * cycle:.1f} ms a cycle"
    print(f"{seconds:8.1f} s  {said}, computing {excess:+.0%}", flush=True)  # noqa: T201


def _about(design: Design, folder: Path) -> str:
    rates, speeds = (", ".join(f"{v:g}" for v in values) for values in (np.array(design.rates) / 1e6, design.speeds))
    return (
        f"{design.says} Links of n0 to n8: {rates} MB/s; speeds: {speeds}. {len(design.settings)} settings, "
        f"{_REPETITIONS} repetitions. {described(folder)}"
    )


def main() -> None:
    """Record the designs that the command line names, and write the section of each in the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(DESIGNS), help="designs (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[3] / "traces" / "data")
    parser.add_argument("--cycles", type=int, default=200, help="per worker, setting and repetition (default: 200)")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"Cannot record: {reason}.")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        record(name, DESIGNS[name], options.out / name, options.cycles)
        page = options.out / "README.md"
        text = page.read_text() if page.is_file() else "# Recordings of live jobs\n"
        page.write_text(with_section(text, name, _about(DESIGNS[name], options.out / name)))


if __name__ == "__main__":
    main()
