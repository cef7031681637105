"""The exchange log: every action of a tuner with its answer, one JSON line each, without loss.

Floats are exact: JSON keeps the shortest decimal that reads back to the same double. Floats that JSON cannot write become
``{"float": "nan"}``. A synchronisation policy is code, so `Install` is logged with the policy's name only.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
import numpy as np

from traces.schema import plain_setting
from traces.store import write_bytes
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    GradientNoise,
    Install,
    MeasureNoise,
    Reconfigure,
    Rejected,
    Run,
    SyncPolicy,
    Window,
)

__all__ = ["Exchange", "LogStream", "action_text", "decode", "encode", "lines_of", "read_log", "write_log"]

_ANSWERS: dict[type[Action[Any]], Any] = {
    Run: Window,
    Reconfigure: Cost,
    Fork: int,
    Free: None,
    Install: None,
    Evaluate: Evaluation,
    MeasureNoise: GradientNoise,
}
_ACTIONS = {kind.__name__: kind for kind in _ANSWERS}
_HEADER = b'{"exchanges": 1}'
_READ_BYTES = 1 << 16
_GZIP = 31  # what zlib takes for "with a gzip header"
_LEVEL = 4  # of compression: logs of a comparison are 4 % larger than at 9, and take 0.36 of its CPU time (measured)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One action and its answer; the answer is a `Rejected` if the system refused."""

    seconds: float  # time of the job after the answer
    action: Action[Any]
    answer: Any
    asked: bool = True  # False: the tuner had returned, or the job had ended, and the harness asked for the rest

    @property
    def after_end(self) -> bool:
        """Whether the harness asked for it when the job had ended: its last pushes, in no time."""
        return not self.asked and isinstance(self.action, Run) and self.action.clocks is not None


class _Installed(msgspec.Struct):
    """An `Install` without its functions."""

    policy: str
    probes: bool
    seconds: float
    branch: int
    reason: str = ""


class _Line(msgspec.Struct):
    seconds: Any
    asked: bool
    kind: str
    action: Any
    answer: Any = None
    rejected: str | None = None


def encode(exchange: Exchange) -> bytes:
    """One exchange as a line of JSON, without a newline. Raises TypeError for an action that is not in the contract."""
    answer, rejected = exchange.answer, None
    if isinstance(answer, Rejected):
        answer, rejected = None, str(answer)
    kind, action = _plain_action(exchange.action)
    line = _Line(_plain(exchange.seconds), exchange.asked, kind, action, _plain(answer), rejected)
    return msgspec.json.encode(line)


def decode(line: bytes) -> Exchange:
    """The exchange that `encode` wrote. Raises ValueError for any other line."""
    read = msgspec.json.decode(line, type=_Line)
    # Most lines have no such float, and walking through all values is slow. The text of a rejection may contain the
    # pattern too, so `rejected` is taken as it is.
    if b'{"float":' in line:
        read = _Line(_with_floats(read.seconds), read.asked, read.kind, _with_floats(read.action), _with_floats(read.answer))
        read.rejected = msgspec.json.decode(line, type=_Line).rejected
    kind = _ACTIONS.get(read.kind)
    if kind is None:
        raise ValueError(f"Cannot read an exchange of kind {read.kind!r}: this version knows {', '.join(_ACTIONS)}.")
    action: Action[Any]
    if kind is Install:
        kept = msgspec.convert(read.action, _Installed)
        policy = SyncPolicy(kept.policy, _not_kept(kept.policy), _not_kept(kept.policy), kept.probes, kept.seconds)
        action = Install(policy, kept.branch, kept.reason)
    else:
        action = msgspec.convert(read.action, kind)
    answer = Rejected(read.rejected) if read.rejected is not None else _convert(read.answer, _ANSWERS[kind])
    return Exchange(msgspec.convert(read.seconds, float), action, answer, read.asked)


def action_text(action: Action[Any]) -> str:
    """An action as one line of JSON, without its reason: two actions ask the same if their texts are equal."""
    kind, fields = _plain_action(action)
    fields.pop("reason", None)
    return f"{kind} {msgspec.json.encode(fields).decode()}"


def write_log(path: Path, exchanges: Iterable[Exchange]) -> None:
    """Write a gzipped log; the same exchanges give the same bytes."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=_LEVEL) as out:
        out.write(_HEADER + b"\n")
        for exchange in exchanges:
            out.write(encode(exchange) + b"\n")
    write_bytes(path, packed.getvalue())


def read_log(path: Path) -> list[Exchange]:
    """Read a log. Raises ValueError, naming file and line, if it is cut short or no such log."""
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
    except gzip.BadGzipFile:
        lines = []  # another file, which a user has named: it must not be deleted
    except (EOFError, zlib.error) as error:
        raise ValueError(f"Cannot read {path}: it is damaged or cut short ({error}). Delete it and run again.") from None
    if not lines or lines[0] != _HEADER:
        raise ValueError(f"Cannot read {path}: it is no exchange log of this version of the harness.")
    exchanges = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            exchanges.append(decode(line))
        except ValueError as error:
            raise ValueError(f"Cannot read {path}, line {number}: {error}") from None
    return exchanges


class LogStream:
    """A log that is written while the run is in progress: gives the bytes to append for each exchange. After every append
    the file can be read by `lines_of`, and after `end` by `read_log`."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._begun = False

    def part(self, *lines: bytes) -> bytes:
        """The bytes of these lines of `encode`."""
        header = () if self._begun else (_HEADER,)
        self._begun = True
        text = b"".join(line + b"\n" for line in (*header, *lines))
        # Flushed so that the reader needs nothing of what comes later; the compressor still knows what came before.
        return self._compressor.compress(text) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        """The last bytes."""
        return self._compressor.flush(zlib.Z_FINISH)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a log for `decode`, one by one: all that are whole, if it is still being written or was cut short. Raises
    ValueError where the file is damaged, OSError where it cannot be read."""
    rest, header, inflate = b"", True, zlib.decompressobj(_GZIP)
    with path.open("rb") as log:
        while read := log.read(_READ_BYTES):
            try:
                *lines, rest = (rest + inflate.decompress(read)).split(b"\n")
            except zlib.error as error:
                raise ValueError(f"Cannot read {path}: it is damaged ({error}).") from None
            if header and lines:
                header = False
                if lines.pop(0) != _HEADER:
                    raise ValueError(f"Cannot read {path}: it is no exchange log of this version of the harness.")
            yield from lines


# ------------------------------------------------------------------------------------------------------------ plain data


def _plain_action(action: Action[Any]) -> tuple[str, dict[str, Any]]:
    if type(action) not in _ANSWERS:
        raise TypeError(f"Cannot record {action!r}: it is no action of the contract.")
    if isinstance(action, Install):
        kept = _Installed(action.policy.name, action.policy.probes, action.policy.seconds, action.branch, action.reason)
        fields = _plain(kept)
    else:
        fields = _plain(action)
    if not fields.get("reason"):
        fields.pop("reason", None)  # most actions have none: their lines stay as short as they are
    return type(action).__name__, fields


def _plain(value: Any) -> Any:
    """`value` as dictionaries, sequences and scalars that JSON can write without loss."""
    return _without_floats(msgspec.to_builtins(value, enc_hook=_from_numpy))


def _from_numpy(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"Cannot record {value!r}: only numbers, text and the contract's own types are recorded.")
    if array.ndim == 0:
        return array.item()
    finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
    return array.tolist() if finite else [_without_floats(x) for x in array.tolist()]


def _without_floats(value: Any) -> Any:
    """`value` with every float replaced that JSON cannot write. Lists come from `_from_numpy`, which has done this."""
    if isinstance(value, float):  # `math`, because NumPy takes ten times as long for one number
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, dict):
        if "local_steps" in value:
            value = plain_setting(value)
        if value.get("blocks") == () and "pushes" in value:  # of a window; most jobs have no embedding tables
            value = {k: v for k, v in value.items() if k != "blocks"}
        return {k: _without_floats(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_without_floats(v) for v in value]
    return value


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"float"}:
            return float(value["float"])
        return {k: _with_floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_floats(v) for v in value]
    return value


def _convert(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind, dec_hook=_to_numpy)


def _to_numpy(kind: Any, value: Any) -> Any:
    """The array of the type that an `NDArray[...]` annotation names."""
    dtype = get_args(get_args(kind)[1])[0]
    return np.asarray(value, dtype=dtype)


def _not_kept(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise ValueError(f"Cannot run policy {name!r}: a log keeps a policy's name, not its code. Install it again.")

    return refuse
