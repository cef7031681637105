"""Where MLtuner's paper and its public code part ways: each way of each option, as it is seen from outside."""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.forest import EPOCH, RATE, Forest, Scripted, job
from tuners import mltuner as mltuner_package
from tuners import resolve
from tuners.actions import Fork, Target
from tuners.mltuner import mltuner
from tuners.mltuner.summariser import Summariser
from tuners.settings import Choice
from tuners.testing import exchanges

LOSS = Target("loss", 1e-9)


class Batches(Scripted):
    """Rates; after `halved_after` proposals also mini-batches of half the size, of which an epoch has twice as many."""

    def __init__(self, *rates, halved_after):
        super().__init__(*rates)
        self.left = halved_after

    def propose(self):
        self.left -= 1
        found = super().propose()
        return found and found | {"batch_size": 10 if self.left >= 0 else 5}


def trials(search, law, of, **options):
    """Seconds of every trial but the winner, which goes on."""
    forest = Forest(of, law=law)
    exchanges(partial(mltuner, as_printed=True, search=search, **options), forest, most=120)
    return [sum(forest.seconds_of(b)) for b, _ in forest.trials() if b in forest.dead]


@pytest.mark.parametrize(("option", "later"), [("decided", 96.0), ("branch", float(EPOCH))])
def test_later_trials_last_as_long_as_decided_or_as_the_branch_that_converged(option, later):
    """Nothing falls in the first 48 pushes. At 96 seconds a trial is as long as an epoch may be, 50, and converges: by the
    paper the time decided is 96 seconds, by the public code the 50 that the branch did run. Of smaller batches an epoch has
    more pushes, and would allow 96."""

    def late(setting, loss, clocks):
        return loss * (0.9 if clocks >= 48 and setting.batch_size == 10 else 1.0)

    search = Batches(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, halved_after=5)
    of = job(RATE, Choice("batch_size", (5, 10)), target=LOSS)
    lengths = trials(search, late, of, trial_time=option, bound="always")
    assert lengths == [50.0] * 4 + [later]


def zigzag(setting, loss, clocks):
    """Falls by a thousandth per push, every other one 0.03 lower: noise that windows of two average out."""
    return 1 - 0.001 * (clocks + 1) - 0.03 * ((clocks + 1) % 2)


@pytest.mark.parametrize(("rule", "decided"), [("equal", 48.0), ("code", 24.0)])
def test_windows_are_ten_or_as_many_as_a_whole_number_of_pushes_makes(rule, decided):
    """24 pushes are ten windows of two or three by the paper, whose averages rise now and then, and twelve of two by the
    code. Of 48 both are long enough."""
    lengths = trials(Scripted(0.1, 0.2, 0.3, 0.4, 0.05), zigzag, job(target=LOSS), windows_rule=rule)
    assert set(lengths) == {decided}


def test_the_code_leaves_out_what_fills_no_window_and_the_paper_does_not():
    """29 pushes are 14 windows of two; the last push, which has jumped up, is in none of them."""
    t = np.arange(29.0)
    x = np.append(100.0 - t[:-1], 100.0)
    equal, code = (Summariser(windows_rule=rule, diverges=math.inf)(t, x) for rule in ("equal", "code"))
    assert (equal.label, code.label) == ("unstable", "converging")
    assert code.speed == pytest.approx(1.0)


def test_up_to_nineteen_pushes_the_code_averages_nothing():
    x = [zigzag(None, 0.0, k - 1) for k in range(19)]
    equal, code = (Summariser(windows_rule=rule)(np.arange(19.0), x) for rule in ("equal", "code"))
    assert code.noise == pytest.approx(0.029)
    assert equal.noise < 0.015


def test_the_command_of_the_readme_is_the_paper_to_the_letter():
    text = Path(mltuner_package.__file__).with_name("README.md").read_text("utf-8")
    (command,) = re.findall(r"^'(mltuner\[.*\])'$", text, re.MULTILINE)
    given = dict(resolve(command).factory.keywords)
    assert given.pop("as_printed")
    assert given == {"bound": "retune", "start_clocks": 0, "diverges": math.inf, "snapshot": "none"}
    forest = Forest(job())
    exchanges(resolve(command).factory, forest, most=40)
    assert not any(fork.testing for fork in forest.asked(Fork))  # the parent's loss is not measured
