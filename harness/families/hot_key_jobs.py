"""The family `hotkeys`: embedding tables some of whose rows are hot, and a poor placement of their blocks.

Rows are drawn by a Zipf law, whose exponent lies about that of recorded look-ups. The start places ranges of rows, evenly or
as in a job that servers have joined of late, so that some servers have most of the work. Single blocks can be moved; mostly
all of them can be hashed, and workers can keep stale copies of popular rows; an idle machine can become a server.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.families.draft import Draft
from harness.families.ingredients import jitter
from harness.families.lot import Lot, rounded
from simulators.cluster.profiles import profile
from tuners.actions import Scalar

__all__ = ["hotkeys"]

_TABLES, _BLOCKS = 8, 128
_BATCH = 64


def hotkeys(lot: Lot) -> Draft:
    """One member of `hotkeys`."""
    workers, worker_type = lot.whole(4, 8), lot.among(("r4.xlarge", "m4.xlarge", "c4.2xlarge"))
    count, server_type = lot.whole(2, 5), lot.among(("m4.large", "m4.large", "m4.xlarge"))
    spare = lot.chance(0.4)
    largest, exponent = lot.among((16_384, 32_768, 65_536)), lot.share(0.75, 1.15)
    rows = sum(largest >> i for i in range(_TABLES))
    touched = _touched(largest, exponent)
    # `load`: the bytes that all workers together ask for, over those that servers can send if they divide the work evenly.
    load, compute = lot.log(0.5, 4.0), lot.log(0.1, 0.6)
    row_bytes = rounded(load * compute * count * profile(server_type).nic_bytes_per_second / (workers * touched.sum()))
    servers, names = [f"s{i}" for i in range(count)], [*(f"s{i}" for i in range(count)), *(["b0"] if spare else [])]
    start: dict[str, Any] = {
        "workers": [f"n{i}" for i in range(workers)],
        "servers": servers,
        "policy": lot.among(("asp", "asp", "ssp")),
        "staleness": 4,
        "batch_size": _BATCH,
        "learning_rate": lot.among((0.3, 0.5, 0.8)),
        "placement": "range",
    }
    if lot.chance(0.5):
        start["model_shares"] = _grown(count, lot.whole(1, max(1, count // 2)))
    free: dict[str, Any] = {"block/*": {"choice": names}}
    if lot.chance(0.6):
        free["placement"] = {"choice": ["range", "hash"]}
    if lot.chance(0.6):
        free |= {"cache_rows": {"choice": [0, largest // 128, largest // 16]}, "cache_clocks": {"integer": [0, 64]}}
    if spare:
        free["role/*"] = {"choice": ["worker", "server", "idle"]}
    demand = {
        "model_bytes": rounded(rows * row_bytes, 3),
        "sample_seconds": rounded(0.8 * compute * profile(worker_type).cores / _BATCH),
        "fixed_seconds": rounded(0.2 * compute),
        "apply_seconds": rounded(rows * row_bytes / 2e9),
    }
    groups = [{"type": worker_type, "count": workers}, {"type": server_type, "count": count, "prefix": "s"}]
    groups += [{"type": "r4.4xlarge", "count": 1, "prefix": "b"}] if spare else []
    return Draft(
        about=(),
        summary=f"Clicks on embedding tables with hot rows, {workers} workers, {count} servers: places of blocks are free.",
        cluster={"nodes": groups, "discipline": "maxmin", "latency_seconds": lot.among((0.0, 0.001, 0.005))},
        workload={"name": "clicks-fm", "overrides": {"largest": largest, "popularity": exponent, "signal": 6.0, **demand}},
        start=start,
        free=free,
        conditions={"jitter": jitter(lot)},
        metric="loss",
        good=_good(touched, servers, free, largest),
        pushes=lot.whole(800, 1600),
        check_clocks=50,
        least_fall=0.93,
        slack=lot.among((4.0, 6.0)),
        margin=1.3,
    )


def _grown(count: int, old: int) -> list[float]:
    """Shares of the model in a job that had `old` servers and got others, which have 2 % each."""
    new = 0.02
    return [rounded((1 - new * (count - old)) / old, 6)] * old + [new] * (count - old)


def _touched(largest: int, exponent: float) -> NDArray[np.float64]:
    """The expected number of distinct rows that one mini-batch touches in each block, [blocks]."""
    weights = [np.arange(1, (largest >> i) + 1, dtype=float) ** -exponent for i in range(_TABLES)]
    each = np.concatenate([1 - (1 - w / w.sum()) ** _BATCH for w in weights])
    size = -(-len(each) // _BLOCKS)
    found: NDArray[np.float64] = np.add.reduceat(each, np.arange(0, len(each), size))
    return np.append(found, np.zeros(_BLOCKS - len(found)))


def _good(
    touched: NDArray[np.float64], servers: list[str], free: dict[str, Any], largest: int
) -> tuple[dict[str, Scalar], ...]:
    """Blocks placed by their expected work, each on the server that has least so far; a hash; the same with copies."""
    work, owner = dict.fromkeys(servers, 0.0), dict[int, str]()
    for block in np.argsort(-np.round(touched, 6), kind="stable"):
        owner[int(block)] = min(servers, key=work.__getitem__)
        work[owner[int(block)]] += float(touched[block])
    found: list[dict[str, Scalar]] = [{f"block/{block}": owner[block] for block in range(_BLOCKS)}]
    if "placement" in free:
        found.append({"placement": "hash"})
    if "cache_rows" in free:
        found += [values | {"cache_rows": largest // 16, "cache_clocks": clocks} for values in found for clocks in (4, 16)]
    return tuple(found)
