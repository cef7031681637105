"""The command `harness draw`: write members of a family of scenarios to files."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from harness.cli.terminal.parsing import some_path, whole

__all__ = ["add_draw"]

_ABOUT = """\
Write members of a family as scenario files. A family is a distribution over clusters, jobs,
starts and conditions; member i of a version is the same file for ever. The target of a member
comes from a reference run, which takes seconds where it does not ship with the program."""

_MORE = """\
Members 0 to 19 are for everybody, 20 to 99 for judging the tuners that this project trains,
100 to 999 for training and tuning of tuners, 1000 and on for judging: tune on none of those.

  harness list families
  harness draw learning --first 0 --count 20 --out arenas
  harness compare 'drawn:learning[0:20]' --tuners all      plays them without writing them"""


def add_draw(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    draw = add_parser("draw", help="write drawn scenarios", description=_ABOUT, epilog=_MORE)
    draw.add_argument("family", metavar="FAMILY", help="see `harness list families`")
    draw.add_argument("--first", type=whole(0), default=0, metavar="N", help="index of the first member (default: 0)")
    draw.add_argument("--count", type=whole(1), default=1, metavar="N", help="how many (default: 1)")
    draw.add_argument("--out", type=some_path, required=True, metavar="DIR", help="folder to write to")
    draw.set_defaults(run=_draw)


def _draw(options: argparse.Namespace) -> int:
    from harness.families import drawn, members

    if "[" in options.family or ":" in options.family:
        family = options.family.partition("[")[0].rpartition(":")[2]
        raise ValueError(
            f"Cannot draw {options.family!r}: name the family alone, and its members by --first and --count, as in "
            f"harness draw {family} --first 0 --count 20."
        )
    names = members(f"{options.family}[{options.first}:{options.first + options.count}]")
    for path in drawn.write(names, options.out):
        print(path, flush=True)
    return 0
