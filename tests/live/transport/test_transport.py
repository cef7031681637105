"""Frames between processes, here between two ends in one process: in order, without copies, and only for holders of the
keys."""

import time
from contextlib import ExitStack
from urllib.parse import urldefrag, urlsplit

import numpy as np
import pytest
import zmq

from harness.live.transport import zeromq
from harness.live.transport.zeromq import Keys, ZmqTransport, on_loopback

HERE = "127.0.0.1"
SOON, NEVER = 10.0, 0.3  # seconds


@pytest.fixture
def ends():
    """Makes transports, and closes them at the end."""
    with ExitStack() as stack:

        def end(**options):
            made = ZmqTransport(HERE, **options)
            stack.callback(made.close)
            return made

        yield end


def received(end, seconds=SOON):
    frames = end.receive(seconds)
    return None if frames is None else [bytes(f) for f in frames]


@pytest.mark.parametrize("secret", [False, True])
def test_messages_arrive_in_order(ends, secret):
    keys = Keys.fresh() if secret else None
    one, other = ends(keys=keys), ends(keys=keys)
    one.connect("other", other.address)
    for i in range(500):
        one.send("other", [b"%d" % i, b"x" * (i % 7)])
    assert [received(other)[0] for _ in range(500)] == [b"%d" % i for i in range(500)]
    assert other.receive(0.0) is None


@pytest.mark.parametrize("secret", [False, True])
def test_large_arrays_are_not_copied_on_the_way_in(ends, secret):
    keys = Keys.fresh() if secret else None
    one, other = ends(keys=keys), ends(keys=keys)
    one.connect("other", other.address)
    array = np.random.default_rng(0).standard_normal(2_000_000).astype(np.float32)
    one.send("other", [b"first", array.data])
    _, frame = other.receive(SOON)
    found = np.frombuffer(frame, np.float32)
    assert found.flags.aligned
    assert not found.flags.owndata
    assert np.array_equal(found, array)


def test_several_send_to_one(ends):
    one, two, other = ends(), ends(), ends()
    for end in (one, two):
        end.connect("other", other.address)
        for i in range(50):
            end.send("other", [b"one" if end is one else b"two", b"%d" % i])
    got = [received(other) for _ in range(100)]
    for name in (b"one", b"two"):
        assert [number for who, number in got if who == name] == [b"%d" % i for i in range(50)]


def test_messages_to_an_unknown_peer_are_lost(ends):
    one, other = ends(), ends()
    one.send("other", [b"lost"])
    one.connect("other", other.address)
    one.send("other", [b"kept"])
    assert received(other) == [b"kept"]
    one.forget("other")
    one.send("other", [b"lost"])
    assert other.receive(NEVER) is None


def test_it_connects_to_a_peer_that_starts_later(ends):
    one = ends()
    gone = ZmqTransport(HERE)
    gone.close()
    one.connect("other", gone.address)
    one.send("other", [b"early"])
    late = ends(port=urlsplit(gone.address).port)
    assert received(late) == [b"early"]


def test_it_follows_a_peer_to_another_port_and_drops_messages_in_transfer(ends):
    one, before = ends(), ZmqTransport(HERE)
    one.connect("other", before.address)
    one.send("other", [b"1"])
    assert received(before) == [b"1"]
    before.close()
    one.send("other", [b"to the dead"])
    after = ends()
    one.connect("other", after.address)
    one.send("other", [b"2"])
    assert received(after) == [b"2"]
    assert after.receive(NEVER) is None


def test_another_thread_has_its_own_sending_half(ends):
    one, other = ends(), ends()
    half = one.second_sender()
    half.connect("other", other.address)
    half.send("other", [b"beat"])
    assert received(other) == [b"beat"]
    half.close()


def test_a_peer_that_does_not_read_is_logged_once(ends, monkeypatch, caplog):
    monkeypatch.setattr(zeromq, "_WAITING_MESSAGES", 5)
    one = ends()
    one.connect("other", "tcp://127.0.0.1:9")  # nobody listens there
    for _ in range(9):
        one.send("other", [b"x"])
    assert [r.getMessage() for r in caplog.records] == [
        "Cannot send to other: it has other keys, or leaves 5 messages waiting."
    ]


def test_a_port_in_use(ends):
    one = ends()
    port = urlsplit(one.address).port
    with pytest.raises(ValueError, match=rf"Cannot listen on tcp://127.0.0.1:{port}: Address already in use. Give a free"):
        ZmqTransport(HERE, port)


def test_an_address_that_is_not_ours():
    with pytest.raises(ValueError, match=r"Cannot listen on tcp://192\.0\.2\.77:\*"):
        ZmqTransport("192.0.2.77", keys=Keys.fresh())


def test_closing_drops_waiting_messages(ends):
    one = ZmqTransport(HERE)
    one.connect("other", "tcp://127.0.0.1:9")
    one.send("other", [b"x" * 10_000_000])
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 2


# ------------------------------------------------------------------------------------------------------------------ keys


def test_the_right_keys_after_wrong_ones(ends):
    """Refused peers do not change the listener."""
    keys = Keys.fresh()
    right, wrong, other = ends(keys=keys), ends(keys=Keys.fresh()), ends(keys=keys)
    for end in (wrong, right):
        end.connect("other", other.address)
        end.send("other", [b"let me in" if end is wrong else b"hello"])
    assert received(other) == [b"hello"]
    assert other.receive(NEVER) is None


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(lambda keys: None, id="none"),
        pytest.param(lambda keys: Keys.fresh(), id="others"),
        pytest.param(lambda keys: Keys(keys.listen, Keys.fresh().call), id="not one of the callers'"),
        pytest.param(lambda keys: Keys(Keys.fresh().listen, keys.call), id="not the listener's"),
    ],
)
def test_without_the_keys_nobody_can_push(ends, theirs):
    keys = Keys.fresh()
    other, stranger = ends(keys=keys), ends(keys=theirs(keys))
    stranger.connect("other", other.address)
    stranger.send("other", [b"a push"])
    assert other.receive(NEVER) is None


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(lambda keys: None, id="none"),
        pytest.param(lambda keys: Keys.fresh(), id="others"),
        pytest.param(lambda keys: Keys((keys.listen[0], Keys.fresh().listen[1]), keys.call), id="only the public one"),
    ],
)
def test_without_the_keys_nobody_receives(ends, theirs):
    """A process at a peer's former address receives nothing without the keys."""
    keys = Keys.fresh()
    one, stranger = ends(keys=keys), ends(keys=theirs(keys))
    one.connect("other", stranger.address)
    one.send("other", [b"the model"])
    assert stranger.receive(NEVER) is None


def test_a_listener_without_its_authenticator_accepts_nobody(ends):
    keys = Keys.fresh()
    one, other = ends(keys=keys), ends(keys=keys)
    other._guard.stop()
    one.connect("other", other.address)
    one.send("other", [b"a push"])
    assert other.receive(NEVER) is None


def test_encrypted_traffic_cannot_be_read(ends):
    """With keys, no part of a message appears in the bytes between two ends."""
    secret = b"the weights of the model " * 40
    for keys in (None, Keys.fresh()):
        one, other = ends(keys=keys), ends(keys=keys)
        context = zmq.Context()
        wire, line = context.socket(zmq.STREAM), context.socket(zmq.STREAM)
        try:
            port = wire.bind_to_random_port(f"tcp://{HERE}")
            line.connect(urldefrag(other.address).url)
            there = line.recv_multipart()[0]
            one.connect("other", f"tcp://{HERE}:{port}")
            one.send("other", [secret])
            assert (secret in _relayed(wire, line, there, other)) == (keys is None)
        finally:
            context.destroy(linger=0)


def _relayed(wire, line, there, other):
    """Carry bytes both ways until `other` has its message; returns the bytes that went to it."""
    seen, here = b"", b""
    for _ in range(1000):
        if wire.poll(5):
            here, data = wire.recv_multipart()
            seen += data
            if data:
                line.send_multipart([there, data])
        if line.poll(5):
            _, data = line.recv_multipart()
            if data and here:
                wire.send_multipart([here, data])
        if other.receive(0.0) is not None:
            return seen
    raise AssertionError("nothing arrived")


def test_keys_are_not_printed():
    keys = Keys.fresh()
    assert repr(keys) == "Keys(...)"
    assert keys != Keys.fresh()


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("head", False)],
)
def test_what_is_loopback(host, inside):
    assert on_loopback(host) == inside
