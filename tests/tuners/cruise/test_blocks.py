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
from tuners.settings import Choice, Integer

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


def first_move(**policy):
    """What the tuner asks for in the job of `tables` under that policy."""
    plain = tables()
    start = replace(plain.start, **policy)
    of = replace(plain, start=start, space=replace(plain.space, base=start))
    tuner = cruise(of, blocks=True, batches=8, warmup=0)
    next(tuner)
    return tuner.send(seen(of, (9_000, 9_000, 500, 100, 100, 100)))


def test_ssp_with_staleness_0_is_predicted_as_bsp():
    under_bsp, under_ssp, alone = (first_move(**p) for p in ({"policy": "bsp"}, {"policy": "ssp"}, {"policy": "asp"}))
    assert under_ssp.reason == under_bsp.reason != alone.reason


def test_balanced_servers_are_left_alone():
    of = tables()
    tuner = cruise(of, blocks=True, batches=8, warmup=0)
    next(tuner)
    assert isinstance(tuner.send(seen(of, (100,) * 6)), Run)


def with_copies(push_part):
    """A job whose blocks may have copies, and a window of it in which a pushed row is `push_part` of a pulled one."""
    of = tables()
    knobs = (*of.space.knobs, Integer("replicas", 1, 2), Integer("hot_blocks", 0, 6))
    of = replace(of, space=replace(of.space, knobs=knobs), hottest=(1, 0, 2, 3, 4, 5))

    def seen_under(setting, rows, servers):
        made = window(replace(of, start=setting), np.ones(8 * len(setting.workers)), compute=0.01)
        told = []
        for server in servers:
            sent = passed = got = 0.0
            for count, chain in zip(rows, setting.holders(6, of.hottest), strict=True):
                if server in chain:
                    sent, got = sent + count / len(chain), got + count
                    passed += count if server != chain[-1] else 0.0
            out, into = 10.0 * (sent + push_part * passed), 10.0 * push_part * got
            told.append(ServerWindow(server, out, 1e-4 * out, into, 1e-4 * into))
        return replace(made, servers=tuple(told), blocks=tuple(map(float, rows)), setting=setting)

    return of, seen_under


ROWS = (9_000, 9_000, 500, 100, 100, 100)


def test_copies_are_asked_for_where_pushes_are_small():
    """One block has nearly all rows, so that no move helps. `hottest` has it in the second place: two blocks are hot."""
    for push_part in (0.05, 1.0):
        of, seen_under = with_copies(push_part)
        tuner = cruise(of, blocks=True, batches=8, warmup=0)
        next(tuner)
        owned = replace(of.start, block_owners=(of.start.servers[0],) * 6)
        asked = tuner.send(seen_under(owned, (20_000, 500, 100, 10, 10, 10), of.start.servers))
        if push_part == 1.0:
            assert isinstance(asked, Run)
            continue
        assert isinstance(asked, Reconfigure)
        assert (asked.setting.replicas, asked.setting.hot_blocks) == (2, 2)
        assert "2 are held by 2 servers" in asked.reason
        of.space.check(asked.setting)


def test_what_is_measured_with_copies_is_what_was_without():
    of, seen_under = with_copies(0.25)
    plain = measured(of, of.start, seen_under(of.start, ROWS, of.start.servers))
    both = replace(of.start, replicas=2, hot_blocks=3)
    copied = measured(of, both, seen_under(both, ROWS, of.start.servers))
    assert plain.pull_part == pytest.approx(0.8)
    assert plain.passed_on_part == pytest.approx(0.2)
    assert copied.row_seconds == pytest.approx(plain.row_seconds)
    assert (copied.pull_part, copied.passed_on_part) == pytest.approx((plain.pull_part, plain.passed_on_part))
    busy = plain.chained_seconds(both.holders(6, of.hottest))
    clocks = 8 * len(of.start.workers)
    for server in seen_under(both, ROWS, of.start.servers).servers:
        assert busy[server.node] == pytest.approx((server.pull_seconds + server.push_seconds) / clocks)
    owners = of.start.owners(6)
    assert plain.chained_seconds([(o,) for o in owners]) == plain.busy_seconds(owners)


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


@pytest.mark.slow
def test_in_the_arena_placement_decides():
    """Simulated seconds to the target; the README of the baselines has more seeds."""
    assert seconds("cruise[blocks=true]") < 0.6 * seconds("fixed")
    assert seconds("cruise[blocks=true]") < 0.8 * seconds("dlrover_hot")
    assert seconds("dlrover_hot") < 0.9 * seconds("fixed")
