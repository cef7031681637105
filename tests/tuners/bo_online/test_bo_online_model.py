"""The parts of Bayesian optimisation: rows, the Gaussian process, acquisition, its maximum, and costs by technique."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from tuners.bo_online import surrogate
from tuners.bo_online.costs import (
    TECHNIQUES,
    PastReconfiguration,
    change_seconds,
    published_seconds,
    technique_seconds,
    techniques,
)
from tuners.bo_online.surrogate import (
    Encoding,
    Surrogate,
    best_rows,
    expected_improvement,
    lower_bound,
    probability,
    without,
)
from tuners.bo_online.tuner import initial_rows
from tuners.settings import Choice, Integer, Node, Real, Setting
from tuners.space import Space

NODES = tuple(Node(name, "toy", 16, ("cpu",), 1e9, 1e9) for name in "abcdef")
BASE = Setting(workers=("a", "b"), servers=("c", "d", "e", "f"), options=(("fold", 1), ("jit", 0)))
KNOBS = (
    Integer("worker_count", 1, 5),
    Integer("intra_threads", 1, 15),
    Integer("inter_threads", 1, 15),
    Choice("transfer_bits", (32, 16)),
    Choice("option/jit", (0, 1, 2)),
    Integer("option/fold", 1, 10**8, log=True),
    Real("learning_rate", 1e-4, 1.0, log=True),
    Real("momentum", 0.0, 0.9),
)
SEEDS = st.integers(0, 2**32 - 1)


def encoding(*knobs, threads=None):
    return Encoding(Space(BASE, NODES, knobs or KNOBS), threads)


def same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, float):
            assert b[name] == pytest.approx(value)
        else:
            assert (type(b[name]), b[name]) == (type(value), value)


# -------------------------------------------------------------------------------------------------------------------- rows


@given(SEEDS)
def test_values_come_back_from_the_row_they_made(seed):
    made = encoding()
    values = made.space.sample(np.random.default_rng(seed))
    row = made.row(values)
    assert row.shape == (made.width,)
    assert ((row >= 0) & (row <= 1 + 1e-12)).all()
    same(values, made.values(row))


@given(SEEDS)
def test_rows_are_decided_before_they_are_scored(seed):
    """A snapped row is exactly the setting whose score it gets."""
    made = encoding(threads=16)
    rows = made.snap(np.random.default_rng(seed).normal(0.5, 1.0, (20, made.width)))
    for row in rows:
        values = made.values(row)
        assert all(k.contains(values[k.name]) for k in made.space.knobs)
        assert made.row(values) == pytest.approx(row, abs=1e-9)
        assert values["intra_threads"] + values["inter_threads"] == 16
    assert np.array_equal(made.snap(rows), rows)


def test_rows_are_brought_into_range():
    space = Space(
        BASE, NODES, (Integer("staleness", 0, 8), Integer("batch_size", 1, 64, log=True), Real("momentum", 0, 0.9))
    )
    made = Encoding(space)
    assert made.values(np.array([9.0, 1.5, -1.0])) == {"staleness": 8, "batch_size": 64, "momentum": 0.0}
    nearly = np.array([2.4 / 8, math.log(7.6) / math.log(64), 0.5 / 0.9])
    assert made.values(nearly) == {"staleness": 2, "batch_size": 8, "momentum": pytest.approx(0.5)}


def test_a_value_without_a_column_is_no_option():
    made = encoding(Choice("role/a", ("worker", "server")))
    assert made.row({"role/a": "idle"}).tolist() == [0, 0]
    assert encoding(Choice("option/jit", (False, True))).row({"option/jit": 1}).tolist() == [0, 0]


def test_knobs_with_one_value_take_part():
    made = encoding(
        Integer("staleness", 3, 3), Real("momentum", 0.5, 0.5), Choice("policy", ("asp",)), Integer("batch_size", 4, 8)
    )
    rows = made.spread(np.random.default_rng(0).random((9, 4)))
    assert {made.values(r)["staleness"] for r in rows} == {3}
    assert {made.values(r)["momentum"] for r in rows} == {0.5}
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("bound", [Integer("staleness", 0, 8), Choice("staleness", (0, 2, 5))], ids=["range", "options"])
def test_settings_that_differ_in_staleness_alone_are_one_where_the_policy_knows_none(bound):
    """They were tried one after another, for nothing."""
    policies = ("bsp", "asp", "ssp", "dssp")
    space = Space(replace(BASE, staleness=2), NODES, (Choice("policy", policies), bound))
    made = Encoding(space)
    rows = [made.values(r) for r in made.spread(np.random.default_rng(0).random((400, 2)))]
    seen = {policy: {r["staleness"] for r in rows if r["policy"] == policy} for policy in policies}
    every = set(bound.options) if isinstance(bound, Choice) else set(range(9))
    assert seen == {"bsp": {2}, "asp": {2}, "ssp": every, "dssp": every}
    recorded = Encoding(replace(space, recorded={space.base: None}))
    rows = [recorded.values(r) for r in recorded.spread(np.random.default_rng(0).random((400, 2)))]
    assert {r["staleness"] for r in rows if r["policy"] == "bsp"} == every  # as each run was recorded


def test_threads_are_coupled_only_where_both_are_free():
    alone = encoding(Integer("intra_threads", 1, 15), threads=16)
    assert {alone.values(r)["intra_threads"] for r in alone.spread(np.linspace(0, 0.999, 60)[:, None])} == set(range(1, 16))
    both = encoding(Integer("intra_threads", 1, 15), Integer("inter_threads", 1, 4), threads=16)
    rows = [both.values(r) for r in both.spread(np.random.default_rng(0).random((200, 2)))]
    assert all(r["inter_threads"] == min(16 - r["intra_threads"], 4) for r in rows)
    free = encoding(Integer("intra_threads", 1, 15), Integer("inter_threads", 1, 15))
    sums = {sum(free.values(r).values()) for r in free.spread(np.random.default_rng(0).random((200, 2)))}
    assert len(sums) > 10


# --------------------------------------------------------------------------------------------------------- initial settings


@pytest.mark.parametrize("design", ["lhs", "centred"])
def test_a_latin_hypercube_hits_every_part_of_every_range_once(design):
    made = encoding(
        Integer("worker_count", 1, 5), Choice("policy", ("asp", "bsp", "ssp", "dssp", "pssp")), Real("momentum", 0, 1)
    )
    rows = [made.values(r) for r in initial_rows(made, 5, np.random.default_rng(3), design)]
    assert sorted(r["worker_count"] for r in rows) == [1, 2, 3, 4, 5]
    assert len({r["policy"] for r in rows}) == 5
    parts = sorted(r["momentum"] * 5 for r in rows)
    assert [int(p) for p in parts] == [0, 1, 2, 3, 4]
    assert (parts == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])) == (design == "centred")


def test_random_settings_are_drawn_one_by_one():
    made = encoding(Integer("worker_count", 1, 5))
    drawn = [made.values(r)["worker_count"] for r in initial_rows(made, 4000, np.random.default_rng(3), "random")]
    share = np.bincount(drawn, minlength=6)[1:] / 4000
    assert share == pytest.approx([0.2] * 5, abs=4 * math.sqrt(0.2 * 0.8 / 4000))
    assert initial_rows(made, 0, np.random.default_rng(3), "lhs").shape == (0, 1)


# --------------------------------------------------------------------------------------------------------- Gaussian process


def bowl(rows):
    """Seconds over one knob and a state: least at 0.3, and in proportion to the state."""
    return 100 * rows[:, 1] * (1 + (rows[:, 0] - 0.3) ** 2)


def observed(n, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.column_stack([rng.random(n), rng.uniform(1, 2, n)])
    return rows, bowl(rows)


@pytest.mark.parametrize("kernel", ["matern32", "matern52", "rbf"])
def test_a_smooth_surface_is_learnt_in_seconds(kernel):
    rows, seconds = observed(40)
    posterior = Surrogate(kernel=kernel).posterior(rows, seconds, 1)
    unseen, truth = observed(200, seed=9)
    mean, deviation = posterior(unseen)
    assert np.sqrt(np.mean((mean - truth) ** 2)) < 0.05 * truth.std()
    assert (deviation < 0.2 * truth.std()).all()
    far = posterior(np.array([[30.0, 60.0]]))[1]
    assert far > 5 * deviation.max()


def test_the_public_codes_surrogate_is_the_textbook_formula():
    """Variance, length scale and noise 1, kernel exp(-r); the state and the seconds standardised."""
    rows, seconds = observed(12)
    mean, deviation = Surrogate(kernel="matern12", fitted=False, scaling="standard").posterior(rows, seconds, 1)(
        rows[:3] + 0.1
    )

    def scaled(r):
        return np.column_stack([r[:, 0], (r[:, 1] - rows[:, 1].mean()) / rows[:, 1].std()])

    def k(a, b):
        return np.exp(-np.linalg.norm(scaled(a)[:, None] - scaled(b)[None], axis=2))

    weights = np.linalg.inv(k(rows, rows) + np.eye(12))
    cross = k(rows[:3] + 0.1, rows)
    expected = seconds.mean() + seconds.std() * cross @ weights @ ((seconds - seconds.mean()) / seconds.std())
    variance = 1 - np.einsum("ij,jk,ik->i", cross, weights, cross)
    assert mean == pytest.approx(expected)
    assert deviation == pytest.approx(seconds.std() * np.sqrt(variance))


def test_fitting_draws_from_no_generator_but_its_own():
    rows, seconds = observed(15)
    np.random.seed(4)  # noqa: NPY002
    expected = np.random.random(3)  # noqa: NPY002
    np.random.seed(4)  # noqa: NPY002
    first = Surrogate().posterior(rows, seconds, 11)(rows)
    assert np.array_equal(np.random.random(3), expected)  # noqa: NPY002
    again = Surrogate().posterior(rows, seconds, 11)(rows)
    assert np.array_equal(first, again)


def test_hyper_parameters_can_be_taken_over():
    rows, seconds = observed(20)
    fitted = Surrogate().posterior(rows, seconds, 1)
    taken = Surrogate().posterior(rows, seconds, 2, like=fitted)
    assert np.allclose(taken(rows), fitted(rows))
    plain = Surrogate(fitted=False).posterior(rows, seconds, 2)
    assert not np.allclose(plain(rows), fitted(rows))


def test_posteriors_with_the_same_hyper_parameters_share_a_model_and_keep_their_observations(monkeypatch):
    """Incrementally: further observations under the same hyper-parameters are set in the model, which is not made again."""
    rows, seconds = observed(20)
    fitted = Surrogate().posterior(rows[:15], seconds[:15], 1)
    before = fitted(rows)
    monkeypatch.setattr(surrogate, "_modelled", None)
    taken = Surrogate().posterior(rows, seconds, 2, like=fitted)
    after = taken(rows)
    assert not np.allclose(after, before)
    assert np.array_equal(fitted(rows), before)
    assert np.array_equal(taken(rows), after)


def test_the_state_is_scaled_by_the_whole_job():
    """Two settings, seen in turn while the loss fell from 1 to 0.98 of a way to 0: the settings differ, not the loss.

    By the public code's scaling the loss alone explains as much of it.
    """
    rows = np.column_stack([np.tile([0.0, 1.0], 5), np.linspace(1.0, 0.98, 10)])
    seconds = np.tile([10.0, 30.0], 5)
    later = np.array([[0.0, 0.96], [1.0, 0.96]])
    found = {s: Surrogate(scaling=s).posterior(rows, seconds, 1)(later)[0] for s in ("range", "standard")}
    assert found["range"] == pytest.approx([10.0, 30.0], rel=0.02)
    assert abs(found["standard"] - [10, 30]).max() > abs(found["range"] - [10, 30]).max()


def test_the_logarithm_of_the_seconds_can_be_modelled():
    """Noise that doubles or halves the seconds: mean and deviation are those of the lognormal, and stay positive."""
    rng = np.random.default_rng(2)
    rows = np.column_stack([np.repeat([0.0, 1.0], 40), np.ones(80)])
    seconds = np.repeat([10.0, 1000.0], 40) * np.exp(rng.normal(0.0, 0.5, 80))
    mean, deviation = Surrogate(scale="log").posterior(rows, seconds, 1)(np.array([[0.0, 1.0], [1.0, 1.0]]))
    # The mean of 40 logarithms has a standard error of 0.5 / sqrt(40) = 0.08.
    assert np.log(mean) == pytest.approx(np.log([10, 1000]), abs=4 * 0.08)
    assert (deviation < 0.3 * mean).all()
    zeros = Surrogate(scale="log").posterior(rows, np.zeros(80), 1)(rows)
    assert np.isfinite(zeros).all()


def test_seconds_beyond_reason_are_cut():
    rows, seconds = observed(10)
    wild = np.append(seconds[:-1], 1e30)
    cut = Surrogate(clip=10.0).posterior(rows, wild, 1)(rows)
    tame = Surrogate(clip=10.0).posterior(rows, np.append(seconds[:-1], 10 * wild.min()), 1)(rows)
    assert np.array_equal(cut, tame)
    # Nothing is left to do under one of the settings: it must not cut all the others to nothing.
    done = Surrogate(clip=10.0).posterior(rows, np.append(seconds[:-1], 0.0), 1)(rows)
    assert done[0][:-1].mean() == pytest.approx(seconds[:-1].mean(), rel=0.2)


@pytest.mark.parametrize("seconds", [[5.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
def test_equal_observations_are_survived(seconds):
    rows = np.array([[0.0, 1.0], [0.5, 1.0], [1.0, 1.0]])
    mean, deviation = Surrogate().posterior(rows, np.array(seconds), 1)(rows)
    assert mean == pytest.approx(seconds)
    assert np.isfinite(deviation).all()


# -------------------------------------------------------------------------------------------------------------- acquisition


@given(st.floats(-100, 100), st.floats(0.1, 50), st.floats(-100, 100))
def test_expected_improvement_is_the_integral(mean, deviation, best):
    low = min(best, mean) - 12 * deviation
    expected, error = quad(
        lambda t: (best - t) * norm.pdf(t, mean, deviation), low, best, points=[mean] if mean < best else None
    )
    found = expected_improvement(np.array([mean]), np.array([deviation]), best)[0]
    assert found == pytest.approx(expected, abs=1e-6 * deviation + 10 * error)
    assert found >= max(best - mean, 0) - 1e-9 * abs(best - mean)


def test_improvement_without_doubt():
    mean, none = np.array([1.0, 3.0]), np.zeros(2)
    assert expected_improvement(mean, none, 2.0) == pytest.approx([1.0, 0.0])
    assert probability(mean, none, 2.0) == pytest.approx([1.0, 0.0])
    assert lower_bound(mean, none, 2.0).tolist() == [1.0, -1.0]


def test_improvement_scales_with_the_unit():
    """De-standardised: EI in seconds is EI in standard deviations times the seconds of one."""
    mean, deviation = np.array([0.3]), np.array([0.7])
    one = expected_improvement(mean, deviation, 0.1)
    assert expected_improvement(60 * mean + 500, 60 * deviation, 60 * 0.1 + 500) == pytest.approx(60 * one)


def test_the_alternatives_the_paper_names():
    mean, deviation = np.array([5.0, 4.0]), np.array([1.0, 0.1])
    assert probability(mean, deviation, 4.5) == pytest.approx([norm.cdf(-0.5), norm.cdf(5.0)])
    assert lower_bound(mean, deviation, 4.5) == pytest.approx([4.5 - 3.0, 4.5 - 3.8])


# ------------------------------------------------------------------------------------------------------------- maximisation


@pytest.mark.parametrize("waviness", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_row_is_that_of_brute_force(seed, waviness):
    """5 x 15 x 2 x 3 settings, far fewer of them drawn: the peak is found, and a rugged one to within the best hundredth."""
    made = encoding(*KNOBS[:5], threads=16)
    rng = np.random.default_rng(seed)
    centre, waves = rng.random(made.width), rng.normal(size=(made.width, 4))

    def score(rows):
        return -np.sum((rows - centre) ** 2, axis=1) + waviness * np.sin(5 * rows @ waves).sum(axis=1)

    everything = [
        made.row({"worker_count": w, "intra_threads": t, "inter_threads": 16 - t, "transfer_bits": b, "option/jit": o})
        for w, t, b, o in product(range(1, 6), range(1, 16), (16, 32), (0, 1, 2))
    ]
    true = score(np.array(everything))
    rows, scores = best_rows(score, made, np.empty((0, made.width)), np.random.default_rng(seed), draws=50, offspring=10)
    assert scores[0] >= (np.quantile(true, 0.99) if waviness else true.max() - 1e-9)
    assert scores == pytest.approx(score(rows))
    assert (np.diff(scores) <= 1e-7 * np.abs(scores).max()).all()
    assert len(np.unique(rows, axis=0)) == len(rows)
    again, _ = best_rows(score, made, np.empty((0, made.width)), np.random.default_rng(seed), draws=50, offspring=10)
    assert np.array_equal(rows, again)


@given(SEEDS)
def test_known_rows_are_left_out(seed):
    rows = np.random.default_rng(seed).choice([-0.0, 0.0, 0.5, 1.0], (40, 3))
    known = np.abs(rows[:7])
    expected = [row.tolist() for row in rows if row.tolist() not in known.tolist()]
    assert without(rows, known).tolist() == expected
    assert without(rows, np.empty((0, 3))).tolist() == rows.tolist()


# -------------------------------------------------------------------------------------------------------- costs, Section V

MORE = {"workers": ("a", "b", "c"), "servers": ("d", "e", "f")}


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({}, ""),
        (MORE, "TDR ODMR"),  # a server turned into a worker
        ({"workers": ("a",)}, "TDR"),
        ({"servers": ("c", "d")}, "ODMR"),
        ({"data_shares": (0.7, 0.3)}, "TDR"),
        ({"data_shares": (0.5, 0.5)}, ""),  # equal shares written out
        ({"model_shares": (0.4, 0.2, 0.2, 0.2)}, "ODMR"),
        ({"intra_threads": 4}, "SSR"),
        ({"options": (("fold", 1), ("jit", 2))}, "SSR"),
        ({"transfer_bits": 16}, "SSR"),
        ({"policy": "bsp"}, "SSR"),
        ({"loads": ((4,), (8,))}, "SSR"),
        ({**MORE, "intra_threads": 4}, "TDR ODMR SSR"),
        ({"workers": ("b", "a")}, ""),
    ],
)
def test_what_a_change_needs(change, needed):
    assert techniques(BASE, replace(BASE, **change)) == frozenset(needed.split())


def changed(*made):
    return [PastReconfiguration(frozenset(needed.split()), seconds) for needed, seconds in made]


def test_techniques_told_apart_add_up():
    """The union rule: a change that needs two techniques costs the sum of both."""
    seen = changed(("TDR", 2.0), ("ODMR TDR", 9.0), ("SSR", 1.0), ("SSR ODMR", 8.0))
    assert technique_seconds(seen) == pytest.approx({"TDR": 2.0, "ODMR": 7.0, "SSR": 1.0}, rel=1e-4)
    for needed, seconds in (("TDR SSR", 3.0), ("TDR ODMR SSR", 10.0), ("", 0.0)):
        assert change_seconds(seen, frozenset(needed.split())) == pytest.approx(seconds, rel=1e-4)


def test_what_always_comes_together_shares_its_cost():
    seen = changed(*[("TDR ODMR SSR", 12.0)] * 10)
    assert technique_seconds(seen) == pytest.approx(dict.fromkeys(TECHNIQUES, 4.0), rel=1e-4)
    assert change_seconds(seen, frozenset(TECHNIQUES)) == pytest.approx(12.0, rel=1e-4)
    assert change_seconds(seen, frozenset({"SSR"})) == pytest.approx(4.0, rel=1e-4)


def test_no_technique_costs_less_than_nothing():
    seen = changed(("TDR", 5.0), ("TDR SSR", 3.0))
    found = technique_seconds(seen)
    assert found["SSR"] == 0
    assert found["TDR"] == pytest.approx(4.0, rel=1e-4)


def test_nothing_is_known_to_cost_anything_before_the_first_change():
    assert change_seconds([], frozenset({"TDR"})) == 0.0


@pytest.mark.parametrize(
    ("parameters", "restart", "relocation"),
    [(109_372_904, 47, 12), (1_000_000, 13, 2), (654_968, 16, 2), (58_289_352, 40, 6)],
)
def test_what_relocating_takes_in_the_paper(parameters, restart, relocation):
    """Seconds per reconfiguration of Table V, baseline and TensorFlowOnline; parameters of Table II. What does not grow with
    the model is 14.1 s, and 1.9 s."""
    both, size = frozenset({"TDR", "ODMR"}), 4.0 * parameters
    assert published_seconds(both, size, "checkpoint") + 14.1 == pytest.approx(restart, rel=0.15)
    assert published_seconds(frozenset({"TDR"}), size, "checkpoint") == published_seconds(both, size, "checkpoint")
    assert published_seconds(both, size, "relocate") + 1.9 == pytest.approx(relocation, rel=0.2)
    assert published_seconds(frozenset({"TDR"}), size, "relocate") == 0
    assert published_seconds(frozenset({"SSR"}), size, "checkpoint") == 0
