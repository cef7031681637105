"""Learn which rates are probable before a job has begun, for `tuners.joint`: ``python -m harness.training.learn_rates``.

Members 100 and on of the family `learning` are for training tuners. Each is played for as many pushes as its reference run
would take, under ASP, at seven rates that span the upper decades of the range in which its rate is free. The best one is
that which first makes 98 % of the best improvement of validation loss that any of them has made. What is kept is its heat
(`tuners.joint.learning.heat`: the effective rate, lr / (1 - momentum), for one worker and one sample), as a share of the top
of the range: its logarithm's mean and deviation over the members.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from harness.families.draft import MemberGoal, written
from harness.families.families import FAMILIES, TRAINING, member_name
from harness.families.lot import Lot
from harness.machines import program_cache
from harness.scenario import Scenario, job, parse, system
from harness.scenario.tables import BudgetTable
from tuners.actions import Evaluate, Run, Target
from tuners.joint.learning.heat import stress
from tuners.settings import Real

__all__ = ["fastest", "main"]

_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)  # of the top of the range, that are played
_IMPROVEMENT = 0.98  # of the best improvement: what a rate has to make
_CHECK_CLOCKS = 25
_SEED = 999_983  # comparisons count their seeds from 0


def _best_share(index: int) -> float | None:
    """The best heat of member `index` of `learning`, over the top of its range; None where nothing is learned."""
    name = member_name("learning", index)
    draft = FAMILIES["learning"].draw(Lot(f"{name}/0"))
    stand_in = {"accuracy": 0.5, "loss": 1.0}[draft.metric]
    text = written(draft, MemberGoal(0, stand_in, _CHECK_CLOCKS, 1e9))
    read = parse(text, name=name, origin=Path(f"{name}.toml"))
    scenario = replace(read, target=Target("clocks", 2**30), budget=BudgetTable(seconds=1e12))
    first = system(scenario, _SEED).perform(Evaluate()).loss
    found = fastest({share: _losses(scenario, share, draft.pushes) for share in _SHARES}, first)
    start = job(scenario, _SEED)
    momentum = 0.0 if start.space.knob("momentum") is not None else start.start.momentum
    return None if found is None else found / (1 - momentum) * stress(replace(start.start, policy="asp"))


def fastest(courses: Mapping[float, Sequence[float]], untrained: float) -> float | None:
    """The share whose losses first make nearly the best improvement on `untrained`; None where nothing is learned.

    The geometric mean where several are equally fast.
    """
    best = min((min(losses, default=math.inf) for losses in courses.values()), default=math.inf)
    if not best < untrained:
        return None
    wanted = untrained + _IMPROVEMENT * (best - untrained)
    reached = {s: next((i for i, loss in enumerate(c) if loss <= wanted), math.inf) for s, c in courses.items()}
    return math.exp(mean(math.log(s) for s, at in reached.items() if at == min(reached.values())))


def _losses(scenario: Scenario, share: float, pushes: int) -> list[float]:
    """Validation losses after every `_CHECK_CLOCKS` pushes at this share of the highest rate."""
    seen = job(scenario, _SEED)
    top = seen.space.knob("learning_rate")
    if not isinstance(top, Real):
        raise TypeError(f"Cannot play {scenario.name}: its rate is not free.")
    momentum = 0.0 if seen.space.knob("momentum") is not None else seen.start.momentum
    setting = replace(seen.start, policy="asp", learning_rate=share * top.high, momentum=momentum)
    window = system(scenario, _SEED, setting).perform(Run(clocks=pushes))
    return [e.loss for e in window.evaluations if math.isfinite(e.loss)]


def main() -> None:
    """Play the members and write the file."""
    asked = argparse.ArgumentParser(description="Learn which rates are probable before a job has begun.")
    asked.add_argument("--first", type=int, default=100)
    asked.add_argument("--count", type=int, default=24)
    asked.add_argument("--out", type=Path, required=True)
    args = asked.parse_args()
    last = args.first + args.count - 1
    if not TRAINING.start <= args.first <= last < TRAINING.stop:
        asked.error(
            f"cannot learn from members {args.first} to {last}: those from {TRAINING.start} to {TRAINING.stop - 1} are for "
            "training, and tuners are compared on the others."
        )
    program_cache.use()
    found = dict[int, float]()
    for index in range(args.first, args.first + args.count):
        share = _best_share(index)
        if share is not None:
            found[index] = share
            print(index, f"{share:.3g}", flush=True)  # noqa: T201 (what the program does)
    logs = [math.log(s) for s in found.values()]
    args.out.write_text(
        f"# Made by `python -m harness.training.learn_rates --first {args.first} --count {args.count} --out FILE`:\n"
        f"# the best heats (`tuners.joint.learning.heat`) of {len(logs)} drawn jobs, over the top of their rate's range.\n\n"
        f"mean_log_share = {mean(logs):.3f}\ndeviation_log_share = {stdev(logs):.3f}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
