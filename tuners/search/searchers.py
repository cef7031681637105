"""Searchers: what to try next in a space, behind one small interface (MLtuner, Section 4.3).

A searcher proposes a point and is told its score: larger is better, zero is worthless. It is told again when a point was
tried for longer. It stops proposing when the best five scores above zero differ by less than 10 % of the best, and when
every point has been tried. In the paper the first rule does not hold for the grid, and in its public code not for the random
searcher, either; here only the grid is exempt, because it ends anyway. All random numbers come from the seed.

* "random" draws every knob independently.
* "grid" tries a grid of 11 values per continuous knob, in random order.
* "gp" is Bayesian optimisation as in Spearmint: a Gaussian process (GPy, through emukit) and expected improvement. Its first
  point has every knob at its minimum (Section 5.2); the next two are random.
* "tpe" is the tree-structured Parzen estimator of HyperOpt, here through Optuna: MLtuner's default. Its first 10 points are
  random, Optuna's number; HyperOpt's is 20.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from tuners.bo_online.surrogate import Encoding, Surrogate, best_rows, expected_improvement
from tuners.settings import Choice, Integer, Knob, Scalar
from tuners.space import Space

__all__ = [
    "Point",
    "Propose",
    "Search",
    "Searcher",
    "SearcherKind",
    "TriedPoint",
    "corner",
    "grid",
    "points",
    "searcher",
    "settled",
]

SearcherKind = Literal["tpe", "gp", "random", "grid"]
Point: TypeAlias = dict[str, Scalar]

_BEST, _SPREAD = 5, 0.1  # a search ends when its 5 best scores differ by less than this share of the highest
_DRAWS = 100  # at most, for a point that has not been tried
_GRID = 11  # values of a continuous knob
_STARTUP = 10  # random points before the Parzen estimator is used
_CORNER = 3  # points before the Gaussian process is used
_SURROGATE = Surrogate()


class TriedPoint(NamedTuple):
    """A point that was tried, and its score."""

    values: Point
    score: float


class Searcher(Protocol):
    """The interface of a searcher."""

    def propose(self) -> Point | None:
        """The next point to try; None: the search is over."""
        ...

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        """The score of a point; again, if it was tried for longer."""
        ...


Propose: TypeAlias = Callable[[Space, Sequence[TriedPoint], int], Point | None]
"""A way of searching: the next point from the space, the results so far, and a seed for this proposal."""


class Search:
    """The searcher that proposes by `propose`, never a point twice, and stops by the rule above."""

    def __init__(self, space: Space, propose: Propose, seed: Sequence[int], *, stops: bool = True) -> None:
        self._space = space
        self._propose = propose
        self._seed = tuple(seed)
        self._stops = stops
        self._tried: dict[tuple[Scalar, ...], TriedPoint] = {}
        self._proposed = 0

    def propose(self) -> Point | None:
        results = list(self._tried.values())
        if len(results) >= points(self._space) or (self._stops and settled([r.score for r in results])):
            return None
        for draw in range(_DRAWS):
            # A way that keeps proposing tried points is replaced by random draws after some attempts.
            way = self._propose if draw < _DRAWS // 10 else _random
            found = way(self._space, results, self._next_seed())
            if found is None or self._key(found) not in self._tried:
                return found
        return None

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        plain = {k: values[k] for k in self._space.names}
        self._tried[self._key(plain)] = TriedPoint(plain, score if math.isfinite(score) else 0.0)

    def _key(self, values: Mapping[str, Scalar]) -> tuple[Scalar, ...]:
        return tuple(values[k] for k in self._space.names)

    def _next_seed(self) -> int:
        self._proposed += 1
        return int(np.random.SeedSequence([*self._seed, self._proposed]).generate_state(1)[0])


def searcher(kind: SearcherKind, space: Space, seed: Sequence[int], *, stops: bool = True) -> Search:
    """The searcher of that kind; the grid never `stops` before its end. Raises ValueError for an unknown kind."""
    if kind == "grid":
        return Search(space, _through(grid(space, seed)), seed, stops=False)
    ways: dict[str, Propose] = {"tpe": _parzen, "gp": _gaussian, "random": _random}
    if kind not in ways:
        raise ValueError(f"Cannot search by {kind!r}: choose one of {', '.join((*ways, 'grid'))}.")
    return Search(space, ways[kind], seed, stops=stops)


def settled(scores: Sequence[float]) -> bool:
    """Whether the five highest scores above zero differ by less than a tenth of the highest."""
    ranked = sorted((s for s in scores if s > 0), reverse=True)[:_BEST]
    return len(ranked) == _BEST and 1 - ranked[-1] / ranked[0] < _SPREAD


def points(space: Space) -> float:
    """The number of points of a space; infinite where a knob is continuous."""
    return math.prod(_count(k) for k in space.knobs)


def _count(knob: Knob) -> float:
    if isinstance(knob, Choice):
        return len(knob.options)
    if isinstance(knob, Integer):
        return knob.high - knob.low + 1
    return math.inf if knob.low < knob.high else 1


def corner(space: Space) -> Point:
    """The point with every knob at its minimum; for a choice the least option or, among words, the first."""
    return {k.name: _least(k) for k in space.knobs}


def _least(knob: Knob) -> Scalar:
    if not isinstance(knob, Choice):
        return knob.low
    numbers = [o for o in knob.options if isinstance(o, int | float)]
    return min(numbers) if len(numbers) == len(knob.options) else knob.options[0]


def grid(space: Space, seed: Sequence[int]) -> list[Point]:
    """The points of a grid over the space, in random order."""
    axes = [_axis(k) for k in space.knobs]
    made = [dict(zip(space.names, row, strict=True)) for row in itertools.product(*axes)]
    order = np.random.default_rng([*seed]).permutation(len(made))
    return [made[i] for i in order]


def _axis(knob: Knob) -> list[Scalar]:
    """The values of one knob on the grid: all options of a choice, else evenly spread ones with both ends."""
    if isinstance(knob, Choice):
        return list(knob.options)
    low, high = (np.log(knob.low), np.log(knob.high)) if knob.log else (knob.low, knob.high)
    spread = np.linspace(float(low), float(high), _GRID)
    spread = np.clip(np.exp(spread) if knob.log else spread, knob.low, knob.high)
    if isinstance(knob, Integer):
        return [int(x) for x in np.unique(np.rint(spread).astype(int))]
    return [float(x) for x in np.unique(spread)]


# ------------------------------------------------------------------------------------------------------ ways of searching


def _random(space: Space, results: Sequence[TriedPoint], seed: int) -> Point | None:
    del results
    return space.sample(np.random.default_rng(seed))


def _through(listed: list[Point]) -> Propose:
    """The listed points one after the other."""

    def propose(space: Space, results: Sequence[TriedPoint], seed: int) -> Point | None:
        del space, seed
        tried = [r.values for r in results]
        return next((p for p in listed if p not in tried), None)

    return propose


def _parzen(space: Space, results: Sequence[TriedPoint], seed: int) -> Point | None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = space.to_optuna()
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    # A new study for each proposal, because Optuna takes no second score for a point.
    study.add_trials(
        [optuna.trial.create_trial(params=r.values, distributions=distributions, value=r.score) for r in results]
    )
    return dict(study.ask(distributions).params)


def _gaussian(space: Space, results: Sequence[TriedPoint], seed: int) -> Point | None:
    if not results:
        return corner(space)
    if len(results) < _CORNER:
        return _random(space, results, seed)
    encoding, rng = Encoding(space), np.random.default_rng(seed)
    known = np.array([encoding.row(r.values) for r in results])
    costs = np.array([-r.score for r in results])  # the surrogate minimises
    posterior = _SURROGATE.posterior(_with_state(known), costs, seed)
    best = float(costs.min())
    rows, _ = best_rows(lambda r: expected_improvement(*posterior(_with_state(r)), best), encoding, known, rng)
    fresh = (row for row in rows if not (np.abs(known - row).max(axis=1) < 1e-12).any())
    row = next(fresh, None)
    return None if row is None else encoding.values(row)


def _with_state(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Rows with the surrogate's last column, the state of the job, which is constant here."""
    return np.column_stack([rows, np.zeros(len(rows))])
