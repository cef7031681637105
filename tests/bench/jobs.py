"""The jobs that the benchmarks time: the engine's, a bare scan of the same gradients and updates, and a plain SimPy one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import simpy

from simulators.engine import changes, learning, loop
from simulators.engine.embedding import popularity, seen_before
from simulators.engine.inputs import EngineInputs, RowPlacement
from simulators.engine.job_state import Program, State
from simulators.workloads.datasets import Dataset, classification, embedded_clicks
from simulators.workloads.model_tables import FactorisationMachine, Logistic, Mlp
from simulators.workloads.models import make_proxy
from tuners import policies
from tuners.actions import SyncPolicy

RATE = 0.01
BATCH = 16


@dataclass(frozen=True)
class EngineJob:
    """A job ready to advance."""

    program: Program
    data: learning.TrainingData
    inputs: EngineInputs
    state: State

    def advance(self, pushes: int) -> tuple[State, jax.Array, jax.Array]:
        many = jnp.asarray(pushes, jnp.int32)
        return loop.advance(self.program, self.data, self.inputs, self.state, many, jnp.asarray(jnp.inf), rows=pushes)


def side_by_side(job: EngineJob, lanes: int, pushes: int) -> Callable[[], tuple[State, jax.Array, jax.Array]]:
    """What advances so many copies of the job in lanes; they differ in their random draws."""
    inputs, states = (
        jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *jnp.shape(x))), tree) for tree in (job.inputs, job.state)
    )
    inputs = inputs._replace(key=jnp.arange(lanes, dtype=jnp.uint64))
    many, forever = jnp.asarray(pushes, jnp.int32), jnp.asarray(jnp.inf)
    return lambda: loop.advance_lanes(job.program, job.data, inputs, states, many, forever, rows=pushes)


def underway(job: EngineJob) -> EngineJob:
    """The job after two pushes of every worker. At its beginning all workers pull first, and a push is many events."""
    state, _, used = job.advance(2 * job.inputs.active.shape[0])
    assert int(used) == int(state.clock.pushes)
    return replace(job, state=state)


def dataset(features: int) -> Dataset:
    return classification(samples=1800, features=features, classes=10, seed=0)


def engine_job(features: int, hidden: tuple[int, ...], workers: int, policy: SyncPolicy) -> EngineJob:
    """Workers whose compute time jitters by 20 %, servers with bandwidth for four workers: nothing is switched off."""
    proxy = make_proxy(Mlp(hidden=hidden) if hidden else Logistic(), dataset(features))
    data = learning.TrainingData(tuple(map(jnp.asarray, proxy.train)), tuple(map(jnp.asarray, proxy.valid)))
    rows = learning.batch_shapes(proxy.train, BATCH)
    model = learning.LearningProgram(proxy.losses, proxy.correct, "sgd", "each", BATCH, rows=rows)
    program = Program(model, policy.decide, policy.probes, "maxmin", overlapping=False)
    inputs = _inputs(workers, len(proxy.train[0]))
    blank = changes.blank(program, inputs, proxy.init(0))
    begun = policy.init(inputs.active)
    state = changes.launch(program, data, inputs, blank, begun, inputs.active, jnp.linspace(0.0, 4.0, workers))
    return EngineJob(program, data, inputs, state)


def sparse_job(
    largest: int, workers: int, policy: SyncPolicy, batch: int = 64, rank: int = 8, servers: int = 4
) -> EngineJob:
    """The same machines, and servers that hold embedding tables in 128 blocks; a factorisation machine learns clicks."""
    proxy = make_proxy(FactorisationMachine(rank=rank), embedded_clicks(largest=largest))
    rows = np.asarray(proxy.train[0])
    known = map(jnp.asarray, (seen_before(rows), popularity(rows, proxy.embedding.rows)))
    data = learning.TrainingData((*proxy.train, *known), proxy.valid)
    model = learning.LearningProgram(proxy.losses, proxy.correct, "sgd", "each", batch, proxy.embedding)
    program = Program(model, policy.decide, policy.probes, "maxmin", overlapping=True)
    nodes = workers + servers
    held = np.zeros((128, nodes))
    held[np.arange(128), workers + np.arange(128) * servers // 128] = 1.0
    active = np.arange(nodes) < workers
    inputs = _inputs(nodes, len(proxy.train[0]))._replace(
        active=jnp.asarray(active),
        samples=jnp.full(nodes, batch, jnp.int32),
        usage=jnp.zeros((2 * nodes, 2 * nodes)),
        capacity=jnp.full(2 * nodes, 1e7),
        placement=RowPlacement(*map(jnp.asarray, (held, held, 2000.0, 2000.0, 1e-6))),
    )
    blank = changes.blank(program, inputs, proxy.init(0))
    begun = policy.init(inputs.active)
    state = changes.launch(program, data, inputs, blank, begun, inputs.active, jnp.linspace(0.0, 4.0, nodes))
    return EngineJob(program, data, inputs, state)


def timing_job(workers: int) -> EngineJob:
    """The same cluster without a model, under ASP."""
    policy, inputs = policies.asp(), _inputs(workers, 8 * workers)
    program = Program(None, policy.decide, policy.probes, "maxmin", overlapping=False)
    data = learning.TrainingData((), ())
    blank = changes.blank(program, inputs, None)
    begun = policy.init(inputs.active)
    state = changes.launch(program, data, inputs, blank, begun, inputs.active, jnp.linspace(0.0, 4.0, workers))
    return EngineJob(program, data, inputs, state)


def _inputs(workers: int, samples: int) -> EngineInputs:
    each = partial(jnp.full, workers)
    shard = samples // workers
    return EngineInputs(
        key=jnp.uint64(12345),
        active=jnp.ones(workers, bool),
        compute_seconds=each(4.0),
        overhead_seconds=each(0.01),
        slowdown=each(1.0),
        jitter=jnp.asarray(0.2),
        factors=jnp.zeros((0, 0)),
        factor_counts=jnp.zeros(0, jnp.int32),
        sleep_probability=each(0.0),
        sleep_mean_seconds=each(0.0),
        sleep_sd_seconds=each(0.0),
        pull_bytes=jnp.asarray(1e6),
        push_bytes=jnp.asarray(1e6),
        nic=each(1e7),
        nic_levels=jnp.asarray([1e7]),
        serve_out=jnp.asarray(4e7),
        serve_in=jnp.asarray(4e7),
        usage=jnp.zeros((2 * workers, 0)),
        capacity=jnp.zeros(0),
        bucket_bytes=jnp.zeros(0),
        bucket_refill=jnp.zeros(0),
        bucket_taken=jnp.zeros(0),
        apply_seconds=jnp.asarray(0.0),
        blocked_until_seconds=jnp.asarray(-jnp.inf),
        samples=jnp.full(workers, BATCH, jnp.int32),
        shard_start=jnp.arange(workers, dtype=jnp.int32) * shard,
        shard_length=jnp.full(workers, shard, jnp.int32),
        learning_rate=jnp.float32(RATE),
        momentum=jnp.float32(0.0),
        evaluate_clocks=jnp.asarray(2**30, jnp.int32),
        target_loss=jnp.asarray(-jnp.inf),
        target_accuracy=jnp.asarray(jnp.inf),
        target_clocks=jnp.asarray(2**30, jnp.int32),
        target_samples=jnp.asarray(2**62, jnp.int64),
        assigned=jnp.zeros(0),
        push_work=jnp.zeros(0),
        control_queue=jnp.zeros(0),
    )


def bare_scan(job: EngineJob, workers: int, pushes: int, lanes: int = 0) -> Callable[[], Any]:
    """`pushes` gradients of the same mini-batches and as many updates, one after another, and nothing else; with `lanes`, so
    many scans side by side under `vmap`."""
    model = job.program.model
    assert model is not None
    assert job.state.learned is not None
    parameters = job.state.learned.parameters

    @jax.jit
    def run(parameters: Any) -> Any:
        def one(parameters: Any, i: jax.Array) -> tuple[Any, jax.Array]:
            rows, count = learning.minibatch(model, job.data, job.inputs, i % workers, i // workers)
            loss, gradient = jax.value_and_grad(partial(learning.mean_loss, model))(parameters, rows, count)
            stepped = jax.tree.map(lambda p, g: p - job.inputs.learning_rate * g, parameters, gradient)
            return stepped, loss

        return jax.lax.scan(one, parameters, jnp.arange(pushes, dtype=jnp.int32))

    if lanes:
        side_by_side = jax.tree.map(lambda p: jnp.broadcast_to(p, (lanes, *p.shape)), parameters)
        return partial(jax.jit(jax.vmap(run)), side_by_side)
    return lambda: run(parameters)


def bare_sparse_scan(job: EngineJob, workers: int, pushes: int) -> Callable[[], Any]:
    """`pushes` sparse gradients of the same mini-batches, each added to the rows that it looks up, and nothing else."""
    model = job.program.model
    assert model is not None
    assert job.state.learned is not None
    embedding = model.embedding
    assert embedding is not None
    parameters, rate = job.state.learned.parameters, job.inputs.learning_rate

    @jax.jit
    def run(parameters: Any) -> Any:
        def one(parameters: Any, i: jax.Array) -> tuple[Any, jax.Array]:
            batch, _ = learning.minibatch(model, job.data, job.inputs, i % workers, i // workers)

            def loss(looked_up: jax.Array, bias: jax.Array) -> jax.Array:
                return jnp.mean(embedding.losses({"bias": bias}, looked_up, batch))

            looked_up = jnp.take(parameters["rows"], batch[0], axis=0, mode="clip")
            value, (rows, bias) = jax.value_and_grad(loss, argnums=(0, 1))(looked_up, parameters["bias"])
            rows = parameters["rows"].at[batch[0]].add(-rate * rows, mode="drop")
            return {"rows": rows, "bias": parameters["bias"] - rate * bias}, value

        return jax.lax.scan(one, parameters, jnp.arange(pushes, dtype=jnp.int32))

    return lambda: run(parameters)


class SharedLink:
    """Servers' bandwidth in SimPy: transfers in flight share it evenly, each up to its own NIC."""

    def __init__(self, env: simpy.Environment, capacity: float, nic: float) -> None:
        self._env, self._capacity, self._nic = env, capacity, nic
        self._left: dict[simpy.Event, float] = {}
        self._since, self._changes = 0.0, 0

    def transfer(self, size: float) -> simpy.Event:
        """An event that occurs when `size` bytes are transferred."""
        self._progress()
        done = self._env.event()
        self._left[done] = size
        self._plan()
        return done

    def _rate(self) -> float:
        return min(self._nic, self._capacity / len(self._left))

    def _progress(self) -> None:
        if self._left:
            moved = self._rate() * (self._env.now - self._since)
            self._left = {done: left - moved for done, left in self._left.items()}
        self._since = self._env.now

    def _plan(self) -> None:
        self._changes += 1
        if self._left:
            self._env.process(self._end_of_next(self._changes, min(self._left, key=self._left.__getitem__)))

    def _end_of_next(self, change: int, done: simpy.Event) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(max(self._left[done], 0.0) / self._rate())
        if change == self._changes:  # no transfer has started or ended meanwhile
            self._progress()
            del self._left[done]
            self._plan()
            done.succeed()


def plain_simpy(job: EngineJob, workers: int, pushes: int) -> Callable[[], list[tuple[float, int, int, float]]]:
    """The straightforward way: SimPy processes, a jitted gradient at every pull, a jitted update at every push.

    The same job as the engine's: shared bandwidth both ways, jitter, staleness, a record per push.
    """
    model = job.program.model
    assert model is not None
    assert job.state.learned is not None
    first = job.state.learned.parameters

    @jax.jit
    def gradient(parameters: Any, worker: int, clock: int) -> Any:
        rows, count = learning.minibatch(model, job.data, job.inputs, jnp.asarray(worker), jnp.asarray(clock))
        return jax.value_and_grad(partial(learning.mean_loss, model))(parameters, rows, count)

    @jax.jit
    def update(parameters: Any, made: Any) -> Any:
        return jax.tree.map(lambda p, g: p - job.inputs.learning_rate * g, parameters, made)

    def run() -> list[tuple[float, int, int, float]]:
        env, rng = simpy.Environment(), np.random.default_rng(0)
        out, back = SharedLink(env, 4e7, 1e7), SharedLink(env, 4e7, 1e7)
        parameters, done = first, env.event()
        records: list[tuple[float, int, int, Any]] = []

        def worker(me: int) -> Generator[simpy.Event, Any, None]:
            nonlocal parameters
            clock = 0
            while True:
                pulled = len(records)
                loss, made = gradient(parameters, me, clock)
                yield out.transfer(1e6)
                yield env.timeout(4.0 * rng.lognormal(0.0, 0.2) + 0.01)
                yield back.transfer(1e6)
                parameters = update(parameters, made)
                records.append((env.now, me, len(records) - pulled, loss))
                clock += 1
                if len(records) == pushes:
                    done.succeed()
                    return

        for me in range(workers):
            env.process(worker(me))
        env.run(until=done)
        return [(seconds, me, staleness, float(loss)) for seconds, me, staleness, loss in records]

    return run
