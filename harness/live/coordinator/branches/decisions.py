"""What a policy decides about a push: in NumPy where that gives the same bits, else by a program that JAX has compiled.

To call a compiled program took a third of the coordinator's time for a push: numbers have to be passed in and out, by code
that is in no cache. Most policies only compare and count. So what JAX traces of such a policy is done step by step in NumPy.
With floating-point numbers, XLA may round in another way than NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import is_, itemgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from numpy.typing import NDArray

from tuners.actions import Decision, Push

__all__ = ["Decided", "Decider"]

_Decide: TypeAlias = Callable[[Any, Push], tuple[Any, Decision]]


class Decided(NamedTuple):
    """The part of a `Decision` that live servers follow, and the policy's next state."""

    state: Any
    accept: bool
    step: bool  # of meaning only where gradients are grouped
    release: NDArray[np.bool_]  # [k]


class Decider:
    """Decides by a policy whose state is like `state`, for so many nodes."""

    def __init__(self, decide: _Decide, state: Any, nodes: int, *, groups: bool = True) -> None:
        """`groups`: gradients wait until the policy closes their group. Otherwise each is a step, whatever it says."""
        self._state, (self._leaves, self._structure) = state, jax.tree.flatten(state)
        self._decide, kinds = decide, tuple((leaf.shape, leaf.dtype) for leaf in self._leaves)
        self._steps = _steps_of(decide, self._structure, kinds, nodes, groups)

    @property
    def uses_numpy(self) -> bool:
        """Whether it decides without JAX."""
        return self._steps is not None

    def __call__(self, state: Any, push: Push) -> Decided:
        """The decision about a push. Nobody may write to the arrays of `push` and `state` later."""
        if self._steps is None:
            return _by_jax(self._decide, state, push)
        if state is not self._state:
            self._state, self._leaves = state, jax.tree.leaves(state)
        leaves = self._leaves
        *new, accept, step, release = self._steps.run(
            (*leaves, push.worker, push.clocks, push.waiting, push.active, push.staleness)
        )
        if not all(map(is_, new, leaves)):
            self._state, self._leaves = jax.tree.unflatten(self._structure, new), new
        return Decided(self._state, bool(accept), bool(step), release)


# ---------------------------------------------------------------------------------------------------------- compiled by JAX


@cache
def _compiled(decide: _Decide) -> Callable[..., tuple[Any, jax.Array]]:
    """`decide`, compiled, with few arguments and results.

    Takes the state and (seconds, loss, loss before, loss after, worker, staleness, clocks, waiting, active) float64
    [6 + 3 k]; returns the next state and (accept, step, release) bool [2 + k].
    """

    # Passing arguments and results takes most of the time of a call, so all are packed into one array. float64 has every
    # int32.
    def packed(state: Any, row: jax.Array) -> tuple[Any, jax.Array]:
        real, whole = row[:4], row[4:6].astype(jnp.int32)
        clocks, waiting, active = row[6:].reshape(3, -1)
        push = Push(
            whole[0], clocks.astype(jnp.int32), waiting != 0, active != 0, real[0], whole[1], real[1], real[2], real[3]
        )
        state, decision = decide(state, push)
        accept_and_step = jnp.stack([jnp.asarray(decision.accept), jnp.asarray(decision.step)])
        return state, jnp.concatenate([accept_and_step, decision.release])

    return jax.jit(packed)


def _by_jax(decide: _Decide, state: Any, push: Push) -> Decided:
    first = push.seconds, push.loss, push.loss_before, push.loss_after, push.worker, push.staleness
    row = np.concatenate([np.array(first, float), push.clocks, push.waiting, push.active])
    state, packed = _compiled(decide)(state, row)
    accept, step, *_ = found = np.asarray(packed)
    return Decided(state, bool(accept), bool(step), found[2:])


# ----------------------------------------------------------------------------------------------------------------- in NumPy


class _NeedsJax(Exception):
    """A policy calculates something that is not done in NumPy here."""


_Pick: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]


def _picking(numbers: Sequence[int]) -> _Pick:
    """Picks the values of these numbers, at least one, from all of them."""
    return itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))


class _Steps:
    """A calculation, step by step, on numbered values: those that are given, constants, and results of steps."""

    def __init__(self, given: int) -> None:
        self._given = given  # how many values are given; they have the first numbers
        self._others: list[Any] = []  # constants; None where a step writes
        self._steps: list[tuple[Callable[..., Any], list[int], int]] = []  # function, its arguments, its result
        self._needed: list[tuple[Callable[..., Any], _Pick, int]] = []  # those of them without which there is no result
        self._results: list[int] = []

    def give(self, results: list[int]) -> None:
        """Calculate these results from now on, and nothing else."""
        self._results, wanted = results, set(results)
        self._needed.clear()
        for function, arguments, result in reversed(self._steps):
            if result in wanted:
                wanted.update(arguments)
                self._needed.insert(0, (function, _picking(arguments), result))

    def run(self, given: Sequence[Any]) -> list[Any]:
        """The results, from the values that are given."""
        values = [*given, *self._others]
        for function, pick, result in self._needed:
            values[result] = function(*pick(values))
        return [values[r] for r in self._results]

    def add(self, traced: Any, arguments: Sequence[int]) -> list[int]:
        """Add the steps of a function that JAX has traced; returns its results. Raises _NeedsJax."""
        inside: dict[Any, int] = dict(zip(traced.jaxpr.invars, arguments, strict=True))
        inside.update(zip(traced.jaxpr.constvars, map(self._constant, traced.consts), strict=True))

        def number(of: Any) -> int:
            kind: Any = of.aval
            return self._constant(np.asarray(of.val, kind.dtype)) if isinstance(of, Literal) else inside[of]

        for equation in traced.jaxpr.eqns:
            given = [number(v) for v in equation.invars]
            if equation.primitive.name == "jit":
                results = self.add(equation.params["jaxpr"], given)
            else:
                results = [self._step(_function(equation), given)]
            inside.update(zip(equation.outvars, results, strict=True))
        return [number(v) for v in traced.jaxpr.outvars]

    def _constant(self, value: Any) -> int:
        self._others.append(np.asarray(value)[()])
        return self._given + len(self._others) - 1

    def _step(self, function: Callable[..., Any], arguments: list[int]) -> int:
        """The number of a step's result. What depends on constants alone is calculated now."""
        known = [None if a < self._given else self._others[a - self._given] for a in arguments]
        if all(value is not None for value in known):
            return self._constant(function(*known))
        self._others.append(None)
        result = self._given + len(self._others) - 1
        self._steps.append((function, arguments, result))
        return result


_SAME: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_REDUCED: dict[str, np.ufunc] = {
    "reduce_sum": np.add,
    "reduce_min": np.minimum,
    "reduce_max": np.maximum,
    "reduce_and": np.bitwise_and,
    "reduce_or": np.bitwise_or,
}


def _function(equation: Any) -> Callable[..., Any]:
    """An operation that JAX has traced, in NumPy. Raises _NeedsJax if it is not one of those that give the same bits."""
    name, given, made = equation.primitive.name, equation.params, equation.outvars[0].aval
    if any(v.aval.dtype.kind not in "bi" for v in (*equation.invars, *equation.outvars)):
        raise _NeedsJax
    if name in _SAME:
        return _SAME[name]
    if name in _REDUCED:
        return lambda x, of=_REDUCED[name], axes=given["axes"], kind=made.dtype: of.reduce(x, axes, kind)
    if name == "select_n" and len(equation.invars) == 3 and equation.invars[0].aval.dtype == bool:
        return lambda which, no, yes: np.where(which, yes, no)
    if name == "convert_element_type":
        return lambda x, kind=made.dtype: x.astype(kind)
    if name == "broadcast_in_dim" and not equation.invars[0].aval.shape:
        return lambda x, shape=made.shape: np.full(shape, x)
    if name == "iota" and len(made.shape) == 1:
        return lambda size=made.shape[0], kind=made.dtype: np.arange(size, dtype=kind)
    raise _NeedsJax


@cache
def _steps_of(decide: _Decide, structure: Any, leaves: tuple[Any, ...], nodes: int, groups: bool) -> _Steps | None:
    """`decide` for a state of these leaves (shape, type) in NumPy; None if it needs JAX.

    Takes the state's leaves, then worker, clocks, waiting, active, staleness; returns the next leaves, then accept, step,
    release.
    """
    state = jax.tree.unflatten(structure, [np.zeros(*leaf) for leaf in leaves])
    clocks, mask = np.zeros(nodes, np.int32), np.zeros(nodes, bool)
    whole, reals = np.int32(0), (0.0, 0.0, 0.0, 0.0)  # seconds, loss, loss before, loss after

    def flat(state: Any, worker: Any, clocks: Any, waiting: Any, active: Any, staleness: Any, reals: Any) -> list[Any]:
        after, decision = decide(state, Push(worker, clocks, waiting, active, reals[0], staleness, *reals[1:]))
        step = decision.step if groups else True
        return [*jax.tree.leaves(after), *map(jnp.asarray, (decision.accept, step, decision.release))]

    traced: Any = jax.make_jaxpr(flat)(state, whole, clocks, mask, mask, whole, reals)
    given = len(leaves) + 5
    # Times and losses have no numbers: a policy that uses them needs JAX.
    numbers = [*range(given), *[-1] * (len(traced.jaxpr.invars) - given)]
    steps = _Steps(given)
    try:
        results = steps.add(traced, numbers)
    except _NeedsJax:
        return None
    steps.give(results)
    # Otherwise the next state would not be like this one.
    same = [(v.aval.shape, v.aval.dtype) for v in traced.jaxpr.outvars[: len(leaves)]] == list(leaves)
    return steps if same and -1 not in results else None
