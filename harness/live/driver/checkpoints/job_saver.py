"""When a live job makes checkpoints: regularly, when one is asked for, and at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from harness.live.driver.checkpoints.driver_state import KnownNodes
from harness.live.driver.checkpoints.restore_points import RestorePoints
from harness.live.driver.view.job_view import JobView
from harness.live.processes.runtime import Procedure, Runtime

__all__ = ["CHECKPOINT_SECONDS", "JobSaver"]

CHECKPOINT_SECONDS = 30.0
"""From one checkpoint to the next."""


class JobSaver:
    """The procedures that make checkpoints."""

    def __init__(
        self, runtime: Runtime, view: JobView, restore_points: RestorePoints, told: Callable[[], KnownNodes]
    ) -> None:
        """`told` returns what the tuner knows of nodes now."""
        self._runtime, self._view, self._restore_points, self._told = runtime, view, restore_points, told
        self.unsaved: OSError | None = None  # why the last checkpoint could not be written

    def regular(self, *, idle: bool) -> Procedure | None:
        """The next checkpoint, if it is due and the job is idle."""
        due = self._view.now > self._restore_points.seconds + CHECKPOINT_SECONDS
        return self.save() if idle and due and self._view.status == "running" else None

    def save(self) -> Procedure:
        """Make a checkpoint while training continues. One that cannot be written is `unsaved`."""
        view = self._view
        while True:
            state = {"seconds": view.now, "exchanges": view.performed, "branch": view.number}
            with suppress(KeyError):  # the coordinator has died: try again with its successor
                try:
                    yield from self._restore_points.save(view.branches, view.running, self._told(), state)
                    self.unsaved = None
                except OSError as error:  # a full disk: the job goes on, and the next checkpoint is tried when it is due
                    self.unsaved = error
                    # Not the error's own text: that may say how to go on after the end, and the job has not ended.
                    why = os.strerror(error.errno) if error.errno else str(error)
                    view.log_event(
                        f"the checkpoint is not written: {why}; the job goes on, and the next one is due in "
                        f"{CHECKPOINT_SECONDS:g} s"
                    )
                return

    def finish(self, until: float) -> Procedure:
        """Wait for mini-batches that have begun, until this time of `time.monotonic` at the latest."""
        while not self._runtime.coordinator.finish() and time.monotonic() < until:
            yield
