"""What a run used of machines and what that cost, against sums made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.drive import Outcome, Played, play
from harness.score import score
from harness.spending import Spending, highest_usd, spending
from simulators.cluster.conditions import Conditions, NodeChange
from tests.support.small_jobs import SMALL, start
from tests.support.small_jobs import cluster as small_cluster
from tests.support.small_jobs import job as small_job
from tests.support.small_jobs import system as small_system
from traces.exchanges import Exchange
from tuners.actions import (
    Action,
    Cost,
    Fork,
    Free,
    Job,
    NodeEvent,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Target,
    Tuner,
    Window,
)
from tuners.prices import Prices, Rate
from tuners.testing.toys import toys

PRICES = Prices({"n0": 3600.0, "n1": 7200.0, "n2": 3600.0, "n3": 3600.0, "n4": 3600.0})  # USD per hour: 1 or 2 per second
JOB = replace(toys()["every knob"](0).job, budget_seconds=100.0, prices=PRICES)  # n0, n1, n2 work, n3, n4 serve
TWO = replace(JOB.start, workers=("n0", "n1"), servers=("n3",))
OTHER = replace(JOB.start, workers=("n2",), servers=("n4",))


def window(start: float, end: float, setting: Setting | None = None, *changes: Cost, events: Any = ()) -> Window:
    nothing = Pushes(*(np.zeros(0) for _ in Pushes._fields))
    made = Window(start_seconds=start, end_seconds=end, clocks=0, pushes=nothing, workers=(), setting=setting)
    return replace(made, changes=changes, events=tuple(NodeEvent(*e) for e in events))


def spent(*exchanges: tuple[float, Action[Any], Any], job: Job = JOB) -> Spending:
    return spending(job, [Exchange(*e) for e in exchanges])


def test_every_machine_of_the_setting_is_paid_for_while_it_is_used() -> None:
    assert spent((10.0, Run(seconds=10), window(0, 10))) == (50.0, 60.0)
    assert spent() == (0.0, 0.0)


def test_nobody_pays_after_the_budget_has_ended() -> None:
    stall = (130.0, Reconfigure(TWO), Cost(seconds=120.0, stall_seconds=120.0))
    assert spent((10.0, Run(seconds=10), window(0, 10)), stall).machine_seconds == 500.0


def test_a_machine_that_is_given_back_costs_nothing_from_then_on() -> None:
    """During the change both settings are paid for."""
    change = Cost(seconds=2.0, stall_seconds=2.0)
    log = [(10.0, Run(seconds=10), window(0, 10)), (12.0, Reconfigure(TWO), change)]
    assert spent(*log, (22.0, Run(seconds=10), window(12, 22, TWO))) == (50 + 10 + 30, 60 + 12 + 40)
    refused = (10.0, Reconfigure(OTHER), Rejected("no"))
    assert spent(*log, refused, (22.0, Run(seconds=10), window(12, 22, TWO))).machine_seconds == 90
    back = (12.0, Reconfigure(TWO), replace(change, done=False))
    assert spent(log[0], back, (22.0, Run(seconds=10), window(12, 22, JOB.start))).machine_seconds == 110


@pytest.mark.parametrize("cut", [11.0, 14.0, 17.0])
def test_a_change_that_nobody_waits_for_ends_when_its_cost_says(cut: float) -> None:
    """It was requested at 10 s and took 4 s; where a window ends does not matter."""
    change = Cost(seconds=4.0, stall_seconds=0.0)
    log: list[Any] = [(10.0, Run(seconds=10), window(0, 10))]
    log.append((10.0, Reconfigure(TWO, wait=False), Cost(seconds=0.0, stall_seconds=0.0)))
    first = (change,) if cut >= 14 else ()
    log.append((cut, Run(seconds=cut - 10), window(10, cut, TWO if first else JOB.start, *first)))
    second = () if first else (change,)
    log.append((20.0, Run(seconds=20 - cut), window(cut, 20, TWO, *second)))
    assert spent(*log).machine_seconds == 50 + 20 + 6 * 3


def test_a_machine_that_is_gone_is_not_paid_for() -> None:
    """n1 fails at 2 s and is back at 6 s, in use again from 8 s on; n4 has notice at 1 s and leaves at 9 s."""
    without = replace(JOB.start, workers=("n0", "n2"), servers=("n3", "n4"))
    events = [(1.0, "n4", "leaving"), (2.0, "n1", "failed"), (6.0, "n1", "joined")]
    lost = window(0, 8, without, events=events)
    again = window(8, 10, replace(JOB.start, servers=("n3",)), events=[(9.0, "n4", "left")])
    log = [(8.0, Run(seconds=8), lost), (8.0, Reconfigure(JOB.start), Cost(seconds=0.0, stall_seconds=0.0))]
    found = spent(*log, (10.0, Run(seconds=2), again))
    assert found.machine_seconds == 3 * 10 + 9 + (2 + 2)
    assert found.usd == 3 * 10 + 9 + 2 * (2 + 2)


def test_a_machine_that_joins_is_not_paid_for_before() -> None:
    joins = window(0, 10, JOB.start, events=[(4.0, "n4", "joined")])
    assert spent((10.0, Run(seconds=10), joins)).machine_seconds == 46


def test_branches_that_wait_keep_their_machines() -> None:
    small = replace(JOB, start=TWO)
    log: list[Any] = [(1.0, Fork(0, OTHER), 1), (5.0, Run(seconds=4, branch=1), window(1, 5, OTHER))]
    log += [(5.0, Free(1), None), (6.0, Run(seconds=1), window(5, 6, TWO))]
    assert spent(*log, job=small).machine_seconds == 5 * 5 + 3


def of_all(job):
    return highest_usd(job.prices, (n.name for n in job.nodes), job.budget_seconds)


def test_an_unknown_price_is_no_price() -> None:
    found = spent((10.0, Run(seconds=10), window(0, 10)), job=replace(JOB, prices=Prices({"n0": 1.0})))
    assert found.machine_seconds == 50
    assert math.isnan(found.usd)
    assert math.isnan(of_all(replace(JOB, prices=Prices())))
    assert of_all(JOB) == 600


def test_recorded_settings_have_their_own_machines_and_prices() -> None:
    prices = Prices(by_setting={JOB.start: Rate(9, 3600.0), TWO: Rate(2, 7200.0)})
    log: list[Any] = [(10.0, Run(seconds=10), window(0, 10))]
    log += [(13.0, Reconfigure(TWO), Cost(seconds=3.0, stall_seconds=3.0)), (20.0, Run(seconds=7), window(13, 20, TWO))]
    assert spent(*log, job=replace(JOB, prices=prices)) == (90 + 20, 10 + 20)
    assert of_all(replace(JOB, prices=prices)) == 200


def test_a_target_above_the_budget_of_money_does_not_count() -> None:
    log = (Exchange(10.0, Run(seconds=10), window(0, 10)),)
    for most, reached in ((59.0, False), (60.0, True)):
        played = Played(replace(JOB, budget_usd=most), log, Outcome("target", "", 10.0, 0.0))
        row = score(played, scenario="s", tuner="t", seed=0).score
        assert (row.reached, row.usd, row.budget_usd) == (reached, 60.0, most)
        assert row.completion_seconds == (10.0 if reached else 100.0)
        if not reached:
            assert row.reason == "The target was reached after 10 s, and that cost 60 USD of 59 USD."


@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(0.3, 9.0), min_size=1, max_size=6))
def test_a_run_costs_the_same_however_it_is_divided_into_windows(lengths: list[float]) -> None:
    """On the simulator: b leaves and comes back."""
    gone = Conditions(
        nodes=(
            NodeChange(nodes=("b",), seconds=2.0, event="leaves", notice_seconds=0.5),
            NodeChange(nodes=("b",), seconds=5.0, event="joins"),
        )
    )

    def in_windows(job: Job) -> Tuner:
        for length in lengths:
            yield from Run(seconds=length)

    def made() -> Any:
        return small_system(
            small_cluster(), small_job(SMALL), start(), gone, target=Target("clocks", 10_000), budget_seconds=12.0
        )

    def whole(job: Job) -> Tuner:
        yield from Run(seconds=12.0)

    one, parts = play(whole, made()), play(in_windows, made())
    assert spending(parts.job, parts.exchanges).machine_seconds == pytest.approx(
        spending(one.job, one.exchanges).machine_seconds, rel=1e-12
    )


def test_a_request_that_names_a_lost_machine_does_not_pay_for_it_when_it_is_back() -> None:
    """Roles are held, so that the job goes on without n1, whatever a setting that was made before the loss names."""
    held = replace(toys()["one knob"](0).job, budget_seconds=100.0, prices=PRICES)
    left = replace(held.start, workers=("n0", "n2"))
    faster = {"learning_rate": 0.5}
    found = spent(
        (10.0, Run(seconds=10), window(0, 10, left, events=[(5.0, "n1", "failed")])),
        (10.0, Reconfigure(replace(held.start, **faster), wait=False), Cost(seconds=0.0, stall_seconds=0.0)),  # type: ignore[arg-type]
        (20.0, Run(seconds=10), window(10, 20, replace(left, **faster), events=[(15.0, "n1", "joined")])),  # type: ignore[arg-type]
        (30.0, Run(seconds=10), window(20, 30, replace(left, **faster))),  # type: ignore[arg-type]
        job=held,
    )
    assert found.machine_seconds == 4 * 30.0 + 5.0
