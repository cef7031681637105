"""Values with arrays as bytes and back, as data only: reading them runs no code, whoever wrote them.

The bytes are MessagePack. An array is a row (dtype, shape, bytes), and a type says what is read: arrays are annotated
`NDArray[...]`.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

__all__ = ["packed", "unpacked"]

T = TypeVar("T")

_KINDS = "biuf"  # of arrays that may be read: numbers and flags


def packed(value: Any) -> bytes:
    """`value` as bytes. Raises TypeError for what is no data."""
    return msgspec.msgpack.encode(value, enc_hook=_row)


def unpacked(data: bytes, kind: type[T]) -> T:
    """The value of that type. Raises ValueError if the bytes are no such value."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_array)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"Cannot read the state of a job: it is damaged ({error}).") from None


def _row(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"Cannot write {type(value).__name__}: only data can be written.")
    if isinstance(value, np.generic):
        return value.item()
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()


def _array(kind: Any, row: Any) -> Any:
    name, shape, data = row
    dtype = np.dtype(name)
    wanted = get_args(get_args(kind)[1])[0] if get_args(kind) else Any
    if dtype.kind not in _KINDS or (wanted is not Any and dtype != np.dtype(wanted)):
        raise ValueError(f"an array of {dtype} where {wanted} is expected")
    return np.frombuffer(data, dtype).reshape(shape).copy()
