"""Train RLP's broad policy from hindsight: play every mode on drawn jobs, and learn to see which one will have been faster.

1. Each instance (`harness.training.varied`) is played to its end in each mode (`tuners.rlp.broad.MODES`). That gives what
   the mode costs, log(its seconds / those of the best mode on the same instance), and what the policy sees on the way.
2. A network is fitted to choose well: it minimises the cost that its choice has on average, where it chooses mode m with
   probability softmax(values)_m. All costs are known, so no mode has to be explored. What a mode costs more than ASP counts
   one and a half times: on jobs that look like none of the training, a policy should not be slower than without it.
3. The policy is played itself, what it then sees is added, and it is fitted again (Ross et al. 2011, "A Reduction of
   Imitation Learning and Structured Prediction to No-Regret Online Learning"): under a policy that changes modes, the same
   job looks different than under one mode.

Deep Q-learning, as in the paper, has to find out from one long run after another what a single push contributed. Here whole
runs are compared. Evolution (CMA-ES) on runs of the policy itself was tried first, with 400 runs per generation: after 20
generations its policy took 1.32 times the best rule's time, and the rule that it began with 1.30 (60 instances, one
training).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from harness.machines import program_cache
from harness.training.instances import Instance
from harness.training.varied import SHAPES, drawn_instance, simple_rules
from simulators.engine import loop
from simulators.engine.job_state import STATUSES, Clock, Program, State
from traces.store import check_new, write_bytes
from tuners.actions import Decision, Push, SyncPolicy
from tuners.rlp import policy_file
from tuners.rlp.broad import MODES, PooledNetwork, TrainedBroad, decided, mode_values, rule_network
from tuners.rlp.features import JOB, WORKER, PushStatistics, counted, features, no_statistics

__all__ = ["RULE", "HindsightPlan", "InstancePlayed", "Judged", "RunSpans", "fitted", "judged", "learn", "log_ratio"]

RULE = partial(rule_network, round_from=1.7, mode=3, undone=4.0)  # found by a search over 60, rounded
_FIRST_SEED = 10**6  # as for `harness.training.train`: lower seeds are for evaluation
_MOST_PUSHES = 1200  # of a run
_CAP = 3.0  # times the best seconds, at which a run is stopped
_CAUTION = 0.5  # weight of what a mode costs more than ASP, on top of what it costs
_ENDS = np.array([0.5, 1, 2, 3, 4, 6, 9, 13, 18, 25])  # in rounds, of the spans of a run of which the last push is kept
_NODES = max(shape.workers for shape in SHAPES) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HindsightPlan:
    """What is learned from, and how long. Raises ValueError for values out of range."""

    instances: int = 800
    rounds: int = 1  # of playing the policy itself
    steps: int = 300  # of each fit
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"instances": 1, "rounds": 0, "steps": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"Cannot train with {name} {getattr(self, name)}: give at least {least}.")

    def command(self) -> str:
        """The command that makes the same policy again."""
        return f"harness train rlp --form broad --instances {self.instances} --rounds {self.rounds} --seed {self.seed}"


class InstancePlayed(NamedTuple):
    """An instance is played in all modes, or by the policy."""

    number: int  # from 1
    of: int
    by: str


class RunSpans(NamedTuple):
    """What was seen at the end of each span of a run, [spans, ...]; `pushes` is 0 for a span that was not begun."""

    job: Any  # float32 [spans, J]
    each: Any  # float32 [spans, nodes, W]
    active: Any  # bool [spans, nodes]
    pushes: Any  # float32 [spans]: in this span


class _Recorder(NamedTuple):
    network: PooledNetwork
    mode: Array  # index into `MODES`; -1: the network chooses
    statistics: PushStatistics
    spans: RunSpans
    number: Array  # int32: pushes so far


def learn(plan: HindsightPlan, out: Path, *, watch: Callable[[InstancePlayed], None] = lambda _: None) -> TrainedBroad:
    """Carry out `plan` and write the policy to `out`. It takes minutes, so there is no checkpoint.

    Raises ValueError if `out` exists already or no instance reaches its target in any mode.
    """
    check_new(out)
    program_cache.use()
    instances = [drawn_instance(_FIRST_SEED * (plan.seed + 1) + number) for number in range(plan.instances)]
    ready = [_ready(instance, _MOST_PUSHES, _CAP) for instance in instances]
    network = RULE(seed=plan.seed)
    costs, rows = list[NDArray[np.float64]](), list[tuple[int, RunSpans]]()
    for number, one in enumerate(ready):
        found = _in_all_modes(one, network)
        costs.append(np.array([seconds for seconds, _ in found]))
        rows += [(number, spans) for _, spans in found]
        watch(InstancePlayed(number + 1, len(ready), "every mode"))
    network = fitted(plan, network, costs, rows)
    for again in range(plan.rounds):
        for number, one in enumerate(ready):
            rows.append((number, _recorded(one, network, -1, _CAP * float(costs[number].min()))[1]))
            watch(InstancePlayed(number + 1, len(ready), f"the policy, round {again + 1}"))
        network = fitted(plan, network, costs, rows)
    made = TrainedBroad(network, {"command": plan.command(), "seed": plan.seed, "plan": asdict(plan), "rule": RULE.keywords})
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, policy_file.dumps(made))
    return made


def _in_all_modes(one: Judged, network: PooledNetwork) -> list[tuple[float, RunSpans]]:
    """Seconds to the target and what was seen, in each mode; ASP first, later runs are stopped at a multiple of the best."""
    best, found = float("inf"), []
    for mode in range(len(MODES)):
        seconds, spans = _recorded(one, network, mode, _CAP * best)
        best = min(best, seconds)
        found.append((seconds, spans))
    return found


# -------------------------------------------------------------------------------------------------------------- playing


class Judged(NamedTuple):
    """An instance, ready to be played under any policy, with what simple rules take."""

    program: Program
    data: Any
    inputs: Any
    state: State
    rules: dict[str, float]  # seconds by rule; infinite where it missed the target, or took over `cap` times the best
    cap: float
    most_pushes: int  # of a run

    @property
    def best_seconds(self) -> float:
        """Seconds of the fastest rule."""
        return min(self.rules.values())


def judged(instance: Instance, *, cap: float, most_pushes: int) -> Judged:
    """The instance, played under every simple rule; a run is stopped after `cap` times the best so far."""
    made = _ready(instance, most_pushes, cap)
    for name, rule in simple_rules(len(instance.straggles)).items():
        limit = cap * min(made.rules.values(), default=np.inf)
        made.rules[name] = _seconds(_run(made, rule, limit))
    return made


def log_ratio(of: Judged, policy: SyncPolicy) -> float:
    """log(seconds under `policy` / seconds of the best rule), at most log of the cap."""
    seconds = _seconds(_run(of, policy, of.cap * of.best_seconds))
    return float(np.log(min(seconds / of.best_seconds, of.cap)))


def _ready(instance: Instance, most_pushes: int, cap: float) -> Judged:
    begun = instance.begin(simple_rules(1)["asp"])
    data, inputs, state = jax.device_put((instance.context.data, begun.inputs, begun.state))
    return Judged(begun.program, data, inputs, state, {}, cap, most_pushes)


def _run(of: Judged, policy: SyncPolicy, limit: float) -> Clock:
    """The end of a run under `policy`, to the target, to its pushes or to the limit in simulated seconds."""
    program = of.program._replace(decide=policy.decide, probes=policy.probes)
    held = policy.init(np.asarray(of.inputs.active))
    state = of.state._replace(clock=of.state.clock._replace(policy=held))
    until = (jnp.int32(of.most_pushes), jnp.asarray(limit))
    end: State = loop.advance(program, of.data, of.inputs, state, *until, rows=of.most_pushes)[0]
    return end.clock


def _seconds(end: Clock) -> float:
    return float(end.seconds) if STATUSES[int(end.status)] == "target" else float("inf")


def _recorded(one: Judged, network: PooledNetwork, mode: int, limit: float) -> tuple[float, RunSpans]:
    """Seconds to the target in a mode, or as the network chooses (-1), and what was seen."""
    spans, held = len(_ENDS) + 1, PooledNetwork(*(jnp.asarray(part, jnp.float32) for part in network))

    def init(active: Array) -> _Recorder:
        nodes = active.shape[0]
        blank = RunSpans(
            jnp.zeros((spans, len(JOB)), jnp.float32),
            jnp.zeros((spans, nodes, len(WORKER)), jnp.float32),
            jnp.zeros((spans, nodes), bool),
            jnp.zeros(spans, jnp.float32),
        )
        return _Recorder(held, jnp.asarray(mode, jnp.int32), no_statistics(active), blank, jnp.asarray(0, jnp.int32))

    end = _run(one, SyncPolicy("rlp, recording", init, _decide_and_record, probes=True), limit)
    kept = jax.device_get(end.policy.spans)
    more = _NODES - kept.active.shape[1]
    padded = kept._replace(
        each=np.pad(kept.each, ((0, 0), (0, more), (0, 0))), active=np.pad(kept.active, ((0, 0), (0, more)))
    )
    return _seconds(end), padded


def _decide_and_record(recorder: _Recorder, push: Push) -> tuple[_Recorder, Decision]:
    network, fixed, statistics, spans, number = recorder
    statistics = counted(statistics, push)
    job, each = features(statistics, push)
    chosen = jnp.argmax(mode_values(network, job, each, push.active)).astype(jnp.int32)
    release, restart = decided(statistics, push, jnp.where(fixed < 0, chosen, fixed))
    at = jnp.sum(number >= jnp.asarray(_ENDS, jnp.float32) * jnp.sum(push.active))
    spans = RunSpans(
        spans.job.at[at].set(job),
        spans.each.at[at].set(each),
        spans.active.at[at].set(push.active),
        spans.pushes.at[at].add(1.0),
    )
    return _Recorder(network, fixed, statistics.after(push, release, restart), spans, number + 1), Decision(release=release)


# -------------------------------------------------------------------------------------------------------------- fitting


def fitted(
    plan: HindsightPlan, network: PooledNetwork, costs: Sequence[NDArray[np.float64]], rows: Sequence[tuple[int, RunSpans]]
) -> PooledNetwork:
    """The network that chooses best on all rows: Adam on the mean cost of its choice. A span weighs as its part of a run."""
    if not any(np.isfinite(seconds).any() for seconds in costs):
        raise ValueError(f"Cannot learn from {plan.instances} instances: none reaches its target in any mode; give more.")
    usable = [(number, spans) for number, spans in rows if np.isfinite(costs[number]).any()]
    job, each, active = (np.concatenate([getattr(spans, name) for _, spans in usable]) for name in RunSpans._fields[:3])
    weight = np.concatenate([spans.pushes / max(spans.pushes.sum(), 1.0) for _, spans in usable]) / len(usable)
    cost = np.repeat([_goal(costs[number]) for number, _ in usable], len(_ENDS) + 1, axis=0)
    used = weight > 0
    table = tuple(jnp.asarray(part[used], part.dtype) for part in (job, each, active))
    goal = jnp.asarray(cost[used], jnp.float32), jnp.asarray(weight[used], jnp.float32)
    first = PooledNetwork(*(jnp.asarray(part, jnp.float32) for part in network))
    return PooledNetwork(*(np.asarray(part) for part in _descended(plan.steps, first, table, goal)))


def _goal(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """What every mode costs, from its seconds, ASP's first."""
    cost = np.log(np.minimum(seconds / seconds.min(), _CAP))
    return np.asarray(cost + _CAUTION * np.maximum(cost - cost[0], 0.0), np.float64)


@partial(jax.jit, static_argnames="steps")
def _descended(
    steps: int, network: PooledNetwork, table: tuple[Array, Array, Array], goal: tuple[Array, Array]
) -> PooledNetwork:
    """`network` after `steps` of Adam on the mean cost of its choices, `goal`, for the rows of `table`."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(0.02, steps), weight_decay=0.2)

    def loss(network: PooledNetwork) -> Array:
        values = jax.vmap(partial(mode_values, network))(*table)
        cost, weight = goal
        chosen = jax.nn.softmax(3.0 * values, axis=1)
        return jnp.sum(weight * jnp.sum(chosen * cost, axis=1))

    def step(_: Array, carry: tuple[PooledNetwork, Any]) -> tuple[PooledNetwork, Any]:
        network, slots = carry
        updates, slots = optimizer.update(jax.grad(loss)(network), slots, network)
        return optax.apply_updates(network, updates), slots

    made: PooledNetwork = jax.lax.fori_loop(0, steps, step, (network, optimizer.init(network)))[0]
    return made
