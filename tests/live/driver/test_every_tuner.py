"""Every tuner of the package plays a live job, or says why it has nothing to tune in it.

The processes are threads of this one, over real sockets. As a script (``python -m tests.live.driver.test_every_tuner``) it
prints a table of all tuners; names as arguments play only these.
"""

import sys
import tempfile
from pathlib import Path

import pytest

from harness.drive import play
from harness.live.driver.system import LiveSystem
from harness.live.worker.spec import Spec
from tests.live.support.threads import thread_processes
from tuners import embedded, resolve
from tuners.actions import Fork, Install, Reconfigure, Rejected
from tuners.applicability import nothing_to_tune

EVERY = """
summary = "Digits on four processes, with every knob that a tuner of this package asks for."
[cluster]
nodes = [{ type = "process", count = 4, prefix = "n" }]
[workload]
name = "digits-logistic"
[workload.overrides]
aggregation = "mean"
[workload.overrides.demand]
sample_seconds = 2e-5
fixed_seconds = 2e-3
[start]
workers = ["n0", "n1"]
servers = ["n2", "n3"]
global_batch_size = 64
policy = "bsp"
learning_rate = 0.02
[free]
"role/*" = { choice = ["worker", "server", "both", "idle"] }
"load/*" = { real = [0.0, 1.0] }
policy = { choice = ["bsp", "asp", "ssp"] }
staleness = { integer = [0, 4] }
learning_rate = { real = [0.005, 0.5], log = true }
momentum = { real = [0.0, 0.9] }
transfer_bits = { choice = [16, 32] }
[target]
metric = "accuracy"
value = 0.85
check_clocks = 25
[budget]
seconds = 30
[costs]
restart_seconds = 1.0
"""

SPEC = Spec("every", "every.toml", EVERY, 0)
TUNERS = [name for name in embedded() if resolve(name).contestant]
IDLE = {"bsp", "uniform_gpus", "dlrover_hot"}  # already so, no machine has one, no machine is idle
IDLE |= {"local_sgd", "diloco", "adacomm", "dylu", "fedbuff", "quorum", "pollux"}
"""Tuners without anything to tune here; those of the second line want what live jobs do not have: local steps, free batches
with a measured noise of gradients."""

FORKING = {"joint", "mltuner"}
"""Tuners that try settings in branches of the job."""


def played(name, folder):
    """A tuner's live job."""
    with thread_processes(SPEC, folder) as processes, LiveSystem(SPEC, processes) as live:
        return play(resolve(name).factory, live)


def done(exchanges, kind):
    """How many actions of a kind were carried out."""
    return sum(isinstance(e.action, kind) and not isinstance(e.answer, Rejected) for e in exchanges)


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TUNERS)
def test_every_tuner_plays_a_live_job_or_says_why_not(name, tmp_path):
    reason = nothing_to_tune(resolve(name).factory, SPEC.job)
    if reason:
        assert name in IDLE, reason
        return
    made = played(name, tmp_path)
    assert made.outcome.status in ("target", "budget"), f"{made.outcome.reason}\n{made.outcome.trace}"
    assert (done(made.exchanges, Fork) > 0) >= (name in FORKING)


def row(name):
    """A tuner's line of the table."""
    reason = nothing_to_tune(resolve(name).factory, SPEC.job)
    if reason:
        return f"| `{name}` | refused: {reason} |{' |' * 5}"
    with tempfile.TemporaryDirectory() as folder:
        made = played(name, Path(folder))
    why = "; ".join(dict.fromkeys(str(e.answer) for e in made.exchanges if isinstance(e.answer, Rejected)))
    ended, counts = made.outcome, [done(made.exchanges, kind) for kind in (Reconfigure, Fork, Install)]
    cells = [f"{ended.status} {ended.reason}".strip(), f"{ended.seconds:.1f}", *map(str, counts), why]
    return f"| `{name}` | {' | '.join(cells)} |\n{ended.trace}".strip()


if __name__ == "__main__":
    heads = ("tuner", "live", "s", "reconfigurations", "forks", "policies", "rejected because")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)  # noqa: T201
    for each in sys.argv[1:] or TUNERS:
        print(row(each), flush=True)  # noqa: T201
