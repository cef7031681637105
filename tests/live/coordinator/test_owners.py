"""Owners of the coordinator's state, each by itself: pending pushes, tables of workers, branches, the journal's record."""

import numpy as np
import pytest

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob, PushFacts
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.membership.worker_tables import WorkerTables
from harness.live.coordinator.state_record import StateRecord
from harness.live.protocol.blocks import Layout
from harness.live.protocol.log import FreeEntry, MoveEntry
from harness.live.protocol.messages import GradientDone, OwnerTable
from tests.live.support.memory import NODES, Journal, everybody
from tuners import policies
from tuners.actions import Evaluation, Setting, Target

SETTING = Setting(workers=NODES[:2], servers=NODES[-1:])
RESULT = GradientDone(cycle=7, loss=1.0, pull_seconds=0.1, compute_seconds=0.2, index=3)


def ledger(journal=None):
    """A ledger of two blocks, and the list of what it sends."""
    sent = []
    made = Ledger(Layout(4, 2), lambda receiver, message: sent.append((receiver, message.head)), journal or Journal())
    return made, sent


def branches(made, target=Target("clocks", 3)):  # noqa: B008 - it is immutable
    """Branch 0, which trains, of a job with that target."""
    job = LiveJob(nodes=NODES, size=4, blocks=2, target=target, evaluate_clocks=0, shards=everybody)
    owner = Branches(job, made, lambda: 10.0)
    branch = CoordinatorBranch(0, SETTING, policies.asp(), everybody(SETTING), testing=False, groups=False)
    owner.replace({0: branch})
    owner.running = 0
    return owner, branch


# ----------------------------------------------------------------------------------------------------------------- pushes


def test_a_push_can_be_committed_once_its_result_and_all_its_blocks_are_there():
    pending = PendingPushes(blocks=2)
    assert pending.computed(0, RESULT)
    assert not pending.computed(0, RESULT)  # known
    pending.stage(0, frozenset({0}))
    assert pending.to_commit(0) is None
    pending.stage(0, frozenset({0, 1}))
    assert pending.to_commit(0) == RESULT
    assert pending.to_commit(1) is None  # another worker
    pending.undecided[0] = PushFacts(0, 1.0, 1.0, 0.1, 0.2, 3)
    assert pending.to_commit(0) is None  # it is committed


def test_a_push_is_forgotten_as_a_whole_or_only_what_servers_had_of_it():
    pending = PendingPushes(blocks=1)
    for worker in (0, 1):
        pending.computed(worker, RESULT)
        pending.stage(worker, frozenset({0}))
    pending.forget_staged()
    assert pending.is_computed(0)
    assert pending.staged(0) == frozenset()
    pending.forget(0)
    assert not pending.is_computed(0)
    assert pending.is_computed(1)


# ----------------------------------------------------------------------------------------------------------------- tables


def test_a_worker_is_told_the_table_once_after_each_change():
    made, sent = ledger()
    made.members = {"worker/n0": 1, "server/n5": 1}
    tables = WorkerTables(made)
    tables.all_in_view()
    tables.update("worker/n0")
    assert sent == []
    assert not tables.some_behind
    made.append(MoveEntry(((0, 1),), "coordinator", "server/n5", False))
    assert tables.some_behind
    for _ in range(2):
        tables.update("worker/n0")
    assert [head.index for _, head in sent if isinstance(head, OwnerTable)] == [1]
    assert tables.some_behind  # until it has confirmed
    tables.confirmed("worker/n0", 1)
    tables.confirmed("worker/n0", 0)  # an older confirmation, late
    assert not tables.some_behind


# --------------------------------------------------------------------------------------------------------------- branches


def test_a_worker_is_in_one_cycle_only():
    owner, branch = branches(ledger()[0])
    branch.begin(1, number=7, seconds=0.0, after=0)
    assert owner.busy == {"worker/n1"}
    assert owner.in_cycle("worker/n1", 7) == 1
    assert [owner.in_cycle(*given) for given in (("worker/n1", 6), ("worker/n0", 7), ("worker/x", 7))] == [None] * 3
    owner.running = None
    assert owner.in_cycle("worker/n1", 7) is None


@pytest.mark.parametrize(("pushes", "busy", "status"), [(3, True, "target"), (2, True, "running"), (2, False, "deadlock")])
def test_a_branch_ends_at_its_target_or_when_nobody_can_push(pushes, busy, status):
    owner, branch = branches(ledger()[0])
    branch.pushes = pushes
    if busy:
        branch.begin(0, number=1, seconds=0.0, after=0)
    owner.update_status(branch)
    assert branch.status == status


def test_an_evaluation_can_reach_the_target():
    owner, branch = branches(ledger()[0], Target("accuracy", 0.9))
    owner.evaluated(0, Evaluation(1.0, 5, 0.3, 0.8))
    assert branch.status == "running"
    owner.evaluated(0, Evaluation(2.0, 9, 0.2, 0.95))
    assert branch.status == "target"


def test_rows_stay_until_they_are_confirmed():
    owner, branch = branches(ledger()[0])
    branch.rows = [tuple(map(float, range(i, i + 11))) for i in range(3)]
    assert owner.rows_from(branch, 0)[1].shape == (3, 11)
    first, rows = owner.rows_from(branch, 2)
    assert (first, len(rows)) == (2, 1)
    np.testing.assert_array_equal(rows[0], np.arange(2.0, 13.0))
    assert owner.rows_from(branch, 1)[0] == 2  # an older confirmation


def test_pushes_of_a_branch_that_is_not_restored_are_lost_since_its_fork():
    owner, branch = branches(ledger()[0])
    branch.pushes = 10
    fork = branch.forked(1, testing=False)
    fork.pushes = 14
    restored = branch.forked(0, testing=False)
    restored.pushes = 7
    before = owner.replace({0: restored})
    assert owner.lost_since({**before, 1: fork}) == 3 + 4


# ---------------------------------------------------------------------------------------------------------------- journal


def test_a_journal_brings_back_the_state_and_the_changes_since():
    journal = Journal()
    made, _ = ledger(journal)
    owner, _ = branches(made)
    owner.next_number = 5
    StateRecord(made, {"ledger": made, "branches": owner}).write()
    made.append(FreeEntry(3))

    again, sent = ledger(journal)
    later, _ = branches(again)
    before = list(journal)
    StateRecord(again, {"ledger": again, "branches": later}).replay(journal, {"entry": again.append})
    assert (later.next_number, later.running, sorted(later.by_number)) == (5, 0, [0])
    assert again.entries == {1: FreeEntry(3)}
    assert (list(journal), sent) == (before, [])  # nothing is written or sent meanwhile


def test_a_long_journal_is_replaced():
    journal = Journal()
    made, _ = ledger(journal)
    record = StateRecord(made, {"ledger": made})
    for number in range(2001):
        record.write_if_long()
        assert len(list(journal)) == number
        made.append(FreeEntry(1))
    record.write_if_long()
    assert len(list(journal)) == 1
