"""Processes that die at any moment: a live job trains on, and its model counts every push that is not reported as lost."""

import re
import threading
import time
from dataclasses import replace

import pytest

from harness.live.driver import system
from harness.live.driver.checkpoints import job_saver
from harness.live.driver.checkpoints.driver_state import driver_state
from harness.live.driver.repairs import job_repairs
from harness.live.driver.repairs.standstill import Limits
from harness.live.driver.system import LiveSystem
from harness.live.driver.view import recent_pushes
from harness.live.processes.client import RemoteCoordinator
from harness.live.protocol.names import node_of
from harness.live.server.server import Server
from harness.live.worker import pulling
from tests.live.support.ones import ONES, Ones, counted
from tests.live.support.pretend import PretendProcesses, history
from tests.live.support.threads import ThreadProcesses, thread_processes
from tuners.actions import Evaluate, Fork, Free, Reconfigure, Rejected, Run

SPEC = Ones("ones", "ones.toml", ONES, 0)
SERVERS = ("server/n2", "server/n3")


@pytest.fixture
def processes(tmp_path):
    with thread_processes(SPEC, tmp_path) as made:
        yield made


def assert_counts(live):
    clocks, lost, parameters = counted(live)
    assert set(parameters) == {clocks - lost}
    return lost


def until_whole(live):
    """Wait until all nodes are present, no repair is in progress, and the job trains."""
    until(live, lambda: live.job_status().setting == live.job.start and idle(live))
    assert live.perform(Run(clocks=10)).clocks >= 10


def test_a_job_starts_again_if_servers_die_with_all_copies(processes):
    with LiveSystem(SPEC, processes) as live:
        seen = [live.perform(Run(clocks=30))]
        processes.kill(*SERVERS)
        seen.append(live.perform(Run(clocks=30)))
        until_whole(live)
        lost = assert_counts(live)
        assert lost >= 30
        assert "back to the checkpoint of 0.0 s" in history(live)
        assert f"{lost} pushes are lost for good" in history(live)
        assert live.perform(Evaluate()).clocks <= live.job_status().clocks
    assert seen[1].start_seconds == seen[0].end_seconds
    assert [(e.node, e.event) for w in seen for e in w.events][:2] == [("n2", "failed"), ("n3", "failed")]


def test_a_job_is_rolled_back_to_its_last_checkpoint_with_its_present_branches(processes, monkeypatch):
    monkeypatch.setattr(job_saver, "CHECKPOINT_SECONDS", 0.1)
    kept = []
    with LiveSystem(SPEC, processes, keep=kept.append) as live:
        freed = live.perform(Fork(0))
        while not kept:
            live.perform(Run(clocks=10))
        monkeypatch.setattr(job_saver, "CHECKPOINT_SECONDS", 1e9)
        faster = replace(live.job.start, policy="asp")
        live.perform(Free(freed))
        child = live.perform(Fork(0, faster))
        live.perform(Run(clocks=20, branch=child))
        processes.kill(*SERVERS)
        assert live.perform(Run(clocks=20, branch=child)).setting.workers == faster.workers
        live.perform(Run(clocks=20))
        until_whole(live)
        assert child != freed
        clocks, lost, parameters = counted(live)
        assert set(parameters) == {clocks - live.control.view.branches[0].lost_pushes}
        assert lost >= live.control.view.branches[0].lost_pushes + 20  # and those of the child
        assert "back to the checkpoint" in history(live)
        assert live.perform(Fork(child)) > child


def test_a_server_that_dies_while_no_branch_trains_is_replaced(processes):
    with LiveSystem(SPEC, processes) as live:
        child = live.perform(Fork(0))
        live.perform(Run(clocks=20, branch=child))
        live.perform(Free(child))
        processes.kill(SERVERS[0])
        assert live.perform(Run(clocks=10)).clocks >= 10
        until_whole(live)
        assert assert_counts(live) == 0


def test_servers_that_can_start_again_do_not_wait_for_a_worker_that_cannot():
    pretend = PretendProcesses(SPEC.job)
    start = pretend.start
    pretend.start = lambda names: start([n for n in names if node_of(n) in {*pretend.nodes, "evaluator"}])
    with LiveSystem(SPEC, pretend) as live:
        live.perform(Run(clocks=10))
        pretend.nodes -= {"n1"}
        pretend.kill(*SERVERS, "worker/n1")
        until(live, lambda: idle(live, {"n1"}))
        assert live.perform(Run(clocks=10)).clocks >= 10
        assert live.job_status().setting == replace(SPEC.job.start, workers=("n0",))


def test_a_machine_that_dies_without_processes_cannot_be_used_until_it_is_back():
    start = replace(SPEC.job.start, workers=("n0",))
    pretend = PretendProcesses(SPEC.job)
    with LiveSystem(SPEC, pretend) as live:
        live.perform(Reconfigure(start))
        pretend.nodes -= {"n1"}
        until(live, lambda: idle(live, {"n1"}))
        seen = live.perform(Run(clocks=10))
        assert [n.name for n in seen.nodes] == ["n0", "n2", "n3"]
        with pytest.raises(Rejected, match="Cannot use node 'n1'"):
            live.perform(Reconfigure(SPEC.job.start))
        pretend.nodes |= {"n1"}
        until(live, lambda: idle(live))
        assert live.perform(Reconfigure(SPEC.job.start)).done
        assert re.search(r"n1 is gone \| refused: Cannot use node 'n1'.* \| n1 is back \|", history(live))


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"n1"}, "n1 has no machine: run `ray start` on one, or free a CPU; training goes on without it"),
        ({"n1", "n2", "n3"}, "n1, n2, n3 have no machine: run `ray start` on one, or free a CPU; training waits for one"),
    ],
    ids=["enough are left", "too few are left"],
)
def test_nodes_without_a_machine_are_named_with_the_way_out(monkeypatch, nodes, words):
    monkeypatch.setattr(job_repairs, "MACHINE_SECONDS", 0.2)
    pretend = PretendProcesses(SPEC.job)
    with LiveSystem(SPEC, pretend) as live:
        pretend.nodes -= nodes
        pretend.kill(*(name for name in ("worker/n1", *SERVERS) if node_of(name) in nodes))
        until(live, lambda: "no machine" in history(live))
        assert words in history(live)
        live.perform(Run(seconds=0.5))
        assert history(live).count("no machine") == 1
        pretend.nodes |= nodes
        until(live, lambda: idle(live))
        assert live.perform(Run(clocks=10)).clocks >= 10


def test_a_node_that_gets_another_machine_at_once_is_not_said_to_have_none(monkeypatch):
    pretend = PretendProcesses(SPEC.job)
    monkeypatch.setattr(job_repairs, "MACHINE_SECONDS", 1e6)  # a busy machine could let five seconds pass
    with LiveSystem(SPEC, pretend) as live:
        pretend.nodes -= {"n1"}
        pretend.kill("worker/n1")
        live.perform(Run(seconds=0.3))
        pretend.nodes |= {"n1"}
        until(live, lambda: idle(live))
        monkeypatch.setattr(job_repairs, "MACHINE_SECONDS", 0.0)
        live.perform(Run(seconds=0.3))
        assert "no machine" not in history(live)


def test_a_status_is_shown_while_the_driver_waits_for_the_coordinator(monkeypatch):
    """The table of a terminal, which is drawn again and again, showed nothing until the coordinator was back."""
    monkeypatch.setattr(system, "_BUSY_SECONDS", 0.01)
    pretend, died, go_on = PretendProcesses(SPEC.job), threading.Event(), threading.Event()
    told = []
    pretend.tell = told.append
    with LiveSystem(SPEC, pretend) as live:
        live.perform(Run(clocks=10))
        before, poll = live.latest_status(), pretend.answers.poll

        def waits(taken):
            told[0]("the coordinator has died")
            died.set()
            go_on.wait(20)
            pretend.answers.poll = poll
            return poll(taken)

        pretend.answers.poll = waits
        assert died.wait(20)
        seen = live.latest_status()
        go_on.set()
        assert seen.events[-1][1] == "the coordinator has died"
        assert (seen.clocks, seen.clocks_per_second) == (before.clocks, 0.0)
        assert seen.seconds > before.seconds
        live.perform(Run(clocks=10))
        assert live.latest_status().clocks > before.clocks


def test_a_machine_that_is_lost_is_told_once_with_what_was_on_it():
    """Its processes hang, are started there again and die, and then Ray notices."""
    pretend, gone = PretendProcesses(SPEC.job), ("server/n2", "worker/n1")
    start, reasons = pretend.start, ["crashed"]

    def starting(names):
        start([n for n in names if n not in gone])
        if reasons and set(names) & set(gone):
            pretend.gone |= dict.fromkeys(gone, reasons.pop(0))

    with LiveSystem(SPEC, pretend) as live:
        live.perform(Run(clocks=10))
        pretend.start = starting
        pretend.kill(*gone, why="nothing was heard")
        until(live, lambda: not reasons)
        live.perform(Run(seconds=0.3))
        pretend.nodes -= {"n1", "n2"}
        pretend.kill(*gone, why="the machine has left")
        live.perform(Run(seconds=0.3))
        assert re.findall("[^|]* (?:lost|gone)[^|]*", history(live)) == ["server/n2, worker/n1 are lost: nothing was heard"]
        # On the next machine, it is told again.
        reasons.append("out of memory")
        pretend.nodes |= {"n1", "n2"}
        until(live, lambda: "server/n2, worker/n1 are lost: out of memory" in history(live))


def test_a_process_that_cannot_start_is_given_up_and_tried_again_on_the_next_machine_of_its_node():
    pretend = PretendProcesses(SPEC.job)
    starts, start = [], pretend.start

    def starting(names):
        starts.extend(names)
        start([n for n in names if n != "worker/n1"])
        pretend.gone |= {n: "it failed" for n in names if n == "worker/n1"}

    with LiveSystem(SPEC, pretend) as live:
        live.perform(Run(clocks=10))
        pretend.start = starting
        pretend.kill("worker/n1")
        until(live, lambda: "worker/n1 is not started again, for it was lost each time" in history(live))
        assert "before it had joined: it failed" in history(live)
        live.perform(Run(seconds=0.5))
        assert (starts.count("worker/n1"), history(live).count("not started again")) == (6, 1)
        pretend.nodes -= {"n1"}
        live.perform(Run(seconds=0.3))
        pretend.start = start
        pretend.nodes |= {"n1"}
        until(live, lambda: idle(live))
        assert live.perform(Run(clocks=10)).setting == live.job.start


def test_a_branch_forked_while_a_node_is_away_gets_it_when_it_is_back():
    pretend, start = PretendProcesses(SPEC.job), SPEC.job.start
    with LiveSystem(SPEC, pretend) as live:
        pretend.kill("worker/n1", for_good=True)
        until(live, lambda: idle(live, {"n1"}) and live.job_status().setting.workers == ("n0",))
        alike, other = live.perform(Fork(0)), live.perform(Fork(0, replace(start, workers=("n0", "n3"), servers=("n2",))))
        pretend.nodes |= {"n1"}
        until(live, lambda: idle(live) and live.job_status().setting == start)
        assert live.perform(Run(clocks=10, branch=alike)).setting == start
        assert live.perform(Run(clocks=10, branch=other)).setting.workers == ("n0", "n3")


def test_a_free_knob_changes_while_a_node_whose_role_is_held_is_away_and_stays_when_it_is_back():
    text = re.sub(r'"role/n.*\n', "", ONES)
    spec = Ones("ones", "ones.toml", text, 0)
    pretend, start = PretendProcesses(spec.job), spec.job.start
    with LiveSystem(spec, pretend) as live:
        pretend.kill("worker/n1", for_good=True)
        until(live, lambda: idle(live, {"n1"}) and live.job_status().setting.workers == ("n0",))
        live.perform(Reconfigure(replace(start, policy="asp")))
        seen = live.perform(Run(clocks=10)).setting
        assert seen == replace(start, policy="asp", workers=("n0",))
        child = live.perform(Fork(0, replace(seen, policy="ssp")))
        pretend.nodes |= {"n1"}
        until(live, lambda: idle(live) and live.job_status().setting == replace(start, policy="asp"))
        assert live.perform(Run(clocks=10, branch=child)).setting == replace(start, policy="ssp")


def test_a_resumed_job_gets_back_the_nodes_that_losses_took(processes, tmp_path):
    kept = []
    with LiveSystem(SPEC, processes, keep=kept.append) as live:
        processes.nodes -= {"n1"}
        processes.kill("worker/n1")
        until(live, lambda: idle(live, {"n1"}) and live.job_status().setting.workers == ("n0",))
        live.checkpoint()
    with thread_processes(SPEC, tmp_path / "next") as others, LiveSystem(SPEC, others, kept[-1]) as live:
        until_whole(live)
        assert assert_counts(live) == 0


def test_a_resumed_job_tells_of_nodes_that_are_back(processes, tmp_path):
    kept, told = [], []
    with LiveSystem(SPEC, processes, keep=kept.append) as live:
        processes.nodes -= {"n1"}
        processes.kill("worker/n1")
        while not told:
            told += live.perform(Run(seconds=0.01)).events
        live.checkpoint()
    with thread_processes(SPEC, tmp_path / "next") as others, LiveSystem(SPEC, others, kept[-1]) as live:
        told += live.perform(Run(clocks=10)).events
    assert [(e.node, e.event) for e in told] == [("n1", "failed"), ("n1", "joined")]


@pytest.mark.parametrize(
    "first", [{}, {"server/n2": "has not received the gradient of worker/n1"}], ids=["computing", "in a view"]
)
def test_a_worker_whose_computation_hangs_is_named_and_replaced(processes, monkeypatch, first):
    """It is heard all the time: heartbeats come from another thread. Where a server seems to lack something at `first`, a
    view begins, which may wait for the same worker: it has to repeat pushes that no snapshot has."""
    goes_on, compute, end, in_vain = threading.Event(), Ones.compute, ThreadProcesses._end, []

    def hangs(spec, task):
        if threading.current_thread().name == "worker/n1":
            in_vain.extend([] if goes_on.wait(30) else ["nobody has ended it"])
        return compute(spec, task)

    goes_on.set()
    monkeypatch.setattr(Ones, "compute", hangs)
    monkeypatch.setattr(ThreadProcesses, "_end", lambda made, names: goes_on.set() or end(made, names))
    with LiveSystem(SPEC, processes, limits=Limits(still_seconds=1.0)) as live:
        live.perform(Run(clocks=20))
        coordinator, said = live.control.runtime.coordinator, [first] if first else []
        held_up_by = coordinator.held_up_by
        monkeypatch.setattr(coordinator, "held_up_by", lambda: said.pop() if said else held_up_by())
        goes_on.clear()
        assert live.perform(Run(clocks=50)).clocks >= 50
        assert not in_vain
        assert re.search(r"no push for \d+ s: worker/n1 has not computed mini-batch \d+", history(live))
        assert "worker/n1 is lost: training waited too long" in history(live)
        until_whole(live)
        lost = assert_counts(live)
        assert first or lost == 0  # a view takes pushes back that a worker replaced then had kept for it


def test_a_server_that_hangs_is_named_and_replaced(processes, monkeypatch):
    """It is heard all the time, as a worker is. That no worker computes is not the workers' fault: they wait for it."""
    goes_on, handle, end, in_vain = threading.Event(), Server._handle, ThreadProcesses._end, []

    def hangs(of, *message):
        if threading.current_thread().name == "server/n2":
            in_vain.extend([] if goes_on.wait(30) else ["nobody has ended it"])
        handle(of, *message)

    goes_on.set()
    monkeypatch.setattr(Server, "_handle", hangs)
    monkeypatch.setattr(ThreadProcesses, "_end", lambda made, names: goes_on.set() or end(made, names))
    monkeypatch.setattr(pulling, "_RETRY_SECONDS", 0.3)
    with LiveSystem(SPEC, processes, limits=Limits(still_seconds=1.5)) as live:  # workers have asked again by then
        live.perform(Run(clocks=20))
        goes_on.clear()
        assert live.perform(Run(clocks=50)).clocks >= 50
        assert not in_vain
        assert "server/n2 is lost: training waited too long" in history(live)
        assert not re.search(r"worker/\w+ is lost", history(live))
        until_whole(live)
        assert assert_counts(live) == 0


def test_a_resumed_job_has_not_stood_still_since_it_began():
    kept, soon = [], Limits(still_seconds=20.0)
    with LiveSystem(SPEC, PretendProcesses(SPEC.job), keep=kept.append) as live:
        live.perform(Run(clocks=10))
        live.checkpoint()
    late = replace(kept[-1], state={**kept[-1].state, "seconds": 1000.0})
    pretend = PretendProcesses(SPEC.job)
    pretend.answers.begin_from = lambda state, vectors, policies: pretend.answers.begin(SPEC.job.start, policies[0], None)
    pretend.stuck = ("worker/n0",)
    with LiveSystem(SPEC, pretend, late, limits=soon) as live:
        until_time = live.now + 0.3
        with live.control.news:
            live.control.wait(lambda: live.now > until_time)
        assert live.now > 1000.0
        assert "no push for" not in history(live)


def test_training_stays_stopped_after_the_last_checkpoint_though_a_server_is_lost():
    kept, pretend = [], PretendProcesses(SPEC.job)

    def lose_a_server(save):
        pretend.answers.snapshot = snapshot
        pretend.kill("server/n2")
        return 10**9  # never durable

    with LiveSystem(SPEC, pretend, keep=kept.append) as live:
        child = live.perform(Fork(0))
        live.perform(Run(clocks=10, branch=child))
        snapshot, pretend.answers.snapshot = pretend.answers.snapshot, lose_a_server
        live.checkpoint()
        assert "server/n2 is lost" in history(live)
        assert pretend.running is None
    assert kept[-1].state["branch"] == driver_state(kept[-1], {})[1] == child


def test_without_a_viewer_only_the_last_pushes_are_kept(monkeypatch):
    monkeypatch.setattr(recent_pushes, "RECENT_SECONDS", 0.1)
    with LiveSystem(SPEC, PretendProcesses(SPEC.job)) as live:

        def only_the_last():
            with live.control.news:
                return 0 < live.control.view.recent.span_seconds < live.now / 3

        until(live, only_the_last)


MOMENTS = {
    "migrate": ("expect", "place", "put", "retire"),
    "relocate": ("expect", "put", "place", "needed"),
    "checkpoint": ("halt", "lose", "recover"),
}
"""Questions to the coordinator in the course of each method."""

VICTIMS = [
    ("checkpoint", "worker/n0"),
    pytest.param("migrate", "worker/n0", marks=pytest.mark.live),
    pytest.param("relocate", "server/n2", marks=pytest.mark.live),
    pytest.param("migrate", "server/n2", marks=pytest.mark.live),
    pytest.param("relocate", "worker/n0", marks=pytest.mark.live),
    pytest.param("checkpoint", "server/n2", marks=pytest.mark.live),
    pytest.param("checkpoint", "server/n1", marks=pytest.mark.live),
]


@pytest.mark.parametrize(("method", "name"), VICTIMS)
def test_training_continues_after_a_loss_at_any_moment_of_a_reconfiguration(processes, method, name):
    other = replace(SPEC.job.start, workers=("n0", "n3"), servers=("n1", "n2"))
    with LiveSystem(SPEC, processes) as live:
        for moment in MOMENTS[method] if node_of(name) != "n1" else ("recover",):
            strike_after(processes, moment, name)
            noticed = losses_of(live, name)
            live.perform(Reconfigure(other, method=method, wait=False))
            # Not only idle: it also is between the death and the next look for losses.
            until(live, lambda noticed=noticed: losses_of(live, name) > noticed and idle(live))
            assert live.perform(Run(clocks=10)).clocks >= 10, history(live)
            live.perform(Reconfigure(SPEC.job.start, method="migrate"))
            until_whole(live)
        assert assert_counts(live) == 0


def strike_after(processes, moment, name):
    """Kill a process once, when the coordinator has been asked for `moment`."""
    struck, coordinator = [], processes.coordinator

    def watched(asked, *given, **named):
        answer = coordinator.ask(asked, *given, **named)
        if asked == moment and name in processes.running and not struck:
            struck.append(name)
            processes.kill(name)
        return answer

    processes.coordinator = RemoteCoordinator(watched)


def losses_of(live, name):
    """How often the driver has noticed that this process is lost."""
    return sum(what.startswith(f"{name} is lost") for _, what in live.job_status().events)


def idle(live, away=frozenset()):
    control = live.control
    with control.news:
        return control.losses.away == away and control.procedure is None and control.reconfiguration is None


def until(live, so, seconds=60.0):
    """Train until something is so."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, history(live)
        live.perform(Run(seconds=0.01))
