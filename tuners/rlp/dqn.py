"""How RLP's policy is trained: deep Q-learning while a job runs (Zhu et al. 2020, Section 3.3, Algorithm 2), in JAX.

The learning agent is itself a synchronisation policy. Its state holds network, target network and replay pool, and goes from
episode to episode; an episode is one run of a job. `learning_policy` decides and learns at every push, and `after_run`
records how the run ended. Before that, in pre-training, `recording_policy` lets another policy decide and records its
actions, and `pretrained` regresses Q on the time that was left.

Several episodes can run at once with one learner: `exploring_policy` decides by what the learner knew when the episodes
began and records its actions. When they are over, `learn_from_record` learns from one run after the other, one step per
push. Unlike in Algorithm 2 the network that acts is then as old as the episode; the learning itself is the same.

What the paper leaves open or prints wrongly, and what we do (`Options.as_printed` follows the print where noted):

- Targets come from the target network and actions from the network that learns, as in every other deep Q-learning. The paper
  prints it the other way round, and returns the target network (`as_printed`).
- The push that reaches the job's target ends the episode: its y is r, with nothing to come (`as_printed` knows no end). Only
  after its decision is it known to be the last push, so a transition is learned from one push after it is stored. A run that
  a cap cuts short has no such end. A run whose loss is no longer finite has one, and pays for all the time up to its cap.
- A transition leads from one push of an episode to the next, or `steps` further. The pool stores pushes; states are put
  together from them.
- Learning begins when the pool holds a whole mini-batch. Samples are drawn with replacement; the loss is their mean square.
- The copies every c pushes, and the pool, continue over episodes. The best next action is one that is allowed.
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
from tuners.rlp.network import (
    FEATURES,
    HISTORY,
    HOLD,
    RELEASE_ALL,
    RELEASE_ONE,
    Network,
    Scaling,
    allowed_actions,
    decision_of,
    may_hold,
    network_input,
    q_values,
    untrained,
    with_push,
)
from tuners.rlp.options import OPTIMIZERS, Options

__all__ = [
    "Learner",
    "Record",
    "after_run",
    "exploring_policy",
    "learn_from_record",
    "learning_policy",
    "new_learner",
    "pretrained",
    "record_of",
    "recording_policy",
    "trained_network",
]

# The columns of a stored push: its features, then these.
_ACTION, _HOLD, _SECONDS, _END, _COLUMNS = FEATURES, FEATURES + 1, FEATURES + 2, FEATURES + 3, FEATURES + 4


class Learner(NamedTuple):
    """All that is learned, carried from episode to episode."""

    online: Network  # the network that learns
    target: Network  # a copy of `online`, up to c pushes old
    slots: Any  # of the optimizer
    scaling: Scaling
    pool: Array  # float32 [N + H + steps - 1, 8]: a ring of pushes; more than N, for the states of the oldest
    stored: Array  # int32: pushes stored so far, over all episodes
    key: Array  # uint32: every random draw is a hash of `key` and `stored`


class _Agent(NamedTuple):
    """A learner within an episode."""

    learner: Learner
    history: Array  # float32 [H, 4]
    seconds: Array  # time of the last push


class Record(NamedTuple):
    """The pushes of one episode and the actions of its policy."""

    rows: Array  # float32 [most, 8]
    pushes: Array  # int32: number of rows in use


class _Recorder(NamedTuple):
    policy: Any  # the state of the policy that decides; or a learner's network, its scaling and a key
    history: Array
    seconds: Array
    record: Record


def new_learner(options: Options, seed: int) -> Learner:
    """A learner before its first episode. As printed, features are not scaled."""
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


def trained_network(options: Options, learner: Learner) -> tuple[Network, Scaling]:
    """The result of training: the network that learns; as printed, the target network."""
    return learner.target if options.as_printed else learner.online, learner.scaling


# ------------------------------------------------------------------------------------------------------------- episodes


def learning_policy(options: Options, learner: Learner) -> SyncPolicy:
    """A policy that learns at every push, starting from `learner`; `after_run` takes its state at the end of the run.

    Policies of equal options share one compiled engine.
    """

    def init(active: Array) -> _Agent:
        del active
        return _Agent(learner, jnp.zeros((HISTORY, FEATURES), jnp.float32), jnp.zeros(()))

    return SyncPolicy("rlp, learning", init, _learning(options), probes=True)


def recording_policy(policy: SyncPolicy, options: Options, most: int) -> SyncPolicy:
    """`policy`, with a record of its actions at up to `most` pushes."""
    decide = _recording(policy.decide, options.unit_seconds)
    return SyncPolicy(policy.name, _recorder(policy.init, most), decide, probes=True, seconds=policy.seconds)


def exploring_policy(options: Options, learner: Learner, episode: int, most: int) -> SyncPolicy:
    """The policy of `learner` as it is now, with a record of up to `most` pushes for `learn_from_record`.

    Random draws depend on the learner's seed and the number of the episode.
    """
    key = _mixed(learner.key ^ _mixed(jnp.asarray(episode + 1, jnp.uint32)))
    init = _recorder(lambda _: (*trained_network(options, learner), key), most)
    return SyncPolicy("rlp, exploring", init, _exploring(options), probes=True)


def _recorder(init: Callable[[Any], Any], most: int) -> Callable[[Any], _Recorder]:
    def begin(active: Array) -> _Recorder:
        rows = jnp.zeros((most, _COLUMNS), jnp.float32)
        record = Record(rows, jnp.asarray(0, jnp.int32))
        return _Recorder(init(active), jnp.zeros((HISTORY, FEATURES), jnp.float32), jnp.zeros(()), record)

    return begin


def record_of(state: Any, *, lost_seconds: float, options: Options) -> Record:
    """The record in the final state of a policy made by `recording_policy`; `lost_seconds` as for `after_run`."""
    record: Record = state.record
    lost = np.float32(lost_seconds / options.unit_seconds)
    return record._replace(rows=jnp.asarray(record.rows).at[record.pushes - 1, _SECONDS].add(lost))


def after_run(state: Any, *, final: bool, lost_seconds: float, options: Options) -> Learner:
    """The learner in the final state of a policy made by `learning_policy`.

    `final` is False for a run that was cut short. `lost_seconds` is the time that a diverged run had left up to its cap.
    """
    learner: Learner = state.learner
    return _with_end(learner, final, lost_seconds, options)


def learn_from_record(options: Options, learner: Learner, record: Record, *, final: bool, lost_seconds: float) -> Learner:
    """`learner` after it has learned from a recorded run, as `learning_policy` would have; the rest as for `after_run`."""
    return _with_end(_replayed(options, learner, record), final, lost_seconds, options)


def _with_end(learner: Learner, final: bool, lost_seconds: float, options: Options) -> Learner:
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
    learner, drawn = _learning_step(options, agent.learner)  # sample transitions, train Q, copy it to Q*
    history, hold = with_push(agent.history, push), may_hold(push)  # the state S
    action = _epsilon_greedy(options, *trained_network(options, learner), history, hold, drawn)
    # The pool stores pushes: this action, and the seconds since the last push, the reward of the transition that ends here.
    row = _row(history, action, hold, _seconds_since(agent, push) / options.unit_seconds)
    return _Agent(_with_push_stored(learner, row), history, jnp.asarray(push.seconds)), decision_of(action, push)


def _learning_step(options: Options, learner: Learner) -> tuple[Learner, Array]:
    """One step of learning, and a copy into the target network if due; also two uniforms for the decision that follows."""
    drawn = _uniforms(learner.key, learner.stored, options.batch + 2)
    learner = _improved(options, learner, drawn[2:])
    due = (learner.stored + 1) % options.copy == 0
    return learner._replace(target=_where(due, learner.online, learner.target)), drawn[:2]


def _epsilon_greedy(
    options: Options, network: Network, scaling: Scaling, history: Array, hold: Array, drawn: Array
) -> Array:
    """The best allowed action or, with probability epsilon, a random allowed one."""
    best = jnp.argmax(jnp.where(allowed_actions(hold), q_values(network, network_input(scaling, history)), -jnp.inf))
    among = jnp.where(hold, drawn[0] * 3, 1 + drawn[0] * 2).astype(jnp.int32)
    return jnp.where(drawn[1] < options.epsilon, among, best)


def _with_push_stored(learner: Learner, row: Array) -> Learner:
    at = learner.stored % learner.pool.shape[0]
    pool = jax.lax.dynamic_update_slice(learner.pool, row[None], (at, jnp.zeros_like(at)))
    return learner._replace(pool=pool, stored=learner.stored + 1)


@partial(jax.jit, static_argnames=("options",))
def _replayed(options: Options, learner: Learner, record: Record) -> Learner:
    def step(number: Array, learner: Learner) -> Learner:
        return _with_push_stored(_learning_step(options, learner)[0], record.rows[number])

    return cast(Learner, jax.lax.fori_loop(0, record.pushes, step, learner))


def _explore_and_record(options: Options, recorder: _Recorder, push: Push) -> tuple[_Recorder, Decision]:
    network, scaling, key = recorder.policy
    history, hold = with_push(recorder.history, push), may_hold(push)
    action = _epsilon_greedy(options, network, scaling, history, hold, _uniforms(key, recorder.record.pushes, 2))
    return _with_row(recorder, recorder.policy, history, action, push, options.unit_seconds), decision_of(action, push)


def _decide_and_record(
    decide: Callable[[Any, Push], tuple[Any, Decision]], unit_seconds: float, recorder: _Recorder, push: Push
) -> tuple[_Recorder, Decision]:
    policy, decision = decide(recorder.policy, push)
    others = jnp.arange(push.active.shape[0]) != push.worker
    alone = jnp.where(decision.release[push.worker], RELEASE_ONE, HOLD)
    action = jnp.where(jnp.any(decision.release & others), RELEASE_ALL, alone)
    history = with_push(recorder.history, push)
    return _with_row(recorder, policy, history, action, push, unit_seconds), decision


def _with_row(recorder: _Recorder, policy: Any, history: Array, action: Array, push: Push, unit_seconds: float) -> _Recorder:
    row = _row(history, action, may_hold(push), _seconds_since(recorder, push) / unit_seconds)
    rows, pushes = recorder.record
    rows = jax.lax.dynamic_update_slice(rows, row[None], (pushes, jnp.zeros_like(pushes)))
    return _Recorder(policy, history, jnp.asarray(push.seconds), Record(rows, pushes + 1))


def _seconds_since(before: _Agent | _Recorder, push: Push) -> Array:
    """Seconds since the previous push; 0 for the first push of an episode."""
    return jnp.where(before.history[0, 0] > 0, push.seconds - before.seconds, 0.0)


def _row(history: Array, action: Array, hold: Array, units: Array) -> Array:
    told = [action, hold, units, jnp.zeros(())]
    return jnp.concatenate([history[0], jnp.stack([jnp.asarray(t, jnp.float32) for t in told])])


# ------------------------------------------------------------------------------------------------------------- learning


def _improved(options: Options, learner: Learner, drawn: Array) -> Learner:
    """One step of the network on transitions picked from the pool by `drawn` [batch], if the pool holds a mini-batch."""
    last = learner.stored - 1  # the newest push; it is not known yet whether it ends its episode
    second = last - (drawn * jnp.minimum(last, options.replay)).astype(jnp.int32)  # the push that each transition leads to
    ages = jnp.arange(HISTORY + options.steps)
    rows = learner.pool[(second[:, None] - ages) % learner.pool.shape[0]]  # [batch, H + steps, 8], newest first
    now, before = rows[:, :HISTORY], rows[:, options.steps :]
    passed = rows[:, : options.steps][:, ::-1]  # [batch, steps, 8]: the pushes after `before`, in order

    end = (passed[..., _END] > 0).astype(jnp.int32)
    past = jnp.cumsum(end, axis=1) > end  # after the end of the episode
    counts = ~jnp.any((passed[..., 0] == 1) & ~past, axis=1)  # False where the transition would lead into another episode
    rewards = jnp.where(past, 0.0, -passed[..., _SECONDS]) @ (options.gamma ** np.arange(options.steps, dtype=np.float32))
    to_come = options.gamma**options.steps * _best_value(options, learner, now)
    goals = rewards + jnp.where(jnp.any(end > 0, axis=1), 0.0, to_come)
    stepped = _stepped(options, learner, _states(learner.scaling, before), before[:, 0, _ACTION], goals, counts)
    enough = last >= options.batch + options.steps - 1
    return cast(Learner, _where(enough, stepped, learner))


def _best_value(options: Options, learner: Learner, rows: Array) -> Array:
    """max_a Q(S, a) [batch] over the allowed actions, of the states of windows [batch, H, 8]."""
    states, may = _states(learner.scaling, rows), allowed_actions(rows[:, 0, _HOLD] > 0)
    values = q_values(learner.online if options.as_printed else learner.target, states)
    judged = q_values(learner.online, states) if options.double else values
    best = jnp.argmax(jnp.where(may, judged, -jnp.inf), axis=1)
    return jnp.take_along_axis(values, best[:, None], axis=1)[:, 0]


def _states(scaling: Scaling, rows: Array) -> Array:
    """States [..., 40] of windows [..., H, 8]; rows before an episode's first push count as zeros."""
    before = jnp.arange(HISTORY) >= rows[..., :1, 0]
    return network_input(scaling, jnp.where(before[..., None], 0.0, rows[..., :FEATURES]))


def _stepped(options: Options, learner: Learner, states: Array, actions: Array, goals: Array, counts: Array) -> Learner:
    """One step of the optimizer on the mean of (Q(S, a) - goal)^2 over the rows with `counts`."""

    def loss(network: Network) -> Array:
        taken = actions.astype(jnp.int32)[:, None] == jnp.arange(3)
        gaps = jnp.sum(jnp.where(taken, q_values(network, states), 0.0), axis=1) - jax.lax.stop_gradient(goals)
        return jnp.sum(jnp.where(counts, gaps, 0.0) ** 2) / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)

    gradient = jax.grad(loss)(learner.online)
    updates, slots = _optimizer(options).update(gradient, learner.slots, learner.online)
    return learner._replace(online=optax.apply_updates(learner.online, updates), slots=slots)


@partial(jax.jit, static_argnames=("options",))
def pretrained(options: Options, learner: Learner, record: Record) -> Learner:
    """Regress Q on the time left after each push of `record`: one pass in mini-batches, in random order.

    The paper prints the undiscounted time left, -t, whatever gamma the learning uses. Only actions taken get a goal.
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
    # No time follows the last push, so it has no goal: it sorts to the end.
    drawn = jnp.where(at < pushes - 1, _uniforms(learner.key, learner.stored, most), 2.0)
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


def _where(yes: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(yes, a, b), new, old)


def _uniforms(key: Array, number: Array, count: int) -> Array:
    """`count` uniforms in [0, 1), float32: a 32-bit hash (Wellons's lowbias32) of the key and a counter.

    JAX's own generator runs as loops on CPU and would cost more than a step of learning.
    """
    counter = number.astype(jnp.uint32) * jnp.uint32(count) + jnp.arange(count, dtype=jnp.uint32)
    uniform: Array = (_mixed(counter ^ _mixed(key)) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return uniform


def _mixed(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
