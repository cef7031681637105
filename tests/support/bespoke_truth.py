"""A made-up cluster with known rates and speeds, for tests of the bespoke optimiser: plain NumPy, no simulator.

An iteration is what the model assumes: the compute time of the slowest machine, plus communication at the slowest
connection. Rates and speeds reproduce the paper's two figures for setting C: 272 Mflop per sample, 24 Gflop/s per
hyperthread, 1 Tflop/s per GPU.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tuners.actions import (
    Action,
    Cost,
    Job,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Space,
    Target,
    Window,
    WorkerWindow,
)
from tuners.bespoke_bo import schedules
from tuners.bespoke_bo.model import Observed
from tuners.settings import Choice, Node, Real

FLOP = 272e6  # of one sample
HYPERTHREAD = 24e9 / FLOP  # samples per second
SPEEDS = {"g2.2xlarge": 1.5e9 / 8, "c4.2xlarge": 1.0e9 / 8, "c4.4xlarge": 2.0e9 / 8, "c4.8xlarge": 8.5e9 / 8}
CORES = {"g2.2xlarge": 8, "c4.2xlarge": 8, "c4.4xlarge": 16, "c4.8xlarge": 36}
ROLES = ("idle", "worker", "server", "both")


@dataclass(frozen=True)
class Truth:
    """A cluster with `counts` machines of each type, and the batch of its job."""

    counts: Mapping[str, int]
    batch: int
    model_bytes: float = 173e6
    saturation: float = 0.0  # samples at which half of a device's rate is reached
    aggregation: float = 0.05  # seconds to sum gradients if several devices of a machine work
    overlap: bool = False  # a worker that has the model early computes early
    jitter: float = 0.0  # relative noise of a machine's seconds in an iteration
    dead: tuple[str, ...] = ()  # machines whose first device cannot compute
    seed: int = 0
    budget_seconds: float = 1e6
    speeds: Mapping[str, float] = field(default_factory=lambda: SPEEDS)

    @property
    def job(self) -> Job:
        nodes = tuple(
            Node(f"{kind}-{i}", kind, CORES[kind], ("gpu", "cpu") if kind.startswith("g") else ("cpu",), SPEEDS[kind], 1e10)
            for kind, count in self.counts.items()
            for i in range(count)
        )
        names = tuple(n.name for n in nodes)
        weights = tuple(
            Real(f"load/{n.name}/{d}", 0.0, 1.0)
            for n in nodes
            for d in range(len(n.devices))
            if not (n.name in self.dead and d == 0)
        )
        slots = [(n.name, d) for n in nodes for d in range(len(n.devices)) if not (n.name in self.dead and d == 0)]
        even = dict.fromkeys(slots, self.batch // len(slots))
        even |= {s: n + 1 for s, n in list(even.items())[: self.batch % len(slots)]}
        rows = {n.name: tuple(even.get((n.name, d), 0) for d in range(len(n.devices))) for n in nodes}
        working = tuple(n for n in names if any(rows[n]))
        start = Setting(workers=working, servers=names, loads=tuple(rows[n] for n in working), policy="bsp")
        roles = tuple(Choice(f"role/{n}", ROLES) for n in names)
        return Job(
            name="truth",
            nodes=nodes,
            start=start,
            space=Space(start, nodes, roles + weights),
            target=Target("clocks", 1e9),
            budget_seconds=self.budget_seconds,
            model_bytes=self.model_bytes,
            samples=10**6,
            seed=self.seed,
            methods=("checkpoint", "migrate"),
        )

    def device_seconds(self, kind: str, device: int, samples: int) -> float:
        gpu = kind.startswith("g") and device == 0
        rate = 1e12 / FLOP if gpu else HYPERTHREAD * CORES[kind]
        return (samples + self.saturation) / rate if samples else 0.0

    def transfers(self, setting: Setting) -> dict[str, float]:
        """Seconds in which each machine's connection is busy, at half of its speed: one direction after the other. A machine
        that is both worker and server sends while it receives."""
        workers, servers = len(setting.workers), len(setting.servers)
        found = {}
        for node in self.job.nodes:
            shard = self.model_bytes / servers if node.name in setting.servers else 0.0
            works = node.name in setting.workers
            moved = max((self.model_bytes - shard) * works, shard * (workers - works))
            found[node.name] = moved / (self.speeds[node.type] / 2)
        return found

    def communication_seconds(self, setting: Setting) -> float:
        """Seconds of an iteration beyond the compute time of its slowest machine."""
        return self.seconds(setting) - max(self.compute(setting).values())

    def compute(self, setting: Setting) -> dict[str, float]:
        kinds = {n.name: n.type for n in self.job.nodes}
        return {w: self.machine_seconds(kinds[w], row) for w, row in zip(setting.workers, setting.loads, strict=True)}

    def finish_seconds(self, setting: Setting) -> list[float]:
        """When each worker finishes; without overlap, communication is not included."""
        busy, compute = self.transfers(setting), self.compute(setting)
        served = max(busy[s] for s in setting.servers) if self.overlap else 0.0
        return [seconds + max(busy[w], served) * self.overlap for w, seconds in compute.items()]

    def machine_seconds(self, kind: str, row: tuple[int, ...]) -> float:
        each = [self.device_seconds(kind, d, n) for d, n in enumerate(row)]
        return max(each) + self.aggregation * (sum(n > 0 for n in row) > 1)

    def seconds(self, setting: Setting) -> float:
        """Seconds of an iteration, without noise."""
        return max(self.finish_seconds(setting)) + (0.0 if self.overlap else max(self.transfers(setting).values()))

    def observed(self, setting: Setting, rng: np.random.Generator, noise: float = 0.01) -> Observed:
        """An evaluation of one iteration, with relative `noise` on every machine and on the iteration."""
        job, clean = self.job, self.compute(setting)
        shape = len(job.nodes), max(len(n.devices) for n in job.nodes)
        loads, devices, machines = np.zeros(shape, np.int64), np.full(shape, np.nan), np.full((1, shape[0]), np.nan)
        for i, (node, row) in enumerate(zip(job.nodes, schedules.schedule(job, setting).loads, strict=True)):
            noise_factor = np.exp(noise * rng.standard_normal())
            for d, n in enumerate(row):
                loads[i, d] = n
                devices[i, d] = self.device_seconds(node.type, d, n) * noise_factor if n else np.nan
            machines[0, i] = clean.get(node.name, np.nan) * noise_factor
        slowest = float(np.nanmax(machines))
        whole = slowest + self.communication_seconds(setting) + noise * slowest * rng.standard_normal()
        serves = np.array([n.name in setting.servers for n in job.nodes])
        return Observed(loads, serves, devices, machines, np.array([whole]), whole)


class TruthSystem:
    """A system whose iterations are those of a `Truth`. Machines in `leaving` leave at the given seconds.

    In the iterations `held_up`, counted from the beginning, computing takes ten times as long.
    """

    def __init__(self, truth: Truth, leaving: Mapping[str, float] | None = None, held_up: tuple[int, ...] = ()) -> None:
        self.truth, self.job, self.now, self.status = truth, truth.job, 0.0, "running"
        self.setting, self.leaving, self.gone = self.job.start, dict(leaving or {}), set[str]()
        self.held_up, self.count = held_up, 0
        self.rng = np.random.default_rng(truth.seed)
        self.asked = list[Setting]()

    def perform(self, action: Action[Any]) -> Any:
        if isinstance(action, Reconfigure):
            self._depart()
            self.job.space.check(action.setting)
            lost = self.gone & set(action.setting.workers + action.setting.servers)
            if lost:
                raise Rejected(f"Cannot use {sorted(lost)[0]!r}: it left.")
            self.setting = action.setting
            self.asked.append(action.setting)
            self.now += 5.0
            return Cost(seconds=5.0, stall_seconds=5.0)
        assert isinstance(action, Run)
        return self._run(action)

    def _depart(self) -> None:
        late = {n for n, second in self.leaving.items() if second <= self.now}
        self.gone |= late
        keep = [w for w in self.setting.workers if w not in self.gone]
        rows = dict(zip(self.setting.workers, self.setting.loads, strict=True))
        if len(keep) < len(self.setting.workers) or self.gone & set(self.setting.servers):
            servers = tuple(s for s in self.setting.servers if s not in self.gone)
            self.setting = replace(self.setting, workers=tuple(keep), servers=servers, loads=tuple(rows[w] for w in keep))

    def _run(self, action: Run) -> Window:
        start, kinds = self.now, {n.name: n.type for n in self.job.nodes}
        names = [n.name for n in self.job.nodes]
        self._depart()
        workers = self.setting.workers
        assert action.clocks is not None
        rows = list[tuple[float, int, int, float]]()
        for i in range(-(-action.clocks // len(workers))):
            slow = 10.0 if self.count in self.held_up else 1.0
            each = {
                w: self.truth.machine_seconds(kinds[w], row) * slow * np.exp(self.truth.jitter * self.rng.standard_normal())
                for w, row in zip(workers, self.setting.loads, strict=True)
            }
            self.now += max(each.values()) + self.truth.communication_seconds(self.setting)
            self.count += 1
            rows += [(self.now, names.index(w), i, each[w]) for w in workers]
        self.status = "budget" if self.now >= self.job.budget_seconds else "running"
        return self._window(start, rows[: action.clocks])

    def _window(self, start: float, rows: list[tuple[float, int, int, float]]) -> Window:
        seconds, worker, clock, compute = (np.array(c) for c in zip(*rows, strict=True))
        none, loads = np.zeros(len(rows)), zip(self.setting.workers, self.setting.loads, strict=True)
        pushes = Pushes(seconds, worker, clock, compute, none, none, none, none.astype(np.int32), none * np.nan)
        return Window(
            start_seconds=start,
            end_seconds=self.now,
            clocks=len(rows),
            pushes=pushes,
            workers=tuple(self._worker(name, row, pushes) for name, row in loads),
            nodes=tuple(n for n in self.job.nodes if n.name not in self.gone),
            setting=self.setting,
            status=self.status,
        )

    def _worker(self, name: str, row: tuple[int, ...], pushes: Pushes) -> WorkerWindow:
        index = [n.name for n in self.job.nodes].index(name)
        kind, mine = self.job.nodes[index].type, pushes.compute_seconds[pushes.worker == index]
        slowdown = mine.mean() / self.truth.machine_seconds(kind, row)
        each = tuple(self.truth.device_seconds(kind, d, n) * slowdown for d, n in enumerate(row))
        return WorkerWindow(name, len(mine), len(mine) * sum(row), float(mine.sum()), 0.0, 0.0, 0.0, each)


def play(tuner: Generator[Action[Any], Any, None], system: TruthSystem, most: int) -> list[Action[Any]]:
    """Carry out the first `most` actions of a tuner, or all until the job ends."""
    asked, answer = list[Action[Any]](), None
    for _ in range(most):
        try:
            action = tuner.throw(answer) if isinstance(answer, Rejected) else tuner.send(answer)
        except StopIteration:
            break
        asked.append(action)
        try:
            answer = system.perform(action)
        except Rejected as refusal:
            answer = refusal
        if system.status != "running":
            break
    tuner.close()
    return asked
