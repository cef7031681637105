"""A hostile client at every endpoint of a job: somebody without a key, and a process of the job that says what it may not.

The job goes on, at the pace of its protocol, and its model has every push once. What a process of the job says in its own
name and role is believed: it trains the model, after all.
"""

import os
import random
import select
import socket
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import zmq

from harness.live.processes.loops import Mailbox
from harness.live.protocol.log import DropEntry
from harness.live.protocol.messages import (
    COORDINATOR,
    GradientDone,
    Hello,
    LogAppend,
    Message,
    PushStaged,
    Rest,
    StagePush,
    View,
    ViewReady,
)
from harness.live.protocol.wire import Beat, Peers, encode, signal
from harness.live.transport.unix_sockets import TICKET_BYTES
from harness.live.transport.zeromq import Address, KeyPair, ZmqTransport
from harness.live.worker.worker import Worker
from tests.live.support.counting_job import HERE, JOB, MEMBERS, SIZE, threads

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(48)  # of ZMTP 3.0
OFTEN, FAST = 2000, 100  # attempts per endpoint
EACH = 20  # attempts after which the job must have completed another push


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A job in which nobody asks again for what has not arrived: if an attack delayed or cost it one message, it would stand
    still. So its pace is that of the protocol in peace, however fast this machine is."""
    monkeypatch.setattr(Worker, "tick", lambda _: None)
    with threads(tmp_path, job=replace(JOB, retry_seconds=1e9)) as job:
        job.heard = heard_by(monkeypatch)
        job.train()
        yield job


def heard_by(monkeypatch):
    """Counts what each process takes for a message of the job, by its name and the type of the message."""
    heard = Counter()
    receive = Mailbox.receive

    def counted(mailbox, timeout_seconds):
        if (found := receive(mailbox, timeout_seconds)) is not None:
            heard[mailbox.name, type(found[1].head)] += 1
        return found

    monkeypatch.setattr(Mailbox, "receive", counted)
    return heard


def endpoints(job):
    return {COORDINATOR: job.coordinator.address} | {name: job.transports[name].address for name in MEMBERS}


def assert_exact(job, least=30):
    """It trains on, and every push is in the model once."""
    counted = job.counted + job.pushes(least)
    model, more = job.model()
    assert model.tolist() == [counted + more] * SIZE
    # What a push costs in peace: each server is sent its part once. At the end, two workers may be at one that is no more
    # completed.
    for server in ("server/c", "server/d"):
        assert counted + more <= job.heard[server, StagePush] <= counted + more + 2
    assert job.coordinator.held_up_by() == {}
    assert job.coordinator.silent() == {}
    assert dict(job.coordinator.members) == dict.fromkeys(MEMBERS, 1)


attempts = pytest.mark.parametrize(
    "count", [FAST, pytest.param(OFTEN, marks=[pytest.mark.live, pytest.mark.timeout(600)])], ids=["few", "many"]
)


@attempts
def test_a_stranger_changes_nothing(training, count):
    """At the TCP sockets and the Unix sockets: bytes of no meaning, handshakes that are cut short or replayed, tickets that
    nobody has sent by ZeroMQ, keys that are unknown, and no encryption."""
    rng = random.Random(0)
    recorded = a_recorded_handshake(training)
    for address in endpoints(training).values():
        place = urlsplit(Address.parse(address).place)
        for number in range(count):
            raw = [
                rng.randbytes(rng.randrange(1, 200)),
                GREETING[: rng.randrange(len(GREETING))],
                GREETING + rng.randbytes(rng.randrange(300)),
                recorded[: rng.randrange(len(recorded))],
                recorded,
                rng.randbytes(TICKET_BYTES),
            ][number % 6]
            with the_socket_of(place, unix=number // 6 % 2 == 0) as line:
                line.sendall(raw)
                if number % EACH == 0:  # while this connection is open
                    training.counted += training.pushes(1)
    for how in ("no key", "unknown key"):
        speaks_zeromq(training, how, max(count // 20, 5))
    assert_exact(training)


def the_socket_of(place, *, unix):
    if unix:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(f"\0harness/{place.netloc}")
        return line
    return socket.create_connection((place.hostname, place.port))


def a_recorded_handshake(job):
    """What a process of the job sends when it connects, and its first message, as they are on the line."""
    with socket.create_server((HERE, 0)) as listener, closing(ZmqTransport(HERE, share=False)) as one:
        real = Address.parse(job.transports["server/c"].address)
        one.connect("listener", str(Address(f"tcp://{HERE}:{listener.getsockname()[1]}", real.key)))
        one.send("listener", [b"a push"])
        line, _ = listener.accept()
        with line, socket.create_connection((HERE, urlsplit(real.place).port)) as server:
            seen, goes_to = b"", {line: server, server: line}
            # Until nothing more comes, and there are the greeting and the client's hello at least.
            while (ready := select.select([line, server], [], [], 0.1)[0]) or len(seen) <= 200:
                for come in ready:
                    part = come.recv(10_000)
                    assert part, "the connection has ended"
                    seen += part if come is line else b""
                    goes_to[come].sendall(part)
    return seen


def speaks_zeromq(job, how, count):
    with zmq.Context() as context:
        for address in endpoints(job).values():
            place, key, _ = Address.parse(address)
            for _ in range(count):
                with context.socket(zmq.PUSH) as line:
                    line.setsockopt(zmq.LINGER, 0)
                    if how == "unknown key":
                        mine = KeyPair.fresh()
                        line.curve_serverkey = zmq.utils.z85.encode(bytes.fromhex(key))
                        line.curve_publickey, line.curve_secretkey = mine.public, mine.secret
                    line.connect(place)
                    # A client that reads that the server wants keys gives up for good: a send that blocks would never end.
                    with suppress(zmq.Again):
                        line.send_multipart([bytes(f) for f in encode(COORDINATOR, signal(Peers(()), 99))], zmq.NOBLOCK)


def test_a_list_of_processes_from_a_stranger_does_not_freeze_a_job(training):
    """One message to each process was enough for that."""
    speaks_zeromq(training, "no key", 1)
    speaks_zeromq(training, "unknown key", 1)
    assert_exact(training)


@attempts
def test_a_process_of_the_job_cannot_speak_for_others(training, count, caplog):
    """It has a key, so that its messages arrive: garbage, cut short, of former generations and views, in others' names, and
    control messages that are not for its role."""
    rng, layout = random.Random(1), (((0, 8),))
    with closing(ZmqTransport(HERE)) as rogue:
        training.coordinator.expect("worker/x", 1)
        rogue.connect(COORDINATOR, training.coordinator.register("worker/x", 1, rogue.address))
        training.until(lambda: all("worker/x" in process_peers(training, name) for name in MEMBERS))
        for name, address in endpoints(training).items():
            rogue.connect(name, address)
            ones = (np.ones(SIZE, np.float32),)
            forged = [
                (COORDINATOR, signal(Peers(()), 99)),
                ("worker/x", signal(Peers(()), 99)),
                (COORDINATOR, signal(Peers(((COORDINATOR, rogue.address, 99),)), 0)),
                (COORDINATOR, Message(View(99, 0, 0, ((0, 8, "server/x"),), {}, ()), (), 99, 99)),
                ("worker/x", Message(View(99, 0, 0, ((0, 8, "server/x"),), {}, ()), (), 99, 99)),
                (COORDINATOR, Message(LogAppend(10**6, DropEntry("worker/a", 99, 10**6)), (), 1, 1)),
                ("worker/x", Message(LogAppend(10**6, DropEntry("worker/a", 99, 10**6)), (), 1, 1)),
                ("worker/x", Message(Rest(), (), 1, 1)),
                ("worker/a", signal(Beat(), 1)),
                ("worker/a", Message(StagePush(1, 0, 0, layout), ones, 1, 1)),
                ("worker/a", Message(GradientDone(2**32 + 1, 1.0, 0.0, 0.0, 0), (), 1, 1)),
                ("server/c", Message(PushStaged("worker/a", 2**32 + 1, layout), (), 1, 1)),
                ("server/c", Message(ViewReady(1), (), 1, 1)),
                ("server/d", Message(Hello(), (), 0, 2)),
                ("worker/x", Message(Hello(), (), 0, 99)),
            ]
            if name == COORDINATOR:  # in its own name, but of another view or generation
                forged += [
                    ("worker/x", Message(GradientDone(1, 1.0, 0.0, 0.0, 0), (), v, g)) for v, g in ((0, 1), (1, 0), (9, 9))
                ]
            for number in range(count):
                frames = encode(*forged[number % len(forged)])
                if number % 3 == 1:
                    frames = [bytes(frames[0])[: rng.randrange(len(frames[0]))], *frames[1:]]
                elif number % 7 == 2:
                    frames = [rng.randbytes(rng.randrange(1, 60)) for _ in range(rng.randrange(1, 4))]
                elif number % 7 == 3:
                    frames = [b"LENT" + msgspec.msgpack.encode([os.getpid(), b"x" * 16, 0, [[0, 1, 1, 1, 100_000]]])]
                rogue.send(name, frames)
                if number % EACH == 0:  # the job is not only there when the flood is over
                    training.counted += training.pushes(1)
            training.counted += training.pushes(5)
        assert_exact(training)
    for name in (COORDINATOR, *MEMBERS):
        assert f"{name} refuses a message that worker/x sends in the name of" in caplog.text
        assert f"{name} drops what it received" in caplog.text


def process_peers(job, name):
    return job.transports[name]._peers.values()
