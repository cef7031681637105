"""How long a pull took, where servers send the parameters with the release, on clocks that do not agree."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.live.protocol.blocks import Layout
from harness.live.protocol.messages import COORDINATOR, Message, Release, StagePush, UnaskedBlocks, View
from harness.live.worker.tasks import Computed
from harness.live.worker.worker import Worker

SERVER, AHEAD = "server/a", 1000.0  # seconds that the worker's clock is ahead of the coordinator's
PULL, COMPUTE = 0.5, 0.25


@pytest.fixture
def made():
    """A worker of one server, what it sends and computes, and the coordinator's clock."""
    sent, tasks, clock = [], [], SimpleNamespace(seconds=10.0)
    worker = Worker(
        "worker/a",
        1,
        Layout(4, 2),
        lambda _, message: sent.append(message.head),
        lambda: clock.seconds + AHEAD,
        tasks.append,
    )
    view = View(1, 0, 0, ((0, 2, SERVER),), {}, ())
    worker.receive(COORDINATOR, Message(view, (), 1, 1))
    return SimpleNamespace(worker=worker, sent=sent, tasks=tasks, clock=clock)


def release(made, cycle, late=0.0):
    """The coordinator's own message, which arrives so late."""
    released = made.clock.seconds
    made.clock.seconds += late
    head = Release(cycle, 0, cycle, 0, 0, 4, 0, 100, unasked=True, seconds=released)
    made.worker.receive(COORDINATOR, Message(head, (), 1, 1))
    return released


def given(made, cycle, terms, released):
    head = UnaskedBlocks(cycle, 1, ((0, 2),), cycle, terms, released)
    made.worker.receive(SERVER, Message(head, (np.zeros(4, np.float32),), 1, 1))


def pull_seconds(made):
    """Of the cycle whose gradient is computed now."""
    task = made.tasks.pop()
    made.clock.seconds += COMPUTE
    made.worker.computed(Computed(task.number, task.kind, 0.0, np.zeros(4, np.float32), 0.0, COMPUTE))
    (staged,) = [head for head in made.sent if isinstance(head, StagePush)]
    made.sent.clear()
    return staged.done.pull_seconds


def test_a_pull_begins_with_the_release_of_which_it_tells(made):
    """The worker hears of its later releases with the parameters: from then on, a pull of 0.5 s took no time at all."""
    released = release(made, 1)
    made.clock.seconds += PULL
    given(made, 1, 1, released)
    assert pull_seconds(made) == pytest.approx(PULL)
    for cycle in (2, 3):
        made.clock.seconds += 1.0  # of the push
        released = made.clock.seconds
        made.clock.seconds += PULL
        given(made, cycle, 1, released)
        assert pull_seconds(made) == pytest.approx(PULL)


@pytest.mark.parametrize("first", [0.0, 0.2])
def test_the_quickest_release_tells_how_far_clocks_are_apart(made, first):
    """A release that came late makes the next pull look shorter, until one comes in time."""
    for cycle, late in ((1, first), (2, 0.2 - first)):
        released = release(made, cycle, late)
        made.clock.seconds += PULL - late
        given(made, cycle, cycle, released)
        assert pull_seconds(made) == pytest.approx(PULL - (late if cycle == 1 else 0.0))
        made.clock.seconds += 1.0
    released = made.clock.seconds
    made.clock.seconds += PULL
    given(made, 3, 2, released)
    assert pull_seconds(made) == pytest.approx(PULL)
