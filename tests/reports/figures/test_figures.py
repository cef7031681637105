"""Figures: whole SVG that fits into a page, the same bytes every time, and drawn from the right numbers."""

import math
import re
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text

from reports.figures import across, completion, costs, drawing, knobs
from reports.figures import progress as progress_module
from reports.figures import settings_over_time as settings_module
from reports.figures.across import heat_map, mean_ratios, performance
from reports.figures.completion import completion_times
from reports.figures.costs import pareto, split_of, time_split
from reports.figures.drawing import ORANGE, pdf
from reports.figures.knobs import knob_values, lanes
from reports.figures.progress import learning_curves, median_curve, progress
from reports.figures.settings_over_time import settings_over_time, unmoved
from reports.verdicts.arenas import arenas_of
from reports.verdicts.summary import summary
from tests.support.made_up import START, contest, frames, from_times, score_row
from traces.schema import setting_text

TUNERS = ("fixed", "tpe", "cruise")


@pytest.fixture(scope="module")
def results():
    return contest(tuners=TUNERS, seeds=3)


def of(frame, tuner):
    return frame.filter(pl.col("tuner") == tuner)


def settings_frame(changes):
    """`changes` by seed: lists of (seconds, setting)."""
    rows = [
        {"scenario": "s", "tuner": "x", "seed": seed, "seconds": float(at), "setting": setting_text(x)}
        for seed, run in changes.items()
        for at, x in run
    ]
    return frames([], settings=rows).settings


def drawings(results):
    names = list(TUNERS)
    return [
        completion_times(summary(results), results.scores, "a"),
        learning_curves(results.evaluations, names, "accuracy", "b", 0.95),
        learning_curves(results.evaluations, names, "loss", "c"),
        settings_over_time(of(results.settings, "tpe"), of(results.scores, "tpe"), "d"),
        progress(results.evaluations, results.settings, results.scores, summary(results), "accuracy", "e", 0.95),
        time_split(summary(results), results.scores, "f"),
    ]


@pytest.fixture(scope="module")
def drawn(results):
    return drawings(results)


def test_every_public_name_exists():
    for module in (across, completion, costs, drawing, knobs, progress_module, settings_module):
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_an_svg_has_no_needless_bytes(drawn):
    """They are most of a page's."""
    for figure in drawn:
        assert "<g>" not in figure.svg
        assert "\n " not in figure.svg
        assert not re.search(r' [xyd]="[^"]*\.\d{3,}', figure.svg)
        assert figure.svg.count("<g ") == figure.svg.count("</g>")


def test_only_lines_that_follow_a_move_or_a_line_lose_their_letters():
    with drawing.canvas(2.0, left=0.5) as figure:
        curve = [(0, 0), (1, 2), (3, 2), (4, 0), (5, 1), (6, 0), (7, 0)]
        codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
        axes = figure.subplots()
        axes.add_patch(PathPatch(Path(curve, codes)))
        axes.set(xlim=(0, 7), ylim=(0, 2))
        drawn = drawing.svg(figure, "a", "a curve, two lines")
    [path] = [p for p in re.findall(r' d="([^"]*)"', drawn) if "C" in p]
    number = r"-?[\d.]+"
    assert re.fullmatch(rf"M( {number}){{2}} C( {number}){{6}} L( {number}){{4}} z", path)


def test_figures_are_whole_and_labelled(drawn):
    for figure in drawn:
        root = ET.fromstring(figure.svg)  # noqa: S314 - our own text
        assert root.tag.endswith("svg")
        assert root.get("role") == "img"
        assert root.get("aria-label") == figure.caption
        assert root.get("viewBox")


def test_progress_of_thin_lines_alone_has_no_legend(results):
    """`fixed` was not validated once, and no tuner leads: matplotlib warns of a legend without lines."""
    seen, rows = results.evaluations.filter(pl.col("tuner") != "fixed"), summary(results)
    behind = rows.with_columns(standing=pl.lit("behind"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = progress(seen, results.settings, results.scores, behind, "accuracy", "e", 0.95)
    assert set(figure.data["tuner"]) == {"tpe", "cruise"}


def test_a_model_that_was_validated_before_it_was_trained_only_has_axes(results):
    """Its one value is at 0 s: matplotlib warns of axes without a length."""
    first = results.evaluations.group_by("tuner", "seed", maintain_order=True).first().with_columns(seconds=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves = learning_curves(first, list(TUNERS), "accuracy", "b", 0.95)
        both = progress(first, results.settings, results.scores, summary(results), "accuracy", "e", 0.95)
    assert set(curves.data["seconds"]) == set(both.data["seconds"]) == {0.0}


def test_the_same_results_give_the_same_bytes(results, drawn):
    assert drawings(results) == drawn


def test_figures_of_one_page_share_no_id_and_fetch_nothing(drawn):
    ids = [name for figure in drawn for name in re.findall(r' id="([^"]+)"', figure.svg)]
    assert len(ids) == len(set(ids))
    for figure in drawn:
        own = set(re.findall(r' id="([^"]+)"', figure.svg))
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', figure.svg)) <= own
        assert not re.search(r'(?:href|src)="(?!#)', figure.svg)
        assert "<script" not in figure.svg
        assert "<style" not in figure.svg


def test_ink_takes_the_pages_colour_and_text_is_text(drawn):
    for figure in drawn:
        assert "currentColor" in figure.svg
        assert "<text" in figure.svg


def test_axes_carry_units(drawn):
    assert "completion time, simulated seconds" in drawn[0].svg
    assert "validation accuracy" in drawn[1].svg
    assert all("simulated seconds" in figure.svg for figure in drawn[:4])


def test_names_are_no_markup_and_no_mathematics():
    name = "<b>&$x_1$"
    found = from_times({"fixed": [10.0, 20.0], name: [5.0, 6.0]})
    svg = completion_times(summary(found), found.scores, "a").svg
    ET.fromstring(svg)  # noqa: S314 - our own text
    assert "&lt;b&gt;&amp;$x_1$" in svg


def test_censored_and_failed_runs_are_drawn_as_such():
    found = from_times({"fixed": [10.0, math.inf, math.inf], "x": [math.nan] * 3, "y": [math.inf] * 3})
    svg = completion_times(summary(found), found.scores, "a").svg
    assert "every run failed" in svg
    assert "budget" in svg


@pytest.mark.parametrize("times", [{"lone": [3.0]}, {"fixed": [3.0], "x": [math.inf]}, {"x": [math.nan]}])
def test_one_seed_and_one_tuner_are_drawn(times):
    found = from_times(times)
    svg = completion_times(summary(found), found.scores, "a").svg
    assert ET.fromstring(svg).tag.endswith("svg")  # noqa: S314 - our own text
    assert all(f">{tuner}<" in svg for tuner in times)


def test_without_evaluations_there_are_no_curves(results):
    assert learning_curves(results.evaluations.clear(), list(TUNERS), "loss", "a") is None
    unfinite = results.evaluations.with_columns(loss=pl.lit(math.nan), accuracy=pl.lit(math.inf))
    assert learning_curves(unfinite, list(TUNERS), "loss", "a") is None
    assert learning_curves(unfinite, list(TUNERS), "accuracy", "a") is None


def test_a_tuner_without_evaluations_says_so(results):
    only = results.evaluations.filter(pl.col("tuner") != "tpe")
    assert learning_curves(only, list(TUNERS), "loss", "a").svg.count("no evaluations") == 1


def test_median_curve_is_the_median_while_half_of_the_runs_go_on():
    lines = [(np.array([0.0, 10.0]), np.array([1.0, 1.0]) * k) for k in (1, 2)]
    lines.append((np.array([0.0, 50.0]), np.array([9.0, 9.0])))
    at, middle = median_curve(lines)
    assert (at[0], at[-1]) == (0.0, 10.0)
    assert set(middle) == {2.0}


# ---------------------------------------------------------------------------------------------------------------- knobs


def test_only_knobs_that_changed_have_a_lane():
    settings = settings_frame({0: [(0, START), (5, replace(START, learning_rate=0.5))], 1: [(0, START)]})
    (lane,) = lanes(settings, {0: 20.0, 1: 30.0})
    assert lane.label == "learning rate"
    x, y = lane.steps[0]
    assert x.tolist() == [0, 5, 20]
    assert y.tolist() == [0.1, 0.5, 0.5]
    assert lane.steps[1][0].tolist() == [0, 30]


def test_settings_that_differ_between_seeds_but_not_in_time_are_no_change():
    settings = settings_frame({0: [(0, START)], 1: [(0, replace(START, batch_size=8))]})
    assert lanes(settings, {}) == []
    assert settings_over_time(settings, frames([score_row("s", "x", i, 9.0) for i in (0, 1)]).scores, "a") is None


def test_words_are_categories_and_wide_ranges_logarithmic():
    changes = [(0, START), (1, replace(START, policy="bsp", learning_rate=1e-4, batch_size=17))]
    found = {lane.label: lane for lane in lanes(settings_frame({0: changes}), {0: 2.0})}
    assert found["policy"].categories == ("asp", "bsp")
    assert found["policy"].steps[0][1].tolist() == [0, 1, 1]
    assert found["learning rate"].log
    assert found["batch size\n(samples)"].whole


def test_staleness_is_a_lane_only_where_its_bound_moves():
    ssp = replace(START, policy="ssp", staleness=3)
    appears = [(0, START), (1, ssp)]
    assert [lane.label for lane in lanes(settings_frame({0: appears}), {})] == ["policy"]
    moves = [*appears, (2, replace(ssp, staleness=5))]
    assert [lane.label for lane in lanes(settings_frame({0: moves}), {})] == ["policy", "staleness bound\n(clocks)"]


def test_roles_that_swap_without_changing_counts_are_placements():
    swapped = replace(START, workers=("n5", *START.workers[1:]), servers=("n1", "n6"))
    (lane,) = lanes(settings_frame({0: [(0, START), (1, swapped)]}), {})
    assert lane.categories == ("placement 1", "placement 2")
    counted = replace(START, workers=START.workers[:2])
    assert [lane.label for lane in lanes(settings_frame({0: [(0, START), (1, counted)]}), {})] == ["workers"]


def test_shares_loads_and_options_are_values():
    setting = replace(
        START,
        data_shares=(0.4, 0.2, 0.2, 0.2),
        loads=((1,), (2,), (3,), (4,)),
        options=(("fuse", True), ("threads", 3)),
    )
    found = knob_values(setting)
    assert (found["data_share"], found["samples_per_round"]) == (0.4, 10.0)
    assert (found["fuse"], found["threads"]) == ("True", 3.0)
    assert math.isnan(knob_values(START)["model_share"])
    first, *others = START.servers
    placed = knob_values(replace(START, block_owners=(first,) * 3 + tuple(others[:1] or [first])))
    assert (knob_values(START)["blocks"], placed["blocks"]) == ("range", "placed one by one")
    assert placed["model_share"] >= 0.75


def test_an_option_that_comes_and_goes_is_drawn():
    scores = frames([score_row("s", "x", 0, 9.0)]).scores
    changes = [(0, START), (1, replace(START, options=(("fuse", True), ("width", 3.0)))), (2, START)]
    assert settings_over_time(settings_frame({0: changes}), scores, "a") is not None


def test_a_failed_run_ends_at_its_last_change():
    changes = {0: [(0, START), (5, replace(START, batch_size=8))]}
    scores = frames([score_row("s", "x", 0, 600.0, status="error", reason="it broke")]).scores
    svg = settings_over_time(settings_frame(changes), scores, "a").svg
    assert ">600<" not in svg


def test_a_knob_with_few_values_has_just_these_as_ticks():
    changes = [(0, START), (1, replace(START, batch_size=8)), (2, replace(START, batch_size=32))]
    drawn = settings_over_time(settings_frame({0: changes}), frames([score_row("s", "x", 0, 9.0)]).scores, "a")
    after = drawn.svg[drawn.svg.index("simulated seconds") :]  # the vertical axis comes after the horizontal one
    assert re.findall(r">(\d+)</text>", after) == ["8", "16", "32"]


def test_labels_of_close_values_do_not_touch():
    rates = (0.02, 0.009428, 0.01886, 0.03771, 0.07542)
    changes = [(i, replace(START, learning_rate=rate)) for i, rate in enumerate(rates)]
    drawn = settings_over_time(settings_frame({0: changes}), frames([score_row("s", "x", 0, 9.0)]).scores, "a")
    axes = drawn.figure.axes[0]
    drawn.figure.canvas.draw()
    boxes = sorted((label.get_window_extent() for label in axes.get_yticklabels()), key=lambda box: box.y0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.00943", "0.0189", "0.0377", "0.0754"]
    assert all(one.y1 <= other.y0 for one, other in pairwise(boxes))


def test_free_knobs_that_never_moved_are_named():
    text = "[free]\nlearning_rate = 1\nbatch_size = 2\npolicy = 3\nworker_count = 4\n"
    settings = settings_frame({0: [(0, START), (5, replace(START, learning_rate=0.5))], 1: [(0, START)]})
    assert unmoved(settings, text) == ["batch_size", "policy", "worker_count"]
    assert unmoved(settings, "not toml [") == []


# ----------------------------------------------------------------------------------------------------- costs, many arenas


def test_the_parts_of_a_tuners_time_sum_to_it():
    rows = [score_row("s", "x", i, 100.0 + i, trial_seconds=30.0, overhead_seconds=10.0) for i in range(3)]
    rows += [score_row("s", "fixed", i, 200.0) for i in range(3)]
    results = frames(rows)
    split = split_of(summary(results), results.scores).row(by_predicate=pl.col("tuner") == "x", named=True)
    assert split == {
        "tuner": "x", "training_seconds": 61.0, "trial_seconds": 30.0, "stall_seconds": 10.0, "thinking_seconds": 0.5
    }  # fmt: skip


@pytest.mark.parametrize("spent", [(30.0, 10.0), (0.0921, 0.396)])
def test_what_a_tuner_spent_is_written_within_the_drawing(spent):
    """A long text stands behind the longest bar: it needs more room than a short one."""
    trial, overhead = spent
    rows = [score_row("s", "x", 0, 100.0, trial_seconds=trial, overhead_seconds=overhead)]
    figure = time_split(summary(frames(rows)), frames(rows).scores, "a").figure
    axes = figure.axes[0]
    texts = [text for text in axes.texts if "trials, " in text.get_text()]
    assert texts
    for text in texts:
        assert text.get_window_extent().x1 <= figure.bbox.x1


def test_the_pareto_front_holds_who_is_beaten_by_nobody():
    spent = {"fixed": (200, 0), "quick": (50, 20), "slow": (210, 30), "calm": (100, 5)}
    rows = [score_row("s", t, i, s + i, overhead_seconds=o) for t, (s, o) in spent.items() for i in range(3)]
    drawn = pareto(summary(frames(rows)), "a")
    assert set(drawn.data.filter("front")["tuner"]) == {"fixed", "calm", "quick"}
    assert pareto(summary(from_times({"fixed": [5.0], "x": [3.0]})), "a") is None  # nobody spent anything


def test_many_names_beside_points_stay_within_the_axes_and_apart():
    """Thirty tuners that spent nothing stand above each other; the reference is not covered by one at its place."""
    spent = {f"tuner{n}": (100.001 + n, 0) for n in range(30)} | {"fixed": (115, 0), "other": (90, 20)}
    rows = [score_row("s", t, i, s + i, overhead_seconds=o) for t, (s, o) in spent.items() for i in range(3)]
    figure = pareto(summary(frames(rows)), "a").figure
    axes = figure.axes[0]
    beside = [text for text in axes.texts if text.get_text() in spent and text.get_text() != "other"]
    names = [Text.get_window_extent(text) for text in beside]  # without its arrow
    names.sort(key=lambda box: box.y0)
    assert len(names) == 31
    assert axes.bbox.y0 <= names[0].y0
    assert names[-1].y1 <= axes.bbox.y1
    assert all(low.y1 <= high.y0 + 0.5 for low, high in pairwise(names))
    assert axes.lines[-1].get_color() == ORANGE


def test_figures_over_arenas_are_whole_and_repeat():
    results = contest(
        scenarios=tuple(f"learning-v1-{i:04}" for i in range(6)), tuners=("fixed", "tpe", "best_fixed"), seeds=2
    )
    found = arenas_of(results, results.manifest["scenarios"], "learning")
    first = [draw(found, "a") for draw in (mean_ratios, heat_map, performance)]
    assert first == [draw(found, "a") for draw in (mean_ratios, heat_map, performance)]
    for figure in first:
        ET.fromstring(figure.svg)  # noqa: S314 - our own text
        assert figure.data.height
    assert ">0003<" in first[1].svg  # what all names begin with is left out


def test_of_many_arenas_only_their_families_are_named():
    names = [*(f"learning-v1-{i:04}" for i in range(40)), *(f"mixed-v1-{i:04}" for i in range(30)), "mine"]
    rows = [score_row(a, t, 0, seconds) for a in names for t, seconds in (("fixed", 100.0), ("x", 50.0))]
    figure = heat_map(arenas_of(frames(rows), names), "a")
    assert re.findall(r">(learning|mixed|mine)[^<]*<", figure.svg) == ["learning", "mixed", "mine"]
    assert "0007" not in figure.svg
    assert "A column is an arena." in figure.caption


@pytest.mark.parametrize("name", ["x", "my_tuners:a_rather_long_name"])
def test_the_names_of_a_performance_profile_cover_no_curve(name):
    names = ["fixed", *(f"{name}{i}" for i in range(6))]
    rows = [score_row(a, t, i, 100.0 + 9 * k + i) for a in "ab" for k, t in enumerate(names) for i in range(3)]
    figure = performance(arenas_of(frames(rows), ["a", "b"]), "a").figure
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent()
    assert legend.y0 >= axes.get_window_extent().y1 - 1
    assert legend.y1 <= figure.bbox.y1
    assert legend.x1 <= figure.bbox.x1


def test_performance_profiles_are_drawn_where_nobody_leads():
    """Warnings are errors in tests: a legend without entries would be one."""
    arenas = [f"learning-v1-{i:04}" for i in range(2)]
    rows = [score_row(a, t, i, 100.0, reached=False) for a in arenas for t in ("asp", "mine") for i in range(2)]
    found = arenas_of(frames(rows), arenas, "learning")
    assert "leader" not in found.rows["standing"].to_list()
    assert performance(found, "a").data.height


def test_a_figure_is_written_as_pdf_with_the_same_bytes(results):
    drawn = completion_times(summary(results), results.scores, "a")
    assert pdf(drawn) == pdf(drawn)
    assert pdf(drawn).startswith(b"%PDF")
