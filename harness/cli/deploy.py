"""The command `harness deploy`: run a scenario's job on real processes, driven by a tuner."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.results import any_failed, conclude, interrupted, tuner_names
from harness.cli.terminal.parsing import some_path, whole
from harness.cli.terminal.standard_output import tell_once
from harness.machines.machine import cores

if TYPE_CHECKING:
    from harness.live.deploy.contest import LiveContest
    from harness.live.deploy.deployment import Deployment, LiveOptions
    from harness.scenario import Scenario

__all__ = ["add_deploy"]

_JOIN_SECONDS, _STILL_SECONDS, _SILENT_SECONDS = 300.0, 30.0, 3.0
_SAME_SECONDS = 1.0  # in which Ctrl-C that comes again is the same one

_ABOUT = """\
Run a scenario's job on a real parameter server: Ray places, starts and watches its
processes, on this machine or on a cluster, and a tuner drives the job to its target. The job
writes a folder with the model (model.safetensors), a checkpoint, the log of every exchange
and a trace. Without --live, it prints what would run where, and starts nothing."""

_MORE = """\
The tuner is the one that --tuner names, or the winner of a comparison (--from): of the tuners
that reached the target in some run and failed in none, the one of least mean time there.
Without --address (or RAY_ADDRESS in the environment), Ray starts on this machine, for this
job only. Ctrl-C, SIGTERM or the end of the terminal stops the job and leaves a checkpoint; --resume continues from it.
With --beside, a table compares the run with the same run in simulation.

  harness deploy --live live-digits
  harness deploy --live live-digits --tuners fixed,ssp,dssp --out contest
  harness compare live-digits --out chosen
  harness deploy --live live-digits --from chosen        the winner of these"""


def add_deploy(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    deploy = add_parser("deploy", help="run a job on real processes", description=_ABOUT, epilog=_MORE)
    deploy.add_argument("scenario", metavar="SCENARIO", help="name or TOML file")
    deploy.add_argument("--live", action="store_true", help="start real processes; without it, print the plan only")
    who = deploy.add_mutually_exclusive_group()
    who.add_argument("--tuner", metavar="NAME", help="tuner (default: fixed)")
    who.add_argument("--tuners", metavar="NAME,...", help="a contest: these tuners, one job after the other")
    who.add_argument("--from", dest="source", type=Path, metavar="DIR", help="results folder; take the winner")
    deploy.add_argument("--address", metavar="ADDRESS", help="Ray cluster (default: RAY_ADDRESS, else this machine)")
    deploy.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of data and tuner (default: 0)")
    deploy.add_argument("--seeds", type=whole(1), metavar="N", help="seeds of a contest (default: from the scenario)")
    deploy.add_argument("--out", type=some_path, metavar="DIR", help="folder to write (default: deployed/SCENARIO)")
    deploy.add_argument("--resume", action="store_true", help="continue the job that was interrupted in DIR")
    deploy.add_argument(
        "--insecure", action="store_true", help="use a cluster of several machines that has neither Ray's token nor TLS"
    )
    deploy.add_argument("--dry-run", action="store_true", help="print the plan, and start nothing, also with --live")
    deploy.add_argument("--beside", action="store_true", help="then run the tuner in the simulator too, and compare the two")
    deploy.add_argument(
        "--emulate",
        nargs="?",
        const="all",
        default="",
        choices=("nodes", "all"),
        help="slow processes and links down to the speed of the scenario's, and let nodes straggle, join, leave and fail as "
        "its [conditions] say; links need root, and --emulate=nodes leaves them out",
    )
    deploy.add_argument(
        "--join-limit",
        type=float,
        default=_JOIN_SECONDS,
        metavar="S",
        help="seconds for processes to start (default: %(default)g)",
    )
    deploy.add_argument(
        "--still-limit",
        type=float,
        default=_STILL_SECONDS,
        metavar="S",
        help="seconds without a push after which the job is diagnosed and recovered (default: %(default)g)",
    )
    deploy.add_argument(
        "--silent-limit",
        type=float,
        default=_SILENT_SECONDS,
        metavar="S",
        help="seconds without a heartbeat after which a process is replaced (default: %(default)g)",
    )
    deploy.set_defaults(run=_deploy, when_unread=tell_once)


def _deploy(options: argparse.Namespace) -> int:
    starts = options.live and not options.dry_run
    if starts:
        print("Loading JAX, Ray and the job.", flush=True)  # rich and the rest take seconds to import
        # The driver computes on its CPU whatever is chosen: workers find accelerators themselves, and need their memory.
        os.environ["JAX_PLATFORMS"] = "cpu"
    _check(options)
    if not starts:
        return _show_plan(options)
    # Ray execs right after it forks, so that locks which other threads held cannot block the child.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    return _run_job(options) if options.tuners is None else _run_contest(options)


def _show_plan(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal
    from harness.lines import say
    from harness.live.deploy.contest import check_contest
    from harness.live.deploy.deployment import check_folder, described
    from harness.scenario import load

    contest = None if options.tuners is None else _contest_of(options)
    scenario = load(options.scenario)
    job = _deployment_of(options, scenario, contest)
    if contest is None:
        check_folder(job)
    else:
        check_contest(contest)
    lines = [*_contest_words(contest, scenario), *described(job)]
    say(terminal(), "\n".join([*lines, f"Start it with:  {_that_starts(options)}"]))
    return 0


def _run_job(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import stages, terminal
    from harness.lines import say
    from harness.live.deploy.beside_simulation import beside, measured
    from harness.live.deploy.deployment import Interrupted, deploy, how_to_go_on, simulated, what_is_saved
    from harness.live.deploy.job_folder import exchanges_of, private
    from harness.scenario import load
    from harness.score import ending, score

    wanted, console = _deployment_of(options, load(options.scenario), None), terminal()
    with _stoppable() as stop:
        try:
            played = deploy(wanted, console)
        except Interrupted as stopped:
            print(f"harness: {stopped}", file=sys.stderr)
            return stop.status
        except KeyboardInterrupt:
            has = how_to_go_on(wanted.out, saved=False)
            print(f"\nharness: interrupted; all processes have ended. {has}", file=sys.stderr)
            return stop.status
    from reports.pages import page

    say(console, ending(score(played, **wanted.run).score, played.outcome.seconds))
    if options.beside:
        say(console, "Running the same job in the simulator.")
        console.print(beside(measured(played, exchanges_of(wanted.out)), simulated(wanted)))
    say(console, f"{what_is_saved(wanted.out)} and trace: {wanted.out}")
    with stages("Writing the page"), private():
        written = page.write(wanted.out)
    say(console, f"The page: {written}")
    return 1 if played.outcome.status == "error" else 0


def _deployment_of(options: argparse.Namespace, scenario: Scenario, contest: LiveContest | None) -> Deployment:
    """The one job to run, or the first job of a `contest`. Raises ValueError for a tuner that does not exist."""
    from harness.live.deploy.deployment import Deployment
    from tuners import resolve_contestant

    tuner = (
        options.tuner
        or (contest.tuners[0] if contest else "")
        or (_winner(options.source, scenario) if options.source else "fixed")
    )
    return Deployment(
        scenario=scenario,
        entry=resolve_contestant(tuner),
        seed=options.seed,
        out=contest.out if contest else options.out or Path("deployed") / scenario.name,
        resume=options.resume,
        live=_live_options(options),
    )


def _live_options(options: argparse.Namespace) -> LiveOptions:
    from harness.live.deploy.deployment import LiveOptions
    from harness.live.driver.repairs.standstill import Limits

    limits = Limits(options.join_limit, options.still_limit, options.silent_limit)
    return LiveOptions(options.address, options.insecure, limits, options.emulate)


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for limits that would end a job at once, and where the wrong one of --seed and --seeds is given."""
    limits = options.join_limit, options.still_limit, options.silent_limit
    for name, limit in zip(("--join-limit", "--still-limit", "--silent-limit"), limits, strict=True):
        if not limit > 0:
            raise ValueError(f"Cannot wait for {limit:g} s: give {name} a number of seconds above 0.")
    if options.tuners is None and options.seeds is not None:
        raise ValueError("Cannot use --seeds for one job: name the tuners of a contest with --tuners, or give --seed.")
    if options.tuners is not None and options.seed:
        raise ValueError("Cannot use --seed for a contest, which plays seeds 0, 1, ...: say how many with --seeds.")


def _contest_words(contest: LiveContest | None, scenario: Scenario) -> list[str]:
    """What a dry run says before the plan of one job, where there are several."""
    if contest is None:
        return []
    from harness.live.deploy.contest import jobs_and_time

    count = contest.seeds or scenario.seeds.count
    who = f"A contest of {', '.join(contest.tuners)}, {count} seed{'' if count == 1 else 's'} each"
    return [f"{who}. {jobs_and_time(len(contest.tuners) * count, scenario.budget.seconds)}. The first job:"]


def _that_starts(options: argparse.Namespace) -> str:
    """The command that starts what a dry run has shown."""
    named = {
        "--tuner": options.tuner,
        "--tuners": options.tuners,
        "--from": options.source,
        "--address": options.address,
        "--seed": options.seed or None,
        "--seeds": options.seeds,
        "--out": options.out,
        "--emulate": options.emulate or None,
        "--join-limit": None if options.join_limit == _JOIN_SECONDS else f"{options.join_limit:g}",
        "--still-limit": None if options.still_limit == _STILL_SECONDS else f"{options.still_limit:g}",
        "--silent-limit": None if options.silent_limit == _SILENT_SECONDS else f"{options.silent_limit:g}",
    }
    words = [f"{word}" for name, value in named.items() if value is not None for word in (name, value)]
    switches = {"--resume": options.resume, "--insecure": options.insecure, "--beside": options.beside}
    words += [name for name, given in switches.items() if given]
    return shlex.join(["harness", "deploy", "--live", options.scenario, *words])


def _run_contest(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal
    from harness.comparison.compare import compare
    from harness.lines import say
    from harness.live.deploy.contest import contest
    from harness.live.deploy.deployment import Interrupted

    wanted = _contest_of(options)
    tuners, out, console = wanted.tuners, wanted.out, terminal()
    played = out
    with _stoppable() as stop:
        try:
            contest(wanted, console)
            if options.beside:
                say(console, "Running the same jobs in the simulator.")
                played = out / "simulated"
                again = played.exists()
                compare([options.scenario], tuners, out=played, seeds=options.seeds, jobs=cores(), resume=again)
        except (Interrupted, KeyboardInterrupt):
            interrupted(played)
            return stop.status
    conclude(out, console)
    return 1 if any_failed(out) else 0


def _contest_of(options: argparse.Namespace) -> LiveContest:
    from harness.live.deploy.contest import LiveContest
    from harness.scenario import load

    return LiveContest(
        scenario=options.scenario,
        tuners=tuple(tuner_names(options.tuners, oracle=False)),
        seeds=options.seeds,
        out=options.out or Path("deployed") / f"{load(options.scenario).name}-contest",
        resume=options.resume,
        live=_live_options(options),
    )


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """SIGTERM is Ctrl-C until the context ends, and so is SIGHUP, by which a terminal that closes ends what runs there. One
    that is ignored (`nohup`) stays so."""
    stop = _Stop()
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop:
    """What such a signal does: the first one stops the job. A later one does nothing: it would end the last checkpoint, and
    a terminal may close after Ctrl-C. But Ctrl-C counts again, unless it comes at once: `timeout -s INT` sends it twice."""

    def __init__(self) -> None:
        self.status, self._stopped_seconds = 130, math.inf

    def __call__(self, number: int, _: object) -> None:
        now = time.monotonic()
        if math.isinf(self._stopped_seconds):
            self.status, self._stopped_seconds = 128 + number, now
        elif number != signal.SIGINT or now < self._stopped_seconds + _SAME_SECONDS:
            return
        raise KeyboardInterrupt


def _winner(folder: Path, scenario: Scenario) -> str:
    """The winner on `scenario` of the comparison in `folder`. Raises ValueError if there is none."""
    from reports.verdicts.summary import summary, winner
    from traces import store

    name = winner(summary(store.load_results(folder)), scenario.name)
    kept = folder / "scenarios" / f"{scenario.name}.toml"
    if not kept.is_file() or kept.read_text("utf-8") != scenario.text:
        raise ValueError(
            f"Cannot take the winner from {folder}: scenario {scenario.name!r} has changed since. Compare again, or name "
            f"the scenario as it was, {kept}."
        )
    return name
