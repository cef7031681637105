"""Numbers and intervals as text, alike in every table, sentence and figure."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["count", "host_seconds", "interval_text", "percent", "quantity", "relative"]

_DASH = "\u2013"  # between the ends of an interval
_NO_BREAK = "\u00a0"  # a space that stays on its line


def quantity(value: float) -> str:
    """A number with three significant digits, whole from 100 on; a dash where there is none."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    digits = 0 if size >= 99.95 or size == 0 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{digits}f}" if size >= 0.01 or size == 0 else f"{value:.2g}"


def host_seconds(value: float) -> str:
    """Seconds measured on the host: nothing below a millisecond, which is noise."""
    return "< 0.001" if 0 < value < 0.001 else quantity(value)


def relative(value: float) -> str:
    """A ratio, a regret or a mean rank: two digits after the point; `quantity` from 10 on and below 0.1."""
    return f"{value:.2f}" if 0.095 <= abs(value) < 9.995 else quantity(value)


def percent(value: float) -> str:
    """A share in percent; 0 % and 100 % only where it is none and all."""
    if 0 < value < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= value < 1 else f"{value:.0%}"


def interval_text(row: dict[str, Any], name: str, kind: str) -> tuple[str, str]:
    """An estimate of a row of `summary` and its interval, as two texts; the second is "" where there is no interval."""
    text = quantity if kind in ("completion", "usd") else relative
    estimate, low, high, bound = row[name], row[f"{kind}_low"], row[f"{kind}_high"], row[f"{kind}_bound"]
    if math.isnan(estimate):
        return ("unknown" if bound == "?" and not math.isnan(low) else "-"), ""
    shown = text(estimate) if bound == "=" else f"{bound}{_NO_BREAK}{text(estimate)}"
    if math.isnan(low) or (low == high and bound == "=") or (math.isinf(high) and low == estimate and bound == ">"):
        return shown, ""
    if math.isinf(high) and low == 0 and kind != "regret":
        return shown, f"0{_DASH}∞"  # any time, cost or ratio is at least 0
    if math.isinf(high):
        return shown, f"≥{_NO_BREAK}{text(low)}"
    # A dash between negative numbers reads like one sign more.
    return shown, f"{text(low)} to {text(high)}" if low < 0 else f"{text(low)}{_DASH}{text(high)}"


def count(value: float) -> str:
    """A mean of whole numbers: whole where it is, else with one digit after the point; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.0f}" if value == int(value) else f"{value:.1f}"
