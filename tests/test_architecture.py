"""The rules of the project: order of imports, public names, sizes of folders, unique names, text that no file may have."""

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ("tuners", "traces", "simulators", "harness", "reports")
"""A module imports only from its own package and from those before it."""

LAZILY = {
    ("harness/cli/calibrate.py", "reports"),
    ("harness/cli/main.py", "reports"),
    ("harness/cli/deploy.py", "reports"),
    ("harness/cli/reproduce.py", "reports"),
    ("harness/cli/results.py", "reports"),
    ("harness/cli/share.py", "reports"),
    ("harness/cli/trace.py", "reports"),
    ("harness/comparison/answer.py", "reports"),
}
"""The only imports against the order: commands, and the results of `harness.compare`, import tables, figures and pages
inside functions."""

NOT_FOR_TUNERS = {"datetime", "logging", "os", "pathlib", "random", "socket", "subprocess", "threading", "time"}
"""A tuner does no input or output, reads no clock, and uses no global random generator."""


class Import(NamedTuple):
    module: str
    line: int
    lazy: bool  # inside a function


@cache
def tracked(*suffixes: str) -> tuple[Path, ...]:
    """The files of this checkout that git does not ignore, also those that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()  # noqa: S603
    files = [ROOT / name for name in sorted(names)]
    return tuple(f for f in files if f.is_file() and (not suffixes or f.suffix in suffixes))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = [f for f in tracked(".py") if relative(f).split("/")[0] in ORDER]
MODULES = {relative(f) for f in SOURCES}
PUBLIC = [name for name in sorted(MODULES) if not Path(name).name.startswith("_")]


@cache
def tree_of(name: str) -> ast.Module:
    """Parsed when a test wants it: every process of pytest imports this file, and few of them run its tests."""
    return ast.parse((ROOT / name).read_text())


def imports(tree: ast.Module, package: str) -> list[Import]:
    """Every import of a module, also those for type checkers and those by name at run time."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.append(Import(package if child.level else child.module or "", child.lineno, lazy))
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                named = [a.value for a in child.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found.extend(Import(name, child.lineno, lazy) for name in named)
            visit(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(tree, False)
    return found


def wrong_way(name: str, tree: ast.Module) -> list[str]:
    """The imports of `name` against `ORDER`, as sentences."""
    package = name.split("/")[0]
    later = ORDER[ORDER.index(package) + 1 :]
    return [
        f"{name}:{i.line} imports {i.module}"
        for i in imports(tree, package)
        if (top := i.module.split(".")[0]) in later and not (i.lazy and (name, top) in LAZILY)
    ]


def test_packages_import_in_order():
    assert [sentence for name in sorted(MODULES) for sentence in wrong_way(name, tree_of(name))] == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("tuners/a.py", "import simulators.engine.loop", 1),
        ("tuners/a.py", "if TYPE_CHECKING:\n    from harness import drive", 1),
        ("tuners/a.py", "from tuners.actions import Run\nfrom . import policies\nimport numpy", 0),
        ("traces/a.py", "def f():\n    from simulators import engine", 1),
        ("simulators/a.py", "importlib.import_module('reports.page')", 1),
        ("harness/cli/results.py", "def f():\n    from reports import page", 0),
        ("harness/cli/main.py", "from reports import page", 1),
        ("harness/score.py", "def f():\n    from reports import page", 1),
        ("reports/a.py", "import harness, simulators, traces, tuners", 0),
    ],
)
def test_an_import_against_the_order_is_found(name, source, wrong):
    assert len(wrong_way(name, ast.parse(source))) == wrong


def test_the_contract_imports_only_itself():
    def ours(name):
        return {i.module for i in imports(tree_of(name), "tuners") if i.module.split(".")[0] in ORDER}

    assert ours("tuners/knobs.py") == set()
    assert ours("tuners/settings.py") == {"tuners.knobs"}
    assert ours("tuners/space.py") == {"tuners.knobs", "tuners.settings"}
    assert ours("tuners/prices.py") == {"tuners.settings"}
    assert ours("tuners/actions.py") == {"tuners.prices", "tuners.settings", "tuners.space"}
    assert ours("tuners/policies.py") == {"tuners.actions", "tuners.settings"}


ABOUT_TUNERS = ("tuners/testing/", "tuners/playing/thinking.py")
"""In the package `tuners`, and no tuner: they watch one, and its time."""


def test_a_tuner_has_no_clock_no_files_and_no_global_randomness():
    tuners = [n for n in PUBLIC if n.startswith("tuners/") and not n.startswith(ABOUT_TUNERS)]
    assert len(tuners) > 50
    imported = [(n, i) for n in tuners for i in imports(tree_of(n), "tuners")]
    assert [(n, i.line, i.module) for n, i in imported if i.module.split(".")[0] in NOT_FOR_TUNERS] == []


WALL_CLOCK = re.compile(r"\btime\.(time|time_ns|localtime|gmtime|ctime|strftime)\(|\bdatetime\b|\bCLOCK_REALTIME\b")


def test_live_processes_read_no_clock_that_can_be_set():
    """The wall clock jumps when it is set: timers would fire at once, or never."""
    assert all(map(WALL_CLOCK.search, ("time.time()", "time.time_ns()", "from datetime import datetime")))
    assert not WALL_CLOCK.search("until = time.monotonic() + 3.0")
    live = [name for name in MODULES if name.startswith("harness/live/")]
    assert live
    assert [name for name in live if WALL_CLOCK.search((ROOT / name).read_text())] == []


def defined(tree: ast.Module) -> set[str]:
    """Public names that a module defines, without type variables."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign) and not re.match(r"(typing\.)?(TypeVar|ParamSpec)\(", ast.unparse(node.value)):
            names.update(n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))
    return {n for n in names if not n.startswith("_")}


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def test_a_module_has_a_docstring():
    assert [name for name in sorted(MODULES) if len(ast.get_docstring(tree_of(name)) or "") <= 20] == []


def wrongly_listed(tree: ast.Module) -> list[str]:
    """What `__all__` has too much or too little, as sentences."""
    listed = exported(tree)
    if listed is None:
        return ["there is no __all__: list the public names"]
    bound = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    return [
        *(f"{name} is listed twice" for name, times in Counter(listed).items() if times > 1),
        *(f"{name} is public by its name, yet not listed" for name in sorted(defined(tree) - set(listed))),
        *(f"{name} is listed, yet not there" for name in sorted(set(listed) - defined(tree) - bound)),
    ]


def test_all_lists_the_public_names():
    assert [(name, sentence) for name in PUBLIC for sentence in wrongly_listed(tree_of(name))] == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from a import b\n__all__ = ['b', 'c', 'd']\nc: int = 1\ndef d(): pass\n_e = 1\nF = TypeVar('F')", 0),
        ("c = 1", 1),
        ("__all__ = ['c', 'c']\nc = 1", 1),
        ("__all__ = []\nclass C: pass\ndef d(): pass", 2),
        ("import e\n__all__ = ['c', 'd']\nc = 1", 1),
    ],
)
def test_a_wrong_list_of_public_names_is_found(source, wrong):
    assert len(wrongly_listed(ast.parse(source))) == wrong


def changeable(tree: ast.Module) -> list[str]:
    """Public dataclasses and msgspec structs that are not frozen; private ones and systems may change."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if not any(isinstance(n, ast.FunctionDef) and n.name == "perform" for n in node.body):
            marks = [ast.unparse(d) for d in node.decorator_list if "dataclass" in ast.unparse(d)]
            if any("Struct" in ast.unparse(base) for base in node.bases):
                marks = [", ".join(ast.unparse(k) for k in node.keywords)]
            if not all("frozen=True" in m for m in marks):
                found.append(node.name)
    return found


def test_public_records_are_frozen():
    assert [f"{name}: {record} can be changed" for name in sorted(MODULES) for record in changeable(tree_of(name))] == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("@dataclass(frozen=True, slots=True)\nclass A: pass", []),
        ("@dataclass\nclass A: pass", ["A"]),
        ("class A(Struct): pass\nclass B(msgspec.Struct, frozen=True): pass", ["A"]),
        ("@dataclass\nclass _A: pass\n@dataclass\nclass System:\n    def perform(self): pass", []),
    ],
)
def test_a_record_that_can_be_changed_is_found(source, names):
    assert changeable(ast.parse(source)) == names


# ---------------------------------------------------------------------------------------------------------------- rooms


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def graph() -> dict[str, set[str]]:
    """Every module, and those of ours that it imports; also imports inside functions, except those in `LAZILY`."""
    modules = {module_of(name): name for name in MODULES}
    found: dict[str, set[str]] = {}
    for module, name in modules.items():
        targets = set()
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Import):
                targets |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{a.name}" for a in node.names}
                targets |= named & modules.keys()
                targets |= {node.module} if named - modules.keys() else set()
        found[module] = {t for t in targets & modules.keys() if t != module and (name, t.split(".")[0]) not in LAZILY}
    return found


def room_of(module: str) -> str:
    """The folder of a module; a module directly in one of the five packages counts as a folder of its own."""
    name = next(n for n in (module.replace(".", "/") + ".py", module.replace(".", "/") + "/__init__.py") if n in MODULES)
    parts = name.split("/")[:-1]
    return ".".join(parts) if len(parts) > 1 else module


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle of a directed graph, with its first node again at the end; [] if there is none."""
    try:
        tuple(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_in_no_circle():
    assert circle(graph()) == []


def test_rooms_import_in_no_circle():
    rooms: dict[str, set[str]] = {}
    for module, targets in graph().items():
        here = room_of(module)
        rooms.setdefault(here, set()).update(there for t in targets if (there := room_of(t)) != here)
    assert circle(rooms) == []


def test_nothing_that_plays_runs_needs_what_is_for_tests():
    """`harness play` warns an author of mistakes in the source."""
    users = {m for m, targets in graph().items() if any(t.startswith("tuners.testing") for t in targets)}
    assert {m for m in users if not m.startswith("tuners.testing")} == {"harness.cli.play"}


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_a_folder_is_small_enough_to_see_at_once():
    files = Counter(relative(f.parent) for f in tracked(".py") if f.name != "__init__.py")
    assert files["tuners"] > 0
    assert {folder: number for folder, number in files.items() if number > 15} == {}, "make rooms"


def test_a_folder_has_its_page():
    folders = {relative(f.parent) for f in tracked(".py")} - {"."}
    without = [f for f in sorted(folders) if not (ROOT / f / "README.md").is_file()]
    # CONTRIBUTING explains those of the tests.
    assert [f for f in without if f.partition("/")[0] != "tests"] == [], "say in a README.md what is where in the folder"


def test_a_page_names_every_file_of_its_folder():
    pages = {
        folder: (ROOT / folder / "README.md").read_text().replace("\\", "")
        for folder in {relative(f.parent) for f in SOURCES}
    }
    named = [f for f in SOURCES if f.name != "__init__.py"]
    assert [relative(f) for f in named if f.name not in pages[relative(f.parent)]] == []


def test_one_name_means_one_class():
    names = [
        (node.name, name)
        for name in sorted(MODULES)
        for node in tree_of(name).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    counts = Counter(class_name for class_name, _ in names)
    assert [pair for pair in names if counts[pair[0]] > 1] == []


NAMED_BY_ROLE = {"__init__", "__main__", "tuner"}
"""File names that mean the same in every folder."""


def test_one_name_means_one_file():
    """Within each of the five packages; commands in `harness/cli` are named after the verbs of the command line."""
    names = [n for n in sorted(MODULES) if Path(n).stem not in NAMED_BY_ROLE and not n.startswith("harness/cli/")]
    counts = Counter((n.split("/")[0], Path(n).stem) for n in names)
    assert [n for n in names if counts[(n.split("/")[0], Path(n).stem)] > 1] == []


# Each string is divided, so that this file does not contain what it forbids.
INDEXES = ["py" + r"pi\.(org|python)", "python" + "hosted", "npm" + r"js\.(org|com)", "deb" + r"ian\.org"]
HOSTS = [*INDEXES, "--(extra-)?index" + "-url"]
FOLDERS = [r"(?<![\w.\]\)}$*-])/(work|root|home|opt|tmp/w|Users)" + r"/\w", "file:" + "///"]
SECRETS = [
    "-----BEGIN [A-Z ]*PRIV" + "ATE KEY",
    r"\bgh[pousr]_\w{30}",
    r"\bAKI" + r"A[A-Z0-9]{16}\b",
    r"://[^/\s:@]+:[^/\s@]+@",
]
FORBIDDEN = {
    "a package registry": "|".join(HOSTS),
    "a folder of one machine": "|".join(FOLDERS),
    "a secret": "|".join(SECRETS),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for match in re.finditer(FORBIDDEN[what], text := data.decode()):
            found.append(f"{relative(path)}:{text.count(chr(10), 0, match.start()) + 1} names {what}")
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry", "https://py" + "pi.org/simple"),
        ("a package registry", "--index" + "-url x"),
        ("a folder of one machine", "open('/ro" + "ot/data')"),
        ("a folder of one machine", "file:" + "///mirror"),
        ("a secret", "https://me:secret" + "@host"),
    ],
)
def test_the_patterns_find_what_they_forbid(what, line):
    assert re.search(FORBIDDEN[what], line)


def test_pins_name_versions_and_hashes_only():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert len(entries) > 100
    for line in entries:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!]+( ; [^\\]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
