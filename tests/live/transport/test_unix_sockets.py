"""Lines between processes of one machine: messages of any size in order, and only from callers that have proved who they
are."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest

from harness.live.protocol.wire import Unreadable
from harness.live.transport import unix_sockets
from harness.live.transport.unix_sockets import TICKET_BYTES, UnixSockets

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only with shared memory, which this system has not")

SOON = 10.0  # seconds
KEY = "the key of one"


@pytest.fixture
def ends():
    """Makes ends that listen under their numbers."""
    with ExitStack() as stack:
        made = []

        def end():
            quiet, _ = pair = os.pipe()
            for descriptor in pair:
                stack.callback(os.close, descriptor)
            made.append(UnixSockets(name_of(len(made)), quiet))
            stack.callback(made[-1].close)
            return made[-1]

        yield end


def name_of(number):
    return f"\0harness-test/{os.getpid()}/{number}"


def connected(one, other, number=1):
    """Make a line from `one` to `other`, which listens as `number`."""
    other.admit(one.connect("other", name_of(number), os.getpid()), KEY)


def received(end, other=None):
    """The next message at `end`; `other` sends meanwhile what waits there."""
    while (found := end.take()) is None:
        assert other is not None or not end.wait(SOON)
        if other is not None:
            other.wait(0.0)
            end.wait(0.0)
    key, frames = found
    assert key == KEY
    return [bytes(frame) for frame in frames]


def nothing_comes(end):
    while end._events.poll(0.0):
        with suppress(Unreadable):
            end.wait(0.0)
    return end.take() is None


SIZES = [[0], [1], [0, 0, 7], [100, 20_000], [3, 70_000, 0, 5], [2**20, 2**20 + 1], [0, 2**17, 0], [5] * 1500]


def test_messages_of_any_size_arrive_in_order(ends):
    one, other = ends(), ends()
    connected(one, other)
    rng = np.random.default_rng(0)
    sent = [[rng.bytes(size) for size in sizes] for sizes in SIZES]
    for frames in sent:
        assert one.send("other", [memoryview(frame) if len(frame) > 50 else frame for frame in frames])
    assert [received(other, one) for _ in sent] == sent
    assert nothing_comes(other)


ONE_FRAME = [
    (b"x", True),
    (b"siz", True),
    (b"a size", True),
    (bytes(2**16), True),
    (b"size", False),
    (b"size of what?", False),
    (b"", False),
    (bytes(2**16 + 1), False),
]


def test_a_short_frame_is_a_packet_unless_it_could_be_taken_for_another(ends):
    one, other = ends(), ends()
    connected(one, other)
    line = one.out.lines["other"]
    for frame, goes_alone in ONE_FRAME:
        assert line.send_alone(frame) == goes_alone
        assert goes_alone or one.send("other", [frame])
        assert received(other, one) == [frame]
    assert nothing_comes(other)


def test_a_short_frame_does_not_overtake_what_waits(ends):
    one, other = ends(), ends()
    connected(one, other)
    line, sent = one.out.lines["other"], 0
    while line.send_alone(b"%d" % sent + bytes(50_000)):
        sent += 1
    assert one.send("other", [b"waits"])
    assert received(other)[0][:1] == b"0"
    assert not line.send_alone(b"later")  # although there is room now
    assert one.send("other", [b"later"])
    rest = [received(other, one)[0] for _ in range(sent + 1)]
    assert rest[-2:] == [b"waits", b"later"]


def test_a_message_stays_as_it_is_when_others_come(ends):
    one, other = ends(), ends()
    connected(one, other)
    kept = []
    for letter in (b"a", b"b", b"c"):
        one.send("other", [letter * 1000])
        while (found := other.take()) is None:
            other.wait(SOON)
        kept.append(found[1][0])
    assert [bytes(frame) for frame in kept] == [b"a" * 1000, b"b" * 1000, b"c" * 1000]


def test_a_peer_that_does_not_read_costs_messages_and_no_time(ends, monkeypatch):
    monkeypatch.setattr(unix_sockets, "_WAITING_PACKETS", 3)
    one, other = ends(), ends()
    connected(one, other)
    sent = 0
    while one.send("other", [b"%d" % sent, bytes(50_000)]):
        sent += 1
    assert sent > 3
    assert [received(other, one)[0] for _ in range(sent)] == [b"%d" % number for number in range(sent)]
    assert one.send("other", [b"next"])
    assert received(other) == [b"next"]


def test_what_comes_before_its_ticket_waits_for_it(ends):
    one, other = ends(), ends()
    ticket = one.connect("other", name_of(1), os.getpid())
    one.send("other", [b"early"])
    assert nothing_comes(other)
    other.admit(ticket, KEY)
    assert received(other) == [b"early"]


@pytest.mark.parametrize("ticket", [b"", b"x", bytes(TICKET_BYTES), bytes(TICKET_BYTES + 1), bytes(5000)])
def test_who_has_no_ticket_is_not_heard(ends, ticket):
    other = ends()
    with caller(0) as line:
        line.send(ticket)
        with suppress(OSError):  # it is closed, or not yet
            line.send(b"\1\0\0\0" + (3).to_bytes(8, "little") + b"abc")
        assert nothing_comes(other)


def test_a_ticket_is_good_for_one_line(ends):
    one, other = ends(), ends()
    ticket = one.connect("other", name_of(1), os.getpid())
    other.admit(ticket, KEY)
    one.send("other", [b"first"])
    assert received(other) == [b"first"]
    with caller(1) as line:
        line.send(ticket)
        with suppress(OSError):
            line.send(b"\1\0\0\0" + (3).to_bytes(8, "little") + b"abc")
        assert nothing_comes(other)
    one.send("other", [b"second"])
    assert received(other) == [b"second"]


def caller(number):
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(name_of(number))
    return line


def test_the_next_line_of_a_key_replaces_the_former(ends):
    one, other = ends(), ends()
    connected(one, other)
    for _ in range(5):
        one.send("other", [b"on the former line"])
    assert received(other) == [b"on the former line"]
    again = one.connect("other", name_of(1), os.getpid())
    one.send("other", [b"on the next"])
    other.admit(again, KEY)
    found = [received(other)]
    while found[-1] != [b"on the next"]:
        found.append(received(other))
    assert found[:-1] == [[b"on the former line"]] * (len(found) - 1)  # never after the next
    assert nothing_comes(other)


def test_another_process_in_place_of_the_peer_gets_nothing(ends):
    one, other = ends(), ends()
    with pytest.raises(PermissionError):
        one.connect("other", name_of(1), os.getpid() + 1)
    assert "other" not in one
    with pytest.raises(ConnectionRefusedError):
        one.connect("other", name_of(2), os.getpid())
    assert nothing_comes(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_is_not_heard(ends):
    other = ends()
    name, ticket = name_of(0), bytes(TICKET_BYTES)
    says = (
        "import os, socket, sys; os.setuid(65534); line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "line.connect(sys.argv[1].replace('@', chr(0))); line.settimeout(20)\n"
        "try: line.send(bytes(32)); print(len(line.recv(1)))\n"
        "except OSError: print(0)"
    )
    other.admit(ticket, KEY)
    with subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-c", says, name.replace("\0", "@")], stdout=subprocess.PIPE, text=True
    ) as process:
        other.wait(SOON)
        assert process.communicate(timeout=30)[0].strip() == "0"  # its line was closed
    assert nothing_comes(other)
    assert other._tickets == {ticket: KEY}


def test_callers_that_wait_are_limited(ends, monkeypatch):
    monkeypatch.setattr(unix_sockets, "_WAITING_CALLERS", 5)
    one, other = ends(), ends()
    connected(one, other)
    with ExitStack() as lines:
        for number in range(20):
            line = lines.enter_context(caller(1))
            if number % 2:
                line.send(number.to_bytes(TICKET_BYTES, "little"))
            assert nothing_comes(other)
        assert len(other._in) == 5 + 1
        assert len(other._callers) <= 5
    one.send("other", [b"still heard"])
    assert received(other) == [b"still heard"]


def packet(*sizes, body=b""):
    return b"size" + len(sizes).to_bytes(4, "little") + b"".join(size.to_bytes(8, "little") for size in sizes) + body


@pytest.mark.parametrize(
    "packets",
    [
        [b"sizeabc"],
        [packet()],
        [b"size" + (2**32 - 1).to_bytes(4, "little")],
        [packet(5)[:-1]],
        [packet(5, body=b"abc")],
        [packet(2, body=b"abc")],
        [packet(2**63)],
        [packet(70_000), bytes(60_000), bytes(10_001)],
    ],
)
def test_what_is_no_message_ends_its_line(ends, packets):
    other = ends()
    ticket = bytes(TICKET_BYTES)
    other.admit(ticket, KEY)
    with closing(caller(0)) as line:
        line.send(ticket)
        for each in packets:
            line.send(each)
        with pytest.raises(Unreadable, match="Cannot read"):
            received(other)
        assert other._in == {}
        assert nothing_comes(other)


def test_a_peer_that_has_gone_is_noticed(ends):
    one, other = ends(), ends()
    connected(one, other)
    one.send("other", [b"first"])
    other.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset by peer"):
        one.send("other", [b"second"])
    assert "other" not in one
