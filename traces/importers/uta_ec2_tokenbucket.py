"""Token buckets of EC2's networks: one TCP stream until the high rate is used up (Uta et al., NSDI'20).

Source format: ``<instance>-<region>-<unix seconds>.bw``, lines ``crnt bw = X``, X in Gbit/s (1e9) over about a second each;
``.tb``, one line ``seconds to empty,high,low`` (the latter two in Gbit/s); ``.raw`` (iperf3's output, cut short before the
throttle; it is not read, the .bw is complete). The archive token_bucket_study.tar.bz2 holds them, besides hidden files of
macOS. Also reads bandwidth.parquet.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from traces.foreign.parquet import read_parquet
from traces.foreign.text import text_of
from traces.importers.source import Imported, RemoteFile, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "MeasuredBucket", "read", "token_bucket"]

_NAME = re.compile(r"([a-z0-9]+\.[a-z0-9]+)-([a-z]+-[a-z]+-\d)-(\d{1,12})")
_LINE = re.compile(r"crnt bw = (\d{1,9}\.\d{3})")
_BUCKET = re.compile(r"(\d{1,9}\.\d{3}),(\d{1,9}\.\d{3}),(\d{1,9}\.\d{3})")
_MOST_GBPS = 400.0
_HIGH = 0.75
"""A sample above this share of the high rate counts as not throttled; the smallest drop, of c5.4xlarge, is to a half."""

_GBIT_BYTES = 1e9 / 8
_MOST_MEMBERS, _MOST_MEMBER_BYTES = 10_000, 16 << 20
_TABLED = TableRules(
    {
        "run_id": Column(pl.String()),
        "t_s": Column(pl.Int64(), low=1, high=10_000_000),
        "tx_gbps": Column(pl.Float64(), low=0, high=_MOST_GBPS),
    },
    key=("run_id", "t_s"),
    time="t_s",
    by=("run_id",),
)


class MeasuredBucket(NamedTuple):
    """The token bucket of a throttled run."""

    at_seconds: int  # samples before the drop
    high_bytes_per_second: float  # median before
    low_bytes_per_second: float  # median after
    bytes: float  # capacity: bytes sent before the drop, minus the refill at the low rate


def token_bucket(bytes_per_second: ArrayLike) -> MeasuredBucket | None:
    """The bucket behind samples of one second each; None unless the rate drops to a lower rate that lasts to the end."""
    rates = np.asarray(bytes_per_second, dtype=np.float64)
    if len(rates) < 6:
        return None
    high, low = float(np.median(rates)), float(np.median(rates[-4:]))
    at = int(np.flatnonzero(rates >= _HIGH * high)[-1]) + 1
    if low <= 0 or low >= _HIGH * high or at == len(rates):
        return None
    # The rate drops within a sample, so this sample has a mixed rate: skip it.
    after = rates[at + 1 :] if len(rates) > at + 2 else rates[at:]
    low = float(np.median(after))
    return MeasuredBucket(at, float(np.median(rates[:at])), low, float(np.sum(rates[:at] - low)))


def read(path: Path) -> Imported:
    """`path` is a .bw file, a folder of them, the archive, or a folder with either it or bandwidth.parquet."""
    paths = find_files(path, "[!.]*.bw", "*.tar.bz2", "bandwidth.parquet")
    if not paths:
        raise nothing_to_import(path, "*.bw", "*.tar.bz2", "bandwidth.parquet")
    inputs = list(paths)
    if paths[0].name.endswith(".tar.bz2"):
        texts = dict(pair for one in paths for pair in _members(one))
    elif paths[0].suffix == ".parquet":
        frame = pl.concat([read_parquet(one, _TABLED) for one in paths]).rename({"t_s": "seconds"})
        return Imported(_tables(frame, {}), tuple(inputs))
    else:
        inputs += [b for p in paths if (b := p.with_suffix(".tb")).is_file()]
        texts = {p: text_of(p, most=_MOST_MEMBER_BYTES) for p in inputs}
    samples = [_samples(p, text) for p, text in texts.items() if p.suffix != ".tb"]
    if not samples:
        raise nothing_to_import(path, "*.bw")
    buckets = {p.stem: _bucket(p, text) for p, text in texts.items() if p.suffix == ".tb"}
    return Imported(_tables(pl.concat(samples), buckets), tuple(inputs))


def _members(path: Path) -> Iterator[tuple[Path, str]]:
    """The .bw and .tb files of the archive, unpacked in memory and within limits."""
    try:
        with tarfile.open(path, "r:bz2") as archive:
            for number, member in enumerate(archive):
                if number >= _MOST_MEMBERS or member.size > _MOST_MEMBER_BYTES:
                    raise fault(path, f"{member.name[:200]!r} is more, or larger, than what is unpacked.")
                name = Path(member.name)
                if member.isfile() and name.suffix in (".bw", ".tb") and not name.name.startswith("."):
                    held = archive.extractfile(member)
                    yield path / name.name, "" if held is None else held.read().decode("utf-8")
    except (tarfile.TarError, OSError, EOFError, UnicodeDecodeError, ValueError) as error:
        if type(error).__name__ == "TraceError":
            raise
        raise fault(path, f"it is damaged or cut short ({str(error)[:200]}).") from None


def _samples(path: Path, text: str) -> pl.DataFrame:
    _named(path)
    if not text.endswith("\n"):
        raise fault(path, "its last line has no end: the file was cut short.", row=text.count("\n"))
    rates = []
    for row, line in enumerate(text.splitlines()):
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise fault(path, f"{line[:80]!r} is not like 'crnt bw = 9.689'.", row=row)
        if (rate := float(matched[1])) > _MOST_GBPS:
            why = f"the value is {rate:g}, and Gbit/s above {_MOST_GBPS:g} are not plausible (are these Mbit/s?)."
            raise fault(path, why, row=row, column="bw")
        rates.append(rate)
    seconds = range(1, len(rates) + 1)
    schema = {"run_id": pl.String, "seconds": pl.Int64, "tx_gbps": pl.Float64}
    return pl.DataFrame({"run_id": [path.stem] * len(rates), "seconds": seconds, "tx_gbps": rates}, schema=schema)


def _bucket(path: Path, text: str) -> tuple[float, float, float]:
    matched = _BUCKET.fullmatch(text.strip())
    if matched is None:
        raise fault(path, f"{text[:80]!r} is not like '1201.000,5.017,1.254'.", row=0)
    seconds, high, low = (float(x) for x in matched.groups())
    if high > _MOST_GBPS or low > high:
        raise fault(path, f"{high:g} and then {low:g} Gbit/s are not plausible (are these Mbit/s?).", row=0)
    return seconds, high, low


def _named(path: Path) -> tuple[str, str, int]:
    matched = _NAME.fullmatch(path.stem)
    if matched is None:
        raise fault(path, "its name is not like c5.xlarge-us-east-1-1568031119.bw.")
    return matched[1], matched[2], int(matched[3])


def _tables(frame: pl.DataFrame, buckets: dict[str, tuple[float, float, float]]) -> dict[str, pl.DataFrame]:
    """Runs, with their token buckets, and probes."""
    frame = frame.with_columns(rate=pl.col("tx_gbps") * _GBIT_BYTES)
    runs: list[dict[str, Any]] = []
    for (run,), one in frame.group_by("run_id", maintain_order=True):
        kind, region, start = _named(Path(f"{run}.bw"))
        extras: dict[str, Any] = {"region": region, "start_unix_seconds": start}
        if found_bucket := token_bucket(one["rate"].to_numpy()):
            extras |= {f"bucket_{name}": value for name, value in found_bucket._asdict().items()}
        if str(run) in buckets:
            extras["said_empty_seconds"], extras["said_high_gbps"], extras["said_low_gbps"] = buckets[str(run)]
        runs.append({"run": run, "cluster": kind, "seconds": float(one.height), "extras": json_text(extras)})
    probes = frame.select(
        run="run_id", node=pl.lit("sender"), seconds=pl.col("seconds").cast(pl.Float64), bandwidth_bytes_per_second="rate"
    )
    return {"runs": table("runs", runs), "probes": table("probes", probes)}


SOURCE = Source(
    summary="bandwidth between two EC2 machines until it is throttled, 40 runs on c5",
    repository="alexandru-uta/cloud_network_variability_data",
    commit="bd2b03c9e5716a27f75a9099ee74a6748c3fe9be",
    licence="Apache-2.0",
    cite="Uta et al., Is Big Data Performance Reproducible in Modern Cloud Networks?, NSDI'20",
    read=read,
    files=(RemoteFile("token_bucket_study.tar.bz2"),),
    size="258 kB",
)
