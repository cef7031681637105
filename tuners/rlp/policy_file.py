"""The file of a trained RLP policy: arrays and a table of plain facts as npz, with a digest; never pickled.

It holds `schema` and `version`, how the policy was trained (`about`: the command, the seed and further facts) and arrays: in
version 1, a policy of the paper's form, the layers of the network and the scaling of its features; in version 2, a broad
policy, the parts of `PooledNetwork` by name, and the names of the features and modes that they are about. Equal policies
give equal bytes. `digest` is the SHA-256 of all the rest, so a damaged or edited file is refused.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuners.rlp.broad import MODES, PooledNetwork, TrainedBroad, rule_network
from tuners.rlp.features import JOB, WORKER
from tuners.rlp.network import SIZES, Network, Scaling, Trained, untrained

__all__ = ["BROAD", "PRINTED", "dumps", "load", "loads", "pack", "shipped", "shipped_as_printed", "unpack"]

PRINTED, BROAD = 1, 2  # versions of the file
_SCHEMA = "rlp-policy"
_WAY_OUT = "train one with `harness train rlp`"


def dumps(trained: Trained | TrainedBroad) -> bytes:
    """The bytes of the file. Raises ValueError for a network that is not finite: its training diverged."""
    if isinstance(trained, Trained):
        version, about, arrays = PRINTED, dict(trained.about), _arrays(trained.network, trained.scaling)
    else:
        version, about, arrays = BROAD, {**trained.about, **_FEATURES}, _broad_arrays(trained.network)
    _check_finite(arrays, "Cannot keep this policy")
    return pack(_SCHEMA, version, about, arrays)


def loads(data: bytes, name: str) -> Trained | TrainedBroad:
    """The policy in the bytes of a file, which errors call `name`. Raises ValueError, with the reason, for other bytes."""
    refusal = f"Cannot load a policy from {name}"
    version, about, arrays = unpack(data, _SCHEMA, (PRINTED, BROAD), refusal, _WAY_OUT)
    if version == PRINTED:
        expected, sizes = _arrays(untrained(0), Scaling()), "-".join(map(str, SIZES))
    else:
        expected, sizes = _broad_arrays(_BLANK), f"of {len(WORKER)} and {len(JOB)} features and {len(MODES)} modes"
        if any(about.get(key) != value for key, value in _FEATURES.items()):
            raise ValueError(f"{refusal}: its features or modes are not those of this version of the program; {_WAY_OUT}.")
    wanted = {key: a.shape for key, a in expected.items()}
    found = {key: a.shape for key, a in arrays.items()}
    if found != wanted:
        wrong = sorted(key for key in wanted | found if wanted.get(key) != found.get(key))
        told = "; ".join(f"{key} is {found.get(key, 'missing')}, not {wanted.get(key, 'known')}" for key in wrong)
        raise ValueError(f"{refusal}: {told}. Its network is not {sizes}; {_WAY_OUT}.")
    _check_finite(arrays, refusal)
    if version == BROAD:
        return TrainedBroad(PooledNetwork(**arrays), {key: value for key, value in about.items() if key not in _FEATURES})
    layers = range(len(SIZES) - 1)
    network = Network(tuple(arrays[f"weights{i}"] for i in layers), tuple(arrays[f"biases{i}"] for i in layers))
    return Trained(network, Scaling(arrays["offset"], arrays["factor"], arrays["limit"]), about)


def load(path: str) -> Trained | TrainedBroad:
    """The policy in the file at `path`. Raises ValueError if there is none, or none that can be used."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # tuners must not import pathlib
            return loads(file.read(), path)
    except OSError as error:
        raise ValueError(f"Cannot load a policy from {path}: {error.strerror}; {_WAY_OUT}.") from error


@cache
def shipped() -> TrainedBroad:
    """The policy that ships with this package; its `about` says how it was trained."""
    found = _packaged("policy.npz")
    if not isinstance(found, TrainedBroad):
        raise TypeError("tuners/rlp/policy.npz is of the paper's form: it has to be a broad policy.")
    return found


@cache
def shipped_as_printed() -> Trained:
    """The policy of the paper's form that ships with this package."""
    found = _packaged("as_printed.npz")
    if not isinstance(found, Trained):
        raise TypeError("tuners/rlp/as_printed.npz is a broad policy: it has to be of the paper's form.")
    return found


def _packaged(name: str) -> Trained | TrainedBroad:
    return loads(files("tuners.rlp").joinpath(name).read_bytes(), f"tuners/rlp/{name}")


# ------------------------------------------------------------------------------------------------------------ the format


def pack(schema: str, version: int, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays and plain facts under a schema and a digest, as the bytes of an npz file."""
    facts = {"schema": schema, "version": version, "about": dict(about)}
    whole = {"facts": np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8), **arrays}
    out = BytesIO()
    np.savez(out, allow_pickle=False, **whole, digest=_digest(whole))
    return out.getvalue()


def unpack(
    data: bytes, schema: str, versions: Sequence[int], refusal: str, way_out: str
) -> tuple[int, Mapping[str, Any], dict[str, NDArray[Any]]]:
    """The version, facts and arrays that `pack` packed, in one of `versions`. Raises ValueError, beginning with `refusal`,
    for any other bytes."""
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
    if found[0] != schema or found[1] not in versions:
        known = " or ".join(map(str, versions))
        raise ValueError(f"{refusal}: it is {found[0]!r} version {found[1]!r}, not {schema!r} version {known}; {way_out}.")
    del whole["facts"]
    return found[1], facts["about"], whole


def _digest(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    sha = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return np.frombuffer(sha.digest(), np.uint8)


def _arrays(network: Network, scaling: Scaling) -> dict[str, NDArray[Any]]:
    layers = {f"weights{i}": weights for i, weights in enumerate(network.weights)}
    layers |= {f"biases{i}": biases for i, biases in enumerate(network.biases)}
    return {name: np.asarray(a, np.float32) for name, a in (layers | scaling._asdict()).items()}


def _broad_arrays(network: PooledNetwork) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(a, np.float32) for name, a in network._asdict().items()}


_FEATURES = {"worker_features": list(WORKER), "job_features": list(JOB), "modes": [list(mode) for mode in MODES]}
_BLANK = rule_network(round_from=1.0, mode=0, undone=0.0)  # for its shape


def _check_finite(arrays: Mapping[str, NDArray[Any]], refusal: str) -> None:
    wild = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wild:
        raise ValueError(
            f"{refusal}: {', '.join(wild)} are not finite, so its training diverged; "
            "train with a smaller rate, or count rewards in more seconds (unit_seconds)."
        )
