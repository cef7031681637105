"""Counts that tell a slower program without a clock: compiled programs of a run, operations in a step of the engine.

They are equal on every machine with the pinned JAX. A count that rises is a regression, or a feature that is worth it; one
that falls is progress. Either way the new count is written here, in the commit that changes it.
"""

import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from simulators.engine import loop
from tests.bench.jobs import engine_job
from tests.support.marks import slow
from tuners import policies

COUNTED = """
import json, sys
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **facts: compiled.append(name) if name.endswith("backend_compile_duration") else None
)
from harness.machines import program_cache
from simulators.programs import stored_programs
program_cache.use()
stored_programs.use_store(None)  # a program that is read as a whole would not count
from harness.scenario.scenario import load, system
from tuners.actions import Reconfigure, Run
from dataclasses import replace

simulated = system(load(sys.argv[1]), 0)
simulated.perform(Run(clocks=50))
first = len(compiled)
simulated.perform(Run(clocks=50))
again = len(compiled)
counts = [first, again - first]
for factor in (2, 4):
    before, setting = len(compiled), simulated.job.start
    simulated.perform(Reconfigure(replace(setting, learning_rate=factor * setting.learning_rate)))
    simulated.perform(Run(clocks=50))
    counts.append(len(compiled) - before)
print(json.dumps(counts))
"""


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("digits", 4),
        slow("digits-logistic", 3),
        slow("mltuner-clouds", 4),
    ],
)
def test_a_run_compiles_as_many_programs_as_before_and_none_for_more_clocks_nor_for_a_change(name, first):
    """A run's first parameters where they are drawn, what it trains, its launch, and `advance`: every other operation
    before the first push is NumPy's, because outside of a program JAX compiles each. Where a push has just ended, a change
    of a setting needs no progress of the others (`changes.catch_up`)."""
    command = [sys.executable, "-c", COUNTED, name]
    quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # how many they are does not depend on it
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=quickly)  # noqa: S603
    assert json.loads(done.stdout) == [first, 0, 0, 0]


FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
"""Operations of a compiled program that nothing is executed for."""


ASKED = 2
"""A function and its call, which XLA is asked to compile as one, from 144 nodes on."""


def facts(features, hidden, policy, workers):
    """The arguments of `loop.advance` for ten pushes of this job."""
    job = engine_job(features, hidden, workers, policy)
    return job.program, job.data, job.inputs, job.state, jnp.asarray(10, jnp.int32), jnp.asarray(jnp.inf)


def operations(features, hidden, policy, workers=8):
    """How many operations of the StableHLO language `loop.advance` has for this job."""
    text = loop.advance.jitted.lower(*facts(features, hidden, policy, workers), rows=10).as_text()
    return len(re.findall(r"^\s+(?:%\S+ = )?\"?(?:stablehlo|chlo|func)\.", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("hidden", "policy", "count"),
    [
        slow((), policies.asp(), 1376),
        slow((32,), policies.asp(), 1478),
        slow((32,), policies.bsp(), 1478),
        ((256,), policies.asp(), 1686),
        ((256,), policies.bsp(), 1686),
        ((256,), policies.k_sync(3), 1697),
    ],
    ids=["logistic, asp", "small, asp", "small, bsp", "asp", "bsp", "k_sync"],
)
def test_the_step_of_the_engine_has_as_many_operations_as_before(hidden, policy, count):
    assert operations(64, hidden, policy) == count
    assert operations(64, hidden, policy, workers=128) == count


@pytest.mark.slow
def test_more_workers_are_larger_arrays_and_not_more_operations():
    few, more, many = (operations(64, (256,), policies.asp(), workers) for workers in (8, 32, 512))
    assert (more - few, many - few) == (0, ASKED)


def dispatched(hidden, policy):
    """How many operations XLA dispatches one by one in the loop of `loop.advance` and in the loops inside it."""
    compiled, parts, name = loop.advance.compiled(*facts(64, hidden, policy, 32), rows=10), {}, ""
    for line in compiled.as_text().splitlines():
        if (head := re.match(r"(ENTRY )?%(\S+) \(", line)) is not None:
            name = "entry" if head[1] else head[2]
            parts[name] = []
        elif " = " in line:
            parts[name].append(line)

    def inside(loop_):
        return sum(count(re.search(rf"{part}=%([^\s,]+)", loop_)[1]) for part in ("body", "condition"))

    def count(name):
        found = [(re.search(r" = (?:\(.*?\)|\S+) ([\w-]+)\(", line)[1], line) for line in parts[name]]
        return sum(operation not in FREE for operation, _ in found) + sum(inside(x) for name, x in found if name == "while")

    [whole] = [line for line in parts["entry"] if " while(" in line]
    return inside(whole)


@pytest.mark.parametrize(
    ("hidden", "count"), [slow((), 13), ((32,), 13), slow((256,), 79)], ids=["logistic", "small", "large"]
)
def test_a_step_dispatches_as_many_operations_as_before(hidden, count):
    """Each takes a tenth of a microsecond, which counts where a model is small. The events of a step are one operation, and
    where gradients are small, the whole step but for its validation."""
    assert dispatched(hidden, policies.asp()) == dispatched(hidden, policies.bsp()) == count
