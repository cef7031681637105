"""The commands `harness merge` and `harness publish`: results of several people, and results for everybody."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from harness.cli.terminal.parsing import out_folder

__all__ = ["add_merge", "add_publish"]

_MERGE = """\
Join comparisons of the same scenarios into one results folder: of other tuners, of other
scenarios, or with more seeds. Refused, with what differs, where two of them have another
version of the harness, another text of one scenario, or another outcome of one run."""

_PUBLISH = """\
Make a static site of a finished comparison: an overview, a page per scenario, and the tables
as Parquet and CSV. It needs no server and no network, and does not contain the files of
single runs. With --onto, your tuners are shown beside those of a published site, whose
runs need not be made again: play yours, and fixed, on scenarios of the site."""


def add_merge(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parser of `harness merge`."""
    parser = add_parser("merge", help="join comparisons of the same scenarios", description=_MERGE)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="results folders")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="new results folder")
    parser.set_defaults(run=_merge)


def add_publish(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parser of `harness publish`."""
    parser = add_parser("publish", help="make a static site of a comparison", description=_PUBLISH)
    parser.add_argument("folder", type=Path, metavar="DIR", help="results folder")
    parser.add_argument("--out", type=out_folder, required=True, metavar="SITE", help="new folder of the site")
    parser.add_argument(
        "--overview",
        action="store_true",
        help="of several scenarios: no page per scenario, and no tables of evaluations and settings (small enough for git)",
    )
    parser.add_argument("--onto", type=Path, metavar="SITE", help="a published site: show its tuners, too, as an overview")
    parser.add_argument(
        "--replace",
        type=lambda text: text.split(","),
        default=[],
        metavar="TUNER,...",
        help="tuners of that site whose runs do not count any more where you played them; yours do",
    )
    parser.set_defaults(run=_publish)


def _merge(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal
    from harness.comparison.merge import merge
    from harness.lines import say
    from reports.output.terminal import show
    from reports.pages import page
    from traces.store import load_results

    out, console = merge(options.folders, options.out), terminal()
    show(load_results(out), console)
    say(console, f"The page: {page.write(out)}")
    return 0


def _publish(options: argparse.Namespace) -> int:
    from harness.cli.terminal.display import terminal
    from harness.lines import say
    from reports.output.site import publish

    site = publish(options.folder, options.out, only_overview=options.overview, onto=options.onto, replaced=options.replace)
    say(terminal(), f"The site: {site}")
    return 0
