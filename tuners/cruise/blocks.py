"""Cruise's cost model for embedding tables: it places single blocks, and leaves roles and data as they are.

The paper's model divides a model evenly: a server's part of a pull is its share of the bytes (Eq. 4). Where mini-batches
touch few rows, some of them much more often than others, what a server has to do per mini-batch depends on which blocks it
holds. So here server j takes sum_b l_b c_j seconds per mini-batch, over its blocks b, where l_b is the number of rows of
block b that a mini-batch touches, and c_j the seconds of the server for each of them; both are measured (`Window.blocks`,
`Window.servers`). A cycle is as in `tuners.cruise.queueing`, with the busiest server as the one that workers queue for.

This is our extension; the paper has dense models only. As in the paper, blocks move by migration, and only where the
predicted time of an epoch falls by more than `gain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.cruise.queueing import pulls_in_queue

__all__ = ["BlockLoads", "balanced", "cycle_seconds", "measured", "place_blocks"]


class BlockLoads(NamedTuple):
    """What a mini-batch asks of the servers, as measured."""

    rows: tuple[float, ...]  # that it touches in each block
    row_seconds: Mapping[str, float]  # of each server, for a row that is pulled and pushed
    compute_seconds: tuple[float, ...]  # of each worker's mini-batch
    alone_seconds: tuple[float, ...]  # for which each worker's own NIC takes, for the pull and the push

    def busy_seconds(self, owners: tuple[str, ...]) -> dict[str, float]:
        """Seconds per mini-batch of each server, where these `owners` hold the blocks."""
        found = dict.fromkeys(self.row_seconds, 0.0)
        for rows, owner in zip(self.rows, owners, strict=True):
            found[owner] += rows * self.row_seconds[owner]
        return found


def place_blocks(job: Job, *, gain: float, batches: int, warmup: int) -> Tuner:
    """Move hot blocks to less busy servers where that shortens the predicted epoch by more than `gain`.

    Args:
        job: what is tuned; its blocks are free.
        gain: predicted share of the current epoch time that a move must save.
        batches: mini-batches per worker between two decisions.
        warmup: first mini-batches of each worker that do not count.
    """
    current = job.start
    if warmup:
        yield from Run(clocks=warmup * len(current.workers))
    while True:
        seen = yield from Run(clocks=batches * len(current.workers))
        if seen.status != "running":
            return
        current = seen.setting or current
        loads = measured(job, current, seen)
        if loads is None:
            continue
        owners = current.owners(job.blocks)
        wanted = balanced(loads, owners)
        before, after = (cycle_seconds(loads, placed, waits=current.policy == "bsp") for placed in (owners, wanted))
        if after >= (1 - gain) * before:
            continue
        moved = sum(a != b for a, b in zip(owners, wanted, strict=True))
        try:
            yield from Reconfigure(
                replace(current, block_owners=wanted, model_shares=()),
                method="migrate" if "migrate" in job.methods else None,
                reason=f"{moved} blocks move: {after:.3g} s per mini-batch instead of {before:.3g}",
            )
        except Rejected:
            return
        # These pushes, and those of the move, were served by old and new owners.
        yield from Run(clocks=len(current.workers))


def measured(job: Job, setting: Setting, seen: Window) -> BlockLoads | None:
    """What `seen` says of the blocks under `setting`; None where it has no pushes of every worker, or servers are not
    measured."""
    workers = {w.node: w for w in seen.workers}
    if not (seen.blocks and seen.servers and seen.clocks) or any(
        w not in workers or not workers[w].pushes for w in setting.workers
    ):
        return None
    rows = tuple(count / seen.clocks for count in seen.blocks)
    held = dict.fromkeys(setting.servers, 0.0)
    for count, owner in zip(rows, setting.owners(job.blocks), strict=True):
        held[owner] += count * seen.clocks
    busy = {s.node: s.pull_seconds + s.push_seconds for s in seen.servers}
    known = {n: busy[n] / held[n] for n in setting.servers if held[n] > 0 and busy.get(n, 0.0) > 0}
    if not known:
        return None
    nics = {n.name: n.nic_bytes_per_second for n in job.nodes}
    # A server that no row was asked of has not been measured: its NIC, against the others, says how fast it is.
    scale = float(np.mean([seconds * nics[n] for n, seconds in known.items()]))
    size = sum(s.pull_bytes + s.push_bytes for s in seen.servers) / seen.clocks
    return BlockLoads(
        rows,
        {n: known.get(n, scale / nics[n]) for n in setting.servers},
        tuple(workers[w].compute_seconds / workers[w].pushes for w in setting.workers),
        tuple(size / nics[w] for w in setting.workers),
    )


def balanced(loads: BlockLoads, owners: tuple[str, ...]) -> tuple[str, ...]:
    """Owners of the blocks after hot ones have left the busiest server, again and again, while that makes it less busy.

    In every step that block moves which leaves the busier of both servers the least work: few blocks move, hot ones.
    """
    found, busy = list(owners), loads.busy_seconds(owners)
    for _ in range(len(owners)):  # every step lowers the larger of two loads
        hot = max(busy, key=lambda n: busy[n])
        choices = [
            (max(busy[hot] - rows * loads.row_seconds[hot], busy[to] + rows * loads.row_seconds[to]), block, to)
            for block, (rows, owner) in enumerate(zip(loads.rows, found, strict=True))
            if owner == hot and rows > 0
            for to in busy
            if to != hot
        ]
        least, block, to = min(choices, default=(busy[hot], 0, hot))
        if least >= (1 - _WORTH) * busy[hot]:
            break
        found[block] = to
        busy = loads.busy_seconds(tuple(found))
    return tuple(found)


_WORTH = 0.01  # of the busiest server's seconds: what the move of a block must save


def cycle_seconds(loads: BlockLoads, owners: tuple[str, ...], *, waits: bool) -> float:
    """Predicted seconds per mini-batch of the whole job: workers queue for the busiest server or, where each `waits` for all
    others, pull at once."""
    service = max(loads.busy_seconds(owners).values())
    compute, alone = np.array(loads.compute_seconds), np.array(loads.alone_seconds)
    if waits:
        return float((compute + np.maximum(alone, len(compute) * service)).max() / len(compute))
    pulls = pulls_in_queue(np.ones((1, len(compute))), compute, alone, np.array([service]))[0]
    return float(1.0 / np.sum(1.0 / (compute + pulls)))
