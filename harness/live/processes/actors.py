"""Ray's side of the processes: thin actors around the loops, which know nothing of Ray.

Ray pickles an actor's class with the globals that it uses, so everything is imported where it is needed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import ray

if TYPE_CHECKING:
    from harness.live.coordinator.branch import LiveJob
    from harness.live.protocol.blocks import Layout
    from harness.live.protocol.wire import Buffer
    from harness.live.transport.transport import Transport
    from harness.live.transport.zeromq import Keys
    from harness.live.worker.spec import Spec

__all__ = ["Errand", "Home", "Inbox", "Wire", "coordinator_actor", "member_actor"]

Wire: TypeAlias = Literal["zmq", "tcp", "ray"]
"""How frames travel; "tcp" is "zmq" without shared memory, to compare with."""

Inbox: TypeAlias = "queue.SimpleQueue[Sequence[Buffer]]"


@dataclass(frozen=True, slots=True)
class Home:
    """How a process is reached."""

    transport: Wire
    actor: str  # its name
    keys: Keys | None

    def open(self, inbox: Inbox, port: int = 0) -> Transport:
        """Its end of all channels; on that port, if it is still free."""
        if self.transport == "ray":
            from harness.live.transport.ray_calls import RayTransport

            return RayTransport(self.actor, inbox)
        from harness.live.transport.zeromq import ZmqTransport

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        share = self.transport == "zmq"
        try:
            return ZmqTransport(host, port, keys=self.keys, share=share)
        except ValueError:
            return ZmqTransport(host, keys=self.keys, share=share)


@dataclass(frozen=True, slots=True)
class Errand:
    """What a process is to be: a server where it has no `spec`, and so no JAX; else a worker or an evaluator."""

    name: str
    generation: int
    coordinator: str  # its address
    home: Home
    layout: Layout
    optimizer: str
    aggregation: str
    spec: Spec | None = None
    slot: int = 0  # which of the nodes on its machine
    threads: int = 0

    def run(self, inbox: Inbox, over: threading.Event) -> None:
        """Be that process until `over`."""
        from harness.live.processes.host import Cores

        cores = Cores(self.slot)
        cores.use(self.threads)
        from harness.live.processes import loops

        member = loops.Member(self.name, self.generation, self.home.open(inbox), self.coordinator, over)
        spec = self.spec
        if spec is None:
            loops.run_server(member, self.layout, self.optimizer, self.aggregation)
        else:
            from harness.live.processes.runtime import EVALUATOR

            def prepare() -> loops.Compute:
                spec.warm_up(validates=self.name == EVALUATOR)
                return spec.compute

            loops.run_worker(member, self.layout, prepare, cores)


class _Member:
    """A server, a worker or an evaluator. Ray's call `run` ends when its process does, which tells of its death."""

    def __init__(self) -> None:
        self.inbox: Inbox = queue.SimpleQueue()

    def run(self, errand: Errand) -> None:
        errand.run(self.inbox, threading.Event())

    @ray.method(concurrency_group="inbox")
    def deliver(self, frames: Sequence[Buffer]) -> None:
        self.inbox.put(frames)


class _Coordinator:
    """The coordinator's process. Started again by Ray, it goes on from the journal in `folder`."""

    def __init__(self, job: LiveJob, home: Home, folder: Path) -> None:
        from harness.live.processes.coordinator_process import Coordination, last_port

        self.inbox: Inbox = queue.SimpleQueue()
        self.coordination = Coordination(job, home.open(self.inbox, last_port(folder)), folder)
        self.coordination.start()

    @ray.method(concurrency_group="calls")
    def call(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self.coordination.call(name, *given, **named)

    @ray.method(concurrency_group="calls")
    def stop(self) -> None:
        self.coordination.stop()

    @ray.method(concurrency_group="inbox")
    def deliver(self, frames: Sequence[Buffer]) -> None:
        self.inbox.put(frames)


_remote: Any = ray.remote  # whose types know no concurrency groups
member_actor: Any = _remote(num_cpus=0, concurrency_groups={"inbox": 1})(_Member)
coordinator_actor: Any = _remote(num_cpus=0, concurrency_groups={"inbox": 1, "calls": 4})(_Coordinator)
