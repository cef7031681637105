"""The recordings that come with the harness, by name: ``shipped:bamboo-spot`` stands where a trace's folder may stand.

They are the folders of `traces/data` (our own recordings of live jobs) and `traces/data/public` (recordings of others, with
their licences). The SHA-256 of every file of the latter is in its SHA256SUMS and is checked before the file is used.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from traces.parts import digest_of
from traces.plausible import fault
from tuners.near_names import near_names

__all__ = ["PUBLIC", "check_shipped", "locate", "shipped", "shipped_bytes"]

_PREFIX = "shipped:"
_DATA = Path(__file__).parent / "data"
PUBLIC = _DATA / "public"
"""The folder of the public recordings."""

_SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def shipped() -> tuple[str, ...]:
    """The names of the recordings that come with the harness."""
    return tuple(sorted(p.parent.name for p in (*_DATA.glob("*/trace.json"), *PUBLIC.glob("*/trace.json"))))


def shipped_bytes(name: str) -> int:
    """The size of the files of a public recording that comes with the harness."""
    return sum(p.stat().st_size for p in (PUBLIC / name).rglob("*") if p.is_file())


def locate(text: str, folder: Path = Path()) -> Path:
    """The folder of a trace: ``shipped:NAME``, or a path, which is relative to `folder`.

    A path may also name the folder of a live job, which has its trace in the folder `trace`.
    Raises ValueError for an unknown name, TraceError, naming file and digests, if a file of that recording was changed.
    """
    if not text.startswith(_PREFIX):
        named = folder / Path(text).expanduser()
        return (
            named / "trace" if (named / "trace" / "runs").is_dir() or (named / "trace" / "trace.json").is_file() else named
        )
    name = text.removeprefix(_PREFIX)
    if name not in shipped():
        raise ValueError(f"No recording {name!r} comes with the harness: {near_names(name, shipped())}")
    if (_DATA / name).is_dir():
        return _DATA / name
    _checked(PUBLIC, name)
    return PUBLIC / name


@cache
def _checked(public: Path, name: str) -> None:
    check_shipped(public, name)


def check_shipped(public: Path, name: str) -> int:
    """Check every file of the recording `name` in the folder `public`; returns their number.

    Raises TraceError, naming file and digests, for one that is damaged, cut short, missing, or not listed.
    """
    sums = dict(_sums(public / _SUMS))
    expected = {path: digest for path, digest in sums.items() if path.startswith(f"{name}/")}
    found = {p.relative_to(public).as_posix() for p in (public / name).rglob("*") if p.is_file()}
    way_out = "Install the harness again, or delete the folder to do without it."
    for path, digest in expected.items():
        if path not in found:
            raise fault(public / path, f"it is missing; its SHA-256 was {digest}. {way_out}")
        data = (public / path).read_bytes()
        if digest_of(data) != digest:
            why = f"its {len(data)} bytes have the SHA-256 {digest_of(data)}, and {digest} was shipped. {way_out}"
            raise fault(public / path, f"it is damaged or cut short: {why}")
    for path in sorted(found - expected.keys()):
        raise fault(public / path, f"it is not listed in {public / _SUMS}. {way_out}")
    return len(expected)


def _sums(path: Path) -> list[tuple[str, str]]:
    """Path and digest of every line."""
    pairs = []
    for row, line in enumerate(path.read_text("utf-8").splitlines()):
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise fault(path, "the line is no digest and path.", row=row)
        pairs.append((matched[2], matched[1]))
    return pairs
