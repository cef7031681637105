"""Skipped pulls: several gradients on one copy of the parameters, the time that they save, and that nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest

from simulators.jobs import drawn
from simulators.workloads.workload import Demand
from tests.support.marks import slow
from tests.support.small_jobs import MODEL, assert_same_bytes, branch, job, plain_job, system, together
from traces.schema import setting_from, setting_text
from tuners.actions import Fork, Reconfigure, Rejected, Run
from tuners.ages import ages
from tuners.settings import Choice, Integer

FREE = (Integer("pull_clocks", 1, 16),)
ROLES = (*FREE, *(Choice(f"role/{n}", ("worker", "server", "idle")) for n in "abcde"))
TALKING = Demand(model_bytes=100.0, sample_seconds=0.25, message_seconds=0.1)


def made(knobs=FREE, demand=None, workload=None, **setting):
    cluster, _, plain, conditions = plain_job(**setting)
    return system(cluster, job(demand, MODEL, **(workload or {})), plain, conditions, 5, knobs=knobs)


def pulled(window):
    """Pushes whose cycle began with a pull."""
    return window.pushes.pull_seconds > 0


def test_gradients_between_two_pulls_are_made_at_the_same_parameters() -> None:
    """One worker by hand, in float64: it pulls before mini-batches 0, 3, 6, ..."""
    simulated = made(workers=("a",), pull_clocks=3)
    window = simulated.perform(Run(clocks=8))
    data, first = drawn(job(model=MODEL), 5)
    columns = [np.asarray(c) for c in data.train]
    now = {k: np.asarray(v, np.float64) for k, v in first.items()}
    for clock in range(8):
        if clock % 3 == 0:
            copy = dict(now)
        at = (clock * 8 + np.arange(8)) % len(columns[0])
        gradient = MODEL.gradient(copy, [c[at] for c in columns])[1]
        now = {k: v - 0.1 * gradient[k] for k, v in now.items()}
    for name, value in now.items():
        np.testing.assert_allclose(np.asarray(branch(simulated).learned.parameters[name]), value, rtol=2e-4, atol=2e-5)
    assert pulled(window).tolist() == [c % 3 == 0 for c in range(8)]
    assert window.pushes.staleness.tolist() == [c % 3 for c in range(8)]


@pytest.mark.parametrize("policy", [slow("asp"), "bsp"])
def test_a_pull_before_every_mini_batch_is_a_job_without_the_knob(policy: str) -> None:
    free, plain = made(policy=policy), made(knobs=(), policy=policy)
    assert_same_bytes(free.perform(Run(clocks=30)).pushes, plain.perform(Run(clocks=30)).pushes)
    for a, b in zip(*(branch(s).learned.parameters.values() for s in (free, plain)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_fewer_pulls_take_less_time_and_make_gradients_older() -> None:
    each, seldom = (made(demand=TALKING, pull_clocks=k).perform(Run(clocks=120)) for k in (1, 4))
    assert pulled(each).sum() == 120
    assert pulled(seldom).sum() == 3 * 10
    assert seldom.end_seconds < each.end_seconds
    assert seldom.pushes.staleness.mean() > 2 * each.pushes.staleness.mean()
    # A worker talks to two servers: a cycle without a pull saves two messages and all of the pull.
    noise = {(w, c): s for w, c, s in zip(each.pushes.worker, each.pushes.clock, each.pushes.compute_seconds, strict=True)}
    for worker, clock, seconds, pulls in zip(
        seldom.pushes.worker, seldom.pushes.clock, seldom.pushes.compute_seconds, pulled(seldom), strict=True
    ):
        if (worker, clock) in noise:
            assert seconds == pytest.approx(noise[worker, clock] - (0.0 if pulls else 0.2))


def test_servers_send_what_is_pulled() -> None:
    window = made(pull_clocks=4).perform(Run(clocks=120))
    assert sum(s.pull_bytes for s in window.servers) == pytest.approx(pulled(window).sum() * 100.0)
    assert sum(s.push_bytes for s in window.servers) == pytest.approx(120 * 100.0)


def test_windows_change_nothing() -> None:
    whole, cut = made(pull_clocks=4), made(pull_clocks=4)
    pushes = whole.perform(Run(clocks=25)).pushes
    assert_same_bytes(pushes, together([cut.perform(Run(clocks=1)) for _ in range(25)]))
    for a, b in zip(*(branch(s).learned.parameters.values() for s in (whole, cut)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_new_interval_takes_no_step_and_counts_at_once() -> None:
    simulated = made(pull_clocks=16)
    simulated.perform(Run(clocks=9))
    assert simulated.perform(Reconfigure(replace(simulated.job.start, pull_clocks=1))).seconds == 0.0
    simulated.perform(Run(clocks=3))  # mini-batches that had begun
    assert pulled(simulated.perform(Run(clocks=12))).all()


def test_a_worker_that_was_stopped_pulls_first() -> None:
    simulated = made(ROLES, pull_clocks=16)
    simulated.perform(Run(clocks=9))
    cost = simulated.perform(Reconfigure(replace(simulated.job.start, servers=("d",))))
    assert cost.stall_seconds > 0
    after = simulated.perform(Run(clocks=9))
    firsts = [pulled(after)[after.pushes.worker == w][0] for w in range(3)]
    assert firsts == [True] * 3


def test_branches_do_not_share_copies() -> None:
    simulated = made(pull_clocks=16)
    simulated.perform(Run(clocks=9))
    child = simulated.perform(Fork())
    simulated.perform(Run(clocks=9, branch=child))
    later = simulated.perform(Run(clocks=12))
    begun = later.pushes.seconds > later.pushes.seconds[3]  # after the mini-batches that had begun
    assert pulled(later)[begun].any()


def test_what_a_copy_adds_to_the_age_is_publishing() -> None:
    seen = {k: made(pull_clocks=k).perform(Run(clocks=200)).pushes for k in (1, 8)}
    parts = {k: ages(p) for k, p in seen.items()}
    for k, pushes in seen.items():
        np.testing.assert_allclose(sum(parts[k]), pushes.staleness)
    later = slice(50, None)
    assert parts[8].publishing[later].mean() > 3 * parts[1].publishing[later].mean()
    assert parts[8].generation[later].mean() < 2 * parts[1].generation[later].mean()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"knobs": (*FREE, Integer("local_steps", 1, 4))}, "Cannot skip pulls with local steps"),
        ({"workload": {"optimizer": "adarevision"}}, "Cannot skip pulls with 'adarevision'"),
    ],
)
def test_what_pulls_are_needed_for_is_refused(changed, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made(**changed)


def test_an_interval_is_a_positive_number() -> None:
    simulated = made()
    with pytest.raises(Rejected, match="Cannot set pull_clocks to 0: it must be at least 1"):
        simulated.perform(Reconfigure(replace(simulated.job.start, pull_clocks=0)))


def test_settings_with_every_pull_are_written_as_before() -> None:
    plain = made().job.start
    assert "pull_clocks" not in setting_text(plain)
    assert setting_from(setting_text(replace(plain, pull_clocks=4))).pull_clocks == 4
