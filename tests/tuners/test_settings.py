"""Spaces: drawn values can be set and read back, and values that a scenario does not free are refused."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuners.settings import Choice, Integer, Node, Real, Rejected, Setting
from tuners.space import Space

NODES = tuple(Node(name, "toy", 4, ("cpu", "gpu"), 1e9, 1e9) for name in "abcd")
BASE = Setting(workers=("a", "b"), servers=("c", "d"), options=(("fold", 1), ("jit", False)), learning_rate=0.1)
SEEDS = st.integers(0, 2**32 - 1)


def space(*knobs, base=BASE):
    return Space(base, NODES, knobs)


def drawn(s, seed):
    return s.sample(np.random.default_rng(seed))


# ------------------------------------------------------------------------------------------------------------------ knobs


@given(SEEDS, st.floats(1e-6, 1e3), st.floats(1.0, 1e6), st.booleans())
def test_reals_stay_in_their_range(seed, low, factor, log):
    knob = Real("momentum", low, low * factor, log)
    assert knob.contains(knob.sample(np.random.default_rng(seed)))


@pytest.mark.parametrize(
    ("knob", "near"),
    [
        (Real("momentum", 0, 1), [0.0, 0.26, 1.0]),
        (Integer("batch_size", 1, 3), [1, 1, 3]),
        (Choice("staleness", (0, 4, 16)), [0, 0, 4]),
    ],
    ids=["real", "integer", "choice"],
)
def test_a_knob_knows_its_nearest_value(knob, near):
    found = [knob.nearest(value) for value in (-2.0, 0.26, 7.5)]
    assert found == near
    assert all(knob.contains(value) for value in found)


def test_a_knob_of_names_has_no_nearest_value():
    with pytest.raises(ValueError, match="'policy' near 3: its options are"):
        Choice("policy", ("asp", "bsp")).nearest(3.0)


@given(SEEDS, st.integers(1, 100), st.integers(0, 10_000), st.booleans())
def test_integers_stay_in_their_range(seed, low, width, log):
    knob = Integer("batch_size", low, low + width, log)
    assert knob.contains(knob.sample(np.random.default_rng(seed)))


def test_logarithmic_knobs_spread_over_the_logarithm():
    rng = np.random.default_rng(3)
    rates = np.log10([Real("learning_rate", 1e-4, 1.0, log=True).sample(rng) for _ in range(4000)])
    # Uniform on [-4, 0]: mean -2, standard error 4 / sqrt(12 n) = 0.018.
    assert rates.mean() == pytest.approx(-2, abs=4 * 0.018)
    sizes = np.array([Integer("batch_size", 1, 4, log=True).sample(rng) for _ in range(4000)])
    expected = np.log([1.5 / 0.5, 2.5 / 1.5, 3.5 / 2.5, 4.5 / 3.5]) / np.log(9)
    assert np.bincount(sizes, minlength=5)[1:] / 4000 == pytest.approx(expected, abs=4 * 0.5 / np.sqrt(4000))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        (Integer("batch_size", 1, 8), 2.0),
        (Integer("batch_size", 1, 8), True),
        (Integer("batch_size", 1, 8), 9),
        (Real("momentum", 0, 0.9), "0.5"),
        (Real("momentum", 0, 0.9), float("nan")),
        (Choice("transfer_bits", (16, 32)), 16.0),
        (Choice("option/jit", (False, True)), 0),
    ],
)
def test_a_knob_holds_no_value_of_another_type_or_range(knob, value):
    assert not knob.contains(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Real("momentum", 1.0, 0.0),
        lambda: Real("learning_rate", 0.0, 1.0, log=True),
        lambda: Choice("policy", ()),
        lambda: Choice("policy", ("asp", "asp")),
        lambda: space(Real("rate", 0, 1)),
        lambda: space(Choice("role/z", ("worker",))),
        lambda: space(Integer("staleness", 0, 1), Integer("staleness", 0, 2)),
        lambda: space().setting({"momentum": 0.5}),
    ],
)
def test_knobs_that_make_no_sense_are_refused_with_a_sentence(make):
    with pytest.raises(ValueError, match=r"\w+ .*\.$"):
        make()


# ------------------------------------------------------------------------------------------------------------- round trip

PLAIN = (
    Choice("policy", ("asp", "bsp", "ssp")),
    Choice("transfer_bits", (16, 32)),
    Choice("option/jit", (False, True)),
    Integer("batch_size", 1, 64, log=True),
    Integer("staleness", 0, 8),
    Integer("option/fold", 1, 100),
    Real("learning_rate", 1e-4, 10.0, log=True),
    Real("momentum", 0.0, 0.9),
)
ROLES = tuple(Choice(f"role/{n.name}", ("worker", "server", "both", "idle")) for n in NODES)


@given(SEEDS)
@pytest.mark.parametrize("roles", [(Integer("worker_count", 1, 3),), ROLES], ids=["count", "roles"])
def test_values_are_read_back_from_the_setting_they_made(roles, seed):
    s = space(*PLAIN, *roles)
    values = drawn(s, seed)
    assert s.values(s.setting(values)) == values


@given(SEEDS)
def test_whatever_is_drawn_from_plain_knobs_is_admitted(seed):
    s = space(*PLAIN, Integer("worker_count", 1, 3))
    s.check(s.setting(drawn(s, seed)))


@given(SEEDS)
def test_drawn_roles_are_refused_only_without_workers_or_servers(seed):
    s = space(*ROLES)
    setting = s.setting(drawn(s, seed))
    if setting.workers and setting.servers:
        s.check(setting)
    else:
        with pytest.raises(Rejected, match="Cannot run with no"):
            s.check(setting)


def test_drawn_roles_without_workers_or_servers_are_refused_where_blocks_have_owners():
    s = Space(BASE, NODES, (*ROLES, Choice("block/0", ("a", "b")), Choice("block/1", ("c", "d"))), blocks=2)
    values = s.values(BASE)
    for role in ("worker", "server", "idle"):
        with pytest.raises(Rejected, match="Cannot run with no"):
            s.check(s.setting(values | {name: role for name in values if name.startswith("role/")}))


@given(SEEDS)
def test_weights_become_shares_in_the_same_proportion(seed):
    weights = tuple(
        Real(f"{family}/{n}", 0.1, 1.0) for family, n in zip(["data_share"] * 2 + ["model_share"] * 2, "abcd", strict=True)
    )
    s = space(*weights)
    values = drawn(s, seed)
    setting = s.setting(values)
    s.check(setting)
    assert sum(setting.data_shares) == pytest.approx(1)
    assert setting.data_shares[0] / setting.data_shares[1] == pytest.approx(values["data_share/a"] / values["data_share/b"])
    assert s.setting(s.values(setting)).model_shares == pytest.approx(setting.model_shares)


def test_samples_per_device_make_a_row_per_worker():
    s = space(
        Integer("load/a/0", 0, 32), Integer("load/a/1", 0, 32), Integer("load/b/1", 0, 32), Integer("worker_count", 1, 3)
    )
    values = {"load/a/0": 4, "load/a/1": 12, "load/b/1": 5, "worker_count": 2}
    setting = s.setting(values)
    assert setting.loads == ((4, 12), (0, 5))
    assert s.values(setting) == values
    s.check(setting)
    with pytest.raises(Rejected, match="at least one sample"):
        s.check(replace(setting, loads=((0, 0), (0, 5))))


def test_numbers_that_no_system_counts_with_are_refused():
    s = space(Integer("batch_size", 1, 2**31 - 1))
    with pytest.raises(Rejected, match=r"Cannot set batch_size to 2147483648: .* at most 2147483647"):
        s.check(replace(BASE, batch_size=2**31))
    with pytest.raises(Rejected, match="Cannot use loads"):
        s.check(replace(BASE, loads=((2**30, 2**30), (1, 1))))


def test_new_roles_start_with_even_shares():
    base = replace(BASE, data_shares=(0.7, 0.3))
    s = space(Integer("worker_count", 1, 3), base=base)
    assert s.setting({"worker_count": 2}).data_shares == (0.7, 0.3)
    assert s.setting({"worker_count": 3}).data_shares == ()
    s.check(s.setting({"worker_count": 3}))


# ---------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"workers": ()}, "no workers"),
        ({"servers": ()}, "no servers"),
        ({"workers": ("a", "a")}, "named twice"),
        ({"workers": ("a", "z")}, "Cannot use node 'z'"),
        ({"data_shares": (0.5, 0.4)}, "sum to 1"),
        ({"data_shares": (1.5, -0.5)}, "none negative"),
        ({"data_shares": (1.0,)}, "give 2 shares"),
        ({"data_shares": (float("nan"), 0.5)}, "sum to 1"),
        ({"loads": ((1, 1),)}, "each worker a row"),
        ({"loads": ((1,), (1,))}, "each worker a row"),
        ({"batch_size": 0}, "at least 1"),
        ({"staleness": -1}, "at least 0"),
        ({"transfer_bits": 8}, "choose 16 or 32"),
        ({"learning_rate": float("nan")}, "must not be negative"),
        ({"learning_rate": float("inf")}, "must not be negative or infinite"),
        ({"momentum": 1.5}, "momentum lies in"),
        ({"inter_threads": 2}, "holds it at 0"),
        ({"policy": "gossip"}, "this scenario allows"),
        ({"learning_rate": 11.0}, "0.0001 to 10.0"),
        ({"options": (("jit", False),)}, "option/fold"),
        ({"options": (*BASE.options, ("xla", 1))}, "does not free it"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_reason(change, reason):
    s = space(*PLAIN, *ROLES)
    with pytest.raises(Rejected, match=reason):
        s.check(replace(BASE, **change))


def test_a_node_whose_role_is_held_keeps_it():
    s = space(Choice("role/a", ("worker", "idle")))
    s.check(replace(BASE, workers=("b",)))
    with pytest.raises(Rejected, match="node 'c' a both"):
        s.check(replace(BASE, workers=("a", "b", "c")))
    with pytest.raises(Rejected, match="role/a"):
        s.check(replace(BASE, servers=("a", "c", "d"), workers=("b",)))


def test_scalars_of_numpy_become_those_of_python():
    made = Setting(
        workers=(np.str_("a"), "b"),
        servers=("c",),
        batch_size=np.int64(4),
        learning_rate=np.float32(0.5),
        policy=np.str_("asp"),
        loads=((np.int32(2), 2), (1, 3)),
        data_shares=(np.float64(0.5), 0.5),
        options=(("xla", np.bool_(True)),),
    )
    plain = Setting(
        workers=("a", "b"),
        servers=("c",),
        batch_size=4,
        learning_rate=0.5,
        policy="asp",
        loads=((2, 2), (1, 3)),
        data_shares=(0.5, 0.5),
        options=(("xla", True),),
    )
    assert repr(made) == repr(plain)
    s = space(Choice("batch_size", (2, 4)), Integer("staleness", 0, 3))
    s.check(replace(BASE, batch_size=np.int64(4), staleness=np.int64(2)))
    assert s.setting({"batch_size": np.int64(4)}) == replace(BASE, batch_size=4)


def test_the_number_of_workers_is_bounded_as_the_scenario_says():
    s = space(Integer("worker_count", 2, 3))
    s.check(replace(BASE, workers=("d", "a", "b"), servers=("c",)))
    with pytest.raises(Rejected, match="worker_count to 1"):
        s.check(replace(BASE, workers=("a",), servers=("b", "c", "d")))


@pytest.mark.parametrize("count", [-1, 0, 4, 99, 2.5, float("nan"), "2"])
def test_a_count_of_workers_that_names_no_nodes_is_refused(count):
    # -1 would be all nodes but the last, as a slice has it: a legal setting that nobody asked for.
    s = space(Integer("worker_count", 1, 3))
    with pytest.raises(Rejected, match=f"^Cannot set worker_count to {count!r}: this scenario allows 1 to 3"):
        s.setting({"worker_count": count})


@pytest.mark.parametrize("count", [2, 2.0, np.int64(2), np.float32(2)])
def test_a_count_of_workers_may_be_any_whole_number(count):
    assert space(Integer("worker_count", 1, 3)).setting({"worker_count": count}).workers == ("a", "b")


@given(SEEDS)
def test_without_knobs_only_the_base_is_admitted(seed):
    rng = np.random.default_rng(seed)
    s = space()
    s.check(BASE)
    with pytest.raises(Rejected, match="holds it at"):
        s.check(replace(BASE, batch_size=17 + int(rng.integers(100))))


# ------------------------------------------------------------------------------------------------------- other libraries


@given(SEEDS)
def test_optuna_draws_what_the_space_admits(seed):
    s = space(*PLAIN, Integer("worker_count", 1, 3))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed % 2**31))
    trial = study.ask(s.to_optuna())
    assert set(trial.params) == set(s.names)
    setting = s.setting(trial.params)
    s.check(setting)
    assert s.values(setting) == trial.params


def test_a_misspelt_knob_is_told_what_it_resembles():
    base = Setting(workers=("n0",), servers=("n1",))
    with pytest.raises(ValueError, match=r"Knob 'learnin_rate' sets nothing.* Did you mean learning_rate\?"):
        Space(base, (), (Real("learnin_rate", 0.1, 1.0),))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("worker/n0", r"none of worker_count, role/NODE, load/NODE/DEVICE, data_share/NODE"),
        ("workers", r"no field of Setting that can be free, and none of worker_count, role/NODE"),
        ("role/n7", r"write role/NODE, with a node of this job\."),
        ("role/n0/0", r"write role/NODE"),
        ("load/n0", r"write load/NODE/DEVICE, with a node of this job, and with the number of one of its devices"),
        ("load/n0/1", r"write load/NODE/DEVICE"),
    ],
)
def test_a_knob_that_sets_nothing_is_told_which_names_there_are(name, form):
    nodes = tuple(Node(n, "box", 1, ("cpu",), 1e6, 1e9) for n in ("n0", "n1"))
    with pytest.raises(ValueError, match=f"Knob '{name}' sets nothing: .*{form}"):
        Space(Setting(workers=("n0",), servers=("n1",)), nodes, (Real(name, 0.1, 1.0),))


# ------------------------------------------------------------------------------------------------------- machines are gone


def test_a_space_among_fewer_nodes_has_no_knobs_of_others_and_the_setting_in_force():
    roles = [Choice(f"role/{n.name}", ("worker", "server", "idle")) for n in NODES[1:]]
    whole = space(*roles, Choice("policy", ("asp", "bsp")))
    in_force = replace(BASE, workers=("b",), learning_rate=0.2)
    left = whole.among(NODES[1:3], in_force)
    assert left.names == ("role/b", "role/c", "policy")
    assert left.setting({"policy": "bsp"}) == replace(in_force, policy="bsp")
    assert whole.among(NODES, in_force).setting({"policy": "bsp"}) == replace(BASE, policy="bsp")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"worker_count": 3}, r"'worker_count': it is a knob, and `job.space.setting\(\{'worker_count': \.\.\.\}\)` makes"),
        ({"load/a": 3}, r"'load/a': it is a knob"),
        ({"lr": 3}, "'lr': it has workers, servers"),
        ({"batchsize": 3}, r"'batchsize': did you mean batch_size\.$"),
    ],
)
def test_a_setting_says_what_to_write_for_a_name_that_is_no_field(given, said):
    with pytest.raises(TypeError, match=f"Cannot make a setting with {said}"):
        replace(BASE, **given)


@pytest.mark.parametrize("name", [f.name for f in fields(Setting)])
def test_a_setting_says_what_to_write_for_a_value_of_another_type(name):
    with pytest.raises(TypeError, match=f"Cannot make a setting with {name} {{}}: give a "):
        replace(BASE, **{name: {}})


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("learning_rate", r"write replace\(setting, learning_rate=2\)"),
        ("worker_count", r"worker_count is a knob, and job.space.setting\(\{'worker_count': 2\}\) makes"),
        ("lr", r"replace\(setting, \.\.\.\) makes another one"),
    ],
)
def test_a_setting_never_changes_and_says_what_to_write(name, way):
    with pytest.raises(FrozenInstanceError, match=f"Cannot set {name} of a setting, which never changes: {way}"):
        setattr(BASE, name, 2)


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        ({"policy": "bsp"}, True),
        ({"policy": "ssp", "staleness": 0}, True),
        ({"policy": "ssp", "staleness": 1}, False),
        ({"policy": "quorum"}, True),
        ({"policy": "quorum", "quorum": 2}, True),
        ({"policy": "quorum", "quorum": 1}, False),
        ({"policy": "admit", "staleness": 0}, False),
        ({"policy": "asp"}, False),
    ],
)
def test_a_setting_knows_whether_all_its_workers_wait_for_each_other(change, waits):
    assert replace(BASE, **change).waits_for_all == waits


@pytest.mark.parametrize("weights", [False, True], ids=["samples", "weights"])
def test_a_worker_that_is_about_to_leave_gets_no_load(weights):
    """Of held roles, the setting in force still names it; a search over loads ended with a KeyError."""
    nodes = tuple(Node(name, "toy", 2, ("cpu",), 1e6, 1e9) for name in "abc")
    base = Setting(workers=("a", "b"), servers=("c",), loads=((8,), (8,)) if weights else ())
    loads = tuple(Real(f"load/{n}/0", 0.0, 1.0) if weights else Integer(f"load/{n}/0", 1, 16) for n in "abc")
    space = Space(base, nodes, loads)
    left = space.among((nodes[0], nodes[2]), base)
    made = left.setting({"load/a/0": 1})
    assert (made.workers, len(made.loads)) == (("a",), 1)
    with pytest.raises(Rejected):
        space.check(made, base)  # roles are held: the search waits until the machine is gone
