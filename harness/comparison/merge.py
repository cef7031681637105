"""Joins comparisons of the same scenarios into one results folder: other tuners, other scenarios, or more seeds of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from harness.comparison.results import DIED, assemble, give_up, stopped_seconds
from traces import store
from traces.schema import KEYS

__all__ = ["ComparisonFolder", "check_same", "merge"]

_SAME = {"harness": None, "schema": None, "device": "cpu"}
"""Keys of the manifest that must be equal, and what a manifest without the key means: others may give other bytes."""

_OWN = {"own_tuners": "versions of tuner", "own_files": "files of scenario"}
"""Keys of the manifest with digests by name, and what they are of."""


@dataclass(frozen=True, slots=True)
class ComparisonFolder:
    """One of the folders to be joined: its path, its manifest, and its scenarios."""

    folder: Path
    manifest: dict[str, Any]
    scenarios: dict[str, bytes]  # the text of each, as it was run


def merge(folders: Sequence[Path], out: Path) -> Path:
    """Join the comparisons in `folders` into the new folder `out`, and return it.

    Raises ValueError, and writes nothing, where a folder holds no results, where two differ in the version of the harness,
    in a scenario's text or in the outcome of a run that both have, or where `out` is there already.
    """
    if len(folders) < 2:
        raise ValueError("Cannot merge one comparison: name at least two results folders.")
    if out.exists():
        raise ValueError(f"Cannot merge into {out}: it is there already. Name another folder with --out.")
    parts = [_part(folder) for folder in folders]
    for part in parts[1:]:
        check_same(parts[0], part)
    runs = _runs(parts)
    given_up = _given_up(parts)
    manifest = _manifest(parts)
    partly = out.with_name(f".{out.name}.partly")
    shutil.rmtree(partly, ignore_errors=True)
    try:
        (partly / "scenarios").mkdir(parents=True)
        for part in parts:
            for name, text in part.scenarios.items():
                store.write_bytes(partly / "scenarios" / f"{name}.toml", text)
        store.write_bytes(partly / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        for place, run in runs.items():
            shutil.copytree(run, partly / place)
        for place, seconds in given_up.items():
            if place not in runs:
                give_up(partly / place, seconds)
        host = pl.concat([store.read_host(part.folder / "host.csv") for part in parts])
        store.write_host(host.unique(KEYS, keep="first", maintain_order=True).sort(KEYS), partly / "host.csv")
        assemble(partly)
        partly.rename(out)
    finally:
        shutil.rmtree(partly, ignore_errors=True)
    return out


def _part(folder: Path) -> ComparisonFolder:
    store.check_comparison(folder, "merge")
    manifest = store.read_manifest(folder)
    texts = {}
    for name in manifest.get("scenarios", []):
        path = folder / "scenarios" / f"{name}.toml"
        if not path.is_file():
            raise ValueError(f"Cannot merge {folder}: it lacks the text of scenario {name!r}, {path}.")
        texts[name] = path.read_bytes()
    if not (folder / "host.csv").is_file() or not (folder / "runs").is_dir():
        raise ValueError(f"Cannot merge {folder}: it has no finished run. Go on with it by `harness compare --resume`.")
    return ComparisonFolder(folder, manifest, texts)


def check_same(first: ComparisonFolder, other: ComparisonFolder) -> None:
    """Raise ValueError, naming what differs, where two parts cannot be one comparison."""
    for key, default in _SAME.items():
        if (a := first.manifest.get(key, default)) != (b := other.manifest.get(key, default)):
            raise ValueError(
                f"Cannot merge {other.folder} with {first.folder}: {key} is {b} there and {a} here. Run one of them again."
            )
    for own, what in _OWN.items():
        ours, theirs = (part.manifest.get(own, {}) for part in (first, other))
        if changed := [name for name in ours if name in theirs and ours[name] != theirs[name]]:
            raise ValueError(
                f"Cannot merge {other.folder} with {first.folder}: {what} {changed[0]!r} differ. Run one of them again."
            )
    for name, text in other.scenarios.items():
        if name in first.scenarios and first.scenarios[name] != text:
            where = _difference(first, other, name)
            raise ValueError(f"Cannot merge {other.folder} with {first.folder}: scenario {name!r} differs, {where}.")


def _difference(first: ComparisonFolder, other: ComparisonFolder, name: str) -> str:
    """The first line in which a scenario's texts differ, in words."""
    ours, theirs = (part.scenarios[name].decode("utf-8", "replace").splitlines() for part in (first, other))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        if a != b:
            return f"in line {number}: {b.strip()!r} there and {a.strip()!r} here"
    return f"in its length: {len(theirs)} lines there and {len(ours)} here"


def _runs(parts: Sequence[ComparisonFolder]) -> dict[Path, Path]:
    """The folder of every run to be copied, by its place below the results folder."""
    found: dict[Path, Path] = {}
    for part in parts:
        for run in _run_folders(part):
            place = run.relative_to(part.folder)
            if place not in found:
                found[place] = run
            elif (run / "score.json").read_bytes() != (found[place] / "score.json").read_bytes():
                raise ValueError(
                    f"Cannot merge: {run} and {found[place]} are one run with two outcomes (score.json). "
                    "Run one of the comparisons again."
                )
    return found


def _given_up(parts: Sequence[ComparisonFolder]) -> dict[Path, float]:
    """The runs, by their place, that some part gave up, and the longest time after which one did."""
    found: dict[Path, float] = {}
    for part in parts:
        for note in part.folder.glob("runs/*/*/*.stopped"):
            place = note.with_suffix("").relative_to(part.folder)
            found[place] = max(stopped_seconds(note.with_suffix("")), found.get(place, 0.0))
    return found


def _run_folders(part: ComparisonFolder) -> Iterator[Path]:
    """Every run that is complete: not one whose process died."""
    for name in part.scenarios:
        for run in sorted((part.folder / "runs" / name).glob("*/*")):
            if (run / "score.json").is_file() and not (run / DIED).exists():
                yield run


def _manifest(parts: Sequence[ComparisonFolder]) -> dict[str, Any]:
    """The first manifest with the scenarios, tuners and seeds of all."""
    made = dict(parts[0].manifest)
    for key in ("scenarios", "tuners", "oracles"):
        made[key] = list(dict.fromkeys(name for part in parts for name in part.manifest.get(key, [])))
    made["seeds_of"] = {
        name: max(part.manifest.get("seeds_of", {}).get(name, 0) for part in parts) for name in made["scenarios"]
    }
    if draws := [part.manifest["draws"] for part in parts if "draws" in part.manifest]:
        bases = dict.fromkeys(base for one in draws for base in one)
        made["draws"] = {b: list(dict.fromkeys(n for one in draws for n in one.get(b, []))) for b in bases}
    for own in _OWN:
        if found := {name: each for part in parts for name, each in part.manifest.get(own, {}).items()}:
            made[own] = found
    made["seeds"] = max(made["seeds_of"].values())
    return made
