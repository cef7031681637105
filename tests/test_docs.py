"""The documents are true: README's examples run, links lead somewhere, and make has the targets that are named."""

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
FOLDERS = ("harness", "reports", "simulators", "tests", "traces", "tuners")
PAGES = sorted(p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("README.md"))
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.(?:py|toml))(?::.*)?\n")


STORY = (ROOT / "traces" / "README.md").read_text()


def blocks(language: str, page: str = README) -> list[str]:
    return [text for kind, text in FENCE.findall(page) if kind == language]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that README shows: the blocks whose first line is a comment with a file's name."""
    folder = tmp_path_factory.mktemp("desk")
    for text in blocks("python") + blocks("toml"):
        if named := NAMED.match(text):
            target = folder / named[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder


def shell(command: list[str], folder: Path) -> str:
    """Run a command, which must succeed, with this environment's programs first on the path; return what it prints."""
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
    run_console(README, desk)


@pytest.mark.timeout(900)
def test_the_story_of_recordings_runs(tmp_path):
    for text in blocks("toml", STORY):
        (tmp_path / NAMED.match(text)[1]).write_text(text)
    run_console(STORY, tmp_path)


def run_console(page: str, folder: Path) -> None:
    """In order, in one folder. The output of a command must contain each line below it."""
    for text in blocks("console", page):
        printed = ""
        for line in text.splitlines():
            if line.startswith("$ "):
                printed = shell(shlex.split(line[2:], comments=True), folder)
            else:
                assert " ".join(line.split()) in " ".join(printed.split()), line


def test_the_commands_for_make_exist():
    targets = re.findall(r"\bmake ([a-z]+)", "".join(text for text in blocks("sh")))
    assert {"compare", "test"} <= set(targets)
    for document in DOCUMENTS:
        targets += re.findall(r"`make ([a-z]+)", (ROOT / document).read_text())
    made = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(targets) <= made


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES])
def test_links_lead_somewhere(document):
    page = ROOT / document
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if target.startswith("https://"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}#{anchor}"
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]*)`", text):
        assert (ROOT / name).exists(), name


def test_the_answers_to_the_twelve_questions_name_what_is_there():
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", README.partition("## Twelve questions")[2], re.MULTILINE)
    assert len(rows) == 12
    for question, answer in rows:
        assert "](" in answer, question
        for names, target in re.findall(r"((?:`\w+`(?: and )?)+) in \[[^]]*\]\(([^)]*)\)", answer):
            assert set(re.findall(r"`(\w+)`", names)) <= set(re.findall(r"\w+", (ROOT / target).read_text())), question


def test_the_changelog_knows_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_what_readme_says_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make test"]
    assert set(lines) - {"make test"} == {"#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")/.."'}
