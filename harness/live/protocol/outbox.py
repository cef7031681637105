"""What a server or a worker sends carries its view and its generation, by which receivers refuse old messages."""

from __future__ import annotations

from harness.live.protocol.messages import Array, Head, Message, Send

__all__ = ["Outbox"]


class Outbox:
    """Sends messages of the present view."""

    def __init__(self, send: Send, generation: int) -> None:
        self._send, self._generation = send, generation
        self.view = 0

    def tell(self, receiver: str, head: Head, arrays: tuple[Array, ...] = ()) -> None:
        """Send a message; returns at once."""
        self._send(receiver, Message(head, arrays, self.view, self._generation))
