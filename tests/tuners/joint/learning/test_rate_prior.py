"""The prior over rates: the file that ships, and the rule that makes it."""

import math

import pytest

from harness.training import learn_rates
from harness.training.learn_rates import fastest
from tuners.joint.learning.heat import Expected, rate_prior


def test_the_prior_that_ships_expects_a_rate_in_the_upper_decades_of_its_range():
    found = rate_prior()
    assert 0.01 < found.median < 0.5
    assert 0.5 < found.deviation < 2.0


def test_chances_are_those_of_a_log_normal_distribution():
    expected = Expected(median=0.1, deviation=1.0)
    assert expected.chance_above(0.1) == pytest.approx(0.5)
    assert expected.chance_above(0.1 * math.e) == pytest.approx(0.158655, abs=1e-6)
    assert expected.chance_above(0.1 / math.e) == pytest.approx(1 - 0.158655, abs=1e-6)


def test_the_best_rate_is_the_first_that_makes_nearly_the_best_improvement():
    courses = {0.01: [2.0, 1.5, 1.1], 0.1: [1.5, 1.01, 1.0], 0.3: [1.2, 1.1, 1.05], 1.0: []}
    assert fastest(courses, untrained=2.3) == pytest.approx(0.1)
    assert fastest({0.01: [1.0], 0.04: [1.0]}, untrained=2.0) == pytest.approx(0.02)  # between rates that are alike
    assert fastest({0.01: [2.5], 0.1: []}, untrained=2.3) is None


@pytest.mark.parametrize("asked", ["--first 0", "--first 99", "--first 990 --count 11", "--count 0"])
def test_nothing_is_learned_from_members_on_which_tuners_are_compared(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["learn_rates", *asked.split(), "--out", str(tmp_path / "prior.toml")])
    with pytest.raises(SystemExit) as ended:
        learn_rates.main()
    assert ended.value.code == 2
    assert "those from 100 to 999 are for training" in capsys.readouterr().err
