"""Ray clusters on one machine, for tests: several raylets, each with its own address, that can be killed and stopped.

`loop_cluster` needs no rights: its nodes are processes with addresses of the loopback network.
`tests.live.support.namespaces` makes the same of network namespaces. Neither joins the cluster: the test does, by `address`,
because a process can be in one cluster only.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.live.support.room import descendants, kill_all

__all__ = ["Cluster", "alone", "free_port", "loop_cluster", "loop_network"]

_STORE_BYTES = 80 * 2**20
_made = itertools.count()


@dataclass
class Cluster:
    """Node 0 is the head and has no cores for work; all others have `cpus`. Node `i` has 1000 of the resource ``node_i``.
    Each node but the head is also a node of the scenario: node 1 is its ``n0``, and so on."""

    network: str  # first three bytes of the addresses
    port: int = field(default_factory=lambda: free_port())  # of the head; on all addresses of the machine, as Ray has it
    how: str = "fork"  # "fork": with stand-ins for Ray's agents; "agents": with Ray's own; "command": by `ray start`
    switch: bool = False  # whether hosts are network namespaces
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-")))
    nodes: dict[int, int] = field(default_factory=dict)  # by node: the root of its processes
    hosts: dict[int, int] = field(default_factory=dict)  # by node: the process whose network it has, if not this machine's
    groups: dict[int, list[Path]] = field(default_factory=dict)  # by node: the control groups that it starts in

    def __post_init__(self) -> None:
        self._errors = (self.folder / "room.txt").open("wb")
        self._room = subprocess.Popen(  # noqa: S603 (our own script)
            [sys.executable, str(Path(__file__).with_name("room.py")), str(self.folder), *["switch"] * self.switch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    @property
    def room(self) -> int:
        """The process under which all others run."""
        return self._room.pid

    @property
    def address(self) -> str:
        """The address to join."""
        return f"{self.ip(0)}:{self.port}"

    def ip(self, index: int) -> str:
        return f"{self.network}.{10 + index}"

    def start(self, indices: Sequence[int], *, cpus: float = 2) -> None:
        """Start these nodes; raises RuntimeError with what Ray said if one does not come up."""
        for group in ([i for i in indices if i == 0], [i for i in indices if i]):  # the head first
            made = self.ask("nodes", nodes=[self._node(i, cpus) for i in group])
            self.nodes |= dict(zip(group, made, strict=True))

    def _node(self, index: int, cpus: float) -> dict[str, Any]:
        options = {
            "node_ip_address": self.ip(index),
            "num_cpus": cpus if index else 0,
            "object_store_memory": _STORE_BYTES,
            "resources": {f"node_{index}": 1000} | ({f"n{index - 1}": 1} if index else {}),
            "temp_dir": str(self.folder / str(index)),  # raylets that share one choose the same names for sockets
        }
        options |= {"gcs_address": self.address} if index else {"gcs_server_port": self.port}
        groups = [str(g) for g in self.groups.get(index, ())]
        return {"host": self.hosts.get(index, 0), "cgroups": groups, "how": self.how, "head": not index, "options": options}

    def ask(self, what: str, **request: Any) -> Any:
        """Make the room create something; raises RuntimeError if it cannot."""
        assert self._room.stdin is not None
        assert self._room.stdout is not None
        self._room.stdin.write(json.dumps({"make": what} | request).encode() + b"\n")
        self._room.stdin.flush()
        line = self._room.stdout.readline()
        answer = json.loads(line) if line else {"error": (self.folder / "room.txt").read_text()}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["made"]

    def processes(self, index: int) -> dict[int, str]:
        """What runs on node `index`: process identifiers and command lines."""
        found = {}
        for pid in descendants(self.nodes[index]):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def kill(self, index: int) -> None:
        """Kill everything on node `index` at once, as when it loses power."""
        kill_all(self.nodes.pop(index))

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send everything on node `index` a signal: SIGSTOP hangs it, SIGCONT lets it go on."""
        for pid in descendants(self.nodes[index]):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End every process and remove every file; raises AssertionError if something outlives it."""
        born = descendants(self.room)
        assert self._room.stdin is not None
        assert self._room.stdout is not None
        self._room.stdin.close()
        try:
            assert self._room.wait(timeout=20) == 0, self._errors.name
        finally:
            self._room.kill()
            self._room.wait()
            self._room.stdout.close()
            self._errors.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        assert [p for p in born if Path(f"/proc/{p}").exists()] == []


def free_port() -> int:
    """A port that nobody listens on. It is none of those that the kernel gives: a socket of another test that is made before
    Ray listens could have it then."""
    while True:
        with suppress(OSError), socket.create_server(("", random.randrange(20_000, 32_768))) as server:
            return int(server.getsockname()[1])


def loop_network() -> str:
    """A loopback network that no other cluster has, of this process or of another test's."""
    here = os.getpid() * 8 + next(_made) % 8
    return f"127.{1 + here // 256 % 254}.{here % 256}"


@contextmanager
def alone() -> Iterator[None]:
    """Until the context or the process ends, no other test process has a cluster: there are not enough cores for two."""
    with (Path(tempfile.gettempdir()) / f"ray-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def loop_cluster() -> Iterator[Cluster]:
    """A head and three nodes with two cores each, on loopback."""
    with alone():
        cluster = Cluster(loop_network())
        try:
            cluster.start(range(4))
            yield cluster
        finally:
            cluster.close()
