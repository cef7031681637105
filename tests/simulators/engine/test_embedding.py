"""Sparse pulls and pushes: what is learned, the rows that are counted, and the bytes and seconds that follow from them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.engine.embedding import block_of, seen_before
from simulators.jobs import drawn
from simulators.reconfiguration.costs import Costs
from simulators.workloads.datasets import embedded_clicks
from simulators.workloads.model_tables import FactorisationMachine
from simulators.workloads.models import make_proxy
from simulators.workloads.workload import Demand, Workload
from tests.support.small_jobs import NAMES, assert_same_bytes, branch, learning, machine, system, together
from tuners.actions import Install, Reconfigure, Rejected, Run, Setting
from tuners.policies import backup_workers
from tuners.settings import Choice, Integer

BATCH, BLOCKS, ROW_BYTES = 8, 7, 4.0
PROXY = make_proxy(FactorisationMachine(rank=2), embedded_clicks(samples=100, tables=3, largest=64, valid_samples=20))
ROWS = PROXY.embedding.rows
DEMAND = Demand(model_bytes=ROW_BYTES * ROWS, sample_seconds=0.25, apply_seconds=0.01 * ROWS)
START = Setting(workers=NAMES[:3], servers=NAMES[3:], batch_size=BATCH, learning_rate=0.5)
FREE = (Choice("placement", ("range", "hash")), Choice("policy", ("asp", "bsp")))


def workload(**changed):
    facts = {"name": "clicks", "demand": DEMAND, "proxy": PROXY, "samples": 100}
    return Workload(**(facts | changed))


def made(setting=START, job=None, knobs=FREE, cluster=None, jitter=0.2, seed=3, nodes=(), **rules):
    rules = {"costs": Costs(model_blocks=BLOCKS)} | rules
    machines = cluster or Cluster(tuple((n, machine()) for n in NAMES))
    return system(machines, job or workload(), setting, Conditions(jitter=jitter, nodes=nodes), seed, knobs=knobs, **rules)


def minibatches(seed, workers=3):
    """The samples of each worker's mini-batch of that number, in this seed's order of the data."""
    ends = np.round(np.arange(workers + 1) / workers * 100).astype(int)

    def numbers(worker, clock):
        return ends[worker] + (clock * BATCH + np.arange(BATCH)) % (ends[worker + 1] - ends[worker])

    return numbers


def gradient(parameters, rows, clicked):
    """Of the mean loss, dense, in float64."""
    found = {"rows": np.zeros_like(parameters["rows"]), "bias": 0.0}
    for keys, y in zip(rows, clicked, strict=True):
        w, v = parameters["rows"][keys, 0], parameters["rows"][keys, 1:]
        odds = parameters["bias"] + w.sum() + ((v.sum(0) ** 2).sum() - (v**2).sum()) / 2
        slope = (1 / (1 + np.exp(-odds)) - y) / len(rows)
        found["bias"] += slope
        for key, vector in zip(keys, v, strict=True):
            found["rows"][key] += slope * np.append(1.0, v.sum(0) - vector)
    return found


# ------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_sparse_gradients_learn_what_dense_ones_would(policy):
    """Every gradient is of the parameters that its worker has pulled, `staleness` updates ago."""
    simulated = made(replace(START, policy=policy))
    pushes = simulated.perform(Run(clocks=30)).pushes
    data, first = drawn(workload(), 3)
    keys, clicked = (np.asarray(c) for c in data.train[:2])
    versions = [{k: np.asarray(v, np.float64) for k, v in first.items()}]
    numbers = minibatches(3)
    for worker, clock, staleness in zip(pushes.worker, pushes.clock, pushes.staleness, strict=True):
        at, now = numbers(worker, clock), versions[-1]
        made_of = gradient(versions[-1 - staleness], keys[at], clicked[at])
        versions.append({k: now[k] - 0.5 * made_of[k] for k in now})
    for name, value in versions[-1].items():
        np.testing.assert_allclose(np.asarray(branch(simulated).learned.parameters[name]), value, rtol=2e-4, atol=2e-6)


def test_losses_of_looked_up_rows_are_those_of_the_whole_model():
    parameters = PROXY.init(1)
    batch = tuple(c[:9] for c in PROXY.train)
    looked_up = parameters["rows"][batch[0]]
    parts = PROXY.embedding.losses({"bias": parameters["bias"]}, looked_up, batch)
    np.testing.assert_array_equal(np.asarray(PROXY.losses(parameters, batch)), np.asarray(parts))


def test_windows_change_nothing():
    whole, cut = made(), made()
    pushes = whole.perform(Run(clocks=24)).pushes
    assert_same_bytes(pushes, together([cut.perform(Run(clocks=1)) for _ in range(24)]))
    for a, b in zip(jax.tree.leaves(branch(whole)), jax.tree.leaves(branch(cut)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_a_gradient_that_is_dropped_was_sent_and_changes_nothing():
    simulated = made(replace(START, policy="bsp"))
    simulated.perform(Install(backup_workers(1)))
    window = simulated.perform(Run(clocks=9))
    assert int(branch(simulated).clock.version) < 9
    assert sum(s.push_bytes for s in window.servers) == pytest.approx(ROW_BYTES * sum(window.blocks))


# ------------------------------------------------------------------------------------------------------- rows and bytes


def test_seen_before_is_the_last_sample_with_the_same_row():
    rows = np.array([[1, 5], [2, 5], [1, 6], [1, 5]], np.int32)
    assert seen_before(rows).tolist() == [[-1, -1], [-1, 0], [0, -1], [2, 1]]


def test_blocks_hold_consecutive_rows_and_the_last_ones_fewer():
    found = np.asarray(block_of(jnp.arange(ROWS + 1), ROWS, BLOCKS))
    assert np.bincount(found[:-1]).tolist() == [16] * 7  # 112 rows
    assert found[-1] == BLOCKS  # a row beyond the tables
    assert np.bincount(np.asarray(block_of(jnp.arange(10), 10, 4))).tolist() == [3, 3, 3, 1]


def distinct(seed, pushes):
    """Distinct rows by block of these pushes; what a mini-batch takes from both ends of a worker's data counts twice."""
    keys, numbers, found = np.asarray(drawn(workload(), seed)[0].train[0]), minibatches(seed), []
    for worker, clock in zip(pushes.worker, pushes.clock, strict=True):
        at = numbers(worker, clock)
        parts = (at[at >= at[0]], at[at < at[0]])
        rows = np.concatenate([np.unique(keys[part]) for part in parts])
        found.append(np.bincount(rows // 16, minlength=BLOCKS))
    return np.array(found)


def test_a_window_counts_the_distinct_rows_of_its_pushes_in_each_block():
    """33 samples of a worker and 8 in a mini-batch: some mini-batches go over the end of the data."""
    simulated = made()
    for clocks in (1, 40):
        window = simulated.perform(Run(clocks=clocks))
        np.testing.assert_array_equal(window.blocks, distinct(3, window.pushes).sum(axis=0))
    assert sum(window.blocks) < 40 * BATCH * 3


@pytest.mark.parametrize("placement", ["range", "hash"])
def test_servers_send_and_receive_the_rows_of_their_blocks(placement):
    window = made(replace(START, placement=placement)).perform(Run(clocks=30))
    owners = np.array(replace(START, placement=placement).owners(BLOCKS))
    for server in window.servers:
        rows = np.sum(np.array(window.blocks)[owners == server.node])
        assert (server.pull_bytes, server.push_bytes) == pytest.approx((ROW_BYTES * rows, ROW_BYTES * rows))
        assert server.pull_seconds == pytest.approx(ROW_BYTES * rows / 100.0)
        assert server.push_seconds == pytest.approx(ROW_BYTES * rows / 100.0 + 0.01 * rows)


def test_a_single_worker_pulls_its_rows_as_fast_as_the_slower_link_allows():
    """Servers are slower than the worker: a pull takes as long as the server with more of its rows."""
    machines = Cluster(tuple((n, machine(nic)) for n, nic in zip(NAMES, (100.0, 100.0, 100.0, 5.0, 5.0), strict=True)))
    setting = replace(START, workers=NAMES[:1])
    pushes = made(setting, cluster=machines, jitter=0.0).perform(Run(clocks=4)).pushes
    keys = np.asarray(drawn(workload(), 3)[0].train[0])
    owners = np.array(setting.owners(BLOCKS))
    for clock in range(4):
        rows = np.unique(keys[clock * BATCH + np.arange(BATCH)])
        most = max(np.bincount((owners[rows // 16] == "e").astype(int)))
        assert pushes.pull_seconds[clock] == pytest.approx(ROW_BYTES * most / 5.0)
        assert pushes.push_seconds[clock] == pytest.approx(ROW_BYTES * most / 5.0 + 0.01 * most)


def test_workers_share_a_server_that_all_of_them_ask():
    """All blocks on one server: a round of three equal workers takes its rows one after another."""
    setting = replace(START, policy="bsp", servers=NAMES[3:4])
    pushes = made(setting, jitter=0.0).perform(Run(clocks=3)).pushes
    rows = distinct(3, pushes).sum()
    assert pushes.pull_seconds.max() == pytest.approx(ROW_BYTES * rows / 100.0, rel=0.2)
    assert pushes.pull_seconds.max() <= ROW_BYTES * rows / 100.0 * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"optimizer": "adam"}, "Cannot apply the sparse gradients of embedding tables by 'adam'"),
        ({"aggregation": "mean"}, "Cannot apply the mean of the sparse gradients of embedding tables"),
        ({"demand": Demand(model_bytes=1e3, sample_seconds=0.1, apply_exponent=0.5)}, "with apply_exponent 0.5"),
        ({"demand": Demand(model_bytes=1e3, sample_seconds=0.1, commit_seconds=0.1)}, "with commit_seconds 0.1"),
    ],
)
def test_a_workload_that_does_not_go_with_tables_is_refused(changed, reason):
    with pytest.raises(ValueError, match=reason):
        made(job=workload(**changed))


def test_a_cluster_that_does_not_go_with_tables_is_refused():
    kinds = tuple((n, machine()) for n in NAMES)
    with pytest.raises(ValueError, match="first come first served where mini-batches touch rows"):
        made(cluster=Cluster(kinds, "fifo"))
    with pytest.raises(ValueError, match="set control_queue to 0"):
        made(cluster=Cluster(kinds, control_queue=1.0))
    with pytest.raises(ValueError, match="leave independent_flows out"):
        made(cluster=Cluster(kinds, independent_flows=True))


@pytest.mark.slow
def test_local_steps_and_larger_mini_batches_are_refused():
    with pytest.raises(ValueError, match="Cannot take local steps on embedding tables"):
        made(knobs=(Integer("local_steps", 1, 4),))
    simulated = made(knobs=(Choice("batch_size", (4, 8, 16)),))
    simulated.perform(Reconfigure(replace(START, batch_size=16)))
    assert simulated.perform(Run(clocks=5)).clocks == 5
    with pytest.raises(Rejected, match="allows"):
        simulated.perform(Reconfigure(replace(START, batch_size=32)))


def test_jobs_without_tables_have_no_blocks():
    simulated = learning()
    assert simulated.job.blocks == 0
    assert simulated.perform(Run(clocks=5)).blocks == ()
    with pytest.raises(Rejected, match="this scenario holds it at"):
        simulated.perform(Reconfigure(replace(simulated.job.start, placement="hash")))
