"""Drawn scenarios: the file of a member, whose goal comes from the table that ships, from the cache, or from its reference
run.

The goals of the first members of every family ship in `goals.toml`, so that their files are the same on every machine.
Others are made when they are needed, in a process of its own with one thread, and kept in the user's cache. A cached goal
counts only for the same code: its key has a digest of the sources of simulator and families and the versions of the
libraries.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from harness.families.draft import Draft, MemberGoal, written
from harness.families.families import FAMILIES, audience, member_name, members, parse_name
from harness.families.lot import Lot
from harness.machines import program_cache
from harness.machines.machine import single_threaded
from traces.store import write_bytes

__all__ = ["goals", "keep_goals", "text", "texts", "write"]


def text(which: str) -> tuple[str, str]:
    """Name and file of the one member that `which` means, as "learning[7]". Raises ValueError as `members` does."""
    names = members(which)
    if len(names) != 1:
        raise ValueError(
            f"Cannot load 'drawn:{which}': it means {len(names)} scenarios; name one, as in "
            f"'drawn:{names[0].partition('-')[0]}[{int(names[0].rpartition('-')[2])}]'."
        )
    return names[0], next(texts(names))


def texts(names: Sequence[str]) -> Iterator[str]:
    """The files of these members, in order. Those without a known goal are played first, which takes seconds each."""
    for name, goal in zip(names, goals(names), strict=True):
        yield _file(name, goal)


def write(names: Sequence[str], out: Path) -> Iterator[Path]:
    """Write the files of these members to the folder `out`, one by one; none, with a ValueError, if one is there already."""
    paths = [out / f"{name}.toml" for name in names]
    if there := next((p for p in paths if p.exists()), None):
        raise ValueError(f"Cannot write {there}: it is there already. Delete it, or name another folder with --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot write to {out}: {error.strerror}. Name another folder with --out.") from None
    for path, content in zip(paths, texts(names), strict=True):
        write_bytes(path, content.encode())
        yield path


def goals(names: Sequence[str]) -> Iterator[MemberGoal]:
    """The goals of these members, in order."""
    known = {name: goal for name in names if (goal := _shipped().get(name) or _kept(name)) is not None}
    left = [name for name in names if name not in known]
    made = _played(left) if left else iter(())
    for name in names:
        if name not in known:
            known[name] = next(made)
            _keep(name, known[name])
        yield known[name]


def keep_goals(names: Sequence[str]) -> None:
    """Keep the goals of these members in the user's cache, if there is one.

    The reference runs of all members are played in one process, in about half of the time that a process for each takes.
    """
    if len(names) > 1 and program_cache.folder() is not None:
        for _ in goals(names):
            pass


def _file(name: str, goal: MemberGoal) -> str:
    family, index = parse_name(name)
    draft = FAMILIES[family].draw(Lot(f"{name}/{goal.attempt}"))
    return written(replace(draft, about=_about(family, index, draft)), goal)


def _about(family: str, index: int, draft: Draft) -> tuple[str, ...]:
    rule = "98 % of the best improvement" if draft.metric in ("accuracy", "loss") else f"the most {draft.metric}"
    return (
        f"{member_name(family, index)}: member {index} of the family `{family}`, {audience(index)}.",
        f"Drawn by `harness draw {family} --first {index} --count 1`; see harness/families.",
        f"The target is {rule} of {len(draft.good)} reference settings. The budget is {draft.slack:g} times",
        f"the time of the best of them, and the start takes at least {draft.margin:g} times as long."
        if draft.minimise == "seconds"
        else f"the time of the cheapest of them, and the start costs at least {draft.margin:g} times as much.",
    )


# ---------------------------------------------------------------------------------------------------------- where goals are


@cache
def _shipped() -> dict[str, MemberGoal]:
    table = tomllib.loads((files("harness.families") / "goals.toml").read_text("utf-8"))
    found: dict[str, MemberGoal] = {}
    for group, rows in table.items():
        family = group.rpartition("-v")[0]
        if group != f"{family}-v{FAMILIES[family].version}":
            continue  # of an earlier version
        found |= {member_name(family, i): MemberGoal(*row) for i, row in enumerate(rows)}
    return found


def _kept(name: str) -> MemberGoal | None:
    path = _place(name)
    with suppress(OSError, ValueError, TypeError, KeyError):
        if path is not None:
            return MemberGoal(**json.loads(path.read_text("utf-8")))
    return None


def _keep(name: str, goal: MemberGoal) -> None:
    path = _place(name)
    with suppress(OSError):
        if path is not None and name not in _shipped():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(path, json.dumps({f: getattr(goal, f) for f in MemberGoal.__slots__}).encode())


def _place(name: str) -> Path | None:
    folder = program_cache.folder()
    return None if folder is None else folder.parent / "families" / f"{name}-{_code()}.json"


@cache
def _code() -> str:
    """A digest of all that a goal depends on."""
    digest = hashlib.sha256(" ".join(version(p) for p in ("jax", "jaxlib", "numpy", "scikit-learn")).encode())
    for package in ("tuners", "simulators", "harness.families", "harness.scenario"):
        root = Path(str(files(package)))
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml") and p.name != "goals.toml"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _played(names: list[str]) -> Iterator[MemberGoal]:
    """Play the reference runs in a process of its own, with one thread, as comparisons do."""
    command = [sys.executable, "-m", "harness.families.reference", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=single_threaded(), text=True) as process:  # noqa: S603 (ourselves)
        try:
            for line in process.stdout or ():
                made: dict[str, Any] = json.loads(line)
                made.pop("name")
                yield MemberGoal(**made)
        finally:
            process.kill()
    # Reached only after the last line: fewer goals than names mean that the process has failed, and has said why.
    raise RuntimeError(f"Cannot draw {', '.join(names)}: the reference run ended early, see above.")
