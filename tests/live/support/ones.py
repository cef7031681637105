"""A job that counts: every push adds one to every parameter, so the model says how many pushes it has received.

A push that is lost, counted twice, or reaches some blocks only, shows. Nothing is computed, so that faults and
reconfigurations can follow each other quickly.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from harness.live.driver.system import LiveSystem
from harness.live.processes.runtime import Procedure
from harness.live.protocol.blocks import Layout
from harness.live.worker.spec import Spec
from harness.live.worker.tasks import Computed, WorkerTask

__all__ = ["ONES", "ManyOnes", "Ones", "counted"]

_BLOCKS = 16
_COMPUTE_SECONDS = 0.002

_ROLES = '{ choice = ["worker", "server", "both", "idle"] }'

ONES = f"""
summary = "Every push adds one to every parameter."
[cluster]
nodes = [{{ type = "process", count = 4, prefix = "n" }}]
[workload]
name = "digits-mlp"
[start]
workers = ["n0", "n1"]
servers = ["n2", "n3"]
policy = "bsp"
learning_rate = 1.0
batch_size = 8
[free]
"role/n0" = {_ROLES}
"role/n1" = {_ROLES}
"role/n2" = {_ROLES}
"role/n3" = {_ROLES}
policy = {{ choice = ["bsp", "asp", "ssp"] }}
[target]
metric = "clocks"
value = 100_000_000
check_clocks = 1_000_000
[budget]
seconds = 100_000
"""


@dataclass(frozen=True)
class Ones(Spec):
    """The gradient is minus one everywhere, at a learning rate of 1."""

    size: ClassVar[int] = 1_000  # parameters

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.size, _BLOCKS)

    @property
    def parameters(self) -> NDArray[np.float32]:
        return np.zeros(self.size, np.float32)

    def compute(self, task: WorkerTask) -> Computed:
        time.sleep(_COMPUTE_SECONDS)
        gradient = -np.ones(self.size, np.float32) if task.kind == "gradient" else None
        return Computed(task.number, task.kind, 1.0, gradient=gradient, accuracy=0.0, seconds=_COMPUTE_SECONDS)

    def warm_up(self, *, validates: bool = True) -> None:
        """There is nothing to compile."""


@dataclass(frozen=True)
class ManyOnes(Ones):
    """As `Ones`, with so many parameters that it takes time to send them."""

    size: ClassVar[int] = 200_000


def counted(live: LiveSystem) -> tuple[int, int, NDArray[np.float32]]:
    """Pushes of branch 0, those reported as lost, and its parameters, at a moment at which no worker trains."""
    control, coordinator = live.control, live.control.runtime.coordinator
    vectors: dict[str, NDArray[np.float32]] = {}

    def read() -> Procedure:  # starts again after a loss, whose repair lets the workers train
        coordinator.rest()
        index = coordinator.snapshot(save=True)
        yield from control.runtime.wait_durable(index)
        with suppress(KeyError):  # the coordinator has died
            vectors.update(coordinator.saved(index)[0])

    with control.news:
        while not vectors:
            control.carry_out(read)
        control.update()
        clocks, lost = live.job_status().clocks, control.view.lost_pushes
        coordinator.run(0)
    return clocks, lost, vectors["parameters"]
