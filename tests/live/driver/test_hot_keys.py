"""A live job with embedding tables, over real sockets: blocks of rows move, and it learns what the simulator learns."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from harness.live.driver.system import LiveSystem
from harness.live.processes import loops
from harness.live.protocol.messages import Pulled, StagePush
from harness.live.protocol.names import EVALUATOR
from harness.live.protocol.wire import encode
from harness.live.worker.tasks import WorkerTask
from harness.scenario import system
from tests.live.support.hot_keys import hot_keys
from tests.live.support.ones import counted
from tests.live.support.threads import thread_processes
from tuners.actions import Evaluate, Reconfigure, Rejected, Run


@pytest.mark.slow
def test_rows_are_trained_on_real_sockets_while_their_blocks_move(tmp_path, monkeypatch):
    """One worker: what it pulls depends on its own pushes only, so nothing but rounding may differ from the simulator."""
    spec, start = hot_keys(workers=1)
    sent = Counter()

    def counting(self, receiver, message):
        frames = encode(self.name, message)
        if receiver != EVALUATOR:
            sent[type(message.head)] += sum(memoryview(frame).nbytes for frame in frames)
        self.transport.send(receiver, frames)

    monkeypatch.setattr(loops.Mailbox, "send", counting)
    scattered = replace(start, block_owners=replace(start, placement="hash").owners(spec.job.blocks))
    moved = sum(a != b for a, b in zip(start.owners(spec.job.blocks), scattered.block_owners, strict=True))
    kept = []
    with thread_processes(spec, tmp_path / "one") as processes, LiveSystem(spec, processes, keep=kept.append) as live:
        first = live.perform(Run(clocks=10))
        live.perform(Reconfigure(scattered, method="migrate", wait=False))
        second = live.perform(Run(clocks=20))
        while not second.changes:
            second = live.perform(Run(clocks=5))
        (cost,) = second.changes
        assert cost.done
        assert sum(int(step.split()[1]) for step in cost.steps) == moved > 80
        with pytest.raises(Rejected, match="keep no copies"):
            live.perform(Reconfigure(replace(scattered, cache_rows=1024, cache_clocks=16)))
        measured = live.perform(Evaluate())
        live.checkpoint()
    with thread_processes(spec, tmp_path / "two") as processes, LiveSystem(spec, processes, kept[-1]) as live:
        live.perform(Run(clocks=5))
        clocks, lost, model = counted(live)

    simulated = system(spec.scenario, spec.seed, start)
    alike = simulated.perform(Run(clocks=10))
    np.testing.assert_allclose(first.pushes.loss, alike.pushes.loss, rtol=0, atol=1e-6)
    assert first.blocks == alike.blocks
    simulated.perform(Run(clocks=clocks - 10))
    expected, found = simulated._branches[0].state.learned.parameters, spec.tree(model)
    assert lost == 0
    np.testing.assert_allclose(found["rows"], expected["rows"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["bias"], expected["bias"], rtol=0, atol=1e-6)
    # The evaluator pulls the rows that the validation data looks up, some pushes later than it was asked.
    rows = spec.rows_of(None)
    evaluated = spec.compute(
        WorkerTask("evaluate", 0, None, model.reshape(-1, spec.layout.tables.width)[rows].ravel(), rows)
    )
    exact = simulated.perform(Evaluate())
    np.testing.assert_allclose((evaluated.loss, evaluated.accuracy), (exact.loss, exact.accuracy), rtol=0, atol=1e-6)
    assert exact.loss < measured.loss < np.log(2)
    # 100 rows of 36 bytes and their numbers, and the heads of four messages; the model is 9.4 MB.
    for kind in (Pulled, StagePush):
        assert sent[kind] / clocks < 16 * 8 * 40 + 4 * 1000 < spec.parameters.nbytes / 1000
