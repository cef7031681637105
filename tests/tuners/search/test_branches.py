"""Searches go on where the job loses machines: trials are of the setting in force, on branches that have recovered."""

from dataclasses import replace

import numpy as np
import pytest

from harness.drive import play
from simulators.cluster.conditions import Conditions, NodeChange
from simulators.reconfiguration.costs import Costs
from tests.support.small_jobs import KNOBS, NAMES, learning
from tests.support.toy import REFUSED, job, window
from tuners import resolve
from tuners.actions import Cost, Fork, NodeEvent, Reconfigure, Rejected, Run, Target
from tuners.search.branches import TrainedBranch, fork_from, train
from tuners.search.online_search import search
from tuners.settings import Integer, Real

OF = job()
LOST = OF.start.workers[0]
LEFT = replace(OF.start, workers=OF.start.workers[1:])
THERE = tuple(n for n in OF.nodes if n.name != LOST)
SECONDS = np.linspace(0.1, 4.0, 40)
RATE = Real("learning_rate", 0.01, 0.5, log=True)
CHANGED = Cost(seconds=1.0, stall_seconds=1.0)


def seen(setting, *events, nodes=THERE, status="running"):
    told = tuple(NodeEvent(1.0, LOST, event) for event in events)
    return replace(window(OF, [1.0, 0.9]), setting=setting, nodes=nodes, events=told, status=status)


def returned(generator, answer):
    with pytest.raises(StopIteration) as end:
        generator.send(answer)
    return end.value.value


def test_a_branch_is_trained_on_until_it_runs_without_the_lost_machines():
    running = train(TrainedBranch(3, OF.start), Run(seconds=5.0))
    assert next(running) == Run(seconds=5.0, branch=3)
    more = Run(clocks=len(OF.start.workers), branch=3)
    first = seen(OF.start, "failed")  # the loss is not detected yet
    assert running.send(first) == more
    assert running.send(seen(OF.start)) == more
    done = returned(running, seen(LEFT))
    assert (done.seen, done.trained.setting, done.trained.clocks) == (first, LEFT, 6)


def test_a_branch_that_loses_more_machines_while_it_recovers_recovers_from_these_too():
    """Where it was left half recovered, no other branch could be trained, forked or freed from then on."""
    running = train(TrainedBranch(3, OF.start), Run(seconds=5.0))
    next(running)
    running.send(seen(OF.start, "failed"))
    second, there = LEFT.workers[0], THERE[1:]
    again = replace(seen(LEFT, nodes=there), events=(NodeEvent(2.0, second, "failed"),))
    assert running.send(again) == Run(clocks=len(LEFT.workers), branch=3)
    fewer = replace(LEFT, workers=LEFT.workers[1:])
    assert returned(running, seen(fewer, nodes=there)).trained.setting == fewer


@pytest.mark.parametrize(
    "only",
    [
        seen(OF.start, nodes=OF.nodes),
        seen(OF.start, "leaving"),  # it works until it has left
        seen(OF.start, "failed", status="diverged"),
    ],
)
def test_a_branch_that_has_nothing_to_recover_from_is_not_trained_on(only):
    running = train(TrainedBranch(0, OF.start), Run(clocks=2))
    next(running)
    assert returned(running, only).last is only


def test_a_parent_that_has_lost_machines_recovers_before_it_is_forked():
    made = []

    def faster(parent):
        made.append(parent.setting)
        return replace(parent.setting, learning_rate=0.1)

    forking = fork_from(TrainedBranch(0, OF.start, nodes=THERE), faster)
    assert next(forking) == Fork(0, replace(OF.start, learning_rate=0.1))
    assert forking.throw(REFUSED) == Run(clocks=len(OF.start.workers), branch=0)
    assert forking.send(seen(OF.start)) == Run(clocks=len(OF.start.workers), branch=0)
    assert forking.send(seen(LEFT)) == Fork(0, replace(LEFT, learning_rate=0.1))
    parent, trial = returned(forking, 7)
    assert made == [OF.start, LEFT]
    assert (parent.setting, trial.branch, trial.setting) == (LEFT, 7, replace(LEFT, learning_rate=0.1))


@pytest.mark.parametrize("nodes", [(), OF.nodes])
def test_a_parent_that_has_all_its_machines_is_not_trained_because_a_fork_is_refused(nodes):
    forking = fork_from(TrainedBranch(0, OF.start, nodes=nodes), lambda parent: parent.setting)
    assert next(forking) == Fork(0, OF.start)
    with pytest.raises(StopIteration) as end:
        forking.throw(REFUSED)
    assert end.value.value == (TrainedBranch(0, OF.start, nodes=nodes), None)


def test_a_search_in_place_goes_back_to_its_best_setting_on_the_machines_that_are_left():
    rates = iter([0.2, 0.1])
    told = []
    tuner = search(OF, lambda: {"learning_rate": next(rates)}, lambda v, s: told.append(s), trials=2, share=1.0, clocks=2)
    next(tuner)
    assert tuner.throw(REFUSED) == Run(clocks=2)
    slow, fast = (replace(window(OF, np.exp(-rate * SECONDS), SECONDS), nodes=OF.nodes) for rate in (0.1, 0.5))
    assert tuner.send(slow) == Reconfigure(replace(OF.start, learning_rate=0.2))
    tuner.send(CHANGED)
    assert tuner.send(fast) == Reconfigure(replace(OF.start, learning_rate=0.1))
    tuner.send(CHANGED)
    fails = replace(slow, setting=replace(LEFT, learning_rate=0.1), nodes=THERE, events=(NodeEvent(1.0, LOST, "failed"),))
    tuner.send(fails)
    assert tuner.send(replace(fails, events=())) == Reconfigure(replace(LEFT, learning_rate=0.2))


@pytest.mark.parametrize(("fails_at", "counts"), [(25.0, False), (50.0, True)])
def test_a_setting_that_was_never_in_force_gets_no_score(fails_at, counts):
    """The trial of two workers is forked at 15 s, and its change takes until 45 s. A machine of the new setting is lost in
    the change, so that the fork goes on under the setting before; or in the trial itself."""
    fails = Conditions(jitter=0.0, stagger=False, nodes=(NodeChange((NAMES[0],), fails_at, "fails"),))
    costs = Costs(restart_seconds=30.0, detection_seconds=1.0)
    system = learning(fails, knobs=(Integer("worker_count", 1, 4),), costs=costs, budget_seconds=400.0)
    told = []
    play(
        lambda of: search(of, lambda: {"worker_count": 2}, lambda v, s: told.append(s), trials=1, share=1, clocks=8), system
    )
    assert np.isfinite(told).tolist() == [counts]


def test_a_setting_in_place_that_was_rolled_back_gets_no_score():
    told = []
    tuner = search(OF, lambda: {"learning_rate": 0.2}, lambda v, s: told.append(s), trials=1, share=1.0, clocks=2)
    next(tuner)
    tuner.throw(REFUSED)
    slow = replace(window(OF, np.exp(-0.1 * SECONDS), SECONDS), nodes=OF.nodes)
    assert tuner.send(slow) == Reconfigure(replace(OF.start, learning_rate=0.2))
    assert tuner.send(replace(CHANGED, done=False)) == Run(clocks=len(OF.start.workers))
    assert tuner.send(seen(LEFT, "failed")) == Run(clocks=len(LEFT.workers))
    assert tuner.send(seen(LEFT)).setting.learning_rate == OF.start.learning_rate  # the search ends with the start
    assert told == [-np.inf]


@pytest.mark.parametrize("knobs", [(RATE,), (RATE, *KNOBS)], ids=["roles held", "roles free"])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("random_search[share=0.9]", 12.0),
        ("tpe[share=0.9]", 12.0),
        ("asha[plateau_epochs=1]", 12.0),
        ("hyperband", 12.0),
        ("spearmint[plateau_epochs=1]", 12.0),
        ("mltuner[as_printed=true]", 12.0),  # while the loss of the parent is measured
        ("mltuner[as_printed=true]", 60.0),  # during a trial
    ],
)
def test_a_search_goes_on_after_a_machine_has_failed(name, at, knobs):
    """What is refused is the first fork of a parent that has not recovered; before, every fork was refused from then on."""
    fails = Conditions(nodes=(NodeChange((NAMES[1],), at, "fails"),))
    system = learning(fails, knobs=knobs, budget_seconds=400.0, target=Target("accuracy", 2.0))
    log = play(resolve(name).factory, system).exchanges
    refused = [e for e in log if isinstance(e.answer, Rejected)]
    assert len(refused) <= 1
    assert len([e for e in log if isinstance(e.action, Fork) and e.seconds > at + 18.0 and e not in refused]) >= 2
