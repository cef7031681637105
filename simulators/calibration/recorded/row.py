"""A recorded setting, with the mean times that were measured under it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulators.calibration.recorded.stragglers import Sleeper

__all__ = ["ALIKE", "Row", "WorkerTime"]

ALIKE = 0.05
"""Relative difference below which workers count as equally fast."""


class WorkerTime(NamedTuple):
    """How long a worker computes a mini-batch under a setting."""

    worker: int  # its number
    seconds: float  # median, awake
    error: float = 0.0  # standard error of the median, seconds
    machine: str = ""  # its name, or the number of the worker where it has none


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of one run, and the mean times that were recorded under it; nan: not recorded."""

    run: str
    workload: str
    workers: int
    servers: int
    cycle_seconds: float  # from one push of a worker to its next: workers / pushes per second
    batch_size: int = 1  # of one worker; the mean, where these differ
    intra_threads: int = 0  # 0: one per core
    inter_threads: int = 0
    transfer_bits: int = 32
    policy: str = "asp"
    staleness: int = 0
    shared: bool = False  # servers run on the workers' machines
    speeds: tuple[float, ...] = ()  # of the workers, relative; (): all equal
    nics: tuple[float, ...] = ()  # of the workers, then of servers on their own machines, relative; (): all equal
    delays: tuple[float, ...] = ()  # seconds, one way, of the links of the same machines as `nics`; (): none
    sleeps: tuple[Sleeper, ...] = ()  # of the workers, in every mini-batch; (): none has any
    model_shares: tuple[float, ...] = ()  # of the model, per server, sum 1; (): equal shares
    batch_sizes: tuple[int, ...] = ()  # of each worker; (): all have `batch_size`
    worker_times: tuple[WorkerTime, ...] = ()
    compute_seconds: float = math.nan
    pull_seconds: float = math.nan
    push_seconds: float = math.nan
    pushes: int = 0  # number of pushes in the means
    error: float = 0.0  # relative standard error of `cycle_seconds`, by how cycles vary within runs; 0: not known
    all_seconds: float = math.nan  # from the first to the last push under the setting, warm-up included
    all_pushes: int = 0  # number of pushes in `all_seconds`
    snapshot_clocks: int = 0  # pushes from one snapshot of the servers to the next, as in `Cluster`; 0: none was taken
    cycle_snapshot_clocks: int = 0  # the same, of the pushes that `cycle_seconds` is a mean over, which may be few
    usual_machine: str = ""  # whose speed is 1, where runs tell speeds together (`on_machines`); "": the run's median
    machines: int = 0  # least size of the cluster; equal for all rows, so that the engine is compiled once

    @property
    def combination(self) -> tuple[str, int, int]:
        """Policy, workers and servers: the unit that held-out rows are chosen by."""
        return self.policy, self.workers, self.servers

    @property
    def identity(self) -> tuple[Row, str, float, int]:
        """Equal for the same row of the same run, read twice. (Missing times are nan, and nan does not equal itself.)"""
        return self.setting_only(), self.run, self.cycle_seconds, self.pushes

    @property
    def unlike(self) -> frozenset[str]:
        """In what the machines differ: "nics" or "delays" of their links, or "speeds" of their processors.

        Speeds count where the difference takes 5 % of a cycle or more: those of short mini-batches differ by chance. So do
        workers that sleep.
        """
        found = {name for name in ("nics", "delays") if len({*getattr(self, name)}) > 1}
        if self.speeds and self.compute_seconds * (max(self.speeds) / min(self.speeds) - 1) >= ALIKE * self.cycle_seconds:
            found.add("speeds")
        if any(s.mean_seconds >= ALIKE * self.cycle_seconds for s in self.sleeps):
            found.add("speeds")
        return frozenset(found)

    @property
    def unlike_servers(self) -> bool:
        """Whether servers differ in their links or shares of the model, or also work: flows to them may end one by one."""
        first = 0 if self.shared else self.workers
        links, shares = self.nics[first : first + self.servers], self.model_shares
        return self.servers > 1 and (self.shared or len({*links}) > 1 or len({*shares}) > 1)

    @property
    def largest_share(self) -> float:
        """The part of the model that the server with most of it has."""
        return max(self.model_shares, default=1.0 / self.servers)

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples in a mini-batch of each worker."""
        return self.batch_sizes or (self.batch_size,) * self.workers

    @property
    def barrier(self) -> bool:
        """Whether all workers wait for each other."""
        return self.policy == "bsp" or (self.policy == "ssp" and self.staleness == 0)

    @property
    def has_parts(self) -> bool:
        """Whether compute time was recorded separately, and is any."""
        return self.compute_seconds > 0

    def measured(self) -> tuple[float, float, float, float]:
        """Seconds of compute, pull, push and cycle; nan where not recorded, or 0."""
        parts = (self.compute_seconds, self.pull_seconds, self.push_seconds, self.cycle_seconds)
        compute, pull, push, cycle = (p if p > 0 else math.nan for p in parts)
        return compute, pull, push, cycle

    def setting_only(self) -> Row:
        """The row without its measurements: equal for runs under equal settings."""
        return replace(
            self,
            run="",
            cycle_seconds=0.0,
            compute_seconds=0.0,
            pull_seconds=0.0,
            push_seconds=0.0,
            pushes=0,
            error=0.0,
            all_seconds=0.0,
            all_pushes=0,
            worker_times=(),
            usual_machine="",
        )
