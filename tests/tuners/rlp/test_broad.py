"""RLP's broad policy: its modes are known rules, its bounds hold for any weights, its inputs have no scale."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulators.cluster.cluster import Cluster
from tests.support.small_jobs import machine, plain_job, system
from tests.tuners.rlp.test_rlp import push
from tests.tuners.test_policies import MASKS, ORDERS, K, run
from tuners import policies
from tuners.actions import Install, Push
from tuners.rlp import policy_file, tuner
from tuners.rlp.broad import (
    MODES,
    MOST_RESTARTS,
    MOST_ROUNDS,
    PooledNetwork,
    TrainedBroad,
    broad_policy,
    decided,
    mode_values,
    rule_network,
)
from tuners.rlp.features import JOB, WORKER, counted, features, no_statistics
from tuners.rlp.network import Trained, untrained

ASP, K_ASYNC, K_SYNC = 0, 1, 3  # indices of modes
BLANK = jax.tree.map(np.zeros_like, rule_network(round_from=1.0, mode=K_SYNC, undone=1.0))
RULE = rule_network(round_from=1.7, mode=K_SYNC, undone=4.0)


def always(mode: int) -> PooledNetwork:
    """A network that chooses one mode."""
    return BLANK._replace(mode_biases=np.float32(np.arange(len(MODES)) == mode))


def wild(seed: int, scale: float = 3.0) -> PooledNetwork:
    """A network of large random weights."""
    rng = np.random.default_rng(seed)
    return PooledNetwork(*(np.asarray(rng.normal(size=np.shape(part)) * scale, np.float32) for part in BLANK))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule"), [(ASP, policies.asp()), (K_ASYNC, policies.k_async(2))], ids=["asp", "k_async"])
@given(order=ORDERS)
@settings(max_examples=20)
def test_modes_are_the_known_rules(mode, rule, order) -> None:
    """As long as no worker has waited for two rounds, which happens if others push and it is not picked."""
    missed = np.zeros(K)
    for mine, theirs in zip(run(broad_policy(always(mode)), order), run(rule, order), strict=True):
        missed = np.where(theirs.waiting, missed + 1, 0)
        assert missed.max() <= MOST_ROUNDS * K
        assert mine.release.tolist() == theirs.release.tolist()


@pytest.mark.slow
@given(ORDERS)
@settings(max_examples=20)
def test_k_sync_is_the_known_rule_as_long_as_restarts_are_few(order) -> None:
    """Up to the push at which a worker would have to begin anew for the fourth time."""
    again = np.zeros(K)
    for mine, theirs in zip(run(broad_policy(always(K_SYNC)), order), run(policies.k_sync(2), order), strict=True):
        again[mine.worker] = 0
        again += theirs.release & ~theirs.waiting
        if again.max() > MOST_RESTARTS:
            break
        assert mine.release.tolist() == theirs.release.tolist()


@given(ORDERS, MASKS, st.integers(0, 30))
@settings(max_examples=40)
def test_no_weights_make_a_worker_wait_or_begin_anew_without_bound(order, active, seed) -> None:
    """`run` fails, too, when no worker is left that could push."""
    missed, again, workers = np.zeros(K), np.zeros(K), sum(active)
    for m in run(broad_policy(wild(seed)), order, active):
        missed[m.worker] = again[m.worker] = 0
        others = np.arange(K) != m.worker
        missed += m.waiting & others
        again += m.release & ~m.waiting
        missed[m.release] = 0
        assert missed.max() < MOST_ROUNDS * workers
        assert again.max() <= MOST_RESTARTS
        assert not (m.release & ~np.array(active)).any()


def told(worker: int, number: int, waiting, *, loss: float = 1.0, seconds: float = 1.0, nodes: int = K, active=None) -> Push:
    """A push of a made-up job whose losses and times are in units of `loss` and `seconds`."""
    active = np.ones(nodes, bool) if active is None else active
    before = loss * (2.0 / (number + 1) + 0.3 * worker)
    clocks = np.full(nodes, number // 3 + 1, np.int32)
    now = seconds * (number + 1.0 + 0.1 * worker)
    return Push(np.int32(worker), clocks, waiting, active, now, np.int32(number % 4), before * 1.1, before, before * 0.9)


@jax.jit  # as in the engine; else JAX compiles each of its operations
def sees(statistics, push: Push):
    """What it sees after the push, which releases all that wait, and what it remembers then."""
    statistics = counted(statistics, push)
    return features(statistics, push), statistics.after(push, push.waiting, np.zeros(push.waiting.shape, bool))


def looked(pushes: list[Push]):
    """The features after these pushes, of which each releases all that wait."""
    statistics = no_statistics(pushes[0].active)
    for each in pushes:
        found, statistics = sees(statistics, each)
    return tuple(np.asarray(table) for table in found)


WORKERS = [0, 1, 2, 3, 4, 2, 1, 0, 0, 3]
ALONE = [np.arange(K) == w for w in WORKERS]


def test_it_sees_the_same_whatever_the_units_of_losses_and_times() -> None:
    plain = looked([told(w, n, ALONE[n]) for n, w in enumerate(WORKERS)])
    scaled = looked([told(w, n, ALONE[n], loss=50.0, seconds=0.01) for n, w in enumerate(WORKERS)])
    for one, other in zip(plain, scaled, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    job, each = plain
    assert job.shape == (len(JOB),)
    assert each.shape == (K, len(WORKER))
    assert np.ptp(each, axis=0).max() > 0.1


@pytest.mark.parametrize("staleness", [1, 8])
def test_what_a_round_of_others_changes_is_seen_alike_under_any_rule(staleness) -> None:
    """Each push of another worker lowers the loss of a mini-batch by 2 %, however many of them came between pull and push.

    Otherwise waiting would hide the harm that it is meant to prevent, and the policy would stop waiting.
    """

    def pushed(n: int) -> Push:
        one = told(n % K, n, ALONE[n % K])
        return one._replace(staleness=np.int32(staleness), loss=1.0, loss_before=0.98**staleness, loss_after=0.9)

    job, _ = looked([pushed(n) for n in range(6 * K)])
    found = dict(zip(JOB, job, strict=True))
    assert found["moved"] == pytest.approx(np.log(0.02 * K), abs=0.02)
    assert found["together"] == pytest.approx(-1.0)


def test_it_sees_whether_the_loss_falls() -> None:
    def course(factor: float) -> float:
        losses = factor ** np.arange(20 * K)
        pushes = [told(n % K, n, ALONE[n % K])._replace(loss_before=x) for n, x in enumerate(losses)]
        return float(looked(pushes)[0][JOB.index("falling")])

    assert course(1.0) == pytest.approx(0.0, abs=1e-4)
    assert course(0.99) < -0.05
    assert course(1.01) > 0.05


@pytest.mark.slow
@given(st.permutations(range(K)))
@settings(max_examples=5)
def test_workers_can_be_renamed_and_nodes_that_are_no_workers_make_no_difference(names) -> None:
    names = np.array(names)
    there = np.append(np.ones(K, bool), np.zeros(3, bool))
    plain = looked([told(w, n, ALONE[n]) for n, w in enumerate(WORKERS)])
    renamed = looked([told(w, n, ALONE[n][np.argsort(names)])._replace(worker=names[w]) for n, w in enumerate(WORKERS)])
    more = looked([told(w, n, np.append(ALONE[n], [False] * 3), nodes=K + 3, active=there) for n, w in enumerate(WORKERS)])
    for network in (policy_file.shipped().network, wild(1, 0.5)):
        values = [
            np.asarray(mode_values(network, *seen_as, active))
            for seen_as, active in ((plain, np.ones(K, bool)), (renamed, np.ones(K, bool)), (more, there))
        ]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(values[2], values[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unknown", [np.nan, np.inf, -np.inf, 0.0])
def test_losses_that_are_unknown_or_not_finite_decide_all_the_same(unknown) -> None:
    """Timing-only jobs have no losses: then the rule sees no harm in staleness and lets everybody go on, like ASP."""
    policy = broad_policy(RULE)
    state = policy.init(np.ones(3, bool))
    for n in range(6):
        waiting = np.arange(3) == n % 3
        asked = push(n % 3, waiting, seconds=float(n + 1), before=unknown, after=unknown)
        state, decision = policy.decide(state, asked)
        assert np.asarray(decision.release).tolist() == waiting.tolist()


@pytest.mark.parametrize(
    ("share", "drift", "mode"), [(0.1, 0.0, ASP), (5.0, 0.0, K_SYNC), (5.0, 2.0, ASP)], ids=["far below", "edge", "by class"]
)
def test_the_rule_goes_from_asp_to_groups_as_a_round_begins_to_matter(share, drift, mode) -> None:
    job = np.zeros(len(JOB))
    job[JOB.index("fresh")], job[JOB.index("drift")] = np.log(share), drift
    values = mode_values(RULE, job, np.zeros((2, len(WORKER))), np.ones(2, bool))
    assert int(np.argmax(values)) == mode


def test_who_computes_begins_anew_only_where_its_group_is_complete() -> None:
    statistics = no_statistics(np.ones(5, bool))
    alone, pair = np.arange(5) < 1, np.arange(5) < 2
    for waiting, mode, released, restarted in (
        (alone, ASP, 1, 0),
        (alone, K_SYNC, 0, 0),
        (pair, K_ASYNC, 2, 0),
        (pair, K_SYNC, 5, 3),
    ):
        release, restart = decided(statistics, push(0, waiting), np.int32(mode))
        assert (int(release.sum()), int(restart.sum())) == (released, restarted)
    often = statistics._replace(again=np.full(5, MOST_RESTARTS))
    release, restart = decided(often, push(0, pair), np.int32(K_SYNC))
    assert (int(release.sum()), int(restart.sum())) == (2, 0)
    late = statistics._replace(missed=np.float32([MOST_ROUNDS * 5, 0, 0, 0, 0]))
    assert decided(late, push(1, alone), np.int32(K_SYNC))[0].tolist() == [True, False, False, False, False]


# ------------------------------------------------------------------------------------------------------------ its file


def test_a_file_of_either_form_says_which_it_is(tmp_path) -> None:
    broad, printed = TrainedBroad(wild(3), {"seed": 3}), Trained(untrained(3), about={"seed": 4})
    for name, made in (("broad", broad), ("printed", printed)):
        (tmp_path / name).write_bytes(policy_file.dumps(made))
    back = policy_file.load(str(tmp_path / "broad"))
    assert isinstance(back, TrainedBroad)
    assert back.about == broad.about
    assert policy_file.dumps(back) == policy_file.dumps(broad)
    for one, other in zip(back.network, broad.network, strict=True):
        np.testing.assert_array_equal(one, other)
    assert isinstance(policy_file.load(str(tmp_path / "printed")), Trained)
    with pytest.raises(ValueError, match="mode_biases are not finite, so its training diverged"):
        policy_file.dumps(TrainedBroad(broad.network._replace(mode_biases=np.full(len(MODES), np.nan, np.float32))))


def test_a_broad_file_for_other_features_or_sizes_is_refused() -> None:
    version, about, arrays = policy_file.unpack(
        policy_file.dumps(TrainedBroad(wild(0))), "rlp-policy", (policy_file.BROAD,), "Cannot read", "mend the test"
    )
    other = policy_file.pack("rlp-policy", version, {**about, "job_features": ["round"]}, arrays)
    with pytest.raises(ValueError, match="Cannot load a policy from p: its features or modes are not those of this"):
        policy_file.loads(other, "p")
    larger = policy_file.pack("rlp-policy", version, about, arrays | {"mode_biases": np.zeros(9, np.float32)})
    with pytest.raises(ValueError, match=rf"mode_biases is \(9,\), not \({len(MODES)},\)"):
        policy_file.loads(larger, "p")


def test_the_tuner_plays_the_broad_policy_the_printed_one_or_a_file(tmp_path) -> None:
    _, workload, setting, around = plain_job()
    nodes = Cluster(tuple((n, machine()) for n in (*setting.workers, *setting.servers)))
    job = system(nodes, workload, setting, around).job
    usual, printed = next(tuner.rlp(job)), next(tuner.rlp(job, as_printed=True))
    assert isinstance(usual, Install)
    assert isinstance(printed, Install)
    assert usual.policy.decide is not printed.policy.decide
    assert usual.policy.seconds < printed.policy.seconds == tuner.DECISION_SECONDS
    (tmp_path / "mine.npz").write_bytes(policy_file.dumps(TrainedBroad(wild(5))))
    mine = next(tuner.rlp(job, policy=str(tmp_path / "mine.npz"), decision_seconds=0.5))
    assert isinstance(mine, Install)
    assert mine.policy.decide is usual.policy.decide
    assert mine.policy.seconds == 0.5
    np.testing.assert_array_equal(mine.policy.init(np.ones(2, bool)).network.mode_biases, wild(5).mode_biases)
    with pytest.raises(ValueError, match=r"mine.npz as printed: it holds a broad policy; leave as_printed out"):
        next(tuner.rlp(job, policy=str(tmp_path / "mine.npz"), as_printed=True))
