"""Knobs that no model of `tuners.joint` knows: other values are tried, and what makes more progress per second is kept.

Threads between operations, options of graphs, replicas of hot blocks, copies of rows, mini-batches per pull, and quorums.
Progress is the gradients that count times the rate that they bear: with a updates between pull and push, about 1 / (a + 1/2)
of the highest one, or its root where an update is the mean of a round.

The quorum that is tried is the best one by what every worker takes for its mini-batches. Any other number is halved or,
where that does not serve, doubled, as long as that serves; then the middle of the two best is tried. Of other options, each
is tried. Knobs that do nothing one without the other are set together. How old copies of rows are,
no window tells: they are kept for a few mini-batches only. A trial is made where what it may save is more than what it may
cost; where changes take time, half as much is hoped for after each trial in vain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Job, Pushes, Setting, Window
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import BATCH_GAIN, COPIED, CopyHeat
from tuners.joint.machines.candidates import highest, lowest, options
from tuners.joint.machines.placing import CHANGE_SECONDS, WORTH, Placing
from tuners.settings import OF_CACHES, OF_PULLS, OF_QUORUM, OF_REPLICAS, Choice, Knob

__all__ = ["OtherKnobs", "expected_of_quorum", "progress"]

_Values: TypeAlias = dict[str, Any]  # of fields of a setting

_ALONE = ("inter_threads", *OF_REPLICAS, *OF_PULLS, *OF_QUORUM)
_TOGETHER: tuple[_Values, ...] = (OF_CACHES, OF_REPLICAS)  # with the values where they do nothing
_FIRST = {"cache_rows": math.inf, "cache_clocks": COPIED, "replicas": 2, "hot_blocks": 8}  # that are tried together
_FIELDS = ("options", *_ALONE, *OF_CACHES)
_AT_ONCE = (*OF_CACHES, *OF_PULLS, *OF_QUORUM)  # what servers read at every push or pull
_WINDOW = 32  # pushes, at least, that tell progress
_SAVED = 0.1  # of the seconds that are left, that another value saves on average, as far as is known
_WASTED = 0.2  # of the seconds of a trial, the same
_HOPELESS = 0.6  # times the best progress
_DOUBLINGS = 12  # of a value, at most
_ROUNDING = 1e-6  # of a moment, in seconds


class OtherKnobs:
    """The trials of one job."""

    def __init__(self, job: Job, training: Training, placing: Placing) -> None:
        self._job, self._training, self._placing = job, training, placing
        self._best: _Values = {}  # of the fields that were tried
        self._progress = self._seen = 0.0  # per second: under the best values, and in the newest trial; 0: not measured
        self._failed = 0  # trials, of those whose changes take time

    def run(self) -> Steps[None]:
        """Try every such knob that is free, and hold the best values."""
        training, space = self._training, self._job.space
        kept = (yield from training.snapshots.take()) if any(map(space.frees, (*OF_PULLS, *OF_QUORUM))) else None
        self._best = {name: getattr(training.branch.setting, name) for name in _FIELDS}
        for neutral in _TOGETHER:
            yield from self._together(neutral)
        for knob in space.knobs:
            if knob.name.startswith("option/"):
                for value in options(knob):
                    yield from self._try(self._with(knob, value))
            elif knob.name == "quorum" and self._acts(knob.name):
                yield from self._choose_quorum(knob)
            elif knob.name in _ALONE and self._acts(knob.name):
                yield from self._climb(knob)
        if training.model.diverged and kept is not None:
            kept = yield from training.snapshots.return_to(kept, self._under(self._best), "taken back: it has diverged")
        else:
            why = f"taken back: {self._gain:.2f} times the progress"
            yield from training.branch.insist(self._under(self._best), why, _FIELDS)
        yield from training.snapshots.drop(kept)

    def _acts(self, name: str) -> bool:
        """Whether this knob changes anything, and is not what the rest of the job searches."""
        setting, best = self._training.branch.setting, self._best
        if name in OF_REPLICAS:
            return bool(best["replicas"] > 1 and best["hot_blocks"] > 0)
        if name in OF_QUORUM:
            partial = 0 < best["quorum"] < len(setting.workers)
            return setting.policy == "quorum" and (partial or name == "quorum")
        return not (name in OF_PULLS and isinstance(self._placing.heat, CopyHeat))

    # ---------------------------------------------------------------------------------------------- which values are tried

    def _together(self, neutral: _Values) -> Steps[None]:
        """Try knobs that do nothing yet, because one of them, or one that is held, has its neutral value."""
        knobs = [k for k in map(self._job.space.knob, neutral) if k is not None]
        if not knobs or all(self._best[name] != value for name, value in neutral.items()):
            return
        # Of two that are free, the first value of one does not go with any value of the other.
        begun = [k for k in knobs if len(knobs) > 1 or self._best[k.name] == neutral[k.name]]
        wanted = self._best | {k.name: int(k.nearest(min(_FIRST[k.name], highest(k)))) for k in begun}
        if any(wanted[name] == value for name, value in neutral.items()):
            return
        if (
            neutral is not OF_CACHES
            or self._placing.copies_gain(self._training.branch.setting, wanted["cache_clocks"]) > WORTH
        ):
            yield from self._try(wanted)

    def _climb(self, knob: Knob) -> Steps[None]:
        """Go down the ladder of values or, where that does not serve, up, as long as it serves; then try the middle."""
        now = self._best[knob.name]
        ladder, told = _ladder(knob, now), dict[int, float]()
        first = best = ladder.index(now)
        for step in (-1, 1):
            while (best - first) * step >= 0 and 0 <= best + step < len(ladder):
                told[best] = self._progress
                serves = yield from self._try(self._with(knob, ladder[best + step]))
                told[best + step] = self._seen
                if not serves:
                    break
                best += step
        near = [i for i in (best - 1, best + 1) if told.get(i) and ladder[i] > 0]
        if best != first and near:
            middle = _nearest(knob, math.sqrt(ladder[best] * ladder[max(near, key=told.__getitem__)]))
            if middle not in ladder:
                yield from self._try(self._with(knob, middle))

    def _choose_quorum(self, knob: Knob) -> Steps[None]:
        """Try the quorum that is the best by what the mini-batches of every worker take, if it is another one."""
        training, workers = self._training, len(self._training.branch.setting.workers)
        if training.model.diverged or not self._pays({"quorum": 0}):
            return
        self._progress = yield from self._measured("first, how long the mini-batches of every worker take")
        window, now = training.model.newest, self._best["quorum"] or workers
        allowed = options(knob) if isinstance(knob, Choice) else range(max(int(lowest(knob)), 1), int(highest(knob)) + 1)
        told = (
            {q: expected_of_quorum(window, training.branch.setting, q or workers) for q in allowed}
            if window is not None
            else {}
        )
        wanted = max(told, key=told.__getitem__, default=now)
        if told and told[wanted] > WORTH * expected_of_quorum(window, training.branch.setting, now):
            yield from self._try(self._with(knob, wanted))

    def _with(self, knob: Knob, value: Any) -> _Values:
        """The best values, but this one."""
        _, of_graph, name = knob.name.partition("option/")
        if not of_graph:
            return self._best | {knob.name: value}
        return self._best | {"options": tuple(sorted((dict(self._best["options"]) | {name: value}).items()))}

    # --------------------------------------------------------------------------------------------------------- one trial

    def _try(self, wanted: _Values) -> Steps[bool]:
        """Train under `wanted` for a while; whether that makes more progress than the best so far, and is it from now on."""
        training, self._seen = self._training, 0.0
        branch, model = training.branch, training.model
        changed = {name: value for name, value in wanted.items() if value != self._best[name]}
        if not changed or model.diverged or branch.cluster_changed or not self._pays(changed):
            return False
        words = ", ".join(f"{name} {_words(self._best[name], value)}" for name, value in changed.items())
        if not self._progress:
            self._progress = yield from self._measured("first, what is learned under other knobs as they are")
        if model.diverged or not (yield from branch.change(self._under(wanted), f"{words}, on trial")):
            return False
        window = yield from training.run(2 * len(branch.setting.workers))  # these were begun before
        self._seen = progress(window, branch.setting)
        if not model.diverged and self._gain > _HOPELESS:
            self._seen = yield from self._measured()
        serves = self._gain >= WORTH and not model.diverged
        if serves:
            self._best, self._progress, training.usual_push_seconds = wanted, self._seen, training.push_seconds
        elif not _at_once(changed):
            self._failed += 1
        return serves

    def _measured(self, why: str = "") -> Steps[float]:
        """Progress per second in a window."""
        window = yield from self._training.run(max(2 * len(self._training.branch.setting.workers), _WINDOW), why)
        return progress(window, self._training.branch.setting)

    @property
    def _gain(self) -> float:
        """Times the best progress that the newest trial has made."""
        return self._seen / self._progress if self._progress > 0 else 1.0

    def _under(self, values: _Values) -> Setting:
        return replace(self._training.branch.setting, **values)

    def _pays(self, changed: _Values) -> bool:
        """Whether a trial may save more than it may cost."""
        training, saved = self._training, _SAVED * self._placing.seconds_left()
        cost = _WASTED * 4 * len(training.branch.setting.workers) * training.push_seconds
        if not _at_once(changed):
            saved /= 2**self._failed
            cost += 2 * (training.branch.change_seconds or CHANGE_SECONDS)
        return saved > cost or not self._placing.has_cost_rule


def progress(window: Window, setting: Setting) -> float:
    """The progress per second of a window under `setting`, up to a factor."""
    ages = window.pushes.staleness[_counted(window.pushes, setting)]
    if not len(ages) or window.seconds <= 0:
        return 0.0
    power = BATCH_GAIN if setting.policy in ("bsp", "quorum") else 1.0
    return len(ages) / math.pow(float(np.mean(ages)) + 0.5, power) / window.seconds


def expected_of_quorum(window: Window | None, setting: Setting, quorum: int) -> float:
    """The progress per second to expect of a quorum, up to a factor, from what every worker took for its mini-batches.

    A round ends when so many have pushed, and some grace later; the k-th mini-batches of all workers stand for a round.
    """
    if window is None:
        return 0.0
    pushes = window.pushes
    took = pushes.pull_seconds + pushes.compute_seconds + pushes.push_seconds
    each = [took[pushes.worker == at] for at in np.unique(pushes.worker)]
    rounds = min(map(len, each), default=0)
    # Who has not pushed takes longer than the window.
    silent = [np.full(rounds, window.seconds)] * (len(setting.workers) - len(each))
    sorted_seconds = np.sort([*(x[:rounds] for x in each), *silent], axis=0)
    if not sorted_seconds.size:
        return 0.0
    quorum = min(quorum, len(sorted_seconds))
    ends = np.minimum(sorted_seconds[quorum - 1] + setting.grace_seconds, sorted_seconds[-1])
    # Those that end at one moment do not all count.
    counted = float(np.mean(np.sum(sorted_seconds <= ends, axis=0))) if setting.grace_seconds else float(quorum)
    return counted / math.pow(counted / 2, BATCH_GAIN) / float(np.mean(ends))


def _counted(pushes: Pushes, setting: Setting) -> NDArray[np.bool_]:
    """Which pushes the servers have applied: not those that were too old, or that a round has ended before."""
    if setting.policy == "discard":
        return np.asarray(pushes.staleness <= setting.staleness)
    if setting.policy != "quorum":
        return np.ones(len(pushes.staleness), bool)
    if not setting.grace_seconds:
        return np.asarray(pushes.staleness < (setting.quorum or len(setting.workers)))
    begun = pushes.seconds - pushes.push_seconds - pushes.compute_seconds - pushes.pull_seconds
    ends = np.sort(begun[pushes.wait_seconds > 0])  # who has waited begins when a round ends
    return np.asarray(np.searchsorted(ends, pushes.seconds - _ROUNDING) == np.searchsorted(ends, begun + _ROUNDING))


def _ladder(knob: Knob, now: Any) -> list[Any]:
    """Numbers of a knob in ascending order, with `now`: a factor of two apart; from 0, up from an eighth of the range."""
    if isinstance(knob, Choice):
        return sorted({now, *(o for o in knob.options if isinstance(o, int | float))})
    unit = now or highest(knob) / 8
    return sorted({now, *(_nearest(knob, unit * 2.0**i) for i in range(-_DOUBLINGS if now else 0, _DOUBLINGS))})


def _nearest(knob: Knob, value: float) -> Any:
    return knob.nearest(value)


def _at_once(changed: _Values) -> bool:
    """Whether a change of these fields takes effect without steps."""
    return all(name in _AT_ONCE for name in changed)


def _words(before: Any, after: Any) -> str:
    if not isinstance(after, tuple):
        return f"{before} -> {after}"
    return ", ".join(f"{name} {dict(before).get(name)} -> {value}" for name, value in after if (name, value) not in before)
