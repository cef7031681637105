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

_PREFIX = ".harness-live-"  # short: paths of Ray's sockets, which are below, may have 107 characters


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can read, until the context ends; it is locked for as long as this process lives. Other
    processes that still use it then are killed."""
    remove_left_behind()
    path, lock = _locked()
    try:
        yield path
    finally:
        _end_users(path)
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _locked() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(OSError):  # another process has seen it before it was locked, and removes it
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_left_behind() -> None:
    """Remove such folders of this user whose processes are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
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
