"""The common part of all drawings: a canvas with its colours, and its SVG for a page.

Text stays text, ink takes the page's colour (so the drawing fits a dark and a light page), nothing is fetched, and equal
input gives equal bytes. Colours are Okabe and Ito's blue, orange and green, slightly lightened.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

__all__ = [
    "BLUE",
    "COLORS",
    "GREEN",
    "INK",
    "MUTED",
    "ORANGE",
    "WIDTH",
    "Drawing",
    "canvas",
    "drawn",
    "label_inches",
    "logarithmic",
    "pdf",
    "svg",
]

INK, MUTED = "#010203", "#8c8c8c"  # ink becomes the page's own colour
BLUE, ORANGE, GREEN = "#2a86c8", "#d9700b", "#159f7a"
COLORS = (BLUE, "#b4569d", "#7a5cc4", "#b8860b", "#c0392b")
"""Of several tuners in one plot; the reference is orange, the oracle green."""
WIDTH = 9.6  # inches; 72 points each, shown at the page's width
_STYLE: Any = {
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "path.simplify": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "reports.figures",
    "text.color": INK,
    "text.parse_math": False,  # names come from outside: a dollar is a dollar
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure for a page or a file of its own."""

    svg: str
    caption: str  # what the drawing shows and how to read it; also its text alternative
    name: str  # starts the ids of its elements, and is the name of its file
    data: pl.DataFrame = field(compare=False)  # the numbers that it shows
    figure: Figure = field(compare=False, repr=False)  # the same for matplotlib


def drawn(figure: Figure, name: str, caption: str, data: pl.DataFrame | None = None) -> Drawing:
    """The drawing of a finished figure; call it within `canvas`."""
    return Drawing(svg(figure, name, caption), caption, name, pl.DataFrame() if data is None else data, figure)


def pdf(drawing: Drawing) -> bytes:
    """A drawing as PDF; equal drawings give equal bytes."""
    out = io.BytesIO()
    with mpl.rc_context({**_STYLE, "pdf.fonttype": 42}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        drawing.figure.savefig(out, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return out.getvalue()


class _ShownFigure(Figure):
    """A figure that a notebook shows by itself: one that pyplot has not made has no picture there otherwise."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110, facecolor="white")
        return out.getvalue()


@contextmanager
def canvas(height: float, *, left: float, bottom: float = 0.45, top: float = 0.3, gaps: float = 0.25) -> Iterator[Figure]:
    """A figure with these margins in inches; fixed margins are ten times faster than a layout solver."""
    with mpl.rc_context(_STYLE):
        figure = _ShownFigure(figsize=(WIDTH, height))
        figure.subplots_adjust(
            left=left / WIDTH,
            right=1 - 0.15 / WIDTH,
            bottom=bottom / height,
            top=1 - top / height,
            hspace=gaps,
            wspace=0.06,
        )
        yield figure


def label_inches(labels: Sequence[str]) -> float:
    """Width of the longest of `labels` at the size of tick labels."""
    return 0.25 + 0.082 * max((len(line) for label in labels for line in label.split("\n")), default=0)


def logarithmic(axes: Axes, *, horizontal: bool = False) -> None:
    """A logarithmic axis, vertical or horizontal, with few, plain numbers."""
    (axes.set_xscale if horizontal else axes.set_yscale)("log")
    axis = axes.xaxis if horizontal else axes.yaxis
    axis.set_major_locator(LogLocator(numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def svg(figure: Figure, name: str, alternative: str) -> str:
    """The figure as an SVG element whose ids start with `name`."""
    out = io.StringIO()
    with warnings.catch_warnings():
        # Text stays text, so the reader's browser supplies the characters that the drawing font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", " ", out.getvalue())  # XML allows no control characters
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    # All drawings of a page share one space of ids: keep those that are referred to, under a name of their own.
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", text)
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    label = html.escape(alternative, quote=True)
    opening = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg" {box[0] if box else ""}'
    body = re.sub(r' d="([^"]*)"', lambda m: f' d="{_shorter(m[1])}"', body)
    body = re.sub(r'(?<= [xy]=")[-\d.]+(?=")', lambda m: _cut(m[0]), body)
    body = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", body)
    body = re.sub(r"\n\s*", "\n", _without_bare_groups(body))
    body = body.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif").replace(INK, "currentColor")
    return f'{opening} role="img" aria-label="{label}">{body.strip()}'


def _shorter(path: str) -> str:
    """A path with coordinates cut to a hundredth of a point, and without the letters of lines that follow a move or line."""
    kept, last = [], ""
    for word in _cut(path).split():
        if word != "L" or last not in ("M", "L"):
            kept.append(word)
        last = word if word.isalpha() else last
    return " ".join(kept)


def _cut(numbers: str) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", numbers)


def _without_bare_groups(body: str) -> str:
    """The SVG text without groups that have no attributes: half of all tags."""
    kept, has_attributes = [], []
    for part in re.split(r"(<g>|<g [^>]*>|</g>)", body.replace("<g/>", "")):
        if part.startswith("<g"):
            has_attributes.append(part != "<g>")
            keep = has_attributes[-1]
        else:
            keep = part != "</g>" or has_attributes.pop()
        kept.append(part if keep else "")
    return "".join(kept)
