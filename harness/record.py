"""Play a run and write its trace meanwhile. If the run is interrupted, its trace can be read up to the last batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from harness.drive import Played, play
from harness.spending import spending
from harness.version import HARNESS_VERSION
from traces.exchanges import Exchange
from traces.parts import Origin, TraceWriter
from traces.record import Recorder
from tuners.actions import System, TunerFactory

__all__ = ["MADE_BY", "play_recorded"]

MADE_BY = f"harness {HARNESS_VERSION}"


def play_recorded(
    factory: TunerFactory,
    system: System,
    folder: Path,
    *,
    scenario: str,
    tuner: str,
    seed: int,
    watch: Callable[[Exchange], None] | None = None,
) -> Played:
    """Like `harness.drive.play`, and write a trace to `folder`. Raises ValueError if the folder exists already."""
    origin = Origin("harness", MADE_BY, f"{scenario}, {tuner}, seed {seed}")
    with TraceWriter(folder, origin) as writer:
        job = system.job
        recorder = Recorder(
            writer,
            f"{scenario}/{tuner}/{seed}",
            start=job.start,
            method=next(iter(job.methods), None),
            nodes=[node.name for node in job.nodes],
        )

        def record_and_watch(exchange: Exchange) -> None:
            recorder(exchange)
            if watch is not None:
                watch(exchange)

        played = play(factory, system, watch=record_and_watch)
        outcome, usd = played.outcome, spending(played.job, played.exchanges).usd
        recorder.end(
            status=outcome.status,
            seconds=outcome.seconds,
            workload=job.name,
            seed=seed,
            cost_usd=usd if math.isfinite(usd) else None,
            reason=outcome.reason,
        )
    return played
