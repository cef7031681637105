"""A System of recorded runs: it answers what was recorded, rejects the rest, and names the nearest settings."""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.drive import play
from tests.support.marks import slow
from tests.support.recordings import MADE, lay
from traces.foreign.own_tables import from_tables
from traces.importers import import_trace
from traces.parts import scan
from traces.recorded_runs import Recorded, recorded_job, recorded_runs
from traces.replay import RecordedSystem
from traces.schema import setting_text
from traces.shipped import locate
from tuners import registry
from tuners.actions import (
    Action,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Job,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Target,
)
from tuners.baselines.best_fixed import fixed_at
from tuners.policies import asp
from tuners.settings import Choice


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Six made-up runs: 8, 16 or 24 workers take 36, 18 or 12 s; bsp ends at accuracy 0.5, asp at 0.6."""
    folder = tmp_path_factory.mktemp("trace")
    import_trace("trimtuner-tf-ps", lay(folder / "in", MADE["trimtuner-tf-ps"]()), folder / "t", made_by="test")
    return recorded_runs(folder / "t", "cnn")


@pytest.fixture
def system(runs: list[Recorded]) -> RecordedSystem:
    job = recorded_job("cnn", runs, target=Target("accuracy", 0.6), budget_seconds=200.0, samples=1000)
    return RecordedSystem(job, runs)


def setting(system: RecordedSystem, **values: Any) -> Setting:
    space = system.job.space
    named = {("option/workers" if k == "workers" else k): v for k, v in values.items()}
    return space.setting(space.values(system.job.start) | named)


def test_what_differs_between_runs_is_free(system):
    assert {k.name: k.options for k in system.job.space.knobs} == {"policy": ("asp", "bsp"), "option/workers": (8, 16, 24)}
    assert dict(system.job.start.options)["vm_flavor"] == "t2.small"


def test_a_run_takes_its_recorded_time_and_ends_as_recorded(system):
    system.perform(Reconfigure(setting(system, workers=16, policy="bsp")))
    first = system.perform(Run(clocks=5))
    assert (first.clocks, first.evaluations, first.status) == (5, (), "running")
    assert first.seconds == pytest.approx(5 * 18 / 17)
    assert np.diff(first.pushes.seconds) == pytest.approx(18 / 17)
    with pytest.raises(Rejected, match="nothing was recorded before 18 s"):
        system.perform(Evaluate())
    rest = system.perform(Run(clocks=100))
    assert (rest.clocks, system.now) == (12, 18.0)
    assert [e.accuracy for e in rest.evaluations] == [0.5]
    assert system.perform(Evaluate()).accuracy == 0.5
    idle = system.perform(Run(seconds=2.0))
    assert (idle.clocks, idle.seconds, system.now) == (0, 2.0, 20.0)
    more = system.perform(Run(clocks=17))  # after its end, the run takes time but completes no clocks
    assert (more.clocks, more.status, system.now) == (0, "running", 38.0)


def test_a_refused_evaluation_says_when_the_first_was_recorded():
    first, last = Evaluation(5.0, 1, 1.0, 0.4), Evaluation(50.0, 10, 0.5, 0.6)
    run = Recorded(Setting(workers=("workers",), servers=("servers",)), 50.0, 10, (first, last))
    system = RecordedSystem(recorded_job("own", [run], target=Target("accuracy", 0.9), budget_seconds=200.0), [run])
    system.perform(Run(seconds=4.0))
    with pytest.raises(Rejected, match=r"nothing was recorded before 5 s of its run\."):
        system.perform(Evaluate())
    system.perform(Run(seconds=1.0))
    assert system.perform(Evaluate()).loss == 1.0


@given(st.floats(1.0, 1e4), st.floats(0.01, 1e3))
def test_the_budget_ends_exactly(budget, seconds):
    run = Recorded(Setting(workers=("workers",), servers=("servers",)), seconds, 17, ())
    system = RecordedSystem(recorded_job("one", [run], target=Target("accuracy", 1.0), budget_seconds=budget), [run])
    system.perform(Run(seconds=budget / 3))
    system.perform(Run(clocks=1))
    while system.now < 0.99 * budget:
        system.perform(Run(seconds=budget / 7))
    system.perform(Run(clocks=10**7))
    assert system.now == budget


def test_windows_may_be_cut_anywhere(runs, system):
    whole = RecordedSystem(system.job, runs).perform(Run(seconds=10.0))
    parts = [system.perform(Run(seconds=0.5)) for _ in range(20)]
    assert np.concatenate([p.pushes.seconds for p in parts]) == pytest.approx(whole.pushes.seconds)
    assert np.concatenate([p.pushes.clock for p in parts]).tolist() == whole.pushes.clock.tolist()


def test_the_target_is_reached_when_that_was_recorded(system):
    system.perform(Reconfigure(setting(system, workers=24, policy="asp")))
    seen = system.perform(Run(seconds=100.0))
    assert (seen.status, system.status, system.now) == ("target", "target", 12.0)


@pytest.mark.parametrize(
    ("target", "seconds"), [(Target("clocks", 10), 10 * 36 / 17), (Target("samples", 100), 7 * 36 / 17)]
)
def test_a_target_that_counts(runs, target, seconds):
    job = recorded_job("cnn", runs, target=target, budget_seconds=200.0)
    system = RecordedSystem(replace(job, start=runs[0].setting), runs)
    begin = replace(runs[0], seconds=36.0)
    system = RecordedSystem(job, [begin, *runs[1:]])
    assert system.perform(Run(seconds=100.0)).status == "target"
    assert system.now == pytest.approx(seconds)


def test_a_setting_that_was_not_recorded_is_rejected_with_the_nearest_ones(system):
    for action in (Reconfigure, lambda s: Fork(0, s)):
        with pytest.raises(
            Rejected, match=r"workers 17: no such run was recorded. Nearest are policy asp, option/workers 16;"
        ):
            system.perform(action(setting(system, workers=17, policy="asp")))
    with pytest.raises(Rejected, match="no such run was recorded"):
        system.perform(Reconfigure(replace(system.job.start, learning_rate=0.5)))
    assert system.now == 0.0
    with pytest.raises(Rejected, match="what they did cannot be changed"):
        system.perform(Install(asp()))
    with pytest.raises(Rejected, match="all of them trained"):
        system.perform(Fork(0, testing=True))


def test_branches_are_runs_of_their_own(system):
    system.perform(Run(seconds=4.0))
    copy, fresh = system.perform(Fork()), system.perform(Fork(0, setting(system, workers=24, policy="bsp")))
    at = {b: system.perform(Run(clocks=1, branch=b)).pushes.clock[0] for b in (copy, fresh)}
    assert at == {copy: at[copy], fresh: 0}
    assert at[copy] > 0
    system.perform(Free(0))
    system.perform(Free(copy))
    with pytest.raises(Rejected, match="it is the last one"):
        system.perform(Free(fresh))
    with pytest.raises(Rejected, match="Cannot use branch 0"):
        system.perform(Run(clocks=1))


def test_runs_under_one_setting_are_repetitions_that_the_seed_chooses(system, runs):
    slow = replace(runs[0], seconds=2 * runs[0].seconds)
    for seed, expected in ((0, runs[0]), (1, slow), (2, runs[0])):
        job = replace(system.job, seed=seed, start=runs[0].setting, target=Target("clocks", 17), budget_seconds=1e4)
        chosen = RecordedSystem(job, [*runs, slow])
        chosen.perform(Run(seconds=1e4))
        assert (chosen.status, chosen.now) == ("target", pytest.approx(expected.seconds))


def test_a_change_takes_the_time_of_a_restart(system, runs):
    """The time that is given, or else the median that was recorded; to the same run it takes none."""
    recorded = [replace(run, restart_seconds=seconds) for run, seconds in zip(runs, 2 * (3.0, 5.0, 9.0), strict=True)]
    for told, expected in ((None, 5.0), (7.0, 7.0), (0.0, 0.0)):
        begun = RecordedSystem(system.job, recorded, restart_seconds=told)
        cost = begun.perform(Reconfigure(setting(system, workers=24, policy="bsp")))
        assert (cost.seconds, cost.stall_seconds, begun.now) == (expected, expected, expected)
        assert begun.perform(Reconfigure(setting(system, workers=24, policy="bsp"))).seconds == 0.0
        begun.perform(Fork(0, setting(system, workers=16, policy="bsp")))
        assert begun.now == 2 * expected


def scheduled(percent: float, switch: float, seconds: float) -> Recorded:
    """1,000 steps: 2 s each up to the switch, 10.5 s for the next one, then 1 s each."""
    options = (("bsp_percent", percent), ("servers", 2), ("workers", 2))
    made = Setting(workers=("workers",), servers=("servers",), policy="sync_switch", options=options)
    course = ((0.0, 0), (2.0 * switch, round(switch)), (2.0 * switch + 10.5, round(switch) + 1), (seconds, 1000))
    return Recorded(made, seconds, 1000, (), course, switch, 10.0)


def test_a_switch_that_is_still_to_come_can_be_moved_without_a_restart():
    exact = replace(scheduled(100.0, 0.0, 2000.0), course=(), switch=math.inf)
    table = [exact, scheduled(20.0, 200.0, 1209.5), scheduled(50.0, 500.0, 1509.5)]
    job = recorded_job("s", table, target=Target("clocks", 1000), budget_seconds=1e4)
    assert [k.name for k in job.space.knobs] == ["option/bsp_percent"]
    system = RecordedSystem(job, table)
    system.perform(Run(clocks=150))
    assert system.now == 300.0
    assert system.perform(Reconfigure(table[1].setting)).seconds == 0.0
    assert system.perform(Run(clocks=100)).seconds == pytest.approx(50 * 2.0 + 10.5 + 49 * 1.0)
    # It has switched: in BSP up to 500 steps it would have been at another place, so that run starts again.
    assert system.perform(Reconfigure(table[2].setting)).seconds == 10.0
    system.perform(Run(seconds=1e4))
    assert (system.status, system.now) == ("target", pytest.approx(300.0 + 159.5 + 10.0 + 1509.5))


def every_other(job: Job) -> Generator[Action[Any], Any, None]:
    """Tries random settings to their recorded ends, as long as the target is not reached."""
    rng, tried = np.random.default_rng(job.seed), set[Setting]()
    for _ in range(12):
        drawn = job.space.setting(job.space.sample(rng))
        if drawn not in tried:
            tried.add(drawn)
            yield from Reconfigure(drawn)
            yield from Run(clocks=10**9)


def test_a_tuner_plays_until_the_target(runs, system):
    played = play(every_other, system)
    assert played.outcome.status == "target"
    assert played.outcome.seconds > 12


@pytest.mark.parametrize("name", [n for n, entry in registry().items() if entry.contestant])
def test_all_tuners_finish_on_a_table(name, system):
    assert play(registry()[name].factory, system).outcome.status in ("target", "budget")


def test_a_trace_without_such_runs(tmp_path):
    import_trace("bamboo-spot", lay(tmp_path / "in", MADE["bamboo-spot"]()), tmp_path / "t", made_by="test")
    with pytest.raises(ValueError, match="Cannot replay 'cnn'"):
        recorded_runs(tmp_path / "t", "cnn")


# ------------------------------------------------------------------------------------------ the table of real machines


@pytest.mark.parametrize("workload", ["cnn", slow("rnn")])
def test_real_configurations(workload):
    folder = locate("shipped:trimtuner-tf-ps")
    found = recorded_runs(folder, workload)
    assert len(found) == 1440
    job = recorded_job(workload, found, target=Target("accuracy", 0.95), budget_seconds=3600.0)
    reaches = (pl.col("workload") == workload) & (pl.col("accuracy") >= 0.95)
    good = scan(folder, "runs").filter(reaches).collect()["seconds"]
    reaching = [run for run in found if run.evaluations[-1].accuracy >= 0.95]
    assert len(reaching) == good.len() > 0
    fastest = min(reaching, key=lambda run: run.seconds)
    played = play(fixed_at(fastest.setting), RecordedSystem(job, found))
    assert (played.outcome.status, played.outcome.seconds) == ("target", good.min())
    # 1,440 of 3,600 combinations of knobs were recorded: sizes of clusters go with types of machines. What the space draws,
    # was recorded; what combines values freely, is refused as often as that.
    assert math.prod(len(k.options) for k in job.space.knobs if isinstance(k, Choice)) == 3600
    system, rng, refused = RecordedSystem(job, found), np.random.default_rng(1), 0
    for _ in range(100):
        job.space.check(job.space.setting(job.space.sample(rng)))
    for _ in range(120):
        setting = job.space.setting({k.name: k.sample(rng) for k in job.space.knobs})
        try:
            system.perform(Reconfigure(setting))
        except Rejected as why:
            refused += 1
            assert "Nearest are" in str(why)  # noqa: PT017
            with pytest.raises(Rejected, match="no such run was recorded, and 1440 settings were"):
                job.space.check(setting)
        else:
            job.space.check(setting)
    assert refused / 120 == pytest.approx(0.6, abs=5 * math.sqrt(0.6 * 0.4 / 120))


def test_real_switches():
    """Where a run of ResNet-50 switches, by its schedule: a share of 16,000 steps in BSP."""
    found = recorded_runs(locate("shipped:sync-switch"), "cifar100", "cifar100_res50/*")
    assert len(found) == 18
    for run in found:
        percent = dict(run.setting.options)["bsp_percent"]
        assert run.switch is not None
        # A loss was recorded every 100 steps.
        assert run.switch == math.inf if percent == 100 else 0 <= 160 * percent - run.switch <= 100
        assert (run.restart_seconds is not None) == (0 < percent < 100)
        assert run.seconds_at(run.clocks) == pytest.approx(run.seconds)


def test_bo_online_keeps_the_start_where_no_mini_batch_has_a_loss(system):
    """Without a loss no setting can be told from another; it went on in short windows to the end, over ever longer lists."""
    played = play(registry()["bo_online"].factory, system)
    assert [type(e.action) for e in played.exchanges if e.asked] == [Run]
    assert played.exchanges[-1].answer.setting == system.job.start


def test_settings_have_the_recorded_machines_and_prices(runs, system):
    """8 workers, a server and a master: the source's formula; the master is in the price and not among the machines."""
    rate = system.job.prices.setting_rate(setting(system, workers=8, policy="bsp"))
    assert rate == (9, pytest.approx(9 * 0.023 + 0.3712))


def test_servers_on_the_workers_nodes_are_no_further_machines():
    found = recorded_runs(locate("shipped:sync-switch", Path()), "cifar100")
    assert {run.rate.machines for run in found} == {8}
    assert all(math.isnan(run.rate.usd_per_hour) for run in found)


def test_a_node_that_works_and_serves_is_one_machine(tmp_path):
    """Two nodes do both, the third only works: 3 workers and 2 servers are three machines."""
    both = Setting(workers=("a", "b", "c"), servers=("a", "b"), batch_size=8)
    lay(tmp_path / "in", {"runs.csv": b"run,workload,seconds,steps\nr,job,9,9\n"})
    rows = {"run": "r", "seconds": 0.0, "workers": 3, "servers": 2, "policy": "asp", "setting": setting_text(both)}
    (tmp_path / "in" / "settings.jsonl").write_text(json.dumps(rows) + "\n")
    from_tables(tmp_path / "in", tmp_path / "t", made_by="test")
    (found,) = recorded_runs(tmp_path / "t", "job")
    assert found.rate.machines == 3


def own_runs(folder: Path, **tables: list[dict[str, Any]]) -> list[Recorded]:
    """The runs of a trace that is converted from these tables, all of the workload "job"."""
    texts = {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode() for name, rows in tables.items()}
    lay(folder / "in", texts)
    from_tables(folder / "in", folder / "t", made_by="test")
    return recorded_runs(folder / "t", "job")


def test_what_is_only_in_progress_counts(tmp_path):
    """The end of a run, what was evaluated there and after it, and how fast it went, without a single training loss."""
    settings = [{"run": r, "seconds": 0, "workers": 2, "servers": 1} for r in "abc"]
    seen = [(50.0, 20, 0.3), (100.0, 100, 0.9)]
    rows = [{"run": r, "seconds": t, "steps": n, "accuracy": a} for r in "ab" for t, n, a in seen]
    rows += [{"run": "c", "seconds": 103.0, "steps": 100, "accuracy": 0.9, "validation_loss": 0.4}]
    ends = [
        {"run": "a"},
        {"run": "b", "seconds": 100, "steps": 100},
        {"run": "c", "seconds": 100, "steps": 100, "loss": 0.2},
    ]
    found = own_runs(tmp_path, settings=settings, progress=rows, runs=[{"workload": "job"} | end for end in ends])
    assert [(run.seconds, run.clocks) for run in found] == [(100.0, 100)] * 3
    assert [run.clocks_at(50.0) for run in found] == [20, 20, 50]
    assert [run.evaluations[-1].accuracy for run in found] == [0.9] * 3
    assert found[2].evaluations[-1].loss == 0.2  # what the run says itself holds
    for seed, run in enumerate(found):
        job = recorded_job("job", found, target=Target("accuracy", 0.8), budget_seconds=1e3, seed=seed)
        system = RecordedSystem(job, found)
        assert system.perform(Run(seconds=500.0)).status == "target", run
        assert system.now == 100.0


def test_an_end_of_which_nothing_is_known_hides_no_evaluation(tmp_path):
    rows = [{"seconds": 50.0, "steps": 20, "accuracy": 0.3}]
    (run,) = own_runs(
        tmp_path,
        runs=[{"run": "in", "workload": "job", "seconds": 100, "steps": 100}],
        settings=[{"seconds": 0, "workers": 2, "servers": 1}],
        progress=rows,
    )
    system = RecordedSystem(recorded_job("job", [run], target=Target("accuracy", 0.8), budget_seconds=1e3), [run])
    system.perform(Run(seconds=200.0))
    assert system.perform(Evaluate()).accuracy == 0.3


@pytest.mark.parametrize(
    ("made", "knob"),
    [
        ([{"options": json.dumps({"batch_sizes": sizes})} for sizes in ([48, 16], [16, 48])], "option/batch_sizes"),
        ([{}, {"options": json.dumps({"prefetch": True})}], "option/prefetch"),
        ([{"setting": Setting(workers=("a", "b"), servers=("c",), local_steps=n)} for n in (1, 4)], "option/local_steps"),
        ([{"setting": Setting(workers=w, servers=("c",))} for w in (("a", "b"), ("a", "d"))], "option/worker_nodes"),
    ],
)
def test_no_two_recorded_settings_are_taken_for_repetitions(tmp_path, made, knob):
    """Each has its own run; a third run has the first setting again, and is a repetition."""
    rows = [
        {"run": f"r{i}", "seconds": 0, "workers": 2, "servers": 1, "policy": "asp"}
        | {k: setting_text(v) if isinstance(v, Setting) else v for k, v in row.items()}
        for i, row in enumerate([*made, made[0]])
    ]
    ends = [{"run": f"r{i}", "workload": "job", "seconds": seconds, "steps": 10} for i, seconds in enumerate((10, 30, 11))]
    found = own_runs(tmp_path, settings=rows, runs=ends)
    job = recorded_job("job", found, target=Target("clocks", 10), budget_seconds=1e3)
    assert [k.name for k in job.space.knobs] == [knob]
    assert len(job.space.recorded) == 2
    for setting, seconds in zip(job.space.recorded, (10, 30), strict=True):
        system = RecordedSystem(job, found)
        system.perform(Reconfigure(job.space.setting(job.space.values(setting))))
        system.perform(Run(clocks=10))
        assert (system.status, system.now) == ("target", pytest.approx(seconds))


@pytest.mark.parametrize(
    ("name", "value", "policy"), [("batch_size", 32, "asp"), ("learning_rate", 0.1, "asp"), ("staleness", 2, "ssp")]
)
def test_a_value_that_only_some_runs_tell_is_no_default(tmp_path, name, value, policy):
    """Tuners were told a mini-batch of 16 for a run that does not say it. A policy without a bound needs none."""
    rows = [{"run": r, "seconds": 0, "workers": 2, "servers": 1, "policy": policy} for r in "ab"]
    rows[1] |= {name: value, "workers": 3}
    ends = [{"run": r, "workload": "job", "seconds": 100, "steps": 100} for r in "ab"]
    with pytest.raises(ValueError, match=f"1 of its runs do not tell {name}, such as that of 1 servers, 2 workers, and o"):
        own_runs(tmp_path / "some", runs=ends, settings=rows)
    rows[0] |= {"policy": "bsp"} if name == "staleness" else {name: value}
    assert len(own_runs(tmp_path / "all", runs=ends, settings=rows)) == 2


def test_a_setting_that_is_logged_again_is_one_setting(tmp_path):
    """As a program does that logs the setting in each epoch; another setting is a change, and the run is left out."""
    rows = [{"run": r, "seconds": t, "workers": n, "servers": 1} for r, n in (("a", 2), ("b", 2)) for t in (0, 50)]
    rows[-1]["workers"] = 3
    ends = [{"run": r, "workload": "job", "seconds": 100, "steps": 100} for r in "ab"]
    (run,) = own_runs(tmp_path, runs=ends, settings=rows)
    assert dict(run.setting.options) == {"workers": 2, "servers": 1}
