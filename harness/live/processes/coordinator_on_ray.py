"""The coordinator's process on Ray, as the driver asks it: a question waits while the process restarts from its journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import exceptions

from harness.live.processes.actors import Endpoint, coordinator_actor
from harness.live.processes.node_rooms import this_machine

if TYPE_CHECKING:
    from harness.live.coordinator.branches.branch import LiveJob

__all__ = ["CoordinatorOnRay"]

_RETURN_SECONDS = 60.0  # longest wait for a coordinator that has answered before: one process starts again
_HANG_SECONDS = 20.0  # longest wait for an answer, which may have the whole model; then the coordinator is killed


class CoordinatorOnRay:
    """Starts the process, asks it, and ends it. Ray starts it again where it has died; one that hangs is killed for that."""

    def __init__(self, join_seconds: float, silent_seconds: float) -> None:
        """`join_seconds`: longest wait for the first answer. `silent_seconds`: an answer that takes longer is told."""
        self._join_seconds, self._silent_seconds = join_seconds, silent_seconds
        self._actor: Any = None
        self._answered = False  # it has, so it has started
        self._tell: Callable[[str], None] = lambda _: None

    def begin(self, job: LiveJob, endpoint: Endpoint, folder: Path) -> None:
        """Start the process on this machine, with its journal in `folder`.

        Nobody waits for it here: other processes start beside it, and the first question is answered once it is up.
        """
        options = {"name": endpoint.actor, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": this_machine()}
        self._actor = coordinator_actor.options(**options).remote(job, endpoint, folder, self._silent_seconds)

    def tell(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with what becomes of the coordinator, in the thread that asks it."""
        self._tell = hear

    def ask(self, name: str, *given: Any, **named: Any) -> Any:
        """Ask the coordinator by the name of a member of `CoordinatorClient`; what it raises is raised here.

        While the coordinator restarts from its journal this waits, and asks again: a command that was under way when it
        died may then be carried out twice. One that does not answer for long hangs, and is restarted. Raises RuntimeError
        if it does not come back.
        """
        restarts, until = False, time.monotonic() + self._join_seconds
        while True:
            asked, starts = self._actor.ask.remote(name, given, named), restarts or not self._answered
            try:
                answer = ray.get(asked, timeout=max(until - time.monotonic(), 0.0)) if starts else self._soon(asked)
            except exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
                if starts and time.monotonic() >= until:
                    said = " ".join(str(error).split())
                    raise RuntimeError(f"Cannot ask the coordinator for {name!r}: it is gone ({said}).") from None
                if not starts:
                    restarts, until = True, time.monotonic() + _RETURN_SECONDS
                    hangs = isinstance(error, exceptions.GetTimeoutError)
                    if hangs:
                        ray.kill(self._actor, no_restart=False)
                    self._tell(f"the coordinator {'hangs' if hangs else 'has died'}: it starts again from its journal")
                time.sleep(0.05)
            else:
                self._answered = True
                if restarts:
                    self._tell("the coordinator is back")
                return answer

    def _soon(self, asked: Any) -> Any:
        """The answer to a question. Says when it is late; raises GetTimeoutError where the coordinator hangs."""
        try:
            return ray.get(asked, timeout=self._silent_seconds)
        except exceptions.GetTimeoutError:
            self._tell(f"the coordinator has not answered for {self._silent_seconds:g} s")
            return ray.get(asked, timeout=_HANG_SECONDS)

    def close(self, wait_seconds: float) -> None:
        """End the process, if it was started. It writes to its folder no more, if it stops within `wait_seconds`."""
        if self._actor is None:
            return
        with suppress(exceptions.RayError):
            ray.get(self._actor.stop.remote(), timeout=wait_seconds)
        with suppress(exceptions.RayError):
            ray.kill(self._actor, no_restart=True)
