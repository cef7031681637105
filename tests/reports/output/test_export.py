"""Files for other programs, and the published site: whole, repeatable, and nothing written for bad input."""

import re
from dataclasses import replace

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from reports.output import export, site
from reports.output.export import markdown, write_csv, write_figures, write_markdown
from reports.output.site import publish
from reports.verdicts.summary import summary
from tests.support.folders import contents
from tests.support.made_up import contest, folder_of, from_times
from traces import store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    results = contest(scenarios=("away", "home"), tuners=("fixed", "cruise", "best_fixed"), seeds=3)
    return folder_of(results, tmp_path_factory.mktemp("results") / "r")


def test_every_public_name_exists():
    assert all(hasattr(module, name) for module in (export, site) for name in module.__all__)


def test_tables_and_the_numbers_of_all_figures_are_csv(folder):
    found = contents(write_csv(folder))
    assert {"summary.csv", "scores.csv", "arenas.csv", "home/time-split.csv", "home/progress-accuracy.csv"} <= set(found)
    assert {"all-means.csv", "all-regret.csv", "all-profile.csv", "home/settings-cruise.csv"} <= set(found)
    frame = pl.read_csv(found["home/completion-times.csv"])
    assert frame.columns == ["tuner", "seed", "status", "completion_seconds", "budget_seconds"]
    assert frame.height == 9


@pytest.mark.slow
def test_tables_are_the_same_bytes_again(folder):
    assert contents(write_csv(folder)) == contents(write_csv(folder))


def check_figures(found, kind, start):
    mine = {name: data for name, data in found.items() if name.endswith(kind)}
    assert any(name.endswith(f"progress-accuracy.{kind}") for name in mine)
    assert all(data.startswith(start) for data in mine.values())


@pytest.mark.slow
def test_figures_are_files_and_the_same_bytes_again(folder):
    found = contents(write_figures(folder, "svg"))
    check_figures(found, "svg", b"<svg")
    assert contents(write_figures(folder, "svg")) == found


@pytest.mark.slow
def test_figures_are_files_of_another_kind(tmp_path):
    """A PDF is drawn in four times the time of an SVG; `test_figures.py` draws one twice."""
    one = folder_of(contest(scenarios=("home",), tuners=("fixed", "cruise"), seeds=2), tmp_path / "r")
    check_figures(contents(write_figures(one, "pdf")), "pdf", b"%PDF")


def test_another_kind_of_figure_is_refused(folder):
    with pytest.raises(ValueError, match="Cannot write figures as 'gif': there are svg, pdf"):
        write_figures(folder, "gif")


def test_markdown_begins_with_the_answer(folder):
    text = write_markdown(folder).read_text()
    assert re.search(r"## home\n\nUse \*\*cruise\*\*: \d+ s, ", text)
    assert text.startswith("## All scenarios\n\n")
    assert all(line.count("|") == 10 for line in text.splitlines() if line.startswith("| cruise | 1"))


def test_of_one_arena_there_is_no_interval():
    results = contest(scenarios=("a", "b"), tuners=("fixed", "cruise", "tpe"), seeds=2)
    played = (pl.col("tuner") != "tpe") | (pl.col("scenario") == "a")
    text = markdown(replace(results, scores=results.scores.filter(played)))
    assert re.search(r"\| cruise \| 2 \| \d\.\d+ \(\d\.\d+\u2013\d\.\d+\) \|", text)
    assert re.search(r"\| tpe \| 1 \| \d\.\d+ \|", text)


def test_names_are_no_markdown():
    text = markdown(from_times({"fixed": [5.0, 6, 7], "a|b*c_": [3.0, 4, 5], "<b>": [9.0, 8, 9]}))
    assert "a\\|b\\*c\\_" in text
    assert "\\<b>" in text


def test_a_site_has_pages_and_tables_and_refers_to_no_run(folder, tmp_path):
    first = publish(folder, tmp_path / "site")
    assert first == tmp_path / "site" / "index.html"
    found = contents(tmp_path / "site")
    assert {"index.html", "pages/home.html", "pages/away.html", "tables/scores.parquet", "report.md"} <= set(found)
    assert b"runs/" not in found["pages/home.html"]
    assert b'href="../index.html"' in found["pages/home.html"]
    assert publish(folder, tmp_path / "again").is_file()
    assert contents(tmp_path / "again") == found


def test_an_overview_alone_links_to_no_page_and_sums_the_hosts_times(folder, tmp_path):
    publish(folder, tmp_path / "site", only_overview=True)
    found = contents(tmp_path / "site")
    assert not [
        name for name in found if name.startswith("pages/") or name.endswith(("evaluations.parquet", "settings.parquet"))
    ]
    assert b"pages/" not in found["index.html"]
    assert b">home</th>" in found["index.html"]
    scores = store.load_results(folder).scores
    hosts = pl.read_csv(tmp_path / "site" / "tables" / "host.csv")
    assert hosts["runs"].sum() == scores.height
    assert hosts["tuner"].n_unique() == scores["tuner"].n_unique() == hosts.height
    table = summary(store.load_results(folder))
    assert_frame_equal(store.read(tmp_path / "site" / "tables" / "summary.parquet", table.schema), table)


def test_an_unfinished_comparison_is_not_published(folder, tmp_path):
    results = store.load_results(folder)
    fewer = replace(results, scores=results.scores.filter((pl.col("tuner") != "cruise") | (pl.col("seed") != 2)))
    cut = folder_of(fewer, tmp_path / "cut")
    with pytest.raises(ValueError, match=r"it is unfinished; there is no run of cruise on away with seed 2\."):
        publish(cut, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_site_is_not_written_over_another(folder, tmp_path):
    (tmp_path / "site").mkdir()
    with pytest.raises(ValueError, match="it is there already"):
        publish(folder, tmp_path / "site")
    assert list((tmp_path / "site").iterdir()) == []
    with pytest.raises(ValueError, match="Cannot read results"):
        publish(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()
