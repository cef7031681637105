"""The cache of runs under the oracle's settings: paid once per user, scenario, setting, seed and version of the program.

A run under a fixed setting depends on nothing else, so results have the same bytes with and without the cache. A scenario
that names another file (a recording, node types, a module) is not cached, since its text does not tell what is in that file.
Runs are kept beside the compiled programs (`harness.machines.program_cache`), and ``HARNESS_CACHE=off`` switches both off.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

from harness.comparison.own_files import named_by
from harness.comparison.run_process import Done, Task
from harness.machines.program_cache import ProgramFolder, folder
from traces import store
from traces.schema import setting_text

__all__ = ["get", "put"]

_LIMIT_BYTES = 512 * 2**20
_PACKAGES = ("tuners", "traces", "simulators", "harness")
_LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "simpy")


class _Kept(msgspec.Struct):
    """What is kept of a run."""

    done: Done
    files: dict[str, bytes]


def get(task: Task) -> Done | None:
    """Write the files of a run that was made before to the task's folder; None if it is not known."""
    kept = _store()
    if kept is None or (key := _key(task)) is None or (data := kept.get(key)) is None:
        return None
    try:
        run = msgspec.msgpack.decode(data, type=_Kept)
    except msgspec.MsgspecError:
        return None
    for name, content in run.files.items():
        path = Path(task.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_bytes(path, content)
    return run.done


def put(task: Task, done: Done) -> None:
    """Keep a run that is complete; nothing happens where the disk does not allow it."""
    kept = _store()
    if kept is None or done.status == "error" or (key := _key(task)) is None:
        return
    at = Path(task.folder)
    files = {str(path.relative_to(at)): path.read_bytes() for path in sorted(at.rglob("*")) if path.is_file()}
    kept.put(key, msgspec.msgpack.encode(_Kept(done, files)))


def _store() -> ProgramFolder | None:
    programs = folder()
    return (
        None if programs is None else ProgramFolder(programs.with_name(f"{programs.name}-oracle"), limit_bytes=_LIMIT_BYTES)
    )


def _key(task: Task) -> str | None:
    """Everything that the run depends on, as a digest; None for a run that is not cached."""
    if task.start is None or task.record or task.system != "harness.scenario:system" or _names_files(task.text):
        return None
    run = (task.scenario, task.text, task.tuner, task.plays, task.seed, setting_text(task.start))
    parts = (*run, repr(task.limit_seconds), _program())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@cache
def _names_files(text: str) -> bool:
    """Whether any text in a scenario but its summary could be the name of a file, a folder or a module."""
    read = tomllib.loads(text)
    read.pop("summary", None)

    def walk(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(walk, value.values()))
        if isinstance(value, list):
            return any(map(walk, value))
        return isinstance(value, str) and any(mark in value for mark in "/\\.:")

    return any(named_by(read)) or walk(read)


@cache
def _program() -> str:
    """A digest of the program and of the libraries that simulated results depend on."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        root = Path(str(resources.files(package)))
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml", ".npz")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    for library in _LIBRARIES:
        digest.update(f"{library} {metadata.version(library)}".encode())
    return digest.hexdigest()
