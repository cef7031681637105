"""The page: well-formed, self-contained, escaped, and honest about what cannot be concluded."""

import base64
import io
import math
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import polars as pl
import pytest
from rich.console import Console

from harness.cli.results import conclude
from reports.output.terminal_table import notes
from reports.pages import facts, page
from reports.pages.facts import target_of
from reports.pages.page import write
from reports.verdicts import conclusions
from reports.verdicts import summary as verdicts
from reports.verdicts.conclusions import against_reference, answer, limits, tally
from reports.verdicts.summary import summary
from tests.support.made_up import SCENARIO_TEXT, contest, folder_of, frames, from_times, score_row
from traces.schema import NOT_APPLICABLE, SCORES, VERSION
from traces.store import Results

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
    return page.pages(results, {"home": SCENARIO_TEXT})


@pytest.fixture(scope="module")
def one(whole):
    return whole["pages/home.html"]


def test_every_public_name_exists():
    for module in (page, conclusions, facts):
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.slow
def test_cells_of_tables_break_where_the_page_is_wide_and_stay_lines_where_it_is_narrow(one):
    """The widest table, with costs, has fifteen columns; as lines, they are wider than the page's 1,176 pixels."""
    style = re.search(r"<style>(.*?)</style>", one, re.DOTALL)[1]
    wide, _, narrow = style.partition("@media (max-width: 40rem)")
    cells = re.compile(r"th, td \{([^}]*)\}")
    assert "nowrap" not in cells.search(wide)[1]
    assert "white-space: nowrap" in cells.search(narrow)[1]
    assert re.search(r"\.wide \{ overflow-x: auto; \}", wide)  # a narrow page scrolls its tables


def test_pages_are_well_formed_and_self_contained(whole):
    assert set(whole) == {"report.html", "pages/away.html", "pages/home.html"}
    for name, text in whole.items():
        found = parsed(text)
        assert len(found.ids) == len(set(found.ids))
        inside = {link[1:] for link in found.links if link.startswith("#")}
        assert inside <= set(found.ids)
        assert not [link for link in found.links if "//" in link]  # nothing is fetched
        assert not re.search(r"url\((?!#)|@import|fetch\(", text)
        others = {link for link in found.links if link.endswith(".html")}
        assert others == ({"../report.html"} if "/" in name else set(whole) - {name})


def test_headings_nest_and_every_figure_has_words_and_numbers(whole):
    for text in whole.values():
        found = parsed(text)
        assert found.headings[0] == 1
        assert all(b - a <= 1 for a, b in zip(found.headings, found.headings[1:], strict=False))
        assert found.tags.count("svg") == found.tags.count("figcaption") == found.tags.count("figure")
        assert text.count('role="img" aria-label="') == found.tags.count("svg")
        assert '<html lang="en">' in text
        for name in re.findall(r'data-csv="([^"]+)"', text):
            packed = re.search(rf'id="csv-{re.escape(name)}">([^<]+)<', text)[1]
            assert zlib.decompress(base64.b64decode(packed)).count(b"\n") > 1
        assert text.count("data-csv=") == found.tags.count("svg")


def test_an_overview_answers_each_family_before_its_tables_and_tells_what_tuners_spend():
    names = tuple(f"{family}-v1-{i:04}" for family in ("learning", "mixed") for i in range(3))
    results = contest(scenarios=names, tuners=("fixed", "cruise", "tpe"), seeds=2)
    text = page.pages(results, {}, only_overview=True)["report.html"]
    found = parsed(text)
    assert {"#family-learning", "#family-mixed"} <= set(found.links)
    assert {"family-learning", "family-mixed"} <= set(found.ids)
    assert "the whole of training, from a poor start" in text
    head, _, rest = text.partition('<h2 id="families">')
    assert head.count('<p class="answer">') == 1
    assert rest.index("over 3 arenas of the family mixed") < rest.index('<table class="sortable">')
    spent = results.scores.filter(pl.col("tuner") == "tpe")
    share = (spent["overhead_seconds"] / spent["completion_seconds"]).mean()
    assert re.search(rf'<th scope="row">tpe</th>.*?<td data-value="{share:.6f}\d*">{share:.0%}<', rest, re.DOTALL)


def test_a_tuner_that_failed_in_every_arena_is_on_the_overview():
    rows = [score_row(name, "fixed", 0, 9.0) for name in ("a", "b")]
    rows += [score_row(name, "broken", 0, 600.0, status="error", reason="it broke") for name in ("a", "b")]
    text = page.pages(frames(rows), {}, only_overview=True)["report.html"]
    assert re.search(r'<th scope="row">broken</th>.*?2 failed.*?<td>-<', text, re.DOTALL)


def test_it_tells_what_was_run_and_with_which_version(whole, one):
    assert "Digits on ten nodes" in one
    assert "validation accuracy at least 0.95" in one
    assert f"Run by harness 0.1.0, results format {VERSION}" in one
    assert "text is not in this folder" in whole["pages/away.html"]


def test_the_answer_comes_first(whole, one):
    for text in whole.values():
        body = text[text.index("<h1>") :]
        assert body.index('<p class="answer">') < body.index("<table")
    assert re.search(r'<p class="answer">\s*Use <strong>cruise</strong>: \d+ s, 0\.\d\dx of fixed', one)


def test_failures_stand_with_their_reasons(one):
    assert "ZeroDivisionError: division by zero" in one
    assert "1 failed" in one


def test_every_number_can_be_followed_to_its_runs(one):
    assert 'href="#runs"' in one
    assert [link for link in parsed(one).links if link == "../runs/home/cruise/3/score.json"]
    alone = page.pages(contest(tuners=("fixed", "cruise"), seeds=2), {}, with_files=False)["report.html"]
    assert not [link for link in parsed(alone).links if "runs/" in link]


def test_machines_stand_beside_host_seconds_and_the_oracle_says_what_it_saw():
    plain = contest(tuners=("fixed", "cruise", "best_fixed"), seeds=2)
    text = page.pages(plain, {})["report.html"]
    assert "Host seconds were measured on a machine, 2 cores." in text
    assert "machine 2" not in text
    other = plain.host.with_columns(machine=pl.when(pl.col("seed") == 1).then(pl.lit("b, 4 cores")).otherwise("machine"))
    seen = {"digits": {"best_fixed": {"settings": 47, "best": "best_fixed+0a1b2c3d"}}}
    both = page.pages(replace(plain, host=other, oracles=seen), {})["report.html"]
    assert "machine 1: a machine, 2 cores;" in both
    assert "machine 2: b, 4 cores." in both
    assert both.count("<small>machine 2</small>") == 3
    assert "those of the best of 47 fixed settings that" in both
    seen["digits"]["best_fixed"]["settings"] = 1
    assert "those of the best of 1 fixed setting that" in page.pages(replace(plain, oracles=seen), {})["report.html"]
    assert 'href="runs/digits/best_fixed%2B0a1b2c3d/0/score.json"' in both


def test_of_every_run_the_time_is_a_bound_where_it_missed_its_target_and_none_where_it_failed():
    results = from_times({"fixed": [200.0, 210.0], "x": [INF, NAN]})
    short = results.host.with_columns(thinking_seconds=pl.lit(7.5e-5))
    text = page.pages(replace(results, host=short), {})["report.html"]
    runs = text.partition('<h2 id="runs">')[2].split("<summary>")
    cells = {}  # by tuner and seed: time, changes, overhead, trials, pushes, ...
    for tuner in ("fixed", "x"):
        mine = next(part for part in runs if part.startswith(f"{tuner}: ")).partition("<tbody>")[2]
        cells[tuner] = [re.findall(r"<td[^>]*>([^<]*)", row) for row in mine.split("</tr>")[:-1]]
    assert [row[0] for row in cells["fixed"]] == ["200", "210"]
    assert [row[0] for row in cells["x"]] == ["&gt;\u00a0600", "-"]
    changes, pushes, thinking = (cells["fixed"][0][i] for i in (1, 4, 9))
    assert changes.isdecimal()
    assert pushes.isdecimal()
    assert thinking == "&lt; 0.001"


def test_one_scenario_is_one_page():
    assert set(page.pages(contest(tuners=("fixed", "cruise"), seeds=2), {})) == {"report.html"}


@pytest.mark.slow
def test_a_tuner_that_does_nothing_changes_no_other_line():
    tuners = ("fixed", "cruise", "tpe", "best_fixed")
    plain = contest(tuners=tuners, seeds=4)
    copies = [f.filter(pl.col("tuner") == "fixed").with_columns(tuner=pl.lit("idle")) for f in
              (plain.scores, plain.evaluations, plain.settings, plain.host)]  # fmt: skip
    frames_ = [pl.concat(p) for p in zip((plain.scores, plain.evaluations, plain.settings, plain.host), copies, strict=True)]
    manifest = plain.manifest | {"tuners": [*tuners, "idle"]}
    before = page.pages(plain, {"digits": SCENARIO_TEXT})["report.html"]
    after = page.pages(Results(manifest, *frames_), {"digits": SCENARIO_TEXT})["report.html"]
    # What is new: the line that names it, and its own runs in the list of all runs.
    cut = after.replace('<p class="note">Same runs as fixed, which changes nothing: idle.</p>\n', "")
    runs = re.compile(r'<details id="runs-\d+"><summary>(\S+): .*?</details>\n', re.DOTALL)
    assert [m[1] for m in runs.finditer(after)] == sorted([*tuners, "idle"])
    assert runs.sub("", cut) == runs.sub("", before)
    kept = [re.sub(r"runs-\d+", "", m[0]) for m in runs.finditer(after) if m[1] != "idle"]
    assert kept == [re.sub(r"runs-\d+", "", m[0]) for m in runs.finditer(before)]


def test_a_tuner_with_nothing_to_tune_is_named_with_its_reason():
    plain = contest(tuners=("fixed", "cruise"), seeds=2)
    rows = [score_row("digits", "asp", i, 1.0, status=NOT_APPLICABLE, reason="The policy is held.") for i in range(2)]
    text = page.pages(replace(plain, not_applicable=pl.DataFrame(rows, schema=SCORES)), {})["report.html"]
    assert "Not applicable, and not run: asp. The policy is held." in text


def test_where_nobody_has_anything_to_tune_the_page_says_so():
    rows = [score_row("digits", "asp", 0, 1.0, status=NOT_APPLICABLE, reason="The policy is held.")]
    text = page.pages(replace(from_times({}), not_applicable=pl.DataFrame(rows, schema=SCORES)), {})["report.html"]
    assert "<h1>No tuner has anything to tune here</h1>" in text
    assert "not applicable, and not run: asp (The policy is held)" in text
    assert "No run is in this folder" not in text


def test_before_the_first_run_the_page_says_so():
    text = page.pages(from_times({}), {})["report.html"]
    assert "<h1>No run yet</h1>" in text
    assert "No run is in this folder yet." in text


def test_runs_that_are_missing_are_named_on_the_first_page_and_on_their_scenario_s():
    half = contest(scenarios=("s", "t"), tuners=("fixed", "cruise"), seeds=2)
    half = replace(half, manifest=half.manifest | {"scenarios": ["s", "t", "u"], "seeds_of": {"s": 2, "t": 3, "u": 1}})
    made = page.pages(half, {})
    lacks = {
        "t": "t: 2 of 6 runs are missing: cruise and fixed (seed 2).",
        "u": "u: 2 of 2 runs are missing: cruise and fixed (seed 0).",
    }
    assert [lacks["t"] in made[name] for name in ("report.html", "pages/s.html", "pages/t.html")] == [True, False, True]
    assert [lacks["u"] in made[name] for name in ("report.html", "pages/s.html", "pages/t.html")] == [True, False, False]
    alone = contest(tuners=("fixed",), seeds=1)
    alone = replace(alone, manifest=alone.manifest | {"seeds_of": {"digits": 1, "u": 1}})
    assert "u: 1 of 1 runs is missing: fixed (seed 0)." in page.pages(alone, {})["report.html"]


def test_what_comes_from_files_is_escaped():
    rows = [score_row("s" + NASTY, "x" + NASTY, i, 600.0, status="error", reason=NASTY) for i in range(2)]
    rows += [score_row("s" + NASTY, t, i, 9.0 + i) for i in range(2) for t in ("fixed", "y")]
    made = page.pages(frames(rows), {"s" + NASTY: f'summary = "{NASTY[:26]}"\n# {NASTY}\n'})
    for text in made.values():
        parsed(text)
        assert "<script>alert" not in text
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
    for text in page.pages(from_times(times), {}).values():
        parsed(text)


def test_missing_evaluations_are_said():
    assert "No run was evaluated" in page.pages(from_times({"fixed": [1.0, 2.0], "x": [2.0, 3.0]}), {})["report.html"]


@pytest.fixture
def stored(tmp_path):
    """A results folder."""
    return folder_of(contest(tuners=("fixed", "cruise"), seeds=2), tmp_path / "results")


def test_write_reads_a_results_folder_and_leaves_one_page(stored):
    path = write(stored)
    assert path == stored / "report.html"
    first = path.read_bytes()
    assert b"Digits on ten nodes" in first
    assert write(stored).read_bytes() == first


@pytest.mark.slow
def test_a_command_summarises_the_runs_once_for_the_terminal_and_the_pages(stored, monkeypatch):
    first, made = write(stored).read_bytes(), []
    monkeypatch.setattr(verdicts, "compared", lambda runs, of=verdicts.compared: made.append(runs) or of(runs))
    conclude(stored, Console(file=io.StringIO(), width=100))
    assert len(made) == 1
    assert (stored / "report.html").read_bytes() == first


def test_what_is_printed_of_a_folder_is_its_name(stored):
    """Rich would read a word in brackets as markup, and one between colons as emoji."""
    folder = stored.rename(stored.parent / "mine [bold] :+1:")
    conclude(folder, Console(file=(said := io.StringIO()), width=100))
    assert f"The page: {folder / 'report.html'}\n" in said.getvalue()


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Cannot read results"):
        write(tmp_path)


# ---------------------------------------------------------------------------------------------------------- conclusions


def test_the_first_line_names_tuner_time_ratio_costs_oracle_and_who_is_close():
    rows = [score_row("s", "asp", i, 40 + i, reconfigurations=1, overhead_seconds=2.0) for i in range(6)]
    rows += [score_row("s", "near", i, 41 + 3 * (i % 2), clocks=1) for i in range(6)]
    rows += [score_row("s", "fixed", i, 100 + 2 * i) for i in range(6)]
    rows += [score_row("s", "best_fixed", i, 20 + i / 2) for i in range(6)]
    said = answer(summary(frames(rows)))
    assert said.tuner == "asp"
    assert str(said) == (
        "Use asp: 42.5 s, 0.40x of fixed (0.40\u20130.41), 1 change, 2.00 s overhead; oracle 21.2 s. "
        "Not told apart from it: near."
    )


def test_of_others_that_are_told_apart_fixed_is_excepted_where_it_is_not():
    times = {"fixed": [10, 20, 30, 12], "x": [11, 19, 29, 11], "slow": [50, 102, 150, 60]}
    said = str(answer(summary(from_times(times))))
    assert said.startswith("No tuner is told to be faster than fixed. The least mean time has x: ")
    assert " All others but fixed are told apart from it. 4 seeds tell only" in said


def test_a_leader_that_fixed_may_equal_is_no_advice():
    said = str(answer(summary(from_times({"fixed": [10, 20, 30, 12], "x": [11, 19, 29, 11]}))))
    assert said.startswith("No tuner is told apart from fixed. The least mean time has x: ")
    assert said.endswith(" 4 seeds tell only large, steady differences apart; give six.")


def test_the_first_line_denies_no_difference_to_fixed_that_the_next_lines_tell():
    """A tuner that is slower for certain, and one that is faster for certain while another has the least mean."""
    fixed, varied = [10.0, 10.1, 9.9, 10, 10.1, 9.9], [2.0, 2.1, 12, 12.1, 2.2, 12.2]
    slower = {"fixed": fixed, "x": varied, "slow": [2 * t for t in fixed]}
    said = str(answer(summary(from_times(slower))))
    assert said.startswith("No tuner is told to be faster than fixed. The least mean time has x: ")
    assert against_reference(summary(from_times(slower)))[0].startswith("Slower than fixed: slow ")
    steady = {"fixed": fixed, "x": varied, "steady": [0.9 * t for t in fixed]}
    said = str(answer(summary(from_times(steady))))
    assert said.startswith("Faster than fixed: steady. The least mean time has x: ")
    assert "Not told apart from it: steady, fixed." in said


def test_fixed_can_be_the_answer():
    said = str(answer(summary(from_times({"fixed": [10, 20, 30, 12], "x": [20, 41, 60, 25]}))))
    assert said == "Keep fixed: 16.0 s, 0 changes, 0 s overhead. No tuner is faster. All others are told apart from it."


def test_few_seeds_and_no_finished_run_are_no_answer():
    assert "Fewer than three seeds tell nothing apart" in str(answer(summary(from_times({"fixed": [10.0], "x": [1.0]}))))
    assert str(answer(summary(from_times({"fixed": [INF] * 3, "x": [INF, INF, NAN]})))) == (
        "No tuner reached the target within 600 s in any run."
    )
    dear = [
        score_row("s", t, i, INF, usd=0.4 + i, budget_usd=0.05, clocks=c) for t, c in (("x", 1), ("y", 2)) for i in (0, 1)
    ]
    assert str(answer(summary(frames(dear)))) == "No tuner reached the target within 600 s and 0.05 USD in any run."
    failing = [score_row("s", t, i, 50 + i, status="error" if i else None) for t in "xy" for i in (0, 1)]
    assert str(answer(summary(frames(failing)))) == (
        "No tuner reached the target within 600 s in any run without failing in another."
    )
    # The oracle is chosen in hindsight: that it reached the target once says nothing of a tuner.
    assert str(answer(summary(from_times({"fixed": [INF] * 2, "x": [INF, NAN], "best_fixed": [500, INF]})))) == (
        "No tuner reached the target within 600 s in any run."
    )


def test_one_kind_of_run_that_missed_its_target_or_failed_is_said_to_have():
    missed = "No tuner reached the target within 600 s in any run."
    assert str(answer(summary(from_times({"fixed": [INF] * 3, "x": [INF] * 3})))) == missed
    assert str(answer(summary(from_times({"x": [INF] * 3})))) == missed
    assert (
        str(answer(summary(from_times({"fixed": [NAN] * 3, "x": [NAN] * 3})))) == "Every run failed, so nothing can be said."
    )


def test_ratios_of_costs_are_called_that():
    rows = [
        score_row("s", t, i, 100.0 + i, minimise="usd", usd=cost * (1 + 0.01 * i), budget_usd=9.0, clocks=int(cost))
        for t, cost in (("fixed", 4.0), ("cheap", 1.0))
        for i in range(5)
    ]
    assert "1.02 USD in 102 s, 0.25x of the cost of fixed" in str(answer(summary(frames(rows))))


def test_a_tuner_whose_runs_failed_has_no_unit_without_a_number():
    assert "- MB" not in page.pages(from_times({"fixed": [1.0, 2.0], "x": [NAN, NAN]}), {})["report.html"]


def test_one_tuner_is_no_comparison():
    said = str(answer(summary(from_times({"fixed": [1.0, 2.0]}))))
    assert said == "fixed: 1.50 s, 0 changes, 0 s overhead. Nothing is compared: there is only one kind of run."


def test_seconds_are_called_simulated_where_they_are():
    results = contest(tuners=("fixed", "cruise"), seeds=2)
    live = replace(results, manifest={**results.manifest, "system": "live"})
    said, real = (
        page.pages(each, {"digits": SCENARIO_TEXT})["report.html"].partition("The scenario")[0] for each in (results, live)
    )
    assert "Seconds are simulated." in said
    assert "simulated seconds" in said  # of the drawings
    assert "real" not in said
    assert "The jobs ran on real processes" in real
    assert "simulated" not in real


def test_a_tuner_alone_has_the_overhead_that_it_caused():
    rows = [score_row("digits", "x", i, 100.0, overhead_seconds=spent) for i, spent in enumerate((0.0, 3.0))]
    sentence = "No tuner caused overhead or trials."
    assert sentence not in page.pages(frames(rows), {})["report.html"]
    assert sentence in page.pages(from_times({"x": [100.0, 90.0]}), {})["report.html"]


def test_the_reference_is_missed_when_it_is_missing():
    assert "was not run" in against_reference(summary(from_times({"x": [1.0], "y": [2.0]})))[0]


def test_faster_slower_and_not_told_apart_are_told_from_the_reference():
    rows = summary(from_times({"fixed": [10.0] * 5, "x": [9.0, 10, 11, 10, 11], "z": [20.0, 21, 22, 21, 21]}))
    slower, unclear = against_reference(rows)
    assert slower == "Slower than fixed: z (2.10, 2.00\u20132.20)."
    assert unclear == "Not told apart from fixed: x (1.00, 0.90\u20131.10)."


def test_two_seeds_conclude_nothing_against_the_reference():
    (said,) = against_reference(summary(from_times({"fixed": [10.0] * 2, "x": [1.0, 2]})))
    assert said == "Not told apart from fixed (fewer than three seeds tell nothing apart): x (0.15, 0.10\u20130.20)."


def test_a_tuner_that_always_failed_has_no_time_to_compare():
    said = against_reference(summary(from_times({"fixed": [10.0, 11], "x": [NAN, NAN]})))
    assert said == ["Every run failed: x."]


def test_runs_are_tallied():
    rows = summary(from_times({"fixed": [10.0, INF, NAN], "x": [1.0, 2.0, 3.0]}))
    assert tally(rows) == "4 of 6 runs reached the target, 1 ended without reaching it and 1 failed."


def test_runs_that_ended_early_are_counted_with_the_cause():
    ends = ["deadlock", "deadlock", "diverged"]
    rows = summary(
        frames([score_row("s", t, i, INF, status=e, clocks=c) for c, t in enumerate("xy") for i, e in enumerate(ends)])
    )
    assert tally(rows) == (
        "0 of 6 runs reached the target and 6 ended without reaching it (in 2, the loss was no longer finite; in 4, no "
        "worker was left that could push)."
    )
    assert {"Diverged: x (1 of 3), y (1 of 3).", "No worker was left that could push: x (2 of 3), y (2 of 3)."} <= {
        *notes(rows)
    }


def test_limits_name_seeds_that_not_everybody_ran():
    rows = [score_row("s", "x", i, 10) for i in range(7)] + [score_row("s", "y", i, 20) for i in range(6)]
    said = " ".join(limits(summary(frames(rows))))
    assert "only 6 of 7 seeds" in said
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
    assert dict(facts.facts(text.replace("svm", "digits-svm").replace("batch = 4\n", "")))["known of this data"] == (
        "linear: accuracy 0.953 (logistic regression, measured); "
        "best known: accuracy 0.986 (support vector machine, Gaussian kernel, C 10, measured)"
    )
    timing = '[start]\nworkers = ["a", "b", "c", "d", "e", "f", "g"]\n[target]\nmetric = "clocks"\nvalue = 9\n'
    assert dict(facts.facts(timing))["start"] == "workers = a, b ... g (7)"
    assert dict(facts.facts(timing))["target"] == "9 pushes completed"
