"""Published figures of Cruise and TensorFlowOnline: the calibrated scenarios reproduce them within what is promised.

Everything is simulated from the scenario files. The number of constants fitted to a table is given beside its values in
`reports.papers.grid`, or in the file of the constant. Left out are figures on which a paper contradicts itself: (14, 2) as
the best of 16 machines, NMF's drops of Fig. 6 against Tables Ia and III, the percentages in the text on Table V.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from reports.papers.cruise_and_bo_online import FORMS, model_ratios
from reports.papers.grid import (
    CRUISE,
    FIGURE_8,
    TABLE_III,
    TENSORFLOWONLINE,
    epoch_seconds,
    grid,
    iteration_seconds,
    loaded,
    mixed_epoch_seconds,
    played,
    published_setting,
    relative_performance,
    run_to_target,
    split,
)
from tests.support.marks import slow
from tuners.actions import Run
from tuners.bo_online import bo_online

# ---------------------------------------------------------------------------------------------------------------- Cruise


@pytest.mark.parametrize(
    ("name", "best", "within"),
    [
        ("cruise-nmf-32", (23, 9), 0.08),
        ("cruise-mlr-32", (27, 5), 0.08),
        ("cruise-lda-32", (18, 14), 0.06),
        slow("cruise-nmf-52-m4-xlarge", (42, 10), 0.09),
    ],
)
def test_the_best_split_and_how_much_worse_others_are(name, best, within):
    """Tables Ia, Ic and III; one constant per workload, z, fitted to 2 to 4 values. All but MLR at (18, 14), see below."""
    found = grid(name)
    assert min(found, key=found.__getitem__) == best
    for cell, ratio in CRUISE[name].items():
        if (name, cell) != ("cruise-mlr-32", (18, 14)):
            assert found[cell] / found[best] == pytest.approx(ratio, rel=within), cell


def test_linear_compute_cannot_make_mlr_as_slow_as_published_on_few_workers():
    """At (18, 14) it is published as 2.29 times (27, 5). Work that is divided among workers takes at most 27 / 18 = 1.5
    times as long, and communication takes less time there, not more. The rest may be memory, which is not modelled."""
    assert 1.4 < epoch_seconds("cruise-mlr-32", 18) / epoch_seconds("cruise-mlr-32", 27) < 1.5 < 2.29


@pytest.mark.slow
def test_a_smaller_machine_moves_the_best_split():
    """Table Ic, m4.large: one constant fitted to two values. The published best, (34, 18), is third best here."""
    found = grid("cruise-nmf-52-m4-large")
    least = min(found.values())
    for cell, ratio in CRUISE["cruise-nmf-52-m4-large"].items():
        assert found[cell] / least == pytest.approx(ratio, rel=0.02), cell


def test_more_topics_want_more_workers():
    """Table Ib: of its three splits another is best with 4,000 topics. One constant, z, fitted to two values."""
    seconds = {w: epoch_seconds("cruise-lda-4k-32", w) for w in (18, 23, 27)}
    assert seconds[23] < seconds[27] < seconds[18]
    assert seconds[27] / seconds[23] == pytest.approx(1.20, rel=0.02)


@pytest.mark.parametrize("name", [slow(n) if "-52-" in n else n for n in CRUISE])
def test_a_queue_predicts_the_ratios_of_the_simulator(name):
    """Table I. Eq. 4, which adds pulls to compute, is up to 26 % off where workers do not wait for each other."""
    found, ours, published = grid(name), model_ratios(name, "queue"), model_ratios(name, "paper")
    least = min(found.values())
    off = [(ours[w] / found[w, s] * least - 1, published[w] / found[w, s] * least - 1) for w, s in CRUISE[name]]
    assert max(abs(queue) for queue, _ in off) < 0.07
    if loaded(name)[1].start.policy == "asp":
        assert max(abs(eq_4) for _, eq_4 in off) > 0.1
    else:
        assert [queue for queue, _ in off] == pytest.approx([eq_4 for _, eq_4 in off])


@pytest.mark.parametrize("row", TABLE_III, ids=lambda row: f"{row[0]}-{row[1][0]}")
def test_relative_performance_of_what_cruise_chose(row):
    """Table III: the best's epoch over the chosen split's, on the grid of the simulator."""
    name, _, choice, best, performance, _ = row
    found = grid(name)
    assert min(found, key=found.__getitem__) == best
    assert relative_performance(name, choice) == pytest.approx(performance, rel=0.03)


def test_epochs_on_machines_of_two_kinds():
    """Fig. 8, seconds: two constants, the pull and z, fitted to the three. That the best grid point is (19+4, 9+0), and by
    how much it beats (20+4, 8+0), is not fitted."""
    for roles, even, seconds in FIGURE_8.values():
        assert mixed_epoch_seconds(roles, even=even) == pytest.approx(seconds, rel=0.08), roles
    tried = {w: mixed_epoch_seconds((w, 4, 28 - w, 0), even=False) for w in range(17, 22)}
    assert min(tried, key=tried.__getitem__) == 19


def test_the_start_of_the_mixed_run_is_that_of_the_paper():
    _, job = loaded("cruise-nmf-mixed")
    kinds = {n.name: n.type for n in job.nodes}
    counts = [
        sum(kinds[n] == t for n in m) for m in (job.start.workers, job.start.servers) for t in ("r4.xlarge", "r4.4xlarge")
    ]
    assert counts == [25, 2, 3, 2]
    assert len(kinds) == 32


def test_machines_that_come_and_go_leave_the_base_of_sixteen():
    _, job = loaded("cruise-nmf-opportunistic")
    assert (len(job.start.workers), len(job.start.servers)) == (14, 2)
    system = played("cruise-nmf-opportunistic", job.start, learns=False)
    assert set(job.start.workers) | set(job.start.servers) == {f"n{i}" for i in range(16)}
    counts = [len(system.perform(Run(seconds=seconds)).nodes) for seconds in (600, 1200, 1200, 1200)]
    assert counts == [16, 32, 16, 32]


# ------------------------------------------------------------------------------------------------------ TensorFlowOnline


def cells(name, *labels):
    return [pytest.param(name, label, id=f"{name}-{label}") for label in labels]


PROMISED = {"tf36-cifar": 0.05, "tf36-logr": 0.12, "tf36-svm": 0.14, "tf36-imagenet8": 0.05}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *cells("tf36-cifar", "worst", "average", "tfonline", "best"),
        *cells("tf36-logr", "worst", "average", "tfonline", "best"),
        *cells("tf36-svm", "average", "tfonline", "best"),
        *cells("tf36-imagenet8", "worst", "average", "tfonline", "best"),
    ],
)
def test_seconds_per_iteration(name, label):
    """Table III. Constants fitted / values: CIFAR 2/4, LogR 3/4, SVM 2/3, ImageNet8 4/4 (a description). SVM's Worst is left
    out: one worker alone would have to take 1.8 times as long for a mini-batch as each of 34 does."""
    row = TENSORFLOWONLINE[name][label]
    assert iteration_seconds(name, row) == pytest.approx(row[-1], rel=PROMISED[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "few", "many", "within"), [("tf36-logr", "average", "best", 0.12), ("tf36-cifar", "worst", "best", 0.10)]
)
def test_iterations_against_workers(name, few, many, within):
    """Table III: iterations with many workers over those with few, by real SGD on a proxy whose rate was chosen for this."""
    rows = TENSORFLOWONLINE[name]
    pushes = {
        label: fmean(run_to_target(name, published_setting(name, rows[label]), seed)[0] for seed in (0, 1))
        for label in (few, many)
    }
    assert pushes[many] / pushes[few] == pytest.approx(rows[many][5] / rows[few][5], rel=within)


@pytest.mark.slow
@pytest.mark.parametrize(("label", "within"), [("average", 0.20), ("tfonline", 0.10), ("best", 0.10)])
def test_rounds_of_the_synchronous_job(label, within):
    """Table III, ImageNet8: summed gradients make rounds fall as workers rise. Worst, 3975 rounds, takes 25 % fewer here."""
    row = TENSORFLOWONLINE["tf36-imagenet8"][label]
    pushes, _ = run_to_target("tf36-imagenet8", published_setting("tf36-imagenet8", row), 0)
    assert pushes / row[0] == pytest.approx(row[5], rel=within)


@pytest.mark.parametrize("name", TENSORFLOWONLINE)
def test_tf36_starts_under_the_papers_average_setting(name):
    _, job = loaded(name)
    assert published_setting(name, TENSORFLOWONLINE[name]["average"]) == job.start
    assert len(job.space.knobs) == 10  # Table I has eleven, of which servers and workers are one here


def test_splits_are_of_the_scenarios_cluster():
    made = split("cruise-nmf-52-m4-large", 34)
    assert (len(made.workers), len(made.servers)) == (34, 18)


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_tensorflowonline_are_options_that_it_has(form):
    _, job = loaded("tf36-svm")
    clocks = 3 * len(job.start.workers if form == "paper" else job.nodes)
    assert next(bo_online(job, **FORMS[form])) == Run(clocks=clocks)
