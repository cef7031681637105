"""The file of a trained RLP policy: arrays and a table of plain facts as npz, with a digest; never pickled.

It holds `schema` and `version`, how the policy was trained (`about`: the command, the seed and further facts), the layers of
the network and the scaling of its features. Equal policies give equal bytes. `digest` is the SHA-256 of all the rest, so a
damaged or edited file is refused.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuners.rlp.network import SIZES, Network, Scaling, Trained, untrained

__all__ = ["VERSION", "dumps", "load", "loads", "pack", "shipped", "unpack"]

VERSION = 1
_SCHEMA = "rlp-policy"
_WAY_OUT = "train one with `harness train rlp`"


def dumps(trained: Trained) -> bytes:
    """The bytes of the file. Raises ValueError for a network that is not finite: its training diverged."""
    arrays = _arrays(trained.network, trained.scaling)
    _check_finite(arrays, "Cannot keep this policy")
    return pack(_SCHEMA, VERSION, trained.about, arrays)


def loads(data: bytes, name: str) -> Trained:
    """The policy in the bytes of a file, which errors call `name`. Raises ValueError, with the reason, for other bytes."""
    refusal = f"Cannot load a policy from {name}"
    about, arrays = unpack(data, _SCHEMA, VERSION, refusal, _WAY_OUT)
    expected = {key: np.shape(a) for key, a in _arrays(untrained(0), Scaling()).items()}
    found = {key: a.shape for key, a in arrays.items()}
    if found != expected:
        wrong = sorted(key for key in expected | found if expected.get(key) != found.get(key))
        told = "; ".join(f"{key} is {found.get(key, 'missing')}, not {expected.get(key, 'known')}" for key in wrong)
        raise ValueError(f"{refusal}: {told}. Its network is not {'-'.join(map(str, SIZES))}; {_WAY_OUT}.")
    _check_finite(arrays, refusal)
    layers = range(len(SIZES) - 1)
    network = Network(tuple(arrays[f"weights{i}"] for i in layers), tuple(arrays[f"biases{i}"] for i in layers))
    return Trained(network, Scaling(arrays["offset"], arrays["factor"], arrays["limit"]), about)


def load(path: str) -> Trained:
    """The policy in the file at `path`. Raises ValueError if there is none, or none that can be used."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # tuners must not import pathlib
            return loads(file.read(), path)
    except OSError as error:
        raise ValueError(f"Cannot load a policy from {path}: {error.strerror}; {_WAY_OUT}.") from error


@cache
def shipped() -> Trained:
    """The policy that ships with this package; its `about` says how it was trained."""
    return loads(files("tuners.rlp").joinpath("policy.npz").read_bytes(), "tuners/rlp/policy.npz")


# ------------------------------------------------------------------------------------------------------------ the format


def pack(schema: str, version: int, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays and plain facts under a schema and a digest, as the bytes of an npz file."""
    facts = {"schema": schema, "version": version, "about": dict(about)}
    whole = {"facts": np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8), **arrays}
    out = BytesIO()
    np.savez(out, allow_pickle=False, **whole, digest=_digest(whole))
    return out.getvalue()


def unpack(
    data: bytes, schema: str, version: int, refusal: str, way_out: str
) -> tuple[Mapping[str, Any], dict[str, NDArray[Any]]]:
    """The facts and arrays that `pack` packed. Raises ValueError, beginning with `refusal`, for any other bytes."""
    try:
        with np.load(BytesIO(data), allow_pickle=False) as kept:
            whole = {name: kept[name] for name in kept.files}
        digest = whole.pop("digest")
        facts = json.loads(whole["facts"].tobytes())
        found = (facts["schema"], facts["version"])
    except (ValueError, KeyError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{refusal}: it is no such file, or it is damaged ({error}); {way_out}.") from error
    if not np.array_equal(digest, _digest(whole)):
        raise ValueError(f"{refusal}: its digest does not fit what it holds, so it was damaged or changed; {way_out}.")
    if found != (schema, version):
        raise ValueError(f"{refusal}: it is {found[0]!r} version {found[1]!r}, not {schema!r} version {version}; {way_out}.")
    del whole["facts"]
    return facts["about"], whole


def _digest(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    sha = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return np.frombuffer(sha.digest(), np.uint8)


def _arrays(network: Network, scaling: Scaling) -> dict[str, NDArray[Any]]:
    layers = {f"weights{i}": weights for i, weights in enumerate(network.weights)}
    layers |= {f"biases{i}": biases for i, biases in enumerate(network.biases)}
    return {name: np.asarray(a, np.float32) for name, a in (layers | scaling._asdict()).items()}


def _check_finite(arrays: Mapping[str, NDArray[Any]], refusal: str) -> None:
    wild = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wild:
        raise ValueError(
            f"{refusal}: {', '.join(wild)} are not finite, so its training diverged; "
            "train with a smaller rate, or count rewards in more seconds (unit_seconds)."
        )
