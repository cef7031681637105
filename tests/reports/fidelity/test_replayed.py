"""The page of `harness trace replayed`: distances, autocorrelations, verdicts, by hand-made numbers and on the arenas."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp

from harness.cli.main import main
from harness.scenario import load, parse
from reports.fidelity.replayed import RoleCheck, autocorrelation, check, distance, fitted_twin, verdict, write
from tests.support.made_up import START, frames, score_row
from tests.support.marks import slow


@cache
def checked(name: str) -> list[RoleCheck]:
    """What `check` finds of a scenario, once for all tests."""
    return list(check(load(name)))


def test_the_distance_is_the_largest_difference_of_the_distribution_functions() -> None:
    same = np.arange(100.0)
    assert distance([same], [[same], [same]]) == (0.0, 0.0, 0.0)
    assert distance([same], [[same + 25]])[0] == pytest.approx(0.25)
    found = distance([same], [[same], [same + 50]])
    assert found.value == pytest.approx(0.25)
    assert (found.low, found.high) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.5))


def test_the_distance_is_scipys_also_with_ties() -> None:
    rng = np.random.default_rng(3)
    one, other = rng.normal(size=100).round(1), rng.normal(0.2, size=333).round(1)
    assert distance([one], [[other]]).value == ks_2samp(one, other, method="asymp").statistic


def test_autocorrelation_is_that_of_a_process_of_first_order() -> None:
    rng = np.random.default_rng(0)
    series = []
    for _ in range(20):
        values = [0.0]
        for step in rng.normal(size=2000):
            values.append(0.8 * values[-1] + step)
        series.append(np.array(values))
    assert autocorrelation(series, 3) == pytest.approx([0.8, 0.64, 0.512], abs=0.03)
    assert np.isnan(autocorrelation([np.ones(100), np.arange(3.0)], 5)).all()


@pytest.mark.parametrize(
    "name",
    [
        "replay-spot",
        "replay-faults",
        "replay-network",
        "replay-stragglers",
        slow("replay-imbalance"),
    ],
)
def test_a_replay_is_nearer_to_its_recording_than_the_fit(name: str) -> None:
    for found in checked(name):
        assert found.replayed_distance.high < found.fitted_distance.low + 0.01
        assert found.replayed_distance.value < 0.06
        if found.memory is not None:
            recorded, replayed, fitted = (one[0] for one in found.memory)
            assert abs(replayed - recorded) < 0.1
            assert abs(fitted) < 0.1


def test_slowness_lasts_in_the_recording_and_in_its_replay_only() -> None:
    (found,) = checked("replay-stragglers")
    assert found.memory is not None
    assert [round(float(one[0]), 1) for one in found.memory] == [0.6, 0.6, 0.0]


def test_the_twin_differs_in_what_is_replayed_only() -> None:
    scenario = load("replay-spot")
    twin = fitted_twin(scenario)
    assert twin.name == "replay-spot-fitted"
    assert twin.conditions.replay is not None
    assert twin.conditions.replay.traces()["nodes"].fitted
    assert (twin.cluster, twin.target, twin.budget, twin.start) == (
        scenario.cluster,
        scenario.target,
        scenario.budget,
        scenario.start,
    )
    with pytest.raises(ValueError, match=r"Cannot compare digits with a recording: it has no \[conditions.replay\]"):
        fitted_twin(load("digits"))
    text = scenario.text.replace('replay.nodes = "shipped:bamboo-spot"', 'replay.all = "shipped:homogeneous"')
    with pytest.raises(ValueError, match=r"Cannot fit replay.all of mine: it replays one recording in order"):
        fitted_twin(parse(text, name="mine", origin=Path("mine.toml")))


@pytest.mark.parametrize(("theirs", "same"), [((100.0, 60.0, 80.0), True), ((100.0, 80.0, 60.0), False)])
def test_the_verdict_says_whether_the_winner_differs(theirs: tuple[float, ...], same: bool, tmp_path: Path) -> None:
    tuners, rows = ("fixed", "asp", "bsp"), []
    for name, times in (("replay-spot", (100.0, 60.0, 80.0)), ("replay-spot-fitted", theirs)):
        for tuner, seconds in zip(tuners, times, strict=True):
            end = replace(START, policy=tuner)  # runs that differ in nothing count once
            rows += [score_row(name, tuner, seed, seconds * (1 + 0.01 * seed), setting=end) for seed in range(5)]
    results = frames(rows)
    found = verdict(results, "replay-spot")
    assert found.differs is not same
    assert found.leaders == ("asp", "asp" if same else "bsp")
    assert found.replayed.startswith("Use asp")
    assert found.fitted.startswith("Use asp" if same else "Use bsp")
    page = write(tmp_path / "replayed.html", [load("replay-spot")], results).read_text()
    assert f"The winner differs on {0 if same else 1} of 1" in re.sub(r"\s+", " ", page)
    assert ("The winner differs: asp under replay, bsp under the fit." in page) is not same
    assert ("The same winner: asp." in page) is same
    assert page == write(tmp_path / "again.html", [load("replay-spot")], results).read_text()


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replayed", "replay-network", "replay-spot", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "replayed.html").read_text()
    assert "replayed.html" in capsys.readouterr().out
    assert page.count("<svg") == 2
    (tmp_path / "out" / "replayed.html").write_text("mine")
    assert main(["trace", "replayed", "replay-network", "--out", str(tmp_path / "out")]) == 2
    assert "replayed.html: it is there already" in capsys.readouterr().err
    assert (tmp_path / "out" / "replayed.html").read_text() == "mine"
    assert main(["trace", "replayed", "digits", "--out", str(tmp_path / "no")]) == 2
