"""Compiled programs that are stored for later processes with all that JAX made of them, so that these trace nothing.

JAX's own cache is looked up by a program's text. To make the text, a process traces the program and lowers it, which takes
longer than to read the machine code. Here a program is looked up by what its text depends on: the code in memory
(`code_digest`), the static arguments, the shapes and types of the others, JAX's version and settings. What cannot be stored
or read is compiled by JAX as ever. The result is the same program.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, update_wrapper
from typing import Any, Generic, Protocol, TypeVar, cast

import jax

try:  # JAX has no public way to store a traced program; a version that has other names stores none
    from jax._src import compilation_cache
    from jax._src.compiler import get_compile_options
    from jax._src.config import trace_context  # all settings that a program depends on
    from jax._src.lib import version_str, xla_client  # type: ignore[attr-defined]
    from jax.experimental import serialize_executable

    _CAN_STORE = True
except ImportError:  # pragma: no cover (not with the versions that we pin)
    _CAN_STORE = False

from simulators.programs.code_digest import UnknownCodeError, digest

__all__ = ["ProgramStore", "StoredProgram", "use_store"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

_SIMPLE_CODE = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""For XLA: generate code without MLIR, which it else sets up anew for each fused kernel of a program; the engine compiles
in 0.6 to 0.7 of the CPU time so. And as one module in place of up to 32, which takes about an eighth off that. Results have
the same bytes (measured: of 24 functions of JAX all but the cubic root, which no program here uses). At LLVM's first level,
which is faster still, a program of `boat-digits` makes other bytes."""

_MOST_SIMPLE_BYTES = 2**20
"""Of results, up to which code is simple. With 32 workers, a push of a model of 650 parameters takes as long as else, one of
204,000 (28 MB) a quarter more."""

_UNKNOWN = re.compile("No such compile option: '([^']+)'")

_MOST_PROGRAMS = 256
"""That a function keeps in memory. A job has a few; a process with more than these reads some of them again."""


class ProgramStore(Protocol):
    """Bytes by name, which later processes get, too; JAX's cache has its entries there. No method raises an error."""

    @property
    def asked(self) -> str | None:
        """The key that this thread asked for last."""

    def get(self, key: str) -> bytes | None:
        """The bytes that were stored under `key`; None if there are none."""

    def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""


_store: ProgramStore | None = None


def use_store(store: ProgramStore | None) -> None:
    """From now on, get programs from `store`, and put there what is compiled; None: nothing is stored.

    Nor is anything with a version of JAX that cannot do that.
    """
    global _store
    _store = store if _CAN_STORE else None


class StoredProgram(Generic[T]):
    """A function that JAX compiles, to be called as the function itself, and a decorator.

    The first argument and keyword-only arguments are static; the others are arrays, or pytrees of them. `jitted` is the
    function as `jax.jit` makes it, for callers that trace or lower it themselves. Where XLA cannot compile the program,
    the one with `plainer(first argument)` in place of the first argument is compiled, if that is another one. `options` are
    what XLA is told for this program alone, from all arguments that are not keyword-only.
    """

    def __init__(
        self,
        function: Callable[..., T],
        plainer: Callable[[Any], Any] = lambda first: first,
        options: Callable[..., dict[str, Any]] = lambda *_: {},
    ) -> None:
        first, *others = inspect.signature(function).parameters.values()
        static = [first.name, *(p.name for p in others if p.kind is p.KEYWORD_ONLY)]
        self.jitted: Any = jax.jit(function, static_argnames=static)
        self._plainer = plainer
        self._options = options
        self._latest: dict[Any, Callable[..., T]] = {}  # by static arguments; called with the others
        self._programs: dict[Any, Callable[..., T]] = {}  # all of them, by the shapes and types of the others, too
        update_wrapper(self, function)

    def __call__(self, *args: Any, **static: Any) -> T:
        """What the function returns. Within another program that JAX traces, this is a part of that."""
        if not _CAN_STORE:
            return self._plain_if_need_be(lambda *args: cast(T, self.jitted(*args, **static)), args)
        facts = (args[0], tuple(static.items()), trace_context())
        latest = self._latest.get(facts)
        if latest is not None:
            try:
                return latest(*args[1:])
            except TypeError:  # of other shapes or types, which JAX compares faster than they are looked up below
                pass
        leaves, tree = jax.tree.flatten(args[1:])
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self.jitted(*args, **static)  # type: ignore[no-any-return]
        exact = (*facts, tree, tuple(map(_shape, leaves)))
        program = self._programs.get(exact)
        if program is not None:
            self._latest[facts] = program
            return program(*args[1:])
        if len(self._programs) == _MOST_PROGRAMS:
            self._programs.clear()
            self._latest.clear()
        program, made = self._made(args, static, exact[-2:])
        self._latest[facts] = self._programs[exact] = program
        return made

    def _made(self, args: Any, static: Any, signature: Any) -> tuple[Callable[..., T], T]:
        """The program from the store, or else compiled and stored; and what it returns."""
        store, key = _store, ""
        # A tree of a user's class may have anything in it; what has no text of its own differs in each process.
        if store is not None and " at 0x" not in str(signature[0]):
            # Code that is not followed, such as a policy of a user's own, may change at any time: it is not stored.
            with suppress(UnknownCodeError):
                key = self._key(args[0], static, signature)
        found: tuple[Callable[..., T], T] | None = _read(store, key, args[1:]) if store is not None and key else None
        if found is not None:
            return found

        program = self._plain_if_need_be(partial(self.compiled, **static), args)
        if store is not None and key:
            _write(store, key, program)
        return program, program(*args[1:])

    def compiled(self, *args: Any, **static: Any) -> Any:
        """The program for these arguments, compiled anew, as JAX has it: to be called without the first argument and those
        that are keyword-only. Raises JaxRuntimeError where XLA cannot compile it."""
        return _compiled(self.jitted.lower(*args, **static), self._options(*args))

    def _plain_if_need_be(self, make: Callable[..., U], args: Any) -> U:
        try:
            return make(*args)
        except jax.errors.JaxRuntimeError:
            plainer = self._plainer(args[0])
            if plainer == args[0]:
                raise
            return make(plainer, *args[1:])

    def _key(self, first: Any, static: Any, signature: Any) -> str:
        code = digest(self.jitted.__wrapped__, first, static, self._options, _compiled)
        settings = [v for v in trace_context() if " at 0x" not in repr(v)]
        text = f"{code} {signature} {_surroundings()} {settings} {_told_xla()}"
        return f"traced-{self.jitted.__name__}-{hashlib.sha256(text.encode()).hexdigest()}"


def _compiled(lowered: Any, options: dict[str, Any]) -> Any:
    """The program, which JAX has lowered, as machine code."""
    results_bytes = sum(made.size * made.dtype.itemsize for made in jax.tree.leaves(lowered.out_info))
    if results_bytes <= _MOST_SIMPLE_BYTES:
        options = _SIMPLE_CODE | options
    while True:
        try:
            return lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:  # perhaps a version of XLA that does not know one of the options
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or unknown[1] not in options:
                raise
            options = {name: value for name, value in options.items() if name != unknown[1]}


def _shape(leaf: Any) -> tuple[Any, ...]:
    """What a program depends on of one array or number."""
    if isinstance(leaf, bool | int | float):
        return (type(leaf),)
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)


def _told_xla() -> str:
    """All that the user tells XLA, in the environment or by JAX's settings."""
    told: bytes = get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()
    return told.hex()


@cache
def _surroundings() -> str:
    """What programs depend on and no argument or setting tells."""
    devices = [(d.platform, d.device_kind, d.client.platform_version) for d in jax.devices()]
    return f"{jax.__version__} {version_str} {sys.version} {devices}"


# ------------------------------------------------------------------------------------------------------- as they are stored


def _with_code(written: Any, code: bytes) -> bytes:
    """`written` as JAX pickles a program, with `code` as its machine code."""

    class Pickler(serialize_executable._JaxPjrtPickler):  # not a global: a JAX without it is noticed
        def persistent_id(self, obj: Any) -> Any:
            return ("exec", code) if isinstance(obj, xla_client.LoadedExecutable) else super().persistent_id(obj)  # type: ignore[no-untyped-call]

    file = io.BytesIO()
    Pickler(file).dump(written)
    return file.getvalue()


def _write(store: ProgramStore, key: str, program: Any) -> None:
    """Store a program that JAX has just compiled, or read from its cache."""
    try:
        asked = store.asked
        if asked is None or asked == key:
            return  # JAX has not asked its cache: it is off, or the program was in memory, and may have been read once
        cached = store.get(asked)
        if cached is None:  # compiled just now, in less time than JAX stores programs for
            written = serialize_executable.serialize(program)
        elif program._params.const_args:
            return
        else:  # if it was read from the cache, XLA would write only a part of its machine code again
            code, _ = compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(cached))
            leaves, tree = jax.tree.flatten(program.args_info)
            parts = (program._executable._unloaded_executable, leaves, program._no_kwargs)
            written = _with_code(parts, code), tree, program.out_tree
        store.put(key, zlib.compress(pickle.dumps(written), level=1))
    except Exception:
        _log.debug("Cannot store program %s.", key, exc_info=True)


def _read(store: ProgramStore, key: str, args: Any) -> Any:
    """The program that was stored under `key`, and what it returns for `args`; None where none can be called."""
    try:
        stored = store.get(key)
        if stored is None:
            return None
        written = pickle.loads(zlib.decompress(stored))  # noqa: S301 (the store has machine code that we run)
        program = serialize_executable.deserialize_and_load(*written)
        return program, program(*args)  # what lacks a part is noticed only when it is called
    except Exception:
        _log.debug("Cannot read program %s.", key, exc_info=True)
        return None
