"""A comparison's runs on a Ray cluster: one worker process for each of its cores, the very one that
`harness.comparison.pool` starts.

Ray finds the cores and says when a node is gone; the process that makes a run is ours, with the environment it has on one
machine, so the rows are the same bytes. What it leaves behind travels back as files. A run whose worker process dies is a
row with a reason, as ever; one whose node is lost is made again on another, and becomes such a row when that happens often.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from harness import __version__
from harness.comparison.pool import Died, Hand
from harness.comparison.run_process import Done, Progress, Task
from harness.ray_cluster import cores
from traces import store

__all__ = ["work"]

_LOSSES = 3
"""So many nodes may be lost under one run: it may be the run that does it to them."""

_LOOK_SECONDS = 1.0
"""How often we look for nodes that have joined."""

_PATIENCE_SECONDS = 60.0
"""How long a cluster may be without cores before we give up on it."""

_CLOSE_SECONDS = 5.0


def work(tasks: Iterable[Task]) -> Iterator[tuple[Task, Progress | Done | Died]]:
    """Make all runs, one for each core of the cluster we joined, yielding what happens as `harness.comparison.pool.work`
    does.

    Raises ValueError where a node has other versions than we, OSError where files cannot be written, RuntimeError where
    workers cannot even start or no node is left. However it ends, no process is left behind.
    """
    waiting = list(tasks)[::-1]
    losses: Counter[str] = Counter()
    crew: list[_Bench] = []
    try:
        while waiting or any(b.task for b in crew):
            starting = sum(b.task is None for b in crew)
            crew += [_Bench() for _ in range(min(len(waiting) - starting, cores() - len(crew)))]
            if not crew:
                _await_cores()
                continue
            ready = ray.wait([b.awaited for b in crew], timeout=_LOOK_SECONDS)[0]
            for bench in [b for b in crew if b.awaited in ready]:
                task, heard = bench.hear()
                if isinstance(heard, _Lost):
                    losses[task.folder if task else ""] += 1
                    heard = _mourned(task, heard, losses)
                    waiting += [task] if task and not heard else []
                elif not task:
                    losses[""] = 0
                if task and heard:
                    yield task, heard
                if isinstance(heard, Progress):
                    bench.listen()
                elif bench.alive and waiting:
                    bench.give(waiting.pop())
                else:
                    crew.remove(bench)
                    bench.dismiss()
    finally:
        closing = [bench.dismiss() for bench in crew]
        with suppress(RayError):
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS) if closing else None


@dataclass(frozen=True, slots=True)
class _Lost:
    """The node under a worker, or Ray's part of it, is gone."""

    reason: str


def _mourned(task: Task | None, lost: _Lost, losses: Counter[str]) -> Died | None:
    """What becomes of a run that was lost: nothing, for it is made again; or a row, when that has been tried enough."""
    times = losses[task.folder if task else ""]
    if times < _LOSSES:
        return None
    if task is None:
        raise RuntimeError(f"Cannot start a worker process on the Ray cluster, tried {times} times: {lost.reason}")
    return Died(f"The nodes that made this run were lost, {times} in a row. Ray says: {lost.reason[:200]}")


def _await_cores() -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not cores():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Cannot go on: the Ray cluster has been without CPUs for {_PATIENCE_SECONDS:g} seconds.")
        time.sleep(_LOOK_SECONDS)


def _versions() -> dict[str, str]:
    """What results may depend on: ourselves and all that we stand on."""
    try:
        needed = [r for r in requires("ps-harness") or () if "extra ==" not in r]
    except PackageNotFoundError:
        needed = []
    names = sorted(re.match(r"[\w.-]+", r).group() for r in needed)  # type: ignore[union-attr]
    return {"harness": __version__} | {n: version(n) for n in names}


# ------------------------------------------------------------------------------------------------------------- our side


class _Bench:
    """A place for one worker process on the cluster, and the run that it has."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.alive = True
        here = str(Path.cwd())
        remote: Any = ray.remote
        placed = remote(num_cpus=1, max_concurrency=2)(_Worker)  # two calls at once, so that `close` is heard
        self._there = placed.remote([p or here for p in sys.path], here)
        self.awaited: Any = self._there.start.remote(_versions())

    def give(self, task: Task) -> None:
        self.task = task
        self.awaited = self._there.make.remote(task)

    def listen(self) -> None:
        self.awaited = self._there.listen.remote()

    def hear(self) -> tuple[Task | None, Progress | Done | Died | _Lost | None]:
        """What has come, nothing where the worker says that it is ready; the files of a finished run are in place."""
        try:
            heard = ray.get(self.awaited)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            self.alive = False
            return self.task, _Lost(" ".join(str(error).split()))
        if isinstance(heard, _Left):
            folder = Path(self.task.folder) if self.task else Path()
            for name, data in heard.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                store.write_bytes(folder / name, data)
            heard = heard.done
        self.alive = not isinstance(heard, Died)
        return self.task, heard

    def dismiss(self) -> Any:
        """End the process, whatever it is doing; Ray ends the rest once nobody holds it. Returns what to wait for."""
        return self._there.close.remote()


# -------------------------------------------------------------------------------------------------------- the node's side


@dataclass(frozen=True, slots=True)
class _Left:
    """A run is over, and these are its files, by their paths within its folder."""

    done: Done
    files: dict[str, bytes]


class _Worker:
    """On a node of the cluster: a worker process as on one machine, and a folder for its run."""

    def __init__(self, path: list[str], folder: str) -> None:
        if Path(folder).is_dir():  # where files are shared, relative paths mean the same
            os.chdir(folder)
        own = str(Path(ray.__file__).parent)  # Ray puts packages of its own in the way of those that are installed
        there = [p for p in sys.path if not p.startswith(own)]
        sys.path[:] = [*there, *(p for p in path if p not in there and Path(p).exists())]
        self._folder: Path | None = None  # of the run that is being made
        self._started = False

    def start(self, versions: dict[str, str]) -> None:
        """Start the process. Raises ValueError for other versions than these, RuntimeError where it does not start."""
        where = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        for name, ours in _versions().items():
            if ours != versions.get(name, ours):
                raise ValueError(
                    f"Cannot use node {where} of the Ray cluster: it has {name} {ours}, and this is {versions[name]}. "
                    "Install the same there, or results would differ."
                )
        self._hand = Hand()
        self._started = True

    def make(self, task: Task) -> Progress | Died | _Left:
        self._folder = Path(tempfile.mkdtemp(prefix="harness-"))
        self._hand.give(replace(task, folder=str(self._folder)))
        return self.listen()

    def listen(self) -> Progress | Died | _Left:
        try:
            task, heard = self._hand.hear()
            if isinstance(heard, Progress):
                return heard
            folder = Path(task.folder)
            files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        except OSError:
            self.close()
            raise
        self._clear()
        return _Left(heard, files) if isinstance(heard, Done) else heard

    def close(self) -> None:
        if self._started:
            self._hand.dismiss()
        self._clear()

    def _clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
