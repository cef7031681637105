"""Who holds how much: blocks divided by shares, the moves between two divisions, and what survivors of a loss take over.

Pure functions, the same for simulated and live reconfigurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

from tuners.actions import Setting

__all__ = ["block_counts", "copies_of_blocks", "moves", "moves_of_blocks", "survivors"]


def block_counts(members: tuple[str, ...], shares: tuple[float, ...], blocks: int) -> dict[str, int]:
    """`blocks` divided among members by largest remainder; of equal remainders the first member gets more."""
    exact = [share * blocks for share in shares]
    counts = [math.floor(x + 1e-9) for x in exact]  # 0.29 * 100 is 28.999999999999996
    order = sorted(range(len(members)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: blocks - sum(counts)]:
        counts[i] += 1
    return dict(zip(members, counts, strict=True))


def moves(old: Mapping[str, int], new: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(source, target, blocks) that turn the counts `old` into `new`: from the largest surplus to the largest deficit, with
    two heaps, until no surplus is left (Cruise, Section IV-A.3)."""
    names = sorted(old.keys() | new.keys())
    difference = {n: old.get(n, 0) - new.get(n, 0) for n in names}
    surplus = [(-d, n) for n, d in difference.items() if d > 0]
    deficit = [(d, n) for n, d in difference.items() if d < 0]
    heapify(surplus)
    heapify(deficit)
    found = []
    while surplus and surplus[0][0] and deficit and deficit[0][0]:
        (have, source), (lack, target) = surplus[0], deficit[0]
        count = min(-have, -lack)
        found.append((source, target, count))
        heapreplace(surplus, (have + count, source))
        heapreplace(deficit, (lack + count, target))
    return found


def moves_of_blocks(old: tuple[str, ...], new: tuple[str, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(source, target, blocks) that turn the owners `old` of all blocks into `new`, sorted by source and target."""
    return _by_pair((*ends, block) for block, ends in enumerate(zip(old, new, strict=True)) if ends[0] != ends[1])


def copies_of_blocks(
    old: Sequence[tuple[str, ...]], new: Sequence[tuple[str, ...]]
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(source, target, blocks) that turn the holders `old` of all blocks into `new`, apart from what `moves_of_blocks` moves
    to a new owner: the old owner sends a copy to each server that has none."""
    return _by_pair(
        (was[0], server, block)
        for block, (was, (_, *copies)) in enumerate(zip(old, new, strict=True))
        for server in copies
        if server not in was
    )


def _by_pair(moved: Iterable[tuple[str, str, int]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(source, target, blocks) of every pair, sorted, from (source, target, block) of every block that is moved."""
    found: dict[tuple[str, str], list[int]] = {}
    for source, target, block in moved:
        found.setdefault((source, target), []).append(block)
    return [(source, target, tuple(blocks)) for (source, target), blocks in sorted(found.items())]


def survivors(
    setting: Setting, present: frozenset[str], nodes: tuple[str, ...], able: frozenset[str] | None = None
) -> Setting | None:
    """`setting` without the nodes that are not `present`, shares in proportion; None where too few are left to go on.

    A role without survivors goes to the first of `nodes` that is present and idle, or else to a node of the other role, if
    that has two, or if nodes of `setting` have both roles. Only nodes that are `able` to compute (None: all) become workers.
    """
    workers = tuple(w for w in setting.workers if w in present)
    servers = tuple(s for s in setting.servers if s in present)
    idle = [n for n in nodes if n in present and n not in (*workers, *servers)]
    there = {*idle, *workers, *servers}
    if not (workers and servers) and len(there) < 2:
        if not there or not set(setting.workers) & set(setting.servers) or (able is not None and not there <= able):
            return None
        workers = servers = tuple(there)
    if not workers:
        computing = [n for n in (*idle, *servers[1:], *servers[:1]) if able is None or n in able]
        if not computing:
            return None
        workers = (computing[0],)
        servers = tuple(s for s in servers if s not in workers)
        idle = [n for n in idle if n not in workers]
    if not servers:
        servers = (idle.pop(0) if idle else workers[1],)
        workers = tuple(w for w in workers if w not in servers)
    return setting.on(workers, servers)
