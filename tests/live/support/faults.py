"""Faults of a live job, and how long it takes until it trains again.

The job is `tests.live.support.ones`: every parameter of the model must equal the number of pushes that count.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.live.driver.system import LiveSystem
from harness.live.processes import launch
from harness.live.worker.spec import Spec
from tests.live.support.clusters import Cluster

__all__ = ["FaultyJob", "deployed", "process_of"]

_SAMPLE_SECONDS = 0.01
_STUCK_SECONDS = 90.0  # without a push: longer than any repair takes
_CALM_SECONDS = 5.0  # of training after a fault, until it is over: longer than the slowest detection takes
_RESUME_SECONDS = 30.0  # after a fault, until training has to go on
_LATEST = 40  # actions and events of the history


@dataclass
class FaultyJob:
    """A job on a cluster that can make faults, and the times of its pushes."""

    live: LiveSystem
    cluster: Cluster
    _over: threading.Event = field(default_factory=threading.Event)
    _pushes: list[float] = field(default_factory=list)  # moments at which the count was seen to grow
    _done: list[tuple[float, str]] = field(default_factory=list)
    _patience_seconds: float = math.inf  # without a push

    def __post_init__(self) -> None:
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        before = -1
        while not self._over.wait(_SAMPLE_SECONDS):
            with suppress(RuntimeError):
                clocks = self.live.job_status().clocks
                if clocks > before:
                    self._pushes.append(time.monotonic())
                before = clocks
                if self._pushes and time.monotonic() - self._pushes[-1] > self._patience_seconds:
                    self._give_up()

    def _give_up(self) -> None:
        """Make actions that wait for the job fail."""
        with self.live.control.news:
            self.live.control.fail(TimeoutError(f"no push for {self._patience_seconds:g} s"))

    def end(self) -> None:
        self._over.set()
        self._watcher.join()

    # --------------------------------------------------------------------------------------------------- where processes are

    def find(self, name: str) -> tuple[int, int]:
        """The process of a peer, such as ``worker/n0``, and the cluster's node that it is on."""
        pid = process_of(name)
        for node in self.cluster.nodes:
            if pid in self.cluster.processes(node):
                return pid, node
        raise LookupError(f"{name} has just ended.")

    # ---------------------------------------------------------------------------------------------------------- measurements

    def seconds_to_resume(self, since: float) -> float:
        """Seconds from `since` (monotonic) to the end of the longest time without a push, once the job has trained again for
        a while."""
        while True:
            now = time.monotonic()
            moments = [since, *(p for p in self._pushes if p > since)]
            gaps = [b - a for a, b in itertools.pairwise(moments)]
            longest = int(np.argmax(gaps)) if gaps else 0
            ended = moments[longest + 1] if gaps else now
            if gaps and now - moments[-1] < 0.5 and now - since > _CALM_SECONDS and now - ended > 1.0:
                return ended - since
            assert now - since < _RESUME_SECONDS + _CALM_SECONDS, (
                f"no training for {now - moments[-1]:.1f} s: {self.latest_events()}"
            )
            time.sleep(0.1)

    def whole(self, within: float = 30.0) -> float:
        """Seconds until the job has its first setting again."""
        started = time.monotonic()
        while self.live.job_status().setting != self.live.job.start:
            assert time.monotonic() - started < within, self.latest_events()
            time.sleep(0.05)
        return time.monotonic() - started

    def latest_events(self) -> tuple[Any, ...]:
        return self.live.job_status().events[-8:]

    def note(self, what: str) -> None:
        """Remember a fault or an action, for `history_on_failure`."""
        self._done.append((self.live.now, what))

    @contextmanager
    def history_on_failure(self) -> Iterator[None]:
        """Add to an error the latest actions and events, and the state of the job; a job without pushes is an error, too."""
        self._patience_seconds = _STUCK_SECONDS
        try:
            yield
        except BaseException as error:
            history = sorted([*self._done, *self.live.job_status().events])[-_LATEST:]
            error.add_note("\n".join(f"{seconds:9.2f} s  {what}" for seconds, what in history))
            error.add_note("\n".join(self._state()))
            raise
        finally:
            self._patience_seconds = math.inf

    def _state(self) -> Iterator[str]:
        control = self.live.control
        seen, away, starting = control.runtime.latest, sorted(control.losses.away), sorted(control.runtime.starting)
        yield f"running {control.view.running}, away {away}, starting {starting}"
        yield f"members {dict(seen.members)}, moving {seen.moving}, recovering {seen.recovering}, durable {seen.durable}"
        work: Any = control.procedure
        while work is not None:
            frame = work.gi_frame
            yield f"in {work.gi_code.co_qualname}, line {frame.f_lineno if frame is not None else 'none: it has ended'}"
            work = work.gi_yieldfrom


def process_of(name: str) -> int:
    """The process of a peer, such as ``worker/n0``, on the cluster that this process has joined."""
    from ray._private import state

    for actor in state.actors().values():
        if actor["State"] == "ALIVE" and f"/{name}/" in actor["Name"]:
            return int(actor["Pid"])
    raise LookupError(f"{name} runs nowhere.")


@contextmanager
def deployed(spec: Spec, cluster: Cluster) -> Iterator[FaultyJob]:
    """A job on a cluster that this process has not joined yet."""
    with launch.cluster(cluster.address) as offers:
        placement = launch.place_nodes(spec.job.nodes, offers)
        with launch.launch(placement, spec) as processes, LiveSystem(spec, processes) as live:
            job = FaultyJob(live, cluster)
            try:
                yield job
            finally:
                job.end()
