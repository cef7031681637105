"""The drawing of when workers compute, transfer and wait, from pushes and from a results folder."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from harness.comparison.results import run_folder
from reports.figures import gantt, workers
from reports.figures.gantt import changes_of, pack, packed_run, unpacked
from reports.figures.workers import pushes_of, workers_of_run, workers_over_time
from reports.pages.page import pages
from tests.support.made_up import START, contest
from traces.exchanges import Exchange, write_log
from tuners.actions import Cost, Evaluate, Evaluation, Fork, Pushes, Reconfigure, Rejected, Run, Window


def rounds(count, nodes=3, slow=2.0):
    """BSP: everybody computes 1 s, the last node `slow` s; pulls and pushes take 0.1 s each, and all wait for the last."""
    rows = []
    length = slow + 0.2
    for n in range(count):
        for node in range(nodes):
            took = slow if node == nodes - 1 else 1.0
            wait = 0.0 if n == 0 or node == nodes - 1 else slow - 1.0
            rows.append((n * length + took + 0.2, node, n, took, 0.1, 0.1, wait, 0, 1.0))
    rows.sort()
    return Pushes(*(np.array(column) for column in zip(*rows, strict=True)))


def window(pushes):
    return Window(start_seconds=0.0, end_seconds=1.0, clocks=len(pushes.seconds), pushes=pushes, workers=())


def log(pushes):
    """The same pushes in two windows, with an evaluation between."""
    half = len(pushes.seconds) // 2
    parts = [Pushes(*(c[:half] for c in pushes)), Pushes(*(c[half:] for c in pushes))]
    evaluated = Exchange(1.0, Evaluate(), Evaluation(1.0, 1, 0.5, 0.5))
    return [Exchange(1.0, Run(clocks=half), window(parts[0])), evaluated, Exchange(2.0, Run(clocks=half), window(parts[1]))]


def bars(drawing, color):
    """Widths of the bars of a colour, in points."""
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke: (#\w+)', drawing.svg)
    ends = [float(x) for path, stroke in paths if stroke == color for x in re.findall(r"([-.0-9]+) [-.0-9]+", path)]
    return np.array(ends[1::2]) - np.array(ends[::2])


def test_public_names_exist():
    assert all(hasattr(module, name) for module in (gantt, workers) for name in module.__all__)


def test_bars_are_as_long_as_what_they_stand_for():
    drawn = workers_over_time(rounds(10), "a")
    assert ET.fromstring(drawn.svg).get("aria-label") == drawn.caption  # noqa: S314 - our own text
    computing, waiting, moving = (bars(drawn, color) for color in (workers.BLUE, workers.MUTED, workers.ORANGE))
    assert (len(computing), len(waiting), len(moving)) == (30, 18, 60)
    assert waiting.max() == pytest.approx(waiting.min(), abs=0.02)
    # A node that computes for 1 s waits for 1 s too, except for the gap between steps.
    assert np.median(computing) == pytest.approx(waiting[0], abs=1.0)
    assert computing.max() == pytest.approx(2 * waiting[0], abs=1.0)
    assert drawn.caption == "30 pushes; by node: 10, 10, 10. Held back by the policy: 27.3% of the workers' time."


def test_waiting_counts_until_the_run_ends():
    """The third node pushes once and is never released: it is idle from its push at 2.2 s to the end at 22 s."""
    made = rounds(10)
    kept = (made.worker != 2) | (made.seconds < 3)
    pushes = Pushes(*(column[kept] for column in made))
    np.testing.assert_allclose(workers.silent_seconds(pushes, 22.0), [0.0, 0.0, 22.0 - 2.2])
    before = pushes.wait_seconds.sum() / (3 * pushes.seconds[-1])
    drawn = workers_over_time(pushes, "a", 22.0)
    share = (pushes.wait_seconds.sum() + 19.8) / (3 * 22.0)
    assert share > before + 0.25
    assert drawn.caption.endswith(f"Held back by the policy: {share:.1%} of the workers' time.")
    waiting = bars(drawn, workers.MUTED)
    assert waiting.max() == pytest.approx(19.8 * np.median(waiting), rel=0.02)


def test_a_worker_that_may_still_compute_is_not_idle():
    pushes = rounds(10)
    np.testing.assert_array_equal(workers.silent_seconds(pushes, float(pushes.seconds[-1])), 0.0)


def test_of_a_long_run_the_beginning_is_drawn():
    drawn = workers_over_time(rounds(600), "a")
    assert drawn.caption.startswith("The first 1500 of 1800 pushes; by node: 500, 500, 500.")
    assert len(bars(drawn, workers.BLUE)) == 1500
    assert len(drawn.svg) < 120_000


def parked(count, *, released=None):
    """The third of three nodes pushes once, at 2.2 s, and is then held back: for good, or until `released` seconds."""
    made = rounds(count)
    kept = (made.worker != 2) | (made.seconds < 3)
    if released is not None:
        once = (made.worker == 2) & (made.seconds > released)
        once &= made.seconds == made.seconds[once].min()
        made = made._replace(wait_seconds=np.where(once, made.seconds - 2.2 - 2.2, made.wait_seconds))
        kept |= once
    return Pushes(*(column[kept] for column in made))


@pytest.mark.parametrize("released", [None, 2000.0])
def test_of_a_long_run_waits_count_that_end_after_what_is_drawn(released):
    """The push that tells of the wait comes after the beginning that is drawn, or never."""
    pushes = parked(1000, released=released)
    drawn = workers_over_time(pushes, "a", 2200.0)
    assert drawn.caption.startswith(f"The first 1500 of {len(pushes.seconds)} pushes; by node: 750, 749, 1.")
    after = 2200.0 - pushes.seconds[pushes.worker == 2].max()
    share = (pushes.wait_seconds.sum() + after) / (3 * 2200.0)
    assert share > 0.55
    assert drawn.caption.endswith(f"Held back by the policy: {share:.1%} of the workers' time in the whole run.")
    last = pushes.seconds[1499]
    np.testing.assert_allclose(workers.held_at(pushes, last, 2200.0), [[last, last], [last, last], [2.2, last]])
    waiting = bars(drawn, workers.MUTED)
    assert waiting.max() == pytest.approx((last - 2.2) * np.median(waiting), rel=0.02)
    held = pack([Exchange(2200.0, Run(clocks=1), replace(window(pushes), end_seconds=2200.0))], 0, 1500).header["held"]
    assert held == [[pytest.approx(a, abs=0.001), pytest.approx(last, abs=0.001)] for a in (last, last, 2.2)]


def test_a_node_that_pushes_only_after_what_is_drawn_has_a_row():
    made = rounds(1000)
    pushes = Pushes(*(column[(made.worker != 2) | (made.seconds > 1800)] for column in made))
    assert "by node: 750, 750, 0." in workers_over_time(pushes, "a").caption
    assert pack([Exchange(1.0, Run(clocks=1), window(pushes))], 0, 500).header["nodes"] == [0, 1, 2]


def test_a_log_tells_of_the_same_pushes():
    found = pushes_of(log(rounds(4)))
    for a, b in zip(found, rounds(4), strict=True):
        np.testing.assert_array_equal(a, b)
    assert pushes_of([]) is None
    assert workers_over_time(None, "a") is None


def test_the_drawing_of_a_run_is_made_from_its_log(tmp_path):
    folder = run_folder(tmp_path, "s", "x", 0)
    folder.mkdir(parents=True)
    assert workers_of_run(tmp_path, "s", "x", 0, "a") is None
    write_log(folder / "exchanges.jsonl.gz", log(rounds(4)))
    assert workers_of_run(tmp_path, "s", "x", 0, "a").caption.startswith("12 pushes")


# ------------------------------------------------------------------------------------------------- packed for the page


def test_a_packed_run_holds_the_pushes_to_a_part_in_4000():
    made = rounds(40)
    run = pack(log(made), 3, 1000)
    found = unpacked(run)
    part = made.seconds[-1] / 4000
    assert run.seed == 3
    assert (run.header["pushes"], run.header["all"], run.header["nodes"]) == (120, 120, [0, 1, 2])
    np.testing.assert_array_equal(found["row"], made.worker)
    for name in ("seconds", "push_seconds", "compute_seconds", "pull_seconds", "wait_seconds"):
        np.testing.assert_allclose(found[name], getattr(made, name), atol=part)


def test_of_a_long_run_the_first_pushes_are_packed():
    run = pack(log(rounds(600)), 0, 500)
    assert (run.header["pushes"], run.header["all"]) == (500, 1800)
    assert all(a <= b == pytest.approx(run.header["seconds"], abs=0.001) for a, b in run.header["held"])
    assert run.header["seconds"] < run.header["whole"] / 3
    assert len(run.text) < 4000
    assert pack([], 0, 500) is None


def test_reconfigurations_forks_and_switches_are_marked():
    cost = Cost(seconds=3.0, stall_seconds=2.0)
    made = [
        Exchange(10.0, Run(clocks=1), replace(window(rounds(1)), start_seconds=0.0, end_seconds=10.0)),
        Exchange(13.0, Reconfigure(START), cost),
        Exchange(15.0, Reconfigure(START), replace(cost, done=False)),
        Exchange(17.0, Fork(), 1),
        Exchange(
            20.0, Run(clocks=1, branch=1), replace(window(rounds(1)), start_seconds=18.0, end_seconds=20.0, changes=(cost,))
        ),
    ]
    assert list(changes_of(made)) == [(10.0, 13.0), (15.0, 17.0), (17.0, 18.0), (17.0, 20.0)]


def test_a_page_lists_the_reasons_of_the_run_with_the_median_time(tmp_path):
    results = contest(tuners=("fixed", "cruise"), seeds=3)
    name = results.scores["scenario"][0]
    why = "rate .1 -> .2: 41 +- 9 s left instead of 80 <- 3"
    for seed in range(3):
        folder = run_folder(tmp_path, name, "cruise", seed)
        folder.mkdir(parents=True)
        made = [*log(rounds(4)), Exchange(9.5, Reconfigure(START, reason=why), Rejected("no")), Exchange(9.7, Fork(), 1)]
        write_log(folder / "exchanges.jsonl.gz", made)
    page = pages(results, {}, partial(packed_run, tmp_path))["report.html"]
    section = page[page.index('<h2 id="reasons">') :].split("</section>")[0]
    assert re.search(r"<summary>cruise, seed \d: 1 decision</summary>", section)
    assert "41 +- 9 s left instead of 80 &lt;- 3 (refused)" in section
    assert 'id="reasons"' not in pages(results, {})["report.html"]


def test_a_page_holds_every_run_that_left_a_log(tmp_path):
    results = contest(tuners=("fixed", "cruise"), seeds=3)
    name = results.scores["scenario"][0]
    for seed in range(3):
        folder = run_folder(tmp_path, name, "fixed", seed)
        folder.mkdir(parents=True)
        write_log(folder / "exchanges.jsonl.gz", log(rounds(4 + seed)))
    made = pages(results, {}, partial(packed_run, tmp_path))["report.html"]
    section = made[made.index('<h2 id="workers">') :].split("</section>")[0]
    assert section.count("<details") == 1
    assert re.findall(r'id="(gantt-[-0-9]+)"', section) == ["gantt-1-0", "gantt-1-1", "gantt-1-2"]
    assert "<summary>fixed" in section
    assert "cruise" not in section
