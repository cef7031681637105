"""Schedules of synchronous training: workers, servers, and the samples of every device (Dalibard et al., Section 2).

The bespoke optimiser and the searches that it is compared with share this domain, and this evaluation: 20 iterations of the
running job under a schedule. Only the last 10 count, because the first few vary.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tuners.actions import Action, Cost, Evaluation, Job, Reconfigure, Rejected, Run, Setting, Window
from tuners.settings import Real, shared_out

__all__ = [
    "MeasuredSchedule",
    "Schedule",
    "batch",
    "check_counted",
    "devices",
    "evenly",
    "is_free",
    "measure",
    "schedule",
    "schedule_is_held",
    "setting",
]


class Schedule(NamedTuple):
    """One point of the domain. A node with samples is a worker, so that each setting has exactly one schedule."""

    servers: tuple[str, ...]  # in the job's order
    loads: tuple[tuple[int, ...], ...]  # samples per device, a row for every node of the job; all zero: not a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSchedule:
    """The result of one evaluation."""

    setting: Setting
    seconds: float  # of an iteration, mean over those that count
    iteration_seconds: tuple[float, ...]  # of each iteration that counts
    machine_seconds: Mapping[str, float]  # per worker, of one mini-batch: its devices and the sum of their gradients
    device_seconds: Mapping[str, tuple[float, ...]]  # per worker and device, 0 for one without samples
    window: Window  # of the iterations that count
    clocks: int  # of the whole evaluation, also those that do not count
    evaluations: tuple[Evaluation, ...] = ()  # of the model on the validation set, during the whole evaluation
    change: Cost | None = None  # of the reconfiguration; None if the job already had the setting


# ------------------------------------------------------------------------------------------------------------ the domain


def is_free(job: Job) -> bool:
    """Whether the schedule of this job is free: synchronous, with free roles, and free loads that sum to one batch."""
    return job.start.policy == "bsp" and job.space.frees("role") and batch(job) > 0


def schedule_is_held(job: Job) -> str:
    """Why a tuner of schedules has nothing to tune in `job`, or ""."""
    if is_free(job):
        return ""
    missing = [
        *([] if job.start.policy == "bsp" else ["it does not start with 'bsp'"]),
        *([] if job.space.frees("role") else ["roles of machines are not free"]),
        *([] if batch(job) > 0 else ["loads that share out one batch are not free"]),
    ]
    return f"This job has no schedule to tune: {', '.join(missing)}."


def batch(job: Job) -> int:
    """Samples of all workers together in one iteration; 0 if that is not fixed."""
    return job.space.whole_batch


def devices(job: Job) -> tuple[tuple[int, int], ...]:
    """The devices that may be given samples, as (index of the node, index of the device)."""
    return tuple(
        (i, d)
        for i, node in enumerate(job.nodes)
        for d in range(len(node.devices))
        if isinstance(job.space.knob(f"load/{node.name}/{d}"), Real)
    )


def setting(job: Job, schedule: Schedule) -> Setting:
    """The start setting with that schedule."""
    rows = {node.name: row for node, row in zip(job.nodes, schedule.loads, strict=True) if any(row)}
    return replace(
        job.start,
        workers=tuple(rows),
        servers=schedule.servers,
        loads=tuple(rows.values()),
        data_shares=(),
        model_shares=(),
    )


def schedule(job: Job, setting: Setting) -> Schedule:
    """The schedule of a setting that has loads."""
    rows = dict(zip(setting.workers, setting.loads, strict=True))
    return Schedule(
        tuple(n.name for n in job.nodes if n.name in setting.servers),
        tuple(rows.get(n.name, (0,) * len(n.devices)) for n in job.nodes),
    )


def evenly(job: Job, chosen: Sequence[tuple[int, int]]) -> Schedule:
    """The batch shared out evenly among the `chosen` devices; every worker is also a server (Section 4).

    If there are more devices than samples, the last ones get none. Raises ValueError if no device is chosen.
    """
    rows = [[0] * len(n.devices) for n in job.nodes]
    for (node, device), samples in zip(chosen, shared_out([1.0] * len(chosen), batch(job)), strict=True):
        rows[node][device] = samples
    working = tuple(n.name for n, row in zip(job.nodes, rows, strict=True) if any(row))
    return Schedule(working, tuple(map(tuple, rows)))


# ----------------------------------------------------------------------------------------------------------- evaluations


def check_counted(iterations: int, counted: int) -> None:
    """Raise ValueError unless `measure` can count that number of iterations."""
    if not 0 < counted < iterations:
        raise ValueError(f"Cannot count {counted} of {iterations} iterations: count some, and leave some out before them.")


def measure(
    setting: Setting, current: Setting | None, *, iterations: int = 20, counted: int = 10, reason: str = ""
) -> Generator[Action[Any], Any, MeasuredSchedule | Window | None]:
    """Change the job from its `current` setting to `setting` and train for `iterations`, of which the last `counted` count.

    After a change that does not stop the job, iterations end where they happen to: then a few more pushes are left out, so
    that those that count begin with an iteration. Returns None if the setting is refused, and only the last window if the
    evaluation was interrupted: the job ended, or a node was lost and the runtime changed the setting. Raises ValueError
    unless 0 < counted < iterations.
    """
    check_counted(iterations, counted)
    change: Cost | None = None
    workers, left_out = len(setting.workers), list[Window]()
    try:
        if setting != current:
            change = yield from Reconfigure(setting, reason=reason)
        asked = (iterations - counted) * workers
        seen = yield from Run(clocks=asked)
        if _went_well(seen, setting, asked) and (lacking := _lacking_pushes(seen, workers)):
            left_out.append(seen)
            asked = lacking
            seen = yield from Run(clocks=asked)
        if _went_well(seen, setting, asked):
            left_out.append(seen)
            asked = counted * workers
            seen = yield from Run(clocks=asked)
    except Rejected:
        return None
    if not _went_well(seen, setting, asked):
        return seen
    # An iteration ends, and the next begins, with the push of its slowest worker.
    ends = seen.pushes.seconds[workers - 1 :: workers]
    each = np.diff(np.concatenate([[seen.start_seconds], ends]))
    return MeasuredSchedule(
        setting=setting,
        seconds=float(each.mean()),
        iteration_seconds=tuple(float(x) for x in each),
        machine_seconds={w.node: w.compute_seconds / w.pushes for w in seen.workers},
        device_seconds={w.node: w.device_seconds for w in seen.workers},
        window=seen,
        clocks=sum(w.clocks for w in (*left_out, seen)),
        evaluations=tuple(e for w in (*left_out, seen) for e in w.evaluations),
        change=change,
    )


def _lacking_pushes(window: Window, workers: int) -> int:
    """How many pushes the last iteration in `window` still lacks; 0 where the window does not tell.

    All workers begin an iteration when the last of them has pushed in the one before. So between two iterations no push is
    under way; the gaps are the longest there, and elsewhere negative.
    """
    pushes, count = window.pushes, len(window.pushes.seconds)
    if count < workers:
        return 0
    begun = pushes.seconds - pushes.push_seconds - pushes.compute_seconds - pushes.pull_seconds
    gaps = np.minimum.accumulate(begun[::-1])[::-1] - np.concatenate([[window.start_seconds], pushes.seconds[:-1]])
    newest = min(count // 2, count - workers)  # the first ones may be of the setting before
    at = np.arange(count)[newest:]
    return max(range(workers), key=lambda lacks: float(np.median(gaps[newest:][(at - count - lacks) % workers == 0])))


def _went_well(seen: Window, setting: Setting, clocks: int) -> bool:
    """Whether a window has all its clocks under the requested setting; its last push may reach the target of the job.

    It has more if the job went on during the change before it.
    """
    return seen.clocks >= clocks and (seen.setting or setting) == setting and seen.status in ("running", "target")
