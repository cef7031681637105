"""What `joint` chooses the system from."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy import job
from tuners.joint.job.training import Training
from tuners.joint.machines.candidates import Candidates
from tuners.joint.models.shares import Shares
from tuners.joint.models.system_model import SystemModel
from tuners.settings import Choice, Integer


def sizes(knob, now=16):
    """The mini-batches among the candidates of a job that frees nothing but `knob`."""
    of = job("no knobs")
    of = replace(of, start=replace(of.start, batch_size=now), space=replace(of.space, knobs=(knob,) if knob else ()))
    training = Training(of, SystemModel(of))
    seen = list[int]()

    def value(setting):
        seen.append(setting.batch_size)
        return 0.0

    Candidates(of, training, Shares(of, SystemModel(of))).best(value, len(of.nodes))
    return list(dict.fromkeys(seen))


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


def test_of_very_many_settings_places_and_sizes_are_chosen_in_turn():
    """With all knobs free on 64 machines, one choice took 52 seconds of computing."""
    of = job("no knobs")
    kinds = (Integer("batch_size", 1, 4096), Choice("transfer_bits", (16, 32)), Integer("local_steps", 1, 4096))
    roles = tuple(Choice(f"role/{n.name}", ("worker", "server")) for n in of.nodes)
    nodes = tuple(replace(n, type=str(i)) for i, n in enumerate(of.nodes))  # none is like another one
    of = replace(of, nodes=nodes, space=replace(of.space, nodes=nodes, knobs=(*kinds, *roles)), budget_seconds=1e5)
    asked, wanted = [], (256, 16, 64)

    def value(setting):
        asked.append(setting)
        distance = sum(
            abs(np.log(a / b))
            for a, b in zip(wanted, (setting.batch_size, setting.transfer_bits, setting.local_steps), strict=True)
        )
        return len(setting.workers) / (1 + distance)

    found = Candidates(of, Training(of, SystemModel(of)), Shares(of, SystemModel(of))).best(value, len(nodes))
    assert (found.batch_size, found.transfer_bits, found.local_steps) == wanted
    assert len(found.workers) == len(nodes) - 1
    assert len(asked) < 3_000


def test_a_wide_range_gives_few_mini_batches_from_end_to_end():
    found = sizes(Integer("batch_size", 1, 4096))
    assert (found[0], found[-1]) == (1, 4096)
    assert len(found) <= 8
