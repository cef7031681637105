"""Schedules: a batch is shared out whole, evaluations are what they say, and searches end with what can be run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import scenario
from harness.drive import play
from tuners.actions import Cost, Reconfigure, Rejected, Run, Setting, Space, Target, Window
from tuners.applicability import nothing_to_tune
from tuners.baselines.bandit import Bandit, area_under_curve
from tuners.baselines.schedule_search import schedule_search, uniform_devices, uniform_gpus
from tuners.bespoke_bo import schedules
from tuners.bespoke_bo.tuner import observed
from tuners.settings import Node, Real, shared_out
from tuners.testing import check_tuner

TEXT = """
summary = "Two machines with a GPU, two without."
[cluster]
nodes = [{ type = "g2.2xlarge", count = 2, prefix = "g" }, { type = "c4.8xlarge", count = 2, prefix = "b" }]
[workload]
name = "bespoke-googlenet"
[start]
workers = ["g0", "g1", "b0", "b1"]
servers = ["g0", "g1", "b0", "b1"]
global_batch_size = 64
policy = "bsp"
[free]
"role/*" = { choice = ["idle", "worker", "server", "both"] }
"load/*" = { real = [0.0, 1.0] }
[target]
metric = "samples"
value = 30000
[budget]
seconds = 100000
[conditions]
jitter = 0.02
"""


def made(text=TEXT, origin="my.toml"):
    return scenario.parse(text, name="my", origin=Path(origin))


JOB = scenario.job(made())
SLOTS = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0))


# ------------------------------------------------------------------------------------------------------------ the domain


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 10_000))
def test_what_is_shared_out_is_whole_and_nearly_in_proportion(weights, total):
    if not sum(weights) > 0:
        with pytest.raises(ValueError, match="give some that are positive"):
            shared_out(weights, total)
        return
    counts = np.array(shared_out(weights, total))
    assert counts.sum() == total
    assert (np.abs(counts - np.array(weights) / sum(weights) * total) < 1 + 1e-6).all()


def test_the_start_is_even_and_a_schedule_is_free():
    assert JOB.start.loads == ((11, 11), (11, 11), (10,), (10,))
    assert (schedules.is_free(JOB), schedules.batch(JOB), schedules.devices(JOB)) == (True, 64, SLOTS)
    assert not schedules.is_free(replace(JOB, start=replace(JOB.start, policy="asp")))
    assert not schedules.is_free(scenario.job(scenario.load("digits")))


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["worker", "server", "both", "idle"]), min_size=4, max_size=4))
def test_roles_alone_make_a_setting_whose_workers_share_the_batch(roles):
    values = {f"role/{node}": role for node, role in zip(("g0", "g1", "b0", "b1"), roles, strict=True)}
    found = JOB.space.setting(values)
    if found.workers and found.servers:
        JOB.space.check(found)
        assert sum(map(sum, found.loads)) == 64


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 64]))
def test_any_weights_give_a_whole_batch_and_only_who_has_samples_works(seed, batch):
    job = scenario.job(made(TEXT.replace("global_batch_size = 64", f"global_batch_size = {batch}")))
    values = job.space.sample(np.random.default_rng(seed))
    found = job.space.setting(values)
    if not (found.workers and found.servers):
        with pytest.raises(Rejected, match="Cannot run with no"):
            job.space.check(found)
        return
    job.space.check(found)
    assert sum(map(sum, found.loads)) == batch
    assert all(map(any, found.loads))
    assert {w for w, *_ in zip(found.workers, strict=True)} <= {
        n for n, r in _roles(values).items() if r in ("worker", "both")
    }
    back = schedules.schedule(job, found)
    assert schedules.setting(job, back) == replace(found, data_shares=(), model_shares=())
    assert job.space.setting(job.space.values(found)) == found


def _roles(values):
    return {name.removeprefix("role/"): role for name, role in values.items() if name.startswith("role/")}


def test_no_weight_at_all_is_an_even_share():
    values = dict.fromkeys(JOB.space.names, 0.0) | {f"role/{n}": "both" for n in ("g0", "g1", "b0", "b1")}
    assert JOB.space.setting(values) == JOB.start


def test_a_batch_smaller_than_the_devices_leaves_some_out():
    small = scenario.job(made(TEXT.replace("global_batch_size = 64", "global_batch_size = 3")))
    assert (small.start.workers, small.start.loads) == (("g0", "g1"), ((1, 1), (1, 0)))
    small.space.check(small.start)
    assert schedules.evenly(small, SLOTS[2:]).loads == ((0, 0), (1, 1), (1,), (0,))


@pytest.mark.parametrize(
    ("loads", "reason"), [(((32, 0), (31, 0)), "sum to the batch, 64"), (((64, 0), (0, 0)), "at least one")]
)
def test_loads_that_are_not_the_batch_are_refused(loads, reason):
    with pytest.raises(Rejected, match=reason):
        JOB.space.check(replace(JOB.start, workers=("g0", "g1"), loads=loads))


def test_a_device_that_cannot_compute_is_never_given_samples(tmp_path):
    (tmp_path / "types.toml").write_text(
        '[broken]\ncores = 8\nmemory_bytes = 1e9\nnic_bytes_per_second = 1e9\nsource = "made up"\n'
        'devices = [{ kind = "gpu", speed = 0.0 }, { kind = "cpu", speed = 1.0 }]\n'
    )
    text = TEXT.replace("[cluster]", '[cluster]\nprofiles = "types.toml"').replace('"g2.2xlarge"', '"broken"')
    found = made(text, tmp_path / "my.toml")
    job = scenario.job(found)
    assert job.start.loads == ((0, 16), (0, 16), (16,), (16,))
    assert schedules.devices(job) == ((0, 1), (1, 1), (2, 0), (3, 0))
    drawn = job.space.setting(job.space.sample(np.random.default_rng(1)))
    assert all(row[0] == 0 for w, row in zip(drawn.workers, drawn.loads, strict=True) if w.startswith("g"))
    system = scenario.system(found, 0)
    with pytest.raises(Rejected, match="gpu of speed 0"):
        system.perform(Reconfigure(replace(job.start, loads=((16, 0), (0, 16), (16,), (16,)))))
    assert list(uniform_gpus(job)) == []


def test_a_batch_is_stated_once():
    with pytest.raises(ValueError, match="global_batch_size: loads say already"):
        made(TEXT.replace("policy =", "loads = [[1, 0], [1, 0], [1], [1]]\npolicy ="))


# ------------------------------------------------------------------------------------------------------------- scenarios


def test_brackets_behind_a_name_replace_lines_of_the_file():
    found = scenario.load("boat-c-speechnet[global_batch_size=8192,count=4]")
    assert (found.name, found.seeds.count) == ("boat-c-speechnet[global_batch_size=8192,count=4]", 4)
    assert schedules.batch(scenario.job(found)) == 8192
    assert scenario.parse(found.text, name="again", origin=found.origin).start == found.start


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("boat-c-speechnet[global_batch_size=8192", r"write boat-c-speechnet\[key=value,...\]"),
        ("boat-c-speechnet[batch=8192]", "no line begins with 'batch'"),
        ("boat-c-speechnet[global_batch_size]", "write key=value"),
        ("boat-c-speechnet[global_batch_size=-1]", r"\[start\] global_batch_size: expected `int` >= 1"),
        ("boat-c-speech[count=4]", "did you mean boat-c-speechnet"),
    ],
)
def test_brackets_that_change_nothing_are_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        scenario.load(name)


# ----------------------------------------------------------------------------------------------------------- evaluations


def window(setting, clocks, seconds=(), **changed):
    from tuners.actions import Pushes, WorkerWindow

    columns = {f: np.zeros(len(seconds)) for f in Pushes._fields} | {"seconds": np.array(seconds, float)}
    workers = tuple(WorkerWindow(w, 2, 8, 3.0, 0, 0, 0, (1.5, 0.5)) for w in setting.workers)
    plain = {"start_seconds": 10.0, "end_seconds": 16.0, "clocks": clocks, "pushes": Pushes(**columns), "workers": workers}
    return Window(**(plain | {"nodes": JOB.nodes, "setting": setting} | changed))


TWO = Setting(workers=("g0", "g1"), servers=("g0",), loads=((32, 0), (32, 0)), policy="bsp")


def evaluation(*answers, current=None):
    """What `measure` asks when it is answered so, and what it says in the end."""
    asked, running = [], schedules.measure(TWO, current, iterations=3, counted=2)
    try:
        asked.append(next(running))
        for answer in answers:
            asked.append(running.throw(answer) if isinstance(answer, Exception) else running.send(answer))
    except StopIteration as end:
        return asked, end.value
    raise AssertionError(asked)


def test_an_evaluation_leaves_the_first_iterations_out():
    asked, found = evaluation(Cost(seconds=1, stall_seconds=1), window(TWO, 2), window(TWO, 4, (11, 12, 14, 16)))
    assert asked == [Reconfigure(TWO), Run(clocks=2), Run(clocks=4)]
    assert (found.seconds, found.iteration_seconds) == (3.0, (2.0, 4.0))
    assert found.machine_seconds == {"g0": 1.5, "g1": 1.5}
    assert found.device_seconds["g1"] == (1.5, 0.5)
    asked, _ = evaluation(window(TWO, 2), window(TWO, 4, (11, 12, 14, 16)), current=TWO)
    assert asked == [Run(clocks=2), Run(clocks=4)]


def test_iterations_count_from_their_begin_where_a_change_has_not_stopped_the_job():
    """A relocation ends during an iteration, and the window after it has the pushes that were made meanwhile, too."""
    begun, seconds = np.array([9.0, 11, 11, 13]), np.array([11.0, 12, 13, 14])
    running = window(TWO, 4, seconds)
    running = replace(running, pushes=running.pushes._replace(compute_seconds=seconds - begun))
    counted = window(TWO, 4, (16, 17, 18, 19), start_seconds=15.0)
    asked, found = evaluation(Cost(seconds=1, stall_seconds=0), running, window(TWO, 1), counted)
    assert asked == [Reconfigure(TWO), Run(clocks=2), Run(clocks=1), Run(clocks=4)]
    assert (found.clocks, found.iteration_seconds) == (9, (2.0, 2.0))


@pytest.mark.parametrize("method", ["relocate", "migrate", "checkpoint"])
def test_every_counted_iteration_has_one_push_of_each_worker(method):
    """After relocations, windows began anywhere in an iteration: a worker had nine pushes in ten iterations, another 11."""
    found = made()
    job, wanted = scenario.job(found), []
    for loads in (((30, 0), (20, 0), (8,), (6,)), ((20, 10), (20, 0), (14,), ())):
        working = tuple(n.name for n, row in zip(job.nodes, loads, strict=True) if row)
        wanted.append(replace(job.start, workers=working, servers=("g0", "b0"), loads=tuple(row for row in loads if row)))

    def tuner(job):
        for setting, current in zip(wanted, (job.start, *wanted), strict=False):
            yield from Run(clocks=6)
            measured.append((yield from by_method(method, schedules.measure(setting, current, iterations=6, counted=3))))
            observed(job, measured[-1])

    measured = []
    played = play(tuner, scenario.system(found, 0))
    assert [m.setting for m in measured] == wanted, played.outcome.reason
    names = [n.name for n in job.nodes]
    for each in measured:
        rounds = each.window.pushes.worker.reshape(3, -1)
        assert [sorted(names[i] for i in workers) for workers in rounds] == [sorted(each.setting.workers)] * 3


def by_method(method, steps):
    """`steps`, with all changes made by `method`."""
    answer = None
    while True:
        try:
            action = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield from (replace(action, method=method) if isinstance(action, Reconfigure) else action)


def test_an_evaluation_that_something_came_between_says_what():
    assert evaluation(Rejected("no"))[1] is None
    lost = window(replace(TWO, workers=("g1",)), 2)
    assert evaluation(Cost(seconds=1, stall_seconds=1), lost)[1] is lost
    ended = window(TWO, 3, status="budget")
    assert evaluation(Cost(seconds=1, stall_seconds=1), window(TWO, 2), ended)[1] is ended
    with pytest.raises(ValueError, match="Cannot count 20 of 20"):
        next(schedules.measure(TWO, None, counted=20))


# -------------------------------------------------------------------------------------------------------------- searches


def test_a_bandit_credits_late_successes_more():
    assert area_under_curve([False, False, True]) == pytest.approx(3 / 6)
    assert area_under_curve([True, False, False]) == pytest.approx(1 / 6)
    assert (area_under_curve([True] * 4), area_under_curve([])) == (1.0, 0.0)


def test_a_bandit_comes_closer_than_chance():
    knobs = tuple(Real(f"load/n{i}/0", 0.0, 1.0) for i in range(8))
    nodes = tuple(Node(f"n{i}", "toy", 1, ("cpu",), 1e9, 1e9) for i in range(8))
    space = Space(Setting(workers=("n0",), servers=("n0",), loads=((8,),)), nodes, knobs)

    def score(values):
        return -sum((x - 0.7) ** 2 for x in values.values())

    def reached(seed):
        bandit, best = Bandit(space, (seed,)), -np.inf
        for _ in range(60):
            point = bandit.propose()
            bandit.tell(point, score(point))
            best = max(best, score(point))
        return best

    # The best of 60 at random: -0.247 on average, sd 0.082, from 10,000 draws; the mean of five, four standard errors off.
    assert np.mean([reached(s) for s in range(5)]) > -0.247 + 4 * 0.082 / 5**0.5


class Fake:
    """A system of equations: an iteration takes as long as the most samples on a machine. One node may be lost."""

    def __init__(self, loses_at=None):
        self.job, self.now, self.status, self.setting = JOB, 0.0, "running", JOB.start
        self.loses_at, self.nodes = loses_at, JOB.nodes

    def perform(self, action):
        if isinstance(action, Reconfigure):
            self.job.space.check(action.setting)
            there = {n.name for n in self.nodes}
            if not there.issuperset((*action.setting.workers, *action.setting.servers)):
                raise Rejected("Cannot use a node that is not there.")
            self.setting = action.setting
            return Cost(seconds=0.0, stall_seconds=0.0)
        if not isinstance(action, Run):
            raise Rejected("Cannot do that.")
        each, k = max(map(sum, self.setting.loads)), len(self.setting.workers)
        clocks = action.clocks or max(k, int(action.seconds / each) * k)
        start, self.now = self.now, self.now + each * clocks / k
        ends = start + each * np.ceil(np.arange(1, clocks + 1) / k)
        if self.loses_at is not None and self.now > self.loses_at and len(self.nodes) == 4:
            self.nodes = self.nodes[1:]
            kept = tuple(w for w in self.setting.workers if w != "g0") or ("b1",)
            rows = dict(zip(self.setting.workers, self.setting.loads, strict=True))
            servers = tuple(s for s in self.setting.servers if s != "g0") or ("b0",)
            self.setting = replace(self.setting, workers=kept, servers=servers, loads=tuple(rows[w] for w in kept))
        if self.now >= JOB.budget_seconds:
            self.status = "budget"
        plain = {"start_seconds": start, "end_seconds": self.now, "status": self.status, "nodes": self.nodes}
        return window(self.setting, clocks, ends, **plain)


@pytest.mark.parametrize("kind", ["bandit", "cmaes", "tpe", "random"])
def test_a_search_stays_with_the_best_it_has_seen(kind):
    system = Fake()
    exchanges = play(lambda job: schedule_search(job, kind=kind, evaluations=8), system).exchanges
    tried = [e.action.setting for e in exchanges if isinstance(e.action, Reconfigure)]
    assert max(map(sum, system.setting.loads)) == min(max(map(sum, s.loads)) for s in [JOB.start, *tried])
    assert len({e.answer.setting for e in exchanges if isinstance(e.answer, Window)}) > 3


def test_a_search_goes_on_without_a_node_that_died():
    system = Fake(loses_at=3000.0)
    play(lambda job: schedule_search(job, kind="random", evaluations=12), system)
    assert "g0" not in (*system.setting.workers, *system.setting.servers)
    assert sum(map(sum, system.setting.loads)) == 64


@pytest.mark.parametrize("tuner", [uniform_devices, uniform_gpus, schedule_search], ids=lambda t: t.__name__)
def test_simple_schedules_and_searches_keep_the_contract(tuner):
    check_tuner(tuner, systems={"fake": lambda seed: Fake(), "loses a node": lambda seed: Fake(3000.0)}, most=60)


def test_uniform_schedules_are_even():
    (asked,) = uniform_gpus(JOB)
    assert (asked.setting.workers, asked.setting.servers, asked.setting.loads) == (("g0", "g1"),) * 2 + (((32, 0), (32, 0)),)
    assert list(uniform_devices(JOB)) == []  # it starts so
    elsewhere = replace(JOB, start=asked.setting)
    assert [
        a.setting.workers for a in uniform_devices(replace(elsewhere, space=replace(JOB.space, base=asked.setting)))
    ] == [("g0", "g1", "b0", "b1")]


@pytest.mark.parametrize("tuner", [uniform_devices, uniform_gpus], ids=lambda t: t.__name__)
def test_uniform_schedules_do_not_apply_where_machines_cannot_have_both_roles(tuner):
    """They said that they did, were refused, and played as `fixed`."""
    apart = TEXT.replace('servers = ["g0", "g1", "b0", "b1"]', 'servers = ["b1"]').replace(', "both"]', "]")
    apart = apart.replace('workers = ["g0", "g1", "b0", "b1"]', 'workers = ["g0", "g1", "b0"]')
    of = scenario.job(made(apart))
    assert "Cannot set role/g0 to 'both'" in nothing_to_tune(tuner, of)
    assert not nothing_to_tune(schedule_search, of)


def test_a_search_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Cannot search schedules by 'magic'"):
        list(schedule_search(JOB, kind="magic"))
    with pytest.raises(ValueError, match="0 evaluations"):
        list(schedule_search(JOB, evaluations=0))


def test_a_target_in_samples_counts_them():
    assert Target("samples", 100).reached(0.0, 0.0, clocks=1, samples=100)
    assert not Target("samples", 100).reached(0.0, 0.0, clocks=1000, samples=99)
    assert Target("clocks", 5).counts
    assert not Target("loss", 5).counts
