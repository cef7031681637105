"""A comparison: every tuner on every scenario on the same seeds, in parallel processes, one folder per run.

A run's folder is renamed into place when it is complete. So a comparison can be interrupted at any time and continued with
`resume`, and it ends with the same bytes. Only `host.csv` (thinking and wall seconds) differs from host to host. A run that
fails is a row with a reason; a run whose process died is repeated on resume. Resuming may also add scenarios, tuners and
seeds: only the runs that are new are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness.comparison import oracle_cache, pool, results, results_folder
from harness.comparison.own_files import digests_of_scenarios, digests_of_tuners
from harness.comparison.plan import oracle_tasks, planned
from harness.comparison.run_process import Done, Progress, Task
from harness.scenario import Scenario, workload_of
from tuners import Entry, resolve

__all__ = ["Event", "Finished", "Planned", "RunKey", "Underway", "Work", "compare"]

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identifies one run of a comparison."""

    scenario: str
    tuner: str
    seed: int


@dataclass(frozen=True, slots=True)
class Planned:
    """The comparison starts."""

    runs: int
    made_before: int  # of these, complete already in the results folder
    left: tuple[RunKey, ...] = ()  # the others, in the order in which they are made
    contestants: tuple[str, ...] = ()  # the tuners, without references that are chosen in hindsight


@dataclass(frozen=True, slots=True)
class Underway:
    """A run reports its progress."""

    run: RunKey
    progress: Progress


@dataclass(frozen=True, slots=True)
class Finished:
    """A run is over, and its files are in place."""

    run: RunKey
    done: Done


Event: TypeAlias = Planned | Underway | Finished
Work: TypeAlias = Callable[[Sequence[Task]], Iterator[tuple[Task, Progress | Done | pool.Died]]]
"""Makes runs, and writes the files of each to the folder of its task."""


def compare(
    scenarios: Sequence[str | Path | Scenario],
    tuners: Sequence[str | Entry],
    *,
    out: Path,
    seeds: int | None = None,
    jobs: int = 1,
    address: str = "",
    device: str = "cpu",
    resume: bool = False,
    replace: Sequence[str] = (),
    record: bool = False,
    calibration_draws: int = 0,
    watch: Callable[[Event], None] = lambda _: None,
    system: str = "harness.scenario:system",
    work: Work | None = None,
) -> None:
    """Score `tuners` on `scenarios`, on each scenario's own number of seeds or on `seeds`, and write the results to `out`.

    A tuner is a name or an `Entry`, which can hold a function of the caller's; cloudpickle sends it to the processes.
    `jobs` runs are made at a time on this machine, or, if `address` names a Ray cluster, one on each of its cores. With
    `resume`, runs of the tuners that `replace` names are made again, because their code has changed. JAX computes on
    `device` (cpu, cuda, rocm, tpu); results on another device may differ in a gradient's last digit. With `record`, every
    run also writes a trace. Each scenario is also played under `calibration_draws` draws of its calibrated constants, on
    the same seeds. `watch` is called with every event. `system` names a function of (scenario, seed, start) that makes the
    system. `work` makes the runs in another way: live ones, for example. Raises ValueError, before anything is run or
    written, if a scenario, tuner or cluster does not exist or does not fit, or if the folder contains something else, runs
    of other code among it; OSError if the disk is full; RuntimeError if no worker process can be started. Runs that are
    finished by then are kept.
    """
    if jobs < 1:
        raise ValueError(f"Cannot use {jobs} jobs: give at least 1.")
    entries = tuple(t if isinstance(t, Entry) else resolve(t) for t in tuners)
    _check_replaced(replace, entries, resume=resume)
    # Before the plan, which may play reference runs of drawn scenarios for minutes.
    results_folder.check_folder(out, resume=resume)
    plan = planned(scenarios, entries, seeds, system, calibration_draws, record=record)
    if device != _CPU:
        _check_device(device, address)
    for scenario in plan.scenarios:
        if plan.own_models[scenario.name]:
            workload_of(scenario)  # tries the user's model
    manifest = plan.manifest(seeds) | ({"device": device} if work is None else {"system": "live"})
    own = {"own_tuners": digests_of_tuners(plan.entries), "own_files": digests_of_scenarios(plan.scenarios)}
    manifest |= {key: found for key, found in own.items() if found}
    pool_ = _pool(jobs, address, device) if work is None else nullcontext(work)
    with pool_ as made, results_folder.claimed(out, manifest, plan.scenarios, resume=resume, replace=replace):
        left = [t for t in plan.tasks if not results_folder.is_made(out, t)]
        runs = len(plan.tasks)
        try:
            while True:
                keys = tuple(RunKey(t.scenario, t.tuner, t.seed) for t in left)
                watch(Planned(runs, runs - len(left), keys, plan.contestants))
                _make(left, out, made, watch, {s.name: s for s in plan.scenarios}, cached=work is None and device == _CPU)
                # What the contestants ended with, and what was found so far, tells the oracles what to try next.
                wanted = oracle_tasks(plan, out, record=record, system=system)
                if not (left := [t for t in wanted if not results_folder.is_made(out, t)]):
                    break
                runs += len(left)
        finally:
            # Also after an interruption or a full disk: the tables then have the runs that are finished.
            results_folder.clean(out)
            results.assemble(out)


def _check_replaced(names: Sequence[str], entries: Sequence[Entry], *, resume: bool) -> None:
    """Raise ValueError unless the tuners whose runs are to be made again are compared, and are no references."""
    if names and not resume:
        raise ValueError(
            f"Cannot make the runs of {names[0]!r} again: --replace is for a folder that --resume goes on with."
        )
    contestants = [entry.name for entry in entries if entry.contestant]
    if strange := [name for name in names if name not in contestants]:
        raise ValueError(f"Cannot make the runs of {strange[0]!r} again: choose of {', '.join(contestants) or 'no tuners'}.")


def _make(
    tasks: Sequence[Task],
    out: Path,
    work: Work,
    watch: Callable[[Event], None],
    scenarios: dict[str, Scenario],
    *,
    cached: bool,
) -> None:
    """Make runs and move them into place; simulated ones of an oracle's settings come from the cache where it has them."""
    placed = [results_folder.with_folder(out, t, i) for i, t in enumerate(tasks)]
    left = []
    for task in placed:
        if (known := oracle_cache.get(task) if cached else None) is None:
            left.append(task)
        else:
            results_folder.move_into_place(out, task, known)
            watch(Finished(RunKey(task.scenario, task.tuner, task.seed), known))
    for task, message in work(left):
        run = RunKey(task.scenario, task.tuner, task.seed)
        if isinstance(message, Progress):
            watch(Underway(run, message))
            continue
        if isinstance(message, Done):
            done = message
        else:
            done = results_folder.write_died(task, message.reason, scenarios[task.scenario])
        if cached and isinstance(message, Done):
            oracle_cache.put(task, done)
        results_folder.move_into_place(out, task, done)
        watch(Finished(run, done))


def _check_device(device: str, address: str) -> None:
    """Raise ValueError unless a process of this machine can compute on `device`."""
    if address:
        raise ValueError(
            f"Cannot compute on {device!r} on a Ray cluster: its workers use the CPU. Leave --device or --address."
        )
    try:
        pool.WorkerProcess(device).stop()
    except RuntimeError as error:
        raise ValueError(f"Cannot compute on {device!r}: {error} Name one that JAX finds here, or leave --device.") from None


@contextmanager
def _pool(jobs: int, address: str, device: str) -> Iterator[Work]:
    """The function that makes the runs: in processes of this machine, or on a Ray cluster."""
    if not address:
        with closing(pool.WorkerPool(jobs, device)) as made:
            yield made.work
        return
    from harness.comparison import ray_pool  # here, because importing Ray takes a second
    from harness.machines import ray_cluster

    with ray_cluster.joined(address):
        yield ray_pool.work
