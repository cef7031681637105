"""Claims: the verdict that follows from a published and a measured figure, the table, the page and the command."""

from __future__ import annotations

import math

import polars as pl
import pytest

from harness.cli.main import main
from harness.cli.reproduce import NAMES
from reports.papers import mltuner_runs
from reports.papers.claims import COLUMNS, Claim, frame, headline, shown
from reports.papers.mltuner_runs import RunResult
from reports.papers.reproduce import PAPERS, Paper, Scale, page


def claim(published, measured, low=math.nan, high=math.nan, kind="value", **more):
    given = {"where": "Fig. 1", "what": "x", "unit": "s"} | more
    return Claim(published=published, measured=measured, low=low, high=high, kind=kind, **given)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (claim(10.0, 10.9), "reproduced"),
        (claim(10.0, 11.5), "in part"),
        (claim(10.0, 11.5, 9.0, 14.0), "reproduced"),
        (claim(10.0, 5.1), "in part"),
        (claim(10.0, 4.9), "refuted"),
        (claim(0.2, 0.0), "refuted"),
        (claim(0.2, -0.2), "refuted"),
        (claim(2.0, math.nan), "cannot be told"),
        (claim(2.0, 1.9, 1.5, 2.2, "gain"), "reproduced"),
        (claim(2.0, 1.5, 1.2, 1.7, "gain"), "in part"),
        (claim(2.0, 3.0, 2.5, 3.5, "gain"), "reproduced"),
        (claim(2.0, 1.5, 1.2, math.inf, "gain"), "in part"),
        (claim(2.0, 1.5, 0.9, 2.1, "gain"), "cannot be told"),
        (claim(2.0, 0.8, 0.7, 0.9, "gain"), "refuted"),
        (claim(2.0, 1.4, kind="gain"), "in part"),
        (claim(0.2, 0.1, kind="limit"), "reproduced"),
        (claim(0.2, 0.21, kind="limit"), "reproduced"),
        (claim(0.2, 0.3, kind="limit"), "in part"),
        (claim(0.2, 0.5, kind="limit"), "refuted"),
        (claim(2.0, 2.1, kind="fitted"), "fitted"),
        (claim(2.0, 1.0, kind="fitted"), "missed although fitted"),
    ],
)
def test_the_verdict_follows_by_rule(made, verdict):
    assert made.verdict == verdict


def test_the_table_has_a_row_per_claim_and_the_headline_counts_them():
    claims = [claim(10.0, 10.5), claim(10.0, 30.0), claim(10.0, 10.0, kind="fitted")]
    table = frame(claims)
    assert table.schema == pl.Schema(COLUMNS)
    assert table["verdict"].to_list() == ["reproduced", "refuted", "fitted"]
    assert headline(claims) == "3 figures: 1 reproduced, 1 refuted, 1 fitted."
    assert shown(1.5, 1.25, 2.0) == "1.50 (1.25\u20132.00)"
    assert shown(math.nan) == "-"


def test_the_page_shows_each_figure_once_and_is_repeatable():
    claims = [claim(10.0, 10.5, what="<a>"), claim(10.0, 30.0, what="b"), claim(1.0, 1.0, where="Table 2", what="c")]
    text = page("cruise", claims, 5)
    assert text == page("cruise", claims, 5)
    assert "&lt;a&gt;" in text
    assert "<a>" not in text
    assert text.count("<svg") == 1  # a single figure has no drawing
    assert "harness reproduce cruise --seeds 5" in text


def test_values_far_apart_are_drawn_with_plain_numbers():
    text = page("cruise", [claim(0.01, 0.02, what="a"), claim(10.0, 30.0, what="b")], 5)
    assert "mathdefault" not in text
    assert ">0.1<" in text


def test_the_command_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    asked = []

    def claims(wanted):
        asked.append(wanted.seeds)
        yield claim(10.0, 10.5)

    monkeypatch.setitem(PAPERS, "rlp", Paper("A paper", claims, 1.0))
    assert main(["reproduce", "rlp", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert asked == [2]
    assert "1 figure: 1 reproduced." in capsys.readouterr().out
    assert pl.read_csv(tmp_path / "rlp.csv")["verdict"].to_list() == ["reproduced"]
    assert "A paper" in (tmp_path / "rlp.html").read_text("utf-8")


def test_mltuner_plays_in_both_forms(tmp_path, monkeypatch):
    """Seconds to the target: 100 as printed, 40 in our form. Of trials: 60 and 10; with twice the tunables 90 and 20."""
    asked = []

    class PretendLab:
        def __init__(self, kept):
            assert kept.parent == tmp_path

        def each(self, case, seeds):
            asked.append(case)
            options = case.tuner.partition("[")[2]
            of_four, of_eight, ended = (60.0, 90.0, 100.0) if "as_printed" in options else (10.0, 20.0, 40.0)
            search = of_eight if "copies=2" in options else of_four
            ended = {"hyperband": 300.0, "spearmint": 200.0}.get(case.tuner, ended)
            curve, phases = [(ended, 0.99)], [("search 1", search, 5), ("training", ended, 0)]
            made = {"curve": curve, "epochs": curve, "phases": phases, "trial_seconds": search, "trials": 5}
            run = RunResult(budget=1e4, ended=ended, finished=ended, **made)
            return [run] * seeds

    monkeypatch.setattr(mltuner_runs, "Lab", PretendLab)
    found = {c.what: c for c in PAPERS["mltuner"].claims(Scale(3, tmp_path))}
    assert {c.tuner for c in asked} >= {"mltuner", "mltuner[copies=2]", "mltuner[as_printed=true]"}
    rivals = {what.partition(" over MLtuner, ")[::2]: c.measured for what, c in found.items() if c.where == "Sec. 5.2"}
    assert rivals == {
        ("small CNN, hyperband", "as printed"): 3.0,
        ("small CNN, hyperband", "our form"): 7.5,
        ("small CNN, spearmint", "as printed"): 2.0,
        ("small CNN, spearmint", "our form"): 5.0,
    }
    assert found["8 tunables over 4, as printed"].measured == pytest.approx(1.5)
    assert found["8 tunables over 4, our form"].measured == pytest.approx(2.0)
    assert sum(c.where == "Fig. 9" for c in found.values()) == 3


def test_an_unknown_paper_and_no_seeds_are_refused(tmp_path, capsys):
    assert tuple(PAPERS) == NAMES
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "cruis", "--out", str(tmp_path / "x")])
    assert ended.value.code == 2
    assert "did you mean cruise?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "cruise", "--seeds", "0", "--out", str(tmp_path / "x")])
    assert ended.value.code == 2
    assert "--seeds '0': give a whole number, 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
