"""A coordinator that dies, is late or hangs, as the driver sees it that asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from harness.live.processes.coordinator_on_ray import CoordinatorOnRay


class PretendRay:
    """Ray, whose calls of the coordinator end as `ends` says, one after the other."""

    def __init__(self, *ends):
        self.ends, self.ask, self.killed = list(ends), SimpleNamespace(remote=lambda *_: None), 0

    def get(self, _, timeout):
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def kill(self, _, no_restart):
        assert not no_restart
        self.killed += 1


DIED, LATE = ray.exceptions.RayActorError(), ray.exceptions.GetTimeoutError()
AGAIN = "it starts again from its journal"


@pytest.mark.parametrize(
    ("ends", "killed", "said"),
    [
        ([1, DIED, DIED, 2], 0, [f"the coordinator has died: {AGAIN}", "the coordinator is back"]),
        ([1, LATE, 2], 0, ["the coordinator has not answered for 3 s"]),
        (
            [1, LATE, LATE, DIED, 2],
            1,
            ["the coordinator has not answered for 3 s", f"the coordinator hangs: {AGAIN}", "the coordinator is back"],
        ),
        ([DIED, 1, 2], 0, []),
    ],
    ids=["died", "late", "hangs", "not up yet"],
)
def test_a_coordinator_that_is_gone_is_told_at_once_and_one_that_hangs_is_restarted(monkeypatch, ends, killed, said):
    pretended, told = PretendRay(*ends), []
    coordinator = CoordinatorOnRay(join_seconds=60.0, silent_seconds=3.0)
    coordinator.tell(told.append)
    monkeypatch.setattr(coordinator, "_actor", pretended)
    monkeypatch.setattr(ray, "get", pretended.get)
    monkeypatch.setattr(ray, "kill", pretended.kill)
    assert [coordinator.ask("poll"), coordinator.ask("poll")] == [1, 2]
    assert (pretended.killed, told) == (killed, said)
