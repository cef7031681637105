"""Builds a scenario in Python: the tables of a scenario's file as keyword arguments, on an existing scenario or on none."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

from harness.scenario.description import Scenario
from harness.scenario.scenario import load, parse
from harness.scenario.tables import TABLES
from tuners.near_names import near_names
from tuners.settings import Setting

__all__ = ["Table", "scenario"]

Table: TypeAlias = Mapping[str, Any]
"""A table of a scenario's file, by key; None removes a key that the base may have."""


def scenario(
    base: str | Path | Scenario | None = None,
    *,
    name: str = "",
    summary: str | None = None,
    cluster: Table | None = None,
    workload: Table | None = None,
    start: Table | None = None,
    free: Table | None = None,
    target: Table | None = None,
    budget: Table | None = None,
    conditions: Table | None = None,
    costs: Table | None = None,
    rules: Table | None = None,
    seeds: Table | int | None = None,
    recorded: Table | None = None,
    calibration: Table | None = None,
) -> Scenario:
    """Make a scenario from the tables of its file; with a `base`, from its tables with these keys changed::

        harness.scenario("digits", name="calm", conditions={"stragglers": None}, free={"momentum": None})

    Args:
        base: name, file or scenario to start from; a table that is not given stays as it is. Without tables, the base
            itself is returned.
        name: name in results; by default the base's, with "-changed" after it.
        summary: one sentence; by default the base's.
        cluster: and the following: see `harness show digits` for the keys and `harness.scenario.tables` for all of them.
        workload: what is trained.
        start: the setting until a tuner changes it.
        free: the knobs that tuners may change.
        target: when the job is done.
        budget: simulated seconds.
        conditions: stragglers, sleeps, nodes that come and go.
        costs: of reconfigurations and evaluations.
        rules: what else a tuner may do.
        seeds: a table, or the number of seeds.
        recorded: recorded runs that answer in place of the simulator.
        calibration: which draw of calibrated constants is used.

    Raises ValueError, which names table and key, for a scenario that is not valid. Relative paths are relative to the
    folder of the base's file, or to the working folder where there is no base or one that ships.
    """
    given: dict[str, Any] = {
        "cluster": cluster,
        "workload": workload,
        "start": start,
        "free": free,
        "target": target,
        "budget": budget,
        "conditions": conditions,
        "costs": costs,
        "rules": rules,
        "seeds": {"count": seeds} if isinstance(seeds, Integral) else seeds,
        "recorded": recorded,
        "calibration": calibration,
    }
    changes = {table: keys for table, keys in given.items() if keys is not None}
    if base is None and not changes:
        raise ValueError("Cannot make a scenario of nothing: name one (harness.scenario('digits')), or give its tables.")
    found = base if isinstance(base, Scenario) or base is None else load(base)
    if found is not None and not changes and summary is None and not name:
        return found
    named = name or (f"{found.name}-changed" if found else "scenario")
    if not re.fullmatch(r"[^/\0.][^/\0]*", named):
        raise ValueError(f"Cannot name a scenario {named!r}: it becomes a file's name, so it has no / and no leading dot.")
    tables: dict[str, Any] = tomllib.loads(found.text) if found else {"summary": named}
    tables |= {} if summary is None else {"summary": summary}
    tables |= {table: _changed(table, tables.get(table, {}), keys) for table, keys in changes.items()}
    ships = found is not None and found.origin.parent == Path(str(files("harness") / "scenarios"))
    folder = Path() if found is None or ships else found.origin.parent
    origin = folder / f"harness.scenario({named!r})"  # no file; relative paths start at its folder
    try:
        return parse(_toml(tables), name=named, origin=origin)
    except ValueError as error:
        raise ValueError(str(error).replace(str(origin), origin.name)) from None


def _changed(table: str, present: Table, keys: Any) -> dict[str, Any]:
    """A table with these keys set, and without those that are None. Raises ValueError for what is no table of keys."""
    if not isinstance(keys, Mapping):
        raise ValueError(f"Cannot read {table}={keys!r}: give a dictionary of keys, as in [{table}] of a file.")  # noqa: TRY004
    for key in (key for key, value in keys.items() if value is None and key not in present):
        _check_can_be_removed(table, key)
    return {key: value for key, value in {**present, **keys}.items() if value is not None}


def _check_can_be_removed(table: str, key: str) -> None:
    """Raise ValueError for a key that no scenario has in this table: the key that was meant would silently stay."""
    # A name with a slash ("role/n0") is of a node; which nodes there are, another base says.
    known = (*(f.name for f in fields(Setting)), "worker_count") if table == "free" else TABLES[table].__struct_fields__
    if key not in known and "/" not in key:
        raise ValueError(f"Cannot remove {key!r} from [{table}]: there is no such key; {near_names(key, known)}")


def _toml(tables: Mapping[str, Any]) -> str:
    """The text of a scenario's file: keys first, then one section per table, whose values are written in one line."""
    lines = [f"{_key(key)} = {_value(key, value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(key, value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _string(key)


def _value(key: str, value: Any) -> str:
    """`value` as TOML. Numbers of NumPy are numbers, too."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return _string(str(value))
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(k, v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list | tuple | range):
        return "[" + ", ".join(_value(key, each) for each in value) + "]"
    raise ValueError(f"Cannot write {key} = {value!r} into a scenario: give numbers, text, lists and dictionaries.")


def _string(text: str) -> str:
    """A basic string of TOML: JSON's escapes, and one more character that has to be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
