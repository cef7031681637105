"""OpenTuner's search: a bandit chooses among search techniques by how often each found a new best point.

Ansel et al. 2014, Section 4.2. The credit of a technique is the area under the curve of its successes, in which late ones
count more, plus an allowance for techniques with few uses. The techniques are of the kinds of OpenTuner's default ensemble:
differential evolution, and greedy mutation, uniform and normal. Its simplex search needs more initial points than our
searches have in all; random draws replace it. The techniques see one row of numbers in [0, 1] per point.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuners.bo_online.surrogate import Encoding
from tuners.search.searchers import Point, TriedPoint
from tuners.settings import Scalar
from tuners.space import Space

__all__ = ["Bandit", "area_under_curve"]

_Floats = NDArray[np.float64]

_EXPLORATION = 0.05  # C, the weight of the allowance
_WINDOW = 500  # number of uses that count
_MUTATED = 0.1  # share of the columns that a mutation changes, at least one
_SPREAD = 0.1  # standard deviation of a normal mutation
_DRAWS = 10  # at most, for a point that has not been tried
_POPULATION = 10  # of differential evolution: this many of the latest points


class Bandit:
    """A searcher, see `tuners.search.searchers`: larger scores are better. It never stops proposing."""

    def __init__(self, space: Space, seed: Sequence[int]) -> None:
        self._encoding = Encoding(space)
        self._rng = np.random.default_rng(list(seed))
        self._results: list[tuple[_Floats, TriedPoint]] = []
        self._used: deque[tuple[str, bool]] = deque(maxlen=_WINDOW)  # technique, and whether it found a new best
        self._technique = ""

    def propose(self) -> Point | None:
        self._technique = self._chosen()
        tried = [r.values for _, r in self._results]
        for _ in range(_DRAWS):
            row = _TECHNIQUES[self._technique](self._encoding, self._results, self._rng)
            point = self._encoding.values(self._encoding.snap(row[None])[0])
            if point not in tried:
                break
        return point

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        better = all(score > r.score for _, r in self._results)
        if self._technique:
            self._used.append((self._technique, better))
        self._results.append((self._encoding.row(values), TriedPoint(dict(values), score)))

    def _chosen(self) -> str:
        """The technique of the highest credit; unused techniques come first, in random order."""
        uses = {t: [better for name, better in self._used if name == t] for t in _TECHNIQUES}
        fresh = [t for t, used in uses.items() if not used]
        if fresh:
            return fresh[int(self._rng.integers(len(fresh)))]
        allowance = 2 * math.log2(len(self._used))
        return max(uses, key=lambda t: area_under_curve(uses[t]) + _EXPLORATION * math.sqrt(allowance / len(uses[t])))


def area_under_curve(successes: Sequence[bool]) -> float:
    """Credit in [0, 1] of successes in order of time: the i-th counts i times, divided by the maximum."""
    n = len(successes)
    return 2 / (n * (n + 1)) * sum(i for i, better in enumerate(successes, 1) if better) if n else 0.0


# ------------------------------------------------------------------------------------------------------------ techniques


def _chance(encoding: Encoding, results: Sequence[tuple[_Floats, TriedPoint]], rng: np.random.Generator) -> _Floats:
    del results
    row: _Floats = encoding.spread(rng.random((1, len(encoding.space.knobs))))[0]
    return row


def _uniform_mutation(
    encoding: Encoding, results: Sequence[tuple[_Floats, TriedPoint]], rng: np.random.Generator
) -> _Floats:
    """The best point with new random values of some knobs."""
    best, fresh = _best(encoding, results, rng), _chance(encoding, results, rng)
    return np.where(_some(len(best), rng), fresh, best)


def _normal_mutation(encoding: Encoding, results: Sequence[tuple[_Floats, TriedPoint]], rng: np.random.Generator) -> _Floats:
    """The best point with some columns moved a little."""
    best = _best(encoding, results, rng)
    return np.where(_some(len(best), rng), np.clip(best + _SPREAD * rng.standard_normal(len(best)), 0, 1), best)


def _evolution(encoding: Encoding, results: Sequence[tuple[_Floats, TriedPoint]], rng: np.random.Generator) -> _Floats:
    """Differential evolution (Storn and Price 1997): the best, moved by the difference of two others."""
    if len(results) < 3:
        return _chance(encoding, results, rng)
    best, recent = _best(encoding, results, rng), [row for row, _ in results[-_POPULATION:]]
    one, other = rng.choice(len(recent), 2, replace=False)
    moved = best + rng.uniform(0.5, 1.0) * (recent[one] - recent[other])
    return np.where(rng.random(len(best)) < 0.5, np.clip(moved, 0, 1), best)


def _best(encoding: Encoding, results: Sequence[tuple[_Floats, TriedPoint]], rng: np.random.Generator) -> _Floats:
    return max(results, key=lambda r: r[1].score)[0] if results else _chance(encoding, results, rng)


def _some(width: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    chosen = rng.random(width) < _MUTATED
    chosen[rng.integers(width)] = True
    return chosen


_TECHNIQUES: dict[str, Callable[[Encoding, Sequence[tuple[_Floats, TriedPoint]], np.random.Generator], _Floats]] = {
    "differential evolution": _evolution,
    "uniform mutation": _uniform_mutation,
    "normal mutation": _normal_mutation,
    "chance": _chance,
}
