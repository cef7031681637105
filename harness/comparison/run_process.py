"""One worker process of a comparison: receives runs from its parent one by one, and writes a folder for each.

`harness.comparison.pool` starts it as ``python -m harness.comparison.run_process FD`` with its own environment variables, so
that numerical libraries use one thread and results do not depend on the host's number of cores.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machines.machine import collect_garbage_rarely

if TYPE_CHECKING:
    from harness.scenario import Scenario
    from harness.score import Scored
    from traces.exchanges import Exchange
    from tuners.actions import Setting

__all__ = ["GIVEN_UP", "Done", "Progress", "Task", "main", "save"]

GIVEN_UP = "given up"
"""The status of a run that has passed its limit: it leaves no row, because its completion time is not known."""

_PROGRESS_SECONDS = 0.2
_SILENT_SECONDS = 30.0  # without an exchange, after which the parent is told so


@dataclass(frozen=True, slots=True)
class Task:
    """One run to be made. Has only text and plain values, so that it can be sent to another process."""

    scenario: str
    origin: str  # the file that the text was read from; relative paths in the text start at its folder
    text: str
    tuner: str  # the name in the results
    plays: str  # the name in the registry, or package.module:factory
    seed: int
    folder: str  # where to write the files
    start: Setting | None = None  # in place of the scenario's start setting
    system: str = "harness.scenario:system"  # module:function that makes the system
    record: bool = False  # whether to write a trace
    pickled: bytes = b""  # the tuner's factory by cloudpickle, in place of `plays`, where it is a function of the caller's
    own_model: str = ""  # digest of the user's file that the workload's model is in; "": it is in none
    limit_seconds: float = math.inf  # of simulated time, after which the run may stop: a longer one cannot be the best


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    seconds: float
    budget_seconds: float
    loss: float
    accuracy: float
    # Of the host, since the last exchange, where that is long ago: the tuner thinks, or an action is in progress.
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """A run is over: its folder is complete, or it was given up."""

    status: str
    reason: str
    completion_seconds: float
    thinking_seconds: float
    wall_seconds: float
    machine: str = ""  # that the run was made on
    stopped_seconds: float = math.inf  # simulated seconds after which the run was given up


def main(arguments: list[str]) -> int:
    """Serve the parent at the other end of the given file descriptor until it closes the connection."""
    collect_garbage_rarely()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        import jax

        jax.devices()  # fails here where there is no such device, and not in every run
    parent = Connection(int(arguments[0]))
    parent.send("ready")
    while True:
        try:
            task: Task = parent.recv()
        except EOFError:
            return 0
        try:
            with _output_in(Path(task.folder)):
                done: Done | Exception = _run(task, parent.send)
        except OSError as error:
            done = error  # a full disk concerns the whole comparison, so the parent raises it
        parent.send(done)


def _exit_with_parent() -> None:
    """Exit when the parent does: the parent has the other end of standard input, which closes even if it is killed."""
    os.read(0, 1)
    os._exit(1)


def _run(task: Task, send: Callable[[Any], None]) -> Done:
    """Make one run and write its files; `send` gets its progress. A run that cannot be set up is a row with the reason."""
    from harness.drive import play
    from harness.machines.machine import described
    from harness.record import play_recorded
    from harness.scenario import job, limits, parse
    from harness.score import score, unplayed
    from tuners.applicability import nothing_to_tune

    started = time.perf_counter()
    names: dict[str, Any] = {"scenario": task.scenario, "tuner": task.tuner, "seed": task.seed}
    # Read for every run: files that it names, of machines or workloads, may have changed since the last one.
    scenario = parse(task.text, name=task.scenario, origin=Path(task.origin))
    exchanges: tuple[Exchange, ...] = ()
    thinking, trace = 0.0, ""
    try:
        _check_model(task, scenario)
        factory = _factory(task.plays, task.pickled)
        idle = nothing_to_tune(factory, job(scenario, task.seed))
        system = None if idle else _named(task.system)(scenario, task.seed, task.start)
    except Exception as error:
        reason = f"The run could not be set up: {' '.join(str(error).split()) or type(error).__name__}"
        scored, trace = unplayed("error", reason, **names, **limits(scenario)), traceback.format_exc()
    else:
        if system is None:
            scored = unplayed("not applicable", idle, **names, **limits(scenario))
        else:
            watch = _Watch(send, system.job.budget_seconds, task.limit_seconds)
            try:
                if task.record:
                    played = play_recorded(factory, system, Path(task.folder) / "trace", **names, watch=watch)
                else:
                    played = play(factory, system, watch=watch)
            except _LimitPassedError as error:
                wall = time.perf_counter() - started
                return Done(GIVEN_UP, str(error), math.nan, 0.0, wall, described(), stopped_seconds=system.now)
            finally:
                watch.end()
            scored, exchanges = score(played, **names), played.exchanges
            thinking, trace = played.outcome.thinking_seconds, played.outcome.trace
    save(Path(task.folder), scored, exchanges, trace)
    row = scored.score
    return Done(row.status, row.reason, row.completion_seconds, thinking, time.perf_counter() - started, described())


def _check_model(task: Task, scenario: Scenario) -> None:
    """Raise ValueError where the file of the user's model is not that of the comparison's other runs."""
    from harness.scenario import own_model

    model, digest = own_model(scenario)
    if digest != task.own_model:
        raise ValueError(f"{model} is not the file with which the comparison began: it has changed, or is another one here.")


def save(folder: Path, scored: Scored, exchanges: tuple[Exchange, ...] | None = (), trace: str = "") -> None:
    """Write the files of one run: its row, its curves, its exchanges, and the traceback of a fault. `exchanges` None: their
    log has been written while the run was in progress."""
    import polars as pl

    from traces import store
    from traces.exchanges import write_log
    from traces.schema import EVALUATIONS, SETTINGS

    rows = scored.rows()
    # Floats as text, because JSON has no nan and no inf.
    plain = {k: repr(v) if isinstance(v, float) else v for k, v in rows["scores"][0].items()}
    store.write_bytes(folder / "score.json", (json.dumps(plain, indent=1) + "\n").encode())
    for name, schema in (("evaluations", EVALUATIONS), ("settings", SETTINGS)):
        store.write(pl.DataFrame(rows[name], schema=schema), folder / f"{name}.parquet", schema)
    if exchanges is not None:
        write_log(folder / "exchanges.jsonl.gz", exchanges)
    if trace:
        store.write_bytes(folder / "error.txt", trace.encode())


class _LimitPassedError(Exception):
    """A run has passed its limit: it cannot be the best. The argument is the reason, a whole sentence."""


class _Watch:
    """Sends the run's progress to the parent, at most five times a second, and ends a run that has passed its limit.

    A thread of its own tells the parent where the run is silent for long, until `end` is called.
    """

    def __init__(self, send: Callable[[Any], None], budget_seconds: float, limit_seconds: float) -> None:
        self._send = send
        self._budget_seconds = budget_seconds
        self._limit_seconds = limit_seconds
        self._sent = 0.0
        self._loss = self._accuracy = float("nan")
        self._now, self._heard = 0.0, time.monotonic()  # simulated seconds of the last exchange, and when it was
        self._ended, self._sending = threading.Event(), threading.Lock()
        threading.Thread(target=self._tell_silence, daemon=True).start()

    def end(self) -> None:
        """Send nothing more."""
        with self._sending:
            self._ended.set()

    def _tell_silence(self) -> None:
        while not self._ended.wait(_SILENT_SECONDS):
            if (silent := time.monotonic() - self._heard) >= _SILENT_SECONDS:
                self._send_progress(silent)

    def _send_progress(self, silent_seconds: float = 0.0) -> None:
        with self._sending:
            if not self._ended.is_set():
                self._send(Progress(self._now, self._budget_seconds, self._loss, self._accuracy, silent_seconds))

    def __call__(self, exchange: Exchange) -> None:
        self._now, self._heard = exchange.seconds, time.monotonic()
        evaluations = getattr(exchange.answer, "evaluations", ())
        if evaluations:
            self._loss, self._accuracy = float(evaluations[-1].loss), float(evaluations[-1].accuracy)
        if time.monotonic() - self._sent > _PROGRESS_SECONDS:
            self._sent = time.monotonic()
            self._send_progress()
        if exchange.seconds > self._limit_seconds:
            raise _LimitPassedError(f"The run takes longer than {self._limit_seconds:.6g} s.")


@cache
def _factory(name: str, pickled: bytes) -> Any:
    if pickled:
        return pickle.loads(pickled)  # noqa: S301 (from our parent)
    from tuners import resolve

    return resolve(name).factory


@cache
def _named(where: str) -> Callable[..., Any]:
    module, _, attribute = where.partition(":")
    made: Callable[..., Any] = getattr(import_module(module), attribute)
    return made


@contextmanager
def _output_in(folder: Path) -> Iterator[None]:
    """Redirect what a tuner prints to `output.txt` in its results; delete the file if it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "output.txt"
    kept = [os.dup(1), os.dup(2)]
    with path.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        if not path.stat().st_size:
            path.unlink()


if __name__ == "__main__":
    # Imported by its own name: the parent could not unpickle objects of classes of the module `__main__`.
    sys.exit(import_module("harness.comparison.run_process").main(sys.argv[1:]))
