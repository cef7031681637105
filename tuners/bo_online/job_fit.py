"""One fit of Eq. 3 to a whole job (ours): how many clocks it still needs, and how much each setting progresses per clock.

The paper fits Eq. 3 to the a clocks of one setting. Where the loss of one mini-batch scatters by more than it falls in a
clocks, such a fit says nothing. So all stretches of a job are fitted together, by generalised least squares. With

    phi(l) = log(d / l) / l,    d = the first loss,

Eq. 3 says that phi rises by 1 / H per clock. Here it rises by

    pace of the setting in force x (1 / H + trend x clocks) + own rate of the setting,

where trend and own rates are random effects with mean 0. Own rates count by what is left of them after two standard errors:
without evidence of the opposite, seconds per clock and the pace alone decide between settings.

* The pace is read from the level of the loss: with many workers the steps of stale gradients scatter, and the loss is
  several times as high as the one that it falls to, within a round or two, under fewer. By Eq. 2, a curve that is f times as
  high needs f times as many clocks to epsilon: a pace of 1 / f. Levels are random effects, too, and count by what is left
  after one standard error. Where the setting changes, half a stretch is left out for the transition.
* A level shows within a stretch or two. An own rate takes longer, and by then the job has slowed down or not for reasons of
  its own, which Eq. 3 does not know; so own rates are kept small.
* Only what changes the statistics of learning can change a rate: the number of workers (by staleness), the policy, 16-bit
  transfer, the learning tunables. Threads and graph options cannot. Settings with like numbers of workers have like rates.
* The evidence is the level of the loss from block to block. Over a long stay under one setting it grows with the third power
  of the clocks, while the slope within each stretch stays as uncertain as it was.
* Remaining clocks are phi(epsilon) - phi(l) over the present rate of the job. As the fit begins at the first clock, it
  agrees with what has been seen of the job by now. A job is never expected to take more than 30 times as long again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import isotonic_regression

from tuners.bo_online.convergence import LossCurve, inliers

__all__ = ["JobFit", "LeastSquares", "LevelRecorder", "Levels", "fitted_job", "likeness", "measured_levels", "never_rising"]

_Floats = NDArray[np.float64]

_OWN = 0.1  # standard deviation of own rates, relative to the pace
_OFFSET = 0.5  # standard deviation of the factors by which settings raise the loss, in the logarithm
_WALK = 0.2  # the same of the course of the loss since the job began, around its line
_TREND = 0.3  # the same of the change of the rate since the job began
_OTHER = 0.5  # correlation of the rates of two settings with equal workers that differ in policy or the like
_SLOWEST = 0.1  # least progress per clock of a setting, relative to the job's, and least part of its clocks still to come
_LONGEST = 30.0  # times the clocks by now, at most to come: a slope that can hardly be told from zero gives any number
_FASTEST = (
    2.0  # most progress of a setting, as few workers do not learn much more from a gradient than more do (Fig. 2: 2.5)
)
_BLOCKS = 8  # at most, of one stay under a setting
_MOST_LEVELS = 200  # of a fit
_COLUMNS = 7  # of what is recorded of a level
_PRIOR = 10.0  # losses that the scatter of the whole job counts for in the scatter of a block


class JobFit(NamedTuple):
    """What a fit says about a job, at its last clock."""

    clocks_left: float  # until epsilon, at the job's own rate
    efficiency: _Floats  # [kinds], progress per clock under each kind of setting, relative to the job's own rate


class Levels(NamedTuple):
    """Mean losses of blocks of pushes."""

    loss: _Floats  # [n]
    error: _Floats  # [n], standard error of the mean
    clocks: _Floats  # [n], of the job at the middle of the block
    under: _Floats  # [n, kinds], of these clocks, those under each kind of setting
    kind: NDArray[np.intp]  # [n], the kind of setting of the block

    def at(self, which: NDArray[np.intp]) -> Levels:
        """The levels at these indices."""
        return Levels(self.loss[which], self.error[which], self.clocks[which], self.under[which], self.kind[which])


def likeness(kinds: Sequence[tuple[int, Hashable]]) -> _Floats:
    """Correlations of the own rates of kinds of settings, (workers, all else that matters): [kinds, kinds].

    Twice as many workers: 0.6.
    """
    octaves = np.log2([max(workers, 1) for workers, _ in kinds])
    numbers = dict[object, int]()
    rest = np.array([numbers.setdefault(other, len(numbers)) for _, other in kinds], np.intp)
    same = rest[:, None] == rest
    near: _Floats = np.exp(-0.5 * (octaves[:, None] - octaves) ** 2) * np.where(same, 1.0, _OTHER)
    return near


class LevelRecorder:
    """The levels of the loss over the stretches of one job, in their order.

    There are at most `most` levels of one stay under a kind of setting. Those of a stay that is over are measured once: only
    the last one grows. So the levels after a further stretch take the time of one stay, and not of the whole job.
    """

    def __init__(self, outliers: float = 3.0, most: int = _BLOCKS) -> None:
        self._outliers, self._most = outliers, most
        self._open = deque[list[LossCurve]]()  # stays whose levels may still change: the last one may go on
        self._kinds: list[int] = []  # of every stay
        self._lengths: list[int] = []  # clocks of every stay that was
        self._rows = np.empty((0, _COLUMNS))  # their levels

    def add(self, curve: LossCurve, kind: int) -> None:
        """Add the losses of the next stretch, under a setting of this kind."""
        last = self._open[-1][-1] if self._open and self._kinds[-1] == kind else None
        if last is not None and last.clocks_before + len(last.losses) == curve.clocks_before:
            self._open[-1].append(curve)
        else:
            self._open.append([curve])
            self._kinds.append(kind)

    def levels(self, count: int) -> Levels:
        """The levels, of `count` kinds of settings: all of them, or as many as a fit takes."""
        while len(self._open) > 1:
            self._rows = np.vstack([self._rows, self._measured(self._open[0])])
            self._lengths.append(sum(len(s.losses) for s in self._open.popleft()))
        rows = np.vstack([self._rows, *map(self._measured, self._open)])
        if not len(rows):
            return Levels(np.empty(0), np.empty(0), np.empty(0), np.empty((0, count)), np.empty(0, np.intp))
        loss, squares, counts, alike, clocks, within, stay = rows.T
        freedom = np.maximum(counts - 2, 0.0)
        some = loss > 1e-100  # whose square is not zero
        relative = float((squares[some] / loss[some] ** 2).sum()) / max(float(freedom.sum()), 1.0)
        variance = (squares + _PRIOR * relative * loss**2) / (freedom + _PRIOR)
        alike = np.average(alike, weights=counts)
        error = np.sqrt(variance / counts * (1 + alike) / (1 - alike))
        kept = _representative(len(rows))
        of = stay[kept].astype(np.intp)
        kinds = np.array(self._kinds, np.intp)[of]
        under = self._spent(of, count)
        under[np.arange(len(kept)), kinds] += within[kept]
        return Levels(loss[kept], error[kept], clocks[kept], under, kinds)

    def _measured(self, stay: Sequence[LossCurve]) -> _Floats:
        """The levels of the next stay, a row each: mean, sum of squares of residuals, losses, how alike neighbours are, the
        middle in clocks of the job, the same of the stay, and the number of the stay."""
        first = not len(self._rows)
        losses = np.concatenate([s.losses for s in stay])
        settled = 0 if first else len(stay[0].losses) // 2  # before, the loss moves from the level of the last setting
        blocks = min(max(len(stay), 2 if first else 1), self._most)
        found = []
        for block in np.array_split(np.arange(settled, len(losses)), blocks):
            kept = block[inliers(losses[block], self._outliers)]
            if len(kept):
                middle = float(kept.mean())
                clocks = stay[0].clocks_before + middle + 1.0
                found.append((*_scatter(kept, losses[kept]), clocks, middle + 1.0, len(self._lengths)))
        return np.array(found).reshape(-1, _COLUMNS)

    def _spent(self, stays: NDArray[np.intp], count: int) -> _Floats:
        """The clocks of the job under each kind before each of these stays [n], which rise: [n, count]."""
        spent = np.zeros((len(stays) + 1, count))
        done = len(self._lengths)
        after = np.searchsorted(stays, np.arange(done), side="right")  # the first of `stays` that comes after each one
        np.add.at(spent, (after, np.array(self._kinds[:done], np.intp)), self._lengths)
        return spent[:-1].cumsum(axis=0)


def measured_levels(
    curves: Sequence[LossCurve], kinds: Sequence[int], count: int, outliers: float = 3.0, most: int = _BLOCKS
) -> Levels:
    """The levels of the loss over consecutive stretches of one job; the setting of the i-th is of kind `kinds[i]` < `count`.

    There are at most `most` levels of one stay under a kind of setting.
    """
    recorder = LevelRecorder(outliers, most)
    for curve, kind in zip(curves, kinds, strict=True):
        recorder.add(curve, kind)
    return recorder.levels(count)


def _scatter(at: NDArray[np.intp], losses: _Floats) -> tuple[float, float, int, float]:
    """Mean of losses at these clocks, squares of their residuals about a line, number, and how alike neighbours are."""
    x, y = at - at.mean(), losses - losses.mean()
    residual = y - (x @ y / (x @ x) if len(x) > 1 else 0.0) * x
    squares = float(residual @ residual)
    alike = float(residual[1:] @ residual[:-1]) / squares if squares > 0 else 0.0
    return float(losses.mean()), squares, len(losses), float(np.clip(alike, 0.0, 0.9))


def fitted_job(levels: Levels, alike: _Floats, clocks: float, epsilon: float) -> JobFit | None:
    """The fit after `clocks` of the job. None with fewer than two levels.

    `alike` [kinds, kinds] are the correlations of own rates. Raises ValueError for an epsilon that is not positive.
    """
    if not 0 < epsilon < np.inf:
        raise ValueError(f"Cannot estimate the way to epsilon = {epsilon}: give a positive loss.")
    if len(levels.loss) < 2 or not levels.loss[0] > 0 or not clocks > 0:
        return None
    levels = levels.at(_representative(len(levels.loss)))
    levels = levels._replace(loss=np.maximum(levels.loss, 1e-3 * epsilon))  # a hinge loss can be zero
    offsets = _offsets(levels, alike)
    base = levels.loss / np.exp(offsets[levels.kind])
    d = float(base[0])
    losses = np.minimum(base, d * np.e)  # beyond d e the shape would fall again
    progress = _shape(losses, d)
    steep = (1 + np.log(d / np.minimum(losses, d))) / losses  # |l phi'|, where the loss has fallen
    variance = (steep * levels.error / levels.loss) ** 2
    variance = np.maximum(variance, 1e-6 * float(progress.max() - progress.min()) ** 2 + 1e-300)
    pace = np.clip(np.exp(-offsets), _SLOWEST, _FASTEST)
    spent = levels.under.sum(axis=1)
    effective = levels.clocks * np.divide(levels.under @ pace, spent, out=np.ones_like(spent), where=spent > 0)
    by_now = clocks * effective[-1] / levels.clocks[-1]
    shape = np.column_stack([np.ones_like(progress), effective])
    alone = LeastSquares(shape, np.diag(variance), progress)
    rate = max(float(alone.found[1]), alone.error)  # one that is not significant is at least its error
    bend = effective * (effective / by_now - 1)  # changes the rate by -1 at the beginning to +1 at the end
    faster = (_OWN * rate) ** 2 * alike * np.outer(pace, pace)
    own = levels.under @ faster
    noise = np.diag(variance) + own @ levels.under.T + (_TREND * rate) ** 2 * np.outer(bend, bend)
    fit = LeastSquares(shape, noise, progress)
    trend = (_TREND * rate) ** 2 * float(bend @ fit.weighted)
    job = max(float(fit.found[1]) + trend, fit.error, _SLOWEST * rate)
    now = float(fit.found[0] + fit.found[1] * by_now + (own.T @ fit.weighted) @ levels.under[-1])
    whole = float(_shape(np.array([epsilon]), d)[0])
    left = max(whole - now, _SLOWEST * max(job * by_now, whole)) / job
    rates = pace + fit.significant(own, np.diag(faster), errors=2.0) / max(job, rate)
    return JobFit(min(left, _LONGEST * clocks), np.clip(rates, _SLOWEST, _FASTEST))


def _representative(count: int) -> NDArray[np.intp]:
    """The levels to fit, of `count`: the first, the latest, an even choice between. A fit takes the cube of these."""
    if count <= _MOST_LEVELS:
        return np.arange(count)
    latest = count - _MOST_LEVELS // 2
    older = np.linspace(0, latest - 1, _MOST_LEVELS - _MOST_LEVELS // 2).round().astype(np.intp)
    return np.concatenate([older, np.arange(latest, count)])


def _offsets(levels: Levels, alike: _Floats) -> _Floats:
    """By how much each kind of setting raises the logarithm of the loss while it is in force, [kinds].

    They are random effects on a smooth course of the loss: a line over the logarithm of the clocks, and a random walk.
    """
    first = levels.clocks[levels.kind == levels.kind[0]][0]
    shape = np.column_stack([np.ones_like(levels.loss), np.log(levels.clocks + first)])
    raised = _OFFSET**2 * alike
    own = raised[levels.kind]
    walk = _WALK**2 * np.minimum.outer(levels.clocks, levels.clocks) / levels.clocks[-1]
    noise = np.diag((levels.error / levels.loss) ** 2 + 1e-6) + own[:, levels.kind] + walk
    return LeastSquares(shape, noise, np.log(levels.loss)).significant(own, np.diag(raised))


def never_rising(kinds: Sequence[tuple[int, Hashable]], efficiency: _Floats, clocks: _Floats) -> _Floats:
    """Efficiencies [kinds] that do not rise with the number of workers, other things equal, nearest to those given.

    More workers mean staler gradients, or larger global batches: a push of one of them never does more. `clocks` [kinds]
    under each kind are the weights.
    """
    found = efficiency.copy()
    alike = defaultdict[Hashable, list[int]](list)
    for i in sorted(range(len(kinds)), key=lambda i: kinds[i][0]):
        alike[kinds[i][1]].append(i)
    for members in alike.values():
        found[members] = isotonic_regression(found[members], weights=1.0 + clocks[members], increasing=False).x
    return found


def _shape(losses: _Floats, d: float) -> _Floats:
    found: _Floats = np.log(d / losses) / losses
    return found


class LeastSquares:
    """Generalised least squares of what was `seen` [n] on the columns of `shape` [n, k]."""

    def __init__(self, shape: _Floats, noise: _Floats, seen: _Floats) -> None:
        factor = cho_factor(noise + 1e-12 * np.trace(noise) / len(noise) * np.eye(len(noise)))
        self._solve = partial(cho_solve, factor)
        self._shape = self._solve(shape)
        self._covariance = np.linalg.inv(shape.T @ self._shape)
        self.found: _Floats = self._covariance @ (self._shape.T @ seen)
        self.error = float(np.sqrt(self._covariance[1, 1]))  # of the second coefficient
        self.weighted: _Floats = self._solve(seen - shape @ self.found)  # residuals over the covariance of the noise

    def significant(self, shared: _Floats, variance: _Floats, errors: float = 1.0) -> _Floats:
        """Predicted random effects [m], each nearer to zero by `errors` of its standard errors.

        `shared` [n, m] are their covariances with the data, `variance` [m] their own before the data.
        """
        told = np.sum(shared * self._solve(shared), axis=0)
        found = shared.T @ self.weighted
        error = np.sqrt(np.maximum(variance - told, 0.0))
        nearer: _Floats = np.sign(found) * np.maximum(np.abs(found) - errors * error, 0.0)
        return nearer
