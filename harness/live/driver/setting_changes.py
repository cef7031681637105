"""What a tuner asks of a branch's setting and policy, and what it may ask just now."""

from __future__ import annotations

from harness.live.driver.control import Control
from harness.live.driver.reconfiguration import LiveReconfiguration
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.driver.view.status import setting_words
from harness.live.protocol.names import peers
from harness.live.worker.spec import Spec
from simulators.engine.optimizers import slots
from tuners.actions import Cost, Install, Reconfigure, Rejected, Setting, SyncPolicy
from tuners.playing import system
from tuners.playing.system import (
    branch_of,
    check_installs,
    check_no_reconfiguration,
    check_running,
    in_place,
    method_of,
    policy_of,
)

__all__ = ["SettingChanges"]


class SettingChanges:
    """Changes settings and policies of a job's branches. Who calls a method holds `Control.news`."""

    def __init__(self, spec: Spec, control: Control) -> None:
        self.job, self._spec, self._control, self._view = spec.job, spec, control, control.view

    def reconfigure(self, action: Reconfigure) -> Cost:
        """Change a branch's setting, by the method that the action names."""
        number, control = action.branch, self._control
        branch = branch_of(self._view.branches, number)
        method = method_of(action, self.job)
        self.check_idle(branch, f"reconfigure branch {number}")
        setting = self.admitted(action.setting, branch)
        policy = policy_of(setting, branch.setting, branch.policy)
        branch.setting_before_loss = branch.whole(setting, self.job.space)
        if in_place(branch.setting, setting, method):
            self._put(number, setting, policy)
            return Cost(seconds=0.0, stall_seconds=0.0)
        control.switch_to(number)
        self.wait_until_idle(f"reconfigure branch {number}")
        begun = LiveReconfiguration(
            control.runtime,
            number,
            branch.setting,
            setting,
            None if policy is branch.policy else policy,
            method,
            kept={name for n, other in self._view.branches.items() if n != number for name in peers(other.setting)},
            block_bytes=self._block_bytes(),
            blocks=self._spec.layout.count,
            blocks_in_flight=self._spec.scenario.costs.blocks_in_flight,
            waited=action.wait,
        )
        control.begin_reconfiguration(begun)
        if not action.wait:
            return Cost(seconds=0.0, stall_seconds=0.0)
        control.wait(lambda: control.reconfiguration is not begun)  # at the latest until the job is over
        return begun.cost()

    def install(self, action: Install) -> None:
        """Put a policy of the tuner's own in force."""
        branch = branch_of(self._view.branches, action.branch)
        check_installs(action.policy, self.job)
        self.check_idle(branch, f"install a policy in branch {action.branch}")
        self._put(action.branch, branch.setting, action.policy, installed=self._view.performed)

    def _put(self, number: int, setting: Setting, policy: SyncPolicy, *, installed: int | None = None) -> None:
        """`installed`: the number of the exchange that installs the policy; None if the setting names it, or it stays."""
        branch = self._view.branches[number]
        self._control.runtime.coordinator.put(number, setting, None if policy is branch.policy else policy)
        if setting != branch.setting:
            self._view.log_event(f"set: {setting_words(setting)}")
        elif policy is not branch.policy:
            self._view.log_event(f"policy {policy.name} is installed")
        if policy is not branch.policy:
            branch.policy, branch.installed = policy, installed
        branch.setting = setting

    def _block_bytes(self) -> float:
        layout, count = self._spec.layout, len(self._view.branches)
        return 4.0 * layout.size / layout.count * (1 + slots(self._spec.workload.optimizer)) * count

    def admitted(self, setting: Setting, branch: DriverBranch) -> Setting:
        """The setting that a request means. Raises Rejected if the job cannot run under it now."""
        wanted = system.admitted(setting, branch.setting, self.job, self._control.losses.available)
        self._spec.check(wanted)
        return wanted

    def check_idle(self, branch: DriverBranch, wanted: str) -> None:
        """Raise Rejected during a reconfiguration, and if the branch has ended. Waits for the repair of a loss."""
        check_no_reconfiguration(wanted, self._control.reconfiguration)
        self.wait_until_idle(wanted)
        check_running(wanted, branch.status)

    def wait_until_idle(self, wanted: str) -> None:
        """Wait until no procedure is in progress. Raises Rejected where that takes until the budget ends."""
        if not self._control.wait_until_idle(self.job.budget_seconds):
            raise Rejected(f"Cannot {wanted}: the budget ended while the job waited for what it has lost.")
