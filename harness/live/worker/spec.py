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

from harness.live.coordinator.branches.branch import LiveJob
from harness.live.protocol.blocks import Layout, TableShape
from harness.live.protocol.messages import Release
from harness.live.worker.row_look_ups import RowLookUps, TablesAndRest
from harness.live.worker.tasks import Computed, TaskKind, WorkerTask
from harness.scenario import Scenario, job, own_model, parse, workload_of
from simulators import jobs
from simulators.engine import learning, preparation
from simulators.engine.learning import LearningProgram, TrainingData
from simulators.engine.limits import REVISING
from simulators.workloads.workload import Workload
from tuners.actions import Job, Rejected, Setting
from tuners.settings import OF_CHECKPOINTS, OF_PULLS

__all__ = ["ShardsOf", "Spec"]

# The simulator's engine sets this, too: without it, the gradients would differ.
jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

_BLOCKS = 64
_NO_ROW = 2**31 - 1

_SMALL, _SNAPSHOT_SECONDS = 2**18, 0.05
"""Pushes of up to so many parameters can follow each other so fast that snapshots, of which each is messages between all
processes, take a tenth of all time: so not more than twenty in a second. Workers keep the pushes until then, so not those of
larger models."""


@dataclass(frozen=True)
class Spec:
    """A scenario and a seed. Small, so that it can be sent; every process builds the rest once for itself.

    Raises ValueError, when `live_job` or `job` is made, for a scenario that cannot be played live.
    """

    name: str
    origin: str  # the file that the text was read from, for its relative paths
    text: str
    seed: int
    own_model: str = ""  # digest of the user's file that the workload's model is in; "": it is in none

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> Spec:
        return cls(scenario.name, str(scenario.origin), scenario.text, seed, own_model(scenario)[1])

    @cached_property
    def scenario(self) -> Scenario:
        return parse(self.text, name=self.name, origin=Path(self.origin))

    @cached_property
    def job(self) -> Job:
        """The job as tuners see it."""
        return job(self.scenario, self.seed)

    @cached_property
    def workload(self) -> Workload:
        if (model := own_model(self.scenario))[1] != self.own_model:
            raise ValueError(
                f"Cannot go on with {self.name}: {model[0]} is not the file with which the job began. Every machine needs "
                "the same file at the same place, and it must not change while the job runs."
            )
        made = workload_of(self.scenario)
        if made.proxy is None:
            raise ValueError(
                f"Cannot deploy {self.name}: its workload {made.name!r} is timing-only and learns nothing. Give it a model "
                "and data, as `harness show live-digits` has."
            )
        if self.job.target.by_share:
            raise ValueError(f"Cannot deploy {self.name}: live jobs do not count work by share; leave out by_share.")
        if self.job.space.takes_local_steps:
            raise ValueError(
                f"Cannot deploy {self.name}: a live worker pushes the gradient of one mini-batch, and takes no local steps; "
                "hold local_steps at 1, outer_rate at 1 and outer_momentum at 0."
            )
        if self.job.space.may_have(OF_CHECKPOINTS):
            raise ValueError(
                f"Cannot deploy {self.name}: live servers have replicas and lose no work; hold checkpoint_seconds at 0."
            )
        if self.job.space.may_have(OF_PULLS):
            raise ValueError(
                f"Cannot deploy {self.name}: a live worker pulls before every mini-batch; hold pull_clocks at 1."
            )
        if made.optimizer in REVISING:
            raise ValueError(
                f"Cannot deploy {self.name}: {made.optimizer!r} revises what it did before, which live servers cannot; "
                "choose another optimizer."
            )
        if made.proxy.embedding is not None:
            try:  # what sparse gradients do not go with
                learning.learning_program(made, self.job.space, 1)
            except Rejected as error:
                raise ValueError(f"Cannot deploy {self.name}: {error}") from None
        return made

    @cached_property
    def live_job(self) -> LiveJob:
        """The constants that the coordinator needs."""
        return LiveJob(
            nodes=tuple(n.name for n in self.job.nodes),
            size=self.layout.size,
            blocks=self.layout.count,
            tables=self.layout.tables,
            optimizer=self.workload.optimizer,
            aggregation=self.workload.aggregation,
            target=self.job.target,
            evaluate_clocks=self.scenario.check_clocks,
            shards=ShardsOf(self),
            snapshot_commits=self._snapshot_commits,
            snapshot_seconds=_SNAPSHOT_SECONDS if self.layout.size <= _SMALL else 0.0,
        )

    @property
    def _snapshot_commits(self) -> int:
        """Pushes between two snapshots; 0: as `LiveJob` says. A snapshot copies whole tables, of which a push touches few
        rows: so it comes when the pushes since the last one are as many bytes as the model."""
        if (tables := self.layout.tables) is None:
            return 0
        largest = max(map(sum, preparation.loads(self.scenario.cluster.nodes, self.job.start).values()))
        return max(self.layout.size // (tables.width * len(self.rows_of(Release(0, 0, 0, 0, 0, largest, 0, 1 << 30)))), 20)

    @cached_property
    def layout(self) -> Layout:
        embedding = None if self.workload.proxy is None else self.workload.proxy.embedding
        if embedding is None:
            return Layout(self.parameters.size, min(_BLOCKS, self.parameters.size))
        size, blocks = self.parameters.size, self.job.blocks
        return Layout(size, blocks + 1, TableShape(embedding.rows, self._look_ups.width, blocks))

    @property
    def parameters(self) -> NDArray[np.float32]:
        """This seed's initial parameters, [P]; with embedding tables as `harness.live.protocol.blocks` says."""
        return self._drawn[1]

    def tree(self, parameters: NDArray[np.float32]) -> Any:
        """A vector [P] as the model's pytree."""
        return self._drawn[2](parameters)

    def rows_of(self, work: Release | None) -> NDArray[np.int32]:
        """The rows that a mini-batch looks up (None: the validation data), each once and in order, and the dense ones."""
        return self._look_ups.of(work)

    def rows_of_pushes(self, setting: Setting, pushes: NDArray[np.float64]) -> tuple[float, ...]:
        """How many rows of each block of the embedding tables these pushes carried, as `Window.blocks`; [n, 11], the columns
        of `Records`, all under `setting`."""
        if self.layout.tables is None:
            return ()
        parts, found = self.live_job.shards(setting), np.zeros(self.layout.count)
        for worker, clock in pushes[:, 1:3].astype(int):
            samples, start, length = (int(of[worker]) for of in parts)
            rows = self.rows_of(Release(0, 0, int(clock), 0, 0, samples, start, length))
            found += np.diff(np.searchsorted(rows, self.layout.row_bounds))
        return tuple(found[:-1].tolist())

    def compute(self, task: WorkerTask) -> Computed:
        """Run a worker's task."""
        started = perf_counter()
        data, _, unravel = self._drawn
        if task.rows is not None:
            return self._compute_rows(task, task.rows, started)
        if task.work is None:
            loss, accuracy = _evaluate(self._model(1), unravel, data, task.parameters)
            return Computed(task.number, task.kind, float(loss), accuracy=float(accuracy), seconds=perf_counter() - started)
        work = task.work
        shard = _Shard(*(np.asarray([n], np.int32) for n in (work.samples, work.shard_start, work.shard_length)))
        measure = _gradient if task.kind == "gradient" else _loss
        found = measure(self._model(work.samples), unravel, data, shard, np.int32(work.clock), task.parameters)
        gradient = np.asarray(found[1]) if task.kind == "gradient" else None
        return Computed(task.number, task.kind, float(found[0]), gradient=gradient, seconds=perf_counter() - started)

    def _compute_rows(self, task: WorkerTask, rows: NDArray[np.int32], started: float) -> Computed:
        """`compute` on some rows of a model with embedding tables. They are filled up to a number that all mini-batches of a
        size have, so that it compiles once."""
        data, _, unravel = self._drawn
        model, look_ups = self._model(1 if task.work is None else task.work.samples), self._look_ups
        width, dense = look_ups.width, look_ups.dense
        count = len(rows) - dense  # of the tables
        most = count if task.work is None else model.batch * look_ups.per_sample
        numbers, flat = np.full(most, _NO_ROW, np.int32), np.zeros((most + dense) * width, np.float32)
        numbers[:count], flat[: count * width] = rows[:count], task.parameters[: count * width]
        flat[most * width :] = task.parameters[count * width :]
        if task.work is None:
            loss, accuracy = _evaluate(model, unravel, data, flat, numbers)
            return Computed(task.number, task.kind, float(loss), accuracy=float(accuracy), seconds=perf_counter() - started)
        work = task.work
        shard = _Shard(*(np.asarray([n], np.int32) for n in (work.samples, work.shard_start, work.shard_length)))
        measure = _gradient if task.kind == "gradient" else _loss
        found = measure(model, unravel, data, shard, np.int32(work.clock), flat, numbers)
        gradient = None
        if task.kind == "gradient":
            whole = np.asarray(found[1])
            gradient = np.concatenate([whole[: count * width], whole[most * width :]])
        return Computed(task.number, task.kind, float(found[0]), gradient=gradient, seconds=perf_counter() - started)

    def warm_up(self, *, validates: bool = False) -> None:
        """Compile before the job begins: for the first task of a worker, or with `validates` of the evaluator."""
        largest = max(map(sum, preparation.loads(self.scenario.cluster.nodes, self.job.start).values()))
        work = None if validates else Release(0, 0, 0, 0, 0, largest, 0, 1)
        kind: TaskKind = "evaluate" if validates else "gradient"
        if self.layout.tables is None:
            self.compute(WorkerTask(kind, 0, work, self.parameters))
        else:
            rows = self.rows_of(work)
            looked_up = self.parameters.reshape(-1, self._look_ups.width)[rows].reshape(-1)
            self.compute(WorkerTask(kind, 0, work, looked_up, rows))

    def check(self, setting: Setting) -> None:
        """Raise Rejected, with the reason, for a setting in the job's space that a live job cannot run under."""
        if setting.options:
            names = ", ".join(name for name, _ in setting.options)
            raise Rejected(f"Cannot set the graph's options {names} in a live job: its graph has none; leave them unset.")
        for worker, row in zip(setting.workers, setting.loads, strict=False):
            if any(row[1:]):
                raise Rejected(f"Cannot use loads {row} on {worker!r}: a live worker computes on its first device only.")
        if setting.cache_rows and setting.cache_clocks:
            raise Rejected(
                f"Cannot use copies of {setting.cache_rows} rows for {setting.cache_clocks} mini-batches in a live job: its "
                "workers keep no copies, and pull every row that they look up; hold cache_rows or cache_clocks at 0."
            )
        if setting.replicas > 1 and setting.hot_blocks:
            raise Rejected(
                f"Cannot hold {setting.hot_blocks} hot blocks on {setting.replicas} servers each in a live job: a push is "
                "recovered from one owner of each block; hold replicas at 1 or hot_blocks at 0."
            )
        if setting.policy == "quorum":
            raise Rejected("Cannot wait for a quorum in a live job: its policies set no timers; choose another policy.")
        preparation.compute_times(self.scenario.cluster.nodes, self.workload.demand, setting)
        self.live_job.shards(setting)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("name", "origin", "text", "seed", "own_model")}

    def _model(self, samples: int) -> LearningProgram:
        made = learning.learning_program(self.workload, self.job.space, samples)
        if made is None:
            raise TypeError("A workload that learns has a model.")
        return made

    @cached_property
    def _drawn(self) -> tuple[TrainingData, NDArray[np.float32], Callable[[Any], Any]]:
        data, parameters = jobs.drawn(self.workload, self.seed, len(self.job.start.workers))
        if self.workload.proxy is None or self.workload.proxy.embedding is None:
            flat, unravel = ravel_pytree(parameters)
            return data, np.asarray(flat, np.float32), unravel
        tables = np.asarray(parameters["rows"], np.float32)
        dense, unravel = ravel_pytree({name: value for name, value in parameters.items() if name != "rows"})
        count, width = dense.size, tables.shape[1]
        rest = np.zeros(-(-count // width) * width, np.float32)
        rest[:count] = dense
        vector: NDArray[np.float32] = np.concatenate([tables.reshape(-1), rest])
        return data, vector, TablesAndRest(unravel, count, len(rest), width)

    @cached_property
    def _look_ups(self) -> RowLookUps:
        data, parameters, unravel = self._drawn
        if not isinstance(unravel, TablesAndRest):
            raise TypeError(f"Cannot look up rows: {self.workload.name!r} has no embedding tables.")
        return RowLookUps(data, len(parameters), unravel)


@dataclass(frozen=True)
class ShardsOf:
    """The shards of a setting, as in the simulator. Raises Rejected if a worker would have no samples."""

    spec: Spec

    def __call__(self, setting: Setting) -> preparation.Shards:
        return preparation.shards(self.spec.scenario.cluster.nodes, self.spec.workload, setting)


# -------------------------------------------------------------------------------------------------------------- computing


class _Shard(NamedTuple):
    """One worker's part of the training data, as `learning.minibatch` reads it from `EngineInputs`; [1] each."""

    samples: Any
    shard_start: Any
    shard_length: Any


# `numbers`: the rows of embedding tables that `flat` begins with, sorted; None: it is the whole model.


@partial(jax.jit, static_argnames=("model", "unravel"))
def _gradient(
    model: LearningProgram, unravel: Any, data: TrainingData, shard: Any, clock: Array, flat: Array, numbers: Any = None
) -> tuple[Array, Array]:
    return jax.value_and_grad(partial(_mean_loss, model, unravel, data, shard, clock, numbers))(flat)


@partial(jax.jit, static_argnames=("model", "unravel"))
def _loss(
    model: LearningProgram, unravel: Any, data: TrainingData, shard: Any, clock: Array, flat: Array, numbers: Any = None
) -> tuple[Array]:
    return (_mean_loss(model, unravel, data, shard, clock, numbers, flat),)


def _mean_loss(
    model: LearningProgram, unravel: Any, data: TrainingData, shard: Any, clock: Array, numbers: Any, flat: Array
) -> Array:
    rows, count = learning.minibatch(model, data, shard, jnp.asarray(0, jnp.int32), clock)
    return learning.mean_loss(model, unravel(flat), _renumbered(rows, numbers), count)


@partial(jax.jit, static_argnames=("model", "unravel"))
def _evaluate(
    model: LearningProgram, unravel: Any, data: TrainingData, flat: Array, numbers: Any = None
) -> tuple[Array, Array]:
    return learning.evaluate(model, data._replace(valid=_renumbered(data.valid, numbers)), unravel(flat))


def _renumbered(batch: Any, numbers: Any) -> Any:
    """A batch that looks up the rows of `numbers` by their places there. Samples that do not count may look up others: they
    get the last one."""
    if numbers is None:
        return batch
    return (jnp.minimum(jnp.searchsorted(numbers, batch[0]), numbers.shape[0] - 1), *batch[1:])
