"""The command `harness reproduce`: what a paper prints beside what is measured here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from harness.cli.terminal.parsing import out_folder, whole

__all__ = ["NAMES", "add_reproduce"]

NAMES = ("cruise", "bo_online", "mltuner", "rlp", "bespoke_bo")
"""Of the papers, by their tuners: the keys of `reports.papers.reproduce.PAPERS`, which takes long to import."""

_DESCRIPTION = """\
Measure what a paper prints, and write a page and a table: each figure beside ours, with a verdict
found by rule. PAPER is the name of the paper's tuner: cruise, bo_online, mltuner, rlp, bespoke_bo.
Five seeds take from seconds (cruise) to some minutes of one core (bo_online). Runs of MLtuner and
RLP are kept in the folder, so an interrupted measurement goes on where it was."""


def add_reproduce(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parser of `harness reproduce`."""
    parser = add_parser("reproduce", help="measure what a paper prints", description=_DESCRIPTION)
    parser.add_argument("paper", metavar="PAPER", choices=NAMES, help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--seeds", type=whole(1), default=5, metavar="N", help="seeds of each run of a tuner (default: 5)")
    parser.add_argument(
        "--out",
        type=out_folder,
        default="results/papers",  # text, so that its type is checked
        metavar="DIR",
        help="folder to write to (default: results/papers)",
    )
    parser.set_defaults(run=_reproduce)


def _reproduce(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import stages, terminal
    from harness.lines import say
    from reports.papers import reproduce
    from reports.papers.claims import headline, shown

    paper, console = reproduce.PAPERS[options.paper], terminal()
    options.out.mkdir(parents=True, exist_ok=True)
    minutes = math.ceil(paper.minutes * options.seeds / 5)
    say(console, f"{paper.title}: about {minutes} minute{'s' * (minutes > 1)} of one core.", wraps=True)
    claims = []
    with stages("measuring") as stage:
        for claim in paper.claims(reproduce.Scale(options.seeds, options.out)):
            claims.append(claim)
            stage(f"{len(claims)} figures done")
            say(
                console,
                f"{claim.where}, {claim.what}, {claim.unit}: {shown(claim.measured, claim.low, claim.high)} "
                f"[{shown(claim.published)}] {claim.verdict}",
            )
    say(console, headline(claims), wraps=True)
    say(console, f"The page: {reproduce.write(options.paper, claims, options.seeds, options.out)}")
    return 0
