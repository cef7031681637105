"""Conditions of a run: read from TOML, checked, drawn from the seed alone, and with the effects that they describe."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import (
    Conditions,
    Episode,
    LinkDelay,
    NodeChange,
    RackLosses,
    Sleeps,
    Stragglers,
    check,
    check_lasting,
    link_delays,
    straggling,
)
from simulators.reconfiguration.costs import Costs
from simulators.workloads.workload import Demand
from tests.support.oracle import Bounded, Oracle
from tests.support.small_jobs import (
    CHEAP,
    KNOBS,
    MODEL,
    NAMES,
    SMALL,
    assert_same_bytes,
    cluster,
    job,
    learning,
    machine,
    start,
    system,
    together,
)
from tuners import policies
from tuners.actions import Evaluate, Fork, Free, Install, Reconfigure, Rejected, Run, Setting, Target
from tuners.settings import Real

NODES = ("a", "b", "c", "d")
TEXT = """
jitter = 0.3
stagger = false
thinking_seconds = 1.5
sleeps = { probability = 0.1, mean_seconds = 2.0 }
stragglers = { mean_seconds = 5.0, sd_seconds = 1.0, nodes = ["b"] }
[[episodes]]
node = "c"
start_seconds = 10.0
seconds = 60.0
factor = 4.0
[[delays]]
nodes = ["a"]
delay_seconds = 0.01
"""


def test_a_delay_of_a_link_is_that_of_the_longest_path():
    """a and b work, b and c serve, d is idle. b's own server is no path of b; servers are asked side by side."""
    names, setting = ("a", "b", "c", "d"), Setting(workers=("a", "b"), servers=("b", "c"))
    delays = np.array([0.1, 0.02, 0.003, 9.0])
    np.testing.assert_allclose(link_delays(names, setting, delays, 3.0), [3 * 0.12, 3 * 0.023, 0.0, 0.0])
    alone = Setting(workers=("b",), servers=("b",))
    np.testing.assert_array_equal(link_delays(names, alone, delays, 3.0), np.zeros(4))


def test_delays_come_and_go_as_scheduled():
    """A mini-batch of 5 s takes 2 x 1 s more while one delay lasts, 2 x 5 s while both ends of the path have one, too."""
    delays = (LinkDelay(("a",), 1.0, 18.0, 22.0), LinkDelay(("a", "b"), 2.0, 26.0, 14.0), LinkDelay(("c",), 7.0))
    cluster = Cluster(tuple((n, machine()) for n in "abc"))
    setting = Setting(workers=("a",), servers=("b",), batch_size=20)
    around = Conditions(jitter=0.0, stagger=False, delays=delays)
    workload = job(Demand(model_bytes=0.0, sample_seconds=0.25))
    seconds = system(cluster, workload, setting, around).perform(Run(clocks=8)).pushes.seconds
    # Begun at 20, the fifth has the first delay; begun at 27, the sixth has both; begun at 42, the seventh has none.
    np.testing.assert_allclose(seconds, [5, 10, 15, 20, 27, 42, 47, 52])
    again = system(cluster, workload, setting, around)
    one_by_one = [again.perform(Run(clocks=1)).pushes.seconds[0] for _ in range(8)]
    np.testing.assert_array_equal(one_by_one, seconds)


def test_a_delay_from_the_beginning_on_delays_the_first_mini_batch_too():
    cluster = Cluster(tuple((n, machine()) for n in "ab"))
    around = Conditions(jitter=0.0, stagger=False, delays=(LinkDelay(("a",), 1.0), LinkDelay(("b",), 0.5, 0.0, 3.0, 20.0)))
    workload = job(Demand(model_bytes=0.0, sample_seconds=0.25))
    setting = Setting(workers=("a",), servers=("b",), batch_size=20)
    # 2 x 1 s each; the second delay is there at 0, 20 and 40: for the mini-batches that begin then, or up to 3 s later.
    seconds = system(cluster, workload, setting, around).perform(Run(clocks=5)).pushes.seconds
    np.testing.assert_allclose(seconds, [8, 15, 22, 30, 37])


@pytest.mark.parametrize(
    ("delay", "why"),
    [
        (LinkDelay(("z",), 1.0), "node 'z'"),
        (LinkDelay(("a",), -1.0), "delays.delay_seconds = -1"),
        (LinkDelay(("a",), 1.0, 0.0, 5.0, 4.0), "give a longer period"),
        (LinkDelay(("a",), 1.0, 0.0, 0.0, 4.0), "give a longer period"),
    ],
)
def test_impossible_delays_are_refused(delay, why):
    with pytest.raises(ValueError, match=why):
        check(Conditions(delays=(delay,)), NODES)


def test_conditions_are_read_from_toml():
    assert msgspec.toml.decode(TEXT.encode(), type=Conditions) == Conditions(
        jitter=0.3,
        stagger=False,
        thinking_seconds=1.5,
        sleeps=Sleeps(0.1, 2.0),
        stragglers=Stragglers(5.0, 1.0, nodes=("b",)),
        episodes=(Episode("c", 10.0, 60.0, 4.0),),
        delays=(LinkDelay(("a",), 0.01),),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("jiter = 0.3", "jiter"),
        ('jitter = "much"', "jitter"),
        ("sleeps = { probability = 0.1 }", "mean_seconds"),
        ("[[episodes]]\nnode = 3\nstart_seconds = 0.0\nseconds = 1.0\nfactor = 2.0", "node"),
    ],
)
def test_wrong_keys_and_types_are_named(text, reason):
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.toml.decode(text.encode(), type=Conditions)


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (Conditions(episodes=(Episode("z", 0.0, 1.0, 2.0),)), "'z'.*a, b, c, d"),
        (Conditions(stragglers=Stragglers(1.0, nodes=("a", "y"))), "'y'"),
        (Conditions(sleeps=Sleeps(1.1, 1.0)), r"sleeps.probability = 1.1.*from 0 to 1"),
        (Conditions(stragglers=Stragglers(1.0, probability=-0.1)), "stragglers.probability = -0.1"),
        (Conditions(sleeps=Sleeps(math.nan, 1.0)), "sleeps.probability = nan"),
        (Conditions(jitter=-0.2), "jitter = -0.2"),
        (Conditions(jitter=math.inf), "jitter = inf"),
        (Conditions(thinking_seconds=math.nan), "thinking_seconds = nan"),
        (Conditions(sleeps=Sleeps(0.5, -1.0)), "sleeps.mean_seconds = -1.0"),
        (Conditions(stragglers=Stragglers(1.0, -1.0)), "stragglers.sd_seconds = -1.0"),
        (Conditions(stragglers=Stragglers(1.0, nodes=("a", "b"), node_seconds=(1.0,))), "1 means for 2 nodes"),
        (Conditions(stragglers=Stragglers(1.0, nodes=("a",), node_seconds=(-1.0,))), "stragglers.node_seconds = -1.0"),
        (Conditions(episodes=(Episode("a", -1.0, 1.0, 2.0),)), "episodes.start_seconds = -1.0"),
        (Conditions(episodes=(Episode("a", 1.0, math.inf, 2.0),)), "episodes.seconds = inf"),
        (Conditions(episodes=(Episode("a", 1.0, 1.0, 0.0),)), "slow a down by 0.0"),
    ],
)
def test_impossible_conditions_are_refused(conditions, reason):
    with pytest.raises(ValueError, match=reason):
        check(conditions, NODES)


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (Conditions(episodes=(Episode("a", 0.0, 0.0, 2.0, 1e-300),)), "repeat an episode of a every 1e-300 s"),
        (
            Conditions(delays=(LinkDelay(("a", "b"), 1.0, 0.0, 1e-9, 1e-9),)),
            r"delay of a, b every 1e-09 s: that is 1e\+11 times",
        ),
        (Conditions(losses=(RackLosses(1e-5),)), "lose each node every 1e-05 s: .*at least 0.0004 s"),
    ],
)
def test_conditions_of_which_a_run_would_never_see_the_end_are_refused(conditions, reason):
    check(conditions, NODES)
    with pytest.raises(ValueError, match=reason):
        check_lasting(conditions, NODES, 100.0)


def test_conditions_that_come_again_a_million_times_pass():
    check_lasting(Conditions(episodes=(Episode("a", 0.0, 0.0, 2.0, 1e-4),), losses=(RackLosses(4e-4),)), NODES, 100.0)


def test_usual_conditions_pass():
    check(Conditions(), NODES)
    check_lasting(msgspec.toml.decode(TEXT.encode(), type=Conditions), NODES, 1e6)
    check(msgspec.toml.decode(TEXT.encode(), type=Conditions), NODES)


def drawn(conditions, seed, nodes=NODES):
    return straggling(conditions, nodes, np.random.default_rng(seed)).tolist()


@given(st.integers(0, 2**31), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_higher_probability_adds_stragglers_and_takes_none(seed, one, other):
    low, high = (drawn(Conditions(stragglers=Stragglers(1.0, probability=p)), seed) for p in sorted((one, other)))
    assert all(b or not a for a, b in zip(low, high, strict=True))


@given(st.integers(0, 2**31))
def test_named_nodes_straggle_and_draws_do_not_depend_on_the_conditions(seed):
    chance = drawn(Conditions(stragglers=Stragglers(1.0, probability=0.5)), seed)
    both = drawn(Conditions(stragglers=Stragglers(1.0, probability=0.5, nodes=("c",))), seed)
    assert both == [c or n == "c" for c, n in zip(chance, NODES, strict=True)]
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    straggling(Conditions(), NODES, rng)
    straggling(Conditions(stragglers=Stragglers(1.0, nodes=("a",))), NODES, again)
    assert rng.random() == again.random()


def test_nobody_straggles_unless_asked_and_everybody_at_one():
    assert drawn(Conditions(), 0) == [False] * 4
    assert drawn(Conditions(stragglers=Stragglers(1.0, probability=1.0)), 0) == [True] * 4


def test_the_share_of_stragglers_is_the_probability():
    nodes = tuple(str(i) for i in range(4000))
    count = sum(drawn(Conditions(stragglers=Stragglers(1.0, probability=0.3)), 1, nodes))
    assert count == pytest.approx(0.3 * 4000, abs=4 * math.sqrt(4000 * 0.3 * 0.7))


# ------------------------------------------------------------------------------------------------------------ effects


def test_thinking_takes_its_time_and_training_goes_on_meanwhile():
    free = Costs(evaluate_seconds=0.0)
    slow, quick = (learning(Conditions(thinking_seconds=s), seed=2, costs=free) for s in (5.0, 0.0))
    windows = [slow.perform(Run(clocks=10))]
    assert windows[0].start_seconds == 0.0
    before = slow.now
    slow.perform(Evaluate())
    assert slow.now == before + 5.0
    windows += [slow.perform(Run(clocks=10)) for _ in range(5)]
    assert windows[1].start_seconds == before
    assert windows[1].clocks > 10
    assert [w.start_seconds for w in windows[1:]] == [w.end_seconds for w in windows[:-1]]
    pushes = together(windows)
    assert_same_bytes(pushes, quick.perform(Run(clocks=len(pushes.seconds))).pushes)


@pytest.mark.parametrize("action", [Evaluate(), Fork(0)])
def test_nothing_is_trained_during_thinking_after_the_budget_has_ended(action):
    simulated = learning(Conditions(thinking_seconds=40.0), budget_seconds=60.0)
    windows = [simulated.perform(Run(seconds=5.0))]
    simulated.perform(action)
    assert simulated.now >= 60.0
    windows.append(simulated.perform(Run(clocks=1)))  # tells what was trained meanwhile
    pushes = together(windows)
    assert 45.0 < pushes.seconds.max() <= 60.0


def test_a_fork_does_not_report_the_pushes_of_its_parent_during_thinking():
    simulated = learning(Conditions(thinking_seconds=5.0))
    simulated.perform(Run(clocks=10))
    child = simulated.perform(Fork(0))
    window = simulated.perform(Run(clocks=10, branch=child))
    assert window.pushes.seconds[0] >= window.start_seconds
    assert simulated.perform(Run(clocks=1)).clocks > 1


def test_a_window_holds_the_pushes_that_it_reports_also_where_another_branch_has_trained_meanwhile():
    """The pushes during thinking count as made right before the branch goes on: its own clock stood still since then."""
    thinking, alone = (learning(Conditions(jitter=0.0, thinking_seconds=s)) for s in (20.0, 0.0))
    child = thinking.perform(Fork(0))
    thinking.perform(Run(seconds=100.0, branch=child))
    window = thinking.perform(Run(seconds=10.0))
    assert window.seconds == pytest.approx(50.0)  # it trained while the fork and this run were thought about, too
    times = window.pushes.seconds - window.start_seconds
    assert times.min() > 0
    assert times.max() <= window.seconds
    first = alone.perform(Run(seconds=20.0)).pushes.seconds
    assert len(first) > 1
    np.testing.assert_allclose(times[: len(first)], first)


def test_thinking_of_freeing_a_branch_trains_the_one_that_trains_anyway():
    """Another one would have to be pulled first, and would begin to recover where it has lost a machine."""
    around = Conditions(jitter=0.0, stagger=False, thinking_seconds=5.0, nodes=(NodeChange(("a",), 31.0, "fails"),))
    simulated = learning(around, costs=Costs(detection_seconds=4.0))
    best, loser = (simulated.perform(Fork(0)) for _ in range(2))
    simulated.perform(Run(seconds=1.0, branch=best))
    while simulated.now < 45.0:  # until it has recovered
        simulated.perform(Run(clocks=3, branch=loser))
    before = simulated.now
    simulated.perform(Free(0))
    assert simulated.now == before + 5.0
    simulated.perform(Free(loser))
    assert simulated.now == before + 10.0
    fork = simulated.perform(Run(clocks=20, branch=best))
    assert fork.setting is not None
    assert "a" not in fork.setting.workers


@pytest.mark.parametrize("ask", [Fork(0), Evaluate(0), Install(policies.asp(), 0)])
def test_thinking_about_a_branch_that_does_not_train_leaves_it_as_it_is(ask):
    """Trials of one parent begin from the same model: it stays as it is while one of them trains."""
    simulated = learning(Conditions(jitter=0.0, thinking_seconds=5.0))
    child = simulated.perform(Fork(0))
    simulated.perform(Run(clocks=10, branch=child))
    parent, trial = (int(simulated.branches[n].state.clock.pushes) for n in (0, child))
    simulated.perform(ask)
    assert int(simulated.branches[0].state.clock.pushes) == parent
    assert int(simulated.branches[child].state.clock.pushes) > trial  # it trained meanwhile


def test_thinking_takes_its_time_also_where_the_branch_that_trained_last_cannot_go_on():
    """All but the parent are freed, or have diverged: nobody trains."""
    free, rates = Costs(evaluate_seconds=0.0), (*KNOBS, Real("learning_rate", 0.01, 1e38))
    simulated = learning(Conditions(jitter=0.0, thinking_seconds=5.0), costs=free, knobs=rates)
    child = simulated.perform(Fork(0, replace(simulated.job.start, learning_rate=1e38)))
    assert simulated.perform(Run(clocks=40, branch=child)).status == "diverged"
    for ask in (Evaluate(child), Free(child), Evaluate(0)):
        before = simulated.now
        simulated.perform(ask)
        assert simulated.now == before + 5.0


def test_a_target_reached_during_thinking_is_reported():
    simulated = learning(Conditions(thinking_seconds=50.0), target=Target("clocks", 20))
    window = simulated.perform(Run(clocks=1))
    assert (window.status, window.clocks, simulated.status) == ("target", 20, "target")
    with pytest.raises(Rejected, match="it has target"):
        simulated.perform(Run(clocks=1))


def test_an_episode_slows_by_exactly_its_factor():
    """One worker: a second to pull, two to compute, one to push. From 5 to 11 computing takes three times as long."""
    demand = Demand(model_bytes=100.0, sample_seconds=0.25)
    conditions = Conditions(jitter=0.0, stagger=False, episodes=(Episode("a", 5.0, 6.0, 3.0), Episode("a", 14.0, 0.5, 2.0)))
    one = start(workers=("a",), servers=("b", "c"))
    kinds = Cluster(tuple((n, machine(100.0)) for n in NAMES))
    window = system(kinds, job(demand), one, conditions).perform(Run(clocks=4))
    assert window.pushes.compute_seconds.tolist() == pytest.approx([2.0, 6.0, 2.25, 2.0])
    assert window.pushes.seconds.tolist() == pytest.approx([4.0, 12.0, 16.25, 20.25])


def test_episodes_go_on_during_a_stall():
    """An episode that starts and ends during a restart has no effect; one that starts there and goes on has."""
    conditions = Conditions(jitter=0.0, stagger=False, episodes=(Episode("a", 1.0, 2.0, 9.0), Episode("a", 2.5, 1e6, 2.0)))
    demand = Demand(model_bytes=0.0, sample_seconds=0.25)
    simulated = system(cluster(), job(demand), start(workers=("a",)), conditions, knobs=KNOBS, costs=CHEAP)
    simulated.perform(Run(seconds=0.5))
    simulated.perform(Reconfigure(start(workers=("a",), intra_threads=1)))
    assert simulated.perform(Run(clocks=3)).pushes.compute_seconds.tolist() == pytest.approx([4.0] * 3)


def test_stragglers_stay_the_same_within_a_seed():
    slow = Conditions(jitter=0.0, stagger=False, stragglers=Stragglers(3.0, 0.0, 0.5))
    found = []
    for seed in range(4):
        simulated = learning(slow, seed, setting=start(policy="bsp"))
        straggles = [w.compute_seconds / w.pushes > 3.0 for w in simulated.perform(Run(clocks=30)).workers]
        simulated.perform(Reconfigure(start(policy="bsp", intra_threads=1)))
        again = simulated.perform(Run(clocks=30))
        assert straggles == [w.compute_seconds / w.pushes > 3.0 for w in again.workers]
        found.append(tuple(straggles))
    assert len(set(found)) > 1


def test_workers_begin_at_points_of_their_first_cycle():
    """Later by up to one mini-batch, each by its own share, in the first cycle only."""
    even, staggered = (
        learning(Conditions(jitter=0.0, stagger=s), setting=start(policy="bsp")).perform(Run(clocks=30)).pushes
        for s in (False, True)
    )

    def computed(pushes):
        return {(w, c): s for w, c, s in zip(pushes.worker, pushes.clock, pushes.compute_seconds, strict=True)}

    one, other = computed(even), computed(staggered)
    later = {k: other[k] - one[k] for k in one}
    first = [later[w, 0] / one[w, 0] for w in range(3)]
    assert all(0 < share < 1 for share in first)
    assert len({round(share, 6) for share in first}) == 3
    assert [v for (_, c), v in later.items() if c > 0] == pytest.approx([0.0] * 27, abs=1e-9)


def test_the_reference_simulation_agrees_when_everything_is_slowed_down():
    """With episodes on every node and sleepers, through the whole stack."""
    episodes = tuple(Episode(n, 10.0 * i, 25.0, 1.0 + i) for i, n in enumerate(NAMES, 1))
    rough = Conditions(episodes=episodes, sleeps=Sleeps(0.3, 1.0, 1.0), stragglers=Stragglers(1.0, 0.2, nodes=("b",)))
    window = learning(rough, seed=6).perform(Run(clocks=120))
    judge = Oracle(cluster(), job(SMALL, MODEL), start(), rough, Bounded(np.inf), 6, MODEL).run(120)
    np.testing.assert_array_equal(window.pushes.worker, judge.column("worker"))
    np.testing.assert_allclose(window.pushes.seconds, judge.column("seconds"), rtol=1e-9)
