"""The simulator against theory: what is known in closed form, within the standard error or the approximation's own.

Timing-only jobs on up to 32 nodes, of which some work, so that each network discipline compiles once. M is the model,
b every NIC's bandwidth, P = M / b an unloaded pull, Z the compute time, z = Z / P, w workers, s servers.
"""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, Sleeps
from simulators.workloads.workload import Demand
from tests.support.marks import slow
from tests.support.small_jobs import Quadratic, branch, job, machine, system
from tuners.actions import Run, Setting

NAMES = tuple(f"n{i}" for i in range(32))
BANDWIDTH = 100.0
STEADY = Conditions(jitter=0.0, stagger=False)


def timed(w, s, z, conditions, discipline="maxmin", push=0.0, apply_seconds=0.0, policy="asp", seed=0, snapshots=0):
    """w workers and s servers whose pull takes one second alone, computing z seconds; `push` is a push per pull. Servers
    send a snapshot every so many pushes."""
    demand = Demand(
        model_bytes=BANDWIDTH, push_bytes=push * BANDWIDTH, sample_seconds=0.0, fixed_seconds=z, apply_seconds=apply_seconds
    )
    cluster = Cluster(tuple((n, machine(BANDWIDTH)) for n in NAMES), discipline, snapshot_clocks=snapshots)
    setting = Setting(workers=NAMES[:w], servers=NAMES[w : w + s], batch_size=8, policy=policy)
    return system(cluster, job(demand), setting, conditions, seed)


def rate(simulated, warm_up, pushes):
    """Pushes per second after a warm-up, and its standard error over ten batches."""
    simulated.perform(Run(clocks=warm_up))
    windows = [simulated.perform(Run(clocks=pushes // 10)) for _ in range(10)]
    seconds = np.array([w.seconds for w in windows])
    return pushes / seconds.sum(), pushes / seconds.sum() * stats.sem(seconds) / seconds.mean()


# ------------------------------------------------------------------------------------------------------- closed networks


def product_form_rate(workers, servers, z, push=0.0):
    """Cycles per second of the closed network: delay of z, one sharing station per direction of rate min(n, s).

    Buzen's convolution with load-dependent rates; exact for any distribution of compute times, because delay and
    processor-sharing stations are insensitive (Baskett, Chandy, Muntz and Palacios 1975).
    """

    def station(demand, rate_of):
        weights = [1.0]
        for n in range(1, workers + 1):
            weights.append(weights[-1] * demand / rate_of(n))
        return np.array(weights)

    total = station(z, lambda n: n)
    for demand in (1.0, push):
        if demand > 0:
            total = np.convolve(total, station(demand, lambda n: min(n, servers)))[: workers + 1]
    return total[workers - 1] / total[workers]


def test_the_formula_gives_the_epoch_times_of_another_simulation():
    """NMF of Cruise, z = 1.77: epoch times of four splits over that of 23 workers and 9 servers. A separate event simulation
    found 1.207, 1.010, 1.040 and 1.584."""
    best = product_form_rate(23, 9, 1.77)
    ratios = [best / product_form_rate(w, s, 1.77) for w, s in ((18, 14), (22, 10), (24, 8), (27, 5))]
    assert ratios == pytest.approx([1.216, 1.010, 1.035, 1.580], abs=0.001)
    assert ratios == pytest.approx([1.207, 1.010, 1.040, 1.584], rel=0.01)


CLUSTERS = [(18, 14), (22, 10), (23, 9), (24, 8), (27, 5)]


@pytest.mark.parametrize(("w", "s"), CLUSTERS)
def test_asp_under_max_min_sharing_is_the_product_form_network(w, s):
    found, error = rate(timed(w, s, 1.77, Conditions(jitter=0.5)), 40 * w, 300 * w)
    assert found == pytest.approx(product_form_rate(w, s, 1.77), rel=0.02)
    assert error < 0.01 * found


@pytest.mark.parametrize(
    "conditions",
    [Conditions(jitter=1.5), Conditions(jitter=0.2, sleeps=Sleeps(0.5, 0.77 * 2))],
    ids=["lognormal", "two-valued"],
)
def test_the_distribution_of_compute_times_does_not_matter(conditions):
    """A mean of 1.77 from a wide lognormal, or from 1.0 with a sleep of 1.54 in every second mini-batch."""
    z = 1.77 - (0.77 if conditions.sleeps else 0.0)
    found, _ = rate(timed(23, 9, z, conditions), 40 * 23, 400 * 23)
    assert found == pytest.approx(product_form_rate(23, 9, 1.77), rel=0.02)


@pytest.mark.parametrize(("w", "s", "push"), [(20, 6, 1.0), (12, 12, 1.0), (25, 5, 0.5)])
def test_pulls_and_pushes_are_two_sharing_stations(w, s, push):
    found, _ = rate(timed(w, s, 3.0, Conditions(jitter=0.7), push=push), 40 * w, 300 * w)
    assert found == pytest.approx(product_form_rate(w, s, 3.0, push), rel=0.02)


@pytest.mark.parametrize(("w", "s"), CLUSTERS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_first_come_first_served_reaches_the_overlap_bound(w, s, jitter):
    """max(z + 1, w / s) / w seconds per push: pulls of some hide behind the compute of others. z = 1.81 (Cruise's NMF).

    Without jitter staggered workers find an order in which no worker waits; with it, a queue near saturation costs a little.
    """
    found, _ = rate(timed(w, s, 1.81, Conditions(jitter=jitter), "fifo"), 40 * w, 100 * w)
    assert 1 / found == pytest.approx(max(2.81, w / s) / w, rel=1e-9 if jitter == 0 else 0.02)


def test_cruises_nmf_on_32_machines():
    """Table Ia and Fig 6, over the epoch time at (23,9); one constant, z = 1.81, is fitted to these four."""
    seconds = [1 / rate(timed(w, s, 1.81, Conditions(jitter=0.0), "fifo"), 40 * w, 40 * w)[0] for w, s in CLUSTERS]
    ratios = np.array(seconds) / seconds[2]
    assert ratios == pytest.approx([1.30, 1.065, 1.0, 1.011, 1.66], rel=0.04)
    assert ratios.argmin() == 2


# ------------------------------------------------------------------------------- flows to unlike servers, each by itself


def unequal(w, links, shares, policy="asp", conditions=STEADY, z=2.0):
    """w workers, and servers with these links and shares of the model; a push is as large as a pull."""
    kinds = [BANDWIDTH] * w + list(links)
    cluster = Cluster(tuple((NAMES[i], machine(kind)) for i, kind in enumerate(kinds)), independent_flows=True)
    demand = Demand(model_bytes=BANDWIDTH, sample_seconds=0.0, fixed_seconds=z)
    setting = Setting(
        workers=NAMES[:w], servers=NAMES[w : len(kinds)], batch_size=8, policy=policy, model_shares=tuple(shares)
    )
    return system(cluster, job(demand), setting, conditions)


@pytest.mark.slow
def test_a_connection_that_ends_leaves_the_link_to_those_that_go_on():
    """30 and 70 bytes of two servers share the worker's link. The first are there after 0.6 s; then 40 are left, at the 60
    bytes per second of their server's link. If the two ended together, 100 / (60 / 0.7) = 1.17 s would do."""
    seen = unequal(1, [100.0, 60.0], [0.3, 0.7]).perform(Run(clocks=5)).pushes
    assert seen.pull_seconds == pytest.approx(0.6 + 40 / 60)
    assert seen.push_seconds == pytest.approx(0.6 + 40 / 60)


@pytest.mark.slow
def test_servers_that_are_alike_are_as_one_large_connection_each():
    """Four servers have 1/8 each, one has 1/2. Five connections have a fifth of the link each, until four of them end."""
    seen = unequal(1, [100.0] * 5, [0.125] * 4 + [0.5]).perform(Run(clocks=5)).pushes
    assert seen.pull_seconds == pytest.approx(1.0)
    slow = unequal(1, [100.0] * 4 + [40.0], [0.125] * 4 + [0.5]).perform(Run(clocks=5)).pushes
    # 20 each until 12.5 are there, after 0.625 s; then 37.5 are left for the link of 40.
    assert slow.pull_seconds == pytest.approx(0.625 + 37.5 / 40)


@pytest.mark.slow
def test_a_busy_server_makes_no_work_wait_that_the_others_could_do():
    """At a barrier all transfer at once, and the server with two thirds is busy from the first byte to the last."""
    seen = unequal(4, [100.0, 100.0], [1 / 3, 2 / 3], "bsp").perform(Run(clocks=20)).pushes
    assert seen.pull_seconds == pytest.approx(4 * 2 / 3)
    assert seen.push_seconds == pytest.approx(4 * 2 / 3)


# ------------------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("discipline", ["maxmin", slow("uneven")])
def test_a_snapshot_shares_a_lone_link_with_the_pull_that_begins_with_it(discipline):
    """Both are as large as the model, so that one pull in twenty takes twice as long where shares are fair; in any shares
    the pushes after it are a model's transfer later, at most, and all cycles together one per snapshot."""
    simulated = timed(1, 1, 3.0, STEADY, discipline, snapshots=20)
    pulls = simulated.perform(Run(clocks=100)).pushes.pull_seconds
    slow = np.flatnonzero(pulls > 1.001)
    assert slow.tolist() == [20, 40, 60, 80]
    if discipline == "maxmin":
        assert pulls[slow] == pytest.approx(2.0)
        assert np.delete(pulls, slow) == pytest.approx(1.0)
    assert (pulls[slow] <= 2.0 + 1e-9).all()


def test_what_links_have_to_spare_carries_snapshots_for_nothing():
    """A lone worker takes half of what each of two servers can send; their snapshots have the other half."""
    simulated = timed(1, 2, 3.0, STEADY, snapshots=20)
    assert simulated.perform(Run(clocks=100)).pushes.pull_seconds == pytest.approx(1.0)


@pytest.mark.slow
def test_a_busy_link_carries_one_model_more_per_snapshot():
    """Eight workers that do nothing but pull keep a link busy; every 32 pushes, 4 of each, there is a snapshot."""
    found, _ = rate(timed(8, 1, 0.0, STEADY, snapshots=20), 320, 1600)
    assert 1 / found == pytest.approx(33 / 32, rel=1e-3)
    found, _ = rate(timed(8, 1, 0.0, STEADY), 320, 1600)
    assert 1 / found == pytest.approx(1.0, rel=1e-9)


@pytest.mark.slow
def test_servers_that_receive_snapshots_receive_pushes_later():
    """Eight workers that do nothing but push keep the links of two servers busy, and each gets half a model of the other."""
    demand = Demand(model_bytes=BANDWIDTH, push_bytes=10 * BANDWIDTH, sample_seconds=0.0, fixed_seconds=0.0)
    rates = []
    for snapshots in (0, 20):
        cluster = Cluster(tuple((n, machine(BANDWIDTH)) for n in NAMES), snapshot_clocks=snapshots)
        setting = Setting(workers=NAMES[:8], servers=NAMES[8:10], batch_size=8, policy="asp")
        rates.append(rate(system(cluster, job(demand), setting, STEADY, 0), 320, 1600)[0])
    # Of the receiving link of each server, ten halves of a model per push, and a half every 32 pushes.
    assert rates[0] / rates[1] == pytest.approx(1 + 1 / 320, rel=5e-4)


# -------------------------------------------------------------------------------------------------------------- lockstep


@pytest.mark.parametrize("policy", ["bsp", "asp"])
@pytest.mark.parametrize(("w", "s", "push"), [(18, 14, 0.0), (27, 5, 1.0), (4, 9, 0.5)])
def test_without_jitter_or_stagger_all_workers_stay_in_lockstep(policy, w, s, push):
    """The additive formula: w workers at once take max(1, w / s) for a pull, and for a push."""
    simulated = timed(w, s, 1.77, Conditions(jitter=0.0, stagger=False), push=push, policy=policy)
    window = simulated.perform(Run(clocks=40 * w))
    cycle = 1.77 + (1 + push) * max(1.0, w / s)
    assert window.pushes.seconds.reshape(40, w) == pytest.approx(np.repeat(cycle * np.arange(1, 41), w).reshape(40, w))
    assert window.pushes.wait_seconds == pytest.approx(0.0, abs=1e-9)


# --------------------------------------------------------------------------------------------------------------- barrier


def mean_of_maximum(distribution, n, lowest=0.0):
    """E[max of n] of a distribution on [lowest, inf): the integral of 1 - F(x)^n."""
    return lowest + integrate.quad(lambda x: 1 - distribution.cdf(x) ** n, lowest, np.inf, limit=200)[0]


@pytest.mark.parametrize("w", [2, 8, 24])
@pytest.mark.parametrize("jitter", [0.2, 1.0])
def test_a_barrier_waits_for_the_slowest_of_n_lognormal_computations(w, jitter):
    sigma = math.sqrt(math.log(1 + jitter**2))
    compute = stats.lognorm(s=sigma, scale=2.0 * math.exp(-(sigma**2) / 2))
    assert_cycles(timed(w, 8, 2.0, Conditions(jitter=jitter), policy="bsp"), w, 8, mean_of_maximum(compute, w))


def test_a_barrier_waits_for_the_slowest_of_n_sleepers():
    """Sleeps of max(0, N(1, 2)) with probability 0.4, on top of a constant second."""
    normal = stats.norm(1.0, 2.0)

    class Sleep:
        @staticmethod
        def cdf(x):
            return 0.6 + 0.4 * normal.cdf(x)

    conditions = Conditions(jitter=0.0, sleeps=Sleeps(0.4, 1.0, 2.0))
    assert_cycles(timed(12, 6, 1.0, conditions, policy="bsp"), 12, 6, 1.0 + mean_of_maximum(Sleep, 12))


def assert_cycles(simulated, w, s, slowest_seconds, cycles=400):
    """Mean seconds between barriers are the pull plus the slowest computation, within four standard errors."""
    simulated.perform(Run(clocks=w))  # the first cycle is staggered
    window = simulated.perform(Run(clocks=cycles * w))
    barriers = window.pushes.seconds.reshape(cycles, w).max(axis=1)
    lengths = np.diff(barriers)
    assert lengths.mean() == pytest.approx(max(1.0, w / s) + slowest_seconds, abs=4 * stats.sem(lengths))
    assert stats.sem(lengths) < 0.05 * lengths.mean()


# ----------------------------------------------------------------------------------------------------------------- queue


def repairman_wait(machines, away_seconds, service_seconds):
    """Mean queueing time at one server with constant service whose customers stay away for exponential times (M/D/1//N).

    Embedded chain at departures: during a service, each of those away comes back with 1 - exp(-service / away).
    """
    n, back = machines, 1 - math.exp(-service_seconds / away_seconds)
    chain = np.zeros((n, n))  # customers that a departing one leaves: 0 .. n-1
    for left in range(n):
        present = max(left, 1)  # an empty server waits for the first of n to come back
        for arrivals in range(n - present + 1):
            chain[left, present - 1 + arrivals] += stats.binom.pmf(arrivals, n - present, back)
    values, vectors = np.linalg.eig(chain.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    empty = stationary[0] / stationary.sum()
    per_departure = service_seconds + empty * away_seconds / n
    return n * per_departure - away_seconds - service_seconds


def test_the_repairman_of_many_machines_is_an_m_d_1_queue():
    """W = rho / (2 (1 - rho)) service times (Pollaczek and Khinchine)."""
    assert repairman_wait(150, 300.0 - 1.0, 1.0) == pytest.approx(0.5 * 0.5 / (1 - 0.5), rel=0.03)


def test_pushes_queue_at_the_servers_as_at_an_m_d_1_queue():
    """31 workers that are away for a lognormal time of variation 1, nearly exponential, and one server half busy.

    Many independent sources come together as a Poisson stream whatever their own distribution, so the wait is that of the
    machine repairman with exponential times, up to what is left of the distribution: a few per cent at 31 sources.
    """
    demand = Demand(model_bytes=0.0, sample_seconds=0.0, fixed_seconds=60.0, apply_seconds=1.0)
    cluster = Cluster(tuple((n, machine(BANDWIDTH)) for n in NAMES))
    setting = Setting(workers=NAMES[:31], servers=NAMES[31:], batch_size=8)
    simulated = system(cluster, job(demand), setting, Conditions(jitter=1.0))
    simulated.perform(Run(clocks=31 * 20))
    waits = [simulated.perform(Run(clocks=2000)).pushes.push_seconds.mean() - 1.0 for _ in range(10)]
    expected = repairman_wait(31, 60.0, 1.0)
    assert np.mean(waits) == pytest.approx(expected, abs=0.06 * expected + 3 * stats.sem(waits))
    assert stats.sem(waits) < 0.05 * expected


# -------------------------------------------------------------------------------------------------------- delayed descent


def descent(workers, learning_rate, pushes, curvature=2.0):
    """ASP on h / 2 x^2 by equal, staggered workers without jitter: every gradient is workers - 1 updates old."""
    model = Quadratic(curvature, centres=[0.0] * 40, first=1.0)
    cluster = Cluster(tuple((n, machine(BANDWIDTH)) for n in NAMES[:8]))
    setting = Setting(workers=NAMES[:workers], servers=NAMES[7:8], batch_size=4, learning_rate=learning_rate)
    demand = Demand(model_bytes=1.0, sample_seconds=1.0)
    simulated = system(cluster, job(demand, model), setting, Conditions(jitter=0.0), seed=5)
    return simulated, simulated.perform(Run(clocks=pushes))


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_delayed_descent_is_its_linear_recurrence(workers):
    """x(t+1) = x(t) - lr h x(t - d), d = min(t, workers - 1): the staleness is that of the recurrence, and x its value."""
    simulated, window = descent(workers, 0.05, 60)
    x = [1.0]
    for t in range(60):
        x.append(x[t] - 0.05 * 2.0 * x[max(t - (workers - 1), 0)])
    assert window.pushes.staleness.tolist() == [min(t, workers - 1) for t in range(60)]
    pulled = [x[max(t - (workers - 1), 0)] for t in range(60)]
    assert window.pushes.loss == pytest.approx(np.square(pulled), rel=1e-4, abs=1e-9)
    assert float(branch(simulated).learned.parameters["x"]) == pytest.approx(x[-1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_delayed_descent_is_stable_up_to_its_edge(workers):
    """lr h < 2 sin(pi / (2 (2 d + 1))) for a delay of d (Levin and May 1976)."""
    edge = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1))) / 2.0
    for factor, stable in ((0.9, True), (1.1, False)):
        losses = descent(workers, factor * edge, 1200)[1].pushes.loss
        assert (losses[-100:].max() < losses[:100].max()) == stable
