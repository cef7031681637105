"""What the processes of a job compile is compiled once, while Ray starts."""

import threading

import pytest

from harness.live.deploy.compiled_ahead import compiled_ahead
from harness.live.worker.spec import Spec
from harness.machines import program_cache
from harness.scenario import load


class Noted(Spec):
    """Notes what it is asked to compile, and in which thread."""

    def warm_up(self, *, validates=False):
        NOTED.append((validates, threading.current_thread().name))
        if self.seed:
            raise ValueError("the model cannot be compiled")


NOTED: list[tuple[bool, str]] = []


@pytest.fixture
def spec():
    NOTED.clear()
    return Noted.of(load("live-digits"), 0)


def test_worker_and_evaluator_are_compiled_for(spec):
    if program_cache.use() is None:
        pytest.skip("the cache is off")
    with compiled_ahead(spec):
        pass
    assert NOTED == [(False, "compiling ahead"), (True, "compiling ahead")]


def test_what_cannot_be_compiled_is_left_to_the_process_that_needs_it(spec):
    with compiled_ahead(Noted.of(spec.scenario, 1)):
        pass
    assert len(NOTED) == (program_cache.use() is not None)


def test_without_the_cache_nothing_is_compiled_ahead(spec, monkeypatch):
    monkeypatch.setattr(program_cache, "use", lambda: None)
    with compiled_ahead(spec):
        pass
    assert NOTED == []
