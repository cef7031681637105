"""What all pages show: cells of tables, p values, and drawings with their numbers."""

from __future__ import annotations

import base64
import math
import zlib
from typing import NamedTuple

from reports.figures.drawing import Drawing

__all__ = ["Cell", "NumberedDrawing", "numbered", "p_text"]


class NumberedDrawing(NamedTuple):
    """A drawing with its numbers, as the templates take it."""

    drawing: Drawing
    csv: str  # the numbers as CSV, compressed, in base 64


def numbered(drawing: Drawing | None) -> NumberedDrawing | None:
    """The drawing with its numbers; None for none."""
    if drawing is None:
        return None
    return NumberedDrawing(
        drawing, base64.b64encode(zlib.compress(drawing.data.write_csv(float_precision=6).encode(), 9)).decode()
    )


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    small: str = ""  # the interval, or another addition in small print
    value: float = math.nan  # to sort by


def p_text(p_value: float) -> str:
    """A p value as text; "" where nothing was tested."""
    return "" if math.isnan(p_value) else "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"
