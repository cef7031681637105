"""What is read of the extras of a trace's run, and of which types: the one list of its keys."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Extras", "NodeExtras", "read_extras"]

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class NodeExtras(msgspec.Struct, frozen=True):
    """What is read of a node."""

    nic_bytes_per_second: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    link_delay_seconds: _NotNegative = 0.0


class Extras(msgspec.Struct, frozen=True):
    """What is read of a run's extras; other keys may hold anything."""

    nodes: dict[str, NodeExtras] = {}
    node_order: list[str] = []  # `traces.schema.NODE_ORDER`
    nodes_watched: Annotated[int, msgspec.Meta(ge=0)] = 0  # machines, with those that have no events
    total_batch_size: _NotNegative = 0.0  # of all workers
    n_stragglers: float | None = None
    straggler_delay_ms: float | None = None
    bucket_high_bytes_per_second: float | None = None
    bucket_low_bytes_per_second: float | None = None
    bucket_bytes: float | None = None  # above the low rate, that were sent at the high one


def read_extras(run: str, text: str | None) -> Extras:
    """The extras of a run, from their JSON object. Raises ValueError, naming run and key, for what they cannot be."""
    try:
        return msgspec.json.decode(text or "{}", type=Extras)
    except msgspec.MsgspecError as error:
        raise ValueError(f"Cannot read the extras of run {run!r}: {error}; correct it, or leave it out.") from None
