"""Frames in shared memory: a frame never changes under its reader, and a slot without readers is used again."""

import fcntl
import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from harness.live.protocol.messages import Message, UnaskedBlocks
from harness.live.protocol.wire import Unreadable, decode, encode
from harness.live.transport import shared_memory
from harness.live.transport.shared_memory import SharedMemory
from tests.live.support.frames import FLOATS, floats_of, frame, in_use, passed, slots_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")


# ------------------------------------------------------------------------------------------------------- lending and reading


def test_only_large_frames_are_lent_and_all_arrive_in_their_places(ends):
    one, other = ends(), ends()
    frames = [b"first", frame(1), b"small", frame(2), bytes(range(256)) * 512, b""]
    sent = one.lend("1", frames)
    assert sum(len(f) for f in sent) < 500
    got = other.borrow(sent)
    assert [bytes(f) for f in got] == [bytes(f) for f in frames]
    assert [isinstance(f, memoryview) and f.readonly for f in got] == [False, True, False, True, True, False]
    small = [b"first", b"second"]
    assert one.lend("1", small) is small
    assert other.borrow(small) is small


def test_a_lent_frame_is_read_without_a_copy(ends):
    one, other = ends(), ends()
    array = floats_of(passed(one, "1", other, frame(1))[0])
    assert array.ctypes.data % 64 == 0
    assert not array.flags.writeable
    assert not array.flags.owndata


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(lambda view: view, id="the frame"),
        pytest.param(lambda view: view.cast("B")[7:9], id="part of the frame"),
        pytest.param(floats_of, id="an array"),
        pytest.param(lambda view: floats_of(view)[5:6], id="part of it"),
        pytest.param(lambda view: floats_of(view)[::2].reshape(-1, 2).T[1].view(np.int32), id="views of views"),
        pytest.param(lambda view: np.asarray(memoryview(floats_of(view)[3:])), id="a view of its memory"),
    ],
)
def test_a_slot_is_used_again_when_the_last_view_is_gone(ends, keep):
    one, other = ends(), ends()
    kept = keep(passed(one, "1", other, frame(1))[0])
    for value in range(10):
        assert floats_of(passed(one, "1", other, frame(value))[0])[-1] == value
    assert bytes(kept) == bytes(keep(frame(1)))
    assert slots_of(one) == 2
    del kept
    both = passed(one, "1", other, frame(1), frame(2))
    assert [floats_of(view)[0] for view in both] == [1, 2]
    assert slots_of(one) == 2


def test_the_arrays_of_a_decoded_message_keep_its_slots(ends):
    one, other = ends(), ends()
    arrays = tuple(np.full(FLOATS, v, np.float32) for v in (1, 2))
    _, message = decode(
        other.borrow(one.lend("1", encode("one", Message(UnaskedBlocks(1, 2, ((0, 1), (3, 4)), 0, 1), arrays, 0, 1))))
    )
    for value in range(5, 10):
        passed(one, "1", other, frame(value), frame(value))
    assert [(a.min(), a.max()) for a in message.arrays] == [(1, 1), (2, 2)]


def test_the_same_array_is_written_once_for_several_readers(ends):
    one, two, three = ends(), ends(), ends()
    array = np.ones(FLOATS, np.float32)
    first, second = passed(one, "1", two, array.data), passed(one, "2", three, array.data)
    assert slots_of(one) == 1
    for held in (first, second):
        assert bytes(held[0]) == bytes(array)
        passed(one, "1", two, frame(5))
        assert slots_of(one) == 2
        held.clear()
    passed(one, "1", two, frame(6), frame(7))
    assert slots_of(one) == 2


def test_another_array_at_the_same_address_is_written_again(ends):
    one, other = ends(), ends()
    array = np.ones(2 * FLOATS, np.float32)
    whole, half = passed(one, "1", other, array.data)[0], passed(one, "1", other, array[:FLOATS].data)[0]
    assert (len(whole), len(half)) == (8 * FLOATS, 4 * FLOATS)
    address = array.ctypes.data
    del array
    array = np.full(2 * FLOATS, 2, np.float32)  # most often where the other was
    assert floats_of(passed(one, "1", other, array.data)[0])[0] == 2, address


def test_an_array_that_is_made_to_be_sent_is_not_copied(ends):
    one, two, three = ends(), ends(), ends()
    made = one.empty(FLOATS)
    made[:] = 1
    first, second = passed(one, "1", two, made.data), passed(one, "2", three, made.data)
    assert slots_of(one) == 1
    part = passed(one, "1", two, made[5:].data)[0]  # which is another array
    assert slots_of(one) == 2
    assert {*floats_of(part), *floats_of(first[0]), *floats_of(second[0])} == {1}
    first.clear()
    second.clear()
    view = made[1:]
    del made
    again = one.empty(FLOATS)
    again[:] = 2
    assert (slots_of(one), set(view)) == (3, {1})
    del view
    assert one.empty(FLOATS).base is not None
    assert slots_of(one) == 3


def test_arrays_that_are_made_leave_room_for_others(ends, monkeypatch):
    monkeypatch.setattr(shared_memory, "LENT_BYTES", 4 * 4 * FLOATS)
    one, other = ends(), ends()
    assert one.empty(10).base is None
    made = [one.empty(FLOATS) for _ in range(4)]
    assert [array.base is None for array in made] == [False, False, True, True]
    for array in made:
        array[:] = 3
    held = [passed(one, "1", other, array.data)[0] for array in made]
    assert [set(floats_of(view)) for view in held] == [{3}] * 4
    assert slots_of(one) == 4
    made[0][:] = 4  # whoever writes to what was sent changes it: such are the rules
    assert set(floats_of(held[0])) == {4}
    one.close()
    made[1][:] = 5
    assert set(floats_of(held[1])) == {5}


# -------------------------------------------------------------------------------------------------------- what is in the way


def test_a_frame_without_room_goes_over_the_socket(ends, monkeypatch):
    monkeypatch.setattr(shared_memory, "LENT_BYTES", 8 * FLOATS)
    one, other = ends(), ends()
    held = [passed(one, "1", other, frame(value))[0] for value in range(5)]
    assert slots_of(one) == 2
    assert [floats_of(view)[-1] for view in held] == [0, 1, 2, 3, 4]
    assert passed(one, "1", other, large := frame(7, 4 * FLOATS))[0] is large


@pytest.mark.usefixtures("nothing_is_left")
def test_slots_that_are_too_small_make_room(ends, monkeypatch):
    monkeypatch.setattr(shared_memory, "SLOTS", 3)
    one, other = ends(), ends()
    before = in_use()
    kept = passed(one, "1", other, frame(1))[0]
    passed(one, "1", other, frame(2), frame(3))
    held = passed(one, "1", other, frame(4, 2 * FLOATS))[0]
    assert slots_of(one) == 2
    assert [floats_of(view)[-1] for view in (kept, held)] == [1, 4]
    held = passed(one, "1", other, frame(5))[0]  # so that the reader learns of it
    assert (slots_of(one), floats_of(held)[0]) == (3, 5)
    assert list(in_use() - before) == [3 * 3, 3 * 2]  # nobody maps what was dropped


def test_without_file_descriptors_a_frame_goes_over_the_socket(ends, monkeypatch):
    one, other = ends(), ends()

    def none(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    assert passed(one, "1", other, large := frame(1))[0] is large
    with pytest.raises(OSError, match="Too many open files"):
        SharedMemory()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda pid, file, token: f"{pid}.{file}.{'0' * 32}", id="another's token"),
        pytest.param(lambda pid, file, token: f"{pid}.9999.{token}", id="no such file"),
        pytest.param(lambda pid, file, token: f"{pid}.0.{token}", id="no slot"),
        pytest.param(lambda pid, file, token: f"{2**31}.{file}.{token}", id="no such process"),
        pytest.param(lambda pid, file, token: f"{pid}.{file}", id="cut short"),
        pytest.param(lambda pid, file, token: "hello/../.1.zz", id="garbage"),
        pytest.param(lambda pid, file, token: "", id="nothing"),
    ],
)
def test_a_peer_that_is_not_on_this_machine_is_lent_nothing(ends, changed):
    one, other = ends(), ends()
    one.connect("1", changed(*other.identity.split(".")))
    assert passed(one, "1", other, large := frame(1))[0] is large


def test_slots_of_a_forgotten_peer_are_never_written_to_again(ends):
    one, two, three = ends(), ends(), ends()
    array = np.ones(FLOATS, np.float32)
    held = passed(one, "1", two, array.data)[0]
    also = one.lend("2", [b"first", array.data])  # and on its way to somebody else
    one.forget("1")
    for value in range(5, 10):
        passed(one, "2", three, frame(value))
    assert set(floats_of(held)) == {1}
    assert set(floats_of(three.borrow(also)[1])) == {1}
    assert slots_of(one) == 2
    passed(one, "2", three, frame(5))
    one.forget("nobody")
    assert slots_of(one) == 1
    assert set(floats_of(held)) == {1}


def test_a_message_that_was_not_sent_takes_no_room(ends):
    one, other = ends(), ends()
    for value in range(5):
        one.lend("1", [b"first", frame(value), frame(value)])
        one.take_back()
    assert slots_of(one) == 2
    assert floats_of(passed(one, "1", other, frame(9))[0])[0] == 9


def notes(lender):
    """A valid note, as a row that can be changed."""
    row = msgspec.msgpack.decode(lender.lend("1", [b"first", frame(1)])[0][4:])
    return row, row[3][0]


def spoilt(place, value):
    def spoil(row, loan):
        (row if place < 4 else loan)[place % 4 if place < 4 else place - 4] = value

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(spoilt(0, 1), id="another process"),
        pytest.param(spoilt(0, -1), id="no process"),
        pytest.param(spoilt(0, 2**63), id="an absurd process"),
        pytest.param(spoilt(1, b"0" * 16), id="another token"),
        pytest.param(spoilt(1, b""), id="no token"),
        pytest.param(spoilt(3, 7), id="no loans"),
        pytest.param(spoilt(4, 2**64 - 1), id="an absurd place"),
        pytest.param(spoilt(5, 0), id="a file that is no slot"),
        pytest.param(spoilt(5, 9999), id="no file"),
        pytest.param(spoilt(6, 99), id="another slot"),
        pytest.param(spoilt(7, -1), id="a mark before the first"),
        pytest.param(spoilt(7, 4096), id="a mark in the data"),
        pytest.param(spoilt(8, 0), id="no bytes"),
        pytest.param(spoilt(8, -5), id="less than no bytes"),
        pytest.param(spoilt(8, 4 * FLOATS + 1), id="more bytes than there are"),
        pytest.param(spoilt(8, 2**63), id="an absurd size"),
    ],
)
def test_wrong_notes_are_refused(ends, spoil):
    one, other = ends(), ends()
    row, loan = notes(one)
    spoil(row, loan)
    with pytest.raises(Unreadable, match="Cannot read what another process lends"):
        other.borrow([b"LENT" + msgspec.msgpack.encode(row), b"first"])
    assert floats_of(passed(one, "1", other, frame(2))[0])[0] == 2


@pytest.mark.parametrize("rest", [b"", b"\xc1", b"\x94\x01", b"x" * 1000])
def test_garbage_in_place_of_a_note_is_refused(ends, rest):
    with pytest.raises(Unreadable, match="Cannot read what another process lends"):
        ends().borrow([b"LENT" + rest])


@pytest.mark.parametrize(("bytes_", "seals"), [(0, fcntl.F_SEAL_SHRINK), (100, fcntl.F_SEAL_SHRINK), (2**20, 0)])
def test_files_that_are_no_slots(ends, bytes_, seals):
    """Files that are too short, or that their owner could shorten while they are read."""
    one, other = ends(), ends()
    row, loan = notes(one)
    with os.fdopen(os.memfd_create("harness-slot", os.MFD_ALLOW_SEALING), "r+b", buffering=0) as file:
        file.write(Path(f"/proc/self/fd/{loan[1]}").read_bytes()[:bytes_])
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        loan[1] = file.fileno()
        with pytest.raises(Unreadable, match="Cannot read what another process lends"):
            other.borrow([b"LENT" + msgspec.msgpack.encode(row), b"first"])


# ---------------------------------------------------------------------------------------------------------------- at random


@pytest.mark.parametrize("seed", range(4))
def test_frames_never_change_under_their_readers(ends, monkeypatch, seed):
    """Several processes lend to several, the same arrays to many; some are treated as dead, and room is short."""
    monkeypatch.setattr(shared_memory, "LARGE_BYTES", 256)
    monkeypatch.setattr(shared_memory, "LENT_BYTES", 2**14)
    rng, count = random.Random(seed), 4
    made = [ends() for _ in range(count)]
    held, arrays, lent = [], [], 0
    for step in range(1500):
        a, b = rng.sample(range(count), 2)
        if not arrays or rng.random() < 0.5:
            arrays = [*arrays[-3:], np.full(rng.randint(1, 600), step, np.float32)]
        frames = [rng.choice(arrays).data for _ in range(rng.randint(1, 3))]
        sent = made[a].lend(str(b), [b"first", *frames])
        if rng.random() < 0.03:
            made[a].take_back()
            continue
        lent += sum(len(f) for f in sent) < sum(len(f) for f in frames)
        got = made[b].borrow(sent)[1:]
        held += [(floats_of(view)[rng.randrange(2) :], f[0]) for view, f in zip(got, frames, strict=True)]
        if rng.random() < 0.02:
            made[a].connect(str(b), rng.choice([made[b].identity, ""]))
        rng.shuffle(held)
        for array, value in held:
            assert not array.size or array.min() == array.max() == value
        del held[rng.randint(0, 8) :]
    assert lent > 500
    held.clear()
    del array, got
    for end in made:
        assert end.slots.busy == 0
        for i in range(count):
            end.forget(str(i))
        assert end.slots.given_up == 0
