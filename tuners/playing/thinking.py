"""Let a tuner think: give it an answer and get its next action, within a limit of the host's seconds."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuners.actions import Action, Rejected, Tuner

__all__ = ["ThinkingLimitError", "next_action", "thinking_limit"]


def next_action(tuner: Tuner, answer: Any = None) -> Action[Any]:
    """The action that `tuner` asks for after `answer`; after None, the first. Raises StopIteration where it has returned.

    A `Rejected` is raised in the tuner, as a copy: Python would add a traceback to the answer itself, and a log that has the
    answer would keep the tuner's frames alive.
    """
    return tuner.throw(Rejected(str(answer))) if isinstance(answer, Rejected) else tuner.send(answer)


class ThinkingLimitError(BaseException):
    """Raised inside a tuner that thinks too long. A BaseException, so that the tuner's `except Exception` lets it pass."""


@contextmanager
def thinking_limit(seconds: float) -> Iterator[None]:
    """Raise ThinkingLimitError in the body after `seconds` of the host, and again every second until the body ends.

    Does nothing outside the main thread, because Python delivers signals only there. Restores a timer that was running.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    armed = True  # a signal that arrives while the timer is being removed must not raise outside of the body

    def ring(*_: object) -> None:
        if armed:
            raise ThinkingLimitError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)
