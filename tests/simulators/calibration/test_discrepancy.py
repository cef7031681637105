"""What a model lacks: intervals hold where a model of a wrong form is extrapolated, and stay narrow where it is right."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from simulators.calibration.discrepancy import Discrepancy, positions
from simulators.calibration.recorded.row import Row

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
    rows, none = [row(w, s) for w, s in settings], np.zeros(len(settings))
    residuals = by @ -wrong - off
    known = Discrepancy(positions(rows), none > 0, by, residuals, none, none, 49.0 * np.eye(2), np.zeros(2), repetition)
    return known, -wrong


def half_widths(known, rows, by):
    return known.half_widths(rows, by, np.zeros((1, len(rows))), 0.9)[0, 0]


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
        error = np.abs(all_[len(SMALL) :] - by @ constants)
        for k, half in enumerate((half_widths(known, [row(w, s) for w, s in LARGE], by), norm.ppf(0.95) * np.sqrt(plain))):
            inside[k] += float((error < half).mean()) / seeds
            widths[k] += float(half.mean()) / seeds
    return inside, widths


@pytest.mark.slow
def test_intervals_hold_where_a_wrong_form_is_extrapolated():
    """Twice as many workers as fitted. Without the discrepancy, three of ten recorded values are outside."""
    (with_it, without), (wide, narrow) = told(lacking, 60)
    assert without < 0.75
    assert 0.85 < with_it < 0.95
    assert wide < 2 * narrow


def test_intervals_of_a_right_form_are_hardly_wider():
    (with_it, without), (wide, narrow) = told(lambda rng, settings: np.zeros(len(settings)), 40)
    assert without > 0.85
    assert 0.85 < with_it < 0.95
    assert wide < 1.25 * narrow


def test_the_error_grows_with_the_distance_from_the_fitted_rows():
    rng = np.random.default_rng(0)
    known, _ = fitted(SMALL, lacking(rng, SMALL) + NOISE * rng.standard_normal(len(SMALL)))
    far = [(3, 2), (8, 2), (16, 2), (64, 2)]
    still = np.ones((len(far), 2)) * slopes([(3, 2)])
    errors = half_widths(known, [row(w, s) for w, s in far], still)
    assert list(errors) == sorted(errors)
    assert errors[1] > 1.1 * errors[0]
    unlike = half_widths(known, [row(3, 2, nics=(1.0, 0.1, 1.0, 1.0, 1.0)), row(3, 2, policy="bsp")], still[:2])
    assert min(unlike) > 1.2 * errors[0]


def test_rows_vary_around_their_setting():
    known, _ = fitted(SMALL, NOISE * np.random.default_rng(0).standard_normal(len(SMALL)), repetition=0.25)
    assert half_widths(known, [row(3, 2)], slopes([(3, 2)])) == pytest.approx([norm.ppf(0.95) * 0.5], rel=0.02)


def test_what_is_known_of_recorded_means_is_no_noise_of_other_rows():
    """Fitted rows whose recorded means are known to be 4 % off at random: rows of which nothing is known are nearer."""
    known, _ = fitted(SMALL, NOISE * np.random.default_rng(0).standard_normal(len(SMALL)))
    short = known._replace(variances=np.full(len(SMALL), NOISE**2))
    by = slopes([(3, 2)])
    assert half_widths(short, [row(3, 2)], by) < 0.6 * half_widths(known, [row(3, 2)], by)
    same = half_widths(short, [row(3, 2, error=NOISE)], by)
    assert same == pytest.approx(half_widths(known, [row(3, 2)], by), rel=0.3)


def test_constants_are_where_the_parts_of_cycles_have_them():
    """Parts have a constant 0.3 larger than the fit: where cycles say little of it, predictions are that far off."""
    rows = [row(w, 1) for w in (1, 2)]
    none, by = np.zeros(2), np.full((2, 1), 0.01)
    known = Discrepancy(positions(rows), none > 0, by, none, none, none, np.full((1, 1), 1e-4), np.full(1, 0.3), 0.0)
    assert 0.25 < half_widths(known, rows[:1], np.ones((1, 1)))[0] < 0.4


def test_many_settings_are_thinned():
    """A thousand rows tell what three hundred of them do, nearly."""
    many = [(1 + i % 40, 1 + i // 40) for i in range(1000)]
    known, _ = fitted(many, NOISE * np.random.default_rng(0).standard_normal(1000))
    assert half_widths(known, [row(20, 12)], slopes([(20, 12)])) == pytest.approx([norm.ppf(0.95) * NOISE], rel=0.15)


def test_an_error_that_goes_with_unequal_shares_widens_the_intervals_of_other_shares_alone():
    """Equal shares are predicted exactly; the larger the share of one server, the faster the model by mistake."""
    shares = [(), (0.6, 0.4), (0.7, 0.3), (0.8, 0.2)]
    rows = [row(w, 2, model_shares=given) for w in (1, 2, 3, 4, 6) for given in shares]
    by = slopes([(r.workers, r.servers) for r in rows])
    off = np.array([-0.3 * np.log(2 * r.largest_share) for r in rows]) + 0.01 * np.random.default_rng(0).standard_normal(
        len(rows)
    )
    none = np.zeros(len(rows))
    known = Discrepancy(positions(rows), none > 0, by, off, none, none, 0.01 * np.eye(2), np.zeros(2), 0.0)
    new = [row(5, 2), row(5, 2, model_shares=(0.9, 0.1))]
    equal, unequal = half_widths(known, new, slopes([(5, 2)] * 2))
    assert equal < 0.1 < unequal
    assert unequal > 0.3 * np.log(1.8)


def told_by_computing(proportional, seed):
    """Half-widths of two rows, of which the second computes for nine tenths of its cycle, from 24 settings that are off in
    proportion to the part beside computing, or to the whole; and from the same where nobody timed computing."""
    rng = np.random.default_rng(seed)
    beside = np.tile([1.0, 0.2, 0.5], len(SMALL) // 3)
    off = NOISE * rng.standard_normal(len(SMALL)) * (beside if proportional else 1.0)
    known, _ = fitted(SMALL, off)
    known = known._replace(beside=beside)
    rows, by = [row(3, 2), row(3, 2)], slopes([(3, 2)] * 2)
    both = (
        of.half_widths(rows, by, np.zeros((1, 2)), 0.9, beside=np.array([1.0, 0.1]))[0, 0]
        for of in (known, known._replace(beside=None))
    )
    return tuple(both)


def test_rows_that_mostly_compute_are_told_better_where_what_is_beside_computing_errs():
    timed, untimed = np.mean([told_by_computing(True, seed) for seed in range(8)], axis=0)
    assert timed[1] < 0.4 * timed[0]
    assert timed[0] == pytest.approx(norm.ppf(0.95) * NOISE, rel=0.25)
    assert untimed[0] == untimed[1] < timed[0]


def test_rows_that_mostly_compute_are_told_no_better_where_whole_cycles_err():
    timed, untimed = np.mean([told_by_computing(False, seed) for seed in range(8)], axis=0)
    assert timed == pytest.approx(untimed, rel=0.12)
