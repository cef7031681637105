"""The Python interface: `compare`, `play` and `deploy`, as `harness.compare` and so on.

Scenarios are names, files, or objects that `harness.scenario` has made. Tuners are names, with options in brackets, or
functions of a Job: also lambdas, closures and what a notebook's cell defines, which cloudpickle sends to other processes.
"""

from __future__ import annotations

import operator
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from harness import drive
from harness.comparison import compare as comparisons
from harness.comparison.answer import Comparison, comparison_in, temporary_folder
from harness.machines.machine import cores
from harness.scenario import Scenario, load, system
from harness.scenario.building import scenario
from harness.score import Score, ending, score
from traces.exchanges import Exchange
from traces.schema import EVALUATIONS, SETTINGS
from tuners import Entry, entry_of, resolve, resolve_contestant, split_names
from tuners import embedded as embedded_tuners
from tuners.actions import TunerFactory

if TYPE_CHECKING:
    from harness.cli.terminal.display import ProgressDisplay

__all__ = ["PlayedRun", "compare", "deploy", "load_results", "play", "scenario"]

_GivenScenario: TypeAlias = str | Path | Scenario
_GivenTuner: TypeAlias = str | TunerFactory


def compare(
    scenarios: _GivenScenario | Sequence[_GivenScenario] = "digits",
    tuners: _GivenTuner | Sequence[_GivenTuner] = "all",
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    address: str = "",
    out: str | Path | None = None,
    resume: bool = False,
    replace: str | Sequence[str] = (),
    record: bool = False,
    calibration_draws: int = 0,
    progress: bool = True,
) -> Comparison:
    """Score tuners on scenarios over paired seeds, in parallel processes, and return the results.

    Args:
        scenarios: one or more names, TOML files, or scenarios.
        tuners: one or more names or functions; "all" means every tuner that ships, and `best_fixed`.
        seeds: how many seeds; by default each scenario's own number.
        jobs: processes; by default one per core. Results do not depend on it.
        address: a Ray cluster that makes the runs: HOST:PORT, or "auto".
        out: folder for the results; by default they exist as long as the returned object.
        resume: continue the comparison in `out`, if there is one, also with more scenarios, tuners or seeds. Functions of
            a notebook are then taken to be what they were; a tuner in a file that has changed is refused.
        replace: with `resume`, names of tuners whose runs are made again, because their code has changed.
        record: write a trace for every run, too.
        calibration_draws: play scenarios of calibrated constants also under this many draws of them, to see which ranks
            hold.
        progress: show bars on a terminal, one line in a notebook.

    Raises ValueError, before anything is run, for names, options, functions and scenarios that cannot be used, and for an
    `out` that has other results; OSError if the disk is full; RuntimeError if processes cannot be started. Runs that are
    finished by then are kept in `out`. A run that fails is a row with a reason, and no exception.
    """
    chosen = _checked([scenarios] if isinstance(scenarios, str | Path | Scenario) else scenarios)
    entries = _entries([tuners] if isinstance(tuners, str) or callable(tuners) else tuners)
    seeds = None if seeds is None else _whole("seeds", seeds)
    jobs = cores() if jobs is None else _whole("jobs", jobs)
    with _results_folder(out) as folder:
        with _shown(progress) as watch:
            comparisons.compare(
                chosen,
                entries,
                out=folder,
                seeds=seeds,
                jobs=jobs,
                address=address,
                resume=resume,
                replace=[replace] if isinstance(replace, str) else replace,
                record=record,
                calibration_draws=_whole("calibration_draws", calibration_draws),
                watch=watch or (lambda _: None),
            )
        return comparison_in(folder, temporary=out is None)


def load_results(folder: str | Path) -> Comparison:
    """The comparison in a results folder, such as `harness compare` has written; of one that is unfinished, what there is.

    Raises ValueError where `folder` has no results.
    """
    return comparison_in(Path(folder))


@dataclass(frozen=True, slots=True, repr=False)
class PlayedRun:
    """One run of one tuner, in simulated time. Its text is one line; what happened is in the fields."""

    score: Score  # its row of the score table
    evaluations: pl.DataFrame  # columns: `traces.schema.EVALUATIONS`
    settings: pl.DataFrame  # columns: `traces.schema.SETTINGS`
    exchanges: tuple[Exchange, ...]  # every action of the tuner with its answer
    trace: str  # the traceback if the tuner failed, else ""

    def __repr__(self) -> str:
        """How the run ended."""
        seconds = self.exchanges[-1].seconds if self.exchanges else 0.0
        return f"{self.score.tuner} on {self.score.scenario}, seed {self.score.seed}: {ending(self.score, seconds)}"


def play(
    scenario: _GivenScenario = "digits",
    tuner: _GivenTuner = "fixed",
    *,
    seed: int = 0,
    watch: Callable[[Exchange], None] | None = None,
    thinking_limit_seconds: float = 600.0,
) -> PlayedRun:
    """Play one run in this process, so that a debugger can stop in the tuner; `watch` gets every exchange as it happens.

    A tuner that fails is a run with status "error", whose `trace` is the traceback. Raises ValueError for names that are
    unknown and scenarios that are not valid.
    """
    loaded, seed = _loaded(scenario), _seed(seed)
    entry = _contestant(tuner)
    played = drive.play(entry.factory, system(loaded, seed), watch=watch, thinking_limit_seconds=thinking_limit_seconds)
    scored = score(played, scenario=loaded.name, tuner=entry.name, seed=seed)
    rows = scored.rows()
    return PlayedRun(
        scored.score,
        pl.DataFrame(rows["evaluations"], schema=EVALUATIONS),
        pl.DataFrame(rows["settings"], schema=SETTINGS),
        played.exchanges,
        played.outcome.trace,
    )


def deploy(
    scenario: _GivenScenario,
    tuner: _GivenTuner = "fixed",
    *,
    out: str | Path | None = None,
    seed: int = 0,
    address: str | None = None,
    resume: bool = False,
) -> drive.Played:
    """Run a scenario's job on a parameter server of real processes, driven by a tuner; return how it went.

    The folder `out` (by default deployed/SCENARIO) gets the model, a checkpoint, the log of every exchange and a trace. A
    function as a tuner must be the same one if the job is resumed. Raises ValueError, before anything is started, for a job
    that cannot be deployed; RuntimeError for one that does not start.
    """
    from harness.cli.terminal.display import terminal
    from harness.live.deploy import deployment

    loaded, seed = _loaded(scenario), _seed(seed)
    entry = _contestant(tuner)
    folder = Path(out) if out is not None else Path("deployed") / loaded.name
    wanted = deployment.Deployment(loaded, entry, seed, folder, resume, deployment.LiveOptions(address))
    return deployment.deploy(wanted, terminal())


@contextmanager
def _results_folder(out: str | Path | None) -> Iterator[Path]:
    """The folder `out`, or a temporary one, which is deleted where the comparison fails."""
    if out is not None:
        yield Path(out)
        return
    folder = temporary_folder()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _whole(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise ValueError(f"Cannot use {name}={given!r}: give a whole number.") from None


def _seed(given: Any) -> int:
    if (seed := _whole("seed", given)) < 0:
        raise ValueError(f"Cannot use seed={seed}: give a whole number, 0 or more.")
    return seed


def _loaded(given: _GivenScenario) -> Scenario:
    (one,) = _checked([given])
    return one if isinstance(one, Scenario) else load(one)


def _checked(given: Any) -> list[str | Path | Scenario]:
    """One or more scenarios: names, files and objects. Raises ValueError for anything else."""
    found = list(given) if isinstance(given, Iterable) else [given]
    for one in found:
        if not isinstance(one, str | Path | Scenario):
            raise ValueError(  # noqa: TRY004
                f"Cannot use {one!r} as a scenario: give a name, a file, or what harness.scenario(...) returns."
            )
    return found


def _entries(tuners: Any) -> list[Entry]:
    """The entries of names and functions; two functions of one name get numbers."""
    found: list[Entry] = []
    for tuner in tuners if isinstance(tuners, Iterable) else [tuners]:
        if tuner == "all":
            found += [resolve(name) for name in embedded_tuners()]
        elif isinstance(tuner, str):
            if len(several := split_names(tuner)) > 1:
                raise ValueError(f"Cannot use {tuner!r} as a tuner: several are a list, {several}.")
            found.append(resolve(tuner))
        else:
            found.append(entry_of(tuner, taken={e.name for e in found}))
    return found


def _contestant(tuner: _GivenTuner) -> Entry:
    """The entry of a tuner that plays single runs. Raises ValueError for a reference."""
    return resolve_contestant(tuner) if isinstance(tuner, str) else entry_of(tuner)


def _shown(progress: bool) -> AbstractContextManager[ProgressDisplay | None]:
    """The display for this place: bars on a terminal, one line in a notebook, else none."""
    from rich.console import Console

    from harness.cli.terminal.display import one_line, watching

    console = Console(stderr=True)
    if progress and console.is_jupyter:
        return one_line(sys.stdout)
    return watching(console) if progress and console.is_terminal else nullcontext()
