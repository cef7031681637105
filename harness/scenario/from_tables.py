"""From the tables of a scenario's file to its objects: cluster, workload, start, knobs, target; each is checked on the way.

A message begins with the key; `at_table` puts file and table before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.scenario.description import Scenario
from harness.scenario.tables import BudgetTable, KnobTable, NodeGroup, StartTable, Tables, TargetTable, WorkloadTable
from simulators.calibration.draws import draw_of
from simulators.cluster.cluster import Cluster
from simulators.cluster.profiles import NodeType, load_profiles, profiles
from simulators.engine.limits import check_learning, check_links, check_time
from simulators.programs.own_code import digest_of_module
from simulators.workloads.catalogue import (
    demand_of,
    gradients_of,
    learnt,
    load_workloads,
    usual_values,
    with_own_model,
    workload,
    workloads,
)
from simulators.workloads.model_tables import OwnModel
from simulators.workloads.workload import Workload
from tuners.actions import Rejected, Setting, Space, Target
from tuners.near_names import near_names
from tuners.settings import BY_STALENESS, POLICIES, Choice, Integer, Knob, Real, Scalar, shared_out
from tuners.space import check_values

__all__ = [
    "at_table",
    "check_calibrated",
    "check_engine",
    "check_prices",
    "check_start",
    "cluster_of",
    "finite",
    "knobs_of",
    "known_workload",
    "own_model",
    "own_workloads",
    "space_of",
    "staleness_is_idle",
    "start_of",
    "target_of",
    "usual_values_of",
    "workload_of",
]

T = TypeVar("T")

_MOST_CLOCKS = 2**31 - 1
_ROLES = ("worker", "server", "both", "idle")
_PLAIN_FIELDS = frozenset(f.name for f in fields(Setting)) - {"workers", "servers"}


def check_calibrated(tables: Tables, origin: Path, draw: int) -> None:
    """Raise ValueError where no file of the scenario has this draw of its constants."""
    named = [_beside(origin, file) for file in (tables.cluster.profiles, tables.workload.file) if file is not None]
    if not any(draw_of(path, draw) for path in named if path.is_file()):
        raise ValueError(
            "draw: nothing here is calibrated; name a file of harness calibrate in cluster.profiles or workload.file."
        )


def _beside(origin: Path, file: str) -> Path:
    """The place of a file that a scenario names: relative to the scenario's own file, or to the home folder after "~"."""
    return origin.parent / Path(file).expanduser()


def cluster_of(tables: Tables, origin: Path, draw: int) -> Cluster:
    """The machines of [cluster], with drawn constants where `draw` is not 0."""
    table, known = tables.cluster, profiles()
    latency_seconds, switch_bytes = table.latency_seconds, table.switch_bytes_per_second
    if table.profiles is not None:
        path = _beside(origin, table.profiles)
        try:
            own = load_profiles(path)
        except OSError as error:
            raise ValueError(str(error)) from None
        if draw and (drawn := draw_of(path, draw)):
            own = drawn.node_types(own)
            latency_seconds *= drawn.ratio(tables.workload.name, "latency_seconds")
            switch_bytes *= drawn.ratio(tables.workload.name, "switch_bytes_per_second")
        known |= own
    if not table.nodes:
        raise ValueError("nodes: there are none; give at least one worker and one server.")
    nodes: list[tuple[str, NodeType]] = []
    counts: dict[str, int] = {}
    for group in table.nodes:
        if group.type not in known:
            shown_by = "`harness list profiles`" + (f" or {table.profiles}" if table.profiles else "")
            near = near_names(group.type, known, shown_by=shown_by)
            raise ValueError(f"nodes: no node type {group.type!r}; {near}")
        if not re.fullmatch(r"[\w.-]*", group.prefix):
            raise ValueError(
                f"nodes: no machine can be named {group.prefix + '0'!r}, because knobs have its name; give a prefix of "
                "letters, digits, '.', '_' and '-'."
            )
        first = counts.get(group.prefix, 0)
        counts[group.prefix] = first + group.count
        kind = _priced(known[group.type], group)
        nodes += [(f"{group.prefix}{i}", kind) for i in range(first, first + group.count)]
    return Cluster(
        tuple(nodes),
        discipline=table.discipline,
        latency_seconds=latency_seconds,
        control_queue=table.control_queue,
        snapshot_clocks=table.snapshot_clocks,
        independent_flows=table.independent_flows,
        uneven_bytes=table.uneven_bytes,
        switch_bytes_per_second=switch_bytes,
        switch_both_ways=table.switch_both_ways,
        server_threads=table.server_threads,
    )


def _priced(kind: NodeType, group: NodeGroup) -> NodeType:
    """The node type at the price that its group says; its own `spot` holds unless the group is."""
    spot = group.spot or kind.spot
    if group.usd_per_hour is not None:
        return msgspec.structs.replace(kind, usd_per_hour=group.usd_per_hour, spot=spot)
    if not spot:
        return kind
    if kind.spot_usd_per_hour is None:
        raise ValueError(
            f"nodes: no price is known of {kind.name} as a spot instance; give usd_per_hour, or spot_usd_per_hour in a "
            "file of node types."
        )
    return msgspec.structs.replace(kind, usd_per_hour=kind.spot_usd_per_hour, spot=True)


def check_prices(origin: Path, scenario: Scenario, unpriced: str) -> None:
    """Raise ValueError, with file, table and key, where money counts and the price of something, `unpriced`, is unknown."""
    if unpriced and (scenario.target.minimise == "usd" or scenario.budget.usd is not None):
        key = "[target] minimise" if scenario.target.minimise == "usd" else "[budget] usd"
        advice = "" if scenario.recorded else " Give usd_per_hour to [cluster] nodes, or to the node type."
        raise ValueError(f"{origin}: {key}: money cannot be counted, because no price is known of {unpriced}.{advice}")


def known_workload(table: WorkloadTable, origin: Path, draw: int) -> WorkloadTable:
    """The table itself. Raises ValueError for a name that is no workload."""
    names = (*own_workloads(table, origin, draw), *workloads())
    if table.name not in names:
        shown_by = "`harness list workloads`" + (f" or {table.file}" if table.file else "")
        near = near_names(table.name, names, shown_by=shown_by)
        raise ValueError(f"name: no workload {table.name!r}; {near}")
    return table


def own_workloads(table: WorkloadTable, origin: Path, draw: int) -> dict[str, Any]:
    """The user's own workloads, from the `file` that [workload] names, with drawn constants, and the one that [workload]
    gives a model of the user's; none if it names neither."""
    own: dict[str, Any] = {}
    if table.file is not None:
        path = _beside(origin, table.file)
        try:
            own = load_workloads(path)
        except OSError as error:
            raise ValueError(f"file: {error}") from None
        if drawn := draw_of(path, draw) if draw else None:
            own = drawn.workloads(own)
    if (table.model is None and not table.model_options) or table.name not in (*own, *workloads()):
        return own
    return with_own_model(own, table.name, _file_and_function(table.model, origin), table.model_options)


def _file_and_function(named: str | None, origin: Path) -> tuple[Path, str] | None:
    """File and function of "FILE.py:FUNCTION". Raises ValueError for what is not written so."""
    if named is None:
        return None
    file, _, function = named.rpartition(":")
    if not (file.endswith(".py") and function.isidentifier()):
        raise ValueError(f'model: cannot read {named!r}: write FILE.py:FUNCTION, as in "mine.py:make_model".')
    return _beside(origin, file), function


def own_model(scenario: Scenario) -> tuple[str, str]:
    """The name of the user's file with the workload's model, and a digest of it and of what it imports from its folder;
    ("", "") if the model is none of the user's. Nothing is run. Raises ValueError where there is no such file."""
    if scenario.recorded is not None:
        return "", ""
    table = scenario.workload
    model, _ = learnt(table.name, table.overrides, own_workloads(table, scenario.origin, scenario.draw))
    if not isinstance(model, OwnModel):
        return "", ""
    try:
        return Path(model.file).name, digest_of_module(Path(model.file))
    except (ValueError, OSError) as error:
        raise ValueError(f"{scenario.origin}: [workload] model: {error}") from None


def workload_of(scenario: Scenario) -> Workload:
    """The scenario's workload, with its data. Raises ValueError if it cannot be made."""
    table = scenario.workload
    data = None if table.data is None else _beside(scenario.origin, table.data)
    try:
        return workload(table.name, table.overrides, data, own_workloads(table, scenario.origin, scenario.draw))
    except (ValueError, OSError) as error:
        raise ValueError(f"{scenario.origin}: [workload] {error}") from None


def start_of(scenario: Scenario) -> Setting:
    """The start setting; batch size and learning rate are the workload's where the file does not give them."""
    table = scenario.start
    names = tuple(n for n, _ in scenario.cluster.nodes)
    workers, servers = table.workers, table.servers
    if table.worker_count is not None:
        if workers or servers:
            raise ValueError("worker_count: it names workers and servers already; leave out worker_count, or both lists.")
        workers, servers = names[: table.worker_count], names[table.worker_count :]
    for role, members in (("workers", workers), ("servers", servers)):
        if not members:
            every = (
                f"worker_count from 1 to {len(names) - 1}" if len(names) > 1 else "workers and servers, the only one as both"
            )
            raise ValueError(f"{role}: there are none of {len(names)} nodes; set {every}.")
    plain = {f.name: getattr(table, f.name) for f in fields(Setting)}
    default = Setting(workers=workers, servers=servers)
    plain |= {"workers": workers, "servers": servers, "options": tuple(sorted(table.options.items()))}
    plain["node_steps"] = tuple(sorted(table.node_steps.items()))
    for name, usual in zip(("batch_size", "learning_rate"), usual_values_of(scenario), strict=True):
        if plain[name] is None:
            plain[name] = usual
    start = replace(default, **plain)
    return start if table.global_batch_size is None else _evenly(start, table.global_batch_size, scenario.cluster)


def usual_values_of(scenario: Scenario) -> tuple[int, float]:
    """Batch size and learning rate of the workload."""
    table = scenario.workload
    data = None if table.data is None else _beside(scenario.origin, table.data)
    return usual_values(table.name, table.overrides, data, own_workloads(table, scenario.origin, scenario.draw))


def check_start(space: Space, table: StartTable | None = None) -> None:
    """Raise ValueError where a job of this space cannot begin; where `table` is given, with the key that it lacks."""
    if not space.whole_batch and any(k.name.startswith("load/") and isinstance(k, Real) for k in space.knobs):
        raise ValueError(
            "global_batch_size: give it, because loads of `real` ranges are weights that share it out; or free loads of "
            "`integer` ranges."
        )
    try:
        space.check(space.base)
    except Rejected as error:
        raise ValueError(f"{error}{'' if table is None else _unsaid(space, table)}") from None
    _check_policy(space.base.policy)


def check_engine(scenario: Scenario, space: Space) -> None:
    """Raise ValueError, with the table in brackets, for what no run computes: links that are not shared by the
    cluster's discipline, mini-batches that take no time, and gradients that the workload's optimizer cannot apply under
    the knobs of `space`."""
    table, cluster, origin = scenario.workload, scenario.cluster, scenario.origin
    own = own_workloads(table, origin, scenario.draw)
    found = gradients_of(table.name, table.overrides, own)
    tables = found is not None and found[2]

    def links() -> None:
        overlap = not set(space.base.workers).isdisjoint(space.base.servers)
        check_links(cluster, overlap=overlap, tables=tables, buckets=bool(scenario.conditions.buckets))

    def learning() -> None:
        check_time(demand_of(table.name, table.overrides, own), cluster.latency_seconds, space)
        if found is not None:
            check_learning(found[0], found[1], space, tables=tables)

    for name, check in (("cluster", links), ("workload", learning)):
        try:
            check()
        except Rejected as error:
            raise ValueError(f"{origin}: [{name}] {error}") from None


def _unsaid(space: Space, table: StartTable) -> str:
    """A sentence about the first free knob whose range does not contain the start, if the file does not say that start."""
    defaults = StartTable()
    for knob in space.knobs:
        given = getattr(table, knob.name, "")
        if (
            knob.name in _PLAIN_FIELDS
            and given == getattr(defaults, knob.name)
            and not knob.contains(getattr(space.base, knob.name))
        ):
            whose = "the workload's value" if given is None else "the default"
            return f" [start] does not give {knob.name}, and so {whose} counts: give one that the range contains."
    return ""


def _check_policy(name: str) -> None:
    if name not in POLICIES:
        raise ValueError(f"policy: there is no {name!r}; {near_names(name, POLICIES)}")


def _evenly(start: Setting, batch: int, cluster: Cluster) -> Setting:
    """The start with the global mini-batch divided evenly among those devices of the workers that can compute."""
    if start.loads:
        raise ValueError("global_batch_size: loads say already how the batch is divided; leave out one of the two.")
    kinds = dict(cluster.nodes)
    devices = [(w, bool(device.speed)) for w in start.workers if w in kinds for device in kinds[w].devices]
    if not any(able for _, able in devices):
        return start  # the check of the space reports what is wrong with such workers
    rows: dict[str, tuple[int, ...]] = {}
    for (worker, _), samples in zip(devices, shared_out([able for _, able in devices], batch), strict=True):
        rows[worker] = (*rows.get(worker, ()), samples)
    rows = {worker: row for worker, row in rows.items() if any(row)}
    return replace(start, workers=tuple(rows), loads=tuple(rows.values()))


def space_of(scenario: Scenario, made: Workload | None) -> Space:
    """What tuners may change; `made` is the workload, or None before it is made."""
    nodes = scenario.cluster.public_nodes
    for knob in scenario.knobs:
        if knob.name == "worker_count" and not (isinstance(knob, Integer) and 1 <= knob.low <= knob.high < len(nodes)):
            raise ValueError(
                f"worker_count: give integer = [low, high] within [1, {len(nodes) - 1}], so that one node serves."
            )
    # A file is checked before its workload is made; only then it is known whether there are tables.
    tables = made is None or made.has_tables
    return Space(start_of(scenario), nodes, scenario.knobs, blocks=scenario.costs.model_blocks if tables else 0)


def staleness_is_idle(scenario: Scenario) -> bool:
    """Whether no policy that the job can have is bounded by its staleness. Such a scenario is no mistake: it is what
    becomes of another one where the policy is held."""
    policy = next((k for k in scenario.knobs if k.name == "policy"), None)
    policies = policy.options if isinstance(policy, Choice) else (scenario.start.policy,)
    return set(BY_STALENESS).isdisjoint(policies)


def knobs_of(free: Mapping[str, KnobTable], cluster: Cluster, blocks: int) -> Iterator[Knob]:
    """The knobs of [free]. A name that ends in "/*" means one knob per node, per device that can compute, or per block."""
    for name, table in free.items():
        family, _, star = name.rpartition("/")
        members = [node for node, _ in cluster.nodes]
        if family == "load":
            members = [
                f"{node}/{d}" for node, kind in cluster.nodes for d, device in enumerate(kind.devices) if device.speed
            ]
        if family == "block":
            members = [str(number) for number in range(blocks)]
        for each in (f"{family}/{member}" for member in members) if star == "*" else (name,):
            yield _knob(each, table)


def _knob(name: str, table: KnobTable) -> Knob:
    given = [k for k in ("real", "integer", "choice") if getattr(table, k) is not None]
    if len(given) != 1:
        raise ValueError(f"{name}: give exactly one of real, integer and choice, not {' and '.join(given) or 'none'}.")
    values: tuple[Scalar, ...] = table.choice or table.integer or table.real or ()
    between = (min(table.integer[0] + 1, table.integer[1]),) if table.integer else ()  # 17 bits, of 16 to 32
    _check_values(name, (*values, *between))
    if table.choice is not None:
        return Choice(name, table.choice)
    if table.integer is not None:
        return Integer(name, table.integer[0], table.integer[1], table.log)
    low, high = table.real or (0.0, 0.0)
    return Real(name, low, high, table.log)


def _check_values(name: str, values: tuple[Scalar, ...]) -> None:
    """Raise ValueError where the knob `name` cannot have these values, of all its options or its lowest and highest."""
    family, slash, _ = name.partition("/")
    for value in values:
        number = -1.0 if isinstance(value, str | bool) else value
        if not math.isfinite(number):
            raise ValueError(f"{name}: cannot be {value!r}; give finite numbers.")
        if family == "role" and slash and value not in _ROLES:
            raise ValueError(f"{name}: cannot be {value!r}; choose among {', '.join(_ROLES)}.")
        if family in ("load", "data_share", "model_share") and slash and number < 0:
            raise ValueError(f"{name}: cannot be {value!r}; give numbers, 0 or more.")
        if name in _PLAIN_FIELDS:
            given: Any = {name: value}
            try:
                check_values(Setting(workers=("n0",), servers=("n1",), **given))
            except (TypeError, Rejected) as error:
                raise ValueError(f"{name}: cannot be {value!r}; {str(error).rpartition(': ')[2]}") from None
        if name == "policy":
            _check_policy(str(value))


def target_of(table: TargetTable) -> Target:
    """When the job has ended. Raises ValueError for a value that cannot be reached."""
    if table.metric == "accuracy" and not 0 < table.value <= 1:
        raise ValueError(f"value: accuracy {table.value:g} cannot be reached; it lies in (0, 1].")
    target = Target(table.metric, table.value, table.by_share, table.minimise)
    if target.by_share and not target.counts:
        raise ValueError(f"by_share: {table.metric} cannot be divided; count clocks or samples, or leave it out.")
    if not math.isfinite(table.value) or (target.counts and table.value < 1):
        raise ValueError(
            f"value: {table.metric} {table.value:g} is no target; give a finite number, at least 1 to count to."
        )
    if target.counts and table.value > _MOST_CLOCKS:
        raise ValueError(f"value: {table.metric} {table.value:g} cannot be counted; give at most {_MOST_CLOCKS}.")
    return target


def finite(table: BudgetTable) -> BudgetTable:
    """The table itself. Raises ValueError for a budget that never ends."""
    if not math.isfinite(table.seconds):
        raise ValueError(f"seconds: {table.seconds:g} never ends; give a finite number.")
    return table


def at_table(origin: Path, table: str, make: Callable[[], T]) -> T:
    """Call `make`; put file and table in front of the message if it raises ValueError."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{origin}: [{table}] {error}") from None
