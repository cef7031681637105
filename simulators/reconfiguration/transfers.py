"""Transfers of a reconfiguration: blocks that move between nodes, parameters that are swept to a new owner.

A NIC is divided evenly between its transfers and training, which counts as one transfer. Transfers of one group, such as all
from one sender, share a further limit, because serialising takes the sender's processor. What transfers do not use is left
to training (`simulators.engine.preparation.Effects`), but transfers do not get what training leaves idle: rates are constant
between the control plane's events, and training changes its demand much more often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import simpy

__all__ = ["Transfers"]

_ROUNDING_BYTES = 1e-6  # less than this is left by rounding only


class _Transfer:
    def __init__(self, source: str, target: str, left_bytes: float, group: tuple[str, float], done: simpy.Event) -> None:
        self.source, self.target, self.left_bytes = source, target, left_bytes
        self.group = group  # its name, and what all transfers of that name may move together, bytes per second
        self.done = done
        self.rate = 0.0


class Transfers:
    """All transfers of one reconfiguration, over NICs of `nic` bytes per second in each direction."""

    def __init__(self, env: simpy.Environment, nic: Mapping[str, float]) -> None:
        self._env, self._nic = env, nic
        self._under_way: list[_Transfer] = []
        self._since = 0.0  # when the rates were set
        self._version = 0

    def send(self, source: str, target: str, size_bytes: float, *, group: str, group_bytes_per_second: float) -> simpy.Event:
        """Begin to send `size_bytes`; the event happens when they have arrived.

        All transfers of one `group` share `group_bytes_per_second`.
        """
        done = self._env.event()
        if size_bytes <= 0:
            return done.succeed()
        self._progress()
        self._under_way.append(_Transfer(source, target, size_bytes, (group, group_bytes_per_second), done))
        self._share()
        return done

    def scale(self, factor: float) -> None:
        """Leave only this part of what every transfer has yet to move; pushes have carried the rest."""
        self._progress()
        for transfer in self._under_way:
            transfer.left_bytes *= factor
        self._share()

    def stop(self) -> None:
        """Drop all transfers; their events never happen."""
        self._under_way = []
        self._share()

    @property
    def out(self) -> dict[str, float]:
        """Bytes per second that transfers take from each node's outgoing NIC at present."""
        return self._used("source")

    @property
    def into(self) -> dict[str, float]:
        """Bytes per second that transfers take from each node's incoming NIC at present."""
        return self._used("target")

    def busy_until_seconds(self, prefix: str) -> float:
        """When the last transfer of groups with that prefix arrives at the present rates; -inf without any."""
        ends = [self._since + s.left_bytes / s.rate for s in self._under_way if s.group[0].startswith(prefix)]
        return max(ends, default=-float("inf"))

    def _used(self, end: str) -> dict[str, float]:
        used: dict[str, float] = {}
        for transfer in self._under_way:
            used[getattr(transfer, end)] = used.get(getattr(transfer, end), 0.0) + transfer.rate
        return used

    def _progress(self) -> None:
        passed, self._since = self._env.now - self._since, self._env.now
        for transfer in self._under_way:
            transfer.left_bytes -= transfer.rate * passed

    def _share(self) -> None:
        """Set all rates anew, and wake up when the first transfer ends."""
        out = Counter(s.source for s in self._under_way)
        into = Counter(s.target for s in self._under_way)
        alike = Counter(s.group[0] for s in self._under_way)
        for s in self._under_way:
            # One more than its transfers: training.
            fair = (self._nic[s.source] / (out[s.source] + 1), self._nic[s.target] / (into[s.target] + 1))
            s.rate = min(*fair, s.group[1] / alike[s.group[0]])
        self._version += 1
        if self._under_way:
            first = min(max(s.left_bytes, 0.0) / s.rate for s in self._under_way)
            waking = self._env.timeout(first, value=self._version)
            waking.callbacks.append(self._arrived)

    def _arrived(self, waking: simpy.Event) -> None:
        if waking.value != self._version:
            return  # rates have changed since, and a later call of `_share` has set another event
        self._progress()
        # Transfers that end at the same moment may have some bytes left by rounding; the one that woke us up may, too.
        through = [s for s in self._under_way if s.left_bytes <= _ROUNDING_BYTES]
        through = through or [min(self._under_way, key=lambda s: s.left_bytes / s.rate)]
        self._under_way = [s for s in self._under_way if s not in through]
        self._share()
        for transfer in through:
            transfer.done.succeed()
