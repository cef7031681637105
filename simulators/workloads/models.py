"""The models that workloads train, as pure JAX functions: linear, perceptron, convolutional, recurrent, factorisation,
transformer, and factorisation machines on embedding tables.

Parameters are float32 pytrees, although simulated time is float64. `_functions` is cached by model and shape, because the
engine compiles once per function object.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from simulators.programs.stored_programs import StoredProgram
from simulators.workloads.datasets import Dataset
from simulators.workloads.model_tables import (
    Cnn,
    Factorisation,
    FactorisationMachine,
    Logistic,
    Lstm,
    Mlp,
    Model,
    OwnModel,
    ShippedModel,
    Svm,
    Transformer,
)
from simulators.workloads.workload import Embedding, Proxy

__all__ = ["make_proxy"]

_Batch: TypeAlias = tuple[Array, ...]
_Init: TypeAlias = Callable[[int], Any]
_PerSample: TypeAlias = Callable[[Any, _Batch], Array]


def make_proxy(model: Model, dataset: Dataset) -> Proxy:
    """The model together with its data. Raises ValueError where the two do not fit."""
    if isinstance(model, OwnModel):
        from simulators.workloads import own_models

        functions = own_models.functions(model, dataset)
        return Proxy(*functions, *jax.device_put((dataset.train, dataset.valid)))
    reads_text = dataset.train[-1].ndim == 2  # every character has a label
    if reads_text != isinstance(model, Transformer):
        advice = "give a transformer, or other data" if reads_text else "a transformer reads text; give another model"
        raise ValueError(f"Cannot train {type(model).__name__.lower()} on this data: {advice}.")
    train, valid = jax.device_put((dataset.train, dataset.valid))  # `jnp.asarray` would compile a program for each
    if dataset.tables:
        if not isinstance(model, FactorisationMachine):
            raise ValueError(
                f"Cannot train {type(model).__name__} on rows of embedding tables: give a factorisation machine."
            )
        functions, embedding = _factorisation_machine(model, dataset.tables)
        return Proxy(*functions, train, valid, embedding)
    return Proxy(*_functions(model, dataset.shape, dataset.classes), train, valid)


@cache
def _functions(model: ShippedModel, shape: tuple[int, ...], classes: int) -> tuple[_Init, _PerSample, _PerSample]:
    if isinstance(model, FactorisationMachine):
        raise ValueError("Cannot train a factorisation machine on data without embedding tables.")  # noqa: TRY004
    if isinstance(model, Factorisation):
        if classes:
            raise ValueError(f"Cannot factorise data of {classes} classes: give ratings, or another model.")
        return _factorisation(model, *shape)
    if not classes:
        raise ValueError("Cannot classify ratings: they have no classes; give a factorisation, or other data.")
    features = 1
    for n in shape:
        features *= n
    if isinstance(model, Logistic):
        return _linear(features, classes, model.l2, _cross_entropy)
    if isinstance(model, Svm):
        return _linear(features, classes, model.l2, _hinge)
    if isinstance(model, Mlp):
        return _perceptron(model, features, classes)
    if isinstance(model, Lstm):
        return _recurrent(model, shape, classes)
    if isinstance(model, Transformer):
        return _transformer(model, shape[0], classes)
    return _convolutional(model, shape, classes)


# ---------------------------------------------------------------------------------------------------------------- losses


def _cross_entropy(scores: Array, labels: Array) -> Array:
    """-log softmax(scores)[label], [n]."""
    return jax.nn.logsumexp(scores, axis=1) - jnp.sum(scores * _one_hot(scores, labels), axis=1)


def _hinge(scores: Array, labels: Array) -> Array:
    """Multi-class hinge of Crammer and Singer: max(0, 1 + the best wrong score - the right one), [n]."""
    right = _one_hot(scores, labels)
    wrong = jnp.max(scores - right * jnp.float32(1e30), axis=1)
    return jax.nn.relu(1.0 + wrong - jnp.sum(scores * right, axis=1))


def _one_hot(scores: Array, labels: Array) -> Array:
    # The gradient of a product with a one-hot matrix is another product; that of indexing is a slow scatter.
    return (jnp.arange(scores.shape[1], dtype=jnp.int32) == labels[:, None]).astype(scores.dtype)


def _classifier(
    scores: Callable[[Any, Array], Array], criterion: Callable[[Array, Array], Array]
) -> tuple[_PerSample, _PerSample]:
    def losses(parameters: Any, batch: _Batch) -> Array:
        return criterion(scores(parameters, batch[0]), batch[1])

    def correct(parameters: Any, batch: _Batch) -> Array:
        return (jnp.argmax(scores(parameters, batch[0]), axis=1) == batch[1]).astype(jnp.float32)

    return losses, correct


# ---------------------------------------------------------------------------------------------------------------- models


def _normal(seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal numbers, those of `jax.random.normal(jax.random.key(seed))` where JAX has 64-bit integers."""
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return np.asarray(_normal_of_key(shape, words))


@StoredProgram
def _normal_of_key(shape: tuple[int, ...], words: Array) -> Array:
    return jax.random.normal(jax.random.wrap_key_data(words, impl="threefry2x32"), shape, jnp.float32)


def _dense(seed: int, sizes: tuple[tuple[int, int], ...]) -> tuple[dict[str, NDArray[np.float32]], ...]:
    """Layers of (inputs, outputs) with He's initialisation: weights N(0, 2 / inputs), biases 0."""
    # One draw for all layers, and the rest by NumPy: JAX would compile each operation, and each draw takes it .3 s.
    drawn = _normal(seed, (sum(n * m for n, m in sizes),))
    layers, at = [], 0
    for n, m in sizes:
        weights = drawn[at : at + n * m].reshape(n, m) * np.float32((2.0 / n) ** 0.5)
        layers.append({"w": weights, "b": np.zeros(m, np.float32)})
        at += n * m
    return tuple(layers)


def _linear(
    features: int, classes: int, l2: float, criterion: Callable[[Array, Array], Array]
) -> tuple[_Init, _PerSample, _PerSample]:
    """Scores x w + b; weights start at 0. Each loss includes l2 / 2 |w|^2, so that the mean is the regularised objective."""

    def init(seed: int) -> Any:
        del seed  # the objective is convex, so the start needs no random draw
        return {"w": np.zeros((features, classes), np.float32), "b": np.zeros(classes, np.float32)}

    def scores(parameters: Any, x: Array) -> Array:
        made: Array = x @ parameters["w"] + parameters["b"]
        return made

    plain, correct = _classifier(scores, criterion)
    if not l2:
        return init, plain, correct

    def losses(parameters: Any, batch: _Batch) -> Array:
        penalty: Array = jnp.float32(l2 / 2) * jnp.sum(parameters["w"] ** 2)
        return plain(parameters, batch) + penalty

    return init, losses, correct


def _perceptron(model: Mlp, features: int, classes: int) -> tuple[_Init, _PerSample, _PerSample]:
    """Dense layers of sizes (features, *hidden, classes) with ReLU between them. No hidden layer: softmax regression."""
    sizes = (features, *model.hidden, classes)

    def init(seed: int) -> Any:
        return _dense(seed, tuple(pairwise(sizes)))

    return init, *_classifier(_layers, _cross_entropy)


def _layers(parameters: Any, x: Array) -> Array:
    for layer in parameters[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    scores: Array = x @ parameters[-1]["w"] + parameters[-1]["b"]
    return scores


def _convolutional(model: Cnn, shape: tuple[int, ...], classes: int) -> tuple[_Init, _PerSample, _PerSample]:
    """Two 3x3 convolutions of `width` and 2 `width` channels, each with ReLU and 2x2 max pooling, then dense layers."""
    if len(shape) != 3 or shape[0] % 4 or shape[1] % 4:
        raise ValueError(f"Cannot convolve samples of shape {shape}: expected images whose height and width divide by 4.")
    height, width, channels = shape
    flat = (height // 4) * (width // 4) * 2 * model.width
    sizes = (flat, *model.hidden, classes)

    def init(seed: int) -> Any:
        filters = ((9 * channels, model.width), (9 * model.width, 2 * model.width))
        layers = _dense(seed, (*filters, *pairwise(sizes)))
        return {"conv": layers[:2], "dense": layers[2:]}

    def scores(parameters: Any, x: Array) -> Array:
        x = x.reshape(-1, height, width, channels)
        for layer in parameters["conv"]:
            x = _pool(jax.nn.relu(_convolve(x, layer)))
        return _layers(parameters["dense"], x.reshape(x.shape[0], flat))

    return init, *_classifier(scores, _cross_entropy)


def _convolve(x: Array, layer: dict[str, Array]) -> Array:
    """A 3x3 convolution with zero padding, as one matrix product with the patches of the image."""
    # Measured inside a scan on CPU: 4 to 10 times as fast as lax.conv.
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(patches, axis=-1) @ layer["w"] + layer["b"]


def _pool(x: Array) -> Array:
    n, height, width, channels = x.shape
    return jnp.max(x.reshape(n, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def _recurrent(model: Lstm, shape: tuple[int, ...], classes: int) -> tuple[_Init, _PerSample, _PerSample]:
    """Row by row: c <- s(f + 1) c + s(i) tanh(g), h <- s(o) tanh(c), with i, f, g, o = [row, h] w + b and s the logistic
    function; scores from the last h. The 1 makes the cell keep its state at first (Gers et al. 2000)."""
    steps, inputs = shape[0], math.prod(shape[1:])
    sizes = ((inputs + model.width, 4 * model.width), (model.width, classes))

    def init(seed: int) -> Any:
        cell, out = _dense(seed, sizes)
        return {"cell": cell, "out": out}

    def scores(parameters: Any, x: Array) -> Array:
        cell, out = parameters["cell"], parameters["out"]
        rows = jnp.moveaxis(x.reshape(x.shape[0], steps, inputs), 1, 0)

        def read(state: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], None]:
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([row, h], axis=1) @ cell["w"] + cell["b"], 4, axis=1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        empty = jnp.zeros((x.shape[0], model.width), jnp.result_type(x, cell["w"]))
        (h, _), _ = jax.lax.scan(read, (empty, empty), rows)
        made: Array = h @ out["w"] + out["b"]
        return made

    return init, *_classifier(scores, _cross_entropy)


def _transformer(model: Transformer, length: int, characters: int) -> tuple[_Init, _PerSample, _PerSample]:
    """Decoder with learnt positions and normalisation before each part (GPT-2's order), without dropout:

        x <- embedding[c] + position;   x <- x + attention(norm(x));   x <- x + mlp(norm(x));   scores <- norm(x) w + b

    A sample's loss is the mean cross-entropy of its characters, in nats; "correct" is the share of them that is predicted.
    """
    width, heads = model.width, model.heads
    each = width // heads
    blocks = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    causal = jnp.tril(jnp.ones((length, length), bool))

    def init(seed: int) -> Any:
        rows = ((width, characters), (width, length))  # embedding and positions, drawn as the layers are
        drawn = _dense(seed, (*rows, *(blocks * model.layers), (width, characters)))
        small = [{"w": layer["w"] * np.float32(0.5), "b": layer["b"]} for layer in drawn[2:]]
        return {
            "embedding": drawn[0]["w"].T,
            "position": drawn[1]["w"].T,
            "blocks": tuple(tuple(small[i : i + 4]) for i in range(0, 4 * model.layers, 4)),
            "out": small[-1],
        }

    def attention(layers: tuple[dict[str, Array], ...], x: Array) -> Array:
        n = x.shape[0]
        made = (x @ layers[0]["w"] + layers[0]["b"]).reshape(n, length, 3, heads, each)
        query, key, value = (made[:, :, i] for i in range(3))
        near = jnp.einsum("nqhe,nkhe->nhqk", query, key) * jnp.float32(each**-0.5)
        weights = jax.nn.softmax(jnp.where(causal, near, jnp.float32(-1e30)), axis=-1)
        mixed = jnp.einsum("nhqk,nkhe->nqhe", weights, value).reshape(n, length, width)
        return mixed @ layers[1]["w"] + layers[1]["b"]

    def scores(parameters: Any, text: Array) -> Array:
        # The gradient of a product with a one-hot matrix is another product; that of indexing is a slow scatter.
        shown = jax.nn.one_hot(text, characters, dtype=parameters["embedding"].dtype)
        x = shown @ parameters["embedding"] + parameters["position"]
        for layers in parameters["blocks"]:
            x = x + attention(layers, _standardised(x))
            x = x + _layers(layers[2:], _standardised(x))
        made: Array = _standardised(x) @ parameters["out"]["w"] + parameters["out"]["b"]
        return made

    def losses(parameters: Any, batch: _Batch) -> Array:
        made = scores(parameters, batch[0]).reshape(-1, characters)
        return _cross_entropy(made, batch[1].reshape(-1)).reshape(-1, length).mean(axis=1)

    def correct(parameters: Any, batch: _Batch) -> Array:
        return (jnp.argmax(scores(parameters, batch[0]), axis=-1) == batch[1]).astype(jnp.float32).mean(axis=1)

    return init, losses, correct


def _standardised(x: Array) -> Array:
    """Layer normalisation without gain and bias, which the next layer has."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + jnp.float32(1e-5))


def _factorisation(model: Factorisation, users: int, items: int) -> tuple[_Init, _PerSample, _PerSample]:
    """rating = offset + u_user . v_item; squared error plus l2 (|u_user|^2 + |v_item|^2). There is no accuracy."""
    # Products of two entries then have a standard deviation of 1/4 / sqrt(rank): small, but away from the saddle at 0.
    scale = np.float32(0.5 * model.rank**-0.25)

    def init(seed: int) -> Any:
        drawn = scale * _normal(seed, (users + items, model.rank))
        return {"user": drawn[:users], "item": drawn[users:]}

    def losses(parameters: Any, batch: _Batch) -> Array:
        user, item, rating = batch
        u, v = parameters["user"][user], parameters["item"][item]
        error: Array = jnp.float32(model.offset) + jnp.sum(u * v, axis=1) - rating
        penalty: Array = jnp.float32(model.l2) * jnp.sum(u**2 + v**2, axis=1)
        return error**2 + penalty

    def correct(parameters: Any, batch: _Batch) -> Array:
        del parameters
        return jnp.full(batch[0].shape[0], jnp.nan, jnp.float32)

    return init, losses, correct


@cache
def _factorisation_machine(
    model: FactorisationMachine, tables: tuple[int, ...]
) -> tuple[tuple[_Init, _PerSample, _PerSample], Embedding]:
    """Log odds of a click: bias + sum_i w_i + sum_{i<j} v_i . v_j over the rows of a sample (Rendle 2010, Eq. 1, with the
    sum over pairs as in its Lemma 3.1). A row of the tables is (w, v); weights start at 0, vectors at N(0, 0.1)."""
    rows = sum(tables)

    def init(seed: int) -> Any:
        drawn = np.float32(0.1) * _normal(seed, (rows, 1 + model.rank))
        drawn[:, 0] = 0.0
        return {"rows": drawn, "bias": np.zeros((), np.float32)}

    def scores(dense: Any, looked_up: Array) -> Array:
        weights, vectors = looked_up[:, :, 0], looked_up[:, :, 1:]
        together = jnp.sum(vectors, axis=1)
        pairs = jnp.float32(0.5) * (jnp.sum(together**2, axis=1) - jnp.sum(vectors**2, axis=(1, 2)))
        made: Array = dense["bias"] + jnp.sum(weights, axis=1) + pairs
        return made

    def losses_of(dense: Any, looked_up: Array, batch: _Batch) -> Array:
        sign = (2 * batch[1] - 1).astype(jnp.float32)
        return jax.nn.softplus(-sign * scores(dense, looked_up))

    def losses(parameters: Any, batch: _Batch) -> Array:
        return losses_of(parameters, parameters["rows"][batch[0]], batch)

    def correct(parameters: Any, batch: _Batch) -> Array:
        clicked = scores(parameters, parameters["rows"][batch[0]]) > 0
        return (clicked == (batch[1] == 1)).astype(jnp.float32)

    return (init, losses, correct), Embedding(rows, len(tables), losses_of)
