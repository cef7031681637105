"""Decisions of joint on measurements made by hand: each of them was wrong once, and cost an arena its target or its time."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy import job, window
from tuners.actions import Cost, Evaluate, Evaluation, Fork, Free, Install, NodeEvent, Reconfigure, Rejected, Run
from tuners.joint.heat import Expected, PolicyHeat, stress
from tuners.joint.heat_search import HeatSearch
from tuners.joint.holding import Holding, RuleParts
from tuners.joint.learning_model import (
    HELPED_NATS,
    Gauge,
    SecondsLeft,
    falls,
    has_lost_half,
    is_lost,
    likely_seconds,
    seconds_left,
    stopped,
)
from tuners.joint.system_model import SystemModel
from tuners.joint.training import JobOver, Training, changed_cheaply
from tuners.joint.tuner import JointCourse
from tuners.settings import Choice, Integer, Real

RATE = Real("learning_rate", 0.001, 100.0, log=True)
DONE = Cost(seconds=0.0, stall_seconds=0.0)


def of(*, space=None, target=None, nodes=None, **changed):
    made = job("every knob")
    target = replace(made.target, metric="loss", value=0.1) if target is None else target
    space = made.space if space is None else replace(made.space, knobs=space)
    return replace(made, target=target, space=space, budget_seconds=1e5, **changed)


class Answers:
    """Answers a tuner's steps: every window has the losses that `losses(setting, clocks)` gives."""

    def __init__(self, job, losses, refuse=lambda action: False):
        self.job, self.losses, self.refuse = job, losses, refuse
        self.asked, self.settings, self.branches, self.now = [], {0: job.start}, 0, 0.0

    def run(self, steps):
        """Carry out `steps` to their end; returns their result."""
        answer = None
        while True:
            try:
                action = steps.throw(answer) if isinstance(answer, Rejected) else steps.send(answer)
            except StopIteration as end:
                return end.value
            self.asked.append(action)
            answer = Rejected("not now") if self.refuse(action) else self.answer(action)

    def answer(self, action):
        if isinstance(action, Run):
            losses = self.losses(self.settings[action.branch], action.clocks)
            made = window(self.job, losses, self.now + np.arange(1.0, action.clocks + 1))
            self.now += action.clocks
            return made
        if isinstance(action, Reconfigure):
            self.settings[action.branch] = action.setting
            return DONE
        if isinstance(action, Fork):
            self.branches += 1
            self.settings[self.branches] = self.settings[action.branch]
            return self.branches
        return Evaluation(self.now, 0, 1.0, float("nan")) if isinstance(action, Evaluate) else None

    def changes(self):
        return [a.setting for a in self.asked if isinstance(a, Reconfigure)]

    def show(self, *windows, after=(9.0, 9.0), spread=0.0, evaluated=None):
        """Let each window have a training loss, give or take `spread`, and a validation: loss (None: none was due) and
        accuracy. `after`: the windows from then on. An `Evaluate` finds the loss `evaluated`."""
        left, answer = iter(windows), self.answer

        def validated(action):
            if isinstance(action, Evaluate) and evaluated is not None:
                return Evaluation(self.now, 0, evaluated, math.nan)
            if not isinstance(action, Run):
                return answer(action)
            trained, loss, *accuracy = next(left, after)
            self.losses = lambda _setting, clocks: [trained + spread * (-1) ** i for i in range(clocks)]
            made = answer(action)
            found = () if loss is None else (Evaluation(made.end_seconds, 0, loss, *(accuracy or [math.nan])),)
            return replace(made, evaluations=found)

        self.answer = validated


def course(made, *, prior=False):
    begun = JointCourse(made, RuleParts(prior=prior))
    begun.gauge.begin(1.0)
    return begun


def flat(_setting, clocks):
    return [1.0 + 0.1 * (-1) ** i for i in range(clocks)]


# ------------------------------------------------------------------------------------------------------------ the branch


def test_a_fork_for_which_there_is_no_room_is_not_asked_for_again_until_there_may_be():
    """`joint` asked a live job for one in every window, and the screen told of each refusal."""
    room = 2
    answers = Answers(of(), flat, refuse=lambda action: isinstance(action, Fork) and answers.branches >= room)
    training = course(answers.job).training
    kept = [answers.run(training.snapshot()) for _ in range(5)]
    assert [k is not None for k in kept] == [True, True, False, False, False]
    assert sum(isinstance(action, Fork) for action in answers.asked) == 3
    room += 1
    answers.run(training.drop(kept[0]))
    assert answers.run(training.snapshot()) is not None
    assert answers.run(training.snapshot()) is None
    training.available -= {answers.job.nodes[0].name}
    room += 1
    assert answers.run(training.snapshot()) is not None


def test_a_cooler_rate_takes_effect_before_machines_move():
    """A model that goes on at the rate that has ruined it while its roles change is ruined again."""
    made = of()
    training, here = Training(made, SystemModel(made)), made.start
    moved = replace(here, workers=here.workers[:-1], learning_rate=here.learning_rate / 10, loads=(), data_shares=())
    answers = Answers(made, flat)
    assert answers.run(training.change(moved, "too hot"))
    assert [(s.learning_rate, s.workers) for s in answers.changes()] == [
        (moved.learning_rate, here.workers),
        (moved.learning_rate, moved.workers),
    ]
    assert answers.asked[0].reason == "too hot"


ROLES = tuple(Choice(f"role/{n.name}", ("worker", "server", "both", "idle")) for n in job().nodes)


def test_a_rate_that_was_for_other_machines_is_taken_back_where_roles_have_not_changed():
    """A machine was lost while roles changed: three workers went on at the rate for fourteen."""
    made = of()
    training, here, answers = Training(made, SystemModel(made)), made.start, Answers(made, flat)
    moved = replace(here, workers=here.workers[:-1], learning_rate=here.learning_rate / 3, loads=(), data_shares=())
    answers.refuse = lambda action: isinstance(action, Reconfigure) and action.setting.workers == moved.workers
    assert not answers.run(training.change(moved, "faster"))
    assert answers.settings[0].learning_rate == moved.learning_rate
    answers.run(training.run(3))
    assert answers.settings[0] == here
    answers.run(training.insist(moved, "too hot"))  # that is about the model, not about machines
    answers.run(training.run(3))
    assert answers.settings[0].learning_rate == moved.learning_rate


def test_the_heat_is_that_which_was_chosen_however_often_machines_are_lost_and_come_back():
    """The system drops lost machines, and goes on at their rate. Each time they came back, the rate became that of fewer:
    after three losses it was a sixteenth of the best one."""
    made = of(space=(RATE, *ROLES))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    answers.run(begun.placing.place())
    best = answers.settings[0]
    for _ in range(3):
        begun.training.setting = answers.settings[0] = replace(best, workers=best.workers[:1])
        begun.training.cluster_changed = True
        answers.run(begun.placing.place_anew())
        assert len(answers.settings[0].workers) == len(best.workers) > 1
        assert answers.settings[0].learning_rate == pytest.approx(best.learning_rate)


@pytest.mark.parametrize("lost", [True, False])
def test_a_model_that_cannot_be_evaluated_while_a_loss_is_made_up_for_is_evaluated_later(lost):
    """It counted as good as the one before it, which had been thrown off: the job went back, and lost 55 pushes."""
    made = of()
    training, answers = Training(made, SystemModel(made)), Answers(made, flat)
    training.level, answer = 5.0, answers.answer

    def losing(action):
        found = answer(action)
        event = NodeEvent(answers.now - 0.5, "n9", "failed")
        return replace(found, events=(event,) * lost) if isinstance(action, Run) else found

    def refuses(action):
        return isinstance(action, Evaluate) and sum(isinstance(a, Evaluate) for a in answers.asked) == 1

    answers.answer, answers.refuse = losing, refuses
    answers.run(training.window())
    assert [type(a) for a in answers.asked] == [Run, Evaluate, *[Run, Evaluate] * lost]
    assert (training.level < 5.0) == lost


def test_machines_that_are_back_work_while_the_heat_is_searched():
    """One worker of three went on alone to the end of the search."""
    made = of(space=(RATE, *ROLES))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1 / (1 + setting.learning_rate)] * clocks)
    few, best = replace(made.start, workers=made.start.workers[:1], loads=(), data_shares=()), made.start.workers
    begun.training.setting = answers.settings[0] = few
    begun.training.cluster_changed = True

    def place():
        begun.training.cluster_changed = False
        more = replace(begun.training.setting, workers=best)
        yield from begun.training.change(replace(more, learning_rate=more.learning_rate / len(best)), "machines are back")

    answers.run(HeatSearch(begun.training, begun.heat, place).run())
    assert begun.training.setting.workers == best
    assert begun.heat.of(begun.training.setting) > 10 * begun.heat.of(few)


@pytest.mark.parametrize("busy", [True, False])
def test_machines_are_chosen_again_after_a_push_where_a_loss_has_prevented_a_change(busy):
    """The window after it took 750 s on the three workers that were left, of a job that then took another 800 s."""
    made = of(space=(RATE, *ROLES))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    answers.run(begun.training.run(3))
    answer, until = answers.answer, answers.now + 2 if busy else math.inf

    def losing(action):
        found = answer(action)
        lost = NodeEvent(answers.now - 0.5, "n9", "failed") if busy and isinstance(action, Run) else None
        return found if lost is None else replace(found, events=(lost,))

    answers.refuse = lambda action: isinstance(action, Reconfigure) and answers.now < until
    answers.answer, asked = losing, len(answers.asked)
    begun.training.newest = replace(begun.training.newest, events=(NodeEvent(answers.now, "n9", "failed"),) * busy)
    answers.run(begun.placing.place())
    runs = [a.clocks for a in answers.asked[asked:] if isinstance(a, Run)]
    assert (runs[:2] == [1, 1]) == busy
    assert (answers.settings[0].workers != made.start.workers) == busy


@pytest.mark.parametrize(("minimise", "holds"), [("seconds", True), ("usd", False)])
@pytest.mark.parametrize("learns", [True, False])
def test_no_snapshot_holds_machines_that_were_given_back_where_the_cheapest_run_is_wanted(minimise, holds, learns):
    """A snapshot of the untrained model kept twelve machines, paid for to the end, of a job that went on with six."""
    made = of()
    made = replace(made, target=replace(made.target, minimise=minimise))
    training, fewer = (
        Training(made, SystemModel(made)),
        replace(made.start, workers=made.start.workers[:-1], loads=(), data_shares=()),
    )
    answers = Answers(made, lambda _setting, clocks: [0.5 if learns else 1.0] * clocks)
    training.gauge.begin(1.0)
    training.first = answers.run(training.snapshot())
    answers.run(training.run(8))
    answers.run(
        training.change(fewer, "cheaper") if learns else training.begin_again(fewer, "cheaper, from the untrained model")
    )
    answers.run(training.run(8))
    assert training.setting.workers == fewer.workers
    freed = {a.branch for a in answers.asked if isinstance(a, Free)}
    held = {name for branch, s in answers.settings.items() if branch not in freed for name in (*s.workers, *s.servers)}
    assert (made.start.workers[-1] in held) is holds
    assert training.first is not None
    assert training.first.branch not in freed


@pytest.mark.parametrize(("loss", "holds"), [(2.0, True), (1.0, False), (0.5, False)])
def test_at_a_held_rate_the_untrained_model_is_kept_while_the_loss_is_higher(loss, holds):
    """What was trained while machines changed had spoilt the model that the job then began again from, twice: 2.6 USD and no
    target, in place of 0.08."""
    made = of(space=(Choice("policy", ("bsp", "asp")),))
    made = replace(made, target=replace(made.target, minimise="usd"))
    training = Training(made, SystemModel(made))
    fewer = replace(made.start, workers=made.start.workers[:-1], loads=(), data_shares=())
    answers = Answers(made, lambda _setting, clocks: [loss] * clocks)
    training.gauge.begin(1.0)
    training.first = answers.run(training.snapshot())
    answers.run(training.begin_again(fewer, "cheaper, from the untrained model"))
    untrained = training.first.branch
    for _ in range(2):
        answers.run(training.run(8))
    assert (training.first.branch == untrained) is holds


def test_a_snapshot_on_lost_machines_gets_its_rate_where_the_system_has_put_it():
    made = of()
    training, moved = Training(made, SystemModel(made)), replace(made.start, workers=made.start.workers[:-1])
    lost = made.start.workers[-1]
    answers = Answers(made, flat, refuse=lambda a: isinstance(a, Reconfigure) and lost in a.setting.workers)
    kept = answers.run(training.snapshot())
    losses_of = answers.answer

    def survivors(action):
        return replace(losses_of(action), setting=moved) if isinstance(action, Run) else losses_of(action)

    answers.answer = survivors
    answers.run(training.return_to(kept, replace(made.start, learning_rate=0.05), "cooler"))
    assert training.setting == replace(moved, learning_rate=0.05) == answers.settings[kept.branch]


def test_what_is_refused_while_a_loss_is_made_up_for_is_asked_for_again():
    """A value that was to be taken back stayed to the end of the job: 26 s, where not tuning takes 13."""
    made = of()
    training, busy = Training(made, SystemModel(made)), [True]
    answers = Answers(made, flat, refuse=lambda a: isinstance(a, Reconfigure) and bool(busy))
    answers.run(training.insist(replace(made.start, pull_clocks=2), "taken back", ("pull_clocks",)))
    answers.run(training.run(4))
    assert training.setting == made.start
    busy.clear()
    answers.run(training.change(replace(made.start, learning_rate=0.05), "the next decision"))
    assert training.setting == replace(made.start, learning_rate=0.05, pull_clocks=2)
    asked = len(answers.changes())
    answers.run(training.run(4))
    assert len(answers.changes()) == asked


def test_a_later_decision_about_the_same_knob_replaces_what_was_refused():
    made = of()
    training, busy = Training(made, SystemModel(made)), [True]
    answers = Answers(made, flat, refuse=lambda a: isinstance(a, Reconfigure) and bool(busy))
    answers.run(training.insist(replace(made.start, learning_rate=0.02), "cooler"))
    busy.clear()
    answers.run(training.change(replace(made.start, learning_rate=0.005), "cooler still"))
    assert training.setting.learning_rate == 0.005


def test_a_model_that_cannot_be_kept_at_once_is_kept_after_the_system_has_moved_it():
    """The job went on without any snapshot, at a hotter rate. That diverged, and the job was over."""
    made = of()
    training, moved = Training(made, SystemModel(made)), replace(made.start, workers=made.start.workers[:-1])
    answers, ran = Answers(made, flat), []
    kept = answers.run(training.snapshot())
    lost = made.start.workers[-1]
    answers.refuse = lambda a: not ran if isinstance(a, Fork) else isinstance(a, Reconfigure) and lost in a.setting.workers
    answer = answers.answer

    def survivors(action):
        if isinstance(action, Run):
            ran.append(action)
            return replace(answer(action), setting=moved)
        return answer(action)

    answers.answer = survivors
    assert answers.run(training.return_to(kept, replace(made.start, learning_rate=0.05), "again")) is not None


@pytest.mark.parametrize("validated", [True, False])
def test_a_snapshot_is_about_as_good_as_the_model_that_was_validated_a_little_earlier(validated):
    """Of a model of which nothing was known, nothing could be lost: one that blew up later was kept for 4,000 s."""
    made = of()
    training, answers = Training(made, SystemModel(made)), Answers(made, flat)
    training.gauge.begin(1.0)
    answers.show((0.6, 0.5 if validated else None))  # not at the end of the window: by clock 0
    answers.run(training.run(20))
    kept = answers.run(training.snapshot())
    assert math.isnan(training.level)
    assert kept.level == pytest.approx(training.gauge.level(0.5, math.nan)) if validated else math.isnan(kept.level)


@pytest.mark.parametrize(
    ("every", "seconds", "thinking", "evaluates"),
    [(80, 5.0, 0, 0), (80, 5.0, 7, 0), (80, 0.0, 0, 4), (900, 5.0, 0, 4)],
)
def test_windows_end_at_the_jobs_own_validation_where_evaluations_are_dear(every, seconds, thinking, evaluates):
    """On a hand-written job, evaluations of 60 s at the end of windows of 80 s took 41 % of the time; on another one, which
    validates rarely, those of 42 s at the end of windows of 16 s took 67 %.

    A job that trains on while the tuner thinks, so many pushes, goes on a little after the validation."""
    made = of(evaluate_seconds=seconds)
    training, answers = Training(made, SystemModel(made)), Answers(made, flat)
    answer = answers.answer

    def validated(action):
        if not isinstance(action, Run):
            return answer(action)
        began, found = answers.now, answer(replace(action, clocks=action.clocks + thinking))
        due = range(every, int(answers.now) + 1, every)
        return replace(found, evaluations=tuple(Evaluation(float(n), n, 1.0, float("nan")) for n in due if n > began))

    answers.answer = validated
    answers.run(training.run(every))
    assert training._system.knows
    for _ in range(4):
        answers.run(training.window())
    asked = answers.asked[1:]
    assert sum(isinstance(a, Evaluate) for a in asked) == evaluates
    assert math.isfinite(training.level)
    trained = sum(a.clocks for a in asked if isinstance(a, Run)) * training._system.push_seconds(made.start)
    assert trained >= evaluates * seconds


def test_a_branch_that_the_system_is_still_changing_is_run_until_that_is_done():
    """On `preempted` 307 no other branch could run meanwhile: the tuner gave up, and lost machines were not replaced."""
    made = of()
    training, answers, ran = Training(made, SystemModel(made)), Answers(made, flat), []
    kept = answers.run(training.snapshot())
    answers.refuse = lambda a: isinstance(a, Free | Reconfigure) and len(ran) < 2
    answer = answers.answer

    def changing(action):
        if isinstance(action, Run):
            ran.append(action.branch)
        return answer(action)

    answers.answer = changing
    wanted = replace(made.start, learning_rate=0.05)
    assert answers.run(training.return_to(kept, wanted, "again")) is not None
    assert ran == [0, 0]
    assert training.branch == kept.branch
    assert answers.settings[kept.branch] == wanted


# -------------------------------------------------------------------------------------------------------------- the heat


def test_while_nothing_is_learned_the_hottest_harmless_rate_is_the_best():
    """Noise among windows that have learned nothing chose a rate that would have taken many times the budget."""
    made = of(space=(RATE,))
    draws = np.random.default_rng(0)

    def losses(setting, clocks):
        return (1.0 + 0.1 * draws.standard_normal(clocks)) * (1.0 if setting.learning_rate < 20 else 50.0)

    begun, answers = course(made), Answers(made, losses)
    answers.run(begun.find_heat(begun.heat))
    assert 1.0 < begun.heat.of(begun.training.setting) < 20
    assert begun.hurting > 20


def losses_by_rate(best, dead=math.inf):
    """Mini-batch losses that fall the faster, the nearer the rate is to `best`; from the rate `dead` on, they blow up."""
    seen = {"loss": 1.0}

    def losses(setting, clocks):
        rate = setting.learning_rate
        if rate >= dead:
            return [5.0] * clocks
        seen["loss"] *= math.exp(-0.2 * min(rate / best, 1.0)) if rate <= best else 1.0
        return [seen["loss"]] * clocks

    return losses


def test_the_rise_ends_where_hotter_rates_bring_nothing_more():
    """Rates that brought nothing but did not blow up, either, were doubled on and on, up to seven windows for nothing."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.05, momentum=0.0))
    begun, answers = course(made), Answers(made, losses_by_rate(0.2))
    answers.run(begun.find_heat(begun.heat))
    assert max(s.learning_rate for s in answers.changes()) <= 0.81
    assert begun.training.setting.learning_rate == pytest.approx(0.2)


def test_while_windows_bring_little_the_rate_is_quadrupled():
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.0125, momentum=0.0))
    begun, answers = course(made), Answers(made, losses_by_rate(0.4))
    answers.run(begun.find_heat(begun.heat))
    assert [s.learning_rate for s in answers.changes()][:2] == pytest.approx([0.05, 0.2])
    assert begun.training.setting.learning_rate == pytest.approx(0.4)


def test_a_rate_at_which_the_model_learns_is_doubled_only():
    """A window that brought little, after much had been learned, asked for four times the rate, and that was far too hot."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    glances = iter([0.6, 0.57, 0.55])
    begun, answers = course(made), Answers(made, lambda setting, clocks: [next(glances, 0.9)] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert [s.learning_rate for s in answers.changes()][:2] == pytest.approx([0.2, 0.4])


def test_a_step_by_four_that_blows_up_is_halved():
    """The rate stayed a quarter of the one that had blown up, and the best one may lie between."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.05, momentum=0.0))
    seen = {0.05: 0.98, 0.2: 0.97, 0.8: 5.0, 0.4: 0.8}
    begun = course(made)
    answers = Answers(made, lambda setting, clocks: [seen[round(setting.learning_rate, 6)]] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([0.2, 0.8, 0.2, 0.4, 0.2])
    assert begun.hurting == pytest.approx(0.8 * stress(made.start))


def test_half_of_a_rate_that_has_blown_the_model_up_is_not_held():
    """One window at half of it had looked well, and the next ones lost all that had been learned."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    seen = {0.1: 0.8, 0.2: 0.6, 0.4: 0.5, 0.8: 1.5}
    begun = course(made)
    answers = Answers(made, lambda setting, clocks: [seen[round(setting.learning_rate, 6)]] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.setting.learning_rate == pytest.approx(0.2)
    assert begun.useless == pytest.approx(0.4 * stress(made.start))


def test_a_rate_is_not_halved_because_the_loss_was_above_the_untrained_one_from_the_first_window_on():
    """A linear SVM's hinge loss rises while its accuracy does; half of the best rate was held, for 1.4 times as long."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    begun.gauge.begin(1.0, 0.1)
    answers.show((1.2, 1.2, 0.4), (1.1, 1.1, 0.5), after=(1.2, 1.2, 0.5))
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.setting.learning_rate == answers.changes()[0].learning_rate  # the second window's


@pytest.mark.parametrize("share", [0.01, 10.0])
def test_a_rate_that_seems_to_hurt_is_validated_where_that_takes_little_of_a_window(share):
    """A linear SVM's hinge loss was 1.7 after one window, with half of all samples right; a tenth of the rate was tried."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1.7] * clocks)
    begun.gauge.begin(1.0, 0.1)
    answer = answers.answer
    answers.answer = lambda action: Evaluation(answers.now, 0, 1.6, 0.5) if isinstance(action, Evaluate) else answer(action)
    search = HeatSearch(begun.training, begun.heat, begun.placing.place_for_much)
    seen = answers.run(begun.training.glance())
    begun.training.job = replace(made, evaluate_seconds=share * begun.training.newest.seconds)
    assert search._hurts(seen)
    assert search._hurts(answers.run(search._validated(seen))) == (share > 1)


@pytest.mark.parametrize(("right", "goes_on"), [(0.99, False), (0.5, True)])
def test_the_search_ends_where_a_validation_tells_that_the_target_is_reached(right, goes_on):
    """A model with 99 % right, of 93, was trained hotter until it had 76, as the job validates every 100 pushes."""
    made = of(space=(RATE,), target=replace(job().target, metric="accuracy", value=0.95), evaluate_seconds=0.0)
    begun = course(made)
    answers, found = Answers(made, lambda _setting, clocks: [2.0] * clocks), Evaluation(1.0, 0, 2.0, right)
    turns = answers.answer
    answers.answer = lambda action: found if isinstance(action, Evaluate) else turns(action)
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.has_arrived is not goes_on
    assert bool(answers.changes()) is goes_on


def test_a_heat_that_is_hardly_cooler_is_not_tried():
    """Of a rate that is held, all that momentum adds to it was gone, but for the last digit."""
    made = of(space=(Real("momentum", 0.0, 0.95),), start=replace(job().start, learning_rate=0.1, momentum=0.9))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1.7] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert min(s.momentum for s in answers.changes()) == pytest.approx(0.0)
    assert len({s.momentum for s in answers.changes()}) == 1


@pytest.mark.parametrize(
    ("young", "after", "windows"),
    [
        (0.6, 0.4, 1),
        (0.6, 0.75, 2),  # no longer than going back would lose: a model that needed 300 s for that missed its target
        (0.6, 0.99, 1),  # nothing is left of what was learned: it is given up at once
        (0.84, 0.4, 0),  # so little was learned that a ruined model is soon as good
    ],
)
def test_the_job_goes_on_from_the_hottest_windows_if_that_model_is_soon_as_good_as_before(young, after, windows):
    """It always went back to a snapshot. On `digits` it took 494 s, and 271 s from the model that had been thrown off."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    seen = {0.1: 0.85, 0.2: young, 0.4: 2.0, 0.8: 2.0}
    begun, turns = course(made), {"hot": False}

    def losses(setting, clocks):
        turns["hot"] |= setting.learning_rate > 0.3
        return [after if turns["hot"] and setting.learning_rate < 0.3 else seen[round(setting.learning_rate, 6)]] * clocks

    answers = Answers(made, losses)
    answer = answers.answer

    def validated(action):
        found = answer(action)
        if not isinstance(action, Run):
            return found
        loss = float(found.pushes.loss[-1])
        return replace(found, evaluations=(Evaluation(answers.now, int(answers.now), loss, float("nan")),))

    answers.answer = validated
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.setting.learning_rate == pytest.approx(0.1)  # half of the best: twice of that blew up
    assert (begun.training.branch == 0) is (windows == 1 and after < young)
    assert sum(isinstance(a, Run) and a.branch == 0 for a in answers.asked) == 3 + windows


def test_after_a_trial_that_failed_the_model_is_kept_if_it_is_soon_as_good():
    holding, answers = holding_of([-0.5, -0.6, -0.7, -0.8])
    losses, answer = iter([9.0, 0.7, math.exp(-0.9)]), answers.answer
    holding._parts = RuleParts(cost_rule=False)

    def measured(action):
        return Evaluation(answers.now, 0, next(losses), float("nan")) if isinstance(action, Evaluate) else answer(action)

    answers.answer = measured
    answers.run(holding.try_hotter(-0.8, -9.0))
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([0.2, 0.1])
    assert all(a.branch == 0 for a in answers.asked if isinstance(a, Run))
    assert sum(isinstance(a, Run) for a in answers.asked) == 3


# ------------------------------------------------------------------------------------------------------- what is expected


@pytest.mark.parametrize(("factor", "moved"), [(1e-3, True), (0.6, False), (30.0, True)])
def test_the_search_begins_at_a_probable_rate(factor, moved):
    """From a start that was far too low, the rate was raised window by window for a third of the job."""
    made = of(space=(RATE,))
    median, deviation = course(made, prior=True).heat.expected
    rate = factor * median / stress(made.start)
    made = replace(made, start=replace(made.start, learning_rate=rate, momentum=0.0))
    begun, answers = course(made, prior=True), Answers(made, flat)
    answers.run(begun.begin())
    answers.run(begun.measure())
    assert begun.heat.of(begun.training.setting) == pytest.approx(
        median * math.exp(-deviation / 2) if moved else factor * median
    )
    assert any("other jobs" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is moved


def test_a_probable_rate_that_hurts_is_quartered_and_not_divided_by_ten():
    made = of(space=(RATE,))
    median = course(made, prior=True).heat.expected.median
    made = replace(made, start=replace(made.start, learning_rate=median, momentum=0.0))
    begun = course(made, prior=True)
    answers = Answers(made, lambda setting, clocks: [9.0 if setting.learning_rate > median / 2 else 0.8] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert answers.changes()[0].learning_rate == pytest.approx(median / 4)


def test_a_rate_at_which_accuracy_rises_does_not_hurt_because_the_loss_rises_too():
    """A linear SVM's loss rose to 1.5 times the untrained one while its accuracy doubled; the job came down to a decade."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=1.0, momentum=0.0))
    for accuracy, hurt in ((0.2, False), (0.1, True)):
        begun, answers = course(made), Answers(made, lambda setting, clocks: [1.5] * clocks)
        begun.gauge.begin(1.0, 0.1)
        answer = answers.answer
        validation = (Evaluation(0.0, 0, 1.5, accuracy),)

        def validated(action, answer=answer, validation=validation):
            return replace(answer(action), evaluations=validation) if isinstance(action, Run) else answer(action)

        answers.answer = validated
        answers.run(begun.find_heat(begun.heat))
        assert any("worse than untrained" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is hurt


def test_jobs_without_a_free_rate_expect_nothing():
    made = of(space=(Choice("policy", ("bsp", "asp", "ssp")),))
    assert course(made, prior=True).heat.expected is None


@pytest.mark.parametrize(("batches", "hurt"), [(1, False), (math.inf, True)])
def test_a_model_is_not_called_worse_than_an_untrained_one_that_a_single_mini_batch_has_told(batches, hurt):
    """The first mini-batch had half of the others' loss by chance, so the rate came down by decades."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=1.0, momentum=0.0))
    begun, draws = course(made), np.random.default_rng(0)
    begun.gauge.begin(0.5, batches=batches)
    answers = Answers(made, lambda setting, clocks: list(np.exp(0.35 * draws.standard_normal(clocks))))
    answers.run(begun.find_heat(begun.heat))
    assert any("worse than untrained" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is hurt


def test_mini_batches_do_not_choose_a_heat_that_validation_calls_worse():
    """A hot rate had damaged the model, a few lucky mini-batches chose it all the same, and it never reached its target."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    answers.show((0.9, 0.9), (0.8, 0.8), (0.7, 0.7), (0.68, 1.2), (0.66, 1.1), after=(5.0, 5.0))
    answers.run(begun.find_heat(begun.heat))
    tried = [s.learning_rate for s in answers.changes()]
    assert begun.training.setting.learning_rate == pytest.approx(tried[1])  # with a loss of 0.7


def test_the_first_validation_of_all_does_not_choose_a_heat_that_has_blown_the_model_up():
    """The window before had not been validated, so any validation at all was taken for a better model."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    answers.show((0.6, None), (3.0, 5.0), after=(0.6, None))
    answers.run(begun.find_heat(begun.heat))
    assert max(s.learning_rate for s in answers.changes()) == pytest.approx(0.2)
    assert begun.hurting == pytest.approx(0.2 * stress(made.start))


def test_policies_are_not_tried_from_the_start_again_because_little_was_learned():
    """Each step down the ladder of policies cost a new start of the job, which one slow window had asked for."""
    made = of(space=(Choice("policy", ("bsp", "asp", "ssp")),), start=replace(job().start, policy="asp"))
    begun, answers = course(made), Answers(made, flat)
    begun.training.first = answers.run(begun.training.snapshot())
    assert isinstance(begun.heat, PolicyHeat)
    answers.run(begun.find_heat(begun.heat))
    assert {s.policy for s in answers.changes()} <= {"asp"}


def test_a_model_that_is_lost_is_left_outwards_by_decades_and_not_downwards_only():
    made = of(space=(RATE,))
    begun = course(made)
    top = replace(made.start, learning_rate=0.1, momentum=0.0)
    found, decades = [], iter((0.1, 10.0, 0.01, 100.0))
    begun.hurting = 5.0
    while (setting := begun.elsewhere(begun.heat, top, decades)) is not None:
        found.append(setting.learning_rate)
    assert found == pytest.approx([0.01, 1.0, 0.001])


@pytest.mark.parametrize(("knobs", "installs"), [((RATE,), True), ((Integer("transfer_bits", 16, 32),), False)])
def test_a_policy_that_no_knob_names_is_installed_where_a_rate_makes_up_for_staleness(knobs, installs):
    """Where the rate was free and policies could be installed, all workers waited for three stragglers to the end."""
    made = of(space=knobs, installs_policies=True)
    start = replace(made.start, policy="bsp")
    made = replace(made, start=start, space=replace(made.space, base=start))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.begin())
    assert (begun.training.setting.policy == "asp") is installs
    assert any(isinstance(a, Install) for a in answers.asked) is installs


@pytest.mark.parametrize(("share", "asks"), [(0.0001, True), (0.05, False)])
def test_the_untrained_model_is_evaluated_only_where_that_is_cheap(share, asks):
    made = of(evaluate_seconds=share * 1e5)
    begun, answers = JointCourse(made, RuleParts()), Answers(made, flat)
    answers.run(begun.begin())
    answers.run(begun.placing.measure())
    assert any(isinstance(a, Evaluate) for a in answers.asked) is asks
    assert begun.gauge.untrained == pytest.approx(1.0, rel=0.11)


# ------------------------------------------------------------------------------------------------------------- the drift


def test_a_slow_drift_that_is_no_noise_and_reaches_the_goal_has_not_stopped():
    times = [10.0 * i for i in range(1, 101)]
    slow = [-0.001 * i for i in range(100)]
    assert falls(slow)
    assert not stopped(times, slow, goal=-1.0, budget_seconds=20_000.0)
    assert stopped(times, slow, goal=-9.0, budget_seconds=20_000.0)
    assert seconds_left(times, slow, -1.0, 20_000.0).mean == pytest.approx(9020.0, rel=1e-3)
    assert str(seconds_left(times, slow[::-1], -1.0, 2_000.0)) == "1000 +- 1000 s"


@pytest.mark.parametrize(("drift", "lost"), [(0.0, True), (0.004, False)])
def test_a_model_with_little_progress_is_lost_only_without_drift(drift, lost):
    assert is_lost([1.0 - drift * i for i in range(10)], blank=1.0, goal=-2.0) is lost


def test_a_dead_model_that_gives_every_class_its_frequency_is_lost():
    """It was a little better than the untrained one, so the job held it until the end of its budget."""
    gauge = Gauge(replace(job().target, metric="loss", value=0.1))
    gauge.begin(2.67)
    chance = gauge.level(math.log(10), float("nan"))
    assert chance < gauge.untrained_level - HELPED_NATS
    assert is_lost([chance + 0.001 * (-1) ** i for i in range(10)], gauge.untrained_level, gauge.goal(2.0))


def test_a_young_model_that_has_lost_half_of_what_it_had_learned_is_too_hot():
    """It had learned 0.4 nats and lost them all. That is no rise of 0.45 nats, so the job held the rate for 770 s."""
    assert has_lost_half([-0.4, -0.1, -0.05], before=-0.4, blank=0.05, deviation=0.05)
    assert not has_lost_half([-0.4, -0.1, -0.35], before=-0.4, blank=0.05, deviation=0.05)  # one window only
    assert not has_lost_half([-0.4, -0.1, -0.05], before=-0.4, blank=0.05, deviation=0.2)  # noise
    assert not has_lost_half([-2.4, -2.1, -2.0], before=-2.4, blank=0.05, deviation=0.05)


def test_a_model_that_is_lost_again_is_not_sent_back_to_the_heat_that_has_lost_it():
    """The decades counted from the newest attempt, so every second one was the first heat again."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=1.0, momentum=0.0))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1.0] * clocks)
    begun.training.first = answers.run(begun.training.snapshot())
    answer = answers.answer

    def ending(action):
        found = answer(action)
        return replace(found, status="budget") if isinstance(action, Run) and answers.now > 20_000 else found

    answers.answer = ending
    with pytest.raises(JobOver):
        answers.run(begun.learn(begun.heat))
    again = [a for a in answers.asked if isinstance(a, Reconfigure) and "again from the start" in a.reason]
    assert [a.setting.learning_rate for a in again[:4]] == pytest.approx([0.1, 10.0, 0.01, 100.0])


def test_what_an_untrained_model_gains_by_giving_every_class_its_frequency_is_not_learned():
    """An untrained network was sure of wrong answers, so a model that had died was far better, and was held for good."""
    gauge = Gauge(replace(job().target, metric="loss", value=0.265))
    gauge.begin(2.81, 0.1)
    assert gauge.blank == gauge.untrained
    gauge.see(1.6, 0.51)
    gauge.see(2.2, 0.26)  # ten classes, and little is learned; but it is right more often than it says
    assert gauge.blank == gauge.untrained
    gauge.see(2.303, 0.103)
    assert gauge.blank == 2.303
    assert gauge.blank_level == gauge.level(2.303, 0.103) < gauge.untrained_level
    assert not gauge.has_learned(math.log(2.303 / 2.81))
    assert gauge.has_learned(math.log(1.6 / 2.81))
    assert gauge.has_learned(0.0, gauge.level(1.6, 0.51) - gauge.untrained_level)
    assert is_lost([gauge.level(2.31, 0.1)] * 10, gauge.blank_level, gauge.goal(2.31))


def test_the_hinge_of_a_model_that_is_often_right_is_not_taken_for_that_of_a_blank_one():
    gauge = Gauge(replace(job().target, metric="accuracy", value=0.9))
    gauge.begin(1.0, 0.12)
    for loss, accuracy in ((0.9, 0.3), (0.7, 0.6)):  # exp(-loss) is higher than the accuracy
        gauge.see(loss, accuracy)
    assert gauge.blank == 1.0


def test_a_model_that_has_died_is_given_up_and_not_tried_hotter():
    """Its levels stood still, so noise did not seem to hold it up, and four hotter rates were tried one after the other."""
    target = replace(job().target, metric="loss", value=0.265)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.2, momentum=0.0))
    begun, answers = JointCourse(made, RuleParts(prior=False)), Answers(made, lambda setting, clocks: [2.3] * clocks)
    begun.gauge.begin(2.81, 0.1)
    begun.gauge.see(2.303, 0.1)
    seen = [(2.17, 0.24), (2.18, 0.26), (1.86, 0.43), (1.61, 0.51), *[(2.31, 0.1), (2.308, 0.103)] * 40]
    turns, answer = iter(seen), answers.answer

    def measured(action):
        if isinstance(action, Run) and answers.now > 60 * 16:
            return replace(answer(action), status="budget")
        return Evaluation(answers.now, 0, *next(turns)) if isinstance(action, Evaluate) else answer(action)

    answers.answer = measured
    with suppress(JobOver):
        answers.run(Holding(begun.training, begun.heat, RuleParts(), begun.placing.place_for_much).run())
    died = [a for a in answers.asked if isinstance(a, Reconfigure) and "too hot" in a.reason]
    assert died
    assert not any("on trial" in a.reason and "chance 0.7" in a.reason for a in answers.asked if isinstance(a, Reconfigure))


# ------------------------------------------------------------------------------------------------------------ the system


@pytest.mark.parametrize(("compute", "goes_on"), [(math.nan, False), (0.04, True)])
def test_where_every_change_is_a_restart_nothing_is_changed_before_a_saving_can_be_expected(compute, goes_on):
    """On tables of recorded runs joint paid for a restart before its first window, and for up to ten trials after it."""
    made = of(methods=("checkpoint",))
    answers = Answers(made, flat)
    answer = answers.answer

    def measured(action):
        if not isinstance(action, Run):
            return answer(action)
        now = answers.now
        answers.now += action.clocks
        made_window = window(made, [1.0] * action.clocks, now + np.arange(1.0, action.clocks + 1), compute=compute)
        return replace(made_window, status="budget" if answers.now > 2_000 else "running")

    answers.answer = measured
    answers.run(JointCourse(made, RuleParts()).play())
    assert isinstance(answers.asked[0], Run)
    assert answers.asked[0].clocks == 1
    assert any(isinstance(a, Reconfigure) for a in answers.asked) is goes_on
    assert goes_on or all(isinstance(a, Run) for a in answers.asked)


def test_a_job_whose_machine_is_about_to_leave_is_moved_although_that_gains_nothing():
    """Every change of the rate is refused as long as the setting names a machine that is not available."""
    made = of(space=tuple(Choice(f"role/{n.name}", ("worker", "server", "both", "idle")) for n in job().nodes))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    begun.training.available -= {made.start.workers[-1]}
    answers.run(begun.placing.place())
    assert answers.changes()
    assert made.start.workers[-1] not in begun.training.setting.workers


@pytest.mark.parametrize(("pace", "windows"), [(1.0, 0), (1.4, 0), (3.0, 1), (0.5, 1)])
def test_machines_are_chosen_again_where_pushes_have_become_much_slower_or_faster(pace, windows):
    """The links were throttled a minute after the machines had been chosen, and every push took eight times as long."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    chosen = []

    def place():
        chosen.append(answers.now)
        yield from begun.placing.place_anew()

    answer = answers.answer

    def slower(action):
        found = answer(action)
        return replace(found, end_seconds=found.start_seconds + pace * found.clocks) if isinstance(action, Run) else found

    holding = Holding(begun.training, begun.heat, RuleParts(), place)
    begun.training.usual_push_seconds = 1.0
    answers.answer = slower
    for _ in range(3):
        holding.levels, holding.times = [], []
        answers.run(holding.window())
    assert len(chosen) == windows


@pytest.mark.parametrize("metric", ["clocks", "samples"])
def test_of_a_job_that_counts_its_work_it_is_known_how_long_it_lasts(metric):
    """A fifth of the budget was expected to be left, however little was left to count."""
    start = job().start
    counted = 1 if metric == "clocks" else start.batch_size
    made = of(target=replace(job().target, metric=metric, value=200.0 * counted), start=replace(start, loads=()))
    begun, answers = course(made), Answers(made, flat)
    assert begun.placing.seconds_left() == 0.2 * made.budget_seconds
    answers.run(begun.training.run(40))
    assert begun.placing.seconds_left() == pytest.approx(160 * begun.system.push_seconds(made.start))


def test_what_cruise_wants_is_changed_by_the_cheapest_method_that_is_not_refused():
    """Its migration moves training data, too: on one arena that took the whole budget, where a relocation takes 3.5 s."""
    made = of(methods=("checkpoint", "migrate", "relocate"))
    other = replace(made.start, learning_rate=0.3)

    def refuses_all_but(method):
        return Answers(made, flat, lambda a: isinstance(a, Reconfigure) and a.method != method)

    def wanting():
        assert (yield from Run(clocks=1)).clocks == 1
        assert (yield from Reconfigure(other, "migrate")) == DONE

    for method, asked in (("relocate", 1), ("migrate", 2), ("checkpoint", 3)):
        answers = refuses_all_but(method)
        answers.run(changed_cheaply(made, wanting()))
        assert [a.method for a in answers.asked[1:]] == ["relocate", "migrate", "checkpoint"][:asked]
        assert answers.settings[0] == other
    with pytest.raises(Rejected, match="not now"):
        refuses_all_but("none").run(changed_cheaply(made, wanting()))


def test_a_change_of_the_system_is_judged_by_pushes_that_began_after_it():
    made = of(space=tuple(Choice(f"role/{n.name}", ("worker", "server", "both", "idle")) for n in job().nodes))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    asked = len(answers.asked)
    begun.training._placed_seconds = answers.now + math.ceil(1.5 * len(made.start.workers))  # it takes so long
    answers.run(begun.placing.measure())
    assert len(answers.asked) == asked + 2


def test_without_snapshots_no_branch_is_forked():
    made = of(space=(RATE,))
    begun, answers = JointCourse(made, RuleParts(snapshots=False)), Answers(made, flat)
    begun.gauge.begin(1.0)
    answers.run(begun.find_heat(begun.heat))
    assert not any(isinstance(a, Fork | Free) for a in answers.asked)


def test_the_heat_that_is_held_follows_the_job_to_other_machines():
    """What was held named a machine that had left, so every later change of the rate was refused, or moved the job back."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    moved = replace(made.start, workers=made.start.workers[:-1], learning_rate=0.2)
    holding = Holding(begun.training, begun.heat, RuleParts(), lambda: begun.training.change(moved, "a machine has left"))
    begun.training.cluster_changed = True
    answers.run(holding.window())
    assert holding.held == holding.top
    assert holding.held.workers == moved.workers
    # One worker less of three, and a gradient is less old: the rate may be higher.
    assert holding.held.learning_rate == pytest.approx(made.start.learning_rate * 3 / 2)


@pytest.mark.parametrize(("found", "holds"), [(0.05, True), (0.2, False)])
def test_a_target_that_is_reached_is_held_until_the_job_validates(found, holds):
    """A model with 94 % right was trained on as hot as before, and had 34 % when the job looked, which it does rarely."""
    made = of(space=(RATE,), start=replace(job().start, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    training, held = begun.training, made.start.learning_rate
    training._check_clocks, training.pushes = 1000, 300
    answers.show(after=(0.5, None), evaluated=found)
    holding = Holding(training, begun.heat, RuleParts(), begun.placing.place)
    answers.run(holding.window())
    assert training.has_arrived == holds
    asked, answer = len(answers.asked), answers.answer

    def validating(action):
        made = answer(action)
        due = isinstance(action, Run) and training.pushes + action.clocks == 1000
        return replace(made, evaluations=(Evaluation(made.end_seconds, 1000, 0.2, math.nan),)) if due else made

    answers.answer = validating
    answers.run(holding._hold_the_target())
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([held / 10, held])
    assert training.pushes == 1000
    runs = [a.clocks for a in answers.asked[asked:] if isinstance(a, Run)]
    assert len(runs) > 1  # machines may come and go meanwhile


def test_a_target_that_is_reached_is_not_evaluated_again_while_the_job_may_validate_at_any_time():
    """Evaluations of 9 s followed windows of 15 s for 300 s, as it was not known after how many pushes the job validates."""
    made = of(space=(RATE,), start=replace(job().start, momentum=0.0), evaluate_seconds=0.0)
    training, answers = Training(made, SystemModel(made)), Answers(made, flat)
    training.gauge.begin(1.0)
    for _ in range(3):
        answers.run(training.toward_validation())
    assert [type(a) for a in answers.asked] == [Run] * 3


WAITING = (RATE, Choice("policy", ("bsp", "asp")), Integer("staleness", 0, 7))


@pytest.mark.parametrize(
    ("space", "slower", "tried", "stays"),
    [
        (WAITING, 0.7, True, True),
        (WAITING, 1.1, True, False),
        (WAITING[1:], 0.7, False, False),  # no rate is free that could be higher
        (WAITING[:1], 0.7, False, False),
    ],
)
def test_all_workers_wait_for_each_other_where_that_takes_no_time(space, slower, tried, stays):
    """Nobody waited in five drawn jobs whose best fixed settings let all wait: they took 1.7 to 3.6 times as long."""
    made = of(space=space, start=replace(job().start, policy="asp", momentum=0.0))
    begun, answers = course(made, prior=True), Answers(made, flat)
    answer, start = answers.answer, made.start

    def paced(action):
        found, policy = answer(action), answers.settings[0].policy
        if not isinstance(action, Run):
            return found
        return replace(found, end_seconds=found.start_seconds + found.clocks * (slower if policy == "bsp" else 1.0))

    answers.answer = paced
    answers.run(begun.placing.measure())
    before = begun.heat.expected
    answers.run(begun.placing.wait())
    assert any(s.policy == "bsp" for s in answers.changes()) is tried
    assert begun.training.setting == (replace(start, policy="bsp") if stays else start)
    assert begun.heat.expected == before
    if stays:  # the same rate is less hot
        hot = begun.heat.of(begun.training.setting)
        assert hot == pytest.approx(begun.heat.of(start) / len(start.workers) ** 0.5)
        assert begun.training.usual_push_seconds == begun.training.push_seconds


def test_a_first_validation_that_is_worse_than_the_untrained_model_is_not_better():
    """On `tf36-logr`, twice as many workers and twice again were held, as nothing had been validated before."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    begun.gauge.begin(1.0)
    answers.show((0.99, None), (1.5, 1.4), (3.0, 2.9))
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.setting.learning_rate <= made.start.learning_rate


@pytest.mark.parametrize(("trained", "goes_on"), [(0.4, True), (0.69, False), (1.0, False)])
def test_a_validation_that_is_worse_by_noise_does_not_undo_a_clear_fall_of_the_loss(trained, goes_on):
    """Logistic regression had 58 % right, and 44 % one window later, while both of its losses fell: the rate was halved.

    A fall within the noise is none: a perceptron went on at twice the best rate after one, and took twice as long.
    """
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(replace(RATE, high=1.0),), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made, prior=True), Answers(made, flat)
    begun.gauge.begin(1.0, 0.1)
    answers.show((0.7, 0.7, 0.58), (trained, 0.6, 0.46), after=(9.0, 9.0, 0.1), spread=0.3)
    answers.run(HeatSearch(begun.training, begun.heat, begun.placing.place_for_much).run())
    assert (max(s.learning_rate for s in answers.changes()) > 0.3) is goes_on


def test_the_rate_follows_the_mini_batch_that_is_chosen():
    """A rate that large mini-batches had learned well at blew the model up where small ones were chosen instead."""
    made = of(space=(RATE, Choice("batch_size", (4, 16))), start=replace(job().start, policy="asp", momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    answer = answers.answer

    def quick(action):  # next to transfers, a mini-batch takes no time
        found = answer(action)
        if not isinstance(action, Run):
            return found
        return replace(found, pushes=found.pushes._replace(compute_seconds=0.01 * found.pushes.compute_seconds))

    answers.answer = quick
    answers.run(begun.placing.measure())
    answers.run(begun.placing.place())
    chosen = begun.training.setting
    assert (made.start.batch_size, chosen.batch_size) == (4, 16)
    assert chosen.learning_rate == pytest.approx(made.start.learning_rate * 2)  # the square root of four times the samples
    assert begun.heat.of(chosen) == pytest.approx(begun.heat.of(made.start))


def noisy_validations(made, answers, levels):
    """Every evaluation gives the loss that `levels(setting)` tells."""
    answer = answers.answer

    def measured(action):
        if isinstance(action, Run) and answers.now > 5_000:
            return replace(answer(action), status="budget")
        if isinstance(action, Evaluate):
            return Evaluation(answers.now, 0, levels(answers.settings[action.branch]), float("nan"))
        return answer(action)

    answers.answer = measured


def holding_of(levels, rate=0.1, goal=0.001):
    """A job at this rate whose windows had these `levels`, a second each."""
    target = replace(job().target, metric="loss", value=goal)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=rate, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    holding = Holding(begun.training, begun.heat, RuleParts(), begun.placing.place_anew)
    holding.levels, holding.times = list(levels), [float(i + 1) for i in range(len(levels))]
    holding._course, holding._losses = list(levels), [math.exp(level) for level in levels]
    holding.low = min(levels)
    return holding, answers


@pytest.mark.parametrize(("rate", "goes_back"), [(0.1, True), (0.001, False)])
def test_a_job_at_its_lowest_heat_does_not_go_back_to_a_snapshot(rate, goes_back):
    """At a rate of 30 that was held, with no momentum, it went back four times, to train the same windows again."""
    holding, _ = holding_of([-2.0, -2.0, -1.0, -1.0, -1.0], rate)
    assert holding._is_too_hot() is goes_back


def test_where_nothing_is_learned_under_a_held_rate_the_job_goes_on_as_it_began():
    """More local steps were to save a third of the time, and ruined the model for good: 70,000 s and no target, where the
    start takes 16,752."""
    knobs = (Real("momentum", 0.0, 0.9), Choice("batch_size", (4, 16)))
    made = of(space=knobs, start=replace(job().start, batch_size=4, loads=(), momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    noisy_validations(made, answers, lambda setting: 5.0 if setting.batch_size == 16 else 0.5)
    begun.training.first = answers.run(begun.training.snapshot())
    answers.run(begun.training.change(replace(made.start, batch_size=16), "a choice of the system"))
    with pytest.raises(JobOver):
        answers.run(begun.learn(begun.heat))
    assert [
        a.setting.batch_size for a in answers.asked if isinstance(a, Reconfigure) and "as the job began" in a.reason
    ] == [4]
    assert begun.training.setting.batch_size == 4
    assert begun.placing.stays


@pytest.mark.parametrize(("policy", "staleness", "again"), [("bsp", 0, True), ("asp", 0, False), ("admit", 16, False)])
def test_a_start_that_had_all_workers_wait_is_gone_back_to(policy, staleness, again):
    """Where nobody had waited before, either, the same would happen once more: 440 s of `ages` 1."""
    start = replace(job().start, policy=policy, staleness=staleness, loads=())
    made = of(space=(Choice("policy", ("bsp", "asp")),), start=start, installs_policies=True)
    begun, answers = course(made), Answers(made, flat)
    begun.training.first = answers.run(begun.training.snapshot())
    answers.run(begun.training.change(replace(start, policy="asp", staleness=0), "nobody waits"))
    assert answers.run(begun.as_begun()) is again
    assert begun.training.setting.policy == (policy if again else "asp")


def test_a_model_that_has_died_begins_again_as_the_job_began_where_mini_batches_and_local_steps_are_free():
    """Two local steps killed a network that had 32 % right by then; `joint` looked on for 550 s, and `fixed` takes 572."""
    knobs = (Choice("batch_size", (4, 8)), Integer("local_steps", 1, 4))
    made = of(space=knobs, start=replace(job().start, batch_size=4, loads=()))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.keep_untrained())
    answers.run(begun.training.change(replace(made.start, local_steps=2), "a choice of the system"))
    answers.show(*[(1.0, 1.0)] * 3, (0.6, 0.6), after=(1.0, 1.0))
    refuse, answers.refuse = answers.refuse, lambda action: len(answers.asked) > 80 or refuse(action)
    with pytest.raises(JobOver):
        answers.run(begun.go_on())
    again = [a.setting.local_steps for a in answers.asked if isinstance(a, Reconfigure) and "as the job began" in a.reason]
    assert again == [1]


def test_where_only_places_are_free_a_model_is_given_up_after_ten_validations_without_progress():
    """Fewer workers were tried after a fifth of the budget, which was too late for `preempted` 9."""
    made = of(space=tuple(Choice(f"role/{n.name}", ("worker", "server")) for n in job().nodes))
    begun, answers = course(made), Answers(made, flat)
    answer, validations = answers.answer, []

    def validated(action):
        found = answer(action)
        if not isinstance(action, Run):
            return found
        validations.append(answers.now)
        over = "budget" if len(validations) > 14 else "running"
        return replace(found, evaluations=(Evaluation(answers.now, action.clocks, 1.0, math.nan),), status=over)

    answers.answer = validated
    begun.training.first = answers.run(begun.training.snapshot())
    with pytest.raises(JobOver):
        answers.run(begun.go_on())
    first = next(i for i, a in enumerate(answers.asked) if isinstance(a, Reconfigure) and "nothing was learned" in a.reason)
    assert sum(isinstance(a, Run) for a in answers.asked[:first]) == 10
    assert len(answers.asked[first].setting.workers) < len(made.start.workers)


def test_a_level_that_stands_still_in_the_last_quarter_has_not_done_so_in_half_of_the_time():
    """`tf36-logr` halved its workers four times because no drift was left for a moment."""
    times = [float(i + 1) for i in range(100)]
    levels = [-0.02 * min(i, 70) for i in range(100)]
    assert stopped(times, levels, goal=-9.0, budget_seconds=200.0)
    assert not stopped(times, levels, goal=-9.0, budget_seconds=200.0, share=0.5)


@pytest.mark.parametrize(("began", "windows"), [(10.0, 1), (10_000.0, 10)])
def test_a_heat_that_is_cooled_is_held_for_a_share_of_the_jobs_time(began, windows):
    """Late in a job, cooling by halves, window by window, was over before anything was shed: `learning` 306 missed."""
    holding, answers = holding_of([-0.5, -0.6, -0.7, -0.8])
    answers.now = holding._training.seconds = began
    answers.run(holding._shed(holding.held, "now", -9.0))
    runs = [isinstance(a, Run) for a in answers.asked]
    first, second, *_ = (at for at, a in enumerate(answers.asked) if isinstance(a, Reconfigure))
    assert sum(runs[first:second]) == windows


@pytest.mark.parametrize("cooled", [1.0, 0.6])
def test_where_no_drift_is_left_the_job_goes_on_as_hot_as_it_ever_served_after_cooling(cooled):
    holding, answers = holding_of([0.0] * 4)
    answer = answers.answer
    answers.answer = lambda a: Evaluation(answers.now, 0, cooled, math.nan) if isinstance(a, Evaluate) else answer(a)
    holding._kept = answers.run(holding._training.snapshot())
    answers.run(holding._cool(0.0, -9.0, "no drift is left", stop=True))
    assert not holding.ended
    assert holding.held == holding.top == holding._training.setting


@pytest.mark.parametrize("near", [True, False])
def test_the_rate_of_the_start_is_held_while_it_brings_the_target_near(near):
    """A job that was over after two rounds took three times as long: a rate that others had liked spoilt its model."""
    made = of(space=(RATE,), start=replace(job().start, momentum=0.0))
    median = course(made, prior=True).heat.expected.median
    made = replace(made, start=replace(made.start, learning_rate=0.1 * median / stress(made.start)))
    answers = Answers(made, flat)

    def answer(action):
        if not isinstance(action, Run):
            return Answers.answer(answers, action)
        now = answers.now + np.arange(1.0, action.clocks + 1)
        made_window = window(made, np.exp(-now / 5) if near else np.ones(action.clocks), now)
        answers.now += action.clocks
        return replace(made_window, status="target" if answers.now > 12 else "running")

    answers.answer = answer
    answers.run(JointCourse(made, RuleParts()).play())
    assert any("other jobs" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is not near


def test_a_start_that_spoils_the_model_is_left_from_the_untrained_one():
    made = of(space=(RATE,), start=replace(job().start, momentum=0.0))
    median = course(made, prior=True).heat.expected.median
    made = replace(made, start=replace(made.start, learning_rate=1.5 * median / stress(made.start)))
    begun, answers = course(made, prior=True), Answers(made, lambda setting, clocks: [9.0] * clocks)
    begun.training.first = kept = answers.run(begun.training.snapshot())
    answers.run(begun.measure())
    assert begun.training.branch == kept.branch
    assert begun.heat.of(begun.training.setting) == pytest.approx(1.5 / 4 * median)


@pytest.mark.parametrize(
    ("drift", "elapsed", "expected"), [(100.0, 100.0, 100.0), (1e6, 100.0, 631.0), (1e6, 9_900.0, 100.0)]
)
def test_a_job_is_likely_to_last_about_as_long_as_it_has(drift, elapsed, expected):
    """What the drift of some windows told of the seconds left was wrong by a factor of five."""
    assert likely_seconds(SecondsLeft(drift, drift), elapsed, 10_000.0) == pytest.approx(expected, rel=0.01)


def test_a_heat_that_was_left_as_too_hot_is_less_likely_to_serve():
    """A rate that the job had just come down from was tried again: many other jobs have their best one above it."""
    holding, answers = holding_of([-0.3, -0.5, -0.7, -0.9])
    before, chance = holding.held, holding._chance(holding.held)
    answers.run(holding._step_back())
    assert holding._chance(before) == pytest.approx(chance / 4)


@pytest.mark.parametrize(("away", "tried"), [(0.1, False), (3.0, True)])
def test_nothing_hotter_is_tried_where_the_goal_is_reached_before_the_trial_ends(away, tried):
    """110 +- 9 s before its target, `learning` 309 began a trial of 180 s, which failed and threw the model off."""
    levels = [-0.2 * i for i in range(8)]
    holding, _ = holding_of(levels)
    holding.times = [100.0 + i for i in range(8)]
    assert (holding._trial(holding._drift(levels[-1] - away)) is not None) is tried


@pytest.mark.parametrize(("away", "swings", "likely"), [(300.0, 1e-4, True), (3.0, 1e-4, False), (300.0, 0.1, False)])
def test_a_hotter_rate_may_serve_where_a_drift_without_noise_leads_nowhere(away, swings, likely):
    """Ratings were hardly learned for 3,700 s at an eighth of a good rate: the chance of a hotter one was taken for 0.18,
    as a window of the search had blown the model up, while the drift told that the budget would not do."""
    levels = [-0.02 - 0.001 * i + swings * (-1) ** i for i in range(12)]
    holding, _ = holding_of(levels)
    here = holding._heat.of(holding.held)
    holding._heat, holding._useless = replace(holding._heat, expected=Expected(here, 1.0)), 2 * here
    trial = holding._trial(holding._drift(levels[-1] - away))
    assert (trial is not None and "chance 0.49" in trial.why) is likely


@pytest.mark.parametrize(("fall", "cooled"), [(0.1, False), (0.01, True)])
def test_a_job_whose_drift_arrives_as_soon_is_not_cooled(fall, cooled):
    """A job three windows from its target was cooled for six windows, which it did not reach, and then for five again."""
    noise = [0.0, 0.1, -0.1, 0.05, -0.05, 0.1, -0.1, 0.0]
    levels = [-4.0 - fall * i + x for i, x in enumerate(noise)]
    goal = math.exp(levels[-1] - 0.05) / 0.1  # a level of 0.05 less
    holding, answers = holding_of(levels, goal=goal)
    turns = answers.answer

    def ending(action):
        found = turns(action)
        return replace(found, status="budget") if isinstance(action, Run) else found

    answers.answer = ending
    with suppress(JobOver):
        answers.run(holding._decide())
    assert any("cooled" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is cooled


def test_levels_that_cannot_be_measured_tell_no_time():
    assert seconds_left([1.0, 2.0, 3.0], [float("nan")] * 3, 0.0, 10.0).mean == 7.0


def test_a_trial_that_fails_clearly_is_not_made_again():
    """The same rate was tried three times, and each trial cost a twentieth of the run."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [0.5] * clocks)
    answer = answers.answer

    def measured(action):
        hot = answers.settings[action.branch].learning_rate > 0.15 if isinstance(action, Evaluate) else False
        return Evaluation(0.0, 0, 3.0 if hot else 0.5, float("nan")) if isinstance(action, Evaluate) else answer(action)

    answers.answer = measured
    holding = Holding(begun.training, begun.heat, RuleParts(cost_rule=False), begun.placing.place_anew)
    level = begun.gauge.level(0.5, float("nan"))
    for _ in range(3):
        holding.levels, holding.times, holding.low = [level] * 4, [1.0, 2.0, 3.0, 4.0], level
        answers.run(holding.try_hotter(level, -9.0))
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([0.2, 0.1])
    assert holding.hurting == pytest.approx(0.2 * stress(made.start))


@pytest.mark.parametrize(("after", "held"), [(0.8, 0.2), (1.0, 0.1)])
def test_a_trial_that_unlearns_what_was_learned_has_failed(after, held):
    """A hot trial killed the model. That was within the tolerance of noise, so it stayed,
    and so did every hotter trial after it."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun = course(made)
    begun.gauge.begin(1.0, 0.1)
    answers = Answers(made, lambda setting, clocks: [after] * clocks)
    answer = answers.answer
    measured = Evaluation(0.0, 0, after, 0.1 if after == 1.0 else 0.25)
    answers.answer = lambda action: measured if isinstance(action, Evaluate) else answer(action)
    holding = Holding(begun.training, begun.heat, RuleParts(cost_rule=False), begun.placing.place_anew)
    levels = [begun.gauge.level(0.8, 0.17 + 0.01 * i) for i in range(4)]
    holding.levels, holding.times, holding.low = levels, [1.0, 2.0, 3.0, 4.0], levels[-1]
    answers.run(holding.try_hotter(levels[-1], -2.0))
    assert holding.held.learning_rate == pytest.approx(held)
    assert holding.top == holding.held  # what the job goes back to where the drift stops
    assert holding.low == levels[-1] or after < 1.0


def test_the_untrained_loss_is_known_where_a_loss_of_machines_took_every_first_minibatch():
    """All workers then begin their second one: no push has clock 0, and a window after that had no loss to compare with."""
    made = job()
    training = Training(made, SystemModel(made))
    steps = training.run(4)
    next(steps)
    seen = window(made, [2.0] * len(made.start.workers) + [1.0])
    with pytest.raises(StopIteration):
        steps.send(replace(seen, pushes=seen.pushes._replace(clock=seen.pushes.clock + 1)))
    assert training.gauge.untrained == 2.0


def test_what_waited_behind_the_last_push_of_a_leaver_does_not_count_against_a_placement():
    """A slow worker that has left still sends for a while; pulls behind that took long, so placements were taken back."""
    made = job()
    *stay, gone = made.start.workers
    training = Training(made, SystemModel(made))
    training.setting = replace(made.start, workers=tuple(stay), loads=(), data_shares=())

    def run(found):
        steps = training.run(len(found.pushes.loss))
        next(steps)
        with pytest.raises(StopIteration):
            steps.send(found)

    run(window(made, [2.0] * 3, [4, 4.5, 5], workers=(*stay, gone), pull=3.0))
    assert not training.measured  # all pulls began before the last push of `gone` arrived
    run(window(made, [2.0] * 4, [6, 7, 8, 9], start=5.0, workers=stay, pull=0.1))
    assert training.measured
    fast = training._system.push_seconds(training.setting)
    run(window(made, [2.0] * 4, [10, 11, 12, 13], start=9.0, workers=stay, pull=5.0))  # that is what these take: it counts
    assert training.measured
    assert training._system.push_seconds(training.setting) > fast
