"""The command `harness deploy`: run a scenario's job on real processes, driven by a tuner."""

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
Run a scenario's job on a real parameter server: Ray places, starts and watches its
processes, on this machine or on a cluster, and a tuner drives the job to its target. The job
writes a folder with the model (model.safetensors), a checkpoint, the log of every exchange
and a trace. At the end, a table compares the run with the same run in simulation."""

_MORE = """\
The tuner is the one that --tuner names, or the winner of a comparison (--from): of the tuners
that reached the target and never failed, the one with the lowest mean rank on that scenario.
Without --address (or RAY_ADDRESS in the environment), Ray starts on this machine, for this
job only. Ctrl-C stops the job and leaves a checkpoint; --resume continues from it.

  harness deploy --live live-digits
  harness compare live-digits --out chosen && harness deploy --live live-digits --from chosen"""


def add_deploy(add_parser: Callable[..., argparse.ArgumentParser], plain: type[argparse.HelpFormatter]) -> None:
    """Add the command to a parser."""
    deploy = add_parser(
        "deploy", help="run a job on real processes", description=_ABOUT, epilog=_MORE, formatter_class=plain
    )
    deploy.add_argument("scenario", metavar="SCENARIO", help="name or TOML file")
    deploy.add_argument("--live", action="store_true", help="start real processes (required)")
    who = deploy.add_mutually_exclusive_group()
    who.add_argument("--tuner", metavar="NAME", help="tuner (default: fixed)")
    who.add_argument("--from", dest="source", type=Path, metavar="DIR", help="results folder; take the winner")
    deploy.add_argument("--address", metavar="ADDRESS", help="Ray cluster (default: RAY_ADDRESS, else this machine)")
    deploy.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data and tuner (default: 0)")
    deploy.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: deployed/SCENARIO)")
    deploy.add_argument("--resume", action="store_true", help="continue the job that was interrupted in DIR")
    deploy.add_argument(
        "--insecure", action="store_true", help="use a cluster of several machines that has neither Ray's token nor TLS"
    )
    deploy.add_argument("--dry-run", action="store_true", help="print the plan, and start nothing")
    deploy.set_defaults(run=_deploy)


def _deploy(options: argparse.Namespace) -> int:
    from harness.cli.display import terminal
    from harness.scenario import load

    if not options.live:
        raise ValueError(
            f"Cannot deploy {options.scenario}: say that it may start real processes, with --live. "
            "(`harness compare` runs it in simulated time.)"
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
        insecure=options.insecure,
    )
    # Ray execs right after it forks, so that locks which other threads held cannot block the child.
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
        print("\nharness: interrupted while no tuner was running; all processes have ended.", file=sys.stderr)  # noqa: T201
        return 130
    outcome = played.outcome
    console.print(
        f"{outcome.status} after {outcome.seconds:.1f} s. {outcome.reason}".rstrip(), highlight=False, markup=False
    )
    console.print(beside(measured(played), simulated(wanted)))
    console.print(f"Model, checkpoint, log and trace: {wanted.out}", highlight=False, soft_wrap=True)
    return 1 if outcome.status == "error" else 0


def _winner(folder: Path, scenario: Scenario) -> str:
    """The winner on `scenario` of the comparison in `folder`. Raises ValueError if there is none."""
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
