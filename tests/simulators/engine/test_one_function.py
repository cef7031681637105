"""What XLA is asked to compile as one function: of jobs of many nodes the whole loop, or with a model the events of each
step, to the same bytes; of small models whole steps: the same times, and losses up to rounding."""

import jax
import numpy as np
import pytest

from simulators.cluster.conditions import Conditions, Sleeps
from simulators.engine import loop
from simulators.engine.job_state import Records
from simulators.engine.one_function import decides_apart, gradients_as_one, large_as_one, told_xla
from simulators.programs import stored_programs
from simulators.programs.stored_programs import StoredProgram
from tests.support.marks import slow
from tests.support.small_jobs import MODEL, Cluster, Setting, Softmax, job, machine, system
from tuners import policies
from tuners.actions import Install
from tuners.baselines.rivals.ringleader import ringleader_policy
from tuners.rlp import dqn
from tuners.rlp.options import Options

LARGE = Softmax(features=1000, classes=10)  # its gradients stay outside
KINDS = tuple(machine(100.0 - 7 * i, speed=1.0 + i / 3) for i in range(3))


def many(policy, kinds=1, nodes=160, discipline="maxmin", flows=False, both=False, model=None, **conditions):
    """The branch of a job of so many nodes under an installed policy: four serve and the others work, or all do both."""
    names = tuple(f"n{i}" for i in range(nodes))
    cluster = Cluster(
        tuple(zip(names, (KINDS[i % kinds] for i in range(nodes)), strict=True)), discipline, independent_flows=flows
    )
    roles = {"workers": names, "servers": names} if both else {"workers": names[4:], "servers": names[:4]}
    start = Setting(**roles, batch_size=8, learning_rate=0.1)
    simulated = system(cluster, job(model=model), start, Conditions(jitter=0.3, **conditions))
    simulated.perform(Install(policy))
    return simulated.branches[0]


def advanced(program, of, clocks=600, rows=600):
    return loop.advance(program, of.context.data, of.inputs, of.state, np.int32(clocks), np.float64(np.inf), rows=rows)


def in_bytes(made):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(made)]


@pytest.mark.parametrize(
    ("policy", "kinds", "conditions"),
    [
        (policies.asp(), 1, {}),
        slow(policies.ssp(2), 3, {"sleeps": Sleeps(probability=0.2, mean_seconds=4.0, sd_seconds=1.0)}),
        slow(policies.bsp(), 3, {}),
        slow(policies.quorum(150, 0.5), 2, {}),
        slow(policies.asp(), 3, {"discipline": "fifo"}),
        slow(policies.ssp(2), 3, {"discipline": "uneven"}),
        slow(policies.asp(), 3, {"nodes": 70, "both": True}),
        slow(policies.asp(), 3, {"nodes": 450}),
        slow(policies.asp(), 1, {"nodes": 2100, "discipline": "fifo"}),
        slow(policies.ssp(2), 3, {"nodes": 2100, "discipline": "uneven"}),
        slow(policies.asp(), 3, {"nodes": 4150, "discipline": "serial"}),
        slow(policies.asp(), 3, {"nodes": 1100, "both": True}),
    ],
    ids=[
        "asp",
        "ssp, unlike machines, stragglers",
        "bsp, unlike machines",
        "a policy with a timer",
        "fifo",
        "uneven",
        "all nodes work and serve",
        "sums by XLA's library, unlike machines",
        "sums by XLA's library, fifo",
        "sums by XLA's library, uneven",
        "sums by XLA's library, serial",
        "sums by XLA's library, all nodes work and serve",
    ],
)
def test_the_same_bytes(policy, kinds, conditions):
    of = many(policy, kinds, **conditions)
    assert large_as_one(of.program, of.inputs)
    text = loop.advance.jitted.lower(of.program, of.context.data, of.inputs, of.state, 5, 9.0, rows=5).as_text()
    assert text.count("xla_cpu_small_call") == 1
    # Raises an error where XLA cannot compile it as one function; a call would take the plainer form.
    loop.advance.compiled(of.program, of.context.data, of.inputs, of.state, np.int32(5), np.float64(9.0), rows=5)
    assert in_bytes(advanced(of.program, of)) == in_bytes(advanced(of.program._replace(dispatched=True), of))


@pytest.mark.slow
def test_the_same_times_where_sums_over_flows_are_large():
    """XLA divides such a sum where it is an operation of its own, so that last digits differ."""
    of = many(policies.asp(), 3, nodes=1100, flows=True)
    loop.advance.compiled(of.program, of.context.data, of.inputs, of.state, np.int32(5), np.float64(9.0), rows=5)
    _, one, _ = advanced(of.program, of)
    _, apart, _ = advanced(of.program._replace(dispatched=True), of)
    np.testing.assert_allclose(one, apart, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kinds", "conditions"),
    [
        (policies.asp(), 3, {}),
        (policies.bsp(), 1, {"discipline": "fifo"}),
        (policies.k_sync(100), 3, {"discipline": "uneven"}),
        (policies.quorum(150, 0.5), 2, {}),
        (policies.asp(), 3, {"nodes": 70, "both": True}),
    ],
    ids=["asp", "bsp, fifo", "k_sync, uneven", "a policy with a timer", "all nodes work and serve"],
)
def test_the_same_bytes_with_a_model(policy, kinds, conditions):
    of = many(policy, kinds, model=LARGE, **conditions)
    assert large_as_one(of.program, of.inputs)
    assert in_bytes(advanced(of.program, of)) == in_bytes(advanced(of.program._replace(dispatched=True), of))


@pytest.mark.slow
def test_what_does_not_belong_to_the_gradients_is_one_operation():
    """Of a step with a model: dispatched one by one, they take three times as long as the gradient of a small one."""
    of = many(policies.asp(), model=LARGE)
    facts = (of.context.data, of.inputs, of.state, 5, 9.0)
    programs = (of.program, of.program._replace(dispatched=True))
    asked, unasked = (loop.advance.jitted.lower(p, *facts, rows=5).as_text() for p in programs)
    assert (asked.count("xla_cpu_small_call"), unasked.count("xla_cpu_small_call")) == (1, 0)


@pytest.mark.parametrize(
    ("policy", "kinds", "cluster"),
    [
        (policies.admit(3), 1, {}),
        (policies.asp(), 1, {"discipline": "fifo", "nodes": 70, "both": True}),
        (policies.asp(), 3, {"discipline": "fifo", "flows": True}),
    ],
    ids=["admit", "fifo, all nodes work and serve", "fifo, flows to unlike servers"],
)
def test_one_function_does_not_sort(policy, kinds, cluster):
    """XLA cannot read a function that sorts from the cache of programs: every process would compile it again."""
    of = many(policy, kinds, **cluster)
    assert large_as_one(of.program, of.inputs)
    text = loop.advance.jitted.lower(of.program, of.context.data, of.inputs, of.state, 5, 9.0, rows=5).as_text()
    assert bool(of.inputs.connections) == cluster.get("flows", False)
    assert "stablehlo.while" in text
    assert "stablehlo.sort" not in text


def test_few_nodes_are_not_asked_for():
    few = many(policies.asp(), nodes=120)
    assert not large_as_one(few.program, few.inputs)
    assert told_xla(few.program, few.context.data, few.inputs, few.state) == {}


def test_of_many_nodes_the_plainer_form_is_told_the_same():
    of = many(policies.asp())
    apart = of.program._replace(dispatched=True)
    one, other = (told_xla(program, of.context.data, of.inputs, of.state) for program in (of.program, apart))
    assert one == other != {}


def test_what_xla_cannot_compile_is_compiled_in_a_plainer_form(monkeypatch):
    """A policy of a user's own may contain an operation that no such function can have; here the compiler refuses."""
    of, compiled = many(policies.asp()), []

    class Refuses:
        def __init__(self, jitted):
            self.jitted, self.__wrapped__, self.__name__ = jitted, jitted.__wrapped__, "advance"

        def lower(self, program, *args, **static):
            compiled.append(program.dispatched)
            if not program.dispatched:
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: Fusion kind not implemented on CPU")
            return self.jitted.lower(program, *args, **static)

    fresh = StoredProgram(loop.advance.__wrapped__, plainer=loop.advance._plainer)
    fresh.jitted = Refuses(fresh.jitted)
    monkeypatch.setattr(loop, "advance", fresh)
    monkeypatch.setattr(stored_programs, "_store", None)
    assert in_bytes(advanced(of.program, of)) == in_bytes(advanced(of.program._replace(dispatched=True), of))
    assert compiled == [False, True, True]


def test_what_cannot_be_compiled_in_any_form_is_an_error(monkeypatch):
    class Refuses:
        __wrapped__, __name__ = staticmethod(lambda first, x: x), "refused"

        def lower(self, *args, **static):
            raise jax.errors.JaxRuntimeError("INTERNAL: refused")

    program = StoredProgram(Refuses.__wrapped__)
    program.jitted = Refuses()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: refused"):
        program(1, 2.0)


# ------------------------------------------------------------------------------------------------ small models


def small(policy, nodes=9, model=MODEL, conditions=None, setting=(), **workload):
    names = tuple(f"n{i}" for i in range(nodes))
    cluster = Cluster(tuple((name, machine(100.0 - i % 7, speed=1.0 + i % 3)) for i, name in enumerate(names)))
    start = Setting(**{"workers": names[1:], "servers": names[:1], "batch_size": 8, "learning_rate": 0.1} | dict(setting))
    simulated = system(cluster, job(model=model, **workload), start, conditions or Conditions(jitter=0.3))
    simulated.perform(Install(policy))
    return simulated.branches[0]


def as_one(of):
    return gradients_as_one(of.program, of.context.data, of.inputs, of.state.learned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "more"),
    [
        (policies.asp(), {}),
        slow(policies.bsp(), {}),
        slow(policies.ssp(2), {"optimizer": "momentum"}),
        slow(policies.k_sync(3), {"aggregation": "mean"}),
        slow(policies.quorum(3, 0.5), {}),
        slow(policies.asp(), {"optimizer": "adarevision"}),
        slow(policies.asp(), {"setting": {"local_steps": 3}}),
        slow(policies.asp(), {"setting": {"workers": ("n0", "n1", "n2"), "servers": ("n0", "n1", "n2")}}),
        slow(ringleader_policy(), {}),
        slow(policies.asp(), {"nodes": 160}),
    ],
    ids=["asp", "bsp", "momentum", "k_sync", "timer", "adarevision", "local steps", "both roles", "table", "many"],
)
def test_times_are_the_same_bytes_and_losses_close(policy, more):
    of = small(policy, **more)
    assert as_one(of)
    (state, table, used), (others, theirs, count) = (
        advanced(program, of) for program in (of.program, of.program._replace(dispatched=True))
    )
    assert int(used) == int(count) == 600
    loss = Records._fields.index("loss")
    np.testing.assert_array_equal(np.asarray(table)[:, :loss], np.asarray(theirs)[:, :loss])
    # Of nodes that are no workers, a batch of all nodes has losses and gradients, too, which nobody reads.
    parameters = zip(*(jax.tree.leaves(s.learned.parameters) for s in (state, others)), strict=True)
    for mine, other in parameters:
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(table)[:, loss], np.asarray(theirs)[:, loss], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_size_of_a_window_changes_no_byte():
    """Programs with large results are compiled with other options."""
    of = small(policies.asp())
    few, many = (jax.device_get(advanced(of.program, of, rows=rows)) for rows in (600, 20_000))
    assert few[1].tobytes() == many[1][:600].tobytes()
    assert in_bytes(few[0]) == in_bytes(many[0])


@pytest.mark.slow
def test_larger_models_are_not_asked_for():
    """The code of one function is that of plain loops, which takes longer for large products."""
    assert not as_one(small(policies.asp(), model=LARGE))
    assert not as_one(small(policies.asp(), setting={"batch_size": 4096}))


def test_policies_that_probe_are_not_asked_for():
    assert not as_one(small(policies.asp()._replace(probes=True)))


@pytest.mark.slow
@pytest.mark.parametrize(("learns", "apart"), [(True, True), (False, False)])
def test_a_policy_that_learns_decides_apart_to_the_same_bytes(learns, apart, monkeypatch):
    """A push while RLP learned took 270 us, of which 100 were products of matrices compiled as plain loops."""
    options, told = Options(batch=32), []
    learner = dqn.new_learner(options, 0)
    policy = dqn.learning_policy(options, learner) if learns else dqn.exploring_policy(options, learner, 0, 100)

    def bytes_of(answer):
        def asked(*given):
            told.append(decides_apart(*given))
            return answer

        jax.clear_caches()
        monkeypatch.setattr(loop, "decides_apart", asked)
        return in_bytes(loop.advance.jitted(*arguments(small(policy)), rows=60))

    assert bytes_of(True) == bytes_of(False)
    assert told == [apart] * 2


def arguments(of):
    return of.program, of.context.data, of.inputs, of.state, np.int32(60), np.float64(np.inf)
