"""The contract: what a tuner may ask of a running parameter server, and what it is told.

A tuner is a generator that yields actions and is sent what was measured, as a SimPy process is a generator that yields
events::

    def halve_when_stuck(job: Job) -> Tuner:
        setting = job.start
        while True:
            seen = yield from Run(clocks=1000)
            if seen.pushes.loss[-100:].mean() >= seen.pushes.loss[:100].mean():
                setting = replace(setting, learning_rate=setting.learning_rate / 2)
                yield from Reconfigure(setting)

Who carries the actions out (the simulator, a recorded table, a live cluster) is a `System`; a tuner never holds one.
A *clock* of the job is one completed push: one worker's gradient, received and accounted for. A tuner that returns has
finished tuning: the job goes on to its target or budget under the last setting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tuners.settings import Node, Rejected, Scalar, Setting, Space

__all__ = [
    "Action",
    "Cost",
    "Decision",
    "Evaluate",
    "Evaluation",
    "Fork",
    "Free",
    "Install",
    "Job",
    "Method",
    "NodeEvent",
    "Push",
    "Pushes",
    "Reconfigure",
    "Rejected",
    "Run",
    "Scalar",
    "Setting",
    "Space",
    "Status",
    "SyncPolicy",
    "System",
    "Target",
    "Tuner",
    "TunerFactory",
    "Window",
    "WorkerWindow",
]

T = TypeVar("T")

Method: TypeAlias = Literal["checkpoint", "migrate", "relocate"]
"""How a reconfiguration is carried out: quiescent checkpoint and restart (the papers' baseline), block migration
(Cruise, Section IV-B), or on-demand relocation (TensorFlowOnline's ODMR)."""

Status: TypeAlias = Literal["running", "target", "budget", "diverged", "deadlock"]
"""Where a job stands: going on, target reached, out of simulated time, loss not finite, or nobody left to push."""


# ---------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True, slots=True)
class Target:
    """When the job is done: the validation metric has reached `value`, or so many clocks are completed or samples used."""

    metric: Literal["accuracy", "loss", "clocks", "samples"]
    value: float

    @property
    def counts(self) -> bool:
        """Whether it counts what was done and not what was learned: for workloads that are timing-only."""
        return self.metric in ("clocks", "samples")

    def reached(self, loss: float, accuracy: float, clocks: int = 0, samples: int = 0) -> bool:
        if self.counts:
            return (clocks if self.metric == "clocks" else samples) >= self.value
        return accuracy >= self.value if self.metric == "accuracy" else loss <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a tuner knows before it starts: public facts of cluster, workload and rules, never the simulator's constants."""

    name: str
    nodes: tuple[Node, ...]  # in the scenario's order; `worker_count` takes workers from the front
    start: Setting  # what the job runs under until the tuner changes it
    space: Space  # what may be changed, and over what range
    target: Target
    budget_seconds: float  # simulated seconds; a job that has not reached its target by then is stopped
    model_bytes: float  # what one full pull moves at 32 bits
    samples: int  # training samples
    seed: int  # for the tuner's own random numbers
    methods: tuple[Method, ...] = ("checkpoint",)  # what `Reconfigure` may use here
    branch_bytes: float = 0.0  # parameters and optimizer slots of one branch, all servers together; 0: not told


# ----------------------------------------------------------------------------------------------------------- measured


class Pushes(NamedTuple):
    """One row per completed push, in order; every field has shape [n]."""

    seconds: NDArray[np.float64]  # when the push was completed, seconds since the job began
    worker: NDArray[np.int32]  # index into `Job.nodes`
    clock: NDArray[np.int32]  # pushes this worker had completed before
    compute_seconds: NDArray[np.float64]  # forward and backward pass, with per-message work and sleeps
    pull_seconds: NDArray[np.float64]
    push_seconds: NDArray[np.float64]  # transfer and apply, with waiting for the server
    wait_seconds: NDArray[np.float64]  # held back by the synchronisation policy before this cycle began
    staleness: NDArray[np.int32]  # updates applied by others between this worker's pull and its push
    loss: NDArray[np.float64]  # mean training loss of the mini-batch, at the parameters that were pulled


class WorkerWindow(NamedTuple):
    """What one worker did within a window, as its monitor reports it (sums over its completed pushes)."""

    node: str
    pushes: int
    samples: int
    compute_seconds: float
    pull_seconds: float
    push_seconds: float
    wait_seconds: float
    device_seconds: tuple[float, ...]  # mean per mini-batch, one entry per device of the node


class Evaluation(NamedTuple):
    """The model on the validation set; not charged to the clock."""

    seconds: float
    clocks: int
    loss: float
    accuracy: float  # nan where the workload has none


class NodeEvent(NamedTuple):
    """Something that happened to a node and that the runtime reports.

    One that is "leaving" has been given notice: it still works, but is no longer counted as available, and "left" follows.
    """

    seconds: float
    node: str
    event: Literal["joined", "leaving", "left", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The answer to `Run`: what was measured between two moments of the job."""

    start_seconds: float
    end_seconds: float
    clocks: int  # pushes completed in this window
    pushes: Pushes
    workers: tuple[WorkerWindow, ...]  # those that are workers under the current setting
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[NodeEvent, ...] = ()
    nodes: tuple[Node, ...] = ()  # available at the end of the window
    setting: Setting | None = None  # in force at the end; the runtime itself changes it when it loses a node
    changes: tuple[Cost, ...] = ()  # reconfigurations that nobody waited for, and that ended in this window
    status: Status = "running"

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a reconfiguration cost: the answer to one that was waited for, or an entry of `Window.changes`."""

    seconds: float  # from the request until the new setting is in force
    stall_seconds: float  # of these, nobody trained
    slow_seconds: float = 0.0  # of these, training went on but shared resources with the change
    bytes_moved: float = 0.0
    steps: tuple[str, ...] = ()  # what was done, in order of completion
    done: bool = True  # False: rolled back to the setting before, for a node was lost half-way; or the job ended first


# ------------------------------------------------------------------------------------- what decides inside the server


class Push(NamedTuple):
    """What a synchronisation policy sees when a push has been completed. All arrays have one entry per node, [k]."""

    worker: Any  # int32 scalar: who pushed
    clocks: Any  # int32 [k]: completed pushes per worker, the pusher's already counted
    waiting: Any  # bool [k]: held back by the policy, the pusher included
    active: Any  # bool [k]: is a worker under the current setting
    seconds: Any  # float scalar: now
    staleness: Any  # int32 scalar: of this push
    loss: Any  # float scalar: of the pushed mini-batch at the parameters pulled
    loss_before: Any = 0.0  # float scalar: of the same mini-batch at the server, before the update (only if `probes`)
    loss_after: Any = 0.0  # float scalar: and after it


class Decision(NamedTuple):
    """What a synchronisation policy answers."""

    release: Any  # bool [k]: who starts a new cycle now; a worker that is busy abandons what it was doing
    accept: Any = True  # bool scalar: False drops this gradient (backup workers)
    step: Any = True  # bool scalar: closes the group when gradients are summed or averaged before they are applied


class SyncPolicy(NamedTuple):
    """Who may go on after a push: a pure pair, traced by the simulator and called as it is by the live servers.

    `init(active)` takes a bool mask [k] and returns the policy's state, a pytree of arrays. `decide(state, push)`
    returns the next state and a `Decision`; both must be traceable by JAX, without side effects. Two policies that
    share `decide` and differ only in their state share one compiled engine.
    """

    name: str
    init: Callable[[Any], Any]
    decide: Callable[[Any, Push], tuple[Any, Decision]]
    probes: bool = False  # wants `loss_before` and `loss_after`: two more forward passes per push
    seconds: float = 0.0  # simulated time one decision takes


# -------------------------------------------------------------------------------------------------------------- actions


class Action(Generic[T]):
    """A request answered with a `T`: ``answer = yield from action``."""

    __slots__ = ()

    def __iter__(self) -> Generator[Action[Any], Any, T]:
        answer: T = yield self
        return answer


@dataclass(frozen=True, slots=True)
class Run(Action[Window]):
    """Let `branch` train for so many clocks or so many seconds, whichever of the two is given.

    Ends early at the target, at the end of the budget, or when the job cannot go on; `Window.status` says so.
    Raises ValueError unless exactly one of the two is given and it is positive.
    """

    clocks: int | None = None
    seconds: float | None = None
    branch: int = 0

    def __post_init__(self) -> None:
        given = [x for x in (self.clocks, self.seconds) if x is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(
                f"Cannot run for clocks={self.clocks}, seconds={self.seconds}: give exactly one of the two, positive."
            )


@dataclass(frozen=True, slots=True)
class Reconfigure(Action[Cost]):
    """Bring `branch` from its setting to `setting`; training goes on meanwhile as far as the method allows.

    Whoever does not `wait` is answered at once with a cost of nothing and finds the real one in `Window.changes`. Refused
    (`Rejected`) where the setting is not in the job's space, needs a node that is not there, or while another
    reconfiguration is under way.
    """

    setting: Setting
    method: Method | None = None  # None: the first of `Job.methods`
    branch: int = 0
    wait: bool = True


@dataclass(frozen=True, slots=True)
class Fork(Action[int]):
    """Snapshot `branch` (parameters, optimizer slots, worker state, data cursor) as a new branch; answered with its id.

    Refused (`Rejected`) where the servers have no memory left for it.
    """

    branch: int = 0
    setting: Setting | None = None  # None: the parent's
    testing: bool = False  # a TESTING branch evaluates and never applies updates (MLtuner, Section 4.2)


@dataclass(frozen=True, slots=True)
class Free(Action[None]):
    """Drop a branch and its memory. Freed branches cannot be named again; branch 0 can be freed like any other."""

    branch: int


@dataclass(frozen=True, slots=True)
class Install(Action[None]):
    """Put a synchronisation policy of the tuner's own into the servers; it rules until the next Install or policy change."""

    policy: SyncPolicy
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Evaluate(Action[Evaluation]):
    """Loss and accuracy of `branch` on the validation set, now."""

    branch: int = 0


Tuner: TypeAlias = Generator[Action[Any], Any, None]
TunerFactory: TypeAlias = Callable[[Job], Tuner]


class System(Protocol):
    """Who carries out what tuners ask: the simulator, a recorded table, a live job."""

    @property
    def job(self) -> Job: ...

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        ...

    @property
    def status(self) -> Status:
        """Anything but "running" ends the job."""
        ...

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`, which may take time. Raises Rejected, and changes nothing, where it cannot be done."""
        ...
