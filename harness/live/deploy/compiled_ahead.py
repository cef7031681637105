"""Compiling beside Ray's start what the processes of a live job need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from harness.live.worker.spec import Spec
from harness.machines import program_cache

__all__ = ["compiled_ahead"]


@contextmanager
def compiled_ahead(spec: Spec) -> Iterator[None]:
    """Compile in a thread what the workers and the evaluator on this machine begin with, until the context ends. They find
    it in the cache of compiled programs; otherwise each would compile the same for itself, all at once. Without the cache,
    do nothing."""

    def compiled() -> None:
        # What fails here fails in the process that needs it, too, and there it ends the job with a reason.
        with suppress(Exception):
            spec.warm_up()
            spec.warm_up(validates=True)

    if program_cache.use() is None:
        yield
        return
    thread = threading.Thread(target=compiled, name="compiling ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
