"""Jobs that learn: workloads with a proxy, rates that work for them, and how much hardware they ask for.

What the families of such jobs share. A draw of a job is a draw of its data, too; `drawn_workload` then draws its demand for
the machines that it is to run on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from harness.families.ingredients import Machines, drawn_demand, mini_batch_seconds
from harness.families.lot import Lot, rounded

__all__ = [
    "PUSHES",
    "SMALL",
    "LearningJob",
    "compute_seconds",
    "drawn_job",
    "drawn_workload",
    "good_rates",
    "poor_rate",
    "rate_free",
    "span_seconds",
]

PUSHES = 600  # about, of the fastest reference setting
SMALL = ("edge-2core", "edge-4core", "m4.large", "m4.xlarge")


@dataclass(frozen=True, slots=True)
class LearningJob:
    """A workload that learns, and what is known to work for it."""

    name: str
    words: str
    rate: float  # that works without staleness
    batch: int = 16
    metric: Literal["accuracy", "loss"] = "accuracy"
    classes: bool = True  # its data can be distributed by class
    overrides: Mapping[str, Any] = field(default_factory=dict)


_LEARNING_JOBS = {
    "logistic": LearningJob("digits-logistic", "Softmax regression on digits", 0.1),
    "svm": LearningJob("digits-svm", "A linear SVM on digits", 0.03),
    "mlp": LearningJob("digits-mlp", "A perceptron on digits", 0.1),
    "clouds": LearningJob("clouds-mlp", "A perceptron on noisy clouds", 0.05),
    "cnn": LearningJob("digits-cnn", "A small convolutional network on digits", 0.1),
    "curves": LearningJob("mnist1d-mlp", "A perceptron on MNIST-1D", 0.1),
    "ratings": LearningJob("ratings-mf", "Matrix factorisation of ratings", 4.0, 100, "loss", classes=False),
}


def drawn_job(lot: Lot, kinds: tuple[str, ...]) -> LearningJob:
    """A workload and its data; how much hardware it needs is drawn for the machines, by `drawn_workload`."""
    kind = lot.among(kinds)
    made = _LEARNING_JOBS[kind]
    overrides: dict[str, Any] = {}
    if kind == "mlp":
        overrides["hidden"] = lot.among(([64], [128], [256], [64, 64]))
    if kind == "clouds":
        overrides |= {"margin": lot.among((3.0, 3.5, 4.0)), "label_noise": lot.among((0.0, 0.05, 0.1))}
    metric = "loss" if lot.chance(0.3) else made.metric
    return replace(made, overrides=overrides, metric=metric)


def drawn_workload(
    lot: Lot,
    job: LearningJob,
    machines: Machines,
    workers: int,
    batch: int,
    skew: float,
    ratio: tuple[float, float] = (0.33, 10.0),
) -> dict[str, Any]:
    """The workload, so large that the reference run takes about 600 to 3,000 s; with probability `skew`, data is skewed.

    `ratio` is the range of the time to compute over the time to transfer.
    """
    span = lot.log(600.0, 3000.0)
    demand = drawn_demand(lot, machines, span * workers / PUSHES, batch, ratio)
    overrides = dict(job.overrides) | demand
    drawn, degree = lot.chance(skew), lot.among((0.3, 0.6, 0.9))
    if drawn and job.classes:
        overrides["skew"] = degree
    return {"name": job.name, "overrides": overrides}


def rate_free(job: LearningJob) -> dict[str, Any]:
    """The knob of a free learning rate: from a thousandth of the rate that works to thirty times of it."""
    return {"real": [rounded(job.rate / 1000), rounded(job.rate * 30)], "log": True}


def poor_rate(lot: Lot, job: LearningJob) -> float:
    """Far too low, somewhat too high, or about right, where something else is poor."""
    if lot.chance(0.7):
        return rounded(job.rate * lot.log(0.003, 0.06))
    return rounded(job.rate * (lot.log(5.0, 15.0) if lot.chance(0.75) else lot.log(0.1, 0.5)))


def good_rates(job: LearningJob) -> tuple[float, ...]:
    """Rates to try, from a tenth to ten times the rate that works."""
    return tuple(rounded(job.rate * f) for f in (0.1, 0.3, 1.0, 3.0, 10.0))


def compute_seconds(workload: Mapping[str, Any], machines: Machines, batch: int) -> float:
    """About how long a mini-batch computes on the first machine."""
    demand = workload["overrides"]
    return float(demand["fixed_seconds"] + batch * demand["sample_seconds"] / machines.speed(0))


def span_seconds(workload: Mapping[str, Any], machines: Machines, workers: int, batch: int) -> float:
    """About the time of the reference run."""
    return PUSHES * mini_batch_seconds(machines, range(workers), workload["overrides"], batch) / workers
