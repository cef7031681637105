"""The coordinator: one log for all servers, and the policy that says who goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.live.journal import Journal
from harness.live.messages import Array, Message, Send
from tuners.actions import Evaluation, Setting, Status, SyncPolicy, Target

__all__ = ["Coordinator", "LiveJob", "Report", "Shards"]


class Shards(NamedTuple):
    """What a setting gives each node, [k]; as `simulators.plant.Plant` has them."""

    samples: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """What does not change while a job runs."""

    nodes: tuple[str, ...]
    size: int  # parameters
    blocks: int = 64
    optimizer: str = "sgd"
    aggregation: str = "each"
    target: Target
    evaluate_clocks: int  # validate after so many pushes; 0: never
    shards: Callable[[Setting], Shards]
    snapshot_commits: int = 0  # take a snapshot after so many; 0: max(20, 4 per worker)


class Report(NamedTuple):
    """What has happened since the last one."""

    rows: NDArray[np.float64]  # [n, 11], the columns of `simulators.engine.Records`, of the branch that is asked for
    evaluations: tuple[tuple[int, Evaluation], ...]  # by number of the request; 0 for those after `evaluate_clocks`
    lost_pushes: int  # whose payload died with a worker and a server at once: they no longer count


class Coordinator:
    """The core of the coordinator's process, without sockets, threads or a clock of its own.

    Everything that a driver asks for returns at once; what has become of it is seen by `moving`, `durable`, `recovering`,
    `report`. Peers are named as in `harness.live.messages`.
    """

    def __init__(self, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> None:
        self.job, self.send, self.now, self.journal = job, send, now, journal

    # ------------------------------------------------------------------------------------------------- its beginning

    def begin(self, setting: Setting, policy: SyncPolicy, parameters: Array) -> None:
        """Branch 0 with these parameters, [P] float32. It runs as soon as `expected` peers have come."""

    @classmethod
    def restored(cls, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> Coordinator:
        """A coordinator that goes on where the journal ends; call `recover` when peers are connected."""
        raise NotImplementedError

    def expect(self, name: str, generation: int) -> None:
        """A process of this name and generation may join; those of older generations are refused from now on."""

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in."""

    def tick(self) -> None:
        """Now and then: ask again for what has not come."""

    # -------------------------------------------------------------------------------------------------- what it does

    @property
    def members(self) -> Mapping[str, int]:
        """Who has joined, with generations."""
        return {}

    def status(self, branch: int) -> Status:
        """Where a branch stands."""
        raise NotImplementedError

    def report(self, branch: int) -> Report:
        """What has happened to a branch since it was last asked for."""
        raise NotImplementedError

    def run(self, branch: int) -> None:
        """Train this branch. Those that were in a mini-batch of another begin it again when that one is run again."""

    def rest(self) -> None:
        """Train no branch."""

    # ----------------------------------------------------------------------------------------------- what changes it

    def put(self, branch: int, setting: Setting, policy: SyncPolicy | None = None) -> None:
        """Put a setting in force, apart from where blocks are. Mini-batches under way go on; a new policy, or other
        workers, put the policy in force anew and release those that wait. None: the policy stays."""

    def halt(self, branch: int) -> None:
        """Everybody stops, mini-batches under way are given up: before a restart under another setting."""

    def launch(self, branch: int) -> None:
        """All workers of the branch's setting begin, with the policy put in force anew."""

    def place(
        self, servers: tuple[str, ...], shares: tuple[float, ...], *, on_demand: bool = False, at_once: int = 4
    ) -> None:
        """Begin to move blocks until these servers have these shares; `moving` until done. With `on_demand`, all change
        owners at once, and `sweep` or whoever needs them brings them over."""

    @property
    def moving(self) -> int:
        """Blocks that are not yet where they are to be."""
        return 0

    def fork(self, parent: int, setting: Setting, policy: SyncPolicy, *, testing: bool) -> int:
        """A new branch as the parent is now; it rests until it is run."""
        raise NotImplementedError

    def free(self, branch: int) -> None:
        """Drop a branch."""

    def evaluate(self, branch: int) -> int:
        """Have a branch evaluated as it is now; the number by which `report` tells of it."""
        raise NotImplementedError

    def snapshot(self, *, save: bool = False) -> int:
        """Copy everything as it is now, for buddies to keep; with `save`, for the coordinator, too. The log's index: done
        when `durable` has come to it."""
        raise NotImplementedError

    @property
    def durable(self) -> int:
        """The log's entry up to which nothing can be lost with one process."""
        return 0

    def saved(self, index: int) -> dict[int, dict[str, Array]]:
        """A snapshot that was taken with `save`: by branch, each vector (parameters, slots, group), [P]."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------- what is lost

    def lose(self, names: Iterable[str]) -> None:
        """These are dead, or not to be trusted any more. Workers are dropped, the others go on; after the loss of a server
        nothing is applied until `recover`."""

    def retire(self, names: Iterable[str]) -> None:
        """These are to leave: servers without blocks, workers of no setting. They can be stopped when not `needed`."""

    def needed(self, name: str) -> bool:
        """Whether stopping that peer now would lose anything."""
        return name in self.members

    @property
    def recovering(self) -> bool:
        """Whether servers are being brought back to what the log says."""
        return False

    def recover(self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = ()) -> None:
        """Go back to the last durable snapshot and on from there by the log, on those who are there; blocks of dead servers
        go to `servers`, as far as possible by these shares (none given: to those that are left)."""
