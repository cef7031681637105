"""What RLP's broad policy sees: features that know neither the number of workers nor the scale of losses and of times.

Everything is a ratio. Times are counted in the median step of the workers, pushes in rounds of the active workers, losses
relative to each other. So a policy that was trained on a few kinds of jobs reads another job in the same terms.

Every push is counted in `PushStatistics`, and `features` makes two tables of them: one row per worker (`WORKER`), and one
row about the job (`JOB`). What a measurement means depends on what was measured:

- *progress* of a push is 2 (before - after) / (before + after), of the losses of its mini-batch on the servers before and
  after its update. That is about learning rate x slope squared / loss. Times the number of workers, it says how much a whole
  round would change at once: far below 1 staleness does no harm, above 1 it does.
- *drift* is the same ratio for the time between the pull and the push, in which others' updates came. Updates of other
  workers that lower the loss here make it negative; where data is distributed by class they undo each other: positive.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tuners.actions import Push

__all__ = ["JOB", "WORKER", "PushStatistics", "counted", "features", "no_statistics"]

JOB = (
    "round",  # log of absolute progress x workers
    "fresh",  # the same, where a push counts the less the staler it is
    "sure",  # progress / its absolute value, both averaged: 1 where no push does harm
    "drift",  # drift / progress
    "rough",  # absolute drift / progress
    "stale",  # staleness, in rounds
    "uneven",  # how far the workers' mean losses lie apart: deviation / mean
    "spread",  # how far their step times lie apart: deviation of the logs
    "fallen",  # log of the first loss / the loss now
    "moved",  # log of the absolute drift that a round of others' pushes brings
    "together",  # drift / its absolute value, both averaged: -1 where every worker's pushes help all others
    "falling",  # log of the loss over the last rounds / the loss over more of them: below 0 while the job learns
)
WORKER = (
    "busy",  # 1 while it computes, 0 while it waits
    "age",  # pushes since it pulled, in rounds; 0 while it waits
    "done",  # share of its usual step that has passed since it pulled; 0 while it waits
    "slow",  # log of its usual step / the median step
    "waits",  # time since its push / the median step; 0 while it computes
    "ahead",  # its pushes / the mean of all workers' - 1
    "loss",  # log of its own mean loss / the mean of all workers'
)
_ROUNDS = 2.0  # over which measurements of pushes are averaged, exponentially
_MORE_ROUNDS = 6.0  # the same of the slower average of losses
_OWN = 0.3  # weight of a worker's newest loss or step in its averages
_TINY = 1e-9


class PushStatistics(NamedTuple):
    """What the policy remembers of the pushes so far. Arrays are float32 unless said; [k] has one entry per node."""

    pulled: Array  # [k], in the precision of time: seconds at which it last pulled; -1: not seen, the policy may be new
    pushed: Array  # [k], the same: seconds at which it last pushed
    missed: Array  # [k]: pushes by others since it pulled or, while it waits, since it pushed
    again: Array  # [k]: times that it began anew since it last pushed
    step: Array  # [k]: seconds that a step of it takes, averaged; 0: unknown
    loss: Array  # [k]: of its mini-batches, averaged; 0: unknown
    first: Array  # loss of the first push
    weight: Array  # of all pushes so far in the averages below, 0 to 1
    means: Array  # [5]: progress, absolute progress, drift, absolute drift, staleness in rounds
    fresh: Array  # [2]: sum of absolute progress / (1 + staleness), and the sum of these weights; both forget
    course: Array  # [2, 2]: sums of losses, and of their weights; the second of each forgets more slowly

    def after(self, push: Push, release: Array, restart: Array) -> PushStatistics:
        """What it remembers once the workers in `release` [k] have pulled, of which those in `restart` began anew."""
        now = jnp.asarray(push.seconds, self.pulled.dtype)
        return self._replace(
            pulled=jnp.where(release, now, self.pulled),
            missed=jnp.where(release, 0.0, self.missed),
            again=self.again + restart,
        )


def no_statistics(active: Array) -> PushStatistics:
    """Before the first push."""
    none = jnp.zeros(active.shape, jnp.float32)
    zero = jnp.zeros((), jnp.float32)
    never = -jnp.ones(active.shape)  # float64 where JAX is set to it, as the simulator does
    means, pair = jnp.zeros(5, jnp.float32), jnp.zeros(2, jnp.float32)
    return PushStatistics(never, never, none, none, none, none, zero, zero, means, pair, jnp.zeros((2, 2), jnp.float32))


def counted(statistics: PushStatistics, push: Push) -> PushStatistics:
    """`statistics` with `push`, before the decision about it."""
    mine = jnp.arange(push.active.shape[0]) == push.worker
    now = jnp.asarray(push.seconds, statistics.pulled.dtype)
    took = (now - statistics.pulled).astype(jnp.float32)
    workers = _workers(push)
    rate = 1.0 / (_ROUNDS * workers)
    keeps = 1.0 - 1.0 / (jnp.asarray([_ROUNDS, _MORE_ROUNDS], jnp.float32) * workers)
    progress, drift = _ratio(push.loss_before, push.loss_after), _ratio(push.loss_before, push.loss)
    told = jnp.stack([progress, jnp.abs(progress), drift, jnp.abs(drift), push.staleness / workers]).astype(jnp.float32)
    loss = jnp.nan_to_num(jnp.asarray(push.loss_before, jnp.float32), posinf=0.0, neginf=0.0)
    return statistics._replace(
        pushed=jnp.where(mine, now, statistics.pushed),
        missed=jnp.where(mine, 0.0, statistics.missed + 1.0),
        again=jnp.where(mine, 0.0, statistics.again),
        step=jnp.where(mine & (statistics.pulled >= 0), _average(statistics.step, took), statistics.step),
        loss=jnp.where(mine, _average(statistics.loss, loss), statistics.loss),
        first=jnp.where(statistics.weight > 0, statistics.first, loss),
        weight=statistics.weight + rate * (1.0 - statistics.weight),
        means=statistics.means + rate * (told - statistics.means),
        fresh=(1.0 - rate / 2.0) * statistics.fresh + _freshness(push) * jnp.stack([jnp.abs(progress), jnp.float32(1.0)]),
        course=keeps * statistics.course + jnp.stack([loss, jnp.float32(1.0)])[:, None],
    )


def features(statistics: PushStatistics, push: Push) -> tuple[Array, Array]:
    """One row about the job, [len(JOB)], and one row per worker, [k, len(WORKER)]; all within -5 to 5."""
    active, waiting = jnp.asarray(push.active), jnp.asarray(push.waiting)
    workers, busy = _workers(push), active & ~waiting
    now = jnp.asarray(push.seconds, statistics.pulled.dtype)
    worked, waited = ((now - since).astype(jnp.float32) for since in (statistics.pulled, statistics.pushed))
    known, heard = active & (statistics.step > 0), active & (statistics.loss != 0)
    usual = _median(statistics.step, known)
    step = jnp.where(known, statistics.step, usual)
    progress, size, drift, rough, stale = statistics.means / jnp.maximum(statistics.weight, _TINY)
    loss = _mean(statistics.loss, heard)
    now_and_before = statistics.course[0] / jnp.maximum(statistics.course[1], _TINY)
    lately, longer = jnp.maximum(now_and_before, _TINY)
    job = [
        jnp.log(jnp.maximum(size * workers, 0.01)),
        jnp.log(jnp.maximum(statistics.fresh[0] / jnp.maximum(statistics.fresh[1], _TINY) * workers, 0.01)),
        progress / jnp.maximum(size, _TINY),
        drift / jnp.maximum(size, 0.001),
        rough / jnp.maximum(size, 0.001),
        stale,
        _deviation(statistics.loss, heard) / jnp.maximum(jnp.abs(loss), _TINY),
        _deviation(jnp.log(jnp.maximum(step, _TINY)), known),
        jnp.log(jnp.maximum(statistics.first, _TINY) / jnp.maximum(loss, _TINY)),
        jnp.log(jnp.maximum(rough / jnp.maximum(stale, 0.5 / workers), 0.01)),
        drift / jnp.maximum(rough, 0.001),
        jnp.log(lately / longer),
    ]
    clocks = jnp.asarray(push.clocks, jnp.float32)
    each = [
        busy,
        jnp.where(busy, statistics.missed / workers, 0.0),
        jnp.where(busy & (statistics.pulled >= 0) & (usual > 0), worked / jnp.maximum(step, _TINY), 0.0),
        jnp.log(jnp.maximum(step, _TINY) / jnp.maximum(usual, _TINY)),
        jnp.where(waiting & (statistics.pushed >= 0) & (usual > 0), waited / jnp.maximum(usual, _TINY), 0.0),
        clocks / jnp.maximum(_mean(clocks, active), 1.0) - 1.0,
        jnp.where(heard, jnp.log(jnp.maximum(statistics.loss, _TINY) / jnp.maximum(loss, _TINY)), 0.0),
    ]
    return _bounded(jnp.stack(job)), _bounded(jnp.stack(each, axis=1))


def _workers(push: Push) -> Array:
    return jnp.maximum(jnp.sum(push.active), 1).astype(jnp.float32)


def _freshness(push: Push) -> Array:
    return 1.0 / (1.0 + jnp.asarray(push.staleness, jnp.float32))


def _ratio(now: Array, then: Array) -> Array:
    """2 (now - then) / (now + then), from -2 to 2; 0 where a loss is unknown or not finite."""
    now, then = jnp.asarray(now, jnp.float32), jnp.asarray(then, jnp.float32)
    ratio = 2.0 * (now - then) / jnp.maximum(jnp.abs(now) + jnp.abs(then), _TINY)
    return jnp.where(jnp.isfinite(ratio), ratio, 0.0)


def _average(old: Array, new: Array) -> Array:
    return jnp.where(old == 0, new, old + _OWN * (new - old))


def _mean(values: Array, which: Array) -> Array:
    return jnp.sum(jnp.where(which, values, 0.0)) / jnp.maximum(jnp.sum(which), 1)


def _deviation(values: Array, which: Array) -> Array:
    return jnp.sqrt(_mean((values - _mean(values, which)) ** 2, which))


def _median(values: Array, which: Array) -> Array:
    """The lower median of `values` [k] where `which`; 0 where none is. By ranks, because sorting is a loop on CPU."""
    before = values[None, :] < values[:, None]
    at = jnp.arange(values.shape[0])
    tied = (values[None, :] == values[:, None]) & (at[None, :] < at[:, None])
    ranks = jnp.sum((before | tied) & which[None, :], axis=1)
    return jnp.sum(jnp.where(which & (ranks == (jnp.sum(which) - 1) // 2), values, 0.0))


def _bounded(table: Array) -> Array:
    return jnp.clip(jnp.nan_to_num(table.astype(jnp.float32), posinf=5.0, neginf=-5.0), -5.0, 5.0)
