"""What the driver is told of pushes around the moment at which a job is told to rest, and the model: they agree."""

import random

import numpy as np
import pytest

from harness.live.protocol.messages import PushStaged
from tests.live.support.memory import COORDINATOR, start


def told(memory):
    """How many pushes the driver is told of now, for the first time."""
    return len(memory.coordinator.reports.poll().reports[0].rows)


@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("seed", range(5))
def test_no_push_is_counted_after_a_job_rests_however_late_its_receipts_come(policy, seed):
    """Receipts of pushes wait in the channels when the job is told to rest, and come after the driver has looked."""
    memory = start(random.Random(seed), policy=policy, staleness=2, checks=True)
    counted = late = 0
    for _ in range(10):
        memory.steps(memory.rng.randrange(20, 200))
        memory.compute_all()
        while on_their_way := [p for p in memory.pending() if memory.is_push(p)]:
            memory.deliver(on_their_way[0])  # to the servers, which acknowledge
        held = {pair: queue for pair, queue in memory.channels.items() if pair[1] == COORDINATOR and queue}
        late += sum(isinstance(message.head, PushStaged) for queue in held.values() for message in queue)
        memory.coordinator.training.rest()
        counted += told(memory)
        memory.drain()
        assert told(memory) == 0
        np.testing.assert_array_equal(memory.model(), np.full(12, counted, np.float32))
        memory.coordinator.training.run(0)
    assert late > 10
    assert counted > 50
