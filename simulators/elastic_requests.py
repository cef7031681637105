"""The worker's side of the elastic store: pushes and pulls, split by a table that may be out of date.

A push has two steps. Its parts are first staged at the owners of their blocks; when all are staged and backed up, they are
committed; when all are committed and backed up, the push is answered. So a push whose worker dies can be completed by the
servers if every part of it has arrived, and be forgotten by all of them otherwise. A worker has one push open at a time;
further ones wait in it. Pulls do not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulators.elastic_messages import Answer, Ask, Entry, Origin

__all__ = ["Requests", "target"]


def target(entry: Entry, step: str, origin: Origin | None) -> str:
    """Whom to ask.

    During a relocation on demand that is the source, unless the message brings along the original that the source has
    frozen, which is all that the new owner needs to begin.
    """
    if entry.source is None or (step != "pull" and origin is not None and origin.epoch == entry.epoch):
        return entry.owner
    return entry.source


@dataclass
class _Request:
    step: str
    number: int
    updates: Mapping[int, Any]
    missing: set[int]
    values: dict[int, Any] = field(default_factory=dict)


class Requests:
    """The open requests of one worker."""

    def __init__(
        self,
        name: str,
        table: dict[int, Entry],
        send: Callable[[str, Any], None],
        finish: Callable[[int, dict[int, Any]], None],
    ) -> None:
        self.name = name
        self.table = table
        self.send = send
        self.finish = finish
        self.origins: dict[int, Origin] = {}
        self.running = False
        self._open: dict[int, _Request] = {}
        self._backlog: deque[_Request] = deque()

    @property
    def numbers(self) -> list[int]:
        """Requests not yet answered, in order."""
        return sorted([*self._open, *(r.number for r in self._backlog)])

    @property
    def pushing(self) -> tuple[int, frozenset[int]] | None:
        """The push under way, and its blocks."""
        return next(((r.number, frozenset(r.updates)) for r in self._open.values() if r.step != "pull"), None)

    def pull(self, number: int, blocks: Collection[int]) -> None:
        """Ask for the values of `blocks`."""
        self._begin(_Request("pull", number, {}, set(blocks)))

    def push(self, number: int, updates: Mapping[int, Any]) -> None:
        """Apply one update per block, as soon as the push before is done."""
        self._backlog.append(_Request("stage", number, dict(updates), set(updates)))
        self._next_push()

    def resume(self) -> None:
        """Ask again, in a new view, for everything that is not answered."""
        self.running = True
        for request in list(self._open.values()):
            self._ask(request)

    def stop(self) -> None:
        """The view has ended: answers to what was asked will not come, and frozen originals no longer hold."""
        self.running = False
        self.origins.clear()

    def answer(self, answer: Answer) -> None:
        """Take one block's answer."""
        entry = self.table[answer.block]
        if answer.origin is not None and entry.source is not None and entry.epoch == answer.origin.epoch:
            self.origins[answer.block] = answer.origin
        request = self._open.get(answer.number)
        if request is None or request.step != answer.step or answer.block not in request.missing:
            return
        request.missing.remove(answer.block)
        request.values[answer.block] = answer.value
        if not request.missing:
            self._step(request)

    def _step(self, request: _Request) -> None:
        if request.step == "stage":
            request.step, request.missing = "commit", set(request.updates)
            self._ask(request)
            return
        del self._open[request.number]
        self.finish(request.number, request.values if request.step == "pull" else {})
        self._next_push()

    def _next_push(self) -> None:
        if self._backlog and self.pushing is None:
            self._begin(self._backlog.popleft())

    def _begin(self, request: _Request) -> None:
        self._open[request.number] = request
        if self.running:
            self._ask(request)

    def _ask(self, request: _Request) -> None:
        """Send what is missing, one message for each node that the table names."""
        split: dict[str, list[int]] = {}
        for block in sorted(request.missing):
            split.setdefault(target(self.table[block], request.step, self.origins.get(block)), []).append(block)
        for node, blocks in split.items():
            parts = {b: request.updates.get(b) if request.step == "stage" else None for b in blocks}
            pushed = () if request.step == "pull" else blocks
            origins = {b: self.origins[b] for b in pushed if b in self.origins}
            whole = frozenset(request.updates)
            self.send(node, Ask(request.step, self.name, self.name, request.number, parts, whole, origins))
