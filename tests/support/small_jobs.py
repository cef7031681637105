"""Small jobs for tests: models that numpy can check, machines of a few bytes per second, and one learning job."""

import math

import jax.numpy as jnp
import numpy as np

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.cluster.profiles import Device, NodeType
from simulators.jobs import JobSpec
from simulators.reconfiguration.costs import Costs
from simulators.system import SimulatedSystem
from simulators.workloads.workload import Demand, Proxy, Workload
from tuners.actions import Pushes, Setting, Target
from tuners.settings import Choice, Integer

# ---------------------------------------------------------------------------------------------------------------- models


class Softmax:
    """Softmax regression twice: as the proxy that the engine trains, and as plain numpy in float64."""

    def __init__(self, features=6, classes=3):
        rng, samples, valid = np.random.default_rng(0), 120, 40
        x = rng.normal(size=(samples + valid, features)).astype(np.float32)
        y = np.argmax(x @ rng.normal(size=(features, classes)), axis=1).astype(np.int32)
        self.first = {
            "w": rng.normal(size=(features, classes)).astype(np.float32) * np.float32(0.1),
            "b": np.zeros(classes, np.float32),
        }
        self.train, self.valid = (x[:samples], y[:samples]), (x[samples:], y[samples:])

    def proxy(self):
        return Proxy(
            lambda key: {k: jnp.asarray(v) for k, v in self.first.items()}, _losses, _correct, self.train, self.valid
        )

    @staticmethod
    def gradient(parameters, rows):
        x, y = np.asarray(rows[0], np.float64), rows[1]
        scores = x @ parameters["w"] + parameters["b"]
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        loss = float(np.mean(-np.log(chances[np.arange(len(y)), y])))
        chances[np.arange(len(y)), y] -= 1.0
        return loss, {"w": x.T @ chances / len(y), "b": chances.mean(axis=0)}


def _scores(parameters, x):
    return x @ parameters["w"] + parameters["b"]


def _losses(parameters, batch):
    scores = _scores(parameters, batch[0])
    top = jnp.max(scores, axis=1, keepdims=True)
    right = jnp.take_along_axis(scores, batch[1][:, None], axis=1)[:, 0]
    return jnp.log(jnp.sum(jnp.exp(scores - top), axis=1)) + top[:, 0] - right


def _correct(parameters, batch):
    return (jnp.argmax(_scores(parameters, batch[0]), axis=1) == batch[1]).astype(jnp.float32)


class Quadratic:
    """h / 2 (x - centre)^2 with a centre per sample, so that a mini-batch is known by its gradient."""

    def __init__(self, curvature=1.0, centres=(0.0,), first=1.0):
        centres = np.asarray(centres, np.float32)
        self.curvature, self.first = curvature, {"x": np.float32(first)}
        self.train = self.valid = (centres, np.full(len(centres), curvature, np.float32))

    def proxy(self):
        return Proxy(
            lambda key: {"x": jnp.asarray(self.first["x"])}, _square_losses, _nothing_correct, self.train, self.valid
        )

    @staticmethod
    def gradient(parameters, rows):
        gap = parameters["x"] - np.asarray(rows[0], np.float64)
        h = np.asarray(rows[1], np.float64)
        return float(np.mean(h / 2 * gap**2)), {"x": np.mean(h * gap)}


def _square_losses(parameters, batch):
    return batch[1] / 2 * (parameters["x"] - batch[0]) ** 2


def _nothing_correct(parameters, batch):
    return jnp.full(batch[0].shape[0], jnp.nan, jnp.float32)


# -------------------------------------------------------------------------------------------------------- small clusters


def machine(nic=100.0, service=math.inf, speed=1.0, name="box", cores=1):
    """A node type with one processor; bytes and seconds are as small as is easy to think about."""
    return NodeType(name, cores, 1e9, nic, (Device("cpu", speed),), "made up", service)


def job(demand=None, model=None, **changed):
    """A workload of `demand`, which `model` (none: timing-only) learns."""
    demand = demand or Demand(model_bytes=100.0, sample_seconds=0.25)
    proxy = model.proxy() if model else None
    samples = len(model.train[0]) if model else 120
    return Workload(**({"name": "job", "demand": demand, "proxy": proxy, "samples": samples} | changed))


def system(cluster, workload, setting, conditions, seed=0, **changed):
    """The same job in the simulator."""
    rules = {"target": Target("clocks", 1e9), "budget_seconds": 1e12, "evaluate_clocks": 10, "installs_policies": True}
    facts = {"cluster": cluster, "workload": workload, "start": setting, "conditions": conditions, "seed": seed}
    return SimulatedSystem(JobSpec(name="judged", **facts, **(rules | changed)))


def branch(simulated, number=0):
    """What a tuner cannot see: one branch's parameters, optimizer slots and gradients, as the engine holds them."""
    return simulated.branches[number].state


# ---------------------------------------------------------------------------------------------------- one learning job

NAMES = tuple("abcde")
MODEL = Softmax()
SMALL = Demand(model_bytes=100.0, sample_seconds=0.25, apply_seconds=0.05)
CHEAP = Costs(
    restart_seconds=3.0, checkpoint_bytes_per_second=50.0, restore_bytes_per_second=25.0, fork_bytes_per_second=200.0
)
KNOBS = (
    *(Choice(f"role/{n}", ("worker", "server", "both", "idle")) for n in NAMES),
    Choice("policy", ("bsp", "asp", "ssp")),
    Integer("staleness", 0, 3),
    Choice("batch_size", (4, 8)),
    Integer("intra_threads", 0, 2),
)


def cluster(discipline="maxmin", **network):
    kinds = [machine(100.0 - 7 * i, speed=1.0 + i / 3, cores=2) for i in range(5)]
    return Cluster(tuple(zip(NAMES, kinds, strict=True)), discipline, **network)


def start(**changed):
    plain = {"workers": NAMES[:3], "servers": NAMES[3:], "batch_size": 8, "learning_rate": 0.1}
    return Setting(**(plain | changed))


def learning(conditions=None, seed=0, setting=None, demand=SMALL, **changed):
    """The job of most tests: softmax regression, every push applied, on five nodes."""
    rules = {"knobs": KNOBS, "costs": CHEAP} | changed
    return system(cluster(), job(demand, MODEL), setting or start(), conditions or Conditions(), seed, **rules)


def together(windows):
    return Pushes(*(np.concatenate(column) for column in zip(*(w.pushes for w in windows), strict=True)))


def assert_same_bytes(one, other):
    for name, a, b in zip(Pushes._fields, one, other, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def plain_job(**changed):
    """Three alike workers and two servers that learn MODEL: what `system` takes first."""
    cluster = Cluster(tuple((n, machine()) for n in NAMES))
    setting = Setting(**({"workers": NAMES[:3], "servers": NAMES[3:], "batch_size": 8, "learning_rate": 0.1} | changed))
    return cluster, job(model=MODEL), setting, Conditions()
