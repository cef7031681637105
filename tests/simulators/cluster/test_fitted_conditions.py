"""Conditions that are drawn from distributions fitted to a recording keep size and frequency, not order and identity."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from harness.scenario import load
from simulators.cluster.condition_series import condition_series, with_fitted
from simulators.cluster.conditions import Conditions, Replay, ReplayedTrace, check
from simulators.cluster.fitted_conditions import NodeLosses, fitted_changes, fitted_episodes, lognormal
from simulators.cluster.trace_driven import expand_replay
from simulators.cluster.trace_driven_nodes import places
from tests.support.small_jobs import NAMES, SMALL, cluster, job, start, system
from tuners.actions import Run, Target

CALM = Conditions(jitter=0.0, stagger=False)
ARENAS = ("replay-spot", "replay-faults", "replay-network", "replay-stragglers", "replay-imbalance")


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_lognormal_draws_have_the_mean_and_the_deviation_of_the_logarithms() -> None:
    drawn = np.log(lognormal([1.0, np.e**2], 4000, rng()))
    assert drawn.mean() == pytest.approx(1.0, abs=4 / np.sqrt(4000))
    assert drawn.std() == pytest.approx(1.0, abs=4 / np.sqrt(2 * 4000))
    assert lognormal([3.0, 3.0], 2, rng()).tolist() == pytest.approx([3.0, 3.0])


def test_rates_of_losses_are_counted_over_places() -> None:
    """Two places for 100 s: one is lost after 20 s and taken again after 30 s more; the other has notice at 60 s, is lost at
    70 s and stays free. A loss counts from its notice."""
    found = places(
        [(20.0, "a", "failed"), (50.0, "a2", "joined"), (60.0, "b", "leaving"), (70.0, "b", "left"), (100.0, "c", "joined")]
    )
    losses = found.losses()
    assert losses.per_second == pytest.approx(2 / (20 + 50 + 60))
    assert losses.back_per_second == pytest.approx(2 / (30 + 40))
    assert (losses.fails, losses.notice_seconds) == (0.5, 10.0)


def test_nodes_leave_and_come_back_at_the_fitted_rates() -> None:
    losses = NodeLosses(per_second=0.01, back_per_second=0.05, fails=0.25, notice_seconds=3.0)
    nodes = [f"n{i}" for i in range(40)]
    made = fitted_changes(losses, nodes, 1000.0, rng(), faster=2.0)
    gone = [c for c in made if c.event != "joins"]
    cycle = 1 / 0.02 + 0.75 * 1.5 + 1 / 0.1
    assert len(gone) == pytest.approx(40 * 1000 / cycle, abs=4 * np.sqrt(40 * 1000 / cycle))
    assert sum(c.event == "fails" for c in gone) / len(gone) == pytest.approx(0.25, abs=4 * np.sqrt(0.19 / len(gone)))
    assert {c.notice_seconds for c in gone} == {0.0, 1.5}
    check(Conditions(nodes=tuple(made)), tuple(nodes))  # each node leaves and joins by turns
    assert fitted_changes(losses._replace(back_per_second=0.0), ["a"], 1e6, rng(), 1.0)[1:] == []
    assert fitted_changes(losses._replace(per_second=0.0), ["a"], 1e6, rng(), 1.0) == []


def test_episodes_come_at_the_recorded_rate() -> None:
    spells = [(0.0, 10.0, 2.0), (50.0, 70.0, 3.0)]
    made = fitted_episodes([1.0, 1.0], spells, 100.0, [f"n{i}" for i in range(30)], 1000.0, rng(), faster=2.0)
    assert len(made) == pytest.approx(600, abs=4 * np.sqrt(600))  # 1 per machine and 100 recorded seconds
    assert np.mean([e.seconds for e in made]) == pytest.approx(7.5, abs=4 * 7.5 / np.sqrt(len(made)))
    assert np.median([e.factor for e in made]) == pytest.approx(np.sqrt(6), rel=0.05)


@pytest.mark.parametrize("name", ARENAS)
def test_replay_and_fit_have_the_mean_of_the_recording(name: str) -> None:
    """Within the deviation over seeds; a replay of losses begins when all places are taken, so that it has some more."""
    made = load(name)
    conditions, nodes = made.conditions, made.cluster.nodes
    for role, replayed in condition_series(conditions, nodes, 3000.0, range(8)).items():
        fitted = condition_series(with_fitted(conditions), nodes, 3000.0, range(8))[role]
        assert fitted.recorded[0].tolist() == replayed.recorded[0].tolist()
        means = [np.mean([np.concatenate(run).mean() for run in one.simulated]) for one in (replayed, fitted)]
        spread = np.std([np.concatenate(run).mean() for run in fitted.simulated])
        assert means[0] == pytest.approx(means[1], rel=0.35, abs=3 * spread)


def test_the_same_seed_draws_the_same_and_another_one_other_conditions() -> None:
    made = load("replay-spot")
    fitted = with_fitted(made.conditions)
    first, again, other = (expand_replay(fitted, made.cluster.nodes, 10800.0, seed)[0].nodes for seed in (1, 1, 2))
    assert first == again != other


def test_the_engine_carries_out_the_series() -> None:
    """The compute times of the mini-batches of a run are those of a calm run times the numbers of its series."""
    trace = load("replay-imbalance").conditions.replay
    assert trace is not None
    conditions = msgspec.structs.replace(CALM, replay=trace)
    target = Target("clocks", 10_000)
    calm, slow = (
        system(cluster(), job(SMALL), start(), each, target=target, seed=3).perform(Run(clocks=60)).pushes
        for each in (CALM, conditions)
    )
    series = condition_series(conditions, cluster().nodes, 1e12, [3])["compute"].simulated[0]
    for worker, name in enumerate(NAMES[:3]):
        usual = calm.compute_seconds[calm.worker == worker][0]
        took = slow.compute_seconds[slow.worker == worker]
        assert took / usual == pytest.approx(series[worker][: len(took)], rel=1e-4), name


def test_a_fit_has_no_order() -> None:
    trace = ReplayedTrace("t", deal="order", fitted=True)
    with pytest.raises(ValueError, match=r"replay\.nodes: fitted draws have no order"):
        check(Conditions(replay=Replay(nodes=trace)), ("a",))
