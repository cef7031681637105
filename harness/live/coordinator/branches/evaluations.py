"""Evaluations by the evaluator process, so that training does not wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.live.coordinator.branches.branch import CoordinatorBranch
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.protocol.messages import EvaluationRequest, EvaluationResult, Rest
from tuners.actions import Evaluation

__all__ = ["Evaluations"]


@dataclass
class _Asked:
    request: EvaluationRequest
    clocks: int  # of the branch, at the request
    automatic: bool
    seconds: float  # when the evaluator was asked last


class Evaluations:
    """Evaluations in progress, and results that the driver has not taken."""

    def __init__(self, ledger: Ledger, nodes: tuple[str, ...], now: Callable[[], float]) -> None:
        """`nodes` are those of the job; a worker on none of them is the evaluator."""
        self._ledger, self._nodes, self._now = ledger, nodes, now
        self._last = self._cancelled = 0
        self._asked: dict[int, _Asked] = {}
        self._found: dict[int, list[tuple[int, Evaluation]]] = {}  # by branch

    @property
    def cancelled_requests(self) -> int:
        """Requests up to this number are cancelled unless answered already: ask again."""
        # Numbers begin at generation << 32, so this covers the requests of a coordinator that died.
        return max(self._cancelled, self._ledger.generation << 32)

    def _evaluator(self) -> str | None:
        return next((w for w in self._ledger.workers if w.partition("/")[2] not in self._nodes), None)

    def reset(self) -> None:
        """The model is replaced: drop all requests, and the results of the model before."""
        self._cancelled = self._last
        self._asked.clear()
        self._found.clear()

    def drop_branch(self, branch: int) -> None:
        """A branch is freed: cancel its evaluations."""
        mine = [number for number, asked in self._asked.items() if asked.request.branch == branch]
        for number in mine:
            del self._asked[number]
        name = self._evaluator()
        # Servers no longer answer pulls of that branch, and the evaluator would wait for them for ever.
        if mine and name is not None:
            self._ledger.tell(name, Rest())
            self.ask_again()

    def request(self, branch: CoordinatorBranch, *, automatic: bool) -> int:
        """Evaluate a branch as it is now; returns the request's number. An automatic request is skipped, and 0 returned,
        while another automatic one of the branch is in progress."""
        if automatic and any(a.automatic and a.request.branch == branch.number for a in self._asked.values()):
            return 0
        self._last = max(self._last, self.cancelled_requests) + 1
        request = EvaluationRequest(self._last, branch.number, self._ledger.index)
        self._asked[self._last] = _Asked(request, branch.pushes, automatic, self._now())
        self._ask(self._asked[self._last])
        return self._last

    def _ask(self, asked: _Asked) -> None:
        name = self._evaluator()
        if name is not None:
            asked.seconds = self._now()
            self._ledger.tell(name, asked.request)

    def ask_again(self, older_seconds: float = 0.0) -> None:
        """Repeat the requests that are at least this old."""
        for asked in self._asked.values():
            if self._now() - asked.seconds >= older_seconds:
                self._ask(asked)

    def answered(self, head: EvaluationResult) -> tuple[int, Evaluation] | None:
        """Store a result. Returns it with its branch; None for a request that is cancelled or answered already."""
        asked = self._asked.pop(head.number, None)
        if asked is None:
            return None
        evaluation = Evaluation(self._now(), asked.clocks, head.loss, head.accuracy)
        branch, number = asked.request.branch, 0 if asked.automatic else head.number
        self._found.setdefault(branch, []).append((number, evaluation))
        return branch, evaluation

    def take(self, branch: int) -> tuple[tuple[int, Evaluation], ...]:
        """The results of a branch since the last call."""
        return tuple(self._found.pop(branch, ()))
