"""The `contest` fixture: scores are in pytest-benchmark's report, and loading the plug-in imports nothing slow."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.pytest_plugin import Contest

pytest_plugins = ["pytester"]

SCENARIO = """
summary = "Three machines that count pushes."
[cluster]
nodes = [{ type = "edge-4core", count = 3, prefix = "n" }]
[workload]
name = "mltuner-mf"
[start]
worker_count = 2
[free]
worker_count = { integer = [1, 2] }
[target]
metric = "clocks"
value = 40
check_clocks = 10
[budget]
seconds = 10000
"""

TEST = """
from tuners.actions import Reconfigure, Run

def mine(job):
    yield from Run(clocks=10)
    yield from Reconfigure(job.space.setting({"worker_count": 1}))

def test_contest(contest):
    mine_on_two = contest(mine, "small.toml", seeds=(3, 4))
    fixed = contest("fixed", "small.toml")
    assert [s.seed for s in mine_on_two.scores] == [3, 4]
    assert mine_on_two.reached == 2
    assert mine_on_two.reconfigurations == 1
    assert fixed.completion_seconds < mine_on_two.completion_seconds
    assert fixed.overhead_seconds == 0 < mine_on_two.overhead_seconds
"""


@pytest.fixture(scope="module", autouse=True)
def engine_in_memory(tmp_path_factory):
    """Before the first `pytester` is made: it forgets what is imported later, though modules that stay may name it."""
    file = tmp_path_factory.mktemp("contest") / "small.toml"
    file.write_text(SCENARIO)
    Contest(Immediate())("fixed", file)


@pytest.fixture
def run_pytest(pytester, monkeypatch):
    """Run pytest with the plug-in, whether or not the harness is installed in this environment.

    In this process, which has the engine in memory, or in one of its own, as users do.
    """
    installed = {p.value for p in importlib.metadata.entry_points(group="pytest11")}
    plugins = () if "harness.pytest_plugin" in installed else ("-p", "harness.pytest_plugin")
    pytester.path.joinpath("small.toml").write_text(SCENARIO)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    # Otherwise pytest-benchmark takes the process for a worker of pytest-xdist, and measures nothing.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def run(*arguments, own_process=False):
        run = pytester.runpytest_subprocess if own_process else pytester.runpytest_inprocess
        return run(*plugins, *arguments)

    return run


def test_scores_are_in_the_benchmarks_report(pytester, run_pytest):
    pytester.makepyfile(TEST)
    run_pytest("--benchmark-json=report.json", own_process=True).assert_outcomes(passed=1)
    (benchmark,) = json.loads((pytester.path / "report.json").read_text())["benchmarks"]
    assert benchmark["stats"]["rounds"] == 2  # a round per seed of the first call
    assert benchmark["options"]["timer"] == "simulated_seconds"
    info = benchmark["extra_info"]
    assert benchmark["stats"]["median"] == pytest.approx(info["mine on small.toml"]["completion_seconds"], rel=1e-12)
    assert info["mine on small.toml"]["host_seconds"] > 0
    assert set(info) == {"mine on small.toml", "fixed on small.toml"}
    assert info["mine on small.toml"]["reconfigurations"] == 1
    assert info["mine on small.toml"]["overhead_seconds"] > 0
    assert 0 < info["fixed on small.toml"]["completion_seconds"] < 10000
    assert info["fixed on small.toml"]["reached"] == "1/1"


MEASURED = """
def test_it(contest):
    contest("%s", "small.toml", seeds=3)
"""


def test_a_slower_tuner_fails_the_comparison_and_the_same_one_does_not(pytester, run_pytest):
    pytester.makepyfile(test_it=MEASURED % "fixed")
    run_pytest("--benchmark-autosave").assert_outcomes(passed=1)
    same = run_pytest("--benchmark-compare=0001", "--benchmark-compare-fail=median:5%")
    same.assert_outcomes(passed=1)
    assert same.ret == 0
    same.stdout.fnmatch_lines(["*benchmark: 2 tests*", "*test_it*3*1*"])  # three rounds of one iteration
    pytester.path.joinpath("small.toml").write_text(SCENARIO.replace("value = 40", "value = 60"))
    worse = run_pytest("--benchmark-compare=0001", "--benchmark-compare-fail=median:5%")
    assert worse.ret != 0
    said = worse.stdout.str() + worse.stderr.str()
    assert "Performance has regressed" in said
    assert "'median' has failed PercentageRegressionCheck" in said


def test_all_seeds_are_run_without_benchmarking(pytester, run_pytest):
    pytester.makepyfile(TEST)
    run_pytest("--benchmark-disable").assert_outcomes(passed=1)


def test_a_marker_of_the_users_own_is_kept(pytester, run_pytest):
    marked = MEASURED.replace("def test_it", "import pytest\n\n@pytest.mark.benchmark(group='mine')\ndef test_it")
    pytester.makepyfile(test_it=marked % "fixed")
    run_pytest("--benchmark-json=report.json").assert_outcomes(passed=1)
    (benchmark,) = json.loads((pytester.path / "report.json").read_text())["benchmarks"]
    assert (benchmark["group"], benchmark["options"]["timer"]) == ("mine", "simulated_seconds")


class Immediate:
    """In place of pytest-benchmark's fixture."""

    def __init__(self):
        self.extra_info = {}

    def pedantic(self, work, *, rounds, iterations):
        for _ in range(rounds * iterations):
            work()


def test_a_tuner_that_fails_fails_the_test(tmp_path):
    def broken(job):
        yield "train"

    (tmp_path / "small.toml").write_text(SCENARIO)
    with pytest.raises(RuntimeError, match="Cannot score broken on small, seed 0: The tuner yielded 'train'"):
        Contest(Immediate())(broken, tmp_path / "small.toml")


@pytest.mark.parametrize(
    ("tuner", "scenario", "seeds", "reason"),
    [
        ("cruize", "digits", 1, "Did you mean 'cruise'"),
        ("fixed", "digitz", 1, "No scenario 'digitz'"),
        ("best_fixed", "digits", 1, "Cannot play 'best_fixed' alone: it is the best of many runs"),
        ("fixed", "digits", 0, "with no seeds"),
        ("fixed", "digits", [], "with no seeds"),
        ("fixed", "digits", [0, -1], "with seed -1: give whole numbers"),
        ("fixed", "digits", [0.5], "with seed 0.5: give whole numbers"),
    ],
)
def test_unknown_names_are_refused(tuner, scenario, seeds, reason):
    with pytest.raises(ValueError, match=reason):
        Contest(Immediate())(tuner, scenario, seeds=seeds)


@pytest.mark.parametrize(
    ("tuner", "scenario", "reason"),
    [
        ([len], "digits", "Cannot use .* as a tuner: .* or give a name"),
        ((x for x in ()), "digits", "it was called already; give the function itself"),
        ("fixed", ["digits", "digits-svm"], r"Cannot read scenario \['digits', 'digits-svm'\]: give one name, or the path"),
    ],
)
def test_what_is_no_tuner_or_no_scenario_is_refused_before_it_is_played(tuner, scenario, reason):
    with pytest.raises(ValueError, match=reason):
        Contest(Immediate())(tuner, scenario)


def test_a_tuner_that_has_nothing_to_tune_is_played_with_a_warning(tmp_path):
    (tmp_path / "small.toml").write_text(SCENARIO)
    said = "asp is not applicable on small, and `harness compare` does not run it there: The job starts with 'asp' already"
    with pytest.warns(UserWarning, match=said):
        assert Contest(Immediate())("asp", tmp_path / "small.toml").reached == 1


def test_loading_the_plug_in_imports_nothing_heavy():
    heavy = {"jax", "numpy", "polars", "simulators", "harness.drive", "tuners.actions"}
    code = f"import sys, harness.pytest_plugin; sys.exit(', '.join({heavy!r} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")
