"""Hot blocks of embedding tables on several servers: who holds them, what they send, and that each push counts once."""

from dataclasses import replace

import jax
import msgspec
import numpy as np
import pytest

from simulators.branch_costs import copy_bytes
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import NodeChange
from simulators.engine.embedding import hottest_blocks
from simulators.jobs import check_memory, drawn
from simulators.reconfiguration.shares import copies_of_blocks
from tests.simulators.engine.test_embedding import BLOCKS, DEMAND, PROXY, ROW_BYTES, ROWS, START, distinct, made, workload
from tests.simulators.reconfiguration.test_block_moves import assert_all_pushes_are_in_the_model, ones
from tests.support.small_jobs import NAMES, assert_same_bytes, branch, machine, together
from traces.schema import setting_from, setting_text
from tuners.actions import Fork, Reconfigure, Rejected, Run
from tuners.settings import Choice, Integer

FREE = (
    Integer("replicas", 1, 3),
    Integer("hot_blocks", 0, BLOCKS),
    *(Choice(f"block/{i}", NAMES) for i in range(BLOCKS)),
    *(Choice(f"role/{n}", ("worker", "server", "idle")) for n in NAMES),
)
OWNERS = START.owners(BLOCKS)  # d d d e e e e
HOTTEST = hottest_blocks(np.asarray(PROXY.train[0]), ROWS, BLOCKS)
BOTH = replace(START, replicas=2, hot_blocks=2)


def job(setting=START, **changed):
    return made(setting, knobs=FREE, **changed)


# -------------------------------------------------------------------------------------------------------------- who holds


def test_the_hottest_blocks_are_those_with_most_look_ups_ties_in_order():
    assert hottest_blocks(np.array([[0, 7], [7, 6], [3, 5]]), 8, 4) == (3, 0, 1, 2)
    counts = np.bincount(np.asarray(PROXY.train[0]).ravel() // 16, minlength=BLOCKS)
    assert [counts[b] for b in HOTTEST] == sorted(counts, reverse=True)
    assert job().job.hottest == HOTTEST
    assert made().job.hottest == ()  # nobody can replicate: nobody needs to know


def test_copies_are_on_the_servers_after_the_owner_in_a_ring():
    setting = replace(START, workers=NAMES[:2], servers=("c", "d", "e"), block_owners=("c", "d", "e", "e", "d", "c", "c"))
    found = replace(setting, replicas=2, hot_blocks=3).holders(BLOCKS, (2, 0, 1, 3, 4, 5, 6))
    assert found == (("c", "d"), ("d", "e"), ("e", "c"), ("e",), ("d",), ("c",), ("c",))
    assert setting.holders(BLOCKS, HOTTEST) == tuple((o,) for o in setting.block_owners)
    assert BOTH.held(BLOCKS, (0, 6)) == pytest.approx({"d": 3 / 7 - 3 / 7 + 0.5 + 1 / 7, "e": 0.5 + 1 / 7})
    assert START.held(BLOCKS, HOTTEST) == {"d": 0.5, "e": 0.5}


def test_memory_holds_the_copies_as_well():
    spec = job(BOTH)
    small = [replace(n, memory_bytes=0.6 * spec.job.branch_bytes) for n in spec.job.nodes]
    told = replace(spec.job, nodes=tuple(small))
    check_memory(told, [START])
    with pytest.raises(Rejected, match="Cannot hold one branch more: d would keep"):
        check_memory(told, [replace(BOTH, hot_blocks=BLOCKS)])


def test_only_servers_without_a_copy_get_one():
    old = (("d",), ("d", "e"), ("e",), ("e", "d"))
    new = (("d", "e"), ("e", "d"), ("d", "e"), ("e",))
    assert copies_of_blocks(old, new) == [("d", "e", (0,))]


# -------------------------------------------------------------------------------------------------------- bytes and times


@pytest.mark.parametrize("free", [FREE, FREE[2:]])
def test_one_server_for_each_block_is_a_job_without_the_knobs(free):
    for setting in (START, replace(START, hot_blocks=5), replace(START, replicas=2)):
        if free is FREE or setting is START:
            one, other = made(setting, knobs=free), made()
            assert_same_bytes(one.perform(Run(clocks=30)).pushes, other.perform(Run(clocks=30)).pushes)
            for a, b in zip(*(jax.tree.leaves(branch(s).learned.parameters) for s in (one, other)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_holders_share_pulls_and_each_of_them_gets_all_pushes():
    window = job(BOTH).perform(Run(clocks=30))
    rows, chains = np.array(window.blocks), BOTH.holders(BLOCKS, HOTTEST)
    for server in window.servers:
        sent = sum(r / len(c) for r, c in zip(rows, chains, strict=True) if server.node in c)
        passed_on = sum(r for r, c in zip(rows, chains, strict=True) if server.node in c[:-1])
        got = sum(r for r, c in zip(rows, chains, strict=True) if server.node in c)
        assert server.pull_bytes == pytest.approx(ROW_BYTES * (sent + passed_on))
        assert server.push_bytes == pytest.approx(ROW_BYTES * got)
        assert server.pull_seconds == pytest.approx(ROW_BYTES * (sent + passed_on) / 100.0)
        assert server.push_seconds == pytest.approx(ROW_BYTES * got / 100.0 + 0.01 * got)


@pytest.mark.parametrize("hot", [1, 2, BLOCKS])
def test_a_single_worker_by_hand(hot):
    """Slow servers: a pull ends with the server that sends most, a push with the link that carries most of its chains."""
    machines = Cluster(tuple((n, machine(nic)) for n, nic in zip(NAMES, (100.0, 100.0, 100.0, 5.0, 5.0), strict=True)))
    setting = replace(START, workers=NAMES[:1], replicas=2, hot_blocks=hot)
    pushes = job(setting, cluster=machines, jitter=0.0).perform(Run(clocks=4)).pushes
    keys, chains = np.asarray(drawn(workload(), 3)[0].train[0]), setting.holders(BLOCKS, HOTTEST)
    for clock in range(4):
        rows = np.bincount(np.unique(keys[clock * 8 + np.arange(8)]) // 16, minlength=BLOCKS)
        sent, out, into = (dict.fromkeys(NAMES, 0.0) for _ in range(3))
        for count, chain in zip(rows, chains, strict=True):
            for place, server in enumerate(chain):
                sent[server] += count / len(chain)
                into[server] += count
                out[server] += count if place + 1 < len(chain) else 0.0
        assert pushes.pull_seconds[clock] == pytest.approx(ROW_BYTES * max(sent.values()) / 5.0)
        busiest = max(*out.values(), *into.values())
        assert pushes.push_seconds[clock] == pytest.approx(ROW_BYTES * busiest / 5.0 + 0.01 * max(into.values()))


@pytest.mark.parametrize(("push_bytes", "pays"), [(ROW_BYTES * ROWS / 16, True), (None, False)])
def test_copies_pay_where_pushes_are_much_smaller_than_pulls(push_bytes, pays):
    """All blocks on one of two servers. A push loads all holders: with copies, pulls have to be what is long."""
    demand = msgspec.structs.replace(DEMAND, push_bytes=push_bytes, apply_seconds=0.0)
    machines = Cluster(tuple((n, machine(nic)) for n, nic in zip(NAMES, (100.0, 100.0, 100.0, 20.0, 20.0), strict=True)))
    setting = replace(START, block_owners=("d",) * BLOCKS)
    one, two = (
        job(s, job=workload(demand=demand), cluster=machines, jitter=0.0).perform(Run(clocks=60)).end_seconds
        for s in (setting, replace(setting, replicas=2, hot_blocks=BLOCKS))
    )
    assert (two < 0.8 * one) if pays else (two > one)


# -------------------------------------------------------------------------------------------------------------- exactness


def test_copies_are_made_while_training_goes_on_and_cost_their_bytes():
    simulated = job()
    simulated.perform(Run(clocks=5))
    hot = HOTTEST[:2]
    cost = simulated.perform(Reconfigure(BOTH, method="migrate"))
    chains = BOTH.holders(BLOCKS, HOTTEST)
    assert sum(int(step.split()[1]) for step in cost.steps) == 2
    assert {step.split()[0] for step in cost.steps} == {"copy"}
    assert all(f"{chains[b][0]} -> {chains[b][1]}" in " ".join(cost.steps) for b in hot)
    assert cost.bytes_moved == pytest.approx(2 * ROW_BYTES * ROWS / BLOCKS)
    assert (cost.stall_seconds, cost.done) == (0.0, True)
    assert simulated.perform(Run(clocks=1)).setting == BOTH
    dropped = simulated.perform(Reconfigure(START, method="migrate"))
    assert (dropped.seconds, dropped.steps) == (0.0, ())  # a copy is forgotten without a step


def test_a_server_that_has_a_copy_owns_the_block_at_once():
    held = replace(START, replicas=2, hot_blocks=BLOCKS)
    simulated = job(held)
    simulated.perform(Run(clocks=5))
    swapped = tuple("e" if o == "d" else "d" for o in OWNERS)
    cost = simulated.perform(Reconfigure(replace(held, block_owners=swapped), method="migrate"))
    assert (cost.seconds, cost.steps) == (0.0, ())
    one = simulated.perform(Reconfigure(replace(START, block_owners=swapped), method="migrate"))
    assert (one.seconds, one.steps) == (0.0, ())


@pytest.mark.parametrize("method", ["migrate", "checkpoint"])
def test_no_row_of_a_push_is_lost_or_counted_twice_by_copies(method):
    simulated = job(replace(START, learning_rate=1.0), job=workload(proxy=ones()))
    windows = [simulated.perform(Run(clocks=7))]
    settings = (
        {"replicas": 2, "hot_blocks": 3},
        {"replicas": 2, "hot_blocks": BLOCKS, "block_owners": ("e",) * BLOCKS},
        {"workers": NAMES[:2], "servers": ("c", "d", "e"), "replicas": 3, "hot_blocks": 4},
        {"block_owners": OWNERS},
    )
    for changed in settings:
        simulated.perform(Reconfigure(replace(simulated.job.start, **changed), method=method, wait=False))
        windows.append(simulated.perform(Run(seconds=40.0)))
        assert not windows[-1].changes or windows[-1].changes[0].done
    # Workers differ from setting to setting, and with them the samples of their mini-batches: the bias counts pushes.
    clock, learned = branch(simulated)[:2]
    assert int(clock.pushes) == int(clock.version) == len(together(windows).worker) == float(learned.parameters["bias"])


def test_no_row_is_lost_where_only_copies_change():
    simulated = job(replace(START, learning_rate=1.0), job=workload(proxy=ones()))
    windows = [simulated.perform(Run(clocks=7))]
    for replicas, hot in ((2, 3), (2, BLOCKS), (1, 0), (2, 1)):
        setting = replace(simulated.job.start, replicas=replicas, hot_blocks=hot)
        simulated.perform(Reconfigure(setting, method="migrate", wait=False))
        windows.append(simulated.perform(Run(seconds=15.0)))
    assert_all_pushes_are_in_the_model(simulated, together(windows))


def test_windows_change_nothing_while_blocks_are_copied():
    whole, cut = job(), job()
    for simulated in (whole, cut):
        simulated.perform(Run(clocks=3))
        simulated.perform(Reconfigure(replace(BOTH, block_owners=("e",) * BLOCKS), method="migrate", wait=False))
    seen = whole.perform(Run(clocks=40))
    parts = [cut.perform(Run(clocks=1)) for _ in range(40)]
    assert_same_bytes(seen.pushes, together(parts))
    assert sum(np.array(p.blocks) for p in parts).tolist() == list(seen.blocks)
    for j, server in enumerate(seen.servers):
        assert server.pull_bytes == pytest.approx(sum(p.servers[j].pull_bytes for p in parts))
        assert server.push_bytes == pytest.approx(sum(p.servers[j].push_bytes for p in parts))


def test_rows_are_counted_once_however_many_servers_hold_them():
    window = job(replace(START, replicas=2, hot_blocks=BLOCKS)).perform(Run(clocks=20))
    np.testing.assert_array_equal(window.blocks, distinct(3, window.pushes).sum(axis=0))


def test_a_fork_copies_at_the_server_that_holds_most():
    simulated = job(replace(START, replicas=2, hot_blocks=BLOCKS))
    simulated.perform(Fork())
    assert copy_bytes(simulated.branches[0]) == pytest.approx(simulated.job.branch_bytes, rel=0.1)


def test_survivors_hold_as_many_copies_as_there_are_servers():
    start = replace(START, workers=NAMES[:2], servers=("c", "d", "e"), replicas=3, hot_blocks=4)
    lost = NodeChange(nodes=("d",), seconds=5.0, event="fails")
    window = job(start, jitter=0.0, nodes=(lost,)).perform(Run(seconds=60.0))
    assert (window.setting.servers, window.setting.replicas) == (("c", "e"), 2)
    assert window.status == "running"


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"replicas": 3}, "Cannot hold each hot block on 3 servers: there are 2; lower replicas"),
        ({"replicas": 0}, "Cannot set replicas to 0: it must be at least 1"),
        ({"hot_blocks": BLOCKS + 1}, f"Cannot replicate {BLOCKS + 1} hot blocks: this job has {BLOCKS}"),
        ({"hot_blocks": -1}, "Cannot set hot_blocks to -1"),
    ],
)
def test_copies_that_make_no_sense_are_refused(changed, reason):
    with pytest.raises(Rejected, match=reason):
        job().perform(Reconfigure(replace(START, **changed)))


def test_settings_without_copies_are_written_as_before():
    assert "replicas" not in setting_text(START)
    assert setting_from(setting_text(BOTH)) == BOTH
