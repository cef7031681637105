"""The driver of a live job: actions, windows, losses; and BSP learns as in the simulator."""

import errno
import pickle
import re
import threading
import time
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from harness.drive import play
from harness.live.driver import control, starting
from harness.live.driver.checkpoints import checkpoint_file, job_saver
from harness.live.driver.repairs.standstill import Limits
from harness.live.driver.system import LiveSystem
from harness.live.protocol.names import peers
from harness.live.worker.spec import Spec
from harness.scenario import load, system
from tests.live.support.pretend import PretendProcesses, events
from tests.live.support.threads import thread_processes
from tuners import resolve
from tuners.actions import (
    Decision,
    Evaluate,
    Fork,
    Free,
    Install,
    Reconfigure,
    Rejected,
    Run,
    SyncPolicy,
)

ENDLESS = 'live-digits[metric="loss",value=1e-200]'


@pytest.fixture(scope="module")
def spec():
    made = Spec.of(load(ENDLESS), 0)
    made.warm_up()
    made.warm_up(validates=True)
    return made


def losses(*windows):
    """By worker and mini-batch."""
    return {
        (int(w), int(c)): loss
        for seen in windows
        for w, c, loss in zip(seen.pushes.worker, seen.pushes.clock, seen.pushes.loss, strict=True)
    }


def assert_alike(live, simulated):
    common = live.keys() & simulated.keys()
    assert len(common) >= len(live) - 2  # of the last barrier, others may have come first
    assert max(abs(live[k] - simulated[k]) for k in common) < 1e-5


# ------------------------------------------------------------------------------------------------ real gradients, on threads


def test_bsp_live_is_bsp_simulated(spec, tmp_path):
    with thread_processes(spec, tmp_path) as processes, LiveSystem(spec, processes) as live:
        seen = live.perform(Run(clocks=120))
    assert_alike(losses(seen), losses(system(load(ENDLESS), 0).perform(Run(clocks=123))))


@pytest.fixture(scope="module")
def alone():
    """One worker: a mini-batch that is begun again after a restart finds what it found before."""
    text = load(ENDLESS).text.replace("worker_count = 3", "worker_count = 1")
    return Spec("alone", "alone.toml", text, 0)


def test_a_job_continues_from_a_checkpoint_as_if_it_had_not_stopped(spec, tmp_path):
    kept = []
    with thread_processes(spec, tmp_path / "one") as processes, LiveSystem(spec, processes, keep=kept.append) as live:
        first = live.perform(Run(clocks=40))  # and somewhere in the fourteenth round or later:
        before = live.now
        live.checkpoint()
    with thread_processes(spec, tmp_path / "two") as processes, LiveSystem(spec, processes, kept[-1]) as live:
        assert live.now >= before
        second = live.perform(Run(clocks=40))
    assert first.clocks == 40
    assert second.clocks >= 40  # those that came before the checkpoint and that nobody had seen are among them
    count = first.clocks + second.clocks
    assert_alike(losses(first, second), losses(system(spec.scenario, 0).perform(Run(clocks=count + 3))))


def test_a_policy_that_a_tuner_installed_is_given_by_the_tuner_again(spec, tmp_path):
    """A checkpoint has no code: the policy comes from the tuner, which is replayed, and its state from the checkpoint."""
    kept, policy = [], _alternating()
    with thread_processes(spec, tmp_path / "one") as processes, LiveSystem(spec, processes, keep=kept.append) as live:
        live.perform(Run(clocks=10))
        live.perform(Install(policy))
        child = live.perform(Fork(0))
        live.perform(Run(clocks=30, branch=child))
        live.checkpoint()
        turns = _turns(processes, child)
    assert turns > 0
    refused = pytest.raises(ValueError, match=r"Cannot resume: .*exchange 1 installed no policy")
    with thread_processes(spec, tmp_path / "two") as processes, refused:
        LiveSystem(spec, processes, kept[-1])
    with (
        thread_processes(spec, tmp_path / "three") as processes,
        LiveSystem(spec, processes, kept[-1], installed={1: policy}) as live,
    ):
        assert _turns(processes, child) >= turns
        assert live.control.view.branches[child].policy is live.control.view.branches[0].policy is policy
        assert live.perform(Run(clocks=30, branch=child)).clocks >= 30


def _alternating():
    """A policy with a state: the number of pushes."""
    return SyncPolicy(
        "alternating",
        lambda active: {"turns": jnp.zeros((), jnp.int32)},
        lambda state, push: ({"turns": state["turns"] + 1}, Decision(release=push.waiting)),
    )


def _turns(processes, branch):
    return int(processes.process._core.branches.by_number[branch].state["turns"])


def test_a_doctored_checkpoint_runs_no_command(spec, tmp_path):
    """Of any of its tensors, with a digest that is right."""
    kept, ran = [], tmp_path / "ran"
    with thread_processes(spec, tmp_path / "one") as processes, LiveSystem(spec, processes, keep=kept.append) as live:
        live.checkpoint()

    class Command:
        def __reduce__(self):
            return Path.touch, (ran,)

    code = np.frombuffer(pickle.dumps(Command()), np.uint8)
    for tensor in ("driver", "coordinator"):
        checkpoint_file.save(tmp_path / "c", replace(kept[-1], tensors=dict(kept[-1].tensors) | {tensor: code}))
        with thread_processes(spec, tmp_path / tensor) as processes, pytest.raises(ValueError, match=r"damaged"):
            LiveSystem(spec, processes, checkpoint_file.load(tmp_path / "c"))
    assert not ran.exists()


def test_a_job_whose_driver_died_continues_from_its_latest_checkpoint(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(job_saver, "CHECKPOINT_SECONDS", 0.2)
    kept = []
    with thread_processes(alone, tmp_path / "one") as processes, LiveSystem(alone, processes, keep=kept.append) as live:
        seen = [live.perform(Run(clocks=10))]
        while not kept:
            seen.append(live.perform(Run(clocks=10)))
        now = live.now  # the checkpoint may have come after the last window
    assert 0.2 <= kept[0].state["seconds"] <= now
    answered = kept[0].state["exchanges"]  # so many answers bring the tuner to its state of then
    assert answered <= sum(w.end_seconds < kept[0].state["seconds"] for w in seen) <= answered + 1
    with thread_processes(alone, tmp_path / "two") as processes, LiveSystem(alone, processes, kept[0]) as live:
        second = live.perform(Run(clocks=40))
    count = int(max(second.pushes.clock)) + 1
    assert_alike(losses(*seen[:answered], second), losses(system(alone.scenario, 0).perform(Run(clocks=count))))


def test_every_action_on_real_servers(spec, tmp_path):
    start = spec.job.start
    fewer = spec.job.space.setting({"worker_count": 2})
    with thread_processes(spec, tmp_path) as processes, LiveSystem(spec, processes) as live:
        for method, setting in (("migrate", fewer), ("relocate", start), ("checkpoint", fewer)):
            cost = live.perform(Reconfigure(setting, method=method))
            assert cost.done
            assert 0 <= cost.stall_seconds <= cost.seconds
            assert cost.bytes_moved > 0
            assert live.perform(Run(clocks=20)).setting == setting
        live.perform(Install(_probing()))
        assert live.perform(Run(clocks=20)).clocks >= 20
        child = live.perform(Fork(0, replace(start, learning_rate=0.1)))
        tester = live.perform(Fork(0, testing=True))
        learned = live.perform(Run(clocks=60, branch=child))
        assert learned.setting.workers == start.workers
        at_rest = live.perform(Evaluate(tester))
        live.perform(Run(clocks=20, branch=tester))
        assert live.perform(Evaluate(tester)).loss == pytest.approx(at_rest.loss, rel=1e-6)  # it applies nothing
        assert live.perform(Evaluate(child)).loss < at_rest.loss
        live.perform(Free(tester))
        with pytest.raises(Rejected, match="never forked, or was freed"):
            live.perform(Run(clocks=1, branch=tester))


def _probing():
    """A policy that must be shown losses around its pushes, and lets go only who made it better."""

    def decide(state, push):
        seen = jnp.isfinite(push.loss_before) & jnp.isfinite(push.loss_after) & (push.loss_before > 0)
        return state, Decision(release=push.waiting & seen)

    return SyncPolicy("probing", lambda active: jnp.zeros(()), decide, probes=True)


# ---------------------------------------------------------------------------------------- a coordinator that only pretends


@pytest.fixture
def pretend(spec):
    return PretendProcesses(spec.job, join_seconds=0.03, move_seconds=0.02)


@pytest.fixture
def live(spec, pretend):
    with LiveSystem(spec, pretend) as made:
        yield made


def test_a_mini_batch_that_is_never_completed_does_not_delay_a_checkpoint_for_long(spec, pretend, monkeypatch):
    monkeypatch.setattr(control, "FINISH_SECONDS", 0.1)
    pretend.answers.finish = lambda: False
    kept = []
    with LiveSystem(spec, pretend, keep=kept.append) as live:
        seen = live.perform(Run(clocks=10))
        live.checkpoint()
    assert kept[0].state["seconds"] >= seen.end_seconds + 0.1
    asked = [question for question in pretend.asked if question != "transfers"]  # that comes every half a second
    assert asked[-4:] == ["rest", "snapshot", "checkpoint", "saved"]


def test_a_full_disk_at_a_checkpoint_is_said_and_the_job_goes_on(spec, pretend, monkeypatch):
    monkeypatch.setattr(job_saver, "CHECKPOINT_SECONDS", 0.1)
    kept = []

    def keep(saved):
        kept.append(saved)
        if len(kept) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with LiveSystem(spec, pretend, keep=keep) as live:
        while len(kept) < 3:
            assert live.perform(Run(clocks=10)).status == "running"
        said = [what for _, what in live.job_status().events]
        why = "the checkpoint is not written: No space left on device; the job goes on, and the next one is due in 0.1 s"
        assert said.count(why) == 2
        live.checkpoint()
        kept.clear()
    with LiveSystem(spec, PretendProcesses(spec.job), keep=keep) as live, pytest.raises(OSError, match="No space left"):
        live.checkpoint()  # the last one: who asks for it is told


def test_a_job_that_stands_still_is_diagnosed_and_recovered(spec, pretend):
    with LiveSystem(spec, pretend, limits=Limits(still_seconds=0.3)) as live:
        live.perform(Run(clocks=20))
        pretend.stuck = ("server/n2",)  # where only workers are waited for, they are replaced
        pretend.answers.recover = lambda servers=(), shares=(), owners=(): setattr(pretend, "stuck", ())
        assert live.perform(Run(clocks=20)).clocks >= 20
        assert any(e.startswith("no push for") and e.endswith("server/n2 hangs") for _, e in live.job_status().events)


def test_who_holds_a_job_up_is_replaced(spec, pretend):
    with LiveSystem(spec, pretend, limits=Limits(still_seconds=0.3)) as live:
        live.perform(Run(clocks=20))
        pretend.stuck, start = ("worker/n0",), pretend.start

        def replaced(names):
            pretend.stuck = ()
            start(names)

        pretend.start = replaced
        assert live.perform(Run(clocks=20)).clocks >= 20
        said = [what for _, what in live.job_status().events]
        assert "worker/n0 is lost: training waited too long" in said


def test_a_job_that_stays_still_ends_with_the_reason(spec, pretend):
    with LiveSystem(spec, pretend, limits=Limits(still_seconds=0.1)) as live:
        live.perform(Run(clocks=20))
        pretend.stuck = ("worker/n0",)
        with pytest.raises(RuntimeError, match=r"no push for \d+ s, and nothing helped: worker/n0 hangs"):
            live.perform(Run(clocks=20))


def test_processes_start_beside_the_coordinator(spec, pretend, monkeypatch):
    begun = []
    start = pretend.start
    monkeypatch.setattr(pretend, "start", lambda names: begun.append((sorted(names), list(pretend.asked))) or start(names))
    with LiveSystem(spec, pretend) as live:
        names = sorted([*peers(live.job.start), "worker/evaluator"])
        assert begun == [(names, [])]  # before anything is asked of the coordinator, which waits until it is up


def test_what_starts_is_shown_while_it_starts(spec, monkeypatch):
    monkeypatch.setattr(starting, "SAY_SECONDS", 0.05)
    said, pretend = [], PretendProcesses(spec.job, join_seconds=1e6)

    def say(line):
        said.append(line)
        if line.startswith("0 of 6"):
            pretend.come_up(0.3)

    with LiveSystem(spec, pretend, say=say):
        ready, first, last = said  # one line for each step, however long it takes
        assert ready == "The coordinator is ready; the other processes are starting."
        assert first.startswith("0 of 6 processes are ready; joining, 1 s: server/")
        assert "; compiling, 1 s: worker/" in first
        assert last == "6 of 6 processes are ready; training begins."
    with pytest.raises(
        RuntimeError, match=r"Cannot start server/.* within 0\.1 s \(joining, .* compiling, .* Allow more with --join-limit"
    ):
        LiveSystem(spec, PretendProcesses(spec.job, join_seconds=9.0), limits=Limits(join_seconds=0.1))
    pretend = PretendProcesses(spec.job, join_seconds=9.0)
    pretend.answers.starting = dict  # Ray has started none of them
    with pytest.raises(
        RuntimeError, match=r"\(not up yet: .*--join-limit\. Ray has not started .* ports .* no memory left\."
    ):
        LiveSystem(spec, pretend, limits=Limits(join_seconds=0.1))


def test_what_is_refused_is_told_once_however_often_it_is_asked(live):
    """The screen had the tuner's reason, as if it had been done, as often as it was asked."""
    wanted = replace(live.job.start, workers=("nobody",))
    for _ in range(3):
        with pytest.raises(Rejected):
            live.perform(Reconfigure(wanted, reason="faster"))
    live.perform(Run(clocks=1))
    with pytest.raises(Rejected):
        live.perform(Reconfigure(wanted))
    told = [what for _, what in live.job_status().events]
    assert [what.partition(":")[0] for what in told] == ["tuner", "refused", "refused"]
    assert told[0] == "tuner: faster"
    assert "'nobody'" in told[1]


def test_a_process_that_does_not_start_is_told_again_and_again_and_with_what_may_help(spec, monkeypatch):
    """The screen stood still for five minutes, and only then said what Ray may lack."""
    clock = [0.0]  # which only the waiting moves
    moves = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setattr(starting, "time", moves)
    said, pretend = [], PretendProcesses(spec.job, join_seconds=1e6)
    pretend.answers.starting = dict  # Ray has started none of them
    pretend.lost = lambda: {} if clock[0] < 50.0 else {"server/n3": "the user has seen enough"}
    with pytest.raises(RuntimeError, match="Cannot start server/n3: the user has seen enough"):
        LiveSystem(spec, pretend, say=said.append)
    assert said.pop(0) == "The coordinator is ready; the other processes are starting."
    told = re.compile(r"0 of 6 processes are ready after (\d+) s; not up yet: server/([^.]*)(.*)")
    lines = [told.fullmatch(line) for line in said]
    times = [int(line[1]) for line in lines]
    assert all(10 <= after - before <= 10 + 4 for before, after in pairwise([0, *times]))
    assert [line[3].endswith("or the machine has no memory left.") for line in lines] == [seconds > 30 for seconds in times]
    assert times[-1] > 30


def test_a_setting_that_changes_while_branches_are_switched_gets_its_processes(live, pretend, monkeypatch):
    """A node returns, or is lost, just when the processes of the former setting have joined."""
    start = live.job.start
    child = live.perform(Fork(0, replace(start, workers=start.workers[:2])))
    carry_out, changes = live.control.carry_out, [start]

    def and_then_it_changes(make, latest_seconds):
        done = carry_out(make, latest_seconds)
        if changes:
            live.control.view.branches[child].setting = changes.pop()
        return done

    pretend.stop([f"worker/{start.workers[2]}"])
    monkeypatch.setattr(live.control, "carry_out", and_then_it_changes)
    assert live.perform(Run(clocks=10, branch=child)).setting == start
    assert f"worker/{start.workers[2]}" in pretend.members


def test_windows_follow_one_another_and_lose_nothing(live):
    seen = [live.perform(Run(clocks=25))]
    time.sleep(0.1)  # the tuner thinks, training goes on, and the next window tells of it
    seen.append(live.perform(Run(clocks=10)))
    seen.append(live.perform(Run(seconds=0.15)))
    assert [w.clocks for w in seen[:1]] == [25]
    assert seen[1].clocks > 10
    assert seen[2].seconds == pytest.approx(seen[2].end_seconds - seen[1].end_seconds, abs=1e-9)
    moments = np.concatenate([w.pushes.seconds for w in seen])
    assert (np.diff(moments) >= 0).all()
    for worker in range(3):  # every mini-batch once
        clocks = np.concatenate([w.pushes.clock[w.pushes.worker == worker] for w in seen])
        np.testing.assert_array_equal(clocks, np.arange(len(clocks)))
    for before, after in pairwise(seen):
        assert after.start_seconds == before.end_seconds
    told = [e.clocks for w in seen for e in w.evaluations]
    assert told == sorted(set(told))
    assert told[0] == 20
    assert seen[0].workers[0].node == "n0"
    assert sum(w.pushes for w in seen[2].workers) == seen[2].clocks


def test_a_reason_is_shown_with_the_events_of_the_job(live):
    live.perform(Run(clocks=4, reason="measured first: 3 s"))
    live.perform(Run(clocks=4))
    assert [what for _, what in live.job_status().events if what.startswith("tuner: ")] == ["tuner: measured first: 3 s"]


def test_a_policy_that_is_held_cannot_be_installed(spec, pretend, monkeypatch):
    monkeypatch.setitem(vars(spec), "job", replace(spec.job, installs_policies=False))
    with (
        LiveSystem(spec, pretend) as live,
        pytest.raises(Rejected, match="Cannot install policy 'probing': this scenario holds"),
    ):
        live.perform(Install(_probing()))


def test_a_reconfiguration_without_waiting_is_reported_by_a_window(live, spec, pretend):
    wider = spec.job.space.setting({"worker_count": 4})
    pretend.join_seconds = 1e6  # until we say so
    assert live.perform(Reconfigure(wider, method="relocate", wait=False)).seconds == 0
    with pytest.raises(Rejected, match="under way; run on until"):
        live.perform(Reconfigure(spec.job.start))
    with pytest.raises(Rejected, match="under way"):
        live.perform(Fork(0))
    with live.control.news:
        pretend.come_up()
    told, until = (), live.now + 60
    while not told and live.now < until:
        seen = live.perform(Run(seconds=0.05))
        told = seen.changes
    (cost,) = told
    assert (cost.done, seen.setting, cost.slow_seconds > 0) == (True, wider, True)
    assert cost.steps == ("switch n3", "start n3", "sweep 32 model blocks n3 -> n4")
    assert cost.bytes_moved == pytest.approx(32 / 64 * 4 * 19_210)


def test_a_setting_that_needs_no_steps_takes_effect_at_once(live, spec, pretend):
    quick = replace(spec.job.start, learning_rate=0.1, policy="ssp", staleness=2, batch_size=8)
    cost = live.perform(Reconfigure(quick))
    assert (cost.seconds, cost.steps) == (0.0, ())
    assert live.perform(Run(clocks=5)).setting == quick
    assert pretend.branches[0].policy.name == "ssp(2)"
    held = pretend.branches[0].policy
    live.perform(Reconfigure(replace(quick, learning_rate=0.2)))
    assert pretend.branches[0].policy is held


def test_another_branch_finds_the_model_where_its_setting_has_it(live, spec, pretend):
    wider = spec.job.space.setting({"worker_count": 4})
    child = live.perform(Fork(0, wider))
    before = live.now
    seen = live.perform(Run(clocks=8, branch=child))
    assert pretend.owners == ("server/n4",)
    assert {int(w) for w in seen.pushes.worker} == {0, 1, 2, 3}
    assert seen.start_seconds - before > 0.02  # the model moved, and nobody trained
    assert live.perform(Run(clocks=8)).setting == spec.job.start
    assert pretend.owners == ("server/n3", "server/n4")
    live.perform(Free(0))
    with pytest.raises(Rejected, match="it is the last one"):
        live.perform(Free(child))
    assert live.perform(Run(clocks=8, branch=child)).clocks >= 8


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"options": (("jit", True),)}, "this scenario holds it at"),
        ({"workers": ("n0", "n9")}, "this job has n0"),
        ({"batch_size": 64}, "this scenario allows"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_reason(live, spec, changed, why):
    with pytest.raises(Rejected, match=why):
        live.perform(Reconfigure(replace(spec.job.start, **changed)))
    with pytest.raises(Rejected, match="this system can checkpoint, migrate, relocate"):
        live.perform(Reconfigure(spec.job.start, method="teleport"))
    assert live.perform(Run(clocks=3)).setting == spec.job.start


def test_a_live_job_has_no_graph_options_and_no_second_device(spec):
    with pytest.raises(Rejected, match="its graph has none; leave them unset"):
        spec.check(replace(spec.job.start, options=(("jit", True),)))
    with pytest.raises(Rejected, match="on its first device only"):
        spec.check(replace(spec.job.start, loads=((8,), (8, 8), (16,))))


def test_a_live_job_keeps_one_owner_of_each_block():
    job = Spec("mine", "mine.toml", load("hot-keys").text.replace("[start]", "[start]\nreplicas = 2\nhot_blocks = 3"), 0)
    with pytest.raises(Rejected, match="Cannot hold 3 hot blocks on 2 servers each in a live job"):
        job.check(job.job.start)
    job.check(replace(job.job.start, hot_blocks=0))


def test_a_live_job_waits_for_no_quorum():
    job = Spec("mine", "mine.toml", load("live-digits").text, 0)
    with pytest.raises(Rejected, match="its policies set no timers; choose another policy"):
        job.check(replace(job.job.start, policy="quorum"))


DEMAND = "[workload.overrides.demand]"
CLICKS = 'name = "clicks-fm"'
BY_SHARE = re.sub(r"metric = .*\nvalue = .*", 'metric = "clocks"\nvalue = 100\nby_share = true', load("live-digits").text)
SELDOM = load("live-digits").text.replace("[start]", "[start]\npull_clocks = 4")
REVISING = load("live-digits").text.replace(DEMAND, f'[workload.overrides]\noptimizer = "adarevision"\n{DEMAND}')


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (load("cruise-lda-32").text, "is timing-only and learns nothing"),
        (load("slow-link").text, "takes no local steps; hold local_steps at 1"),
        (
            load("hot-keys").text.replace(CLICKS, f'{CLICKS}\noverrides = {{ optimizer = "adam" }}'),
            "Cannot apply the sparse",
        ),
        (SELDOM, "a live worker pulls before every mini-batch; hold pull_clocks at 1"),
        (load("checkpoints").text, "live servers have replicas and lose no work; hold checkpoint_seconds at 0"),
        (REVISING, "'adarevision' revises what it did before"),
        (BY_SHARE, "live jobs do not count work by share"),
    ],
)
def test_some_jobs_cannot_be_deployed(text, why):
    job = Spec("mine", "mine.toml", text, 0)
    with pytest.raises(ValueError, match=why):
        job.check(job.job.start)


# --------------------------------------------------------------------------------------------------------------- losses


def until(live, so, branch=0, seconds=60.0):
    """Train until a window is so; returns all windows."""
    windows, end = [], live.now + seconds
    while not (windows and so(windows[-1])):
        assert live.now < end, f"not within {seconds} s"
        windows.append(live.perform(Run(seconds=0.05, branch=branch)))
    return windows


@pytest.mark.parametrize(
    ("name", "meanwhile"),
    [("worker/n1", {"workers": ("n0", "n2")}), ("server/n4", {"servers": ("n3",)})],
)
def test_a_lost_process_is_replaced_and_gets_its_part_back(live, spec, pretend, name, meanwhile):
    node = name.partition("/")[2]
    live.perform(Run(clocks=10))
    pretend.join_seconds = 1e6  # until we say so
    pretend.kill(name)
    windows = until(live, lambda w: w.setting != spec.job.start and w.clocks)  # the others go on
    assert windows[-1].setting == replace(spec.job.start, **meanwhile)
    assert node not in [n.name for n in windows[-1].nodes]
    with pytest.raises(Rejected, match=f"Cannot use node '{node}': it is not there"):
        live.perform(Reconfigure(spec.job.space.setting({"worker_count": 2})))
    with live.control.news:
        pretend.come_up()
    windows += until(live, lambda w: w.setting == spec.job.start)
    assert events(windows) == [(node, "failed"), (node, "joined")]
    assert live.perform(Run(clocks=10)).clocks >= 10
    assert any("killed by the test" in what for _, what in live.job_status().events)


def test_a_loss_is_repaired_for_the_branch_that_trains(live, spec, pretend):
    live.perform(Fork(0, spec.job.space.setting({"worker_count": 4})))  # with one server
    live.perform(Run(clocks=5))
    pretend.kill("worker/n1", for_good=True)
    windows = until(live, lambda w: w.setting.workers == ("n0", "n2") and w.clocks)
    with live.control.news:
        live.control.wait_until_idle()
    assert pretend.branches[0].setting == windows[-1].setting
    assert pretend.owners == ("server/n3", "server/n4")


def test_another_branch_runs_on_the_survivors_of_its_setting(live, pretend):
    child = live.perform(Fork(0))
    live.perform(Run(clocks=5, branch=child))
    pretend.kill("worker/n1", for_good=True)
    until(live, lambda w: w.setting.workers == ("n0", "n2") and w.clocks, branch=child)
    assert live.perform(Run(clocks=5)).setting == pretend.branches[0].setting


@pytest.mark.parametrize(("name", "work"), [("server/n4", "repair"), ("worker/n1", "restore")])
def test_a_loss_is_repaired_before_branches_are_forked_or_freed(live, pretend, name, work):
    child = live.perform(Fork(0))
    live.perform(Run(clocks=5, branch=child))
    found = threading.Event()
    look = live.control.update

    def watched():
        look()
        if getattr(live.control.procedure, "__name__", "") == work:
            found.set()

    live.control.update, pretend.move_seconds = watched, 0.2
    pretend.kill(name)
    assert found.wait(60), live.job_status().events
    late = live.perform(Fork(child)) if work == "restore" else 0
    live.perform(Free(child))
    assert live.perform(Run(clocks=5, branch=late)).setting.workers == live.job.start.workers


def test_without_a_machine_for_it_the_job_continues_on_the_survivors(live, spec, pretend):
    pretend.kill("server/n4", for_good=True)
    windows = until(live, lambda w: w.setting.servers == ("n3",) and w.clocks)
    assert events(windows) == [("n4", "failed")]
    pretend.kill("server/n3", for_good=True)
    windows = until(live, lambda w: w.setting.servers == ("n1",) and w.clocks)
    assert windows[-1].setting.workers == ("n0", "n2")


def test_a_reconfiguration_that_needs_a_lost_node_is_given_up(live, spec, pretend):
    pretend.join_seconds, wider = 1e6, spec.job.space.setting({"worker_count": 4})
    live.perform(Reconfigure(wider, method="migrate", wait=False))
    pretend.kill("worker/n0")
    windows = until(live, lambda w: bool(w.changes))
    assert not windows[-1].changes[0].done
    with live.control.news:
        pretend.come_up()
    windows += until(live, lambda w: w.setting == spec.job.start)
    assert live.perform(Reconfigure(wider, method="migrate")).done


def test_a_broken_job_ends_in_an_error(live, pretend):
    pretend.answers.poll = lambda _: 1 / 0
    with pytest.raises(RuntimeError, match="The job is broken: division by zero"):
        live.perform(Run(seconds=30))


# --------------------------------------------------------------------------------------------------------------- tuners


ASKS = {"cruise": {"Run"}, "mltuner": {"Run", "Fork", "Free"}, "bo_online": {"Run", "Reconfigure"}, "rlp": {"Install"}}
"""Actions that each tuner certainly asks for in the short time."""


class _Enough(Exception):
    """A tuner has asked what it was to ask."""


@pytest.mark.parametrize("name", ["cruise", "mltuner", "bo_online", "rlp"])
def test_tuners_drive_a_live_job_unchanged(name):
    """For a second, and until the tuner has asked for those actions: a busy machine lets it think for longer."""
    import_module("emukit.model_wrappers")  # with GPy: a first thought could take longer than the job
    spec, kinds = Spec.of(load("live-digits[seconds=60]"), 0), set()

    def note(exchange):
        kinds.update({type(exchange.action).__name__} if exchange.asked else ())
        if ASKS[name] <= kinds and exchange.seconds > 1:
            raise _Enough

    with LiveSystem(spec, PretendProcesses(spec.job, cycle_seconds=0.002, learning=0.05)) as live:
        try:
            played = play(resolve(name).factory, live, watch=note)
        except _Enough:
            return
    assert played.outcome.status in ("target", "budget"), played.outcome.trace
    assert ASKS[name] <= kinds
