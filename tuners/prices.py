"""What the machines of a job cost by the hour. Machines are counted also where no price is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tuners.settings import Setting

__all__ = ["UNKNOWN", "Prices", "Rate"]


class Rate(NamedTuple):
    """Machines that are in use at one time, and their price."""

    machines: float
    usd_per_hour: float  # of all of them; nan if that of any is not known


UNKNOWN = Rate(math.nan, math.nan)
"""Neither the number of machines nor their price is known."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of every machine of a job, or, in a job of recorded runs, of the machines of every recorded setting.

    Prices are public: a tuner may look at them.
    """

    by_node: Mapping[str, float] = field(default_factory=dict)  # USD per hour; a node that is not here has no known price
    by_setting: Mapping[Setting, Rate] = field(default_factory=dict)  # recorded; empty: the machines are the job's nodes

    def rate(self, nodes: Iterable[str]) -> Rate:
        """The rate of these nodes, each once."""
        names = sorted(set(nodes))
        return Rate(len(names), math.fsum(self.by_node.get(name, math.nan) for name in names))

    def setting_rate(self, setting: Setting) -> Rate:
        """The rate of all machines that a job uses under `setting`; without machines where none were recorded."""
        if self.by_setting:
            return self.by_setting.get(setting, UNKNOWN)
        return self.rate((*setting.workers, *setting.servers))

    def highest_usd_per_hour(self, nodes: Iterable[str]) -> float:
        """The price of all `nodes` together, or of the most expensive recorded setting; nan where a price is not known."""
        if self.by_setting:
            found = [rate.usd_per_hour for rate in self.by_setting.values()]
            return math.nan if any(map(math.isnan, found)) else max(found)
        return self.rate(nodes).usd_per_hour
