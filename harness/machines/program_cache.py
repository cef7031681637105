"""The cache of compiled programs: what JAX has compiled once for this user is read by later processes, not compiled again.

JAX has such a cache, which is off by default, and which is unsafe to share as it is: it writes an entry in place, so a
process that is killed while it writes leaves half an entry for ever, and another process may read an entry that is only half
written. So JAX decides what is an entry (its key has the digest of the program, the versions of JAX and of the compiler, and
the compiler's options), and this module stores the entries. An entry is written beside its place and renamed, and it has a
digest: a reader sees a whole entry or none. No failure here ends a run: what cannot be read is compiled, and what cannot be
written (a full disk, a folder that is read-only) is not stored.

``HARNESS_CACHE`` names another folder, or is ``off``. An entry is machine code that processes of this user run, so nobody
else may write to the folder.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["ProgramFolder", "folder", "use"]

_LIMIT_BYTES = 512 * 2**20
"""Size of the folder."""

_LEAST_COMPILE_SECONDS = 0.1
"""A program that is compiled in less time is not stored: most are single operations, and reading them gains little."""

_ABANDONED_SECONDS = 3600.0
"""An unfinished file of this age belongs to a process that was killed."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_JAX_DEFAULT_COMPILE_SECONDS = 1.0

_Opener: TypeAlias = Callable[[str], tuple[object, str] | None]


def folder() -> Path | None:
    """The folder of this user's compiled programs, which need not exist yet; None if the cache is switched off."""
    wanted = os.environ.get("HARNESS_CACHE", "")
    if wanted.lower() in ("off", "0"):
        return None
    with suppress(RuntimeError):  # a user without a home
        if wanted:
            return Path(wanted).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "ps-harness" / "programs"
    return None


def use() -> Path | None:
    """From now on, JAX takes compiled programs from the cache and stores new ones, and so does a `StoredProgram`. Returns
    the folder, or None if not used.

    The cache is not used if ``HARNESS_CACHE`` is ``off``, if the user has made own settings for JAX's cache, or if this
    version of JAX cannot be given a store. May be called any number of times. Imports JAX.
    """
    path = folder()
    if path is None:
        return None
    import jax
    from jax._src import compilation_cache  # JAX has no public way to replace the store

    from simulators.programs import stored_programs

    config: Any = jax.config  # whose attributes are made at run time
    if config.jax_compilation_cache_dir == str(path):
        return path
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return None
    made_by_jax: _Opener | None = getattr(compilation_cache, "get_file_cache", None)
    if made_by_jax is None:
        return None

    store = ProgramFolder(path)

    def opened(where: str) -> tuple[object, str] | None:
        # The user may name another folder later.
        return (store, where) if where == str(path) else made_by_jax(where)

    vars(compilation_cache)["get_file_cache"] = opened
    if config.jax_persistent_cache_min_compile_time_secs == _JAX_DEFAULT_COMPILE_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_COMPILE_SECONDS)
    # Otherwise XLA writes files of its own there, and the folder's name is part of every key.
    config.update("jax_persistent_cache_enable_xla_caches", "none")
    config.update("jax_compilation_cache_dir", str(path))
    stored_programs.use_store(store)
    return path


class ProgramFolder:
    """Compiled programs in a folder, one file each: the digest of the bytes, and the bytes. Safe for many processes.

    If the files exceed `limit_bytes`, those that were not used for longest are deleted. What is there is looked at when this
    process first stores a program; then it counts what it stores itself, and looks again where that exceeds the limit. A
    file's name has a digest of the machine's instruction set, because home folders are shared by machines that cannot run
    each other's programs.
    """

    def __init__(self, path: Path, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._path = path  # JAX prints it
        self._limit_bytes = limit_bytes
        self._bytes = math.inf  # of all files, as far as this process knows
        self._of_thread = threading.local()

    @property
    def asked(self) -> str | None:
        """The key that this thread asked for last."""
        return getattr(self._of_thread, "asked", None)

    def get(self, key: str) -> bytes | None:
        """The bytes that were stored under `key`; None if there are none. A damaged file is deleted."""
        self._of_thread.asked = key
        file = self._file(key)
        try:
            data = file.read_bytes()
        except OSError:
            return None
        digest, value = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        whole = hashlib.sha256(value).digest() == digest
        with suppress(OSError):  # the folder may be read-only
            if whole:
                os.utime(file)
            else:
                file.unlink()
        return value if whole else None

    def put(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, or do nothing if the disk does not allow it."""
        with suppress(OSError):
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(suffix=".part", dir=self._path)
            part = Path(name)
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(hashlib.sha256(value).digest() + value)
                part.rename(self._file(key))
            finally:
                part.unlink(missing_ok=True)
            self._bytes += _DIGEST_BYTES + len(value)
            if self._bytes > self._limit_bytes:
                self._bytes = self._trim()

    def _file(self, key: str) -> Path:
        return self._path / f"{_instruction_set()}-{key}"

    def _trim(self) -> int:
        """Delete the files that were not used for longest, and unfinished files of processes that were killed. Returns the
        bytes of all files that are left."""
        with os.scandir(self._path) as entries:
            found = sorted((e.stat().st_mtime, e.stat().st_size, e.path) for e in entries)
        left = sum(size for _, size, _ in found)
        # A full folder gets some room, or else each file that is stored next would be a reason to look again.
        enough = self._limit_bytes - self._limit_bytes // 16 if left > self._limit_bytes else self._limit_bytes
        for seconds, size, path in found:
            if path.endswith(".part"):
                if seconds < time.time() - _ABANDONED_SECONDS:
                    Path(path).unlink(missing_ok=True)
            elif left > enough:
                Path(path).unlink(missing_ok=True)
                left -= size
        return left


@cache
def _instruction_set() -> str:
    """A digest of what programs this machine can run: its architecture and, where the system tells, its extensions."""
    told = ""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        # Of the first processor, x86 and Arm; the order of the words means nothing.
        told = next((" ".join(sorted(line.split())) for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {told}".encode()).hexdigest()[:8]
