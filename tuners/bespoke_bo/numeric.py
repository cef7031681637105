"""The numeric stage: the schedule with the largest expected improvement (Dalibard et al., "Tuning the Scheduling of
Distributed Stochastic Gradient Descent with Bayesian Optimization", Section 3).

``decomposed`` searches over placements, the numbers of machines per group and role; the loads of a placement are a separate
problem (`tuners.bespoke_bo.balance`). Candidates are the best placement of each draw, with the loads that balance in that
draw (the public framework's recipe: candidates by Thompson sampling, chosen by expected improvement), and the best
placements of the average over draws. ``direct`` and ``cmaes`` search the whole domain at once, as the paper says that
off-the-shelf optimisers do: two numbers per machine and one per device, 30 dimensions on ten machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_bo.balance import Balance
from tuners.bespoke_bo.draws import Draws, expected_improvement
from tuners.bespoke_bo.grouped_cluster import BOTH, SERVER, WORKER, GroupedCluster
from tuners.settings import shared_out

__all__ = ["Candidate", "Numeric", "candidates", "placements"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
Numeric = Literal["decomposed", "direct", "cmaes"]

_MOST = 40_000  # placements that are considered
_PIECE = 4_000  # placements that are computed at once, to bound memory
_EACH = 8  # placements per draw on the short list
_THOMPSON, _AVERAGE = 32, 24  # candidates of single draws, and of their average


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule, its expected improvement, and the expected seconds of an iteration."""

    loads: _Ints  # [machines, devices]
    serves: NDArray[np.bool_]  # [machines]
    improvement: float
    seconds: float


def candidates(
    draws: Draws, best: float, numeric: Numeric, rng: np.random.Generator, *, points: int = 1500
) -> list[Candidate]:
    """Candidates by falling expected improvement on `best` seconds; those without any, by rising seconds.

    `points` bounds the evaluations of the searches of the whole domain.
    """
    found = _decomposed(draws, best, rng) if numeric == "decomposed" else _whole_domain(draws, best, numeric, rng, points)
    return sorted(found, key=lambda c: (-_gain(c, best), c.seconds))


def _gain(candidate: Candidate, best: float) -> float:
    """The expected improvement; 0 if it is lost in rounding, or if there is no finite `best` to improve on."""
    return candidate.improvement if np.isfinite(best) and candidate.improvement > 1e-9 * best else 0.0


def placements(cluster: GroupedCluster, rng: np.random.Generator) -> _Ints:
    """Numbers of machines per group and role, [P, groups, 4]: all placements, or up to 40,000 random ones.

    At least one machine works and one serves, and there is a sample for every worker.
    """
    ways = [_ways(len(g.members), g.roles, bool(g.devices)) for g in cluster.groups]
    if np.prod([float(len(w)) for w in ways]) <= _MOST:
        chosen = np.array(list(product(*(range(len(w)) for w in ways))))
    else:
        chosen = np.unique(np.stack([rng.integers(len(w), size=_MOST) for w in ways], axis=1), axis=0)
    found = np.stack([w[chosen[:, i]] for i, w in enumerate(ways)], axis=1)
    workers, servers = (found[:, :, [role, BOTH]].sum((1, 2)) for role in (WORKER, SERVER))
    possible: _Ints = found[(workers >= 1) & (servers >= 1) & (workers <= cluster.batch)]
    if not len(possible):
        raise ValueError(f"Cannot place workers and servers on {cluster.machines} machines: let one work and one serve.")
    return possible


def _ways(members: int, roles: tuple[int, ...], works: bool) -> _Ints:
    """The ways to distribute `roles` over `members` equal machines, [ways, 4]."""
    most = [members if role in roles and (works or role not in (WORKER, BOTH)) else 0 for role in range(4)]
    return np.array([w for w in product(*(range(m + 1) for m in most)) if sum(w) == members])


# -------------------------------------------------------------------------------------------------------------- decomposed


def _decomposed(draws: Draws, best: float, rng: np.random.Generator) -> list[Candidate]:
    balance, cluster = Balance(draws, _THOMPSON), draws.cluster
    placed = placements(cluster, rng)
    placed = placed[_short_list(_rough_seconds(draws, balance, placed))]
    traffic = cluster.traffic(placed)
    delay, alone = _delay(draws, balance, placed)
    rest = draws.remainder_seconds(traffic, balance.used).T
    finish = balance.seconds(placed[:, :, [WORKER, BOTH]], delay)
    seconds = finish + alone + np.column_stack([rest, rest.mean(1)])
    chosen = dict.fromkeys(
        [(int(at), row) for row, at in enumerate(seconds[:, :-1].argmin(0))]
        + [(int(at), balance.rows - 1) for at in np.argsort(seconds.mean(1), kind="stable")[:_AVERAGE]]
    )
    made = [_scheduled(cluster, balance, placed[at], delay[at, row], row, finish[at, row]) for at, row in chosen]
    return _scored(draws, best, np.array([m[0] for m in made]), np.array([m[1] for m in made]))


def _delay(draws: Draws, balance: Balance, placed: _Ints) -> tuple[_Floats, _Floats]:
    """Under placements [m, groups, 4]: seconds by which a worker's own transfer delays its computing, [m, R, groups, 2],
    and seconds of communication that no computing hides, [m, R]."""
    traffic, counts = draws.cluster.traffic(placed), placed[:, :, [WORKER, BOTH]]
    own, share = draws.transfer_seconds(traffic, balance.used)
    alone = (1 - share)[:, None] * np.where(counts > 0, own, 0.0).max((2, 3))
    hidden = share[:, None, None, None] * own
    with_mean = (np.concatenate([x, x.mean(0, keepdims=True)]) for x in (hidden, alone))
    delay, left = (np.swapaxes(x, 0, 1) for x in with_mean)
    return delay, left


def _rough_seconds(draws: Draws, balance: Balance, placed: _Ints) -> _Floats:
    """Approximate seconds of an iteration under each placement with balanced loads, [P, R].

    Machines are balanced without transfers; then the average delay by transfers is added, weighted by the load of each
    machine. This would be exact if the load were proportional to the time.
    """
    workers = placed[:, :, [WORKER, BOTH]]
    vectors, which = np.unique(workers.sum(2), axis=0, return_inverse=True)
    alone = np.stack([vectors, np.zeros_like(vectors)], axis=2)
    computing = balance.seconds(alone, np.zeros((len(vectors), balance.rows, len(draws.cluster.groups), 2)))
    weights = balance.shares(computing) / draws.cluster.batch
    rough = computing[which]
    for piece in np.array_split(np.arange(len(placed)), 1 + len(placed) // _PIECE):
        delay, left = _delay(draws, balance, placed[piece])
        rough[piece] += left
        for group, role in np.ndindex(workers.shape[1:]):
            rough[piece] += workers[piece][:, [group], role] * weights[which[piece], :, group] * delay[:, :, group, role]
    return rough


def _short_list(seconds: _Floats) -> NDArray[np.intp]:
    """Indices of placements that are among the best in some row or on average, from seconds [P, R]."""
    few = min(_EACH, len(seconds))
    each = np.argpartition(seconds, few - 1, axis=0)[:few].ravel()
    return np.unique(np.concatenate([each, np.argsort(seconds.mean(1), kind="stable")[: 4 * _AVERAGE]]))


def _scheduled(
    cluster: GroupedCluster, balance: Balance, placement: _Ints, delay: _Floats, row: int, seconds: float
) -> tuple[_Ints, NDArray[np.bool_]]:
    """Loads [machines, devices] and servers, of a placement [groups, 4] balanced in one row, complete in `seconds`."""
    loads, serves = np.zeros((cluster.machines, cluster.most_devices), np.int64), np.zeros(cluster.machines, bool)
    shares = balance.loads(placement[:, [WORKER, BOTH]], delay, row, seconds)
    for group, counts, rows in zip(cluster.groups, placement, shares, strict=True):
        first, last = int(counts[WORKER]), int(counts[WORKER] + counts[BOTH])
        # Members of a group in order: pure workers, machines that are both, pure servers, idle machines.
        serves[list(group.members[first : last + int(counts[SERVER])])] = True
        for machine, samples in zip(group.members, rows, strict=False):
            loads[machine, list(group.devices)] = samples
    return loads, serves


def _scored(draws: Draws, best: float, loads: _Ints, serves: NDArray[np.bool_]) -> list[Candidate]:
    """Candidates from schedules `loads` [C, machines, devices] and `serves` [C, machines]."""
    drawn = draws.iterations(loads, serves)
    improvement, seconds = expected_improvement(drawn, best), drawn.seconds.mean(0)
    rows = zip(loads, serves, improvement, seconds, strict=True)
    return [Candidate(n, f, float(gain), float(took)) for n, f, gain, took in rows]


# -------------------------------------------------------------------------------------------------------- the whole domain


def _whole_domain(
    draws: Draws, best: float, numeric: Numeric, rng: np.random.Generator, evaluations: int
) -> list[Candidate]:
    """The schedules that an off-the-shelf search evaluates."""
    cluster = draws.cluster
    slots = [(m, d) for g in cluster.groups for m in g.members for d in g.devices]
    wide = 2 * len({m for g in cluster.groups for m in g.members}) + len(slots)
    found: list[Candidate] = []

    def score(point: _Floats) -> float:
        loads, serves = _decoded(cluster, slots, np.asarray(point))
        found.extend(_scored(draws, best, loads[None], serves[None]))
        # Without any expected improvement, fewer seconds are still better.
        return -_gain(found[-1], best) or found[-1].seconds

    if numeric == "direct":
        from scipy.optimize import direct

        direct(score, [(0.0, 1.0)] * wide, maxfun=evaluations, locally_biased=True)
    else:
        _cmaes(score, wide, rng, evaluations)
    return found


def _decoded(cluster: GroupedCluster, slots: list[tuple[int, int]], point: _Floats) -> tuple[_Ints, NDArray[np.bool_]]:
    """The schedule of a point of the unit cube: a machine works or serves above 0.5; loads by largest remainder."""
    machines = {m: g.roles for g in cluster.groups for m in g.members}
    works, serves = (half > min(0.5, half.max() - 1e-12) for half in np.split(point[: 2 * len(machines)], 2))
    role = {
        m: wanted if (wanted := int(w) + 2 * int(s)) in roles else roles[-1]
        for (m, roles), w, s in zip(machines.items(), works, serves, strict=True)
    }
    weights = [x if role[m] in (WORKER, BOTH) else 0.0 for (m, _), x in zip(slots, point[2 * len(machines) :], strict=True)]
    loads = np.zeros((cluster.machines, cluster.most_devices), np.int64)
    for slot, samples in zip(slots, shared_out(weights, cluster.batch), strict=True):
        loads[slot] = samples
    return loads, np.array([role.get(m) in (SERVER, BOTH) for m in range(cluster.machines)])


def _cmaes(score: Callable[[_Floats], float], wide: int, rng: np.random.Generator, evaluations: int) -> None:
    """CMA-ES from the middle of the unit cube."""
    from cmaes import CMA

    bounds = np.tile([0.0, 1.0], (wide, 1))
    search = CMA(mean=np.full(wide, 0.5), sigma=0.3, bounds=bounds, seed=int(rng.integers(2**31)))
    for _ in range(evaluations // search.population_size):
        points = [search.ask() for _ in range(search.population_size)]
        search.tell([(point, score(point)) for point in points])
