"""Keep a user's files from hiding our packages: `tuners`, `traces`, `simulators` and `reports` are common names.

A user's `tuners.py` or folder `reports/` in the working folder would come before our packages on Python's path: in a
script, in a notebook, with ``python -m harness``, and in an editable installation even if it is last on the path. So a
finder answers for these four names before the path is searched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["PACKAGES", "claim", "working_folder_last"]

PACKAGES = ("reports", "simulators", "traces", "tuners")
"""Our packages, other than `harness`, which is imported first."""

_ROOT = str(Path(__file__).parents[1])


class _OwnFinder:
    """Finds the packages that lie beside `harness`; knows no other module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_ROOT], target) if path is None and name in PACKAGES else None


def claim() -> None:
    """Let our packages be found first. Raises ImportError if a module of another origin has one of their names already."""
    for name in PACKAGES:
        module = sys.modules.get(name)
        where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if where is not None and Path(_ROOT, name) not in (Path(where), Path(where).parent):
            raise ImportError(
                f"Cannot use harness here: {where} has been imported, and hides the package {name!r} of ps-harness. "
                "Give that file or folder another name."
            )
    if not any(isinstance(finder, type) and finder.__name__ == _OwnFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnFinder)


def working_folder_last() -> None:
    """Let modules of the working folder be found, after all others: its files must not hide installed packages.

    A checkout in which this code lies keeps its place: behind an installed copy, processes that get the path would import
    that copy.
    """
    here = str(Path.cwd())
    if here != _ROOT:
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
    if not {"", here} & set(sys.path):
        sys.path.append(here)
