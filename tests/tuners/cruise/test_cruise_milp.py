"""Cruise with the option `solver=milp`, the paper's programme: it chooses as well as the exact solver."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.tuners.cruise.test_cruise_mixed import FAST, SLOW, begun, cluster, problem, told
from tuners import resolve
from tuners.actions import Reconfigure, Run, Window
from tuners.cruise.milp import solve
from tuners.cruise.placement import best_split, placement_seconds
from tuners.cruise.split import roles
from tuners.testing import exchanges
from tuners.testing.toys import Toy

SMALL = replace(cluster((*SLOW[:3], *FAST), ["s0", "s1", "s2"]), samples=100)
"""Three slow and two fast machines, all fast ones servers at first; 25 mini-batches in an epoch."""


@cache
def splits_and_paces(name):
    """The splits that Cruise asks of a toy whose fast machines compute in a quarter of the time, and clocks per second."""
    toy = Toy(SMALL, slowness={"f0": 0.25, "f1": 0.25})
    log = exchanges(resolve(name).factory, toy, most=10)
    asked = [roles(e.action.setting) for e in log if isinstance(e.action, Reconfigure)]
    return asked, [e.answer.clocks / e.answer.seconds for e in log if isinstance(e.answer, Window)]


def by_type(nodes):
    return Counter(name[0] for name in nodes)


def test_a_small_job_of_two_types_is_split_as_well_as_by_the_exact_solver():
    asked, paces = splits_and_paces("cruise[solver=milp,server_term=sum]")
    asked_exactly, paces_exactly = splits_and_paces("cruise[overlap=false,server_term=sum]")
    assert asked == asked_exactly
    assert by_type(asked[0][0]) == {"s": 1, "f": 2}
    assert paces == pytest.approx(paces_exactly, rel=0.02)
    assert paces[1] > 2 * paces[0]


@pytest.mark.slow
def test_alone_it_implies_that_pulls_do_not_overlap():
    asked, _ = splits_and_paces("cruise[solver=milp]")
    assert asked
    assert asked == splits_and_paces("cruise[solver=milp,overlap=false]")[0] == splits_and_paces("cruise[overlap=false]")[0]


def test_what_it_asks_for_is_what_the_programme_says():
    """No fast machine works yet, so that it counts as twice as fast, as it has twice the cores."""
    wanted = begun(SMALL, solver="milp").send(told(SMALL, {"slow": 0.4, "fast": 99.0})).setting
    small = replace(problem(3, 2, slow_seconds=0.4, fast_seconds=0.2), samples=100)
    solved = solve(small, data="samples")
    assert solved.proven
    assert by_type(wanted.workers) == Counter("sf"[i >= 3] for i in solved.placement.workers)
    assert sorted(wanted.shares()[0]) == pytest.approx(sorted(d / 100 for d in solved.placement.data))
    assert sorted(wanted.shares()[1]) == pytest.approx(sorted(m / 2e4 for m in solved.placement.model if m))
    # Rounding mini-batches up costs little: the default's optimum is a lower bound.
    assert 1 <= placement_seconds(small, solved.placement) / best_split(small).seconds < 1.01


def test_machines_of_one_type_need_no_programme():
    """Eq. 5 finds their best split, whatever the solver."""
    of = cluster(SLOW, ["s0"])
    seen = told(of, {"slow": 0.4})
    assert begun(of, solver="milp").send(seen) == begun(of).send(seen)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cruise[solver=milp,overlap=true]", "Cannot use solver='milp' with overlap=True"),
        ("cruise[solver=milp,server_term=queue]", "Cannot use solver='milp' with server_term='queue'"),
        ("cruise[server_term=queue,overlap=false]", "Cannot use server_term='queue' with overlap=False"),
        ("cruise[solver=simplex]", "Cannot use solver=simplex for tuner .*: give exact or milp"),
    ],
)
def test_options_that_exclude_each_other_are_refused_at_the_start(name, reason):
    with pytest.raises(ValueError, match=reason):
        next(resolve(name).factory(SMALL))


def test_the_default_is_the_exact_solver():
    seen = told(SMALL, {"slow": 0.4, "fast": 0.1})
    answer = begun(SMALL, solver="exact").send(seen)
    assert answer == begun(SMALL).send(seen)
    assert not isinstance(answer, Run)
