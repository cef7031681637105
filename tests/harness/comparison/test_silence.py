"""A run of which nothing is heard for long tells its parent so, and nothing after its end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness.comparison import run_process


def test_a_silent_run_is_told_of_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_process, "_SILENT_SECONDS", 0.02)
    sent: list[Any] = []
    watch = run_process._Watch(sent.append, 3600.0, 1e9)
    give_up = time.monotonic() + 60.0
    while len(sent) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    watch.end()
    count = len(sent)
    assert all(p.silent_seconds >= 0.02 for p in sent)
    assert sent[0].silent_seconds < sent[1].silent_seconds
    time.sleep(0.1)
    assert len(sent) == count
