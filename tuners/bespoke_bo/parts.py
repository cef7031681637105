"""The declarative layer of the bespoke model: quantities that are observed separately, each a parametric mean plus a
Gaussian process (Dalibard et al., "Tuning the Scheduling of Distributed Stochastic Gradient Descent with Bayesian
Optimization", Section 3).

A `Part` says what a quantity depends on. Everything here is computed for many particles at once; a particle holds values of
a part's parameters. The Gaussian processes use GPy's Matérn-5/2 kernel (the public framework's default), evaluated on the
scaled distances of all particles together, because one GPy model per particle costs more than everything else; conditioning
is batched Cholesky. Priors are uniform, as in all published examples of the framework, some in the logarithm.

A forward draw is a function (Wilson et al., "Efficiently sampling functions from Gaussian process posteriors", 2020): a draw
of the prior from random Fourier features, corrected by the observations. All values of one draw are therefore drawn jointly,
above all the times of machines that share a type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Evidence", "Part", "Paths", "Prior", "draw_paths", "log_likelihood", "predict", "trusted"]

_Floats = NDArray[np.float64]
_JITTER = 1e-8  # of a kernel's variance
_FAR = 7.0  # standard deviations beyond which an observation is an outlier
_DOUBT = 1e3  # factor on the noise of an outlier


@dataclass(frozen=True, slots=True)
class Prior:
    """A parameter with a uniform prior, in its logarithm if `log`. Raises ValueError for an empty range."""

    name: str
    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and not self.low > 0):
            raise ValueError(
                f"Prior of {self.name!r} runs from {self.low} to {self.high}: low must be less than high, positive if log."
            )

    @property
    def ends(self) -> tuple[float, float]:
        """The range of a particle's column, a logarithm if `log`."""
        return (float(np.log(self.low)), float(np.log(self.high))) if self.log else (self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A quantity y(x) = mean(x) + scale(x) g(x) + noise, with g a Gaussian process.

    N particles, n inputs of d numbers each.
    """

    name: str
    parameters: tuple[Prior, ...]  # of the mean
    mean: Callable[[_Floats, _Floats], _Floats]  # (parameters [N, p], inputs [.., n, d]) -> [N, n]
    features: Callable[[_Floats, _Floats], _Floats]  # (inputs, mean [N, n]) -> [N or 1, n, width], the inputs of g
    width: int
    amplitude: Prior  # standard deviation of g
    length: Prior  # one length scale for all features
    noise: Prior  # standard deviation, times the `spread` of the evidence
    floor: float | None = None  # scale(x) is mean(x) + floor; None: it is 1

    @property
    def priors(self) -> tuple[Prior, ...]:
        """The columns of a particle, in order."""
        return (*self.parameters, self.amplitude, self.length, self.noise)

    def values(self, particles: _Floats) -> _Floats:
        """Parameter values, from particles [N, columns], some of which are logarithms."""
        return np.where([p.log for p in self.priors], np.exp(particles), particles)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations of a part: `values` [n] at `inputs` [n, d]; noise is the part's times `spread` [n]."""

    inputs: _Floats
    values: _Floats
    spread: _Floats

    def __len__(self) -> int:
        return len(self.values)

    def without(self, outliers: NDArray[np.bool_]) -> Evidence:
        """The same evidence with almost no weight on `outliers` [n]."""
        return Evidence(self.inputs, self.values, np.where(outliers, self.spread * _DOUBT, self.spread))


# ------------------------------------------------------------------------------------------------------ Gaussian processes


@cache
def _matern() -> Any:
    import GPy

    return GPy.kern.Matern52(1)


def _kernel(one: _Floats, other: _Floats, length: _Floats) -> _Floats:
    """Correlations [N, n, m] of features [N, n, f] and [N, m, f] under length scales [N]."""
    squared = ((one[:, :, None, :] - other[:, None, :, :]) ** 2).sum(-1)
    found: _Floats = _matern().K_of_r(np.sqrt(squared) / length[:, None, None])
    return found


@dataclass(frozen=True, slots=True)
class _At:
    """A part's mean [N, n], features [N, n, f] and scale [N, n] at some inputs, for N particles."""

    mean: _Floats
    features: _Floats
    scale: _Floats


def _at(part: Part, values: _Floats, inputs: _Floats) -> _At:
    mean = part.mean(values[:, : len(part.parameters)], inputs)
    features = part.features(inputs, mean)
    features = np.broadcast_to(features, (len(values), *features.shape[1:]))
    return _At(mean, features, np.ones_like(mean) if part.floor is None else mean + part.floor)


def _shape(values: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Amplitude, length scale and noise of N particles."""
    return values[:, -3], values[:, -2], values[:, -1]


def _factor(part: Part, values: _Floats, evidence: Evidence) -> tuple[_At, _Floats]:
    """The part at the evidence, and the Cholesky factor [N, n, n] of the covariance of the observations."""
    at = _at(part, values, evidence.inputs)
    amplitude, length, noise = _shape(values)
    scale = at.scale * amplitude[:, None]
    covariance = _kernel(at.features, at.features, length) * scale[:, :, None] * scale[:, None, :]
    diagonal = np.arange(len(evidence))
    covariance[:, diagonal, diagonal] += (noise[:, None] * evidence.spread) ** 2 + _JITTER * scale**2
    return at, np.asarray(np.linalg.cholesky(covariance), np.float64)


def log_likelihood(part: Part, particles: _Floats, evidence: Evidence) -> _Floats:
    """The logarithm of the density of the evidence under each particle, [N]."""
    if not len(evidence):
        return np.zeros(len(particles))
    at, factor = _factor(part, part.values(particles), evidence)
    white = np.linalg.solve(factor, (evidence.values - at.mean)[:, :, None])[:, :, 0]
    logarithms = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(1)
    found: _Floats = -0.5 * (white**2).sum(1) - logarithms - 0.5 * len(evidence) * np.log(2 * np.pi)
    return found


def predict(part: Part, particles: _Floats, evidence: Evidence, inputs: _Floats) -> tuple[_Floats, _Floats]:
    """Mean and standard deviation [N, m] of the quantity at `inputs` [m, d] under each particle, without noise."""
    values = part.values(particles)
    amplitude, length, _ = _shape(values)
    there = _at(part, values, inputs)
    scale = there.scale * amplitude[:, None]
    if not len(evidence):
        return there.mean, scale
    at, factor = _factor(part, values, evidence)
    cross = _kernel(at.features, there.features, length) * (at.scale * amplitude[:, None])[:, :, None] * scale[:, None, :]
    white = np.linalg.solve(factor, np.concatenate([cross, (evidence.values - at.mean)[:, :, None]], axis=2))
    mean = there.mean + (white[:, :, :-1] * white[:, :, -1:]).sum(1)
    return mean, np.sqrt(np.maximum(scale**2 - (white[:, :, :-1] ** 2).sum(1), 0.0))


def trusted(part: Part, particles: _Floats, evidence: Evidence, before: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which observations are not outliers, [n]; the search starts from the answer `before`.

    An outlier is more than seven standard deviations from the prediction of all trusted observations, in the median over
    particles. The worst is removed first, because it spoils the predictions for its neighbours. At most half are removed.
    """
    values = part.values(particles)
    noise = (_shape(values)[2][:, None] * evidence.spread) ** 2
    found = before.copy()
    for _ in range(len(evidence) // 2 + 1):
        at, factor = _factor(part, values, evidence.without(~found))
        inverse = np.linalg.inv(factor)
        precision = np.swapaxes(inverse, 1, 2) @ inverse
        own = np.diagonal(precision, axis1=1, axis2=2)
        residual = (precision @ (evidence.values - at.mean)[:, :, None])[:, :, 0] / own
        # The variance of the prediction by the others, with the observation's own noise, not that of an outlier.
        variance = np.maximum(1 / own - np.where(found, 0.0, noise * (_DOUBT**2 - 1)), noise)
        far = np.median(residual**2 / variance, axis=0)
        found = found | (far < _FAR**2)
        worst = int(np.argmax(np.where(found, far, 0.0)))
        if far[worst] < _FAR**2 or (~found).sum() >= len(evidence) // 2:
            break
        found[worst] = False
    return found


# ------------------------------------------------------------------------------------------------------------ forward draws


@dataclass(frozen=True, slots=True)
class Paths:
    """Draws of a part as functions, one per particle."""

    part: Part
    values: _Floats  # [N, columns]
    frequencies: _Floats  # [N, F, f]
    phases: _Floats  # [N, F]
    weights: _Floats  # [N, F]
    seen: _At | None  # at the evidence
    pulled: _Floats  # [N, n]: covariance^-1 (observed - drawn)

    def __call__(self, inputs: _Floats) -> _Floats:
        """The draws [N, m] at `inputs` [m, d], or [N, m, d] with inputs per draw."""
        there = _at(self.part, self.values, inputs)
        return there.mean + there.scale * self._residual(there)

    def some(self, rows: slice) -> Paths:
        """The draws of some rows."""
        seen = self.seen and _At(self.seen.mean[rows], self.seen.features[rows], self.seen.scale[rows])
        values, frequencies, phases = self.values[rows], self.frequencies[rows], self.phases[rows]
        return Paths(self.part, values, frequencies, phases, self.weights[rows], seen, self.pulled[rows])

    def _residual(self, there: _At) -> _Floats:
        amplitude, length, _ = _shape(self.values)
        found = amplitude[:, None] * self._waves(there.features)
        if self.seen is not None:
            cross = _kernel(there.features, self.seen.features, length) * (amplitude**2)[:, None, None]
            found = found + (cross @ (self.seen.scale * self.pulled)[:, :, None])[:, :, 0]
        return found

    def _waves(self, features: _Floats) -> _Floats:
        """The prior's draws, of unit variance, [N, m]."""
        waves = np.cos(np.einsum("nmf,nkf->nmk", features, self.frequencies) + self.phases[:, None, :])
        found: _Floats = np.sqrt(2 / self.phases.shape[1]) * np.einsum("nmk,nk->nm", waves, self.weights)
        return found


_WAVES = 128  # random Fourier features of a draw


def draw_paths(part: Part, particles: _Floats, evidence: Evidence, rng: np.random.Generator) -> Paths:
    """One function per row of `particles` [N, columns], given the evidence.

    A Matérn-5/2 process has Student-t frequencies of 5 degrees of freedom.
    """
    values = part.values(particles)
    count, length = len(values), _shape(values)[1]
    normal = rng.standard_normal((count, _WAVES, part.width)) / length[:, None, None]
    frequencies = normal / np.sqrt(rng.chisquare(5, (count, _WAVES, 1)) / 5)
    phases = rng.uniform(0, 2 * np.pi, (count, _WAVES))
    weights = rng.standard_normal((count, _WAVES))
    noise = rng.standard_normal((count, len(evidence)))
    prior = Paths(part, values, frequencies, phases, weights, None, np.zeros((count, 0)))
    if not len(evidence):
        return prior
    at, factor = _factor(part, values, evidence)
    drawn = at.mean + at.scale * prior._residual(at) + noise * values[:, -1:] * evidence.spread
    white = np.linalg.solve(factor, (evidence.values - drawn)[:, :, None])
    pulled = np.linalg.solve(np.swapaxes(factor, 1, 2), white)[:, :, 0]
    return Paths(part, values, frequencies, phases, weights, at, pulled)
