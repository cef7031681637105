"""What XLA is asked to compile as one function: by default it dispatches every small operation by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from simulators.engine import learning
from simulators.engine.inputs import EngineInputs
from simulators.engine.job_state import Program, State
from simulators.engine.learning import Learned, TrainingData
from simulators.engine.links.network import Proportions
from tuners.actions import Push

__all__ = ["as_one", "decides_apart", "gradients_as_one", "large_as_one", "marked", "told_xla"]

_WITHOUT_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": ""}
_IN_ONE_FUNCTION = _WITHOUT_LIBRARY | {"xla_cpu_use_fusion_emitters": False}
"""For XLA: products of matrices and large sums without calls of its library, and kernels without MLIR. A function with
gradients in it can have neither."""

_MANY = 144  # nodes; from 150 to 230 of them on, by discipline, XLA takes the loop for too large to do so unasked


def told_xla(program: Program, data: TrainingData, inputs: EngineInputs, state: State, *_: Any) -> dict[str, Any]:
    """What XLA is told for this program alone, so that it can compile as one function what it is asked to."""
    if gradients_as_one(program, data, inputs, state.learned):
        return _IN_ONE_FUNCTION
    # XLA calls its library for sums of some 1,100 numbers or more. The plainer form is told the same, for the same bytes.
    return _WITHOUT_LIBRARY if large_as_one(program._replace(dispatched=False), inputs) else {}


def large_as_one(program: Program, inputs: EngineInputs) -> bool:
    """XLA is asked to compile as one function what has no gradient in it: the whole loop of a timing-only job, or the events
    of a step.

    By itself it does so up to some bytes (see `simulators.__init__`), because products of matrices are slower there. Asked,
    a push of 240 workers takes half of the time, one of 2,048 a third.
    """
    if program.overlapping:
        # The matrices of `network.maxmin` are products, too; connections are divided in loops of their own.
        many = isinstance(inputs.usage, Proportions) and not inputs.connections
    else:
        many = inputs.active.shape[0] >= _MANY
    # A policy that probes decides by a network, whose products of matrices no such function can have.
    never = program.lanes or program.probes or program.dispatched
    return many and not never and jax.default_backend() == "cpu"


_SMALL_FLOPS = 2**18
"""Of the gradient of a mini-batch, up to which it is compiled into one function with the events of a step. A push of
logistic regression (64 to 10, mini-batches of 16: 43,000) takes half of the time so, one of a perceptron (64-32-10: 166,000)
three quarters. The gain ends at some 330,000, since the code of such a function is that of plain loops; at 1.3 million a
push takes nine times as long."""


def gradients_as_one(program: Program, data: TrainingData, inputs: EngineInputs, learned: Learned | None) -> bool:
    """XLA is asked to compile as one function a whole step but for its validation."""
    if program.model is None or learned is None or program.model.embedding is not None:
        return False
    never = program.lanes or program.probes or program.dispatched
    many = inputs.active.shape[0] >= _MANY and not large_as_one(program, inputs)
    if never or many or jax.default_backend() != "cpu":
        return False
    return learning.flops(program.model, data, learned.parameters) <= _SMALL_FLOPS


def decides_apart(program: Program, policy: Any, push: Push) -> bool:
    """The policy's decision is no part of one function with the events: it learns, and products of matrices as large as its
    take three times as long there."""
    if program.lanes or jax.default_backend() != "cpu":
        return False
    leaves, tree = jax.tree.flatten((policy, push))
    shapes = tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
    return _flops_of_decision(program.decide, tree, shapes) > _SMALL_FLOPS


@cache
def _flops_of_decision(decide: Callable[..., Any], tree: Any, leaves: tuple[tuple[tuple[int, ...], str], ...]) -> float:
    shaped = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]  # type: ignore[no-untyped-call]
    policy, push = jax.tree.unflatten(tree, shaped)
    found: float = (jax.jit(decide).lower(policy, push).cost_analysis() or {}).get("flops", 0.0)
    return found


def marked(loop: Callable[[Any], Any], begun: Any) -> Any:
    """`loop(begun)`, with the mark on its call that XLA itself gives to loops that it takes for small."""
    mark = {"xla_cpu_small_call": "true", "inlineable": "false"}
    return set_xla_metadata(jax.jit(loop)(begun), **mark)  # type: ignore[no-untyped-call]


def as_one(program: Program, part: Callable[..., Any], *carry: Any, asked: bool) -> Any:
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
    return (marked(once, begun) if asked else once(begun))[1:]
