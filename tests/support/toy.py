"""The toy systems, and windows made by hand for scripted tests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuners.actions import Job, Pushes, Rejected, Window, WorkerWindow
from tuners.testing.toys import Toy, toys

__all__ = ["REFUSED", "Toy", "finishes", "job", "plain", "toys", "window"]

REFUSED = Rejected("Cannot do that: the test refuses it.")


def finishes(tuner, answer=None) -> bool:
    """Whether the tuner returns after `answer`."""
    with pytest.raises(StopIteration):
        tuner.send(answer)
    return True


def plain(action: Any) -> Any:
    """An action without its reason, which changes nothing."""
    return replace(action, reason="")


def job(name: str = "every knob", seed: int = 1) -> Job:
    """The job of a toy, for tests that answer a tuner by hand."""
    return toys()[name](seed).job


def window(of: Job, losses, seconds=None, *, start=0.0, status="running", compute=0.04, pull=0.02, workers=None) -> Window:
    """A window in which the workers of the job `of` pushed in turn, once per entry of `losses`."""
    workers = of.start.workers if workers is None else workers
    n = len(losses)
    seconds = start + np.arange(1, n + 1) if seconds is None else np.asarray(seconds, float)
    names = [node.name for node in of.nodes]
    turn = np.array([names.index(workers[i % len(workers)]) for i in range(n)], np.int32)
    compute_seconds = np.array([compute[names[w]] if isinstance(compute, dict) else compute for w in turn], float)
    pushes = Pushes(
        seconds=seconds,
        worker=turn,
        clock=np.array([i // len(workers) for i in range(n)], np.int32),
        compute_seconds=compute_seconds,
        pull_seconds=np.full(n, float(pull)),
        push_seconds=np.full(n, 0.01),
        wait_seconds=np.zeros(n),
        staleness=np.zeros(n, np.int32),
        loss=np.asarray(losses, float),
    )
    return Window(
        start_seconds=start,
        end_seconds=float(seconds[-1]) if n else start,
        clocks=n,
        pushes=pushes,
        workers=tuple(worker_window(of, pushes, name) for name in workers),
        nodes=of.nodes,
        status=status,
    )


def worker_window(of: Job, pushes: Pushes, name: str) -> WorkerWindow:
    mine = pushes.worker == [node.name for node in of.nodes].index(name)
    count, compute = int(mine.sum()), float(pushes.compute_seconds[mine].sum())
    return WorkerWindow(
        name, count, count * of.start.batch_size, compute, float(pushes.pull_seconds[mine].sum()), 0.0, 0.0, (0.0,)
    )
