"""A selection of a recording's runs and settings, written behind its name: ``TRACE[workers=1..2, policy=asp]``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import polars as pl

from traces.parts import is_like

__all__ = ["EVERYTHING", "Selection", "parse"]

_NAMED = re.compile(r"(?P<trace>[^\[\]]+)(?:\[(?P<options>[^\[\]]*)\])?")
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is selected. Words may have wildcards (`*` and `?`); numbers are ranges with both ends."""

    runs: str = "*"
    workload: str = "*"
    policy: str = "*"
    workers: tuple[int, int] | None = None  # None: any
    servers: tuple[int, int] | None = None
    batch_size: tuple[int, int] | None = None

    def of_runs(self, tables: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        """The tables with the rows of selected runs."""
        if (self.runs, self.workload) == ("*", "*"):
            return dict(tables)
        known = tables["runs"].select("run", "workload").to_dicts()
        kept = [
            r["run"] for r in known if is_like(r["run"], self.runs) and is_like(r["workload"] or "unnamed", self.workload)
        ]
        return {name: t.filter(pl.col("run").is_in(kept)) if "run" in t.columns else t for name, t in tables.items()}

    def has(self, setting: Mapping[str, Any]) -> bool:
        """Whether a setting, a row of the table `settings`, is selected. A value that was not recorded is in no range."""
        if not is_like(setting["policy"] or "asp", self.policy):
            return False
        ranges = {name: getattr(self, name) for name in ("workers", "servers", "batch_size")}
        return all(r is None or r[0] <= (setting[name] or -1) <= r[1] for name, r in ranges.items())

    def __str__(self) -> str:
        """As it is written behind the name of a trace: `[workers=1..2, policy=asp]`; nothing for everything."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        written = {n: "..".join(map(str, dict.fromkeys(v))) if isinstance(v, tuple) else v for n, v in chosen.items()}
        return f"[{', '.join(f'{name}={value}' for name, value in written.items())}]" if written else ""

    def among(self, settings: pl.DataFrame) -> pl.DataFrame:
        """The selected ones of these settings."""
        if not settings.height:
            return settings
        return settings.filter(pl.Series([self.has(s) for s in settings.to_dicts()], dtype=pl.Boolean))


EVERYTHING = Selection()


def parse(text: str) -> tuple[str, Selection]:
    """The trace and the selection in ``TRACE`` or ``TRACE[key=value, ...]``.

    The keys are the fields of `Selection`; a range is ``N`` or ``N..M``. Raises ValueError for anything else.
    """
    found = _NAMED.fullmatch(text)
    if found is None:
        raise ValueError(f"Cannot select {text!r}: write TRACE or TRACE[key=value, ...].")
    keys, chosen = [f.name for f in fields(Selection)], dict[str, Any]()
    for option in filter(None, (part.strip() for part in (found["options"] or "").split(","))):
        key, _, value = (part.strip() for part in option.partition("="))
        if key not in keys or not value:
            raise ValueError(f"Cannot select {option!r} in {text!r}: write one of {', '.join(keys)}, then = and a value.")
        chosen[key] = value if key in ("runs", "workload", "policy") else _range(key, value)
    return found["trace"], Selection(**chosen)


def _range(key: str, value: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(value)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise ValueError(f"Cannot select {key}={value}: write a number, or a range such as 1..4.")
    return int(found[1]), int(found[2] or found[1])
