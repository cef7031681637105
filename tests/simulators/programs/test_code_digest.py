"""Digests of code in memory: equal in all processes, and another one for every change that traces another program."""

import subprocess
import sys
from functools import partial
from types import FunctionType
from typing import NamedTuple

import numpy as np
import pytest

from simulators.cluster.conditions import Stragglers
from simulators.engine import loop, one_function, timing
from simulators.engine.job_state import Program, Records
from simulators.engine.links import network
from simulators.programs.code_digest import UnknownCodeError, digest
from simulators.workloads.models import _classifier, _cross_entropy, _hinge
from tuners import policies

DIGEST = """
from simulators.programs.code_digest import digest
from simulators.engine import loop
from tuners import policies
print(digest(loop.advance, policies.dssp(1, 2).decide, {"rows": 512}))
"""


class Pair(NamedTuple):
    left: object
    right: object


@pytest.mark.slow
def test_processes_with_other_hashes_and_other_histories_digest_alike():
    made = []
    for seed, before in (
        ("1", ""),
        ("2", "from harness.scenario import load, system; system(load('digits-logistic'), 0)\n"),
    ):
        command = [sys.executable, "-c", before + DIGEST]
        environment = {"PYTHONHASHSEED": seed, "HARNESS_CACHE": "off", "JAX_PLATFORMS": "cpu"}
        made.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)  # noqa: S603
    assert made[0] == made[1]
    assert len(made[0].strip()) == 64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        ((1, 2), [1, 2]),
        ((1, (2, 3)), ((1, 2), 3)),
        ({"a": 1}, {"a": 2}),
        (Pair, None),
        (np.zeros(2, np.float32), np.zeros(2)),
        (Stragglers(1.0, probability=0.5), Stragglers(1.0, probability=0.6)),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (policies.asp().decide, policies.k_sync(2).decide),
        (partial(timing.spans, 1), partial(timing.spans, 2)),
        (_classifier(abs, _cross_entropy)[0], _classifier(abs, _hinge)[0]),
        (_classifier(abs, _hinge)[0], _classifier(abs, _hinge)[1]),
    ],
)
def test_values_that_differ_have_other_digests(one, other):
    if one is Pair:
        one, other = Program(None, policies.asp().decide, False, "fifo", False), (None, policies.asp().decide, False)
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_functions_made_twice_have_one_digest():
    assert _classifier(abs, _hinge)[0] is not _classifier(abs, _hinge)[0]
    assert digest(_classifier(abs, _hinge)) == digest(_classifier(abs, _hinge))


def test_another_value_or_function_of_a_module_is_another_digest(monkeypatch):
    """Also of a module that only another one imports. The files are the same."""
    before = digest(loop.advance)
    with monkeypatch.context() as patch:
        patch.setattr(timing, "_SHARES", 3)
        assert digest(loop.advance) != before
    with monkeypatch.context() as patch:
        patch.setattr(network, "maxmin", network.fifo)
        assert digest(loop.advance) != before
    with monkeypatch.context() as patch:
        patch.setattr(network.maxmin, "__code__", network.fifo_of_nics.__code__)
        assert digest(loop.advance) != before
    with monkeypatch.context() as patch:
        patch.setitem(one_function._WITHOUT_LIBRARY, "xla_cpu_experimental_ynn_fusion_type", "other")
        assert digest(loop.advance) != before
    with monkeypatch.context() as patch:
        patch.setattr(Records, "twice", lambda records: 2 * records, raising=False)
        assert digest(loop.advance) != before
    assert digest(loop.advance) == before


def test_defaults_are_part_of_a_function():
    function = policies._within_bound
    other = FunctionType(function.__code__, function.__globals__, function.__name__, (1,))
    other.__module__ = function.__module__
    assert digest(function) != digest(other)


@pytest.mark.parametrize("value", [lambda x: x, partial(lambda x: x, 1), object(), Pair(1, object()), {"a": iter(())}])
def test_code_of_others_is_not_followed(value):
    with pytest.raises(UnknownCodeError, match="Cannot digest"):
        digest(value)
