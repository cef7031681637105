"""The commands `harness calibrate` and `harness fidelity`: fit constants to recordings; measure errors of predictions."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.terminal.parsing import number, out_file, out_folder, some_path, whole
from harness.cli.trace import TRACE_HELP, trace_folder

if TYPE_CHECKING:
    from harness.calibrating import GivenConstants, ReadRecording
    from simulators.calibration.fit import Fit
    from simulators.calibration.recorded.selection import Selection
    from simulators.calibration.validation import Check

__all__ = ["add_calibrate", "add_fidelity"]

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

_WIDE = 100.0  # an interval whose ends differ by this factor does not tell the constant

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
        "--discipline",
        choices=("maxmin", "uneven", "fifo", "serial"),
        help="how transfers share NICs (default: chosen from the recording)",
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
    from harness import calibrating
    from harness.cli.terminal.display import stages
    from harness.machines import program_cache
    from simulators.calibration.fit import NO_FREEDOM, fit_all
    from simulators.calibration.output import misfits, to_toml
    from traces.store import check_new, write_bytes

    if (options.trace is None) == (options.source is None):
        raise ValueError("Cannot calibrate: name a trace's folder, or a recording with --from SOURCE PATH.")
    check_new(options.out)
    said = _given(options)
    read = calibrating.read_trace(*options.trace) if options.trace else _from_source(options.source)
    recording, origin = said.with_snapshots(read)
    program_cache.use()
    with stages("calibrating") as watch:
        fits = fit_all(recording.rows, said.constants(recording), watch=watch, links=said.links_left_open)
    text = to_toml(fits, recording, origin)
    options.out.parent.mkdir(parents=True, exist_ok=True)
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
    chosen = dict.fromkeys(str(fit.choice) for fit in fits.values() if fit.choice)
    sizes = [said_of_size for fit in fits.values() if (said_of_size := _size_note(fit))]
    for why in (*chosen, *recording.caveats, *misfits(fits), *dict.fromkeys(sizes)):
        print(f"note: {why}")
    types, names = (" or ".join(made) for made in (tomllib.loads(text)["profiles"], fits))
    print(f'In a scenario, [cluster] has profiles = "{options.out}" and nodes of type {types};')
    print(f'[workload] has file = "{options.out}" and name = "{names}". The file says what else to copy.')
    print(f"Written to {options.out}.")
    return 0


def _size_note(fit: Fit) -> str:
    """What to say where the model's size and the rate of a server were both fitted, and only their ratio is known; or ""."""
    wide = (fit.intervals.get(name) for name in ("model_bytes", "service_bytes_per_second"))
    if not all(ends and ends[1] > _WIDE * ends[0] for ends in wide):
        return ""
    seconds = fit.constants.model_bytes / fit.constants.service_bytes_per_second
    return (
        f"times tell how long a server takes to send the model, {seconds:.3g} s, and neither the model's size nor the rate: "
        "give --model-bytes, the bytes of one full pull"
    )


def _fidelity(options: argparse.Namespace) -> int:
    from harness import calibrating
    from harness.cli.terminal.display import stages
    from harness.machines import program_cache
    from reports.fidelity import fidelity_page, fidelity_table
    from traces.store import check_new

    if bool(options.fit) != bool(options.predict):
        raise ValueError("Cannot check: --fit and --predict need each other.")
    if not (options.traces or options.sources or options.fit):
        raise ValueError("Cannot check: name traces, or recordings with --from SOURCE PATH.")
    for written in fidelity_page.files(options.out):
        check_new(written)
    findings = _text(options.findings) if options.findings else ""
    said = _given(options)

    def traces(named: Iterable[tuple[Path, Selection]]) -> list[ReadRecording]:
        return [said.with_snapshots(calibrating.read_trace(*selected)) for selected in named]

    recordings = traces(options.traces) + [said.with_snapshots(_from_source(source)) for source in options.sources]
    fitted, others = traces(options.fit), traces(options.predict)
    program_cache.use()
    checks: list[Check] = []
    for count, recording in enumerate(recordings, 1):
        with stages(f"recording {count} of {len(recordings)}") as watch:
            checks.append(calibrating.check_recording(recording, said, options.folds, watch, ablate=options.ablate))
    if fitted:
        with stages("fitting") as watch:
            checks += calibrating.check_others(fitted, others, said, watch, ablate=options.ablate)
    print(fidelity_table.text(checks))
    print(f"The page: {fidelity_page.write(options.out, checks, findings)}")
    return 0


def _given(options: argparse.Namespace) -> GivenConstants:
    from harness.calibrating import GivenConstants

    return GivenConstants(**{f.name: getattr(options, f.name) for f in fields(GivenConstants)})


def _from_source(source: Sequence[str]) -> ReadRecording:
    from harness.calibrating import read_source

    name, path = source
    return read_source(name, Path(path))


def _text(file: Path) -> str:
    """The text of a file. Raises ValueError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"Cannot read --findings {file}: {reason}.") from None


def _selected(text: str) -> tuple[Path, Selection]:
    """An argument that names a trace, or some of its runs and settings."""
    from simulators.calibration.recorded.selection import parse

    try:
        name, wanted = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return trace_folder(name), wanted
