"""A link that becomes slow is found, and so is its node; one that was slow from the start, or slow for all, is no fault."""

import time
from dataclasses import replace

import pytest

from harness.live.driver.repairs import job_repairs, links, slow_links
from harness.live.driver.repairs.links import LinkMonitor
from harness.live.driver.system import LiveSystem
from harness.live.processes.transfers import Transfer, TransferMeter
from harness.live.protocol.log import CommitEntry, NextCycle
from harness.live.protocol.messages import GradientDone, LogAppend, PushStaged, Release
from harness.live.worker.spec import Spec
from tests.live.support.ones import ONES, Ones
from tests.live.support.pretend import PretendProcesses, history
from tuners.actions import Run

SETTING = Ones("ones", "ones.toml", ONES, 0).job.start  # workers n0, n1; servers n2, n3
THERE = {"worker/n0": 1, "worker/n1": 1, "server/n2": 1, "server/n3": 1}
LOOK_SECONDS = 0.5


def look(known, seconds_of, *, pushes=20, looks=1, setting=SETTING, processes=THERE):
    """So many looks at a job whose transfers take so long; of a transfer's two nodes the slower one counts."""
    for _ in range(looks):
        found = {
            (w, s): Transfer(pushes, max(seconds_of.get(w, 0.01), seconds_of.get(s, 0.01)), 8)
            for w in setting.workers
            for s in setting.servers
        }
        known.add(setting, processes, LOOK_SECONDS, found)


def fast(setting=SETTING):
    known = LinkMonitor()
    look(known, {}, looks=10, setting=setting)
    return known


@pytest.mark.parametrize("node", ["n0", "n1", "n2", "n3"])
def test_a_link_that_becomes_slow_is_found_within_seconds_and_so_is_whose_it_is(node):
    known = fast()
    look(known, {node: 0.4}, pushes=1, looks=7)
    assert known.slow_link() is None  # not for long enough
    look(known, {node: 0.4}, pushes=1, looks=1)
    found = known.slow_link()
    assert (found.node, found.seconds, found.before_seconds, found.blocks) == (node, 0.4, 0.01, 8)
    assert found.hinders  # a twentieth of the pushes: the other alone makes half of them


@pytest.mark.parametrize("role", ["workers", "servers"])
def test_the_only_one_of_its_role_is_found_among_several_of_the_other(role):
    alone = replace(SETTING, **{role: getattr(SETTING, role)[:1]})
    known = fast(alone)
    look(known, {getattr(alone, role)[0]: 0.4}, pushes=1, looks=10, setting=alone)
    found = known.slow_link()
    assert found.node == getattr(alone, role)[0]
    assert not found.hinders  # nothing goes without it


def test_one_of_a_pair_cannot_be_told_from_the_other():
    pair = replace(SETTING, workers=("n0",), servers=("n2",))
    known = fast(pair)
    look(known, {"n0": 0.4}, looks=10, setting=pair)
    assert known.slow_link() is None


def test_a_node_that_works_and_serves_is_not_judged_by_what_it_sends_itself():
    both = replace(SETTING, workers=("n0", "n1", "n2"), servers=("n0", "n1", "n2"))
    known = LinkMonitor()
    for slow, looks in ((set(), 10), ({"n1"}, 10)):
        for _ in range(looks):
            found = {
                (w, s): Transfer(9, 0.5 if w != s and slow & {w, s} else 0.01, 8) for w in both.workers for s in both.servers
            }
            known.add(both, THERE, LOOK_SECONDS, found)
    assert known.slow_link().node == "n1"


def unlike(known):
    look(known, {"n0": 0.4}, looks=40)


def all_slow(known):
    look(known, {}, looks=10)
    look(known, dict.fromkeys(("n0", "n1", "n2", "n3"), 0.4), looks=10)


def hiccup(known):
    look(known, {}, looks=10)
    for _ in range(5):
        look(known, {"n2": 0.4}, looks=3)
        look(known, {}, looks=5)


def a_little_longer(known):
    look(known, {}, looks=10)
    look(known, {"n0": 0.055}, looks=10)


def another_setting(known):
    look(known, {}, looks=10)
    look(known, {"n0": 0.4}, looks=20, setting=replace(SETTING, batch_size=64))


def another_process(known):
    look(known, {}, looks=10)
    look(known, {"n0": 0.4}, looks=20, processes=THERE | {"worker/n0": 2})


def nothing_comes(known):
    look(known, {}, looks=10)
    look(known, {}, pushes=0, looks=20)


KINDS = (unlike, all_slow, hiccup, a_little_longer, another_setting, another_process, nothing_comes)
NO_FAULTS = {what.__name__: what for what in KINDS}


@pytest.mark.parametrize("what", NO_FAULTS)
def test_what_is_no_fault_is_left_alone(what):
    known = LinkMonitor()
    NO_FAULTS[what](known)
    assert known.slow_link() is None


def test_times_of_transfers_are_read_from_messages():
    meter = TransferMeter()
    for number, released in ((1, 10.0), (2, 20.0)):
        release = Release(number, 0, 0, 0, 0, 8, 0, 64)
        if number == 1:
            meter.sent("worker/n0", release, released)
        else:  # a commit, sent to servers, lets the worker begin
            entry = CommitEntry(0, "worker/n0", 1, True, True, 1, 1.0, 1, 0.1, 0.0, (NextCycle("worker/n0", 2, 1, 1),))
            meter.sent("server/n2", LogAppend(1, entry), released)
            meter.sent("server/n3", LogAppend(1, entry), released + 1.0)
        meter.sent("worker/n0", release, released + 2.0)  # sent again
        done = GradientDone(number, 1.0, 0.25, 0.5, 0)
        meter.received("server/n2", PushStaged("worker/n0", number, ((0, 8),), done), released + 0.85)
        meter.received("server/n3", PushStaged("worker/n0", number, ((8, 12), (14, 16)), done), released + 1.75)
        meter.received("server/n3", PushStaged("worker/n0", number - 1, ((8, 16),), done), released + 9.0)  # of the past
    found = meter.take()
    assert {pair: (t.pushes, t.blocks) for pair, t in found.items()} == {("n0", "n2"): (2, 8), ("n0", "n3"): (2, 6)}
    assert [t.seconds for t in found.values()] == pytest.approx([0.1, 1.0])
    assert meter.take() == {}


def test_of_many_pushes_the_first_are_measured_and_all_are_counted():
    meter = TransferMeter()

    def push(number, seconds):
        meter.sent("worker/n0", Release(number, 0, 0, 0, 0, 8, 0, 64), 10.0 * number)
        done = GradientDone(number, 1.0, 0.0, 0.0, 0)
        meter.received("server/n2", PushStaged("worker/n0", number, ((0, 8),), done), 10.0 * number + seconds)

    for number in range(1, 301):
        push(number, 0.5 if number <= 100 else 5.0)
    assert meter.take() == {("n0", "n2"): (300, 0.5, 8)}
    push(301, 2.0)  # a link that has become slow meanwhile shows at the next look
    assert meter.take() == {("n0", "n2"): (1, 2.0, 8)}


# --------------------------------------------------------------------------------------------------- what is done about it


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(slow_links, "LINKS_SECONDS", 0.02)
    monkeypatch.setattr(links, "LOOK_BACK_SECONDS", 0.2)


def until(live, so, seconds=30.0):
    windows, end = [], time.monotonic() + seconds
    while not windows or not so(windows[-1]):
        assert time.monotonic() < end, live.job_status().events
        windows.append(live.perform(Run(seconds=0.05)))
    return windows


@pytest.fixture
def pretend(quickly):
    spec = Spec("ones", "ones.toml", ONES, 0)
    pretend = PretendProcesses(spec.job)
    with LiveSystem(spec, pretend) as live:
        live.perform(Run(seconds=0.3))
        yield live, pretend


@pytest.mark.parametrize("node", ["n1", "n3"])
def test_a_node_whose_link_becomes_slow_moves_to_another_machine(pretend, node):
    live, processes = pretend
    processes.spares = 1
    processes.slow.add(node)
    windows = until(live, lambda _: "is back" in history(live))
    windows.append(live.perform(Run(clocks=5)))
    events = [(e.node, e.event) for w in windows for e in w.events]
    assert events == [(node, "failed"), (node, "joined")]
    assert "its link is slow: 0.048 MB/s where it was 3.8" in history(live)
    until(live, lambda w: w.setting == live.job.start)


def test_without_another_machine_it_stays_if_it_does_not_hinder_the_others(pretend):
    live, processes = pretend
    processes.slow.add("n1")
    until(live, lambda _: "n1 stays on its machine, for no other is free" in history(live))
    live.perform(Run(seconds=0.5))
    assert history(live).count("n1 stays") == 1
    assert live.perform(Run(clocks=5)).setting == live.job.start


def test_without_another_machine_it_is_left_out_if_it_hinders_the_others(pretend):
    live, processes = pretend
    processes.slow.add("n1")
    processes.cycle_seconds *= 12
    until(live, lambda w: w.setting.workers == ("n0",))
    started = list(processes.coming)
    live.perform(Run(seconds=0.3))
    assert "worker/n1" not in (*started, *processes.coming, *processes.members)
    processes.spares = 1
    until(live, lambda w: w.setting == live.job.start)


@pytest.mark.parametrize("spares", [0, 1])
def test_training_pauses_only_for_a_node_that_moves_and_not_for_long(quickly, monkeypatch, spares):
    monkeypatch.setattr(job_repairs, "COPY_SECONDS", 0.1)
    spec = Ones("ones", "ones.toml", ONES.replace('servers = ["n2", "n3"]', 'servers = ["n1", "n2"]'), 0)
    pretend = PretendProcesses(spec.job)
    pretend.answers.snapshot = lambda: 10**9  # never durable
    with LiveSystem(spec, pretend) as live:
        live.perform(Run(seconds=0.3))
        pretend.spares, pretend.slow = spares, {"n1"}
        until(live, lambda _: ("is back" if spares else "n1 stays") in history(live))
        assert live.perform(Run(clocks=5)).clocks >= 5
    assert pretend.asked.count("rest") == spares
