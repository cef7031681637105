"""A comparison: every tuner on every scenario on the same seeds, in parallel processes, one folder per run.

A run's folder is renamed into place when it is complete. So a comparison can be interrupted at any time and continued with
`resume`, and it ends with the same bytes. Only `host.csv` (thinking and wall seconds) differs from host to host. A run that
fails is a row with a reason; a run whose process died is repeated on resume. Resuming may also add scenarios, tuners and
seeds: only the runs that are new are made.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from harness.comparison import oracle, oracle_cache, pool, results
from harness.comparison.run_process import Done, Progress, Task, save
from harness.families import members, single
from harness.scenario import Scenario, building, load, matching
from harness.scenario.tables import MOST_SEEDS
from harness.score import unplayed
from harness.version import HARNESS_VERSION
from traces import store
from traces.schema import VERSION
from tuners import Entry, resolve

__all__ = ["Event", "Finished", "Planned", "RunKey", "Underway", "Work", "check_each_once", "compare"]

_CPU = "cpu"
_MAY_GROW = {"scenarios", "tuners", "oracles", "seeds", "seeds_of", "draws"}  # entries of a manifest, on resume
_UNLESS_GIVEN: dict[str, Any] = {"draws": {}}  # of entries that a manifest may leave out


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
    record: bool = False,
    calibration_draws: int = 0,
    watch: Callable[[Event], None] = lambda _: None,
    system: str = "harness.scenario:system",
    work: Work | None = None,
) -> None:
    """Score `tuners` on `scenarios`, on each scenario's own number of seeds or on `seeds`, and write the results to `out`.

    A tuner is a name or an `Entry`, which can hold a function of the caller's; cloudpickle sends it to the processes.
    `jobs` runs are made at a time on this machine, or, if `address` names a Ray cluster, one on each of its cores. JAX
    computes on `device` (cpu, cuda, rocm, tpu); results on another device may differ in a gradient's last digit. With
    `record`, every run also writes a trace. Each scenario is also played under so many `calibration_draws`, draws of its
    calibrated constants, on the same seeds. `watch` is called with every event. `system` names a function of (scenario,
    seed, start) that makes the system. `work` makes the runs in another way: live ones, for example. Raises ValueError,
    before anything is run or written, if a scenario, tuner or cluster does not exist or does not fit, or if the folder
    contains something else; OSError if the disk is full; RuntimeError if no worker process can be started. Runs that are
    finished by then are kept.
    """
    if jobs < 1:
        raise ValueError(f"Cannot use {jobs} jobs: give at least 1.")
    # Before the plan, which may play reference runs of drawn scenarios for minutes.
    _check_folder(out, resume=resume)
    plan = _planned(scenarios, tuners, seeds, system, calibration_draws, record=record)
    if device != _CPU:
        _check_device(device, address)
    manifest = _manifest(plan, seeds) | ({"device": device} if work is None else {"system": "live"})
    pool_ = _pool(jobs, address, device) if work is None else nullcontext(work)
    with pool_ as made, _claimed(out, manifest, plan, resume=resume):
        left = [t for t in plan.tasks if not _made(out, t)]
        runs = len(plan.tasks)
        contestants = tuple(e.name for e in plan.entries if e.contestant)
        try:
            while True:
                keys = tuple(RunKey(t.scenario, t.tuner, t.seed) for t in left)
                watch(Planned(runs, runs - len(left), keys, contestants))
                _make(left, out, made, watch, {s.name: s for s in plan.scenarios}, cached=work is None and device == _CPU)
                # What the contestants ended with, and what was found so far, tells the oracles what to try next.
                if not (left := [t for t in _oracle_tasks(plan, out, record=record, system=system) if not _made(out, t)]):
                    break
                runs += len(left)
        finally:
            # Also after an interruption or a full disk: the tables then have the runs that are finished.
            _clean(out)
            results.assemble(out)


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
    placed = [_with_folder(out, t, i) for i, t in enumerate(tasks)]
    left = []
    for task in placed:
        if (known := oracle_cache.get(task) if cached else None) is None:
            left.append(task)
        else:
            _keep(out, task, known)
            watch(Finished(RunKey(task.scenario, task.tuner, task.seed), known))
    for task, message in work(left):
        run = RunKey(task.scenario, task.tuner, task.seed)
        if isinstance(message, Progress):
            watch(Underway(run, message))
            continue
        done = message if isinstance(message, Done) else _died(task, message.reason, scenarios[task.scenario])
        if cached and isinstance(message, Done):
            oracle_cache.put(task, done)
        _keep(out, task, done)
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
    from harness import ray_cluster
    from harness.comparison import ray_pool  # here, because importing Ray takes a second

    with ray_cluster.joined(address):
        yield ray_pool.work


# ----------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class _Plan:
    scenarios: tuple[Scenario, ...]
    entries: tuple[Entry, ...]
    counts: dict[str, int]  # seeds of each scenario
    draws: dict[str, list[str]]  # by scenario: those that differ from it in a draw of its calibrated constants
    entries_of: dict[str, tuple[Entry, ...]]  # by scenario: those that are played there
    tasks: tuple[Task, ...]


def check_each_once(what: str, names: Sequence[str]) -> None:
    """Raise ValueError where a name, of what `what` says, is given twice."""
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"Cannot compare {what} {twice[0]!r} with itself: name each once, and files by different names.")


def _planned(
    scenarios: Sequence[str | Path | Scenario],
    tuners: Sequence[str | Entry],
    seeds: int | None,
    system: str,
    calibration_draws: int,
    *,
    record: bool,
) -> _Plan:
    if not scenarios or not tuners:
        raise ValueError("Cannot compare nothing: name at least one scenario and one tuner.")
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        advice = "at least 1" if seeds < 1 else f"at most {MOST_SEEDS}"
        raise ValueError(f"Cannot compare on {seeds} seeds: give {advice}.")
    if calibration_draws < 0:
        raise ValueError(f"Cannot draw constants {calibration_draws} times: give at least 1, or 0 for none.")
    entries = tuple(t if isinstance(t, Entry) else resolve(t) for t in tuners)
    given = [s if isinstance(s, Scenario) else load(s) for many in scenarios for s in _each(many)]
    drawn = {s.name: list(_drawn(s, calibration_draws)) for s in given} if calibration_draws else {}
    loaded = tuple(each for s in given for each in (s, *drawn.get(s.name, ())))
    check_each_once("scenario", [s.name for s in loaded])
    check_each_once("tuner", [e.name for e in entries])
    counts = {s.name: seeds or s.seeds.count for s in loaded}
    draws = {name: [s.name for s in each] for name, each in drawn.items()}
    # Draws are there to compare contestants; the oracle of each would be a search of its own.
    contestants = tuple(e for e in entries if e.contestant)
    entries_of = {s.name: entries for s in loaded} | {name: contestants for each in draws.values() for name in each}
    tasks = [t for s in loaded for t in _tasks(s, entries_of[s.name], counts[s.name], system, record=record)]
    # First seed 0 of all scenarios and tuners, then seed 1: an interrupted comparison can be compared, too.
    return _Plan(loaded, entries, counts, draws, entries_of, tuple(sorted(tasks, key=lambda t: t.seed)))


def _drawn(scenario: Scenario, count: int) -> Iterator[Scenario]:
    """The scenario under each of so many draws of its calibrated constants. Raises ValueError where it has none."""
    if scenario.draw:
        raise ValueError(f"Cannot draw constants of {scenario.name!r}: it is a draw itself. Name the scenario without one.")
    for number in range(1, count + 1):
        yield building.scenario(scenario, name=f"{scenario.name}+draw{number}", calibration={"draw": number})


def _each(scenario: str | Path | Scenario) -> Sequence[str | Path | Scenario]:
    """The scenarios that a text means: each member of "drawn:FAMILY[0:20]", those of a pattern, or itself."""
    if isinstance(scenario, Scenario):
        return [scenario]
    kind, _, which = str(scenario).partition(":")
    return [single(name) for name in members(which)] if kind == "drawn" else matching(str(scenario))


def _tasks(scenario: Scenario, entries: Sequence[Entry], seeds: int, system: str, *, record: bool) -> Iterator[Task]:
    """The contestants' runs, and those that an oracle wants whatever the contestants do."""
    given = _given(scenario, system, record=record)
    for entry in entries:
        if entry.contestant:
            pickled = _pickled(entry)
            for seed in range(seeds):
                yield Task(**given, seed=seed, tuner=entry.name, plays=entry.name, pickled=pickled)
        else:
            for name, start, seed in oracle.first(scenario, entry.name, seeds):
                yield Task(**given, seed=seed, tuner=name, plays="fixed", start=start)


def _oracle_tasks(plan: _Plan, out: Path, *, record: bool, system: str) -> Iterator[Task]:
    """The runs that the oracles want next, when all others are in place."""
    contestants = [e.name for e in plan.entries if e.contestant]
    for scenario in plan.scenarios:
        for entry in plan.entries_of[scenario.name]:
            if not entry.contestant:
                wanted = oracle.wanted(out, scenario, entry.name, contestants, plan.counts[scenario.name])
                for name, start, seed in wanted:
                    given = _given(scenario, system, record=record)
                    yield Task(**given, seed=seed, tuner=name, plays="fixed", start=start)


def _given(scenario: Scenario, system: str, *, record: bool) -> dict[str, Any]:
    """What all tasks of a scenario have."""
    given: dict[str, Any] = {"scenario": scenario.name, "origin": str(scenario.origin), "text": scenario.text}
    return given | {"system": system, "folder": "", "record": record}


def _pickled(entry: Entry) -> bytes:
    """The function that the entry holds, as bytes; b"" if it names one. Raises ValueError if it cannot be sent."""
    if entry.given is None:
        return b""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(entry.given)
    except Exception as error:
        raise ValueError(
            f"Cannot send tuner {entry.name!r} to other processes ({type(error).__name__}: {error}): it refers to something "
            "that cannot be copied. Open files, locks and connections inside the function."
        ) from None
    return pickled


def _manifest(plan: _Plan, seeds: int | None) -> dict[str, Any]:
    return {
        "harness": HARNESS_VERSION,
        "schema": VERSION,
        "scenarios": [s.name for s in plan.scenarios],
        "tuners": [e.name for e in plan.entries],
        "oracles": [e.name for e in plan.entries if not e.contestant],
        "seeds": seeds or max(plan.counts.values()),
        "seeds_of": plan.counts,
    } | ({"draws": plan.draws} if plan.draws else {})


# --------------------------------------------------------------------------------------------------------------- folder


def _check_folder(out: Path, *, resume: bool) -> bool:
    """Whether `out` has no results yet. Raises ValueError where it is a file, or has some and is not to be resumed."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"Cannot write results to {out}: it is a file. Name a folder with --out.")
    # A comparison that was killed before it wrote its manifest has run nothing yet: its folder counts as new.
    fresh = not out.is_dir() or {p.name for p in out.iterdir()} <= {"scenarios"}
    if not fresh and not resume:
        raise ValueError(
            f"Cannot write results to {out}: it is there already. Go on with it by --resume, or name another with --out."
        )
    return fresh


@contextmanager
def _claimed(out: Path, manifest: dict[str, Any], plan: _Plan, *, resume: bool) -> Iterator[None]:
    """Create the folder `out`, or check that its results belong to this comparison; lock it meanwhile."""
    fresh = _check_folder(out, resume=resume)
    if not fresh:
        _check_goes_on(out, manifest, plan)
    try:
        (out / "scenarios").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot write results to {out}: {error.strerror}. Name another folder with --out.") from None
    # A lock on the folder itself leaves no lock file behind, and the system releases it if this process is killed.
    lock = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"Cannot write results to {out}: another comparison is writing there. Wait for its end.") from None
    try:
        for scenario in plan.scenarios:
            if not (kept := _kept(out, scenario)).exists():
                store.write_bytes(kept, scenario.text.encode())
        if fresh or _read_manifest(out) != manifest:
            store.write_bytes(out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        _clean(out)
        yield
    finally:
        os.close(lock)


def _check_goes_on(out: Path, manifest: dict[str, Any], plan: _Plan) -> None:
    """Raise ValueError unless the results in `out` are a part of this comparison."""
    found = _read_manifest(out)
    for key in {**manifest, **found}:
        before, wanted = found.get(key, _UNLESS_GIVEN.get(key)), manifest.get(key)
        if not (_within(before, wanted) if key in _MAY_GROW else before == wanted):
            if key in _MAY_GROW:
                way = "Give these, too: resuming adds scenarios, tuners and seeds, and leaves none out"
            else:
                way = "Use that version" if key in ("harness", "schema") else "Give the same arguments"
            raise ValueError(
                f"Cannot go on with {out}: it was made with {key} {before}, and this is {wanted}. "
                f"{way}, or name another folder with --out."
            )
    for scenario in plan.scenarios:
        kept = _kept(out, scenario)
        if scenario.name in found["scenarios"] and not (kept.is_file() and kept.read_text("utf-8") == scenario.text):
            raise ValueError(
                f"Cannot go on with {out}: scenario {scenario.name!r} has changed since. Name another folder with --out, "
                f"or go back to the scenario as it is in {kept}."
            )


def _read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of the folder; a simulated comparison that wrote no device used the CPU."""
    found = store.read_manifest(out)
    return found if "system" in found else {"device": _CPU} | found


def _within(found: Any, wanted: Any) -> bool:
    """Whether `found` is a part of `wanted`, both values of a manifest: numbers, lists of names, or tables of these."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(k in wanted and _within(v, wanted[k]) for k, v in found.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and set(found) <= set(wanted)
    return isinstance(found, int) and isinstance(wanted, int) and found <= wanted


def _kept(out: Path, scenario: Scenario) -> Path:
    """The scenario's file in the folder."""
    return out / "scenarios" / f"{scenario.name}.toml"


def _place(out: Path, task: Task) -> Path:
    return results.run_folder(out, task.scenario, task.tuner, task.seed)


def _made(out: Path, task: Task) -> bool:
    """Whether the run is complete. A run whose process died is not: its folder is deleted."""
    folder = _place(out, task)
    if (folder / results.DIED).exists():
        shutil.rmtree(folder)
    return folder.is_dir()


def _with_folder(out: Path, task: Task, index: int) -> Task:
    """The task with a folder to write to, on the same disk as the results, so that it can be renamed into place."""
    name = f"{quote(task.tuner, safe='')}-{task.seed}-{index}"
    return replace(task, folder=str(out.absolute() / "unfinished" / name))


def _died(task: Task, reason: str, scenario: Scenario) -> Done:
    """Write the row of a run whose process died."""
    folder = Path(task.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names: dict[str, Any] = {"scenario": task.scenario, "tuner": task.tuner, "seed": task.seed}
    limits: dict[str, Any] = {"budget_seconds": scenario.budget.seconds, "minimise": scenario.target.minimise}
    row = unplayed("error", reason, **names, **limits)
    save(folder, row)
    store.write_bytes(folder / results.DIED, b"")
    return Done("error", reason, scenario.budget.seconds, float("nan"), float("nan"))


def _keep(out: Path, task: Task, done: Done) -> None:
    """Move a finished run into place. Its host seconds are written first, so that every run in place has them."""
    results.add_host(out, task.scenario, task.tuner, task.seed, done.thinking_seconds, done.wall_seconds, done.machine)
    place = _place(out, task)
    place.parent.mkdir(parents=True, exist_ok=True)
    Path(task.folder).rename(place)


def _clean(out: Path) -> None:
    shutil.rmtree(out / "unfinished", ignore_errors=True)
