"""Clusters as plain queueing networks in SimPy, and what a stranger would record of them: no code of the simulator.

Each server has queues. A worker asks every server for its part of the model, computes, and sends every server its part of
the gradient, whose update the server makes then. At a barrier all workers wait for each other. A switch that all
servers hang on, and that is slower than each of them, has the queues of pulls and pushes in their place: then servers are
never the limit.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from simulators.calibration.recorded.recordings import Recording, read_tables
from traces.importers.source import table

__all__ = ["Network", "tables"]

_Steps = Generator[simpy.Event, Any, Any]


class _FirstCome:
    """Serves one request after another; with `threads`, as many at a time."""

    def __init__(self, env: simpy.Environment, threads: int = 1) -> None:
        self._env, self._queue = env, simpy.Resource(env, threads)

    def serve(self, seconds: float) -> _Steps:
        with self._queue.request() as turn:
            yield turn
            yield self._env.timeout(seconds)


class _Shared:
    """Serves all requests at once, each at an equal share of its speed."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env, self._left, self._at = env, dict[simpy.Event, float](), 0.0
        self._turns = 0

    def serve(self, seconds: float) -> _Steps:
        self._advance()
        done = self._env.event()
        self._left[done] = seconds
        self._plan()
        yield done

    def _advance(self) -> None:
        each = (self._env.now - self._at) / max(len(self._left), 1)
        self._left = {done: left - each for done, left in self._left.items()}
        self._at = self._env.now

    def _plan(self) -> None:
        self._turns += 1
        if self._left:
            self._env.process(self._end_of_next(self._turns, min(self._left, key=self._left.__getitem__)))

    def _end_of_next(self, turn: int, done: simpy.Event) -> _Steps:
        yield self._env.timeout(max(self._left[done] * len(self._left), 0.0))
        if turn == self._turns:
            self._advance()
            del self._left[done]
            done.succeed()
            self._plan()


@dataclass(frozen=True)
class Network:
    """What a mini-batch takes, and what servers do. Seconds, of the whole model; servers divide it evenly."""

    fixed_seconds: float = 0.02
    sample_seconds: float = 0.001
    jitter: float = 0.15
    transfer_seconds: float = 0.06  # of the model by one server, or by the switch, one way
    apply_seconds: float = 0.01
    first_come: bool = True  # else a server serves all at once
    one_queue: bool = False  # pulls, pushes and updates of a server are in one queue; else in one each
    threads: int = 1  # of each queue
    apply_growth: float = 0.0  # by which part of it an update takes longer for each further worker
    switch: str = ""  # "each way": pulls and pushes have a queue each in the switch; "both ways": one; "": there is none
    delay_seconds: float = 0.0  # of each request, before it is in a queue
    paused: float = 0.0  # part of the mini-batches that take 2.5 times as long
    slow: tuple[float, ...] = ()  # how many times as long each worker computes; (): all equally long
    more: dict[str, Any] = field(default_factory=dict)  # what `compute` and subclasses know

    def stations(self, env: simpy.Environment) -> dict[str, Any]:
        """The queues of one server, by what they do."""

        def station() -> Any:
            return _FirstCome(env, self.threads) if self.first_come else _Shared(env)

        one = station()
        ways = {what: one if self.one_queue else station() for what in ("pull", "push")}
        return ways | {"apply": one if self.one_queue else _FirstCome(env, self.threads)}

    def middle(self, env: simpy.Environment) -> dict[str, Any]:
        """The queues of the switch, by what passes it; none without one."""
        one, other = (_FirstCome(env) if self.first_come else _Shared(env) for _ in range(2))
        return {"pull": one, "push": one if self.switch == "both ways" else other} if self.switch else {}

    def run(self, policy: str, workers: int, servers: int, batch: int, cycles: int, seed: int) -> list[dict[str, Any]]:
        """The pushes of a run: who, when, and what the parts of its cycle took."""
        env, rng = simpy.Environment(), np.random.default_rng(seed)
        middle = self.middle(env)
        at = [self.stations(env) | middle for _ in range(servers)]
        apply_seconds = self.apply_seconds * (1 + self.apply_growth * (workers - 1))
        sigma = math.sqrt(math.log1p(self.jitter**2))
        pushes: list[dict[str, Any]] = []
        barrier = {"left": workers, "open": env.event()}

        def to_all(*steps: tuple[str, float]) -> simpy.Event:
            def to(server: dict[str, Any]) -> _Steps:
                if self.delay_seconds:
                    yield env.timeout(self.delay_seconds)
                for what, seconds in steps:
                    yield from server[what].serve(seconds / servers)

            return simpy.AllOf(env, [env.process(to(server)) for server in at])

        def worker(number: int) -> _Steps:
            for clock in range(cycles):
                begun = env.now
                yield to_all(("pull", self.transfer_seconds))
                pulled = env.now
                noise = math.exp(sigma * rng.standard_normal() - sigma**2 / 2)
                if self.paused and rng.random() < self.paused:
                    noise *= 2.5
                own = self.slow[number] if self.slow else 1.0
                yield env.timeout((self.fixed_seconds + self.sample_seconds * batch) * noise * own)
                computed = env.now
                if self.one_queue:  # a server does not take up another request between a push and its update
                    yield to_all(("push", self.transfer_seconds + apply_seconds))
                else:
                    yield to_all(("push", self.transfer_seconds), ("apply", apply_seconds))
                pushed = env.now
                times = {
                    "seconds": pushed,
                    "compute_seconds": computed - pulled,
                    "pull_seconds": pulled - begun,
                    "push_seconds": pushed - computed,
                }
                pushes.append({"worker": number, "clock": clock} | times)
                if policy == "bsp":
                    barrier["left"] -= 1
                    if barrier["left"]:
                        yield barrier["open"]
                    else:
                        opened = barrier["open"]
                        barrier.update(left=workers, open=env.event())
                        opened.succeed()

        for number in range(workers):
            env.process(worker(number))
        env.run()
        return pushes


def tables(
    network: Network,
    settings: Sequence[tuple[str, int, int, int]],
    *,
    cycles: int = 100,
    noise: float = 0.02,
    seed: int = 0,
    repetitions: int = 1,
    disturbed: float = 0.0,
) -> dict[str, Any]:
    """The tables of a trace with runs of each setting: policy, workers, servers, batch size. Each run is slower or faster
    than it should be by `noise`, or by five times that, as a part of them is, `disturbed`."""
    rng = np.random.default_rng([seed, 7])
    told: dict[str, list[dict[str, Any]]] = {"runs": [], "settings": [], "iterations": []}
    every = [setting for setting in settings for _ in range(repetitions)]
    for k, (policy, workers, servers, batch) in enumerate(every):
        run, off = f"r{k:02}", noise * rng.standard_normal()
        slower = math.exp(5 * off if disturbed and rng.random() < disturbed else off)
        told["runs"].append({"run": run, "workload": "job"})
        told["settings"].append(
            {"run": run, "seconds": 0.0, "workers": workers, "servers": servers, "policy": policy, "batch_size": batch}
        )
        for push in network.run(policy, workers, servers, batch, cycles, int(rng.integers(2**31))):
            times = {name: slower * value for name, value in push.items() if name.endswith("seconds")}
            told["iterations"].append({"run": run} | push | times)
    return {name: table(name, rows) for name, rows in told.items()}


def recording(*args: Any, **more: Any) -> Recording:
    """What calibration reads of these `tables`."""
    return read_tables(tables(*args, **more))
