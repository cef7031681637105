"""Targets by share: every worker does its data share of the work, and nobody does another's (Cruise, Eq. 1)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness import scenario
from simulators.cluster.conditions import Conditions, NodeChange
from tests.support.marks import slow
from tests.support.small_jobs import CHEAP, KNOBS, SMALL, assert_same_bytes, cluster, job, start, system, together
from tests.support.toy import job as toy_job
from tests.support.toy import window
from tuners.actions import Install, Reconfigure, Rejected, Run, Target, WorkerWindow
from tuners.policies import asp, bsp, dssp, k_async, k_batch_sync, ssp
from tuners.search.progress_rate import progress_per_second

WHOLE = Run(clocks=10**6)
CLOCKS = Target("clocks", 60, by_share=True)


def by_share(setting=None, conditions=None, seed=0, **changed):
    """A timing-only job on five different nodes."""
    rules = {"knobs": KNOBS, "costs": CHEAP, "target": CLOCKS} | changed
    return system(cluster(), job(SMALL), setting or start(), conditions or Conditions(jitter=0.2), seed, **rules)


def left(simulated):
    return np.asarray(simulated.branches[0].state.clock.left)


# ---------------------------------------------------------------------------------------------------------- who does what


@pytest.mark.parametrize(
    "policy", [asp(), bsp(), ssp(1), slow(dssp(1, 4)), slow(k_async(2)), k_batch_sync(2)], ids=lambda p: p.name
)
def test_every_worker_does_its_share_and_no_more(policy):
    simulated = by_share(start(data_shares=(0.5, 0.3, 0.2)))
    simulated.perform(Install(policy))
    done = simulated.perform(WHOLE)
    assert done.status == "target"
    assert [w.pushes for w in done.workers] == [30, 18, 12]


def test_samples_are_divided_as_clocks_are():
    """Mini-batches of 8: 30 samples take four of them."""
    target = Target("samples", 150, by_share=True)
    done = by_share(start(data_shares=(0.6, 0.2, 0.2), batch_size=8), target=target).perform(WHOLE)
    assert [w.pushes for w in done.workers] == [12, 4, 4]


def test_the_slowest_worker_ends_the_job():
    """Even shares on unlike machines: without shares, the fast ones take over what is left."""
    even, free = by_share(), by_share(target=replace(CLOCKS, by_share=False))
    slow = even.perform(WHOLE)
    assert int(slow.pushes.worker[-1]) == 0  # the slowest of the three
    assert slow.end_seconds > free.perform(WHOLE).end_seconds


def test_partition_pays_on_cruises_mixed_cluster():
    """Fig. 8: 162 s an epoch with even shares at the start; with the chosen roles, shares in proportion to speed 105 s."""
    found = scenario.load("cruise-nmf-mixed")
    begin = scenario.job(found).start
    names = [n for n, _ in found.cluster.nodes]
    chosen = replace(begin, workers=(*names[:20], *names[28:]), servers=tuple(names[20:28]))
    in_proportion = replace(chosen, data_shares=(1 / 28,) * 20 + (2 / 28,) * 4)
    seconds = [scenario.system(found, 0, s).perform(WHOLE).end_seconds / 10 for s in (begin, chosen, in_proportion)]
    assert seconds[0] == pytest.approx(162, rel=0.05)
    assert seconds[2] == pytest.approx(105, rel=0.05)
    assert seconds[1] > 1.1 * seconds[2]


def test_windows_do_not_matter():
    whole = by_share().perform(WHOLE)
    simulated, windows = by_share(), []
    while simulated.status == "running":
        windows.append(simulated.perform(Run(clocks=7)))
    assert_same_bytes(whole.pushes, together(windows))


def test_other_targets_keep_no_account():
    assert not len(left(by_share(target=Target("clocks", 60))))


# ---------------------------------------------------------------------------------------------------- work moves with data


@pytest.mark.parametrize("method", [slow("migrate"), "checkpoint", "relocate"])
def test_work_is_neither_lost_nor_done_twice_in_reconfigurations(method):
    """What is done and what is left have the same sum at every moment, whatever moves."""
    simulated, rng = by_share(target=replace(CLOCKS, value=3000)), np.random.default_rng(1)
    moved = 0
    for _ in range(40):
        simulated.perform(Run(clocks=int(rng.integers(5, 40))))
        space = simulated.job.space
        setting = space.setting(space.sample(rng))
        share = rng.dirichlet(np.ones(len(setting.workers)))
        try:
            simulated.perform(Reconfigure(replace(setting, data_shares=tuple(share / share.sum())), method=method))
            moved += 1
        except Rejected:
            pass
        clock = simulated.branches[0].state.clock
        assert left(simulated).sum() + int(clock.pushes) == pytest.approx(3000)
    assert moved > 10
    assert simulated.perform(WHOLE).status == "target"


@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("method", ["migrate", "checkpoint"])
def test_a_worker_that_had_done_its_part_continues_when_data_comes_to_it(policy, method):
    simulated = by_share(start(data_shares=(0.8, 0.1, 0.1), policy=policy))
    simulated.perform(Run(clocks=25))
    assert (left(simulated)[1:3] <= 0).all()
    simulated.perform(Reconfigure(replace(start(policy=policy), data_shares=(0.2, 0.4, 0.4)), method=method))
    done = simulated.perform(WHOLE)
    assert done.status == "target"
    assert all(w.pushes > 0 for w in done.workers)


def test_work_of_a_lost_worker_goes_to_the_others():
    """Those that have done their own part wait meanwhile, which is no deadlock."""
    events = (NodeChange(("a",), 20.0, "fails"),)
    done = by_share(start(data_shares=(0.9, 0.05, 0.05)), Conditions(nodes=events)).perform(WHOLE)
    assert done.status == "target"
    assert {w.node for w in done.workers} == {"b", "c"}
    assert sum(w.pushes for w in done.workers) > 30


def test_work_on_its_way_is_no_deadlock():
    """Node a stops and gives its data to d; b and c have nothing to do until it is there."""
    simulated = by_share(start(data_shares=(0.9, 0.05, 0.05)), target=replace(CLOCKS, value=200))
    simulated.perform(Run(clocks=30))
    other = replace(start(), workers=("b", "c", "d"), servers=("a", "e"), data_shares=(0.05, 0.05, 0.9))
    assert simulated.perform(Reconfigure(other, method="migrate")).done
    assert simulated.perform(WHOLE).status == "target"


# ------------------------------------------------------------------------------------------------------- who cannot, and why


def test_only_work_can_be_divided():
    text = scenario.load("digits").text
    divided = text.replace("[target]\n", "[target]\nby_share = true\n")
    assert divided != text
    with pytest.raises(ValueError, match=r"\[target\] by_share: .*count clocks or samples"):
        scenario.parse(divided, name="digits", origin=Path("digits.toml"))
    with pytest.raises(ValueError, match="Cannot tell from totals"):
        CLOCKS.reached(0.1, 0.9, clocks=100)


def test_trials_are_scored_by_the_worker_that_takes_longest():
    """Half as much data for the slow one: the pace is that of the worker with the longest way, not the sum of both."""
    of = toy_job("every knob")
    setting = replace(of.start, workers=("n0", "n1"), servers=("n2",), data_shares=(0.75, 0.25))
    workers = tuple(WorkerWindow(n, p, 4 * p, 8.0, 1.0, 1.0, 0.0, ()) for n, p in (("n0", 10), ("n1", 5)))
    seen = replace(window(of, [1.0] * 15), workers=workers, setting=setting)
    assert progress_per_second(seen, replace(CLOCKS)) == pytest.approx(1.0 / 0.75)
    assert progress_per_second(seen, Target("samples", 60, by_share=True)) == pytest.approx(4.0 / 0.75)
