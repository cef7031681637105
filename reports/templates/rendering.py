"""HTML from the templates of this folder and plain values. Every value is escaped here, and only here."""

from __future__ import annotations

import html
import re
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["fill"]


def fill(template: str, **values: Any) -> str:
    """The page that a template of this folder makes of `values`. Raises UndefinedError where one is missing."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    """One per process: it keeps the compiled templates."""
    environment = Environment(
        loader=PackageLoader("reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name is an error and no empty text
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["with_lines"] = _safe_lines
    environment.filters["with_names"] = _safe_names
    here = resources.files("reports.templates")
    css = here.joinpath("page.css").read_text(encoding="utf-8")
    environment.globals["css"] = Markup(css)  # noqa: S704 - our own file
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    environment.globals["script"] = Markup(script)  # noqa: S704 - our own file
    return environment


def _safe(value: object) -> Markup:
    """A value as HTML without control characters, line ends included; what is HTML already is not changed."""
    return value if isinstance(value, Markup) else _escaped(str(value), "\u00a0")


def _safe_lines(value: str) -> Markup:
    """As `_safe`, for a text whose line ends and tabs are to be seen."""
    return _escaped(value, "\u00a0\n\t")


def _safe_names(value: str) -> Markup:
    """As `_safe`, for a sentence in which names stand between backticks."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(_escaped(value, "\u00a0"))))  # noqa: S704 - escaped before


def _escaped(text: str, kept: str) -> Markup:
    """`text` as HTML; of the characters that cannot be printed only those in `kept` remain, the others become spaces."""
    printable = "".join(c if c.isprintable() or c in kept else " " for c in text)
    # The standard library's escape, as in the drawings: the same text has the same bytes in a caption and in its SVG.
    return Markup(html.escape(printable))  # noqa: S704 - escaped just now
