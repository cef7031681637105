"""Faults done to a live job, and how long it takes to train again.

The job is `live.ones`: what the model must be is known at every moment, the number of pushes that count.
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

__all__ = ["Patient", "deployed"]

_SAMPLE_SECONDS = 0.01
_STUCK_SECONDS = 90.0  # without a push: longer than anything takes that ends
_CALM_SECONDS = 5.0  # of training, after which a fault is over: longer than the slowest detection takes


@dataclass
class Patient:
    """A job that faults are done to, on a cluster that can do them."""

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
                clocks = self.live.glimpse().clocks
                if clocks > before:
                    self._pushes.append(time.monotonic())
                before = clocks
                if self._pushes and time.monotonic() - self._pushes[-1] > self._patience_seconds:
                    self._give_up()

    def _give_up(self) -> None:
        """Let those who wait for the job know that it stands still."""
        with self.live._control.news:
            self.live._control._failure = TimeoutError(f"no push for {self._patience_seconds:g} s")
            self.live._control.news.notify_all()

    def end(self) -> None:
        self._over.set()
        self._watcher.join()

    # ---------------------------------------------------------------------------------------------------- what is where

    def find(self, name: str) -> tuple[int, int]:
        """The process of a peer, such as ``worker/n0``, and the cluster's node that it is on."""
        from ray._private import state

        for actor in state.actors().values():
            if actor["State"] == "ALIVE" and f"/{name}/" in actor["Name"]:
                pid = int(actor["Pid"])
                return pid, next(i for i in self.cluster.nodes if pid in self.cluster.processes(i))
        raise LookupError(f"{name} runs nowhere: {self.told()}")

    # ---------------------------------------------------------------------------------------------------- what is measured

    def seconds_to_resume(self, since: float, *, within: float = 30.0) -> float:
        """Seconds from `since` (monotonic) to the end of the longest spell without a push, once the job has trained on for a
        while and has all its nodes again."""
        while True:
            now = time.monotonic()
            moments = [since, *(p for p in self._pushes if p > since)]
            gaps = [b - a for a, b in itertools.pairwise(moments)]
            longest = int(np.argmax(gaps)) if gaps else 0
            ended = moments[longest + 1] if gaps else now
            if gaps and now - moments[-1] < 0.5 and now - since > _CALM_SECONDS and now - ended > 1.0:
                return ended - since
            assert now - since < within + _CALM_SECONDS, f"no training for {now - moments[-1]:.1f} s: {self.told()}"
            time.sleep(0.1)

    def whole(self, within: float = 30.0) -> float:
        """Seconds until the job has the setting that it began with."""
        started = time.monotonic()
        while self.live.glimpse().setting != self.live.job.start:
            assert time.monotonic() - started < within, self.told()
            time.sleep(0.05)
        return time.monotonic() - started

    def told(self) -> tuple[Any, ...]:
        return self.live.glimpse().happenings[-8:]

    def note(self, what: str) -> None:
        """Remember what is done to the job, for `told_on_failure`."""
        self._done.append((self.live.now, what))

    @contextmanager
    def told_on_failure(self, last: int = 40) -> Iterator[None]:
        """With an error goes what was done last, what happened, and where the job stands; standing still is one."""
        self._patience_seconds = _STUCK_SECONDS
        try:
            yield
        except BaseException as error:
            history = sorted([*self._done, *self.live.glimpse().happenings])[-last:]
            error.add_note("\n".join(f"{seconds:9.2f} s  {what}" for seconds, what in history))
            error.add_note("\n".join(self._standing()))
            raise
        finally:
            self._patience_seconds = math.inf

    def _standing(self) -> Iterator[str]:
        control = self.live._control
        seen = control.runtime.seen
        yield f"running {control.running}, away {sorted(control.losses.away)}, starting {sorted(control.runtime.starting)}"
        yield f"members {dict(seen.members)}, moving {seen.moving}, recovering {seen.recovering}, durable {seen.durable}"
        work: Any = control._work
        while work is not None:
            frame = work.gi_frame
            yield f"in {work.gi_code.co_qualname}, line {frame.f_lineno if frame is not None else 'none: it has ended'}"
            work = work.gi_yieldfrom


@contextmanager
def deployed(spec: Spec, cluster: Cluster) -> Iterator[Patient]:
    """A job on a cluster that this process has not joined yet."""
    with launch.cluster(cluster.address) as offers:
        placement = launch.plan(spec.job.nodes, offers)
        with launch.launch(placement, spec) as processes, LiveSystem(spec, processes) as live:
            patient = Patient(live, cluster)
            try:
                yield patient
            finally:
                patient.end()
