"""Cruise's optimum for machines of several kinds: against hand-computed costs, random placements, brute force and HiGHS.

Where the methods have to agree: `best_in_batches` = MILP in whole mini-batches = every choice of roles and mini-batches
tried with a linear programme for the model's shares; MILP in samples = the same with Eq. 4's rounding; MILP in model
blocks = plain enumeration. `best_split` does not round, and is the lower bound of them all.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.support.compositions import compositions
from tests.support.marks import examples, slow
from tuners.cruise.milp import solve
from tuners.cruise.placement import (
    MachineKind,
    Placement,
    Problem,
    best_in_batches,
    best_split,
    place,
    placement_seconds,
    pull_seconds,
    queued_pull_seconds,
    splits,
)
from tuners.cruise.split import best_worker_count, epoch_seconds

TERMS = ("paper", "sum", "own")
CLOSE = 1e-5  # HiGHS keeps to every row within 1e-6 of the programme's unit, and an epoch adds up a few rows


def paper(*, z=1.81, pull=3.635, fast=2.0, **more):
    """Cruise's mixed cluster: 28 r4.xlarge and 4 r4.4xlarge, NMF's 190 mini-batches; z is compute over pull."""
    slow = MachineKind(count=28, compute_seconds=z * pull / 1e4, bytes_per_second=568e6 / pull)
    quick = MachineKind(count=4, compute_seconds=z * pull / fast / 1e4, bytes_per_second=4 * 568e6 / pull)
    return Problem(kinds=(slow, quick), samples=1.9e6, batch_size=1e4, model_bytes=568e6, **more)


def problems(most_kinds=3, most=3, batches=6, batch_size=1.0, terms=TERMS, **fixed):
    """Small problems in round numbers, so that solvers have no problems of scale."""
    kind = st.builds(
        MachineKind,
        count=st.integers(1, most),
        compute_seconds=st.integers(1, 40).map(lambda x: x / 10),
        bytes_per_second=st.integers(1, 20).map(lambda x: x / 4),
    )
    made = st.builds(
        Problem,
        kinds=st.lists(kind, min_size=1, max_size=most_kinds).map(tuple),
        samples=st.integers(1, batches).map(float),
        batch_size=st.just(batch_size),
        model_bytes=st.integers(1, 12).map(lambda x: x / 4),
        server_term=st.sampled_from(terms),
        **fixed,
    )
    return made.filter(lambda p: 2 <= p.machines <= 5)


def roles(problem):
    """Every way to make each machine a worker or a server."""
    n = problem.machines
    for bits in product((True, False), repeat=n):
        if 0 < sum(bits) < n:
            yield tuple(i for i in range(n) if bits[i]), tuple(i for i in range(n) if not bits[i])


def rates(problem):
    """Compute seconds per sample and bandwidth of each machine."""
    alike = [(k.compute_seconds, k.bytes_per_second) for k in problem.kinds for _ in range(k.count)]
    return [c for c, _ in alike], [b for _, b in alike]


def in_proportion(problem, workers, servers, model):
    """The placement whose workers all end at the same time; data can be divided into any parts."""
    even = Placement(workers, servers, (1.0,) * len(workers), tuple(model))
    compute, _ = rates(problem)
    own = np.array([compute[i] * problem.batch_size for i in workers])
    if problem.server_term == "queue":
        cycle = own + queued_pull_seconds(problem, even)
    else:
        served, alone = pull_seconds(problem, even)
        cycle = np.maximum(served + (0 if problem.overlap else own), alone + own)
    return even._replace(data=tuple(problem.samples / cycle / (1 / cycle).sum()))


# --------------------------------------------------------------------------------------------------- the cost of a placement

HAND = Problem(
    kinds=(
        MachineKind(count=2, compute_seconds=1.0, bytes_per_second=1.0),
        MachineKind(count=2, compute_seconds=0.25, bytes_per_second=4.0),
    ),
    samples=10,
    batch_size=2,
    model_bytes=8.0,
)
# Machines 0, 1 are slow and narrow, 2, 3 fast and wide. 0 and 2 work; 1 serves 2 bytes, 3 serves 6.
AT_HAND = Placement((0, 2), (1, 3), (3.0, 7.0), (2.0, 6.0))


@pytest.mark.parametrize(
    ("changes", "round_up", "slow", "fast"),
    [
        # Server 1 takes 2 (1 + 1) = 4 s, server 3 takes 6 (1 + 1/4) = 7.5 s for both; the slow worker's own NIC 2 + 6 = 8 s,
        # the fast one's 2 + 6/4 = 3.5 s. 1.5 mini-batches of 8 s and 3 s of compute; 3.5 of 7.5 s and 1.75 s.
        ({"server_term": "sum"}, False, 1.5 * 8 + 3, 3.5 * 7.5 + 1.75),
        ({"server_term": "sum"}, True, 2 * 8 + 3, 4 * 7.5 + 1.75),
        # The paper's: the slow worker waits max(2 x 2, 6 x 2) = 12 s, the fast one max(2 x 2, 6 x 2 / 4) = 4 s.
        ({"server_term": "paper"}, False, 1.5 * 12 + 3, 3.5 * 4 + 1.75),
        ({"server_term": "paper"}, True, 2 * 12 + 3, 4 * 4 + 1.75),
        # Each server at the rate of its own NIC: server 1 takes 2 x 2 = 4 s for both workers, server 3 6 x 2 / 4 = 3 s.
        ({"server_term": "own"}, False, 1.5 * 8 + 3, 3.5 * 4 + 1.75),
        ({"server_term": "own"}, True, 2 * 8 + 3, 4 * 4 + 1.75),
        # With overlap the server's turn is no longer than its work: 7.5 s against 8 s and compute.
        ({"server_term": "sum", "overlap": True}, False, 1.5 * 8 + 3, 3.5 * 7.5),
    ],
)
def test_eqs_1_to_4_by_hand(changes, round_up, slow, fast):
    problem = replace(HAND, **changes)
    assert placement_seconds(problem, AT_HAND, round_up=round_up) == pytest.approx(max(slow, fast), rel=1e-12)
    spared = AT_HAND._replace(data=(3.0, 0.0))
    assert placement_seconds(problem, spared, round_up=round_up) == pytest.approx(slow, rel=1e-12)


def test_nobody_works_or_nobody_serves():
    assert placement_seconds(HAND, Placement((), (0,), (), (8.0,))) == np.inf
    assert placement_seconds(HAND, Placement((0,), (), (10.0,), ())) == np.inf


def test_a_whole_number_of_mini_batches_is_not_rounded_further():
    shares = np.full(10, 0.1)  # ten tenths of the data are 10 x 1 samples but for the last digit
    problem = replace(HAND, kinds=(MachineKind(count=11, compute_seconds=0.0, bytes_per_second=1.0),), batch_size=1)
    placement = Placement(tuple(range(10)), (10,), tuple(shares * 10 * (1 + 1e-15)), (8.0,))
    assert placement_seconds(problem, placement, round_up=True) == pytest.approx(80.0)


@given(problems(most_kinds=1))
def test_for_alike_machines_all_server_terms_are_the_same(problem):
    one, *others = (best_split(replace(problem, server_term=term)).seconds for term in ("paper", "sum", "own"))
    assert others == pytest.approx([one, one], rel=1e-12)


# ------------------------------------------------------------------------------------------------------ the relaxed optimum


@given(st.integers(2, 60), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.booleans(), st.sampled_from(["sum", "queue"]))
def test_alike_machines_get_what_eq_5_says(machines, compute, rate, overlap, term):
    kinds = (MachineKind(count=machines, compute_seconds=compute, bytes_per_second=rate),)
    problem = Problem(kinds=kinds, samples=1000, batch_size=10, model_bytes=7.0, overlap=overlap, server_term=term)
    workers = best_worker_count(problem)
    assert best_split(problem).seconds == pytest.approx(epoch_seconds(workers, machines - workers, problem), rel=1e-12)


@given(problems(overlap=st.booleans(), terms=(*TERMS, "queue")))
def test_every_split_takes_what_eqs_1_to_4_say_and_comes_after_the_faster_ones(problem):
    found = list(splits(problem))
    assert len(found) == np.prod([k.count + 1 for k in problem.kinds]) - 2
    assert [s.seconds for s in found] == sorted(s.seconds for s in found)
    for split in found:
        placement = place(problem, split)
        assert placement_seconds(problem, placement) == pytest.approx(split.seconds, rel=1e-9)
        assert sum(placement.data) == pytest.approx(problem.samples)
        assert sum(placement.model) == pytest.approx(problem.model_bytes)
        assert min(placement.data) > 0
        assert min(placement.model) >= 0


@examples(25)
@given(problems(overlap=st.booleans(), terms=(*TERMS, "queue")), st.randoms(use_true_random=False))
def test_no_placement_beats_the_optimum(problem, random):
    """Any roles, any model shares per machine (even, clumped, or beside the optimum's own), the best data shares."""
    least = {(s.workers, s.servers): s for s in splits(problem)}
    kind = problem.kind_of()
    for workers, servers in roles(problem):
        count = tuple(int((kind[list(workers)] == k).sum()) for k in range(len(problem.kinds)))
        split = least[count, tuple(k.count - c for k, c in zip(problem.kinds, count, strict=True))]
        best = np.array([split.model[kind[j]] for j in servers])
        for power in (0.0, 1.0, 6.0):
            drawn = np.array([random.random() ** power for _ in servers]) + 1e-9
            for share in (drawn, best + problem.model_bytes * drawn / drawn.sum() / 50):
                model = problem.model_bytes * share / share.sum()
                cost = placement_seconds(problem, in_proportion(problem, workers, servers, model))
                assert cost >= split.seconds * (1 - 1e-9)


@settings(max_examples=20)
@given(problems(most_kinds=3, most=2, overlap=st.booleans()))
def test_a_fine_grid_of_model_shares_comes_as_close_as_its_steps(problem):
    """The shares by kind are on a simplex; rounding to the grid lengthens a pull by at most its steps."""
    steps = 60
    assume(len(problem.kinds) > 1)
    for split in list(splits(problem))[:3]:
        held = [i for i, s in enumerate(split.servers) if s]
        workers, servers = place(problem, split)[:2]
        kind = problem.kind_of()
        costs = []
        for parts in product(range(steps + 1), repeat=len(held)):
            if sum(parts) == steps:
                of = {k: problem.model_bytes * p / steps / split.servers[k] for k, p in zip(held, parts, strict=True)}
                model = [of[kind[j]] for j in servers]
                costs.append(placement_seconds(problem, in_proportion(problem, workers, servers, model)))
        narrowest = min(k.bytes_per_second for k in problem.kinds)
        step = problem.model_bytes / steps * len(held) * len(workers) / narrowest
        cycles = problem.samples / problem.batch_size
        assert split.seconds * (1 - 1e-9) <= min(costs) <= split.seconds + cycles * step


def test_a_server_behind_a_narrow_nic_is_left_with_nothing():
    """One wide worker pulls from a wide server at 10 and through the narrow NIC at 1: the narrow server only delays it."""
    kinds = (
        MachineKind(count=2, compute_seconds=0.1, bytes_per_second=10.0),
        MachineKind(count=1, compute_seconds=1e6, bytes_per_second=0.1),
    )
    found = best_split(Problem(kinds=kinds, samples=1, batch_size=1, model_bytes=10.0))
    assert (found.workers, found.servers) == ((1, 0), (1, 1))
    assert found.model == (10.0, 0.0)
    assert found.seconds == pytest.approx(1.1)


def test_too_few_machines_and_too_many_kinds():
    one = Problem(
        kinds=(MachineKind(count=1, compute_seconds=1, bytes_per_second=1),), samples=1, batch_size=1, model_bytes=1
    )
    assert best_split(one) is best_in_batches(one) is solve(one) is None
    with pytest.raises(ValueError, match="4 kinds: give at most 3"):
        best_split(replace(one, kinds=one.kinds * 4))


# --------------------------------------------------------------------------------------- whole mini-batches, and brute force


def least_by_lp(problem, workers, servers, batches, *, samples):
    """The least epoch for given roles and mini-batches: a linear programme in C, d and m (Eqs. 1-4; d = B n unless samples).

    `pull_seconds` is not used: each bound on C is written out.
    """
    compute, rate = rates(problem)
    w, s, size = len(workers), len(servers), 1 + len(workers) + len(servers)
    rows, right = [], []
    for i, (worker, n) in enumerate(zip(workers, batches, strict=True)):
        if n == 0 and not samples:
            continue

        def bound(terms, busy, i=i, worker=worker, n=n):
            row = np.zeros(size)
            row[0] = -1.0
            row[1 + i] = compute[worker] if busy else 0.0
            for j, seconds in terms.items():
                row[1 + w + j] = n * seconds
            rows.append(row)
            right.append(0.0)

        pair = [min(rate[worker], rate[j]) for j in servers]
        bound({j: 1 / pair[j] for j in range(s)}, busy=True)
        for j, server in enumerate(servers):
            if problem.server_term == "paper":
                turn = w / pair[j]
            elif problem.server_term == "own":
                turn = w / rate[server]
            else:
                turn = sum(1 / min(rate[other], rate[server]) for other in workers)
            bound({j: turn}, busy=not problem.overlap)
    held = [n * problem.batch_size for n in batches]
    limits = [(0, None), *((0 if samples else h, h) for h in held), *((0, None) for _ in servers)]
    equal = np.zeros((2, size))
    equal[0, 1 : 1 + w], equal[1, 1 + w :] = 1, 1
    totals = [problem.samples, problem.model_bytes]
    answer = linprog(np.eye(size)[0], np.array(rows), right, equal, totals, limits, method="highs")
    return answer.fun if answer.status == 0 else np.inf


def brute_force(problem, *, samples=False):
    need = problem.batches
    return min(
        least_by_lp(problem, workers, servers, batches, samples=samples)
        for workers, servers in roles(problem)
        for total in range(need, need + (len(workers) if samples else 1))
        for batches in compositions(total, len(workers))
    )


@pytest.mark.slow
@settings(max_examples=12)
@given(problems(most=2, batches=4, overlap=st.booleans()).filter(lambda p: p.machines <= 4))
def test_whole_mini_batches_by_kind_are_what_brute_force_finds(problem):
    found = best_in_batches(problem)
    assert all(d == round(d) for d in found.data)
    assert sum(found.data) == problem.samples
    cost = placement_seconds(problem, found, round_up=True)
    assert cost == pytest.approx(placement_seconds(problem, found), rel=1e-12)
    assert cost == pytest.approx(brute_force(problem), rel=1e-7)


@settings(max_examples=30)
@given(problems(most=2, batches=5, terms=["queue"]).filter(lambda p: p.machines <= 4))
def test_with_a_queue_too_whole_mini_batches_are_what_brute_force_finds(problem):
    """The model's shares are best in proportion to what servers serve per second, whatever the roles and mini-batches."""
    found = best_in_batches(problem)
    _, rate = rates(problem)
    least = np.inf
    for workers, servers in roles(problem):
        model = np.array([rate[j] for j in servers]) * problem.model_bytes / sum(rate[j] for j in servers)
        for batches in compositions(problem.batches, len(workers)):
            placement = Placement(workers, servers, tuple(b * problem.batch_size for b in batches), tuple(model))
            least = min(least, placement_seconds(problem, placement, round_up=True))
    assert placement_seconds(problem, found, round_up=True) == pytest.approx(least, rel=1e-9)


@settings(max_examples=25)
@given(problems(batches=12))
def test_by_kind_and_by_milp_are_one_in_whole_mini_batches(problem):
    solved = solve(problem)
    assert solved.proven
    assert solved.seconds == pytest.approx(placement_seconds(problem, best_in_batches(problem), round_up=True), rel=CLOSE)


def drawn(rng):
    """A cluster of 4 to 6 machines of up to three kinds, in round numbers: they make many placements equally good."""
    kinds = tuple(
        MachineKind(
            count=int(count),
            compute_seconds=float(rng.integers(1, 41) / 10),
            bytes_per_second=float(rng.integers(1, 21) / 4),
        )
        for count in rng.multinomial(rng.integers(4, 7), np.ones(3) / 3)
        if count
    )
    return Problem(
        kinds=kinds,
        samples=float(rng.integers(1, 10)),
        batch_size=1.0,
        model_bytes=float(rng.integers(1, 13) / 4),
        server_term=str(rng.choice(["paper", "sum", "own"])),
    )


def brute_force_by_kind(problem):
    """`brute_force` in whole mini-batches, without the choices that differ only in which of alike machines does what."""
    compute, rate = rates(problem)
    kind = problem.kind_of()
    least, tried = np.inf, set()
    for workers, servers in roles(problem):
        quickest = [problem.model_bytes / min(rate[w], max(rate)) for w in workers]
        for batches in compositions(problem.batches, len(workers)):
            same = tuple(sorted((int(kind[w]), n) for w, n in zip(workers, batches, strict=True)))
            # No worker can pull faster than through its own NIC from the widest machine.
            bound = max(n * (compute[w] + q) for w, n, q in zip(workers, batches, quickest, strict=True))
            if same not in tried and bound < least:
                tried.add(same)
                least = min(least, least_by_lp(problem, workers, servers, batches, samples=False))
    return least


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "clusters"),
    [(0, 3), slow(0, 20), pytest.param(1, 200, marks=pytest.mark.benchmark)],
    ids=["few", "more", "many"],
)
def test_what_the_milp_calls_proven_is_what_brute_force_finds(seed, clusters):
    rng = np.random.default_rng(seed)
    for _ in range(clusters):
        problem = drawn(rng)
        solved = solve(problem)
        assert solved.proven, problem
        assert solved.seconds == pytest.approx(brute_force_by_kind(problem), rel=CLOSE), problem


def alike_and_different(*kinds, **more):
    """Kinds of machines as (count, seconds per sample, bytes per second); mini-batches of one sample."""
    made = tuple(MachineKind(count=n, compute_seconds=c, bytes_per_second=b) for n, c, b in kinds)
    return Problem(kinds=made, batch_size=1.0, server_term="paper", **more)


@pytest.mark.parametrize(
    ("problem", "seconds"),
    [
        # Called optimal, and proven, at 10.27 s: variables had no bounds, and HiGHS cut the optimum off.
        (alike_and_different((3, 3.7, 4.5), (1, 2.4, 2.25), (2, 0.9, 1.5), samples=12.0, model_bytes=1.25), 26 / 3),
        # Four mini-batches on four workers of six: the even placement is the optimum, and the cap was at it. 7.25 s.
        (alike_and_different((6, 3.5, 4.0), samples=4.0, model_bytes=3.0), 5.0),
    ],
)
def test_a_placement_that_highs_cut_off_is_found(problem, seconds):
    solved = solve(problem)
    assert solved.proven
    assert solved.seconds == pytest.approx(seconds, rel=CLOSE)
    assert placement_seconds(problem, best_in_batches(problem), round_up=True) == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=8)
@given(problems(most=2, batches=5, batch_size=1.5).filter(lambda p: p.machines <= 4))
def test_the_milp_in_samples_is_what_brute_force_finds_with_eq_4s_rounding(problem):
    solved = solve(problem, data="samples")
    assert solved.proven
    assert solved.seconds == pytest.approx(brute_force(problem, samples=True), rel=CLOSE)


# HiGHS called 59.52 s optimal here until the programme was given a bound of the epoch; 59 s are possible.
_PAIRS = tuple(MachineKind(count=2, compute_seconds=c, bytes_per_second=b) for c, b in ((3.0, 0.5), (1.8, 0.25)))
_MISJUDGED = Problem(kinds=_PAIRS, samples=10.0, batch_size=1.0, model_bytes=2.5, server_term="paper")

# The presolve of HiGHS ended in an error for two workers, so that 1.1 s remained, and not proven; 0.967 s are possible.
_ENDED = replace(
    _MISJUDGED,
    kinds=tuple(MachineKind(count=2, compute_seconds=c, bytes_per_second=b) for c, b in ((0.5, 0.75), (0.3, 2.0))),
    samples=2.0,
    model_bytes=0.5,
)


@pytest.mark.slow
@settings(max_examples=25)
@example(_MISJUDGED)
@example(_ENDED)
@given(problems(batches=12))
def test_rounding_lies_between_none_and_whole_mini_batches(problem):
    samples = solve(problem, data="samples")
    assert samples.proven
    assert best_split(problem).seconds <= samples.seconds * (1 + CLOSE)
    assert samples.seconds <= placement_seconds(problem, best_in_batches(problem), round_up=True) * (1 + CLOSE)


@settings(max_examples=8)
@given(problems(batches=9))
def test_more_mini_batches_bring_the_whole_ones_to_the_relaxed_optimum(problem):
    """C in whole mini-batches is at most one mini-batch of the slowest above the relaxed C, whose share of C vanishes."""
    many = replace(problem, samples=problem.samples * 5000)
    relaxed = best_split(many)
    placement = place(many, relaxed)
    one = max(in_batches_of_one(many, placement))
    assert relaxed.seconds <= placement_seconds(many, best_in_batches(many)) * (1 + 1e-12)
    assert placement_seconds(many, best_in_batches(many)) <= relaxed.seconds + one


def in_batches_of_one(problem, placement):
    """Seconds of one mini-batch at each worker."""
    for row in problem.batch_size * np.eye(len(placement.workers)):
        yield placement_seconds(problem, placement._replace(data=tuple(row)))


# ------------------------------------------------------------------------------------------------------- the paper's cluster


@pytest.mark.slow
def test_on_the_papers_cluster_both_methods_prove_the_same_optimum():
    """28 + 4 machines, 190 mini-batches: 2^32 roles."""
    problem = paper(server_term="paper")
    solved, found = solve(problem), best_in_batches(problem)
    assert solved.proven
    assert solved.seconds == pytest.approx(placement_seconds(problem, found, round_up=True), rel=CLOSE)
    assert best_split(problem).seconds <= solved.seconds


@pytest.mark.parametrize("term", ["paper", "sum"])
@pytest.mark.parametrize("z", [1.5, 1.81, 2.3, 4.84, 9.0])
def test_fast_machines_all_work_as_in_fig_8(term, z):
    """Published: chosen (20+4, 8+0), best (19+4, 9+0). To a narrow worker a wide server is narrow: b_ij = min(b_i, b_j)."""
    found = best_split(paper(z=z, server_term=term))
    assert (found.workers[1], found.servers[1]) == (4, 0)
    assert 1 < found.data[1] / found.data[0] <= 2


def test_how_many_slow_machines_work_depends_on_what_is_added():
    """With NMF's z = 1.81, Fig. 8's optimum comes out where pulls overlap. The paper's own sum gives it at z = 9, at which
    (24, 8) of Table III is best, and falls short by two at the z = 4.84 of (22, 10).
    """
    assert best_split(paper()).workers == (13, 4)
    assert best_split(paper(overlap=True)).workers == (19, 4)
    assert [best_split(paper(z=z)).workers[0] for z in (4.84, 9.0)] == [17, 19]


@pytest.mark.parametrize("ours", [{"overlap": True}, {"server_term": "queue"}])
def test_overlapping_pulls_are_not_for_the_milp(ours):
    with pytest.raises(ValueError, match="overlapping pulls"):
        solve(paper(**ours))


def test_a_queue_has_no_two_terms():
    problem = paper(server_term="queue")
    with pytest.raises(ValueError, match="use queued_pull_seconds"):
        pull_seconds(problem, place(problem, best_split(problem)))
