"""Programs that are stored as a whole: a later process traces nothing, results are the same bytes, and no damage is felt."""

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.machines import program_cache
from simulators.engine import changes
from simulators.programs import stored_programs
from simulators.programs.stored_programs import StoredProgram
from simulators.workloads import models
from tests.bench.jobs import engine_job
from tuners import policies

RUN = """
import jax
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **facts: events.append(name.rpartition("/")[2]))
from harness.scenario import load, system
from tuners.actions import Reconfigure, Run
from dataclasses import replace
simulated = system(load("digits-logistic"), 0)
begun = simulated.perform(Run(clocks=600))
start = simulated.job.start
simulated.perform(Reconfigure(replace(start, learning_rate=2 * start.learning_rate)))
ended = simulated.perform(Run(clocks=5))
print(begun.pushes.loss.tobytes().hex(), ended.pushes.loss.tobytes().hex(), ended.end_seconds.hex(), sep="")
print(events.count("jaxpr_to_mlir_module_duration"))
"""


def played(folder: Path) -> tuple[str, int]:
    """What a new process gets in a run with its programs in `folder`, and how many programs it lowers."""
    environment = os.environ | {"HARNESS_CACHE": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in half of the time
    done = subprocess.run([sys.executable, "-W", "error", "-c", RUN], env=environment, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    result, lowered = done.stdout.split()
    return result, int(lowered)


def entries(folder: Path, *, traced: bool) -> list[Path]:
    return sorted(p for p in folder.iterdir() if ("-traced-" in p.name) == traced)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_later_process_reads_whole_programs_and_gets_the_same_bytes(tmp_path):
    result, lowered = played(tmp_path)
    assert (lowered, len(entries(tmp_path, traced=True))) == (4, 3)  # and a gradient is lowered: what does it take?
    assert played(tmp_path) == (result, 0)
    # What JAX has compiled once is stored whole, though XLA itself would write only a part of what it has read.
    for file in entries(tmp_path, traced=True):
        file.unlink()
    assert played(tmp_path) == (result, lowered)
    for file in entries(tmp_path, traced=False):
        file.unlink()
    assert played(tmp_path) == (result, 0)


class Memory:
    """A store for one test, beside that of JAX's cache, which all tests share."""

    def __init__(self, of_jax):
        self.entries = {}
        self._of_jax = of_jax
        self._got = None

    @property
    def asked(self):
        return self._got if self._of_jax.asked == "none" else self._of_jax.asked

    def get(self, key):
        if not key.startswith("traced-"):
            return self._of_jax.get(key)
        self._of_jax.get("none")  # JAX is not the one who asked last
        self._got = key
        return self.entries.get(key)

    def put(self, key, value):
        self.entries[key] = value


@pytest.fixture
def store(monkeypatch):
    program_cache.use()
    of_jax = stored_programs._store
    made = Memory(program_cache.ProgramFolder(Path("none")) if of_jax is None else of_jax)
    monkeypatch.setattr(stored_programs, "_store", made)
    return made


def test_jobs_under_two_policies_share_what_does_not_depend_on_the_policy(store):
    """What begins a job, and what a change of its setting begins from: only `advance` has the policy compiled in."""
    for policy in (policies.asp(), policies.k_sync(3)):
        job = engine_job(17, (), 5, policy)  # as no other test has it
        changes.catch_up(job.program, job.inputs, job.state, np.float64(0.5))
        made = sorted(key.split("-")[1] for key in store.entries)
        assert made == ["_catch_up", "_launch", "untrained"]


class Counted:
    """A function that JAX compiles, and how often it was lowered to be stored."""

    def __init__(self, jitted):
        self._jitted, self.lowered = jitted, 0

    def __call__(self, *args, **static):
        return self._jitted(*args, **static)

    def __getattr__(self, name):
        return getattr(self._jitted, name)

    def lower(self, *args, **static):
        self.lowered += 1
        return self._jitted.lower(*args, **static)


def counted(function):
    program = StoredProgram(function)
    program.jitted = Counted(program.jitted)
    return program


def fresh():
    """A program as a new process has it: JAX, too, takes its function for a new one."""
    function = models._normal_of_key.__wrapped__
    copy = FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return counted(copy)


WORDS = np.array([1, 2], np.uint32)
EXPECTED = np.asarray(jax.random.normal(jax.random.wrap_key_data(WORDS, impl="threefry2x32"), (3,), jnp.float32))


def test_a_program_is_compiled_once_and_called_from_memory(store):
    first, second = fresh(), fresh()
    for program in (first, first, second, second):
        assert np.asarray(program((3,), WORDS)).tobytes() == EXPECTED.tobytes()
    assert (first.jitted.lowered, second.jitted.lowered, len(store.entries)) == (1, 0, 1)
    assert np.asarray(second((2,), WORDS)).shape == (2,)
    assert (second.jitted.lowered, len(store.entries)) == (1, 2)


@pytest.mark.slow
def test_flags_of_xla_in_another_order_are_the_same_programs():
    """A worker process of a comparison gets one flag from its parent and adds the others; other processes add them all."""
    code = "from simulators.programs import stored_programs; print(stored_programs._told_xla())"
    flags, told = os.environ["XLA_FLAGS"].split(), []
    for order in (flags, flags[::-1], [*flags, "--xla_cpu_enable_fast_math=true"]):
        environment = os.environ | {"XLA_FLAGS": " ".join(order)}
        told.append(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))  # noqa: S603
    assert told[0] == told[1] != told[2]


def test_another_setting_of_the_compiler_is_another_program(store):
    """That of JAX for programs that need not be fast, which is no part of what a program is traced with."""
    fresh()((3,), WORDS)
    before = jax.config.read("jax_disable_most_optimizations")
    try:
        jax.config.update("jax_disable_most_optimizations", not before)
        again = fresh()
        again((3,), WORDS)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert (again.jitted.lowered, len(store.entries)) == (1, 2)


def test_other_shapes_and_types_are_other_programs(store):
    program = fresh()
    assert program((2,), WORDS).shape == (2,)
    with pytest.raises(TypeError, match="uint32"):
        program((2,), WORDS.astype(np.int64))
    assert program((2,), WORDS).shape == (2,)
    assert len(store.entries) == 1


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b"x" * 900])
def test_what_cannot_be_read_is_compiled(store, damage):
    fresh()((3,), WORDS)
    (key,) = store.entries
    store.entries[key] = damage(store.entries[key])
    again = fresh()
    assert np.asarray(again((3,), WORDS)).tobytes() == EXPECTED.tobytes()
    assert again.jitted.lowered == 1


def test_a_program_that_cannot_be_called_is_compiled(store):
    """As one that lacks a part; here, one of another shape."""
    fresh()((3,), WORDS)
    (key,) = store.entries
    other = counted(lambda shape, words: jnp.zeros(shape))
    other._key = lambda *facts: key
    assert other((3,), np.zeros(5)).shape == (3,)
    assert other.jitted.lowered == 1


@pytest.mark.parametrize(("count", "simple"), [(2**18, True), (2**18 + 1, False)])
def test_code_is_simple_where_results_are_small(monkeypatch, count, simple):
    """Which takes less time to compile, and more to run with large arrays."""
    lower, options = jax.stages.Lowered.compile, []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, *given: options.append(given) or lower(self, *given))
    for kept in (None, stored_programs._store):
        monkeypatch.setattr(stored_programs, "_store", kept)
        assert StoredProgram(lambda count, x: jnp.full(count, x))(count, np.float32(2.0)).shape == (count,)
    assert options == [(stored_programs._SIMPLE_CODE if simple else {},)] * 2


def test_simple_code_computes_the_same_bytes():
    x = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)

    def function(x):
        return jax.nn.log_softmax(jnp.tanh(x)), jnp.sqrt(jnp.log1p(jnp.exp(x)) / (1 + x * x)), x @ x.T, x.sum(), jnp.sin(x)

    lowered = jax.jit(function).lower(x)
    for_users = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    simple, default = lowered.compile(stored_programs._SIMPLE_CODE | for_users)(x), lowered.compile(for_users)(x)
    assert [np.asarray(a).tobytes() for a in simple] == [np.asarray(a).tobytes() for a in default]


def test_a_version_of_xla_that_does_not_know_some_options_has_the_others(monkeypatch):
    """One of those that were all left out lets small models be compiled as one function, also in later versions."""
    compile_, options = jax.stages.Lowered.compile, []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, *given: options.append(*given) or compile_(self, *given))
    monkeypatch.setattr(stored_programs, "_store", None)
    known, unknown = {"xla_cpu_parallel_codegen_split_count": 1}, {"xla_cpu_no_such": False, "xla_gone_too": 1}
    monkeypatch.setattr(stored_programs, "_SIMPLE_CODE", known | unknown)
    small = {"xla_cpu_experimental_ynn_fusion_type": ""}
    program = StoredProgram(lambda count, x: count * x, options=lambda *_: small | {"xla_none_such": ""})
    assert float(program(2, np.float32(3.0))) == 6.0
    assert options[-1] == known | small


def test_code_of_others_is_not_stored(store):
    program = StoredProgram(lambda count, x: count * x)
    assert float(program(2, 3.0)) == float(program(2, 3.0)) == 6.0
    assert program(2, np.ones(4)).shape == (4,)
    assert not store.entries


def test_a_function_keeps_some_programs_in_memory(store, monkeypatch):
    monkeypatch.setattr(stored_programs, "_MOST_PROGRAMS", 2)
    program = fresh()
    for size in (11, 12, 13, 11, 12, 13):
        assert program((size,), WORDS).shape == (size,)
    assert len(store.entries) == 3
    assert program.jitted.lowered == 3
    assert len(program._programs) <= 2


def test_within_a_program_it_is_a_part_of_that(store):
    program = fresh()
    program((3,), WORDS)
    both = jax.vmap(lambda words: program((3,), words))(np.stack([WORDS, WORDS]))
    assert np.asarray(both)[1].tobytes() == EXPECTED.tobytes()
    assert len(store.entries) == 1


def test_without_a_store_jax_compiles(monkeypatch):
    monkeypatch.setattr(stored_programs, "_store", None)
    assert np.asarray(StoredProgram(models._normal_of_key.__wrapped__)((3,), WORDS)).tobytes() == EXPECTED.tobytes()


def test_a_version_of_jax_that_cannot_store_programs_compiles(store, monkeypatch):
    monkeypatch.setattr(stored_programs, "_CAN_STORE", False)
    stored_programs.use_store(store)
    assert stored_programs._store is None
