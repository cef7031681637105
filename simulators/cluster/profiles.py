"""Node types: how fast a machine computes and transfers, from `profiles.toml` or the user's own file.

Speeds are in reference cores; `profiles.toml` defines this unit and names the publication of each figure.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from tuners.near_names import near_keys, near_names

if TYPE_CHECKING:
    from simulators.workloads.workload import Demand
    from tuners.settings import Scalar

__all__ = ["Device", "NodeType", "device_seconds", "load_profiles", "node_rate", "node_seconds", "profile", "profiles"]

_Kind = Literal["cpu", "gpu"]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device that computes gradients. Raises ValueError for impossible values."""

    kind: _Kind
    speed: float  # of one core (cpu) or of the whole device (gpu), in reference cores; 0: it cannot compute
    saturation_samples: float = 0.0  # load in samples that reaches half of the peak rate

    def __post_init__(self) -> None:
        for name in ("speed", "saturation_samples"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"A device cannot have {name} {value}: give a finite number, 0 or more.")


class NodeType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine type. `source` names the publication of its figures. Raises ValueError for an impossible machine."""

    name: str
    cores: int
    memory_bytes: float
    nic_bytes_per_second: float  # each direction, full duplex
    devices: tuple[Device, ...]
    source: str
    service_bytes_per_second: float = math.inf  # limit of a server process on this machine, besides the NIC
    usd_per_hour: float | None = None  # None: no price is known
    spot_usd_per_hour: float | None = None  # of the same machine as long as nobody else wants it
    spot: bool = False  # it is rented so, and can be taken away: see `conditions.RackLosses`

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ValueError(f"Node type {self.name!r} cannot have {self.cores} cores: give at least 1.")
        for name in ("memory_bytes", "nic_bytes_per_second"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"Node type {self.name!r} cannot have {name} {value}: give a positive, finite number.")
        if not self.service_bytes_per_second > 0:
            raise ValueError(
                f"Node type {self.name!r} cannot have service_bytes_per_second {self.service_bytes_per_second}: "
                "give a positive number, or leave it out where the NIC is the only limit."
            )
        for name in ("usd_per_hour", "spot_usd_per_hour"):
            price = getattr(self, name)
            if price is not None and not 0 <= price < math.inf:
                raise ValueError(f"Node type {self.name!r} cannot have {name} {price}: give a finite number, 0 or more.")
        if not self.devices:
            raise ValueError(f"Node type {self.name!r} has no devices: give at least one; speed 0 cannot compute.")


# ---------------------------------------------------------------------------------------------------------------- lookup


def profile(name: str) -> NodeType:
    """The embedded node type of that name. Raises ValueError for an unknown one."""
    known = _embedded()
    if name not in known:
        raise ValueError(f"No node type {name!r}: {near_names(name, known)}")
    return known[name]


def profiles() -> dict[str, NodeType]:
    """All embedded node types, by name."""
    return dict(_embedded())


def load_profiles(path: Path | str) -> dict[str, NodeType]:
    """Node types from a file like `profiles.toml`, one table per type, or from one that `harness calibrate` wrote.

    Raises FileNotFoundError for a missing file, and ValueError, naming file and key, for a wrong or impossible entry.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Cannot read node types from {path}: there is no such file; give a TOML file.")
    return _parse(path.read_bytes(), str(path))


@cache
def _embedded() -> dict[str, NodeType]:
    return _parse((files("simulators.cluster") / "profiles.toml").read_bytes(), "profiles.toml")


def _parse(content: bytes, origin: str) -> dict[str, NodeType]:
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read node types from {origin}: it is no TOML file ({error}).") from error
    if "calibration" in tables:
        tables = tables.get("profiles", {})
    return {name: _node_type(name, table, origin) for name, table in tables.items()}


def _node_type(name: str, table: Any, origin: str) -> NodeType:
    if not isinstance(table, dict):
        raise ValueError(  # noqa: TRY004 (a mistake in a file)
            f"Cannot read node types from {origin}: {name!r} is no table; each node type is one, [NAME], as in the files "
            "that harness calibrate writes. A scenario's file has none."
        )
    if "name" in table:
        raise ValueError(f"Cannot read {origin}: table {name!r} has a key `name`; the table's own name is its name.")
    try:
        return msgspec.convert({"name": name, **table}, NodeType)
    except msgspec.ValidationError as error:
        keys = {"": NodeType.__struct_fields__[1:], "devices": Device.__struct_fields__}
        choices = f" Choose {' or '.join(get_args(_Kind))}." if "Invalid enum value" in str(error) else ""
        raise ValueError(f"Cannot read node type {name!r} from {origin}: {near_keys(str(error), keys)}{choices}") from error


# ------------------------------------------------------------------------------------------------------------- durations


def device_seconds(device: Device, demand: Demand, samples: int, threads: int) -> float:
    """Mean seconds in which `device` computes the gradient of `samples` samples, before noise; 0 for no samples.

    fixed + sample x (samples + saturation) / speed; the `threads` of a cpu multiply its speed by Amdahl's law,
    1 / (serial + (1 - serial) / threads). Raises ValueError for samples on a device that cannot compute.
    """
    if samples == 0:
        return 0.0
    if samples < 0:
        raise ValueError(f"Cannot compute {samples} samples: give 0 or more.")
    if device.speed == 0:
        raise ValueError(f"Cannot compute {samples} samples on a {device.kind} of speed 0: give this device no load.")
    if device.kind == "cpu" and threads < 1:
        raise ValueError(f"Cannot compute on {threads} threads: give at least 1.")
    return demand.fixed_seconds + demand.sample_seconds * (samples + device.saturation_samples) / _rate(
        device, demand, threads
    )


def node_rate(node_type: NodeType, demand: Demand) -> float:
    """How fast all devices of a node compute together, in reference cores, with one thread per core."""
    return sum(_rate(device, demand, node_type.cores) for device in node_type.devices)


def _rate(device: Device, demand: Demand, threads: int) -> float:
    """The speed of a device in reference cores; Amdahl's law for the threads of a cpu."""
    if device.kind == "gpu":
        return device.speed
    return device.speed / (demand.serial_fraction + (1.0 - demand.serial_fraction) / threads)


def node_seconds(
    node_type: NodeType,
    demand: Demand,
    loads: tuple[int, ...],
    intra_threads: int = 0,
    inter_threads: int = 0,
    options: tuple[tuple[str, Scalar], ...] = (),
) -> tuple[float, tuple[float, ...]]:
    """Mean compute seconds of one mini-batch on a node with `loads` samples per device, and the seconds of each device.

    Devices work in parallel, so the node takes as long as its slowest device, plus `demand.aggregate_seconds` if more than
    one has samples. `intra_threads` 0 is one per core; more threads than cores count as one per core. `inter_threads` and
    `options` have the effects that the demand gives them. Raises ValueError for loads that do not match the devices or that
    a device cannot compute.
    """
    if len(loads) != len(node_type.devices):
        raise ValueError(
            f"Cannot put loads {loads} on a {node_type.name}: give one count per device, {len(node_type.devices)} in all."
        )
    threads = min(intra_threads or node_type.cores, node_type.cores)
    longer = _knob_factor(demand, node_type.cores, threads, inter_threads, options)
    each = tuple(longer * device_seconds(d, demand, n, threads) for d, n in zip(node_type.devices, loads, strict=True))
    together = demand.aggregate_seconds if sum(n > 0 for n in loads) > 1 else 0.0
    return max(each) + together, each


def _knob_factor(demand: Demand, cores: int, threads: int, inter: int, options: tuple[tuple[str, Scalar], ...]) -> float:
    """Factor on compute time, from more threads than cores and from graph options."""
    # inter 0 is the framework's own choice; we assume that it leaves a core to every thread.
    crowd = max(1.0, (threads + inter) / cores) if inter else 1.0
    factor: float = crowd**demand.crowding_exponent
    for effect in demand.options:
        # Compare the types too, because True == 1 in Python.
        if any(n == effect.name and type(v) is type(effect.value) and v == effect.value for n, v in options):
            factor *= effect.factor * threads**effect.thread_exponent
    return factor
