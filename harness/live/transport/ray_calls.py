"""Frames as arguments of calls of Ray actors: the reference to which the other transport is compared.

An address is the name of an actor with a method `deliver(frames)`; Ray executes the calls of each caller in order.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import Buffer
from harness.live.transport.transport import Received

__all__ = ["RayTransport"]


class RayTransport:
    """A `Transport` for the actor named `address`, which puts delivered frames into `inbox`."""

    def __init__(self, address: str, inbox: queue.SimpleQueue[Sequence[Buffer]]) -> None:
        self._address, self._inbox = address, inbox
        self._peers: dict[str, str] = {}
        self._handles: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        self.forget(peer)
        self._peers[peer] = address

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._handles.pop(peer, None)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        if peer not in self._handles:
            if peer not in self._peers:
                return
            try:
                self._handles[peer] = ray.get_actor(self._peers[peer])
            except ValueError:  # the actor has died
                return
        # A memoryview cannot be pickled; an array on the same bytes can, without a copy.
        sent = [np.frombuffer(f, np.uint8) if isinstance(f, memoryview) else f for f in frames]
        self._handles[peer].deliver.remote(sent)

    def empty(self, size: int) -> Array:
        return np.empty(size, np.float32)

    def receive(self, timeout_seconds: float) -> Received | None:
        try:
            frames = self._inbox.get(block=timeout_seconds > 0, timeout=timeout_seconds or None)
        except queue.Empty:
            return None
        return Received(None, [f if isinstance(f, bytes) else memoryview(f) for f in frames])

    def second_sender(self) -> RayTransport:
        return RayTransport(self._address, self._inbox)

    def close(self) -> None:
        self._peers.clear()
        self._handles.clear()
