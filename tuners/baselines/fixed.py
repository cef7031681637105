"""Tuners that tune nothing: the job as it starts, or under one synchronisation policy from beginning to end.

`fixed` is the default that every ratio in a report is taken against. The policies are those of Valiant 1990 (BSP), Ho et
al. 2013 (SSP) and Zhao et al. 2019 (DSSP). Where the scenario leaves the policy free they reconfigure to it once, which
costs what the system charges; where it does not, they install it into the servers. Policies that no setting can name are
installed: those of Dutta et al. 2018 (K-sync and its relatives), Chen et al. 2016 (backup workers) and Li et al. 2021
(Sync-Switch).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tuners import policies
from tuners.actions import Action, Install, Job, Reconfigure, Rejected, Setting, SyncPolicy, Tuner

__all__ = ["asp", "backup_workers", "bsp", "dssp", "fixed", "k_async", "k_batch_sync", "k_sync", "ssp", "sync_switch"]


def fixed(job: Job) -> Tuner:
    """Ask for nothing: the job goes on under `job.start` to its target or the end of its budget."""
    del job
    yield from ()


def bsp(job: Job) -> Tuner:
    """Everybody waits for everybody."""
    yield from _under(replace(job.start, policy="bsp"), policies.bsp(), job)


def asp(job: Job) -> Tuner:
    """Nobody waits."""
    yield from _under(replace(job.start, policy="asp"), policies.asp(), job)


def ssp(job: Job, *, staleness: int = 3) -> Tuner:
    """Nobody runs more than `staleness` clocks ahead of the slowest, in Ho et al.'s sense: 0 is BSP."""
    yield from _under(replace(job.start, policy="ssp", staleness=staleness), policies.ssp(staleness), job)


def dssp(job: Job, *, low: int = 3, high: int = 15) -> Tuner:
    """The bound moves within [`low`, `high`]; the defaults are Zhao et al.'s s_L = 3 and range 12."""
    wanted = policies.dssp(low, high)
    named = replace(job.start, policy="dssp", staleness=low)
    # A setting names only the lower bound; another range has to be installed.
    same = policies.named("dssp", low).name == wanted.name
    yield from _under(named if same else None, wanted, job)


def k_sync(job: Job, *, share: float = 0.7) -> Tuner:
    """The first `share` of the workers to push end a round; the others give up, and all begin anew."""
    yield from _under(None, policies.k_sync(_count(job, share)), job)


def k_batch_sync(job: Job, *, share: float = 0.7) -> Tuner:
    """As many mini-batches as `share` of the workers end a round, whoever's they are."""
    yield from _under(None, policies.k_batch_sync(_count(job, share)), job)


def k_async(job: Job, *, share: float = 0.7) -> Tuner:
    """Who has pushed waits until `share` of the workers have; nobody gives up."""
    yield from _under(None, policies.k_async(_count(job, share)), job)


def backup_workers(job: Job, *, share: float = 0.7) -> Tuner:
    """The first `share` of the workers to push end a round; what the others push later is dropped."""
    yield from _under(None, policies.backup_workers(_count(job, share)), job)


def sync_switch(job: Job, *, clocks: int = 100) -> Tuner:
    """BSP for the first `clocks` pushes, ASP from then on. Its authors find the moment by trying, for recurring jobs."""
    yield from _under(None, policies.sync_switch(clocks), job)


def _count(job: Job, share: float) -> int:
    """That share of the workers that the job starts with, at least one."""
    if not 0 < share <= 1:
        raise ValueError(f"Cannot wait for a share {share:g} of the workers: it lies above 0, up to 1.")
    return max(1, round(share * len(job.start.workers)))


def _under(setting: Setting | None, policy: SyncPolicy, job: Job) -> Generator[Action[Any], Any, None]:
    """Bring the job to `setting`, or put `policy` into its servers where the setting is refused or there is none."""
    if setting == job.start:
        return
    if setting is not None:
        with suppress(Rejected):
            yield from Reconfigure(setting)
            return
    with suppress(Rejected):
        yield from Install(policy)
