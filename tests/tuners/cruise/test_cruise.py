"""Cruise: Eq. 5 against brute force, theory and the paper's choices; scripted tests of its trigger."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy import job, plain, toys, window
from tuners.actions import Cost, NodeEvent, Reconfigure, Rejected, Run, Setting, Space
from tuners.cruise import cruise
from tuners.cruise.placement import MachineKind, Problem
from tuners.cruise.split import best_worker_count, epoch_seconds
from tuners.settings import Integer
from tuners.testing import exchanges

POSITIVE = st.floats(1e-3, 1e3)


def alike(machines, z, *, batch_size=100.0):
    """Machines on which a mini-batch computes for `z` times as long as an unloaded pull takes, which is one second."""
    return Problem(
        kinds=(MachineKind(count=machines, compute_seconds=z / batch_size, bytes_per_second=1e9),),
        samples=190 * 100,
        batch_size=batch_size,
        model_bytes=1e9,
    )


def ratio(measured, workers, to):
    """Epoch time with so many workers, divided by that with `to` workers."""
    n = measured.machines
    return epoch_seconds(workers, n - workers, measured) / epoch_seconds(to, n - to, measured)


# ------------------------------------------------------------------------------------------------------ the cost model


@given(st.integers(2, 60), POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.integers(1, 10_000))
def test_eq_5_is_what_brute_force_over_eq_4_finds(machines, compute, model, bandwidth, batch, samples):
    """Eqs. 1-4 machine by machine for equal shares; d_i / B is not rounded up, as in Eq. 5."""
    measured = Problem(
        kinds=(MachineKind(count=machines, compute_seconds=compute, bytes_per_second=bandwidth),),
        samples=samples,
        batch_size=batch,
        model_bytes=model,
    )

    def slowest(w):
        data, parts = [samples / w] * w, [model / (machines - w)] * (machines - w)
        costs = []
        for d in data:
            pull = max(max(m * w / bandwidth for m in parts), sum(m / bandwidth for m in parts))
            costs.append(compute * d + d / batch * pull)
        return max(costs)

    costs = {w: slowest(w) for w in range(1, machines)}
    for w, cost in costs.items():
        assert epoch_seconds(w, machines - w, measured) == pytest.approx(cost)
    assert costs[best_worker_count(measured)] == pytest.approx(min(costs.values()))


@given(st.integers(4, 5000), st.floats(1.0, 100.0))
def test_the_optimum_follows_the_root_of_compute_over_pull(machines, z):
    """With servers the bottleneck Eq. 5 is (z / w + 1 / (N - w)) P: its minimum lies at w = N sqrt(z) / (1 + sqrt(z))."""
    continuous = machines * math.sqrt(z) / (1 + math.sqrt(z))
    assert abs(best_worker_count(alike(machines, z)) - continuous) <= 1


def test_at_least_one_works_and_one_serves():
    assert best_worker_count(alike(8, 1e9)) == 7
    assert best_worker_count(alike(2, 1.0)) == 1
    assert best_worker_count(alike(1, 1.0)) is None
    assert best_worker_count(alike(8, 1.0), []) is None
    assert best_worker_count(alike(8, 1e9), [2, 5, 8, 0]) == 5
    assert epoch_seconds(0, 4, alike(4, 1.0)) == epoch_seconds(4, 0, alike(4, 1.0)) == math.inf


def test_of_equal_splits_the_one_with_fewest_workers():
    # Without compute, w workers pull D / (w B) times for max(1, w / (N - w)) each: 1 and 4 of 5 take equally long.
    free = alike(5, 0.0)
    assert [epoch_seconds(w, 5 - w, free) for w in (1, 4)] == [190, 190]
    assert best_worker_count(free, [4, 1]) == 1


# ------------------------------------------------------------------------------------------- what the papers' figures say


@pytest.mark.parametrize(
    ("machines", "z", "optimum", "published"),
    [
        # LDA with 400 topics, Tables Ia and Ib: one constant for three values; our fit, as good as -6 % / +3 %.
        (32, 1.50, 18, {23: 1.21, 27: 1.60}),
        # NMF on 52 m4.xlarge, Table Ic: one constant for three values.
        (52, 18.6, 42, {34: 1.10, 38: 1.05}),
    ],
    ids=["LDA-400", "NMF-m4.xlarge"],
)
def test_published_grid_optima_that_eq_5_reproduces(machines, z, optimum, published):
    measured = alike(machines, z)
    assert best_worker_count(measured) == optimum
    for workers, value in published.items():
        assert ratio(measured, workers, optimum) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize(("optimum", "servers"), [(23, 9), (24, 8), (22, 10), (27, 5), (26, 6), (18, 14)])
def test_every_choice_of_table_iii_is_the_optimum_for_some_job(optimum, servers):
    """(w, s) is where sqrt(z) = w / s: the six optima and choices of NMF, MLR and LDA on 32 machines."""
    assert best_worker_count(alike(optimum + servers, (optimum / servers) ** 2)) == optimum


def test_mlr_at_18_workers_is_beyond_the_model():
    """Published: 2.29. No z that leaves (27, 5) optimal gives more than 1.5 there, the most that linear compute allows."""
    fits = [z for z in np.linspace(1, 100, 500) if best_worker_count(alike(32, z)) == 27]
    assert min(fits) < 29 < max(fits)
    assert max(ratio(alike(32, z), 18, 27) for z in fits) < 27 / 18


# -------------------------------------------------------------------------------------------------------------- scripted

by_eq_5 = partial(cruise, server_term="sum", overlap=False)  # what the comments below count with
DONE = Cost(seconds=0.5, stall_seconds=0.0)
GOAL = job("every knob")  # five nodes: n0 n1 n2 work, n3 n4 serve; 4 samples a mini-batch


def seen_with(z, *, of=GOAL, pushes=30, setting=None, **more):
    """A window in which a mini-batch computes for `z` unloaded pulls (20 ms on this job)."""
    workers = (setting or of.start).workers
    return window(of, [1.0] * pushes, compute=0.02 * z, workers=workers, **more)


def with_workers(count, of=GOAL):
    names = [n.name for n in of.nodes]
    return replace(of.start, workers=tuple(names[:count]), servers=tuple(names[count:]))


def test_a_job_whose_roles_are_held_just_runs():
    with pytest.raises(StopIteration):
        next(by_eq_5(job("one knob")))


def test_cruise_watches_then_moves_to_the_predicted_optimum_and_stays():
    tuner = by_eq_5(GOAL)
    assert next(tuner) == Run(clocks=30)
    # z = 20: 1 / w (20 + w / s) is least at (4, 1), 6.0 against 7.17 at (3, 2).
    assert plain(tuner.send(seen_with(20))) == Reconfigure(with_workers(4), method="migrate")
    assert tuner.send(DONE) == Run(clocks=40)
    assert tuner.send(seen_with(20, setting=with_workers(4), start=40)) == Run(clocks=40)
    # The job turns communication-bound: z = 0.5 is least at (2, 3) or (3, 2): 0.75 against 0.67.
    assert plain(tuner.send(seen_with(0.5, setting=with_workers(4), start=80))) == Reconfigure(
        with_workers(3), method="migrate"
    )


def test_an_unknown_number_of_samples_changes_no_choice():
    unknown = replace(GOAL, samples=0)
    tuner = by_eq_5(unknown)
    next(tuner)
    assert plain(tuner.send(seen_with(20, of=unknown))) == Reconfigure(with_workers(4), method="migrate")


def test_a_gain_below_the_threshold_is_not_worth_a_change():
    # z = 6: (3, 2) takes 2.5, (4, 1) takes 2.5; z = 6.5: 2.667 against 2.625, a gain of 1.6 %.
    tuner = by_eq_5(GOAL)
    next(tuner)
    assert tuner.send(seen_with(6.5)) == Run(clocks=30)
    eager = by_eq_5(GOAL, gain=0.0)
    next(eager)
    assert isinstance(eager.send(seen_with(6.5)), Reconfigure)
    tie = by_eq_5(GOAL, gain=0.0)
    next(tie)
    assert tie.send(seen_with(6.0)) == Run(clocks=30)


def test_the_first_mini_batches_do_not_count():
    slow_start = seen_with(1)
    slow_start.pushes.compute_seconds[:9] = 50.0  # three of each worker
    tuner = by_eq_5(GOAL)
    next(tuner)
    assert tuner.send(slow_start) == Run(clocks=30)
    counting = by_eq_5(GOAL, warmup=0)
    next(counting)
    assert isinstance(counting.send(slow_start), Reconfigure)


def test_cruise_waits_until_every_worker_has_been_measured():
    tuner = by_eq_5(GOAL)
    next(tuner)
    # Five pushes each, three skipped: two are too few; the next window brings enough.
    assert tuner.send(seen_with(20, pushes=15)) == Run(clocks=30)
    assert isinstance(tuner.send(seen_with(20, pushes=3)), Reconfigure)
    lopsided = by_eq_5(GOAL)
    next(lopsided)
    only_two = seen_with(20)
    only_two.pushes.worker[only_two.pushes.worker == 2] = 1
    assert lopsided.send(only_two) == Run(clocks=30)


def test_what_was_measured_before_a_change_is_forgotten():
    tuner = by_eq_5(GOAL)
    next(tuner)
    tuner.send(seen_with(20))
    tuner.send(DONE)
    # One mini-batch each is skipped after a change; the three that are left speak for the new setting alone.
    assert tuner.send(seen_with(0.5, setting=with_workers(4), pushes=12, start=40)) == Run(clocks=40)
    assert isinstance(tuner.send(seen_with(0.5, setting=with_workers(4), pushes=4, start=60)), Reconfigure)


def test_a_split_that_was_refused_is_not_asked_for_again():
    tuner = by_eq_5(GOAL)
    next(tuner)
    assert plain(tuner.send(seen_with(20))) == Reconfigure(with_workers(4), method="migrate")
    assert tuner.throw(Rejected("Cannot migrate.")) == Run(clocks=30)
    for _ in range(3):
        assert tuner.send(seen_with(20)) == Run(clocks=30)


def test_a_bounded_number_of_workers_is_kept_to():
    start = with_workers(2)
    of = replace(GOAL, start=start, space=Space(start, GOAL.nodes, (Integer("worker_count", 2, 3),)))
    tuner = by_eq_5(of)
    next(tuner)
    assert plain(tuner.send(seen_with(1000, of=of))) == Reconfigure(with_workers(3, of), method="migrate")


def test_workers_stay_workers_and_idle_machines_are_next():
    start = Setting(workers=("n4", "n1"), servers=("n0", "n2"), batch_size=4)  # n3 is idle
    of = replace(
        GOAL, start=start, space=Space(start, GOAL.nodes, (Integer("worker_count", 1, 4),)), methods=("checkpoint",)
    )
    tuner = by_eq_5(of)
    next(tuner)
    wanted = tuner.send(seen_with(20, of=of))
    assert plain(wanted) == Reconfigure(replace(start, workers=("n4", "n1", "n3", "n0"), servers=("n2",)))


def test_a_lost_machine_always_brings_a_new_split():
    """Without its server n4 the current split cannot be costed, so that even a loss of 0 % gain is repaired."""
    left = tuple(n for n in GOAL.nodes if n.name != "n4")
    event = NodeEvent(0.5, "n4", "left")
    tuner = by_eq_5(GOAL, gain=0.99)
    next(tuner)
    wanted = tuner.send(replace(seen_with(20), nodes=left, events=(event,)))
    assert plain(wanted) == Reconfigure(replace(GOAL.start, workers=("n0", "n1", "n2"), servers=("n3",)), method="migrate")


def test_bandwidth_can_be_what_the_pulls_achieve():
    """Pulls ten times as long as the NIC allows make the same job ten times as communication-bound."""
    slow = {"compute": 0.02 * 8, "pull": 10 * 0.02 * 1.5}
    stated, measured = by_eq_5(GOAL, gain=0.0), by_eq_5(GOAL, gain=0.0, bandwidth="measured")
    next(stated)
    next(measured)
    assert plain(stated.send(window(GOAL, [1.0] * 30, **slow))) == Reconfigure(with_workers(4), method="migrate")
    assert measured.send(window(GOAL, [1.0] * 30, **slow)) == Run(clocks=30)


@pytest.mark.parametrize("factory", [cruise, by_eq_5], ids=["default", "Eq. 5"])
def test_cruise_settles_on_the_toy(factory):
    """Whatever the scatter of the toy's compute times, the split changes at most once."""
    for seed in range(4):
        log = exchanges(factory, toys()["timing only"](seed))
        changes = [e.action.setting for e in log if isinstance(e.action, Reconfigure)]
        assert len(changes) <= 1
