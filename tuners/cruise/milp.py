"""Cruise's optimisation problem (Lee et al., ICDCS 2019, Fig. 3) as a pure mixed-integer linear programme, for HiGHS.

The paper gives products of variables to a commercial solver. They can be written linearly, without approximation:

* the number of workers W = ||w|| is a constant: one programme for each W that a bound does not rule out, so that a server's
  term W m_j / b_ij or W m_j / b_j is linear. The public code's, m_j sum_i w_i / b_ij, takes q_ij >= m_j - (1 - w_i),
  q >= 0 for w_i m_j;
* n_i = sum_k 2^k beta_ik counts worker i's mini-batches, and z_ik >= tau_i - U_i (1 - beta_ik), z >= 0 stands for
  beta_ik tau_i, so that C >= C_w.proc^i d_i + sum_k 2^k z_ik is Eqs. 1-4 with the mini-batches rounded up;
* w_i + s_i = 1 for every machine (||w|| + ||s|| = N alone would admit both or none), and d_i, m_j are 0 without the role;
* alike machines have an order, which removes symmetric solutions: most data first, most of the model last.

The gap is zero: what is returned is optimal within HiGHS's tolerances, or, where a search failed, marked as not proven.
HiGHS (SciPy 1.17.1) has called worse placements optimal where variables had no bounds, and possible ones infeasible where
the epoch had its optimum as a cap. So all variables have bounds, the cap is above the best placement known, and the best
placement with equal shares is the first one known. Its presolve can also end in an error, where the whole search does not:
then it searches again without it.

``cruise[solver=milp]`` uses it with Fig. 3's own rounding of samples to mini-batches (`data="samples"`). It takes
seconds for eight machines, where `tuners.cruise.placement`, the default, takes milliseconds. Tests hold the two against each
other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tuners.cruise.placement import Placement, Problem, placement_seconds

__all__ = ["Solved", "solve"]

_SLACK = 0.01  # how far the cap of the epoch is above the best one known
_OPTIMAL, _INFEASIBLE, _ERROR = 0, 2, 4  # what `scipy.optimize.milp` calls the end of a search


class Solved(NamedTuple):
    """The best placement found, its epoch time by Eqs. 1-4 rounding mini-batches up, and whether none can be better."""

    placement: Placement
    seconds: float
    proven: bool


def solve(
    problem: Problem,
    *,
    data: Literal["batches", "samples"] = "batches",
) -> Solved | None:
    """The placement of least epoch time; None where machines are too few for both roles.

    Raises ValueError for a problem whose pulls overlap or queue.

    Args:
        problem: its samples count as whole mini-batches where `data` is "batches".
        data: what a worker can hold: whole mini-batches, or any part of the samples (then ceil(d_i / B) pulls).
    """
    if problem.overlap or problem.server_term == "queue":
        raise ValueError("Cannot put overlapping pulls into this programme: it is the paper's; use best_in_batches.")
    counts = range(1, problem.machines)
    if not counts:
        return None
    best = min((_even(problem, w, data) for w in counts), key=lambda s: s.seconds)
    proven = True
    bounds = {w: _bound(problem, w, data) for w in counts}
    for workers in sorted(bounds, key=bounds.__getitem__):
        if bounds[workers] >= best.seconds:
            break
        cap = best.seconds * (1 + _SLACK)
        found, complete = _Programme(problem, workers, data, cap).solved()
        proven = proven and complete
        if found is not None:
            seconds = placement_seconds(problem, found, round_up=True)
            best = min(best, Solved(found, seconds, False), key=lambda s: s.seconds)
    return best._replace(proven=proven)


def _whole_pulls(problem: Problem) -> NDArray[np.float64]:
    """M / b_ij: seconds in which server j alone would give machine i the whole model, [N, N]."""
    rate = _rates(problem)
    seconds: NDArray[np.float64] = problem.model_bytes / np.minimum(rate[:, None], rate[None, :])
    return seconds


def _rates(problem: Problem) -> NDArray[np.float64]:
    """Each machine's bandwidth, [N]."""
    rate: NDArray[np.float64] = np.array([k.bytes_per_second for k in problem.kinds])[problem.kind_of()]
    return rate


def _served_seconds(problem: Problem) -> NDArray[np.float64]:
    """Seconds that each machine, as the only server, takes for one worker's pull in the server term "own", [N]."""
    rate = np.array([k.served_per_second for k in problem.kinds])[problem.kind_of()]
    seconds: NDArray[np.float64] = problem.model_bytes / rate
    return seconds


def _least_pulls(problem: Problem, workers: int) -> NDArray[np.float64]:
    """A lower bound of tau_i with that number of workers, whichever machines they are, [N]."""
    whole, servers = _whole_pulls(problem), problem.machines - workers
    # By "sum" a server takes at least M / b_j for each worker, whichever the worker; only the paper's term says more.
    each = _served_seconds(problem) if problem.server_term == "own" else whole.min(axis=0)
    served = whole if problem.server_term == "paper" else np.broadcast_to(each, whole.shape)
    widest = np.sort(1 / served, axis=1)[:, -servers:].sum(axis=1)
    least: NDArray[np.float64] = np.maximum(workers / widest, whole.min(axis=1))
    return least


def _compute(problem: Problem) -> NDArray[np.float64]:
    """Seconds that each machine computes for a mini-batch, [N]."""
    return problem.batch_size * np.array([k.compute_seconds for k in problem.kinds])[problem.kind_of()]


def _bound(problem: Problem, workers: int, data: str) -> float:
    """A lower bound of the epoch with that number of workers: the fastest ones with the least pulls."""
    rate = np.sort(1 / (_compute(problem) + _least_pulls(problem, workers)))[-workers:].sum()
    need = problem.batches if data == "batches" else problem.samples / problem.batch_size
    return float(need / rate)


def _even(problem: Problem, workers: int, data: str) -> Solved:
    """The first machines are workers, and all shares are equal, as nearly as mini-batches allow."""
    servers = problem.machines - workers
    held = _evenly(problem.batches, workers) if data == "batches" else np.ones(workers)
    placement = Placement(
        tuple(range(workers)),
        tuple(range(workers, problem.machines)),
        tuple((held / held.sum() * problem.samples).tolist()),
        tuple((np.ones(servers) / servers * problem.model_bytes).tolist()),
    )
    return Solved(placement, placement_seconds(problem, placement, round_up=True), False)


def _evenly(count: int, parts: int) -> NDArray[np.float64]:
    return np.array([len(part) for part in np.array_split(np.arange(count), parts)], float)


class _Programme:
    """Fig. 3 for one number of workers. Time is counted in units of the lower bound, the model in wholes."""

    def __init__(self, problem: Problem, workers: int, data: str, cap: float) -> None:
        self.problem, self.workers = problem, workers
        self.in_samples = data == "samples"
        self.n = problem.machines
        self.unit = _bound(problem, workers, data)
        self.pull = _whole_pulls(problem) / self.unit
        self.compute = _compute(problem) / self.unit
        self.least = _least_pulls(problem, workers) / self.unit
        self.cap = cap / self.unit
        self.longest = float(workers * self.pull.max())  # U_i: no pull takes longer
        # At most all mini-batches, and at most those that fit into an epoch that is known to be possible.
        fit = self.cap / (self.least + (0 if self.in_samples else self.compute))
        self.most = np.minimum(problem.batches, np.floor(np.minimum(fit, 1e9) * (1 + 1e-9))).astype(int)
        self.bits = max(1, int(self.most.max()).bit_length())
        self.low, self.high, self.whole = list[float](), list[float](), list[int]()
        self.rows, self.columns, self.values = list[int](), list[int](), list[float]()
        self.least_sum, self.most_sum = list[float](), list[float]()
        self._variables()
        self._roles_and_shares()
        self._pulls()
        self._epochs()
        self._order()

    def _new(self, shape: tuple[int, ...], low: float, high: float, whole: bool = False) -> NDArray[np.int64]:
        """Numbers of new variables."""
        size = int(np.prod(shape))
        first = len(self.low)
        self.low += [low] * size
        self.high += [high] * size
        self.whole += [int(whole)] * size
        return np.arange(first, first + size).reshape(shape)

    def _add(self, low: float, high: float, *terms: tuple[float, int]) -> None:
        """low <= sum of factor x variable <= high."""
        self.rows += [len(self.least_sum)] * len(terms)
        self.columns += [int(v) for _, v in terms]
        self.values += [float(f) for f, _ in terms]
        self.least_sum.append(low)
        self.most_sum.append(high)

    def _variables(self) -> None:
        n = self.n
        self.epoch = self._new((1,), 0.0, self.cap)[0]  # C
        self.works = self._new((n,), 0, 1, whole=True)  # w_i, and s_i = 1 - w_i
        self.share = self._new((n,), 0.0, 1.0)  # m_j
        self.tau = self._new((n,), 0.0, self.longest)
        self.bit = self._new((n, self.bits), 0, 1, whole=True)  # beta_ik
        self.paid = self._new((n, self.bits), 0.0, self.longest)  # z_ik
        self.data = self._new((n,), 0.0, float(self.most.max()))  # d_i / B

    def _batches(self, i: int) -> list[tuple[float, int]]:
        """n_i as terms."""
        return [(2.0**k, self.bit[i, k]) for k in range(self.bits)]

    def _roles_and_shares(self) -> None:
        self._add(self.workers, self.workers, *((1, w) for w in self.works))
        self._add(1.0, 1.0, *((1, m) for m in self.share))
        need = self.problem.samples / self.problem.batch_size if self.in_samples else self.problem.batches
        self._add(need, need, *((1, d) for d in self.data))
        for i in range(self.n):
            self._add(-np.inf, 1.0, (1, self.share[i]), (1, self.works[i]))
            self._add(-np.inf, 0.0, *self._batches(i), (-float(self.most[i]), self.works[i]))
            # d_i <= B n_i; in whole mini-batches they are equal.
            self._add(0.0, np.inf if self.in_samples else 0.0, *self._batches(i), (-1, self.data[i]))

    def _pulls(self) -> None:
        """tau_i is at least each server's term and the worker's own; it has no cost for a machine that is no worker."""
        n, served = self.n, None
        if self.problem.server_term == "sum":
            served = self._new((1,), 0.0, self.longest)[0]
            both = self._new((n, n), 0.0, 1.0)  # w_i m_j
            for j in range(n):
                self._add(0.0, np.inf, (1, served), *((-self.pull[i, j], both[i, j]) for i in range(n)))
                for i in range(n):
                    self._add(-1.0, np.inf, (1, both[i, j]), (-1, self.share[j]), (-1, self.works[i]))
        elif self.problem.server_term == "own":
            served = self._new((1,), 0.0, self.longest)[0]
            whole = _served_seconds(self.problem) / self.unit
            for j in range(n):
                self._add(0.0, np.inf, (1, served), (-self.workers * whole[j], self.share[j]))
        for i in range(n):
            self._add(0.0, np.inf, (1, self.tau[i]), *((-self.pull[i, j], self.share[j]) for j in range(n)))
            if served is not None:
                self._add(0.0, np.inf, (1, self.tau[i]), (-1, served))
                continue
            for j in range(n):
                self._add(0.0, np.inf, (1, self.tau[i]), (-self.workers * self.pull[i, j], self.share[j]))

    def _epochs(self) -> None:
        for i in range(self.n):
            for k in range(self.bits):
                waits = ((1, self.paid[i, k]), (-1, self.tau[i]), (-self.longest, self.bit[i, k]))
                self._add(-self.longest, np.inf, *waits)
                # Redundant, but it gives the relaxation a lower bound of a pull.
                self._add(0.0, np.inf, (1, self.paid[i, k]), (-self.least[i], self.bit[i, k]))
            paid = [(-(2.0**k), self.paid[i, k]) for k in range(self.bits)]
            self._add(0.0, np.inf, (1, self.epoch), (-self.compute[i], self.data[i]), *paid)

    def _order(self) -> None:
        kind = self.problem.kind_of()
        for i in range(self.n - 1):
            if kind[i] == kind[i + 1]:
                self._add(0.0, np.inf, (1, self.works[i]), (-1, self.works[i + 1]))
                self._add(0.0, np.inf, (1, self.data[i]), (-1, self.data[i + 1]))
                self._add(0.0, np.inf, (1, self.share[i + 1]), (-1, self.share[i]))

    def solved(self) -> tuple[Placement | None, bool]:
        """The best placement, if one is within the cap; and whether the search was completed."""
        size = len(self.low)
        matrix = csr_array((self.values, (self.rows, self.columns)), shape=(len(self.least_sum), size))
        for presolve in (True, False):
            answer = milp(
                np.eye(1, size, self.epoch)[0],
                integrality=self.whole,
                bounds=Bounds(self.low, self.high),
                constraints=LinearConstraint(matrix, self.least_sum, self.most_sum),
                options={"mip_rel_gap": 0.0, "presolve": presolve},
            )
            if answer.status != _ERROR:
                break
        if answer.x is None:
            return None, answer.status == _INFEASIBLE  # nothing better with this number of workers
        return self._placement(answer.x), answer.status == _OPTIMAL

    def _placement(self, x: NDArray[np.float64]) -> Placement:
        """Whole numbers rounded, shares brought to their sum: as exact as floats are, whatever the solver's tolerance."""
        problem = self.problem
        roles = np.round(x[self.works]) > 0
        workers, servers = np.flatnonzero(roles), np.flatnonzero(~roles)
        share = np.where(roles, 0.0, np.clip(x[self.share], 0.0, 1.0))
        share = share / share.sum()
        held = np.where(roles, np.round(x[self.bit]) @ 2.0 ** np.arange(self.bits), 0.0)
        data = held * problem.samples / problem.batch_size / held.sum()
        if self.in_samples:
            data = np.clip(np.where(roles, x[self.data], 0.0), 0.0, held)
            # A small rest that tolerances leave goes where mini-batches have room for it.
            missing = problem.samples / problem.batch_size - data.sum()
            data += missing * ((held - data) / max((held - data).sum(), 1e-300) if missing > 0 else data / data.sum())
        return Placement(
            tuple(workers.tolist()),
            tuple(servers.tolist()),
            tuple((data[workers] * problem.batch_size).tolist()),
            tuple((share[servers] * problem.model_bytes).tolist()),
        )
