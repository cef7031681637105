"""How a live job ends: what is in progress then is told, counts as overhead, and delays the end by no more than a limit."""

import time

import pytest

from harness.drive import play
from harness.live.driver import control
from harness.live.driver.system import LiveSystem
from harness.live.worker.spec import Spec
from harness.scenario import load
from harness.score import score
from tests.live.support.pretend import PretendProcesses, end_budget
from tuners.actions import Cost, Evaluate, Fork, Free, Reconfigure, Rejected, Run

NEVER = 1e6  # seconds
SOON = 0.3
SERVERS = ("server/n3", "server/n4")


def ending(value=1e-200):
    """A job with a target that it does not reach, or does, and a budget that only `end_budget` ends."""
    return Spec.of(load(f'live-digits[metric="loss",value={value},seconds=1000]'), 0)


def wait_for_start(processes):
    """Wait until the driver has asked for new processes."""
    while not processes.coming:
        time.sleep(0.01)


def costs(played):
    """Of all changes and recoveries: told by windows, or answered."""
    for exchange in played.exchanges:
        yield from getattr(exchange.answer, "changes", ())
        if isinstance(exchange.answer, Cost) and exchange.answer.seconds > 0:
            yield exchange.answer


def lose(live, processes, *names):
    """Kill these processes, and let the driver begin to repair that."""
    with live.control.news:
        processes.kill(*names)
        while live.control.procedure is None:
            live.control.update()


def let_join(live, processes):
    """What is starting is there from now on."""
    with live.control.news:
        processes.join_seconds, processes.coming = 0.0, dict.fromkeys(processes.coming, 0.0)


@pytest.mark.parametrize("wait", [True, False], ids=["the tuner waits", "the tuner goes on"])
@pytest.mark.parametrize("method", ["migrate", "relocate", "checkpoint"])
def test_a_change_in_progress_when_the_budget_ends_is_overhead(method, wait):
    spec, kept = ending(), []
    processes = PretendProcesses(spec.job)

    def changes(job):
        yield from Run(clocks=1)
        processes.join_seconds = NEVER
        if wait:
            processes.started = lambda: end_budget(job, live.now + SOON)
        yield from Reconfigure(job.space.setting({"worker_count": 4}), method=method, wait=wait)
        if not wait:
            wait_for_start(processes)
            end_budget(job, live.now + SOON)

    with LiveSystem(spec, processes, keep=kept.append) as live:
        played = play(changes, live)
        (cost,) = costs(played)
        row = score(played, scenario="s", tuner="t", seed=0).score
        assert (played.outcome.status, cost.done) == ("budget", False)
        assert row.overhead_seconds + row.slow_seconds > 0
        assert (row.slow_seconds == 0) == (method == "checkpoint")
        assert row.clocks <= live.job_status().clocks
        let_join(live, processes)
        live.checkpoint()
        assert len(kept) == 1


def test_a_recovery_is_told_with_its_cost():
    spec = ending()
    processes = PretendProcesses(spec.job, join_seconds=0.03, move_seconds=0.02)
    with LiveSystem(spec, processes) as live:
        for name, steps in (("server/n4", ("detect", "restore")), ("worker/n1", ("detect",))):
            live.perform(Run(clocks=5))
            processes.kill(name, for_good=True)
            seen = live.perform(Run(clocks=5))
            while not seen.changes:
                seen = live.perform(Run(clocks=5))
            (cost,) = seen.changes
            assert (cost.done, cost.steps) == (True, steps)
            assert 0 <= cost.stall_seconds <= cost.seconds
        processes.kill("worker/evaluator")
        seen = [live.perform(Run(clocks=50)) for _ in range(3)]
        assert not any(window.changes for window in seen)  # it does not train


def test_a_recovery_in_progress_when_the_budget_ends_is_overhead():
    spec = ending()
    processes = PretendProcesses(spec.job)

    def loses(job):
        yield from Run(clocks=1)
        processes.join_seconds = NEVER
        processes.kill(*SERVERS)
        wait_for_start(processes)
        end_budget(job, live.now + SOON)

    with LiveSystem(spec, processes) as live:
        played = play(loses, live)
    (cost,) = costs(played)
    assert not cost.done
    assert score(played, scenario="s", tuner="t", seed=0).score.overhead_seconds > 0


@pytest.mark.parametrize("action", [Reconfigure, Fork, Free, Evaluate])
def test_no_action_waits_beyond_the_budget_for_what_is_lost(action):
    spec = ending()
    processes = PretendProcesses(spec.job)
    with LiveSystem(spec, processes) as live:
        child = live.perform(Fork(0))
        processes.join_seconds = NEVER
        processes.answers.evaluate = lambda _: 10**9  # never answered
        lose(live, processes, *SERVERS)
        end_budget(live.job, live.now + SOON)
        setting = live.job.space.setting({"worker_count": 4})
        wanted = {Reconfigure: Reconfigure(setting), Fork: Fork(0), Free: Free(child), Evaluate: Evaluate()}[action]
        with pytest.raises(Rejected, match="the budget ended"):
            live.perform(wanted)


def test_a_last_checkpoint_does_not_wait_for_ever_for_nodes(monkeypatch):
    monkeypatch.setattr(control, "REPAIR_SECONDS", 0.1)
    spec = ending()
    processes = PretendProcesses(spec.job)
    with LiveSystem(spec, processes) as live:
        live.perform(Run(clocks=5))
        processes.join_seconds = NEVER
        lose(live, processes, *SERVERS)
        with pytest.raises(RuntimeError, match=r"still waits for nodes or processes that it has lost, 0\.1 s later"):
            live.checkpoint()


@pytest.mark.parametrize("end", ["target", "budget"])
def test_what_a_job_does_while_its_tuner_thinks_is_told(end):
    spec = ending(value=0.2) if end == "target" else ending()

    def thinks(_):
        yield from Run(clocks=5)
        if end == "budget":
            end_budget(spec.job, live.now + SOON)
        while live.status == "running" and live.now < spec.job.budget_seconds:
            time.sleep(0.01)
        yield from Run(clocks=5)

    with LiveSystem(spec, PretendProcesses(spec.job, learning=0.2)) as live:
        played = play(thinks, live)
        row = score(played, scenario="s", tuner="t", seed=0).score
        assert played.outcome.status == end
        if end == "target":
            assert row.clocks == live.job_status().clocks
        assert row.clocks > 5
        assert [e.asked for e in played.exchanges] == [True, False]
        assert played.exchanges[-1].answer.end_seconds <= spec.job.budget_seconds
