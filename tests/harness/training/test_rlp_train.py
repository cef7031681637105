"""`harness train rlp`: the same bytes after interruptions, endings of runs, and clear refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from harness.cli.main import main
from harness.cli.terminal import display
from harness.training import train
from harness.training.instances import STRAGGLERS
from harness.training.train import PRETRAINING, TrainingPlan, checkpoint
from simulators.cluster.conditions import Stragglers
from simulators.engine import loop
from simulators.engine.job_state import Records
from tests.support.marks import slow
from tests.tuners.rlp.test_rlp import RAW, plain_states, push
from tuners import policies
from tuners.rlp import dqn, policy_file
from tuners.rlp.network import Scaling, network_input, with_push
from tuners.rlp.options import Options

LEARNING = Options(replay=20, batch=8, rate=0.001, unit_seconds=10.0)
PLAN = TrainingPlan(
    depths=(0,),
    rates=(0.5,),
    sleeps=(4.7,),
    workers=3,
    instances=3,
    episodes=4,
    pretrain=1,
    most_pushes=40,
    accuracy=0.8,
    options=LEARNING,
)
TRAINING = "rlp[rate=0.001,replay=20,batch=8,unit_seconds=10.0]"
OPTIONS = "--depths 0 --rates 0.5 --sleeps 4.7 --workers 3 --accuracy 0.8 "
OPTIONS += "--instances 3 --episodes 4 --pretrain 1 --pushes 40 --seed 0"
COMMAND = ["train", TRAINING, *OPTIONS.split(" ")]


class _Enough:
    """Keeps what it is called with, and interrupts the training after so many runs."""

    def __init__(self, runs: int = 10**9) -> None:
        self.left, self.told = runs, list[train.TrainingProgress]()

    def __call__(self, told: train.TrainingProgress) -> None:
        self.told.append(told)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def _infinite(learner: dqn.Learner) -> dqn.Learner:
    weights = (np.full_like(learner.online.weights[0], np.inf), *learner.online.weights[1:])
    return learner._replace(online=learner.online._replace(weights=weights))


@pytest.mark.slow
def test_the_state_is_the_papers_on_the_pushes_of_a_real_run() -> None:
    instance = PLAN.instance(0)
    run = instance.begin(dqn.recording_policy(policies.asp(), LEARNING, 40))
    args = (run.program, instance.context.data, run.inputs, run.state)
    state, table, used = loop.advance(*args, np.int32(40), np.float64(np.inf), rows=40)
    rows = np.asarray(state.clock.policy.record.rows)[: int(used)].astype(float)
    seen = Records(*np.asarray(table)[: int(used)].T)
    np.testing.assert_array_equal(rows[:, 0], np.arange(1, len(rows) + 1))
    np.testing.assert_array_equal(rows[:, 3], seen.staleness)
    assert rows[:, 3].max() > 0
    np.testing.assert_allclose(rows[:, 6], np.diff(seen.seconds, prepend=seen.seconds[0]) / LEARNING.unit_seconds, rtol=1e-5)
    for scaling in (Scaling(), RAW, Scaling(offset=np.array([100, 1, 0, 2], np.float32))):
        history = jnp.zeros((10, 4), jnp.float32)
        for row, expected in zip(rows, plain_states(rows[:, :4].tolist(), scaling), strict=True):
            history = with_push(history, push(0, [True], staleness=row[3], before=row[1], after=row[1] + row[2]))
            np.testing.assert_allclose(network_input(scaling, history), expected, rtol=1e-4, atol=1e-4)


def test_stragglers_sleep_as_the_plan_says_for_the_depth_of_their_instance() -> None:
    plan = replace(PLAN, depths=(0, 0), rates=(0.5, 0.4), sleeps=(4.7, 0.0))
    by_rate = {0.5: Stragglers(4.7, 0.5, probability=0.3, spread_seconds=3.0), 0.4: Stragglers(0.0, 0.0, probability=0.3)}
    contexts = [plan.instance(number).context for number in range(8)]
    assert {context.workload.learning_rate for context in contexts} == set(by_rate)
    assert all(context.conditions.stragglers == by_rate[context.workload.learning_rate] for context in contexts)
    usual = replace(plan, sleeps=()).instance(0).context
    assert usual.conditions.stragglers == STRAGGLERS
    assert plan.instance(0).context.job == usual.job  # nothing else is different


def test_an_interrupted_training_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts, by_command = (tmp_path / name for name in ("whole.npz", "parts.npz", "command.npz"))
    watch = _Enough()
    made = train.train(PLAN, whole, watch=watch)
    assert [t.policy for t in watch.told] == [p.name for p in PRETRAINING] + ["rlp, learning"] * 4
    assert [t.run for t in watch.told] == list(range(1, PLAN.runs + 1))
    # A run that has not reached its target within 40 pushes is cut short, and is counted as such.
    assert {t.status for t in watch.told} == {"target", "cut short"}
    assert all(t.pushes == 40 for t in watch.told if t.status == "cut short")
    endings = made.about["endings"]
    assert endings == {name: sum(t.status == name for t in watch.told) for name in endings}
    assert not checkpoint(whole).exists()

    for runs in (2, 5):  # once while it learns from fixed policies, once while it learns by itself
        with pytest.raises(KeyboardInterrupt):
            train.train(PLAN, parts, resume=True, watch=_Enough(runs))
        assert checkpoint(parts).exists()
    with pytest.raises(ValueError, match=r"a training was interrupted here; go on with --resume, or remove .*checkpoint"):
        train.train(PLAN, parts)
    with pytest.raises(ValueError, match=r"made with other options, seed; give the same, or remove it to begin anew"):
        train.train(replace(PLAN, seed=1, options=replace(LEARNING, gamma=0.9)), parts, resume=True)
    train.train(PLAN, parts, resume=True)
    assert parts.read_bytes() == whole.read_bytes()

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(display, "training", lambda console, runs: nullcontext(_Enough(3)))  # as Ctrl-C would in the third run
        assert main([*COMMAND, "--out", "command.npz"]) == 130
    assert "command.npz.checkpoint keeps the training so far" in capsys.readouterr().err
    assert main([*COMMAND, "--out", "command.npz", "--resume"]) == 0
    assert f"9/{PLAN.runs}  rlp, learning: " in capsys.readouterr().out
    assert by_command.read_bytes() == whole.read_bytes()
    assert policy_file.load("command.npz").about["command"] == f"harness train '{TRAINING}' {OPTIONS}"
    assert main([*COMMAND, "--out", "command.npz"]) == 2
    assert "Cannot write command.npz: it is there already" in capsys.readouterr().err


@pytest.mark.parametrize(("accuracy", "status"), [(0.3, "target"), (1.0, "cut short")])
def test_a_run_that_was_cut_short_teaches_nothing_in_pre_training(tmp_path: Path, accuracy: float, status: str) -> None:
    """The paper learns the time that was left until the end, which is not known of such a run."""
    watch, out = _Enough(2), tmp_path / "p.npz"
    with pytest.raises(KeyboardInterrupt):
        train.train(replace(PLAN, accuracy=accuracy), out, watch=watch)
    assert watch.told[0].status == status
    kept = policy_file.unpack(checkpoint(out).read_bytes(), "rlp-training", (1,), "", "")[2]  # after the first run
    fresh = dqn.new_learner(LEARNING, PLAN.seed).online.weights[0]
    assert np.array_equal(kept["leaf000"], fresh) == (status == "cut short")


@pytest.mark.slow
def test_an_interrupted_training_in_lanes_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CHECKPOINT_RUNS", 4)
    plan = replace(PLAN, lanes=2, pretrain=0, episodes=5)
    watch, drawn, draw = _Enough(), list[int](), train.draw
    monkeypatch.setattr(train, "draw", lambda kind, seed: drawn.append(seed - 10**6) or draw(kind, seed))
    made = train.train(plan, tmp_path / "whole.npz", watch=watch)
    assert drawn == [0, 1, 2, 0, 1]  # rounds of 2, of 1 (there is no fourth instance), and of 2
    assert [t.policy for t in watch.told] == ["rlp, exploring"] * 5
    assert [t.run for t in watch.told] == [1, 2, 3, 4, 5]
    assert len({(t.pushes, t.seconds) for t in watch.told}) == 5
    assert made.about["plan"]["lanes"] == 2
    assert "--pushes 40 --lanes 2 --seed 0" in str(made.about["command"])

    for runs in (2, 3):  # on the last run of a round, and in the middle of one
        with pytest.raises(KeyboardInterrupt):
            train.train(plan, tmp_path / "parts.npz", resume=True, watch=_Enough(runs))
    with pytest.raises(ValueError, match=r"made with other lanes; give the same, or remove it to begin anew"):
        train.train(replace(plan, lanes=1), tmp_path / "parts.npz", resume=True)
    train.train(plan, tmp_path / "parts.npz", resume=True)
    assert (tmp_path / "parts.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.parametrize("lanes", [1, 3, 4, 9])
def test_rounds_contain_every_run_once(lanes: int) -> None:
    plan = replace(PLAN, lanes=lanes, instances=7, episodes=17, pretrain=8)
    seen: list[tuple[str, int]] = []
    while len(seen) < plan.runs:
        upcoming = train.next_round(plan, len(seen))
        assert 0 < upcoming.size <= lanes
        seen += [(upcoming.fixed.name if upcoming.fixed else "", upcoming.first + i) for i in range(upcoming.size)]
    before = [(p.name, number) for number in range(7, 15) for p in PRETRAINING]
    assert seen[len(before) :] == [("", number % 7) for number in range(17)]
    assert sorted(seen[: len(before)]) == sorted(before)
    assert seen[: len(before)] == before or lanes > 1
    turns = [name for name, _ in seen[: lanes * len(PRETRAINING) : lanes]] if lanes < plan.pretrain else []
    assert turns in ([], [p.name for p in PRETRAINING])  # the policies take turns


def test_an_instance_can_have_the_depth_of_another() -> None:
    mixed = replace(PLAN, sleeps=(), depths=(0, 1), rates=(0.5, 0.25))
    first = next(n for n in range(9) if mixed.instance(n).depth == 0)
    other = next(n for n in range(9) if mixed.instance(n).depth == 1)
    like = mixed.instance(other, like=first)
    assert (like.depth, like.context.job.start.learning_rate) == (0, 0.5)
    assert (like.seed, like.straggles) == (mixed.instance(other).seed, mixed.instance(other).straggles)


@pytest.mark.parametrize("rate", ["0.001", slow("1e30")])
def test_a_training_that_diverges_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rate: str
) -> None:
    """Another rate is another program. With the usual one, which other tests compile, the first steps are made infinite."""
    wild = ["train", TRAINING.replace("0.001", rate), *COMMAND[2:]]
    if rate == "0.001":
        learned = train._learned
        monkeypatch.setattr(train, "_learned", lambda *given: _infinite(learned(*given)))
    assert main([*wild, "--out", str(tmp_path / "p.npz")]) == 1
    told = capsys.readouterr().err
    assert "the network is no longer finite after run" in told
    assert "train with a smaller rate, or count rewards in more seconds (unit_seconds)" in told
    assert not (tmp_path / "p.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["cruise"], "Cannot train 'cruise': rlp is the only tuner that is trained."),
        (["rlp[gama=1]"], "Training RLP has no option 'gama': did you mean gamma?"),
        (["rlp[gamma=much]"], "Cannot train RLP with gamma 'much': give a number."),
        (["rlp[replay=1.5]"], "Cannot train RLP with replay 1.5: give a whole number."),
        (["rlp[double=1]"], "Cannot train RLP with double 1: give true or false."),
        (["rlp[gamma=2]"], "Cannot train RLP with gamma 2.0: it lies above 0, up to 1."),
        (["rlp", "--instances", "0"], "Cannot train with instances 0: give at least 1."),
        (["rlp", "--lanes", "0"], "Cannot train with lanes 0: give at least 1."),
        (["rlp", "--workers", "0"], "Cannot train with workers 0: give at least 1."),
        (["rlp", "--depths", "1,x"], "Cannot read --depths '1,x': write numbers with commas between them."),
        (
            ["rlp", "--depths", "1,2", "--rates", "0.1"],
            "Cannot train on depths '1,2' with rates '0.1' and sleeps '': give one depth",
        ),
        (["rlp", "--depths", "1,2", "--sleeps", "1.5"], "with rates '' and sleeps '1.5': give one depth or more"),
        (["rlp", "--depths", "1", "--sleeps", "-1"], "sleeps '-1.0': give one depth or more"),
        (["rlp", "--workload", "no-such"], "no-such"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_trained_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--out", str(tmp_path / "p.npz")]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_damaged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.npz.checkpoint").write_bytes(b"half a checkpoint")
    assert main([*COMMAND, "--out", str(tmp_path / "p.npz"), "--resume"]) == 2
    assert "it is no such file, or it is damaged" in capsys.readouterr().err


def test_instances_can_be_made_again_and_their_seeds_are_not_for_evaluation() -> None:
    assert PLAN.instance(0).seed == PLAN.instance(0).seed >= 10**6
    assert replace(PLAN, seed=1).instance(0).seed != PLAN.instance(0).seed
    mixed = replace(PLAN, sleeps=(), depths=(0, 1), rates=(0.5, 0.25))
    drawn = [mixed.instance(n) for n in range(12)]
    pairs = {(i.depth, i.context.job.start.learning_rate) for i in drawn}
    assert pairs == {(0, 0.5), (1, 0.25)}
    assert np.mean([i.depth for i in drawn]) != 0
