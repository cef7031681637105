"""The coordinator: one log for all servers, and the policy that says who goes on.

Here is what drivers ask for and what a journal gives back. Cycles of workers are in `harness.live.coordinator.cycles`,
branches in `harness.live.coordinator.branch`, the log in `harness.live.coordinator.ledger`, losses and views in
`harness.live.coordinator.membership`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harness.live.coordinator.branch import Facts, Line, LiveJob, Shards
from harness.live.coordinator.cycles import Cycles
from harness.live.coordinator.evaluations import Evaluations
from harness.live.coordinator.journal import Journal
from harness.live.coordinator.ledger import Ledger
from harness.live.coordinator.membership import Membership
from harness.live.coordinator.moves import Goal, Moves
from harness.live.coordinator.snapshots import Snapshots
from harness.live.protocol.blocks import Layout, blocks_in
from harness.live.protocol.driver_reports import Poll, Report
from harness.live.protocol.log import Fork, Free
from harness.live.protocol.messages import (
    Array,
    Copy,
    Done,
    Head,
    Hello,
    Kept,
    Measured,
    Message,
    Missing,
    Moved,
    Probed,
    Ready,
    Seen,
    Send,
    Staged,
)
from harness.live.protocol.messages import worker as worker_name
from tuners.actions import Rejected, Setting, SyncPolicy

__all__ = ["Coordinator", "LiveJob", "Poll", "Report", "Shards"]

_NOTES = 2000  # in the journal, before it is begun anew


class Coordinator:
    """The core of the coordinator's process, without sockets, threads or a clock of its own.

    Everything that a driver asks for returns at once; what has become of it is seen by `poll`. Peers are named as in
    `harness.live.protocol.messages`.
    """

    def __init__(self, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> None:
        self.job, self._now = job, now
        self._ledger = Ledger(Layout(job.size, job.blocks), send, journal)
        self._moves, self._snapshots = Moves(self._ledger), Snapshots(self._ledger)
        self._membership = Membership(self._ledger, self._snapshots, self._moves, now, job.retry_seconds, self._gone_back)
        self._evaluations = Evaluations(self._ledger, self._evaluator, now)
        self._cycles = Cycles(job, self._ledger, self._membership, self._snapshots, self._evaluations, now)
        self._next_branch = 1
        self.refused = 0  # messages of the past
        self._marks: dict[int, bytes] = {}  # this coordinator as of snapshots that were saved

    # ------------------------------------------------------------------------------------------------- its beginning

    def begin(self, setting: Setting, policy: SyncPolicy, parameters: Array) -> None:
        """Branch 0 with these parameters, [P] float32. Then `expect` peers, `recover` when servers have joined, which gives
        them the model, and `run` when workers have. A job that runs begins again, and what was pushed is lost."""
        self._check(policy)
        line = Line(0, setting, policy, self.job.shards(setting), testing=False, groups=self.job.aggregation != "each")
        self._begin({0: line}, (), {0: {"parameters": parameters}})

    def begin_from(self, state: bytes, vectors: dict[int, dict[str, Array]]) -> dict[int, int]:
        """As `begin`, with what `checkpoint` and `saved` gave once: another job's, or this one's when nobody has a copy of
        some block any more. What was pushed since is lost, and branches are those of then: the pushes that each has.

        Whoever was in a mini-batch begins it again, on the model of then. That is what it had before, and training is what
        it would have been, where the branch has made no step since its release: after `finish`, right after a barrier, and
        anywhere under BSP where gradients are grouped.
        """
        lines, next_branch, probing = pickle.loads(state)  # noqa: S301 - the job's own checkpoint
        self._next_branch = max(self._next_branch, next_branch)
        self._begin(lines, probing, vectors)
        return {number: line.pushes for number, line in lines.items()}

    def _begin(
        self, lines: dict[int, Line], probing: Iterable[tuple[int, Facts]], vectors: dict[int, dict[str, Array]]
    ) -> None:
        self._membership.lost_pushes += self._cycles.begin_anew(lines, probing)
        self._ledger.begin_anew()
        self._moves.goal = None
        self._snapshots.give(vectors)
        self._record()

    @classmethod
    def restored(cls, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> Coordinator:
        """A coordinator that goes on where the journal ends; call `recover` when it can reach its peers."""
        made = cls(job, send, now, journal)
        repeated: dict[str, Callable[..., Any]] = {
            "state": made._load,
            "entry": made._ledger.append,
            "durable": made._ledger.settle,
            "settle": made._cycles.settle,
            "advance": made._cycles.advance,
            "settle_probed": made._cycles.settle_probed,
            "told": made._cycles.told,
        }
        made._ledger.muted = True
        for record in journal:
            kind, *fields = pickle.loads(record)  # noqa: S301 - the job's own journal
            repeated[kind](*fields)
        made._ledger.muted = False
        made._ledger.inherit()
        made._record()
        return made

    def checkpoint(self, index: int) -> bytes:
        """All but the vectors as of a snapshot that was taken with `save`, for `begin_from`. Raises KeyError if there is a
        later one."""
        return self._marks[index]

    def expect(self, name: str, generation: int) -> None:
        """A process of this name and generation may join; those of older generations are refused from now on."""
        if self._ledger.members.get(name, generation) < generation:
            self.lose([name])
        self._ledger.expected[name] = generation
        self._record()

    # ------------------------------------------------------------------------------------------------- what comes in

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in."""
        head, ledger = message.head, self._ledger
        if isinstance(head, Hello):
            self._on_hello(sender, message.generation)
        elif ledger.members.get(sender) == message.generation and message.view == ledger.view:
            self._handle(sender, head, message.arrays)
        else:
            self.refused += 1

    def _on_hello(self, sender: str, generation: int) -> None:
        if self._ledger.expected.get(sender) == generation and self._membership.admit(sender, generation):
            self._evaluations.again()
            self._cycles.welcome(self._cycles.line)
            self._record()

    def _handle(self, sender: str, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case Done():
                self._cycles.done(sender, head)
            case Staged():
                self._cycles.staged(head)
            case Probed():
                self._cycles.probed(sender, head)
            case Kept():
                self._durable(self._snapshots.kept(sender, head))
            case Copy():
                self._durable(self._snapshots.copied(sender, head, arrays))
            case Moved():
                self._moves.come(blocks_in(head.runs), self._now())
            case Measured():
                self._evaluations.measured(head, self._cycles.lines, self.job.target)
            case Missing():
                self._membership.repeat(sender, head.index)
            case Ready():
                if self._membership.ready(sender):
                    self._cycles.copy()
                    self._moves.go_on()
                self._record()
            case Seen():
                self._membership.seen(sender, head.index)

    def _durable(self, complete: bool) -> None:
        if complete:
            self._marks = {i: mark for i, mark in self._marks.items() if i >= self._snapshots.saved_index}
            if self._ledger.notes > _NOTES:
                self._record()

    def _evaluator(self) -> str | None:
        names = (w for w in self._ledger.workers if w.partition("/")[2] not in self.job.nodes)
        return next(names, None)

    def tick(self) -> None:
        """Now and then: ask again for what has not come."""
        self._cycles.tick()
        self._evaluations.again(self.job.retry_seconds)
        self._membership.let_go(self._cycles.busy)

    # -------------------------------------------------------------------------------------------------- what drivers ask

    def run(self, branch: int) -> None:
        """Train this branch, which is launched where everybody stands. Those that were in a mini-batch of another begin it
        again when that one is run again."""
        line = self._cycles.lines[branch]
        if branch != self._cycles.running or self._cycles.finishing:
            self._cycles.rest()
            self._cycles.run(branch)
            self._record()
        if line.state is None or line.halted:
            self.launch(branch)

    def finish(self) -> bool:
        """Let those who are in a mini-batch complete it, and nobody begin another, until `rest` or `run`; whether all have.
        Who is released meanwhile begins when the branch is run again."""
        line = self._cycles.line
        if line is not None and not self._cycles.finishing:
            self._cycles.finishing = True
            self._record()
        return line is None or line.status != "running" or not line.busy

    def rest(self) -> None:
        """Train no branch; who is in a mini-batch begins it again when the branch is run again."""
        self._cycles.rest()
        self._record()

    def put(self, branch: int, setting: Setting, policy: SyncPolicy | None = None) -> None:
        """Put a setting in force, apart from where blocks are. Mini-batches under way go on; a new policy, or other
        workers, put the policy in force anew and release those that wait. None: the policy stays. Raises Rejected for a
        policy that probes where gradients are grouped."""
        line = self._cycles.lines[branch]
        self._check(policy or line.policy)
        line.setting, line.shards = setting, self.job.shards(setting)
        self._membership.stay(map(worker_name, setting.workers))
        if line.state is None or line.halted:
            line.policy = policy or line.policy
        else:
            self._cycles.renew(line, policy or line.policy)
        self._record()

    def _check(self, policy: SyncPolicy) -> None:
        if policy.probes and self.job.aggregation != "each":
            raise Rejected(
                f"Cannot install {policy.name}, which asks for losses before and after every push: here the servers apply "
                f'the {self.job.aggregation} of a group; use aggregation = "each".'
            )

    def halt(self, branch: int) -> None:
        """Everybody stops, mini-batches under way are given up: before a restart under another setting."""
        line = self._cycles.lines[branch]
        if branch == self._cycles.running:
            self._cycles.stop(line.busy)
        line.halt(self._now())
        self._record()

    def launch(self, branch: int) -> None:
        """All workers of the branch's setting begin, with the policy put in force anew."""
        line = self._cycles.lines[branch]
        now, line.halted = self._now(), False
        self._cycles.begin(line, line.install(line.policy, self._cycles.active(line), now), now)
        self._record()

    def place(
        self, servers: tuple[str, ...], shares: tuple[float, ...], *, on_demand: bool = False, at_once: int = 4
    ) -> None:
        """Begin to move blocks until these servers have these shares; `moving` until done. With `on_demand`, all change
        owners at once, and come when they are asked for or swept. Raises ValueError for a server that is not there."""
        missing = [s for s in servers if s not in self._ledger.members]
        if missing:
            raise ValueError(
                f"Cannot move blocks to {missing[0]!r}: it is not there; start it, and place when it has joined."
            )
        self._membership.stay(servers)
        self._moves.goal = Goal(servers, shares, on_demand, at_once)
        self._moves.seconds = self._now()
        if not self.recovering:
            self._moves.go_on()
        self._record()

    def fork(
        self, parent: int, setting: Setting, policy: SyncPolicy | None = None, *, testing: bool = False, number: int = 0
    ) -> int:
        """A new branch as the parent is now; it rests until it is run. It may be given the `number` of one that is gone."""
        number = number or self._next_branch
        self._next_branch = max(self._next_branch, number + 1)
        self._cycles.lines[number] = self._cycles.lines[parent].forked(number, testing=testing)
        self._ledger.append(Fork(number, parent))
        self.put(number, setting, policy)
        return number

    def free(self, branch: int) -> None:
        """Drop a branch."""
        if branch == self._cycles.running:
            self.rest()
        del self._cycles.lines[branch]
        self._ledger.append(Free(branch))
        self._evaluations.drop(branch)
        self._record()

    def evaluate(self, branch: int) -> int:
        """Have a branch evaluated as it is now; the number by which its report tells of it, unless `Poll.forgotten`."""
        return self._evaluations.begin(self._cycles.lines[branch], automatic=False)

    def snapshot(self, *, save: bool = False) -> int:
        """Copy everything as it is now, for buddies to keep; with `save`, for the coordinator, too. The log's index: done
        when `durable` has come to it."""
        index = self._cycles.copy(save=save)
        if save:
            probing = [(self._cycles.running, facts) for facts in self._cycles.probing.values()]
            self._marks[index] = pickle.dumps((self._cycles.lines, self._next_branch, probing))
        return index

    def saved(self, index: int) -> dict[int, dict[str, Array]]:
        """A snapshot that was taken with `save`: by branch, each vector (parameters, slots, group), [P]. Raises KeyError
        where it is not complete, or there is a later one."""
        return self._snapshots.saved(index)

    def lose(self, names: Iterable[str]) -> None:
        """These are dead, or not to be trusted any more. Workers are dropped, the others go on; after the loss of a server
        nothing is applied until `recover`."""
        lost = [n for n in names if n in self._ledger.members]
        for name in lost:
            self._cycles.lose(name)
        self._membership.lose(lost)
        self._cycles.refresh()
        self._record()

    def recover(self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = ()) -> None:
        """Go back to the last durable snapshot and on from there by the log, on those who are there; blocks of dead servers
        go to `servers`, as far as possible by these shares, and what `place` was asked for is void (none given: they go to
        those that are left). Raises RuntimeError where copies of a block are nowhere."""
        if servers:
            self._moves.goal = None
        self._membership.recover(servers, shares)
        self._record()

    def _gone_back(self, ungrouped: list[int]) -> None:
        """A view has begun: what was staged is gone, and pushes of open groups of these branches were withdrawn."""
        for branch in ungrouped:
            if branch in self._cycles.lines:
                self._cycles.lines[branch].grouped -= 1
        self._cycles.forget_staged()

    def retire(self, names: Iterable[str]) -> None:
        """These are to leave: servers without blocks, workers of no setting. They can be stopped when not `needed`."""
        self._membership.leaving.update(dict.fromkeys(names, self._ledger.index + 1))
        self._cycles.copy()
        self._ledger.table_to(self._ledger.workers)
        self._record()

    def needed(self, name: str) -> bool:
        """Whether stopping that peer now would lose anything."""
        self._membership.let_go(self._cycles.busy)
        return name in self._ledger.members

    # --------------------------------------------------------------------------------------------------- what drivers see

    @property
    def members(self) -> Mapping[str, int]:
        """Who has joined, with generations."""
        return self._ledger.members

    @property
    def moving(self) -> int:
        """Blocks that are not yet where they are to be."""
        return self._moves.left

    @property
    def durable(self) -> int:
        """The log's entry up to which nothing can be lost with one process."""
        return self._ledger.durable

    @property
    def recovering(self) -> bool:
        """Whether servers are being brought back to what the log says, or wait to be."""
        return self._membership.recovering

    def poll(self, taken: Mapping[int, int] | None = None) -> Poll:
        """What has happened. A driver says how many rows of each branch it has `taken`, and is told of the others again and
        again, so that none are lost with a coordinator that dies while it answers; without that, it has what it was told."""
        reports = {}
        for number, line in self._cycles.lines.items():
            first, rows = self._cycles.untold(line, None if taken is None else taken.get(number, 0))
            reports[number] = Report(first, rows, self._evaluations.take(number))
        return Poll(
            now=self._now(),
            reports=reports,
            statuses={number: line.status for number, line in self._cycles.lines.items()},
            moving=self.moving,
            durable=self.durable,
            recovering=self.recovering,
            members=dict(self.members),
            lost_pushes=self._membership.lost_pushes,
            forgotten=self._evaluations.forgotten,
        )

    # ------------------------------------------------------------------------------------------------------- its journal

    def _record(self) -> None:
        """Write down everything; what was written before is needed no more."""
        parts = (part.dump() for part in (self._ledger, self._membership, self._cycles))
        self._ledger.restart(pickle.dumps(("state", *parts, self._next_branch, self._moves.goal)))

    def _load(self, ledger: dict[str, Any], membership: dict[str, Any], cycles: dict[str, Any], *kept: Any) -> None:
        self._ledger.load(ledger)
        self._membership.load(membership)
        self._cycles.load(cycles)
        self._next_branch, self._moves.goal = kept
