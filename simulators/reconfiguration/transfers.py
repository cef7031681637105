"""Bytes on their way between nodes outside of training: blocks that move, parameters that are swept to a new owner.

A NIC is divided evenly between its streams and training, which counts as one of them; streams are further held to what their
group can move, say all those of one sender (serialising takes its processor). What streams do not take is training's, see
`simulators.engine.inputs`; what training leaves idle is not lent to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import simpy

__all__ = ["Transfers"]

_CRUMB = 1e-6  # bytes; less than this is rounding


class _Transfer:
    def __init__(self, source: str, target: str, left_bytes: float, group: tuple[str, float], done: simpy.Event) -> None:
        self.source, self.target, self.left_bytes = source, target, left_bytes
        self.group = group  # its name, and what all streams of that name may move together, bytes per second
        self.done = done
        self.rate = 0.0


class Transfers:
    """All streams of a cluster with NICs of `nic` bytes per second, each direction, in simulated time."""

    def __init__(self, env: simpy.Environment, nic: Mapping[str, float]) -> None:
        self._env, self._nic = env, nic
        self._under_way: list[_Transfer] = []
        self._since = 0.0  # when the rates were set
        self._version = 0

    def send(self, source: str, target: str, size_bytes: float, *, group: str, group_bytes_per_second: float) -> simpy.Event:
        """Begin to send so many bytes; the event happens when they have arrived.

        All streams of one `group` share `group_bytes_per_second`.
        """
        done = self._env.event()
        if size_bytes <= 0:
            return done.succeed()
        self._progress()
        self._under_way.append(_Transfer(source, target, size_bytes, (group, group_bytes_per_second), done))
        self._share()
        return done

    def scale(self, factor: float) -> None:
        """Leave only so much of what every stream has yet to move: the rest has got there another way."""
        self._progress()
        for stream in self._under_way:
            stream.left_bytes *= factor
        self._share()

    def stop(self) -> None:
        """Drop all streams; their events never happen."""
        self._under_way = []
        self._share()

    @property
    def out(self) -> dict[str, float]:
        """Bytes per second that streams take off each node's outgoing NIC just now."""
        return self._used("source")

    @property
    def into(self) -> dict[str, float]:
        """The same for incoming NICs."""
        return self._used("target")

    def busy_until_seconds(self, prefix: str) -> float:
        """When the last of the groups with that prefix will have arrived at the present rates; -inf without any."""
        ends = [self._since + s.left_bytes / s.rate for s in self._under_way if s.group[0].startswith(prefix)]
        return max(ends, default=-float("inf"))

    def _used(self, end: str) -> dict[str, float]:
        used: dict[str, float] = {}
        for stream in self._under_way:
            used[getattr(stream, end)] = used.get(getattr(stream, end), 0.0) + stream.rate
        return used

    def _progress(self) -> None:
        passed, self._since = self._env.now - self._since, self._env.now
        for stream in self._under_way:
            stream.left_bytes -= stream.rate * passed

    def _share(self) -> None:
        """Set everybody's rate anew, and wake up when the first is through."""
        out = Counter(s.source for s in self._under_way)
        into = Counter(s.target for s in self._under_way)
        alike = Counter(s.group[0] for s in self._under_way)
        for s in self._under_way:
            fair = (self._nic[s.source] / (out[s.source] + 1), self._nic[s.target] / (into[s.target] + 1))
            s.rate = min(*fair, s.group[1] / alike[s.group[0]])
        self._version += 1
        if self._under_way:
            first = min(max(s.left_bytes, 0.0) / s.rate for s in self._under_way)
            waking = self._env.timeout(first, value=self._version)
            waking.callbacks.append(self._arrived)

    def _arrived(self, waking: simpy.Event) -> None:
        if waking.value != self._version:
            return  # rates have changed since, and another event was set
        self._progress()
        # Who is due at the same moment may have a crumb left by rounding.
        through = [s for s in self._under_way if s.left_bytes <= _CRUMB]
        through = through or [min(self._under_way, key=lambda s: s.left_bytes / s.rate)]
        self._under_way = [s for s in self._under_way if s not in through]
        self._share()
        for stream in through:
            stream.done.succeed()
