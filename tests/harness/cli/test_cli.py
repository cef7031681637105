"""The command: its output, its refusals, and its exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import __version__
from harness.cli.main import main
from harness.scenario import load
from tests.support import arena
from tests.support.marks import slow
from traces import schema, store

ROOT = Path(__file__).parents[3]


CHOSEN = """
import os
from harness.cli.main import main
main()
print(os.environ.get("JAX_PLATFORMS"))
"""


@pytest.mark.parametrize(("asked", "chosen"), [({}, "cpu"), ({"JAX_PLATFORMS": "cuda"}, "cuda")], ids=["unasked", "asked"])
def test_a_command_computes_on_the_cpu_unless_it_is_asked_to_use_a_device(asked: dict[str, str], chosen: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"PYTHONPATH": str(ROOT)} | asked
    command = [sys.executable, "-c", CHOSEN, "list"]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=100)  # noqa: S603
    assert made.stdout.split()[-1] == chosen


AT_THE_END = """
import atexit, gc, sys
from harness.cli.main import main
frozen, before = gc.get_freeze_count(), gc.get_threshold()
atexit.register(lambda: print(gc.get_freeze_count() > frozen, gc.get_threshold() > before))  # after what `main` registers
"""


@pytest.mark.parametrize(
    ("call", "own"), [("sys.argv[1:] = ['list']; main()", True), ("main(['list'])", False)], ids=["process", "call"]
)
def test_the_process_of_a_command_searches_for_circles_rarely_and_not_at_its_end(call: str, own: bool) -> None:
    """Where a program calls `main`, the program's own settings stay."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", AT_THE_END + call]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)  # noqa: S603
    assert made.stdout.splitlines()[-1] == f"{own} {own}"


# ------------------------------------------------------------------------------------------------------------- output


def test_scenarios_by_pattern_and_tuners_with_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "digits-l*", "--tuners", "fixed,cruise[gain=0.1,batches=4]", "--seeds", "1", "--jobs", "1"]) == 0
    scores = store.read(here / "results" / "digits-l" / "scores.parquet", schema.SCORES)
    assert scores["scenario"].unique().to_list() == ["digits-logistic"]
    assert sorted(scores["tuner"]) == ["cruise[gain=0.1,batches=4]", "fixed"]
    assert main(["compare", "nothing-*"]) == 2
    assert "No scenario matches 'nothing-*': `harness list scenarios` shows all" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--version"], f"harness {__version__}\n"),
        (["--help"], "exit status:"),
        (["compare", "--help"], "--resume"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


def commands_of(page: str) -> list[str]:
    """The names of subcommands in a page of help; a name that has no room for its help beside it is not found."""
    return re.findall(r"^    ([a-z]+) +\w", page, re.MULTILINE)


@pytest.mark.parametrize("columns", [80, 100])
def test_help_of_every_command_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))

    def page(*words: str) -> str:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        return capsys.readouterr().out

    commands = [*((c,) for c in commands_of(page())), *(("trace", c) for c in commands_of(page("trace")))]
    assert len(commands) == 15 + 7
    pages = [page(), *(page(*words) for words in commands)]
    assert max(len(line) for text in pages for line in text.splitlines()) <= columns


def test_help_fills_paragraphs_and_keeps_examples_that_can_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "74")
    with pytest.raises(SystemExit):
        main(["draw", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "Write members of a family as scenario files. A family is a distribution" in lines
    assert "  harness draw learning --first 0 --count 20 --out arenas" in lines
    assert lines[-1] == f"{'':59}writing them"  # the comment beside the last command is in a column of its own


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom harness.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('numpy', 'jax', 'polars', 'rich', 'msgspec', 'tuners') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)  # noqa: S603
    assert made.stdout.splitlines()[-1] == "[]"


def test_node_types_are_listed_with_their_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "m4.xlarge      4 cores, cpu, 1 Gbit/s, 0.215 USD per hour" in lines
    assert "edge-4core     4 cores, cpu, 0.1 Gbit/s" in lines


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("tuners", ["fixed", "tpe", "cruise", "best_fixed"]),
        ("scenarios", ["digits", "digits-svm"]),
        ("workloads", ["digits-mlp"]),
        ("profiles", ["edge-4core"]),
    ],
)
def test_lists_have_a_line_for_each(what: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert set(names) <= set(found)
    assert all(len(summary) > 5 for summary in found.values())


def test_the_list_of_scenarios_says_what_each_says_of_itself_without_reading_recorded_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took four seconds, most of them for the runs of four scenarios."""
    summary = load("digits-svm").summary
    monkeypatch.setattr("harness.scenario.scenario.parse", None)
    assert main(["list", "scenarios"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert summary in said
    assert "recorded-trimtuner-cnn" in said


def test_list_alone_names_the_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["tuners", "scenarios", "families", "workloads", "profiles", "sources"]


def test_a_drawn_member_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "drawn:placement[2]"]) == 0
    assert "placement-v1-0002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scenario", "answer"),
    [
        ("bad.toml", "The line is: [cluster\n"),
        ("drawn:learning[5:2]", "and the first comes before the last.\n"),
        ("drawn:learnin[0]", "harness: No family 'learnin': did you mean learning?\n"),
        ("good.toml[valeu=3]", "no line begins with 'valeu'; did you mean value? To add a line, edit a copy of the file.\n"),
        ("digit", "A file of your own is named with its .toml.\n"),
    ],
)
def test_a_mistake_in_a_scenario_is_the_first_thing_said(
    here: Path, capsys: pytest.CaptureFixture[str], scenario: str, answer: str
) -> None:
    (here / "bad.toml").write_text("[cluster\n")
    (here / "good.toml").write_text(arena.TIMING)
    assert main(["compare", scenario]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith(answer)


def test_one_server_is_not_called_servers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "few.toml").write_text(arena.TIMING)
    assert main(["show", "few.toml[start.worker_count=4]"]) == 0
    assert "starts with 4 workers and 1 server, " in capsys.readouterr().out


def test_where_loads_divide_a_batch_the_batch_of_all_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "boat-c-speechnet[global_batch_size=8192]"]) == 0
    assert ", bsp, global batch size 8192, " in capsys.readouterr().out


def test_what_show_prints_is_a_scenario(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "digits"]) == 0
    shown = capsys.readouterr().out
    (here / "mine.toml").write_text(shown)
    assert main(["show", "mine.toml"]) == 0
    assert "18 x edge-4core" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_an_own_scenario_and_an_own_tuner(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder
    (here / "mine.py").write_text(
        "from tuners.actions import Run\n\n\ndef patient(job):\n    yield from Run(clocks=30)\n\n\n"
        "def broken(job):\n    yield from Run(clocks=30)\n    raise RuntimeError('no luck')\n"
    )
    command = ["compare", "tiny.toml", "--tuners", "fixed,mine:patient,mine:broken", "--seeds", "1", "--jobs", "1"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "3 runs." in said
    assert "tiny mine:patient seed 0: target in" in said
    assert "tiny mine:broken seed 0: The tuner raised RuntimeError: no luck (mine.py, line 10)" in said
    assert "\x1b" not in said
    page = Path(said.splitlines()[-1].removeprefix("The page: "))
    assert page == Path("results/tiny/report.html")
    assert "<html" in (here / page).read_text()
    scores = store.load_results(here / "results" / "tiny").scores
    assert scores["status"].to_list() == ["target", "error", "target"]
    assert scores["clocks"].to_list() == [60, 30, 60]

    assert main(command) == 2
    refused = capsys.readouterr()
    assert "results/tiny: it is there already" in refused.err
    assert refused.out == ""  # not that it compares
    assert main([*command, "--resume"]) == 1
    said = capsys.readouterr().out
    assert "3 runs, 3 of them made before." in said
    assert "to resume" not in said
    (here / "results" / "tiny" / "scores.parquet").unlink()
    assert main(["report", "results/tiny"]) == 0
    assert store.load_results(here / "results" / "tiny").scores.equals(scores)


def test_a_missed_target_is_status_0(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "tiny.toml").write_text(
        arena.TIMING.replace("value = 60", "value = 1e9").replace("seconds = 2000", "seconds = 200")
    )
    assert main(["compare", "tiny.toml", "--tuners", "fixed", "--seeds", "1", "--jobs", "1", "--resume"]) == 0
    said = capsys.readouterr().out
    assert "tiny fixed seed 0: budget" in said  # a target out of reach is a result
    assert "results/tiny has no comparison to resume: this one begins." in said


@pytest.mark.slow
def test_an_interruption_says_how_to_continue(here: Path) -> None:
    command = [sys.executable, "-m", "harness", "compare", "tiny.toml", "--tuners", "fixed,sleepy:tuner", "--jobs", "1"]
    (here / "sleepy.py").write_text(
        "import time\nfrom tuners.actions import Run\n\n\ndef tuner(job):\n    time.sleep(60)\n    yield Run(clocks=30)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(  # noqa: S603 (our own command)
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 100
        while not list(here.glob("results/tiny/runs/tiny/fixed/0")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "--resume goes on" in errors
    assert "Traceback" not in errors
    assert store.load_results(here / "results" / "tiny").scores.height == 1


@pytest.mark.parametrize("command", [["play", "tiny.toml", "fixed"], ["list", "scenarios"], ["report", "results"]])
def test_an_interruption_is_no_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for where in ("harness.scenario.load", "harness.scenario.summaries", "harness.comparison.results.assemble"):
        monkeypatch.setattr(where, interrupt)
    (here / "results" / "runs").mkdir(parents=True)
    assert main(command) == 130
    assert capsys.readouterr().err == "\nharness: interrupted.\n"


@pytest.mark.parametrize(
    ("scenarios", "folder"),
    [
        (["digits"], "results/digits"),
        (["digits[value=0.9]"], "results/digits-value-0.9"),
        (["digits[value=0.95]", "cruise-*"], "results/digits-value-0.95+cruise"),
        (["drawn:placement[0:2]"], "results/drawn-placement-0-2"),
        (["mine/tiny.toml"], "results/tiny"),
    ],
)
def test_each_choice_of_scenarios_has_a_folder_of_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, scenarios: list[str], folder: str
) -> None:
    def stop(*_: object, out: Path, **__: object) -> None:
        raise ValueError(f"out: {out}")

    (here / "mine").mkdir()
    (here / "mine" / "tiny.toml").write_text(arena.TIMING)
    monkeypatch.setattr("harness.comparison.compare.compare", stop)
    said: list[object] = []
    monkeypatch.setattr("harness.cli.main._complain", lambda what, status: said.append(str(what)) or status)
    assert main(["compare", *scenarios, "--tuners", "fixed"]) == 2
    assert said == [f"out: {folder}"]


def test_members_of_a_family_are_counted_before_they_are_compared(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.comparison.compare.compare", lambda *_, **__: (_ for _ in ()).throw(ValueError("stop")))
    assert main(["compare", "drawn:placement[0:20]", "drawn:placement[19:21]", "--tuners", "fixed"]) == 2
    assert "Comparing 1 tuner on 21 scenarios" in " ".join(capsys.readouterr().out.split())


def test_commas_in_the_options_of_a_tuner_do_not_end_its_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: object, tuners: list[str], **__: object) -> None:
        raise ValueError(f"tuners: {tuners}")

    monkeypatch.setattr("harness.comparison.compare.compare", stop)
    command = ["trace", "replayed", "replay-network", "--tuners", "fixed,cruise[gain=0.1,solver=exact]", "--out", "world"]
    assert main(command) == 2
    assert "tuners: ['fixed', 'cruise[gain=0.1,solver=exact]']" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_output_is_no_error(closed: str) -> None:
    """Python then has no sys.stdout at all."""
    command = f"{sys.executable} -m harness list tuners {closed}"
    made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)  # noqa: S603, S607
    assert (made.returncode, made.stderr) == (0, "")


def test_a_reader_that_closes_the_pipe_is_no_error(here: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m harness list workloads | true; echo ${{PIPESTATUS[0]}}"
    made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=True)  # noqa: S603, S607
    assert made.stderr == ""
    assert made.stdout.strip() == "0"


NOBODY_READS = "harness: nobody reads the output any more; this goes on, and Ctrl-C stops it."


@pytest.mark.parametrize(
    ("command", "reader", "said"),
    [
        ("--help", "| true", ""),
        slow("play tiny.toml fixed", "| true", ""),
        slow("compare tiny.toml --tuners fixed --seeds 1 --jobs 1", "| true", NOBODY_READS),
        slow("compare tiny.toml --tuners fixed --seeds 1 --jobs 1", "2>&1 | true", ""),
    ],
)
def test_whose_reader_is_gone_ends_or_finishes_its_files(here: Path, command: str, reader: str, said: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = f"{sys.executable} -m harness {command} {reader}; echo ${{PIPESTATUS[0]}}"
    made = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=True)  # noqa: S603, S607
    assert (made.stdout.strip(), made.stderr.strip()) == ("0", said)
    assert (here / "results" / "tiny" / "report.html").exists() == command.startswith("compare")


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "digit"], r"No scenario 'digit': did you mean digits"),
        (["compare", "my.toml"], r"Cannot read scenario my\.toml: No such file"),
        (["compare", "tiny.toml", "--tuners", "fixt"], r"No tuner 'fixt'\. Did you mean 'fixed'"),
        (["compare", "tiny.toml", "--tuners", ""], r"No tuner ''"),
        (["compare", "tiny.toml", "--tuners", "nowhere:tuner"], r"Cannot import tuner 'nowhere:tuner'"),
        (["compare", "tiny.toml", "--tuners", "tests.support.arena:tuner"], r"tests.support.arena has no 'tuner'"),
        (["compare", "tiny.toml", "--tuners", "all,fixed"], r"Cannot compare tuner 'fixed' with itself"),
        (["compare", "tiny.toml", "--seeds", "0"], r"Cannot compare on 0 seeds"),
        (["compare", "tiny.toml", "--jobs", "-1"], r"Cannot use -1 jobs"),
        (["compare", "tiny.toml", "--out", "tiny.toml"], r"Cannot write results to tiny\.toml: it is a file"),
        (["compare", "tiny.toml", "--out", "tiny.toml/out"], r"Cannot write results to tiny\.toml/out: Not a directory"),
        (["compare", "bad.toml"], r"bad\.toml: \[cluster\.nodes\] cuont: there is no such key; did you mean count"),
        (["show", "digit"], r"No scenario or tuner 'digit': did you mean digits"),
        (["report", "nowhere"], r"Cannot read results from nowhere: it has no manifest\.json"),
    ],
)
def test_bad_input_is_refused_with_status_2(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.toml").write_text(arena.TIMING.replace("count = 5", "cuont = 5"))
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("harness: ")
    assert re.search(message, said), said
    assert not (here / "results").exists()


@pytest.mark.parametrize("arguments", [["compare", "--seeds", "many"], ["list", "tunes"], ["frobnicate"]])
def test_a_wrong_command_line_is_refused_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: harness" in capsys.readouterr().err


def test_a_full_disk_is_status_1(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, f"Cannot write {path}: the disk is full.")

    monkeypatch.setattr(store, "write_bytes", full)
    assert main(["compare", "tiny.toml", "--tuners", "fixed"]) == 1
    assert re.search(r"^harness: Cannot write results/tiny/.*: the disk is full\.$", capsys.readouterr().err.strip())


def test_a_file_that_cannot_be_written_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(store, "write_bytes", read_only)
    assert main(["compare", "tiny.toml", "--tuners", "fixed"]) == 1
    assert re.search(r"^harness: Cannot use results/tiny/.*: Read-only file system\.$", capsys.readouterr().err.strip())
