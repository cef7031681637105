"""Windows, the answers to Run, made of the engine's records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.engine.job_state import Records
from tuners.actions import (
    Cost,
    Evaluation,
    Job,
    NodeEvent,
    Pushes,
    ServerWindow,
    Setting,
    Status,
    Window,
    WorkerWindow,
)

__all__ = ["evaluations", "pushes", "window"]


def pushes(table: NDArray[np.float64]) -> Pushes:
    """The columns of a table of `Records`, [n, 11], as a tuner sees them."""
    columns = dict(zip(Records._fields, table.T, strict=True))
    whole = ("worker", "clock", "staleness")
    # Copies: a tuner that writes into its window must not change the engine's records.
    return Pushes(**{f: columns[f].astype(np.int32) if f in whole else columns[f].copy() for f in Pushes._fields})


def evaluations(table: NDArray[np.float64], pushes_before: int) -> tuple[Evaluation, ...]:
    """The validations among the records. The first record is push number `pushes_before` + 1."""
    columns = Records(*table.T)
    due = np.flatnonzero(~np.isnan(columns.valid_loss) | ~np.isnan(columns.valid_accuracy))
    return tuple(
        Evaluation(
            float(columns.seconds[i]),
            pushes_before + int(i) + 1,
            float(columns.valid_loss[i]),
            float(columns.valid_accuracy[i]),
        )
        for i in due
    )


def window(
    job: Job,
    setting: Setting,
    table: NDArray[np.float64],
    *,
    start_seconds: float,
    end_seconds: float,
    pushes_before: int,
    status: Status,
    devices: dict[str, tuple[float, tuple[float, ...]]],
    samples: dict[str, int],
    available: frozenset[str],
    events: tuple[NodeEvent, ...],
    changes: tuple[Cost, ...],
    served: NDArray[np.float64] | None = None,
    blocks: tuple[float, ...] = (),
) -> Window:
    """One window; `devices` are each worker's nominal seconds, in all and per device, `samples` those of its mini-batch.

    `served` [k, 4] has the columns of `ServerWindow`; None: the servers are not measured. `blocks`: see `Window`.
    """
    made = pushes(table)
    at = {n.name: i for i, n in enumerate(job.nodes)}
    return Window(
        start_seconds=start_seconds,
        end_seconds=end_seconds,
        clocks=len(table),
        pushes=made,
        workers=tuple(_worker(w, made, at[w], samples[w], devices[w]) for w in setting.workers),
        evaluations=evaluations(table, pushes_before),
        events=events,
        nodes=tuple(n for n in job.nodes if n.name in available),
        setting=setting,
        changes=changes,
        status=status,
        servers=() if served is None else tuple(ServerWindow(s, *map(float, served[at[s]])) for s in setting.servers),
        blocks=blocks,
    )


def _worker(name: str, made: Pushes, index: int, samples: int, nominal: tuple[float, tuple[float, ...]]) -> WorkerWindow:
    mine = made.worker == index
    count = int(mine.sum())
    compute = float(made.compute_seconds[mine].sum())
    # Noise is drawn per worker, the same for all its devices, so the measured time divides as the nominal one does.
    whole, parts = nominal
    per_batch = compute / count if count else 0.0
    return WorkerWindow(
        node=name,
        pushes=count,
        samples=count * samples,
        compute_seconds=compute,
        pull_seconds=float(made.pull_seconds[mine].sum()),
        push_seconds=float(made.push_seconds[mine].sum()),
        wait_seconds=float(made.wait_seconds[mine].sum()),
        device_seconds=tuple(per_batch * part / whole if whole > 0 else 0.0 for part in parts),
    )
