"""The closed form where servers are unlike or also work: by hand, and against the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulators.calibration import closed_form, simulations
from simulators.calibration.closed_form import Stations
from simulators.calibration.model import Constants, plant
from simulators.calibration.recorded.row import Row
from simulators.calibration.simulations import simulated

LINK = 100.0
GIVEN = Constants(
    cores=1,
    model_bytes=LINK,
    nic_bytes_per_second=LINK,
    fixed_seconds=1.0,
    jitter=0.1,
    discipline="uneven",
    independent_flows=True,
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in (("_PUSHES", 800), ("_CYCLES", 20), ("_PRECISE", 0.01)):
        monkeypatch.setattr(simulations, name, value)


def row(workers, servers, policy="asp", **more):
    return Row("", "job", workers, servers, 1.0, 1, policy=policy, machines=10, **more)


def cycles(constants, rows):
    return closed_form.spans([plant(constants, r) for r in rows], [r.barrier for r in rows]).cycle


def visited(shares, rates, nic, *, workers=1, independent=True, nodes=None):
    """A transfer of 1 byte by workers 0, 1, ... with links `nic`."""
    servers = Stations(shares, rates, nodes or tuple(range(workers, workers + len(shares))), independent)
    active = np.arange(workers + len(shares))[None] < workers
    return closed_form._visits([servers], active, np.full(active.shape, nic), np.ones((1, 1)))


@pytest.mark.parametrize(
    ("shares", "rates", "nic", "independent", "ends"),
    [
        ((1 / 3, 2 / 3), (1.0, 1.0), 1.0, True, (2 / 3, 1.0)),  # half of the link for each, then all for the larger one
        ((1 / 3, 2 / 3), (1.0, 0.8), 1.0, True, (2 / 3, 2 / 3 + 1 / 3 / 0.8)),  # which may not use it all
        ((1 / 3, 2 / 3), (1.0, 0.8), 1.0, False, (1.0, 1.0)),
        ((0.5, 0.5), (0.25, 2.0), 1.0, True, (2.0, 0.5 / 0.75)),  # what the slow server leaves goes to the fast one
    ],
)
def test_a_flow_that_ends_leaves_its_link_to_the_others(shares, rates, nic, independent, ends):
    of = visited(shares, rates, nic, independent=independent)
    assert (of.service + of.direct)[0, 0] == pytest.approx(ends)
    assert of.alone[0, 0] == pytest.approx(max(ends))


def test_a_server_that_works_moves_its_own_part_over_no_link():
    of = visited((0.5, 0.5), (1.0, 1.0), 1.0, workers=2, nodes=(0, 1))
    assert of.sizes[0].tolist() == [[0.0, 0.5], [0.5, 0.0]]
    assert of.service[0].tolist() == [[0.0, 0.5, 0.5, 0.0], [0.5, 0.0, 0.0, 0.5]]


def test_workers_that_begin_at_once_share_each_server():
    of = visited((0.25, 0.75), (1.0, 1.0), 1.0, workers=2)
    # Until both small flows end, half of each server's link for each worker; then all of the larger one's, by halves.
    assert closed_form._together(of)[0, 0] == pytest.approx(1.5)


def test_alike_servers_are_as_good_as_one_station():
    alike = [row(w, s, p, nics=(1.0,) * (w + s)) for w in (1, 3, 6) for s in (1, 2) for p in ("asp", "bsp")]
    plants = [plant(GIVEN, r) for r in alike]
    assert all(p.stations is None for p in plants)
    apart = [
        p._replace(
            stations=Stations(
                (1 / r.servers,) * r.servers, (LINK,) * r.servers, tuple(range(r.workers, 10)[: r.servers]), True
            )
        )
        for p, r in zip(plants, alike, strict=True)
    ]
    barrier = [r.barrier for r in alike]
    one, several = closed_form.spans(plants, barrier), closed_form.spans(apart, barrier)
    for name in one._fields:
        assert getattr(several, name) == pytest.approx(getattr(one, name), rel=1e-9)


UNLIKE = [
    row(w, s, p, **more)
    for p in ("asp", "bsp")
    for w, s, more in (
        (2, 3, {"model_shares": (0.5, 0.3, 0.2)}),
        (1, 3, {"model_shares": (0.5, 0.3, 0.2), "nics": (2.0, 1.0, 1.0, 1.0)}),
        (4, 2, {"nics": (1.0, 2.0, 0.5, 1.0, 1.0, 2.0)}),
        (2, 1, {"shared": True}),
        (3, 2, {"shared": True}),
        (4, 3, {"shared": True, "model_shares": (0.5, 0.3, 0.2)}),
    )
]


@pytest.mark.slow
def test_the_closed_form_of_unlike_servers_is_close_to_the_engine():
    """With one station for all servers, these were up to 2.5 times too long, or 10 % too short."""
    off = cycles(GIVEN, UNLIKE) / [float(simulated(GIVEN, r, 4).spans.cycle) for r in UNLIKE] - 1
    assert np.abs(off).max() < 0.12
    assert np.median(np.abs(off)) < 0.05


def test_flows_that_end_together_need_stations_only_where_servers_work():
    given = replace(GIVEN, independent_flows=False)
    assert [plant(given, r).stations is not None for r in UNLIKE] == [r.shared for r in UNLIKE]
    both = [r for r in UNLIKE if r.shared]
    assert cycles(given, both) == pytest.approx([float(simulated(given, r, 4).spans.cycle) for r in both], rel=0.15)
