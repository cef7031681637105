"""Python code in a file of the user's: the files that it consists of, their digest, and its import as a module apart.

A module is imported under a name that has the digest of its files. So a file that has changed is another module, beside the
one before; files of one name in two folders do not meet; and no file of the user's hides an installed package.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["OwnCode", "digest_of", "digest_of_module", "is_own", "read", "with_neighbours"]

_PREFIX = "own_code_"
_OURS = ("harness", "reports", "simulators", "traces", "tuners")  # never a neighbour of the user's file
_INSTALLED = ("site-packages", "dist-packages")


# ----------------------------------------------------------------------------------------------------------------- files


def with_neighbours(module: Path) -> list[Path]:
    """The file of a module, and those of its folder that it imports, directly or not; sorted."""
    left, found = [module], set[Path]()
    while left:
        if (file := left.pop()) in found:
            continue
        found.add(file)
        if file.suffix == ".py" and file.parent.name not in _INSTALLED:
            folders = dict.fromkeys((file.parent, module.parent))
            left += [near for name in _imported(file) for folder in folders for near in _files_of_module(folder, name)]
    return sorted(found)


def _imported(file: Path) -> Iterator[str]:
    """The first parts of the names of modules that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # a neighbour that is imported later, or never
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):  # from . import this, that
            yield from (alias.name for alias in node.names)


def _files_of_module(folder: Path, name: str) -> Sequence[Path]:
    if name in _OURS:
        return ()
    single = folder / f"{name}.py"
    return [single] if single.is_file() else sorted((folder / name).rglob("*.py"))


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the names and the contents of files."""
    return _digest((file.name, file.read_bytes()) for file in files)


def digest_of_module(file: Path) -> str:
    """A digest of a module and its neighbours, wherever they are. Raises ValueError where there is no such file."""
    _check_is_file(file)
    return digest_of(with_neighbours(file.resolve()))


def _check_is_file(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"Cannot read {file}: there is no such file.")


def _digest(contents: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in contents:
        digest.update(f"{name} {len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------- import


def is_own(module: str) -> bool:
    """Whether a module of this name is one that `OwnCode` has imported."""
    return module.startswith(_PREFIX)


def read(file: Path) -> OwnCode:
    """Read a user's file and its neighbours; nothing is run. Raises ValueError where there is no such file."""
    _check_is_file(file)
    try:
        file = file.resolve()
        return OwnCode(file, {path: path.read_bytes() for path in with_neighbours(file)})
    except OSError as error:
        raise ValueError(f"Cannot read {error.filename}: {error.strerror}.") from None


class OwnCode:
    """A file of the user's and its neighbours, as they were read."""

    def __init__(self, file: Path, sources: Mapping[Path, bytes]) -> None:
        self._file, self._sources, self._folder = file, sources, file.parent
        contents = [(str(path), content) for path, content in sources.items()]
        self.digest = _digest(contents)
        """Of the places and the contents of all files."""
        self._package = f"{_PREFIX}{self.digest}"

    def module(self) -> ModuleType:
        """The file as a module, which is run by the first call. Raises what the file raises."""
        if self._package not in sys.modules:
            package = ModuleType(self._package)
            package.__path__ = []
            sys.modules[self._package] = package
            _finder.packages[self._package] = self
        return import_module(f"{self._package}.{self._file.stem}")

    def line(self, error: BaseException) -> str:
        """Where in these files an error was raised, as "mine.py, line 3"; "" where it was not raised there."""
        at, frame = "", error.__traceback__
        while frame is not None:
            if (path := Path(frame.tb_frame.f_code.co_filename)) in self._sources:
                at = f"{path.name}, line {frame.tb_lineno}"
            frame = frame.tb_next
        if isinstance(error, SyntaxError) and error.filename and Path(error.filename) in self._sources:
            at = f"{Path(error.filename).name}, line {error.lineno}"
        return at

    def find(self, name: str) -> ModuleSpec | None:
        """Where the module of this whole name is, if it is one of these files."""
        path = self._folder.joinpath(*name.split(".")[1:])
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file in self._sources:
                folders = [str(path)] if file.name == "__init__.py" else None
                loader = _Loader(self, self._sources[file])
                return spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
        if any(path in file.parents for file in self._sources):  # a folder without __init__.py
            return ModuleSpec(name, None, is_package=True)
        return None

    def import_(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 (the names of `__import__`)
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        """What an import means in these files: a neighbour if there is one of this name, else as anywhere."""
        top = f"{self._package}.{name.partition('.')[0]}"
        if level or self.find(top) is None:
            return builtins.__import__(name, globals, locals, fromlist, level)
        whole = f"{self._package}.{name}"
        if fromlist:
            return builtins.__import__(whole, globals, locals, fromlist, 0)
        import_module(whole)
        return sys.modules[top]


class _Loader(Loader):
    """Runs what was read. A stored compilation is not used: it tells a changed file by its size and second only."""

    def __init__(self, code: OwnCode, source: bytes) -> None:
        self._code, self._source = code, source

    def exec_module(self, module: ModuleType) -> None:
        """Run the module."""
        names = vars(module)
        names["__builtins__"] = vars(builtins) | {"__import__": self._code.import_}
        exec(compile(self._source, str(module.__file__), "exec", dont_inherit=True), names)  # noqa: S102 (the user's own)


class _Finder:
    """Finds the modules of all files that were imported; knows no other module."""

    def __init__(self) -> None:
        self.packages: dict[str, OwnCode] = {}

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """The spec of a module, as `importlib` asks for it."""
        code = self.packages.get(name.partition(".")[0])
        return None if code is None else code.find(name)


_finder = _Finder()
sys.meta_path.insert(0, _finder)
