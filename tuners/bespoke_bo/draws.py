"""Forward draws of the bespoke model and the expected improvement that they give (Dalibard et al., "Tuning the Scheduling of
Distributed Stochastic Gradient Descent with Bayesian Optimization", Section 3).

A draw is one possible cluster: a particle and a function for every part. All candidates are compared on the same draws
(common random numbers). Machines that share a device type share its function, so their times are drawn jointly. The public
code draws each machine independently, because one of its guards never holds (``joint=False``); the slowest of many machines
then seems slower than it is. The slowest machine is computed from sampled times. Communication, the last part, is a Gaussian
in each draw, so each draw's contribution to the expected improvement has a closed form.

Functions of the load are stored on a grid of loads: all whole numbers if there are few. Between grid points the logarithm of
the seconds is linear in the logarithm of the load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from tuners.bespoke_bo.communication import overlapping, transfer_seconds
from tuners.bespoke_bo.grouped_cluster import BOTH, WORKER, GroupedCluster, RoleGroup
from tuners.bespoke_bo.model import IterationModel
from tuners.bespoke_bo.parts import Paths
from tuners.bespoke_bo.smc import Posterior

__all__ = ["Draws", "Iterations", "expected_improvement", "load_grid"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_GRID = 96


def load_grid(batch: int) -> _Floats:
    """The loads from 1 to `batch` at which functions are stored: all, or 96 in even steps of the logarithm."""
    return np.unique(np.rint(np.geomspace(1, batch, _GRID))) if batch > _GRID else np.arange(1.0, batch + 1)


@dataclass(frozen=True, slots=True)
class Iterations:
    """Iterations of C candidates in S draws: the slowest machine's seconds, and communication as a Gaussian. All [S, C]."""

    slowest: _Floats
    mean: _Floats
    deviation: _Floats

    @property
    def seconds(self) -> _Floats:
        """Expected seconds of an iteration in each draw, [S, C]."""
        return self.slowest + self.mean


class Draws:
    """S possible clusters, drawn from the model's posteriors, for the machines of `cluster`.

    `log_seconds[group][device]` is [copies, S, G] at the loads of `grid` [G]: one copy for all machines of a group if draws
    are joint, else one per machine. `communication` is particles [S, columns].
    """

    def __init__(self, model: IterationModel, cluster: GroupedCluster, count: int, seed: int, joint: bool = True) -> None:
        self.model, self.cluster, self.count, self.joint = model, cluster, count, joint
        self.grid = load_grid(cluster.batch)
        self._logs = np.log(self.grid)
        # One random stream per part, so that a part's draws do not depend on how many draws the other parts make.
        self._seeds = {n: np.random.default_rng([seed, i]) for i, n in enumerate(sorted(model.posteriors))}
        shared = dict[str, _Floats]()
        self.log_seconds = [[self._drawn(group, kind, shared) for kind in group.device_kinds] for group in cluster.groups]
        self._sums: list[Paths | None] = [self._summing(group) for group in cluster.groups]
        self.communication = self._known.sample(count, self._seeds["communication"])

    def _drawn(self, group: RoleGroup, kind: str, shared: dict[str, _Floats]) -> _Floats:
        """Log seconds of a device at the grid's loads, [copies, S, G]."""
        name = f"rate {group.type} {kind}"
        if name not in shared or not self.joint:
            copies = 1 if self.joint else len(group.members)
            known, rng = self.model.posteriors[name], self._seeds[name]
            rates = [known.draw(self.count, rng)(self.grid[:, None]) for _ in range(copies)]
            shared[name] = self._logs - np.array(rates)
        return shared[name]

    def _summing(self, group: RoleGroup) -> Paths | None:
        name = f"aggregation {group.type}"
        return self.model.posteriors[name].draw(self.count, self._seeds[name]) if len(group.device_kinds) > 1 else None

    def aggregation_seconds(self, group: int, loads: _Floats, rows: slice = slice(None)) -> _Floats:
        """Seconds to sum the gradients of devices with `loads` [m, D], or [R, m, D] per draw, in R of the draws: [R, m].

        They are 0 where only one device works.
        """
        paths = self._sums[group]
        if paths is None:
            return np.zeros((len(range(self.count)[rows]), loads.shape[-2]))
        found: _Floats = np.where((loads > 0).sum(-1) > 1, np.exp(paths.some(rows)(loads)), 0.0)
        return found

    def machine_seconds(self, group: int, loads: _Ints) -> _Floats:
        """Seconds of all of a group's machines under `loads` [C, members, devices], [S, C, members]."""
        members = np.arange(loads.shape[1])
        each = [self._device_seconds(table, loads[:, :, d], members) for d, table in enumerate(self.log_seconds[group])]
        slowest: _Floats = np.max(each, axis=0)
        if self._sums[group] is not None:
            rows, where = np.unique(loads.reshape(-1, loads.shape[2]), axis=0, return_inverse=True)
            summing = self.aggregation_seconds(group, rows.astype(float))
            slowest = slowest + summing[:, where.reshape(loads.shape[:2])]
        return slowest

    def _device_seconds(self, table: _Floats, loads: _Ints, members: NDArray[np.intp]) -> _Floats:
        """Seconds of one device under `loads` [C, members], [S, C, members]; 0 without a load."""
        at = np.log(np.maximum(loads, 1))
        right = np.clip(np.searchsorted(self._logs, at), 1, max(len(self.grid) - 1, 1))
        if len(self.grid) == 1:
            return np.where(loads > 0, np.exp(table[members % len(table), :, 0].T)[:, None, :], 0.0)
        share = (at - self._logs[right - 1]) / (self._logs[right] - self._logs[right - 1])
        copy = np.broadcast_to(members % len(table), loads.shape)
        found = table[copy, :, right - 1] * (1 - share)[..., None] + table[copy, :, right] * share[..., None]
        return np.where(loads > 0, np.exp(np.moveaxis(found, -1, 0)), 0.0)

    def iterations(self, loads: _Ints, serves: NDArray[np.bool_]) -> Iterations:
        """The iterations of schedules `loads` [C, machines, devices], `serves` [C, machines] in each draw."""
        roles = (loads.sum(2) > 0) * 1 + serves * 2
        slowest = np.zeros((self.count, len(loads), len(self.cluster.groups), 4))
        for index, group in enumerate(self.cluster.groups):
            mine = loads[:, list(group.members)][:, :, list(group.devices)]
            if mine.any():
                seconds = self.machine_seconds(index, mine)
                for role in (WORKER, BOTH):
                    slowest[:, :, index, role] = np.where(roles[:, list(group.members)] == role, seconds, 0.0).max(2)
        placements = np.array([self.cluster.placement(n, f) for n, f in zip(loads, serves, strict=True)])
        mean, deviation = self._known.predict(self.communication, self.cluster.traffic(placements, slowest))
        return Iterations(slowest.max((2, 3)), np.maximum(mean, 0.0), deviation)

    def transfer_seconds(self, traffic: _Floats, draws: int) -> tuple[_Floats, _Floats]:
        """Seconds in which workers pull and push, in the first draws, [draws, m, groups, 2]; and the share of them that
        overlaps with computing of others, [draws]."""
        values = self._known.part.values(self.communication[:draws])[:, :-3]
        own, served = transfer_seconds(self.cluster, values, traffic)
        slowest = served.max(-1)[..., None, None]
        return np.maximum(own, slowest)[:, :, self.cluster.type_of_group], overlapping(self.cluster, values)

    def remainder_seconds(self, traffic: _Floats, draws: int) -> _Floats:
        """Seconds of communication beyond the parametric mean, in the first draws, [draws, m]."""
        particles = self.communication[:draws]
        mean, _ = self._known.predict(particles, traffic)
        return mean - self._known.part.mean(self._known.part.values(particles)[:, :-3], traffic)

    @property
    def _known(self) -> Posterior:
        return self.model.posteriors["communication"]


def expected_improvement(drawn: Iterations, best: float) -> _Floats:
    """E[max(best - seconds, 0)] of each candidate, [C]: the closed form in each draw, averaged over draws."""
    gain = best - drawn.seconds
    deviation = np.maximum(drawn.deviation, 1e-12)
    z = np.clip(gain / deviation, -40.0, 40.0)
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    found: _Floats = (gain * ndtr(z) + deviation * density).mean(0)
    return found
