"""A log that is fed to a fresh tuner gives it the state of the recorded one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.drive import play, replay
from traces.exchanges import Exchange, read_log, write_log
from tuners.actions import Job, Run, Tuner
from tuners.baselines.random_search import random_search
from tuners.testing.toys import Toy, toys


def brief(job: Job) -> Tuner:
    yield from Run(clocks=1)


def silent() -> Tuner:
    yield from ()


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Toy, list[Exchange]]:
    system = toys()["every knob"](3)
    played = play(lambda job: random_search(job, clocks=20), system)
    write_log(tmp_path / "log.gz", played.exchanges)
    return system, read_log(tmp_path / "log.gz")


def test_a_replayed_log_rebuilds_the_tuner(recorded: tuple[Toy, list[Exchange]]) -> None:
    system, exchanges = recorded
    cut = len(exchanges) // 2
    asked = replay(random_search(system.job, clocks=20), exchanges[:cut])
    assert asked == exchanges[cut].action


def test_another_tuner_does_not_fit_the_log(recorded: tuple[Toy, list[Exchange]]) -> None:
    system, exchanges = recorded
    other = replace(system.job, seed=system.job.seed + 1)
    with pytest.raises(ValueError, match=r"Cannot replay exchange \d+: the tuner asks Fork .*, the log has Fork"):
        replay(random_search(other, clocks=20), exchanges)
    with pytest.raises(ValueError, match="exchange 0: the tuner asks nothing"):
        replay(silent(), exchanges)


def test_a_tuner_that_has_returned_asks_nothing() -> None:
    played = play(brief, toys()["one knob"](0))
    assert len(played.exchanges) > 1
    assert replay(brief(toys()["one knob"](0).job), played.exchanges) is None


def test_what_a_tuner_has_not_asked_is_not_expected_of_it(recorded: tuple[Toy, list[Exchange]]) -> None:
    """The log of a job that ended during a change has one more Run than its tuner asked for."""
    system, exchanges = recorded
    cut = len(exchanges) // 2
    rest = replace(exchanges[cut], action=Run(clocks=1), asked=False)
    assert replay(random_search(system.job, clocks=20), [*exchanges[:cut], rest]) == exchanges[cut].action
