"""A live contest: a results folder as that of a comparison, a row for what fails, and live beside simulated."""

import html
import json
import math
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from harness.cli.main import main
from harness.cli.results import tuner_names
from harness.comparison import compare
from harness.drive import play
from harness.live.deploy import contest, job_folder
from harness.live.deploy.deployment import Interrupted
from harness.live.processes import launch
from harness.scenario import system
from harness.score import score
from reports.fidelity.live import agreement, agreement_of, beside_rows, tau
from tests.live.deploy.test_deploy import SMALL, Job, ray_alone
from tests.support.made_up import score_row
from traces import schema, store
from traces.store import Results

__all__ = ["ray_alone"]

TUNERS = """
from dataclasses import replace
from tuners.actions import Reconfigure, Run

def faster(job):
    yield from Run(clocks=20)
    yield from Reconfigure(replace(job.start, learning_rate=0.5))

def broken(job):
    raise KeyError("of the test")
    yield
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL.replace("seconds = 100", "seconds = 3"))
    (tmp_path / "contestants.py").write_text(TUNERS)
    return tmp_path


@pytest.fixture
def simulated(monkeypatch):
    """Jobs that are played in the simulator in place of real processes; lists them."""
    played, joined = [], []

    @contextmanager
    def cluster(address, *, insecure, processes):
        joined.append((address, insecure))
        assert processes == 6  # with the coordinator and the evaluator
        yield cluster.offers

    cluster.offers = (launch.ClusterNode("here", "this machine", math.inf),)

    def play_on(wanted, offers, console):
        played.append((wanted.entry.name, wanted.seed))
        if len(played) == play_on.stops:
            raise Interrupted("Stopped.")
        if wanted.entry.name == "asp":
            raise RuntimeError("Cannot start worker/n0: of the test")
        with job_folder.claimed(wanted.out, wanted.scenario, wanted.entry.name, wanted.seed, resume=False):
            made = play(wanted.entry.factory, system(wanted.scenario, wanted.seed))
            contest.save(wanted.out, score(made, **wanted.run), made.exchanges, made.outcome.trace)
        return made

    play_on.stops = 0
    monkeypatch.setattr("harness.cli.deploy.cores", lambda: 1)  # each process takes seconds to start
    monkeypatch.setattr(launch, "cluster", cluster)
    monkeypatch.setattr(contest, "play_on", play_on)
    return play_on, played, joined


COMMAND = ("deploy", "--live", "small.toml", "--tuners", "fixed,asp,contestants:broken", "--seeds", "2", "--out", "out")


@pytest.mark.slow
def test_a_contest_is_a_results_folder(here, simulated, capsys):
    _, played, joined = simulated
    assert main([*COMMAND, "--address", "h:1", "--insecure"]) == 1  # some have failed
    assert joined == [("h:1", True)]  # one cluster for all
    assert played == [(t, seed) for seed in (0, 1) for t in ("fixed", "asp", "contestants:broken")]
    rows = store.load_results(here / "out").scores.sort("tuner", "seed")
    assert rows["tuner"].to_list() == ["asp"] * 2 + ["contestants:broken"] * 2 + ["fixed"] * 2
    assert rows["status"].to_list() == ["error"] * 4 + ["budget"] * 2
    assert rows["reason"][0] == "Cannot start worker/n0: of the test"
    assert "KeyError: 'of the test'" in rows["reason"][2]
    assert json.loads((here / "out" / "manifest.json").read_text())["system"] == "live"
    said = capsys.readouterr().out
    assert said.index("6 jobs, one after the other, of at most 3 s each: 18 s in all") < said.index("run 1 of 6")
    assert "fixed, seed 1: run 4 of 6" in said
    assert main(["report", "out"]) == 0
    assert "live beside simulated" not in capsys.readouterr().out
    assert main([*COMMAND, "--resume"]) == 1
    assert (len(played), len(joined)) == (6, 1)  # what is finished joins no cluster again


def test_a_tuner_with_nothing_to_tune_is_not_played(here, simulated, capsys):
    _, played, _ = simulated
    names = "bsp,uniform_gpus,contestants:faster"
    assert main(["deploy", "--live", "small.toml", "--tuners", names, "--seeds", "1", "--out", "out"]) == 0
    assert set(store.load_results(here / "out").not_applicable["tuner"]) == {"bsp", "uniform_gpus"}
    assert played == [("contestants:faster", 0)]
    assert "\nnot applicable. The job starts with 'bsp' already.\n" in capsys.readouterr().out


def test_all_tuners_of_a_live_contest_are_its_contestants():
    names = tuner_names("all,fixed", oracle=False)
    assert names == [*(n for n in tuner_names("all") if n != "best_fixed"), "fixed"]


@pytest.mark.parametrize("cpus", [0.0, 1.0])
def test_a_contest_that_is_refused_leaves_nothing(here, simulated, capsys, monkeypatch, cpus):
    """Its cluster has too few CPUs, or cannot be joined."""
    _, played, _ = simulated
    joined, before = launch.cluster, sorted(here.iterdir())

    def cluster(address, **options):
        if not cpus:
            raise ValueError(f"Cannot join the Ray cluster at {address}: of the test.")
        return joined(address, **options)

    joined.offers = (launch.ClusterNode("one", "10.0.0.1", cpus),)
    monkeypatch.setattr(launch, "cluster", cluster)
    assert main([*COMMAND, "--address", "h:1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("harness: Cannot place 4 nodes of 1 CPU each" if cpus else "harness: Cannot join")
    assert sorted(here.iterdir()) == before
    assert played == []


def unwrapped(text):
    """The same whatever the width of the terminal."""
    return " ".join(text.split())


def test_a_contest_that_was_interrupted_goes_on(here, simulated, capsys):
    play_on, played, _ = simulated
    play_on.stops = 3
    assert main(COMMAND) == 130
    said = capsys.readouterr().err
    assert "2 runs are finished, in out; the same command with --resume goes on." in said
    assert main(["report", "out"]) == 0
    lacks = "small: 4 of 6 runs are missing: fixed and asp (seed 1), contestants:broken (seeds 0 and 1)."
    said = unwrapped(capsys.readouterr().out)
    assert lacks in said
    assert "The command that began them goes on with --resume." in said
    assert lacks in (here / "out" / "report.html").read_text()
    before = played.copy()
    assert main(COMMAND) == 2
    assert main([*COMMAND, "--resume"]) == 1
    assert played == [*before, *[("contestants:broken", 0), ("fixed", 1), ("asp", 1), ("contestants:broken", 1)]]
    assert len(store.load_results(here / "out").scores) == 6
    capsys.readouterr()
    assert main(["report", "out"]) == 0
    assert "missing" not in capsys.readouterr().out


def test_a_contest_that_was_interrupted_in_its_first_run_says_that_none_is_finished(here, simulated, capsys):
    simulated[0].stops = 1
    assert main(COMMAND) == 130
    assert "No run is finished yet; the same command with --resume goes on." in capsys.readouterr().err
    assert main(["report", "out"]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "No run is in this folder yet." in said
    assert "small: 6 of 6 runs are missing: fixed, asp and contestants:broken (seeds 0 and 1)." in said


def test_live_runs_are_put_beside_simulated_ones_and_those_that_are_missing_are_named(here, simulated, capsys, monkeypatch):
    def interrupted(*given, **named):
        def watch(event):
            if isinstance(event, compare.Finished):
                raise KeyboardInterrupt

        whole(*given, **named | {"jobs": 1}, watch=watch)

    whole = compare.compare
    monkeypatch.setattr(compare, "compare", interrupted)
    names = "fixed,contestants:faster"
    command = ["deploy", "--live", "small.toml", "--tuners", names, "--seeds", "1", "--out", "out", "--beside"]
    assert main(command) == 130
    simulated_folder = Path("out", "simulated")
    assert f"1 run is finished, in {simulated_folder}; the same command with --resume goes on." in capsys.readouterr().err
    assert main(["report", "out"]) == 0
    lacks = "In simulation, small: 1 of 2 runs is missing: contestants:faster (seed 0)."
    said = unwrapped(capsys.readouterr().out)
    assert lacks in said
    assert "The command that began them goes on with --resume." in said
    assert lacks in (here / "out" / "report.html").read_text()
    monkeypatch.setattr(compare, "compare", whole)
    assert main([*command, "--resume"]) == 0
    for _ in range(2):
        said = capsys.readouterr().out
        assert "missing" not in said
        assert "small, live beside simulated" in said
        assert "Kendall's tau of the two orders: 1.00" in said
        page = html.unescape((here / "out" / "report.html").read_text())
        assert "Live beside simulated" in page
        assert "Kendall's tau of the two orders: 1.00" in page
        assert main(["report", "out"]) == 0


def test_what_cannot_be_played_is_refused_before_anything_starts(here, simulated, capsys):
    for tuners, words in (("fixed,best_fixed", "Cannot play best_fixed live"), ("fixed,nobody", "No tuner 'nobody'")):
        assert main(["deploy", "--live", "small.toml", "--tuners", tuners, "--out", "out"]) == 2
        assert words in capsys.readouterr().err
    assert main(["deploy", "--live", "cruise-nmf-32", "--tuners", "fixed", "--out", "out"]) == 2
    assert "is timing-only" in capsys.readouterr().err
    assert not (here / "out").exists()
    assert simulated[1:] == ([], [])


def results(**seconds):
    rows = [score_row("s", tuner, seed, each) for tuner, them in seconds.items() for seed, each in enumerate(them)]
    empty = (pl.DataFrame(schema=table) for table in (schema.EVALUATIONS, schema.SETTINGS, schema.HOST))
    return Results({"scenarios": ["s"]}, pl.DataFrame(rows, schema=schema.SCORES), *empty)


def test_the_orders_of_both_worlds_are_compared():
    live, simulated = results(a=[10, 20, 30], b=[40], c=[50], d=[1]), results(a=[2], b=[4], c=[3])
    rows = beside_rows(live, simulated, "s")
    assert [(row.tuner, row.live_seconds, row.simulated_seconds) for row in rows[1:]] == [
        ("a", 20, 2),
        ("b", 40, 4),
        ("c", 50, 3),
    ]
    assert rows[0].tuner == "d"
    assert math.isnan(rows[0].simulated_seconds)
    assert rows[1].live_done == "3/3"
    assert tau(rows) == pytest.approx(1 / 3)  # two pairs agree, one does not
    assert math.isnan(tau(rows[:2]))


def test_how_sure_the_order_is_shows_in_resampled_seeds():
    """One of three seeds is so slow that medians of resampled seeds change the order: in 7 of 27 draws, in each world."""
    seconds = {"a": [1, 1, 9], "b": [2, 2, 2]}
    both = agreement_of(beside_rows(results(**seconds), results(**seconds), "s"))
    assert (both.tau, both.low, both.high, both.fastest) == (1.0, -1.0, 1.0, ("a", "a"))
    assert both.same_fastest == pytest.approx((20 / 27) ** 2 + (7 / 27) ** 2, abs=0.04)
    said = agreement(beside_rows(results(**seconds), results(**seconds), "s"))
    assert said.startswith(
        "Kendall's tau of the two orders: 1.00 (90 % of resampled seeds: -1.00 to 1.00). a is the fastest in both;"
    )
    steady = {"a": [1, 1.1, 1.2], "b": [2, 2.1, 2.2]}
    turned = agreement_of(beside_rows(results(**steady), results(a=steady["b"], b=steady["a"]), "s"))
    assert turned[:5] == (-1.0, -1.0, -1.0, ("a", "b"), 0.0)
    few = beside_rows(results(a=[1, 2], b=[3, 4]), results(a=[1, 2], b=[3, 4]), "s")
    assert math.isnan(agreement_of(few).low)
    assert agreement(few) == (
        "Kendall's tau of the two orders: 1.00. a is the fastest in both. "
        "Simulated times are off by 0.0% in the median over tuners, 0.0% at most."
    )
    assert "fewer than two" in agreement(few[:1])


def test_where_all_tuners_take_equally_long_in_one_world_there_is_no_order():
    """As where all of them miss the target there, and count the budget. It was said that fewer than two were in both."""
    for world in ([100, 100, 100], [100]):
        rows = beside_rows(results(a=[80, 81, 82], b=[90, 91, 92]), results(a=world, b=world), "s")
        assert agreement(rows) == (
            "Kendall's tau of the two orders: - (in one world, all took equally long). "
            "Simulated times are off by 16.7% in the median over tuners, 23.5% at most."
        )


def test_how_far_simulated_times_are_off():
    """Medians over seeds of 10, 20 and 40 s are simulated as 9, 21 and 50; of the fourth tuner there is one world only."""
    live, simulated = results(a=[9, 10, 11], b=[20], c=[40], d=[1]), results(a=[9], b=[21], c=[40, 50, 60])
    found = agreement_of(beside_rows(live, simulated, "s"))
    assert (found.median_error, found.largest_error) == (pytest.approx(0.1), pytest.approx(0.25))
    said = agreement(beside_rows(live, simulated, "s"))
    assert said.endswith("Simulated times are off by 10.0% in the median over tuners, 25.0% at most.")
    assert math.isnan(agreement_of(beside_rows(live, simulated, "s")[:2]).median_error)  # one tuner in both worlds


def test_the_released_contest_is_what_its_page_says():
    """`reports/published/live-contest/runs.csv`, and what `reports/published/README.md` says of it."""
    published = Path(__file__).parents[3] / "reports/published"
    runs = pl.read_csv(published / "live-contest/runs.csv")
    told = (published / "README.md").read_text()
    found = []
    for scenario in ("contest-equal", "contest-unlike"):
        of = dict(runs.filter(pl.col("scenario") == scenario).group_by("tuner", maintain_order=True))
        live, simulated = (results(**{name: r[column] for (name,), r in of.items()}) for column in runs.columns[-2:])
        found.append(agreement_of(beside_rows(live, simulated, "s")))
    ends = [[f"{end:.2f}".removesuffix(".00") for end in (each.low, each.high)] for each in found]
    lines = (
        [f"{each.tau:.2f} ({low} to {high})" for each, (low, high) in zip(found, ends, strict=True)],
        [f"{100 * each.median_error:.1f} %, {100 * each.largest_error:.2g} %" for each in found],
        [f"{each.fastest[0]} in both, {100 * each.same_fastest:.0f} %" for each in found],
    )
    assert all(each.fastest == ("asp", "asp") for each in found)
    for equal, unlike in lines:
        assert f" | {equal} | | {unlike} | |\n" in told


@pytest.mark.live
@pytest.mark.timeout(400)
def test_a_contest_on_ray(here, ray_alone):
    (here / "small.toml").write_text(SMALL)
    job = Job("small.toml", "--tuners", "contestants:faster,contestants:broken", "--seeds", "1", "--out", "out")
    assert job.ended() == 1, job.said
    assert job.nothing_left()
    rows = store.load_results(here / "out").scores
    assert dict(zip(rows["tuner"], rows["status"], strict=True)) == {
        "contestants:faster": "target",
        "contestants:broken": "error",
    }
    assert job.said.count("Ending the job's processes.") == 2
    assert job.said.count("Ending Ray.") == 0
