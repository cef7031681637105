"""The cores of a live job in memory: what training does, step by step, against formulas and against the simulator."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from harness.live import messages
from harness.live.journal import FileJournal
from harness.live.line import Shards
from harness.live.log import Commit
from harness.live.messages import Done, Message, Pull, Stage, Staged
from harness.live.server_optimizer import Rates, slots, step
from harness.live.spec import Spec
from harness.live.worker import Computed
from harness.scenario import load, parse, system
from live.memory import COORDINATOR, EVALUATOR, NODES, Memory, start
from simulators.optimizers import OPTIMIZERS, REVISING, optimizer
from tuners import policies
from tuners.actions import Decision, Rejected, Run, SyncPolicy, Target


@pytest.mark.parametrize("policy", ["asp", "bsp", "ssp"])
def test_every_push_is_in_the_model_once(policy):
    memory = start(random.Random(1), policy=policy, staleness=2, checks=True)
    memory.steps(1500)
    memory.settle()
    assert memory.pushes[0] > 50
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in REVISING])
def test_servers_step_as_the_simulators_optimizers_do(name):
    rng = np.random.default_rng(0)
    size, rate, momentum = 70_000, 0.05, 0.9  # more than one piece
    ours = rng.normal(size=size).astype(np.float32)
    kept = {slot: np.zeros(size, np.float32) for slot in slots(name)}
    theirs, transform = jnp.array(ours), optimizer(name, rate, momentum)
    state, update = transform.init(theirs), jax.jit(transform.update)
    for steps in range(1, 6):
        gradient = rng.normal(size=size).astype(np.float32)
        step(name, ours, kept, gradient, Rates(rate, momentum, steps))
        updates, state = update(jnp.asarray(gradient), state, theirs)
        theirs = theirs + updates
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["adarevision", "lbfgs"])
def test_an_optimizer_that_cannot_run_live_is_refused(name):
    with pytest.raises(ValueError, match=f"Cannot train live with '{name}'"):
        slots(name)


def scripted(task):
    """A gradient that depends on what was pulled, and on the mini-batch."""
    if task.kind != "gradient":
        return Computed(task.number, task.kind, float(np.sum(task.parameters)))
    gradient = 0.5 * task.parameters + np.float32(1 + task.work.clock)
    return Computed(task.number, task.kind, float(np.sum(task.parameters)), gradient)


@pytest.mark.parametrize("bits", [16, 32])
def test_asynchronous_pushes_in_a_given_order_are_the_formula(bits):
    memory = start(workers=2, compute=scripted, learning_rate=0.1, transfer_bits=bits)
    memory.coordinator.poll()
    pulled = {w: np.zeros(12, np.float32) for w in (0, 1)}
    model, clocks = np.zeros(12, np.float32), [0, 0]
    for worker in (0, 1, 1, 0, 1, 1, 1, 0, 0):
        memory.push(messages.worker(NODES[worker]))
        model = model - np.float32(0.1) * (0.5 * pulled[worker] + np.float32(1 + clocks[worker]))
        pulled[worker], clocks[worker] = model, clocks[worker] + 1
    report = memory.coordinator.poll().reports[0]
    memory.settle()
    np.testing.assert_allclose(memory.model(), model, rtol=1e-6 if bits == 32 else 2e-3)
    assert bits == 32 or not np.allclose(memory.model(), model, rtol=1e-6)
    assert report.rows[:, 1].tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert report.rows[:, 2].tolist() == [0, 0, 1, 1, 2, 3, 4, 2, 3]
    assert report.rows[:, 7].tolist() == [0, 1, 0, 2, 1, 0, 0, 3, 0]


@pytest.mark.parametrize(
    ("policy", "optimizer", "aggregation"),
    [("bsp", "momentum", "each"), ("bsp", "sgd", "mean"), pytest.param("asp", "adam", "each", marks=pytest.mark.live)],
)
def test_training_live_is_training_simulated(policy, optimizer, aggregation):
    digits, demand = load('live-digits[metric="loss",value=1e-200]'), "[workload.overrides.demand]"
    kind = f'[workload.overrides]\noptimizer = "{optimizer}"\naggregation = "{aggregation}"\n{demand}'
    spec = Spec.of(parse(digits.text.replace(demand, kind), name="twin", origin=digits.origin), 3)
    rate = 0.005 if optimizer == "adam" else 0.05
    setting = replace(spec.job.start, policy=policy, momentum=0.9, learning_rate=rate)
    simulated = system(spec.scenario, 3, setting)
    seen = simulated.perform(Run(clocks=120))
    expected, _ = ravel_pytree(simulated._branches[0].state.learned.parameters)
    job = {"optimizer": optimizer, "aggregation": aggregation, "shards": spec.live_job.shards, "nodes": spec.live_job.nodes}
    live = Memory(
        random.Random(0), setting, compute=spec.compute, size=spec.layout.size, blocks=64, parameters=spec.parameters, **job
    )
    for worker in seen.pushes.worker:
        live.push(messages.worker(spec.live_job.nodes[worker]))
    rows = live.coordinator.poll().reports[0].rows
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
    assert memory.coordinator.poll().statuses[0] == "deadlock"
    assert memory.pushes[0] == 3


def test_a_loss_that_is_not_finite_ends_the_branch():
    def broken(task):
        return Computed(task.number, task.kind, np.nan, np.zeros(12, np.float32))

    memory = start(compute=broken)
    memory.drain()
    assert memory.coordinator.poll().statuses[0] == "diverged"
    assert memory.pushes[0] == 1


@pytest.mark.parametrize(("metric", "value", "pushes"), [("clocks", 7, 7), ("samples", 21, 6)])
def test_a_target_that_counts_ends_the_branch(metric, value, pushes):
    memory = start(target=Target(metric, value))
    memory.drain()
    assert memory.coordinator.poll().statuses[0] == "target"
    assert memory.pushes[0] == pushes


def test_the_bound_of_ssp_is_kept_while_others_stand_still():
    memory = start(policy="ssp", staleness=2, workers=3)
    slow = messages.worker(NODES[0])
    for _ in range(5000):
        others = [p for p in memory.pending() if p[0] != slow or p[1] != COORDINATOR]
        if not others:
            break
        memory.deliver(memory.rng.choice(others))
    assert memory.coordinator._cycles.lines[0].clocks[:3].tolist() == [0, 3, 3]


def test_probes_tell_the_loss_before_and_after_every_push():
    seen = []

    def decide(state, push):
        return (push.loss_before, push.loss_after), Decision(release=push.waiting)

    probing = SyncPolicy("probing", lambda active: (jnp.zeros(()), jnp.zeros(())), decide, probes=True)
    memory = start(policy=probing, workers=2)
    for _ in range(3000):
        pushes = memory.pushes[0]
        memory.step()
        if memory.pushes[0] > pushes:
            seen.append([float(x) for x in memory.coordinator._cycles.lines[0].state])
    memory.settle()
    assert len(seen) > 30
    assert all(before < after for before, after in seen)  # the loss of `ones` is how often was pushed
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


def test_probes_are_refused_where_gradients_are_grouped():
    memory = start(aggregation="mean")
    with pytest.raises(Rejected, match="asks for losses"):
        memory.coordinator.put(0, memory.setting, never("probing", probes=True))


def test_a_busy_worker_that_is_released_gives_up():
    memory = start(policy=policies.k_sync(1), workers=3)
    memory.push(messages.worker(NODES[0]))
    memory.drain_until_idle(messages.worker(NODES[1]))
    rows = memory.coordinator.poll().reports[0].rows
    assert rows[0, 1] == 0
    line = memory.coordinator._cycles.lines[0]
    assert [line.drawn[w] for w in range(3)] == [2, 2, 2]  # the others' first mini-batch came to nothing


def test_a_policy_put_in_force_anew_lets_those_go_on_who_wait():
    memory = start(policy=never("never"))
    memory.push(messages.worker(NODES[0]))
    memory.push(messages.worker(NODES[1]))
    memory.coordinator.put(0, memory.setting, policies.asp())
    memory.steps(500)
    memory.settle()
    assert memory.pushes[0] > 10
    assert memory.coordinator.poll().statuses[0] == "running"


# ------------------------------------------------------------------------------------------------- what is of the past


def test_what_is_staged_again_is_acknowledged_again_and_counts_once():
    memory = start(policy="bsp", workers=2)
    name, slow = messages.worker(NODES[0]), messages.worker(NODES[1])
    while not memory.cores[name]._told:
        memory.deliver(memory.rng.choice([p for p in memory.pending() if p[0] != slow]))
    stages = [m for (s, r), queue in memory.channels.items() for m in queue if s == name and isinstance(m.head, Stage)]
    assert stages
    for _ in range(2):
        for pair in [p for p in memory.pending() if p[0] == name and p[1] != COORDINATOR]:
            repeated = list(memory.channels[pair])
            while memory.channels[pair]:
                memory.deliver(pair)
            memory.channels[pair].extend(repeated)
    acknowledged = [m.head for q in memory.channels.values() for m in q if isinstance(m.head, Staged)]
    assert len(acknowledged) >= 4
    memory.steps(300)
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


@pytest.mark.parametrize("age", ["view", "generation"])
def test_messages_of_the_past_are_refused(age):
    memory = start()
    memory.steps(200)
    view = memory.coordinator._ledger.view
    name = messages.server(NODES[-1])
    core, refused = memory.cores[name], memory.cores[name].refused
    core._members[messages.worker("n0")] = 2
    core.receive(messages.worker("n0"), Message(Pull(1, 0, 0, ((0, 1),)), (), view - (age == "view"), 1))
    assert core.refused == refused + 1
    refused = memory.coordinator.refused
    given = (view - 1, 1) if age == "view" else (view, 0)
    memory.coordinator.receive(name, Message(Staged("worker/n0", 1, ((0, 1),)), (), *given))
    assert memory.coordinator.refused == refused + 1


def test_a_coordinator_believes_no_worker_that_was_replaced():
    memory = start(policy="bsp")
    name = messages.worker(NODES[0])
    memory.coordinator.expect(name, 2)
    assert name not in memory.coordinator.members
    cycle = memory.coordinator._cycles.last
    memory.coordinator.receive(name, Message(Done(cycle, 0.0, 0.0, 0.0, 0), (), 1, 1))
    assert memory.coordinator.refused == 1


def test_a_journal_leaves_out_what_was_cut_short(tmp_path):
    path = tmp_path / "journal"
    journal = FileJournal(path)
    for record in (b"one", b"two", b""):
        journal.append(record)
    assert list(journal) == [b"one", b"two", b""]
    journal.append(b"cut short")
    journal.close()
    path.write_bytes(path.read_bytes()[:-1])
    journal = FileJournal(path)
    journal.append(b"three")
    assert list(journal) == [b"one", b"two", b"", b"three"]
    journal.restart(b"anew")
    journal.append(b"and on")
    assert list(journal) == [b"anew", b"and on"]
    journal.close()


# ---------------------------------------------------------------------------------------- evaluations, branches, saving


def test_an_evaluator_measures_while_training_goes_on():
    memory = start(evaluate_clocks=10, target=Target("accuracy", 30))  # the accuracy of `ones` is how often was pushed
    memory.start(EVALUATOR)
    number = memory.coordinator.evaluate(0)
    memory.drain()
    poll = memory.coordinator.poll()
    assert poll.statuses == {0: "target"}
    numbers = [n for n, _ in poll.reports[0].evaluations]
    assert number in numbers
    assert 0 in numbers
    assert all(e.accuracy >= e.clocks for _, e in poll.reports[0].evaluations)


def test_a_branch_goes_its_own_way_and_the_other_stands_still():
    memory = start(policy="bsp")
    memory.steps(300)
    fork = memory.coordinator.fork(0, replace(memory.setting, learning_rate=-2.0), policies.asp())
    memory.coordinator.run(fork)
    begun, busy = memory.pushes[0], memory.coordinator._cycles.lines[0].busy.keys()
    memory.steps(600)
    assert memory.pushes[0] == begun
    memory.coordinator.run(0)
    assert memory.coordinator._cycles.lines[0].busy.keys() >= busy
    memory.steps(200)
    memory.settle()
    more = memory.pushes[fork] - begun
    assert more > 10
    np.testing.assert_array_equal(memory.model(0), np.full(12, memory.pushes[0], np.float32))
    np.testing.assert_array_equal(memory.model(fork), np.full(12, begun + 2 * more, np.float32))
    memory.coordinator.free(fork)
    memory.drain()
    assert all(list(c._store.branches) == [0] for n, c in memory.cores.items() if n.startswith("server"))


def test_a_testing_branch_applies_nothing():
    memory = start()
    memory.steps(200)
    fork = memory.coordinator.fork(0, memory.setting, testing=True)
    memory.coordinator.run(fork)
    memory.steps(400)
    memory.settle()
    assert memory.pushes[fork] > memory.pushes[0]
    np.testing.assert_array_equal(memory.model(fork), np.full(12, memory.pushes[0], np.float32))


@pytest.mark.parametrize("servers", [1, 3])
def test_what_was_saved_begins_another_job(servers):
    memory = start(random.Random(5), servers=servers, optimizer="momentum", momentum=1.0)
    memory.steps(400)
    index = memory.coordinator.snapshot(save=True)
    counted = memory.counted()[0]
    memory.steps(600)
    assert memory.coordinator.durable >= index
    saved = memory.coordinator.saved(index)
    assert saved[0]["velocity"].tolist() == [counted] * 12
    assert saved[0]["parameters"].tolist() == [memory.value(counted)] * 12
    begun = memory.coordinator.checkpoint(index), saved
    again = start(random.Random(6), servers=2, optimizer="momentum", momentum=1.0, begun=begun)
    assert again.pushes[0] == counted
    again.steps(300)
    again.settle()
    np.testing.assert_array_equal(again.model(), np.full(12, again.value(again.pushes[0]), np.float32))


def test_everybody_can_be_replaced_from_what_the_coordinator_saved():
    memory = start(servers=2)
    memory.steps(300)
    memory.coordinator.halt(0)
    index = memory.coordinator.snapshot(save=True)
    memory.drain()
    assert memory.coordinator.durable >= index
    old = list(memory.cores)
    for name in old:
        memory.kill(name)
    memory.coordinator.lose(old)
    for name in [messages.server(NODES[2]), *map(messages.worker, NODES[:2])]:
        memory.start(name)
    memory.drain()
    memory.recover()
    pushes = memory.pushes[0]
    memory.coordinator.put(0, replace(memory.setting, workers=NODES[:2], servers=NODES[2:3]))
    memory.coordinator.launch(0)
    memory.steps(300)
    memory.settle()
    assert memory.pushes[0] > pushes > 0
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


# -------------------------------------------------------------------------------------------------------------- losses


def test_what_a_worker_and_a_server_take_with_them_is_counted():
    memory = start(random.Random(3), workers=2, servers=2, policy="bsp", snapshot_commits=1000)
    memory.steps(400)
    worker, server = messages.worker(NODES[0]), messages.server(NODES[-1])
    durable = memory.coordinator.durable
    mine = [e for i, e in memory.history.items() if isinstance(e, Commit) and e.worker == worker and i > durable]
    memory.kill(worker)
    memory.kill(server)
    memory.coordinator.lose([worker, server])
    memory.recover()
    memory.steps(200)
    memory.settle()
    assert memory.coordinator.poll().lost_pushes == len(mine) > 5
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0] - len(mine), np.float32))


def test_groups_are_smaller_by_all_that_is_withdrawn():
    policy = policies.k_batch_sync(2)
    memory = start(workers=2, servers=2, policy=policy, aggregation="sum", snapshot_commits=1000)
    memory.drain_until_idle(messages.server(NODES[-1]))
    worker, server = messages.worker(NODES[0]), messages.server(NODES[-1])
    for _ in range(3):  # two are a group, and one is left
        memory.push(worker)
    fork = memory.coordinator.fork(0, memory.setting)
    memory.kill(worker)
    memory.kill(server)
    memory.coordinator.lose([worker, server])
    memory.recover()
    assert memory.coordinator.poll().lost_pushes == 3
    assert [line.grouped for line in memory.coordinator._cycles.lines.values()] == [0, 0]
    memory.settle()
    assert memory.model(0).tolist() == memory.model(fork).tolist() == [0] * 12
    memory.coordinator.run(fork)
    memory.push(messages.worker(NODES[1]))
    memory.push(messages.worker(NODES[1]))
    memory.settle()
    assert memory.model(fork).tolist() == [2] * 12


def test_nobody_who_has_a_copy_means_an_error_that_says_so():
    memory = start(servers=2)
    memory.steps(300)
    for name in [n for n in memory.cores if n.startswith("server")]:
        memory.kill(name)
        memory.coordinator.lose([name])
    memory.start(messages.server(NODES[0]))
    memory.drain()
    with pytest.raises(RuntimeError, match="resume from a checkpoint"):
        memory.recover()


def test_a_job_of_which_nobody_has_a_copy_goes_back_to_what_was_saved():
    memory = start(servers=2)
    memory.steps(300)
    index = memory.coordinator.snapshot(save=True)
    memory.steps(300)
    state, saved = memory.coordinator.checkpoint(index), memory.coordinator.saved(index)
    for name in [n for n in memory.cores if n.startswith("server")]:
        memory.kill(name)
        memory.coordinator.lose([name])
    memory.start(messages.server(NODES[0]))
    memory.drain()
    before = memory.pushes[0]
    memory.coordinator.begin_from(state, saved)
    memory.recover()
    memory.coordinator.run(0)
    counted = memory.pushes[0]
    assert memory.coordinator.poll().lost_pushes == before - counted > 0
    assert saved[0]["parameters"].tolist() == [counted] * 12
    memory.steps(300)
    memory.settle()
    assert memory.pushes[0] > counted + 10
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


def test_workers_keep_few_pushes():
    memory = start(snapshot_commits=10, checks=False)
    for _ in range(40):
        memory.steps(50)
        assert all(len(c._kept) < 40 for n, c in memory.cores.items() if n.startswith("worker"))
    assert memory.pushes[0] > 100
    assert all(len(c._log) < 5 for n, c in memory.cores.items() if n.startswith("server"))
    assert len(memory.coordinator._ledger.entries) < 60


def uneven(setting):
    return Shards(np.array([1, 3, 4, 4, 4, 4], np.int32), np.zeros(6, np.int32), np.full(6, 100, np.int32))


def test_a_mean_weighs_workers_by_their_samples():
    memory = start(workers=2, policy="bsp", aggregation="mean", shards=uneven)
    memory.push(messages.worker(NODES[0]))
    memory.push(messages.worker(NODES[1]))
    memory.settle()
    weights = [e.weight for e in memory.history.values() if isinstance(e, Commit)]
    assert weights == [0.5, 1.5]
    np.testing.assert_array_equal(memory.model(), np.ones(12, np.float32))


def test_who_is_late_at_a_barrier_sees_what_the_others_saw():
    memory = start(policy="bsp", workers=3, servers=2)
    late = messages.worker(NODES[0])
    for _ in range(20000):  # it hears and says nothing as long as anybody else has something to do
        pending = memory.pending()
        others = [p for p in pending if late not in p]
        memory.deliver(memory.rng.choice(others or pending))
        if memory.pushes[0] >= 60:
            break
    rows = memory.coordinator.poll().reports[0].rows
    np.testing.assert_array_equal(rows[:, 8], np.arange(len(rows)) // 3 * 3)  # the loss of `ones` is what it pulled


def test_cycles_under_way_are_probed_when_a_policy_that_probes_is_installed():
    memory = start(policy="bsp", workers=2)
    memory.steps(150)
    seen = []

    def decide(state, push):
        return (push.loss_before, push.loss_after), Decision(release=push.waiting)

    probing = SyncPolicy("probing", lambda active: (jnp.zeros(()), jnp.zeros(())), decide, probes=True)
    memory.coordinator.put(0, memory.setting, probing)
    for _ in range(800):
        pushes = memory.pushes[0]
        memory.step()
        if memory.pushes[0] > pushes:
            seen.append([float(x) for x in memory.coordinator._cycles.lines[0].state])
    assert len(seen) > 8
    assert all(0 < before < after for before, after in seen)
    memory.coordinator.put(0, memory.setting, policies.asp())
    memory.steps(300)
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))
