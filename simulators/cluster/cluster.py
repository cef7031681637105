"""A cluster: its nodes, and how their network shares bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from simulators.cluster.profiles import NodeType
from tuners.prices import Prices
from tuners.settings import Node

__all__ = ["Cluster", "Discipline"]

Discipline = Literal["maxmin", "uneven", "fifo", "serial"]
"""How transfers share a link: evenly; unevenly, as over TCP, pulls with random weights and pushes as they arrive; first
come, first served, each way; or, `serial`, in one queue of each server for pulls, pushes and updates: one at a time."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines and how their network shares bandwidth. Raises ValueError where that is no cluster."""

    nodes: tuple[tuple[str, NodeType], ...]  # (name, type)
    discipline: Discipline = "maxmin"
    latency_seconds: float = 0.0  # one way, once per pull and per push
    control_queue: float = 0.0  # share of the pushes queued at the servers' links that a pull's request waits for: 0 to 1
    snapshot_clocks: int = 0  # pushes from one snapshot of the servers to the next, at least 4 per worker; 0: none is taken
    independent_flows: bool = False  # where servers are unlike, each flow of a transfer ends by itself; else all together
    uneven_bytes: float = 0.0  # with "uneven": flows of so many bytes share at random, larger ones more evenly; 0: all do
    switch_bytes_per_second: float = 0.0  # of a switch that all transfers between nodes pass, each way; 0: none is a limit
    switch_both_ways: bool = False  # pulls and pushes share the switch; else each way has so much
    server_threads: int = 1  # of a server's process: each serves one transfer, or one update, at a time

    def __post_init__(self) -> None:
        names = [name for name, _ in self.nodes]
        if len(names) < 1 or len(set(names)) != len(names):
            raise ValueError(f"Cannot make a cluster of nodes {names}: give at least one, each under a name of its own.")
        if self.discipline not in get_args(Discipline):
            raise ValueError(f"Cannot share a network by {self.discipline!r}: choose maxmin, uneven, fifo or serial.")
        if not 0 <= self.latency_seconds < float("inf"):
            raise ValueError(f"Cannot use latency_seconds = {self.latency_seconds}: it must be finite and not negative.")
        if not 0 <= self.control_queue <= 1:
            raise ValueError(f"Cannot use control_queue = {self.control_queue}: it is a share, from 0 to 1.")
        if not 0 <= self.uneven_bytes < float("inf"):
            raise ValueError(f"Cannot use uneven_bytes = {self.uneven_bytes}: it must be finite and not negative.")
        if self.uneven_bytes and self.discipline != "uneven":
            raise ValueError('Cannot use uneven_bytes where links are shared otherwise: set discipline = "uneven".')
        if self.control_queue and self.discipline == "serial":
            raise ValueError("Cannot use control_queue where servers are serial: requests wait in their one queue as it is.")
        if not 0 <= self.switch_bytes_per_second < float("inf"):
            raise ValueError(
                f"Cannot use switch_bytes_per_second = {self.switch_bytes_per_second}: it must be finite and not negative."
            )
        if self.switch_both_ways and not self.switch_bytes_per_second:
            raise ValueError("Cannot use switch_both_ways without a switch: give switch_bytes_per_second.")
        if self.switch_both_ways and self.control_queue:
            raise ValueError(
                "Cannot use control_queue where both ways share a switch: no rule says behind what requests wait."
            )
        if self.server_threads < 1:
            raise ValueError(f"Cannot use server_threads = {self.server_threads}: a server has at least one.")
        if self.snapshot_clocks < 0:
            raise ValueError(f"Cannot use snapshot_clocks = {self.snapshot_clocks}: it is a number of pushes; 0 takes none.")

    @property
    def public_nodes(self) -> tuple[Node, ...]:
        """The machines, as tuners see them."""
        return tuple(
            Node(n, kind.name, kind.cores, tuple(d.kind for d in kind.devices), kind.nic_bytes_per_second, kind.memory_bytes)
            for n, kind in self.nodes
        )

    @property
    def prices(self) -> Prices:
        """The price by the hour of every node whose price is known."""
        return Prices({name: kind.usd_per_hour for name, kind in self.nodes if kind.usd_per_hour is not None})
