"""Cruise's optimum for machines of a few kinds (Lee et al., ICDCS 2019, Fig. 3): roles, data shares and model shares.

The paper's letters: D samples in an epoch, B in a mini-batch, M bytes of model; machine i computes for C_w.proc^i seconds
per sample and has bandwidth b_i, b_ij = min(b_i, b_j); worker i holds d_i samples, server j holds m_j bytes, a part of
any size. `placement_seconds` is Eqs. 1-4 for any placement.

**Exact without a solver.** Let y_i = B C_w.proc^i + tau_i(m) be the seconds of a mini-batch at worker i; tau_i is the larger
of the server's and the worker's own term in Eq. 4. For given roles and m the epoch is shortest when all workers end at the
same time, d_i ~ 1 / y_i; then it takes D / B / sum_i(1 / y_i) seconds. tau_i is convex in m and does not change when two
alike servers swap their parts, so alike servers hold equal parts. The unknown is how much each *kind* holds. Where every
tau_i is one linear piece, the epoch is a concave function of that (a harmonic mean), so its minimum lies at a corner of such
a region: where two pieces are equal, or a kind holds nothing. We try all corners for all numbers of workers per kind, so the
result is the proven optimum.

Where we differ or had to choose:

* Fig. 3's ||w|| + ||s|| = N lets a machine have both roles or none; here each has exactly one, and both roles occur. A
  server may get nothing to hold; then it is better left out.
* `server_term` "paper" is m_j w / b_ij, as if all workers had the bandwidth of worker i. "sum" is m_j sum_i 1 / b_ij as in
  the public code: the seconds to serve each worker in turn. For alike workers they are equal.
* "own", our addition, is m_j w / r_j, where r_j is the rate at which server j serves, as measured,
  or b_j where nobody has measured it: a server may be slower than its NIC. A transfer to a narrow worker uses a part of this
  rate, and the rest serves others meanwhile; "paper" and "sum" let it occupy the whole server. Where workers differ in
  bandwidth, they therefore give the servers too much to do. The narrow worker itself waits for its own NIC, which is the
  other term.
* The paper adds a server's seconds for all workers to a worker's compute, as if all workers pulled at one time.
  Asynchronous workers pull while others compute: with `overlap`, our addition, y_i is the larger of B C_w.proc^i plus the
  worker's own term, and the server's term, which is the limit of a busy server. The proof above holds for that, too.
* "queue", our addition and the tuner's default, is between the two: the workers queue for the servers
  (`tuners.cruise.queueing`), and a fast worker may pull more often than a slow one, also while the servers are busy. A
  worker pulls from all servers at once, at most as fast as its own NIC, and has all when the last one has answered:
  S = max_j m_j / r_j. Seconds of a mini-batch grow with S at every worker, so for given roles the optimum is where all
  servers are equally busy, m_j ~ r_j. No other corner need be tried, and the result is proven for this model as well.
* Eq. 4 rounds mini-batches up, Eq. 5 does not. `best_split` does not round. `best_in_batches` assigns data in whole
  mini-batches, as the public code does, so that rounding up changes nothing; it is exact, too. The relaxed optimum is a
  lower bound of Fig. 3's, and the optimum in whole mini-batches an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import ceil
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tuners.cruise.queueing import pulls_in_queue

__all__ = [
    "MOST_KINDS",
    "MachineKind",
    "Placement",
    "Problem",
    "ServerTerm",
    "Split",
    "best_in_batches",
    "best_split",
    "place",
    "placement_seconds",
    "pull_seconds",
    "queued_pull_seconds",
    "splits",
]

_Array: TypeAlias = NDArray[np.float64]

ServerTerm: TypeAlias = Literal["paper", "sum", "own", "queue"]
"""The server's part of a pull: m_j w / b_ij, m_j sum_i 1 / b_ij, m_j w / r_j, or m_j / r_j and a wait for other workers."""

MOST_KINDS = 3
_ROUNDING = 1e-12  # relative error of floats that counts as zero


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """Machines that are alike, and how many there are."""

    count: int
    compute_seconds: float  # C_w.proc, per sample
    bytes_per_second: float  # b
    service_bytes_per_second: float | None = None  # at which a server serves, as measured; None: as wide as its NIC

    @property
    def served_per_second(self) -> float:
        """r: the server's own rate, bytes per second; `server_term` "own" and "queue" use it."""
        return self.bytes_per_second if self.service_bytes_per_second is None else self.service_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The input of Fig. 3. Machines are numbered from 0, kind after kind."""

    kinds: tuple[MachineKind, ...]
    samples: float  # D, in an epoch
    batch_size: float  # B, samples in a mini-batch
    model_bytes: float  # M, of one pull
    server_term: ServerTerm = "sum"
    overlap: bool = False  # servers serve some workers while others compute; "queue" always means that
    whole_batch: int = 0  # samples that the mini-batches of all workers have together, where that is held; else 0

    def of_workers(self, count: int) -> Problem:
        """The problem of splits with `count` workers: they share the whole batch, if there is one."""
        return replace(self, batch_size=self.whole_batch / count, whole_batch=0) if self.whole_batch else self

    @property
    def machines(self) -> int:
        """N."""
        return sum(k.count for k in self.kinds)

    @property
    def batches(self) -> int:
        """Mini-batches in an epoch, rounded up."""
        return ceil(self.samples / self.batch_size * (1 - _ROUNDING))

    def kind_of(self) -> NDArray[np.int64]:
        """Each machine's kind, [N]."""
        return np.repeat(np.arange(len(self.kinds)), [k.count for k in self.kinds])


class Placement(NamedTuple):
    """Roles and shares. Workers and servers are numbers of machines; a machine may be both, or neither."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    data: tuple[float, ...]  # d_i, samples of each worker
    model: tuple[float, ...]  # m_j, bytes of each server


class Split(NamedTuple):
    """A placement by kind, and its epoch time by Eqs. 1-4. All fields but the last have one entry per kind."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    data: tuple[float, ...]  # d_i, samples of one worker of the kind
    model: tuple[float, ...]  # m_j, bytes of one server of the kind
    seconds: float


# ------------------------------------------------------------------------------------------------- the cost of a placement


def pull_seconds(problem: Problem, placement: Placement) -> tuple[_Array, _Array]:
    """The two terms of Eq. 4, [workers]: seconds of a pull limited by the slowest server, and by the worker's own NIC.

    Raises ValueError for the server term "queue", for which there is `queued_pull_seconds`.
    """
    if problem.server_term == "queue":
        raise ValueError("Cannot give the two terms of Eq. 4 with server_term='queue': use queued_pull_seconds.")
    kind, model = problem.kind_of(), np.array(placement.model)
    rate, own = (np.array(r)[kind] for r in _rates(problem))
    seconds = 1 / np.minimum(rate[list(placement.workers), None], rate[None, list(placement.servers)])  # per byte, [w, s]
    per_byte = {
        "paper": len(placement.workers) * seconds,
        "sum": seconds.sum(axis=0),
        "own": len(placement.workers) / own[list(placement.servers)],
    }[problem.server_term]
    served = np.broadcast_to((model * per_byte).max(axis=-1), len(placement.workers))
    return served, (model * seconds).sum(axis=1)


def queued_pull_seconds(problem: Problem, placement: Placement) -> _Array:
    """Seconds of a pull by the server term "queue", [workers], if all workers are at work."""
    kind, model, workers = problem.kind_of(), np.array(placement.model), np.array(placement.workers)
    rate, own = (np.array(r)[kind] for r in _rates(problem))
    service = (model / own[list(placement.servers)]).max()
    pulls: _Array = pulls_in_queue(
        np.ones((1, len(workers))),
        _compute(problem)[kind[workers]],
        problem.model_bytes / rate[workers],
        np.array([service]),
    )[0]
    return pulls


def _rates(problem: Problem) -> tuple[list[float], list[float]]:
    """b and the servers' own rates, by kind."""
    return [k.bytes_per_second for k in problem.kinds], [k.served_per_second for k in problem.kinds]


def placement_seconds(problem: Problem, placement: Placement, *, round_up: bool = False) -> float:
    """Epoch time C of any placement by Eqs. 1-4, with ceil(d_i / B) mini-batches as in Eq. 4 or d_i / B as in Eq. 5.

    Infinite without workers or without servers.
    """
    if not placement.workers or not placement.servers:
        return np.inf
    problem = problem.of_workers(len(placement.workers))
    data, kind = np.array(placement.data), problem.kind_of()
    batches = data / problem.batch_size
    if round_up:
        batches = np.ceil(batches * (1 - _ROUNDING))
    compute = np.array([k.compute_seconds for k in problem.kinds])[kind[list(placement.workers)]] * data  # Eq. 3
    if problem.server_term == "queue":
        return float(np.max(compute + batches * queued_pull_seconds(problem, placement)))
    served, alone = pull_seconds(problem, placement)  # the two terms of Eq. 4
    busy = 0.0 if problem.overlap else compute
    # Eqs. 1, 2 and 4: the slowest worker, which computes, and pulls as slowly as the larger term.
    return float(np.max(np.maximum(busy + batches * served, compute + batches * alone)))


def place(problem: Problem, split: Split) -> Placement:
    """`split` machine by machine: the first ones of each kind are workers, the others servers."""
    workers, servers = list[tuple[int, float]](), list[tuple[int, float]]()
    first = 0
    for kind, w, d, m in zip(problem.kinds, split.workers, split.data, split.model, strict=True):
        workers += [(first + i, d) for i in range(w)]
        servers += [(first + i, m) for i in range(w, kind.count)]
        first += kind.count
    (who, data), (where, model) = zip(*workers, strict=True), zip(*servers, strict=True)
    return Placement(who, where, data, model)


# ------------------------------------------------------------------------------------------------------ the relaxed optimum


def best_split(problem: Problem) -> Split | None:
    """The placement with the shortest epoch, mini-batches not rounded; None where machines are too few for both roles.

    Raises ValueError for more than three kinds: treat the most similar ones as one, or use `tuners.cruise.milp`.
    """
    return next(splits(problem), None)


def splits(problem: Problem) -> Iterator[Split]:
    """For every number of workers per kind the best data and model shares, from the fastest to the slowest."""
    if problem.whole_batch:
        each = (s for n in range(1, problem.machines) for s in splits(problem.of_workers(n)) if sum(s.workers) == n)
        yield from sorted(each, key=lambda split: split.seconds)
        return
    found = _relaxed(problem)
    seconds = problem.samples / problem.batch_size / found.rate
    for row in np.argsort(seconds, kind="stable"):
        share = np.divide(1.0, found.cycle[row], out=np.zeros(len(problem.kinds)), where=found.workers[row] > 0)
        servers = found.servers[row]
        yield Split(
            workers=tuple(found.workers[row].tolist()),
            servers=tuple(servers.tolist()),
            data=tuple((problem.samples * share / found.rate[row]).tolist()),
            model=tuple((problem.model_bytes * found.held[row] / np.maximum(servers, 1)).tolist()),
            seconds=float(seconds[row]),
        )


class _Relaxed(NamedTuple):
    """The relaxed optimum of every number of workers per kind: a row each, [v, kinds] or [v]."""

    workers: NDArray[np.int64]
    servers: NDArray[np.int64]
    held: _Array  # share of the model that all servers of a kind hold together
    cycle: _Array  # y, seconds of a mini-batch at a worker of the kind
    rate: _Array  # [v] mini-batches per second, all workers together


def _relaxed(problem: Problem) -> _Relaxed:
    """The relaxed optimum of every number of workers per kind. Raises ValueError for more than three kinds."""
    count = np.array([k.count for k in problem.kinds])
    if len(count) > MOST_KINDS:
        raise ValueError(f"Cannot place machines of {len(count)} kinds: give at most {MOST_KINDS}, or use the MILP.")
    workers = np.array(list(product(*(range(c + 1) for c in count))))
    workers = workers[(workers.sum(axis=1) > 0) & (workers.sum(axis=1) < count.sum())]
    if problem.server_term == "queue":
        return _queued(problem, workers, count - workers)
    serves = workers < count
    size = (len(workers), len(count))
    found = _Relaxed(workers, count - workers, np.zeros(size), np.ones(size), np.ones(len(workers)))
    for kinds in _subsets(len(count)):  # those that have servers
        rows = np.flatnonzero((serves == np.isin(np.arange(len(count)), kinds)).all(axis=1))
        pieces = _pieces(problem, workers[rows], list(kinds))
        equal = [pieces[:, :, p] - pieces[:, :, q] for p, q in combinations(range(pieces.shape[2]), 2)]
        corners = _corners(np.concatenate(equal, axis=1) if equal else np.zeros((len(rows), 0, len(kinds))))
        cycle = np.einsum("vupt,vct->vcup", pieces, corners).max(axis=3)
        rate = (workers[rows, None] / cycle).sum(axis=2)
        best = rate.argmax(axis=1)
        at = np.arange(len(rows))
        found.held[rows[:, None], list(kinds)] = corners[at, best]
        found.cycle[rows], found.rate[rows] = cycle[at, best], rate[at, best]
    return found


def _queued(problem: Problem, workers: NDArray[np.int64], servers: NDArray[np.int64]) -> _Relaxed:
    """As `_relaxed`, for the server term "queue": every server holds as much as it serves per second."""
    rate, own = map(np.array, _rates(problem))
    serving = servers * own
    together = serving.sum(axis=1)
    compute, alone = _compute(problem), problem.model_bytes / rate
    cycle = compute + pulls_in_queue(workers.astype(float), compute, alone, problem.model_bytes / together)
    return _Relaxed(workers, servers, serving / together[:, None], cycle, (workers / cycle).sum(axis=1))


def _compute(problem: Problem) -> _Array:
    """Seconds that a mini-batch computes on a machine of each kind, [kinds]."""
    return problem.batch_size * np.array([k.compute_seconds for k in problem.kinds])


def _pieces(problem: Problem, workers: NDArray[np.int64], kinds: list[int]) -> _Array:
    """The linear pieces whose maximum is y: seconds as a function of the share of the model that each of `kinds` holds.

    [v, u, p, t]: v numbers of workers, a worker of kind u, pieces p (a server of each kind, then the worker), t in `kinds`.
    """
    rate, own = map(np.array, _rates(problem))
    whole = problem.model_bytes / np.minimum(rate[:, None], rate[None, kinds])  # [u, t]
    servers = np.array([k.count for k in problem.kinds])[kinds] - workers[:, kinds]  # [v, t]
    size = (len(workers), *whole.shape)
    if problem.server_term == "paper":
        served = workers.sum(axis=1)[:, None, None] * whole[None] / servers[:, None]
    elif problem.server_term == "own":
        each = workers.sum(axis=1)[:, None] * problem.model_bytes / own[kinds] / servers
        served = np.broadcast_to(each[:, None], size)
    else:
        served = np.broadcast_to((workers @ whole / servers)[:, None], size)
    # The shares have the sum 1, so a constant is the same coefficient for each of them.
    compute = _compute(problem)[:, None, None]
    alone = np.broadcast_to(whole, served.shape)[:, :, None] + compute
    return np.concatenate([served[..., None] * np.eye(len(kinds)) + (0.0 if problem.overlap else compute), alone], axis=2)


def _corners(equal: _Array) -> _Array:
    """Shares [v, c, t] of t kinds, none negative, sum 1, where t - 1 of the planes x . `equal`[v, h] = 0 or x_t = 0 meet.

    Planes that do not meet, or meet outside, are replaced by equal shares, which do no harm.
    """
    rows, _, kinds = equal.shape
    planes = np.concatenate([np.broadcast_to(np.eye(kinds), (rows, kinds, kinds)), equal], axis=1)
    meeting = np.array(list(combinations(range(planes.shape[1]), kinds - 1)), dtype=int)
    if kinds == 1:
        return np.ones((rows, 1, 1))
    if kinds == 2:
        plane = planes[:, meeting[:, 0]]
        x = np.stack([-plane[..., 1], plane[..., 0]], axis=2)
    else:
        x = np.cross(planes[:, meeting[:, 0]], planes[:, meeting[:, 1]])
    total = x.sum(axis=2, keepdims=True)
    x = np.divide(x, total, out=np.full_like(x, -1.0), where=np.abs(total) > 0)
    inside = (x >= -_ROUNDING).all(axis=2, keepdims=True)
    x = np.clip(np.where(inside, x, 1 / kinds), 0.0, 1.0)
    corners: _Array = x / x.sum(axis=2, keepdims=True)
    return corners


def _subsets(n: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, n + 1):
        yield from combinations(range(n), size)


# ----------------------------------------------------------------------------------------------- data in whole mini-batches


def best_in_batches(problem: Problem) -> Placement | None:
    """The placement with the shortest epoch when every worker holds whole mini-batches; None where machines are too few.

    Exact: the relaxed optimum of the same roles is a lower bound, which excludes most roles. For the others we try all
    numbers k_u of mini-batches per kind whose slowest worker could still be better; for given k the best model shares are
    again at a corner, now of the planes on which any two workers' pieces are equal. By the server term "queue" one corner is
    best for all k, so that each mini-batch goes to the kind whose workers end with it first.
    """
    found = _relaxed(problem)
    bounds = problem.batches / found.rate
    best, chosen = np.inf, None
    for row in np.argsort(bounds, kind="stable"):
        if bounds[row] >= best * (1 - _ROUNDING):
            break
        seconds, batches, held = _whole(problem, found, int(row), best)
        if seconds < best:
            best, chosen = seconds, (row, batches, held)
    if chosen is None:
        return None
    row, batches, held = chosen
    workers, servers = found.workers[row], found.servers[row]
    split = Split(
        tuple(workers.tolist()),
        tuple(servers.tolist()),
        tuple((batches * problem.batch_size).tolist()),
        tuple((problem.model_bytes * held / np.maximum(servers, 1)).tolist()),
        best,
    )
    return _exactly(problem, place(problem, split))


def _whole(problem: Problem, found: _Relaxed, row: int, limit: float) -> tuple[float, NDArray[np.int64], _Array]:
    """Least seconds, mini-batches per worker and shares per kind for one number of workers per kind, if below `limit`."""
    workers, servers, need = found.workers[row], found.servers[row], problem.batches
    at_once = _handed_out(need, workers, found.cycle[row])
    best = float((at_once * found.cycle[row]).max()), at_once, found.held[row]
    if problem.server_term == "queue":
        return best
    limit = min(limit, best[0])
    kinds = np.flatnonzero(servers > 0).tolist()
    pieces = _pieces(problem, workers[None], kinds)[0]
    # The least seconds of a mini-batch, with the shares that are best for this worker.
    least = np.array([(_corners(_differences(p))[0] @ p.T).max(axis=1).min() for p in pieces])
    most = np.where(workers > 0, np.floor(limit / least * (1 + _ROUNDING)), 0).astype(int)
    fewest = [max(0, ceil((need - (workers @ most - w * k)) / w)) if w else 0 for w, k in zip(workers, most, strict=True)]
    for batches in _minimal(need, workers, fewest, most.tolist()):
        some = np.flatnonzero(batches > 0)
        # Seconds of each kind's whole epoch: linear in the shares, which have the sum 1.
        epoch = (batches[some, None, None] * pieces[some]).reshape(-1, len(kinds))
        corners = _corners(_differences(epoch))[0]
        seconds = (corners @ epoch.T).max(axis=1)
        if seconds.min() < best[0]:
            held = np.zeros(len(workers))
            held[kinds] = corners[seconds.argmin()]
            best = float(seconds.min()), batches, held
    return best


def _differences(pieces: _Array) -> _Array:
    """Planes [1, h, t] on which two of `pieces` [p, t] are equal."""
    first, second = np.triu_indices(len(pieces), 1)
    return (pieces[first] - pieces[second])[None]


def _handed_out(need: int, workers: NDArray[np.int64], cycle: _Array) -> NDArray[np.int64]:
    """Mini-batches per worker of each kind, `need` in all, with the shortest epoch for these seconds of a mini-batch."""
    rate = float((workers / cycle).sum())
    batches = np.where(workers > 0, np.floor(need / rate / cycle), 0).astype(int)
    while workers @ batches < need:
        batches[np.argmin(np.where(workers > 0, (batches + 1) * cycle, np.inf))] += 1
    return batches


def _minimal(need: int, workers: NDArray[np.int64], fewest: list[int], most: list[int]) -> Iterator[NDArray[np.int64]]:
    """All k within the bounds with `workers` . k at least `need`, as small as possible in the last kind with workers."""
    last = int(np.flatnonzero(workers)[-1])
    free = [range(f, m + 1) if i != last else range(1) for i, (f, m) in enumerate(zip(fewest, most, strict=True))]
    for chosen in product(*free):
        batches = np.array(chosen)
        batches[last] = max(0, -(-(need - int(workers @ batches)) // int(workers[last])))
        if batches[last] <= most[last]:
            yield batches


def _exactly(problem: Problem, placement: Placement) -> Placement:
    """`placement` without the samples that whole mini-batches have too many, taken from the first workers."""
    data, surplus = list(placement.data), sum(placement.data) - problem.samples
    for i in range(len(data)):
        taken = min(surplus, data[i])
        data[i] -= taken
        surplus -= taken
    return placement._replace(data=tuple(data))
