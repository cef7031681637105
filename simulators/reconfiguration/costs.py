"""What reconfigurations, forks and evaluations cost in simulated time; `costs.toml` has the constants and their sources."""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files

import msgspec

from tuners.actions import Method

__all__ = ["METHODS", "METHODS_OF_TABLES", "Costs", "check_costs"]

METHODS: tuple[Method, ...] = ("checkpoint", "migrate", "relocate")  # that a simulated system can reconfigure by
METHODS_OF_TABLES: tuple[Method, ...] = ("checkpoint", "migrate")  # the same where rows of embedding tables are placed
_FITTED = tomllib.loads((files("simulators.reconfiguration") / "costs.toml").read_text("utf-8"))


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What reconfigurations, forks and evaluations cost. The defaults are in `costs.toml`, with what they are fitted to."""

    restart_seconds: float = _FITTED["restart_seconds"]  # checkpoint: stop all processes and start them again
    policy_restart_seconds: float = _FITTED["policy_restart_seconds"]  # the same for a change of policy; 0: that is in place
    checkpoint_bytes_per_second: float = _FITTED["checkpoint_bytes_per_second"]  # writing the model
    restore_bytes_per_second: float = _FITTED["restore_bytes_per_second"]  # and reading it back, placed anew
    add_seconds: float = _FITTED["add_seconds"]  # a machine's container until it takes part
    delete_seconds: float = _FITTED["delete_seconds"]
    switch_seconds: float = _FITTED["switch_seconds"]  # a server becomes a worker, or the other way, in its container
    start_seconds: float = _FITTED["start_seconds"]  # migrate: a worker begins when its training data is there
    handshake_seconds: float = _FITTED["handshake_seconds"]  # of a move, before its first bytes: a block changes its owner
    data_bytes_per_second: float = _FITTED["data_bytes_per_second"]  # what one worker can send of its training data
    model_bytes_per_second: float = _FITTED["model_bytes_per_second"]  # what one server can send of the model
    model_blocks: int = _FITTED["model_blocks"]  # that the model is divided into
    blocks_in_flight: int = _FITTED["blocks_in_flight"]  # of one move at a time
    graph_seconds: float = _FITTED["graph_seconds"]  # relocate: the graph is switched in place
    sweep_bytes_per_second: float = _FITTED["sweep_bytes_per_second"]  # in the background, all old owners together
    detection_seconds: float = _FITTED["detection_seconds"]  # until the runtime acts on the loss of a node
    fork_bytes_per_second: float = _FITTED["fork_bytes_per_second"]  # what one server copies in its memory
    evaluate_seconds: float | None = (
        None  # of one `Evaluate`; None: a pass over the validation data, `jobs.evaluate_seconds`
    )


def check_costs(costs: Costs) -> None:
    """Raise ValueError for costs that cannot be."""
    for name in costs.__struct_fields__:
        value = getattr(costs, name)
        if value is None:
            continue
        if name.endswith("per_second") and not value > 0:
            raise ValueError(f"Cannot use {name} = {value}: it must be positive.")
        if name.endswith("_seconds") and not 0 <= value < math.inf:
            raise ValueError(f"Cannot use {name} = {value}: it must be finite and not negative.")
        if "blocks" in name and value < 1:
            raise ValueError(f"Cannot use {name} = {value}: it must be at least 1.")
