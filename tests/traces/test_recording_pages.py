"""The page of our recordings: a program that records one replaces its section, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest

from simulators.calibration.recorded.recordings import read_tables
from tests.live.support.recording_pages import described, with_section
from traces.schema import TRACE

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


def test_the_first_example_calibrates_to_what_can_be_calibrated_to():
    """It imported a recording that calibration refuses, because its steps are not those of its seconds."""
    text = (DATA.parent / "README.md").read_text()
    imported = {folder: source for source, folder in re.findall(r"harness trace import (\S+) \S+ --out (\w+)", text)}
    used = [imported[name] for name in re.findall(r"harness (?:calibrate|fidelity) '?(\w+)", text) if name in imported]
    nothing = {name: pl.DataFrame(schema=rules.schema) for name, rules in TRACE.items()}
    assert len(used) == 2
    for source in used:
        assert not read_tables(nothing, source).rows
    with pytest.raises(ValueError, match=r"Cannot calibrate to trimtuner-tf-ps: .*; use it as a table of recorded runs\."):
        read_tables(nothing, "trimtuner-tf-ps")


def test_a_new_section_comes_last():
    assert with_section("# Title\n", "new", "Text.") == "# Title\n\n## new\n\nText.\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_describes_the_recordings_that_ship(name):
    assert described(DATA / name) in PAGE
