"""The cost of a reconfiguration, learnt from past ones (TensorFlowOnline, Section V).

A reconfiguration relocates training data (Type I-a: workers fetch it again, TDR), relocates the model (Type I-b: on demand,
ODMR), changes system settings (Type II: SSR), or any union of these; their costs add up. Random settings need several
techniques at once, so the costs are separated by non-negative least squares over all reconfigurations so far. Techniques
that always came together get equal costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import nnls

from tuners.actions import Method
from tuners.settings import OF_REPLICAS, OF_TABLES, Setting

__all__ = [
    "RELOCATING",
    "RELOCATIONS",
    "TECHNIQUES",
    "PastReconfiguration",
    "Technique",
    "change_seconds",
    "published_seconds",
    "technique_seconds",
    "techniques",
]

Technique: TypeAlias = Literal["TDR", "ODMR", "SSR"]

TECHNIQUES: tuple[Technique, ...] = ("TDR", "ODMR", "SSR")

RELOCATIONS: frozenset[Technique] = frozenset({"TDR", "ODMR"})

RELOCATING = ("workers", "servers", "data_shares", "model_shares", "loads", *OF_TABLES, *OF_REPLICAS)
"""Fields of a setting of which a change relocates data or model (Type I); every other one is a system setting (Type II)."""

_RESTARTED_BYTES_PER_SECOND, _RELOCATED_BYTES_PER_SECOND = 11.7e6, 45e6
"""Fits to Table V, of four jobs on 36 nodes: its baseline, checkpoint and restart, and relocation on demand of a part of the
model, in bytes of the whole."""

_EVENLY = 1e-3
"""The weight of a preference for small costs: it decides only what the observations leave open."""


class PastReconfiguration(NamedTuple):
    """A reconfiguration that was made: the techniques that it needed, and its seconds."""

    needed: frozenset[Technique]
    seconds: float


def techniques(old: Setting, new: Setting) -> frozenset[Technique]:
    """The techniques that a change from one setting to the other needs: none for equal settings.

    A change of workers or of their data shares is I-a; of servers or of their model shares I-b; a worker that becomes a
    server is both. A field that is not among `RELOCATING` is a system setting, II.
    """
    needed = set[Technique]()
    (data, model), (new_data, new_model) = _by_node(old), _by_node(new)
    if data != new_data:
        needed.add("TDR")
    if model != new_model or any(getattr(old, f) != getattr(new, f) for f in (*OF_TABLES, *OF_REPLICAS)):
        needed.add("ODMR")
    if any(getattr(old, f) != getattr(new, f) for f in Setting.__slots__ if f not in RELOCATING):
        needed.add("SSR")
    if old.loads != new.loads and "TDR" not in needed:
        needed.add("SSR")
    return frozenset(needed)


def _by_node(setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """The share of the data of each worker, and the share of the model of each server."""
    data, model = setting.shares()
    return dict(zip(setting.workers, data, strict=True)), dict(zip(setting.servers, model, strict=True))


def technique_seconds(changes: Sequence[PastReconfiguration]) -> dict[Technique, float]:
    """The seconds of each technique, never negative, that fit the past best; 0 for one that was never needed."""
    if not changes:
        return dict.fromkeys(TECHNIQUES, 0.0)
    needs = np.array([[t in c.needed for t in TECHNIQUES] for c in changes], float)
    seconds = np.array([c.seconds for c in changes])
    found, _ = nnls(np.vstack([needs, _EVENLY * np.eye(len(TECHNIQUES))]), np.append(seconds, np.zeros(len(TECHNIQUES))))
    return dict(zip(TECHNIQUES, map(float, found), strict=True))


def change_seconds(changes: Sequence[PastReconfiguration], needed: frozenset[Technique]) -> float:
    """R_cost, the expected seconds of a reconfiguration that needs these techniques; 0 before the first one."""
    by_technique = technique_seconds(changes)
    return sum(by_technique[t] for t in TECHNIQUES if t in needed)


def published_seconds(needed: frozenset[Technique], model_bytes: float, method: Method) -> float:
    """What it takes to relocate data, or a model of `model_bytes`, as fast as in the paper; 0 for system settings.

    Until the job itself has shown it, nothing else tells that a large model should stay where it is. What does not grow with
    the model, such as to start processes anew, is left out: a few seconds, which differ from system to system.
    """
    if method == "checkpoint":
        return (not needed.isdisjoint(RELOCATIONS)) * model_bytes / _RESTARTED_BYTES_PER_SECOND
    return ("ODMR" in needed) * model_bytes / _RELOCATED_BYTES_PER_SECOND
