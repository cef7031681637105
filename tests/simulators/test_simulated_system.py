"""Actions in simulated time: no update is lost or counted twice, a refusal has no effect, costs are as stated."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from simulators.cluster.conditions import Conditions, Episode, Sleeps, Stragglers
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.reconfiguration import Load, plan_of
from simulators.workloads.workload import Proxy
from tests.support.small_jobs import (
    CHEAP,
    KNOBS,
    MODEL,
    NAMES,
    SMALL,
    assert_same_bytes,
    branch,
    cluster,
    job,
    learning,
    start,
    system,
    together,
)
from tuners.actions import (
    Decision,
    Evaluate,
    Fork,
    Free,
    Install,
    MeasureNoise,
    Reconfigure,
    Rejected,
    Run,
    SyncPolicy,
    Target,
)
from tuners.policies import ssp
from tuners.settings import Choice, Real

# ------------------------------------------------------------------------------------------------------------- same seed


def test_the_same_seed_draws_the_same_noise():
    rough = Conditions(sleeps=Sleeps(0.2, 1.0, 0.5), stragglers=Stragglers(2.0, 0.5, 0.4))
    one, same, other = (learning(rough, seed).perform(Run(clocks=200)) for seed in (4, 4, 5))
    assert_same_bytes(one.pushes, same.pushes)
    assert (one.evaluations, one.workers, one.end_seconds) == (same.evaluations, same.workers, same.end_seconds)
    assert one.end_seconds != other.end_seconds


def test_noise_depends_on_worker_and_mini_batch_and_not_on_the_policy():
    """Under another policy, the same mini-batch of the same worker takes equally long."""
    took = []
    for policy in ("bsp", "asp", "ssp"):
        seen = learning(setting=start(policy=policy)).perform(Run(clocks=150)).pushes
        took.append({(w, c): s for w, c, s in zip(seen.worker, seen.clock, seen.compute_seconds, strict=True)})
    common = set(took[0]) & set(took[1]) & set(took[2])
    assert len(common) > 90
    assert all(took[0][k] == pytest.approx(took[1][k], rel=1e-9) == took[2][k] for k in common)


# ------------------------------------------------------------------------------------------------------ nothing is lost


def _counted_losses(parameters, rows):
    """Its gradient is -2 for every parameter, so that at a rate of 1/2 every update adds one."""
    return -2.0 * jnp.sum(parameters["x"]) * jnp.ones(rows[0].shape[0], jnp.float32)


def _uncounted(parameters, rows):
    return jnp.full(rows[0].shape[0], jnp.nan, jnp.float32)


def _two_of_three(state, push):
    """Drops the gradient of every third push."""
    return state + 1, Decision(release=push.waiting, accept=(state + 1) % 3 != 0)


COUNTER = Proxy(
    lambda key: {"x": jnp.zeros(3, jnp.float32)},
    _counted_losses,
    _uncounted,
    (np.zeros(64, np.float32),),
    (np.zeros(2, np.float32),),
)


def counted(simulated, number):
    """Updates in the parameters, and in the group that waits for its barrier."""
    learned = branch(simulated, number).learned
    waiting = 0.0 if learned.group == () else -np.asarray(learned.group["x"]) / 2
    total = np.asarray(learned.parameters["x"]) + waiting
    assert (total == total[0]).all()
    return total[0]


def action_at_random(rng, simulated, testing):
    alive, space = sorted(testing), simulated.job.space
    number = int(rng.choice(alive))
    kind = rng.choice(["run", "run", "run", "reconfigure", "install", "fork", "free", "evaluate"])
    if kind == "run":
        clocks, seconds = int(rng.integers(1, 30)), float(rng.uniform(0.01, 20.0))
        return Run(clocks=clocks, branch=number) if rng.random() < 0.5 else Run(seconds=seconds, branch=number)
    if kind == "reconfigure":
        return Reconfigure(space.setting(space.sample(rng)), branch=number)
    if kind == "install":
        return Install(ssp(int(rng.integers(0, 5))), branch=number)
    if kind == "fork":
        return Fork(number, testing=bool(rng.random() < 0.3))
    return Free(number) if kind == "free" else Evaluate(number)


@pytest.mark.parametrize("aggregation", ["each", "sum"])
def test_no_update_is_lost_or_counted_twice_under_random_actions(aggregation):
    """Hundreds of actions at random: with updates of +1, every branch's parameters are the number of its pushes."""
    rng = np.random.default_rng(len(aggregation))
    workload = replace(job(SMALL, aggregation=aggregation), proxy=COUNTER, samples=64)
    episodes = (Episode("a", 50.0, 100.0, 2.0), Episode("c", 300.0, 1000.0, 0.5))
    conditions = Conditions(episodes=episodes)
    simulated = system(
        cluster(), workload, start(learning_rate=0.5), conditions, 1, knobs=KNOBS, costs=CHEAP, evaluate_clocks=7
    )
    pushes, updates, testing, done = {0: 0}, {0: 0}, {0: False}, 0
    for _ in range(250):
        action = action_at_random(rng, simulated, testing)
        before = simulated.now, {n: branch(simulated, n) for n in testing}
        try:
            answer = simulated.perform(action)
        except Rejected:
            assert before == (simulated.now, {n: branch(simulated, n) for n in testing})
            continue
        done += 1
        if isinstance(action, Run):
            pushes[action.branch] += answer.clocks
            updates[action.branch] += 0 if testing[action.branch] else answer.clocks
        elif isinstance(action, Fork):
            pushes[answer], updates[answer] = pushes[action.branch], updates[action.branch]
            testing[answer] = action.testing
        elif isinstance(action, Free):
            del testing[action.branch]
        elif isinstance(action, Evaluate):
            assert answer.clocks == pushes[action.branch]
        for number, tests in testing.items():
            assert int(branch(simulated, number).clock.pushes) == pushes[number]
            if not tests and not (aggregation == "sum" and updates[number] != pushes[number]):
                assert counted(simulated, number) == updates[number]
        assert simulated.now >= before[0]
    assert done > 150
    assert max(pushes.values()) > 200


@pytest.mark.slow
def test_a_dropped_gradient_is_a_push_but_no_update():
    workload = replace(job(SMALL), proxy=COUNTER, samples=64)
    simulated = system(cluster(), workload, start(learning_rate=0.5), Conditions())
    simulated.perform(Install(SyncPolicy("two of three", lambda active: jnp.asarray(0), _two_of_three)))
    window = simulated.perform(Run(clocks=90))
    assert (window.clocks, counted(simulated, 0)) == (90, 60)


# -------------------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "no server": Reconfigure(start(servers=())),
    "unknown node": Reconfigure(start(servers=("z",))),
    "sum to 1": Reconfigure(start(data_shares=(0.5, 0.5, 0.5))),
    "4, 8": Reconfigure(start(batch_size=16)),
    "0 to 3": Reconfigure(start(staleness=9)),
    "holds it at 0.1": Reconfigure(start(learning_rate=0.2)),
    "holds it at 32": Fork(0, setting=start(transfer_bits=16)),
    "branch 7": Run(clocks=1, branch=7),
    "Cannot use branch 7": Free(7),
    "never forked": Evaluate(7),
    "7: it was never": MeasureNoise(7),
    "was freed": Install(ssp(1), branch=7),
    "last one": Free(0),
    "bsp.*asp.*ssp": Reconfigure(start(policy="gossip")),
    "checkpoint, migrate, relocate": Reconfigure(start(), method="teleport"),
    "this system knows": 42,
}


@pytest.fixture(scope="module")
def running():
    simulated = learning()
    simulated.perform(Run(clocks=20))
    return simulated


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_action_changes_nothing(running, reason):
    before = running.now, branch(running), running.branches[0].setting, sorted(running.branches)
    expected = {"no server": "no servers", "unknown node": "node 'z'"}.get(reason, reason)
    with pytest.raises(Rejected, match=expected):
        running.perform(REFUSED[reason])
    assert before == (running.now, branch(running), running.branches[0].setting, sorted(running.branches))


def test_an_unknown_policy_is_refused():
    simulated = learning(knobs=(Choice("policy", ("asp", "gossip")),))
    with pytest.raises(Rejected, match="choose one of bsp, asp, ssp, dssp"):
        simulated.perform(Reconfigure(start(policy="gossip")))
    assert simulated.perform(Run(clocks=1)).clocks == 1


def test_a_policy_that_is_held_cannot_be_installed():
    held = learning(installs_policies=False, knobs=(Real("learning_rate", 1e-3, 1.0),))
    held.perform(Run(clocks=5))
    before = branch(held)
    with pytest.raises(Rejected, match=r"Cannot install policy 'ssp\(1\)': this scenario holds the policy at 'asp'"):
        held.perform(Install(ssp(1)))
    assert branch(held) == before
    assert held.job.installs_policies is False
    free = learning(installs_policies=False, knobs=(Choice("policy", ("asp", "bsp")),))
    free.perform(Install(ssp(1)))
    assert free.job.installs_policies is True


def test_the_job_tells_the_bytes_of_a_push_and_of_a_pull():
    both = (SMALL, msgspec.structs.replace(SMALL, push_bytes=30.0))
    one, other = (system(cluster(), job(d), start(), Conditions()).job for d in both)
    assert (one.model_bytes, one.push_bytes) == (SMALL.model_bytes, SMALL.model_bytes)
    assert (other.model_bytes, other.push_bytes) == (SMALL.model_bytes, 30.0)


def test_first_come_first_served_refuses_snapshots():
    with pytest.raises(ValueError, match=r"Scenario 'judged' cannot start: .*where servers send snapshots: use maxmin"):
        system(cluster("fifo", snapshot_clocks=20), job(SMALL), start(), Conditions())


def test_other_branches_run_on_after_one_has_diverged():
    simulated = learning(knobs=(Real("learning_rate", 1e-3, 1e38),))
    simulated.perform(Run(clocks=10))
    wild = simulated.perform(Fork(0, setting=start(learning_rate=1e38)))
    assert simulated.perform(Run(clocks=100, branch=wild)).status == "diverged"
    assert simulated.status == "running"
    with pytest.raises(Rejected, match=f"Cannot run branch {wild}: it has diverged"):
        simulated.perform(Run(clocks=1, branch=wild))
    simulated.perform(Free(wild))
    assert np.isfinite(simulated.perform(Run(clocks=50)).pushes.loss).all()


# --------------------------------------------------------------------------------------------------------- what it costs


def test_a_reconfiguration_takes_the_time_of_its_plan():
    simulated = learning()
    simulated.perform(Run(clocks=20))
    before = simulated.now
    cost = simulated.perform(Reconfigure(start(workers=NAMES[:2], servers=NAMES[2:])))
    # 100 bytes written at 50 and read back at 25 bytes per second, and a restart.
    assert cost.seconds == cost.stall_seconds == pytest.approx(2.0 + 3.0 + 4.0) == simulated.now - before
    assert (cost.bytes_moved, cost.slow_seconds) == (200.0, 0.0)
    assert cost.steps == ("checkpoint", "restart", "restore")
    window = simulated.perform(Run(clocks=30))
    assert window.start_seconds == simulated.now - window.seconds == before + cost.seconds
    assert set(window.pushes.worker) == {0, 1}
    assert [w.node for w in window.workers] == ["a", "b"]


def test_threads_take_a_restart_and_policies_no_time_at_all():
    simulated = learning()
    simulated.perform(Run(clocks=20))
    assert simulated.perform(Reconfigure(start(intra_threads=1))).steps == ("restart",)
    cost = simulated.perform(Reconfigure(start(intra_threads=1, policy="ssp", staleness=2, batch_size=4)))
    assert (cost.seconds, cost.bytes_moved, cost.steps) == (0.0, 0.0, ())
    assert {w.samples for w in simulated.perform(Run(clocks=60)).workers} != {0}


def test_a_change_in_place_does_not_interrupt_cycles_in_progress():
    """A change to the same setting has no effect at all."""
    whole, cut = learning(seed=9), learning(seed=9)
    seen = [cut.perform(Run(clocks=17)), cut.perform(Run(seconds=1.234))]
    assert cut.perform(Reconfigure(start())).seconds == 0.0
    seen.append(cut.perform(Run(clocks=40)))
    pushes = together(seen)
    expected = whole.perform(Run(clocks=len(pushes.seconds))).pushes
    assert pushes.worker.tolist() == expected.worker.tolist()
    np.testing.assert_allclose(pushes.seconds, expected.seconds, rtol=1e-12)
    np.testing.assert_array_equal(pushes.loss, expected.loss)


def test_a_reconfiguration_may_end_after_the_budget():
    simulated = learning(budget_seconds=20.0)
    simulated.perform(Run(seconds=15.0))
    simulated.perform(Reconfigure(start(workers=NAMES[:2])))
    window = simulated.perform(Run(clocks=10))
    assert (window.clocks, window.start_seconds, window.end_seconds, simulated.now) == (0, 24.0, 24.0, 24.0)


# TensorFlowOnline: parameters (Table II) and seconds of one reconfiguration with checkpoint and restore (Table V b).
TABLE_V = {"logr": (109_372_904, 47), "svm": (1_000_000, 13), "cifar": (654_968, 16), "imagenet8": (58_289_352, 40)}


@pytest.mark.parametrize("name", TABLE_V)
def test_checkpoint_and_restart_cost_what_was_published(name):
    parameters, published = TABLE_V[name]
    load = Load(4.0 * parameters, 100, 0.0)
    plan = plan_of(start(), start(workers=NAMES[:2], servers=NAMES[2:]), "checkpoint", load, Costs())
    assert plan.quiescent
    assert sum(s.seconds for s in plan.steps) == pytest.approx(published, rel=0.15)


# -------------------------------------------------------------------------------------------------------------- branches


def test_two_forks_run_alike():
    """Whatever runs in between: same workers, same losses, same parameters bit for bit, later by the pause."""
    simulated = learning(seed=3, setting=start(policy="ssp", staleness=1))
    simulated.perform(Run(clocks=33))
    forks = [simulated.perform(Fork(0)) for _ in range(2)]
    windows = [simulated.perform(Run(clocks=60, branch=forks[0]))]
    simulated.perform(Run(clocks=25))
    windows.append(simulated.perform(Run(clocks=60, branch=forks[1])))
    one, two = (w.pushes for w in windows)
    for name in ("worker", "clock", "staleness", "loss"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    for name in ("compute_seconds", "pull_seconds", "push_seconds", "wait_seconds"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=1e-9, err_msg=name)
    gap = windows[1].start_seconds - windows[0].start_seconds
    np.testing.assert_allclose(two.seconds - one.seconds, gap, atol=1e-9)
    parameters = [branch(simulated, n).learned for n in forks]
    jax.tree.map(np.testing.assert_array_equal, *parameters)


def test_a_fork_continues_like_its_parent_and_costs_a_copy():
    simulated = learning(seed=3)
    simulated.perform(Run(clocks=33))
    before = simulated.now
    child = simulated.perform(Fork(0))
    assert simulated.now - before == pytest.approx(100.0 / 2 / 200.0)  # each server's bytes over the copying rate
    ours, theirs = simulated.perform(Run(clocks=40)), simulated.perform(Run(clocks=40, branch=child))
    np.testing.assert_array_equal(ours.pushes.loss, theirs.pushes.loss)
    alone = learning(seed=3).perform(Run(clocks=73)).pushes
    np.testing.assert_array_equal(ours.pushes.loss, alone.loss[33:])


def test_a_testing_branch_never_changes_parameters_nor_slots():
    momentum = job(SMALL, MODEL, optimizer="momentum")
    simulated = system(cluster(), momentum, start(momentum=0.5), Conditions(), knobs=KNOBS, costs=CHEAP)
    simulated.perform(Run(clocks=30))
    trial = simulated.perform(Fork(0, testing=True))
    before = branch(simulated, trial).learned
    first = (before.parameters, before.slots)
    seen = [simulated.perform(Evaluate(trial)).loss]
    for action in (
        Run(clocks=50, branch=trial),
        Reconfigure(start(workers=NAMES[:2], policy="bsp", momentum=0.5), branch=trial),
        Run(clocks=50, branch=trial),
    ):
        simulated.perform(action)
        seen.append(simulated.perform(Evaluate(trial)).loss)
    tried = branch(simulated, trial).learned
    jax.tree.map(np.testing.assert_array_equal, (tried.parameters, tried.slots), first)
    assert len(set(seen)) == 1
    grown = simulated.perform(Fork(trial))
    assert simulated.perform(Run(clocks=50, branch=grown)).clocks == 50
    assert simulated.perform(Evaluate(grown)).loss < seen[0]


def test_a_job_is_done_when_any_branch_is():
    simulated = learning(target=Target("clocks", 40))
    child = simulated.perform(Fork(0))
    assert simulated.perform(Run(clocks=100, branch=child)).clocks == 40
    assert simulated.status == "target"
