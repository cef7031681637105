"""A tuner that has nothing to tune in a job says so, and why; such a tuner would only be another copy of `fixed`."""

from dataclasses import replace
from functools import partial

import pytest

from harness.scenario import job as job_of
from harness.scenario import load
from tests.support.toy import job, toys
from tuners import embedded, resolve
from tuners.actions import Rejected, Run, Target
from tuners.applicability import no_knob_is_free, nothing_to_tune, nothing_to_tune_if
from tuners.settings import Choice, Integer, Real
from tuners.testing import check_tuner, exchanges

POLICIES = {"bsp", "asp", "ssp", "dssp", "k_sync", "k_batch_sync", "k_async", "backup_workers", "sync_switch", "rlp"}
POLICIES |= {"ringmaster", "dbw", "adasync", "abs", "ata", "ringleader"}
TUNABLES = {"mltuner", "spearmint", "hyperband", "asha"}
SCHEDULES = {"bespoke_bo", "uniform_devices", "uniform_gpus", "schedule_search", "lb_bsp", "omnilearn"}
ROLES = {"cruise", "optimus", "dlrover_rm"}
IDLE_MACHINES = {"dlrover_hot"}
LOCAL_STEPS = {"local_sgd", "diloco", "adacomm", "dylu"}
WITHOUT_WAITING = {"fedbuff", "quorum"}  # local steps, and a policy of its own
GOODPUT = {"pollux"}
ANY = {"joint", "random_search", "tpe"}


def idle(of):
    """The embedded tuners that have nothing to tune in a job."""
    return {name for name in embedded() if nothing_to_tune(resolve(name).factory, of)}


def with_knobs(*knobs, **changed):
    of = job("no knobs")
    return replace(of, space=replace(of.space, knobs=knobs), **changed)


def test_without_a_free_knob_only_the_references_are_left():
    assert set(embedded()) - idle(job("no knobs")) == {"fixed", "best_fixed"}


def test_where_the_other_knobs_are_free_schedules_local_steps_and_the_policy_of_the_start_are_left_out():
    assert job().start.policy == "asp"
    assert idle(job()) == {"asp"} | SCHEDULES | LOCAL_STEPS | WITHOUT_WAITING | IDLE_MACHINES


@pytest.mark.parametrize(
    ("knobs", "able"),
    [
        ((Real("learning_rate", 0.001, 1.0),), TUNABLES | ANY),
        ((Real("learning_rate", 0.001, 1.0), Integer("batch_size", 1, 8)), TUNABLES | GOODPUT | ANY),
        ((Integer("worker_count", 1, 4),), ROLES | ANY | {"bo_online"}),
        ((Choice("role/n0", ("worker", "server")),), ROLES | ANY | {"bo_online"}),
        ((Choice("policy", ("asp", "bsp")),), {"bsp", "bo_online", "mltuner"} | ANY),
        ((Integer("intra_threads", 1, 2),), {"bo_online"} | ANY),
        ((Integer("local_steps", 1, 8),), LOCAL_STEPS | ANY),
    ],
    ids=["rate", "rate and batch", "count", "role", "policy", "threads", "local steps"],
)
def test_tuners_need_a_knob_of_their_own(knobs, able):
    assert set(embedded()) - idle(with_knobs(*knobs)) - {"fixed", "best_fixed"} == able


def test_policies_need_that_the_scenario_lets_them_in():
    assert idle(with_knobs(Real("learning_rate", 0.001, 1.0))) >= POLICIES
    assert POLICIES & idle(with_knobs(installs_policies=True)) == {"asp"}
    reason = nothing_to_tune(resolve("k_sync").factory, with_knobs())
    assert reason == "The policy is held at 'asp' here."


def test_a_policy_that_its_space_does_not_have_is_told_why():
    """As in recorded runs, where a policy is free and no run was recorded under it with the start's other values."""
    of = with_knobs(Choice("policy", ("asp", "bsp")))
    assert nothing_to_tune(resolve("ssp[staleness=0]").factory, of).startswith("Cannot set policy to 'ssp': ")
    assert nothing_to_tune(resolve("k_sync").factory, of) == "A tuner cannot install policies of its own here."


def test_a_bound_that_is_free_is_something_to_tune():
    start = replace(job().start, policy="ssp", staleness=0)
    of = with_knobs(Integer("staleness", 0, 3))
    of = replace(of, start=start, space=replace(of.space, base=start))
    assert POLICIES - idle(of) == {"ssp"}
    assert nothing_to_tune(resolve("ssp[staleness=9]").factory, of) == "The policy is held at 'ssp' here."
    assert nothing_to_tune(resolve("ssp[staleness=0]").factory, of) == "The job starts with 'ssp' already."


def test_tunables_are_compared_by_losses():
    of = with_knobs(Real("learning_rate", 0.001, 1.0), target=Target("clocks", 100))
    assert idle(of) >= TUNABLES
    assert nothing_to_tune(resolve("mltuner").factory, of).startswith("This job counts clocks")


def test_options_of_the_tuner_count():
    momentum = with_knobs(Real("momentum", 0.0, 0.9))
    assert nothing_to_tune(resolve("mltuner").factory, momentum) == ""
    assert nothing_to_tune(resolve("mltuner[tuned=rate]").factory, momentum) == "No tunable is free here: learning_rate."
    policy = with_knobs(Choice("policy", ("asp", "bsp")))
    reason = nothing_to_tune(resolve("mltuner[as_printed=true]").factory, policy)
    assert reason == "No tunable is free here: learning_rate, momentum, batch_size, staleness."
    assert nothing_to_tune(resolve("bo_online").factory, momentum)
    assert nothing_to_tune(resolve("bo_online[knobs=all]").factory, momentum) == ""
    assert nothing_to_tune(resolve("dssp[high=20]").factory, with_knobs(Choice("policy", ("asp", "dssp")))) != ""


def test_on_the_arenas_of_the_bespoke_optimiser_policies_and_tunables_are_held():
    found = idle(job_of(load("boat-c-speechnet")))
    assert found == POLICIES | TUNABLES | GOODPUT | LOCAL_STEPS | WITHOUT_WAITING | IDLE_MACHINES | {
        "uniform_devices"
    }  # the start is uniform already
    assert "uniform_gpus" in idle(job_of(load("boat-a-speechnet")))  # which has no GPU


def test_a_bound_that_no_policy_of_the_job_knows_is_nothing_to_tune():
    staleness, policy = Integer("staleness", 0, 8), Choice("policy", ("asp", "bsp"))
    factory, held = resolve("bo_online").factory, with_knobs(staleness)
    for of in (held, with_knobs(staleness, Real("momentum", 0.0, 0.9))):
        assert nothing_to_tune(factory, of).startswith("None of the system knobs is free")
    assert nothing_to_tune(factory, with_knobs(staleness, policy)) == ""
    ssp = replace(held.start, policy="ssp")
    assert nothing_to_tune(factory, replace(held, start=ssp, space=replace(held.space, base=ssp))) == ""


def test_a_tuner_that_does_not_say_is_played():
    def silent(of):
        yield from Run(clocks=of.samples)

    assert nothing_to_tune(silent, job("no knobs")) == ""
    assert nothing_to_tune(partial(silent), job("no knobs")) == ""


@pytest.mark.parametrize("name", embedded())
def test_a_tuner_changes_something_exactly_where_it_says_so(name):
    """On the toys: `check_tuner` refuses a change after "nothing"; here the converse, for tuners that act at once."""
    factory = resolve(name).factory
    if name in {"fixed", "best_fixed"}:
        return
    for make in toys().values():
        if nothing_to_tune(factory, make(3).job):
            done = [e for e in exchanges(factory, make(3), most=50) if not isinstance(e.answer, Rejected)]
            assert {type(e.action) for e in done} <= {Run}
        else:
            assert exchanges(factory, make(3), most=50)


def test_a_tuner_that_says_nothing_and_does_something_breaks_the_contract():
    @nothing_to_tune_if(lambda job: "No reason.")
    def lying(of):
        yield from resolve("tpe").factory(of)

    with pytest.raises(AssertionError, match=r'says that it has nothing to tune \("No reason."\), and does Fork'):
        check_tuner(lying, systems={"one knob": toys()["one knob"]})


def test_the_predicate_stays_beside_the_factory():
    @nothing_to_tune_if(no_knob_is_free)
    def mine(of, *, trials=3):
        yield from Run(clocks=trials)

    assert mine.__name__ == "mine"
    assert nothing_to_tune(partial(mine, trials=5), job("no knobs")) == "No knob is free here."
    assert nothing_to_tune(partial(mine, trials=5), job()) == ""


def test_a_predicate_is_given_the_defaults_of_the_factory():
    def too_few(of, trials):
        return "" if trials >= 3 else f"{trials} trials tell nothing."

    @nothing_to_tune_if(too_few)
    def mine(of, *, trials=2):
        yield from Run(clocks=trials)

    assert nothing_to_tune(mine, job()) == "2 trials tell nothing."
    assert nothing_to_tune(partial(mine, trials=5), job()) == ""
