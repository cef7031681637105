"""Tables of recorded runs under joint: a start whose run ended below the target was kept to the end of the budget."""

from dataclasses import replace

import pytest

from harness.drive import play
from tests.tuners.joint.test_joint import fixed
from traces.recorded_runs import Recorded, recorded_job
from traces.replay import RecordedSystem
from tuners.actions import Evaluation, Reconfigure, Setting, Target
from tuners.joint import joint
from tuners.prices import Rate

RESTART, RATES = 60.0, (0.1, 0.2, 0.3, 0.4, 0.5)


def table(reaching, *, usd=(), minimise="seconds", seed=0, steps=2500):
    """Runs of 100 s under five rates, of which those `reaching` end with what is asked for; the first is the start."""
    runs = [
        Recorded(
            Setting(workers=("workers",), servers=("servers",), learning_rate=rate),
            seconds=100.0,
            clocks=steps,
            evaluations=(Evaluation(100.0, steps, 0.1, 0.95 if rate in reaching else 0.5),),
            rate=Rate(2.0, price),
        )
        for rate, price in zip(RATES, usd or (1.0,) * 5, strict=True)
    ]
    target = Target("accuracy", 0.9, minimise=minimise)
    return RecordedSystem(
        recorded_job("t", runs, target=target, budget_seconds=5_000.0, seed=seed), runs, restart_seconds=RESTART
    )


def rates(system):
    """The rates that joint asks for, and when the job ends."""
    played = play(joint, system)
    asked = [e.action.setting.learning_rate for e in played.exchanges if isinstance(e.action, Reconfigure)]
    return asked, played.outcome


@pytest.mark.parametrize("steps", [1, 2, 3, 90, 2500])
def test_a_run_that_is_over_is_left_for_others_each_once(steps):
    asked, outcome = rates(table({0.4}, steps=steps))
    assert outcome.status == "target"
    assert asked[-1] == 0.4
    assert len(set(asked)) == len(asked)
    idle = 100 * max(1 / steps, 1 / 8)  # of every run, where the last window ends with it; of the first, a push more
    needed = 100 + len(asked) * (RESTART + 100)
    assert needed - 1e-6 <= outcome.seconds <= needed + (len(asked) + 1) * idle + 1e-6
    assert play(fixed, table({0.4}, steps=steps)).outcome.status == "budget"


def test_a_run_is_not_left_before_its_end():
    asked, outcome = rates(table({0.1, 0.4}))
    assert not asked
    assert outcome.seconds == 100.0


def test_the_order_is_drawn_by_the_jobs_seed():
    assert len({tuple(rates(table((), seed=seed))[0]) for seed in range(8)}) > 3


def test_where_all_runs_end_below_the_target_each_is_tried_once():
    asked, outcome = rates(table(()))
    assert sorted(asked) == [0.2, 0.3, 0.4, 0.5]
    assert outcome.status == "budget"


def test_where_the_cheapest_run_is_wanted_low_prices_come_first_and_unknown_ones_last():
    usd = (1.0, 4.0, float("nan"), 2.0, 3.0)
    assert rates(table((), usd=usd, minimise="usd"))[0] == [0.4, 0.5, 0.2, 0.3]


def test_a_setting_that_is_refused_is_passed_over():
    system = table({0.4})
    missing = next(s for s in system.job.space.recorded if s.learning_rate == 0.3)
    system._runs.pop(missing)
    assert rates(system)[1].status == "target"
    assert replace(system.job.start, learning_rate=0.3) == missing
