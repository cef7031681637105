"""The folder of a deployed job, from which another process can resume it.

deploy.json              which scenario, tuner and seed
scenario.toml            as it was deployed
exchanges.jsonl.gz       actions of the tuner and their answers, one per line, written while the job runs
checkpoint.safetensors   the state from which --resume continues
model.safetensors        the trained model: parameters by name
trace/                   the recording (`harness trace show`)
score.json, evaluations.parquet, settings.parquet   with the exchanges, as `harness compare` writes them
manifest.json, scores.parquet, host.csv, report.html   the results of this one run, which `harness report` reads
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import safetensors.numpy

from harness.scenario import Scenario, own_model
from harness.version import HARNESS_VERSION
from traces.exchanges import Exchange, LogStream, decode, encode, lines_of
from traces.store import write_bytes

__all__ = [
    "CHECKPOINT",
    "LOG",
    "ExchangeLog",
    "JobFolder",
    "KeptExchanges",
    "checked",
    "claimed",
    "exchanges_of",
    "private",
    "write_model",
]

CHECKPOINT = "checkpoint.safetensors"
LOG = "exchanges.jsonl.gz"
# Files of a job that has no checkpoint yet.
_BEFORE_CHECKPOINT = {"deploy.json", "scenario.toml", LOG, f"{LOG}.part", "trace"}

T = TypeVar("T")


class JobFolder:
    """A folder that is claimed for a job. Until `begin`, nothing is written there: a job that is refused leaves nothing."""

    def __init__(self, out: Path, scenario: Scenario, manifest: dict[str, Any], *, fresh: bool) -> None:
        self._out, self._scenario, self._manifest, self._fresh = out, scenario, manifest, fresh

    def begin(self) -> None:
        """Write which job it is, if it is a new one."""
        if self._fresh:
            write_bytes(self._out / "scenario.toml", self._scenario.text.encode())
            write_bytes(self._out / "deploy.json", (json.dumps(self._manifest, indent=1) + "\n").encode())


@contextmanager
def claimed(out: Path, scenario: Scenario, tuner: str, seed: int, *, resume: bool, emulate: str = "") -> Iterator[JobFolder]:
    """Create the folder `out`, or check that it is of the same job, and lock it. Raises ValueError if that cannot be.
    Folders that are created and stay empty are removed."""
    folder = checked(out, scenario, tuner, seed, resume=resume, emulate=emulate)
    with private(), _locked(out):
        yield folder


def checked(out: Path, scenario: Scenario, tuner: str, seed: int, *, resume: bool, emulate: str = "") -> JobFolder:
    """The folder `out` of a job, which need not be there. Raises ValueError where it is there and is of something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"Cannot deploy to {out}: it is a file. Name a folder with --out.")
    manifest = {"harness": HARNESS_VERSION, "scenario": scenario.name, "tuner": tuner, "seed": seed}
    manifest |= {"emulate": emulate or "nothing"}
    model, digest = own_model(scenario)
    manifest |= {"own_model": digest} if model else {}
    # A job that was stopped before its first checkpoint cannot be resumed, and its files may be overwritten.
    fresh = not out.is_dir() or {p.name for p in out.iterdir()} <= _BEFORE_CHECKPOINT
    if fresh and resume:
        raise ValueError(f"Cannot resume from {out}: it has no checkpoint of a job. Deploy without --resume to start one.")
    if not fresh:
        if not resume:
            way = "Go on with it by --resume, or name another with --out." if _goes_on(out) else "Name another with --out."
            raise ValueError(f"Cannot deploy to {out}: it is there already. {way}")
        _check_same(out, manifest, scenario, model)
        _check_not_over(out)
    return JobFolder(out, scenario, manifest, fresh=fresh)


@contextmanager
def private() -> Iterator[None]:
    """What is written meanwhile is for its owner only: files 0600, folders 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        out.chmod(0o700)
        lock = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"Cannot deploy to {out}: {error.strerror}. Name another folder with --out.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Cannot deploy to {out}: another job is running there. Wait for its end.") from None
        yield
    finally:
        with suppress(OSError):  # one that is not empty stays, and those above it
            for path in made:
                path.rmdir()
        os.close(lock)


def _check_same(out: Path, manifest: dict[str, Any], scenario: Scenario, model: str) -> None:
    try:
        found = json.loads((out / "deploy.json").read_text("utf-8"))
        text = (out / "scenario.toml").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot resume from {out}: it is not the folder of a deployed job ({error}).") from None
    for key, wanted in manifest.items():
        if key == "own_model" and found.get(key) != wanted:
            raise ValueError(
                f"Cannot resume from {out}: {model} has changed since. Name another folder with --out, or go back to the "
                "file as it was."
            )
        if found.get(key) != wanted:
            raise ValueError(
                f"Cannot resume from {out}: it was deployed with {key} {found.get(key)}, and this is {wanted}. "
                "Give the same arguments, or name another folder with --out."
            )
    if text != scenario.text:
        raise ValueError(
            f"Cannot resume from {out}: scenario {scenario.name!r} has changed since. Name another folder with --out, or "
            f"give the scenario as it is in {out / 'scenario.toml'}."
        )


def _check_not_over(out: Path) -> None:
    """Raise ValueError where the job has ended, by its target, its budget, or because it could not go on."""
    ended = _ending(out)
    if ended not in ("", "error"):
        raise ValueError(f"Cannot resume from {out}: the job has ended ({ended}). Name another folder with --out.")
    if not (out / CHECKPOINT).exists():
        raise ValueError(
            f"Cannot resume from {out}: its job ended before it had a checkpoint. Name another folder with --out, without "
            "--resume."
        )


def _goes_on(out: Path) -> bool:
    """Whether a job in the folder may be resumed. After a fault of its tuner, a job may go on."""
    return (out / "deploy.json").exists() and (out / CHECKPOINT).exists() and _ending(out) in ("", "error")


def _ending(out: Path) -> str:
    """How the job has ended; empty if it has no result, or one that was cut short."""
    try:
        return str(json.loads((out / "score.json").read_text("utf-8"))["status"])
    except (OSError, ValueError, KeyError):
        return ""


class KeptExchanges:
    """The first `count` exchanges of a job's log, read from the file each time. Reading raises ValueError if one of them is
    missing or damaged."""

    def __init__(self, out: Path, count: int = 0) -> None:
        self._out, self._count = out, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Exchange]:
        return self._read(decode)

    def lines(self) -> Iterator[bytes]:
        """The exchanges as lines of the log."""
        return self._read(bytes)

    def _read(self, made: Callable[[bytes], T]) -> Iterator[T]:
        found = 0
        try:
            for line in islice(lines_of(self._out / LOG) if self._count else (), self._count):
                yield made(line)
                found += 1
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot resume from {self._out}: {LOG} is missing or damaged ({error}).") from None
        if found < self._count:
            raise ValueError(f"Cannot resume from {self._out}: {LOG} has {found} exchanges of {self._count}.")


class ExchangeLog:
    """Writes exchanges one by one, so that none is lost if this process dies. If the disk is full they wait for the next
    one; `written` says how many are in the file. Nothing else of them is held in memory.

    A thread of its own writes: Ctrl-C raises KeyboardInterrupt in the main thread wherever it is, and half an exchange in
    the compressor would spoil all that follow.
    """

    def __init__(self, kept: KeptExchanges, out: Path) -> None:
        """A log that begins with `kept`, in place of the file that they are read from."""
        self._path, self._count, self._stream, self._waiting = out / LOG, len(kept), LogStream(), b""
        self.written, self._size = self._count, 0
        part = self._path.with_name(f"{LOG}.part")
        with part.open("wb") as log:
            self._size += log.write(self._stream.part())  # the header
            for line in kept.lines():
                self._size += log.write(self._stream.part(line))
        part.replace(self._path)

        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange log")

    def __call__(self, exchange: Exchange) -> None:
        self._thread.submit(self._add, exchange).result()

    def close(self) -> None:
        """End the log: it is now one that `harness compare` could have written."""
        self._thread.submit(lambda: self._write(self._stream.end())).result()
        self._thread.shutdown()

    def _add(self, exchange: Exchange) -> None:
        self._count += 1
        self._write(self._stream.part(encode(exchange)))

    def _write(self, made: bytes) -> None:
        self._waiting += made
        with suppress(OSError), self._path.open("r+b", buffering=0) as log:
            log.truncate(self._size)  # what was cut short when the disk was full
            log.seek(self._size)
            if log.write(self._waiting) == len(self._waiting):
                self._size, self.written, self._waiting = self._size + len(self._waiting), self._count, b""


def exchanges_of(out: Path) -> Iterator[Exchange]:
    """All exchanges of a job, read one by one."""
    return map(decode, lines_of(out / LOG))


def write_model(path: Path, parameters: Any) -> None:
    """Write a model's pytree as safetensors, each array under its path in the tree."""
    named, _ = jax.tree_util.tree_flatten_with_path(parameters)
    tensors = {"/".join(map(_key, keys)) or "parameters": np.ascontiguousarray(leaf) for keys, leaf in named}
    write_bytes(path, safetensors.numpy.save(tensors))


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
