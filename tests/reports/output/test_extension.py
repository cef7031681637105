"""A new tuner beside the tuners of a published site: joined only where both were computed alike."""

import json
import shutil

import polars as pl
import pytest

from harness.cli.main import main
from reports.output import extension
from reports.output.site import publish
from tests.support.folders import contents
from tests.support.made_up import contest, folder_of
from traces import store
from traces.schema import EVALUATIONS, SCORES, SETTINGS


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    results = contest(scenarios=("away", "home"), tuners=("fixed", "cruise", "best_fixed"), seeds=3)
    base = tmp_path_factory.mktemp("published")
    publish(folder_of(results, base / "r"), base / "site", only_overview=True)
    return base / "site"


def mine(path, scenarios=("away", "home"), tuners=("fixed", "joint"), seeds=3):
    return folder_of(contest(scenarios=scenarios, tuners=tuners, seeds=seeds), path / "mine")


def only(folder, scenario):
    """The same folder with the runs on `scenario` alone."""
    results = store.load_results(folder)
    for frame, name, schema in (
        (results.scores, "scores", SCORES),
        (results.evaluations, "evaluations", EVALUATIONS),
        (results.settings, "settings", SETTINGS),
    ):
        store.write(frame.filter(pl.col("scenario") == scenario), folder / f"{name}.parquet", schema)
    manifest = results.manifest | {"scenarios": [scenario], "seeds_of": {scenario: 3}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def scores(site):
    return store.read(site / "tables" / "scores.parquet", SCORES)


def changed(folder, tuner, seconds=1.0):
    """The same folder, in which `tuner` takes `seconds` longer with seed 0."""
    results = store.load_results(folder)
    later = (pl.col("tuner") == tuner) & (pl.col("seed") == 0)
    frame = results.scores.with_columns(
        completion_seconds=pl.when(later)
        .then(pl.col("completion_seconds") + seconds)
        .otherwise(pl.col("completion_seconds"))
    )
    store.write(frame, folder / "scores.parquet", SCORES)
    return folder


def test_every_public_name_exists():
    assert all(hasattr(extension, name) for name in extension.__all__)


def test_a_new_tuner_stands_beside_those_of_the_site(site, tmp_path):
    publish(mine(tmp_path), tmp_path / "out", onto=site)
    found = scores(tmp_path / "out")
    assert set(found["tuner"]) == {"fixed", "cruise", "best_fixed", "joint"}
    assert found.filter(pl.col("tuner") != "joint").equals(scores(site))
    assert found.filter(pl.col("tuner") == "joint").height == 6
    assert b"joint" in contents(tmp_path / "out")["index.html"]
    assert set(store.read_manifest(tmp_path / "out")["tuners"]) == {"fixed", "cruise", "best_fixed", "joint"}
    hosts = pl.read_csv(tmp_path / "out" / "tables" / "host.csv")
    assert sorted(hosts["tuner"]) == ["best_fixed", "cruise", "fixed", "joint"]
    publish_again = publish(
        folder_of(contest(("away", "home"), ("fixed", "x"), 3), tmp_path / "more"), tmp_path / "two", onto=tmp_path / "out"
    )
    assert publish_again.is_file()
    assert "x" in set(scores(tmp_path / "two")["tuner"])


@pytest.mark.slow
def test_a_site_with_all_its_pages_can_be_extended(tmp_path):
    """Its table of the host's times has a row per run, and that of an overview a row per tuner."""
    results = contest(scenarios=("away", "home"), tuners=("fixed", "cruise", "best_fixed"), seeds=3)
    publish(folder_of(results, tmp_path / "r"), tmp_path / "site")
    publish(folder_of(results, tmp_path / "r2"), tmp_path / "overview", only_overview=True)
    ours = mine(tmp_path)
    tables = []
    for site in ("site", "overview"):
        publish(ours, tmp_path / f"onto-{site}", onto=tmp_path / site)
        tables.append((tmp_path / f"onto-{site}" / "tables" / "host.csv").read_text())
    assert tables[0] == tables[1]


def test_only_the_scenarios_that_were_played_count(site, tmp_path):
    publish(only(mine(tmp_path), "home"), tmp_path / "out", onto=site)
    assert set(scores(tmp_path / "out")["scenario"]) == {"home"}
    assert pl.read_csv(tmp_path / "out" / "tables" / "host.csv")["tuner"].to_list() == ["fixed", "joint"]


def test_what_does_not_apply_is_kept(site, tmp_path):
    folder = mine(tmp_path)
    results = store.load_results(folder)
    idle = (pl.col("tuner") == "joint") & (pl.col("scenario") == "away")
    frame = results.scores.with_columns(
        status=pl.when(idle).then(pl.lit("not applicable")).otherwise(pl.col("status")),
        reason=pl.when(idle).then(pl.lit("nothing is free")).otherwise(pl.col("reason")),
    )
    store.write(frame, folder / "scores.parquet", SCORES)
    publish(folder, tmp_path / "out", onto=site)
    assert scores(tmp_path / "out").filter(idle)["status"].to_list() == ["not applicable"] * 3
    ranked = pl.read_parquet(tmp_path / "out" / "tables" / "summary.parquet").select("scenario", "tuner").rows()
    assert ("home", "joint") in ranked
    assert ("away", "joint") not in ranked


def test_runs_that_differ_are_refused_until_they_are_replaced(site, tmp_path):
    folder = changed(mine(tmp_path, tuners=("fixed", "cruise")), "cruise")
    with pytest.raises(ValueError, match=r"completion_seconds of cruise on away with seed 0 is .*use --replace cruise\."):
        publish(folder, tmp_path / "out", onto=site)
    assert not (tmp_path / "out").exists()
    publish(folder, tmp_path / "out", onto=site, replaced=["cruise"])
    both = scores(tmp_path / "out").join(scores(site), on=["scenario", "tuner", "seed"])
    later = both.filter(pl.col("completion_seconds") != pl.col("completion_seconds_right"))
    assert set(later.select("tuner", "seed").rows()) == {("cruise", 0)}


def test_a_tuner_whose_code_has_changed_is_refused_until_it_is_replaced(site, tmp_path):
    def version(name, tuner, digest):
        folder = folder_of(contest(("away", "home"), ("fixed", tuner), 3), tmp_path / name)
        manifest = store.read_manifest(folder) | {"own_tuners": {tuner: digest}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    publish(version("first", "my:joint", "1"), tmp_path / "one", onto=site)
    publish(version("other", "my:other", "1"), tmp_path / "two", onto=tmp_path / "one")
    assert store.read_manifest(tmp_path / "two")["own_tuners"] == {"my:joint": "1", "my:other": "1"}
    second = changed(version("second", "my:joint", "2"), "my:joint")
    with pytest.raises(ValueError, match=r"the code of tuner 'my:joint' has changed since.*--replace 'my:joint'"):
        publish(second, tmp_path / "three", onto=tmp_path / "two")
    publish(second, tmp_path / "three", onto=tmp_path / "two", replaced=["my:joint"])
    assert store.read_manifest(tmp_path / "three")["own_tuners"]["my:joint"] == "2"


def test_a_tuner_that_was_played_on_some_scenarios_keeps_its_other_runs(site, tmp_path):
    """Two folders merged, one of which has more tuners than the other. Before, this was refused as unfinished."""
    folder = changed(changed(mine(tmp_path, tuners=("fixed", "cruise", "joint")), "cruise"), "joint")
    results = store.load_results(folder)
    played = (pl.col("tuner") != "cruise") | (pl.col("scenario") == "home")
    store.write(results.scores.filter(played), folder / "scores.parquet", SCORES)
    publish(folder, tmp_path / "out", onto=site, replaced=["cruise"])
    found, keys = scores(tmp_path / "out"), ["scenario", "tuner", "seed"]
    both = found.join(scores(site), on=keys)
    assert found.height == scores(site).height + 6
    later = both.filter(pl.col("completion_seconds") != pl.col("completion_seconds_right"))
    assert later.select(keys).rows() == [("home", "cruise", 0)]
    hosts = pl.read_csv(tmp_path / "out" / "tables" / "host.csv")
    runs = hosts.group_by("tuner").agg(pl.col("runs").sum()).sort("tuner").rows()
    before = pl.read_csv(site / "tables" / "host.csv").filter(pl.col("tuner") == "cruise")["runs"].sum()
    assert runs == [("best_fixed", 6), ("cruise", before + 6), ("fixed", 6), ("joint", 6)]


def test_more_seeds_than_the_site_has_are_taken_where_all_of_its_tuners_were_played(site, tmp_path):
    publish(
        mine(tmp_path, tuners=("fixed", "cruise", "best_fixed"), seeds=5),
        tmp_path / "out",
        onto=site,
        replaced=("fixed", "cruise", "best_fixed"),
    )
    assert scores(tmp_path / "out").height == 2 * 3 * 5
    assert store.read_manifest(tmp_path / "out")["seeds_of"] == {"away": 5, "home": 5}


def test_a_site_may_lack_runs_of_tuners_that_do_not_apply(site, tmp_path):
    older = shutil.copytree(site, tmp_path / "older")
    kept = (pl.col("tuner") != "cruise") | (pl.col("scenario") == "home")
    store.write(scores(site).filter(kept), older / "tables" / "scores.parquet", SCORES)
    publish(mine(tmp_path), tmp_path / "out", onto=older)
    assert scores(tmp_path / "out").height == scores(site).height - 3 + 6
    assert "missing" not in (tmp_path / "out" / "report.md").read_text()


def test_a_new_tuner_that_was_played_on_some_scenarios_is_unfinished(site, tmp_path):
    folder = mine(tmp_path)
    results = store.load_results(folder)
    played = (pl.col("tuner") != "joint") | (pl.col("scenario") == "home")
    store.write(results.scores.filter(played), folder / "scores.parquet", SCORES)
    with pytest.raises(ValueError, match="it is unfinished; there is no run of joint on away with seed 0"):
        publish(folder, tmp_path / "out", onto=site)
    assert not (tmp_path / "out").exists()


def test_what_differs_in_the_last_digits_only_is_alike(site, tmp_path):
    publish(changed(mine(tmp_path), "fixed", seconds=1e-7), tmp_path / "out", onto=site)
    assert scores(tmp_path / "out").height == scores(site).height + 6


def test_without_a_tuner_in_both_nothing_shows_that_they_fit(site, tmp_path):
    with pytest.raises(ValueError, match="no tuner is in both"):
        publish(mine(tmp_path, tuners=("asp", "joint")), tmp_path / "out", onto=site)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ({"scenarios": ("home", "elsewhere")}, {}, "no scenario 'elsewhere' is there"),
        ({"seeds": 4}, {}, r"away has 4 seeds, and 3 there\. Play it with --seeds 3"),
        ({"seeds": 2}, {}, r"away has 2 seeds, and 3 there\. Play it with --seeds 3 --resume"),
        ({"seeds": 2}, {"replaced": ["fixed"]}, r"away has 2 seeds, and 3 there"),
        ({}, {"replaced": ["cruise"]}, "Cannot replace 'cruise'"),
    ],
)
def test_what_does_not_fit_is_refused(site, tmp_path, given, options, said):
    with pytest.raises(ValueError, match=said):
        publish(mine(tmp_path, **given), tmp_path / "out", onto=site, **options)
    assert not (tmp_path / "out").exists()


def test_another_text_of_a_scenario_is_refused(site, tmp_path):
    folder = mine(tmp_path)
    text = (folder / "scenarios" / "home.toml").read_text()
    (folder / "scenarios" / "home.toml").write_text(text + "\n# mine\n")
    with pytest.raises(ValueError, match="scenario 'home' differs"):
        publish(folder, tmp_path / "out", onto=site)


def test_a_folder_that_is_no_site_is_refused(tmp_path, capsys):
    folder = mine(tmp_path)
    assert main(["publish", str(folder), "--onto", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "it is no site of `harness publish`" in capsys.readouterr().err
    assert main(["publish", str(folder), "--replace", "fixed", "--out", str(tmp_path / "out")]) == 2
    assert "name one with --onto" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
