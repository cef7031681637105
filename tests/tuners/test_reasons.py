"""Tuners of papers say why they ask something, with the numbers that decided it; nothing is decided by the words."""

import re
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from tests.support.bespoke_truth import Truth, TruthSystem, play
from tests.support.toy import job, toys
from tuners import resolve
from tuners.actions import Fork, Install, Reconfigure
from tuners.bespoke_bo import bespoke_bo
from tuners.reasons import changes, counted, machines, short
from tuners.testing import exchanges

START = job().start
TOYS = ("every knob", "roles by node", "a node leaves")


def reasons(asked):
    """Of all that changes something; a snapshot, or a fork that only measures, does not."""
    changing = [a for a in asked if isinstance(a, Reconfigure | Install) or (isinstance(a, Fork) and a.setting is not None)]
    return [a.reason for a in changing]


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(
    "tuner", ["cruise", "bo_online", "bo_online[pooled=false,careful=false]", "mltuner", "mltuner[as_printed=true]", "rlp"]
)
def test_whatever_a_tuner_of_a_paper_changes_it_says_why(tuner, toy):
    told = reasons(e.action for e in exchanges(resolve(tuner).factory, toys()[toy](0)))
    assert all(told), told
    assert all("\n" not in words and len(words) < 400 for words in told)


def test_cruise_tells_both_predictions_of_an_epoch():
    (told,) = reasons(e.action for e in exchanges(resolve("cruise").factory, toys()["every knob"](0)))
    found = re.fullmatch(
        r"3 workers, 2 servers -> 4 workers, 1 server: (\S+) s per epoch predicted instead of (\S+) s, (\S+) % less; "
        r"5 % is asked for",
        told,
    )
    assert found is not None, told
    wanted, now, less = map(float, found.groups())
    assert less == pytest.approx(100 * (1 - wanted / now), abs=0.2)


def test_bo_online_tells_the_posterior_and_the_cost():
    told = reasons(e.action for e in exchanges(resolve("bo_online").factory, toys()["every knob"](0)))
    assert told[0].endswith(": initial setting 1 of 10, all but the roles, so that costs can be told apart")
    assert re.search(
        r"the model expects \S+ \+- \S+ s left, against \S+ s; expected improvement \S+ s; the change costs \S+ s$", told[-1]
    )


def test_mltuner_tells_what_a_trial_may_save_and_what_came_of_it():
    told = reasons(e.action for e in exchanges(resolve("mltuner").factory, toys()["every knob"](0)))
    assert re.fullmatch(r"batch_size 4 -> 2, on trial: it may save \S+ s of \S+ s left, and costs \S+ s", told[0])
    assert any(re.match(r"the job goes on with the trial: its loss fell by \S+, that of the job by \S+; ", x) for x in told)


def test_mltuner_as_printed_tells_the_trial_time_and_every_speed():
    told = reasons(e.action for e in exchanges(resolve("mltuner[as_printed=true]").factory, toys()["every knob"](0)))
    assert told[0].startswith("initial tuning; trial 1: ")
    assert any(
        re.match(r"the trial time is \S+ s, as a trial is converging at \S+ of loss per second; trial ", x) for x in told
    )
    assert any(re.match(r"trial \d+: unstable at \S+ of loss per second, the best so far \S+; trial ", x) for x in told)


def test_bespoke_bo_tells_the_expected_iteration_and_its_improvement():
    small = Truth({"g2.2xlarge": 1, "c4.2xlarge": 1, "c4.8xlarge": 2}, 4096, model_bytes=4e7, jitter=0.01, overlap=True)
    of = partial(bespoke_bo, evaluations=3, stop_early=False, draws=16, particles=48)
    told = reasons(play(of(small.job), TruthSystem(small), 12))
    assert told[0] == "evaluation 1 of at most 3: 4 workers, 4 servers, loads by cores"
    assert re.fullmatch(
        r"evaluation 2 of at most 3: \d workers?, \d servers?, \S+ s per iteration expected, \S+ s is the best so far; "
        r"expected improvement \S+ s",
        told[1],
    )


# ------------------------------------------------------------------------------------------------------------- the words


def test_one_thing_is_singular():
    assert [counted(n, "server") for n in (0, 1, 2)] == ["0 servers", "1 server", "2 servers"]
    assert machines(replace(START, workers=("n0",), servers=("n1", "n2"))) == "1 worker, 2 servers"


def test_numbers_have_three_digits_and_no_exponent_where_people_would_not_write_one():
    assert [short(x) for x in (0.012345, 12.345, 999.4, 12345.6, inf)] == ["0.0123", "12.3", "999", "12346", "inf"]


def test_a_change_is_told_by_its_fields():
    other = replace(START, workers=START.workers[:2], policy="ssp", staleness=3, learning_rate=0.12345)
    assert changes(START, other) == (
        f"workers {len(START.workers)} -> 2, policy {START.policy} -> ssp, staleness 0 -> 3, learning_rate 0.01 -> 0.123"
    )
    assert changes(START, replace(other, momentum=0.5, local_steps=2)).endswith("momentum 0 -> 0.5, 1 more")
    assert changes(START, replace(START, workers=START.workers[::-1])) == "other workers"
    assert changes(START, replace(START, data_shares=(0.2, 0.3, 0.5))) == "other data shares"
    jit = replace(START, options=(("jit", False),))
    assert changes(jit, replace(jit, options=(("jit", True),))) == "jit False -> True"
    assert changes(START, START) == "the same setting"
