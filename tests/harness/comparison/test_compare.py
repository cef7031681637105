"""Comparisons give the same bytes every time, lose no run, and report every failure as a row or a clear error."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Never

import polars as pl
import pytest

from harness.comparison import results
from harness.comparison.compare import Event, Finished, Planned, Underway, compare
from harness.comparison.merge import merge
from harness.drive import replay
from harness.scenario import load, parse
from reports.output.site import publish
from reports.verdicts.calibration_ranks import ranks, sentences
from reports.verdicts.conclusions import not_applicable
from reports.verdicts.summary import summary
from tests.support import arena
from tests.support.folders import contents
from tests.support.made_up import calibrated_toml
from traces import schema, store
from traces.exchanges import read_log
from traces.schema import HOST

ROOT = Path(__file__).parents[3]
MEASURED = {"host.csv"}

pytestmark = pytest.mark.usefixtures("kept_processes")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(arena.TINY)
    return path


def run(tiny: Path, out: Path, *tuners: str, **options: Any) -> store.Results:
    given: dict[str, Any] = {"system": arena.SYSTEM, "jobs": 2} | options
    compare([tiny], tuners, out=out, **given)
    return store.load_results(out)


def without_host(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name not in MEASURED}


# -------------------------------------------------------------------------------------------------------- what is written


def test_the_same_bytes_with_one_job_and_with_two(tiny: Path, tmp_path: Path) -> None:
    tuners = ("fixed", "random_search", "tests.support.arena:faster")
    one = run(tiny, tmp_path / "one", *tuners, jobs=1)
    run(tiny, tmp_path / "two", *tuners, jobs=2)
    assert without_host(tmp_path / "one") == without_host(tmp_path / "two")
    assert one.scores.select("tuner", "seed").rows() == [
        ("fixed", 0),
        ("fixed", 1),
        ("random_search", 0),
        ("random_search", 1),
        ("tests.support.arena:faster", 0),
        ("tests.support.arena:faster", 1),
    ]
    assert one.scores["status"].to_list() == ["target"] * 6
    assert one.settings.filter(pl.col("tuner") == "tests.support.arena:faster").height == 4
    assert one.evaluations.height > 6
    assert one.host.columns == list(HOST)
    assert one.host.select("tuner", "seed").rows() == one.scores.select("tuner", "seed").rows()
    assert one.manifest["seeds"] == 2
    assert (tmp_path / "one" / "scenarios" / "tiny.toml").read_text() == arena.TINY


CALIBRATED = arena.TINY.replace(
    'nodes = [{ type = "edge-4core", count = 5 }]', 'nodes = [{ type = "toy", count = 5 }]\nprofiles = "made.toml"'
)


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    """The tiny scenario on machines of a calibration with two draws."""
    path = tmp_path / "tiny.toml"
    path.write_text(CALIBRATED)
    (tmp_path / "made.toml").write_text(calibrated_toml(nic_bytes_per_second=(5e5, 2e6)))
    return path


def test_draws_of_a_calibration_are_played_beside_it_on_the_same_seeds(calibrated: Path, tmp_path: Path) -> None:
    tuners = ("fixed", "random_search", "best_fixed")
    run(calibrated, tmp_path / "plain", *tuners)
    found = run(calibrated, tmp_path / "drawn", *tuners, calibration_draws=2)
    assert found.manifest["draws"] == {"tiny": ["tiny+draw1", "tiny+draw2"]}
    assert set(found.scores["scenario"]) == {"tiny"}
    assert sorted(found.draws.select("scenario", "tuner", "seed").rows()) == [
        (f"tiny+draw{draw}", tuner, seed) for draw in (1, 2) for tuner in ("fixed", "random_search") for seed in (0, 1)
    ]
    plain, drawn = without_host(tmp_path / "plain"), without_host(tmp_path / "drawn")
    assert {name: data for name, data in drawn.items() if name.startswith("runs/tiny/")} == {
        name: data for name, data in plain.items() if name.startswith("runs/")
    }
    text = (tmp_path / "drawn" / "scenarios" / "tiny+draw2.toml").read_text()
    again = parse(text, name="again", origin=calibrated)
    assert {kind.nic_bytes_per_second for _, kind in again.cluster.nodes} == {2e6}
    assert "draws" not in store.read_manifest(tmp_path / "plain")


def test_drawn_comparisons_are_resumed_merged_and_published_with_their_draws(calibrated: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(calibrated, one, "fixed", "best_fixed", calibration_draws=1)
    before = without_host(one)
    run(calibrated, one, "fixed", "best_fixed", calibration_draws=1, resume=True)
    assert without_host(one) == before
    with pytest.raises(ValueError, match="it was made with scenarios"):
        run(calibrated, one, "fixed", "best_fixed", resume=True)
    run(calibrated, two, "fixed", calibration_draws=2)
    both = store.load_results(merge([one, two], tmp_path / "both"))
    assert both.manifest["draws"] == {"tiny": ["tiny+draw1", "tiny+draw2"]}
    assert set(both.draws["scenario"]) == {"tiny+draw1", "tiny+draw2"}
    publish(one, tmp_path / "site")
    kept = store.read(tmp_path / "site" / "tables" / "scores.parquet", schema.SCORES)
    assert "tiny+draw1" in set(kept["scenario"])


def test_a_scenario_that_names_a_draw_itself_is_compared_with_its_oracle(calibrated: Path, tmp_path: Path) -> None:
    calibrated.write_text(CALIBRATED + "\n[calibration]\ndraw = 1\n")
    found = run(calibrated, tmp_path / "out", "fixed", "best_fixed")
    assert set(found.scores["tuner"]) == {"fixed", "best_fixed"}
    assert found.draws.height == 0


SHORT_JOB = (
    arena.TIMING.replace(
        'nodes = [{ type = "edge-4core", count = 5 }]', 'nodes = [{ type = "toy", count = 5 }]\nprofiles = "made.toml"'
    )
    .replace('name = "cruise-nmf"\noverrides = { demand = { model_bytes = 2e4 } }', 'name = "toy"\nfile = "made.toml"')
    .replace("batch_size = 4\n", 'batch_size = 4\npolicy = "bsp"\n')
    .replace("[free]\n", '[free]\npolicy = { choice = ["bsp", "asp"] }\n')
) + "[costs]\npolicy_restart_seconds = 8.0\n"
"""60 pushes of a calibrated job that starts with barriers, where a change of the policy takes eight seconds."""


def test_a_rank_that_the_draws_of_a_calibration_turn_over_is_not_decided(tmp_path: Path) -> None:
    """In the simulator. `asp` saves what barriers cost, which pays for a change only where these are slow.

    In the first draw a barrier costs nothing, as in the fitted constants; in the second, two seconds for each of twenty
    steps. Then the file is written again, with barriers that cost nothing in both.
    """
    path, out = tmp_path / "short.toml", tmp_path / "turned"
    path.write_text(SHORT_JOB)
    (tmp_path / "made.toml").write_text(calibrated_toml(step_seconds=(1e-6, 2.0)))
    options: dict[str, Any] = {"seeds": 3, "jobs": 1, "calibration_draws": 2}

    def said(folder: Path) -> list[str]:
        compare([path], ["fixed", "asp"], out=folder, **options)
        found = store.load_results(folder)
        told = ranks(found, summary(found))
        assert told is not None
        return sentences(told)

    turned = said(out)
    assert "Not decided by this calibration: fixed and asp (1 of 2 draws)." in turned
    (tmp_path / "made.toml").write_text(calibrated_toml(step_seconds=(1e-6, 2e-6)))
    decided = said(tmp_path / "decided")
    assert "Behind it in at least 95% of the draws: asp." in decided
    assert "The calibration decides every rank that the seeds show." in decided


def test_what_is_not_calibrated_cannot_be_drawn(tiny: Path, calibrated: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny.*has 2 draws of its constants, not 3"):
        run(calibrated, tmp_path / "out", "fixed", calibration_draws=3)
    tiny.write_text(arena.TINY)
    with pytest.raises(ValueError, match=r"^Cannot draw constants of 'tiny': \[calibration\] draw: nothing here"):
        run(tiny, tmp_path / "out", "fixed", calibration_draws=1)
    with pytest.raises(ValueError, match="Cannot draw constants -1 times"):
        run(tiny, tmp_path / "out", "fixed", calibration_draws=-1)
    assert not (tmp_path / "out").exists()


def test_the_real_simulator_gives_the_same_bytes_with_one_job_and_with_two(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    text = (Path(load("digits-logistic").origin)).read_text()
    path.write_text(text.replace("value = 0.92", "value = 0.8"))
    for jobs in (1, 2):
        compare([path], ["fixed", "asp"], out=tmp_path / str(jobs), seeds=2, jobs=jobs)
    assert without_host(tmp_path / "1") == without_host(tmp_path / "2")
    scores = store.load_results(tmp_path / "1").scores
    assert scores["status"].to_list() == ["target"] * 4
    assert scores["completion_seconds"].n_unique() == 4
    assert (scores["final_accuracy"] >= 0.8).all()


def test_a_tuner_with_nothing_to_tune_is_not_played_and_says_why(tiny: Path, tmp_path: Path) -> None:
    made = run(tiny, tmp_path / "out", "fixed", "cruise", "k_sync", "random_search")
    assert set(made.scores["tuner"]) == {"fixed", "random_search"}
    rows = made.not_applicable.select("tuner", "seed", "status", "reason", "reached", "clocks").rows()
    held = "The policy is held at 'asp' here."
    roles = "Neither the number of workers nor the roles of machines are free here."
    status = schema.NOT_APPLICABLE
    assert rows == [(t, s, status, why, False, 0) for t, why in (("cruise", roles), ("k_sync", held)) for s in (0, 1)]
    assert made.not_applicable["completion_seconds"].is_nan().all()
    assert made.host.height == 8
    folder = results.run_folder(tmp_path / "out", "tiny", "cruise", 1)
    assert read_log(folder / "exchanges.jsonl.gz") == []
    table = summary(made)
    assert set(table["tuner"]) == {"fixed", "random_search"}
    assert not_applicable(made) == [f"tiny: not applicable, and not run: cruise ({roles[:-1]}); k_sync ({held[:-1]})."]
    again: list[Event] = []
    run(tiny, tmp_path / "out", "fixed", "cruise", "k_sync", "random_search", resume=True, watch=again.append)
    assert again == [Planned(8, 8, (), ("fixed", "cruise", "k_sync", "random_search"))]


def test_adding_tuners_that_have_nothing_to_tune_changes_no_row(tiny: Path, tmp_path: Path) -> None:
    few = run(tiny, tmp_path / "few", "fixed", "random_search")
    many = run(tiny, tmp_path / "many", "fixed", "random_search", "cruise", "k_sync", "bespoke_bo", "bsp")
    assert few.scores.equals(many.scores)
    one, other = (summary(made).drop("thinking_seconds") for made in (few, many))  # measured on the host
    assert one.equals(other)


def test_a_run_can_be_replayed_from_its_log(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "out", "tests.support.arena:faster", seeds=1)
    log = read_log(results.run_folder(tmp_path / "out", "tiny", "tests.support.arena:faster", 0) / "exchanges.jsonl.gz")
    assert log
    assert replay(arena.faster(arena.system(load(tiny), 0, None).job), log) is None


def test_events_are_reported(tiny: Path, tmp_path: Path) -> None:
    told: list[Event] = []
    run(tiny, tmp_path / "out", "tests.support.arena:slow", seeds=1, watch=told.append)
    assert isinstance(told[0], Planned)
    assert (told[0].runs, told[0].made_before) == (1, 0)
    assert [r.tuner for r in told[0].left] == list(told[0].contestants) == ["tests.support.arena:slow"]
    assert isinstance(told[-1], Finished)
    assert told[-1].done.thinking_seconds > 0.5
    underway = [e for e in told if isinstance(e, Underway)]
    assert underway
    assert underway[0].progress.budget_seconds == 20.0
    again: list[Event] = []
    run(tiny, tmp_path / "out", "tests.support.arena:slow", seeds=1, resume=True, watch=again.append)
    assert [(e.runs, e.made_before, e.left) for e in again if isinstance(e, Planned)] == [(1, 1, ())]
    assert len(again) == 1


def test_the_oracle_is_the_best_candidate_over_all_seeds(tiny: Path, tmp_path: Path) -> None:
    made = run(tiny, tmp_path / "out", "fixed", "best_fixed")
    scores = {(r["tuner"], r["seed"]): r for r in made.scores.to_dicts()}
    assert set(scores) == {("fixed", 0), ("fixed", 1), ("best_fixed", 0), ("best_fixed", 1)}
    folders = sorted((tmp_path / "out" / "runs" / "tiny").glob("best_fixed+*"))
    assert len(folders) > 20  # random ones, what the contestants ended with, and the neighbours of the best
    assert json.loads((tmp_path / "out" / "oracles.json").read_text())["tiny"]["best_fixed"]["settings"] == len(folders)
    whole = [f for f in folders if (f / "1").is_dir()]
    assert (
        1 < len(whole) <= 1 + 4 * 3
    )  # the start, and the best of random ones, of what contestants ended with, of neighbours
    means = [
        sum(float(json.loads((f / s / "score.json").read_text())["completion_seconds"]) for s in "01") / 2 for f in whole
    ]
    ours = sum(scores["best_fixed", s]["completion_seconds"] for s in (0, 1)) / 2
    assert ours == min(means)
    assert scores["best_fixed", 0]["reconfigurations"] == 0
    assert ours <= sum(scores["fixed", s]["completion_seconds"] for s in (0, 1)) / 2
    assert made.manifest["oracles"] == ["best_fixed"]
    assert made.host.filter(pl.col("tuner") == "best_fixed").height == 2


def test_where_no_setting_reaches_the_target_the_oracle_is_the_nearest_to_it(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(arena.TINY.replace("value = 0.1", "value = 1e-9"))
    made = run(tiny, tmp_path / "out", "fixed", "best_fixed")
    assert not made.scores["reached"].any()
    whole = [f for f in (tmp_path / "out" / "runs" / "tiny").glob("best_fixed+*") if (f / "1").is_dir()]
    assert len(whole) > 1
    scores = [[json.loads((f / s / "score.json").read_text()) for s in "01"] for f in whole]
    ours = made.scores.filter(pl.col("tuner") == "best_fixed")
    assert ours["final_loss"].mean() == min(sum(float(s["final_loss"]) for s in mine) / 2 for mine in scores)


# ------------------------------------------------------------------------------------------------------- interruptions


def test_a_comparison_killed_half_way_resumes_to_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    tuners = ("fixed", "tests.support.arena:held", "random_search")
    run(tiny, tmp_path / "whole", *tuners)
    out = tmp_path / "cut"
    script = (
        "import pathlib\nfrom tests.support import arena\nfrom harness.comparison.compare import compare\n"
        f"compare([{str(tiny)!r}], {tuners!r}, out=pathlib.Path({str(out)!r}), system=arena.SYSTEM)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HELD": "1"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment)  # noqa: S603 (our own script)
    try:
        deadline = time.monotonic() + 100
        while not list(out.glob("runs/*/*/*")) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    made = len(list(out.glob("runs/*/*/*")))
    assert 1 <= made < 6
    assert not (out / "scores.parquet").exists()
    for _ in range(600):  # until the orphaned worker has ended and the lock is free
        try:
            told: list[Event] = []
            run(tiny, out, *tuners, resume=True, watch=told.append)
            break
        except ValueError:
            time.sleep(0.1)
    assert (told[0].runs, told[0].made_before) == (6, made)
    assert without_host(out) == without_host(tmp_path / "whole")


def test_an_interruption_keeps_what_is_finished(tiny: Path, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Finished):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(tiny, out, "fixed", "tests.support.arena:slow", watch=stop, jobs=1)
    partial = store.load_results(out)
    assert partial.scores.height == 1
    assert not (out / "unfinished").exists()
    assert run(tiny, out, "fixed", "tests.support.arena:slow", jobs=1, resume=True).scores.height == 4


def test_a_run_whose_process_dies_is_a_row_until_it_is_repeated(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    made = run(tiny, out, "fixed", "tests.support.arena:dies", seeds=1, jobs=1)
    rows = {r["tuner"]: r for r in made.scores.to_dicts()}
    assert rows["fixed"]["status"] == "target"
    assert rows["tests.support.arena:dies"]["status"] == "error"
    assert "was killed by SIGKILL" in rows["tests.support.arena:dies"]["reason"]
    assert "fewer --jobs" in rows["tests.support.arena:dies"]["reason"]
    assert "goodbye" in rows["tests.support.arena:dies"]["reason"]
    assert rows["tests.support.arena:dies"]["completion_seconds"] == 20.0
    monkeypatch.setenv("LIVE", "1")
    again = run(tiny, out, "fixed", "tests.support.arena:dies", seeds=1, jobs=1, resume=True)
    assert again.scores["status"].to_list() == ["target", "target"]


def test_a_full_disk_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OSError, match=r"the disk is full\. What was written before is whole"):
        run(tiny, out, "fixed", seeds=1, jobs=1, system="tests.support.arena:full_system")
    assert not list(out.glob("runs/*/*/*"))
    assert not (out / "unfinished").exists()
    assert run(tiny, out, "fixed", seeds=1, jobs=1, resume=True).scores["status"].to_list() == ["target"]


# ------------------------------------------------------------------------------------------------------- bad plug-ins


def test_bad_tuners_are_rows_with_reasons(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = run(
        tiny,
        out,
        "fixed",
        "tests.support.arena:raises",
        "tests.support.arena:no_generator",
        "tests.support.arena:made",
        "tests.support.arena:chatty",
        seeds=1,
    )
    rows = {r["tuner"]: r for r in made.scores.to_dicts()}
    assert {t: r["status"] for t, r in rows.items()} == {
        "fixed": "target",
        "tests.support.arena:chatty": "target",
        "tests.support.arena:raises": "error",
        "tests.support.arena:no_generator": "error",
        "tests.support.arena:made": "error",
    }
    assert "ZeroDivisionError: so it goes (arena.py, line" in rows["tests.support.arena:raises"]["reason"]
    assert rows["tests.support.arena:raises"]["clocks"] == 20
    assert rows["tests.support.arena:made"]["reason"].startswith(
        "The tuner is no generator but <object object>:"
    )  # no address, so the same text in every run
    assert "no generator but 7" in rows["tests.support.arena:no_generator"]["reason"]
    assert "so it goes" in (results.run_folder(out, "tiny", "tests.support.arena:raises", 0) / "error.txt").read_text()
    assert (
        results.run_folder(out, "tiny", "tests.support.arena:chatty", 0) / "output.txt"
    ).read_text() == "hello from tiny\n"
    assert not (results.run_folder(out, "tiny", "fixed", 0) / "output.txt").exists()


def test_a_job_that_cannot_be_set_up_is_a_row(tiny: Path, tmp_path: Path) -> None:
    made = run(tiny, tmp_path / "out", "fixed", seeds=1, system="tests.support.arena:no_system")
    row = made.scores.to_dicts()[0]
    assert (row["status"], row["completion_seconds"]) == ("error", 20.0)
    assert "could not be set up: Cannot read mnist/train" in row["reason"]


def test_a_run_without_exchanges_counts_with_its_budget_of_usd(tiny: Path, tmp_path: Path) -> None:
    cheapest = arena.TINY.replace('type = "edge-4core"', 'type = "edge-4core", usd_per_hour = 9.0')
    tiny.write_text(cheapest.replace("[target]", '[target]\nminimise = "usd"'))
    made = run(tiny, tmp_path / "out", "fixed", "tests.support.arena:dies", seeds=1, jobs=1)
    failed = run(tiny, tmp_path / "failed", "fixed", seeds=1, system="tests.support.arena:no_system")
    budgets = {row["budget_usd"] for row in made.scores.to_dicts() + failed.scores.to_dicts()}
    assert budgets == {load(tiny).budget.seconds * 9.0 * len(load(tiny).cluster.nodes) / 3600}
    assert summary(made)["reached"].to_list() == [1, 0]


def test_workers_that_cannot_start_are_an_error(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="Cannot start a worker process: it ended at once"):
        run(tiny, tmp_path / "out", "fixed")


# --------------------------------------------------------------------------------------------------- before anything runs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tuners": ("fixd",)}, "fixed"),
        ({"tuners": ("tests.support.arena:fastr",)}, "faster"),
        ({"tuners": ("nowhere:tuner",)}, "nowhere"),
        ({"tuners": ("fixed", "fixed")}, "'fixed' with itself"),
        ({"tuners": ()}, "compare nothing"),
        ({"scenarios": ()}, "compare nothing"),
        ({"scenarios": ("digit",)}, "did you mean digits"),
        ({"scenarios": ("nowhere.toml",)}, r"Cannot read scenario nowhere\.toml"),
        ({"seeds": 0}, "0 seeds"),
        ({"jobs": 0}, "0 jobs"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    tiny: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    given = {"scenarios": [tiny], "tuners": ("fixed",), "out": tmp_path / "out", "system": arena.SYSTEM} | changed
    with pytest.raises(ValueError, match=message):
        compare(**given)
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_name_are_refused(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "tiny.toml"
    other.parent.mkdir()
    other.write_text(arena.TINY)
    with pytest.raises(ValueError, match="scenario 'tiny' with itself"):
        compare([tiny, other], ["fixed"], out=tmp_path / "out")


def test_existing_results_are_not_changed(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tiny, out, "fixed", "bsp", seeds=2)
    before = contents(out)

    def refused(message: str, **changed: Any) -> None:
        given = {"tuners": ("fixed", "bsp"), "seeds": 2, "resume": True} | changed
        with pytest.raises(ValueError, match=message):
            run(tiny, out, *given.pop("tuners"), **given)
        assert contents(out) == before

    refused("is there already. Go on with it by --resume", resume=False)
    refused("was made with tuners .* Give these, too: resuming adds", tuners=("fixed", "tpe"))
    refused("was made with seeds 2, and this is 1. Give these, too", seeds=1)
    tiny.write_text(arena.TINY.replace("seconds = 20", "seconds = 21"))
    refused("scenario 'tiny' has changed since")
    tiny.write_text(arena.TINY)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"harness": "0.0.1"}))
    before = contents(out)
    refused(r"made with harness 0\.0\.1")
    (out / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    before = contents(out)
    refused("format 99")


def test_a_folder_of_something_else_is_refused(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="there already"):
        run(tiny, out, "fixed")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        run(tiny, out, "fixed", resume=True)
    with pytest.raises(ValueError, match="it is a file"):
        run(tiny, out / "thesis.tex", "fixed")
    assert contents(out) == {"thesis.tex": b"precious"}


def test_a_manifest_without_an_entry_is_answered(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tiny, out, "fixed", seeds=1)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "scenarios"}))
    with pytest.raises(ValueError, match=r"Cannot go on with .*: it was made with scenarios None"):
        run(tiny, out, "fixed", seeds=1, resume=True)


def test_what_cannot_be_written_or_played_is_refused_before_drawn_scenarios_are_made(tmp_path: Path, monkeypatch) -> None:
    """The goal of a member that does not ship comes from a reference run: minutes, before one learned of a mistake."""

    def draws(_name: object) -> Never:
        pytest.fail("a scenario was drawn")

    monkeypatch.setattr("harness.comparison.plan.load", draws)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="there already"):
        compare(["drawn:learning[500]"], ["fixed"], out=tmp_path)
    with pytest.raises(ValueError, match="No tuner 'nobody'"):
        compare(["drawn:learning[500]"], ["nobody"], out=tmp_path / "new")


def test_two_comparisons_do_not_share_a_folder(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    lock = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another comparison is writing there"):
            run(tiny, out, "fixed", seeds=1)
    finally:
        os.close(lock)


def test_a_damaged_run_is_named(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tiny, out, "fixed", seeds=1)
    folder = results.run_folder(out, "tiny", "fixed", 0)
    (folder / "score.json").write_text("{")
    with pytest.raises(ValueError, match=r"score\.json: it is damaged.*Delete the folder"):
        results.assemble(out)


def test_a_worker_ends_with_its_parent() -> None:
    """A parent that is killed cannot stop its worker; the worker sees that its standard input closes."""
    script = (
        "import time\nfrom harness.comparison.pool import WorkerProcess\n"
        "worker = WorkerProcess()  # held: without a reference its pipe closes at once\nprint(worker.pid, flush=True)\n"
        "time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:  # noqa: S603
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert alive(worker)
        parent.kill()
    deadline = time.monotonic() + 120  # a busy machine may let it wait
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie (ended, but not waited for) does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_messages_about_damaged_files_say_what_to_delete(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tiny, out, "fixed", seeds=1)
    before = without_host(out)
    folder = results.run_folder(out, "tiny", "fixed", 0)
    (folder / "settings.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match=rf"settings\.parquet: it is damaged .*\. Delete the folder {folder} and resume\."):
        results.assemble(out)
    (folder / "settings.parquet").unlink()
    with pytest.raises(ValueError, match=rf"there is no such file\. Delete the folder {folder} and resume\."):
        results.assemble(out)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    run(tiny, out, "fixed", seeds=1, resume=True)
    assert without_host(out) == before
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "seeds_of"}))
    with pytest.raises(ValueError, match=r"manifest\.json: it is damaged \('seeds_of'\)"):
        results.assemble(out)


def test_resuming_adds_scenarios_tuners_and_seeds_with_the_bytes_of_one_comparison(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(arena.TINY)
    given: dict[str, Any] = {"jobs": 2}
    compare([tiny, other], ["fixed", "random_search"], out=tmp_path / "whole", seeds=3, **given)
    grown = tmp_path / "grown"
    compare([tiny], ["fixed"], out=grown, seeds=2, **given)
    made = (grown / "runs" / "tiny" / "fixed" / "0").stat().st_ino
    compare([tiny], ["random_search", "fixed"], out=grown, seeds=2, resume=True, **given)
    compare([tiny, other], ["fixed", "random_search"], out=grown, seeds=3, resume=True, **given)
    assert without_host(grown) == without_host(tmp_path / "whole")
    assert (grown / "runs" / "tiny" / "fixed" / "0").stat().st_ino == made, "the first runs are kept"


def test_an_oracle_that_gets_more_seeds_keeps_what_it_has_seen(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = ("fixed", "best_fixed")
    run(tiny, out, *names, seeds=1)
    seen = {path.name for path in (out / "runs" / "tiny").iterdir()}
    run(tiny, out, *names, seeds=2, resume=True)
    run(tiny, tmp_path / "whole", *names, seeds=2)
    assert seen <= {path.name for path in (out / "runs" / "tiny").iterdir()}
    grown, whole = (
        store.load_results(folder).scores.filter(tuner="best_fixed")["completion_seconds"].mean()
        for folder in (out, tmp_path / "whole")
    )
    assert grown <= whole


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^Cannot compute on 'nonsense': .*nonsense.* leave --device\.$"):
        run(tiny, tmp_path / "out", "fixed", device="nonsense")
    with pytest.raises(ValueError, match="on a Ray cluster: its workers use the CPU"):
        run(tiny, tmp_path / "out", "fixed", device="cuda", address="auto")
    assert not (tmp_path / "out").exists()


def test_the_manifest_says_the_device_and_another_one_does_not_go_on(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tiny, out, "fixed", seeds=1).manifest["device"] == "cpu"
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "device"}))
    run(tiny, out, "fixed", seeds=1, resume=True)  # a folder from before there were devices
    (out / "manifest.json").write_text(json.dumps(manifest | {"device": "cuda"}))
    with pytest.raises(ValueError, match="it was made with device cuda, and this is cpu"):
        run(tiny, out, "fixed", seeds=1, resume=True)
