"""Templates: what they show is escaped, what they lack is an error, and every file of them is used."""

import re
from importlib import resources

import jinja2
import pytest

from reports.templates import rendering
from reports.templates.rendering import fill

VALUES = {
    "title": "a page",
    "lead": "",
    "verdict": [],
    "verdict_rows": [],
    "limits": [],
    "parts": [],
    "findings": [],
    "misses": [],
    "recordings": [],
    "kinds": [],
    "folds": 5,
    "level": 90,
    "has_completions": False,
    "samples": 0,
    "steady": False,
}


def test_every_public_name_exists():
    assert all(hasattr(rendering, name) for name in rendering.__all__)


def test_values_are_escaped_and_lose_control_characters():
    text = fill("fidelity.html.j2", **VALUES | {"lead": "<i>'\x1b\n\u00a0&\""})
    assert '<p class="lead">&lt;i&gt;&#x27;  \u00a0&amp;&quot;</p>' in text


def test_names_between_backticks_are_set_as_code():
    shown = fill(
        "replayed.html.j2",
        title="a page",
        lead="",
        sections=[{"name": "n", "summary": "of `a<b` and `c", "roles": [], "drawings": [], "verdict": None}],
    )
    assert "<p>of <code>a&lt;b</code> and `c</p>" in shown


def test_a_missing_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'lead' is undefined"):
        fill("fidelity.html.j2", **{name: value for name, value in VALUES.items() if name != "lead"})


def test_a_page_carries_its_style():
    css = resources.files("reports.templates").joinpath("page.css").read_text(encoding="utf-8")
    assert f"<style>\n{css}</style>" in fill("fidelity.html.j2", **VALUES)


def test_every_template_is_a_page_or_part_of_one():
    files = resources.files("reports.templates").iterdir()
    texts = {file.name: file.read_text(encoding="utf-8") for file in files if file.name.endswith(".j2")}
    named = {name for text in texts.values() for name in re.findall(r'{% (?:extends|include|from) "([^"]+)"', text)}
    assert set(texts) - named == {
        "comparison.html.j2",
        "fidelity.html.j2",
        "overview.html.j2",
        "paper.html.j2",
        "replayed.html.j2",
    }
    assert named <= set(texts)
