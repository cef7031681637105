"""The system model of `tuners.joint`: seconds between two pushes of the job, for any setting, from what windows measured.

Every worker computes, pulls and pushes in a closed circle. Under ASP and SSP the job is a closed queueing network of the
links of machines (`tuners.joint.models.link_network`). Under BSP a round lasts as long as its slowest worker, and all
transfers of a round share the servers; so they do in rounds of a quorum (`tuners.joint.models.waiting_rounds`).

What is fitted: compute seconds (`tuners.joint.models.compute_model`), and, of pulls and of pushes, how many times as long as
by the NICs' rates they take on the links of workers, and on those of servers. One setting tells only the one of these two
that its transfers wait for; until another setting tells the other, both count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv
from statistics import median
from typing import TypeAlias

import numpy as np

from tuners.actions import Job, Pushes, Setting, Window
from tuners.joint.models.compute_model import ComputeModel, samples_of_devices
from tuners.joint.models.link_network import AlikeMachines, LinkFactors, PushFlow, flow_of, round_of_all
from tuners.joint.models.waiting_rounds import JITTER, pace_of_rounds

__all__ = ["SystemModel", "round_gradients", "waits"]

_LEAST, _MOST = 0.02, 50.0  # that transfers are believed to take, over what the NICs' rates say of the whole model
_LEAST_OF_TABLES = 1e-5  # the same of embedding tables: a mini-batch pulls and pushes some of their rows
_ROUNDING = 1e-9  # of a moment in seconds, that the sum of a push's parts may be off
_FITS = 30  # rounds at most in which factors are fitted
_STEP = 0.3  # of the way, in logarithms, that a round goes: what pulls take changes how long pushes wait, and the reverse
_FITTED = 0.003  # share of a factor: a round that changes less is the last one


@dataclass(slots=True)
class _Learned:
    """The factors of pulls, or of pushes, as far as they were measured."""

    least: float
    workers: float | None = None
    servers: float | None = None

    def now(self) -> LinkFactors:
        """What was measured; what was not counts as the other."""
        return LinkFactors(self.workers or self.servers or 1.0, self.servers or self.workers or 1.0)

    def scale(self, ratio: float, *, at_servers: bool) -> None:
        """Take in that transfers take `ratio` times what is predicted, because of the links of servers, or of workers."""
        name = "servers" if at_servers else "workers"
        setattr(self, name, float(np.clip(getattr(self.now(), name) * ratio, self.least, _MOST)))


_Alike: TypeAlias = tuple[AlikeMachines, list[str]]  # with their names


class SystemModel:
    """Predicts how often the job completes a push. Knows nothing before `learn` was called."""

    def __init__(self, job: Job) -> None:
        self._nodes = {n.name: n for n in job.nodes}
        self._names = [n.name for n in job.nodes]
        self._model_bytes = job.model_bytes
        self.compute = ComputeModel(job)
        # Bytes per second that servers were seen to serve, where shares of the model are free; else the NICs' rates count.
        self._served, self._rates_count = dict[str, float](), job.space.frees("model_share")
        self._transfers = dict[str, float]()  # seconds of a pull and a push of each worker, measured
        least = _LEAST_OF_TABLES if job.blocks else _LEAST
        self._pull, self._push = _Learned(least), _Learned(least)

    @property
    def knows(self) -> bool:
        """Whether anything was measured."""
        return self.compute.knows

    def learn(
        self,
        setting: Setting,
        window: Window,
        since_seconds: float = 0.0,
        until_seconds: float = math.inf,
        ignored: Sequence[int] = (),
    ) -> bool:
        """Take in the measurements of a window that was trained under `setting`; whether there were any.

        What workers had begun before `since_seconds`, with their pulls, does not count: it may be of another size, or from
        other servers. Nor does what was pushed after `until_seconds`, when a machine had been lost, nor the
        pushes `ignored`, by their place in the window.
        """
        begun = (
            window.pushes.seconds - window.pushes.push_seconds - window.pushes.compute_seconds - window.pushes.pull_seconds
        )
        # What began at that moment counts: the sum of its parts is rounded.
        counts = ~(begun < since_seconds - _ROUNDING * window.end_seconds) & ~(window.pushes.seconds > until_seconds)
        counts[list(ignored)] = False
        pushes = Pushes._make(values[counts] for values in window.pushes)
        if not len(pushes.seconds):
            return False
        computing = dict[str, float]()
        for index in np.unique(pushes.worker):
            name = self._names[int(index)]
            seconds = float(np.mean(pushes.compute_seconds[pushes.worker == index]))
            if name in setting.workers and 0 < seconds < math.inf:  # a table of recorded runs may not tell
                computing[name] = seconds
                self._transfers[name] = float(np.mean((pushes.pull_seconds + pushes.push_seconds)[pushes.worker == index]))
        self.compute.learn(setting, window, computing)
        if not self.knows:
            return False
        if self._rates_count:
            self._served |= {s.node: s.pull_bytes / s.pull_seconds for s in window.servers if s.pull_seconds > 0}
        self._learn_transfers(setting, pushes)
        return True

    def flow(self, setting: Setting) -> PushFlow:
        """How often the job completes a push under `setting`, and what transfers take."""
        return self._flow(setting, self._alike(setting))

    def push_seconds(self, setting: Setting) -> float:
        """Mean seconds between two pushes of the job under `setting`."""
        return 1 / self.flow(setting).pushes_per_second

    def samples_per_second(self, setting: Setting) -> float:
        """Training samples per second under `setting`."""
        samples = np.mean([setting.steps_of(w) * sum(samples_of_devices(setting, w)) for w in setting.workers])
        return float(samples) / self.push_seconds(setting)

    def cycle_seconds(self, setting: Setting) -> list[float]:
        """Seconds of each worker from one push to the next; transfers as they were measured, because NICs differ."""
        found = self.flow(setting)
        if waits(setting):
            return [len(setting.workers) / found.pushes_per_second] * len(setting.workers)
        each = zip(setting.workers, self._compute_seconds(setting), strict=True)
        mean = float(np.mean(found.pull_seconds) + np.mean(found.push_seconds))
        return [compute + self._transfers.get(worker, mean) for worker, compute in each]

    def served_per_second(self, server: str) -> float:
        """Bytes per second that a server serves at most."""
        nic = self._nodes[server].nic_bytes_per_second
        return min(self._served.get(server, nic), nic)

    # ------------------------------------------------------------------------------------------------- transfers, network

    def _learn_transfers(self, setting: Setting, pushes: Pushes) -> None:
        """Take in the seconds of pulls and of pushes, so that they are predicted for `setting`, in the mean over workers.

        Over pushes, the mean may fall where links are slower: workers that transfer little then make most of the pushes.
        """
        alike = self._alike(setting)
        working = [names for found, names in alike if found.compute_seconds is not None]
        place = {name: i for i, names in enumerate(working) for name in names}
        seen = [int(index) for index in np.unique(pushes.worker) if self._names[int(index)] in place]
        took = [
            [float(np.mean(seconds[pushes.worker == index])) for index in seen]
            for seconds in (pushes.pull_seconds, pushes.push_seconds)
        ]
        if (
            seen and np.isfinite(took).all()
        ):  # else only machines that work no more have pushed, or nobody has timed transfers
            self._fit(setting, alike, [place[self._names[index]] for index in seen], took)

    def _fit(
        self, setting: Setting, alike: Sequence[_Alike], classes: Sequence[int], took: Sequence[Sequence[float]]
    ) -> None:
        """Fit the factors to what pulls, and what pushes, `took` by worker; `classes` has the class of each worker."""
        ways, at_servers = (self._pull, self._push), self._would_wait_for_servers(setting, alike, classes, took)
        for _ in range(_FITS):
            found, before = self._flow(setting, alike), [way.now() for way in ways]
            predicted = [sum(seconds[i] for i in classes) for seconds in (found.pull_seconds, found.push_seconds)]
            if not all(predicted):
                return  # nothing crosses a link
            binding = (found.pulls_at_servers, found.pushes_at_servers)
            for way, seconds, whole, at, binds in zip(ways, took, predicted, at_servers, binding, strict=True):
                ratio = sum(seconds) / whole
                # Where transfers are quicker than predicted, the links that make them so long are quicker.
                way.scale(ratio**_STEP, at_servers=at if ratio > 1 else binds)
            if np.allclose([way.now() for way in ways], before, rtol=_FITTED, atol=0):
                return

    def _would_wait_for_servers(
        self, setting: Setting, alike: Sequence[_Alike], classes: Sequence[int], took: Sequence[Sequence[float]]
    ) -> list[bool]:
        """Of pulls, and of pushes: whether a server takes longer for all that are in progress than a worker for its own."""
        machines = [found for found, _ in alike]
        working = [m for m in machines if m.compute_seconds is not None]
        own = sum(working[i].own_seconds for i in classes) / len(classes)
        served = max(m.served_seconds or 0.0 for m in machines)
        others = _transferring(setting, [working[i].compute_seconds or 0.0 for i in classes], took)
        factors = (self._pull.now(), self._push.now())
        return [f.servers * served * (1 + n) > f.workers * own for f, n in zip(factors, others, strict=True)]

    def _alike(self, setting: Setting) -> list[_Alike]:
        """The machines of `setting`, those that are alike together, with their names."""
        size = self._model_bytes * setting.transfer_bits / 32
        shares = setting.model_by_server()
        compute = dict(zip(setting.workers, self._compute_seconds(setting), strict=True))
        alike = dict[tuple[float, ...], list[str]]()
        for name in dict.fromkeys((*setting.workers, *setting.servers)):
            served = shares[name] * size / self.served_per_second(name) if name in shares else -1.0
            own = (1 - shares.get(name, 0.0)) * size / self._nodes[name].nic_bytes_per_second
            alike.setdefault((own, served, name in compute), []).append(name)
        return [
            (
                AlikeMachines(
                    count=len(names),
                    compute_seconds=_think([compute[n] for n in names]) if works else None,
                    own_seconds=own,
                    served_seconds=served if served >= 0 else None,
                ),
                names,
            )
            for (own, served, works), names in alike.items()
        ]

    def _flow(self, setting: Setting, alike: Sequence[_Alike]) -> PushFlow:
        pull, push = self._pull.now(), self._push.now()
        machines = [found for found, _ in alike]
        if waits(setting):
            compute = self._compute_seconds(setting)
            slowest = max(max(compute), median(compute) * (1 + JITTER * math.sqrt(2 * math.log(max(len(compute), 2)))))
            return round_of_all(machines, slowest, pull, push)
        if setting.policy == "quorum":
            return self._rounds(setting, alike)
        return flow_of(machines, pull, push, _busy(setting) / len(setting.workers))

    def _rounds(self, setting: Setting, alike: Sequence[_Alike]) -> PushFlow:
        """The flow where rounds end by a quorum: transfers as if all workers began at one time."""
        compute = self._compute_seconds(setting)
        found = round_of_all([machines for machines, _ in alike], max(compute), self._pull.now(), self._push.now())
        working = [names for machines, names in alike if machines.compute_seconds is not None]
        each = zip(working, found.pull_seconds, found.push_seconds, strict=True)
        transfers = {name: pull + push for names, pull, push in each for name in names}
        pace = pace_of_rounds(
            compute, [transfers[w] for w in setting.workers], round_gradients(setting), setting.grace_seconds
        )
        return found._replace(**pace._asdict())

    def _compute_seconds(self, setting: Setting) -> list[float]:
        """Of each worker, from a pull to the push; the slowest worker holds others back under a narrow bound."""
        compute = [self.compute.seconds(setting, w) for w in setting.workers]
        if setting.policy == "ssp" and 0 < setting.staleness < 4:
            compute = [0.5 * c + 0.5 * max(compute) for c in compute]
        return compute


def _think(compute: Sequence[float]) -> float:
    """Mean seconds that workers compute, where faster ones do so more often."""
    return len(compute) / sum(1 / max(c, 1e-12) for c in compute)


def _busy(setting: Setting) -> int:
    """How many workers compute or transfer at a time."""
    return min(len(setting.workers), setting.staleness + 1) if setting.policy == "admit" else len(setting.workers)


def _transferring(setting: Setting, compute: Sequence[float], took: Sequence[Sequence[float]]) -> list[float]:
    """How many others a worker finds pulling, and how many pushing: by Little's law from the seconds that pulls and pushes
    of each worker `took`, beside those that it computes; all of them where all begin at one time."""
    others = len(setting.workers) - 1
    if waits(setting) or setting.policy == "quorum":
        return [others, others]
    cycles = [sum(times) for times in zip(compute, *took, strict=True)]
    return [others * sum(map(truediv, seconds, cycles)) / len(cycles) for seconds in took]


def waits(setting: Setting) -> bool:
    """Whether every worker waits for all others after each push."""
    return setting.policy == "bsp" or (setting.policy == "ssp" and setting.staleness == 0)


def round_gradients(setting: Setting) -> int:
    """Gradients that end a round, at one model; with some grace, there may be more."""
    workers = len(setting.workers)
    return min(setting.quorum or workers, workers) if setting.policy == "quorum" else workers
