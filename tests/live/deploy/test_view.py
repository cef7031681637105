"""The view of a deployed job: a table on a terminal, lines elsewhere, and the comparison with the simulator."""

import io
import math
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.drive import play
from harness.live.deploy import progress_view
from harness.live.deploy.beside_simulation import RunFigures, beside, measured
from harness.live.deploy.progress_view import drawn, line, watched
from harness.live.driver.view.status import JobStatus, NodeStatus
from harness.scenario import parse, system
from tuners import resolve
from tuners.actions import Setting

SETTING = Setting(workers=("n0", "n1"), servers=("n2",), policy="ssp", staleness=2, momentum=0.9, transfer_bits=16)
STATUS = JobStatus(
    seconds=12.34,
    budget_seconds=60.0,
    status="running",
    clocks=2400,
    clocks_per_second=310.2,
    loss=0.4123,
    accuracy=math.nan,
    setting=SETTING,
    nodes=(
        NodeStatus("n0", "worker", 100.0, 0.5, 0.25, 0.25),
        NodeStatus("n1", "lost"),
        NodeStatus("n2", "server"),
    ),
    events=((3.2, "set: something else"), (5.0, "worker/n1 is lost: killed, or crashed")),
)
FIGURES = RunFigures(
    completion_seconds=20.0,
    reached=True,
    clocks=4000,
    iteration_seconds=0.01,
    part_seconds=(0.002, 0.003, 0.004, 0.001),
    changes=1,
    change_seconds=0.5,
    stall_seconds=0.01,
    bytes_moved=26_400.0,
    final_accuracy=0.95,
    final_loss=0.2,
)


def shown(what, width=100):
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()


def test_the_table_shows_busy_nodes_the_setting_and_events():
    for width in (80, 100, 160):
        said = shown(drawn("mine, tuned by cruise", STATUS, width), width)
        for words in (
            "mine, tuned by cruise",
            "12.3 of 60 s" if width < 96 else "12.3 of 60 s (21%)",
            "loss 0.412",
            "accuracy -",
            "2,400 clocks",
            "2 workers, 1 server, ssp(2), batch 16, rate 0.01, momentum 0.9, 16 bits",
            "worker/n1 is lost: killed, or crashed",
        ):
            assert words in " ".join(said.replace("│", " ").split())
        assert max(map(len, said.splitlines())) <= width - 2  # Ctrl-C writes ^C behind the last line
        first = said.splitlines()[1]
        assert "12.3 of" in first  # one line, not folded
        assert "310 per second" in first
        busy = next(text for text in said.splitlines() if "│ n0 " in text)
        columns = 24 if width >= 80 else 12
        assert (busy.count("█"), busy.count("░")) == (columns * 3 // 4, columns // 4)
        assert "75%" in busy
    assert " · target" in shown(drawn("mine", replace(STATUS, status="target")))


def test_a_narrow_terminal_shows_roles_and_a_long_name_widens_nothing():
    said = shown(
        drawn("live-digits[target.value=0.93], tuned by cruise[gain=0.1]", replace(STATUS, status="target"), 60), 60
    )
    lines = said.splitlines()
    assert max(map(len, lines)) == 57
    assert lines[0].endswith("… · target ─╮")
    for words in ("│ n0    worker  ", "│ n2    server  ", "  busy  pushes/s │", "  75%     100.0 │"):
        assert words in said


def test_without_a_terminal_there_are_lines(monkeypatch):
    monkeypatch.setattr(progress_view, "_LINE_SECONDS", 1e6)  # a busy machine would show one more
    console = Console(width=120, color_system=None, file=io.StringIO())
    with watched(console, "mine", lambda: STATUS):
        time.sleep(0.01)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "     3.2 s  set: something else"
    assert lines[2] == line(STATUS)
    assert lines[2].startswith("    12.3 s  2400 clocks (310 per second)  loss 0.412  accuracy -  2 workers")
    assert len(lines) == 3


def test_a_live_and_a_simulated_run_are_compared():
    other = replace(
        FIGURES, completion_seconds=10.0, reached=False, changes=0, change_seconds=math.nan, stall_seconds=math.nan
    )
    said = shown(beside(FIGURES, other))
    rows = {text.split("  ")[0].strip(): text.split() for text in said.splitlines() if text.strip()}
    assert rows["completion time"][-5:] == ["20", "s", "10", "s", "2.00"]
    assert rows["iteration time"][-5:] == ["10", "ms", "10", "ms", "1.00"]
    assert rows["reconfigurations"][-3:] == ["1", "0", "-"]
    assert "The target was not reached in simulation; completion time is the budget then." in " ".join(said.split())


ONE_NODE = """
summary = "Worker and server on one node, so that a pull takes no time."
[cluster]
nodes = [{ type = "process", count = 1, prefix = "n" }]
[workload]
name = "digits-logistic"
[start]
workers = ["n0"]
servers = ["n0"]
learning_rate = 0.1
[target]
metric = "accuracy"
value = 1.0
[budget]
seconds = 20
"""


def test_a_part_that_takes_no_time_in_simulation_has_no_ratio():
    """What is left of rounding would give one of 1e21."""
    scenario = parse(ONE_NODE, name="one", origin=Path("one.toml"))
    played = play(resolve("fixed").factory, system(scenario, 0))
    simulated = measured(played, played.exchanges)
    assert simulated.part_seconds[1] == 0.0 < simulated.part_seconds[0]
    rows = [text.split() for text in shown(beside(FIGURES, simulated)).splitlines()]
    assert next(row for row in rows if row[:1] == ["pull"]) == ["pull", "3", "ms", "0", "ms", "-"]
