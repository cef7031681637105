"""Where blocks of embedding tables lie, for `tuners.joint`: seconds per push from what every server was busy with.

Few rows are looked up very often, so a server's work is that of the blocks that it holds, and not its share of the bytes.
Loads are measured and hot blocks chosen as in Cruise's extension (`tuners.cruise.blocks`); machines that are idle count as
servers that hold nothing yet. Workers queue for the busiest server, for its pulls and its pushes apart. Blocks move one by
one, the hottest first, and take as long as their bytes: as many move as are expected to save more seconds than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tuners.actions import Job, Setting, Window
from tuners.cruise.blocks import BlockLoads, measured, moves
from tuners.joint.models.link_network import closed_network
from tuners.joint.models.system_model import waits
from tuners.settings import Choice

__all__ = ["BlockModel", "TableChange"]

_LEAST_MOVE = 0.002  # of the busiest server's seconds, that a move saves at least
_MOVING_SHARE = 0.5  # of a NIC, that blocks on their way get while workers pull and push


class TableChange(NamedTuple):
    """A setting with other places of blocks, and what is predicted of it."""

    setting: Setting
    gain: float  # times as many pushes per second
    blocks: int  # that move
    cost_seconds: float  # that this takes


class BlockModel:
    """Predicts what other places of blocks are worth."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._nics = {n.name: n.nic_bytes_per_second for n in job.nodes}
        self._slower = 1.0  # times that moves took longer than predicted
        self._loads: BlockLoads | None = None
        self._rows, self._clocks = np.zeros(job.blocks), 0  # that all pushes carried; this does not depend on places

    def learn(self, setting: Setting, window: Window) -> None:
        """Take in what the servers did in a window under `setting`."""
        there = [n.name for n in window.nodes or self._job.nodes]
        used = {*setting.workers, *setting.servers}
        roles = {n: self._job.space.knob(f"role/{n}") for n in there if n not in used}
        idle = [n for n, knob in roles.items() if isinstance(knob, Choice) and "server" in knob.options]
        found = measured(self._job, setting, window, idle)
        if found is not None:
            self._rows, self._clocks = self._rows + window.blocks, self._clocks + window.clocks
            self._loads = found._replace(rows=tuple(self._rows / self._clocks))

    def moved(self, change: TableChange, seconds: float) -> None:
        """Take in what a change took."""
        if change.cost_seconds > 0:
            self._slower *= max(seconds / change.cost_seconds, 0.1)

    def best(self, setting: Setting, left_seconds: float) -> TableChange | None:
        """The change that leaves the fewest seconds of so many, with its own; None where nothing is known or serves."""
        loads = self._loads
        if loads is None or not self._job.blocks:
            return None
        now = setting.owners(self._job.blocks)
        if not set(now) <= loads.row_seconds.keys():
            return None
        before = self._push_seconds(loads, setting, now)
        least, found = left_seconds, None
        for other in self._candidates(loads, setting, now):
            owners = other.owners(self._job.blocks)
            gain = before / self._push_seconds(loads, other, owners)
            blocks, cost = self._cost(now, owners)
            if cost + left_seconds / gain < least:
                least, found = cost + left_seconds / gain, TableChange(other, gain, blocks, cost)
        return found

    def copies_gain(self, setting: Setting, kept: float) -> float:
        """How many times as many pushes per second there are at most where workers pull only `kept` of what they look up."""
        if self._loads is None:
            return 1.0
        now = setting.owners(self._job.blocks)
        return self._push_seconds(self._loads, setting, now) / self._push_seconds(self._loads, setting, now, kept)

    def _candidates(self, loads: BlockLoads, setting: Setting, now: tuple[str, ...]) -> Iterator[Setting]:
        """`setting` after the first 1, 2, 4, ... moves of hot blocks, and after all of them; or with the other placement."""
        space = self._job.space
        if space.frees("block"):
            idle = [n for n in loads.row_seconds if n not in setting.servers]
            for more in ([], idle) if idle else ([],):
                rates = {n: s for n, s in loads.row_seconds.items() if n in (*setting.servers, *more)}
                path = list(moves(loads._replace(row_seconds=rates), now, _LEAST_MOVE))
                for count in sorted({min(2**i, len(path) - 1) for i in range(len(path).bit_length() + 1)} - {0}):
                    owners = path[count]
                    servers = (*setting.servers, *(n for n in more if n in owners))
                    yield replace(setting, servers=servers, block_owners=owners, model_shares=())
        placement = space.knob("placement")
        for name in placement.options if isinstance(placement, Choice) else ():
            yield replace(setting, placement=str(name), block_owners=(), model_shares=())

    def _cost(self, now: tuple[str, ...], owners: tuple[str, ...]) -> tuple[int, float]:
        """Blocks that move, and the seconds that this takes: as long as the machine that sends or gets most."""
        out, into = dict.fromkeys(self._nics, 0), dict.fromkeys(self._nics, 0)
        for before, after in zip(now, owners, strict=True):
            if before != after:
                out[before] += 1
                into[after] += 1
        size = self._job.model_bytes / len(now) / _MOVING_SHARE
        longest = max(max(out[n], into[n]) * size / nic for n, nic in self._nics.items())
        return sum(out.values()), self._slower * longest

    def _push_seconds(self, loads: BlockLoads, setting: Setting, owners: tuple[str, ...], kept: float = 1.0) -> float:
        """Seconds between two pushes of the job, where workers pull `kept` of what they look up."""
        parts = (kept * loads.pull_part, 1 - loads.pull_part)
        busiest, workers = max(loads.busy_seconds(owners).values()), len(loads.compute_seconds)
        served = [p * busiest for p in parts]
        own = sum(loads.alone_seconds) / workers
        alone = [max(p * own, s) for p, s in zip(parts, served, strict=True)]
        if waits(setting):
            transfers = (max(a, workers * s) for a, s in zip(alone, served, strict=True))
            return (max(loads.compute_seconds) + sum(transfers)) / workers
        think = workers / sum(1 / max(c, 1e-12) for c in loads.compute_seconds)
        return 1 / closed_network(think, alone, served, workers)[0]
