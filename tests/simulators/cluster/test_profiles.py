"""Node types: published figures, durations, and the errors for wrong files."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.cluster import profiles as module
from simulators.cluster.profiles import Device, NodeType, device_seconds, load_profiles, node_seconds, profile, profiles
from simulators.workloads.workload import Demand, OptionEffect

DEMAND = Demand(model_bytes=1e6, sample_seconds=0.1, fixed_seconds=0.5, serial_fraction=0.2, aggregate_seconds=0.25)

TABLE = """
[mine]
cores = 4
memory_bytes = 8e9
nic_bytes_per_second = 125e6
devices = [{ kind = "cpu", speed = 1.5 }]
source = "my rack"
"""


def test_public_names_exist():
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    ("name", "cores", "memory_gb", "gbit_per_second"),
    [
        ("r4.xlarge", 4, 30.5, 1.25),
        ("r4.4xlarge", 16, 122, 5),
        ("m4.large", 2, 8, 0.5),
        ("m4.xlarge", 4, 16, 1),
        ("e5-2620v4", 16, 64, 10),
        ("titan-x", 16, 64, 40),
        ("opteron-8354", 16, 32, 20),
        ("g2.2xlarge", 8, 15, 1.5),
        ("c4.2xlarge", 8, 15, 1),
        ("c4.4xlarge", 16, 30, 2),
        ("c4.8xlarge", 36, 60, 8.5),
    ],
)
def test_published_specifications(name, cores, memory_gb, gbit_per_second):
    found = profile(name)
    assert (found.name, found.cores) == (name, cores)
    assert found.memory_bytes == memory_gb * 1e9
    assert found.nic_bytes_per_second == gbit_per_second * 125e6


def test_every_type_names_its_source_and_can_compute():
    for name, found in profiles().items():
        assert found.name == name
        assert len(found.source) > 20
        assert any(d.speed > 0 for d in found.devices)


def test_one_reference_core_is_that_of_tensorflowonline():
    assert profile("e5-2620v4").devices == (Device(kind="cpu", speed=1.0),)


def test_profiles_gives_a_copy():
    profiles().clear()
    assert "r4.xlarge" in profiles()


def test_unknown_name_gets_near_matches():
    with pytest.raises(ValueError, match=r"No node type 'r4xlarge': did you mean r4\.xlarge"):
        profile("r4xlarge")
    with pytest.raises(ValueError, match=r"No node type '%%%': choose one of r4\.xlarge, "):
        profile("%%%")


# ------------------------------------------------------------------------------------------------------------- durations


def test_no_samples_take_no_time():
    assert device_seconds(Device(kind="cpu", speed=0.0), DEMAND, 0, 4) == 0.0


def test_cpu_follows_amdahl():
    core = Device(kind="cpu", speed=2.0)
    assert device_seconds(core, DEMAND, 10, 1) == pytest.approx(0.5 + 10 * 0.1 / 2)
    assert device_seconds(core, DEMAND, 10, 4) == pytest.approx(0.5 + 10 * 0.1 / 2 * (0.2 + 0.8 / 4))


def test_gpu_ignores_threads_and_saturates():
    gpu = Device(kind="gpu", speed=50.0, saturation_samples=8.0)
    assert device_seconds(gpu, DEMAND, 8, 1) == device_seconds(gpu, DEMAND, 8, 16) == pytest.approx(0.5 + 0.1 * 16 / 50)
    # At the saturation load the rate is half of its peak.
    work = msgspec.structs.replace(DEMAND, fixed_seconds=0.0)
    assert 8 / device_seconds(gpu, work, 8, 1) == pytest.approx(0.5 * 50.0 / 0.1)


@given(st.integers(1, 1000), st.integers(1, 64), st.floats(0.1, 100), st.floats(0, 1))
def test_more_samples_take_longer_and_more_threads_never_do(samples, threads, speed, serial):
    demand = msgspec.structs.replace(DEMAND, serial_fraction=serial)
    device = Device(kind="cpu", speed=speed)
    assert device_seconds(device, demand, samples, threads) < device_seconds(device, demand, samples + 1, threads)
    assert device_seconds(device, demand, samples, threads + 1) <= device_seconds(device, demand, samples, threads) + 1e-12


def test_wrong_loads_are_refused():
    with pytest.raises(ValueError, match=r"Cannot compute 3 samples on a cpu of speed 0: give this device no load\."):
        device_seconds(Device(kind="cpu", speed=0.0), DEMAND, 3, 1)
    with pytest.raises(ValueError, match="Cannot compute -1 samples"):
        device_seconds(Device(kind="cpu", speed=1.0), DEMAND, -1, 1)
    with pytest.raises(ValueError, match="on 0 threads"):
        device_seconds(Device(kind="cpu", speed=1.0), DEMAND, 1, 0)
    with pytest.raises(ValueError, match=r"Cannot put loads \(1,\) on a g2\.2xlarge: give one count per device, 2 in all"):
        node_seconds(profile("g2.2xlarge"), DEMAND, (1,))


def test_node_waits_for_its_slowest_device_and_aggregates_only_then():
    node = profile("g2.2xlarge")
    gpu, cpu = (device_seconds(d, DEMAND, n, 8) for d, n in zip(node.devices, (60, 4), strict=True))
    assert node_seconds(node, DEMAND, (60, 4)) == (max(gpu, cpu) + 0.25, (gpu, cpu))
    assert node_seconds(node, DEMAND, (60, 0)) == (gpu, (gpu, 0.0))


def test_threads_default_to_cores_and_are_at_most_cores():
    node = profile("r4.xlarge")
    assert node_seconds(node, DEMAND, (16,)) == node_seconds(node, DEMAND, (16,), 4) == node_seconds(node, DEMAND, (16,), 99)
    assert node_seconds(node, DEMAND, (16,), 2) > node_seconds(node, DEMAND, (16,), 4)


def test_more_threads_than_cores_crowd_each_other():
    node, crowded = profile("e5-2620v4"), msgspec.structs.replace(DEMAND, crowding_exponent=0.5)
    plain = node_seconds(node, DEMAND, (16,), 12)
    assert node_seconds(node, crowded, (16,), 12) == plain  # inter threads unset: the framework leaves each thread a core
    assert node_seconds(node, crowded, (16,), 12, 4) == plain
    seconds, each = node_seconds(node, crowded, (16,), 12, 11)
    assert seconds == pytest.approx(plain[0] * (23 / 16) ** 0.5)
    assert each == (seconds,)
    assert node_seconds(node, DEMAND, (16,), 12, 11) == plain


def test_options_act_by_name_value_and_type():
    effects = (
        OptionEffect(name="inline", value=True, factor=0.8),
        OptionEffect(name="level", value=2, factor=0.5, thread_exponent=1.0),
    )
    demand, node = msgspec.structs.replace(DEMAND, options=effects), profile("e5-2620v4")
    plain, _ = node_seconds(node, DEMAND, (16,), 4)

    def times(*options):
        return node_seconds(node, demand, (16,), 4, 0, options)[0] / plain

    assert (
        times() == times(("inline", False)) == times(("inline", 1)) == times(("other", True)) == times(("level", True)) == 1
    )
    assert times(("inline", True)) == pytest.approx(0.8)
    assert times(("level", 2)) == pytest.approx(0.5 * 4)
    assert times(("inline", True), ("level", 2)) == pytest.approx(0.8 * 0.5 * 4)


def test_adding_up_devices_is_slowed_down_by_no_option():
    node = profile("g2.2xlarge")
    effect = OptionEffect(name="jit", value="ON", factor=2.0)
    _, plain = node_seconds(node, DEMAND, (60, 4))
    seconds, each = node_seconds(node, msgspec.structs.replace(DEMAND, options=(effect,)), (60, 4), 0, 0, (("jit", "ON"),))
    assert each == (2 * plain[0], 2 * plain[1])
    assert seconds == max(each) + DEMAND.aggregate_seconds


# ----------------------------------------------------------------------------------------------------------------- files


def test_own_file(tmp_path):
    path = tmp_path / "nodes.toml"
    path.write_text(TABLE)
    assert load_profiles(path) == {
        "mine": NodeType(
            name="mine",
            cores=4,
            memory_bytes=8e9,
            nic_bytes_per_second=125e6,
            devices=(Device(kind="cpu", speed=1.5),),
            source="my rack",
        )
    }
    assert load_profiles(str(path))["mine"].service_bytes_per_second == math.inf


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("cores = 4", 'cores = "four"', r"'mine' from .*nodes\.toml: cores: expected `int`, got `str`\."),
        ("cores = 4", "core = 4", r"'mine' from .*nodes\.toml: there is no key 'core'; did you mean cores"),
        ("speed = 1.5", "sped = 1.5", r"devices has no key 'sped'; did you mean speed\?"),
        ("cores = 4", "", r"nodes\.toml: it lacks the key 'cores'; give it\."),
        ("cores = 4", "cores = 0", r"cannot have 0 cores: give at least 1"),
        ("cores = 4", 'cores = 4\nname = "x"', r"has a key `name`"),
        ("125e6", "0", r"cannot have nic_bytes_per_second 0\.0: give a positive"),
        ("125e6", "nan", r"cannot have nic_bytes_per_second nan"),
        ("8e9", "-8e9", r"cannot have memory_bytes -8"),
        ("speed = 1.5", "speed = -1.5", r"devices\[0\]: a device cannot have speed -1\.5: give .*, 0 or more\."),
        ("speed = 1.5", "speed = inf", r"cannot have speed inf"),
        ('kind = "cpu"', 'kind = "tpu"', r"devices\[0\]\.kind: invalid enum value 'tpu'\. Choose cpu or gpu\."),
        ('devices = [{ kind = "cpu", speed = 1.5 }]', "devices = []", r"has no devices"),
        ('source = "my rack"', 'source = ""\nservice_bytes_per_second = 0', r"service_bytes_per_second 0\.0"),
        ("[mine]", "mine = 3\n[yours]", r"node types from .*: 'mine' is no table; each node type is one"),
        ("[mine]", "[mine", r"nodes\.toml: it is no TOML"),
    ],
)
def test_the_error_for_a_wrong_file_names_place_and_reason(tmp_path, old, new, told):
    path = tmp_path / "nodes.toml"
    assert old in TABLE
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(ValueError, match=told):
        load_profiles(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Cannot read node types from .*none\.toml: there is no such file"):
        load_profiles(tmp_path / "none.toml")
