"""One fit of Eq. 3 to a whole job: remaining clocks, progress under each setting, levels that settings add to the loss."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuners.bo_online.test_convergence import hidden_for, hogwild_losses, left
from tuners.actions import Target
from tuners.bo_online import job_fit
from tuners.bo_online.convergence import Estimator, LossCurve
from tuners.bo_online.job_fit import LevelRecorder, fitted_job, likeness, measured_levels, never_rising
from tuners.bo_online.repository import Stretch, StretchMemory, triples

EPSILON, CLOCKS, LENGTH = 0.2, 16_000, 108


def job(plan, noise, seed=0, efficiency=None, raised=None, clocks=CLOCKS):
    """Losses of a job that would take so many clocks from a loss of 1, by stretch: `plan` has the number of workers of each.

    `efficiency` and `raised` of a number of workers: progress per clock, and the factor by which the loss stands higher.
    """
    rng, hidden, effective = np.random.default_rng(seed), hidden_for(clocks), 0.0
    found = []
    for i, workers in enumerate(plan):
        steps = effective + (efficiency or {}).get(workers, 1.0) * np.arange(1, LENGTH + 1)
        effective = steps[-1]
        losses = (raised or {}).get(workers, 1.0) * hogwild_losses(hidden, 1.0, steps)
        found.append(LossCurve(losses * (1 + noise * rng.normal(size=LENGTH)), 1.0, i * LENGTH, workers))
    return found


def fit(curves):
    """The fit, and the efficiency by number of workers."""
    kinds = list(dict.fromkeys((s.workers, "asp") for s in curves))
    of = [kinds.index((s.workers, "asp")) for s in curves]
    levels = measured_levels(curves, of, len(kinds))
    found = fitted_job(levels, likeness(kinds), LENGTH * len(curves), EPSILON)
    return found, dict(zip([w for w, _ in kinds], found.efficiency, strict=True))


@pytest.mark.parametrize(("noise", "within"), [(0.001, 0.02), (0.02, 0.1), (0.1, 0.3)])
def test_the_remaining_clocks_agree_with_the_curve(noise, within):
    """After a tenth of the job. Under 10 % of noise single stretches leave a tenth of the clocks (see `convergence`)."""
    curves = job([8] * 15, noise)
    remains = CLOCKS - 15 * LENGTH
    assert fit(curves)[0].clocks_left == pytest.approx(remains, rel=within)
    assert left(hidden_for(CLOCKS), 1.0, EPSILON) == pytest.approx(CLOCKS)


def test_a_long_job_is_fitted_to_a_bounded_number_of_levels(monkeypatch):
    sizes = []
    solved = job_fit.LeastSquares.__init__

    def counted(self, shape, noise, seen):
        sizes.append(len(seen))
        solved(self, shape, noise, seen)

    monkeypatch.setattr(job_fit.LeastSquares, "__init__", counted)
    found, efficiency = fit(job([8, 16] * 150, 0.02, clocks=40 * 300 * LENGTH))
    assert max(sizes) <= 200
    assert efficiency[16] == pytest.approx(1.0, abs=0.1)
    assert found.clocks_left > 0


@pytest.mark.parametrize("plan", [[8, 16] * 150, [8] * 5 + [16] * 3 + [8] * 30, [4]])
def test_levels_are_the_same_whether_asked_for_on_the_way_or_once(plan):
    curves, kinds = job(plan, 0.2), sorted(set(plan))
    recorder = LevelRecorder()
    for i, curve in enumerate(curves):
        recorder.add(curve, kinds.index(curve.workers))
        found = recorder.levels(len(kinds))
        if i % 20 == 0 or i == len(plan) - 1:
            expected = measured_levels(curves[: i + 1], [kinds.index(w) for w in plan[: i + 1]], len(kinds))
            for mine, whole in zip(found, expected, strict=True):
                assert np.array_equal(mine, whole)


def test_a_further_stretch_takes_the_time_of_its_stay_and_not_of_the_job(monkeypatch):
    looked_at = []
    monkeypatch.setattr(job_fit, "inliers", lambda losses, most: looked_at.append(len(losses)) or np.isfinite(losses))
    recorder = LevelRecorder()
    for i, curve in enumerate(job([8, 16] * 100, 0.2)):
        looked_at.clear()
        recorder.add(curve, i % 2)
        recorder.levels(2)
        assert sum(looked_at) <= 2 * LENGTH  # of the stay before, for good, and of this one


def test_clocks_under_each_kind_are_counted_from_the_beginning():
    plan = [8, 16, 16, 8, 32, 8]
    found = measured_levels(job(plan, 0.1), [0, 1, 1, 0, 2, 0], 3)
    assert found.under.sum(axis=1) == pytest.approx(found.clocks)
    assert found.under[-1] == pytest.approx([2 * LENGTH + found.clocks[-1] - 5 * LENGTH, 2 * LENGTH, LENGTH])


def test_noise_alone_does_not_tell_settings_apart():
    """Ten settings with equal progress per clock, one stretch each, as after the initial phase; losses scatter by 30 %."""
    plan = [8, 3, 30, 12, 22, 35, 1, 17, 26, 6, 10]
    found = [np.array(list(fit(job(plan, 0.3, seed))[1].values())) for seed in range(20)]
    assert np.median([e.max() / e.min() for e in found]) < 1.2
    alone = [[Estimator().remaining(s, EPSILON).clocks for s in job(plan, 0.3, seed)] for seed in range(20)]
    assert np.median([np.max(r) / np.min(r) for r in alone]) > 5


@pytest.mark.parametrize(("noise", "stay"), [(0.05, 20), (0.2, 60)])
def test_a_setting_that_progresses_less_is_found_out_while_it_stays(noise, stay):
    """A sixth of the progress with 32 workers, after 20 stretches under 8; the noisier, the longer it takes."""
    found = [fit(job([8] * 20 + [32] * stay, noise, seed, {32: 1 / 6}))[1] for seed in range(10)]
    assert np.median([e[32] / e[8] for e in found]) < 0.6


def test_a_setting_that_raises_the_loss_learns_less_from_each_clock():
    """Steps of stale gradients scatter: with 32 workers the loss stands three times as high, at once."""
    _, found = fit(job([8, 12, 32, 6, 16, 32, 8], 0.2, 3, raised={32: 3.0}))
    assert found[32] < 0.6 * min(found[w] for w in (6, 8, 12, 16))


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_slows_down_does_not_blame_the_setting_that_it_is_under(seed):
    """The loss falls ever more slowly than Eq. 3 says, while the job is under 8 workers; with 24 it stands twice as high."""
    curves = job([8, 24, 16, 24, *[8] * 60], 0.2, seed, raised={24: 2.0})
    late = [s._replace(losses=np.maximum(s.losses, 0.45 + 0.3 * s.losses)) for s in curves]
    _, found = fit(late)
    assert found[24] < found[8]


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 10.0)), min_size=1, max_size=20, unique_by=lambda x: x[0]))
def test_more_workers_never_progress_more_per_clock(drawn):
    kinds, efficiency = [(w, "asp") for w, _ in drawn], np.array([e for _, e in drawn])
    found = never_rising(kinds, efficiency, np.ones(len(drawn)))
    order = np.argsort([w for w, _ in drawn])
    assert (np.diff(found[order]) <= 1e-12).all()
    if (np.diff(efficiency[order]) <= 0).all():
        assert found == pytest.approx(efficiency)


def test_kinds_that_differ_otherwise_are_not_ordered():
    kinds = [(4, "asp"), (8, "bsp")]
    assert never_rising(kinds, np.array([0.5, 2.0]), np.ones(2)).tolist() == [0.5, 2.0]


def test_rates_are_alike_where_workers_are():
    found = likeness([(8, "asp"), (16, "asp"), (8, "bsp"), (64, "asp")])
    assert found[0, 1] == pytest.approx(math.exp(-0.5))
    assert found[0, 2] == 0.5
    assert found[0, 3] < 0.02
    assert np.linalg.eigvalsh(found).min() > 0


@given(
    st.lists(
        st.lists(st.one_of(st.floats(0.0, 1e6), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=12),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.floats(1e-3, 1e3),
)
def test_whatever_the_losses_are_the_fit_is_positive_and_finite(losses, workers, epsilon):
    """Rising, zero, infinite or missing losses; warnings are errors here."""
    before = np.cumsum([0, *map(len, losses)])
    curves = [
        LossCurve(np.array(x), 1.0, int(b), w)
        for x, b, w in zip(losses, before, workers, strict=False)
        if np.isfinite(x).any()
    ]
    kinds = sorted({(s.workers, None) for s in curves}) or [(1, None)]
    levels = measured_levels(curves, [kinds.index((s.workers, None)) for s in curves], len(kinds))
    found = fitted_job(levels, likeness(kinds), float(before[-1]), epsilon)
    if found is not None:
        assert 0 < found.clocks_left < math.inf
        assert ((found.efficiency > 0) & np.isfinite(found.efficiency)).all()


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_an_epsilon_that_is_no_loss_is_refused(epsilon):
    levels = measured_levels(job([8, 8], 0.1), [0, 0], 1)
    with pytest.raises(ValueError, match="give a positive loss"):
        fitted_job(levels, likeness([(8, None)]), 2 * LENGTH, epsilon)


def test_triples_are_the_same_with_a_memory_of_the_stretches_before():
    curves = job([8, 8, 4, 8, 16, 4, 4, 8], 0.2)
    stretches = [Stretch(np.array([float(s.workers)]), s, LENGTH * (i + 1.0), 0.5) for i, s in enumerate(curves)]
    memory, goal = StretchMemory(Estimator()), Target("loss", EPSILON)
    for now in range(2, len(stretches) + 1):
        given = stretches[:now], goal, 1e6, EPSILON, Estimator()
        grown, anew = (triples(*given, pooled=True, clocks=now * LENGTH, memory=m) for m in (memory, None))
        assert (grown.clocks, len(grown.triples)) == (anew.clocks, len({s.curve.workers for s in stretches[:now]}))
        assert [t[1:] for t in grown.triples] == [t[1:] for t in anew.triples]


def test_triples_share_one_estimate_of_the_end():
    """Y is seconds per clock times the clocks that the whole job needs from there, whatever one stretch looks like."""
    curves = job([8, 8, 4, 8], 0.2)
    stretches = [Stretch(np.array([float(i)]), s, LENGTH * (i + 1.0), 0.5) for i, s in enumerate(curves)]
    seen = triples(stretches, Target("loss", EPSILON), 1e6, EPSILON, Estimator(), pooled=True, clocks=4 * LENGTH)
    assert [t.clocks - seen.clocks for t in seen.triples] == pytest.approx([4 * LENGTH, 3 * LENGTH, 2 * LENGTH, LENGTH])
    per_clock = [t.seconds / t.clocks for t in seen.triples]
    assert per_clock[1] / per_clock[0] == pytest.approx(2.0)
    assert per_clock[3] / per_clock[0] == pytest.approx(4.0)
