"""A job at the moment of an event: what is compiled in, its state, its records of pushes; how workers begin a cycle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from simulators.engine import embedding, timing
from simulators.engine.inputs import EngineInputs
from simulators.engine.learning import Learned, LearningProgram
from simulators.engine.timing import Flight
from tuners.actions import Decision, Push

jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

__all__ = [
    "DEADLOCK",
    "DIVERGED",
    "DONE",
    "RUNNING",
    "STATUSES",
    "TARGET",
    "Clock",
    "Program",
    "Records",
    "State",
    "begin_cycles",
    "first_drawn",
    "pulling",
    "with_bytes",
    "with_work",
]

RUNNING, TARGET, DIVERGED, DEADLOCK = range(4)
STATUSES = ("running", "target", "diverged", "deadlock")
DONE = 1e-6  # clocks or samples left by rounding only


class Program(NamedTuple):
    """What is compiled in; hashable. Runs with equal programs share one compiled engine."""

    model: LearningProgram | None  # None: timing-only
    decide: Callable[[Any, Push], tuple[Any, Decision]]
    probes: bool  # the policy wants losses around the update
    discipline: str  # maxmin | uneven | fifo | serial
    overlapping: bool  # some node is worker and server at once, or has a token bucket: every NIC counts
    lanes: bool = False  # traced under `vmap` by `advance_lanes`
    timers: bool = False  # the policy sets a timer, and decides when it has run down
    server_threads: int = 1  # as in `Cluster`
    idle: bool = False  # dense gradients are learned from, and some nodes do not work under this setting
    dispatched: bool = False  # XLA cannot compile as one function what it is asked for of this job's steps


class Clock(NamedTuple):
    """All of a job's state except what it has learned: small arrays, one entry per node [k] or scalar."""

    seconds: Array  # float64: of the last event
    flight: Flight
    clocks: Array  # int32 [k]: pushes since the policy was installed
    drawn: Array  # int32 [k]: mini-batches begun since the job began; counts noise and position in the data
    pushes: Array  # int32: completed since the job began
    samples: Array  # int64: in the mini-batches of these pushes
    version: Array  # int32: gradients that the parameters include
    pulled: Array  # int32 [k]: version that each worker pulled
    grouped: Array  # int32: gradients waiting in the group
    loss: Array  # float64 [k]: of each worker's mini-batch in progress
    policy: Any  # the synchronisation policy's state
    left: Array  # [k] work that each worker has yet to do for a target by share; [0] for any other target
    steps: Array  # int32 [k]: local steps of each worker's cycle; [0] where a push is one gradient
    timer: Array  # float64 [1]: when the policy decides without a push, inf: at none; [0] for a policy without timers
    testing: Array  # bool: every gradient is dropped, as in a branch forked for testing
    status: Array  # int32 index into STATUSES
    kept: Any = ()  # int32 [k]: mini-batches that each worker may yet compute on its copy; () where all pull every time


class State(NamedTuple):
    """A job at the moment of its last event. Immutable: keeping a reference is a snapshot."""

    clock: Clock
    learned: Learned | None  # None: timing-only


class Records(NamedTuple):
    """Columns of the table that `advance` returns, [n, 11]; see `tuners.actions.Pushes`. Validation is nan if not due."""

    seconds: Any
    worker: Any
    clock: Any
    compute_seconds: Any
    pull_seconds: Any
    push_seconds: Any
    wait_seconds: Any
    staleness: Any
    loss: Any
    valid_loss: Any
    valid_accuracy: Any


def with_work(inputs: EngineInputs, left: Array) -> Array:
    """Workers that may begin a mini-batch, bool [k]: active, and with work left where the target is divided by share."""
    return inputs.active & (left > DONE) if left.shape[0] else inputs.active


def pulling(inputs: EngineInputs, clock: Clock, release: Array) -> tuple[Array, Any]:
    """The workers in `release` [k] that pull, because the others have a copy; and `Clock.kept` after that."""
    if not inputs.copies:
        return release, ()
    kept = jnp.minimum(clock.kept, inputs.copies.clocks - 1)  # which a tuner may just have made smaller
    pulls = release & (kept <= 0)
    return pulls, jnp.where(pulls, inputs.copies.clocks - 1, jnp.where(release, kept - 1, kept)).astype(jnp.int32)


def begin_cycles(inputs: EngineInputs, clock: Clock, release: Array, pulls: Array, *, for_all: bool) -> dict[str, Any]:
    """What changes as the workers in `release` [k] begin a cycle, of which those in `pulls` [k] pull: `Clock.flight`,
    `drawn` and, where they take local steps, `steps`."""
    skipping = pulls if inputs.copies else None
    flight = timing.begin_cycles(inputs, clock.flight, release, clock.drawn, clock.seconds, for_all=for_all, pulls=skipping)
    if not clock.steps.shape[0]:
        return {"flight": flight, "drawn": clock.drawn + release}
    steps = jnp.where(release, inputs.local_steps, clock.steps)
    return {"flight": flight, "drawn": clock.drawn + jnp.where(release, steps, 0), "steps": steps}


def first_drawn(clock: Clock) -> Array:
    """The number of the first mini-batch in each worker's cycle, [k]."""
    return clock.drawn - (clock.steps if clock.steps.shape[0] else 1)


def with_bytes(inputs: EngineInputs, clock: Clock, learned: Learned, release: Array) -> Clock:
    """The workers in `release` [k] have just begun to pull: where they pull rows, these are known only now."""
    if not learned.touched:
        return clock
    flight = clock.flight
    pulls = release & (flight.phase == timing.PULL)
    return clock._replace(
        flight=flight._replace(remaining=embedding.begin_pulls(inputs, learned.touched, pulls, flight.remaining))
    )
