"""What is known of the data that workloads learn: a linear baseline, and the best known. It shows how hard a target is.

`references.toml` has the figures, by data; `references` finds those of a workload's data. Measured ones come from

    python -m simulators.workloads.references [NUMBER ...]

which trains the models of scikit-learn on the training data, or computes the best possible prediction where the generator is
known, and prints the file's tables (all, or those with these numbers, from 0) as they are now. Validation data decides, and
none of it is used for choices: models have the library's defaults, unless their line says otherwise.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulators.workloads import datasets, sentences
from simulators.workloads.catalogue import dataset, learnt
from simulators.workloads.data_tables import Classification, Clicks, EmbeddedClicks, GeneratedText, Mnist1d, Ratings, Source
from simulators.workloads.model_tables import Svm

__all__ = ["Reference", "main", "measured", "references", "told"]

_MEASURED = "measured"


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model on one set of data."""

    what: str
    accuracy: float | None = None  # on validation data, 0 to 1; of text, per character
    loss: float | None = None  # the same: mean cross-entropy in nats; of ratings, the mean squared error, without a penalty
    source: str = _MEASURED  # or the publication

    def said(self, *metrics: str) -> str:
        """The figure of the first of these metrics that is known."""
        known = {"accuracy": self.accuracy, "loss": self.loss}
        metric = next(m for m in (*metrics, *known) if known[m] is not None)
        return f"{metric} {known[metric]:.3g} ({self.what}, {self.source})"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""

    data: Source  # exactly: other data of the same kind are other data
    references: tuple[Reference, ...]  # the linear baseline first, the best known last


@cache
def _entries() -> tuple[_Entry, ...]:
    table = tomllib.loads((files("simulators.workloads") / "references.toml").read_text("utf-8"))
    return msgspec.convert(table["known"], tuple[_Entry, ...])


def references(data: Source | None) -> tuple[Reference, ...]:
    """The references of this data, the linear baseline first and the best known last; () where none are known."""
    return next((e.references for e in _entries() if e.data == data), ())


def told(name: str, overrides: dict[str, Any], metric: str, tables: dict[str, Any] | None = None) -> str:
    """A target's references as one phrase: "linear: accuracy 0.336 (...); best known: accuracy 0.94 (...)"; "" without any.

    Raises ValueError for an unknown workload.
    """
    model, data = learnt(name, overrides, tables)
    if metric not in ("accuracy", "loss") or not (found := references(data)):
        return ""
    if isinstance(model, Svm):
        metric = "accuracy"  # its loss is a hinge, which cannot be compared with a cross-entropy
    return f"linear: {found[0].said(metric)}; best known: {found[-1].said(metric)}"


# ------------------------------------------------------------------------------------------------------------ measurement


def measured(data: Source) -> tuple[Reference, ...]:
    """The references of this data that can be measured, in order."""
    made = dataset(data)
    if isinstance(data, GeneratedText):
        return tuple(_of_text(made))
    if isinstance(data, Ratings):
        return tuple(_of_ratings(made, data))
    if isinstance(data, EmbeddedClicks):
        odds = datasets.embedded_click_odds(**msgspec.structs.asdict(data))
        best = _scored("the odds that labels are drawn with", np.stack([0 * odds, odds], axis=1), made.valid[1])
        return _of_rows(made), best
    linear = _linear(made)
    if isinstance(data, Classification):
        fields = {
            k: v for k, v in msgspec.structs.asdict(data).items() if k in ("features", "classes", "margin", "decay", "seed")
        }
        scores = datasets.cloud_scores(made.valid[0], **fields)
        return linear, _scored("the true distribution", scores, made.valid[1])
    if isinstance(data, Clicks):
        fields = {k: v for k, v in msgspec.structs.asdict(data).items() if k in ("fields", "values", "signal", "seed")}
        return linear, _scored("the true distribution", datasets.click_scores(made, **fields), made.valid[1])
    if isinstance(data, Mnist1d):
        return (linear,)
    kernel = _kernel(made)
    return (linear, kernel) if (kernel.accuracy or 0.0) > (linear.accuracy or 0.0) else (linear,)


def _linear(made: datasets.Dataset) -> Reference:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=5000).fit(*made.train)
    return _scored("logistic regression", model.predict_log_proba(made.valid[0]), made.valid[1])


def _of_rows(made: datasets.Dataset) -> Reference:
    """Logistic regression with a weight for every row of the embedding tables."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    def shown(rows: NDArray[Any]) -> Any:
        ends = np.arange(0, rows.size + 1, rows.shape[1])
        return csr_matrix((np.ones(rows.size), rows.reshape(-1), ends), (len(rows), sum(made.tables)))

    model = LogisticRegression(max_iter=5000).fit(shown(made.train[0]), made.train[1])
    return _scored("logistic regression, a weight per row", model.predict_log_proba(shown(made.valid[0])), made.valid[1])


def _kernel(made: datasets.Dataset) -> Reference:
    from sklearn.svm import SVC

    model = SVC(C=10.0).fit(*made.train)
    accuracy = float((model.predict(made.valid[0]) == made.valid[1]).mean())
    return Reference("support vector machine, Gaussian kernel, C 10", round(accuracy, 3))


def _scored(what: str, scores: NDArray[np.float64], labels: NDArray[np.generic]) -> Reference:
    """Accuracy and cross-entropy of scores [n, classes], whose softmax is the prediction."""
    logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    right = logs[np.arange(len(labels)), labels.astype(int)]
    return Reference(what, round(float((logs.argmax(1) == labels).mean()), 3), round(float(-right.mean()), 3))


def _of_text(made: datasets.Dataset) -> list[Reference]:
    train, valid = (np.append(column[0].reshape(-1), column[1][-1, -1]) for column in (made.train, made.valid))
    said = [("bigram", sentences.ngram(train, valid, 2))]
    said += [
        ("4-gram", sentences.ngram(train, valid, 4)),
        ("the grammar itself, from all text before", sentences.best(valid)),
    ]
    return [Reference(what, round(found.accuracy, 3), round(found.loss, 3)) for what, found in said]


def _of_ratings(made: datasets.Dataset, data: Ratings) -> list[Reference]:
    """Biases of users and items by ridge regression; and the noise that the generator adds, before ratings are clipped."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import Ridge

    def shown(columns: tuple[NDArray[Any], ...]) -> Any:
        rows, ones = np.arange(len(columns[0])), np.ones(len(columns[0]))
        sizes = zip(columns, (data.users, data.items), strict=False)
        return hstack([csr_matrix((ones, (rows, column)), (len(rows), size)) for column, size in sizes])

    model = Ridge(alpha=1.0).fit(shown(made.train), made.train[2])
    error = float(np.mean((model.predict(shown(made.valid)) - made.valid[2]) ** 2))
    return [
        Reference("biases of users and items", loss=round(error, 3)),
        Reference("the noise's variance", loss=round(data.noise**2, 3), source="by construction"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the data of the file's tables, and print them as they are now."""
    chosen = [int(a) for a in (sys.argv[1:] if arguments is None else arguments)]
    say: Callable[[str], object] = sys.stdout.write
    for number, entry in enumerate(_entries()):
        if chosen and number not in chosen:
            continue
        say(f"[[known]] # {number}: {entry.data}\n")
        for found in measured(entry.data):
            say(f"{found.what}: accuracy {found.accuracy}, loss {found.loss} ({found.source})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
