"""RLP's broad policy: known rules are constant thresholds, its bounds hold for any weights, its inputs have no scale."""

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
    MOST_RESTARTS,
    MOST_ROUNDS,
    UNITS,
    PooledNetwork,
    TrainedBroad,
    broad_policy,
    decided,
    rule_network,
    thresholds,
)
from tuners.rlp.network import Trained, untrained
from tuners.rlp.sight import JOB, WORKER, features, first_sight, seen

NEVER = 9.0  # a share that cannot be reached
BLANK = jax.tree.map(np.zeros_like, rule_network(round_from=1.0, group=0.5, undone=1.0))


def constant(waits: float, computes: float) -> PooledNetwork:
    """Thresholds that depend on nothing but whether a worker computes."""
    worker, biases, own = (np.array(BLANK[i]) for i in (0, 1, 4))
    worker[WORKER.index("busy"), 0], biases[0] = 40.0, -20.0
    own[0] = (computes - waits) / 2
    return BLANK._replace(worker_weights=worker, worker_biases=biases, own=own, base=np.float32((waits + computes) / 2))


def wild(seed: int, scale: float = 3.0) -> PooledNetwork:
    """A network of large random weights."""
    rng = np.random.default_rng(seed)
    return PooledNetwork(*(np.asarray(rng.normal(size=np.shape(part)) * scale, np.float32) for part in BLANK))


RULES = [
    (policies.asp(), constant(0.0, NEVER)),
    (policies.bsp(), constant(1.0, NEVER)),
    (policies.k_async(2), constant(2 / K, NEVER)),
    (policies.k_async(4), constant(4 / K, NEVER)),
]


@pytest.mark.parametrize(("rule", "network"), RULES, ids=[rule.name for rule, _ in RULES])
@given(order=ORDERS)
@settings(max_examples=20)
def test_known_rules_are_constant_thresholds(rule, network, order) -> None:
    for mine, theirs in zip(run(broad_policy(network), order), run(rule, order), strict=True):
        assert mine.release.tolist() == theirs.release.tolist()


@given(ORDERS)
@settings(max_examples=20)
def test_it_is_k_sync_as_long_as_restarts_are_few(order) -> None:
    """Up to the push at which a worker would have to begin anew for the fourth time."""
    again = np.zeros(K)
    pairs = zip(run(broad_policy(constant(2 / K, 2 / K)), order), run(policies.k_sync(2), order), strict=True)
    for mine, theirs in pairs:
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


def test_a_policy_that_would_park_workers_for_good_lets_them_go_on() -> None:
    """The thresholds are out of reach; each worker that waits goes on after two rounds of pushes by the only other one."""
    orders = [1, *[0] * 40]
    released = [m.release for m in run(broad_policy(constant(NEVER, NEVER)), orders)]
    assert sum(r[1] for r in released) > 0


def told(worker: int, number: int, waiting, *, loss: float = 1.0, seconds: float = 1.0, nodes: int = K, active=None) -> Push:
    """A push of a made-up job whose losses and times are in units of `loss` and `seconds`."""
    active = np.ones(nodes, bool) if active is None else active
    before = loss * (2.0 / (number + 1) + 0.3 * worker)
    clocks = np.full(nodes, number // 3 + 1, np.int32)
    now = seconds * (number + 1.0 + 0.1 * worker)
    return Push(np.int32(worker), clocks, waiting, active, now, np.int32(number % 4), before * 1.1, before, before * 0.9)


def looked(pushes: list[Push]):
    """The features after these pushes, of which each releases all that wait."""
    sight = first_sight(pushes[0].active)
    for each in pushes:
        sight = seen(sight, each)
        found = features(sight, each)
        sight = sight.after(each, each.waiting, np.zeros_like(each.waiting))
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


@given(st.permutations(range(K)))
@settings(max_examples=10)
def test_workers_can_be_renamed_and_nodes_that_are_no_workers_make_no_difference(names) -> None:
    names = np.array(names)
    there = np.append(np.ones(K, bool), np.zeros(3, bool))
    plain = looked([told(w, n, ALONE[n]) for n, w in enumerate(WORKERS)])
    renamed = looked([told(w, n, ALONE[n][np.argsort(names)])._replace(worker=names[w]) for n, w in enumerate(WORKERS)])
    more = looked([told(w, n, np.append(ALONE[n], [False] * 3), nodes=K + 3, active=there) for n, w in enumerate(WORKERS)])
    for network in (policy_file.shipped().network, wild(1, 0.5)):
        limits = [
            np.asarray(thresholds(network, *seen_as, active))
            for seen_as, active in ((plain, np.ones(K, bool)), (renamed, np.ones(K, bool)), (more, there))
        ]
        np.testing.assert_allclose(limits[1][names], limits[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(limits[2][:K], limits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unknown", [np.nan, np.inf, -np.inf, 0.0])
def test_losses_that_are_unknown_or_not_finite_decide_all_the_same(unknown) -> None:
    """Timing-only jobs have no losses: then the rule sees no harm in staleness and lets everybody go on, like ASP."""
    policy = broad_policy(rule_network(round_from=1.7, group=0.5, undone=4.0))
    state = policy.init(np.ones(3, bool))
    for n in range(6):
        waiting = np.arange(3) == n % 3
        asked = push(n % 3, waiting, seconds=float(n + 1), before=unknown, after=unknown)
        state, decision = policy.decide(state, asked)
        assert np.asarray(decision.release).tolist() == waiting.tolist()


def test_the_rule_goes_from_asp_to_groups_as_a_round_begins_to_matter() -> None:
    network = rule_network(round_from=1.7, group=0.5, undone=4.0)
    busy, waits = np.zeros((2, len(WORKER))), np.zeros((2, len(WORKER)))
    busy[:, WORKER.index("busy")] = 1.0
    active = np.ones(2, bool)
    found = {}
    for name, share, drift in (("far below", 0.1, 0.0), ("edge", 5.0, 0.0), ("skewed", 5.0, 2.0)):
        job = np.zeros(len(JOB))
        job[JOB.index("fresh")], job[JOB.index("drift")] = np.log(share), drift
        found[name] = [float(thresholds(network, job, rows, active)[0]) for rows in (waits, busy)]
    assert found["far below"][0] == pytest.approx(0.0, abs=0.05)
    assert found["far below"][1] > 1.0  # nobody begins anew
    assert found["edge"][0] == pytest.approx(0.5, abs=0.05)
    assert found["edge"][1] < found["edge"][0]
    assert found["skewed"][0] < 0.25


def test_who_computes_begins_anew_only_where_somebody_goes_on() -> None:
    active, waiting = np.ones(3, bool), np.array([True, False, False])
    asked = push(0, waiting)
    sight = first_sight(active)
    release, restart = decided(sight, asked, np.array([0.0, 0.0, NEVER]))
    assert (release.tolist(), restart.tolist()) == ([True, True, False], [False, True, False])
    release, _ = decided(sight, asked, np.array([NEVER, 0.0, 0.0]))
    assert not release.any()
    release, _ = decided(sight._replace(again=np.full(3, MOST_RESTARTS)), asked, np.zeros(3))
    assert release.tolist() == [True, False, False]


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
    with pytest.raises(ValueError, match="base are not finite, so its training diverged"):
        policy_file.dumps(TrainedBroad(broad.network._replace(base=np.float32(np.nan))))


def test_a_broad_file_for_other_features_or_units_is_refused() -> None:
    version, about, arrays = policy_file.unpack(
        policy_file.dumps(TrainedBroad(wild(0))), "rlp-policy", (policy_file.BROAD,), "Cannot read", "mend the test"
    )
    other = policy_file.pack("rlp-policy", version, {**about, "job_features": ["round"]}, arrays)
    with pytest.raises(ValueError, match=r"Cannot load a policy from p: it weighs other features than this version"):
        policy_file.loads(other, "p")
    larger = policy_file.pack("rlp-policy", version, about, arrays | {"own": np.zeros(UNITS + 1, np.float32)})
    with pytest.raises(ValueError, match=rf"own is \({UNITS + 1},\), not \({UNITS},\)"):
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
    np.testing.assert_array_equal(mine.policy.init(np.ones(2, bool)).network.own, wild(5).own)
    with pytest.raises(ValueError, match=r"mine.npz as printed: it holds a broad policy; leave as_printed out"):
        next(tuner.rlp(job, policy=str(tmp_path / "mine.npz"), as_printed=True))
