"""Reconfigurations in simulated time: training continues, no update is lost, nodes come and go, costs are as stated."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, NodeChange
from simulators.reconfiguration.costs import Costs
from simulators.workloads.workload import Demand
from tests.simulators.test_simulated_system import COUNTER, counted
from tests.support.marks import examples, slow
from tests.support.small_jobs import (
    KNOBS,
    NAMES,
    assert_same_bytes,
    branch,
    cluster,
    job,
    learning,
    machine,
    start,
    system,
    together,
)
from tuners.actions import Fork, Free, Install, Reconfigure, Rejected, Run, Setting, Target
from tuners.knobs import Choice, Integer, Real
from tuners.policies import ssp

METHODS = ("checkpoint", "migrate", "relocate")
COSTS = Costs(
    restart_seconds=3.0,
    checkpoint_bytes_per_second=50.0,
    restore_bytes_per_second=25.0,
    add_seconds=1.0,
    delete_seconds=1.5,
    switch_seconds=0.5,
    start_seconds=0.25,
    handshake_seconds=0.125,
    data_bytes_per_second=20.0,
    model_bytes_per_second=10.0,
    model_blocks=20,
    graph_seconds=2.0,
    sweep_bytes_per_second=8.0,
    detection_seconds=4.0,
    fork_bytes_per_second=200.0,
)
STORED = Demand(model_bytes=100.0, sample_seconds=0.25, apply_seconds=0.05, sample_bytes=1.0, touched_fraction=0.25)


def counting(conditions=None, setting=None, seed=1, **changed):
    """Five nodes that learn to count: every update adds one."""
    workload = replace(job(STORED), proxy=COUNTER, samples=64, batch_size=4)
    rules = {"knobs": KNOBS, "costs": COSTS} | changed
    return system(cluster(), workload, setting or start(learning_rate=0.5), conditions or Conditions(), seed, **rules)


def timed(conditions=None, setting=None, **changed):
    """The same cluster, timing only and without noise."""
    workload = replace(job(STORED), samples=64, batch_size=4)
    rules = {"knobs": KNOBS, "costs": COSTS} | changed
    return system(cluster(), workload, setting or start(), conditions or Conditions(jitter=0.0), 0, **rules)


# -------------------------------------------------------------------------------------------------- nothing is lost


def comings_and_goings(rng):
    """Three of the nodes fail, leave or stay; some come back."""
    found = []
    for node in rng.choice(NAMES, 3, replace=False):
        kind, at = rng.choice(["stays", "fails", "leaves"], p=[0.5, 0.25, 0.25]), float(rng.uniform(5, 120))
        if kind == "stays":
            continue
        notice = float(rng.uniform(0, 20)) if kind == "leaves" else 0.0
        found.append(NodeChange((str(node),), at, str(kind), notice))
        if rng.random() < 0.7:
            found.append(NodeChange((str(node),), at + notice + float(rng.uniform(1, 40)), "joins"))
    return tuple(found)


@pytest.mark.slow
@examples(6)
@given(st.integers(0, 2**32 - 1), st.sampled_from(METHODS), st.sampled_from(["asp", "bsp", "ssp"]))
def test_with_updates_of_one_the_model_is_the_number_of_pushes(seed, method, policy):
    """Settings at random by every method, waited for or not, while nodes fail, leave and come back."""
    rng = np.random.default_rng(seed)
    first = start(learning_rate=0.5, policy=policy, staleness=1)
    simulated = counting(Conditions(nodes=comings_and_goings(rng)), first, seed=seed % 1000)
    told, asked, done = 0, 0, 0
    for _ in range(12):
        values = simulated.job.space.sample(rng) | {"policy": policy, "staleness": 1}
        try:
            cost = simulated.perform(
                Reconfigure(simulated.job.space.setting(values), method=method, wait=bool(rng.random() < 0.7))
            )
            asked += 1
            assert cost.seconds >= cost.stall_seconds >= 0
        except Rejected:
            pass
        try:
            seen = simulated.perform(Run(seconds=float(rng.uniform(1, 15))))
        except Rejected:
            break
        told += seen.clocks
        done += sum(c.done for c in seen.changes)
        assert counted(simulated, 0) == int(branch(simulated).clock.pushes) == told
        assert list(seen.pushes.seconds) == sorted(seen.pushes.seconds)
        assert {n.name for n in seen.nodes} >= set(seen.setting.workers) & {n.name for n in seen.nodes}
    assert told > 0


# --------------------------------------------------------------------------------------------- training goes on


def test_by_migration_and_relocation_training_continues_and_by_checkpoint_it_stalls():
    new = start(workers=("a", "b", "c", "d"), servers=("e",))
    for method in METHODS:
        simulated = timed()
        simulated.perform(Run(seconds=30.0))
        begun = simulated.now
        cost = simulated.perform(Reconfigure(new, method=method))
        assert simulated.now - begun == cost.seconds == pytest.approx(cost.stall_seconds + cost.slow_seconds)
        during = simulated.perform(Run(seconds=30.0))
        pushed = np.sum(during.pushes.seconds <= begun + cost.seconds)
        assert (pushed == 0) == (method == "checkpoint")
        assert (cost.stall_seconds > 0) == (method == "checkpoint")
        assert during.start_seconds == pytest.approx(begun + (cost.seconds if method == "checkpoint" else 0.0))
        assert during.setting == new
        assert set(during.pushes.worker[-20:]) == {0, 1, 2, 3}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [("a", "b", "c", "d"), ("a", "b", "d")], ids=["added", "exchanged"])
def test_a_worker_that_joins_has_not_waited_since_the_job_began(method, workers):
    """Under ASP nobody waits for others. d begins with the last step of a migration."""
    simulated = timed()
    simulated.perform(Run(seconds=30.0))
    simulated.perform(Reconfigure(start(workers=workers, servers=("e",)), method=method))
    seen = simulated.perform(Run(seconds=30.0)).pushes
    assert np.any(seen.worker == 3)
    np.testing.assert_array_equal(seen.wait_seconds, 0.0)


def test_a_migration_stalls_while_all_old_workers_have_stopped_and_no_new_one_has_started():
    """All training data is on its way from the only worker to its successors: nobody trains, whatever the method."""
    simulated = timed(setting=start(workers=("a",), servers=("d", "e")))
    simulated.perform(Run(seconds=10.0))
    cost = simulated.perform(Reconfigure(start(workers=("b", "c"), servers=("d", "e")), method="migrate"))
    handshake_and_data = COSTS.handshake_seconds + 64.0 / COSTS.data_bytes_per_second
    assert cost.stall_seconds == pytest.approx(handshake_and_data + COSTS.start_seconds)
    assert cost.slow_seconds == pytest.approx(cost.seconds - cost.stall_seconds)
    last, first, *_ = simulated.perform(Run(clocks=2)).pushes.seconds
    assert first - last > cost.stall_seconds


def test_a_budget_that_ends_while_nobody_trains_is_no_deadlock():
    simulated = timed(setting=start(workers=("a",), servers=("d", "e")), budget_seconds=15.0)
    simulated.perform(Run(seconds=10.0))
    cost = simulated.perform(Reconfigure(start(workers=("b", "c"), servers=("d", "e")), method="migrate"))
    assert not cost.done
    told = simulated.perform(Run(clocks=1))
    assert (told.status, simulated.status) == ("running", "running")


def test_a_migration_takes_what_its_slowest_chain_of_steps_takes():
    """(a, b, c; d, e) to (a, b, c, d; e): d gives its 10 model blocks to e, after one handshake, and gets data."""
    simulated = timed()
    simulated.perform(Run(seconds=30.0))
    cost = simulated.perform(Reconfigure(start(workers=("a", "b", "c", "d"), servers=("e",)), method="migrate"))
    model = 0.125 + 10 * 5.0 / 10.0  # 5 bytes a block at what a server can send
    switch, begin = 0.5, 0.25
    # 16 blocks of data of 4 bytes; a has 6, b and c 5; 4 each in the end: 2, 1 and 1 go to d.
    data = 0.125 + 2 * 4.0 / 20.0
    assert cost.seconds == pytest.approx(max(model, switch + data) + begin)
    assert cost.bytes_moved == pytest.approx(50.0 + 16.0)
    assert sorted(cost.steps) == sorted(
        [
            "switch d",
            "move 10 model blocks d -> e",
            "move 2 data blocks a -> d",
            "move 1 data block b -> d",
            "move 1 data block c -> d",
            "start d",
        ]
    )
    assert cost.steps[0] == "switch d"
    assert cost.steps[-1] == "start d"


@pytest.mark.parametrize("independent", [False, True], ids=["all flows end together", "each by itself"])
@pytest.mark.parametrize("begun", [0.0, 3.0])
def test_blocks_share_a_nic_with_training(begun, independent):
    """Where the NIC is narrower than what a sender can put out, a stream gets half of it, and training the rest.

    What a worker has pulled before the change it pulled at its full rate.
    """
    fast = replace_costs(model_bytes_per_second=1e9, handshake_seconds=0.0, delete_seconds=0.0)
    large = replace(job(Demand(model_bytes=1000.0, sample_seconds=0.25)), samples=64, batch_size=4)
    machines, steady = cluster(independent_flows=independent), Conditions(jitter=0.0)
    simulated = system(machines, large, start(workers=("a",)), steady, knobs=KNOBS, costs=fast)
    simulated.perform(Run(clocks=3))  # the next pull begins
    if begun:
        simulated.perform(Run(seconds=begun))
    cost = simulated.perform(Reconfigure(start(workers=("a",), servers=("e",)), method="migrate"))
    d, e = 100.0 - 7 * 3, 100.0 - 7 * 4  # their NICs
    assert cost.seconds == pytest.approx(500.0 / (e / 2))
    wave, slow = 200.0 / (e / 2), d - e / 2
    if independent:
        # d serves from what the stream leaves it, and e fills the rest of a's NIC. After the first wave, 0.3 of what is left
        # is d's; when that is done, e serves as fast as it can.
        left = 1000.0 - 100.0 * (begun + wave)
        both = 0.3 * left / slow
        rest = both + (0.7 * left - both * (100.0 - slow)) / e
    else:
        # d serves half of the model from what the stream leaves it; from the second wave on a's own NIC is the limit.
        rest = (1000.0 - 100.0 * begun - wave * 2 * slow) / 100.0
    pulled = simulated.perform(Run(clocks=1)).pushes.pull_seconds[0]
    assert pulled == pytest.approx(begun + wave + rest)


def replace_costs(**changed):
    return Costs(**({f: getattr(COSTS, f) for f in COSTS.__struct_fields__} | changed))


@pytest.mark.parametrize("touched", [0.0, 1.0])
def test_relocated_parameters_move_with_pushes_or_are_swept(touched):
    """A dense model is over with the first push of what was pulled after the switch; one without pushes is swept."""
    demand = Demand(model_bytes=100.0, sample_seconds=0.25, apply_seconds=0.05, touched_fraction=touched)
    workload, slow = replace(job(demand), samples=64, batch_size=4), replace_costs(sweep_bytes_per_second=2.0)
    simulated = system(cluster(), workload, start(), Conditions(jitter=0.0), knobs=KNOBS, costs=slow)
    simulated.perform(Run(seconds=30.0))
    cost = simulated.perform(Reconfigure(start(servers=("e",)), method="relocate"))
    assert cost.stall_seconds == 0
    swept = COSTS.graph_seconds + 50.0 / 2.0 + COSTS.delete_seconds
    if touched == 0.0:
        assert cost.seconds == pytest.approx(swept)
    else:
        pushes = simulated.perform(Run(seconds=30.0)).pushes
        switch, ended = 30.0 + COSTS.graph_seconds, 30.0 + cost.seconds - COSTS.delete_seconds
        counts = np.bincount(pushes.worker[(pushes.seconds > switch) & (pushes.seconds <= ended)], minlength=3)
        assert cost.seconds < swept
        assert max(counts) == 2  # a worker's second push since the switch ended it
        assert pushes.seconds[pushes.seconds <= ended + 1e-9][-1] == pytest.approx(ended)


def test_only_threads_change_in_place_by_relocation_and_restart_by_checkpoint():
    for method, stall, seconds in (("checkpoint", 3.0, 3.0), ("relocate", 0.0, 2.0), ("migrate", 0.0, 2.0)):
        simulated = timed()
        simulated.perform(Run(seconds=10.0))
        cost = simulated.perform(Reconfigure(start(intra_threads=1), method=method))
        assert (cost.stall_seconds, cost.seconds) == pytest.approx((stall, seconds))


def test_a_barrier_is_held_and_left_while_workers_come_and_go():
    simulated = timed(setting=start(policy="bsp"))
    simulated.perform(Run(seconds=30.0))
    simulated.perform(Reconfigure(start(workers=("a", "d", "e"), servers=("b", "c"), policy="bsp"), method="migrate"))
    after = [simulated.perform(Run(seconds=20.0)) for _ in range(2)][-1]
    counts = np.bincount(after.pushes.worker, minlength=5)
    assert counts[1] == counts[2] == 0
    assert max(counts[[0, 3, 4]]) - min(counts[[0, 3, 4]]) <= 1


@pytest.mark.parametrize("method", [slow("checkpoint"), "migrate", slow("relocate")])
def test_cutting_a_run_into_windows_changes_nothing_during_a_change(method):
    new = start(workers=("a", "c", "d", "e"), servers=("b",), policy="ssp", staleness=2)
    whole, cut = (learning(costs=COSTS, demand=STORED) for _ in range(2))
    windows = []
    for simulated in (whole, cut):
        simulated.perform(Run(seconds=20.0))
        assert simulated.perform(Reconfigure(new, method=method, wait=False)).seconds == 0
    one = whole.perform(Run(seconds=60.0))
    while cut.now < one.end_seconds:
        windows.append(cut.perform(Run(seconds=min(0.7, one.end_seconds - cut.now))))
    assert_same_bytes(one.pushes, together(windows))
    assert [c for w in windows for c in w.changes] == list(one.changes)
    assert len(one.changes) == 1
    assert windows[0].setting != new or method == "relocate"
    assert windows[-1].setting == one.setting == new


# ------------------------------------------------------------------------------------------------------- refusals


def test_during_a_reconfiguration_another_is_refused_and_the_job_continues():
    simulated = timed()
    simulated.perform(Run(seconds=20.0))
    child = simulated.perform(Fork(0))
    simulated.perform(Reconfigure(start(servers=("e",)), method="migrate", wait=False))
    for action in (
        Reconfigure(start(batch_size=4)),
        Install(ssp(1)),
        Fork(0),
        Free(0),
        Run(clocks=5, branch=child),
    ):
        with pytest.raises(Rejected, match=r"under way|being reconfigured"):
            simulated.perform(action)
    seen = simulated.perform(Run(seconds=30.0))
    assert seen.clocks > 5
    assert [c.done for c in seen.changes] == [True]
    assert simulated.perform(Reconfigure(start(servers=("e",), batch_size=4))).seconds == 0
    assert simulated.perform(Run(clocks=5, branch=child)).clocks == 5


# ------------------------------------------------------------------------------------------------------- come and go


def events(window):
    return [(e.node, e.event) for e in window.events]


def test_windows_report_nodes_that_come_and_go_and_absent_ones_cannot_be_used():
    comings = (NodeChange(("e",), 30.0, "joins"), NodeChange(("e",), 60.0, "leaves", notice_seconds=20.0))
    simulated = timed(Conditions(jitter=0.0, nodes=comings), start(servers=("d",)))
    first = simulated.perform(Run(seconds=20.0))
    assert [n.name for n in first.nodes] == ["a", "b", "c", "d"]
    with pytest.raises(Rejected, match="'e': it is not there"):
        simulated.perform(Reconfigure(start(servers=("d", "e"))))
    joined = simulated.perform(Run(seconds=20.0))
    assert (events(joined), len(joined.nodes)) == ([("e", "joined")], 5)
    simulated.perform(Reconfigure(start(), method="migrate"))
    leaving = simulated.perform(Run(seconds=25.0))
    assert (events(leaving), len(leaving.nodes)) == ([("e", "leaving")], 4)
    with pytest.raises(Rejected, match="about to leave"):
        simulated.perform(Reconfigure(start(workers=("a", "b"), servers=("c", "e")), method="migrate"))
    cost = simulated.perform(Reconfigure(start(servers=("d",)), method="migrate"))
    assert cost.seconds < 15
    left = simulated.perform(Run(seconds=20.0))
    assert (events(left), left.changes, left.setting) == ([("e", "left")], (), start(servers=("d",)))


def test_a_lost_worker_is_dropped_while_the_others_continue():
    simulated = counting(Conditions(nodes=(NodeChange(("b",), 40.0, "fails"),)), start(learning_rate=0.5, policy="bsp"))
    seen = simulated.perform(Run(seconds=90.0))
    assert events(seen) == [("b", "failed")]
    assert seen.setting == start(learning_rate=0.5, policy="bsp", workers=("a", "c"))
    (cost,) = seen.changes
    assert (cost.seconds, cost.stall_seconds, cost.steps) == (COSTS.detection_seconds, 0.0, ("detect",))
    assert not np.any(seen.pushes.worker[seen.pushes.seconds > 40.0] == 1)
    assert np.sum(seen.pushes.seconds > 45.0) > 4
    assert counted(simulated, 0) == seen.clocks


def test_the_part_of_a_lost_server_is_restored_onto_the_others():
    simulated = counting(Conditions(nodes=(NodeChange(("e",), 40.0, "fails"),)))
    seen = simulated.perform(Run(seconds=90.0))
    assert seen.setting == start(learning_rate=0.5, servers=("d",))
    (cost,) = seen.changes
    assert cost.stall_seconds == cost.seconds == COSTS.detection_seconds + 50.0 / 25.0
    assert not np.any((seen.pushes.seconds > 40.0) & (seen.pushes.seconds <= 40.0 + cost.seconds))
    assert counted(simulated, 0) == seen.clocks


@pytest.mark.parametrize(("dies", "done"), [("e", False), ("d", True)])
@pytest.mark.parametrize("method", METHODS)
def test_a_change_that_loses_a_node_is_rolled_back_or_completed(method, dies, done):
    """d gives its part of the model to e: without d the change is completed, without e all is as before, less e."""
    simulated = counting(Conditions(nodes=(NodeChange((dies,), 31.0, "fails"),)), start(servers=("d",), learning_rate=0.5))
    simulated.perform(Run(seconds=30.0))
    cost = simulated.perform(Reconfigure(start(servers=("e",), learning_rate=0.5), method=method))
    seen = simulated.perform(Run(seconds=30.0))
    assert cost.done is done
    assert ("complete" if done else "roll back") in cost.steps
    assert seen.setting == start(servers=("e",) if done else ("d",), learning_rate=0.5)
    assert cost.stall_seconds >= COSTS.detection_seconds + 100.0 / 25.0
    assert counted(simulated, 0) == int(branch(simulated).clock.pushes)
    assert np.sum(seen.pushes.seconds > 31.0 + cost.seconds) > 4


def test_the_last_server_is_replaced_by_a_node_that_can_be_spared_and_the_last_node_ends_the_job():
    gone = tuple(NodeChange((n,), 40.0 + i, "fails") for i, n in enumerate("ecba"))
    simulated = timed(Conditions(jitter=0.0, nodes=gone), start(workers=("a", "b", "c"), servers=("e",)))
    first = simulated.perform(Run(seconds=40.5))
    assert first.status == "running"
    last = simulated.perform(Run(seconds=100.0))
    assert last.status == "deadlock"
    assert [e.event for e in (*first.events, *last.events)] == ["failed"] * 4
    with pytest.raises(Rejected, match="deadlock"):
        simulated.perform(Run(clocks=1))


def all_fail(*joins, at=40.0):
    """Conditions under which all five nodes fail, and nodes join as (name, seconds)."""
    return (NodeChange(NAMES, at, "fails"), *(NodeChange((name,), seconds, "joins") for name, seconds in joins))


def test_a_job_without_machines_waits_for_those_that_join_and_pays_as_for_any_loss():
    back = (("b", 100.0), ("e", 130.0), ("a", 200.0))
    simulated = counting(Conditions(nodes=all_fail(*back)))
    seen = simulated.perform(Run(seconds=90.0))
    assert (seen.status, seen.changes, events(seen)) == ("running", (), [(n, "failed") for n in NAMES])
    assert not np.any(seen.pushes.seconds > 40.0)
    assert seen.nodes == ()
    with pytest.raises(Rejected, match="under way"):
        simulated.perform(Reconfigure(start(batch_size=4)))
    seen = simulated.perform(Run(seconds=90.0))
    assert seen.setting == start(learning_rate=0.5, workers=("b",), servers=("e",))  # b alone cannot have both roles
    (cost,) = seen.changes
    restored = COSTS.detection_seconds + 100.0 / 25.0
    assert cost.steps == ("wait", "wait", "detect", "restore")
    assert cost.seconds == cost.stall_seconds == pytest.approx(130.0 - 40.0 + restored)
    assert float(np.min(seen.pushes.seconds)) > 130.0 + restored
    assert counted(simulated, 0) == int(branch(simulated).clock.pushes)


def test_a_machine_that_was_lost_and_comes_back_is_used_again():
    """Nobody is missing when all machines are back, and yet the model must be restored."""
    simulated = counting(Conditions(nodes=(*all_fail(), NodeChange(NAMES, 100.0, "joins"))))
    seen = simulated.perform(Run(seconds=200.0))
    assert seen.setting == start(learning_rate=0.5)
    assert seen.changes[0].steps == ("wait", "detect", "restore")
    after = seen.pushes.worker[seen.pushes.seconds > 100.0]
    assert set(after) == {0, 1, 2}
    assert counted(simulated, 0) == seen.clocks


@pytest.mark.slow
def test_a_worker_is_waited_for_where_no_server_can_compute():
    nodes = (("a", machine()), ("b", machine(speed=0.0)))
    conditions = Conditions(jitter=0.0, nodes=(NodeChange(("a",), 40.0, "fails"), NodeChange(("a",), 90.0, "joins")))
    setting = Setting(workers=("a",), servers=("b",), batch_size=8, learning_rate=0.1)
    simulated = system(Cluster(nodes), job(STORED), setting, conditions, costs=COSTS)
    seen = simulated.perform(Run(seconds=200.0))
    assert (seen.status, seen.setting) == ("running", setting)
    assert [c.steps for c in seen.changes] == [("wait", "detect")]  # no server is lost
    late = seen.pushes.seconds[seen.pushes.seconds > 40.0]
    assert float(np.min(late)) > 90.0 + COSTS.detection_seconds


def test_one_machine_that_joins_takes_both_roles_where_nodes_have_both():
    both = start(learning_rate=0.5, workers=("a", "b"), servers=("a", "b"))
    simulated = counting(Conditions(nodes=all_fail(("d", 100.0))), both)
    seen = simulated.perform(Run(seconds=200.0))
    assert (seen.status, seen.setting.workers, seen.setting.servers) == ("running", ("d",), ("d",))
    assert counted(simulated, 0) == seen.clocks


def test_a_job_ends_when_the_last_machine_that_could_join_does_not_suffice():
    simulated = timed(Conditions(jitter=0.0, nodes=all_fail(("c", 100.0))))
    first, last = simulated.perform(Run(seconds=90.0)), simulated.perform(Run(seconds=90.0))
    assert (first.status, last.status, last.end_seconds) == ("running", "deadlock", 100.0)


@pytest.mark.parametrize("method", METHODS)
def test_a_change_that_loses_all_machines_is_rolled_back_when_others_join(method):
    simulated = counting(Conditions(nodes=(*all_fail(at=31.0), NodeChange(NAMES, 60.0, "joins"))))
    simulated.perform(Run(seconds=30.0))
    cost = simulated.perform(Reconfigure(start(learning_rate=0.5, servers=("d",)), method=method))
    assert (cost.done, cost.steps.count("roll back"), cost.steps[-3:]) == (False, 1, ("wait", "detect", "restore"))
    seen = simulated.perform(Run(seconds=60.0))
    assert seen.setting == start(learning_rate=0.5)
    assert seen.clocks > 4
    assert counted(simulated, 0) == int(branch(simulated).clock.pushes)


def test_cutting_a_run_into_windows_changes_nothing_while_a_job_waits_for_machines():
    conditions = Conditions(nodes=all_fail(("b", 70.0), ("d", 85.0)))
    whole, cut = (counting(conditions) for _ in range(2))
    one = whole.perform(Run(seconds=120.0))
    windows = [cut.perform(Run(seconds=min(7.0, 120.0 - start))) for start in np.arange(0.0, 120.0, 7.0)]
    assert_same_bytes(one.pushes, together(windows))
    assert [c for w in windows for c in w.changes] == list(one.changes)


def test_a_job_whose_last_worker_fails_ends_where_no_other_machine_can_compute():
    nodes = (("a", machine()), ("b", machine(speed=0.0)), ("c", machine(speed=0.0)))
    conditions = Conditions(jitter=0.0, nodes=(NodeChange(("a",), 40.0, "fails"),))
    setting = Setting(workers=("a",), servers=("b", "c"), batch_size=8, learning_rate=0.1)
    simulated = system(Cluster(nodes), job(STORED), setting, conditions, costs=COSTS)
    last = simulated.perform(Run(seconds=100.0))
    assert (last.status, simulated.status) == ("deadlock", "deadlock")
    assert 0 < len(last.pushes.seconds) == int(branch(simulated).clock.pushes)
    assert float(np.max(last.pushes.seconds)) <= 40.0


@pytest.mark.slow
def test_the_last_worker_is_replaced_by_the_first_machine_that_can_compute():
    nodes = (("a", machine()), ("b", machine(speed=0.0)), ("c", machine(speed=0.0)), ("d", machine()))
    conditions = Conditions(jitter=0.0, nodes=(NodeChange(("a",), 40.0, "fails"),))
    setting = Setting(workers=("a",), servers=("b",), batch_size=8, learning_rate=0.1)
    simulated = system(Cluster(nodes), job(STORED), setting, conditions, costs=COSTS)
    seen = simulated.perform(Run(seconds=200.0))
    assert (seen.status, seen.setting.workers, seen.setting.servers) == ("running", ("d",), ("b",))
    assert float(np.max(seen.pushes.seconds)) > 100.0


# ---------------------------------------------------------------------------------- what is free after what is held is lost

RATE = Real("learning_rate", 0.01, 1.0)


def after_a_loss(node, *knobs, **changed):
    """A job that has lost `node`, whose roles are held but for `knobs`, and the setting that it goes on under."""
    conditions = Conditions(jitter=0.0, nodes=(NodeChange((node,), 40.0, "fails"),))
    simulated = timed(conditions, start(**changed), knobs=(RATE, *knobs))
    return simulated, simulated.perform(Run(seconds=90.0)).setting


@pytest.mark.parametrize("asked", ["of the start", "of the window"])
@pytest.mark.parametrize("node", ["b", "e"])
def test_a_free_knob_changes_in_place_after_a_loss_has_changed_the_held_roles(node, asked):
    simulated, now = after_a_loss(node)
    made = start() if asked == "of the start" else now
    assert simulated.perform(Reconfigure(replace(made, learning_rate=0.05))).seconds == 0.0
    assert simulated.perform(Run(clocks=5)).setting == replace(now, learning_rate=0.05)
    child = simulated.perform(Fork(0, replace(made, learning_rate=0.2)))
    assert simulated.perform(Run(clocks=5, branch=child)).setting == replace(now, learning_rate=0.2)
    assert simulated.perform(Run(clocks=5, branch=simulated.perform(Fork(0)))).setting == replace(now, learning_rate=0.05)
    with pytest.raises(Rejected, match=r"Cannot set workers to \('a', 'd'\): this scenario holds it"):
        simulated.perform(Reconfigure(replace(now, workers=("a", "d"))))


def test_the_server_that_has_replaced_a_lost_one_stays_when_a_free_knob_changes():
    simulated, now = after_a_loss("e", servers=("e",))
    assert (now.workers, now.servers) == (("a", "b", "c"), ("d",))
    simulated.perform(Reconfigure(start(servers=("e",), learning_rate=0.05)))
    assert simulated.perform(Run(clocks=5)).setting == replace(now, learning_rate=0.05)


def test_roles_that_are_free_change_after_a_node_whose_role_is_held_is_lost():
    simulated, now = after_a_loss("b", Choice("role/c", ("worker", "idle")))
    simulated.perform(Reconfigure(start(workers=("a", "b"))))
    assert simulated.perform(Run(clocks=5)).setting == replace(now, workers=("a",))
    with pytest.raises(Rejected, match="Cannot make node 'd' a worker"):
        simulated.perform(Reconfigure(replace(now, workers=("a", "d"), servers=("e",))))


def test_free_loads_of_nodes_that_are_left_are_taken_from_a_setting_of_all_nodes():
    simulated, now = after_a_loss("b", *(Integer(f"load/{n}/0", 1, 16) for n in "abc"))
    simulated.perform(Reconfigure(start(loads=((4,), (5,), (6,)))))
    assert simulated.perform(Run(clocks=5)).setting == replace(now, loads=((4,), (6,)))


def test_a_setting_in_force_that_a_loss_has_brought_out_of_range_is_no_reason_to_refuse():
    conditions = Conditions(jitter=0.0, nodes=(NodeChange(("b",), 40.0, "fails"),))
    simulated = timed(conditions, knobs=(RATE, Integer("worker_count", 3, 4)))
    now = simulated.perform(Run(seconds=90.0)).setting
    simulated.perform(Reconfigure(replace(now, learning_rate=0.05)))
    assert simulated.perform(Run(clocks=5)).setting == replace(now, learning_rate=0.05)
    with pytest.raises(Rejected, match="worker_count to 1"):
        simulated.perform(Reconfigure(replace(now, workers=("a",))))


def test_a_node_under_notice_whose_role_is_held_stays_until_it_is_gone():
    leaves = NodeChange(("b",), 10.0, "leaves", notice_seconds=50.0)
    simulated = timed(Conditions(jitter=0.0, nodes=(leaves,)), knobs=(RATE,))
    simulated.perform(Run(seconds=20.0))
    simulated.perform(Reconfigure(start(learning_rate=0.05)))
    assert simulated.perform(Run(clocks=3)).setting == start(learning_rate=0.05)


def test_the_held_roles_can_be_restored_when_the_lost_node_is_back():
    comes = (NodeChange(("b",), 40.0, "fails"), NodeChange(("b",), 60.0, "joins"))
    simulated = timed(Conditions(jitter=0.0, nodes=comes), knobs=(RATE,))
    assert simulated.perform(Run(seconds=90.0)).setting.workers == ("a", "c")
    simulated.perform(Reconfigure(start(learning_rate=0.05)))
    assert simulated.perform(Run(clocks=5)).setting == start(learning_rate=0.05)


def test_a_target_reached_during_a_change_ends_it():
    simulated = timed(target=Target("clocks", 40))
    seen = simulated.perform(Run(clocks=37))
    assert seen.status == "running"
    cost = simulated.perform(Reconfigure(start(servers=("e",)), method="migrate"))
    assert simulated.status == "target"
    assert cost.seconds < 5
    assert jnp.asarray(simulated.perform(Run(clocks=10)).clocks) == 3
