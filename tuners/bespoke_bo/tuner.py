"""The bespoke optimiser: schedules of synchronous SGD by Bayesian optimisation with a structured model (Dalibard et al.,
"Tuning the Scheduling of Distributed Stochastic Gradient Descent with Bayesian Optimization", 2017).

Each evaluation is 20 iterations of the running job under a schedule. The mean of the last 10 is the objective; the model
learns from the times of all devices and machines (`tuners.bespoke_bo.model`, `tuners.bespoke_bo.smc`). The next schedule is
the one with the largest expected improvement (`tuners.bespoke_bo.draws`, `tuners.bespoke_bo.numeric`). Where we differ from
the paper or had to choose:

* The paper tunes before the training. Here every evaluation is part of the training, and its cost is charged. After the last
  one the job stays with the best measured schedule; when machines join or leave, a few more schedules are tried.
* The paper always makes ten evaluations. Here the next one is made only if what it is expected to save over the iterations
  left is more than it costs (`tuners.bespoke_bo.stopping`); ``stop_early=False`` makes all ten.
* The public framework has no initial schedule. Here the first one makes every machine worker and server, which by the paper
  tends to do well, with loads in proportion to cores; a GPU counts as 32 cores. Where the system refuses it, because a
  machine is not there yet, the first is the job's start.
* The model gets medians over the counted iterations, so one delayed iteration has no effect. Observations far from the
  prediction of all others are ignored (`tuners.bespoke_bo.parts.trusted`).
* A worker that has pulled early computes early, to an inferred degree; ``communication="as_printed"`` makes all wait for the
  slowest connection (`tuners.bespoke_bo.communication`).
* The paper says that repeated measurements vary little. So no setting is measured twice, nor one whose loads differ by at
  most 3 % from a measured one.
* ``inference="importance"`` and ``device_draws="as_published_code"`` are the public code's ways: particles of the prior that
  are never resampled, and an independent draw for each machine, because its guard for joint draws never holds.
* ``numeric="direct"`` and ``"cmaes"`` search all 30 dimensions at once.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tuners.actions import Action, Evaluation, Job, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.applicability import nothing_to_tune_if
from tuners.bespoke_bo.draws import Draws
from tuners.bespoke_bo.grouped_cluster import BOTH, SERVER, WORKER, GroupedCluster
from tuners.bespoke_bo.model import IterationModel, Observed
from tuners.bespoke_bo.numeric import Candidate, Numeric, candidates
from tuners.bespoke_bo.schedules import MeasuredSchedule, Schedule, batch, check_counted, measure, schedule_is_held, setting
from tuners.bespoke_bo.smc import Inference
from tuners.bespoke_bo.stopping import JobCourse, worthwhile
from tuners.factory_options import Count, Whole, options_checked_by
from tuners.reasons import machines, short
from tuners.settings import shared_out

__all__ = ["bespoke_bo", "candidate_setting", "observed", "proportional"]

_GPU_CORES = 32.0  # about the peak of a K520 over that of a hyperthread
_ALIKE = 0.03  # relative difference of loads that counts as none
_WATCH = 10  # iterations between two checks of the cluster


def _check_options(options: Mapping[str, Any]) -> None:
    check_counted(options["iterations"], options["counted"])


@options_checked_by(_check_options)
@nothing_to_tune_if(schedule_is_held)
def bespoke_bo(
    job: Job,
    *,
    evaluations: Count = 10,
    rechecks: Whole = 3,
    iterations: Count = 20,
    counted: Count = 10,
    draws: Count = 128,
    particles: Count = 256,
    inference: Inference = "smc",
    communication: Literal["overlapping", "as_printed"] = "overlapping",
    device_draws: Literal["joint", "as_published_code"] = "joint",
    numeric: Numeric = "decomposed",
    stop_early: bool = True,
) -> Tuner:
    """Try up to `evaluations` schedules and stay with the best; try up to `rechecks` more whenever machines join or leave.

    A job whose schedule is not free runs as it is.

    Args:
        job: the job to tune.
        evaluations: schedules to try at the most; the paper needs ten.
        rechecks: schedules to try when the cluster has changed.
        iterations: iterations of the job per evaluation.
        counted: the last iterations of an evaluation, which count.
        draws: draws of the model for the expected improvement (the public code's examples use 100).
        particles: particles of each part of the model.
        inference: sequential Monte Carlo, or the public code's importance sampling, which needs 50,000 particles.
        communication: whether workers that have the model early compute early, or all wait for the slowest connection.
        device_draws: whether machines that share a device type are drawn jointly.
        numeric: how to search for the schedule with the largest expected improvement.
        stop_early: whether to try a schedule only if it is expected to save more than it costs; else all are tried.
    """
    if min(evaluations, draws, particles) < 1 or rechecks < 0:
        raise ValueError(
            f"Cannot tune with evaluations={evaluations}, rechecks={rechecks}, draws={draws}, particles={particles}: "
            "give at least 1 of each, and no less than 0 rechecks."
        )
    if schedule_is_held(job):
        return
    overlap = communication == "overlapping"
    model = IterationModel(GroupedCluster.of(job), job.seed, inference=inference, particles=particles, overlap=overlap)
    progress = _Progress(job, model, draws, device_draws == "joint", numeric)
    count = evaluations
    while True:
        for number in range(1, count + 1):
            wanted = progress.proposal()
            if stop_early and not progress.pays(iterations):
                break
            why = f"evaluation {number} of at most {count}: {progress.why}"
            evaluation = measure(wanted, progress.current, iterations=iterations, counted=counted, reason=why)
            progress.take((yield from evaluation))
        yield from _settle(progress)
        yield from _watch(progress)
        count = rechecks


@dataclass
class _Progress:
    """What was tried and measured, and the current setting of the job."""

    job: Job
    model: IterationModel
    draws: int
    joint: bool
    numeric: Numeric
    seen: list[Observed] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)  # of each entry of `seen`
    refused: set[Setting] = field(default_factory=set)  # by the system, since the nodes last changed

    current: Setting = field(init=False)  # of the job
    asked: Setting = field(init=False)  # to be evaluated
    expected: Candidate | None = None  # what the model says of `asked`; None: it was not proposed by the model
    available: frozenset[str] = field(init=False)  # names of nodes
    course: JobCourse = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.asked = self.job.start
        self.available = frozenset(n.name for n in self.job.nodes)
        self.course = JobCourse(self.job)

    # --------------------------------------------------------------------------------------------------------- evaluations

    def take(self, answer: MeasuredSchedule | Window | None) -> None:
        """Record an evaluation: its measurement, a window if it was interrupted, or None if the schedule was refused."""
        if answer is None:
            self.refused.add(self.asked)
        elif isinstance(answer, Window):
            self.look(answer)
        else:
            if answer.change is not None:
                self.course.changed(answer.change)
            self.current = answer.setting
            self.seen.append(observed(self.job, answer))
            self.settings.append(answer.setting)
            self.look(answer.window, answer.clocks - answer.window.clocks, answer.evaluations)

    def look(self, window: Window, earlier: int = 0, evaluations: Sequence[Evaluation] | None = None) -> bool:
        """Update course, available nodes and current setting; returns whether nodes or setting have changed.

        The evaluation has `earlier` clocks before the window, and all the `evaluations`; None: those of the window.
        """
        made = window.evaluations if evaluations is None else evaluations
        self.course.trained(earlier + window.clocks, max(len(self.current.workers), 1), window.end_seconds, made)
        now = frozenset(n.name for n in window.nodes or self.job.nodes)
        changed = now != self.available or (window.setting or self.current) != self.current
        if now != self.available:
            self.refused.clear()
        self.available, self.current = now, window.setting or self.current
        return changed

    @property
    def best(self) -> int | None:
        """The fastest evaluation with the whole batch on machines that are all available; None if there is none."""
        whole = batch(self.job)
        there = [
            i
            for i, s in enumerate(self.settings)
            if self.available.issuperset(s.workers + s.servers) and sum(map(sum, s.loads)) == whole and s not in self.refused
        ]
        return min(there, key=lambda i: self.seen[i].seconds, default=None)

    # ----------------------------------------------------------------------------------------------------------- proposals

    def proposal(self) -> Setting:
        """The next setting to evaluate; the current one if no other is left to try."""
        untried = ((s, c) for s, c in self._proposals() if not self._tried(s))
        self.asked, self.expected = next(untried, (self.current, None))
        return self.asked

    @property
    def why(self) -> str:
        """Why the last proposal is to be evaluated."""
        if self.expected is None:
            return f"{machines(self.asked)}, loads by cores"
        best = "" if self.best is None else f", {short(self.seen[self.best].seconds)} s is the best so far"
        gain = "" if self.best is None else f"; expected improvement {short(self.expected.improvement)} s"
        return f"{machines(self.asked)}, {short(self.expected.seconds)} s per iteration expected{best}{gain}"

    def pays(self, iterations: int) -> bool:
        """Whether evaluating the last proposal for `iterations` is expected to save more than it costs."""
        if self.best is None:
            return True  # there is nothing to stay with
        if self.expected is None:
            return False  # no schedule is left to try
        best = self.seen[self.best].seconds
        changes = 1 if self.settings[self.best] != self.current else 2
        left = self.course.iterations_left(best, len(self.settings[self.best].workers))
        lost = iterations * max(self.expected.seconds - best, 0.0) + changes * self.course.change_seconds
        return worthwhile(self.expected.improvement, left - iterations, lost)

    def _tried(self, wanted: Setting) -> bool:
        """Whether a setting was refused, or an equal or almost equal one was measured."""
        return wanted in self.refused or any(_alike(wanted, s) for s in self.settings)

    def _proposals(self) -> Generator[tuple[Setting, Candidate | None], None, None]:
        cluster = GroupedCluster.of(self.job, sorted(self.available))
        if not self.seen:
            first = proportional(self.job, cluster)
            yield from [] if first is None else [(first, None)]
            return
        self.model.observe(self.seen)
        seed = self.job.seed + 1000 * len(self.seen)
        best = np.inf if self.best is None else self.seen[self.best].seconds
        drawn = Draws(self.model, cluster, self.draws, seed, self.joint)
        for found in candidates(drawn, best, self.numeric, np.random.default_rng(seed)):
            yield candidate_setting(self.job, found), found


def _settle(progress: _Progress) -> Generator[Action[Any], Any, None]:
    """Change the job to the best measured schedule."""
    best = progress.best
    if best is None or progress.settings[best] == progress.current:
        return
    wanted, seconds = progress.settings[best], short(progress.seen[best].seconds)
    try:
        cost = yield from Reconfigure(
            wanted, reason=f"the best that was measured: {machines(wanted)}, {seconds} s per iteration"
        )
    except Rejected:
        progress.refused.add(wanted)
        return
    progress.course.changed(cost)
    if cost.done:
        progress.current = wanted


def _watch(progress: _Progress) -> Generator[Action[Any], Any, None]:
    """Let the job run until machines join or leave."""
    while True:
        seen = yield from Run(clocks=_WATCH * len(progress.current.workers))
        if progress.look(seen):
            return


# ------------------------------------------------------------------------------------------------------------ pure functions


def proportional(job: Job, cluster: GroupedCluster) -> Setting | None:
    """Every machine worker and server if its role is free, loads in proportion to cores; None if that is not allowed."""
    weights, serves = dict[tuple[int, int], float](), set[int]()
    for group in cluster.groups:
        for machine in group.members:
            if {BOTH, SERVER} & set(group.roles):
                serves.add(machine)
            if {BOTH, WORKER} & set(group.roles):
                for device, kind in zip(group.devices, group.device_kinds, strict=True):
                    weights[machine, device] = _GPU_CORES if kind == "gpu" else float(job.nodes[machine].cores)
    if not weights or not serves:
        return None
    samples = dict(zip(weights, shared_out(list(weights.values()), cluster.batch), strict=True))
    rows = tuple(tuple(samples.get((i, d), 0) for d in range(len(n.devices))) for i, n in enumerate(job.nodes))
    wanted = setting(job, Schedule(tuple(n.name for i, n in enumerate(job.nodes) if i in serves), rows))
    return wanted if job.space.admits(wanted) else None


def candidate_setting(job: Job, found: Candidate) -> Setting:
    """The setting of a candidate."""
    rows = tuple(tuple(int(x) for x in row[: len(n.devices)]) for n, row in zip(job.nodes, found.loads, strict=True))
    return setting(job, Schedule(tuple(n.name for n, serves in zip(job.nodes, found.serves, strict=True) if serves), rows))


def _alike(one: Setting, other: Setting) -> bool:
    """Whether two schedules differ only in loads, by at most 3 %: less than the noise of a measurement."""
    if (one.workers, one.servers) != (other.workers, other.servers):
        return False
    pairs = [pair for rows in zip(one.loads, other.loads, strict=True) for pair in zip(*rows, strict=True)]
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def observed(job: Job, measured: MeasuredSchedule) -> Observed:
    """A measurement as the model takes it. Devices have only means: these are scaled by their machine's median over mean."""
    index = {n.name: i for i, n in enumerate(job.nodes)}
    workers, count = measured.setting.workers, len(measured.iteration_seconds)
    shape = len(index), max(len(n.devices) for n in job.nodes)
    loads, devices = np.zeros(shape, np.int64), np.full(shape, np.nan)
    machines = np.full((count, len(index)), np.nan)
    pushes = measured.window.pushes
    for name, row in zip(workers, measured.setting.loads, strict=True):
        machine = index[name]
        each = pushes.compute_seconds[pushes.worker == machine]
        machines[:, machine] = each
        loads[machine, : len(row)] = row
        seconds = np.array(measured.device_seconds[name]) * (np.median(each) / each.mean())
        devices[machine, : len(row)] = np.where(np.array(row) > 0, seconds, np.nan)
    serves = np.array([n.name in measured.setting.servers for n in job.nodes])
    return Observed(loads, serves, devices, machines, np.array(measured.iteration_seconds), measured.seconds)
