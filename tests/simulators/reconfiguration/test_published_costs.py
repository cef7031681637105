"""What reconfigurations cost, simulated with the constants of `costs.toml`, beside what was published."""

from __future__ import annotations

import numpy as np
import pytest

from reports.papers.cruise_and_bo_online import TABLE_V, migration
from reports.papers.grid import loaded, played
from tuners.actions import Reconfigure, Run


@pytest.mark.parametrize(
    ("start", "end", "seconds"), [((18, 14), (22, 10), 31.3), ((14, 2), (25, 7), 87.3), ((25, 7), (12, 4), 98.4)]
)
def test_cruise_s_plans_take_what_was_published(start: tuple[int, int], end: tuple[int, int], seconds: float) -> None:
    """Sec. V-F and V-D; 4 constants fitted to these three and to two moves. Shrinking comes out 9 % too long: workers that
    are to stop are at a mini-batch, for which the fit has no time."""
    cost = migration(start, end)
    assert cost.seconds == pytest.approx(seconds, rel=0.10)
    assert cost.stall_seconds == 0


def test_cruise_s_published_plan_has_the_published_steps() -> None:
    """(18, 14) to (22, 10): 4 switches; 18 moves of 36 of 200 blocks of data; 12 moves of 36 of 128 blocks of the model."""
    steps = [s.split() for s in migration((18, 14), (22, 10)).steps]
    assert sum(s[0] == "switch" for s in steps) == 4
    moves = {kind: [int(s[1]) for s in steps if s[0] == "move" and s[2] == kind] for kind in ("data", "model")}
    assert 18 <= len(moves["data"]) <= 20
    assert sum(moves["data"]) in (36, 37)
    assert len(moves["model"]) == 12
    assert sum(moves["model"]) in (36, 37, 38)  # two of 14 servers hold one block more than the others


@pytest.mark.parametrize("name", TABLE_V)
def test_relocation_on_demand_costs_what_table_v_says(name: str) -> None:
    """Means over settings at random, as a tuner's first ones are; 2 constants fitted to 4 values."""
    system, rng = played(name, loaded(name)[1].start, learns=False), np.random.default_rng(0)
    system.perform(Run(seconds=20))
    costs = []
    while len(costs) < 25:
        setting = system.job.space.setting(system.job.space.sample(rng))
        costs.append(system.perform(Reconfigure(setting, method="relocate")))
        system.perform(Run(seconds=3))
    assert np.mean([c.seconds for c in costs]) == pytest.approx(TABLE_V[name][2], rel=0.15)
    assert {c.stall_seconds for c in costs} == {0.0}
