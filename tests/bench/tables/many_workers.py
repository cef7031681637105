"""Prints what a push costs in clusters of 8 to 8,192 workers, and the memory that the engine's state takes.

python -m tests.bench.tables.many_workers
"""

from __future__ import annotations

import jax

from tests.bench.jobs import EngineJob, engine_job, timing_job, underway
from tests.bench.rounds import timed
from tuners import policies

WORKERS = tuple(2**n for n in range(3, 14))
ROUNDS = 5


def microseconds(job: EngineJob, pushes: int) -> float:
    """CPU microseconds of a push, the best of some rounds: noise only adds."""
    run = timed(lambda: job.advance(pushes))
    run()
    return min(run() for _ in range(ROUNDS)) / pushes * 1e6


def mebibytes(job: EngineJob) -> float:
    """What the arrays of the state take, kept gradients included."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(job.state)) / 2**20


def main() -> None:
    print("| workers | timing only, us | MiB | logistic regression, us | MiB |\n| --- | --- | --- | --- | --- |")  # noqa: T201
    for workers in WORKERS:
        pushes = 2000 if workers < 1024 else 400
        row = []
        for job in map(underway, (timing_job(workers), engine_job(64, (), workers, policies.asp()))):
            row += [f"{microseconds(job, pushes):.3g}", f"{mebibytes(job):.2g}"]
        print(f"| {workers:,} | {' | '.join(row)} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
