"""The Python interface: `import harness` is cheap, and compares names, files, objects, functions and lambdas."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

import harness
from tests.support import arena
from tuners.actions import Install, Job, Reconfigure, Rejected, Run, Tuner

pytestmark = pytest.mark.usefixtures("kept_processes")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A file of a scenario that the real simulator plays in no time."""
    path = tmp_path / "tiny.toml"
    path.write_text(arena.TIMING)
    return path


def smaller(job: Job, *, batch_size: int = 2) -> Tuner:
    yield from Run(clocks=10)
    yield from Reconfigure(replace(job.start, batch_size=batch_size))


# ----------------------------------------------------------------------------------------------------------- import


def test_importing_it_imports_nothing_heavy() -> None:
    script = (
        "import sys, harness\n"
        "heavy = ('numpy', 'jax', 'polars', 'rich', 'msgspec', 'tuners')\n"
        "print(harness.__version__, [m for m in heavy if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    assert made.stdout.strip() == f"{harness.__version__} []"


def test_all_names_the_interface() -> None:
    assert set(harness.__all__) <= set(dir(harness))
    assert all(callable(getattr(harness, name)) for name in harness.__all__ if not name.startswith("_"))
    with pytest.raises(AttributeError, match=r"has no attribute 'comparre'; it has .*compare"):
        _ = harness.comparre  # type: ignore[attr-defined]


def test_editors_see_the_arguments_of_a_scenario() -> None:
    assert {"base", "free", "conditions", "seeds"} <= set(inspect.signature(harness.scenario).parameters)


# ---------------------------------------------------------------------------------------------------------- compare


def test_names_files_functions_lambdas_and_partials_are_compared(tiny: Path) -> None:
    factor = 4
    result = harness.compare(
        tiny,
        [
            "fixed",
            smaller,
            lambda job: smaller(job, batch_size=factor),
            functools.partial(smaller, batch_size=2),
            smaller,
        ],
        seeds=2,
        jobs=1,
    )
    names = result.scores["tuner"].unique(maintain_order=True).to_list()
    assert sorted(names) == ["fixed", "lambda", "smaller", "smaller-2", "smaller[batch_size=2]"]
    assert result.scores["status"].unique().to_list() == ["target"]
    changes = dict(result.summary().select("tuner", "reconfigurations").iter_rows())
    assert changes == {"fixed": 0, "lambda": 0, "smaller": 1, "smaller-2": 1, "smaller[batch_size=2]": 1}
    assert set(result.settings["tuner"]) == set(names)
    assert result.host.height == result.scores.height == 10
    text = str(result)
    assert all(name in text for name in names)
    assert result._repr_html_().count("<svg") == 1


def test_results_are_the_same_bytes_as_the_commands(tiny: Path, tmp_path: Path) -> None:
    from harness.comparison.compare import compare

    compare([str(tiny)], ["fixed"], out=tmp_path / "command", seeds=1)
    made = harness.compare(tiny, "fixed", seeds=1, jobs=1, out=tmp_path / "python")
    assert made.folder == tmp_path / "python"
    for table in ("scores", "evaluations", "settings"):
        assert (made.folder / f"{table}.parquet").read_bytes() == (tmp_path / "command" / f"{table}.parquet").read_bytes()


def test_no_folder_is_left(tiny: Path) -> None:
    result = harness.compare(str(tiny), smaller, seeds=1, jobs=1)
    folder = result.folder
    assert (folder / "scores.parquet").is_file()
    del result
    gc.collect()
    assert not folder.exists()


def test_a_comparison_that_fails_leaves_no_folder(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="0 seeds"):
        harness.compare(tiny, "fixed", seeds=0)
    assert not list(tmp_path.glob("harness-*"))


def test_a_pickled_result_is_whole_without_the_first_one(tiny: Path) -> None:
    result = harness.compare(tiny, ["fixed", smaller], seeds=1, jobs=1)
    said, folder, pickled = str(result), result.folder, pickle.dumps(result)
    del result
    gc.collect()
    again = pickle.loads(pickled)  # noqa: S301 (our own)
    assert again.folder != folder
    assert str(again) == said
    assert isinstance(again.plot.gantt("smaller"), matplotlib.figure.Figure)
    kept = again.folder
    del again
    gc.collect()
    assert not kept.exists()


def test_a_pattern_means_all_scenarios_that_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No scenario matches 'cruize-\*'"):
        harness.compare("cruize-*", "fixed")
    with pytest.raises(ValueError, match="scenario 'digits' with itself"):
        harness.compare(["digits", "digits*"], "fixed", out=tmp_path / "out")


def test_scenarios_are_objects_too(tiny: Path) -> None:
    longer = harness.scenario(tiny, name="longer", target={"value": 90})
    result = harness.compare([tiny, longer], "fixed", seeds=1, jobs=1)
    clocks = dict(result.scores.select("scenario", "clocks").iter_rows())
    assert clocks == {"tiny": 60, "longer": 90}


def test_results_of_a_folder_are_the_same_as_those_that_compare_returned(tiny: Path, tmp_path: Path) -> None:
    made = harness.compare(tiny, ["fixed", smaller], seeds=1, jobs=1, out=tmp_path / "mine")
    found = harness.load_results(str(tmp_path / "mine"))
    assert repr(found) == repr(made)
    assert found.scores.equals(made.scores)
    with pytest.raises(ValueError, match="it has no manifest"):
        harness.load_results(tmp_path)


def test_figures_are_matplotlibs(tiny: Path, tmp_path: Path) -> None:
    result = harness.compare(tiny, ["fixed", smaller], seeds=1, jobs=1)
    times, gantt = result.plot.times(), result.plot.gantt("smaller")
    assert isinstance(times, matplotlib.figure.Figure)
    assert isinstance(gantt, matplotlib.figure.Figure)
    assert times._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert isinstance(result.plot.gantt(), matplotlib.figure.Figure)  # of the leader
    with pytest.raises(ValueError, match="there is no tuner 'larger' of fixed, smaller"):
        result.plot.gantt("larger")
    with pytest.raises(ValueError, match="there is no scenario 'huge' of tiny"):
        result.plot.times("huge")
    with pytest.raises(ValueError, match="Its job may be timing-only"):
        result.plot.curves()
    with pytest.raises(ValueError, match="choose accuracy or loss"):
        result.plot.curves(metric="f1")
    with pytest.raises(ValueError, match=r"seed 9: there is no push in it\. Seeds: 0"):
        result.plot.gantt("fixed", seed=9)
    assert "<html" in result.report(tmp_path / "page.html").read_text()


def test_learning_curves(tmp_path: Path) -> None:
    easy = harness.scenario("digits-logistic", name="easy", target={"value": 0.5, "check_clocks": 25})
    result = harness.compare(easy, "fixed", seeds=1, jobs=1)
    (axes,) = result.plot.curves().axes
    assert axes.get_title(loc="left") == "fixed"
    assert result.evaluations["accuracy"].is_finite().all()


def test_a_tuner_that_fails_is_a_row(tiny: Path) -> None:
    def broken(job: Job) -> Tuner:
        yield from Run(clocks=10)
        raise RuntimeError("no luck")

    result = harness.compare(tiny, broken, seeds=1, jobs=1)
    assert result.scores["status"].to_list() == ["error"]
    assert "no luck" in result.scores["reason"][0]


def test_what_cannot_be_compared_is_refused_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    lock = threading.Lock()

    def holds_a_lock(job: Job) -> Tuner:
        with lock:
            yield from Run(clocks=10)

    def needs_more(job: Job, rate: float) -> Tuner:
        yield from Run(clocks=10)

    for tuners, message in (
        (holds_a_lock, r"Cannot send tuner 'holds_a_lock' to other processes .*inside the function"),
        (needs_more, r"Cannot use 'needs_more' as a tuner .*rate.*functools\.partial"),
        ([7], r"Cannot use 7 as a tuner: write a function of a Job that yields actions, or give a name"),
        ([smaller(arena.system(harness.scenario(tiny), 0, None).job)], r"it was called already; give the function itself"),
        ("cruize", r"No tuner 'cruize'\. Did you mean 'cruise'"),
        ("cruise[gain=lots]", r"Cannot use gain=lots .*give a number, at least 0"),
        ([], r"Cannot compare nothing"),
        (7, r"Cannot use 7 as a tuner"),
        (None, r"Cannot use None as a tuner"),
        ("fixed,asp", r"Cannot use 'fixed,asp' as a tuner: several are a list, \['fixed', 'asp'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            harness.compare(tiny, tuners, out=tmp_path / "out")  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": "3"}, r"Cannot use seeds='3': give a whole number"),
        ({"seeds": 2.5}, r"Cannot use seeds=2\.5: give a whole number"),
        ({"seeds": [0, 1]}, r"Cannot use seeds=\[0, 1\]: give a whole number"),
        ({"jobs": "2"}, r"Cannot use jobs='2': give a whole number"),
        ({"scenarios": 5}, r"Cannot use 5 as a scenario: give a name, a file, or what harness\.scenario"),
        ({"scenarios": None}, r"Cannot use None as a scenario"),
        ({"scenarios": ["digits", 5]}, r"Cannot use 5 as a scenario"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness.compare(**arguments)  # type: ignore[arg-type]


def test_seeds_may_be_a_number_of_numpy(tiny: Path) -> None:
    assert harness.compare(tiny, "fixed", seeds=np.int64(2), jobs=1).scores.height == 2  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- play, deploy


def test_a_run_is_played_in_this_process(tiny: Path) -> None:
    seen = []

    def mine(job: Job) -> Tuner:
        seen.append(job.name)
        yield from smaller(job)

    told = []
    played = harness.play(tiny, mine, seed=3, watch=told.append)
    assert seen == ["tiny"]
    assert tuple(told) == played.exchanges
    assert (played.score.tuner, played.score.seed, played.score.status) == ("mine", 3, "target")
    assert played.settings.height == 2
    again = asdict(harness.play(tiny, smaller, seed=3).score)
    assert repr(asdict(played.score)) == repr(again | {"tuner": "mine"})  # as text: nan is not equal to itself


def test_a_played_run_is_shown_in_one_line(tiny: Path) -> None:
    assert re.fullmatch(
        r"smaller on tiny, seed 0: target after \d+\.\d s\. 60 pushes, 1 change, overhead 0\.0 s\.",
        repr(harness.play(tiny, smaller)),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"Cannot use seed=-1: give a whole number, 0 or more"),
        ({"seed": "a"}, r"Cannot use seed='a': give a whole number"),
        ({"tuner": "best_fixed"}, r"Cannot play 'best_fixed' alone: it is the best of many runs"),
        ({"scenario": 5}, r"Cannot use 5 as a scenario"),
    ],
)
def test_a_run_that_cannot_be_played_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness.play(**{"scenario": "digits", **arguments})  # type: ignore[arg-type]


def test_a_played_tuner_that_fails_has_its_traceback(tiny: Path) -> None:
    def broken(job: Job) -> Tuner:
        yield from Run(clocks=10)
        raise RuntimeError("no luck")

    played = harness.play(tiny, broken)
    assert played.score.status == "error"
    assert "RuntimeError: no luck" in played.trace


def test_a_job_that_cannot_be_deployed_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Cannot deploy"):
        harness.deploy(tiny, smaller, out=tmp_path / "job")


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("mistake", "answer"),
    [
        (lambda job: Reconfigure({"learning_rate": 0.1}), r"replace\(setting, learning_rate=0\.1\)"),
        (lambda job: Reconfigure({"worker_count": 3}), r"job\.space\.setting\(\{'worker_count': 3\}\)"),
        (lambda job: Reconfigure("asp"), r"Cannot reconfigure to 'asp': give a Setting"),
        (lambda job: Reconfigure(replace(job.start, learning_rate="fast")), r"learning_rate 'fast': give a number"),
        (lambda job: Reconfigure(replace(job.start, batch_size=2.5)), r"batch_size 2\.5: give a whole number"),
        (lambda job: Reconfigure(replace(job.start, batch_size=True)), r"batch_size True: give a whole number"),
        (lambda job: Reconfigure(replace(job.start, workers="n0")), r"workers 'n0': give a tuple of node names"),
        (lambda job: Reconfigure(replace(job.start, workers=["n0", "n1"])), r"of node names, as in \('n0', 'n1'\)"),
        (lambda job: Reconfigure(replace(job.start, policy=None)), r"policy None: give a name"),
        (lambda job: Run(clocks=2.5), r"Cannot run for clocks=2\.5: give a whole number"),
        (lambda job: Run(clocks="many"), r"Cannot run for clocks='many': give a whole number"),
        (lambda job: Run(seconds="1 min"), r"Cannot run for seconds='1 min': give a number"),
        (lambda job: Run(), r"give exactly one of the two"),
        (lambda job: Install(len), r"install <built-in function len>: give a SyncPolicy, as in `tuners.policies`\. \("),
        (lambda job: Install("asp"), r"Cannot install 'asp': give a SyncPolicy.*replace\(setting, policy='asp'\)"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_tuner_is_answered_with_what_to_write(tiny: Path, mistake: object, answer: str) -> None:
    def tuner(job: Job) -> Tuner:
        yield from mistake(job)  # type: ignore[operator]

    played = harness.play(tiny, tuner)
    assert played.score.status == "error"
    assert played.score.reason.startswith("The tuner raised ")  # and no fault of the system
    assert re.search(answer, played.score.reason), played.score.reason


def test_refusals_are_still_refusals(tiny: Path) -> None:
    def tuner(job: Job) -> Tuner:
        with pytest.raises(Rejected, match="this scenario holds it"):
            yield from Reconfigure(replace(job.start, momentum=0.5))

    assert harness.play(tiny, tuner).score.status == "target"
