"""The folder of a deployed job, from which another process can resume it.

deploy.json              which scenario, tuner and seed
scenario.toml            as it was deployed
exchanges.jsonl          actions of the tuner and their answers, one per line, written while the job runs
checkpoint.safetensors   the state from which --resume continues
model.safetensors        the trained model: parameters by name
trace/                   the recording (`harness trace show`)
score.json, evaluations.parquet, settings.parquet, exchanges.jsonl.gz   as `harness compare` writes them
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from harness.scenario import Scenario
from harness.version import HARNESS_VERSION
from traces.exchanges import Exchange, decode, encode
from traces.store import write_bytes

__all__ = ["CHECKPOINT", "ExchangeLog", "claimed", "read_log", "write_model"]

CHECKPOINT = "checkpoint.safetensors"
_LOG = "exchanges.jsonl"
_BEFORE_CHECKPOINT = {"deploy.json", "scenario.toml", _LOG, "trace"}  # files of a job that has no checkpoint yet


@contextmanager
def claimed(out: Path, scenario: Scenario, tuner: str, seed: int, *, resume: bool) -> Iterator[None]:
    """Create the folder `out`, or check that it is of the same job, and lock it. Raises ValueError if that cannot be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"Cannot deploy to {out}: it is a file. Name a folder with --out.")
    manifest = {"harness": HARNESS_VERSION, "scenario": scenario.name, "tuner": tuner, "seed": seed}
    # A job that was stopped before its first checkpoint cannot be resumed, and its files may be overwritten.
    fresh = not out.is_dir() or {p.name for p in out.iterdir()} <= _BEFORE_CHECKPOINT
    if fresh and resume:
        raise ValueError(f"Cannot resume from {out}: it has no checkpoint of a job. Deploy without --resume to start one.")
    if not fresh:
        if not resume:
            raise ValueError(
                f"Cannot deploy to {out}: it is there already. Go on with it by --resume, or name another with --out."
            )
        _check_same(out, manifest, scenario)
    before = os.umask(0o077)  # what is written while the job runs is for its owner only: 0600, folders 0700
    try:
        with _locked(out):
            if fresh:
                write_bytes(out / "scenario.toml", scenario.text.encode())
                write_bytes(out / "deploy.json", (json.dumps(manifest, indent=1) + "\n").encode())
            yield
    finally:
        os.umask(before)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
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
        os.close(lock)


def _check_same(out: Path, manifest: dict[str, Any], scenario: Scenario) -> None:
    try:
        found = json.loads((out / "deploy.json").read_text("utf-8"))
        text = (out / "scenario.toml").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot resume from {out}: it is not the folder of a deployed job ({error}).") from None
    for key, wanted in manifest.items():
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


class ExchangeLog:
    """Writes exchanges one by one, so that none is lost if this process dies. If the disk is full they wait for the next
    one; `written` says how many are in the file."""

    def __init__(self, out: Path, kept: Sequence[Exchange]) -> None:
        self._path, self.written, self._waiting = out / _LOG, len(kept), list[bytes]()
        write_bytes(self._path, b"".join(encode(e) + b"\n" for e in kept))
        self._size = self._path.stat().st_size

    def __call__(self, exchange: Exchange) -> None:
        self._waiting.append(encode(exchange) + b"\n")
        with suppress(OSError), self._path.open("r+b", buffering=0) as log:
            log.truncate(self._size)  # what was cut short when the disk was full
            log.seek(self._size)
            lines = b"".join(self._waiting)
            if log.write(lines) == len(lines):
                self._size, self.written = self._size + len(lines), self.written + len(self._waiting)
                self._waiting.clear()


def read_log(out: Path, count: int) -> list[Exchange]:
    """Read the first `count` exchanges. Raises ValueError if some of them are missing."""
    path = out / _LOG
    try:
        lines = path.read_bytes().splitlines()[:count]
        found = [decode(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot resume from {out}: {_LOG} is missing or damaged ({error}).") from None
    if len(found) < count:
        raise ValueError(f"Cannot resume from {out}: {_LOG} has {len(found)} exchanges of {count}.")
    return found


def write_model(path: Path, parameters: Any) -> None:
    """Write a model's pytree as safetensors, each array under its path in the tree."""
    named, _ = jax.tree_util.tree_flatten_with_path(parameters)
    tensors = {"/".join(map(_key, keys)) or "parameters": np.ascontiguousarray(leaf) for keys, leaf in named}
    write_bytes(path, safetensors.numpy.save(tensors))


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
