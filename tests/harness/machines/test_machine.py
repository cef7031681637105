"""What all machines of a job, or of a comparison, must have alike."""

import shutil
from pathlib import Path

import pytest

from harness.machines.machine import code_of, other_version, versions

ROOT = Path(__file__).parents[2]


def test_a_checkout_with_other_code_is_another_one_though_its_version_is_the_same(tmp_path):
    copy = tmp_path / "tuners"
    shutil.copytree(ROOT / "tuners", copy)
    (copy / "__pycache__" / "made.pyc").write_bytes(b"compiled")
    assert code_of([copy]) == code_of([ROOT / "tuners"])
    with (copy / "actions.py").open("a") as code:
        code.write("\n")
    assert code_of([copy]) != code_of([ROOT / "tuners"])


@pytest.mark.parametrize("name", ["harness", "jax", "code of ps-harness"])
def test_the_first_difference_from_another_machine_is_told(name):
    ours = versions()
    assert other_version(ours) is None
    assert other_version(ours | {name: "0.0.1"}) == (name, ours[name], "0.0.1")
    assert other_version({"another package": "1"}) is None
