"""The data plane in simulated time: a JAX event loop that pulls, computes, pushes and applies, with real stale gradients.

One step advances the cluster to the next completed push (`simulators.engine.timing`). Then the update is applied
(`simulators.engine.learning`), the synchronisation policy decides which workers are released, and these pull. Their
gradients are computed at that moment, on the parameters that they pull.

Between two calls of `advance` the state begins, catches up with a change of inputs, stops or resumes
(`simulators.engine.changes`).

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

from simulators.engine import embedding, learning, timing
from simulators.engine.inputs import EngineInputs
from simulators.engine.job_state import (
    DEADLOCK,
    DIVERGED,
    DONE,
    RUNNING,
    TARGET,
    Clock,
    Program,
    Records,
    State,
    begin_cycles,
    first_drawn,
    pulling,
    with_bytes,
    with_work,
)
from simulators.engine.lanes import anywhere
from simulators.engine.learning import Learned, Released, TrainingData
from simulators.engine.one_function import as_one, decides_apart, gradients_as_one, large_as_one, marked, told_xla
from simulators.programs.stored_programs import StoredProgram
from tuners.actions import Decision, Push

__all__ = ["advance", "advance_lanes"]


class _Event(NamedTuple):
    """What ends the timing part of a step, if it is no limit."""

    worker: Array  # int32: of the last event
    pushed: Array  # bool: it completed a push
    losses: tuple[Array, ...] = ()  # of the mini-batch, before and after the update; only for a policy that probes
    rings: Array | None = None  # bool: there is no push, and the policy's timer has run down; None: it sets none


class _Pushed(NamedTuple):
    """What the timing part of a step tells the learning part, and the next step."""

    goes_on: Array  # bool: another step follows
    yes: Array  # bool: a push was completed
    at: Array  # int32: the row of the table for its record
    worker: Array  # int32: by this worker
    accept: Array  # bool: the policy accepts its gradient
    take: Array  # bool: the servers update the parameters now
    grouped: Array  # int32: gradients in that update
    released: Released
    due: Array  # bool: the parameters are to be validated
    rounds: Any  # bool scalars, `Decision.later` and `Decision.turn`; () where servers keep no table of gradients
    row: Array  # float64 [11]: its record, validation not yet filled in


@partial(StoredProgram, plainer=lambda program: program._replace(dispatched=True), options=told_xla)
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

    def step(carry: tuple[State, Array, _Pushed]) -> tuple[State, Array, _Pushed]:
        state, table, last = carry
        # A lane that is done waits for the others: with this limit, no event of it is due.
        limit = jnp.where(last.goes_on, until_seconds, -jnp.inf) if program.lanes else until_seconds
        return _step(program, data, inputs, state, table, last, clocks, limit)

    # One row more, in which lanes that are done write.
    begun = (state, jnp.zeros((rows + 1, len(Records._fields))), _nothing(program, inputs, state, clocks))
    run = partial(jax.lax.while_loop, lambda c: anywhere(c[2].goes_on, program.lanes), step)
    # With a model, a part of each step is one function: `as_one`. Validation never is.
    whole = program.model is None and large_as_one(program, inputs)
    state, table, last = marked(run, begun) if whole else run(begun)
    return state, table[:rows], last.at + last.yes


@StoredProgram
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
    program: Program,
    data: TrainingData,
    inputs: EngineInputs,
    state: State,
    table: Array,
    last: _Pushed,
    clocks: Array,
    until_seconds: Array,
) -> tuple[State, Array, _Pushed]:
    """To the next completed push, or to the last event before `until_seconds`, in a run of `clocks` pushes.

    `last` is what the step before told. Its arrays are written over: XLA would copy constants for that at every step.
    """
    clock, learned = state
    if learned is not None and learned.touched:
        inputs = embedding.in_flight(inputs, learned.touched)
    settle = partial(_settle, program, inputs, clocks)
    turn = partial(_travel_and_settle, program, inputs, until_seconds, settle)
    learn = partial(_learn, program, data, inputs)
    events = partial(as_one, program, asked=program.model is not None and large_as_one(program, inputs))
    if gradients_as_one(program, data, inputs, learned):

        def whole(clock: Clock, last: _Pushed, learned: Learned) -> Any:
            return learn(*turn(clock, last), learned, together=False)

        clock, done, learned = as_one(program, whole, clock, last, learned, asked=True)
    elif program.probes:
        # A policy that probes needs losses between the push and its decision, so the small arrays take two parts.
        travel = partial(_travel, program, inputs, until_seconds)
        policy, clock = clock.policy, clock._replace(policy=())
        clock, worker, pushed = events(lambda clock, *_: travel(clock), clock, last.worker, last.yes)
        event = _Event(worker, pushed, _probe(program, data, inputs, clock, learned, worker))
        push, _ = _push_counted(inputs, clock, event)
        if decides_apart(program, policy, push):
            made, decision = program.decide(policy, push)
            _check_kept_kind(policy, made)
            clock, done = events(partial(settle, event, decided=decision), clock, last)
            clock = clock._replace(policy=jax.tree.map(partial(jnp.where, pushed), made, policy))
        else:
            clock, done = events(partial(settle, event), clock._replace(policy=policy), last)
        clock, done, learned = learn(clock, done, learned)
    else:
        clock, done = events(turn, clock, last)
        clock, done, learned = learn(clock, done, learned)
    # Always write: a row without a push is overwritten by the next one, or lies beyond the rows used.
    table = jax.lax.dynamic_update_slice(table, done.row[None, :], (done.at, jnp.zeros_like(done.at)))
    if program.model is not None and learned is not None:
        validate = partial(learning.evaluate, program.model, data, learned.parameters)
        clock, table, done = _validated(program, inputs, validate, clock, table, done)
    return State(clock, learned), table, done


def _learn(
    program: Program,
    data: TrainingData,
    inputs: EngineInputs,
    clock: Clock,
    done: _Pushed,
    learned: Learned | None,
    *,
    together: bool | None = None,
) -> tuple[Clock, _Pushed, Learned | None]:
    """The learning part of a step: servers apply the gradient of the push, and released workers pull. `together`: as of
    `learning.pull`."""
    if program.model is None or learned is None:
        return clock, done, learned
    # First apply, then pull: a worker that is released pulls parameters that include its own push.
    learned = learning.apply_push(
        program.model, inputs, learned, done.worker, done.accept, done.take, done.grouped, done.rounds
    )
    if learned.touched:
        learned = learned._replace(touched=embedding.count_push(learned.touched, done.worker, done.yes))
    learned, loss, released = learning.pull(
        program.model,
        data,
        inputs,
        learned,
        clock.loss,
        done.released,
        lanes=program.lanes,
        idle=program.idle,
        together=together,
    )
    clock = with_bytes(inputs, clock._replace(loss=loss), learned, released.workers)
    return clock, done._replace(released=released), learned


def _validated(
    program: Program,
    inputs: EngineInputs,
    validate: Callable[[], tuple[Array, Array]],
    clock: Clock,
    table: Array,
    done: _Pushed,
) -> tuple[Clock, Array, _Pushed]:
    """Loss and accuracy on the validation set, into the table and against the targets, if they are due."""
    columns, nan = len(Records._fields), jnp.asarray(jnp.nan)

    def measure(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        due, goes_on, status, table = carry
        # Inside a conditional, because XLA moves what depends on constants only out of a loop, even if that does not run.
        found = jax.lax.cond(due, validate, lambda: (nan, nan))
        loss, accuracy = (jnp.where(done.due, value, jnp.nan) for value in found)
        at = (done.at, jnp.asarray(columns - 2, done.at.dtype))
        table = jax.lax.dynamic_update_slice(table, jnp.stack([loss, accuracy])[None, :], at)
        # Comparing with nan is False, so that a lane for which validation was not due does not reach its target.
        reached = (loss <= inputs.target_loss) | (accuracy >= inputs.target_accuracy)
        status = jnp.where((status == RUNNING) & reached, TARGET, status)
        return jnp.zeros_like(due), goes_on & (status == RUNNING), status, table

    # A loop that runs once or never, because XLA copies what goes through a conditional: here, the whole table.
    begun = (anywhere(done.due, program.lanes), done.goes_on, clock.status, table)
    due, goes_on, status, table = jax.lax.while_loop(lambda c: c[0], measure, begun)
    return clock._replace(status=status), table, done._replace(due=due, goes_on=goes_on)


def _nothing(program: Program, inputs: EngineInputs, state: State, clocks: Array) -> _Pushed:
    """Before the first of `clocks` pushes."""
    no, zero = jnp.asarray(False), jnp.asarray(0, jnp.int32)
    nobody, row = jnp.zeros_like(inputs.active), jnp.zeros(len(Records._fields))
    learns = program.model is not None
    return _Pushed(
        goes_on=(clocks > 0) & (state.clock.status == RUNNING),
        yes=no,
        at=zero,
        worker=zero,
        accept=no,
        take=no,
        grouped=zero,
        released=Released(
            workers=nobody,
            pulls=nobody if inputs.copies else (),
            order=learning.pull_order(inputs.active, nobody, lanes=program.lanes) if learns else (),
            begun=jnp.zeros(inputs.active.shape[0] if learns else 0, jnp.int32),
        ),
        due=no,
        rounds=(no, no) if _keeps_table(program) else (),
        row=row,
    )


def _keeps_table(program: Program) -> bool:
    return program.model is not None and program.model.aggregation == "table"


def _travel_and_settle(
    program: Program,
    inputs: EngineInputs,
    until_seconds: Array,
    settle: Callable[..., tuple[Clock, _Pushed]],
    clock: Clock,
    last: _Pushed,
) -> tuple[Clock, _Pushed]:
    if not program.timers:
        clock, worker, pushed = _travel(program, inputs, until_seconds, clock)
        return settle(_Event(worker, pushed), clock, last)
    timer = clock.timer[0]
    clock, worker, pushed = _travel(program, inputs, jnp.minimum(until_seconds, timer), clock)
    rings = ~pushed & (clock.status == RUNNING) & (timer <= until_seconds)
    now = jnp.where(rings, timer, clock.seconds)
    flight = timing.catch_up(
        inputs, clock.seconds, clock.flight, now, discipline=program.discipline, overlapping=program.overlapping
    )
    flight = jax.tree.map(partial(jnp.where, rings), flight, clock.flight)
    return settle(_Event(worker, pushed, rings=rings), clock._replace(seconds=now, flight=flight), last)


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
    stuck = ~pushed & (clock.status == RUNNING) & jnp.all(flight.phase == timing.WAIT)
    if clock.left.shape[0]:
        # Unless the work that is left is on its way, with its data, to workers that have not begun.
        stuck = stuck & jnp.any(with_work(inputs, clock.left))
    if program.timers:
        stuck = stuck & ~jnp.isfinite(clock.timer[0])
    status = jnp.where(stuck, DEADLOCK, clock.status)
    return clock._replace(seconds=seconds, flight=flight, status=status), worker, pushed


def _settle(
    program: Program,
    inputs: EngineInputs,
    wanted: Array,
    event: _Event,
    clock: Clock,
    last: _Pushed,
    decided: Decision | None = None,
) -> tuple[Clock, _Pushed]:
    """Count the push, let the policy decide, and let the workers that it releases begin a cycle.

    `wanted`: after so many pushes the run ends. `decided`: what the policy has decided already; its state is then none of
    the clock's.
    """
    worker, pushed, _, rings = event
    acted = pushed if rings is None else pushed | rings
    push, left = _push_counted(inputs, clock, event)
    policy, decision = program.decide(clock.policy, push) if decided is None else ((), decided)
    _check_kept_kind(clock.policy, policy)
    accept = jnp.asarray(decision.accept) & ~clock.testing
    grouped = clock.grouped + (pushed & accept)
    # Gradients that are summed or averaged wait until the policy closes their group; others are applied at once.
    groups = program.model is not None and program.model.aggregation != "each"
    take = acted & (decision.step if groups else True) & (grouped > 0)
    release = decision.release & acted & push.active
    pulls, kept = pulling(inputs, clock, release)
    version = clock.version + jnp.where(take, grouped, 0)
    finite = jnp.isfinite(push.loss) if program.model is not None else jnp.asarray(True)
    row = _record(clock, push)  # before the cycle below begins, which overwrites when phases began
    samples = inputs.samples[worker] * clock.steps[worker] if clock.steps.shape[0] else inputs.samples[worker]
    if inputs.snapshots:
        clock = clock._replace(flight=timing.with_snapshot(inputs, clock.flight, pushed))
    clock = clock._replace(
        clocks=push.clocks,
        # Under `vmap`, looking up one worker per lane is slower than drawing for all.
        **begin_cycles(inputs, clock, release, pulls, for_all=program.lanes),
        pushes=clock.pushes + pushed,
        samples=clock.samples + jnp.where(pushed, samples, 0),
        left=left,
        version=version,
        pulled=jnp.where(pulls, version, clock.pulled),
        grouped=jnp.where(take, 0, grouped),
        # This code runs also where the limit came before a push: then nothing may change.
        policy=jax.tree.map(partial(jnp.where, acted), policy, clock.policy),
        timer=clock.timer if rings is None else _timer(clock, decision, rings, acted),
        status=jnp.where(pushed & ~finite, DIVERGED, clock.status),
        kept=kept,
    )
    reached = (clock.pushes >= inputs.target_clocks) | (clock.samples >= inputs.target_samples)
    if left.shape[0]:
        reached = reached | jnp.all(left <= DONE)
    status = jnp.where((clock.status == RUNNING) & pushed & reached, TARGET, clock.status)
    at = last.at + last.yes
    learns = program.model is not None
    return clock._replace(status=status), _Pushed(
        goes_on=acted & (at + pushed < wanted) & (status == RUNNING),
        yes=pushed,
        at=at,
        worker=worker,
        accept=pushed & accept,
        take=take,
        grouped=grouped,
        released=Released(
            workers=release,
            pulls=pulls if inputs.copies else (),
            order=learning.pull_order(inputs.active, release, lanes=program.lanes) if learns else (),
            begun=first_drawn(clock) if learns else last.released.begun,
        ),
        due=pushed & (clock.pushes % inputs.evaluate_clocks == 0) if learns else last.due,
        rounds=(jnp.asarray(decision.later), jnp.asarray(decision.turn) & pushed) if _keeps_table(program) else (),
        row=row,
    )


def _push_counted(inputs: EngineInputs, clock: Clock, event: _Event) -> tuple[Push, Array]:
    """What the policy sees of a push, which the clock does not count yet, and `Clock.left` after it."""
    mine = (jnp.arange(inputs.active.shape[0]) == event.worker) & event.pushed
    left = _left_after(inputs, clock, mine)
    # A worker that has done its part leaves the group: others must not wait for it.
    active = with_work(inputs, left)
    return _push_seen(clock, event, clock.clocks + mine, active), left


def _left_after(inputs: EngineInputs, clock: Clock, mine: Array) -> Array:
    """`Clock.left` after a push of the worker in `mine` [k]."""
    if not clock.left.shape[0]:
        return clock.left
    return clock.left - jnp.where(mine, inputs.push_work * clock.steps if clock.steps.shape[0] else inputs.push_work, 0.0)


def _check_kept_kind(before: Any, after: Any) -> None:
    """Raise TypeError, when traced, where a policy's next state is of other types or shapes: no loop carries that.

    Python numbers, which JAX calls weak, take the type that they meet.
    """
    form, next_form = str(jax.tree.structure(before)), str(jax.tree.structure(after))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=False)
    changed = [
        f"{_kind(old)} into {_kind(new)}"
        for old, new in pairs
        if _kind(old) != _kind(new) and not getattr(old, "weak_type", False)
    ]
    if form != next_form:
        changed = [f"{form} into {next_form}"]
    if changed:
        raise TypeError(
            f"The synchronisation policy's `decide` changes the type of its state: {', '.join(changed)}. Let it return what "
            "`init` begins with, as by `new.astype(old.dtype)`; seconds and losses of a push are float64."
        )


def _kind(value: Any) -> str:
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}"


def _push_seen(clock: Clock, event: _Event, clocks: Array, active: Array) -> Push:
    """What the policy sees of the push, or of its timer that has run down."""
    push = Push(
        worker=event.worker,
        clocks=clocks,
        waiting=active & (clock.flight.phase == timing.WAIT),
        active=active,
        seconds=clock.seconds,
        staleness=clock.version - clock.pulled[event.worker],
        loss=clock.loss[event.worker],
    )
    if event.losses:
        push = push._replace(loss_before=event.losses[0], loss_after=event.losses[1])
    return push if event.rings is None else push._replace(timer=event.rings)


def _record(clock: Clock, push: Push) -> Array:
    """The push's row of `Records`, [11], validation not yet filled in."""
    row = Records(
        clock.seconds,
        push.worker,
        first_drawn(clock)[push.worker] if clock.steps.shape[0] else clock.drawn[push.worker] - 1,
        *timing.spans(clock.flight, push.worker),
        push.staleness,
        push.loss,
        jnp.nan,
        jnp.nan,
    )
    return jnp.stack([jnp.asarray(value, jnp.float64) for value in row])


def _timer(clock: Clock, decision: Decision, rings: Array, acted: Array) -> Array:
    """When the policy decides without a push, [1], after this decision. A timer that has run down is off."""
    old, wanted = jnp.where(rings, jnp.inf, clock.timer), jnp.asarray(decision.timer, jnp.float64)
    return jnp.where(acted & ~jnp.isnan(wanted), clock.seconds + wanted, old)


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
