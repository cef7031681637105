"""Links that are as fast as a scenario says, between sockets in network namespaces."""

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from harness.live.processes import emulated_links as links
from harness.live.processes.emulated_links import emulated_links, in_network, why_not
from harness.live.transport.zeromq import ZmqTransport

needs_root = pytest.mark.skipif(bool(why_not()), reason=why_not())


def on(network, *command):
    inside = ["nsenter", f"--net={network}", *command]
    return subprocess.run(inside, check=True, capture_output=True, text=True).stdout  # noqa: S603


def carried_bytes(network):
    """What a node's link has carried: received and sent."""
    stats = json.loads(on(network, "ip", "-json", "-statistics", "link", "show", "eth0"))[0]["stats64"]
    return stats["rx"]["bytes"], stats["tx"]["bytes"]


@needs_root
def test_messages_of_two_nodes_pass_their_links_and_the_machine_keeps_its_network():
    before = Path("/proc/thread-self/ns/net").readlink()
    devices = set(Path("/sys/class/net").iterdir())
    with emulated_links({"a": 1e6, "b": 2e6}) as made:
        (host, a), (other, b) = made.of("a"), made.of("b")
        assert made.of("evaluator") == made.of("") not in ((host, a), (other, b))
        with (
            closing(in_network(a, lambda: ZmqTransport(host))) as one,
            closing(in_network(b, lambda: ZmqTransport(other))) as two,
        ):
            one.connect("b", two.address)
            two.connect("a", one.address)
            sent = np.arange(50_000, dtype=np.float32)
            one.send("b", [b"a push", sent])
            received = two.receive(30.0)
            assert received.caller == "a"
            np.testing.assert_array_equal(np.frombuffer(received.frames[1], np.float32), sent)
        assert carried_bytes(a)[1] > sent.nbytes
        assert carried_bytes(b)[0] > sent.nbytes
        assert shapes(a) == [("tbf", 1e6)]
        assert shapes(b) == [("tbf", 2e6)]
        assert "tbf" not in on(made.of("")[1], "tc", "qdisc", "show", "dev", "eth0")
        assert Path("/proc/thread-self/ns/net").readlink() == before
        assert set(Path("/sys/class/net").iterdir()) == devices
    assert not Path(a).exists()


def shapes(network):
    """The kinds of queue of a node's link, with their rates in bytes per second."""
    shown = json.loads(on(network, "tc", "-json", "qdisc", "show", "dev", "eth0"))
    return [(q["kind"], float(q["options"]["rate"])) for q in shown if q["kind"] == "tbf"]


@needs_root
def test_a_link_carries_no_more_than_its_rate():
    """A bucket lets through what it holds, and then the rate: so many bytes cannot be there earlier on any host."""
    size, rate = 400_000, 2e6
    with emulated_links({"a": rate, "b": rate}) as made:
        (host, a), (other, b) = made.of("a"), made.of("b")
        with (
            closing(in_network(a, lambda: ZmqTransport(host))) as one,
            closing(in_network(b, lambda: ZmqTransport(other))) as two,
        ):
            one.connect("b", two.address)
            two.connect("a", one.address)
            one.send("b", [b"hello"])
            two.receive(30.0)
            clock = links.time.monotonic
            began = clock()
            one.send("b", [bytes(size)])
            two.receive(30.0)
            assert clock() - began >= (size - rate * links._BURST_SECONDS - links._LEAST_BURST_BYTES) / rate


def test_without_root_or_a_command_links_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", lambda name: None if name == "tc" else name)
    assert why_not() == "the command tc is missing"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"Cannot emulate links: network namespaces need root\. .* --emulate=nodes"):
        emulated_links({"a": 1e6}).__enter__()


@needs_root
def test_what_the_kernel_refuses_is_said(monkeypatch):
    monkeypatch.setattr(links, "_QUEUE_BYTES", -1)
    with pytest.raises(ValueError, match=r"Cannot emulate links: nsenter .* tc qdisc add .*--emulate=nodes"):
        emulated_links({"a": 1e6}).__enter__()


def test_an_error_in_another_network_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        in_network("", lambda: 1 / 0)
    with pytest.raises(FileNotFoundError):
        in_network("/proc/0/ns/net", lambda: 1)
