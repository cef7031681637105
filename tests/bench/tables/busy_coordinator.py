"""Prints how long cycles take while the coordinator's link is busy.

chrt --rr 1 python -m tests.bench.tables.busy_coordinator: ten minutes, for root.

The hosts are those of `six-equal` (`tests/live/support/record_emulated.py`). Each setting is measured in four states, in
turn: *free*, where the coordinator and the driver have a link that is not shaped; *shaped*, where it carries 6 MB/s; *busy*,
where it also sends 3 MB/s to a machine that has no part in the job; and *elsewhere*, where that machine sends as much to the
coordinator, whose link is free. Prints the milliseconds of a cycle, a repetition after the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

from harness.live.driver.system import LiveSystem
from harness.live.links.emulated_links import EmulatedLinks, emulated_links, shape, why_not
from harness.live.processes import launch
from harness.live.worker.spec import Spec
from tests.live.support.record_emulated import DESIGNS, setting_of
from tuners.actions import Reconfigure, Run, Setting

_SETTINGS = tuple(setting_of(p, w, s, 8) for (w, s), p in product(((3, 1), (4, 2), (6, 2)), ("asp", "bsp")))
_STATES = ("free", "elsewhere", "shaped", "busy")
_REPETITIONS, _CYCLES, _FIRST = 3, 60, 5
_IDLE = "n8"
_SERVE = """
import socket, sys
line, _ = socket.create_server((sys.argv[1], 7777)).accept()
while line.recv(1 << 16): pass
"""
_SEND = """
import socket, sys, time
line, due = socket.create_connection((sys.argv[1], 7777)), time.monotonic()
while True:
    line.sendall(bytes(76_840))
    due += 76_840 / 3e6
    time.sleep(max(due - time.monotonic(), 0.0))
"""


def _inside(network: str, *command: str) -> list[str]:
    return ["nsenter", f"--net={network}", *command]


@contextmanager
def _sending(source: tuple[str, str], target: tuple[str, str]) -> Iterator[None]:
    """3 MB/s from one address and network to another."""
    with ExitStack() as started:
        for where, program in ((target, _SERVE), (source, _SEND)):
            command = _inside(where[1], sys.executable, "-c", program, target[0])
            process = started.enter_context(subprocess.Popen(command))  # noqa: S603
            started.callback(process.kill)
            time.sleep(0.5)
        yield


@contextmanager
def _state(name: str, links: EmulatedLinks) -> Iterator[None]:
    own, idle = links.of(""), links.of(_IDLE)
    with ExitStack() as kept:
        if name in ("shaped", "busy"):
            rule = _inside(own[1], "tc", "qdisc")
            subprocess.run([*rule, "add", "dev", "eth0", "root", *shape(6e6).split()], check=True)  # noqa: S603
            kept.callback(subprocess.run, [*rule, "del", "dev", "eth0", "root"], check=True)
        if name == "busy":
            kept.enter_context(_sending(own, idle))
        if name == "elsewhere":
            kept.enter_context(_sending(idle, own))
        yield


def _cycle_seconds(live: LiveSystem, setting: Setting) -> float:
    live.perform(Run(clocks=_FIRST * len(setting.workers)))
    window = live.perform(Run(clocks=_CYCLES * len(setting.workers)))
    return float(window.seconds / window.clocks * len(setting.workers))


def main() -> None:
    """Measure all settings."""
    if reason := why_not():
        sys.exit(f"Cannot measure: {reason}.")
    design, made = DESIGNS["six-equal"], list[EmulatedLinks]()

    @contextmanager
    def kept_links(*given: dict[str, float]) -> Iterator[EmulatedLinks]:
        with emulated_links(*given) as links:
            made.append(links)
            yield links

    with (
        tempfile.TemporaryDirectory() as folder,
        launch.cluster(None) as offers,
        patch.object(launch, "emulated_links", kept_links),
    ):
        spec = Spec("busy", f"{folder}/busy.toml", design.scenario(Path(folder) / "hosts.toml"), 0)
        placement = launch.place_nodes(spec.job.nodes, offers)
        with (
            launch.launch(placement, spec, emulates=True, rates=design.rate_of()) as processes,
            LiveSystem(spec, processes, emulates=True) as live,
        ):
            live.perform(Run(clocks=1))
            for setting in _SETTINGS:
                live.perform(Reconfigure(setting, method="migrate"))
                took: dict[str, list[float]] = {name: [] for name in _STATES}
                for _, name in product(range(_REPETITIONS), _STATES):
                    with _state(name, made[-1]):
                        took[name].append(1000 * _cycle_seconds(live, setting))
                said = "  ".join(f"{name} {', '.join(f'{t:.1f}' for t in times)}" for name, times in took.items())
                print(f"{setting.policy} {len(setting.workers)}x{len(setting.servers)}: {said}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
