"""The commands `harness show` and `harness list`: what there is, and what it does."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["add_list", "add_show"]

_SHOW = """\
Explain a scenario or a tuner.

A scenario is printed under a comment that explains it; the output is a scenario file itself,
so `harness show digits > my.toml` makes a template for your own. Of a tuner you see what it
tunes, its paper, and its options with type, default and meaning. What `compare` would refuse,
`show` refuses, too."""

_LISTS = {
    "tuners": "what can be compared",
    "scenarios": "jobs on clusters that ship",
    "families": "distributions that scenarios are drawn from",
    "workloads": "models and data that a scenario can train",
    "profiles": "types of nodes",
    "sources": "public recordings of clusters",
}
"""What `harness list` can list, and what each list has."""


def add_show(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `harness show` to a parser's commands."""
    show = add_parser("show", help="explain a scenario or a tuner", description=_SHOW)
    show.add_argument(
        "name",
        metavar="NAME",
        help="scenario, TOML file, one member as 'drawn:learning[3]', or tuner (also package.module:factory)",
    )
    show.set_defaults(run=_show)


def add_list(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `harness list` to a parser's commands."""
    listing = add_parser(
        "list", help="list tuners, scenarios and more", description="List the names that commands know, one per line."
    )
    listing.add_argument(
        "what",
        choices=_LISTS,
        nargs="?",
        help="; ".join(f"{what}: {has}" for what, has in _LISTS.items()),
    )
    listing.set_defaults(run=_list)


# ---------------------------------------------------------------------------------------------------------------- list


def _list(options: argparse.Namespace) -> int:
    rows = {"tuners": _list_tuners, "scenarios": _list_scenarios, "workloads": _list_workloads}
    rows |= {"profiles": _list_profiles, "sources": _list_sources, "families": _list_families}
    found = rows[options.what]() if options.what else {f"harness list {what}": has for what, has in _LISTS.items()}
    width = max(map(len, found), default=0)
    for name, text in found.items():
        for number, line in enumerate(text.split("\n")):
            print(_hanging(f"{'' if number else name:{width}}  ", line))
    return 0


def _list_tuners() -> dict[str, str]:
    from tuners import registry

    found = {}
    for name, entry in registry().items():
        reference = "" if entry.contestant else " (reference only)"
        facts = [f"tunes {entry.tunes}"] if entry.tunes else []
        facts += [f"needs {entry.needs}"] if entry.needs else []
        found[name] = f"{entry.summary}{reference}" + (f" [{'; '.join(facts)}]" if facts else "")
    return found


def _list_scenarios() -> dict[str, str]:
    from harness.scenario import summaries

    return summaries()


def _list_families() -> dict[str, str]:
    from harness.families import FAMILIES

    return {f.name: f.summary for f in FAMILIES.values()}


def _list_workloads() -> dict[str, str]:
    from simulators.workloads.catalogue import workloads

    return dict(workloads())


def _list_profiles() -> dict[str, str]:
    from simulators.cluster.profiles import profiles

    rows: dict[str, str] = {}
    for name, kind in profiles().items():
        cores = "1 core" if kind.cores == 1 else f"{kind.cores} cores"
        facts = [cores, "+".join(d.kind for d in kind.devices), f"{kind.nic_bytes_per_second * 8 / 1e9:g} Gbit/s"]
        if kind.usd_per_hour is not None:
            facts.append(f"{kind.usd_per_hour:g} USD per hour")
        rows[name] = ", ".join(facts)
    return rows


def _list_sources() -> dict[str, str]:
    from traces.importers import SOURCES
    from traces.shipped import shipped, shipped_bytes

    rows: dict[str, str] = {}
    for name, source in SOURCES.items():
        ways = [f"shipped:{name}"] if name in shipped() else []
        ways.append(f"harness trace fetch {name}" if source.files else "fetch by hand, then harness trace import")
        facts = (source.summary, source.address, f"licence: {source.licence}", f"cite: {source.cite}")
        size = source.size or (
            f"{shipped_bytes(name) / 1000:.0f} kB as shipped" if name in shipped() else "download of unknown size"
        )
        rows[name] = "\n".join((*facts, f"{size}; {' or '.join(ways)}"))
    return rows


# ---------------------------------------------------------------------------------------------------------------- show


def _show(options: argparse.Namespace) -> int:
    from harness.scenario import embedded, job, load, show
    from tuners import registry
    from tuners.near_names import near_names

    name = options.name
    plain = name if Path(name).is_file() else name.partition("[")[0]
    drawn = name.startswith("drawn:")
    if plain in registry() or (":" in plain and not drawn):
        for line in _tuner_lines(name):
            print(line)
        return 0
    if plain not in embedded() and not plain.endswith(".toml") and not drawn:
        near = near_names(plain, [*embedded(), *registry()], shown_by="`harness list scenarios` or `harness list tuners`")
        raise ValueError(
            f"No scenario or tuner {plain!r}: {near} A file of your own is named with its .toml, a tuner of your own as "
            "package.module:factory."
        )
    scenario = load(name)
    if scenario.workload.data is None:  # a template may name data that are not there yet
        job(scenario)
    sys.stdout.write(show(scenario))
    return 0


def _tuner_lines(name: str) -> Iterator[str]:
    from tuners import resolve
    from tuners.factory_options import options_of

    entry = resolve(name)
    _ = entry.factory  # refuses options that do not fit
    factory = entry.plain_factory
    plain = name.partition("[")[0]
    yield _hanging(f"{plain}  ", entry.summary if entry.embedded else _first_sentence(factory))
    yield ""
    for word, text in (("tunes", entry.tunes), ("needs", entry.needs), ("paper", entry.paper), ("code", entry.where)):
        if text:
            yield _hanging(f"{word:6} ", text)
    options = options_of(factory)
    given = {option: str(value) for option, value in entry.options}
    yield ""
    example = next((f"{o.name}={o.default}" for o in options.values() if o.default), "option=value")
    yield f"options, as in '{plain}[{example}]':" if options else "It has no options."
    width = max(map(len, options), default=0)
    for option in options.values():
        kind = option.type or "only in Python, by functools.partial"
        chosen = f", here {given[option.name]}" if option.name in given else ""
        default = f" (default: {option.default}{chosen})" if option.default else ""
        meaning = f": {option.meaning}" if option.meaning else ""
        yield _hanging(f"  {option.name:{width}}  ", f"{kind}{default}{meaning}")


def _first_sentence(factory: Callable[..., object]) -> str:
    return " ".join((factory.__doc__ or "a tuner of your own").strip().split("\n\n")[0].split())


# ---------------------------------------------------------------------------------------------------------------- text


def _hanging(head: str, text: str) -> str:
    """`head` and `text`, broken on a terminal at its width, with later lines below the text; elsewhere one line."""
    if not sys.stdout.isatty():
        return (head + text).rstrip()
    width = max(shutil.get_terminal_size().columns, 60)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * min(len(head), width // 2))
