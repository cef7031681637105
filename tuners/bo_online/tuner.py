"""Bayesian optimisation of a running job's system settings: TensorFlowOnline (Liu et al., "Towards Self-Tuning Parameter
Servers", 2020), with the choices of its public code as options where the two differ.

First the job runs under its start setting and a few others, each for a while (III-B). From these measurements a Gaussian
process learns T(<X, l>), the seconds that remain if the job continues under setting X from loss l (III-A). Then, again and
again, the setting of the highest expected improvement is proposed, and taken where it gains more than the reconfiguration
costs (III-C). The remaining seconds of a stretch are its seconds per clock times the remaining clocks (IV:
`tuners.bo_online.convergence`). Costs are learnt per technique (V: `tuners.bo_online.costs`). Where we differ or had to
choose:

* It tunes system knobs: roles, threads, 16-bit transfer, graph options, policy and its bound. Learning rate, momentum, batch
  and shares keep their values (``knobs="all"`` tunes them too). The paper says that its knobs do not change quality; 16 bits
  do, and so does the number of workers where no worker waits. The estimate sees that only in the losses. Threads are
  coupled: in all settings of the paper but one, threads within and between operations add up to the cores.
* A clock is one push, and a = 3 pushes per node of the cluster, as in the code: the same for every setting. The paper says
  three per worker (``per="workers"``); then a setting is judged by a number of losses in proportion to its workers, which
  cancels the throughput that is tuned, and one worker seems best. Under BSP it is 10 rounds of the setting's workers, as in
  the code, whose iterations are rounds there: three are too few for a fit (``clocks_per_worker=3``: the paper's).
  b counts the settings after X_0, so that the initial phase has J = a + b a clocks (``counting="code"``: b includes X_0).
* One initial reconfiguration is made in two parts, system settings before roles: random settings mostly change both at
  once, and then their costs could not be separated (``apart=False``: never).
* Initial settings are a Latin hypercube ("centred" is the code's; "random" draws each independently, as the paper says).
* Every a clocks make a triple; of the triples of one setting only the latest counts (``repeats="contiguous"``: all since it
  was last chosen, as in the code, which also pairs a triple with its *last* loss, ``state="last"``).
* epsilon is the target where that is a loss, although the target is a validation loss and the estimate uses training losses.
  For an accuracy see `tuners.bo_online.repository.threshold`. A job that counts clocks needs no estimate: its remaining
  clocks are known, and are the state of the job instead of the loss.
* The remaining clocks are of one fit to the whole job, divided by the progress per clock of a setting where it is
  significantly other (`tuners.bo_online.job_fit`). The model learns seconds per remaining clock, in the logarithm, and
  multiplies them by the clocks that remain. With ``pooled=False`` each stretch is estimated by itself, as in paper and code;
  one without progress then counts as the worst stretch with progress, or as the budget where there is none.
* ``careful`` is ours. A setting is observed for no longer than twice the time that the fastest one takes for a clocks, in
  ever longer windows from one push of each worker on. The initial phase ends early where it would take more time than is
  left, and after it the job takes the best setting that it knows, not the last. A model that would take more than half of
  that to relocate stays where it is; how fast it moves is known from the paper until the job itself has shown it. Only
  settings that were not observed yet are proposed by the acquisition; the best observed one is proposed as well, so that
  the job can go back, for what it is better by beyond two standard errors: the fastest of several known settings is often
  so by chance. The gate asks for the cost, for that of a change back with the probability that the setting is worse, and
  for what its trial is expected to lose. Nothing is gained after the end of the budget. Gains are scaled by what earlier
  trials, or changes back, have kept of their promises. Trials take at most 20 % of the job's time by now, not counting
  those that save as much as they took. Decisions without a change make the search rarer: after the 1st, 2nd, 4th, 8th.
* With ``pooled``, seconds per remaining clock do not depend on the loss, which is then no input of the model: its noise
  would make decisions. A setting that was observed is judged by its own estimate, another one by the model.
* The incumbent is the best setting so far *at the current loss* ("current": the current setting, at that loss; "last":
  the seconds of the last triple unchanged, as in the code). The gate compares seconds with seconds; the code measures costs
  and never uses them (``gate=False``). PI and LCB are not in seconds: they choose the setting, and the gate uses the
  expected improvement.
* A bound on staleness is a knob only where a policy that the job may have knows one. Settings under another policy that
  differ only in it are one setting.
* Pushes during a reconfiguration belong to no setting and are left out, as is a stretch in which a node was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Action, Evaluation, Job, Method, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.applicability import nothing_to_tune_if
from tuners.bo_online.convergence import ESTIMATORS, Estimator, Form, LossCurve
from tuners.bo_online.costs import (
    RELOCATING,
    RELOCATIONS,
    PastReconfiguration,
    change_seconds,
    published_seconds,
    techniques,
)
from tuners.bo_online.repository import Observations, Repeats, Stretch, StretchMemory, contiguous, threshold, triples
from tuners.bo_online.surrogate import (
    SURROGATES,
    Encoding,
    GaussianPosterior,
    Surrogate,
    best_rows,
    expected_improvement,
    lower_bound,
    probability,
    without,
)
from tuners.factory_options import AboveZero, Count, options_checked_by
from tuners.reasons import changes, short
from tuners.settings import BY_STALENESS, Choice, Knob

__all__ = [
    "Design",
    "JobHistory",
    "Proposal",
    "Trial",
    "bo_online",
    "initial_rows",
    "kind_of",
    "proposals",
    "stretch_clocks",
]

_Floats = NDArray[np.float64]
_Part = TypeVar("_Part", Estimator, Surrogate)
_Predict: TypeAlias = Callable[[_Floats], tuple[_Floats, _Floats]]  # mean and deviation of the remaining seconds of rows
Design = Literal["lhs", "centred", "random"]
_Acquisition = Literal["ei", "pi", "lcb"]
_Incumbent = Literal["current", "min", "last"]

_SYSTEM = ("worker_count", "role", "policy", "staleness", "intra_threads", "inter_threads", "transfer_bits", "option")
_STATISTICAL = ("policy", "staleness", "transfer_bits", "batch_size", "loads", "learning_rate", "momentum")
_PUSHES, _ROUNDS = 3, 10  # of each worker under one setting: without and with a barrier (BSP)
_DRAWS = 100  # at most, for an initial setting that the job admits
_SLOW = 2.0  # times the least seconds per clock seen: a slower setting is observed for fewer clocks
_SHARE_OF_COUNTED = 0.25  # of the seconds left, what the initial phase may take where the target counts clocks or samples
_SHARE_OF_ESTIMATED = 1.0  # the same where the seconds left are estimated from losses: early estimates are too low
_MOVE = 0.5  # of what the initial phase may take, that one change may: a setting would have to be twice as fast to repay it
_SEARCH = 0.2  # of the job's seconds by now, that trials may have taken without saving them
_ERRORS = 2.0  # standard errors, by which one known setting must be better than another to replace it
_FAITH = 0.1  # share of the time left that trials may promise in vain before their promises count half
_REFUSALS = 3  # by the system, before an initial setting is given up
_LOOKED_AT = 500  # of the best candidates, for one that the job admits
_REFIT = 1.1  # growth of the number of observations after which hyper-parameters are fitted again


def _no_system_knob_is_free(job: Job, knobs: Literal["system", "all"]) -> str:
    return "" if _tuned(job, knobs) else f"None of the {'system' if knobs == 'system' else 'tuned'} knobs is free here."


def _tuned(job: Job, knobs: Literal["system", "all"]) -> tuple[Knob, ...]:
    policy = job.space.knob("policy")
    policies = policy.options if isinstance(policy, Choice) else (job.start.policy,)
    able = [k for k in job.space.knobs if k.name != "staleness" or not set(BY_STALENESS).isdisjoint(policies)]
    return tuple(k for k in able if knobs == "all" or k.name.partition("/")[0] in _SYSTEM)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that has no effect beside another one."""
    for name, usual in (("estimator", "ours"), ("state", "before")):
        if options["pooled"] and options[name] != usual:
            raise ValueError(
                f"Cannot use {name}={options[name]!r} with pooled=true: it is about stretches that are estimated one by "
                "one, and this is one fit to the whole job. Add pooled=false."
            )
    for name in ("clocks_per_worker", "per"):
        if options["clocks"] is not None and options[name] is not None:
            raise ValueError(
                f"Cannot use {name}={options[name]!r} with clocks={options['clocks']}: clocks alone say for how long a "
                "setting is observed; leave one of them out."
            )


@options_checked_by(_check_options)
@nothing_to_tune_if(_no_system_knob_is_free)
def bo_online(
    job: Job,
    *,
    settings: Count = 10,
    clocks_per_worker: Count | None = None,
    per: Literal["nodes", "workers"] | None = None,
    clocks: Count | None = None,
    counting: Literal["paper", "code"] = "paper",
    design: Design = "lhs",
    knobs: Literal["system", "all"] = "system",
    couple_threads: bool = True,
    epsilon: AboveZero | None = None,
    estimator: Form | Estimator = "ours",
    repeats: Repeats = "latest",
    state: Literal["before", "last"] = "before",
    surrogate: Form | Surrogate = "ours",
    acquisition: _Acquisition = "ei",
    incumbent: _Incumbent = "min",
    gate: bool = True,
    apart: bool = True,
    pooled: bool = True,
    careful: bool = True,
    method: Method = "relocate",
) -> Tuner:
    """Try `settings` settings for a clocks each; then, every a clocks, take the setting that promises the earliest end.

    `clocks` fixes a; otherwise a is `clocks_per_worker` (3, or 10 under BSP) times the number of nodes or workers. `method`
    is how the job is reconfigured, where the system has it, else the first method. A job without such knobs just runs.

    Args:
        job: what is tuned.
        settings: settings of the initial phase, b.
        clocks_per_worker: a divided by the number of nodes or workers; by default 3, and 10 under BSP.
        per: whether a counts pushes per node of the cluster, or per worker of the setting; by default workers under BSP, so
            that a is in rounds, and else nodes.
        clocks: a itself, in pushes, in place of the two above.
        counting: whether the start setting is one more than b, or one of them.
        design: how initial settings are drawn: a Latin hypercube, its cells' centres, or independently.
        knobs: the knobs of the system, or all that are free.
        couple_threads: whether threads within and between operations add up to the cores.
        epsilon: the training loss at which the job is taken to end; by default from the target.
        estimator: with `pooled=False`, how the remaining clocks of a stretch are estimated: our way, the paper's, or that of
            its public code.
        repeats: which triples of one setting count.
        state: with `pooled=False`, whether a triple has the loss before its setting was used, or the last one.
        surrogate: the Gaussian process: ours, the paper's, or that of its public code.
        acquisition: expected improvement, probability of improvement, or lower confidence bound.
        incumbent: what an improvement is measured against: the best setting so far, the current one, or the last triple.
        gate: whether a setting must gain more than the reconfiguration is expected to cost.
        apart: whether one initial reconfiguration is made in two parts, so that costs can be told apart.
        pooled: whether the remaining clocks are fitted to the whole job, or to each stretch by itself.
        careful: whether it spends less on settings that do not pay, see above.
        method: how the job is reconfigured, where the system has that method.
    """
    if min(settings, *(1 if given is None else given for given in (clocks_per_worker, clocks))) < 1:
        raise ValueError(
            f"Cannot tune with settings={settings}, clocks_per_worker={clocks_per_worker}, clocks={clocks}: "
            "give at least 1 of each."
        )
    _check_options({**locals()})
    estimates, models = _of_form("estimator", estimator, ESTIMATORS), _of_form("surrogate", surrogate, SURROGATES)
    history = JobHistory(job, knobs, couple_threads, estimates, job.method(method), careful=careful)
    if not history.encoding.space.knobs:
        return

    def observed() -> Generator[Action[Any], Any, None]:
        whole = clocks or stretch_clocks(history.setting, len(history.available), clocks_per_worker, per)
        return _observe(history, whole, min(len(history.setting.workers), whole) if careful and not clocks else whole)

    def known() -> Observations:
        history.epsilon = threshold(job.target, history.evaluations, history.first_loss, epsilon)
        observe = partial(triples, pooled=pooled, clocks=history.clocks, done=history.done, memory=history.memory)
        return observe(history.stretches, job.target, job.budget_seconds, history.epsilon, estimates, repeats, state)

    # The initialisation phase, III-B.
    yield from observed()
    if history.blind:
        return
    share = _SHARE_OF_COUNTED if job.target.counts else _SHARE_OF_ESTIMATED
    began, rows = history.since, initial_rows(history.encoding, settings - (counting == "code"), history.rng, design)
    for tried, row in enumerate(rows):
        spent = (history.since - began) * (1 + 1 / tried) if tried else 0.0  # with the next setting
        most = share * _least_seconds_left(known()) if careful else np.inf
        if spent > most:
            break
        two_parts = apart and frozenset({"SSR"}) not in {c.needed for c in history.changes}
        why = f"initial setting {tried + 1} of {len(rows)}"
        if (yield from _begin_with(history, row, _MOVE * most, two_parts, why)):
            yield from observed()

    # The online tuning phase, III-C.
    quiet, due = 0, False  # decisions since the last change; whether to search for a new setting
    while True:
        # Where nothing pays, hardly anything is learnt: search after 1, 2, 4, 8, ... decisions without a change.
        due = due or (quiet > 0 and quiet & (quiet - 1) == 0)
        search = not careful or (due and history.tried_seconds <= _SEARCH * history.since)
        begun, due, quiet = history.since, due and not search, quiet + 1
        for wanted in proposals(history, known(), models, acquisition, incumbent, search=search, careful=careful):
            cost = history.cost(wanted.setting)
            if not gate or wanted.gain_seconds > cost * (1 + wanted.back) + wanted.risk_seconds:
                if (yield from _change(history, wanted.setting, f"{wanted.why}; the change costs {short(cost)} s")):
                    history.trial, quiet = wanted.trial, 1
                break
        yield from observed()
        if history.trial is not None and not history.trial.known:
            history.trial = history.trial._replace(seconds=history.since - begun)
            history.tried_seconds += history.since - begun


def _of_form(option: str, given: Form | _Part, forms: Mapping[Form, _Part]) -> _Part:
    """What an option names, or is. Raises ValueError for an unknown name."""
    if not isinstance(given, str):
        return given
    if given not in forms:
        raise ValueError(f"Cannot use {option} {given!r}: choose one of {', '.join(forms)}.")
    return forms[given]


def stretch_clocks(
    setting: Setting, nodes: int, clocks_per_worker: int | None = None, per: Literal["nodes", "workers"] | None = None
) -> int:
    """a, the clocks for which a setting is observed, on a cluster of `nodes` nodes; the options are those of `bo_online`."""
    rounds = setting.waits_for_all
    each = clocks_per_worker or (_ROUNDS if rounds else _PUSHES)
    return each * (len(setting.workers) if per == "workers" or (per is None and rounds) else nodes)


# ------------------------------------------------------------------------------------------------------------ the job


class JobHistory:
    """The job so far, and its measurements."""

    def __init__(
        self,
        job: Job,
        knobs: Literal["system", "all"],
        couple_threads: bool,
        estimator: Estimator,
        method: Method | None = None,
        *,
        careful: bool = True,
    ) -> None:
        self.job, self.estimator = job, estimator
        self.method, self._careful = method, careful  # how the job is reconfigured; None: by its first method
        self.stretches: list[Stretch] = []
        self.memory = StretchMemory(estimator)  # of the stretches before the one that is being observed
        self.changes: list[PastReconfiguration] = []
        self.evaluations: list[Evaluation] = []
        self.refused: set[Setting] = set()  # by the system, with its present nodes
        self.clocks, self.samples = 0, 0.0
        self.epsilon = np.nan  # the training loss at which the job ends; nan where that is not known
        self.since = 0.0  # second from which on the setting is in force
        self.loss = self.first_loss = np.nan  # present and first level
        self.fitted: tuple[int, GaussianPosterior] | None = None  # number of stretches at the last fit, and its posterior
        self.trial: Trial | None = None  # that is being made
        self.promised, self.kept = [_FAITH] * 2, [_FAITH] * 2  # by trials and by changes back: shares of the time left
        self.tried_seconds = 0.0  # that trials took after the initial phase, less what they save
        self.rng = np.random.default_rng(job.seed)
        self.setting = job.start
        self.available = tuple(n.name for n in job.nodes)
        tuned = _tuned(job, knobs)
        cores = min(n.cores for n in job.nodes)
        self.encoding = Encoding(replace(job.space, knobs=tuned), cores if couple_threads else None)
        self.tried = {self.row(self.setting).tobytes()}  # rows of the initial phase

    def row(self, setting: Setting) -> _Floats:
        return self.encoding.row(self.encoding.space.values(setting))

    @property
    def done(self) -> float:
        """The work by now, in the unit of a target that counts."""
        return self.samples if self.job.target.metric == "samples" else self.clocks

    @property
    def state(self) -> float:
        """The model's input besides the setting, now: the loss, or the remaining clocks or samples."""
        return self.job.target.value - self.done if self.job.target.counts else self.loss

    @property
    def span(self) -> tuple[float, float]:
        """The state at the end and at the beginning of the job."""
        return (0.0, self.job.target.value) if self.job.target.counts else (self.epsilon, self.first_loss)

    @property
    def budget_left(self) -> float:
        """The seconds that a better setting can save at most."""
        return max(self.job.budget_seconds - self.since, 0.0)

    @property
    def blind(self) -> bool:
        """Whether the job tells no loss of a mini-batch, as recorded runs do: then no setting can be told from another."""
        losses = [s.curve.losses for s in self.stretches]
        return not self.job.target.counts and bool(losses) and all(np.isnan(one).all() for one in losses)

    def cost(self, setting: Setting) -> float:
        """The expected seconds of a change to `setting`."""
        needed = techniques(self.setting, setting)
        seconds = change_seconds(self.changes, needed)
        if self._careful and not any(c.needed & RELOCATIONS for c in self.changes):
            seconds += published_seconds(needed, self.job.model_bytes, self.method or self.job.methods[0])
        return seconds

    def in_place(self, setting: Setting) -> Setting:
        """`setting` with data and model where they are now."""
        return replace(setting, **{f: getattr(self.setting, f) for f in RELOCATING})

    def trust(self, *, known: bool) -> float:
        """What changes to known settings, or trials of others, have saved so far over what the model had promised: the gains
        of further ones are scaled by it."""
        return self.kept[known] / self.promised[known]

    def judge(self, seconds: Callable[[_Floats], float]) -> None:
        """Compare the trial that was made with its promise, by the remaining `seconds` under a row."""
        if self.trial is not None:
            before, known = seconds(self.trial.instead_of), self.trial.known
            saved = max(0.0, 1 - seconds(self.trial.row) / before) if before > 0 else 0.0
            self.promised[known] += self.trial.promised
            self.kept[known] += min(saved, self.trial.promised)
            self.tried_seconds -= min(self.trial.seconds, saved * before)
            self.trial = None

    def take(self, seen: Window) -> None:
        """Add a window as a stretch under the current setting, unless its setting changed or a node was lost."""
        available = tuple(n.name for n in seen.nodes or self.job.nodes)
        setting = seen.setting or self.setting
        used = set(self.setting.workers + self.setting.servers)
        lost = any(e.node in used and e.event in ("left", "failed") for e in seen.events)
        mine = seen.pushes.seconds > self.since
        losses = seen.pushes.loss[mine]
        if len(losses) and setting == self.setting and not lost:
            share = len(losses) / seen.clocks * sum(w.samples for w in seen.workers)
            self._add(losses, seen.end_seconds - max(self.since, seen.start_seconds), seen.clocks - len(losses), share)
        if available != self.available:
            self.refused.clear()
        self.evaluations += seen.evaluations
        self.clocks += seen.clocks
        self.samples += sum(w.samples for w in seen.workers)
        self.setting, self.available, self.since = setting, available, seen.end_seconds

    def _add(self, losses: _Floats, seconds: float, skipped: int, samples: float) -> None:
        workers = len(self.setting.workers)
        if not self.stretches:
            self.first_loss = self.loss = self.estimator.level(losses, workers, first=True)
        curve = LossCurve(losses, self.loss, self.clocks + skipped, workers)
        self.loss = self.estimator.level(losses, workers)
        row, kind = self.row(self.setting), kind_of(self.setting)
        self.stretches.append(Stretch(row, curve, seconds, self.loss, kind, samples))

    def admitted(self, row: _Floats) -> Setting | None:
        """The setting of a row on the available nodes; None for the current setting, and where the job would refuse it."""
        values, nodes = self.encoding.values(row), tuple(n for n in self.job.nodes if n.name in self.available)
        names = self.encoding.space.among(nodes, self.setting).names
        try:
            setting = self.job.space.among(nodes, self.setting).setting({name: values[name] for name in names})
            self.job.space.check(setting, self.setting)
        except (Rejected, ValueError):
            return None
        return None if setting == self.setting or setting in self.refused else setting


def kind_of(setting: Setting) -> tuple[object, ...]:
    """What of a setting, besides the number of workers, may change the progress per clock."""
    return tuple(getattr(setting, f) for f in _STATISTICAL)


def _change(history: JobHistory, setting: Setting, why: str) -> Generator[Action[Any], Any, bool]:
    """Reconfigure the job to `setting`, and record the cost or the refusal; whether it was done."""
    try:
        cost = yield from Reconfigure(setting, method=history.method, reason=f"{changes(history.setting, setting)}: {why}")
    except Rejected:
        history.refused.add(setting)
        return False
    history.since += cost.seconds
    if cost.done:
        history.changes.append(PastReconfiguration(techniques(history.setting, setting), cost.seconds))
        history.setting = setting
    return cost.done


def _observe(history: JobHistory, clocks: int, least: int) -> Generator[Action[Any], Any, None]:
    """Run the job under its setting for `clocks`; for fewer, but at least `least`, where it is slow compared with others."""
    history.memory.follow(history.stretches)
    fastest, own, before = history.memory.fastest, history.memory.last(history.row(history.setting)), len(history.stretches)
    piece = clocks
    if history.stretches and least < clocks:
        piece = least if own is None else _worthwhile(clocks, least, fastest, own.seconds / len(own.curve.losses))
    done = 0
    while piece > 0:
        count = len(history.stretches)
        history.take((yield from Run(clocks=piece)))
        done += piece
        if own is not None or done >= clocks or len(history.stretches) == count:
            break
        # The first pushes after a change were begun before it, and come sooner than later ones: look again and again.
        seconds = history.stretches[-1].seconds / len(history.stretches[-1].curve.losses)
        spent = sum(s.seconds for s in history.stretches[before:])
        worth = int((_SLOW * clocks * fastest - spent) / seconds + 1e-9) if seconds > 0 else clocks
        piece = min(done, clocks - done, worth)
    history.stretches[before:] = contiguous(history.stretches[before:])


def _worthwhile(clocks: int, least: int, fastest: float, own: float) -> int:
    """How many of the clocks to run where one takes `own` seconds: no longer than twice as long as with the fastest."""
    return int(np.clip(_SLOW * clocks * fastest / own, least, clocks)) if own > 0 else clocks


# ------------------------------------------------------------------------------------------ the initialisation phase (III-B)


def initial_rows(encoding: Encoding, count: int, rng: np.random.Generator, design: Design) -> _Floats:
    """`count` rows of initial settings, [count, width].

    A Latin hypercube divides the range of each knob into `count` parts and uses each part once, at random or its centre.
    """
    shape = count, len(encoding.space.knobs)
    if design == "random" or not count:
        return encoding.spread(rng.random(shape))
    from scipy.stats import qmc  # here, because `scipy.stats` takes half a second, and other tuners import this module

    return encoding.spread(qmc.LatinHypercube(shape[1], scramble=design == "lhs", rng=rng).random(count))


def _least_seconds_left(seen: Observations) -> float:
    """The seconds to the end under the best of the known settings; infinite where nothing is known of the end."""
    return seen.clocks * min((t.seconds / t.clocks for t in seen.triples), default=np.inf)


def _begin_with(
    history: JobHistory, row: _Floats, most_seconds: float, apart: bool, why: str
) -> Generator[Action[Any], Any, bool]:
    """Reconfigure the job to the setting of `row`, or of a new random row where that was tried or is refused.

    Data and model stay where they are if the change is expected to take more than `most_seconds`. With `apart`, all but the
    roles changes first. False where no setting is left to try; where the system refuses all, or all take too long, the job
    runs under its present setting instead.
    """
    refusals, takes_too_long = 0, False
    for _ in range(_DRAWS):
        setting = history.admitted(row)
        if setting is not None and history.cost(setting) > most_seconds:
            takes_too_long = True
            setting = history.in_place(setting)
        key = history.row(setting).tobytes() if setting is not None else b""
        if setting is not None and key not in history.tried:
            history.tried.add(key)
            if apart and techniques(history.setting, setting) > {"SSR"}:
                first = history.in_place(setting)
                yield from _change(history, first, f"{why}, all but the roles, so that costs can be told apart")
            if (yield from _change(history, setting, why)):
                return True
            refusals += 1
            if refusals == _REFUSALS:
                break
        row = initial_rows(history.encoding, 1, history.rng, "random")[0]
    return takes_too_long or refusals > 0


# ------------------------------------------------------------------------------------------- the online tuning phase (III-C)


class Proposal(NamedTuple):
    """The setting to take next, the seconds that it is expected to save, and what a trial of it may cost."""

    setting: Setting
    gain_seconds: float
    back: float = 0.0  # probability that it proves to be worse, and the job has to change again
    risk_seconds: float = 0.0  # that a trial of it is expected to lose, as it may be slower
    trial: Trial | None = None
    why: str = ""  # for people: what it is expected to save


class Trial(NamedTuple):
    """A change that is being made: what the model promises."""

    row: _Floats
    instead_of: _Floats  # row of the best setting known before; of a change back, of the setting before
    promised: float  # expected gain, as a share of the time left
    known: bool = False  # the setting was observed before
    seconds: float = 0.0  # that a new setting took, with the change to it


def proposals(
    history: JobHistory,
    seen: Observations,
    surrogate: Surrogate,
    acquisition: _Acquisition,
    incumbent: _Incumbent,
    *,
    search: bool,
    careful: bool,
) -> Iterator[Proposal]:
    """With `search`, the setting of the best score of the acquisition among those that the job admits; if `careful`, that
    were not observed yet.

    Then, if `careful`, the best of those that were. Neither where that is the current one.
    """
    if len(seen.triples) < 2 or not np.isfinite(history.state):
        return
    posterior = _posterior(history, seen, surrogate)
    known = np.array([t.row for t in seen.triples])
    best = _reference(history, seen, posterior, incumbent)
    estimates = {t.row.tobytes(): seen.clocks * t.seconds / t.clocks for t in seen.triples} if seen.stateless else {}

    def seconds(row: _Floats) -> float:
        """As estimated where the setting was observed and the state does not matter, else by the model."""
        found = estimates.get(row.tobytes())
        return float(posterior(_at_state(row[None], history.state))[0][0]) if found is None else found

    leaders = known[np.argsort([seconds(row) for row in known], kind="stable")]
    if careful:
        history.judge(seconds)
    gain = partial(expected_improvement, log=surrogate.scale == "log")
    if search:
        scores: dict[_Acquisition, Callable[..., _Floats]] = {"ei": gain, "pi": probability, "lcb": lower_bound}
        score = scores[acquisition]
        rows, _ = best_rows(
            lambda r: score(*posterior(_at_state(r, history.state)), best), history.encoding, known, history.rng
        )
        if careful:  # a setting that was observed is judged by what it took, below; another one by its promise
            rows = without(rows, known)
        chosen = _first_admitted(history, rows[:_LOOKED_AT])
        if chosen is not None:
            row, setting = chosen
            mean, deviation = posterior(_at_state(row[None], history.state))
            promised = float(gain(mean, deviation, best)[0])
            expected = f"{short(float(mean[0]))} +- {short(float(deviation[0]))} s left"
            why = f"the model expects {expected}, against {short(best)} s; expected improvement {short(promised)} s"
            if careful:
                risk = _trial_share(history, seen) * max(0.0, promised + float(mean[0]) - best)
                back = 1.0 - float(probability(mean, deviation, best)[0])
                trial = Trial(row, leaders[0], promised / best)
                within = min(1.0, history.budget_left / best) if best > 0 else 1.0
                yield Proposal(setting, promised * within * history.trust(known=False), back, risk, trial, why)
            else:
                yield Proposal(setting, promised, why=why)
    if careful:
        chosen = _first_admitted(history, leaders)
        if chosen is not None:
            here = history.row(history.setting)
            now, then = seconds(here), seconds(chosen[0])
            sure = now - then - (_ERRORS * _error(history, (here, now), (chosen[0], then)) if seen.stateless else 0.0)
            promise = Trial(chosen[0], here, max(0.0, 1 - then / now), known=True)
            within = min(1.0, history.budget_left / now) if now > 0 else 1.0
            why = f"known from before, {short(then)} s left instead of {short(now)} s"
            why += f", {short(sure)} s of that beyond two standard errors" if seen.stateless else ""
            yield Proposal(chosen[1], sure * within * history.trust(known=True), trial=promise, why=why)


def _error(history: JobHistory, *known: tuple[_Floats, float]) -> float:
    """The standard error of a difference of seconds, each known by what was observed of its row."""
    scatter, memory = history.memory.scatter, history.memory
    # Where work is counted, the latest stretch of a setting tells its seconds.
    counts = [1 if history.job.target.counts else max(memory.observed(row), 1) for row, _ in known]
    return float(np.hypot(*(scatter * seconds / np.sqrt(n) for (_, seconds), n in zip(known, counts, strict=True))))


def _first_admitted(history: JobHistory, rows: _Floats) -> tuple[_Floats, Setting] | None:
    """The first of `rows` that the job admits, and its setting; None where the current setting comes before."""
    current = history.row(history.setting)
    for row in rows:
        if np.array_equal(row, current):
            return None
        setting = history.admitted(row)
        if setting is not None:
            return row, setting
    return None


def _trial_share(history: JobHistory, seen: Observations) -> float:
    """The share of the remaining clocks that a trial takes."""
    return min(1.0, max(len(s.curve.losses) for s in history.stretches) / max(seen.clocks, 1.0))


def _posterior(history: JobHistory, seen: Observations, surrogate: Surrogate) -> _Predict:
    """The model of all triples, in seconds from now on.

    It learns seconds per remaining clock, where these are estimated for the whole job: they do not fall as the job goes on.
    Hyper-parameters are fitted only now and then, because the fit takes most of the time.
    """
    rows = np.array([np.append(t.row, 0.0 if seen.stateless else t.state) for t in seen.triples])
    seconds = np.array([t.seconds / t.clocks for t in seen.triples])
    count = len(seen.triples)
    fitted = history.fitted
    like = fitted[1] if fitted is not None and fitted[0] <= count < _REFIT * fitted[0] else None
    posterior = surrogate.posterior(rows, seconds, int(history.rng.integers(2**32)), span=history.span, like=like)
    if like is None:
        history.fitted = count, posterior

    def predict(rows: _Floats) -> tuple[_Floats, _Floats]:
        mean, deviation = posterior(_at_state(rows[:, :-1], 0.0) if seen.stateless else rows)
        return seen.clocks * mean, seen.clocks * deviation

    return predict


def _reference(history: JobHistory, seen: Observations, posterior: _Predict, incumbent: _Incumbent) -> float:
    """The seconds that a new setting must improve on."""
    if incumbent == "last":
        return seen.triples[-1].seconds
    rows = np.array([t.row for t in seen.triples]) if incumbent == "min" else history.row(history.setting)[None]
    return float(posterior(_at_state(rows, history.state))[0].min())


def _at_state(rows: _Floats, state: float) -> _Floats:
    return np.column_stack([rows, np.full(len(rows), state)])
