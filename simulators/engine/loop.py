"""The data plane in simulated time: a JAX event loop that pulls, computes, pushes and applies, with real stale gradients.

One step advances the cluster to the next completed push (`simulators.engine.timing`). Then the update is applied
(`simulators.engine.learning`), the synchronisation policy decides which workers are released, and these pull. Their
gradients are computed at that moment, on the parameters that they pull.

Time is absolute float64 and advances from event to event only, so cutting a run into windows changes nothing. Ties: of
events at one instant the lowest worker index comes first. Noise is a hash of (seed, worker, clock).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from simulators.engine import learning, timing
from simulators.engine.inputs import EngineInputs
from simulators.engine.lanes import anywhere
from simulators.engine.learning import Learned, LearningProgram, TrainingData
from simulators.engine.timing import Flight
from tuners.actions import Decision, Push

jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

__all__ = ["STATUSES", "Clock", "Program", "Records", "State", "advance", "advance_lanes", "with_work"]

_RUNNING, _TARGET, _DIVERGED, _DEADLOCK = range(4)
STATUSES = ("running", "target", "diverged", "deadlock")
_DONE = 1e-6  # clocks or samples left by rounding only


class Program(NamedTuple):
    """What is compiled in; hashable. Runs with equal programs share one compiled engine."""

    model: LearningProgram | None  # None: timing-only
    decide: Callable[[Any, Push], tuple[Any, Decision]]
    probes: bool  # the policy wants losses around the update
    discipline: str  # maxmin | fifo | uneven
    overlapping: bool  # some node is worker and server at once, or has a token bucket: every NIC counts
    lanes: bool = False  # traced under `vmap` by `advance_lanes`


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
    testing: Array  # bool: every gradient is dropped, as in a branch forked for testing
    status: Array  # int32 index into STATUSES


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
    return inputs.active & (left > _DONE) if left.shape[0] else inputs.active


class _Pushed(NamedTuple):
    """What the timing part of a step tells the learning part."""

    yes: Array  # bool: a push was completed
    worker: Array  # int32: by this worker
    accept: Array  # bool: the policy accepts its gradient
    take: Array  # bool: the servers update the parameters now
    grouped: Array  # int32: gradients in that update
    release: Array  # bool [k]: workers that pull now
    row: Array  # float64 [11]: its record, validation not yet filled in


@partial(jax.jit, static_argnames=("program", "rows"))
def advance(
    program: Program,
    data: TrainingData,
    inputs: EngineInputs,
    state: State,
    clocks: Array,
    until_seconds: Array,
    *,
    rows: int,
) -> tuple[State, Array, Array]:
    """Run to `clocks` more pushes (at most `rows`), to `until_seconds`, or until the status changes.

    Returns the state after the last event not later than `until_seconds`, a table [rows, 11] with the columns of
    `Records`, and how many of its rows are used.
    """

    def goes_on(carry: tuple[State, Array, Array, Array]) -> Array:
        state, _, n, went_on = carry
        return went_on & (n < clocks) & (state.clock.status == _RUNNING)

    def step(carry: tuple[State, Array, Array, Array]) -> tuple[State, Array, Array, Array]:
        state, table, n, _ = carry
        # A lane that is done waits for the others: with this limit, no event of it is due.
        limit = jnp.where(goes_on(carry), until_seconds, -jnp.inf) if program.lanes else until_seconds
        state, row, pushed = _step(program, data, inputs, state, limit)
        # Always write: a row without a push is overwritten by the next one, or lies beyond the rows used.
        table = jax.lax.dynamic_update_slice(table, row[None, :], (n, jnp.zeros_like(n)))
        return state, table, n + pushed, pushed

    none = jnp.asarray(0, jnp.int32)
    table = jnp.zeros((rows + 1, len(Records._fields)))  # one more, in which lanes that are done write
    state, table, n, _ = jax.lax.while_loop(
        lambda c: anywhere(goes_on(c), program.lanes), step, (state, table, none, jnp.asarray(True))
    )
    return state, table[:rows], n


@partial(jax.jit, static_argnames=("program", "rows", "own_data"))
def advance_lanes(
    program: Program,
    data: TrainingData,
    inputs: EngineInputs,
    states: State,
    clocks: Array,
    until_seconds: Array,
    *,
    rows: int,
    own_data: bool = False,
) -> tuple[State, Array, Array]:
    """`advance` for many jobs at once: every array of `inputs` and `states` has a leading lane axis.

    Data is shared; with `own_data` the training data has a lane axis, too.
    """

    def lane(data: TrainingData, inputs: EngineInputs, state: State) -> tuple[State, Array, Array]:
        alone = program._replace(lanes=True)
        done: tuple[State, Array, Array] = advance(alone, data, inputs, state, clocks, until_seconds, rows=rows)
        return done

    axes = (TrainingData(0 if own_data else None, None), 0, 0)  # type: ignore[arg-type]
    made: tuple[State, Array, Array] = jax.vmap(lane, in_axes=axes, axis_name="lanes")(data, inputs, states)
    return made


def _step(
    program: Program, data: TrainingData, inputs: EngineInputs, state: State, until_seconds: Array
) -> tuple[State, Array, Array]:
    """To the next completed push, or to the last event before `until_seconds`. Returns (state, its row, pushed)."""
    clock, learned = state
    # A policy that probes needs losses between the push and its decision, so the small arrays take two parts.
    if program.probes:
        clock, worker, pushed = _as_one(program, partial(_travel, program, inputs, until_seconds), clock, _no_push())
        losses = _probe(program, data, inputs, clock, learned, worker)
        clock, done = _as_one(program, partial(_settle, program, inputs, worker, pushed, losses), clock, _nothing(inputs))
    else:
        turn = partial(_travel_and_settle, program, inputs, until_seconds)
        clock, done = _as_one(program, turn, clock, _nothing(inputs))
    valid_loss = valid_accuracy = jnp.asarray(jnp.nan)
    if program.model is not None and learned is not None:
        # First apply, then pull: a worker that is released pulls parameters that include its own push.
        learned = learning.apply_push(program.model, inputs, learned, done.worker, done.accept, done.take, done.grouped)
        learned, loss = learning.pull(
            program.model, data, inputs, learned, clock.loss, done.release, clock.drawn - 1, lanes=program.lanes
        )
        clock = clock._replace(loss=loss)
        due = done.yes & (clock.pushes % inputs.evaluate_clocks == 0)
        measure = partial(learning.evaluate, program.model, data)
        some_due = anywhere(due, program.lanes)
        nothing = (valid_loss, valid_accuracy)
        found = jax.lax.cond(some_due, measure, lambda _: nothing, learned.parameters)
        valid_loss, valid_accuracy = (jnp.where(due, value, jnp.nan) for value in found)
    # Comparing with nan is False, so that a target on validation is reached only where validation was due.
    reached = (valid_loss <= inputs.target_loss) | (valid_accuracy >= inputs.target_accuracy)
    reached = reached | (clock.pushes >= inputs.target_clocks) | (clock.samples >= inputs.target_samples)
    if clock.left.shape[0]:
        reached = reached | jnp.all(clock.left <= _DONE)
    status = jnp.where((clock.status == _RUNNING) & done.yes & reached, _TARGET, clock.status)
    return (
        State(clock._replace(status=status), learned),
        done.row.at[-2:].set(jnp.stack([valid_loss, valid_accuracy])),
        done.yes,
    )


# ------------------------------------------------------------------------------------------------ a step's small arrays


def _as_one(program: Program, part: Callable[[Clock], Any], clock: Clock, empty: Any) -> Any:
    """`part(clock)`, compiled as one function.

    Written as a loop that runs once: XLA compiles a small loop into one function (see `simulators.__init__`), and dispatches
    operations outside of loops one by one.
    """

    if program.lanes:
        return part(clock)

    def body(carry: Any) -> Any:
        return (jnp.asarray(False), *part(carry[1]))

    # The status is never negative, which XLA cannot know. If it could see that the loop runs once, it would unroll it.
    return jax.lax.while_loop(lambda carry: carry[0], body, (clock.status >= 0, clock, *empty))[1:]


def _no_push() -> tuple[Array, Array]:
    return jnp.asarray(0, jnp.int32), jnp.asarray(False)


def _nothing(inputs: EngineInputs) -> tuple[_Pushed]:
    no, zero = jnp.asarray(False), jnp.asarray(0, jnp.int32)
    return (_Pushed(no, zero, no, no, zero, jnp.zeros_like(inputs.active), jnp.zeros(len(Records._fields))),)


def _travel_and_settle(program: Program, inputs: EngineInputs, until_seconds: Array, clock: Clock) -> tuple[Clock, _Pushed]:
    clock, worker, pushed = _travel(program, inputs, until_seconds, clock)
    return _settle(program, inputs, worker, pushed, (), clock)


def _travel(program: Program, inputs: EngineInputs, until_seconds: Array, clock: Clock) -> tuple[Clock, Array, Array]:
    """Events up to the next completed push: the clock then, the worker that pushed, and whether there was a push."""
    seconds, flight, worker, pushed = timing.to_next_push(
        inputs,
        clock.seconds,
        clock.flight,
        until_seconds,
        discipline=program.discipline,
        overlapping=program.overlapping,
    )
    # All wait, and only a push can release a worker: the policy has deadlocked.
    stuck = ~pushed & (clock.status == _RUNNING) & jnp.all(flight.phase == timing.WAIT)
    if clock.left.shape[0]:
        # Unless the work that is left is on its way, with its data, to workers that have not begun.
        stuck = stuck & jnp.any(with_work(inputs, clock.left))
    status = jnp.where(stuck, _DEADLOCK, clock.status)
    return clock._replace(seconds=seconds, flight=flight, status=status), worker, pushed


def _settle(
    program: Program, inputs: EngineInputs, worker: Array, pushed: Array, losses: tuple[Array, ...], clock: Clock
) -> tuple[Clock, _Pushed]:
    """Count the push, let the policy decide, and let the workers that it releases begin a cycle."""
    mine = (jnp.arange(inputs.active.shape[0]) == worker) & pushed
    clocks, left = clock.clocks + mine, clock.left
    if left.shape[0]:
        left = left - jnp.where(mine, inputs.push_work, 0.0)
    # A worker that has done its part leaves the group: others must not wait for it.
    active = with_work(inputs, left)
    push = Push(
        worker=worker,
        clocks=clocks,
        waiting=active & (clock.flight.phase == timing.WAIT),
        active=active,
        seconds=clock.seconds,
        staleness=clock.version - clock.pulled[worker],
        loss=clock.loss[worker],
    )
    if losses:
        push = push._replace(loss_before=losses[0], loss_after=losses[1])
    policy, decision = program.decide(clock.policy, push)
    accept = jnp.asarray(decision.accept) & ~clock.testing
    grouped = clock.grouped + (pushed & accept)
    # Gradients that are summed or averaged wait until the policy closes their group; others are applied at once.
    groups = program.model is not None and program.model.aggregation != "each"
    take = pushed & (decision.step if groups else True) & (grouped > 0)
    release = decision.release & pushed & active
    version = clock.version + jnp.where(take, grouped, 0)
    finite = jnp.isfinite(push.loss) if program.model is not None else jnp.asarray(True)
    flight = clock.flight
    # The record is made before the cycle below begins, which overwrites when phases began.
    row = Records(
        clock.seconds,
        worker,
        clock.drawn[worker] - 1,
        *timing.spans(flight, worker),
        push.staleness,
        push.loss,
        jnp.nan,
        jnp.nan,
    )
    done = _Pushed(
        yes=pushed,
        worker=worker,
        accept=pushed & accept,
        take=take,
        grouped=grouped,
        release=release,
        row=jnp.stack([jnp.asarray(value, jnp.float64) for value in row]),
    )
    clock = clock._replace(
        flight=timing.begin_cycles(inputs, flight, release, clock.drawn, clock.seconds, lanes=program.lanes),
        clocks=clocks,
        drawn=clock.drawn + release,
        pushes=clock.pushes + pushed,
        samples=clock.samples + jnp.where(pushed, inputs.samples[worker], 0),
        left=left,
        version=version,
        pulled=jnp.where(release, version, clock.pulled),
        grouped=jnp.where(take, 0, grouped),
        # This code runs also where the limit came before a push: then nothing may change.
        policy=jax.tree.map(partial(jnp.where, pushed), policy, clock.policy),
        status=jnp.where(pushed & ~finite, _DIVERGED, clock.status),
    )
    return clock, done


def _probe(
    program: Program, data: TrainingData, inputs: EngineInputs, clock: Clock, learned: Learned | None, worker: Array
) -> tuple[Array, Array]:
    """Loss of the pushed mini-batch at the servers' parameters, before the update, and as it would be after it."""
    if program.model is None or learned is None:
        return jnp.asarray(jnp.nan), jnp.asarray(jnp.nan)
    yes = jnp.asarray(True)
    rows, count = learning.minibatch(program.model, data, inputs, worker, clock.drawn[worker] - 1)
    after = learning.apply_push(program.model, inputs, learned, worker, yes, yes, clock.grouped + 1)
    before, later = (learning.mean_loss(program.model, m.parameters, rows, count) for m in (learned, after))
    return before.astype(jnp.float64), later.astype(jnp.float64)
