"""The condition `losses` that fits a recording: how often machines are lost, how many together, how long repairs take.

    python -m simulators.cluster.loss_fit shipped:bamboo-spot

prints it for each run of a recording, as a scenario writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from simulators.cluster.conditions import RackLosses, ReplayedTrace
from simulators.cluster.trace_driven import places_of
from simulators.cluster.trace_driven_nodes import Places
from traces.shipped import locate

__all__ = ["fitted_losses", "main"]

_TOGETHER_SECONDS = 60.0
"""RackLosses that follow each other within a minute count as one event: Bamboo's recordings were polled once a minute."""


def fitted_losses(found: Places) -> RackLosses:
    """The condition that has a recording's rate of losses for each machine, nodes lost together, and repair times.

    Repairs: the median, and the standard deviation of logarithms, of the times until a place is taken again. Raises
    ValueError for a recording in which nothing is lost.
    """
    gone = [e for e in found.events if e.event != "joins"]
    per_second = found.losses().per_second
    if not per_second > 0:
        raise ValueError("Cannot fit losses to a recording without any: choose another.")
    begun, groups = -np.inf, 0
    for event in gone:
        if event.seconds - begun > _TOGETHER_SECONDS:
            begun, groups = event.seconds, groups + 1
    repairs = np.array(list(_repairs(found)))
    logs = np.log(repairs[repairs > 0])
    return RackLosses(
        every_seconds=float(f"{1 / per_second:.3g}"),
        together=round(len(gone) / groups, 2),
        repair_seconds=float(f"{np.median(repairs):.3g}") if len(logs) else 0.0,
        repair_spread=round(float(logs.std()), 2) if len(logs) else 0.0,
        event="fails" if sum(e.event == "fails" for e in gone) * 2 > len(gone) else "leaves",
        notice_seconds=round(found.losses().notice_seconds, 1),
    )


def _repairs(found: Places) -> Iterator[float]:
    """Seconds until each lost place was taken again."""
    by_place = groupby(sorted(found.events, key=lambda e: (e.place, e.seconds)), key=lambda e: e.place)
    for _, events in by_place:
        lost: float | None = None
        for event in events:
            if event.event != "joins":
                lost = event.seconds
            elif lost is not None:
                yield event.seconds - lost
                lost = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the condition that fits each run of the recordings that are named."""
    for name in sys.argv[1:] if arguments is None else arguments:
        for run, found in places_of(ReplayedTrace(str(locate(name, Path())))).items():
            if not found.events:
                continue  # beside runs with events, one in which nobody came or went
            fit = fitted_losses(found)
            given = ", ".join(f'{f} = "{v}"' if isinstance(v := getattr(fit, f), str) else f"{f} = {v:g}" for f in _SHOWN)
            sys.stdout.write(f"{name} {run}: losses = [{{ {given} }}]\n")
    return 0


_SHOWN = ("every_seconds", "together", "repair_seconds", "repair_spread", "event", "notice_seconds")

if __name__ == "__main__":
    sys.exit(main())
