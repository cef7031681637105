"""The parser of the command line: argparse, with near names for unknown words, and help that fits the terminal.

The other functions are types of arguments. What they refuse is refused before a command begins, with status 2.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["CommandParser", "number", "out_file", "out_folder", "some_path", "whole"]

_LINE = 98
"""Characters of a line of help, at the most: longer lines are hard to read."""
_LEAST_COLUMN = 12
"""Characters of a second column, at the least: in a narrower one, words would be broken."""


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown words with status 2 and a "did you mean"; its subcommands' parsers are of the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _FittedHelp, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse would collect unknown words of a subcommand and report them as the main program's, without its usage.
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and unknown[0].startswith("-"):
            self.error(f"there is no {unknown[0]}{self._near_option(unknown[0])}")
        if unknown:
            self.error(f"cannot use {unknown[0]!r} here: it is one word too many")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            known = re.findall(r"[\w-]+", wrong[2])
            near = get_close_matches(wrong[1], known, n=2) or [k for k in known if wrong[1] and k.startswith(wrong[1])]
            advice = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}."
            message = f"there is no {wrong[1]!r}: {advice}"
        number = re.search(r"argument (\S+?)(?:/\S+)?: invalid (int|float) value: (.*)", message)
        if number:
            kind = {"int": "a whole number", "float": "a number"}[number[2]]
            message = f"cannot use {number[1]} {number[3]}: give {kind}"
        value = re.search(r"argument (\S+?)(?:/\S+)?: ('.*': give .*)", message)
        if value:
            message = f"cannot use {value[1]} {value[2]}"
        valued = re.search(r"argument (\S+?)(?:/\S+)?: ignored explicit argument '(.*)'", message)
        if valued:
            message = f"cannot use {valued[1]}={valued[2]}: {valued[1]} takes no value"
        missing = re.search(r"the following arguments are required: (.*)", message)
        if missing:
            helps = {
                str(action.metavar or action.dest): action.help for action in self._actions if not action.option_strings
            }
            helps |= {option: action.help for action in self._actions for option in action.option_strings}
            words = [f"{w} ({helps[w]})" if helps.get(w) else w for w in missing[1].split(", ")]
            message = f"missing: {', '.join(words)}"
        super().error(message)

    def _near_option(self, word: str) -> str:
        options: Sequence[str] = [o for action in self._actions for o in action.option_strings]
        near = get_close_matches(word.partition("=")[0], options, n=2)
        return f": did you mean {' or '.join(near)}?" if near else ""


class _FittedHelp(argparse.HelpFormatter):
    """Descriptions and epilogs: paragraphs are filled to the terminal's width; lines of a list or of examples stay lines."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **options)
        self._width = min(self._width, _LINE)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an action to the section at hand."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # argparse measures the names of subcommands without their indentation, so the longest would not fit.
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._filled(block, width, indent) for block in text.split("\n\n"))

    def _filled(self, block: str, width: int, indent: str) -> str:
        lines = block.splitlines()
        if not any(line.startswith(" ") for line in lines):
            return textwrap.fill(" ".join(lines), width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(indent + self._two_columns(line, width - len(indent)) for line in lines)

    def _two_columns(self, line: str, width: int) -> str:
        """A line whose second column (after three blanks or more) is filled below itself; others stay, to be copied."""
        columns = re.match(r"( *\S.*? {3,})(\S.*)", line)
        if len(line) <= width or columns is None:
            return line
        first = columns[1]
        if width - len(first) < _LEAST_COLUMN:
            return line
        return textwrap.fill(columns[2], width, initial_indent=first, subsequent_indent=" " * len(first))


# ---------------------------------------------------------------------------------------------------- types of arguments


def whole(least: int) -> Callable[[str], int]:
    """A whole number, at least `least`."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, {least} or more")
        return found

    return read


def number(least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """A finite number, at least `least`, more than `above`, and at most `most`."""
    bounds = ((f"{least:g} or more", least > -math.inf), (f"above {above:g}", above > -math.inf))
    said = "".join(f", {words}" for words, given in (*bounds, (f"at most {most:g}", most < math.inf)) if given)

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and least <= found <= most and found > above):
            raise argparse.ArgumentTypeError(f"{text!r}: give a finite number{said}")
        return found

    return read


def some_path(text: str) -> Path:
    """A file or folder; no empty text, which would be the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: give the name of a file or folder")
    return Path(text)


def out_folder(text: str) -> Path:
    """A folder that can be written: it is there, or can be made."""
    found = some_path(text)
    if found.exists() and not found.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: give the name of a folder; this is a file")
    _check_writable(text, found)
    return found


def out_file(text: str) -> Path:
    """A file that can be written; it may be there."""
    found = some_path(text)
    if found.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: give the name of a file; this is a folder")
    _check_writable(text, found.parent)
    return found


def _check_writable(text: str, folder: Path) -> None:
    """Refuse a folder in which nothing can be made."""
    there = next(parent for parent in (folder, *folder.parents, Path()) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()  # permissions alone do not say it: not of all file systems, not to root
    except OSError as error:
        reason = f"give another name; nothing can be written there ({error.strerror})"
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}") from None
