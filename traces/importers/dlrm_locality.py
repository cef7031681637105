"""How often rows of embedding tables are looked up (Meta, dlrm_datasets): the skew of keys in recommendation models.

Source format: ``locality_stats.txt``, for each data set a block of lines: its file name; batches and samples per batch;
mean numbers of look-ups ("indices") and of distinct rows ("unique cols"), and look-ups per row; a histogram of rows by how
often one batch looks them up, ``(lo, hi]: share``, whose last class has no upper end; its bounds and cumulative shares as
lists; and the same for look-ups instead of rows ("Ratio of index distribution"). Shares are rounded to three digits. The
data is synthetic, with the reuse of a production system, says the source. A run of the trace is a data set, and its extras
have the histograms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from traces.foreign.text import lines_of
from traces.importers.source import Imported, RemoteFile, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import fault

__all__ = ["SOURCE", "read"]

_NAME = re.compile(r"(\w[\w.-]{0,199})\.pt")
_BATCHES = re.compile(r"Locality stats after processing (\d{1,9}) batches of size (\d{1,9})")
_NUMBERS = (
    ("lookups", re.compile(r"Avg # of indices: (\d{1,15})")),
    ("rows", re.compile(r"Avg # of unique cols: (\d{1,15})")),
    ("lookups_per_row", re.compile(r"Avg col size: (\d{1,9}(?:\.\d{1,6})?)")),
)
_ROWS, _LOOKUPS = "Histogram of col sizes:", "Ratio of index distribution at different column sizes:"
_CLASS = re.compile(r"\((\d{1,9})(?:, (\d{1,9})\]|\+): ([01]\.\d{1,6})")
_BOUNDS = re.compile(r"\[\d+(?:, \d+)*\]")
_CUMULATIVE = re.compile(r"\['\d\.\d+'(?:, '\d\.\d+')*\]")
_ROUNDING = 5e-4
"""Shares have three digits."""


class _Lines:
    """The lines of a file that are not blank, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = [(row, line.strip()) for row, line in enumerate(lines_of(path, ends=False)) if line.strip()]
        self._at = 0

    @property
    def over(self) -> bool:
        return self._at == len(self._rows)

    @property
    def row(self) -> int:
        """Number of the next line; at the end, that of the last line."""
        return self._rows[min(self._at, len(self._rows) - 1)][0]

    def peek(self) -> str:
        return "" if self.over else self._rows[self._at][1]

    def take(self, pattern: re.Pattern[str], like: str) -> re.Match[str]:
        """The next line, which must match. Raises TraceError otherwise."""
        matched = pattern.fullmatch(self.peek())
        if matched is None:
            said = "the file was cut short" if self.over else f"{self.peek()[:80]!r} is not"
            raise fault(self.path, f"{said}, where a line like {like!r} should be.", row=self.row)
        self._at += 1
        return matched


def read(path: Path) -> Imported:
    """`path` is a locality_stats.txt, or a folder with such files below."""
    paths = find_files(path, "**/locality_stats*.txt")
    if not paths:
        raise nothing_to_import(path, "**/locality_stats.txt")
    runs: list[dict[str, Any]] = []
    seen: dict[str, Path] = {}
    for one in paths:
        lines = _Lines(one)
        if lines.over:
            raise fault(one, "it is empty.")
        year = one.stem.removeprefix("locality_stats").strip("_-") or one.parent.name
        while not lines.over:
            row = lines.row
            run, extras = _block(lines)
            name = f"{year}/{run}"
            if seen.setdefault(name, one) is not one or any(r["run"] == name for r in runs):
                raise fault(one, f"there is a data set {run!r} already; give each once.", row=row)
            runs.append({"run": name, "workload": "embedding look-ups", "extras": json_text(extras)})
    return Imported({"runs": table("runs", runs)}, tuple(paths))


def _block(lines: _Lines) -> tuple[str, dict[str, Any]]:
    """The next data set: its name and its figures."""
    name = lines.take(_NAME, "fbgemm_t856_bs65536.pt")[1]
    batches = lines.take(_BATCHES, "Locality stats after processing 1 batches of size 65536")
    found: dict[str, Any] = {"batches": int(batches[1]), "batch_size": int(batches[2])}
    row = lines.row
    for key, pattern in _NUMBERS:
        text = lines.take(pattern, pattern.pattern.split("(")[0])[1]
        found[key] = float(text) if "." in text else int(text)
    if not (0 < found["rows"] <= found["lookups"] and found["batches"] > 0 and found["batch_size"] > 0):
        why = f"{found['lookups']} look-ups of {found['rows']} rows are not plausible: each row is looked up at least once."
        raise fault(lines.path, why, row=row)
    if abs(found["lookups"] / found["rows"] - found["lookups_per_row"]) > 0.051 + 1e-3 * found["lookups_per_row"]:
        why = f"{found['lookups']} look-ups of {found['rows']} rows are not {found['lookups_per_row']:g} for each."
        raise fault(lines.path, why, row=row)
    bounds, found["row_shares"] = _histogram(lines, _ROWS)
    again, found["lookup_shares"] = _histogram(lines, _LOOKUPS)
    if bounds != again:
        raise fault(lines.path, "the two histograms have different classes.", row=lines.row)
    return name, found | {"lookups_of_row_above": bounds}


def _histogram(lines: _Lines, head: str) -> tuple[list[int], list[float]]:
    """Lower bounds and shares of the classes. Raises TraceError unless they are in order and sum to 1."""
    lines.take(re.compile(re.escape(head)), head)
    row, classes = lines.row, list(_classes(lines))
    bounds, shares = [low for low, _, _ in classes], [share for _, _, share in classes]
    chained = all(high == low for (_, high, _), (low, _, _) in pairwise(classes))
    if not classes or not chained or classes[-1][1] is not None or bounds != sorted(set(bounds)):
        raise fault(lines.path, f"the classes after {head!r} do not follow one another.", row=row)
    if abs(sum(shares) - 1.0) > _ROUNDING * (len(shares) + 1):
        raise fault(lines.path, f"the shares after {head!r} sum to {sum(shares):.3f}, not to 1.", row=row)
    lines.take(_BOUNDS, "[0, 1, 2, 4]")
    lines.take(_CUMULATIVE, "['0.000', '0.473', '1.000']")
    return bounds, shares


def _classes(lines: _Lines) -> Iterator[tuple[int, int | None, float]]:
    """Lower and upper bound and share of each class; the last one has no upper bound."""
    while lines.peek().startswith("("):
        low, high, share = lines.take(_CLASS, "(1, 2]: 0.152").groups()
        yield int(low), None if high is None else int(high), float(share)


SOURCE = Source(
    summary="how often rows of embedding tables are looked up: 33 data sets with the reuse of a production system",
    repository="facebookresearch/dlrm_datasets",
    commit="6f46ba7906e47a2f6bab6499056480d07d784eb8",
    folder="embedding_bag",
    licence="MIT, Copyright (c) Facebook, Inc. and its affiliates",
    cite="Meta Platforms, dlrm_datasets",
    read=read,
    files=(
        RemoteFile("2021/locality_stats.txt", "8e7044a04a0a8c629abb94e7af87444145c5a1b965c87e871dc07ec3e4d261d7"),
        RemoteFile("2022/locality_stats.txt", "f3d4e301a21c54018121b5d1e8a07c05ea9cbfbfe7fecf7ed4563d7e686e4c5b"),
    ),
    size="43 kB",
)
