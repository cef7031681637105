"""The closed form and the engine: what each part of the model does to a cycle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulators.calibration import closed_form, simulations
from simulators.calibration.fit import Constants, closed_form_cycles, fit
from simulators.calibration.model import plant
from simulators.calibration.recorded.recordings import Recording, with_snapshots
from simulators.calibration.simulations import simulated
from simulators.engine import timing
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.reconfiguration import Load, plan_of
from tests.simulators.calibration.made_up import TRUE, row, told_by_formula
from tuners.actions import Run, Setting

pytestmark = pytest.mark.usefixtures("short")


@pytest.mark.slow
def test_the_closed_form_is_close_to_the_engine():
    rows = [row(3, 2), row(9, 1), row(6, 4, 32, 4), row(4, 2, policy="bsp")]
    constants = replace(TRUE, model_bytes=2e7)
    closed = closed_form.spans([plant(constants, r) for r in rows], [r.barrier for r in rows])
    engine = [simulated(constants, r).spans for r in rows]
    assert closed.cycle == pytest.approx([e.cycle for e in engine], rel=0.04)
    assert closed.compute == pytest.approx([e.compute for e in engine], rel=0.03)


def test_what_is_beside_computing_is_the_part_of_a_cycle_that_does_not_grow_with_it():
    """A lone worker's is what it does not compute; of workers that queue, a longer computation hides in the queue."""
    rows = [row(1, 1), row(9, 1)]
    silent = replace(TRUE, message_seconds=0.0, latency_seconds=0.0)  # the time of messages counts as computing in spans
    made = [plant(silent, r) for r in rows]
    alone, queued = closed_form.beside_computing(made, [False, False])
    compute, _, _, cycle = (float(part[0]) for part in closed_form.spans(made, [False, False]))
    assert alone == pytest.approx(1 - compute / cycle, rel=0.01)
    assert queued > alone
    bare = replace(silent, model_bytes=0.0, apply_seconds=0.0, commit_seconds=0.0)
    assert closed_form.beside_computing([plant(bare, rows[0])], [False]) == pytest.approx([0.05])  # never less


@pytest.mark.slow
def test_snapshots_slow_a_cycle_by_their_own_transfer_or_not_at_all():
    """A lone worker waits for a model more per snapshot: by the distance of those in the pushes of a row, whatever the
    distance in the recording."""
    given = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, jitter=0.0)
    often = row(1, 1, snapshot_clocks=20, cycle_snapshot_clocks=10)
    assert simulated(given, often).spans.cycle == pytest.approx(2.0 + 1 / 10, rel=1e-3)
    assert simulated(given, replace(often, cycle_snapshot_clocks=0)).spans.cycle == pytest.approx(2.0, rel=1e-3)
    assert simulated(replace(given, snapshots=False), often).spans.cycle == pytest.approx(2.0, rel=1e-3)
    seconds, _ = simulations.simulated_seconds(given, often, 100)  # the fifth begins with the last push
    assert seconds == pytest.approx(2.0 * 99 + 4)


@pytest.mark.parametrize(
    ("pushes", "every", "workers", "apart"),
    [
        (2000, 2500, 1, 20),
        (12, 13, 1, 0),  # the first is taken after 20
        (21, 26, 2, 21),
        (42, 52, 4, 21),  # after 20 and 40
        (48, 60, 1, 24),  # after 20 and 40: the one after the last push is in no cycle
        (240, 300, 6, 24),  # four pushes of each worker
        (2000, 0, 1, 20),  # of no segment
    ],
)
def test_short_rows_have_the_snapshots_that_fall_into_them(pushes, every, workers, apart):
    made = replace(row(workers, 1), pushes=pushes, all_pushes=every)
    (found,) = with_snapshots(Recording((made,), None, (), (), (), ()), 20).rows
    assert (found.snapshot_clocks, found.cycle_snapshot_clocks) == (max(20, 4 * workers), apart)
    (none,) = with_snapshots(Recording((found,), None, (), (), (), ()), 0).rows
    assert none.identity == made.identity  # times that were not recorded are nan


@pytest.mark.slow
def test_seeds_side_by_side_are_what_each_is_alone():
    """Also where a link is delayed from the beginning, which the control plane puts in force."""
    delayed = row(4, 2, delays=(0.3, 0.0, 0.0, 0.0, 0.1))
    for one in (row(3, 2), row(4, 1, policy="bsp"), delayed):
        each = [simulations.system_of(TRUE, one, seed).perform(Run(clocks=50)).pushes for seed in (0, 1, 2, 3)]
        alone = np.array([(p.seconds, p.compute_seconds, p.pull_seconds, p.push_seconds) for p in each])
        assert simulations.pushes_of(TRUE, one, range(4), 50) == pytest.approx(alone.swapaxes(1, 2), rel=1e-12)


def test_with_uneven_shares_some_push_while_others_pull():
    """Four workers at a barrier, and only transfers: fair shares end together, and a step takes eight transfers."""
    alone = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, jitter=0.0)
    fair, uneven = (
        simulated(replace(alone, discipline=d), row(4, 1, policy="bsp")).spans.cycle for d in ("maxmin", "uneven")
    )
    assert fair == pytest.approx(8.0, rel=0.01)
    assert 5.5 < uneven < 7.0  # five, if transfers were served one by one


def test_uneven_pushes_share_a_server_as_their_senders_send():
    """The queue of the server's link has twice as much of a worker whose own link is twice as fast."""
    given = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, jitter=0.0, discipline="uneven")
    inputs = simulations.system_of(given, row(2, 1, nics=(2.0, 1.0, 1.5)), 0).branches[0].inputs
    waiting = timing.all_waiting(len(inputs.nic), np.zeros(len(inputs.nic)), uneven=True)
    pushing = np.arange(len(inputs.nic)) < 2
    flight = waiting._replace(phase=np.where(pushing, timing.PUSH, timing.WAIT), remaining=np.where(pushing, 1e6, 0.0))
    found = timing.to_next_push(inputs, np.float64(0), flight, np.float64(np.inf), discipline="uneven", overlapping=False)
    seconds, _, worker, pushed = found
    assert (float(seconds), int(worker), bool(pushed)) == (pytest.approx(1.0), 0, True)  # 1 of the 1.5 MB/s


def test_servers_and_a_master_end_synchronous_steps_only():
    """Two servers take half of the time each, and the master that of four mini-batches of 16."""
    slow = replace(TRUE, jitter=0.0, apply_seconds=0.0, step_seconds=0.5, master_sample_seconds=0.01)
    fast = replace(slow, step_seconds=0.0, master_sample_seconds=0.0)
    each = [(simulated(c, row(4, 2, policy=p)).spans.cycle) for p in ("bsp", "asp") for c in (slow, fast)]
    assert each[0] - each[1] == pytest.approx(0.5 / 2 + 0.01 * 4 * 16)
    assert each[2] == pytest.approx(each[3])


def test_the_apply_exponent_is_for_uneven_shares_of_servers():
    assert float(plant(replace(TRUE, apply_exponent=0.5), row(2, 4)).costs.apply_seconds) == pytest.approx(0.04 / 2)
    assert float(plant(TRUE, row(2, 4)).costs.apply_seconds) == pytest.approx(0.04 / 4)


def test_the_server_with_most_of_the_model_decides():
    """Of two servers, one has three quarters: pulls and pushes through its link, and its updates, take that long."""
    given = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, apply_seconds=0.4, jitter=0.0)
    uneven, even = row(1, 2, nics=(9.0, 1.0, 1.0), model_shares=(0.25, 0.75)), row(1, 2, nics=(9.0, 1.0, 1.0))
    assert (uneven.largest_share, even.largest_share) == (0.75, 0.5)
    assert [simulated(given, r).spans.cycle for r in (uneven, even)] == pytest.approx([1.5 + 0.3, 1.0 + 0.2], rel=1e-3)
    assert closed_form_cycles(given, [uneven]) == pytest.approx([1.8], rel=1e-3)


def test_shares_of_servers_explain_what_looks_like_noise():
    """Six servers of which one has 0.4 of the model are slower than four equal ones."""
    shares = {1: (), 2: (0.7, 0.3), 4: (), 6: (0.4, 0.2, 0.1, 0.1, 0.1, 0.1)}
    rows = [row(w, s, policy="bsp", model_shares=shares[s]) for w in (1, 3, 6, 9) for s in shares]
    true = replace(TRUE, message_seconds=0.0, step_seconds=0.5)
    told = told_by_formula(rows, true)
    given = Constants(cores=8, model_bytes=1.0, jitter=0.1)
    with_shares, without = (fit(r, given, engine=False) for r in (told, [replace(x, model_shares=()) for x in told]))
    assert 5 * with_shares.error < 0.03 < without.error


def test_a_coordinator_hears_from_every_server_of_every_push():
    """Pushes queue there: six workers, each with nothing else to do, push one after the other."""
    given = Constants(cores=1, jitter=0.0, fixed_seconds=1e-3, commit_seconds=0.1)
    assert float(plant(replace(TRUE, commit_seconds=0.1), row(2, 4)).costs.apply_seconds) == pytest.approx(0.04 / 4 + 0.4)
    assert [simulated(given, row(6, s)).spans.cycle for s in (1, 3)] == pytest.approx([0.6, 1.8])


def test_a_change_of_policy_takes_a_restart_where_costs_say_so():
    before = Setting(workers=("a",), servers=("b",), policy="bsp")
    after = replace(before, policy="asp")
    load = Load(100.0, 1, 1.0)
    assert plan_of(before, after, "migrate", load, Costs()).steps == ()
    made = plan_of(before, after, "migrate", load, Costs(policy_restart_seconds=90.0))
    assert made.quiescent
    assert [(s.kind, s.seconds) for s in made.steps] == [("restart", 90.0)]
    assert plan_of(before, before, "migrate", load, Costs(policy_restart_seconds=90.0)).steps == ()
