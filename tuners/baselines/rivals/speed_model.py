"""The speed of a job as a function of its numbers of workers and servers, fitted to a few measured pairs.

What Optimus and DLRover-RM share: they measure the job under a few pairs (w, p), fit the seconds of a worker's mini-batch as
a sum of terms with coefficients that are not negative, and move to the pair that the fit makes out as best. The terms and
the choice are each paper's own. Machines count the same, as in both papers. Our own: which machines have which role
(`with_roles`), which pairs are samples (`_SHARES`), and that a fit is not trusted far from them (`within_reach`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from tuners.actions import Job, Method, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.settings import Choice, Node

__all__ = [
    "Choose",
    "Pair",
    "Seconds",
    "Speed",
    "Terms",
    "fitted",
    "pairs",
    "roles_are_held",
    "seconds_of_a_push",
    "tuned",
    "with_roles",
    "within_reach",
]

Pair: TypeAlias = tuple[int, int]
"""Numbers of workers and servers, (w, p)."""

Terms: TypeAlias = Callable[[int, int], Sequence[float]]
"""The terms of the seconds of a mini-batch with w workers and p servers."""

Seconds: TypeAlias = Callable[[Pair], float]
"""The seconds of a worker's mini-batch, fitted."""

Speed: TypeAlias = Callable[[Pair], float]
"""The job's speed, of which only ratios count: workers over seconds, or one over seconds where they share one batch."""

_SHARES = ((0.75, 0.25), (0.5, 0.5), (0.25, 0.25), (0.85, 0.15), (0.5, 0.2), (0.35, 0.65), (0.2, 0.4))
"""Workers and servers of the samples, of all machines."""

_DIVIDED = ("load", "data_share", "model_share", "block")
"""Families of knobs that divide batch, data and model: a machine that gets a role has no part by the setting before."""

Choose: TypeAlias = Callable[[Speed, frozenset[Pair]], Pair]
"""The pair to move to, of those that the job can have."""


def roles_are_held(job: Job) -> str:
    """Why a tuner of numbers of workers and servers has nothing to tune in `job`, or ""."""
    free = job.space.frees("worker_count") or job.space.frees("role")
    return "" if free else "Neither the number of workers nor the roles of machines are free here."


def tuned(
    job: Job, terms: Terms, choose: Choose, *, samples: int, clocks: int, gain: float, method: Method | None = None
) -> Tuner:
    """Measure `samples` pairs for `clocks` pushes per worker each; then fit, move where that gains, measure, fit again.

    A pair that was measured is as fast as measured, so that the job goes back to the best one that it has seen.
    """
    current, measured, refused, nodes = job.start, dict[Pair, float](), set[Pair](), job.nodes
    plan = [(pair, "a sample") for pair in _spread(pairs(job, nodes), samples, _pair(current))]
    while True:
        if plan:
            pair, why = plan.pop(0)
            wanted = with_roles(job, current, pair, nodes)
            if wanted is None:
                refused.add(pair)
            elif pair != _pair(current):
                try:
                    cost = yield from Reconfigure(wanted, method, reason=f"{pair[0]} workers, {pair[1]} servers: {why}")
                    current = wanted if cost.done else current
                except Rejected:
                    refused.add(pair)
        seen = yield from Run(clocks=(clocks + 1) * len(current.workers))
        if seen.status != "running":
            return
        if seen.nodes and seen.nodes != nodes:
            nodes, refused = seen.nodes, set()
        if seen.setting is not None and seen.setting != current:
            current = seen.setting  # the system has lost a machine: this window mixes two settings
            continue
        seconds = seconds_of_a_push(seen)
        if np.isfinite(seconds):
            measured[_pair(current)] = seconds
        able = frozenset(p for p in pairs(job, nodes) if p not in refused and measured and within_reach(p, measured))
        if plan or not able or _pair(current) not in measured:
            continue
        speed, now = _speed(job, measured, terms), _pair(current)
        best = max([choose(speed, able), *(measured.keys() & able)], key=speed)
        if best != now and speed(best) > (1 + gain) * speed(now):
            plan = [(best, f"{speed(best) / speed(now):.2f} times as fast by the fit")]


def _speed(job: Job, measured: Mapping[Pair, float], terms: Terms) -> Speed:
    """The speed as measured, elsewhere by a fit. Where all workers share one batch, each computes less of it the more they
    are, and the job makes one step per push of each."""
    shared = bool(job.space.whole_batch)
    model = fitted(measured, (lambda w, p: (1.0 / w, *terms(w, p))) if shared else terms)
    return lambda pair: (1 if shared else pair[0]) / max(measured.get(pair) or model(pair), 1e-12)


def seconds_of_a_push(seen: Window) -> float:
    """Seconds of a worker's mini-batch: workers over pushes per second, without each worker's first; nan if unknown."""
    times, count = seen.pushes.seconds, len(seen.workers)
    later = times[count - 1 :] if count else times
    return count * float(later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else np.nan


def fitted(measured: Mapping[Pair, float], terms: Terms) -> Seconds:
    """The seconds of a mini-batch as a sum of `terms`, by least squares of relative errors; no coefficient is negative."""
    rows: NDArray[np.float64] = np.array([terms(*pair) for pair in measured], float)
    seconds = np.array(list(measured.values()))
    factors, _ = nnls(rows / seconds[:, None], np.ones(len(seconds)))
    return lambda pair: float(np.dot(terms(*pair), factors))


def pairs(job: Job, nodes: Sequence[Node]) -> Iterator[Pair]:
    """The pairs that `job` can have on `nodes`: all machines in use where `worker_count` is free, and else as many as may be
    workers, servers and idle; and that of the start, which may have machines with both roles, while these are all there."""
    count, knob = len(nodes), job.space.knob("worker_count")
    roles = [_roles(job, n.name) for n in nodes]
    most_workers, most_servers = (sum(role in may for may in roles) for role in ("worker", "server"))
    only_workers, only_servers = (sum(may == {role} for may in roles) for role in ("worker", "server"))
    used, usable = (sum("idle" not in may for may in roles), sum(bool(may & {"worker", "server"}) for may in roles))
    for workers in range(1, count):
        for servers in (count - workers,) if knob is not None else range(1, count - workers + 1):
            if knob is not None:
                possible = knob.contains(workers)
            else:
                enough = used <= workers + servers <= usable
                possible = enough and only_workers <= workers <= most_workers and only_servers <= servers <= most_servers
            if possible:
                yield workers, servers
    if sum(_pair(job.start)) > count and {*job.start.workers, *job.start.servers} <= {n.name for n in nodes}:
        yield _pair(job.start)


def _roles(job: Job, node: str) -> set[str]:
    """The roles that a machine may have: the options of its knob, or the one in which it is held."""
    knob = job.space.knob(f"role/{node}")
    return {str(role) for role in knob.options} if isinstance(knob, Choice) else {job.space.base.role_of(node)}


def _spread(able: Iterable[Pair], count: int, first: Pair) -> Iterator[Pair]:
    """Up to `count` pairs of `able`: `first`, then those nearest to shares of all machines, none near one before it."""
    left, taken = sorted(set(able) - {first}), [first]
    most = max((w + p for w, p in left), default=0)
    yield first
    for share in _SHARES:
        near = min(left, key=lambda pair: math.dist(pair, [s * most for s in share]), default=first)
        if len(taken) < count and all(math.dist(near, other) >= most / 8 for other in taken):
            taken.append(near)
            yield near


def within_reach(pair: Pair, measured: Iterable[Pair]) -> bool:
    """Whether workers per server are within twice what was measured, both ways: a fit does not know a bottleneck beyond."""
    ratios = [w / p for w, p in measured]
    return min(ratios) / 2 <= pair[0] / pair[1] <= 2 * max(ratios)


def with_roles(job: Job, setting: Setting, pair: Pair, nodes: Sequence[Node]) -> Setting | None:
    """`setting` with w of `nodes` as workers and p as servers; None where the job does not admit that.

    Where roles are free, machines keep theirs as far as the numbers allow: moving training data or the model takes long. To
    grow, idle machines come first, as workers in the scenario's order, as servers from its end. More roles than machines
    are those of the start. Other workers or servers than those of the start have equal loads and shares.
    """
    workers, servers = pair
    values = job.space.values(setting)
    if job.space.knob("worker_count") is not None:
        values["worker_count"] = workers
    names, used = [n.name for n in nodes], {*setting.workers, *setting.servers}
    if workers + servers > len(names):
        work, serve = list(job.start.workers), list(job.start.servers)
    else:
        work = [n for n in names if n in setting.workers][:workers]
        serve = [n for n in reversed(names) if n in setting.servers and n not in work][:servers]
        work += sorted((n for n in names if n not in (*work, *serve)), key=used.__contains__)[: workers - len(work)]
        others = sorted((n for n in reversed(names) if n not in (*work, *serve)), key=used.__contains__)
        serve += others[: servers - len(serve)]
    role = {n: ("both" if n in serve else "worker") if n in work else "server" for n in (*work, *serve)}
    values |= {name: role.get(name.partition("/")[2], "idle") for name in values if name.startswith("role/")}
    made = job.space.setting({name: value for name, value in values.items() if name.partition("/")[0] not in _DIVIDED})
    return made if _pair(made) == pair and job.space.admits(made) else None


def _pair(setting: Setting) -> Pair:
    return len(setting.workers), len(setting.servers)
