"""Whether a job makes progress: processes can be heard, and training stand still all the same.

Heartbeats come from a thread of their own, so a process whose computation hangs is heard. What does not come is a push.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits", "Standstill"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the driver waits."""

    join_seconds: float = 300.0  # for a process to import, load and compile
    still_seconds: float = 30.0  # for the next push, at least; for the first one twice as long
    silent_seconds: float = 3.0  # for the next heartbeat of a process, before it is replaced


class Standstill:
    """The time since the last push, and how often that was too long in a row."""

    def __init__(self, still_seconds: float) -> None:
        self._still_seconds = still_seconds
        self.since_seconds = self._longest_seconds = 0.0
        self._pushed = False
        self.found = 0  # times in a row that it was too long

    def pushed(self, seconds: float) -> None:
        """A push was completed at this time of the job."""
        if self._pushed:
            self._longest_seconds = max(self._longest_seconds, seconds - self.since_seconds)
        self._pushed, self.since_seconds, self.found = True, seconds, 0

    def excuse(self, seconds: float) -> None:
        """Nobody is expected to push until now."""
        self.since_seconds = max(self.since_seconds, seconds)

    def too_long(self, seconds: float) -> float:
        """How long no push was completed, at this time, if that is too long: longer than the limit, and ten times as long as
        ever before. Else 0. Each time it is, the next time counts from now."""
        limit = max(self._still_seconds * (1 if self._pushed else 2), 10 * self._longest_seconds)
        waited = seconds - self.since_seconds
        if waited <= limit:
            return 0.0
        self.found, self.since_seconds = self.found + 1, seconds
        return waited
