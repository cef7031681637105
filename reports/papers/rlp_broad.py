"""RLP's broad policy on classes of jobs that its training left out, beside simple rules. A program that prints Markdown:

    python -m reports.papers.rlp_broad [--classes NAME ...] [--instances 40] [--first 500] [--policy FILE] [--rules]

For each class: the geometric mean of the policy's seconds over those of the rule that is best for the class, of the rule
that is best for each instance (both known in hindsight only), of ASP and of BSP. Below 1 the policy is faster. Beside it
stand the paper's form, `rlp[as_printed=true]`, and the rule of three numbers at which training begins. With `--rules`, so
does every simple rule. A run that takes over four times the best rule's seconds of its instance is stopped, and counts as
four times.

Seeds of instances are below 10**6, so that none was trained on. What differs from training (`harness.training.varied`): the
numbers of workers, 6, 8 and 12; the depth of four hidden layers, and two and three of full width; data of Gaussian clouds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.machines import program_cache
from harness.training.hindsight import RULE, Judged, judged, log_ratio
from harness.training.instances import Instance, InstanceKind, draw
from harness.training.varied import CONDITIONS
from tuners.actions import SyncPolicy
from tuners.rlp import policy_file, tuner
from tuners.rlp.broad import broad_policy

__all__ = ["HELD_OUT", "HeldOut", "main", "table"]

_CAP = 4.0
_MOST_PUSHES = 3000
_CLOUDS = {
    "data.label_noise": 0.0,
    "data.margin": 4.0,
    "data.samples": 4000,
    "demand.sample_seconds": 0.2996,
    "demand.fixed_seconds": 0.0,
    "demand.model_bytes": 1e4,
    "demand.message_seconds": 0.0,
    "demand.apply_seconds": 0.0,
}


class HeldOut(NamedTuple):
    """A class of jobs: what its instances have in common."""

    workers: int
    depth: int
    units: int
    rate: float
    skew: float = 0.0
    conditions: str = "usual"  # a key of `harness.training.varied.CONDITIONS`
    data: str = "rlp-digits"

    def instance(self, seed: int) -> Instance:
        """The instance of a seed."""
        clouds = _CLOUDS if self.data == "clouds-mlp" else {}
        return draw(
            InstanceKind(
                workload=self.data,
                overrides={"learning_rate": self.rate, "skew": self.skew, **clouds},
                workers=self.workers,
                depths=(self.depth,),
                units=self.units,
                conditions=CONDITIONS[self.conditions],
            ),
            seed,
        )


HELD_OUT = {
    "6 workers, near the edge": HeldOut(6, 1, 256, 0.3),
    "6 workers, far below, by class": HeldOut(6, 1, 256, 0.017, skew=1.0),
    "12 workers, half the edge": HeldOut(12, 1, 256, 0.08, conditions="mild"),
    "12 workers, near the edge, half by class": HeldOut(12, 1, 256, 0.14, skew=0.5),
    "8 workers, 4 layers, near the edge": HeldOut(8, 4, 64, 0.055, conditions="even"),
    "8 workers, 2 full layers, half the edge": HeldOut(8, 2, 256, 0.08),
    "8 workers, clouds, half the edge": HeldOut(8, 1, 64, 0.35, data="clouds-mlp"),
    "8 workers, clouds, far below, by class": HeldOut(8, 1, 64, 0.05, skew=0.7, data="clouds-mlp"),
}


def table(held_out: HeldOut, seeds: Sequence[int], policies: Mapping[str, SyncPolicy], rules: bool) -> Iterator[str]:
    """The rows of one class."""
    found = [one for one in (judged(held_out.instance(s), cap=_CAP, most_pushes=_MOST_PUSHES) for s in seeds) if _ends(one)]
    by_rule = {name: np.array([_capped(one, name) for one in found]) for name in found[0].rules}
    best = min(by_rule, key=lambda name: float(by_rule[name].mean()))
    yield f"{len(found)} instances; best rule {best}, {_mean(by_rule[best])} x the best of each instance"
    yield ""
    yield "| policy | over the best rule | over the best of each instance | over ASP | over BSP | stopped |"
    yield "|---|---|---|---|---|---|"
    logs = {name: np.array([log_ratio(one, policy) for one in found]) for name, policy in policies.items()}
    for name, own in (logs | (by_rule if rules else {})).items():
        over = [_mean(own - base) for base in (by_rule[best], 0.0, by_rule["asp"], by_rule["bsp"])]
        yield f"| {name} | {' | '.join(over)} | {int((own >= np.log(_CAP) - 1e-9).sum())} |"


def _ends(one: Judged) -> bool:
    return bool(np.isfinite(one.best_seconds))


def _capped(one: Judged, rule: str) -> float:
    return float(np.log(min(one.rules[rule] / one.best_seconds, _CAP)))


def _mean(logs: NDArray[np.float64]) -> str:
    return f"{np.exp(logs.mean()):.2f}"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", choices=HELD_OUT, default=list(HELD_OUT), metavar="NAME")
    parser.add_argument("--instances", type=int, default=40)
    parser.add_argument("--first", type=int, default=500, help="seed of the first instance")
    parser.add_argument("--policy", help="a policy file instead of the policy that ships")
    parser.add_argument("--rules", action="store_true", help="also a row for every simple rule")
    given = parser.parse_args()
    program_cache.use()
    played = policy_file.load(given.policy) if given.policy else policy_file.shipped()
    policies = {
        "rlp": tuner.policy_of(played),
        "rlp[as_printed=true]": tuner.policy_of(policy_file.shipped_as_printed()),
        "the rule of three numbers": broad_policy(RULE()),
    }
    seeds = range(given.first, given.first + given.instances)
    for name in given.classes:
        print("\n".join(["", f"## {name}", "", *table(HELD_OUT[name], seeds, policies, given.rules)]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
