"""Training speeds of MXNet parameter-server jobs over numbers of servers and workers, recorded for DL2 (Peng et al.).

Source format (`config_speed.txt`): a Python tuple per line, ``(model, kvstore, total batch, servers, workers, [samples per
second, one per worker], [CPU use per server], [CPU use per worker])``, where kvstore is ``dist_sync`` or ``dist_async``. The
scheduler that reads it sums the speeds over workers (its `speed.py`), and so does this importer. Rows whose speeds are all
zero (such jobs did not train), and rows of another kvstore (they have no servers of their own), are left out and counted.
CPU use is kept in the runs' extras where it has a value per server or worker. MXNet places a tensor of a million elements on
all servers, a smaller one on one of them, so that servers have unequal shares of the model, which the file does not tell.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from traces.foreign.text import lines_of
from traces.importers.source import Imported, RemoteFile, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import fault

__all__ = ["SOURCE", "read"]

_POLICIES = {"dist_sync": "bsp", "dist_async": "asp"}
_Line = tuple[str, str, int, int, int, list[float], list[float], list[float]]
_MOST = {"total batch": 10_000_000, "servers": 10_000, "workers": 10_000}
_TOKEN = re.compile(r"""'[^'"\\]*'|[-+.\deE]+|[\[\](),\s]""")


def read(path: Path) -> Imported:
    """`path` is such a file, or a folder with config_speed.txt."""
    paths = find_files(path, "config_speed*.txt")
    if not paths:
        raise nothing_to_import(path, "config_speed.txt")
    runs: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for one in paths:
        seen: dict[str, int] = {}
        for row, line in enumerate(lines_of(one, ends=False)):
            if line.strip():
                if seen.setdefault(line, row) != row:
                    raise fault(one, f"it is the same as row {seen[line] + 1}; give each once.", row=row)
                parsed = _parsed(line, one, row)
                if why := _other_kind(parsed, one, row):
                    left_out[why] += 1
                    continue
                run, setting = _row(parsed, one, row)
                runs.append(run)
                settings.append(setting)
    if not runs:
        raise fault(paths[0], f"it has no row to import{': ' if left_out else '.'}{_told(left_out)}")
    tables = {"runs": table("runs", runs), "settings": table("settings", settings)}
    return Imported(tables, tuple(paths), left_out=_told(left_out))


def _told(left_out: Counter[str]) -> str:
    """The rows that were left out, as a sentence; "" if there are none."""
    said = [f"{count} {'row' if count == 1 else 'rows'} {why}" for why, count in sorted(left_out.items())]
    return f"{' and '.join(said)} left out." if said else ""


def _other_kind(line: _Line, path: Path, row: int) -> str:
    """Why a row does not describe a job with servers that trained; "" if it does."""
    kvstore, speeds = line[1], line[5]
    if not re.fullmatch(r"\w{1,40}", kvstore):
        raise fault(path, f"{kvstore[:40]!r} is none of {', '.join(_POLICIES)}.", row=row, column="kvstore")
    if kvstore not in _POLICIES:
        return f"of kvstore {kvstore!r}"
    return "whose speeds are all zero" if speeds and not any(speeds) else ""


def _parsed(line: str, path: Path, row: int) -> _Line:
    """The tuple on a line, read as JSON: nothing in the file is executed, and deep nesting is refused."""
    if "".join(_TOKEN.findall(line)) != line:
        raise fault(path, "it is no tuple of texts, numbers and lists.", row=row)
    text = line.strip().replace("(", "[").replace(")", "]").replace("'", '"')
    try:
        made: _Line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise fault(path, f"it is not of the form of the others ({error}).", row=row) from None
    return made


def _row(line: _Line, path: Path, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model, kvstore, total, servers, workers, speeds, server_cpus, worker_cpus = line
    for name, value in zip(_MOST, (total, servers, workers), strict=True):
        if not 1 <= value <= _MOST[name]:
            raise fault(path, f"the value is {value}, and 1 to {_MOST[name]} are plausible.", row=row, column=name)
    if not 1 <= len(speeds) <= workers:
        raise fault(path, f"there are {len(speeds)} speeds of {workers} workers.", row=row, column="speeds")
    if not all(0 <= speed < 1e7 for speed in speeds):
        raise fault(path, "speeds are samples per second, from 0 to 10 million.", row=row, column="speeds")
    run = f"{model}/{kvstore}/{total}/{servers}s/{workers}w/{row}"
    rate = sum(speeds)
    used = {"server_cpus": (server_cpus, servers), "worker_cpus": (worker_cpus, workers)}
    extras = json_text(
        {"speeds_samples_per_second": speeds, "total_batch_size": total}
        | {name: cpus for name, (cpus, count) in used.items() if len(cpus) == count}
    )
    return (
        {"run": run, "workload": model, "samples_per_second": rate, "extras": extras},
        {"run": run, "seconds": 0.0, "workers": workers, "servers": servers, "policy": _POLICIES[kvstore]}
        | ({"batch_size": total // workers} if total % workers == 0 else {}),
    )


SOURCE = Source(
    summary="training speeds of MXNet jobs over numbers of servers and workers",
    repository="pengyanghua/DL2",
    commit="809e2f50e751823add5c50f1c4fffb2aa30ee823",
    licence="none stated: fetch the data yourself, and do not pass it on",
    cite="Peng et al., DL2",
    read=read,
    files=(RemoteFile("config_speed.txt"),),
)
