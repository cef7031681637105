"""A scenario's text as terms and definitions for a page. Lenient: the text may come from another version of the format."""

from __future__ import annotations

import tomllib
from typing import Any

from simulators.workloads.references import told

__all__ = ["facts", "target_of"]

_MANY = 6  # a longer list of names is abbreviated


def facts(text: str) -> list[tuple[str, str]]:
    """The summary first ("" where the text has none), then cluster, job, target, budget, setting, knobs, conditions."""
    scenario = _parsed(text)
    cluster, target, budget = (_table(scenario, name) for name in ("cluster", "target", "budget"))
    found = [("summary", " ".join(str(scenario.get("summary", "")).split()))]
    nodes = cluster.get("nodes")
    if isinstance(nodes, list):
        found.append(("cluster", ", ".join(_nodes(group) for group in nodes)))
    work = dict(_table(scenario, "workload"))
    found.append(("job", "; ".join(filter(None, (str(work.pop("name", "")), _listed(work))))))
    if {"metric", "value"} <= set(target):
        cheapest = "; the cheapest run wins" if target.get("minimise") == "usd" else ""
        said = _target(str(target["metric"]), target["value"], by_share=bool(target.get("by_share")))
        found.append(("target", said + cheapest))
        if known := _known(_table(scenario, "workload"), str(target["metric"])):
            found.append(("known of this data", known))
    if "seconds" in budget:
        usd = f", {budget['usd']} USD" if "usd" in budget else ""
        found.append(("budget", f"{budget['seconds']} seconds{usd}"))
    found.append(("start", _listed(_table(scenario, "start"))))
    found.append(("free knobs", _listed(_table(scenario, "free"), mark=" ")))
    found.append(("conditions", _listed(_table(scenario, "conditions"))))
    return found[:1] + [(term, value) for term, value in found[1:] if value]


def _known(work: dict[str, Any], metric: str) -> str:
    """The linear baseline and the best known model beside the target; "" where none is known."""
    try:
        return told(str(work.get("name", "")), dict(work.get("overrides", {})), metric)
    except (ValueError, TypeError):
        return ""


def _target(metric: str, value: Any, *, by_share: bool) -> str:
    if metric in ("clocks", "samples"):
        divided = ", divided among the workers by their data shares" if by_share else ""
        return f"{value} {'pushes completed' if metric == 'clocks' else 'samples used'}{divided}"
    return f"validation {metric} {'at least' if metric == 'accuracy' else 'at most'} {value}"


def target_of(text: str) -> tuple[str, float] | None:
    """Metric and value of the target; None where it is no accuracy or loss."""
    target = _table(_parsed(text), "target")
    metric, value = target.get("metric"), target.get("value")
    if metric in ("accuracy", "loss") and isinstance(value, int | float):
        return str(metric), float(value)
    return None


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _table(scenario: dict[str, Any], name: str) -> dict[str, Any]:
    found = scenario.get(name)
    return found if isinstance(found, dict) else {}


def _nodes(group: Any) -> str:
    if not isinstance(group, dict):
        return str(group)
    price = f" at {group['usd_per_hour']} USD per hour" if "usd_per_hour" in group else ""
    spot = ", spot" if group.get("spot") else ""
    return f"{group.get('count', 1)} x {group.get('type', 'node')}{spot}{price}"


def _listed(table: dict[str, Any], *, mark: str = " = ") -> str:
    return "; ".join(f"{key}{mark}{_value(value)}" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        ends = value.get("integer", value.get("real"))
        if isinstance(ends, list) and len(ends) == 2:
            return f"{ends[0]} to {ends[1]}{' (logarithmic)' if value.get('log') else ''}"
        if "choice" in value:
            return f"of {_value(value['choice'])}"
        return ", ".join(f"{key} {_value(v)}" for key, v in value.items())
    if isinstance(value, list):
        if len(value) > _MANY and all(isinstance(v, str) for v in value):
            return f"{value[0]}, {value[1]} ... {value[-1]} ({len(value)})"
        return ", ".join(_value(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
