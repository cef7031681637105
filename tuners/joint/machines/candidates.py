"""What `tuners.joint` chooses the system from: roles, batch, threads, bits and local steps, on machines that are there.

Where machines may do both or nothing, `RoleSearch` goes by numbers of machines of each kind. Machines of one type and price
are alike, so a choice of roles is three numbers for each kind: machines that work only, that do both, and that serve only;
the others are given back. From some such choices, one machine after another changes its role as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tuners.actions import Job, Setting
from tuners.joint.job.training import Training
from tuners.joint.models.shares import Shares
from tuners.settings import Choice, Node

__all__ = ["Candidates", "RoleSearch", "highest", "lowest", "options"]

_MOST_SPLITS = 400  # roles of machines that are compared
_MOST = 4_000  # settings of which all are compared
_ROUNDS = 3  # of choosing places for sizes and sizes for places, where there are more
_MOST_SIZES = 6  # of mini-batches within a range, beside the smallest
_ROUNDING = 1e-9  # of the number of steps to the end of a range


class Candidates:
    """The settings that a job may run under next, all but these knobs as now."""

    def __init__(self, job: Job, training: Training, shares: Shares) -> None:
        self._job, self._training, self._shares = job, training, shares

    def best(self, value: Callable[[Setting], float], most_workers: int) -> Setting:
        """The setting of the highest `value` on machines that are there, with at most so many workers.

        Where there are very many, places are chosen for the present sizes, then sizes for these places, and so on.
        """
        places, sizes = [p for p in self._placements() if len(p.workers) <= most_workers], list(self._kinds())
        if not places:
            return self._training.branch.setting
        now = self._training.branch.setting
        if len(places) * len(sizes) <= _MOST:
            made = [made for place in places for size in sizes for made in self._made(place, size)]
            return max((*made, now) if self._shares.is_free else made, key=value)
        size = {name: getattr(now, name) for name in sizes[0]}
        for _ in range(_ROUNDS):
            place = places[int(np.argmax([max(map(value, self._made(p, size))) for p in places]))]
            size = sizes[int(np.argmax([max(map(value, self._made(place, s))) for s in sizes]))]
        return max(self._made(place, size), key=value)

    def _made(self, place: Setting, size: dict[str, Any]) -> list[Setting]:
        """`place` with these sizes, and with the best shares, as far as they are free."""
        made = replace(place, **size)
        return list(self._shares.choices(made)) if self._shares.is_free else [made]

    def _kinds(self) -> Iterator[dict[str, Any]]:
        """What else the system model chooses: bits, mini-batches, threads, local steps."""
        space, now = self._job.space, self._training.branch.setting
        bits = options(space.knob("transfer_bits")) or [now.transfer_bits]
        # Where loads are weights, they share out one batch, whatever the size of a mini-batch is called.
        sizes = [now.batch_size] if space.whole_batch else _sizes(space.knob("batch_size"), now.batch_size)
        threads = space.knob("intra_threads")
        intra = sorted({now.intra_threads, int(highest(threads))}) if threads is not None else [now.intra_threads]
        for b, size, t, steps in product(bits, sizes, intra, self._local_steps()):
            yield {"transfer_bits": int(b), "batch_size": int(size), "intra_threads": t, "local_steps": steps}

    def _local_steps(self) -> list[int]:
        """Numbers of local steps, each about 1.4 times as many as the one before; the present one where none are free."""
        knob = self._job.space.knob("local_steps")
        if knob is None:
            return [self._training.branch.setting.local_steps]
        most = int(math.log2(highest(knob)) * 2)
        return sorted({int(knob.nearest(2 ** (half / 2))) for half in range(most + 1)})

    def _placements(self) -> Iterator[Setting]:
        """The present setting with other roles, as far as these are free, on machines that are there."""
        now, names = self._training.branch.setting, [n.name for n in self._job.nodes]
        count = self._job.space.knob("worker_count")
        found: Iterable[Setting] = ()
        if count is not None:
            counts = options(count) or range(int(lowest(count)), int(highest(count)) + 1)
            found = (_with_roles(now, names[: int(c)], names[int(c) :]) for c in counts)
        elif self._job.space.frees("role"):
            found = self._splits()
        else:  # the system has dropped machines that it has lost; when they are back, they have to be asked for
            start = self._job.start
            found = (replace(now, workers=start.workers, servers=start.servers, model_shares=start.model_shares),)
        for setting in (now, *found):
            if (
                setting.workers
                and setting.servers
                and {*setting.workers, *setting.servers} <= self._training.branch.available
            ):
                yield setting

    def _splits(self) -> Iterator[Setting]:
        """Every number of workers of each type of machine; the other machines serve, as much as their NICs carry."""
        now, nodes = self._training.branch.setting, [n for n in self._job.nodes if n.name in self._training.branch.available]
        # Present workers first and servers last, so that as few machines as possible change their role.
        order = sorted(nodes, key=lambda n: (n.name in now.servers, n.name not in now.workers))
        kinds = [[n for n in order if n.type == kind] for kind in dict.fromkeys(n.type for n in nodes)]
        step = max(1, math.ceil((math.prod(len(k) + 1 for k in kinds) / _MOST_SPLITS) ** (1 / len(kinds))))
        for counts in product(*(range(0, len(k) + 1, step) for k in kinds)):
            workers = [n.name for k, c in zip(kinds, counts, strict=True) for n in k[:c]]
            servers = [n for k, c in zip(kinds, counts, strict=True) for n in k[c:]]
            carried = sum(n.nic_bytes_per_second for n in servers)
            shares = tuple(n.nic_bytes_per_second / carried for n in servers)
            uneven = len({n.nic_bytes_per_second for n in servers}) > 1
            split = replace(_with_roles(now, workers, [n.name for n in servers]), model_shares=shares if uneven else ())
            if split.workers and split.servers and self._job.space.admits(self._shares.balanced(split)):
                yield split


def options(knob: Any) -> list[Any]:
    """The options of a knob; none where it is an interval or is held."""
    return list(knob.options) if isinstance(knob, Choice) else []


def _sizes(knob: Any, now: int) -> list[Any]:
    """Mini-batches to choose from: the options of a knob, or the present one and some of a range, at least a factor of two
    apart."""
    if knob is None or isinstance(knob, Choice):
        return options(knob) or [now]
    low, high = max(lowest(knob), 1.0), highest(knob)
    factor = max(2.0, (high / low) ** (1 / _MOST_SIZES))
    steps = math.floor(math.log(high / low) / math.log(factor) + _ROUNDING)
    return sorted({now, *(int(knob.nearest(low * factor**step)) for step in range(steps + 1))})


def highest(knob: Any) -> float:
    """The highest value of a knob that is free."""
    return float(max(knob.options) if isinstance(knob, Choice) else knob.high)


def lowest(knob: Any) -> float:
    """The lowest value of a knob that is free."""
    return float(min(knob.options) if isinstance(knob, Choice) else knob.low)


def _with_roles(setting: Setting, workers: Sequence[str], servers: Sequence[str]) -> Setting:
    """`setting` with these roles, and with equal shares if they differ from its own."""
    if (set(workers), set(servers)) == (set(setting.workers), set(setting.servers)):
        return setting
    return replace(setting, workers=tuple(workers), servers=tuple(servers), loads=(), data_shares=(), model_shares=())


class _RoleCounts(NamedTuple):
    """Numbers of machines of one kind."""

    workers: int
    both: int
    servers: int
    idle: int


_Choice: TypeAlias = tuple[_RoleCounts, ...]


class RoleSearch:
    """The search on the machines that are available, beginning from the roles of `now`."""

    def __init__(self, job: Job, now: Setting, available: frozenset[str], shares: Shares) -> None:
        self._job, self._now, self._shares = job, now, shares
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
        made = self._shares.balanced(made)
        return made if self._job.space.admits(made) else None


def _steps(choice: _Choice) -> Iterator[_Choice]:
    """All choices in which one machine has another role."""
    for i, roles in enumerate(choice):
        for a, count in enumerate(roles):
            for b in range(len(roles)) if count else ():
                if a != b:
                    numbers = [n - (j == a) + (j == b) for j, n in enumerate(roles)]
                    yield (*choice[:i], _RoleCounts(*numbers), *choice[i + 1 :])
