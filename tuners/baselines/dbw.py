"""DBW, dynamic backup workers: the number of gradients that a round waits for is chosen anew for every round.

Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020 (arXiv 2004.14696). A round ends with
its first k gradients; k maximises G(k) / T(k), the expected decrease of the loss per second. T(k) is the time until the k-th
gradient of a round has come, measured also with late gradients. For averaged gradients the decrease is at least

    G(k) = (eta - L eta^2 / 2) |grad F|^2 - (L eta^2 / 2) V / k,

with smoothness L and the variance V of one worker's gradient. If the loss has risen by more than 1 %, k must grow.

Where we differ. A policy of this contract sees no gradients, so the terms are read off losses (`SyncPolicy.probes`). The
j-th gradient of a round lowers the loss of its own mini-batch by about (eta - L eta^2 / 2) (|grad F|^2 + V / j): a line in
1 / j, fitted over some rounds. Its intercept is the first term of G; L, the only unknown that is left, follows from the
decrease of the mean loss from round to round. Where servers apply each gradient by itself at the full rate, or sum them, a
round of k gradients is k steps, so G(k) is in proportion to k. The loss that must not rise is a moving average, because the
means of single rounds of small batches rise by chance. T(k) depends on the k of the round before, too, in the paper, which
estimates a matrix under constraints; here it is one moving average per k, made monotone. A policy is not told when its
first round began, so no gradient of it can be timed: it ends with half of the workers, because to wait for all would measure
nothing and cost the slowest worker's time (the README of this folder has the seconds). The second round waits for all. Live
servers refuse policies that probe where they group gradients; the job then goes on as it is.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import learns_nothing, nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import Count

__all__ = ["dbw", "dbw_policy"]

_RISE = 1.01  # the paper's beta: a loss that has risen by more asks for more gradients
_REMEMBERED = 16  # rounds whose late gradients are still timed
_DIFFERENT = 1e-4  # of a loss: a smaller difference is rounding


def _nothing_to_gain(job: Job) -> str:
    return learns_nothing(job, "it has no loss that a gradient could lower") or policy_cannot_be_installed(job)


@nothing_to_tune_if(_nothing_to_gain)
def dbw(job: Job, *, rounds: Count = 5) -> Tuner:
    """Install rounds of the first k gradients, with the k of the highest expected gain per second.

    Args:
        job: what is tuned.
        rounds: over which gains and times are averaged.
    """
    if not _nothing_to_gain(job):
        with suppress(Rejected):
            yield from Install(dbw_policy(rounds))


class _Gain(NamedTuple):
    """Moving sums of the fit of own decreases on 1 / j, and of what the smoothness follows from."""

    weight: Array  # float scalars
    inverse: Array
    inverse_squared: Array
    decrease: Array
    product: Array
    missing: Array  # sum of (first term of G - measured decrease of the mean loss)
    noise: Array  # sum of V's term / k
    steps: Array  # bool scalar: servers apply each gradient by itself


class _Rounds(NamedTuple):
    rate: Array  # float scalar: weight of the newest round in the averages
    size: Array  # int32 scalar: k of this round; 0: of the first one, half of the workers
    round: Array  # int32 scalar: rounds completed
    begun: Array  # int32 [k]: round in which each worker pulled
    begun_seconds: Array  # float [_REMEMBERED]: start of the last rounds
    arrived: Array  # int32 [_REMEMBERED]: gradients of these rounds that have come, late ones included
    pushed: Array  # int32 scalar: gradients of this round in time
    losses: Array  # float scalar: their losses, sum
    loss_before: Array  # float scalar: mean loss of the last round; nan before
    average: Array  # float scalar: moving average of these means; nan before
    seconds: Array  # float [k]: T(1), T(2), ...; nan where not measured
    gain: _Gain


def dbw_policy(rounds: int) -> SyncPolicy:
    """Rounds of the first k gradients; later ones are dropped, and their workers join the current round.

    Averages are exponential, over about `rounds` rounds. Raises ValueError for less than one.
    """
    if rounds < 1:
        raise ValueError(f"Cannot average over {rounds} rounds: give at least 1.")

    def init(active: Array) -> _Rounds:
        nodes, none, zero, unknown = active.shape[0], jnp.asarray(0, jnp.int32), jnp.zeros(()), jnp.asarray(jnp.nan)
        return _Rounds(
            rate=jnp.asarray(1.0 / rounds),
            size=none,
            round=none,
            begun=jnp.zeros(nodes, jnp.int32),
            begun_seconds=jnp.full(_REMEMBERED, jnp.nan),
            arrived=jnp.zeros(_REMEMBERED, jnp.int32),
            pushed=none,
            losses=zero,
            loss_before=unknown,
            average=unknown,
            seconds=jnp.full(nodes, jnp.nan),
            gain=_Gain(zero, zero, zero, zero, zero, zero, zero, jnp.asarray(False)),
        )

    return SyncPolicy(f"dbw({rounds})", init, _with_dynamic_backups, probes=True, rounds=True)


def _with_dynamic_backups(state: _Rounds, push: Push) -> tuple[_Rounds, Decision]:
    workers = jnp.sum(push.active)
    mine = jnp.arange(push.active.shape[0]) == push.worker
    fresh = state.begun[push.worker] == state.round
    state = _timed(state, push)
    pushed = state.pushed + fresh
    state = state._replace(
        pushed=pushed,
        losses=state.losses + jnp.where(fresh, push.loss, 0.0),
        gain=_learnt(state.gain, push, pushed, fresh),
    )
    size = jnp.where(state.size > 0, jnp.minimum(state.size, workers), (workers + 1) // 2)
    full = pushed >= size
    release = jnp.where(full, push.waiting, mine & ~fresh)
    ended = _next_round(state, push, size, workers)
    state = jax.tree.map(partial(jnp.where, full), ended, state)
    return state._replace(begun=jnp.where(release, state.round, state.begun)), Decision(
        release=release, accept=fresh, step=full
    )


def _timed(state: _Rounds, push: Push) -> _Rounds:
    """Count a gradient in the round in which its worker pulled, and average the time at which one of this place comes."""
    begun = state.begun[push.worker]
    place = begun % _REMEMBERED
    known = (state.round - begun < _REMEMBERED) & jnp.isfinite(state.begun_seconds[place])
    index = jnp.minimum(state.arrived[place], state.seconds.shape[0] - 1)
    taken, old = push.seconds - state.begun_seconds[place], state.seconds[index]
    average = jnp.where(jnp.isnan(old), taken, old + state.rate * (taken - old))
    return state._replace(
        arrived=state.arrived.at[place].add(known.astype(jnp.int32)),
        seconds=state.seconds.at[index].set(jnp.where(known, average, old)),
    )


def _learnt(gain: _Gain, push: Push, place: Array, fresh: Array) -> _Gain:
    """The fit with one more decrease of a mini-batch's own loss, by the gradient that came as number `place`."""
    inverse, own = 1.0 / jnp.maximum(place, 1), push.loss_before - push.loss_after
    good = fresh & jnp.isfinite(own)
    weight, own = good.astype(inverse.dtype), jnp.where(good, own, 0.0)
    moved = good & (place > 1) & (jnp.abs(push.loss_before - push.loss) > _DIFFERENT * jnp.abs(push.loss))
    return gain._replace(
        weight=gain.weight + weight,
        inverse=gain.inverse + weight * inverse,
        inverse_squared=gain.inverse_squared + weight * inverse**2,
        decrease=gain.decrease + own,
        product=gain.product + own * inverse,
        steps=gain.steps | moved,
    )


def _next_round(state: _Rounds, push: Push, size: Array, workers: Array) -> _Rounds:
    """The state after a round of `size` gradients, with the k of the next one."""
    loss = state.losses / jnp.maximum(state.pushed, 1)
    first, noise = _terms(state.gain)
    decrease = state.loss_before - loss
    seen = jnp.isfinite(decrease)
    keep = 1.0 - state.rate
    gain: _Gain = jax.tree.map(lambda part: keep * part, state.gain)
    gain = gain._replace(
        steps=state.gain.steps,
        missing=gain.missing + jnp.where(seen, first - decrease, 0.0),
        noise=gain.noise + jnp.where(seen, noise / size, 0.0),
    )
    counts = jnp.arange(1, state.seconds.shape[0] + 1)
    # (L eta^2 / 2) / (eta - L eta^2 / 2), which V's term is multiplied by.
    curvature = jnp.maximum(gain.missing, 0.0) / jnp.maximum(gain.noise, 1e-30)
    gains = jnp.where(gain.steps | (noise <= 0), counts.astype(loss.dtype), first - curvature * noise / counts)
    # A place that was never measured ends the search: nothing is known of the times behind it.
    seconds = jnp.where(jnp.cumsum(jnp.isnan(state.seconds)) > 0, jnp.inf, state.seconds)
    seconds = jnp.maximum(_running_maximum(seconds), 1e-12)
    pays = (counts <= workers) & jnp.isfinite(seconds) & (gains > 0)
    best = jnp.where(jnp.any(pays), jnp.argmax(jnp.where(pays, gains / seconds, -jnp.inf)) + 1, workers)
    average = jnp.where(jnp.isnan(state.average), loss, state.average + state.rate * (loss - state.average))
    rising = average > _RISE * state.average
    best = jnp.where(rising, jnp.maximum(best, size + 1), best)
    place = (state.round + 1) % _REMEMBERED
    return state._replace(
        size=jnp.clip(best, 1, jnp.maximum(workers, 1)).astype(jnp.int32),
        round=state.round + 1,
        begun_seconds=state.begun_seconds.at[place].set(push.seconds),
        arrived=state.arrived.at[place].set(0),
        pushed=jnp.asarray(0, jnp.int32),
        losses=jnp.zeros(()),
        loss_before=loss,
        average=average,
        gain=gain,
    )


def _terms(gain: _Gain) -> tuple[Array, Array]:
    """(eta - L eta^2 / 2) times |grad F|^2, and times V: intercept and slope of own decreases over 1 / j."""
    spread = gain.weight * gain.inverse_squared - gain.inverse**2
    product = gain.weight * gain.product - gain.inverse * gain.decrease
    slope = jnp.where(spread > 1e-9 * gain.weight**2, product / jnp.maximum(spread, 1e-30), 0.0)
    intercept = (gain.decrease - slope * gain.inverse) / jnp.maximum(gain.weight, 1e-30)
    return intercept, slope


def _running_maximum(values: Array) -> Array:
    """The largest of the first 1, 2, ... values, [k]."""
    upto = jnp.tril(jnp.ones((values.shape[0],) * 2, bool))
    return jnp.max(jnp.where(upto, values[None, :], -jnp.inf), axis=1)
