"""The command `harness deploy`: bring a scenario's job up on real processes and let a tuner drive it to its target."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.scenario import Scenario

__all__ = ["add_deploy"]

_ABOUT = """\
Run a scenario's job for real: a parameter server of processes that Ray places, starts and
watches, on this machine or on a cluster, with a tuner that drives it to its target. What
comes of it is a folder with the model (model.safetensors), a checkpoint to go on from, the
log of every exchange and a trace; at the end, the run stands beside the same one simulated."""

_MORE = """\
Who tunes is named by --tuner, or is the winner of a comparison (--from): the tuner with the
lowest mean rank on that scenario, of those that reached the target and never failed.
Without --address (or RAY_ADDRESS in the environment), Ray starts on this machine, for this
job only. Ctrl-C stops the job and leaves a checkpoint; --resume goes on from it.

  harness deploy --live live-digits
  harness compare live-digits --out chosen && harness deploy --live live-digits --from chosen"""


def add_deploy(add_parser: Callable[..., argparse.ArgumentParser], plain: type[argparse.HelpFormatter]) -> None:
    """Add the command to a parser's."""
    deploy = add_parser("deploy", help="run a job for real", description=_ABOUT, epilog=_MORE, formatter_class=plain)
    deploy.add_argument("scenario", metavar="SCENARIO", help="name or TOML file")
    deploy.add_argument("--live", action="store_true", help="on real processes; there is no other way yet")
    who = deploy.add_mutually_exclusive_group()
    who.add_argument("--tuner", metavar="NAME", help="who tunes (default: fixed)")
    who.add_argument("--from", dest="source", type=Path, metavar="DIR", help="results folder, whose winner tunes")
    deploy.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster (default: RAY_ADDRESS, else this machine)")
    deploy.add_argument("--seed", type=int, default=0, metavar="N", help="of data and tuner (default: 0)")
    deploy.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: deployed/SCENARIO)")
    deploy.add_argument("--resume", action="store_true", help="go on with the job that was interrupted in DIR")
    deploy.add_argument("--dry-run", action="store_true", help="print who would run where, and start nothing")
    deploy.set_defaults(run=_deploy)


def _deploy(options: argparse.Namespace) -> int:
    from harness.cli.display import terminal
    from harness.scenario import load

    if not options.live:
        raise ValueError(
            f"Cannot deploy {options.scenario}: say that it may start real processes, with --live. "
            "(In simulated time, `harness compare` plays it.)"
        )
    from harness.live.deploy.beside_simulation import beside, measured
    from harness.live.deploy.deployment import Deployment, Interrupted, deploy, described, simulated
    from tuners import resolve

    scenario = load(options.scenario)
    tuner = options.tuner or (_winner(options.source, scenario) if options.source else "fixed")
    wanted = Deployment(
        scenario=scenario,
        entry=resolve(tuner),
        seed=options.seed,
        out=options.out or Path("deployed") / scenario.name,
        address=options.address,
        resume=options.resume,
    )
    # Ray forks only to exec at once, so that what other threads held matters to nobody.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    console = terminal()
    if options.dry_run:
        console.print("\n".join(described(wanted)), markup=False, highlight=False, soft_wrap=True)
        return 0
    try:
        played = deploy(wanted, console)
    except Interrupted as stopped:
        print(f"harness: {stopped}", file=sys.stderr)  # noqa: T201
        return 130
    except KeyboardInterrupt:
        print("\nharness: interrupted while no tuner was at work; nothing is left running.", file=sys.stderr)  # noqa: T201
        return 130
    outcome = played.outcome
    console.print(
        f"{outcome.status} after {outcome.seconds:.1f} s. {outcome.reason}".rstrip(), highlight=False, markup=False
    )
    console.print(beside(measured(played), simulated(wanted)))
    console.print(f"Model, checkpoint, log and trace: {wanted.out}", highlight=False, soft_wrap=True)
    return 1 if outcome.status == "error" else 0


def _winner(folder: Path, scenario: Scenario) -> str:
    """Who won on `scenario` in the comparison that `folder` holds. Raises ValueError where that cannot be said."""
    from reports import tables
    from traces import store

    name = tables.winner(tables.summary(store.load_results(folder)), scenario.name)
    kept = folder / "scenarios" / f"{scenario.name}.toml"
    if not kept.is_file() or kept.read_text("utf-8") != scenario.text:
        raise ValueError(
            f"Cannot take the winner from {folder}: scenario {scenario.name!r} has changed since. Compare again, or name "
            f"the scenario as it was, {kept}."
        )
    return name
