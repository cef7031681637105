"""The guide to machines of one's own, followed literally: its commands, as they are written, on four hosts.

A host is a namespace of networks, of processes and of mounts; it has a home and a folder for temporary files of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from tests.live.support.clusters import alone
from tests.live.support.namespaces import NamespaceCluster, why_not

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "harness" / "live" / "clusters" / "README.md").read_text()

_ATTEMPTS = 3

SCENARIO = """
summary = "Digits on three machines."
[cluster]
nodes = [{ type = "process", count = 3 }]
[workload]
name = "digits-logistic"
[start]
worker_count = 2
policy = "bsp"
learning_rate = 0.2
[target]
metric = "loss"
value = 1.2
check_clocks = 25
[budget]
seconds = 100
"""


class Command(NamedTuple):
    """A script that runs on a host."""

    process: subprocess.Popen[bytes]
    said: IO[str]

    def ended(self, seconds: float = 150.0) -> tuple[int, str]:
        """Wait for its end; returns its status and what it has said."""
        try:
            status = self.process.wait(seconds)
        finally:
            words = self.end()
        return status, words

    def heard(self) -> str:
        """What it has said so far."""
        with Path(f"/proc/self/fd/{self.said.fileno()}").open() as said:  # another position in the file
            return said.read()

    def end(self) -> str:
        """End it now; returns what it has said."""
        self.process.kill()
        self.process.wait()
        self.said.seek(0)
        words = self.said.read()
        self.said.close()
        print(words)  # noqa: T201
        return words


class Host:
    """A machine on which commands are run as a user types them."""

    def __init__(self, network: int, address: str, folder: Path) -> None:
        """`network`: a process that has its network."""
        self.address, self.folder = address, folder
        folder.mkdir()
        named = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        tools = os.pathsep.join([str(Path(sys.executable).parent), named["PATH"]])
        # Of the same name on every host, as /tmp is: Ray's nodes take the name from the head.
        temporary = folder.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        self._environment = named | {
            "HOME": str(folder),
            "PATH": tools,
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(temporary),
            "TMPDIR": str(temporary),
        }
        # The first process of the host adopts and reaps what `ray start` leaves. With it, everything on the host ends.
        first = f"mount -t tmpfs tmpfs {temporary} && echo up && while true; do sleep infinity & wait; done"
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", first]
        self._first = subprocess.Popen(  # noqa: S603
            ["nsenter", f"--net=/proc/{network}/ns/net", *apart],  # noqa: S607
            stdout=subprocess.PIPE,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.read(1), "the host did not start"
        (self._inside,) = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()

    def begin(self, script: str, **environment: str) -> Command:
        """Run a script of a shell that ends with its first command that fails."""
        enter = ["nsenter", f"--target={self._inside}", "--net", "--mount", "--pid"]
        # Not a pipe: what `ray start` leaves behind would keep it open.
        said = tempfile.TemporaryFile("w+", dir=self.folder)  # noqa: SIM115
        process = subprocess.Popen(  # noqa: S603
            [*enter, "bash", "-euc", f"cd\n{script}"],
            env=self._environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        return Command(process, said)

    def run(self, script: str, **environment: str) -> str:
        """Run a script to its end and return what it says; it must not fail."""
        status, said = self.begin(script, **environment).ended()
        assert status == 0, said
        return said

    def start_ray(self, script: str) -> None:
        """Run a script that starts Ray. It is run again where Ray gives up after 30 s, as it does on a very busy machine."""
        for _ in range(_ATTEMPTS):
            status, said = self.begin(script).ended()
            if status == 0:
                return
            self.run("ray stop --force --grace-period 5")  # of this host only: it sees no other processes
        raise AssertionError(said)

    def close(self) -> None:
        self._first.kill()
        self._first.wait()
        assert self._first.stdout is not None
        self._first.stdout.close()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that are connected by a switch. The first is 10.77.0.10. Nothing is left of them afterwards."""
    with ExitStack() as ended:
        ended.enter_context(alone())
        cluster = NamespaceCluster()
        ended.callback(cluster.end)
        folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        ended.callback(shutil.rmtree, folder)
        found = []
        for index in range(count):
            cluster.hosts[index] = cluster.ask("host", name=f"p{index}", address=cluster.ip(index))
            found.append(Host(cluster.hosts[index], cluster.ip(index), folder / str(index)))
            ended.callback(found[-1].close)
        yield found


def blocks(section: str) -> list[str]:
    """The commands of a section, as they are written."""
    section = GUIDE.partition(f"## {section}")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def filled(block: str, words: Mapping[str, str]) -> str:
    """A block with what the reader has to fill in."""
    for name, value in words.items():
        assert name in block, (name, block)
        block = block.replace(name, value)
    return block


MACHINES, TLS = "Machines of your own: `ray start`", "TLS on machines of your own"


def test_the_guide_has_the_steps_that_are_followed_below() -> None:
    token, head, other, job = blocks(MACHINES)
    assert "ray get-auth-token --generate" in token
    assert "ray start --head " in head
    assert "ray start --address=HEAD:6379 " in other
    assert [shlex.split(line, comments=True)[1] for line in job.strip().splitlines()] == ["harness", "harness"]
    authority, machine, use = blocks(TLS)
    assert "authority.key" in authority
    assert "ADDRESS.crt" in machine
    assert use.startswith("export RAY_USE_TLS=1 ")


def give_certificates(machines: Sequence[Host]) -> str:
    """Follow the section on TLS; returns the commands before all others."""
    authority, machine, use = blocks(TLS)
    maker = machines[0]
    maker.run(authority)
    for host in machines:
        maker.run(filled(machine, {"ADDRESS": host.address}))
        for suffix in ("key", "crt"):
            shutil.copy(maker.folder / f"{host.address}.{suffix}", host.folder / ".ray" / f"machine.{suffix}")
        shutil.copy(maker.folder / "authority.crt", host.folder / ".ray" / "authority.crt")
        assert (host.folder / ".ray" / "machine.key").stat().st_mode & 0o777 == 0o600
    return use


EAVESDROPPER = """
import socket
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
line.bind(("eth0", 0))
with open("heard", "wb", buffering=0) as heard:
    while True:
        heard.write(line.recv(70_000))
"""


@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tls", [False, True], ids=["token", "token and TLS"])
def test_the_guide_is_followed_literally_on_four_hosts(*, tls: bool) -> None:
    if reason := why_not():
        pytest.skip(reason)
    token, on_head, on_others, job = blocks(MACHINES)
    with hosts(4) as (head, *others):
        head.run(token)
        for host in others:  # "copy it to ~/.ray/auth_token on all others (mode 0600)"
            shutil.copytree(head.folder / ".ray", host.folder / ".ray")
            assert (host.folder / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        use = give_certificates([head, *others]) if tls else ""
        (head.folder / "listen.py").write_text(EAVESDROPPER)
        eavesdropper = head.begin("exec python listen.py")
        head.start_ray(use + filled(on_head, {"HEAD": head.address}))
        for index, host in enumerate(others):
            host.start_ray(use + filled(on_others, {"HEAD": head.address, '"n0"': f'"n{index}"'}))

        (head.folder / "three.toml").write_text(SCENARIO)
        dry, live = filled(job, {"HEAD": head.address, "SCENARIO": "three.toml"}).strip().splitlines()
        said = head.run(use + dry)
        for index, host in enumerate(others):
            assert f"n{index}  on {host.address}, 1 CPU" in said
        said = head.run(use + live)
        assert "target after" in said, said
        score = json.loads((head.folder / "deployed" / "three" / "score.json").read_text())
        assert score["status"] == "target"

        assert eavesdropper.process.poll() is None
        eavesdropper.end()
        heard = (head.folder / "heard").read_bytes()
        assert len(heard) > 100_000
        assert ((head.folder / ".ray" / "auth_token").read_bytes().strip() in heard) == (not tls)

        # Who has no token, or no certificate, is refused; the cluster's own processes have the ports that the guide says.
        if not tls:
            (others[0].folder / ".ray" / "auth_token").write_text("0" * 64)
        deploy = f"RAY_AUTH_MODE=token harness deploy {head.folder}/three.toml --address {head.address}:6379"
        status, said = others[0].begin(deploy).ended()
        assert status == 2, said
        assert not tls or "RAY_USE_TLS=1" in said
        listening = {int(port) for port in re.findall(r":(\d+) ", head.run("ss -Hltn"))}
        assert {6379, 6380, 6381} <= listening
        system = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
        assert not [port for port in listening if not (6379 <= port <= 6385 or 10002 <= port <= 10201 or port in system)]


SRUN = """#!/bin/bash
# Starts here what Slurm would start on the other machines.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def batch(host: Host) -> Command:
    """Slurm's part: run the batch file on a host, in an allocation of two machines."""
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    return host.begin(f"PATH=~/bin:$PATH exec bash {ROOT}/harness/live/clusters/live.sbatch slow.toml", **environment)


def its_time_is_over(command: Command, words: str) -> tuple[int, str]:
    """Send the batch file SIGTERM, and nobody else, once it has said that."""
    end = time.monotonic() + 200
    while words not in command.heard():
        assert command.process.poll() is None, command.heard()
        assert time.monotonic() < end, command.heard()
        time.sleep(0.5)
    (shell,) = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children").read_text().split()
    os.kill(int(shell), signal.SIGTERM)
    return command.ended()


@pytest.mark.live
@pytest.mark.timeout(900)
def test_the_batch_file_leaves_a_checkpoint_when_its_time_is_over_and_goes_on_from_it() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(1) as (host,):
        (host.folder / "bin").mkdir()
        (host.folder / "bin" / "srun").write_text(SRUN)
        (host.folder / "bin" / "srun").chmod(0o755)
        slow = SCENARIO.replace("count = 3", "count = 2").replace("worker_count = 2", "worker_count = 1")
        (host.folder / "slow.toml").write_text(slow.replace("learning_rate = 0.2", "learning_rate = 1e-6"))
        for words in ("Starting 1 worker, 1 server", "Resuming after"):
            status, said = its_time_is_over(batch(host), "clocks (")
            assert status == 143, said
            assert words in said
            assert "has a checkpoint. The same command with --resume goes on." in said
            # Ray has ended, so that the next job can have the same ports.
            assert not re.findall("ray start|raylet|gcs_server", host.run("ps -eo args"))
