"""Links that are as fast as a scenario says, between sockets in network namespaces."""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import zmq

from harness.live.driver.system import LiveSystem
from harness.live.links import delayed_links
from harness.live.links import emulated_links as links
from harness.live.links.emulated_links import emulated_links, in_network, why_not
from harness.live.processes import launch
from harness.live.processes.actors import Endpoint
from tests.live.support.faults import process_of
from tests.live.support.ones import ONES, ManyOnes, counted
from tuners.actions import Run

_STARVED_SECONDS = 60.0
"""A busy machine may keep a process from running for seconds. Who is then taken for dead beside one that is killed loses
pushes, and says so: here, only the one that is killed shall die. Ray notices that at once, without a limit."""

FORCED_RECEIVE_BUFFER = 33  # SO_RCVBUFFORCE of Linux

needs_root = pytest.mark.skipif(bool(why_not()), reason=why_not())


def on(network, *command):
    inside = ["nsenter", f"--net={network}", *command]
    return subprocess.run(inside, check=True, capture_output=True, text=True).stdout  # noqa: S603


def carried(one, two):
    """The next message at `two`; `one` sends meanwhile what waits there."""
    until = time.monotonic() + 30.0
    while (message := two.receive(0.001)) is None:
        assert time.monotonic() < until
        one.receive(0.0)
    return message


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
            closing(Endpoint("zmq", "", host, a).open(queue.SimpleQueue())) as one,
            closing(Endpoint("zmq", "", other, b).open(queue.SimpleQueue())) as two,
        ):
            one.connect("b", two.address)
            two.connect("a", one.address)
            sent = np.arange(50_000, dtype=np.float32)
            one.send("b", [b"a push", sent.data])
            received = carried(one, two)
            np.testing.assert_array_equal(np.frombuffer(received.frames[1], np.float32), sent)
        assert carried_bytes(a)[1] > sent.nbytes
        assert carried_bytes(b)[0] > sent.nbytes
        # `tc` counts the 66 bytes of headers that each packet of 1448 bytes has.
        assert shapes(a) == [("tbf", pytest.approx(1e6 * 1514 / 1448))]
        assert shapes(b) == [("tbf", pytest.approx(2e6 * 1514 / 1448))]
        assert "tbf" not in on(made.of("")[1], "tc", "qdisc", "show", "dev", "eth0")
        assert Path("/proc/thread-self/ns/net").readlink() == before
        assert set(Path("/sys/class/net").iterdir()) == devices
    assert not Path(a).exists()


@needs_root
def test_messages_over_a_delayed_link_take_so_much_longer_each_way():
    with (
        emulated_links({"a": 1e8, "b": 1e8, "c": 1e8}, {"a": 0.05, "b": 0.03}) as made,
        closing(in_network(made.of("a")[1], lambda: socket.create_server((made.of("a")[0], 0)))) as server,
    ):

        def seconds_from(node):
            begun = time.monotonic()
            line = in_network(made.of(node)[1], lambda: socket.create_connection(server.getsockname()))
            with line, server.accept()[0] as other:
                took = time.monotonic() - begun
                sending = threading.Thread(target=line.sendall, args=(bytes(range(256)) * 4096,))
                sending.start()
                received = b""
                while len(received) < 256 * 4096:
                    received += other.recv(1 << 16)
                sending.join()
            assert received == bytes(range(256)) * 4096  # in order, and whole
            return took

        assert seconds_from("c") >= 2 * 0.05  # there and back
        assert seconds_from("b") >= 2 * (0.05 + 0.03)
        assert min(seconds_from("a") for _ in range(20)) < 0.05  # to itself


@needs_root
def test_a_delayed_link_has_as_long_a_queue_as_others():
    """Frames waited in the buffer of the program's socket, of 200 kB: those beyond it were lost, in place of 1 MB."""
    frames, size, big = 300, 1_400, 1 << 22
    with emulated_links({"a": 2e6, "b": 1e9}, {"a": 0.02}) as made:
        host, network = made.of("a")
        with in_network(network, udp) as end, in_network(made.of("b")[1], udp) as other:
            end.bind((host, 0))
            end.settimeout(10.0)
            end.setsockopt(socket.SOL_SOCKET, FORCED_RECEIVE_BUFFER, big)
            other.sendto(b"", end.getsockname())  # who has the address is asked for once
            end.recv(size)
            for _ in range(frames):
                other.sendto(bytes(size), end.getsockname())
            assert sum(len(end.recv(size)) for _ in range(frames)) == frames * size


def udp():
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


@needs_root
def test_only_in_a_network_of_the_jobs_own_are_keys_left_out():
    """There, who reaches the socket is heard; elsewhere nobody is who has no key, whatever he speaks."""
    with emulated_links({"a": 1e6}) as made:
        for host, network in (made.of("a"), ("127.0.0.1", "")):
            with closing(Endpoint("tcp", "", host, network).open(queue.SimpleQueue())) as end:
                place = urlsplit(end.address)
                stranger = in_network(network, lambda at=place: socket.create_connection((at.hostname, at.port)))
                with stranger, zmq.Context() as context:
                    stranger.sendall(b"\1\0\0\0" + (6).to_bytes(8, "little") + b"a push")
                    assert (end.receive(10.0 if network else 0.3) is not None) == bool(network)
                    speaks_zeromq = in_network(network, lambda of=context: of.socket(zmq.PUSH))
                    speaks_zeromq.setsockopt(zmq.LINGER, 0)
                    in_network(network, lambda of=speaks_zeromq, at=place: of.connect(f"tcp://{at.netloc}"))
                    speaks_zeromq.send(b"a push")
                    if not network:
                        assert end.receive(0.3) is None
                    speaks_zeromq.close()


def shapes(network):
    """The kinds of queue of a node's link, with their rates in bytes per second."""
    shown = json.loads(on(network, "tc", "-json", "qdisc", "show", "dev", "eth0"))
    return [(q["kind"], float(q["options"]["rate"])) for q in shown if q["kind"] == "tbf"]


@needs_root
@pytest.mark.parametrize(("size", "rate"), [(400_000, 2e6), (76_840, 8e6)])
def test_a_link_carries_no_more_than_its_rate(size, rate):
    """A bucket lets through what it holds, and then the rate: so many bytes cannot be there earlier on any host. What it
    holds must be little of a push, or a push would take less time than the rate says."""
    with emulated_links({"a": rate, "b": rate}) as made:
        (host, a), (other, b) = made.of("a"), made.of("b")
        with (
            closing(Endpoint("zmq", "", host, a).open(queue.SimpleQueue())) as one,
            closing(Endpoint("zmq", "", other, b).open(queue.SimpleQueue())) as two,
        ):
            one.connect("b", two.address)
            two.connect("a", one.address)
            one.send("b", [b"hello"])
            carried(one, two)
            took = []
            for _ in range(5):
                began = time.monotonic()
                one.send("b", [bytes(size)])
                carried(one, two)
                took.append(time.monotonic() - began)
                time.sleep(size / rate)  # the bucket fills again
            assert min(took) >= 0.9 * size / rate


@needs_root
@pytest.mark.live
@pytest.mark.timeout(240)
def test_processes_behind_links_die_and_every_push_counts_once():
    """The next process of a name is reached at its new address, and the coordinator at its old one."""
    spec, rates = ManyOnes("ones", "ones.toml", ONES, 0), dict.fromkeys(("n0", "n1", "n2", "n3"), 20e6)
    with launch.cluster(None) as offers:
        placement = launch.place_nodes(spec.job.nodes, offers)
        with (
            launch.launch(placement, spec, rates=rates, silent_seconds=_STARVED_SECONDS) as processes,
            LiveSystem(spec, processes) as live,
        ):
            live.perform(Run(clocks=30))
            for name in ("server/n2", "coordinator", "worker/n0"):
                before, _, _ = counted(live)
                os.kill(process_of(name), signal.SIGKILL)
                live.perform(Run(clocks=30))
                clocks, lost, parameters = counted(live)
                assert (clocks > before, lost, set(parameters)) == (True, 0, {clocks})


@needs_root
def test_nothing_is_left_of_a_driver_that_is_killed():
    program = "from harness.live.links.emulated_links import *\n"
    program += (
        "with emulated_links({'a': 1e6}) as made:\n    print(made.of('a')[1], made.of('')[1], flush=True)\n    input()"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    networks = [Path(text) for text in driver.stdout.readline().split()]
    assert len(networks) == 2
    assert all(network.exists() for network in networks)
    driver.kill()
    driver.communicate()
    while any(network.exists() for network in networks):  # pytest's limit ends this if it must
        time.sleep(0.01)


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_links_outlive_a_signal_to_all_processes(number):
    """A job that is stopped by it still makes its last checkpoint."""
    with emulated_links({"a": 1e6}) as made:
        networks = [Path(made.of(node)[1]) for node in ("a", "")]
        for network in networks:
            os.kill(int(network.parts[2]), number)
        time.sleep(0.2)
        assert all(network.exists() for network in networks)
    assert not any(network.exists() for network in networks)


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


@needs_root
def test_a_process_that_may_not_make_a_network_is_refused_with_the_reason(monkeypatch, tmp_path):
    """As root in a container mostly is not: `unshare` has ended by then. It was an error of a missing file."""
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ValueError, match=r"Cannot emulate links: this process may not make network namespaces\."):
        emulated_links({"a": 1e6}).__enter__()


@needs_root
def test_why_links_cannot_be_delayed_is_said(monkeypatch, tmp_path):
    others = shutil.which("nsenter")
    program = f'#!/bin/sh\ncase "$*" in *delayed_links*) echo "so it is";; *) exec {others} "$@";; esac\n'
    (tmp_path / "nsenter").write_text(program)
    (tmp_path / "nsenter").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ValueError, match=r"Cannot emulate delays of links: so it is\. Use --emulate=nodes\."):
        emulated_links({"a": 1e6}, {"a": 0.01}).__enter__()


def test_a_program_that_cannot_delay_says_why():
    """No device has this name; without root, no frame may be read at all."""
    command = [sys.executable, delayed_links.__file__, "no device", "no device", "0.1"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    assert (ended.stdout.partition("(")[0], ended.stderr) == ("this process may not read frames ", "")


def test_an_error_in_another_network_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        in_network("", lambda: 1 / 0)
    with pytest.raises(FileNotFoundError):
        in_network("/proc/0/ns/net", lambda: 1)
