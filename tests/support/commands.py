"""The real command `harness`, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["harness"]

_ROOT = Path(__file__).parents[2]


def harness(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the command in the working folder; `given` is its standard input."""
    command = [sys.executable, "-m", "harness", *arguments]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    return subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, env=environment, check=False, input=given, timeout=100
    )
