"""Node types: what a machine can compute and move, from `profiles.toml` or a file of the user's own."""

from __future__ import annotations

import math

import msgspec

__all__ = ["Device", "NodeType"]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that computes gradients."""

    kind: str  # "cpu" or "gpu"
    speed: float  # of one core (cpu) or of the whole device (gpu), in reference cores; 0 cannot compute
    saturation_samples: float = 0.0  # load at which half of the peak rate is reached


class NodeType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine type. `source` says where its figures are published."""

    name: str
    cores: int
    memory_bytes: float
    nic_bytes_per_second: float  # each direction, full duplex
    devices: tuple[Device, ...]
    source: str
    service_bytes_per_second: float = math.inf  # what a server process can serve, apart from its NIC
