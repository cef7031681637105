"""Temporary folders of live jobs. One that is left behind by a process that was killed is removed by the next one, with the
processes that still use it: Ray's agents outlive a raylet that is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["private_folder", "remove_left_behind"]

_PREFIX = ".harness-live-"
_LONGEST_BYTES = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Of the folder's path: Ray puts Unix sockets below, and the kernel accepts no longer names (unix(7))."""

_SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - a new folder is made there, for this user alone
"""Where it is made if the path of the system's folder for temporary files is too long, as Slurm's often is, or has letters
beyond ASCII, which Ray cannot use."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can read, until the context ends; it is locked for as long as this process lives. Other
    processes that still use it then are killed. Raises ValueError if none can be made whose path is short enough."""
    remove_left_behind()
    path, lock = _locked()
    try:
        yield path
    finally:
        _end_users(path)
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _parents() -> list[str]:
    """The folders in which it may be, the best one first."""
    found = dict.fromkeys((tempfile.gettempdir(), *_SHORT))
    return [parent for parent in found if parent.isascii() and len(parent) + len(f"/{_PREFIX}12345678") <= _LONGEST_BYTES]


def _made() -> Path:
    for parent in _parents():
        with suppress(OSError):  # it is not there, or nothing can be written there
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    raise ValueError(
        f"Cannot make a folder for Ray's sockets: the path of {tempfile.gettempdir()} is too long for them, or has letters "
        f"beyond ASCII, and in {', '.join(_SHORT)} nothing can be written. Set TMPDIR to a folder with a short, plain path."
    )


def _locked() -> tuple[Path, int]:
    while True:
        path = _made()
        with suppress(OSError):  # another process has seen it before it was locked, and removes it
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_left_behind() -> None:
    """Remove such folders of this user whose processes are gone."""
    for path in (path for parent in _parents() for path in Path(parent).glob(f"{_PREFIX}*")):
        with suppress(OSError):
            if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError where its process lives
                _end_users(path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _end_users(folder: Path) -> None:
    """Kill this user's processes that have files open below that folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if int(process.name) != os.getpid() and any(_is_below(folder, link) for link in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)


def _is_below(folder: Path, link: Path) -> bool:
    with suppress(OSError):
        return link.readlink().is_relative_to(folder)
    return False
