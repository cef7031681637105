"""The cores of a live job in memory: what training does, step by step."""

import random

import numpy as np
import pytest

from live.memory import start


@pytest.mark.parametrize("policy", ["asp", "bsp", "ssp"])
def test_every_push_is_in_the_model_once(policy):
    memory = start(random.Random(1), policy=policy, staleness=2)
    memory.steps(3000)
    memory.settle()
    assert memory.pushes[0] > 50
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))
