"""The `data` tables of `workloads.toml`, as structs. The functions that make the data are in `simulators.workloads.datasets`
and `simulators.workloads.files`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "BreastCancer",
    "Cifar10",
    "Classification",
    "Clicks",
    "Digits",
    "EmbeddedClicks",
    "GeneratedText",
    "Libsvm",
    "Mnist",
    "Mnist1d",
    "Mnist5k",
    "Npz",
    "Ratings",
    "Source",
]


class _DataTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Keywords that all tables share: a table says its kind, and an unknown key is an error."""


class _Fraction(_DataTable, frozen=True):
    """Data of which a job may take a part."""

    fraction: float = 1.0  # of the training data
    valid_samples: int = 0  # 0: all
    seed: int = 0


class Digits(_Fraction, frozen=True, tag="digits"):
    """`datasets.digits`, or a part of it."""


class BreastCancer(_DataTable, frozen=True, tag="breast-cancer"):
    """`datasets.breast_cancer`."""

    seed: int = 0


class Mnist(_Fraction, frozen=True, tag="mnist"):
    """`files.mnist`, or a part of it."""


class Cifar10(_Fraction, frozen=True, tag="cifar10"):
    """`files.cifar10`, or a part of it."""


class Libsvm(_DataTable, frozen=True, tag="libsvm"):
    """`files.libsvm`."""

    valid_share: float = 0.2
    seed: int = 0


class Npz(_DataTable, frozen=True, tag="npz"):
    """`files.npz`."""

    valid_share: float = 0.2
    seed: int = 0


class Classification(_DataTable, frozen=True, tag="classification"):
    """`datasets.classification`."""

    samples: int = 10_000
    features: int = 50
    classes: int = 10
    margin: float = 3.0
    label_noise: float = 0.0
    decay: float = 0.0
    valid_samples: int = 2_000
    seed: int = 0


class Clicks(_DataTable, frozen=True, tag="clicks"):
    """`datasets.clicks`."""

    samples: int = 10_000
    fields: int = 11
    values: int = 20
    popularity: float = 1.0
    signal: float = 2.0
    valid_samples: int = 2_000
    seed: int = 0


class EmbeddedClicks(_DataTable, frozen=True, tag="embedded-clicks"):
    """`datasets.embedded_clicks`."""

    samples: int = 36_000
    tables: int = 8
    largest: int = 131_072
    popularity: float = 0.94  # `datasets.LOCALITY`
    signal: float = 3.0
    pairs: float = 1.0
    valid_samples: int = 4_000
    seed: int = 0


class Mnist1d(_DataTable, frozen=True, tag="mnist-1d"):
    """`datasets.mnist1d`."""

    samples: int = 5_000
    valid_samples: int = 1_000
    seed: int = 0


class Mnist5k(_Fraction, frozen=True, tag="mnist-5k"):
    """`datasets.mnist5k`, or a part of it."""


class GeneratedText(_DataTable, frozen=True, tag="sentences"):
    """`datasets.sentences`."""

    samples: int = 4_000
    length: int = 32
    valid_samples: int = 400
    seed: int = 0


class Ratings(_DataTable, frozen=True, tag="ratings"):
    """`datasets.ratings`."""

    users: int = 2_000
    items: int = 500
    count: int = 60_000
    rank: int = 8
    noise: float = 0.3
    popularity: float = 0.8
    valid_share: float = 0.1
    seed: int = 0


Source: TypeAlias = (
    Digits
    | BreastCancer
    | Mnist
    | Cifar10
    | Libsvm
    | Npz
    | Classification
    | Clicks
    | EmbeddedClicks
    | Mnist1d
    | Mnist5k
    | Ratings
    | GeneratedText
)
