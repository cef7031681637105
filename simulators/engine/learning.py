"""Learning in the data plane: mini-batches, real gradients at the parameters that were pulled, updates at the servers.

The gradient is computed when a worker pulls, on the parameters that it pulls, and kept until its push arrives. The result is
the same as computing it later, and needs no copy of old parameters. Kept gradients have a leading worker axis, so that XLA
writes them in place, and workers that pull together are one batched call. Where all mini-batches of a job are of one size,
smaller factors are kept in place of a gradient's matrix products (`simulators.engine.kept_gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from simulators.engine import embedding as sparse
from simulators.engine.indices import first_of
from simulators.engine.inputs import EngineInputs
from simulators.engine.kept_gradients import KeptForm, kept_form
from simulators.engine.lanes import anywhere
from simulators.engine.limits import REVISING, check_learning
from simulators.engine.optimizers import OUTER, optimizer
from simulators.workloads.workload import Embedding, Workload
from tuners.actions import Rejected, Space
from tuners.settings import OF_CHECKPOINTS, Choice

__all__ = [
    "GradientTable",
    "Learned",
    "LearningProgram",
    "PullOrder",
    "Released",
    "TrainingData",
    "apply_push",
    "batch_shapes",
    "evaluate",
    "flops",
    "gradient_squares",
    "learning_program",
    "mean_loss",
    "minibatch",
    "pull",
    "pull_order",
    "pull_together",
    "regrouped",
    "untrained",
    "with_table",
]

_Shapes = tuple[tuple[tuple[int, ...], str], ...]  # and types, of arrays

_LEAST_ROWS = 16  # of a mini-batch that are compiled for, if its size is free: computing fewer saves little, compiling costs
_AT_ONCE = 2  # nodes whose gradients are one batch, where some do not work: of 32 at once, each takes 5 to 9 % less


class LearningProgram(NamedTuple):
    """What is learned and how it is applied; hashable, compiled in."""

    losses: Callable[[Any, Any], Array]
    correct: Callable[[Any, Any], Array]
    optimizer: str
    aggregation: str  # each | sum | mean | table
    batch: int  # rows drawn per mini-batch, at least every worker's own number of samples
    embedding: Embedding | None = None  # None: gradients are dense
    cached: int = 0  # rows of embedding tables of which a worker can keep copies
    rows: _Shapes = ()  # shape and type of a mini-batch's arrays, if all have the same


class GradientTable(NamedTuple):
    """The gradients of this round, and those that came early for the next one. After a round the two change places."""

    sums: Any  # pytree [2 k, ...]: of each worker's gradients, those of place 0 first; only where `counts` is not 0
    counts: Array  # float32 [2, k]: gradients in each sum
    totals: (
        Any  # pytree [2, ...]: sum over the workers in `within` of the means of their gradients; only where there are any
    )
    within: Array  # bool [2, k]
    now: Array  # int32 scalar: the place of this round


class PullOrder(NamedTuple):
    """How the workers that pull are taken: by batches, or one after another, the lowest index first."""

    together: Array  # bool: all, by batches
    singly: Array  # bool: one or more, one after another
    worker: Array  # uint32: the first that pulls; k: none


class Released(NamedTuple):
    """The workers that begin a mini-batch now."""

    workers: Array  # bool [k]
    pulls: Any  # bool [k]: of these, those that pull, where the others have a copy; () where all do
    order: Any  # `PullOrder` of them; () without a model
    begun: Array  # int32 [k]: the number of the first mini-batch in each worker's cycle; [0] without a model


class TrainingData(NamedTuple):
    """Training and validation sets; tuples of arrays, sample axis first. Where a model has embedding tables, the last
    two of the training set are what `seen_before` and `popularity` of `simulators.engine.embedding` say of its look-ups."""

    train: tuple[Array, ...]
    valid: tuple[Array, ...]


class Learned(NamedTuple):
    """Parameters at the servers and gradients on their way to them."""

    parameters: Any
    slots: Any  # the optimizer's state
    gradients: Any  # pytree with a leading worker axis [k, ...]: what is kept of them, see `_form`
    group: Any  # sum of the gradients pushed since the last step (aggregation sum | mean), or a `GradientTable`
    pulled: Any  # leading worker axis [k, ...]: sum of all gradients at the time of each pull, for optimizers that revise
    inner: Any  # the state of each worker's own optimizer, leading worker axis; () where a push is one gradient
    touched: Any = ()  # `simulators.engine.embedding.Touched`; () where gradients are dense
    copies: Any = ()  # the parameters that each worker pulled last, leading worker axis; () where all pull every time


def learning_program(workload: Workload, space: Space, samples: int) -> LearningProgram | None:
    """What the engine compiles for a workload, for mini-batches of up to `samples` rows; None if it is timing-only.

    Compiled for the next power of two; if the batch size is free, for at least 16 or the largest choice, so that changes
    among small batch sizes compile nothing. Where no mini-batch of the job can be of another size, the program says of what
    shape they are. Raises Rejected for an optimizer that does not go with the workload's aggregation.
    """
    if workload.proxy is None:
        return None
    check_learning(workload.optimizer, workload.aggregation, space, tables=workload.has_tables)
    most = space.whole_batch if space.knob("batch_size") is None else _largest(space, "batch_size")
    rows = max(samples, min(most, _LEAST_ROWS), 1)
    if workload.has_tables:
        # Kept gradients have an entry per look-up, so that their shape must be the same for all settings of the job.
        rows = _most_samples(space, samples)
    batch, proxy = 1 << (rows - 1).bit_length(), workload.proxy
    cached = max(space.base.cache_rows, _largest(space, "cache_rows"))
    # A change of the batch compiles another program. It goes on with the gradients that the one before has kept, so these
    # have to be of one shape. Of embedding tables, they are kept as rows.
    changes = space.frees("batch_size") or space.frees("load") or space.base.loads or workload.has_tables
    return LearningProgram(
        proxy.losses,
        proxy.correct,
        workload.optimizer,
        workload.aggregation,
        batch,
        proxy.embedding,
        0 if proxy.embedding is None else min(cached, proxy.embedding.rows),
        () if changes else batch_shapes(proxy.train, batch),
    )


def batch_shapes(train: tuple[ArrayLike, ...], batch: int) -> _Shapes:
    """Shape and type of each array of a mini-batch of `batch` rows of the training set: `LearningProgram.rows`."""
    return tuple(((batch, *np.shape(column)[1:]), str(jnp.result_type(column))) for column in train)


def with_table(model: LearningProgram | None, space: Space) -> LearningProgram | None:
    """`model` with servers that keep a table of all workers' gradients. Raises Rejected for what that does not go with."""
    if model is None:
        return None
    what = "a model with embedding tables" if model.embedding is not None else ""
    what = what or (f"{model.optimizer!r}, which revises single gradients" if model.optimizer in REVISING else "")
    what = what or ("checkpoints in place of replicas" if space.may_have(OF_CHECKPOINTS) else "")
    if what:
        raise Rejected(f"Cannot keep a table of all workers' gradients with {what}: install another policy.")
    return model._replace(aggregation="table")


def regrouped(model: LearningProgram, inputs: EngineInputs, learned: Learned) -> Learned:
    """`learned` without the gradients that servers keep, ready for the aggregation of `model`."""
    return learned._replace(group=_no_group(model, inputs, learned.parameters))


def _no_group(model: LearningProgram, inputs: EngineInputs, parameters: Any) -> Any:
    if model.aggregation == "each":
        return ()
    if model.aggregation != "table":
        return jax.tree.map(jnp.zeros_like, parameters)
    nodes = inputs.active.shape[0]
    sums, totals = (jax.tree.map(lambda p, n=n: jnp.zeros((n, *p.shape), p.dtype), parameters) for n in (2 * nodes, 2))
    counts, within = jnp.zeros((2, nodes), jnp.float32), jnp.zeros((2, nodes), bool)
    return GradientTable(sums, counts, totals, within, jnp.zeros((), jnp.int32))


def _largest(space: Space, name: str) -> int:
    """The largest value of the knob `name`; 0 where that is held."""
    knob = space.knob(name)
    return 0 if knob is None else int(max(knob.options) if isinstance(knob, Choice) else knob.high)


def _most_samples(space: Space, samples: int) -> int:
    """The largest mini-batch of a worker that a job with embedding tables can have. Raises Rejected for a larger one."""
    loads = [] if space.whole_batch else [k.name for k in space.knobs if k.name.startswith("load/")]
    loaded = sum(_largest(space, name) for name in loads)
    start = max([space.base.batch_size, *map(sum, space.base.loads)])
    most = max(start, _largest(space, "batch_size"), loaded, space.whole_batch)
    if samples > most:
        raise Rejected(f"Cannot compute mini-batches of {samples} samples: with embedding tables, {most} are most here.")
    return most


def untrained(model: LearningProgram, inputs: EngineInputs, parameters: Any) -> Learned:
    """First parameters, fresh optimizer slots and no gradient in progress."""
    nodes = inputs.active.shape[0]
    if model.embedding is not None:
        kept = sparse.zeros(model.embedding, parameters, nodes, model.batch)
        place = inputs.placement
        touched = sparse.nothing_touched(
            parameters, nodes, place.pulled.shape[0], model.cached, replicated=len(place.forwarded) > 0
        )
        return Learned(parameters, slots=(), gradients=kept, group=(), pulled=(), inner=(), touched=touched)
    nothing = jax.tree.map(lambda p: jnp.zeros((nodes, *p.shape), p.dtype), parameters)
    form = _form(model, inputs, parameters)
    return Learned(
        parameters=parameters,
        slots=_optimizer(model, inputs).init(parameters),
        gradients=nothing if form is None else tuple(jnp.zeros((nodes, *kept.shape), kept.dtype) for kept in form.kept),
        group=_no_group(model, inputs, parameters),
        pulled=nothing if model.optimizer in REVISING else (),
        inner=jax.vmap(_inner(model, inputs).init)(nothing) if inputs.local_steps.shape[0] else (),
        copies=nothing if inputs.copies else (),
    )


def apply_push(
    model: LearningProgram,
    inputs: EngineInputs,
    learned: Learned,
    worker: Array,
    accept: Array,
    take: Array,
    grouped: Array,
    rounds: Any = (),
) -> Learned:
    """Bring the gradient that `worker` has pushed into the group (if `accept`), and step the parameters (if `take`).

    `grouped` is the size of the group, this push counted; `rounds` are `Decision.later` and `Decision.turn` for a table.
    """
    gradient = jax.tree.map(partial(_row, worker), learned.gradients)
    if model.embedding is not None:
        return learned._replace(parameters=sparse.stepped(learned.parameters, gradient, inputs.learning_rate, take))
    if (form := _form(model, inputs, learned.parameters)) is not None:
        gradient = form.finished(gradient)
    group, total = _grouped(model, inputs, learned.group, gradient, worker, accept, grouped, rounds)
    more = {}  # what only optimizers that revise take
    if model.optimizer in REVISING:
        more["missed"] = jax.tree.map(lambda now, rows: now - _row(worker, rows), learned.slots.total, learned.pulled)
    updates, slots = _optimizer(model, inputs).update(total, learned.slots, learned.parameters, **more)
    parameters = optax.apply_updates(learned.parameters, updates)
    choose = partial(jax.tree.map, lambda new, old: jnp.where(take, new, old))
    return learned._replace(
        parameters=choose(parameters, learned.parameters),
        slots=choose(slots, learned.slots),
        group=group if model.aggregation == "table" else jax.tree.map(lambda g: jnp.where(take, 0.0, g), group),
    )


def _grouped(
    model: LearningProgram,
    inputs: EngineInputs,
    group: Any,
    gradient: Any,
    worker: Array,
    accept: Array,
    grouped: Array,
    rounds: Any,
) -> tuple[Any, Any]:
    """What the servers keep of gradients after this push, and what a step would be by."""
    if model.aggregation == "each":
        return (), gradient
    if model.aggregation == "table":
        return _tabled(inputs, group, gradient, worker, accept, *rounds)
    weight = _weight(inputs, worker) if model.aggregation == "mean" else jnp.float32(1)
    group = jax.tree.map(lambda s, g: s + jnp.where(accept, weight * g, 0.0), group, gradient)
    size = jnp.maximum(grouped, 1).astype(jnp.float32) if model.aggregation == "mean" else jnp.float32(1)
    return group, jax.tree.map(lambda s: s / size, group)


def _tabled(
    inputs: EngineInputs, table: GradientTable, gradient: Any, worker: Array, accept: Array, later: Array, turn: Array
) -> tuple[GradientTable, Any]:
    """The table after a push of `worker`, and the mean over the workers in it of the means of their gradients.

    A gradient that is accepted counts in this round or, if `later`, in the next one, which begins after this push if `turn`.
    A push reads and writes one worker's row, and the round's total: what it costs does not grow with the number of workers.
    """
    nodes = inputs.active.shape[0]
    at = jnp.where(later, 1 - table.now, table.now)
    row, count, inside = at * nodes + worker, table.counts[at, worker], table.within[at, worker]
    more = count + accept

    def read(_: tuple[Array, Any]) -> tuple[Array, Any]:
        # A place begins empty without being cleared: its old rows and its old total are not used.
        return jnp.asarray(False), jax.tree.map(lambda rows: jnp.where(count > 0, _row(row, rows), 0.0), table.sums)

    # A loop that runs once, because XLA would read the row again after it is written, for which it would copy the table.
    _, old = jax.lax.while_loop(lambda c: c[0], read, (count >= 0, jax.tree.map(jnp.zeros_like, gradient)))
    new = jax.tree.map(lambda o, g: o + jnp.where(accept, g, 0.0), old, gradient)
    ours, before = accept / jnp.maximum(more, 1), (accept & inside) / jnp.maximum(count, 1)
    changes = jax.tree.map(lambda n, o: n * ours.astype(n.dtype) - o * before.astype(o.dtype), new, old)
    begun = jnp.any(table.within[at])
    totals = jax.tree.map(lambda rows, c: jnp.where(begun, _row(at, rows), 0.0) + c, table.totals, changes)
    sums, totals = _with_row(table.sums, new, row, lanes=False), _with_row(table.totals, totals, at, lanes=False)
    counts = table.counts.at[at, worker].set(more)
    within = table.within.at[at, worker].set(inside | accept)

    mine = (jnp.arange(nodes) == worker) & accept
    known = (counts[table.now] > 0) & (inputs.active | mine)  # a worker that is about to stop still counts

    def add_again(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        def total(rows: Array) -> Array:
            this = jax.lax.dynamic_slice_in_dim(rows, table.now * nodes, nodes)
            weights = (known / jnp.maximum(counts[table.now], 1)).astype(rows.dtype)
            return jnp.tensordot(weights, jnp.where(_columns(known, this), this, 0.0), 1)

        return jnp.asarray(False), _with_row(carry[1], jax.tree.map(total, sums), table.now, lanes=False)

    # Only after a worker has come or gone. A loop, because XLA updates its arrays in place: see `pull`.
    changed = jnp.any(within[table.now] != known)
    _, totals = jax.lax.while_loop(lambda c: c[0], add_again, (changed, totals))
    share = 1 / jnp.maximum(jnp.sum(known), 1)
    mean = jax.tree.map(lambda rows: _row(table.now, rows) * share.astype(rows.dtype), totals)
    within = within.at[table.now].set(known & ~turn)
    counts = counts.at[table.now].set(jnp.where(turn, 0.0, counts[table.now]))
    return GradientTable(sums, counts, totals, within, jnp.where(turn, 1 - table.now, table.now)), mean


def pull(
    model: LearningProgram,
    data: TrainingData,
    inputs: EngineInputs,
    learned: Learned,
    loss: Array,
    released: Released,
    *,
    lanes: bool,
    idle: bool = False,
    together: bool | None = None,
) -> tuple[Learned, Array, Released]:
    """The workers that are `released` pull: the gradients of their mini-batches, and losses [k], are made now.

    Where workers take local steps, the gradient is what these have changed, and the loss is their mean. Where pulls may be
    skipped, only some of the workers pull, and the others use the copies that they have.

    The order of pulls comes back as the loops leave it, so that the next step writes over its arrays; otherwise XLA copies
    them. `together`: whether workers pull as one batch. None if only the running program knows, which then has both ways to
    pull: it does as `pull_together` says. `idle`: some nodes do not work, and where workers pull together, they do so by
    small batches, so that few gradients are computed of nodes that do not work.
    """
    if model.embedding is not None:
        return *_pull_rows(model, model.embedding, data, inputs, learned, loss, released, lanes=lanes), released
    local = inputs.local_steps.shape[0] > 0
    release, nodes = released.workers, released.workers.shape[0]
    width = min(nodes, _AT_ONCE) if idle and not lanes else nodes
    numbers = jnp.arange(nodes, dtype=jnp.uint32)
    gradient = partial(_worker_gradient, model, data, inputs, learned, released)

    def some_at_once(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        go, worker, losses, kept = carry
        # The indices depend on the carry, because XLA moves what depends on constants only out of the loop: it would
        # compute all gradients before the loop, even if the loop does not run.
        first = jnp.minimum(worker, nodes - width) if width < nodes else jnp.where(go, 0, 1).astype(worker.dtype)
        found, made = jax.vmap(gradient)(first + jnp.arange(width, dtype=worker.dtype))
        found = found.astype(jnp.float64)
        if width == nodes:
            return jnp.zeros_like(go), worker, found, made
        kept, losses = jax.tree.map(
            lambda rows, new: jax.lax.dynamic_update_slice_in_dim(rows, new, first, 0), (kept, losses), (made, found)
        )
        following = first_of(release & (numbers >= first + width))
        return following < nodes, following, losses, kept

    def one(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        _, worker, losses, kept = carry
        # A lane without workers left waits for the others: its worker, and so its row, are out of range.
        loss, made = gradient(jnp.minimum(worker, nodes - 1) if lanes else worker)
        kept = _with_row(kept, made, worker, lanes=lanes)
        losses = jnp.where(numbers == worker, loss.astype(jnp.float64), losses)
        following = first_of(release & (numbers > worker))
        return anywhere(following < nodes, lanes), following, losses, kept

    # Of these loops, one runs or none. A `cond` would say so more plainly, but XLA copies every kept gradient through a
    # conditional, and updates a loop's arrays in place.
    beside = learned.inner if local else learned.copies  # what is kept of each worker beside its gradient
    paired = local or bool(inputs.copies)
    kept = (learned.gradients, beside) if paired else learned.gradients
    at_once, singly, worker = released.order
    if together is False:
        singly = singly | at_once
    if together is not False:
        at_once, worker, loss, kept = jax.lax.while_loop(lambda c: c[0], some_at_once, (at_once, worker, loss, kept))
    if together is not True:
        singly, worker, loss, kept = jax.lax.while_loop(lambda c: c[0], one, (singly, worker, loss, kept))
    gradients, beside = kept if paired else (kept, beside)
    pulled = learned.pulled
    if model.optimizer in REVISING:
        pulled = jax.tree.map(lambda rows, now: jnp.where(_columns(release, rows), now, rows), pulled, learned.slots.total)
    learned = learned._replace(inner=beside) if local else learned._replace(copies=beside)
    released = released._replace(order=PullOrder(at_once, singly, worker))
    return learned._replace(gradients=gradients, pulled=pulled), loss, released


def pull_order(active: Array, release: Array, *, lanes: bool) -> PullOrder:
    """How the workers in `release` [k] are taken."""
    together = ~anywhere(_some_do_not(active, release), lanes)
    first = first_of(release)
    return PullOrder(together, ~together & anywhere(first < release.shape[0], lanes), first)


def _worker_gradient(
    model: LearningProgram,
    data: TrainingData,
    inputs: EngineInputs,
    learned: Learned,
    released: Released,
    worker: Array,
) -> tuple[Array, Any]:
    """Loss and gradient of the mini-batch that one worker begins. Where workers take local steps or skip pulls, the gradient
    is in a pair with what else is kept of the worker."""
    clock = released.begun[worker]
    if inputs.local_steps.shape[0]:
        return _local_change(model, data, inputs, learned, worker, clock)
    parameters = learned.parameters
    rows, count = minibatch(model, data, inputs, worker, clock)
    form = _form(model, inputs, parameters)
    differentiated = _differentiated(model) if form is None else form.begun
    if inputs.copies:
        own = jax.tree.map(lambda p, c: jnp.where(released.pulls[worker], p, _row(worker, c)), parameters, learned.copies)
        loss, found = differentiated(own, rows, count)
        return loss, (found, own)
    made: tuple[Array, Any] = differentiated(parameters, rows, count)
    return made


def _form(model: LearningProgram, inputs: EngineInputs, parameters: Any) -> KeptForm | None:
    """How gradients are computed and kept in parts; None: as a whole, as what local steps have changed is."""
    if not model.rows or inputs.local_steps.shape[0]:
        return None
    leaves, tree = jax.tree.flatten(parameters)
    return _cached_form(model, tree, _shapes(leaves))


@cache
def _cached_form(model: LearningProgram, tree: Any, leaves: _Shapes) -> KeptForm:
    parameters, rows = jax.tree.unflatten(tree, list(map(_shaped, leaves))), tuple(map(_shaped, model.rows))
    return kept_form(_differentiated(model), parameters, rows, _shaped(((), "int32")))


def _shapes(leaves: list[Any]) -> _Shapes:
    return tuple((np.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)


def _shaped(array: tuple[tuple[int, ...], str]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(*array)  # type: ignore[no-untyped-call]


def _differentiated(model: LearningProgram) -> Callable[..., tuple[Array, Any]]:
    """The function of (parameters, rows, count) that returns the mean loss and its gradient."""
    return jax.value_and_grad(partial(mean_loss, model))


def flops(model: LearningProgram, data: TrainingData, parameters: Any) -> float:
    """Floating-point operations of the gradient of one mini-batch, what is repeated in it counted once; inf: XLA cannot
    tell."""
    leaves, tree = jax.tree.flatten(parameters)
    rows = batch_shapes(data.train, model.batch)
    return _cached_flops(model, tree, _shapes(leaves), rows)


@cache
def _cached_flops(model: LearningProgram, tree: Any, leaves: _Shapes, rows: _Shapes) -> float:
    parameters = jax.tree.unflatten(tree, list(map(_shaped, leaves)))
    lowered = jax.jit(_differentiated(model)).lower(parameters, tuple(map(_shaped, rows)), _shaped(((), "int32")))
    found: float = (lowered.cost_analysis() or {}).get("flops", math.inf)
    return found


def pull_together(model: LearningProgram | None, active: ArrayLike, release: ArrayLike) -> bool:
    """Whether `pull` computes the gradients of the workers in `release` [k] as one batch: it does if these are all workers,
    and two or more. Rows of embedding tables are pulled worker by worker."""
    return model is not None and model.embedding is None and not _some_do_not(np.asarray(active), np.asarray(release))


def _some_do_not(active: Any, release: Any) -> Any:
    return (release != active).any() | (release.sum() < 2)


def _pull_rows(
    model: LearningProgram,
    embedding: Embedding,
    data: TrainingData,
    inputs: EngineInputs,
    learned: Learned,
    loss: Array,
    released: Released,
    *,
    lanes: bool,
) -> tuple[Learned, Array]:
    """`pull` of the rows that the mini-batches look up, worker by worker: each touches other rows."""
    clocks = released.begun

    def one(carry: tuple[Array, Array, sparse.SparseGradient, sparse.Touched]) -> Any:
        left, losses, kept, touched = carry
        worker = jnp.argmax(left).astype(jnp.int32)
        batch, count = minibatch(model, data, inputs, worker, clocks[worker])
        clock = clocks[worker].astype(jnp.int32)
        # A lane without workers left waits for the others: its rows, and its copies, are out of range.
        at = jnp.where(left[worker], worker, left.shape[0]) if lanes else worker
        looked_up, is_copy, caches = sparse.look_up(
            inputs, touched.caches, learned.parameters, batch[0], batch[-1], at, clock
        )
        touched = touched._replace(caches=caches)
        value, made = sparse.gradient_of(
            embedding, looked_up, learned.parameters, batch, count, lambda each: _mean_of_first(model, each, count)
        )
        kept = _with_row(kept, made, at, lanes=lanes)
        done = (jnp.arange(left.shape[0]) == worker) & left[worker]
        numbers = _numbers(model, inputs, worker, clocks[worker])
        # Over the end of its data a worker goes on from its beginning, where nothing comes before.
        since = jnp.where(numbers >= numbers[0], numbers[0], inputs.shard_start[worker])
        touched = sparse.touch(inputs, embedding, touched, made.keys, batch[-2] < since[:, None], is_copy, at)
        return left & ~done, jnp.where(done, value.astype(jnp.float64), losses), kept, touched

    carry = (released.workers, loss, learned.gradients, learned.touched)
    found = jax.lax.while_loop(lambda c: anywhere(jnp.any(c[0]), lanes), one, carry)
    return learned._replace(gradients=found[2], touched=found[3]), found[1]


def _with_row(kept: Any, made: Any, worker: Array, *, lanes: bool) -> Any:
    """`kept` [k, ...] with what `worker` has made; in lanes, a worker out of range changes nothing."""
    if lanes:
        return jax.tree.map(lambda rows, new: rows.at[worker].set(new, mode="drop"), kept, made)
    # Not `at[].set`, which also reads the old row, to keep it where an index is out of range.
    return jax.tree.map(lambda rows, new: jax.lax.dynamic_update_index_in_dim(rows, new, worker, 0), kept, made)


def _local_change(
    model: LearningProgram, data: TrainingData, inputs: EngineInputs, learned: Learned, worker: Array, clock: Array
) -> tuple[Array, Any]:
    """What `worker` changes in its local steps, from mini-batch `clock` on, which the servers take as a gradient (DiLoCo:
    Douillard et al. 2023, Algorithm 1).

    Returns their mean loss, and (first parameters minus last, the state of the worker's optimizer).
    """
    optimizer, steps = _inner(model, inputs), inputs.local_steps[worker]

    def step(number: Array, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
        own, state, losses = carry
        rows, count = minibatch(model, data, inputs, worker, clock + number)
        loss, made = jax.value_and_grad(partial(mean_loss, model))(own, rows, count)
        updates, state = optimizer.update(made, state, own)
        return optax.apply_updates(own, updates), state, losses + loss

    state = jax.tree.map(partial(_row, worker), learned.inner)
    start = (learned.parameters, state, jnp.zeros((), jnp.float32))
    own, state, losses = jax.lax.fori_loop(0, steps, step, start)
    return losses / steps, (jax.tree.map(jnp.subtract, learned.parameters, own), state)


def _weight(inputs: EngineInputs, worker: Array) -> Array:
    """Weight of one worker's push in a mean over workers: all samples count the same, those of local steps too. 1 where all
    have as many. A number of local steps that has just changed counts at once."""
    workers = inputs.active | (jnp.arange(inputs.active.shape[0]) == worker)  # a worker that is about to stop still counts
    samples = inputs.samples * inputs.local_steps if inputs.local_steps.shape[0] else inputs.samples
    whole = jnp.sum(jnp.where(workers, samples, 0))
    return (samples[worker] * jnp.sum(workers) / whole).astype(jnp.float32)


def _row(worker: Array, rows: Array) -> Array:
    row: Array = jax.lax.dynamic_index_in_dim(rows, worker, keepdims=False)
    return row


def _columns(flags: Array, rows: Array) -> Array:
    """One flag per row, in the rank of `rows`."""
    return flags.reshape(-1, *(1,) * (rows.ndim - 1))


def minibatch(
    model: LearningProgram, data: TrainingData, inputs: EngineInputs, worker: Array, clock: Array
) -> tuple[Any, Array]:
    """The rows of one mini-batch and how many of them count: the worker's part of the data, in order, again and again."""
    at = _numbers(model, inputs, worker, clock)
    return jax.tree.map(lambda column: jnp.take(column, at, axis=0, mode="clip"), data.train), inputs.samples[worker]


def _numbers(model: LearningProgram, inputs: EngineInputs, worker: Array, clock: Array) -> Array:
    """The samples of a mini-batch, by their place in the training data, [batch]."""
    at = (clock * inputs.samples[worker] + jnp.arange(model.batch, dtype=jnp.int32)) % inputs.shard_length[worker]
    return at + inputs.shard_start[worker]


def mean_loss(model: LearningProgram, parameters: Any, rows: Any, count: Array) -> Array:
    """Mean loss over the first `count` rows."""
    return _mean_of_first(model, model.losses(parameters, rows), count)


def _mean_of_first(model: LearningProgram, losses: Array, count: Array) -> Array:
    weights = (jnp.arange(model.batch) < count).astype(losses.dtype)
    return jnp.sum(losses * weights) / jnp.maximum(count, 1).astype(losses.dtype)


def evaluate(model: LearningProgram, data: TrainingData, parameters: Any) -> tuple[Array, Array]:
    """Mean loss and accuracy on the whole validation set."""
    loss = jnp.mean(model.losses(parameters, data.valid).astype(jnp.float64))
    return loss, jnp.mean(model.correct(parameters, data.valid).astype(jnp.float64))


def gradient_squares(
    model: LearningProgram, data: TrainingData, inputs: EngineInputs, parameters: Any, clocks: Array, *, batches: int
) -> tuple[Array, Array]:
    """Squared norms of the gradients at `parameters` of `batches` mini-batches of every worker, from `clocks` [k] on: of the
    mean gradient, and the mean of those of the single ones."""
    workers = jnp.arange(inputs.active.shape[0], dtype=jnp.int32)
    weights = inputs.active / (batches * jnp.sum(inputs.active))

    def squared(gradient: Any) -> Array:
        return sum((jnp.sum(jnp.square(g.astype(jnp.float64))) for g in jax.tree.leaves(gradient)), jnp.zeros(()))

    def one(worker: Array, number: Array) -> Any:
        rows, count = minibatch(model, data, inputs, worker, clocks[worker] + number)
        return jax.grad(partial(mean_loss, model))(parameters, rows, count)

    def step(number: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        mean, single = carry
        made = jax.vmap(one, in_axes=(0, None))(workers, number)
        mean = jax.tree.map(lambda m, rows: m + jnp.tensordot(weights, rows.astype(jnp.float64), 1), mean, made)
        return mean, single + jnp.dot(weights, jax.vmap(squared)(made))

    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float64), parameters)
    mean, single = jax.lax.fori_loop(0, batches, step, (nothing, jnp.zeros(())))
    return squared(mean), single


def _optimizer(model: LearningProgram, inputs: EngineInputs) -> optax.GradientTransformationExtraArgs:
    """The servers' optimizer: for a gradient, or for what local steps have changed."""
    if inputs.local_steps.shape[0]:
        return optimizer(OUTER, inputs.outer_rate[0], inputs.outer_momentum[0])
    return _inner(model, inputs)


def _inner(model: LearningProgram, inputs: EngineInputs) -> optax.GradientTransformationExtraArgs:
    return optimizer(model.optimizer, inputs.learning_rate, inputs.momentum)
