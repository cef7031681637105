"""Train RLP's policy on whole runs of drawn instances, one after another or in lanes, with checkpoints between runs.

First come runs under the fixed policies of the paper's pre-training, each on the same instances (Zhu et al. 2020, Section 4:
BSP, ASP and SSP with s = 2, 5, 8, on 100 instances each). The policies take turns, so that the learner does not end with a
long series of one of them. A run that is cut short teaches nothing here, because its end is not known. Then come episodes
under the policy that learns. All learning is compiled code within the engine (`tuners.rlp.dqn`); this module draws the
instances and passes the learner from run to run. The result depends only on the plan: a training that was interrupted and
resumed ends with the same bytes.

With one lane, an episode learns while it runs, as in Algorithm 2. With more, a round of that many instances of equal depth
runs side by side under `vmap`, with the network as it was when the round began; then the one learner learns from all of
them, in order, with the same number of steps (`tuners.rlp.dqn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from harness.machines import program_cache
from harness.training.instances import STRAGGLERS, Instance, InstanceKind, draw
from simulators.branch import stacked
from simulators.engine import loop
from simulators.engine.job_state import STATUSES, Clock
from traces.store import check_new, write_bytes
from tuners import policies
from tuners.actions import Scalar, SyncPolicy, Target
from tuners.near_names import near_names
from tuners.rlp import dqn, policy_file
from tuners.rlp.dqn import Learner
from tuners.rlp.network import Trained
from tuners.rlp.options import Options

__all__ = [
    "CHECKPOINT_RUNS",
    "PRETRAINING",
    "Round",
    "TrainingPlan",
    "TrainingProgress",
    "checkpoint",
    "next_round",
    "read_options",
    "train",
]

PRETRAINING = (policies.bsp(), policies.asp(), *(policies.ssp_as_printed(s) for s in (2, 5, 8)))
_SCHEMA, _VERSION = "rlp-training", 1
CHECKPOINT_RUNS = 50  # runs between two checkpoints
_FIRST_SEED = 10**6  # of instances to train on; lower seeds are for evaluation, so that no policy is tested on what it saw


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What a training learns from, how, and for how long. Raises ValueError for values that are out of range."""

    workload: str = "rlp-digits"
    data: str = ""  # folder of a workload that reads files
    depths: tuple[int, ...] = (0, 1, 2, 3)  # hidden layers, drawn for every instance
    rates: tuple[float, ...] = ()  # learning rate for each depth; (): the workload's own
    sleeps: tuple[float, ...] = ()  # mean seconds that stragglers sleep, for each depth; (): the paper's
    skew: float = 0.0  # how unevenly classes are distributed over workers, 0 (at random) to 1
    workers: int = 10
    accuracy: float = 0.88  # the target of a run
    instances: int = 1000  # to learn on
    episodes: int = 1000  # if more than the instances, these are used again
    pretrain: int = 100  # instances for each of the fixed policies
    most_pushes: int = 3000  # of a run; a run without convergence is cut short here
    lanes: int = 1  # runs at the same time
    seed: int = 0
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        least = {"instances": 1, "episodes": 1, "most_pushes": 2, "lanes": 1, "workers": 1, "pretrain": 0, "seed": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"Cannot train with {name} {getattr(self, name)}: give at least {minimum}.")
        paired = all(len(given) in (0, len(self.depths)) for given in (self.rates, self.sleeps))
        if not (self.depths and min((*self.depths, *self.sleeps)) >= 0 and paired and all(rate > 0 for rate in self.rates)):
            raise ValueError(
                f"Cannot train on depths {_word(self.depths)!r} with rates {_word(self.rates)!r} and sleeps "
                f"{_word(self.sleeps)!r}: give one depth or more, none negative; rates above 0, one for each of "
                "them, or none; sleeps of 0 s or more, likewise."
            )

    @property
    def runs(self) -> int:
        """The number of all runs, pre-training included."""
        return self.pretrain * len(PRETRAINING) + self.episodes

    def about(self) -> dict[str, Any]:
        """The plan as plain values. One lane is left out: files written before there were lanes must compare equal."""
        facts = asdict(self) | {name: list(getattr(self, name)) for name in ("depths", "rates", "sleeps")}
        return {name: value for name, value in facts.items() if name != "lanes" or value > 1}

    def command(self) -> str:
        """The command that makes the same policy again."""
        usual = Options()
        changed = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        learning = ",".join(f"{name}={_word(value)}" for name, value in changed.items() if value != getattr(usual, name))
        words = [f"'rlp[{learning}]'" if learning else "rlp"]
        named = {"most_pushes": "pushes"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("instances", "episodes", "seed") or (f.name != "options" and value != f.default):
                words.append(f"--{named.get(f.name, f.name)} {_word(value)}")
        return " ".join(["harness train", *words])

    def instance(self, number: int, *, like: int | None = None) -> Instance:
        """The instance of that number; with `like`, it has the depth of the instance of that other number.

        Raises ValueError if the workload cannot be made.
        """
        first = _FIRST_SEED * (self.seed + 1)
        seed, drawing = first + number, first + (number if like is None else like)
        at = int(np.random.default_rng([drawing, 6]).integers(len(self.depths)))
        kind = InstanceKind(
            workload=self.workload,
            data=Path(self.data) if self.data else None,
            depths=(self.depths[at],),
            workers=self.workers,
            overrides={"skew": self.skew} | ({"learning_rate": self.rates[at]} if self.rates else {}),
            target=Target("accuracy", self.accuracy),
        )
        return draw(_sleeping(kind, self.sleeps[at]) if self.sleeps else kind, seed)


def _sleeping(kind: InstanceKind, mean_seconds: float) -> InstanceKind:
    """The kind with another mean sleep of stragglers; the deviations keep the paper's proportion to the mean."""
    factor = mean_seconds / STRAGGLERS.mean_seconds
    deviations = {name: getattr(STRAGGLERS, name) * factor for name in ("spread_seconds", "sd_seconds")}
    stragglers = msgspec.structs.replace(STRAGGLERS, mean_seconds=mean_seconds, **deviations)
    return replace(kind, conditions=msgspec.structs.replace(kind.conditions, stragglers=stragglers))


def read_options(given: Iterable[tuple[str, Scalar]]) -> Options:
    """Options from the command line. Raises ValueError for an unknown name or a value of the wrong type."""
    kinds: dict[str, type[Any]] = {f.name: type(f.default) for f in fields(Options)}
    read: dict[str, Any] = {}
    for name, value in given:
        if name not in kinds:
            raise ValueError(f"Training RLP has no option {name!r}: {near_names(name, kinds)}")
        kind, whole = kinds[name], isinstance(value, int) and not isinstance(value, bool)
        if not (type(value) is kind or (kind is float and whole)):
            raise ValueError(f"Cannot train RLP with {name} {value!r}: give {_KINDS[kind]}.")
        read[name] = kind(value)
    return Options(**read)


def _word(value: object) -> str:
    """Format an option's value for the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_KINDS = {float: "a number", int: "a whole number", str: "a word", bool: "true or false"}


class TrainingProgress(NamedTuple):
    """A run of the training is over."""

    run: int  # its number, from 1
    runs: int  # in the whole training
    policy: str
    pushes: int
    seconds: float  # simulated
    status: str  # target, diverged, deadlock, or cut short


class _Training(NamedTuple):
    """The state of a training between two runs."""

    learner: Learner
    endings: tuple[int, ...]  # number of runs by how they ended, in the order of `_ENDINGS`

    @property
    def runs(self) -> int:
        return sum(self.endings)


_ENDINGS = ("cut short", *STATUSES[1:])  # a run that is still "running" at its last push was cut short


def checkpoint(out: Path) -> Path:
    """The path of the checkpoint of a training that writes to `out`."""
    return out.with_name(out.name + ".checkpoint")


def train(
    plan: TrainingPlan, out: Path, *, resume: bool = False, watch: Callable[[TrainingProgress], None] = lambda _: None
) -> Trained:
    """Carry out `plan` and write the policy to `out`; with `resume`, continue from a checkpoint if there is one.

    Raises ValueError if `out` exists already or the checkpoint belongs to another plan, and RuntimeError if the training
    diverges. KeyboardInterrupt is passed on, after a checkpoint is written.
    """
    check_new(out)
    kept = checkpoint(out)
    if kept.exists() and not resume:
        raise ValueError(f"Cannot train to {out}: a training was interrupted here; go on with --resume, or remove {kept}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    program_cache.use()
    nothing = _Training(dqn.new_learner(plan.options, plan.seed), (0,) * len(_ENDINGS))
    at = _restored(plan, kept, nothing) if kept.exists() else nothing
    try:
        while at.runs < plan.runs:
            before, at = at.runs, _next(plan, at, watch)
            if at.runs // CHECKPOINT_RUNS > before // CHECKPOINT_RUNS:
                write_bytes(kept, _checkpoint_bytes(plan, at))
    except KeyboardInterrupt:
        write_bytes(kept, _checkpoint_bytes(plan, at))
        raise
    endings = dict(zip(_ENDINGS, at.endings, strict=True))
    about = {"command": plan.command(), "seed": plan.seed, "plan": plan.about(), "endings": endings}
    made = Trained(*dqn.trained_network(plan.options, at.learner), about)
    write_bytes(out, policy_file.dumps(made))
    kept.unlink(missing_ok=True)
    return made


class Round(NamedTuple):
    """Runs without learning between them; with one lane, a single run."""

    fixed: SyncPolicy | None  # in pre-training; None for episodes
    first: int  # number of the first instance; the others follow it and get its depth
    size: int


def next_round(plan: TrainingPlan, runs: int) -> Round:
    """The next round after `runs` runs: pre-training with the fixed policies in turn, then episodes."""
    episode = runs - plan.pretrain * len(PRETRAINING)
    if episode < 0:
        group, within = divmod(runs, plan.lanes * len(PRETRAINING))
        first = group * plan.lanes
        size = min(plan.lanes, plan.pretrain - first)
        return Round(PRETRAINING[within // size], plan.instances + first, size)
    first = episode % plan.instances
    return Round(None, first, min(plan.lanes, plan.instances - first, plan.episodes - episode))


def _next(plan: TrainingPlan, at: _Training, watch: Callable[[TrainingProgress], None]) -> _Training:
    """Play one more round and learn from it, run by run."""
    upcoming = next_round(plan, at.runs)
    policies = [_policy(plan, upcoming, at, lane) for lane in range(upcoming.size)]
    for policy, clock in zip(policies, _played(plan, upcoming, policies), strict=True):
        learner = _learned(plan, upcoming, at.learner, clock)
        if not _finite(learner.online):
            raise RuntimeError(
                f"Cannot go on training: the network is no longer finite after run {at.runs + 1} ({policy.name}); "
                "train with a smaller rate, or count rewards in more seconds (unit_seconds)."
            )
        status = int(clock.status)
        at = _Training(learner, tuple(n + (i == status) for i, n in enumerate(at.endings)))
        watch(TrainingProgress(at.runs, plan.runs, policy.name, int(clock.pushes), float(clock.seconds), _ENDINGS[status]))
    return at


def _policy(plan: TrainingPlan, upcoming: Round, at: _Training, lane: int) -> SyncPolicy:
    if upcoming.fixed is not None:
        return dqn.recording_policy(upcoming.fixed, plan.options, plan.most_pushes)
    if plan.lanes == 1:
        return dqn.learning_policy(plan.options, at.learner)
    return dqn.exploring_policy(plan.options, at.learner, at.runs + lane, plan.most_pushes)


def _learned(plan: TrainingPlan, upcoming: Round, learner: Learner, clock: Clock) -> Learner:
    """The learner after one run."""
    options, final, lost = plan.options, int(clock.status) != 0, _lost_seconds(plan, clock)
    if upcoming.fixed is not None:
        if final:  # how much time was left in a run that was cut short is not known
            learner = dqn.pretrained(options, learner, dqn.record_of(clock.policy, lost_seconds=lost, options=options))
    elif plan.lanes == 1:
        learner = dqn.after_run(clock.policy, final=final, lost_seconds=lost, options=options)
    else:
        learner = dqn.learn_from_record(options, learner, clock.policy.record, final=final, lost_seconds=lost)
    return learner


def _played(plan: TrainingPlan, upcoming: Round, policies: Sequence[SyncPolicy]) -> list[Clock]:
    """Play a round: each instance under its policy, to the end."""
    instances = [plan.instance(upcoming.first + i, like=upcoming.first) for i in range(upcoming.size)]
    runs = [instance.begin(policy) for instance, policy in zip(instances, policies, strict=True)]
    until = (np.int32(plan.most_pushes), np.float64(np.inf))
    if plan.lanes == 1:
        args = (runs[0].program, instances[0].context.data, runs[0].inputs, runs[0].state)
        return [loop.advance(*args, *until, rows=plan.most_pushes)[0].clock]
    # An incomplete round repeats runs, so that all rounds have the same shapes and share one compiled engine.
    lanes = stacked((runs * plan.lanes)[: plan.lanes])
    states, _, _ = loop.advance_lanes(runs[0].program, *lanes, *until, rows=plan.most_pushes, own_data=True)
    clocks = jax.device_get(states.clock)
    return [jax.tree.map(itemgetter(lane), clocks) for lane in range(upcoming.size)]


def _lost_seconds(plan: TrainingPlan, clock: Clock) -> float:
    """Seconds that count as lost if a run diverged or deadlocked: its missing pushes, at the pace so far."""
    pushes, seconds = max(int(clock.pushes), 1), float(clock.seconds)
    lost = STATUSES[int(clock.status)] not in ("running", "target")
    return seconds / pushes * (plan.most_pushes - pushes) if lost else 0.0


def _finite(tree: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _checkpoint_bytes(plan: TrainingPlan, at: _Training) -> bytes:
    leaves = {f"leaf{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(at.learner))}
    return policy_file.pack(_SCHEMA, _VERSION, {"plan": plan.about(), "endings": at.endings}, leaves)


def _restored(plan: TrainingPlan, path: Path, nothing: _Training) -> _Training:
    """Read the state of a training from its checkpoint; `nothing` is a training's first state, which has the same structure.

    Raises ValueError if the checkpoint is damaged or belongs to another plan.
    """
    refusal, way_out = f"Cannot resume from {path}", "remove it to begin anew"
    _, about, leaves = policy_file.unpack(path.read_bytes(), _SCHEMA, (_VERSION,), refusal, way_out)
    if differing := sorted(_differing(about["plan"], plan.about())):
        raise ValueError(f"{refusal}: it was made with other {', '.join(differing)}; give the same, or {way_out}.")
    structure = jax.tree.structure(nothing.learner)
    learner = jax.tree.unflatten(structure, [jnp.asarray(leaves[name]) for name in sorted(leaves)])
    return _Training(learner, tuple(about["endings"]))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
