"""Windows, snapshots and changes of the running job: each was wrong once, and cost an arena its target or its time."""

import math
from dataclasses import replace

import pytest

from tests.support.toy import job, window
from tests.tuners.joint.answers import DONE, RATE, Answers, course, flat, of
from tuners.actions import Evaluate, Evaluation, Fork, Free, NodeEvent, Reconfigure, Rejected, Run
from tuners.joint.job.steps import changed_cheaply
from tuners.joint.job.training import Training
from tuners.joint.learning.heat_search import HeatSearch
from tuners.joint.learning.holding import RuleParts
from tuners.joint.models.system_model import SystemModel
from tuners.joint.tuner import JointCourse
from tuners.settings import Choice


def test_a_fork_for_which_there_is_no_room_is_not_asked_for_again_until_there_may_be():
    """`joint` asked a live job for one in every window, and the screen told of each refusal."""
    room = 2
    answers = Answers(of(), flat, refuse=lambda action: isinstance(action, Fork) and answers.branches >= room)
    training = course(answers.job).training
    kept = [answers.run(training.snapshots.take()) for _ in range(5)]
    assert [k is not None for k in kept] == [True, True, False, False, False]
    assert sum(isinstance(action, Fork) for action in answers.asked) == 3
    room += 1
    answers.run(training.snapshots.drop(kept[0]))
    assert answers.run(training.snapshots.take()) is not None
    assert answers.run(training.snapshots.take()) is None
    training.branch.available -= {answers.job.nodes[0].name}
    room += 1
    assert answers.run(training.snapshots.take()) is not None


def test_a_cooler_rate_takes_effect_before_machines_move():
    """A model that goes on at the rate that has ruined it while its roles change is ruined again."""
    made = of()
    training, here = Training(made, SystemModel(made)), made.start
    moved = replace(here, workers=here.workers[:-1], learning_rate=here.learning_rate / 10, loads=(), data_shares=())
    answers = Answers(made, flat)
    assert answers.run(training.branch.change(moved, "too hot"))
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
    assert not answers.run(training.branch.change(moved, "faster"))
    assert answers.settings[0].learning_rate == moved.learning_rate
    answers.run(training.run(3))
    assert answers.settings[0] == here
    answers.run(training.branch.insist(moved, "too hot"))  # that is about the model, not about machines
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
        begun.training.branch.setting = answers.settings[0] = replace(best, workers=best.workers[:1])
        begun.training.branch.cluster_changed = True
        answers.run(begun.placing.place_anew())
        assert len(answers.settings[0].workers) == len(best.workers) > 1
        assert answers.settings[0].learning_rate == pytest.approx(best.learning_rate)


@pytest.mark.parametrize("lost", [True, False])
def test_a_model_that_cannot_be_evaluated_while_a_loss_is_made_up_for_is_evaluated_later(lost):
    """It counted as good as the one before it, which had been thrown off: the job went back, and lost 55 pushes."""
    made = of()
    training, answers = Training(made, SystemModel(made)), Answers(made, flat)
    training.model.level, answer = 5.0, answers.answer

    def losing(action):
        found = answer(action)
        event = NodeEvent(answers.now - 0.5, "n9", "failed")
        return replace(found, events=(event,) * lost) if isinstance(action, Run) else found

    def refuses(action):
        return isinstance(action, Evaluate) and sum(isinstance(a, Evaluate) for a in answers.asked) == 1

    answers.answer, answers.refuse = losing, refuses
    answers.run(training.window())
    assert [type(a) for a in answers.asked] == [Run, Evaluate, *[Run, Evaluate] * lost]
    assert (training.model.level < 5.0) == lost


def test_machines_that_are_back_work_while_the_heat_is_searched():
    """One worker of three went on alone to the end of the search."""
    made = of(space=(RATE, *ROLES))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1 / (1 + setting.learning_rate)] * clocks)
    few, best = replace(made.start, workers=made.start.workers[:1], loads=(), data_shares=()), made.start.workers
    begun.training.branch.setting = answers.settings[0] = few
    begun.training.branch.cluster_changed = True

    def place():
        begun.training.branch.cluster_changed = False
        more = replace(begun.training.branch.setting, workers=best)
        yield from begun.training.branch.change(
            replace(more, learning_rate=more.learning_rate / len(best)), "machines are back"
        )

    answers.run(HeatSearch(begun.training, begun.heat, place).run())
    assert begun.training.branch.setting.workers == best
    assert begun.heat.of(begun.training.branch.setting) > 10 * begun.heat.of(few)


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
    begun.training.model.newest = replace(
        begun.training.model.newest, events=(NodeEvent(answers.now, "n9", "failed"),) * busy
    )
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
    training.model.gauge.begin(1.0)
    training.snapshots.first = answers.run(training.snapshots.take())
    answers.run(training.run(8))
    answers.run(
        training.branch.change(fewer, "cheaper")
        if learns
        else training.snapshots.begin_again(fewer, "cheaper, from the untrained model")
    )
    answers.run(training.run(8))
    assert training.branch.setting.workers == fewer.workers
    freed = {a.branch for a in answers.asked if isinstance(a, Free)}
    held = {name for branch, s in answers.settings.items() if branch not in freed for name in (*s.workers, *s.servers)}
    assert (made.start.workers[-1] in held) is holds
    assert training.snapshots.first is not None
    assert training.snapshots.first.branch not in freed


@pytest.mark.parametrize(("loss", "holds"), [(2.0, True), (1.0, False), (0.5, False)])
def test_at_a_held_rate_the_untrained_model_is_kept_while_the_loss_is_higher(loss, holds):
    """What was trained while machines changed had spoilt the model that the job then began again from, twice: 2.6 USD and no
    target, in place of 0.08."""
    made = of(space=(Choice("policy", ("bsp", "asp")),))
    made = replace(made, target=replace(made.target, minimise="usd"))
    training = Training(made, SystemModel(made))
    fewer = replace(made.start, workers=made.start.workers[:-1], loads=(), data_shares=())
    answers = Answers(made, lambda _setting, clocks: [loss] * clocks)
    training.model.gauge.begin(1.0)
    training.snapshots.first = answers.run(training.snapshots.take())
    answers.run(training.snapshots.begin_again(fewer, "cheaper, from the untrained model"))
    untrained = training.snapshots.first.branch
    for _ in range(2):
        answers.run(training.run(8))
    assert (training.snapshots.first.branch == untrained) is holds


def test_a_snapshot_on_lost_machines_gets_its_rate_where_the_system_has_put_it():
    made = of()
    training, moved = Training(made, SystemModel(made)), replace(made.start, workers=made.start.workers[:-1])
    lost = made.start.workers[-1]
    answers = Answers(made, flat, refuse=lambda a: isinstance(a, Reconfigure) and lost in a.setting.workers)
    kept = answers.run(training.snapshots.take())
    losses_of = answers.answer

    def survivors(action):
        return replace(losses_of(action), setting=moved) if isinstance(action, Run) else losses_of(action)

    answers.answer = survivors
    answers.run(training.snapshots.return_to(kept, replace(made.start, learning_rate=0.05), "cooler"))
    assert training.branch.setting == replace(moved, learning_rate=0.05) == answers.settings[kept.branch]


def test_what_is_refused_while_a_loss_is_made_up_for_is_asked_for_again():
    """A value that was to be taken back stayed to the end of the job: 26 s, where not tuning takes 13."""
    made = of()
    training, busy = Training(made, SystemModel(made)), [True]
    answers = Answers(made, flat, refuse=lambda a: isinstance(a, Reconfigure) and bool(busy))
    answers.run(training.branch.insist(replace(made.start, pull_clocks=2), "taken back", ("pull_clocks",)))
    answers.run(training.run(4))
    assert training.branch.setting == made.start
    busy.clear()
    answers.run(training.branch.change(replace(made.start, learning_rate=0.05), "the next decision"))
    assert training.branch.setting == replace(made.start, learning_rate=0.05, pull_clocks=2)
    asked = len(answers.changes())
    answers.run(training.run(4))
    assert len(answers.changes()) == asked


def test_a_later_decision_about_the_same_knob_replaces_what_was_refused():
    made = of()
    training, busy = Training(made, SystemModel(made)), [True]
    answers = Answers(made, flat, refuse=lambda a: isinstance(a, Reconfigure) and bool(busy))
    answers.run(training.branch.insist(replace(made.start, learning_rate=0.02), "cooler"))
    busy.clear()
    answers.run(training.branch.change(replace(made.start, learning_rate=0.005), "cooler still"))
    assert training.branch.setting.learning_rate == 0.005


def test_a_model_that_cannot_be_kept_at_once_is_kept_after_the_system_has_moved_it():
    """The job went on without any snapshot, at a hotter rate. That diverged, and the job was over."""
    made = of()
    training, moved = Training(made, SystemModel(made)), replace(made.start, workers=made.start.workers[:-1])
    answers, ran = Answers(made, flat), []
    kept = answers.run(training.snapshots.take())
    lost = made.start.workers[-1]
    answers.refuse = lambda a: not ran if isinstance(a, Fork) else isinstance(a, Reconfigure) and lost in a.setting.workers
    answer = answers.answer

    def survivors(action):
        if isinstance(action, Run):
            ran.append(action)
            return replace(answer(action), setting=moved)
        return answer(action)

    answers.answer = survivors
    assert answers.run(training.snapshots.return_to(kept, replace(made.start, learning_rate=0.05), "again")) is not None


@pytest.mark.parametrize("validated", [True, False])
def test_a_snapshot_is_about_as_good_as_the_model_that_was_validated_a_little_earlier(validated):
    """Of a model of which nothing was known, nothing could be lost: one that blew up later was kept for 4,000 s."""
    made = of()
    training, answers = Training(made, SystemModel(made)), Answers(made, flat)
    training.model.gauge.begin(1.0)
    answers.show((0.6, 0.5 if validated else None))  # not at the end of the window: by clock 0
    answers.run(training.run(20))
    kept = answers.run(training.snapshots.take())
    assert math.isnan(training.model.level)
    assert kept.level == pytest.approx(training.model.gauge.level(0.5, math.nan)) if validated else math.isnan(kept.level)


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
    assert math.isfinite(training.model.level)
    trained = sum(a.clocks for a in asked if isinstance(a, Run)) * training._system.push_seconds(made.start)
    assert trained >= evaluates * seconds


def test_a_branch_that_the_system_is_still_changing_is_run_until_that_is_done():
    """On `preempted` 307 no other branch could run meanwhile: the tuner gave up, and lost machines were not replaced."""
    made = of()
    training, answers, ran = Training(made, SystemModel(made)), Answers(made, flat), []
    kept = answers.run(training.snapshots.take())
    answers.refuse = lambda a: isinstance(a, Free | Reconfigure) and len(ran) < 2
    answer = answers.answer

    def changing(action):
        if isinstance(action, Run):
            ran.append(action.branch)
        return answer(action)

    answers.answer = changing
    wanted = replace(made.start, learning_rate=0.05)
    assert answers.run(training.snapshots.return_to(kept, wanted, "again")) is not None
    assert ran == [0, 0]
    assert training.branch.number == kept.branch
    assert answers.settings[kept.branch] == wanted


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


def test_without_snapshots_no_branch_is_forked():
    made = of(space=(RATE,))
    begun, answers = JointCourse(made, RuleParts(snapshots=False)), Answers(made, flat)
    begun.gauge.begin(1.0)
    answers.run(begun.find_heat(begun.heat))
    assert not any(isinstance(a, Fork | Free) for a in answers.asked)


def test_the_untrained_loss_is_known_where_a_loss_of_machines_took_every_first_minibatch():
    """All workers then begin their second one: no push has clock 0, and a window after that had no loss to compare with."""
    made = job()
    training = Training(made, SystemModel(made))
    steps = training.run(4)
    next(steps)
    seen = window(made, [2.0] * len(made.start.workers) + [1.0])
    with pytest.raises(StopIteration):
        steps.send(replace(seen, pushes=seen.pushes._replace(clock=seen.pushes.clock + 1)))
    assert training.model.gauge.untrained == 2.0


def test_what_waited_behind_the_last_push_of_a_leaver_does_not_count_against_a_placement():
    """A slow worker that has left still sends for a while; pulls behind that took long, so placements were taken back."""
    made = job()
    *stay, gone = made.start.workers
    training = Training(made, SystemModel(made))
    training.branch.setting = replace(made.start, workers=tuple(stay), loads=(), data_shares=())

    def run(found):
        steps = training.run(len(found.pushes.loss))
        next(steps)
        with pytest.raises(StopIteration):
            steps.send(found)

    run(window(made, [2.0] * 3, [4, 4.5, 5], workers=(*stay, gone), pull=3.0))
    assert not training.measured  # all pulls began before the last push of `gone` arrived
    run(window(made, [2.0] * 4, [6, 7, 8, 9], start=5.0, workers=stay, pull=0.1))
    assert training.measured
    fast = training._system.push_seconds(training.branch.setting)
    run(window(made, [2.0] * 4, [10, 11, 12, 13], start=9.0, workers=stay, pull=5.0))  # that is what these take: it counts
    assert training.measured
    assert training._system.push_seconds(training.branch.setting) > fast
