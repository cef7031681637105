"""Links that are shared unevenly: small flows less evenly than large ones, where a cluster says so."""

import numpy as np
import pytest

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.workloads.workload import Demand
from tests.support.small_jobs import NAMES, assert_same_bytes, job, machine, start, system
from tuners.actions import Run

MODEL = 100.0


def made(uneven_bytes=0.0, discipline="uneven", **changed):
    """Three workers at barriers, with two servers and links of 100 bytes per second."""
    cluster = Cluster(tuple((n, machine(100.0)) for n in NAMES), discipline, uneven_bytes=uneven_bytes)
    return system(
        cluster, job(Demand(MODEL, 0.0, fixed_seconds=0.1)), start(policy="bsp", **changed), Conditions(jitter=0.1)
    )


def pulls(simulated):
    """Seconds of the pulls of 50 steps, sorted within each, [50, 3]."""
    return np.sort(np.reshape(simulated.perform(Run(clocks=150)).pushes.pull_seconds, (50, 3)), axis=1)


@pytest.mark.parametrize(
    ("uneven_bytes", "changed", "deviation"),
    [
        (MODEL / 2, {}, 1.0),
        (MODEL, {}, 2.0),
        (MODEL, {"servers": NAMES[4:]}, 1.0),
        (MODEL, {"model_shares": (0.2, 0.8)}, 1.25),
        (MODEL / 4, {"transfer_bits": 16}, 1.0),
        (100 * MODEL, {}, 4.0),  # at most
    ],
)
def test_the_deviation_of_shares_is_that_of_the_size_of_the_largest_flow(uneven_bytes, changed, deviation):
    assert float(made(uneven_bytes, **changed).branches[0].inputs.unevenness) == pytest.approx(deviation)


@pytest.mark.slow
def test_by_default_shares_of_flows_of_any_size_have_a_deviation_of_one():
    assert made().branches[0].inputs.unevenness == ()
    assert_same_bytes(*(made(size).perform(Run(clocks=90)).pushes for size in (0.0, MODEL / 2)))


def test_large_flows_share_links_evenly_and_small_ones_come_one_after_another():
    one = {"servers": NAMES[4:]}
    even, usual, small = (pulls(made(size * MODEL, **one)) for size in (1e-6, 1.0, 4.0))
    fair = pulls(made(discipline="maxmin", **one))
    assert even == pytest.approx(fair, rel=1e-4)
    first, last = (np.median(of[:, 0]) / np.median(of[:, 2]) for of in (small, usual))
    assert first < 0.4 < 0.5 < last  # alone, the first of three takes a third of the time
    assert [np.median(of[:, 2]) for of in (usual, small)] == pytest.approx([np.median(fair)] * 2, rel=0.05)


def test_uneven_bytes_need_links_that_are_shared_unevenly():
    with pytest.raises(ValueError, match='set discipline = "uneven"'):
        made(1.0, discipline="maxmin")
    with pytest.raises(ValueError, match="finite and not negative"):
        made(-1.0)
