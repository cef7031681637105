"""Importers on small files that we made: the tables of each importer, and its errors, with file, row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.support.recordings import MADE, lay, parquet, phase_rates, tar
from traces.importers import SOURCES, Imported, import_trace, read
from traces.importers.uta_ec2_tokenbucket import token_bucket
from traces.parts import check_trace, origin
from traces.plausible import TraceError


def made(source: str, folder: Path) -> Imported:
    return read(SOURCES[source], lay(folder, MADE[source]()))


def extras(frame: pl.DataFrame, row: int = 0) -> dict[str, Any]:
    return dict(json.loads(frame["extras"][row]))


def test_every_source_has_made_up_files():
    assert list(MADE) == list(SOURCES)


@pytest.mark.parametrize("source", MADE)
def test_an_import_is_a_complete_trace_that_names_its_origin(source, tmp_path):
    files = MADE[source]()
    rows = import_trace(source, lay(tmp_path / "in", files), tmp_path / "out", made_by="test").rows
    assert check_trace(tmp_path / "out") == rows
    assert rows["runs"] >= 1
    said = origin(tmp_path / "out")
    assert (said.source, said.of, said.licence) == (source, SOURCES[source].of, SOURCES[source].licence)
    assert {name for name, _ in said.inputs} <= set(files)
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}


def test_alibaba(tmp_path):
    tables = made("alibaba-pai-minibatch", tmp_path).tables
    assert tables["runs"]["run"].to_list() == ["minibatch/job_7", "cov/job_00", "cov/job_01"]
    assert extras(tables["runs"]) == {"duplicates_dropped": 1}
    assert tables["probes"].height == 24
    slow = tables["probes"].filter(pl.col("relative_seconds") == 800)
    assert slow["node"].unique().to_list() == ["worker2"]
    assert slow["seconds"].to_list() == [31.0, 41.0]
    assert tables["settings"].row(0, named=True)["workers"] == 3
    assert tables["progress"].filter(run="cov/job_01")["variation"].to_list() == [0.5, 0.25]


def test_azure(tmp_path):
    tables = made("azure-vm-noise", tmp_path).tables
    assert tables["runs"]["run"].to_list() == ["sysbench_test_cpu_events_per_second/B8ms/eastus/short"]
    assert tables["probes"]["relative_speed"].to_list() == [8397.17, 7000.5]
    assert tables["probes"]["seconds"].to_list() == pytest.approx([0.0, 180668.26])


def test_azure_with_a_test_that_was_never_run(tmp_path):
    files = MADE["azure-vm-noise"]()
    name, data = next((n, d) for n, d in files.items() if "=Sysbench" in n)
    files[name.replace("=short", "=long")] = data.splitlines(keepends=True)[0]
    tables = read(SOURCES["azure-vm-noise"], lay(tmp_path, files)).tables
    assert (tables["runs"].height, tables["probes"].height) == (1, 2)


def test_bamboo(tmp_path):
    events = made("bamboo-spot", tmp_path).tables["node_events"]
    assert events.rows() == [
        ("p9", 0.0, "node1", "joined"),
        ("p9", 0.0, "node2", "joined"),
        ("p9", 60.0, "node1", "left"),
        ("p9", 180.0, "node3", "joined"),
    ]


def test_bytedance(tmp_path):
    tables = made("bytedance-straggler", tmp_path).tables
    one = tables["iterations"].filter(clock=9).sort("worker").to_dicts()
    assert [r["compute_seconds"] for r in one] == pytest.approx([1.5, 3.0])
    assert [r["step_seconds"] for r in one] == pytest.approx([3.35, 3.35])
    assert [r["push_seconds"] for r in one] == pytest.approx([1.75, 0.25], abs=1e-6)
    assert json.loads(tables["settings"]["options"][0]) == {"dp_size": 2, "pp_size": 1, "stage_of_worker": {"0": 0, "1": 0}}


def test_dl2(tmp_path):
    tables = made("dl2-config-speed", tmp_path).tables
    assert tables["runs"]["samples_per_second"].to_list() == [900.0, 22.5]
    assert tables["settings"].select("workers", "servers", "policy", "batch_size").rows() == [
        (2, 2, "bsp", 80),
        (2, 1, "asp", None),  # 33 samples cannot be divided by 2
    ]
    assert [json.loads(extras)["server_cpus"] for extras in tables["runs"]["extras"]] == [[1.9, 1.8], [1.0]]
    assert [json.loads(extras)["worker_cpus"] for extras in tables["runs"]["extras"]] == [[0.8, 0.9], [0.5, 0.5]]


def test_dl2_leaves_out_rows_of_other_kinds_and_says_so(tmp_path):
    lines = MADE["dl2-config-speed"]()["config_speed.txt"].decode().splitlines()
    lines += [lines[0].replace("450.5, 449.5", "0.0, 0.0"), lines[1].replace("dist_async", "local")]
    lines += [lines[0].replace("450.5, 449.5", "0, 0").replace("wlm", "rnn")]
    path = lay(tmp_path / "in", {"config_speed.txt": "\n".join(lines).encode()})
    found = import_trace("dl2-config-speed", path, tmp_path / "out", made_by="test")
    assert found.rows["runs"] == 2
    assert found.left_out == "1 row of kvstore 'local' and 2 rows whose speeds are all zero left out."
    assert origin(tmp_path / "out").of.endswith(found.left_out)
    with pytest.raises(TraceError, match=r"no row to import: 2 rows whose speeds are all zero left out\."):
        read(SOURCES["dl2-config-speed"], lay(tmp_path / "none", {"config_speed.txt": "\n".join(lines[2::2]).encode()}))


def test_dlrm(tmp_path):
    runs = made("dlrm-locality", tmp_path).tables["runs"]
    assert runs["run"].to_list() == ["2031/fbgemm_t9_bs64", "2031/fbgemm_t9_bs64_1"]
    said = extras(runs)
    assert (said["lookups"], said["rows"], said["batch_size"]) == (200, 100, 64)
    assert (said["lookups_of_row_above"], said["row_shares"]) == ([0, 1, 2], [0.6, 0.2, 0.2])
    assert said["lookup_shares"] == [0.3, 0.15, 0.55]


def test_infinitehbd(tmp_path):
    """Overlapping faults are one failure; a fault that ends as it starts is none."""
    tables = made("infinitehbd-faults", tmp_path).tables
    day = 86_400.0
    assert tables["node_events"].select("seconds", "node", "event").rows() == [
        (day, "a", "failed"),
        (day, "b", "failed"),
        (3.25 * day, "a", "joined"),
    ]
    assert extras(tables["runs"]) == {
        "faults": 4,
        "faults_by_level": {"Hardware": 4},
        "nodes_watched": 400,
        "nodes_with_faults": 3,
    }


def test_selftf(tmp_path):
    tables = made("selftf", tmp_path).tables
    first = tables["runs"].row(0, named=True)
    assert (first["run"], first["seconds"], first["trimmed_seconds"], first["steps"]) == (
        "cifar_cnn/0",
        1334.25,
        1110.5,
        40000,
    )
    assert (first["first_loss"], first["trimmed_loss"], first["loss"]) == (2.29, 0.94, 0.29)
    assert tables["settings"].select("workers", "servers", "intra_threads", "inter_threads").row(0) == (15, 21, 5, 11)


def test_selftf_without_the_end_to_end_times(tmp_path):
    files = MADE["selftf"]()
    del files["cnn_testing_result.csv"]
    runs = read(SOURCES["selftf"], lay(tmp_path, files)).tables["runs"]
    assert runs["seconds"].to_list() == [None, None]
    assert runs["trimmed_seconds"].to_list() == [1110.5, 5743.75]


def test_selftf_of_a_model_on_unknown_machines_and_of_slow_steps(tmp_path):
    """As in the source: a fourth model, whose first time is 0; and 34 workers whose step takes over a minute."""
    head = MADE["selftf"]()["cnn_testing_result.csv"].splitlines()[0].decode()
    rows = [
        "20646,6,1,RMSProp,0.045,10,108,12.5,0.0,INCEPTION,I_1,13.1",
        "15000,34,10,RMSProp,2.4e-05,4560,108,0.2,32400.0,LR,L_1,0.7",
    ]
    (tmp_path / "x_testing_data_for_bo_with_progress.csv").write_text("\n".join([head, *rows]) + "\n")
    tables = read(SOURCES["selftf"], tmp_path).tables
    assert tables["runs"]["trimmed_seconds"].to_list() == [None, 32400.0]
    assert tables["settings"]["servers"].to_list() == [None, 2]


def test_skypilot(tmp_path):
    tables = made("skypilot-spot", tmp_path).tables
    assert tables["runs"].select("cluster", "seconds").row(0) == ("v100", 1200.0)
    up = tables["node_events"].with_columns(change=pl.when(event="joined").then(1).otherwise(-1))
    counts = up.group_by("seconds", maintain_order=True).agg(pl.col("change").sum())["change"].cum_sum().to_list()
    assert counts == [2, 4, 1, 3]


def test_sync_switch(tmp_path):
    tables = made("sync-switch", tmp_path).tables
    assert tables["settings"].select("policy", "seconds").rows() == [("bsp", 0.0), ("asp", 1720.0)]
    assert tables["reconfigurations"].height == 1
    assert extras(tables["runs"])["schedule"] == "BSP10-ASP90"
    rates = dict(phase_rates(tables["progress"]).select("policy", "steps_per_second").iter_rows())
    assert rates == pytest.approx({"bsp": 0.5, "asp": 4.0})
    assert tables["progress"]["accuracy"].drop_nulls().to_list() == [0.1, 0.8]


@pytest.mark.parametrize(
    ("folder", "schedule", "modes"),
    [
        ("10-90", "BSP10-ASP90", ["bsp", "asp"]),
        ("1090_1", "BSP10-ASP90", ["bsp", "asp"]),
        ("694_2", "BSP6.25-ASP93.75", ["bsp", "asp"]),
        ("a50-b50-run2", "ASP50-BSP50", ["asp"]),
        ("asp_3", "ASP", ["asp"]),
        ("10-80", None, [None]),
        ("1234_1", None, [None]),
    ],
)
def test_sync_switch_reads_the_schedule_from_the_name_of_the_folder(folder, schedule, modes, tmp_path):
    loss = next(data for name, data in MADE["sync-switch"]().items() if name.endswith("loss.csv"))
    tables = read(SOURCES["sync-switch"], lay(tmp_path, {f"cifar10_res32/{folder}/loss.csv": loss})).tables
    assert extras(tables["runs"]).get("schedule") == schedule
    assert tables["settings"]["policy"].to_list() == modes


@pytest.mark.parametrize(
    ("note", "batches"),
    [
        ("", [("bsp", 128), ("asp", 128)]),
        ("BSP 1024 (lr .8) to step 300, then 512 (lr .4)", [("bsp", 128), ("bsp", 64), ("asp", 64)]),
        ("BSP total batch 128 to step 701, then ASP", [("bsp", 16), ("asp", 128)]),
        ("BSP total batch 1001 to step 701, then ASP", [("bsp", None), ("asp", 128)]),
    ],
)
def test_sync_switch_reads_the_total_batch_in_the_note_on_a_run(note, batches, tmp_path):
    """Eight workers share the total batch in BSP; in ASP each has the usual one, unless the note has another."""
    steps = [*range(1, 800, 100), *range(801, 1200, 100)]
    loss = pl.DataFrame({"run_id": "r", "wall_s": [float(s) for s in steps], "step": steps, "loss": 1.0})
    loss = loss.with_columns(phase=pl.when(pl.col("step") < 800).then(pl.lit("BSP")).otherwise(pl.lit("ASP")))
    head = "run_id,dataset,model,n_workers,schedule,straggler,n_stragglers,straggler_delay_ms,straggler_freq"
    head += ",series,variant,start_epoch_s,best_acc"
    head += ",switch_cost_est_s,switch_gap_joblog_s,n_holes_over_1000s,hole_flag,total_less_holes_s,note"
    files = {
        "loss.parquet": parquet(loss),
        "accuracy.parquet": parquet(loss.select("run_id", "wall_s", "step", accuracy=pl.lit(0.5)).head(1)),
        "runs.csv": f'{head}\nr,cifar10,,8,BSP10-ASP90,none,0,0,,s,"{note}",1600000000,,,,0,,,\n'.encode(),
        "job_phases.csv": b"run_id,phase_index,mode,end_wall_s,gap_to_next_s\n",
    }
    settings = read(SOURCES["sync-switch"], lay(tmp_path, files)).tables["settings"]
    assert settings.select("policy", "batch_size").rows() == batches
    assert {json.loads(text)["bsp_percent"] for text in settings["options"]} == {10.0}


def test_trimtuner(tmp_path):
    tables = made("trimtuner-tf-ps", tmp_path).tables
    assert tables["runs"].height == 8
    one = tables["runs"].row(0, named=True)
    assert one["cost_usd"] == pytest.approx((9 * 0.023 + 0.3712) * 36 / 3600)
    assert json.loads(tables["settings"]["options"][0]) == {"training_set_size": 1000, "vm_flavor": "t2.small"}


def test_uta(tmp_path):
    tables = made("uta-ec2-tokenbucket", tmp_path).tables
    said = extras(tables["runs"])
    assert (said["bucket_at_seconds"], said["said_empty_seconds"]) == (60, 71.0)
    assert said["bucket_bytes"] == pytest.approx(60 * 3.75e9 / 8)
    assert tables["probes"]["bandwidth_bytes_per_second"][0] == 5e9 / 8


def test_uta_as_an_archive_with_hidden_files(tmp_path):
    files = {f"token_bucket_study/{name}": data for name, data in MADE["uta-ec2-tokenbucket"]().items()}
    hidden = {"token_bucket_study/._c5.xlarge-us-east-1-1568031119.bw": b"\0\5\x16", "token_bucket_study/.DS_Store": b"\0"}
    archive = lay(tmp_path, {"token_bucket_study.tar.bz2": tar(files | hidden)})
    tables = read(SOURCES["uta-ec2-tokenbucket"], archive).tables
    assert tables["probes"].height == 71


def test_a_rate_that_never_drops_has_no_bucket():
    assert token_bucket([5.0] * 50) is None
    assert token_bucket([5.0] * 50 + [0.0] * 10) is None  # the stream ended
    assert token_bucket([5.0] * 50 + [1.0] * 3 + [5.0]) is None  # it came back
    assert token_bucket([]) is None


# ---------------------------------------------------------------------------------------------------- what is refused

SWAPS: dict[str, tuple[str, str, str, str, str]] = {
    "alibaba, another value": ("alibaba-pai-minibatch", "job_7_norm.csv", "24,2,25,71,402", "24,2,25,71,403", "row 25: "),
    "alibaba, a gap": ("alibaba-pai-minibatch", "variation.csv", "0.1,0.2,0.3", "0.1,,0.3", "column '1': .*gap"),
    "azure, no time": ("azure-vm-noise", "", "2023-06-06 18:17", "06/06/2023", "row 2, column 'starttime'"),
    "azure, milliseconds": ("azure-vm-noise", "", "7000.5,90.01", "7000.5,90010", "row 2, column 'runtime': .*milliseconds"),
    "bamboo, seconds": ("bamboo-spot", "", "60000,remove", "60,remove", "row 3, column 'ms': .*milliseconds"),
    "bamboo, unknown node": ("bamboo-spot", "", "remove,node1", "remove,node7", "row 3, column 'node'"),
    "bamboo, backwards": ("bamboo-spot", "", "180000,add", "0,add", "row 4, column 'ms': time runs backwards"),
    "bamboo, cut short": ("bamboo-spot", "", "node3\r\n", "nod", "row 4: .*cut short"),
    "bamboo, twice": ("bamboo-spot", "", "0,add,node2", "0,add,node1", "row 2: there is a row with"),
    "bytedance, milliseconds": ("bytedance-straggler", ".json", '"9": 3.35', '"9": 3350.0', "step 9 .*milliseconds"),
    "dl2, code": ("dl2-config-speed", "", "160,", "__import__('os').getpid(),", "row 1: "),
    "dl2, too many speeds": ("dl2-config-speed", "", "[10.0, 12.5]", "[10.0, 9.0, 8.0]", "row 2, column 'speeds'"),
    "dl2, no kvstore": ("dl2-config-speed", "", "'dist_async'", "'a-b'", "row 2, column 'kvstore'"),
    "dl2, a negative speed": ("dl2-config-speed", "", "[10.0, 12.5]", "[-1.0, 0.0]", "row 2, column 'speeds'"),
    "dlrm, shares": ("dlrm-locality", "", "(0, 1]: 0.600", "(0, 1]: 0.700", "row 7: the shares .* sum to 1.1"),
    "dlrm, classes": ("dlrm-locality", "", "(1, 2]: 0.200", "(1, 3]: 0.200", "row 7: the classes"),
    "dlrm, look-ups": ("dlrm-locality", "", "indices: 200", "indices: 2000", "row 3: .* are not 2 for each"),
    "dlrm, cut short": ("dlrm-locality", "", "['0.000', '0.300', '0.450', '1.000']\n", "", "where a line like"),
    "infinitehbd, seconds": ("infinitehbd-faults", "", "4.0", "345600.0", "row 6, column 'event_time': .*seconds"),
    "infinitehbd, no start": ("infinitehbd-faults", "", '"Desc": "X"', '"Desc": "Z"', "row 4: 'X' of node 'a' ends"),
    "infinitehbd, backwards": ("infinitehbd-faults", "", "1.5", "0.5", "row 3, column 'event_time': time runs backwards"),
    "infinitehbd, half": ("infinitehbd-faults", "", "]", "", "not of the expected form"),
    "selftf, milliseconds": ("selftf", "", "1110.5", "1110500", "row 1, column 'time_cost': .*milliseconds"),
    "selftf, nan": ("selftf", "", "0.43,", "nan,", "row 2, column 'current_loss'"),
    "skypilot, milliseconds": ("skypilot-spot", "", "300", "300000", "column 'gap_seconds': .*milliseconds"),
    "skypilot, too many": ("skypilot-spot", "", "4, 1", "5, 1", "row 3, column 'data'"),
    "skypilot, half": ("skypilot-spot", "", ", 3]}", ", 3", "not of the expected form"),
    "sync-switch, milliseconds": ("sync-switch", "loss.csv", "1600000000.0", "1600000000000", "row 1, column 'Wall time'"),
    "sync-switch, backwards": ("sync-switch", "loss.csv", "1600000200.0", "1590000200.0", "row 2, column 'Wall time'"),
    "sync-switch, accuracy": ("sync-switch", "acc.csv", ",0.8", ",80", "row 3, column 'Value'"),
    "trimtuner, milliseconds": (
        "trimtuner-tf-ps",
        "",
        "sync,36.0",
        "sync,36000.0",
        "column 'training_time': .*milliseconds",
    ),
    "trimtuner, a column less": ("trimtuner-tf-ps", "", "n_ps,", "ps,", "column 'n_ps': the column is missing"),
    "trimtuner, a field more": ("trimtuner-tf-ps", "", "2019-05-13 13", "2019,13", "row 1: it has 20 fields"),
    "uta, Mbit/s": ("uta-ec2-tokenbucket", ".bw", "bw = 5.000", "bw = 5000.000", "row 1, column 'bw': .*Mbit/s"),
    "uta, another line": ("uta-ec2-tokenbucket", ".bw", "bw = 2.500", "bw = -2.500", "row 61: "),
}
"""Source, ending of the file's name, text to replace, its replacement, and the message of the error."""


@pytest.mark.parametrize("case", SWAPS)
def test_a_wrong_file_gives_an_error_with_its_place_and_no_trace(case, tmp_path):
    source, ending, was, becomes, said = SWAPS[case]
    files = MADE[source]()
    name = next(n for n in files if n.endswith(ending) and was.encode() in files[n])
    files[name] = files[name].replace(was.encode(), becomes.encode(), 1)
    with pytest.raises(TraceError, match=said) as refused:
        import_trace(source, lay(tmp_path / "in", files), tmp_path / "out", made_by="test")
    assert str(tmp_path / "in") in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_alibaba_in_milliseconds(tmp_path):
    lines = MADE["alibaba-pai-minibatch"]()["job_7_norm.csv"].decode().splitlines()
    rows = [f"{a},{b},{c},{d}000,{e}" for a, b, c, d, e in (line.split(",") for line in lines[1:])]
    lay(tmp_path, {"job_7_norm.csv": "\n".join([lines[0], *rows, ""]).encode()})
    with pytest.raises(TraceError, match=r"column 'time': .*milliseconds"):
        read(SOURCES["alibaba-pai-minibatch"], tmp_path)


@pytest.mark.parametrize("source", ["uta-ec2-tokenbucket", "alibaba-pai-minibatch", "selftf"])
def test_a_file_whose_last_line_is_cut(source, tmp_path):
    files = MADE[source]()
    name = next(iter(files))
    files[name] = files[name][:-3]
    with pytest.raises(TraceError, match="cut short"):
        read(SOURCES[source], lay(tmp_path, files))


HOSTILE = {
    "a million columns": b",".join(b"c%d" % i for i in range(1_000_000)) + b"\n",
    "nothing but commas": b"," * 5_000_000,
    "a quote that never ends": b'worker,gpu,time,batch_time_norm\n"' + b"1,2,3\n" * 1000,
    "bytes that are no text": b"worker,gpu\n\xff\xfe\n",
    "a zero byte": b"worker,gpu\n1,\0\n",
    "empty": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize(("source", "name"), [("alibaba-pai-minibatch", "job_1_norm.csv"), ("trimtuner-tf-ps", "cnn.csv")])
def test_hostile_files(what, source, name, tmp_path):
    with pytest.raises(TraceError, match=name):
        read(SOURCES[source], lay(tmp_path, {name: HOSTILE[what]}))


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "p1-trace.csv"
    with path.open("wb") as sparse:
        sparse.truncate(3 << 30)
    with pytest.raises(TraceError, match="3221225472 bytes"):
        read(SOURCES["bamboo-spot"], path)


def test_an_archive_that_unpacks_to_too_much(tmp_path):
    bomb = tar({"token_bucket_study/c5.large-us-east-1-1.bw": b"\0" * (17 << 20)})
    assert len(bomb) < 10_000
    with pytest.raises(TraceError, match="larger, than what is unpacked"):
        read(SOURCES["uta-ec2-tokenbucket"], lay(tmp_path, {"x.tar.bz2": bomb}))


@pytest.mark.parametrize("harm", ["cut short", "no Parquet", "another column"])
def test_damaged_parquet(harm, tmp_path):
    files = MADE["bytedance-straggler"]()
    data = files["trace-XY.parquet"]
    other = parquet(pl.DataFrame({"step": [1]}))
    files["trace-XY.parquet"] = {"cut short": data[:-100], "no Parquet": b"PAR1", "another column": other}[harm]
    with pytest.raises(TraceError, match=r"trace-XY.parquet"):
        read(SOURCES["bytedance-straggler"], lay(tmp_path, files))


def test_an_unknown_source_and_a_folder_that_is_there(tmp_path):
    with pytest.raises(ValueError, match="No importer is called 'bamboo'"):
        import_trace("bamboo", tmp_path, tmp_path / "out", made_by="test")
    lay(tmp_path / "in", MADE["bamboo-spot"]())
    with pytest.raises(ValueError, match="it is there already"):
        import_trace("bamboo-spot", tmp_path / "in", tmp_path / "in", made_by="test")
    with pytest.raises(TraceError, match="there is no such file or folder"):
        import_trace("bamboo-spot", tmp_path / "nowhere", tmp_path / "out", made_by="test")
