"""Cruise on its own arenas: what each cost model chooses in the simulator, and machines that come and go."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness import scenario
from harness.drive import play
from reports.papers.cruise_reach import MODELS, reached
from tuners.actions import Reconfigure, Rejected, Run, Window
from tuners.cruise import cruise
from tuners.cruise.placement import MachineKind, Placement, Problem, placement_seconds


def changes(found, workers=None, **options):
    """The settings that Cruise asked for, when it begins with so many workers."""
    start = scenario.job(found).start
    if workers is not None:
        names = tuple(n for n, _ in found.cluster.nodes)
        start = replace(start, workers=names[:workers], servers=names[workers:])
    played = play(partial(cruise, **options), scenario.system(found, seed=0, start=start))
    assert played.outcome.reason == ""
    assert not any(isinstance(e.answer, Rejected) for e in played.exchanges)
    return [e for e in played.exchanges if isinstance(e.action, Reconfigure)], played


@pytest.mark.parametrize("start", [27, 18])
def test_nmf_from_both_starts_of_table_iii(start):
    """Published: (24, 8) and (22, 10), best (23, 9). Here workers pull while others compute, which Eq. 5 does not know of:
    z = 1.81 makes (18, 14) its optimum. Counting on it, as by default, Cruise finds the best.
    """
    found = scenario.load("cruise-nmf-32")
    added, _ = changes(found, start, server_term="sum", overlap=False)
    assert [len(e.action.setting.workers) for e in added] == ([18] if start == 27 else [])
    overlapping, _ = changes(found, start)
    assert [len(e.action.setting.workers) for e in overlapping] == [23]


def test_opportunistic_machines_are_used_while_they_are_there():
    """Sec. V-D: 16 machines, 16 more every other 20 minutes. Published: (14, 2), (25, 7), (12, 4), (25, 7)."""
    text = scenario.load("cruise-nmf-32").text
    first = [f'"n{i}"' for i in range(16)]
    text = text.replace("worker_count = 10", f"workers = [{', '.join(first[:14])}]\nservers = [{', '.join(first[14:])}]")
    text = text.replace("value = 1900", "value = 8000").replace("check_clocks = 19", "check_clocks = 100")
    more = [f"n{i}" for i in range(16, 32)]
    for seconds, event, notice in ((1200, "joins", ""), (2400, "leaves", "notice_seconds = 300"), (3600, "joins", "")):
        text += f'\n[[conditions.nodes]]\nnodes = {more}\nseconds = {seconds}\nevent = "{event}"\n{notice}\n'
    asked, played = changes(scenario.parse(text, name="opportunistic", origin=Path("opportunistic.toml")))
    assert [len(e.action.setting.workers + e.action.setting.servers) for e in asked] == [16, 32, 16, 32]
    assert [len(e.action.setting.workers) for e in asked] == pytest.approx([12, 25, 12, 25], abs=2)
    last = [e.answer for e in played.exchanges if isinstance(e.answer, Window)][-1]
    assert last.setting == asked[-1].action.setting


WIDE_SERVER = """
summary = "Eight narrow workers and a server that serves 2.5 times as fast as they receive"
cluster.nodes = [{ type = "m4.large", count = 8 }, { type = "r4.4xlarge", count = 1, prefix = "wide" }]
workload.name = "cruise-nmf"
workload.overrides.demand.sample_seconds = 1e-4
start = { worker_count = 8, policy = "asp", batch_size = 10000 }
free.worker_count = { integer = [1, 8] }
target = { metric = "clocks", value = 100000, check_clocks = 100 }
budget.seconds = 1e7
conditions.jitter = 0.0
"""


def test_a_wide_server_serves_narrow_workers_side_by_side():
    """Each worker pulls as fast as its own NIC. "sum" and "paper" make the server serve them one after the other."""
    found = scenario.parse(WIDE_SERVER, name="wide", origin=Path("wide.toml"))
    system = scenario.system(found, seed=0)
    system.perform(Run(clocks=80))
    seen = system.perform(Run(clocks=160))
    job = system.job
    compute = float(seen.pushes.compute_seconds.mean()) / job.start.batch_size
    # A server may serve slower than its NIC.
    rates = (job.nodes[0].nic_bytes_per_second, found.cluster.nodes[8][1].service_bytes_per_second)
    kinds = tuple(
        MachineKind(count=count, compute_seconds=compute, bytes_per_second=rate)
        for count, rate in zip((8, 1), rates, strict=True)
    )
    placement = Placement(tuple(range(8)), (8,), (job.start.batch_size,) * 8, (job.model_bytes,))

    def predicted(term):
        problem = Problem(
            kinds=kinds,
            samples=8 * job.start.batch_size,
            batch_size=job.start.batch_size,
            model_bytes=job.model_bytes,
            server_term=term,
            overlap=True,
        )
        return placement_seconds(problem, placement)

    cycle = 8 * seen.seconds / seen.clocks
    assert predicted("own") == pytest.approx(cycle, rel=0.02)
    assert predicted("sum") == pytest.approx(predicted("paper"), rel=1e-9)
    assert predicted("sum") > 2 * cycle


# -------------------------------------------------------------------------------------------------- three kinds of machines

CLUSTERS = ("three-a", "three-b")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_on_three_kinds_of_machines_the_default_ends_near_the_best(name):
    """The paper's claim is 6.5 %, for machines of one kind. Measured: at most 2.4 % in five seeds."""
    assert reached(name, MODELS["default"], 0)[0] < 1.03


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_without_a_queue_the_limit_of_busy_servers_is_farther_off(name):
    """It makes fast workers pull no more often than slow ones while the servers are busy."""
    assert reached(name, MODELS["limit"], 0)[0] > 1.065


@pytest.mark.slow
def test_on_three_kinds_of_machines_the_public_codes_model_can_be_far_off():
    """Each narrow worker seems to occupy the servers, so that too few machines work."""
    assert reached("three-b", MODELS["code"], 0)[0] > 1.5
