"""Shows a running job: on a terminal as a table that is redrawn, elsewhere as plain lines."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from harness.lines import say
from harness.live.driver.view.status import JobStatus, NodeStatus, setting_words

__all__ = ["drawn", "line", "watched"]

_LINE_SECONDS = 2.0
_REFRESHES_PER_SECOND = 4.0
_BAR = 24  # columns
_WIDE = 96  # columns from which on the first line has all that it can say
_ECHO = 3  # columns beside the table: a terminal writes ^C there, and would begin a new line
_LATEST = 6  # events that are shown

_PARTS = (("compute", "green"), ("transfer", "cyan"), ("wait", "bright_black"))


@contextmanager
def watched(console: Console, title: str, job_status: Callable[[], JobStatus]) -> Iterator[None]:
    """Show what `job_status` returns, again and again, from a thread of its own until the context ends."""
    if console.is_terminal:

        def picture() -> RenderableType:
            return drawn(title, job_status(), console.width)

        with Live(
            get_renderable=picture, console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=False, screen=False
        ):
            yield
        return
    over = threading.Event()
    lines = threading.Thread(target=_print_lines, args=(console, job_status, over), name="live view", daemon=True)
    lines.start()
    try:
        yield
    finally:
        over.set()
        lines.join()


def _print_lines(console: Console, job_status: Callable[[], JobStatus], over: threading.Event) -> None:
    """Print a line every few seconds, one for each event, and one at the end."""
    printed = 0
    while True:
        last = over.wait(_LINE_SECONDS)
        seen = job_status()
        for seconds, what in seen.events[printed:]:
            say(console, f"{seconds:8.1f} s  {what}")
        printed = len(seen.events)
        say(console, line(seen))
        if last:
            return


def line(seen: JobStatus) -> str:
    """A job's status in one line."""
    return (
        f"{seen.seconds:8.1f} s  {seen.clocks} clocks ({seen.clocks_per_second:.0f} per second)  "
        f"loss {_number(seen.loss)}  accuracy {_number(seen.accuracy)}  {setting_words(seen.setting)}"
    )


# ------------------------------------------------------------------------------------------------------------- the table


def drawn(title: str, seen: JobStatus, width: int = 100) -> RenderableType:
    """A job's status as a table of `width` columns."""
    wide = width >= _WIDE
    share = f" ({min(seen.seconds / seen.budget_seconds, 1.0):.0%})" if wide else ""
    facts = (
        Text(f"{seen.seconds:.1f} of {seen.budget_seconds:g} s", style="bold") + Text(share, style="dim"),
        Text.assemble(("loss ", "dim"), (_number(seen.loss), "bold")),
        Text.assemble(("accuracy ", "dim"), (_number(seen.accuracy), "bold")),
        Text.assemble((f"{seen.clocks:,}", "bold"), (" clocks", "dim")),
        Text.assemble((f"{seen.clocks_per_second:.0f}", "bold"), (" per second", "dim")),
    )
    head = Text("   " if wide else "  ").join(facts)
    setting = Text.assemble(("setting  ", "dim"), setting_words(seen.setting))
    parts: list[RenderableType] = [head, setting, Text(""), _nodes(seen.nodes, width)]
    if seen.events:
        parts += [Text(""), *(_event(seconds, what) for seconds, what in seen.events[-_LATEST:])]
    ended = "" if seen.status == "running" else f" · {seen.status}"
    columns = min(width - _ECHO, 110)
    heading = Text(title)
    heading.truncate(columns - 6 - len(ended), overflow="ellipsis")  # a longer one would widen the panel
    heading.append(ended)
    return Panel(Group(*parts), title=heading, title_align="left", width=columns, border_style="dim")


def _nodes(nodes: tuple[NodeStatus, ...], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    columns = _BAR if width >= 80 else 12
    table.add_column("node", no_wrap=True)
    table.add_column("role", no_wrap=True)
    legend = Text(" ").join(Text.assemble(("■ ", style), name) for name, style in _PARTS)
    table.add_column(legend, min_width=columns)  # folded where there is no room for its one line
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("pushes/s", justify="right", no_wrap=True)
    for node in nodes:
        works = node.role in ("worker", "both")
        busy = node.compute_share + node.transfer_share
        style = "red" if node.role == "lost" else "dim" if node.role == "idle" else ""
        table.add_row(
            Text(node.name, style=style),
            Text(node.role, style=style),
            _bar(node, columns) if works else Text(""),
            Text(f"{busy:.0%}" if works else ""),
            Text(f"{node.pushes_per_second:.1f}" if works else ""),
        )
    return table


def _bar(node: NodeStatus, columns: int) -> Text:
    bar = Text()
    filled = 0
    ends = 0.0
    for (name, style), share in zip(_PARTS, (node.compute_share, node.transfer_share, node.wait_share), strict=True):
        ends += share
        end = min(round(ends * columns), columns)
        bar.append(("░" if name == "wait" else "█") * (end - filled), style=style)
        filled = end
    return bar


def _event(seconds: float, what: str) -> Text:
    style = "red" if " lost" in what or "failed" in what else "yellow"
    return Text.assemble((f"{seconds:7.1f} s  ", "dim"), (what, style), no_wrap=True, overflow="ellipsis")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"
