"""The page of our recordings: a program that records one replaces its section, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.live.support.recording_pages import described, with_section

DATA = Path(__file__).parents[2] / "traces" / "data"
PAGE = (DATA / "README.md").read_text()
NAMES = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_section_is_replaced_and_all_else_stays(name):
    made = with_section(PAGE, name, "Recorded again.")
    assert re.findall(r"^## (.+)$", made, re.MULTILINE) == NAMES
    assert f"## {name}\n\nRecorded again.\n" in made
    assert made.partition("## ")[0] == PAGE.partition("## ")[0]
    text = re.search(rf"^## {name}\n\n(.*?)\n(?=\n## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    assert with_section(made, name, text) == PAGE


def test_a_new_section_comes_last():
    assert with_section("# Title\n", "new", "Text.") == "# Title\n\n## new\n\nText.\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_describes_the_recordings_that_ship(name):
    assert described(DATA / name) in PAGE
