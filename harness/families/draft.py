"""A member before its target is known, and the text of its scenario file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tuners.actions import Scalar

__all__ = ["Draft", "MemberGoal", "written"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a family draws: the tables of a scenario without target and budget, and how these follow from a reference run."""

    about: tuple[str, ...]  # lines of the comment on top
    summary: str
    cluster: Mapping[str, Any]
    workload: Mapping[str, Any]
    start: Mapping[str, Any]
    free: Mapping[str, Mapping[str, Any]]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    metric: Literal["accuracy", "loss", "clocks", "samples"]
    minimise: Literal["seconds", "usd"] = "seconds"
    check_clocks: int = 25  # pushes between two validations
    least_fall: float = 0.75  # the best reference setting takes the loss to that share of the first one, or to less
    longest_seconds: float = 1e12  # after which no machine is lost in the reference run, because it is over
    good: tuple[Mapping[str, Scalar], ...]  # values of knobs of the reference settings, among them some that are good
    pushes: int  # of the fastest reference setting in the reference run
    seeds: int = 1  # of the reference run: 1 or 3
    slack: float  # budget over the time of the best reference setting
    margin: float  # least time, or cost, of the start over that of the best reference setting


@dataclass(frozen=True, slots=True)
class MemberGoal:
    """What the reference run has set."""

    attempt: int  # number of the draw that was accepted: its start is slow enough
    value: float  # of the target
    check_clocks: int
    budget_seconds: float


def written(draft: Draft, goal: MemberGoal) -> str:
    """The scenario file."""
    target: dict[str, Any] = {"metric": draft.metric, "value": _plain(goal.value), "check_clocks": goal.check_clocks}
    target |= {"minimise": draft.minimise} if draft.minimise != "seconds" else {}
    tables: list[tuple[str, Mapping[str, Any]]] = [
        ("cluster", draft.cluster),
        ("workload", draft.workload),
        ("start", draft.start),
        ("free", draft.free),
        ("target", target),
        ("budget", {"seconds": _plain(goal.budget_seconds)}),
        ("costs", draft.costs),
        ("conditions", draft.conditions),
        ("rules", draft.rules),
        ("seeds", {"count": 3}),
    ]
    top = "".join(f"# {line}\n" for line in draft.about)
    body = "\n".join(_table(name, table) for name, table in tables if table)
    return f"{top}\nsummary = {_value(draft.summary)}\n\n{body}"


def _table(name: str, table: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in table.items() if not _is_table(v) or name == "free"}
    lines = [f"[{name}]\n", *(f"{_key(k)} = {_value(v)}\n" for k, v in plain.items())]
    for key, value in table.items():
        if key not in plain:
            rows = value if isinstance(value, list) else [value]
            head = f"[[{name}.{key}]]" if isinstance(value, list) else f"[{name}.{key}]"
            lines += ["\n" + head + "\n" + "".join(f"{_key(k)} = {_value(v)}\n" for k, v in row.items()) for row in rows]
    return "".join(lines)


def _is_table(value: Any) -> bool:
    """Whether a value has a header of its own; short lists of short tables stay on their line."""
    rows = value if isinstance(value, list) else [value]
    return bool(rows) and all(isinstance(r, dict) for r in rows) and not all("type" in r for r in rows)


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else f'"{key}"'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return repr(_plain(value))


def _plain(value: float) -> float:
    """A whole number without its point, where it is one."""
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else value
