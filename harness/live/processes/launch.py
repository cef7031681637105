"""Start a live job's processes on Ray, watch them, replace them and end them.

Ray places, starts, watches and kills processes; nothing of the training passes through it.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import exceptions

from harness.live.links.emulated_links import EmulatedLinks, emulated_links
from harness.live.processes.actors import Endpoint, ProcessSpec, TransportKind, member_actor
from harness.live.processes.client import CoordinatorClient, RemoteCoordinator
from harness.live.processes.coordinator_on_ray import CoordinatorOnRay
from harness.live.processes.coordinator_process import SILENT_SECONDS
from harness.live.processes.node_rooms import NodeRooms, cluster_node, ray_nodes, this_machine
from harness.live.processes.placement import ClusterNode, NodePlacement, place_nodes
from harness.live.processes.private_cluster import private_cluster
from harness.live.processes.private_folder import private_folder
from harness.live.protocol import messages
from harness.live.protocol.names import EVALUATOR, node_of
from harness.live.worker.spec import Spec
from harness.machines.machine import versions
from harness.machines.ray_cluster import joined, protected, quiet_services

__all__ = ["ClusterNode", "JobProcesses", "NodePlacement", "cluster", "launch", "place_nodes"]

_LISTEN_SECONDS = 0.25  # from one question about silent processes to the next
_STOP_SECONDS = 5.0  # longest end of processes, which are killed: only a kernel that is very busy takes longer

_PROTECT_IT = (
    "Turn the token on: `ray get-auth-token --generate`, copy ~/.ray/auth_token to every machine, and start Ray there, and "
    "this command, with RAY_AUTH_MODE=token."
)


@contextmanager
def cluster(address: str | None, *, insecure: bool = False, processes: int = 0) -> Iterator[tuple[ClusterNode, ...]]:
    """Join the Ray cluster at `address` and list its nodes. None: the one in `RAY_ADDRESS`, else start one for a job of so
    many `processes`.

    Raises ValueError if there is no cluster at the address, if it refuses this process, if this machine may not start the
    job's processes, and, unless `insecure`, if the cluster has several machines and neither a token nor TLS.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    with ExitStack() as left:
        with _own_signals(), quiet_services():
            left.enter_context(joined(address) if address else private_cluster(processes))
        home = ray.get_runtime_context().get_node_id()
        found = [node for node in ray_nodes() if node["Alive"]]
        if address and not insecure:
            _check_protected(address, {node["NodeManagerAddress"] for node in found})
        yield tuple(cluster_node(node, home, counted=address is not None) for node in found)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep SIGTERM and SIGHUP to this process while Ray starts, so that it can make a last checkpoint.

    `timeout`, systemd, Slurm and a terminal that closes send them to all processes of a group, and Ray's would end at once.
    Those that start here have them blocked, as their children have. One that is sent to us meanwhile waits.
    """
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
        # Ray has put its own in place, which ends this process at once.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _check_protected(address: str, machines: Collection[str]) -> None:
    if len(machines) > 1 and not protected():
        raise ValueError(
            f"Cannot deploy on the Ray cluster at {address}: it has {len(machines)} machines and neither a token nor TLS, "
            f"so whoever reaches its ports can run programs there. {_PROTECT_IT} Or insist with --insecure."
        )


@contextmanager
def launch(
    placement: NodePlacement,
    spec: Spec,
    *,
    transport: TransportKind = "zmq",
    insecure: bool = False,
    emulates: bool = False,
    rates: Mapping[str, float] | None = None,
    delays: Mapping[str, float] | None = None,
    join_seconds: float = 300.0,
    silent_seconds: float = SILENT_SECONDS,
) -> Iterator[JobProcesses]:
    """Start the coordinator's process; the others are started through what is yielded. All of them end with the context.

    `insecure`: processes also start on machines on which Ray has neither a token nor TLS. `emulates`: mini-batches take as
    long as the scenario says. `rates`: links of nodes that are emulated, bytes per second. `delays`: of some of these links,
    seconds in each direction. `join_seconds`: longest wait for the coordinator's process. `silent_seconds`: a process that
    is not heard for so long is replaced. Raises ValueError if the cluster has no room now.
    """
    with private_folder() as folder, emulated_links(rates, delays) if rates else nullcontext() as links:
        processes = JobProcesses(
            placement,
            spec,
            transport,
            folder,
            insecure=insecure,
            emulates=emulates,
            links=links,
            join_seconds=join_seconds,
            silent_seconds=silent_seconds,
        )
        try:
            processes.begin()
            yield processes
        finally:
            processes.close()


@dataclass(frozen=True, slots=True)
class _ProcessSpecs:
    """What the processes of one job are to be."""

    placement: NodePlacement
    spec: Spec
    transport: TransportKind
    links: EmulatedLinks | None  # emulated for the nodes; None: their own
    protects: bool  # no process starts on a machine on which Ray has neither a token nor TLS
    emulates: bool  # mini-batches take as long as the scenario says
    versions: Mapping[str, str]  # that all machines must have; {} where there is one
    job: str = field(default_factory=lambda: secrets.token_hex(4))  # tells its actors from those of other jobs

    def endpoint(self, name: str, generation: int) -> Endpoint:
        """How a process is reached."""
        actor = f"{self.job}/{name}/{generation}"
        return Endpoint(self.transport, actor, *(() if self.links is None else self.links.of(node_of(name))))

    def of(self, name: str, generation: int, slot: int) -> ProcessSpec:
        """What a process has to run, where its node has the index `slot` on its machine."""
        serves = name.startswith(messages.server(""))
        return ProcessSpec(
            name=name,
            generation=generation,
            coordinator=self.coordinator.actor,
            endpoint=self.endpoint(name, generation),
            protects=self.protects,
            accelerated=self.accelerates(name),
            layout=self.spec.layout,
            optimizer=self.spec.workload.optimizer,
            aggregation=self.spec.workload.aggregation,
            spec=None if serves else self.spec,
            slot=slot,
            threads=0 if serves else self.spec.job.start.intra_threads,
            emulates=self.emulates,
            versions=self.versions,
        )

    @property
    def coordinator(self) -> Endpoint:
        """How the coordinator's process is reached, which has one generation: Ray itself starts it again."""
        return self.endpoint(messages.COORDINATOR, 0)

    def accelerates(self, name: str) -> bool:
        """Whether a process is a worker that has a GPU."""
        node = node_of(name)
        return name != EVALUATOR and name == messages.worker(node) and node in self.placement.accelerated


class JobProcesses:
    """The processes of one job on Ray; a `harness.live.processes.runtime.Processes`."""

    def __init__(
        self,
        placement: NodePlacement,
        spec: Spec,
        transport: TransportKind,
        folder: Path,
        *,
        insecure: bool,
        emulates: bool,
        links: EmulatedLinks | None,
        join_seconds: float,
        silent_seconds: float,
    ) -> None:
        """The options are those of `launch`; `links` are emulated for the nodes, unless None."""
        self._several = len({place.host for _, place in placement.places}) > 1
        protects, alike = self._several and not insecure, versions() if self._several else {}
        self._specs = _ProcessSpecs(placement, spec, transport, links, protects, emulates, alike)
        self._folder, self._silent_seconds = folder, silent_seconds  # the folder of the coordinator's journal
        self._coordinator = CoordinatorOnRay(join_seconds, silent_seconds)
        self.coordinator: CoordinatorClient = RemoteCoordinator(self._coordinator.ask)
        self._rooms = NodeRooms(placement)
        self._listened_seconds = -math.inf
        self._generations: Counter[str] = Counter()
        self._actors: dict[str, Any] = {}
        self._runs: dict[Any, str] = {}  # process by its call `run`, which ends when the process does
        self._lost: dict[str, str] = {}  # not yet reported by `lost`

    def begin(self) -> None:
        """Reserve room for all nodes, and start the coordinator's process, without waiting for it.

        Raises ValueError if there is no room.
        """
        self._rooms.reserve()
        self._coordinator.begin(self._specs.spec.live_job, self._specs.coordinator, self._folder)

    def tell(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with what becomes of the coordinator, in the thread that asks it."""
        self._coordinator.tell(hear)

    def start(self, names: Collection[str]) -> None:
        """Start processes, each under its next generation, and tell the coordinator to expect them; does not wait for
        them."""
        self._kill(names)
        for name in names:  # before anything is asked of the coordinator, which may be starting, too
            self._generations[name] += 1
            self._lost.pop(name, None)
            strategy = this_machine() if name == EVALUATOR else self._rooms.strategy(node_of(name))
            # With one, it sees this device only; without, none: processes of one machine do not share the first by accident.
            accelerated, endpoint = self._specs.accelerates(name), self._specs.endpoint(name, self._generations[name])
            options = {"name": endpoint.actor, "scheduling_strategy": strategy, "num_gpus": int(accelerated)}
            self._actors[name] = member_actor.options(**options).remote(accelerated)
        for name in names:
            generation = self._generations[name]
            self.coordinator.expect(name, generation)
            process = self._specs.of(name, generation, self._rooms.slot(node_of(name)))
            self._runs[self._actors[name].run.remote(process)] = name

    def stop(self, names: Collection[str]) -> None:
        """End processes that are not needed; returns at once."""
        self._kill(names)
        self.coordinator.forget(list(names))

    def lost(self) -> Mapping[str, str]:
        """Processes that have died or hung since the last call, with the reason. They are dead now."""
        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        found = {self._runs[run]: f"{_reason(run)}{self._where(self._runs[run])}" for run in ended} | self._lost
        self._lost = {}
        for name, generation in self._silent().items():
            # An older generation of the name may be silent because it was replaced.
            if name in self._actors and name not in found and generation == self._generations[name]:
                found[name] = f"nothing was heard for {self._silent_seconds:g} s: hanging, or cut off{self._where(name)}"
        if found:
            self.stop(found)
        return found

    def _silent(self) -> dict[str, int]:
        """Processes that the coordinator does not hear; empty if it was asked a moment ago."""
        if time.monotonic() - self._listened_seconds < _LISTEN_SECONDS:
            return {}
        self._listened_seconds = time.monotonic()
        return self.coordinator.silent()

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes of the job that have a machine now."""
        return frozenset(self.machines)

    @property
    def machines(self) -> Mapping[str, str]:
        """Identity of the machine of each node that has one now."""
        found = self._rooms.machines
        self._note_gone()
        return found

    @property
    def expects_nodes(self) -> bool:
        """True at any time: Ray may find another machine."""
        return True

    @property
    def has_spare(self) -> bool:
        """Whether a machine has room and runs none of the job's nodes."""
        return self._unused() is not None

    def _unused(self) -> ClusterNode | None:
        found = self._rooms.unused
        self._note_gone()
        return found

    def _note_gone(self) -> None:
        """Processes whose node has lost its room are lost: Ray would let one that has not begun yet wait for ever."""
        gone = self._rooms.take_gone()
        lost = [name for name in self._actors if node_of(name) in gone]
        self._lost |= {name: f"the machine has left the Ray cluster{self._where(name)}" for name in lost}

    def _where(self, name: str) -> str:
        host = self.host(name)
        return f" (on {host})" if host else ""

    def host(self, name: str) -> str:
        """The address of the machine that a process is on, was on last, or is to start on; "" where all are on one, and of
        the evaluator, which is here."""
        return self._rooms.host(node_of(name)) if self._several and name != EVALUATOR else ""

    def move_node(self, node: str) -> bool:
        """End a node's processes and give it a machine that runs none of the job's nodes; False if there is none."""
        spare = self._unused()
        if spare is None:
            return False
        self.stop([name for name in self._actors if node_of(name) == node])
        self._rooms.move(node, spare)
        return True

    def close(self) -> None:
        """End everything, and wait until it has ended."""
        runs = list(self._runs)
        self._kill(list(self._actors))
        self._coordinator.close(_STOP_SECONDS)  # after this it writes to our folder no more, so the folder can be removed
        with suppress(exceptions.RayError):
            ray.wait(runs, num_returns=len(runs), timeout=_STOP_SECONDS)
        self._rooms.release()

    def _kill(self, names: Collection[str]) -> None:
        for name in names:
            actor = self._actors.pop(name, None)
            self._runs = {run: process for run, process in self._runs.items() if process != name}
            if actor is not None:
                with suppress(exceptions.RayError):
                    ray.kill(actor, no_restart=True)


def _reason(run: Any) -> str:
    """Why a process's call `run` has ended."""
    try:
        ray.get(run)
    except exceptions.RayTaskError as error:
        return f"it failed: {' '.join(str(error.cause or error).split())[:300]}"
    except exceptions.ActorDiedError as error:
        if getattr(error, "actor_init_failed", False):  # the last line has what happened, after tracebacks
            return f"it could not begin: {str(error).strip().splitlines()[-1]}"
        return "killed, or crashed"
    except exceptions.RayError as error:
        return f"killed, or crashed ({type(error).__name__})"
    return "it ended"
