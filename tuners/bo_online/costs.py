"""What a change of setting needs and what that costs, learnt from changes made (TensorFlowOnline, Section V).

A change relocates training data (Type I-a: fetched anew, TDR), relocates the model (Type I-b: on demand, ODMR), sets the
system anew (Type II: SSR), or any union of these, whose costs add up. Changes drawn at random need several at once, so
their costs are told apart by non-negative least squares over all changes so far; what always came together shares evenly.
The public code knows one mean over all changes, without the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import nnls

from tuners.settings import Setting

__all__ = ["TECHNIQUES", "PastReconfiguration", "Technique", "change_seconds", "technique_seconds", "techniques"]

Technique: TypeAlias = Literal["TDR", "ODMR", "SSR"]

TECHNIQUES: tuple[Technique, ...] = ("TDR", "ODMR", "SSR")

_EVENLY = 1e-3
"""The weight of the wish for small costs: decides only what the changes leave open."""


class PastReconfiguration(NamedTuple):
    """A change that was made and measured."""

    needed: frozenset[Technique]
    seconds: float


def techniques(old: Setting, new: Setting) -> frozenset[Technique]:
    """What it takes to get from one setting to the other: nothing for equal ones.

    Who works, or on how much of the data, is I-a; who serves, or how much of the model, is I-b; a worker that becomes a
    server is both. Every other field is a system setting, II.
    """
    needed = set[Technique]()
    (data, model), (new_data, new_model) = _by_node(old), _by_node(new)
    if data != new_data:
        needed.add("TDR")
    if model != new_model:
        needed.add("ODMR")
    relocating = ("workers", "servers", "data_shares", "model_shares", "loads")
    if any(getattr(old, f) != getattr(new, f) for f in Setting.__slots__ if f not in relocating):
        needed.add("SSR")
    if old.loads != new.loads and "TDR" not in needed:
        needed.add("SSR")
    return frozenset(needed)


def _by_node(setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Who works on what share of the data, and who serves what share of the model."""
    data, model = setting.shares()
    return dict(zip(setting.workers, data, strict=True)), dict(zip(setting.servers, model, strict=True))


def technique_seconds(changes: Sequence[PastReconfiguration]) -> dict[Technique, float]:
    """The seconds of each technique, never negative, that explain the changes best; 0 for one that was never needed."""
    if not changes:
        return dict.fromkeys(TECHNIQUES, 0.0)
    needs = np.array([[t in c.needed for t in TECHNIQUES] for c in changes], float)
    seconds = np.array([c.seconds for c in changes])
    found, _ = nnls(np.vstack([needs, _EVENLY * np.eye(len(TECHNIQUES))]), np.append(seconds, np.zeros(len(TECHNIQUES))))
    return dict(zip(TECHNIQUES, map(float, found), strict=True))


def change_seconds(
    changes: Sequence[PastReconfiguration], needed: frozenset[Technique], rule: Literal["technique", "mean"] = "technique"
) -> float:
    """What a change that needs these techniques is expected to take: R_cost. Nothing is known before the first change."""
    if rule == "mean":
        later = [c.seconds for c in changes[1:]]
        return float(np.mean(later)) if later else 0.0
    by_technique = technique_seconds(changes)
    return sum(by_technique[t] for t in TECHNIQUES if t in needed)
