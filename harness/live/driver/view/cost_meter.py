"""Measures what a reconfiguration, or the recovery from a loss, costs a live job."""

from __future__ import annotations

from collections.abc import Iterable

from tuners.actions import Cost

__all__ = ["CostMeter"]


class CostMeter:
    """The time since something began, and the longest time of it without a completed push. Who carries it out adds steps."""

    def __init__(self, begun_seconds: float) -> None:
        self.begun_seconds = self._last_push_seconds = begun_seconds
        self._stall_seconds = 0.0
        self.steps: list[str] = []
        self.bytes_moved = 0.0
        self.done = False

    def pushed(self, seconds: Iterable[float]) -> None:
        """Take note of pushes that were completed at these times."""
        for moment in map(float, seconds):
            if moment > self._last_push_seconds:
                self._stall_seconds = max(self._stall_seconds, moment - self._last_push_seconds)
                self._last_push_seconds = moment

    def cost(self, now: float, *, quiescent: bool = False) -> Cost:
        """What it has cost until `now`. `quiescent`: training was not slowed down, because nobody trained meanwhile."""
        seconds = max(now - self.begun_seconds, 0.0)
        stall = min(max(self._stall_seconds, now - self._last_push_seconds), seconds)
        return Cost(
            seconds=seconds,
            stall_seconds=stall,
            slow_seconds=0.0 if quiescent else seconds - stall,
            bytes_moved=self.bytes_moved,
            steps=tuple(self.steps),
            done=self.done,
        )
