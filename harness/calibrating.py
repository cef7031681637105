"""Calibration with all that the harness knows: recordings and their origin, sizes of models, and what the user says.

The fits themselves, and the errors of their predictions, are `simulators.calibration`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from harness.record import MADE_BY
from harness.scenario import embedded, job, load
from simulators.calibration.fit import fit_all
from simulators.calibration.links import FORMS, UNEVEN_BYTES, Sharing
from simulators.calibration.model import Constants
from simulators.calibration.output import Provenance, digest
from simulators.calibration.recorded.recordings import Recording, joined, read_tables, with_snapshots
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.selection import EVERYTHING, Selection
from simulators.calibration.validation import Ablation, Check, ablated, as_chosen, check, check_other, lacking
from simulators.cluster.cluster import Discipline
from simulators.workloads.catalogue import workload, workloads
from traces import importers
from traces.parts import origin, scan
from traces.schema import TRACE

__all__ = ["GivenConstants", "ReadRecording", "check_others", "check_recording", "read_source", "read_trace"]

_RUNS = 5  # that a message names, at most

ReadRecording: TypeAlias = tuple[Recording, Provenance]
"""A recording and its origin."""


@dataclass(frozen=True, slots=True)
class GivenConstants:
    """What the user says of recorded machines; where nothing is said, the recording tells it, or the default holds."""

    model_bytes: float = 0.0  # of one full pull; 0: those of the workload or scenario of the recorded name
    nic: float | None = None  # bytes per second
    discipline: Discipline | None = None  # as in `Cluster`, like the next two
    control_queue: float | None = None
    independent_flows: bool | None = None
    snapshot_clocks: int | None = None  # pushes from one snapshot of the servers to the next
    cores: int = 0  # 0: the most threads in the recording
    jitter: float = 0.1  # where mini-batches were not timed one by one

    def constants(self, recording: Recording) -> dict[str, Constants]:
        """What a fit to the recording begins with, by workload."""
        made, noise = {}, recording.noise
        for name in dict.fromkeys(row.workload for row in recording.rows):
            threads = max((r.intra_threads + r.inter_threads for r in recording.rows if r.workload == name), default=0)
            base = Constants(
                cores=self.cores or max(threads, 1),
                model_bytes=self.model_bytes or _model_bytes(name),
                nic_bytes_per_second=self.nic or recording.nic_bytes_per_second or Constants().nic_bytes_per_second,
                jitter=self.jitter,
                discipline=self.discipline or Constants().discipline,
                control_queue=self.control_queue or 0.0,
                independent_flows=bool(self.independent_flows),
                uneven_bytes=UNEVEN_BYTES if self.discipline == "uneven" else 0.0,
            )
            made[name] = base if noise is None else replace(base, jitter=noise.jitter, sleeps=noise.sleeps)
        return made

    @property
    def links_left_open(self) -> tuple[Sharing, ...]:
        """The forms of sharing links that are left to be chosen."""
        left = [
            Sharing(
                self.discipline or form.discipline,
                form.control_queue if self.control_queue is None else self.control_queue,
                form.independent_flows if self.independent_flows is None else self.independent_flows,
            )
            for form in FORMS
        ]
        # Requests of serial servers are in their one queue as it is.
        return tuple(form for form in dict.fromkeys(left) if not (form.control_queue and form.discipline == "serial"))

    def with_snapshots(self, read: ReadRecording) -> ReadRecording:
        """The recording with snapshots of the servers as said."""
        recording, of = read
        return (recording if self.snapshot_clocks is None else with_snapshots(recording, self.snapshot_clocks)), of


# ------------------------------------------------------------------------------------------------------------ recordings


def read_trace(trace: Path, wanted: Selection = EVERYTHING) -> ReadRecording:
    """Read a trace, or what is `wanted` of it. Raises ValueError where nothing of it is, or can be used."""
    said = origin(trace)
    tables = {name: scan(trace, name).collect() for name in TRACE}
    hashed = digest(list(trace.rglob("*.parquet")), trace)
    recording = read_tables(tables, said.source, wanted)
    selected = wanted.among(wanted.of_runs(tables)["settings"]).height
    if wanted != EVERYTHING and not recording.rows and not (selected and recording.caveats):
        every = read_tables(tables, said.source).rows
        raise ValueError(f"Cannot select {trace.name}{wanted}: none of its {len(every)} settings is so. {_has(every)}")
    if recording.caveats and not recording.rows:
        raise ValueError(f"Cannot calibrate to {trace.name}{wanted}: no row is left: {'; '.join(recording.caveats)}.")
    command = f"harness calibrate 'TRACE{wanted}'" if wanted != EVERYTHING else "harness calibrate TRACE"
    return recording, Provenance(said.source, said.of, said.licence, hashed, command, MADE_BY)


def read_source(name: str, path: Path) -> ReadRecording:
    """Import the public recording of that name in memory. Raises ValueError for an unknown name, and as the importers do."""
    known = importers.SOURCES.get(name)
    if known is None:
        raise ValueError(f"No importer is called {name!r}: there are {', '.join(importers.SOURCES)}.")
    made = importers.read(known, path)
    hashed, command = digest(made.inputs, path), f"harness calibrate --from {name} PATH"
    return read_tables(made.tables, name), Provenance(name, known.of, known.licence, hashed, command, MADE_BY)


def _has(rows: Sequence[Row]) -> str:
    """What can be selected of recorded rows, in the words of a selection."""
    words = {name: sorted({getattr(r, name) for r in rows}) for name in ("workload", "policy")}
    numbers = {name: {getattr(r, name) for r in rows} for name in ("workers", "servers", "batch_size")}
    said = [f"{name} {' or '.join(values)}" for name, values in words.items()]
    said += [f"{name} {min(values)}..{max(values)}" for name, values in numbers.items() if values]
    runs = sorted({r.run for r in rows})
    said += [f"runs {', '.join(runs[:_RUNS])}{', ...' * (len(runs) > _RUNS)}"]
    return f"It has {', '.join(said)}." if rows else ""


def _model_bytes(name: str) -> float:
    """The nominal size of the model, if the harness has a workload or scenario of that name; else 0."""
    if name in workloads():
        return workload(name).demand.model_bytes
    return job(load(name)).model_bytes if name in embedded() else 0.0


# --------------------------------------------------------------------------------------------------- errors of predictions


def check_recording(
    read: ReadRecording, said: GivenConstants, folds: int, watch: Callable[[str], None], *, ablate: bool
) -> Check:
    """Cross-validate on one recording; with `ablate`, also without each part of the simulator's physics."""
    recording, of = read
    given = said.constants(recording)
    made = check(recording, given, of, folds, watch, said.links_left_open)
    less = lacking(as_chosen(given, made.fits), recording.rows) if ablate else {}
    without = tuple(Ablation(part, ablated(recording, lack, folds, watch)) for part, lack in less.items())
    return replace(made, ablations=without)


def check_others(
    fitted: Sequence[ReadRecording],
    others: Sequence[ReadRecording],
    said: GivenConstants,
    watch: Callable[[str], None],
    *,
    ablate: bool,
) -> list[Check]:
    """Fit to the `fitted` recordings together, and predict each of the `others`; `ablate` as in `check_recording`."""
    # A trace is named by its digest in a joined recording, so that a row that is also to be predicted can be found.
    known = joined([(of.digest[:12], recording) for recording, of in fitted])
    origins = "; ".join(dict.fromkeys(of.of for _, of in fitted))
    named = [(joined([(of.digest[:12], recording)]), of) for recording, of in others]
    given = said.constants(known)
    wanted = [row for other, _ in named for row in other.rows]
    fits = fit_all(known.rows, given, watch=watch, links=said.links_left_open, wanted=wanted)
    shared = as_chosen(given, fits)
    network = fit_all(known.rows, shared, engine=False)
    found = [check_other(fits, known, other, of, origins, network=network) for other, of in named]
    for part, lack in (lacking(shared, (*known.rows, *wanted)) if ablate else {}).items():
        watch(f"without {part}")
        less = fit_all(known.rows, lack.given, without=lack.without)
        told = [Ablation(part, check_other(less, known, other, of, whole=False).predictions) for other, of in named]
        found = [replace(made, ablations=(*made.ablations, one)) for made, one in zip(found, told, strict=True)]
    return found
