"""Words for the `reason` of an action: people read it, and nothing is decided by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from tuners.settings import Setting

__all__ = ["changes", "counted", "machines", "short"]

_MOST = 5  # fields of a change that are told


def counted(number: int, noun: str) -> str:
    """A number of things: "1 server", "2 servers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """A number with three digits, or all before the point."""
    return f"{number:.0f}" if 1000 <= abs(number) < math.inf else f"{number:.3g}"


def machines(setting: Setting) -> str:
    """How many machines work and serve."""
    return f"{counted(len(setting.workers), 'worker')}, {counted(len(setting.servers), 'server')}"


def changes(before: Setting, after: Setting) -> str:
    """The first few fields that differ, with both values: of machines their number, of what is shared out none."""
    pairs = ((f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(Setting))
    told = [words for name, a, b in pairs if a != b for words in _changes(name, a, b)]
    more = [f"{len(told) - _MOST} more"] if len(told) > _MOST else []
    return ", ".join(told[:_MOST] + more) or "the same setting"


def _changes(name: str, before: Any, after: Any) -> Iterator[str]:
    if name == "options":
        yield from (f"{key} {dict(before).get(key)} -> {value}" for key, value in after if (key, value) not in before)
    elif isinstance(after, tuple):
        counts = name in ("workers", "servers") and len(before) != len(after)
        yield f"{name} {len(before)} -> {len(after)}" if counts else f"other {name.replace('_', ' ')}"
    else:
        a, b = (short(value) if isinstance(value, float) else value for value in (before, after))
        yield f"{name} {a} -> {b}"
