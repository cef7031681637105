"""The knobs that a tuner changed: from settings over time to lanes that can be drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traces.schema import setting_from
from tuners.settings import BOUNDED, Setting

__all__ = ["Lane", "knob_values", "lanes"]

_LABELS = {
    "learning_rate": "learning rate",
    "batch_size": "batch size\n(samples)",
    "worker_count": "workers",
    "server_count": "servers",
    "staleness": "staleness bound\n(clocks)",
    "intra_threads": "threads in\none operation",
    "inter_threads": "operations\nat once",
    "transfer_bits": "transfer\n(bits)",
    "local_steps": "local steps\nper push",
    "outer_rate": "outer rate",
    "outer_momentum": "outer momentum",
    "blocks": "blocks of\nembedding tables",
    "cache_rows": "rows that a\nworker keeps",
    "cache_clocks": "mini-batches that\na copy is used",
    "checkpoint_seconds": "seconds between\ncheckpoints",
    "pull_clocks": "mini-batches\nper pull",
    "replicas": "servers that hold\na hot block",
    "hot_blocks": "hot blocks",
    "quorum": "pushes of\na quorum",
    "grace_seconds": "seconds of grace\nafter a quorum",
    "samples_per_round": "samples, all\nworkers once",
    "data_share": "largest share\nof the data",
    "model_share": "largest share\nof the model",
}
_PLAIN = (
    *("learning_rate", "momentum", "batch_size", "intra_threads", "inter_threads", "transfer_bits"),
    *("local_steps", "outer_rate", "outer_momentum", "cache_rows", "cache_clocks", "checkpoint_seconds", "pull_clocks"),
    *("replicas", "hot_blocks", "quorum", "grace_seconds"),
)


@dataclass(frozen=True, slots=True)
class Lane:
    """One knob over time."""

    label: str
    steps: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]  # by seed: when, and the value from then on
    categories: tuple[str, ...] = ()  # what values 0, 1, ... stand for; () where values are numbers
    log: bool = False
    whole: bool = False  # whether all values are whole numbers

    def values(self) -> list[float]:
        """The different finite values of all seeds, ascending."""
        return sorted({float(v) for _, y in self.steps.values() for v in y if math.isfinite(v)})


def knob_values(setting: Setting) -> dict[str, float | str]:
    """A setting as numbers and words that can be drawn; of shares, only the largest."""
    data, model = setting.shares()
    found: dict[str, float | str] = {name: float(getattr(setting, name)) for name in _PLAIN}
    found["policy"] = setting.policy
    found["staleness"] = float(setting.staleness) if setting.policy in BOUNDED else math.nan
    found["worker_count"], found["server_count"] = float(len(setting.workers)), float(len(setting.servers))
    found["placement"] = f"{' '.join(setting.workers)} | {' '.join(setting.servers)}"
    loads = sum(map(sum, setting.loads)) if setting.loads else setting.batch_size * len(setting.workers)
    found["samples_per_round"] = float(loads)
    # Equal shares are no knob: their size changes only with the number of nodes.
    found["data_share"] = max(data) if setting.data_shares else math.nan
    found["model_share"] = max(model) if setting.model_shares or setting.block_owners else math.nan
    found["blocks"] = "placed one by one" if setting.block_owners else setting.placement
    for name, value in setting.options:
        found[name] = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    return found


def lanes(settings: pl.DataFrame, until: Mapping[int, float]) -> list[Lane]:
    """A lane per knob that changed in any run of `settings`; the run of a seed ends at `until` seconds.

    Raises ValueError where a setting cannot be read.
    """
    runs: dict[int, tuple[list[float], list[dict[str, float | str]]]] = {}
    for seed, seconds, text in settings.sort("seed", "seconds").select("seed", "seconds", "setting").iter_rows():
        times, values = runs.setdefault(seed, ([], []))
        times.append(seconds)
        values.append(knob_values(setting_from(text)))
    names = dict.fromkeys(name for _, values in runs.values() for v in values for name in v)
    changed = [n for n in names if any(_changed(n, values) for _, values in runs.values())]
    return [_lane(name, runs, until) for name in changed if name not in _redundant(changed)]


def _changed(name: str, values: Sequence[Mapping[str, float | str]]) -> bool:
    seen = {str(v.get(name, math.nan)) for v in values}  # as text, where NaN equals itself
    if name == "staleness":
        seen.discard("nan")  # that a bounded policy starts or ends is in the lane of the policy
    return len(seen) > 1


def _redundant(changed: list[str]) -> set[str]:
    """Knobs that changed only because others did."""
    redundant = set()
    if "worker_count" in changed or "server_count" in changed:
        redundant.add("placement")
    if "batch_size" in changed or "worker_count" in changed:
        redundant.add("samples_per_round")
    return redundant


def _lane(
    name: str, runs: Mapping[int, tuple[list[float], list[dict[str, float | str]]]], until: Mapping[int, float]
) -> Lane:
    """The lane of the knob `name`: its steps in every run, up to `until` seconds, and how its axis is labelled."""
    seen = [v.get(name, math.nan) for _, values in runs.values() for v in values]
    words = dict.fromkeys(str(v) for v in seen) if any(isinstance(v, str) for v in seen) else {}
    codes = {word: float(i) for i, word in enumerate(words if name == "placement" else sorted(words))}
    steps = {}
    for seed, (times, values) in runs.items():
        of_knob = [v.get(name, math.nan) for v in values]
        numbers = [codes[str(v)] if codes else float(v) for v in of_knob]
        end = max(times[-1], until.get(seed, times[-1]))
        steps[seed] = (np.array([*times, end]), np.array([*numbers, numbers[-1]]))
    label = _LABELS.get(name, name)
    if codes:
        shown = [f"placement {i + 1}" for i in range(len(codes))] if name == "placement" else list(codes)
        return Lane(label, steps, tuple(shown))
    finite = [v for v in map(float, seen) if math.isfinite(v)]
    whole = all(v == int(v) for v in finite)
    log = min(finite) > 0 and max(finite) / min(finite) > (10 if whole else 3)  # rates are tried by factors
    return Lane(label, steps, (), log, whole)
