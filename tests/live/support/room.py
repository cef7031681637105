"""The machine room of a test cluster: a process that starts Ray nodes, and ends all of them when it ends.

`clusters.py` runs it as ``python room.py``: a request per line on standard input, an answer per line on standard output.
When standard input closes, it kills every process under it and removes its folder. Ray is imported once and each node is
forked from here: five nodes start in one or two seconds, where five `ray start` take twelve. With `switch` the room has its
own network and is the switch of the hosts. Hosts are network namespaces without names, so nothing of them is left over.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["descendants", "enter", "kill_all"]

_C = ctypes.CDLL(None, use_errno=True)
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_NEW_NETWORK = 0x40000000

_AGENT = """#!/bin/sh
# Replaces one of the two Python agents of a raylet, 50 MB each: writes its ports and sleeps.
say() { printf %s "$2" > "$1.part" && mv "$1.part" "$1"; }
case $3 in
dashboard)
    say "$1/metrics_agent_port_$2" 52365
    say "$1/metrics_export_port_$2" 52367
    say "$1/dashboard_agent_listen_port_$2" 52366 ;;
*) say "$1/runtime_env_agent_port_$2" 52368 ;;
esac
exec sleep infinity
"""


def _check(returned: int) -> None:
    if returned:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(network: Path) -> None:
    """Move this thread, and what it starts from now on, to a network, such as ``/proc/PID/ns/net``; needs root."""
    with network.open("rb") as opened:
        _check(_C.setns(opened.fileno(), _NEW_NETWORK))


def descendants(root: int) -> list[int]:
    """The processes under `root`, in no order, without zombies."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(folder.name))
    found, left = [], [root]
    while left:
        found += (under := children.get(left.pop(), []))
        left += under
    return found


def kill_all(root: int) -> None:
    """Kill all processes under `root`, also those that start meanwhile. Raises RuntimeError if one does not end."""
    for _ in range(200):
        if not (left := descendants(root)):
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    raise RuntimeError(f"Cannot kill {left}.")


# ------------------------------------------------------------------------------------------------------ the room's process


class _Room:
    def __init__(self, folder: Path, *, switch: bool) -> None:
        self._folder = folder
        _C.prctl(_SET_CHILD_SUBREAPER, 1)
        if switch:
            _check(_C.unshare(_NEW_NETWORK))
            _run("ip link add br0 type bridge")
            _run("ip link set br0 up")
        (folder / "agent.sh").write_text(_AGENT)

    def host(self, name: str, address: str) -> int:
        """Make a host that is connected to the switch; returns the process that keeps its network."""
        made, told = os.pipe()
        pid = _forked(lambda: _keep_network(told))
        os.close(told)
        os.read(made, 1)
        os.close(made)
        inside = f"nsenter --target {pid} --net"
        _run(f"ip link add {name} type veth peer name eth0 netns {pid}")
        _run(f"ip link set {name} master br0 up")
        for command in ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"):
            _run(f"{inside} ip {command}")
        return pid

    def nodes(self, nodes: list[dict[str, Any]]) -> list[int]:
        """Start Ray nodes in parallel and wait until they are ready; returns the root process of each."""
        pids, pipes = [], []
        for given in nodes:
            made, told = os.pipe()
            pids.append(_forked(partial(self._be_node, told, **given)))
            os.close(told)
            pipes.append(os.fdopen(made))
        for pipe in pipes:
            with pipe:
                if (said := pipe.read()) != "ready":
                    raise RuntimeError(said or "The node ended while it started.")
        return pids

    def _be_node(
        self,
        told: int,
        *,
        host: int,
        cgroups: list[str],
        how: str,
        head: bool,
        options: dict[str, Any],
    ) -> None:
        _C.prctl(_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        os.set_inheritable(told, False)
        try:
            for cgroup in cgroups:
                (Path(cgroup) / "cgroup.procs").write_text("0")
            if host:
                enter(Path(f"/proc/{host}/ns/net"))
            if how == "command":
                _start_by_command(head, options)
            else:
                self._start_by_fork(head, options, agents=how == "agents")
            os.write(told, b"ready")
        except BaseException:
            os.write(told, traceback.format_exc().encode())
            raise
        os.close(told)
        with suppress(ChildProcessError):  # raised once nothing of the node is left
            while True:
                os.wait()

    def _start_by_fork(self, head: bool, options: dict[str, Any], *, agents: bool) -> None:
        from ray._private import node, parameter

        if not agents:
            _stand_in_for_agents(self._folder / "agent.sh")
        given = {"num_gpus": 0, "min_worker_port": 0, "max_worker_port": 0, "include_log_monitor": False}
        given |= {"include_dashboard": False, "no_monitor": True} if head else {}
        parameters = parameter.RayParams(**given, **options)
        node.Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=False)


def _keep_network(told: int) -> None:
    _check(_C.unshare(_NEW_NETWORK))
    os.close(told)
    signal.pause()


def _start_by_command(head: bool, options: dict[str, Any]) -> None:
    """By `ray start`, as users do. It leaves the node's processes as orphans, which this process adopts."""
    named = dict(options)
    if head:
        place = ["--head", f"--port={named.pop('gcs_server_port')}", "--include-dashboard=false"]
    else:
        place = [f"--address={named.pop('gcs_address')}"]
    named["resources"] = json.dumps(named["resources"])
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in named.items()]
    fixed = ["--include-log-monitor=false", "--disable-usage-stats", "--num-gpus=0"]
    _run([str(Path(sys.executable).parent / "ray"), "start", *place, *flags, *fixed])


def _stand_in_for_agents(script: Path) -> None:
    """Uses private functions of Ray, so one test starts nodes by `ray start` instead."""
    from ray._private import node, ray_constants, services

    start = services.start_ray_process

    def started(command: list[str], kind: str, **given: Any) -> Any:
        if kind == ray_constants.PROCESS_TYPE_RAYLET:
            flags = dict(word[2:].split("=", 1) for word in command[1:] if "=" in word)
            agent = f"/bin/sh {script} {flags['session_dir']} {flags['node_id']}"
            stands = {f"--{what}_agent_command": f"{agent} {what}" for what in ("dashboard", "runtime_env")}
            command = [f"{k}={stands[k]}" if (k := word.partition("=")[0]) in stands else word for word in command]
        return start(command, kind, **given)

    services.start_ray_process = started
    node.Node.start_api_server = lambda self, **_: setattr(self, "_webui_url", "")


def _forked(body: Callable[[], None]) -> int:
    """A child process that runs `body` only, and ends with this process."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        _C.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:
            body()
    finally:
        os._exit(0)


def _run(command: str | list[str]) -> None:
    words = command.split() if isinstance(command, str) else command
    made = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    if made.returncode:
        raise RuntimeError(f"{' '.join(words)}: {made.stderr or made.stdout}")


def _serve(folder: Path, *, switch: bool) -> None:
    import ray._private.node  # noqa: F401 (once, before all forks)

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints must not be read as an answer
    room = _Room(folder, switch=switch)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"made": getattr(room, request.pop("make"))(**request)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
    finally:
        kill_all(os.getpid())
        with suppress(ChildProcessError):
            while True:
                os.wait()
        shutil.rmtree(folder, ignore_errors=True)  # here too, because the process that asked us may have been killed


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    _serve(Path(sys.argv[1]), switch=sys.argv[2:] == ["switch"])
