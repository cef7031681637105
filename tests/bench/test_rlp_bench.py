"""The cost of RLP's policy per decision, and the time of the paper's training."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.training.train import PRETRAINING, TrainingPlan, TrainingProgress, train
from simulators.engine import loop
from simulators.engine.job_state import State
from tests.bench.jobs import engine_job
from tests.bench.rounds import finding, judge, settled, timed
from tuners import policies
from tuners.actions import Decision, Push, SyncPolicy
from tuners.rlp import dqn, tuner
from tuners.rlp.network import Trained, untrained

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

PUSHES, WORKERS = 320, 10
PAPER = TrainingPlan(depths=(1,), pretrain=100, episodes=1000)  # 500 runs of fixed policies, then 1,000 of about 400 pushes


def asp_by_network() -> SyncPolicy:
    """A full network that always releases the worker: the same pushes as ASP, so that only the decision costs more."""
    network = untrained(0)
    biases = (*network.biases[:-1], np.array([-1e6, 1e6, 0.0], np.float32))
    return tuner.greedy_policy(Trained(network._replace(biases=biases)), seconds=0.0)


def asp_that_looks() -> SyncPolicy:
    """ASP that stores the probes' results, so that XLA does not optimise them away."""

    def decide(kept: jax.Array, push: Push) -> tuple[jax.Array, Decision]:
        _, decision = policies.asp().decide(policies.asp().init(push.active), push)
        return jnp.stack([push.loss_before, push.loss_after]), decision

    return SyncPolicy("asp", lambda active: jnp.zeros(2), decide, probes=True)


@pytest.mark.parametrize(
    ("name", "against"), [("rlp network", asp_that_looks()), ("rlp network and probes", policies.asp())]
)
def test_deciding_by_network(benchmark: Any, name: str, against: SyncPolicy) -> None:
    mine, theirs = (engine_job(784, (256,), WORKERS, p) for p in (asp_by_network(), against))
    (_, table, used), (_, other, _) = mine.advance(PUSHES), theirs.advance(PUSHES)
    assert int(used) == PUSHES
    np.testing.assert_array_equal(table[:, :3], other[:, :3])
    judge(benchmark, name, timed(partial(mine.advance, PUSHES)), timed(partial(theirs.advance, PUSHES)))


def test_minutes_of_the_papers_training(benchmark: Any) -> None:
    """From the CPU seconds per push of a few runs, digits with one hidden layer, without compilation."""
    options, most, instance = PAPER.options, 400, PAPER.instance(0)
    learner = dqn.new_learner(options, 0)

    def run(policy: SyncPolicy) -> tuple[State, int]:
        begun = instance.begin(policy)
        clocks, forever = jnp.asarray(most, jnp.int32), jnp.asarray(jnp.inf)
        state, _, used = loop.advance(
            begun.program, instance.context.data, begun.inputs, begun.state, clocks, forever, rows=most
        )
        return state, int(used)

    def pretraining() -> int:
        state, used = run(dqn.recording_policy(PRETRAINING[1], options, most))
        record = dqn.record_of(state.clock.policy, lost_seconds=0.0, options=options)
        jax.block_until_ready(dqn.pretrained(options, learner, record))
        return used

    def episode() -> int:
        state, used = run(dqn.learning_policy(options, learner))
        jax.block_until_ready(dqn.after_run(state.clock.policy, final=True, lost_seconds=0.0, options=options))
        return used

    each = []
    for job in (pretraining, episode):
        assert 0 < job() <= most
        spent = []
        for _ in range(9):
            begin = time.process_time()
            pushes = job()
            spent.append((time.process_time() - begin) / pushes)
        each.append(min(spent))
    benchmark.pedantic(episode, rounds=3)
    minutes = 400 * (each[0] * PAPER.pretrain * len(PRETRAINING) + each[1] * PAPER.episodes) / 60
    benchmark.extra_info.update(microseconds_per_push=[round(e * 1e6) for e in each])
    settled(benchmark, finding("rlp training", minutes))


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_microseconds_per_push_of_training_in_lanes(benchmark: Any, lanes: int, tmp_path: Path) -> None:
    """Of whole episodes, with drawing and learning, without the first two rounds, which include compilation."""
    plan = replace(PAPER, rates=(0.2,), instances=48, episodes=48, pretrain=0, most_pushes=800, lanes=lanes)
    told: list[tuple[float, float, int]] = []

    def watch(run: TrainingProgress) -> None:
        told.append((time.perf_counter(), time.process_time(), run.pushes))

    benchmark.pedantic(train, (plan, tmp_path / "p.npz"), {"watch": watch}, rounds=1)
    begin, end, pushes = told[2 * lanes - 1], told[-1], sum(run[2] for run in told[2 * lanes :])
    wall, cpu = ((end[clock] - begin[clock]) / pushes * 1e6 for clock in (0, 1))
    benchmark.extra_info.update(wall_microseconds=wall)
    settled(benchmark, finding(f"rlp lanes {lanes}", cpu))  # 600,000 pushes in ten minutes
