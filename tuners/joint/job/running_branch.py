"""The branch that trains: its setting, how that is changed, and the machines that are available."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tuners import policies
from tuners.actions import Install, Job, Pushes, Reconfigure, Rejected, Setting, SyncPolicy, Window
from tuners.joint.job.running_model import RunningModel
from tuners.joint.job.steps import Steps, by_the_cheapest

__all__ = ["LEARNING", "RunningBranch", "machines_of", "with_values"]

_RULE = ("policy", "staleness", "quorum")  # who waits for whom
_HEAT = ("learning_rate", "momentum", "outer_rate", "outer_momentum", *_RULE)

LEARNING = (*_HEAT, "batch_size", "local_steps", "node_steps")
"""What learning depends on, and takes effect without moving anything."""


class RunningBranch:
    """The branch that trains, and its setting."""

    def __init__(self, job: Job, model: RunningModel) -> None:
        self._job, self._model = job, model
        self.number, self.setting = 0, job.start
        # What was chosen last. The system drops machines that are lost, and goes on at the same rate: that is as hot as
        # the rate for fewer workers, which nobody has chosen.
        self.chosen = job.start
        # The same as the system knows it: of a policy that was installed, it has the one that was named before.
        self.named = job.start
        self.seconds = 0.0  # since the job began
        self.available = frozenset(n.name for n in job.nodes)
        self.cluster_changed = False  # machines have come or gone, and nobody has asked for a placement since then
        self.change_seconds = 0.0  # the dearest change of the system so far
        self.placed_seconds = 0.0  # when the system was last changed
        self.wanted: dict[str, Any] = {}  # values that were refused and are asked for again
        self._unfinished = set[str]()  # workers whose cycle had begun when local steps or loads were changed

    def insist(self, setting: Setting, why: str, names: tuple[str, ...] = LEARNING) -> Steps[None]:
        """Reconfigure; where that is refused, because the system is making up for a loss, the values `names` of `setting`
        are asked for again before every window, and with every other change, until they are in force."""
        if not (yield from self.change(setting, why)):
            self.wanted = _differing(setting, self.setting, names)

    def change(self, setting: Setting, why: str) -> Steps[bool]:
        """Reconfigure by the cheapest method; whether the branch now runs under `setting`. Where roles have not changed,
        what learning depends on is asked for again as it was: it was for other machines."""
        asked, now = setting != self.setting, self.setting
        still = {n: value for n, value in self.wanted.items() if getattr(setting, n) == getattr(now, n)}
        setting = replace(setting, **still)
        if setting == now or (yield from self.change_in_steps(setting, why)):
            self.wanted = {}
            self.chosen = self.setting
            return True
        self.wanted |= _differing(now, self.setting, LEARNING)
        return not asked

    def change_in_steps(self, setting: Setting, why: str) -> Steps[bool]:
        """As `change`, without what was refused before. What learning depends on comes first: it takes effect at once, and
        training goes on while roles change."""
        learning = with_values(self.setting, setting, LEARNING)
        if learning not in (self.setting, setting) and (yield from self._reconfigure(learning, why)):
            why = ""
        return (yield from self._reconfigure(setting, why))

    def placed(self, setting: Setting) -> Setting:
        """`setting` with the present roles, batch, threads and bits: what is not heat."""
        return with_values(self.setting, setting, _HEAT)

    def _reconfigure(self, setting: Setting, why: str) -> Steps[bool]:
        """Put the branch under `setting`; a policy that its knobs do not name is installed."""
        named = _under(self.named, setting) if self._is_installed(setting) else setting
        # An installed policy stays until a setting names another one than the last that was named.
        stays = _under(setting, self.named) == _under(self.setting, self.named)
        try:
            if not stays and _under(named, self.named) == self.named:
                yield from Install(self._policy(setting), branch=self.number, reason=why)
                self.setting = _under(setting, self.setting)
                if named == self.named:
                    return True
                why = ""
            cost = yield from by_the_cheapest(self._job, Reconfigure(named, branch=self.number, reason=why))
        except Rejected:
            return False
        self.seconds += cost.seconds
        self.change_seconds = max(self.change_seconds, cost.seconds)
        if cost.done:
            if setting != self.placed(setting):
                self.placed_seconds = self.seconds
            if (setting.local_steps, setting.loads) != (self.setting.local_steps, self.setting.loads):
                self._unfinished = set(setting.workers)
            if setting.loads != self.setting.loads:
                self._model.minibatches.relative.clear()
            self.setting, self.named = setting, named
        else:  # a machine was lost meanwhile
            self.cluster_changed = True
        return cost.done

    def _policy(self, setting: Setting) -> SyncPolicy:
        """The policy of `setting`. Where nobody waits for local steps, servers average half as many pushes as workers, as in
        FedBuff: a single push changes the model by all that one worker has learned."""
        if setting.policy == "asp" and self._job.space.takes_local_steps:
            return policies.buffered(max(1, len(setting.workers) // 2))
        return policies.of_setting(setting)

    def _is_installed(self, setting: Setting) -> bool:
        """Whether the policy of `setting` is none that the knobs name, where others may be installed."""
        return self._job.installs_policies and not self._job.space.admits(_under(setting, self._job.start))

    # ------------------------------------------------------------------------------- changes by the system itself

    def has_changed_by_itself(self, window: Window) -> bool:
        """Whether the system has put the branch under another setting in `window`."""
        return window.setting is not None and window.setting != self.named

    def see_leavers(self, pushes: Pushes) -> None:
        """Take in pushes of workers that have left: what they had begun to send kept the links busy until it arrived."""
        left = ~np.isin(pushes.worker, [at for at, n in enumerate(self._job.nodes) if n.name in self.setting.workers])
        self.placed_seconds = max([self.placed_seconds, *pushes.seconds[left].tolist()])

    def follow(self, window: Window) -> frozenset[str]:
        """Take in the setting that the system has put the branch under, and the machines that are there; those that are
        back."""
        if window.setting is not None and self.has_changed_by_itself(window):
            self.named, self.cluster_changed = window.setting, True
            self.setting = _under(self.setting, window.setting) if self._is_installed(self.setting) else window.setting
        before, self.available = self.available, frozenset(n.name for n in window.nodes or self._job.nodes)
        self.cluster_changed = self.cluster_changed or self.available != before
        return self.available - before

    def unfinished(self, pushes: Pushes) -> list[int]:
        """The pushes of cycles that had begun when local steps or loads were changed: they have the numbers before."""
        names = [n.name for n in self._job.nodes]
        first = {names[int(worker)]: place for place, worker in reversed(list(enumerate(pushes.worker)))}
        ended = self._unfinished & set(first)
        self._unfinished -= ended
        return [first[name] for name in ended]


def machines_of(setting: Setting) -> set[str]:
    """The names of the machines that `setting` uses."""
    return {*setting.workers, *setting.servers}


def with_values(setting: Setting, other: Setting, names: Sequence[str]) -> Setting:
    """`setting` with the values `names` of `other`."""
    return replace(setting, **{name: getattr(other, name) for name in names})


def _under(rule: Setting, setting: Setting) -> Setting:
    """`setting` with the policy of `rule`."""
    return with_values(setting, rule, _RULE)


def _differing(setting: Setting, other: Setting, names: Sequence[str]) -> dict[str, Any]:
    """The values `names` of `setting` that `other` does not have."""
    return {name: getattr(setting, name) for name in names if getattr(setting, name) != getattr(other, name)}
