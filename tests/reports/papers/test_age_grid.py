"""The grid of bounds on age: its statistics on known times, and the arena in which pairing pays."""

from dataclasses import replace

import numpy as np
import pytest

import harness.scenario as scenario
from reports.papers import age_grid
from reports.papers.age_grid import main, pairs_told_apart, played, settings, unpaired_pairs

SEEDS = 3


def test_a_shared_draw_of_luck_hides_a_difference_from_unpaired_seeds_only():
    rng = np.random.default_rng(0)
    luck = rng.normal(0.0, 1.0, (8, 1))
    logs = luck + np.array([0.0, 0.2, 0.4]) + rng.normal(0.0, 0.02, (8, 3))
    assert pairs_told_apart(logs, paired=True) == 3
    assert pairs_told_apart(logs, paired=False) == 0
    told, right = unpaired_pairs(logs, SEEDS)
    assert told < 0.5
    assert right < 0.8


def test_equal_settings_are_not_told_apart():
    same = np.tile(np.log([[100.0], [200.0], [150.0]]), 4)
    assert pairs_told_apart(same, paired=True) == 0
    assert pairs_told_apart(np.full((3, 4), 5.0), paired=False) == 0


def test_the_settings_are_the_grid_under_each_policy():
    asked = [(s.policy, s.staleness) for s in settings(scenario.load("bounded-age"))]
    assert asked == [(policy, bound) for policy in ("discard", "admit") for bound in (0, 1, 2, 4, 8, 16)]


def test_an_arena_without_the_knobs_is_refused():
    with pytest.raises(ValueError, match=r"^Cannot compare bounds in tf36-svm: it has to free `policy` and `staleness`"):
        settings(scenario.load("tf36-svm"))


@pytest.mark.slow
def test_three_paired_seeds_tell_bounds_apart_in_the_arena_where_three_unpaired_ones_do_not():
    arena = scenario.load("bounded-age")
    asked = [s for s in settings(arena) if s.policy == "admit" and s.staleness in (1, 2, 4)]
    runs = [[played(arena, s, seed) for s in asked] for seed in range(SEEDS)]
    logs = np.log([[run.seconds for run in row] for row in runs])
    assert all(run.reached for row in runs for run in row)
    assert pairs_told_apart(logs, paired=True) == 3
    assert pairs_told_apart(logs, paired=False) < 3
    # All are applied, so that the age is the bound, but for the beginning, when all pull at once.
    for run in (run for row in runs for run in row):
        assert abs(run.publishing + run.generation + run.queueing - run.bound) < 1.0


@pytest.mark.slow
def test_runs_are_kept_and_printed(tmp_path, monkeypatch, capsys):
    """The table of a small arena with three bounds under one policy; a second call makes no run again."""
    arena = scenario.load("bounded-age")
    small = replace(arena, target=replace(arena.target, metric="clocks", value=40))
    monkeypatch.setattr(age_grid.scenario, "load", lambda name: small)
    few = [s for s in settings(arena) if s.policy == "admit" and s.staleness < 4]
    monkeypatch.setattr(age_grid, "settings", lambda arena: few)
    kept = tmp_path / "runs.jsonl"
    main(["--seeds", "3", "--kept", str(kept)])
    first = capsys.readouterr().out
    assert first.count("\n| ") == 1 + 1 + 3
    assert "admit, 3 seeds" in first
    monkeypatch.setattr(age_grid, "played", None)
    main(["--seeds", "3", "--kept", str(kept)])
    assert capsys.readouterr().out == first
    with pytest.raises(SystemExit):
        main(["--seeds", "2"])
