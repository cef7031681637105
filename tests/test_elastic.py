"""The elastic store under arbitrary interleavings: what was pushed is in the model exactly once, whoever owns it when."""

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulators import elastic_nodes
from simulators.elastic import IN_FLIGHT, Saved, Store
from simulators.elastic_master import Master
from simulators.elastic_messages import Ask, Data, Operation, Part, State
from simulators.elastic_nodes import Executor

thoroughly = partial(settings, deadline=None, suppress_health_check=list(HealthCheck))


def remember(value, slots, update):
    """The value is the list of all updates; the slots depend on their order."""
    return value + update, hash((slots, update))


class Audit:
    """A store with a record of what was asked of it, and the checks.

    Every push adds a token of its own, so that a value shows which pushes it contains, in order, and how often.
    """

    def __init__(self, nodes, assignment, immutable=()):
        blocks = range(len(assignment))
        saved = Saved(dict.fromkeys(blocks, ()), dict.fromkeys(blocks, 0))
        self.store = Store(nodes, assignment, saved, apply=remember, immutable=immutable)
        self.blocks = [b for b in blocks if b not in immutable]
        self.pushes = {}  # number: (worker, blocks, token)
        self.pulls = {}  # number: (blocks, for each the tokens that it must see)
        self.frozen = {}  # (view, block, epoch): the original
        self.names = iter(f"new{i}" for i in range(1000))

    def push(self, worker, blocks):
        token = len(self.pushes)
        number = self.store.push(worker, dict.fromkeys(blocks, (token,)))
        self.pushes[number] = (worker, frozenset(blocks), token)

    def pull(self, worker, blocks):
        mine = [(p, t) for n, (w, p, t) in self.pushes.items() if w == worker and self.store.outcome(n)]
        self.pulls[self.store.pull(worker, blocks)] = {b: {t for p, t in mine if b in p} for b in blocks}

    def check_always(self):
        assert all(n <= IN_FLIGHT for n in self.store.in_flight().values())
        live = Counter(
            b for e in self.store.executors.values() for b, r in e.roles.items() if r.phase in ("live", "closing")
        )
        assert all(n == 1 for n in live.values()), "two owners"
        self.check_originals()

    def check_originals(self):
        """All copies of an original that anybody holds or carries are the same."""
        view = self.store._master.view
        seen = []
        for e in self.store.executors.values():
            seen += [(e.view, b, o) for b, o in e.requests.origins.items()]
            seen += [(e.view, b, r.origin) for b, r in e.roles.items() if r.phase == "frozen"]
        for queue in self.store._channels.values():
            for sent, message in queue:
                if isinstance(message, Ask):
                    seen += [(sent, b, o) for b, o in message.origins.items()]
                elif isinstance(message, Data):
                    seen.append((sent, message.block, message.origin))
        for sent, block, origin in seen:
            if sent == view:
                assert self.frozen.setdefault((view, block, origin.epoch), origin) == origin

    def check_at_rest(self):
        """Sweep, deliver everything, and compare the model with the record."""
        store = self.store
        store.settle(200_000)
        store.sweep()
        store.settle(200_000)
        assert store.pending() == []
        assert store.unanswered == []
        assert store.moving == ()
        assert not store.recovering
        assert set(store.members) == set(store.executors), "somebody did not leave"
        tables = [e.table for e in store.executors.values()]
        assert all(table == store._master.table for table in tables)
        for block, entry in store._master.table.items():
            self.check_block(block, entry)
        assert all(
            r.phase == "live" and not r.queue and not r.replies for e in store.executors.values() for r in e.roles.values()
        )

    def check_block(self, block, entry):
        store = self.store
        assert entry.source is None
        assert [n for n, e in store.executors.items() if block in e.roles] == [entry.owner]
        copies = {n: e.copies[block].state for n, e in store.executors.items() if block in e.copies}
        state = copies[entry.owner]
        assert len(copies) == min(2, len(store.executors))
        assert all(copy == state for copy in copies.values())
        assert not state.staged
        done = [t for n, (_, blocks, t) in self.pushes.items() if block in blocks and store.outcome(n).done]
        assert sorted(state.value) == sorted(done)
        slots = 0
        for token in state.value:
            slots = hash((slots, (token,)))
        assert state.slots == slots
        for number, expected in self.pulls.items():
            outcome = store.outcome(number)
            if block in expected and outcome.done:
                seen = outcome.values[block]
                assert expected[block] <= set(seen) <= set(state.value)
                assert len(set(seen)) == len(seen)


ACTIONS = ["push"] * 6 + ["pull"] * 4 + ["move"] * 3 + ["relocate"] * 2 + ["sweep", "add", "remove", "fail"]


def act(audit, action, rng):
    """One thing that can happen to a store."""
    store = audit.store
    node = rng.choice(store.members)
    if action in ("push", "pull"):
        blocks = rng.sample(audit.blocks, rng.randint(1, len(audit.blocks)))
        getattr(audit, action)(node, blocks)
    elif action == "sweep":
        store.sweep(1)
    elif action == "add" and not store.recovering and len(store.members) < 6:
        store.add(next(audit.names))
    elif action == "remove" and len(store.members) > 1:
        store.remove(node)
    elif action == "fail" and len(store.members) > 1:
        victim = rng.choice(sorted(store.executors))
        if not store.only_copies(victim) and store.members != (victim,):
            store.fail(victim)
    elif action == "relocate" and not store.recovering:
        store.relocate({b: rng.choice(store.members) for b in audit.blocks if rng.random() < 0.5})
    elif action == "move" and not store.recovering:
        chosen = [(b, e.owner) for b, e in store._master.table.items() if b not in store.moving]
        if chosen:
            source = rng.choice(chosen)[1]
            blocks = [b for b, owner in chosen if owner == source]
            if node != source:
                store.move(source, node, blocks[: rng.randint(1, len(blocks))])


class Starving(dict):
    """Channels in a random order of precedence: a slow one waits as long as any faster one has messages."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def __missing__(self, channel):
        self[channel] = self.rng.random()
        return self[channel]

    def choose(self, channels):
        return min(channels, key=lambda c: self[c])


def play(rng, steps=25, actions=ACTIONS, check=True):
    """A random history: things happen, messages arrive in any order between channels, fairly or not."""
    choose = rng.choice if rng.random() < 0.5 else Starving(rng).choose
    nodes = ["a", "b", "c", "d"][: rng.randint(1, 4)]
    blocks = rng.randint(1, 7)
    immutable = {blocks} if rng.random() < 0.3 else set()
    audit = Audit(nodes, {b: rng.choice(nodes) for b in range(blocks + len(immutable))}, immutable)
    for _ in range(steps):
        act(audit, rng.choice(actions), rng)
        for _ in range(rng.choice([0, 1, 3, 10, 40])):
            pending = audit.store.pending()
            if not pending:
                break
            audit.store.deliver(choose(pending))
            if check:
                audit.check_always()
    audit.check_at_rest()
    return audit


@thoroughly(max_examples=250)
@given(st.randoms(use_true_random=False))
def test_whatever_happens_every_push_is_in_the_model_once(rng):
    play(rng)


@thoroughly(max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from(["move", "relocate", "remove", "fail"]))
def test_one_kind_of_change_at_a_time(rng, change):
    play(rng, actions=["push", "push", "pull", "add", change, change])


@pytest.mark.parametrize("decade", range(10))
def test_long_histories(decade):
    for seed in range(50):
        play(random.Random(f"{decade} {seed}"), steps=60, check=False)


# Variants that are broken on purpose: the checks above must notice.


def original_taken_twice(monkeypatch):
    serve = Executor._serve

    def broken(self, block, ask):
        role, origin = self.roles.get(block), ask.origins.get(block)
        if role and role.phase == "live" and origin:
            self.copies[block] = self.copies[block]._replace(state=origin.state)
        serve(self, block, ask)

    monkeypatch.setattr(Executor, "_serve", broken)


def destination_does_not_latch(monkeypatch):
    ownership = Executor._on_ownership

    def broken(self, sender, message):
        ownership(self, sender, message)
        if message.entry.source is None:
            self._create(message.block, self.roles[message.block], State((), 0))

    monkeypatch.setattr(Executor, "_on_ownership", broken)


def source_does_not_stop(monkeypatch):
    flip = Executor._flip

    def broken(self, block, role):
        flip(self, block, role)
        role.phase = "live"

    monkeypatch.setattr(Executor, "_flip", broken)


def original_is_not_frozen(monkeypatch):
    redirect = Executor._redirect

    def broken(self, block, ask, role):
        if role and role.phase == "frozen" and ask.step == "stage":
            operation = Operation("stage", ask.worker, ask.number, Part(ask.number, ask.parts[block], ask.whole))
            state = elastic_nodes.operate(role.origin.state, operation, remember)
            role.origin = role.origin._replace(state=state)
        redirect(self, block, ask, role)

    monkeypatch.setattr(Executor, "_redirect", broken)


def running_operations_are_cut_off(monkeypatch):
    def broken(self, sender, message):
        self._flip(message.block, self.roles[message.block])

    monkeypatch.setattr(Executor, "_on_ack", broken)


def create_without(monkeypatch, **lost):
    create = Executor._create

    def broken(self, block, role, state):
        create(self, block, role, state._replace(**lost))

    monkeypatch.setattr(Executor, "_create", broken)


def slots_stay_behind(monkeypatch):
    create_without(monkeypatch, slots=0)


def staged_pushes_stay_behind(monkeypatch):
    create_without(monkeypatch, staged={})


def repeated_requests_are_not_noticed(monkeypatch):
    operate = elastic_nodes.operate
    monkeypatch.setattr(elastic_nodes, "operate", lambda state, *rest: operate(state._replace(applied={}), *rest))


def answers_do_not_wait_for_the_backup(monkeypatch):
    operate = Executor._operate

    def broken(self, block, role, ask):
        role.acked = self.copies[block].state.version + 1
        operate(self, block, role, ask)

    monkeypatch.setattr(Executor, "_operate", broken)


def tables_believe_old_news(monkeypatch):
    def broken(self, block, entry):
        self.table[block] = entry

    monkeypatch.setattr(Executor, "_learn", broken)


def messages_of_an_old_view_count(monkeypatch):
    receive = Executor.receive

    def broken(self, sender, view, message):
        receive(self, sender, max(view, self.view), message)

    monkeypatch.setattr(Executor, "receive", broken)


def dead_workers_parts_are_always_forgotten(monkeypatch):
    monkeypatch.setattr(Master, "_arrived", lambda self, block, worker, number: False)


def dead_workers_parts_are_always_committed(monkeypatch):
    monkeypatch.setattr(Master, "_arrived", lambda self, block, worker, number: True)


def leavers_do_not_wait(monkeypatch):
    def broken(self, sender, message):
        self.awaited = self.farewells

    monkeypatch.setattr(Executor, "_on_leave", broken)


def more_than_four_in_flight(monkeypatch):
    monkeypatch.setattr(elastic_nodes, "IN_FLIGHT", 5)


def nothing_is_swept(monkeypatch):
    monkeypatch.setattr(Executor, "_on_sweep", lambda self, sender, message: None)


BROKEN = [
    original_taken_twice,
    destination_does_not_latch,
    source_does_not_stop,
    original_is_not_frozen,
    running_operations_are_cut_off,
    slots_stay_behind,
    staged_pushes_stay_behind,
    repeated_requests_are_not_noticed,
    answers_do_not_wait_for_the_backup,
    tables_believe_old_news,
    messages_of_an_old_view_count,
    dead_workers_parts_are_always_forgotten,
    dead_workers_parts_are_always_committed,
    leavers_do_not_wait,
    more_than_four_in_flight,
    nothing_is_swept,
]


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda f: f.__name__)
def test_the_checks_notice_a_protocol_that_is_broken(breakage, monkeypatch):
    breakage(monkeypatch)
    for seed in range(600):
        try:
            play(random.Random(seed), steps=40)
        except (AssertionError, RuntimeError, KeyError, ValueError):
            return
    pytest.fail("Nothing was noticed.")
