"""A link that becomes slow while a job runs: its node goes elsewhere, or is left out, and training is as fast as before."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest

from harness.ray_cluster import joined  # noqa: F401 (imports Ray after its settings are made)
from tests.live.support.faults import Patient, deployed
from tests.live.support.namespaces import NamespaceCluster
from tests.live.support.ones import ONES, ManyOnes, counted
from tuners.actions import Run

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

_SLOW_MEGABITS_PER_SECOND = 10.0
_USUAL_SECONDS = 8.0  # of training, from which it is known what is usual


@pytest.fixture(scope="module")
def patient(namespace_cluster: NamespaceCluster) -> Iterator[Patient]:
    with namespace_cluster.inside(0), deployed(ManyOnes("ones", "ones.toml", ONES, 0), namespace_cluster) as made:
        yield made


def clocks_per_second(patient: Patient, seconds: float = _USUAL_SECONDS) -> float:
    """Of the next seconds."""
    patient.live.perform(Run(clocks=1))
    return patient.live.perform(Run(seconds=seconds)).clocks / seconds


def until_told(patient: Patient, what: str, within: float = 30.0) -> float:
    """Seconds until it is told."""
    started = time.monotonic()
    while not any(what in said for _, said in patient.live.glimpse().happenings):
        assert time.monotonic() - started < within, patient.told()
        patient.live.perform(Run(seconds=0.1))
    return time.monotonic() - started


def test_a_server_with_a_slow_link_goes_to_the_spare_machine_and_a_worker_without_one_is_left_out(patient: Patient) -> None:
    cluster, live = patient.cluster, patient.live
    assert isinstance(cluster, NamespaceCluster)
    usual = clocks_per_second(patient)
    before = patient.find("server/n2")[1]
    cluster.set_rate(before, _SLOW_MEGABITS_PER_SECOND)
    found = until_told(patient, "server/n2 is lost: its link is slow")
    whole = patient.whole()
    again = clocks_per_second(patient)
    clocks, lost, parameters = counted(live)
    assert patient.find("server/n2")[1] != before
    assert (lost, set(parameters)) == (0, {clocks})
    assert again > usual / 2

    cluster.set_rate(patient.find("worker/n0")[1], _SLOW_MEGABITS_PER_SECOND)
    left_out = until_told(patient, "worker/n0 is lost: its link is slow")
    alone = clocks_per_second(patient)
    clocks, lost, parameters = counted(live)
    print(  # noqa: T201
        json.dumps({"usual": usual, "found": found, "whole": whole, "again": again, "left out": left_out, "alone": alone})
    )
    assert live.glimpse().setting.workers == ("n1",)
    assert (lost, set(parameters)) == (0, {clocks})
    assert alone > usual / 4  # half as many hands
    assert np.isfinite(parameters).all()
