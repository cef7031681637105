"""The page of `harness fidelity`, and the commands against recordings where these are at hand."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import kendalltau

from harness.cli import main
from reports.fidelity.errors import (
    EXACT_OF_CYCLES,
    Coverage,
    Errors,
    best_closed_form,
    ceilings,
    coverage,
    cycles,
    errors,
    missed,
    tau_interval,
)
from reports.fidelity.fidelity_page import page, write
from reports.fidelity.fidelity_table import tables
from reports.fidelity.fidelity_table import text as terminal_text
from reports.fidelity.findings import misses, recording_title, tau_text, verdict_sentences
from simulators.calibration.fit import Constants, Fit
from simulators.calibration.output import Provenance
from simulators.calibration.predictions import COMPLETION, LARGER, OTHER, Prediction
from simulators.calibration.validation import Ablation, Check

FOLDER = os.environ.get("HARNESS_RECORDINGS", "")

MADE = Check(
    Provenance("a <b>", "someone @ 1", "none", "0" * 64, "harness", "harness"),
    tuple(
        Prediction("job, asp", f"r{i}", f"{i} workers", recorded, recorded * 1.1, held, recorded, recorded * 0.5)
        for i, (recorded, held) in enumerate([(1.0, 1.2), (2.0, 1.8), (4.0, 4.4), (8.0, math.nan)])
    ),
    {"job": Fit(Constants(), {"fixed_seconds": (0.1, 0.2)}, {"sample_seconds": "record <more>"}, {}, 4, 0.1)},
    (),
    5,
    ("1 run was left out",),
)


def test_errors_are_of_what_could_be_predicted():
    found = errors(MADE.predictions, lambda p: p.held_out)
    assert found.rows == 3
    assert found.median == pytest.approx(0.1)
    assert found.p95 == pytest.approx(0.19)
    assert found.tau == 1.0
    assert math.isnan(errors(MADE.predictions[:2], lambda p: p.held_out).tau)
    assert errors((), lambda p: p.fitted).rows == 0


def test_equal_predictions_of_unlike_settings_are_in_no_order():
    """All are off by less than 5 %, so that they were said to be within reach, with no pair in the right order."""
    rows = [
        replace(MADE.predictions[0], label=f"{i}", workers=i, setting=i, recorded=recorded, held_out=1.04)
        for i, recorded in enumerate((1.0, 1.03, 1.06, 1.09), start=1)
    ]
    found = errors(rows, lambda p: p.held_out)
    assert (found.tau, missed(found, Coverage(0, 0))) == (0.0, ["tau"])
    assert misses(replace(MADE, predictions=tuple(rows)))[0].endswith("misses: tau.")
    alike = errors([replace(p, recorded=1.0) for p in rows], lambda p: p.held_out)
    assert math.isnan(alike.tau)


def test_the_page_says_all_and_is_safe(tmp_path):
    path = write(tmp_path, [MADE])
    text = path.read_text()
    assert text == page([MADE])
    assert "a &lt;b&gt;" in text
    assert "record &lt;more&gt;" in text
    assert "<script" not in text
    assert "10.0% / 19.0%" in text
    assert "combination i is in fold i mod 5" in text
    assert pl.read_csv(tmp_path / "predictions.csv").height == 4


def test_groups_that_could_not_be_predicted_are_not_among_those_that_were():
    lost = tuple(replace(p, group="job, bsp", held_out=math.nan) for p in MADE.predictions)
    text = page([replace(MADE, predictions=MADE.predictions + lost)])
    assert "at most 10.0% in every group, except in 1 that the other rows could not predict." in text
    assert "at most 10.0% in every group." in page([MADE])
    assert "the median error is at most" not in page([replace(MADE, predictions=lost)])


def test_findings_are_paragraphs_of_the_page():
    text = page([MADE], "Links are <shared>\nunevenly.\n\nNobody waits.\n")
    assert "<p>Links are &lt;shared&gt; unevenly.</p>\n<p>Nobody waits.</p>" in text
    assert "Where prediction and recording differ" not in page([MADE])


def test_the_page_says_what_the_recording_does_not_have():
    """Two settings in two runs each, one 10 and one 20 % apart, and one setting in one run."""
    told = (("a", 0, 1, 1.0), ("b", 0, 1, 1.1), ("a", 1, 2, 2.0), ("b", 1, 2, 2.4), ("a", 2, 3, 3.0))
    base = replace(MADE.predictions[0], servers=2, batch_size=8, compute_share=0.25)
    rows = tuple(
        replace(base, run=run, setting=setting, workers=workers, recorded=seconds) for run, setting, workers, seconds in told
    )
    text = page([replace(MADE, predictions=(*rows, *MADE.predictions))])
    assert "What this page cannot tell" in text
    assert "a &lt;b&gt; has 1 to 3 workers, 2 servers and 8 samples in a mini-batch; nothing is said of others." in text
    assert "Computing is 25% of its cycles, 25% in the median." in text
    assert "1 of its 3 settings were recorded only once." in text
    assert "there are 15% in the median, at most 20%: no prediction" in text
    assert "No fitted row determines sample_seconds: of jobs in which these matter, intervals alone" in text
    both = page([replace(MADE, predictions=rows), MADE])
    assert both.count("No fitted row determines") == 1  # it is said of all
    assert "What this page cannot tell" not in page([replace(MADE, fits={})])  # no row describes a setting


CYCLES = tuple(
    Prediction(
        f"job, {policy}",
        "r",
        f"{workers} workers",
        recorded,
        recorded * 1.01,
        recorded * off,
        recorded,
        recorded * (1.5 - 0.2 * workers),
        low=recorded * off * 0.95,
        high=recorded * off * 1.05,
        workers=workers,
        servers=1,
        batch_size=16,
    )
    for policy, workers, recorded, off in (
        ("asp", 1, 1.0, 1.02),
        ("asp", 2, 1.5, 1.03),
        ("asp", 3, 2.0, 1.04),
        ("bsp", 2, 1.6, 0.98),
        ("bsp", 3, 2.6, 1.2),
    )
)

REPEATED = tuple(
    replace(p, run=f"r{k}", setting=i, recorded=p.recorded * off)
    for i, p in enumerate(CYCLES)
    for k, off in enumerate((0.9, 1.0, 1.1))
)


def _beside(repeated):
    """Each of the repetitions, with what it repeats."""
    return [(p, CYCLES[p.setting]) for p in repeated]


def test_an_order_that_misses_the_reach_is_not_rounded_up_to_it():
    said = [tau_text(Errors(3, tau, 0.01, 0.02)) for tau in (0.8976, 0.89999, 0.9, 0.874, -0.2, math.nan)]
    assert said == ["0.897", "0.899", "0.90", "0.87", "-0.20", "-"]


@pytest.mark.slow
def test_repetitions_tell_what_an_exact_prediction_would_reach():
    """Three repetitions 10 % apart: beside the simulator there are an exact prediction and another recording."""
    text = page([replace(MADE, predictions=REPEATED)])
    rows = {
        name: r for r in text.split("<tr>") for name in ("an exact prediction", "recording once more") if f">{name}<" in r
    }
    assert 'rowspan="4">a &lt;b&gt;' in text  # two forms and two ceilings
    assert "<td>15</td>" in rows["an exact prediction"]
    assert "<td>15</td>" in rows["recording once more"]
    assert "not: " in rows["recording once more"]  # another recording is off by 10 to 22 %
    assert "<dt>An exact prediction</dt>" in text
    (table,) = tables([replace(MADE, predictions=REPEATED)])
    assert table.count("  an exact prediction  ") == table.count("  recording once more  ") == 2  # of each policy
    assert "even an exact prediction would be within reach in 0 of the 1 comparisons" in text
    near = tuple(replace(p, recorded=c.recorded * (1 + (p.recorded / c.recorded - 1) / 50)) for p, c in _beside(REPEATED))
    precise = page([replace(MADE, predictions=near)])
    assert "precise enough: an exact prediction would be within reach in 1 of the 1 comparisons" in precise
    assert "Recorded times are noisy" not in precise
    completions = tuple(replace(p, group=p.group + COMPLETION, split=LARGER) for p in REPEATED)
    assert "an exact" not in tables([replace(MADE, predictions=completions)])[0]  # as long as its mini-batches are many


def test_without_repetitions_it_is_said_that_noise_cannot_be_told():
    why = "o setting was recorded twice: it cannot be told how much of the errors is the recording's own noise"
    single = tuple(replace(p, setting=i) for i, p in enumerate(CYCLES))
    text = page([replace(MADE, predictions=single)])
    assert f"N{why}." in text.replace("&#39;", "'").replace("&#x27;", "'")
    assert "exact prediction" not in text
    assert f"note: n{why}" in tables([replace(MADE, predictions=single)])[0]
    assert why not in tables([replace(MADE, predictions=REPEATED)])[0]


def test_a_cycle_that_two_splits_predict_is_no_repetition():
    """Five settings held out, three of which are predicted from smaller clusters as well."""
    once = tuple(replace(p, setting=i, recorded_error=0.02) for i, p in enumerate(CYCLES))
    larger = tuple(replace(p, split=LARGER, held_out=1.03 * p.recorded) for p in once[2:])
    assert cycles((*once, *larger)) == list(once)
    assert cycles((*larger, *once)) == [*larger, *once[:2]]
    text = page([replace(MADE, predictions=(*once, *larger))])
    assert "No setting was recorded twice" in text
    assert "repetition of a setting" not in text
    assert "recorded only once" not in text
    assert (
        "Over all 8 cycles that were not fitted (of 5 that were recorded; some are predicted in more than one way)" in text
    )
    assert "that were recorded; some" not in page([replace(MADE, predictions=once)])
    twice = (*once, once[0])  # a job that comes to a setting again
    assert cycles((*twice, *larger)) == list(twice)


def test_without_repetitions_cycles_tell_what_an_exact_prediction_would_reach():
    """Means that are known to 2 %: a median error of .67 of it, and settings a third apart in order."""
    single = tuple(replace(p, setting=i, recorded_error=0.02) for i, p in enumerate(CYCLES))
    (found,) = ceilings(single)
    assert (found.name, found.errors.rows) == (EXACT_OF_CYCLES, 5)
    assert found.errors.median == pytest.approx(0.67 * 0.02, rel=0.15)
    assert found.errors.tau > 0.95
    text = page([replace(MADE, predictions=single)])
    assert "<dt>Exact prediction of steady runs</dt>" in text
    assert "No setting was recorded twice: what differs between runs cannot be told from errors" in text
    assert "even an exact prediction" not in text  # that is of repetitions alone
    assert ceilings((*single[1:], CYCLES[0])) == []  # of one row, nothing is known


def test_completion_is_explained_where_it_is_told():
    told = replace(MADE, predictions=tuple(replace(p, group=p.group + COMPLETION) for p in MADE.predictions))
    assert "<dt>Completion</dt>" in page([told])
    assert "<dt>Completion</dt>" not in page([MADE])


def test_the_table_of_a_terminal():
    (table,) = tables([MADE])
    assert "note: 1 run was left out" in table
    lines = table.splitlines()
    assert lines[1].split()[:3] == ["rows", "tau", "median"]
    (held,) = [line.split() for line in lines if "simulator, held out" in line]
    assert held[3:] == ["3", "1.00", "10.0%", "19.0%", "-"]


def test_order_is_told_before_errors():
    text = page([MADE])
    assert "Held out, tau is at least 1.00 and the median error is at most 10.0% in every group." in text
    assert text.index(">tau<") < text.index(">covered<") < text.index(">simulator, fitted<")


def test_coverage_counts_what_has_an_interval():
    """Of three intervals, one is too high; a fourth row has none."""
    ends = [(0.9, 1.1), (2.1, 2.3), (3.0, 5.0), (math.nan, math.nan)]
    told = tuple(replace(p, low=a, high=b) for p, (a, b) in zip(MADE.predictions, ends, strict=True))
    half_widths = [(b - a) / 2 / p.held_out for p, (a, b) in zip(told, ends[:3], strict=False)]
    assert coverage(told) == (2, 3, pytest.approx(sum(half_widths) / 3))
    assert coverage(told[3:]) == (0, 0, pytest.approx(math.nan, nan_ok=True))
    made = replace(MADE, predictions=told)
    assert "67% of 3 recorded values are within their 90 % intervals." in page([made])
    assert f"2 of 3, ±{sum(half_widths) / 3:.0%}" in tables([made])[0]


def test_constants_without_an_interval_are_marked():
    unsure = replace(MADE, fits={"job": replace(MADE.fits["job"], intervals={"fixed_seconds": None})})
    why = "no degree of freedom: as many constants as measurements that determine them"
    assert f"none: {why}" in page([unsure])
    assert f"note: job, fixed_seconds: fitted without an interval, {why}" in tables([unsure])[0]


def test_each_split_has_a_group_of_its_own():
    """Extrapolated rows are beside held-out ones, and predictions of other recordings say what was fitted."""
    both = (*MADE.predictions, *(replace(p, split=LARGER) for p in MADE.predictions))
    (table,) = tables([replace(MADE, predictions=both, undivided=("job",))])
    assert "\njob, asp\n" in table
    assert "\njob, asp, small to large\n" in table
    assert "nothing is held out of job" in table
    other = replace(MADE, predictions=tuple(replace(p, split=OTHER) for p in MADE.predictions), fitted_to="equal hosts")
    assert "predicted by a fit to: equal hosts" in tables([other])[0]
    assert "Predicted by a fit to: equal hosts." in page([other])


def test_the_verdict_comes_first_and_says_what_is_missed():
    """Of five cycles, one is 20 % off, outside its interval: that is chance for the coverage, not for the percentile."""
    text = page([replace(MADE, predictions=CYCLES)], "Why.")
    assert "within reach in 0 of 1 comparisons" in text
    assert "Over all 5 cycles that were not fitted, it is off by 3.0% in the median and 16.8% at the 95th percentile" in text
    assert "80% of 5 recorded cycles are within their 90 % intervals, within chance of 90 %." in text
    assert "not: 95th percentile<" in text
    missed = tuple(replace(p, low=p.recorded * 2, high=p.recorded * 3) for p in CYCLES)
    assert "not: 95th percentile, coverage<" in page([replace(MADE, predictions=missed)])
    assert text.index("The order of settings, which a tuner needs: tau is") < text.index("within reach in")
    assert text.index(">Verdict<") < text.index("Where prediction and recording differ")
    near = page([replace(MADE, predictions=CYCLES[:4])])
    assert "within reach in 1 of 1 comparisons" in near
    assert ">Verdict<" not in page([MADE])


def test_the_simulator_is_held_against_the_better_of_two_closed_forms():
    """The plain form is off by 10 to 30 %. The closed network is off by 2 %, less than the simulator, or by 50 %."""

    def with_network(share):
        return tuple(
            replace(
                p,
                network_held_out=share * p.recorded,
                network_low=0.9 * share * p.recorded,
                network_high=1.1 * share * p.recorded,
            )
            for p in CYCLES
        )

    good, poor = with_network(1.02), with_network(1.5)
    assert best_closed_form(good).name == "closed network"
    assert best_closed_form(poor).name == "plain closed form"
    assert best_closed_form(CYCLES).name == "plain closed form"  # the network has no predictions
    text = page([replace(MADE, predictions=good)])
    (row,) = [part for part in text.split("<tr>") if "closed network (best closed form)" in part]
    assert "5 of 5" in row
    assert "is off by 2.0% and 2.0%;" in text
    assert "median error is lower in 0 of 1 comparisons." in text
    assert "lower in 1 of 1 comparisons" in page([replace(MADE, predictions=poor)])
    assert "closed network (" not in page([replace(MADE, predictions=CYCLES)])


def test_a_recording_heads_its_rows_of_the_verdict_once_and_has_no_column_without_values():
    """Nothing of another recording is fitted, so that the column of fitted rows would be empty."""
    text = page([replace(MADE, predictions=CYCLES)])
    assert text.count('<th scope="rowgroup" rowspan="2">a &lt;b&gt;') == 1
    assert text.count(">simulator, fitted<") == 1
    other = tuple(replace(p, fitted=math.nan, plain_fitted=math.nan, split=OTHER) for p in CYCLES)
    assert ">simulator, fitted<" not in page([replace(MADE, predictions=other)])
    assert "The constants fit their own 4 rows with a median error of 10.0%." in text
    two = replace(MADE, predictions=CYCLES, fits={"job": MADE.fits["job"], "other": MADE.fits["job"]})
    assert "The constants of other fit their own 4 rows" in page([two])


def test_completions_and_switches_take_no_part_in_the_verdict():
    others = tuple(replace(p, group=p.group + COMPLETION, held_out=9.0) for p in CYCLES)
    assert "Over all 4 cycles" in page([replace(MADE, predictions=(*CYCLES[:4], *others, *MADE.predictions))])


def test_tau_has_an_interval_over_settings():
    """All in order: it is 1 to 1. One pair of ten exchanged: tau is 0.8 and inside. Two settings: there is none."""

    def exchanged(p):
        return {1.5: 1.6, 1.6: 1.5}.get(p.recorded, p.recorded)

    assert tau_interval(CYCLES, lambda p: p.held_out) == pytest.approx((1.0, 1.0))
    tau, (low, high) = errors(CYCLES, exchanged).tau, tau_interval(CYCLES, exchanged)
    assert tau == pytest.approx(0.8)
    assert low < tau < high
    assert all(math.isnan(x) for x in tau_interval(CYCLES[:2], lambda p: p.held_out))


def test_the_interval_of_tau_is_that_of_scipys_tau():
    """Also with ties, of predictions and of recorded times."""
    rng = np.random.default_rng(3)
    recorded = rng.integers(1, 9, size=12).astype(float)
    rows = [replace(CYCLES[0], label=f"{i} workers", recorded=r) for i, r in enumerate(recorded)]
    predicted = dict(zip(map(id, rows), recorded + rng.integers(0, 6, size=12), strict=True))

    rng, found = np.random.default_rng(0), []
    for _ in range(500):
        drawn = [rows[setting] for setting in rng.integers(12, size=12)]
        found.append(kendalltau([predicted[id(row)] for row in drawn], [row.recorded for row in drawn]).statistic)
    assert tau_interval(rows, lambda row: predicted[id(row)]) == pytest.approx(tuple(np.nanquantile(found, [0.05, 0.95])))


def test_repetitions_of_a_setting_are_not_compared_with_another_draw_of_it():
    """They have one prediction. In order, but for these ties, tau is 0.94, and its interval was 0.77 to 0.92."""
    settings = [replace(CYCLES[0], label=f"{i} workers", recorded=float(i), held_out=float(i)) for i in range(2, 8)]
    rows = [replace(p, run=f"r{k}", recorded=p.recorded + 0.01 * k) for p in settings for k in range(3)]
    tau = errors(rows, lambda p: p.held_out).tau
    low, high = tau_interval(rows, lambda p: p.held_out)
    assert tau - 0.05 < low < tau < high


def test_a_part_of_the_physics_has_a_row_with_and_without_it():
    worse = tuple(replace(p, held_out=p.recorded * 0.8) for p in CYCLES)
    made = replace(MADE, predictions=CYCLES, ablations=(Ablation("uneven shares of <links>", worse),))
    text = page([made])
    assert "What each part of the simulator is worth" in text
    (row,) = [part for part in text.split("<tr>") if "uneven shares of &lt;links&gt;" in part]
    assert "20.0%" in row
    (table,) = tables([made])
    assert "without uneven shares of <links>" in table
    assert "What each part" not in page([replace(made, ablations=())])


def test_cycles_are_drawn_with_their_intervals_and_over_what_the_setting_is():
    text = page([replace(MADE, predictions=(*CYCLES, *(replace(p, split=LARGER) for p in CYCLES)))])
    assert text.count("<figure>") == 2
    for label in ("workers per server", "batch size of a worker", "plain closed form"):
        assert label in text


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([1, 1, 1], "3 of 3 rows are more than 15% off: asp with 1 worker and 1 server (1 too slow), asp with 2"),
        ([2, 1, 1, 1], "5 of 5 rows are more than 15% off: most are of asp with 1 worker and 1 server (2 too slow), asp"),
        ([1] * 6, "6 of 6 rows are more than 15% off: among them asp with 1 worker and 1 server (1 too slow), asp with 2"),
    ],
)
def test_rows_far_off_are_most_of_the_kinds_that_are_named_only_where_there_are_others(kinds, said):
    """So many rows far off are of each number of workers; three kinds are named."""
    base = CYCLES[0]
    rows = [
        replace(base, workers=w, held_out=1.2 * base.recorded, run=f"{w}, {i}")
        for w, count in enumerate(kinds, 1)
        for i in range(count)
    ]
    (found,) = misses(replace(MADE, predictions=tuple(rows)))
    assert said in found
    assert found.endswith("and asp with 3 workers and 1 server (1 too slow).")


@pytest.mark.parametrize(
    ("depends", "said"),
    [
        (
            lambda w, s, b, p: 0.2 * (s == 2),
            " Errors depend on the number of servers: in the median not off with 1 and 22%",
        ),
        (lambda w, s, b, p: -0.1 * w, " Errors depend on the number of workers: in the median 10% too fast with 1 and 33%"),
        (lambda w, s, b, p: 0.2 * (p == "bsp"), " in the median not off with asp and 22% too slow with bsp."),
        (lambda w, s, b, p: 0.2 * (-1.0) ** (w + s), ""),
    ],
)
def test_what_errors_depend_on_is_named(depends, said):
    """Repetitions count as one, and a difference that chance may make is none."""
    grid = [(w, s, b, p) for w in (1, 2, 4) for s in (1, 2) for b in (8, 32) for p in ("asp", "bsp")]
    rows = []
    for i, (w, s, b, p) in enumerate(grid):
        at = replace(CYCLES[0], group=f"job, {p}", label=f"{w}, {s}, {b}", workers=w, servers=s, batch_size=b, setting=i)
        held = 2.0**i * math.exp(depends(w, s, b, p) + 0.01 * (i % 3 - 1))
        rows += [replace(at, run=f"r{k}", recorded=2.0**i, held_out=held) for k in range(3)]
    (found,) = misses(replace(MADE, predictions=tuple(rows)))
    assert said in found
    assert ("Errors depend on" in found) == bool(said)


def test_without_a_prediction_nothing_is_said_of_errors():
    none = tuple(replace(p, held_out=math.nan, low=math.nan, high=math.nan) for p in CYCLES)
    (said,) = verdict_sentences([replace(MADE, predictions=none)])
    assert said.startswith("No cycle was predicted that was not fitted, so nothing is said")


def test_cycles_without_intervals_are_counted():
    bare = tuple(replace(p, low=math.nan, high=math.nan) for p in CYCLES)
    assert verdict_sentences([replace(MADE, predictions=bare)])[-1].startswith("None of these 5 cycles has a 90 %")
    mixed = tuple(replace(p, low=0.9 * p.held_out, high=1.1 * p.held_out) for p in CYCLES[:3]) + bare[3:]
    assert verdict_sentences([replace(MADE, predictions=mixed)])[-1].endswith("; 2 others have no interval.")
    whole = tuple(replace(p, low=0.9 * p.held_out, high=1.1 * p.held_out) for p in CYCLES)
    assert verdict_sentences([replace(MADE, predictions=whole)])[-1].endswith("of 90 %.")


def test_a_single_cycle_has_no_order_that_could_be_within_reach():
    exact = tuple(replace(p, held_out=p.recorded) for p in CYCLES)
    one = replace(exact[0], split=LARGER)
    said = " ".join(verdict_sentences([replace(MADE, predictions=(*exact, one))]))
    assert "within reach in 1 of 1 comparisons" in said
    assert "Not counted: 1 of a single cycle, which has no order." in said
    assert "Not counted" not in " ".join(verdict_sentences([replace(MADE, predictions=exact)]))


def test_what_is_missed_is_said_with_its_cause():
    """Of ten pairs, one is in the wrong order, of settings 7 % apart; one row of five is 20 % too slow."""
    swapped = tuple(replace(p, held_out=p.recorded * (1.1 if p.recorded == 1.5 else 1.0)) for p in CYCLES)
    (said,) = misses(replace(MADE, predictions=swapped))
    assert said == "a <b>, held out, misses: tau. Of 1 pairs in the wrong order, 0 were recorded less than 5 % apart."
    (said,) = misses(replace(MADE, predictions=CYCLES))
    assert said.endswith("1 of 5 rows is more than 15% off: bsp with 3 workers and 1 server (1 too slow).")
    steady = tuple(replace(p, setting=i, recorded_error=0.01) for i, p in enumerate(CYCLES))
    assert "is not the cause: an exact prediction would miss none of this." in misses(replace(MADE, predictions=steady))[0]
    noisy = tuple(replace(p, setting=i, recorded_error=0.2) for i, p in enumerate(CYCLES))
    assert "would miss 95th percentile as well: that is the noise" in misses(replace(MADE, predictions=noisy))[0]
    exact = tuple(replace(p, held_out=p.recorded) for p in CYCLES)
    assert misses(replace(MADE, predictions=exact)) == []
    assert "Where the reach is missed" in page([replace(MADE, predictions=CYCLES)])
    assert "Where the reach is missed" not in page([replace(MADE, predictions=exact)])


@pytest.mark.parametrize(("repetitions", "said"), [(2, "may be the cause"), (20, "is not the cause")])
def test_few_repetitions_do_not_rule_out_that_noise_is_the_cause(repetitions, said):
    """Four settings with noise of 2 and 7 %: two repetitions of each may be that near by chance where noise is larger, and
    an exact prediction's 95th percentile is beyond 15 % then; twenty may not."""
    many = tuple(
        replace(p, setting=i, run=f"r{k}", recorded=2.0**i * math.exp(noise * (-1) ** k), held_out=1.3 * 2.0**i)
        for i, (p, noise) in enumerate(zip(CYCLES, (0.02, 0.02, 0.02, 0.07), strict=False))
        for k in range(repetitions)
    )
    (found,) = misses(replace(MADE, predictions=many))
    assert said in found


def test_settings_of_other_policies_are_other_settings():
    """Two numbers of workers under each of two policies have an order; the simulator's was a dash beside a noisy one."""
    four = [p for p in CYCLES if p.workers > 1]
    assert len({p.label for p in four}) == 2
    assert errors(four, lambda p: p.recorded).tau == 1.0


def test_tables_of_a_user_are_named_by_their_folder():
    mine = replace(MADE, origin=replace(MADE.origin, source="own tables", of="monday, again"))
    assert recording_title(mine) == "monday, again"


def test_a_terminal_shows_the_verdict_first():
    told = terminal_text([replace(MADE, predictions=CYCLES)]).splitlines()
    assert told[0].startswith("The order of settings, which a tuner needs: tau is")
    assert told.index("") < told.index("job, bsp")
    assert terminal_text([MADE]).startswith("\na <b>")  # without a prediction of a cycle there is no verdict


def test_the_command_wants_a_recording(tmp_path, capsys):
    assert main.main(["fidelity", "--out", str(tmp_path)]) == 2
    assert "name traces" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fidelity.html", "predictions.csv"])
def test_the_command_replaces_no_page(tmp_path, capsys, name):
    """It says so before it has fitted for minutes."""
    (tmp_path / name).write_text("mine")
    assert main.main(["fidelity", "shipped:homogeneous", "--out", str(tmp_path)]) == 2
    assert f"{name}: it is there already; remove it, or name another" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.skipif(not FOLDER, reason="HARNESS_RECORDINGS does not say where recordings are")
def test_switches_and_steps_of_sync_switch_are_within_reach(tmp_path):
    from harness.calibrating import read_source
    from simulators.calibration.fit import fit_all, predicted

    recording, _ = read_source("sync-switch", Path(FOLDER) / "sync-switch")
    rows = recording.rows
    fitted = fit_all(rows[::2], dict.fromkeys({r.workload for r in rows}, Constants(cores=1)), resamples=0)
    off = []
    for name, found in fitted.items():
        mine = [r for r in rows[1::2] if r.workload == name]
        off += [abs(p / r.cycle_seconds - 1) for p, r in zip(predicted(found.constants, mine), mine, strict=True)]
    assert sorted(off)[len(off) // 2] < 0.05
    assert max(recording.switch_seconds) / min(recording.switch_seconds) < 1.1
