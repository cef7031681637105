"""A worker's pull by itself: who is asked for which blocks, again after a while, and again where owners change."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.live.protocol.blocks import Layout
from harness.live.protocol.messages import Pulled, Release, UnaskedBlocks
from harness.live.protocol.outbox import Outbox
from harness.live.worker.pulling import Pulling
from harness.live.worker.worker_table import WorkerTable

LAYOUT = Layout(8, 4)  # two numbers per block
OWNERS = ((0, 3, "server/a"), (3, 4, "server/b"))
WORK = Release(7, branch=0, clock=0, after=12, durable=0, samples=4, shard_start=0, shard_length=100)


@pytest.fixture
def made():
    """A pull, its table as of entry 10, the messages that it sends, and its clock."""
    sent, clock = [], SimpleNamespace(seconds=0.0)
    outbox, table = Outbox(lambda receiver, message: sent.append((receiver, message.head)), 1), WorkerTable(LAYOUT)
    table.reset(OWNERS, 10)
    pulling = Pulling(LAYOUT, table, outbox, lambda: clock.seconds, rows_of=None)
    return SimpleNamespace(pulling=pulling, table=table, sent=sent, clock=clock)


def asked(sent):
    """The questions, and forget them."""
    found = [(receiver, head.number, head.after, head.runs) for receiver, head in sent]
    sent.clear()
    return found


def block(*values):
    return (np.array(values, np.float32),)


def test_every_owner_is_asked_and_the_last_block_completes_the_pull(made):
    made.pulling.begin("gradient", WORK, 12)
    assert asked(made.sent) == [("server/a", 1, 12, ((0, 3),)), ("server/b", 1, 12, ((3, 4),))]
    assert made.pulling.kind == "gradient"
    assert made.pulling.answered(Pulled(0, 12, ((0, 3),)), block(*range(6))) is None  # of an earlier request
    assert made.pulling.answered(Pulled(1, 14, ((0, 3),)), block(*range(6))) is None
    found = made.pulling.answered(Pulled(1, 13, ((3, 4),)), block(6, 7))
    assert (found.kind, found.of, found.entry, found.parameters.tolist()) == ("gradient", 7, 13, list(range(8)))
    assert made.pulling.kind is None


def test_blocks_that_come_unasked_are_asked_for_only_if_they_are_late(made):
    made.pulling.begin("gradient", WORK, 12, unasked=True)
    assert made.pulling.sent_unasked(UnaskedBlocks(6, 12, ((0, 3),), 0, 6), block(*range(6))) is None  # of an earlier cycle
    made.pulling.sent_unasked(UnaskedBlocks(7, 12, ((0, 3),), 0, 7), block(*range(6)))
    times = []
    for seconds in range(10):
        made.clock.seconds = float(seconds)
        made.pulling.tick()
        if asked(made.sent) == [("server/b", 1, 12, ((3, 4),))]:
            times.append(seconds)
    assert times == [3, 8]  # after more than two seconds, then after more than four
    found = made.pulling.sent_unasked(UnaskedBlocks(7, 12, ((3, 4),), 0, 7), block(6, 7))
    assert found.parameters.tolist() == list(range(8))


def test_new_owners_are_asked_for_what_is_missing(made):
    made.pulling.begin("gradient", WORK, 12)
    made.pulling.answered(Pulled(1, 12, ((0, 1),)), block(0, 1))
    made.sent.clear()
    assert made.table.update(((0, 1, "server/b"), (1, 4, "server/c")), 15) == {0, 1, 2, 3}
    assert made.table.update(OWNERS, 15) is None  # not newer
    made.pulling.ask_new_owners()
    assert asked(made.sent) == [("server/c", 1, 15, ((1, 4),))]
    made.pulling.redirected(1, frozenset({1, 2}))  # by a former owner, late
    made.pulling.redirected(0, frozenset({3}))
    assert asked(made.sent) == []


def test_a_view_begins_the_pull_again_as_another_request(made):
    made.pulling.begin("gradient", WORK, 12)
    made.pulling.answered(Pulled(1, 12, ((0, 3),)), block(*range(6)))
    made.sent.clear()
    made.table.reset(((0, 4, "server/a"),), 11)
    made.pulling.begin_again()
    assert asked(made.sent) == [("server/a", 2, 12, ((0, 4),))]
    assert made.pulling.answered(Pulled(1, 12, ((3, 4),)), block(6, 7)) is None
    whole = block(*range(8))
    assert made.pulling.answered(Pulled(2, 12, ((0, 4),)), whole).parameters is whole[0]  # no copy


def test_all_blocks_are_grouped_once_for_each_table(made):
    assert made.table.group(LAYOUT.everything) is made.table.group(LAYOUT.everything)
    assert made.table.group(frozenset({2, 3})) == {"server/a": {2}, "server/b": {3}}
    made.table.update(((0, 4, "server/c"),), 11)
    assert made.table.group(LAYOUT.everything) == {"server/c": LAYOUT.everything}
