"""Every registered tuner keeps the contract on every toy system; scripted tests of what each asks."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint

import pytest

import tuners
from harness.cli.main import main
from tests.support.toy import REFUSED, finishes, job, toys
from tuners import Entry, embedded, policies, registry, resolve
from tuners.actions import Install, Reconfigure
from tuners.baselines import best_fixed, fixed
from tuners.baselines.random_search import random_search
from tuners.baselines.tpe import tpe
from tuners.testing import check_tuner

ENTRIES = registry()


# ------------------------------------------------------------------------------------------------------------ conformance


# A Gaussian process: half a second and more on a toy; and searches that differ in what they propose.
TAKES_LONG = {"bo_online", "tpe", "hyperband", "random_search", "spearmint"}
QUICK_TOYS = {"every knob", "a node leaves", "no knobs", "local steps"}


@pytest.mark.parametrize(
    ("name", "system"),
    [
        pytest.param(name, toy, marks=[pytest.mark.slow] if name in TAKES_LONG and toy not in QUICK_TOYS else [])
        for name in ENTRIES
        for toy in toys()
    ],
)
def test_every_tuner_keeps_the_contract_on_every_toy(name, system):
    check_tuner(ENTRIES[name].factory, systems={system: toys()[system]})


@pytest.mark.parametrize("system", ["every knob", "no forks", "roles by node", "a node leaves", "timing only"])
@pytest.mark.parametrize("factory", [random_search, tpe], ids=["random_search", "tpe"])
def test_searches_keep_the_contract_with_many_short_trials(factory, system):
    check_tuner(partial(factory, trials=6, share=0.5), systems={system: toys()[system]})


# --------------------------------------------------------------------------------------------------------------- registry


def test_listing_the_tuners_imports_none_of_them():
    heavy = {e.where.partition(":")[0] for e in registry().values() if e.embedded} | {"numpy", "jax", "optuna"}
    code = f"import sys, tuners; tuners.registry(); sys.exit(bool({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603


@pytest.mark.parametrize("name", registry())
def test_every_entry_leads_to_a_factory_and_says_what_it_does(name):
    entry = resolve(name)
    assert entry.name == name
    assert callable(entry.factory)
    assert 10 < len(entry.summary) < 90


def test_the_oracle_is_no_contestant():
    assert {"fixed", "bsp", "asp", "ssp", "dssp", "random_search", "tpe", "cruise", "bo_online", "best_fixed"} <= set(
        embedded()
    )
    assert [name for name in embedded() if not resolve(name).contestant] == ["best_fixed"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cruize", r"No tuner 'cruize'. Did you mean 'cruise'\? `harness list tuners` has all"),
        ("zzz", r"No tuner 'zzz'\. `harness list tuners` has all\. One of your own is package\.module:factory"),
        ("tuners.nowhere:x", "Cannot import tuner 'tuners.nowhere:x'"),
        ("tuners.baselines.fixed:fxed", "has no 'fxed'. Did you mean 'fixed'"),
        ("tuners.baselines.fixed:__doc__", "it is no function"),
        ("tuners.baselines.fixed:", "write package.module:factory"),
        (":fixed", "write package.module:factory"),
        ("cruise[gian=0.1]", r"Tuner 'cruise\[gian=0.1\]' has no option 'gian'. Did you mean 'gain'\? It has gain, "),
        ("cruise[gain]", r"Cannot read option 'gain' of tuner .*: write option=value"),
        ("cruise[gain=0.1", r"write cruise\[option=value,...\]"),
    ],
)
def test_a_tuner_that_is_not_there_is_refused_with_near_matches(name, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(name)


def test_a_tuner_of_ones_own_is_found_by_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "my_tuner_module.py").write_text("def mine(job):\n    yield from ()\n")
    (tmp_path / "my_broken_module.py").write_text("def mine(job:\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = resolve("my_tuner_module:mine")
    assert (entry.name, entry.embedded, entry.factory.__name__) == ("my_tuner_module:mine", False, "mine")
    with pytest.raises(ValueError, match="SyntaxError"):
        resolve("my_broken_module:mine")


def test_options_of_a_tuner_stand_in_brackets():
    entry = resolve("cruise[gain=0.1, batches=4,bandwidth=measured,overlap=true]")
    expected = {"gain": 0.1, "batches": 4, "bandwidth": "measured", "overlap": True}
    assert (entry.name, dict(entry.options)) == ("cruise[gain=0.1, batches=4,bandwidth=measured,overlap=true]", expected)
    assert entry.factory.keywords == expected
    assert entry.factory.func is resolve("cruise").factory


def test_other_distributions_offer_tuners_but_take_no_name_over(monkeypatch, capsys):
    offered = [
        EntryPoint("still", "tuners.baselines.fixed:fixed", "harness.tuners"),
        EntryPoint("cruise", "tuners.baselines.fixed:fixed", "harness.tuners"),
    ]
    monkeypatch.setattr(tuners, "entry_points", lambda group: offered if group == "harness.tuners" else [])
    assert resolve("still").factory is fixed.fixed
    assert resolve("cruise").where == "tuners.cruise:cruise"
    assert "still" not in embedded()
    assert isinstance(resolve("still"), Entry)
    assert main(["show", "still"]) == 0
    assert capsys.readouterr().out.startswith(f"still  {fixed.fixed.__doc__.partition('.')[0]}")


def test_a_broken_tuner_of_another_distribution_is_refused_by_its_name_and_no_other(monkeypatch):
    broken = [EntryPoint("theirs", "nowhere_at_all:tuner", "harness.tuners")]
    monkeypatch.setattr(tuners, "entry_points", lambda group: broken if group == "harness.tuners" else [])
    with pytest.raises(
        ValueError, match=r"^Cannot use tuner 'theirs' from another distribution: Cannot import tuner 'nowhere_"
    ):
        resolve("theirs")
    assert resolve("fixed").factory is fixed.fixed
    assert "theirs" in tuners.registry()


# ------------------------------------------------------------------------------------------------------ fixed, policies


def test_fixed_asks_nothing():
    assert finishes(fixed.fixed(job()))


@pytest.mark.parametrize(
    ("factory", "policy", "staleness"),
    [(fixed.bsp, "bsp", 0), (fixed.ssp, "ssp", 3), (partial(fixed.ssp, staleness=5), "ssp", 5), (fixed.dssp, "dssp", 3)],
)
def test_a_fixed_policy_is_one_reconfiguration(factory, policy, staleness):
    tuner = factory(job())
    assert next(tuner) == Reconfigure(replace(job().start, policy=policy, staleness=staleness))
    assert finishes(tuner)


def test_a_policy_that_rules_already_is_left_alone():
    assert job().start.policy == "asp"
    assert finishes(fixed.asp(job()))


@pytest.mark.parametrize(
    ("factory", "name"), [(fixed.bsp, "bsp"), (fixed.ssp, "ssp(3)"), (fixed.dssp, "dssp(3,15)")], ids=["bsp", "ssp", "dssp"]
)
def test_a_policy_that_is_not_free_is_installed(factory, name):
    tuner = factory(job("one knob"))
    assert isinstance(next(tuner), Reconfigure)
    asked = tuner.throw(REFUSED)
    assert isinstance(asked, Install)
    assert asked.policy.name == name
    with pytest.raises(StopIteration):
        tuner.throw(REFUSED)


def test_a_range_that_no_setting_names_is_installed():
    asked = next(fixed.dssp(job(), low=2, high=5))
    assert isinstance(asked, Install)
    assert asked.policy.name == policies.dssp(2, 5).name


@pytest.mark.parametrize("name", ["k_sync", "k_batch_sync", "k_async", "backup_workers"])
def test_groups_are_shares_of_the_workers(name):
    count = len(job().start.workers)
    asked = [next(getattr(fixed, name)(job(), share=share)) for share in (0.01, 1.0)]
    assert [a.policy.name for a in asked] == [f"{name}(1)", f"{name}({count})"]
    with pytest.raises(ValueError, match=r"share 1\.2 of the workers"):
        next(getattr(fixed, name)(job(), share=1.2))


# ------------------------------------------------------------------------------------------------------------- the oracle


def test_candidates_are_the_same_for_every_seed_and_hold_the_start():
    a, b = (best_fixed.candidates(job(seed=s), count=12) for s in (1, 2))
    assert a == b
    assert a[0] == job().start
    assert len(a) == 12
    assert all(x not in a[:i] for i, x in enumerate(a))
    for setting in a:
        job().space.check(setting)
    assert best_fixed.candidates(job(), count=12, seed=5) != a
    assert best_fixed.candidates(job("one knob"), count=3)[1:] != a[1:3]


def test_candidates_are_drawn_until_they_are_admitted():
    settings = best_fixed.candidates(job("roles by node"), count=20)
    assert len(settings) == 20
    assert all(s.workers and s.servers for s in settings)


def test_there_are_no_more_candidates_than_settings():
    assert best_fixed.candidates(job("no knobs")) == [job().start]
    with pytest.raises(ValueError, match="give at least 1"):
        best_fixed.candidates(job(), count=0)


def test_the_best_candidate_is_chosen_on_all_seeds_together():
    # Candidate 1 is the luckiest on one seed, 2 the best on the average, 3 as good as 2.
    assert best_fixed.choose({0: [9.0, 9.0], 1: [1.0, 12.0], 3: [5.0, 5.0], 2: [5.0, 5.0]}) == 2
    assert best_fixed.choose({0: [math.inf], 1: [7.0]}) == 1


@pytest.mark.parametrize("completions", [{}, {0: []}, {0: [1.0, 2.0], 1: [1.0]}])
def test_candidates_that_were_not_run_alike_are_not_compared(completions):
    with pytest.raises(ValueError, match="run each on the same seeds"):
        best_fixed.choose(completions)


def test_a_candidate_as_a_tuner():
    settings = best_fixed.candidates(job())
    tuner = best_fixed.best_fixed(job(), index=4)
    assert next(tuner) == Reconfigure(settings[4])
    with pytest.raises(StopIteration):
        tuner.throw(REFUSED)
    assert finishes(best_fixed.best_fixed(job()))
    with pytest.raises(ValueError, match="numbered from 0"):
        best_fixed.best_fixed(job(), index=20)
