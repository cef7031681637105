"""The cores of a live job in memory: training compared with formulas and with the simulator."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from harness.live.protocol import messages
from harness.live.server.optimizer import Rates, slots, step
from harness.live.worker.spec import Spec
from harness.live.worker.tasks import Computed
from harness.scenario import load, parse, system
from simulators.engine.limits import REVISING
from simulators.engine.optimizers import OPTIMIZERS, optimizer
from tests.live.support.memory import NODES, Memory, start
from tests.support.marks import slow
from tuners import policies
from tuners.actions import Decision, Rejected, Run, SyncPolicy, Target


@pytest.mark.parametrize("policy", ["asp", "bsp", "ssp"])
def test_every_push_is_in_the_model_once(policy):
    memory = start(random.Random(1), policy=policy, staleness=2, checks=True)
    memory.steps(1500)
    memory.settle()
    assert memory.pushes[0] > 50
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


def test_the_coordinator_says_how_long_the_policy_holds_back_who_waits():
    """A worker that is never released pushes never again, so that no push tells how long it has waited."""

    def all_but_the_first(state, push):
        return state, Decision(push.waiting & (jnp.arange(len(NODES)) > 0))

    memory = start(policy=SyncPolicy("parked", lambda active: jnp.zeros(()), all_but_the_first))
    memory.steps(400)
    earlier, later = (memory.coordinator.reports.poll().held_seconds for _ in range(2))
    assert earlier.keys() == later.keys() == {NODES[0]}
    assert 0 < earlier[NODES[0]] < later[NODES[0]] < memory.seconds
    memory.coordinator.training.rest()
    assert memory.coordinator.reports.poll().held_seconds == {}


# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in REVISING])
def test_servers_step_as_the_simulators_optimizers_do(name):
    rng = np.random.default_rng(0)
    size, rate, momentum = 70_000, 0.05, 0.9  # more than one piece
    ours = rng.normal(size=size).astype(np.float32)
    kept = {slot: np.zeros(size, np.float32) for slot in slots(name)}
    theirs, transform = jnp.array(ours.copy()), optimizer(name, rate, momentum)
    state, update = transform.init(theirs), jax.jit(transform.update)
    for steps in range(1, 6):
        gradient = rng.normal(size=size).astype(np.float32)
        ours = step(name, ours, kept, gradient, Rates(rate, momentum, steps), np.empty_like(ours))
        updates, state = update(jnp.asarray(gradient), state, theirs)
        theirs = theirs + updates
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["adarevision", "lbfgs"])
def test_an_optimizer_that_cannot_run_live_is_refused(name):
    with pytest.raises(ValueError, match=f"Cannot train live with '{name}'"):
        slots(name)


def scripted(task):
    """A gradient that depends on the pulled parameters and on the mini-batch."""
    if task.kind != "gradient":
        return Computed(task.number, task.kind, float(np.sum(task.parameters)))
    gradient = 0.5 * task.parameters + np.float32(1 + task.work.clock)
    return Computed(task.number, task.kind, float(np.sum(task.parameters)), gradient)


@pytest.mark.parametrize("bits", [16, 32])
def test_asynchronous_pushes_in_a_given_order_follow_the_formula(bits):
    memory = start(workers=2, compute=scripted, learning_rate=0.1, transfer_bits=bits)
    memory.coordinator.reports.poll()
    pulled = {w: np.zeros(12, np.float32) for w in (0, 1)}
    model, clocks = np.zeros(12, np.float32), [0, 0]
    for worker in (0, 1, 1, 0, 1, 1, 1, 0, 0):
        memory.push(messages.worker(NODES[worker]))
        model = model - np.float32(0.1) * (0.5 * pulled[worker] + np.float32(1 + clocks[worker]))
        pulled[worker], clocks[worker] = model, clocks[worker] + 1
    report = memory.coordinator.reports.poll().reports[0]
    memory.settle()
    np.testing.assert_allclose(memory.model(), model, rtol=1e-6 if bits == 32 else 2e-3)
    assert bits == 32 or not np.allclose(memory.model(), model, rtol=1e-6)
    assert report.rows[:, 1].tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert report.rows[:, 2].tolist() == [0, 0, 1, 1, 2, 3, 4, 2, 3]
    assert report.rows[:, 7].tolist() == [0, 1, 0, 2, 1, 0, 0, 3, 0]


@pytest.mark.parametrize(
    ("policy", "optimizer", "aggregation"),
    [
        ("bsp", "momentum", "mean"),  # `test_bsp_live_is_bsp_simulated` has the descent "each" of `sgd`
        slow("bsp", "momentum", "each"),
        slow("bsp", "sgd", "mean"),
        pytest.param("asp", "adam", "each", marks=pytest.mark.live),
    ],
)
def test_live_training_equals_simulated_training(policy, optimizer, aggregation):
    digits, demand = load('live-digits[metric="loss",value=1e-200]'), "[workload.overrides.demand]"
    kind = f'[workload.overrides]\noptimizer = "{optimizer}"\naggregation = "{aggregation}"\n{demand}'
    text = digits.text.replace(demand, kind).replace("digits-mlp", "digits-logistic")  # of few parameters
    spec = Spec.of(parse(text, name="twin", origin=digits.origin), 3)
    rate = 0.005 if optimizer == "adam" else 0.05
    setting = replace(spec.job.start, policy=policy, momentum=0.9, learning_rate=rate)
    simulated = system(spec.scenario, 3, setting)
    seen = simulated.perform(Run(clocks=60))
    expected, _ = ravel_pytree(simulated.branches[0].state.learned.parameters)
    job = {"optimizer": optimizer, "aggregation": aggregation, "shards": spec.live_job.shards, "nodes": spec.live_job.nodes}
    live = Memory(
        random.Random(0), setting, compute=spec.compute, size=spec.layout.size, blocks=64, parameters=spec.parameters, **job
    )
    for worker in seen.pushes.worker:
        live.push(messages.worker(spec.live_job.nodes[worker]))
    rows = live.coordinator.reports.poll().reports[0].rows
    live.settle()
    np.testing.assert_allclose(live.model(), expected, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(rows[:, 2], seen.pushes.clock)
    np.testing.assert_array_equal(rows[:, 7], seen.pushes.staleness)
    np.testing.assert_allclose(rows[:, 8], seen.pushes.loss, rtol=0, atol=2e-4)


# -------------------------------------------------------------------------------------------------------------- policies


def never(name, release=lambda push: push.waiting & False, **kind):
    def decide(state, push):
        return state, Decision(release=release(push))

    return SyncPolicy(name, lambda active: active, decide, **kind)


def test_a_policy_that_releases_nobody_is_detected():
    memory = start(policy=never("never"))
    memory.drain()
    assert memory.coordinator.reports.poll().statuses[0] == "deadlock"
    assert memory.pushes[0] == 3


def test_a_loss_that_is_not_finite_ends_the_branch():
    def broken(task):
        return Computed(task.number, task.kind, np.nan, np.zeros(12, np.float32))

    memory = start(compute=broken)
    memory.drain()
    assert memory.coordinator.reports.poll().statuses[0] == "diverged"
    assert memory.pushes[0] == 1


@pytest.mark.parametrize(("metric", "value", "pushes"), [("clocks", 7, 7), ("samples", 21, 6)])
def test_a_target_that_counts_ends_the_branch(metric, value, pushes):
    memory = start(target=Target(metric, value))
    memory.drain()
    assert memory.coordinator.reports.poll().statuses[0] == "target"
    assert memory.pushes[0] == pushes


def test_fast_workers_stop_at_the_bound_of_ssp():
    memory = start(policy="ssp", staleness=2, workers=3)
    slow = messages.worker(NODES[0])
    for _ in range(5000):
        others = [p for p in memory.pending() if p[0] != slow or not memory.is_push(p)]
        if not others:
            break
        memory.deliver(memory.rng.choice(others))
    assert memory.coordinator.branches.by_number[0].clocks[:3].tolist() == [0, 3, 3]


def test_probes_measure_the_loss_before_and_after_every_push():
    seen = []

    def decide(state, push):
        return (push.loss_before, push.loss_after), Decision(release=push.waiting)

    probing = SyncPolicy("probing", lambda active: (jnp.zeros(()), jnp.zeros(())), decide, probes=True)
    memory = start(policy=probing, workers=2)
    for _ in range(3000):
        pushes = memory.pushes[0]
        memory.step()
        if memory.pushes[0] > pushes:
            seen.append([float(x) for x in memory.coordinator.branches.by_number[0].state])
    memory.settle()
    assert len(seen) > 30
    assert all(before < after for before, after in seen)  # the loss of `ones` is how often was pushed
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


def test_probes_are_refused_where_gradients_are_grouped():
    memory = start(aggregation="mean")
    with pytest.raises(Rejected, match="asks for losses"):
        memory.coordinator.training.put(0, memory.setting, never("probing", probes=True))


def test_timers_are_refused():
    memory = start()
    with pytest.raises(Rejected, match=r"'quorum\(2,1\)': it sets a timer, and policies decide at pushes only here"):
        memory.coordinator.training.put(0, memory.setting, policies.quorum(2, 1.0))


def test_a_busy_worker_that_is_released_drops_its_mini_batch():
    memory = start(policy=policies.k_sync(1), workers=3)
    memory.push(messages.worker(NODES[0]))
    memory.drain_until_idle(messages.worker(NODES[1]))
    rows = memory.coordinator.reports.poll().reports[0].rows
    assert rows[0, 1] == 0
    branch = memory.coordinator.branches.by_number[0]
    assert [branch.begun[w] for w in range(3)] == [2, 2, 2]  # the others' first mini-batch was dropped


def test_a_new_policy_releases_the_workers_that_wait():
    memory = start(policy=never("never"))
    memory.push(messages.worker(NODES[0]))
    memory.push(messages.worker(NODES[1]))
    memory.coordinator.training.put(0, memory.setting, policies.asp())
    memory.steps(500)
    memory.settle()
    assert memory.pushes[0] > 10
    assert memory.coordinator.reports.poll().statuses[0] == "running"


def test_a_worker_that_joins_a_paused_branch_has_not_waited():
    memory = start(workers=2)
    memory.coordinator.training.run(memory.coordinator.training.fork(0, memory.setting))
    memory.start(messages.worker(NODES[2]))
    memory.steps(200)
    memory.seconds += 100
    memory.coordinator.training.put(0, replace(memory.setting, workers=NODES[:3]))
    memory.seconds += 100
    memory.coordinator.training.run(0)
    memory.steps(300)
    rows = memory.coordinator.reports.poll().reports[0].rows
    assert set(rows[:, 1]) == {0, 1, 2}
    assert 0 <= rows[:, 6].min() <= rows[:, 6].max() < 100


def test_a_worker_that_is_late_at_a_barrier_pulls_what_the_others_pulled():
    memory = start(policy="bsp", workers=3, servers=2)
    late = messages.worker(NODES[0])
    for _ in range(20000):  # it hears and says nothing as long as anybody else has something to do
        pending = memory.pending()
        others = [p for p in pending if late not in p]
        memory.deliver(memory.rng.choice(others or pending))
        if memory.pushes[0] >= 60:
            break
    rows = memory.coordinator.reports.poll().reports[0].rows
    np.testing.assert_array_equal(rows[:, 8], np.arange(len(rows)) // 3 * 3)  # the loss of `ones` is what it pulled


def test_cycles_in_progress_are_probed_when_a_policy_that_probes_is_installed():
    memory = start(policy="bsp", workers=2)
    memory.steps(150)
    seen = []

    def decide(state, push):
        return (push.loss_before, push.loss_after), Decision(release=push.waiting)

    probing = SyncPolicy("probing", lambda active: (jnp.zeros(()), jnp.zeros(())), decide, probes=True)
    memory.coordinator.training.put(0, memory.setting, probing)
    for _ in range(800):
        pushes = memory.pushes[0]
        memory.step()
        if memory.pushes[0] > pushes:
            seen.append([float(x) for x in memory.coordinator.branches.by_number[0].state])
    assert len(seen) > 8
    assert all(0 < before < after for before, after in seen)
    memory.coordinator.training.put(0, memory.setting, policies.asp())
    memory.steps(300)
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))
