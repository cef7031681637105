"""The data plane in simulated time: a JAX event loop that pulls, computes, pushes and applies, with real stale gradients.

One step advances the cluster to the next completed push (`simulators.engine.timing`). Then the update is applied
(`simulators.engine.learning`), the synchronisation policy decides which workers are released, and these pull. Their
gradients are computed at that moment, on the parameters that they pull.

All that changes a job's state is in this file. Between two calls of `advance` the state begins, catches up with a change of
inputs, stops or resumes.

Time is absolute float64 and advances from event to event only, so cutting a run into windows changes nothing. Ties: of
events at one instant the lowest worker index comes first. Noise is a hash of (seed, worker, clock).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import ArrayLike
from numpy.typing import NDArray

from simulators.engine import embedding, learning, timing
from simulators.engine.inputs import EngineInputs
from simulators.engine.lanes import anywhere
from simulators.engine.learning import Learned, LearningProgram, TrainingData
from simulators.engine.network import Proportions
from simulators.engine.timing import Flight
from simulators.stored_programs import StoredProgram
from tuners.actions import Decision, Push

jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

__all__ = [
    "STATUSES",
    "Clock",
    "Program",
    "Records",
    "State",
    "advance",
    "advance_lanes",
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
    "with_work",
    "workers_stopped",
]

_RUNNING, _TARGET, _DIVERGED, _DEADLOCK = range(4)
STATUSES = ("running", "target", "diverged", "deadlock")
_DONE = 1e-6  # clocks or samples left by rounding only
_NONE: Any = np.zeros(0)


class Program(NamedTuple):
    """What is compiled in; hashable. Runs with equal programs share one compiled engine."""

    model: LearningProgram | None  # None: timing-only
    decide: Callable[[Any, Push], tuple[Any, Decision]]
    probes: bool  # the policy wants losses around the update
    discipline: str  # maxmin | fifo | uneven
    overlapping: bool  # some node is worker and server at once, or has a token bucket: every NIC counts
    lanes: bool = False  # traced under `vmap` by `advance_lanes`
    timers: bool = False  # the policy sets a timer, and decides when it has run down
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


class _Pushed(NamedTuple):
    """What the timing part of a step tells the learning part, and the next step."""

    goes_on: Array  # bool: another step follows
    yes: Array  # bool: a push was completed
    at: Array  # int32: the row of the table for its record
    worker: Array  # int32: by this worker
    accept: Array  # bool: the policy accepts its gradient
    take: Array  # bool: the servers update the parameters now
    grouped: Array  # int32: gradients in that update
    release: Array  # bool [k]: workers that begin a mini-batch now
    pulls: Any  # bool [k]: of these, those that pull; () where all do
    order: Any  # `learning.PullOrder` of them; () without a model
    begun: Array  # int32 [k]: the number of the first mini-batch in each worker's cycle; [0] without a model
    due: Array  # bool: the parameters are to be validated
    rounds: Any  # bool scalars, `Decision.later` and `Decision.turn`; () where servers keep no table of gradients
    row: Array  # float64 [11]: its record, validation not yet filled in


_IN_ONE = {"xla_cpu_experimental_ynn_fusion_type": "", "xla_cpu_use_fusion_emitters": False}
"""For XLA: products of matrices without calls of its library, and kernels without MLIR. One function can have neither."""


def _options(program: Program, data: TrainingData, inputs: EngineInputs, state: State, *_: Any) -> dict[str, Any]:
    return _IN_ONE if _gradients_as_one(program, data, inputs, state.learned) else {}


@partial(StoredProgram, plainer=lambda program: program._replace(dispatched=True), options=_options)
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
    # With a model, a part of each step is one function: `_as_one`. Validation never is.
    whole = program.model is None and _large_as_one(program, inputs)
    state, table, last = _marked(run, begun) if whole else run(begun)
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
    as_one = partial(_as_one, program, asked=program.model is not None and _large_as_one(program, inputs))
    if _gradients_as_one(program, data, inputs, learned):

        def whole(clock: Clock, last: _Pushed, learned: Learned) -> Any:
            return learn(*turn(clock, last), learned, together=False)

        clock, done, learned = _as_one(program, whole, clock, last, learned, asked=True)
    elif program.probes:
        # A policy that probes needs losses between the push and its decision, so the small arrays take two parts.
        travel = partial(_travel, program, inputs, until_seconds)
        clock, worker, pushed = as_one(lambda clock, *_: travel(clock), clock, last.worker, last.yes)
        losses = _probe(program, data, inputs, clock, learned, worker)
        clock, done = as_one(partial(settle, worker, pushed, losses), clock, last)
        clock, done, learned = learn(clock, done, learned)
    else:
        clock, done = as_one(turn, clock, last)
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
    learned, loss, order = learning.pull(
        program.model,
        data,
        inputs,
        learned,
        clock.loss,
        done.release,
        done.begun,
        done.order,
        lanes=program.lanes,
        pulls=done.pulls,
        together=together,
    )
    return _with_bytes(inputs, clock._replace(loss=loss), learned, done.release), done._replace(order=order), learned


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
        status = jnp.where((status == _RUNNING) & reached, _TARGET, status)
        return jnp.zeros_like(due), goes_on & (status == _RUNNING), status, table

    # A loop that runs once or never, because XLA copies what goes through a conditional: here, the whole table.
    begun = (anywhere(done.due, program.lanes), done.goes_on, clock.status, table)
    due, goes_on, status, table = jax.lax.while_loop(lambda c: c[0], measure, begun)
    return clock._replace(status=status), table, done._replace(due=due, goes_on=goes_on)


# ------------------------------------------------------------------------------------------------ compiled as one function

_MANY = 144  # nodes; from 150 to 230 of them on, by discipline, XLA takes the loop for too large to do so unasked
_MOST = {"maxmin": 2048, "fifo": 1024, "uneven": 1024}
"""Nodes up to which XLA can make the loop one function. Of more it makes parallel code, which no such function can call."""
_MOST_NICS = 800  # the same, where each NIC counts


def _large_as_one(program: Program, inputs: EngineInputs) -> bool:
    """XLA is asked to compile as one function what has no gradient in it: the whole loop of a timing-only job, or the events
    of a step.

    By itself it does so up to some bytes (see `simulators.__init__`), because products of matrices are slower there. Asked,
    a push of 240 workers takes half of the time, one of 2,048 a third.
    """
    nodes = inputs.active.shape[0]
    if program.overlapping:
        # The matrices of `network.maxmin` are products, too; connections are divided in loops of their own.
        many = isinstance(inputs.usage, Proportions) and not inputs.connections and nodes <= _MOST_NICS
    else:
        many = _MANY <= nodes <= _MOST[program.discipline]
    # A policy that probes decides by a network, whose products of matrices no such function can have.
    never = program.lanes or program.probes or program.dispatched
    return many and not never and jax.default_backend() == "cpu"


_SMALL_FLOPS = 2**18
"""Of the gradient of a mini-batch, up to which it is compiled into one function with the events of a step. A push of
logistic regression (64 to 10, mini-batches of 16: 43,000) takes half of the time so, one of a perceptron (64-32-10: 166,000)
three quarters. The gain ends at some 330,000, since the code of such a function is that of plain loops; at 1.3 million a
push takes nine times as long."""


def _gradients_as_one(program: Program, data: TrainingData, inputs: EngineInputs, learned: Learned | None) -> bool:
    """XLA is asked to compile as one function a whole step but for its validation."""
    if program.model is None or learned is None or program.model.embedding is not None:
        return False
    never = program.lanes or program.probes or program.dispatched
    many = inputs.active.shape[0] >= _MANY and not _large_as_one(program, inputs)
    if never or many or jax.default_backend() != "cpu":
        return False
    return learning.flops(program.model, data, learned.parameters) <= _SMALL_FLOPS


def _marked(loop: Callable[[Any], Any], begun: Any) -> Any:
    """`loop(begun)`, with the mark on its call that XLA itself gives to loops that it takes for small."""
    mark = {"xla_cpu_small_call": "true", "inlineable": "false"}
    return set_xla_metadata(jax.jit(loop)(begun), **mark)  # type: ignore[no-untyped-call]


def _as_one(program: Program, part: Callable[..., Any], *carry: Any, asked: bool) -> Any:
    """`part(*carry)`, compiled as one function; `part` returns as many values, of the same types.

    Written as a loop that runs once: XLA compiles a small loop into one function (see `simulators.__init__`), and dispatches
    operations outside of loops one by one. `asked`: XLA is asked to, because it would not take the loop for small.
    """

    if program.lanes:
        return part(*carry)

    def body(carry: Any) -> Any:
        return (jnp.asarray(False), *part(*carry[1:]))

    once = partial(jax.lax.while_loop, lambda carry: carry[0], body)
    # The status is never negative, which XLA cannot know. If it could see that the loop runs once, it would unroll it.
    begun = (carry[0].status >= 0, *carry)
    return (_marked(once, begun) if asked else once(begun))[1:]


def _nothing(program: Program, inputs: EngineInputs, state: State, clocks: Array) -> _Pushed:
    """Before the first of `clocks` pushes."""
    no, zero = jnp.asarray(False), jnp.asarray(0, jnp.int32)
    nobody, row = jnp.zeros_like(inputs.active), jnp.zeros(len(Records._fields))
    learns = program.model is not None
    return _Pushed(
        goes_on=(clocks > 0) & (state.clock.status == _RUNNING),
        yes=no,
        at=zero,
        worker=zero,
        accept=no,
        take=no,
        grouped=zero,
        release=nobody,
        pulls=nobody if inputs.copies else (),
        order=learning.pull_order(inputs.active, nobody, lanes=program.lanes) if learns else (),
        begun=jnp.zeros(inputs.active.shape[0] if learns else 0, jnp.int32),
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
        return settle(worker, pushed, (), clock, last)
    timer = clock.timer[0]
    clock, worker, pushed = _travel(program, inputs, jnp.minimum(until_seconds, timer), clock)
    rings = ~pushed & (clock.status == _RUNNING) & (timer <= until_seconds)
    now = jnp.where(rings, timer, clock.seconds)
    flight = timing.catch_up(
        inputs, clock.seconds, clock.flight, now, discipline=program.discipline, overlapping=program.overlapping
    )
    flight = jax.tree.map(partial(jnp.where, rings), flight, clock.flight)
    return settle(worker, pushed, (), clock._replace(seconds=now, flight=flight), last, rings)


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
    if program.timers:
        stuck = stuck & ~jnp.isfinite(clock.timer[0])
    status = jnp.where(stuck, _DEADLOCK, clock.status)
    return clock._replace(seconds=seconds, flight=flight, status=status), worker, pushed


def _settle(
    program: Program,
    inputs: EngineInputs,
    wanted: Array,
    worker: Array,
    pushed: Array,
    losses: tuple[Array, ...],
    clock: Clock,
    last: _Pushed,
    rings: Array | None = None,
) -> tuple[Clock, _Pushed]:
    """Count the push, let the policy decide, and let the workers that it releases begin a cycle.

    `wanted`: after so many pushes the run ends. `rings`: the policy's timer has run down, and there is no push.
    """
    acted = pushed if rings is None else pushed | rings
    mine = (jnp.arange(inputs.active.shape[0]) == worker) & pushed
    clocks, left = clock.clocks + mine, _left_after(inputs, clock, mine)
    # A worker that has done its part leaves the group: others must not wait for it.
    active = with_work(inputs, left)
    push = _push_seen(clock, worker, clocks, active, losses, rings)
    policy, decision = program.decide(clock.policy, push)
    accept = jnp.asarray(decision.accept) & ~clock.testing
    grouped = clock.grouped + (pushed & accept)
    # Gradients that are summed or averaged wait until the policy closes their group; others are applied at once.
    groups = program.model is not None and program.model.aggregation != "each"
    take = acted & (decision.step if groups else True) & (grouped > 0)
    release = decision.release & acted & active
    pulls, kept = _pulling(inputs, clock, release)
    version = clock.version + jnp.where(take, grouped, 0)
    finite = jnp.isfinite(push.loss) if program.model is not None else jnp.asarray(True)
    row = _record(clock, push)  # before the cycle below begins, which overwrites when phases began
    samples = inputs.samples[worker] * clock.steps[worker] if clock.steps.shape[0] else inputs.samples[worker]
    if inputs.snapshots:
        clock = clock._replace(flight=timing.with_snapshot(inputs, clock.flight, pushed))
    clock = clock._replace(
        clocks=clocks,
        # Under `vmap`, looking up one worker per lane is slower than drawing for all.
        **_begun(inputs, clock, release, pulls, for_all=program.lanes),
        pushes=clock.pushes + pushed,
        samples=clock.samples + jnp.where(pushed, samples, 0),
        left=left,
        version=version,
        pulled=jnp.where(pulls, version, clock.pulled),
        grouped=jnp.where(take, 0, grouped),
        # This code runs also where the limit came before a push: then nothing may change.
        policy=jax.tree.map(partial(jnp.where, acted), policy, clock.policy),
        timer=clock.timer if rings is None else _timer(clock, decision, rings, acted),
        status=jnp.where(pushed & ~finite, _DIVERGED, clock.status),
        kept=kept,
    )
    reached = (clock.pushes >= inputs.target_clocks) | (clock.samples >= inputs.target_samples)
    if left.shape[0]:
        reached = reached | jnp.all(left <= _DONE)
    status = jnp.where((clock.status == _RUNNING) & pushed & reached, _TARGET, clock.status)
    at = last.at + last.yes
    learns = program.model is not None
    return clock._replace(status=status), _Pushed(
        goes_on=acted & (at + pushed < wanted) & (status == _RUNNING),
        yes=pushed,
        at=at,
        worker=worker,
        accept=pushed & accept,
        take=take,
        grouped=grouped,
        release=release,
        pulls=pulls if inputs.copies else (),
        order=learning.pull_order(inputs.active, release, lanes=program.lanes) if learns else (),
        begun=_first_drawn(clock) if learns else last.begun,
        due=pushed & (clock.pushes % inputs.evaluate_clocks == 0) if learns else last.due,
        rounds=(jnp.asarray(decision.later), jnp.asarray(decision.turn) & pushed) if _keeps_table(program) else (),
        row=row,
    )


def _left_after(inputs: EngineInputs, clock: Clock, mine: Array) -> Array:
    """`Clock.left` after a push of the worker in `mine` [k]."""
    if not clock.left.shape[0]:
        return clock.left
    return clock.left - jnp.where(mine, inputs.push_work * clock.steps if clock.steps.shape[0] else inputs.push_work, 0.0)


def _push_seen(
    clock: Clock, worker: Array, clocks: Array, active: Array, losses: tuple[Array, ...], rings: Array | None
) -> Push:
    """What the policy sees of the push, or of its timer that has run down (`rings`)."""
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
    return push if rings is None else push._replace(timer=rings)


def _record(clock: Clock, push: Push) -> Array:
    """The push's row of `Records`, [11], validation not yet filled in."""
    row = Records(
        clock.seconds,
        push.worker,
        _first_drawn(clock)[push.worker] if clock.steps.shape[0] else clock.drawn[push.worker] - 1,
        *timing.spans(clock.flight, push.worker),
        push.staleness,
        push.loss,
        jnp.nan,
        jnp.nan,
    )
    return jnp.stack([jnp.asarray(value, jnp.float64) for value in row])


def _pulling(inputs: EngineInputs, clock: Clock, release: Array) -> tuple[Array, Any]:
    """Of the workers in `release` [k], those that pull, because the others have a copy; and `Clock.kept` after that."""
    if not inputs.copies:
        return release, ()
    kept = jnp.minimum(clock.kept, inputs.copies.clocks - 1)  # which a tuner may just have made smaller
    pulls = release & (kept <= 0)
    return pulls, jnp.where(pulls, inputs.copies.clocks - 1, jnp.where(release, kept - 1, kept)).astype(jnp.int32)


def _timer(clock: Clock, decision: Decision, rings: Array, acted: Array) -> Array:
    """When the policy decides without a push, [1], after this decision. A timer that has run down is off."""
    old, wanted = jnp.where(rings, jnp.inf, clock.timer), jnp.asarray(decision.timer, jnp.float64)
    return jnp.where(acted & ~jnp.isnan(wanted), clock.seconds + wanted, old)


def _begun(inputs: EngineInputs, clock: Clock, release: Array, pulls: Array, *, for_all: bool) -> dict[str, Any]:
    """What changes as the workers in `release` [k] begin a cycle, of which those in `pulls` [k] pull: `Clock.flight`,
    `drawn` and, where they take local steps, `steps`."""
    skipping = pulls if inputs.copies else None
    flight = timing.begin_cycles(inputs, clock.flight, release, clock.drawn, clock.seconds, for_all=for_all, pulls=skipping)
    if not clock.steps.shape[0]:
        return {"flight": flight, "drawn": clock.drawn + release}
    steps = jnp.where(release, inputs.local_steps, clock.steps)
    return {"flight": flight, "drawn": clock.drawn + jnp.where(release, steps, 0), "steps": steps}


def _first_drawn(clock: Clock) -> Array:
    """The number of the first mini-batch in each worker's cycle, [k]."""
    return clock.drawn - (clock.steps if clock.steps.shape[0] else 1)


def _with_bytes(inputs: EngineInputs, clock: Clock, learned: Learned, release: Array) -> Clock:
    """The workers in `release` [k] have just begun to pull: where they pull rows, these are known only now."""
    if not learned.touched:
        return clock
    flight = clock.flight
    pulls = release & (flight.phase == timing.PULL)
    return clock._replace(
        flight=flight._replace(remaining=embedding.begin_pulls(inputs, learned.touched, pulls, flight.remaining))
    )


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


# ----------------------------------------------------------------------------------------- changes between two calls


def with_work(inputs: EngineInputs, left: Array) -> Array:
    """Workers that may begin a mini-batch, bool [k]: active, and with work left where the target is divided by share."""
    return inputs.active & (left > _DONE) if left.shape[0] else inputs.active


def blank(program: Program, inputs: EngineInputs, parameters: Any) -> State:
    """A job at time zero whose workers have not begun: `launch` it."""
    uneven = program.discipline == "uneven"
    return _blank(program.model, inputs, parameters, uneven=uneven)  # of no policy, so that jobs under any share one program


@StoredProgram
def _blank(model: LearningProgram | None, inputs: EngineInputs, parameters: Any, *, uneven: bool) -> State:
    nodes = inputs.active.shape[0]
    none, zero = jnp.zeros(nodes, jnp.int32), jnp.asarray(0, jnp.int32)
    clock = Clock(
        seconds=jnp.zeros(()),
        flight=timing.all_waiting(
            nodes,
            jnp.asarray(inputs.bucket_bytes),
            uneven=uneven,
            snapshots=bool(inputs.snapshots),
            net=inputs.connections,
        ),
        clocks=none,
        drawn=none,
        pushes=zero,
        samples=jnp.asarray(0, jnp.int64),
        version=zero,
        pulled=none,
        grouped=zero,
        loss=jnp.full(nodes, jnp.nan if model is None else 0.0, jnp.float64),
        policy=(),
        left=jnp.asarray(inputs.assigned),
        timer=_NONE,
        steps=jnp.ones(nodes if inputs.local_steps.shape[0] else 0, jnp.int32),
        testing=jnp.asarray(False),
        status=zero,
        kept=none if inputs.copies else (),
    )
    return State(clock, learning.untrained(model, inputs, parameters) if model is not None else None)


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
    # Launching does not depend on how the network is shared nor on the old policy's state. Their shapes differ from setting
    # to setting, though, so that leaving them in would compile `_launch` again after every reconfiguration.
    alike = inputs._replace(nic_levels=inputs.nic, usage=_NONE, capacity=_NONE, snapshots=(), connections=())
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
    pulls, kept = _pulling(inputs, clock, release)
    begun = _begun(inputs, clock, release, pulls, for_all=True)
    flight = begun["flight"]
    clock = clock._replace(
        **begun | {"flight": flight._replace(drawn=flight.drawn + jnp.where(release, offsets, 0.0))},
        clocks=jnp.zeros_like(clock.clocks),
        pulled=jnp.where(pulls, clock.version, clock.pulled),
        kept=kept,
    )
    if model is None or learned is None:
        return State(clock, learned)
    first, order = _first_drawn(clock), learning.pull_order(inputs.active, release, lanes=False)
    learned, loss, _ = learning.pull(
        model, data, inputs, learned, clock.loss, release, first, order, lanes=False, pulls=pulls, together=together
    )
    return State(_with_bytes(inputs, clock._replace(loss=loss), learned, release), learned)


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
