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
    dlrm_locality,
    infinitehbd_faults,
    selftf,
    skypilot_spot,
    sync_switch,
    trimtuner_tf_ps,
    uta_ec2_tokenbucket,
)
from traces.importers.source import Imported, RemoteFile, Source
from traces.parts import Origin, TraceWriter, digest_of
from traces.plausible import TraceError, check
from traces.schema import TRACE

__all__ = ["SOURCES", "Imported", "RemoteFile", "Source", "import_trace", "read", "source_named"]

SOURCES: dict[str, Source] = {
    "alibaba-pai-minibatch": alibaba_pai_minibatch.SOURCE,
    "azure-vm-noise": azure_vm_noise.SOURCE,
    "bamboo-spot": bamboo_spot.SOURCE,
    "bytedance-straggler": bytedance_straggler.SOURCE,
    "dl2-config-speed": dl2_config_speed.SOURCE,
    "dlrm-locality": dlrm_locality.SOURCE,
    "infinitehbd-faults": infinitehbd_faults.SOURCE,
    "selftf": selftf.SOURCE,
    "skypilot-spot": skypilot_spot.SOURCE,
    "sync-switch": sync_switch.SOURCE,
    "trimtuner-tf-ps": trimtuner_tf_ps.SOURCE,
    "uta-ec2-tokenbucket": uta_ec2_tokenbucket.SOURCE,
}

_PART_ROWS = 1 << 20


def source_named(name: str) -> Source:
    """The source of that name. Raises ValueError if there is none."""
    if name not in SOURCES:
        raise ValueError(
            f"No importer is called {name!r}: there are {', '.join(SOURCES)}. "
            "For a recording of your own: harness trace convert."
        )
    return SOURCES[name]


def import_trace(source: str, path: Path, out: Path, *, made_by: str) -> Imported:
    """Import the recording at `path` as a trace at `out`, completely or not at all; returns what was imported.

    `made_by` is the program and version that the trace names. Raises ValueError for an unknown source and if `out` exists,
    TraceError, naming file, row and column, for an error in the recording.
    """
    known = source_named(source)
    made = read(known, path)
    inputs = tuple(
        (p.relative_to(path).as_posix() if path.is_dir() else p.name, digest_of(p.read_bytes())) for p in made.inputs
    )
    of = f"{known.of}; {made.left_out}" if made.left_out else known.of
    origin = Origin(source, made_by, of, known.licence, known.cite, inputs)
    with atomic_folder(out) as folder, TraceWriter(folder, origin, part_rows=_PART_ROWS) as writer:
        for name, frame in made.tables.items():
            writer.add(name, frame)
    return made


def read(source: Source, path: Path) -> Imported:
    """The tables that `source` makes of `path`, checked against the rules of a trace's tables. Raises TraceError."""
    if not path.exists():
        raise TraceError(f"Cannot use {path}: there is no such file or folder.")
    made = source.read(path)
    for name, frame in made.tables.items():
        check(frame, TRACE[name], f"{path} (as table {name})")
    return made
