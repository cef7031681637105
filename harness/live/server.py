"""A server: blocks of the model, changed by the coordinator's log and nothing else.

One log orders all changes at all servers, so that a push takes effect everywhere or nowhere without a second round of
messages, which `simulators.elastic` needs: its servers order pushes among themselves.
"""

from __future__ import annotations

from harness.live.blocks import Layout
from harness.live.messages import Message, Send

__all__ = ["Server"]


class Server:
    """The core of a server process, without sockets, threads or a clock: what it receives makes it send.

    Begins knowing nothing, says `Hello` to the coordinator when `hello` is called, and is told all else by a `View`.
    """

    def __init__(self, name: str, generation: int, layout: Layout, optimizer: str, aggregation: str, send: Send) -> None:
        self.name, self.generation, self.layout = name, generation, layout
        self.send, self.optimizer, self.aggregation = send, optimizer, aggregation

    def hello(self) -> None:
        """Ask to be admitted; again as often as one likes."""

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in."""
