"""Embedding tables in live cores: workers pull and push the rows that they look up, and every push counts exactly once."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.live.protocol import messages
from harness.live.protocol.blocks import Layout, TableShape
from harness.live.protocol.messages import Pull, Pulled, Release, StagePush
from harness.live.server.pieces import RowParts, Staging
from harness.live.server.server import Server
from harness.live.worker.worker import Worker
from harness.scenario import system
from tests.live.support.hot_keys import hot_keys
from tests.live.support.interleavings import play
from tests.live.support.memory import Memory, start
from tests.support.marks import examples
from tuners.actions import Run

TABLES = TableShape(rows=22, width=2, blocks=6)  # blocks of 4 rows, the last one of 2
JOB = {"size": 50, "blocks": 7, "tables": TABLES, "aggregation": "each"}  # and 3 dense rows


def test_blocks_of_tables_are_those_of_the_simulator():
    layout = Layout(JOB["size"], JOB["blocks"], TABLES)
    assert layout.row_bounds.tolist() == [0, 4, 8, 12, 16, 20, 22, 25]
    assert Layout(2 * 10 + 2, 9, TableShape(10, 2, 8)).row_bounds.tolist() == [
        0,
        2,
        4,
        6,
        8,
        10,
        10,
        10,
        10,
        11,
    ]  # some are empty
    for size, count in ((51, 7), (50, 6), (40, 7)):
        with pytest.raises(ValueError, match="they do not agree"):
            Layout(size, count, TABLES)


# ------------------------------------------------------------------------------------------------------- exactly once


@examples(4, shrink=False)
@given(st.randoms(use_true_random=False))
def test_every_push_of_rows_counts_once_in_any_history(rng):
    play(rng, steps=20, **JOB)


KINDS = (
    *("move", "relocate", "worker dies,worker comes", "server dies,server comes", "coordinator dies"),
    "message lost,message lost,move,tick",
)


@pytest.mark.parametrize("change", KINDS)
def test_one_kind_of_change_at_a_time(change):
    for seed in range(1 if "lost" in change else 3):
        play(random.Random(f"rows {change} {seed}"), actions=change.split(","), **JOB)


def test_a_push_that_is_repeated_is_applied_once():
    memory = start(workers=1, **JOB)
    repeated = Counter()
    for _ in range(500):
        for (sender, receiver), queue in memory.channels.items():
            if queue and isinstance(queue[0].head, StagePush) and repeated[sender, receiver, queue[0].head.cycle] < 2:
                repeated[sender, receiver, queue[0].head.cycle] += 1
                queue.append(queue[0])
        memory.step()
    memory.settle()
    assert sum(repeated.values()) >= 2 * memory.pushes[0] > 20
    np.testing.assert_array_equal(memory.model(), memory.expected()[0])


def test_blocks_that_move_while_training_lose_nothing():
    memory = start(workers=3, servers=2, **JOB)
    servers = tuple(map(messages.server, memory.setting.servers))
    for turn in range(12):
        owners = tuple(servers[(block + turn) % 2] for block in range(JOB["blocks"]))
        memory.coordinator.processes.place(servers, (0.5, 0.5), owners=owners, at_once=2)
        memory.steps(60)
        while memory.coordinator.moves.remaining:
            memory.step()
        assert memory.coordinator.ledger.table == dict(enumerate(owners))
    memory.settle()
    assert memory.pushes[0] > 30
    np.testing.assert_array_equal(memory.model(), memory.expected()[0])


def test_blocks_of_a_dead_server_go_to_the_owners_that_are_named():
    memory = start(workers=2, servers=3, **JOB)
    memory.steps(400)
    stays, dies, takes = map(messages.server, memory.setting.servers)
    memory.kill(dies)
    memory.coordinator.processes.lose([dies])
    before = memory.coordinator.ledger.table
    owners = tuple(takes if before[b] == dies else before[b] for b in range(JOB["blocks"]))
    assert dies not in owners
    memory.coordinator.processes.recover((stays, takes), (0.5, 0.5), owners)
    memory.steps(300)
    memory.settle()
    assert memory.coordinator.ledger.table == dict(enumerate(owners))
    np.testing.assert_array_equal(memory.model(), memory.expected()[0])


# Variants that are broken on purpose: the checks must notice.


def rows_are_applied_to_their_neighbours(monkeypatch):
    change = RowParts.change
    monkeypatch.setattr(RowParts, "change", lambda self, rows, values: change(self, np.maximum(rows - 1, 0), values))


def snapshots_are_no_copies(monkeypatch):
    monkeypatch.setattr(RowParts, "get", lambda self, run: self._vector[self._layout.span(run)])


def repeated_rows_count_again(monkeypatch):
    add = Staging.add

    def broken(self, worker, cycle, runs, arrays, blocks):
        have = self.blocks(worker, cycle)
        add(self, worker, cycle, runs, arrays, blocks)
        new, parts = self._pushes[worker][cycle]
        self._pushes[worker][cycle] = new, parts + self._parts(runs, arrays, have & blocks)

    monkeypatch.setattr(Staging, "add", broken)
    monkeypatch.setattr(Server, "_commit", applied_twice)


def applied_twice(self, cohort, commit):
    if commit.accept and not cohort.blocks <= self._staging.blocks(commit.worker, commit.cycle):
        return False
    pieces = self._staging.take(commit.worker, commit.cycle, cohort.blocks)
    self._store.apply(commit, cohort.runs, pieces if commit.accept else [])
    self._store.apply(commit, cohort.runs, pieces[:1] if commit.accept else [])
    return True


def staged_rows_stay_behind(monkeypatch):
    monkeypatch.setattr(Staging, "depart", lambda self, blocks: ((), ()))
    monkeypatch.setattr(Worker, "_update_table", lambda self, index, table: frozenset())


@pytest.mark.parametrize(
    "breakage",
    [rows_are_applied_to_their_neighbours, snapshots_are_no_copies, repeated_rows_count_again, staged_rows_stay_behind],
    ids=lambda f: f.__name__,
)
def test_the_checks_notice_rows_that_are_handled_wrongly(breakage, monkeypatch):
    breakage(monkeypatch)
    for seed in range(60):
        try:
            play(random.Random(seed), **JOB)
        except (AssertionError, RuntimeError, KeyError, ValueError, IndexError, RecursionError):
            return
    pytest.fail("Nothing was noticed.")


# ------------------------------------------------------------------------------------------------- the hot-keys arena


class Wire(Memory):
    """Counts what pulls and pushes carry, in bytes of arrays."""

    def __init__(self, *given, **named):
        self.carried = {kind: [] for kind in (Pull, Pulled, StagePush)}  # (sender, cycle or number, bytes)
        super().__init__(*given, **named)

    def sender(self, name, core):
        send = super().sender(name, core)

        def counting(receiver, message):
            if type(message.head) in self.carried:
                self.carried[type(message.head)].append((name, message.head, sum(a.nbytes for a in message.arrays)))
            send(receiver, message)

        return counting


@pytest.mark.parametrize("workers", [1, 2])
def test_hot_keys_live_equals_hot_keys_simulated(workers):
    """To rounding: the simulator adds the gradients of a row's look-ups to the row one by one, a worker pushes their sum."""
    spec, setting = hot_keys(workers)
    simulated = system(spec.scenario, 3, setting)
    seen = simulated.perform(Run(clocks=20))
    expected = simulated.branches[0].state.learned.parameters
    live = Wire(
        random.Random(0),
        setting,
        compute=spec.compute,
        size=spec.layout.size,
        blocks=spec.layout.count,
        tables=spec.layout.tables,
        parameters=spec.parameters,
        rows_of=spec.rows_of,
        shards=spec.live_job.shards,
        nodes=spec.live_job.nodes,
        snapshot_commits=spec.live_job.snapshot_commits,
    )
    for worker in seen.pushes.worker:
        live.push(messages.worker(spec.live_job.nodes[worker]))
    rows = live.coordinator.reports.poll().reports[0].rows
    live.settle()
    found = spec.tree(live.model())
    np.testing.assert_array_equal(rows[:, 2], seen.pushes.clock)
    np.testing.assert_array_equal(rows[:, 7], seen.pushes.staleness)
    np.testing.assert_allclose(rows[:, 8], seen.pushes.loss, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["bias"], expected["bias"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["rows"], expected["rows"], rtol=0, atol=1e-6)
    touched = (found["rows"] != spec.tree(spec.parameters)["rows"]).any(axis=1)
    assert 100 * workers < touched.sum() < 20 * 16 * 8  # the others have not been written to

    # Bytes on the wire: of the rows that the simulator counts too, and of the dense one.
    assert spec.rows_of_pushes(setting, rows) == seen.blocks
    width, pushes = spec.layout.tables.width, [b for _, h, b in live.carried[StagePush] if h.done.cycle in cycles(live)]
    distinct = sum(seen.blocks) + len(rows)
    assert sum(pushes) == distinct * (4 + 4 * width)
    assert sum(pushes) / len(rows) < spec.parameters.nbytes / 1000
    pulled = sum(b for _, _, b in live.carried[Pulled])
    asked = sum(b for _, _, b in live.carried[Pull])
    assert pulled == asked * width


def cycles(live):
    """The cycles of all pushes in the log."""
    return {entry.cycle for entry in live.history.values() if hasattr(entry, "cycle")}


def test_a_snapshot_is_taken_when_the_pushes_are_as_large_as_the_model():
    spec, _ = hot_keys(batch=64)
    work = Release(1, 0, 0, 0, 0, 64, 0, 10_000)
    touched = len(spec.rows_of(work))
    assert 300 < touched <= 64 * 8 + 1
    assert spec.live_job.snapshot_commits == spec.layout.size // (touched * spec.layout.tables.width) > 400
