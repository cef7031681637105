"""The bespoke optimiser: schedules of synchronous SGD by Bayesian optimisation with a structured model (Dalibard et al.,
"Tuning the Scheduling of Distributed Stochastic Gradient Descent with Bayesian Optimization", 2017).

Each evaluation is 20 iterations of the running job under a schedule; the mean of the last 10 is the objective, and the times
of all devices and machines are what the model learns from (`tuners.bespoke_bo.model`, `tuners.bespoke_bo.smc`). The next
schedule is the one of the largest expected improvement (`tuners.bespoke_bo.draws`, `tuners.bespoke_bo.numeric`). Where we
differ or chose:

* The paper tunes before the training; here every evaluation is a piece of the training and costs what it costs. After
  the last one the job stays with the best schedule that was measured, and when machines come or go a few more are tried.
* The public framework has no schedule to begin with; here loads begin in proportion to cores, a GPU counting as 32, with
  everybody worker and server, which the paper says tends to do well.
* The model is fed medians over the iterations that count, so that one that was held up says nothing; what lies far from what
  all else predicts is left out (`tuners.bespoke_bo.parts.trusted`).
* Who has pulled early computes early, as far as that is inferred; ``communication="as_printed"`` lets all wait for the
  slowest connection (`tuners.bespoke_bo.communication`).
* Repeated configurations vary little, says the paper, so that none is measured twice, nor one that is the same but for 3 %
  of some loads.
* ``inference="importance"`` and ``device_draws="as_published_code"`` are what the public code does: particles of the prior
  that are never resampled, and a draw for each machine by itself where its own guard was to make them joint.
* ``numeric="direct"`` and ``"cmaes"`` search all 30 dimensions at once.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tuners.actions import Action, Job, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.bespoke_bo.draws import Draws
from tuners.bespoke_bo.model import BOTH, SERVER, WORKER, Cluster, IterationModel, Observed
from tuners.bespoke_bo.numeric import Candidate, Numeric, candidates
from tuners.bespoke_bo.schedules import Measured, Schedule, batch, is_free, measure, setting
from tuners.bespoke_bo.smc import Inference
from tuners.settings import shared_out

__all__ = ["bespoke_bo", "observed", "proportional"]

_GPU_CORES = 32.0  # about a K520's peak over that of a hyperthread
_ALIKE = 0.03
_WATCH = 10  # iterations between two looks at the cluster


def bespoke_bo(
    job: Job,
    *,
    evaluations: int = 10,
    rechecks: int = 3,
    iterations: int = 20,
    counted: int = 10,
    draws: int = 128,
    particles: int = 256,
    inference: Inference = "smc",
    communication: Literal["overlapping", "as_printed"] = "overlapping",
    device_draws: Literal["joint", "as_published_code"] = "joint",
    numeric: Numeric = "decomposed",
) -> Tuner:
    """Try `evaluations` schedules, and stay with the best; try `rechecks` more whenever machines come or go.

    A job whose schedule is not free just runs.

    Args:
        job: what to tune.
        evaluations: schedules to try; the paper needs ten.
        rechecks: schedules to try when the cluster has changed.
        iterations: of the job under each, of which
        counted: the last ones count.
        draws: possible clusters over which the improvement is expected (the public code's examples take 100).
        particles: of each part of the model.
        inference: sequential Monte Carlo, or the public code's importance sampling, which wants 50,000 particles.
        communication: whether who has the model early may compute early, or all wait for the slowest connection.
        device_draws: whether machines that share a device type are drawn together.
        numeric: how the schedule of the largest expected improvement is searched for.
    """
    if min(evaluations, draws, particles) < 1 or rechecks < 0:
        raise ValueError(
            f"Cannot tune with evaluations={evaluations}, rechecks={rechecks}, draws={draws}, particles={particles}: "
            "give at least 1 of each, and no less than 0 rechecks."
        )
    if not is_free(job):
        return
    overlap = communication == "overlapping"
    model = IterationModel(Cluster.of(job), job.seed, inference=inference, particles=particles, overlap=overlap)
    at = _Progress(job, model, draws, device_draws == "joint", numeric)
    count = evaluations
    while True:
        for _ in range(count):
            at.take((yield from measure(at.proposal(), at.current, iterations=iterations, counted=counted)))
        yield from _settle(at)
        yield from _watch(at)
        count = rechecks


@dataclass
class _Progress:
    """What was tried, what came of it, and what the job runs under now."""

    job: Job
    model: IterationModel
    draws: int
    joint: bool
    numeric: Numeric
    seen: list[Observed] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)  # of what was seen
    refused: set[Setting] = field(default_factory=set)  # by the system, with the nodes that it has

    def __post_init__(self) -> None:
        self.current = self.job.start
        self.available = frozenset(n.name for n in self.job.nodes)
        self.asked = self.current

    # ------------------------------------------------------------------------------------------------------ what is known

    def take(self, answer: Measured | Window | None) -> None:
        """Learn from an evaluation: what was measured, that something came between, or that the schedule was refused."""
        if answer is None:
            self.refused.add(self.asked)
        elif isinstance(answer, Window):
            self.look(answer)
        else:
            self.current = answer.setting
            self.seen.append(observed(self.job, answer))
            self.settings.append(answer.setting)
            self.look(answer.window)

    def look(self, window: Window) -> bool:
        """Take note of who is there and what is in force; whether either has changed."""
        now = frozenset(n.name for n in window.nodes or self.job.nodes)
        changed = now != self.available or (window.setting or self.current) != self.current
        if now != self.available:
            self.refused.clear()
        self.available, self.current = now, window.setting or self.current
        return changed

    @property
    def best(self) -> int | None:
        """The fastest evaluation whose machines are all there, with the whole batch; None where there is none."""
        whole = batch(self.job)
        there = [
            i
            for i, s in enumerate(self.settings)
            if self.available.issuperset(s.workers + s.servers) and sum(map(sum, s.loads)) == whole and s not in self.refused
        ]
        return min(there, key=lambda i: self.seen[i].seconds, default=None)

    # ------------------------------------------------------------------------------------------------------- what is next

    def proposal(self) -> Setting:
        """The next setting to evaluate; the current one where nothing else is left to try."""
        self.asked = next((s for s in self._proposals() if not self._tried(s)), self.current)
        return self.asked

    def _tried(self, wanted: Setting) -> bool:
        """Whether a setting was refused, or one that is as good as the same was measured."""
        return wanted in self.refused or any(_alike(wanted, s) for s in self.settings)

    def _proposals(self) -> Generator[Setting, None, None]:
        cluster = Cluster.of(self.job, sorted(self.available))
        if not self.seen:
            first = proportional(self.job, cluster)
            yield from [] if first is None else [first]
            return
        self.model.observe(self.seen)
        seed = self.job.seed + 1000 * len(self.seen)
        best = np.inf if self.best is None else self.seen[self.best].seconds
        drawn = Draws(self.model, cluster, self.draws, seed, self.joint)
        for found in candidates(drawn, best, self.numeric, np.random.default_rng(seed)):
            yield _setting(self.job, found)


def _settle(at: _Progress) -> Generator[Action[Any], Any, None]:
    """Bring the job to the best schedule that was measured."""
    wanted = None if at.best is None else at.settings[at.best]
    if wanted is None or wanted == at.current:
        return
    try:
        cost = yield from Reconfigure(wanted)
    except Rejected:
        at.refused.add(wanted)
        return
    if cost.done:
        at.current = wanted


def _watch(at: _Progress) -> Generator[Action[Any], Any, None]:
    """Let the job run until machines have come or gone."""
    while True:
        seen = yield from Run(clocks=_WATCH * len(at.current.workers))
        if at.look(seen):
            return


# ------------------------------------------------------------------------------------------------------------ pure functions


def proportional(job: Job, cluster: Cluster) -> Setting | None:
    """Everybody worker and server as far as roles are free, loads in proportion to cores; None where that is no setting."""
    weights, serves = dict[tuple[int, int], float](), set[int]()
    for group in cluster.groups:
        for machine in group.members:
            if {BOTH, SERVER} & set(group.roles):
                serves.add(machine)
            if {BOTH, WORKER} & set(group.roles):
                for device, kind in zip(group.devices, group.kinds, strict=True):
                    weights[machine, device] = _GPU_CORES if kind == "gpu" else float(job.nodes[machine].cores)
    if not weights or not serves:
        return None
    samples = dict(zip(weights, shared_out(list(weights.values()), cluster.batch), strict=True))
    rows = tuple(tuple(samples.get((i, d), 0) for d in range(len(n.devices))) for i, n in enumerate(job.nodes))
    wanted = setting(job, Schedule(tuple(n.name for i, n in enumerate(job.nodes) if i in serves), rows))
    try:
        job.space.check(wanted)
    except Rejected:
        return None
    return wanted


def _setting(job: Job, found: Candidate) -> Setting:
    """The setting of a candidate."""
    rows = tuple(tuple(int(x) for x in row[: len(n.devices)]) for n, row in zip(job.nodes, found.loads, strict=True))
    return setting(job, Schedule(tuple(n.name for n, serves in zip(job.nodes, found.serves, strict=True) if serves), rows))


def _alike(one: Setting, other: Setting) -> bool:
    """Whether two schedules differ by nothing but 3 % of some loads, less than what their measurements vary by."""
    if (one.workers, one.servers) != (other.workers, other.servers):
        return False
    pairs = [pair for rows in zip(one.loads, other.loads, strict=True) for pair in zip(*rows, strict=True)]
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def observed(job: Job, measured: Measured) -> Observed:
    """What the model learns from. Of devices only means are known; they count as far as their machine's median tells."""
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
