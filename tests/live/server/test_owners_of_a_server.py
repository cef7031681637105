"""Owners of a server's state, each by itself: the table, cohorts, pulls that wait, blocks that arrive and leave."""

import numpy as np
import pytest

from harness.live.protocol.blocks import Layout
from harness.live.protocol.log import CommitEntry, MoveEntry, NextCycle
from harness.live.protocol.messages import BlockData, BranchVectors, FetchBlocks, Pull, Pulled, Redirect, UnaskedBlocks
from harness.live.protocol.outbox import Outbox
from harness.live.server.cohorts import Cohorts
from harness.live.server.handover import Handover
from harness.live.server.pieces import Piece, Staging
from harness.live.server.pulls import Pulls
from harness.live.server.server_table import ServerTable
from harness.live.server.store import Store

LAYOUT = Layout(8, 4)  # two numbers per block
OWNERS = ((0, 3, "server/a"), (3, 4, "server/b"))
OWNERS_AFTER = ((0, 2, "server/a"), (2, 4, "server/b"))
HELD = (BranchVectors(0, ("parameters",)),)


def commit(*released):
    """The commit of a push that releases these (worker, cycle)."""
    released = tuple(NextCycle(*of, 0, 1) for of in released)
    push = {"branch": 0, "worker": "worker/x", "cycle": 1, "accept": True, "take": True, "grouped": 1, "weight": 1.0}
    return CommitEntry(**push, steps=1, learning_rate=-1.0, momentum=0.0, released=released)


class Parts:
    """A server with blocks 0, 1 and 2 at entry 10, and what it sends."""

    def __init__(self):
        self.sent = []
        outbox = Outbox(lambda receiver, message: self.sent.append((receiver, message)), generation=3)
        self.store, self.staging, self.cohorts = Store(LAYOUT, "sgd", "each"), Staging(LAYOUT), Cohorts()
        self.table = ServerTable("server/a", outbox)
        self.pulls = Pulls(LAYOUT, self.store, self.table, self.cohorts, outbox)
        self.handover = Handover(LAYOUT, self.store, self.staging, self.table, outbox)
        self.table.reset(OWNERS, 10)
        self.store.install(Piece(((0, 3),), HELD, (np.arange(6, dtype=np.float32),)))
        self.cohorts.add(frozenset({0, 1, 2}), 10)

    def heads(self, kind):
        return [(receiver, m.head) for receiver, m in self.sent if isinstance(m.head, kind)]


def test_a_table_redirects_to_the_owners_of_the_other_blocks():
    server = Parts()
    assert server.table.redirect("worker/x", 5, frozenset({1, 2}), push=False) == {1, 2}
    assert server.sent == []
    assert server.table.redirect("worker/x", 5, frozenset({2, 3}), push=True) == {2}
    server.table.move(11, MoveEntry(((2, 3),), "server/a", "server/b", False))
    assert server.table.redirect("worker/x", 6, frozenset({2}), push=False) == frozenset()
    first, second = (head for _, head in server.heads(Redirect))
    assert (first.number, first.push, first.runs, first.index) == (5, True, ((3, 4),), 10)
    assert (second.runs, second.index, second.owners) == (((2, 3),), 11, OWNERS_AFTER)


def test_cohorts_at_the_same_entry_become_one():
    cohorts = Cohorts()
    cohorts.add(frozenset({0, 1}), 10)
    cohorts.all[0].done = {"worker/x": 4}
    cohorts.add(frozenset({2}), 8)
    assert not cohorts.merge()
    assert cohorts.at(9, frozenset({0, 2})) == [cohorts.all[0]]
    assert cohorts.not_past("worker/x", 4, frozenset({0, 2, 3})) == {2, 3}
    assert cohorts.not_past("worker/x", 5, frozenset({0, 2, 3})) == {0, 2, 3}
    cohorts.all[-1].position = 10
    assert cohorts.merge()
    (one,) = cohorts.all
    assert (one.blocks, one.done, one.runs) == ({0, 1, 2}, {"worker/x": 4}, ((0, 3),))


def test_a_pull_waits_for_its_entry_and_is_answered_once():
    server = Parts()
    server.pulls.add("worker/x", Pull(1, 0, 11, ((0, 2),)), (), frozenset({0, 1}))
    server.pulls.answer()
    assert server.sent == []
    server.cohorts.all[0].position = 12
    for _ in range(2):
        server.pulls.answer()
    ((receiver, message),) = server.sent
    assert (receiver, message.head, message.generation) == ("worker/x", Pulled(1, 12, ((0, 2),)), 3)
    assert message.arrays[0].tolist() == [0, 1, 2, 3]


def test_workers_that_pull_as_of_the_same_entry_see_the_same():
    server = Parts()
    cohort = server.cohorts.all[0]
    server.pulls.send_unasked(cohort, commit(("worker/x", 2), ("worker/y", 3)), 10)
    server.store.install(Piece(((0, 3),), HELD, (np.full(6, 9, np.float32),)))
    cohort.position = 11
    server.pulls.stepped(0, 11)
    for number, after in ((1, 10), (2, 11)):  # late at the barrier, and for what came after
        server.pulls.add("worker/z", Pull(number, 0, after, ((0, 3),)), (), frozenset({0, 1, 2}))
    server.pulls.answer()
    assert [head.cycle for _, head in server.heads(UnaskedBlocks)] == [2, 3]
    assert [head.index for _, head in server.heads(Pulled)] == [10, 11]
    assert [m.arrays[0].tolist() for _, m in server.sent[2:]] == [[0, 1, 2, 3, 4, 5], [9] * 6]


@pytest.mark.parametrize("on_demand", [False, True], ids=["migrate", "relocate"])
def test_blocks_leave_with_what_is_staged_for_them(on_demand):
    server, move = Parts(), MoveEntry(((1, 2),), "server/a", "server/b", on_demand)
    server.staging.add("worker/x", 7, ((0, 3),), (np.ones(6, np.float32),), frozenset({0, 1, 2}))
    server.table.move(11, move)
    cohort = server.cohorts.all[0]
    assert server.handover.leave(cohort, move, 11, [0]) == {1}
    assert server.handover.leave(cohort, move, 11, [0]) == frozenset()
    assert cohort.blocks == {0, 2}
    assert bool(server.sent) is not on_demand
    for _ in range(2):  # several may ask
        server.handover.asked_for(FetchBlocks(11, ((1, 2),)))
    ((receiver, message),) = server.sent
    assert (receiver, message.head.index, message.head.runs) == ("server/b", 11, ((1, 2),))
    assert [array.tolist() for array in message.arrays] == [[2, 3], [1, 1]]
    assert server.staging.blocks("worker/x", 7) == {0, 2}


def test_blocks_that_move_on_demand_are_asked_for_once_and_taken_once():
    server, giver = Parts(), Parts()
    giver.handover.send("server/a", 11, giver.store.copied(((0, 1),), [0]))
    data = giver.sent[0][1]
    move = BlockData(11, ((3, 4),), data.head.branches)
    server.handover.expect(frozenset({3}), 11, source="server/b")
    for _ in range(2):
        server.handover.fetch(frozenset({0, 3}))
        server.handover.fetch_all()
    assert server.heads(FetchBlocks) == [("server/b", FetchBlocks(11, ((3, 4),)))]
    assert server.handover.arrived(BlockData(10, ((3, 4),), move.branches), data.arrays) is None  # as of another move
    piece = server.handover.arrived(move, data.arrays)
    assert piece is not None
    assert piece.runs == ((3, 4),)
    assert server.handover.awaited == {}
    assert server.handover.arrived(move, data.arrays) is None  # it was repeated
