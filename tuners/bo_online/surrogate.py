"""The surrogate of `tuners.bo_online`: a Gaussian process over <setting, state>, acquisition functions, their maximisation.

What is whose:

* GPy: the Gaussian process (`GPRegression`, its kernels and prior) and the optimiser of its hyper-parameters.
* emukit: `GPyModelWrapper` alone, for predictions without the noise of observation.
* Ours: the encoding of settings as rows, the restarts of the fit, expected improvement, probability of improvement and lower
  bound, and the search for the row of the highest score. emukit's acquisition functions take their incumbent from the data
  and know no state, but here the incumbent is the current setting at the *current* loss. emukit's optimisers search a box
  and round afterwards, which proposes settings that the model knows already; here whole numbers are rounded and options
  decided *before* a row is scored.

Rows are knobs scaled to [0, 1] by their range (logarithmic knobs in the logarithm), choices one-hot, and last the state of
the job: its loss, scaled by its first value and its target. The public code scales it by the losses so far; then a loss
that has hardly moved would separate observations that are alike.

GPy and emukit are imported at first use, because that takes seconds. GPy draws restarts from NumPy's global generator;
during a fit that generator has a seed of ours, and afterwards its old state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from tuners.bo_online.convergence import Form
from tuners.settings import BY_STALENESS, Choice, Integer, Knob, Scalar
from tuners.space import Space

__all__ = [
    "SURROGATES",
    "Encoding",
    "GaussianPosterior",
    "Surrogate",
    "best_rows",
    "expected_improvement",
    "lower_bound",
    "probability",
    "without",
]

_Floats = NDArray[np.float64]

_KERNELS = {"matern12": "Exponential", "matern32": "Matern32", "matern52": "Matern52", "rbf": "RBF"}
_WIDTH = 2.0  # of the confidence region on each side, in standard deviations
_ROUNDS, _PARENTS = 5, 10  # of local search, and the best rows that each round starts from


# ------------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class Encoding:
    """Settings as rows of numbers in [0, 1]: a column per option of a choice, and one per other knob."""

    space: Space
    threads: int | None = None  # sum of intra_threads and inter_threads, where both are free; None: not coupled

    @property
    def width(self) -> int:
        return sum(_columns(k) for k in self.space.knobs)

    def row(self, values: Mapping[str, Scalar]) -> _Floats:
        """The row of `values`; a value that its choice does not have (say, a lost node's role) sets none of its columns."""
        return np.array([cell for k in self.space.knobs for cell in _cells(k, values[k.name])])

    def values(self, row: _Floats) -> dict[str, Scalar]:
        """The values of the knobs that are nearest to a row, in range and of each knob's type: of a choice, the option with
        the largest number."""
        values, at = dict[str, Scalar](), 0
        for k in self.space.knobs:
            if isinstance(k, Choice):
                values[k.name] = k.options[int(np.argmax(row[at : at + len(k.options)]))]
            else:
                low, high = _ends(k)
                x = low + row[at] * (high - low)
                x = float(np.clip(np.exp(x) if k.log else x, k.low, k.high))
                values[k.name] = round(x) if isinstance(k, Integer) else x
            at += _columns(k)
        return values

    def spread(self, shares: _Floats) -> _Floats:
        """Rows at these `shares` of the knobs' ranges, [n, knobs] in [0, 1): uniform shares give uniform values."""
        parts = []
        for k, share in zip(self.space.knobs, shares.T, strict=True):
            if isinstance(k, Choice):
                parts.append(np.eye(len(k.options))[(share * len(k.options)).astype(int)])
                continue
            low, high = _ends(k)
            x = low + share * (high - low)
            if isinstance(k, Integer):  # half a unit more at both ends makes them as likely as their neighbours
                wide = np.log([k.low - 0.5, k.high + 0.5]) if k.log else np.array([k.low - 0.5, k.high + 0.5])
                x = wide[0] + share * (wide[1] - wide[0])
            parts.append(((x - low) / (high - low) if high > low else np.zeros_like(x))[:, None])
        return self.snap(np.hstack(parts))

    def snap(self, rows: _Floats) -> _Floats:
        """The nearest rows that are settings: in range, whole numbers rounded, one option per choice, threads coupled, and
        the base's staleness under a policy that it does not change."""
        parts, at = dict[str, _Floats](), 0
        for k in self.space.knobs:
            part = rows[:, at : at + _columns(k)]
            at += _columns(k)
            if isinstance(k, Choice):
                parts[k.name] = np.eye(len(k.options))[part.argmax(axis=1)]
            else:
                parts[k.name] = _snapped(k, part)
        self._couple(parts)
        self._leave_staleness(parts)
        return np.hstack(list(parts.values()))

    def _couple(self, parts: dict[str, _Floats]) -> None:
        """Set inter_threads to the cores that intra_threads leaves, where both are free whole numbers."""
        intra, inter = self.space.knob("intra_threads"), self.space.knob("inter_threads")
        if self.threads is None or not isinstance(intra, Integer) or not isinstance(inter, Integer):
            return
        ends = [_ends(k) for k in (intra, inter)]
        counts = [low + parts[k.name] * (high - low) for k, (low, high) in zip((intra, inter), ends, strict=True)]
        used = np.rint(np.exp(counts[0]) if intra.log else counts[0])
        rest = np.clip(self.threads - used, inter.low, inter.high)
        low, high = ends[1]
        parts[inter.name] = ((np.log(rest) if inter.log else rest) - low) / (high - low) if high > low else counts[1] * 0

    def _leave_staleness(self, parts: dict[str, _Floats]) -> None:
        """Set staleness to that of the base where the row's policy knows none: rows that differ only in it are one setting.
        Of recorded runs, each has the staleness that it was recorded with."""
        policy, bound = self.space.knob("policy"), self.space.knob("staleness")
        if isinstance(policy, Choice) and bound is not None and not self.space.recorded:
            unknown = parts["policy"] @ np.array([float(name not in BY_STALENESS) for name in policy.options]) > 0
            parts["staleness"][unknown] = _cells(bound, bound.nearest(self.space.base.staleness))


def _cells(knob: Knob, value: Scalar) -> list[float]:
    """The columns of one value of a knob."""
    if isinstance(knob, Choice):
        return [float(type(o) is type(value) and o == value) for o in knob.options]
    low, high = _ends(knob)
    x = float(np.log(max(float(value), knob.low))) if knob.log else float(value)
    return [(x - low) / (high - low) if high > low else 0.0]


def _columns(knob: Knob) -> int:
    return len(knob.options) if isinstance(knob, Choice) else 1


def _ends(knob: Knob) -> tuple[float, float]:
    """The ends of a numeric knob's column before scaling."""
    if isinstance(knob, Choice):
        return 0.0, 1.0
    return (float(np.log(knob.low)), float(np.log(knob.high))) if knob.log else (float(knob.low), float(knob.high))


def _snapped(knob: Knob, part: _Floats) -> _Floats:
    """One column, clipped and, for whole numbers, rounded."""
    clipped = np.clip(part, 0.0, 1.0)
    low, high = _ends(knob)
    if not isinstance(knob, Integer) or not high > low:
        return clipped if high > low else np.zeros_like(clipped)
    x = low + clipped * (high - low)
    whole = np.clip(np.rint(np.exp(x) if knob.log else x), knob.low, knob.high)
    return ((np.log(whole) if knob.log else whole) - low) / (high - low)


# -------------------------------------------------------------------------------------------------------- Gaussian process


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The options of the Gaussian process; `SURROGATES` has those of the paper and of its public code."""

    kernel: Literal["matern12", "matern32", "matern52", "rbf"] = "matern52"
    relevance: bool = True  # a length scale per column, drawn to `length` by a prior
    fitted: bool = True  # hyper-parameters of highest likelihood; else variance, length scale and noise are 1
    least_noise: float = 1e-4  # of a fit, as a share of the variance of the observations
    length: float = 1.0  # the median of the prior of length scales, in ranges of a knob
    restarts: int = 2
    iterations: int = 30  # of the optimiser, per restart
    clip: float = 1e7  # seconds above this multiple of the least positive ones are cut to it (the code's figure)
    scale: Literal["linear", "log"] = "linear"  # the model is of the seconds, as in paper and code, or of their logarithm
    scaling: Literal["range", "standard"] = (
        "range"  # of the state: by its values at end and beginning, or by those seen so far (the code's)
    )

    def posterior(
        self,
        rows: _Floats,
        seconds: _Floats,
        seed: int,
        *,
        span: tuple[float, float] = (0.0, 1.0),
        like: GaussianPosterior | None = None,
    ) -> GaussianPosterior:
        """The posterior after the observations `seconds` [n] at `rows` [n, columns], with the state in the last column.

        `span` is the state at the end and at the beginning of the job. Hyper-parameters are those of `like` where it is
        given, else fitted.
        """
        return GaussianPosterior(self, rows, seconds, seed, span, like)


SURROGATES: dict[Form, Surrogate] = {
    "ours": Surrogate(scale="log", least_noise=0.01, length=2.0),
    "paper": Surrogate(),
    "code": Surrogate(kernel="matern12", relevance=False, fitted=False, scaling="standard"),
}
"""The surrogate of each form. The paper names no kernel and no prior: these are ours in its form, too."""


class GaussianPosterior:
    """Mean and standard deviation of the remaining seconds, without the noise of observation."""

    __slots__ = ("_log", "_offset", "_rows", "_scale", "_shared", "_state_offset", "_state_scale", "_targets")

    def __init__(
        self,
        surrogate: Surrogate,
        rows: _Floats,
        seconds: _Floats,
        seed: int,
        span: tuple[float, float],
        like: GaussianPosterior | None,
    ) -> None:
        least = seconds[seconds > 0].min(initial=np.inf)
        clipped = np.minimum(seconds, surrogate.clip * least)
        self._log = surrogate.scale == "log"
        if self._log:
            clipped = np.log(np.maximum(clipped, least if np.isfinite(least) else 1.0))
        self._offset, self._scale = _standard(clipped)
        low, high = span
        whole = surrogate.scaling == "range" and high > low
        self._state_offset, self._state_scale = (low, high - low) if whole else _standard(rows[:, -1])
        self._rows, self._targets = self._scaled(rows), ((clipped - self._offset) / self._scale)[:, None]
        self._shared: _Shared = like._shared if like is not None else self._fitted(surrogate, seed)

    def _fitted(self, surrogate: Surrogate, seed: int) -> _Shared:
        with _lent_generator(seed):
            return _Shared(_modelled(surrogate, self._rows, self._targets), self)

    def __call__(self, rows: _Floats) -> tuple[_Floats, _Floats]:
        """Mean and standard deviation in seconds at `rows` [n, columns]: two arrays [n]."""
        mean, variance = self._shared.model_of(self).predict_noiseless(self._scaled(rows))
        level = self._offset + self._scale * mean[:, 0]
        deviation = self._scale * np.sqrt(np.maximum(variance[:, 0], 0.0))
        if not self._log:
            return level, deviation
        deviation = np.minimum(deviation, 3.0)  # beyond that the mean of a lognormal has no meaning
        middle = np.exp(level + deviation**2 / 2)
        return middle, middle * np.sqrt(np.expm1(deviation**2))

    def _scaled(self, rows: _Floats) -> _Floats:
        return np.column_stack([rows[:, :-1], (rows[:, -1] - self._state_offset) / self._state_scale])


def _standard(values: _Floats) -> tuple[float, float]:
    spread = float(values.std())
    return float(values.mean()), spread if spread > 0 else 1.0


class _Shared:
    """A model with the hyper-parameters of one fit, for all posteriors that have them: each has observations of its own. To
    set these takes a fifth of the time of a new GPy model, whose parameters and their observers would be made again."""

    __slots__ = ("_holder", "_model")

    def __init__(self, model: Any, holder: GaussianPosterior) -> None:
        self._model, self._holder = model, holder

    def model_of(self, posterior: GaussianPosterior) -> Any:
        """The emukit model with the observations of `posterior`."""
        if self._holder is not posterior:
            self._model.set_data(posterior._rows, posterior._targets)
            self._holder = posterior
        return self._model


def _modelled(surrogate: Surrogate, rows: _Floats, targets: _Floats) -> Any:
    """The emukit model of standardised observations, fitted if so wanted."""
    import GPy
    from emukit.model_wrappers import GPyModelWrapper

    kernel = getattr(GPy.kern, _KERNELS[surrogate.kernel])(rows.shape[1], ARD=surrogate.relevance and surrogate.fitted)
    model = GPy.models.GPRegression(rows, targets, kernel, noise_var=0.1 if surrogate.fitted else 1.0)
    if surrogate.fitted:
        kernel.lengthscale.set_prior(GPy.priors.LogGaussian(np.log(surrogate.length), 1.0), warning=False)
        kernel.variance.constrain_bounded(0.05, 20.0, warning=False)
        model.likelihood.variance.constrain_bounded(surrogate.least_noise, 2.0, warning=False)
        _fit(model, surrogate)
    return GPyModelWrapper(model)


def _fit(model: Any, surrogate: Surrogate) -> None:
    """Set a GPy model to its likeliest hyper-parameters, found from its present ones and from random ones.

    GPy's own restarts print a warning when one fails; a start whose matrix cannot be factorised is no error here.
    """
    found = []
    for attempt in range(surrogate.restarts):
        if attempt:
            model.randomize()
        with contextlib.suppress(np.linalg.LinAlgError, ValueError), np.errstate(all="ignore"):
            model.optimize(max_iters=surrogate.iterations)
            found.append((float(model.objective_function()), attempt, model.param_array.copy()))
    likeliest = min((f for f in found if np.isfinite(f[0])), default=None)
    if likeliest is not None:
        # Three digits, because the last ones differ between processors, and must not change a decision.
        model[:] = [float(f"{x:.2e}") for x in likeliest[2]]


@contextlib.contextmanager
def _lent_generator(seed: int) -> Iterator[None]:
    """NumPy's global generator with a seed of ours; afterwards it has its old state."""
    kept = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(kept)  # noqa: NPY002


# ------------------------------------------------------------------------------------------------------------ acquisition


def expected_improvement(mean: _Floats, deviation: _Floats, best: float, *, log: bool = False) -> _Floats:
    """E[max(best - T, 0)] for T ~ N(mean, deviation), in the unit of the three: larger is better.

    With `log`, T is lognormal with that mean and deviation, all positive: it cannot fall below zero.
    """
    if log and not best > 0:  # no time is left, by the last triple: none can be saved
        return np.zeros_like(mean)
    if log:
        spread = np.sqrt(np.log1p((deviation / mean) ** 2))
        z = _standardised(np.log(mean) - spread**2 / 2, spread, float(np.log(best)))
        gained: _Floats = best * ndtr(z) - mean * ndtr(z - spread)
        return np.maximum(gained, 0.0)
    z = _standardised(mean, deviation, best)
    found: _Floats = (best - mean) * ndtr(z) + deviation * _density(z)
    return found


def probability(mean: _Floats, deviation: _Floats, best: float) -> _Floats:
    """P(T < best), without a unit: larger is better."""
    found: _Floats = ndtr(_standardised(mean, deviation, best))
    return found


def _density(z: _Floats) -> _Floats:
    """The density of the standard normal distribution, as `scipy.stats.norm.pdf`, which takes half a second to import."""
    found: _Floats = np.exp(-(z**2) / 2.0) / np.sqrt(2 * np.pi)
    return found


def _standardised(mean: _Floats, deviation: _Floats, best: float) -> _Floats:
    """By how many deviations `best` lies above the mean, at most 40: the density is zero there in floats."""
    off = best - mean
    return np.clip(np.divide(off, deviation, out=np.copysign(np.inf, off), where=deviation > 0), -40.0, 40.0)


def lower_bound(mean: _Floats, deviation: _Floats, best: float) -> _Floats:
    """How far the lower end of the confidence region lies below `best`: larger is better. The order is that of GP-UCB."""
    return best - (mean - _WIDTH * deviation)


# ----------------------------------------------------------------------------------------------------------- maximisation


def best_rows(
    score: Callable[[_Floats], _Floats],
    encoding: Encoding,
    starts: _Floats,
    rng: np.random.Generator,
    *,
    draws: int = 1000,
    offspring: int = 20,
) -> tuple[_Floats, _Floats]:
    """Rows of high score and their scores, best first, no row twice: uniform draws, then local search from the best rows.

    `starts` [m, width] are further rows to start from. Each round moves about a third of the knobs of each of the best rows.
    """
    knobs = len(encoding.space.knobs)
    rows = np.vstack([encoding.snap(starts), encoding.spread(rng.random((draws, knobs)))])
    rows = rows[_first_of_each(rows)]
    scores = score(rows)
    for _ in range(_ROUNDS):
        best = rows[_descending(scores)[:_PARENTS]]
        moved = encoding.snap(_moved(encoding, np.repeat(best, offspring, axis=0), rng))
        both, scores = np.vstack([rows, moved]), np.concatenate([scores, score(moved)])
        first = _first_of_each(both)
        rows, scores = both[first], scores[first]
    order = _descending(scores)
    return rows[order], scores[order]


def _first_of_each(rows: _Floats) -> NDArray[np.intp]:
    """Where each row comes first, in the order of the rows: as `np.unique`, which takes three times as long."""
    order = np.lexsort(rows.T[::-1])
    new = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    return order[np.append(True, new)] if len(order) else order


def without(rows: _Floats, known: _Floats) -> _Floats:
    """The rows that are none of `known`."""
    seen = {row.tobytes() for row in known + 0.0}  # which makes of -0 a 0
    return rows[[row.tobytes() not in seen for row in rows + 0.0]]


def _descending(scores: _Floats) -> NDArray[np.intp]:
    """The order of falling scores. Scores that agree in eight digits, relative to the largest, keep their order."""
    unit = float(np.abs(scores).max(initial=0.0)) or 1.0
    return np.argsort(-np.round(scores / unit, 8), kind="stable")


def _moved(encoding: Encoding, rows: _Floats, rng: np.random.Generator) -> _Floats:
    """Each row with some knobs moved: numbers by a little (whole numbers by about one or more), choices to any option."""
    counts = [_columns(k) for k in encoding.space.knobs]
    steps = [_step(k) for k in encoding.space.knobs]
    chosen = rng.random((len(rows), len(counts))) < 1 / 3
    chosen[np.arange(len(rows)), rng.integers(len(counts), size=len(rows))] = True
    noise = rng.normal(size=rows.shape) * np.repeat(steps, counts)
    return rows + np.where(np.repeat(chosen, counts, axis=1), noise, 0.0)


def _step(knob: Knob) -> float:
    """The standard deviation of a move of one knob's column."""
    if isinstance(knob, Choice):
        return 2.0
    return max(0.1, 1.0 / (knob.high - knob.low)) if isinstance(knob, Integer) and knob.high > knob.low else 0.1
