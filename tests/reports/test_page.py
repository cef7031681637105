"""The page: well-formed, self-contained, escaped, and honest about what cannot be concluded."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from reports import conclusions, facts, page
from reports.conclusions import against_reference, headline, limits, tally
from reports.facts import target_of
from reports.page import write
from reports.tables import summary
from tests.support.made_up import SCENARIO_TEXT, contest, frames, from_times, score_row
from traces import store
from traces.schema import EVALUATIONS, SCORES, SETTINGS, VERSION

NAN, INF = math.nan, math.inf
VOID = {"meta", "br", "link", "img", "input", "hr"}
NASTY = "\u6f22<script>alert('x')</script>&\"\x1b[31m"


class WellFormed(HTMLParser):
    """Raises where tags do not nest, and collects ids, targets and headings."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.headings, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [v for k, v in given.items() if k in ("href", "src", "xlink:href")]
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag


def parsed(text):
    parser = WellFormed()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def whole():
    results = contest(scenarios=("away", "home"), tuners=("fixed", "rlp", "cruise", "best_fixed"), seeds=4)
    return page.page(results, {"home": SCENARIO_TEXT})


def test_every_public_name_exists():
    for module in (page, conclusions, facts):
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_page_is_well_formed_and_self_contained(whole):
    found = parsed(whole)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") for link in found.links)
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert "script" not in found.tags
    assert not re.search(r"url\((?!#)|@import", whole)


def test_headings_nest_and_every_figure_has_words(whole):
    found = parsed(whole)
    assert found.headings[0] == 1
    assert all(b - a <= 1 for a, b in zip(found.headings, found.headings[1:], strict=False))
    assert found.tags.count("svg") == found.tags.count("figcaption") == found.tags.count("figure")
    assert whole.count('role="img" aria-label="') == found.tags.count("svg")
    assert '<html lang="en">' in whole


def test_it_tells_what_was_run_and_with_which_version(whole):
    assert "Digits on ten nodes" in whole
    assert "validation accuracy at least 0.95" in whole
    assert f"Run by harness 0.1.0, results format {VERSION}" in whole
    assert "The scenario&#x27;s text is not in this folder" in whole or "The scenario's text is not in this folder" in whole


def test_failures_stand_with_their_reasons(whole):
    assert "ZeroDivisionError: division by zero" in whole
    assert "1 failed" in whole


def test_scenarios_are_ranked_together_when_there_are_several(whole):
    assert "All scenarios" in whole
    assert "not for scenarios that were not run" in whole
    one = page.page(contest(tuners=("fixed", "cruise"), seeds=2), {})
    assert "All scenarios" not in one


def test_what_comes_from_files_is_escaped():
    rows = [score_row("s" + NASTY, "x" + NASTY, i, 600.0, status="error", reason=NASTY) for i in range(2)]
    rows += [score_row("s" + NASTY, t, i, 9.0 + i) for i in range(2) for t in ("fixed", "y")]
    text = page.page(frames(rows), {"s" + NASTY: f'summary = "{NASTY[:26]}"\n# {NASTY}\n'})
    found = parsed(text)
    assert "script" not in found.tags
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "times",
    [
        {"lone": [3.0]},
        {"fixed": [NAN, NAN], "x": [NAN, NAN]},
        {"fixed": [INF] * 3, "x": [INF] * 3, "y": [INF] * 3},
        {"best_fixed": [4.0, 5.0]},
        {},
    ],
    ids=["one seed and tuner", "all failed", "all censored", "oracle only", "nothing"],
)
def test_poor_results_still_make_a_page(times):
    parsed(page.page(from_times(times), {}))


def test_missing_evaluations_are_said():
    assert "No run was evaluated" in page.page(from_times({"fixed": [1.0, 2.0], "x": [2.0, 3.0]}), {})


def test_write_reads_a_results_folder_and_leaves_one_page(tmp_path):
    results = contest(tuners=("fixed", "cruise"), seeds=2)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "digits.toml").write_text(SCENARIO_TEXT)
    (tmp_path / "manifest.json").write_text(json.dumps(results.manifest))
    for frame, name, schema in (
        (results.scores, "scores", SCORES),
        (results.evaluations, "evaluations", EVALUATIONS),
        (results.settings, "settings", SETTINGS),
    ):
        store.write(frame, tmp_path / f"{name}.parquet", schema)
    store.write_host(results.host, tmp_path / "host.csv")
    path = write(tmp_path)
    assert path == tmp_path / "report.html"
    first = path.read_bytes()
    assert b"Digits on ten nodes" in first
    assert write(tmp_path).read_bytes() == first


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Cannot read results"):
        write(tmp_path)


# ---------------------------------------------------------------------------------------------------------- conclusions


def test_overlap_is_no_ranking():
    rows = summary(from_times({"fixed": [10, 20, 30, 12], "x": [11, 19, 31, 11], "y": [10.5, 21, 29, 11.5]}))
    assert headline(rows).startswith("These runs do not show which tuner is faster.")


def test_too_few_seeds_are_no_ranking():
    assert "at least" in headline(summary(from_times({"fixed": [10.0], "x": [1.0], "y": [2.0]})))


def test_clear_differences_are_named():
    rows = summary(from_times({"fixed": [10 + i for i in range(9)], "x": [1 + i for i in range(9)]}))
    assert headline(rows) == "x ranks first; fixed ranks behind x (p = 0.004)."
    assert against_reference(rows)[0].startswith("Faster than fixed (whole interval below 1): x (")


def test_tuners_that_share_the_lead_are_named_together():
    times = {"fixed": [30 + i for i in range(12)], "x": [1 + i for i in range(12)], "y": [1 + (i ^ 1) for i in range(12)]}
    said = headline(summary(from_times(times)))
    assert said.startswith("x and y lead and are not ranked against each other; fixed ranks behind x (p ")


def test_one_tuner_is_no_comparison():
    assert "nothing is compared" in headline(summary(from_times({"fixed": [1.0, 2.0]})))


def test_the_reference_is_missed_when_it_is_missing():
    assert "was not run" in against_reference(summary(from_times({"x": [1.0], "y": [2.0]})))[0]


def test_an_interval_across_one_is_not_separable():
    rows = summary(from_times({"fixed": [10.0] * 5, "x": [9.0, 10, 11, 10, 11], "z": [20.0, 21, 22, 21, 21]}))
    slower, unclear = against_reference(rows)
    assert slower == "Slower than fixed (whole interval above 1): z (ratio 2.10, 2.00\u20132.20)."
    assert unclear == "No clear difference from fixed: x."


def test_four_seeds_conclude_nothing_against_the_reference():
    (said,) = against_reference(summary(from_times({"fixed": [10.0] * 4, "x": [1.0, 2, 1, 2]})))
    assert said == "No clear difference from fixed (fewer than five seeds cannot show one): x."


def test_a_tuner_that_always_failed_has_no_time_to_compare():
    said = against_reference(summary(from_times({"fixed": [10.0, 11], "x": [NAN, NAN]})))
    assert said == ["Every run failed: x."]


def test_runs_are_tallied():
    rows = summary(from_times({"fixed": [10.0, INF, NAN], "x": [1.0, 2.0, 3.0]}))
    assert tally(rows) == "4 of 6 runs reached the target, 1 ended without reaching it and 1 failed."


def test_limits_name_seeds_that_not_everybody_ran():
    rows = [score_row("s", "x", i, 10) for i in range(7)] + [score_row("s", "y", i, 20) for i in range(6)]
    said = " ".join(limits(summary(frames(rows))))
    assert "Only 6 of 7 seeds" in said
    assert "the range from the lowest" not in said


# ---------------------------------------------------------------------------------------------------------------- facts


def test_facts_are_lenient():
    assert facts.facts("not toml [") == [("summary", "")]
    assert facts.facts('target = 3\ncluster = "x"\nbudget = []') == [("summary", "")]
    assert target_of("target = 3") is None
    assert target_of('[target]\nmetric = "loss"\nvalue = "low"') is None


def test_facts_read_like_the_scenario():
    text = '[cluster]\nnodes = [{ type = "edge", count = 3 }]\n[workload]\nname = "svm"\nbatch = 4\n[free]\n'
    text += 'rate = { real = [0.1, 1.0], log = true }\npolicy = { choice = ["bsp", "asp"] }\n'
    text += '[target]\nmetric = "loss"\nvalue = 0.3\n[conditions]\nstagger = true\n'
    assert dict(facts.facts(text)) == {
        "summary": "",
        "cluster": "3 x edge",
        "job": "svm; batch = 4",
        "target": "validation loss at most 0.3",
        "free knobs": "rate 0.1 to 1.0 (logarithmic); policy of bsp, asp",
        "conditions": "stagger = true",
    }
    assert target_of(text) == ("loss", 0.3)
    timing = '[start]\nworkers = ["a", "b", "c", "d", "e", "f", "g"]\n[target]\nmetric = "clocks"\nvalue = 9\n'
    assert dict(facts.facts(timing))["start"] == "workers = a, b ... g (7)"
    assert dict(facts.facts(timing))["target"] == "9 pushes completed"
