"""Which files a requested setting passes through while the program runs: a shorter way is easier to follow."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reports.papers.grid import loaded, played
from simulators.engine.inputs import EngineInputs
from tuners.actions import Reconfigure, Run

ROOT = Path(__file__).parents[3]
PRODUCT = tuple(f"{ROOT / package}/" for package in ("tuners", "traces", "simulators", "harness"))
FILES = {
    "simulators/branch.py",
    "simulators/engine/preparation.py",
    "simulators/reconfiguration/reconfiguration.py",
    "simulators/system.py",
    "tuners/space.py",
    "tuners/playing/system.py",
}
"""From the action to the setting in force: the system, the contract's checks, numbers for the engine, the way there."""


def holds(value, wanted):
    """Whether `value` is `wanted`, or a tuple that has it inside. The engine's inputs are numbers, and have no setting."""
    if value is wanted:
        return True
    return isinstance(value, tuple) and not isinstance(value, EngineInputs) and any(holds(part, wanted) for part in value)


def passage(simulated, action):
    """The files of the functions that get `action` or its setting as an argument, in order of the calls; a file that is
    called several times in a row counts once. What the setting is asked about itself does not count."""
    stays = []

    def follow(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PRODUCT):
            return
        if code.co_name.startswith("<") or code.co_qualname.startswith("Setting."):
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(value is action or holds(value, action.setting) for value in given):
            name = Path(code.co_filename).relative_to(ROOT).as_posix()
            if stays[-1:] != [name]:
                stays.append(name)

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        simulated.perform(action)
    finally:
        sys.setprofile(before)
    return stays


@pytest.mark.parametrize("method", ["in place", "checkpoint", "migrate", "relocate"])
def test_a_setting_passes_through_six_files_and_comes_back_at_most_ten_times(method):
    simulated = played("digits", loaded("digits")[1].start, learns=False)
    simulated.perform(Run(clocks=5))
    start = simulated.job.start
    if method == "in place":
        action = Reconfigure(replace(start, learning_rate=2 * start.learning_rate))
    else:
        action = Reconfigure(replace(start, workers=start.workers[:-1]), method=method)
    stays = passage(simulated, action)
    assert simulated.branches[0].setting == action.setting
    assert set(stays) == FILES
    assert len(stays) - len(FILES) <= 10  # a return is a stay in a file that the setting had left before
