"""Deep Q-learning inside `decide`, against a plain numpy version with a list of transitions; and its traps, one by one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import slow
from tests.tuners.rlp.test_rlp import plain_states
from tuners import policies
from tuners.actions import Push
from tuners.rlp import dqn, tuner
from tuners.rlp.network import HOLD, RELEASE_ALL, RELEASE_ONE, Network, Trained, untrained
from tuners.rlp.options import Options

K = 4
SMALL = Options(replay=12, batch=4, copy=5, optimizer="sgd", rate=0.01, epsilon=0.3, unit_seconds=2.0)


# --------------------------------------------------------------------------------------------- a plain version, in numpy


def forward(network, x):
    """Activations of every layer, the input first."""
    layers = [np.asarray(x, np.float64)]
    for i, (w, b) in enumerate(zip(*network, strict=True)):
        x = layers[-1] @ w + b
        layers.append(x if i == 2 else np.where(x > 0, x, 0.01 * x))
    return layers


def descend(network, states, actions, goals, rate):
    """One step of gradient descent on the mean square, worked out by hand."""
    if not len(states):
        return network
    layers = forward(network, np.array(states))
    error = np.zeros_like(layers[-1])
    rows = np.arange(len(states))
    error[rows, actions] = 2 * (layers[-1][rows, actions] - np.array(goals)) / len(states)
    weights, biases = list(network[0]), list(network[1])
    for i in (2, 1, 0):
        weights[i], biases[i] = network[0][i] - rate * layers[i].T @ error, network[1][i] - rate * error.sum(0)
        error = (error @ network[0][i].T) * np.where(layers[i] > 0, 1.0, 0.01)
    return tuple(weights), tuple(biases)


def hashed(key, number, count):
    def mixed(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x = ((x ^ (x >> shift)) * factor) % 2**32
        return x

    return [(mixed(((number * count + i) % 2**32) ^ mixed(int(key))) >> 8) * 2.0**-24 for i in range(count)]


class Plain:
    """Algorithm 2, push by push. A push is a dict; transitions are looked up in the list of all pushes."""

    def __init__(self, options, learner):
        self.o, self.key, self.scaling = options, learner.key, jax.tree.map(np.asarray, learner.scaling)
        self.online = self.target = tuple(tuple(np.asarray(x, np.float64) for x in part) for part in learner.online)
        self.pushes, self.rows = [], []

    def begin(self):
        self.rows = []

    def end(self, final, lost):
        if final and not self.o.as_printed:
            self.pushes[-1]["end"] = True
            self.pushes[-1]["units"] += lost / self.o.unit_seconds

    def decide(self, features, seconds, hold):
        o, stored = self.o, len(self.pushes)
        drawn = hashed(self.key, stored, o.batch + 2)
        self.improve(drawn[2:])
        if (stored + 1) % o.copy == 0:
            self.target = self.online
        self.rows.append(features)
        state = list(plain_states(self.rows, self.scaling))[-1]
        acting = self.target if o.as_printed else self.online
        may = [HOLD, RELEASE_ONE, RELEASE_ALL] if hold else [RELEASE_ONE, RELEASE_ALL]
        action = max(may, key=lambda a: forward(acting, state)[-1][a])
        if drawn[1] < o.epsilon:
            action = may[int(drawn[0] * len(may))]
        units = seconds / o.unit_seconds
        self.pushes.append({"n": len(self.rows), "state": state, "action": action, "may": may, "units": units, "end": False})
        return action

    def improve(self, drawn):
        o, last = self.o, len(self.pushes) - 1
        if last < o.batch + o.steps - 1:
            return
        states, actions, goals = [], [], []
        for u in drawn:
            second = last - int(u * min(last, o.replay))
            first = second - o.steps
            goal = self.goal(first, second)
            if goal is not None:
                states.append(self.pushes[first]["state"])
                actions.append(self.pushes[first]["action"])
                goals.append(goal)
        self.online = descend(self.online, states, actions, goals, o.rate)

    def goal(self, first, second):
        """-dt summed over the pushes after `first`, plus the value after `second`; None if that is not a transition."""
        total = 0.0
        for i in range(first + 1, second + 1):
            if first < 0 or self.pushes[i]["n"] == 1:
                return None
            total -= self.o.gamma ** (i - first - 1) * self.pushes[i]["units"]
            if self.pushes[i]["end"]:
                return total
        state, may = self.pushes[second]["state"], self.pushes[second]["may"]
        values = forward(self.online if self.o.as_printed else self.target, state)[-1]
        judged = forward(self.online, state)[-1] if self.o.double else values
        return total + self.o.gamma**self.o.steps * values[max(may, key=lambda a: judged[a])]


# --------------------------------------------------------------------------------------------------------- both of them


def episode(rng, pushes):
    """Made-up pushes: (features without n, seconds since the one before, who may still come)."""
    for n in range(pushes):
        before = 2.3 * 0.95**n + 0.1 * rng.random()
        waiting = np.zeros(K, bool)
        waiting[: rng.integers(1, K + 1)] = True
        yield [before, -0.05 * rng.random(), rng.integers(0, 9)], 0.0 if n == 0 else rng.exponential(3.0), waiting


def made_up(told, waiting, now):
    before, change, staleness = told
    worker, ones, active = np.int32(0), np.ones(K, np.int32), np.ones(K, bool)
    return Push(worker, ones, waiting, active, np.float64(now), np.int32(staleness), 0.0, before, before + change)


OPTIONS = {
    "as the paper should be read": SMALL,
    "as printed": replace(SMALL, as_printed=True, rate=1e-5),
    "double, three pushes at once": replace(SMALL, double=True, steps=3, gamma=1.0, copy=7),
}


@pytest.mark.parametrize("name", [name if "should" in name else slow(name) for name in OPTIONS])
def test_learning_is_algorithm_2(name):
    """Three episodes: one that ends, one that is cut short, one that diverges. The ring of the pool is filled four times."""
    options, rng = OPTIONS[name], np.random.default_rng(5)
    learner = dqn.new_learner(options, 1)
    plain = Plain(options, learner)
    for pushes, final, lost in ((20, True, 0.0), (15, False, 0.0), (12, True, 6.0)):
        policy = dqn.learning_policy(options, learner)
        state, decide = policy.init(np.ones(K, bool)), jax.jit(policy.decide)
        plain.begin()
        now = 100.0
        for n, (told, seconds, waiting) in enumerate(episode(rng, pushes), start=1):
            now += seconds
            push = made_up(told, waiting, now)
            state, decision = decide(state, push)
            action = plain.decide([n, *told], seconds, not waiting.all())
            expected = np.zeros(K, bool)
            expected[0] = action == RELEASE_ONE
            np.testing.assert_array_equal(decision.release, waiting if action == RELEASE_ALL else expected)
        learner = dqn.after_run(state, final=final, lost_seconds=lost, options=options)
        plain.end(final, lost)
    for mine, theirs in ((learner.online, plain.online), (learner.target, plain.target)):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(Network(*theirs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    begun = dqn.new_learner(options, 1).online
    assert any(
        np.abs(a - b).max() > 1e-7 for a, b in zip(jax.tree.leaves(learner.online), jax.tree.leaves(begun), strict=True)
    )


def live(policy, rng, pushes):
    """The state of `policy` after made-up pushes, and the workers that it released at each."""
    state, decide, now, released = policy.init(np.ones(K, bool)), jax.jit(policy.decide), 0.0, []
    for told, seconds, waiting in episode(rng, pushes):
        now += seconds
        state, decision = decide(state, made_up(told, waiting, now))
        released.append(np.asarray(decision.release).tolist())
    return state, released


@pytest.mark.parametrize("final", [True, False], ids=["ended", "cut short"])
def test_a_run_teaches_afterwards_what_it_would_have_taught_at_the_time(final):
    """Steps of learning, copies, random draws and the pool: all as if the learner had learned during the run."""
    options, rng = SMALL, np.random.default_rng(6)
    begun = there = afterwards = dqn.new_learner(options, 1)
    for pushes in (12, 14):
        state, _ = live(dqn.learning_policy(options, there), rng, pushes)
        rows = state.learner.pool[(there.stored + np.arange(pushes)) % there.pool.shape[0]]
        over = {"final": final, "lost_seconds": 3.0, "options": options}
        record = dqn.Record(jnp.pad(rows, ((0, 5), (0, 0))), jnp.asarray(pushes))
        there, afterwards = dqn.after_run(state, **over), dqn.learn_from_record(learner=afterwards, record=record, **over)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(afterwards), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.abs(afterwards.online.weights[0] - begun.online.weights[0]).max() > 1e-4
    assert float(afterwards.pool[25 % afterwards.pool.shape[0], 7]) == final


def test_exploring_is_what_the_learner_knows_and_chance():
    learner = dqn.new_learner(SMALL, 3)

    def explored(epsilon, episode_number):
        policy = dqn.exploring_policy(replace(SMALL, epsilon=epsilon), learner, episode_number, 60)
        state, released = live(policy, np.random.default_rng(8), 60)
        return np.asarray(state.record.rows), released

    rows, released = explored(0.0, 0)
    greedy = tuner.greedy_policy(Trained(learner.online, learner.scaling))
    assert released == live(greedy, np.random.default_rng(8), 60)[1]
    np.testing.assert_array_equal(rows, explored(0.0, 1)[0])
    one, other = (explored(1.0, number)[0][:, 4].astype(int) for number in (0, 1))
    assert 0.2 < np.mean(one == other) < 0.6  # drawn anew
    may_hold = rows[:, 5] > 0
    counts = np.bincount(one[may_hold], minlength=3) / may_hold.sum()
    assert counts.min() > 0.15
    assert HOLD not in one[~may_hold]
    np.testing.assert_array_equal(one, explored(1.0, 0)[0][:, 4])


@pytest.mark.parametrize("returns", ["undiscounted", "discounted"])
def test_pretraining_regresses_on_the_time_that_was_left(returns):
    """One mini-batch with the whole episode except its last push, after which no time is left."""
    options = replace(SMALL, batch=16, replay=16, returns=returns, gamma=0.5, rate=0.001)
    rng, learner = np.random.default_rng(2), dqn.new_learner(options, 4)
    policy = dqn.recording_policy(policies.asp(), options, 20)
    state, now, rows, times, actions = policy.init(np.ones(K, bool)), 7.0, [], [], []
    decide = jax.jit(policy.decide)
    for n, (told, seconds, waiting) in enumerate(episode(rng, 9), start=1):
        now += seconds
        rows.append([n, *told])
        times.append(now)
        actions.append(RELEASE_ALL if waiting.sum() > 1 else RELEASE_ONE)
        state, _ = decide(state, made_up(told, waiting, now))
    told = jax.device_get(state)  # as from a lane
    made = dqn.pretrained(options, learner, dqn.record_of(told, lost_seconds=0.0, options=options))
    gamma = 1.0 if returns == "undiscounted" else options.gamma
    spans = np.diff(times) / options.unit_seconds
    goals = [-sum(gamma**j * span for j, span in enumerate(spans[i:])) for i in range(8)]
    scaling = jax.tree.map(np.asarray, learner.scaling)
    states = list(plain_states(rows, scaling))[:8]
    before = tuple(tuple(np.asarray(x, np.float64) for x in part) for part in learner.online)
    expected = descend(before, states, actions[:8], goals, options.rate)
    for a, b in zip(jax.tree.leaves(made.online), jax.tree.leaves(Network(*expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(made.online), jax.tree.leaves(made.target), strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------------------------------------- traps, one by one


def recorded(policy, moments):
    """The actions that a record holds of pushes (worker, waiting)."""
    policy = dqn.recording_policy(policy, SMALL, 10)
    state, clocks, decide = policy.init(np.ones(3, bool)), np.zeros(3, np.int32), jax.jit(policy.decide)
    for worker, waiting in moments:
        clocks[worker] += 1
        push = Push(np.int32(worker), clocks.copy(), np.array(waiting, bool), np.ones(3, bool), 1.0, np.int32(0), 0.0)
        state, _ = decide(state, push)
    return np.asarray(state.record.rows)[: len(moments), 4].astype(int).tolist()


def test_a_record_names_what_a_fixed_policy_did():
    barrier = [(0, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1])]
    assert recorded(policies.bsp(), barrier) == [HOLD, HOLD, RELEASE_ALL]
    assert recorded(policies.asp(), [(0, [1, 0, 0]), (1, [0, 1, 0])]) == [RELEASE_ONE, RELEASE_ONE]
    ahead = [(0, [1, 0, 0]), (0, [1, 0, 0]), (1, [1, 1, 0])]
    assert recorded(policies.ssp_as_printed(2), ahead) == [RELEASE_ONE, HOLD, RELEASE_ONE]


def test_only_a_run_that_came_to_its_end_ends():
    state = SimpleNamespace(learner=dqn.new_learner(SMALL, 0)._replace(stored=jnp.asarray(8)))
    for final, as_printed, marked in ((True, False, 1.0), (False, False, 0.0), (True, True, 0.0)):
        options = replace(SMALL, as_printed=as_printed)
        pool = np.asarray(dqn.after_run(state, final=final, lost_seconds=8.0 if final else 0.0, options=options).pool)
        expected = np.zeros_like(pool)
        expected[7, 7], expected[7, 6] = marked, marked * 8.0 / options.unit_seconds
        np.testing.assert_array_equal(pool, expected)


def test_what_is_learned_is_the_network_that_learns_or_as_printed_its_copy():
    learner = dqn.new_learner(SMALL, 0)._replace(target=jax.tree.map(jnp.asarray, untrained(9)))
    assert dqn.trained_network(SMALL, learner)[0] is learner.online
    assert dqn.trained_network(replace(SMALL, as_printed=True), learner)[0] is learner.target


def test_learners_of_equal_options_share_one_engine():
    one, other = (dqn.new_learner(SMALL, seed) for seed in (0, 1))
    assert dqn.learning_policy(SMALL, one).decide is dqn.learning_policy(replace(SMALL), other).decide
    assert dqn.exploring_policy(SMALL, one, 1, 9).decide is dqn.exploring_policy(SMALL, other, 2, 5).decide
    assert dqn.recording_policy(policies.bsp(), SMALL, 9).decide is dqn.recording_policy(policies.asp(), SMALL, 9).decide


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gamma": 0.0}, "gamma 0.0: it lies above 0, up to 1"),
        ({"epsilon": 1.5}, "epsilon 1.5: it is a probability"),
        ({"rate": 0.0}, "rate 0.0: give more than 0"),
        ({"replay": 3}, "replay 3: the pool must hold a mini-batch at least"),
        ({"copy": 0}, "copy 0: give at least 1"),
        ({"steps": 0}, "steps 0: give at least 1"),
        ({"anneal": -1}, "anneal -1: give pushes, or 0 for never"),
        ({"optimizer": "lion"}, "optimizer 'lion': choose one of sgd, adam"),
        ({"returns": "square"}, "returns 'square': choose undiscounted or discounted"),
        ({"unit_seconds": 0.0}, "unit_seconds 0.0: give more than 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_options_that_make_no_sense_are_refused(changed, reason):
    with pytest.raises(ValueError, match=r"Cannot train RLP with " + reason):
        replace(SMALL, **changed)
