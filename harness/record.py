"""A run that is recorded while it is under way: its trace can be read up to the last batch whatever happens to the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness import __version__
from harness.drive import Played, play
from traces.exchanges import Exchange
from traces.parts import Origin, TraceWriter
from traces.record import Recorder
from tuners.actions import System, TunerFactory

__all__ = ["MADE_BY", "play_recorded"]

MADE_BY = f"harness {__version__}"


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
    """`harness.drive.play`, with a trace written to `folder` meanwhile. Raises ValueError where that is there already."""
    origin = Origin("harness", MADE_BY, f"{scenario}, {tuner}, seed {seed}")
    with TraceWriter(folder, origin) as writer:
        recorder = Recorder(
            writer, f"{scenario}/{tuner}/{seed}", start=system.job.start, method=next(iter(system.job.methods), None)
        )

        def both(exchange: Exchange) -> None:
            recorder(exchange)
            if watch is not None:
                watch(exchange)

        played = play(factory, system, watch=both)
        outcome = played.outcome
        recorder.end(
            status=outcome.status, seconds=outcome.seconds, workload=system.job.name, seed=seed, reason=outcome.reason
        )
    return played
