"""Advice on a name that is unknown, for messages of all packages: the nearest of the names that exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["near_names"]


_MANY = 12  # names that are too many for a message, where a command shows them


def near_names(name: str, known: Iterable[str], *, shown_by: str = "") -> str:
    """ "did you mean a or b?" with up to three similar `known` names; where none is similar, "choose one of ..." with all of
    them, or, where these are many, with the commands that they are `shown_by`."""
    names = list(known)
    near = get_close_matches(name, names)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if shown_by and len(names) > _MANY:
        return f"choose one of the {len(names)} that {shown_by} shows."
    return f"choose one of {', '.join(names)}."
