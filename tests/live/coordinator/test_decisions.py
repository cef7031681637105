"""Decisions in plain Python are those of the policy as JAX compiles it, bit by bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.live.coordinator.branches import decisions
from harness.live.coordinator.branches.decisions import Decider
from tuners import policies
from tuners.actions import Decision, Push, SyncPolicy

NODES = 5

COUNTING = (
    policies.asp(),
    policies.bsp(),
    policies.ssp(2),
    policies.discard(2),
    policies.discard(0, stops=True),
    policies.k_sync(2),
    policies.k_batch_sync(3),
    policies.k_async(3),
    policies.buffered(2),
    policies.sync_switch(20),
)
OTHERS = (policies.admit(1), policies.backup_workers(2), policies.dssp(1, 4))


class _Best(NamedTuple):
    loss: Any  # float scalar


def _decide_by_loss(state: _Best, push: Push) -> tuple[_Best, Decision]:
    """Drops a gradient whose loss is twice the best."""
    best = jnp.minimum(state.loss, push.loss)
    return _Best(best), Decision(release=push.waiting, accept=push.loss <= 2 * best)


def _decide_in_turn(state: Any, push: Push) -> tuple[Any, Decision]:
    """Keeps what it was shown last: nobody may change these arrays later."""
    return (push.clocks, push.waiting), Decision(release=push.waiting & (push.clocks <= state[0]) | state[1])


def _decide_beyond(state: Any, push: Push) -> tuple[Any, Decision]:
    """Counts beyond what its types hold, in every way that needs no JAX."""
    total, small = state
    total = total * 1_000_003 + jnp.sum(push.clocks * (1 << 29), dtype=jnp.int32) - push.worker
    small = small + push.staleness.astype(jnp.int8) * jnp.int8(100)
    far = -(push.clocks - total) >= jnp.minimum(~total, push.clocks.astype(jnp.int8) - jnp.max(push.clocks))
    near = jnp.where(push.waiting, push.clocks, total) != jnp.where(total > 0, push.clocks, push.clocks + total)
    release = push.waiting & (far | near)
    return (total, small), Decision(release=release, accept=jnp.all(near) | (small < 0), step=total.astype(bool))


BEYOND = SyncPolicy("beyond", lambda _: (np.asarray(2**31 - 1, np.int32), np.asarray(-128, np.int8)), _decide_beyond)
BY_LOSS = SyncPolicy("by loss", lambda _: _Best(np.asarray(np.inf)), _decide_by_loss)
IN_TURN = SyncPolicy("in turn", lambda a: (np.zeros(a.shape, np.int32), np.zeros(a.shape, bool)), _decide_in_turn)


def pushes(seed: int, count: int) -> list[Push]:
    """Random pushes; clocks only go up."""
    random, clocks = np.random.default_rng(seed), np.zeros(NODES, np.int32)
    active = np.array([True] * (NODES - 1) + [bool(seed % 2)])
    made = []
    for number in range(count):
        worker = int(random.integers(NODES - 1))
        clocks[worker] += 1
        waiting = active & (random.random(NODES) < 0.5)
        waiting[worker] = True
        real = [number * 0.1, *random.random(3)]
        whole = np.int32(worker), np.int32(random.integers(5))
        made.append(Push(whole[0], clocks.copy(), waiting, active, real[0], whole[1], *real[1:]))
    return made


@pytest.mark.parametrize("policy", [*COUNTING, *OTHERS, BY_LOSS, IN_TURN, BEYOND], ids=lambda p: p.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_decisions_are_those_of_the_compiled_policy(policy: SyncPolicy, seed: int) -> None:
    active = pushes(seed, 1)[0].active
    mine = theirs = jax.tree.map(np.asarray, policy.init(active))
    decide, compiled = Decider(policy.decide, mine, NODES), jax.jit(policy.decide)
    for push in pushes(seed, 60):
        found = decide(mine, push)
        theirs, decision = compiled(theirs, push)
        mine = found.state
        assert found.accept == bool(decision.accept)
        assert found.step == bool(decision.step)
        assert np.array_equal(found.release, decision.release)
        forms: list[Any] = [jax.tree.structure(state) for state in (mine, theirs)]
        assert forms[0] == forms[1]
        for leaf, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
            assert np.array_equal(leaf, other)


@pytest.mark.parametrize("policy", [*COUNTING, *OTHERS, IN_TURN], ids=lambda p: p.name)
def test_without_groups_all_but_the_step_is_decided_alike(policy: SyncPolicy) -> None:
    active = pushes(0, 1)[0].active
    mine = theirs = jax.tree.map(np.asarray, policy.init(active))
    each, grouped = (Decider(policy.decide, mine, NODES, groups=groups) for groups in (False, True))
    for push in pushes(0, 60):
        found, other = each(mine, push), grouped(theirs, push)
        assert found.accept == other.accept
        assert np.array_equal(found.release, other.release)
        mine, theirs = found.state, other.state
        for leaf, same in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert np.array_equal(leaf, same)


@pytest.mark.parametrize("policy", [*COUNTING, IN_TURN, BEYOND], ids=lambda p: p.name)
def test_a_policy_that_counts_needs_no_program(policy: SyncPolicy) -> None:
    state = jax.tree.map(np.asarray, policy.init(np.ones(NODES, bool)))
    assert not Decider(policy.decide, state, NODES).needs_jax


def test_for_many_nodes_every_policy_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_MOST_NODES", NODES - 1)
    policy, push = policies.ssp(2), pushes(0, 1)[0]
    state = jax.tree.map(np.asarray, policy.init(push.active))
    many = Decider(policy.decide, state, NODES)
    assert many.needs_jax
    monkeypatch.undo()
    few = Decider(policy.decide, state, NODES)
    assert not few.needs_jax
    assert list(many(state, push).release) == list(few(state, push).release)


def test_a_policy_that_calculates_with_losses_is_compiled() -> None:
    assert Decider(BY_LOSS.decide, _Best(np.asarray(np.inf)), NODES).needs_jax


def test_a_state_that_changes_its_type_is_compiled() -> None:
    def decide(state: Any, push: Push) -> tuple[Any, Decision]:
        return state + jnp.int32(1), Decision(release=push.waiting)

    assert Decider(decide, np.asarray(0, np.int16), NODES).needs_jax
    assert not Decider(decide, np.asarray(0, np.int32), NODES).needs_jax
