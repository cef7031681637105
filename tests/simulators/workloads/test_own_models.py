"""Models in files of users: what they are made into, what is refused, and that no version gets the program of another."""

import re
import textwrap

import jax
import numpy as np
import pytest

from harness.scenario import job, load, own_model, parse, system, workload_of
from simulators.programs import stored_programs
from simulators.programs.code_digest import UnknownCodeError, digest
from simulators.programs.stored_programs import StoredProgram
from simulators.workloads import own_models
from simulators.workloads.catalogue import load_workloads, workload
from tuners.actions import Run

LINEAR = """
import jax.numpy as jnp

def make_model(shape, classes, *, scale=0.0):
    def init(key):
        return {"w": scale * jnp.ones((8, 8, 1, classes)), "b": jnp.zeros(classes)}

    def apply(parameters, x):
        return jnp.tensordot(x, parameters["w"], 3) + parameters["b"]

    return init, apply
"""

SCENARIO = """
summary = "own"
[cluster]
nodes = [{ type = "edge-4core", count = 3 }]
[workload]
name = "digits-logistic"
model = "mine.py:make_model"
[start]
worker_count = 2
batch_size = 8
[target]
metric = "accuracy"
value = 0.99
[budget]
seconds = 500
"""


@pytest.fixture
def mine(tmp_path):
    """The user's file."""
    path = tmp_path / "mine.py"
    path.write_text(LINEAR)
    return path


def scenario(mine, text=SCENARIO):
    return parse(text, name="my", origin=mine.parent / "my.toml")


def proxy(mine, text=SCENARIO):
    return workload_of(scenario(mine, text)).proxy


def on(name, options=""):
    return SCENARIO.replace("digits-logistic", name).replace("[start]", f"model_options = {{ {options} }}\n[start]")


def body(text):
    """A file whose function has these lines."""
    return "import jax\nimport jax.numpy as jnp\nimport numpy as np\n\ndef make_model(shape, classes):\n" + textwrap.indent(
        textwrap.dedent(text), "    "
    )


# --------------------------------------------------------------------------------------------------------------- made


@pytest.mark.slow
def test_the_engine_trains_it_as_it_trains_the_same_model_of_ours(mine):
    """Under numbers of 32 bits, although the engine's have 64."""
    ours = SCENARIO.replace('model = "mine.py:make_model"\n', "")
    seen = [system(scenario(mine, text), 0).perform(Run(clocks=60)) for text in (SCENARIO, ours)]
    assert seen[0].end_seconds == seen[1].end_seconds
    np.testing.assert_allclose(seen[0].pushes.loss, seen[1].pushes.loss, rtol=1e-4)
    assert seen[0].evaluations[-1].accuracy == pytest.approx(seen[1].evaluations[-1].accuracy, abs=0.01)


def test_equal_seeds_give_equal_parameters_of_32_bits(mine):
    mine.write_text(
        body("""
        def init(key):
            return [jax.random.normal(key, (64, classes)), jnp.arange(3) / 3, np.float32(2)]

        def apply(parameters, x):
            counts = jnp.zeros(classes).at[jnp.arange(3)].add(parameters[1])
            assert counts.dtype == jnp.float32
            return x.reshape(len(x), -1) @ parameters[0] * parameters[2] + counts

        return init, apply
        """)
    )
    made = proxy(mine)
    once, again, other = (jax.tree.leaves(made.init(seed)) for seed in (0, 0, 2**40))
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float32 for leaf in once)
    assert [a.tobytes() for a in once] == [a.tobytes() for a in again]
    assert once[0].tobytes() != other[0].tobytes()


@pytest.mark.slow
def test_text_and_losses_of_ones_own(mine):
    mine.write_text(
        body("""
        if classes and len(shape) == 1:  # text
            def init(key):
                return jnp.zeros((classes, classes))
            return init, lambda parameters, x: jax.nn.one_hot(x, classes) @ parameters

        def init(key):
            return {"mean": jnp.full((), 2.0)}
        def losses(parameters, batch):
            user, item, rating = batch
            return (rating - parameters["mean"]) ** 2
        def correct(parameters, batch):
            return jnp.abs(batch[2] - parameters["mean"]) < 1
        return init, losses, correct
        """)
    )
    text = proxy(mine, on("sentences-lm"))
    batch = tuple(column[:3] for column in text.valid)
    np.testing.assert_allclose(text.losses(text.init(0), batch), np.log(text.init(0).shape[0]), rtol=1e-5)
    assert text.correct(text.init(0), batch).shape == (3,)
    ratings = proxy(mine, on("ratings-mf"))
    batch = tuple(column[:5] for column in ratings.valid)
    np.testing.assert_allclose(ratings.losses(ratings.init(0), batch), (np.asarray(batch[2]) - 2) ** 2)
    assert ratings.correct(ratings.init(0), batch).dtype == np.float32


def test_options_and_workloads_of_ones_own(mine):
    (mine.parent / "jobs.toml").write_text(
        '[own]\nsummary = "own"\n[own.model]\nkind = "python"\nfile = "mine.py"\nfunction = "make_model"\n'
        'options = { scale = 1 }\n[own.data]\nkind = "digits"\n[own.demand]\nmodel_bytes = 1e3\nsample_seconds = 0.01\n'
    )
    table = load_workloads(mine.parent / "jobs.toml")
    assert workload("own", tables=table).proxy.init(0)["w"].max() == 1
    text = SCENARIO.replace('"digits-logistic"\nmodel = "mine.py:make_model"', '"own"\nfile = "jobs.toml"')
    assert proxy(mine, text).init(0)["w"].max() == 1
    assert proxy(mine, text.replace("[start]", "model_options = { scale = 2 }\n[start]")).init(0)["w"].max() == 2
    assert own_model(scenario(mine, text))[0] == "mine.py"


# ------------------------------------------------------------------------------------------------------------- versions


def test_a_file_is_read_again_when_it_has_changed(mine):
    first = proxy(mine)
    assert proxy(mine) is first
    mine.write_text(LINEAR.replace("scale=0.0", "scale=2.0"))
    assert (first.init(0)["w"].max(), proxy(mine).init(0)["w"].max()) == (0, 2)
    assert proxy(mine, on("digits-logistic", "scale = 1")) is not proxy(mine, on("digits-logistic", "scale = 1.0"))


class Memory(dict):
    """A store of programs."""

    asked = "none"

    def put(self, key, value):
        self[key] = value


CONSTANT = """
import numpy as np
import jax
import jax.numpy as jnp
from helper import shifted

TABLE = np.full(10, 1.0, np.float32)
SETTINGS = {"power": 2}

def make_model(shape, classes, *, factor=1.0):
    offsets = np.arange(classes, dtype=np.float32)

    def init(key):
        return jnp.zeros(classes)

    @jax.jit
    def apply(parameters, x):
        return shifted(parameters + x.reshape(len(x), -1)[:, :1] * factor + offsets + TABLE, SETTINGS["power"])

    return init, apply
"""


def losses_digest(mine, text=SCENARIO):
    return digest(proxy(mine, text).losses)


def test_an_unchanged_model_is_found_again_and_a_changed_one_never(mine, monkeypatch):
    """Whatever has changed: the file, what it imports, arrays that it holds, its options."""
    helper = mine.with_name("helper.py")
    helper.write_text("def shifted(x, power):\n    return x - power\n")
    mine.write_text(CONSTANT)
    found = {losses_digest(mine)}
    from simulators.workloads.catalogue import _own_proxy

    _own_proxy.cache_clear()  # as another process
    assert found == {losses_digest(mine)}
    found.add(losses_digest(mine, on("digits-logistic", "factor = 2")))
    module = read_module(mine)
    monkeypatch.setattr(module, "TABLE", np.full(10, 2.0, np.float32))
    found.add(losses_digest(mine))
    monkeypatch.setitem(module.SETTINGS, "power", 3)
    found.add(losses_digest(mine))
    for path, old, new in (
        (mine, "classes, dtype", "1, classes + 1, dtype"),
        (mine, "10, 1.0", "10, 3.0"),
        (helper, "x - p", "x + p"),
    ):
        path.write_text(path.read_text().replace(old, new))
        found.add(losses_digest(mine))
    assert len(found) == 7


def read_module(mine):
    from simulators.programs.own_code import read

    return read(mine).module()


def test_programs_are_stored_of_what_can_be_digested_only(mine, monkeypatch):
    """The program of a changed file is another one, to other numbers; with an object that nobody knows there is none."""
    store = Memory()
    monkeypatch.setattr(stored_programs, "_store", store)
    monkeypatch.setattr(Memory, "asked", property(lambda self: None), raising=False)
    keys = []
    monkeypatch.setattr(stored_programs, "_read", lambda store, key, args: keys.append(key))
    for text in (LINEAR, LINEAR.replace("+ parameters", "- parameters")):
        mine.write_text(text)
        made = proxy(mine)
        StoredProgram(own_models._losses_of.__wrapped__)(made.losses, made.init(0), tuple(c[:4] for c in made.train))
    assert len({key for key in keys if "_losses_of" in key}) == 2
    mine.write_text(
        LINEAR.replace("import jax", "import threading\nLOCK = threading.Lock()\nimport jax").replace(
            "        return jnp.ten", "        LOCK.locked()\n        return jnp.ten"
        )
    )
    keys.clear()
    with pytest.raises(UnknownCodeError):
        digest(proxy(mine).losses)
    assert keys == [] or all("_losses_of" not in key for key in keys)


@pytest.mark.parametrize(
    ("lines", "is_known"),
    [
        ("KEY = jax.random.key(1)", True),
        ("class KEY(NamedTuple):\n    a: int = 1\n    def __call__(self, x):\n        return x", True),
        ("KEY = functools.partial(jnp.tanh)", True),
        ("KEY = np.array([object()])", False),
        ("KEY = polars.col('a')", False),
        ("class KEY(threading.Thread):\n    pass", False),
        ("KEY = jax.custom_jvp(lambda x: x)", False),
        ("def KEY(x):\n    import math\n    return math.pi * x", True),
        ("def KEY(x):\n    def inner():\n        import polars.selectors\n    return x", False),
    ],
)
def test_what_a_model_names_is_digested_or_unknown(mine, lines, is_known):
    mine.write_text(
        "import functools, threading\nfrom typing import NamedTuple\nimport polars\nimport jax, jax.numpy as jnp\n"
        "import numpy as np\n"
        f"{lines}\ndef apply(p, x):\n    KEY\n    return x\n"
    )
    apply = read_module(mine).apply
    if is_known:
        assert digest(apply) == digest(apply)
    else:
        with pytest.raises(UnknownCodeError, match="Cannot digest"):
            digest(apply)


# --------------------------------------------------------------------------------------------------------------- refused


GOOD_INIT = "init = lambda key: jnp.ones((64, classes))\n"
GOOD_APPLY = "apply = lambda p, x: x.reshape(len(x), -1) @ p\n"
END = "return init, apply\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("raise KeyError('width')", r"make_model\(\(8, 8, 1\), 10\) failed: KeyError: 'width' \(mine\.py, line 6\)\."),
        ("return jnp", "make_model returned a module: return two functions"),
        ("return 1, 2, 3, 4", "make_model returned a tuple of 4: return two functions, init, apply, or three"),
        (GOOD_INIT + "apply = lambda p, x: x @ p\n" + END, r"apply failed: TypeError: .*mine\.py, line 7"),
        (
            GOOD_INIT + "apply = lambda p, x: x.sum()\n" + END,
            r"apply returned shape \(\) for \d samples: expected \(\d, 10\)",
        ),
        (GOOD_INIT + "apply = lambda p, x: (x, x)\n" + END, "apply returned a tuple of 2: return one array"),
        (GOOD_INIT + "apply = lambda p, x: (x.reshape(len(x), -1) @ p).astype(int)\n" + END, "apply returned int32"),
        (GOOD_INIT + "apply = lambda p, x: x.reshape(len(x), -1) @ p if x.sum() > 0 else 0\n" + END, "TracerBoolConversion"),
        (GOOD_INIT + "apply = lambda p, x: np.tanh(np.asarray(p))\n" + END, "TracerArrayConversion"),
        ("init = lambda key: {}\n" + GOOD_APPLY + END, "init returned no parameters"),
        ("init = lambda key: {'a': jnp.arange(3)}\n" + GOOD_APPLY + END, r"init returned parameters \['a'\] of int32"),
        ("init = lambda key: 'weights'\n" + GOOD_APPLY + END, r"init\(key\) failed: TypeError"),
        ("init = lambda key: jnp.full((64, 10), jnp.inf)\n" + GOOD_APPLY + END, "parameters that are not finite"),
        (
            "init = lambda key: np.random.normal(size=(64, 10)).astype(np.float32)\n" + GOOD_APPLY + END,
            "init is another funct",
        ),
        (
            "noise = np.random.default_rng().normal()\n"
            + GOOD_INIT
            + "apply = lambda p, x: x.reshape(len(x), -1) @ p + noise\n"
            + END,
            "the loss is another function when make_model is called again: draw random numbers from the key",
        ),
        (
            GOOD_INIT + "apply = lambda p, x: jnp.log(x.reshape(len(x), -1) - 9) @ p\n" + END,
            "the loss of the first parameters is",
        ),
        (GOOD_INIT + "apply = lambda p, x: (x - x.mean(0)).reshape(len(x), -1) @ p\n" + END, "depends on the other samples"),
        (
            GOOD_INIT + "losses = lambda p, batch: 0.0 * p.sum()\nreturn init, losses, losses\n",
            r"losses returned shape \(\)",
        ),
        (
            GOOD_INIT + "doubled = lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: 2 * c, x)\n"
            "losses = lambda p, batch: doubled(p.sum() + jnp.zeros(len(batch[1])))\nreturn init, losses, losses\n",
            "its loss has no gradient: ValueError",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(mine, lines, said):
    mine.write_text(body(lines))
    with pytest.raises(
        ValueError, match=rf"my\.toml: \[workload\] Cannot train the model make_model of .*mine\.py: .*{said}"
    ) as told:
        proxy(mine)
    assert len(str(told.value)) < 700
    assert "\n" not in str(told.value)


def test_files_and_functions_that_do_not_exist_are_refused(mine):
    for text, said in (
        ("def make_modle(): pass", "the file has no function make_model. Did you mean 'make_modle'?"),
        ("make_model = 3", "the file has no function make_model"),
        (
            "import nothing_of_this_name",
            "it failed: ModuleNotFoundError: No module named 'nothing_of_this_name' (mine.py, line 1)",
        ),
        ("def make_model(shape)", "it failed: SyntaxError: expected ':' (mine.py, line 1)"),
        ("raise SystemExit", "it failed: SystemExit (mine.py, line 1)"),
        ("def make_model(shape): pass", "make_model((8, 8, 1), 10) cannot be called: too many positional arguments"),
    ):
        mine.write_text(text)
        with pytest.raises(ValueError, match=re.escape(said)):
            proxy(mine)
    mine.write_text(LINEAR)
    with pytest.raises(
        ValueError, match=r"make_model\(\(8, 8, 1\), 10, sacle=2\) cannot be called: got an unexpected keyword"
    ):
        proxy(mine, on("digits-logistic", "sacle = 2"))
    for name, said in (("ratings-mf", "the data have no classes"), ("clicks-fm", "the data are rows of embedding tables")):
        with pytest.raises(ValueError, match=said):
            proxy(mine, on(name))
    mine.unlink()
    with pytest.raises(ValueError, match=r"my\.toml: \[workload\] Cannot read .*mine\.py: there is no such file\."):
        job(scenario(mine))
    with pytest.raises(ValueError, match=r"my\.toml: \[workload\] model: Cannot read .*mine\.py"):
        own_model(scenario(mine))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mine.py:make_model", "mine:make_model", r"model: cannot read 'mine:make_model': write FILE\.py:FUNCTION"),
        ("mine.py:make_model", "mine.py", r"model: cannot read 'mine\.py': write FILE\.py:FUNCTION"),
        ("digits-logistic", "cruise-nmf", "model: workload 'cruise-nmf' has no data to train it on"),
        ("digits-logistic", "digits-logistik", "did you mean .*digits-logistic"),
        ('model = "mine.py:make_model"', "model_options = { a = 1 }", "model_options: they are for a model of your own"),
        ("[start]", "overrides = { function = 1 }\n[start]", "Cannot override 'function'"),
    ],
)
def test_a_scenario_that_names_it_wrongly_is_refused(mine, old, new, said):
    with pytest.raises(ValueError, match=said):
        scenario(mine, SCENARIO.replace(old, new))


def test_reading_a_scenario_runs_nothing_of_the_file(mine):
    mine.write_text("raise RuntimeError('it runs')")
    (mine.parent / "my.toml").write_text(SCENARIO)
    assert own_model(load(mine.parent / "my.toml"))[0] == "mine.py"
    with pytest.raises(ValueError, match=r"RuntimeError: it runs \(mine\.py, line 1\)"):
        job(load(mine.parent / "my.toml"))
