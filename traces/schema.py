"""The columns of all tables, those of a comparison and those of a trace: names with units, types, and format versions.

A *trace* is a recording of one or more runs, simulated or real. All traces have the same tables; null means that a value was
not recorded. Times are seconds since the run began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from traces.plausible import Column, TableRules
from tuners.actions import Setting
from tuners.settings import OF_CACHES, OF_CHECKPOINTS, OF_LOCAL_STEPS, OF_PULLS, OF_QUORUM, OF_REPLICAS, OF_TABLES

__all__ = [
    "EVALUATIONS",
    "HOST",
    "KEYS",
    "NODE_ORDER",
    "NOT_APPLICABLE",
    "READABLE",
    "SCORES",
    "SETTINGS",
    "TRACE",
    "TRACE_VERSION",
    "UNPRICED",
    "VERSION",
    "assumed_numbers",
    "minimised",
    "plain_setting",
    "setting_from",
    "setting_text",
    "worker_count",
    "worker_numbers",
]

VERSION = 4
"""Version of the results folder as a whole; a folder of a version that is not in `READABLE` is refused."""

READABLE = (2, 3, 4)
"""Versions of results that can be read. Version 2 has no numbers of workers; its settings tell them. Versions 2 and 3 have
nothing on machines and money, which is null or nan then."""

KEYS = ("scenario", "tuner", "seed")
"""The columns that identify a run: every table starts with them and is sorted by them."""

_RUN: dict[str, pl.DataType] = {"scenario": pl.String(), "tuner": pl.String(), "seed": pl.Int64()}

NOT_APPLICABLE = "not applicable"
"""The status of a run that was not played, because its tuner has nothing to tune in the scenario; `reason` says why."""

SCORES: dict[str, pl.DataType] = {
    **_RUN,
    "status": pl.String(),  # target | budget | diverged | deadlock | error | not applicable
    "reason": pl.String(),  # a sentence if the target was not reached, else ""
    "completion_seconds": pl.Float64(),  # simulated; the budget if the target was not reached, nan if not applicable
    "budget_seconds": pl.Float64(),
    "reached": pl.Boolean(),  # whether the target was reached
    "reconfigurations": pl.Int64(),  # reconfigurations that were carried out, on any branch
    "overhead_seconds": pl.Float64(),  # stall of reconfigurations, forks, switches between branches, and evaluations
    "slow_seconds": pl.Float64(),  # time in which training shared resources with a reconfiguration
    "bytes_moved": pl.Float64(),  # by reconfigurations, forks and switches between branches
    "trial_seconds": pl.Float64(),  # training that is not part of the final model
    "clocks": pl.Int64(),  # completed pushes, on all branches
    "rejected": pl.Int64(),  # actions that the system refused
    "final_loss": pl.Float64(),  # of the last evaluation of the final branch; nan if there was none
    "final_accuracy": pl.Float64(),
    "final_setting": pl.String(),  # as `setting_text`
    "final_workers": pl.Int64(),  # number of workers in it; null without a setting
    "branches_peak": pl.Int64(),  # largest number of branches at one time
    "branch_bytes_peak": pl.Float64(),  # their parameters and optimizer slots, at nominal size
    "machine_seconds": pl.Float64(),  # of all machines that the job used until it ended; nan where it is not known
    "usd": pl.Float64(),  # their price; nan where a price is not known
    "budget_usd": pl.Float64(),  # what the job may cost: as the scenario says, or of all machines for the whole budget
    "minimise": pl.String(),  # what a run should take least of: seconds | usd
}
"""One row per run."""

UNPRICED: dict[str, float | str] = {
    "machine_seconds": math.nan,
    "usd": math.nan,
    "budget_usd": math.nan,
    "minimise": "seconds",
}
"""The columns that version 4 added to the scores, as they are read from results of earlier versions."""

EVALUATIONS: dict[str, pl.DataType] = {
    **_RUN,
    "seconds": pl.Float64(),
    "clocks": pl.Int64(),
    "loss": pl.Float64(),
    "accuracy": pl.Float64(),
}
"""The validation curve of the final branch, continued by its ancestors before the fork."""

SETTINGS: dict[str, pl.DataType] = {
    **_RUN,
    "seconds": pl.Float64(),
    "setting": pl.String(),  # as `setting_text`
    "workers": pl.Int64(),  # number of workers in it
}
"""The setting of that branch: one row at 0, then one per reconfiguration, at its end."""

HOST: dict[str, pl.DataType] = {
    **_RUN,
    "thinking_seconds": pl.Float64(),
    "wall_seconds": pl.Float64(),
    "machine": pl.String(),  # that the run was made on, and versions of libraries; "" where it is not known
}
"""Times measured on the host. They differ from run to run, so they have a file of their own (`host.csv`)."""

# ---------------------------------------------------------------------------------------------------------------- traces

TRACE_VERSION = 1
"""Version of the tables below; a trace of another version is refused, never converted silently."""

_TEXT, _FLOAT, _WHOLE = pl.String(), pl.Float64(), pl.Int64()
_NAME = Column(_TEXT)
_WORDS = Column(_TEXT, required=False)
_NUMBER = Column(_FLOAT, required=False)
_COUNT = Column(_WHOLE, required=False, low=0)
_NODES = _COUNT._replace(high=100_000)
_RATE = Column(_FLOAT, required=False, low=0)
_SHARE = Column(_FLOAT, required=False, low=0, high=1)
_BRANCH = Column(pl.Int32(), low=0)
_MOMENT = Column(_FLOAT, low=-3600.0, high=3.2e8)  # ten years; a Unix time, in seconds or milliseconds, is larger
_DURATION = Column(_FLOAT, required=False, low=0, high=3.2e8)
_PART = Column(_FLOAT, required=False, low=0, high=86_400.0)  # no part of one iteration takes a day

NODE_ORDER = "node_order"
"""The key of a run's extras that has the names of its nodes, in the order in which `iterations` number them, from 0 on. A
setting may have its workers in another order. Without this key, numbers are taken to follow the setting's order."""

TRACE: dict[str, TableRules] = {
    # One row per run.
    "runs": TableRules(
        {
            "run": _NAME,  # its name in all tables
            "workload": _WORDS,
            "cluster": _WORDS,  # type of its machines
            "seed": Column(_WHOLE, required=False),
            "status": _WORDS,  # how it ended
            "seconds": _DURATION,  # from beginning to end
            "seconds_sd": _DURATION,  # standard deviation over repetitions
            "trimmed_seconds": _DURATION,  # the part of `seconds` after `trimmed_loss` was first reached
            "steps": _COUNT,  # in the system's own count: completed pushes, or global steps
            "steps_sd": _RATE,
            "samples_per_second": _RATE,  # of all workers together
            "first_loss": _NUMBER,
            "trimmed_loss": _NUMBER,
            "loss": _NUMBER,  # at the end
            "accuracy": _SHARE,  # at the end
            "accuracy_sd": _SHARE,
            "cost_usd": _RATE,
            "extras": _WORDS,  # a JSON object: data of the source that has no column here, and `NODE_ORDER`
        },
        key=("run",),
    ),
    # The settings of a run: one row at its beginning, and one per reconfiguration, at its end.
    "settings": TableRules(
        {
            "run": _NAME,
            "branch": _BRANCH,
            "seconds": _MOMENT,
            "workers": _NODES,
            "servers": _NODES,
            "batch_size": _COUNT._replace(high=2**31 - 1),  # of one worker's mini-batch
            "policy": _WORDS,  # bsp, asp, ssp, ...
            "staleness": _COUNT,  # the bound, where the policy has one
            "intra_threads": _COUNT,
            "inter_threads": _COUNT,
            "transfer_bits": _COUNT,
            "learning_rate": _RATE,
            "momentum": _RATE,
            "options": _WORDS,  # a JSON object: knobs that have no column here
            "setting": _WORDS,  # the whole setting as `setting_text` writes it; null if nodes have no names
        },
        time="seconds",
        by=("run", "branch"),
    ),
    # One row per completed push, or per worker and step where all push together.
    "iterations": TableRules(
        {
            "run": _NAME,
            "branch": _BRANCH,
            "seconds": _MOMENT._replace(required=False),  # when it was completed
            "worker": Column(pl.Int32(), low=0),  # its number, see `NODE_ORDER`
            "clock": Column(pl.Int32(), low=0),  # iterations of the worker before this one, or number of the step
            "step_seconds": _PART,  # of the whole iteration, if recorded as a whole
            "compute_seconds": _PART,
            "pull_seconds": _PART,
            "push_seconds": _PART,
            "wait_seconds": _PART,
            "staleness": Column(pl.Int32(), required=False, low=0),  # pushes of others between its pull and its push
            "loss": _NUMBER,  # of the mini-batch; null if not finite: the run has diverged
        },
        key=("run", "branch", "worker", "clock", "seconds"),
        time="seconds",
        by=("run", "branch"),
    ),
    # Training progress. A tuner may get an earlier evaluation after a later one, so the order of time is not checked.
    "progress": TableRules(
        {
            "run": _NAME,
            "branch": _BRANCH,
            "seconds": _MOMENT._replace(required=False),
            "steps": Column(_WHOLE, low=0),
            "policy": _WORDS,
            "training_loss": _NUMBER,  # of one mini-batch
            "validation_loss": _NUMBER,
            "accuracy": _SHARE,
            "variation": _RATE,  # of the workers' times in this step: standard deviation over mean
        },
        key=("run", "branch", "seconds", "steps", "training_loss", "validation_loss", "accuracy"),
    ),
    "node_events": TableRules(
        {
            "run": _NAME,
            "seconds": _MOMENT,
            "node": _NAME,
            "event": _NAME._replace(among=("joined", "leaving", "left", "failed")),
        },
        key=("run", "seconds", "node", "event"),
        time="seconds",
        by=("run",),
    ),
    "reconfigurations": TableRules(
        {
            "run": _NAME,
            "branch": _BRANCH,
            "seconds": _MOMENT,  # its end
            "method": _WORDS,
            "total_seconds": _DURATION,  # from the request to the end
            "stall_seconds": _DURATION,  # the part of it in which nobody trained
            "slow_seconds": _DURATION,  # the part of it in which training shared resources with the reconfiguration
            "bytes_moved": _RATE,
            "done": Column(pl.Boolean(), required=False),  # false: rolled back
            "steps": _WORDS,  # the steps of the plan, in order
        },
        time="seconds",
        by=("run", "branch"),
    ),
    # Measurements of nodes and networks, made during training or without training.
    "probes": TableRules(
        {
            "run": _NAME,
            "node": _NAME,
            "seconds": _MOMENT,
            "bandwidth_bytes_per_second": Column(_FLOAT, required=False, low=0, high=1e12),
            "relative_seconds": _RATE,  # a duration in a unit of the run: only ratios within a run have a meaning
            "relative_speed": _RATE,  # likewise a speed: larger is faster
        },
        key=("run", "node", "seconds"),
        time="seconds",
        by=("run", "node"),
    ),
}
"""The tables of a trace. Any of them may be empty."""


def minimised(score: Mapping[str, Any]) -> float:
    """What a run took of what its scenario minimises: seconds or USD until the target. A run that did not reach it counts
    with its budget."""
    if score["minimise"] != "usd":
        return float(min(score["completion_seconds"], score["budget_seconds"]))
    return float(score["usd"] if score["reached"] else score["budget_usd"])


def setting_text(setting: Setting) -> str:
    """A setting that a job can have as one line of JSON: its numbers are finite."""
    return msgspec.json.encode(plain_setting(msgspec.to_builtins(setting, enc_hook=lambda value: value.item()))).decode()


def plain_setting(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a setting without those of local steps, embedding tables, checkpoints, quorums and skipped pulls, where
    there are none: most jobs have none, and their lines stay as they are. So do those of single workers."""
    left_out = set() if fields["node_steps"] else {"node_steps"}
    for group in (OF_LOCAL_STEPS, OF_TABLES, OF_CACHES, OF_REPLICAS, OF_CHECKPOINTS, OF_PULLS, OF_QUORUM):
        if all(fields.get(name, plain) == plain for name, plain in group.items()):
            left_out |= group.keys()
    return {name: value for name, value in fields.items() if name not in left_out}


def setting_from(text: str) -> Setting:
    """The setting that `setting_text` wrote. Raises ValueError where `text` is no such line."""
    return msgspec.json.decode(text, type=Setting)


def worker_count(setting: Setting | str) -> int | None:
    """The number of workers in a setting, or in its line of JSON; None for "". Where one node stands for all recorded
    workers, the option "workers" has their number."""
    if isinstance(setting, str):
        if not setting:
            return None
        setting = setting_from(setting)
    recorded = dict(setting.options).get("workers")
    return recorded if setting.workers == ("workers",) and isinstance(recorded, int) else len(setting.workers)


def worker_numbers(workers: Sequence[str], order: Sequence[str]) -> tuple[int, ...]:
    """The numbers that `iterations` give these workers of a setting, by the `NODE_ORDER` of the run; () where this lacks one
    of them, or the setting does not name its workers."""
    at = {name: number for number, name in enumerate(order)}
    return tuple(at[name] for name in workers) if at.keys() >= {*workers} else ()


def assumed_numbers(seen: Iterable[int], count: int) -> tuple[int, ...]:
    """The numbers of the `count` workers of a setting, in its order, where `worker_numbers` knows none: by those that were
    `seen` in its `iterations`. The lowest is taken to be that of the first worker.

    Where some workers have no rows, numbers begin with 0, or else with 1, if all that were seen fit into that. If they fit
    into neither, those that are missing are the last ones, and have the number -1.
    """
    found = sorted(seen)
    if len(found) < count:
        for numbers in (range(count), range(1, count + 1)):
            if {*found} <= {*numbers}:
                return tuple(numbers)
    return (*found, *[-1] * count)[:count]
