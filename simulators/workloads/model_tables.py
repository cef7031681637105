"""The `model` tables of `workloads.toml`, as structs. The functions of the models are in `simulators.workloads.models`."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

__all__ = [
    "Cnn",
    "Factorisation",
    "FactorisationMachine",
    "Logistic",
    "Lstm",
    "Mlp",
    "Model",
    "OwnModel",
    "ShippedModel",
    "Svm",
    "Transformer",
]

_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class _ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Keywords that all tables share: a table says its kind, and an unknown key is an error."""


class Logistic(_ModelTable, frozen=True, tag="logistic"):
    """Softmax regression with an l2 penalty."""

    l2: _Amount = 0.0


class Svm(_ModelTable, frozen=True, tag="svm"):
    """Linear multi-class support vector machine with an l2 penalty."""

    l2: _Amount = 1e-4


class Mlp(_ModelTable, frozen=True, tag="mlp"):
    """Perceptron with ReLU; () has no hidden layer."""

    hidden: tuple[_Whole, ...] = (256,)  # width of each hidden layer


class Cnn(_ModelTable, frozen=True, tag="cnn"):
    """Two convolutions with pooling, then dense layers."""

    width: _Whole = 8  # channels of the first convolution; the second has twice as many
    hidden: tuple[_Whole, ...] = ()  # width of each dense hidden layer


class Lstm(_ModelTable, frozen=True, tag="lstm"):
    """Long short-term memory over the rows of an image, like the frames of a video; the last state is classified."""

    width: _Whole = 16  # of the state


class Factorisation(_ModelTable, frozen=True, tag="factorisation"):
    """Matrix factorisation of ratings."""

    rank: _Whole = 8
    l2: _Amount = 0.0
    offset: float = 3.6  # added to every prediction


class FactorisationMachine(_ModelTable, frozen=True, tag="factorisation-machine"):
    """Factorisation machine on rows of embedding tables: a weight and a vector per row."""

    rank: _Whole = 4  # of the vectors


class Transformer(_ModelTable, frozen=True, tag="transformer"):
    """Language model: predicts every character of a text from those before it. `width` must divide by `heads`."""

    width: _Whole = 32  # of the residual stream
    heads: _Whole = 2
    layers: _Whole = 1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by {self.heads} heads")


class OwnModel(_ModelTable, frozen=True, tag="python"):
    """A function in a file of the user's, see `simulators.workloads.own_models`."""

    file: str  # the path
    function: str
    options: dict[str, Any] = {}  # further arguments of the function

    def __hash__(self) -> int:
        return hash((self.file, self.function, repr(self.options)))


ShippedModel: TypeAlias = Logistic | Svm | Mlp | Cnn | Lstm | Factorisation | FactorisationMachine | Transformer
Model: TypeAlias = ShippedModel | OwnModel
