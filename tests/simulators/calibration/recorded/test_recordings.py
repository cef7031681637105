"""What a recording tells of cycles, and what it is said to leave out."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares

from harness.cli import main
from simulators.calibration import closed_form
from simulators.calibration import least_squares as search
from simulators.calibration.fit import Constants, completed, fit, predicted
from simulators.calibration.model import cluster, plant
from simulators.calibration.recorded.recordings import read_tables
from simulators.calibration.recorded.selection import EVERYTHING, Selection
from tests.simulators.calibration.made_up import TRUE, row, timed, told_by_formula
from traces.importers.source import table
from traces.schema import setting_text
from tuners.actions import Setting

pytestmark = pytest.mark.usefixtures("short")


def tables(runs, settings, **others):
    return {"runs": table("runs", runs), "settings": table("settings", settings)} | {
        name: table(name, rows) for name, rows in others.items()
    }


def test_rows_of_whole_runs():
    runs = [
        {"run": "a", "workload": "x", "seconds": 100.0, "steps": 1000},
        {"run": "b", "workload": "x", "samples_per_second": 64.0, "extras": '{"total_batch_size": 128}'},
        {"run": "c", "workload": "x", "trimmed_seconds": 50.0, "steps": 100},
    ]
    settings = [
        {"run": "a", "seconds": 0.0, "workers": 4, "servers": 2, "policy": "asp", "batch_size": 8, "intra_threads": 2},
        {"run": "b", "seconds": 0.0, "workers": 4, "servers": 2, "policy": "bsp"},
        {"run": "c", "seconds": 0.0, "workers": 4, "servers": 2, "policy": "bsp", "batch_size": 8},
    ]
    found = read_tables(tables(runs, settings))
    assert [r.cycle_seconds for r in found.rows] == pytest.approx([0.4, 2.0, 0.5])
    assert [r.batch_size for r in found.rows] == [8, 32, 8]
    assert "1 runs (x) have trimmed seconds only" in found.caveats[0]


def test_what_a_user_left_out_of_a_recording_is_said():
    """An unknown policy, no servers, no time, no batch size and no policy: before, three of them ended in a traceback."""
    usual = {"seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}
    other = [{"policy": "ring"}, {"servers": 0}, {}, {"batch_size": 0}, {"policy": None}]
    settings = [usual | changed | {"run": str(i)} for i, changed in enumerate([{}, *other])]
    runs = [{"run": str(i), "workload": "x", "seconds": 10.0 * (i != 3), "steps": 10} for i in range(6)]
    found = read_tables(tables(runs, settings))
    assert [(r.run, r.policy, r.batch_size, r.cycle_seconds) for r in found.rows] == [
        ("0", "bsp", 8, 1.0),
        ("4", "bsp", 1, 1.0),
        ("5", "asp", 8, 2.0),
    ]
    for why in (
        "policy ring are left out",
        "write bsp where all workers wait for each other, asp where none waits",
        "without workers and servers",
        "no seconds",
        "no batch size",
        "no policy",
    ):
        assert sum(f"1 settings {why}" in c or why in c for c in found.caveats) == 1, why


def test_cycles_of_minutes_are_asked_for_their_unit():
    setting = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}
    for seconds, said in ((150.0, ()), (150_000.0, ("a cycle takes 150 s in the median; if these are milliseconds,",))):
        found = read_tables(tables([{"run": "a", "workload": "x", "seconds": seconds, "steps": 1000}], [setting]))
        assert tuple(caveat[: len(said[0])] for caveat in found.caveats) == said if said else not found.caveats


def test_pushes_without_computing_or_without_time_are_no_parts_of_a_cycle():
    settings = [{"run": "a", "seconds": 0.0, "workers": 1, "servers": 1, "policy": "asp", "batch_size": 8}]
    pushes = [{"run": "a", "worker": 0, "clock": i, "seconds": i + 1.0, "compute_seconds": 0.0} for i in range(20)]
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert not found.rows[0].has_parts
    still = read_tables(tables([{"run": "a"}], settings, iterations=[p | {"seconds": 5.0} for p in pushes]))
    assert (still.rows, "no seconds" in still.caveats[0]) == ((), True)


def test_iterations_without_a_row_are_counted_by_the_numbers_of_the_others():
    """Of three workers that push once per second, every tenth row is lost: a cycle takes a second, and not 10 / 9. Numbers
    of the job's steps have gaps in each worker's rows, too, and tell nothing of lost ones."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    every = [{"run": "a", "worker": w, "clock": i, "seconds": i + 0.3 * w} for i in range(200) for w in range(3)]
    kept = [p for n, p in enumerate(every) if n % 10 != 4]
    found = read_tables(tables([{"run": "a"}], settings, iterations=kept))
    assert found.rows[0].cycle_seconds == pytest.approx(1.0, rel=0.01)
    assert "in 1 settings some iterations have no row, 10.0% in the median" in found.caveats[0]
    assert found.rows[0].all_pushes == pytest.approx(600, abs=2)
    steps = [p | {"clock": 3 * p["clock"] + p["worker"]} for p in every]
    whole = read_tables(tables([{"run": "a"}], settings, iterations=steps))
    assert whole.rows[0].cycle_seconds == pytest.approx(1.0, rel=0.01)
    assert not whole.caveats


@pytest.mark.parametrize("workers", [1, 2])
def test_a_log_of_every_tenth_iteration_has_cycles_of_one(workers):
    """Cycles were ten times as long, without a word: gaps of ten were taken for numbers of the job's steps. One of the
    workers is slower, so that numbers are the same at other times."""
    settings = [{"run": "a", "seconds": 0.0, "workers": workers, "servers": 1, "policy": "asp", "batch_size": 8}]
    pushes = [
        {"run": "a", "worker": w, "clock": i, "seconds": (1 + w) * (i + 1.0)}
        for w in range(workers)
        for i in range(0, 800 // (1 + w), 10)
    ]
    found = read_tables(tables([{"run": "a"}], settings, iterations=sorted(pushes, key=lambda p: p["seconds"])))
    assert found.rows[0].cycle_seconds == pytest.approx(2 / (1 + 1 / workers), rel=0.01)
    assert "in 1 settings some iterations have no row" in found.caveats[0]


def test_numbers_that_may_be_of_each_worker_or_of_all_are_told():
    """Every tenth iteration again, but from another one on: these may be numbers of the job's steps, some without a row."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}]
    pushes = [
        {"run": "a", "worker": w, "clock": i + 3 * w, "seconds": i + 1.0 + w / 2} for i in range(0, 800, 10) for w in (0, 1)
    ]
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert "in 1 settings clocks count neither each worker's iterations nor those of all together: a;" in found.caveats[0]


def test_a_bound_that_is_not_told_is_not_0():
    """With 0, all workers wait for each other."""
    usual = {"seconds": 0.0, "workers": 2, "servers": 1, "batch_size": 8}
    settings = [usual | {"run": p, "policy": p, "staleness": s} for p, s in (("ssp", None), ("asp", None), ("dssp", 2))]
    found = read_tables(tables([{"run": s["run"], "seconds": 10.0, "steps": 10} for s in settings], settings))
    assert [r.policy for r in found.rows] == ["asp", "dssp"]
    assert "1 settings of the policy ssp are left out: they do not tell its bound" in found.caveats[0]


def test_runs_without_a_setting_are_told():
    runs = [{"run": name, "seconds": 10.0, "steps": 10} for name in "abcdef"] + [{"run": "g"}]
    settings = [{"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}]
    found = read_tables(tables(runs, settings))
    assert [row.run for row in found.rows] == ["a"]
    assert found.caveats == ("5 runs with times have no row in settings, and are left out: b, c, d, e, and 1 more",)


def test_lost_rows_before_the_first_and_after_the_last_are_no_longer_cycles():
    """Two workers push once per second each. Of one, rows are lost in the middle and at the end."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}]
    every = [{"run": "a", "worker": w, "clock": i, "seconds": i + 0.5 * w} for i in range(20) for w in range(2)]
    kept = [p for p in every if not (p["worker"] and p["clock"] in (9, 10, 18, 19))]
    found = read_tables(tables([{"run": "a"}], settings, iterations=kept))
    assert found.rows[0].cycle_seconds == pytest.approx(1.0)


STEADY = {"seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}


def pushing(counts, run="a", since=0.0, cycle=1.0, first=(0.0, 0.0)):
    """Pushes of workers, so many of each, that take a `cycle` each; worker w begins at `first[w]`."""
    made = [
        {"run": run, "worker": w, "clock": i, "seconds": since + first[w] + cycle * (i + 1 - 0.3 * w)}
        for w, count in enumerate(counts)
        for i in range(count)
    ]
    return sorted(made, key=lambda push: push["seconds"])


@pytest.mark.parametrize(
    ("counts", "first", "used"),
    [((50, 20), (0.0, 0.0), "from 0 to 19"), ((50, 50), (0.0, 20.0), "from 19.7 to 49 of 68.7"), ((50, 49), (0.0, 0.0), "")],
    ids=["lost", "another clock", "all"],
)
def test_only_the_time_in_which_all_workers_push_tells_of_cycles(counts, first, used):
    """A worker that was lost halfway, or whose machine has another clock, made cycles 1.4 times as long, without a word."""
    found = read_tables(tables([{"run": "a"}], [STEADY | {"run": "a"}], iterations=pushing(counts, first=first)))
    assert found.rows[0].cycle_seconds == pytest.approx(1.0, rel=0.02)
    assert [used in caveat for caveat in found.caveats] == [True] * bool(used)


def stopping(runs, stops):
    """Pushes of runs of 60 cycles of 1 s of two workers, which begin with `stops` of 30 s: by run, worker and cycle."""
    stopped = dict.fromkeys(stops, 30.0)
    made = []
    for run in runs:
        for worker in range(2):
            computing = [1.0 + stopped.get((run, worker, i), 0.0) + 0.01 * (i % 3) for i in range(60)]
            made += [
                {"run": run, "worker": worker, "clock": i, "seconds": 0.3 * worker + float(end), "compute_seconds": took}
                for i, (took, end) in enumerate(zip(computing, np.cumsum(computing), strict=True))
            ]
    return sorted(made, key=lambda push: push["seconds"])


@pytest.mark.parametrize(
    "stops",
    [
        [("a", 1, 40)],
        [("a", 0, 20), ("b", 0, 40)],
        [("a", w, i) for w in (0, 1) for i in (10, 35)],
        [("a", w, 15 * i + 9 * w) for w in (0, 1) for i in (1, 2, 3)],
    ],
    ids=["one", "two", "both within the warm-up and later", "a sleep in every twentieth"],
)
def test_a_worker_that_stands_still_once_or_twice_tells_no_sleeps(stops):
    """One of 360 mini-batches that took 30 s was simulated in all predictions, 30 s in every 360th, and made a cycle of its
    setting 1.6 times as long. Where workers stand still often, that is a part of what cycles take."""
    settings = [STEADY | {"run": run} for run in "abc"]
    found = read_tables(tables([{"run": run} for run in "abc"], settings, iterations=stopping("abc", stops)))
    few = len(stops) < 5
    assert ([row.cycle_seconds for row in found.rows] == pytest.approx([1.01] * 3, rel=0.02)) == few
    assert (found.noise.sleeps is None) == few
    assert any("settings a worker stood still by itself: a for 31 s" in caveat for caveat in found.caveats) == few


def test_iterations_without_times_are_said_to_have_none():
    """Their run was said to have no iterations."""
    untimed = [{k: v for k, v in push.items() if k != "seconds"} | {"pull_seconds": 0.2} for push in pushing((9, 9), "b")]
    settings, runs = [STEADY | {"run": "a"}, STEADY | {"run": "b"}], [{"run": "a"}, {"run": "b"}]
    found = read_tables(tables(runs, settings, iterations=pushing((50, 50)) + untimed))
    assert [row.run for row in found.rows] == ["a"]
    (said,) = found.caveats
    assert said.startswith("1 runs are left out: their iterations have no seconds, so that cycles are not known; write")
    alone = read_tables(tables(runs[1:], settings[1:], iterations=untimed))
    assert not alone.rows
    assert "seconds, or step_seconds" in alone.caveats[0]


def test_workers_that_never_push_at_the_same_time_are_said_to_be_so():
    """The clock of one machine is an hour ahead, as in another time zone. A range that ends before it begins was named."""
    pushes = [push | {"seconds": push["seconds"] + 3600.0 * push["worker"]} for push in pushing((50, 50))]
    found = read_tables(tables([{"run": "a"}], [STEADY | {"run": "a"}], iterations=pushes))
    assert not found.rows
    assert "a, in which they never do; were workers lost, or do the clocks of machines differ?" in found.caveats[0]


@pytest.mark.parametrize(("slower", "rates", "said"), [(3.0, (), True), (1.2, (), False), (3.0, (3e6, 1e6, 3e6), False)])
def test_workers_whose_links_seem_slow_are_told_where_no_rates_are_recorded(slower, rates, said):
    """That something is lacking was said, and not what."""
    whole = setting_text(Setting(workers=("n0", "n1"), servers=("n2",)))
    nodes = {f"n{i}": {"nic_bytes_per_second": rate} for i, rate in enumerate(rates)}
    settings = [STEADY | {"run": "a"} | ({"setting": whole} if rates else {})]
    pushes = [
        push | {"pull_seconds": took, "push_seconds": took}
        for push in pushing((50, 50))
        for took in [0.1 * (slower if push["worker"] else 1.0)]
    ]
    found = read_tables(tables([{"run": "a", "extras": json.dumps({"nodes": nodes})}], settings, iterations=pushes))
    assert ["take longer than those beside them: worker 1 of a 3 times" in caveat for caveat in found.caveats] == [
        True
    ] * said


@pytest.mark.parametrize("late", [0.0, 0.8])
def test_the_last_push_of_a_worker_that_leaves_is_of_the_setting_before(late):
    """It is in flight when the setting changes, or its clock is late. Before, the whole setting after it was left out."""
    settings = [STEADY | {"run": "a", "workers": 3}, STEADY | {"run": "a", "seconds": 40.0}]
    leaving = pushing((0, 0, 41), first=(0.0, 0.0, 0.2 + late))
    pushes = sorted(pushing((100, 100)) + leaving, key=lambda push: push["seconds"])
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert [(row.workers, row.cycle_seconds) for row in found.rows] == [(3, pytest.approx(1.0)), (2, pytest.approx(1.0))]
    assert not found.caveats


def test_more_workers_than_a_setting_has_are_told():
    found = read_tables(tables([{"run": "a"}], [STEADY | {"run": "a"}], iterations=pushing((50, 50, 50), first=(0.0,) * 3)))
    assert "1 settings are left out: more workers pushed than they have" in found.caveats[0]


@pytest.mark.parametrize(("at", "said"), [(10.0, "19 iterations before the first setting of their run"), (0.0, "")])
def test_iterations_before_the_first_setting_are_told(at, said):
    settings = [STEADY | {"run": "a", "seconds": at}, STEADY | {"run": "b"}]
    found = read_tables(tables([{"run": "a"}, {"run": "b"}], settings, iterations=pushing((30, 30)) + pushing((9, 9), "b")))
    assert [said in caveat for caveat in found.caveats] == [True] * bool(said)


@pytest.mark.parametrize(("slow", "said"), [(2.0, True), (1.0, False)])
def test_cycles_that_get_shorter_for_longer_than_the_warm_up_are_told(slow, said):
    """A start that is slow for two fifths of one setting of eight: its first fifth alone is left out as a warm-up. Before,
    more than a fifth of the settings had to be so."""
    rng = np.random.default_rng(0)
    pushes, runs = [], "abcdefgh"
    for run in runs:
        cycles = np.where((np.arange(200) < 80) & (run == "a"), slow, 1.0) * np.exp(0.1 * rng.standard_normal((3, 200)))
        pushes += [
            {"run": run, "worker": w, "clock": i, "seconds": float(end)}
            for w, each in enumerate(cycles)
            for i, end in enumerate(np.cumsum(each))
        ]
    pushes.sort(key=lambda push: push["seconds"])
    settings = [STEADY | {"run": run, "workers": 3} for run in runs]
    found = read_tables(tables([{"run": run} for run in runs], settings, iterations=pushes))
    assert ["in 1 of 8 settings cycles are not steady: a from " in caveat for caveat in found.caveats] == [True] * said


def test_settings_of_few_iterations_and_runs_without_any_are_said_to_be_left_out():
    settings = [STEADY | {"run": run} for run in "abc"]
    pushes = pushing((20, 20)) + pushing((2, 2), run="b")
    found = read_tables(tables([{"run": run} for run in "abc"], settings, iterations=pushes))
    assert [row.run for row in found.rows] == ["a"]
    assert found.caveats == (
        "1 settings are left out: they have less than 3 iterations of each worker",
        "1 runs are left out: they have no iterations, and others have; calibrate to them alone",
    )


@pytest.mark.parametrize("strange", [{"policy": "ring"}, {"options": '{"local_steps": 4}'}, {"servers": 0}])
@pytest.mark.parametrize("recorded", ["iterations", "progress"])
def test_what_was_recorded_under_a_setting_that_is_left_out_is_none_of_the_one_before(strange, recorded):
    """Its cycles are three times as long, and counted as those of the setting before."""
    settings = [STEADY | {"run": "a", "seconds": at} | more for at, more in ((0.0, {}), (40.0, strange), (160.0, {}))]
    pushes = pushing((40, 40)) + pushing((40, 40), since=40.0, cycle=3.0) + pushing((40, 40), since=160.0)
    progress = [{"run": "a", "seconds": push["seconds"], "steps": i} for i, push in enumerate(pushes)]
    told = {"iterations": pushes} if recorded == "iterations" else {"progress": progress}
    found = read_tables(tables([{"run": "a"}], settings, **told))
    assert [row.cycle_seconds for row in found.rows] == pytest.approx([1.0, 1.0], rel=0.03)


@pytest.mark.parametrize("wanted", [EVERYTHING, Selection(workers=(2, 2))])
def test_totals_of_several_settings_are_of_none_of_them(wanted):
    """Neither where only one of them can be simulated, nor where only one is selected."""
    more = {"policy": "ring"} if wanted == EVERYTHING else {"workers": 3}
    settings = [STEADY | {"run": "a"}, STEADY | {"run": "a", "seconds": 5.0} | more, STEADY | {"run": "b"}]
    runs = [{"run": run, "seconds": 10.0, "steps": 10} for run in "ab"]
    found = read_tables(tables(runs, settings), wanted=wanted)
    assert [row.run for row in found.rows] == ["b"]
    assert "1 runs with several settings have totals only, and are left out: record progress" in found.caveats


def test_pushes_may_have_durations_only():
    """Each worker's follow each other: one of .5 s and one of 1 s complete three pushes per second."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}]
    took = [(0, 0.5, 40), (1, 1.0, 20)]
    pushes = [
        {"run": "a", "worker": w, "clock": i, "step_seconds": t, "compute_seconds": 0.8 * t}
        for w, t, count in took
        for i in range(count)
    ]
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert found.rows[0].cycle_seconds == pytest.approx(2 / 3, rel=0.05)
    assert found.rows[0].speeds == pytest.approx((1.5, 0.75))
    assert found.caveats[0].startswith("pushes have no times, only durations")


@pytest.mark.parametrize(
    ("changed", "rows", "why"),
    [
        ({"workers": 2}, 0, "1 settings are left out: more workers pushed than they have"),
        ({"workers": 4}, 1, "in 1 settings fewer workers pushed than they have"),
        ({"workers": 3}, 1, None),
    ],
)
def test_workers_that_pushed_are_held_against_those_of_the_setting(changed, rows, why):
    setting = {"run": "a", "seconds": 0.0, "servers": 1, "policy": "asp", "batch_size": 8}
    found = read_tables(tables([{"run": "a"}], [setting | changed], iterations=iterations()))
    assert len(found.rows) == rows
    assert [c.startswith(why) for c in found.caveats] == [True] if why else found.caveats == ()


@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_workers_that_wait_for_each_other_push_equally_often(policy):
    """One pushes every second, the other every two: nobody waits, whatever the setting says."""
    pushes = [
        {"run": "a", "worker": w, "clock": i, "seconds": (1 + w) * (i + 1.0)} for w in (0, 1) for i in range(100 // (1 + w))
    ]
    settings = [STEADY | {"run": "a", "policy": policy}]
    found = read_tables(tables([{"run": "a"}], settings, iterations=sorted(pushes, key=lambda p: p["seconds"])))
    said = (
        "in 1 settings of bsp some workers pushed more often than others: a 41 and 80 times; do they wait for each other?",
    )
    assert [c[: len(said[0])] for c in found.caveats] == [*said] * (policy == "bsp")


@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_a_log_of_the_chief_alone_has_its_cycles(policy):
    """One of four workers was logged, with a push per second: cycles were four seconds long. How long all pushes of the
    setting took is not known, as nobody knows how many there were."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 4, "servers": 1, "policy": policy, "batch_size": 8}]
    pushes = [{"run": "a", "worker": 0, "clock": i, "seconds": i + 1.0} for i in range(100)]
    (found,) = read_tables(tables([{"run": "a"}], settings, iterations=pushes)).rows
    assert found.cycle_seconds == pytest.approx(1.0)
    assert (found.all_pushes, np.isnan(found.all_seconds)) == (0, True)


def test_runs_with_too_little_progress_are_told():
    """Of four runs, one has progress of an hour, one a single interval, one none but totals, one all before its setting."""
    settings = [
        {"run": run, "seconds": 99.0 * (run == "d"), "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}
        for run in "abcd"
    ]
    progress = [
        {"run": run, "seconds": 9.0 * i, "steps": 90 * i} for run, n in (("a", 9), ("b", 2), ("d", 9)) for i in range(n)
    ]
    runs = [{"run": run, "seconds": 100.0, "steps": 10} for run in "abcd"]
    found = read_tables(tables(runs, settings, progress=progress))
    assert [row.run for row in found.rows] == ["a"]
    assert "2 runs are left out: of no setting of theirs does progress have 3 intervals" in found.caveats[0]
    assert found.caveats[0].endswith("after its beginning: b, d")
    assert found.caveats[1] == "1 runs are left out: they have no progress, and others have; calibrate to them alone: c"


def test_parts_that_do_not_fit_into_their_cycle_are_told():
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    longer = [push | {"pull_seconds": 0.3} for push in iterations()]
    found = read_tables(tables([{"run": "a"}], settings, iterations=longer))
    assert found.caveats[0].startswith("in 1 settings the parts of a cycle take longer than the cycle")


@pytest.mark.parametrize("part", ["compute_seconds", "pull_seconds", "push_seconds"])
def test_parts_in_milliseconds_beside_moments_in_seconds_are_refused(part):
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    wrong = [push | {part: 1000 * push[part]} for push in iterations()]
    with pytest.raises(ValueError, match=rf"Cannot read {part}: it is \d+ times as long as the cycle .* one unit, seconds"):
        read_tables(tables([{"run": "a"}], settings, iterations=wrong))


@pytest.mark.parametrize(("repeats", "error"), [(1, 0.1 / 10), (5, 0.1 / 10 * 5**0.5)])
def test_the_error_of_a_recorded_mean_is_from_how_its_cycles_vary(repeats, error):
    """A worker's 100 cycles, without the warm-up, vary by a tenth; where five in a row are alike, there are 20 to tell."""
    rng, runs, pushes = np.random.default_rng(0), [str(i) for i in range(24)], []
    for run in runs:
        took = np.exp(0.1 * rng.standard_normal(125 // repeats)).repeat(repeats)
        pushes += [{"run": run, "worker": 0, "clock": i, "seconds": t} for i, t in enumerate(np.cumsum(took))]
    settings = [{"run": run, "seconds": 0.0, "workers": 1, "servers": 1, "policy": "asp", "batch_size": 8} for run in runs]
    found = read_tables(tables([{"run": run} for run in runs], settings, iterations=pushes))
    assert [row.error for row in found.rows] == pytest.approx([error] * 24, rel=0.3)


@pytest.mark.parametrize(
    ("told", "sizes", "mean"),
    [
        ({"batch_size": 8, "options": '{"batch_sizes": [48, 16]}'}, (48, 16), 32),
        ({"options": '{"batch_sizes": [20, 20]}'}, (), 20),
        ({"batch_size": 32, "setting": [[40, 8], [16, 0]]}, (48, 16), 32),
        ({"batch_size": 32}, (), 32),
    ],
)
def test_batches_of_single_workers_are_read(told, sizes, mean):
    given = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp"} | told
    if "setting" in told:
        loads = tuple(map(tuple, told["setting"]))
        given["setting"] = setting_text(Setting(workers=("v", "w"), servers=("a",), loads=loads))
    found = read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10}], [given]))
    assert (found.rows[0].batch_sizes, found.rows[0].batch_size) == (sizes, mean)


@pytest.mark.parametrize("sizes", ["[48]", "[48, 0]", "[48, 16.5]", '"48,16"', "[48, true]"])
def test_batches_that_are_none_are_refused(sizes):
    given = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "options": f'{{"batch_sizes": {sizes}}}'}
    with pytest.raises(ValueError, match=r"Cannot read the batch sizes .* of run 'a': give 2 whole numbers, one per worker"):
        read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10}], [given]))


@pytest.mark.parametrize(
    ("extras", "why"),
    [
        ('{"nodes": [1]}', "`object`, got `array` - at `$.nodes`"),
        ('{"nodes": {"n0": {"nic_bytes_per_second": 0}}}', "nic_bytes_per_second"),
        ('{"n_stragglers": "two", "straggler_delay_ms": 10}', "n_stragglers"),
        ('{"total_batch_size": "many"}', "total_batch_size"),
        ('{"node_order": "n0, n1"}', "node_order"),
    ],
)
def test_extras_that_cannot_be_read_are_named(extras, why):
    """Before, two of them ended in a traceback, and two in a message that named no run."""
    given = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp"}
    with pytest.raises(
        ValueError, match=f"Cannot read the extras of run 'a'.*{re.escape(why)}.*correct it, or leave it out"
    ):
        read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10, "extras": extras}], [given]))


@pytest.mark.slow
def test_totals_are_fitted_from_both_starts_and_the_better_fit_is_kept(monkeypatch):
    """Totals of a made-up job with a model of 223 MB: its links are busy, and its updates are too short to be told. Started
    where updates are slow, the search ends in updates of 0.14 s, a model of 210 MB, and twice the error."""
    monkeypatch.setattr(search, "least_squares", least_squares)  # to the end: the two optima are near each other
    monkeypatch.setattr(search, "_ROUNDS", 2)
    recorded = [
        (row(1, 2, 64, model_shares=(0.29, 0.71)), 1.1986),
        (row(1, 3, 16, policy="bsp", model_shares=(0.179, 0.36, 0.461)), 0.6897),
        (row(1, 3, 64, policy="bsp", model_shares=(0.273, 0.339, 0.388)), 1.2129),
        (row(4, 2, 16, policy="bsp", model_shares=(0.324, 0.676)), 1.2607),
        (row(4, 2, 64, policy="bsp", model_shares=(0.658, 0.342)), 1.8006),
        (row(4, 2, 64, model_shares=(0.543, 0.457)), 1.2857),
        (row(6, 1, 16, policy="bsp"), 2.5311),
        (row(6, 2, 16, model_shares=(0.393, 0.607)), 0.8735),
        (row(6, 2, 64, model_shares=(0.49, 0.51)), 1.2547),
        (row(6, 3, 16, model_shares=(0.387, 0.258, 0.355)), 0.649),
    ]
    rows = [replace(setting, intra_threads=0, cycle_seconds=seconds) for setting, seconds in recorded]
    found = fit(rows, Constants(cores=1, jitter=0.1), resamples=0)
    assert found.constants.model_bytes == pytest.approx(223e6, rel=0.05)
    assert "apply_seconds" in found.refused
    assert found.error < 0.04


def test_a_setting_that_is_given_twice_counts_once_and_totals_of_several_are_said():
    one = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}
    other = one | {"run": "b"}
    runs = [{"run": name, "workload": "x", "seconds": 10.0, "steps": 10} for name in "ab"]
    found = read_tables(tables(runs, [one, one, other, other | {"seconds": 5.0, "workers": 3}]))
    assert [r.run for r in found.rows] == ["a"]
    assert found.caveats == ("1 runs with several settings have totals only, and are left out: record progress",)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"options": '{"local_steps": 4}'}, "local_steps"),
        ({"setting": {"local_steps": 4}}, "local_steps"),
        ({"setting": {"node_steps": (("w", 2),)}}, "node_steps"),
        ({"setting": {"pull_clocks": 3}}, "pull_clocks"),
        ({"setting": {"policy": "quorum", "quorum": 1, "grace_seconds": 0.1}}, "quorum"),
        ({"setting": {"checkpoint_seconds": 60.0}}, "checkpoint_seconds"),
        ({"setting": {"cache_rows": 10, "cache_clocks": 4}}, "cache_rows"),
    ],
)
def test_settings_whose_times_no_row_tells_are_left_out_with_a_note(told, name):
    plain = {"seconds": 0.0, "workers": 1, "servers": 1, "policy": "asp"}
    if "setting" in told:
        told = {"setting": setting_text(Setting(workers=("w",), servers=("a",), **told["setting"]))}
    runs = [{"run": run, "seconds": 10.0, "steps": 10} for run in "ab"]
    found = read_tables(tables(runs, [{"run": "a"} | plain, {"run": "b"} | plain | told]))
    assert [r.run for r in found.rows] == ["a"]
    assert f"1 settings with {name} are left out: calibration does not know what it costs" in found.caveats


def test_options_that_differ_and_are_not_used_are_named():
    plain = {"seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp"}
    told = ['{"fused": 1, "fuel": 1, "batch_sizes": [8, 16]}', '{"fused": 0, "fuel": 1}']
    runs = [{"run": run, "seconds": 10.0, "steps": 10} for run in "ab"]
    settings = [{"run": run, "options": options} | plain for run, options in zip("ab", told, strict=True)]
    found = read_tables(tables(runs, settings))
    assert "options that differ between settings are not used: fused" in found.caveats
    assert len(found.rows) == 2


def test_steps_and_seconds_are_enough_of_progress():
    settings = [{"run": "a", "seconds": 0.0, "workers": 4, "servers": 4, "policy": "bsp", "batch_size": 8}]
    progress = [{"run": "a", "seconds": 2.0 * i, "steps": 10 * i} for i in range(8)]
    found = read_tables(tables([{"run": "a"}], settings, progress=progress))
    assert [r.cycle_seconds for r in found.rows] == [pytest.approx(0.2)]


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_brief_pauses_between_records_of_progress_do_not_count(policy):
    """An evaluation of 20 s after every fourth record, which are 40 pushes of four workers apart."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 4, "servers": 4, "policy": policy, "batch_size": 8}]
    progress = [{"run": "a", "seconds": 2.0 * i + 20.0 * (i // 4), "steps": 40 * i} for i in range(16)]
    (found,) = read_tables(tables([{"run": "a"}], settings, progress=progress)).rows
    assert found.cycle_seconds == pytest.approx(0.2 if policy == "asp" else 0.05)


def test_a_recording_of_which_no_row_is_left_says_why(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.csv").write_text("seconds,workers,servers,policy\n0,2,1,ring\n")
    (tmp_path / "mine" / "runs.csv").write_text("run,seconds,steps\nmine,10,10\n")
    assert main.main(["trace", "convert", str(tmp_path / "mine"), "--out", str(tmp_path / "trace")]) == 0
    assert main.main(["calibrate", str(tmp_path / "trace"), "--out", str(tmp_path / "made.toml")]) == 2
    assert "policy ring are left out: it cannot be simulated; write bsp where all workers wait" in capsys.readouterr().err


def test_rows_of_progress_leave_out_pauses_and_intervals_between_settings():
    settings = [
        {"run": "a", "seconds": 0.0, "workers": 4, "servers": 4, "policy": "bsp", "batch_size": 8},
        {"run": "a", "seconds": 1000.0, "workers": 4, "servers": 4, "policy": "asp", "batch_size": 8},
    ]
    seconds = [0.0, 10.0, 20.0, 90.0, 100.0, 1000.0, 1010.0, 1020.0, 1030.0]
    steps = [0, 10, 20, 30, 40, 50, 90, 130, 170]
    progress = [{"run": "a", "seconds": t, "steps": s, "training_loss": 1.0} for t, s in zip(seconds, steps, strict=True)]
    changes = [{"run": "a", "seconds": 1000.0, "method": "checkpoint", "total_seconds": 180.0, "done": True}]
    runs = [{"run": "a", "workload": "x"}, {"run": "b", "workload": "x", "extras": '{"n_stragglers": 1}'}]
    found = read_tables(tables(runs, settings, progress=progress, reconfigurations=changes))
    assert [(r.policy, r.cycle_seconds) for r in found.rows] == [("bsp", pytest.approx(1.0)), ("asp", pytest.approx(1.0))]
    assert found.switch_seconds == (180.0,)
    assert "stragglers" in found.caveats[0]


def test_runs_with_delayed_links_are_rows_with_their_delays():
    """Of the first stragglers, or by node; a run whose stragglers come and go, or are of unknown size, is left out."""
    known = {"s": '{"n_stragglers": 2, "straggler_delay_ms": 30}'}
    left = {"t": '{"n_stragglers": 1}', "u": '{"n_stragglers": 1, "straggler_delay_ms": 9, "straggler_freq": "4"}'}
    nodes = json.dumps({"nodes": {"n1": {"link_delay_seconds": 0.01}}})
    runs = [
        {"run": run, "workload": "x", "seconds": 10.0, "steps": 30, "extras": extras}
        for run, extras in (known | left | {"v": nodes}).items()
    ]
    named = setting_text(Setting(workers=("n0", "n1", "n2"), servers=("n3",)))
    set_to = [{"run": r["run"], "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8} for r in runs]
    set_to[-1]["setting"] = named
    found = read_tables(tables(runs, set_to))
    assert {row.run: row.delays for row in found.rows} == {"s": (0.03, 0.03, 0.0), "v": (0.0, 0.01, 0.0, 0.0)}
    assert found.rows[0].unlike == {"delays"}
    assert "2 runs with stragglers are left out" in found.caveats[0]


def test_a_delayed_link_makes_the_mini_batches_of_its_worker_longer():
    """Alone, a worker waits for so many messages; the closed form and the engine agree. The fit finds their number."""
    constants = replace(TRUE, jitter=0.0, delay_messages=5.0)
    plain, delayed = row(1, 1), row(1, 1, delays=(0.1, 0.2))
    longer = predicted(constants, [delayed]) - predicted(constants, [plain])
    assert longer == pytest.approx([5 * 0.3])
    spans = closed_form.spans([plant(constants, r) for r in (plain, delayed)], [False, False])
    assert np.diff(spans.cycle) == pytest.approx([5 * 0.3])
    rows = [row(w, 2, batch, delays=d) for w, batch in ((2, 8), (6, 32)) for d in ((), (0.2,), (0.1, 0.1))]
    found = fit(timed(rows, constants), Constants(cores=8, model_bytes=1.0, jitter=0.0), resamples=0)
    assert found.constants.delay_messages == pytest.approx(5, rel=0.1)
    none = told_by_formula([row(w, 2) for w in (2, 4)], TRUE)
    assert "delay_messages" in fit(none, Constants(model_bytes=1.0), resamples=0, engine=False).refused


def iterations(workers=3, cycles=60, sleepy=False):
    """Pushes of a worker that computes for half a second, more or less, and pulls and pushes for a tenth each."""
    rng = np.random.default_rng(0)
    rows = []
    for worker in range(workers):
        compute = 0.5 * np.exp(0.1 * rng.standard_normal(cycles))
        compute[::20] += 5.0 * sleepy
        ends = np.cumsum(compute + 0.2)
        for clock, (c, end) in enumerate(zip(compute, ends, strict=True)):
            rows.append({"run": "a", "seconds": end, "worker": worker, "clock": clock, "compute_seconds": c})
            rows[-1] |= {"pull_seconds": 0.1, "push_seconds": 0.1, "wait_seconds": 0.0}
    return sorted(rows, key=lambda r: r["seconds"])


@pytest.mark.parametrize("sleepy", [False, True])
def test_rows_and_noise_of_iterations(sleepy):
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    made = tables([{"run": "a", "workload": "x"}], settings, iterations=iterations(sleepy=sleepy))
    found = read_tables(made)
    assert found.rows[0].cycle_seconds == pytest.approx(0.7 + 0.25 * sleepy, rel=0.1)
    assert found.rows[0].pull_seconds == pytest.approx(0.1)
    assert found.noise.jitter == pytest.approx(0.1, rel=0.25)
    assert (found.noise.sleeps is not None) == sleepy
    if sleepy:
        assert found.noise.sleeps.probability == pytest.approx(0.05, rel=0.5)
        assert found.noise.sleeps.mean_seconds == pytest.approx(5.0, rel=0.1)


def test_rows_leave_out_pushes_during_a_reconfiguration():
    settings = [
        {"run": "a", "seconds": at, "workers": 3, "servers": 1, "policy": "asp", "batch_size": batch}
        for at, batch in ((0.0, 8), (30.0, 16))
    ]
    slow = [r | {"compute_seconds": 5.0} if 20.0 < r["seconds"] <= 30.0 else r for r in iterations()]
    changes = [{"run": "a", "seconds": 30.0, "method": "migrate", "total_seconds": 10.0}]
    found = read_tables(tables([{"run": "a", "workload": "x"}], settings, iterations=slow, reconfigurations=changes))
    assert [r.batch_size for r in found.rows] == [8, 16]
    assert max(r.compute_seconds for r in found.rows) < 0.6


def test_a_failed_reconfiguration_splits_its_setting_into_two_rows():
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    changes = [{"run": "a", "seconds": 30.0, "method": "migrate", "total_seconds": 10.0, "done": False}]
    found = read_tables(tables([{"run": "a", "workload": "x"}], settings, iterations=iterations(), reconfigurations=changes))
    assert [r.cycle_seconds for r in found.rows] == pytest.approx([0.7, 0.7], rel=0.1)
    assert [r.all_seconds for r in found.rows] == pytest.approx([20.0, 12.0], rel=0.1)


def test_rows_have_the_links_of_their_nodes():
    """Links of two rates: a row's NICs are those of its workers, then of its servers, over the usual one."""
    nodes = {f"n{i}": {"nic_bytes_per_second": rate} for i, rate in enumerate((1e6, 2e6, 1e6, 5e5))}
    names = setting_text(Setting(workers=("n0", "n1", "n2"), servers=("n3",)))
    set_to = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8, "setting": names}]
    runs = [{"run": "a", "workload": "x", "extras": json.dumps({"nodes": nodes})}]
    found = read_tables(tables(runs, set_to, iterations=iterations()))
    (one,) = found.rows
    assert found.nic_bytes_per_second == 1e6
    assert one.nics == (1.0, 2.0, 1.0, 0.5)
    assert one.all_pushes == 180
    assert one.all_seconds == pytest.approx(60 * 0.7, rel=0.1)
    made = cluster(replace(TRUE, nic_bytes_per_second=1e6), one.setting_only())
    assert [kind.nic_bytes_per_second for _, kind in made.nodes] == [1e6, 2e6, 1e6, 5e5]


@pytest.mark.parametrize(
    ("told", "shares", "inferred"),
    [
        ({"options": '{"model_shares": [3, 1]}', "extras": '{"server_cpus": [1, 1]}'}, (0.75, 0.25), False),
        ({"options": '{"model_shares": [2, 2]}'}, (), False),
        ({"shares": (0.9, 0.1)}, (0.9, 0.1), False),
        ({"shares": (), "extras": '{"server_cpus": [1.5, 0.5]}'}, (0.75, 0.25), True),
        ({"extras": '{"server_cpus": [1.5, 0.5]}'}, (0.75, 0.25), True),
        ({"extras": '{"server_cpus": [1.5]}'}, (), False),
        ({"extras": '{"server_cpus": "two"}'}, (), False),
    ],
)
def test_rows_have_the_shares_of_their_servers(told, shares, inferred):
    """As the setting or its options say; else as the servers use processors, which is said."""
    given = {"run": "a", "seconds": 0.0, "workers": 1, "servers": 2, "policy": "asp", "batch_size": 8}
    given["options"] = told.get("options")
    if "shares" in told:
        given["setting"] = setting_text(Setting(workers=("w",), servers=("a", "b"), model_shares=told["shares"]))
    run = {"run": "a", "workload": "x", "seconds": 10.0, "steps": 10, "extras": told.get("extras")}
    found = read_tables(tables([run], [given]))
    assert found.rows[0].model_shares == pytest.approx(shares)
    assert ["as they use processors" in caveat for caveat in found.caveats] == [True] * inferred


@pytest.mark.parametrize("shares", ["[1]", "[0.5, -0.5]", "[0, 0]", '"even"', "0.5", "[true, null]"])
def test_shares_that_are_none_are_an_error(shares):
    given = {"run": "a", "seconds": 0.0, "workers": 1, "servers": 2, "options": f'{{"model_shares": {shares}}}'}
    with pytest.raises(ValueError, match=r"Cannot read the model shares .* of run 'a': give 2 numbers, one per server"):
        read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10}], [given]))


def linked(run, *rates, servers=("n3",)):
    """A run on hosts with links of these rates, in bytes per second, and its only setting."""
    names = setting_text(Setting(workers=("n0", "n1", "n2"), servers=servers))
    nodes = {f"n{i}": {"nic_bytes_per_second": rate} for i, rate in enumerate(rates)}
    setting = {"run": run, "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8, "setting": names}
    return {"run": run, "workload": "x", "seconds": 10.0, "steps": 30, "extras": json.dumps({"nodes": nodes})}, setting


def test_the_links_of_a_run_are_relative_to_the_whole_recording():
    """The unit is the median over all runs, whichever run a row belongs to."""
    runs, settings = zip(linked("a", *[1e6] * 4), linked("b", *[5e5] * 4), linked("c", *[1e6] * 4), strict=True)
    found = read_tables(tables(runs, settings))
    assert found.nic_bytes_per_second == 1e6
    assert [r.nics for r in found.rows] == [(), (0.5,) * 4, ()]
    assert found.caveats == ()


def test_links_that_are_not_used_give_a_caveat():
    runs, settings = zip(linked("a", 1e6, 1e6, 2e6, servers=("n0",)), linked("b", *[1e6] * 3, servers=("n0",)), strict=True)
    found = read_tables(tables(runs, settings))
    assert [r.nics for r in found.rows] == [(), ()]
    (caveat,) = found.caveats
    assert caveat.startswith("1 settings have servers on workers' machines: all links")


@pytest.mark.parametrize(
    ("nodes", "named", "used"),
    [
        ([1e6, 1e6, 2e6, 1e6], None, False),
        ([1e6, 1e6, 2e6], '{"workers": ["n0", "n1", "n2"], "servers": ["n3"]}', False),
        ([1e6, 1e6, 2e6, 1e6], '{"workers": ["n0", "n1", "n2"], "servers": ["n3"]}', True),
        ([1e6, 1e6, 1e6, 1e6], None, True),
    ],
    ids=["no names", "another name", "names", "alike"],
)
def test_links_whose_machine_is_not_known_give_a_caveat(nodes, named, used):
    """They were ignored, and all links counted as alike, without a word."""
    run, setting = linked("a", *nodes)
    found = read_tables(tables([run], [setting | {"setting": named}]))
    assert found.rows[0].nics == ((1.0, 1.0, 2.0, 1.0) if named and used else ())
    assert ["the column setting does not name nodes that extras has" in caveat for caveat in found.caveats] == [True] * (
        not used
    )


def test_completion_is_the_engines_time_for_as_many_pushes():
    rows = [replace(row(2, 1, batch, policy="bsp"), all_pushes=20) for batch in (8, 32)]
    still = replace(TRUE, jitter=0.0)
    # Two workers push in each step, one directly after the other.
    assert completed(still, rows).seconds == pytest.approx(9.5 * predicted(still, rows), rel=0.06)


def test_a_source_whose_counts_do_not_match_its_seconds_is_refused():
    with pytest.raises(ValueError, match="trimtuner-tf-ps: its counts"):
        read_tables({}, "trimtuner-tf-ps")
