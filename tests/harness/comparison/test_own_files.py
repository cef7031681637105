"""Runs of two versions of a user's tuner, or of a file that a scenario names, are never taken for runs of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.comparison.compare import Planned, compare
from harness.comparison.merge import merge
from harness.comparison.own_files import digests_of_scenarios, digests_of_tuners
from harness.scenario import load
from tests.support import arena
from tests.support.made_up import calibrated_toml
from traces import store
from tuners import resolve
from tuners.entries import entry_of

TUNER = "from dataclasses import replace\nfrom tuners.actions import Reconfigure, Run\nfrom own_helper import CLOCKS\n\n"
TUNER += "def mine(job):\n    yield from Run(clocks=CLOCKS)\n"
NAME = "own_tuner:mine"

pytestmark = pytest.mark.usefixtures("kept_processes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scenario, and a tuner in two files that can be imported."""
    (tmp_path / "tiny.toml").write_text(arena.TINY)
    (tmp_path / "own_tuner.py").write_text(TUNER)
    (tmp_path / "own_helper.py").write_text("CLOCKS = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_tuner", "own_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def play(folder: Path, out: str, *tuners: str, **options: object) -> list[int]:
    """How many runs were made before, whenever runs were planned."""
    before: list[int] = []

    def watch(event: object) -> None:
        if isinstance(event, Planned):
            before.append(event.made_before)

    given: dict[str, object] = {"seeds": 1, "system": arena.SYSTEM, "watch": watch} | options
    compare([folder / "tiny.toml"], tuners, out=folder / out, **given)  # type: ignore[arg-type]
    return before


def test_a_tuner_whose_code_has_changed_is_not_mixed_with_what_it_was(folder: Path) -> None:
    play(folder, "out", "fixed", NAME)
    assert play(folder, "out", "fixed", NAME, seeds=2, resume=True) == [2]
    (folder / "own_helper.py").write_text("CLOCKS = 6\n")
    was = (folder / "out" / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=rf"the code of tuner '{NAME}' has changed .* --resume --replace '{NAME}'"):
        play(folder, "out", "fixed", NAME, seeds=3, resume=True)
    assert (folder / "out" / "manifest.json").read_bytes() == was
    assert store.load_results(folder / "out").scores.height == 4
    assert play(folder, "out", "fixed", NAME, seeds=2, resume=True, replace=[NAME]) == [2]  # those of fixed
    assert play(folder, "out", "fixed", NAME, seeds=2, resume=True) == [4]


def test_all_tuners_whose_code_has_changed_are_named_at_once(folder: Path) -> None:
    (folder / "own_tuner.py").write_text(TUNER + "def other(job):\n    yield from Run(clocks=7)\n")
    both = [NAME, "own_tuner:other"]
    play(folder, "out", *both)
    (folder / "own_helper.py").write_text("CLOCKS = 6\n")
    with pytest.raises(ValueError, match=rf"the code of 2 tuners has changed .* --replace '{','.join(both)}'"):
        play(folder, "out", *both, resume=True)
    assert play(folder, "out", *both, resume=True, replace=both) == [0]


def test_comparisons_of_two_versions_of_a_tuner_are_not_merged(folder: Path) -> None:
    play(folder, "a", NAME)
    play(folder, "b", NAME, "fixed")
    assert store.read_manifest(merge([folder / "a", folder / "b"], folder / "both"))["own_tuners"].keys() == {NAME}
    (folder / "own_tuner.py").write_text(TUNER + "# changed\n")
    play(folder, "c", NAME, "fixed")
    with pytest.raises(ValueError, match=f"versions of tuner '{NAME}' differ"):
        merge([folder / "a", folder / "c"], folder / "none")
    assert not (folder / "none").exists()


def test_a_file_that_a_scenario_names_must_be_as_it_was(folder: Path) -> None:
    nodes = 'nodes = [{ type = "edge-4core", count = 5 }]'
    assert nodes in arena.TINY
    own = arena.TINY.replace(nodes, 'nodes = [{ type = "toy", count = 5 }]\nprofiles = "made.toml"')
    (folder / "tiny.toml").write_text(own)
    (folder / "made.toml").write_text(calibrated_toml(nic_bytes_per_second=(5e5, 2e6)))
    play(folder, "out", "fixed")
    assert play(folder, "out", "fixed", resume=True) == [1]
    (folder / "made.toml").write_text(calibrated_toml(nic_bytes_per_second=(5e5, 3e6)))
    with pytest.raises(ValueError, match=r"made\.toml, which scenario 'tiny' names, has changed since"):
        play(folder, "out", "fixed", seeds=2, resume=True)


MODEL = """
import jax.numpy as jnp
from own_layers import SCALE

def make_model(shape, classes):
    init = lambda key: SCALE * jnp.ones((64, classes))
    return init, lambda parameters, x: x.reshape(len(x), -1) @ parameters
"""


@pytest.fixture
def modelled(folder: Path) -> Path:
    """The folder, whose scenario trains a model in two files."""
    text = arena.TINY.replace('"cruise-nmf"', '"digits-logistic"\nmodel = "own_model.py:make_model"')
    (folder / "tiny.toml").write_text(text)
    (folder / "own_model.py").write_text(MODEL)
    (folder / "own_layers.py").write_text("SCALE = 1.0\n")
    return folder


def test_a_model_of_the_users_must_be_as_it_was(modelled: Path) -> None:
    play(modelled, "out", "fixed")
    assert store.read_manifest(modelled / "out")["own_files"]["tiny"].keys() == {"own_model.py"}
    assert play(modelled, "out", "fixed", resume=True) == [1]
    (modelled / "own_layers.py").write_text("SCALE = 2.0\n")
    with pytest.raises(ValueError, match=r"own_model\.py, which scenario 'tiny' names, has changed since"):
        play(modelled, "out", "fixed", seeds=2, resume=True)


def test_a_model_that_changes_meanwhile_is_a_row_with_the_reason(modelled: Path) -> None:
    def watch(event: object) -> None:
        if isinstance(event, Planned):
            (modelled / "own_layers.py").write_text("SCALE = 3.0\n")

    play(modelled, "out", "fixed", watch=watch)
    row = store.load_results(modelled / "out").scores.row(0, named=True)
    assert row["status"] == "error"
    assert "own_model.py is not the file with which the comparison began" in row["reason"]


def test_a_model_that_cannot_be_trained_is_refused_by_every_command(
    modelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modelled / "own_layers.py").write_text("SCALE = 1j\n")
    scenario = str(modelled / "tiny.toml")
    for command in (["compare", scenario, "--tuners", "fixed", "--out", str(modelled / "out")], ["play", scenario, "fixed"]):
        assert main(command) == 2
        assert "init returned parameters all of complex64: they have to be float32." in capsys.readouterr().err
    assert main(["show", scenario]) == 2
    assert not (modelled / "out").exists()


def test_what_the_digests_are_of(folder: Path) -> None:
    mine = resolve(NAME)
    found = digests_of_tuners([resolve("fixed"), mine])
    assert found.keys() == {NAME}
    (folder / "unrelated.py").write_text("1 +")  # not imported
    assert digests_of_tuners([mine]) == found
    assert set(digests_of_tuners([entry_of(mine.factory)]).values()) == set(found.values())  # the function itself
    assert (
        digests_of_scenarios([load("digits"), load("replay-spot")]) == {}
    )  # recordings that ship have digests of their own
    (folder / "own_helper.py").write_text("CLOCKS = 7\n")
    assert digests_of_tuners([mine]) != found


def test_what_cannot_be_replaced_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["compare", str(folder / "tiny.toml"), "--tuners", "fixed,asp", "--seeds", "1", "--out", str(folder / "out")]
    assert main([*given, "--replace", "asp"]) == 2
    assert "--replace is for a folder that --resume goes on with" in capsys.readouterr().err
    assert main([*given, "--resume", "--replace", "ssp"]) == 2
    assert "Cannot make the runs of 'ssp' again: choose of fixed, asp." in capsys.readouterr().err
    assert not (folder / "out").exists()
