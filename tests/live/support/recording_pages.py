"""The page beside our recordings, `traces/data/README.md`: a section per recording, written by the program that makes it."""

from __future__ import annotations

import re
from pathlib import Path

from traces.parts import check_trace, digest_of

__all__ = ["described", "with_section"]


def described(folder: Path) -> str:
    """The rows and the digest of a trace, as the end of its section. Raises TraceError if the trace is damaged."""
    rows = ", ".join(f"{count} {table}" for table, count in check_trace(folder).items() if count)
    digest = digest_of(b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()))
    return f"Rows: {rows}. SHA-256 of its files, in order of path: `{digest}`"


def with_section(page: str, name: str, text: str) -> str:
    """`page` with `text` as its section `name`, in place of the one that it has, else at its end; all else stays."""
    section = f"## {name}\n\n{text}\n"
    there = re.compile(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if (found := there.search(page)) is None:
        return f"{page.rstrip()}\n\n{section}"
    after = page[found.end() :]
    return page[: found.start()] + section + (f"\n{after}" if after else "")
