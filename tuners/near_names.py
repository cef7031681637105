"""Advice on a name that is unknown, for messages of all packages: the nearest of the names that exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

__all__ = ["UnknownKey", "did_you_mean", "keys_with_part", "near_keys", "near_names", "unknown_key"]

_FEW = 3  # names that a message proposes, at most
_MANY = 12  # names that are too many for a message, where a command shows them


def near_names(name: str, known: Iterable[str], *, shown_by: str = "") -> str:
    """ "did you mean a or b?" with up to three similar `known` names, or keys of which it is a part (`loss` of
    `training_loss`); where none is, "choose one of ..." with all of them, or, where these are many, with the commands that
    they are `shown_by`."""
    names = list(known)
    near = get_close_matches(name, names) or keys_with_part(name, names)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if shown_by and len(names) > _MANY:
        return f"choose one of the {len(names)} that {shown_by} shows."
    return f"choose one of {', '.join(names)}."


def keys_with_part(part: str, keys: Iterable[str]) -> list[str]:
    """Up to three `keys` of which `part` is whole words, as `seconds` is of `every_seconds`."""
    return [key for key in keys if f"_{part}_" in f"_{key}_"][:_FEW] if part else []


def did_you_mean(near: Iterable[str]) -> str:
    """A sentence with similar names, to follow another one; "" where there are none."""
    names = " or ".join(map(repr, near))
    return f" Did you mean {names}?" if names else ""


class UnknownKey(NamedTuple):
    """A key that a table of a file has, and its format does not."""

    key: str
    path: str  # of the table, as in "cluster.nodes[0]"; "" for the outermost


def unknown_key(message: str) -> UnknownKey | None:
    """What msgspec's `message` about a table says of an unknown key; None where it is about something else."""
    found = re.match(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", message)
    return UnknownKey(found[1], found[2] or "") if found else None


def near_keys(message: str, keys: Mapping[str, Iterable[str]]) -> str:
    """msgspec's message about a table, as "key: what is wrong", with advice where it is about an unknown key; `keys` of the
    table "" itself, and of the tables in it by their key."""
    unknown = unknown_key(message)
    if not unknown or (within := re.split(r"[.\[]", unknown.path)[0]) not in keys:
        said, _, path = message.partition(" - at `$")
        path = path.strip("`.")
        if missing := re.fullmatch(r"Object missing required field `(.*)`", said):
            return f"{path or 'it'} lacks the key {missing[1]!r}; give it."
        return f"{path}: {said[0].lower()}{said[1:].rstrip('.')}." if path else message
    place = f"{within} has" if within else "there is"
    nested = [f"{table}.{key}" for table, names in keys.items() if table for key in names] if not within else []
    return f"{place} no key {unknown.key!r}; {near_names(unknown.key, [*keys[within], *nested])}"
