"""Merged comparisons have all runs of their parts, and those that do not fit are refused before anything is written."""

import json
import shutil
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.comparison.compare import compare
from harness.comparison.merge import merge
from tests.support import arena
from traces import store

FASTER = "tests.support.arena:faster"


@pytest.fixture(scope="module")
def parts(tmp_path_factory, kept_processes):
    """Folders of comparisons: of two tuners, of another one with more seeds, and of all three."""
    base = tmp_path_factory.mktemp("parts")
    (base / "tiny.toml").write_text(arena.TINY)
    for name, tuners, seeds in (
        ("a", ["fixed", FASTER], 2),
        ("b", ["fixed", "random_search"], 3),
        ("all", ["fixed", FASTER], 3),
    ):
        compare([base / "tiny.toml"], tuners, out=base / name, seeds=seeds, system=arena.SYSTEM)
    return base


def runs(folder):
    found = store.load_results(folder).scores
    return sorted(found.select("tuner", "seed").rows())


def test_a_merged_folder_has_the_runs_of_all(parts, tmp_path):
    out = merge([parts / "a", parts / "b"], tmp_path / "out")
    assert runs(out) == [
        *[("fixed", i) for i in range(3)],
        *[("random_search", i) for i in range(3)],
        *[(FASTER, i) for i in range(2)],
    ]
    manifest = store.read_manifest(out)
    assert manifest["tuners"] == ["fixed", FASTER, "random_search"]
    assert (manifest["seeds"], manifest["seeds_of"]) == (3, {"tiny": 3})
    assert store.load_results(out).host.height == 8
    assert not list(tmp_path.glob(".*"))


def test_the_order_of_equal_parts_does_not_matter_to_the_tables(parts, tmp_path):
    one, two = merge([parts / "a", parts / "b"], tmp_path / "1"), merge([parts / "b", parts / "a"], tmp_path / "2")
    for name in ("scores", "evaluations", "settings"):
        assert (one / f"{name}.parquet").read_bytes() == (two / f"{name}.parquet").read_bytes()


def test_a_merged_comparison_can_be_resumed(parts, tmp_path):
    out = merge([parts / "a", parts / "b"], tmp_path / "out")
    compare([parts / "tiny.toml"], ["fixed", FASTER, "random_search"], out=out, seeds=3, resume=True, system=arena.SYSTEM)
    assert len(runs(out)) == 9


def test_scenarios_that_only_one_part_has_are_joined(parts, tmp_path):
    (tmp_path / "other.toml").write_text(arena.TINY)
    compare([tmp_path / "other.toml"], ["fixed"], out=tmp_path / "part", seeds=1, system=arena.SYSTEM)
    out = merge([parts / "a", tmp_path / "part"], tmp_path / "out")
    assert store.read_manifest(out)["seeds_of"] == {"tiny": 2, "other": 1}
    assert store.load_results(out).scores["scenario"].n_unique() == 2


def changed(parts, tmp_path, change):
    """Part `b` with a change."""
    copy = tmp_path / "changed"
    shutil.copytree(parts / "b", copy)
    change(copy)
    return copy


def other_text(folder):
    path = folder / "scenarios" / "tiny.toml"
    path.write_text(path.read_text().replace("seconds = 20", "seconds = 21", 1))


def other_version(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"harness": "0.0.9"}))


def other_device(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cuda"}))


def other_outcome(folder):
    path = folder / "runs" / "tiny" / "fixed" / "0" / "score.json"
    path.write_text(path.read_text().replace('"clocks": ', '"clocks": 1'))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_text, r"scenario 'tiny' differs, in line \d+: '.*21.*' there and '.*20.*' here"),
        (other_version, r"harness is 0\.0\.9 there and 0\.1\.0 here"),
        (other_device, r"device is cuda there and cpu here"),
        (other_outcome, r"are one run with two outcomes"),
        (lambda f: shutil.rmtree(f / "runs"), "it has no finished run"),
        (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda f: (f / "scenarios" / "tiny.toml").unlink(), "it lacks the text of scenario 'tiny'"),
    ],
    ids=["text", "version", "device", "outcome", "no runs", "no manifest", "no text"],
)
def test_what_does_not_fit_is_refused_with_what_differs(parts, tmp_path, capsys, change, why):
    bad = changed(parts, tmp_path, change)
    with pytest.raises(ValueError, match=why):
        merge([parts / "a", bad], tmp_path / "out")
    assert main(["merge", str(parts / "a"), str(bad), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("harness: Cannot")
    assert said.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["changed"]


def test_one_folder_and_a_folder_that_is_there_are_refused(parts, tmp_path):
    with pytest.raises(ValueError, match="name at least two"):
        merge([parts / "a"], tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="it is there already"):
        merge([parts / "a", parts / "b"], Path(tmp_path / "out"))


def test_the_commands_merge_publish_and_report_write_what_they_say(parts, tmp_path, capsys):
    out, site = tmp_path / "out", tmp_path / "site"
    assert main(["merge", str(parts / "a"), str(parts / "b"), "--out", str(out)]) == 0
    assert (out / "report.html").is_file()
    assert main(["publish", str(parts / "all"), "--out", str(site)]) == 0
    assert (site / "index.html").is_file()
    assert main(["publish", str(out), "--out", str(tmp_path / "other")]) == 2
    assert "is unfinished; there is no run of tests.support.arena:faster on tiny with seed 2" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(["report", str(out), "--csv", "--markdown", "--figures", "svg"]) == 0
    said = capsys.readouterr().out
    assert (out / "csv" / "summary.csv").is_file()
    assert (out / "report.md").is_file()
    assert list((out / "figures").glob("*.svg"))
    assert f"Answers and tables: {out / 'report.md'}" in said
