"""Baselines beside targets: the figures in the file are those that are measured, and they are found by the data itself."""

from __future__ import annotations

import pytest

from harness.scenario import embedded, load
from simulators.workloads import references as module
from simulators.workloads.data_tables import Digits, Mnist1d
from simulators.workloads.references import measured, references, told
from tests.support.marks import slow


def test_public_names_exist() -> None:
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("kind", ["Digits", slow("EmbeddedClicks"), "BreastCancer", "Mnist1d", "GeneratedText", "Ratings"])
def test_figures_in_the_file_are_those_that_are_measured(kind: str) -> None:
    """Those that take seconds; `python -m simulators.workloads.references` measures all."""
    entry = next(e for e in module._entries() if type(e.data).__name__ == kind)
    kept = [r for r in entry.references if not r.source.startswith("published")]
    found = measured(entry.data)
    assert [(r.what, r.source) for r in found] == [(r.what, r.source) for r in kept]
    for ours, theirs in zip(found, kept, strict=True):
        # Versions of scikit-learn may end a fit elsewhere: two of 360 samples.
        assert ours.accuracy == (None if theirs.accuracy is None else pytest.approx(theirs.accuracy, abs=0.006))
        assert ours.loss == (None if theirs.loss is None else pytest.approx(theirs.loss, abs=0.006))


def test_the_best_known_is_no_worse_than_the_linear_baseline() -> None:
    for entry in module._entries():
        linear, best = entry.references[0], entry.references[-1]
        assert linear.accuracy is None or (best.accuracy or 0) >= linear.accuracy
        assert linear.loss is None or best.loss is None or best.loss <= linear.loss


def test_other_data_of_the_same_kind_have_none() -> None:
    assert references(Mnist1d())
    assert references(Mnist1d(samples=500)) == ()
    assert references(Digits(fraction=0.5)) != references(Digits())
    assert references(None) == ()


def test_every_shipped_target_of_a_model_has_its_references_beside_it() -> None:
    for name in embedded():
        made = load(name)
        if made.recorded is None and made.target.metric in ("accuracy", "loss"):
            assert told(made.workload.name, made.workload.overrides, made.target.metric).startswith("linear: "), name


def test_a_phrase_names_the_metric_of_the_target() -> None:
    assert told("mnist1d-mlp", {}, "accuracy") == (
        "linear: accuracy 0.336 (logistic regression, measured); "
        "best known: accuracy 0.94 (convolutional network, published: Greydanus 2020)"
    )
    assert told("mnist1d-mlp", {}, "loss").startswith("linear: loss 1.65 ")
    assert told("tfonline-svm", {}, "loss").startswith("linear: accuracy "), "a hinge is no cross-entropy"
    assert told("mnist1d-mlp", {"data.samples": 500}, "accuracy") == told("cruise-nmf", {}, "clocks") == ""
    with pytest.raises(ValueError, match="No workload 'mine'"):
        told("mine", {}, "loss")
