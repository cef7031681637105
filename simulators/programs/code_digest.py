"""A digest of code as it is in memory: equal in two processes only where they trace the same program.

The code in memory counts, not the files: a file may have been edited since it was imported, and a name of a module may have
been given another value. Followed are our own packages; of the libraries, the caller compares the versions. A function in a
file of the user's (`own_code`) is followed, too, to all that it names.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import jax
import msgspec
import numpy as np

from simulators.programs.own_code import is_own

__all__ = ["UnknownCodeError", "digest"]

_OURS = ("simulators", "tuners")
_LIBRARIES = (
    *("builtins", "collections", "dataclasses", "enum", "functools", "itertools", "math", "operator", "typing"),
    *("jax", "jaxlib", "msgspec", "numpy", "optax"),
)
_OF_TUPLES = ("_asdict", "_field_defaults", "_fields", "_make", "_replace")  # what every class of named tuples has
_NO_PART = ("__annotations__", "__dict__", "__doc__", "__weakref__")  # of a class, what no program depends on
_WHOLE = ("PjitFunction", "_lru_cache_wrapper")  # wrappers that compute what the function in them does
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


class UnknownCodeError(ValueError):
    """A value leads to code that is not followed, such as a policy in a user's own file."""


def digest(*values: Any) -> str:
    """A digest of plain values, functions and classes, and of every module of ours that these lead to.

    Functions count with their closures and defaults. Raises UnknownCodeError for what is neither plain nor followed.
    """
    made = _Digest()
    for value in values:
        made.add(value)
    done: set[str] = set()
    while waiting := sorted(made.modules - done):
        for name in waiting:
            made.add_module(sys.modules[name])
        done.update(waiting)
    return made.hexdigest()


class _Digest:
    """Says values in words, one after another, and collects the names of the modules that they lead to."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._words: list[str] = []
        self._open: list[int] = []  # values that are being added, because functions lead to themselves

    def hexdigest(self) -> str:
        return hashlib.sha256(repr(self._words).encode()).hexdigest()

    def add(self, value: Any) -> None:
        """Add one value. Raises UnknownCodeError."""
        if type(value) in _PLAIN or isinstance(value, _PLAIN):  # most are of these types themselves, which is found faster
            self._say(type(value).__name__, repr(value))
        elif id(value) in self._open:
            self._say("again", str(self._open[::-1].index(id(value))))
        else:
            self._open.append(id(value))
            self._add_compound(value)
            self._open.pop()

    def add_module(self, module: ModuleType) -> None:
        """Add what a module defines. Values that are neither plain nor code count by their types only: they are caches,
        patterns and types for type checkers."""
        # Without what this module keeps of others: it was empty at the first digest of a process, which then differed.
        kept = {name: value for name, value in sorted(vars(module).items()) if value is not _known}
        named = {name: value for name, value in kept.items() if not name.startswith("__")}
        parts = list(_parts_of(named, module.__name__))
        before, made, modules = _known.get(module.__name__, ([], "", frozenset()))
        if not _same(before, parts):
            alone = _Digest()
            for name, value in named.items():
                alone.add_lightly(name, value, module.__name__)
            made, modules = alone.hexdigest(), frozenset(alone.modules)
            _known[module.__name__] = parts, made, modules
        self._say("module", module.__name__, made)
        self.modules |= modules

    def add_lightly(self, name: str, value: Any, module: str) -> None:
        self._say("name", name)
        if isinstance(value, ModuleType):
            self._lead_to(value.__name__)
        elif isinstance(value, type) and value.__module__ == module:
            self._say("class", value.__qualname__, *(base.__qualname__ for base in value.__mro__))
            for attribute, part in sorted(vars(value).items()):
                if attribute not in _NO_PART:
                    self.add_lightly(attribute, part, module)
        elif isinstance(value, property):
            self.add_lightly(name, value.fget, module)
        else:
            try:
                self.add(value)
            except UnknownCodeError:
                self._say("type", type(value).__qualname__)

    def _add_compound(self, value: Any) -> None:
        """Add a value that has parts. Raises UnknownCodeError."""
        if isinstance(value, CodeType):
            self._say("code", _code_digest(value))
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, tuple | list):
            self.add(type(value))
            self._add_all("sequence", value)
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            self._add_array(value)
        elif isinstance(value, ModuleType) and (is_own(value.__name__) or value.__name__.partition(".")[0] in _LIBRARIES):
            self._say("module", value.__name__)
        elif isinstance(value, Mapping):
            self._add_all("mapping", (item for pair in value.items() for item in pair))
        elif isinstance(value, set | frozenset):
            self._add_all("set", sorted(value, key=repr))
        elif isinstance(value, functools.partial):
            self._add_all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType | staticmethod | classmethod):
            self._add_all("method", (value.__func__, getattr(value, "__self__", None)))
        elif is_dataclass(value):
            self.add(type(value))
            self._add_all("dataclass", (getattr(value, field.name) for field in fields(value)))
        elif isinstance(value, msgspec.Struct):
            self.add(type(value))
            self._add_all("struct", (getattr(value, field) for field in value.__struct_fields__))
        elif isinstance(getattr(value, "__wrapped__", None), FunctionType) and not self._is_library(value.__wrapped__):
            if is_own(value.__wrapped__.__module__ or "") and type(value).__name__ not in _WHOLE:
                raise UnknownCodeError(f"Cannot digest {value!r}: it does not compute {value.__wrapped__!r} alone.")
            self.add(value.__wrapped__)
        elif self._is_library(value):
            self._say("library", value.__module__, value.__qualname__)
        else:
            raise UnknownCodeError(f"Cannot digest {value!r}: it is neither plain nor code of ours.")

    def _add_array(self, array: Any) -> None:
        if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        values = np.asarray(array)
        if values.dtype.kind not in "biufcV" or values.dtype.hasobject:
            raise UnknownCodeError(f"Cannot digest an array of {values.dtype}: its numbers are not in it.")
        self._say("array", str(values.dtype), str(values.shape), values.tobytes().hex())

    def _add_class(self, kind: type) -> None:
        self._say("class", kind.__module__, kind.__qualname__)
        if not is_own(kind.__module__):
            if kind.__module__.partition(".")[0] not in (*_OURS, *_LIBRARIES):
                raise UnknownCodeError(f"Cannot digest {kind.__qualname__!r} of {kind.__module__!r}: it is not ours.")
            self._lead_to(kind.__module__)
            return
        for base in kind.__bases__:
            self.add(base)
        made = {*_OF_TUPLES, *getattr(kind, "_fields", ())} if issubclass(kind, tuple) else set()
        for name, part in sorted(vars(kind).items()):
            if name == "__call__" or not (name.startswith("__") or name in made or isinstance(part, MemberDescriptorType)):
                self._say("name", name)
                self.add(part.fget if isinstance(part, property) else part)

    def _add_own_function(self, function: FunctionType) -> None:
        """A function of the user's file, with the values of all names in it. The name of its module has the digest of the
        file. Of what a decorator has made, the code is the decorator's."""
        where = str(function.__globals__.get("__name__", ""))
        if not (is_own(where) or where.partition(".")[0] in (*_OURS, *_LIBRARIES)):
            raise UnknownCodeError(f"Cannot digest {function.__qualname__!r}: it is made by {where!r}, which is not ours.")
        self._lead_to(where)
        self._say("function", where, function.__module__, function.__qualname__)
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:
            raise UnknownCodeError(f"Cannot digest {function.__qualname__!r}: it is not complete.") from None
        self._add_all("parts", (function.__code__, function.__defaults__, function.__kwdefaults__, cells))
        if is_own(where):
            self._check_imports(function)
            names = sorted({name for part in _parts(function.__code__) for name in part.co_names})
            modules = [where]
            for module in modules:
                space = function.__globals__ if module == where else vars(sys.modules[module])
                for name in names:
                    if name in space:
                        self._say("name", module, name)
                        self.add(space[name])
                        near = getattr(space[name], "__name__", "") if isinstance(space[name], ModuleType) else ""
                        modules += [near] * (is_own(near) and near not in modules)

    @staticmethod
    def _check_imports(function: FunctionType) -> None:
        for part in _parts(function.__code__):
            for step in dis.get_instructions(part):
                if step.opname == "IMPORT_NAME" and str(step.argval).partition(".")[0] not in _LIBRARIES:
                    raise UnknownCodeError(
                        f"Cannot digest {function.__qualname__!r}: it imports {step.argval!r} when called."
                    )

    def _add_function(self, function: FunctionType) -> None:
        if is_own(function.__module__ or "") or is_own(str(function.__globals__.get("__name__", ""))):
            self._add_own_function(function)
            return
        if self._is_library(function):
            self._say("library", function.__module__, function.__qualname__)
            return
        if function.__module__.partition(".")[0] not in _OURS:
            raise UnknownCodeError(f"Cannot digest {function.__qualname__!r} of {function.__module__!r}: it is not ours.")
        self._lead_to(function.__module__)
        self._say("function", function.__module__, function.__qualname__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._add_all("parts", (function.__code__, function.__defaults__, function.__kwdefaults__, cells))

    def _add_all(self, kind: str, values: Iterable[Any]) -> None:
        listed = list(values)
        self._say(kind, str(len(listed)))
        for value in listed:
            self.add(value)

    def _lead_to(self, module: str) -> None:
        if module.partition(".")[0] in _OURS:
            self.modules.add(module)

    @staticmethod
    def _is_library(value: Callable[..., Any]) -> bool:
        return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES and hasattr(value, "__qualname__")

    def _say(self, *words: str) -> None:
        self._words.extend(words)


_known: dict[str, tuple[list[Any], str, frozenset[str]]] = {}
"""By module: what `_parts_of` found when it was digested last, its digest, and the modules that it leads to. Most
programs of a process lead to the same thirty modules, and to digest these anew for each takes 30 ms (CPU)."""


def _parts_of(space: Mapping[str, Any], module: str) -> Iterator[Any]:
    """All that the digest of a module depends on: names, and values as they are or, where they can change, their digests."""
    for name, value in space.items():
        if name in _NO_PART:
            continue
        yield name
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield from (value, function.__code__, function.__defaults__, function.__kwdefaults__)
        elif isinstance(value, type):
            yield value
            if value.__module__ == module:
                yield from _parts_of(vars(value), module)
        elif _never_changes(value):
            yield value
        else:
            alone = _Digest()
            alone.add_lightly(name, value, module)
            yield alone.hexdigest()


def _never_changes(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(part) in _PLAIN for part in value)
    return type(value) in _PLAIN or isinstance(value, ModuleType) or inspect.isdatadescriptor(value)


def _same(before: list[Any], now: list[Any]) -> bool:
    if len(before) != len(now):
        return False
    return all(a is b or (type(a) is type(b) is str and a == b) for a, b in zip(before, now, strict=True))


def _parts(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions that are defined in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _parts(part)


@functools.cache  # code never changes; equal code is one entry
def _code_digest(code: CodeType) -> str:
    made = _Digest()
    made._say(code.co_qualname, code.co_code.hex(), str(code.co_flags), str(code.co_argcount))
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts):
        made.add(names)
    return made.hexdigest()
