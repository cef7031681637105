"""What families have in common: machines, their troubles, and about how long a mini-batch takes on them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from harness.families.lot import Lot, rounded
from simulators.cluster.profiles import profile

__all__ = [
    "Machines",
    "drawn_demand",
    "drawn_machines",
    "episodes",
    "fitted",
    "jitter",
    "losses",
    "mini_batch_seconds",
    "recorded",
    "stragglers",
]

_TYPES = ("edge-2core", "edge-4core", "m4.large", "m4.xlarge", "r4.xlarge", "r4.4xlarge", "server-16core", "c4.2xlarge")


@cache
def fitted() -> dict[str, Any]:
    """The ranges of `fitted.toml`, which recordings give."""
    return tomllib.loads((files("harness.families") / "fitted.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Machines:
    """The nodes of a cluster, named n0, n1, ..."""

    types: tuple[str, ...]  # of each node, in order

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(len(self.types)))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The value of `nodes` under [cluster]."""
        found: list[dict[str, Any]] = []
        for kind in self.types:
            if found and found[-1]["type"] == kind:
                found[-1]["count"] += 1
            else:
                found.append({"type": kind, "count": 1})
        return found

    def speed(self, node: int) -> float:
        """Speed of all cores of a node together, in reference cores."""
        kind = profile(self.types[node])
        return kind.cores * sum(d.speed for d in kind.devices)


def drawn_machines(lot: Lot, counts: Sequence[int], kinds: Sequence[str] = _TYPES, mixed: float = 0.5) -> Machines:
    """A cluster of one type of machine or, with probability `mixed`, of two; the second in a smaller number."""
    count, first = lot.among(counts), lot.among(kinds)
    others = [k for k in kinds if k != first]
    if not lot.chance(mixed) or not others:
        return Machines((first,) * count)
    second = lot.whole(1, max(1, count // 2))
    return Machines((first,) * (count - second) + (lot.among(others),) * second)


def drawn_demand(
    lot: Lot, machines: Machines, cycle_seconds: float, batch: int, ratio: tuple[float, float] = (0.33, 10.0)
) -> dict[str, float]:
    """A job whose mini-batch of `batch` takes about `cycle_seconds` on the first machine: computing, a pull and a push.

    `ratio` is the range of the time to compute over the time to transfer: from a third to ten.
    """
    transfer = cycle_seconds / (1 + lot.log(*ratio))
    compute = cycle_seconds - transfer
    nic = profile(machines.types[0]).nic_bytes_per_second
    return {
        "model_bytes": rounded(transfer / 2 * nic),
        "fixed_seconds": rounded(compute * lot.among((0.02, 0.05, 0.1))),
        "sample_seconds": rounded(compute * machines.speed(0) / batch),
        "serial_fraction": lot.among((0.0, 0.05, 0.1)),
        "message_seconds": lot.among((0.0, 0.001, 0.01)),
    }


def mini_batch_seconds(machines: Machines, workers: Sequence[int], demand: Mapping[str, float], batch: int) -> float:
    """About how long a worker takes for a mini-batch: computing, and one pull and push through its NIC."""
    each = []
    for node in workers:
        compute = demand.get("fixed_seconds", 0.0) + batch * demand["sample_seconds"] / machines.speed(node)
        each.append(compute + 2 * demand["model_bytes"] / profile(machines.types[node]).nic_bytes_per_second)
    return sum(each) / len(each)


def jitter(lot: Lot) -> float:
    """Noise of compute times, as recordings have it."""
    return lot.log(*fitted()["jitter"])


def stragglers(lot: Lot, workers: Sequence[str], compute_seconds: float, most: float = 0.35) -> dict[str, Any]:
    """Some of the workers sleep in every mini-batch, so that they take as much longer as recorded stragglers do."""
    count = lot.whole(1, max(1, int(most * len(workers))))
    mean = rounded((lot.log(*fitted()["straggler_factor"]) - 1) * compute_seconds)
    return {"nodes": list(lot.some(workers, count)), "mean_seconds": mean, "sd_seconds": rounded(mean / 3)}


def episodes(lot: Lot, nodes: Sequence[str], span_seconds: float) -> list[dict[str, Any]]:
    """Slow episodes that repeat, of some nodes, in a job that takes about `span_seconds`."""
    low, high = fitted()["episode_share"]
    found = []
    for node in lot.some(nodes, lot.whole(1, max(1, len(nodes) // 3))):
        every = rounded(span_seconds * lot.share(0.1, 0.6))
        found.append(
            {
                "node": node,
                "start_seconds": rounded(every * lot.share(0.1, 0.9)),
                "seconds": rounded(every * lot.log(max(low, 0.02), 5 * high)),
                "factor": lot.log(*fitted()["episode_factor"]),
                "every_seconds": every,
            }
        )
    return found


def recorded(lot: Lot) -> dict[str, dict[str, Any]]:
    """One or two recordings that come with the harness, by role. `faster` lets a job of minutes meet what clusters meet in
    hours (spot instances), minutes (throttled networks) or weeks (faults)."""
    slow = lot.among(("AR", "SE", "ST"))
    spot, rate, faults = lot.log(2.0, 20.0), lot.log(3.0, 30.0), lot.log(5e3, 5e4)
    nodes: dict[str, Any] = {"trace": "shipped:bamboo-spot", "faster": spot}
    if lot.chance(0.5):
        nodes = {"trace": "shipped:infinitehbd-faults", "faster": faults}
    known: dict[str, dict[str, Any]] = {
        "compute": {"trace": "shipped:bytedance-straggler", "runs": slow},
        "bandwidth": {"trace": "shipped:uta-ec2-tokenbucket", "faster": rate},
        "nodes": nodes,
    }
    return {role: known[role] for role in lot.some(tuple(known), lot.whole(1, 2))}


def losses(lot: Lot, nodes: Sequence[str], span_seconds: float, most: int) -> list[dict[str, Any]]:
    """Nodes leave, with notice or without, alone or several at once; at most `most` of them, each once."""
    left, found = list(lot.some(nodes, most)), []
    while left:
        count = 1
        while count < len(left) and lot.chance(1 - 1 / fitted()["nodes_per_loss"]):
            count += 1
        gone, left = left[:count], left[count:]
        seconds = rounded(span_seconds * lot.share(0.1, 0.9))
        if lot.chance(0.5):
            found.append({"nodes": gone, "seconds": seconds, "event": "fails"})
        else:
            notice = rounded(span_seconds * 0.02)
            found.append({"nodes": gone, "seconds": seconds, "event": "leaves", "notice_seconds": notice})
    return sorted(found, key=lambda change: float(change["seconds"]))
