"""A server's storage: parameters that are never written to, in parts that arrive, leave and are joined."""

import numpy as np

from harness.live.protocol.blocks import Layout
from harness.live.protocol.log import CommitEntry
from harness.live.protocol.messages import BranchVectors
from harness.live.server.pieces import Parts, Piece, PushPart
from harness.live.server.store import Store

LAYOUT = Layout(12, 6)  # two numbers per block


def test_parts_are_cut_and_joined_on_request():
    parts, whole = Parts(LAYOUT), np.arange(12, dtype=np.float32)
    parts.put((0, 6), whole)
    assert parts.get((0, 6)) is whole
    assert np.shares_memory(parts.get((2, 3)), whole)
    parts.put((2, 4), np.full(4, 9, np.float32))
    np.testing.assert_array_equal(parts.get((0, 6)), [0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11])
    parts.drop(frozenset({0, 5}))
    assert parts.blocks == {1, 2, 3, 4}
    np.testing.assert_array_equal(parts.get((1, 3)), [2, 3, 9, 9])
    np.testing.assert_array_equal(whole, np.arange(12))


def test_parameters_that_were_sent_or_copied_do_not_change():
    store = Store(LAYOUT, "momentum", "each")
    store.install(Piece(((0, 6),), (BranchVectors(0, ("parameters",)),), (np.zeros(12, np.float32),)))
    sent, kept = store.parameters(0, ((0, 6),), "float32"), store.copied(((0, 6),), [0])
    for steps in range(2):
        commit = CommitEntry(0, "worker/a", steps, True, True, 1, 1.0, steps + 1, -1.0, 1.0)
        store.apply(commit, ((0, 6),), [PushPart(((0, 6),), (np.ones(12, np.float32),))])
    assert [array.max() for array in (*sent, *kept.arrays)] == [0, 0, 0]
    assert [array.min() for array in store.copied(((0, 6),), [0]).arrays] == [3, 2]


def test_blocks_that_lag_behind_are_copied_without_later_forks():
    store = Store(LAYOUT, "sgd", "each")
    for run in ((0, 3), (3, 6)):
        store.install(Piece((run,), (BranchVectors(0, ("parameters",)),), (np.ones(6, np.float32),)))
    store.fork(1, 0, ((0, 3),))
    assert [h.branch for h in store.copied(((0, 3),), [0, 1]).held] == [0, 1]
    assert [h.branch for h in store.copied(((3, 6),), [0, 1]).held] == [0]
