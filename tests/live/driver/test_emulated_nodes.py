"""Nodes of a live job that come, go and slow down as the scenario says: the tuner sees what it sees in the simulator."""

import re
import threading
import time
from dataclasses import replace
from functools import cache

import pytest

from harness.drive import play
from harness.live.driver import control
from harness.live.driver.repairs.emulated_nodes import EmulatedNodes
from harness.live.driver.system import LiveSystem
from harness.live.protocol.names import EVALUATOR
from harness.scenario import system
from tests.live.driver.test_losses import history, idle, until
from tests.live.support.ones import ONES, Ones, counted
from tests.live.support.pretend import PretendProcesses, events
from tests.live.support.threads import thread_processes
from tuners.actions import NodeEvent, Reconfigure, Rejected, Run


def spec(conditions, start=ONES):
    return Ones("ones", "ones.toml", f"{start}\n[conditions]\nstagger = false\njitter = 0.0\n{conditions}", 0)


@pytest.fixture
def held(monkeypatch):
    """A function that lets the scenario's time go on. Until then that is at its beginning, however busy the machine is."""
    act, goes_on = EmulatedNodes.act, threading.Event()
    monkeypatch.setattr(EmulatedNodes, "act", lambda self, seconds: act(self, seconds if goes_on.is_set() else 0.0))
    return goes_on.set


GOES = """nodes = [
  { nodes = ["n1"], seconds = 0.3, event = "fails" },
  { nodes = ["n1"], seconds = 0.8, event = "joins" },
  { nodes = ["n1"], seconds = 1.2, event = "leaves", notice_seconds = 0.3 },
]"""


def told_by(live, count):
    """Windows until so many events were told. At the end of each, n1 works exactly if the last event has left it there."""
    seen = []
    while len(events(seen)) < count:
        seen.append(live.perform(Run(seconds=0.05)))
        assert live.now < 60, history(live)
        last = [event for node, event in events(seen) if node == "n1"][-1:]
        workers = seen[-1].setting.workers
        if last in (["failed"], ["left"]):
            assert workers == ("n0",)
        elif not last:
            assert workers == ("n0", "n1")
    return [event for window in seen for event in window.events]


@cache
def in_simulation():
    """The events of `GOES`."""
    simulated = system(spec(GOES).scenario, 0)
    return [event for _ in range(20) for event in simulated.perform(Run(seconds=0.1)).events]


@pytest.mark.parametrize(
    ("join_seconds", "look_seconds"),
    [(0.0, 0.05), (0.5, 0.05), (1.2, 0.05), (0.0, 0.7), (0.0, 1.6)],
    ids=["at once", "starts until the notice", "starts for longer", "looks late", "looks when all is over"],
)
def test_a_node_goes_and_comes_back_as_in_the_simulator(monkeypatch, join_seconds, look_seconds):
    """The same events at the same times, however long its processes start, and however late a busy driver looks."""
    monkeypatch.setattr(control, "_LOOK_SECONDS", look_seconds)
    made = spec(GOES)
    with LiveSystem(made, PretendProcesses(made.job, join_seconds=join_seconds), emulates=True) as live:
        told = told_by(live, 4)
        until(live, lambda: idle(live, {"n1"}))
        assert live.job_status().setting.workers == ("n0",)
    assert told == in_simulation()
    assert [(e.node, e.event) for e in told] == [("n1", "failed"), ("n1", "joined"), ("n1", "leaving"), ("n1", "left")]
    assert "worker/n1 is lost: the scenario takes the node away" in history(live)


def test_a_node_under_notice_whose_processes_start_late_gets_no_role_again():
    made = spec(GOES.replace("notice_seconds = 0.3", "notice_seconds = 1000"))
    with LiveSystem(made, PretendProcesses(made.job, join_seconds=0.7), emulates=True) as live:
        told_by(live, 3)
        until(live, lambda: "n1 is back" in history(live) and idle(live))
        assert live.perform(Run(clocks=10)).setting.workers == ("n0",)


def test_a_node_that_left_before_its_processes_had_started_can_be_used_when_it_joins_again():
    made = spec(GOES.removesuffix("]") + '  { nodes = ["n1"], seconds = 2.0, event = "joins" },\n]')
    with LiveSystem(made, PretendProcesses(made.job, join_seconds=1.2), emulates=True) as live:
        assert [e.event for e in told_by(live, 5)] == ["failed", "joined", "leaving", "left", "joined"]
        assert "n1" in {n.name for n in live.perform(Run(clocks=1)).nodes}
        wanted = replace(made.job.start, policy="asp")
        assert live.perform(Reconfigure(wanted)).done
        assert live.perform(Run(clocks=10)).setting == wanted


def test_a_node_can_be_used_as_soon_as_it_has_joined_while_its_processes_start():
    made = spec(GOES.replace("1.2", "1000.0"))
    with LiveSystem(made, PretendProcesses(made.job, join_seconds=1.0), emulates=True) as live:
        assert [e.event for e in told_by(live, 2)] == ["failed", "joined"]
        wanted = replace(made.job.start, policy="asp")
        assert live.perform(Reconfigure(wanted)).done
        assert live.perform(Run(clocks=10)).setting == wanted
        until(live, lambda: idle(live))


def test_the_tuner_is_told_of_nodes_without_a_role():
    made = spec(GOES, ONES.replace('workers = ["n0", "n1"]', 'workers = ["n0"]'))
    with LiveSystem(made, PretendProcesses(made.job), emulates=True) as live:
        seen = []
        while len(events(seen)) < 4:
            seen.append(live.perform(Run(seconds=0.05)))
            assert live.now < 60
        with pytest.raises(Rejected, match="Cannot use node 'n1'"):
            live.perform(Reconfigure(replace(made.job.start, workers=("n0", "n1"))))
    assert [e for w in seen for e in w.events] == in_simulation()


ALL_FAIL = """nodes = [
  { nodes = ["n0", "n2"], seconds = 0.3, event = "fails" },
  { nodes = ["n1"], seconds = 0.6, event = "joins" },
  { nodes = ["n3"], seconds = 0.9, event = "joins" },
]"""
TWO = ONES.replace('["n0", "n1"]', '["n0"]').replace('["n2", "n3"]', '["n2"]')


def test_a_job_that_has_lost_all_its_nodes_continues_on_those_that_join(tmp_path):
    made = spec(ALL_FAIL, TWO)
    with thread_processes(made, tmp_path) as processes, LiveSystem(made, processes, emulates=True) as live:
        until(live, lambda: live.job_status().setting.workers != ("n0",) and idle(live, {"n0", "n2"}))
        assert live.perform(Run(clocks=10)).setting == replace(made.job.start, workers=("n1",), servers=("n3",))
        assert live.now > 0.9
        clocks, lost, parameters = counted(live)
        assert set(parameters) == {clocks - lost}


def test_a_job_that_has_lost_too_many_nodes_ends_when_no_other_will_join():
    n3_fails, too = ALL_FAIL.replace("0.9", "0.0"), '  { nodes = ["n3"], seconds = 0.9, event = "fails" },\n]'
    made = spec(n3_fails.removesuffix("]") + too, TWO)
    why = "Too few nodes are left to continue on (n1), and no other will join."

    def fixed(_):
        yield from ()

    in_simulation = play(fixed, system(made.scenario, 0))
    with LiveSystem(made, PretendProcesses(made.job), emulates=True) as live:
        played = play(fixed, live)
        assert played.outcome.status == in_simulation.outcome.status == "deadlock"
        assert live.now > 0.6
        assert why in history(live)
        assert [c.done for e in played.exchanges for c in e.answer.changes][-1:] == [
            False
        ]  # a recovery that was not possible
        with pytest.raises(RuntimeError, match=re.escape(why)):
            live.checkpoint()


def test_a_node_that_will_leave_works_on_but_takes_no_new_role():
    made = spec('nodes = [{ nodes = ["n1"], seconds = 0.1, event = "leaves", notice_seconds = 1000 }]')
    with LiveSystem(made, PretendProcesses(made.job), emulates=True) as live:
        until(live, lambda: "n1 will leave" in history(live))
        assert live.perform(Run(clocks=10)).setting == made.job.start
        assert [n.name for n in live.perform(Run(clocks=10)).nodes] == ["n0", "n2", "n3"]
        with pytest.raises(Rejected, match="Cannot use node 'n1'"):
            live.perform(Reconfigure(replace(made.job.start, policy="asp")))


def test_no_node_goes_once_the_job_has_ended():
    """Its last checkpoint needs them."""
    start = ONES.replace("value = 100_000_000", "value = 20")
    made = spec('nodes = [{ nodes = ["n1"], seconds = 1.5, event = "fails" }]', start)
    with LiveSystem(made, PretendProcesses(made.job), emulates=True) as live:
        assert live.perform(Run(clocks=20)).status == "target"
        ended = live.now
        while live.control.runtime.now < 1.8:
            time.sleep(0.05)
        assert ("worker/n1 is lost" in history(live)) == (ended > 1.5)


def test_a_job_that_is_resumed_knows_which_nodes_will_leave(tmp_path):
    made = spec('nodes = [{ nodes = ["n1"], seconds = 0.1, event = "leaves", notice_seconds = 1000 }]')
    kept = []
    with thread_processes(made, tmp_path) as first, LiveSystem(made, first, None, kept.append, emulates=True) as live:
        until(live, lambda: "n1 will leave" in history(live))
        live.checkpoint()
    with thread_processes(made, tmp_path / "next") as others, LiveSystem(made, others, kept[-1], emulates=True) as live:
        assert [n.name for n in live.perform(Run(clocks=10)).nodes] == ["n0", "n2", "n3"]
        with pytest.raises(Rejected, match="Cannot use node 'n1'"):
            live.perform(Reconfigure(replace(made.job.start, policy="asp")))


def test_a_job_that_is_resumed_tells_of_what_no_window_told_before(tmp_path):
    made = spec('nodes = [{ nodes = ["n1"], seconds = 0.1, event = "leaves", notice_seconds = 0.1 }]')
    kept = []
    with thread_processes(made, tmp_path) as first, LiveSystem(made, first, None, kept.append, emulates=True) as live:
        while not idle(live, {"n1"}):
            time.sleep(0.01)  # and no window
        live.checkpoint()
    with (
        thread_processes(made, tmp_path / "next") as others,
        LiveSystem(made, others, kept[-1], kept.append, emulates=True) as live,
    ):
        seen = [live.perform(Run(clocks=10)) for _ in range(2)]
        assert [e for w in seen for e in w.events] == [NodeEvent(0.1, "n1", "leaving"), NodeEvent(0.2, "n1", "left")]
        live.checkpoint()
    with thread_processes(made, tmp_path / "last") as others, LiveSystem(made, others, kept[-1], emulates=True) as live:
        assert live.perform(Run(clocks=10)).events == ()  # once


def test_a_node_that_joins_later_can_be_used_then(held):
    start = ONES.replace('workers = ["n0", "n1"]', 'workers = ["n0"]')
    made = spec('nodes = [{ nodes = ["n1"], seconds = 0.5, event = "joins" }]', start)
    pretend = PretendProcesses(made.job)
    wider = replace(made.job.start, workers=("n0", "n1"))
    with LiveSystem(made, pretend, emulates=True) as live:
        with pytest.raises(Rejected, match="Cannot use node 'n1'"):
            live.perform(Reconfigure(wider))
        held()
        seen = []
        while not events(seen):
            seen.append(live.perform(Run(seconds=0.05)))
        assert events(seen) == [("n1", "joined")]
        assert "n1 has joined" in history(live)
        assert live.perform(Reconfigure(wider)).done
    absent = spec('nodes = [{ nodes = ["n0"], seconds = 0.5, event = "joins" }]', start)
    with pytest.raises(ValueError, match="Cannot use node 'n0'"):
        LiveSystem(absent, PretendProcesses(absent.job), emulates=True)


EPISODE = 'episodes = [{ node = "n1", start_seconds = 0.2, seconds = 2.0, factor = 3.0 }]'


def test_episodes_slow_a_node_down_for_their_time():
    made = spec(EPISODE)
    emulated = EmulatedNodes(PretendProcesses(made.job), made)
    found = []
    for seconds in (0.1, 0.2, 2.1, 2.2):
        emulated.act(seconds)
        found.append(emulated.slowdown)
    assert found == [{"n0": 1.0, "n1": factor, "n2": 1.0, "n3": 1.0} for factor in (1.0, 3.0, 3.0, 1.0)]


def test_the_coordinator_is_told_when_a_node_is_slowed_down():
    made = spec(EPISODE.replace("2.0", "1000.0"))
    pretend = PretendProcesses(made.job)
    with LiveSystem(made, pretend, emulates=True) as live:
        until(live, lambda: pretend.slowdowns)
        live.perform(Run(seconds=0.2))
    assert pretend.slowdowns == [{"n0": 1.0, "n1": 3.0, "n2": 1.0, "n3": 1.0}]


def test_a_node_that_goes_and_comes_back_between_two_looks_has_lost_its_processes():
    made = spec(GOES)
    pretend = PretendProcesses(made.job)
    emulated = EmulatedNodes(pretend, made)
    emulated.start(["worker/n1", "server/n2"])
    assert [e.event for e in emulated.act(1.3)] == ["failed", "joined", "leaving"]
    assert emulated.nodes == pretend.nodes
    assert emulated.lost() == {"worker/n1": "the scenario takes the node away"}
    assert emulated.lost() == {}


def test_processes_of_an_absent_node_start_when_it_joins():
    made = spec('nodes = [{ nodes = ["n1"], seconds = 5.0, event = "joins" }]', ONES.replace('["n0", "n1"]', '["n0"]', 1))
    pretend = PretendProcesses(made.job)
    emulated = EmulatedNodes(pretend, made)
    emulated.start(["worker/n0", "worker/n1", EVALUATOR])
    assert set(pretend.coming) == {"worker/n0", EVALUATOR}
    emulated.act(4.0)
    assert emulated.nodes == {"n0", "n2", "n3"}
    emulated.act(5.0)
    assert set(pretend.coming) == {"worker/n0", "worker/n1", EVALUATOR}
    assert emulated.nodes == pretend.nodes


def test_the_slowdown_of_a_node_reaches_its_worker(tmp_path, held):
    made = spec('episodes = [{ node = "n1", start_seconds = 0.1, seconds = 1000.0, factor = 3.0 }]')
    seen = {}
    compute = Ones.compute

    class Watched(Ones):
        def compute(self, task):
            seen.setdefault(task.work.slowdown, set()) if task.work else None
            return compute(self, task)

    watched = Watched(made.name, made.origin, made.text, made.seed)
    with thread_processes(watched, tmp_path) as processes, LiveSystem(watched, processes, emulates=True) as live:
        until(live, lambda: 1.0 in seen)
        held()
        until(live, lambda: 3.0 in seen)
        clocks, lost, parameters = counted(live)
        assert (lost, set(parameters)) == (0, {clocks})
    assert seen.keys() == {1.0, 3.0}
