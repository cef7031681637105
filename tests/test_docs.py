"""The documents keep their word: what README shows runs, what it links to is there, what it says to make can be made."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.(?:py|toml))(?::.*)?\n")


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(README) if kind == language]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that README has its reader write: the blocks that begin with a comment naming one."""
    folder = tmp_path_factory.mktemp("desk")
    for text in blocks("python") + blocks("toml"):
        if named := NAMED.match(text):
            target = folder / named[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder


def shell(command: list[str], folder: Path) -> str:
    """What a command prints, with this environment's programs first; it must succeed."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": programs, "COLUMNS": "160"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_readme_has_its_examples():
    assert [bool(NAMED.match(text)) for text in blocks("python")].count(False) >= 1
    assert blocks("toml")
    assert blocks("console")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run(desk, number):
    text = blocks("python")[number]
    shell([sys.executable, "-W", "error", "-c", text], desk)


def test_the_first_example_is_short():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 12


@pytest.mark.timeout(300)
def test_console_examples_run(desk):
    """In their order, in one folder; a line below a command must be found in what the command prints."""
    for text in blocks("console"):
        printed = ""
        for line in text.splitlines():
            if line.startswith("$ "):
                printed = shell(shlex.split(line[2:], comments=True), desk)
            else:
                assert " ".join(line.split()) in " ".join(printed.split()), line


def test_the_commands_for_make_exist():
    targets = re.findall(r"\bmake ([a-z]+)", "".join(text for text in blocks("sh")))
    assert {"compare", "test"} <= set(targets)
    for document in DOCUMENTS:
        targets += re.findall(r"`make ([a-z]+)", (ROOT / document).read_text())
    made = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(targets) <= made


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for name in re.findall(r"`((?:harness|reports|simulators|tests|traces|tuners)/[\w./]*)`", text):
        assert (ROOT / name).exists(), name


def test_the_changelog_knows_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_what_readme_says_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make test"]
    assert set(lines) - {"make test"} == {"#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")/.."'}
