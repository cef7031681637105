"""Importers on files that were changed at random: each gives a whole trace or a TraceError, and nothing else.

HARNESS_FUZZ sets how many changed inputs each importer gets (here: a few, and fewer of Parquet, which is read in a process
of its own). Before a release, or after a change of an importer:
``HARNESS_FUZZ=1000 pytest tests/traces/importers/test_importers_fuzz.py -n 0 --timeout 7200``.
"""

from __future__ import annotations

import os
import random
import tempfile
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.recordings import MADE, lay, parquet, tar
from traces.importers import SOURCES, import_trace
from traces.importers.alibaba_pai_minibatch import SOURCE as ALIBABA
from traces.parts import check_trace
from traces.plausible import TraceError

EXAMPLES = int(os.environ.get("HARNESS_FUZZ", "15"))
PARQUET_EXAMPLES = EXAMPLES if "HARNESS_FUZZ" in os.environ else 3

WORDS = [
    b"nan",
    b"inf",
    b"-1",
    b"1e400",
    b"9" * 30,
    b"",
    b'"',
    b"\0",
    b"\xff",
    b",",
    b",,,",
    b"\n",
    b"\r",
    b"[" * 2000,
    b"None",
]
WORDS += [b"1000000", b"0", b"true", b"\xef\xbb\xbf", b"{}", b"(", b"'", "٣".encode(), b"=1+1", b"-0", b"1_000", b" "]


@cache
def made(source: str) -> dict[str, bytes]:
    files = MADE[source]()
    if source == "uta-ec2-tokenbucket":
        return {"token_bucket_study.tar.bz2": tar(files)} | {f"plain/{name}": data for name, data in files.items()}
    return files


def changed(data: bytes, rng: random.Random) -> bytes:
    """`data` with one change: of a byte, a field, a line, or of its length."""
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2)) if data else (0, 0)
    lines = data.splitlines(keepends=True)
    kind = rng.randrange(9)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[to:]
    if kind == 2:
        return data[:to] + data[at:]
    if kind == 3 and data:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 4:
        return data[:at] + rng.choice(WORDS) + data[at:]
    if kind == 5 and lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    elif kind == 6 and lines:
        rng.shuffle(lines)
    elif lines:
        row = rng.randrange(len(lines))
        fields = lines[row].split(b",")
        fields[rng.randrange(len(fields))] = rng.choice(WORDS)
        lines[row] = b",".join(fields)
    return b"".join(lines)


def imports_or_complains(source: str, files: dict[str, bytes], below: str = "") -> None:
    """The import is a whole and valid trace, or an error that names a file and leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = lay(Path(folder) / "in", files) / below, Path(folder) / "out"
        try:
            found = import_trace(source, path, out, made_by="test")
        except TraceError as error:
            assert folder in str(error)  # noqa: PT017
            assert len(str(error)) < 3000  # noqa: PT017
            assert [p.name for p in Path(folder).iterdir()] == ["in"]
        else:
            assert check_trace(out) == found.rows


def harmed(files: dict[str, bytes], seed: int) -> dict[str, bytes]:
    """Up to three changes, mostly in one file."""
    rng, files = random.Random(seed), dict(files)
    name = rng.choice(sorted(files))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        files[name] = changed(files[name], rng)
        name = rng.choice([name, name, *files])
    return files


SEEDS = st.integers(0, 2**63)
QUIETLY = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("source", [s for s in SOURCES if s not in ("bytedance-straggler", "uta-ec2-tokenbucket")])
def test_changed_text(source):
    @QUIETLY
    @given(SEEDS)
    def fuzz(seed: int) -> None:
        imports_or_complains(source, harmed(made(source), seed))

    fuzz()


@pytest.mark.parametrize("below", ["", "plain"], ids=["archive", "files"])
def test_changed_networks(below):
    @QUIETLY
    @given(SEEDS)
    def fuzz(seed: int) -> None:
        imports_or_complains("uta-ec2-tokenbucket", harmed(made("uta-ec2-tokenbucket"), seed), below)

    fuzz()


@settings(max_examples=PARQUET_EXAMPLES, suppress_health_check=list(HealthCheck))
@given(SEEDS)
def test_changed_parquet(seed):
    """Fewer, for each is read in a process of its own; some of these bring that process down."""
    rng, files = random.Random(seed), dict(made("bytedance-straggler"))
    name = "trace-XY.parquet" if rng.random() < 0.8 else rng.choice(sorted(files))
    for _ in range(rng.choice([1, 2, 4])):
        files[name] = changed(files[name], rng)
    imports_or_complains("bytedance-straggler", files)


@settings(max_examples=PARQUET_EXAMPLES, suppress_health_check=list(HealthCheck))
@given(SEEDS)
def test_parquet_of_other_columns_and_types(seed):
    """A table that is no Parquet of the source's: another type, a null, a value that cannot be."""
    rng = random.Random(seed)
    columns: dict[str, list[object]] = {"job": [1, 1], "worker": [0, 1], "gpu_share_pct": [25, 25], "t_s": [1, 1]}
    columns |= {"batch_time_norm": [400, 500]}
    name = rng.choice(sorted(columns))
    columns[name] = rng.choice([[None, 1], ["x", "1"], [-1, 2], [float("nan"), 1.0], [[1], [2]], [True, False], [10**18, 1]])
    with tempfile.TemporaryDirectory() as folder:
        data = parquet(pl.DataFrame(columns, strict=False))
        try:
            ALIBABA.read(lay(Path(folder), {"minibatch.parquet": data}))
        except TraceError as error:
            assert "minibatch.parquet" in str(error)  # noqa: PT017
