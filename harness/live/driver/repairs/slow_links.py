"""Nodes whose links have become slow, and what is said about them."""

from __future__ import annotations

from harness.live.driver.repairs.links import LinkMonitor, SlowLink
from harness.live.driver.view.job_view import JobView
from harness.live.processes.runtime import Runtime
from harness.live.protocol.names import EVALUATOR
from harness.live.worker.spec import Spec

__all__ = ["LINKS_SECONDS", "SlowLinks"]

LINKS_SECONDS = 0.5
"""From one look at the links to the next."""


class SlowLinks:
    """Gives the transfers of a job to a `LinkMonitor` now and then."""

    def __init__(self, runtime: Runtime, view: JobView, spec: Spec) -> None:
        self._runtime, self._view, self._spec = runtime, view, spec
        self._monitor = LinkMonitor()
        self._looked_seconds = 0.0

    def found(self, *, idle: bool) -> SlowLink | None:
        """A node whose link is slow, and was not tolerated. None while the job is not idle."""
        seconds = self._runtime.now - self._looked_seconds
        if seconds < LINKS_SECONDS:
            return None
        self._looked_seconds += seconds
        transfers = self._runtime.coordinator.transfers()
        if not idle or self._view.running is None or self._view.status != "running":
            return None
        there = {n: g for n, g in self._runtime.latest.members.items() if n != EVALUATOR}
        self._monitor.add(self._view.branches[self._view.running].setting, there, seconds, transfers)
        return self._monitor.slow_link()

    def tolerate(self, node: str) -> None:
        """The node stays in the job with its slow link."""
        self._monitor.tolerated.add(node)

    def words(self, slow: SlowLink) -> str:
        """How slow the link is, and was."""
        layout = self._spec.layout
        if layout.tables is not None:  # pushes have different numbers of rows
            return f"its link is slow: a push takes {slow.seconds:.2g} s where it took {slow.before_seconds:.2g}"
        bits = self._view.branches[self._view.number].setting.transfer_bits
        megabytes = slow.blocks * layout.size / layout.count * bits / 8e6
        return f"its link is slow: {megabytes / slow.seconds:.2g} MB/s where it was {megabytes / slow.before_seconds:.2g}"
