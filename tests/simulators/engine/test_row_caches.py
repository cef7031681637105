"""Copies of popular rows at the workers: what is used, for how long, and what is pulled."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from simulators.branch import stacked
from simulators.engine import loop
from simulators.engine.embedding import popularity
from simulators.jobs import drawn
from tests.simulators.engine.test_embedding import BLOCKS, ROW_BYTES, ROWS, START, gradient, made, minibatches, workload
from tests.support.marks import slow
from tests.support.small_jobs import assert_same_bytes, branch, together
from tuners.actions import Reconfigure, Rejected, Run
from tuners.settings import Choice, Integer

FREE = (Integer("cache_rows", 0, 40), Integer("cache_clocks", 0, 10), Choice("policy", ("asp", "bsp")))


def job(rows=30, clocks=2, **changed):
    return made(replace(START, cache_rows=rows, cache_clocks=clocks), knobs=FREE, **changed)


def test_popularity_counts_the_rows_that_are_looked_up_more_often():
    assert popularity(np.array([[3, 1], [3, 2], [3, 2]], np.int32), 4).tolist() == [[0, 2], [0, 1], [0, 1]]


def by_hand(pushes, rows, clocks):
    """The versions of the parameters, in float64, and the rows that each push has pulled."""
    data, first = drawn(workload(), 3)
    keys, clicked, _, ranks = (np.asarray(c) for c in data.train)
    versions, numbers, pulled = [{k: np.asarray(v, np.float64) for k, v in first.items()}], minibatches(3), []
    copies = [{} for _ in range(3)]
    for worker, clock, staleness in zip(pushes.worker, pushes.clock, pushes.staleness, strict=True):
        at, then, now = numbers(worker, clock), versions[-1 - staleness], versions[-1]
        used, asked, mine = {"rows": then["rows"].copy(), "bias": then["bias"]}, set(), copies[worker]
        fresh = {key for key, (_, since) in mine.items() if clock - since <= clocks}
        for part in (at[at >= at[0]], at[at < at[0]]):
            asked |= {(key, part[0]) for key in keys[part].ravel() if key not in fresh}
        for key, rank in zip(keys[at].ravel(), ranks[at].ravel(), strict=True):
            if key in fresh:
                used["rows"][key] = mine[key][0]
            elif rank < rows:
                mine[key] = (then["rows"][key], clock)
        found = gradient(used, keys[at], clicked[at])
        versions.append({k: now[k] - 0.5 * found[k] for k in now})
        pulled.append(len(asked))
    return versions, pulled


@pytest.mark.parametrize(("rows", "clocks"), [slow(30, 2), (5, 4), (40, 1)])
def test_gradients_use_copies_for_as_long_as_they_may(rows, clocks):
    simulated = job(rows, clocks)
    window = simulated.perform(Run(clocks=40))
    versions, pulled = by_hand(window.pushes, rows, clocks)
    for name, value in versions[-1].items():
        np.testing.assert_allclose(np.asarray(branch(simulated).learned.parameters[name]), value, rtol=5e-4, atol=5e-6)
    assert sum(s.pull_bytes for s in window.servers) == pytest.approx(ROW_BYTES * sum(pulled))
    assert sum(s.push_bytes for s in window.servers) == pytest.approx(ROW_BYTES * sum(window.blocks))
    assert sum(pulled) < 0.9 * sum(window.blocks)


@pytest.mark.parametrize(("rows", "clocks"), [(0, 5), slow(20, 0)])
def test_without_rows_or_clocks_nothing_is_kept(rows, clocks):
    plain, kept = made().perform(Run(clocks=20)), job(rows, clocks).perform(Run(clocks=20))
    assert_same_bytes(plain.pushes, kept.pushes)
    assert [s.pull_bytes for s in plain.servers] == [s.pull_bytes for s in kept.servers]


def test_copies_make_pulls_shorter_and_change_in_place():
    simulated = job(0, 0)
    before = simulated.perform(Run(clocks=30)).pushes.pull_seconds.mean()
    cost = simulated.perform(Reconfigure(replace(START, cache_rows=40, cache_clocks=10)))
    assert cost.seconds == 0.0
    simulated.perform(Run(clocks=6))
    assert simulated.perform(Run(clocks=30)).pushes.pull_seconds.mean() < 0.7 * before


def test_windows_change_nothing():
    whole, cut = job(), job()
    pushes = whole.perform(Run(clocks=24)).pushes
    assert_same_bytes(pushes, together([cut.perform(Run(clocks=1)) for _ in range(24)]))
    for a, b in zip(jax.tree.leaves(branch(whole)), jax.tree.leaves(branch(cut)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_lanes_are_the_same_as_runs_alone():
    """Two seeds at once under `vmap`, with copies of rows; one lane is done before the other."""
    branches = [job(20, 3, seed=seed).branches[0] for seed in (3, 4)]
    data, inputs, states = stacked(branches)
    limits = (np.int32(512), np.float64(20.0))
    together_, tables, used = loop.advance_lanes(branches[0].program, data, inputs, states, *limits, rows=512, own_data=True)
    for lane, lone in enumerate(branches):
        state, table, count = loop.advance(lone.program, lone.context.data, lone.inputs, lone.state, *limits, rows=512)
        assert int(used[lane]) == int(count) > 10
        np.testing.assert_allclose(tables[lane][:count], table[:count], rtol=1e-5, atol=1e-6)
        mine = jax.tree.map(lambda leaf, lane=lane: leaf[lane], together_.learned)
        np.testing.assert_array_equal(mine.touched.pushed, state.learned.touched.pushed)
        np.testing.assert_array_equal(mine.touched.pulled, state.learned.touched.pulled)
        np.testing.assert_allclose(mine.parameters["rows"], state.learned.parameters["rows"], rtol=1e-3, atol=1e-5)


def test_a_restart_loses_the_copies():
    """The mini-batches after it pull all their rows."""
    simulated = job(40, 10)
    simulated.perform(Run(clocks=20))
    moved = replace(simulated.job.start, block_owners=("e",) * BLOCKS)
    free = made(moved, knobs=(*FREE, *(Choice(f"block/{i}", ("d", "e")) for i in range(BLOCKS))))
    free.perform(Run(clocks=20))
    free.perform(Reconfigure(replace(moved, block_owners=("d",) * BLOCKS), method="checkpoint"))
    window = free.perform(Run(clocks=3))
    assert sorted(window.pushes.worker.tolist()) == [0, 1, 2]
    assert sum(s.pull_bytes for s in window.servers) == pytest.approx(ROW_BYTES * sum(window.blocks))


def test_rows_and_clocks_that_make_no_sense_are_refused():
    with pytest.raises(Rejected, match="Cannot set cache_rows to -1: it must be at least 0"):
        job().perform(Reconfigure(replace(START, cache_rows=-1)))
    with pytest.raises(Rejected, match="this scenario holds it at 0"):
        made().perform(Reconfigure(replace(START, cache_rows=4)))
    assert ROWS > 40
