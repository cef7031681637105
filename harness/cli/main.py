"""The command `harness`. Each command imports its slow libraries itself, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import own_packages
from harness.cli.calibrate import add_calibrate, add_fidelity
from harness.cli.deploy import add_deploy
from harness.cli.draw import add_draw
from harness.cli.new import add_new
from harness.cli.play import add_play
from harness.cli.reproduce import add_reproduce
from harness.cli.results import any_failed, conclude, export, importing_reports, interrupted, tuner_names
from harness.cli.share import add_merge, add_publish
from harness.cli.show import add_list, add_show
from harness.cli.terminal import standard_output
from harness.cli.terminal.parsing import CommandParser, some_path
from harness.cli.trace import add_trace
from harness.cli.training_command import add_train
from harness.machines.machine import collect_garbage_rarely, cores
from harness.version import HARNESS_VERSION

__all__ = ["main"]

_ABOUT = """\
Score tuners of distributed training on parameter servers: which tuner finishes the job
first, and how much time does its tuning cost? Every tuner runs on the same scenarios with
the same random draws. Time is simulated; gradients are real, and as stale as in the
simulated cluster. The winner can then drive a real parameter server."""

_EXAMPLES = """\
examples:
  harness compare --quick                      five tuners on the default scenario, `digits`
  harness compare                              every tuner on it
  harness compare digits-svm --tuners fixed,tpe --seeds 10
  harness compare my.toml --tuners all,my_package.my_module:my_tuner
  harness show digits > my.toml                a template for your own scenario
  harness list tuners
  harness show cruise                          what a tuner does, and its options
  harness play digits cruise                   one run, every exchange on the screen
  harness new tuner my_tuner                   a tuner of your own that runs, with its test
  harness train rlp --form broad --out my.npz         then --tuners 'rlp[policy=my.npz]'
  harness deploy --live live-digits            the same job, on real processes

exit status:
  0    done; a run that missed its target is a normal result
  1    a run ended in an error (its row says why), the disk is full, or processes cannot start
  2    nothing was run: an unknown name, a mistake in a scenario, results that exist already
  130  interrupted; continue with the same command and --resume"""

_COMPARE = """\
Run every tuner on every scenario, on the same seeds, in parallel processes, and write the
results to a folder: tables as Parquet, the log of every exchange, and a report page. A run
that fails is a row with a reason. The results do not depend on the number of processes. A
comparison that is interrupted and resumed gives the same bytes."""

_COMPARE_MORE = """\
A scenario is a name from `harness list scenarios`, a pattern of such names, a TOML file (see
`harness show`), or members of a family, as 'drawn:learning[0:20]' (see `harness draw`). A
tuner is a name from `harness list tuners`, or package.module:factory, where factory is a
function of a Job that yields actions; modules are also searched in the current folder.
Options of a tuner are written in brackets after its name, as in
'cruise[gain=0.1,bandwidth=measured]'.
`all` means every tuner, and `best_fixed`, which is not a tuner but a reference: the best fixed
setting that a search finds in hindsight, from random ones and from what the tuners end with."""

_QUICK_TUNERS = "fixed,asp,cruise,mltuner,joint"
"""What `--quick` compares: not tuning, a policy, a model of the cluster, a search in branches, a model of all knobs."""

_QUICK_SEEDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, the process's own if None, and return its exit status."""
    standard_output.replace_closed()
    try:
        own_packages.working_folder_last()
    except FileNotFoundError:
        return _complain("Cannot run here: this folder has been deleted. Change to another one.", 2)
    if arguments is None:  # the process ends with this command
        sys.stdout, sys.stderr = map(standard_output.lasting, (sys.stdout, sys.stderr))
        collect_garbage_rarely()
        # As processes that play runs do: the same bytes everywhere, and an accelerator's memory is left to who asks for it.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # It warns twice, in its own words, where HOME cannot be written, and goes on with a temporary folder.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        # At its end, Python looks for circles among all objects, which takes half a second once JAX and Ray are imported.
        atexit.register(gc.freeze)
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    if isinstance(sys.stdout, standard_output.LastingOutput) and hasattr(options, "when_unread"):
        sys.stdout.when_unread = options.when_unread
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # below the ^C that a terminal shows
        return _complain("interrupted.", 130)
    except ValueError as error:
        return _complain(error, 2)
    except standard_output.Unread:
        return 0
    except OSError as error:
        return _complain(_io_text(error), 1)
    except RuntimeError as error:
        return _complain(error, 1)
    return status


def _io_text(error: OSError) -> str:
    """The message of an OSError, with the file's name if the error has one."""
    what = error.strerror or str(error)
    return f"Cannot use {error.filename}: {what}." if error.filename else what


def _complain(what: object, status: int) -> int:
    print(f"harness: {what}", file=sys.stderr)
    return status


# --------------------------------------------------------------------------------------------------------------- parser


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="harness", description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"harness {HARNESS_VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (
        *(_add_compare, add_list, add_show, add_play, add_new, _add_report, add_merge, add_publish, add_train, add_draw),
        *(add_deploy, add_trace, add_calibrate, add_fidelity, add_reproduce),
    ):
        add(commands.add_parser)
    return parser


def _add_compare(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    compare = add_parser("compare", help="score tuners on scenarios", description=_COMPARE, epilog=_COMPARE_MORE)
    compare.add_argument(
        "scenarios",
        nargs="*",
        metavar="SCENARIO",
        help="name, pattern such as 'cruise-*', TOML file, or 'drawn:learning[0:20]' (default: digits)",
    )
    compare.add_argument("--tuners", metavar="all|NAME,...", help="tuners to compare (default: all)")
    compare.add_argument(
        "--quick", action="store_true", help=f"a first answer: {_QUICK_TUNERS.replace(',', ', ')}; {_QUICK_SEEDS} seeds"
    )
    compare.add_argument("--seeds", type=int, metavar="N", help="seeds per scenario (default: from the scenario)")
    where = compare.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per core)")
    where.add_argument("--address", default="", metavar="ADDR", help="Ray cluster that makes the runs: HOST:PORT, auto")
    compare.add_argument(
        "--device", default="cpu", metavar="NAME", help="what JAX computes on: cpu (default), cuda, rocm, tpu"
    )
    compare.add_argument("--out", type=some_path, metavar="DIR", help="results folder (default: results/SCENARIO)")
    compare.add_argument(
        "--resume", action="store_true", help="continue the comparison in DIR, also with more scenarios, tuners or seeds"
    )
    compare.add_argument(
        "--replace",
        default="",
        metavar="NAME,...",
        help="with --resume: make the runs of these tuners again; their code changed",
    )
    compare.add_argument("--record", action="store_true", help="write a trace for every run")
    compare.add_argument(
        "--calibration-draws",
        type=int,
        default=0,
        metavar="K",
        help="play scenarios of calibrated constants under K draws of these, too, and say which ranks hold (default: 0)",
    )
    compare.set_defaults(run=_compare, when_unread=standard_output.tell_once)


def _add_report(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    report = add_parser(
        "report",
        help="print a comparison's answer and table, and write its page again",
        description="Print the answer and the table of a comparison and write its page, report.html, again. If the "
        "comparison was interrupted or is still running, they are of the finished runs.",
    )
    report.add_argument("folder", type=Path, metavar="DIR", help="results folder")
    report.add_argument(
        "--simulated",
        type=Path,
        metavar="DIR",
        help="put the live runs beside those in this folder (default: DIR/simulated)",
    )
    report.add_argument("--csv", action="store_true", help="also write tables and the numbers of figures to DIR/csv")
    report.add_argument("--markdown", action="store_true", help="also write answers and tables to DIR/report.md")
    report.add_argument("--figures", choices=("svg", "pdf"), help="also write every figure to DIR/figures")
    report.set_defaults(run=_report)


# ------------------------------------------------------------------------------------------------------------- commands


def _compare(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal, watching
    from harness.comparison.compare import compare
    from harness.comparison.results_folder import check_folder
    from harness.lines import say

    scenarios = _scenarios(options.scenarios) or ["digits"]
    stems = [_stem(s) for s in options.scenarios or scenarios]
    out = options.out or Path("results") / ("+".join(stems) + ("-quick" if options.quick else ""))
    tuners = tuner_names(options.tuners if options.tuners is not None else _QUICK_TUNERS if options.quick else "all")
    seeds = options.seeds if options.seeds is not None else _QUICK_SEEDS if options.quick else None
    jobs = cores() if options.jobs is None else options.jobs
    check_folder(out, resume=options.resume)  # before it is said that anything is compared
    console = terminal()
    first = _what(scenarios, tuners, seeds, options.address or jobs, out)
    say(console, first)
    if options.resume and not (out / "manifest.json").is_file():
        say(console, f"{out} has no comparison to resume: this one begins.")
    try:
        with watching(console) as watch, importing_reports():
            compare(
                scenarios,
                tuners,
                out=out,
                seeds=seeds,
                jobs=jobs,
                address=options.address,
                device=options.device,
                resume=options.resume,
                replace=tuner_names(options.replace) if options.replace else (),
                record=options.record,
                calibration_draws=options.calibration_draws,
                watch=watch,
            )
    except KeyboardInterrupt:
        return interrupted(out)
    conclude(out, console)
    return 1 if any_failed(out) else 0


def _stem(scenario: str) -> str:
    """The part of a results folder's name that a scenario, or a pattern of scenarios, gives."""
    if scenario.startswith("drawn:") or "=" in scenario:
        return re.sub(r"[^\w.]+", "-", scenario).strip("-")
    return re.sub(r"[-*?\[\]]+$", "", Path(scenario).stem) or "all"


def _what(scenarios: Sequence[str], tuners: Sequence[str], seeds: int | None, where: int | str, out: Path) -> str:
    """One line that says what is about to be compared, before anything slow is imported."""
    names = ", ".join(scenarios) if len(scenarios) < 4 else f"{len(scenarios)} scenarios"
    each = f"{seeds} seed{'' if seeds == 1 else 's'} each" if seeds is not None else "each scenario's own seeds"
    places = f"Ray cluster {where}" if isinstance(where, str) else f"{where} process{'' if where == 1 else 'es'}"
    who = "1 tuner" if len(tuners) == 1 else f"{len(tuners)} tuners"
    return f"Comparing {who} on {names}, {each}, in {places}; results go to {out}."


def _scenarios(names: Sequence[str]) -> list[str]:
    """Expand patterns such as cruise-* to the names of embedded scenarios. A mistake in a file or in the members of a
    family, and an unknown name are told here, before anything else is said."""
    from harness.families import members, single
    from harness.scenario import load, matching
    from tuners import split_names

    found: list[str] = []
    for name in names:
        if not name.endswith(".toml") and len(several := split_names(name)) > 1:
            raise ValueError(f"No scenario {name!r}: separate scenarios by spaces: {' '.join(several)}.")
        named = matching(name)
        if name.startswith("drawn:"):
            named = [single(member) for member in members(name.removeprefix("drawn:"))]
        elif named == [name] or name.endswith(".toml"):
            for one in named:
                load(one)
        found += named if named == [name] else [n for n in named if n not in found]
    return found


def _report(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal
    from harness.comparison.results import assemble

    if (options.folder / "runs").is_dir():
        assemble(options.folder)
    conclude(options.folder, console := terminal(), simulated=options.simulated)
    export(options.folder, console, csv=options.csv, markdown=options.markdown, figures=options.figures)
    return 0
