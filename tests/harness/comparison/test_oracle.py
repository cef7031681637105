"""The oracle in a comparison: its runs have names made from settings, resume, merge, and do not depend on the cache."""

from pathlib import Path

import pytest

from harness.comparison import oracle, oracle_cache
from harness.comparison.compare import Planned, compare
from harness.comparison.merge import merge
from harness.comparison.run_process import Done, Task
from harness.scenario import job, load
from simulators.cluster.conditions import absent_at_start
from tests.support import arena
from traces import store
from tuners.baselines.best_fixed import candidates, search

TUNERS = ["fixed", "random_search", "best_fixed"]

pytestmark = pytest.mark.usefixtures("kept_processes")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(arena.TINY)
    return path


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "host.csv"
    }


def test_an_interrupted_search_ends_with_the_same_bytes(tiny, tmp_path):
    compare([tiny], TUNERS, out=tmp_path / "whole", system=arena.SYSTEM)

    class Stop(Exception):
        pass

    def stop_in_the_search(event):
        if isinstance(event, Planned) and event.made_before:
            raise Stop

    with pytest.raises(Stop):
        compare([tiny], TUNERS, out=tmp_path / "cut", system=arena.SYSTEM, watch=stop_in_the_search)
    seen = store.load_results(tmp_path / "cut").oracles["tiny"]["best_fixed"]["settings"]
    assert seen == 20
    compare([tiny], TUNERS, out=tmp_path / "cut", system=arena.SYSTEM, resume=True)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_searches_of_two_comparisons_merge(tiny, tmp_path):
    compare([tiny], ["fixed", "best_fixed"], out=tmp_path / "a", system=arena.SYSTEM)
    compare([tiny], TUNERS, out=tmp_path / "b", system=arena.SYSTEM)
    out = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    seen = [store.load_results(f).oracles["tiny"]["best_fixed"]["settings"] for f in (tmp_path / "a", tmp_path / "b", out)]
    assert max(seen[:2]) <= seen[2] <= sum(seen[:2]) - 20
    times = [
        store.load_results(f).scores.filter(tuner="best_fixed")["completion_seconds"].mean()
        for f in (tmp_path / "a", tmp_path / "b", out)
    ]
    assert times[2] == min(times)


def test_what_runs_beside_the_contestants_is_what_the_search_begins_with(tiny):
    scenario = load(tiny)
    begun = []
    for batch in search(job(scenario), [], 3, lambda setting, seed: 1.0):
        begun += [(oracle.name_of("best_fixed", setting), setting, seed) for setting, seed in batch]
        if len(batch) == 19:
            break
    assert oracle.first(scenario, "best_fixed", 3) == begun
    assert len(begun) == 3 + 19


def test_no_setting_of_the_search_begins_with_nodes_that_join_later():
    scenario = load("drawn:elastic[1]")
    late = absent_at_start(scenario.conditions)
    begun = [setting for _, setting, _ in oracle.first(scenario, "best_fixed", 1)]
    assert late
    assert len(begun) == 20
    assert not any(late.intersection(setting.workers + setting.servers) for setting in begun)
    given = job(scenario)
    contested = [next(s for s in candidates(given)[1:] if late.intersection(s.workers + s.servers))]
    asked = [s for batch in search(given, contested, 1, lambda s, seed: 1.0, absent=late) for s, _ in batch]
    assert not any(late.intersection(setting.workers + setting.servers) for setting in asked)


def task(folder, path, **more):
    start = candidates(arena.system(load(path), 0, None).job)[1]
    given = {"scenario": "s", "origin": "", "text": Path(path).read_text(), "tuner": "best_fixed+x", "plays": "fixed"}
    return Task(**(given | {"seed": 0, "folder": str(folder), "start": start} | more))


def test_a_kept_run_comes_back_with_its_files(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    made, again = tmp_path / "made", tmp_path / "again"
    (made / "deep").mkdir(parents=True)
    (made / "score.json").write_bytes(b"{}")
    (made / "deep" / "x").write_bytes(b"\x00\x01")
    again.mkdir()
    done = Done("target", "", 12.5, 0.1, 0.2, "a machine")
    assert oracle_cache.get(task(again, tiny)) is None
    oracle_cache.put(task(made, tiny), done)
    assert oracle_cache.get(task(again, tiny)) == done
    assert contents(again) == contents(made)
    assert oracle_cache.get(task(tmp_path / "other", tiny, seed=1)) is None


@pytest.mark.parametrize(
    "more",
    [{"start": None}, {"record": True}, {"system": arena.SYSTEM}, {"text": 'a = "file.csv"'}, {"text": '[x]\ny = ["d/e"]'}],
    ids=["contestant", "trace", "other system", "file", "folder"],
)
def test_what_may_depend_on_more_is_not_kept(tiny, tmp_path, monkeypatch, more):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "made").mkdir()
    oracle_cache.put(task(tmp_path / "made", tiny, **more), Done("target", "", 1.0, 0.0, 0.0))
    assert oracle_cache.get(task(tmp_path / "made", tiny, **more)) is None
    assert not list(tmp_path.glob("cache*"))


def test_a_comparison_has_the_same_bytes_with_and_without_the_cache(tmp_path, monkeypatch):
    text = Path(load("digits-logistic").origin).read_text().replace("value = 0.92", "value = 0.6")
    (tmp_path / "small.toml").write_text(text)
    monkeypatch.setattr(oracle, "candidates", lambda job, **more: candidates(job, count=2, **more))
    monkeypatch.setattr(
        oracle, "search", lambda *_, **__: iter(())
    )  # the random settings alone: the rest is the same to the cache
    kept = []
    put, get = oracle_cache.put, oracle_cache.get
    monkeypatch.setattr(oracle_cache, "_store", lambda: None)
    compare([tmp_path / "small.toml"], ["fixed", "best_fixed"], out=tmp_path / "without", seeds=1)
    monkeypatch.undo()
    monkeypatch.setattr(oracle, "candidates", lambda job, **more: candidates(job, count=2, **more))
    monkeypatch.setattr(oracle, "search", lambda *_, **__: iter(()))
    monkeypatch.setattr(oracle_cache, "_store", lambda: oracle_cache.ProgramFolder(tmp_path / "cache"))
    monkeypatch.setattr(oracle_cache, "put", lambda *a: kept.append("put") or put(*a))
    monkeypatch.setattr(oracle_cache, "get", lambda t: (found := get(t)) and (kept.append("get") or found))
    for name in ("first", "second"):
        compare([tmp_path / "small.toml"], ["fixed", "best_fixed"], out=tmp_path / name, seeds=1)
    assert contents(tmp_path / "first") == contents(tmp_path / "second") == contents(tmp_path / "without")
    assert kept.count("get") == 2
