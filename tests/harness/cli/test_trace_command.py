"""The command `harness trace`, on the real simulator once, and on files of our own."""

from __future__ import annotations

import polars as pl
import pytest

from harness.cli.main import main
from tests.support.recordings import MADE, lay
from traces.importers import SOURCES
from traces.parts import check_trace, scan


def test_a_run_is_recorded_shown_checked_and_converted(here, capsys):
    assert main(["trace", "record", "tiny.toml", "--tuner", "fixed", "--seed", "2", "--out", "t"]) == 0
    assert "target after" in capsys.readouterr().out
    assert main(["trace", "check", "t"]) == 0
    assert "The trace is valid." in capsys.readouterr().out
    assert main(["trace", "show", "t"]) == 0
    shown = capsys.readouterr().out
    assert "tiny, fixed, seed 2" in shown
    assert "tiny/fixed/2: 60 iterations of 3 workers" in shown
    kept = scan(here / "t", "iterations").collect()
    assert kept["loss"].null_count() == kept.height == 60  # this workload has no model
    assert main(["trace", "convert", "t", "--csv", "--out", "csv"]) == 0
    assert pl.read_csv(here / "csv" / "iterations.csv").height == 60
    assert main(["trace", "record", "tiny.toml", "--out", "t"]) == 2
    assert "it is there already" in capsys.readouterr().err


def test_a_recording_is_imported(here, capsys):
    lay(here / "in", MADE["bamboo-spot"]())
    assert main(["trace", "import", "bamboo-spot", "in", "--out", "t"]) == 0
    said = capsys.readouterr().out
    assert "MIT" in said
    assert "Bamboo, NSDI'23" in said
    assert check_trace(here / "t") == {"runs": 1, "node_events": 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import", "nobody", "x", "--out", "t"], "No importer is called 'nobody': there are alibaba-pai-minibatch"),
        (["import", "bamboo-spot", "nowhere", "--out", "t"], "Cannot use nowhere: there is no such file"),
        (["import", "bamboo-spot", "bad-trace.csv", "--out", "t"], "bad-trace.csv, row 1, column 'event'"),
        (["show", "nowhere"], "Cannot read a trace from nowhere"),
        (["check", "."], "it has no trace.json and no tables"),
        (["convert", "nowhere", "--out", "t"], "Cannot convert nowhere: there is no such file"),
        (["convert", "bad-trace.csv", "--csv", "--out", "t"], "convert it to a trace first"),
        (["convert", "bad-trace.csv", "--out", "t"], "no table of a trace is called 'bad-trace'"),
        (["convert", "tiny.toml", "--out", "t"], "Cannot read tiny.toml: it is no exchange log"),
        (["record", "nowhere", "--out", "t"], "nowhere"),
        (["record", "tiny.toml", "--tuner", "nobody", "--out", "t"], "nobody"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_have_a_reason_and_write_nothing(words, said, here, capsys):
    (here / "bad-trace.csv").write_text("0,appear,node1\n")
    assert main(["trace", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(p.name for p in here.iterdir()) == ["bad-trace.csv", "tiny.toml"]


def test_sources_are_listed(capsys):
    assert main(["list", "sources"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(SOURCES)


@pytest.mark.parametrize("words", [[], ["record"], ["import"], ["fetch"], ["show"], ["check"], ["convert"]], ids=" ".join)
def test_help_fits_a_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["trace", *words, "--help"])
    assert ended.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
