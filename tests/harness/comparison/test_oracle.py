"""The oracle in a comparison: its runs have names made from settings, resume, merge, and do not depend on the cache."""

import math
from itertools import islice
from pathlib import Path

import pytest

from harness.comparison import oracle, oracle_cache, results
from harness.comparison.compare import Planned, compare
from harness.comparison.merge import merge
from harness.comparison.run_process import Done, Task
from harness.scenario import job, load
from simulators.cluster.conditions import absent_at_start
from tests.support import arena
from tests.support.folders import contents
from traces import store
from traces.schema import minimised
from tuners.baselines.best_fixed import candidates, search

TUNERS = ["fixed", "random_search", "best_fixed"]

pytestmark = pytest.mark.usefixtures("kept_processes")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(arena.TINY)
    return path


def without_host(folder):
    return {name: data for name, data in contents(folder).items() if name != "host.csv"}


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
    assert seen == 1  # the start; what it takes is the limit of all others
    compare([tiny], TUNERS, out=tmp_path / "cut", system=arena.SYSTEM, resume=True)
    assert without_host(tmp_path / "cut") == without_host(tmp_path / "whole")


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
    begun = next(search(job(scenario), [], 3, lambda setting, seed: 1.0))
    expected = [(oracle.name_of("best_fixed", setting), setting, seed) for setting, seed, _ in begun]
    assert oracle.first(scenario, "best_fixed", 3) == expected
    assert len(expected) == 3


def test_no_setting_of_the_search_begins_with_nodes_that_join_later(tmp_path):
    scenario = load("drawn:elastic[1]")
    late = absent_at_start(scenario.conditions)
    assert late
    given = job(scenario)
    contested = [next(s for s in candidates(given)[1:] if late.intersection(s.workers + s.servers))]
    asked = [s for batch in search(given, contested, 1, lambda s, seed: 1.0, absent=late) for s, _, _ in batch]
    assert len(asked) >= 20
    assert not any(late.intersection(setting.workers + setting.servers) for setting in asked)


# ------------------------------------------------------------------------------------------- runs that cannot be chosen


def tables(folder):
    return {name: data for name, data in without_host(folder).items() if not name.startswith("runs/")}


def stops(folder):
    """The runs that were given up, and after how many seconds."""
    return {
        str(p.relative_to(folder).with_suffix("")): results.stopped_seconds(p.with_suffix(""))
        for p in sorted(folder.glob("runs/*/*/*.stopped"))
    }


@pytest.fixture
def without_limits(monkeypatch):
    """Lets every run of a comparison go to its end."""
    unlimited = lambda *given, **more: ([(s, seed, math.inf) for s, seed, _ in b] for b in search(*given, **more))  # noqa: E731

    def compared(*given, **more):
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "search", unlimited)
            compare(*given, **more, system=arena.SYSTEM)

    return compared


@pytest.mark.parametrize("seeds", [1, 2])
def test_what_is_stopped_at_its_limit_changes_no_table(tiny, tmp_path, without_limits, seeds):
    without_limits([tiny], TUNERS, out=tmp_path / "whole", seeds=seeds)
    compare([tiny], TUNERS, out=tmp_path / "limited", seeds=seeds, system=arena.SYSTEM)
    assert tables(tmp_path / "limited") == tables(tmp_path / "whole")
    assert not stops(tmp_path / "whole")
    given_up = stops(tmp_path / "limited")
    assert given_up
    for run, seconds in given_up.items():
        assert not (tmp_path / "limited" / run).exists()
        assert minimised(results.read_score(tmp_path / "whole" / run)) >= seconds


def test_a_run_that_was_given_up_is_made_again_for_a_higher_limit(tiny, tmp_path):
    compare([tiny], ["fixed", "best_fixed"], out=tmp_path / "out", system=arena.SYSTEM)
    name = next(iter(stops(tmp_path / "out")))
    run = tmp_path / "out" / name
    before = without_host(tmp_path / "out")
    results.give_up(run, 0.001)  # as under a limit that more seeds have raised since
    assert not results.is_known(run, 0.002)
    compare([tiny], ["fixed", "best_fixed"], out=tmp_path / "out", system=arena.SYSTEM, resume=True)
    assert without_host(tmp_path / "out") == before
    (tmp_path / "out" / f"{name}.stopped").write_text("?")
    with pytest.raises(ValueError, match=r"Cannot read .*\.stopped: it is damaged .* Delete the file and resume\."):
        compare([tiny], ["fixed", "best_fixed"], out=tmp_path / "out", system=arena.SYSTEM, resume=True)


def test_merged_folders_know_the_most_of_each_run(tiny, tmp_path, without_limits):
    compare([tiny], ["fixed", "best_fixed"], out=tmp_path / "a", system=arena.SYSTEM)
    compare([tiny], ["asp", "best_fixed"], out=tmp_path / "b", system=arena.SYSTEM)
    first, second, *_ = stops(tmp_path / "a")
    results.give_up(tmp_path / "a" / first, 0.001)
    out = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert stops(out) == stops(tmp_path / "b")
    without_limits([tiny], ["fixed", "best_fixed"], out=tmp_path / "whole")
    out = merge([tmp_path / "a", tmp_path / "whole"], tmp_path / "all")
    assert stops(out) == {}
    assert (out / second / "score.json").is_file()


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
    assert without_host(again) == without_host(made)
    assert oracle_cache.get(task(tmp_path / "other", tiny, seed=1)) is None


@pytest.mark.parametrize(
    "more",
    [
        {"start": None},
        {"record": True},
        {"system": arena.SYSTEM},
        {"text": 'a = "file.csv"'},
        {"text": '[x]\ny = ["d/e"]'},
        {"text": '[workload]\ndata = "numbers"'},
    ],
    ids=["contestant", "trace", "other system", "file", "folder", "folder beside the scenario"],
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
    few = lambda *given, **more: islice(search(*given, count=3, **more), 2)  # noqa: E731 (the rest is the same to the cache)
    monkeypatch.setattr(oracle, "search", few)
    kept = []
    put, get = oracle_cache.put, oracle_cache.get
    monkeypatch.setattr(oracle_cache, "_store", lambda: None)
    compare([tmp_path / "small.toml"], ["fixed", "best_fixed"], out=tmp_path / "without", seeds=1)
    monkeypatch.undo()
    monkeypatch.setattr(oracle, "search", few)
    monkeypatch.setattr(oracle_cache, "_store", lambda: oracle_cache.ProgramFolder(tmp_path / "cache"))
    monkeypatch.setattr(oracle_cache, "put", lambda *a: kept.append("put") or put(*a))
    monkeypatch.setattr(oracle_cache, "get", lambda t: (found := get(t)) and (kept.append("get") or found))
    for name in ("first", "second"):
        compare([tmp_path / "small.toml"], ["fixed", "best_fixed"], out=tmp_path / name, seeds=1)
    assert without_host(tmp_path / "first") == without_host(tmp_path / "second") == without_host(tmp_path / "without")
    assert kept.count("get") == 3
