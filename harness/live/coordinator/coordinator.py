"""The coordinator: one log for all servers, and the policy that releases workers.

This file has what the driver asks for and the dispatch of messages. What the coordinator knows has owners: the log and
where blocks are in `harness.live.coordinator.ledger`, the processes in `harness.live.coordinator.membership`, the branches in
`harness.live.coordinator.branches`. The owners do not call the coordinator back: they return what it has to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob, PushFacts, Shards
from harness.live.coordinator.branches.branch_state import branches_as_bytes, branches_of
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.complete_pushes import CompletePushes
from harness.live.coordinator.branches.cycles import Cycles
from harness.live.coordinator.branches.evaluations import Evaluations
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.ledger.journal import Journal
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Goal, Moves
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.state_record import StateRecord
from harness.live.protocol.blocks import Layout, blocks_in
from harness.live.protocol.driver_reports import Poll, Report
from harness.live.protocol.log import ForkEntry, FreeEntry, LogEntry
from harness.live.protocol.messages import (
    Array,
    BlocksMoved,
    CopyKept,
    EntriesMissing,
    EvaluationResult,
    GradientDone,
    Head,
    Hello,
    LossProbed,
    Message,
    PushStaged,
    Send,
    SnapshotCopy,
    TableSeen,
    ViewReady,
)
from harness.live.protocol.messages import worker as worker_name
from tuners.actions import Rejected, Setting, SyncPolicy
from tuners.system import check_no_table, check_no_timers

__all__ = ["Coordinator", "LiveJob", "Poll", "Report", "Shards"]


class Coordinator:
    """The core of the coordinator's process, without sockets, threads or a clock of its own.

    All requests of the driver return at once; `poll` shows their effects. Processes are named as in
    `harness.live.protocol.messages`.
    """

    def __init__(self, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> None:
        self.job, self._now = job, now
        self._ledger = Ledger(Layout(job.size, job.blocks, job.tables), send, journal)
        self._moves, self._snapshots = Moves(self._ledger), Snapshots(self._ledger)
        self._membership = Membership(self._ledger, self._snapshots, self._moves, now, job.retry_seconds)
        self._evaluations = Evaluations(self._ledger, job.nodes, now)
        self._branches, self._pending = Branches(job, self._ledger, now), PendingPushes(job.blocks)
        self._releases = Releases(job, self._ledger, self._membership, self._branches, self._pending, now)
        self._pushes = CompletePushes(job, self._ledger, self._branches, self._pending, self._releases, now)
        self._cycles = Cycles(job, self._ledger, self._branches, self._pending, self._releases, self._pushes, now)
        owners = (self._ledger, self._membership, self._moves, self._branches, self._pending, self._releases)
        self._record = StateRecord(self._ledger, {type(owner).__name__: owner for owner in owners})
        self._uncopied = 0  # pushes since the last snapshot
        self.refused = 0  # messages of an older view or generation

    # ------------------------------------------------------------------------------------------------- begin and restore

    def begin(self, setting: Setting, policy: SyncPolicy, parameters: Array) -> None:
        """Create branch 0 with these parameters, [P] float32. Then `expect` processes, `recover` when the servers have
        joined, which gives them the model, and `run` when the workers have. A job that runs already starts over."""
        self._check(policy)
        groups = self.job.aggregation != "each"
        branch = CoordinatorBranch(0, setting, policy, self.job.shards(setting), testing=False, groups=groups)
        self._begin({0: branch}, (), {0: {"parameters": parameters}})

    def begin_from(
        self, state: bytes, vectors: dict[int, dict[str, Array]], policies: Mapping[int, SyncPolicy]
    ) -> dict[int, int]:
        """Like `begin`, from the results of `checkpoint` and `saved`: of another job, or of this one when a block has no
        copy any more. `policies` are those that the branches had then. Later pushes are lost. Returns the branches of the
        checkpoint, and the pushes of each. Raises ValueError for a state that is damaged.

        A worker that was in a mini-batch repeats it on the restored model. Training is the same as without the interruption
        if the branch had made no step since the worker's release: after `finish`, right after a barrier, and anywhere under
        BSP with grouped gradients.
        """
        branches, next_branch, undecided = branches_of(state, self.job, policies)
        self._branches.next_number = max(self._branches.next_number, next_branch)
        self._begin(branches, undecided, vectors)
        return {number: branch.pushes for number, branch in branches.items()}

    def _begin(
        self,
        branches: dict[int, CoordinatorBranch],
        undecided: Iterable[tuple[int, PushFacts]],
        vectors: dict[int, dict[str, Array]],
    ) -> None:
        self._evaluations.reset()
        before = self._branches.replace(branches)
        self._pushes.decide_restored(undecided)
        self._branches.restart_clocks()
        self._membership.lost_pushes += self._branches.lost_since(before)
        self._ledger.reset()
        self._moves.goal = None
        self._snapshots.keep_model(vectors)
        self._record.write()

    @classmethod
    def restored(cls, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> Coordinator:
        """A coordinator that continues where the journal ends. Call `recover` once it can reach its processes."""
        made = cls(job, send, now, journal)
        replayed: dict[str, Callable[..., Any]] = {
            "entry": made._ledger.append,
            "durable": made._ledger.make_durable,
            "settle": made._pushes.settle,
            "advance": made._pushes.advance,
            "settle_probed": made._pushes.settle_probed,
            "told": made._branches.confirm_rows,
        }
        made._record.replay(journal, replayed)
        # The copies that the dead coordinator kept are lost with it, so it counts as no holder any more.
        made._ledger.take_over()
        made._record.write()
        return made

    def checkpoint(self, index: int) -> bytes:
        """The coordinator's state at a snapshot that was taken with `save`, for `begin_from`. Raises KeyError if a later
        one of these is complete."""
        return self._snapshots.state(index)

    def expect(self, name: str, generation: int) -> None:
        """Let a process of this name and generation join. Messages of its older generations are refused from now on."""
        if self._ledger.members.get(name, generation) < generation:
            self.lose([name])
        self._ledger.expected[name] = generation
        self._record.write()

    # ------------------------------------------------------------------------------------------------- messages that arrive

    def receive(self, sender: str, message: Message) -> None:
        """Handle one message."""
        head, ledger = message.head, self._ledger
        if isinstance(head, Hello):
            self._on_hello(sender, message.generation)
        # A process that is taken for dead may still run and send: its generation is no member's any more.
        elif ledger.members.get(sender) == message.generation and message.view == ledger.view:
            self._handle(sender, head, message.arrays)
        else:
            self.refused += 1

    def _on_hello(self, sender: str, generation: int) -> None:
        if self._ledger.expected.get(sender) == generation and self._membership.admit(sender, generation):
            self._evaluations.ask_again()
            # Only the running branch: by the time that another one runs, the same workers may be back.
            if self._branches.current is not None:
                self._cycles.update_workers(self._branches.current)
            self._record.write()

    def _handle(self, sender: str, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case GradientDone():
                self._after_push(self._pushes.done(sender, head))
            case PushStaged():
                self._after_push(self._pushes.staged(head))
            case LossProbed():
                self._after_push(self._pushes.probed(sender, head))
            case CopyKept():
                self._after_copy(self._snapshots.kept(sender, head))
            case SnapshotCopy():
                self._after_copy(self._snapshots.copied(sender, head, arrays))
            case BlocksMoved():
                self._moves.arrived(blocks_in(head.runs), self._now())
            case EvaluationResult():
                self._on_evaluation(head)
            case EntriesMissing():
                if self._membership.resend(sender, head.index):
                    self._begin_view()
            case ViewReady():
                if self._membership.ready(sender):
                    # At once: until it is durable, some blocks may have one holder only.
                    self._take_snapshot()
                    self._moves.advance()
                self._record.write()
            case TableSeen():
                self._membership.table_used(sender, head.index)

    def _after_push(self, branch: CoordinatorBranch | None) -> None:
        """Do what is due after every so many pushes. None: no push was completed."""
        if branch is None:
            return
        if self.job.evaluate_clocks and branch.pushes % self.job.evaluate_clocks == 0:
            self._evaluations.request(branch, automatic=True)
        self._uncopied += 1
        often = self.job.snapshot_commits or max(20, 4 * int(np.count_nonzero(branch.active)))
        # Twice as rarely while another snapshot is in progress, which the new one would replace.
        if self._uncopied >= often * (1 + bool(self._snapshots.under_way)) and not self.recovering:
            self._take_snapshot()
        self._dismiss_retired()

    def _dismiss_retired(self) -> None:
        if self._membership.retiring:
            self._membership.dismiss_retired(self._branches.busy)

    def _after_copy(self, complete: bool) -> None:
        if complete:
            self._record.write_if_long()

    def _on_evaluation(self, head: EvaluationResult) -> None:
        found = self._evaluations.answered(head)
        if found is not None:
            self._branches.evaluated(*found)

    def tick(self) -> None:
        """Call this now and then: it asks again for what has not arrived."""
        if self._releases.ask_again():
            if self._membership.overdue:
                self._begin_view()
            self._membership.retransmit()
        self._evaluations.ask_again(self.job.retry_seconds)
        self._dismiss_retired()

    # ------------------------------------------------------------------------------------------------ requests of the driver

    def run(self, branch: int) -> None:
        """Train this branch, and pause the one that runs. Workers repeat the mini-batch that they were at when it was
        paused; the policy of a branch that never ran, or was halted, is started."""
        of = self._branches.by_number[branch]
        if branch != self._branches.running or self._branches.finishing:
            self._cycles.rest()
            self._cycles.run(branch)
            self._record.write()
        if of.state is None or of.halted:
            self.launch(branch)

    def finish(self) -> bool:
        """Let workers complete their mini-batches and begin no others until `rest` or `run`. Returns whether all have
        completed. Workers that are released meanwhile begin when the branch runs again."""
        branch = self._branches.current
        if branch is not None and not self._branches.finishing:
            self._branches.finishing = True
            self._record.write()
        return branch is None or branch.status != "running" or not branch.busy

    def rest(self) -> None:
        """Pause the running branch. Workers repeat their mini-batches when it runs again."""
        self._cycles.rest()
        self._record.write()

    def put(self, branch: int, setting: Setting, policy: SyncPolicy | None = None) -> None:
        """Change the setting of a branch, except where blocks are (see `place`). Mini-batches in progress go on. A new
        policy, or other workers, start the policy anew and release the workers that wait. None: the policy stays. Raises
        Rejected for a policy that probes, where gradients are grouped, and for one that sets timers or needs a table."""
        of = self._branches.by_number[branch]
        self._check(policy or of.policy)
        of.setting, of.shards = setting, self.job.shards(setting)
        self._membership.keep(map(worker_name, setting.workers))
        if of.state is None or of.halted:
            of.policy = policy or of.policy
        else:
            self._cycles.install(of, policy or of.policy)
        self._record.write()

    def _check(self, policy: SyncPolicy) -> None:
        check_no_timers(policy)
        check_no_table(policy)
        if policy.probes and self.job.aggregation != "each":
            raise Rejected(
                f"Cannot install {policy.name}, which asks for losses before and after every push: here the servers apply "
                f'the {self.job.aggregation} of a group; use aggregation = "each".'
            )

    def halt(self, branch: int) -> None:
        """Stop all workers of a branch and drop their mini-batches, before a restart under another setting."""
        of = self._branches.by_number[branch]
        if branch == self._branches.running:
            self._releases.stop(of.busy)
        of.halt(self._now())
        self._record.write()

    def launch(self, branch: int) -> None:
        """Start the branch's policy and release all workers of its setting."""
        of = self._branches.by_number[branch]
        self._cycles.start(of)
        self._record.write()

    def place(
        self,
        servers: tuple[str, ...],
        shares: tuple[float, ...],
        *,
        owners: tuple[str, ...] = (),
        on_demand: bool = False,
        at_once: int = 4,
    ) -> None:
        """Begin to move blocks until these servers have these shares or, with `owners`, until each block is at its own;
        `moving` counts down to 0. With `on_demand`, all blocks change owners at once and are sent when asked for. Raises
        ValueError for a server that has not joined."""
        missing = [s for s in servers if s not in self._ledger.members]
        if missing:
            raise ValueError(f"Cannot move blocks to {missing[0]!r}: it has not joined; start it, and place when it has.")
        self._membership.keep(servers)
        # Also while recovering: the moves begin when all servers have restored the view.
        self._moves.goal = Goal(servers, shares, on_demand, at_once, owners)
        self._moves.seconds = self._now()
        if not self.recovering:
            self._moves.advance()
        self._record.write()

    def fork(
        self, parent: int, setting: Setting, policy: SyncPolicy | None = None, *, testing: bool = False, number: int = 0
    ) -> int:
        """Create a branch from the parent's present state; returns its number. It does not run until `run`. `number`
        gives it the number of a branch that was freed."""
        number = number or self._branches.next_number
        self._branches.next_number = max(self._branches.next_number, number + 1)
        self._branches.by_number[number] = self._branches.by_number[parent].forked(number, testing=testing)
        self._ledger.append(ForkEntry(number, parent))
        self.put(number, setting, policy)
        return number

    def free(self, branch: int) -> None:
        """Drop a branch."""
        if branch == self._branches.running:
            self.rest()
        del self._branches.by_number[branch]
        self._ledger.append(FreeEntry(branch))
        self._evaluations.drop_branch(branch)
        self._record.write()

    def evaluate(self, branch: int) -> int:
        """Evaluate a branch as it is now. Returns a number: a report gives the result under it, unless the request is among
        `Poll.cancelled_requests`."""
        return self._evaluations.request(self._branches.by_number[branch], automatic=False)

    def snapshot(self, *, save: bool = False) -> int:
        """Copy the model to backups; with `save`, also to the coordinator. Returns its index in the log: the snapshot is
        complete when `durable` has reached it."""
        index = self._take_snapshot(save=save)
        if save:
            running = self._branches.running
            undecided = [] if running is None else [(running, facts) for facts in self._pending.undecided.values()]
            state = branches_as_bytes(self._branches.by_number.values(), self._branches.next_number, undecided)
            self._snapshots.keep_state(index, state)
        return index

    def _take_snapshot(self, *, save: bool = False) -> int:
        self._uncopied = 0
        return self._snapshots.take(self._membership.retiring, save=save)

    def saved(self, index: int) -> dict[int, dict[str, Array]]:
        """A snapshot that was taken with `save`: by branch, each vector (parameters, slots, group), [P]. Raises KeyError
        if it is not complete, or a later one is."""
        return self._snapshots.saved(index)

    def lose(self, names: Iterable[str]) -> None:
        """These processes are dead, or shall be treated as dead. The policy continues without the workers among them; after
        the loss of a server that owns blocks, servers apply nothing until `recover`."""
        lost = [n for n in names if n in self._ledger.members]
        for name in lost:
            self._cycles.lose(name)
        for name in lost:
            if self._membership.lose(name):
                self._begin_view()
        if not self.recovering:
            # A dead worker cannot stage its pushes again, so make them durable at once.
            self._snapshots.take(self._membership.retiring)
        for branch in self._branches.by_number.values():
            self._cycles.update_workers(branch)
        self._record.write()

    def recover(self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()) -> None:
        """Go back to the last durable snapshot and replay the log, on the processes that are alive. Blocks of dead servers
        go to `servers`, by these shares if possible, or to their own one of `owners`, which cancels `place`; without
        `servers`, to those that are left. Raises RuntimeError where a block has no copy."""
        if servers:
            self._moves.goal = None
        self._begin_view(servers, shares, owners)
        self._record.write()

    def _begin_view(
        self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()
    ) -> None:
        for branch in self._membership.recover(servers, shares, owners):
            if branch in self._branches.by_number:
                self._branches.by_number[branch].grouped -= 1
        self._pending.forget_staged()

    def retire(self, names: Iterable[str]) -> None:
        """These shall leave: servers without blocks, workers of no setting. Stop them when they are not `needed`."""
        # The entry after the present one is the snapshot below.
        self._membership.retiring.update(dict.fromkeys(names, self._ledger.index + 1))
        self._take_snapshot()  # what they still keep must have another holder
        self._ledger.send_table(self._ledger.workers)
        self._record.write()

    def needed(self, name: str) -> bool:
        """Whether stopping this process now would lose anything."""
        self._dismiss_retired()
        return name in self._ledger.members

    def slow(self, factors: Mapping[str, float]) -> None:
        """From the next mini-batch on, computing on these nodes takes so many times as long."""
        self._releases.slowdown = dict(factors)
        self._record.write()

    # ------------------------------------------------------------------------------------------------- what the driver sees

    @property
    def members(self) -> Mapping[str, int]:
        """The processes that have joined, with their generations."""
        return self._ledger.members

    @property
    def expected(self) -> Mapping[str, int]:
        """The processes that may join, with their generations."""
        return self._ledger.expected

    @property
    def branches(self) -> Mapping[int, CoordinatorBranch]:
        """All branches, by number."""
        return self._branches.by_number

    @property
    def running(self) -> int | None:
        """The branch that trains."""
        return self._branches.running

    @property
    def owners(self) -> Mapping[int, str]:
        """The server that owns each block."""
        return self._ledger.table

    @property
    def holders(self) -> Mapping[int, set[str]]:
        """The processes that keep a copy of each block, as of the last durable snapshot."""
        return self._ledger.holders

    @property
    def log(self) -> Mapping[int, LogEntry]:
        """The entries of the log after the last durable snapshot, by index."""
        return self._ledger.entries

    @property
    def view(self) -> int:
        """The number of the present view."""
        return self._ledger.view

    @property
    def goal(self) -> Goal | None:
        """Where `place` moves the blocks to."""
        return self._moves.goal

    @property
    def moving(self) -> int:
        """Blocks that are not yet where `place` wants them."""
        return self._moves.remaining

    @property
    def durable(self) -> int:
        """The entry of the log up to which the death of one process loses nothing."""
        return self._ledger.durable

    @property
    def recovering(self) -> bool:
        """Whether servers restore a view, or wait for `recover`."""
        return self._membership.recovering

    def poll(self, taken: Mapping[int, int] | None = None) -> Poll:
        """The state of the job. `taken` confirms the rows of each branch that the driver has; all others are reported again.
        So no rows are lost with a coordinator that dies while it answers. None: the driver takes all with this answer."""
        reports = {}
        for number, branch in self._branches.by_number.items():
            first, rows = self._branches.rows_from(branch, None if taken is None else taken.get(number, 0))
            reports[number] = Report(first, rows, self._evaluations.take(number))
        return Poll(
            now=self._now(),
            reports=reports,
            statuses={number: branch.status for number, branch in self._branches.by_number.items()},
            moving=self.moving,
            durable=self.durable,
            recovering=self.recovering,
            members=dict(self.members),
            held_seconds=self._branches.held_seconds(),
            lost_pushes=self._membership.lost_pushes,
            cancelled_requests=self._evaluations.cancelled_requests,
        )

    def held_up_by(self) -> dict[str, str]:
        """What training waits for, by the process that it waits for."""
        branch, found = self._branches.current, dict[str, str]()
        for worker, cycle in {} if branch is None else branch.busy.items():
            name = self.job.workers[worker]
            if not self._pending.is_computed(worker) or worker in self._pending.undecided:
                found[name] = f"has not computed mini-batch {cycle.clock}"
                continue
            for block, owner in self._ledger.table.items():
                if block not in self._pending.staged(worker):
                    found[owner] = f"has not received the gradient of {name}"
        return found
