"""Cruise: which machines work, which serve, and how much of data and model each holds, from a cost model of an epoch (Lee
et al., "Automating System Configuration of Distributed Machine Learning", ICDCS 2019).

Monitors report what a mini-batch costs each worker (`tuners.cruise.monitor`); from that the model predicts the time of an
epoch under every split (`tuners.cruise.split`), and the job is reconfigured, by migration, when the best split gains enough.
Where we differ or had to choose:

* The gain is predicted against predicted, as the public code does; ``against="measured"`` charges the model's own error to
  the current split. The paper's threshold of 5 % is the default (the code's is 0), for one type and for several (the code
  has none there). Mini-batches are not rounded up, as in Eq. 5, unless `round_up`, as in Eq. 4.
* ``C_w.proc`` is seconds per sample, measured. ``M`` is what one pull moves under the current setting. ``b`` is what the
  vendor states of the NIC, or with ``bandwidth="measured"`` that times what the pulls achieved of it: a server may serve
  slower than its NIC.
* The paper's model adds a server's work for everybody to each worker's compute, which is exact where all pull at once (BSP).
  `overlap`, our addition, lets asynchronous workers pull while others compute, up to what the servers can serve.
* `server_term` "sum" is the public code's, "paper" is Eq. 4; they differ where workers' NICs do.
* After a change what was measured is forgotten, what was pushed during the change does not count, nor does the first
  mini-batch after it, since it may mix both settings.
* Resources that come and go are an exception from the threshold. Where a machine in use was lost, any better split is
  taken; where it is in use still, having been given notice, every split is better. New machines are used where that is
  strictly better than the best split of those in use, and gains `extra_gain` over the current one.
* No oscillation: ties keep the current split, and one that was left is taken up again only for twice the gain, the next
  time for four times, until resources change. A split that the system refused is not asked for again until then, either.
* Fig. 3 makes every machine worker or server. A server that would hold nothing is left idle, where the job allows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from tuners.actions import Job, Method, NodeEvent, Reconfigure, Rejected, Run, Setting, Tuner
from tuners.cruise.monitor import Monitor, remember
from tuners.cruise.placement import ServerTerm
from tuners.cruise.split import TIE, CostModel, Roles, roles
from tuners.settings import Node

__all__ = ["cruise"]


def cruise(
    job: Job,
    *,
    gain: float = 0.05,
    extra_gain: float = 0.0,
    against: Literal["predicted", "measured"] = "predicted",
    bandwidth: Literal["nic", "measured"] = "nic",
    server_term: ServerTerm = "sum",
    overlap: bool = False,
    round_up: bool = False,
    batches: int = 10,
    warmup: int = 3,
    resume: int = 1,
    least: int = 3,
    forget: float = 0.0,
    recent: int = 0,
    newest: float = 0.9,
) -> Tuner:
    """Watch, predict, and reconfigure workers, servers and their shares when that gains more than `gain`.

    A job whose roles are not free just runs.

    Args:
        job: what to tune.
        gain: share of the current epoch time that a change must be predicted to save.
        extra_gain: the same where it is machines that have joined which make the difference.
        against: what a prediction is held against: the model's epoch time of the current split, or the measured one.
        bandwidth: b as the vendor states it, or as the pulls achieved it.
        server_term: the server's part of Eq. 4.
        overlap: whether a server serves some workers while others compute, unless the policy is "bsp".
        round_up: whether the model rounds each worker's mini-batches up.
        batches: the model is consulted every so many mini-batches per worker,
        least: once every worker has so many of them measured,
        warmup: not counting its first ones, and
        resume: after each change.
        forget: the k-th newest mini-batch weighs (1 - forget)^k.
        recent: how many of the newest mini-batches are averaged; 0 is all since the last solve.
        newest: weight of the newest reading in what is remembered of a machine that may not be a worker later.
    """
    if not (job.space.frees("worker_count") or job.space.frees("role")):
        return
    model = CostModel(
        job=job, server_term=server_term, overlap=overlap, round_up=round_up, bandwidth=bandwidth, against=against
    )
    current, monitor, known = job.start, Monitor(warmup, forget, recent), dict[str, float]()
    resources = _Resources(frozenset(n.name for n in job.nodes))
    left, refused = Counter[Roles](), set[Roles]()  # splits since resources last changed
    while True:
        seen = yield from Run(clocks=batches * len(current.workers))
        available = seen.nodes or job.nodes
        if resources.change(current, available, seen.events):
            left, refused = Counter(), set()
        if seen.setting is not None and roles(seen.setting) != roles(current):
            # The runtime has lost a machine and changed the setting itself.
            monitor = Monitor(resume, forget, recent, seen.end_seconds)
        current = seen.setting or current
        monitor.add(seen, job)
        at_work = [w for w in current.workers if w in resources.names]
        if not monitor.ready(at_work, least):
            continue
        readings = monitor.readings(at_work)
        monitor.clear()
        remember(known, readings, newest)
        wanted = model.best(current, available, readings, known, refused)
        if wanted is None or wanted.gain <= resources.needed(wanted.setting, gain, extra_gain, left):
            resources.considered()
            continue
        try:
            cost = yield from Reconfigure(wanted.setting, method=_method(job))
        except Rejected:
            refused.add(roles(wanted.setting))
            continue
        monitor = Monitor(resume, forget, recent, seen.end_seconds + cost.seconds)
        if cost.done:
            left[roles(current)] += 1
            current = wanted.setting
            resources.considered()


# ----------------------------------------------------------------------------------------- trigger and execution (IV-A.2, 3)


class _Resources:
    """Which machines there are, and what that has to do with the split in use."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._lost = False  # a machine in use went, and no split was chosen since
        self._joined = frozenset[str]()  # machines that came since a split was chosen

    def change(self, current: Setting, available: Iterable[Node], events: Iterable[NodeEvent]) -> bool:
        """Take note of what is available now, and of what came or went meanwhile; whether there is any news."""
        before, self.names = self.names, frozenset(n.name for n in available)
        came = {e.node for e in events if e.event == "joined"} | (self.names - before)
        went = {e.node for e in events if e.event != "joined"} | (before - self.names)
        used = set(current.workers + current.servers)
        self._lost = self._lost or not used.isdisjoint(went) or not used <= self.names
        self._joined = (self._joined | came) & self.names
        return bool(came or went)

    def considered(self) -> None:
        """A split has been chosen with these machines in mind."""
        self._lost, self._joined = False, frozenset()

    def needed(self, wanted: Setting, gain: float, extra_gain: float, left: Counter[Roles]) -> float:
        """What a change to `wanted` has to gain, twice as much for every time that it was `left`."""
        if self._lost:
            return TIE
        joins = not self._joined.isdisjoint(wanted.workers + wanted.servers)
        return max(TIE, extra_gain if joins else gain * 2 ** left[roles(wanted)])


def _method(job: Job) -> Method | None:
    """Cruise migrates blocks; a system that cannot gets its own first method."""
    return "migrate" if "migrate" in job.methods else None
