"""What branches cost: copies, caches that are cleared, servers' memory (MLtuner, Section 4.6); and what evaluations cost."""

from dataclasses import replace

import jax
import msgspec
import pytest

from harness import scenario
from harness.drive import play
from harness.score import score
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.reconfiguration.costs import Costs
from simulators.workloads.workload import Demand
from tests.support.small_jobs import KNOBS, Quadratic, job, machine, system
from tuners import policies
from tuners.actions import Evaluate, Fork, Free, Install, Reconfigure, Rejected, Run, Setting, Target
from tuners.settings import Integer

WORKS = Setting(workers=("a", "b", "c"), servers=("d", "e"), batch_size=4, learning_rate=0.1)
MEETS = replace(WORKS, workers=("a", "b"), servers=("a", "b"))


def timing_only(setting=WORKS, *, nic=100.0, memory=1e9, optimizer="momentum", **changed):
    """Models of 100 bytes, NICs of 100 bytes per second."""
    kind = msgspec.structs.replace(machine(nic), memory_bytes=memory)
    cluster = Cluster(tuple((n, kind) for n in "abcde"))
    return system(cluster, job(optimizer=optimizer), setting, Conditions(), **changed)


def gap(simulated, **run):
    """Seconds before a window in which no worker trains."""
    before = simulated.now
    return simulated.perform(Run(**run)).start_seconds - before


@pytest.mark.parametrize(
    ("setting", "seconds"),
    [
        (WORKS, 300 / 200),  # three pulls from two servers
        (replace(WORKS, workers=("a",)), 100 / 100),  # one pull, as fast as the worker takes it
        (replace(WORKS, model_shares=(0.8, 0.2)), 300 * 0.8 / 100),  # the larger server is the last
        (replace(WORKS, transfer_bits=16), 150 / 200),
        (MEETS, 50 / 100),  # half of the model is where the worker is
    ],
    ids=["two servers", "one worker", "unequal shares", "16 bits", "roles that overlap"],
)
def test_training_another_branch_pulls_the_whole_model_first(setting, seconds):
    simulated = timing_only(setting)
    assert gap(simulated, clocks=10) == 0.0
    child = simulated.perform(Fork(0))
    assert gap(simulated, clocks=5) == 0.0  # a fork leaves the caches alone
    assert gap(simulated, clocks=5, branch=child) == pytest.approx(seconds)
    assert gap(simulated, seconds=3.0, branch=child) == 0.0
    assert gap(simulated, clocks=5) == pytest.approx(seconds)
    other = simulated.perform(Fork(0))
    simulated.perform(Free(0))
    assert gap(simulated, clocks=5, branch=other) == pytest.approx(seconds)


def test_a_reconfiguration_with_steps_switches_branches_and_one_in_place_does_not():
    simulated = timing_only(knobs=KNOBS)
    child = simulated.perform(Fork(0))
    before = simulated.now
    simulated.perform(Reconfigure(replace(WORKS, batch_size=8), branch=child))
    assert simulated.now == before
    assert gap(simulated, clocks=5) == 0.0
    fewer = simulated.perform(Reconfigure(replace(WORKS, workers=("a", "b"), servers=("c", "d", "e")), branch=child))
    assert simulated.now - before > fewer.seconds + 300 / 200
    assert gap(simulated, clocks=5, branch=child) == 0.0


def test_a_fork_gets_other_roles_by_a_checkpoint_or_by_the_method_of_a_reconfiguration_of_its_own():
    other, seconds = replace(WORKS, workers=("a", "b"), servers=("c", "d", "e")), []
    for setting in (other, None):
        simulated = timing_only(knobs=KNOBS)
        simulated.perform(Run(clocks=10))
        before = simulated.now
        child = simulated.perform(Fork(0, setting))
        if setting is None:
            assert "sweep" in " ".join(simulated.perform(Reconfigure(other, method="relocate", branch=child)).steps)
        seconds.append(simulated.now - before)
        assert simulated.perform(Run(clocks=5, branch=child)).setting == other
        assert simulated.perform(Run(clocks=5)).setting == WORKS
    assert seconds[1] < seconds[0] / 2


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_servers_refuse_a_branch_that_they_have_no_memory_for(optimizer):
    size = {"sgd": 100, "momentum": 200, "adam": 300}[optimizer]
    simulated = timing_only(memory=1.6 * size, optimizer=optimizer)
    assert simulated.job.branch_bytes == size
    branches = [simulated.perform(Fork(0)) for _ in range(2)]
    before = simulated.now
    with pytest.raises(Rejected, match=f"d would keep {2 * size} bytes .* has {1.6 * size:.0f}; free a branch"):
        simulated.perform(Fork(0))
    assert simulated.now == before
    simulated.perform(Free(branches[0]))
    assert simulated.perform(Fork(0)) == 3


def test_the_score_counts_branches_and_their_costs():
    def forks(job):
        for _ in range(2):
            child = yield from Fork(0)
            yield from Fork(0)
            yield from Run(clocks=5, branch=child)
            yield from Run(clocks=5)
            yield from Free(child)
        yield from Fork(9)  # refused

    simulated = timing_only(target=Target("clocks", 100))
    played = play(forks, simulated)
    row = score(played, scenario="s", tuner="t", seed=0).score
    assert (row.branches_peak, row.branch_bytes_peak) == (4, 4 * 200)
    copies = 4 * 200 / 2 / 5e9
    assert row.overhead_seconds == pytest.approx(4 * 300 / 200 + copies, rel=1e-9)


# ---------------------------------------------------------------------------------------------------------- evaluations


def learns(**changed):
    """Four machines learn three centres; a pass takes 100 bytes at 100 bytes per second, and 3 samples on 4 cores."""
    model = Quadratic(centres=(0.0, 1.0, 2.0))
    cluster = Cluster(tuple((n, machine()) for n in "abcd"))
    workload = job(Demand(model_bytes=100.0, sample_seconds=0.6), model)
    start = Setting(workers=("a", "b"), servers=("c", "d"), batch_size=1, learning_rate=0.01)
    return system(cluster, workload, start, Conditions(), knobs=(Integer("worker_count", 1, 3),), **changed)


@pytest.mark.slow
def test_an_evaluation_takes_a_pass_over_the_validation_data():
    simulated = learns()
    expected = 100 / 100 + 3 * 0.6 / 3 / 4  # the forward pass is a third of a gradient
    assert simulated.job.evaluate_seconds == pytest.approx(expected)
    simulated.perform(Run(clocks=10))
    before = simulated.now
    seen = simulated.perform(Evaluate())
    assert (seen.seconds, seen.clocks) == (before, 10)
    assert simulated.now == pytest.approx(before + expected)
    window = simulated.perform(Run(clocks=5))
    assert window.start_seconds == simulated.now - window.seconds == pytest.approx(before + expected)
    assert min(window.pushes.seconds) > window.start_seconds


@pytest.mark.parametrize(("value", "status"), [(0.4, "target"), (0.3, "budget")])
def test_an_evaluation_that_finds_the_target_ends_the_job(value, status):
    """A tuner that had seen the target was not done until the job's own validation, by which the model could be worse."""
    simulated = learns(target=Target("loss", value), budget_seconds=100.0, evaluate_clocks=10**6)

    def trains_a_fork(job):
        child = yield from Fork(0)
        yield from Run(clocks=10, branch=child)
        yield from Run(clocks=1)
        yield from Evaluate(child)

    played = play(trains_a_fork, simulated)
    row = score(played, scenario="s", tuner="t", seed=0).score
    assert played.outcome.status == status
    assert row.reached == (status == "target")
    if not row.reached:
        return
    *_, evaluated, last = played.exchanges
    assert isinstance(last.answer, Rejected)
    assert isinstance(evaluated.action, Evaluate)
    assert row.completion_seconds == evaluated.seconds == evaluated.answer.seconds + simulated.job.evaluate_seconds
    assert row.final_loss == evaluated.answer.loss


def test_an_evaluation_costs_the_same_under_every_setting_and_nothing_where_nothing_is_learned():
    one, other = learns(), learns()
    other.perform(Reconfigure(replace(other.job.start, workers=("a",), servers=("b", "c", "d"))))
    spent = []
    for simulated in (one, other):
        before = simulated.now
        simulated.perform(Evaluate())
        spent.append(simulated.now - before)
    assert spent[0] == pytest.approx(spent[1])
    assert timing_only().job.evaluate_seconds == 0.0
    assert learns(costs=Costs(evaluate_seconds=7.5)).job.evaluate_seconds == 7.5


def test_an_evaluation_is_a_stall_of_the_job_and_changes_nothing_of_its_training():
    def asks(job):
        for _ in range(4):
            yield from Run(clocks=5)
            yield from Evaluate()
        yield from Run(clocks=5)

    def runs(job):
        yield from Run(clocks=25)

    rules = {"target": Target("clocks", 25), "budget_seconds": 1e6, "evaluate_clocks": 25}
    quiet, asked = (score(play(t, learns(**rules)), scenario="s", tuner="t", seed=0).score for t in (runs, asks))
    price = 4 * learns().job.evaluate_seconds
    assert asked.overhead_seconds == pytest.approx(price)
    assert quiet.overhead_seconds == 0.0
    assert asked.completion_seconds == pytest.approx(quiet.completion_seconds + price)
    assert asked.final_loss == quiet.final_loss


def test_an_evaluation_can_spend_the_last_of_the_budget():
    def asks(job):
        while True:
            yield from Evaluate()

    played = play(asks, learns(budget_seconds=5.0))
    assert played.outcome.status == "budget"
    assert 4 <= sum(e.asked for e in played.exchanges) <= 5


def test_an_evaluation_waits_for_the_end_of_a_reconfiguration():
    simulated = learns()
    simulated.perform(Run(clocks=4))
    fewer = replace(simulated.job.start, workers=("a",), servers=("b", "c", "d"))
    simulated.perform(Reconfigure(fewer, method="migrate", wait=False))
    before = simulated.now
    with pytest.raises(Rejected, match="Cannot evaluate branch 0: a reconfiguration is under way"):
        simulated.perform(Evaluate())
    assert simulated.now == before


def test_no_gradient_is_still_computed_when_an_action_has_been_answered():
    """A tuner may fail after any answer, and the process exit: it crashes in XLA's threads if these still compute."""
    simulated = scenario.system(scenario.load("digits"), 0)
    for action in (None, Install(policies.asp()), Fork(0)):
        if action is not None:
            simulated.perform(action)
        arrays = [
            x for branch in simulated.branches.values() for x in jax.tree.leaves(branch.state) if isinstance(x, jax.Array)
        ]
        assert arrays
        assert all(array.is_ready() for array in arrays), action
