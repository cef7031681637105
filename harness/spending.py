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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from traces.exchanges import Exchange
from tuners.actions import Fork, Free, Job, Reconfigure, Rejected, Run, Setting, Window
from tuners.system import wanted_setting

__all__ = ["Spending", "highest_usd", "spending"]

_Nodes: TypeAlias = frozenset[str]
_Absences: TypeAlias = Mapping[str, list[tuple[float, float]]]

_HOUR = 3600.0  # seconds


class Spending(NamedTuple):
    """What a run used until it ended."""

    machine_seconds: float  # summed over machines; nan where their number was not recorded
    usd: float  # nan where the price of a machine that it used is not known


def highest_usd(job: Job) -> float:
    """What all machines of the job cost for its whole budget of time; of recorded runs, those of the most expensive setting.

    nan where a price is not known.
    """
    return job.prices.highest_usd_per_hour(n.name for n in job.nodes) * job.budget_seconds / _HOUR


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
    seconds: dict[str, list[float]] = {}
    for node, start, end in _uses(job, exchanges, absences):
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


def _uses(job: Job, exchanges: Sequence[Exchange], absences: _Absences) -> Iterator[tuple[str, float, float]]:
    """Node, start and end of the use of every node in every exchange; a node that several branches use counts once."""
    held = {0: job.start}
    asked: dict[int, tuple[float, Setting]] = {}  # by branch, reconfigurations in progress: when requested, to which setting
    before = 0.0

    def wanted(setting: Setting, branch: int) -> Setting:
        """What the system made of a requested `setting`: after a loss, what the scenario holds stays as it is in force."""
        gone = {n for n, parts in absences.items() if any(since <= before < until for since, until in parts)}
        return wanted_setting(setting, held[branch], job.space, {n.name for n in job.nodes} - gone)

    for exchange in exchanges:
        now = max(min(exchange.seconds, job.budget_seconds), before)
        action, branch, done = (
            exchange.action,
            getattr(exchange.action, "branch", 0),
            not isinstance(exchange.answer, Rejected),
        )
        ends = dict.fromkeys((n for setting in held.values() for n in _nodes(setting)), now)
        ends |= dict.fromkeys((n for _, setting in asked.values() for n in _nodes(setting)), now)
        if done and isinstance(action, Run):
            window: Window = exchange.answer
            setting = window.setting or held[branch]
            after = _nodes(setting)
            over = now
            ended = [c for c in window.changes if c.steps != ("checkpoint",)]  # periodic ones are no reconfigurations
            if branch in asked and ended:
                over = min(asked.pop(branch)[0] + ended[0].seconds, now)
            elif branch in asked and asked[branch][1] == window.setting:
                del asked[branch]  # it was carried out in place, and no window tells its end
            kept = {n for b, other in held.items() if b != branch for n in _nodes(other)} | after
            for node in ends.keys() - kept:
                lost = [since for since, _ in absences.get(node, []) if before < since <= now]
                ends[node] = min(lost[0] if lost else now, over)
            ends |= dict.fromkeys(after, now)
            held[branch] = setting
        elif done and isinstance(action, Fork):
            held[exchange.answer] = held[branch] if action.setting is None else wanted(action.setting, branch)
            ends |= dict.fromkeys(_nodes(held[exchange.answer]), now)
        elif done and isinstance(action, Reconfigure):
            new = wanted(action.setting, branch)
            ends |= dict.fromkeys(_nodes(new), now)
            asked.pop(branch, None)
            if not action.wait:
                asked[branch] = (before, new)
            elif exchange.answer.done:
                held[branch] = new
        elif done and isinstance(action, Free):
            held.pop(branch, None)
            asked.pop(branch, None)
        yield from ((node, before, end) for node, end in ends.items())
        before = now


def _nodes(setting: Setting) -> _Nodes:
    return frozenset((*setting.workers, *setting.servers))
