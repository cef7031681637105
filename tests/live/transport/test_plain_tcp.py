"""Frames over TCP without ZeroMQ, here between two ends in one process: messages of any size in order, from and to peers
that come, go and do not read."""

import socket
import time
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import numpy as np
import pytest

from harness.live.protocol.wire import LARGEST_BYTES, Unreadable
from harness.live.transport import plain_tcp
from harness.live.transport.plain_tcp import PlainTcp

HERE = "127.0.0.1"
SOON = 10.0  # seconds


@pytest.fixture
def ends():
    """Makes ends that know one another as "0", "1", ..., and closes them at the end."""
    with ExitStack() as stack:
        made = []

        def end(*given):
            new = PlainTcp(HERE, *given)
            stack.callback(new.close)
            for i, other in enumerate(made):
                new.connect(str(i), other.address)
                other.connect(str(len(made)), new.address)
            made.append(new)
            return new

        yield end


def received(end, other=None):
    """The next message at `end`; `other` sends meanwhile what waits there."""
    until = time.monotonic() + SOON
    while (message := end.receive(0.001)) is None:
        assert time.monotonic() < until
        assert other is None or other.receive(0.0) is None
    assert message.caller is None
    return [bytes(frame) for frame in message.frames]


SIZES = [[1], [0, 0, 7], [100, 20_000], [3, 70_000, 0, 5], [10, 65_000], [2**16], [5] * 1500, [3], [2**20, 2**20 + 1], [9]]
SIZES += [[0, 2**17, 0]]


def test_messages_of_any_size_arrive_in_order(ends):
    one, other = ends(), ends()
    rng = np.random.default_rng(0)
    sent = [[rng.bytes(size) for size in sizes] for sizes in SIZES * 3]
    for frames in sent:
        one.send("1", [memoryview(frame) if len(frame) > 50 else frame for frame in frames])
    assert [received(other, one) for _ in sent] == sent
    assert other.receive(0.0) is None


def test_what_comes_in_pieces_is_put_together(ends):
    """However TCP cuts it: here after every few bytes, also within the sizes."""
    other = ends()
    one, listener = socket.socket(), urlsplit(other.address)
    sent = []
    with one:
        one.connect((listener.hostname, listener.port))
        stream = b""
        for sizes in ([3], [4, 5], [1, 70_000], [2]):
            frames = [bytes([len(sizes)]) * size for size in sizes]
            sent.append(frames)
            stream += len(sizes).to_bytes(4, "little") + b"".join(size.to_bytes(8, "little") for size in sizes)
            stream += b"".join(frames)
        got = []
        while stream:
            step = 1 if len(stream) < 100 or len(stream) > 70_020 else 7_001
            one.send(stream[:step])
            stream = stream[step:]
            if (message := other.receive(0.01)) is not None:
                got.append([bytes(frame) for frame in message.frames])
        got += [received(other) for _ in sent[len(got) :]]
    assert got == sent


def test_a_message_that_is_a_little_longer_than_what_is_read_at_once(ends):
    other = ends()
    one, listener = socket.socket(), urlsplit(other.address)
    sent = [[b"1" * (plain_tcp._READ_BYTES - 12 + more)] for more in range(-2, 9)] + [[b"2"]]
    stream = b"".join((1).to_bytes(4, "little") + len(f).to_bytes(8, "little") + f for (f,) in sent)
    with one:
        one.connect((listener.hostname, listener.port))
        one.send(stream[:6])
        assert other.receive(0.05) is None
        one.settimeout(0.0)
        at, got = 6, []
        while len(got) < len(sent):
            with suppress(BlockingIOError):
                at += one.send(stream[at:])
            if (message := other.receive(0.01)) is not None:
                got.append([bytes(frame) for frame in message.frames])
    assert got == sent


def test_large_arrays_are_received_in_memory_of_their_own(ends):
    one, other = ends(), ends()
    arrays = [np.random.default_rng(i).standard_normal(300_000).astype(np.float32) for i in range(2)]
    found = []
    for array in arrays:
        one.send("1", [b"first", array.data])
        while (message := other.receive(0.01)) is None:
            assert one.receive(0.0) is None
        found.append(np.frombuffer(message.frames[1], np.float32))
    assert all(each.flags.aligned and not each.flags.writeable for each in found)
    for each, array in zip(found, arrays, strict=True):  # the second has not overwritten the first
        np.testing.assert_array_equal(each, array)


def test_a_message_stays_as_it_is_when_others_come(ends):
    one, other = ends(), ends()
    kept = []
    for letter in (b"a", b"b", b"c"):
        one.send("1", [letter * 1000])
        while (message := other.receive(0.01)) is None:
            assert one.receive(0.0) is None
        kept.append(message.frames[0])
    assert [bytes(frame) for frame in kept] == [b"a" * 1000, b"b" * 1000, b"c" * 1000]


def test_several_send_to_one(ends):
    one, two, other = ends(), ends(), ends()
    for i in range(50):
        one.send("2", [b"one", b"%d" % i])
        two.send("2", [b"two", b"%d" % i, bytes(100_000)])
    got = []
    while len(got) < 100:
        one.receive(0.0)
        two.receive(0.0)
        got += [] if (message := other.receive(0.001)) is None else [[bytes(f) for f in message.frames[:2]]]
    for name in (b"one", b"two"):
        assert [number for who, number in got if who == name] == [b"%d" % i for i in range(50)]


def test_messages_to_an_unknown_peer_are_lost(ends):
    one, other = ends(), ends()
    one.send("nobody", [b"lost"])
    one.forget("1")
    one.send("1", [b"lost"])
    one.connect("1", other.address)
    one.send("1", [b"kept"])
    assert received(other, one) == [b"kept"]


def test_it_reaches_the_next_process_at_the_same_port(ends):
    """A coordinator that starts again listens where it listened before. What is sent meanwhile is lost."""
    one, before = ends(), PlainTcp(HERE)
    one.connect("other", before.address)
    one.send("other", [b"1"])
    assert received(before, one) == [b"1"]
    before.close()
    for _ in range(5):
        one.send("other", [b"to the dead"])
        one.receive(0.01)
    after = ends(urlsplit(before.address).port)
    until = time.monotonic() + SOON
    while (message := after.receive(0.01)) is None:
        assert time.monotonic() < until
        one.send("other", [b"2"])
        one.receive(0.0)
    assert bytes(message.frames[0]) in (b"2", b"to the dead")


def test_a_peer_that_does_not_read_costs_messages_and_no_time(ends, monkeypatch, caplog):
    monkeypatch.setattr(plain_tcp, "_WAITING_BUFFERS", 100)
    one, other = ends(), ends()
    for number in range(1000):
        one.send("1", [b"%d" % number, bytes(100_000)])
    assert [r.getMessage() for r in caplog.records] == ["Cannot send to 1: it leaves 100 frames waiting."]
    got = []
    while not (got and one.receive(0.0) is None and other._events.poll(0.0) == []):
        if (message := other.receive(0.01)) is not None:
            got.append(int(bytes(message.frames[0])))
    assert got[:30] == list(range(30))
    assert got == sorted(set(got))  # where the kernel found more room later, there is a gap
    assert len(got) < 1000
    one.send("1", [b"next"])
    assert received(other, one) == [b"next"]


def test_another_thread_has_its_own_sending_half(ends):
    one, other = ends(), ends()
    half = one.second_sender()
    half.connect("other", other.address)
    for _ in range(2):  # the connection is not there yet when the first is sent
        half.send("other", [b"beat"])
        time.sleep(0.01)
    assert received(other) == [b"beat"]
    half.close()


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(100),
        b"\xff" * 100,
        (9000).to_bytes(4, "little"),
        (1).to_bytes(4, "little") + (LARGEST_BYTES + 1).to_bytes(8, "little"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_message_ends_its_connection_only(ends, garbage):
    one, other = ends(), ends()
    one.send("1", [b"before"])
    assert received(other, one) == [b"before"]
    place = urlsplit(other.address)
    with socket.create_connection((place.hostname, place.port)) as line:
        line.sendall(garbage)
        with pytest.raises(Unreadable):
            other.receive(SOON)
        line.settimeout(SOON)
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""
    one.send("1", [b"after"])
    assert received(other, one) == [b"after"]


def test_a_port_in_use(ends):
    port = urlsplit(ends().address).port
    with pytest.raises(ValueError, match=rf"Cannot listen on {HERE}:{port}: Address already in use\. Give a free port"):
        PlainTcp(HERE, port)


@pytest.mark.parametrize("text", ["", "garbage", "plain://127.0.0.1", "plain://:9", "plain://h:x", "tcp://127.0.0.1:9?00"])
def test_what_is_no_address(ends, text):
    with pytest.raises(ValueError, match="Cannot reach a process at"):
        ends().connect("other", text)
