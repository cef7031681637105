"""Cruise's cost model for embedding tables: it places single blocks, and leaves roles and data as they are.

The paper's model divides a model evenly: a server's part of a pull is its share of the bytes (Eq. 4). Where mini-batches
touch few rows, some of them much more often than others, what a server has to do per mini-batch depends on which blocks it
holds. So here server j takes sum_b l_b c_j seconds per mini-batch, over its blocks b, where l_b is the number of rows of
block b that a mini-batch touches, and c_j the seconds of the server for each of them; both are measured (`Window.blocks`,
`Window.servers`). A cycle is as in `tuners.cruise.queueing`, with the busiest server as the one that workers queue for.

Where `replicas` and `hot_blocks` are free, it also chooses how many servers hold how many of the hottest blocks. Each of the
holders sends its part of the pulls; all of them receive and apply every push, and all but the last one send it on. So copies
pay where pulls take longer than pushes; the prediction counts all of this as work of the busiest server.

This is our extension; the paper has dense models only. As in the paper, blocks move by migration, and only where the
predicted time of an epoch falls by more than `gain`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.cruise.queueing import pulls_in_queue
from tuners.reasons import counted
from tuners.settings import Choice, Integer

__all__ = ["BlockLoads", "balanced", "cycle_seconds", "measured", "moves", "place_blocks"]


class BlockLoads(NamedTuple):
    """What a mini-batch asks of the servers, as measured."""

    rows: tuple[float, ...]  # that it touches in each block
    row_seconds: Mapping[str, float]  # of each server, for a row that is pulled and pushed
    compute_seconds: tuple[float, ...]  # of each worker's mini-batch
    alone_seconds: tuple[float, ...]  # for which each worker's own NIC takes, for the pull and the push
    pull_part: float = 0.5  # of `row_seconds`, what the pull takes
    passed_on_part: float = 0.5  # as a part of `row_seconds`, what it takes to send a pushed row on to another server

    def busy_seconds(self, owners: tuple[str, ...]) -> dict[str, float]:
        """Seconds per mini-batch of each server, where these `owners` hold the blocks."""
        found = dict.fromkeys(self.row_seconds, 0.0)
        for rows, owner in zip(self.rows, owners, strict=True):
            found[owner] += rows * self.row_seconds[owner]
        return found

    def chained_seconds(self, holders: Sequence[tuple[str, ...]]) -> dict[str, float]:
        """Seconds per mini-batch of each server, where several servers may hold a block (`Setting.holders`)."""
        found = dict.fromkeys(self.row_seconds, 0.0)
        for rows, chain in zip(self.rows, holders, strict=True):
            for server, weight in zip(chain, _weights(chain, self.pull_part, self.passed_on_part), strict=True):
                found[server] += rows * weight * self.row_seconds[server]
        return found


def _weights(chain: tuple[str, ...], pull_part: float, passed_on_part: float) -> tuple[float, ...]:
    """What a row of a block costs each of its holders, as a part of what it costs a server that is alone."""
    if len(chain) == 1:
        return (1.0,)
    last = pull_part / len(chain) + 1 - pull_part
    return (*[last + passed_on_part] * (len(chain) - 1), last)


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
        waits = current.waits_for_all
        wanted, after = _with_copies(job, loads, current, balanced(loads, owners), waits=waits)
        before = _cycle_of(job, loads, current, waits=waits)
        if after >= (1 - gain) * before:
            continue
        moved = sum(a != b for a, b in zip(owners, wanted.block_owners, strict=True))
        copies = "" if wanted.replicas == 1 else f", {wanted.hot_blocks} are held by {wanted.replicas} servers"
        try:
            yield from Reconfigure(
                wanted,
                method=job.method("migrate"),
                reason=f"{counted(moved, 'block')} moved{copies}: {after:.3g} s per mini-batch instead of {before:.3g}",
            )
        except Rejected:
            return
        # These pushes, and those of the move, were served by old and new owners.
        yield from Run(clocks=len(current.workers))


def measured(job: Job, setting: Setting, seen: Window, others: Sequence[str] = ()) -> BlockLoads | None:
    """What `seen` says of the blocks under `setting`; None where it has no pushes of every worker, or servers are not
    measured. With `others`, machines that are no servers yet."""
    workers = {w.node: w for w in seen.workers}
    if not (seen.blocks and seen.servers and seen.clocks) or any(
        w not in workers or not workers[w].pushes for w in setting.workers
    ):
        return None
    rows = tuple(count / seen.clocks for count in seen.blocks)
    chains = setting.holders(job.blocks, job.hottest)
    parts = _parts(seen, chains)
    held = dict.fromkeys(setting.servers, 0.0)
    for count, chain in zip(rows, chains, strict=True):
        for server, weight in zip(chain, _weights(chain, *parts), strict=True):
            held[server] += count * seen.clocks * weight
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
        {n: known.get(n, scale / nics[n]) for n in (*setting.servers, *others)},
        tuple(workers[w].compute_seconds / workers[w].pushes for w in setting.workers),
        tuple(size / nics[w] for w in setting.workers),
        *parts,
    )


def _parts(seen: Window, chains: Sequence[tuple[str, ...]]) -> tuple[float, float]:
    """`BlockLoads.pull_part` and `BlockLoads.passed_on_part` of a window, by the bytes and seconds of all servers."""
    sent, received = sum(s.pull_bytes for s in seen.servers), sum(s.push_bytes for s in seen.servers)
    if not (sent and received):
        return 0.5, 0.5
    applied = sum(rows * len(chain) for rows, chain in zip(seen.blocks, chains, strict=True))
    passed_on = sum(rows * (len(chain) - 1) for rows, chain in zip(seen.blocks, chains, strict=True))
    push_bytes = received / applied  # of a row
    pull_bytes = max(sent - push_bytes * passed_on, 0.0) / sum(seen.blocks)
    out = sum(s.pull_seconds for s in seen.servers) / sent  # seconds per byte
    into = sum(s.push_seconds for s in seen.servers) / received
    whole = pull_bytes * out + push_bytes * into
    return pull_bytes * out / whole, push_bytes * out / whole


def _with_copies(
    job: Job, loads: BlockLoads, setting: Setting, owners: tuple[str, ...], *, waits: bool
) -> tuple[Setting, float]:
    """`setting` with these owners of the blocks, and with copies of hot blocks as far as they are free and pay; and the
    seconds per mini-batch that this is predicted to take."""
    found = replace(setting, block_owners=owners, model_shares=())
    least = _cycle_of(job, loads, found, waits=waits)
    for replicas in _options(job, "replicas", setting.replicas):
        for hot in _options(job, "hot_blocks", setting.hot_blocks) if replicas <= len(setting.servers) else ():
            other = replace(found, replicas=replicas, hot_blocks=hot)
            seconds = _cycle_of(job, loads, other, waits=waits)
            if seconds < (1 - _WORTH) * least:
                found, least = other, seconds
    return found, least


def _options(job: Job, name: str, value: int) -> Sequence[int]:
    """The values of that knob from the smallest on; where it is held, `value`."""
    knob = job.space.knob(name)
    if isinstance(knob, Integer):
        return range(knob.low, knob.high + 1)
    return sorted(int(option) for option in knob.options) if isinstance(knob, Choice) else (value,)


def _cycle_of(job: Job, loads: BlockLoads, setting: Setting, *, waits: bool) -> float:
    if setting.replicas == 1 or not setting.hot_blocks:
        return cycle_seconds(loads, setting.owners(job.blocks), waits=waits)
    return _cycle(loads, loads.chained_seconds(setting.holders(job.blocks, job.hottest)), waits=waits)


def balanced(loads: BlockLoads, owners: tuple[str, ...]) -> tuple[str, ...]:
    """Owners of the blocks after all `moves`."""
    return list(moves(loads, owners))[-1]


_WORTH = 0.01  # of the busiest server's seconds: what the move of a block must save


def moves(loads: BlockLoads, owners: tuple[str, ...], worth: float = _WORTH) -> Iterator[tuple[str, ...]]:
    """Owners of the blocks, first `owners`, as hot blocks leave the busiest server one by one, while that makes it less busy
    by the share `worth`.

    In every step that block moves which leaves the busier of both servers the least work: few blocks move, hot ones.
    """
    yield owners
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
        if least >= (1 - worth) * busy[hot]:
            break
        found[block] = to
        busy = loads.busy_seconds(tuple(found))
        yield tuple(found)


def cycle_seconds(loads: BlockLoads, owners: tuple[str, ...], *, waits: bool) -> float:
    """Predicted seconds per mini-batch of the whole job: workers queue for the busiest server or, where each `waits` for all
    others, pull at once."""
    return _cycle(loads, loads.busy_seconds(owners), waits=waits)


def _cycle(loads: BlockLoads, busy: Mapping[str, float], *, waits: bool) -> float:
    service = max(busy.values())
    compute, alone = np.array(loads.compute_seconds), np.array(loads.alone_seconds)
    if waits:
        return float((compute + np.maximum(alone, len(compute) * service)).max() / len(compute))
    pulls = pulls_in_queue(np.ones((1, len(compute))), compute, alone, np.array([service]))[0]
    return float(1.0 / np.sum(1.0 / (compute + pulls)))
