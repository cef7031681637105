"""DyLU, dynamic local updates: local SGD in which every worker takes local steps in proportion to its speed.

Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, section on dynamic local updates: with v(w) the
measured speed of worker w, it takes floor(v(w) / max v H) steps between a pull and its push, so that all take about as long.

From memory, and to be checked. Where we differ: the paper's workers do not wait for each other; here the policy stays what
the job has, so that no worker waits for long, also under BSP. A worker takes at least one step. Copies count by their
samples, as all means of this contract do. The paper's delayed outer momentum is not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tuners.actions import Job, Reconfigure, Rejected, Run, Tuner, Window
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.local_steps.synchronous import steps_are_held, with_nearest
from tuners.factory_options import Count, Share

__all__ = ["dylu", "steps_by_speed"]


@nothing_to_tune_if(steps_are_held)
def dylu(job: Job, *, steps: Count = 8, rounds: Count = 2, weight: Share = 0.5) -> Tuner:
    """Give the fastest worker `steps` local steps, and the others as many as they compute in the same time.

    Args:
        job: what is tuned.
        steps: local steps of the fastest worker, H.
        rounds: pushes per worker between two measurements of speed.
        weight: of the newest measurement in the moving average of a worker's speed.
    """
    if steps_are_held(job):
        return
    knob, current, speeds = job.space.knob("local_steps"), job.start, dict[str, float]()
    wanted = with_nearest(job, {"local_steps": steps, "outer_rate": 1.0, "outer_momentum": 0.0})
    highest = wanted.local_steps
    while True:
        try:
            if wanted != current:
                yield from Reconfigure(wanted, reason=f"up to {highest} local steps, by speed")
            seen: Window = yield from Run(clocks=rounds * len(wanted.workers))
        except Rejected:
            return
        if seen.status != "running":
            return
        current = wanted = seen.setting or wanted
        for w in seen.workers:
            if w.pushes and w.compute_seconds > 0:
                speed = w.samples / w.compute_seconds
                speeds[w.node] = speed if w.node not in speeds else (1 - weight) * speeds[w.node] + weight * speed
        known = {w: speeds[w] for w in current.workers if w in speeds}
        if knob is not None and len(known) == len(current.workers):
            given = tuple((w, int(knob.nearest(n))) for w, n in steps_by_speed(known, highest).items())
            if any(n != current.steps_of(w) for w, n in given):
                wanted = replace(current, node_steps=given)


def steps_by_speed(speeds: Mapping[str, float], highest: int) -> dict[str, int]:
    """Local steps of every worker: `highest` for the fastest, and at least 1."""
    fastest = max(speeds.values())
    return {w: max(1, math.floor(highest * v / fastest + 1e-9)) for w, v in speeds.items()}
