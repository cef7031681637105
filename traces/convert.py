"""Converts recordings: exchange logs to traces, traces to traces of few large parts, traces to CSV."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import polars as pl

from traces.exchanges import read_log
from traces.parts import Origin, TraceWriter, digest_of, origin, scan
from traces.record import Recorder
from traces.schema import TRACE
from tuners.actions import Window

__all__ = ["atomic_folder", "from_log", "to_csv", "to_few_parts"]

_PART_ROWS = 1 << 20


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder to write to. It is renamed to `out` at the end, and deleted after an exception.

    Raises ValueError if `out` exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"Cannot write to {out}: it is there already. Name another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def from_log(path: Path, out: Path, *, made_by: str) -> None:
    """Make a trace from the exchange log that a comparison keeps of every run. Raises ValueError for any other file."""
    exchanges = read_log(path)
    windows = [e.answer for e in exchanges if isinstance(e.answer, Window)]
    # The log does not name its run; its path does: .../runs/SCENARIO/TUNER/SEED/exchanges.jsonl.gz, URL-quoted.
    *_, scenario, tuner, seed, _ = (unquote(part) for part in ("", "", *path.absolute().parts))
    made_from = Origin(
        "harness",
        made_by,
        f"exchange log of {scenario}, {tuner}, seed {seed}",
        inputs=((path.name, digest_of(path.read_bytes())),),
    )
    with atomic_folder(out) as folder, TraceWriter(folder, made_from, part_rows=_PART_ROWS) as writer:
        recorder = Recorder(writer, f"{scenario}/{tuner}/{seed}", nodes=_node_order(windows))
        for exchange in exchanges:
            recorder(exchange)
        last = exchanges[-1].seconds if exchanges else 0.0
        status = windows[-1].status if windows else "running"
        recorder.end(status=status, seconds=last, workload=scenario, seed=int(seed) if seed.isdecimal() else None)


def _node_order(windows: Sequence[Window]) -> tuple[str, ...]:
    """The names of the job's nodes in its order, if all were available at the end of any window; else ().

    Windows list the nodes that are available, in the job's order. One that is missing would shift the numbers of others, and
    these would not have as many pushes as the windows say of their workers.
    """
    names = tuple(node.name for node in max((w.nodes for w in windows), key=len, default=()))
    for window in windows:
        for worker in window.workers:
            if worker.node not in names or (window.pushes.worker == names.index(worker.node)).sum() != worker.pushes:
                return ()
    return names


def to_few_parts(trace: Path, out: Path) -> None:
    """The same trace in parts of a million rows; it need not be finished. Raises as `traces.parts.scan` does."""
    with atomic_folder(out) as folder, TraceWriter(folder, origin(trace), part_rows=_PART_ROWS) as writer:
        for table in TRACE:
            scan(trace, table)  # verifies the digest of every part
            for part in sorted((trace / table).glob("[0-9]*.parquet")):
                writer.add(table, pl.read_parquet(part, glob=False))


def to_csv(trace: Path, out: Path) -> None:
    """The tables of a trace as CSV files with the same columns. Raises as `traces.parts.scan` does."""
    with atomic_folder(out) as folder:
        for table in TRACE:
            if (trace / table).is_dir():
                scan(trace, table).sink_csv(folder / f"{table}.csv")
