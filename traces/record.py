"""Records a run: turns its exchanges into rows of a trace, while the run is in progress."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import polars as pl

from traces.exchanges import Exchange
from traces.parts import TraceWriter
from traces.schema import NODE_ORDER, TRACE, setting_text
from tuners.actions import Cost, Evaluate, Evaluation, Fork, Pushes, Reconfigure, Rejected, Run, Setting, Window

__all__ = ["Recorder"]

_BATCH = 1 << 13  # pushes that are written together
_SAME = tuple(
    name
    for name in TRACE["settings"].columns
    if name in {f.name for f in fields(Setting)} - {"workers", "servers", "options"}
)
"""Columns of the table `settings` that have the name of a field of `Setting`."""


class Recorder:
    """Writes the exchanges of one run to a trace.

    `start` is the setting at the start of the run; if None, it is taken from the first window. `method` is the method of
    reconfigurations that do not name one. `nodes` are the names of `Job.nodes`, whose numbers pushes have; (): not known.
    """

    def __init__(
        self,
        writer: TraceWriter,
        run: str,
        *,
        start: Setting | None = None,
        method: str | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        self._writer, self._run, self._method = writer, run, method
        self._order = {NODE_ORDER: [*nodes]} if nodes else {}
        self._settings: dict[int, Setting] = {}  # in force, by branch
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._pushes: list[tuple[int, Pushes]] = []  # branch and pushes of each window that is not yet written
        self._waiting = 0
        self._evaluated: set[tuple[int, float, int]] = set()
        self._latest: Evaluation | None = None
        self._clocks = 0
        if start is not None:
            self._set(0, 0.0, start)

    def __call__(self, exchange: Exchange) -> None:
        """Record one exchange. Rejected actions had no effect and are not recorded."""
        action, answer = exchange.action, exchange.answer
        if isinstance(answer, Rejected):
            return
        if isinstance(action, Run):
            self._window(action.branch, answer)
        elif isinstance(action, Fork):
            setting = action.setting or self._settings.get(action.branch)
            if setting is not None:
                self._set(answer, exchange.seconds, setting)
        elif isinstance(action, Evaluate):
            self._evaluation(action.branch, answer)
        elif isinstance(action, Reconfigure) and action.wait:
            self._cost(action.branch, exchange.seconds, answer, action.method or self._method)
            if answer.done:
                self._set(action.branch, exchange.seconds, action.setting)
        if self._waiting >= _BATCH:
            self._write()

    def end(
        self,
        *,
        status: str,
        seconds: float,
        workload: str,
        seed: int | None = None,
        cost_usd: float | None = None,
        **extras: Any,
    ) -> None:
        """Record the end of the run, and what its machines cost (None: not known)."""
        row: dict[str, Any] = {"workload": workload, "seed": seed, "status": status, "seconds": seconds}
        row |= {"steps": self._clocks, "cost_usd": cost_usd}
        if self._latest is not None:
            row |= {"loss": self._latest.loss, "accuracy": self._latest.accuracy}
        self._row("runs", row | {"extras": json.dumps(self._order | extras, sort_keys=True)})
        self._write()

    def pause(self) -> None:
        """Give the writer what was recorded so far: the run is interrupted, and has no end."""
        self._write()

    def _window(self, branch: int, window: Window) -> None:
        if len(window.pushes.seconds):
            self._pushes.append((branch, window.pushes))
            self._waiting += len(window.pushes.seconds)
            self._clocks += len(window.pushes.seconds)
        for evaluation in window.evaluations:
            self._evaluation(branch, evaluation)
        for event in window.events:
            self._row("node_events", event._asdict())
        for cost in window.changes:
            self._cost(branch, window.end_seconds, cost, self._method)
        if window.setting is not None:
            self._set(branch, window.start_seconds if branch not in self._settings else window.end_seconds, window.setting)

    def _evaluation(self, branch: int, made: Evaluation) -> None:
        if (moment := (branch, made.seconds, made.clocks)) not in self._evaluated:
            self._evaluated.add(moment)
            self._latest = made
            values = {"seconds": made.seconds, "steps": made.clocks, "validation_loss": made.loss, "accuracy": made.accuracy}
            self._row("progress", {"branch": branch} | values)

    def _cost(self, branch: int, seconds: float, cost: Cost, method: str | None) -> None:
        row = {"branch": branch, "seconds": seconds, "method": method, "total_seconds": cost.seconds}
        row |= {name: getattr(cost, name) for name in ("stall_seconds", "slow_seconds", "bytes_moved", "done")}
        self._row("reconfigurations", row | {"steps": "; ".join(cost.steps)})

    def _set(self, branch: int, seconds: float, setting: Setting) -> None:
        if self._settings.get(branch) == setting:
            return
        self._settings[branch] = setting
        row = {"branch": branch, "seconds": seconds, "workers": len(setting.workers), "servers": len(setting.servers)}
        options = json.dumps(dict(setting.options), sort_keys=True, default=lambda value: value.item())
        self._row(
            "settings",
            row | {n: getattr(setting, n) for n in _SAME} | {"options": options, "setting": setting_text(setting)},
        )

    def _row(self, table: str, row: dict[str, Any]) -> None:
        kept = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._rows.setdefault(table, []).append({"run": self._run} | kept)

    def _write(self) -> None:
        for table, rows in self._rows.items():
            self._writer.add(table, pl.DataFrame(rows, schema=TRACE[table].schema))
        if self._pushes:
            # Last: adding pushes may fill the table, and then the writer writes all waiting rows of all tables. So the
            # settings of these pushes must have been added before, or a crash would leave pushes without a setting.
            self._writer.add("iterations", self._iterations())
        self._rows, self._pushes, self._waiting = {}, [], 0

    def _iterations(self) -> pl.DataFrame:
        fields = {name: np.concatenate([getattr(p, name) for _, p in self._pushes]) for name in Pushes._fields}
        # The loss is nan for a workload without one, and may be infinite after divergence; nan becomes null below.
        fields["loss"] = np.where(np.isfinite(fields["loss"]), fields["loss"], np.nan)
        fields["branch"] = np.repeat([b for b, _ in self._pushes], [len(p.seconds) for _, p in self._pushes])
        columns = []
        for name, kind in TRACE["iterations"].schema.items():
            if name in fields:  # one Series at a time: polars starts threads when it gets many arrays at once
                columns.append(pl.Series(name, fields[name], nan_to_null=True).cast(kind))
            else:
                same = self._run if name == "run" else None
                columns.append(pl.Series(name, [same], dtype=kind).new_from_index(0, self._waiting))
        return pl.DataFrame(columns)
