"""What the elastic store's executors say to one another, and the copies of blocks that they say it about.

Everything here is a value: a copy changes by being replaced, so that no message is altered while it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "MASTER",
    "Ack",
    "Answer",
    "Apply",
    "Ask",
    "Backed",
    "Copy",
    "Data",
    "Drop",
    "Entry",
    "Farewell",
    "Gone",
    "Install",
    "Leave",
    "Members",
    "Moved",
    "NewView",
    "Operation",
    "Origin",
    "Ownership",
    "Part",
    "Release",
    "Report",
    "Settled",
    "Start",
    "State",
    "Sweep",
    "Sync",
    "Tally",
    "Tell",
    "Update",
    "operate",
    "summary",
]

MASTER = "master"
Apply: TypeAlias = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(value, slots, update) to (value, slots)."""


class Entry(NamedTuple):
    """A line of an ownership table. The higher epoch is the newer."""

    epoch: int
    owner: str
    source: str | None = None  # relocation on demand: where the frozen original still is


class Part(NamedTuple):
    """One block's share of a push that is not yet committed."""

    number: int
    update: Any
    whole: frozenset[int]  # all blocks of the push


class State(NamedTuple):
    """A block as it travels: everything that its next owner must know."""

    value: Any
    slots: Any = None
    version: int = 0  # operations so far; of two copies of a block the shorter history is a beginning of the longer
    staged: Mapping[str, Part] = {}  # by worker
    applied: Mapping[str, int] = {}  # by worker: number of its last push committed here


@dataclass(frozen=True)
class Tally:
    """What the executors count together; only its contents change."""

    redirected: list[int] = field(default_factory=lambda: [0])
    waited: list[int] = field(default_factory=lambda: [0])
    promised: dict[int, int] = field(default_factory=dict)  # block to the version that must survive


class Operation(NamedTuple):
    """A change of one block: "stage" an update, "commit" it, or "forget" it."""

    step: str
    worker: str
    number: int
    part: Part | None = None


def operate(state: State, operation: Operation, apply: Apply) -> State:
    """The block after `operation`; the same object if there was nothing to do, as for a repeated request."""
    step, worker, number, part = operation
    staged = state.staged.get(worker)
    if step == "stage":
        if part is None or state.applied.get(worker, 0) >= number or (staged and staged.number >= number):
            return state
        return state._replace(version=state.version + 1, staged={**state.staged, worker: part})
    if staged is None or staged.number != number:
        return state
    rest = {w: p for w, p in state.staged.items() if w != worker}
    if step == "forget":
        return state._replace(version=state.version + 1, staged=rest)
    value, slots = apply(state.value, state.slots, staged.update)
    return State(value, slots, state.version + 1, rest, {**state.applied, worker: number})


def summary(state: State) -> State:
    """What the master must know of a copy: the block without its value, slots and updates."""
    staged = {worker: part._replace(update=None) for worker, part in state.staged.items()}
    return state._replace(value=None, slots=None, staged=staged)


class Origin(NamedTuple):
    """The frozen original of a block, the o of <o, u>."""

    epoch: int  # of the relocation that it belongs to
    state: State


class Ask(NamedTuple):
    """A request, or the part of it that concerns some blocks: step is "pull", "stage", "commit" or "forget"."""

    step: str
    reply_to: str
    worker: str
    number: int
    parts: Mapping[int, Any]  # block to update; None where the step needs none
    whole: frozenset[int]
    origins: Mapping[int, Origin]


class Answer(NamedTuple):
    """One block's answer, with the ownership table's line, so that whoever asked the wrong node learns."""

    step: str
    number: int
    block: int
    value: Any
    entry: Entry
    origin: Origin | None


class Start(NamedTuple):
    """Master to source: hand these blocks over."""

    destination: str
    blocks: tuple[int, ...]
    on_demand: bool


class Ownership(NamedTuple):
    """Source to destination: the block will be yours; hold what is asked of it."""

    block: int
    entry: Entry


class Ack(NamedTuple):
    """Destination to source: I hold requests for it."""

    block: int


class Data(NamedTuple):
    """Source to destination: the block itself."""

    block: int
    origin: Origin


class Moved(NamedTuple):
    """Source or destination to master: the table's new line."""

    block: int
    entry: Entry


class Tell(NamedTuple):
    """Master to subscribers: the table's new line."""

    block: int
    entry: Entry


class Release(NamedTuple):
    """Destination to source: installed and backed up, forget your copy."""

    block: int
    entry: Entry


class Settled(NamedTuple):
    """To master: nothing of the last change of this block is left to do."""

    block: int
    entry: Entry


class Sweep(NamedTuple):
    """Master to source: send this block without waiting for a worker to carry it."""

    block: int


class Copy(NamedTuple):
    """Owner to backup: the whole block. Also how an executor keeps what it has."""

    block: int
    owner: str
    epoch: int
    state: State


class Update(NamedTuple):
    """Owner to backup: the operation that leads to `version`."""

    block: int
    version: int
    operation: Operation


class Backed(NamedTuple):
    """Backup to owner: I have everything up to `version`; -1: I did not need what you sent."""

    block: int
    version: int


class Drop(NamedTuple):
    """Owner to a former backup: forget the copy that you have from me."""

    block: int


class Members(NamedTuple):
    """Master to all: who may hold backups."""

    members: tuple[str, ...]


class Sync(NamedTuple):
    """Master to all but the one who leaves: stop using it, then say farewell to it."""

    node: str
    members: tuple[str, ...]
    table: Mapping[int, Entry]


class Farewell(NamedTuple):
    """To the one who leaves, or from it: this is my last message to you."""


class Leave(NamedTuple):
    """Master to the one who leaves, its last message: go after so many farewells, your requests being answered."""

    farewells: int  # from all who are present, and from those who left before and had written
    left: frozenset[str]  # to whom there is nothing more to say


class Gone(NamedTuple):
    """Last message of the one who leaves."""

    told: frozenset[str]  # to whom it has said farewell, having written to them


class NewView(NamedTuple):
    """Master to survivors: somebody died; stop, and report what you have."""


class Report(NamedTuple):
    """Survivor to master: its copies."""

    states: Mapping[int, State]  # summaries


class Install(NamedTuple):
    """Master to all: the table of the new view; resume."""

    table: Mapping[int, Entry]
    members: tuple[str, ...]
    holders: Mapping[int, tuple[str, ...]]  # who has a copy, of whatever age
