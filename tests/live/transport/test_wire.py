"""Messages arrive as they were sent, and anything else is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec.structs import replace

from harness.live.protocol import messages, wire
from harness.live.protocol.log import CommitEntry, MoveEntry
from harness.live.protocol.messages import GradientDone, LogAppend, Message, Pulled, StagePush
from harness.live.protocol.wire import Beat, Peers, Unreadable, decode, encode

NAMES = st.text(max_size=12)
RUNS = st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)), max_size=3).map(tuple)
COUNTS = st.integers(0, 2**62)
NUMBERS = st.floats(allow_nan=False)
DONE = st.builds(GradientDone, cycle=COUNTS, loss=NUMBERS, pull_seconds=NUMBERS, compute_seconds=NUMBERS, index=COUNTS)
HEADS = st.one_of(
    st.builds(StagePush, cycle=COUNTS, branch=COUNTS, after=COUNTS, runs=RUNS, done=st.none() | DONE),
    DONE,
    st.builds(LogAppend, COUNTS, st.builds(MoveEntry, runs=RUNS, source=NAMES, target=NAMES, on_demand=st.booleans())),
    st.builds(Peers, st.lists(st.tuples(NAMES, NAMES, COUNTS), max_size=3).map(tuple)),
    st.just(Beat()),
)
ROWS = st.lists(
    st.one_of(*(arrays.arrays(kind, st.integers(0, 50)) for kind in (np.float32, np.float16, np.int32))), max_size=4
).map(tuple)
MESSAGES = st.builds(Message, HEADS, ROWS, COUNTS, COUNTS)
STAGE = Message(StagePush(7, 0, 3, ((0, 2),)), (np.arange(5, dtype=np.float32),), view=2, generation=4)


def encoded(sender, message, *, short):
    """Its frames, with the arrays in the first one, or each in its own, however long they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SHORT_BYTES", 2**30 if short else -1)
        return [bytes(frame) for frame in encode(sender, message)]


def first_frame(row, arrays=b""):
    packed = msgspec.msgpack.encode(row)
    return b"PSLV\x08\0\0\0" + len(packed).to_bytes(4, "little") + packed + bytes(-len(packed) % 4) + arrays


@given(NAMES, MESSAGES, st.booleans())
def test_a_message_arrives_as_it_was_sent(sender, message, short):
    name, found = decode(encoded(sender, message, short=short))
    assert (name, found.head, found.view, found.generation) == (sender, message.head, message.view, message.generation)
    assert [a.tobytes() for a in found.arrays] == [a.tobytes() for a in message.arrays]
    assert [a.dtype for a in found.arrays] == [a.dtype for a in message.arrays]


def test_every_head_has_a_tag_of_its_own():
    heads = messages.Head.__args__
    assert len({h.__struct_config__.tag for h in (*heads, Peers, Beat)}) == len(heads) + 2


def test_short_arrays_are_in_the_first_frame():
    array = np.arange(wire.SHORT_BYTES // 8, dtype=np.float32)
    for sender in ("w", "w1", "w12", "w123"):  # rows of all lengths
        (frame,) = encode(sender, Message(Pulled(0, 0, ()), (array, array)))
        for found in decode([frame])[1].arrays:
            assert found.flags.aligned
            assert np.array_equal(found, array)
            with pytest.raises(ValueError, match="read-only"):
                found[0] = 1
    assert len(encode("w", Message(Pulled(0, 0, ()), (array, array, array[:1])))) == 4


def test_long_arrays_are_not_copied():
    array = np.arange(100_000, dtype=np.float32)
    frames = encode("w", Message(Pulled(0, 0, ()), (array,)))
    found = decode(frames)[1].arrays[0]
    assert np.shares_memory(array, frames[1])
    assert np.shares_memory(array, found)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_a_slice_of_a_model_is_sent_without_a_copy():
    model = np.arange(10, dtype=np.float32)
    assert decode(encode("w", Message(Pulled(0, 0, ()), (model[2:5], model[::3]))))[1].arrays[1].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("array", [np.zeros(2), np.zeros((2, 2), np.float32), np.zeros(2, ">f4")], ids=["f8", "2d", "big"])
def test_other_arrays_are_not_sent(array):
    with pytest.raises(Unreadable, match="float32, float16 or int32"):
        encode("w", Message(Pulled(0, 0, ()), (array,)))


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_garbage_is_refused(frames):
    with pytest.raises(Unreadable):
        decode(frames)


@given(MESSAGES, st.booleans(), st.data())
def test_a_damaged_message_is_refused_or_still_a_message(message, short, data):
    frames = encoded("w", message, short=short)
    which = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(0, len(frames[which])))
    frames[which] = frames[which][:at] + data.draw(st.binary(max_size=3)) + frames[which][at + 1 :]
    try:
        name, found = decode(frames)
    except Unreadable:
        return
    again = encoded(name, found, short=short)  # what is read has all parts of a message, of types that can be sent
    assert again[1:] == frames[1:]
    assert [a.tobytes() for a in decode(again)[1].arrays] == [a.tobytes() for a in found.arrays]
    assert decode(again)[1].head == found.head or repr(decode(again)[1].head) == repr(found.head)  # NaN differs from itself


@given(MESSAGES, st.booleans(), st.data())
def test_a_message_that_was_cut_short_is_refused(message, short, data):
    frames = encoded("w", message, short=short)
    which = data.draw(st.integers(0, len(frames) - 1))
    if not frames[which]:
        return
    frames[which] = frames[which][: data.draw(st.integers(0, len(frames[which]) - 1))]
    with pytest.raises(Unreadable):
        decode(frames)


@pytest.mark.parametrize("change", [-1, 0])
def test_arrays_too_few_or_too_many(change):
    frames = encoded("w", replace(STAGE, arrays=STAGE.arrays * 2), short=False)
    wrong = frames[:-1] if change else [*frames, b""]
    with pytest.raises(Unreadable, match=f"with {len(wrong) - 1} arrays: its head says 2"):
        decode(wrong)


def test_bytes_too_few_or_too_many():
    (frame,) = encode("w", STAGE)
    with pytest.raises(Unreadable, match="array of 5 numbers of f4 from 16 bytes"):
        decode([frame[:-4]])
    with pytest.raises(Unreadable, match=f"message of {len(frame) + 4} bytes: its head says {len(frame)}"):
        decode([frame + bytes(4)])


def test_another_version():
    first, *rest = encode("w", STAGE)
    with pytest.raises(Unreadable, match=r"of version 9: this is version 8"):
        decode([first[:4] + (9).to_bytes(2, "little") + first[6:], *rest])


def test_another_program():
    with pytest.raises(Unreadable, match=r"begins with b'GET ': another program sent it"):
        decode([b"GET / HTTP/1.1\r\n\r\n"])


@pytest.mark.parametrize("size", [2**40, -5, 4])
def test_an_absurd_size_allocates_no_memory(size):
    row = ["w", 0, 0, [["f4", size]], ["StagePush", 7, 0, 3, [[0, 2]]]]
    for frames in ([first_frame(row), bytes(20)], *([[first_frame(row, bytes(20))]] if size != 4 else [])):
        with pytest.raises(Unreadable, match=f"array of {size} numbers of f4 from 20 bytes"):
            decode(frames)


def test_an_unknown_type():
    row = ["w", 0, 0, [["O8", 1]], ["StagePush", 7, 0, 3, [[0, 2]]]]
    for frames in ([first_frame(row), bytes(8)], [first_frame(row, bytes(8))]):
        with pytest.raises(Unreadable, match="array of type 'O8': known are f4, f2, i4"):
            decode(frames)


def test_a_frame_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "LARGEST_BYTES", 16)
    with pytest.raises(Unreadable, match="at most 16 bytes"):
        encode("w", STAGE)


def test_an_entry_of_the_log_keeps_its_type():
    entry = CommitEntry(1, "worker/a", 9, True, False, 2, 1.0, 5, 0.1, 0.9)
    assert decode(encode("c", Message(LogAppend(3, entry))))[1].head == LogAppend(3, entry)
