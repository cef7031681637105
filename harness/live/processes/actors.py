"""Ray's side of the processes: thin actors around the loops, which know nothing of Ray.

Ray pickles an actor's class together with the globals that it uses. So the methods import what they need themselves.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import ray

if TYPE_CHECKING:
    from harness.live.coordinator.branches.branch import LiveJob
    from harness.live.protocol.blocks import Layout
    from harness.live.protocol.wire import Buffer
    from harness.live.transport.transport import Transport
    from harness.live.transport.zeromq import KeyPair
    from harness.live.worker.spec import Spec

__all__ = ["Endpoint", "Inbox", "ProcessSpec", "TransportKind", "coordinator_actor", "member_actor"]

TransportKind: TypeAlias = Literal["zmq", "tcp", "ray"]
"""How frames travel; "tcp" is "zmq" without shared memory, for comparison."""

Inbox: TypeAlias = "queue.SimpleQueue[Sequence[Buffer]]"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a process is reached. It has no keys: those of a process never leave it."""

    transport: TransportKind
    actor: str  # name of its Ray actor
    host: str = ""  # where it listens; "": the machine's address
    network: str = ""  # the network namespace of its sockets, where links are emulated

    def open(self, inbox: Inbox, port: int = 0, keys: KeyPair | None = None) -> Transport:
        """Open the process's end of all channels, on `port` if that is still free, with new keys if none are given."""
        if self.transport == "ray":
            from harness.live.transport.ray_calls import RayTransport

            return RayTransport(self.actor, inbox)
        host: str = self.host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        end: Callable[..., Transport]
        if self.network:
            from harness.live.links.emulated_links import in_network
            from harness.live.transport.plain_tcp import PlainTcp

            # Only root can enter a network that the job has made for a node; no other machine or user reaches it.
            end = partial(PlainTcp, host, opened=partial(in_network, self.network, socket.socket))
        else:
            from harness.live.transport.zeromq import ZmqTransport

            end = partial(ZmqTransport, host, keys=keys, share=self.transport == "zmq")
        try:
            return end(port)
        except ValueError:
            return end()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a new process has to run: a server if `spec` is None (no JAX is imported then), else a worker or evaluator."""

    name: str
    generation: int
    coordinator: str  # name of its Ray actor
    endpoint: Endpoint
    accelerated: bool  # it computes on the device that Ray has given it, else on its CPU
    protects: bool  # it does not start on a machine on which Ray has neither a token nor TLS
    layout: Layout
    optimizer: str
    aggregation: str
    spec: Spec | None = None
    slot: int = 0  # index of its node among the nodes on the same machine
    threads: int = 0
    emulates: bool = False  # mini-batches take as long as the scenario says
    versions: Mapping[str, str] = field(default_factory=dict)  # that its machine must have, too

    def run(self, inbox: Inbox, over: threading.Event) -> None:
        """Run that process until `over` is set."""
        from harness.live.processes.host import Cores
        from harness.machines.ray_cluster import protected

        if self.protects and not protected():
            raise RuntimeError("Ray has neither a token nor TLS on this machine: start it with RAY_AUTH_MODE=token.")
        if self.versions:
            from harness.machines.machine import other_version

            if other := other_version(self.versions):
                name, here, there = other
                raise RuntimeError(f"This machine has {name} {here}, and the driver's has {there}: install the same on all")
        os.umask(0o077)
        # Cores are limited before JAX is imported: it makes as many threads as it finds cores.
        cores = Cores(self.slot)
        cores.use(self.threads)
        from harness.live.processes import loops

        transport = self.endpoint.open(inbox)
        # Ray carries this: who can ask Ray, belongs to the job (`harness.live.processes.launch.cluster` sees to that).
        asked: Any = ray.get_actor(self.coordinator).register.remote(self.name, self.generation, transport.address)
        member = loops.Member(self.name, self.generation, transport, ray.get(asked), over)
        spec = self.spec
        if spec is None:
            loops.run_server(member, self.layout, self.optimizer, self.aggregation)
        else:
            from harness.live.processes.host import choose_device
            from harness.live.protocol.names import EVALUATOR, node_of
            from harness.machines import program_cache

            choose_device(accelerated=self.accelerated)

            program_cache.use()

            def prepare() -> loops.Compute:
                spec.warm_up(validates=self.name == EVALUATOR)
                if not self.emulates or self.name == EVALUATOR:
                    return spec.compute
                from harness.live.worker.emulated_compute import EmulatedCompute

                return EmulatedCompute(spec, node_of(self.name))

            rows_of = None if self.layout.tables is None else spec.rows_of
            loops.run_worker(member, self.layout, prepare, cores, rows_of)


class _MemberActor:
    """A server, a worker or an evaluator. Ray's call `run` ends when the process does: so its death is noticed."""

    def __init__(self, accelerated: bool) -> None:
        if not accelerated:  # Ray hides no device from a process that has asked for none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.inbox: Inbox = queue.SimpleQueue()

    def run(self, process: ProcessSpec) -> None:
        process.run(self.inbox, threading.Event())

    @ray.method(concurrency_group="inbox")
    def deliver(self, frames: Sequence[Buffer]) -> None:
        self.inbox.put(frames)

    @ray.method(concurrency_group="inbox")
    def devices(self) -> str:
        """The accelerators that the process sees, as CUDA numbers them: to find out why it uses a wrong one."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


class _CoordinatorActor:
    """The coordinator's process. When Ray restarts it, it continues from the journal in `folder`."""

    def __init__(self, job: LiveJob, endpoint: Endpoint, folder: Path, silent_seconds: float) -> None:
        from harness.live.processes.host import choose_device

        choose_device(accelerated=False)
        from harness.live.processes.coordinator_process import CoordinatorProcess, last_port
        from harness.live.transport.zeromq import KeyPair

        os.umask(0o077)  # what it writes is for its owner only
        self.inbox: Inbox = queue.SimpleQueue()
        keys = KeyPair.kept(folder / "keys")  # a coordinator that is started again must be the one that the others know
        transport = endpoint.open(self.inbox, last_port(folder), keys)
        self.process = CoordinatorProcess(job, transport, folder, silent_seconds)
        self.process.start()

    @ray.method(concurrency_group="questions")
    def ask(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self.process.ask(name, *given, **named)

    @ray.method(concurrency_group="questions", max_task_retries=-1)
    def register(self, name: str, generation: int, address: str) -> str:
        return self.process.client.register(name, generation, address)

    @ray.method(concurrency_group="questions")
    def stop(self) -> None:
        self.process.stop()

    @ray.method(concurrency_group="inbox")
    def deliver(self, frames: Sequence[Buffer]) -> None:
        self.inbox.put(frames)


_remote: Any = ray.remote  # whose types know no concurrency groups
member_actor: Any = _remote(num_cpus=0, concurrency_groups={"inbox": 1})(_MemberActor)
coordinator_actor: Any = _remote(num_cpus=0, concurrency_groups={"inbox": 1, "questions": 4})(_CoordinatorActor)
