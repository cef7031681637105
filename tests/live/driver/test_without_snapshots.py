"""A job that never takes a periodic snapshot changes its processes, loses some, and is resumed, as any other."""

from dataclasses import dataclass, replace
from functools import cached_property

import pytest

from harness.live.driver.checkpoints import job_saver
from harness.live.driver.system import LiveSystem
from tests.live.support.ones import ONES, Ones, counted
from tests.live.support.threads import thread_processes
from tuners.actions import Reconfigure, Run

_SECONDS = 20  # a change takes less than a tenth of it


@dataclass(frozen=True)
class NeverCopied(Ones):
    @cached_property
    def live_job(self):
        return replace(super().live_job, snapshot_commits=1_000_000_000)


SPEC = NeverCopied("ones", "ones.toml", ONES, 0)

CHANGES = {
    "fewer workers": {"workers": ("n0",)},
    "more workers": {"workers": ("n0", "n1", "n3")},
    "other workers": {"workers": ("n1", "n2")},
    "fewer servers": {"servers": ("n3",)},
    "more servers": {"servers": ("n1", "n2", "n3")},
    "roles change": {"workers": ("n2", "n3"), "servers": ("n0", "n1")},
}


@pytest.fixture
def processes(tmp_path, monkeypatch):
    monkeypatch.setattr(job_saver, "CHECKPOINT_SECONDS", 1e9)
    with thread_processes(SPEC, tmp_path / "processes") as made:
        yield made


def assert_counts(live, lost=0):
    clocks, found, parameters = counted(live)
    assert found == lost
    assert set(parameters) == {clocks - lost}


QUICK = [("migrate", "bsp"), ("relocate", "asp")]
METHODS_AND_POLICIES = [
    pytest.param(method, policy, marks=() if (method, policy) in QUICK else pytest.mark.live)
    for method in ("migrate", "relocate", "checkpoint")
    for policy in ("bsp", "asp", "ssp")
]


@pytest.mark.parametrize(("method", "policy"), METHODS_AND_POLICIES)
def test_processes_change_and_change_back(processes, method, policy):
    with LiveSystem(SPEC, processes) as live:
        start = replace(live.job.start, policy=policy)
        for changed in CHANGES.values():
            for setting in (replace(start, **changed), start):
                live.perform(Run(clocks=7))
                cost = live.perform(Reconfigure(setting, method=method))
                assert cost.done
                assert cost.seconds < _SECONDS
        assert_counts(live)


@pytest.mark.parametrize("name", ["worker/n1", "server/n2"])
def test_a_death_is_repaired(processes, name):
    with LiveSystem(SPEC, processes) as live:
        live.perform(Run(clocks=30))
        processes.kill(name)
        while live.job_status().setting == live.job.start:  # it is not noticed yet
            live.perform(Run(clocks=1))
        while live.job_status().setting != live.job.start:
            live.perform(Run(clocks=1))
        cost = live.perform(Reconfigure(replace(live.job.start, workers=("n0",))))
        assert cost.done
        assert cost.seconds < _SECONDS
        assert_counts(live)


def test_a_resumed_job_goes_on(processes, tmp_path):
    kept = []
    with LiveSystem(SPEC, processes, keep=kept.append) as live:
        live.perform(Run(clocks=30))
        live.checkpoint()
        clocks = live.job_status().clocks
    with thread_processes(SPEC, tmp_path / "again") as again, LiveSystem(SPEC, again, kept[-1]) as live:
        assert live.job_status().clocks == clocks
        live.perform(Run(clocks=20))
        assert live.perform(Reconfigure(replace(live.job.start, workers=("n0",)))).seconds < _SECONDS
        assert_counts(live)
