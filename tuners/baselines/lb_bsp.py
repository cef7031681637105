"""LB-BSP: every worker gets samples in proportion to its speed, at iteration boundaries of synchronous training.

Chen, Weng, Wang, Li, Li, "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments", SoCC
2020, the section on CPU clusters: the time of a worker's mini-batch is in proportion to its samples, so the batches x_i that
minimise the slowest worker's time, with sum x_i the whole batch, are those in proportion to the predicted speeds v_i.

Where we differ: the paper predicts v_i with a recurrent network over past speeds and the load of CPU and memory (NARX), and
compares it with a moving average; a tuner sees no load, so this is the moving average. Fixed time per mini-batch, which the
paper models for GPUs, is not fitted: the speeds are measured again at the new batches, and the loads follow. A device is
what the paper calls a worker. A change of loads is requested where it is expected to make an iteration shorter by `gain`:
here a change may cost time, and the whole numbers of samples make small ones useless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuners.actions import Job, Reconfigure, Rejected, Run, Setting, Tuner, WorkerWindow
from tuners.applicability import nothing_to_tune_if
from tuners.factory_options import Count, Share
from tuners.settings import shared_out

__all__ = ["balanced", "lb_bsp", "measured_speeds"]


def _loads_are_held(job: Job) -> str:
    if job.start.policy != "bsp":
        return f"Loads are balanced under 'bsp'; this job starts with {job.start.policy!r}."
    if not job.space.whole_batch or not job.start.loads:
        return "Loads that share out one batch are not free here."
    return ""


@nothing_to_tune_if(_loads_are_held)
def lb_bsp(job: Job, *, iterations: Count = 5, weight: Share = 0.5, gain: Share = 0.05) -> Tuner:
    """Measure the speeds of all devices, and share the batch out in proportion to them, again and again.

    Args:
        job: what is tuned.
        iterations: between two decisions.
        weight: of the new measurement in the moving average of a device's speed.
        gain: the least expected saving for which loads are changed, as a share of an iteration's computing.
    """
    if _loads_are_held(job):
        return
    current, speeds = job.start, dict[tuple[str, int], float]()
    while True:
        seen = yield from Run(clocks=iterations * len(current.workers))
        if seen.status != "running":
            return
        current = seen.setting or current
        if seen.changes or not current.loads:
            continue
        for device, speed in measured_speeds(current, seen.workers).items():
            speeds[device] = speed if device not in speeds else (1 - weight) * speeds[device] + weight * speed
        wanted = balanced(current, speeds)
        before, after = (_slowest(setting, speeds) for setting in (current, wanted))
        if after < (1 - gain) * before:
            try:
                yield from Reconfigure(wanted, reason=f"{after:.3g} s instead of {before:.3g} for the slowest device")
            except Rejected:
                continue
            current = wanted


def balanced(setting: Setting, speeds: Mapping[tuple[str, int], float]) -> Setting:
    """The batch of `setting` shared out in proportion to `speeds`, in samples per second by (worker, device).

    A device without a measured speed keeps its samples, and every worker keeps at least one.
    """
    places = [(w, d) for w, row in zip(setting.workers, setting.loads, strict=True) for d, n in enumerate(row) if n]
    known = [p for p in places if speeds.get(p, 0.0) > 0]
    rows = {w: list(row) for w, row in zip(setting.workers, setting.loads, strict=True)}
    if len(known) < 2:
        return setting
    whole = sum(rows[w][d] for w, d in known)
    # One sample each, and the rest by largest remainder: a device without samples could not be measured any more.
    ideal = [speeds[p] * whole / sum(speeds[q] for q in known) for p in known]
    extra = [max(x - 1, 0.0) for x in ideal]
    counts = [1 + n for n in shared_out(extra, whole - len(known))] if any(extra) else [1] * len(known)
    for (worker, device), count in zip(known, counts, strict=True):
        rows[worker][device] = count
    return replace(setting, loads=tuple(tuple(rows[w]) for w in setting.workers))


def measured_speeds(setting: Setting, measured: Sequence[WorkerWindow]) -> dict[tuple[str, int], float]:
    """Samples per second by (worker, device), of the devices that computed."""
    rows = dict(zip(setting.workers, setting.loads, strict=True))
    return {
        (w.node, device): samples / seconds
        for w in measured
        if w.pushes and w.node in rows
        for device, (samples, seconds) in enumerate(zip(rows[w.node], w.device_seconds, strict=False))
        if samples and seconds > 0
    }


def _slowest(setting: Setting, speeds: Mapping[tuple[str, int], float]) -> float:
    """Seconds of the slowest device of which a speed is known."""
    rows = zip(setting.workers, setting.loads, strict=True)
    times = [n / speeds[w, d] for w, row in rows for d, n in enumerate(row) if speeds.get((w, d), 0.0) > 0]
    return max(times, default=0.0)
