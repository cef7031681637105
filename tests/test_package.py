"""What a user installs: the wheel is built from the checkout, inspected, and used from another folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("harness", "reports", "simulators", "traces", "tuners")
DATA = (".py", ".toml", ".css", ".npz", "py.typed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str, cwd: Path) -> str:
    """What `command` prints; fails with all of its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped() -> set[str]:
    """The files of the packages that belong in the wheel, by git."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES, cwd=ROOT).splitlines()
    return {name for name in listed if (name.endswith(DATA) or name.startswith("traces/data/")) and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a copy, so that the checkout gets no new files, and the wheel no old ones."""
    source = tmp_path_factory.mktemp("source")
    for name in [*shipped(), "pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"]:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", ".", cwd=source)
    (built,) = (source / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed by pip, and nothing else of this project."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def test_the_wheel_holds_the_five_packages_their_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == shipped()
    assert {f"{p}/py.typed" for p in PACKAGES} <= names
    assert "simulators/cluster/profiles.toml" in names
    assert any(n.startswith("harness/scenarios/") and n.endswith(".toml") for n in names)
    assert any(n.endswith(".css") for n in names)
    assert "traces/data/public/SHA256SUMS" in names
    sizes = {n: (ROOT / n).stat().st_size for n in names if n.startswith("traces/data/")}
    public = sum(size for n, size in sizes.items() if n.startswith("traces/data/public/"))
    assert max(public, sum(sizes.values()) - public) <= 3e6


def test_the_wheel_has_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        (points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        said = Parser().parsestr(archive.read(metadata).decode())
        commands = archive.read(points).decode()
    assert (said["Name"], said["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert said["License-Expression"] == "Apache-2.0"
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    assert "harness = harness.cli.main:main" in commands
    assert "harness = harness.pytest_plugin" in commands


def isolated(folder: Path, *arguments: str, cwd: Path) -> str:
    """Runs Python with `folder` first on its path, from a folder without files of this project."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    module = "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    return run(sys.executable, "-I", "-c", code + module, str(folder), *arguments, cwd=cwd)


def test_the_wheel_works_from_another_folder(installed, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import {', '.join(PACKAGES)}; print(*(p.__file__ for p in ("
    told = run(sys.executable, "-I", "-c", code + ", ".join(PACKAGES) + ")), sep='\\n')", cwd=tmp_path)
    assert told.split() == [str(installed / p / "__init__.py") for p in PACKAGES]


def test_an_editable_installation_is_a_path_that_type_checkers_read(wheel, tmp_path):
    source = wheel.parents[1]
    code = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    name = run(sys.executable, "-W", "ignore", "-c", code, str(tmp_path), cwd=source).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / name) as archive:
        files = [n for n in archive.namelist() if ".dist-info/" not in n]
        (path,) = files
        assert path.endswith(".pth")
        assert archive.read(path).decode().strip() == str(source)


@pytest.fixture
def mypy_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What mypy knows of third-party packages since the last time, which it checks by their files' times and digests."""
    kept = getattr(request.config, "cache", None)  # none with `-p no:cacheprovider`
    return tmp_path if kept is None else Path(kept.mkdir("mypy"))


@pytest.mark.slow
def test_a_users_mypy_sees_the_types(installed, tmp_path, mypy_cache):
    (tmp_path / "use.py").write_text(
        "import harness\n"
        "from tuners.actions import Job, Run, Tuner\n"
        "def mine(job: Job) -> Tuner:\n"
        "    yield from Run(clocks=10)\n"
        "result = harness.compare('digits', ['fixed', mine, lambda job: mine(job)], seeds=6)\n"
        "reveal_type(result.scores)\n"
        "reveal_type(result.plot.times())\n"
        "reveal_type(harness.scenario('digits', seeds=3).name)\n"
        "reveal_type(harness.play('digits', mine).score.completion_seconds)\n"
        "harness.compare('digits', 7)\n"
    )
    # None of their types is in what the user calls, and reading them takes three quarters of mypy's time.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-jax.*,optuna.*,ray.*]\nfollow_imports = skip\n")
    # PEP 561: mypy reads packages with py.typed from the interpreter's folders, and from MYPYPATH as the user's own.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(mypy_cache), "use.py"]
    environment = os.environ | {"MYPYPATH": str(installed)}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout  # noqa: S603
    shown = re.findall(r'Revealed type is "(.*)"', said)
    assert [s.split(".")[-1] for s in shown] == ["DataFrame", "Figure", "str", "float"], said
    assert re.findall(r"use.py:(\d+): error", said) == ["10"], said


def test_its_command_finds_the_scenarios_in_the_wheel(installed, tmp_path):
    assert PROJECT["version"] in isolated(installed, "harness", "--version", cwd=tmp_path)
    assert "digits" in isolated(installed, "harness", "list", "scenarios", cwd=tmp_path)


def test_the_version_is_the_same_everywhere():
    import harness

    assert harness.__version__ == PROJECT["version"]
