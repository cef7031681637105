"""The parser of the command line: argparse, with near names for unknown words, and help that fits the terminal."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

__all__ = ["CommandParser"]

_LINE = 98
"""Characters of a line of help, at the most: longer lines are hard to read."""
_LEAST_COLUMN = 12
"""Characters of a second column, at the least: in a narrower one, words would be broken."""


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown words with status 2 and a "did you mean"; its subcommands' parsers are of the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _FittedHelp, **options})

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
