"""The commands `harness calibrate` and `harness fidelity`: fit constants to recordings; measure errors of predictions."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.parsing import number, out_file, out_folder, some_path, whole
from harness.cli.trace import TRACE_HELP, trace_folder

if TYPE_CHECKING:
    from simulators.calibration.fit import Constants, Row
    from simulators.calibration.links import Sharing
    from simulators.calibration.output import Provenance
    from simulators.calibration.recordings import Recording
    from simulators.calibration.selection import Selection
    from simulators.calibration.validation import Check

__all__ = ["add_calibrate", "add_fidelity", "initial_constants", "links_left_open", "read"]

_ABOUT = """\
Fit the simulator's constants of machines and workloads to a recording, from the times of single
iterations or of whole runs, and write them as TOML files that scenarios load. A constant that
the recording does not determine keeps its default, and the file names the measurement that
would determine it. The same recording gives the same bytes."""

_FIDELITY = """\
Compare the simulator's predictions with recordings, by cross-validation: constants are fitted
to four fifths of the combinations of policy, workers and servers, and the rest is predicted;
also the larger clusters from the smaller ones, and unlike hosts from equal ones. With --fit and
--predict, also or instead: fit to some recordings and predict others. Prints a table and writes
a page."""

_SELECTED = (
    TRACE_HELP + "; or some of it: 'TRACE[runs=a*, workload=NAME, policy=asp, workers=1..2, servers=1, batch_size=16]'"
)

_Adder = Callable[..., argparse.ArgumentParser]


def add_calibrate(add_parser: _Adder) -> None:
    """Add `harness calibrate` to a parser's commands."""
    command = add_parser("calibrate", help="fit constants to a recording", description=_ABOUT)
    command.add_argument("trace", type=_selected, nargs="?", metavar="TRACE", help=_SELECTED)
    command.add_argument(
        "--from",
        nargs=2,
        dest="source",
        metavar=("SOURCE", "PATH"),
        help="a public recording, in place of TRACE",
    )
    command.add_argument("--out", type=out_file, required=True, metavar="FILE", help="TOML file to write")
    _add_given(command)
    command.set_defaults(run=_calibrate)


def add_fidelity(add_parser: _Adder) -> None:
    """Add `harness fidelity` to a parser's commands."""
    command = add_parser("fidelity", help="compare predictions with recordings", description=_FIDELITY)
    command.add_argument("traces", type=_selected, nargs="*", metavar="TRACE", help=_SELECTED)
    command.add_argument("--fit", type=_selected, nargs="+", default=[], metavar="TRACE", help="fit to these, together")
    command.add_argument(
        "--predict", type=_selected, nargs="+", default=[], metavar="TRACE", help="predict each of these, with --fit"
    )
    command.add_argument(
        "--from",
        nargs=2,
        dest="sources",
        action="append",
        default=[],
        metavar=("SOURCE", "PATH"),
        help="a public recording; can be given more than once",
    )
    command.add_argument(
        "--out", type=out_folder, required=True, metavar="DIR", help="folder to write: fidelity.html and its table"
    )
    command.add_argument("--folds", type=whole(2), default=5, metavar="N", help="number of folds (default: 5; 2: halves)")
    command.add_argument("--findings", type=some_path, metavar="FILE", help="text for the page: why predictions differ")
    command.add_argument(
        "--ablate", action="store_true", help="fit and predict again without each part of the simulator's physics"
    )
    _add_given(command)
    command.set_defaults(run=_fidelity)


def _add_given(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model-bytes",
        type=number(above=0),
        default=0.0,
        metavar="N",
        help="bytes of one full pull (default: the workload's)",
    )
    command.add_argument(
        "--nic", type=number(above=0), metavar="N", help="NIC, bytes per second (default: what the trace says, or 10 Gbit/s)"
    )
    command.add_argument(
        "--discipline", choices=("maxmin", "uneven"), help="how transfers share NICs (default: chosen from the recording)"
    )
    command.add_argument(
        "--control-queue",
        type=number(0, most=1),
        metavar="V",
        help="share of the pushes queued at the servers that a pull's request waits for, 0 to 1 (default: 0 or 1, chosen "
        "from the recording)",
    )
    command.add_argument(
        "--independent-flows",
        action=argparse.BooleanOptionalAction,
        help="each flow of a worker and a server ends by itself, where servers are unlike (default: yes where parts of "
        "cycles were timed, unless the recording clearly says otherwise)",
    )
    command.add_argument(
        "--snapshot-clocks",
        type=whole(0),
        metavar="N",
        help="pushes from one snapshot of the servers to the next, which they send over their links, at least 4 per worker "
        "(default: 0, none is taken)",
    )
    command.add_argument(
        "--cores", type=whole(1), default=0, metavar="N", help="cores per machine (default: most threads in the recording)"
    )
    command.add_argument(
        "--jitter",
        type=number(0),
        default=0.1,
        metavar="V",
        help="coefficient of variation of compute times, if these were not recorded one by one (default: 0.1)",
    )


def _calibrate(options: argparse.Namespace) -> int:
    from harness import program_cache
    from harness.cli.display import stages
    from simulators.calibration.fit import NO_FREEDOM, fit_all
    from simulators.calibration.output import to_toml
    from traces.store import check_new, write_bytes

    if (options.trace is None) == (options.source is None):
        raise ValueError("Cannot calibrate: name a trace's folder, or a recording with --from SOURCE PATH.")
    check_new(options.out)
    path, wanted = options.trace or (None, None)
    recording, origin = _recorded(path, options.source, wanted, options)
    program_cache.use()
    with stages("calibrating") as watch:
        fits = fit_all(recording.rows, initial_constants(recording, options), watch=watch, links=links_left_open(options))
    text = to_toml(fits, recording, origin)
    write_bytes(options.out, text.encode())
    for name, fit in fits.items():
        print(f"{name}: {fit.rows} settings, median error {fit.error:.1%}")
        for constant, ends in fit.intervals.items():
            interval = f"95 % {ends[0]:.4g} to {ends[1]:.4g}" if ends else f"no interval: {NO_FREEDOM}"
            print(f"  {constant:26}{getattr(fit.constants, constant):>12.4g}   {interval}")
        if samples := fit.constants.saturation_samples:
            print(f"  {'saturation_samples':26}{samples:>12.4g}   by how slow machines differ from fast ones")
        for constant, value in fit.borrowed.items():
            print(f"  {constant:26}{value:>12.4g}   from the other workloads")
        if fit.refused:
            print("  Not determined, so that the default holds:")
        for constant, why in fit.refused.items():
            print(f"  {constant:26}{why}")
    for why in (*dict.fromkeys(str(fit.choice) for fit in fits.values() if fit.choice), *recording.caveats):
        print(f"note: {why}")
    types, names = (" or ".join(made) for made in (tomllib.loads(text)["profiles"], fits))
    print(f'In a scenario, [cluster] has profiles = "{options.out}" and nodes of type {types};')
    print(f'[workload] has file = "{options.out}" and name = "{names}". The file says what else to copy.')
    print(f"Written to {options.out}.")
    return 0


def _fidelity(options: argparse.Namespace) -> int:
    from harness import program_cache
    from harness.cli.display import stages
    from reports.fidelity import fidelity_page, fidelity_table
    from simulators.calibration.selection import EVERYTHING
    from simulators.calibration.validation import Ablation, ablated, as_chosen, check, lacking
    from traces.store import check_new

    whole = bool(options.traces or options.sources)
    if bool(options.fit) != bool(options.predict):
        raise ValueError("Cannot check: --fit and --predict need each other.")
    if not whole and not options.fit:
        raise ValueError("Cannot check: name traces, or recordings with --from SOURCE PATH.")
    for written in fidelity_page.files(options.out):
        check_new(written)
    findings = _text(options.findings) if options.findings else ""
    program_cache.use()
    named = [(*selected, None) for selected in options.traces] + [(None, EVERYTHING, s) for s in options.sources]
    checks: list[Check] = []
    for path, wanted, source in named:
        recording, origin = _recorded(path, source, wanted, options)
        with stages(f"recording {len(checks) + 1} of {len(named)}") as watch:
            given = initial_constants(recording, options)
            made = check(recording, given, origin, options.folds, watch, links_left_open(options))
            less = lacking(as_chosen(given, made.fits), recording.rows) if options.ablate else {}
            without = tuple(Ablation(p, ablated(recording, lack, options.folds, watch)) for p, lack in less.items())
            checks.append(replace(made, ablations=without))
    checks += _of_others(options) if options.fit else []
    print(fidelity_table.text(checks))
    print(f"The page: {fidelity_page.write(options.out, checks, findings)}")
    return 0


def _recorded(
    trace: Path | None, source: list[str] | None, wanted: Selection | None, options: argparse.Namespace
) -> tuple[Recording, Provenance]:
    """A recording and its origin, with snapshots of the servers as the options say."""
    from simulators.calibration.recordings import with_snapshots

    recording, origin = read(trace, source, wanted)
    clocks = options.snapshot_clocks
    return (recording if clocks is None else with_snapshots(recording, clocks)), origin


def _text(file: Path) -> str:
    """The text of a file. Raises ValueError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"Cannot read --findings {file}: {reason}.") from None


def _of_others(options: argparse.Namespace) -> list[Check]:
    """Fit to the recordings of --fit together, and predict each recording of --predict."""
    from harness.cli.display import stages
    from simulators.calibration.fit import fit_all
    from simulators.calibration.recordings import joined
    from simulators.calibration.validation import Ablation, as_chosen, check_other, lacking

    fitted = [_recorded(path, None, wanted, options) for path, wanted in options.fit]
    others = [_recorded(path, None, wanted, options) for path, wanted in options.predict]
    # A trace is named by its digest in a joined recording, so that a row that is also to be predicted can be found.
    known = joined([(origin.digest[:12], recording) for recording, origin in fitted])
    origins = list(dict.fromkeys(origin.of for _, origin in fitted))
    named = [(joined([(origin.digest[:12], recording)]), origin) for recording, origin in others]
    given = initial_constants(known, options)
    with stages("fitting") as watch:
        fits = fit_all(known.rows, given, watch=watch, links=links_left_open(options))
        network = fit_all(known.rows, as_chosen(given, fits), engine=False)
        found = [check_other(fits, known, other, origin, "; ".join(origins), network=network) for other, origin in named]
        rows = [row for recording in (known, *(other for other, _ in named)) for row in recording.rows]
        for part, lack in (lacking(as_chosen(given, fits), rows) if options.ablate else {}).items():
            watch(f"without {part}")
            less = fit_all(known.rows, lack.given, without=lack.without)
            told = [
                Ablation(part, check_other(less, known, other, origin, whole=False).predictions) for other, origin in named
            ]
            found = [replace(made, ablations=(*made.ablations, one)) for made, one in zip(found, told, strict=True)]
    return found


def _selected(text: str) -> tuple[Path, Selection]:
    """An argument that names a trace, or some of its runs and settings."""
    from simulators.calibration.selection import parse

    try:
        name, wanted = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return trace_folder(name), wanted


def read(trace: Path | None, source: list[str] | None, wanted: Selection | None = None) -> tuple[Recording, Provenance]:
    """Read a trace, or import a public recording in memory, for calibration; and its origin. Only what is `wanted` of it.

    Raises ValueError where nothing of it is wanted.
    """
    from harness.record import MADE_BY
    from simulators.calibration.output import Provenance, digest
    from simulators.calibration.recordings import read_tables
    from simulators.calibration.selection import EVERYTHING
    from traces import importers
    from traces.parts import origin, scan
    from traces.schema import TRACE

    if trace is not None:
        said = origin(trace)
        tables = {name: scan(trace, name).collect() for name in TRACE}
        hashed = digest(list(trace.rglob("*.parquet")), trace)
        selected = wanted or EVERYTHING
        recording = read_tables(tables, said.source, selected)
        if selected != EVERYTHING and not recording.rows:
            every = read_tables(tables, said.source).rows
            raise ValueError(f"Cannot select {trace.name}{selected}: none of its {len(every)} settings is so. {_has(every)}")
        if recording.caveats and not recording.rows:
            raise ValueError(f"Cannot calibrate to {trace.name}: no row is left. {'. '.join(recording.caveats)}.")
        command = f"harness calibrate 'TRACE{selected}'" if selected != EVERYTHING else "harness calibrate TRACE"
        return recording, Provenance(said.source, said.of, said.licence, hashed, command, MADE_BY)
    name, path = (source or ["", ""])[0], Path((source or ["", ""])[1])
    known = importers.SOURCES.get(name)
    if known is None:
        raise ValueError(f"No importer is called {name!r}: there are {', '.join(importers.SOURCES)}.")
    made = importers.read(known, path)
    hashed = digest(made.inputs, path)
    command = f"harness calibrate --from {name} PATH"
    return read_tables(made.tables, name, wanted or EVERYTHING), Provenance(
        name, known.of, known.licence, hashed, command, MADE_BY
    )


def _has(rows: Sequence[Row]) -> str:
    """What can be selected of recorded rows, in the words of a selection."""
    words = {name: sorted({getattr(r, name) for r in rows}) for name in ("workload", "policy")}
    numbers = {name: {getattr(r, name) for r in rows} for name in ("workers", "servers", "batch_size")}
    said = [f"{name} {' or '.join(values)}" for name, values in words.items()]
    said += [f"{name} {min(values)}..{max(values)}" for name, values in numbers.items() if values]
    return f"It has {', '.join(said)}." if rows else ""


def initial_constants(recording: Recording, options: argparse.Namespace) -> dict[str, Constants]:
    """Initial constants by workload, from the command line and from a workload or scenario of the same name."""
    from simulators.calibration.links import UNEVEN_BYTES
    from simulators.calibration.model import Constants

    made = {}
    for name in dict.fromkeys(row.workload for row in recording.rows):
        threads = max((r.intra_threads + r.inter_threads for r in recording.rows if r.workload == name), default=0)
        base = Constants(
            cores=options.cores or max(threads, 1),
            model_bytes=options.model_bytes or _model_bytes(name),
            nic_bytes_per_second=options.nic or recording.nic_bytes_per_second or Constants().nic_bytes_per_second,
            jitter=options.jitter,
            discipline=options.discipline or Constants().discipline,
            control_queue=options.control_queue or 0.0,
            independent_flows=bool(options.independent_flows),
            uneven_bytes=UNEVEN_BYTES if options.discipline == "uneven" else 0.0,
        )
        noise = recording.noise
        made[name] = base if noise is None else replace(base, jitter=noise.jitter, sleeps=noise.sleeps)
    return made


def links_left_open(options: argparse.Namespace) -> tuple[Sharing, ...]:
    """The forms of sharing links that the options leave open."""
    from simulators.calibration.links import FORMS, Sharing

    left = [
        Sharing(
            options.discipline or form.discipline,
            form.control_queue if options.control_queue is None else options.control_queue,
            form.independent_flows if options.independent_flows is None else options.independent_flows,
        )
        for form in FORMS
    ]
    return tuple(dict.fromkeys(left))


def _model_bytes(name: str) -> float:
    """The nominal size of the model, if the harness has a workload or scenario of that name; else 0."""
    import harness.scenario as scenario
    from simulators.workloads.catalogue import workload, workloads

    if name in workloads():
        return workload(name).demand.model_bytes
    return scenario.job(scenario.load(name)).model_bytes if name in scenario.embedded() else 0.0
