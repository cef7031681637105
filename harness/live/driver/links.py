"""Links that have become slow, by what is measured anyway: how long each worker's push takes to come to each server.

A worker with a slow link is slow to all servers, and a server to all workers, while the others go on with each other as
fast as before. So a link is slow where all of a node's transfers have all through the last seconds taken many times what
they took earlier, under the same setting and with the same processes, and many times what the others of its role take now.
A link that was slow from the start is none of these: that is a property of the cluster, for a tuner to find. Where there are
one worker and one server, nobody can say whose link it is; and one on which nothing arrives any more is taken for cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

from harness.live.processes.runtime import node_of
from harness.live.protocol.messages import GradientDone, Head, PushStaged, Release
from tuners.actions import Setting

__all__ = ["Links", "Meter", "Pair", "Slow", "Transfer"]

_TIMES = 8  # as long as before, and as the others
_LEAST_SECONDS = 0.05  # longer than before: what is less is not worth a restart
_SECONDS = 4.0  # that are looked back on
_PUSHES = 3  # of each pair, at least, in these
_KNOWN_PUSHES = 20  # and before them
_LOOKS = 240  # remembered
_KEPT_PUSHES = 1000  # of each pair, until somebody asks

Pair: TypeAlias = tuple[str, str]
"""The nodes of a worker and of a server."""


class Transfer(NamedTuple):
    """Pushes of a worker to a server, in some time."""

    pushes: int
    seconds: float  # from a worker's release to the server's receipt, without its pull and its gradient; the median
    blocks: int  # in each


@dataclass
class _Cycle:
    number: int
    released_seconds: float
    done: GradientDone | None = None
    staged: dict[str, tuple[float, int]] = field(default_factory=dict)  # by server: when, and how many blocks


class Meter:
    """Reads the times of transfers off the coordinator's messages."""

    def __init__(self) -> None:
        self._cycles: dict[str, _Cycle] = {}  # by worker, the last
        self._found: dict[Pair, deque[tuple[float, int]]] = {}

    def sent(self, receiver: str, head: Head, now: float) -> None:
        """The coordinator says this."""
        if isinstance(head, Release):
            cycle = self._cycles.get(receiver)
            if cycle is None or cycle.number < head.cycle:
                self._cycles[receiver] = _Cycle(head.cycle, now)

    def heard(self, sender: str, head: Head, now: float) -> None:
        """The coordinator is told this."""
        if isinstance(head, GradientDone):
            cycle = self._cycles.get(sender)
            if cycle is not None and cycle.number == head.cycle:
                self._close(sender, cycle, head)
        elif isinstance(head, PushStaged):
            cycle = self._cycles.get(head.worker)
            if cycle is not None and cycle.number == head.cycle:
                blocks = sum(end - start for start, end in head.runs)
                cycle.staged[sender] = now, blocks + cycle.staged.get(sender, (0.0, 0))[1]
                if head.done is not None:
                    self._close(head.worker, cycle, head.done)

    def _close(self, worker: str, cycle: _Cycle, done: GradientDone) -> None:
        """Count what has been staged so far."""
        busy = done.pull_seconds + done.compute_seconds
        for server, (at, blocks) in cycle.staged.items():
            spent = max(at - cycle.released_seconds - busy, 0.0)
            pair = node_of(worker), node_of(server)
            self._found.setdefault(pair, deque(maxlen=_KEPT_PUSHES)).append((spent, blocks))
        cycle.staged = {}

    def take(self) -> dict[Pair, Transfer]:
        """What was found since this was asked last."""
        found, self._found = self._found, {}
        return {
            pair: Transfer(len(those), median(spent for spent, _ in those), max(blocks for _, blocks in those))
            for pair, those in found.items()
        }


class Slow(NamedTuple):
    """A node whose link has become slow."""

    node: str
    seconds: float  # that a push takes to come over it
    before_seconds: float
    blocks: int  # in each
    hinders: bool
    """Whether fewer than half as many pushes are completed as those without it made before: better to leave it out."""


class _Look(NamedTuple):
    seconds: float  # since the one before
    found: Mapping[Pair, Transfer]


class Links:
    """What is known of all links, from look to look."""

    def __init__(self) -> None:
        self._of: object = None  # the setting and the processes that all looks are of
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._members: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self.borne: set[str] = set()  # nodes that the job goes on with, slow as they are

    def see(self, setting: Setting, processes: Mapping[str, int], seconds: float, found: Mapping[Pair, Transfer]) -> None:
        """These transfers were made in the last so many seconds. Under another setting, or by other processes (by name,
        their generations), all begins anew."""
        if self._of != (setting, processes):
            self._of = setting, dict(processes)
            self._members = setting.workers, setting.servers
            self._looks.clear()
            self.borne.clear()
        self._looks.append(_Look(seconds, {p: t for p, t in found.items() if p[0] != p[1]}))

    def slow(self) -> Slow | None:
        """A node whose link is slow, that is not `borne`."""
        earlier, recent = self._parted()
        before, now = _over(earlier, median), _over(recent, min)
        known = {pair for pair, seen in before.items() if seen.pushes >= _KNOWN_PUSHES and pair in now}
        longer = {p for p in known if now[p].seconds >= max(_TIMES * before[p].seconds, before[p].seconds + _LEAST_SECONDS)}
        for role, members in enumerate(self._members):
            level = {n: min((t.seconds for p, t in now.items() if p[role] == n), default=0.0) for n in members}
            for node in members:
                mine = [p for p in now if p[role] == node]
                if node in self.borne or not mine or not longer.issuperset(mine):
                    continue
                others = [seconds for other, seconds in level.items() if other != node]
                if level[node] >= _TIMES * median(others) if others else len(mine) > 1:
                    pair = min(mine, key=lambda p: now[p].seconds)
                    hinders = self._rate(recent) < self._rate(earlier) * self._share_without(node) / 2
                    return Slow(node, now[pair].seconds, before[pair].seconds, now[pair].blocks, hinders)
        return None

    def _parted(self) -> tuple[list[_Look], list[_Look]]:
        """Looks before the last seconds, and of these; all are earlier where the last ones do not say enough."""
        looks, seconds = list(self._looks), 0.0
        pushes = {pair: 0 for look in looks for pair in look.found}
        for first in range(len(looks) - 1, 0, -1):
            seconds += looks[first].seconds
            for pair, seen in looks[first].found.items():
                pushes[pair] += seen.pushes
            if seconds >= _SECONDS and min(pushes.values(), default=0) >= _PUSHES:
                return looks[:first], looks[first:]
        return looks, []

    def _rate(self, looks: Iterable[_Look]) -> float:
        """Pushes per second."""
        pushes = seconds = 0.0
        for look in looks:
            by_worker = {w: max(t.pushes for p, t in look.found.items() if p[0] == w) for w, _ in look.found}
            pushes, seconds = pushes + sum(by_worker.values()), seconds + look.seconds
        return pushes / seconds if seconds else 0.0

    def _share_without(self, node: str) -> float:
        """How much of the job's hands are left without a node; 0 where it cannot do without."""
        return min(sum(m != node for m in members) / len(members) for members in self._members)


def _over(looks: Iterable[_Look], choose: Callable[[list[float]], float]) -> dict[Pair, Transfer]:
    """Of each pair over some looks, every one of which counts the same, however many pushes it saw."""
    found: dict[Pair, list[Transfer]] = {}
    for look in looks:
        for pair, seen in look.found.items():
            found.setdefault(pair, []).append(seen)
    return {p: Transfer(sum(t.pushes for t in s), choose([t.seconds for t in s]), s[-1].blocks) for p, s in found.items()}
