"""The engine against the oracle over random clusters; bounds and ends of policies; windows; lanes."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, Episode, Sleeps, Stragglers
from simulators.engine import loop
from simulators.engine.links import network
from simulators.engine.preparation import cycle_costs
from simulators.workloads.workload import Demand
from tests.support.marks import examples, slow
from tests.support.oracle import Backup, Bounded, Dynamic, Few, Oracle
from tests.support.small_jobs import MODEL, NAMES, branch, job, machine, plain_job, system, together
from tuners import policies
from tuners.actions import Decision, Install, Pushes, Rejected, Run, Setting, SyncPolicy, Target
from tuners.baselines.dbw import dbw_policy

# ------------------------------------------------------------------------------------------------------ random clusters


@st.composite
def machines(draw, limited, alike):
    """With `limited`, every server process has a limit: one without is no resource, and where each process is one, that
    changes the shape that is compiled. As NICs that are all alike do, so without `alike` they differ."""
    speeds, nics = st.floats(0.5, 3.0), st.floats(20.0, 200.0)
    service = st.one_of(st.just(1e6 if limited else math.inf), st.floats(10.0, 300.0))
    faster = [1.0 if alike else 1 + i / 100 for i in range(len(NAMES))]
    return tuple((n, machine(draw(nics) * more, draw(service), draw(speeds))) for n, more in zip(NAMES, faster, strict=True))


@st.composite
def roles(draw, overlap):
    """Workers and servers; with `overlap`, some node is both."""
    order = draw(st.permutations(NAMES))
    count = draw(st.integers(1, 4))
    workers = sorted(order[:count])
    if not overlap:
        return tuple(workers), tuple(order[count:])
    return tuple(workers), tuple(draw(st.lists(st.sampled_from(NAMES), unique=True).map(lambda more: {*more, workers[0]})))


@st.composite
def shares(draw, members):
    weights = [draw(st.floats(0.2, 1.0)) for _ in members]
    return draw(st.sampled_from([(), tuple(w / sum(weights) for w in weights)]))


@st.composite
def demands(draw, queue):
    sizes = st.one_of(st.just(0.0), st.floats(10.0, 200.0))
    return Demand(
        model_bytes=draw(sizes),
        push_bytes=draw(st.one_of(st.none(), sizes)),
        sample_seconds=draw(st.floats(0.01, 0.5)),
        fixed_seconds=draw(st.sampled_from([0.0, 0.3])),
        message_seconds=draw(st.sampled_from([0.0, 0.02])),
        apply_seconds=draw(st.floats(0.01, 1.0)) if queue and draw(st.booleans()) else 0.0,
        apply_exponent=draw(st.sampled_from([1.0, 0.7])),
        apply_growth=draw(st.sampled_from([0.0, 0.4])),
        commit_seconds=draw(st.sampled_from([0.0, 0.1])) if queue else 0.0,
        step_seconds=draw(st.sampled_from([0.0, 0.2])),
        master_sample_seconds=draw(st.sampled_from([0.0, 0.01])),
    )


@st.composite
def conditions(draw):
    nodes = st.sampled_from(NAMES)
    sleeps = st.builds(Sleeps, st.floats(0.1, 0.6), st.floats(0.0, 3.0), st.floats(0.0, 2.0))
    stragglers = st.builds(Stragglers, st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 0.7))
    episodes = st.lists(
        st.builds(Episode, nodes, st.floats(0.0, 30.0), st.floats(0.1, 40.0), st.floats(0.3, 4.0)), max_size=3
    )
    return Conditions(
        jitter=draw(st.floats(0.05, 1.0)),
        stagger=draw(st.booleans()),
        sleeps=draw(st.one_of(st.none(), sleeps)),
        stragglers=draw(st.one_of(st.none(), stragglers)),
        episodes=tuple(draw(episodes)),
    )


@st.composite
def jobs(draw, overlap=False, queue=True, **fixed):
    """All that `Oracle` and `system` need but the policy."""
    workers, servers = draw(roles(overlap))
    setting = Setting(
        workers=workers,
        servers=servers,
        batch_size=draw(st.integers(5, 8)),  # one compiled size
        data_shares=draw(shares(workers)),
        model_shares=draw(shares(servers)),
        transfer_bits=draw(st.sampled_from([16, 32])),
        learning_rate=draw(st.floats(0.01, 0.3)),
        momentum=0.5,
    )
    discipline, control = fixed.pop("discipline", "maxmin"), fixed.pop("control_queue", 0.0)
    clocks, flows = draw(st.sampled_from(fixed.pop("snapshot_clocks", (0,)))), fixed.pop("independent_flows", False)
    more = fixed.pop("network", {}) | {name: draw(values) for name, values in fixed.pop("drawn", {}).items()}
    latency_seconds = draw(st.sampled_from([0.0, 0.05]))
    resources = overlap or clocks or more.get("switch_both_ways", False) or "server_threads" in more
    nodes = draw(machines(resources and fixed.pop("limited", True), fixed.pop("alike", False)))
    cluster = Cluster(nodes, discipline, latency_seconds, control, clocks, flows, **more)
    return cluster, (draw(demands(queue)), fixed), setting, draw(conditions()), draw(st.integers(0, 2**31))


def whole_job(made):
    """With the data put in, which would drown a failing example."""
    cluster, (demand, rules), *rest = made
    return cluster, job(demand, MODEL, **rules), *rest


def named(setting, policy, staleness):
    plain = {
        "bsp": Bounded(0),
        "asp": Bounded(math.inf),
        "ssp": Bounded(staleness),
        "dssp": Dynamic(staleness, staleness + 12),
        "discard": Bounded(math.inf, oldest=staleness),
        "admit": Few(staleness),
    }
    changes = {f: getattr(setting, f) for f in Setting.__slots__} | {"policy": policy, "staleness": staleness}
    return Setting(**changes), plain[policy]


def assert_agree(window, simulated, oracle):
    """Same order, same durations, same staleness, same learning."""
    for name in ("worker", "clock", "staleness"):
        np.testing.assert_array_equal(getattr(window.pushes, name), oracle.column(name), err_msg=name)
    for name in ("seconds", "compute_seconds", "pull_seconds", "push_seconds", "wait_seconds"):
        mine, theirs = getattr(window.pushes, name), oracle.column(name)
        # The worker that transfers first is served faster, so a difference by rounding grows with every shared transfer.
        for part, tolerance in ((slice(20), 1e-9), (slice(20, None), 1e-6)):
            np.testing.assert_allclose(mine[part], theirs[part], rtol=tolerance, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(window.pushes.loss, oracle.column("loss"), rtol=2e-4, atol=2e-5)
    parameters = branch(simulated).learned.parameters
    for name, value in oracle.parameters.items():
        np.testing.assert_allclose(np.asarray(parameters[name]), value, rtol=2e-4, atol=2e-4, err_msg=name)


def compared(made, policy, staleness, pushes=50):
    cluster, workload, setting, around, seed = whole_job(made)
    setting, plain = named(setting, policy, staleness)
    simulated = system(cluster, workload, setting, around, seed)
    window = simulated.perform(Run(clocks=pushes))

    def predicted(cluster):
        return Oracle(cluster, workload, setting, around, plain, seed, MODEL).run(pushes)

    try:
        assert_agree(window, simulated, predicted(cluster))
    except AssertionError:
        # Events of alike machines may be equally late but for rounding, and then either order is right.
        orders = [predicted(unlike(cluster, *way)).column("worker") for way in product((1, 2), (1e-11, -1e-11))]
        assume(all(np.array_equal(orders[0], other) for other in orders))
        raise


def unlike(cluster, step, by):
    """`cluster` with machines, and their networks, that are faster by zero to four times `by`, no neighbours alike."""
    made = []
    for number, (name, kind) in enumerate(cluster.nodes):
        faster = 1 + by * (number * step % 5)
        devices = tuple(msgspec.structs.replace(device, speed=device.speed * faster) for device in kind.devices)
        nic = kind.nic_bytes_per_second * faster
        made.append((name, msgspec.structs.replace(kind, devices=devices, nic_bytes_per_second=nic)))
    return replace(cluster, nodes=tuple(made))


# Each policy, with each bound, is a program of its own. Other bounds: test_policies.py.
BOUNDED = st.sampled_from([("bsp", 0), ("asp", 0), ("ssp", 1), ("ssp", 3)])
TWO = st.sampled_from([("bsp", 0), ("ssp", 1)])  # for other networks and updates, which do not see the policy


@examples(6, shrink=False)
@given(jobs(alike=True), BOUNDED)
def test_max_min_sharing_with_every_push_applied(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(discipline="fifo", aggregation="sum"), TWO)
def test_first_come_first_served_with_sums(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(control_queue=0.8), TWO)
def test_requests_that_wait_behind_the_pushes_of_others(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(snapshot_clocks=(1, 20)), TWO)
def test_servers_that_send_snapshots(made, policy):
    """At least 4 pushes of each worker apart, or 20, where the next one is often due before the last one is sent."""
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(overlap=True, snapshot_clocks=(1,), aggregation="mean", optimizer="momentum"), TWO)
def test_servers_that_send_snapshots_and_work(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(limited=False, alike=True, snapshot_clocks=(1, 20)), TWO)
def test_servers_without_a_limit_that_send_snapshots(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(overlap=True, snapshot_clocks=(1,)), TWO)
def test_servers_that_send_snapshots_and_work_as_in_large_clusters(made, policy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "MANY_NICS", 1)
        compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(overlap=True, aggregation="mean", optimizer="momentum"), TWO)
def test_workers_that_serve_with_means_and_momentum(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, control_queue=0.8), TWO)
def test_flows_to_unlike_servers_that_end_by_themselves(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, discipline="fifo", aggregation="sum"), TWO)
def test_flows_that_end_by_themselves_first_come_first_served(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(overlap=True, discipline="fifo", control_queue=0.8, aggregation="sum"), TWO)
def test_workers_that_serve_first_come_first_served(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(overlap=True, discipline="fifo", aggregation="sum"), TWO)
def test_workers_that_serve_first_come_first_served_as_in_large_clusters(made, policy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "MANY_NICS", 1)
        compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, overlap=True, discipline="fifo", control_queue=0.8, aggregation="sum"), TWO)
def test_flows_to_workers_that_serve_first_come_first_served(made, policy):
    compared(made, *policy)


@examples(6, shrink=False)
@given(jobs(discipline="serial", aggregation="sum"), TWO)
def test_servers_that_do_one_thing_at_a_time(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(overlap=True, discipline="serial", aggregation="sum"), TWO)
def test_servers_that_work_and_do_one_thing_at_a_time(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, discipline="serial", aggregation="sum"), TWO)
def test_flows_to_servers_that_do_one_thing_at_a_time(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, overlap=True, discipline="serial", aggregation="sum"), TWO)
def test_flows_to_workers_that_serve_and_do_one_thing_at_a_time(made, policy):
    compared(made, *policy)


SWITCH = {"switch_bytes_per_second": st.floats(20.0, 300.0)}


@examples(6, shrink=False)
@given(jobs(drawn=SWITCH, discipline="fifo", control_queue=0.8, aggregation="sum"), TWO)
def test_a_switch_that_all_transfers_pass(made, policy):
    compared(made, *policy)


@examples(6, shrink=False)
@given(jobs(drawn=SWITCH, network={"switch_both_ways": True}), TWO)
def test_a_switch_that_both_ways_share(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(drawn=SWITCH, overlap=True, aggregation="mean", optimizer="momentum"), TWO)
def test_a_switch_between_workers_that_serve(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(drawn=SWITCH, network={"switch_both_ways": True}, overlap=True, discipline="serial", aggregation="sum"), TWO)
def test_a_switch_between_workers_that_serve_one_thing_at_a_time(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(network={"server_threads": 2}), TWO)
def test_servers_of_two_threads_that_share_them(made, policy):
    compared(made, *policy)


@examples(6, shrink=False)
@given(jobs(network={"server_threads": 2}, discipline="fifo", aggregation="sum"), TWO)
def test_servers_of_two_threads_with_a_queue_each_way(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(network={"server_threads": 3}, discipline="serial", aggregation="sum"), TWO)
def test_servers_of_three_threads_with_one_queue(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, overlap=True, control_queue=0.8, aggregation="mean", optimizer="momentum"), TWO)
def test_flows_to_workers_that_serve(made, policy):
    compared(made, *policy)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(independent_flows=True, overlap=True, snapshot_clocks=(1,), aggregation="mean", optimizer="momentum"), TWO)
def test_flows_that_end_by_themselves_beside_snapshots(made, policy):
    compared(made, *policy)


@examples(6, shrink=False)
@given(jobs(queue=False, optimizer="adarevision"), st.sampled_from([0, 2]))
def test_dynamic_bounds_with_revised_rates(made, low):
    """Without an apply queue: where it is full, pushes come at equal distances, and predictions tie up to rounding."""
    compared(made, "dssp", low)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(), st.sampled_from([("discard", 0), ("discard", 2), ("admit", 0), ("admit", 2)]))
def test_bounds_on_the_age_of_gradients(made, policy):
    compared(made, *policy)


def _all_but_one(state, push):
    done = jnp.sum(push.waiting) >= jnp.sum(push.active) - 1
    return state, Decision(release=push.active & done, step=done)


@pytest.mark.slow
@examples(6, shrink=False)
@given(jobs(aggregation="mean"))
def test_workers_that_a_policy_releases_in_the_middle_of_a_cycle(made):
    """Backup workers (Chen et al. 2016): a new cycle begins for those that compute, transfer or queue, too."""
    cluster, workload, setting, around, seed = whole_job(made)
    setting, _ = named(setting, "bsp", 0)
    simulated = system(cluster, workload, setting, around, seed)
    simulated.perform(Install(SyncPolicy("backup", lambda active: (), _all_but_one, rounds=True)))
    window = simulated.perform(Run(clocks=50))
    assert_agree(window, simulated, Oracle(cluster, workload, setting, around, Backup(), seed, MODEL).run(50))


# ------------------------------------------------------------------------------------------------------- bounds and ends


@examples(12, shrink=False)
@given(jobs(), st.sampled_from([0, 1, 4]))
def test_ssp_never_exceeds_its_bound_and_never_deadlocks(made, bound):
    cluster, workload, setting, around, seed = whole_job(made)
    setting, _ = named(setting, "ssp", bound)
    window = system(cluster, workload, setting, around, seed).perform(Run(clocks=150))
    assert (window.status, window.clocks) == ("running", 150)
    workers = [NAMES.index(w) for w in setting.workers]
    clocks = np.cumsum(window.pushes.worker[:, None] == np.array(workers), axis=0)
    # Released at most `bound` ahead of the slowest, so after its push no worker is further ahead than one more.
    assert (clocks.max(axis=1) - clocks.min(axis=1) <= bound + 1).all()
    # From c - s at a pull, another worker comes at most to c + s + 1 before the push: Ho et al.'s bound on staleness.
    assert window.pushes.staleness.max() <= (2 * bound + 1) * (len(workers) - 1)


def _release_none(state, push):
    return state, Decision(release=push.waiting & False)


def test_a_policy_that_releases_no_worker_ends_in_deadlock():
    simulated = system(*plain_job())
    simulated.perform(Install(SyncPolicy("none", lambda active: (), _release_none)))
    window = simulated.perform(Run(clocks=100))
    assert (window.status, window.clocks, simulated.status) == ("deadlock", 3, "deadlock")
    assert window.end_seconds == window.pushes.seconds[-1]
    with pytest.raises(Rejected, match="deadlock"):
        simulated.perform(Run(clocks=1))


def test_a_loss_of_nan_ends_the_job_as_diverged():
    simulated = system(*plain_job(learning_rate=1e38))
    window = simulated.perform(Run(clocks=100))
    assert (window.status, simulated.status) == ("diverged", "diverged")
    assert not np.isfinite(window.pushes.loss[-1])
    assert np.isfinite(window.pushes.loss[:-1]).all()
    with pytest.raises(Rejected, match="diverged"):
        simulated.perform(Run(seconds=1.0))


def test_a_target_of_clocks_ends_the_job_with_that_push():
    simulated = system(*plain_job(), target=Target("clocks", 37))
    window = simulated.perform(Run(seconds=1e6))
    assert (window.status, window.clocks, window.end_seconds) == ("target", 37, window.pushes.seconds[-1])


@pytest.mark.parametrize(("metric", "value"), [("loss", 0.7), ("accuracy", 0.8)])
def test_a_target_of_validation_ends_the_job_with_the_first_evaluation_that_reaches_it(metric, value):
    simulated = system(*plain_job(), target=Target(metric, value))
    window = simulated.perform(Run(clocks=5000))
    reached = [Target(metric, value).reached(e.loss, e.accuracy) for e in window.evaluations]
    assert window.status == "target"
    assert reached == [False] * (len(reached) - 1) + [True]
    assert [e.clocks for e in window.evaluations] == list(range(10, window.clocks + 1, 10))
    assert window.evaluations[-1].seconds == simulated.now


@pytest.mark.slow
def test_the_first_state_of_a_policy_has_the_types_of_every_later_one():
    """Else the engine would be compiled twice: JAX types a number that was written in Python weakly."""
    cluster, workload, setting, around = plain_job()
    simulated = system(cluster, workload, setting, around)

    def decide(state, push):
        seconds, pushes, seen = state
        return (seconds + push.seconds, pushes + 1, seen | push.waiting), Decision(release=push.waiting)

    begins = SyncPolicy("counting", lambda active: (jnp.asarray(jnp.nan), 0, active), decide)
    simulated.perform(Install(begins))
    first = jax.tree.map(jax.typeof, branch(simulated).clock.policy)
    simulated.perform(Run(clocks=5))
    assert jax.tree.map(jax.typeof, branch(simulated).clock.policy) == first
    assert int(branch(simulated).clock.policy[1]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [slow(48), 67], ids="{} nodes".format)
@pytest.mark.parametrize("conditions", [Conditions(), Conditions(jitter=0.0, stagger=False)], ids=["noise", "ties"])
def test_the_next_of_many_workers_is_that_of_the_oracle(nodes, conditions):
    """Without noise all workers are in step, so that every event is a tie, which the first worker wins."""
    names = tuple(f"n{i:03}" for i in range(nodes))
    many = Cluster(tuple((n, machine(100.0)) for n in names))
    setting = Setting(workers=names[:-4], servers=names[-4:], batch_size=2, policy="asp")
    clocks = nodes + 20  # all of the first cycle, and the beginning of the second
    window = system(many, job(), setting, conditions, seed=5).perform(Run(clocks=clocks))
    judge = Oracle(many, job(), setting, conditions, Bounded(math.inf), 5).run(clocks)
    np.testing.assert_array_equal(window.pushes.worker, judge.column("worker"))
    np.testing.assert_allclose(window.pushes.seconds, judge.column("seconds"), rtol=1e-9)


def test_evaluations_are_those_of_the_oracle():
    cluster, workload, setting, around = plain_job()
    window = system(cluster, workload, setting, around, seed=3).perform(Run(clocks=60))
    for seen in window.evaluations:
        oracle = Oracle(cluster, workload, setting, around, Bounded(math.inf), 3, MODEL).run(seen.clocks)
        loss, _ = MODEL.gradient(oracle.parameters, MODEL.valid)
        scores = MODEL.valid[0] @ oracle.parameters["w"] + oracle.parameters["b"]
        assert seen.seconds == pytest.approx(oracle.now, rel=1e-9)
        assert seen.loss == pytest.approx(loss, rel=1e-5)
        assert seen.accuracy == pytest.approx(np.mean(np.argmax(scores, axis=1) == MODEL.valid[1]), rel=1e-12)


# --------------------------------------------------------------------------------------------------------------- windows

EPISODES = tuple(Episode(n, start, seconds, factor) for n, start, seconds, factor in (
    ("a", 13.0, 200.0, 3.0), ("b", 50.0, 20.5, 0.5), ("a", 100.0, 400.0, 2.0), ("c", 500.0, 1e5, 1.5)
))  # fmt: skip


def cut_job():
    cluster, workload, setting, _ = plain_job(policy="ssp", staleness=2)
    return system(cluster, workload, setting, Conditions(episodes=EPISODES, sleeps=Sleeps(0.1, 2.0)), seed=11)


@pytest.fixture(scope="module")
def whole():
    """A thousand pushes in one window: two calls of the engine, several episodes."""
    simulated = cut_job()
    return simulated.perform(Run(clocks=1000)), branch(simulated)


def assert_same(windows, simulated, whole):
    window, state = whole
    columns, evaluations = together(windows), [e for w in windows for e in w.evaluations]
    for name, mine, theirs in zip(Pushes._fields, columns, window.pushes, strict=True):
        np.testing.assert_array_equal(mine, theirs[: len(mine)], err_msg=name)
    assert evaluations == list(window.evaluations)[: len(evaluations)]
    if len(columns.seconds) == window.clocks:
        jax.tree.map(np.testing.assert_array_equal, branch(simulated), state)
    for before, after in pairwise(windows):
        assert before.end_seconds == after.start_seconds


@pytest.mark.slow
def test_a_thousand_windows_of_one_push_are_one_window_of_a_thousand(whole):
    simulated = cut_job()
    assert_same([simulated.perform(Run(clocks=1)) for _ in range(1000)], simulated, whole)


CUTS = st.lists(
    st.one_of(st.integers(1, 400), st.floats(1e-6, 200.0), st.sampled_from([13.0, 50.0, 100.0, 500.0])),
    min_size=1,
    max_size=25,
)


@examples(8, shrink=False)
@given(cuts=CUTS)
def test_windows_cut_anywhere_change_nothing(whole, cuts):
    simulated, windows, left = cut_job(), [], 1000
    for cut in cuts:
        if isinstance(cut, int):
            cut = min(cut, left)
            run = Run(clocks=cut)
        else:
            run = Run(seconds=cut)
            if simulated.now + cut > whole[0].end_seconds:
                continue
        windows.append(simulated.perform(run))
        left -= windows[-1].clocks
        if isinstance(cut, float):
            assert windows[-1].end_seconds == windows[-1].start_seconds + cut
        if left == 0:
            break
    if left:
        windows.append(simulated.perform(Run(clocks=left)))
    assert_same(windows, simulated, whole)


# ----------------------------------------------------------------------------------------------------------------- lanes


def test_many_lanes_are_many_jobs():
    """Seeds, data, rates, bounds and clusters differ between lanes; each lane is what it would be alone."""
    rates, bounds, states, inputs, data = (0.05, 0.1, 0.2, 1e38), (0, 1, 3, 2**30), [], [], []
    for lane, (rate, bound) in enumerate(zip(rates, bounds, strict=True)):
        cluster, workload, setting, around = plain_job(
            policy="ssp", staleness=bound, learning_rate=rate, workers=NAMES[: 2 + lane % 2]
        )
        made = system(cluster, workload, setting, around, seed=lane, target=Target("clocks", 30 if lane == 2 else 1e9))
        lone = made.branches[0]
        states.append(lone.state)
        inputs.append(lone.inputs)
        program = lone.program
        data.append(lone.context.data)
    stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *rows) for rows in (data, inputs, states)]
    together_data = stacked[0]._replace(valid=data[0].valid)
    for clocks, seconds in ((40, np.inf), (512, 25.0)):
        args = (jnp.asarray(clocks, jnp.int32), jnp.asarray(seconds))
        lanes = (together_data, *stacked[1:], *args)
        # As NumPy's arrays: JAX compiles each indexing of its own.
        together, tables, used = jax.device_get(loop.advance_lanes(program, *lanes, rows=512, own_data=True))
        for lane, (own, own_inputs, state) in enumerate(zip(data, inputs, states, strict=True)):
            alone, table, count = jax.device_get(loop.advance(program, own, own_inputs, state, *args, rows=512))
            assert int(used[lane]) == int(count)
            np.testing.assert_allclose(tables[lane][:count], table[:count], rtol=1e-5, atol=1e-6)
            mine = jax.tree.map(lambda leaf, lane=lane: leaf[lane], together)
            # Entries of nodes that are not workers have no meaning.
            clocks_of = [c._replace(loss=c.loss * own_inputs.active) for c in (mine.clock, alone.clock)]
            learned = [m.parameters for m in (mine.learned, alone.learned)]
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *clocks_of)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), *learned)


@pytest.mark.parametrize(
    ("start", "installed", "pays"),
    [
        ("bsp", policies.asp(), False),
        ("bsp", policies.ssp(2), False),
        ("asp", policies.bsp(), True),
        slow("asp", policies.k_sync(2), True),
        ("asp", policies.k_async(2), True),
        ("bsp", policies.k_async(1), False),  # ASP by another name
        slow("asp", policies.backup_workers(1), True),
        ("bsp", policies.buffered(2), False),
        slow("bsp", dbw_policy(2), True),
    ],
)
def test_the_end_of_a_step_is_paid_for_by_the_policy_that_is_installed(start, installed, pays):
    def seconds(step_seconds):
        cluster, workload, setting, around = plain_job(policy=start)
        demand = msgspec.structs.replace(workload.demand, step_seconds=step_seconds)
        simulated = system(cluster, replace(workload, demand=demand), setting, around)
        simulated.perform(Install(installed))
        simulated.perform(Run(clocks=10))  # the first cycles began before
        return simulated.perform(Run(clocks=30)).seconds

    longer = seconds(0.4) - seconds(0.0)
    # 30 pushes are at least 5 rounds, and two servers halve a step.
    assert longer >= 5 * 0.4 / 2 if pays else longer == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [
        ({"policy": "ssp", "staleness": 0}, True),  # the same decisions as BSP
        ({"policy": "quorum"}, True),
        ({"policy": "quorum", "quorum": 1}, True),
        ({"policy": "ssp", "staleness": 1}, False),
        ({"policy": "asp"}, False),
    ],
)
def test_the_end_of_a_step_costs_the_same_in_all_synchronous_rounds(policy, rounds):
    nodes = tuple((n, machine(100.0)) for n in NAMES)
    bsp = Setting(workers=NAMES[:2], servers=NAMES[2:], policy="bsp", batch_size=8)
    demand = Demand(model_bytes=10.0, sample_seconds=0.1, step_seconds=0.2, master_sample_seconds=0.01)
    of_bsp, found = (cycle_costs(Cluster(nodes), demand, s, policies.of_setting(s)) for s in (bsp, replace(bsp, **policy)))
    step = 0.2 / len(bsp.servers) + 0.01 * 16
    assert of_bsp.overhead_seconds == pytest.approx(step)
    assert found.overhead_seconds == pytest.approx(step if rounds else 0.0)
