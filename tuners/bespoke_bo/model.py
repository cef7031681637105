"""The structured model of an iteration of synchronous SGD (Dalibard et al., "Tuning the Scheduling of Distributed Stochastic
Gradient Descent with Bayesian Optimization", Section 3).

An iteration takes the compute time of the slowest machine plus communication. Each part is observed and inferred on its own
(conditional independence); parts are combined only in forward draws:

* per device type, the rate in samples per second as a function of the load n: r / (1 + s / n), which is constant or
  saturates, times exp of a Gaussian process of log n. Rates are modelled as logarithms, so no rate is negative;
* per type of machine with several devices, the time to sum their gradients after the slowest device has computed, if more
  than one has a load: log seconds, a constant with a Gaussian process of the loads;
* communication (`tuners.bespoke_bo.communication`), one part for the cluster: the time of an iteration beyond the compute
  time of its slowest machine.

All priors are ours, and so is the model wherever the paper leaves it open: it is not in the public framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_bo.communication import communication
from tuners.bespoke_bo.grouped_cluster import GroupedCluster, RoleGroup
from tuners.bespoke_bo.parts import Evidence, Part, Prior
from tuners.bespoke_bo.smc import Inference, Posterior

__all__ = ["IterationModel", "Observed", "aggregation", "device_rate"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_Row = tuple[list[float], float, float]  # inputs, value and noise scale of one observation
_Rows = dict[str, list[_Row]]  # by name of the part


class Observed(NamedTuple):
    """One evaluation: a schedule and its measured times, nan where none was. M machines, D devices, I iterations."""

    loads: _Ints  # [M, D]
    serves: NDArray[np.bool_]  # [M]
    device_seconds: _Floats  # [M, D]
    machine_seconds: _Floats  # [I, M]
    iteration_seconds: _Floats  # [I]
    seconds: float  # of an iteration: the objective


# ------------------------------------------------------------------------------------------------------------------ parts


def device_rate(name: str, reference: float, batch_size: int) -> Part:
    """The log rate (samples per second) of a device type, from its load; `reference` is a rough guess of the rate."""

    def mean(parameters: _Floats, inputs: _Floats) -> _Floats:
        rate, saturation = parameters[:, 0, None], parameters[:, 1, None]
        found: _Floats = np.log(rate) - np.log1p(saturation / inputs[..., 0])
        return found

    return Part(
        name=name,
        parameters=(
            Prior("rate", reference / 50, reference * 50),
            Prior("saturation", 1e-3, max(2.0, batch_size / 4)),  # samples at which half of the rate is reached
        ),
        mean=mean,
        features=lambda inputs, _mean: _per_particle(np.log(inputs)),
        width=1,
        amplitude=Prior("amplitude", 0.003, 0.3),
        length=Prior("length", 0.5, 5.0),
        noise=Prior("noise", 5e-4, 0.1),
    )


def aggregation(name: str, reference: float, count: int) -> Part:
    """The log seconds that a type of machine with `count` devices takes to sum their gradients, from their loads."""
    return Part(
        name=name,
        parameters=(Prior("seconds", reference / 1000, reference * 100),),
        mean=lambda parameters, inputs: np.log(parameters[:, :1]) * np.ones(inputs.shape[-2]),
        features=lambda inputs, _mean: _per_particle(np.log1p(inputs)),
        width=count,
        amplitude=Prior("amplitude", 0.01, 0.5),
        length=Prior("length", 0.5, 5.0),
        noise=Prior("noise", 0.01, 0.5),
    )


def _per_particle(features: _Floats) -> _Floats:
    """The features with a leading axis for particles, of length 1 if all particles share them."""
    return features if features.ndim == 3 else features[None]


# ------------------------------------------------------------------------------------------------------------------ model


class IterationModel:
    """All parts and their posteriors; inference is separate for each part."""

    def __init__(
        self, cluster: GroupedCluster, seed: int, *, inference: Inference = "smc", particles: int = 256, overlap: bool = True
    ) -> None:
        self.cluster = cluster
        self.posteriors = dict[str, Posterior]()
        self._overlap = overlap
        self._made = (seed, inference, particles)

    def observe(self, seen: Sequence[Observed]) -> None:
        """Learn from all evaluations so far, known ones included."""
        if not seen:
            return
        if not self.posteriors:
            self._declare(seen)
        for name, evidence in self._evidence(seen).items():
            known = self.posteriors[name]
            if len(evidence) > len(known.evidence):
                known.observe(evidence)

    def _declare(self, seen: Sequence[Observed]) -> None:
        """Create the parts. Rates are expected in proportion to cores, by the devices that were measured first."""
        cluster, parts = self.cluster, dict[str, Part]()
        per_core = _samples_per_core_second(cluster, seen)
        for group in cluster.groups:
            cores = cluster.cores[cluster.types.index(group.type)]
            for kind in group.device_kinds:
                name = f"rate {group.type} {kind}"
                parts[name] = device_rate(name, per_core * cores, cluster.batch)
            if len(group.device_kinds) > 1:
                name = f"aggregation {group.type}"
                parts[name] = aggregation(name, cluster.model_bytes / 5e9, len(group.device_kinds))
        parts["communication"] = communication(cluster, overlap=self._overlap)
        seed, inference, particles = self._made
        seeds = np.random.SeedSequence(seed).spawn(len(parts))
        self.posteriors = {
            name: Posterior(part, np.random.default_rng(s), particles, inference)
            for (name, part), s in zip(parts.items(), seeds, strict=True)
        }

    def _evidence(self, seen: Sequence[Observed]) -> dict[str, Evidence]:
        """The observations, sorted by part."""
        rows: _Rows = {name: [] for name in self.posteriors}
        for one in seen:
            for group in self.cluster.groups:
                for machine in group.members:
                    _add_machine(rows, group, one, machine)
            slowest = np.nanmax(one.machine_seconds, axis=1)
            by_role = self.cluster.slowest_seconds(one.loads, one.serves, one.machine_seconds)
            traffic = self.cluster.traffic(self.cluster.placement(one.loads, one.serves), by_role)
            # Subtract within each iteration: the slowest machine changes, and that noise is not communication.
            rest = float(np.median(one.iteration_seconds - slowest))
            rows["communication"].append((list(np.median(traffic, axis=0)), rest, float(np.median(slowest))))
        return {name: _as_evidence(found) for name, found in rows.items() if found}


def _samples_per_core_second(cluster: GroupedCluster, seen: Sequence[Observed]) -> float:
    """The median over machines of samples per second and core."""
    found = [
        one.loads[m, d] / one.device_seconds[m, d] / cluster.cores[cluster.types.index(g.type)]
        for one in seen
        for g in cluster.groups
        for m in g.members
        for d in g.devices
        if one.loads[m, d] > 0 and one.device_seconds[m, d] > 0
    ]
    return float(np.median(found)) if found else 1.0


def _add_machine(rows: _Rows, group: RoleGroup, one: Observed, machine: int) -> None:
    """Add one machine's device rates and, if several devices had a load, the time to sum their gradients."""
    loads, seconds = one.loads[machine, list(group.devices)], one.device_seconds[machine, list(group.devices)]
    for kind, load, took in zip(group.device_kinds, loads, seconds, strict=True):
        if load > 0 and np.isfinite(took) and took > 0:
            rows[f"rate {group.type} {kind}"].append(([float(load)], float(np.log(load / took)), 1.0))
    whole = float(np.median(one.machine_seconds[:, machine]))
    if (loads > 0).sum() > 1 and np.isfinite(whole):
        # The measured difference can be 0, which has no logarithm.
        least = 1e-4 * whole
        rows[f"aggregation {group.type}"].append(
            ([float(n) for n in loads], float(np.log(max(whole - np.nanmax(seconds), least))), 1.0)
        )


def _as_evidence(rows: list[_Row]) -> Evidence:
    inputs, values, spread = zip(*rows, strict=True)
    return Evidence(np.array(inputs), np.array(values), np.array(spread))
