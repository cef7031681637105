"""The parser of the command line: argparse, with the nearest names where a word is unknown."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown words with status 2 and a "did you mean"; its subcommands' parsers are of the same class."""

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
