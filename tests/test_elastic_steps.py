"""The elastic store step by step: which message follows which, who waits, who is sent on, what a death leaves behind."""

import numpy as np
import pytest

from simulators.elastic import MASTER, Outcome, Saved, Store, add


def store_of(assignment, nodes="abcw", **options):
    """Blocks that all begin at 0."""
    return Store(list(nodes), assignment, Saved(dict.fromkeys(assignment, 0), {}), **options)


def heads(store):
    """The kind of the next message of each channel."""
    return {channel: type(store._channels[channel][0][1]).__name__ for channel in store.pending()}


def deliver(store, *steps):
    """Deliver 'sender>receiver Kind', one by one."""
    for step in steps:
        channel, kind = step.split()
        sender, receiver = channel.split(">")
        sender, receiver = (MASTER if n == "m" else n for n in (sender, receiver))
        assert heads(store)[sender, receiver] == kind
        store.deliver((sender, receiver))


def values(store):
    return dict(store.save().values)


def result(store, number):
    store.settle()
    return store.outcome(number)


def test_a_block_moves_ownership_first():
    store = store_of({0: "a", 1: "b"})
    store.move("a", "b", [0])
    assert heads(store) == {(MASTER, "a"): "Start"}
    deliver(store, "m>a Start", "a>b Ownership")
    assert store.executors["b"].table[0].owner == "b"
    assert store.owners() == {"a": 1, "b": 1}
    deliver(store, "b>a Ack", "a>m Moved")
    assert store.owners() == {"b": 2}
    assert heads(store) == {("a", "b"): "Data", (MASTER, "c"): "Tell", (MASTER, "w"): "Tell"}
    deliver(store, "a>b Data", "b>c Copy", "c>b Backed", "b>a Release")
    assert store.moving == (0,)
    assert 0 not in store.executors["a"].copies
    deliver(store, "a>m Settled")
    assert store.moving == ()


def test_a_request_waits_at_the_destination_until_the_block_is_there():
    store = store_of({0: "a"})
    store.move("a", "b", [0])
    deliver(store, "m>a Start", "a>b Ownership", "b>a Ack", "a>m Moved", "m>w Tell")
    pull = store.pull("w")
    deliver(store, "w>b Ask")
    assert (store.waited, store.redirected) == (1, 0)
    assert ("b", "w") not in store.pending()
    deliver(store, "a>b Data")
    assert heads(store)["b", "w"] == "Answer"
    assert result(store, pull) == Outcome(True, {0: 0})


def test_a_source_ends_what_is_running_before_it_hands_over():
    store = store_of({0: "a"})
    push = store.push("w", {0: 1})
    deliver(store, "w>a Ask")
    store.move("a", "c", [0])
    deliver(store, "m>a Start", "a>c Ownership", "c>a Ack")
    assert ("a", MASTER) not in store.pending()
    deliver(store, "a>b Update", "b>a Backed", "a>m Moved", "a>w Answer", "w>a Ask")
    assert store.redirected == 1
    assert result(store, push).done
    assert values(store) == {0: 1}


def test_a_stale_request_is_sent_on_and_its_answer_teaches():
    store = store_of({0: "a"})
    store.move("a", "b", [0])
    while store.moving:
        store.deliver(next(c for c in store.pending() if c != (MASTER, "w")))
    assert result(store, store.pull("w")).done
    assert store.redirected == 1
    assert result(store, store.pull("w")).done
    assert store.redirected == 1


def test_at_most_four_blocks_fly_and_the_rest_follow():
    store = store_of(dict.fromkeys(range(10), "a"))
    store.move("a", "b", range(10))
    most = 0
    while store.pending():
        store.deliver(store.pending()[-1])
        most = max([most, *store.in_flight().values()])
    assert most == 4
    assert store.owners() == {"b": 10}


def test_an_immutable_block_is_served_where_it_was_until_it_has_arrived():
    store = store_of({0: "a", 1: "a"}, immutable=[1])
    store.move("a", "b", [1])
    deliver(store, "m>a Start")
    assert heads(store) == {("a", "b"): "Data"}
    pull = store.pull("w", [1])
    deliver(store, "w>a Ask", "a>w Answer")
    assert store.outcome(pull).done
    assert (store.waited, store.redirected) == (0, 0)
    deliver(store, "a>b Data", "b>m Moved")
    assert store.owners() == {"a": 1, "b": 1}
    store.settle()
    assert store.moving == ()
    with pytest.raises(ValueError, match="Cannot push to blocks"):
        store.push("w", {1: 1})


def relocating(**options):
    """Block 0 frozen at a, on its way to b; everybody has been told."""
    store = store_of({0: "a"}, nodes="abcvw", **options)
    store.settle()
    store.relocate({0: "b"})
    store.settle()
    assert store.moving == (0,)
    return store


def test_two_workers_carry_the_same_original_and_it_counts_once():
    store = relocating()
    first, second = store.pull("v"), store.pull("w")
    assert result(store, first) == result(store, second) == Outcome(True, {0: 0})
    store.push("v", {0: 1})
    store.push("w", {0: 10})
    deliver(store, "v>b Ask")
    assert store.executors["b"].roles[0].phase == "live"
    assert store.executors["b"].copies[0].state.staged.keys() == {"v"}
    deliver(store, "w>b Ask")
    store.settle()
    assert store.moving == ()
    assert store.redirected == 0
    assert values(store) == {0: 11}


def test_pulls_go_to_the_old_owner_until_the_new_one_has_the_block():
    store = relocating()
    pull = store.pull("w")
    assert heads(store) == {("w", "a"): "Ask"}
    store.settle()
    store.push("w", {0: 1})
    store.settle()
    late = store.pull("w")
    assert heads(store) == {("w", "b"): "Ask"}
    store.settle()
    assert (store.outcome(pull).values, store.outcome(late).values) == ({0: 0}, {0: 1})


def test_a_push_that_began_before_the_switch_brings_the_original_along():
    store = store_of({0: "a"})
    push = store.push("w", {0: 1})
    store.relocate({0: "b"})
    while (MASTER, "a") in store.pending() or ("a", "b") in store.pending() or ("b", "a") in store.pending():
        store.deliver(next(c for c in store.pending() if "w" not in c))
    assert store.executors["a"].roles[0].phase == "frozen"
    deliver(store, "w>a Ask")
    assert heads(store)["a", "b"] == "Ask"
    assert result(store, push).done
    assert store.moving == ()
    assert values(store) == {0: 1}


def test_what_nobody_pulls_moves_when_swept():
    store = store_of(dict.fromkeys(range(6), "a"))
    store.relocate(dict.fromkeys(range(6), "b"))
    store.settle()
    assert len(store.moving) == 6
    store.sweep(2)
    store.settle()
    assert len(store.moving) == 4
    store.sweep()
    store.settle()
    assert store.moving == ()


def test_a_server_leaves_only_after_its_last_block_is_carried():
    store = store_of({0: "a", 1: "a"})
    store.relocate({0: "b"})
    store.settle()
    store.remove("a")
    pull = store.pull("w")
    while "a" in store.executors:
        assert store.pending(), "nobody would ever let it go"
        store.deliver(store.pending()[0])
    assert not any("a" in (e.owner, e.source) for x in store.executors.values() for e in x.table.values())
    assert result(store, pull).done
    assert values(store) == {0: 0, 1: 0}
    with pytest.raises(ValueError, match="Cannot work on a"):
        store.push("a", {0: 1})


def test_a_request_under_way_to_one_who_leaves_is_sent_on_first():
    store = store_of({0: "a", 1: "b"})
    push = store.push("w", {0: 1})
    store.remove("a")
    while channels := [c for c in store.pending() if c != ("w", "a")]:
        store.deliver(channels[0])
    assert "a" in store.executors
    assert store.owners() == {"b": 2}
    deliver(store, "w>a Ask")
    assert store.redirected == 1
    assert result(store, push).done
    assert "a" not in store.executors


def test_a_worker_that_leaves_finishes_its_pushes():
    store = store_of({0: "a"})
    pushes = [store.push("w", {0: 1}) for _ in range(3)]
    store.remove("w")
    store.settle()
    assert "w" not in store.executors
    assert all(store.outcome(n).done for n in pushes)
    assert values(store) == {0: 3}


def collect_three(value, slots, update):
    """A bulk-synchronous server: every third contribution applies the sum."""
    total, count = slots[0] + update, slots[1] + 1
    return (value + total, (0, 0)) if count == 3 else (value, (total, count))


def test_an_original_with_an_update_is_one_contribution_to_a_round():
    store = Store(list("abuvw"), {0: "a"}, Saved({0: 0}, {0: (0, 0)}), apply=collect_three)
    store.push("u", {0: 1})
    store.settle()
    store.relocate({0: "b"})
    store.settle()
    store.pull("v")
    store.pull("w")
    store.settle()
    store.push("v", {0: 10})
    store.settle()
    assert store.save() == Saved({0: 0}, {0: (11, 2)})
    store.push("w", {0: 100})
    assert store.save() == Saved({0: 111}, {0: (0, 0)})


def test_an_owner_that_dies_with_an_unanswered_update_loses_and_doubles_nothing():
    for steps in range(12):
        store = store_of({0: "a", 1: "b"})
        push = store.push("w", {0: 1, 1: 1})
        for _ in range(steps):
            if store.pending():
                store.deliver(store.pending()[0])
        store.fail("a")
        assert result(store, push).done
        assert values(store) == {0: 1, 1: 1}
        assert store.owners() == {"b": 2}


def test_the_last_push_of_a_dead_worker_is_in_all_blocks_or_in_none():
    ends = set()
    for steps in range(30):
        store = store_of({0: "a", 1: "b", 2: "c"})
        push = store.push("w", {0: 1, 1: 1, 2: 1})
        for _ in range(steps):
            if store.pending():
                store.deliver(store.pending()[0])
        if store.outcome(push):
            break
        store.fail("w")
        done = result(store, push).done
        assert values(store) == dict.fromkeys(range(3), int(done))
        ends.add(done)
    assert ends == {False, True}


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_move_is_completed_or_undone_when_an_end_of_it_dies(victim):
    owners = set()
    for steps in range(12):
        store = store_of({0: "a"}, nodes="abc")
        store.push("c", {0: 1})
        store.settle()
        store.move("a", "b", [0])
        for _ in range(steps):
            if store.pending():
                store.deliver(store.pending()[0])
        if not store.moving:
            break
        store.fail(victim)
        store.settle()
        assert (store.moving, store.recovering) == ((), False)
        assert values(store) == {0: 1}
        owners.add(*store.owners())
    assert victim not in owners


def test_blocks_that_nobody_else_has_cannot_be_lost():
    store = store_of({0: "a"}, nodes="ab")
    store.fail("b")
    store.settle()
    assert store.only_copies("a") == {0}
    store.add("c")
    store.settle()
    assert store.only_copies("a") == frozenset()
    with pytest.raises(ValueError, match="Cannot move block 0 from c"):
        store.move("c", "a", [0])


def test_a_node_may_come_back_under_its_name():
    store = store_of({0: "a"})
    store.push("w", {0: 1})
    store.settle()
    store.fail("w")
    with pytest.raises(ValueError, match="Cannot add w"):
        store.add("w")
    store.settle()
    store.add("w")
    assert result(store, store.push("w", {0: 1})).done
    assert values(store) == {0: 2}


def test_a_model_is_saved_in_the_middle_and_restored_elsewhere():
    store = store_of(dict.fromkeys(range(8), "a"))
    pushes = [store.push("w", dict.fromkeys(range(8), 1)) for _ in range(3)]
    store.move("a", "b", range(6))
    store.relocate({6: "c"})
    for _ in range(20):
        store.deliver(store.pending()[0])
    saved = store.save()
    assert all(store.outcome(n).done for n in pushes)
    assert saved.values == dict.fromkeys(range(8), 3)
    again = Store(["x", "y"], {b: "xy"[b % 2] for b in range(8)}, saved)
    assert again.owners() == {"x": 4, "y": 4}
    assert result(again, again.pull("y")).values == saved.values


def test_arrays_are_not_changed_in_place():
    def momentum(value, slots, update):
        speed = 0.5 * slots + update
        return value - speed, speed

    start = np.zeros(2)
    store = Store(["a", "b"], {0: "a"}, Saved({0: start}, {0: np.zeros(2)}), apply=momentum)
    for owner, other in ("ab", "ba"):
        store.push("b", {0: np.array([1.0, 2.0])})
        store.move(owner, other, [0])
        store.settle()
    np.testing.assert_array_equal(store.save().values[0], [-2.5, -5.0])  # speeds 1, 1.5 times the update
    np.testing.assert_array_equal(store.save().slots[0], [1.5, 3.0])
    np.testing.assert_array_equal(start, [0.0, 0.0])


@pytest.mark.parametrize(("nodes", "assignment"), [("ab", {0: "c"}), ("ab", {}), ("aa", {0: "a"}), ([MASTER], {0: MASTER})])
def test_a_store_needs_a_place_for_every_block(nodes, assignment):
    with pytest.raises(ValueError, match="Cannot"):
        Store(list(nodes), assignment, Saved(dict.fromkeys(assignment, 0), {}))


def test_addition_leaves_the_slots():
    assert add(1, "slots", 2) == (3, "slots")


def test_what_is_to_be_relocated_is_swept_even_if_nobody_has_been_told_yet():
    store = store_of({0: "a", 1: "a"})
    store.relocate({0: "b", 1: "c"})
    assert store.save().values == {0: 0, 1: 0}
    assert (store.moving, store.owners()) == ((), {"b": 1, "c": 1})
