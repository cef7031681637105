"""A checkpoint that somebody has changed, with a digest that is right again, is refused before a process learns from it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from harness.live.driver.checkpoints import checkpoint_file
from harness.live.driver.system import LiveSystem
from tests.live.support.ones import ONES, Ones
from tests.live.support.pretend import PretendProcesses
from tests.live.support.threads import thread_processes
from tuners.actions import Fork, Run

SPEC = Ones("ones", "ones.toml", ONES, 0)
ALONE = np.ones(1, bool)  # [nodes], of a job with one node


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of two branches."""
    kept = []
    folder = tmp_path_factory.mktemp("whole")
    with thread_processes(SPEC, folder / "job") as processes, LiveSystem(SPEC, processes, keep=kept.append) as live:
        live.perform(Run(clocks=10))
        live.perform(Fork(0))
        live.checkpoint()
    return kept[-1]


def changed(checkpoint, tensors=(), **state):
    """With these tensors in place of its own; None: without that one."""
    made = {name: t for name, t in (dict(checkpoint.tensors) | dict(tensors)).items() if t is not None}
    return replace(checkpoint, tensors=made, state=dict(checkpoint.state) | state)


FLOATS = np.ones(SPEC.size, np.float32)
IN_FILE = {
    "no driver": ({"driver": None}, {}, "no state of the driver"),
    "no coordinator": ({"coordinator": None}, {}, "no state of the coordinator"),
    "state of floats": ({"driver": FLOATS}, {}, "no state of the driver"),
    "no parameters": ({"0/parameters": None, "0/slot": FLOATS}, {}, "no parameters of branch 0"),
    "short": ({"0/parameters": FLOATS[:10]}, {}, r"branch 0 is float32 \(10,\); the model has 1000"),
    "long": ({"1/parameters": np.ones(2000, np.float32)}, {}, r"branch 1 is float32 \(2000,\)"),
    "of bytes": ({"0/parameters": FLOATS.astype(np.int8)}, {}, "branch 0 is int8"),
    "a table": ({"0/parameters": FLOATS.reshape(10, 100)}, {}, r"\(10, 100\)"),
    "another tensor": ({"x/y": FLOATS}, {}, "a tensor 'x/y'"),
    "no such branch": ({}, {"branch": 9}, "no parameters of branch 9"),
    "a time of text": ({}, {"seconds": "late"}, "it is damaged"),
    "no time": ({}, {"seconds": float("nan")}, "it is damaged"),
    "exchanges before the first": ({}, {"exchanges": -5}, "it is damaged"),
}


@pytest.mark.parametrize("harm", IN_FILE)
def test_a_file_of_another_form_is_refused(whole, tmp_path, harm):
    tensors, state, why = IN_FILE[harm]
    checkpoint_file.save(tmp_path / "c", changed(whole, tensors, **state))
    with pytest.raises(ValueError, match=rf"Cannot resume.*{why}"):
        checkpoint_file.load(tmp_path / "c").check(SPEC.size)


def test_a_whole_file_is_taken(whole, tmp_path):
    checkpoint_file.save(tmp_path / "c", whole)
    read = checkpoint_file.load(tmp_path / "c")
    read.check(SPEC.size)
    assert read.state == whole.state
    assert read.vectors.keys() == {0, 1}


@pytest.mark.parametrize("tensors", [{"1/parameters": None}, {"7/parameters": FLOATS}], ids=["less", "more"])
def test_branches_other_than_those_of_the_model_are_refused(whole, tensors):
    with pytest.raises(ValueError, match="other branches than the model"):
        LiveSystem(SPEC, PretendProcesses(SPEC.job), changed(whole, tensors))


def as_row(array):
    return array.dtype.str, array.shape, array.tobytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [(5, as_row(ALONE)), (6, as_row(ALONE.astype(np.int32))), (15, {99: [1, 1, 1.0, 1.0, 1]}), (16, [99])],
    ids=["active", "clocks", "busy", "due"],
)
def test_workers_that_the_job_does_not_have_are_refused(whole, tmp_path, field, value):
    """In the coordinator's state of branch 0, whose fields are in the order of `branch_state`."""
    branches, *rest = msgspec.msgpack.decode(whole.tensors["coordinator"].tobytes())
    branches[0][field] = value
    doctored = np.frombuffer(msgspec.msgpack.encode([branches, *rest]), np.uint8)
    with thread_processes(SPEC, tmp_path / "job") as processes, pytest.raises(ValueError, match="damaged"):
        LiveSystem(SPEC, processes, changed(whole, {"coordinator": doctored}))
