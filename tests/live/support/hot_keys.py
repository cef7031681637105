"""The workload of `hot-keys` as a small live job: some workers, and mini-batches of 16 samples."""

from harness.live.worker.spec import Spec
from harness.scenario import load, parse

__all__ = ["hot_keys"]


def hot_keys(workers=2, batch=16):
    """The job, and its setting with so many workers."""
    arena = load("hot-keys")
    names = ", ".join(f'"n{i}"' for i in range(workers))
    text = arena.text.replace('workers = ["n0", "n1", "n2", "n3", "n4", "n5"]', f"workers = [{names}]")
    text = text.replace('policy = "asp"', f'policy = "asp"\nbatch_size = {batch}').replace("value = 0.6", "value = 0.01")
    spec = Spec.of(parse(text, name="hot-keys", origin=arena.origin), 3)
    assert (len(spec.job.start.workers), spec.job.start.batch_size) == (workers, batch)
    return spec, spec.job.start
