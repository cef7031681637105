"""Which machines work, serve, do both or nothing: a search by numbers of machines of each kind.

Machines of one type and price are alike, so a choice of roles is three numbers for each kind: machines that work only, that
do both, and that serve only; the others are given back. From some such choices, one machine after another changes its role
as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from tuners.actions import Job, Setting
from tuners.settings import Node

__all__ = ["RoleSearch"]


class _RoleCounts(NamedTuple):
    """Numbers of machines of one kind."""

    workers: int
    both: int
    servers: int
    idle: int


_Choice: TypeAlias = tuple[_RoleCounts, ...]


class RoleSearch:
    """The search on the machines that are available, beginning from the roles of `now`."""

    def __init__(self, job: Job, now: Setting, available: frozenset[str]) -> None:
        self._job, self._now = job, now
        kinds = dict[tuple[str, float | None], list[Node]]()
        # Present workers first and servers last, so that as few machines as possible change their role.
        for node in sorted(job.nodes, key=lambda n: (n.name in now.servers, n.name not in now.workers)):
            if node.name in available:
                kinds.setdefault((node.type, job.prices.by_node.get(node.name)), []).append(node)
        self._kinds = list(kinds.values())

    def best(self, start: Setting, value: Callable[[Setting], float]) -> Setting:
        """The setting of the highest `value` that steps lead to from `start`, or from machines of one or all kinds that do
        both. All but roles and shares is as in `start`."""
        whole = [_RoleCounts(0, len(k), 0, 0) for k in self._kinds]
        alone = [
            tuple(r if i == j else _RoleCounts(0, 0, 0, r.both) for j, r in enumerate(whole)) for i in range(len(whole))
        ]
        known = dict[_Choice, tuple[float, Setting | None]]()

        def valued(choice: _Choice) -> float:
            if choice not in known:
                made = self._setting(choice, start)
                known[choice] = (value(made), made) if made is not None else (0.0, None)
            return known[choice][0]

        found = start
        for choice in dict.fromkeys([self._choice(start), tuple(whole), *alone]):
            here = choice
            while True:
                step = max(_steps(here), key=valued, default=here)
                if valued(step) <= valued(here):
                    break
                here = step
            made = known[here][1]
            if made is not None and value(made) > value(found):
                found = made
        return found

    def _choice(self, setting: Setting) -> _Choice:
        found = []
        for kind in self._kinds:
            works, serves = ({n.name for n in kind} & set(names) for names in (setting.workers, setting.servers))
            both = len(works & serves)
            found.append(_RoleCounts(len(works) - both, both, len(serves) - both, len(kind) - len(works | serves)))
        return tuple(found)

    def _setting(self, choice: _Choice, start: Setting) -> Setting | None:
        """`start` with these roles; None where the job does not admit it. Servers hold as much as their NICs carry."""
        workers, servers = list[Node](), list[Node]()
        for kind, roles in zip(self._kinds, choice, strict=True):
            last = len(kind) - roles.servers
            workers += [*kind[: roles.workers], *kind[last - roles.both : last]]
            servers += kind[last - roles.both :]
        if not (workers and servers):
            return None
        now, names = self._now, (tuple(n.name for n in workers), tuple(n.name for n in servers))
        if (set(names[0]), set(names[1])) == (set(now.workers), set(now.servers)):
            kept = {field: getattr(now, field) for field in ("workers", "servers", "loads", "data_shares", "model_shares")}
            return replace(start, **kept)
        carried = sum(n.nic_bytes_per_second for n in servers)
        uneven = len({n.nic_bytes_per_second for n in servers}) > 1
        shares = tuple(n.nic_bytes_per_second / carried for n in servers) if uneven else ()
        made = replace(start, workers=names[0], servers=names[1], loads=(), data_shares=(), model_shares=shares)
        return made if self._job.space.admits(made) else None


def _steps(choice: _Choice) -> Iterator[_Choice]:
    """All choices in which one machine has another role."""
    for i, roles in enumerate(choice):
        for a, count in enumerate(roles):
            for b in range(len(roles)) if count else ():
                if a != b:
                    numbers = [n - (j == a) + (j == b) for j, n in enumerate(roles)]
                    yield (*choice[:i], _RoleCounts(*numbers), *choice[i + 1 :])
