"""Tuners that tune nothing: the job as it starts, or under one synchronisation policy from beginning to end.

`fixed` is the default that every ratio in a report is taken against. The policies are those of Valiant 1990 (BSP), Ho et
al. 2013 (SSP) and Zhao et al. 2019 (DSSP). Where the scenario leaves the policy free they reconfigure to it once, which
costs what the system charges; where it does not, they install it into the servers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tuners import policies
from tuners.actions import Action, Install, Job, Reconfigure, Rejected, Setting, SyncPolicy, Tuner

__all__ = ["asp", "bsp", "dssp", "fixed", "ssp"]


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
