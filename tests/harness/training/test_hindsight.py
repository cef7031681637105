"""`harness train rlp --form broad`: the same bytes again, a choice that follows what was faster, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.cli.main import main
from harness.training import hindsight
from harness.training.hindsight import HindsightPlan, InstancePlayed, judged, learn, log_ratio
from harness.training.varied import SHAPES, Shape, drawn_instance, simple_rules
from reports.papers.rlp_broad import HELD_OUT
from tuners.rlp import policy_file
from tuners.rlp.broad import MODES, TrainedBroad, broad_policy, rule_network

PLAN = HindsightPlan(instances=2, rounds=1, steps=20)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small shape, and short runs."""
    monkeypatch.setattr("harness.training.varied.SHAPES", (Shape(3, 0, 8, 0.5),))
    monkeypatch.setattr(hindsight, "_MOST_PUSHES", 120)


@pytest.mark.slow
def test_a_training_gives_the_same_bytes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = list[InstancePlayed]()
    made = learn(PLAN, tmp_path / "one.npz", watch=told.append)
    assert [t.number for t in told] == [1, 2, 1, 2]
    learn(PLAN, tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert policy_file.load(str(tmp_path / "one.npz")).about == made.about
    with pytest.raises(ValueError, match=r"one.npz: it is there already; remove it, or name another file"):
        learn(PLAN, tmp_path / "one.npz")

    # What the command hands on; it descends for 200 steps, another program.
    monkeypatch.setattr(hindsight, "fitted", lambda plan, network, *_: network)
    command = ["train", "rlp", "--form", "broad", "--instances", "2", "--rounds", "0", "--seed", "1"]
    assert main([*command, "--out", str(tmp_path / "three.npz")]) == 0
    assert "2/2  every mode" in capsys.readouterr().out
    by_command = policy_file.load(str(tmp_path / "three.npz"))
    assert isinstance(by_command, TrainedBroad)
    assert by_command.about["command"] == " ".join(["harness", *command])


def test_the_network_learns_to_choose_what_was_faster() -> None:
    """Two made-up jobs that look different: one mode is fastest on the first, another on the second."""
    plan, rng = HindsightPlan(instances=2, steps=200), np.random.default_rng(0)
    first = hindsight.RULE(seed=0)
    fastest, spans, nodes = (0, 3), 11, 17
    rows = [
        (
            job,
            hindsight.RunSpans(
                np.float32(rng.normal(size=(spans, first.job_weights.shape[0] - first.worker_biases.shape[0])) + 2 * job),
                np.zeros((spans, nodes, first.worker_weights.shape[0]), np.float32),
                np.ones((spans, nodes), bool),
                np.ones(spans, np.float32),
            ),
        )
        for job in (0, 1)
    ]
    costs = [np.where(np.arange(len(MODES)) == mode, 10.0, 25.0) for mode in fastest]
    network = hindsight.fitted(plan, first, costs, rows)
    for (_, seen), mode in zip(rows, fastest, strict=True):
        values = [hindsight.mode_values(network, *told) for told in zip(*seen[:3], strict=True)]
        assert np.mean(np.argmax(values, axis=1) == mode) > 0.8


@pytest.mark.slow
def test_a_policy_is_held_against_every_simple_rule() -> None:
    found = judged(drawn_instance(7), cap=4.0, most_pushes=400)
    assert found.rules.keys() == simple_rules(3).keys()
    assert np.isfinite(found.best_seconds)
    asp = broad_policy(rule_network(round_from=1e9, mode=3, undone=0.0), seconds=0.0)
    assert log_ratio(found, asp) == pytest.approx(np.log(found.rules["asp"] / found.best_seconds), abs=1e-6)


def test_training_instances_differ_in_what_matters() -> None:
    drawn = [drawn_instance(10**6 + n) for n in range(12)]
    rates = {one.context.workload.learning_rate for one in drawn}
    assert len(rates) == len(drawn)
    assert {one.context.workload.skew > 0 for one in drawn} == {True, False}
    assert max(rates) / min(rates) > 4


def test_the_shapes_of_training_span_what_the_policy_is_for() -> None:
    assert {shape.workers for shape in SHAPES} >= {4, 10, 16}
    assert {shape.depth for shape in SHAPES} >= {0, 1, 3, 6}
    assert len({shape.data for shape in SHAPES}) > 1
    assert {shape.batch for shape in SHAPES} >= {4, 16, 64}


def test_a_mini_batch_takes_as_long_in_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the stragglers make a difference, so that shapes differ in what they learn."""
    for shape in SHAPES:
        monkeypatch.setattr("harness.training.varied.SHAPES", (shape,))
        made = drawn_instance(7).context
        demand = made.workload.demand
        assert demand.sample_seconds * made.workload.batch_size == pytest.approx(16 * 0.2996)
        assert demand.fixed_seconds == demand.apply_seconds == demand.message_seconds == 0.0
        assert made.job.target.value == shape.accuracy


def test_nothing_that_is_held_out_is_trained_on() -> None:
    networks = {(shape.depth, shape.units, shape.data) for shape in SHAPES}
    for held in HELD_OUT.values():
        other = (held.depth, held.units, held.data) not in networks
        assert other or held.workers not in {shape.workers for shape in SHAPES}


def test_the_shipped_policy_says_how_it_was_made() -> None:
    about = policy_file.shipped().about
    made = HindsightPlan(**about["plan"])
    assert made.command() == about["command"]
    assert about["seed"] == made.seed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["rlp", "--rounds", "2"], "Cannot train the printed form with --rounds: leave it out, or --form broad."),
        (["rlp", "--form", "broad", "--lanes", "8"], "Cannot train the broad form with --lanes: leave it out"),
        (["rlp[gamma=0.9]", "--form", "broad"], "Cannot train the broad form with gamma: leave it out, or --form printed."),
        (["rlp", "--form", "broad", "--instances", "0"], "Cannot train with instances 0: give at least 1."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_trained_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--out", str(tmp_path / "p.npz")]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
