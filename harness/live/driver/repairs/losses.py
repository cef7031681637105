"""Lost processes: training continues on the surviving nodes, and lost nodes are taken back when they return."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.live.driver.checkpoints.driver_state import KnownNodes
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.processes.runtime import Procedure, Runtime
from harness.live.protocol.messages import server
from harness.live.protocol.names import EVALUATOR, node_of, peers
from simulators.reconfiguration.shares import survivors
from tuners.actions import NodeEvent, Setting

__all__ = ["Losses", "TooFewNodes"]

_SEARCH_SECONDS = 0.5  # from one look for nodes that are back, and for missing processes, to the next
_TRIES = 6  # consecutive starts, on one machine, of a process that does not join


class TooFewNodes(RuntimeError):
    """A role has no node left, and no other will join. Takes the finished message."""


class Losses:
    """Which nodes and processes are lost, and the procedures that continue without them and with them again."""

    def __init__(self, runtime: Runtime, nodes: tuple[str, ...]) -> None:
        self.away = set(nodes) - runtime.processes.nodes  # nodes without a machine, or with lost processes
        self.lost: set[str] = set()  # nodes that have been lost, also those that are back
        # What the tuner was told: nodes that are absent, and nodes that work and have said that they will be gone. Where a
        # scenario lets a node join, the tuner is told so at once; the node is away until its processes have started again.
        self.absent = set(self.away)
        self.leaving: frozenset[str] = frozenset()
        self.excluded: set[str] = set()  # nodes that must not start again on their machine, whose link is slow
        self.node_events: list[NodeEvent] = []  # for the next window
        self.any_returned = False  # a node has returned, and no branch has it back yet
        self._runtime, self._nodes = runtime, nodes
        self._missing: dict[str, int] = {}  # lost processes, with the number of starts since
        self._searched_seconds = 0.0  # when another machine for an excluded node was last looked for
        self.lacks_blocks = False  # a server is lost, and its blocks are not restored yet

    @property
    def present(self) -> frozenset[str]:
        """Nodes that are not away."""
        return frozenset(self._nodes) - self.away

    @property
    def without_machine(self) -> frozenset[str]:
        """Nodes that have no machine now."""
        return frozenset(self._nodes) - self._runtime.processes.nodes

    def lacks_nodes(self, setting: Setting) -> bool:
        """Whether too few nodes are left to train under `setting`."""
        return self._reduced(setting) is None

    @property
    def available(self) -> frozenset[str]:
        """Nodes that a new setting may use, as far as the tuner was told."""
        return frozenset(self._nodes) - self.absent - self.leaving

    def tell(self, event: NodeEvent) -> None:
        """Tell the tuner of an event, with its next window. It is told once that a node is absent: where a machine has died
        and the scenario takes its node away then, or the other way round."""
        if event.event == "joined":
            news = event.node in self.absent
            self.absent.discard(event.node)
        elif event.event == "leaving":
            news = True
        else:
            news = event.node not in self.absent
            self.absent.add(event.node)
        if news:
            self.node_events.append(event)

    @property
    def told(self) -> KnownNodes:
        """What the tuner knows of nodes, for the process that resumes the job."""
        return KnownNodes(tuple(sorted(self.absent)), tuple(self.node_events))

    def resume(self, told: KnownNodes, seconds: float) -> None:
        """Go on from what the tuner knew at a checkpoint. What has changed until the job goes on, at this time of it, is
        told with the next window. Raises ValueError for a node that the job does not have."""
        if unknown := {*told.absent, *(e.node for e in told.events)} - set(self._nodes):
            raise ValueError(f"Cannot resume: the checkpoint has a node {min(unknown)!r}, and the job has none.")
        absent, self.absent, self.node_events = self.absent, set(told.absent), list(told.events)
        for node in self._nodes:
            if (node in absent) != (node in told.absent):
                self.tell(NodeEvent(seconds, node, "failed" if node in absent else "joined"))

    def look(self) -> tuple[str, ...]:
        """Nodes that have lost their machine since the last time. Of those without processes, no lost process tells."""
        gone = sorted(self.present - self._runtime.processes.nodes)
        for node in gone:
            self._lose(node)
        return tuple(gone)

    def record(self, names: Collection[str], told: Collection[str] = ()) -> None:
        """Record processes that were lost just now. `told`: nodes of which the tuner was told already."""
        runtime = self._runtime
        runtime.starting.difference_update(names)
        runtime.coordinator.lose(list(names))
        # The latest report is from before the loss; a procedure must not take the dead for members.
        seen = runtime.latest
        runtime.latest = seen._replace(members={n: g for n, g in seen.members.items() if n not in names})
        self.lacks_blocks = self.lacks_blocks or any(n == server(node_of(n)) for n in names)
        for name in names:
            self._missing.setdefault(name, 0)
        for node in sorted({node_of(n) for n in names if n != EVALUATOR}):
            self._lose(node, told=node in told)

    def _lose(self, node: str, *, told: bool = False) -> None:
        self.away.add(node)
        self.lost.add(node)
        if not told:
            self.tell(NodeEvent(self._runtime.now, node, "failed"))

    def start_missing(self) -> None:
        """Start lost processes whose nodes have a machine."""
        if self.excluded and self._runtime.now > self._searched_seconds + _SEARCH_SECONDS:
            self._searched_seconds = self._runtime.now
            self.excluded = {node for node in self.excluded if not self._runtime.processes.move_node(node)}
        startable = self._startable
        for name, tries in self._missing.items():
            if name != EVALUATOR and node_of(name) in self.without_machine:
                self._missing[name] = 0  # it may start on the next machine
            able = name == EVALUATOR or node_of(name) in startable
            if able and tries < _TRIES and self._runtime.start([name]):
                self._missing[name] = tries + 1

    def given_up(self, names: Collection[str]) -> tuple[str, ...]:
        """The processes among `names`, which were lost just now, that are not started again on their machine."""
        return tuple(name for name in names if self._missing.get(name, 0) >= _TRIES)

    @property
    def _startable(self) -> frozenset[str]:
        return self._runtime.processes.nodes - self.excluded

    def take_back(self) -> tuple[str, ...]:
        """Nodes that have just returned with all their processes."""
        here = [n for n in self._missing if n in self._runtime.latest.members]
        for name in here:
            del self._missing[name]
        back = sorted((self.away & self._runtime.processes.nodes) - {node_of(n) for n in self._missing})
        for node in back:
            self.away.discard(node)
            self.tell(NodeEvent(self._runtime.now, node, "joined"))
        self.any_returned = self.any_returned or bool(back)
        return tuple(back)

    # ---------------------------------------------------------------------------------------------------------- procedures

    def continue_without(self, branches: Mapping[int, DriverBranch], number: int) -> Procedure:
        """Make branch `number` able to continue on the surviving nodes; if a role has lost all its nodes, others take it,
        also such that join later. Raises ModelLost if servers have died with all copies of a block, and TooFewNodes where
        that is so."""
        runtime = self._runtime
        while self.lacks_nodes(branches[number].setting):
            if not runtime.processes.expects_nodes:
                left = ", ".join(sorted(self.present)) or "none"
                raise TooFewNodes(f"Too few nodes are left to continue on ({left}), and no other will join.")
            self.start_missing()
            yield
        for branch in branches.values():
            reduced = self._reduced(branch.setting)
            if reduced is not None and reduced != branch.setting:
                branch.setting_before_loss = branch.setting_before_loss or branch.setting
                branch.setting = reduced
        setting = branches[number].setting
        self.start_missing()
        runtime.start(peers(setting))
        yield
        while not set(peers(setting)) <= runtime.latest.members.keys():
            self.start_missing()
            yield
        if self.lacks_blocks or runtime.latest.recovering:
            yield from runtime.recover(setting)
        if self.lacks_blocks or runtime.placed != runtime.placement(setting):
            # Cleared only now: another loss ends this procedure, and the next one still has to recover.
            self.lacks_blocks = False
            yield from runtime.place(setting)
            yield from runtime.wait_placed()
        runtime.coordinator.put(number, setting)

    def restore(self, branches: Mapping[int, DriverBranch], running: int | None) -> Procedure:
        """Give the branches back the settings that losses have reduced, as far as their nodes have returned."""
        runtime, self.any_returned = self._runtime, False
        for number, branch in branches.items():
            before = branch.setting_before_loss
            there = self._usable(branch.setting)
            wanted = survivors(before, there, self._nodes) if before is not None else None
            if wanted is None:
                continue
            if number == running:
                runtime.start(peers(wanted))
                yield from runtime.wait_joined(peers(wanted))
                yield from runtime.place(wanted)
                yield from runtime.wait_placed()
                runtime.coordinator.put(number, wanted)
            branch.setting = wanted
            if wanted == branch.setting_before_loss:
                branch.setting_before_loss = None

    def _usable(self, setting: Setting) -> frozenset[str]:
        """Nodes present, without those that will leave, unless `setting` has them: they work on, but get no new role."""
        return self.present - self.leaving.difference(setting.workers, setting.servers)

    def _reduced(self, setting: Setting) -> Setting | None:
        """`setting` on the nodes present. A role that would be empty keeps those of its nodes that can be started again."""
        there, startable = self._usable(setting), self._startable
        for members in (setting.workers, setting.servers):
            if not set(members) & self.present:
                there |= set(members) & startable
        return survivors(setting, there, self._nodes)
