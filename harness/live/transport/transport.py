"""How frames get from one process to another: one way, in order between any two, lost where nobody is.

Two kinds: `harness.live.transport.zeromq`, and `harness.live.transport.ray_calls` as the reference to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import Buffer

__all__ = ["Outlets", "Transport"]


class Outlets(Protocol):
    """The sending half, used by one thread."""

    def connect(self, peer: str, address: str) -> None:
        """From now on `peer` is there; what was on its way to where it was before is dropped."""
        ...

    def forget(self, peer: str) -> None:
        """Nobody of that name is there any more; what was on its way is dropped."""
        ...

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Returns at once. Lost is what is sent to nobody, or to somebody who lets us not in, or who takes nothing for long.

        Frames may be on their way long after: nobody may write to them any more.
        """
        ...

    def close(self) -> None:
        """Stop at once, and drop what was on its way."""
        ...


class Transport(Outlets, Protocol):
    """One process's end, used by one thread."""

    @property
    def address(self) -> str:
        """Where others reach this one."""
        ...

    def empty(self, size: int) -> Array:
        """An array of so many float32, [size], which it takes least to send when it is filled."""
        ...

    def receive(self, timeout_seconds: float) -> Sequence[Buffer] | None:
        """The next message, or None where none comes in time. Raises Unreadable where one is lost that had come."""
        ...

    def beside(self) -> Outlets:
        """A sending half for another thread of this process; to be closed before this is."""
        ...
