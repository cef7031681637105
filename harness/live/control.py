"""Who watches a live job: takes in what the coordinator says, carries changes on, acts on losses, and lets others wait."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.live import view
from harness.live.change import Change
from harness.live.line import Line
from harness.live.losses import Losses
from harness.live.runtime import EVALUATOR, Procedure, Processes, Runtime, peers
from harness.live.spec import Spec
from harness.live.view import Glimpse, NodeGlimpse
from simulators.engine import Records
from tuners.actions import Evaluation, Setting, Status, SyncPolicy

__all__ = ["Control"]

_LOOK_SECONDS = 0.02
_RECENT_SECONDS = 3.0


class Control:
    """A job under way, and the thread that watches it. What it has may be read and changed with `news` held."""

    def __init__(self, spec: Spec, processes: Processes, policy: SyncPolicy) -> None:
        self.job, self.spec = spec.job, spec
        self.runtime = Runtime(processes)
        self.losses = Losses(self.runtime, tuple(n.name for n in self.job.nodes))
        self.lines = {0: Line(self.job.start, policy, 0.0)}
        self.running: int | None = 0  # the branch that trains
        self.change: Change | None = None
        self.measured: dict[int, Evaluation] = {}  # that somebody asked for, by number of the request
        self.happenings: list[tuple[float, str]] = []
        self.news = threading.Condition(threading.RLock())
        self._work: Procedure | None = None  # what is being done to the job: a change, or what a loss makes necessary
        self._recent: deque[Any] = deque()  # rows of the last seconds, for whoever watches
        self._failure: Exception | None = None
        self._ended_seconds: float | None = None
        self._over = threading.Event()
        self._begin(self.job.start, policy)
        self._watcher = threading.Thread(target=self._watch, name="live job", daemon=True)
        self._watcher.start()

    def _begin(self, start: Setting, policy: SyncPolicy) -> None:
        runtime, wanted = self.runtime, [*peers(self.job.start), EVALUATOR]
        runtime.call("begin", start, policy, self.spec.parameters)
        runtime.look()
        runtime.start(wanted)
        runtime.placed = (start.servers, start.shares()[1])
        for _ in runtime.joined(wanted):
            for name, why in runtime.processes.lost().items():
                raise RuntimeError(f"Cannot start {name}: {why}")
            time.sleep(_LOOK_SECONDS)
            runtime.look()
        runtime.call("run", 0)
        runtime.begin_at(0.0)

    @property
    def now(self) -> float:
        """Seconds since the job began; it stands still once the job has ended."""
        return self.runtime.now if self._ended_seconds is None else self._ended_seconds

    @property
    def status(self) -> Status:
        """Done when any branch is; lost when every branch is."""
        found = [line.status for line in self.lines.values()]
        if "target" in found:
            return "target"
        return "running" if "running" in found else found[-1]

    def close(self) -> None:
        """End the watching, and all processes."""
        self._over.set()
        self._watcher.join()
        self.runtime.processes.close()

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

    def begin(self, change: Change) -> None:
        """Carry a change out."""
        self.wait_for_hands()
        self.change, self._work = change, change.procedure

    # ------------------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            with self.news:
                try:
                    self._look()
                except Exception as error:
                    self._failure = error
                    self._over.set()
                self.news.notify_all()

    def _look(self) -> None:
        seen = self.runtime.look()
        for number, report in seen.reports.items():
            if number in self.lines:
                self._take(number, report.rows, report.evaluations)
        for number, line in self.lines.items():
            line.status = seen.statuses.get(number, line.status)
        if self.status != "running" and self._ended_seconds is None:
            self._ended_seconds = self.runtime.now
        if lost := dict(self.runtime.processes.lost()):
            self._lose(lost)
        self.losses.start_missing()
        if (back := self.losses.welcome()) and self._work is None:
            self._work = self.losses.restore(self.lines, self.running)
        for node in back:
            self.happened(f"{node} is back")
        self._go_on()

    def _take(self, number: int, rows: Any, evaluations: Any) -> None:
        line = self.lines[number]
        rows = np.array(rows, np.float64)
        rows[:, 0] = self.runtime.job_seconds(rows[:, 0])
        line.take(rows)
        self._recent.append(rows)
        if self.change is not None:
            self.change.pushed(rows[:, 0])
        for request, made in evaluations:
            told = made._replace(seconds=self.runtime.job_seconds(made.seconds))
            line.latest = told
            if request:
                self.measured[request] = told
            else:
                line.evaluations.append(told)

    def _lose(self, lost: dict[str, str]) -> None:
        self.losses.tell(lost)
        for name, why in lost.items():
            self.happened(f"{name} is lost: {why}")
        if set(lost) != {EVALUATOR}:
            self._end_change()
            self._work = self.losses.bridge(self.lines, self.running)

    def _go_on(self) -> None:
        if self.change is not None and self.lines[self.change.branch].status != "running":
            self._end_change()
            self._work = None
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration:
            self._work = None
            self._end_change()

    def _end_change(self) -> None:
        change, self.change = self.change, None
        if change is None:
            return
        line = self.lines[change.branch]
        if change.done:
            line.setting, line.policy = change.new, change.policy or line.policy
        change.ended_seconds = self.now
        cost = change.cost()
        if not change.waited:
            line.changes.append(cost)
        said = f"{cost.seconds:.2f} s, nobody trained for {cost.stall_seconds:.2f} s" if cost.done else "given up"
        self.happened(f"{change.method}: {view.setting_words(change.new)} ({said})")

    # ------------------------------------------------------------------------------------------------- for those who watch

    def happened(self, what: str) -> None:
        """Something that whoever watches should know."""
        self.happenings.append((self.now, what))

    def glimpse(self) -> Glimpse:
        """The job just now."""
        with self.news:
            number = next(iter(self.lines)) if self.running is None else self.running
            line, now = self.lines[number], self.now
            while self._recent and (not len(self._recent[0]) or self._recent[0][-1, 0] < now - _RECENT_SECONDS):
                self._recent.popleft()
            rows = Records(*np.concatenate([np.zeros((0, 11)), *self._recent]).T)
            seconds = min(_RECENT_SECONDS, max(now, 1e-9))
            return Glimpse(
                seconds=now,
                budget_seconds=self.job.budget_seconds,
                status=self.status,
                clocks=line.clocks,
                clocks_per_second=len(rows.seconds) / seconds,
                loss=float(np.mean(rows.loss)) if len(rows.loss) else math.nan,
                accuracy=math.nan if line.latest is None else line.latest.accuracy,
                setting=line.setting,
                nodes=tuple(self._node(i, line.setting, rows, seconds) for i in range(len(self.job.nodes))),
                happenings=tuple(self.happenings),
            )

    def _node(self, index: int, setting: Setting, rows: Records, seconds: float) -> NodeGlimpse:
        name = self.job.nodes[index].name
        works, serves = name in setting.workers, name in setting.servers
        role = "both" if works and serves else "worker" if works else "server" if serves else "idle"
        mine = rows.worker == index
        return NodeGlimpse(
            name,
            "lost" if name in self.losses.away else role,
            float(mine.sum()) / seconds,
            min(float(rows.compute_seconds[mine].sum()) / seconds, 1.0),
            min(float((rows.pull_seconds + rows.push_seconds)[mine].sum()) / seconds, 1.0),
            min(float(rows.wait_seconds[mine].sum()) / seconds, 1.0),
        )
