"""Made-up results of comparisons, in the format of `traces.store`, for the tests of reports."""

import json
import math
from dataclasses import replace

import numpy as np
import polars as pl

from traces import store
from traces.schema import EVALUATIONS, HOST, SCORES, SETTINGS, VERSION, setting_text
from traces.store import Results
from tuners.settings import Setting

START = Setting(workers=("n1", "n2", "n3", "n4"), servers=("n5", "n6"), batch_size=16, learning_rate=0.1, policy="asp")
SPEED = {
    "fixed": 1.0,
    "random_search": 1.1,
    "best_fixed": 0.42,
    "tpe": 0.85,
    "cruise": 0.62,
    "bsp": 1.6,
    "ssp": 0.9,
    "dssp": 0.88,
    "rlp": 0.5,
}
SCENARIO_TEXT = """name = "digits"
summary = "Digits on ten nodes, three of them stragglers"
budget_seconds = 600.0

[target]
metric = "accuracy"
value = 0.95
"""


_BUDGET = 600.0  # seconds


def score_row(scenario, tuner, seed, seconds, *, budget=_BUDGET, status=None, reason="", setting=START, **more):
    reached = seconds < budget and status is None
    return {
        "scenario": scenario,
        "tuner": tuner,
        "seed": seed,
        "status": status or ("target" if reached else "budget"),
        "reason": reason or ("" if reached else f"The target accuracy 0.95 was not reached in {budget:g} s."),
        "completion_seconds": float(min(seconds, budget)) if reached else budget,
        "budget_seconds": budget,
        "reached": reached,
        "reconfigurations": 0,
        "overhead_seconds": 0.0,
        "slow_seconds": 0.0,
        "bytes_moved": 0.0,
        "trial_seconds": 0.0,
        "clocks": 1000,
        "rejected": 0,
        "final_loss": 0.3,
        "final_accuracy": 0.95,
        "final_setting": setting_text(setting),
        "final_workers": len(setting.workers),
        "branches_peak": 1,
        "branch_bytes_peak": 2e6,
        "machine_seconds": 6.0 * min(seconds, budget),
        "usd": math.nan,
        "budget_usd": math.nan,
        "minimise": "seconds",
    } | more


def frames(scores, evaluations=(), settings=(), host=None):
    """Results of rows; thinking seconds are 0.5 where `host` is not given."""
    rows = sorted(scores, key=lambda r: (r["scenario"], r["tuner"], r["seed"]))
    keys = [{k: r[k] for k in ("scenario", "tuner", "seed")} for r in rows]
    measured = (
        [k | {"thinking_seconds": 0.5, "wall_seconds": 1.0, "machine": "a machine, 2 cores"} for k in keys]
        if host is None
        else host
    )
    manifest = {
        "harness": "0.1.0",
        "schema": VERSION,
        "scenarios": sorted({r["scenario"] for r in rows}),
        "tuners": sorted({r["tuner"] for r in rows}),
        "seeds": len({r["seed"] for r in rows}),
        "seeds_of": {
            name: len({r["seed"] for r in rows if r["scenario"] == name}) for name in {r["scenario"] for r in rows}
        },
    }
    return Results(
        manifest,
        pl.DataFrame(rows, schema=SCORES),
        pl.DataFrame(list(evaluations), schema=EVALUATIONS),
        pl.DataFrame(list(settings), schema=SETTINGS),
        pl.DataFrame(measured, schema=HOST),
    )


def from_times(times):
    """Results of {tuner: [completion seconds per seed]}; NaN stands for a failed run, infinity for a censored one."""
    rows = [
        score_row("digits", tuner, seed, t, **({"status": "error", "reason": "it broke"} if math.isnan(t) else {}))
        for tuner, column in times.items()
        for seed, t in enumerate(column)
    ]
    return frames(rows)


def contest(scenarios=("digits",), tuners=tuple(SPEED), seeds=5):
    """A plausible comparison: a shared factor per seed, curves that approach 0.97, tuners that change their knobs."""
    scores, evaluations, settings = [], [], []
    for s, scenario in enumerate(scenarios):
        factors = np.random.default_rng(s).lognormal(sigma=0.25, size=seeds)
        for tuner in tuners:
            rng = np.random.default_rng([s, sum(map(ord, tuner))])
            for seed in range(seeds):
                seconds = 260 * SPEED.get(tuner, 1.0) * factors[seed] * rng.lognormal(sigma=0.06)
                key = {"scenario": scenario, "tuner": tuner, "seed": seed}
                changes = list(_changes(tuner, rng, seconds))
                score = score_row(scenario, tuner, seed, seconds, setting=changes[-1][1], reconfigurations=len(changes) - 1)
                score |= {"overhead_seconds": 2.4 * (len(changes) - 1), "final_accuracy": 0.95 + 0.005 * rng.random()}
                if tuner == "rlp" and seed == 3:
                    score = score_row(
                        scenario, tuner, seed, _BUDGET, status="error", reason="ZeroDivisionError: division by zero"
                    )
                    changes = changes[:1]
                scores.append(score)
                settings += [key | {"seconds": at, "setting": setting_text(x)} for at, x in changes]
                evaluations += _curve(key, score["completion_seconds"], seconds, rng)
    return frames(scores, evaluations, settings)


def _changes(tuner, rng, seconds):
    base = replace(START, policy=tuner) if tuner in ("bsp", "dssp") else START
    base = replace(base, policy="ssp", staleness=3) if tuner == "ssp" else base
    yield 0.0, base
    if tuner in ("random_search", "tpe", "rlp"):
        for k in range(1, 6):
            rate = float(np.exp(rng.uniform(np.log(0.01), np.log(1.0))))
            policy = ("bsp", "asp", "ssp")[int(rng.integers(3))]
            yield k * seconds / 9, replace(base, learning_rate=rate, policy=policy, staleness=2 * (policy == "ssp"))
    if tuner == "cruise":
        yield 30.0 + 4 * rng.random(), replace(base, workers=(*START.workers, "n5"), servers=("n6",))


def _curve(key, until, seconds, rng):
    at = np.arange(0.0, until + 1e-9, max(seconds / 40, 1.0))
    accuracy = 0.97 - 0.87 * np.exp(-3.77 * at / seconds) + rng.normal(scale=0.004, size=at.size)
    loss = 2.3 * np.exp(-2.2 * at / seconds) * rng.lognormal(sigma=0.03, size=at.size)
    rows = zip(at.tolist(), accuracy.tolist(), loss.tolist(), strict=True)
    return [key | {"seconds": t, "clocks": int(20 * t), "loss": x, "accuracy": min(a, 1.0)} for t, a, x in rows]


def calibrated_toml(**draws):
    """A file as `harness calibrate` writes it, of the workload and node type "toy", with `draws` of constants by name."""
    noted = "".join(f"{name} = {list(values)}\n" for name, values in draws.items())
    return f"""[calibration]
source = "made up"

[profiles.toy]
cores = 4
memory_bytes = 64e9
nic_bytes_per_second = 1e6
devices = [{{ kind = "cpu", speed = 1.0 }}]
source = "made up"

[workloads.toy]
summary = "a toy"
source = "made up"
batch_size = 16

[workloads.toy.demand]
model_bytes = 1e4
sample_seconds = 0.02

[scenario.toy.cluster]
latency_seconds = 0.002

[scenario.toy.conditions]
jitter = 0.1

[calibration.workloads.toy]
rows = 12
node_types = ["toy"]

[calibration.workloads.toy.draws]
{noted}"""


def folder_of(results, path):
    """A results folder without the files of single runs."""
    (path / "scenarios").mkdir(parents=True)
    for name in results.manifest["scenarios"]:
        (path / "scenarios" / f"{name}.toml").write_text(SCENARIO_TEXT)
    (path / "manifest.json").write_text(json.dumps(results.manifest))
    for frame, name, schema in (
        (results.scores, "scores", SCORES),
        (results.evaluations, "evaluations", EVALUATIONS),
        (results.settings, "settings", SETTINGS),
    ):
        store.write(frame, path / f"{name}.parquet", schema)
    store.write_host(results.host, path / "host.csv")
    return path
