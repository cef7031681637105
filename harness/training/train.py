"""Training RLP's policy: whole runs of drawn instances, one after another or in lanes, with checkpoints between them.

First the fixed policies that the paper pre-trains on, each on the same instances (Zhu et al. 2020, Section 4: BSP, ASP and
SSP with s = 2, 5, 8, on 100 instances each), taken in turn, so that none is learned last; then episodes under the policy
that learns. All learning happens in compiled code, within the engine (`tuners.rlp.dqn`); here instances are drawn, and what
was learned is carried on. It depends on the plan alone: a training that was resumed ends with the same bytes.

In one lane an episode learns while it runs, as Algorithm 2 has it. In more, rounds of that many instances of one kind run
side by side under `vmap`, by what was known when the round began; then the one learner learns from them all, in order, as
many steps as it would have (`tuners.rlp.dqn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from harness.training.instances import STRAGGLERS, Instance, Kind, draw, stacked
from simulators.engine import loop
from tuners import policies
from tuners.actions import Scalar, SyncPolicy, Target
from tuners.rlp import dqn, policy_file
from tuners.rlp.dqn import Learner
from tuners.rlp.network import Trained
from tuners.rlp.options import Options

__all__ = ["PRETRAINING", "Plan", "Told", "checkpoint", "read_options", "train"]

PRETRAINING = (policies.bsp(), policies.asp(), *(policies.ssp_as_printed(s) for s in (2, 5, 8)))
_SCHEMA, _VERSION = "rlp-training", 1
_EVERY = 50  # runs between two checkpoints
_FIRST_SEED = 10**6  # of instances to train on; those below are left for tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is learned from, how, and for how long. Raises ValueError for what makes no sense."""

    workload: str = "rlp-digits"
    data: str = ""  # folder of a workload that reads files
    depths: tuple[int, ...] = (0, 1, 2, 3)  # hidden layers, drawn for every instance
    rates: tuple[float, ...] = ()  # the learning rate that goes with each of them; (): the workload's own
    sleeps: tuple[float, ...] = ()  # seconds that stragglers sleep on average, with each of them; (): the paper's
    skew: float = 0.0  # of the classes that workers hold, as a workload's: 0 deals the data out at random
    workers: int = 10
    accuracy: float = 0.88  # that ends a run
    instances: int = 1000  # to learn on
    episodes: int = 1000  # where they are more than the instances, these come again
    pretrain: int = 100  # instances for each of the fixed policies
    most_pushes: int = 1500  # of a run; one that has not converged by then is cut short
    lanes: int = 1  # runs at once
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
        """Of all, those for pre-training included."""
        return self.pretrain * len(PRETRAINING) + self.episodes

    def about(self) -> dict[str, Any]:
        """The plan as plain facts; nothing of lanes where there is one, as before there were any."""
        facts = asdict(self) | {name: list(getattr(self, name)) for name in ("depths", "rates", "sleeps")}
        return {name: value for name, value in facts.items() if name != "lanes" or value > 1}

    def command(self) -> str:
        """What makes the same policy again."""
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
        """An instance of this plan, by its number, of its own depth, or of that which the instance number `like` has.

        Raises ValueError where the workload cannot be made so.
        """
        first = _FIRST_SEED * (self.seed + 1)
        seed, drawing = first + number, first + (number if like is None else like)
        at = int(np.random.default_rng([drawing, 6]).integers(len(self.depths)))
        kind = Kind(
            workload=self.workload,
            data=Path(self.data) if self.data else None,
            depths=(self.depths[at],),
            workers=self.workers,
            overrides={"skew": self.skew} | ({"learning_rate": self.rates[at]} if self.rates else {}),
            target=Target("accuracy", self.accuracy),
        )
        return draw(_sleeping(kind, self.sleeps[at]) if self.sleeps else kind, seed)


def _sleeping(kind: Kind, mean_seconds: float) -> Kind:
    """The kind with stragglers that sleep so long on average, their deviations in proportion to the paper's."""
    factor = mean_seconds / STRAGGLERS.mean_seconds
    deviations = {name: getattr(STRAGGLERS, name) * factor for name in ("spread_seconds", "sd_seconds")}
    stragglers = msgspec.structs.replace(STRAGGLERS, mean_seconds=mean_seconds, **deviations)
    return replace(kind, conditions=msgspec.structs.replace(kind.conditions, stragglers=stragglers))


def read_options(given: Iterable[tuple[str, Scalar]]) -> Options:
    """Options by name, as the command line has them. Raises ValueError for one that is not there, or of the wrong kind."""
    kinds: dict[str, type[Any]] = {f.name: type(f.default) for f in fields(Options)}
    read: dict[str, Any] = {}
    for name, value in given:
        if name not in kinds:
            near = get_close_matches(name, kinds)
            raise ValueError(f"Training RLP has no option {name!r}: choose from {', '.join(near or kinds)}.")
        kind, whole = kinds[name], isinstance(value, int) and not isinstance(value, bool)
        if not (type(value) is kind or (kind is float and whole)):
            raise ValueError(f"Cannot train RLP with {name} {value!r}: give {_KINDS[kind]}.")
        read[name] = kind(value)
    return Options(**read)


def _word(value: object) -> str:
    """An option's value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_KINDS = {float: "a number", int: "a whole number", str: "a word", bool: "true or false"}


class Told(NamedTuple):
    """Of a run that is over."""

    run: int  # its number, from 1
    runs: int  # of the whole training
    policy: str
    pushes: int
    seconds: float  # simulated
    status: str  # target, diverged, deadlock, or cut short


class _Training(NamedTuple):
    """Where a training stands between two runs."""

    learner: Learner
    endings: tuple[int, ...]  # runs by how they ended, in the order of `_ENDINGS`

    @property
    def runs(self) -> int:
        return sum(self.endings)


_ENDINGS = ("cut short", *loop.STATUSES[1:])  # a run that is still running is one that was cut short


def checkpoint(out: Path) -> Path:
    """Where a training that leads to `out` keeps what it has learned so far."""
    return out.with_name(out.name + ".checkpoint")


def train(plan: Plan, out: Path, *, resume: bool = False, watch: Callable[[Told], None] = lambda _: None) -> Trained:
    """Carry out `plan` and write the policy to `out`, on from its checkpoint if there is one and it is wanted.

    Raises ValueError where `out` is there already, or the checkpoint is of another plan, and RuntimeError for a training
    that diverges. KeyboardInterrupt passes, and leaves a checkpoint.
    """
    if out.exists():
        raise ValueError(f"Cannot write {out}: it is there already; remove it, or name another file.")
    kept = checkpoint(out)
    if kept.exists() and not resume:
        raise ValueError(f"Cannot train to {out}: a training was interrupted here; go on with --resume, or remove {kept}.")
    nothing = _Training(dqn.new_learner(plan.options, plan.seed), (0,) * len(_ENDINGS))
    at = _restored(plan, kept, nothing) if kept.exists() else nothing
    try:
        while at.runs < plan.runs:
            before, at = at.runs, _next(plan, at, watch)
            if at.runs // _EVERY > before // _EVERY:
                _write(kept, _frozen(plan, at))
    except KeyboardInterrupt:
        _write(kept, _frozen(plan, at))
        raise
    endings = dict(zip(_ENDINGS, at.endings, strict=True))
    about = {"command": plan.command(), "seed": plan.seed, "plan": plan.about(), "endings": endings}
    made = Trained(*dqn.trained_network(plan.options, at.learner), about)
    _write(out, policy_file.dumps(made))
    kept.unlink(missing_ok=True)
    return made


class _Round(NamedTuple):
    """Runs that no learning comes between: in one lane, one run."""

    fixed: SyncPolicy | None  # to learn from before all episodes
    first: int  # instance; the others follow it, and are of its depth
    size: int


def _round(plan: Plan, runs: int) -> _Round:
    """What comes after so many: the fixed policies in turn as long as that lasts, then episodes."""
    episode = runs - plan.pretrain * len(PRETRAINING)
    if episode < 0:
        group, within = divmod(runs, plan.lanes * len(PRETRAINING))
        first = group * plan.lanes
        size = min(plan.lanes, plan.pretrain - first)
        return _Round(PRETRAINING[within // size], plan.instances + first, size)
    first = episode % plan.instances
    return _Round(None, first, min(plan.lanes, plan.instances - first, plan.episodes - episode))


def _next(plan: Plan, at: _Training, watch: Callable[[Told], None]) -> _Training:
    """One more round, and what there is to learn from it, run by run."""
    upcoming = _round(plan, at.runs)
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
        watch(Told(at.runs, plan.runs, policy.name, int(clock.pushes), float(clock.seconds), _ENDINGS[status]))
    return at


def _policy(plan: Plan, upcoming: _Round, at: _Training, lane: int) -> SyncPolicy:
    if upcoming.fixed is not None:
        return dqn.recording_policy(upcoming.fixed, plan.options, plan.most_pushes)
    if plan.lanes == 1:
        return dqn.learning_policy(plan.options, at.learner)
    return dqn.exploring_policy(plan.options, at.learner, at.runs + lane, plan.most_pushes)


def _learned(plan: Plan, upcoming: _Round, learner: Learner, clock: loop.Clock) -> Learner:
    """What the learner has come to when such a run is over."""
    options, final, lost = plan.options, int(clock.status) != 0, _lost_seconds(plan, clock)
    if upcoming.fixed is not None:
        learner = dqn.pretrained(options, learner, dqn.record_of(clock.policy, lost_seconds=lost, options=options))
    elif plan.lanes == 1:
        learner = dqn.after_run(clock.policy, final=final, lost_seconds=lost, options=options)
    else:
        learner = dqn.learn_from_record(options, learner, clock.policy.record, final=final, lost_seconds=lost)
    return learner


def _played(plan: Plan, upcoming: _Round, policies: Sequence[SyncPolicy]) -> list[loop.Clock]:
    """A round's instances run under the policies to their ends."""
    instances = [plan.instance(upcoming.first + i, like=upcoming.first) for i in range(upcoming.size)]
    runs = [instance.begin(policy) for instance, policy in zip(instances, policies, strict=True)]
    until = (np.int32(plan.most_pushes), np.float64(np.inf))
    if plan.lanes == 1:
        args = (runs[0].program, instances[0].ground.data, runs[0].plant, runs[0].state)
        return [loop.advance(*args, *until, rows=plan.most_pushes)[0].clock]
    # A round that is not full repeats a run, so that all rounds share one compiled engine.
    lanes = stacked((runs * plan.lanes)[: plan.lanes])
    states, _, _ = loop.advance_lanes(runs[0].program, *lanes, *until, rows=plan.most_pushes, own_data=True)
    clocks = jax.device_get(states.clock)
    return [jax.tree.map(itemgetter(lane), clocks) for lane in range(upcoming.size)]


def _lost_seconds(plan: Plan, clock: loop.Clock) -> float:
    """Those that a run would still have had where it broke down."""
    pushes, seconds = max(int(clock.pushes), 1), float(clock.seconds)
    lost = loop.STATUSES[int(clock.status)] not in ("running", "target")
    return seconds / pushes * (plan.most_pushes - pushes) if lost else 0.0


def _finite(tree: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _frozen(plan: Plan, at: _Training) -> bytes:
    leaves = {f"leaf{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(at.learner))}
    return policy_file.pack(_SCHEMA, _VERSION, {"plan": plan.about(), "endings": at.endings}, leaves)


def _restored(plan: Plan, path: Path, nothing: _Training) -> _Training:
    """Where the training stood that began with `nothing`.

    Raises ValueError for a checkpoint that is damaged, or of another plan.
    """
    refusal, way_out = f"Cannot resume from {path}", "remove it to begin anew"
    about, leaves = policy_file.unpack(path.read_bytes(), _SCHEMA, _VERSION, refusal, way_out)
    if differing := sorted(_differing(about["plan"], plan.about())):
        raise ValueError(f"{refusal}: it was made with other {', '.join(differing)}; give the same, or {way_out}.")
    structure = jax.tree.structure(nothing.learner)
    learner = jax.tree.unflatten(structure, [jnp.asarray(leaves[name]) for name in sorted(leaves)])
    return _Training(learner, tuple(about["endings"]))


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(data)
    part.replace(path)
