"""Reconfigurations at odd moments: of branches that have not trained for a while or have ended, and while nodes are lost."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from simulators.cluster.conditions import Conditions, Episode, NodeChange
from tests.simulators.reconfiguration.test_reconfiguration import METHODS, counting, replace_costs, timed
from tests.simulators.test_simulated_system import counted
from tests.support.small_jobs import KNOBS, NAMES, branch, start
from tuners.actions import Decision, Fork, Free, Install, Reconfigure, Rejected, Run, SyncPolicy, Target
from tuners.policies import bsp
from tuners.settings import Real


def losing(node, seconds):
    return Conditions(jitter=0.0, nodes=(NodeChange((node,), seconds, "fails"),))


@pytest.mark.parametrize(
    "action", [Install(bsp(), branch=1), Reconfigure(start(learning_rate=0.5, workers=("a",)), branch=1)]
)
def test_a_branch_that_lost_a_node_while_it_did_not_train_must_run_before_it_changes(action):
    simulated = counting(losing("b", 40.0))
    simulated.perform(Run(seconds=10.0))
    assert simulated.perform(Fork(0)) == 1
    simulated.perform(Run(seconds=60.0))
    before = simulated.now, branch(simulated, 1)
    with pytest.raises(Rejected, match="it has lost b"):
        simulated.perform(action)
    assert before == (simulated.now, branch(simulated, 1))
    assert simulated.perform(Run(clocks=5)).clocks == 5  # nothing has begun that another branch would wait for
    seen = simulated.perform(Run(seconds=20.0, branch=1))
    assert [c.steps for c in seen.changes] == [("detect",)]
    assert seen.setting.workers == ("a", "c")
    simulated.perform(action)
    simulated.perform(Run(seconds=20.0, branch=1))
    assert counted(simulated, 1) == int(branch(simulated, 1).clock.pushes)


@pytest.mark.parametrize("setting", [None, start(learning_rate=0.5, workers=("a", "b"), servers=("d", "e"))])
@pytest.mark.parametrize("lost", ["d", "b"])
def test_a_node_that_is_lost_while_a_branch_is_copied_is_lost_to_both(setting, lost):
    """Copying 100 bytes takes half a second here."""
    simulated = counting(losing(lost, 10.25))
    simulated.perform(Run(seconds=10.0))
    child = simulated.perform(Fork(0, setting=setting))
    # The branch with a recovery in progress must run first.
    for number in (child, 0):
        seen = simulated.perform(Run(seconds=60.0, branch=number))
        assert seen.clocks > 4
        assert lost not in (*seen.setting.workers, *seen.setting.servers)
        assert counted(simulated, number) == int(branch(simulated, number).clock.pushes)


@pytest.mark.parametrize("wait", [True, False])
def test_a_branch_in_deadlock_cannot_be_reconfigured_and_delays_no_other(wait):
    simulated = timed()
    child = simulated.perform(Fork(0))
    nobody = SyncPolicy("nobody", lambda active: jnp.asarray(0), lambda state, push: (state, Decision(push.waiting & False)))
    simulated.perform(Install(nobody, branch=child))
    assert simulated.perform(Run(seconds=100.0, branch=child)).status == "deadlock"
    for action in (Reconfigure(start(servers=("e",)), branch=child, wait=wait), Install(bsp(), branch=child), Fork(child)):
        with pytest.raises(Rejected, match="deadlock"):
            simulated.perform(action)
    simulated.perform(Free(child))
    assert simulated.perform(Run(clocks=5)).clocks == 5


@pytest.mark.parametrize("method", METHODS)
def test_no_worker_begins_before_the_reconfiguration_that_starts_it(method):
    """Also where all steps are free, and the last event lies before the request."""
    free = replace_costs(add_seconds=0.0, graph_seconds=0.0, start_seconds=0.0, restart_seconds=0.0, handshake_seconds=0.0)
    simulated = timed(setting=start(servers=("d",)), costs=free)
    simulated.perform(Run(seconds=20.0))
    assert float(branch(simulated).clock.seconds) < simulated.now
    simulated.perform(Reconfigure(start(workers=("a", "b", "c", "e"), servers=("d",)), method=method))
    pushes = simulated.perform(Run(seconds=60.0)).pushes
    (first, *_) = np.flatnonzero(pushes.worker == 4)
    spent = pushes.pull_seconds[first] + pushes.compute_seconds[first] + pushes.push_seconds[first]
    assert pushes.seconds[first] - spent >= 20.0 - 1e-9


def test_progress_before_a_pause_is_not_slowed_down_by_an_episode_after_it():
    """a has computed three quarters of its mini-batch when another branch trains, and the rest at half the speed."""
    slow = Conditions(jitter=0.0, stagger=False, episodes=(Episode("a", 20.0, 1000.0, 2.0),))
    quick = replace_costs(fork_bytes_per_second=1e12)
    simulated = timed(slow, start(workers=("a",)), costs=quick)
    simulated.perform(Run(clocks=2))
    plain = simulated.perform(Run(clocks=1)).pushes
    simulated.perform(Run(seconds=plain.pull_seconds[0] + 0.75 * plain.compute_seconds[0]))
    child = simulated.perform(Fork(0))
    simulated.perform(Run(seconds=60.0, branch=child))
    assert simulated.perform(Run(clocks=1)).pushes.compute_seconds[0] == pytest.approx(1.25 * plain.compute_seconds[0])


def test_windows_leave_out_only_the_stall_that_they_begin_with():
    """Training outside of a window, with pushes or without, is in the next window; so is a stall after it."""
    simulated = timed(costs=replace_costs(graph_seconds=0.125))
    simulated.perform(Run(clocks=10))
    asked = simulated.now
    assert simulated.perform(Reconfigure(start(intra_threads=1), method="relocate")).seconds == 0.125
    seen = simulated.perform(Run(seconds=0.125))
    assert (seen.start_seconds, seen.clocks) == (asked, 0)
    asked = simulated.now
    simulated.perform(Reconfigure(start(servers=("e",)), method="migrate"))
    stall = simulated.perform(Reconfigure(start(), method="checkpoint")).stall_seconds
    seen = simulated.perform(Run(seconds=20.0))
    assert seen.start_seconds == pytest.approx(asked)
    assert seen.start_seconds < seen.pushes.seconds[0] < simulated.now - 20.0 - stall
    asked = simulated.now
    stall = simulated.perform(Reconfigure(start(servers=("e",)), method="checkpoint")).stall_seconds
    assert simulated.perform(Run(seconds=20.0)).start_seconds == pytest.approx(asked + stall)


def test_small_shares_of_the_data_are_never_refused_half_way():
    """On the way from one setting to the other, b's part of the 64 samples lies between two whole ones."""
    shares = (0.015640042034608254, 0.011006090530211166, 0.019154395069740527, 0.95419947236544)
    later = (0.9669633981580021, 0.01565473342242315, 0.017381868419574727)
    knobs = (*KNOBS, *(Real(f"data_share/{n}", 0.0, 1.0) for n in NAMES))
    first = start(workers=("a", "b", "c", "d"), servers=("e",), learning_rate=0.5, data_shares=shares)
    simulated = counting(setting=first, knobs=knobs)
    simulated.perform(Run(seconds=5.0))
    new = replace(first, workers=("a", "c", "d"), data_shares=later)
    assert simulated.perform(Reconfigure(new, method="migrate")).done
    assert simulated.perform(Run(seconds=20.0)).setting == new


def test_workers_lost_one_after_the_other_are_both_dropped_while_the_others_continue():
    """The second is lost before the runtime has acted on the first. No change was requested, so nothing is rolled back."""
    lost = (NodeChange(("a",), 40.0, "fails"), NodeChange(("b",), 42.0, "fails"))
    simulated = timed(Conditions(jitter=0.0, nodes=lost))
    seen = simulated.perform(Run(seconds=90.0))
    (cost,) = seen.changes
    assert (cost.stall_seconds, cost.done, "roll back" in cost.steps) == (0.0, True, False)
    assert seen.setting == start(workers=("c",))
    assert np.sum(seen.pushes.seconds > 42.0) > 3


def test_a_reconfiguration_that_the_job_ends_during_is_not_done():
    simulated = timed(target=Target("clocks", 40))
    simulated.perform(Run(clocks=37))
    assert not simulated.perform(Reconfigure(start(servers=("e",)), method="migrate")).done
