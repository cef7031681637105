"""What `joint` chooses the system from."""

from dataclasses import replace

import pytest

from tests.support.toy import job
from tuners.joint.candidates import Candidates
from tuners.joint.system_model import SystemModel
from tuners.joint.training import Training
from tuners.settings import Choice, Integer


def sizes(knob, now=16):
    """The mini-batches among the candidates of a job that frees nothing but `knob`."""
    of = job("no knobs")
    of = replace(of, start=replace(of.start, batch_size=now), space=replace(of.space, knobs=(knob,) if knob else ()))
    training = Training(of, SystemModel(of))
    return list(dict.fromkeys(s.batch_size for s in Candidates(of, training).settings()))


@pytest.mark.parametrize(
    ("knob", "expected"),
    [
        (None, [16]),
        (Choice("batch_size", (8, 16, 64)), [8, 16, 64]),
        (Integer("batch_size", 4, 64), [4, 8, 16, 32, 64]),  # such a job kept the mini-batch of its start
        (Integer("batch_size", 10, 50), [10, 16, 20, 40]),
        (Integer("batch_size", 16, 16), [16]),
    ],
)
def test_mini_batches_come_from_the_options_or_the_range_of_the_knob(knob, expected):
    assert sizes(knob) == expected


def test_a_wide_range_gives_few_mini_batches_from_end_to_end():
    found = sizes(Integer("batch_size", 1, 4096))
    assert (found[0], found[-1]) == (1, 4096)
    assert len(found) <= 8
