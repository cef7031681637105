"""When every worker computes, transfers and waits, of any run, packed small: the page draws a run when a reader opens it.

A run is a header (JSON) and its first pushes in columns: worker, then end, push, compute, pull and wait in whole parts of
the time that they span. The columns are differences where they ascend, compressed, and written in base 64.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.comparison.results import run_folder
from reports.figures.workers import held_at, pushes_of, same_workers_until
from traces.exchanges import Exchange, read_log
from tuners.actions import Cost, Fork, Rejected, Window

__all__ = ["PackedRun", "changes_of", "headers", "pack", "packed_run", "unpacked"]

_PARTS = 4000  # of the drawn time: about a third of a pixel each


class PackedRun(NamedTuple):
    """One run for the page."""

    seed: int
    header: dict[str, Any]  # seconds drawn and in all, pushes drawn and in all, nodes, changes
    text: str  # the pushes, in base 64
    reasons: tuple[tuple[float, str], ...] = ()  # of what the tuner did, each with the second at which it did it


def packed_run(folder: Path, scenario: str, tuner: str, seed: int, pushes: int) -> PackedRun | None:
    """A run of a results folder with its first `pushes`; None where its log is missing or holds no push."""
    path = run_folder(folder, scenario, tuner, seed) / "exchanges.jsonl.gz"
    return pack(list(read_log(path)), seed, pushes) if path.is_file() else None


def pack(exchanges: list[Exchange], seed: int, most: int) -> PackedRun | None:
    """The first `most` pushes of a log with all changes of setting; None where it holds no push."""
    made = pushes_of(exchanges)
    if made is None:
        return None
    order = np.argsort(made.seconds, kind="stable")[:most]
    end = made.seconds[order]
    nodes = np.unique(made.worker)
    rows = np.searchsorted(nodes, made.worker[order])
    until = same_workers_until(exchanges)
    last = max(float(end[-1]), until or 0.0) if len(order) == len(made.seconds) else float(end[-1])
    held = held_at(made, last, until)
    unit = last / _PARTS if last > 0 else 1.0
    moments = np.round(end / unit).astype(np.int64)
    columns = [np.diff(moments, prepend=0)]
    for name in ("push_seconds", "compute_seconds", "pull_seconds", "wait_seconds"):
        columns.append(np.round(np.nan_to_num(getattr(made, name)[order]) / unit).astype(np.int64))
    raw = rows.astype(np.uint8).tobytes() + b"".join(np.clip(c, 0, 65535).astype("<u2").tobytes() for c in columns)
    header = {
        "seconds": round(last, 3),
        "whole": round(max(float(made.seconds.max()), exchanges[-1].seconds), 3),
        "pushes": len(order),
        "all": len(made.seconds),
        "nodes": [int(n) for n in nodes],
        "held": [[round(float(a), 3), round(float(b), 3)] for a, b in held],  # each node, across the end of what is drawn
        "changes": [[round(a, 2), round(b, 2)] for a, b in changes_of(exchanges)],
    }
    return PackedRun(seed, header, base64.b64encode(zlib.compress(raw, 6)).decode(), tuple(_reasons_of(exchanges)))


def changes_of(exchanges: Iterable[Exchange]) -> Iterator[tuple[float, float]]:
    """Begin and end of every reconfiguration that was carried out, and of forks and switches between branches, in seconds.

    The end of one that the tuner did not wait for is known to lie in a window; the end of that window is taken.
    """
    before = 0.0
    for exchange in exchanges:
        answer = exchange.answer
        if isinstance(answer, Cost) and answer.done:
            yield exchange.seconds - answer.seconds, exchange.seconds
        elif isinstance(exchange.action, Fork) and exchange.seconds > before:
            yield before, exchange.seconds
        elif isinstance(answer, Window):
            if answer.start_seconds > before:
                yield before, answer.start_seconds
            yield from ((exchange.seconds - cost.seconds, exchange.seconds) for cost in answer.changes if cost.done)
        before = exchange.seconds


def _reasons_of(exchanges: Iterable[Exchange]) -> Iterator[tuple[float, str]]:
    """Every reason that a tuner gave for an action, with the second at which it asked for it; what was refused says so."""
    before = 0.0
    for exchange in exchanges:
        if reason := getattr(exchange.action, "reason", ""):
            yield before, f"{reason} (refused)" if isinstance(exchange.answer, Rejected) else reason
        before = exchange.seconds


def unpacked(run: PackedRun) -> dict[str, Any]:
    """The columns of a packed run in seconds, as the page unpacks them."""
    raw = zlib.decompress(base64.b64decode(run.text))
    n, unit = run.header["pushes"], run.header["seconds"] / _PARTS
    numbers = np.frombuffer(raw[n:], "<u2").reshape(5, n).astype(np.float64) * unit
    names = ("push_seconds", "compute_seconds", "pull_seconds", "wait_seconds")
    found: dict[str, Any] = {"row": np.frombuffer(raw[:n], np.uint8), "seconds": np.cumsum(numbers[0])}
    return found | dict(zip(names, numbers[1:], strict=True))


def headers(runs: Iterable[PackedRun]) -> str:
    """The headers of a tuner's runs as JSON for the page."""
    return json.dumps([{"seed": r.seed, **r.header} for r in runs], separators=(",", ":"))
