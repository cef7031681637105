"""What a live job keeps in memory of its exchanges: enough for its score, without pushes.

A live job can have millions of exchanges. All of them are in its log; here windows that follow one another without an event
are one, so that the memory grows with what happens to the job and not with how long it runs.
"""

from __future__ import annotations

from dataclasses import replace

from traces.exchanges import Exchange
from tuners.actions import Pushes, Rejected, Run, Window

__all__ = ["History"]

_NO_PUSHES = Pushes(*((),) * len(Pushes._fields))  # type: ignore[arg-type]


class History:
    """A job's exchanges for `harness.score.score`: its result is that of all exchanges, but for the rounding of sums."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []

    def append(self, exchange: Exchange) -> None:
        """Add the next exchange."""
        if isinstance(exchange.answer, Window):
            window = replace(exchange.answer, pushes=_NO_PUSHES, workers=(), nodes=(), servers=())
            exchange = replace(exchange, answer=window)
            if self._exchanges and (joined := _joined(self._exchanges[-1], exchange)) is not None:
                self._exchanges[-1] = joined
                return
        self._exchanges.append(exchange)

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges so far."""
        return tuple(self._exchanges)


def _joined(before: Exchange, after: Exchange) -> Exchange | None:
    """Two windows as one, if the second one reports nothing but clocks and begins where the first one ends."""
    if not isinstance(before.action, Run) or isinstance(before.answer, Rejected) or not isinstance(after.action, Run):
        return None
    first, second = before.answer, after.answer
    follows = before.action.branch == after.action.branch and second.start_seconds == first.end_seconds == before.seconds
    if not follows or second.evaluations or second.changes or second.setting != first.setting:
        return None
    if first.events or second.events:  # rare; until when a machine was paid for depends on the ends of such windows
        return None
    both = replace(second, start_seconds=first.start_seconds, clocks=first.clocks + second.clocks)
    return replace(after, answer=replace(both, evaluations=first.evaluations, changes=first.changes))
