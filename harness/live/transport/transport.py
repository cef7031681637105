"""The interface of a transport: frames go one way, in order between two processes, and are lost if the receiver is gone.

There are two: `harness.live.transport.zeromq`, and `harness.live.transport.ray_calls` as a reference to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import Buffer

__all__ = ["Received", "Sender", "Transport"]


class Received(msgspec.Struct, frozen=True):
    """A message that has arrived."""

    caller: str | None  # the peer that sent it, as the transport has proved; None: the transport cannot tell
    frames: Sequence[Buffer]


class Sender(Protocol):
    """The sending half, used by one thread."""

    def connect(self, peer: str, address: str) -> None:
        """Send to `peer` at this address from now on, and accept what it sends; drop what is in transfer to its former
        address. Raises ValueError for what is no address."""
        ...

    def forget(self, peer: str) -> None:
        """`peer` is gone: drop what is in transfer to it, and accept nothing from it."""
        ...

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Returns at once. A message is lost if the peer is unknown, does not accept our key, or has not read for long.

        The transfer may happen much later, so nobody may write to the frames any more. What the system has no room for
        may wait until this end receives.
        """
        ...

    def close(self) -> None:
        """Stop at once, and drop what is in transfer."""
        ...


class Transport(Sender, Protocol):
    """One process's end, used by one thread."""

    @property
    def address(self) -> str:
        """The address at which others reach this process."""
        ...

    def empty(self, size: int) -> Array:
        """An array of float32, [size], that this transport sends with the fewest copies."""
        ...

    def receive(self, timeout_seconds: float) -> Received | None:
        """The next message, or None if none arrives in time. Raises Unreadable if a message arrived and cannot be read."""
        ...

    def second_sender(self) -> Sender:
        """A sending half for another thread of this process; close it before this one."""
        ...
