"""Models in a file of the user's: their functions are called, checked, and made into those of a `Proxy`.

The user's function is called with the shape of one sample, the number of classes (0: the data have none) and the options of
the scenario. It returns

    init, apply            apply(parameters, x [n, *shape]) -> scores [n, classes]; for text [n, length, classes]
    init, losses, correct  of (parameters, batch), each [n]; a batch is the arrays of the data, with x as above

where init(key) -> parameters, a pytree of float32 arrays. With two functions, the loss is the cross-entropy of the scores.

Programs of JAX have numbers of 32 bits unless they say otherwise; the engine's have 64, because of its clocks. So these
functions are traced under 32 bits, also within the engine's programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from simulators.programs.own_code import OwnCode, read
from simulators.programs.stored_programs import StoredProgram
from simulators.workloads.datasets import Arrays, Dataset
from simulators.workloads.model_tables import OwnModel
from tuners.near_names import did_you_mean

__all__ = ["functions"]

_Batch: TypeAlias = tuple[Array, ...]
_Init: TypeAlias = Callable[[int], Any]
_PerSample: TypeAlias = Callable[[Any, _Batch], Array]

# The engine sets this, too: with another setting, its processes would compile these programs again.
jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

_TRIED = 4  # samples, with which functions are called
_LONGEST = 300  # characters of an error's message that are told


def functions(model: OwnModel, dataset: Dataset) -> tuple[_Init, _PerSample, _PerSample]:
    """`init`, `losses` and `correct` of a `Proxy`. Raises ValueError, which names file and function, where the file cannot
    be run, or where what the function returns cannot be trained on the data."""
    check = _Check(model, read(Path(model.file)), dataset)
    made = check.called()
    parameters = check.parameters(made[0])
    check.results(made, parameters)
    init, losses, correct = _proxy_functions(made, dataset)
    check.same_again(made, check.called(), parameters)
    check.numbers(init, losses)
    return init, losses, correct


def _proxy_functions(made: tuple[Any, ...], dataset: Dataset) -> tuple[_Init, _PerSample, _PerSample]:
    init = partial(_first_parameters, _in_32_bits(made[0]))
    if len(made) == 2:
        return init, *_classifier(made[1], dataset.shape)
    shape = dataset.shape if dataset.classes else None
    return init, _of_batch(made[1], shape), _of_batch(made[2], shape)


# ------------------------------------------------------------------------------------------------- the functions of a proxy


def _in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        with _32_bits():
            return function(*arguments)

    return called


def _32_bits() -> AbstractContextManager[None]:
    # Before JAX 0.8 it was experimental.
    place: Any = jax if hasattr(jax, "enable_x64") else import_module("jax.experimental")
    made: AbstractContextManager[None] = place.enable_x64(False)
    return made


def _first_parameters(init: Callable[[Array], Any], seed: int) -> Any:
    return jax.tree.map(np.asarray, _initialised(init, _words(seed)))


def _words(seed: int) -> Any:
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


@StoredProgram
def _initialised(init: Callable[[Array], Any], words: Array) -> Any:
    return init(_key(words))


def _key(words: Array) -> Array:
    made: Array = jax.random.wrap_key_data(words, impl="threefry2x32")
    return made


def _shaped(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.reshape(x, (x.shape[0], *shape))


def _classifier(apply: Callable[[Any, Array], Array], shape: tuple[int, ...]) -> tuple[_PerSample, _PerSample]:
    """Cross-entropy, and the share that is right, of each sample: of its class, or of the mean of its characters."""

    def scores(parameters: Any, x: Array) -> Array:
        return jnp.asarray(apply(parameters, _shaped(x, shape)), jnp.float32)

    def losses(parameters: Any, batch: _Batch) -> Array:
        made = scores(parameters, batch[0])
        # The gradient of a product with a one-hot matrix is another product; that of indexing is a slow scatter.
        right = jnp.sum(made * jax.nn.one_hot(batch[1], made.shape[-1], dtype=made.dtype), axis=-1)
        return _mean_of_each(jax.nn.logsumexp(made, axis=-1) - right)

    def correct(parameters: Any, batch: _Batch) -> Array:
        return _mean_of_each((jnp.argmax(scores(parameters, batch[0]), axis=-1) == batch[1]).astype(jnp.float32))

    return _in_32_bits(losses), _in_32_bits(correct)


def _mean_of_each(values: Array) -> Array:
    return values.reshape(values.shape[0], -1).mean(axis=1)


def _of_batch(function: _PerSample, shape: tuple[int, ...] | None) -> _PerSample:
    """The user's function of a batch, whose first array has samples of this shape; None: it is as it is."""

    def called(parameters: Any, batch: _Batch) -> Array:
        x = batch[0] if shape is None else _shaped(batch[0], shape)
        return jnp.asarray(function(parameters, (x, *batch[1:])), jnp.float32)

    return _in_32_bits(called)


# ---------------------------------------------------------------------------------------------------------------- checking


class _Check:
    """Checks of what the user's function makes of the data. All methods raise ValueError, a sentence for the user."""

    def __init__(self, model: OwnModel, code: OwnCode, dataset: Dataset) -> None:
        self._model, self._code, self._dataset = model, code, dataset
        if dataset.tables:
            raise self._refusal("the data are rows of embedding tables, which only a factorisation machine trains on")
        # As many samples as no other size of the data, so that their axis is told from any other.
        sizes = {dataset.classes, *dataset.shape, *(n for column in dataset.train for n in column.shape[1:])}
        count = next(n for n in range(_TRIED, _TRIED + len(sizes) + 1) if n not in sizes)
        self._batch = tuple(_abstract((count, *column.shape[1:]), column.dtype) for column in dataset.train)

    def called(self) -> tuple[Any, ...]:
        """What the user's function returns: two functions or three."""
        name, options = self._model.function, self._model.options
        with self._told("it failed"):
            module = self._code.module()
        function = getattr(module, name, None)
        if not callable(function):
            named = [key for key, value in vars(module).items() if isinstance(value, FunctionType)]
            raise self._refusal(f"the file has no function {name}.{did_you_mean(get_close_matches(name, named))}")
        given = tuple(self._dataset.shape), self._dataset.classes
        words = ", ".join([*map(repr, given), *(f"{key}={value!r}" for key, value in options.items())])
        try:
            signature(function).bind(*given, **options)
        except TypeError as error:
            raise self._refusal(f"{name}({words}) cannot be called: {error}") from None
        except ValueError:  # a callable without a signature
            pass
        with self._told(f"{name}({words}) failed"), _32_bits():
            made = function(*given, **options)
        if not (isinstance(made, tuple | list) and len(made) in (2, 3) and all(map(callable, made))):
            raise self._refusal(
                f"{name} returned {_kind(made)}: return two functions, init, apply, or three, init, losses, correct"
            )
        if len(made) == 2 and not self._dataset.classes:
            raise self._refusal("the data have no classes: return init, losses, correct in place of init, apply")
        return tuple(made)

    def parameters(self, init: Callable[[Array], Any]) -> Any:
        """Shapes of the parameters."""
        with self._told("init(key) failed"):
            made = jax.eval_shape(_start_of(init), _words(0))
        leaves = jax.tree_util.tree_leaves_with_path(made)
        if not leaves:
            raise self._refusal("init returned no parameters")
        for path, leaf in leaves:
            if leaf.dtype != jnp.float32:
                where = jax.tree_util.keystr(path) or "all"
                raise self._refusal(f"init returned parameters {where} of {leaf.dtype}: they have to be float32")
        return made

    def results(self, made: tuple[Any, ...], parameters: Any) -> None:
        """Check shapes and types of what the functions return for a batch."""
        x, *rest = self._batch
        if self._dataset.classes:
            x = _abstract((x.shape[0], *self._dataset.shape), x.dtype)
        if len(made) == 2:
            self._check("apply", made[1], (parameters, x), (*rest[0].shape, self._dataset.classes))
        else:
            self._check("losses", made[1], (parameters, (x, *rest)), x.shape[:1])
            self._check("correct", made[2], (parameters, (x, *rest)), x.shape[:1], "biuf")

    def _check(
        self, name: str, function: Callable[..., Any], given: Any, expected: tuple[int, ...], kinds: str = "f"
    ) -> None:
        with self._told(f"{name} failed"):
            found = jax.eval_shape(_in_32_bits(function), *given)
        shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
        if shape is None or dtype is None:
            raise self._refusal(f"{name} returned {_kind(found)}: return one array of shape {expected}")
        if shape != expected:
            raise self._refusal(f"{name} returned shape {shape} for {expected[0]} samples: expected {expected}")
        if not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in kinds):
            raise self._refusal(f"{name} returned {dtype}: expected float32")

    def same_again(self, made: tuple[Any, ...], again: tuple[Any, ...], parameters: Any) -> None:
        """Check that the functions have gradients, and that a second call of the user's function makes the same ones."""
        first, second = (self._programs(each, parameters) for each in (made, again))
        for name, one, other in zip(("init", "the loss", "correct"), first, second, strict=True):
            if one != other:
                raise self._refusal(
                    f"{name} is another function when {self._model.function} is called again: draw random numbers from "
                    "the key that init gets, and nowhere else"
                )

    def _programs(self, made: tuple[Any, ...], parameters: Any) -> tuple[str, ...]:
        """The functions as JAX compiles them, constants included; the loss with its gradient, of two batches as one."""
        _, losses, correct = _proxy_functions(made, self._dataset)
        gradient = jax.vmap(jax.value_and_grad(lambda p, batch: losses(p, batch).mean()), in_axes=(None, 0))
        both = tuple(_abstract((2, *column.shape), column.dtype) for column in self._batch)
        with self._told("its loss has no gradient"):
            lowered = jax.jit(gradient).lower(parameters, both)
        others = jax.jit(_start_of(made[0])).lower(_words(0)), jax.jit(correct).lower(parameters, self._batch)
        return others[0].as_text(), lowered.as_text(), others[1].as_text()

    def numbers(self, init: _Init, losses: _PerSample) -> None:
        """Check that first parameters and losses are finite, and that a sample's loss does not depend on the others."""
        with self._told("init(key) failed"):
            parameters = init(0)
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
            if not np.isfinite(leaf).all():
                raise self._refusal(f"init returned parameters{jax.tree_util.keystr(path)} that are not finite")
        samples, at = len(self._dataset.train[0]), np.arange(_TRIED)
        others = np.where(at, at + _TRIED, 0)  # the first sample is in both batches
        near = jax.tree.map(_near, parameters)  # where first weights of 0 hide nothing
        with self._told("the loss failed"):
            first, one, other = (
                np.asarray(_losses_of(losses, of, self._rows(rows % samples)))
                for of, rows in ((parameters, at), (near, at), (near, others))
            )
        if not np.isfinite(first).all():
            raise self._refusal("the loss of the first parameters is not finite")
        if np.isfinite([one[0], other[0]]).all() and not np.isclose(one[0], other[0], rtol=1e-3, atol=1e-5):
            raise self._refusal(
                "the loss of a sample depends on the other samples of its mini-batch, as batch normalisation makes it: "
                "normalise each sample by itself"
            )

    def _rows(self, at: Any) -> Arrays:
        return tuple(column[at] for column in self._dataset.train)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Say an error of the user's code in a sentence, with its line."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a program that runs as it is imported may end, too
            said = " ".join(str(error).strip().split("\n\n")[0].split()).rstrip(".")
            said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
            line = self._code.line(error)
            where = f" ({line})" if line else ""
            raise self._refusal(f"{what}: {type(error).__name__}{': ' if said else ''}{said}{where}") from error

    def _refusal(self, what: str) -> ValueError:
        what += "" if what.endswith(("?", ".")) else "."
        return ValueError(f"Cannot train the model {self._model.function} of {self._model.file}: {what}")


def _abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _start_of(init: Callable[[Array], Any]) -> Callable[[Array], Any]:
    return lambda words: _in_32_bits(init)(_key(words))


def _kind(made: Any) -> str:
    kind = type(made).__name__
    return f"a {kind} of {len(made)}" if isinstance(made, tuple | list) else f"a {kind}"


def _near(parameters: Any) -> Any:
    return parameters + np.float32(0.01) * np.cos(np.arange(parameters.size, dtype=np.float32)).reshape(parameters.shape)


@StoredProgram
def _losses_of(losses: _PerSample, parameters: Any, batch: _Batch) -> Array:
    return losses(parameters, batch)
