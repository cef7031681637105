"""Evaluations asked of the evaluator, so that nobody who trains waits for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.live.coordinator.branch import Line
from harness.live.coordinator.ledger import Ledger
from harness.live.protocol.messages import Measure, Measured, Rest
from tuners.actions import Evaluation, Target

__all__ = ["Evaluations"]


@dataclass
class _Asked:
    measure: Measure
    clocks: int  # of the branch, then
    automatic: bool
    seconds: float


class Evaluations:
    """Those under way and those that nobody has been told of."""

    def __init__(self, ledger: Ledger, evaluator: Callable[[], str | None], now: Callable[[], float]) -> None:
        self._ledger, self._evaluator, self._now = ledger, evaluator, now
        self._last = self._forgotten = 0
        self._asked: dict[int, _Asked] = {}
        self._found: dict[int, list[tuple[int, Evaluation]]] = {}  # by branch

    @property
    def forgotten(self) -> int:
        """Numbers up to this one are of the past, a coordinator's before this one among them: who has no answer gets none,
        and may ask anew."""
        return max(self._forgotten, self._ledger.generation << 32)

    def begin_anew(self) -> None:
        """The model is another one. Nobody is told any more of the one before."""
        self._forgotten = self._last
        self._asked.clear()
        self._found.clear()

    def drop(self, branch: int) -> None:
        """A branch is freed. Its servers answer no more, and the evaluator is not to wait for them."""
        mine = [number for number, asked in self._asked.items() if asked.measure.branch == branch]
        for number in mine:
            del self._asked[number]
        name = self._evaluator()
        if mine and name is not None:
            self._ledger.tell(name, Rest())
            self.again()

    def begin(self, line: Line, *, automatic: bool) -> int:
        """Ask for one of a branch as it is now; its number. An automatic one is left out while another is under way."""
        if automatic and any(a.automatic and a.measure.branch == line.number for a in self._asked.values()):
            return 0
        self._last = max(self._last, self.forgotten) + 1
        measure = Measure(self._last, line.number, self._ledger.index)
        self._asked[self._last] = _Asked(measure, line.pushes, automatic, self._now())
        self._ask(self._asked[self._last])
        return self._last

    def _ask(self, asked: _Asked) -> None:
        name = self._evaluator()
        if name is not None:
            asked.seconds = self._now()
            self._ledger.tell(name, asked.measure)

    def again(self, older_seconds: float = 0.0) -> None:
        """Ask again for what was asked so long ago."""
        for asked in self._asked.values():
            if self._now() - asked.seconds >= older_seconds:
                self._ask(asked)

    def measured(self, head: Measured, lines: Mapping[int, Line], target: Target) -> None:
        """An answer; it may bring a branch to its target."""
        asked = self._asked.pop(head.number, None)
        line = lines.get(asked.measure.branch) if asked else None
        if asked is None or line is None:
            return
        evaluation = Evaluation(self._now(), asked.clocks, head.loss, head.accuracy)
        number = 0 if asked.automatic else head.number
        self._found.setdefault(line.number, []).append((number, evaluation))
        if line.status == "running" and not target.counts and target.reached(head.loss, head.accuracy):
            line.status = "target"

    def take(self, branch: int) -> tuple[tuple[int, Evaluation], ...]:
        """What has been found since it was last asked for."""
        return tuple(self._found.pop(branch, ()))
