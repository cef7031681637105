"""A policy's timer: a quorum's rounds end when its grace is over, also where nobody pushes then."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from simulators.cluster.conditions import Conditions, Sleeps
from tests.support.small_jobs import MODEL, assert_same_bytes, branch, job, plain_job, system, together
from tests.support.toy import toys
from traces.schema import setting_from, setting_text
from tuners import policies
from tuners.actions import Decision, Fork, Install, Push, Reconfigure, Rejected, Run, SyncPolicy
from tuners.settings import Choice, Integer, Real


def made(policy, *, aggregation="mean", seed=3):
    """Three workers, each of which sleeps now and then, under an installed policy from the first second on."""
    cluster, _, plain, _ = plain_job(policy="bsp")
    conditions = Conditions(jitter=0.3, sleeps=Sleeps(probability=0.3, mean_seconds=4.0, sd_seconds=1.0))
    workload = job(model=MODEL, aggregation=aggregation)
    simulated = system(cluster, workload, plain, conditions, seed, installs_policies=True)
    simulated.perform(Install(policy))
    return simulated


def same(one, other, clocks=60):
    assert_same_bytes(*(s.perform(Run(clocks=clocks)).pushes for s in (one, other)))
    for a, b in zip(*(branch(s).learned.parameters.values() for s in (one, other)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_without_grace_a_quorum_is_backup_workers():
    same(made(policies.quorum(2, 0.0)), made(policies.backup_workers(2)))


@pytest.mark.slow
def test_with_a_long_grace_everybody_waits_for_everybody():
    same(made(policies.quorum(2, 1e6)), made(policies.bsp()))


@pytest.mark.parametrize("grace", [0.05, 0.5, 3.0])
def test_rounds_end_when_the_grace_is_over_or_all_have_come(grace):
    seen = made(policies.quorum(2, grace)).perform(Run(clocks=200)).pushes
    began = seen.seconds - seen.push_seconds - seen.compute_seconds - seen.pull_seconds
    released, begun, waiting = {}, dict.fromkeys(range(3), 0), set()
    number, pushed, end, by_grace = 0, 0, math.inf, 0
    for seconds, worker, start in zip(seen.seconds, seen.worker, began, strict=True):
        if end < seconds:  # the timer has run down before this push
            released |= dict.fromkeys(waiting, end)
            number, pushed, by_grace = number + 1, 0, by_grace + 1
            begun |= dict.fromkeys(waiting, number)
            waiting, end = set(), math.inf
        if worker in released:
            assert start == pytest.approx(released[worker], abs=1e-9)
        if begun[worker] != number:
            released[worker], begun[worker] = seconds, number  # too late: it joins the current round
            continue
        waiting.add(worker)
        pushed += 1
        end = seconds + grace if pushed == 2 else end
        if pushed == 3:
            number, pushed, end = number + 1, 0, math.inf
            released |= dict.fromkeys(waiting, seconds)
            begun |= dict.fromkeys(waiting, number)
            waiting = set()
    assert by_grace > 5


def test_windows_change_nothing():
    whole, cut = made(policies.quorum(2, 0.5)), made(policies.quorum(2, 0.5))
    pushes = whole.perform(Run(seconds=60.0)).pushes
    assert_same_bytes(pushes, together([cut.perform(Run(seconds=0.75)) for _ in range(80)]))


def test_a_timer_rests_while_its_branch_does():
    alone, shared = made(policies.quorum(2, 2.0)), made(policies.quorum(2, 2.0))
    first = alone.perform(Run(clocks=40)).pushes
    other, parts, pause = shared.perform(Fork(0)), [], 0.0
    for _ in range(8):
        window = shared.perform(Run(clocks=5))
        parts.append(window.pushes.compute_seconds + window.pushes.wait_seconds)
        pause += shared.perform(Run(seconds=1.0, branch=other)).seconds
    np.testing.assert_allclose(np.concatenate(parts), first.compute_seconds + first.wait_seconds, atol=1e-9)
    assert pause == pytest.approx(8.0)


def test_a_timer_is_no_deadlock_and_one_that_is_stopped_is():
    def ring(pushes, push: Push):
        """The timer releases all, and after 30 pushes nobody sets it again."""
        pushes = pushes + ~push.timer
        seconds = jnp.where(pushes < 30, 5.0, jnp.inf)
        return pushes, Decision(release=push.waiting & push.timer, timer=jnp.where(push.timer, jnp.inf, seconds))

    simulated = made(SyncPolicy("ring", lambda active: jnp.asarray(0), ring, timers=True), aggregation="each")
    assert simulated.perform(Run(clocks=25)).status == "running"
    assert simulated.perform(Run(clocks=25)).status == "deadlock"


def test_a_system_that_decides_at_pushes_only_refuses_timers():
    with pytest.raises(Rejected, match=r"'quorum\(2,0.5\)': it sets a timer"):
        toys()["every knob"](0).perform(Install(policies.quorum(2, 0.5)))
    with pytest.raises(Rejected, match="it probes and sets timers"):
        made(policies.bsp()).perform(Install(policies.quorum(2, 0.5)._replace(probes=True)))


@pytest.mark.parametrize(("size", "grace", "reason"), [(0, 1.0, "0 workers"), (2, -1.0, "-1 s"), (2, math.inf, "inf s")])
def test_a_quorum_that_makes_no_sense_is_refused(size, grace, reason):
    with pytest.raises(ValueError, match=reason):
        policies.quorum(size, grace)


def asked(**changed):
    cluster, _, plain, _ = plain_job(policy="bsp")
    conditions = Conditions(jitter=0.3, sleeps=Sleeps(probability=0.3, mean_seconds=4.0, sd_seconds=1.0))
    knobs = (Choice("policy", ("bsp", "quorum")), Integer("quorum", 0, 3), Real("grace_seconds", 0.0, 10.0))
    start = replace(plain, **changed)
    return system(cluster, job(model=MODEL, aggregation="mean"), start, conditions, 3, knobs=knobs)


def test_a_setting_can_ask_for_a_quorum():
    installed, named = made(policies.quorum(2, 0.5)), asked()
    cost = named.perform(Reconfigure(replace(named.job.start, policy="quorum", quorum=2, grace_seconds=0.5)))
    assert cost.seconds == 0.0
    same(installed, named)


def test_another_size_or_grace_begins_rounds_anew_and_anything_else_does_not():
    simulated = asked(policy="quorum", quorum=2, grace_seconds=0.5)
    before, policy = simulated.job.start, simulated.branches[0].policy
    simulated.perform(Run(clocks=7))
    simulated.perform(Reconfigure(replace(before, learning_rate=before.learning_rate)))
    assert simulated.branches[0].policy is policy
    simulated.perform(Reconfigure(replace(before, grace_seconds=1.0)))
    assert simulated.branches[0].policy.name == "quorum(2,1)"
    simulated.perform(Reconfigure(replace(before, quorum=3)))
    assert simulated.branches[0].policy.name == "quorum(3,0.5)"
    assert simulated.perform(Run(clocks=20)).clocks == 20


@pytest.mark.slow
def test_a_quorum_of_none_waits_for_all():
    same(asked(policy="quorum"), asked(policy="bsp"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"quorum": -1}, "Cannot set quorum to -1"), ({"grace_seconds": math.inf}, "Cannot wait inf s after a quorum")],
)
def test_a_setting_with_a_quorum_that_makes_no_sense_is_refused(changed, reason):
    simulated = asked()
    with pytest.raises(Rejected, match=reason):
        simulated.perform(Reconfigure(replace(simulated.job.start, **changed)))


def test_settings_without_a_quorum_are_written_as_before():
    start = plain_job()[2]
    assert "quorum" not in setting_text(start)
    wanted = replace(start, policy="quorum", quorum=2, grace_seconds=0.5)
    assert setting_from(setting_text(wanted)) == wanted
