"""`harness play` prints every exchange, and stops in a debugger; `harness new tuner` writes what runs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.cli.play import ExchangePrinter
from tests.support import arena, toy
from tests.support.commands import harness
from traces.exchanges import Exchange
from tuners.actions import (
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    GradientNoise,
    Install,
    MeasureNoise,
    NodeEvent,
    Reconfigure,
    Rejected,
    Run,
)
from tuners.policies import asp

ROOT = Path(__file__).parents[3]
TUNER = """
import time
from dataclasses import replace
from tuners.actions import Reconfigure, Run

def mine(job):
    yield from Run(clocks=20)
    yield from Reconfigure(replace(job.start, batch_size=2))

def broken(job):
    luck = yield from Run(clocks=20)
    raise RuntimeError("no luck")

def stops(job):
    yield from Run(clocks=20)
    breakpoint()

def drops(job):
    Run(clocks=3)
    yield from Run(clocks=3)

def slow(job):
    time.sleep(0.1)
    yield from Run(clocks=3)
"""


@pytest.fixture
def here(here: Path) -> Path:
    (here / "played.py").write_text(TUNER)
    return here


def test_every_exchange_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "tiny.toml", "played:mine", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["0.0", "s", "Run(clocks=20)"]
    assert lines[1].strip().startswith("-> 20 pushes in ")
    assert "nan" not in "".join(lines)  # this job has no losses
    assert "Reconfigure(batch_size 4 -> 2)" in lines[2]
    assert lines[3].strip().startswith("-> done in ")
    assert "(the tuner has returned; the job goes on, and only events are shown)" in lines[4]
    assert lines[-2].strip().endswith("ended: target")
    assert lines[-1].startswith("target after ")
    assert lines[-1].endswith("60 pushes, 1 change, overhead 0.0 s.")
    assert sorted(p.name for p in here.iterdir() if p.suffix) == ["played.py", "tiny.toml"]


def test_times_of_a_brief_job_are_printed_in_milliseconds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "brief.toml").write_text(arena.TIMING.replace("seconds = 2000", "seconds = 60"))
    assert main(["play", "brief.toml", "fixed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "0.000"
    assert re.search(r"pushes in \d+\.\d{3} s;", lines[1])


def test_a_tuner_that_fails_is_status_1_with_its_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "tiny.toml", "played:broken"]) == 1
    said = capsys.readouterr()
    assert 'line 12, in broken\n    raise RuntimeError("no luck")' in said.err
    assert "error after " in said.out
    assert " no luck (played.py, line 12). " in said.out


def test_of_a_tuner_that_has_returned_only_events_are_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "tiny.toml").write_text(arena.TIMING.replace("seconds = 2000", "seconds = 20"))
    assert main(["play", "tiny.toml", "played:drops"]) == 0
    said = capsys.readouterr()
    assert said.out.count("the tuner has returned") == 1
    assert "s  Run(" in said.out.splitlines()[-3]  # the last one, which tells how the job ended
    assert "Line 19 of played makes Run(clocks=3) and drops it" in said.err


def test_thinking_for_long_is_said(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.cli.play._LONG_SECONDS", 0.01)
    assert main(["play", "tiny.toml", "played:slow"]) == 0
    assert "(the tuner has not asked anything for 0.01 s; Ctrl-C ends this)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_debugger_starts_where_the_tuner_fails(here: Path) -> None:
    made = harness("play", "tiny.toml", "played:broken", "--pdb", given="p luck.clocks\nq\n")
    assert made.returncode == 1
    assert "RuntimeError: no luck" in made.stdout
    assert "(Pdb) 20\n" in made.stdout


def test_breakpoints_stop_in_the_tuner(here: Path) -> None:
    made = harness("play", "tiny.toml", "played:stops", given="p job.name\nc\n")
    assert made.returncode == 0, made.stderr
    assert "(Pdb) 'tiny'\n" in made.stdout


def test_each_action_and_answer_has_its_words() -> None:
    job = toy.job()
    said: list[str] = []
    watch = ExchangePrinter(job, said.append)
    faster = replace(job.start, learning_rate=0.25)
    window = toy.window(job, [3.0, 1.0])
    lost = replace(window, events=(NodeEvent(1.0, "n1", "left"),), status="diverged", setting=faster)
    for exchange in (
        Exchange(1.0, Fork(setting=faster, reason="41 s left instead of 80"), 4),
        Exchange(2.0, Run(seconds=1.5, branch=4), window),
        Exchange(3.0, Evaluate(branch=4), Evaluation(3.0, 2, 0.5, 0.75)),
        Exchange(3.0, MeasureNoise(branch=4), GradientNoise(3.0, 0.5, 20.0)),
        Exchange(3.0, Free(branch=4), None),
        Exchange(4.0, Reconfigure(faster, method="migrate", wait=False), Rejected("Cannot do it: not now.")),
        Exchange(5.0, Reconfigure(faster), Cost(seconds=2.0, stall_seconds=1.0, bytes_moved=3e6, done=False)),
        Exchange(6.0, Install(asp()), None),
        Exchange(7.0, Run(clocks=2), lost),
    ):
        watch(exchange)
    rate = f"learning_rate {job.start.learning_rate:.4g} -> 0.25"
    assert [line.strip().partition("s  ")[2] or line.strip() for line in said] == [
        f"Fork({rate})",
        "# 41 s left instead of 80",
        "-> branch 4",
        "Run(seconds=1.5, branch 4)",
        "-> 2 pushes in 2.000 s; training loss 3 to 1",
        "Evaluate(branch 4)",
        "-> loss 0.5, accuracy 0.750",
        "MeasureNoise(branch 4, 4 mini-batches per worker)",
        "-> squared gradient 0.5, variance 20, noise scale 40",
        "Free(branch 4)",
        "-> done",
        f"Reconfigure({rate}, migrate, wait=False)",
        "-> Rejected: Cannot do it: not now.",
        f"Reconfigure({rate})",
        "-> rolled back in 2.000 s, stall 1.000 s, 3.0 MB moved",
        "Install(asp)",
        "-> done",
        "Run(clocks=2)",
        f"-> 2 pushes in 2.000 s; training loss 3 to 1; n1 left; now {rate}; ended: diverged",
    ]


def test_of_a_long_list_the_change_is_printed() -> None:
    job = toy.job()
    said: list[str] = []
    few, many = tuple(f"n{i}" for i in range(3)), tuple(f"n{i}" for i in range(8))
    start = replace(job.start, workers=many[:6], servers=few[:1], loads=())
    watch = ExchangePrinter(replace(job, start=start), said.append)
    watch(Exchange(1.0, Reconfigure(replace(start, workers=(*many[1:6], "n6"))), Cost(seconds=1.0, stall_seconds=0.0)))
    watch(Exchange(2.0, Reconfigure(replace(start, workers=few, servers=few[:2])), Cost(seconds=1.0, stall_seconds=0.0)))
    assert [line.split("s  ", 1)[1] for line in said if "Reconfigure" in line] == [
        "Reconfigure(workers 6 -> 6 (+n6 -n0))",
        "Reconfigure(workers 6 -> 3 (+n0 -n3 -n4 -n5 and 1 more), servers n0 -> n0, n1)",
    ]


# -------------------------------------------------------------------------------------------------------- new tuner


def test_a_new_tuner_runs_as_it_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "tuner", "halving_too"]) == 0
    assert "pytest" in capsys.readouterr().out
    written = sorted(p.name for p in (here / "halving-too-tuner").iterdir())
    assert written == ["halving_too.py", "pyproject.toml", "test_halving_too.py"]
    monkeypatch.chdir(here / "halving-too-tuner")
    tuners = "fixed,halving_too:halving_too[clocks=20]"
    assert main(["compare", "../tiny.toml", "--tuners", tuners, "--seeds", "1", "--jobs", "1"]) == 0
    assert "halving_too:halving_too[clocks=20]" in capsys.readouterr().out


def test_the_test_of_a_new_tuner_passes_and_its_entry_point_is_found(here: Path) -> None:
    assert main(["new", "tuner", "tuned", "--out", "project"]) == 0
    installed = {p.value for p in importlib.metadata.entry_points(group="pytest11")}
    plugin = [] if "harness.pytest_plugin" in installed else ["-p", "harness.pytest_plugin"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"} | {"PYTHONPATH": str(ROOT)}
    # To rewrite assertions so that they show values takes as long as the test.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--assert", "plain", *plugin]
    made = subprocess.run(  # noqa: S603
        command, cwd=here / "project", capture_output=True, text=True, env=environment, check=False, timeout=110
    )
    assert made.returncode == 0, made.stdout
    assert "2 passed" in made.stdout
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--target", str(here / "site"), str(here / "project")]
    subprocess.run(pip, check=True, capture_output=True)  # noqa: S603
    listed = subprocess.run(
        [sys.executable, "-m", "harness", "list", "tuners"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{here / 'site'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "tuned" in listed.stdout


def test_a_tuner_that_is_not_applicable_is_said_to_be_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes nothing, and its run looked like any other."""
    assert main(["play", "tiny.toml", "pollux"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("pollux is not applicable here, and `harness compare` does not run it: ")
