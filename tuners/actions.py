"""The contract: what a tuner may ask of a running training job, and what it gets as answers.

A tuner is a generator. It yields actions and receives their answers, as a SimPy process yields events::

    def halve_when_stuck(job: Job) -> Tuner:
        setting = job.start
        while True:
            seen = yield from Run(clocks=1000)
            if seen.pushes.loss[-100:].mean() >= seen.pushes.loss[:100].mean():
                setting = replace(setting, learning_rate=setting.learning_rate / 2)
                yield from Reconfigure(setting)

A `System` carries out the actions: the simulator, a table of recorded runs, or a live cluster. A tuner never holds the
system itself. A *clock* of the job is one completed push: the servers have received one worker's gradient and counted it.
When a tuner returns, it has finished tuning: the job continues under its last setting until its target or the end of its
budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tuners.prices import Prices
from tuners.settings import Node, Rejected, Scalar, Setting
from tuners.space import Space

__all__ = [
    "Action",
    "Cost",
    "Decision",
    "Evaluate",
    "Evaluation",
    "Fork",
    "Free",
    "GradientNoise",
    "Install",
    "Job",
    "MeasureNoise",
    "Method",
    "NodeEvent",
    "Push",
    "Pushes",
    "Reconfigure",
    "Rejected",
    "Run",
    "Scalar",
    "ServerWindow",
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
"""The state of a job: it runs, has reached its target, has spent its budget, has a loss that is not finite, or has no worker
that can push."""


# ---------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True, slots=True)
class Target:
    """When the job is done: its validation metric has reached `value`, or it has completed that many clocks or samples.

    With `by_share`, clocks or samples are divided among the workers by their data shares. The job is done when every worker
    has done its own part; work that a slow worker has left is not done by others, unless data moves to them (Cruise, Eq. 1).
    """

    metric: Literal["accuracy", "loss", "clocks", "samples"]
    value: float
    by_share: bool = False
    minimise: Literal["seconds", "usd"] = "seconds"  # what the run should take least of, until its target

    @property
    def counts(self) -> bool:
        """Whether the target counts work (clocks or samples) and not learning, as jobs without real training do."""
        return self.metric in ("clocks", "samples")

    def reached(self, loss: float, accuracy: float, clocks: int = 0, samples: int = 0) -> bool:
        """Whether a job with this validation loss and accuracy, or this much work done, has reached the target.

        Raises ValueError for a target by share, of which totals do not tell.
        """
        if self.by_share:
            raise ValueError(f"Cannot tell from totals if {self.value:g} {self.metric} by share are done: count by worker.")
        if self.counts:
            return (clocks if self.metric == "clocks" else samples) >= self.value
        return accuracy >= self.value if self.metric == "accuracy" else loss <= self.value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Job:
    """What a tuner knows before it starts: public facts of cluster, workload and rules, but no constant of the simulator.

    Its text is one line; nodes, settings and ranges of knobs are in the fields.
    """

    name: str
    nodes: tuple[Node, ...]  # in the scenario's order; with the knob `worker_count` the first ones are workers
    start: Setting  # the setting until the tuner changes it
    space: Space  # which knobs are free, and their ranges
    target: Target
    budget_seconds: float  # the job ends after this simulated time, with or without its target
    model_bytes: float  # of one pull of the whole model, at 32 bits
    push_bytes: float = 0.0  # of one push of a whole gradient, at 32 bits; 0: unknown, or hidden behind computing
    samples: int  # training samples; 0: unknown
    seed: int  # for the tuner's own random numbers
    methods: tuple[Method, ...] = ("checkpoint",)  # that `Reconfigure` can use
    branch_bytes: float = 0.0  # of parameters and optimizer slots of one branch, on all servers together; 0: unknown
    installs_policies: bool = False  # whether `Install` is allowed: `policy` is free, or the scenario says so
    evaluate_seconds: float = 0.0  # that one `Evaluate` takes, in which no branch trains; an estimate where the job is live
    prices: Prices = field(default_factory=Prices)  # of the machines, by the hour
    budget_usd: float = math.inf  # a target that cost more does not count as reached
    blocks: int = 0  # of consecutive rows of embedding tables, which `Setting.block_owners` places; 0: no such tables
    hottest: tuple[int, ...] = ()  # their numbers, the one looked up most often first; () where none can be replicated

    def __repr__(self) -> str:
        # Of a knob per node, device or block only the family.
        free, target = ", ".join(dict.fromkeys(n.partition("/")[0] for n in self.space.names)) or "nothing", self.target
        until = f"{target.metric} {target.value:g}{' by share' if target.by_share else ''}"
        return f"Job({self.name}: {len(self.nodes)} nodes, free: {free}; until {until} or {self.budget_seconds:g} s)"

    def method(self, *wanted: Method) -> Method | None:
        """The first of `wanted` that this system has; None, its first method to `Reconfigure`, if it has none of them."""
        return next((m for m in wanted if m in self.methods), None)

    @property
    def epoch_samples(self) -> int:
        """The training samples; where they are unknown, those of a thousand mini-batches of the start."""
        return self.samples or 1000 * self.start.batch_size


# ------------------------------------------------------------------------------------------------------- measurements


class Pushes(NamedTuple):
    """The completed pushes in order of time; every field has shape [n], one entry per push."""

    seconds: NDArray[np.float64]  # completion of the push, since the job began
    worker: NDArray[np.int32]  # index into `Job.nodes`
    # Number of mini-batches that this worker had computed before, with those that were lost with a machine or a branch.
    clock: NDArray[np.int32]
    compute_seconds: NDArray[np.float64]  # forward and backward pass, with per-message work and sleeps
    pull_seconds: NDArray[np.float64]
    push_seconds: NDArray[np.float64]  # transfer, waiting for the server, and applying the update
    wait_seconds: NDArray[np.float64]  # that the synchronisation policy made the worker wait before this mini-batch
    staleness: NDArray[np.int32]  # number of updates that were applied between this worker's pull and its push
    loss: NDArray[np.float64]  # mean training loss of the mini-batch, at the pulled parameters; of all local steps


class WorkerWindow(NamedTuple):
    """What one worker did in a window: sums over the pushes that it completed."""

    node: str
    pushes: int
    samples: int
    compute_seconds: float
    pull_seconds: float
    push_seconds: float
    wait_seconds: float
    device_seconds: tuple[float, ...]  # mean per mini-batch, one entry per device of the node


class ServerWindow(NamedTuple):
    """What one server did in a window, for the pushes completed in it and for the pulls before them.

    Busy seconds are what the server itself takes for these bytes; while a slow worker receives them, it serves others. So
    `pull_bytes / pull_seconds` is the rate at which it can serve, however much it was asked for; where a token bucket has
    run empty, the rate that this leaves.
    """

    node: str
    pull_bytes: float  # that it sent: parameters, and gradients of replicated blocks to the next server that holds them
    pull_seconds: float  # busy sending them
    push_bytes: float  # gradients that it received
    push_seconds: float  # busy receiving and applying them


class Evaluation(NamedTuple):
    """Loss and accuracy of a model on the validation set.

    Those in a `Window` are the scenario's own, made at regular intervals of clocks, and take no time. `Evaluate` takes time.
    """

    seconds: float  # at which the job had this model; the answer to `Evaluate` comes later
    clocks: int
    loss: float
    accuracy: float  # nan for a workload without accuracy


class GradientNoise(NamedTuple):
    """How much the gradients of mini-batches differ at one model: the answer to `MeasureNoise`.

    Both parts are estimated without bias from the squared norms of single gradients and of their mean (McCandlish et al.,
    "An Empirical Model of Large-Batch Training", 2018, Appendix A.1), so that `square` may be negative by chance.
    """

    seconds: float  # at which the job had this model; the answer comes later
    square: float  # |G|^2: squared norm of the gradient of all data; nan for a workload that does not learn
    variance: float  # tr(Sigma): variance of one sample's gradient, summed over the parameters

    @property
    def samples(self) -> float:
        """The gradient noise scale, tr(Sigma) / |G|^2: a batch of this number of samples has as much noise as gradient."""
        return self.variance / self.square if self.square > 0 else math.inf


class NodeEvent(NamedTuple):
    """A node came or went.

    A node that is "leaving" has been given notice: it still works, but is not available to new settings. "left" follows.
    """

    seconds: float
    node: str
    event: Literal["joined", "leaving", "left", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The answer to `Run`: the measurements between two moments of the job."""

    start_seconds: float
    end_seconds: float
    clocks: int  # number of pushes completed in this window
    pushes: Pushes
    workers: tuple[WorkerWindow, ...]  # one entry per worker of the current setting
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[NodeEvent, ...] = ()
    nodes: tuple[Node, ...] = ()  # available at the end of the window
    setting: Setting | None = None  # at the end of the window; the system itself changes it when a node is lost
    changes: tuple[Cost, ...] = ()  # that ended in this window: reconfigurations with `wait=False`, recoveries, checkpoints
    servers: tuple[ServerWindow, ...] = ()  # one entry per server of the current setting; () where they are not measured
    blocks: tuple[float, ...] = ()  # rows of each of `Job.blocks` that the pushes carried; () without embedding tables
    status: Status = "running"

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a reconfiguration: the answer to `Reconfigure`, or, with `wait=False`, an entry of `Window.changes`."""

    seconds: float  # from the request until the new setting is in force
    stall_seconds: float  # of these, no worker trained
    slow_seconds: float = 0.0  # of these, training continued, slower, because the reconfiguration used the same machines
    bytes_moved: float = 0.0
    steps: tuple[str, ...] = ()  # the steps of the plan, in order of completion
    done: bool = True  # False: a node was lost and the previous setting was restored, or the job ended first


# --------------------------------------------------------------------------------------------- synchronisation policies


class Push(NamedTuple):
    """What a synchronisation policy sees when a push is complete. All arrays have one entry per node, [k]."""

    worker: Any  # int32 scalar: the worker that pushed
    clocks: Any  # int32 [k]: completed pushes per worker, this push included
    waiting: Any  # bool [k]: workers that wait for the policy, this one included
    active: Any  # bool [k]: workers of the current setting
    seconds: Any  # float scalar: now
    staleness: Any  # int32 scalar: of this push
    loss: Any  # float scalar: of the mini-batch, at the pulled parameters
    loss_before: Any = 0.0  # float scalar: of the mini-batch, at the server's parameters before the update (with `probes`)
    loss_after: Any = 0.0  # float scalar: the same after the update
    timer: Any = False  # bool scalar: no worker has pushed, the policy's timer has run down (with `timers`)


class Decision(NamedTuple):
    """The answer of a synchronisation policy to a push."""

    release: Any  # bool [k]: workers that start a new mini-batch now; a busy one abandons its current mini-batch
    accept: Any = True  # bool scalar: False drops this gradient (backup workers)
    step: Any = True  # bool scalar: ends the group, where gradients are summed or averaged before they are applied
    timer: Any = math.nan  # float scalar, with `timers`: seconds until it decides again; inf: stop the timer; nan: leave it
    later: Any = False  # bool scalar, with `table`: this gradient belongs to the next round
    turn: Any = False  # bool scalar, with `table`: a round ends with this push; the gradients of the next one take its place


class SyncPolicy(NamedTuple):
    """Decides after each push which workers start their next mini-batch: a pair of pure functions.

    `init(active)` takes a bool mask [k] and returns the policy's state, a pytree of arrays. `decide(state, push)`
    returns the next state, of the same types and shapes, and a `Decision`. Seconds and losses of a push are float64. JAX
    must be able to trace both, so they have no side effects: the simulator compiles them; a live job runs in NumPy what JAX
    traces, if that only compares and counts. Policies with the same `decide` and different states share one compiled engine.
    A `decide` that sorts works, but some of its programs are compiled again in every process: XLA cannot read them from the
    cache.
    """

    name: str
    init: Callable[[Any], Any]
    decide: Callable[[Any, Push], tuple[Any, Decision]]
    probes: bool = False  # needs `loss_before` and `loss_after`, which take two more forward passes per push
    seconds: float = 0.0  # simulated time that one decision takes
    timers: bool = False  # sets `Decision.timer`; simulated only, and not together with `probes`
    # Servers keep the gradients of a round by worker, and step by the mean of all workers' means; simulated only, and not
    # together with `probes`.
    table: bool = False
    # Workers are released when servers have ended the step of a round of gradients, so each cycle takes what that takes
    # (`Demand.step_seconds`). False where that varies from round to round: such a policy pays for none.
    rounds: bool = False


# -------------------------------------------------------------------------------------------------------------- actions


class Action(Generic[T]):
    """A request whose answer is a `T`: ``answer = yield from action``.

    `Run`, `Reconfigure`, `Fork` and `Install` may carry a `reason`: why the tuner asks this, with the numbers that decided
    it, in one line for people. It is logged and shown, and changes nothing.
    """

    __slots__ = ()

    def __iter__(self) -> Generator[Action[Any], Any, T]:
        answer: T = yield self
        return answer


@dataclass(frozen=True, slots=True)
class Run(Action[Window]):
    """Train `branch` for that many clocks or that many seconds.

    The run ends early at the target, at the end of the budget, or when the job cannot continue; `Window.status` says why.
    The system refuses (`Rejected`) a branch that has ended, or that waits for another one; if the tuner does not catch that,
    its tuning is over, and the job continues under its last setting.
    Raises ValueError unless exactly one of the two is given and it is positive, TypeError for what is no number.
    """

    clocks: int | None = None
    seconds: float | None = None
    branch: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        for name, value, kind, what in (
            ("clocks", self.clocks, Integral, "a whole number of pushes, as in Run(clocks=100)"),
            ("seconds", self.seconds, Real, "a number, as in Run(seconds=60)"),
        ):
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise TypeError(f"Cannot run for {name}={value!r}: give {what}.")
        given = [x for x in (self.clocks, self.seconds) if x is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(
                f"Cannot run for clocks={self.clocks}, seconds={self.seconds}: give exactly one of the two, positive."
            )


@dataclass(frozen=True, slots=True)
class Reconfigure(Action[Cost]):
    """Change the setting of `branch` to `setting`; meanwhile training continues as far as the method allows.

    With `wait=False` the answer comes at once and has zero cost; a later `Window.changes` has the real cost. The system
    refuses (`Rejected`) a setting outside the job's space, a node that is not available, and a second reconfiguration
    while one is under way. Where a loss of nodes has changed what the scenario holds, that stays as it is in force, also
    for a setting that names the lost nodes. Raises TypeError for what is no `Setting`.
    """

    setting: Setting
    method: Method | None = None  # None: the first of `Job.methods`
    branch: int = 0
    wait: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        _check_setting("reconfigure to", self.setting)


@dataclass(frozen=True, slots=True)
class Fork(Action[int]):
    """Copy `branch` (parameters, optimizer slots, worker state, data cursor) to a new branch; the answer is its number.

    The new branch gets other roles by a checkpoint and a restart. Where the job offers a cheaper method, fork without a
    setting, and give that method to a `Reconfigure` of the new branch.

    The system refuses (`Rejected`) where the servers have too little memory. Raises TypeError for a `setting` that is none.
    """

    branch: int = 0
    setting: Setting | None = None  # None: the parent's
    testing: bool = False  # a testing branch computes losses and applies no update (MLtuner, Section 4.2)
    reason: str = ""

    def __post_init__(self) -> None:
        if self.setting is not None:
            _check_setting("fork with", self.setting)


@dataclass(frozen=True, slots=True)
class Free(Action[None]):
    """Delete a branch and free its memory. Its number is never used again. Branch 0 can be freed like any other."""

    branch: int


@dataclass(frozen=True, slots=True)
class Install(Action[None]):
    """Use a synchronisation policy of the tuner's own until the next `Install`, or until a setting names another policy.

    The system refuses (`Rejected`) where `Job.installs_policies` is false: what a scenario holds is held. Raises TypeError
    for what is no `SyncPolicy`.
    """

    policy: SyncPolicy
    branch: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.policy, SyncPolicy):
            named = f" A policy with a name needs no Install: write Reconfigure(replace(setting, policy={self.policy!r}))."
            raise TypeError(
                f"Cannot install {self.policy!r}: give a SyncPolicy, as in `tuners.policies`."
                f"{named if isinstance(self.policy, str) else ''}"
            )


@dataclass(frozen=True, slots=True)
class Evaluate(Action[Evaluation]):
    """Measure loss and accuracy of `branch` on the validation set now.

    That takes a pass over the validation data, `Job.evaluate_seconds`, in which no branch trains. A model that is at the
    target ends the job, as by the job's own validations. The simulator refuses (`Rejected`) during a reconfiguration.
    """

    branch: int = 0


@dataclass(frozen=True, slots=True)
class MeasureNoise(Action[GradientNoise]):
    """Measure the gradient noise of `branch` now, from `batches` mini-batches of every worker.

    All workers pull, compute these gradients at one model, and push what their norms need; no worker trains meanwhile, and
    nothing is applied. Simulated only: other systems refuse (`Rejected`), and the simulator does during a reconfiguration
    and where a model has embedding tables.
    Raises ValueError for less than two mini-batches.
    """

    branch: int = 0
    batches: int = 4

    def __post_init__(self) -> None:
        if self.batches < 2:
            raise ValueError(f"Cannot measure noise from {self.batches} mini-batches of a worker: give at least 2.")


def _check_setting(what: str, given: Any) -> None:
    """Raise TypeError, with what to write, unless `given` is a setting: a dictionary of changes is the usual slip."""
    if isinstance(given, Setting):
        return
    advice = "give a Setting: job.start is the first, and dataclasses.replace(setting, ...) changes one."
    if isinstance(given, Mapping) and given and all(isinstance(key, str) for key in given):
        changes = ", ".join(f"{key}={value!r}" for key, value in given.items())
        plain = given.keys() <= {f.name for f in fields(Setting)}
        advice = (
            f"it has to be a whole setting. Write replace(setting, {changes}), with `from dataclasses import replace`; "
            "setting is the job's current one, at first job.start."
            if plain
            else f"it has to be a whole setting. Write job.space.setting({dict(given)!r}), which changes the job's start."
        )
    raise TypeError(f"Cannot {what} {given!r}: {advice}")


Tuner: TypeAlias = Generator[Action[Any], Any, None]
TunerFactory: TypeAlias = Callable[[Job], Tuner]


class System(Protocol):
    """Carries out the actions of a tuner: the simulator, a table of recorded runs, a live job, or a toy."""

    @property
    def job(self) -> Job:
        """What the tuner is told of the job."""
        ...

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        ...

    @property
    def status(self) -> Status:
        """Anything but "running" ends the job."""
        ...

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`, which may take time. Raises Rejected, and changes nothing, where that is not possible."""
        ...
