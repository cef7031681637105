"""Local steps: what a worker changes between pull and push, how long that takes, and that nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest

from simulators.jobs import drawn
from tests.support.small_jobs import MODEL, assert_same_bytes, branch, job, plain_job, system, together
from tuners.actions import Reconfigure, Rejected, Run, Target
from tuners.settings import Integer, Real

FREE = (Integer("local_steps", 1, 8), Real("outer_rate", 0.1, 2.0), Real("outer_momentum", 0.0, 0.95))
DILOCO = {"local_steps": 4, "outer_rate": 0.7, "outer_momentum": 0.9}


def made(aggregation="mean", rules=None, knobs=FREE, seed=5, **setting):
    cluster, _, plain, conditions = plain_job(**({"policy": "bsp"} | setting))
    workload = job(model=MODEL, aggregation=aggregation)
    return system(cluster, workload, plain, conditions, seed, knobs=knobs, **(rules or {}))


def by_hand(seed, rounds, local_steps, outer_rate, outer_momentum, rate=0.1, workers=3, batch=8):
    """DiLoCo's Algorithm 1 with plain SGD as the inner optimizer, in float64."""
    data, first = drawn(job(model=MODEL), seed)
    columns = [np.asarray(c) for c in data.train]
    ends = np.round(np.arange(workers + 1) / workers * len(columns[0])).astype(int)
    shared = {k: np.asarray(v, np.float64) for k, v in first.items()}
    speed = {k: np.zeros_like(v) for k, v in shared.items()}
    for number in range(rounds):
        changes = []
        for w in range(workers):
            own = {k: v.copy() for k, v in shared.items()}
            for step in range(local_steps):
                at = (number * local_steps + step) * batch + np.arange(batch)
                rows = [c[ends[w] + at % (ends[w + 1] - ends[w])] for c in columns]
                gradient = MODEL.gradient(own, rows)[1]
                own = {k: v - rate * gradient[k] for k, v in own.items()}
            changes.append({k: shared[k] - own[k] for k in shared})
        for k in shared:
            mean = np.mean([c[k] for c in changes], axis=0)
            speed[k] = outer_momentum * speed[k] + mean
            shared[k] = shared[k] - outer_rate * (mean + outer_momentum * speed[k])
    return shared


@pytest.mark.parametrize("steps", [DILOCO, {"local_steps": 3, "outer_rate": 1.0, "outer_momentum": 0.0}])
def test_synchronous_rounds_are_the_papers_algorithm(steps):
    simulated = made(**steps)
    simulated.perform(Run(clocks=3 * 6))
    for name, value in by_hand(5, 6, **steps).items():
        np.testing.assert_allclose(np.asarray(branch(simulated).learned.parameters[name]), value, rtol=2e-4, atol=2e-5)


def test_one_local_step_that_the_servers_take_as_it_is_learns_as_a_gradient_does():
    one, plain = made(), made(knobs=())
    for simulated in (one, plain):
        simulated.perform(Run(clocks=30))
    for name, value in branch(plain).learned.parameters.items():
        np.testing.assert_allclose(np.asarray(branch(one).learned.parameters[name]), np.asarray(value), rtol=1e-4, atol=1e-6)


def test_one_local_step_takes_the_same_time_as_a_gradient():
    one, plain = (made(knobs=k).perform(Run(clocks=30)).pushes for k in (FREE, ()))
    for name in ("seconds", "worker", "clock", "compute_seconds", "staleness"):
        np.testing.assert_array_equal(getattr(one, name), getattr(plain, name), err_msg=name)


@pytest.mark.slow
def test_local_steps_compute_as_long_as_their_mini_batches_and_send_once():
    """The noise of a mini-batch is the same however many of them a push has."""
    each, whole = (made(aggregation="each", policy="asp", local_steps=n).perform(Run(clocks=24 // n)).pushes for n in (1, 4))
    first = {w: each.compute_seconds[each.worker == w][:4] for w in range(3)}
    for w in range(3):
        if len(first[w]) == 4:
            np.testing.assert_allclose(whole.compute_seconds[whole.worker == w][0], first[w].sum(), rtol=1e-12)
    assert len([w for w in first if len(first[w]) == 4]) > 0
    assert whole.clock[whole.worker == 0].tolist() == [4 * i for i in range(sum(whole.worker == 0))]


def test_windows_change_nothing():
    whole, cut = made(**DILOCO), made(**DILOCO)
    pushes = whole.perform(Run(clocks=20)).pushes
    assert_same_bytes(pushes, together([cut.perform(Run(clocks=1)) for _ in range(20)]))
    for a, b in zip(*(branch(s).learned.parameters.values() for s in (whole, cut)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_samples_count_once_each_also_where_the_number_of_steps_changes():
    """Every mini-batch that was begun is in a push, or in progress."""
    simulated = made(aggregation="each", policy="asp", local_steps=2, rules={"target": Target("samples", 1e9)})
    for steps in (5, 1, 3):
        simulated.perform(Run(clocks=11))
        simulated.perform(Reconfigure(replace(simulated.job.start, local_steps=steps)))
    clock = branch(simulated).clock
    assert int(clock.samples) == 8 * int(np.sum(np.asarray(clock.drawn)[:3]) - np.sum(np.asarray(clock.steps)[:3]))


def test_workers_take_local_steps_of_their_own_and_count_by_their_samples():
    """One round by hand: worker n takes 1 + n steps; the mean of what they change counts every mini-batch the same."""
    of = made().job.start
    own = tuple((w, 1 + n) for n, w in enumerate(of.workers))
    simulated = made(local_steps=4)
    simulated.perform(Reconfigure(replace(simulated.job.start, node_steps=own)))
    simulated.perform(Run(clocks=3))  # the round that had begun, of 4 steps each
    before = {k: np.asarray(v, np.float64) for k, v in branch(simulated).learned.parameters.items()}
    window = simulated.perform(Run(clocks=3))
    assert [w.samples for w in window.workers] == [8 * n for _, n in own]
    data, _ = drawn(job(model=MODEL), 5)
    columns = [np.asarray(c) for c in data.train]
    ends = np.round(np.arange(4) / 3 * len(columns[0])).astype(int)
    mean = {k: np.zeros_like(v) for k, v in before.items()}
    for w, (_, steps) in enumerate(own):
        mine = {k: v.copy() for k, v in before.items()}
        for step in range(steps):
            at = (4 + step) * 8 + np.arange(8)
            gradient = MODEL.gradient(mine, [c[ends[w] + at % (ends[w + 1] - ends[w])] for c in columns])[1]
            mine = {k: v - 0.1 * gradient[k] for k, v in mine.items()}
        mean = {k: mean[k] + steps / 6 * (before[k] - mine[k]) for k in mean}
    for k, value in branch(simulated).learned.parameters.items():
        np.testing.assert_allclose(np.asarray(value), before[k] - mean[k], rtol=2e-4, atol=2e-5)


def test_own_numbers_of_steps_that_are_all_the_same_change_nothing():
    plain, own = made(**DILOCO), made(**DILOCO)
    same = replace(own.job.start, local_steps=1, node_steps=tuple((w, 4) for w in own.job.start.workers))
    own.perform(Reconfigure(same))
    pushes = [s.perform(Run(clocks=18)).pushes for s in (plain, own)]
    assert_same_bytes(*pushes)
    for a, b in zip(*(branch(s).learned.parameters.values() for s in (plain, own)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_worker_of_its_own_number_of_steps_computes_as_long_as_its_mini_batches():
    simulated = made(aggregation="each", policy="asp", local_steps=1)
    simulated.perform(Reconfigure(replace(simulated.job.start, node_steps=((simulated.job.start.workers[1], 5),))))
    seen = simulated.perform(Run(clocks=60)).pushes
    for worker, steps in ((0, 1), (1, 5), (2, 1)):
        clocks = seen.clock[seen.worker == worker]
        assert set(np.diff(clocks[1:])) == {steps}


@pytest.mark.slow
def test_an_inner_optimizer_keeps_its_state_from_push_to_push():
    cluster, _, plain, conditions = plain_job(policy="bsp", momentum=0.9, local_steps=2)
    workload = job(model=MODEL, aggregation="mean", optimizer="momentum")
    simulated = system(cluster, workload, plain, conditions, 5, knobs=FREE)
    simulated.perform(Run(clocks=3))
    before = np.asarray(branch(simulated).learned.inner[0].trace["w"])[:3]
    simulated.perform(Run(clocks=3))
    after = np.asarray(branch(simulated).learned.inner[0].trace["w"])[:3]
    assert np.abs(before).min() > 0
    assert not np.array_equal(before, after)


def test_numbers_of_steps_that_make_no_sense_are_refused():
    simulated = made()
    for changes, reason in (
        ({"local_steps": 0}, "Cannot set local_steps to 0: it must be at least 1"),
        ({"outer_rate": 0.0}, "with outer_rate 0.0"),
        ({"node_steps": ((simulated.job.start.workers[0], 0),)}, "Cannot take 0 local steps on"),
        ({"node_steps": (("nobody", 2),)}, "Cannot take 2 local steps on 'nobody'"),
        ({"node_steps": ((simulated.job.start.workers[0], 9),)}, "this scenario allows 1 to 8"),
        ({"outer_momentum": 1.0}, "outer_momentum 1.0: the rate must be positive and finite, and the momentum"),
        ({"outer_rate": float("inf")}, "with outer_rate inf"),
    ):
        with pytest.raises(Rejected, match=reason):
            simulated.perform(Reconfigure(replace(simulated.job.start, **changes)))
    with pytest.raises(Rejected, match="holds it at 1"):
        made(knobs=(Real("learning_rate", 0.01, 1.0),)).perform(Reconfigure(replace(simulated.job.start, local_steps=2)))
    cluster, _, plain, conditions = plain_job()
    with pytest.raises(ValueError, match="cannot start: Cannot take local steps with 'adarevision'"):
        system(cluster, job(model=MODEL, optimizer="adarevision"), plain, conditions, knobs=FREE)
