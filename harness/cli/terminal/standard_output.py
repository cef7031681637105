"""Standard output that is closed, that nobody reads any more (`harness ... | head`, a terminal that has gone), or that
cannot show a character, is no error.

A command whose result is in files goes on; one that only prints ends.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

__all__ = ["LastingOutput", "Unread", "end_quietly", "lasting", "replace_closed", "tell_once"]


_GONE = (errno.EPIPE, errno.EIO)  # of a pipe without a reader, and of a terminal that has gone


class Unread(Exception):
    """Nobody reads standard output any more, and the command has nothing else to do."""


class LastingOutput(io.TextIOWrapper):
    """Standard output or error that goes nowhere once its reader has gone; `when_unread` is called then. A character that
    its encoding does not have is written as an escape: the name of a file can have any bytes."""

    def __init__(self, of: io.TextIOWrapper) -> None:
        # Detached from the former object, which would otherwise write what it holds, and fail, when the process ends.
        encoding, lines = of.encoding, of.line_buffering
        errors = "backslashreplace" if of.errors == "strict" else of.errors
        super().__init__(of.detach(), encoding, errors, line_buffering=lines)
        self.when_unread: Callable[[], object] = lambda: None

    def write(self, text: str) -> int:
        """Write `text`, or nothing."""
        try:
            return super().write(text)
        except OSError as error:
            self._stop(error)
            return len(text)

    def flush(self) -> None:
        """Write what waits, or nothing."""
        try:
            super().flush()
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        # What still waits in the buffer goes there, too, or it would fail again at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        self.when_unread()


def replace_closed() -> None:
    """Write to nowhere where standard output or error was closed before the start, as some service managers do."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def lasting(stream: TextIO) -> TextIO:
    """The same stream as a `LastingOutput`; a notebook's or a test's stays as it is."""
    return LastingOutput(stream) if type(stream) is io.TextIOWrapper else stream


def end_quietly() -> NoReturn:
    """`when_unread` of a command that only prints."""
    raise Unread


def tell_once() -> None:
    """`when_unread` of a command that takes long and whose result is in files."""
    print("harness: nobody reads the output any more; this goes on, and Ctrl-C stops it.", file=sys.stderr)
