"""Replays machines that joined and left a recorded cluster, as places that are taken and free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from simulators.cluster.conditions import NodeChange
from simulators.cluster.fitted_conditions import NodeLosses

__all__ = ["Places", "named_changes", "places"]


class _PlaceEvent(NamedTuple):
    """A machine takes or frees a place."""

    seconds: float
    place: int
    event: Literal["joins", "leaves", "fails"]
    notice_seconds: float = 0.0


class Places(NamedTuple):
    """A recorded cluster. A machine that joins takes the place that has been free for the longest time."""

    taken_at_start: frozenset[int]
    events: tuple[_PlaceEvent, ...]  # in the order of time

    def changes(
        self, nodes: Sequence[str], budget_seconds: float, rng: np.random.Generator | None, faster: float = 1.0
    ) -> list[NodeChange]:
        """The changes of `nodes`, see `simulators.cluster.trace_driven`. Without `rng`, places are assigned in order, and
        the replay starts at the first time at which enough of them were taken. Recorded time is divided by `faster`."""
        spans = self._taken_spans()
        most = min(len(nodes), max(len(taken) for _, _, taken in spans))
        enough = [(since, until, taken) for since, until, taken in spans if len(taken) >= most]
        if rng is None:
            start, _, taken = enough[0]
            chosen = sorted(taken)[:most]
        else:
            start, taken = _draw_start(enough, spans[-1][0] - budget_seconds * faster, rng)
            chosen = [sorted(taken)[i] for i in rng.permutation(len(taken))[:most]]
        node_of = dict(zip(chosen, nodes, strict=False))
        return [
            NodeChange((node_of[e.place],), (e.seconds - start) / faster, e.event, e.notice_seconds / faster)
            for e in self.events
            if e.seconds > start and e.place in node_of
        ]

    def losses(self) -> NodeLosses:
        """How often places were lost and taken again, on average over all places and the whole recording."""
        gone = [e for e in self.events if e.event != "joins"]
        first_gone = {e.place: e.seconds for e in reversed(gone)}
        back = [e for e in self.events if e.event == "joins" and first_gone.get(e.place, math.inf) <= e.seconds]
        total = len({e.place for e in self.events} | self.taken_at_start)
        taken = sum((until - since) * len(places) for since, until, places in self._taken_spans())
        free = total * (self.events[-1].seconds if self.events else 0.0) - taken
        notices = [e.notice_seconds for e in gone if e.event == "leaves"]
        return NodeLosses(
            per_second=len(gone) / taken if taken > 0 else 0.0,
            back_per_second=len(back) / free if free > 0 else 0.0,
            fails=sum(e.event == "fails" for e in gone) / len(gone) if gone else 0.0,
            notice_seconds=sum(notices) / len(notices) if notices else 0.0,
        )

    def _taken_spans(self) -> list[tuple[float, float, frozenset[int]]]:
        """Start, end and taken places of each span between events; the last span has no length."""
        spans, taken, since = [], set(self.taken_at_start), 0.0
        for e in self.events:
            if e.seconds > since:
                spans.append((since, e.seconds, frozenset(taken)))
                since = e.seconds
            # A place counts as free from the notice on: a replay must not start with a node that is about to leave.
            (taken.add if e.event == "joins" else taken.discard)(e.place)
        return [*spans, (since, since, frozenset(taken))]


def _draw_start(
    enough: list[tuple[float, float, frozenset[int]]], latest: float, rng: np.random.Generator
) -> tuple[float, frozenset[int]]:
    """A time within these spans, drawn uniformly, not after `latest` if possible, and the places taken at that time."""
    latest = max(latest, enough[0][0])
    spans = [(since, min(until, latest), taken) for since, until, taken in enough if since <= latest]
    weights = np.cumsum([until - since for since, until, _ in spans])
    at = rng.random() * weights[-1]
    number = min(int(np.searchsorted(weights, at, side="right")), len(spans) - 1)
    since, until, taken = spans[number]
    return float(min(until, since + at - (weights[number] - (until - since)))), taken


def places(events: Iterable[tuple[float, str, str]], machines: int = 0) -> Places:
    """The places of machines, from their recorded events (seconds, node, event) in the order of time.

    If the recording watched more `machines` than have events, the others have a place all the time.
    """
    rows = list(events)
    first_event: dict[str, str] = {}
    for _, node, event in rows:
        first_event.setdefault(node, event)
    # A machine whose first event is not that it joined was in the cluster before the recording began.
    place_of = {node: i for i, node in enumerate(n for n, event in first_event.items() if event != "joined")}
    count = len(place_of) + max(0, machines - len(first_event))
    taken_at_start, free, own = frozenset(range(count)), list[int](), dict(place_of)
    notice_at: dict[str, float] = {}
    made: list[_PlaceEvent] = []
    for seconds, node, event in rows:
        if event == "joined" and node not in place_of:
            # A machine that comes back, after a repair, takes the place that it had, if that is still free.
            place = own[node] if own.get(node) in free else free[0] if free else count
            if place in free:
                free.remove(place)
            place_of[node] = own[node] = place
            count = max(count, place + 1)
            made.append(_PlaceEvent(seconds, place_of[node], "joins"))
        elif event == "joined":
            notice_at.pop(node, None)  # it stays: the notice was taken back
        elif event == "leaving" and node in place_of:
            notice_at[node] = seconds
        elif event in ("left", "failed") and node in place_of:
            place, since = place_of.pop(node), notice_at.pop(node, seconds)
            free.append(place)
            left = _PlaceEvent(since, place, "leaves", seconds - since)
            made.append(left if event == "left" else _PlaceEvent(seconds, place, "fails"))
    # A "leaves" event has the time of its notice, which may be before events that are already in the list.
    return Places(taken_at_start, tuple(sorted(made, key=lambda e: e.seconds)))


def named_changes(events: Iterable[tuple[float, str, str]], faster: float = 1.0) -> list[NodeChange]:
    """Recorded events (seconds, node, event) in the order of time as changes of the nodes that they name."""
    made: list[NodeChange] = []
    present: dict[str, bool] = {}
    notice_at: dict[str, float] = {}
    for seconds, node, event in events:
        if event == "joined":
            notice_at.pop(node, None)  # that of a node that stays was taken back
        if event == "joined" and (seconds <= 0 or present.get(node)):
            present[node] = True  # part of the cluster from the beginning
        elif event == "joined":
            present[node] = True
            made.append(NodeChange((node,), seconds / faster, "joins"))
        elif event == "leaving":
            present.setdefault(node, True)
            notice_at[node] = seconds
        elif present.get(node, True):
            present[node], since = False, notice_at.pop(node, seconds)
            left = NodeChange((node,), since / faster, "leaves", (seconds - since) / faster)
            made.append(left if event == "left" else NodeChange((node,), seconds / faster, "fails"))
    return sorted(made, key=lambda change: change.seconds)
