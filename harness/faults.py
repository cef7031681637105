"""Faults in words for the author of a tuner: what was raised, and the line of the author's own code where that happened."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

import tuners

__all__ = ["described", "short", "trace_of"]

_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_HERE, _TUNERS = Path(__file__).parent, Path(tuners.__file__).parent
_NOT_OF_AUTHORS = {_HERE, _HERE / "cli", _TUNERS, _TUNERS / "playing"}
"""Folders of the driver and, flat in `tuners`, of the contract: no algorithm is in their files."""


def described(error: BaseException, *, of_author: bool = True) -> str:
    """Type and message of an error, and the innermost line where it was raised, in one line. The author of the tuner looks
    for that line in files of one's own, and not in libraries or in the contract: of a tuner that is installed, in its own
    package, which the outermost frame is of. Without `of_author`, it may be anywhere."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if of_author:
        # Dataclasses write their constructors as strings.
        others = [f for f in frames if f.filename != "<string>" and Path(f.filename).parent not in _NOT_OF_AUTHORS]
        own = [f for f in others if not f.filename.startswith(_LIBRARIES)]
        frames = own or [f for f in others if _package(f.filename) == _package(others[0].filename)] or frames
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = short(" ".join(str(error).split()))
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def _package(file: str) -> str:
    """The folder, or the module, below the innermost library folder that `file` is in; of a file in none, itself."""
    inside = max((library for library in _LIBRARIES if Path(file).is_relative_to(library)), key=len, default="")
    return Path(file).relative_to(inside).parts[0] if inside else file


def trace_of(error: BaseException) -> str:
    """The traceback of an error, without the frames of the driver and of the contract, unless there are no others."""
    found = traceback.TracebackException.from_exception(error)
    others = [f for f in found.stack if f.filename != "<string>" and Path(f.filename).parent not in _NOT_OF_AUTHORS]
    found.stack = traceback.StackSummary.from_list(others or list(found.stack))
    return "".join(found.format())


def short(text: str) -> str:
    """At most 300 characters, and without the addresses of objects, which differ from run to run."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text if len(text) <= 300 else text[:297] + "..."
