"""How a live job starts: the processes that its first setting needs, and training."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from harness.live.driver.checkpoints.checkpoint_file import Checkpoint
from harness.live.driver.checkpoints.restore_points import RestorePoints
from harness.live.driver.view.job_view import JobView
from harness.live.processes.runtime import NOT_UP, Procedure, Runtime, starting_words
from harness.live.protocol.names import EVALUATOR, peers
from tuners.actions import Setting

__all__ = ["AGAIN_SECONDS", "HINT_SECONDS", "SAY_SECONDS", "start"]

SAY_SECONDS = 3.0
"""From one word on processes that start to the next."""

AGAIN_SECONDS = 10.0
"""From one word to the next where nothing has changed: a process may be waited for for minutes."""

HINT_SECONDS = 30.0
"""From here on, a process that Ray has not started yet is probably not only late."""

_LOOK_SECONDS = 0.05


def start(
    runtime: Runtime, view: JobView, restore_points: RestorePoints, begun: Checkpoint | None, say: Callable[[str], None]
) -> None:
    """Start the processes and training; returns when it runs. `begun`: the checkpoint that is resumed. `say` is told how far
    it is. Raises RuntimeError where a process ends, or does not join."""
    setting = view.branches[view.number].setting
    names = [*peers(setting), EVALUATOR]
    runtime.start_first(names)
    restore_points.begin(view.branches)
    say("The coordinator is ready; the other processes are starting.")
    seen = runtime.poll()
    if begun is not None:
        # Rows from between the last report and the checkpoint: their times are of another coordinator's clock.
        for branch, report in seen.reports.items():
            rows = np.array(report.rows, np.float64)
            rows[:, 0] = begun.seconds
            view.branches[branch].add(rows)
    _wait(runtime, names, _first_processes(runtime, names, setting), say)
    say(f"{len(names)} of {len(names)} processes are ready; training begins.")
    runtime.begin_at(0.0 if begun is None else begun.seconds)
    runtime.coordinator.run(view.number)


def _first_processes(runtime: Runtime, names: list[str], setting: Setting) -> Procedure:
    yield from runtime.wait_joined(names)
    yield from runtime.recover(setting)


def _wait(runtime: Runtime, names: list[str], procedure: Procedure, say: Callable[[str], None]) -> None:
    """Carry out the procedure, and say which processes have not joined yet."""
    begun_seconds = looked_seconds = said_seconds = time.monotonic()
    said = len(names), frozenset[str]()
    for _ in procedure:
        for name, why in runtime.processes.lost().items():
            raise RuntimeError(f"Cannot start {name}: {why}")
        time.sleep(_LOOK_SECONDS)
        runtime.poll()
        late = set(names) - runtime.latest.members.keys()
        if late and time.monotonic() > looked_seconds + SAY_SECONDS:
            looked_seconds, up = time.monotonic(), runtime.coordinator.starting()
            news = len(late), frozenset(late & up.keys())
            again = news == said
            if not again or looked_seconds > said_seconds + AGAIN_SECONDS:
                said, said_seconds = news, looked_seconds
                far = f"{len(names) - len(late)} of {len(names)} processes are ready"
                after = f" after {looked_seconds - begun_seconds:.0f} s" if again else ""
                slow = looked_seconds > begun_seconds + HINT_SECONDS and not late <= up.keys()
                hint = f".{NOT_UP}" if slow else ""
                say(f"{far}{after}; {starting_words(late, up, runtime.processes.host)}{hint}")
