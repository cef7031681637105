"""What a policy decides about a push: in plain Python where that gives the same result, else by a program that JAX has
compiled.

A job has few nodes, and other processes use the core between two pushes. So code that is in no cache takes most of the time
of a decision: a compiled program took a third of the coordinator's time for a push, and five operations of NumPy a sixth.
Most policies only compare and count. So what JAX traces of such a policy is done step by step, with lists of Python's
numbers, which wrap around as those of JAX do. Not with floating-point numbers, which XLA may round in another way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.extend.core import Literal

from tuners.actions import Decision, Push

__all__ = ["Decided", "Decider"]

_MOST_NODES = 512
"""For more, a compiled program is faster."""

_Decide: TypeAlias = Callable[[Any, Push], tuple[Any, Decision]]


class Decided(msgspec.Struct, frozen=True):
    """The part of a `Decision` that live servers follow, and the policy's next state."""

    state: Any  # arrays
    accept: bool
    step: bool  # of meaning only where gradients are grouped
    release: Sequence[bool]  # [k]


class Decider:
    """Decides by a policy whose state is like `state`, for so many nodes."""

    def __init__(self, decide: _Decide, state: Any, nodes: int, *, groups: bool = True) -> None:
        """`groups`: gradients wait until the policy closes their group. Otherwise each is a step, whatever it says."""
        self._state, (self._arrays, self._structure) = state, jax.tree.flatten(state)
        self._decide, kinds = decide, tuple((leaf.shape, leaf.dtype) for leaf in self._arrays)
        self._values = list(map(_plain, self._arrays))
        self._steps = _steps_of(decide, self._structure, kinds, nodes, groups) if nodes <= _MOST_NODES else None

    @property
    def needs_jax(self) -> bool:
        """Whether it decides by a compiled program."""
        return self._steps is None

    def __call__(self, state: Any, push: Push) -> Decided:
        """The decision about a push, whose scalars and vectors are all NumPy's, or all plain. Nobody may write to the arrays
        of `state`."""
        if self._steps is None:
            return _by_jax(self._decide, state, push)
        if state is not self._state:
            self._state, self._arrays = state, jax.tree.leaves(state)
            self._values = list(map(_plain, self._arrays))
        values = self._values
        whole: Sequence[Any] = (push.worker, push.clocks, push.waiting, push.active, push.staleness)
        if not isinstance(push.clocks, list):
            whole = list(map(_plain, whole))
        *new, accept, step, release = self._steps.run((*values, *whole))
        if not all(map(is_, new, values)):
            arrays = [
                array if now is before else np.asarray(now, array.dtype)
                for array, before, now in zip(self._arrays, values, new, strict=True)
            ]
            self._state, self._arrays, self._values = jax.tree.unflatten(self._structure, arrays), arrays, new
        return Decided(self._state, bool(accept), bool(step), release)


def _plain(value: Any) -> Any:
    """A number or a list of numbers."""
    return value if isinstance(value, (int, list)) else np.asarray(value).tolist()


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
    accept, step, *release = np.asarray(packed).tolist()
    return Decided(state, accept, step, release)


# ---------------------------------------------------------------------------------------------------------- in plain Python


class _NeedsJax(Exception):
    """A policy calculates something that is not done in Python here."""


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
        self._results: _Pick = _picking([0])

    def give(self, results: list[int]) -> None:
        """Calculate these results from now on, and nothing else."""
        self._results, wanted = _picking(results), set(results)
        self._needed.clear()
        for function, arguments, result in reversed(self._steps):
            if result in wanted:
                wanted.update(arguments)
                self._needed.insert(0, (function, _picking(arguments), result))

    def run(self, given: Sequence[Any]) -> Sequence[Any]:
        """The results, from the values that are given."""
        values = [*given, *self._others]
        for function, pick, result in self._needed:
            values[result] = function(*pick(values))
        return self._results(values)

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
        self._others.append(np.asarray(value).tolist())
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


_COMPARED: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
}
_COUNTED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
}
"""Their results can be too large for their type."""

_REDUCED: dict[tuple[str, str], Callable[..., Any]] = {
    ("reduce_sum", "i"): sum,
    ("reduce_min", "i"): min,
    ("reduce_max", "i"): max,
    ("reduce_and", "b"): all,
    ("reduce_or", "b"): any,
}
"""By name and kind of number."""


def _function(equation: Any) -> Callable[..., Any]:
    """An operation that JAX has traced, on numbers and lists of numbers. Raises _NeedsJax if it is not one of those that
    give the same result."""
    name, made = equation.primitive.name, equation.outvars[0].aval
    kinds: list[Any] = [v.aval for v in equation.invars]
    if any(kind.dtype.kind not in "bi" or kind.ndim > 1 or 0 in kind.shape for kind in (*kinds, made)):
        raise _NeedsJax
    many = [kind.ndim == 1 for kind in kinds]
    if name in _COMPARED:
        return _each(_COMPARED[name], many)
    if name in _COUNTED and made.dtype.kind == "i":
        return _fitting(_each(_COUNTED[name], many), made)
    if name == "not":
        return _each(operator.not_ if made.dtype.kind == "b" else operator.invert, many)
    if (name, made.dtype.kind) in _REDUCED and many == [True] and made.ndim == 0:
        return _fitting(sum, made) if name == "reduce_sum" else _REDUCED[name, made.dtype.kind]
    if name == "select_n" and len(kinds) == 3 and kinds[0].dtype.kind == "b":
        return _chosen_each if many[0] else _chosen
    if name == "convert_element_type":
        return _fitting(_each(bool if made.dtype.kind == "b" else int, many), made)
    if name == "broadcast_in_dim" and many == [False]:
        return (lambda x, size=made.shape[0]: [x] * size) if made.ndim else lambda x: x
    if name == "iota" and made.ndim == 1 and made.dtype.kind == "i":
        return lambda size=made.shape[0]: list(range(size))
    raise _NeedsJax


def _each(function: Callable[..., Any], many: Sequence[bool]) -> Callable[..., Any]:
    """The function on each element of those arguments that are lists."""
    if not any(many):
        return function
    if all(many):
        return lambda *lists: list(map(function, *lists))
    if many[0]:
        return lambda x, y: list(map(function, x, repeat(y)))
    return lambda x, y: list(map(function, repeat(x), y))


def _fitting(function: Callable[..., Any], made: Any) -> Callable[..., Any]:
    """The function, whose result wraps around as a number, or numbers, of that type and shape."""
    if made.dtype.kind == "b":
        return function
    bound = 1 << 8 * made.dtype.itemsize - 1

    def fitted(x: int) -> int:
        wrapped: int = (x + bound) % (2 * bound) - bound
        return wrapped

    def one(*given: Any) -> int:
        found: int = function(*given)
        return found if -bound <= found < bound else fitted(found)

    def several(*given: Any) -> list[int]:
        found: list[int] = function(*given)
        return found if -bound <= min(found) and max(found) < bound else list(map(fitted, found))

    return several if made.ndim else one


def _chosen(which: bool, no: Any, yes: Any) -> Any:
    return yes if which else no


def _chosen_each(which: list[bool], no: list[Any], yes: list[Any]) -> list[Any]:
    return [y if w else n for w, n, y in zip(which, no, yes, strict=True)]


@cache
def _steps_of(decide: _Decide, structure: Any, leaves: tuple[Any, ...], nodes: int, groups: bool) -> _Steps | None:
    """`decide` for a state of these leaves (shape, type) in plain Python; None if it needs JAX.

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
