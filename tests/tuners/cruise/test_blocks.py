"""Cruise on blocks of embedding tables: the balance, the prediction, and what it is worth in the arena `hot-keys`."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import harness
from tests.support.toy import job, window
from tuners.actions import Reconfigure, Run, ServerWindow
from tuners.cruise import cruise
from tuners.cruise.blocks import BlockLoads, balanced, cycle_seconds, measured
from tuners.settings import Choice

SPEEDS = {"s": 0.001, "t": 0.001, "u": 0.001}
LOADS = BlockLoads((40.0, 30.0, 5.0, 20.0, 1.0, 1.0), SPEEDS, (0.05,) * 4, (0.01,) * 4)
OWNERS = ("s", "s", "s", "s", "t", "u")


def test_blocks_leave_the_busiest_server_until_no_move_helps():
    placed = balanced(LOADS, OWNERS)
    assert LOADS.busy_seconds(OWNERS) == pytest.approx({"s": 0.095, "t": 0.001, "u": 0.001})
    # 97 rows: no placement of these blocks is better than one server with the hottest of them alone.
    assert max(LOADS.busy_seconds(placed).values()) == pytest.approx(0.040, abs=0.001)


def test_a_slow_server_gets_less():
    loads = LOADS._replace(row_seconds={"s": 0.001, "t": 0.004, "u": 0.001})
    busy = loads.busy_seconds(balanced(loads, OWNERS))
    assert max(busy.values()) <= 0.056
    assert balanced(loads, balanced(loads, OWNERS)) == balanced(loads, OWNERS)


def test_the_prediction_is_the_busiest_servers_time_where_it_is_the_limit():
    """Four workers that compute for 50 ms: a server that each keeps busy for 95 ms sets the pace."""
    assert cycle_seconds(LOADS, OWNERS, waits=False) == pytest.approx(0.095, rel=0.01)
    assert cycle_seconds(LOADS, OWNERS, waits=True) == pytest.approx((0.05 + 4 * 0.095) / 4)


def tables(blocks=6):
    plain = job()
    servers = plain.start.servers[:2]
    start = replace(plain.start, servers=servers, policy="asp")
    knobs = tuple(Choice(f"block/{i}", servers) for i in range(blocks))
    space = replace(plain.space, base=start, knobs=knobs, blocks=blocks)
    return replace(plain, start=start, space=space, blocks=blocks)


def seen(of, rows):
    """A window in which block i was asked for `rows[i]` rows, and a server takes a millisecond for each."""
    made = window(of, np.ones(8 * len(of.start.workers)), compute=0.01)
    owners = of.start.owners(of.blocks)
    held = {s: sum(r for r, o in zip(rows, owners, strict=True) if o == s) for s in of.start.servers}
    servers = tuple(ServerWindow(s, 10.0 * n, 0.0004 * n, 10.0 * n, 0.0006 * n) for s, n in held.items())
    return replace(made, servers=servers, blocks=tuple(map(float, rows)), setting=of.start)


def test_it_measures_moves_and_measures_anew():
    of = tables()
    tuner = cruise(of, blocks=True, batches=8, warmup=2)
    assert next(tuner) == Run(clocks=2 * len(of.start.workers))
    tuner.send(seen(of, (1,) * 6))
    asked = tuner.send(seen(of, (9_000, 9_000, 500, 100, 100, 100)))
    assert isinstance(asked, Reconfigure)
    assert asked.setting.block_owners.count(of.start.servers[0]) in (2, 3, 4, 5)
    moved = [i for i, (a, b) in enumerate(zip(of.start.owners(6), asked.setting.block_owners, strict=True)) if a != b]
    assert len(moved) <= 2
    assert moved[0] in (0, 1)


def test_balanced_servers_are_left_alone():
    of = tables()
    tuner = cruise(of, blocks=True, batches=8, warmup=0)
    next(tuner)
    assert isinstance(tuner.send(seen(of, (100,) * 6)), Run)


def test_a_window_without_blocks_or_servers_says_nothing():
    of = tables()
    full = seen(of, (100,) * 6)
    assert measured(of, of.start, full).rows == pytest.approx([100 / full.clocks] * 6)
    assert measured(of, of.start, replace(full, servers=())) is None
    assert measured(of, of.start, replace(full, blocks=())) is None


def test_without_free_blocks_it_has_nothing_to_tune():
    assert list(cruise(job(), blocks=True)) == []
    assert cruise.nothing_to_tune(job(), blocks=True) == "No blocks of embedding tables are free here."
    assert cruise.nothing_to_tune(tables(), blocks=True) == ""


@cache
def seconds(tuner, seed=0):
    score = harness.play("hot-keys", tuner, seed=seed).score
    assert score.status == "target"
    return score.completion_seconds


def test_in_the_arena_placement_decides():
    """Simulated seconds to the target; the README of the baselines has more seeds."""
    assert seconds("cruise[blocks=true]") < 0.6 * seconds("fixed")
    assert seconds("cruise[blocks=true]") < 0.8 * seconds("dlrover_hot")
    assert seconds("dlrover_hot") < 0.9 * seconds("fixed")
