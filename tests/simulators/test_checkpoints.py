"""Checkpoints: what they cost, what is lost without one, and that lost work is done again and counted once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.cluster.conditions import Conditions, NodeChange, RackLosses
from tests.simulators.reconfiguration.test_reconfiguration import COSTS, comings_and_goings, counting, timed
from tests.simulators.test_simulated_system import counted
from tests.support.marks import examples
from tests.support.small_jobs import assert_same_bytes, branch, start, together
from traces.schema import setting_from, setting_text
from tuners.actions import Cost, Fork, Reconfigure, Rejected, Run, Target
from tuners.settings import Real

PAUSE = 100.0 / COSTS.checkpoint_bytes_per_second  # of a checkpoint: the model has 100 bytes


def fails(node: str, seconds: float) -> Conditions:
    return Conditions(jitter=0.0, nodes=(NodeChange((node,), seconds, "fails"),))


def lost_clocks(costs: list[Cost]) -> int:
    said = [re.fullmatch(r"lose (\d+) clocks", step) for cost in costs for step in cost.steps]
    return sum(int(found[1]) for found in said if found)


def saving(seconds: float, **changed: object):
    return start(checkpoint_seconds=seconds, **changed)


# ------------------------------------------------------------------------------------------------------- what they cost


def test_training_pauses_while_a_checkpoint_is_written() -> None:
    """Every push is as late as the checkpoints before it have taken."""
    plain, saved = timed().perform(Run(seconds=60.0)), timed(setting=saving(20.0)).perform(Run(seconds=66.0))
    pauses = [c for c in saved.changes if c.steps == ("checkpoint",)]
    assert [(c.seconds, c.stall_seconds, c.bytes_moved, c.done) for c in pauses] == [(PAUSE, PAUSE, 100.0, True)] * 3
    n = plain.clocks
    begins = np.array([20.0, 40.0 + PAUSE, 60.0 + 2 * PAUSE])
    late = PAUSE * np.sum(saved.pushes.seconds[:n, None] > begins, axis=1)
    np.testing.assert_allclose(saved.pushes.seconds[:n], plain.pushes.seconds + late, rtol=1e-9)


def test_windows_do_not_matter() -> None:
    conditions = Conditions(nodes=(NodeChange(("e",), 75.0, "fails"), NodeChange(("e",), 90.0, "joins")))
    whole = counting(conditions, saving(20.0, learning_rate=0.5)).perform(Run(clocks=120))
    simulated, windows = counting(conditions, saving(20.0, learning_rate=0.5)), []
    while sum(w.clocks for w in windows) < 120:
        windows.append(simulated.perform(Run(clocks=min(7, 120 - sum(w.clocks for w in windows)))))
    assert_same_bytes(whole.pushes, together(windows))
    assert [c for w in windows for c in w.changes] == list(whole.changes)


# --------------------------------------------------------------------------------------------------------- what is lost


def test_without_a_replica_the_job_returns_to_its_last_checkpoint() -> None:
    simulated = counting(fails("e", 75.0), saving(30.0, learning_rate=0.5))
    before = simulated.perform(Run(seconds=74.0))
    kept = int(np.sum(before.pushes.seconds <= 60.0 + PAUSE))  # pushes before the second checkpoint
    seen = simulated.perform(Run(seconds=1.5))
    assert counted(simulated, 0) == kept
    rest = simulated.perform(Run(seconds=40.0))
    (recovery,) = [c for c in rest.changes if c.steps != ("checkpoint",)]
    lost = before.clocks + seen.clocks - kept
    assert recovery.steps == (f"lose {lost} clocks", "detect", "restore")
    # The whole model is read back, not only the part of the server that is lost.
    assert recovery.stall_seconds == COSTS.detection_seconds + 100.0 / COSTS.restore_bytes_per_second
    assert counted(simulated, 0) == before.clocks + seen.clocks + rest.clocks - lost


def test_before_the_first_checkpoint_everything_is_lost_and_with_replicas_nothing() -> None:
    for seconds, left in ((1000.0, 0), (0.0, None)):
        simulated = counting(fails("e", 40.0), saving(seconds, learning_rate=0.5))
        seen = simulated.perform(Run(seconds=41.0))
        assert counted(simulated, 0) == (seen.clocks if left is None else left)


def test_the_loss_of_a_worker_loses_no_work() -> None:
    simulated = counting(fails("b", 75.0), saving(30.0, learning_rate=0.5))
    seen = simulated.perform(Run(seconds=120.0))
    assert lost_clocks(list(seen.changes)) == 0
    assert counted(simulated, 0) == seen.clocks


def test_a_checkpoint_that_a_loss_interrupts_does_not_count() -> None:
    """The second one begins at 60 + PAUSE; the server is lost in its middle."""
    simulated = counting(fails("e", 60.0 + 1.5 * PAUSE), saving(30.0, learning_rate=0.5))
    seen = simulated.perform(Run(seconds=61.0 + 2 * PAUSE))
    assert counted(simulated, 0) == int(np.sum(seen.pushes.seconds <= 30.0))


def test_work_that_is_lost_is_done_again() -> None:
    """A target of 200 pushes needs as many more as were lost; the same by share and by samples."""
    for target in (Target("clocks", 200), Target("samples", 1600), Target("clocks", 200, by_share=True)):
        plain = timed(setting=saving(0.0), target=target).perform(Run(seconds=1e6))
        simulated = timed(fails("e", 75.0), saving(30.0), target=target)
        seen = simulated.perform(Run(seconds=1e6))
        assert (plain.status, seen.status) == ("target", "target")
        lost = lost_clocks(list(seen.changes))
        assert lost > 0
        assert seen.clocks - lost == pytest.approx(plain.clocks, abs=3)  # by share, a worker's last push may do less
        assert target.by_share or seen.clocks - lost == plain.clocks


@examples(8)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["checkpoint", "migrate", "relocate"]), st.sampled_from(["asp", "bsp"]))
def test_with_updates_of_one_the_model_is_the_number_of_pushes_that_are_not_lost(seed: int, method, policy: str) -> None:
    """Settings at random by every method, while nodes fail, leave and come back, and checkpoints are made."""
    rng = np.random.default_rng(seed)
    first = start(learning_rate=0.5, policy=policy, staleness=1, checkpoint_seconds=float(rng.uniform(5, 40)))
    simulated = counting(Conditions(nodes=comings_and_goings(rng)), first, seed=seed % 1000)
    told, costs = 0, []
    for _ in range(10):
        values = simulated.job.space.sample(rng) | {"policy": policy, "staleness": 1}
        try:
            wanted = replace(simulated.job.space.setting(values), checkpoint_seconds=first.checkpoint_seconds)
            waits = bool(rng.random() < 0.7)
            cost = simulated.perform(Reconfigure(wanted, method=method, wait=waits))
            costs += [cost] if waits else []
        except Rejected:
            pass
        try:
            seen = simulated.perform(Run(seconds=float(rng.uniform(1, 15))))
        except Rejected:
            break
        told, costs = told + seen.clocks, costs + list(seen.changes)
        if simulated._time.reconfiguration is None:
            assert counted(simulated, 0) == int(branch(simulated).clock.pushes) - lost_clocks(costs)
            assert int(branch(simulated).clock.pushes) == told


def test_a_fork_returns_to_the_checkpoint_that_its_parent_had() -> None:
    simulated = counting(fails("e", 75.0), saving(30.0, learning_rate=0.5))
    seen = simulated.perform(Run(seconds=70.0))
    child = simulated.perform(Fork())
    simulated.perform(Run(seconds=20.0, branch=child))
    kept = int(np.sum(seen.pushes.seconds <= 60.0 + PAUSE))
    assert counted(simulated, child) >= kept
    assert simulated.branches[child].state.clock.pushes > counted(simulated, child)


# ------------------------------------------------------------------------------------------------------------- the knob


@pytest.mark.slow
def test_an_interval_near_youngs_is_better_than_a_short_and_a_long_one() -> None:
    """Checkpoints of 2 s and losses of a server every 150 s or so: Young's rule says about 25 s."""
    losses = RackLosses(every_seconds=300.0, repair_seconds=10.0, nodes=("d", "e"))
    seconds = {}
    for every in (3.0, 25.0, 1500.0):
        ends = []
        for seed in range(4):
            rules = {"target": Target("clocks", 2000), "budget_seconds": 1e5}
            simulated = counting(Conditions(losses=(losses,)), saving(every, learning_rate=0.5), seed, **rules)
            ends.append(simulated.perform(Run(seconds=1e5)).end_seconds)
        seconds[every] = np.mean(ends)
    assert seconds[25.0] < 0.9 * seconds[3.0]
    assert seconds[25.0] < 0.9 * seconds[1500.0]


def test_a_new_interval_takes_no_step() -> None:
    simulated = timed(setting=saving(1000.0), knobs=(Real("checkpoint_seconds", 1.0, 1000.0),))
    simulated.perform(Run(seconds=30.0))
    assert simulated.perform(Reconfigure(saving(10.0))).seconds == 0.0
    seen = simulated.perform(Run(seconds=5.0))
    assert [c.steps for c in seen.changes] == [("checkpoint",)], "it is due at once: the last one is older than 10 s"


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_an_interval_is_positive_or_zero(wrong: float) -> None:
    simulated = timed(setting=saving(30.0), knobs=(Real("checkpoint_seconds", 1.0, 1000.0),))
    with pytest.raises(Rejected, match=r"Cannot make a checkpoint every|Cannot set checkpoint_seconds"):
        simulated.perform(Reconfigure(saving(wrong)))


def test_settings_without_checkpoints_are_written_as_before() -> None:
    plain, saved = start(), saving(30.0)
    assert "checkpoint" not in setting_text(plain)
    assert setting_from(setting_text(saved)) == saved
    assert setting_from(setting_text(plain)) == plain
