"""The command `harness new tuner`: a folder with a tuner that runs, its test, and its entry point."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from harness.cli.terminal.parsing import out_folder

__all__ = ["add_new"]

_ABOUT = """\
Write a folder with a tuner that runs, its test, and a pyproject.toml that registers it by its
name. What is written lets workers go on that wait for each other for too long: change it to
what you want."""


def add_new(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `harness new` to a parser's commands."""
    command = add_parser("new", help="write a tuner of your own to start from", description=_ABOUT)
    command.add_argument("what", choices=("tuner",), help="what to write")
    command.add_argument("name", metavar="NAME", help="of the tuner: a word in small letters, as in my_tuner")
    command.add_argument("--out", type=out_folder, metavar="DIR", help="folder to write (default: NAME-tuner, with - for _)")
    command.set_defaults(run=_new)


def _new(options: argparse.Namespace) -> int:
    from tuners import registry

    name = options.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"Cannot name a tuner {name!r}: write a word in small letters, digits and _, as in my_tuner.")
    if name == "conftest" or name.startswith("test_"):
        what = "its own" if name == "conftest" else "a file of tests"
        raise ValueError(f"Cannot name a tuner {name!r}: pytest takes {name}.py for {what}. Choose another name.")
    if name in registry():
        raise ValueError(f"Cannot name a tuner {name!r}: there is one of that name. `harness show {name}` explains it.")
    # A folder of the module's name hides the module from commands that run beside it, once it is installed with -e.
    out = options.out or Path(f"{name.replace('_', '-')}-tuner")
    if out.exists():
        raise ValueError(f"Cannot write {out}: it exists already. Name another folder with --out.")
    taken = find_spec(name)  # a folder without Python files is a package without an origin
    if taken is not None and taken.origin is not None and Path.cwd() not in Path(taken.origin).parents:
        raise ValueError(f"Cannot name a tuner {name!r}: Python has a module of that name. Choose another name.")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"Cannot write {out}: {error.strerror}. Name another folder with --out.") from None
    for path, text in _files_of(name).items():
        (out / path).write_text(text, encoding="utf-8")
    for line in (
        f"Written to {out}: {', '.join(_files_of(name))}. Next, in that folder:",
        f"  harness compare --quick --tuners fixed,{name}:{name}",
        f"  harness play digits {name}:{name}",
        "  pytest",
        f"  pip install -e .    then its name is {name}, everywhere",
    ):
        print(line)
    return 0


def _files_of(name: str) -> dict[str, str]:
    """The files of a new tuner, by name."""
    return {
        f"{name}.py": _TUNER.replace("NAME", name),
        f"test_{name}.py": _TEST.replace("NAME", name),
        "pyproject.toml": _PROJECT.replace("NAME", name),
    }


_TUNER = '''\
"""NAME: measure how long workers wait for each other; where that is too long, let them go on without waiting."""

import dataclasses

from tuners.actions import Job, Reconfigure, Rejected, Run, Tuner


def NAME(job: Job, *, clocks: int = 100, patience: float = 0.2) -> Tuner:
    """Change the synchronisation policy to asp where workers wait for more than `patience` of their computing.

    Args:
        job: what is tuned.
        clocks: pushes to measure.
        patience: the time that workers may wait, as a share of the time that they compute.
    """
    seen = yield from Run(clocks=clocks)
    if seen.pushes.wait_seconds.sum() > patience * seen.pushes.compute_seconds.sum():
        try:
            yield from Reconfigure(dataclasses.replace(job.start, policy="asp"))
        except Rejected:
            return  # not free in this scenario: the job goes on as it is
'''

_TEST = '''\
"""What NAME promises: it keeps the contract, and it is faster than the start setting."""

import NAME as module
from tuners.testing import check_tuner


def test_it_keeps_the_contract():
    print(check_tuner(module.NAME))


def test_it_is_faster_than_not_tuning(contest):
    tuned = contest(module.NAME, "digits", seeds=2)
    assert tuned.completion_seconds < contest("fixed", "digits", seeds=2).completion_seconds
'''

_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
dependencies = ["ps-harness"]

[project.entry-points."harness.tuners"]
NAME = "NAME:NAME"

[tool.pytest.ini_options]
addopts = "--benchmark-columns=min,median,max,rounds"  # simulated seconds, a round per seed

[tool.setuptools]
py-modules = ["NAME"]
"""
