"""A user's `tuners.py`, `traces.py` or `reports/` in the working folder hides nothing of ours, and a clash is explained."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from harness import own_packages
from tests.support import arena
from tuners import resolve

ROOT = Path(__file__).parents[2]
MINE = "def tuner(job):\n    yield from ()\n"


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A user's folder with every name that we use, in every form."""
    for name in ("tuners.py", "traces.py", "matplotlib.py", "polars.py", "json.py"):
        (tmp_path / name).write_text(MINE)
    for name in ("reports", "simulators", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "simulators" / "__init__.py").write_text("")
    (tmp_path / "reports" / "page.py").write_text("raise RuntimeError('mine')\n")
    (tmp_path / "ours.py").write_text(MINE)
    (tmp_path / "tiny.toml").write_text(arena.TIMING)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)  # noqa: S603


@pytest.mark.slow
def test_the_command_uses_its_own_packages(crowded: Path) -> None:
    # As the installed command does: the folder of the program, not the working folder, is first on the path.
    (crowded / "bin").mkdir()
    (crowded / "bin" / "harness").write_text("import sys\nfrom harness.cli.main import main\nsys.exit(main())\n")
    command = "compare tiny.toml --tuners fixed,ours:tuner --seeds 1 --jobs 1"
    made = python(crowded, "bin/harness", *command.split())
    assert (made.returncode, made.stderr) == (0, "")
    assert (crowded / "results" / "tiny" / "report.html").is_file()


def test_in_a_checkout_its_own_code_stays_before_an_installed_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that play runs get the path: those of a second checkout played the code of the installed one."""
    copy = str(tmp_path)
    for folder, path in ((ROOT, [str(ROOT), copy]), (tmp_path, [copy, str(ROOT)])):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", path)
        own_packages.working_folder_last()
        assert sys.path == [str(ROOT), copy]


@pytest.mark.parametrize("start", ["module", "script"])
def test_modules_and_scripts_use_our_packages(tmp_path: Path, start: str) -> None:
    """In one folder: each process takes seconds to import our packages, and any name that hid one of them would end it."""
    for name in ("tuners.py", "traces.py"):
        (tmp_path / name).write_text(MINE)
    for name in ("reports", "simulators"):
        (tmp_path / name).mkdir()
    (tmp_path / "tiny.toml").write_text(arena.TIMING)
    (tmp_path / "use.py").write_text("import harness\nprint(harness.play('tiny.toml', 'fixed').score.scenario)\n")
    made = python(tmp_path, *(["use.py"] if start == "script" else ["-m", "harness", "show", "tiny.toml"]))
    assert (made.returncode, made.stderr) == (0, "")
    assert "tiny" in made.stdout


def test_a_tuner_in_a_hidden_file_is_explained(crowded: Path) -> None:
    made = python(crowded, "-P", "-m", "harness", "compare", "tiny.toml", "--tuners", "tuners:tuner")
    assert made.returncode == 2
    assert f"{crowded / 'tuners.py'} is another module 'tuners', hidden by" in made.stderr
    assert "give your file another name" in made.stderr


def test_a_folder_that_hides_an_installed_tuner_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install -e` installs is found after folders on the path, also after those without Python files."""
    beside = tmp_path / "beside"
    (beside / "gentle_tuner").mkdir(parents=True)
    mine = tmp_path / "gentle_tuner.py"
    mine.write_text("def gentle(job):\n    yield from ()\n")

    class Editable:
        """A finder as setuptools installs it."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, mine) if name == "gentle_tuner" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    monkeypatch.syspath_prepend(str(beside))
    try:
        with pytest.raises(ValueError, match="has no 'gentle'") as told:
            _ = resolve("gentle_tuner:gentle").factory
    finally:
        sys.modules.pop("gentle_tuner", None)
    assert f"The folder {beside / 'gentle_tuner'} hides {mine}: run the command in another folder." in str(told.value)


@pytest.mark.parametrize(("name", "kind"), [("tuners.py", "file"), ("reports", "folder")])
def test_a_module_that_was_imported_before_is_explained(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "file":
        (tmp_path / name).write_text(MINE)
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "use.py").write_text(f"import {name.removesuffix('.py')}\nimport harness\n")
    made = python(tmp_path, "use.py")
    assert made.returncode == 1
    last = made.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Cannot use harness here: ")
    assert str(tmp_path / name) in last
    assert last.endswith("Give that file or folder another name.")
