"""Mini-batches that take as long as the scenario says: the speed of the node's type, its noise, sleeps and stragglers.

A worker computes its gradient, and then waits until the time is over that the simulator draws for the same mini-batch. The
draws depend on seed, node and number of the mini-batch only, so a live run meets those of the simulated one.
"""

from __future__ import annotations

import time

from harness.live.worker.spec import Spec
from harness.live.worker.tasks import Computed, WorkerTask
from simulators.cluster import trace_driven
from simulators.cluster.profiles import node_seconds
from simulators.engine import preparation
from simulators.engine.timing import mini_batch_seconds
from tuners import policies

__all__ = ["EmulatedCompute"]


class EmulatedCompute:
    """What a worker on `node` computes, in the time of the scenario. A host that is slower itself takes its own time, and
    then sleeps as the scenario says."""

    def __init__(self, spec: Spec, node: str) -> None:
        scenario, nodes = spec.scenario, spec.scenario.cluster.nodes
        conditions, factors = trace_driven.expand_replay(scenario.conditions, nodes, scenario.budget.seconds, spec.seed)
        self._spec, self._kind = spec, dict(nodes)[node]
        self._worker = [name for name, _ in nodes].index(node)
        self._inputs = preparation.build(
            scenario.cluster,
            spec.workload,
            conditions,
            spec.job,
            spec.job.start,
            policies.of_setting(spec.job.start),
            seed=spec.seed,
            factors=factors,
        )
        self.seconds(0, 1, 0, 0)  # compile

    def __call__(self, task: WorkerTask) -> Computed:
        began = time.perf_counter()
        made = self._spec.compute(task)
        if task.kind != "gradient" or task.work is None:
            return made
        work = task.work
        computing, sleeping = self.seconds(work.clock, work.samples, work.intra_threads, work.inter_threads)
        wanted = (max(computing, time.perf_counter() - began) + sleeping) * work.slowdown
        time.sleep(max(began + wanted - time.perf_counter(), 0.0))
        return made._replace(seconds=time.perf_counter() - began)

    def seconds(self, clock: int, samples: int, intra_threads: int, inter_threads: int) -> tuple[float, float]:
        """What the simulator draws for mini-batch number `clock` of so many samples: seconds of computing, and of sleeping
        after it."""
        loads = (samples, *[0] * (len(self._kind.devices) - 1))  # a live worker computes on its first device
        usual, _ = node_seconds(self._kind, self._spec.workload.demand, loads, intra_threads, inter_threads)
        both, sleeping = (float(mini_batch_seconds(self._inputs, self._worker, clock, of)) for of in (usual, 0.0))
        return both - sleeping, sleeping
