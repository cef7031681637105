"""What is refused before Ray is asked."""

import os
import sys

import pytest

BYTES = b"caf\xe9"  # a name in Latin-1, as old file systems have them


# Ray reads its environment when it is imported, and tests/live/conftest.py sets that while tests are collected.
def _joined():
    from harness.ray_cluster import joined

    return joined("127.0.0.1:1")


def _started():
    from harness.live.processes import launch

    return launch.cluster(None)


@pytest.mark.parametrize("where", ["word", "folder"])
@pytest.mark.parametrize("join", [_joined, _started], ids=["joined", "started"])
def test_names_that_are_no_text_are_refused_before_ray_is_asked(join, where, tmp_path, monkeypatch):
    """Ray fails on them after seconds, in the words of a decoder."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if where == "word":
        monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv, os.fsdecode(BYTES)])
    else:
        folder = tmp_path / os.fsdecode(BYTES)
        folder.mkdir()
        monkeypatch.chdir(folder)
    said = r"Cannot use Ray with the name '.*caf\\\\xe9', which is no text in utf-8\."
    with pytest.raises(ValueError, match=said), join():
        pass
