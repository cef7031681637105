"""Jobs of which only the time counts, and the two families of them: `placement` and `elastic`.

* `placement`: which machines are workers and which servers. In a third of the members one number divides equal machines; in
  a third the role of every machine is free; in a third the load of every device, too, in synchronous training.
* `elastic`: roles are free, and machines come, go with or without notice, and come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.families.draft import Draft
from harness.families.ingredients import (
    Machines,
    drawn_demand,
    drawn_machines,
    episodes,
    jitter,
    losses,
    mini_batch_seconds,
    stragglers,
)
from harness.families.lot import Lot, rounded
from tuners.actions import Scalar

__all__ = ["elastic", "placement"]

_PUSHES = 600  # of the fastest reference setting
_EQUAL = ("m4.large", "m4.xlarge", "r4.xlarge", "r4.4xlarge", "server-16core", "c4.2xlarge")


def _drawn_demand(lot: Lot, machines: Machines, workers: int, batch: int) -> dict[str, float]:
    """A job for about `workers`, whose reference run takes 900 to 3,600 s; some push less than they pull."""
    demand = drawn_demand(lot, machines, lot.log(900.0, 3600.0) * workers / _PUSHES, batch)
    return demand if lot.chance(0.7) else demand | {"push_bytes": rounded(demand["model_bytes"] / 10)}


def _workload(demand: Mapping[str, float], batch: int) -> dict[str, Any]:
    # 2,000 mini-batches of data: a move of all of it takes as long as some of them.
    return {"name": "cruise-nmf", "overrides": {"samples": 2000 * batch, "batch_size": batch, **demand}}


def placement(lot: Lot) -> Draft:
    """One member of `placement`."""
    return lot.among((_split, _roles, _loads))(lot)


def _troubles(lot: Lot, names: tuple[str, ...], compute_seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"jitter": jitter(lot)}
    if lot.chance(0.25):
        found["stragglers"] = stragglers(lot, names, compute_seconds, most=0.15)
    return found


def _split(lot: Lot) -> Draft:
    """Equal machines: the number of workers is free."""
    machines, batch = drawn_machines(lot, (8, 12, 16, 24, 32), _EQUAL, mixed=0.0), 1000
    k, demand = len(machines.types), _drawn_demand(lot, machines, len(machines.types) // 2, batch)
    count = lot.whole(max(1, k // 8), k // 3) if lot.chance(0.6) else lot.whole(k - max(1, k // 6), k - 1)
    compute = batch * demand["sample_seconds"] / machines.speed(0)
    counts = sorted({max(1, min(k - 1, round(k * s))) for s in (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)})
    return Draft(
        about=(),
        summary=f"A job on {k} equal machines, timing only: the split between workers and servers is free.",
        cluster={"nodes": machines.groups, "discipline": lot.among(("maxmin", "fifo"))},
        workload=_workload(demand, batch),
        start={"worker_count": count, "policy": lot.among(("asp", "bsp")), "batch_size": batch},
        free={"worker_count": {"integer": [1, k - 1]}},
        conditions=_troubles(lot, machines.names, compute),
        metric="clocks",
        good=tuple({"worker_count": n} for n in counts),
        pushes=_PUSHES,
        slack=lot.among((3.0, 4.0)),
        margin=1.3,
    )


def _roles(lot: Lot) -> Draft:
    """Machines of two types: the role of each is free."""
    machines, batch = drawn_machines(lot, (6, 8, 10, 12, 16), _EQUAL, mixed=1.0), 1000
    k, names, demand = len(machines.types), machines.names, _drawn_demand(lot, machines, len(machines.types) // 2, batch)
    workers = lot.some(range(k), lot.whole(1, k - 1))
    compute = batch * demand["sample_seconds"] / machines.speed(0)
    return Draft(
        about=(),
        summary=f"A job on {k} machines of two types, timing only: the role of every machine is free.",
        cluster={"nodes": machines.groups, "discipline": lot.among(("maxmin", "fifo"))},
        workload=_workload(demand, batch),
        start=_start(names, workers, batch, "asp"),
        free={"role/*": {"choice": ["worker", "server"]}},
        conditions=_troubles(lot, names, compute),
        metric="clocks",
        good=_by_speed(machines, range(k)),
        pushes=_PUSHES,
        slack=lot.among((3.0, 4.0)),
        margin=1.3,
    )


def _start(names: tuple[str, ...], workers: tuple[int, ...], batch: int, policy: str) -> dict[str, Any]:
    return {
        "workers": [names[i] for i in workers],
        "servers": [n for i, n in enumerate(names) if i not in workers],
        "policy": policy,
        "batch_size": batch,
    }


def _by_speed(machines: Machines, nodes: range) -> tuple[dict[str, Scalar], ...]:
    """Roles in which the faster machines are workers, and in which the slower ones are, in several numbers."""
    fast = sorted(nodes, key=lambda i: (-machines.speed(i), i))
    found: list[dict[str, Scalar]] = []
    for share in (0.3, 0.5, 0.65, 0.8):
        count = max(1, min(len(fast) - 1, round(share * len(fast))))
        for order in (fast, fast[::-1]):
            made: dict[str, Scalar] = {f"role/n{i}": "worker" if i in order[:count] else "server" for i in nodes}
            found += [] if made in found else [made]
    return tuple(found)


def _loads(lot: Lot) -> Draft:
    """Machines of two types: roles, and the samples of every device, are free."""
    kinds = ("c4.2xlarge", "c4.4xlarge", "c4.8xlarge", "m4.large", "m4.xlarge", "server-16core")
    machines = drawn_machines(lot, (4, 6, 8, 10), kinds, mixed=1.0)
    k, names, batch = len(machines.types), machines.names, lot.among((64, 256, 1024))
    demand = _drawn_demand(lot, machines, k, max(1, batch // k))
    workers = lot.some(range(k), lot.whole(2, k))
    servers = workers if lot.chance(0.5) else lot.some(range(k), lot.whole(1, k))
    speeds = [machines.speed(i) for i in range(k)]
    weights = {f"load/n{i}/0": rounded(s / max(speeds)) for i, s in enumerate(speeds)}
    fast = sorted(range(k), key=lambda i: (-speeds[i], i))
    good: list[dict[str, Scalar]] = []
    for used in sorted({max(1, k // 3), max(1, k // 2), max(1, 3 * k // 4), k}):
        for serving in (fast[:used], range(k)):
            roles: dict[str, Scalar] = {}
            for i in range(k):
                works, serves = i in fast[:used], i in serving
                roles[f"role/n{i}"] = "both" if works and serves else "worker" if works else "server" if serves else "idle"
            made = roles | {name: w if i in fast[:used] else 0.0 for i, (name, w) in enumerate(weights.items())}
            good += [] if made in good else [made]
    return Draft(
        about=(),
        summary=f"Synchronous training in batches of {batch} on {k} machines, timing only: roles and loads are free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin"},
        workload=_workload(demand, batch),
        start={
            "workers": [names[i] for i in workers],
            "servers": [names[i] for i in servers],
            "global_batch_size": batch,
            "policy": "bsp",
        },
        free={"role/*": {"choice": ["idle", "worker", "server", "both"]}, "load/*": {"real": [0.0, 1.0]}},
        conditions={"jitter": lot.log(0.015, 0.1)},
        metric="samples",
        good=tuple(good),
        pushes=_PUSHES,
        slack=lot.among((3.0, 4.0)),
        margin=1.3,
    )


def elastic(lot: Lot) -> Draft:
    """One member of `elastic`."""
    machines, batch = drawn_machines(lot, (8, 10, 12, 16), _EQUAL, mixed=0.4), 1000
    k, names, demand = len(machines.types), machines.names, _drawn_demand(lot, machines, len(machines.types) // 2, batch)
    late = lot.whole(0, k // 3)  # number of workers that join later
    here = k - late
    workers = lot.some(range(here), lot.whole(1, here - 1))
    span = 2 * _PUSHES * mini_batch_seconds(machines, range(here), demand, batch) / here
    changes: list[dict[str, Any]] = []
    if late:
        joined = rounded(span * lot.share(0.05, 0.4))
        changes.append({"nodes": list(names[here:]), "seconds": joined, "event": "joins"})
        if lot.chance(0.5):
            gone = rounded(joined + span * lot.share(0.2, 0.6))
            changes.append(
                {"nodes": list(names[here:]), "seconds": gone, "event": "leaves", "notice_seconds": rounded(span * 0.02)}
            )
    if not late or lot.chance(0.7):
        changes += losses(lot, names[:here], span, most=lot.whole(1, max(1, here // 3)))
    changes.sort(key=lambda change: float(change["seconds"]))
    conditions: dict[str, Any] = {"jitter": jitter(lot)}
    if lot.chance(0.3):
        conditions["episodes"] = episodes(lot, names[:here], span)
    start = _start(names[:here], workers, batch, "asp")
    return Draft(
        about=(),
        summary=f"A job on {k} machines that come, go and fail, timing only: the role of every machine is free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin"},
        workload=_workload(demand, batch),
        start=start,
        free={"role/*": {"choice": ["worker", "server", "idle"]}},
        conditions=conditions | {"nodes": changes},
        metric="clocks",
        good=_by_speed(machines, range(here)),
        pushes=_PUSHES,
        slack=lot.among((3.0, 4.0)),
        margin=1.3,
    )
