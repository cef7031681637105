"""DLRover's hot-server migration: when a server is hot, where it moves, and what is left alone."""

from dataclasses import replace

import numpy as np

from tests.support.toy import job, window
from tuners.actions import Reconfigure, Rejected, Run, ServerWindow
from tuners.baselines.rivals.dlrover_hot import dlrover_hot, hottest, moved
from tuners.settings import Choice


def cluster(*, free=True, wide=True):
    """A toy whose last node is idle and, if `wide`, has the widest interface."""
    plain = job()
    nodes = tuple(replace(n, nic_bytes_per_second=1e6) for n in plain.nodes)
    used = [n.name for n in nodes[:-1]]
    nodes = (*nodes[:-1], replace(nodes[-1], nic_bytes_per_second=4e6 if wide else 1e6))
    start = replace(plain.start, workers=tuple(used[:2]), servers=tuple(used[2:]), model_shares=(), data_shares=(), loads=())
    knobs = tuple(Choice(f"role/{n.name}", ("worker", "server", "idle")) for n in nodes) if free else ()
    space = replace(plain.space, base=start, nodes=nodes, knobs=knobs)
    return replace(plain, nodes=nodes, start=start, space=space)


def seen(of, busy):
    made = window(of, np.ones(20), workers=of.start.workers)
    servers = tuple(
        ServerWindow(s, 1e6, share * made.seconds, 1e6, share * made.seconds / 2)
        for s, share in zip(of.start.servers, busy, strict=False)
    )
    return replace(made, servers=servers, setting=of.start)


def test_a_hot_server_moves_to_the_widest_idle_machine():
    of = cluster()
    spare = of.nodes[-1].name
    tuner = dlrover_hot(of)
    assert isinstance(next(tuner), Run)
    assert isinstance(tuner.send(seen(of, (0.1, 0.79))), Run)
    asked = tuner.send(seen(of, (0.9, 0.2)))
    assert isinstance(asked, Reconfigure)
    assert asked.setting.servers == (spare, *of.start.servers[1:])
    assert "busy 90% of the time" in asked.reason


def test_a_refused_move_is_not_asked_for_again():
    of = cluster()
    tuner = dlrover_hot(of)
    next(tuner)
    tuner.send(seen(of, (0.9, 0.2)))
    tuner.throw(Rejected("no"))
    assert isinstance(tuner.send(seen(of, (0.9, 0.2))), Run)


def test_a_machine_that_is_no_wider_is_no_help():
    tuner = dlrover_hot(cluster(wide=False))
    next(tuner)
    assert isinstance(tuner.send(seen(cluster(wide=False), (0.95, 0.2))), Run)


def test_held_roles_leave_nothing_to_tune():
    assert list(dlrover_hot(cluster(free=False))) == []
    assert "roles of machines are held" in dlrover_hot.nothing_to_tune(cluster(free=False))


def test_the_threshold_is_on_the_busier_direction():
    of = cluster()
    assert hottest(seen(of, (0.9, 0.95)), 0.8) == (of.start.servers[1], 0.95)
    assert hottest(seen(of, (0.5, 0.6)), 0.8) is None
    assert hottest(replace(seen(of, ()), servers=()), 0.8) is None


def test_blocks_go_with_their_server():
    start = cluster().start
    after = moved(start, start.servers[0], "x", 4)
    assert after.servers[0] == "x"
    assert set(after.block_owners) == set(after.servers)
    assert moved(start, start.servers[0], "x", 0).block_owners == ()
