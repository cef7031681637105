"""Bayesian optimisation of a running job's system settings: TensorFlowOnline (Liu et al., "Towards Self-Tuning Parameter
Servers", 2020), with the choices of its public code as options where the two differ.

First the job runs under its start setting and a few others, each for a while (III-B). From these measurements a Gaussian
process learns T(<X, l>), the seconds that remain if the job continues under setting X from loss l (III-A). Then, again and
again, the setting of the highest expected improvement is proposed, and taken where it gains more than the reconfiguration
costs (III-C). The remaining seconds of a stretch are its seconds per clock times the remaining iterations (IV:
`tuners.bo_online.convergence`). Costs are learnt per technique (V: `tuners.bo_online.costs`). Where we differ or had to
choose:

* It tunes system knobs: roles, threads, 16-bit transfer, graph options, policy and its bound. Learning rate, momentum, batch
  and shares keep their values (``knobs="all"`` tunes them too). The paper says that its knobs do not change quality; 16 bits
  do, and so does the number of workers where no worker waits. The estimate sees that only in the losses. Threads are
  coupled: in all settings of the paper but one, threads within and between operations add up to the cores.
* A clock is one push, and a = 3 pushes per node of the cluster, as in the code: the same for every setting. The paper says
  three per worker (``per="workers"``); then a setting is judged by a number of losses in proportion to its workers, which
  cancels the throughput that is tuned, and one worker seems best. Under BSP three pushes of each are three rounds of the
  job, too few for a fit: there it is 10, the code's number for its synchronous job (``clocks_per_worker=3``: the paper's).
  b counts the settings after X_0, so that the initial
  phase has J = a + b a clocks (``counting="code"``: b includes X_0).
* One initial reconfiguration is made in two parts, system settings before roles: random settings mostly change both at
  once, and then their costs could not be separated (``apart=False``: never).
* Initial settings are a Latin hypercube ("centred" is the code's; "random" draws each independently, as the paper says).
* Every a clocks make a triple; of the triples of one setting only the latest counts (``repeats="contiguous"``: all since it
  was last chosen, as in the code, which also pairs a triple with its *last* loss, ``state="last"``).
* epsilon is the target where that is a loss, although the target is a validation loss and the estimate uses training losses.
  For an accuracy see `tuners.bo_online.repository.threshold`. A job that counts clocks needs no estimate: its remaining
  clocks are known, and are the state of the job instead of the loss.
* A stretch without progress counts as the worst stretch with progress, or as the budget where there is none. Only a
  significant rise of the losses is no progress; the other rates are drawn to a job-wide one (see
  `tuners.bo_online.convergence`). The noise of the surrogate has a lower bound, else it interpolates noisy estimates.
* After the initial phase the job takes the setting of the least expected seconds among those tried, not the last one
  (``best_first=False``: the last). Where the current setting has the best score, it stays (``stay=False``: then the best of
  the others is proposed).
* The incumbent is the current setting *at the current loss* ("min": the best setting so far, at the current loss; "last":
  the seconds of the last triple unchanged, as in the code). The gate compares seconds with seconds; the code measures costs
  and never uses them (``gate=False``). PI and LCB are not in seconds: they choose the setting, and the gate uses the
  expected improvement.
* Pushes during a reconfiguration belong to no setting and are left out, as is a stretch in which a node was lost.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from tuners.actions import Action, Evaluation, Job, Method, Reconfigure, Rejected, Run, Setting, Space, Tuner, Window
from tuners.bo_online.convergence import Estimator, Segment
from tuners.bo_online.costs import PastReconfiguration, change_seconds, techniques
from tuners.bo_online.repository import Repeats, Stretch, Triple, threshold, triples
from tuners.bo_online.surrogate import (
    Encoding,
    GaussianPosterior,
    Surrogate,
    best_rows,
    expected_improvement,
    lower_bound,
    probability,
)
from tuners.settings import Knob

__all__ = ["Design", "JobHistory", "Proposal", "best_known", "bo_online", "initial_rows", "proposal", "stretch_clocks"]

_Floats = NDArray[np.float64]
Design = Literal["lhs", "centred", "random"]
_Acquisition = Literal["ei", "pi", "lcb"]
_Incumbent = Literal["current", "min", "last"]

_SYSTEM = ("worker_count", "role", "policy", "staleness", "intra_threads", "inter_threads", "transfer_bits", "option")
_ROLES = ("workers", "servers", "loads", "data_shares", "model_shares")
_ESTIMATOR, _SURROGATE = Estimator(), Surrogate()
_PUSHES, _ROUNDS = 3, 10  # of each worker under one setting: without and with a barrier (BSP)
_DRAWS = 100  # at most, for an initial setting that the job admits
_REFUSALS = 3  # by the system, before an initial setting is given up
_LOOKED_AT = 500  # of the best candidates, for one that the job admits
_REFIT = 1.1  # growth of the number of observations after which hyper-parameters are fitted again


def bo_online(
    job: Job,
    *,
    settings: int = 10,
    clocks_per_worker: int | None = None,
    per: Literal["nodes", "workers"] = "nodes",
    clocks: int | None = None,
    counting: Literal["paper", "code"] = "paper",
    design: Design = "lhs",
    knobs: Literal["system", "all"] = "system",
    couple_threads: bool = True,
    epsilon: float | None = None,
    estimator: Estimator = _ESTIMATOR,
    repeats: Repeats = "latest",
    state: Literal["before", "last"] = "before",
    surrogate: Surrogate = _SURROGATE,
    acquisition: _Acquisition = "ei",
    incumbent: _Incumbent = "current",
    gate: bool = True,
    costs: Literal["technique", "mean"] = "technique",
    apart: bool = True,
    best_first: bool = True,
    stay: bool = True,
    method: Method = "relocate",
) -> Tuner:
    """Try `settings` settings for a clocks each; then, every a clocks, take the setting that promises the earliest end.

    `clocks` fixes a; otherwise a is `clocks_per_worker` (3, or 10 under BSP) times the number of nodes or workers. `method`
    is how the job is reconfigured, where the system has it, else the first method. A job without such knobs just runs.
    """
    if min(settings, *(1 if given is None else given for given in (clocks_per_worker, clocks))) < 1:
        raise ValueError(
            f"Cannot tune with settings={settings}, clocks_per_worker={clocks_per_worker}, clocks={clocks}: "
            "give at least 1 of each."
        )
    how = method if method in job.methods else None
    at = JobHistory(job, knobs, couple_threads, estimator)
    if not at.encoding.space.knobs:
        return

    def a() -> int:
        return clocks or stretch_clocks(at.setting, len(at.available), clocks_per_worker, per)

    # The initialisation phase, III-B.
    at.take((yield from Run(clocks=a())))
    for row in initial_rows(at.encoding, settings - (counting == "code"), at.rng, design):
        if (yield from _begin_with(at, row, how, apart and frozenset({"SSR"}) not in {c.needed for c in at.changes})):
            at.take((yield from Run(clocks=a())))

    # The online tuning phase, III-C.
    begins = best_first
    while True:
        end = threshold(job.target, at.evaluations, at.first_loss, epsilon)
        seen = triples(at.stretches, job.target, job.budget_seconds, end, estimator, repeats, state)
        if begins:
            wanted, begins = best_known(at, seen, _span(at, end), surrogate), False
        else:
            wanted = proposal(at, seen, _span(at, end), surrogate, acquisition, incumbent, stay)
        if wanted is not None:
            cost = change_seconds(at.changes, techniques(at.setting, wanted.setting), costs)
            if not gate or wanted.gain_seconds > cost:
                yield from _change(at, wanted.setting, how)
        at.take((yield from Run(clocks=a())))


def stretch_clocks(
    setting: Setting, nodes: int, clocks_per_worker: int | None = None, per: Literal["nodes", "workers"] = "nodes"
) -> int:
    """a, the clocks for which a setting is observed, on a cluster of so many nodes; the options are those of `bo_online`."""
    each = clocks_per_worker or (_ROUNDS if setting.policy == "bsp" else _PUSHES)
    return each * (nodes if per == "nodes" else len(setting.workers))


# ------------------------------------------------------------------------------------------------------------ the job


class JobHistory:
    """The job so far, and its measurements."""

    def __init__(self, job: Job, knobs: Literal["system", "all"], couple_threads: bool, estimator: Estimator) -> None:
        self.job, self.estimator = job, estimator
        self.stretches: list[Stretch] = []
        self.changes: list[PastReconfiguration] = []
        self.evaluations: list[Evaluation] = []
        self.refused: set[Setting] = set()  # by the system, with its present nodes
        self.clocks = 0
        self.since = 0.0  # second from which on the setting is in force
        self.loss = self.first_loss = np.nan  # present and first level
        self.fitted: tuple[int, GaussianPosterior] | None = None  # number of stretches at the last fit, and its posterior
        self.rng = np.random.default_rng(job.seed)
        self.setting = job.start
        self.available = tuple(n.name for n in job.nodes)
        tuned = tuple(k for k in job.space.knobs if knobs == "all" or k.name.partition("/")[0] in _SYSTEM)
        cores = min(n.cores for n in job.nodes)
        self.encoding = Encoding(replace(job.space, knobs=tuned), cores if couple_threads else None)
        self.tried = {self.row(self.setting).tobytes()}  # rows of the initial phase

    def row(self, setting: Setting) -> _Floats:
        return self.encoding.row(self.encoding.space.values(setting))

    @property
    def state(self) -> float:
        """The model's input beside the setting, now: remaining clocks, or the loss."""
        counts = self.job.target.metric == "clocks"
        return self.job.target.value - self.clocks if counts else self.loss

    def take(self, seen: Window) -> None:
        """Add a window as a stretch under the current setting, unless its setting changed or a node was lost."""
        available = tuple(n.name for n in seen.nodes or self.job.nodes)
        setting = seen.setting or self.setting
        used = set(self.setting.workers + self.setting.servers)
        lost = any(e.node in used and e.event in ("left", "failed") for e in seen.events)
        mine = seen.pushes.seconds > self.since
        losses = seen.pushes.loss[mine]
        if len(losses) and setting == self.setting and not lost:
            self._add(losses, seen.end_seconds - max(self.since, seen.start_seconds), seen.clocks - len(losses))
        if available != self.available:
            self.refused.clear()
        self.evaluations += seen.evaluations
        self.clocks += seen.clocks
        self.setting, self.available, self.since = setting, available, seen.end_seconds

    def _add(self, losses: _Floats, seconds: float, skipped: int) -> None:
        workers = len(self.setting.workers)
        if not self.stretches:
            self.first_loss = self.loss = self.estimator.level(losses, workers, first=True)
        segment = Segment(losses, self.loss, self.clocks + skipped, workers)
        self.loss = self.estimator.level(losses, workers)
        self.stretches.append(Stretch(self.row(self.setting), segment, seconds, self.loss))

    def admitted(self, row: _Floats) -> Setting | None:
        """The setting of a row on the available nodes; None for the current setting, and where the job would refuse it."""
        values, nodes = self.encoding.values(row), {n.name: n for n in self.job.nodes if n.name in self.available}
        space = self.encoding.space
        whole = set(space.base.workers + space.base.servers) <= nodes.keys()
        there = tuple(k for k in space.knobs if _node(k) is None or _node(k) in nodes)
        try:
            now = Space(space.base if whole else self.setting, tuple(nodes.values()), there)
            setting = now.setting({k.name: values[k.name] for k in there})
            self.job.space.check(setting)
        except (Rejected, ValueError):
            return None
        return None if setting == self.setting or setting in self.refused else setting


def _node(knob: Knob) -> str | None:
    """The node that a knob sets, if any."""
    head, _, rest = knob.name.partition("/")
    return rest.partition("/")[0] if rest and head != "option" else None


def _change(at: JobHistory, setting: Setting, how: Method | None) -> Generator[Action[Any], Any, bool]:
    """Reconfigure the job to `setting`, and record the cost or the refusal; whether it was done."""
    try:
        cost = yield from Reconfigure(setting, method=how)
    except Rejected:
        at.refused.add(setting)
        return False
    at.since += cost.seconds
    if cost.done:
        at.changes.append(PastReconfiguration(techniques(at.setting, setting), cost.seconds))
        at.setting = setting
    return cost.done


# ------------------------------------------------------------------------------------------ the initialisation phase (III-B)


def initial_rows(encoding: Encoding, count: int, rng: np.random.Generator, design: Design) -> _Floats:
    """`count` rows of initial settings, [count, width].

    A Latin hypercube divides the range of each knob into `count` parts and uses each part once, at random or its centre.
    """
    shape = count, len(encoding.space.knobs)
    if design == "random" or not count:
        return encoding.spread(rng.random(shape))
    return encoding.spread(qmc.LatinHypercube(shape[1], scramble=design == "lhs", rng=rng).random(count))


def _begin_with(at: JobHistory, row: _Floats, how: Method | None, apart: bool) -> Generator[Action[Any], Any, bool]:
    """Reconfigure the job to the setting of `row`, or of a new random row where that was tried or is refused.

    With `apart`, all but the roles changes first. False where no setting is left to try; where the system refuses all, the
    job runs under its present setting instead.
    """
    refusals = 0
    for _ in range(_DRAWS):
        setting = at.admitted(row)
        key = at.row(setting).tobytes() if setting is not None else b""
        if setting is not None and key not in at.tried:
            at.tried.add(key)
            if apart and techniques(at.setting, setting) > {"SSR"}:
                yield from _change(at, replace(setting, **{f: getattr(at.setting, f) for f in _ROLES}), how)
            if (yield from _change(at, setting, how)):
                return True
            refusals += 1
            if refusals == _REFUSALS:
                break
        row = initial_rows(at.encoding, 1, at.rng, "random")[0]
    return refusals > 0


# ------------------------------------------------------------------------------------------- the online tuning phase (III-C)


class Proposal(NamedTuple):
    """The setting to take next, and the seconds that it is expected to save."""

    setting: Setting
    gain_seconds: float


def proposal(
    at: JobHistory,
    seen: list[Triple],
    span: tuple[float, float],
    surrogate: Surrogate,
    acquisition: _Acquisition,
    incumbent: _Incumbent,
    stay: bool = True,
) -> Proposal | None:
    """The setting with the best score of the acquisition among those that the job admits.

    None where that is the current one; without `stay`, the best except the current one.
    """
    if len(seen) < 2 or not np.isfinite(at.state):
        return None
    posterior = _posterior(at, seen, span, surrogate)
    current = at.row(at.setting)
    known = np.array([t.row for t in seen])
    best = _reference(at, seen, posterior, incumbent)
    score = {"ei": expected_improvement, "pi": probability, "lcb": lower_bound}[acquisition]
    rows, _ = best_rows(lambda r: score(*posterior(_at_state(r, at.state)), best), at.encoding, known, at.rng)
    for row in rows[:_LOOKED_AT]:
        if stay and np.array_equal(row, current):
            return None
        setting = None if np.array_equal(row, current) else at.admitted(row)
        if setting is not None:
            gain = expected_improvement(*posterior(_at_state(row[None], at.state)), best)
            return Proposal(setting, float(gain[0]))
    return None


def best_known(at: JobHistory, seen: list[Triple], span: tuple[float, float], surrogate: Surrogate) -> Proposal | None:
    """The setting of the least expected seconds among those tried, and its gain; None where that is the current one."""
    if len(seen) < 2 or not np.isfinite(at.state):
        return None
    posterior = _posterior(at, seen, span, surrogate)
    current = at.row(at.setting)
    now = float(posterior(_at_state(current[None], at.state))[0][0])
    rows = np.array([t.row for t in seen])
    means = posterior(_at_state(rows, at.state))[0]
    for i in np.argsort(means, kind="stable"):
        if np.array_equal(rows[i], current) or not means[i] < now:
            return None
        setting = at.admitted(rows[i])
        if setting is not None:
            return Proposal(setting, now - float(means[i]))
    return None


def _span(at: JobHistory, end: float) -> tuple[float, float]:
    """The state at the end and at the beginning of the job."""
    return (0.0, at.job.target.value) if at.job.target.metric == "clocks" else (end, at.first_loss)


def _posterior(at: JobHistory, seen: list[Triple], span: tuple[float, float], surrogate: Surrogate) -> GaussianPosterior:
    """The model of all triples. Hyper-parameters are fitted only now and then, because the fit takes most of the time."""
    rows = np.array([np.append(t.row, t.state) for t in seen])
    seconds = np.array([t.seconds for t in seen])
    count = len(at.stretches)
    like = at.fitted[1] if at.fitted is not None and count < _REFIT * at.fitted[0] else None
    posterior = surrogate.posterior(rows, seconds, int(at.rng.integers(2**32)), span=span, like=like)
    if like is None:
        at.fitted = count, posterior
    return posterior


def _reference(at: JobHistory, seen: list[Triple], posterior: GaussianPosterior, incumbent: _Incumbent) -> float:
    """The seconds that a new setting must improve on."""
    if incumbent == "last":
        return seen[-1].seconds
    rows = np.array([t.row for t in seen]) if incumbent == "min" else at.row(at.setting)[None]
    return float(posterior(_at_state(rows, at.state))[0].min())


def _at_state(rows: _Floats, state: float) -> _Floats:
    return np.column_stack([rows, np.full(len(rows), state)])
