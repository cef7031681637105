"""The jobs that the benchmarks time: the engine's, a bare scan of the same gradients and updates, and a plain SimPy one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import simpy

from simulators import engine, learning, transitions
from simulators.data import Dataset, classification
from simulators.plant import Plant
from simulators.proxies import make_proxy
from simulators.workloads import Logistic, Mlp
from tuners.actions import SyncPolicy

RATE = 0.01
BATCH = 16


@dataclass(frozen=True)
class EngineJob:
    """A job ready to advance."""

    program: engine.Program
    data: learning.Data
    plant: Plant
    state: engine.State

    def advance(self, pushes: int) -> tuple[engine.State, jax.Array, jax.Array]:
        many = jnp.asarray(pushes, jnp.int32)
        return engine.advance(self.program, self.data, self.plant, self.state, many, jnp.asarray(jnp.inf), rows=pushes)


def dataset(features: int) -> Dataset:
    return classification(samples=1800, features=features, classes=10, seed=0)


def engine_job(features: int, hidden: tuple[int, ...], workers: int, policy: SyncPolicy) -> EngineJob:
    """Workers whose compute time jitters by 20 %, servers that carry four workers at full speed: nothing is switched off."""
    proxy = make_proxy(Mlp(hidden=hidden) if hidden else Logistic(), dataset(features))
    data = learning.Data(tuple(map(jnp.asarray, proxy.train)), tuple(map(jnp.asarray, proxy.valid)))
    model = learning.Model(proxy.losses, proxy.correct, "sgd", "each", BATCH)
    program = engine.Program(model, policy.decide, policy.probes, "maxmin", overlapping=False)
    plant = _plant(workers, len(proxy.train[0]))
    blank = transitions.blank(program, plant, proxy.init(jax.random.key(0)))
    begun = policy.init(plant.active)
    state = transitions.launch(program, data, plant, blank, begun, plant.active, jnp.linspace(0.0, 4.0, workers))
    return EngineJob(program, data, plant, state)


def _plant(workers: int, samples: int) -> Plant:
    each = partial(jnp.full, workers)
    shard = samples // workers
    return Plant(
        key=jnp.uint64(12345),
        active=jnp.ones(workers, bool),
        compute_seconds=each(4.0),
        overhead_seconds=each(0.01),
        slowdown=each(1.0),
        jitter=jnp.asarray(0.2),
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
        apply_seconds=jnp.asarray(0.0),
        samples=jnp.full(workers, BATCH, jnp.int32),
        shard_start=jnp.arange(workers, dtype=jnp.int32) * shard,
        shard_length=jnp.full(workers, shard, jnp.int32),
        learning_rate=jnp.float32(RATE),
        momentum=jnp.float32(0.0),
        evaluate_clocks=jnp.asarray(2**30, jnp.int32),
        target_loss=jnp.asarray(-jnp.inf),
        target_accuracy=jnp.asarray(jnp.inf),
        target_clocks=jnp.asarray(2**30, jnp.int32),
    )


def bare_scan(job: EngineJob, workers: int, pushes: int) -> Callable[[], Any]:
    """`pushes` gradients of the same mini-batches and as many updates, one after another, and nothing else."""
    model = job.program.model
    assert model is not None
    assert job.state.learned is not None
    parameters = job.state.learned.parameters

    @jax.jit
    def run(parameters: Any) -> Any:
        def one(parameters: Any, i: jax.Array) -> tuple[Any, jax.Array]:
            rows, count = learning.minibatch(model, job.data, job.plant, i % workers, i // workers)
            loss, gradient = jax.value_and_grad(partial(learning.mean_loss, model))(parameters, rows, count)
            stepped = jax.tree.map(lambda p, g: p - job.plant.learning_rate * g, parameters, gradient)
            return stepped, loss

        return jax.lax.scan(one, parameters, jnp.arange(pushes, dtype=jnp.int32))

    return lambda: run(parameters)


def plain_simpy(job: EngineJob, workers: int, pushes: int) -> Callable[[], int]:
    """The way one would write it at first: a SimPy process per worker, a jitted gradient and a jitted update per push.

    Generous to itself: its transfers share nothing, so there is no bandwidth to work out.
    """
    model = job.program.model
    assert model is not None
    assert job.state.learned is not None

    @jax.jit
    def gradient(parameters: Any, worker: int, clock: int) -> Any:
        rows, count = learning.minibatch(model, job.data, job.plant, jnp.asarray(worker), jnp.asarray(clock))
        return jax.value_and_grad(partial(learning.mean_loss, model))(parameters, rows, count)

    @jax.jit
    def update(parameters: Any, made: Any) -> Any:
        return jax.tree.map(lambda p, g: p - job.plant.learning_rate * g, parameters, made)

    def run() -> int:
        env, rng = simpy.Environment(), np.random.default_rng(0)
        held = {"parameters": job.state.learned.parameters, "pushes": 0}
        done = env.event()

        def worker(me: int) -> Generator[simpy.Event, Any, None]:
            clock = 0
            while True:
                loss, made = gradient(held["parameters"], me, clock)
                del loss
                yield env.timeout(0.1)
                yield env.timeout(4.0 * rng.lognormal(0.0, 0.2))
                yield env.timeout(0.1)
                held["parameters"] = update(held["parameters"], made)
                held["pushes"] += 1
                clock += 1
                if held["pushes"] == pushes:
                    jax.block_until_ready(held["parameters"])
                    done.succeed()
                    return

        for me in range(workers):
            env.process(worker(me))
        env.run(until=done)
        return int(held["pushes"])

    return run
