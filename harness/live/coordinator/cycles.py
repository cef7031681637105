"""Cycles of workers as the coordinator sees them: released, computed, staged, committed; of whichever branch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.live.coordinator.branch import Facts, Line, LiveJob
from harness.live.coordinator.evaluations import Evaluations
from harness.live.coordinator.ledger import Ledger
from harness.live.coordinator.membership import Membership
from harness.live.coordinator.snapshots import Snapshots
from harness.live.protocol.blocks import Blocks, blocks_in
from harness.live.protocol.messages import Again, Done, Probe, Probed, Release, Rest, Staged
from harness.live.protocol.messages import worker as worker_name
from simulators.engine.loop import Records
from tuners.actions import SyncPolicy

__all__ = ["Cycles"]

_KEPT = ("lines", "running", "finishing", "last", "probing")


class Cycles:
    """Branches, and what the workers of the one that runs are at."""

    def __init__(
        self,
        job: LiveJob,
        ledger: Ledger,
        membership: Membership,
        snapshots: Snapshots,
        evaluations: Evaluations,
        now: Callable[[], float],
    ) -> None:
        self._job, self._ledger, self._now = job, ledger, now
        self._membership, self._snapshots, self._evaluations = membership, snapshots, evaluations
        self._workers = {worker_name(node): w for w, node in enumerate(job.nodes)}
        self.lines: dict[int, Line] = {}
        self.running: int | None = None
        self.finishing = False  # who is in a mini-batch completes it, and nobody begins another
        self.last = 0  # the number of the last cycle
        self.probing: dict[int, Facts] = {}  # of the running branch, by worker: committed, and not decided on
        self._done: dict[int, Done] = {}
        self._staged: dict[int, Blocks] = {}
        self._asked: dict[int, tuple[float, float]] = {}  # when each worker was told something last, and how long to wait
        self._uncopied = 0  # commits since the last snapshot

    def dump(self) -> dict[str, Any]:
        """All of it that a successor needs."""
        return {name: getattr(self, name) for name in _KEPT}

    def load(self, kept: dict[str, Any]) -> None:
        """The way back from `dump`."""
        for name in _KEPT:
            setattr(self, name, kept[name])

    def begin_anew(self, lines: dict[int, Line], probing: Iterable[tuple[int, Facts]]) -> int:
        """The branches are these, at rest, with pushes of `probing` policies; how many pushes of those before are lost.
        Drivers are told of lost ones, too. Nothing is noted: the journal has other branches until all is written anew."""
        before, self.lines, self.running = self.lines, lines, None
        for number in before.keys() & lines.keys():
            lines[number].rows, lines[number].told = before[number].rows, before[number].told
        self._evaluations.begin_anew()
        self.probing.clear()
        for number, facts in probing:
            self._settle_probed(number, facts._replace(loss_after=facts.loss_before))
        for line in lines.values():
            line.start_clock(self._now())
        return sum(b.pushes - (lines[n].pushes if n in lines else b.inherited) for n, b in before.items())

    # -------------------------------------------------------------------------------------------------- what comes in

    @property
    def line(self) -> Line | None:
        """The branch that runs."""
        return None if self.running is None else self.lines.get(self.running)

    def busy(self, name: str) -> bool:
        """Whether a worker is in a mini-batch."""
        line = self.line
        return line is not None and any(worker_name(self._job.nodes[w]) == name for w in line.busy)

    def _of(self, name: str, cycle: int) -> int | None:
        """The worker that is in this cycle just now; None for those of the past."""
        worker, line = self._index(name), self.line
        if line is None or worker is None or worker not in line.busy or line.busy[worker].number != cycle:
            return None
        return worker

    def _index(self, name: str) -> int | None:
        return self._workers.get(name)

    def done(self, sender: str, head: Done) -> None:
        """A worker has computed a gradient."""
        worker = self._of(sender, head.cycle)
        if worker is not None and worker not in self._done:
            self._done[worker] = head
            self._asked[worker] = self._now(), self._job.retry_seconds
            self._try(worker, sender)

    def staged(self, head: Staged) -> None:
        """A server has parts of a push."""
        worker = self._of(head.worker, head.cycle)
        if worker is not None and worker not in self.probing:
            self._staged[worker] = self._staged.get(worker, frozenset()) | blocks_in(head.runs)
            if head.done is None or worker in self._done:
                self._try(worker, head.worker)
            else:
                self.done(head.worker, head.done)

    def _try(self, worker: int, name: str) -> None:
        """Complete a push if it is all there."""
        done, line = self._done.get(worker), self.line
        if done is None or line is None or line.status != "running" or worker in self.probing:
            return
        if len(self._staged.get(worker, ())) < self._job.blocks:
            return
        facts = Facts(worker, self._now(), done.loss, done.pull_seconds, done.compute_seconds, done.index, done.loss_before)
        if line.policy.probes:
            index = self.advance(line.number, name, facts)
            self._ledger.tell(name, Probe(done.cycle, index))
        else:
            self.settle(line.number, name, facts)
            self._pushed(line)

    def probed(self, sender: str, head: Probed) -> None:
        """A worker has found the loss after its push."""
        worker, line = self._of(sender, head.cycle), self.line
        if worker is not None and line is not None and worker in self.probing:
            facts = self.probing[worker]._replace(seconds=self._now(), loss_after=head.loss)
            self.settle_probed(line.number, facts)
            self._pushed(line)

    def tick(self) -> None:
        """Ask again for what has not come for long; next time, wait twice as long."""
        line, now, late = self.line, self._now(), False
        if line is None or line.status != "running":
            return
        for worker, cycle in line.busy.items():
            since, wait = self._asked.get(worker, (0.0, self._job.retry_seconds))
            if now - since > wait:
                late, self._asked[worker] = True, (now, 2 * wait)
                name = worker_name(self._job.nodes[worker])
                if worker in self.probing:
                    self._ledger.tell(name, Probe(cycle.number, self._ledger.index))
                else:
                    self._ledger.tell(name, self._release(line, worker))
                    self._ledger.tell(name, Again(cycle.number))
        if late or self._membership.recovering:
            self._membership.remind()

    def forget_staged(self) -> None:
        """A view begins: servers have lost what was staged."""
        self._staged.clear()

    # ----------------------------------------------------------------------- what a journal repeats in the same words

    def settle(self, branch: int, name: str, facts: Facts) -> None:
        """A push is complete: the policy decides, the push counts, others go on."""
        line, facts = self.lines[branch], Facts(*facts)
        commit, released = line.settle(facts, name, self._ledger.index + 1)
        if line is self.line and not self.finishing:
            first = self._next_cycle()
            given = tuple((worker_name(self._job.nodes[w]), first + i) for i, w in enumerate(released))
            commit = replace(commit, released=given, bits=line.setting.transfer_bits)
        self._ledger.append(commit, "settle", branch, name, tuple(facts))
        self.begin(line, released, facts.seconds, given=True)
        self._judge(line)

    def _next_cycle(self) -> int:
        return max(self.last, self._ledger.view << 32) + 1

    def advance(self, branch: int, name: str, facts: Facts) -> int:
        """A push of a policy that probes counts; the policy decides later. Its index."""
        self.probing[facts.worker] = facts
        commit = self.lines[branch].advance(facts, name, self._ledger.index + 1)
        return self._ledger.append(commit, "advance", branch, name, facts)

    def settle_probed(self, branch: int, facts: Facts) -> None:
        """The policy decides on such a push."""
        self._ledger.note("settle_probed", branch, facts)
        self._settle_probed(branch, facts)

    def _settle_probed(self, branch: int, facts: Facts) -> None:
        line = self.lines[branch]
        self.probing.pop(facts.worker, None)
        self.begin(line, line.settle_probed(facts), facts.seconds)
        self._judge(line)

    def decide_now(self, line: Line) -> None:
        """The policy decides on pushes whose second loss is still to come, as if they had changed nothing."""
        for facts in list(self.probing.values()):
            self.settle_probed(line.number, facts._replace(loss_after=facts.loss_before))

    def told(self, branch: int, rows: int) -> None:
        """The driver has so many pushes more."""
        self._ledger.note("told", branch, rows)
        line = self.lines[branch]
        del line.rows[:rows]
        line.told += rows

    def untold(self, line: Line, taken: int | None) -> tuple[int, NDArray[np.float64]]:
        """The rows from number `taken` on, and the number of the first; None: all, which are taken with that."""
        if taken is not None and taken > line.told:
            self.told(line.number, taken - line.told)
        first, rows = line.told, np.array(line.rows).reshape(-1, len(Records._fields))
        if taken is None and len(rows):
            self.told(line.number, len(rows))
        return first, rows

    def _judge(self, line: Line) -> None:
        """Where the branch stands after a push."""
        target = self._job.target
        if line.status != "running":
            return
        if target.counts and target.reached(np.nan, np.nan, line.pushes, line.samples):
            line.status = "target"
        elif not line.busy and not line.due:
            line.status = "deadlock"

    def _pushed(self, line: Line) -> None:
        """What is due after so many pushes."""
        if self._job.evaluate_clocks and line.pushes % self._job.evaluate_clocks == 0:
            self._evaluations.begin(line, automatic=True)
        self._uncopied += 1
        often = self._job.snapshot_commits or max(20, 4 * int(np.count_nonzero(line.active)))
        if self._uncopied >= often * (1 + bool(self._snapshots.under_way)) and not self._membership.recovering:
            self.copy()
        self._membership.let_go(self.busy)

    def copy(self, *, save: bool = False) -> int:
        """Take a snapshot; its index."""
        self._uncopied = 0
        return self._snapshots.take(self._membership.leaving, save=save)

    # ------------------------------------------------------------------------------------------------------- releases

    def begin(self, line: Line, released: Iterable[int], seconds: float, *, given: bool = False) -> None:
        """Workers begin their next mini-batch; who is in one gives it up."""
        for worker in released:
            if worker in line.busy:
                line.give_up(worker, seconds)
            if line.number == self.running and not self.finishing:
                self.start(line, worker, seconds, given=given)
            else:
                line.due.add(worker)

    def start(self, line: Line, worker: int, seconds: float, *, given: bool = False) -> None:
        """A worker begins its next mini-batch, or again the one that it was at when the branch came to rest."""
        self.last = self._next_cycle()
        line.begin(worker, self.last, seconds, self._ledger.index)
        self.forget(worker)
        self._asked[worker] = self._now(), self._job.retry_seconds
        name = worker_name(self._job.nodes[worker])
        self._membership.released[name] = self.last
        self._membership.table_to(name)
        self._ledger.tell(name, self._release(line, worker, given=given))

    def forget(self, worker: int) -> None:
        """What came of a cycle that is over."""
        made: tuple[dict[int, Any], ...] = (self._done, self._staged, self.probing)
        for kept in made:
            kept.pop(worker, None)

    def _release(self, line: Line, worker: int, *, given: bool = False) -> Release:
        cycle, name, setting = line.busy[worker], worker_name(self._job.nodes[worker]), line.setting
        return Release(
            cycle=cycle.number,
            branch=line.number,
            clock=cycle.clock,
            after=cycle.after,
            durable=min(self._ledger.commits(name), default=cycle.number) - 1,
            given=given,
            samples=int(line.shards.samples[worker]),
            shard_start=int(line.shards.start[worker]),
            shard_length=int(line.shards.length[worker]),
            bits=setting.transfer_bits,
            probes=line.policy.probes,
            intra_threads=setting.intra_threads,
            inter_threads=setting.inter_threads,
        )

    def run(self, branch: int) -> None:
        """A branch that rested goes on. Who is not there is in no mini-batch and has none to begin: one that went back to
        what was saved has those of then."""
        line, now = self.lines[branch], self._now()
        line.resume(now)
        for worker in {*line.busy, *line.due}:
            if worker_name(self._job.nodes[worker]) not in self._ledger.members:
                line.give_up(worker, now)
        self.welcome(line)
        self.running = branch
        for worker in sorted({*line.busy, *line.due}):
            self.start(line, worker, now)

    def rest(self) -> None:
        """No branch goes on."""
        if self.line is not None:
            self.decide_now(self.line)
            self.line.pause(self._now())
            self.stop(self.line.busy)
        self.running, self.finishing = None, False

    def stop(self, workers: Iterable[int]) -> None:
        """These are in no mini-batch any more."""
        for worker in workers:
            self.forget(worker)
            self._ledger.tell(worker_name(self._job.nodes[worker]), Rest())

    def lose(self, name: str) -> None:
        """A worker is dead."""
        worker = self._index(name)
        if worker is not None:
            self.forget(worker)
            for line in self.lines.values():
                line.give_up(worker, self._now())

    # ------------------------------------------------------------------------------------------------- policies and workers

    def active(self, line: Line) -> NDArray[np.bool_]:
        """Who works under a branch's setting and is there, [k]."""
        members, workers = self._ledger.members, line.setting.workers
        return np.array([n in workers and worker_name(n) in members for n in self._job.nodes])

    def renew(self, line: Line, policy: SyncPolicy) -> None:
        """Put a policy in force anew if it is another one, or is to rule others."""
        active, now, begun_without = self.active(line), self._now(), list[int]()
        if policy.probes != line.policy.probes and line is self.line:
            self.decide_now(line)
            begun_without = list(line.busy) if policy.probes else []
        if policy is not line.policy or not np.array_equal(active, line.active):
            released = line.install(policy, active, now)
            for worker in begun_without:
                self.start(line, worker, now)
            self.begin(line, released, now)

    def refresh(self) -> None:
        """Workers have gone."""
        for line in self.lines.values():
            self.welcome(line)

    def welcome(self, line: Line | None) -> None:
        """Put the policy in force anew if others are there than it rules. For those who come, a branch at rest does so when
        it runs: they may be the same ones again."""
        if line is not None and line.state is not None and not line.halted:
            self.renew(line, line.policy)
