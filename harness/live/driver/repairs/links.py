"""Finds links that have become slow, from the times that each worker's push takes to reach each server.

A worker with a slow link is slow to all servers, and a server to all workers, while transfers between the others stay as
fast as before. So a node's link is slow if all its transfers, throughout the last seconds, take many times as long as
earlier under the same setting and with the same processes, and many times as long as those of the others in its role.
Three cases are not found: a link that was slow from the start, which is a property of the cluster and for a tuner to find;
a link between one worker and one server, because either could be the slow one; and a link on which nothing arrives any
more, whose node is taken for dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import NamedTuple

from harness.live.processes.transfers import NodePair, Transfer
from tuners.actions import Setting

__all__ = ["LOOK_BACK_SECONDS", "LinkMonitor", "SlowLink"]

LOOK_BACK_SECONDS = 4.0
"""A link is slow if it was slow for so long."""

_TIMES = 8  # as long as before, and as the others
_LEAST_SECONDS = 0.05  # longer than before; less is not worth a restart
_RECENT_PUSHES = 3  # of each pair, at least, in the last seconds
_EARLIER_PUSHES = 20  # of each pair, at least, before them
_MOST_LOOKS = 240  # remembered


class SlowLink(NamedTuple):
    """A node whose link has become slow."""

    node: str
    seconds: float  # that a push takes over it
    before_seconds: float
    blocks: int  # in each push
    hinders: bool
    """Whether leaving the node out is better: fewer than half as many pushes are completed as the others made before."""


class _Look(NamedTuple):
    seconds: float  # since the look before
    found: Mapping[NodePair, Transfer]


class LinkMonitor:
    """Collects transfers from look to look, under one setting and with the same processes."""

    def __init__(self) -> None:
        self._of: object = None  # the setting and the members of all looks
        self._looks: deque[_Look] = deque(maxlen=_MOST_LOOKS)
        self._roles: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # workers, servers
        self.tolerated: set[str] = set()  # nodes that stay in the job although their links are slow

    def add(self, setting: Setting, members: Mapping[str, int], seconds: float, found: Mapping[NodePair, Transfer]) -> None:
        """Add the transfers of the last `seconds`. Another setting or other members (generation by name) reset all."""
        if self._of != (setting, members):
            self._of = setting, dict(members)
            self._roles = setting.workers, setting.servers
            self._looks.clear()
            self.tolerated.clear()
        # What a node sends to itself does not use its link.
        self._looks.append(_Look(seconds, {p: t for p, t in found.items() if p[0] != p[1]}))

    def slow_link(self) -> SlowLink | None:
        """A node whose link is slow and not `tolerated`; None if there is none."""
        earlier, recent = self._split()
        before, now = _per_pair(earlier, median), _per_pair(recent, min)
        known = {pair for pair, seen in before.items() if seen.pushes >= _EARLIER_PUSHES and pair in now}
        longer = {p for p in known if now[p].seconds >= max(_TIMES * before[p].seconds, before[p].seconds + _LEAST_SECONDS)}
        for role, members in enumerate(self._roles):
            # The fastest transfer of a node counts: the other end of a slower one may be at fault.
            fastest = {n: min((t.seconds for p, t in now.items() if p[role] == n), default=0.0) for n in members}
            for node in members:
                mine = [p for p in now if p[role] == node]
                if node in self.tolerated or not mine or not longer.issuperset(mine):
                    continue
                others = [seconds for other, seconds in fastest.items() if other != node]
                if fastest[node] >= _TIMES * median(others) if others else len(mine) > 1:
                    pair = min(mine, key=lambda p: now[p].seconds)
                    hinders = self._rate(recent) < self._rate(earlier) * self._share_without(node) / 2
                    return SlowLink(node, now[pair].seconds, before[pair].seconds, now[pair].blocks, hinders)
        return None

    def _split(self) -> tuple[list[_Look], list[_Look]]:
        """Looks before the last seconds, and those of the last seconds; the latter are empty if they have too few pushes."""
        looks, seconds = list(self._looks), 0.0
        pushes = {pair: 0 for look in looks for pair in look.found}
        for first in range(len(looks) - 1, 0, -1):
            seconds += looks[first].seconds
            for pair, seen in looks[first].found.items():
                pushes[pair] += seen.pushes
            if seconds >= LOOK_BACK_SECONDS and min(pushes.values(), default=0) >= _RECENT_PUSHES:
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
        """The share of a role's nodes that is left without `node`, the smaller of both roles; 0 if a role is left empty."""
        return min(sum(m != node for m in members) / len(members) for members in self._roles)


def _per_pair(looks: Iterable[_Look], choose: Callable[[list[float]], float]) -> dict[NodePair, Transfer]:
    """The transfers of each pair; every look has the same weight, however many pushes it saw."""
    found: dict[NodePair, list[Transfer]] = {}
    for look in looks:
        for pair, seen in look.found.items():
            found.setdefault(pair, []).append(seen)
    return {p: Transfer(sum(t.pushes for t in s), choose([t.seconds for t in s]), s[-1].blocks) for p, s in found.items()}
