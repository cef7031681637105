"""Who watches a live job: takes in what the coordinator says, carries changes on, acts on losses, and lets others wait."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from harness.live import view
from harness.live.change import Change
from harness.live.checkpoint import Checkpoint
from harness.live.losses import Losses
from harness.live.runtime import EVALUATOR, Procedure, Processes, Runtime, peers
from harness.live.sight import Sight
from harness.live.spec import Spec
from harness.live.view import Glimpse, NodeGlimpse
from simulators.engine import Records
from tuners.actions import Evaluation, Setting, Status, SyncPolicy

__all__ = ["Control"]

_LOOK_SECONDS = 0.05
_BUSY_LOOK_SECONDS = 0.005  # while something is being done, whose cost is measured
_LOSSES_SECONDS = 0.1
_KEEP_SECONDS = 30.0
_FINISH_SECONDS = 10.0  # that mini-batches under way have before a checkpoint, to be completed
_COORDINATOR, _DRIVER = "coordinator", "driver"  # tensors of a checkpoint: what each of them knows, pickled
_RECENT_SECONDS = 3.0


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
        self.change: Change | None = None
        self.measured: dict[int, Evaluation] = {}  # that somebody asked for, by number of the request
        self.happenings: list[tuple[float, str]] = []
        self.performed = 0  # actions, those that were refused among them
        self.news = threading.Condition(threading.RLock())
        self._work: Procedure | None = None  # what is being done to the job: a change, or what a loss makes necessary
        self._recent: deque[Any] = deque()  # rows of the last seconds, for whoever watches
        self._keep, self._kept_seconds = keep, 0.0
        self._lost_pushes = 0
        self._asked_seconds = 0.0  # when one asked for losses last
        self._failure: Exception | None = None
        self._ended_seconds: float | None = None
        self._over = threading.Event()
        if begun is not None:
            self.performed = begun.state["exchanges"]
            self._kept_seconds = float(begun.state["seconds"])
            kept = pickle.loads(begun.tensors[_DRIVER].tobytes())  # noqa: S301 - the job's own checkpoint
            self.sights, self.running, self.runtime.taken = kept
        self._begin(begun)
        self._watcher = threading.Thread(target=self._watch, name="live job", daemon=True)
        self._watcher.start()

    def _begin(self, begun: Checkpoint | None) -> None:
        """Bring the processes up that the first setting needs, and let them train."""
        runtime, number = self.runtime, self._number
        setting = self.sights[number].setting
        if begun is None:
            runtime.call("begin", setting, self.sights[number].policy, self.spec.parameters)
        else:
            runtime.call("begin_from", begun.tensors[_COORDINATOR].tobytes(), _vectors(begun))
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
        self.runtime.call("rest")
        self.do(self._saved)

    def _finished(self, until: float) -> Procedure:
        while not self.runtime.call("finish") and time.monotonic() < until:
            yield

    def _saved(self) -> Procedure:
        """Have the job kept as it is; training goes on. What goes on from there is exact where nobody was in a mini-batch;
        for those who were, `Coordinator.begin_from` says what holds. Nothing is lost or counted twice."""
        while True:
            try:
                yield from self._saved_at_once()
            except KeyError:  # its coordinator has died, and the next one knows nothing of that snapshot
                continue
            return

    def _saved_at_once(self) -> Procedure:
        runtime = self.runtime
        index: int = runtime.call("snapshot", save=True)
        driver = _as_tensor(cloudpickle.dumps((self.sights, self.running, self.runtime.taken)))
        state = {"seconds": self.now, "exchanges": self.performed, "branch": self._number}
        yield from runtime.durable(index)
        tensors = {_COORDINATOR: _as_tensor(runtime.call("checkpoint", index)), _DRIVER: driver}
        for number, vectors in runtime.call("saved", index).items():
            tensors |= {f"{number}/{name}": vector for name, vector in vectors.items()}
        self._keep(Checkpoint(tensors, state))
        self._kept_seconds = self.now

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
        if self._work is None and self.status == "running" and self.now > self._kept_seconds + _KEEP_SECONDS:
            self._work = self._saved()
        self._go_on()

    def _take(self, number: int, rows: Any, evaluations: Any) -> None:
        sight = self.sights[number]
        rows = np.array(rows, np.float64)
        rows[:, 0] = self.runtime.job_seconds(rows[:, 0])
        sight.take(rows)
        self._recent.append(rows)
        if self.change is not None:
            self.change.pushed(rows[:, 0])
        for request, made in evaluations:
            told = made._replace(seconds=self.runtime.job_seconds(made.seconds))
            sight.latest = told
            if request:
                self.measured[request] = told
            else:
                sight.evaluations.append(told)

    def _lose(self, lost: dict[str, str]) -> None:
        self.losses.tell(lost)
        for name, why in lost.items():
            self.happened(f"{name} is lost: {why}")
        if set(lost) != {EVALUATOR}:
            self._end_change()
            self._work = self.losses.bridge(self.sights, self.running)

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
        self.happened(f"{change.method} ({said}): {view.setting_words(change.new)}")

    # ------------------------------------------------------------------------------------------------- for those who watch

    def happened(self, what: str) -> None:
        """Something that whoever watches should know."""
        self.happenings.append((self.now, what))

    def glimpse(self) -> Glimpse:
        """The job just now."""
        with self.news:
            sight, now = self.sights[self._number], self.now
            while self._recent and (not len(self._recent[0]) or self._recent[0][-1, 0] < now - _RECENT_SECONDS):
                self._recent.popleft()
            rows = Records(*np.concatenate([np.zeros((0, 11)), *self._recent]).T)
            seconds = min(_RECENT_SECONDS, max(now, 1e-9))
            return Glimpse(
                seconds=now,
                budget_seconds=self.job.budget_seconds,
                status=self.status,
                clocks=sight.clocks,
                clocks_per_second=len(rows.seconds) / seconds,
                loss=float(np.mean(rows.loss)) if len(rows.loss) else math.nan,
                accuracy=math.nan if sight.latest is None else sight.latest.accuracy,
                setting=sight.setting,
                nodes=tuple(self._node(i, sight.setting, rows, seconds) for i in range(len(self.job.nodes))),
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


def _as_tensor(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def _vectors(begun: Checkpoint) -> dict[int, dict[str, Any]]:
    """The servers' vectors, by branch and name."""
    made: dict[int, dict[str, Any]] = {}
    for name, tensor in begun.tensors.items():
        number, _, vector = name.partition("/")
        if vector:
            made.setdefault(int(number), {})[vector] = tensor
    return made
