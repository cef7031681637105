"""Small made-up files in the formats of public recordings, by source: what an importer reads, by path inside its folder."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import polars as pl

__all__ = ["MADE", "lay", "parquet", "tar"]


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    """Write `files` below `folder`."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def parquet(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:bz2") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def csv(header: str, rows: list[str], end: str = "\n") -> bytes:
    return "".join(line + end for line in [header, *rows] if line).encode()


def alibaba() -> dict[str, bytes]:
    """Three workers, the third twice as slow for two ticks; a duplicate row; a job of only two iterations."""
    rows = [
        f"{3 * t + w},{w},25,{1 + 10 * t},{800 if w == 2 and t in (3, 4) else 400 + w}" for t in range(8) for w in range(3)
    ]
    wide = [",0,1,2", "job_00,0.1,0.2,0.3", "job_01,0.5,0.25,"]
    return {
        "job_7_norm.csv": csv(",worker,gpu,time,batch_time_norm", [*rows, rows[-1].replace("23,", "24,", 1)]),
        "coefficient_variation.csv": csv("", wide),
    }


def azure() -> dict[str, bytes]:
    where = "vm-noise-data/test_suite={}/test_name=Test:_CPU/vm_lifespan=short/vm_region=eastus/vm_sku=B8ms"
    where += "/unit=Events Per Second.csv"
    head = "value,runtime,starttime,VM_id"
    rows = ["8397.17,90.01,2023-06-04 16:05:55.750,0", "7000.5,90.01,2023-06-06 18:17:04.010,1"]
    return {where.format("Sysbench"): csv(head, rows), where.format("Other"): csv(head, [])}


def bamboo() -> dict[str, bytes]:
    return {"p9-trace.csv": csv("", ["0,add,node1", "0,add,node2", "60000,remove,node1", "180000,add,node3"], end="\r\n")}


def bytedance() -> dict[str, bytes]:
    """One job of two workers and two steps; worker 1 computes twice as long."""
    rows = []
    for step in (5, 9):
        for rank in (0, 1):
            spell, at = 0.5 * (1 + rank), 0.0
            for kind, took in (("params-all-gather", 0.1), ("forward-compute", spell), ("backward-compute", 2 * spell)):
                rows.append((rank, 0, rank, step, kind, at, took, 0, 0, 0))
                at += took
            rows.append((rank, 0, rank, step, "grads-reduce-scatter", at, 3.35 - at, 0, -1, -1))
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id"]
    kinds = dict.fromkeys(("dp_rank", "stage", "mc", "mb_id"), pl.Int8) | {"rank": pl.Int16, "seq_id": pl.Int32}
    kinds |= {"start_ts": pl.Float32, "duration": pl.Float32}
    frame = pl.DataFrame(rows, schema=names, orient="row").cast(kinds)  # type: ignore[arg-type]
    return {
        "trace-XY.parquet": parquet(frame),
        "meta-XY.yaml": b"trial_name: XY\ndp_size: 2\npp_size: 1\n",
        "result-XY.json": json.dumps({"job_meta": {}, "step_t_base": {"5": 3.35, "9": 3.35}}).encode(),
    }


def dl2() -> dict[str, bytes]:
    lines = [
        "('wlm', 'dist_sync', 160, 2, 2, [450.5, 449.5], [1.9, 1.8], [0.8, 0.9])",
        "('vgg-16', 'dist_async', 33, 1, 2, [10.0, 12.5], [1.0], [0.5, 0.5])",
    ]
    return {"config_speed.txt": "\n".join(lines).encode()}  # as in the source, the last line has no newline


def dlrm() -> dict[str, bytes]:
    """Two data sets in one file; of the first, a fifth of the rows takes more than half of the look-ups."""
    block = [
        "fbgemm_t9_bs64{}.pt",
        "Locality stats after processing 1 batches of size 64",
        "Avg # of indices: 200",
        "Avg # of unique cols: 100",
        "Avg col size: 2.0",
        "Histogram of col sizes:",
        "(0, 1]: 0.600",
        "(1, 2]: 0.200",
        "(2+: 0.200",
        "[0, 1, 2]",
        "['0.000', '0.600', '0.800', '1.000']",
        "Ratio of index distribution at different column sizes:",
        "(0, 1]: 0.300",
        "(1, 2]: 0.150",
        "(2+: 0.550",
        "[0, 1, 2]",
        "['0.000', '0.300', '0.450', '1.000']",
        "",
    ]
    return {"2031/locality_stats.txt": "\n".join(line.format(name) for name in ("", "_1") for line in block).encode()}


def infinitehbd() -> dict[str, bytes]:
    """Node a has two faults that overlap; b fails together with its first, and is not repaired."""
    events = [("a", 1.0, "start", "X"), ("b", 1.0, "start", "X"), ("a", 1.5, "start", "Y"), ("a", 2.0, "end", "X")]
    events += [("a", 3.25, "end", "Y"), ("c", 4.0, "start", "X"), ("c", 4.0, "end", "X")]
    made = [
        {
            "node_id": node,
            "event_time": days,
            "event_type": f"fault_{kind}",
            "fault_type": {"Level": "Hardware", "Class": "GPU", "Desc": what},
        }
        for node, days, kind, what in events
    ]
    return {"fault_trace.json": json.dumps(made, indent=1).encode()}


def selftf() -> dict[str, bytes]:
    head = "N_iterations,N_workers,N_intra,Optimizer,Learning_rate,Batch_size,n_partitions,current_loss,time_cost"
    head += ",model_name,job_id,first_loss"
    trimmed = [
        "40000,15,5,Adam,0.0001,100,108,0.29,1110.5,CNN,CNN_1,0.94",
        "35000,3,8,Adam,0.0001,100,108,0.43,5743.75,CNN,CNN_2,2.2",
    ]
    whole = [
        "40000,15,5,Adam,0.0001,100,108,0.29,1334.25,CNN,CNN_1,2.29",
        "35000,3,8,Adam,0.0001,100,108,0.43,5753.75,CNN,CNN_2,2.3",
    ]
    return {"cnn_testing_data_for_bo_with_progress.csv": csv(head, trimmed), "cnn_testing_result.csv": csv(head, whole)}


def skypilot() -> dict[str, bytes]:
    made = {"metadata": {"gap_seconds": 300}, "data": [2, 4, 4, 1, 3]}
    return {"availability/4-node/aws-01-01-2023/us-west-2a_v100_1.json": json.dumps(made).encode()}


def sync_switch() -> dict[str, bytes]:
    """A tenth of the samples in BSP at 2 s a step, then ASP at 0.25 s a step."""
    start, rows = 1_600_000_000.0, []
    for step in range(1, 800, 100):
        rows.append(f"{start + 2 * (step - 1)},{step},{2 - step / 1000}")
    switched = start + 1600 + 120
    rows += [f"{switched + 0.25 * (step - 801)},{step},0.5" for step in range(801, 2001, 100)]
    accuracies = [f"{start + 100},0,0.1", "", f"{switched + 100},1200,0.8"]
    head = "Wall time,Step,Value"
    return {
        "cifar10_res32/switch_exp/b10-a90-run1/loss.csv": csv(head, rows),
        "cifar10_res32/switch_exp/b10-a90-run1/acc.csv": "\n".join([head, *accuracies]).encode(),
    }


def trimtuner() -> dict[str, bytes]:
    head = "_id/$oid,n_workers,timestamp,learning_rate,batch_size,iterations_counted,synchronism,training_time,"
    head += "standard deviation time,intermediate_acc_values,n_ps,acc,standard deviation accuarcy,vm_flavor,"
    head += "intermediate_test_durations,training_set_size,intermediate_no_interations,total_iterations,"
    head += "standard deviation iteration"
    row = (
        "5c{i},{w},2019-05-13 13:50:21.395067,0.001,{b},15,{s},{t},0.5,0.15 0.16,1,{a},0.01,t2.small,1.5 1.4,1000,0 3,17,1.6"
    )
    rows = [
        row.format(i=2 * k + j, w=8 * (k + 1), b=16, s=s, t=36.0 / (k + 1), a=0.5 + 0.1 * j)
        for k in range(3)
        for j, s in enumerate(("sync", "async"))
    ]
    return {"cnn.csv": csv(head, rows), "rnn.csv": b"\xef\xbb\xbf" + csv(head, rows[:2], end="\r\n")[:-2]}


def uta() -> dict[str, bytes]:
    """Sixty samples at 5 Gbit/s, one in between, ten at 1.25."""
    lines = ["crnt bw = 5.000"] * 60 + ["crnt bw = 2.500"] + ["crnt bw = 1.250"] * 10
    name = "c5.xlarge-us-east-1-1568031119"
    return {f"{name}.bw": csv("", lines), f"{name}.tb": b"71.000,5.000,1.250\n"}


MADE: dict[str, Callable[[], dict[str, bytes]]] = {
    "alibaba-pai-minibatch": alibaba,
    "azure-vm-noise": azure,
    "bamboo-spot": bamboo,
    "bytedance-straggler": bytedance,
    "dl2-config-speed": dl2,
    "dlrm-locality": dlrm,
    "infinitehbd-faults": infinitehbd,
    "selftf": selftf,
    "skypilot-spot": skypilot,
    "sync-switch": sync_switch,
    "trimtuner-tf-ps": trimtuner,
    "uta-ec2-tokenbucket": uta,
}


def phase_rates(progress: pl.DataFrame) -> pl.DataFrame:
    """Steps per second of each run in each mode: columns run, policy, steps, steps_per_second.

    Counts the intervals between two records of loss in the same mode in `progress` (a trace's table). An interval is a
    checkpoint, pause or switch, and left out, if a step takes over three times the median (in ASP: and over a minute).
    """
    loss = progress.filter(pl.col("training_loss").is_not_null())
    within = loss.with_columns(
        took=pl.col("seconds").diff().over("run"),
        done=pl.col("steps").diff().over("run"),
        same=(pl.col("policy") == pl.col("policy").shift(1)).over("run"),
    ).filter("same", pl.col("done") > 0)
    each = pl.col("took") / pl.col("done")
    long = (each > 3 * each.median().over("run", "policy")) & ((pl.col("policy") == "bsp") | (pl.col("took") > 60))
    sums = within.filter(~long).group_by("run", "policy", maintain_order=True).agg(pl.col("done", "took").sum())
    return sums.select("run", "policy", steps="done", steps_per_second=pl.col("done") / pl.col("took"))
