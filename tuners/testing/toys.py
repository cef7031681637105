"""Toy systems: small deterministic parameter servers with the whole contract, to test tuners.

A few workers run real stale SGD on a quadratic loss, in simulated time. The toys are as simple as the contract allows and
resemble no cluster: they show whether a tuner works, not how good it is. A reconfiguration takes half a second; then every
worker starts a new mini-batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    GradientNoise,
    Install,
    Job,
    MeasureNoise,
    NodeEvent,
    Push,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Space,
    Status,
    SyncPolicy,
    Target,
    Window,
    WorkerWindow,
)
from tuners.playing.system import (
    Handlers,
    admitted,
    branch_of,
    check_installs,
    check_no_table,
    check_no_timers,
    check_not_last,
    check_running,
    handler_of,
    method_of,
)
from tuners.settings import Choice, Integer, Knob, Node, Real

__all__ = ["Toy", "toys"]

T = TypeVar("T")

_CURVATURE = np.array([0.1, 0.3, 1.0])
_START = np.array([3.0, 3.0, 3.0])
_SECONDS_PER_SAMPLE = 0.01
_CHANGE_SECONDS = 0.5
_NOISE = 0.3
_EVALUATE_CLOCKS = 10
_DRAWS = 4096
_DIVERGED_LOSS = 1e9


class _Cycles(NamedTuple):
    """What a setting says of every node's mini-batch, for the workers that are there."""

    active: NDArray[np.bool_]  # [k]
    workers: tuple[int, ...]  # the numbers of the nodes that are
    samples: tuple[int, ...]  # [k]; this and the next ones are 0 for other nodes
    steps: tuple[int, ...]  # [k]
    compute_seconds: tuple[float, ...]  # [k], of one step without jitter
    pull_seconds: tuple[float, ...]  # [k]


@dataclass
class _Branch:
    """One branch. Lists [k] have an entry per node: of so few, they are faster than arrays. `seconds` do not advance while
    other branches run."""

    setting: Setting
    weights: NDArray[np.float64]
    velocity: NDArray[np.float64]
    pulled: list[NDArray[np.float64]]  # [k], the parameters that each worker pulled last
    version: list[int]  # [k], number of updates in them
    due: list[float]  # [k], completion of the next push; infinite for a node that waits or is no worker
    idle_since: list[float]  # [k]
    waited: list[float]  # [k], seconds before this mini-batch
    done: list[int]  # [k], pushes since the job began
    clocks: list[int]  # [k], pushes since the last reconfiguration, as the policy counts them
    cycles: _Cycles  # of the setting
    policy: SyncPolicy | None = None  # installed by the tuner
    policy_state: Any = None
    updates: int = 0  # pushes
    applied: int = 0  # gradients that the policy has accepted
    seconds: float = 0.0
    diverged: bool = False
    testing: bool = False  # drops every gradient


class _Training:
    """Trains branches of one job, push by push; random draws and the nodes that are there are the same for all of them."""

    def __init__(self, job: Job, slowness: Mapping[str, float]) -> None:
        self._job, self._slowness = job, slowness
        self._names = [n.name for n in job.nodes]
        self._jitter, self._noise = _draws(job.seed, len(job.nodes))
        self.left: set[str] = set()  # nodes that have left

    def cycles(self, setting: Setting) -> _Cycles:
        """The mini-batches under a setting, of the workers that are there."""
        active = np.array([n in setting.workers and n not in self.left for n in self._names])
        crowd = max(1.0, len(setting.workers) / max(1, len(setting.servers)))
        rows = []
        for node, works in zip(self._job.nodes, active, strict=True):
            samples, steps = (_samples(setting, node.name), setting.steps_of(node.name)) if works else (0, 0)
            compute = _SECONDS_PER_SAMPLE * samples * self._slowness.get(node.name, 1.0)
            pull = self._job.model_bytes * setting.transfer_bits / 32 / node.nic_bytes_per_second * crowd
            rows.append((samples, steps, compute, pull))
        return _Cycles(active, tuple(np.flatnonzero(active).tolist()), *zip(*rows, strict=True))

    def change(self, branch: _Branch, setting: Setting) -> None:
        """Put a branch under a setting."""
        if (setting.policy, setting.staleness) != (branch.setting.policy, branch.setting.staleness):
            branch.policy = None  # an installed policy is used until a setting names another
        branch.setting = setting
        self.restart(branch)

    def restart(self, branch: _Branch) -> None:
        """All workers abandon their mini-batch and start a new one; the policy starts from its first state."""
        branch.cycles = self.cycles(branch.setting)
        active = branch.cycles.active
        branch.due = [math.inf] * len(active)
        branch.clocks = [0] * len(active)
        branch.idle_since = [branch.seconds] * len(active)
        if branch.policy is None and branch.setting.policy not in ("bsp", "asp", "ssp"):
            branch.policy = policies.of_setting(branch.setting)
        branch.policy_state = branch.policy.init(active) if branch.policy else None
        for worker in np.flatnonzero(active).tolist():
            self._begin(branch, worker)

    def _begin(self, branch: _Branch, worker: int) -> None:
        branch.pulled[worker] = branch.weights
        branch.version[worker] = branch.applied
        branch.waited[worker] = branch.seconds - branch.idle_since[worker]
        branch.due[worker] = branch.seconds + sum(self._cycle_seconds(branch, worker))

    def _cycle_seconds(self, branch: _Branch, worker: int) -> tuple[float, float, float]:
        """Compute, pull and push seconds of one mini-batch."""
        cycles, jitter = branch.cycles, float(self._jitter[worker, branch.done[worker] % _DRAWS])
        compute = cycles.compute_seconds[worker] * jitter * cycles.steps[worker]
        pull = cycles.pull_seconds[worker]
        return compute, pull, pull / 2

    def push(self, branch: _Branch, worker: int) -> tuple[Any, ...]:
        """One push, at the second when it is due; its values in the order of `Pushes`, after the first one, its time."""
        draw = branch.done[worker] % _DRAWS
        compute, pull, push = self._cycle_seconds(branch, worker)
        at = branch.pulled[worker] + self._noise[worker, draw] / math.sqrt(branch.cycles.samples[worker])
        loss = _loss(at)
        staleness = branch.applied - branch.version[worker]
        branch.seconds = branch.due[worker]
        row = (worker, branch.done[worker], compute, pull, push, branch.waited[worker], staleness)
        branch.done[worker] += 1
        branch.clocks[worker] += 1
        branch.due[worker] = math.inf
        branch.idle_since[worker] = branch.seconds
        released, accepted = self._decide(branch, worker, staleness, loss)
        steps = branch.cycles.steps[worker]
        if accepted and not branch.testing and steps > 1:
            # All these steps on a quadratic, in closed form; a toy has no outer momentum.
            kept = (1.0 - branch.setting.learning_rate * _CURVATURE) ** steps
            branch.weights = branch.weights - branch.setting.outer_rate * (1.0 - kept) * at
        elif accepted and not branch.testing:
            branch.velocity = branch.setting.momentum * branch.velocity + _CURVATURE * at
            branch.weights = branch.weights - branch.setting.learning_rate * branch.velocity
        branch.updates += 1
        branch.applied += int(accepted)
        branch.diverged = not loss < _DIVERGED_LOSS
        for other in released:
            self._begin(branch, other)
        return (*row, np.nan if self._job.target.metric == "clocks" else loss)

    def _decide(self, branch: _Branch, worker: int, staleness: int, loss: float) -> tuple[list[int], bool]:
        """The workers that go on after a push, and whether its gradient is accepted."""
        if branch.policy is None:
            bound = {"bsp": 0, "asp": math.inf}.get(branch.setting.policy, branch.setting.staleness)
            works = branch.cycles.workers
            least = min([branch.clocks[w] for w in works])
            return [w for w in works if branch.due[w] == math.inf and branch.clocks[w] - least <= bound], True
        active, clocks = branch.cycles.active, np.array(branch.clocks, np.int32)
        waiting = active & ~np.isfinite(branch.due)
        push = Push(np.int32(worker), clocks, waiting, active, branch.seconds, np.int32(staleness), loss)
        branch.policy_state, decision = _compiled(branch.policy.decide)(branch.policy_state, push)
        return np.flatnonzero(np.asarray(decision.release) & active).tolist(), bool(decision.accept)


@dataclass
class Toy:
    """A system with one job. It can refuse forks, and nodes can leave at given seconds."""

    job: Job
    forks: bool = True
    slowness: Mapping[str, float] = field(default_factory=dict)  # factor on the compute time of a node
    leaving: Mapping[str, float] = field(default_factory=dict)  # the second at which a node leaves
    now: float = 0.0
    status: Status = "running"

    def __post_init__(self) -> None:
        k, size = len(self.job.nodes), len(_START)
        self._training = _Training(self.job, self.slowness)
        self._ids = 0
        main = _Branch(
            setting=self.job.start,
            weights=_START.copy(),
            velocity=np.zeros(size),
            pulled=[np.zeros(size)] * k,
            version=[0] * k,
            due=[math.inf] * k,
            idle_since=[0.0] * k,
            waited=[0.0] * k,
            done=[0] * k,
            clocks=[0] * k,
            cycles=self._training.cycles(self.job.start),
        )
        self._branches = {0: main}
        self._training.restart(main)

    # ---------------------------------------------------------------------------------------------------------- actions

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, where it cannot be done."""
        handlers: Handlers = {
            Run: self._run,
            Reconfigure: self._reconfigure,
            Install: self._install,
            Fork: self._fork,
            Free: self._free,
            Evaluate: lambda a: self._evaluation(branch_of(self._branches, a.branch)),
            MeasureNoise: lambda a: self._noise_of(branch_of(self._branches, a.branch)),
        }
        return handler_of(action, handlers)(action)

    def _reconfigure(self, action: Reconfigure) -> Cost:
        branch = branch_of(self._branches, action.branch)
        setting = self._admitted(action.setting, branch)
        method_of(action, self.job)
        if setting == branch.setting:
            return Cost(seconds=0.0, stall_seconds=0.0)
        branch.seconds += _CHANGE_SECONDS
        self.now += _CHANGE_SECONDS
        self._training.change(branch, setting)
        self._settle()
        return Cost(seconds=_CHANGE_SECONDS, stall_seconds=_CHANGE_SECONDS, steps=("restart",))

    def _admitted(self, setting: Setting, branch: _Branch) -> Setting:
        return admitted(setting, branch.setting, self.job, {n.name for n in self.job.nodes} - self._training.left)

    def _fork(self, action: Fork) -> int:
        if not self.forks:
            raise Rejected(f"Cannot fork branch {action.branch}: this toy keeps one model; try settings in place.")
        parent = branch_of(self._branches, action.branch)
        setting = self._admitted(action.setting or parent.setting, parent)
        child = copy.deepcopy(replace(parent, policy=None, policy_state=None))
        child.policy, child.policy_state, child.testing = parent.policy, parent.policy_state, action.testing
        if setting != parent.setting:
            self._training.change(child, setting)
        self._ids += 1
        self._branches[self._ids] = child
        return self._ids

    def _free(self, action: Free) -> None:
        branch_of(self._branches, action.branch)
        check_not_last(self._branches, action.branch)
        del self._branches[action.branch]
        self._settle()

    def _install(self, action: Install) -> None:
        branch = branch_of(self._branches, action.branch)
        check_installs(action.policy, self.job)
        check_no_timers(action.policy)
        check_no_table(action.policy)
        branch.policy = action.policy
        self._training.restart(branch)

    def _run(self, action: Run) -> Window:
        branch = branch_of(self._branches, action.branch)
        check_running(f"run branch {action.branch}", "diverged" if branch.diverged else "running")
        ahead = self.now - branch.seconds  # of the job's seconds over the branch's
        until = min(self.job.budget_seconds, self.now + (action.seconds or np.inf)) - ahead
        start, rows, seen, events = self.now, list[tuple[Any, ...]](), list[Evaluation](), list[NodeEvent]()
        while self.status == "running" and not branch.diverged and len(rows) < (action.clocks or np.inf):
            events += self._departures(branch, ahead)
            worker = branch.due.index(min(branch.due))
            if branch.due[worker] == math.inf:
                self.status = "deadlock"
            elif branch.due[worker] > until:
                branch.seconds = until
                self.now = until + ahead
                self.status = "budget" if self.now >= self.job.budget_seconds else self.status
                break
            else:
                row = self._training.push(branch, worker)
                self.now = branch.seconds + ahead
                rows.append((self.now, *row))
                self._settle()
                if branch.updates % _EVALUATE_CLOCKS == 0:
                    seen.append(self._evaluation(branch))
        return self._window(branch, start, rows, seen, events)

    def _departures(self, branch: _Branch, ahead: float) -> list[NodeEvent]:
        """The nodes that leave before the next push; the other workers restart without them."""
        if len(self._training.left) == len(self.leaving):
            return []
        moment = min(branch.due) + ahead
        gone = [n for n, seconds in self.leaving.items() if seconds <= moment and n not in self._training.left]
        self._training.left.update(gone)
        for b in self._branches.values() if gone else ():
            workers, servers = ([n for n in m if n not in gone] for m in (b.setting.workers, b.setting.servers))
            b.setting = b.setting.on(tuple(workers), tuple(servers))
            self._training.restart(b)
        return [NodeEvent(self.leaving[n], n, "left") for n in gone]

    def _evaluation(self, branch: _Branch) -> Evaluation:
        loss = np.nan if self.job.target.metric == "clocks" else _loss(branch.weights)
        if self.status == "running" and self.job.target.reached(loss, np.nan, branch.updates):
            self.status = "target"
        return Evaluation(self.now, branch.updates, loss, np.nan)

    def _noise_of(self, branch: _Branch) -> GradientNoise:
        if self.job.target.counts:
            return GradientNoise(self.now, np.nan, np.nan)
        gradient, spread = _CURVATURE * branch.weights, _CURVATURE * np.full(len(_START), _NOISE)
        return GradientNoise(self.now, float(gradient @ gradient), float(spread @ spread))

    def _settle(self) -> None:
        """The job has diverged when all branches have."""
        if all(b.diverged for b in self._branches.values()):
            self.status = "diverged"

    def _window(
        self, branch: _Branch, start: float, rows: list[tuple[Any, ...]], seen: list[Evaluation], events: list[NodeEvent]
    ) -> Window:
        kinds = (np.float64, np.int32, np.int32, *[np.float64] * 4, np.int32, np.float64)
        columns = zip(*rows, strict=True) if rows else ((),) * len(kinds)
        pushes = Pushes(*(np.array(c, kind) for c, kind in zip(columns, kinds, strict=True)))
        there = [(i, n) for i, n in enumerate(self.job.nodes) if n.name not in self._training.left]
        numbers = {n.name: i for i, n in there}
        return Window(
            start_seconds=start,
            end_seconds=self.now,
            clocks=len(rows),
            pushes=pushes,
            workers=tuple(_worker(branch.setting, w, numbers[w], pushes) for w in branch.setting.workers if w in numbers),
            evaluations=tuple(seen),
            events=tuple(events),
            nodes=tuple(n for _, n in there),
            setting=branch.setting,
            status="diverged" if branch.diverged else self.status,
        )


def _worker(setting: Setting, name: str, number: int, pushes: Pushes) -> WorkerWindow:
    """What the node `name`, which has this number, did in `pushes`."""
    mine = pushes.worker == number
    count, compute = int(mine.sum()), float(pushes.compute_seconds[mine].sum())
    return WorkerWindow(
        node=name,
        pushes=count,
        samples=count * setting.steps_of(name) * _samples(setting, name),
        compute_seconds=compute,
        pull_seconds=float(pushes.pull_seconds[mine].sum()),
        push_seconds=float(pushes.push_seconds[mine].sum()),
        wait_seconds=float(pushes.wait_seconds[mine].sum()),
        device_seconds=(compute / max(count, 1),),
    )


def _samples(setting: Setting, name: str) -> int:
    """In one mini-batch of that worker."""
    rows = dict(zip(setting.workers, setting.loads, strict=False))
    return sum(rows.get(name, (setting.batch_size,)))


@lru_cache(maxsize=16)
def _draws(seed: int, nodes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The factors of compute times, [nodes, draws], and the noise of gradients, [nodes, draws, parameters]."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(0.0, 0.2, (nodes, _DRAWS)), rng.normal(0.0, _NOISE, (nodes, _DRAWS, len(_START)))
    for array in drawn:
        array.flags.writeable = False  # toys share them
    return drawn


@lru_cache(maxsize=64)
def _compiled(decide: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a policy, compiled. To make this anew takes longer than to call it."""
    import jax

    return jax.jit(decide)


def _loss(weights: NDArray[np.float64]) -> float:
    return 0.5 * float(_CURVATURE @ (weights * weights))


# ------------------------------------------------------------------------------------------------------------- the toys


def toys() -> dict[str, Callable[[int], Toy]]:
    """Every toy by name, as a function of the seed. Together they cover what a system can do, refuse and report."""
    training: tuple[Knob, ...] = (
        Real("learning_rate", 1e-3, 30.0, log=True),
        Real("momentum", 0.0, 0.9),
        Integer("batch_size", 2, 16, log=True),
    )
    policy: tuple[Knob, ...] = (Choice("policy", ("bsp", "asp", "ssp", "dssp")), Integer("staleness", 0, 6))
    age: tuple[Knob, ...] = (Choice("policy", ("discard", "admit")), Choice("staleness", (0, 1, 2, 4)))
    local: tuple[Knob, ...] = (Integer("local_steps", 1, 16, log=True), Real("outer_rate", 0.1, 1.5))
    roles = tuple(Choice(f"role/n{i}", ("worker", "server", "both", "idle")) for i in range(5))
    every: tuple[Knob, ...] = (Integer("worker_count", 1, 4), *policy, *training)
    return {
        "one knob": lambda seed: Toy(_job("one knob", seed, training[:1])),
        "every knob": lambda seed: Toy(_job("every knob", seed, every), slowness={"n0": 3.0}),
        "no forks": lambda seed: Toy(_job("no forks", seed, every), forks=False),
        "no knobs": lambda seed: Toy(_job("no knobs", seed, ())),
        "ages": lambda seed: Toy(_job("ages", seed, (*age, *training[:1]), policy="admit"), slowness={"n0": 3.0}),
        "local steps": lambda seed: Toy(_job("local steps", seed, (*local, *training[:1]))),
        "roles by node": lambda seed: Toy(_job("roles by node", seed, roles)),
        "a node leaves": lambda seed: Toy(_job("a node leaves", seed, every), leaving={"n1": 4.0}),
        "timing only": lambda seed: Toy(_job("timing only", seed, every, Target("clocks", 600))),
    }


def _job(name: str, seed: int, knobs: tuple[Knob, ...], target: Target | None = None, policy: str = "asp") -> Job:
    """A job on five equal nodes, three workers and two servers, with these knobs."""
    nodes = tuple(Node(f"n{i}", "toy", 2, ("cpu",), 1e6, 1e9) for i in range(5))
    start = Setting(workers=("n0", "n1", "n2"), servers=("n3", "n4"), batch_size=4, learning_rate=0.01, policy=policy)
    space = Space(start, nodes, knobs)
    return Job(
        name=name,
        nodes=nodes,
        start=start,
        space=space,
        target=target or Target("loss", 0.02),
        budget_seconds=25.0,
        model_bytes=2e4,
        push_bytes=1e4,
        samples=1000,
        seed=seed,
        methods=("checkpoint", "migrate"),
        installs_policies=space.frees("policy"),
    )
