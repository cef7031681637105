"""Train RLP's broad policy by evolution: play variations of it on the same jobs, and follow those that were faster.

The reward of a run is -log(its seconds / the seconds of the best simple rule on the same instance), where the rules are BSP,
ASP, SSP, K-sync and K-async and the best one is known in hindsight. A run longer than three times that is stopped there.

Such a reward has no gradient (a decision is yes or no), and what a decision is worth shows at the end of the run only. So
whole runs are compared: CMA-ES (Hansen and Ostermeier 2001, by the library `cmaes`). All variations of a generation play the
same instances, drawn anew for each generation, so that they differ by their weights and not by their luck. The result is
the mean of the distribution, averaged over the last third of the generations.

It starts at the rule of three numbers (`tuners.rlp.broad.rule_network`). A run takes 10 to 40 ms; runs follow each other,
which on two cores is faster than lanes under `vmap`: these run until the slowest lane is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cmaes import CMA
from numpy.typing import NDArray

from harness import program_cache
from harness.training.train import checkpoint
from harness.training.varied import drawn_instance, simple_rules
from simulators.engine import loop
from tuners.actions import SyncPolicy
from tuners.rlp import policy_file
from tuners.rlp.broad import PooledNetwork, broad_policy, rule_network
from tuners.rlp.policy_file import TrainedBroad

__all__ = ["RULE", "EvolutionPlan", "Generation", "Judged", "evolve", "judged", "log_ratio"]

RULE = {"round_from": 1.7, "group": 0.5, "undone": 4.0}  # the three numbers, by a random search over 60
_FIRST_SEED = 10**6  # as for `harness.training.train`: lower seeds are for evaluation
_MOST_PUSHES = 1200  # of a run
_CAP = 3.0  # times the best rule's seconds, at which a run is stopped
_SIGMA = PooledNetwork(0.2, 0.2, 0.3, 0.3, 0.08, 0.08, 0.08, 0.08)  # first deviation of each kind of weight
_DEVIATION = 0.5  # of the first generation, in these units
_SCHEMA, _VERSION = "rlp-evolution", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionPlan:
    """What an evolution plays, and for how long. Raises ValueError for values out of range."""

    instances: int = 160  # the pool; those that no rule brings to the target are left out
    generations: int = 40
    variations: int = 14  # per generation
    batch: int = 28  # instances that each of them plays
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"instances": 1, "generations": 1, "variations": 4, "batch": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"Cannot train with {name} {getattr(self, name)}: give at least {least}.")

    def command(self) -> str:
        """The command that makes the same policy again."""
        words = [f"--{name} {value}" for name, value in asdict(self).items() if name in ("instances", "generations", "seed")]
        return " ".join(["harness train rlp --form broad", *words])


class Judged(NamedTuple):
    """An instance, ready to be played under any policy, with what simple rules take."""

    program: loop.Program
    data: Any
    inputs: Any
    state: loop.State
    rules: dict[str, float]  # seconds by rule; infinite where it missed the target, or took over `_CAP` times the best

    @property
    def best_seconds(self) -> float:
        """Of the fastest rule."""
        return min(self.rules.values())


class Generation(NamedTuple):
    """A generation is over."""

    number: int  # from 1
    generations: int
    ratio: float  # geometric mean of its runs' seconds over those of the best rule


def judged(seed: int) -> Judged:
    """The instance of a seed, played under every simple rule."""
    instance = drawn_instance(seed)
    begun = instance.begin(simple_rules(1)["asp"])
    made = Judged(begun.program, *jax.device_put((instance.context.data, begun.inputs, begun.state)), {})  # type: ignore[no-untyped-call]
    for name, rule in simple_rules(len(instance.straggles)).items():
        limit = _CAP * min(made.rules.values(), default=np.inf)
        made.rules[name] = _seconds(made, rule, limit)
    return made


def log_ratio(of: Judged, policy: SyncPolicy) -> float:
    """log(seconds under `policy` / seconds of the best rule), at most log 3."""
    return float(np.log(min(_seconds(of, policy, _CAP * of.best_seconds) / of.best_seconds, _CAP)))


def _seconds(of: Judged, policy: SyncPolicy, limit: float) -> float:
    """Simulated seconds to the target; infinite for a run that missed it within its pushes or the limit."""
    program = of.program._replace(decide=policy.decide, probes=policy.probes)
    held = policy.init(np.asarray(of.inputs.active))
    state = of.state._replace(clock=of.state.clock._replace(policy=held))
    until = (jnp.int32(_MOST_PUSHES), jnp.asarray(limit))
    end, _, _ = loop.advance(program, of.data, of.inputs, state, *until, rows=_MOST_PUSHES)
    return float(end.clock.seconds) if loop.STATUSES[int(end.clock.status)] == "target" else float("inf")


def evolve(
    plan: EvolutionPlan, out: Path, *, resume: bool = False, watch: Callable[[Generation], None] = lambda _: None
) -> TrainedBroad:
    """Carry out `plan` and write the policy to `out`; with `resume`, continue from a checkpoint if there is one.

    Raises ValueError if `out` exists already or the checkpoint belongs to another plan. KeyboardInterrupt is passed on.
    """
    if out.exists():
        raise ValueError(f"Cannot write {out}: it is there already; remove it, or name another file.")
    kept = checkpoint(out)
    if kept.exists() and not resume:
        raise ValueError(f"Cannot train to {out}: a training was interrupted here; go on with --resume, or remove {kept}.")
    program_cache.use()
    known = _restored(plan, kept) if kept.exists() else []
    numbers = (_FIRST_SEED * (plan.seed + 1) + n for n in range(plan.instances))
    pool = [one for one in map(judged, numbers) if np.isfinite(one.best_seconds)]
    first = _flat(rule_network(**RULE, seed=plan.seed))
    search = CMA(np.zeros_like(first), _DEVIATION, seed=plan.seed, population_size=plan.variations)
    means, averaged = [], -(-plan.generations // 3)
    for done in range(plan.generations):
        asked = [search.ask() for _ in range(plan.variations)]
        if done == len(known):
            known.append(_played(plan, pool, done, [_network(first + _sigma() * change) for change in asked]))
            _write(kept, policy_file.pack(_SCHEMA, _VERSION, {"plan": asdict(plan)}, {"ratios": np.array(known)}))
            watch(Generation(done + 1, plan.generations, float(np.exp(np.mean(known[-1])))))
        search.tell([(change, float(ratio)) for change, ratio in zip(asked, known[done], strict=True)])
        means.append(search.mean)
    network = _network(first + _sigma() * np.mean(means[-averaged:], axis=0))
    made = TrainedBroad(network, {"command": plan.command(), "seed": plan.seed, "plan": asdict(plan), "rule": RULE})
    _write(out, policy_file.dumps(made))
    kept.unlink(missing_ok=True)
    return made


def _played(
    plan: EvolutionPlan, pool: Sequence[Judged], generation: int, variations: Sequence[PooledNetwork]
) -> NDArray[np.float64]:
    """The mean log ratio of every variation on the instances of this generation."""
    rng = np.random.default_rng([plan.seed, 8, generation])
    batch = [pool[int(n)] for n in rng.choice(len(pool), min(plan.batch, len(pool)), replace=False)]
    policies = [broad_policy(network, seconds=0.0) for network in variations]
    return np.array([np.mean([log_ratio(one, policy) for one in batch]) for policy in policies])


def _sigma() -> NDArray[np.float64]:
    """The unit in which each weight is searched."""
    return _flat(PooledNetwork(*(np.full_like(part, unit) for part, unit in zip(rule_network(**RULE), _SIGMA, strict=True))))


def _flat(network: PooledNetwork) -> NDArray[np.float64]:
    return np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in network])


def _network(weights: NDArray[np.float64]) -> PooledNetwork:
    shapes = [np.shape(part) for part in rule_network(**RULE)]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(weights, ends[:-1])
    return PooledNetwork(*(part.reshape(shape).astype(np.float32) for part, shape in zip(parts, shapes, strict=True)))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _restored(plan: EvolutionPlan, path: Path) -> list[NDArray[np.float64]]:
    """The log ratios of all generations so far, with which the search is gone through again: all else follows from them."""
    refusal, way_out = f"Cannot resume from {path}", "remove it to begin anew"
    _, about, arrays = policy_file.unpack(path.read_bytes(), _SCHEMA, (_VERSION,), refusal, way_out)
    differing = sorted(name for name, value in asdict(plan).items() if about["plan"].get(name) != value)
    if differing:
        raise ValueError(f"{refusal}: it was made with other {', '.join(differing)}; give the same, or {way_out}.")
    return list(arrays["ratios"])


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or, if interrupted, nothing."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(data)
    part.replace(path)
