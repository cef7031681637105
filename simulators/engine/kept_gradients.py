"""What is kept of a gradient between a worker's pull and its push: factors in place of products.

The gradient of a dense layer's weights is a product of matrices, [inputs, batch] times [batch, outputs]. Where the batch is
small, the factors are much smaller than their product. They are kept, and the push multiplies them. These are the same
operations at another moment, so that results have the same bytes; but for each worker fewer numbers are kept, written and
read. What is a product is found in the program that computes the gradient, so that models need not say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

__all__ = ["KeptForm", "kept_form"]

_REARRANGES = ("transpose", "reshape", "convert_element_type")


class KeptForm(NamedTuple):
    """A function that computes a loss and a gradient, in two parts, and the shapes of what is kept between them."""

    begun: Callable[..., tuple[Any, tuple[Any, ...]]]  # of the same arguments: (loss, what is kept)
    finished: Callable[[tuple[Any, ...]], Any]  # of what is kept: the gradient
    kept: tuple[Any, ...]  # with `shape` and `dtype`


def kept_form(function: Callable[..., tuple[Any, Any]], *arguments: Any) -> KeptForm:
    """`function` of `arguments`, which may be shapes only, returns (loss, gradient); the same in two parts."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    tree, steps = jax.tree.structure(shapes[1]), program.jaxpr
    loss, *gradient = steps.outvars
    made_by: dict[Any, Any] = {variable: step for step in steps.eqns for variable in step.outvars}
    late = {id(step) for variable in gradient for step in _product(made_by, variable)}
    last = [step for step in steps.eqns if id(step) in late]
    between = list(_needed(last, gradient))
    # Steps whose results nobody uses are left in: XLA removes them.
    first = ClosedJaxpr(steps.replace(outvars=[loss, *between]), program.consts)
    rest = ClosedJaxpr(steps.replace(constvars=[], invars=between, outvars=gradient, eqns=last), [])

    def begun(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        loss, *kept = jaxpr_as_fun(first)(*jax.tree.leaves(arguments))
        return loss, tuple(kept)

    def finished(kept: tuple[Any, ...]) -> Any:
        return jax.tree.unflatten(tree, jaxpr_as_fun(rest)(*kept))

    return KeptForm(begun, finished, tuple(variable.aval for variable in between))


def _product(made_by: dict[Any, Any], variable: Any) -> list[JaxprEqn]:
    """The steps from two factors to `variable`, if that is their product or that rearranged, and larger than they are."""
    steps: list[Any] = []
    # A number that does not depend on the parameters is no variable: no step makes it.
    while isinstance(variable, Var) and (step := made_by.get(variable)) is not None:
        steps.append(step)
        if step.primitive.name not in _REARRANGES:
            break
        variable = step.invars[0]
    if not steps or steps[-1].primitive.name != "dot_general":
        return []
    smaller = sum(factor.aval.size for factor in steps[-1].invars) < variable.aval.size
    return steps if smaller else []


def _needed(steps: Iterable[JaxprEqn], results: Iterable[Any]) -> dict[Var, None]:
    """What `steps` and `results` take that no step of `steps` makes; as keys, in order."""
    made = {variable for step in steps for variable in step.outvars}
    taken = [variable for step in steps for variable in step.invars] + list(results)
    return {variable: None for variable in taken if isinstance(variable, Var) and variable not in made}
