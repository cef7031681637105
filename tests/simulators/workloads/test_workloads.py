"""Workloads: published demand, gradients, learning, overrides, and the errors for wrong names and values."""

import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simulators import jobs
from simulators.cluster.profiles import node_seconds, profile
from simulators.workloads import catalogue as module
from simulators.workloads import datasets, models
from simulators.workloads.catalogue import load_workloads, workload, workloads
from simulators.workloads.model_tables import Mlp, Transformer
from simulators.workloads.workload import Demand, OptionEffect
from tests.simulators.workloads.test_datasets import cifar_folder, mnist_folder  # noqa: F401
from tests.support.marks import slow

LEARNS = ("digits-mlp", "digits-logistic", "digits-svm", "digits-cnn", "cancer-logistic", "clouds-mlp", "ratings-mf")
LEARNS += ("digits-lstm", "tfonline-logr", "tfonline-svm", "tfonline-cifar", "tfonline-imagenet8", "rlp-digits")
LEARNS += ("mnist1d-mlp", "sentences-lm")
LONG = {"sentences-lm", "digits-cnn", "digits-lstm", "tfonline-svm", "tfonline-cifar", "tfonline-imagenet8", "mnist1d-mlp"}
LONG |= {"tfonline-logr", "clouds-mlp"}  # of models that learn in others
TABLES = ("clicks-fm",)
READS = ("mnist5k-mlp", "mnist-mlp", "rlp-mnist", "cifar10-cnn", "libsvm-logistic", "libsvm-svm")
PARAMETERS = {"digits-mlp": 19_210, "digits-logistic": 650, "digits-svm": 650, "digits-cnn": 1_898, "ratings-mf": 20_000}
PARAMETERS["mnist1d-mlp"] = 41 * 256 + 257 * 128 + 129 * 10
PARAMETERS["sentences-lm"] = (28 + 32) * 32 + 33 * 96 + 33 * 32 + 33 * 128 + 129 * 32 + 33 * 28
PARAMETERS["digits-lstm"] = (8 + 16 + 1) * 4 * 16 + 17 * 10
EACH_MODEL = [slow(name) if name == "mnist1d-mlp" else name for name in PARAMETERS]  # and another perceptron


def size(proxy):
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(proxy.init(0)))


@cache
def start(name):
    """A named workload's parameters with seed 0."""
    return workload(name).proxy.init(0)


def test_public_names_exist():
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_workload_has_a_line_and_makes_sense():
    assert set(LEARNS + TABLES + READS) < set(workloads())
    for name, summary in workloads().items():
        assert 20 < len(summary) < 110
        if name in READS:
            continue
        made = workload(name)
        assert (made.name, made.summary) == (name, summary)
        assert made.samples > 0
        assert made.source
        assert (made.proxy is None) == (name not in LEARNS + TABLES)


def test_listing_imports_no_jax():
    code = "import sys, simulators.workloads.catalogue as w; w.workloads(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603


# --------------------------------------------------------------------------------------------------------------- demand


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tfonline-logr", 109_372_904),
        ("tfonline-svm", 1_000_000),
        ("tfonline-cifar", 654_968),
        ("tfonline-imagenet8", 58_289_352),
        ("cruise-nmf", 2 * 71_000 * 1_000),  # 8 bytes each
        ("cruise-mlr", 2 * 4_000 * 160_000),
        ("cruise-lda", 400 * 141_000),
        ("cruise-lda-4k", 4_000 * 141_000),
        ("mltuner-mf", (480_000 + 18_000) * 500),
    ],
)
def test_published_model_sizes(name, parameters):
    assert workload(name).demand.model_bytes == 4 * parameters


@pytest.mark.parametrize(
    ("name", "megabytes", "operations"), [("googlenet", 26.7, 1582), ("alexnet", 233, 714), ("speechnet", 173, 45.3)]
)
def test_bespoke_networks(name, megabytes, operations):
    demand = workload(f"bespoke-{name}").demand
    assert demand.model_bytes == pytest.approx(megabytes * 1e6)
    assert demand.sample_seconds == pytest.approx(operations * 1e6 * 6 / 17.5e9, rel=1e-3)


@pytest.mark.parametrize(("name", "z"), [("nmf", 1.80), ("mlr", 6.0), ("lda", 1.50), ("lda-4k", 2.87)])
def test_cruise_computes_z_times_as_long_as_it_pulls(name, z):
    made, node = workload(f"cruise-{name}"), profile("r4.xlarge")
    seconds, _ = node_seconds(node, made.demand, (made.batch_size,))
    assert seconds == pytest.approx(z * made.demand.model_bytes / node.nic_bytes_per_second, rel=2e-3)


def test_a_fast_cruise_worker_is_twice_as_fast():
    made = workload("cruise-nmf")
    slow, fast = (node_seconds(profile(n), made.demand, (made.batch_size,))[0] for n in ("r4.xlarge", "r4.4xlarge"))
    assert slow / fast == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [("logr", 0.514, 3.744), ("svm", 0.365, 0.042), ("cifar", 0.089, 0.739), ("imagenet8", 2.588, 2.7456)],
)
def test_tensorflowonline_compute_is_alpha_plus_beta_over_threads(name, alpha, beta):
    made = workload(f"tfonline-{name}")
    for threads in (1, 6, 12):
        seconds, _ = node_seconds(profile("e5-2620v4"), made.demand, (made.batch_size,), threads)
        assert seconds == pytest.approx(alpha + beta / threads)


def test_rlp_steps_take_as_long_as_its_workers_without_sleeps(mnist_folder):  # noqa: F811
    made = workload("rlp-mnist", {"fraction": 1.0, "valid_samples": 0}, mnist_folder)
    assert node_seconds(profile("rlp-node"), made.demand, (16,))[0] == pytest.approx(
        np.mean([4.37, 4.47, 4.57, 5.31, 4.97, 5.07]), rel=1e-3
    )
    assert made.demand.model_bytes == 4 * size(made.proxy)


def test_a_graph_option_acts_under_its_value_alone_and_on_threads_as_it_says():
    demand, node = workload("tfonline-imagenet8").demand, profile("e5-2620v4")

    def seconds(threads, *options):
        return node_seconds(node, demand, (16,), threads, 0, options)[0]

    assert seconds(4, ("global_jit_level", "OFF")) == seconds(4, ("infer_shapes", True)) == seconds(4)
    assert seconds(1, ("global_jit_level", "ON_2")) == pytest.approx(0.5395 * seconds(1))
    assert seconds(12, ("global_jit_level", "ON_1")) == pytest.approx(0.5395 * 12**1.097 * seconds(12))


@pytest.mark.parametrize("wrong", [{"factor": 0.0}, {"factor": math.inf}, {"thread_exponent": math.nan}])
def test_impossible_effects_of_an_option(wrong):
    with pytest.raises(ValueError, match=r"Option 'jit' cannot have factor .* give a positive, finite factor"):
        OptionEffect(name="jit", value="ON", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"model_bytes": -1.0}, {"sample_seconds": math.nan}, {"serial_fraction": 1.5}, {"crowding_exponent": -1.0}],
)
def test_impossible_demand(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"A job cannot ask {name} {value}"):
        Demand(**({"model_bytes": 1.0, "sample_seconds": 1.0} | wrong))


# -------------------------------------------------------------------------------------------------------------- proxies


@partial(jax.jit, static_argnums=0)
def train(proxy, parameters, rows, rate, train, valid):
    """Plain SGD over `rows` [steps, batch] of the data: validation loss before and after, accuracy, mini-batch losses."""

    def step(parameters, chosen):
        batch = tuple(a[chosen] for a in train)
        loss, gradient = jax.value_and_grad(lambda p: proxy.losses(p, batch).mean())(parameters)
        return jax.tree.map(lambda w, g: w - rate * g, parameters, gradient), loss

    trained, losses = jax.lax.scan(step, parameters, rows)
    before, after = (proxy.losses(w, valid).mean() for w in (parameters, trained))
    return before, after, proxy.correct(trained, valid).mean(), losses


class Functions(NamedTuple):
    """A proxy without its data, which would not hash."""

    losses: Callable
    correct: Callable


@pytest.mark.parametrize("name", [slow(n) if n in LONG else n for n in LEARNS])
def test_learns(name):
    made = workload(name)
    proxy, rate = made.proxy, np.float32(made.learning_rate)
    slow = {"ratings-mf": 2_000, "digits-mlp": 2_000, "tfonline-svm": 20_000, "digits-lstm": 10_000, "mnist1d-mlp": 3_000}
    slow["sentences-lm"] = 1_500
    steps = slow.get(name, 6_000 if name.startswith("tfonline") else 300)
    rows = np.random.default_rng(1).integers(made.samples, size=(steps, made.batch_size))
    functions = Functions(proxy.losses, proxy.correct)
    before, after, accuracy, losses = train(functions, start(name), rows, rate, proxy.train, proxy.valid)
    assert np.isfinite(losses).all()
    assert after < 0.7 * before
    # digits-mlp ends at 95.5 to 96.5 %; one standard error of 360 samples is 1 %.
    # A linear model of MNIST-1D ends at 34 %.
    # A bigram of the sentences is right in 39 %, a 4-gram in 74 %.
    least = {"digits-mlp": 0.935, "mnist1d-mlp": 0.5, "sentences-lm": 0.6}.get(name, 0.8)
    assert np.isnan(accuracy) if name == "ratings-mf" else accuracy > least


@pytest.mark.slow
def test_a_factorisation_machine_on_tables_learns_more_than_a_constant():
    """By sparse steps: a dense gradient has as many entries as the tables."""
    made = workload("clicks-fm")
    proxy, rate = made.proxy, made.learning_rate
    rows = np.random.default_rng(1).integers(made.samples, size=(800, made.batch_size))

    @jax.jit
    def trained(parameters, train):
        def step(parameters, chosen):
            batch = tuple(a[chosen] for a in train)
            looked_up = parameters["rows"][batch[0]]
            found = jax.grad(lambda r, b: proxy.embedding.losses({"bias": b}, r, batch).mean(), argnums=(0, 1))
            by_row, by_bias = found(looked_up, parameters["bias"])
            moved = parameters["rows"].at[batch[0]].add(-rate * by_row)
            return {"rows": moved, "bias": parameters["bias"] - rate * by_bias}, None

        return jax.lax.scan(step, parameters, rows)[0]

    first = start("clicks-fm")
    after = trained(first, proxy.train)
    clicked = np.mean(proxy.valid[1])
    constant = -clicked * np.log(clicked) - (1 - clicked) * np.log(1 - clicked)
    assert float(proxy.losses(after, proxy.valid).mean()) < 0.61 < constant
    assert float(proxy.correct(after, proxy.valid).mean()) > 0.65 > max(clicked, 1 - clicked)
    assert {k: v.shape for k, v in first.items()} == {"rows": (proxy.embedding.rows, 9), "bias": ()}


def test_models_and_data_with_tables_go_together():
    for changed, said in (
        ({"model": {"kind": "logistic"}}, "Cannot train Logistic on rows of embedding tables"),
        ({"data": {"kind": "digits"}}, "Cannot train a factorisation machine on data without embedding tables"),
    ):
        table = load_tables()["clicks-fm"] | changed
        with pytest.raises(ValueError, match=said):
            workload("mine", tables={"mine": table})


def load_tables():
    return tomllib.loads((files("simulators.workloads") / "workloads.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", EACH_MODEL)
def test_gradients_by_finite_differences(name):
    proxy = workload(name).proxy
    batch = tuple(a[:7] for a in proxy.train)
    with jax.enable_x64(True):
        # In float64, and away from the start, where the hinge has kinks that differences would step over.
        rng = np.random.default_rng(3)
        point = jax.tree.map(lambda w: w + 0.05 * rng.normal(size=w.shape), start(name))
        direction = jax.tree.map(lambda w: rng.normal(size=w.shape), point)

        @jax.jit
        @jax.value_and_grad
        def along(t, point, direction, batch):
            return proxy.losses(jax.tree.map(lambda w, d: w + t * d, point, direction), batch).mean()

        step = 1e-6
        below, at, above = (along(t, point, direction, batch) for t in (-step, 0.0, step))
        numeric, exact = (above[0] - below[0]) / (2 * step), at[1]
        assert float(abs(exact)) > 1e-3
        np.testing.assert_allclose(float(exact), float(numeric), rtol=1e-4)


@pytest.mark.parametrize("name", EACH_MODEL)
def test_shapes_and_types(name):
    proxy = workload(name).proxy
    assert {leaf.dtype for leaf in jax.tree.leaves(start(name))} == {np.dtype("float32")}
    assert size(proxy) == PARAMETERS[name]
    few, one = (tuple(a[:n] for a in proxy.train) for n in (5, 1))
    per_sample = jax.jit(lambda w, batch: (proxy.losses(w, batch), proxy.correct(w, batch)))
    (losses, correct), (alone, _) = per_sample(start(name), few), per_sample(start(name), one)
    letters = 32 if name == "sentences-lm" else 1
    assert (losses.shape, losses.dtype, correct.shape, alone.shape) == ((5,), jnp.float32, (5,), (1,))
    assert np.isnan(correct).all() if name == "ratings-mf" else set(np.asarray(correct) * letters) <= {*range(letters + 1)}
    # A sample's loss does not depend on the rest of its batch.
    np.testing.assert_allclose(losses[:1], alone, rtol=1e-5)


def test_a_language_model_predicts_from_what_came_before_alone():
    proxy, last = workload("sentences-lm").proxy, np.arange(28)
    text, labels = (np.repeat(np.asarray(a[:1]), len(last), axis=0) for a in proxy.train)
    labels[:, -1] = last  # all characters that could follow
    others = [text.copy(), text.copy()]
    others[0][:, -1], others[1][:, -2] = (text[0, -1] + 1) % 28, (text[0, -2] + 1) % 28

    @jax.jit
    def earlier(text):
        """What the first 31 characters add to a sample's loss: the probabilities of all that could follow sum up to 1."""
        return -jax.nn.logsumexp(-32 * proxy.losses(start("sentences-lm"), (text, labels)))

    np.testing.assert_allclose(earlier(text), earlier(others[0]), rtol=1e-6)
    assert abs(earlier(text) - earlier(others[1])) > 1e-3


@pytest.mark.parametrize(("model", "data"), [(Mlp(), datasets.sentences(20)), (Transformer(), datasets.digits())])
def test_text_and_language_models_belong_together(model, data):
    with pytest.raises(ValueError, match=r"Cannot train (mlp|transformer) on this data: (give a|a) transformer"):
        models.make_proxy(model, data)


def test_the_width_of_a_transformer_divides_by_its_heads():
    with pytest.raises(ValueError, match="width 32 does not divide by 3 heads"):
        workload("sentences-lm", {"heads": 3})


def test_text_has_no_classes_to_be_divided_by():
    made = workload("sentences-lm", {"skew": 0.5})
    with pytest.raises(ValueError, match="it has no classes"):
        jobs.drawn(made, 0, 4)


@pytest.mark.parametrize("name", ["digits-cnn", "digits-mlp", "ratings-mf"])
def test_the_seed_decides_the_start(name):
    once, again, other = (jax.tree.leaves(workload(name).proxy.init(seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
    assert not np.array_equal(once[-1], other[-1])


def test_losses_equal_their_definitions():
    rng = np.random.default_rng(0)
    parameters = {"w": rng.normal(size=(64, 10)).astype(np.float32), "b": rng.normal(size=10).astype(np.float32)}
    x, y = (np.asarray(a[:20]) for a in workload("digits-svm").proxy.train)
    scores = x.astype(np.float64) @ parameters["w"] + parameters["b"]
    right = scores[np.arange(20), y]
    entropy = np.log(np.exp(scores).sum(1)) - right
    wrong = np.where(np.arange(10) == y[:, None], -np.inf, scores).max(1)
    hinge = np.maximum(0, 1 + wrong - right) + 0.5e-4 * (parameters["w"].astype(float) ** 2).sum()
    for name, expected in (("digits-logistic", entropy), ("digits-svm", hinge)):
        losses = jax.jit(workload(name).proxy.losses)(parameters, (x, y))
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_convolutional_network_equals_one_of_jax_own_convolutions(cifar_folder):  # noqa: F811
    """Three channels, biases that are not 0: convolution, ReLU, 2x2 maximum, twice, then a dense layer."""
    rng = np.random.default_rng(0)
    proxy = workload("cifar10-cnn", {"valid_samples": 0, "width": 4, "model.hidden": ()}, cifar_folder).proxy
    start = proxy.init(0)
    parameters = jax.tree.map(lambda w: w + 0.1 * rng.normal(size=w.shape).astype(np.float32), start)
    images, labels = proxy.valid
    x = images.reshape(-1, 32, 32, 3)
    for layer in parameters["conv"]:
        filters = layer["w"].reshape(3, 3, x.shape[-1], -1)
        x = jax.lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.lax.reduce_window(jax.nn.relu(x + layer["b"]), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    (dense,) = parameters["dense"]
    scores = x.reshape(len(x), -1) @ dense["w"] + dense["b"]
    wanted = jax.nn.logsumexp(scores, axis=1) - scores[np.arange(len(x)), labels]
    np.testing.assert_allclose(jax.jit(proxy.losses)(parameters, (images, labels)), wanted, rtol=1e-4)


def test_long_short_term_memory_is_its_equations():
    """Against numpy, gate by gate and row by row."""
    proxy = workload("digits-lstm", {"width": 3}).proxy
    parameters = proxy.init(1)
    parameters["cell"]["b"] = np.linspace(-1, 1, 12).astype(np.float32)
    x, y = (np.asarray(a[:5]) for a in proxy.train)
    h = c = np.zeros((5, 3))
    for row in range(8):
        gates = np.hstack([x.reshape(5, 8, 8)[:, row], h]) @ parameters["cell"]["w"] + parameters["cell"]["b"]
        i, f, g, o = gates[:, :3], gates[:, 3:6], gates[:, 6:9], gates[:, 9:]
        c = c / (1 + np.exp(-f - 1)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
    scores = h @ parameters["out"]["w"] + parameters["out"]["b"]
    wanted = np.log(np.exp(scores).sum(1)) - scores[np.arange(5), y]
    np.testing.assert_allclose(jax.jit(proxy.losses)(parameters, (x, y)), wanted, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["mnist-mlp", "rlp-mnist"])
def test_mnist_workloads(name, mnist_folder):  # noqa: F811
    made = workload(name, {"valid_samples": 0}, mnist_folder)
    assert made.samples == 30
    assert size(made.proxy) == 203_530
    assert jax.eval_shape(made.proxy.losses, made.proxy.init(0), made.proxy.valid).shape == (10,)


def test_cifar10_workload(cifar_folder):  # noqa: F811
    made = workload("cifar10-cnn", {"valid_samples": 0, "width": 4}, str(cifar_folder))
    losses = jax.jit(made.proxy.losses)(made.proxy.init(0), made.proxy.valid)
    assert losses.shape == (4,)
    assert np.isfinite(losses).all()
    assert size(made.proxy) == 9 * 3 * 4 + 4 + 9 * 4 * 8 + 8 + 8 * 8 * 8 * 64 + 64 + 64 * 10 + 10
    assert made.samples == 20


def test_libsvm_workloads(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("".join(f"{i % 3} 1:{i % 3} 2:0.5\n" for i in range(30)))
    for name in ("libsvm-logistic", "libsvm-svm"):
        made = workload(name, data=path)
        assert (made.samples, made.proxy.train[0].shape) == (24, (24, 2))
        zero = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
        np.testing.assert_allclose(
            jax.jit(made.proxy.losses)(zero, made.proxy.valid), {"libsvm-svm": 1.0}.get(name, np.log(3)), rtol=1e-6
        )


def test_a_workload_learns_from_arrays_of_the_user(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(50, 3)), y=rng.integers(0, 2, 50))
    (tmp_path / "mine.toml").write_text(
        '[mine]\nsummary = "mine"\nsource = "mine"\nbatch_size = 4\nlearning_rate = 0.1\n'
        'model = { kind = "logistic" }\ndata = { kind = "npz" }\n[mine.demand]\nmodel_bytes = 1e3\nsample_seconds = 0.01\n'
    )
    made = workload("mine", data=tmp_path / "mine.npz", tables=load_workloads(tmp_path / "mine.toml"))
    assert (made.samples, made.proxy.train[0].shape) == (40, (40, 3))
    text = (tmp_path / "mine.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"npz"', '"numpy"'))
    with pytest.raises(ValueError, match=r": data\.kind: invalid value 'numpy'\. Choose one of breast-cancer, .*npz, "):
        load_workloads(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text(text.replace('"npz"', '"npz", path = "mine.npz"'))
    with pytest.raises(ValueError, match=r"data has no key 'path'; choose one of kind, valid_share, seed\."):
        load_workloads(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text(text.replace('"logistic"', '"mlp", hiden = [3]'))
    with pytest.raises(ValueError, match=r"model has no key 'hiden'; did you mean hidden\?"):
        load_workloads(tmp_path / "mine.toml")


def test_a_missing_and_a_superfluous_data_path_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"Cannot make workload 'mnist-mlp': it reads files; point to them by data = 'PATH' under \[wor"
    ):
        workload("mnist-mlp")
    with pytest.raises(ValueError, match=r"Cannot use the data .* in workload 'digits-mlp': it reads no files"):
        workload("digits-mlp", data=tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        workload("mnist-mlp", data=tmp_path / "none")


def test_a_copy_of_mnist_that_is_too_small_is_refused(mnist_folder):  # noqa: F811
    with pytest.raises(ValueError, match=r"Cannot validate on 2000 samples: there are 10; 0 takes all"):
        workload("mnist-mlp", data=mnist_folder)


# ------------------------------------------------------------------------------------------------------------- overrides


def test_equal_models_share_their_functions_and_proxies():
    plain = workload("digits-mlp").proxy
    assert workload("digits-mlp", {"optimizer": "adam", "demand.model_bytes": 5e6, "hidden": (256,)}).proxy is plain
    other = workload("digits-mlp", {"data.seed": 1}).proxy
    assert other is not plain
    assert (other.init, other.losses, other.correct) == (plain.init, plain.losses, plain.correct)
    assert workload("digits-mlp", {"hidden": [8]}).proxy.losses is workload("digits-mlp", {"hidden": [8]}).proxy.losses


@pytest.mark.parametrize(
    "overrides",
    [
        {"model_bytes": 5e6, "hidden": [32, 16], "fraction": 0.5, "optimizer": "adam"},
        {"demand.model_bytes": 5e6, "model.hidden": (32, 16), "data.fraction": 0.5, "optimizer": "adam"},
        {
            "demand": {"model_bytes": 5_000_000},
            "model": {"hidden": [32, 16]},
            "data": {"fraction": 0.5},
            "optimizer": "adam",
        },
    ],
)
def test_overrides_in_every_spelling(overrides):
    made = workload("digits-mlp", overrides)
    assert (made.demand.model_bytes, made.optimizer, made.samples) == (5e6, "adam", 718)
    assert made.demand.sample_seconds == workload("digits-mlp").demand.sample_seconds
    assert size(made.proxy) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10


def test_no_hidden_layer_is_softmax_regression():
    assert size(workload("digits-mlp", {"hidden": []}).proxy) == 650


def test_timing_only_samples_can_be_overridden():
    assert workload("cruise-nmf", {"samples": 1000}).samples == 1000


@pytest.mark.parametrize(
    ("name", "overrides", "told"),
    [
        ("digits-mpl", {}, r"No workload 'digits-mpl': did you mean digits-mlp"),
        ("%%", {}, r"No workload '%%': choose one of digits-mlp, "),
        ("digits-mlp", {"hiden": [2]}, r"Cannot override 'hiden' of workload 'digits-mlp': did you mean hidden\?"),
        ("digits-mlp", {"demand": {"model_byte": 2}}, r"'demand\.model_byte' .* did you mean demand\.model_bytes"),
        ("digits-mlp", {"%%": 2}, r"it has samples, batch_size, .*model\.hidden"),
        ("cruise-nmf", {"hidden": [2]}, r"Cannot override 'hidden' of workload 'cruise-nmf'"),
        ("ratings-mf", {"rank": 2}, r"say model\.rank or data\.rank"),
        ("digits-mlp", {"hidden": "wide"}, r"with hidden = 'wide': Expected `array`, got `str` - at `\$\.model\.hidden`"),
        ("digits-mlp", {"hidden": [0]}, r"Expected `int` >= 1 - at `\$\.model\.hidden\[0\]`"),
        ("digits-mlp", {"model_bytes": "5 MB"}, r"Expected `float`, got `str` - at `\$\.demand\.model_bytes`"),
        ("digits-mlp", {"model_bytes": -5}, r"cannot ask model_bytes -5\.0"),
        ("digits-mlp", {"batch_size": 0}, r"Expected `int` >= 1 - at `\$\.batch_size`"),
        ("digits-mlp", {"optimizer": "adamm"}, r"with optimizer 'adamm': choose one of sgd, momentum, "),
        ("digits-mlp", {"aggregation": "median"}, r"choose one of each, sum, mean"),
        ("digits-mlp", {"samples": 3}, r"Cannot set samples of workload 'digits-mlp': they are those of its data"),
        ("digits-mlp", {"fraction": 2.0}, r"Cannot train on a fraction 2\.0"),
        ("digits-mlp", {"model.kind": "cnn"}, r"Cannot override 'model\.kind'"),
    ],
)
def test_wrong_names_and_values(name, overrides, told):
    with pytest.raises(ValueError, match=told):
        workload(name, overrides)


def test_models_must_fit_their_data():
    from simulators.workloads.datasets import breast_cancer, digits, ratings
    from simulators.workloads.model_tables import Cnn, Factorisation, Mlp
    from simulators.workloads.models import make_proxy

    with pytest.raises(ValueError, match=r"Cannot convolve samples of shape \(30,\)"):
        make_proxy(Cnn(), breast_cancer())
    with pytest.raises(ValueError, match="Cannot classify ratings"):
        make_proxy(Mlp(), ratings(count=100))
    with pytest.raises(ValueError, match="Cannot factorise data of 10 classes"):
        make_proxy(Factorisation(), digits())
