"""The running job as `tuners.joint` sees it: it trains window by window, and tells what that has brought."""

from __future__ import annotations

import math
from contextlib import suppress

from tuners.actions import Evaluate, Job, Rejected, Run, Setting, Window
from tuners.joint.job.running_branch import RunningBranch
from tuners.joint.job.running_model import Glance, RunningModel
from tuners.joint.job.snapshots import JobSnapshots, Snapshot
from tuners.joint.job.steps import JobOver, Steps
from tuners.joint.models.learning_model import HELPED_NATS
from tuners.joint.models.machine_losses import MachineLosses
from tuners.joint.models.system_model import SystemModel

__all__ = ["Training"]

_WINDOWS = 4  # windows that one may be as long as, where there is nothing to decide before
_EVALUATION_SHARE = 0.05  # of a window's seconds that an evaluation may take
_DEAR_SHARE = 0.2  # of the longest window: an evaluation that takes more is left to the job itself
_RECOVERY = 3  # windows in which a model that was trained too hot is as good as before, or is given up
_EVALUATIONS = 3  # further ones, after a push of each worker, where a loss of machines has prevented the first
_PACE = 1.5  # factor between seconds per push that noise does not explain in two windows
_LEAST_SAMPLES = 128  # in a window: from fewer, a rate cannot be judged


class Training:
    """The job in training: its branch, the model of that, and its snapshots."""

    def __init__(self, job: Job, system: SystemModel, *, snapshots: bool = True) -> None:
        self.job, self._system = job, system
        self.model = RunningModel(job)
        self.branch = RunningBranch(job, self.model)
        self.snapshots = JobSnapshots(job, self.branch, self.model, self.run, are_wanted=snapshots)
        self.machine_losses = MachineLosses(job)
        self.measured = False  # whether the last window has told the system model anything
        self.usual_push_seconds = 0.0  # between two pushes, when the system was last chosen; 0: not known
        self.push_seconds = self._before = 0.0  # the same in the last window, and in the one before it
        self.samples = 0  # of all windows: for jobs that count them and return to no snapshot

    @property
    def seconds(self) -> float:
        """Since the job began."""
        return self.branch.seconds

    def run(self, clocks: int, why: str = "") -> Steps[Window]:
        """Train so many clocks. Raises JobOver at the end of the job, and where the branch cannot train."""
        if self.branch.wanted:
            yield from self.branch.change(self.branch.setting, "asked for again")
        yield from self.snapshots.give_back()
        return (yield from self._see(Run(clocks=max(1, clocks), branch=self.branch.number, reason=why)))

    def run_seconds(self, seconds: float, why: str) -> Steps[None]:
        """Train for so long, as the job begins. Raises as `run`."""
        yield from self._see(Run(seconds=seconds, branch=self.branch.number, reason=why))

    def _see(self, action: Run) -> Steps[Window]:
        """Carry out `action`, and take in what it tells."""
        window = yield from self._run(action)
        self.branch.seconds = window.end_seconds
        self.samples += sum(w.samples for w in window.workers)
        if window.status in ("target", "budget"):
            raise JobOver
        if window.clocks:
            self._before, self.push_seconds = self.push_seconds, window.seconds / window.clocks
        self.model.see(window)
        self._see_system(window)
        self.machine_losses.see(window)
        return window

    def _see_system(self, window: Window) -> None:
        """Take in what a window tells of the machines, and of changes that the system has made by itself."""
        branch = self.branch
        # Pushes before the first event still tell what they take under the setting that was in force by then.
        unknown = window.start_seconds if branch.has_changed_by_itself(window) else math.inf
        until = min((e.seconds for e in window.events), default=unknown)
        branch.see_leavers(window.pushes)
        unfinished = branch.unfinished(window.pushes)
        self.measured = self._system.learn(branch.setting, window, branch.placed_seconds, until, unfinished)
        if back := branch.follow(window):
            self._system.compute.forget(back)

    def _run(self, action: Run) -> Steps[Window]:
        """Carry out `action`, on a second attempt if need be; a branch that cannot train any more ends the job."""
        with suppress(Rejected):
            return (yield from action)
        try:
            return (yield from action)
        except Rejected as refusal:
            raise JobOver from refusal

    def window(self, why: str = "") -> Steps[None]:
        """Train about two pushes per worker and measure the level after them, by the job's own validation if possible."""
        model = self.model
        clocks, every, is_dear = self._least_clocks(), model.check_clocks, False
        validates = 0 < every <= 2 * clocks  # the job itself, soon enough
        if not validates and self._system.knows:
            # An evaluation takes time in which nobody trains, so windows are longer where it is dear.
            paid = self.job.evaluate_seconds / self._system.push_seconds(self.branch.setting)  # pushes
            longer = max(clocks, min(math.ceil(paid / _EVALUATION_SHARE), _WINDOWS * clocks))
            # Where it is dear even so, the job's own validation is waited for, if it comes before the end of an evaluation.
            is_dear = paid > _DEAR_SHARE * longer
            validates = is_dear and 0 < every <= longer + paid
            # Else no more time is spent on evaluations than on training.
            clocks = clocks if validates else max(longer, math.ceil(paid))
        if validates:
            clocks = every * max(round((model.pushes + clocks) / every), model.pushes // every + 1) - model.pushes
        before = model.level
        window = yield from self.run(clocks, why)
        if math.isnan(model.level) and (validates or is_dear) and window.evaluations:
            # The job trains on while the tuner thinks, so a few pushes may have followed its validation.
            model.take_validated(window.evaluations)
        if math.isnan(model.level):
            yield from self.evaluate()
        for _ in range(_EVALUATIONS):
            if not math.isnan(model.level) or not window.events:
                break
            # While the system makes up for a loss, no model can be evaluated. To take it for the one before may lose it.
            window = yield from self.run(len(self.branch.setting.workers), "then evaluate: a machine was lost")
            if math.isnan(model.level):
                yield from self.evaluate()
        if math.isnan(model.level):
            model.level = before

    def glance(self, clocks: int = 0) -> Steps[Glance]:
        """Train so many clocks, or about two pushes per worker; what their mini-batches and validation tell."""
        yield from self.run(clocks or self._least_clocks())
        return self.model.glance()

    def recovers(self, kept: Snapshot, setting: Setting, level: float, why: str) -> Steps[bool]:
        """Whether the present model, which was trained too hot, is soon as good as `level` under `setting`.

        What hot windows have learned is hidden by their noise. And where they have thrown the model off, it often comes down
        somewhere flatter, from where it learns faster than `kept`, a snapshot of the time before. That may take as long as
        what going back would lose: a model that needs longer is scarred.
        """
        model = self.model
        if model.diverged or not (yield from self.branch.change(setting, why)):
            return False
        nothing = model.gauge.blank_level - HELPED_NATS
        until = 2 * self.seconds - kept.seconds
        for _ in range(_RECOVERY):
            yield from self.window()
            if model.diverged or model.level <= level or model.level > nothing or self.seconds > until:
                break
        return not model.diverged and model.level <= min(level, nothing)

    def _least_clocks(self) -> int:
        steps = self.branch.setting.local_steps
        fewest = max(16, _LEAST_SAMPLES / self.branch.setting.batch_size)  # mini-batches
        return max(2 * len(self.branch.setting.workers), math.ceil(fewest / steps))

    def evaluate(self) -> Steps[None]:
        """Measure the level, if the job can be evaluated."""
        with suppress(Rejected):
            found = yield from Evaluate(self.branch.number)
            self.branch.seconds = found.seconds
            self.model.take_evaluated(found)

    def level_of(self, kept: Snapshot) -> Steps[float]:
        """The level of a snapshot, measured; as it was noted where the job cannot be evaluated."""
        with suppress(Rejected):
            found = yield from Evaluate(kept.branch)
            self.branch.seconds = self.seconds + self.job.evaluate_seconds
            self.model.gauge.see(found.loss, found.accuracy)
            return self.model.gauge.level(found.loss, found.accuracy)
        return kept.level

    def evaluate_untrained(self) -> Steps[None]:
        """Measure the level of the untrained model, if it was kept or is still the present one."""
        first = self.snapshots.first
        if first is None and self.model.pushes:
            return
        with suppress(Rejected):
            found = yield from Evaluate(self.branch.number if first is None else first.branch)
            self.branch.seconds = found.seconds if first is None else self.seconds + self.job.evaluate_seconds
            self.model.gauge.begin(found.loss, found.accuracy)

    @property
    def saves_usd(self) -> bool:
        """Whether the cheapest run is wanted, so that machines that nothing holds are saved."""
        return self.job.target.minimise == "usd"

    def has_changed_pace(self) -> bool:
        """Whether the last two windows were both much slower, or both much faster, than when the system was chosen."""
        usual, seen = self.usual_push_seconds, (self._before, self.push_seconds)
        return usual > 0 and (min(seen) > _PACE * usual or 0 < max(seen) < usual / _PACE)
