"""The results folder: where the files of each run are, and how runs become tables.

manifest.json                     scenarios, tuners, seeds, versions
scenarios/NAME.toml               each scenario as it was run
runs/SCENARIO/TUNER/SEED/         score.json, evaluations.parquet, settings.parquet, exchanges.jsonl.gz
                                  and, if the run wrote any, error.txt, output.txt and trace/
runs/SCENARIO/TUNER/SEED.stopped  in place of that folder: after how many simulated seconds a run of an oracle was given up
scores, evaluations, settings     .parquet, all runs together
oracles.json                      how many settings each oracle has run, and the name of the best
host.csv                          thinking and wall seconds, which differ between hosts
report.html

The folder of one deployed job (`harness.live.deploy.job_folder`) is that of its only run, and has these tables, too.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import polars as pl

from harness.machines.machine import described
from harness.score import Scored
from harness.version import HARNESS_VERSION
from traces import store
from traces.schema import EVALUATIONS, HOST, KEYS, SCORES, SETTINGS, UNPRICED, VERSION, minimised, worker_count
from tuners.baselines.best_fixed import choose

__all__ = [
    "DIED",
    "add_host",
    "assemble",
    "candidate_name",
    "finished_runs",
    "give_up",
    "hold_one_job",
    "is_known",
    "oracle_settings",
    "read_score",
    "run_folder",
    "stopped_seconds",
]

DIED = "died"
"""A file of this name marks a run whose process died: its row is valid until the run is repeated."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One run of the tables."""

    scenario: str
    tuner: str  # the name in the tables
    seed: int
    source: str  # the name in the folder `runs`; another one for the candidate that an oracle chose


def run_folder(out: Path, scenario: str, tuner: str, seed: int) -> Path:
    """The folder of a run's files. The tuner's name is quoted: it may contain characters that a file name must not have.

    The run of a deployed job has the folder of the job."""
    if store.is_job(out):
        return out
    return out / "runs" / scenario / quote(tuner, safe="+=,()") / str(seed)


def give_up(run: Path, seconds: float) -> None:
    """Note, in place of the folder of a run, after how many simulated seconds it was stopped. No more is known of it."""
    run.parent.mkdir(parents=True, exist_ok=True)
    store.write_bytes(_note(run), f"{seconds!r}\n".encode())


def stopped_seconds(run: Path) -> float:
    """The simulated seconds after which the run of that folder was given up, 0 where it was not. Raises ValueError, naming
    file and way out, where that cannot be read."""
    note = _note(run)
    try:
        return float(note.read_text("utf-8")) if note.exists() else 0.0
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot read {note}: it is damaged ({error}). Delete the file and resume.") from None


def is_known(run: Path, limit_seconds: float) -> bool:
    """Whether the run of that folder is complete, or known to take longer than its limit."""
    return run.is_dir() or stopped_seconds(run) > limit_seconds


def finished_runs(out: Path) -> int:
    """How many runs are in place, those of an oracle's settings among them; not such whose process died."""
    return sum(not (run / DIED).exists() for run in (out / "runs").glob("*/*/*") if run.is_dir())


def _note(run: Path) -> Path:
    return run.with_suffix(".stopped")


def candidate_name(oracle: str, setting: str) -> str:
    """The tuner's name for runs under one of an oracle's settings; the tables show the best one under the oracle's name."""
    return f"{oracle}+{setting}"


def add_host(
    out: Path, scenario: str, tuner: str, seed: int, thinking_seconds: float, wall_seconds: float, machine: str = ""
) -> None:
    """Add a row to `host.csv`."""
    path = out / "host.csv"
    line = io.StringIO()
    if not path.exists():
        csv.writer(line, lineterminator="\n").writerow(HOST)
    csv.writer(line, lineterminator="\n").writerow([scenario, tuner, seed, thinking_seconds, wall_seconds, machine])
    before = path.read_bytes() if path.exists() else b""
    store.write_bytes(path, before + line.getvalue().encode())


def hold_one_job(out: Path, scored: Scored, thinking_seconds: float, wall_seconds: float) -> None:
    """Write the tables of a deployed job whose only run is `scored`, so that its folder is read as a comparison's is."""
    row = scored.score
    manifest = {"harness": HARNESS_VERSION, "schema": VERSION, "scenarios": [row.scenario], "tuners": [row.tuner]}
    manifest |= {"oracles": [], "seeds": 1, "seeds_of": {row.scenario: 1}, "system": "live"}
    store.write(pl.DataFrame(scored.rows()["scores"], schema=SCORES), out / "scores.parquet", SCORES)
    (out / "host.csv").unlink(missing_ok=True)  # of a job that was resumed after a fault of its tuner
    add_host(out, row.scenario, row.tuner, row.seed, thinking_seconds, wall_seconds, described())
    store.write_bytes(out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())


def assemble(out: Path) -> None:
    """Make the tables of all finished runs, in sorted order; the same runs give the same bytes."""
    manifest = store.read_manifest(out)
    try:
        rows = sorted(_rows(out, manifest), key=lambda r: (r.scenario, r.tuner, r.seed))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"Cannot read {out / 'manifest.json'}: it is damaged ({error}). Run the comparison again elsewhere."
        ) from None
    store.write(_scores(out, rows), out / "scores.parquet", SCORES)
    for name, schema in (("evaluations", EVALUATIONS), ("settings", SETTINGS)):
        parts = [_read(_folder(out, r), f"{name}.parquet", schema).with_columns(tuner=pl.lit(r.tuner)) for r in rows]
        store.write(pl.concat(parts) if parts else pl.DataFrame(schema=schema), out / f"{name}.parquet", schema)
    _host(out, rows)
    seen = {
        scenario: {
            oracle: {"settings": len(oracle_settings(out, scenario, oracle)), "best": best}
            for oracle in manifest["oracles"]
            if (best := _chosen(out, scenario, oracle, manifest["seeds_of"][scenario])) is not None
        }
        for scenario in manifest["scenarios"]
        if manifest["oracles"]
    }
    if any(seen.values()):
        store.write_bytes(out / "oracles.json", (json.dumps(seen, indent=1) + "\n").encode())


def _rows(out: Path, manifest: dict[str, Any]) -> Iterator[_Row]:
    for scenario in manifest["scenarios"]:
        seeds = range(manifest["seeds_of"][scenario])
        for tuner in manifest["tuners"]:
            source = _chosen(out, scenario, tuner, len(seeds)) if tuner in manifest["oracles"] else tuner
            for seed in seeds:
                if source is not None and run_folder(out, scenario, source, seed).is_dir():
                    yield _Row(scenario, tuner, seed, source)


def _chosen(out: Path, scenario: str, oracle: str, seeds: int) -> str | None:
    """The best over all seeds of the settings that were run on every seed; None while there is none.

    Where none of them reached the target in any run, that is the one that was nearest to it: of highest accuracy, or of
    least loss where there is no accuracy.
    """
    completions: dict[int, list[float]] = {}
    ends: dict[int, list[float]] = {}
    reached = False
    names = oracle_settings(out, scenario, oracle)
    for index, name in enumerate(names):
        folders = [run_folder(out, scenario, name, seed) for seed in range(seeds)]
        if all(f.is_dir() for f in folders):
            scores = [read_score(f) for f in folders]
            completions[index] = [minimised(score) for score in scores]
            ends[index] = [_distance(score) for score in scores]
            reached = reached or any(score["reached"] for score in scores)
    return names[choose(completions if reached else ends)] if completions else None


def _distance(score: Mapping[str, Any]) -> float:
    """How far the model of a run that missed its target is from it, for an order; infinite where nothing is known of it."""
    distance = score["final_loss"] if math.isnan(score["final_accuracy"]) else 1 - score["final_accuracy"]
    return math.inf if math.isnan(distance) else float(distance)


def oracle_settings(out: Path, scenario: str, oracle: str) -> list[str]:
    """The names of all settings that an oracle has run on a scenario, on one seed at least."""
    return sorted(unquote(path.name) for path in (out / "runs" / scenario).glob(f"{quote(oracle)}+*"))


def _folder(out: Path, row: _Row) -> Path:
    return run_folder(out, row.scenario, row.source, row.seed)


def read_score(folder: Path) -> dict[str, Any]:
    """The row of one run; columns: `SCORES`. Raises ValueError, naming file and way out, where it cannot be read."""
    path = folder / "score.json"
    try:
        read = json.loads(path.read_text("utf-8"))
        read.setdefault("final_workers", worker_count(read["final_setting"]))  # runs of version 2 do not have it
        read = UNPRICED | read  # nor do those of version 3 have all of these
        return {name: float(read[name]) if kind == pl.Float64 else read[name] for name, kind in SCORES.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"Cannot read {path}: it is damaged or of another version ({error}). Delete the folder {folder} and resume."
        ) from None


def _read(folder: Path, name: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Read a table of one run. The error advises to delete the whole folder: resume repeats whole runs only."""
    path = folder / name
    try:
        return store.read(path, schema)
    except ValueError as error:
        why = str(error).removeprefix(f"Cannot read {path}: ").split(". ")[0].rstrip(".")
        raise ValueError(f"Cannot read {path}: {why}. Delete the folder {folder} and resume.") from None


def _scores(out: Path, rows: list[_Row]) -> pl.DataFrame:
    return pl.DataFrame([read_score(_folder(out, r)) | {"tuner": r.tuner} for r in rows], schema=SCORES)


def _host(out: Path, rows: list[_Row]) -> None:
    """Sort `host.csv`, and add a row under the oracle's name for each run of the chosen candidate."""
    path = out / "host.csv"
    known = store.read_host(path) if path.exists() else pl.DataFrame(schema=HOST)
    renamed = {(r.scenario, r.source, r.seed): r.tuner for r in rows if r.source != r.tuner}
    extra = [row | {"tuner": renamed[key]} for row in known.to_dicts() if (key := tuple(row[k] for k in KEYS)) in renamed]
    joined = pl.concat([known, pl.DataFrame(extra, schema=HOST)]).unique(KEYS, keep="last", maintain_order=True)
    store.write_host(joined.sort(KEYS), path)
