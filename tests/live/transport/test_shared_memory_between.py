"""Frames that are lent between processes: which processes share memory, and what is left when one ends."""

import os
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from harness.live.processes.loops import Mailbox
from harness.live.protocol.messages import BlockData, Message
from harness.live.protocol.wire import Unreadable, encode
from harness.live.transport import zeromq
from harness.live.transport.shared_memory import SharedMemory
from harness.live.transport.zeromq import Address, KeyPair, ZmqTransport
from tests.live.support.frames import FLOATS, floats_of, frame, in_use

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files"),
    pytest.mark.usefixtures("nothing_is_left"),
]

HERE = "127.0.0.1"
SOON = 10.0  # seconds


@contextmanager
def transports(count, **options):
    """So many transports, connected to one another under their numbers."""
    with ExitStack() as stack:
        made = [ZmqTransport(HERE, **options) for _ in range(count)]
        for end in made:
            stack.callback(end.close)
            for i, other in enumerate(made):
                if other is not end:
                    end.connect(str(i), other.address)
        yield made


@pytest.mark.parametrize("share", [True, False])
def test_on_one_machine_memory_is_shared(share):
    with transports(2, share=share) as (one, other):
        assert ("#" in one.address) == share
        before = in_use()
        one.send("1", [b"first", frame(1)])
        assert set(floats_of(other.receive(SOON).frames[1])) == {1}
        assert list(in_use() - before) == ([3, 2] if share else [0, 0])


def unix_sockets(address):
    """The Unix sockets at that address: the listening one, and one for each sender."""
    name = f"@harness/{urlsplit(address).netloc}"
    return sum(line.endswith(name) for line in Path("/proc/net/unix").read_text().splitlines())


@pytest.mark.parametrize("shares", [True, False])
def test_processes_that_share_memory_use_a_unix_socket(shares):
    with transports(2, share=shares) as (one, other):
        for value in range(3):
            one.send("1", [b"small"])
            one.send("1", [b"large", frame(value)])
        came = [other.receive(SOON).frames for _ in range(6)]
        assert [bytes(frames[0][:5]) for frames in came[::2]] == [b"small"] * 3
        assert [set(floats_of(frames[1])) for frames in came[1::2]] == [{0}, {1}, {2}]
        assert unix_sockets(other.address) == 2 * shares
    assert unix_sockets(other.address) == 0


def test_peers_reconnect_to_the_next_process_at_a_port():
    keys = KeyPair.fresh()
    with transports(1) as (one,):
        with closing(ZmqTransport(HERE, keys=keys)) as before:
            one.connect("other", before.address)
            before.connect("0", one.address)
            one.send("other", [b"first"])
            assert [bytes(f) for f in before.receive(SOON).frames] == [b"first"]
        with closing(ZmqTransport(HERE, urlsplit(before.address).port, keys=keys)) as after:
            after.connect("0", one.address)
            one.send("other", [b"next"])
            assert [bytes(f) for f in after.receive(SOON).frames] == [b"next"]


def test_after_closing_only_frames_with_readers_are_left():
    before = in_use()
    with transports(3) as (one, two, three):
        for end in (two, three):
            end.send("0", [b"first", frame(1), frame(2)])
        held = [one.receive(SOON).frames for _ in range(2)]
        assert list(in_use() - before) == [2 * 3 + 3 * 4, 3 + 2 * 4]
    assert list(in_use() - before) == [4, 4]
    assert [[set(floats_of(f)) for f in frames[1:]] for frames in held] == [[{1}, {2}]] * 2
    held.clear()
    assert list(in_use() - before) == [0, 0]


def test_messages_that_do_not_fit_in_the_queue_take_no_room(monkeypatch):
    monkeypatch.setattr(zeromq, "_WAITING_MESSAGES", 3)
    with transports(2) as (one, other), closing(SharedMemory()) as memory:
        before = in_use()
        one.connect("1", str(Address(f"tcp://{HERE}:9", KeyPair.fresh().name, memory.identity)))  # nobody listens there
        for value in range(9):
            one.send("1", [b"first", frame(value)])
        assert list(in_use() - before) == [2 * (3 + 1), 3 + 1]
        one.connect("1", other.address)
        assert list(in_use() - before) == [2, 1]  # those on their way are given up
        one.send("1", [b"first", frame(5)])
        assert set(floats_of(other.receive(SOON).frames[1])) == {5}


def test_a_note_that_cannot_be_read_is_dropped_and_the_next_message_is_read(caplog):
    with transports(2) as (one, other):
        one.send("1", [b"LENT of no meaning"])
        one.send("1", encode("0", message := Message(BlockData(2, ((0, 1),), ()), (np.ones(FLOATS, np.float32),), 3, 4)))
        sender, got = Mailbox("other", 1, other).receive(SOON)
    assert (sender, got.head, set(got.arrays[0])) == ("0", message.head, {1})
    assert "other drops what it received: Cannot read what another process lends" in caplog.text


DOUBLE = """
import sys
import numpy as np
from harness.live.transport.zeromq import ZmqTransport
end = ZmqTransport("127.0.0.1")
print(end.address, flush=True)
end.connect("parent", sys.argv[1])
held = []
while received := end.receive(60.0):
    frames = received.frames
    held.append(frames)
    end.send("parent", [b"twice", *((2 * np.frombuffer(frame, np.float32)).data for frame in frames[1:])])
"""


@contextmanager
def child(end):
    """A process named "child" that keeps all that it receives, and sends back twice that."""
    run = [sys.executable, "-c", DOUBLE, end.address]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own words
        try:
            end.connect("child", process.stdout.readline().strip())
            yield process
        finally:
            process.kill()


def test_a_process_that_dies():
    """Its readers keep their frames, its lenders go on, and its frames that nobody has mapped yet are lost."""
    with transports(1) as (one,):
        with child(one) as process:
            before = in_use()
            for value in range(4):
                one.send("child", [b"first", frame(value)])
            held = [one.receive(SOON).frames[1] for _ in range(4)]
            assert list(in_use() - before) == [2 * 4 + 4, 4 + 4]  # the child holds four slots, and we four of its
            one.send("child", [b"first", frame(5, 2 * FLOATS)])
            while not one._here.lines.arrived:  # the note is here, and is not read yet
                one._here.lines.wait(SOON)
            process.kill()
        with pytest.raises(Unreadable, match=r"Cannot read what another process lends: .* No such file or directory"):
            one.receive(SOON)
        one.send("child", [b"first", frame(6)])
        one.forget("child")
        assert [set(floats_of(view)) for view in held] == [{0}, {2}, {4}, {6}]
        assert list(in_use() - before) == [4, 4]
        held.clear()
        assert list(in_use() - before) == [0, 0]
        with child(one):
            one.send("child", [b"first", frame(7)])
            assert set(floats_of(one.receive(SOON).frames[1])) == {14}
