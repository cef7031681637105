"""Tuners that tune nothing: the start setting, or one synchronisation policy from beginning to end.

`fixed` is the denominator of every ratio in a report. The policies are those of Valiant 1990 (BSP), Ho et al. 2013 (SSP) and
Zhao et al. 2019 (DSSP). Where the scenario leaves the policy free, these tuners reconfigure to it once, at the cost that the
system charges. A policy outside of the space is installed, where the scenario allows that: one with another bound, and those
of Dutta et al. 2018 (K-sync and its relatives), Chen et al. 2016 (backup workers) and Li et al. 2021 (Sync-Switch). Where
the scenario holds the policy, they have nothing to tune.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tuners import policies
from tuners.actions import Action, Install, Job, Reconfigure, Rejected, Setting, SyncPolicy, Tuner
from tuners.applicability import nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import Share, Whole, options_checked_by

__all__ = [
    "asp",
    "backup_workers",
    "bsp",
    "dssp",
    "fixed",
    "k_async",
    "k_batch_sync",
    "k_sync",
    "ssp",
    "sync_switch",
]


def _nothing_to_set(job: Job, policy: str) -> str:
    return _nothing_to_change(job, replace(job.start, policy=policy))


def _nothing_to_set_for_ssp(job: Job, staleness: int) -> str:
    return _nothing_to_change(job, replace(job.start, policy="ssp", staleness=staleness))


def _nothing_to_set_for_dssp(job: Job, low: int, high: int) -> str:
    named = _named_dssp(job, low, high)
    return policy_cannot_be_installed(job) if named is None else _nothing_to_change(job, named)


def _named_dssp(job: Job, low: int, high: int) -> Setting | None:
    """The setting that names this policy. A setting names only the lower bound; None: another range has to be installed."""
    same = policies.named("dssp", low).name == policies.dssp(low, high).name
    return replace(job.start, policy="dssp", staleness=low) if same else None


def _nothing_to_change(job: Job, wanted: Setting) -> str:
    """Why a tuner that wants a job under a named policy has nothing to tune, or ""."""
    if wanted == job.start:
        return f"The job starts with {wanted.policy!r} already."
    try:
        job.space.check(wanted)
    except Rejected as error:
        held = policy_cannot_be_installed(job)
        return str(error) if held and job.space.frees("policy") else held  # such as: no run was recorded under this setting
    return ""


def fixed(job: Job) -> Tuner:
    """Ask for nothing: the job runs under `job.start` to its target or the end of its budget."""
    del job
    yield from ()


@nothing_to_tune_if(partial(_nothing_to_set, policy="bsp"))
def bsp(job: Job) -> Tuner:
    """All workers wait for each other after every mini-batch."""
    yield from _under(replace(job.start, policy="bsp"), policies.bsp(), job)


@nothing_to_tune_if(partial(_nothing_to_set, policy="asp"))
def asp(job: Job) -> Tuner:
    """No worker waits."""
    yield from _under(replace(job.start, policy="asp"), policies.asp(), job)


@nothing_to_tune_if(_nothing_to_set_for_ssp)
def ssp(job: Job, *, staleness: Whole = 3) -> Tuner:
    """No worker runs more than `staleness` clocks ahead of the slowest (Ho et al.): 0 is BSP.

    Args:
        job: what is run.
        staleness: the bound s, in clocks.
    """
    yield from _under(replace(job.start, policy="ssp", staleness=staleness), policies.ssp(staleness), job)


def _check_dssp(options: Mapping[str, Any]) -> None:
    policies.dssp(options["low"], options["high"])


@options_checked_by(_check_dssp)
@nothing_to_tune_if(_nothing_to_set_for_dssp)
def dssp(job: Job, *, low: Whole = 3, high: Whole = 15) -> Tuner:
    """The bound varies within [`low`, `high`]; the defaults are Zhao et al.'s s_L = 3 and range 12.

    Args:
        job: what is run.
        low: the least bound, in clocks.
        high: the largest bound, in clocks.
    """
    yield from _under(_named_dssp(job, low, high), policies.dssp(low, high), job)


@nothing_to_tune_if(policy_cannot_be_installed)
def k_sync(job: Job, *, share: Share = 0.7) -> Tuner:
    """A round ends when `share` of the workers have pushed; the others abandon their mini-batch, and all start anew.

    Args:
        job: what is run.
        share: of the workers, those that a round waits for.
    """
    yield from _under(None, policies.k_sync(_count(job, share)), job)


@nothing_to_tune_if(policy_cannot_be_installed)
def k_batch_sync(job: Job, *, share: Share = 0.7) -> Tuner:
    """A round ends after as many pushes as `share` of the workers; one worker may push several times.

    Args:
        job: what is run.
        share: of the workers, those that a round waits for.
    """
    yield from _under(None, policies.k_batch_sync(_count(job, share)), job)


@nothing_to_tune_if(policy_cannot_be_installed)
def k_async(job: Job, *, share: Share = 0.7) -> Tuner:
    """A worker that has pushed waits until `share` of the workers have; none abandons its mini-batch.

    Args:
        job: what is run.
        share: of the workers, those that a round waits for.
    """
    yield from _under(None, policies.k_async(_count(job, share)), job)


@nothing_to_tune_if(policy_cannot_be_installed)
def backup_workers(job: Job, *, share: Share = 0.7) -> Tuner:
    """A round ends when `share` of the workers have pushed; later gradients of the round are dropped.

    Args:
        job: what is run.
        share: of the workers, those that a round waits for.
    """
    yield from _under(None, policies.backup_workers(_count(job, share)), job)


@nothing_to_tune_if(policy_cannot_be_installed)
def sync_switch(job: Job, *, clocks: Whole = 100) -> Tuner:
    """BSP for the first `clocks` pushes, then ASP. The paper finds the number by trials, for jobs that recur.

    Args:
        job: what is run.
        clocks: pushes under BSP.
    """
    yield from _under(None, policies.sync_switch(clocks), job)


def _count(job: Job, share: float) -> int:
    """`share` of the number of workers at the start, at least one."""
    if not 0 < share <= 1:
        raise ValueError(f"Cannot wait for a share {share:g} of the workers: it lies above 0, up to 1.")
    return max(1, round(share * len(job.start.workers)))


def _under(setting: Setting | None, policy: SyncPolicy, job: Job) -> Generator[Action[Any], Any, None]:
    """Reconfigure the job to `setting`, or install `policy` where that is refused or None."""
    if setting == job.start:
        return
    if setting is not None:
        with suppress(Rejected):
            yield from Reconfigure(setting)
            return
    with suppress(Rejected):
        yield from Install(policy)
