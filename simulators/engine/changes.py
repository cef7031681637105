"""What changes a job between two calls of `loop.advance`: it begins, catches up with other inputs, stops or resumes."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from simulators.engine import embedding, learning, timing
from simulators.engine.inputs import EngineInputs
from simulators.engine.job_state import Clock, Program, State, begin_cycles, first_drawn, pulling, with_bytes
from simulators.engine.learning import LearningProgram, Released, TrainingData
from simulators.engine.timing import Flight
from simulators.programs.stored_programs import StoredProgram

__all__ = [
    "all_stopped",
    "blank",
    "caches_cleared",
    "catch_up",
    "launch",
    "redivided",
    "regrouped",
    "resumed",
    "rows_placed",
    "touched_rows",
    "waiting",
    "with_data_moved",
    "with_tokens",
    "workers_stopped",
]

_NONE: Any = np.zeros(0)


def blank(program: Program, inputs: EngineInputs, parameters: Any) -> State:
    """A job at time zero whose workers have not begun: `launch` it."""
    nodes = len(inputs.active)
    # Of NumPy, so that only what is trained needs a program.
    none: Any = np.zeros(nodes, np.int32)
    zero: Any = np.zeros((), np.int32)
    clock = Clock(
        seconds=cast(Any, np.zeros(())),
        flight=timing.all_waiting(
            nodes,
            inputs.bucket_bytes,
            uneven=program.discipline == "uneven",
            snapshots=bool(inputs.snapshots),
            net=inputs.connections,
            threads=program.server_threads,
        ),
        clocks=none,
        drawn=none,
        pushes=zero,
        samples=cast(Any, np.zeros((), np.int64)),
        version=zero,
        pulled=none,
        grouped=zero,
        loss=cast(Any, np.full(nodes, np.nan if program.model is None else 0.0)),
        policy=(),
        left=inputs.assigned,
        timer=_NONE,
        steps=cast(Any, np.ones(nodes if len(inputs.local_steps) else 0, np.int32)),
        testing=cast(Any, np.zeros((), bool)),
        status=zero,
        kept=none if inputs.copies else (),
    )
    # Neither the network nor the policy takes part, so that jobs under any share one program.
    return State(clock, None if program.model is None else _untrained(program.model, _apart(inputs), parameters))


_untrained = StoredProgram(learning.untrained)


def _apart(inputs: EngineInputs) -> EngineInputs:
    """`inputs` without how the network is shared, whose shapes differ from setting to setting."""
    return inputs._replace(nic_levels=inputs.nic, usage=_NONE, capacity=_NONE, snapshots=(), connections=())


def launch(
    program: Program,
    data: TrainingData,
    inputs: EngineInputs,
    state: State,
    policy: Any,
    release: ArrayLike,
    offsets: ArrayLike,
) -> State:
    """Put a policy in force, its clocks at zero, and let the workers in `release` [k] begin a cycle at the state's time.

    Each computes `offsets` [k] seconds longer in that cycle. `policy` is the new policy's initial state.
    """
    # Launching does not depend on how the network is shared nor on the old policy's state, with which `_launch` would be
    # compiled again after every reconfiguration.
    alike = _apart(inputs)
    flight, parts = state.clock.flight._replace(parts=()), state.clock.flight.parts
    freed = state._replace(clock=state.clock._replace(policy=(), timer=_NONE, flight=flight))
    together = learning.pull_together(program.model, inputs.active, release)
    launched: State = _launch(program.model, data, alike, freed, release, offsets, together=together)
    timer: Any = np.full(int(program.timers), np.inf)  # of NumPy, because JAX would compile it
    clock = launched.clock._replace(policy=jax.tree.map(_typed, policy), timer=timer)
    if inputs.connections:
        clock = clock._replace(flight=timing.with_parts(inputs, clock.flight, np.asarray(release), parts))
    return launched._replace(clock=clock)


def _typed(value: Any) -> Any:
    """A part of a policy's first state, with the type that it has in every later state.

    JAX types numbers that were written in Python weakly, until they meet others. With a state of weak types, `advance`
    would be compiled twice: for the first window, and for all others.
    """
    weak = getattr(value, "weak_type", isinstance(value, bool | int | float))
    return np.asarray(value) if weak else value


@StoredProgram
def _launch(
    model: LearningProgram | None,
    data: TrainingData,
    inputs: EngineInputs,
    state: State,
    release: Array,
    offsets: Array,
    *,
    together: bool,
) -> State:
    """`together`: as of `learning.pull_together`. Here it is known before, so that only one way to pull is compiled, and one
    way to draw compute times: half of what both ways take to compile."""
    clock, learned = state
    pulls, kept = pulling(inputs, clock, release)
    begun = begin_cycles(inputs, clock, release, pulls, for_all=True)
    flight = begun["flight"]
    clock = clock._replace(
        **begun | {"flight": flight._replace(drawn=flight.drawn + jnp.where(release, offsets, 0.0))},
        clocks=jnp.zeros_like(clock.clocks),
        pulled=jnp.where(pulls, clock.version, clock.pulled),
        kept=kept,
    )
    if model is None or learned is None:
        return State(clock, learned)
    released = Released(release, pulls, learning.pull_order(inputs.active, release, lanes=False), first_drawn(clock))
    learned, loss, _ = learning.pull(model, data, inputs, learned, clock.loss, released, lanes=False, together=together)
    return State(with_bytes(inputs, clock._replace(loss=loss), learned, release), learned)


def catch_up(program: Program, inputs: EngineInputs, state: State, now: ArrayLike) -> State:
    """The job at `now`, before its next event: what a change of inputs begins from."""
    # Without this, the part of a transfer that is done already would be done again at the new rates.
    clock, learned = state
    touched = learned.touched if learned is not None else ()
    # Neither the policy nor what was learned takes part, so that jobs under any policy share one program.
    seconds, flight = _catch_up(
        program.discipline, inputs, touched, clock.seconds, clock.flight, now, overlapping=program.overlapping
    )
    return state._replace(clock=clock._replace(seconds=seconds, flight=flight))


@StoredProgram
def _catch_up(
    discipline: str, inputs: EngineInputs, touched: Any, seconds: Array, flight: Flight, now: Array, *, overlapping: bool
) -> tuple[Array, Flight]:
    if touched:
        inputs = embedding.in_flight(inputs, touched)
    return now, timing.catch_up(inputs, seconds, flight, now, discipline=discipline, overlapping=overlapping)


def touched_rows(state: State) -> NDArray[np.float64]:
    """Distinct rows of each block in the pulls and in the pushes so far, [2, b]; [2, 0] without embedding tables."""
    learned = state.learned
    if learned is None or not learned.touched:
        return np.zeros((2, 0))
    return np.stack([np.asarray(learned.touched.pulled), np.asarray(learned.touched.pushed)])


def rows_placed(inputs: EngineInputs, state: State) -> State:
    """The job after its inputs have changed: mini-batches in progress pull and push rows where these are now."""
    learned = state.learned
    if learned is None or not learned.touched:
        return state
    return State(state.clock, learned._replace(touched=_rows_placed(inputs, learned.touched)))


def redivided(before: EngineInputs, after: EngineInputs, state: State) -> State:
    """The job after its inputs have changed from `before` to `after`: transfers in progress go on with these servers."""
    return state._replace(clock=state.clock._replace(flight=timing.redivided(before, after, state.clock.flight)))


def regrouped(program: Program, inputs: EngineInputs, state: State) -> State:
    """The job after a policy has come that needs gradients kept in another way: what was kept of them is dropped."""
    if program.model is None or state.learned is None:
        return state
    clock = state.clock._replace(grouped=cast(Any, np.zeros_like(state.clock.grouped)))
    return State(clock, learning.regrouped(program.model, inputs, state.learned))


def caches_cleared(state: State, workers: NDArray[np.bool_] | None = None) -> State:
    """The job after `workers` [k] (None: all) have lost their copies of parameters, or of rows of embedding tables."""
    clock, learned = state
    gone = np.ones(clock.clocks.shape[0], bool) if workers is None else workers
    if len(clock.kept):
        clock = clock._replace(kept=np.where(gone, np.int32(0), clock.kept))
    if learned is None or not learned.touched:
        return State(clock, learned)
    return State(clock, learned._replace(touched=embedding.forgotten(learned.touched, gone)))


_rows_placed = jax.jit(embedding.placed)


def waiting(state: State) -> NDArray[np.bool_]:
    """Workers that are in no mini-batch, [k]."""
    waits: NDArray[np.bool_] = np.asarray(state.clock.flight.phase) == timing.WAIT
    return waits


def all_stopped(inputs: EngineInputs, state: State, now: float) -> State:
    """The job at `now` with all workers stopped: gradients in progress are lost, what was pushed stays, buckets fill up."""
    state = caches_cleared(state)
    clock = state.clock
    tokens = timing.refilled(inputs, clock.flight.tokens, now - float(clock.seconds))
    parts = {"uneven": len(clock.flight.lots) > 0, "snapshots": bool(inputs.snapshots), "net": inputs.connections}
    flight = timing.all_waiting(clock.clocks.shape[0], tokens, now, **parts)
    return state._replace(clock=clock._replace(seconds=cast(Any, np.float64(now)), flight=flight))


def workers_stopped(state: State, nodes: NDArray[np.bool_], now: float) -> State:
    """The job with `nodes` [k] in no mini-batch from `now` on; their gradients in progress are lost."""
    state = caches_cleared(state, nodes)
    flight = state.clock.flight
    # They wait from now on, so that the next cycle counts only this pause as waiting.
    since: Any = np.array(flight.since)
    since[timing.WAIT, nodes] = now
    rests = flight._replace(phase=cast(Any, np.where(nodes, np.int32(timing.WAIT), flight.phase)), since=since)
    return state._replace(clock=state.clock._replace(flight=rests))


def with_tokens(state: State, tokens: Array) -> State:
    """The job with these `tokens`, [k], in its nodes' buckets."""
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
    return state._replace(clock=state.clock._replace(left=cast(Any, left)))


def resumed(inputs: EngineInputs, state: State, pause_seconds: float) -> State:
    """A job that has not run for so long (another branch has), with its clock shifted: for it, no time has passed.

    Buckets keep real time: they fill up during the pause.
    """
    clock = state.clock
    tokens = timing.refilled(inputs, clock.flight.tokens, pause_seconds)
    flight = timing.shifted(clock.flight, pause_seconds)._replace(tokens=tokens)
    seconds: Any = np.asarray(clock.seconds) + pause_seconds
    timer: Any = np.asarray(clock.timer) + pause_seconds
    return state._replace(clock=clock._replace(seconds=seconds, flight=flight, timer=timer))
