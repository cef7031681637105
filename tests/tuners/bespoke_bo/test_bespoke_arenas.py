"""The arenas of the bespoke optimiser: what an iteration takes by the engine, by an oracle and by Cruise, and the best."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from harness import scenario
from reports.papers.bespoke_bo import ASSUMPTIONS, NETS, Experiment, best, drawn_case, uniform
from reports.papers.bespoke_optimum import balanced, iteration_seconds, optimum, placements, schedule
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.cluster.profiles import Device, NodeType
from simulators.workloads.catalogue import workload
from simulators.workloads.workload import Demand, Proxy, Workload
from tests.support import small_jobs
from tests.support.marks import slow
from tuners.actions import Run, Setting, Target
from tuners.bespoke_bo import schedules
from tuners.cruise.placement import MachineKind, Placement, Problem, pull_seconds

CASE = Experiment("c", "speechnet", 16)
SPEECHNET = workload("bespoke-speechnet").demand


def quiet(made):
    return replace(made, conditions=Conditions(jitter=0.0, stagger=False))


# ------------------------------------------------------------------------------------------------------- one iteration


def settings():
    """Uniform devices, uniform GPUs, the best, and some at random."""
    job = scenario.job(CASE.scenario)
    counts, seconds = np.array([[0, 2, 0, 0], [0, 2, 0, 0], [0, 2, 0, 0], [0, 0, 0, 4]]), 4.31
    best = schedule(CASE.scenario.cluster, SPEECHNET, CASE.batch, counts, seconds, job.start)
    rng = np.random.default_rng(0)
    return [job.start, uniform(CASE, "gpu"), best, *(job.space.setting(job.space.sample(rng)) for _ in range(2))]


def test_the_engine_takes_as_long_as_the_oracle_says():
    system, current = scenario.system(quiet(CASE.scenario), 0), None
    for wanted in settings():
        asking = schedules.measure(wanted, current or system.job.start, iterations=4, counted=2)
        action, found = next(asking), None
        while found is None:
            try:
                action = asking.send(system.perform(action))
            except StopIteration as end:
                found = end.value
        assert found.seconds == pytest.approx(CASE.seconds(wanted), rel=1e-9)
        current = wanted


@pytest.mark.parametrize(("workers", "servers"), [(2, 3), (3, 2), (4, 1)])
def test_apart_and_in_equal_parts_a_pull_takes_as_long_as_cruise_says(workers, servers):
    names, rate, model = tuple("abcde"), 100.0, 700.0
    cluster = Cluster(tuple((n, machine(rate)) for n in names))
    setting = Setting(workers=names[:workers], servers=names[workers:], batch_size=8)
    demand = Demand(model_bytes=model, sample_seconds=0.5)
    shares = (model / servers,) * servers
    problem = Problem(
        kinds=(MachineKind(count=5, compute_seconds=0.5, bytes_per_second=rate),),
        samples=8.0,
        batch_size=8.0,
        model_bytes=model,
    )
    placement = Placement(tuple(range(workers)), tuple(range(workers, 5)), (8.0,) * workers, shares)
    tau = float(np.maximum(*pull_seconds(problem, placement)).max())
    assert tau == pytest.approx(max(workers * shares[0] / rate, model / rate))  # Cruise, Eq. 4
    # The same as the bespoke optimiser's max over machines of transfer / speed; pull, compute, and push.
    assert iteration_seconds(cluster, demand, setting) == pytest.approx(8 * 0.5 + 2 * tau)


def machine(rate, speed=1.0, name="plain"):
    return NodeType(name, 1, 1e9, rate, (Device(kind="cpu", speed=speed),), "made up")


def test_who_has_the_model_early_computes_early():
    cluster = Cluster((("slow", machine(10.0)), ("fast", machine(100.0)), ("server", machine(1000.0))))
    setting = Setting(workers=("slow", "fast"), servers=("server",), loads=((1,), (10,)))
    demand = Demand(model_bytes=100.0, sample_seconds=1.0)
    # 10 + 1 + 10 s on the one, 1 + 10 + 1 s on the other: not 10 s of computing and 20 s of transfers.
    assert iteration_seconds(cluster, demand, setting) == pytest.approx(21.0)


# --------------------------------------------------------------------------------------------------------------- the best


def test_there_are_as_many_placements_as_counted_by_hand():
    assert len(placements(CASE.scenario.cluster)) == 34_731


@pytest.mark.slow
def test_the_two_published_figures_come_out():
    gpus, job = uniform(CASE, "gpu"), scenario.job(CASE.scenario)
    assert CASE.seconds(gpus) == pytest.approx(9.82, abs=0.005)
    counts, seconds = balanced(CASE.scenario.cluster, SPEECHNET, CASE.batch)
    first = int(seconds.argmin())
    assert seconds[first] == pytest.approx(4.31, abs=0.005)
    made = schedule(CASE.scenario.cluster, SPEECHNET, CASE.batch, counts[first], seconds[first], job.start)
    assert CASE.seconds(made) == pytest.approx(seconds[first], rel=1e-3)
    assert counts[first].tolist() == [[0, 2, 0, 0], [0, 2, 0, 0], [0, 2, 0, 0], [0, 0, 0, 4]]


@pytest.mark.parametrize("batch", [3, 7])
def test_the_optimum_is_the_best_of_all_schedules(batch):
    cluster = Cluster((("a", machine(30.0, 1.0)), ("b", machine(30.0, 1.0)), ("c", machine(80.0, 2.5, "big"))))
    demand = Demand(model_bytes=60.0, sample_seconds=1.0)
    names = [n for n, _ in cluster.nodes]
    like = Setting(workers=("a",), servers=("a",))

    def every():
        for loads in itertools.product(range(batch + 1), repeat=3):
            if sum(loads) != batch:
                continue
            rows = {n: (x,) for n, x in zip(names, loads, strict=True) if x}
            for size in (1, 2, 3):
                for servers in itertools.combinations(names, size):
                    yield replace(like, workers=tuple(rows), servers=servers, loads=tuple(rows.values()))

    least = min(iteration_seconds(cluster, demand, s) for s in every())
    found = optimum(cluster, demand, batch, like)
    assert iteration_seconds(cluster, demand, found) == pytest.approx(least, rel=1e-9)


def test_equal_machines_that_end_last_are_all_relieved():
    """One sample less on one of four equal machines shortens nothing. A tuner has found the known schedule."""
    case = drawn_case(4)
    known = scenario.job(case.scenario).start
    names, serves = [n for n, _ in case.scenario.cluster.nodes], ("b0", "b1", "b2")
    loads = dict.fromkeys(names[:4], (10, 0)) | {"m0": (6,), "m1": (6,), "b0": (26,), "b1": (25,), "b2": (25,)}
    known = replace(known, workers=tuple(loads), servers=serves, loads=tuple(loads.values()))
    assert case.seconds(best(case)) < 1.001 * case.seconds(known)


# -------------------------------------------------------------------------------------------------------------- the arenas


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("setting", ["a", "b", "c"])
def test_arenas_are_those_of_tables_1_and_2(setting, net):
    counts = {"a": (0, 6, 2, 2), "b": (1, 3, 3, 3), "c": (2, 2, 2, 4)}[setting]
    made = scenario.load(f"boat-{setting}-{net}")
    job = scenario.job(made)
    types = [n.type for n in job.nodes]
    assert [types.count(f"{t}xlarge") for t in ("g2.2", "c4.2", "c4.4", "c4.8")] == list(counts)
    assert schedules.batch(job) == 2 ** max(NETS[net])
    assert len(job.nodes) * 2 + len(schedules.devices(job)) == 30 + counts[0]
    assert schedules.is_free(job)
    assert schedules.setting(job, schedules.evenly(job, schedules.devices(job))) == job.start
    assert job.target == Target("samples", 3000 * 2 ** max(NETS[net]))


def test_the_arenas_machines_are_those_of_the_middle_assumption():
    for case, given in ((CASE, ASSUMPTIONS["middle"]),):
        for (_, assumed), (_, plain) in zip(
            case.scenario.cluster.nodes, scenario.load("boat-c-speechnet").cluster.nodes, strict=True
        ):
            assert assumed.nic_bytes_per_second == plain.nic_bytes_per_second
            for one, other in zip(assumed.devices, plain.devices, strict=True):
                assert one.speed == pytest.approx(other.speed, rel=1e-3)
        assert given.gpu == 57.2


def test_a_job_ends_with_the_push_that_brings_its_samples():
    system = scenario.system(quiet(replace(CASE.scenario, target=Target("samples", 3 * CASE.batch - 10))), 0)
    window = system.perform(Run(clocks=1000))
    assert (window.status, window.clocks) == ("target", 30)
    assert sum(w.samples for w in window.workers) == 3 * CASE.batch


@pytest.mark.parametrize("loads", [(6, 2), slow((4, 4))])
def test_in_a_mean_every_sample_counts_the_same(loads):
    # The loss is p x, from p = 1 on: a worker's loss and its gradient are both the mean of its x, whose values are 1 and 5.
    rows = np.repeat([1.0, 5.0], 20).astype(np.float32)
    proxy = Proxy(lambda key: np.ones(1, np.float32), lambda p, x: p[0] * x[0], lambda p, x: x[0] * 0, (rows,), (rows,))
    job = Workload(
        name="line", demand=Demand(model_bytes=1.0, sample_seconds=1.0), proxy=proxy, aggregation="mean", samples=40
    )
    cluster = Cluster(tuple((n, machine(10.0)) for n in "abc"))
    setting = Setting(workers=("a", "b"), servers=("c",), loads=tuple((n,) for n in loads), policy="bsp", learning_rate=1.0)
    made = small_jobs.system(cluster, job, setting, Conditions(jitter=0.0, stagger=False))
    pushes = made.perform(Run(clocks=2)).pushes
    means = dict(zip(pushes.worker.tolist(), pushes.loss.tolist(), strict=True))
    assert means[0] != means[1]
    mean = sum(n * means[worker] for worker, n in enumerate(loads)) / sum(loads)
    assert float(small_jobs.branch(made).learned.parameters[0]) == pytest.approx(1 - mean, rel=1e-6)
