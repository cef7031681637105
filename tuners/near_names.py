"""Advice on a name that is unknown, for messages of all packages: the nearest of the names that exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["near_names"]


def near_names(name: str, known: Iterable[str]) -> str:
    """ "did you mean a or b?" with up to three similar `known` names; "choose one of ..." with all of them where none is."""
    names = list(known)
    near = get_close_matches(name, names)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names)}."
