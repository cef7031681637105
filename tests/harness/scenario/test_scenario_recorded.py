"""Scenarios of recorded runs are read, checked, shown and used in comparisons like other scenarios."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from harness.comparison.compare import compare
from harness.drive import play
from harness.record import play_recorded
from harness.scenario import job, load, show, system
from harness.spending import spending
from reports.verdicts.conclusions import answer
from reports.verdicts.summary import summary
from simulators.cluster.conditions import Conditions
from tests.support.recordings import MADE, lay
from tests.support.small_jobs import SMALL, start
from tests.support.small_jobs import cluster as small_cluster
from tests.support.small_jobs import job as small_job
from tests.support.small_jobs import system as small_system
from traces.foreign.own_tables import from_tables as own_trace
from traces.importers import import_trace
from traces.recorded_runs import recorded_runs
from traces.shipped import locate
from traces.store import load_results
from tuners import registry
from tuners.actions import Reconfigure, Target
from tuners.baselines.best_fixed import fixed_at

CLOCKS = Target("clocks", 60)
TEXT = """summary = "Six runs of our own"

[recorded]
trace = "t"
workload = "cnn"
samples = 1000
start = { policy = "bsp", "option/workers" = 8 }

[target]
metric = "accuracy"
value = 0.6

[budget]
seconds = 200

[seeds]
count = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    import_trace("trimtuner-tf-ps", lay(folder / "in", MADE["trimtuner-tf-ps"]()), folder / "t", made_by="test")
    return folder


def scenario(folder: Path, text: str = TEXT, name: str = "six") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_a_table_is_a_scenario(folder):
    made = load(scenario(folder))
    seen = job(made, 1)
    assert {k.name for k in seen.space.knobs} == {"policy", "option/workers"}
    assert (seen.start.policy, dict(seen.start.options)["workers"]) == ("bsp", 8)
    assert (seen.seed, seen.samples, seen.budget_seconds, seen.name) == (1, 1000, 200.0, "six")
    assert "# 6 recorded runs under 6 settings; starts with policy bsp, option/workers 8" in show(made)
    assert show(made).endswith(TEXT)


def test_runs_whose_workload_is_not_recorded_are_called_unnamed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/settings.csv").write_text("run,seconds,workers,servers,policy\na,0,3,1,asp\nb,0,2,1,asp\n")
    (tmp_path / "logs/runs.csv").write_text("run,seconds,steps\na,60,600\nb,60,400\n")
    own_trace(tmp_path / "logs", tmp_path / "t", made_by="test")
    text = (
        'summary = "Mine"\n[recorded]\ntrace = "t"\nworkload = "unnamed"\n'
        '[target]\nmetric = "clocks"\nvalue = 400\n[budget]\nseconds = 200\n'
    )
    assert "# 2 recorded runs under 2 settings; starts with option/workers 3\n" in show(load(scenario(tmp_path, text)))
    with pytest.raises(ValueError, match=r"Cannot replay 'resnet' from .*: its runs are of unnamed; name one of these"):
        load(scenario(tmp_path, text.replace("unnamed", "resnet")))


def test_samples_of_runs_without_a_batch_size_are_not_counted(tmp_path):
    """They were counted with 16, a default, by the target and by tuners that count epochs."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/settings.csv").write_text(
        "run,seconds,workers,servers,policy\na,0,3,1,asp\nb,0,2,1,asp\nc,9,2,1,asp\n"
    )
    (tmp_path / "logs/runs.csv").write_text("run,seconds,steps\na,60,600\nb,60,400\nc,,\nd,60,600\n")
    own_trace(tmp_path / "logs", tmp_path / "t", made_by="test")
    text = (
        'summary = "Mine"\n[recorded]\ntrace = "t"\nworkload = "unnamed"\n'
        '[target]\nmetric = "clocks"\nvalue = 400\n[budget]\nseconds = 200\n'
    )
    said = show(load(scenario(tmp_path, text)))
    assert "# left out: 2 further runs, without seconds, steps or a setting, or with several settings\n" in said
    counts = text.replace('"clocks"', '"samples"'), text.replace("[target]", "samples = 1000\n[target]")
    for counting in counts:
        with pytest.raises(ValueError, match="metric: 2 of 2 recorded runs do not tell batch_size, so samples cannot be"):
            load(scenario(tmp_path, counting))


def test_a_count_of_steps_that_no_run_has_is_refused(folder):
    most = max(run.clocks for run in recorded_runs(folder / "t", "cnn"))
    counting = TEXT[: TEXT.index("metric")] + f'metric = "clocks"\nvalue = {most}\n' + TEXT[TEXT.index("[budget]") :]
    assert load(scenario(folder, counting, "counting")).target.value == most
    with pytest.raises(ValueError, match=rf"\[target\] value: no recorded run has {most + 1} steps; give at most {most}\."):
        load(scenario(folder, counting.replace(f"value = {most}", f"value = {most + 1}"), "more"))


def test_training_samples_that_the_file_does_not_say_are_unknown(folder):
    """One sample, which was the default, made an epoch of every push."""
    of = job(load(scenario(folder, TEXT.replace("samples = 1000\n", ""), "unknown")))
    assert of.samples == 0
    assert of.epoch_samples == 1000 * of.start.batch_size


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ("restart_seconds = 2.5", "a change to another run takes 2.5 s"),
        ("", "a change to another run takes no time, as none was recorded: give restart_seconds under [costs]"),
    ],
)
def test_what_a_change_takes_is_shown(folder, costs, said):
    made = load(scenario(folder, f"{TEXT}\n[costs]\n{costs}\n", "costs"))
    assert f"# {said}\n" in show(made)
    begun = system(made, 0)
    cost = begun.perform(Reconfigure(job(made).space.setting({"policy": "asp", "option/workers": 24})))
    assert cost.seconds == (2.5 if costs else 0.0)


def test_a_trace_that_has_changed_is_read_again(folder, tmp_path):
    shutil.copytree(folder / "t", tmp_path / "t")
    made = load(scenario(tmp_path))
    assert len(job(made).space.recorded) == 6
    for path in (tmp_path / "t" / "runs").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="it is damaged"):
        job(made)


def test_it_is_played_under_its_start_or_another(folder):
    made = load(scenario(folder))
    other = job(made).space.setting({"policy": "asp", "option/workers": 24})
    assert system(made, 0).job.start == job(made).start
    begun = system(made, 0, other)
    assert begun.job.start == other
    assert play(fixed_at(other), begun).outcome.status == "target"
    nowhere = job(made).space.setting({"policy": "asp", "option/workers": 17})
    with pytest.raises(ValueError, match=r"no such run was recorded\. Nearest are"):
        system(made, 0, nowhere)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"t"', '"nowhere"', r"\[recorded\] Cannot read a trace from .*nowhere"),
        (
            '"cnn"',
            '"vgg"',
            r"\[recorded\] Cannot replay 'vgg' from .*t: its runs are of cnn, rnn; name one of these as its workload",
        ),
        (
            "= 8",
            "= 9",
            r"\[recorded\] start: Cannot start with policy 'bsp', option/workers 9: no such run was recorded; of option/work"
            r"ers, runs have (\d+, ){2}\d+\.",
        ),
        ('"option/workers" = 8', "workers = 8", r"start: .*workers 8: .*; runs have no workers; .*option/workers"),
        (
            '"option/workers" = 8',
            '"option/workers" = "8"',
            r"option/workers '8': .*; of option/workers, runs have ",
        ),
        ("samples", 'runs = "x*"\nsamples', r"\[recorded\] Cannot replay runs 'x\*' of .*t: its runs are cnn/.*1000\."),
        ('"accuracy"', '"loss"', r"\[target\] metric: no recorded run says its loss; record it"),
        ('workload = "cnn"', "", r"\[recorded\] workload: it is missing; every scenario of recorded runs says this"),
        ("samples", "sample", r"\[recorded\] sample: there is no such key; did you mean samples"),
        (
            "[seeds]",
            "[conditions]\njitter = 0.1\n[seeds]",
            r"\[conditions\]: recorded runs say that themselves; leave it out",
        ),
        ("200", "-1", r"\[budget\] seconds"),
        ("value = 0.6", "value = 0.6\nby_share = true", r"\[target\] by_share: recorded runs do not tell workers apart"),
    ],
)
def test_mistakes_are_named(old, new, reason, folder):
    with pytest.raises(ValueError, match=reason):
        load(scenario(folder, TEXT.replace(old, new), "wrong"))


def test_tuners_are_compared_on_a_table(kept_processes, folder, tmp_path):
    """A whole comparison, with the oracle; a run whose settings were not recorded is a row with a reason."""
    compare([scenario(folder)], ["fixed", "random_search", "best_fixed"], out=tmp_path / "out", seeds=2)
    scores = load_results(tmp_path / "out").scores
    fixed = scores.filter(tuner="fixed")
    assert fixed["status"].to_list() == ["budget"] * 2
    assert scores.filter(tuner="best_fixed")["reached"].all()
    assert scores["completion_seconds"].min() in (12.0, 18.0, 36.0)


def test_where_money_counts_the_cheapest_run_within_the_budget_wins(kept_processes, folder, tmp_path):
    """Runs take 36, 18 or 12 s on 8, 16 or 24 workers with a server and a master at 0.3712 USD per hour: the fastest run is
    not the cheapest one with a price that grows with the machines. Each run costs what its source says."""
    text = TEXT.replace("value = 0.6", 'value = 0.5\nminimise = "usd"').replace(
        "seconds = 200", "seconds = 200\nusd = 0.006"
    )
    compare([scenario(folder, text, "cheap")], ["fixed", "asp", "best_fixed"], out=tmp_path / "out", seeds=3)
    results = load_results(tmp_path / "out")
    assert set(results.scores["minimise"]) == {"usd"}
    assert set(results.scores["budget_usd"]) == {0.006}
    fixed = results.scores.filter(tuner="fixed").row(0, named=True)
    assert (fixed["completion_seconds"], fixed["machine_seconds"]) == (36.0, 9 * 36.0)
    assert fixed["usd"] == pytest.approx((9 * 0.023 + 0.3712) * 36 / 3600)
    costs = {8: 36.0 * (9 * 0.023 + 0.3712), 16: 18.0 * (17 * 0.023 + 0.3712), 24: 12.0 * (25 * 0.023 + 0.3712)}
    best = results.scores.filter(tuner="best_fixed").row(0, named=True)
    assert best["usd"] == pytest.approx(min(costs.values()) / 3600)
    rows = {r["tuner"]: r for r in summary(results).iter_rows(named=True)}
    assert rows["fixed"]["usd_regret"] == pytest.approx(costs[8] / min(costs.values()) - 1)
    said = str(answer(summary(results)))
    assert said.startswith("Keep fixed: 0.0058 USD in 36.0 s, ")  # `asp` costs as much: they are the same recorded run
    assert "No tuner is cheaper." in said


def test_money_needs_prices(tmp_path):
    trace = str(locate("shipped:sync-switch"))
    text = (
        TEXT.replace('"t"', json.dumps(trace))
        .replace('"cnn"', '"cifar100"')
        .replace('policy = "bsp", "option/workers" = 8', "")
    )
    for old, new in (("value = 0.6", 'value = 0.6\nminimise = "usd"'), ("seconds = 200", "seconds = 200\nusd = 1")):
        with pytest.raises(ValueError, match="money cannot be counted, because no price is known of these recorded runs"):
            load(scenario(tmp_path, text.replace(old, new), "dear"))


def test_traces_of_single_runs_in_one_folder_are_a_table(tmp_path):
    """Simulated runs under one setting each: the table answers with the times that they took."""
    took = {}
    for batch in (4, 8):
        simulated = small_system(small_cluster(), small_job(SMALL), start(batch_size=batch), Conditions(), target=CLOCKS)
        names = {"scenario": "made", "tuner": f"fixed {batch}", "seed": 0}
        played = play_recorded(registry()["fixed"].factory, simulated, tmp_path / "runs" / str(batch) / "trace", **names)
        took[batch] = played.outcome.seconds
    head = TEXT.split("samples")[0].replace('"t"', '"runs"').replace('"cnn"', '"judged"')
    made = load(scenario(tmp_path, head + '[target]\nmetric = "clocks"\nvalue = 60\n[budget]\nseconds = 1e6\n'))
    assert {k.name: k.options for k in job(made).space.knobs} == {"batch_size": (4, 8)}
    for batch, seconds in took.items():
        begun = job(made).space.setting({"batch_size": batch})
        outcome = play(fixed_at(begun), system(made, 0, begun)).outcome
        assert (outcome.status, outcome.seconds) == ("target", pytest.approx(seconds))


def test_a_recorded_run_of_machines_with_prices_costs_what_it_cost_when_it_was_recorded(tmp_path):
    priced = replace(
        small_cluster(), nodes=tuple((n, structs.replace(k, usd_per_hour=3.6)) for n, k in small_cluster().nodes)
    )
    simulated = small_system(priced, small_job(SMALL), start(), Conditions(), target=CLOCKS)
    names = {"scenario": "made", "tuner": "fixed", "seed": 0}
    played = play_recorded(registry()["fixed"].factory, simulated, tmp_path / "runs", **names)
    cost = spending(played.job, played.exchanges).usd
    assert cost == pytest.approx(5 * 3.6 * played.outcome.seconds / 3600)
    head = TEXT.split("samples")[0].replace('"t"', '"runs"').replace('"cnn"', '"judged"')
    target = '[target]\nmetric = "clocks"\nvalue = 60\nminimise = "usd"\n[budget]\nseconds = 1e6\n'
    replayed = play(registry()["fixed"].factory, system(load(scenario(tmp_path, head + target)), 0))
    assert spending(replayed.job, replayed.exchanges).usd == pytest.approx(cost)
