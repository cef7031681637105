"""The families by name, and the names of their members."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from harness.families.draft import Draft
from harness.families.lot import Lot
from tuners.near_names import near_names

__all__ = ["FAMILIES", "TRAINING", "Family", "audience", "member_name", "members", "parse_name", "single"]

TRAINING = range(100, 1000)
"""The members of every family that tuners may be trained and tuned on."""

_LAST = 999_999
"""The largest index of a member."""


@dataclass(frozen=True, slots=True)
class Family:
    """A distribution over scenarios."""

    name: str
    version: int  # raised when a change would alter a member; names have it, so that a name means one file for ever
    where: str  # "module:function" that draws a member
    summary: str

    @property
    def draw(self) -> Callable[[Lot], Draft]:
        """The function that draws a member."""
        module, _, attribute = self.where.partition(":")
        return cast("Callable[[Lot], Draft]", getattr(import_module(module), attribute))


_HERE = "harness.families"
_LEARNING, _TIMING = f"{_HERE}.learning_jobs", f"{_HERE}.timing_jobs"

FAMILIES = {
    f.name: f
    for f in (
        Family(
            "learning", 1, f"{_LEARNING}:learning", "the whole of training, from a poor start: rate, batch, policy, workers"
        ),
        Family(
            "placement", 1, f"{_TIMING}:placement", "timing only: workers and servers, roles of machines, loads of devices"
        ),
        Family("policies", 1, f"{_LEARNING}:policies", "who waits for whom: policies at held rates, with stragglers"),
        Family("elastic", 1, f"{_TIMING}:elastic", "timing only: machines come, go and fail; roles are free"),
        Family("replayed", 1, f"{_LEARNING}:replayed", "as learning, under conditions that were recorded on real clusters"),
        Family("mixed", 1, f"{_LEARNING}:mixed", "all at once: training, roles of unequal machines, losses of nodes"),
        Family(
            "hotkeys", 1, f"{_HERE}.hot_key_jobs:hotkeys", "embedding tables with hot rows: which server holds which block"
        ),
        Family("localsteps", 1, f"{_HERE}.local_step_jobs:localsteps", "slow links: local steps and the outer optimizer"),
        Family("ages", 1, f"{_HERE}.age_jobs:ages", "asynchronous training: the bound on the age of gradients"),
        Family(
            "preempted",
            1,
            f"{_HERE}.preempted_jobs:preempted",
            "spot instances lost together, by time or money; checkpoints",
        ),
    )
}


def member_name(family: str, index: int) -> str:
    """The name of a member's scenario: "learning-v1-0007"."""
    return f"{family}-v{FAMILIES[family].version}-{index:04}"


def parse_name(name: str) -> tuple[str, int]:
    """Family and index of a member's name. Raises ValueError for any other name."""
    found = re.fullmatch(r"([a-z]+)-v(\d+)-(\d{4,6})", name)
    if found is None or found[1] not in FAMILIES or FAMILIES[found[1]].version != int(found[2]):
        raise ValueError(f"No member {name!r} of a family: names are like {member_name('learning', 7)}.")
    return found[1], int(found[3])


def members(text: str) -> list[str]:
    """The names of the members that "FAMILY[7]" or "FAMILY[0:20]" mean; the last one is left out, as in Python.

    Raises ValueError for an unknown family, for members that do not exist, and for no members.
    """
    found = re.fullmatch(r"([^\[\]]*)(?:\[(-?\d+)(?::(-?\d+))?\])?", text.strip())
    family = found[1] if found else text
    if found is None or family not in FAMILIES:
        if family not in FAMILIES and found is not None:
            raise ValueError(f"No family {family!r}: {near_names(family, FAMILIES)}")
        raise ValueError(f"Cannot read the members {text!r}: write FAMILY[7], or FAMILY[0:20].")
    if found[2] is None:
        raise ValueError(f"Cannot draw all members of {family!r}: say which, as in {family}[0:20].")
    first = int(found[2])
    after = first + 1 if found[3] is None else int(found[3])
    if not 0 <= first < after <= _LAST + 1:
        raise ValueError(
            f"Cannot draw {text!r}: members are numbered from 0 to {_LAST}, and the first comes before the last."
        )
    return [member_name(family, i) for i in range(first, after)]


def single(name: str) -> str:
    """What `harness.scenario.load` loads the member of that name by: "drawn:learning[7]"."""
    family, index = parse_name(name)
    return f"drawn:{family}[{index}]"


def audience(index: int) -> str:
    """What members with such an index are for."""
    if index < 20:
        return "for everybody: to look at, to compare on, to report"
    if index < TRAINING.start:
        return "for judging the tuners that this project trains: nothing may be tuned on it"
    if index in TRAINING:
        return "for training and tuning tuners"
    return "for judging: nobody may tune on it"
