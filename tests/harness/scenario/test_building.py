"""Scenarios that are built in Python: the same as from a file, with its checks."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from harness.scenario import Scenario, embedded, job, load, own_model, parse, show, system
from harness.scenario.building import _toml, scenario
from harness.scenario.tables import RecordedTables, Tables
from tests.support.marks import examples, slow
from tuners.actions import Run

ALONE = {
    "summary": "Three machines that count pushes",
    "cluster": {"nodes": [{"type": "edge-4core", "count": 3}]},
    "workload": {"name": "mltuner-mf"},
    "start": {"worker_count": 2},
    "free": {"worker_count": {"integer": [1, 2]}},
    "target": {"metric": "clocks", "value": 40},
    "budget": {"seconds": 1000},
}


def test_the_package_is_called_and_is_a_package() -> None:
    assert harness.scenario("digits") == load("digits") == harness.scenario.load("digits")


def test_a_scenario_needs_no_file() -> None:
    made = harness.scenario(name="small", seeds=3, **ALONE)
    assert (made.name, made.seeds.count, made.target.value) == ("small", 3, 40)
    assert len(job(made).nodes) == 3
    assert harness.scenario(made) is made


def test_every_table_of_a_file_is_an_argument() -> None:
    arguments = inspect.signature(scenario).parameters
    assert set(Tables.__struct_fields__) | set(RecordedTables.__struct_fields__) == set(arguments) - {"base", "name"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", slow("nesterov")])
def test_a_momentum_that_changes_nothing_is_told(optimizer: str) -> None:
    made = scenario("digits-logistic", workload={"overrides": {"optimizer": optimizer}})
    seen = [system(scenario(made, start={"momentum": m}), 0).perform(Run(clocks=60)) for m in (0.0, 0.9)]
    same = np.array_equal(*(window.pushes.loss for window in seen))
    assert same == ("momentum (no effect: sgd has none)" in " ".join(show(made).replace("#", "").split()))


@pytest.mark.parametrize(("policy", "idle"), [("asp", True), ("ssp", False)])
def test_a_staleness_that_changes_nothing_is_told(policy: str, idle: bool) -> None:
    """Where the policy is held, as here, a bound on staleness that is still free may have no effect."""
    held = scenario("digits-logistic", start={"policy": policy}, free={"policy": None})
    said = " ".join(show(held).replace("#", "").split())
    assert idle == ("staleness (no effect: no policy that this job can have is bounded by it)" in said)


def test_brackets_change_the_line_of_a_key_or_of_a_table_and_a_key() -> None:
    plain = load("digits")
    made = load("digits[start.policy=asp,start.momentum=0.5,seconds=77]")
    assert (made.start.policy, made.start.momentum, made.budget.seconds) == ("asp", 0.5, 77)
    assert made.knobs == plain.knobs
    assert made.name == "digits[start.policy=asp,start.momentum=0.5,seconds=77]"
    with pytest.raises(ValueError, match=r"no line in \[target\] begins with 'policy'"):
        load("digits[target.policy=asp]")


def test_a_base_is_changed_key_by_key() -> None:
    base = load("digits")
    made = harness.scenario("digits", conditions={"stragglers": None}, free={"momentum": None}, start={"policy": "asp"})
    assert made.name == "digits-changed"
    assert made.conditions.stragglers is None
    assert made.conditions.jitter == base.conditions.jitter
    assert {k.name for k in base.knobs} - {k.name for k in made.knobs} == {"momentum"}
    assert (made.start.policy, made.start.learning_rate) == ("asp", base.start.learning_rate)
    assert made.summary == base.summary


def test_what_a_base_does_not_have_can_be_removed() -> None:
    """So that one change can be made to many scenarios."""
    calm = harness.scenario("digits-logistic", conditions={"episodes": None}, free={"outer_rate": None, "role/n9": None})
    assert calm.knobs == harness.scenario("digits-logistic").knobs


def test_numbers_of_numpy_are_numbers() -> None:
    made = harness.scenario("digits", start={"learning_rate": np.float32(0.5), "batch_size": np.int64(8)})
    assert (made.start.learning_rate, made.start.batch_size) == (0.5, 8)


@pytest.mark.parametrize("name", embedded())
def test_every_scenario_survives_being_written_again(name: str) -> None:
    text = load(name).text
    assert tomllib.loads(_toml(tomllib.loads(text))) == tomllib.loads(text)


_PLAIN = st.one_of(st.text(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False))
_VALUES = st.recursive(_PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@examples(15)
@given(st.dictionaries(st.text(), _PLAIN | st.dictionaries(st.text(), _VALUES)))
def test_any_table_is_read_as_it_was_written(tables: dict[str, object]) -> None:
    try:
        text = _toml(tables)
        text.encode()
    except UnicodeEncodeError:
        return  # half of a surrogate pair, which no file can hold
    assert tomllib.loads(text) == tables


_SOME = st.floats(1.0, 1e6)
_SHARE = st.floats(0.0, 1.0)
_NODES = st.lists(st.sampled_from(["n0", "n1", "n2", "n3", "n4"]), min_size=1, max_size=3, unique=True)
_KNOBS = {
    "worker_count": st.tuples(st.integers(1, 2), st.integers(2, 5)).map(lambda ends: {"integer": list(ends)}),
    "role/*": st.just({"choice": ["worker", "server", "both", "idle"]}),
    "load/*": st.sampled_from([{"integer": [0, 64]}, {"real": [0.0, 1.0]}]),
    "data_share/*": st.just({"real": [0.0, 1.0]}),
    "model_share/n3": st.just({"choice": [0.5, 1.0]}),
    "batch_size": st.sampled_from([{"integer": [1, 64]}, {"choice": [16, 32, 500]}]),
    "learning_rate": st.tuples(_SHARE, _SOME).map(lambda ends: {"real": list(ends), "log": True}),
    "policy": st.sets(st.sampled_from(["asp", "bsp", "ssp", "quorum"])).map(lambda x: {"choice": sorted({"asp", *x})}),
    "quorum": st.just({"integer": [0, 4]}),
    "checkpoint_seconds": st.just({"real": [0.0, 600.0]}),
    "pull_clocks": st.just({"choice": [1, 2]}),
}
_CONDITIONS = {
    "jitter": _SHARE,
    "stagger": st.booleans(),
    "sleeps": st.fixed_dictionaries({"probability": _SHARE, "mean_seconds": _SOME}),
    "stragglers": st.fixed_dictionaries({"mean_seconds": _SOME, "nodes": _NODES}),
    "episodes": st.lists(
        st.fixed_dictionaries({"node": st.just("n1"), "start_seconds": _SOME, "seconds": _SOME, "factor": _SOME}), max_size=2
    ),
    "delays": st.lists(st.fixed_dictionaries({"nodes": _NODES, "delay_seconds": _SOME}), max_size=2),
    "buckets": st.lists(
        st.fixed_dictionaries({"nodes": _NODES, "capacity_bytes": _SOME, "refill_bytes_per_second": _SOME}), max_size=2
    ),
    "nodes": st.lists(
        st.fixed_dictionaries(
            {
                "nodes": _NODES,
                "seconds": _SOME,
                "event": st.sampled_from(["joins", "leaves", "fails"]),
                "notice_seconds": _SOME,
            }
        ),
        max_size=3,
    ),
    "losses": st.lists(st.fixed_dictionaries({"every_seconds": _SOME, "repair_seconds": _SOME}), max_size=1),
    "thinking_seconds": _SOME,
}
_NETWORK = {
    "discipline": st.sampled_from(["maxmin", "fifo", "uneven"]),
    "control_queue": _SHARE,
    "snapshot_clocks": st.integers(0, 50),
    "independent_flows": st.booleans(),
}


@given(
    st.fixed_dictionaries({}, optional=_KNOBS),
    st.fixed_dictionaries({}, optional=_CONDITIONS),
    st.fixed_dictionaries({"value": _SOME}, optional={"by_share": st.booleans(), "minimise": st.just("usd")}),
    st.fixed_dictionaries({}, optional=_NETWORK),
)
def test_any_scenario_is_refused_in_words_or_shown_as_it_is_read(
    free: dict[str, Any], conditions: dict[str, Any], target: dict[str, Any], network: dict[str, Any]
) -> None:
    tables = ALONE | {
        "cluster": {"nodes": [{"type": "m4.xlarge", "count": 5}]} | network,
        "free": free,
        "conditions": conditions,
        "target": {"metric": "clocks"} | target,
    }
    try:
        made = scenario(name="any", **tables)
    except ValueError as refusal:
        assert re.match(r"harness.scenario\('any'\): \[(cluster|free|conditions|target|start)\] ", str(refusal)), refusal  # noqa: PT017
        return
    again = parse(show(made), name=made.name, origin=made.origin)
    assert replace(again, text=made.text) == made


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"cluster": {"discipline": "fifo", "snapshot_clocks": 20}}, r"\[cluster\] .* send snapshots: use maxmin"),
        ({"cluster": {"control_queue": 1.0}, "workload": {"name": "clicks-fm"}}, r"\[cluster\] .* set control_queue to 0"),
        (
            {"cluster": {"server_threads": 2, "switch_bytes_per_second": 1e9, "switch_both_ways": True}},
            r"\[cluster\] .*threads where pulls and pushes share a switch: leave server_threads at 1",
        ),
        (
            {
                "cluster": {"server_threads": 2},
                "conditions": {"buckets": [{"nodes": ["n0"], "capacity_bytes": 1e6, "refill_bytes_per_second": 1e3}]},
            },
            r"\[cluster\] .*threads where nodes have token buckets: leave server_threads at 1",
        ),
        (
            {"cluster": {"server_threads": 2}, "start": {"servers": ["n0", "n2"]}},
            r"\[cluster\] .*threads where machines work and serve: leave server_threads at 1",
        ),
        (
            {"cluster": {"independent_flows": True}, "workload": {"name": "clicks-fm"}},
            r"\[cluster\] .* leave independent_flows out",
        ),
        ({"workload": {"name": "clicks-fm"}, "start": {"local_steps": 2}}, r"\[workload\] Cannot take local steps on emb"),
        (
            {"workload": {"name": "digits-svm", "overrides": {"optimizer": "adarevision", "aggregation": "mean"}}},
            r"\[workload\] Cannot apply the mean of gradients by 'adarevision'",
        ),
    ],
)
def test_what_no_run_computes_is_refused_before_any_run(tables: dict[str, Any], message: str) -> None:
    start = {"workers": ["n0", "n1"], "servers": ["n2"], "policy": "asp"} | tables.get("start", {})
    given = ALONE | {"free": {"policy": {"choice": ["asp", "bsp"]}}} | tables
    given["cluster"] = {"nodes": [{"type": "m4.xlarge", "count": 3}]} | tables.get("cluster", {})
    with pytest.raises(ValueError, match=message):
        scenario(name="none", **(given | {"start": start}))


def test_on_a_scenario_that_ships_paths_start_at_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    for base in ("digits", "digits[seconds=3600]", load("digits"), scenario("digits", name="other", seeds=2)):
        assert own_model(scenario(base, name="own", workload={"model": "mine.py:make_model"}))[0] == "mine.py"


def test_paths_start_at_the_bases_folder(tmp_path: Path) -> None:
    profiles = Path(str(tmp_path)) / "mine.toml"
    (tmp_path / "digits.toml").write_text(load("digits").text)
    with pytest.raises(ValueError, match=r"mine\.toml"):
        harness.scenario(tmp_path / "digits.toml", cluster={"profiles": "mine.toml"})
    profiles.write_text("")
    assert isinstance(harness.scenario(tmp_path / "digits.toml", cluster={"profiles": "mine.toml"}), Scenario)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"Cannot make a scenario of nothing"),
        ({"base": "digitz"}, r"No scenario 'digitz': did you mean digits"),
        (
            {"base": "digits", "start": {"polcy": "bsp"}},
            r"^harness.scenario\('digits-changed'\): \[start\] polcy: ",
        ),
        ({"base": "digits", "start": 3}, r"Cannot read start=3: give a dictionary of keys, as in \[start\] of a file"),
        ({"base": "digits", "name": "a/b", "seeds": 1}, r"Cannot name a scenario 'a/b'"),
        ({"base": "digits", "start": {"policy": object}}, r"Cannot write policy = <class 'object'> into a scenario"),
        ({**ALONE, "budget": {}}, r"\[budget\] seconds: it is missing"),
        ({"base": "digits", "seeds": 0}, r"\[seeds\] count"),
        (
            {"base": "digits", "conditions": {"straglers": None}},
            r"Cannot remove 'straglers' from \[conditions\]: there is no such key; did you mean stragglers",
        ),
        ({"base": "digits", "free": {"learnig_rate": None}}, r"Cannot remove 'learnig_rate' .* did you mean learning_rate"),
    ],
)
def test_mistakes_name_table_and_key(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness.scenario(**arguments)
