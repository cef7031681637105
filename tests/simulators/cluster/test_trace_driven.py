"""Recorded traces drive a run: which node replays which machine, from when on, and that the reference simulation agrees."""

import json
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
import polars as pl
import pytest
from scipy.stats import ks_2samp

from harness.record import play_recorded
from harness.scenario import load, parse
from simulators.branch import stacked
from simulators.cluster.cluster import Cluster
from simulators.cluster.condition_series import condition_series
from simulators.cluster.conditions import Bucket, Conditions, Episode, NodeChange, Replay, ReplayedTrace, check
from simulators.cluster.trace_driven import check_replay, expand_replay, relative_times
from simulators.cluster.trace_driven_nodes import named_changes, places
from simulators.engine import loop
from simulators.workloads.workload import Demand
from tests.support.oracle import Bounded, Oracle
from tests.support.recordings import MADE, lay
from tests.support.small_jobs import (
    CHEAP,
    KNOBS,
    NAMES,
    SMALL,
    assert_same_bytes,
    cluster,
    job,
    machine,
    start,
    system,
    together,
)
from traces.importers import import_trace
from traces.parts import Origin, TraceWriter, scan
from traces.schema import setting_text
from traces.shipped import locate
from tuners.actions import Reconfigure, Rejected, Run, Target

CALM = Conditions(jitter=0.0, stagger=False)
ORDER = {"deal": "order"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Imported files of our own making, by source."""
    folder = tmp_path_factory.mktemp("traces")
    sources = ("alibaba-pai-minibatch", "azure-vm-noise", "bamboo-spot", "bytedance-straggler", "uta-ec2-tokenbucket")
    for source in sources:
        import_trace(source, lay(folder / "in" / source, MADE[source]()), folder / source, made_by="test")
    return {source: str(folder / source) for source in sources}


def written(folder, **tables):
    """A trace of these rows, by table."""
    with TraceWriter(folder, Origin("test", "test")) as writer:
        for table, rows in tables.items():
            writer.add(table, pl.DataFrame(rows))
    return str(folder)


def replaying(conditions=CALM, **recordings):
    return msgspec.structs.replace(conditions, replay=Replay(**recordings))


def timed(conditions, seed=0, setting=None, **changed):
    """Five nodes, three of them workers; nothing is learned."""
    rules = {"knobs": KNOBS, "costs": CHEAP} | changed
    return system(cluster(), job(SMALL), setting or start(), conditions, seed, **rules)


TIGHT = (Bucket(("a", "d"), 150.0, 20.0), Bucket(("e",), 400.0, 35.0))


def drawn(conditions, seed=0, budget=1e4, kinds=None):
    return expand_replay(conditions, (kinds or cluster()).nodes, budget, seed)


@pytest.mark.slow
def test_windows_may_be_cut_anywhere_with_buckets_and_recordings(traces):
    recorded = replaying(Conditions(buckets=TIGHT), compute=traces["bytedance-straggler"])
    whole = timed(recorded, seed=2).perform(Run(clocks=60)).pushes
    cut = timed(recorded, seed=2)
    assert_same_bytes(whole, together([cut.perform(Run(clocks=1)) for _ in range(60)]))
    other = timed(recorded, seed=2)
    windows = [other.perform(Run(seconds=1.7))]
    while sum(w.clocks for w in windows) < 60:
        windows.append(other.perform(Run(seconds=1.7)))
    pushes = together(windows)
    assert_same_bytes(whole, type(pushes)(*(column[:60] for column in pushes)))


@pytest.mark.slow
def test_lanes_meet_buckets_and_recordings_as_jobs_do_alone(traces):
    conditions = replaying(Conditions(buckets=TIGHT), compute=traces["bytedance-straggler"])
    jobs = [timed(conditions, seed=s) for s in (0, 1)]
    lanes = [j.branches[0] for j in jobs]
    alone = [j.perform(Run(clocks=30)).pushes.seconds for j in (timed(conditions, seed=s) for s in (0, 1))]
    data, inputs, states = stacked(lanes)
    args = (data, inputs, states, jnp.int32(30), jnp.float64(1e9))
    _, table, used = loop.advance_lanes(lanes[0].program, *args, rows=30, own_data=True)
    assert used.tolist() == [30, 30]
    np.testing.assert_allclose(np.asarray(table)[:, :, 0], alone, rtol=1e-12)


# ------------------------------------------------------------------------------------------------------ compute times


def spells(folder, by_worker, **settings):
    rows = [
        {"run": "r", "branch": 0, "seconds": None, "worker": w, "clock": c, "compute_seconds": s}
        for w, times in by_worker.items()
        for c, s in enumerate(times)
    ]
    rows = {k: [row[k] for row in rows] for k in rows[0]}
    columns = pl.DataFrame(
        rows, schema_overrides={"seconds": pl.Float64, "worker": pl.Int32, "clock": pl.Int32, "branch": pl.Int32}
    )
    with TraceWriter(folder, Origin("test", "test")) as writer:
        writer.add("iterations", columns)
        writer.add(
            "settings", pl.DataFrame({"run": ["r"], "branch": pl.Series([0], dtype=pl.Int32), "seconds": [0.0]} | settings)
        )
    return str(folder)


@pytest.mark.slow
def test_mini_batches_take_what_was_recorded_and_begin_again(tmp_path):
    """Medians: 2 of the run. Machines a and b get workers 0 and 1 in order; c gets worker 0 from half-way on."""
    trace = spells(tmp_path / "t", {0: [2.0, 4.0, 1.0, 2.0], 1: [2.0, 3.0, 2.0]})
    conditions = replaying(Conditions(stagger=False), compute=ReplayedTrace(trace, nodes=("a", "b", "c"), **ORDER))
    seen = system(cluster(), job(Demand(model_bytes=0.0, sample_seconds=1.0)), start(workers=("a", "b", "c")), conditions)
    pushes = seen.perform(Run(clocks=60)).pushes
    factors = {0: [1, 2, 0.5, 1], 1: [1, 1.5, 1], 2: [0.5, 1, 1, 2]}
    for worker, expected in factors.items():
        took = pushes.compute_seconds[pushes.worker == worker] / (8 / (1.0 + worker / 3) / 2)
        assert took[:8] == pytest.approx((expected * 3)[:8])
    judge = Oracle(
        cluster(),
        job(Demand(model_bytes=0.0, sample_seconds=1.0)),
        start(workers=("a", "b", "c")),
        conditions,
        Bounded(np.inf),
        0,
        factors={NAMES[w]: f for w, f in factors.items()},
    ).run(60)
    np.testing.assert_allclose(pushes.seconds, judge.column("seconds"), rtol=1e-9)


def test_what_is_usual_is_the_median_of_the_run_of_the_stage_or_of_the_worker(tmp_path):
    times = {0: [1.0, 1.0], 1: [3.0, 3.0], 2: [1.0, 1.0]}
    trace = spells(tmp_path / "t", times)
    staged = spells(tmp_path / "s", times, options=['{"stage_of_worker": {"0": 0, "1": 1, "2": 0}}'])
    found = {}
    for name, recording in {
        "run": ReplayedTrace(trace, deal="order"),
        "worker": ReplayedTrace(trace, deal="order", against="worker"),
        "stage": ReplayedTrace(staged, deal="order"),
    }.items():
        found[name] = np.asarray(drawn(replaying(compute=recording))[1].values)[:3, 0].tolist()
    assert found == {"run": [1, 3, 1], "worker": [1, 1, 1], "stage": [1, 1, 1]}


def test_only_named_nodes_are_driven_and_others_keep_their_noise(tmp_path):
    trace = spells(tmp_path / "t", {0: [1.0] * 4})
    noisy = Conditions(stagger=False, jitter=0.5)
    some = replaying(noisy, compute=ReplayedTrace(trace, nodes=("b",)))
    plain, driven = (timed(c).perform(Run(clocks=60)).pushes for c in (noisy, some))
    by = [{w: p.compute_seconds[p.worker == w][:10] for w in (0, 1)} for p in (plain, driven)]
    np.testing.assert_allclose(by[0][0], by[1][0], rtol=1e-9)
    assert np.ptp(by[0][1]) > 0
    assert np.ptp(by[1][1]) < 1e-9


def test_assignments_depend_on_the_seed_alone(traces):
    conditions = replaying(compute=traces["bytedance-straggler"], stragglers=traces["alibaba-pai-minibatch"])
    found = [
        msgspec.json.encode(drawn(conditions, s)[0]) + np.asarray(drawn(conditions, s)[1].values).tobytes() for s in range(6)
    ]
    assert found == [
        msgspec.json.encode(drawn(conditions, s)[0]) + np.asarray(drawn(conditions, s)[1].values).tobytes() for s in range(6)
    ]
    assert len(set(found)) > 3


# --------------------------------------------------------------------------------------------------------- stragglers


def test_recorded_episodes_come_at_their_times_and_repeat(traces):
    """In our file, job_7 has workers at 400, 401, 402; the third is at 800 from second 31 to 51 of 1 to 81."""
    conditions = replaying(
        stragglers=ReplayedTrace(traces["alibaba-pai-minibatch"], "minibatch/*", ("a", "b", "c"), "order")
    )
    made, _ = drawn(conditions, budget=1000.0)
    (episode,) = [e for e in made.episodes if e.every_seconds]
    assert (episode.node, episode.start_seconds, episode.seconds, episode.every_seconds) == ("c", 30.0, 20.0, 80.0)
    assert episode.factor == pytest.approx(800 / 402)
    always = {e.node: e.factor for e in made.episodes if not e.every_seconds}
    assert always == pytest.approx({"a": 400 / 401, "c": 402 / 401})
    simulated = system(cluster(), job(Demand(model_bytes=0.0, sample_seconds=0.25)), start(workers=("c",)), conditions)
    pushes = simulated.perform(Run(seconds=300.0)).pushes
    slow = pushes.seconds[pushes.compute_seconds > 1.5 * np.median(pushes.compute_seconds)]
    assert {int((s - 30) // 80) for s in slow} == {0, 1, 2, 3}
    assert all(30 < s % 80 < 52 for s in slow)


def test_a_replay_may_start_within_an_episode(traces):
    recording = ReplayedTrace(traces["alibaba-pai-minibatch"], "minibatch/*", ("a", "b", "c"))
    for seed in range(40):
        made, _ = drawn(replaying(stragglers=recording), seed, budget=80.0)
        slow = [e for e in made.episodes if e.factor > 1.5]
        share = sum(min(e.start_seconds + e.seconds, 80.0) - e.start_seconds for e in slow)
        assert share == pytest.approx(20.0)  # in any 80 s, whenever they begin


def test_a_recorded_speed_is_the_inverse_of_slowness(tmp_path):
    rows = {"run": ["r"] * 3, "node": ["x", "y", "z"], "seconds": [0.0, 5.0, 9.0], "relative_speed": [100.0, 50.0, 100.0]}
    trace = written(tmp_path / "t", probes=rows)
    made, _ = drawn(replaying(stragglers=ReplayedTrace(trace, **ORDER)))
    assert {e.node: e.factor for e in made.episodes} == {"b": 2.0, "e": 2.0}


def probed(folder, slow, names):
    """A trace in which `slow` takes three times as long from second 30 to 50 of 100."""
    rows = [(n, 10.0 * i, 3.0 if n == slow and i in (3, 4) else 1.0) for n in names for i in range(10)]
    frame = pl.DataFrame(rows, ["node", "seconds", "relative_seconds"], orient="row")
    return written(folder, probes=frame.with_columns(run=pl.lit("r")))


def test_in_order_slow_downs_come_to_the_nodes_of_their_names(tmp_path):
    """As text, n10 is before n2. A node that was not probed has no episodes; others get machines as their names go."""
    (_, kind), *_ = cluster().nodes
    ours = tuple((f"n{i}", kind) for i in range(12))
    probes = {name: probed(tmp_path / name, name, [n for n, _ in ours if n != "n5"]) for name in ("n2", "n10")}
    for name, trace in probes.items():
        made, _ = expand_replay(replaying(all=trace), ours, 90.0, 0)
        assert [(e.node, e.start_seconds, e.factor) for e in made.episodes] == [(name, 30.0, 3.0)]
    strange = probed(tmp_path / "other", "host10", [f"host{i}" for i in range(12)])
    made, _ = expand_replay(replaying(all=strange), ours, 90.0, 0)
    assert [(e.node, e.start_seconds, e.factor) for e in made.episodes] == [("n10", 30.0, 3.0)]


def test_in_order_a_part_of_a_recorded_cluster_has_its_own_conditions(tmp_path):
    """Of six recorded machines, ours are five: what the sixth, z, did comes to none of them."""
    probes = pl.DataFrame({"node": ["z", "b"] * 10, "seconds": [10.0 * (i // 2) for i in range(20)], "run": ["r"] * 20})
    slow = pl.when(pl.col("node") == "z", pl.col("seconds") == 30).then(3.0)
    slow = slow.when(pl.col("node") == "b", pl.col("seconds") == 50).then(2.0).otherwise(1.0)
    events = {"run": ["r"] * 2, "seconds": [5.0, 7.0], "node": ["z", "c"], "event": ["failed"] * 2}
    whole = setting_text(start(workers=("z", "d"), servers=("a",)))
    settings = pl.DataFrame({"run": ["r"], "seconds": [0.0], "setting": [whole]})
    times = {"worker": [0, 0, 1, 1], "clock": [0, 1, 0, 1], "compute_seconds": [1.0, 1.0, 3.0, 1.0]}
    iterations = pl.DataFrame(times, schema_overrides={"worker": pl.Int32, "clock": pl.Int32}).with_columns(run=pl.lit("r"))
    in_branch = pl.lit(0, pl.Int32).alias("branch")
    tables = {"probes": probes.with_columns(relative_seconds=slow).sort("node", "seconds"), "node_events": events}
    tables |= {"settings": settings.with_columns(in_branch), "iterations": iterations.with_columns(in_branch)}
    trace = written(tmp_path / "t", **tables)
    made, factors = drawn(replaying(all=trace))
    assert made.nodes == (NodeChange(("c",), 7.0, "fails"),)
    assert factors.values[NAMES.index("d")].tolist() == pytest.approx([1.5, 0.5])
    made, _ = drawn(replaying(stragglers=ReplayedTrace(trace, **ORDER)), budget=90.0)
    assert [(e.node, e.start_seconds, e.factor) for e in made.episodes] == [("b", 50.0, 2.0)]


def test_in_order_compute_times_come_to_the_nodes_that_the_setting_names(tmp_path):
    """The workers 0 and 1 are the nodes d and b: the second takes three times as long."""
    whole = setting_text(start(workers=("d", "b"), servers=("a",)))
    settings = {"run": ["r"], "seconds": [0.0], "setting": [whole]}
    times = {"worker": [0, 0, 1, 1], "clock": [0, 1, 0, 1], "compute_seconds": [1.0, 1.0, 3.0, 3.0]}
    iterations = pl.DataFrame(times, schema_overrides={"worker": pl.Int32, "clock": pl.Int32})
    iterations = iterations.with_columns(run=pl.lit("r"), branch=pl.lit(0, pl.Int32))
    settings = pl.DataFrame(settings).with_columns(branch=pl.lit(0, pl.Int32))
    trace = written(tmp_path / "t", iterations=iterations, settings=settings)
    _, factors = drawn(replaying(compute=ReplayedTrace(trace, **ORDER)))
    usual = dict(zip(NAMES, np.asarray(factors.values)[:, 0], strict=True))
    assert (usual["d"], usual["b"]) == (pytest.approx(0.5), pytest.approx(1.5))


def test_in_order_compute_times_come_to_the_nodes_that_our_own_recorder_numbered(tmp_path):
    """The setting has d before b, and the recorder numbers nodes: number 1 is b. Mini-batches of d are three times as large,
    and take three times as long; the last one of b takes twice as long."""

    def tuner(_):
        yield from Run(clocks=60)

    setting = start(workers=("d", "b"), servers=("a",), batch_size=8, loads=((12,), (4,)))
    alike = Cluster(tuple((name, machine()) for name in NAMES))
    slower = Conditions(jitter=0.0, stagger=False, episodes=(Episode("b", 20.0, 1e9, 2.0),))
    recorded = system(alike, job(SMALL), setting, slower, target=Target("clocks", 60))
    play_recorded(tuner, recorded, tmp_path / "t", scenario="s", tuner="t", seed=0)
    found = relative_times(ReplayedTrace(str(tmp_path / "t"), deal="order"))
    by_node = {one.node: one.factors for one in found["s/t/0"]}
    assert by_node.keys() == {"b", "d"}
    assert by_node["d"] == pytest.approx(1.0)
    assert by_node["b"][-1] / by_node["b"][0] == pytest.approx(2.0)


def test_an_episode_does_not_last_through_a_gap_in_the_recording(tmp_path):
    """Nobody probed for an hour after the first slow probe, and the machine was slow once more, after it."""
    at, slow = [0.0, 10.0, 20.0, 30.0, 3630.0, 3640.0, 3650.0, 3660.0], [1, 1, 1, 3, 1, 1, 3, 1]
    rows = {"run": ["r"] * 8, "node": ["m"] * 8, "seconds": at, "relative_seconds": [float(s) for s in slow]}
    trace = written(tmp_path / "t", probes=rows)
    made, _ = drawn(replaying(stragglers=ReplayedTrace(trace, nodes=("a",), **ORDER)))
    assert [(e.start_seconds, e.seconds, e.factor, e.every_seconds) for e in made.episodes] == [
        (30.0, 10.0, 3.0, 3670.0),
        (3650.0, 10.0, 3.0, 3670.0),
    ]


def test_a_machine_that_was_probed_twice_makes_the_recording_no_longer(tmp_path):
    """The other one, probed every 10 s, is slow once in 1000 s; the replay would have repeated after 1990 s."""
    rows = [("m", 10.0 * i, 3.0 if i == 40 else 1.0) for i in range(100)] + [("rare", t, 1.0) for t in (0.0, 990.0)]
    probes = pl.DataFrame(rows, ["node", "seconds", "relative_seconds"], orient="row").with_columns(run=pl.lit("r"))
    trace = written(tmp_path / "t", probes=probes)
    made, _ = drawn(replaying(stragglers=ReplayedTrace(trace, nodes=("a",), **ORDER)))
    assert [(e.start_seconds, e.seconds, e.every_seconds) for e in made.episodes] == [(400.0, 10.0, 1000.0)]


@pytest.mark.parametrize("fitted", [False, True])
def test_machines_that_were_measured_once_are_always_as_slow(tmp_path, fitted):
    rows = {"run": ["r"] * 3, "node": ["x", "y", "z"], "seconds": [0.0] * 3, "relative_seconds": [2.0] * 3}
    conditions = replaying(stragglers=ReplayedTrace(written(tmp_path / "t", probes=rows), fitted=fitted))
    assert not drawn(conditions)[0].episodes
    series = condition_series(conditions, cluster().nodes, 100.0, range(2))["stragglers"]
    assert {float(x) for row in (*series.recorded, *(r for one in series.simulated for r in one)) for x in row} == {1.0}


# ---------------------------------------------------------------------------------------------------------- bandwidth


def test_buckets_last_as_long_and_throttle_as_far_as_recorded(traces):
    """In our file: 60 s at 5 Gbit/s, then a quarter of that, on any NIC."""
    made, _ = drawn(replaying(bandwidth=traces["uta-ec2-tokenbucket"]))
    assert [b.nodes for b in made.buckets] == [(n,) for n in NAMES]
    for bucket, (_, kind) in zip(made.buckets, cluster().nodes, strict=True):
        nic = kind.nic_bytes_per_second
        assert bucket.refill_bytes_per_second == pytest.approx(nic / 4)
        assert bucket.capacity_bytes / (nic - nic / 4) == pytest.approx(60.0)


HIGH, LOW, HELD = "bucket_high_bytes_per_second", "bucket_low_bytes_per_second", "bucket_bytes"


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({HIGH: 1e9}, "token bucket of run 'r', with .*high_bytes_per_second 1000000000.0, .*None"),
        ({LOW: 1e8, HELD: 5e9}, "token bucket of run 'r', with .*: give all three"),
        ({HIGH: 1e9, LOW: 1e9, HELD: 5e9}, "the low rate above 0 and below the high one"),
        ({HIGH: 1e8, LOW: 1e9, HELD: 5e9}, "the low rate above 0 and below the high one"),
        ({HIGH: 1e9, LOW: 0, HELD: 5e9}, "the low rate above 0 and below the high one"),
        ({HIGH: "1 Gbit"}, r"extras of run 'r': Expected `float \| null`, got `str` - at `\$.bucket_high_bytes_per_second`"),
        ({}, "no runs that were throttled, whose extras have bucket_high_bytes_per_second, .*bucket_bytes; it has r"),
    ],
)
def test_a_bucket_that_is_none_is_refused(tmp_path, extras, said):
    trace = written(tmp_path / "t", runs={"run": ["r"], "extras": [json.dumps(extras)]})
    with pytest.raises(ValueError, match=said):
        check_replay(replaying(bandwidth=trace))


def test_a_bucket_lasts_as_long_as_its_bytes(tmp_path):
    """9e9 bytes above the low rate, at 0.9e9 more per second than it, are ten seconds."""
    trace = written(
        tmp_path / "t", runs={"run": ["r"], "extras": [json.dumps({HIGH: 1e9, LOW: 1e8, HELD: 9e9, "zone": "a"})]}
    )
    made, _ = drawn(replaying(bandwidth=trace))
    nics = {name: kind.nic_bytes_per_second for name, kind in cluster().nodes}
    assert {b.nodes: b.capacity_bytes for b in made.buckets} == pytest.approx({(n,): 9 * nic for n, nic in nics.items()})


# ------------------------------------------------------------------------------------------------ nodes come and go


EVENTS = [
    (0.0, "m1", "joined"),
    (0.0, "m2", "joined"),
    (10.0, "m3", "joined"),
    (20.0, "m1", "left"),
    (30.0, "m2", "leaving"),
    (35.0, "m2", "left"),
    (40.0, "m4", "joined"),
    (50.0, "m5", "joined"),
    (60.0, "m3", "failed"),
]


def test_machines_take_the_place_that_was_free_for_longest():
    found = places(EVENTS)
    assert found.taken_at_start == frozenset()
    assert [(h.seconds, h.place, h.event, h.notice_seconds) for h in found.events] == [
        (0.0, 0, "joins", 0.0),
        (0.0, 1, "joins", 0.0),
        (10.0, 2, "joins", 0.0),
        (20.0, 0, "leaves", 0.0),
        (30.0, 1, "leaves", 5.0),
        (40.0, 0, "joins", 0.0),
        (50.0, 1, "joins", 0.0),
        (60.0, 2, "fails", 0.0),
    ]
    assert found.changes(("a", "b", "c", "d"), 1e4, None) == [
        NodeChange(("a",), 10.0, "leaves"),
        NodeChange(("b",), 20.0, "leaves", 5.0),
        NodeChange(("a",), 30.0, "joins"),
        NodeChange(("b",), 40.0, "joins"),
        NodeChange(("c",), 50.0, "fails"),
    ]


def test_machines_that_were_there_before_have_places_from_the_start():
    assert places([(5.0, "m1", "left"), (9.0, "m2", "joined")]).taken_at_start == {0}


def test_no_node_is_absent_at_the_start_and_changes_are_consistent():
    """Property: for every start that is drawn, the conditions pass `check`, and no node is absent at the start."""
    rng, alive, events, number = np.random.default_rng(0), [], [], 0
    for second in np.sort(rng.random(400)) * 1e4:
        if alive and rng.random() < len(alive) / 12:
            events.append((float(second), alive.pop(int(rng.integers(len(alive)))), "left"))
        else:
            alive.append(f"m{number}")
            number += 1
            events.append((float(second), alive[-1], "joined"))
    recorded = places(events)
    for seed in range(50):
        made = recorded.changes(NAMES, 3000.0, np.random.default_rng(seed))
        check(Conditions(nodes=tuple(made)), NAMES)
        assert all(c.event == "leaves" for c in {c.nodes: c for c in reversed(made)}.values())
        assert made[-1].seconds >= 3000.0 * 0.9


def test_nodes_come_and_go_as_recorded(tmp_path):
    columns = ("seconds", "node", "event")
    rows = {"run": ["r"] * len(EVENTS)} | {c: [e[i] for e in EVENTS] for i, c in enumerate(columns)}
    trace = written(tmp_path / "t", node_events=rows)
    conditions = replaying(nodes=ReplayedTrace(trace, nodes=("a", "b", "c"), **ORDER))
    simulated = system(cluster(), job(), start(servers=("d", "e")), conditions, knobs=KNOBS, costs=CHEAP)
    seen = simulated.perform(Run(seconds=100.0))
    assert [(e.seconds, e.node, e.event) for e in seen.events] == [
        (10.0, "a", "leaving"),
        (10.0, "a", "left"),
        (20.0, "b", "leaving"),
        (25.0, "b", "left"),
        (30.0, "a", "joined"),
        (40.0, "b", "joined"),
        (50.0, "c", "failed"),
    ]
    assert seen.status == "running"
    assert "c" not in seen.setting.workers
    with pytest.raises(Rejected, match="Cannot use node 'c'"):
        simulated.perform(Reconfigure(start(servers=("d", "e"))))


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("role", "source", "reason"),
    [
        ("compute", "alibaba-pai-minibatch", "no iterations with compute times; it has cov/job_00, .*minibatch/job_7"),
        ("stragglers", "bamboo-spot", "no probes"),
        ("bandwidth", "bamboo-spot", "no runs that were throttled, whose extras have .*; it has p9"),
        ("nodes", "azure-vm-noise", "no events of nodes"),
    ],
)
def test_a_trace_without_data_for_its_role_is_refused(role, source, reason, traces):
    with pytest.raises(ValueError, match=rf"replay.{role}: Cannot replay runs '\*' of .*{source}: {reason}"):
        check_replay(replaying(**{role: traces[source]}))


def test_runs_and_folders_that_are_not_there(traces, tmp_path):
    with pytest.raises(ValueError, match=r"Cannot replay runs 'ZZ'.*it has XY"):
        check_replay(replaying(compute=ReplayedTrace(traces["bytedance-straggler"], "ZZ")))
    with pytest.raises(ValueError, match=r"replay.nodes: Cannot read a trace from"):
        check_replay(replaying(nodes=str(tmp_path)))
    with pytest.raises(ValueError, match="'z'"):
        check(replaying(compute=ReplayedTrace("t", nodes=("z",))), NAMES)


@pytest.mark.slow
def test_our_own_recordings_drive_runs(tmp_path):
    """A recorded run, replayed in order, has the recorded times up to one common factor: that of its median."""
    from harness.record import play_recorded
    from tuners import resolve

    def twin(conditions, budget):
        return timed(conditions, seed=5, knobs=(), budget_seconds=budget)

    noisy = Conditions(jitter=0.4, stagger=False)
    play_recorded(resolve("fixed").factory, twin(noisy, 60.0), tmp_path / "t", scenario="s", tuner="fixed", seed=5)
    first = twin(noisy, 60.0).perform(Run(clocks=40)).pushes
    conditions = replaying(noisy, compute=ReplayedTrace(str(tmp_path / "t"), against="worker", **ORDER))
    again = twin(conditions, 60.0).perform(Run(clocks=40)).pushes
    for worker in range(3):
        one, other = (p.compute_seconds[p.worker == worker][:8] for p in (first, again))
        assert np.ptp(other / one) < 1e-9


# ------------------------------------------------------------------------------------------------------- in a scenario


def scenario(replay, folder):
    text = load("digits").text.replace("[seeds]", f"[conditions.replay]\n{replay}\n\n[seeds]")
    return parse(text, name="driven", origin=folder / "driven.toml")


def test_a_scenario_names_traces_relative_to_its_file(traces):
    folder = Path(traces["bamboo-spot"]).parent
    made = scenario('nodes = "bamboo-spot"\ncompute = { trace = "bytedance-straggler", runs = "XY" }', folder)
    recordings = made.conditions.replay.traces()
    assert {role: r.trace for role, r in recordings.items()} == {
        "compute": traces["bytedance-straggler"],
        "nodes": traces["bamboo-spot"],
    }
    assert (recordings["nodes"].runs, recordings["compute"].runs) == ("*", "XY")


@pytest.mark.parametrize(
    ("replay", "reason"),
    [
        ('nodes = "nowhere"', r"driven.toml: \[conditions\] replay.nodes: Cannot read a trace from .*nowhere"),
        ('node = "bamboo-spot"', r"\[conditions.replay\] node: there is no such key; did you mean nodes"),
        (
            'nodes = { trace = "bamboo-spot", run = "p3" }',
            r"\[conditions.replay.nodes\] run: there is no such key; did you mean",
        ),
        ('nodes = { runs = "p3" }', r"\[conditions.replay.nodes\] trace: it is missing"),
        (
            'nodes = { trace = "bamboo-spot", deal = "fair" }',
            r"\[conditions.replay.nodes\] deal: .*choose one of lot, order",
        ),
        ('compute = { trace = "bytedance-straggler", nodes = ["x"] }', r"node 'x': this cluster has n0"),
    ],
)
def test_the_error_for_a_wrong_scenario_names_the_key(replay, reason, traces):
    with pytest.raises(ValueError, match=reason):
        scenario(replay, Path(traces["bamboo-spot"]).parent)


# ------------------------------------------------------------------------------------------- one trace for every role


def recorded_run(folder, setting, conditions, clocks, seed=0):
    """A simulated run that is recorded, and its pushes; nothing is learned, and a mini-batch takes seconds."""
    demand = Demand(model_bytes=0.0, sample_seconds=1.0)
    made = system(cluster(), job(demand), setting, conditions, seed, target=Target("clocks", clocks))
    played = play_recorded(lambda job: runs_for(clocks), made, folder, scenario="s", tuner="t", seed=seed)
    return together([e.answer for e in played.exchanges if e.asked])


def runs_for(clocks):
    yield from Run(clocks=clocks)


def test_a_recorded_run_replays_as_the_same_run_and_predicts_another_policy(tmp_path):
    """Noise belongs to worker and mini-batch, so the recording of an asynchronous run has that of a synchronous one."""
    noisy = Conditions(jitter=0.4, stagger=False)
    workers = start(workers=("a", "b", "c"), policy="asp")
    truth = recorded_run(tmp_path / "live-run/trace", workers, noisy, 90)
    calm = Conditions(jitter=0.0, stagger=False, replay=Replay(all=str(tmp_path / "live-run/trace")))
    job_of = job(Demand(model_bytes=0.0, sample_seconds=1.0))
    replayed = system(cluster(), job_of, workers, calm).perform(Run(clocks=90)).pushes
    same_up_to_a_scale(replayed, truth)
    held_out = start(workers=("a", "b", "c"), policy="bsp")
    predicted = system(cluster(), job_of, held_out, calm).perform(Run(clocks=60)).pushes
    true = system(cluster(), job_of, held_out, noisy).perform(Run(clocks=60)).pushes
    same_up_to_a_scale(predicted, true)
    # The scale of each worker is the median of 30 draws, which has a standard error of 9 %; the slowest of three counts.
    assert predicted.seconds[-1] == pytest.approx(true.seconds[-1], rel=0.2)


def same_up_to_a_scale(replayed, truth):
    """Each worker's mini-batches take the same times, up to one factor: recorded times are relative to its median."""
    for worker in np.unique(truth.worker):
        mine, theirs = (p.compute_seconds[p.worker == worker][:18] for p in (replayed, truth))
        ratio = mine / theirs
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
        assert ratio[0] == pytest.approx(1.0, abs=0.3)


def test_one_trace_drives_every_role_that_it_has_data_for(tmp_path, traces):
    events = {"run": ["r"] * 4, "seconds": [0.0, 5.0, 9.0, 20.0], "node": ["a", "b", "b", "b"]}
    events["event"] = ["joined", "leaving", "left", "joined"]
    times = {"run": ["r"] * 4, "worker": [2, 2, 4, 4], "clock": [0, 1, 0, 1], "compute_seconds": [1.0, 2.0, 1.0, 1.0]}
    iterations = pl.DataFrame(times, schema_overrides={"worker": pl.Int32, "clock": pl.Int32})
    iterations = iterations.with_columns(branch=pl.lit(0, pl.Int32))
    trace = written(tmp_path / "t", node_events=events, iterations=iterations)
    conditions, factors = drawn(replaying(all=trace))
    assert conditions.nodes == (NodeChange(("b",), 5.0, "leaves", 4.0), NodeChange(("b",), 20.0, "joins"))
    assert not conditions.buckets
    assert not conditions.episodes
    # Workers 2 and 4 are our third and fifth node; the others get them again, from another place of the recording.
    assert factors.counts.tolist() == [2] * 5
    assert factors.values[2].tolist() == pytest.approx([2 / 3, 4 / 3])
    assert factors.values[4].tolist() == [1.0, 1.0]
    # Another role may be given as well; a trace without any data for a role is refused.
    made, _ = drawn(replaying(all=trace, bandwidth=ReplayedTrace(traces["uta-ec2-tokenbucket"], nodes=("a",))))
    assert [b.nodes for b in made.buckets] == [("a",)]
    empty = written(tmp_path / "e", runs={"run": ["r"]})
    with pytest.raises(ValueError, match=r"replay\.all: Cannot replay .*e: it has no data for any of compute, stragglers"):
        check_replay(replaying(all=empty))


def test_in_order_workers_keep_their_machines_where_some_of_them_leave(tmp_path):
    """Of a log that numbers workers from 1, and in which b leaves, c drove d, which was none of its workers."""
    settings = {
        "run": ["r"] * 2,
        "seconds": [0.0, 9.0],
        "setting": [setting_text(start(workers=w, servers=("e",))) for w in (("a", "b", "c"), ("a", "c"))],
    }
    times = {"worker": np.repeat((1, 2, 3), 2), "clock": [0, 1] * 3, "compute_seconds": [1.0, 1.0, 2.0, 2.0, 6.0, 6.0]}
    iterations = pl.DataFrame(times, schema_overrides={"worker": pl.Int32, "clock": pl.Int32})
    iterations = iterations.with_columns(run=pl.lit("r"), branch=pl.lit(0, pl.Int32))
    settings = pl.DataFrame(settings).with_columns(branch=pl.lit(0, pl.Int32))
    trace = written(tmp_path / "t", iterations=iterations, settings=settings)
    _, factors = drawn(replaying(compute=ReplayedTrace(trace, **ORDER)))
    usual = dict(zip(NAMES, np.asarray(factors.values)[:, 0], strict=True))
    assert [usual[name] for name in "abc"] == pytest.approx([0.5, 1.0, 3.0])


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 2, 3), (1, 2, 4)])
def test_in_order_workers_without_names_drive_the_first_nodes(tmp_path, numbers):
    """Of a log that numbers three workers from 1, the slow one drove our server, and the first one two workers."""
    times = {"worker": np.repeat(numbers, 2), "clock": [0, 1] * 3, "compute_seconds": [1.0, 1.0, 2.0, 2.0, 6.0, 6.0]}
    iterations = pl.DataFrame(times, schema_overrides={"worker": pl.Int32, "clock": pl.Int32})
    iterations = iterations.with_columns(run=pl.lit("r"), branch=pl.lit(0, pl.Int32))
    settings = {"run": ["r"], "seconds": [0.0], "workers": [3], "servers": [1]}
    settings = pl.DataFrame(settings).with_columns(branch=pl.lit(0, pl.Int32))
    trace = written(tmp_path / "t", iterations=iterations, settings=settings)
    _, factors = drawn(replaying(compute=ReplayedTrace(trace, **ORDER)))
    assert np.asarray(factors.values)[:3, 0].tolist() == pytest.approx([0.5, 1.0, 3.0])


def test_compute_times_of_another_batch_size_have_another_usual_time(tmp_path):
    rows = [("r", w, c, 10.0 * c + w, seconds) for w in (0, 1) for c, seconds in enumerate((1.0, 1.0, 4.0, 8.0))]
    names = ["run", "worker", "clock", "seconds", "compute_seconds"]
    iterations = pl.DataFrame(rows, schema=names, orient="row").with_columns(branch=pl.lit(0, pl.Int32))
    settings = pl.DataFrame({"run": ["r"] * 2, "seconds": [0.0, 15.0], "batch_size": [16, 64]}).with_columns(
        branch=pl.lit(0, pl.Int32)
    )
    trace = written(tmp_path / "t", iterations=iterations.cast({"worker": pl.Int32, "clock": pl.Int32}), settings=settings)
    _, factors = drawn(replaying(compute=ReplayedTrace(trace, deal="order", nodes=("a", "b"))))
    assert factors.values[0].tolist() == pytest.approx([1.0, 1.0, 4.0 / 6.0, 8.0 / 6.0])


@pytest.mark.parametrize("column", ["options", "setting"])
def test_mini_batches_of_unlike_sizes_are_compared_with_those_of_their_size(tmp_path, column):
    """Equal machines: a worker with three times the samples takes three times as long. Its last one takes twice as long."""
    rows = [("r", w, c, c + 0.1 * w, (0.75, 0.25)[w] * (1 + (c == 4))) for w in (0, 1) for c in range(5)]
    names = ["run", "worker", "clock", "seconds", "compute_seconds"]
    iterations = pl.DataFrame(rows, names, orient="row").with_columns(branch=pl.lit(0, pl.Int32))
    whole = start(workers=("a", "b"), servers=("c",), loads=((48,), (16,)))
    told = {"options": json.dumps({"batch_sizes": [48, 16]}), "setting": setting_text(whole)}[column]
    settings = pl.DataFrame({"run": ["r"], "seconds": [0.0], "batch_size": [32], column: [told]})
    settings = settings.with_columns(branch=pl.lit(0, pl.Int32))
    trace = written(tmp_path / "t", iterations=iterations.cast({"worker": pl.Int32, "clock": pl.Int32}), settings=settings)
    _, factors = drawn(replaying(compute=ReplayedTrace(trace, deal="order", nodes=("a", "b"))))
    for node in (0, 1):
        assert factors.values[node].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 2.0])


# ----------------------------------------------------------------------------------------- repairs, and a faster clock


def test_runs_in_which_no_machine_was_lost_are_drawn_too(tmp_path):
    """One of ten alike runs lost a machine; a run of probes alone is not like them."""
    runs = [f"job {i}" for i in range(10)]
    events = {"run": ["job 7"] * 2, "seconds": [3.0, 9.0], "node": ["m"] * 2, "event": ["failed", "joined"]}
    settings = pl.DataFrame({"run": runs, "seconds": [0.0] * 10}).with_columns(branch=pl.lit(0, pl.Int32))
    probes = {"run": ["watch"], "node": ["m"], "seconds": [0.0]}
    trace = written(tmp_path / "t", runs={"run": [*runs, "watch"]}, settings=settings, node_events=events, probes=probes)
    lost = [bool(drawn(replaying(nodes=trace), seed)[0].nodes) for seed in range(300)]
    assert sum(lost) == pytest.approx(30, abs=4 * np.sqrt(300 * 0.1 * 0.9))
    assert not drawn(replaying(all=trace))[0].nodes  # in order, the first run
    assert drawn(replaying(nodes=ReplayedTrace(trace, "job 7")))[0].nodes
    series = condition_series(replaying(nodes=trace), cluster().nodes, 10.0, range(2))["nodes"]
    assert len(series.recorded) == len(runs) * (len(series.recorded) // len(runs))
    assert 0 < np.mean([row.sum() > 0 for row in series.recorded]) <= 0.1


def test_a_notice_that_was_taken_back_is_none():
    rows = [(5.0, "a", "leaving"), (8.0, "a", "joined"), (100.0, "a", "left")]
    assert named_changes(rows) == [NodeChange(("a",), 100.0, "leaves")]
    assert places(rows).changes(("a",), 200.0, None) == [NodeChange(("a",), 100.0, "leaves")]


def test_a_number_of_machines_that_is_none_is_refused(tmp_path):
    events = {"run": ["r"], "seconds": [3.0], "node": ["m"], "event": ["failed"]}
    trace = written(tmp_path / "t", runs={"run": ["r"], "extras": ['{"nodes_watched": "200"}']}, node_events=events)
    with pytest.raises(ValueError, match=r"replay.nodes: Cannot read the extras of run 'r': Expected `int`, got `str`"):
        check_replay(replaying(nodes=trace))


def test_a_machine_that_comes_back_takes_its_own_place():
    events = [(1.0, "x", "failed"), (2.0, "y", "failed"), (3.0, "y", "joined"), (4.0, "x", "joined")]
    found = places(events, machines=5)
    assert found.taken_at_start == frozenset(range(5))
    changes = found.changes(tuple("abcde"), 100.0, None)
    assert [(c.nodes, c.seconds, c.event) for c in changes] == [
        (("a",), 1.0, "fails"),
        (("b",), 2.0, "fails"),
        (("b",), 3.0, "joins"),
        (("a",), 4.0, "joins"),
    ]


def test_recorded_events_come_so_many_times_as_fast(traces, tmp_path):
    usual, _ = drawn(replaying(nodes=ReplayedTrace(traces["bamboo-spot"], **ORDER)))
    fast, _ = drawn(replaying(nodes=ReplayedTrace(traces["bamboo-spot"], faster=60.0, **ORDER)))
    assert [(c.nodes, c.event) for c in fast.nodes] == [(c.nodes, c.event) for c in usual.nodes]
    assert [60 * c.seconds for c in fast.nodes] == pytest.approx([c.seconds for c in usual.nodes])
    usual, _ = drawn(replaying(bandwidth=traces["uta-ec2-tokenbucket"]))
    fast, _ = drawn(replaying(bandwidth=ReplayedTrace(traces["uta-ec2-tokenbucket"], faster=10.0)))
    assert [10 * b.capacity_bytes for b in fast.buckets] == pytest.approx([b.capacity_bytes for b in usual.buckets])
    slow = ReplayedTrace(traces["alibaba-pai-minibatch"], runs="minibatch/*", deal="order")
    usual, _ = drawn(replaying(stragglers=slow), budget=1e9)
    fast, _ = drawn(replaying(stragglers=msgspec.structs.replace(slow, faster=2.0)), budget=1e9)
    assert [2 * e.every_seconds for e in fast.episodes] == pytest.approx([e.every_seconds for e in usual.episodes])
    with pytest.raises(ValueError, match=r"replay\.nodes: faster = 0\.0: it must be positive"):
        check(replaying(nodes=ReplayedTrace("t", faster=0.0)), ("a",))


# ----------------------------------------------------------------------------------------------------- the same world


def test_a_run_has_the_distribution_of_the_recording():
    """Kolmogorov-Smirnov distance of the factors of ByteDance's job SE, relative to the pipeline stage, dealt to as many
    nodes: they are the recorded ones. A lognormal distribution of the same variance is farther off."""
    trace = str(locate("shipped:bytedance-straggler"))
    recorded = scan(locate("shipped:bytedance-straggler"), "iterations").filter(run="SE").collect()
    options = scan(locate("shipped:bytedance-straggler"), "settings").filter(run="SE").collect()["options"][0]
    stages = {int(worker): stage for worker, stage in json.loads(options)["stage_of_worker"].items()}
    of_stage = recorded.with_columns(stage=pl.col("worker").replace_strict(stages))
    took = pl.col("compute_seconds")
    relative = of_stage.select(took / took.median().over("stage")).to_series().to_numpy()
    names = tuple(f"n{i}" for i in range(64))
    conditions = Conditions(replay=Replay(compute=ReplayedTrace(trace, runs="SE")))
    kind = cluster().nodes[0][1]
    _, factors = expand_replay(conditions, tuple((name, kind) for name in names), 1e4, 0)
    used = np.concatenate([row[:count] for row, count in zip(np.asarray(factors.values), factors.counts, strict=True)])
    assert len(used) == len(relative) == 64 * 43
    assert ks_2samp(used, relative).statistic == 0.0  # the same times, dealt to other nodes
    logs = np.log(relative)
    fitted = np.exp(np.random.default_rng(0).normal(0.0, logs.std(), 100_000))
    assert ks_2samp(fitted, relative).statistic > 0.05
