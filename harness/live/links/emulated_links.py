"""Links as fast, and as slow to answer, as the scenario's: each node's sockets live in a network namespace of its own,
behind a shaped link.

A process enters the namespace of its node only to open its sockets (`in_network`): libzmq connects and listens there from
then on, and Ray is where it was. The namespaces have no names. Processes that end with the driver keep them, so nothing is
left behind, even if the driver is killed. A switch in a namespace of its own joins them, and the machine's network is not
touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["COMMANDS", "EmulatedLinks", "emulated_links", "in_network", "shape", "why_not"]

COMMANDS = ("ip", "tc", "nsenter", "unshare")

# Of traffic at full speed after a pause. It must be short beside a push, which would lose so much of its time: with 0.005 a
# push of 77 kB took 5.3 ms in place of 9.6 at 8 MB/s. A long transfer reaches the same rate with either.
_BURST_SECONDS = 0.0005
_LEAST_BURST_BYTES = 5_000  # three packets
_QUEUE_BYTES = 1_000_000  # before packets are dropped: several pushes, or TCP pauses whenever two collide
_WIRE_SHARE = 1514 / 1448  # `tc` counts headers, of Ethernet, IP and TCP, in every packet; a scenario's rate is of the model
_UNSHAPED_BYTES_PER_SECOND = 5e8  # a link between namespaces is hardly faster than this
_START_SECONDS = 10.0  # for `unshare` to make a network, which takes milliseconds: longer means that it never will
_NEW_NETWORK = 0x40000000

T = TypeVar("T")


def why_not() -> str:
    """Why this machine cannot emulate links; empty if it can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    return f"the command {missing[0]} is missing" if missing else ""


class EmulatedLinks:
    """The namespace of each process, and its address there."""

    def __init__(self, networks: Mapping[str, tuple[str, str]]) -> None:
        self._networks = networks

    def of(self, node: str) -> tuple[str, str]:
        """Address and network of a node; of anybody else, those of the driver's side, whose link is not shaped."""
        return self._networks.get(node, self._networks[""])


@contextmanager
def emulated_links(rates: Mapping[str, float], delays: Mapping[str, float] | None = None) -> Iterator[EmulatedLinks]:
    """Namespaces for nodes with these `rates`, bytes per second in each direction, and `delays`, seconds in each direction,
    of some of them. Raises ValueError where that cannot be."""
    if reason := why_not():
        raise ValueError(f"Cannot emulate links: {reason}. Leave them out with --emulate=nodes.")
    with ExitStack() as kept:
        try:
            yield EmulatedLinks(dict(_made(kept, rates, delays or {})))
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.split())
            raise ValueError(
                f"Cannot emulate links: {' '.join(error.cmd)} says {said!r}. Leave them out with --emulate=nodes."
            ) from None


def shape(bytes_per_second: float) -> str:
    """The queue discipline, in the words of `tc`, of a link that carries so many bytes of what is sent over TCP."""
    on_the_wire = bytes_per_second * _WIRE_SHARE
    burst = max(_LEAST_BURST_BYTES, round(on_the_wire * _BURST_SECONDS))
    return f"tbf rate {round(on_the_wire)}bps burst {burst} limit {_QUEUE_BYTES}"


def _made(kept: ExitStack, rates: Mapping[str, float], delays: Mapping[str, float]) -> Iterator[tuple[str, tuple[str, str]]]:
    switch, delayed = _namespace(kept), list[str]()
    _run(switch, "ip link add switch type bridge")
    _run(switch, "ip link set switch up")
    for number, (node, rate) in enumerate({"": float("inf"), **rates}.items(), start=1):
        pid, address = _namespace(kept), f"10.0.{number >> 8}.{number & 255}"
        _run(switch, f"ip link add p{number} type veth peer name eth0 netns {pid}")
        if node in delays:
            _run(switch, f"ip link add d{number} type veth peer name s{number}")
            _run(switch, f"ip link set s{number} master switch up")
            for device in (f"p{number}", f"d{number}"):
                _run(switch, f"ip link set {device} up")
            delayed += [f"p{number}", f"d{number}", repr(delays[node])]
        else:
            _run(switch, f"ip link set p{number} master switch up")
        for command in ("link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up"):
            _run(pid, f"ip {command}")
        if rate < _UNSHAPED_BYTES_PER_SECOND:
            for where, device in ((pid, "eth0"), (switch, f"p{number}")):
                _run(where, f"tc qdisc add dev {device} root {shape(rate)}")
        yield node, (address, f"/proc/{pid}/ns/net")
    if delayed:
        program = Path(__file__).with_name("delayed_links.py")
        inside = ["nsenter", f"--net=/proc/{switch}/ns/net", sys.executable, "-I", str(program), *delayed]
        told = _started(kept, inside).stdout
        said = told.readline().strip() if told is not None else ""
        if said != "ready":
            raise ValueError(f"Cannot emulate delays of links: {said or 'their program has ended'}. Use --emulate=nodes.")


def _started(kept: ExitStack, command: Sequence[str]) -> subprocess.Popen[str]:
    """A process that ends with us: the other end of its standard input closes then.

    It has signals blocked that a terminal, `timeout` or Slurm send to all processes: the last checkpoint needs the links.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        kept.enter_context(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    kept.callback(process.kill)
    return process


def _namespace(kept: ExitStack) -> int:
    """A process with a network of its own."""
    process = _started(kept, ["unshare", "--net", "cat"])
    ours, until = _network_of("self"), time.monotonic() + _START_SECONDS
    while (its := _network_of(process.pid)) in (ours, None):
        if its is None or time.monotonic() > until or process.poll() is not None:
            raise ValueError("Cannot emulate links: this process may not make network namespaces. Use --emulate=nodes.")
        time.sleep(0.005)
    return process.pid


def _network_of(process: int | str) -> Path | None:
    """The network that a process is in; None where it has ended."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/ns/net").readlink()
    return None


def _run(pid: int, command: str) -> None:
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()]
    subprocess.run(inside, check=True, capture_output=True, text=True)  # noqa: S603


def _enter(network: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(network).open("rb") as opened:
        if libc.setns(opened.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)


def in_network(network: str, do: Callable[[], T]) -> T:
    """What `do` returns or raises, called in a thread that has moved to a network (``/proc/PID/ns/net``); if that is "", in
    this thread. Sockets that are opened there stay there, and so do the threads that are started."""
    if not network:
        return do()
    found: list[T] = []
    failed: list[BaseException] = []

    def moved() -> None:
        try:
            _enter(network)
            found.append(do())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=moved, name="in a network of its own")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
