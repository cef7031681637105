"""The live display: at every width, every bar keeps its count and its name."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness.cli.terminal.display import one_line, stages, watching
from harness.comparison.compare import Finished, Planned, RunKey, Underway
from harness.comparison.run_process import Done, Progress


@pytest.mark.parametrize("width", [80, 120])
def test_bars_keep_their_counts(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=20, color_system=None)
    last = RunKey("digits-logistic", "my_package.my_module:factory", 0)
    with watching(console) as watch:
        left = tuple(RunKey("digits-logistic", "random_search", seed) for seed in range(5))
        watch(Planned(8, 2, (last, *left), ("random_search",)))
        watch(Finished(last, Done("error", "so it goes [bold] " * 20, 1.0, 0.0, 12.0)))
        watch(Underway(RunKey("digits-logistic", "random_search", 0), Progress(900.0, 3600.0, 0.5, 0.875)))
        watch(Underway(last, Progress(0.0, 3600.0, float("nan"), float("nan"))))
        paper = Console(file=io.StringIO(), width=width, color_system=None)
        with paper.capture() as shown:
            paper.print(watch)
    lines = [line.rstrip() for line in shown.get().splitlines() if line.strip()]
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    assert "3/8" in lines[0]
    assert "about 60 s left" in lines[0]
    assert ("last: " in lines[0]) == (width == 120)
    assert "digits-logistic random_search seed 0" in lines[1]
    assert "25%" in lines[1]
    assert "accuracy 0.875" in lines[1]
    assert "0%" in lines[2]
    assert all("\u2501\u2501" in line for line in lines[:2])  # without colours, the unfinished part of a bar is blank


def test_lines_say_now_and_then_which_run_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("harness.cli.terminal.display.time.monotonic", lambda: now)
    stream = io.StringIO()
    slow = RunKey("digits", "my_tuner", 0)
    with watching(Console(file=stream, width=80)) as watch:
        watch(Planned(2, 0, (slow, RunKey("digits", "fixed", 0)), ("my_tuner", "fixed")))
        for seconds in (29.0, 2.0, 10.0, 15.0, 6.0):
            now += seconds
            watch(Underway(slow, Progress(36.0 * (now - 100.0), 3600.0, float("nan"), float("nan"))))
        now += 1.0
        watch(Finished(slow, Done("target", "", 2200.0, 0.0, 63.0)))
    assert stream.getvalue().splitlines() == [
        "2 runs.",
        "0/2  digits my_tuner seed 0 is running: 31%",
        "0/2  digits my_tuner seed 0 is running: 62%",
        "1/2  digits my_tuner seed 0: target in 2200 s",
    ]


def test_a_notebook_has_one_line_that_is_replaced_and_removed() -> None:
    stream = io.StringIO()
    runs = tuple(RunKey("digits", tuner, 0) for tuner in ("fixed", "asp"))
    with one_line(stream) as watch:
        watch(Planned(3, 1, runs, ("fixed", "asp")))
        watch(Finished(runs[0], Done("target", "", 3000.0, 0.0, 4.0)))
        watch(Finished(runs[1], Done("error", "so it goes", 9000.0, 0.0, 4.0)))
    states = [state.strip() for state in stream.getvalue().split("\r")]
    assert states == [
        "",
        "3 runs, 1 of them made before",
        "2/3 runs; about 4 s left; digits so far: fixed, 3000 s",
        "3/3 runs; about 0 s left; digits so far: fixed, 3000 s",
        "",
        "",
    ]
    assert watch.errors == 1
    assert "\n" not in stream.getvalue()


def test_lines_leave_out_tuners_that_have_nothing_to_tune() -> None:
    paper = Console(file=io.StringIO(), width=100, color_system=None)
    runs = tuple(RunKey("digits", tuner, 0) for tuner in ("fixed", "cruise", "asp"))
    with paper.capture() as shown, watching(paper) as watch:
        watch(Planned(3, 0, runs, ("fixed", "cruise", "asp")))
        watch(Finished(runs[0], Done("target", "", 3000.0, 0.0, 4.0)))
        watch(Finished(runs[1], Done("not applicable", "no role is free", 0.0, 0.0, 0.0)))
        watch(Finished(runs[2], Done("target", "", 1000.0, 0.0, 4.0)))
    assert [line.partition("  ")[0] for line in shown.get().splitlines()] == ["3 runs.", "1/3", "3/3"]


def test_a_run_that_is_silent_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner that hangs is stopped after ten minutes; until then nothing at all was printed."""
    now = 100.0
    monkeypatch.setattr("harness.cli.terminal.display.time.monotonic", lambda: now)
    stream = io.StringIO()
    stuck = RunKey("digits", "my_tuner", 0)
    with watching(Console(file=stream, width=80)) as watch:
        watch(Planned(1, 0, (stuck,), ("my_tuner",)))
        for silent in (30.0, 60.0):
            now += 30.0
            watch(Underway(stuck, Progress(36.0, 3600.0, float("nan"), float("nan"), silent)))
    assert stream.getvalue().splitlines() == [
        "1 run.",
        "0/1  digits my_tuner seed 0 is running: 1%; its tuner has been thinking, or one action has taken, 30 s",
        "0/1  digits my_tuner seed 0 is running: 1%; its tuner has been thinking, or one action has taken, 60 s",
    ]


def test_stages_are_told_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fit takes minutes; in the log of a batch job nothing at all was seen of it."""
    now = 100.0
    monkeypatch.setattr("harness.cli.terminal.display.time.monotonic", lambda: now)
    with stages("calibrating") as watch:
        for seconds in (29.0, 2.0, 10.0, 40.0):
            now += seconds
            watch(f"after {now - 100.0:g} [s]")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["calibrating: after 31 [s] (31 s so far)", "calibrating: after 81 [s] (81 s so far)"]
