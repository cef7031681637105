"""The file of a checkpoint: tensors in the safetensors format; the metadata has the job's state and a digest of both.

The digest finds damage. Who changes a checkpoint can make another one, so what is read is checked as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from traces.store import write_bytes

__all__ = ["COORDINATOR", "DRIVER", "Checkpoint", "load", "save"]

COORDINATOR, DRIVER = "coordinator", "driver"
"""The tensors with the state of each, uint8. All others are vectors of the model, float32: BRANCH/VECTOR."""

_VERSION = "3"
_AGAIN = "To start again, deploy without --resume, to another folder."


class _State(TypedDict):
    seconds: Annotated[float, msgspec.Meta(ge=0)]  # of the job
    exchanges: Annotated[int, msgspec.Meta(ge=0)]  # answered by then
    branch: Annotated[int, msgspec.Meta(ge=0)]  # the one that trained


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a job is resumed from."""

    tensors: Mapping[str, NDArray[Any]]
    state: Mapping[str, Any]  # seconds, exchanges and branch

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the job to this checkpoint."""
        return float(self.state["seconds"])

    @property
    def vectors(self) -> dict[int, dict[str, NDArray[np.float32]]]:
        """The servers' vectors, by branch and name. Raises ValueError for a tensor that is none."""
        made: dict[int, dict[str, NDArray[np.float32]]] = {}
        for name, tensor in self.tensors.items():
            if name not in (COORDINATOR, DRIVER):
                number, _, vector = name.partition("/")
                if not (number.isdecimal() and vector):
                    raise ValueError(f"Cannot resume: the checkpoint has a tensor {name!r}, which is none of a job.")
                made.setdefault(int(number), {})[vector] = tensor
        return made

    def check(self, size: int) -> None:
        """Raise ValueError unless it has the state of a job, and whole vectors of a model with so many parameters."""
        state = {name: self.tensors.get(name) for name in (COORDINATOR, DRIVER)}
        for name, bytes_ in state.items():
            if bytes_ is None or bytes_.dtype != np.uint8 or bytes_.ndim != 1:
                raise ValueError(f"Cannot resume: the checkpoint has no state of the {name}.")
        vectors = self.vectors
        for number, those in vectors.items():
            for name, tensor in those.items():
                if tensor.dtype != np.float32 or tensor.shape != (size,):
                    raise ValueError(
                        f"Cannot resume: in the checkpoint, {name} of branch {number} is {tensor.dtype} {tensor.shape}; "
                        f"the model has {size} parameters."
                    )
        if missing := {self.state["branch"], *vectors} - {n for n, those in vectors.items() if "parameters" in those}:
            raise ValueError(f"Cannot resume: the checkpoint has no parameters of branch {min(missing)}.")


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
        raise ValueError(f"Cannot resume from {path}: there is no such file. {_AGAIN}")
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
            f"Use the version that wrote it. {_AGAIN}"
        )
    state = metadata.get("state", "")
    if _digest(tensors, state) != metadata.get("sha256"):
        raise _damaged(path, "its digest does not match")
    try:
        return Checkpoint(tensors, msgspec.json.decode(state, type=_State))
    except msgspec.MsgspecError as error:
        raise _damaged(path, str(error)) from None


def _digest(tensors: Mapping[str, NDArray[Any]], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"Cannot resume from {path}: it is damaged or cut short ({why}). {_AGAIN}")
