"""The cores of a live job in memory: old messages, saved snapshots, and losses."""

import random
import resource
import signal
from dataclasses import replace

import numpy as np
import pytest

from harness.live.coordinator.branches.branch import Shards
from harness.live.coordinator.ledger.journal import FileJournal
from harness.live.protocol import messages
from harness.live.protocol.log import CommitEntry, ForkEntry
from harness.live.protocol.messages import (
    BlockData,
    BlocksAwaited,
    BlocksMoved,
    GradientDone,
    LogAppend,
    Message,
    Pull,
    PushStaged,
    Release,
    StagePush,
)
from tests.live.support.memory import COORDINATOR, EVALUATOR, NODES, start
from tuners import policies
from tuners.actions import Decision, SyncPolicy, Target

# ------------------------------------------------------------------------------------------------- what is of the past


def test_a_push_staged_again_is_acknowledged_again_and_counts_once():
    memory = start(policy="bsp", workers=2)
    name, slow = messages.worker(NODES[0]), messages.worker(NODES[1])
    while not any(
        m for (s, _), queue in memory.channels.items() for m in queue if s == name and isinstance(m.head, StagePush)
    ):
        memory.deliver(memory.rng.choice([p for p in memory.pending() if p[0] != slow]))
    for _ in range(2):
        for pair in [p for p in memory.pending() if p[0] == name and p[1] != COORDINATOR]:
            repeated = list(memory.channels[pair])
            while memory.channels[pair]:
                memory.deliver(pair)
            memory.channels[pair].extend(repeated)
    acknowledged = [m.head for q in memory.channels.values() for m in q if isinstance(m.head, PushStaged)]
    assert len(acknowledged) >= 4
    memory.steps(300)
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


@pytest.mark.parametrize("on_demand", [False, True], ids=["migrate", "relocate"])
def test_blocks_that_are_sent_again_are_ignored(on_demand):
    """A connection that is made again may repeat what was sent before; by then, the log before it is dropped."""
    memory = start(servers=2, checks=True)
    memory.steps(200)
    source, target = map(messages.server, NODES[-2:])
    memory.coordinator.processes.place((target,), (1.0,), on_demand=on_demand)
    sent = []
    while memory.coordinator.moves.remaining:
        queue = memory.channels.get((source, target), ())
        sent += [m for m in queue if isinstance(m.head, BlockData) and not any(m is other for other in sent)]
        memory.step()
    memory.steps(200)
    assert sent
    memory.drain_until_idle(target)
    blocks = memory.cores[target].blocks
    for message in sent:
        memory.cores[target].receive(source, message)
    assert memory.cores[target].blocks == blocks
    assert not [m for m in memory.channels[target, COORDINATOR] if isinstance(m.head, BlocksMoved)]
    memory.steps(200)
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


def next_entry(memory):
    """To a server, a fork. Returns receiver, sender, head, and what tells that it was accepted."""
    name, end = messages.server(NODES[-1]), max(memory.coordinator.ledger.entries, default=memory.coordinator.ledger.durable)
    return name, COORDINATOR, LogAppend(end + 1, ForkEntry(1, 0)), lambda: 1 in memory.stores[name].branches


def next_release(memory):
    """To a worker, which pulls."""
    name = messages.worker(NODES[0])
    head = Release(2**40, branch=0, clock=99, after=0, durable=0, samples=4, shard_start=0, shard_length=1000)

    def accepted():
        return any(isinstance(m.head, Pull) for (s, _), queue in memory.channels.items() for m in queue if s == name)

    return name, COORDINATOR, head, accepted


def last_block_staged(memory):
    """To the coordinator, which commits the push."""
    memory.coordinator.training.run(0)
    cycle = memory.coordinator.branches.by_number[0].busy[0].number
    head = PushStaged(messages.worker(NODES[0]), cycle, ((0, 6),), GradientDone(cycle, 0.0, 0.0, 0.0, 0))
    pushes = memory.pushes[0]
    return COORDINATOR, messages.server(NODES[-1]), head, lambda: memory.pushes[0] > pushes


@pytest.mark.parametrize("make", [next_entry, next_release, last_block_staged])
@pytest.mark.parametrize("age", ["view", "generation", "none"])
def test_messages_of_an_older_view_or_generation_are_refused(make, age):
    memory = start()
    memory.steps(200)
    memory.recover()
    memory.settle()
    receiver, sender, head, accepted = make(memory)
    core = memory.coordinator if receiver == COORDINATOR else memory.cores[receiver]
    refused = core.refused
    core.receive(sender, Message(head, (), memory.coordinator.ledger.view - (age == "view"), 1 - (age == "generation")))
    assert core.refused - refused == (age != "none")
    assert accepted() == (age == "none")


def test_a_server_refuses_a_worker_that_was_dropped():
    memory = start()
    memory.steps(200)
    worker, name = messages.worker(NODES[0]), messages.server(NODES[-1])
    memory.kill(worker)
    memory.coordinator.processes.lose([worker])
    memory.drain_until_idle(name)
    core = memory.cores[name]
    refused = core.refused
    core.receive(worker, Message(Pull(1, 0, 0, ((0, 1),)), (), memory.coordinator.ledger.view, 1))
    assert core.refused == refused + 1


def test_a_worker_that_waits_for_blocks_holds_nothing_up_and_their_server_does():
    memory = start(policy="bsp", workers=1)
    coordinator, name = memory.coordinator, messages.worker(NODES[0])
    cycle = coordinator.branches.by_number[0].busy[0]
    computes = {name: f"has not computed mini-batch {cycle.clock}"}
    block, owner = next(iter(coordinator.ledger.table.items()))

    def hears(number, runs):
        coordinator.receive(name, Message(BlocksAwaited(number, runs), (), coordinator.ledger.view, 1))
        return coordinator.reports.held_up_by()

    assert coordinator.reports.held_up_by() == computes
    assert hears(cycle.number - 1, ((block, block + 1),)) == computes  # of a cycle that is over
    assert hears(cycle.number, ((block, block + 1),)) == {owner: f"has not sent the parameters that {name} pulls"}
    assert hears(cycle.number, ()) == computes


def test_a_coordinator_refuses_a_worker_that_was_replaced():
    memory = start(policy="bsp")
    name = messages.worker(NODES[0])
    cycle = memory.coordinator.branches.by_number[0].busy[0].number
    memory.coordinator.processes.expect(name, 2)
    assert name not in memory.coordinator.ledger.members
    memory.coordinator.receive(name, Message(GradientDone(cycle, 0.0, 0.0, 0.0, 0), (), 1, 1))
    assert memory.coordinator.refused == 1


@pytest.mark.parametrize(
    ("lost", "probes"), [(StagePush, False), (PushStaged, False), (GradientDone, True)], ids=["stage", "staged", "done"]
)
def test_lost_messages_of_a_push_are_sent_again(lost, probes):
    memory = start(policy=policies.asp()._replace(probes=probes), workers=1, retry_seconds=1.0)
    while pending := memory.pending():
        if isinstance(memory.channels[pending[0]][0].head, lost):
            memory.channels[pending[0]].popleft()
        else:
            memory.deliver(pending[0])
    assert memory.pushes[0] == 0
    memory.seconds += 10
    memory.coordinator.tick()
    memory.steps(50)
    assert memory.pushes[0] > 0


def test_a_journal_ignores_a_record_that_was_cut_short(tmp_path):
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


def test_a_full_disk_is_an_error_and_no_record_that_is_cut_short(tmp_path):
    """Without it, records after that one would not be found again."""
    journal = FileJournal(tmp_path / "journal")
    journal.append(b"one")
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "journal").stat().st_size + 5, limits[1]))
    try:
        for write in (journal.append, journal.restart):
            with pytest.raises(OSError, match="No space left"):
                write(b"two, which is longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(journal) == [b"one"]
    journal.close()


@pytest.mark.parametrize("forged", ["another key", "another place"])
def test_a_journal_gives_no_record_that_its_owner_did_not_write_there(tmp_path, forged):
    """A record can be code."""
    mine, other = tmp_path / "journal", tmp_path / "other"
    for path, records in ((mine, [b"one", b"two"]), (other, [b"one", b"code"])):
        journal = FileJournal(path)
        for record in records:
            journal.append(record)
        journal.close()
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}
    if forged == "another key":
        mine.write_bytes(other.read_bytes())
    else:
        whole = mine.read_bytes()
        mine.write_bytes(whole[len(whole) // 2 :] + whole[: len(whole) // 2])
    journal = FileJournal(mine)
    assert list(journal) == []
    journal.close()


# ---------------------------------------------------------------------------------------- evaluations, branches, saving


def test_an_evaluator_measures_while_training_goes_on():
    memory = start(evaluate_clocks=10, target=Target("accuracy", 30))  # the accuracy of `ones` is how often was pushed
    memory.start(EVALUATOR)
    number = memory.coordinator.training.evaluate(0)
    memory.drain()
    poll = memory.coordinator.reports.poll()
    assert poll.statuses == {0: "target"}
    numbers = [n for n, _ in poll.reports[0].evaluations]
    assert number in numbers
    assert 0 in numbers
    assert all(e.accuracy >= e.clocks for _, e in poll.reports[0].evaluations)


def test_a_fork_trains_while_its_parent_is_paused():
    memory = start(policy="bsp")
    memory.steps(300)
    fork = memory.coordinator.training.fork(0, replace(memory.setting, learning_rate=-2.0), policies.asp())
    memory.coordinator.training.run(fork)
    begun, busy = memory.pushes[0], memory.coordinator.branches.by_number[0].busy.keys()
    memory.steps(600)
    assert memory.pushes[0] == begun
    memory.coordinator.training.run(0)
    assert memory.coordinator.branches.by_number[0].busy.keys() >= busy
    memory.steps(200)
    memory.settle()
    more = memory.pushes[fork] - begun
    assert more > 10
    np.testing.assert_array_equal(memory.model(0), np.full(12, memory.pushes[0], np.float32))
    np.testing.assert_array_equal(memory.model(fork), np.full(12, begun + 2 * more, np.float32))
    memory.coordinator.training.free(fork)
    memory.drain()
    assert all(list(store.branches) == [0] for store in memory.stores.values())


def test_a_testing_branch_applies_nothing():
    memory = start()
    memory.steps(200)
    fork = memory.coordinator.training.fork(0, memory.setting, testing=True)
    memory.coordinator.training.run(fork)
    memory.steps(400)
    memory.settle()
    assert memory.pushes[fork] > memory.pushes[0]
    np.testing.assert_array_equal(memory.model(fork), np.full(12, memory.pushes[0], np.float32))


@pytest.mark.parametrize("servers", [1, 3])
def test_another_job_begins_from_a_saved_snapshot(servers):
    memory = start(random.Random(5), servers=servers, optimizer="momentum", momentum=1.0)
    memory.steps(400)
    index = memory.coordinator.states.snapshot(save=True)
    counted = memory.counted()[0]
    memory.steps(600)
    assert memory.coordinator.ledger.durable >= index
    vectors = memory.coordinator.states.saved(index)
    assert vectors[0]["velocity"].tolist() == [counted] * 12
    assert vectors[0]["parameters"].tolist() == [memory.value(counted)] * 12
    begun = memory.coordinator.states.checkpoint(index), vectors, memory.policies
    again = start(random.Random(6), servers=2, optimizer="momentum", momentum=1.0, begun=begun)
    assert again.pushes[0] == counted
    again.steps(300)
    again.settle()
    np.testing.assert_array_equal(again.model(), np.full(12, again.value(again.pushes[0]), np.float32))


def within_a_round(memory, pushes=40):
    """Train until two thirds of a BSP round are in progress; returns the rows so far."""
    while memory.pushes[0] < pushes or memory.pushes[0] % 3 != 1:
        memory.step()
    return memory.coordinator.reports.poll().reports[0].rows


def test_no_coordinator_gives_the_number_of_a_cycle_again():
    """Servers that lack entries, or that are silent, make a coordinator begin a view; it may die before they have it."""
    memory = start()
    memory.steps(300)
    memory.coordinator._repairs.begin_view()
    given = memory.coordinator._releases.next_cycle
    memory.restart_coordinator()
    assert memory.coordinator._releases.next_cycle > given


def test_rows_are_reported_until_the_driver_confirms_them():
    """The answer to the second poll is lost with the coordinator that gave it."""
    memory = start()
    memory.steps(300)
    first = memory.coordinator.reports.poll({}).reports[0]
    taken = {0: len(first.rows)}
    memory.steps(100)
    lost = memory.coordinator.reports.poll(taken).reports[0]
    assert (first.first, lost.first) == (0, len(first.rows))
    memory.restart_coordinator()
    again = memory.coordinator.reports.poll(taken).reports[0]
    assert again.first == lost.first
    assert len(lost.rows) > 0
    np.testing.assert_array_equal(again.rows[: len(lost.rows)], lost.rows)
    taken = {0: again.first + len(again.rows)}
    assert len(memory.coordinator.reports.poll(taken).reports[0].rows) == 0


@pytest.mark.parametrize("aggregation", ["each", "mean"])
def test_bsp_resumes_within_a_round_without_a_trace(aggregation):
    memory = start(policy="bsp", workers=3, aggregation=aggregation)
    rows = [within_a_round(memory)]
    if aggregation == "each":  # where gradients are grouped, nobody need finish
        assert not memory.coordinator.training.finish()
        memory.drain()
        assert memory.coordinator.training.finish()
        rows.append(memory.coordinator.reports.poll().reports[0].rows)
        assert len(rows[1]) == 2
        memory.coordinator.training.rest()
    again = start(random.Random(6), policy="bsp", workers=3, aggregation=aggregation, begun=memory.saved())
    again.steps(1000)
    rows.append(again.coordinator.reports.poll().reports[0].rows)
    clock, staleness, loss = np.concatenate(rows).T[[2, 7, 8]]
    count = np.arange(len(loss))
    assert len(count) > 60
    each = aggregation == "each"
    np.testing.assert_array_equal(clock, count // 3)
    np.testing.assert_array_equal(loss, count // 3 * (3 if each else 1))  # the loss of `ones` is what it pulled
    np.testing.assert_array_equal(staleness, count % 3 if each else 0 * count)


def test_a_waiting_worker_still_waits_after_a_resume():
    memory = start(policy="ssp", staleness=1, workers=3)
    slow = messages.worker(NODES[0])
    while others := [p for p in memory.pending() if slow not in p]:
        memory.deliver(memory.rng.choice(others))
    again = start(random.Random(6), policy="ssp", staleness=1, workers=3, begun=memory.saved())
    branch = again.coordinator.branches.by_number[0]
    assert (branch.clocks[:3].tolist(), list(branch.busy)) == ([0, 2, 2], [0])
    again.steps(400)
    again.settle()
    np.testing.assert_array_equal(again.model(), np.full(12, again.pushes[0], np.float32))


def test_a_push_that_was_saved_before_its_policy_decided_counts_once():
    def decide(state, push):
        return state, Decision(release=push.waiting)

    probing = SyncPolicy("probing", lambda active: (), decide, probes=True)
    memory = start(policy=probing, workers=2)
    while memory.pushes[0] < 20 or not memory.coordinator.branches.by_number[0].undecided:
        memory.step()
    again = start(random.Random(6), policy=probing, workers=2, begun=memory.saved())
    again.steps(800)
    again.settle()
    assert again.pushes[0] > 40
    np.testing.assert_array_equal(again.model(), np.full(12, again.pushes[0], np.float32))


def test_all_processes_can_be_replaced_from_the_coordinators_copy():
    memory = start(servers=2)
    memory.steps(300)
    memory.coordinator.training.halt(0)
    index = memory.coordinator.states.snapshot(save=True)
    memory.drain()
    assert memory.coordinator.ledger.durable >= index
    old = list(memory.cores)
    for name in old:
        memory.kill(name)
    memory.coordinator.processes.lose(old)
    for name in [messages.server(NODES[2]), *map(messages.worker, NODES[:2])]:
        memory.start(name)
    memory.drain()
    memory.recover()
    pushes = memory.pushes[0]
    memory.coordinator.training.put(0, replace(memory.setting, workers=NODES[:2], servers=NODES[2:3]))
    memory.coordinator.training.launch(0)
    memory.steps(300)
    memory.settle()
    assert memory.pushes[0] > pushes > 0
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


# -------------------------------------------------------------------------------------------------------------- losses


def test_pushes_lost_with_a_worker_and_a_server_are_counted():
    memory = start(random.Random(3), workers=2, servers=2, policy="bsp", snapshot_commits=1000)
    memory.steps(400)
    worker, server = messages.worker(NODES[0]), messages.server(NODES[-1])
    durable = memory.coordinator.ledger.durable
    mine = [e for i, e in memory.history.items() if isinstance(e, CommitEntry) and e.worker == worker and i > durable]
    memory.kill(worker)
    memory.kill(server)
    memory.coordinator.processes.lose([worker, server])
    memory.recover()
    memory.steps(200)
    memory.settle()
    assert memory.coordinator.reports.poll().lost_pushes == len(mine) > 5
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0] - len(mine), np.float32))


def test_withdrawn_pushes_leave_their_groups():
    policy = policies.k_batch_sync(2)
    memory = start(workers=2, servers=2, policy=policy, aggregation="sum", snapshot_commits=1000)
    memory.drain_until_idle(messages.server(NODES[-1]))
    worker, server = messages.worker(NODES[0]), messages.server(NODES[-1])
    for _ in range(3):  # two are a group, and one is left
        memory.push(worker)
    fork = memory.coordinator.training.fork(0, memory.setting)
    memory.kill(worker)
    memory.kill(server)
    memory.coordinator.processes.lose([worker, server])
    memory.recover()
    assert memory.coordinator.reports.poll().lost_pushes == 3
    assert [branch.grouped for branch in memory.coordinator.branches.by_number.values()] == [0, 0]
    memory.settle()
    assert memory.model(0).tolist() == memory.model(fork).tolist() == [0] * 12
    memory.coordinator.training.run(fork)
    memory.push(messages.worker(NODES[1]))
    memory.push(messages.worker(NODES[1]))
    memory.settle()
    assert memory.model(fork).tolist() == [2] * 12


def test_recovery_without_any_copy_of_a_block_is_refused():
    memory = start(servers=2)
    memory.steps(300)
    for name in [n for n in memory.cores if n.startswith("server")]:
        memory.kill(name)
        memory.coordinator.processes.lose([name])
    memory.start(messages.server(NODES[0]))
    memory.drain()
    with pytest.raises(RuntimeError, match="go back to a checkpoint"):
        memory.recover()


def test_a_restarted_server_gets_no_more_than_its_share():
    memory = start(servers=2)
    new, old = (messages.server(n) for n in NODES[-2:])
    memory.coordinator.processes.place((old,), (1.0,))
    memory.steps(400)
    assert set(memory.coordinator.ledger.table.values()) == {old}
    memory.coordinator.training.finish()
    memory.settle()
    memory.coordinator.states.snapshot(save=True)
    memory.drain()
    memory.kill(old)
    memory.kill(new)
    memory.coordinator.processes.lose([old, new])
    for name in (old, new):
        memory.start(name)
    memory.drain()
    memory.coordinator.processes.recover((new, old), (0.5, 0.5))
    memory.drain()
    owners = list(memory.coordinator.ledger.table.values())
    assert owners.count(old) == owners.count(new)


def test_a_job_without_any_copy_goes_back_to_the_saved_snapshot():
    memory = start(servers=2)
    memory.steps(300)
    index = memory.coordinator.states.snapshot(save=True)
    memory.steps(300)
    state, saved = memory.coordinator.states.checkpoint(index), memory.coordinator.states.saved(index)
    for name in [n for n in memory.cores if n.startswith("server")]:
        memory.kill(name)
        memory.coordinator.processes.lose([name])
    memory.start(messages.server(NODES[0]))
    memory.drain()
    before = memory.pushes[0]
    memory.coordinator.states.begin_from(state, saved, memory.policies)
    memory.recover()
    memory.coordinator.training.run(0)
    counted = memory.pushes[0]
    assert memory.coordinator.reports.poll().lost_pushes == before - counted > 0
    assert saved[0]["parameters"].tolist() == [counted] * 12
    memory.steps(300)
    memory.settle()
    assert memory.pushes[0] > counted + 10
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


def test_workers_keep_few_pushes():
    memory = start(snapshot_commits=10, checks=False)
    for _ in range(40):
        memory.steps(50)
        assert all(c.kept < 40 for n, c in memory.cores.items() if n.startswith("worker"))
    assert memory.pushes[0] > 100
    assert all(c.backlog < 5 for n, c in memory.cores.items() if n.startswith("server"))
    assert len(memory.coordinator.ledger.entries) < 60


def uneven(setting):
    return Shards(np.array([1, 3, 4, 4, 4, 4], np.int32), np.zeros(6, np.int32), np.full(6, 100, np.int32))


def test_a_mean_weighs_workers_by_their_samples():
    memory = start(workers=2, policy="bsp", aggregation="mean", shards=uneven)
    memory.push(messages.worker(NODES[0]))
    memory.push(messages.worker(NODES[1]))
    memory.settle()
    weights = [e.weight for e in memory.history.values() if isinstance(e, CommitEntry)]
    assert weights == [0.5, 1.5]
    np.testing.assert_array_equal(memory.model(), np.ones(12, np.float32))


def test_a_server_stays_until_every_worker_has_confirmed_that_its_blocks_are_elsewhere():
    memory = start(policy="asp", workers=2, servers=2)
    memory.recover()
    memory.steps(200)
    (stays, leaving), late = map(messages.server, memory.setting.servers), messages.worker(NODES[0])
    memory.coordinator.processes.place((stays,), (1.0,))
    for _ in range(2000):  # the late worker sends, and nothing reaches it
        pending = [pair for pair in memory.pending() if pair[1] != late]
        if not pending:
            break
        memory.deliver(memory.rng.choice(pending))
    assert set(memory.coordinator.ledger.table.values()) == {stays}
    memory.coordinator.processes.retire([leaving])
    for _ in range(2000):
        pending = [pair for pair in memory.pending() if pair[1] != late]
        if not pending:
            break
        memory.deliver(memory.rng.choice(pending))
    memory.coordinator.tick()
    assert memory.coordinator.processes.needed(leaving)
    memory.steps(3000)
    assert not memory.coordinator.processes.needed(leaving)
