"""Workers that queue for busy servers: against theory, and against the simulator on random clusters."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.workloads.workload import Demand
from tests.support import small_jobs
from tests.support.small_jobs import machine
from tuners.actions import Run, Setting
from tuners.cruise.placement import MachineKind, Problem, place, placement_seconds, splits
from tuners.cruise.queueing import pulls_in_queue

SECONDS = st.floats(1e-3, 1e3)


def pull(workers, compute, alone, service):
    """Seconds of a pull by kind, for one network."""
    return pulls_in_queue(*(np.array([x], float) for x in (workers, compute, alone, service)))[0]


# ------------------------------------------------------------------------------------------------------------------- theory


@given(SECONDS, SECONDS, SECONDS)
def test_nobody_waits_alone(compute, alone, service):
    assert pull([1, 0], [compute, 1.0], [alone, 1.0], service)[0] == pytest.approx(max(alone, service), rel=1e-12)


@given(st.integers(2, 50), SECONDS)
def test_workers_that_do_not_compute_take_turns(workers, service):
    assert pull([workers], [0.0], [0.0], service) == pytest.approx([workers * service], rel=1e-9)


@given(st.lists(st.tuples(st.integers(1, 20), SECONDS, SECONDS), min_size=1, max_size=3), SECONDS)
def test_it_is_the_shortest_wait_that_both_conditions_admit(kinds, service):
    workers, compute, alone = np.array(kinds).T
    others = 1 - 1 / workers.sum()

    def admitted(wait):
        cycle = compute + np.maximum(alone, service + wait)
        found = others * service * (workers / cycle).sum() * (wait + service / 2)
        return found <= wait and service * (workers / cycle).sum() <= 1

    shortest, longest = 0.0, service * (workers.sum() - 1)
    for _ in range(200):
        middle = (shortest + longest) / 2
        shortest, longest = (shortest, middle) if admitted(middle) else (middle, longest)
    assert pull(workers, compute, alone, service) == pytest.approx(np.maximum(alone, service + longest), rel=1e-9)


def exact_cycle(workers, compute, service):
    """Exact mean value analysis of one kind (Reiser and Lavenberg, 1980), for service times that are exponential."""
    queue = 0.0
    for n in range(1, workers + 1):
        at_servers = service * (1 + queue)
        queue = n * at_servers / (compute + at_servers)
    return compute + at_servers


@pytest.mark.parametrize("workers", [2, 5, 12, 20, 28])
@pytest.mark.parametrize("service", [0.1, 0.5, 1.0])
def test_pulls_of_one_size_wait_less_than_exponential_ones_and_no_less_than_the_servers_need(workers, service):
    cycle = 12.0 + pull([workers], [12.0], [0.0], service)[0]
    assert max(12.0 + service, workers * service) <= cycle * (1 + 1e-12)
    assert cycle <= exact_cycle(workers, 12.0, service) * 1.01


# ---------------------------------------------------------------------------------------------------------------- simulator

MACHINES, BATCH, MODEL_BYTES = 12, 10, 100.0


def drawn(seed):
    """A cluster of one to three kinds of machines, whose servers may be slower than their NIC, and its job."""
    rng = np.random.default_rng(seed)
    kinds = int(rng.integers(1, 4))
    counts = rng.multinomial(MACHINES - 2 * kinds, np.ones(kinds) / kinds) + 2
    nics, speeds = 50 * np.exp(rng.uniform(-1, 1.4, kinds)), np.exp(rng.uniform(-0.7, 0.9, kinds))
    rates = nics * rng.uniform(0.6, 1.0, kinds)
    sample_seconds = np.exp(rng.uniform(-0.2, 2.5)) * MODEL_BYTES / nics.mean() / BATCH
    problem = Problem(
        kinds=tuple(
            MachineKind(count=int(n), compute_seconds=sample_seconds / v, bytes_per_second=b, service_bytes_per_second=r)
            for n, v, b, r in zip(counts, speeds, nics, rates, strict=True)
        ),
        samples=1000.0,
        batch_size=BATCH,
        model_bytes=MODEL_BYTES,
        server_term="queue",
    )
    types = [machine(b, service=r, speed=v) for v, b, r in zip(speeds, nics, rates, strict=True)]
    nodes = tuple((f"n{i}", types[k]) for i, k in enumerate(problem.kind_of()))
    workload = small_jobs.job(Demand(model_bytes=MODEL_BYTES, push_bytes=0.0, sample_seconds=sample_seconds))
    return problem, Cluster(nodes, str(rng.choice(["fifo", "maxmin"]))), workload


def simulated_seconds(problem, cluster, workload, placement):
    """Seconds of an epoch whose workers never pause, by each worker's own mini-batches per second."""
    names = [n for n, _ in cluster.nodes]
    setting = Setting(
        workers=tuple(names[i] for i in placement.workers),
        servers=tuple(names[j] for j in placement.servers),
        model_shares=tuple(np.array(placement.model) / MODEL_BYTES),
        policy="asp",
        batch_size=BATCH,
    )
    system = small_jobs.system(cluster, workload, setting, Conditions(jitter=0.2))
    system.perform(Run(clocks=15 * len(setting.workers)))
    seen = system.perform(Run(clocks=50 * len(setting.workers)))
    return problem.samples / BATCH * seen.seconds / seen.clocks


@pytest.mark.slow
def test_it_ranks_splits_as_the_simulator_does():
    """Twelve clusters; of each the six splits that are best by this model, and six that are spread over the others."""
    errors, ranks, limits, excess = [], [], [], []
    for seed in range(12):
        problem, cluster, workload = drawn(seed)
        found = list(splits(problem))
        chosen = [*found[:6], *found[6 :: max(1, (len(found) - 6) // 6)]]
        placements = [place(problem, s) for s in chosen]
        took = np.array([simulated_seconds(problem, cluster, workload, p) for p in placements])
        said = np.array([s.seconds for s in chosen])
        limit = [placement_seconds(replace(problem, server_term="own", overlap=True), p) for p in placements]
        errors.append(said / took - 1)
        ranks.append(spearmanr(said, took)[0])
        limits.append(spearmanr(limit, took)[0])
        excess.append(took[0] / took.min() - 1)
    # Measured: 2.2 % of error; rank correlations .96 on average and .85 at least, .89 by the limit; best but for 2.5 %.
    assert np.mean(np.abs(np.concatenate(errors))) < 0.03
    assert np.mean(ranks) > 0.94
    assert np.mean(ranks) > np.mean(limits) + 0.05
    assert max(excess) < 0.03
