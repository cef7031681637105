"""Cruise: which machines work, which serve, and how much of data and model each holds, from a cost model of an epoch (Lee
et al., "Automating System Configuration of Distributed Machine Learning", ICDCS 2019).

Monitors report what a mini-batch costs each worker (`tuners.cruise_monitor`); from that the model predicts the time of an
epoch under every split, and the job is reconfigured, by migration, when the best split gains enough. Alike machines share
evenly, and Eq. 5 finds the best number of workers in O(N); machines of several types get the optimum of Fig. 3
(`tuners.cruise_placement`). Where we differ or had to choose:

* The gain is predicted against predicted, as the public code does; ``against="measured"`` charges the model's own error to
  the current split. The paper's threshold of 5 % is the default (the code's is 0), for one type and for several (the code
  has none there). Mini-batches are not rounded up, as in Eq. 5, unless `round_up`, as in Eq. 4.
* ``C_w.proc`` is seconds per sample, measured. ``M`` is what one pull moves under the current setting. ``b`` is what the
  vendor states of the NIC, or with ``bandwidth="measured"`` that times what the pulls achieved of it: a server may serve
  slower than its NIC. `server_term` is explained in `tuners.cruise_placement`.
* After a change what was measured is forgotten, what was pushed during the change does not count, nor does the first
  mini-batch after it, since it may mix both settings.
* Resources that come and go are an exception from the threshold. Where a machine in use was lost, any better split is
  taken; where it is in use still, having been given notice, every split is better. New machines are used where that is
  strictly better than the best split of those in use, and gains `extra_gain` over the current one.
* No oscillation: ties keep the current split, and one that was left is taken up again only for twice the gain, the next
  time for four times, until resources change. A split that the system refused is not asked for again until then, either.
* A split is reached with the fewest changes of role: workers stay workers first, idle machines come next, servers last.
* Fig. 3 makes every machine worker or server. A server that would hold nothing is left idle, where the job allows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from tuners.actions import Job, Method, Reconfigure, Rejected, Run, Setting, Tuner
from tuners.cruise_monitor import Group, Monitor, Reading, groups, remember
from tuners.cruise_placement import (
    Placement,
    Problem,
    ServerTerm,
    best_in_batches,
    place,
    placement_seconds,
    pull_seconds,
    splits,
)
from tuners.settings import Node

__all__ = ["Measured", "best_worker_count", "cruise", "epoch_seconds"]

_TIE = 1e-9  # relative difference of epoch times below which they are equal


def cruise(
    job: Job,
    *,
    gain: float = 0.05,
    extra_gain: float = 0.0,
    against: Literal["predicted", "measured"] = "predicted",
    bandwidth: Literal["nic", "measured"] = "nic",
    server_term: ServerTerm = "sum",
    round_up: bool = False,
    batches: int = 10,
    warmup: int = 3,
    resume: int = 1,
    least: int = 3,
    forget: float = 0.0,
    recent: int = 0,
    newest: float = 0.9,
) -> Tuner:
    """Watch, predict, and reconfigure workers, servers and their shares when that gains more than `gain`.

    A job whose roles are not free just runs.

    Args:
        job: what to tune.
        gain: share of the current epoch time that a change must be predicted to save.
        extra_gain: the same where it is machines that have joined which make the difference.
        against: what a prediction is held against: the model's epoch time of the current split, or the measured one.
        bandwidth: b as the vendor states it, or as the pulls achieved it.
        server_term: the server's part of Eq. 4.
        round_up: whether the model rounds each worker's mini-batches up.
        batches: the model is consulted every so many mini-batches per worker,
        least: once every worker has so many of them measured,
        warmup: not counting its first ones, and
        resume: after each change.
        forget: the k-th newest mini-batch weighs (1 - forget)^k.
        recent: how many of the newest mini-batches are averaged; 0 is all since the last solve.
        newest: weight of the newest reading in what is remembered of a machine that may not be a worker later.
    """
    if not (job.space.frees("worker_count") or job.space.frees("role")):
        return
    model = _Model(job, bandwidth, server_term, round_up, against)
    current, monitor, known = job.start, Monitor(warmup, forget, recent), dict[str, float]()
    resources = _Resources(frozenset(n.name for n in job.nodes))
    left, refused = Counter[_Roles](), set[_Roles]()  # splits since resources last changed
    while True:
        seen = yield from Run(clocks=batches * len(current.workers))
        available = seen.nodes or job.nodes
        if resources.change(current, available):
            left, refused = Counter(), set()
        if seen.setting is not None and _roles(seen.setting) != _roles(current):
            # The runtime has lost a machine and changed the setting itself.
            monitor = Monitor(resume, forget, recent, seen.end_seconds)
        current = seen.setting or current
        monitor.add(seen, job)
        at_work = [w for w in current.workers if w in resources.names]
        if not monitor.ready(at_work, least):
            continue
        readings = monitor.readings(at_work)
        monitor.clear()
        remember(known, readings, newest)
        wanted = model.best(current, available, readings, known, refused)
        if wanted is None or wanted.gain <= resources.needed(wanted.setting, gain, extra_gain, left):
            resources.considered()
            continue
        try:
            cost = yield from Reconfigure(wanted.setting, method=_method(job))
        except Rejected:
            refused.add(_roles(wanted.setting))
            continue
        monitor = Monitor(resume, forget, recent, seen.end_seconds + cost.seconds)
        if cost.done:
            left[_roles(current)] += 1
            current = wanted.setting
            resources.considered()


# --------------------------------------------------------------------------------------------- the cost model (III-A, B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the cost model knows of a job on alike machines, in the paper's letters."""

    machines: int  # N
    samples: int  # D, in an epoch
    batch_size: float  # B, samples in a mini-batch
    compute_seconds: float  # C_w.proc, per sample
    model_bytes: float  # M, moved by one pull
    bytes_per_second: float  # b


def epoch_seconds(workers: int, servers: int, measured: Measured, *, round_up: bool = False) -> float:
    """Time of an epoch under an even split, Eqs. 1-4: the minimand of Eq. 5 where workers and servers make up N.

    Eq. 4 rounds up what each worker pulls, Eq. 5 does not. Infinite where either is missing.
    """
    if workers < 1 or servers < 1:
        return np.inf
    pull_seconds = measured.model_bytes / measured.bytes_per_second * max(1.0, workers / servers)
    data = measured.samples / workers
    pulls = data / measured.batch_size
    return data * measured.compute_seconds + (ceil(pulls) if round_up else pulls) * pull_seconds


# ------------------------------------------------------------------------------------------------ the solver (III-C, Eq. 5)


def best_worker_count(measured: Measured, allowed: Iterable[int] | None = None, *, round_up: bool = False) -> int | None:
    """The number of workers of least epoch time in O(N), among 1 .. N - 1 or those `allowed`; the fewest of equals.

    None where no split is possible.
    """
    n = measured.machines
    counts = [w for w in (allowed if allowed is not None else range(1, n)) if 1 <= w < n]
    return min(sorted(counts), key=lambda w: epoch_seconds(w, n - w, measured, round_up=round_up), default=None)


# -------------------------------------------------------------------------------------------------- what to do about a job

_Roles: TypeAlias = tuple[frozenset[str], frozenset[str]]
"""Workers and servers."""


class _Wanted(NamedTuple):
    """The best split of some machines, and what it saves of the current epoch time."""

    setting: Setting
    seconds: float
    gain: float


@dataclass(frozen=True, slots=True)
class _Model:
    """The cost model, applied to a job."""

    job: Job
    bandwidth: Literal["nic", "measured"]
    server_term: ServerTerm
    round_up: bool
    against: Literal["predicted", "measured"]

    def best(
        self,
        current: Setting,
        available: tuple[Node, ...],
        readings: Mapping[str, Reading],
        known: Mapping[str, float],
        refused: Set[_Roles],
    ) -> _Wanted | None:
        """The best split of the machines that are there; of those in use, unless others make it strictly better."""
        in_use = set(current.workers + current.servers)
        gone = in_use - {n.name for n in available}
        everyone = groups([*available, *(n for n in self.job.nodes if n.name in gone)], readings, known)
        share = self._achieved(current, everyone, readings) if self.bandwidth == "measured" else 1.0
        now = (
            np.inf if gone else self._seconds(current, self._problem(current, everyone, readings, share), everyone, readings)
        )
        best = None
        for nodes in ([n for n in available if n.name in in_use], available):
            if len(nodes) < 2:
                continue
            found = [_ordered(g, current) for g in groups(nodes, readings, known)]
            problem = self._problem(current, found, readings, share)
            for setting, seconds in self._ranked(current, problem, [n for g in found for n in g.nodes], refused):
                if best is None or seconds < best.seconds * (1 - _TIE):
                    best = _Wanted(setting, seconds, 1 - seconds / now)
                break
        return best

    def _ranked(
        self, current: Setting, problem: Problem, names: list[str], refused: Set[_Roles]
    ) -> Iterator[tuple[Setting, float]]:
        """Settings that the job admits and their epoch times, the fastest first (of alike machines, only that one)."""

        def admitted(setting: Setting) -> bool:
            return _roles(setting) not in refused and _admits(self.job, setting)

        if len(problem.kinds) == 1:
            measured = _measured(problem)
            even = {w: s for w in range(1, len(names)) if admitted(s := _even_split(current, w, names))}
            w = best_worker_count(measured, even, round_up=self.round_up)
            if w is not None:
                yield even[w], epoch_seconds(w, len(names) - w, measured, round_up=self.round_up)
            return
        for placement in _placements(problem, self.round_up):
            seconds = placement_seconds(problem, placement, round_up=self.round_up)
            for setting in _settings(current, names, placement):
                if admitted(setting):
                    yield setting, seconds

    def _problem(self, current: Setting, found: list[Group], readings: Mapping[str, Reading], share: float) -> Problem:
        return Problem(
            kinds=tuple(g.kind(share) for g in found),
            samples=self.job.samples,
            batch_size=float(np.mean([r.samples for r in readings.values()])),
            model_bytes=self.job.model_bytes * current.transfer_bits / 32,
            server_term=self.server_term,
        )

    def _achieved(self, current: Setting, everyone: list[Group], readings: Mapping[str, Reading]) -> float:
        """The share of the stated bandwidth that the pulls achieve: what they should take over what they took."""
        problem = self._problem(current, everyone, readings, 1.0)
        stated = dict(zip(current.workers, pull_seconds(problem, _placed(current, problem, everyone)), strict=True))
        took = sum(r.pull_seconds for r in readings.values())
        return float(sum(stated[w] for w in readings) / took) if took > 0 else 1.0

    def _seconds(self, current: Setting, problem: Problem, everyone: list[Group], readings: Mapping[str, Reading]) -> float:
        """What an epoch takes under the current split, in which no machine is missing."""
        placement = _placed(current, problem, everyone)
        if self.against == "measured":
            batches = np.array(placement.data) / [readings[w].samples for w in current.workers]
            each = [readings[w].compute_seconds + readings[w].pull_seconds for w in current.workers]
            return float(np.max(batches * each))
        return placement_seconds(problem, placement, round_up=self.round_up)


def _measured(problem: Problem) -> Measured:
    """A problem of one kind, as Eq. 5 takes it."""
    (kind,) = problem.kinds
    return Measured(
        machines=kind.count,
        samples=int(problem.samples),
        batch_size=problem.batch_size,
        compute_seconds=kind.compute_seconds,
        model_bytes=problem.model_bytes,
        bytes_per_second=kind.bytes_per_second,
    )


def _placements(problem: Problem, round_up: bool) -> Iterator[Placement]:
    """The optimum first, then the best of every number of workers per kind."""
    whole = best_in_batches(problem) if round_up else None
    if whole is not None:
        yield whole
    yield from (place(problem, split) for split in splits(problem))


# --------------------------------------------------------------------------------------------------- settings and machines


def _roles(setting: Setting) -> _Roles:
    return frozenset(setting.workers), frozenset(setting.servers)


def _admits(job: Job, setting: Setting) -> bool:
    try:
        job.space.check(setting)
    except Rejected:
        return False
    return True


def _in_order(current: Setting, nodes: Iterable[str]) -> list[str]:
    """In the order in which machines should be made workers: workers are that already, and servers hold the model."""
    rank = dict.fromkeys(current.servers, 2) | dict.fromkeys(current.workers, 0)
    order = {n: i for i, n in enumerate(current.workers)}
    return sorted(nodes, key=lambda n: (rank.get(n, 1), order.get(n, 0)))


def _ordered(group: Group, current: Setting) -> Group:
    return group._replace(nodes=tuple(_in_order(current, group.nodes)))


def _even_split(current: Setting, workers: int, nodes: Iterable[str]) -> Setting:
    """So many workers, all other machines servers, even shares, and as few changes of role from `current` as can be."""
    order = _in_order(current, nodes)
    return replace(
        current, workers=tuple(order[:workers]), servers=tuple(order[workers:]), loads=(), data_shares=(), model_shares=()
    )


def _placed(setting: Setting, problem: Problem, found: list[Group]) -> Placement:
    """`setting` on the machines of `found`."""
    number = {n: i for i, n in enumerate(n for g in found for n in g.nodes)}
    data, model = setting.shares()
    return Placement(
        tuple(number[w] for w in setting.workers),
        tuple(number[s] for s in setting.servers),
        tuple(d * problem.samples for d in data),
        tuple(m * problem.model_bytes for m in model),
    )


def _settings(current: Setting, names: list[str], placement: Placement) -> Iterator[Setting]:
    """`placement` as a setting: without the servers that hold nothing, then with them."""
    data = {names[i]: d for i, d in zip(placement.workers, placement.data, strict=True)}
    model = {names[j]: m for j, m in zip(placement.servers, placement.model, strict=True)}
    for held in ({s: m for s, m in model.items() if m > 0}, model):
        workers, servers = _in_order(current, data), _in_order(current, held)
        yield replace(
            current,
            workers=tuple(workers),
            servers=tuple(servers),
            loads=(),
            data_shares=_shares([data[w] for w in workers]),
            model_shares=_shares([held[s] for s in servers]),
        )
        if held.keys() == model.keys():
            return


def _shares(parts: list[float]) -> tuple[float, ...]:
    """Parts of their sum; () where they are even."""
    total = sum(parts)
    return () if max(parts) - min(parts) <= _TIE * total else tuple(p / total for p in parts)


# ----------------------------------------------------------------------------------------- trigger and execution (IV-A.2, 3)


class _Resources:
    """Which machines there are, and what that has to do with the split in use."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._lost = False  # a machine in use went, and no split was chosen since
        self._joined = frozenset[str]()  # machines that came since a split was chosen

    def change(self, current: Setting, available: Iterable[Node]) -> bool:
        """Take note of what is available now; whether that is news."""
        before, self.names = self.names, frozenset(n.name for n in available)
        self._lost = self._lost or not self.names.issuperset(current.workers + current.servers)
        self._joined = (self._joined | (self.names - before)) & self.names
        return before != self.names

    def considered(self) -> None:
        """A split has been chosen with these machines in mind."""
        self._lost, self._joined = False, frozenset()

    def needed(self, wanted: Setting, gain: float, extra_gain: float, left: Counter[_Roles]) -> float:
        """What a change to `wanted` has to gain, twice as much for every time that it was `left`."""
        if self._lost:
            return _TIE
        joins = not self._joined.isdisjoint(wanted.workers + wanted.servers)
        return max(_TIE, extra_gain if joins else gain * 2 ** left[_roles(wanted)])


def _method(job: Job) -> Method | None:
    """Cruise migrates blocks; a system that cannot gets its own first method."""
    return "migrate" if "migrate" in job.methods else None
