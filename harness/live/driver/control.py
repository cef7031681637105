"""Who watches a live job: takes in what the coordinator says, carries changes on, acts on losses, and lets others wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from harness.live.coordinator.membership import ModelLost
from harness.live.deploy import progress_view
from harness.live.deploy.progress_view import Glimpse
from harness.live.driver.branch_view import Sight
from harness.live.driver.checkpoint_file import Checkpoint
from harness.live.driver.links import Links, Slow
from harness.live.driver.losses import Losses
from harness.live.driver.recent import Recent
from harness.live.driver.reconfiguration import Change
from harness.live.driver.restore_points import Keeping
from harness.live.processes.runtime import EVALUATOR, Procedure, Processes, Runtime, node_of, peers
from harness.live.worker.spec import Spec
from tuners.actions import Evaluation, Setting, Status, SyncPolicy

__all__ = ["Control"]

_LOOK_SECONDS = 0.05
_BUSY_LOOK_SECONDS = 0.005  # while something is being done, whose cost is measured
_LOSSES_SECONDS = 0.1
_LINKS_SECONDS = 0.5
_KEEP_SECONDS = 30.0
_COPY_SECONDS = 10.0  # that a node with a slow link has, to give away what only it has
_FINISH_SECONDS = 10.0  # that mini-batches under way have before a checkpoint, to be completed


class Control:
    """A job under way, and the thread that watches it. What it has may be read and changed with `news` held."""

    def __init__(
        self,
        spec: Spec,
        processes: Processes,
        policy: SyncPolicy,
        begun: Checkpoint | None,
        keep: Callable[[Checkpoint], None],
    ) -> None:
        self.job, self.spec = spec.job, spec
        self.runtime = Runtime(processes)
        self.losses = Losses(self.runtime, tuple(n.name for n in self.job.nodes))
        self.sights = {0: Sight(self.job.start, policy, 0.0)}
        self.running: int | None = 0  # the branch that trains
        self._trains = True  # until all is kept for good
        self.change: Change | None = None
        self.measured: dict[int, Evaluation] = {}  # that somebody asked for, by number of the request
        self.happenings: list[tuple[float, str]] = []
        self.performed = 0  # actions, those that were refused among them
        self.news = threading.Condition(threading.RLock())
        self._work: Procedure | None = None  # what is being done to the job: a change, or what a loss makes necessary
        self._recent = Recent(self.job)
        self._keeping = Keeping(self.runtime, spec, begun, keep)
        self._lost_pushes = 0
        self._asked_seconds = self._metered_seconds = 0.0  # when one asked for losses, and for transfers, last
        self._links = Links()
        self._failure: Exception | None = None
        self._ended_seconds: float | None = None
        self._over = threading.Event()
        if begun is not None:
            self.performed = begun.state["exchanges"]
            self.sights, self.running, self.runtime.taken = self._keeping.driver(begun)
            self.losses.somebody_is_back = any(sight.before is not None for sight in self.sights.values())
        self._begin(begun)
        self._watcher = threading.Thread(target=self._watch, name="live job", daemon=True)
        self._watcher.start()

    def _begin(self, begun: Checkpoint | None) -> None:
        """Bring the processes up that the first setting needs, and let them train."""
        runtime, number = self.runtime, self._number
        setting = self.sights[number].setting
        self._keeping.begin(self.sights)
        seen = runtime.look()
        if begun is not None:  # what came between the last look and the checkpoint, on another coordinator's clock
            for branch, report in seen.reports.items():
                rows = np.array(report.rows, np.float64)
                rows[:, 0] = float(begun.state["seconds"])
                self.sights[branch].take(rows)
        runtime.start([*peers(setting), EVALUATOR])
        for _ in self._brought_up(setting):
            for name, why in runtime.processes.lost().items():
                raise RuntimeError(f"Cannot start {name}: {why}")
            time.sleep(_LOOK_SECONDS)
            runtime.look()
        runtime.begin_at(0.0 if begun is None else float(begun.state["seconds"]))
        runtime.call("run", number)

    def _brought_up(self, setting: Setting) -> Procedure:
        yield from self.runtime.joined([*peers(setting), EVALUATOR])
        yield from self.runtime.recover(setting)

    @property
    def now(self) -> float:
        """Seconds since the job began; it stands still once the job has ended."""
        return self.runtime.now if self._ended_seconds is None else self._ended_seconds

    @property
    def status(self) -> Status:
        """Done when any branch is; lost when every branch is."""
        found = [sight.status for sight in self.sights.values()]
        if "target" in found:
            return "target"
        return "running" if "running" in found else found[-1]

    def close(self) -> None:
        """End the watching."""
        self._over.set()
        self._watcher.join()

    # ------------------------------------------------------------------------------------------------------------- waiting

    def wait(self, until: Callable[[], bool], latest_seconds: float = math.inf) -> None:
        """Until something is so, or so many seconds since the job began. Raises RuntimeError where the job is broken."""
        left = latest_seconds - self.runtime.now
        timeout = None if math.isinf(left) else max(left, 0.0)
        self.news.wait_for(lambda: self._failure is not None or until(), timeout)
        if self._failure is not None:
            raise RuntimeError(f"The job is broken: {self._failure}") from self._failure

    def wait_for_hands(self) -> None:
        """Until nothing is being done to the job."""
        self.wait(lambda: self._work is None)

    def do(self, make: Callable[[], Procedure]) -> None:
        """Carry a procedure out; from the beginning again where a loss comes in between."""
        done: list[bool] = []

        def mine() -> Procedure:
            yield from make()
            done.append(True)

        while not done:
            self.wait_for_hands()
            work = self._work = mine()
            self.wait(lambda work=work: self._work is not work)  # type: ignore[misc]

    def checkpoint(self) -> None:
        """Have everything kept that the job can go on from; nobody trains from now on.

        Mini-batches under way are completed first, so that the job goes on as if it had not been interrupted. One that takes
        too long, because its worker hangs, is begun again.
        """
        until = time.monotonic() + _FINISH_SECONDS
        self.do(lambda: self._finished(until))
        self._trains = False
        self.runtime.call("rest")
        self.do(self._saved)

    def _finished(self, until: float) -> Procedure:
        while not self.runtime.call("finish") and time.monotonic() < until:
            yield

    def _saved(self) -> Procedure:
        """Have the job kept as it is; nobody is held up."""
        while True:
            state = {"seconds": self.now, "exchanges": self.performed, "branch": self._number}
            with suppress(KeyError):  # its coordinator has died
                yield from self._keeping.keep(self.sights, self.running, state)
                return

    def _train(self) -> None:
        """Let the branch go on that trains."""
        if self._trains and self.running is not None:
            self.runtime.call("run", self.running)

    @property
    def _number(self) -> int:
        """The branch that trains, or would."""
        return next(iter(self.sights)) if self.running is None else self.running

    def begin(self, change: Change) -> None:
        """Carry a change out."""
        self.wait_for_hands()
        self.change, self._work = change, change.procedure

    # ------------------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS if self._work is None else _BUSY_LOOK_SECONDS):
            with self.news:
                try:
                    self._look()
                except Exception as error:
                    self._failure = error
                    self._over.set()
                self.news.notify_all()

    def _look(self) -> None:
        seen = self.runtime.look()
        if seen.lost_pushes > self._lost_pushes:
            self.happened(f"{seen.lost_pushes - self._lost_pushes} pushes are lost for good, and no longer count")
            self._lost_pushes = seen.lost_pushes
        for number, report in seen.reports.items():
            if number in self.sights:
                self._take(number, report.rows, report.evaluations)
        for number, sight in self.sights.items():
            sight.status = seen.statuses.get(number, sight.status)
        if self.status != "running" and self._ended_seconds is None:
            self._ended_seconds = self.runtime.now
        if self.runtime.now > self._asked_seconds + _LOSSES_SECONDS:
            self._asked_seconds = self.runtime.now
            if lost := dict(self.runtime.processes.lost()):
                self._lose(lost)
        self.losses.start_missing()
        for node in self.losses.welcome():
            self.happened(f"{node} is back")
        if self.losses.somebody_is_back and self._work is None:
            self._work = self.losses.restore(self.sights, self.running)
        self._look_at_links()
        if self._work is None and self.status == "running" and self.now > self._keeping.seconds + _KEEP_SECONDS:
            self._work = self._saved()
        self._go_on()

    def _take(self, number: int, rows: Any, evaluations: Any) -> None:
        sight = self.sights[number]
        rows = np.array(rows, np.float64)
        rows[:, 0] = self.runtime.job_seconds(rows[:, 0])
        sight.take(rows)
        self._recent.take(rows)
        self._recent.forget(self.now)
        if self.change is not None:
            self.change.pushed(rows[:, 0])
        for request, made in evaluations:
            told = made._replace(seconds=self.runtime.job_seconds(made.seconds), clocks=made.clocks + sight.lost)
            sight.latest = told
            if request:
                self.measured[request] = told
            else:
                sight.evaluations.append(told)

    def _look_at_links(self) -> None:
        seconds = self.runtime.now - self._metered_seconds
        if seconds < _LINKS_SECONDS:
            return
        self._metered_seconds += seconds
        found = self.runtime.call("transfers")
        if self._work is None and self.running is not None and self.status == "running":
            there = {n: g for n, g in self.runtime.seen.members.items() if n != EVALUATOR}
            self._links.see(self.sights[self.running].setting, there, seconds, found)
            if (slow := self._links.slow()) is not None:
                self._work = self._relieved(slow)

    def _relieved(self, slow: Slow) -> Procedure:
        """A node with a slow link goes to another place. Where there is none the job goes on without it if it hinders the
        others more than it helps them and they can do without, else with it as it is."""
        node, runtime, number = slow.node, self.runtime, self._number
        here = [name for name in runtime.seen.members if node_of(name) == node]
        layout = self.spec.layout
        megabytes = slow.blocks * layout.size / layout.count * self.sights[number].setting.transfer_bits / 8e6
        why = f"its link is slow: {megabytes / slow.seconds:.2g} MB/s where it was {megabytes / slow.before_seconds:.2g}"
        goes = slow.hinders or runtime.processes.spare
        if goes and len(here) > 1:  # what its worker has pushed must not be lost with its server
            runtime.call("rest")
            index, until = runtime.call("snapshot"), time.monotonic() + _COPY_SECONDS
            while runtime.seen.durable < index and time.monotonic() < until:
                yield
        moved = goes and runtime.processes.elsewhere(node)
        if not (moved or slow.hinders):
            self._links.borne.add(node)
            self.happened(f"{node} stays, for there is no other place: {why}")
            self._train()
            return
        if not moved:
            self.losses.shunned.add(node)
            runtime.processes.stop(here)
        self._tell(dict.fromkeys(here, why))
        yield from self._bridged()

    def _tell(self, lost: dict[str, str]) -> None:
        self.losses.tell(lost)
        for name, why in lost.items():
            self.happened(f"{name} is lost: {why}")

    def _lose(self, lost: dict[str, str]) -> None:
        self._tell(lost)
        if set(lost) != {EVALUATOR}:
            self._end_change()
            self._work = self._bridged()

    def _bridged(self) -> Procedure:
        """The job on those who are left, from its last checkpoint if servers have died with all the copies there were."""
        number = self._number
        try:
            yield from self.losses.bridge(self.sights, number)
        except ModelLost:
            self.happened(f"servers are lost with all their copies: back to what there was at {self._keeping.seconds:.1f} s")
            self._keeping.go_back(self.sights)
            yield from self.losses.bridge(self.sights, number)
        self._train()

    def _go_on(self) -> None:
        if self.change is not None and self.sights[self.change.branch].status != "running":
            self._end_change()
            self._work = None
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration:
            self._work = None
            self._end_change()
        except ModelLost:  # with a coordinator that had the only copy
            self._end_change()
            self._work = self._bridged()

    def _end_change(self) -> None:
        change, self.change = self.change, None
        if change is None:
            return
        sight = self.sights[change.branch]
        if change.done:
            sight.setting, sight.policy = change.new, change.policy or sight.policy
        change.ended_seconds = self.now
        cost = change.cost()
        if not change.waited:
            sight.changes.append(cost)
        said = f"{cost.seconds:.2f} s, stall {cost.stall_seconds:.2f} s" if cost.done else "given up"
        self.happened(f"{change.method} ({said}): {progress_view.setting_words(change.new)}")

    # ------------------------------------------------------------------------------------------------- for those who watch

    def happened(self, what: str) -> None:
        """Something that whoever watches should know."""
        self.happenings.append((self.now, what))

    def glimpse(self) -> Glimpse:
        """The job just now."""
        with self.news:
            sight, now = self.sights[self._number], self.now
            self._recent.forget(now)
            return Glimpse(
                seconds=now,
                budget_seconds=self.job.budget_seconds,
                status=self.status,
                clocks=sight.clocks,
                clocks_per_second=self._recent.clocks_per_second,
                loss=self._recent.loss,
                accuracy=math.nan if sight.latest is None else sight.latest.accuracy,
                setting=sight.setting,
                nodes=self._recent.nodes(sight.setting, self.losses.away),
                happenings=tuple(self.happenings),
            )
