"""RLP's policy: its state, its actions, that it can imitate the paper's fixed policies, and its file."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from io import BytesIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.training.train import TrainingPlan
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from tests.support.small_jobs import job as workload_of
from tests.support.small_jobs import machine, plain_job, system
from tests.tuners.test_policies import MASKS, ORDERS, K, run
from tuners import policies
from tuners.actions import Install, Push, Rejected, Run, Setting
from tuners.rlp import policy_file, tuner
from tuners.rlp.network import (
    HOLD,
    RELEASE_ALL,
    RELEASE_ONE,
    Network,
    Scaling,
    Trained,
    decision_of,
    network_input,
    untrained,
    with_push,
)
from tuners.rlp.options import Options

RAW = Scaling(factor=np.ones(4, np.float32), limit=np.float32(1e6))


def preferring(*actions):
    """A policy that takes the first of these actions that is allowed, in every state."""
    blank = untrained(0)
    values = np.array([-actions.index(a) for a in range(3)], np.float32)
    flat = jax.tree.map(np.zeros_like, blank)
    return tuner.greedy_policy(Trained(flat._replace(biases=(*flat.biases[:-1], values))))


def push(worker, waiting, active=None, seconds=1.0, staleness=0, before=1.0, after=0.5):
    waiting = np.array(waiting, bool)
    active = np.ones(len(waiting), bool) if active is None else np.array(active)
    clocks = np.ones(len(waiting), np.int32)
    losses = np.float64(before), np.float64(after)
    return Push(np.int32(worker), clocks, waiting, active, np.float64(seconds), np.int32(staleness), losses[0], *losses)


# -------------------------------------------------------------------------------------------------------- what it sees


def plain_states(rows, scaling):
    """The paper's S_n, push by push: the tuples (n, L, L' - L, l) of the ten newest pushes, zeros before the first."""
    seen = deque([[0.0] * 4] * 10, maxlen=10)
    for row in rows:
        seen.appendleft(row)
        yield np.clip((np.array(seen) - scaling.offset) * scaling.factor, -scaling.limit, scaling.limit).ravel()


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_at_the_limit_and_decides_all_the_same(wild):
    history = with_push(jnp.zeros((10, 4), jnp.float32), push(0, [True, False], before=wild, after=wild))
    assert np.abs(network_input(Scaling(), history)).max() == Scaling().limit
    policy = tuner.greedy_policy(Trained(untrained(0)))
    _, decision = policy.decide(policy.init(np.ones(2, bool)), push(0, [True, True], before=wild, after=wild))
    assert np.asarray(decision.release).any()


# ---------------------------------------------------------------------------------------------------- what it may do


@pytest.mark.parametrize(
    ("action", "release"),
    [(HOLD, [0, 0, 0, 0]), (RELEASE_ONE, [0, 1, 0, 0]), (RELEASE_ALL, [1, 1, 0, 0])],
    ids=["nobody", "the pusher", "all who wait"],
)
def test_an_action_releases_whom_the_paper_says(action, release):
    decision = decision_of(jnp.asarray(action), push(1, [True, True, False, False]))
    assert decision.release.tolist() == [bool(r) for r in release]
    assert decision.accept is True
    assert decision.step is True


@given(ORDERS, MASKS, st.permutations(range(3)))
@settings(max_examples=30)
def test_it_never_stands_still_whatever_it_prefers(order, active, preferred):
    """`run` fails when no worker is left that could push."""
    for m in run(preferring(*preferred), order, active):
        assert not (m.release & ~m.waiting).any()


@given(ORDERS, MASKS)
@settings(max_examples=30)
def test_it_can_be_bsp_and_asp(order, active):
    for q, fixed in (
        (preferring(HOLD, RELEASE_ALL, RELEASE_ONE), policies.bsp()),
        (preferring(RELEASE_ONE, 0, 2), policies.asp()),
    ):
        for a, b in zip(run(q, order, active), run(fixed, order, active), strict=True):
            assert a.release.tolist() == b.release.tolist()


@pytest.mark.parametrize("s", [1, 2, 5])
def test_it_can_be_ssp_on_two_workers(s):
    """One worker is so slow that the other is held again and again. Only the slow one has pushes by others since its pull.

    Q(nobody) = n - s + 1/2, Q(the pusher) = 0, Q(all who wait) = large x pushes between since the pull, of the newest push.
    """
    blank = jax.tree.map(lambda x: np.zeros_like(x), untrained(0))
    first, second, last = (np.array(w) for w in blank.weights)
    first[0, 0] = first[3, 1] = second[0, 0] = second[1, 1] = 1.0  # n and l pass the leaky units as they are, being positive
    last[0, HOLD], last[1, RELEASE_ALL] = 1.0, 1e4
    network = Network((first, second, last), (*blank.biases[:-1], np.float32([0.5 - s, 0, 0])))

    held = 0
    mines, printeds = _timed(tuner.greedy_policy(Trained(network, RAW)), s), _timed(policies.ssp_as_printed(s), s)
    for mine, printed in zip(mines, printeds, strict=True):
        assert mine == printed
        held += not any(mine)
    assert held > 3


def _timed(policy, s, pushes=40):
    """The workers released at each push of two, one of them 2 s + 1 times as slow; staleness counts as in the engine."""
    cycle, due, clocks = [1.0, 2 * s + 1.01], [1.0, 2 * s + 1.01], np.zeros(2, np.int32)
    pulled, state, active, decide = [0, 0], policy.init(np.ones(2, bool)), np.ones(2, bool), jax.jit(policy.decide)
    for n in range(pushes):
        worker = int(np.argmin(due))
        now, due[worker] = due[worker], np.inf
        clocks[worker] += 1
        told = push(worker, np.isinf(due), active, now, n - pulled[worker])._replace(clocks=clocks.copy())
        state, decision = decide(state, told)
        release = np.asarray(decision.release).tolist()
        for w in np.flatnonzero(release):
            due[w], pulled[w] = now + cycle[w], n + 1
        yield release


@given(ORDERS, st.integers(1, 6))
@settings(max_examples=30)
def test_its_three_actions_are_enough_for_ssp(order, s):
    """With D = p_s - min p: W_s if 0 < D < s, none if D = s, all that wait if D = 0 (Section 3.1)."""
    for m in run(policies.ssp_as_printed(s), order):
        ahead = m.clocks[m.worker] - m.clocks.min()
        action = RELEASE_ALL if ahead == 0 else RELEASE_ONE if ahead < s else HOLD
        assert decision_of(jnp.asarray(action), push(m.worker, m.waiting)).release.tolist() == m.release.tolist()


@given(ORDERS, st.permutations(range(K)))
@settings(max_examples=20)
def test_it_does_not_know_who_is_who(order, names):
    """Renaming the workers renames those released; and workers that are not there make no difference."""
    policy, names = tuner.greedy_policy(policy_file.shipped_as_printed()), np.array(names)
    there = np.append(np.ones(K, bool), np.zeros(3, bool))
    states = [policy.init(np.ones(K, bool)), policy.init(np.ones(K, bool)), policy.init(there)]
    for n, m in enumerate(run(policies.ssp(2), order)):
        plain = push(m.worker, m.waiting, staleness=n % 7, before=2.0 / (n + 1), after=1.9 / (n + 1))
        renamed = plain._replace(worker=names[m.worker], waiting=plain.waiting[np.argsort(names)])
        more = plain._replace(waiting=np.append(plain.waiting, [False] * 3), active=there, clocks=np.ones(K + 3, np.int32))
        decided = []
        for i, told in enumerate((plain, renamed, more)):
            states[i], decision = policy.decide(states[i], told)
            decided.append(np.asarray(decision.release))
        assert decided[1][names].tolist() == decided[0].tolist() == decided[2][:K].tolist()


def test_one_worker_alone_is_never_held():
    """The job is timing-only, too: the policy decides without any loss."""
    cluster = Cluster((("w", machine()), ("s", machine())))
    simulated = system(cluster, workload_of(), Setting(workers=("w",), servers=("s",), batch_size=8), Conditions())
    simulated.perform(Install(preferring(HOLD, RELEASE_ALL, RELEASE_ONE)))
    assert simulated.perform(Run(clocks=12)).clocks == 12
    assert simulated.status == "running"


# ------------------------------------------------------------------------------------------------------------ its file


def test_a_policy_comes_back_as_it_was_and_equal_ones_are_equal_bytes(tmp_path):
    made = Trained(untrained(3), Scaling(limit=np.float32(7)), {"seed": 3, "command": "harness train rlp"})
    data = policy_file.dumps(made)
    (tmp_path / "p.npz").write_bytes(data)
    back = policy_file.load(str(tmp_path / "p.npz"))
    assert back.about == made.about
    for one, other in zip(*(jax.tree.leaves((t.network, t.scaling)) for t in (back, made)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert policy_file.dumps(back) == data


def _changed(data, edit):
    with np.load(BytesIO(data)) as kept:
        arrays = {name: kept[name] for name in kept.files}
    edit(arrays)
    out = BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _packed(data, *, schema="rlp-policy", version=1, **changed):
    """A file with a correct digest that differs from `data` in its schema, its version or some arrays."""
    _, about, arrays = policy_file.unpack(data, "rlp-policy", (1,), "Cannot read the test's own file", "mend the test")
    return policy_file.pack(schema, version, about, arrays | changed)


DATA = policy_file.dumps(Trained(untrained(0)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no such file, or it is damaged"),
        (DATA[:-200], "no such file, or it is damaged"),
        (_changed(DATA, lambda a: a.pop("digest")), "no such file, or it is damaged"),
        (_changed(DATA, lambda a: a.update(facts=np.array([{}], object))), "no such file, or it is damaged"),
        (_changed(DATA, lambda a: a.update(weights0=a["weights0"] + 1)), "its digest does not fit"),
        (_packed(DATA, version=3), "'rlp-policy' version 3, not 'rlp-policy' version 1 or 2"),
        (_packed(DATA, schema="cat"), "it is 'cat' version 1"),
        (
            _packed(DATA, weights1=np.zeros((64, 33), np.float32)),
            r"weights1 is \(64, 33\), not \(64, 32\). Its network is not 40-64-32-3",
        ),
    ],
    ids=["empty", "cut", "no digest", "objects", "edited", "version", "schema", "shape"],
)
def test_a_file_that_holds_no_policy_is_refused(data, reason, tmp_path):
    (tmp_path / "p.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"Cannot load a policy from .*p.npz: .*" + reason) as refused:
        policy_file.load(str(tmp_path / "p.npz"))
    assert "train one with `harness train rlp`" in str(refused.value)


def test_a_file_that_is_not_there_and_a_network_that_is_not_finite():
    with pytest.raises(ValueError, match="No such file or directory; train one"):
        policy_file.load("nowhere.npz")
    lost = jax.tree.map(lambda x: x * np.float32(np.nan), untrained(0))
    with pytest.raises(ValueError, match=r"weights0.* are not finite, so its training diverged; train with a smaller rate"):
        policy_file.dumps(Trained(lost))


# ------------------------------------------------------------------------------------------------------------ the tuner


def test_the_tuner_installs_the_papers_policy_or_the_one_that_is_named(tmp_path):
    _, workload, setting, around = plain_job()
    job = system(Cluster(tuple((n, machine()) for n in (*setting.workers, *setting.servers))), workload, setting, around).job
    asked = next(tuner.rlp(job, as_printed=True))
    assert isinstance(asked, Install)
    assert (asked.policy.name, asked.policy.probes, asked.policy.seconds) == ("rlp", True, tuner.DECISION_SECONDS)
    (tmp_path / "mine.npz").write_bytes(policy_file.dumps(Trained(untrained(5))))
    mine = next(tuner.rlp(job, policy=str(tmp_path / "mine.npz"), as_printed=True, decision_seconds=0.5))
    assert mine.policy.decide is asked.policy.decide
    assert mine.policy.seconds == 0.5
    held = mine.policy.init(np.ones(2, bool))
    np.testing.assert_array_equal(held.network.weights[0], untrained(5).weights[0])
    refused = tuner.rlp(job)
    next(refused)
    with pytest.raises(StopIteration):
        refused.throw(Rejected("Cannot do that: the test refuses it."))


def test_the_shipped_policy_of_the_papers_form_says_how_it_was_made():
    about = policy_file.shipped_as_printed().about
    plan = dict(about["plan"])
    options = Options(**plan.pop("options"))
    made = TrainingPlan(**{k: tuple(v) if isinstance(v, list) else v for k, v in plan.items()} | {"options": options})
    assert made.about() == about["plan"]
    assert made.command() == about["command"]
    assert made.seed == about["seed"]
    assert sum(about["endings"].values()) == made.runs
    assert replace(made, seed=made.seed + 1).command() != about["command"]
