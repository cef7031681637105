"""The file of a checkpoint: tensors in the safetensors format; the metadata has the job's state and a digest of both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from traces.store import write_bytes

__all__ = ["Checkpoint", "load", "save"]

_VERSION = "3"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a job is resumed from."""

    tensors: Mapping[str, NDArray[Any]]
    state: Mapping[str, Any]  # what JSON can hold

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the job to this checkpoint."""
        return float(self.state["seconds"])


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to `path`, completely or not at all."""
    # safetensors writes the memory of an array as it is, whatever its strides.
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in checkpoint.tensors.items()}
    state = msgspec.json.encode(checkpoint.state).decode()
    metadata = {"harness_checkpoint": _VERSION, "state": state, "sha256": _digest(tensors, state)}
    write_bytes(path, safetensors.numpy.save(tensors, metadata))


def load(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`. Raises ValueError if there is none, or it is damaged or of another version."""
    if not path.is_file():
        raise ValueError(f"Cannot resume from {path}: there is no such file. Deploy without --resume to start again.")
    try:
        with safetensors.safe_open(path, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (safetensors.SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None
    if metadata.get("harness_checkpoint") != _VERSION:
        found = metadata.get("harness_checkpoint", "no number")
        raise ValueError(
            f"Cannot resume from {path}: as a checkpoint it has format {found}, and this harness reads format {_VERSION}. "
            "Use the version that wrote it, or deploy without --resume to start again."
        )
    state = metadata.get("state", "")
    if _digest(tensors, state) != metadata.get("sha256"):
        raise _damaged(path, "its digest does not match")
    return Checkpoint(tensors, msgspec.json.decode(state))


def _digest(tensors: Mapping[str, NDArray[Any]], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"Cannot resume from {path}: it is damaged or cut short ({why}). Deploy without --resume to start again."
    )
