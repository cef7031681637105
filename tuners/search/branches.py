"""The branches that a search trains, also where the job loses machines meanwhile.

The system continues on the machines that are left, and each branch recovers while it is trained. Until a branch that has
begun to recover is ready, no other can be trained, forked or evaluated; a branch that has not begun cannot be forked. So a
search trains a branch on until it is ready, trains the parent of its trials for some pushes before it forks it again, and
makes trials of the parent's setting in force.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tuners.actions import Action, Fork, Free, Rejected, Run, Setting, Window
from tuners.settings import Node

__all__ = ["Forked", "TrainedBranch", "TrainingWindows", "drop", "fork", "fork_from", "recover", "train"]


class TrainedBranch(NamedTuple):
    """A branch and its setting, and how long it has been trained."""

    branch: int
    setting: Setting
    clocks: int = 0  # pushes since it was forked
    nodes: tuple[Node, ...] = ()  # that were available at the end of its last window; () where that is not known

    def after(self, seen: Window) -> TrainedBranch:
        """The branch after a window of training, in which the system itself may have changed its setting."""
        clocks = self.clocks + seen.clocks
        return self._replace(setting=seen.setting or self.setting, clocks=clocks, nodes=seen.nodes)

    @property
    def lost(self) -> frozenset[str]:
        """Machines that its setting uses, and that were not available."""
        used = frozenset((*self.setting.workers, *self.setting.servers))
        return used - {n.name for n in self.nodes} if self.nodes else frozenset()


class TrainingWindows(NamedTuple):
    """What training a branch for some time has shown."""

    trained: TrainedBranch  # at the end
    seen: Window  # of that time
    last: Window  # until it had recovered; the same as `seen` where no machine was lost


class Forked(NamedTuple):
    """A fork, and its parent, which may have been trained meanwhile."""

    parent: TrainedBranch
    trial: TrainedBranch | None  # None: there is no such setting, or the system refuses


def train(
    trained: TrainedBranch, length: Run, lost: frozenset[str] = frozenset()
) -> Generator[Action[Any], Any, TrainingWindows]:
    """Train a branch for `length`, and on until it has recovered from a loss of machines, now or before: those are `lost`.
    Raises Rejected where the system refuses that."""
    seen = last = yield from replace(length, branch=trained.branch)
    gone = lost | _lost_in(seen)
    recovers = bool(gone & {*trained.setting.workers, *trained.setting.servers})
    trained = trained.after(seen)
    while recovers and last.status == "running":
        # Workers that are left may push until the loss is detected; nobody does from then on until the branch has recovered.
        last = yield from Run(clocks=len(trained.setting.workers), branch=trained.branch)
        trained, gone = trained.after(last), gone | _lost_in(last)  # more may be lost meanwhile
        recovers = bool(gone & trained.lost)
    return TrainingWindows(trained, seen, last)


def _lost_in(seen: Window) -> frozenset[str]:
    """Machines that were lost in a window, of which some may be there again."""
    return frozenset(e.node for e in seen.events if e.event in ("left", "failed"))


def fork_from(
    parent: TrainedBranch, make: Callable[[TrainedBranch], Setting | None], why: str = ""
) -> Generator[Action[Any], Any, Forked]:
    """A fork under the setting that `make` returns for its parent, for the reason `why`. A parent that has lost machines
    recovers first, if it has to."""
    setting = make(parent)
    branch = None if setting is None else (yield from fork(parent.branch, setting, why))
    if branch is None and parent.lost:
        recovered = yield from recover(parent)
        if recovered is None:
            return Forked(parent, None)
        parent, setting = recovered, make(recovered)
        branch = None if setting is None else (yield from fork(parent.branch, setting, why))
    if setting is None or branch is None:
        return Forked(parent, None)
    return Forked(parent, TrainedBranch(branch, setting, nodes=parent.nodes))


def recover(trained: TrainedBranch) -> Generator[Action[Any], Any, TrainedBranch | None]:
    """A branch that has lost machines, trained until it has recovered; None where the system refuses that."""
    try:
        return (yield from train(trained, Run(clocks=len(trained.setting.workers)), trained.lost)).trained
    except Rejected:
        return None


def fork(branch: int, setting: Setting | None = None, why: str = "") -> Generator[Action[Any], Any, int | None]:
    """A new branch, or None where the system refuses."""
    try:
        return (yield from Fork(branch, setting, reason=why))
    except Rejected:
        return None


def drop(branch: int) -> Generator[Action[Any], Any, None]:
    """Free a branch, if it exists."""
    with suppress(Rejected):
        yield from Free(branch)
