"""The thread that watches a live job: reads the coordinator's reports, advances procedures, repairs losses, wakes waiters.

At most one procedure is in progress: a reconfiguration, or what a loss, a slow link, a returning node or a checkpoint
requires. It is a generator, and advances one step after each report. A loss replaces it by the repair, whatever it was.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from harness.live.coordinator.membership.views import ModelLost
from harness.live.driver.checkpoints.checkpoint_file import Checkpoint
from harness.live.driver.checkpoints.driver_state import driver_state
from harness.live.driver.checkpoints.job_saver import JobSaver
from harness.live.driver.checkpoints.restore_points import RestorePoints
from harness.live.driver.reconfiguration import LiveReconfiguration
from harness.live.driver.repairs.emulated_nodes import EmulatedNodes
from harness.live.driver.repairs.job_repairs import JobRepairs
from harness.live.driver.repairs.losses import TooFewNodes
from harness.live.driver.repairs.standstill import Limits
from harness.live.driver.starting import start
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.driver.view.job_view import JobView
from harness.live.driver.view.status import setting_words
from harness.live.processes.runtime import Procedure, Processes, Runtime
from harness.live.protocol.names import EVALUATOR, peers
from harness.live.worker.spec import Spec
from tuners.actions import Setting, SyncPolicy

__all__ = ["FINISH_SECONDS", "REPAIR_SECONDS", "Control"]

FINISH_SECONDS = 10.0
"""Longest wait for mini-batches that have begun, before the last checkpoint."""

REPAIR_SECONDS = 30.0
"""Longest wait for the repair of a loss, before the last checkpoint: it may need nodes that never come back."""

_LOOK_SECONDS = 0.05
_BUSY_LOOK_SECONDS = 0.005  # while a procedure is in progress: its duration is measured


class Control:
    """A running job and the thread that watches it. Hold `news` to read or change its attributes, and those of `view`."""

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
        self.runtime = Runtime(processes, limits.join_seconds, spec.job.blocks)
        self.view = JobView(spec.job, self.runtime, {0: DriverBranch(spec.job.start, policy, 0.0)}, 0)
        processes.tell(self.view.log_event)
        self.reconfiguration: LiveReconfiguration | None = None
        self.procedure: Procedure | None = None  # the one in progress
        # Reentrant: an action that holds it may ask for the status of the job, which takes it too.
        self.news = threading.Condition(threading.RLock())
        restore_points = RestorePoints(self.runtime, spec, begun, keep)
        self._repairs = JobRepairs(self.runtime, self.view, spec, restore_points, limits.still_seconds, emulated)
        self.losses = self._repairs.losses
        self._saver = JobSaver(self.runtime, self.view, restore_points, lambda: self.losses.told)
        self._blocks = spec.layout.count
        self._failure: Exception | None = None
        self._over = threading.Event()
        if begun is not None:
            self.view.performed = begun.state["exchanges"]
            self._repairs.standstill.excuse(begun.seconds)
            self.view.branches, self.view.running, self.runtime.rows_taken, told = driver_state(begun, installed)
            self.losses.resume(told, begun.seconds)
            reduced = (branch.setting_before_loss is not None for branch in self.view.branches.values())
            self.losses.any_returned = any(reduced)  # all nodes are present again
        start(self.runtime, self.view, restore_points, begun, say)
        self._watcher = threading.Thread(target=self._watch, name="live job", daemon=True)
        self._watcher.start()

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

    @property
    def is_over(self) -> bool:
        """Whether the job has ended: by its target, by its budget, or otherwise."""
        return self.view.status != "running" or self.view.now >= self.view.budget_seconds

    def wait_for_last_costs(self) -> None:
        """Once the job is over, or will be with the next report: wait until its branches know what a change, or a recovery,
        that is cut short has cost."""
        self.wait(lambda: self.reconfiguration is None and self._repairs.recovery is None)

    def wait_until_idle(self, latest_seconds: float = math.inf) -> bool:
        """Wait until no procedure is in progress, at most until this time of the job. Returns whether none is."""
        self.wait(lambda: self.procedure is None, latest_seconds)
        return self.procedure is None

    def carry_out(self, make: Callable[[], Procedure], latest_seconds: float = math.inf) -> bool:
        """Carry out the procedure that `make` returns; start it again whenever a loss interrupts it. Returns False if the
        repair of a loss, which may wait for nodes, is still in progress at this time of the job."""
        done: list[bool] = []

        def marked() -> Procedure:
            yield from make()
            done.append(True)

        while not done:
            if not self.wait_until_idle(latest_seconds):
                return False
            mine = self.procedure = marked()
            self.wait(lambda mine=mine: self.procedure is not mine)  # type: ignore[misc]
        return True

    def checkpoint(self) -> None:
        """Stop training for good and make a last checkpoint. Raises OSError if it cannot be written, and RuntimeError if too
        few nodes are left for it, or the repair of a loss takes too long.

        Mini-batches that have begun are completed first, so that the resumed job is as if it had not been interrupted. One
        that takes longer than `FINISH_SECONDS`, because its worker hangs, is begun again by the resumed job.
        """
        if self.view.lacks_nodes:
            raise RuntimeError(self.view.lacks_nodes)
        until, latest_seconds = time.monotonic() + FINISH_SECONDS, self.runtime.now + REPAIR_SECONDS
        done = self.carry_out(lambda: self._saver.finish(until), latest_seconds)
        self._repairs.trains = False  # a repair after a loss must not start training again
        self.runtime.coordinator.rest()
        if not (done and self.carry_out(self._saver.save, latest_seconds)):
            raise RuntimeError(f"The job still waits for nodes or processes that it has lost, {REPAIR_SECONDS:g} s later.")
        if self._saver.unsaved is not None:
            raise self._saver.unsaved

    def save(self) -> None:
        """Make a checkpoint while training continues."""
        self.carry_out(self._saver.save)

    def begin_reconfiguration(self, wanted: LiveReconfiguration) -> None:
        """Start to carry out a reconfiguration."""
        self.wait_until_idle()
        self.reconfiguration, self.procedure = wanted, wanted.procedure

    # ------------------------------------------------------------------------------------------------ the branch that trains

    def switch_to(self, number: int) -> None:
        """Train that branch only, with the processes and the blocks of the model where its setting has them."""
        branch, coordinator = self.view.branches[number], self.runtime.coordinator
        if number == self.view.running or branch.status != "running":
            return
        coordinator.rest()
        self.view.running = None
        prepared: Setting | None = None
        while prepared != branch.setting:  # a loss, or a node that returns, may change it meanwhile
            prepared = branch.setting
            budget = self.view.budget_seconds
            if not (self.carry_out(partial(self._prepare, prepared), budget) and self.wait_until_idle(budget)):
                return  # the job is over
        coordinator.put(number, branch.setting)  # losses may have reduced it since the branch last ran
        coordinator.run(number)
        self.view.running, branch.since_seconds = number, self.view.now

    def _prepare(self, setting: Setting) -> Procedure:
        runtime = self.runtime
        runtime.start(peers(setting))
        yield from runtime.wait_joined(peers(setting))
        if runtime.placed != runtime.placement(setting):
            yield from runtime.place(setting, at_once=self._blocks)
            yield from runtime.wait_placed()

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
        repairs = self._repairs
        moments = self.view.take(self.runtime.poll())
        repairs.pushed(moments)
        if self.reconfiguration is not None:
            self.reconfiguration.meter.pushed(moments)
        repairs.emulate()
        if lost := repairs.find_lost():
            repairs.record(lost)
            if set(lost) != {EVALUATOR}:
                self._end_reconfiguration()
                self.procedure = repairs.repair()
        for look in (repairs.returned, repairs.slow_link, repairs.standing_still, self._saver.regular):
            found = look(idle=self.procedure is None)
            self.procedure = self.procedure or found
        self._advance()

    def _advance(self) -> None:
        """Advance the procedure in progress by one step."""
        changed = self.reconfiguration
        if changed is not None and (self.is_over or self.view.branches[changed.branch].status != "running"):
            self._end_reconfiguration()
            # One that has ended the old processes leaves no server: then the last checkpoint needs new ones.
            self.procedure = self._repairs.repair() if self.runtime.latest.recovering else None
        if self.is_over:
            self._repairs.end_recovery()
        if self.procedure is None:
            return
        try:
            next(self.procedure)
        except StopIteration:
            self.procedure = None
            self._end_reconfiguration()
        except ModelLost:  # the coordinator has died with the only copy
            self._end_reconfiguration()
            self._repairs.begin_recovery()
            self.procedure = self._repairs.repair()
        except TooFewNodes as error:
            self.procedure = None
            self.view.end_without_nodes(str(error))  # the next report says so of all branches

    def _end_reconfiguration(self) -> None:
        """End the reconfiguration in progress, if there is one; its cost goes to the tuner."""
        ended, self.reconfiguration = self.reconfiguration, None
        if ended is None:
            return
        branch = self.view.branches[ended.branch]
        if ended.meter.done:
            branch.setting = ended.new
            if ended.policy is not None:
                branch.policy, branch.installed = ended.policy, None
        ended.ended_seconds = self.view.now
        cost = ended.cost()
        if not ended.waited:
            branch.changes.append(cost)
        outcome = f"{cost.seconds:.2f} s, stall {cost.stall_seconds:.2f} s" if cost.done else "given up"
        self.view.log_event(f"{ended.method} ({outcome}): {setting_words(ended.new)}")
