"""Bayesian optimisation of a running job's system settings: TensorFlowOnline (Liu et al., "Towards Self-Tuning Parameter
Servers", 2020), with its public code where the two part ways.

A job starts under its own setting and goes through a few more, each for a while (III-B); from what it measured a Gaussian
process learns T(<X, l>), the seconds that remain if the job goes on under X from loss l (III-A); from then on the setting
of the highest expected improvement is proposed again and again, and taken where it gains more than the change costs
(III-C). The remaining seconds of a stretch are its seconds per clock times the iterations left (IV:
`tuners.bo_online.convergence`); costs are learnt by technique (V: `tuners.bo_online.costs`). Where we differ or had to
choose:

* Knobs are the system's: roles, threads, 16-bit transfer, graph options, policy and its bound. Rates, momentum, batch and
  shares are left alone (``knobs="all"`` takes them too). The paper says that its knobs do not touch quality; 16 bits do, and
  so does the number of workers where nobody waits. The estimate sees that only in the losses. Threads are coupled: in all
  the paper's settings but one, those within and between operations add up to the cores.
* A clock is one push, so a = 3 pushes per worker of the setting in force (``per="nodes"``: of the cluster, as the code
  does). Where all wait for all, three of a worker are three rounds of the job, too few to fit anything to: there it is 10,
  the code's count for its synchronous job (``clocks_per_worker=3``: the paper's). b counts the settings after X_0, so that
  J = a + b a clocks (``counting="code"``: X_0 too).
* One initial change is made in two parts, system settings before roles: settings drawn at random mostly change both at once,
  so that their costs could not be told apart (``apart=False``: never).
* Initial settings are a Latin hypercube ("centred" is the code's; "random" draws each by itself, as the paper says).
* Every a clocks make a triple; of a setting seen before only the latest counts (``repeats="contiguous"``: all since it was
  last chosen, the code's, which also pairs a triple with its *last* loss, ``state="last"``).
* epsilon is the target where that is a loss, although the target is on validation and the estimate on training losses.
  Where it is an accuracy, see `tuners.bo_online.repository.threshold`. A job that counts clocks needs no estimate: what is
  left is known, and stands in for the loss as the state of the job.
* A stretch that shows no progress counts as the worst of those that do, or as the budget where none does.
* The incumbent is the current setting *at the current loss* ("min": the best of those seen, there; "last": the last triple's
  seconds as they stand, the code's). The gate compares seconds with seconds; the code measures costs and never uses them
  (``gate=False``). PI and LCB are no seconds: they choose the setting, and the gate asks for its expected improvement.
* What is pushed while a change is under way belongs to no setting, and is left out, as is a stretch that lost a node.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
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

__all__ = ["Design", "bo_online", "initial_rows"]

_Floats = NDArray[np.float64]
Design = Literal["lhs", "centred", "random"]
_Acquisition = Literal["ei", "pi", "lcb"]
_Incumbent = Literal["current", "min", "last"]

_SYSTEM = ("worker_count", "role", "policy", "staleness", "intra_threads", "inter_threads", "transfer_bits", "option")
_ROLES = ("workers", "servers", "loads", "data_shares", "model_shares")
_ESTIMATOR, _SURROGATE = Estimator(), Surrogate()
_PUSHES, _ROUNDS = 3, 10  # of each worker under one setting: where nobody waits for all, and where all do
_DRAWS = 100  # for an initial setting that the job admits
_REFUSALS = 3  # by the system, before an initial setting is given up
_LOOKED_AT = 500  # of the best candidates, for one that the job admits
_REFIT = 1.1  # growth of the observations after which hyper-parameters are fitted anew


def bo_online(
    job: Job,
    *,
    settings: int = 10,
    clocks_per_worker: int | None = None,
    per: Literal["workers", "nodes"] = "workers",
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
    method: Method = "relocate",
) -> Tuner:
    """Try `settings` settings for a clocks each; then, every a clocks, what promises to finish the job soonest.

    `clocks` fixes a, which otherwise is `clocks_per_worker` times the workers or nodes: 3, or 10 under BSP. `method` is
    how the job is reconfigured if it can be so, else its first method. A job without a knob to tune just runs.
    """
    if min(settings, *(1 if given is None else given for given in (clocks_per_worker, clocks))) < 1:
        raise ValueError(
            f"Cannot tune with settings={settings}, clocks_per_worker={clocks_per_worker}, clocks={clocks}: "
            "give at least 1 of each."
        )
    how = method if method in job.methods else None
    at = _Progress(job, knobs, couple_threads, estimator)
    if not at.encoding.space.knobs:
        return

    def a() -> int:
        each = clocks_per_worker or (_ROUNDS if at.setting.policy == "bsp" else _PUSHES)
        return clocks or each * len(at.setting.workers if per == "workers" else at.available)

    # The initialisation phase, III-B.
    at.take((yield from Run(clocks=a())))
    for row in initial_rows(at.encoding, settings - (counting == "code"), at.rng, design):
        if (yield from _begin_with(at, row, how, apart and frozenset({"SSR"}) not in {c.needed for c in at.changes})):
            at.take((yield from Run(clocks=a())))

    # The online tuning phase, III-C.
    while True:
        end = threshold(job.target, at.evaluations, at.first_loss, epsilon)
        seen = triples(at.stretches, job.target, job.budget_seconds, end, estimator, repeats, state)
        wanted = _proposal(at, seen, _span(at, end), surrogate, acquisition, incumbent)
        if wanted is not None:
            cost = change_seconds(at.changes, techniques(at.setting, wanted.setting), costs)
            if not gate or wanted.gain_seconds > cost:
                yield from _change(at, wanted.setting, how)
        at.take((yield from Run(clocks=a())))


# ------------------------------------------------------------------------------------------------------ what has happened


@dataclass
class _Progress:
    """The job as far as it has come, and what was measured on the way."""

    job: Job
    knobs: Literal["system", "all"]
    couple_threads: bool
    estimator: Estimator
    stretches: list[Stretch] = field(default_factory=list)
    changes: list[PastReconfiguration] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    refused: set[Setting] = field(default_factory=set)  # by the system, with the nodes that it has
    tried: set[bytes] = field(default_factory=set)  # rows of the initial phase
    clocks: int = 0
    since: float = 0.0  # when the setting came into force
    loss: float = np.nan  # the height it has now
    first_loss: float = np.nan

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.job.seed)
        self.setting = self.job.start
        self.available = tuple(n.name for n in self.job.nodes)
        space = self.job.space
        tuned = tuple(k for k in space.knobs if self.knobs == "all" or k.name.partition("/")[0] in _SYSTEM)
        cores = min(n.cores for n in self.job.nodes)
        self.encoding = Encoding(replace(space, knobs=tuned), cores if self.couple_threads else None)
        self.tried.add(self.row(self.setting).tobytes())
        self.fitted: tuple[int, GaussianPosterior] | None = None  # the posterior of the last fit, and of how many stretches

    def row(self, setting: Setting) -> _Floats:
        return self.encoding.row(self.encoding.space.values(setting))

    @property
    def state(self) -> float:
        """What stands beside the setting in the model's input, now."""
        counts = self.job.target.metric == "clocks"
        return self.job.target.value - self.clocks if counts else self.loss

    def take(self, seen: Window) -> None:
        """Remember a window as a stretch under the setting in force, unless it was under no single one."""
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
        """The setting of a row on the nodes that are there; None for the current one, and where the job would refuse it."""
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
    """The node that a knob is about, if any."""
    head, _, rest = knob.name.partition("/")
    return rest.partition("/")[0] if rest and head != "option" else None


def _change(at: _Progress, setting: Setting, how: Method | None) -> Generator[Action[Any], Any, bool]:
    """Bring the job to `setting`, and remember what it cost or that it was refused."""
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
    """So many rows of settings to begin with, [count, width].

    A Latin hypercube cuts the range of each knob into `count` parts and hits each once, at random or in its centre.
    """
    shape = count, len(encoding.space.knobs)
    if design == "random" or not count:
        return encoding.spread(rng.random(shape))
    return encoding.spread(qmc.LatinHypercube(shape[1], scramble=design == "lhs", rng=rng).random(count))


def _begin_with(at: _Progress, row: _Floats, how: Method | None, apart: bool) -> Generator[Action[Any], Any, bool]:
    """Bring the job to the setting of `row`, or of one drawn anew where that was tried, is not admitted or is refused.

    Where the change is to be made `apart`, all but the roles changes first. False where there is nothing left to try; a job
    whose system refuses goes on as it is for as long.
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


class _Proposal(NamedTuple):
    setting: Setting
    gain_seconds: float  # expected


def _proposal(
    at: _Progress,
    seen: list[Triple],
    span: tuple[float, float],
    surrogate: Surrogate,
    acquisition: _Acquisition,
    incumbent: _Incumbent,
) -> _Proposal | None:
    """The setting that the acquisition function likes best among those the job admits, the current one left out."""
    if len(seen) < 2 or not np.isfinite(at.state):
        return None
    posterior = _posterior(at, seen, span, surrogate)
    current = at.row(at.setting)
    known = np.array([t.row for t in seen])
    best = _reference(at, seen, posterior, incumbent)
    score = {"ei": expected_improvement, "pi": probability, "lcb": lower_bound}[acquisition]
    rows, _ = best_rows(lambda r: score(*posterior(_at_state(r, at.state)), best), at.encoding, known, at.rng)
    for row in rows[:_LOOKED_AT]:
        setting = None if np.array_equal(row, current) else at.admitted(row)
        if setting is not None:
            gain = expected_improvement(*posterior(_at_state(row[None], at.state)), best)
            return _Proposal(setting, float(gain[0]))
    return None


def _span(at: _Progress, end: float) -> tuple[float, float]:
    """What the state is at the end and at the beginning of the job."""
    return (0.0, at.job.target.value) if at.job.target.metric == "clocks" else (end, at.first_loss)


def _posterior(at: _Progress, seen: list[Triple], span: tuple[float, float], surrogate: Surrogate) -> GaussianPosterior:
    """The model of all triples. Its hyper-parameters are fitted anew only now and then, for fitting is what takes time."""
    rows = np.array([np.append(t.row, t.state) for t in seen])
    seconds = np.array([t.seconds for t in seen])
    count = len(at.stretches)
    like = at.fitted[1] if at.fitted is not None and count < _REFIT * at.fitted[0] else None
    posterior = surrogate.posterior(rows, seconds, int(at.rng.integers(2**32)), span=span, like=like)
    if like is None:
        at.fitted = count, posterior
    return posterior


def _reference(at: _Progress, seen: list[Triple], posterior: GaussianPosterior, incumbent: _Incumbent) -> float:
    """The seconds that a new setting has to improve on."""
    if incumbent == "last":
        return seen[-1].seconds
    rows = np.array([t.row for t in seen]) if incumbent == "min" else at.row(at.setting)[None]
    return float(posterior(_at_state(rows, at.state))[0].min())


def _at_state(rows: _Floats, state: float) -> _Floats:
    return np.column_stack([rows, np.full(len(rows), state)])
