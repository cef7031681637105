"""Scenarios are played as their file says, and mistakes are refused with file, table and key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness import scenario
from harness.scenario.tables import TABLES, RecordedTables, Tables
from tests.support import arena
from tests.support.made_up import calibrated_toml
from tuners.actions import Setting, Target
from tuners.settings import Choice, Integer, Real

HERE = Path("my.toml")


def parsed(text: str = arena.TINY) -> scenario.Scenario:
    return scenario.parse(text, name="my", origin=HERE)


def changed(old: str, new: str) -> str:
    assert old in arena.TINY
    return arena.TINY.replace(old, new, 1)


# ----------------------------------------------------------------------------------------- reading and playing


def test_a_file_is_read() -> None:
    made = parsed()
    assert made.summary == "Five machines and a quadratic."
    assert [n for n, _ in made.cluster.nodes] == ["n0", "n1", "n2", "n3", "n4"]
    assert {t.name for _, t in made.cluster.nodes} == {"edge-4core"}
    assert made.knobs == (Real("learning_rate", 0.01, 1.0, log=True), Choice("batch_size", (2, 4)))
    assert made.target == Target("loss", 0.1)
    assert (made.budget.seconds, made.seeds.count, made.check_clocks) == (20.0, 2, 50)


def test_the_job_is_what_tuners_see() -> None:
    seen = scenario.job(parsed(), seed=3)
    assert seen.start.workers == ("n0", "n1", "n2")
    assert seen.start.servers == ("n3", "n4")
    assert (seen.start.batch_size, seen.start.learning_rate, seen.seed) == (4, 0.05, 3)
    assert seen.model_bytes == 2e4
    assert seen.space.names == ("learning_rate", "batch_size")
    assert seen.nodes[0].devices == ("cpu",)


def test_missing_keys_of_the_start_come_from_the_workload() -> None:
    from simulators.workloads.catalogue import workload

    made = parsed(changed("batch_size = 4\nlearning_rate = 0.05\n", "").replace("batch_size = { choice = [2, 4] }", ""))
    own = workload("cruise-nmf")
    start = scenario.job(parsed(made.text.replace("real = [0.01", "real = [0.001"))).start
    assert (start.batch_size, start.learning_rate) == (own.batch_size, own.learning_rate)
    assert (start.policy, start.transfer_bits) == ("asp", 32)


def test_groups_of_one_prefix_are_counted_on_and_nodes_can_be_named() -> None:
    groups = (
        '[{ type = "edge-4core" }, { type = "edge-2core", count = 2, prefix = "m" }, { type = "edge-4core", count = 2 }]'
    )
    text = changed('[{ type = "edge-4core", count = 5 }]', groups)
    text = text.replace("worker_count = 3", 'workers = ["n0", "m0"]\nservers = ["n2"]\noptions = { xla = true }')
    made = parsed(text)
    assert [n for n, _ in made.cluster.nodes] == ["n0", "m0", "m1", "n1", "n2"]
    start = scenario.job(made).start
    assert (start.workers, start.servers, start.options) == (("n0", "m0"), ("n2",), (("xla", True),))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = changed("[cluster]\n", '[cluster]\nprofiles = "mine.toml"\n')
    (tmp_path / "my.toml").write_text(text, "utf-8-sig")
    (tmp_path / "mine.toml").write_text(
        "[pi]\ncores = 4\nmemory_bytes = 1e9\nnic_bytes_per_second = 1e7\n"
        'devices = [{ kind = "cpu", speed = 0.2 }]\nsource = "my desk"\n',
        "utf-8-sig",
    )
    assert scenario.load(tmp_path / "my.toml").text == text


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("batch_size = { real = [2, 4] }", "batch_size: cannot be 2.0; give a whole number."),
        ('learning_rate = { choice = ["low"] }', "learning_rate: cannot be 'low'; give a number."),
        ("learning_rate = { real = [0, inf] }", "learning_rate: cannot be inf; give finite numbers."),
        ("policy = { choice = [1] }", 'policy: cannot be 1; give a name, as in policy="asp".'),
        ('"load/n0/0" = { integer = [-1, 3] }', "load/n0/0: cannot be -1; give numbers, 0 or more."),
        ('"data_share/*" = { choice = ["much"] }', "data_share/n0: cannot be 'much'; give numbers, 0 or more."),
        ("batch_size = { integer = [1, 99999999999] }", "batch_size: integer: expected `int` <= 2147483647"),
    ],
)
def test_a_knob_has_values_that_its_field_can_have(knob: str, message: str) -> None:
    both = "learning_rate = { real = [0.01, 1.0], log = true }\nbatch_size = { choice = [2, 4] }\n"
    with pytest.raises(ValueError, match=re.escape(f"my.toml: [free] {message}")):
        parsed(changed(both, f"{knob}\n"))


def test_knobs_are_of_three_kinds() -> None:
    text = changed(
        "batch_size = { choice = [2, 4] }", 'batch_size = { integer = [2, 8] }\npolicy = { choice = ["asp", "bsp"] }'
    )
    assert parsed(text).knobs[1:] == (Integer("batch_size", 2, 8), Choice("policy", ("asp", "bsp")))


def test_blocks_of_embedding_tables_are_knobs_of_workloads_that_have_tables() -> None:
    made = scenario.load("hot-keys")
    assert [k.name for k in made.knobs if k.name.startswith("block/")] == [f"block/{i}" for i in range(128)]
    for knob in ('placement = { choice = ["range", "hash"] }', "cache_rows = { integer = [0, 8] }"):
        with pytest.raises(ValueError, match=r"my\.toml: \[free\] Knob .* sets nothing: this job has no blocks"):
            scenario.job(parsed(changed("[free]\n", f"[free]\n{knob}\n")))


def test_own_profiles_are_found_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[pi]\ncores = 4\nmemory_bytes = 1e9\nnic_bytes_per_second = 1e7\n"
        'devices = [{ kind = "cpu", speed = 0.2 }]\nsource = "my desk"\n'
    )
    text = changed("[cluster]\n", '[cluster]\nprofiles = "mine.toml"\n').replace("edge-4core", "pi")
    made = scenario.parse(text, name="my", origin=tmp_path / "my.toml")
    assert made.cluster.nodes[0][1].name == "pi"
    with pytest.raises(ValueError, match=r"my\.toml: \[cluster\] Cannot read node types from .*mine\.toml"):
        parsed(text)
    with pytest.raises(
        ValueError, match=r"no node type 'x'; choose one of the \d+ that `harness list profiles` or mine.toml shows\."
    ):
        scenario.parse(text.replace('"pi"', '"x"'), name="mine", origin=tmp_path / "scenario.toml")


def test_a_workload_that_is_neither_shipped_nor_in_the_users_file_is_told_of_both(tmp_path: Path) -> None:
    (tmp_path / "made.toml").write_text(calibrated_toml())
    text = changed('name = "cruise-nmf"', 'file = "made.toml"\nname = "resnet"')
    with pytest.raises(
        ValueError, match=r"'resnet'; choose one of the \d+ that `harness list workloads` or made\.toml shows"
    ):
        scenario.parse(text, name="mine", origin=tmp_path / "scenario.toml")


def test_a_draw_changes_the_machines_the_job_and_the_latency_that_were_calibrated(tmp_path: Path) -> None:
    draws = {"nic_bytes_per_second": (2e6, 3e6), "sample_seconds": (0.01, 0.03), "latency_seconds": (1e-3, 4e-3)}
    (tmp_path / "made.toml").write_text(calibrated_toml(**draws))
    text = """summary = "As calibrated"
cluster = { profiles = "made.toml", nodes = [{ type = "toy", count = 3 }], latency_seconds = 0.01 }
workload = { name = "toy", file = "made.toml" }
start = { worker_count = 2 }
target = { metric = "clocks", value = 10 }
budget = { seconds = 100 }
"""
    fitted, drawn = (
        scenario.parse(text + more, name="my", origin=tmp_path / "my.toml") for more in ("", "calibration = { draw = 2 }\n")
    )
    assert [made.cluster.nodes[0][1].nic_bytes_per_second for made in (fitted, drawn)] == [1e6, 3e6]
    assert [made.cluster.latency_seconds for made in (fitted, drawn)] == pytest.approx([0.01, 0.02])
    assert [scenario.workload_of(made).demand.sample_seconds for made in (fitted, drawn)] == [0.02, 0.03]
    assert [scenario.workload_of(made).demand.model_bytes for made in (fitted, drawn)] == [1e4, 1e4]
    assert [made.draw for made in (fitted, drawn)] == [0, 2]


def test_a_wrong_key_in_a_file_of_workloads_is_told_with_its_workload_and_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[mine]\nsummary = "My job"\nsample_second = 3\n')
    text = """summary = "My job"
cluster = { nodes = [{ type = "edge-4core", count = 3 }] }
workload = { name = "mine", file = "mine.toml" }
start = { worker_count = 2 }
target = { metric = "clocks", value = 10 }
budget = { seconds = 100 }
"""
    told = r"workload 'mine' from .*mine\.toml: there is no key 'sample_second'; did you mean demand\.sample_seconds"
    with pytest.raises(ValueError, match=told):
        scenario.parse(text, name="my", origin=tmp_path / "my.toml")


def test_a_simulated_system_begins_as_the_scenario_says() -> None:
    text = changed('metric = "loss"\nvalue = 0.1', 'metric = "clocks"\nvalue = 100')
    made = parsed(text)
    playing = scenario.system(made, seed=1)
    assert playing.job == scenario.job(made, seed=1)
    other = Setting(workers=("n0",), servers=("n1",), batch_size=2, learning_rate=0.5)
    assert scenario.system(made, seed=1, start=other).job.start == other


@pytest.mark.parametrize("name", scenario.embedded())
def test_embedded_scenarios_can_be_played_and_shown(name: str) -> None:
    made = scenario.load(name)
    seen = scenario.job(made)
    seen.space.check(seen.start)
    assert seen.space.knobs
    assert made.seeds.count >= 3
    shown = scenario.show(made)
    assert (" by share within " in shown) == made.target.by_share
    assert scenario.parse(shown, name=name, origin=HERE).cluster == made.cluster
    assert shown.startswith(f"# {name}: ")
    assert max(map(len, shown.splitlines())) <= 125


def test_the_head_of_a_scenario_says_what_it_may_cost_and_that_the_cheapest_run_wins() -> None:
    text = changed("[budget]", "[budget]\nusd = 3").replace("count = 5", "count = 5, usd_per_hour = 0.2")
    assert "# target: loss 0.1 within 20 s and 3 USD\n" in scenario.show(parsed(text))
    cheapest = text.replace("[target]", '[target]\nminimise = "usd"')
    assert "# target: loss 0.1 within 20 s and 3 USD, and the cheapest run wins\n" in scenario.show(parsed(cheapest))


def test_the_head_of_a_scenario_with_data_of_the_user_says_its_start_and_reads_no_data(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(shape, classes): ...\n")
    (tmp_path / "jobs.toml").write_text(
        '[mine]\nsummary = "Mine"\ndata = { kind = "npz" }\ndemand = { model_bytes = 1e3, sample_seconds = 0.01 }\n'
        'model = { kind = "python", file = "mine.py", function = "make" }\n'
    )
    text = changed('name = "cruise-nmf"', 'file = "jobs.toml"\ndata = "none.npz"\nname = "mine"')
    text = "".join(line for line in text.splitlines(True) if not line.startswith(("overrides", "batch_size")))
    shown = scenario.show(scenario.parse(text, name="my", origin=tmp_path / "my.toml"))
    assert "# its model is yours, of mine.py; its demand is as it is\n# starts with " in shown


def test_prices_are_of_the_type_the_group_or_the_spot_market(tmp_path: Path) -> None:
    own = '[dear]\ncores = 2\nmemory_bytes = 1e9\nnic_bytes_per_second = 1e6\nsource = "made up"\n'
    own += 'devices = [{ kind = "cpu", speed = 1.0 }]\nusd_per_hour = 3.0\nspot_usd_per_hour = 1.0\n'
    (tmp_path / "own.toml").write_text(own)
    groups = '{ type = "dear", count = 2 }, { type = "dear", spot = true }, { type = "edge-4core", usd_per_hour = 0.5 }'
    tables: dict[str, Any] = {"nodes": tomllib.loads(f"x = [{groups}]")["x"], "profiles": str(tmp_path / "own.toml")}
    target = {"metric": "clocks", "value": 10}
    plain: dict[str, Any] = {
        "workload": {"name": "digits-logistic"},
        "start": {"worker_count": 2},
        "budget": {"seconds": 9, "usd": 4},
    }
    made = scenario(cluster=tables, target=target | {"minimise": "usd"}, **plain)
    seen = scenario.job(made)
    assert dict(seen.prices.by_node) == {"n0": 3.0, "n1": 3.0, "n2": 1.0, "n3": 0.5}
    assert (seen.target.minimise, seen.budget_usd) == ("usd", 4.0)
    for nodes, reason in (
        (
            [{"type": "edge-4core", "count": 3, "spot": True}],
            r"\[cluster\] nodes: no price is known of edge-4core as a spot",
        ),
        (
            [{"type": "edge-4core", "count": 3}],
            r"\[budget\] usd: money cannot be counted.*known of edge-4core\. Give usd_per_hour",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            scenario(cluster={"nodes": nodes}, target=target, **plain)


def test_where_the_cheapest_run_wins_a_missing_price_is_a_matter_of_the_target() -> None:
    target = {"metric": "clocks", "value": 9, "minimise": "usd"}
    with pytest.raises(ValueError, match=r"\[target\] minimise: money cannot be counted"):
        scenario(
            cluster={"nodes": [{"type": "edge-4core", "count": 3}]},
            workload={"name": "digits-logistic"},
            start={"worker_count": 2},
            target=target,
            budget={"seconds": 9},
        )


def test_the_example_of_money_has_a_price_for_every_machine(tmp_path: Path) -> None:
    page = (Path(scenario.__file__).parent / "README.md").read_text()
    shown = page.partition("## Money")[2].split("```")[1].removeprefix("text\n")
    shown = shown.replace("[target]\n", '[target]\nmetric = "clocks"\nvalue = 100\n')
    around = 'summary = "s"\n[workload]\nname = "digits-logistic"\n[start]\nworker_count = 4\n'
    (tmp_path / "money.toml").write_text(around + shown)
    of = scenario.job(scenario.load(tmp_path / "money.toml"))
    assert set(of.prices.by_node.values()) == {0.215, 0.12}


def test_the_default_frees_every_kind_of_knob() -> None:
    assert scenario.embedded()[0] == "digits"
    made = scenario.load("digits")
    seen = scenario.job(made)
    assert len(seen.start.workers) == 10
    assert made.conditions.stragglers is not None
    assert len(made.conditions.stragglers.nodes) == 3
    assert set(made.conditions.stragglers.nodes) <= set(seen.start.workers)
    free = {
        "worker_count",
        "policy",
        "staleness",
        "batch_size",
        "learning_rate",
        "momentum",
        "transfer_bits",
        "intra_threads",
    }
    assert set(seen.space.names) == free


# ----------------------------------------------------------------------------------------------------- mistakes

BATCH = "batch_size = { choice = [2, 4] }"
TARGET = 'metric = "loss"\nvalue = 0.1'
RATE = "real = [0.01, 1.0]"
NODES = '[{ type = "edge-4core", count = 5 }]'
DEMAND = "model_bytes = 2e4"
NO_TIME = "model_bytes = 0, push_bytes = 0, sample_seconds = 0, fixed_seconds = 0, message_seconds = 0, apply_seconds = 0"
ALONE = f'{NO_TIME.replace("model_bytes = 0", DEMAND)} }} }}\n[start]\nworkers = ["n0"]\nservers = ["n0"]'
LOSSES = "[[conditions.losses]]\nevery_seconds = 1e-7\n[budget]"
SLEEPS = "[conditions.sleeps]\nprobability = 2.0\nmean_seconds = 1\n[budget]"
STRAGGLERS = "[conditions.stragglers]\nmean_seconds = 1\nnodes = ['n7']\n[budget]"

BUCKETS = "[[conditions.buckets]]\nnodes = []\ncapacity_bytes = 1\nrefill_bytes_per_second = 1\n[budget]"

WRONG: list[tuple[str, str, str]] = [
    ("[cluster]", 'profiles = "mine.toml"\n[cluster]', r"profiles: there is no such key; it belongs in \[cluster\]\."),
    ("[cluster]", "[clutser]", r"my\.toml: clutser: there is no such key; did you mean cluster"),
    (
        "[cluster]",
        "[cluster]\nlatency_ms = 2",
        r"\[cluster\] latency_ms: there is no such key; did you mean latency_s",
    ),
    (
        "[cluster]",
        '[cluster]\nlatency_seconds = "2 ms"',
        r"\[cluster\] latency_seconds: expected `float`, got `str`; num",
    ),
    ("[cluster]", "[cluster]\nlatency_seconds = -1", r"\[cluster\] latency_seconds: expected `float` >= 0"),
    ("[free]", '[free]\npolicy = { choice = ["asp", "sssp"] }', r"\[free\] policy: .*'sssp'"),
    ("count = 5", 'count = 5, prefix = "rack/"', r"\[cluster\] nodes: no machine can be named 'rack/0'"),
    (NODES, '[{ type = "edge-4core" }]', r"\[start\] servers: there are none of 1 nodes; set workers and servers, the only"),
    (
        "overrides = {",
        "overrides = { sampels = 9,",
        r"\[workload\] Cannot override 'sampels'.*did you mean samples",
    ),
    ("[cluster]", "[cluster]\nlatency_seconds = inf", r"\[cluster\] .*latency_seconds = inf"),
    ("[cluster]", "[cluster]\ncontrol_queue = 2", r"\[cluster\] .*control_queue = 2.* from 0 to 1"),
    ("[cluster]", "[cluster]\nsnapshot_clocks = -1", r"\[cluster\] .*snapshot_clocks = -1.* 0 takes none"),
    ("[cluster]", "[cluster]\nindependent_flows = 1", r"\[cluster\] independent_flows: .*`bool`"),
    ("[cluster]", '[cluster]\ndiscipline = "fair"', r"\[cluster\] discipline: invalid enum value 'fair'; .*fifo.*maxmin"),
    ("count = 5", "count = 0", r"\[cluster\.nodes\] count: expected `int` >= 1, not 0\."),
    (
        "[budget]",
        "[conditions]\nlatency_seconds = 0.1\n[budget]",
        r"\[conditions\] latency_seconds: .*; it belongs in \[cluster\]\.",
    ),
    # [budget] has `seconds`, but three keys of the table itself are of seconds.
    (
        "[budget]",
        "[[conditions.losses]]\nseconds = 400\n[budget]",
        r"\[conditions\.losses\] seconds: .*; did you mean every_seconds or repair_seconds or notice_seconds\?",
    ),
    # Two other tables have a key `nodes`: the one that is nearly the same comes first.
    (
        "[budget]",
        "[[conditions.episodes]]\nnodes = ['n0']\nstart_seconds = 1\nseconds = 1\nfactor = 2\n[budget]",
        r"\[conditions\.episodes\] nodes: there is no such key; did you mean node\?",
    ),
    (
        "[budget]",
        '[rules]\ninstall_policies = "yes"\n[budget]',
        r"install_policies: expected `bool`, got `str`; write true or false",
    ),
    ("count = 5", "cuont = 5", r"\[cluster\.nodes\] cuont: there is no such key; did you mean count"),
    (NODES, "[]", r"\[cluster\] nodes: there are none"),
    ("edge-4core", "edge-4cores", r"\[cluster\] nodes: no node type 'edge-4cores'; did you mean edge-4core"),
    ("cruise-nmf", "cruise-nfm", r"\[workload\] name: no workload 'cruise-nfm'; did you mean cruise-nmf"),
    ("worker_count = 3", "worker_count = 0", r"\[start\] workers: there are none of 5 nodes; set worker_count from 1 to 4"),
    ("worker_count = 3", "worker_count = 5", r"\[start\] servers: there are none of 5 nodes"),
    ("worker_count = 3", 'workers = ["n0"]', r"\[start\] servers: there are none"),
    ("worker_count = 3", 'worker_count = 3\nworkers = ["n0"]', r"\[start\] worker_count: it names workers and servers"),
    ("worker_count = 3", 'workers = ["n0"]\nservers = ["n9"]', r"\[start\].* 'n9' as a server"),
    ("batch_size = 4", "batch_size = 3", r"\[start\].*batch_size to 3: this scenario allows"),
    ("learning_rate = 0.05", "learning_rate = nan", r"\[start\].*learning_rate nan"),
    (
        "batch_size = 4\n",
        "\n",
        r"\[start\].*batch_size to 10000: this scenario allows.* does not give batch_size, and so the workload's value",
    ),
    (
        BATCH,
        "intra_threads = { integer = [1, 4] }",
        r"\[start\].*intra_threads to 0: .* does not give intra_threads, and so the default",
    ),
    (BATCH, '"load/*" = { real = [0.0, 1.0] }', r"\[start\] global_batch_size: give it, because loads of `real` ranges"),
    ("batch_size = 4", 'batch_size = 4\nworkers = ["n9"]', r"\[start\] worker_count: it names workers"),
    ("batch_size = 4", "batch_size = 4.5", r"\[start\] batch_size: expected `int`, got `float`"),
    ("batch_size = 4", 'batch_size = 4\npolicy = "bps"', r"\[start\].*'bps'.*bsp"),
    (RATE, "real = [1.0, 0.01]", r"\[free\] Knob 'learning_rate' runs from 1.0 to 0.01"),
    (RATE, "real = [0.0, 1.0]", r"\[free\] Knob 'learning_rate' is logarithmic from 0.0"),
    (RATE, "real = [0.01]", r"\[free\] learning_rate: real: expected `array` of length 2"),
    (RATE, "reel = [0.01, 1.0]", r"\[free\] learning_rate: reel: there is no such key; did you mean real"),
    (RATE, "real = [0.01, 1.0], integer = [1, 2]", r"\[free\] learning_rate: give exactly one of real, integer"),
    ("choice = [2, 4]", "choice = []", r"\[free\] Knob 'batch_size' has options"),
    (BATCH, "batchsize = { choice = [2, 4] }", r"\[free\] Knob 'batchsize' sets nothing"),
    (BATCH, "worker_count = { integer = [1, 5] }", r"\[free\] worker_count: .* within \[1, 4\]"),
    (BATCH, "batch_size = 4", r"\[free\] batch_size: give a range, as in .*, not 4"),
    (BATCH, "batch_size = { integer = [0, 8] }", r"\[free\] batch_size: cannot be 0; it must be at least 1"),
    (
        BATCH,
        "batch_size = { choice = [8, 2147483648] }",
        r"\[free\] batch_size: cannot be 2147483648; .* at most 2147483647",
    ),
    (BATCH, "momentum = { real = [0.0, 2.0] }", r"\[free\] momentum: cannot be 2.0; .*lies in \[0, 1\]"),
    (BATCH, "transfer_bits = { integer = [16, 32] }", r"\[free\] transfer_bits: cannot be 17; choose 16 or 32"),
    ('metric = "loss"', 'metric = "los"', r"\[target\] metric: invalid enum value 'los'; choose one of .*loss"),
    ("value = 0.1", "", r"\[target\] value: it is missing"),
    ("value = 0.1", "value = nan", r"\[target\] value: loss nan is no target"),
    (TARGET, 'metric = "accuracy"\nvalue = 93', r"\[target\] value: accuracy 93 .*lies in \(0, 1\]"),
    (TARGET, 'metric = "clocks"\nvalue = 0', r"\[target\] value: clocks 0 is no target"),
    ("value = 0.1", "value = 0.1\ncheck_clocks = 0", r"\[target\] check_clocks: expected `int` >= 1"),
    ("seconds = 20", "seconds = 0", r"\[budget\] seconds: expected `float` > 0"),
    ("seconds = 20", "seconds = inf", r"\[budget\] seconds: inf never ends"),
    ("seconds = 20", "minutes = 20", r"\[budget\] minutes: there is no such key; choose one of seconds"),
    ("count = 2", "count = 0", r"\[seeds\] count: expected `int` >= 1"),
    ("count = 2", "count = 2000000000", r"\[seeds\] count: expected `int` <= 100000"),
    ("[budget]", "[conditions.stragglers]\nmean_seconds = 1\n[budget]", r"\[conditions\] .*stragglers: there are none"),
    ("[budget]", BUCKETS, r"\[conditions\] .*an entry of buckets that names no nodes"),
    ("[budget]", "[conditions]\njiter = 0.1\n[budget]", r"\[conditions\] jiter: there is no such key; did you mean jitter"),
    ("[budget]", "[conditions]\njitter = -0.1\n[budget]", r"\[conditions\] .*jitter = -0.1"),
    ("[budget]", SLEEPS, r"\[conditions\] .*sleeps\.probability = 2\.0"),
    ("[budget]", STRAGGLERS, r"\[conditions\] .*node 'n7': this cluster has n0"),
    (DEMAND, NO_TIME, r"\[workload\] Cannot train a job whose mini-batches take no time: give its demand sample_seconds"),
    (f"{DEMAND} }} }}\n[start]\nworker_count = 3", ALONE, r"\[workload\] .*mini-batches take no time"),
    ("[budget]", LOSSES, r"\[conditions\] .*lose each node every 1e-07 s: .*budget of 20 s; give at least 0.0001 s"),
    (
        "[budget]",
        "[[conditions.losses]]\nevery_seconds = 9\nspot = true\n[budget]",
        r"\[conditions\] .*none of n0, .*is one",
    ),
    (NODES, f"{NODES}\nserver_threads = 10001", r"\[cluster\] server_threads: expected `int` <= 10000"),
    ("learning_rate = 0.05", "learning_rate = inf", r"\[start\] .*learning_rate inf.*must not be negative or infinite"),
    ("[budget]", "[costs]\nrestart_seconds = -1\n[budget]", r"\[costs\] .*restart_seconds = -1"),
    ("[budget]", "[costs]\nevaluate_seconds = -1\n[budget]", r"\[costs\] .*evaluate_seconds = -1"),
    ("[budget]", "[rules]\ninstall_policy = true\n[budget]", r"\[rules\] install_policy: .*did you mean install_policies"),
    ("[budget]", "budget]", r"my\.toml: it is no TOML: .*line"),
    ('summary = "Five machines and a quadratic."', "", r"my\.toml: summary: it is missing"),
    ("[budget]\nseconds = 20", "", r"my\.toml: \[budget\]: it is missing"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_mistakes_are_refused_with_file_table_and_key(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match="my\\.toml: ") as caught:
        parsed(changed(old, new))  # when it is read: a comparison with this mistake begins no run
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "data", "message"),
    [
        ("{ demand = { model_byte = 1 } }", None, r"\[workload\].*did you mean .*model_bytes"),
        ("{}", "nowhere", r"\[workload\].*reads no files"),
    ],
)
def test_a_workload_that_cannot_be_made_is_named(overrides: str, data: str | None, message: str) -> None:
    text = changed("overrides = { demand = { model_bytes = 2e4 } }", f"overrides = {overrides}")
    text = text if data is None else text.replace("[start]", f'data = "{data}"\n[start]')
    with pytest.raises(ValueError, match=r"my\.toml: " + message):
        scenario.job(parsed(text))


@pytest.mark.parametrize(("table", "key", "of"), [("workload", "file", "workloads"), ("cluster", "profiles", "node types")])
def test_a_scenario_in_place_of_a_file_of_constants_is_told_as_one(tmp_path: Path, table: str, key: str, of: str) -> None:
    (tmp_path / "other.toml").write_text(arena.TINY)
    text = changed(f"[{table}]", f'[{table}]\n{key} = "other.toml"')
    told = rf"Cannot read {of} from .*other\.toml: 'summary' is no table; .* A scenario's file has none"
    with pytest.raises(ValueError, match=told):
        scenario.system(scenario.parse(text, name="my", origin=tmp_path / "my.toml"), 0)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    text = changed(
        'name = "cruise-nmf"\noverrides = { demand = { model_bytes = 2e4 } }', 'name = "mnist-mlp"\ndata = "mnist"'
    )
    with pytest.raises(ValueError, match=r"\[workload\].*mnist"):
        scenario.job(scenario.parse(text, name="my", origin=tmp_path / "my.toml"))


def test_a_scenario_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="No scenario 'digit': did you mean digits"):
        scenario.load("digit")
    with pytest.raises(ValueError, match=r"Cannot read scenario no/where\.toml: No such file"):
        scenario.load("no/where.toml")


def test_the_name_of_a_file_may_have_brackets(tmp_path: Path) -> None:
    path = tmp_path / "mine [b].toml"
    path.write_text(scenario.load("digits").text)
    assert scenario.matching(str(path)) == [str(path)]
    assert scenario.load(path).name == "mine [b]"


def test_a_pattern_of_files_means_these_files_and_a_folder_is_answered_with_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.toml").write_text(arena.TINY)
    assert scenario.matching(f"{tmp_path}/*.toml") == [str(tmp_path / "a.toml"), str(tmp_path / "b.toml")]
    with pytest.raises(ValueError, match=r"No file matches '.*/c\*\.toml': a pattern is relative to the working folder"):
        scenario.matching(f"{tmp_path}/c*.toml")
    with pytest.raises(ValueError, match=r": it is a folder; name its files, as in .*/\*\.toml\."):
        scenario.load(f"{tmp_path}/")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is no UTF-8 text"):
        scenario.load(path)


def test_messages_know_every_table() -> None:
    known: dict[str, Any] = TABLES
    tables = {*Tables.__struct_fields__, *RecordedTables.__struct_fields__} - {"summary"}
    assert tables == {k for k in known if k and "." not in k}
