"""Frames between processes, here between two ends in one process: in order, without copies, and only for holders of the
keys."""

import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import cloudpickle
import numpy as np
import pytest
import zmq

from harness.live.transport import zeromq
from harness.live.transport.zeromq import Address, KeyPair, ZmqTransport, on_loopback

HERE = "127.0.0.1"
SOON, NEVER = 10.0, 0.3  # seconds
NOBODY = str(Address("tcp://127.0.0.1:9", KeyPair.fresh().name))  # listens there


@pytest.fixture
def ends():
    """Makes transports that know one another as "0", "1", ..., and closes them at the end."""
    with ExitStack() as stack:
        made = []

        def end(*, known=True, **options):
            new = ZmqTransport(HERE, **options)
            stack.callback(new.close)
            for i, other in enumerate(made if known else ()):
                new.connect(str(i), other.address)
                other.connect(str(len(made)), new.address)
            made.append(new)
            return new

        yield end


def received(end, seconds=SOON):
    message = end.receive(seconds)
    return None if message is None else [bytes(f) for f in message.frames]


@pytest.mark.parametrize("share", [False, True])
def test_messages_arrive_in_order(ends, share):
    one, other = ends(share=share), ends(share=share)
    one.connect("other", other.address)
    for i in range(500):
        one.send("other", [b"%d" % i, b"x" * (i % 7)])
    got = []
    while len(got) < 500:
        assert one.receive(0.0) is None  # sends what waits
        got.append(received(other)[0])
    assert got == [b"%d" % i for i in range(500)]
    assert other.receive(0.0) is None


@pytest.mark.parametrize("share", [False, True])
def test_large_arrays_are_not_copied_on_the_way_in(ends, share):
    one, other = ends(share=share), ends(share=share)
    one.connect("other", other.address)
    array = np.random.default_rng(0).standard_normal(2_000_000).astype(np.float32)
    one.send("other", [b"first", array.data])
    _, frame = other.receive(SOON).frames
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
    one, keys = ends(), KeyPair.fresh()
    gone = ZmqTransport(HERE, keys=keys)
    gone.close()
    one.connect("other", gone.address)
    one.send("other", [b"early"])
    late = ends(port=urlsplit(gone.address).port, keys=keys)
    assert received(late) == [b"early"]


def test_it_follows_a_peer_to_another_port_and_drops_messages_in_transfer(ends):
    one, before = ends(), ZmqTransport(HERE)
    one.connect("other", before.address)
    before.connect("one", one.address)
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
    one.connect("other", NOBODY)
    for _ in range(9):
        one.send("other", [b"x"])
    assert [r.getMessage() for r in caplog.records] == [
        "Cannot send to other: it does not accept our key, or leaves 5 messages waiting."
    ]


def test_a_port_in_use(ends):
    one = ends()
    port = urlsplit(one.address).port
    with pytest.raises(ValueError, match=rf"Cannot listen on tcp://127.0.0.1:{port}: Address already in use. Give a free"):
        ZmqTransport(HERE, port)


def test_an_address_that_is_not_ours():
    with pytest.raises(ValueError, match=r"Cannot listen on tcp://192\.0\.2\.77:\*"):
        ZmqTransport("192.0.2.77")


def test_closing_drops_waiting_messages(ends):
    one = ZmqTransport(HERE)
    one.connect("other", NOBODY)
    one.send("other", [b"x" * 10_000_000])
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 60  # it would wait for the other for ever


# ------------------------------------------------------------------------------------------------------------------ keys


def test_a_message_says_which_peer_has_sent_it(ends):
    one, two, other = ends(), ends(), ends()
    for end in (one, two):
        end.send("2", [b"in the name of 1"])
    assert {other.receive(SOON).caller for _ in range(2)} == {"0", "1"}


def test_who_is_no_peer_cannot_push(ends):
    """Not with the listener's public key, which is no secret, and not at the Unix socket either."""
    other, stranger = ends(), ends(known=False)
    stranger.connect("other", other.address)
    stranger.send("other", [b"a push"])
    assert other.receive(NEVER) is None
    other.connect("late", stranger.address)  # now it is one, and what waited arrives
    assert received(other) == [b"a push"]


def test_who_has_been_forgotten_cannot_push_any_more(ends):
    one, other = ends(), ends()
    one.send("1", [b"a push"])
    assert received(other) == [b"a push"]
    other.forget("0")
    one.send("1", [b"another, over the connection that is open"])
    assert other.receive(NEVER) is None


def test_the_next_process_of_a_name_replaces_the_former(ends):
    former, other = ends(), ends()
    following = ends(known=False)
    other.connect("0", following.address)
    for end in (former, following):
        end.connect("1", other.address)
        end.send("1", [b"the former" if end is former else b"the next"])
    assert received(other) == [b"the next"]
    assert other.receive(NEVER) is None


def test_without_the_secret_half_nobody_receives(ends):
    """A process at a peer's former address receives nothing, although it is a peer itself and the address is right."""
    one, stranger = ends(share=False), ends(share=False)
    place = Address.parse(stranger.address).place
    one.connect("other", str(Address(place, KeyPair.fresh().name)))
    one.send("other", [b"the model"])
    assert stranger.receive(NEVER) is None


@pytest.mark.parametrize("how", ["plain", "without a mechanism"])
def test_who_does_not_encrypt_is_refused(ends, how):
    other = ends(share=False)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if how == "plain":
            stranger.plain_username, stranger.plain_password = b"job", b"job"
        stranger.connect(Address.parse(other.address).place)
        stranger.send(b"a push")
        assert other.receive(NEVER) is None


def test_a_listener_without_its_gate_accepts_nobody(ends):
    one, other = ends(), ends()
    other._gate.stop()
    one.send("1", [b"a push"])
    assert other.receive(NEVER) is None


def test_traffic_cannot_be_read(ends):
    """No part of a message appears in the bytes between two ends."""
    secret = b"the weights of the model " * 40
    one, other = ends(share=False), ends(share=False)
    context = zmq.Context()
    wire, line = context.socket(zmq.STREAM), context.socket(zmq.STREAM)
    try:
        port = wire.bind_to_random_port(f"tcp://{HERE}")
        place, key, _ = Address.parse(other.address)
        line.connect(place)
        there = line.recv_multipart()[0]
        one.connect("1", str(Address(f"tcp://{HERE}:{port}", key)))
        one.send("1", [secret])
        seen = _relayed(wire, line, there, other)
        assert len(seen) > len(secret)
        assert b"weights" not in seen
    finally:
        context.destroy(linger=0)


def _relayed(wire, line, there, other):
    """Carry bytes both ways until `other` has its message; returns the bytes that went to it."""
    seen, here, back, until = b"", b"", b"", time.monotonic() + 60.0
    while time.monotonic() < until:
        if wire.poll(5):
            here, data = wire.recv_multipart()
            seen += data
            if data:
                line.send_multipart([there, data])
        if line.poll(5):
            back += line.recv_multipart()[1]  # `other` speaks first, and may do so before `one` is there
        if back and here:
            wire.send_multipart([here, back])
            back = b""
        if other.receive(0.0) is not None:
            return seen
    raise AssertionError("nothing arrived")


def test_the_secret_half_is_not_printed():
    keys = KeyPair.fresh()
    assert repr(keys) == f"KeyPair({keys.name})"
    assert keys.secret.decode() not in repr(keys)
    assert keys != KeyPair.fresh()


def test_keys_travel_in_no_argument_of_ray():
    """Whoever reads the line to Ray's head reads the arguments of actors, unless TLS is on."""
    with pytest.raises(TypeError, match="Cannot send KeyPair"):
        cloudpickle.dumps((1, {"keys": KeyPair.fresh()}))


def test_kept_keys_are_the_same_and_for_their_owner_only(tmp_path):
    keys = KeyPair.kept(tmp_path / "keys")
    assert KeyPair.kept(tmp_path / "keys") == keys
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "tcp://127.0.0.1:9",
        "tcp://127.0.0.1:9?00",
        f"tcp://127.0.0.1:9?{'z' * 64}",
        f"tcp://:9?{'0' * 64}",
        f"tcp://h:x?{'0' * 64}",
        f"tcp://[::1?{'0' * 64}",
        f"ipc://x?{'0' * 64}",
    ],
)
def test_what_is_no_address(ends, text):
    with pytest.raises(ValueError, match="Cannot reach a process at"):
        ends().connect("other", text)


def test_an_address_as_text():
    for memory in ("", "12.3.abc"):
        address = Address("tcp://127.0.0.1:9", KeyPair.fresh().name, memory)
        assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("head", False)],
)
def test_what_is_loopback(host, inside):
    assert on_loopback(host) == inside
