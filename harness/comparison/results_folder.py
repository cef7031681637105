"""The folder that a comparison writes: claimed by one comparison at a time, and filled run by run.

A run is written to a folder beside the results, which is renamed into place when the run is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.comparison import results
from harness.comparison.run_process import GIVEN_UP, Done, Task, save
from harness.scenario import Scenario, limits
from harness.score import unplayed
from traces import store

__all__ = ["check_folder", "claimed", "clean", "is_made", "move_into_place", "with_folder", "write_died"]

_CPU = "cpu"
_MAY_GROW = {"scenarios", "tuners", "oracles", "seeds", "seeds_of", "draws"}  # entries of a manifest, on resume
_OWN = ("own_tuners", "own_files")  # entries with digests, which are compared one by one
_UNLESS_GIVEN: dict[str, Any] = {"draws": {}}  # of entries that a manifest may leave out


def check_folder(out: Path, *, resume: bool) -> bool:
    """Whether `out` has no results yet. Raises ValueError where it is a file, or has some and is not to be resumed."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"Cannot write results to {out}: it is a file. Name a folder with --out.")
    if store.is_job(out):
        raise ValueError(f"Cannot write results to {out}: it is the folder of a deployed job. Name another with --out.")
    # A comparison that was killed before it wrote its manifest has run nothing yet: its folder counts as new.
    fresh = not out.is_dir() or {p.name for p in out.iterdir()} <= {"scenarios"}
    if not fresh and not resume:
        raise ValueError(
            f"Cannot write results to {out}: it is there already. Go on with it by --resume, or name another with --out."
        )
    return fresh


@contextmanager
def claimed(
    out: Path, manifest: dict[str, Any], scenarios: Sequence[Scenario], *, resume: bool, replace: Sequence[str] = ()
) -> Iterator[None]:
    """Create the folder `out`, or check that its results belong to this comparison; lock it meanwhile.

    Finished runs of the tuners `replace` are deleted, so that they are made again.
    """
    fresh = check_folder(out, resume=resume)
    if not fresh:
        _check_goes_on(out, manifest, scenarios, replace)
    try:
        (out / "scenarios").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot write results to {out}: {error.strerror}. Name another folder with --out.") from None
    # A lock on the folder itself leaves no lock file behind, and the system releases it if this process is killed.
    lock = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"Cannot write results to {out}: another comparison is writing there. Wait for its end.") from None
    try:
        for scenario in scenarios:
            if not (kept := _kept(out, scenario)).exists():
                store.write_bytes(kept, scenario.text.encode())
        if fresh or _read_manifest(out) != manifest:
            store.write_bytes(out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        for scenario, tuner in ((s, t) for s in scenarios for t in replace):
            shutil.rmtree(results.run_folder(out, scenario.name, tuner, 0).parent, ignore_errors=True)
        clean(out)
        yield
    finally:
        os.close(lock)


def _check_goes_on(out: Path, manifest: dict[str, Any], scenarios: Sequence[Scenario], replace: Sequence[str]) -> None:
    """Raise ValueError unless the results in `out`, without those of the tuners `replace`, are a part of this comparison."""
    found = _read_manifest(out)
    for key in {**manifest, **found}:
        if key in _OWN:
            continue
        before, wanted = found.get(key, _UNLESS_GIVEN.get(key)), manifest.get(key)
        if not (_within(before, wanted) if key in _MAY_GROW else before == wanted):
            if key in _MAY_GROW:
                way = "Give these, too: resuming adds scenarios, tuners and seeds, and leaves none out"
            else:
                way = "Use that version" if key in ("harness", "schema") else "Give the same arguments"
            raise ValueError(
                f"Cannot go on with {out}: it was made with {key} {_listed(before)}, and this is {_listed(wanted)}. "
                f"{way}, or name another folder with --out."
            )
    for scenario in scenarios:
        kept = _kept(out, scenario)
        if scenario.name in found["scenarios"] and not (kept.is_file() and kept.read_text("utf-8") == scenario.text):
            raise ValueError(
                f"Cannot go on with {out}: scenario {scenario.name!r} has changed since. Name another folder with --out, "
                f"or go back to the scenario as it is in {kept}."
            )
    before, now = ({key: made.get(key, {}) for key in _OWN} for made in (found, manifest))
    for scenario_name, files in before["own_files"].items():
        for file, digest in files.items():
            if now["own_files"].get(scenario_name, {}).get(file) != digest:
                raise ValueError(
                    f"Cannot go on with {out}: {file}, which scenario {scenario_name!r} names, has changed since. Name "
                    "another folder with --out, or go back to the file as it was."
                )
    if changed := [
        tuner
        for tuner, digest in before["own_tuners"].items()
        if tuner not in replace and now["own_tuners"].get(tuner, digest) != digest
    ]:
        which = f"tuner {changed[0]!r}" if len(changed) == 1 else f"{len(changed)} tuners"
        raise ValueError(
            f"Cannot go on with {out}: the code of {which} has changed since the runs were made. Make them again by the "
            f"same command with --resume --replace {_listed([*replace, *changed])!r}, or name another folder with --out."
        )


def _listed(value: Any) -> str:
    """A value of the manifest in a sentence: names as --tuners takes them."""
    return ",".join(value) if isinstance(value, list) else str(value)


def _read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of the folder; a simulated comparison that wrote no device used the CPU."""
    found = store.read_manifest(out)
    return found if "system" in found else {"device": _CPU} | found


def _within(found: Any, wanted: Any) -> bool:
    """Whether `found` is a part of `wanted`, both values of a manifest: numbers, lists of names, or tables of these."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(k in wanted and _within(v, wanted[k]) for k, v in found.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and set(found) <= set(wanted)
    return isinstance(found, int) and isinstance(wanted, int) and found <= wanted


def _kept(out: Path, scenario: Scenario) -> Path:
    """The scenario's file in the folder."""
    return out / "scenarios" / f"{scenario.name}.toml"


def _place(out: Path, task: Task) -> Path:
    return results.run_folder(out, task.scenario, task.tuner, task.seed)


def is_made(out: Path, task: Task) -> bool:
    """Whether nothing more is wanted of the run. A run whose process died is made again: its folder is deleted."""
    folder = _place(out, task)
    if (folder / results.DIED).exists():
        shutil.rmtree(folder)
    return results.is_known(folder, task.limit_seconds)


def with_folder(out: Path, task: Task, index: int) -> Task:
    """The task with a folder to write to, on the same disk as the results, so that it can be renamed into place."""
    name = f"{quote(task.tuner, safe='')}-{task.seed}-{index}"
    return replace(task, folder=str(out.absolute() / "unfinished" / name))


def write_died(task: Task, reason: str, scenario: Scenario) -> Done:
    """Write the row of a run whose process died."""
    folder = Path(task.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names: dict[str, Any] = {"scenario": task.scenario, "tuner": task.tuner, "seed": task.seed}
    row = unplayed("error", reason, **names, **limits(scenario))
    save(folder, row)
    store.write_bytes(folder / results.DIED, b"")
    return Done("error", reason, scenario.budget.seconds, float("nan"), float("nan"))


def move_into_place(out: Path, task: Task, done: Done) -> None:
    """Move a finished run into place. Its host seconds are written first, so that every run in place has them."""
    results.add_host(out, task.scenario, task.tuner, task.seed, done.thinking_seconds, done.wall_seconds, done.machine)
    place = _place(out, task)
    place.parent.mkdir(parents=True, exist_ok=True)
    if done.status == GIVEN_UP:
        results.give_up(place, done.stopped_seconds)
    else:
        Path(task.folder).rename(place)


def clean(out: Path) -> None:
    """Delete what runs that were interrupted have left."""
    shutil.rmtree(out / "unfinished", ignore_errors=True)
