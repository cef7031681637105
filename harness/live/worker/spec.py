"""A job as each of its processes builds it: the scenario's text and a seed give the same data, the same initial parameters
and the same gradients as in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from harness.live.coordinator.branch import LiveJob
from harness.live.protocol.blocks import Layout
from harness.live.protocol.messages import Release
from harness.live.worker.worker import Computed, WorkerTask
from harness.scenario import Scenario, job, parse, workload_of
from simulators import jobs
from simulators.engine import inputs, learning
from simulators.engine.learning import LearningProgram, TrainingData
from simulators.engine.optimizers import REVISING
from simulators.workloads.workload import Workload
from tuners.actions import Job, Rejected, Setting

__all__ = ["ShardsOf", "Spec"]

# The simulator's engine sets this, too: without it, the gradients would differ.
jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

_BLOCKS = 64


@dataclass(frozen=True)
class Spec:
    """A scenario and a seed. Small, so that it can be sent; every process builds the rest once for itself.

    Raises ValueError, when `live_job` or `job` is made, for a scenario that cannot be played live.
    """

    name: str
    origin: str  # the file that the text was read from, for its relative paths
    text: str
    seed: int

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> Spec:
        return cls(scenario.name, str(scenario.origin), scenario.text, seed)

    @cached_property
    def scenario(self) -> Scenario:
        return parse(self.text, name=self.name, origin=Path(self.origin))

    @cached_property
    def job(self) -> Job:
        """The job as tuners see it."""
        return job(self.scenario, self.seed)

    @cached_property
    def workload(self) -> Workload:
        made = workload_of(self.scenario)
        if made.proxy is None:
            raise ValueError(f"Cannot deploy {self.name}: its workload {made.name!r} is timing-only and learns nothing.")
        if self.job.target.by_share:
            raise ValueError(f"Cannot deploy {self.name}: live jobs do not count work by share; leave out by_share.")
        if self.job.space.takes_local_steps:
            raise ValueError(
                f"Cannot deploy {self.name}: a live worker pushes the gradient of one mini-batch, and takes no local steps; "
                "hold local_steps at 1, outer_rate at 1 and outer_momentum at 0."
            )
        if made.proxy.embedding is not None:
            raise ValueError(
                f"Cannot deploy {self.name}: {made.name!r} has embedding tables, and live servers push and pull the whole "
                "model; play it in the simulator, or deploy a workload without tables."
            )
        if self.job.space.takes_checkpoints:
            raise ValueError(
                f"Cannot deploy {self.name}: live servers have replicas and lose no work; hold checkpoint_seconds at 0."
            )
        if made.optimizer in REVISING:
            raise ValueError(
                f"Cannot deploy {self.name}: {made.optimizer!r} revises what it did before, which live servers cannot; "
                "choose another optimizer."
            )
        return made

    @cached_property
    def live_job(self) -> LiveJob:
        """The constants that the coordinator needs."""
        return LiveJob(
            nodes=tuple(n.name for n in self.job.nodes),
            size=self.layout.size,
            blocks=self.layout.count,
            optimizer=self.workload.optimizer,
            aggregation=self.workload.aggregation,
            target=self.job.target,
            evaluate_clocks=self.scenario.check_clocks,
            shards=ShardsOf(self),
        )

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.parameters.size, min(_BLOCKS, self.parameters.size))

    @property
    def parameters(self) -> NDArray[np.float32]:
        """This seed's initial parameters, [P]."""
        return self._drawn[1]

    def tree(self, parameters: NDArray[np.float32]) -> Any:
        """A vector [P] as the model's pytree."""
        return self._drawn[2](parameters)

    def compute(self, task: WorkerTask) -> Computed:
        """Run a worker's task."""
        started = perf_counter()
        data, _, unravel = self._drawn
        if task.work is None:
            loss, accuracy = _evaluate(self._model(1), unravel, data, task.parameters)
            return Computed(task.number, task.kind, float(loss), accuracy=float(accuracy), seconds=perf_counter() - started)
        work = task.work
        shard = _Shard(*(np.asarray([n], np.int32) for n in (work.samples, work.shard_start, work.shard_length)))
        measure = _gradient if task.kind == "gradient" else _loss
        found = measure(self._model(work.samples), unravel, data, shard, np.int32(work.clock), task.parameters)
        gradient = np.asarray(found[1]) if task.kind == "gradient" else None
        return Computed(task.number, task.kind, float(found[0]), gradient=gradient, seconds=perf_counter() - started)

    def warm_up(self, *, validates: bool = False) -> None:
        """Compile before the job begins: for the first task of a worker, or with `validates` of the evaluator."""
        largest = max(map(sum, inputs.loads(self.scenario.cluster.nodes, self.job.start).values()))
        work = None if validates else Release(0, 0, 0, 0, 0, largest, 0, 1)
        self.compute(WorkerTask("evaluate" if validates else "gradient", 0, work, self.parameters))

    def check(self, setting: Setting) -> None:
        """Raise Rejected, with the reason, for a setting in the job's space that a live job cannot run under."""
        if setting.options:
            names = ", ".join(name for name, _ in setting.options)
            raise Rejected(f"Cannot set the graph's options {names} in a live job: its graph has none; leave them unset.")
        for worker, row in zip(setting.workers, setting.loads, strict=False):
            if any(row[1:]):
                raise Rejected(f"Cannot use loads {row} on {worker!r}: a live worker computes on its first device only.")
        inputs.compute_times(self.scenario.cluster.nodes, self.workload.demand, setting)
        self.live_job.shards(setting)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("name", "origin", "text", "seed")}

    def _model(self, samples: int) -> LearningProgram:
        made = learning.learning_program(self.workload, self.job.space, samples)
        if made is None:
            raise TypeError("A workload that learns has a model.")
        return made

    @cached_property
    def _drawn(self) -> tuple[TrainingData, NDArray[np.float32], Callable[[Any], Any]]:
        data, parameters = jobs.drawn(self.workload, self.seed, len(self.job.start.workers))
        flat, unravel = ravel_pytree(parameters)
        return data, np.asarray(flat, np.float32), unravel


@dataclass(frozen=True)
class ShardsOf:
    """The shards of a setting, as in the simulator. Raises Rejected if a worker would have no samples."""

    spec: Spec

    def __call__(self, setting: Setting) -> inputs.Shards:
        return inputs.shards(self.spec.scenario.cluster.nodes, self.spec.workload, setting)


# -------------------------------------------------------------------------------------------------------------- computing


class _Shard(NamedTuple):
    """One worker's part of the training data, as `learning.minibatch` reads it from `EngineInputs`; [1] each."""

    samples: Any
    shard_start: Any
    shard_length: Any


@partial(jax.jit, static_argnames=("model", "unravel"))
def _gradient(
    model: LearningProgram, unravel: Any, data: TrainingData, shard: Any, clock: Array, flat: Array
) -> tuple[Array, Array]:
    return jax.value_and_grad(partial(_mean_loss, model, unravel, data, shard, clock))(flat)


@partial(jax.jit, static_argnames=("model", "unravel"))
def _loss(model: LearningProgram, unravel: Any, data: TrainingData, shard: Any, clock: Array, flat: Array) -> tuple[Array]:
    return (_mean_loss(model, unravel, data, shard, clock, flat),)


def _mean_loss(model: LearningProgram, unravel: Any, data: TrainingData, shard: Any, clock: Array, flat: Array) -> Array:
    rows, count = learning.minibatch(model, data, shard, jnp.asarray(0, jnp.int32), clock)
    return learning.mean_loss(model, unravel(flat), rows, count)


@partial(jax.jit, static_argnames=("model", "unravel"))
def _evaluate(model: LearningProgram, unravel: Any, data: TrainingData, flat: Array) -> tuple[Array, Array]:
    return learning.evaluate(model, data, unravel(flat))
