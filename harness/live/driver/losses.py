"""What is done about lost processes: the job goes on with those that are left, and takes them back when they return."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.live.driver.branch_view import Sight
from harness.live.processes.runtime import EVALUATOR, Procedure, Runtime, node_of, peers
from harness.live.protocol.messages import server
from simulators.reconfiguration.plan import survivors
from tuners.actions import NodeEvent, Setting

__all__ = ["Losses"]

_SEARCH_SECONDS = 0.5
_TRIES = 6  # starts of a process that does not come, one after the other


class Losses:
    """Who is away."""

    def __init__(self, runtime: Runtime, nodes: tuple[str, ...]) -> None:
        self.away: set[str] = set()  # nodes
        self.events: list[NodeEvent] = []  # not yet told
        self._runtime, self._nodes = runtime, nodes
        self._missing: dict[str, int] = {}  # lost processes, and how often they were started since
        self.shunned: set[str] = set()  # nodes that are not to be started where they were
        self._searched_seconds = 0.0  # when another place for one of them was looked for
        self.somebody_is_back = False  # for whom nothing has been done yet
        self._blocks_lost = False

    @property
    def present(self) -> frozenset[str]:
        return frozenset(self._nodes) - self.away

    def tell(self, names: Collection[str]) -> None:
        """These were lost, just now."""
        runtime = self._runtime
        runtime.starting.difference_update(names)
        runtime.call("lose", list(names))
        seen = runtime.seen  # from before the loss
        runtime.seen = seen._replace(members={n: g for n, g in seen.members.items() if n not in names})
        self._blocks_lost = self._blocks_lost or any(n == server(node_of(n)) for n in names)
        for name in names:
            self._missing.setdefault(name, 0)
        for node in sorted({node_of(n) for n in names if n != EVALUATOR} - self.away):
            self.away.add(node)
            self.events.append(NodeEvent(runtime.now, node, "failed"))

    def start_missing(self) -> None:
        """Start what is lost where there is a place for it."""
        if self.shunned and self._runtime.now > self._searched_seconds + _SEARCH_SECONDS:
            self._searched_seconds = self._runtime.now
            self.shunned = {node for node in self.shunned if not self._runtime.processes.elsewhere(node)}
        places = self._places
        for name, tries in self._missing.items():
            able = name == EVALUATOR or node_of(name) in places
            if able and tries < _TRIES and self._runtime.start([name]):
                self._missing[name] = tries + 1

    @property
    def _places(self) -> frozenset[str]:
        return self._runtime.processes.nodes - self.shunned

    def welcome(self) -> tuple[str, ...]:
        """Nodes that are back, all of them."""
        here = [n for n in self._missing if n in self._runtime.seen.members]
        for name in here:
            del self._missing[name]
        back = sorted(self.away - {node_of(n) for n in self._missing})
        for node in back:
            self.away.discard(node)
            self.events.append(NodeEvent(self._runtime.now, node, "joined"))
        self.somebody_is_back = self.somebody_is_back or bool(back)
        return tuple(back)

    # ---------------------------------------------------------------------------------------------------------- procedures

    def bridge(self, sights: Mapping[int, Sight], number: int) -> Procedure:
        """Be ready to go on with branch `number` and those that are left; where nobody is left for a role, with those that
        take its place. Raises ModelLost where servers have died with all the copies there were."""
        runtime = self._runtime
        for sight in sights.values():
            left = self._left(sight.setting)
            if left is not None and left != sight.setting:  # None: nobody can take its place, and others wait for it
                sight.before, sight.setting = sight.before or sight.setting, left
        setting = sights[number].setting
        self.start_missing()
        runtime.start(peers(setting))
        yield
        while not set(peers(setting)) <= runtime.seen.members.keys():
            self.start_missing()
            yield
        if self._blocks_lost or runtime.seen.recovering:
            yield from runtime.recover(setting)
        if self._blocks_lost or runtime.placed != (setting.servers, setting.shares()[1]):
            self._blocks_lost = False
            yield from runtime.place(setting)
            yield from runtime.settled()
        runtime.call("put", number, setting)

    def restore(self, sights: Mapping[int, Sight], running: int | None) -> Procedure:
        """Give the branches back what they had, as far as the nodes are there again."""
        runtime, self.somebody_is_back = self._runtime, False
        for number, sight in sights.items():
            wanted = survivors(sight.before, self.present, self._nodes) if sight.before is not None else None
            if wanted is None:
                continue
            if number == running:
                runtime.start(peers(wanted))
                yield from runtime.joined(peers(wanted))
                yield from runtime.place(wanted)
                yield from runtime.settled()
                runtime.call("put", number, wanted)
            sight.setting = wanted
            if wanted == sight.before:
                sight.before = None

    def _left(self, setting: Setting) -> Setting | None:
        """`setting` on the nodes present; where a role would be left without anybody, with those that had it and can be
        started again."""
        there, back = self.present, self._places
        for members in (setting.workers, setting.servers):
            if not set(members) & self.present:
                there |= set(members) & back
        return survivors(setting, there, self._nodes)
