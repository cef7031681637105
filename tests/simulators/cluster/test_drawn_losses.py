"""RackLosses in company: their rate, their company and their repairs are those that the condition names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from harness import scenario
from simulators.cluster import drawn_losses as module
from simulators.cluster import loss_fit
from simulators.cluster.conditions import Conditions, NodeChange, RackLosses, ReplayedTrace, check
from simulators.cluster.drawn_losses import drawn_losses, exposed
from simulators.cluster.loss_fit import fitted_losses, main
from simulators.cluster.profiles import NodeType, profile
from simulators.cluster.trace_driven import expand_replay, places_of
from simulators.cluster.trace_driven_nodes import places
from traces.shipped import locate
from tuners.actions import Run, Window

SPOT = msgspec.structs.replace(profile("edge-4core"), spot=True)


def cluster(count: int, kind: NodeType = SPOT) -> list[tuple[str, NodeType]]:
    return [(f"n{i}", kind) for i in range(count)]


def gone(changes: list[NodeChange]) -> list[NodeChange]:
    return [c for c in changes if c.event != "joins"]


def test_public_names_exist() -> None:
    assert all(hasattr(m, name) for m in (module, loss_fit) for name in m.__all__)


def test_a_node_is_lost_as_often_and_in_as_much_company_as_the_condition_says() -> None:
    losses = RackLosses(every_seconds=1000.0, together=2.5, rack=40, repair_seconds=1e-6)
    budget = 200_000.0
    found = gone(drawn_losses([losses], cluster(40), budget, seed=1))
    sizes = np.array([len(c.nodes) for c in found])
    events, expected = len(found), 40 * budget / 1000.0 / 2.5
    assert abs(events - expected) < 4 * np.sqrt(expected)  # a Poisson process
    # Geometric with mean 2.5: variance (1 - p) / p^2, p = .4.
    assert abs(sizes.mean() - 2.5) < 4 * np.sqrt(0.6 / 0.16 / events)
    struck = np.bincount([int(n[1:]) for c in found for n in c.nodes], minlength=40)
    mean = struck.mean()
    assert np.abs(struck - mean).max() < 5 * np.sqrt(mean)


def test_nodes_that_are_lost_together_are_of_one_rack() -> None:
    losses = RackLosses(every_seconds=500.0, together=6.0, rack=4, repair_seconds=10.0)
    found = gone(drawn_losses([losses], cluster(12), 50_000.0, seed=2))
    racks = [{int(n[1:]) // 4 for n in c.nodes} for c in found]
    assert all(len(rack) == 1 for rack in racks)
    assert {len(c.nodes) for c in found} == {1, 2, 3, 4}
    assert set().union(*racks) == {0, 1, 2}


def test_nodes_return_after_a_lognormal_repair_and_are_not_lost_while_they_are_away() -> None:
    losses = RackLosses(
        every_seconds=2000.0, together=2.0, repair_seconds=300.0, repair_spread=0.8, event="leaves", notice_seconds=20.0
    )
    changes = drawn_losses([losses], cluster(10), 400_000.0, seed=3)
    left: dict[str, float] = {}
    repairs = []
    for change in changes:
        for node in change.nodes:
            if change.event == "joins":
                repairs.append(change.seconds - left.pop(node) - 20.0)
            else:
                assert node not in left
                left[node] = change.seconds
    logs = np.log(repairs)
    assert abs(logs.mean() - np.log(300.0)) < 4 * 0.8 / np.sqrt(len(logs))
    assert abs(logs.std() - 0.8) < 4 * 0.8 / np.sqrt(2 * len(logs))
    check(Conditions(nodes=tuple(changes)), tuple(n for n, _ in cluster(10)))


def test_without_repair_a_node_is_lost_once() -> None:
    found = drawn_losses([RackLosses(every_seconds=100.0, together=3.0)], cluster(9), 1e5, seed=4)
    assert sorted(n for c in found for n in c.nodes) == sorted(n for n, _ in cluster(9))


def test_only_spot_instances_are_taken_back() -> None:
    mixed = [*cluster(3), *((f"d{i}", profile("edge-4core")) for i in range(3))]
    assert exposed(RackLosses(every_seconds=1.0, spot=True), mixed) == ["n0", "n1", "n2"]
    assert exposed(RackLosses(every_seconds=1.0, spot=True, nodes=("n1", "d0")), mixed) == ["n1"]
    assert len(exposed(RackLosses(every_seconds=1.0), mixed)) == 6
    assert drawn_losses([RackLosses(every_seconds=1.0, nodes=("d0",), spot=True)], mixed, 1e3, 0) == []


def test_draws_depend_on_the_seed_alone() -> None:
    losses = RackLosses(every_seconds=100.0, together=2.0, repair_seconds=50.0)
    nodes = tuple(cluster(6))
    given = Conditions(losses=(losses,))
    first, _ = expand_replay(given, nodes, 1e4, seed=1)
    assert first == expand_replay(given, nodes, 1e4, seed=1)[0]
    assert first.nodes != expand_replay(given, nodes, 1e4, seed=2)[0].nodes
    assert first.losses == ()
    # A longer budget has the same beginning.
    longer = expand_replay(given, nodes, 2e4, seed=1)[0].nodes
    early = [c for c in longer if c.seconds < 1e4]
    assert [c for c in first.nodes if c.seconds < 1e4] == early


def test_a_fit_finds_what_was_drawn() -> None:
    losses = RackLosses(every_seconds=50_000.0, together=2.0, rack=50, repair_seconds=3_000.0, repair_spread=0.6)
    drawn = drawn_losses([losses], cluster(50), 3e6, seed=5)
    named = {"joins": "joined", "fails": "failed", "leaves": "left"}
    found = fitted_losses(places(((c.seconds, n, named[c.event]) for c in drawn for n in c.nodes), machines=50))
    assert found.every_seconds == pytest.approx(50_000, rel=0.1)
    assert found.together == pytest.approx(2.0, abs=0.15)
    assert found.repair_seconds == pytest.approx(3_000, rel=0.1)
    assert found.repair_spread == pytest.approx(0.6, abs=0.05)
    assert found.event == "fails"


def test_recordings_that_ship_have_losses_in_company(capsys: pytest.CaptureFixture[str]) -> None:
    recording = ReplayedTrace(str(locate("shipped:bamboo-spot", Path())))
    fits = {run: fitted_losses(found) for run, found in places_of(recording).items()}
    assert fits["p3"].together == pytest.approx(167 / 75, abs=0.01)  # 167 machines in 75 events
    assert fits["p3"].repair_seconds == 840
    assert main(["shipped:bamboo-spot"]) == 0
    said = capsys.readouterr().out
    assert "every_seconds = 5890, together = 2.23, repair_seconds = 840, repair_spread = 0.86" in said
    shipped = scenario.load("spot-zones").conditions.losses[0]
    assert (shipped.every_seconds, shipped.together, shipped.repair_seconds) == (5890, 2.23, 840)
    with pytest.raises(ValueError, match="Cannot fit losses to a recording without any"):
        fitted_losses(places([(5.0, "a", "joined")]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Conditions(losses=(RackLosses(every_seconds=0.0),)), "Cannot lose nodes every 0 s"),
        (Conditions(losses=(RackLosses(every_seconds=1.0, together=0.5),)), "Cannot lose 0.5 nodes together"),
        (Conditions(losses=(RackLosses(every_seconds=1.0, rack=-1),)), r"losses\.rack = -1"),
        (Conditions(losses=(RackLosses(every_seconds=1.0, repair_seconds=-1.0),)), r"losses\.repair_seconds = -1"),
        (Conditions(losses=(RackLosses(every_seconds=1.0, notice_seconds=5.0),)), "only a node that leaves gives notice"),
        (Conditions(losses=(RackLosses(every_seconds=1.0, nodes=("x",)),)), "node 'x': this cluster has n0, n1"),
        (
            Conditions(losses=(RackLosses(every_seconds=1.0), RackLosses(every_seconds=2.0))),
            "Cannot draw losses of a node twice",
        ),
        (
            Conditions(losses=(RackLosses(every_seconds=1.0),), nodes=(NodeChange(("n0",), 5.0, "fails"),)),
            "leave out one of the two",
        ),
    ],
)
def test_losses_that_cannot_be_drawn_are_refused(given: Conditions, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(given, ("n0", "n1"))


@pytest.mark.slow
def test_a_run_loses_nodes_together_and_gets_them_back() -> None:
    made = scenario.load("spot-zones")
    sped = tuple(msgspec.structs.replace(x, every_seconds=600.0, repair_seconds=60.0) for x in made.conditions.losses)
    made = replace(made, conditions=msgspec.structs.replace(made.conditions, losses=sped))
    playing = scenario.system(made, seed=0)
    events = []
    for _ in range(6):
        window: Window = playing.perform(Run(seconds=100.0))
        events += window.events
    lost = [e for e in events if e.event == "failed"]
    assert all(e.node.startswith("s") for e in lost)
    assert len({e.seconds for e in lost}) < len(lost), "some of them at the same moment"
    assert {e.node for e in events if e.event == "joined"} <= {e.node for e in lost}
    assert any(e.event == "joined" for e in events)
    assert playing.status == "running"
