"""Sequential Monte Carlo over the parameters of one part of the bespoke model (Wood et al., "A new approach to probabilistic
programming inference", 2014, to which Dalibard et al. point).

Particles are weighted by the likelihood of the observations. When fewer than half of them are effective, they are resampled
and moved by Metropolis-Hastings steps of the size of their spread. One evaluation can be more informative than any particle
of the prior, so the likelihood is introduced in steps; each step is the largest that leaves half of the particles effective.
``inference="importance"`` is the framework's public code: particles of the prior are weighted, never resampled, never moved,
and it takes 50,000 of them.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_bo.parts import Evidence, Part, Paths, draw_paths, log_likelihood, predict, trusted

__all__ = ["Inference", "Posterior"]

_Floats = NDArray[np.float64]
Inference = Literal["smc", "importance"]

_LEAST = 10  # fewer effective particles than this raise a warning
_PASSES = 4  # of inference and removal of outliers
_BATCH = 512  # particles whose matrices are in memory at once
_STEPS = 60  # of tempering; the last takes all that is left


class Posterior:
    """The posterior of one part: weighted particles. Deterministic for one `rng`.

    `effective` has the effective sample size after each call of `observe`, before resampling; `accepted` has the share of
    accepted moves of each round. Fewer than ten effective particles raise a RuntimeWarning.
    """

    def __init__(
        self, part: Part, rng: np.random.Generator, count: int = 256, inference: Inference = "smc", moves: int = 12
    ) -> None:
        self.part, self.rng, self.count, self.inference, self.moves = part, rng, count, inference, moves
        self.effective: list[float] = []
        self.accepted: list[float] = []
        self._low, self._high = np.array([p.ends for p in part.priors]).T
        self.particles: _Floats = rng.uniform(self._low, self._high, (count, len(self._low)))
        self._logs = np.zeros(count)
        none = np.zeros(0)
        self.evidence = Evidence(np.zeros((0, 1)), none, none)
        self._likelihood = np.zeros(count)
        self.trusted: NDArray[np.bool_] = np.zeros(0, bool)  # of the evidence, [n]: not an outlier

    @property
    def weights(self) -> _Floats:
        """The weights of the particles, [N], with sum 1."""
        return _normalised(self._logs)

    def observe(self, evidence: Evidence) -> None:
        """Replace the evidence by `evidence`: the old observations, then new ones. Outliers are ignored."""
        if not len(evidence):
            return
        # New observations are trusted first: before the particles have moved, a correct one can look like an outlier.
        known = np.concatenate([self.trusted, np.ones(len(evidence) - len(self.trusted), bool)])
        for _ in range(_PASSES):
            self.trusted = known
            self._temper(evidence.without(~known))
            known = trusted(self.part, self.sample(64, np.random.default_rng(0)), evidence, known)
            if (known == self.trusted).all():
                break
        if self.effective[-1] < _LEAST:
            warnings.warn(
                f"Only {self.effective[-1]:.1f} of {self.count} particles count for {self.part.name!r}: "
                "use more of them, or inference='smc'.",
                RuntimeWarning,
                stacklevel=2,
            )

    def sample(self, count: int, rng: np.random.Generator) -> _Floats:
        """Particles in proportion to their weights, in random order, [count, columns]."""
        found: _Floats = self.particles[rng.permutation(_systematic(self.weights, count, 0.5))]
        return found

    def draw(self, count: int, rng: np.random.Generator) -> Paths:
        """`count` functions."""
        return draw_paths(self.part, self.sample(count, rng), self.evidence, rng)

    def predict(self, particles: _Floats, inputs: _Floats) -> tuple[_Floats, _Floats]:
        """Mean and standard deviation at `inputs` [m, d] under each of `particles`, [n, m]."""
        return predict(self.part, particles, self.evidence, inputs)

    def values(self, name: str) -> _Floats:
        """The values of one parameter, one per particle, [N]; their weights are `weights`."""
        column = [p.name for p in self.part.priors].index(name)
        found: _Floats = self.part.values(self.particles)[:, column]
        return found

    # --------------------------------------------------------------------------------------------------------- tempering

    def _temper(self, evidence: Evidence) -> None:
        """Move from the current evidence to `evidence` through a geometric bridge."""
        before, old = self.evidence, self._likelihood
        new = self._log_likelihood(self.particles, evidence)
        reached, least = 0.0, np.inf
        for step in range(_STEPS):
            left = 1.0 - reached
            gain = left if self.inference == "importance" or step == _STEPS - 1 else self._step(new - old, left)
            self._logs = self._logs + gain * (new - old)
            reached = 1.0 if gain == left else reached + gain
            least = min(least, self._effective()) if reached == 1.0 else least
            if self.inference == "smc" and self._effective() <= 0.5 * self.count * (1 + 1e-6):
                old, new = self._rejuvenate(before, evidence, old, new, reached)
            if reached == 1.0:
                break
        self.evidence, self._likelihood = evidence, new
        self.effective.append(least)

    def _step(self, gain: _Floats, left: float) -> float:
        """The largest step that leaves half of the particles effective."""

        def enough(step: float) -> bool:
            return _effective(_normalised(self._logs + step * gain)) >= 0.5 * self.count

        if enough(left):
            return left
        low, high = 0.0, left
        for _ in range(30):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if enough(middle) else (low, middle)
        return max(low, 1e-6 * left)

    def _rejuvenate(
        self, before: Evidence, evidence: Evidence, old: _Floats, new: _Floats, reached: float
    ) -> tuple[_Floats, _Floats]:
        """Resample, then move under the likelihood reached so far. Returns both log likelihoods of the new particles."""
        chosen = _systematic(self.weights, self.count, float(self.rng.uniform()))
        at, old, new = self.particles[chosen], old[chosen], new[chosen]
        spread = np.cov(self.particles, rowvar=False, aweights=self.weights) + 1e-12 * np.eye(at.shape[1])
        factor = np.linalg.cholesky(spread) * 2.38 / np.sqrt(at.shape[1])
        for _ in range(self.moves):
            size = self.rng.choice([1.0, 0.5, 0.2], (self.count, 1))
            there = at + size * self.rng.standard_normal(at.shape) @ factor.T
            inside = ((there >= self._low) & (there <= self._high)).all(1)
            there = np.where(inside[:, None], there, at)
            was = self._log_likelihood(there, before) if reached < 1 else old
            now = self._log_likelihood(there, evidence)
            gain = (1 - reached) * (was - old) + reached * (now - new)
            taken = inside & (np.log(self.rng.uniform(size=self.count)) < gain)
            at, old, new = np.where(taken[:, None], there, at), np.where(taken, was, old), np.where(taken, now, new)
            self.accepted.append(float(taken.mean()))
        self.particles, self._logs = at, np.zeros(self.count)
        return old, new

    def _effective(self) -> float:
        return _effective(self.weights)

    def _log_likelihood(self, particles: _Floats, evidence: Evidence) -> _Floats:
        parts = [log_likelihood(self.part, p, evidence) for p in np.split(particles, range(_BATCH, len(particles), _BATCH))]
        return np.concatenate(parts)


def _normalised(logs: _Floats) -> _Floats:
    weights = np.exp(logs - logs.max())
    found: _Floats = weights / weights.sum()
    return found


def _effective(weights: _Floats) -> float:
    """The effective sample size: 1 / sum of squared weights."""
    return float(1.0 / (weights**2).sum())


def _systematic(weights: _Floats, count: int, offset: float) -> NDArray[np.intp]:
    """Indices of `count` particles in proportion to their weights, by systematic resampling."""
    marks = (np.arange(count) + offset) / count
    return np.minimum(np.searchsorted(np.cumsum(weights), marks), len(weights) - 1)
