"""The common part of all systems: handlers, branches, and refusals in the same words."""

from dataclasses import dataclass, replace

import pytest

from tests.support.toy import job, toys
from tuners import policies
from tuners.actions import Action, Fork, Free, Install, Reconfigure, Rejected, Run
from tuners.playing.system import (
    branch_of,
    check_installs,
    check_no_reconfiguration,
    check_nodes,
    check_not_last,
    check_other_branch,
    check_running,
    handler_of,
    method_of,
    policy_of,
)


@dataclass(frozen=True)
class Dance(Action[None]):
    """An action that no system knows."""


def test_an_action_goes_to_the_handler_of_its_type():
    handlers = {Run: lambda action: action.clocks, Free: lambda action: action.branch}
    assert handler_of(Run(clocks=3), handlers)(Run(clocks=3)) == 3
    assert handler_of(Free(4), handlers)(Free(4)) == 4
    with pytest.raises(Rejected, match=r"^Cannot carry out Fork\(.*\): this system knows Run, Free\.$"):
        handler_of(Fork(), handlers)


def test_a_toy_refuses_an_action_that_it_does_not_know():
    toy = toys()["one knob"](1)
    with pytest.raises(Rejected, match=r"Cannot carry out Dance\(\): this system knows Run, Reconfigure"):
        toy.perform(Dance())


def test_a_branch_is_found_by_its_number():
    assert branch_of({0: "a", 4: "b"}, 4) == "b"
    with pytest.raises(Rejected, match=r"^Cannot use branch 2: it was never forked, or was freed; branches: 0, 4\.$"):
        branch_of({0: "a", 4: "b"}, 2)


def test_the_last_branch_stays():
    check_not_last({0: "a", 4: "b"}, 4)
    with pytest.raises(Rejected, match="Cannot free branch 4: it is the last one"):
        check_not_last({4: "b"}, 4)


def test_a_branch_that_has_ended_is_refused():
    check_running("fork branch 3", "running")
    with pytest.raises(Rejected, match=r"^Cannot fork branch 3: it has diverged; free it and go on with another\.$"):
        check_running("fork branch 3", "diverged")


def test_one_reconfiguration_at_a_time():
    check_no_reconfiguration("fork branch 3", None)
    check_other_branch(3, is_reconfigured=False)
    with pytest.raises(Rejected, match="Cannot fork branch 3: a reconfiguration is under way"):
        check_no_reconfiguration("fork branch 3", object())
    with pytest.raises(Rejected, match="Cannot run branch 3 while another is being reconfigured"):
        check_other_branch(3, is_reconfigured=True)


def test_a_setting_uses_available_nodes_only():
    of = job()
    check_nodes(of.start, of, {n.name for n in of.nodes})
    with pytest.raises(Rejected, match=r"^Cannot use node 'n2': it is not there, .*; there are n0, n1, n3, n4\.$"):
        check_nodes(of.start, of, {"n0", "n1", "n3", "n4"})


def test_a_reconfiguration_has_a_method_of_the_job():
    of = job()
    assert method_of(Reconfigure(of.start), of) == "checkpoint"
    assert method_of(Reconfigure(of.start, method="migrate"), of) == "migrate"
    with pytest.raises(Rejected, match="Cannot reconfigure by 'relocate': this system can checkpoint, migrate"):
        method_of(Reconfigure(of.start, method="relocate"), of)


def test_a_policy_is_installed_only_where_the_scenario_lets_it():
    check_installs(policies.k_sync(2), job())
    held = r"^Cannot install policy 'k_sync\(2\)': this scenario holds the policy at 'asp'\. Free `policy`"
    with pytest.raises(Rejected, match=held):
        check_installs(policies.k_sync(2), job("one knob"))
    with pytest.raises(Rejected, match=held):
        toys()["one knob"](1).perform(Install(policies.k_sync(2)))


def test_an_installed_policy_stays_until_a_setting_names_another():
    before, installed = job().start, policies.k_sync(2)
    assert policy_of(replace(before, batch_size=8), before, installed) is installed
    assert policy_of(replace(before, policy="bsp"), before, installed).name == "bsp"
    assert policy_of(replace(before, staleness=before.staleness + 1), before, installed).name == before.policy


def test_a_job_as_text_is_one_line_with_the_families_of_its_knobs():
    placed = toys()["roles by node"](1).job
    assert repr(placed) == "Job(roles by node: 5 nodes, free: role; until loss 0.02 or 25 s)"
    by_share = replace(placed, target=replace(placed.target, metric="clocks", value=600, by_share=True))
    assert repr(by_share).endswith("until clocks 600 by share or 25 s)")
    assert "free: nothing; until" in repr(toys()["no knobs"](1).job)
