"""Scenarios: one TOML file each, which describes a cluster, a job and what tuners may change."""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any

from harness.scenario.building import scenario as _built
from harness.scenario.description import Scenario
from harness.scenario.from_tables import own_model, workload_of
from harness.scenario.scenario import embedded, job, limits, load, matching, parse, show, summaries, system

__all__ = [
    "Scenario",
    "embedded",
    "job",
    "limits",
    "load",
    "matching",
    "own_model",
    "parse",
    "show",
    "summaries",
    "system",
    "workload_of",
]


class _CallablePackage(ModuleType):
    """Lets ``harness.scenario(...)`` build a scenario (`harness.scenario.building`), beside ``harness.scenario.load``.

    Importing this package sets the attribute `scenario` of `harness` to the package, so no function can have that place.
    """

    def __call__(self, *arguments: Any, **tables: Any) -> Scenario:
        return _built(*arguments, **tables)

    @property
    def __signature__(self) -> Signature:
        """What notebooks and shells show of the call's arguments."""
        return signature(_built)


sys.modules[__name__].__class__ = _CallablePackage
