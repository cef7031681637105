"""The command `harness train`: train RLP's policy, of the paper's form or of the broad one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from harness.cli.terminal.parsing import number, out_file, whole
from harness.cli.terminal.standard_output import tell_once

if TYPE_CHECKING:
    from tuners.actions import Scalar

__all__ = ["add_train"]

T = TypeVar("T")

_ABOUT = """\
Train RLP's synchronisation policy on random instances: workers, some of them stragglers, train
a perceptron. Use the policy as 'rlp[policy=FILE]'.

--form broad trains what `rlp` plays by default: a network that chooses among simple rules. It
learns from runs under each of them, on 4 to 16 workers, rates from far below to the edge of
stability, even and skewed data, 0 to 6 hidden layers, and then from its own runs.

--form printed trains the paper's Q-network: first from runs under fixed policies (BSP, ASP and
SSP with s = 2, 5, 8, on the same instances), then from its own runs (episodes). If interrupted,
it leaves a checkpoint beside FILE; with --resume it continues to the same bytes."""

_MORE = """\
The policy that `rlp` plays:
  harness train rlp --form broad --out FILE

The policy that 'rlp[as_printed=true]' plays, with the paper's values:
  harness train rlp --instances 1000 --seed 1 --out FILE

The same form with values of ours, on jobs near the edge of stability:
  harness train --instances 1300 --pushes 800 --depths 1,1,2,3 \\
    --rates 0.2,0.17,0.13,0.08 --sleeps 9.4,1.5,9.4,9.4 --out FILE 'rlp[gamma=1,
    rate=0.0003,anneal=220000,replay=8000,steps=10,copy=200,double=true,
    unit_seconds=10]'

Options of the printed form's learning are written in brackets, as in 'rlp[gamma=1,replay=5000]':
gamma, epsilon, rate, anneal, replay (N), batch, copy (c), optimizer (sgd, adam), steps, double,
returns (in pre-training: undiscounted, discounted), unit_seconds of rewards, and as_printed=true,
which follows the paper's text also where it is wrong. The defaults are the paper's."""

_PRINTED_ONLY = (
    *("episodes", "pretrain", "workload", "data", "depths", "rates", "sleeps", "skew", "accuracy", "workers"),
    *("pushes", "lanes", "resume"),
)
_LINE_INSTANCES = 50  # of a broad policy's training, per line of output


def add_train(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    train = add_parser("train", help="train RLP's policy", description=_ABOUT, epilog=_MORE)
    train.add_argument("tuner", metavar="rlp", help="or with options of its learning, as in 'rlp[gamma=1]'")
    train.add_argument(
        "--form", choices=("printed", "broad"), default="printed", help="form of the policy (default: printed)"
    )
    train.add_argument("--instances", type=int, metavar="N", help="instances to learn on (default: 1000; broad: 800)")
    train.add_argument("--out", type=out_file, required=True, metavar="FILE", help="npz file to write the policy to")
    train.add_argument(
        "--rounds", type=int, metavar="N", help="times that it learns from its own runs, with --form broad (default: 1)"
    )
    train.add_argument("--episodes", type=int, metavar="N", help="runs to learn from (default: one per instance)")
    train.add_argument("--pretrain", type=int, default=100, metavar="N", help="instances per fixed policy (default: 100)")
    train.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of all random draws (default: 0)")
    train.add_argument("--workload", default="rlp-digits", metavar="NAME", help="see `harness list workloads`")
    train.add_argument("--data", default="", metavar="DIR", help="folder of a workload that reads files")
    train.add_argument("--depths", default="0,1,2,3", metavar="H,...", help="hidden layers to draw from (default: 0,1,2,3)")
    train.add_argument("--rates", default="", metavar="R,...", help="learning rate for each depth (default: workload's)")
    train.add_argument(
        "--sleeps", default="", metavar="S,...", help="mean sleep of stragglers for each depth (default: 9.4)"
    )
    train.add_argument(
        "--skew",
        type=number(0, most=1),
        default=0.0,
        metavar="S",
        help="how unequal the workers' classes are, 0 to 1 (default: 0)",
    )
    train.add_argument(
        "--accuracy", type=number(above=0, most=1), default=0.88, metavar="A", help="target of a run (default: 0.88)"
    )
    train.add_argument("--workers", type=int, default=10, metavar="K", help="workers per instance (default: 10)")
    train.add_argument("--pushes", type=int, default=3000, metavar="N", help="most pushes of a run (default: 3000)")
    train.add_argument(
        "--lanes", type=int, default=1, metavar="N", help="episodes at the same time, under vmap (default: 1)"
    )
    train.add_argument("--resume", action="store_true", help="continue an interrupted training, if there is one")
    usual = {name: train.get_default(name) for name in _PRINTED_ONLY}
    train.set_defaults(run=partial(_train, usual), when_unread=tell_once)


def _train(usual: Mapping[str, object], options: argparse.Namespace) -> int:
    from harness.training.train import checkpoint
    from tuners import parse

    tuner, learning = parse(options.tuner)
    if tuner != "rlp":
        raise ValueError(f"Cannot train {tuner!r}: rlp is the only tuner that is trained.")
    broad = options.form == "broad"
    foreign = [f"--{name}" for name, value in usual.items() if broad and getattr(options, name) != value]
    foreign += [name for name, _ in learning if broad] + ["--rounds"] * (not broad and options.rounds is not None)
    if foreign:
        other = "printed" if broad else "broad"
        raise ValueError(f"Cannot train the {options.form} form with {', '.join(foreign)}: leave it out, or --form {other}.")
    try:
        told = _train_broad(options) if broad else _train_printed(options, learning)
    except KeyboardInterrupt:
        kept = checkpoint(options.out)
        told = "nothing is kept."
        if kept.exists():
            told = f"{kept} keeps the training so far.\nThe same command with --resume goes on."
        print(f"\nharness: interrupted; {told}", file=sys.stderr)
        return 130
    print(told)
    print(f"The policy: {options.out}; play it as --tuners 'rlp[policy={options.out}]'.")
    return 0


def _train_broad(options: argparse.Namespace) -> str:
    from harness.training.hindsight import HindsightPlan, InstancePlayed, learn

    given = {name: getattr(options, name) for name in ("instances", "rounds", "seed")}
    plan = HindsightPlan(**{name: value for name, value in given.items() if value is not None})

    def watch(over: InstancePlayed) -> None:
        if over.number % _LINE_INSTANCES == 0 or over.number == over.of:
            print(f"{over.number}/{over.of}  {over.by}", flush=True)

    learn(plan, options.out, watch=watch)
    return f"{plan.instances} instances in every mode; rounds under the policy itself: {plan.rounds}."


def _train_printed(options: argparse.Namespace, learning: Sequence[tuple[str, Scalar]]) -> str:
    from harness.cli.terminal.display import terminal, training
    from harness.training import train

    instances = 1000 if options.instances is None else options.instances
    plan = train.TrainingPlan(
        workload=options.workload,
        data=options.data,
        depths=_numbers(int, "--depths", options.depths),
        workers=options.workers,
        rates=_numbers(float, "--rates", options.rates),
        sleeps=_numbers(float, "--sleeps", options.sleeps),
        skew=options.skew,
        accuracy=options.accuracy,
        instances=instances,
        episodes=instances if options.episodes is None else options.episodes,
        pretrain=options.pretrain,
        most_pushes=options.pushes,
        lanes=options.lanes,
        seed=options.seed,
        options=train.read_options(learning),
    )
    with training(terminal(), plan.runs) as watch:
        made = train.train(plan, options.out, resume=options.resume, watch=watch)
    endings = ", ".join(f"{count} {how}" for how, count in made.about["endings"].items() if count)
    return f"{plan.runs} runs: {endings}."


def _numbers(kind: Callable[[str], T], option: str, text: str) -> tuple[T, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"Cannot read {option} {text!r}: write numbers with commas between them.") from None
