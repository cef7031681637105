"""Which constants a recording determines; the others are refused, with the measurement that would determine each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import f

from simulators.calibration.least_squares import LEAST_NOISE, SHARES, TimesProblem, TimesSolution
from simulators.calibration.model import Constants
from simulators.calibration.recorded.row import Row, WorkerTime

__all__ = ["fit_determined", "fittable", "scaled_samples"]

_WIDE = math.log(10.0) / 1.96  # standard error of a logarithm at which the interval is an order of magnitude either way
_ANY = 1e3  # an interval that is wider either way tells nothing
_CONTRADICTED = 0.99  # probability at which rows contradict that machines of any speed take equally long for a part
_LEAST_ERROR = 0.003  # relative, of the median of a worker's times, at least
_NEEDED = 1.5  # an uncertain constant stays if the cost without it is more than so many times the cost with it

# The measurement that would determine each constant, in the order in which uncertain constants are dropped.
_MEASUREMENTS: dict[str, str] = {
    "apply_exponent": "the same job on one, two and many servers, with enough workers to keep all of them busy",
    "delay_messages": "the same job with a link delayed and without, and how long the delay was",
    "commit_seconds": "the same job on one, two and three servers, with few and with many workers",
    "master_sample_seconds": "synchronous runs at two batch sizes or more, besides asynchronous ones at two",
    "latency_seconds": "iterations with seconds of pulls and pushes, of a model small enough to take no time",
    "service_bytes_per_second": "iterations with seconds of pulls while many workers pull from one server",
    "serial_fraction": "two batch sizes under each of two counts of threads",
    "step_seconds": "synchronous runs on one, two and many servers, or synchronous and asynchronous ones",
    "message_seconds": "the same job on few and on many servers",
    "apply_seconds": "the same job on one server with few and with many workers",
    "transfer": "iterations with seconds of pulls and pushes, or runs with and without barriers on one and more servers",
    "fixed_seconds": "two batch sizes at least, or two counts of threads",
    "sample_seconds": "mini-batches so large that computing takes a good part of a cycle",
    "switch_bytes_per_second": "iterations with seconds of pulls and pushes while many workers use one server and many",
    "apply_growth": "the same job on one server with one, two and many workers",
}


def fittable(rows: Sequence[Row], given: Constants, without: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The constants that a fit of `rows` begins with, except `without`, and those that are refused at once, with reasons.

    Transfers determine only the ratio of the model's size to the NIC's rate: that of the two is fitted which is not `given`.
    """
    transfer = "nic_bytes_per_second" if given.model_bytes else "model_bytes"
    absent = {"switch_bytes_per_second"} if given.switch == "none" else set[str]()
    absent |= set() if given.updates_grow else {"apply_growth"}
    names = {name: transfer if name == "transfer" else name for name in _MEASUREMENTS if name not in absent}
    why = {names[name]: why for name, why in _not_measured(rows).items() if name in names}
    refused = {name: said for name, said in why.items() if name not in without}
    return [name for name in names.values() if name not in refused and name not in without], refused


def _not_measured(rows: Sequence[Row]) -> dict[str, str]:
    """Constants whose knob did not vary, or whose time was not recorded, and the reason for each."""
    vary = {name: len({getattr(r, name) for r in rows}) > 1 for name in ("intra_threads", "servers", "workers")}
    vary["batch_size"] = len({size for r in rows for size in r.batches}) > 1
    parts = any(r.has_parts for r in rows)
    barrier = {r.barrier for r in rows}
    refused = {}

    def refuse(name: str, why: str) -> None:
        refused[name] = f"{why}: record {_MEASUREMENTS[name]}"

    if not (vary["batch_size"] or vary["intra_threads"]):
        refuse("fixed_seconds", "neither batch size nor threads ever varied")
    if not (vary["batch_size"] and vary["intra_threads"]):
        refuse("serial_fraction", "batch size and threads did not both vary")
    if len({r.delays for r in rows}) < 2:
        refuse("delay_messages", "no link was delayed in some runs and not in others")
    if not vary["servers"]:
        refuse("message_seconds", "the number of servers never varied")
    if not (vary["servers"] and vary["workers"]):
        refuse("commit_seconds", "the numbers of servers and of workers did not both vary")
    if not (vary["servers"] or vary["workers"] or parts):
        refuse("apply_seconds", "neither workers nor servers ever varied, and pushes were not timed")
    if len({r.servers for r in rows}) < 3:
        refuse("apply_exponent", "there are fewer than three numbers of servers")
    if not parts and not (barrier == {True, False} and vary["servers"] and vary["workers"]):
        # At a barrier, pulls, pushes and updates of all workers follow each other; without one they overlap.
        refuse("transfer", "transfers were not timed, and no runs with and without a barrier tell them")
    if len({r.workers for r in rows}) < 3:
        refuse("apply_growth", "there are fewer than three numbers of workers")
    if not parts:
        refuse("switch_bytes_per_second", "transfers were not timed")
        refuse("latency_seconds", "transfers were not timed")
        refuse("service_bytes_per_second", "transfers were not timed")
    if True not in barrier or (barrier == {True} and len({r.servers for r in rows}) < 3):
        refuse("step_seconds", "no synchronous runs on three numbers of servers, or beside asynchronous ones, were recorded")
    if barrier != {True, False} or len({r.batch_size for r in rows if r.barrier}) < 2:
        refuse("master_sample_seconds", "no synchronous runs of two batch sizes were recorded beside asynchronous ones")
    return refused


def _measurement(name: str) -> str:
    return _MEASUREMENTS["transfer" if name in ("model_bytes", "nic_bytes_per_second") else name]


def fit_determined(
    problem: TimesProblem, free: Sequence[str], refused: Mapping[str, str], rounds: int | None = None
) -> tuple[TimesSolution, dict[str, str]]:
    """The fit of those `free` constants that the recording determines, and all refused constants with their reasons.

    At the end the closed form is corrected to the engine in so many `rounds`, as in `TimesProblem.corrected`.

    Uncertain constants are dropped one by one: the one whose absence increases the cost least; of several with about the
    same increase, the first in the order of `_MEASUREMENTS`.
    """
    left, out = list(free), dict(refused)
    if not problem.given.in_transfers and "latency_seconds" in left:
        left.remove("latency_seconds")
        out["latency_seconds"] = f"it is recorded with the seconds of computing: record {_measurement('latency_seconds')}"
    solved = problem.begun(left)
    problem = solved.problem
    while len(left) > 1:
        errors = solved.standard_errors()
        doubtful = [name for name in left if errors[name] > _WIDE]
        if not doubtful:
            break
        idle = [name for name in doubtful if problem.cost(solved.constants, name) <= solved.cost + LEAST_NOISE**2]
        if len(idle) > 1 or (idle and len(doubtful) > 1):
            # The cost does not rise even without fitting the others again, so no new fit is needed.
            worst = idle[0]
            out[worst] = _why_uncertain(solved, worst, errors[worst])
            left.remove(worst)
            solved = problem.dropping(solved, worst)
            continue
        without = {name: problem.solve([n for n in left if n != name], solved) for name in doubtful}
        least = min(s.cost for s in without.values())
        if least > _NEEDED * solved.cost + LEAST_NOISE:
            break
        worst = next(name for name in doubtful if without[name].cost <= 1.02 * least + LEAST_NOISE**2)
        out[worst] = _why_uncertain(solved, worst, errors[worst])
        left.remove(worst)
        solved = without[worst]
    if "model_bytes" in out:  # it stays 0
        out["model_bytes"] += "; until then pulls and pushes take no time, unless --model-bytes says otherwise"
    return problem.corrected(solved, rounds), out


def _why_uncertain(solved: TimesSolution, name: str, error: float) -> str:
    if name in SHARES:
        return f"it lies anywhere from 0 to 1: record {_measurement(name)}"
    span = math.exp(min(1.96 * error, 50.0))
    if span > _ANY:
        return f"recorded times hardly depend on it: record {_measurement(name)}"
    value = getattr(solved.constants, name)
    return f"it lies anywhere from {value / span:.1g} to {value * span:.1g}: record {_measurement(name)}"


def _machine(row: Row, timed: WorkerTime) -> tuple[str, str]:
    """The machine of a worker: the same in all runs that name it; else another one in each run."""
    is_named = timed.machine.rpartition("/")[2] not in ("", str(timed.worker))
    return ("", timed.machine) if is_named else (row.run, str(timed.worker))


def scaled_samples(rows: Sequence[Row]) -> tuple[float, bool]:
    """How many samples take as long as the part of computing that slower workers take longer for, whatever the mini-batch;
    and whether the rows tell it: not where that may be all of what does not grow with the mini-batch, or nothing of it.

    Worker w takes c + k_w (n + s) seconds for n samples: c on any machine, s samples' time on its own. Each worker's times
    are a line over n, and c and s are told by how the lines of slow workers differ from those of fast ones. A machine that
    several runs name is the same worker in all of them, as where each run has one size of mini-batches. s is 0 unless
    the rows contradict that (an F-test, 99 %): many recordings have one size of mini-batches, or machines that are alike.
    """
    told = [
        (row, t) for row in rows if not row.batch_sizes and len(row.worker_times) == row.workers for t in row.worker_times
    ]
    if not any(row.speeds for row, _ in told) or len({row.intra_threads for row, _ in told}) > 1:
        return 0.0, True
    names = {key: i for i, key in enumerate(dict.fromkeys(_machine(row, t) for row, t in told))}
    who = np.array([names[_machine(row, t)] for row, t in told])
    samples = np.array([float(row.batch_size) for row, _ in told])
    seconds = np.array([t.seconds for _, t in told])
    errors = np.maximum([t.error for _, t in told], _LEAST_ERROR * seconds)
    spare = len(told) - len(names) - 2
    if spare < 1 or len({*samples}) < 2:
        return 0.0, False

    def fitted(*, alone: bool, scaled: bool) -> tuple[float, float]:
        """The sum of squares, and s: with a part that is the same `alone`, and with one that is `scaled` by speed."""

        def off(at: NDArray[np.float64]) -> NDArray[np.float64]:
            taken: NDArray[np.float64] = at[0] * alone + np.exp(at[2:])[who] * (samples + at[1] * scaled)
            apart: NDArray[np.float64] = (taken - seconds) / errors
            return apart

        least, most = float(seconds.min()), float(samples.max())
        start = np.array(
            [
                0.3 * least,
                0.3 * float(samples.min()),
                *np.log(0.5 * np.array([np.median(seconds[who == i] / samples[who == i]) for i in range(len(names))])),
            ]
        )
        bounds = ([0.0, 0.0, *[-np.inf] * len(names)], [least, 100 * most, *[np.inf] * len(names)])
        found = least_squares(off, start, bounds=bounds, x_scale=np.array([least, most, *[1.0] * len(names)]))
        return 2 * float(found.cost), float(found.x[1])

    (both, s), (fixed, _) = (fitted(alone=True, scaled=scaled) for scaled in (True, False))
    # What disturbs a row is in the times of all its workers: together they tell no more than one (design effect, Kish 1965).
    alike = len(told) / len({id(row) for row, _ in told})
    clear = max(both / spare, 1.0) * alike * float(f.ppf(_CONTRADICTED, 1, spare))
    if fixed - both > clear:
        return s, True
    own, _ = fitted(alone=False, scaled=True)
    return 0.0, own - both > clear
