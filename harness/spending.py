"""What a run used of machines, and what that cost, computed from its exchanges.

A machine is paid for by the second, while a branch that is not freed has it as a worker or as a server, and while it is in
the cluster: not after it has left or failed, and not before it joined. During a reconfiguration the machines of both
settings are paid for. A machine that no branch uses is given back and costs nothing. So a run costs the same, however a
tuner divides it into windows.

Recorded runs tell what all machines under a setting cost together. Only the branch that trains is paid for there; a restart
is paid for at the price of the setting that begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from traces.exchanges import Exchange
from tuners.actions import Fork, Free, Job, Reconfigure, Rejected, Run, Setting, Window
from tuners.playing.system import wanted_setting
from tuners.prices import Prices

__all__ = ["Spending", "highest_usd", "spending"]

_Nodes: TypeAlias = frozenset[str]
_Absences: TypeAlias = Mapping[str, list[tuple[float, float]]]

_HOUR = 3600.0  # seconds


class Spending(NamedTuple):
    """What a run used until it ended."""

    machine_seconds: float  # summed over machines; nan where their number was not recorded
    usd: float  # nan where the price of a machine that it used is not known


def highest_usd(prices: Prices, nodes: Iterable[str], seconds: float) -> float:
    """What `nodes`, all machines of a job, cost for so many seconds; of recorded runs, those of the most expensive setting.

    nan where a price is not known.
    """
    return prices.highest_usd_per_hour(nodes) * seconds / _HOUR


def spending(job: Job, exchanges: Sequence[Exchange]) -> Spending:
    """What the run used until its target or the end of its budget."""
    return _of_settings(job, exchanges) if job.prices.by_setting else _of_nodes(job, exchanges)


def _of_settings(job: Job, exchanges: Sequence[Exchange]) -> Spending:
    of_branch, before = {0: job.start}, 0.0
    machines, usd = [0.0], [0.0]
    for exchange in exchanges:
        now = min(exchange.seconds, job.budget_seconds)
        action, branch = exchange.action, getattr(exchange.action, "branch", 0)
        if not isinstance(exchange.answer, Rejected):
            if isinstance(action, Reconfigure):
                of_branch[branch] = action.setting
            elif isinstance(action, Fork):
                branch, parent = exchange.answer, of_branch[branch]
                of_branch[branch] = action.setting or parent
        rate = job.prices.setting_rate(of_branch.get(branch, job.start))
        machines.append(rate.machines * max(now - before, 0.0))
        usd.append(rate.usd_per_hour / _HOUR * max(now - before, 0.0))
        before = now
    return Spending(math.fsum(machines), math.fsum(usd))


def _of_nodes(job: Job, exchanges: Sequence[Exchange]) -> Spending:
    absences = _absences(exchanges)
    uses, seconds = _Uses(job, absences), dict[str, list[float]]()
    for node, start, end in (use for exchange in exchanges for use in uses.take(exchange)):
        away = math.fsum(max(min(end, until) - max(start, since), 0.0) for since, until in absences.get(node, []))
        seconds.setdefault(node, []).append(max(end - start, 0.0) - away)
    used = {node: math.fsum(parts) for node, parts in sorted(seconds.items())}
    usd = math.fsum(time * job.prices.rate([node]).usd_per_hour / _HOUR for node, time in used.items() if time > 0)
    return Spending(math.fsum(used.values()), usd)


def _absences(exchanges: Sequence[Exchange]) -> _Absences:
    """When nodes were not in the cluster, as (since, until), from the events that windows report."""
    found: dict[str, list[tuple[float, float]]] = {}
    since: dict[str, float] = {}
    events = [e for x in exchanges if isinstance(x.answer, Window) for e in x.answer.events]
    for event in sorted(events, key=lambda e: e.seconds):
        if event.event == "joined":
            # A node that joins without having left was not there from the beginning.
            first = 0.0 if event.node not in found else event.seconds
            found.setdefault(event.node, []).append((since.pop(event.node, first), event.seconds))
        elif event.event in ("left", "failed"):
            found.setdefault(event.node, [])
            since.setdefault(event.node, event.seconds)
    for node, moment in since.items():
        found[node].append((moment, math.inf))
    return found


class _Uses:
    """Which machines are in use: those of every branch's setting, and of the settings to which branches are changing."""

    def __init__(self, job: Job, absences: _Absences) -> None:
        self._job, self._absences = job, absences
        self._held = {0: job.start}
        # By branch, reconfigurations in progress: when requested, to which setting.
        self._asked: dict[int, tuple[float, Setting]] = {}
        self._before = 0.0  # when the last exchange ended

    def take(self, exchange: Exchange) -> Iterator[tuple[str, float, float]]:
        """Node, start and end of the use of every node in the next exchange; one that several branches use counts once."""
        now = max(min(exchange.seconds, self._job.budget_seconds), self._before)
        settings = (*self._held.values(), *(setting for _, setting in self._asked.values()))
        ends = dict.fromkeys((n for setting in settings for n in _nodes(setting)), now)
        action, branch = exchange.action, getattr(exchange.action, "branch", 0)
        if isinstance(exchange.answer, Rejected):
            pass
        elif isinstance(action, Run):
            ends |= self._after_window(ends, branch, exchange.answer, now)
        elif isinstance(action, Fork):
            parent = self._held[branch]
            self._held[exchange.answer] = parent if action.setting is None else self._wanted(action.setting, branch)
            ends |= dict.fromkeys(_nodes(self._held[exchange.answer]), now)
        elif isinstance(action, Reconfigure):
            new = self._wanted(action.setting, branch)
            ends |= dict.fromkeys(_nodes(new), now)
            self._asked.pop(branch, None)
            if not action.wait:
                self._asked[branch] = (self._before, new)
            elif exchange.answer.done:
                self._held[branch] = new
        elif isinstance(action, Free):
            self._held.pop(branch, None)
            self._asked.pop(branch, None)
        before, self._before = self._before, now
        yield from ((node, before, end) for node, end in ends.items())

    def _after_window(self, ends: Mapping[str, float], branch: int, window: Window, now: float) -> dict[str, float]:
        """When the use of nodes ended in a window of `branch`: nodes are given back, or are lost, and others are taken."""
        setting = window.setting or self._held[branch]
        after, over = _nodes(setting), now
        ended = [c for c in window.changes if c.steps != ("checkpoint",)]  # periodic ones are no reconfigurations
        if branch in self._asked and ended:
            over = min(self._asked.pop(branch)[0] + ended[0].seconds, now)
        elif branch in self._asked and self._asked[branch][1] == window.setting:
            del self._asked[branch]  # it was carried out in place, and no window tells its end
        kept = {n for b, other in self._held.items() if b != branch for n in _nodes(other)} | after
        found = dict.fromkeys(after, now)
        for node in ends.keys() - kept:
            lost = [since for since, _ in self._absences.get(node, []) if self._before < since <= now]
            found[node] = min(lost[0] if lost else now, over)
        self._held[branch] = setting
        return found

    def _wanted(self, setting: Setting, branch: int) -> Setting:
        """What the system made of a requested `setting`: after a loss, what the scenario holds stays as it is in force."""
        gone = {n for n, parts in self._absences.items() if any(since <= self._before < until for since, until in parts)}
        there = {n.name for n in self._job.nodes} - gone
        return wanted_setting(setting, self._held[branch], self._job.space, there)


def _nodes(setting: Setting) -> _Nodes:
    return frozenset((*setting.workers, *setting.servers))
