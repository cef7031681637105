"""Runs tuners on systems and scores them: which tuner finishes a training job first, and what does its tuning cost?

    import harness

    result = harness.compare("digits", ["fixed", "cruise", my_tuner], seeds=6)

`__all__` is the public interface. Each name is imported when it is first used, so that `import harness` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness import own_packages
from harness.version import HARNESS_VERSION

own_packages.claim()

__version__ = HARNESS_VERSION

if TYPE_CHECKING:
    from harness.interface import compare, deploy, load_results, play
    from harness.interface import scenario as scenario

__all__ = ["__version__", "compare", "deploy", "load_results", "play", "scenario"]

_WHERE = dict.fromkeys(("compare", "deploy", "load_results", "play"), "harness.interface")


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name == "scenario":  # the package can be called, too
        return import_module("harness.scenario")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
