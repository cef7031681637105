"""What a model lacks: intervals hold where a model of a wrong form is extrapolated, and stay narrow where it is right."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from simulators.calibration.discrepancy import Discrepancy, positions
from simulators.calibration.fit import Row

NOISE = 0.04
SMALL = [(w, s) for w in (1, 2, 3, 4, 5, 6) for s in (1, 2, 4, 8)]
LARGE = [(w, s) for w in (8, 10, 12) for s in (1, 2, 4, 8)]


def row(workers, servers, **more):
    return Row("run", "toy", workers, servers, 1.0, policy=more.pop("policy", "asp"), **more)


def slopes(settings):
    """Of a model with two constants, the shares that they have of a cycle: computing, and workers per server."""
    queue = np.array([0.3 * w / s for w, s in settings])
    return np.stack([1 / (1 + queue), queue / (1 + queue)], axis=1)


def fitted(settings, off, repetition=0.0):
    """The residuals and the fit of constants to a linear model of logarithms that are `off`; and the constants' errors."""
    by = slopes(settings)
    wrong = np.linalg.lstsq(by, -off, rcond=None)[0]  # the fit takes up what it can of what is off
    rows = [row(w, s) for w, s in settings]
    alike = np.zeros(len(rows), dtype=bool)
    return Discrepancy(positions(rows), alike, by, by @ wrong * -1 - off, 49.0 * np.eye(2), repetition), -wrong


def lacking(rng, settings):
    """A smooth error of the form, of which nothing is known: a wave over the workers, and one over the servers."""
    high, shift = rng.normal(0, 0.12, 2), rng.uniform(0, 2 * np.pi, 2)
    return np.array([high @ np.sin(1.5 * np.log([w, s]) + shift) for w, s in settings])


def told(truth, seeds):
    """Of rows larger than fitted: how many are within 90 % intervals with the discrepancy, and with the errors of constants
    and rows alone; and the mean widths of both."""
    inside, widths = np.zeros(2), np.zeros(2)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        all_ = truth(rng, [*SMALL, *LARGE]) + NOISE * rng.standard_normal(len(SMALL) + len(LARGE))
        known, constants = fitted(SMALL, all_[: len(SMALL)])
        by = slopes(LARGE)
        spare = len(SMALL) - 2
        mean_square = float(known.residuals @ known.residuals) / spare
        plain = mean_square * (1 + np.einsum("nk,kl,nl->n", by, np.linalg.inv(known.slopes.T @ known.slopes), by))
        found = known.mean_squares([row(w, s) for w, s in LARGE], by)
        error = np.abs(all_[len(SMALL) :] - by @ constants)
        for k, squares in enumerate((np.maximum(found, plain), plain)):
            half = norm.ppf(0.95) * np.sqrt(squares)
            inside[k] += float((error < half).mean()) / seeds
            widths[k] += float(half.mean()) / seeds
    return inside, widths


def test_intervals_hold_where_a_wrong_form_is_extrapolated():
    """Twice as many workers as fitted. Without the discrepancy, three of ten recorded values are outside."""
    (with_it, without), (wide, narrow) = told(lacking, 60)
    assert without < 0.75
    assert 0.85 < with_it < 0.97
    assert wide < 2 * narrow


def test_intervals_of_a_right_form_are_hardly_wider():
    (with_it, without), (wide, narrow) = told(lambda rng, settings: np.zeros(len(settings)), 60)
    assert with_it >= without > 0.85
    assert wide < 1.5 * narrow


def test_the_error_grows_with_the_distance_from_the_fitted_rows():
    rng = np.random.default_rng(0)
    known, _ = fitted(SMALL, lacking(rng, SMALL) + NOISE * rng.standard_normal(len(SMALL)))
    far = [(3, 2), (8, 2), (16, 2), (64, 2)]
    still = np.ones((len(far), 2)) * slopes([(3, 2)])
    errors = known.mean_squares([row(w, s) for w, s in far], still)
    assert list(errors) == sorted(errors)
    assert errors[1] > 1.2 * errors[0]
    unlike = known.mean_squares([row(3, 2, nics=(1.0, 0.1, 1.0, 1.0, 1.0)), row(3, 2, policy="bsp")], still[:2])
    assert min(unlike) > 1.5 * errors[0]


def test_rows_vary_around_the_median_of_their_setting():
    known, _ = fitted(SMALL, NOISE * np.random.default_rng(0).standard_normal(len(SMALL)), repetition=0.25)
    errors = known.mean_squares([row(3, 2)], slopes([(3, 2)]))
    assert errors - known._replace(repetition=0.0).mean_squares([row(3, 2)], slopes([(3, 2)])) == pytest.approx([0.25])


def test_many_settings_are_thinned():
    """A thousand rows tell what three hundred of them do, nearly."""
    many = [(1 + i % 40, 1 + i // 40) for i in range(1000)]
    known, _ = fitted(many, NOISE * np.random.default_rng(0).standard_normal(1000))
    assert known.mean_squares([row(20, 12)], slopes([(20, 12)])) == pytest.approx([NOISE**2], rel=0.3)
