"""The best split for a job: the cost model of Cruise (Lee et al., ICDCS 2019, Section III), applied to measurements.

Machines of one type get equal shares, and Eq. 5 finds the best number of workers in O(N). Machines of several types get the
optimum of Fig. 3 (`tuners.cruise.placement`, or `tuners.cruise.milp`). Where loads divide one batch of all workers, that is
divided in place of the data; this is not in the paper. A split becomes a setting with as few changes of role as possible:
workers stay workers first, idle machines become workers next, and servers, which hold the model, last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from tuners.actions import Job, Setting
from tuners.cruise import milp
from tuners.cruise.monitor import MeasuredKind, Memory, Reading, measured_kinds
from tuners.cruise.placement import (
    Placement,
    Problem,
    ServerTerm,
    best_in_batches,
    place,
    placement_seconds,
    pull_seconds,
    queued_pull_seconds,
    splits,
)
from tuners.cruise.queueing import pulls_in_queue
from tuners.settings import Node
from tuners.space import share_batch

__all__ = ["TIE", "CostModel", "Roles", "Solver", "Wanted", "best_worker_count", "epoch_seconds", "roles"]

TIE = 1e-9
"""Relative difference of epoch times below which they are equal."""

Roles: TypeAlias = tuple[frozenset[str], frozenset[str]]
"""Workers and servers."""

Solver: TypeAlias = Literal["exact", "milp"]
"""How the best placement on machines of several kinds is found: by `tuners.cruise.placement` or by `tuners.cruise.milp`."""


# ------------------------------------------------------------------------------------------- alike machines (III-C, Eq. 5)


def epoch_seconds(workers: int, servers: int, problem: Problem, *, round_up: bool = False) -> float:
    """Time of an epoch on machines of one kind with equal shares, Eqs. 1-4; Eq. 5 minimises it.

    Eq. 4 rounds up each worker's number of pulls, Eq. 5 does not. Infinite without workers or without servers.
    """
    if workers < 1 or servers < 1:
        return np.inf
    problem = problem.of_workers(workers)
    (kind,) = problem.kinds
    data = problem.samples / workers
    pulls = ceil(data / problem.batch_size) if round_up else data / problem.batch_size
    compute = data * kind.compute_seconds  # Eq. 3, with d_i = D / w
    if problem.server_term == "queue":
        each = pulls_in_queue(
            np.array([[float(workers)]]),
            np.array([problem.batch_size * kind.compute_seconds]),
            np.array([problem.model_bytes / kind.bytes_per_second]),
            np.array([problem.model_bytes / (servers * kind.served_per_second)]),
        )
        return float(compute + pulls * each[0, 0])
    pull = pulls * problem.model_bytes / kind.bytes_per_second  # Eq. 4: the worker's term,
    served = pull * (workers / servers)  # and the server's, with m_j = M / s
    if problem.server_term == "own":
        served *= kind.bytes_per_second / kind.served_per_second
    if problem.overlap:
        return max(compute + pull, served)
    return compute + max(pull, served)  # Eqs. 1 and 2


def best_worker_count(problem: Problem, allowed: Iterable[int] | None = None, *, round_up: bool = False) -> int | None:
    """The number of workers with the shortest epoch, in O(N), among 1 .. N - 1 or those `allowed`; the smallest of equals.

    None where no split is possible.
    """
    n = problem.machines
    counts = [w for w in (allowed if allowed is not None else range(1, n)) if 1 <= w < n]
    return min(sorted(counts), key=lambda w: epoch_seconds(w, n - w, problem, round_up=round_up), default=None)


# ------------------------------------------------------------------------------------------------------ the model of a job


class Wanted(NamedTuple):
    """The best split, its epoch time, and the share of the current epoch time that it saves."""

    setting: Setting
    seconds: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The cost model of a job. The options are those of `tuners.cruise.cruise`."""

    job: Job
    server_term: ServerTerm
    overlap: bool
    round_up: bool
    solver: Solver
    bandwidth: Literal["nic", "measured"]
    against: Literal["predicted", "measured"]

    def best(
        self,
        current: Setting,
        available: tuple[Node, ...],
        readings: Mapping[str, Reading],
        known: Memory,
        refused: Set[Roles],
    ) -> Wanted | None:
        """The best split of the available machines; only of those in use, unless the others make it strictly better."""
        in_use = set(current.workers + current.servers)
        gone = in_use - {n.name for n in available}
        everyone = measured_kinds([*available, *(n for n in self.job.nodes if n.name in gone)], readings, known)
        share = self._achieved(current, everyone, readings) if self.bandwidth == "measured" else 1.0
        now = np.inf if gone else self._seconds(current, everyone, readings, share)
        best = None
        for nodes in dict.fromkeys((tuple(n for n in available if n.name in in_use), tuple(available))):
            if len(nodes) < 2:
                continue
            found = [_ordered(k, current) for k in measured_kinds(nodes, readings, known)]
            problem = self._problem(current, found, readings, share)
            names = [n for k in found for n in k.nodes]
            setting, seconds = next(self._ranked(current, problem, names, refused), (None, np.inf))
            if setting is not None and (best is None or seconds < best.seconds * (1 - TIE)):
                best = Wanted(setting, seconds, 1 - seconds / now)
        return best

    def _ranked(
        self, current: Setting, problem: Problem, names: list[str], refused: Set[Roles]
    ) -> Iterator[tuple[Setting, float]]:
        """Settings that the job admits, with their epoch times, the fastest first (for alike machines only that one)."""

        def admitted(setting: Setting) -> bool:
            return roles(setting) not in refused and self.job.space.admits(setting)

        if len(problem.kinds) == 1:
            splits_of = ((w, share_batch(self.job.space, _even_split(current, w, names))) for w in range(1, len(names)))
            even = {w: s for w, s in splits_of if admitted(s)}
            w = best_worker_count(problem, even, round_up=self.round_up)
            if w is not None:
                yield even[w], epoch_seconds(w, len(names) - w, problem, round_up=self.round_up)
            return
        for placement in _placements(problem, self.solver, self.round_up):
            seconds = placement_seconds(problem, placement, round_up=self.round_up)
            data = {names[i]: d for i, d in zip(placement.workers, placement.data, strict=True)}
            for setting in _settings(current, names, placement):
                if self.job.space.whole_batch:
                    # The batch is what is divided, and every worker computes its part in every round.
                    setting = replace(share_batch(self.job.space, setting, data), data_shares=())
                if admitted(setting):
                    yield setting, seconds

    def _problem(
        self, current: Setting, found: list[MeasuredKind], readings: Mapping[str, Reading], share: float
    ) -> Problem:
        return Problem(
            kinds=tuple(k.modelled(share) for k in found),
            samples=self.job.epoch_samples,
            batch_size=float(np.mean([r.samples for r in readings.values()])),
            model_bytes=self.job.model_bytes * current.transfer_bits / 32,
            # Where all workers wait for each other, all pull at once: there is nothing that a queue would say better.
            server_term="own" if self.server_term == "queue" and current.waits_for_all else self.server_term,
            overlap=self.overlap and not current.waits_for_all,
            whole_batch=self.job.space.whole_batch,
        )

    def _achieved(self, current: Setting, everyone: list[MeasuredKind], readings: Mapping[str, Reading]) -> float:
        """The share of the vendor's bandwidth that the pulls achieve: predicted over measured seconds of a pull.

        With overlap a pull that waits for a busy server ends when the server has served all workers.
        """
        problem = self._problem(current, everyone, readings, 1.0)
        placement = _placed(current, problem, everyone)
        measured = [current.workers.index(w) for w in readings]
        took = sum(r.pull_seconds for r in readings.values())
        if not took > 0:
            return 1.0
        if problem.server_term == "queue":
            return float(queued_pull_seconds(problem, placement)[measured].sum() / took)
        served, alone = (term[measured] for term in pull_seconds(problem, placement))
        if not problem.overlap:
            return float(np.maximum(served, alone).sum() / took)
        busy = sum(r.compute_seconds for r in readings.values())
        return float(max(served.sum() / (took + busy), alone.sum() / took))

    def _seconds(
        self, current: Setting, everyone: list[MeasuredKind], readings: Mapping[str, Reading], share: float
    ) -> float:
        """The epoch time of the current split, in which no machine is missing."""
        problem = self._problem(current, everyone, readings, share)
        placement = _placed(current, problem, everyone)
        if self.against == "measured":
            batches = np.array(placement.data) / [readings[w].samples for w in current.workers]
            each = [readings[w].compute_seconds + readings[w].pull_seconds for w in current.workers]
            return float(np.max(batches * each))
        return placement_seconds(problem, placement, round_up=self.round_up)


def _placements(problem: Problem, solver: Solver, round_up: bool) -> Iterator[Placement]:
    """The optimum first; then, for systems that refuse it, the best placement of each number of workers per kind."""
    if solver == "milp":
        solved = milp.solve(problem, data="samples")
        if solved is not None:
            yield solved.placement
    elif round_up:
        whole = best_in_batches(problem)
        if whole is not None:
            yield whole
    yield from (place(problem, split) for split in splits(problem))


# --------------------------------------------------------------------------------------------------- settings and machines


def roles(setting: Setting) -> Roles:
    """Workers and servers of `setting`."""
    return frozenset(setting.workers), frozenset(setting.servers)


def _in_order(current: Setting, nodes: Iterable[str]) -> list[str]:
    """The order in which machines become workers: present workers first, servers last, because they hold the model."""
    rank = dict.fromkeys(current.servers, 2) | dict.fromkeys(current.workers, 0)
    order = {n: i for i, n in enumerate(current.workers)}
    return sorted(nodes, key=lambda n: (rank.get(n, 1), order.get(n, 0)))


def _ordered(kind: MeasuredKind, current: Setting) -> MeasuredKind:
    return kind._replace(nodes=tuple(_in_order(current, kind.nodes)))


def _even_split(current: Setting, workers: int, nodes: Iterable[str]) -> Setting:
    """The split with that number of workers, all other machines servers, equal shares, and few changes of role from
    `current`."""
    order = _in_order(current, nodes)
    return replace(
        current,
        workers=tuple(order[:workers]),
        servers=tuple(order[workers:]),
        loads=(),
        data_shares=(),
        model_shares=(),
        block_owners=(),
    )


def _placed(setting: Setting, problem: Problem, found: list[MeasuredKind]) -> Placement:
    """`setting` as a placement on the machines of `found`."""
    number = {n: i for i, n in enumerate(n for k in found for n in k.nodes)}
    data, model = setting.shares()
    if problem.whole_batch and setting.loads:
        data = tuple(sum(row) / problem.whole_batch for row in setting.loads)
    return Placement(
        tuple(number[w] for w in setting.workers),
        tuple(number[s] for s in setting.servers),
        tuple(d * problem.samples for d in data),
        tuple(m * problem.model_bytes for m in model),
    )


def _settings(current: Setting, names: list[str], placement: Placement) -> Iterator[Setting]:
    """`placement` as a setting: first without the servers that hold nothing, then with them."""
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
            block_owners=(),
        )
        if held.keys() == model.keys():
            return


def _shares(parts: list[float]) -> tuple[float, ...]:
    """Each part over the sum; () where all are equal."""
    total = sum(parts)
    return () if max(parts) - min(parts) <= TIE * total else tuple(p / total for p in parts)
