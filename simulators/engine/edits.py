"""Changes to a job's state between two calls of the engine: begin, change inputs or policy, stop workers, resume."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from simulators.engine import learning, timing
from simulators.engine.inputs import EngineInputs
from simulators.engine.learning import LearningProgram, TrainingData
from simulators.engine.loop import Clock, Program, State

__all__ = ["all_stopped", "blank", "catch_up", "launch", "resumed", "with_data_moved", "with_tokens", "workers_stopped"]

_NONE: Any = np.zeros(0)


@partial(jax.jit, static_argnames=("program",))
def blank(program: Program, inputs: EngineInputs, parameters: Any) -> State:
    """A job at time zero whose workers have not begun: `launch` it."""
    nodes = inputs.active.shape[0]
    none, zero = jnp.zeros(nodes, jnp.int32), jnp.asarray(0, jnp.int32)
    clock = Clock(
        seconds=jnp.zeros(()),
        flight=timing.all_waiting(nodes, jnp.asarray(inputs.bucket_bytes)),
        clocks=none,
        drawn=none,
        pushes=zero,
        samples=jnp.asarray(0, jnp.int64),
        version=zero,
        pulled=none,
        grouped=zero,
        loss=jnp.full(nodes, jnp.nan if program.model is None else 0.0, jnp.float64),
        policy=(),
        left=jnp.asarray(inputs.assigned),
        testing=jnp.asarray(False),
        status=zero,
    )
    return State(clock, learning.untrained(program.model, inputs, parameters) if program.model is not None else None)


def launch(
    program: Program, data: TrainingData, inputs: EngineInputs, state: State, policy: Any, release: Array, offsets: Array
) -> State:
    """Put a policy in force, its clocks at zero, and let the workers in `release` [k] begin a cycle at the state's time.

    Each computes `offsets` [k] seconds longer in that cycle. `policy` is the new policy's initial state.
    """
    # Launching does not depend on how the network is shared nor on the old policy's state. Their shapes differ from setting
    # to setting, though, so that leaving them in would compile `_launch` again after every reconfiguration.
    alike = inputs._replace(nic_levels=inputs.nic, usage=_NONE, capacity=_NONE)
    freed = state._replace(clock=state.clock._replace(policy=()))
    launched: State = _launch(program.model, data, alike, freed, release, offsets, lanes=program.lanes)
    return launched._replace(clock=launched.clock._replace(policy=policy))


@partial(jax.jit, static_argnames=("model", "lanes"))
def _launch(
    model: LearningProgram | None,
    data: TrainingData,
    inputs: EngineInputs,
    state: State,
    release: Array,
    offsets: Array,
    *,
    lanes: bool,
) -> State:
    clock, learned = state
    flight = timing.begin_cycles(inputs, clock.flight, release, clock.drawn, clock.seconds, lanes=lanes)
    clock = clock._replace(
        flight=flight._replace(drawn=flight.drawn + jnp.where(release, offsets, 0.0)),
        clocks=jnp.zeros_like(clock.clocks),
        drawn=clock.drawn + release,
        pulled=jnp.where(release, clock.version, clock.pulled),
    )
    if model is None or learned is None:
        return State(clock, learned)
    learned, loss = learning.pull(model, data, inputs, learned, clock.loss, release, clock.drawn - 1, lanes=lanes)
    return State(clock._replace(loss=loss), learned)


@partial(jax.jit, static_argnames=("program",))
def catch_up(program: Program, inputs: EngineInputs, state: State, now: Array) -> State:
    """The job at `now`, before its next event: what a change of inputs begins from."""
    # Without this, the part of a transfer that is done already would be done again at the new rates.
    clock = state.clock
    flight = timing.catch_up(
        inputs,
        clock.seconds,
        clock.flight,
        now,
        discipline=program.discipline,
        overlapping=program.overlapping,
    )
    return state._replace(clock=clock._replace(seconds=now, flight=flight))


def all_stopped(state: State, now: float) -> State:
    """The job at `now` with all workers stopped: gradients in progress are lost, what was pushed stays."""
    clock = state.clock
    flight = timing.all_waiting(clock.clocks.shape[0], clock.flight.tokens, now)
    return state._replace(clock=clock._replace(seconds=jnp.asarray(now, jnp.float64), flight=flight))


def workers_stopped(state: State, nodes: Array, now: float) -> State:
    """The job with `nodes` [k] in no mini-batch from `now` on; their gradients in progress are lost."""
    flight = state.clock.flight
    # They wait from now on, so that the next cycle counts only this pause as waiting.
    since = flight.since.at[timing.WAIT].set(jnp.where(nodes, now, flight.since[timing.WAIT]))
    rests = flight._replace(phase=jnp.where(nodes, timing.WAIT, flight.phase), since=since)
    return state._replace(clock=state.clock._replace(flight=rests))


def with_tokens(state: State, tokens: Array) -> State:
    """The job with so many tokens in its nodes' buckets."""
    return state._replace(clock=state.clock._replace(flight=state.clock.flight._replace(tokens=tokens)))


def with_data_moved(state: State, before: NDArray[np.float64], after: NDArray[np.float64]) -> State:
    """The job after its data shares changed from those that assign `before` [k] to those that assign `after` [k].

    Work that is left moves with the data: a worker that gives a part of its data gives this part of its work, and those that
    receive data divide the sum, in proportion. None is lost or done twice.
    """
    left = np.asarray(state.clock.left)
    kept = left * np.minimum(1.0, np.divide(after, before, out=np.ones_like(after), where=before > 0))
    gains = np.maximum(after - before, 0.0)
    if not gains.any():
        return state
    left = kept + (left - kept).sum() * gains / gains.sum()
    return state._replace(clock=state.clock._replace(left=jnp.asarray(left)))


def resumed(state: State, pause_seconds: float) -> State:
    """A job that has not run for so long (another branch has), with its clock shifted: for it, no time has passed."""
    clock = state.clock
    shifted = clock._replace(seconds=clock.seconds + pause_seconds, flight=timing.shifted(clock.flight, pause_seconds))
    return state._replace(clock=shifted)
