"""The tables of a comparison on disk: equal frames give equal bytes, writes are atomic, and every read is checked."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from traces.schema import (
    EVALUATIONS,
    HOST,
    KEYS,
    NOT_APPLICABLE,
    READABLE,
    SCORES,
    SETTINGS,
    UNPRICED,
    VERSION,
    worker_count,
)

__all__ = [
    "SIMULATED_SECONDS",
    "Results",
    "check_comparison",
    "check_new",
    "drawn_scenarios",
    "is_job",
    "load_results",
    "read",
    "read_host",
    "read_manifest",
    "time_unit",
    "write",
    "write_bytes",
    "write_host",
]

SIMULATED_SECONDS = "simulated seconds"
_VERSION_KEY = "harness_schema"
_AGAIN = "Delete it and run `harness compare --resume` on the folder that it belongs to."


@dataclass(frozen=True, slots=True)
class Results:
    """One comparison: its manifest and its tables."""

    manifest: dict[str, Any]
    scores: pl.DataFrame  # traces.schema.SCORES; the runs that were played
    evaluations: pl.DataFrame  # traces.schema.EVALUATIONS
    settings: pl.DataFrame  # traces.schema.SETTINGS
    host: pl.DataFrame  # traces.schema.HOST
    not_applicable: pl.DataFrame = field(  # traces.schema.SCORES: of tuners that had nothing to tune; they are never ranked
        default_factory=lambda: pl.DataFrame(schema=SCORES)
    )
    oracles: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by scenario and oracle: settings, best
    # traces.schema.SCORES, also of what did not apply: under draws of calibrated constants, which are in no other scores.
    # The manifest's "draws" names them by the scenario that was drawn.
    draws: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCORES))

    @property
    def live(self) -> bool:
        """Whether the jobs ran on real processes."""
        return self.manifest.get("system") == "live"

    @property
    def unit(self) -> str:
        """The unit of a job's time, in words."""
        return time_unit(self.manifest)

    @property
    def missing(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The runs that the manifest names and no table has, because the comparison was interrupted: seeds by tuner, by
        scenario. Of an oracle they are missing until it has run some setting on all seeds. A published site's tuners need
        not have been played on all of its scenarios (`played_in_part`)."""
        every = pl.concat([self.scores, self.not_applicable, self.draws])
        made: dict[tuple[str, str], set[int]] = {}
        for scenario, tuner, seed in every.select(KEYS).iter_rows():
            made.setdefault((scenario, tuner), set()).add(seed)
        drawn, oracles = drawn_scenarios(self.manifest), self.manifest.get("oracles", [])
        in_part = self.manifest.get("played_in_part", [])
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for scenario, count in self.manifest.get("seeds_of", {}).items():
            for tuner in self.manifest.get("tuners", []):
                if tuner in in_part or (scenario in drawn and tuner in oracles):
                    continue
                have = made.get((scenario, tuner), set())
                # A deployed job has one run, of any seed: it lacks nothing.
                if lacks := [seed for seed in range(count) if seed not in have][: count - len(have)]:
                    found.setdefault(scenario, {})[tuner] = tuple(lacks)
        return found


def time_unit(manifest: Mapping[str, Any]) -> str:
    """The unit of a job's time in the results of a `manifest`, in words."""
    return "seconds" if manifest.get("system") == "live" else SIMULATED_SECONDS


def write(frame: pl.DataFrame, path: Path, schema: Mapping[str, pl.DataType]) -> None:
    """Write `frame` as Parquet, with its columns in the schema's order. Raises ValueError for a column of another type."""
    _check(frame, path, schema)
    packed = io.BytesIO()
    ordered = frame.select(list(schema))
    ordered.write_parquet(packed, compression="zstd", row_group_size=1 << 20, metadata={_VERSION_KEY: str(VERSION)})
    write_bytes(path, packed.getvalue())


def read(path: Path, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Read a table that `write` wrote, in this version or one of `READABLE`. Raises ValueError, naming the file and the way
    out, for any other file."""
    data = _bytes(path)
    try:
        version = pl.read_parquet_metadata(io.BytesIO(data)).get(_VERSION_KEY)
        _check_version(path, version)
        frame = pl.read_parquet(io.BytesIO(data))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"Cannot read {path}: it is damaged or cut short ({error}). {_AGAIN}") from None
    if str(version) == "2":
        frame = _with_worker_counts(frame, path, schema)
    if str(version) in ("2", "3"):
        added = {name: value for name, value in UNPRICED.items() if name in schema and name not in frame.columns}
        frame = frame.with_columns(**{name: pl.lit(value) for name, value in added.items()})
    _check(frame, path, schema)
    return frame.select(list(schema))


def _with_worker_counts(frame: pl.DataFrame, path: Path, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """A table of version 2 with the columns that version 3 added. Raises ValueError for a setting that cannot be read."""
    for setting, workers in (("final_setting", "final_workers"), ("setting", "workers")):
        if workers in schema and workers not in frame.columns and setting in frame.columns:
            try:
                counts = [worker_count(text) for text in frame[setting]]
            except ValueError as error:
                raise ValueError(f"Cannot read {path}: column {setting!r} holds no setting ({error}). {_AGAIN}") from None
            frame = frame.with_columns(pl.Series(workers, counts, pl.Int64))
    return frame


def write_host(frame: pl.DataFrame, path: Path) -> None:
    """Write the times measured on the host, as CSV."""
    _check(frame, path, HOST)
    write_bytes(path, frame.select(list(HOST)).write_csv().encode())


def read_host(path: Path) -> pl.DataFrame:
    """Read them back; if a run has two rows (it was repeated by `--resume`), the later row counts."""
    try:
        data = _bytes(path)
        # Machines were not recorded at first: such a file lacks the last column.
        known = {name: kind for name, kind in HOST.items() if name != "machine" or b"machine" in data.split(b"\n", 1)[0]}
        frame = pl.read_csv(io.BytesIO(data), schema=known)
        frame = frame if "machine" in known else frame.with_columns(machine=pl.lit(""))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"Cannot read {path}: it is no table of host seconds ({error}). {_AGAIN}") from None
    frame = frame.with_columns(pl.col("machine").fill_null(""))
    return frame.unique(KEYS, keep="last", maintain_order=True).sort(KEYS)


_MANIFEST: dict[str, type] = {"scenarios": list, "tuners": list, "oracles": list, "seeds_of": dict, "draws": dict}
"""What readers of a manifest go through, and its types."""


def is_job(folder: Path) -> bool:
    """Whether `folder` is that of one deployed job, which has the files of its run beside the tables."""
    return (folder / "deploy.json").is_file()


def check_comparison(folder: Path, verb: str) -> None:
    """Raise ValueError where `folder` has one deployed job: it cannot be joined with others, or published."""
    if is_job(folder):
        raise ValueError(
            f"Cannot {verb} {folder}: it has one deployed job. Jobs of several tuners or seeds are made by "
            "`harness deploy --live SCENARIO --tuners NAME,... --out DIR`."
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises ValueError where it is no results folder, or one of another version."""
    path = folder / "manifest.json"
    if is_job(folder) and not path.is_file():
        if not (folder / "checkpoint.safetensors").is_file():
            raise ValueError(
                f"Cannot read results from {folder}: its job stopped before it had a checkpoint. `harness deploy --live`, "
                "without --resume, starts it again there."
            )
        raise ValueError(
            f"Cannot read results from {folder}: its job has not ended. `harness deploy --live` with --resume goes on with "
            f"it, and `harness trace show {folder / 'trace'}` shows what is recorded."
        )
    if not path.is_file():
        raise ValueError(f"Cannot read results from {folder}: it has no manifest.json. Name a folder that compare wrote.")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"Cannot read {path}: it is damaged ({error}). Run the comparison again elsewhere.") from None
    _check_version(path, manifest.get("schema") if isinstance(manifest, dict) else None)
    for key, kind in _MANIFEST.items():
        if not isinstance(manifest.get(key, kind()), kind):
            why = f"{key} is {manifest[key]!r}"
            raise ValueError(f"Cannot read {path}: it is damaged ({why}). Run the comparison again elsewhere.")  # noqa: TRY004
    return dict(manifest)


def drawn_scenarios(manifest: Mapping[str, Any]) -> list[str]:
    """The scenarios of a comparison that are draws of another one's calibrated constants."""
    return [name for names in manifest.get("draws", {}).values() for name in names]


def load_results(folder: Path) -> Results:
    """The tables of a comparison. Raises ValueError where a table is missing, damaged, or of another version."""
    manifest = read_manifest(folder)
    every = read(folder / "scores.parquet", SCORES)
    drawn = pl.col("scenario").is_in(drawn_scenarios(manifest))
    scores, played = every.filter(~drawn), pl.col("status") != NOT_APPLICABLE
    return Results(
        manifest,
        scores.filter(played),
        read(folder / "evaluations.parquet", EVALUATIONS),
        read(folder / "settings.parquet", SETTINGS),
        read_host(folder / "host.csv"),
        scores.filter(~played),
        _oracles(folder / "oracles.json"),
        every.filter(drawn),
    )


def _oracles(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """How many settings each oracle has run on each scenario, and the best one's name; empty where it is not known."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"Cannot read {path}: it is damaged ({error}). Delete it and run `harness report`.") from None


def check_new(path: Path) -> None:
    """Raise ValueError where a file that is to be written is there already."""
    if path.exists():
        raise ValueError(f"Cannot write {path}: it is there already; remove it, or name another file.")


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all. Raises OSError, with the way out, if the disk is full."""
    # Write a temporary file in the same folder, then rename it: a rename within one file system is atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _clear_errors(path):
        try:
            with temporary.open("wb") as out:
                out.write(data)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """Replace "No space left on device" by a message that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        way_out = "What was written before is whole: free some space, then give the same command with --resume."
        raise OSError(error.errno, f"Cannot write {path}: the disk is full. {way_out}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"Cannot read {path}: there is no such file. Finish the comparison with `harness compare --resume`."
        ) from None


def _check_version(path: Path, found: Any) -> None:
    if str(found) not in map(str, READABLE):
        raise ValueError(
            f"Cannot read {path}: it has format {found}, and this harness reads formats {READABLE[0]} to {VERSION}. "
            "Use the version that wrote it, or run the comparison again into another folder."
        )


def _check(frame: pl.DataFrame, path: Path, schema: Mapping[str, pl.DataType]) -> None:
    missing = [name for name in schema if name not in frame.columns]
    if missing:
        has = ", ".join(frame.columns) or "none"
        raise ValueError(f"Cannot use {path}: column {missing[0]!r} is missing; it has {has}.")
    wrong = [name for name, kind in schema.items() if frame.schema[name] != kind]
    if wrong:
        name = wrong[0]
        raise ValueError(f"Cannot use {path}: column {name!r} holds {frame.schema[name]}, not {schema[name]}.")
