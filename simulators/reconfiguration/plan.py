"""What a plan of a reconfiguration is: a DAG of steps, and how much there is to move."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Load", "ReconfigurationPlan", "Step"]


class Load(NamedTuple):
    """How much there is to move."""

    model_bytes: float
    data_blocks: int
    data_block_bytes: float
    has_tables: bool = False  # the model is embedding tables, whose blocks are placed one by one
    hottest: tuple[int, ...] = ()  # see `Job.hottest`


class Step(NamedTuple):
    """One step of a plan, begun when those before it have ended."""

    kind: Literal[
        "checkpoint",
        "restart",
        "restore",
        "add",
        "delete",
        "switch",
        "stop",
        "start",
        "move",
        "copy",
        "sweep",
        "graph",
        "detect",
        "wait",
    ]
    node: str = ""  # the node that it changes; the source of a move, copy or sweep
    to: str = ""  # the target of a move, copy or sweep
    blocks: int = 0
    of: Literal["", "model", "data"] = ""  # what a move or copy moves
    numbers: tuple[int, ...] = ()  # of the blocks, where these are of embedding tables
    seconds: float = 0.0  # that it takes, apart from moving
    bytes_moved: float = 0.0
    after: tuple[int, ...] = ()  # indices of steps in the plan

    @property
    def name(self) -> str:
        if self.kind in ("move", "copy", "sweep"):
            return f"{self.kind} {self.blocks} {self.of} block{'s' * (self.blocks != 1)} {self.node} -> {self.to}"
        return f"{self.kind} {self.node}".rstrip()


class ReconfigurationPlan(NamedTuple):
    """The steps of a reconfiguration; none if it happens in place."""

    steps: tuple[Step, ...]
    quiescent: bool  # no worker trains until its end
    on_demand: bool = False  # the new setting is in force as soon as the graph is switched
