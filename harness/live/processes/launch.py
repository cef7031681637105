"""Bring a live job up on Ray and take it down again: processes are started, watched, replaced and ended here.

Ray places, starts, watches and kills; nothing of the training passes through it. Each node of the scenario is a
placement group that its server and its worker share. When a node of the cluster dies, its group is asked for anew, best
where there are no others of ours, and is there again as soon as the cluster has room.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from harness.live.processes.actors import Errand, Home, Wire, coordinator_actor, member_actor
from harness.live.processes.placement import Offer, Placement, plan
from harness.live.processes.runtime import EVALUATOR, node_of
from harness.live.protocol import messages
from harness.live.transport.zeromq import Keys, on_loopback
from harness.live.worker.spec import Spec
from harness.ray_cluster import joined

__all__ = ["Crew", "Offer", "Placement", "cluster", "launch", "plan"]

# An address that only this machine reaches; Ray takes 127.0.0.1 to mean one by which others reach it, too.
_HERE = "127.0.0.2" if sys.platform == "linux" else None
_STORE_BYTES = 80 * 2**20  # Ray's least; nothing large passes through it
_SHARE = 0.001  # of the resource that every node of a cluster has one of, "node:ADDRESS"
_PLACE_SECONDS = 15.0
_RETURN_SECONDS = 60.0  # for a coordinator to come back
_STOP_SECONDS = 5.0  # for processes to end
_LOOK_SECONDS = 0.25
_SPARE_SECONDS = 3.0  # for room where it is wanted, before any will do

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # A node that is killed is noticed within a second, one that is cut off or stopped within four.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_max_direct_call_object_size": str(32 * 2**20),
    "RAY_task_rpc_inlined_bytes_limit": str(64 * 2**20),
}


@contextmanager
def cluster(address: str | None) -> Iterator[tuple[Offer, ...]]:
    """Be part of the Ray cluster at `address`, and see what it offers. None: of that in `RAY_ADDRESS`, or else of our own.

    Raises ValueError where there is none, or it does not let us in.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    with joined(address) if address else _of_our_own():
        home = ray.get_runtime_context().get_node_id()
        yield tuple(_offer(node, home, counted=address is not None) for node in _nodes() if node["Alive"])


def _nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def _offer(node: Mapping[str, Any], home: str, *, counted: bool) -> Offer:
    resources = node["Resources"]
    cpus = resources.get("CPU", 0.0) if counted else math.inf
    return Offer(node["NodeID"], node["NodeManagerAddress"], cpus, frozenset(resources), node["NodeID"] == home)


@contextmanager
def _of_our_own() -> Iterator[None]:
    """Ray on this machine, reached from nowhere else, with a token that only we have; gone with us."""
    folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    before = dict(os.environ)
    os.environ.update(_SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    try:
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=_HERE,
            _temp_dir=folder.name,
        )
        yield
    finally:
        ray.shutdown()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        folder.cleanup()


@contextmanager
def launch(placement: Placement, spec: Spec, *, encrypt: bool | None = None, transport: Wire = "zmq") -> Iterator[Crew]:
    """The coordinator's process, and means to start the others; however it ends, nothing of it is left.

    Messages are encrypted unless all are on one machine's loopback, or as `encrypt` says. Raises ValueError where the
    cluster has no room just now.
    """
    secret = not all(on_loopback(offer.host) for _, offer in placement.places) if encrypt is None else encrypt
    crew = Crew(placement, spec, Keys.fresh() if secret else None, transport)
    try:
        crew.begin()
        yield crew
    finally:
        crew.close()


class Crew:
    """The processes of one job, as `harness.live.processes.runtime.Processes` wants them."""

    def __init__(self, placement: Placement, spec: Spec, keys: Keys | None, transport: Wire) -> None:
        self._placement, self._spec, self._keys, self._transport = placement, spec, keys, transport
        self._job = secrets.token_hex(4)
        # Where the coordinator keeps its journal.
        self._folder = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        self._coordinator: Any = None
        self._groups: dict[str, Any] = {}
        self._where: dict[str, str] = {}  # the machine of each node that has room just now
        self._looked_seconds = self._listened_seconds = -math.inf
        self._left: set[str] = set()  # machines whose links are slow
        self._give_up_seconds: dict[str, float] = {}  # when a node that lost its room asks for it anywhere
        self._generations: Counter[str] = Counter()
        self._actors: dict[str, Any] = {}
        self._runs: dict[Any, str] = {}  # what ends when that process does
        self._lost: dict[str, str] = {}  # not yet told of

    def begin(self) -> None:
        """Take room for all nodes, and start the coordinator's process. Raises ValueError where there is none."""
        for name, offer in self._placement.places:
            self._groups[name] = self._group(offer)
        until = time.monotonic() + _PLACE_SECONDS
        while missing := self._groups.keys() - self._look():
            if time.monotonic() > until:
                raise ValueError(
                    f"Cannot place {', '.join(sorted(missing))}: for {_PLACE_SECONDS:g} s the Ray cluster had no CPUs free "
                    "for them. Others use it; wait for them, or add nodes."
                )
            time.sleep(_LOOK_SECONDS)
        home = self._home(messages.COORDINATOR)
        options = {"name": home.actor, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": _here()}
        self._coordinator = coordinator_actor.options(**options).remote(self._spec.live_job, home, Path(self._folder.name))
        self.call("address")

    # ------------------------------------------------------------------------------------------------------- the coordinator

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """What the coordinator's method of that name returns; what it raises is raised here.

        While the coordinator comes back from its journal this waits, and asks again: what was under way when it died may
        then be done twice. Raises RuntimeError where it does not come back.
        """
        until = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                return ray.get(self._coordinator.call.remote(name, given, named), timeout=_RETURN_SECONDS)
            except exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
                if time.monotonic() > until or isinstance(error, exceptions.GetTimeoutError):
                    said = " ".join(str(error).split())
                    raise RuntimeError(f"Cannot ask the coordinator for {name!r}: it is gone ({said}).") from None
                time.sleep(0.05)

    # ----------------------------------------------------------------------------------------------------------- processes

    def start(self, names: Collection[str]) -> None:
        """Start processes, under their next generation, and let the coordinator expect them; returns at once."""
        address = self.call("address")
        self._kill(names)
        for name in names:
            self._generations[name] += 1
            self._lost.pop(name, None)
            self.call("expect", name, self._generations[name])
            home = self._home(name)
            strategy = _here() if name == EVALUATOR else PlacementGroupSchedulingStrategy(self._groups[node_of(name)], 0)
            actor = member_actor.options(name=home.actor, scheduling_strategy=strategy).remote()
            self._actors[name] = actor
            self._runs[actor.run.remote(self._errand(name, address, home))] = name

    def stop(self, names: Collection[str]) -> None:
        """End processes that nobody needs; returns at once."""
        self._kill(names)
        self.call("forget", list(names))

    def lost(self) -> Mapping[str, str]:
        """Those that have died or hung since one last asked, and what is known about why. They are dead now."""
        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        found = self._lost | {self._runs[run]: _obituary(run) for run in ended}
        self._lost = {}
        for name, generation in self._silent().items():
            if name in self._actors and name not in found and generation == self._generations[name]:
                found[name] = "nothing was heard of it for 3 s: it hangs, or is cut off"
        if found:
            self.stop(found)
        return found

    def _silent(self) -> dict[str, int]:
        """Whom the coordinator has not heard, asked for now and then."""
        if time.monotonic() - self._listened_seconds < _LOOK_SECONDS:
            return {}
        self._listened_seconds = time.monotonic()
        found: dict[str, int] = self.call("silent")
        return found

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes of the job that have a place to run just now."""
        if time.monotonic() - self._looked_seconds > _LOOK_SECONDS:
            self._look()
        return frozenset(self._where)

    @property
    def spare(self) -> bool:
        """Whether there is a place where none of the job's nodes is."""
        return self._untaken() is not None

    def elsewhere(self, node: str) -> bool:
        """Give a node another place, where no other of the job's is, and end its processes; False where there is none."""
        spare = self._untaken()
        if spare is None:
            return False
        self._left.update({self._where.pop(node)} if node in self._where else ())
        self.stop([name for name in self._actors if node_of(name) == node])
        self._place(node, spare)
        return True

    def close(self) -> None:
        """End everything, and wait until it has ended."""
        runs = list(self._runs)
        self._kill(list(self._actors))
        if self._coordinator is not None:
            with suppress(exceptions.RayError):
                ray.get(self._coordinator.stop.remote(), timeout=_STOP_SECONDS)  # it writes to our folder no more
            with suppress(exceptions.RayError):
                ray.kill(self._coordinator, no_restart=True)
        with suppress(exceptions.RayError):
            ray.wait(runs, num_returns=len(runs), timeout=_STOP_SECONDS)
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        self._folder.cleanup()

    def _kill(self, names: Collection[str]) -> None:
        for name in names:
            actor = self._actors.pop(name, None)
            self._runs = {run: whose for run, whose in self._runs.items() if whose != name}
            if actor is not None:
                with suppress(exceptions.RayError):
                    ray.kill(actor, no_restart=True)

    def _home(self, name: str) -> Home:
        return Home(self._transport, f"{self._job}/{name}/{self._generations[name]}", self._keys)

    def _errand(self, name: str, address: str, home: Home) -> Errand:
        serves = name.startswith(messages.server(""))
        return Errand(
            name=name,
            generation=self._generations[name],
            coordinator=address,
            home=home,
            layout=self._spec.layout,
            optimizer=self._spec.workload.optimizer,
            aggregation=self._spec.workload.aggregation,
            spec=None if serves else self._spec,
            slot=self._slot(name),
            threads=0 if serves else self._spec.job.start.intra_threads,
        )

    # ------------------------------------------------------------------------------------------------------------- places

    def _group(self, offer: Offer | None) -> Any:
        """Room for a node: there, or, with None, wherever the cluster has some."""
        room = {} if offer is not None and math.isinf(offer.cpus) else {"CPU": self._placement.cpus_per_node}
        if offer is not None:
            room[f"node:{offer.host}"] = _SHARE
        return placement_group([room], strategy="STRICT_PACK")

    def _look(self) -> frozenset[str]:
        """See which nodes have their room and where, and ask for other room for those whose machine is gone."""
        now = self._looked_seconds = time.monotonic()
        table = placement_group_table()
        found = {name: table.get(group.id.hex(), {}) for name, group in self._groups.items()}
        self._where = {n: said["bundles_to_node_id"][0] for n, said in found.items() if said.get("state") == "CREATED"}
        crowd = Counter(self._where.values())
        for name, said in found.items():
            gone = said.get("state") in {"RESCHEDULING", "REMOVED"}
            if gone or (name not in self._where and now > self._give_up_seconds.get(name, math.inf)):
                spare = self._spare(crowd) if gone else None
                crowd.update([spare.identity] if spare else [])
                # Ray would let a process that has not begun yet wait for ever for a group that is gone.
                self._lost |= {peer: "the place of its node is gone" for peer in self._actors if node_of(peer) == name}
                self._place(name, spare)
        return frozenset(self._where)

    def _place(self, node: str, spare: Offer | None) -> None:
        """Give up a node's room, and ask for other room, there or anywhere."""
        remove_placement_group(self._groups[node])
        self._groups[node] = self._group(spare)
        self._give_up_seconds[node] = time.monotonic() + _SPARE_SECONDS if spare else math.inf

    def _spare(self, crowd: Mapping[str, int]) -> Offer | None:
        """The machine with the fewest of our nodes that has CPUs left, so that the next that dies takes few; or None."""
        cpus = self._placement.cpus_per_node
        alive = (_offer(node, "", counted=True) for node in _nodes() if node["Alive"])
        able = [offer for offer in alive if offer.cpus >= cpus * (crowd.get(offer.identity, 0) + 1)]
        return min(able, key=lambda offer: (offer.identity in self._left, crowd.get(offer.identity, 0)), default=None)

    def _untaken(self) -> Offer | None:
        """A machine with room that none of our nodes is on, nor has left for its link."""
        self._look()
        crowd = Counter(self._where.values())
        spare = self._spare(crowd)
        return None if spare is None or spare.identity in {*crowd, *self._left} else spare

    def _slot(self, name: str) -> int:
        """Which of the job's nodes on its machine a process's node is."""
        node = node_of(name)
        return sum(self._where[other] == self._where.get(node) for other in sorted(self._where) if other < node)


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _obituary(run: Any) -> str:
    try:
        ray.get(run)
    except exceptions.RayTaskError as error:
        return f"it failed: {' '.join(str(error.cause or error).split())[:300]}"
    except exceptions.RayError as error:
        return f"its process died ({type(error).__name__})"
    return "it ended"
