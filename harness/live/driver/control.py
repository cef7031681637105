"""The thread that watches a live job: reads the coordinator's reports, advances procedures, repairs losses, wakes waiters.

At most one procedure is in progress: a reconfiguration, or what a loss, a slow link, a returning node or a checkpoint
requires. It is a generator, and advances one step after each report. A loss replaces it by the repair, whatever it was.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from harness.live.coordinator.membership.membership import ModelLost
from harness.live.driver.branch_view import DriverBranch
from harness.live.driver.checkpoint_file import Checkpoint
from harness.live.driver.driver_state import driver_state
from harness.live.driver.emulated_nodes import EmulatedNodes
from harness.live.driver.links import LinkMonitor, SlowLink
from harness.live.driver.losses import Losses
from harness.live.driver.recent_pushes import RecentPushes
from harness.live.driver.reconfiguration import LiveReconfiguration
from harness.live.driver.restore_points import RestorePoints
from harness.live.driver.standstill import Limits, Standstill
from harness.live.driver.status import JobStatus, setting_words
from harness.live.processes.names import EVALUATOR, node_of, peers
from harness.live.processes.runtime import Procedure, Processes, Runtime, starting_words
from harness.live.worker.spec import Spec
from simulators.engine.loop import Records
from tuners.actions import Evaluation, Setting, Status, SyncPolicy

__all__ = ["CHECKPOINT_SECONDS", "COPY_SECONDS", "FINISH_SECONDS", "LINKS_SECONDS", "SAY_SECONDS", "Control"]

CHECKPOINT_SECONDS = 30.0
"""From one checkpoint to the next."""

FINISH_SECONDS = 10.0
"""Longest wait for mini-batches that have begun, before the last checkpoint."""

LINKS_SECONDS = 0.5
"""From one look at the links to the next."""

SAY_SECONDS = 3.0
"""From one word on processes that start to the next."""

COPY_SECONDS = 10.0
"""Longest wait for a node with a slow link to copy the blocks that only it has."""

_TIMES = [Records._fields.index(f"{name}seconds") for name in ("", "compute_", "pull_", "push_", "wait_")]
_DECIMALS = 6
"""Of seconds: clocks of several processes agree on less, and what is beyond would be two thirds of the exchange log."""

_LOOK_SECONDS = 0.05
_BUSY_LOOK_SECONDS = 0.005  # while a procedure is in progress: its duration is measured
_LOSSES_SECONDS = 0.1


class Control:
    """A running job and the thread that watches it. Hold `news` to read or change its attributes."""

    def __init__(
        self,
        spec: Spec,
        processes: Processes,
        policy: SyncPolicy,
        begun: Checkpoint | None,
        keep: Callable[[Checkpoint], None],
        installed: Mapping[int, SyncPolicy],
        limits: Limits,
        say: Callable[[str], None],
        emulated: EmulatedNodes | None = None,
    ) -> None:
        """`emulated` is `processes`, where nodes come and go as the scenario says."""
        self.job, self.spec = spec.job, spec
        self.runtime = Runtime(processes, limits.join_seconds, spec.job.blocks)
        self.losses = Losses(self.runtime, tuple(n.name for n in self.job.nodes))
        self.branches = {0: DriverBranch(self.job.start, policy, 0.0)}
        self.running: int | None = 0  # the branch that trains
        self.reconfiguration: LiveReconfiguration | None = None
        self.procedure: Procedure | None = None  # the one in progress
        self.measured: dict[int, Evaluation] = {}  # requested evaluations, by number of the request
        self.events: list[tuple[float, str]] = []
        self.performed = 0  # actions, rejected ones included
        self.lost_pushes = 0
        self.recent = RecentPushes(self.job)
        # Reentrant: an action that holds it may call `job_status`, which takes it too.
        self.news = threading.Condition(threading.RLock())
        self._emulated, self._slowdown = emulated, dict.fromkeys((n.name for n in self.job.nodes), 1.0)
        self._trains = True  # until the last checkpoint
        self._restore_points = RestorePoints(self.runtime, spec, begun, keep)
        self._asked_seconds = self._metered_seconds = 0.0  # when losses, and transfers, were last asked for
        self._links = LinkMonitor()
        self._standstill = Standstill(limits.still_seconds)
        self._unsaved: OSError | None = None  # why the last checkpoint could not be written
        self._failure: Exception | None = None
        self._ended_seconds: float | None = None
        self._over = threading.Event()
        if begun is not None:
            self.performed = begun.state["exchanges"]
            self._standstill.excuse(begun.seconds)
            self.branches, self.running, self.runtime.rows_taken = driver_state(begun, installed)
            reduced = (branch.setting_before_loss is not None for branch in self.branches.values())
            self.losses.any_returned = any(reduced)  # all nodes are present again
        self._begin(begun, say)
        self._watcher = threading.Thread(target=self._watch, name="live job", daemon=True)
        self._watcher.start()

    def _begin(self, begun: Checkpoint | None, say: Callable[[str], None]) -> None:
        """Start the processes that the first setting needs, and training."""
        runtime, number = self.runtime, self._number
        setting = self.branches[number].setting
        names = [*peers(setting), EVALUATOR]
        runtime.start_first(names)
        self._restore_points.begin(self.branches)
        say("The coordinator is ready; the other processes are starting.")
        seen = runtime.poll()
        if begun is not None:
            # Rows from between the last report and the checkpoint: their times are of another coordinator's clock.
            for branch, report in seen.reports.items():
                rows = np.array(report.rows, np.float64)
                rows[:, 0] = begun.seconds
                self.branches[branch].add(rows)
        looked_seconds, said = time.monotonic(), (len(names), frozenset[str]())
        for _ in self._first_processes(setting):
            for name, why in runtime.processes.lost().items():
                raise RuntimeError(f"Cannot start {name}: {why}")
            time.sleep(_LOOK_SECONDS)
            runtime.poll()
            late = set(names) - runtime.latest.members.keys()
            if late and time.monotonic() > looked_seconds + SAY_SECONDS:
                looked_seconds, up = time.monotonic(), runtime.coordinator.starting()
                news = len(late), frozenset(late & up.keys())
                if news != said:  # each step once
                    said = news
                    say(f"{len(names) - len(late)} of {len(names)} processes are ready; {starting_words(late, up)}")
        say(f"{len(names)} of {len(names)} processes are ready; training begins.")
        runtime.begin_at(0.0 if begun is None else begun.seconds)
        runtime.coordinator.run(number)

    def _first_processes(self, setting: Setting) -> Procedure:
        yield from self.runtime.wait_joined([*peers(setting), EVALUATOR])
        yield from self.runtime.recover(setting)

    @property
    def now(self) -> float:
        """Seconds since the job began; constant once the job has ended."""
        return self.runtime.now if self._ended_seconds is None else self._ended_seconds

    @property
    def status(self) -> Status:
        """The target is reached once any branch has reached it; the job runs while any branch runs."""
        found = [branch.status for branch in self.branches.values()]
        if "target" in found:
            return "target"
        return "running" if "running" in found else found[-1]

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._watcher.join()

    def fail(self, error: Exception) -> None:
        """End the job: every action that waits, and every later one, raises RuntimeError with this cause."""
        self._failure = error
        self.news.notify_all()

    # ------------------------------------------------------------------------------------------------------------- waiting

    def wait(self, until: Callable[[], bool], latest_seconds: float = math.inf) -> None:
        """Wait until a condition holds, or until this time of the job. Raises RuntimeError if the job is broken."""
        left = latest_seconds - self.runtime.now
        timeout = None if math.isinf(left) else max(left, 0.0)
        self.news.wait_for(lambda: self._failure is not None or until(), timeout)
        if self._failure is not None:
            raise RuntimeError(f"The job is broken: {self._failure}") from self._failure

    def wait_until_idle(self) -> None:
        """Wait until no procedure is in progress."""
        self.wait(lambda: self.procedure is None)

    def carry_out(self, make: Callable[[], Procedure]) -> None:
        """Carry out the procedure that `make` returns; start it again whenever a loss interrupts it."""
        done: list[bool] = []

        def marked() -> Procedure:
            yield from make()
            done.append(True)

        while not done:
            self.wait_until_idle()
            mine = self.procedure = marked()
            self.wait(lambda mine=mine: self.procedure is not mine)  # type: ignore[misc]

    def checkpoint(self) -> None:
        """Stop training for good and make a last checkpoint. Raises OSError if it cannot be written.

        Mini-batches that have begun are completed first, so that the resumed job is as if it had not been interrupted. One
        that takes longer than `FINISH_SECONDS`, because its worker hangs, is begun again by the resumed job.
        """
        until = time.monotonic() + FINISH_SECONDS
        self.carry_out(lambda: self._finish(until))
        self._trains = False  # a repair after a loss must not start training again
        self.runtime.coordinator.rest()
        self.carry_out(self._save)
        if self._unsaved is not None:
            raise self._unsaved

    def save(self) -> None:
        """Make a checkpoint while training continues."""
        self.carry_out(self._save)

    def _finish(self, until: float) -> Procedure:
        while not self.runtime.coordinator.finish() and time.monotonic() < until:
            yield

    def _save(self) -> Procedure:
        while True:
            state = {"seconds": self.now, "exchanges": self.performed, "branch": self._number}
            with suppress(KeyError):  # the coordinator has died: try again with its successor
                try:
                    yield from self._restore_points.save(self.branches, self.running, state)
                    self._unsaved = None
                except OSError as error:  # a full disk: the job goes on, and the next checkpoint is tried when it is due
                    self._unsaved = error
                    self.log_event(f"the checkpoint is not written: {error.strerror or error}")
                return

    def _train(self) -> None:
        """Let the running branch train again."""
        if self._trains and self.running is not None:
            self.runtime.coordinator.run(self.running)

    @property
    def _number(self) -> int:
        """The running branch, or the first one if none is running."""
        return next(iter(self.branches)) if self.running is None else self.running

    def begin_reconfiguration(self, wanted: LiveReconfiguration) -> None:
        """Start to carry out a reconfiguration."""
        self.wait_until_idle()
        self.reconfiguration, self.procedure = wanted, wanted.procedure

    # ------------------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS if self.procedure is None else _BUSY_LOOK_SECONDS):
            with self.news:
                try:
                    self.update()
                except Exception as error:
                    self.fail(error)
                    self._over.set()
                self.news.notify_all()

    def update(self) -> None:
        """Read the coordinator's report, and do what it requires. The thread does this all the time.

        The order matters: rows come before losses, so that the cost of a reconfiguration that a loss ends knows all pushes;
        losses come before all that starts a procedure, because a loss replaces the procedure in progress.
        """
        report = self.runtime.poll()
        if report.lost_pushes > self.lost_pushes:
            self.log_event(f"{report.lost_pushes - self.lost_pushes} pushes are lost for good, and no longer count")
            self.lost_pushes = report.lost_pushes
        for number, news in report.reports.items():
            if number in self.branches:
                self._take(number, news.rows, news.evaluations)
        for number, branch in self.branches.items():
            branch.status = report.statuses.get(number, branch.status)
        if self.status != "running" and self._ended_seconds is None:
            self._ended_seconds = self.runtime.now
        self._emulate()
        if self.runtime.now > self._asked_seconds + _LOSSES_SECONDS:
            self._asked_seconds = self.runtime.now
            if lost := dict(self.runtime.processes.lost()):
                self._on_losses(lost)
        self.losses.start_missing()
        for node in self.losses.take_back():
            self.log_event(f"{node} is back")
        # With no running branch, a switch to another one is in progress, which gives it its processes itself.
        if self.losses.any_returned and self.procedure is None and self.running is not None:
            self.procedure = self.losses.restore(self.branches, self.running)
        self._look_at_links()
        self._look_at_progress()
        due = self.now > self._restore_points.seconds + CHECKPOINT_SECONDS
        if self.procedure is None and self.status == "running" and due:
            self.procedure = self._save()
        self._advance()

    def _emulate(self) -> None:
        """Let nodes come, go and slow down, where they are emulated."""
        if self._emulated is None:
            return
        for notice in self._emulated.act(self.runtime.now):
            self.losses.leaving.add(notice.node)
            self.losses.node_events.append(notice)
            self.log_event(f"{notice.node} will leave")
        if (slowdown := self._emulated.slowdown) != self._slowdown:
            self._slowdown = slowdown
            self.runtime.coordinator.slow(slowdown)

    def _take(self, number: int, rows: Any, evaluations: Any) -> None:
        branch = self.branches[number]
        rows = np.array(rows, np.float64)
        rows[:, 0] = self.runtime.job_seconds(rows[:, 0])
        rows[:, _TIMES] = np.round(rows[:, _TIMES], _DECIMALS)
        branch.add(rows)
        self.recent.add(rows)
        for seconds in rows[-1:, 0]:
            self._standstill.pushed(float(seconds))
        # Not only in `job_status`: without a viewer the rows of the whole job would be kept.
        self.recent.drop_old(self.now)
        if self.reconfiguration is not None:
            self.reconfiguration.pushed(rows[:, 0])
        for request, made in evaluations:
            seconds = self.runtime.job_seconds(made.seconds)
            evaluation = made._replace(seconds=seconds, clocks=made.clocks + branch.lost_pushes)
            branch.latest_evaluation = evaluation
            if request:
                self.measured[request] = evaluation
            else:
                branch.evaluations.append(evaluation)

    def _look_at_progress(self) -> None:
        """Say what holds training up if no push has come for too long. First the processes repeat what may be lost; then
        those that are waited for are replaced; then the job ends."""
        if self.procedure is not None or self.running is None or self.status != "running" or not self._trains:
            self._standstill.excuse(self.runtime.now)
            return
        if not (waited := self._standstill.too_long(self.runtime.now)):
            return
        causes = self.runtime.coordinator.held_up_by()
        why = "; ".join(f"{name} {what}" for name, what in causes.items()) or "no worker is in a mini-batch"
        self.log_event(f"no push for {waited:.0f} s: {why}")
        if self._standstill.found == 1:
            self.procedure = self._renew()
        elif self._standstill.found == 2 and causes:
            self.runtime.processes.stop(list(causes))
            self._on_losses(dict.fromkeys(causes, "training waited for it for too long"))
        else:
            raise RuntimeError(f"no push for {waited:.0f} s, and nothing helped: {why}")

    def _renew(self) -> Procedure:
        """Begin a view, in which every process sends again what is not durable."""
        yield from self.runtime.recover(self.branches[self._number].setting)

    def _look_at_links(self) -> None:
        seconds = self.runtime.now - self._metered_seconds
        if seconds < LINKS_SECONDS:
            return
        self._metered_seconds += seconds
        found = self.runtime.coordinator.transfers()
        if self.procedure is None and self.running is not None and self.status == "running":
            there = {n: g for n, g in self.runtime.latest.members.items() if n != EVALUATOR}
            self._links.add(self.branches[self.running].setting, there, seconds, found)
            if (slow := self._links.slow_link()) is not None:
                self.procedure = self._replace_slow(slow)

    def _replace_slow(self, slow: SlowLink) -> Procedure:
        """Move a node with a slow link to another machine. If none is free, continue without the node if it slows the others
        down more than it helps and its roles have other nodes; else keep it."""
        node, runtime, number = slow.node, self.runtime, self._number
        here = [name for name in runtime.latest.members if node_of(name) == node]
        layout = self.spec.layout
        megabytes = slow.blocks * layout.size / layout.count * self.branches[number].setting.transfer_bits / 8e6
        why = f"its link is slow: {megabytes / slow.seconds:.2g} MB/s where it was {megabytes / slow.before_seconds:.2g}"
        if layout.tables is not None:  # pushes have different numbers of rows
            why = f"its link is slow: a push takes {slow.seconds:.2g} s where it took {slow.before_seconds:.2g}"
        leaves = slow.hinders or runtime.processes.has_spare
        if leaves and len(here) > 1:
            # The node has a server and a worker: without a snapshot its worker's pushes could be lost with its server.
            runtime.coordinator.rest()
            index, until = runtime.coordinator.snapshot(), time.monotonic() + COPY_SECONDS
            while runtime.latest.durable < index and time.monotonic() < until:
                yield
        moved = leaves and runtime.processes.move_node(node)
        if not (moved or slow.hinders):
            self._links.tolerated.add(node)
            self.log_event(f"{node} stays on its machine, for no other is free: {why}")
            self._train()
            return
        if not moved:
            self.losses.excluded.add(node)
            runtime.processes.stop(here)
        self._record_losses(dict.fromkeys(here, why))
        yield from self._repair()

    def _record_losses(self, lost: dict[str, str]) -> None:
        self.losses.record(lost)
        for name, why in lost.items():
            self.log_event(f"{name} is lost: {why}")

    def _on_losses(self, lost: dict[str, str]) -> None:
        self._record_losses(lost)
        if set(lost) != {EVALUATOR}:
            self._end_reconfiguration()
            self.procedure = self._repair()

    def _repair(self) -> Procedure:
        """Continue on the surviving nodes; restore the last checkpoint if all copies of a block are lost."""
        number = self._number
        try:
            yield from self.losses.continue_without(self.branches, number)
        except ModelLost:
            seconds = self._restore_points.seconds
            self.log_event(f"servers are lost with all copies of their blocks: back to the checkpoint of {seconds:.1f} s")
            self._restore_points.roll_back(self.branches)
            yield from self.losses.continue_without(self.branches, number)
        self._train()

    def _advance(self) -> None:
        """Advance the procedure in progress by one step."""
        if self.reconfiguration is not None and self.branches[self.reconfiguration.branch].status != "running":
            self._end_reconfiguration()
            self.procedure = None
        if self.procedure is None:
            return
        try:
            next(self.procedure)
        except StopIteration:
            self.procedure = None
            self._end_reconfiguration()
        except ModelLost:  # the coordinator has died with the only copy
            self._end_reconfiguration()
            self.procedure = self._repair()

    def _end_reconfiguration(self) -> None:
        """End the reconfiguration in progress, if there is one; its cost goes to the tuner."""
        ended, self.reconfiguration = self.reconfiguration, None
        if ended is None:
            return
        branch = self.branches[ended.branch]
        if ended.done:
            branch.setting = ended.new
            if ended.policy is not None:
                branch.policy, branch.installed = ended.policy, None
        ended.ended_seconds = self.now
        cost = ended.cost()
        if not ended.waited:
            branch.changes.append(cost)
        outcome = f"{cost.seconds:.2f} s, stall {cost.stall_seconds:.2f} s" if cost.done else "given up"
        self.log_event(f"{ended.method} ({outcome}): {setting_words(ended.new)}")

    # ------------------------------------------------------------------------------------------------------------- status

    def log_event(self, what: str) -> None:
        """Add a sentence to the events of the job's status."""
        self.events.append((self.now, what))

    def job_status(self) -> JobStatus:
        """The status of the job now."""
        with self.news:
            branch, now = self.branches[self._number], self.now
            self.recent.drop_old(now)
            latest = branch.latest_evaluation
            return JobStatus(
                seconds=now,
                budget_seconds=self.job.budget_seconds,
                status=self.status,
                clocks=branch.clocks,
                clocks_per_second=self.recent.clocks_per_second,
                loss=self.recent.loss,
                accuracy=math.nan if latest is None else latest.accuracy,
                setting=branch.setting,
                nodes=self.recent.nodes(branch.setting, self.losses.away, self.runtime.latest.held_seconds),
                events=tuple(self.events),
            )
