"""The command `harness trace`: record runs, fetch and import public recordings, show, check and convert traces."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.results import interrupted, tuner_names
from harness.cli.terminal.parsing import out_folder, whole

if TYPE_CHECKING:
    from traces.importers import Imported
    from traces.summary import TraceSummary

__all__ = ["TRACE_HELP", "add_trace", "trace_folder"]

_ABOUT = """\
A trace is the record of one or more runs, simulated or real: a folder of Parquet tables
(runs, settings, iterations, progress, node_events, reconfigurations, probes). Names of columns
include their units, and every file has the origin in its metadata."""

_IMPORT = """\
Import a public recording, completely or not at all. Errors name file, row and column. SOURCE
is a name from `harness list sources`. PATH is a file or folder in the source's own format, that
you have downloaded; `harness trace fetch` downloads the files of most sources itself."""

_FETCH = """\
Download the files of a public recording from its repository, at the commit whose format we know,
check their SHA-256, and import them. A download that breaks off goes on with the next attempt.
Proxies are those of the environment (https_proxy, no_proxy). Read the licence first: `harness
list sources` shows it."""

_REPLAYED = """\
Compare the conditions that runs get from a replayed recording with the recording itself:
distribution, distance of Kolmogorov and Smirnov, autocorrelation; and with draws from
distributions that are fitted to the same recording. With --tuners, they are compared in both
worlds, and the page says where the winner differs. Writes replayed.html to DIR."""

_CONVERT = """\
FROM is a trace, the exchange log of a run (exchanges.jsonl.gz in a results folder), or a recording
of your own: a folder with tables in CSV or JSON lines, such as iterations.csv, settings.csv and
runs.csv. A log and tables are converted to a trace. A trace is converted to a trace with few
large parts or, with --csv, to a folder of CSV files, which are tables as you may write them."""

_STRANGE = (
    "calibration does not know the policy {}, and leaves its settings out: write bsp where all workers wait for each other, "
    "asp where none waits, ssp with its bound in the column staleness. Tables of recorded runs may have any name."
)
_UNBOUNDED = (
    "calibration leaves out settings that do not tell the bound of their policy, as those of {} here: write it in the "
    "column staleness."
)

TRACE_HELP = "folder of a trace, or shipped:NAME"
_Adder = Callable[..., argparse.ArgumentParser]


def trace_folder(text: str) -> Path:
    """An argument that names a trace: a folder, or ``shipped:NAME`` for a recording that comes with the harness."""
    if not text.startswith("shipped:"):
        return Path(text)
    from traces.shipped import locate

    try:
        return locate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_trace(add_parser: _Adder) -> None:
    """Add the command and its subcommands to a parser."""
    trace = add_parser("trace", help="record, import, show, check or convert traces", description=_ABOUT)
    commands = trace.add_subparsers(title="commands", metavar="COMMAND", required=True)

    record = commands.add_parser(
        "record", help="play one run and record it", description="Play one run and write its trace meanwhile."
    )
    record.add_argument("scenario", metavar="SCENARIO", help="name or TOML file")
    record.add_argument("--tuner", default="fixed", metavar="NAME", help="tuner (default: fixed)")
    record.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of all random draws (default: 0)")
    record.add_argument("--out", type=out_folder, required=True, metavar="TRACE", help="folder to write")
    record.set_defaults(run=_record)

    brought = commands.add_parser("import", help="import a public recording", description=_IMPORT)
    brought.add_argument("source", metavar="SOURCE", help="see `harness list sources`")
    brought.add_argument("path", type=Path, metavar="PATH", help="file or folder in the source's format")
    brought.add_argument("--out", type=out_folder, required=True, metavar="TRACE", help="folder to write")
    brought.set_defaults(run=_import)

    fetched = commands.add_parser("fetch", help="download and import a public recording", description=_FETCH)
    fetched.add_argument("source", metavar="SOURCE", help="see `harness list sources`")
    fetched.add_argument("--out", type=out_folder, required=True, metavar="TRACE", help="folder to write")
    fetched.add_argument("--address", default="", metavar="URL", help="a mirror of raw.githubusercontent.com")
    fetched.add_argument(
        "--accept", action="append", default=[], metavar="FILE=SHA256", help="digest of a file for which we know none"
    )
    fetched.set_defaults(run=_fetch)

    for name, run, about in (
        ("show", _show, "Print the origin and a summary of a trace."),
        ("check", _check, "Check every part of a trace against its digest, and every row for plausible values."),
    ):
        looked = commands.add_parser(name, help=about[0].lower() + about[1:-1], description=about)
        looked.add_argument("trace", type=trace_folder, metavar="TRACE", help=TRACE_HELP)
        looked.set_defaults(run=run)

    replayed = commands.add_parser(
        "replayed", help="compare replayed conditions with their recording", description=_REPLAYED
    )
    replayed.add_argument("scenarios", nargs="+", metavar="SCENARIO", help="name or TOML file, with [conditions.replay]")
    replayed.add_argument("--tuners", default="", metavar="all|NAME,...", help="tuners to compare in both worlds")
    replayed.add_argument("--seeds", type=int, metavar="N", help="seeds per scenario (default: from the scenario)")
    replayed.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    replayed.add_argument("--resume", action="store_true", help="continue an interrupted comparison")
    replayed.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="folder to write")
    replayed.set_defaults(run=_replayed)

    convert = commands.add_parser(
        "convert", help="make a trace of a log or of your own tables, or CSV of a trace", description=_CONVERT
    )
    convert.add_argument("source", type=trace_folder, metavar="FROM", help="trace, exchange log, or folder of CSV files")
    convert.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="folder to write")
    convert.add_argument("--csv", action="store_true", help="write CSV files")
    convert.set_defaults(run=_convert)


def _record(options: argparse.Namespace) -> int:
    from harness.record import play_recorded
    from harness.scenario import load, system
    from tuners import resolve_contestant

    scenario, entry = load(options.scenario), resolve_contestant(options.tuner)
    made = system(scenario, options.seed)
    named = {"scenario": scenario.name, "tuner": entry.name, "seed": options.seed}
    try:
        outcome = play_recorded(entry.factory, made, options.out, **named).outcome
    except KeyboardInterrupt:
        print(f"Interrupted; {options.out} has the run up to the last batch.")
        return 130
    print(f"{outcome.status} after {outcome.seconds:g} s, recorded in {options.out}. {outcome.reason}".rstrip())
    return 1 if outcome.status == "error" else 0


def _import(options: argparse.Namespace) -> int:
    from harness.record import MADE_BY
    from traces.importers import import_trace

    _say_imported(options.source, import_trace(options.source, options.path, options.out, made_by=MADE_BY))
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from harness.record import MADE_BY
    from traces.fetch import ADDRESS, fetch

    accepted = dict(pair.partition("=")[::2] for pair in options.accept)
    address = options.address or ADDRESS
    made = fetch(options.source, options.out, made_by=MADE_BY, address=address, accepted=accepted, told=print)
    _say_imported(options.source, made)
    return 0


def _say_imported(name: str, made: Imported) -> None:
    from traces.importers import SOURCES

    _say_rows(made.rows)
    if made.left_out:
        print(made.left_out)
    print(f"Licence: {SOURCES[name].licence}.\nTo cite: {SOURCES[name].cite}.")


def _show(options: argparse.Namespace) -> int:
    from traces.summary import summarise

    print(_described(summarise(options.trace)))
    return 0


def _check(options: argparse.Namespace) -> int:
    from traces.parts import check_trace, manifest

    _say_rows(check_trace(options.trace))
    if manifest(options.trace) is None:
        print("The trace is valid, but the recording was not finished: it ends with the last batch.")
    else:
        print("The trace is valid.")
    return 0


def _replayed(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal, watching
    from harness.comparison.compare import compare
    from harness.scenario import load
    from reports.fidelity import replayed
    from traces.store import check_new, load_results

    page = options.out / "replayed.html"
    if not options.resume:
        check_new(page)
    scenarios = [load(name) for name in options.scenarios]
    twins = [replayed.fitted_twin(scenario) for scenario in scenarios]
    results = None
    if options.tuners:
        both, limits = [*scenarios, *twins], {"seeds": options.seeds, "jobs": options.jobs, "resume": options.resume}
        try:
            with watching(terminal()) as watch:
                compare(both, tuner_names(options.tuners), out=options.out, **limits, watch=watch)
        except KeyboardInterrupt:
            return interrupted(options.out)
        results = load_results(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"The page: {replayed.write(page, scenarios, results)}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from harness.record import MADE_BY
    from traces import convert
    from traces.foreign import own_tables

    if not options.csv and not (options.source / "trace.json").exists() and own_tables.has_tables(options.source):
        own_tables.from_tables(options.source, options.out, made_by=MADE_BY)
    elif options.source.is_dir():
        (convert.to_csv if options.csv else convert.to_few_parts)(options.source, options.out)
    elif options.csv:
        raise ValueError(f"Cannot convert {options.source} to CSV: convert it to a trace first, then the trace to CSV.")
    elif not options.source.is_file():
        raise ValueError(f"Cannot convert {options.source}: there is no such file or folder.")
    else:
        convert.from_log(options.source, options.out, made_by=MADE_BY)
    if not options.csv:
        from traces.summary import summarise

        print(_described(summarise(options.out)))
    print(f"Written to {options.out}.")
    return 0


def _described(summary: TraceSummary) -> str:
    origin = summary.origin
    lines = [f"source    {origin.source}, {origin.of}", f"made by   {origin.made_by}"]
    lines += [f"{what:9} {said}" for what, said in (("licence", origin.licence), ("cite", origin.cite)) if said]
    lines += [f"input     {name}  {digest}" for name, digest in origin.inputs]
    if not summary.whole:
        lines.append("unfinished: the recording ends with the last batch")
    lines += [
        f"{table:17}{_counted(rows, 'row', 12)} of {_counted(summary.runs[table], 'run')}"
        for table, rows in summary.rows.items()
    ]
    for run in summary.iterations.head(20).to_dicts():
        means = [
            f"{k.removeprefix('mean_').removesuffix('_seconds')} {v:.4g} s"
            for k, v in run.items()
            if "_seconds" in k and v is not None
        ]
        rate = "" if run["per_second"] is None else f", {run['per_second']:.4g} per second"
        idle = "" if run["idle_share"] is None else f"; held back {run['idle_share']:.1%} of the workers' time"
        count = f"{_counted(run['iterations'], 'iteration')} of {_counted(run['workers'], 'worker')}"
        mean = f"; mean {', '.join(means)}" if means else ""
        lines.append(f"{run['run']}: {count}{rate}{mean}{idle}")
    if summary.iterations.height > 20:
        lines.append(f"... and {summary.iterations.height - 20:,} runs more")
    if summary.impossible.height:
        count = _counted(summary.impossible.height, "iteration")
        run, worker, clock, computed, since = summary.impossible.row(0)
        lines.append(
            f"note: {count} cannot have computed as long as the trace says. The first: run {run!r}, worker {worker}, clock "
            f"{clock}: {computed:.4g} s, within {since:.4g} s since the worker's push before. Leave out wrong times."
        )
    for policies, why in ((summary.strange, _STRANGE), (summary.unbounded, _UNBOUNDED)):
        if policies:
            told = ", ".join(f"{name!r} ({_counted(count, 'setting')})" for name, count in policies.items())
            lines.append(f"note: {why.format(told)}")
    return "\n".join(lines)


def _say_rows(rows: dict[str, int]) -> None:
    print("\n".join(f"{table:17}{_counted(count, 'row', 12)}" for table, count in rows.items()))


def _counted(count: int, what: str, width: int = 0) -> str:
    return f"{count:>{width},} {what}{'' if count == 1 else 's'}"
