"""Importers: public recordings become traces. Each module describes one public format and reads it.

An importer reads and checks everything before anything is written, so an import is complete or has no effect.
"""

from __future__ import annotations

from pathlib import Path

from traces.convert import atomic_folder
from traces.importers import (
    alibaba_pai_minibatch,
    azure_vm_noise,
    bamboo_spot,
    bytedance_straggler,
    dl2_config_speed,
    selftf,
    skypilot_spot,
    sync_switch,
    trimtuner_tf_ps,
    uta_ec2_tokenbucket,
)
from traces.importers.source import Imported, Source
from traces.parts import Origin, TraceWriter, digest_of
from traces.plausible import TraceError, check
from traces.schema import TRACE

__all__ = ["SOURCES", "Imported", "Source", "import_trace", "read"]

SOURCES: dict[str, Source] = {
    "alibaba-pai-minibatch": alibaba_pai_minibatch.SOURCE,
    "azure-vm-noise": azure_vm_noise.SOURCE,
    "bamboo-spot": bamboo_spot.SOURCE,
    "bytedance-straggler": bytedance_straggler.SOURCE,
    "dl2-config-speed": dl2_config_speed.SOURCE,
    "selftf": selftf.SOURCE,
    "skypilot-spot": skypilot_spot.SOURCE,
    "sync-switch": sync_switch.SOURCE,
    "trimtuner-tf-ps": trimtuner_tf_ps.SOURCE,
    "uta-ec2-tokenbucket": uta_ec2_tokenbucket.SOURCE,
}

_PART_ROWS = 1 << 20


def import_trace(source: str, path: Path, out: Path, *, made_by: str) -> dict[str, int]:
    """Import the recording at `path` as a trace at `out`, completely or not at all; returns the rows of each table.

    `made_by` is the program and version that the trace names. Raises ValueError for an unknown source and if `out` exists,
    TraceError, naming file, row and column, for an error in the recording.
    """
    known = SOURCES.get(source)
    if known is None:
        raise ValueError(f"No importer is called {source!r}: there are {', '.join(SOURCES)}.")
    made = read(known, path)
    inputs = tuple(
        (p.relative_to(path).as_posix() if path.is_dir() else p.name, digest_of(p.read_bytes())) for p in made.inputs
    )
    origin = Origin(source, made_by, known.of, known.licence, known.cite, inputs)
    with atomic_folder(out) as folder, TraceWriter(folder, origin, part_rows=_PART_ROWS) as writer:
        for name, frame in made.tables.items():
            writer.add(name, frame)
    return {name: frame.height for name, frame in made.tables.items()}


def read(source: Source, path: Path) -> Imported:
    """The tables that `source` makes of `path`, checked against the rules of a trace's tables. Raises TraceError."""
    if not path.exists():
        raise TraceError(f"Cannot use {path}: there is no such file or folder.")
    made = source.read(path)
    for name, frame in made.tables.items():
        check(frame, TRACE[name], f"{path} (as table {name})")
    return made
