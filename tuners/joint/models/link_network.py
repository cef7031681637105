"""The links of machines as a closed queueing network: how often workers push that do not wait for each other.

Every worker computes, pulls and pushes in a circle. A pull occupies the link of the worker inwards and those of servers
outwards; a push, the other way round. What a worker pulls from its own machine, where that serves, crosses no link; but a
machine of both roles has one link for what it pulls itself and for what others push to it. A link is shared by all transfers
that occupy it, and a transfer is over when its slowest part is. Machines that are alike are one class, and mean-value
analysis (Schweitzer's approximation; Lazowska et al. 1984, Section 7.4) gives the rate of each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

__all__ = ["AlikeMachines", "LinkFactors", "PushFlow", "closed_network", "flow_of", "round_of_all"]

_ROUNDS = 80  # of a fixed point; most are settled after ten
_SETTLED = 1e-4  # share of a rate, or transfers in a queue: a round that changes less is the last one
_KEPT = 0.3  # of the round before: else a queue may swing


@dataclass(frozen=True, slots=True)
class AlikeMachines:
    """Some machines that are alike."""

    count: int
    compute_seconds: float | None  # from a pull to the push; None where they do not work
    own_seconds: float  # that a pull or a push of such a worker takes on its own link, where nothing else does
    served_seconds: float | None  # that one takes on the link of such a server; None where they do not serve


class LinkFactors(NamedTuple):
    """How many times as long as by the links' rates a transfer takes: on links of workers, and on those of servers."""

    workers: float
    servers: float


class PushFlow(NamedTuple):
    """How often workers push."""

    pushes_per_second: float
    pull_seconds: tuple[float, ...]  # of each class of machines that work
    push_seconds: tuple[float, ...]  # the same
    pulls_at_servers: bool  # whether it is the links of servers, and not those of workers, that pulls mostly wait for
    pushes_at_servers: bool
    evenness: float  # of workers' shares of the pushes: 1 where these are equal, 1 / workers where one makes nearly all
    applied: float = 1.0  # share of the pushes that the servers apply; the others are dropped


def flow_of(machines: Sequence[AlikeMachines], pull: LinkFactors, push: LinkFactors, busy: float = 1.0) -> PushFlow:
    """The flow of pushes where workers do not wait, and the share `busy` of them computes or transfers at a time."""
    network = _Network(machines, pull, push, busy)
    for _ in range(_ROUNDS):
        if network.settle():
            break
    return network.flow()


def round_of_all(
    machines: Sequence[AlikeMachines], slowest_seconds: float, pull: LinkFactors, push: LinkFactors
) -> PushFlow:
    """The flow of pushes where all workers wait for each other, and the slowest one computes so long: all pull at one time,
    and all push at another."""
    working = [m for m in machines if m.compute_seconds is not None]
    workers = sum(m.count for m in working)
    own = max(m.own_seconds for m in working)
    # A server that works has one user less: itself.
    users = [(m.served_seconds, workers - (m.compute_seconds is not None)) for m in machines]
    served = max(seconds * count for seconds, count in users if seconds is not None)
    pulls, pushes = (tuple(max(f.workers * m.own_seconds, f.servers * served) for m in working) for f in (pull, push))
    return PushFlow(
        pushes_per_second=workers / (slowest_seconds + max(pulls) + max(pushes)),
        pull_seconds=pulls,
        push_seconds=pushes,
        pulls_at_servers=max(pulls) > pull.workers * own,
        pushes_at_servers=max(pushes) > push.workers * own,
        evenness=1.0,
    )


class _Network:
    """The fixed point. A way is 0 for pulls and 1 for pushes; i counts classes that work, and j classes that serve."""

    def __init__(self, machines: Sequence[AlikeMachines], pull: LinkFactors, push: LinkFactors, busy: float) -> None:
        working = [m for m in machines if m.compute_seconds is not None]
        serving = [m for m in machines if m.served_seconds is not None]
        self._busy = busy
        self._counts, self._compute = [m.count for m in working], [m.compute_seconds or 0.0 for m in working]
        # The place of a class among those that serve, or that work, if it has both roles.
        self._as_server = [next((j for j, s in enumerate(serving) if s is m), None) for m in working]
        self._as_worker = [next((i for i, w in enumerate(working) if w is m), None) for m in serving]
        # How many machines of i use a server of j: not the one that is that server itself.
        self._users = [[w.count - (w is s) for s in serving] for w in working]
        # Seconds of a transfer that has the link for itself: a worker's own, [way, i], and a server's, [way, j].
        self._own = [[f.workers * m.own_seconds for m in working] for f in (pull, push)]
        self._served = [[f.servers * (m.served_seconds or 0.0) for m in serving] for f in (pull, push)]
        # Seconds beside those that share it: on a worker's own link, [way, i], and on a server's, [way, i, j].
        self._at_own = [list(seconds) for seconds in self._own]
        self._at_server = [
            [[s if users else 0.0 for s, users in zip(seconds, row, strict=True)] for row in self._users]
            for seconds in self._served
        ]
        self._rates = self._latest_rates()

    def settle(self) -> bool:
        """Make one round. Returns whether it has changed nothing."""
        rates, at_own, at_server = self._rates, self._at_own, self._at_server
        queues, itself = self._queues(), self._itself()
        self._at_own = [
            [
                seconds if j is None else _mixed(seconds, alone * (1 + queues[1 - way][j]))
                for seconds, alone, j in zip(at_own[way], self._own[way], self._as_server, strict=True)
            ]
            for way in (0, 1)
        ]
        self._at_server = [
            [
                [
                    _mixed(seconds, alone * (1 + max(queue - rate * seconds, 0.0) + own)) if users else 0.0
                    for seconds, alone, queue, own, users in zip(
                        parts, self._served[way], queues[way], itself[1 - way], used, strict=True
                    )
                ]
                for parts, rate, used in zip(at_server[way], rates, self._users, strict=True)
            ]
            for way in (0, 1)
        ]
        self._rates = [_mixed(rate, latest) for rate, latest in zip(rates, self._latest_rates(), strict=True)]
        # The rates stay as they are while a queue grows that nobody waits for yet.
        grown = (
            rate * abs(now - before)
            for way in (0, 1)
            for rate, new, old in zip(rates, self._at_server[way], at_server[way], strict=True)
            for now, before in zip(new, old, strict=True)
        )
        changed = (abs(now / before - 1) for now, before in zip(self._rates, rates, strict=True))
        return max(*grown, *changed) < _SETTLED

    def flow(self) -> PushFlow:
        """The flow by now."""
        pushes = [count * rate for count, rate in zip(self._counts, self._rates, strict=True)]
        whole = sum(pushes)
        pulls, pushed = self._longest(0), self._longest(1)
        pulls_on_own, pushed_on_own = (sum(map(mul, self._counts, seconds)) for seconds in self._at_own)
        return PushFlow(
            pushes_per_second=whole,
            pull_seconds=tuple(pulls),
            push_seconds=tuple(pushed),
            pulls_at_servers=sum(map(mul, self._counts, pulls)) > pulls_on_own,
            pushes_at_servers=sum(map(mul, self._counts, pushed)) > pushed_on_own,
            evenness=whole**2 / (sum(self._counts) * sum(map(mul, pushes, self._rates))),
        )

    def _queues(self) -> list[list[float]]:
        """How many transfers of other machines are on a server's link at a time, [way, j]."""
        return [
            [
                sum(rate * parts[j] * users[j] for rate, parts, users in zip(self._rates, of_way, self._users, strict=True))
                for j in range(len(self._as_worker))
            ]
            for of_way in self._at_server
        ]

    def _itself(self) -> list[list[float]]:
        """How many transfers of its own a server that works has on its link at a time, [way, j]."""
        return [[0.0 if i is None else self._rates[i] * seconds[i] for i in self._as_worker] for seconds in self._at_own]

    def _longest(self, way: int) -> list[float]:
        """Seconds of a transfer of each class of workers, [i]."""
        return [max(own, *parts) for own, parts in zip(self._at_own[way], self._at_server[way], strict=True)]

    def _latest_rates(self) -> list[float]:
        """Pushes per second of a worker of each class, [i]."""
        return [
            self._busy / (compute + pull + push)
            for compute, pull, push in zip(self._compute, self._longest(0), self._longest(1), strict=True)
        ]


def _mixed(before: float, now: float) -> float:
    return _KEPT * before + (1 - _KEPT) * now


def closed_network(think: float, alone: Sequence[float], served: Sequence[float], workers: int) -> tuple[float, list[float]]:
    """Pushes per second of so many alike `workers`, and the seconds of their transfers, by Schweitzer's approximation.

    Args:
        think: mean seconds that a worker computes.
        alone: of each transfer of a cycle, the seconds that it takes where nobody else transfers.
        served: of each, the seconds that it occupies the busiest server.
        workers: that compute or transfer.
    """
    queue, seconds, rate = [0.0] * len(alone), list(alone), 0.0
    for _ in range(_ROUNDS):
        seconds = [max(a, s * (1 + q * (workers - 1) / workers)) for a, s, q in zip(alone, served, queue, strict=True)]
        rate = workers / (think + sum(seconds))
        queue = [0.5 * q + 0.5 * rate * s for q, s in zip(queue, seconds, strict=True)]
    return rate, seconds
