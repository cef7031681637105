"""Blocks of embedding tables change their servers: what moves, what it costs, and that nothing is lost."""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from simulators.cluster.conditions import NodeChange
from simulators.jobs import drawn
from simulators.reconfiguration.shares import moves_of_blocks, survivors
from simulators.workloads.workload import Embedding, Proxy
from tests.simulators.engine.test_embedding import BLOCKS, DEMAND, PROXY, ROW_BYTES, ROWS, START, made, minibatches, workload
from tests.support.small_jobs import NAMES, assert_same_bytes, branch, together
from tuners.actions import Reconfigure, Rejected, Run
from tuners.settings import Choice

FREE = (
    *(Choice(f"block/{i}", NAMES) for i in range(BLOCKS)),
    *(Choice(f"role/{n}", ("worker", "server", "idle")) for n in NAMES),
    Choice("placement", ("range", "hash")),
)
MOVED = ("d", "e", "d", "d", "e", "e", "d")  # blocks 1 and 6 move


def job(**changed):
    return made(knobs=FREE, jitter=0.1, **({"job": workload(proxy=ones())} | changed))


def test_ranges_hashes_and_named_owners():
    assert START.owners(BLOCKS) == ("d", "d", "d", "e", "e", "e", "e")
    hashed = replace(START, placement="hash").owners(BLOCKS)
    assert hashed == replace(START, placement="hash").owners(BLOCKS) != START.owners(BLOCKS)
    assert set(hashed) == {"d", "e"}
    named = replace(START, block_owners=MOVED)
    assert (named.owners(BLOCKS), named.shares()[1]) == (MOVED, (4 / 7, 3 / 7))
    assert replace(START, model_shares=(0.8, 0.2)).owners(BLOCKS) == ("d",) * 6 + ("e",)


def test_a_hash_spreads_many_blocks_as_the_shares_say():
    owners = replace(START, placement="hash", model_shares=(0.75, 0.25)).owners(4000)
    assert owners.count("d") / 4000 == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 4000))


def test_only_blocks_with_another_owner_move():
    assert moves_of_blocks(START.owners(BLOCKS), MOVED) == [("d", "e", (1,)), ("e", "d", (3, 6))]
    assert moves_of_blocks(MOVED, MOVED) == []


@pytest.mark.slow
def test_moving_blocks_costs_their_bytes_and_training_goes_on():
    simulated = job()
    simulated.perform(Run(clocks=5))
    cost = simulated.perform(Reconfigure(replace(START, block_owners=MOVED), method="migrate"))
    assert cost.steps == ("move 1 model block d -> e", "move 2 model blocks e -> d")
    assert cost.bytes_moved == pytest.approx(3 * ROW_BYTES * ROWS / BLOCKS)
    assert (cost.stall_seconds, cost.done) == (0.0, True)
    assert cost.seconds > 0.34  # a handshake
    after = simulated.perform(Run(clocks=1))
    assert after.setting == replace(START, block_owners=MOVED)
    window = simulated.perform(Run(clocks=30))
    for server in window.servers:
        rows = sum(r for r, owner in zip(window.blocks, MOVED, strict=True) if owner == server.node)
        assert server.pull_bytes == pytest.approx(ROW_BYTES * rows)


def test_the_same_owners_under_another_name_cost_nothing():
    cost = job().perform(Reconfigure(replace(START, block_owners=START.owners(BLOCKS)), method="migrate"))
    assert (cost.seconds, cost.steps) == (0.0, ())


@cache
def ones():
    """A model whose every push adds one to the bias and an eighth, one sample's part, to each row that it looks up.

    Always the same functions: for others, programs would be compiled again."""

    def losses_of(dense, looked_up, batch):
        del batch
        return -(dense["bias"] + jnp.sum(looked_up, axis=(1, 2)))

    def losses(parameters, batch):
        return losses_of(parameters, parameters["rows"][batch[0]], batch)

    def correct(parameters, batch):
        del parameters
        return jnp.ones(batch[0].shape[0], jnp.float32)

    def init(key):
        del key
        return {"rows": jnp.zeros((ROWS, 1), jnp.float32), "bias": jnp.zeros((), jnp.float32)}

    return Proxy(init, losses, correct, PROXY.train, PROXY.valid, Embedding(ROWS, 3, losses_of))


def assert_all_pushes_are_in_the_model(simulated, pushes):
    """`pushes` are all that were completed; every look-up of theirs is in its row, and no other."""
    keys, numbers = np.asarray(drawn(workload(), 3)[0].train[0]), minibatches(3)
    found = np.zeros(ROWS)
    for worker, clock in zip(pushes.worker, pushes.clock, strict=True):
        np.add.at(found, keys[numbers(worker, clock)].ravel(), 1 / 8)
    clock, learned = branch(simulated)[:2]
    assert int(clock.pushes) == int(clock.version) == len(pushes.worker) == float(learned.parameters["bias"])
    np.testing.assert_array_equal(np.asarray(learned.parameters["rows"])[:, 0], found)


@pytest.mark.parametrize("method", ["migrate", "checkpoint"])
def test_no_row_of_a_push_is_lost_or_counted_twice_by_a_move(method):
    simulated = job(setting=replace(START, learning_rate=1.0))
    windows = [simulated.perform(Run(clocks=7))]
    for owners in (MOVED, ("e",) * BLOCKS, START.owners(BLOCKS)):
        setting = replace(simulated.job.start, block_owners=owners)
        simulated.perform(Reconfigure(setting, method=method, wait=False))
        windows.append(simulated.perform(Run(seconds=15.0)))
        assert windows[-1].changes[0].done
    assert_all_pushes_are_in_the_model(simulated, together(windows))


def test_windows_change_nothing_while_blocks_move():
    whole, cut = job(), job()
    for simulated in (whole, cut):
        simulated.perform(Run(clocks=3))
        simulated.perform(Reconfigure(replace(START, block_owners=MOVED), method="migrate", wait=False))
    seen = whole.perform(Run(clocks=30))
    parts = [cut.perform(Run(clocks=1)) for _ in range(30)]
    assert_same_bytes(seen.pushes, together(parts))
    assert sum(np.array(p.blocks) for p in parts).tolist() == list(seen.blocks)
    for j, server in enumerate(seen.servers):
        assert server.pull_bytes == pytest.approx(sum(p.servers[j].pull_bytes for p in parts))


def test_a_server_can_be_replaced_by_an_idle_machine():
    start = replace(START, workers=NAMES[:2])
    simulated = job(setting=start)
    owners = tuple("c" if o == "d" else o for o in START.owners(BLOCKS))
    cost = simulated.perform(Reconfigure(replace(start, servers=("c", "e"), block_owners=owners), method="migrate"))
    assert cost.steps == ("add c", "move 3 model blocks d -> c", "delete d")
    window = simulated.perform(Run(clocks=20))
    assert [s.node for s in window.servers] == ["c", "e"]


def test_survivors_inherit_the_blocks_of_a_server_that_fails():
    placed = replace(START, servers=("c", "d", "e"), workers=NAMES[:2], block_owners=("c", "d", "e", "e", "e", "d", "c"))
    left = survivors(placed, frozenset(NAMES) - {"d"}, NAMES)
    assert left.block_owners == ("c", "c", "e", "e", "e", "c", "c")
    lost = NodeChange(nodes=("d",), seconds=5.0, event="fails")
    window = made(replace(START, block_owners=MOVED), knobs=FREE, jitter=0.0, nodes=(lost,)).perform(Run(seconds=60.0))
    assert window.setting.servers == ("e",)
    assert window.setting.block_owners == ("e",) * BLOCKS
    assert window.status == "running"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_owners": ("d",) * 3}, "Cannot place 3 blocks: this job has 7"),
        ({"block_owners": ("a",) * BLOCKS}, "Cannot place a block on 'a': it is no server; there are d, e"),
        ({"block_owners": MOVED, "model_shares": (0.5, 0.5)}, "Cannot use model_shares and block_owners at once"),
        ({"placement": "luck"}, "Cannot place blocks by 'luck': choose range or hash"),
    ],
)
def test_placements_that_make_no_sense_are_refused(changed, reason):
    with pytest.raises(Rejected, match=reason):
        job().perform(Reconfigure(replace(START, **changed)))


def test_relocation_on_demand_is_refused():
    assert job().job.methods == ("checkpoint", "migrate")
    with pytest.raises(Rejected, match="Cannot reconfigure by 'relocate'"):
        job().perform(Reconfigure(replace(START, block_owners=MOVED), method="relocate"))


def test_the_demand_of_these_tests_has_rows_of_four_bytes():
    assert DEMAND.model_bytes / ROWS == ROW_BYTES
