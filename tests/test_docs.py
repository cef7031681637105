"""The documents are true: README's examples run, links lead somewhere, and make has the targets that are named."""

import importlib
import io
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.support.marks import slow
from tests.support.processes import one_process
from tuners import embedded, factory_options, parse, resolve

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = ("harness", "reports", "simulators", "tests", "traces", "tuners")
PAGES = sorted(p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("README.md"))
SIDE_PAGES = sorted(
    p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("*.md") if p.name != "README.md"
)
"""Pages beside a README.md: their links are checked; examples belong into the README.md, where they run."""
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.(?:py|toml))(?::.*)?\n")


PARTLY_SHOWN = {"traces/README.md"}
"""Pages that show parts of what their commands print."""


def blocks(language: str, page: str = "README.md") -> list[str]:
    return [text for kind, text in FENCE.findall((ROOT / page).read_text()) if kind == language]


PAGES_WITH_EXAMPLES = [page for page in ("README.md", *PAGES) if blocks("python", page) or blocks("console", page)]


SLOW_PAGES = {"reports/papers/README.md", "simulators/calibration/README.md", "traces/README.md"}
"""Pages whose examples run apart from the quick tests: they calibrate to whole recordings, or play a paper's experiment."""


def desk(page: str, folder: Path) -> Path:
    """Write the files that a page shows into the folder: the blocks whose first line is a comment with a file's name."""
    for text in blocks("python", page) + blocks("toml", page):
        if named := NAMED.match(text):
            target = folder / named[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder


@contextmanager
def on_one_core() -> Iterator[None]:
    """What is started here may use one core, where the system can say so."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(cores))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def shell(command: list[str], folder: Path) -> str:
    """Run a command, which must succeed, with this environment's programs first on the path; return what it prints.

    On one core, so that a comparison starts one process: each takes seconds to import the libraries and to compile.
    """
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PATH": programs, "COLUMNS": "100"}
    with on_one_core():
        started = subprocess.Popen(  # noqa: S603
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    printed, said = started.communicate()
    assert started.returncode == 0, f"{shlex.join(command)}\n{printed}{said}"
    return printed


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that this process is in, as a program that was started there. Comparisons share a process that is there, too.

    A process takes seconds to import the libraries, longer than most examples.
    """
    folder = tmp_path_factory.mktemp("room")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "path", [str(folder), *sys.path])
        with one_process():
            yield folder


@pytest.fixture
def cleared(room: Path) -> Iterator[Path]:
    """The room, without what an earlier page has left: files, and modules, of which another page may have the same names."""
    yield room
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(room):
            del sys.modules[name]
    for left in room.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def our_command(words: list[str]) -> str:
    """Run `harness ...` or `python -m MODULE ...` in this process; return what it prints."""
    printed, said = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(said):
        patch.setattr(sys, "path", [*sys.path])  # the command adds the folder
        status = main(words[1:]) if words[0] == "harness" else importlib.import_module(words[2]).main(words[3:])
    assert not status, f"{shlex.join(words)}\n{printed.getvalue()}{said.getvalue()}"
    return printed.getvalue()


def missing(shown: list[str], printed: str) -> str | None:
    """The first shown line that does not come in its place of what was printed; None if all do.

    Lines follow each other as they were printed. A line "..." stands for any lines, and "…" within a line for any text:
    what the speed of the machine changes. Empty lines and spaces at the end of a line do not count.
    """
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    at, free = 0, False
    for line in (line.rstrip() for line in shown if line.strip()):
        if line == "...":
            free = True
            continue
        found = next((i for i in range(at, len(lines)) if _with_gaps(line).fullmatch(lines[i])), None)
        if found is None or (found > at and not free):
            return line
        at, free = found + 1, False
    return None if free or at == len(lines) else lines[at]


def absent(shown: list[str], printed: str) -> str | None:
    """The first shown line that is no part of what was printed, however that is wrapped; None if all are. "…" as above."""
    flat = " ".join(printed.split())
    return next((line for line in shown if not _with_gaps(" ".join(line.split())).search(flat)), None)


def _with_gaps(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, line.split("…"))))


def test_readme_has_its_examples():
    assert blocks("python")
    assert blocks("console")
    assert set(PAGES_WITH_EXAMPLES) >= {"README.md", "tuners/README.md", "harness/scenario/README.md", "harness/README.md"}


@pytest.mark.timeout(1800)
def test_the_examples_of_readme_run_as_users_run_them(tmp_path):
    """In processes of their own."""
    folder = desk("README.md", tmp_path)
    for program in blocks("python"):
        shell([sys.executable, "-W", "error", "-c", program], folder)
    check_commands("README.md", lambda words: shell(words, folder))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [slow(page) if page in SLOW_PAGES else page for page in PAGES_WITH_EXAMPLES if page != "README.md"],
)
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, cleared):
    """The examples of a page are run in one folder: its programs, then its commands, which may use what those left there."""
    desk(page, cleared)
    for program in blocks("python", page):
        exec(compile(program, page, "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102 (our own example)
    check_commands(page, lambda words: our_command(words) if is_ours(words) else shell(words, cleared))


def is_ours(words: list[str]) -> bool:
    return words[0] == "harness" or words[:2] == ["python", "-m"]


def check_commands(page: str, carry_out: Callable[[list[str]], str]) -> None:
    """Carry out the commands of a page, which must print what it shows."""
    for block in blocks("console", page):
        for command, *shown in (c.splitlines() for c in re.split(r"(?m)^\$ ", block)[1:]):
            printed = carry_out(shlex.split(command, comments=True))
            lost = absent(shown, printed) if page in PARTLY_SHOWN else missing(shown, printed)
            assert lost is None, f"{command}\nnot in its place: {lost}\n\n{printed}"


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        (["a", "b", "c"], True),
        (["a", "", "b  ", "c"], True),
        (["a", "...", "c"], True),
        (["...", "c"], True),
        (["a", "…"], False),
        (["a", "b", "…"], True),
        (["a", "c"], False),
        (["a", "b"], False),
        (["b", "c"], False),
        (["a", "...", "b", "..."], True),
        (["...", "d", "..."], False),
        (["c", "...", "a"], False),
    ],
)
def test_output_is_compared_line_by_line(shown, right):
    assert (missing(shown, "a\n\nb\nc\n") is None) == right


def test_the_first_example_is_short():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 12


def test_readme_begins_with_one_screen():
    screen = README.partition("## From Python")[0]
    assert len(screen.splitlines()) <= 50
    assert (ROOT / re.search(r"!\[.*\]\((.*)\)", screen)[1]).is_file()


def test_the_commands_for_make_exist():
    targets = re.findall(r"\bmake ([a-z]+)", "".join(text for text in blocks("sh")))
    assert {"try", "compare"} <= set(targets)
    for document in DOCUMENTS:
        targets += re.findall(r"`make ([a-z]+)", (ROOT / document).read_text())
    made = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(targets) <= made


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES, *SIDE_PAGES])
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


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES, *SIDE_PAGES])
def test_code_that_a_page_names_is_there(document):
    """`file.name` and `folder.file.name`, where the file is one of the page's folder or of the whole project."""
    page = ROOT / document
    for dotted in re.findall(r"`((?:\w+\.)+\w+)(?:\([^`]*\))?`", page.read_text()):
        *module, name = dotted.split(".")
        files = [f for root in (page.parent, ROOT) if (f := root.joinpath(*module).with_suffix(".py")).is_file()]
        assert name == "py" or not files or re.search(rf"\b{name}\b", files[0].read_text()), dotted


def test_options_that_a_page_names_exist():
    """Of tuners, as in `cruise[gain=0.1]`, and of commands, as in `harness compare --seeds`. A page may name files of its
    reader's, and options that are refused together."""
    wrong = []
    for document in [*DOCUMENTS, *PAGES, *SIDE_PAGES]:
        text = (ROOT / document).read_text()
        for written in re.findall(r"\b[a-z_]+\[[a-z_]+=[^]\s…]*\]", text):
            name, options = parse(written)
            if name in embedded():
                # Raises ValueError, which says what does not exist.
                factory_options.check(written, resolve(name).plain_factory, dict(options))
        for command, word, rest in re.findall(r"harness ([a-z]+) ?([a-z]*)((?:[^\n`|]|\\\n)*)", text):
            named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)
            known = options_of(command) | options_of(command, word) if named else set()
            wrong += [f"{document}: {command} {option}" for option in named if known and option not in known]
    assert wrong == []


@cache
def options_of(*command: str) -> set[str]:
    """The options in the help of a command; none if there is no such command."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()), suppress(SystemExit):
        main([*command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", printed.getvalue()))


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES, *SIDE_PAGES])
def test_numbers_below_one_begin_with_a_zero(document):
    """0.94, not .94. Code, also within a line, is as programs write it."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    bare = re.findall(r"(?<![\w./\])%])\.\d\S*", re.sub(r"`[^`\n]*`", "``", text))
    assert bare == []


def test_the_answers_to_the_twelve_questions_name_what_is_there():
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", README.partition("## Twelve questions")[2], re.MULTILINE)
    assert len(rows) == 12
    for question, answer in rows:
        assert "](" in answer, question
        for names, target in re.findall(r"((?:`\w+`(?: and )?)+) in \[[^]]*\]\(([^)]*)\)", answer):
            assert set(re.findall(r"`(\w+)`", names)) <= set(re.findall(r"\w+", (ROOT / target).read_text())), question


def test_readmes_table_of_tuners_is_that_of_the_released_results():
    """Every cell is the released ratio, with the number of arenas where a tuner does not apply to all of the family."""
    released: dict[tuple[str, str], tuple[int, str]] = {}
    for section in (ROOT / "reports/published/arenas/report.md").read_text().split("\n## ")[1:]:
        family = section.splitlines()[0].removeprefix("Family ")
        for tuner, count, ratio in re.findall(r"^\| ([\w\\]+) \| (\d+) \| ([\d.]+)", section, re.MULTILINE):
            released[family, tuner.replace("\\", "")] = int(count), ratio
    head, _, *rows = re.findall(r"^\|(.*)\|$", README.partition("hindsight, on")[2].partition("## ")[0], re.MULTILINE)
    tuners = [cell.strip() for cell in head.split("|")][1:]
    families = ("learning", "mixed", "placement", "elastic", "cruise", "boat")
    assert len(rows) == len(families)
    for family, row in zip(families, rows, strict=True):
        arenas = {int(count) for count in re.findall(r"^ (\d+) ", row)}
        for tuner, cell in zip(tuners, row.split("|")[1:], strict=True):
            count, ratio = released.get((family, tuner), (0, ""))
            shown = re.fullmatch(r"(?:\*\*)?([\d.]*)(?:\*\*)?(?: in (\d+))?", cell.strip())
            assert shown, cell
            if count:  # a tuner whose runs are another's has no row
                assert float(shown[1]) == pytest.approx(float(ratio), abs=0.051), (family, tuner)
                assert ({int(shown[2])} if shown[2] else arenas) == {count}, (family, tuner)


def test_the_changelog_knows_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_what_readme_says_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make test"]
    assert set(lines) - {"make test"} == {"#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")/.."'}


def test_the_citation_has_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_what_people_run():
    text = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    assert "- run: .ci/run\n" in text
    for folder in re.findall(r"pytest (tests/\S+)", text):
        assert (ROOT / folder).is_dir()
    supported = re.search(r"python-version: (\[.*\])", text)[1]
    assert supported == '["3.11", "3.12", "3.13"]'
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11"
