"""JobSnapshots of the branch that trains: branches that nobody trains, to which the job can return."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from tuners.actions import Fork, Free, Job, Rejected, Setting, Window
from tuners.joint.job.running_branch import LEARNING, RunningBranch, machines_of, with_values
from tuners.joint.job.running_model import RunningModel
from tuners.joint.job.steps import Steps

__all__ = ["JobSnapshots", "Snapshot"]

_Room: TypeAlias = tuple[int, dict[str, float], tuple[str, ...], frozenset[str]]

_AS_UNTRAINED = 0.05  # nats that a model's loss differs from that of the untrained one it may stand for
_PATIENCE = 8  # mini-batches per worker in which the system may end what it is doing to the branch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A branch that nobody trains, and what is known of its model."""

    branch: int
    setting: Setting
    named: Setting
    pushes: int
    level: float
    loss: float
    seconds: float  # when it was taken


class JobSnapshots:
    """Takes and frees snapshots, and returns to them. Without `are_wanted` it takes none. `run` trains so many clocks."""

    def __init__(
        self, job: Job, branch: RunningBranch, model: RunningModel, run: Callable[[int], Steps[Window]], *, are_wanted: bool
    ) -> None:
        self._job, self._branch, self._model, self._run = job, branch, model, run
        self.are_wanted = are_wanted
        self.first: Snapshot | None = None  # of the untrained model, where it was kept
        self._branches = 1  # that the job has
        self._refused: _Room | None = None  # as a fork was last refused
        self._saves_usd = job.target.minimise == "usd"

    def take(self) -> Steps[Snapshot | None]:
        """A fork of the branch; None where the job has no room for one. It is not asked for again until it may have."""
        if not self.are_wanted or self._refused == self._room:
            return None
        branch, model = self._branch, self._model
        try:
            number = yield from Fork(branch.number)
        except Rejected:
            self._refused = self._room
            return None
        self._branches += 1
        # Where only an earlier model of the last window was validated, that tells about how good this one is.
        level = model.validated[-1] if math.isnan(model.level) and model.validated else model.level
        return Snapshot(number, branch.setting, branch.named, model.pushes, level, model.loss, branch.seconds)

    @property
    def _room(self) -> _Room:
        """What decides whether a fork is refused: the branches on servers that have too little memory, or machines that are
        lost, without which the branch does not go on yet."""
        branch = self._branch
        held = branch.setting.held(self._job.blocks, self._job.hottest)
        return self._branches, held, branch.setting.workers, branch.available

    def drop(self, kept: Snapshot | None) -> Steps[None]:
        """Free a snapshot that is not needed any more."""
        if kept is not None and kept.branch != self._branch.number:
            with suppress(Rejected):
                yield from Free(kept.branch)
                self._branches -= 1

    def return_to(self, kept: Snapshot, setting: Setting, why: str) -> Steps[Snapshot | None]:
        """Continue from `kept`, under `setting`. Returns another snapshot of it."""
        yield from self._leave()
        branch, model = self._branch, self._model
        branch.number, branch.setting, branch.named, branch.wanted = kept.branch, kept.setting, kept.named, {}
        branch.chosen = setting
        model.pushes, model.level, model.loss = kept.pushes, kept.level, kept.loss
        model.diverged, model.lowest_level = False, math.inf
        # A snapshot holds the machines of its setting, and they are paid for. But at a rate that is held, what is trained
        # while machines change may spoil an untrained model, so that one is left to `give_back`.
        moves = self._saves_usd and machines_of(kept.setting) != machines_of(setting)
        moves = moves and (kept.pushes > 0 or self._job.space.frees("learning_rate"))
        again = None if moves else (yield from self.take())
        # Always, because the system may have moved the branch off machines that were lost. It is not known to where.
        if not (yield from branch.change_in_steps(setting, why)):
            yield from self._run(1)
            if again is None:
                again = yield from self.take()
            yield from branch.insist(with_values(branch.setting, setting, LEARNING), why)
        elif moves:
            again = yield from self.take()
        return again

    def begin_again(self, setting: Setting, why: str) -> Steps[bool]:
        """Continue from the untrained model, under `setting`, if it was kept; whether it was."""
        if self.first is None:
            return False
        self.first = yield from self.return_to(self.first, setting, why)
        return True

    def give_back(self) -> Steps[None]:
        """Keep the present model in place of the untrained one, if that one holds further machines: once it has learned, or
        where it is still about as good. At a rate that is held, not while its loss is higher."""
        first, model = self.first, self._model
        if first is None or not (self._saves_usd and model.pushes):
            return
        moved = math.log(max(model.minibatches.mean, 1e-9)) - math.log(model.gauge.untrained)
        if moved > _AS_UNTRAINED and not self._job.space.frees("learning_rate"):
            return
        if not (model.has_learned or abs(moved) <= _AS_UNTRAINED):
            return
        if machines_of(first.setting) - machines_of(self._branch.setting):
            yield from self.drop(first)
            self.first = yield from self.take()

    def _leave(self) -> Steps[None]:
        """Free the branch. One that the system is still changing has to run until that is done: no other may before."""
        for _ in range(_PATIENCE):
            try:
                yield from Free(self._branch.number)
            except Rejected:
                if self._model.diverged:
                    return
                yield from self._run(len(self._branch.setting.workers))
            else:
                self._branches -= 1
                return
