"""Messages arrive as they were sent, and anything else is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

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


@given(NAMES, MESSAGES)
def test_a_message_arrives_as_it_was_sent(sender, message):
    name, found = decode(encode(sender, message))
    assert (name, found.head, found.view, found.generation) == (sender, message.head, message.view, message.generation)
    assert [a.tobytes() for a in found.arrays] == [a.tobytes() for a in message.arrays]
    assert [a.dtype for a in found.arrays] == [a.dtype for a in message.arrays]


def test_every_head_has_a_tag_of_its_own():
    heads = messages.Head.__args__
    assert len({h.__struct_config__.tag for h in (*heads, Peers, Beat)}) == len(heads) + 2


def test_arrays_are_not_copied():
    array = np.arange(1000, dtype=np.float32)
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


@given(MESSAGES, st.data())
def test_a_damaged_message_is_refused_or_still_a_message(message, data):
    frames = [bytes(f) for f in encode("w", message)]
    which = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(0, len(frames[which])))
    frames[which] = frames[which][:at] + data.draw(st.binary(max_size=3)) + frames[which][at + 1 :]
    try:
        name, found = decode(frames)
    except Unreadable:
        return
    again = [bytes(f) for f in encode(name, found)]  # what is read has all parts of a message, of types that can be sent
    assert again[1:] == frames[1:]
    assert decode(again)[1].head == found.head or repr(decode(again)[1].head) == repr(found.head)  # NaN differs from itself


@given(MESSAGES, st.data())
def test_a_message_that_was_cut_short_is_refused(message, data):
    frames = [bytes(f) for f in encode("w", message)]
    which = data.draw(st.integers(0, len(frames) - 1))
    if not frames[which]:
        return
    frames[which] = frames[which][: data.draw(st.integers(0, len(frames[which]) - 1))]
    with pytest.raises(Unreadable):
        decode(frames)


@pytest.mark.parametrize(("change", "words"), [(-1, "2 arrays"), (0, "2 arrays")])
def test_arrays_too_few_or_too_many(change, words):
    frames = [bytes(f) for f in encode("w", STAGE._replace(arrays=STAGE.arrays * 2))]
    short = frames[:-1] if change else [*frames, b""]
    with pytest.raises(Unreadable, match=f"its head says {words[0]}"):
        decode(short)


def test_another_version():
    first, *rest = encode("w", STAGE)
    with pytest.raises(Unreadable, match=r"of version 7: this is version 6"):
        decode([first[:4] + (7).to_bytes(2, "little") + first[6:], *rest])


def test_another_program():
    with pytest.raises(Unreadable, match=r"begins with b'GET ': another program sent it"):
        decode([b"GET / HTTP/1.1\r\n\r\n"])


@pytest.mark.parametrize("size", [2**40, -5, 4])
def test_an_absurd_size_allocates_no_memory(size):
    row = ["w", 0, 0, [["f4", size]], ["StagePush", 7, 0, 3, [[0, 2]]]]
    with pytest.raises(Unreadable, match=f"array of {size} numbers of f4 from 20 bytes"):
        decode([b"PSLV\6\0" + msgspec.msgpack.encode(row), bytes(20)])


def test_an_unknown_type():
    row = ["w", 0, 0, [["O8", 1]], ["StagePush", 7, 0, 3, [[0, 2]]]]
    with pytest.raises(Unreadable, match="array of type 'O8': known are f4, f2, i4"):
        decode([b"PSLV\6\0" + msgspec.msgpack.encode(row), bytes(8)])


def test_a_frame_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "LARGEST_BYTES", 16)
    with pytest.raises(Unreadable, match="at most 16 bytes"):
        encode("w", STAGE)


def test_an_entry_of_the_log_keeps_its_type():
    entry = CommitEntry(1, "worker/a", 9, True, False, 2, 1.0, 5, 0.1, 0.9)
    assert decode(encode("c", Message(LogAppend(3, entry))))[1].head == LogAppend(3, entry)
