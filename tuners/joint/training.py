"""The running job as `tuners.joint` sees it: the branch that trains, its level, its snapshots, the available machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Job,
    Method,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    SyncPolicy,
    Tuner,
    Window,
)
from tuners.joint.learning_model import HELPED_NATS, Gauge, MinibatchLosses
from tuners.joint.machine_losses import MachineLosses
from tuners.joint.system_model import SystemModel

__all__ = ["Glance", "JobOver", "Snapshot", "Steps", "Training", "changed_cheaply", "machines_of", "relayed"]

T = TypeVar("T")

Steps: TypeAlias = Generator[Action[Any], Any, T]
"""Actions, and in the end a result."""

_Room: TypeAlias = tuple[int, dict[str, float], tuple[str, ...], frozenset[str]]

_WINDOWS = 4  # windows that one may be as long as, where there is nothing to decide before
_EVALUATION_SHARE = 0.05  # of a window's seconds that an evaluation may take
_DEAR_SHARE = 0.2  # of the longest window: an evaluation that takes more is left to the job itself
_RULE = ("policy", "staleness", "quorum")  # who waits for whom
_HEAT = ("learning_rate", "momentum", "outer_rate", "outer_momentum", *_RULE)
_LEARNING = (*_HEAT, "batch_size", "local_steps", "node_steps")  # what takes effect without moving anything
_AS_UNTRAINED = 0.05  # nats that a model's loss differs from that of the untrained one it may stand for
_RECOVERY = 3  # windows in which a model that was trained too hot is as good as before, or is given up
_EVALUATIONS = 3  # further ones, after a push of each worker, where a loss of machines has prevented the first
_PATIENCE = 8  # mini-batches per worker in which the system may end what it is doing to the branch
_PACE = 1.5  # factor between seconds per push that noise does not explain in two windows
_LEAST_SAMPLES = 128  # in a window: from fewer, a rate cannot be judged
_CHEAPEST_FIRST: tuple[Method, ...] = ("relocate", "migrate", "checkpoint")


class JobOver(Exception):
    """The job has reached its target or the end of its budget."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A branch that nobody trains, and what is known of its model."""

    branch: int
    setting: Setting
    named: Setting
    pushes: int
    level: float
    loss: float
    seconds: float  # when it was taken


class Glance(NamedTuple):
    """What the newest mini-batches tell of the model, in nats above the untrained one."""

    level: float  # logarithm of their loss
    noise: float  # its standard error
    doubt: float = 0.0  # its standard error together with that of the untrained model's loss
    validated: float = math.inf  # mean level of the job's own validations; infinite if there was none
    helps: bool = False  # whether the model has clearly learned something


class Training:
    """The branch that trains, its setting, and what is known of it. `level` and `loss` are as of the last measurement."""

    def __init__(self, job: Job, system: SystemModel, *, snapshots: bool = True) -> None:
        self.takes_snapshots = snapshots
        self.job, self.gauge = job, Gauge(job.target)
        self.setting, self.branch = job.start, 0
        # What was chosen last. The system drops machines that are lost, and goes on at the same rate: that is as hot as
        # the rate for fewer workers, which nobody has chosen.
        self.chosen = job.start
        # The same as the system knows it: of a policy that was installed, it has the one that was named before.
        self._named = job.start
        self.seconds = 0.0  # since the job began
        self.level = self.loss = math.inf
        self.diverged = False
        self.available = frozenset(n.name for n in job.nodes)
        self.cluster_changed = False  # machines have come or gone, and nobody has asked for a placement since then
        self.change_seconds = 0.0  # the dearest change of the system so far
        self.measured = False  # whether the last window has told the system model anything
        self.usual_push_seconds = 0.0  # between two pushes, when the system was last chosen; 0: not known
        self.push_seconds = self._before = 0.0  # the same in the last window, and in the one before it
        self.newest: Window | None = None
        self.validated = list[float]()  # levels by the job's own validations in the last window
        self.machine_losses = MachineLosses(job)
        self._branches = 1  # that the job has
        self._refused: _Room | None = None  # as a fork was last refused
        self.first: Snapshot | None = None  # of the untrained model, where it was kept
        self._system = system
        self.minibatches = MinibatchLosses([n.name for n in job.nodes] if job.space.frees("load") else ())
        self.lowest_level = math.inf  # of all validations, since the last return to a snapshot
        self._placed_seconds = 0.0  # when the system was last changed
        self._unfinished = set[str]()  # workers whose cycle had begun when local steps or loads were changed
        self.pushes = 0  # of the branch, since the job began
        self.samples = 0  # of all windows: for jobs that count them and return to no snapshot
        self._wanted: dict[str, Any] = {}  # values that were refused and are asked for again
        self._check_clocks = 0  # the job validates by itself after every so many pushes; 0: not known

    # ----------------------------------------------------------------------------------------------------- training

    def run(self, clocks: int, why: str = "") -> Steps[Window]:
        """Train so many clocks. Raises JobOver at the end of the job, and where the branch cannot train."""
        if self._wanted:
            yield from self.change(self.setting, "asked for again")
        yield from self._give_back()
        return (yield from self._see(Run(clocks=max(1, clocks), branch=self.branch, reason=why)))

    def run_seconds(self, seconds: float, why: str) -> Steps[None]:
        """Train for so long, as the job begins. Raises as `run`."""
        yield from self._see(Run(seconds=seconds, branch=self.branch, reason=why))

    def _see(self, action: Run) -> Steps[Window]:
        """Carry out `action`, and take in what it tells."""
        window = yield from self._run(action)
        self.seconds = window.end_seconds
        self.pushes += window.clocks
        self.samples += sum(w.samples for w in window.workers)
        if window.status in ("target", "budget"):
            raise JobOver
        self.diverged = window.status != "running"
        if window.clocks:
            self._before, self.push_seconds = self.push_seconds, window.seconds / window.clocks
        if math.isinf(self.gauge.untrained) and len(window.pushes.loss):
            # Not those of clock 0: where a machine is lost before the first push, all workers begin their second mini-batch.
            first = window.pushes.clock == window.pushes.clock.min()
            self.gauge.begin(float(np.mean(window.pushes.loss[first])), batches=int(np.sum(first)))
        if len(window.pushes.loss):
            self.minibatches.see(window.pushes)
        self.newest = window
        self._see_system(window)
        self.machine_losses.see(window)
        self._see_evaluations(window.evaluations)
        return window

    def _see_system(self, window: Window) -> None:
        """Take in what a window tells of the machines, and of changes that the system has made by itself."""
        available = frozenset(n.name for n in window.nodes or self.job.nodes)
        # Pushes before the first event still tell what they take under the setting that was in force by then.
        changed = window.setting is not None and window.setting != self._named
        until = min((e.seconds for e in window.events), default=window.start_seconds if changed else math.inf)
        # What workers that have left had begun to send kept the links busy until it arrived.
        left = ~np.isin(window.pushes.worker, [at for at, n in enumerate(self.job.nodes) if n.name in self.setting.workers])
        self._placed_seconds = max([self._placed_seconds, *window.pushes.seconds[left].tolist()])
        self.measured = self._system.learn(self.setting, window, self._placed_seconds, until, self._finished(window.pushes))
        if window.setting is not None and changed:
            self._named, self.cluster_changed = window.setting, True
            self.setting = _under(self.setting, window.setting) if self._is_installed(self.setting) else window.setting
        if available != self.available:
            self._system.forget(available - self.available)
            self.available, self.cluster_changed = available, True

    def _see_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Take in the job's own validations in a window. The level is that of the newest half, where the last one is of the
        model as it is now; else it is not known."""
        for found in evaluations:
            self.gauge.see(found.loss, found.accuracy)
            self._check_clocks = math.gcd(self._check_clocks, found.clocks)
        self.validated = [self.gauge.level(found.loss, found.accuracy) for found in evaluations]
        self.lowest_level = min([self.lowest_level, *self.validated])
        self.level = math.inf if self.diverged else math.nan
        if evaluations and evaluations[-1].clocks == self.pushes:
            self._take_validated(evaluations)

    def _take_validated(self, evaluations: Sequence[Evaluation]) -> None:
        newest = self.validated[len(evaluations) // 2 :]
        self.loss, self.level = evaluations[-1].loss, sum(newest) / len(newest)

    def _finished(self, pushes: Pushes) -> list[int]:
        """The pushes of cycles that had begun when local steps or loads were changed: they have the numbers before."""
        names = [n.name for n in self.job.nodes]
        first = {names[int(worker)]: place for place, worker in reversed(list(enumerate(pushes.worker)))}
        ended = self._unfinished & set(first)
        self._unfinished -= ended
        return [first[name] for name in ended]

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
        clocks, every, is_dear = self._least_clocks(), self._check_clocks, False
        validates = 0 < every <= 2 * clocks  # the job itself, soon enough
        if not validates and self._system.knows:
            # An evaluation takes time in which nobody trains, so windows are longer where it is dear.
            paid = self.job.evaluate_seconds / self._system.push_seconds(self.setting)  # pushes
            longer = max(clocks, min(math.ceil(paid / _EVALUATION_SHARE), _WINDOWS * clocks))
            # Where it is dear even so, the job's own validation is waited for, if it comes before the end of an evaluation.
            is_dear = paid > _DEAR_SHARE * longer
            validates = is_dear and 0 < every <= longer + paid
            # Else no more time is spent on evaluations than on training.
            clocks = clocks if validates else max(longer, math.ceil(paid))
        if validates:
            clocks = every * max(round((self.pushes + clocks) / every), self.pushes // every + 1) - self.pushes
        before = self.level
        window = yield from self.run(clocks, why)
        if math.isnan(self.level) and (validates or is_dear) and window.evaluations:
            # The job trains on while the tuner thinks, so a few pushes may have followed its validation.
            self._take_validated(window.evaluations)
        if math.isnan(self.level):
            yield from self.evaluate()
        for _ in range(_EVALUATIONS):
            if not math.isnan(self.level) or not window.events:
                break
            # While the system makes up for a loss, no model can be evaluated. To take it for the one before may lose it.
            window = yield from self.run(len(self.setting.workers), "then evaluate: a machine was lost")
            if math.isnan(self.level):
                yield from self.evaluate()
        if math.isnan(self.level):
            self.level = before

    def toward_validation(self) -> Steps[None]:
        """Train until the job next validates by itself, for some windows at the most."""
        left = self._check_clocks - self.pushes % self._check_clocks if self._check_clocks else math.inf
        yield from self.run(int(min(left, _WINDOWS * self._least_clocks())))

    def glance(self, clocks: int = 0) -> Steps[Glance]:
        """Train so many clocks, or about two pushes per worker; the loss of the second half of their mini-batches, and what
        validation told."""
        window = yield from self.run(clocks or self._least_clocks())
        losses = window.pushes.loss[len(window.pushes.loss) // 2 :]
        mean = float(np.mean(losses)) if len(losses) else math.inf
        if self.diverged or not 0 < mean < math.inf:
            return Glance(math.inf, 0.0)
        validated = math.inf
        if window.evaluations:
            levels = [self.gauge.level(e.loss, e.accuracy) for e in window.evaluations]
            validated = sum(levels) / len(levels) - self.gauge.untrained_level
        noise = float(np.std(losses)) / mean / math.sqrt(len(losses))
        # A single mini-batch of a few samples may have a third of the others' loss: logarithms tell how far such lows reach.
        single = float(np.std(np.log(np.maximum(window.pushes.loss, 1e-9))))
        doubt = math.hypot(noise, single / math.sqrt(self.gauge.untrained_batches))
        level = math.log(mean / self.gauge.untrained)
        return Glance(level, noise, doubt, validated, self.gauge.has_learned(level + 2 * noise, validated))

    def recovers(self, kept: Snapshot, setting: Setting, level: float, why: str) -> Steps[bool]:
        """Whether the present model, which was trained too hot, is soon as good as `level` under `setting`.

        What hot windows have learned is hidden by their noise. And where they have thrown the model off, it often comes down
        somewhere flatter, from where it learns faster than `kept`, a snapshot of the time before. That may take as long as
        what going back would lose: a model that needs longer is scarred.
        """
        if self.diverged or not (yield from self.change(setting, why)):
            return False
        nothing = self.gauge.blank_level - HELPED_NATS
        until = 2 * self.seconds - kept.seconds
        for _ in range(_RECOVERY):
            yield from self.window()
            if self.diverged or self.level <= level or self.level > nothing or self.seconds > until:
                break
        return not self.diverged and self.level <= min(level, nothing)

    def _least_clocks(self) -> int:
        steps = self.setting.local_steps
        fewest = max(16, _LEAST_SAMPLES / self.setting.batch_size)  # mini-batches
        return max(2 * len(self.setting.workers), math.ceil(fewest / steps))

    def evaluate(self) -> Steps[None]:
        """Measure the level, if the job can be evaluated."""
        with suppress(Rejected):
            found = yield from Evaluate(self.branch)
            self.seconds = found.seconds
            self.loss = found.loss
            self.gauge.see(found.loss, found.accuracy)
            self.level = self.gauge.level(found.loss, found.accuracy)

    def evaluate_untrained(self) -> Steps[None]:
        """Measure the level of the untrained model, if it was kept or is still the present one."""
        if self.first is None and self.pushes:
            return
        with suppress(Rejected):
            found = yield from Evaluate(self.branch if self.first is None else self.first.branch)
            self.seconds = found.seconds if self.first is None else self.seconds + self.job.evaluate_seconds
            self.gauge.begin(found.loss, found.accuracy)

    @property
    def saves_usd(self) -> bool:
        """Whether the cheapest run is wanted, so that machines that nothing holds are saved."""
        return self.job.target.minimise == "usd"

    @property
    def told_level(self) -> float:
        """The level by the newest validation of the last window, else by the newest half of its mini-batches."""
        if self.validated:
            return self.validated[-1]
        losses = self.newest.pushes.loss[len(self.newest.pushes.loss) // 2 :] if self.newest is not None else ()
        return self.gauge.told_level(float(np.mean(losses))) if len(losses) else math.inf

    @property
    def has_arrived(self) -> bool:
        """Whether the model is as good as the target asks for, so that only the job's own validation is missing."""
        return not self.diverged and self.level <= self.gauge.goal(self.loss)

    @property
    def has_learned(self) -> bool:
        """Whether the newest mini-batches, or a validation, were clearly better than those of a model that knows nothing."""
        loss = self.minibatches.mean
        validated = self.level - self.gauge.untrained_level if math.isfinite(self.level) else math.inf
        return not 0 < loss < math.inf or self.gauge.has_learned(math.log(loss / self.gauge.untrained), validated)

    def has_changed_pace(self) -> bool:
        """Whether the last two windows were both much slower, or both much faster, than when the system was chosen."""
        usual, seen = self.usual_push_seconds, (self._before, self.push_seconds)
        return usual > 0 and (min(seen) > _PACE * usual or 0 < max(seen) < usual / _PACE)

    # ----------------------------------------------------------------------------------------------------- settings

    def insist(self, setting: Setting, why: str, names: tuple[str, ...] = _LEARNING) -> Steps[None]:
        """Reconfigure; where that is refused, because the system is making up for a loss, the values `names` of `setting`
        are asked for again before every window, and with every other change, until they are in force."""
        if not (yield from self.change(setting, why)):
            self._wanted = _differing(setting, self.setting, names)

    def change(self, setting: Setting, why: str) -> Steps[bool]:
        """Reconfigure by the cheapest method; whether the branch now runs under `setting`. Where roles have not changed,
        what learning depends on is asked for again as it was: it was for other machines."""
        asked, now = setting != self.setting, self.setting
        still = {n: value for n, value in self._wanted.items() if getattr(setting, n) == getattr(now, n)}
        setting = replace(setting, **still)
        if setting == now or (yield from self._change_in_steps(setting, why)):
            self._wanted = {}
            self.chosen = self.setting
            return True
        self._wanted |= _differing(now, self.setting, _LEARNING)
        return not asked

    def _change_in_steps(self, setting: Setting, why: str) -> Steps[bool]:
        """What learning depends on first: it takes effect at once, and training goes on while roles change."""
        learning = _with(self.setting, setting, _LEARNING)
        if learning not in (self.setting, setting) and (yield from self._reconfigure(learning, why)):
            why = ""
        return (yield from self._reconfigure(setting, why))

    def placed(self, setting: Setting) -> Setting:
        """`setting` with the present roles, batch, threads and bits: what is not heat."""
        return _with(self.setting, setting, _HEAT)

    def _reconfigure(self, setting: Setting, why: str) -> Steps[bool]:
        """Put the branch under `setting`; a policy that its knobs do not name is installed."""
        named = _under(self._named, setting) if self._is_installed(setting) else setting
        # An installed policy stays until a setting names another one than the last that was named.
        stays = _under(setting, self._named) == _under(self.setting, self._named)
        try:
            if not stays and _under(named, self._named) == self._named:
                yield from Install(self._policy(setting), branch=self.branch, reason=why)
                self.setting = _under(setting, self.setting)
                if named == self._named:
                    return True
                why = ""
            cost = yield from _by_the_cheapest(self.job, Reconfigure(named, branch=self.branch, reason=why))
        except Rejected:
            return False
        self.seconds += cost.seconds
        self.change_seconds = max(self.change_seconds, cost.seconds)
        if cost.done:
            if setting != self.placed(setting):
                self._placed_seconds = self.seconds
            if (setting.local_steps, setting.loads) != (self.setting.local_steps, self.setting.loads):
                self._unfinished = set(setting.workers)
            if setting.loads != self.setting.loads:
                self.minibatches.relative.clear()
            self.setting, self._named = setting, named
        else:  # a machine was lost meanwhile
            self.cluster_changed = True
        return cost.done

    def _policy(self, setting: Setting) -> SyncPolicy:
        """The policy of `setting`. Where nobody waits for local steps, servers average half as many pushes as workers, as in
        FedBuff: a single push changes the model by all that one worker has learned."""
        if setting.policy == "asp" and self.job.space.takes_local_steps:
            return policies.buffered(max(1, len(setting.workers) // 2))
        return policies.of_setting(setting)

    def _is_installed(self, setting: Setting) -> bool:
        """Whether the policy of `setting` is none that the knobs name, where others may be installed."""
        return self.job.installs_policies and not self.job.space.admits(_under(setting, self.job.start))

    # ----------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> Steps[Snapshot | None]:
        """A fork of the branch; None where the job has no room for one. It is not asked for again until it may have."""
        if not self.takes_snapshots or self._refused == self._room:
            return None
        try:
            branch = yield from Fork(self.branch)
        except Rejected:
            self._refused = self._room
            return None
        self._branches += 1
        # Where only an earlier model of the last window was validated, that tells about how good this one is.
        level = self.validated[-1] if math.isnan(self.level) and self.validated else self.level
        return Snapshot(branch, self.setting, self._named, self.pushes, level, self.loss, self.seconds)

    @property
    def _room(self) -> _Room:
        """What decides whether a fork is refused: the branches on servers that have too little memory, or machines that are
        lost, without which the branch does not go on yet."""
        return self._branches, self.setting.held(self.job.blocks, self.job.hottest), self.setting.workers, self.available

    def drop(self, kept: Snapshot | None) -> Steps[None]:
        """Free a snapshot that is not needed any more."""
        if kept is not None and kept.branch != self.branch:
            with suppress(Rejected):
                yield from Free(kept.branch)
                self._branches -= 1

    def return_to(self, kept: Snapshot, setting: Setting, why: str) -> Steps[Snapshot | None]:
        """Continue from `kept`, under `setting`. Returns another snapshot of it."""
        yield from self._leave()
        self.branch, self.setting, self._named, self._wanted = kept.branch, kept.setting, kept.named, {}
        self.chosen = setting
        self.pushes, self.level, self.loss = kept.pushes, kept.level, kept.loss
        self.diverged, self.lowest_level = False, math.inf
        # A snapshot holds the machines of its setting, and they are paid for. But at a rate that is held, what is trained
        # while machines change may spoil an untrained model, so that one is left to `_give_back`.
        moves = self.saves_usd and machines_of(kept.setting) != machines_of(setting)
        moves = moves and (kept.pushes > 0 or self.job.space.frees("learning_rate"))
        again = None if moves else (yield from self.snapshot())
        # Always, because the system may have moved the branch off machines that were lost. It is not known to where.
        if not (yield from self._change_in_steps(setting, why)):
            yield from self.run(1)
            if again is None:
                again = yield from self.snapshot()
            yield from self.insist(_with(self.setting, setting, _LEARNING), why)
        elif moves:
            again = yield from self.snapshot()
        return again

    def begin_again(self, setting: Setting, why: str) -> Steps[bool]:
        """Continue from the untrained model, under `setting`, if it was kept; whether it was."""
        if self.first is None:
            return False
        self.first = yield from self.return_to(self.first, setting, why)
        return True

    def _give_back(self) -> Steps[None]:
        """Keep the present model in place of the untrained one, if that one holds further machines: once it has learned, or
        where it is still about as good. At a rate that is held, not while its loss is higher."""
        first = self.first
        if first is None or not (self.saves_usd and self.pushes):
            return
        moved = math.log(max(self.minibatches.mean, 1e-9)) - math.log(self.gauge.untrained)
        if moved > _AS_UNTRAINED and not self.job.space.frees("learning_rate"):
            return
        if not (self.has_learned or abs(moved) <= _AS_UNTRAINED):
            return
        if machines_of(first.setting) - machines_of(self.setting):
            yield from self.drop(first)
            self.first = yield from self.snapshot()

    def _leave(self) -> Steps[None]:
        """Free the branch. One that the system is still changing has to run until that is done: no other may before."""
        for _ in range(_PATIENCE):
            try:
                yield from Free(self.branch)
            except Rejected:
                if self.diverged:
                    return
                yield from self.run(len(self.setting.workers))
            else:
                self._branches -= 1
                return


def changed_cheaply(job: Job, tuner: Tuner) -> Tuner:
    """`tuner`, whose changes are made by the cheapest method that `job` offers, whichever it asks for."""
    return relayed(tuner, lambda action: _by_the_cheapest(job, action) if isinstance(action, Reconfigure) else iter(action))


def relayed(tuner: Tuner, carry_out: Callable[[Action[Any]], Steps[Any]]) -> Tuner:
    """`tuner`, each action of which is carried out by the steps of `carry_out`; it gets their result, or their Rejected."""
    answer: Any = None
    refusal: Rejected | None = None
    while True:
        try:
            action = tuner.send(answer) if refusal is None else tuner.throw(refusal)
        except StopIteration:
            return
        answer, refusal = None, None
        try:
            answer = yield from carry_out(action)
        except Rejected as refused:
            refusal = refused


def _by_the_cheapest(job: Job, change: Reconfigure) -> Steps[Cost]:
    """Make `change` by the first method that is not refused, the cheapest first. Raises Rejected where all of them are."""
    refusal = Rejected("Cannot reconfigure this job: it offers no method.")
    for method in _CHEAPEST_FIRST:
        if method in job.methods:
            try:
                return (yield from replace(change, method=method))
            except Rejected as refused:
                refusal = refused
    raise refusal


def _under(rule: Setting, setting: Setting) -> Setting:
    """`setting` with the policy of `rule`."""
    return _with(setting, rule, _RULE)


def _with(setting: Setting, other: Setting, names: Sequence[str]) -> Setting:
    """`setting` with the values `names` of `other`."""
    return replace(setting, **{name: getattr(other, name) for name in names})


def _differing(setting: Setting, other: Setting, names: Sequence[str]) -> dict[str, Any]:
    """The values `names` of `setting` that `other` does not have."""
    return {name: getattr(setting, name) for name in names if getattr(setting, name) != getattr(other, name)}


def machines_of(setting: Setting) -> set[str]:
    """The names of the machines that `setting` uses."""
    return {*setting.workers, *setting.servers}
