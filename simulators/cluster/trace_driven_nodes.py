"""Machines that came and went in a recorded cluster, as places that were taken and free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from simulators.cluster.conditions import NodeChange

__all__ = ["Places", "places"]


class _Happened(NamedTuple):
    """What happened at a place."""

    seconds: float
    place: int
    event: Literal["joins", "leaves", "fails"]
    notice_seconds: float = 0.0


class Places(NamedTuple):
    """A recorded cluster: a machine that joins takes the place that has been free for longest."""

    first: frozenset[int]  # taken before anything happened
    happened: tuple[_Happened, ...]  # in the order of time

    def changes(self, nodes: Sequence[str], budget_seconds: float, rng: np.random.Generator | None) -> list[NodeChange]:
        """What happens to `nodes`: see `simulators.cluster.trace_driven`. Without `rng` places are dealt out in order, and
        the recording begins at the first moment when enough of them were taken."""
        taken = self._taken()
        most = min(len(nodes), max(len(there) for _, _, there in taken))
        enough = [(since, until, there) for since, until, there in taken if len(there) >= most]
        if rng is None:
            begun, _, there = enough[0]
            dealt = sorted(there)[:most]
        else:
            begun, there = _moment(enough, taken[-1][0] - budget_seconds, rng)
            dealt = [sorted(there)[i] for i in rng.permutation(len(there))[:most]]
        ours = dict(zip(dealt, nodes, strict=False))
        return [
            NodeChange((ours[h.place],), h.seconds - begun, h.event, h.notice_seconds)
            for h in self.happened
            if h.seconds > begun and h.place in ours
        ]

    def _taken(self) -> list[tuple[float, float, frozenset[int]]]:
        """From when to when which places were taken; the last moment stands for itself."""
        spans, there, since = [], set(self.first), 0.0
        for h in self.happened:
            if h.seconds > since:
                spans.append((since, h.seconds, frozenset(there)))
                since = h.seconds
            # One that has been given notice is there, and nothing to begin with.
            (there.add if h.event == "joins" else there.discard)(h.place)
        return [*spans, (since, since, frozenset(there))]


def _moment(
    enough: list[tuple[float, float, frozenset[int]]], latest: float, rng: np.random.Generator
) -> tuple[float, frozenset[int]]:
    """A moment within these spans, up to `latest` if that is not before all of them, and the places taken then."""
    latest = max(latest, enough[0][0])
    spans = [(since, min(until, latest), there) for since, until, there in enough if since <= latest]
    weights = np.cumsum([until - since for since, until, _ in spans])
    at = rng.random() * weights[-1]
    number = min(int(np.searchsorted(weights, at, side="right")), len(spans) - 1)
    since, until, there = spans[number]
    return float(min(until, since + at - (weights[number] - (until - since)))), there


def places(events: Iterable[tuple[float, str, str]]) -> Places:
    """The places of machines by what is recorded of them, (seconds, node, event), in the order of time."""
    rows = list(events)
    first_event: dict[str, str] = {}
    for _, node, event in rows:
        first_event.setdefault(node, event)
    at = {node: i for i, node in enumerate(n for n, event in first_event.items() if event != "joined")}
    first, count, free = frozenset(at.values()), len(at), list[int]()
    noticed: dict[str, float] = {}  # when
    happened: list[_Happened] = []
    for seconds, node, event in rows:
        if event == "joined" and node not in at:
            at[node] = free.pop(0) if free else count
            count = max(count, at[node] + 1)
            happened.append(_Happened(seconds, at[node], "joins"))
        elif event == "leaving" and node in at:
            noticed[node] = seconds
        elif event in ("left", "failed") and node in at:
            place, since = at.pop(node), noticed.pop(node, seconds)
            free.append(place)
            left = _Happened(since, place, "leaves", seconds - since)
            happened.append(left if event == "left" else _Happened(seconds, place, "fails"))
    return Places(first, tuple(sorted(happened, key=lambda h: h.seconds)))
