"""How RLP's policy is trained: deep Q-learning while a job runs (Zhu et al. 2020, Section 3.3, Algorithm 2), in JAX.

The agent that learns is a synchronisation policy itself. Its state holds network, target network and replay pool, and is
carried from episode to episode, so that an episode is nothing but a run of a job: `learning` decides and learns at every
push, `ended` says how the run came out. Before that, `recording` lets another policy decide and keeps what it did, and
`pretrained` regresses Q on the time that was left.

Where many episodes run at once, there is one learner all the same: `exploring` decides by what it knew when they began and
keeps what was done, and `learned_from` learns when they are over, run after run, a step at every push, as it would have
at the time. Unlike in Algorithm 2, then, actions are by a network as old as the episode; learning itself is the same.

What the print leaves open or gets wrong, and what we do (`Options.as_printed` does as printed instead, where it says so):

- Targets come from the target network and actions from the one that learns, as in every other deep Q-learning; the print
  has them the other way round, and returns the target network (`as_printed`).
- The push that reaches the job's target ends the episode: its y is r, with nothing to come (`as_printed` knows no end). Only
  after its decision is it known to be the last, so a transition is learned from one push after it is stored. Runs that are
  cut short by a cap did not end; runs whose loss is no longer finite ended badly, and pay for all the time up to their cap.
- A transition leads from one push of an episode to the next, or `steps` further; the pool keeps pushes, and puts the states
  together from them.
- Learning begins when a whole mini-batch is in the pool; samples are drawn with replacement; the loss is their mean square.
- The copies every c pushes, and the pool, go on over episodes. The best next action is sought among those that are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from tuners.actions import Decision, Push, SyncPolicy
from tuners.rlp.options import OPTIMIZERS, Options
from tuners.rlp.tuner import (
    FEATURES,
    HISTORY,
    HOLD,
    RELEASE_ALL,
    RELEASE_ONE,
    Network,
    Scaling,
    allowed,
    decided,
    encoded,
    may_hold,
    q_values,
    remembered,
    untrained,
)

__all__ = [
    "Learner",
    "Record",
    "beginner",
    "ended",
    "exploring",
    "learned",
    "learned_from",
    "learning",
    "pretrained",
    "recorded",
    "recording",
]


# A push as it is kept: its features, then these.
_ACTION, _HOLD, _SECONDS, _END, _COLUMNS = FEATURES, FEATURES + 1, FEATURES + 2, FEATURES + 3, FEATURES + 4


class Learner(NamedTuple):
    """All that is learned, as it goes from episode to episode."""

    online: Network  # learns
    target: Network  # a copy of it, up to c pushes old
    slots: Any  # the optimizer's
    scaling: Scaling
    pool: Array  # float32 [N + H + steps - 1, 8]: pushes, round and round; more than N, for the states of the oldest
    stored: Array  # int32: pushes that have ever been stored
    key: Array  # uint32: all that is drawn is a hash of it and of `stored`


class _Agent(NamedTuple):
    """A learner within an episode."""

    learner: Learner
    history: Array  # float32 [H, 4]
    seconds: Array  # of the last push


class Record(NamedTuple):
    """What a policy did in an episode."""

    rows: Array  # float32 [most, 8]
    pushes: Array  # int32: how many of the rows are used


class _Recorder(NamedTuple):
    policy: Any  # what decides: another policy's state, or a learner's network, its scaling, and a key
    history: Array
    seconds: Array
    record: Record


def beginner(options: Options, seed: int) -> Learner:
    """One who has learned nothing yet. As printed, features are left as they are."""
    online = untrained(seed)
    raw = Scaling(factor=np.ones(FEATURES, np.float32), limit=np.float32(1e6))
    made = Learner(
        online=online,
        target=online,
        slots=_optimizer(options).init(online),
        scaling=raw if options.as_printed else Scaling(),
        pool=cast(Any, np.zeros((options.replay + HISTORY + options.steps - 1, _COLUMNS), np.float32)),
        stored=cast(Any, np.int32(0)),
        key=cast(Any, np.random.default_rng([seed, 1]).integers(2**32, dtype=np.uint32)),
    )
    return cast(Learner, jax.tree.map(jnp.asarray, made))


def learned(options: Options, learner: Learner) -> tuple[Network, Scaling]:
    """What it has come to: the network that learns; as printed, its copy."""
    return learner.target if options.as_printed else learner.online, learner.scaling


# ------------------------------------------------------------------------------------------------------------- episodes


def learning(options: Options, learner: Learner, *, seconds: float = 0.0) -> SyncPolicy:
    """A policy that learns at every push, on from `learner`; `ended` takes what it was when the run was over.

    Policies of equal options share one compiled engine.
    """

    def init(active: Array) -> _Agent:
        del active
        return _Agent(learner, jnp.zeros((HISTORY, FEATURES), jnp.float32), jnp.zeros(()))

    return SyncPolicy("rlp, learning", init, _learning(options), probes=True, seconds=seconds)


def recording(policy: SyncPolicy, options: Options, most: int) -> SyncPolicy:
    """`policy`, with a record of what it does at up to `most` pushes."""
    decide = _recording(policy.decide, options.unit_seconds)
    return SyncPolicy(policy.name, _recorder(policy.init, most), decide, probes=True, seconds=policy.seconds)


def exploring(options: Options, learner: Learner, episode: int, most: int) -> SyncPolicy:
    """What `learner` does if it learns nothing meanwhile, with a record of up to `most` pushes, for `learned_from`.

    Whatever is drawn depends on the learner's seed and the number of the episode.
    """
    key = _mixed(learner.key ^ _mixed(jnp.asarray(episode + 1, jnp.uint32)))
    init = _recorder(lambda _: (*learned(options, learner), key), most)
    return SyncPolicy("rlp, exploring", init, _exploring(options), probes=True)


def _recorder(init: Callable[[Any], Any], most: int) -> Callable[[Any], _Recorder]:
    def begin(active: Array) -> _Recorder:
        rows = jnp.zeros((most, _COLUMNS), jnp.float32)
        record = Record(rows, jnp.asarray(0, jnp.int32))
        return _Recorder(init(active), jnp.zeros((HISTORY, FEATURES), jnp.float32), jnp.zeros(()), record)

    return begin


def recorded(state: Any, *, lost_seconds: float, options: Options) -> Record:
    """The record in the state of a policy made by `recording`, whose run is over; `lost_seconds` as for `ended`."""
    record: Record = state.record
    lost = np.float32(lost_seconds / options.unit_seconds)
    return record._replace(rows=jnp.asarray(record.rows).at[record.pushes - 1, _SECONDS].add(lost))


def ended(state: Any, *, final: bool, lost_seconds: float, options: Options) -> Learner:
    """The learner in the state of a policy made by `learning`, whose run is over.

    `final` is False for a run that was cut short. `lost_seconds` are what a run that diverged would still have had.
    """
    learner: Learner = state.learner
    return _closed(learner, final, lost_seconds, options)


def learned_from(options: Options, learner: Learner, record: Record, *, final: bool, lost_seconds: float) -> Learner:
    """What the learner of `learning` would have come to, had it done what is in `record`; the rest is as for `ended`."""
    return _closed(_followed(options, learner, record), final, lost_seconds, options)


def _closed(learner: Learner, final: bool, lost_seconds: float, options: Options) -> Learner:
    if options.as_printed or not final:
        return learner
    at = (learner.stored - 1) % learner.pool.shape[0]
    lost = np.float32(lost_seconds / options.unit_seconds)
    return learner._replace(pool=learner.pool.at[at, _END].set(1.0).at[at, _SECONDS].add(lost))


@cache
def _learning(options: Options) -> Callable[[Any, Push], tuple[Any, Decision]]:
    return partial(_learn_and_decide, options)


@cache
def _exploring(options: Options) -> Callable[[Any, Push], tuple[Any, Decision]]:
    return partial(_explore_and_record, options)


@cache
def _recording(decide: Callable[[Any, Push], tuple[Any, Decision]], unit_seconds: float) -> Callable[..., Any]:
    return partial(_decide_and_record, decide, unit_seconds)


def _learn_and_decide(options: Options, agent: _Agent, push: Push) -> tuple[_Agent, Decision]:
    """Lines 4 to 11 of Algorithm 2."""
    learner, drawn = _a_step(options, agent.learner)
    history, hold = remembered(agent.history, push), may_hold(push)
    action = _explored(options, *learned(options, learner), history, hold, drawn)
    row = _row(history, action, hold, _since(agent, push) / options.unit_seconds)
    return _Agent(_stored(learner, row), history, jnp.asarray(push.seconds)), decided(action, push)


def _a_step(options: Options, learner: Learner) -> tuple[Learner, Array]:
    """A step of learning, and a copy if one is due; also returns two uniforms for the decision that follows."""
    drawn = _uniforms(learner.key, learner.stored, options.batch + 2)
    learner = _improved(options, learner, drawn[2:])
    due = (learner.stored + 1) % options.copy == 0
    return learner._replace(target=_choose(due, learner.online, learner.target)), drawn[:2]


def _explored(options: Options, network: Network, scaling: Scaling, history: Array, hold: Array, drawn: Array) -> Array:
    """The best action, or, by chance, any."""
    best = jnp.argmax(jnp.where(allowed(hold), q_values(network, encoded(scaling, history)), -jnp.inf))
    among = jnp.where(hold, drawn[0] * 3, 1 + drawn[0] * 2).astype(jnp.int32)
    return jnp.where(drawn[1] < options.epsilon, among, best)


def _stored(learner: Learner, row: Array) -> Learner:
    at = learner.stored % learner.pool.shape[0]
    pool = jax.lax.dynamic_update_slice(learner.pool, row[None], (at, jnp.zeros_like(at)))
    return learner._replace(pool=pool, stored=learner.stored + 1)


@partial(jax.jit, static_argnames=("options",))
def _followed(options: Options, learner: Learner, record: Record) -> Learner:
    def step(number: Array, learner: Learner) -> Learner:
        return _stored(_a_step(options, learner)[0], record.rows[number])

    return cast(Learner, jax.lax.fori_loop(0, record.pushes, step, learner))


def _explore_and_record(options: Options, recorder: _Recorder, push: Push) -> tuple[_Recorder, Decision]:
    network, scaling, key = recorder.policy
    history, hold = remembered(recorder.history, push), may_hold(push)
    action = _explored(options, network, scaling, history, hold, _uniforms(key, recorder.record.pushes, 2))
    return _kept(recorder, recorder.policy, history, action, push, options.unit_seconds), decided(action, push)


def _decide_and_record(
    decide: Callable[[Any, Push], tuple[Any, Decision]], unit_seconds: float, recorder: _Recorder, push: Push
) -> tuple[_Recorder, Decision]:
    policy, decision = decide(recorder.policy, push)
    others = jnp.arange(push.active.shape[0]) != push.worker
    alone = jnp.where(decision.release[push.worker], RELEASE_ONE, HOLD)
    action = jnp.where(jnp.any(decision.release & others), RELEASE_ALL, alone)
    history = remembered(recorder.history, push)
    return _kept(recorder, policy, history, action, push, unit_seconds), decision


def _kept(recorder: _Recorder, policy: Any, history: Array, action: Array, push: Push, unit_seconds: float) -> _Recorder:
    row = _row(history, action, may_hold(push), _since(recorder, push) / unit_seconds)
    rows, pushes = recorder.record
    rows = jax.lax.dynamic_update_slice(rows, row[None], (pushes, jnp.zeros_like(pushes)))
    return _Recorder(policy, history, jnp.asarray(push.seconds), Record(rows, pushes + 1))


def _since(before: _Agent | _Recorder, push: Push) -> Array:
    """Seconds since the push before; nothing is known of how the first came about."""
    return jnp.where(before.history[0, 0] > 0, push.seconds - before.seconds, 0.0)


def _row(history: Array, action: Array, hold: Array, units: Array) -> Array:
    told = [action, hold, units, jnp.zeros(())]
    return jnp.concatenate([history[0], jnp.stack([jnp.asarray(t, jnp.float32) for t in told])])


# ------------------------------------------------------------------------------------------------------------- learning


def _improved(options: Options, learner: Learner, drawn: Array) -> Learner:
    """One step of the network on transitions picked from the pool by `drawn` [batch], if there is a whole mini-batch."""
    last = learner.stored - 1  # the newest push; whether it was an episode's last is not yet known
    second = last - (drawn * jnp.minimum(last, options.replay)).astype(jnp.int32)  # which push each transition leads to
    ages = jnp.arange(HISTORY + options.steps)
    rows = learner.pool[(second[:, None] - ages) % learner.pool.shape[0]]  # [batch, H + steps, 8], newest first
    now, before = rows[:, :HISTORY], rows[:, options.steps :]
    passed = rows[:, : options.steps][:, ::-1]  # [batch, steps, 8]: the pushes after `before`, in order

    end = (passed[..., _END] > 0).astype(jnp.int32)
    past = jnp.cumsum(end, axis=1) > end  # after the end of the episode
    counts = ~jnp.any((passed[..., 0] == 1) & ~past, axis=1)  # no episode was cut short, and another begun
    rewards = jnp.where(past, 0.0, -passed[..., _SECONDS]) @ (options.gamma ** np.arange(options.steps, dtype=np.float32))
    to_come = options.gamma**options.steps * _best_value(options, learner, now)
    goals = rewards + jnp.where(jnp.any(end > 0, axis=1), 0.0, to_come)
    stepped = _stepped(options, learner, _states(learner.scaling, before), before[:, 0, _ACTION], goals, counts)
    enough = last >= options.batch + options.steps - 1
    return cast(Learner, _choose(enough, stepped, learner))


def _best_value(options: Options, learner: Learner, rows: Array) -> Array:
    """max_a Q(S, a) [batch] over what was allowed, of the states that windows [batch, H, 8] show."""
    states, may = _states(learner.scaling, rows), allowed(rows[:, 0, _HOLD] > 0)
    values = q_values(learner.online if options.as_printed else learner.target, states)
    judged = q_values(learner.online, states) if options.double else values
    best = jnp.argmax(jnp.where(may, judged, -jnp.inf), axis=1)
    return jnp.take_along_axis(values, best[:, None], axis=1)[:, 0]


def _states(scaling: Scaling, rows: Array) -> Array:
    """States [..., 40] of windows [..., H, 8]; rows from before an episode's first push count as zeros."""
    before = jnp.arange(HISTORY) >= rows[..., :1, 0]
    return encoded(scaling, jnp.where(before[..., None], 0.0, rows[..., :FEATURES]))


def _stepped(options: Options, learner: Learner, states: Array, actions: Array, goals: Array, counts: Array) -> Learner:
    """One step of the optimizer on the mean of (Q(S, a) - goal)^2 over those that count."""

    def loss(network: Network) -> Array:
        taken = actions.astype(jnp.int32)[:, None] == jnp.arange(3)
        gaps = jnp.sum(jnp.where(taken, q_values(network, states), 0.0), axis=1) - jax.lax.stop_gradient(goals)
        return jnp.sum(jnp.where(counts, gaps, 0.0) ** 2) / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)

    gradient = jax.grad(loss)(learner.online)
    updates, slots = _optimizer(options).update(gradient, learner.slots, learner.online)
    return learner._replace(online=optax.apply_updates(learner.online, updates), slots=slots)


@partial(jax.jit, static_argnames=("options",))
def pretrained(options: Options, learner: Learner, record: Record) -> Learner:
    """Regress Q on what was left after each push of `record`, once through in mini-batches, in random order.

    Printed is the undiscounted time left, -t, whatever gamma the learning goes on with; only actions taken get a goal.
    """
    rows, pushes = record
    most = rows.shape[0]
    at = jnp.arange(most)
    length = jnp.arange(HISTORY)
    windows = _states(learner.scaling, rows[(at[:, None] - length) % most])
    gamma = options.gamma if options.returns == "discounted" else 1.0

    def earlier(left: Array, units: Array) -> tuple[Array, Array]:
        return -units + gamma * left, left

    units = jnp.where(at < pushes, rows[:, _SECONDS], 0.0)
    _, left = jax.lax.scan(earlier, jnp.zeros((), jnp.float32), units, reverse=True)
    drawn = jnp.where(at < pushes - 1, _uniforms(learner.key, learner.stored, most), 2.0)  # the last led nowhere
    order = jnp.concatenate([jnp.argsort(drawn), jnp.full(options.batch, most - 1)])

    def step(number: Array, learner: Learner) -> Learner:
        first = number * options.batch
        picked = jax.lax.dynamic_slice(order, (first,), (options.batch,))
        counts = first + jnp.arange(options.batch) < pushes - 1
        return _stepped(options, learner, windows[picked], rows[picked, _ACTION], left[picked], counts)

    steps = (pushes - 1 + options.batch - 1) // options.batch
    learner = jax.lax.fori_loop(0, steps, step, learner._replace(key=learner.key + jnp.uint32(1)))
    return learner._replace(target=learner.online)


def _optimizer(options: Options) -> optax.GradientTransformation:
    falling = optax.linear_schedule(options.rate, 0.0, options.anneal) if options.anneal else options.rate
    return OPTIMIZERS[options.optimizer](falling)


def _choose(yes: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(yes, a, b), new, old)


def _uniforms(key: Array, number: Array, count: int) -> Array:
    """So many uniforms in [0, 1), float32: a 32-bit hash (Wellons's lowbias32) of the key and a counter.

    JAX's own generator runs as loops on CPU, which would cost more than a step of learning.
    """
    counter = number.astype(jnp.uint32) * jnp.uint32(count) + jnp.arange(count, dtype=jnp.uint32)
    uniform: Array = (_mixed(counter ^ _mixed(key)) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return uniform


def _mixed(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
