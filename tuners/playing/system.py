"""What every `System` does in the same way: find the handler of an action, find a branch, and refuse in the same words.

A system raises `Rejected` before it changes anything. The functions named `check_...` raise it where an action cannot be
carried out, and return nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sized
from typing import Any, TypeAlias, TypeVar, cast

from tuners import policies
from tuners.actions import Action, Job, Method, Reconfigure, Rejected, Setting, Status, SyncPolicy
from tuners.settings import OF_CACHES, OF_CHECKPOINTS, OF_LOCAL_STEPS, OF_PULLS, OF_QUORUM
from tuners.space import Space

__all__ = [
    "CHANGED_IN_PLACE",
    "Handlers",
    "admitted",
    "branch_of",
    "check_installs",
    "check_no_reconfiguration",
    "check_no_table",
    "check_no_timers",
    "check_nodes",
    "check_not_last",
    "check_other_branch",
    "check_running",
    "handler_of",
    "in_place",
    "method_of",
    "policy_of",
    "wanted_setting",
]

T = TypeVar("T")
B = TypeVar("B")

Handlers: TypeAlias = Mapping[type[Action[Any]], Callable[[Any], Any]]
"""The function of a system that carries out an action, by the type of the action."""


def handler_of(action: Action[T], handlers: Handlers) -> Callable[[Action[T]], T]:
    """The handler of `action`. Raises Rejected for an action that the system does not know."""
    if type(action) not in handlers:
        raise Rejected(f"Cannot carry out {action!r}: this system knows {', '.join(a.__name__ for a in handlers)}.")
    return cast("Callable[[Action[T]], T]", handlers[type(action)])


# ------------------------------------------------------------------------------------------------------------- branches


def branch_of(branches: Mapping[int, B], number: int) -> B:
    """The branch of that number. Raises Rejected where there is none."""
    if number not in branches:
        alive = ", ".join(map(str, branches))
        raise Rejected(f"Cannot use branch {number}: it was never forked, or was freed; branches: {alive}.")
    return branches[number]


def check_not_last(branches: Sized, number: int) -> None:
    """Refuse to free branch `number` where it is the only one."""
    if len(branches) == 1:
        raise Rejected(f"Cannot free branch {number}: it is the last one, and the job would be lost.")


def check_running(wanted: str, status: Status) -> None:
    """Refuse `wanted`, as "fork branch 3", where the branch has ended with `status`."""
    if status != "running":
        raise Rejected(f"Cannot {wanted}: it has {status}; free it and go on with another.")


# ------------------------------------------------------------------------------------------------------ reconfigurations


def check_no_reconfiguration(wanted: str, under_way: object | None) -> None:
    """Refuse `wanted` while a reconfiguration is under way; None where there is none."""
    if under_way is not None:
        raise Rejected(f"Cannot {wanted}: a reconfiguration is under way; run on until `Window.changes` tells of its end.")


def check_other_branch(number: int, *, is_reconfigured: bool) -> None:
    """Refuse to run branch `number` while another branch is reconfigured."""
    if is_reconfigured:
        raise Rejected(f"Cannot run branch {number} while another is being reconfigured: run that one first.")


def check_nodes(setting: Setting, job: Job, available: Container[str]) -> None:
    """Refuse a setting that uses a node which is not available."""
    for node in (*setting.workers, *setting.servers):
        if node not in available:
            there = ", ".join(n.name for n in job.nodes if n.name in available)
            raise Rejected(f"Cannot use node {node!r}: it is not there, or about to leave; there are {there}.")


def wanted_setting(setting: Setting, in_force: Setting, space: Space, available: Collection[str]) -> Setting:
    """The setting that a request for `setting` means, where `in_force` is the one of its branch.

    A setting that names a node which is gone means the others, where the scenario holds the node's role: a tuner can still
    change what is free.
    """
    named = {*setting.workers, *setting.servers}
    return setting if named <= {*available, *in_force.workers, *in_force.servers} else space.held_as(in_force, setting)


def admitted(setting: Setting, in_force: Setting, job: Job, available: Collection[str]) -> Setting:
    """What `wanted_setting` returns. Raises Rejected where the job cannot run under it."""
    wanted = wanted_setting(setting, in_force, job.space, available)
    job.space.check(wanted, in_force)
    # A node under notice is not available, and its role may be held: it stays until it is gone.
    kept = {n for n in (*in_force.workers, *in_force.servers) if job.space.holds_role(n)}
    check_nodes(wanted, job, {*available, *kept})
    return wanted


def method_of(action: Reconfigure, job: Job) -> Method:
    """The method that `action` names, or else the first of the job. Raises Rejected for one that the job does not have."""
    method = action.method or job.methods[0]
    if method not in job.methods:
        raise Rejected(f"Cannot reconfigure by {method!r}: this system can {', '.join(job.methods)}.")
    return method


CHANGED_IN_PLACE = (
    "learning_rate",
    "momentum",
    "policy",
    "staleness",
    "batch_size",
    "loads",
    "node_steps",
    *OF_LOCAL_STEPS,
    *OF_CACHES,
    *OF_CHECKPOINTS,
    *OF_PULLS,
    *OF_QUORUM,
)
"""Fields of a setting that servers read at every push or pull: they change at once, without a step."""


def in_place(old: Setting, new: Setting, method: Method = "checkpoint") -> bool:
    """Whether a reconfiguration takes no steps. Training data is stored with the workers under ``migrate`` only."""
    free = CHANGED_IN_PLACE if method == "migrate" else (*CHANGED_IN_PLACE, "data_shares")
    return all(getattr(old, f) == getattr(new, f) for f in Setting.__slots__ if f not in free)


def check_installs(policy: SyncPolicy, job: Job) -> None:
    """Refuse to install a policy of a tuner's own where the scenario holds the policy."""
    if not job.installs_policies:
        raise Rejected(
            f"Cannot install policy {policy.name!r}: this scenario holds the policy at {job.start.policy!r}. "
            "Free `policy` under [free], or set install_policies = true under [rules]."
        )


def check_no_timers(policy: SyncPolicy) -> None:
    """Refuse to install a policy that sets timers, where policies decide at pushes only."""
    if policy.timers:
        raise Rejected(f"Cannot install policy {policy.name!r}: it sets a timer, and policies decide at pushes only here.")


def check_no_table(policy: SyncPolicy) -> None:
    """Refuse to install a policy that needs gradients by worker, where servers keep at most their sum."""
    if policy.table:
        raise Rejected(
            f"Cannot install policy {policy.name!r}: it needs a table of all workers' gradients; there is none here."
        )


def policy_of(setting: Setting, before: Setting, policy: SyncPolicy) -> SyncPolicy:
    """The policy under `setting`, after `policy` was in force under the setting `before`.

    An installed policy stays in force until a setting names another policy or another bound than the one before.
    """
    bounds = ("policy", "staleness", *OF_QUORUM)
    if all(getattr(before, name) == getattr(setting, name) for name in bounds):
        return policy
    return policies.of_setting(setting)
