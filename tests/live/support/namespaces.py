"""A Ray cluster whose nodes are hosts of their own: network namespaces with shaped links, control groups with CPU quotas.

Needs root. The namespaces have no names, so they end with their processes, and those end with `room.py`; the control
groups are removed by name. Links are shaped as `harness deploy --live --emulate` does it. A quota's period is short, so that
a step of milliseconds is slowed down, and not stopped now and then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.live.links.emulated_links import shape
from tests.live.support.clusters import Cluster
from tests.live.support.room import enter

__all__ = ["NamespaceCluster", "namespace_cluster", "why_not"]

_PERIOD_MICROSECONDS = 20_000
_GROUPS = Path("/sys/fs/cgroup")


@dataclass
class NamespaceCluster(Cluster):
    """A `Cluster` whose links and CPUs can be limited while it runs. Node `i` is at port ``p{i}`` of the switch."""

    network: str = "10.77.0"
    switch: bool = True

    def add_hosts(self, count: int) -> None:
        """Make hosts 0 to `count` - 1, unshaped and without quotas."""
        for index in range(count):
            self.hosts[index] = self.ask("host", name=f"p{index}", address=self.ip(index))
            self.groups[index] = _make_groups(f"harness-{os.getpid()}", f"{index}")

    def on(self, index: int) -> list[str]:
        """The words before a command that runs it on a host, or on the switch if there is no such host."""
        return ["nsenter", f"--net=/proc/{self.hosts.get(index, self.room)}/ns/net"]

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Move this thread, and those that it starts, to a host's network. Leave the Ray cluster before it ends."""
        with Path("/proc/thread-self/ns/net").open("rb") as before:
            enter(Path(f"/proc/{self.hosts[index]}/ns/net"))
            try:
                yield
            finally:
                enter(Path(f"/proc/self/fd/{before.fileno()}"))

    def set_rate(self, index: int, megabits_per_second: float | None) -> None:
        """Limit what a host's link carries of what is sent, in both directions; None removes the limit."""
        for where, device in ((index, "eth0"), (-1, f"p{index}")):
            qdisc = [*self.on(where), "tc", "qdisc"]
            subprocess.run([*qdisc, "del", "dev", device, "root"], capture_output=True, check=False)  # noqa: S603
            if megabits_per_second is not None:
                _run([*qdisc, "add", "dev", device, "root", *shape(megabits_per_second * 1e6 / 8).split()])

    def cut_link(self, index: int) -> None:
        """Drop all packets to and from a host, without a sign to either side."""
        _run([*self.on(-1), "ip", "link", "set", f"p{index}", "down"])

    def mend_link(self, index: int) -> None:
        _run([*self.on(-1), "ip", "link", "set", f"p{index}", "up"])

    def carried_bytes(self, index: int) -> tuple[int, int]:
        """Bytes that a host has received and sent since it was made."""
        shown = json.loads(_run([*self.on(index), "ip", "-json", "-statistics", "link", "show", "eth0"]))
        counts = shown[0]["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]

    def set_quota(self, index: int, cpus: float | None) -> None:
        """Limit all processes of a node together to so many CPUs; None removes the limit."""
        for group in self.groups[index]:
            quota = None if cpus is None else max(1000, round(cpus * _PERIOD_MICROSECONDS))
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{'max' if quota is None else quota} {_PERIOD_MICROSECONDS}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def end(self) -> None:
        """Close, and remove the control groups; raises AssertionError if a process, a network or a group outlives it."""
        ours = {_network_of(pid) for pid in (self.room, *self.hosts.values())} - {_network_of("self"), ""}
        try:
            self.close()
        finally:
            for group in [g for groups in self.groups.values() for g in groups]:
                _remove(group)
            for parent in {g.parent for groups in self.groups.values() for g in groups}:
                _remove(parent)
        assert not ours & {_network_of(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()}
        assert not [g for groups in self.groups.values() for g in groups if g.exists()]


def why_not() -> str:
    """Why this machine cannot have such a cluster; empty if it can."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [c for c in ("ip", "tc", "nsenter") if shutil.which(c) is None]:
        return f"network namespaces need the command {missing[0]}"
    try:
        for group in _make_groups(f"harness-{os.getpid()}", "probe"):
            _remove(group)
            _remove(group.parent)
    except OSError as error:
        return f"CPU quotas need control groups that can be written ({error})"
    return ""


@pytest.fixture(scope="module")
def namespace_cluster() -> Iterator[NamespaceCluster]:
    """A head and five nodes of one CPU, each a host: one more than a job of four nodes needs, so that one is spare."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = NamespaceCluster()
    try:
        cluster.add_hosts(6)
        cluster.start(range(6), cpus=1)
        yield cluster
    finally:
        cluster.end()


def _make_groups(*names: str) -> list[Path]:
    """A control group for CPU time: of version 2 where that is mounted, otherwise of version 1."""
    if (_GROUPS / "cgroup.controllers").exists():
        group = _GROUPS
        for name in names:
            (group / "cgroup.subtree_control").write_text("+cpu")
            group /= name
            group.mkdir(exist_ok=True)
        return [group]
    group = _GROUPS.joinpath("cpu", *names)
    group.mkdir(parents=True, exist_ok=True)
    return [group]


def _remove(group: Path) -> None:
    """Remove a control group, once the last of its processes is reaped."""
    for _ in range(100):
        try:
            return group.rmdir()
        except FileNotFoundError:
            return None
        except OSError:
            time.sleep(0.02)
    return group.rmdir()


def _network_of(process: int | str) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/net").readlink())
    except OSError:
        return ""


def _run(command: list[str]) -> str:
    made = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert made.returncode == 0, f"{' '.join(command)}: {made.stderr}"
    return made.stdout
