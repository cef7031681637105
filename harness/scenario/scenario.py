"""Reads a scenario from its TOML file, and makes the job and the system that it describes.

The whole file is checked when it is read; an error names file, table and key. Numbers are in the unit that their key names.
`harness show digits` prints a whole file as a template; `harness.scenario.tables` lists the keys that a file may have.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from harness import program_cache
from harness.scenario import recorded as scenario_recorded
from harness.scenario.description import Scenario
from harness.scenario.tables import (
    BudgetTable,
    KnobTable,
    NodeGroup,
    RecordedTables,
    StartTable,
    Tables,
    TargetTable,
    WorkloadTable,
    read,
)
from simulators.calibration.draws import draw_of
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, locate_traces
from simulators.cluster.conditions import check as check_conditions
from simulators.cluster.profiles import NodeType, load_profiles, profiles
from simulators.reconfiguration.costs import Costs, check_costs
from simulators.workloads.catalogue import load_workloads, usual_values, workload, workloads
from simulators.workloads.workload import Workload
from tuners.actions import Job, Rejected, Setting, Space, System, Target
from tuners.near_names import near_names
from tuners.settings import POLICIES, Choice, Integer, Knob, Node, Real, Scalar, shared_out
from tuners.space import check_values

if TYPE_CHECKING:
    from simulators.jobs import JobSpec

__all__ = ["embedded", "job", "load", "matching", "parse", "show", "system", "workload_of"]

T = TypeVar("T")

_MOST_CLOCKS = 2**31 - 1
_ROLES = ("worker", "server", "both", "idle")
_PLAIN_FIELDS = frozenset(f.name for f in fields(Setting)) - {"workers", "servers"}
_ELSEWHERE = {"drawn": "harness.families.drawn:text"}
"""What makes scenarios with such a prefix: "module:function" of the text after the colon, which returns name and file."""


# -------------------------------------------------------------------------------------------------------------- reading


@cache
def embedded() -> tuple[str, ...]:
    """The names of the scenarios that come with the harness, the default first."""
    found = [f.name.removesuffix(".toml") for f in (files("harness") / "scenarios").iterdir() if f.name.endswith(".toml")]
    return tuple(sorted(found, key=lambda name: (name != "digits", name)))


def matching(name: str) -> list[str]:
    """The embedded scenarios that a pattern such as ``cruise-*`` means; for any other name, the name itself.

    Raises ValueError where nothing matches.
    """
    if not set(name) & set("*?[") or "=" in name or ":" in name:
        return [name]
    if not (found := fnmatch.filter(embedded(), name)):
        raise ValueError(f"No scenario matches {name!r}: `harness list scenarios` shows all.")
    return found


def load(name_or_path: str | Path) -> Scenario:
    """Load the embedded scenario of that name, or the file at that path. Raises ValueError, which says what is wrong.

    Text in brackets after the name replaces lines of the file, as in ``boat-c-speechnet[global_batch_size=8192]``. A member
    of a family is loaded by ``drawn:learning[7]``; see `harness.families`.
    """
    source, colon, which = str(name_or_path).partition(":")
    if colon and source in _ELSEWHERE:
        name, text = _elsewhere(source)(which)
        return parse(text, name=name, origin=Path(f"{name}.toml"))
    plain, bracket, changes = str(name_or_path).partition("[")
    path = Path(plain)
    if plain in embedded():
        path = Path(str(files("harness") / "scenarios" / f"{plain}.toml"))
    elif path.suffix != ".toml":
        hint = near_names(plain, embedded(), shown_by="`harness list scenarios`")
        raise ValueError(f"No scenario {plain!r}: {hint} A file of your own is named with its .toml.")
    try:
        text = path.read_text("utf-8-sig")  # editors of Windows begin a file with a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"Cannot read scenario {path}: {reason}.") from None
    if bracket and not changes.endswith("]"):
        raise ValueError(f"Cannot read {str(name_or_path)!r}: write {plain}[key=value,...].")
    for change in changes[:-1].split(",") if bracket else ():
        text = _replaced(text, change, path)
    return parse(text, name=path.stem + bracket + changes, origin=path)


def _elsewhere(source: str) -> Callable[[str], tuple[str, str]]:
    """Imported by name, because what draws scenarios plays them, too, and imports this module."""
    module, _, attribute = _ELSEWHERE[source].partition(":")
    return cast("Callable[[str], tuple[str, str]]", getattr(import_module(module), attribute))


def _replaced(text: str, change: str, origin: Path) -> str:
    """Replace the value on the only line that begins with a key, as `change` ("key=value") says."""
    key, equals, value = (part.strip() for part in change.partition("="))
    if not (key and equals and value):
        raise ValueError(f"{origin}: cannot change {change!r}: write key=value.")
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        value = json.dumps(value, ensure_ascii=False)  # a word, which a shell has stripped of its quotes
    changed, found = re.subn(rf"(?m)^{re.escape(key)} *=.*$", lambda _: f"{key} = {value}", text)
    if not found:
        keys = dict.fromkeys(re.findall(r"(?m)^([\w-]+) *=", text))
        raise ValueError(f"{origin}: cannot change {change!r}: no line begins with {key!r}; {near_names(key, keys)}")
    if found > 1:
        raise ValueError(f"{origin}: cannot change {change!r}: {found} lines begin with {key!r}; edit a copy of the file.")
    return changed


def parse(text: str, *, name: str, origin: Path) -> Scenario:
    """Parse and check a scenario. Raises ValueError of the form "FILE: [table] key: what is wrong, what is expected"."""
    try:
        found = read(text)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
    if isinstance(found, RecordedTables):
        return _parsed(found, name=name, origin=origin, text=text)
    draw = found.calibration.draw if found.calibration else 0
    if draw:
        _at(origin, "calibration", lambda: _check_calibrated(found, origin, draw))
    cluster = _at(origin, "cluster", lambda: _cluster(found, origin, draw))
    made = Scenario(
        name=name,
        origin=origin,
        text=text,
        summary=" ".join(found.summary.split()),
        cluster=cluster,
        workload=_at(origin, "workload", lambda: _known(found.workload, origin, draw)),
        start=found.start,
        knobs=_at(origin, "free", lambda: tuple(_knobs(found.free, cluster, found.costs.model_blocks))),
        target=_at(origin, "target", lambda: _target(found.target)),
        check_clocks=found.target.check_clocks,
        budget=_at(origin, "budget", lambda: _finite(found.budget)),
        conditions=_at(origin, "conditions", lambda: locate_traces(found.conditions, origin.parent)),
        costs=found.costs,
        rules=found.rules,
        seeds=found.seeds,
        draw=draw,
    )
    names = tuple(n for n, _ in made.cluster.nodes)
    unpriced = ", ".join(dict.fromkeys(kind.name for _, kind in cluster.nodes if kind.usd_per_hour is None))
    _at(origin, "target", lambda: _check_prices(made, unpriced))
    _at(origin, "conditions", lambda: check_conditions(made.conditions, names))
    if made.conditions.replay is not None:
        from simulators.cluster import trace_driven  # here, because it imports polars, which most scenarios do not need

        _at(origin, "conditions", lambda: trace_driven.check_replay(made.conditions))
    _at(origin, "costs", lambda: check_costs(made.costs))
    _at(origin, "workload", lambda: _usual_values(made))
    _at(origin, "start", lambda: _start(made))
    space = _at(origin, "free", lambda: _space(made, None))
    _at(origin, "start", lambda: _check_start(space))
    return made


def _parsed(found: RecordedTables, *, name: str, origin: Path, text: str) -> Scenario:
    """A scenario of recorded runs, in which one node represents all workers, and another all servers."""
    if found.target.by_share:
        raise ValueError(f"{origin}: [target] by_share: recorded runs do not tell workers apart; leave it out.")
    made = Scenario(
        name=name,
        origin=origin,
        text=text,
        summary=" ".join(found.summary.split()),
        cluster=scenario_recorded.CLUSTER,
        workload=WorkloadTable(name=found.recorded.workload),
        start=StartTable(workers=("workers",), servers=("servers",)),
        knobs=(),
        target=_at(origin, "target", lambda: _target(found.target)),
        check_clocks=found.target.check_clocks,
        budget=_at(origin, "budget", lambda: _finite(found.budget)),
        conditions=Conditions(),
        costs=Costs(),
        seeds=found.seeds,
        recorded=found.recorded,
        restart_seconds=found.costs.restart_seconds,
    )
    # Making the job reads the trace: a scenario whose recording is missing is refused here, not when it is played.
    recorded = _at(origin, "recorded", lambda: scenario_recorded.job(made, found.recorded, 0))
    priced = not math.isnan(recorded.prices.highest_usd_per_hour(()))
    _at(origin, "target", lambda: _check_prices(made, "" if priced else "these recorded runs"))
    return made


# ------------------------------------------------------------------------------------------------- the job and the system


def job(scenario: Scenario, seed: int = 0) -> Job:
    """The job as tuners see it. Raises ValueError if the workload cannot be made or the start is not in the space."""
    if scenario.recorded is not None:
        return scenario_recorded.job(scenario, scenario.recorded, seed)
    made = workload_of(scenario)
    space = _at(scenario.origin, "free", lambda: _space(scenario, made))
    _at(scenario.origin, "start", lambda: _check_start(space))
    from simulators import jobs  # here, because it imports JAX, which takes seconds and which reading does not need

    return jobs.job(_spec(scenario, made, space.base, seed))


def system(scenario: Scenario, seed: int, start: Setting | None = None) -> System:
    """A fresh system for one run, simulated or recorded, which starts under `start`, or else under the scenario's start."""
    if scenario.recorded is not None:
        return scenario_recorded.system(scenario, scenario.recorded, seed, start)
    from simulators.system import SimulatedSystem

    program_cache.use()
    made = workload_of(scenario)
    _at(scenario.origin, "free", lambda: _space(scenario, made))
    return SimulatedSystem(_spec(scenario, made, start or _start(scenario), seed))


def _spec(scenario: Scenario, made: Workload, start: Setting, seed: int) -> JobSpec:
    from simulators.jobs import JobSpec

    return JobSpec(
        name=scenario.name,
        cluster=scenario.cluster,
        workload=made,
        start=start,
        knobs=scenario.knobs,
        target=scenario.target,
        budget_seconds=scenario.budget.seconds,
        budget_usd=math.inf if scenario.budget.usd is None else scenario.budget.usd,
        evaluate_clocks=scenario.check_clocks,
        conditions=scenario.conditions,
        costs=scenario.costs,
        installs_policies=scenario.rules.install_policies,
        seed=seed,
    )


def show(scenario: Scenario) -> str:
    """The scenario's file under a comment that explains its names. The result is a scenario file itself."""
    if scenario.recorded is not None:
        return scenario_recorded.show(scenario, scenario.recorded)
    # Imported here, because only this needs the figures.
    from simulators.workloads.references import told

    made = workload_of(scenario) if scenario.workload.data is None else None
    types: dict[NodeType, list[str]] = {}
    for name, kind in scenario.cluster.nodes:
        types.setdefault(kind, []).append(name)
    said = [f"{scenario.name}: {scenario.summary}", ""]
    for kind, names in types.items():
        where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        rate = f"{kind.nic_bytes_per_second * 8 / 1e6:g} Mbit/s"
        price = "" if kind.usd_per_hour is None else f", {kind.usd_per_hour:g} USD per hour"
        said.append(f"{len(names)} x {kind.name}{', spot' * kind.spot}: {kind.cores} cores, {rate}{price} ({where})")
    tables = _own_workloads(scenario.workload, scenario.origin, 0)
    own = {name: table["summary"] for name, table in tables.items()}
    said.append(f"{scenario.workload.name}: {(workloads() | own)[scenario.workload.name]}")
    if made is not None:
        start = _start(scenario)
        training = f"batch size {start.batch_size}, learning rate {start.learning_rate:g}, momentum {start.momentum:g}"
        said.append(f"starts with {len(start.workers)} workers and {len(start.servers)} servers, {start.policy}, {training}")
    if known := told(scenario.workload.name, scenario.workload.overrides, scenario.target.metric, tables):
        said.append(f"target: {scenario.target.metric} {scenario.target.value:g}; on this data: {known}")
    families = dict.fromkeys(k.name.partition("/")[0] + "/..." if "/" in k.name else k.name for k in scenario.knobs)
    said.append(f"free: {', '.join(families) or 'nothing'}")
    lines = [line for text in said for line in textwrap.wrap(text, 110, subsequent_indent="  ") or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + scenario.text


# ----------------------------------------------------------------------------------------------- from tables to objects


def _check_calibrated(tables: Tables, origin: Path, draw: int) -> None:
    """Raise ValueError where no file of the scenario has this draw of its constants."""
    named = [_beside(origin, file) for file in (tables.cluster.profiles, tables.workload.file) if file is not None]
    if not any(draw_of(path, draw) for path in named if path.is_file()):
        raise ValueError(
            "draw: nothing here is calibrated; name a file of harness calibrate in cluster.profiles or workload.file."
        )


def _beside(origin: Path, file: str) -> Path:
    """The place of a file that a scenario names: relative to the scenario's own file, or to the home folder after "~"."""
    return origin.parent / Path(file).expanduser()


def _cluster(tables: Tables, origin: Path, draw: int) -> Cluster:
    table, known = tables.cluster, profiles()
    latency_seconds = table.latency_seconds
    if table.profiles is not None:
        path = _beside(origin, table.profiles)
        try:
            own = load_profiles(path)
        except OSError as error:
            raise ValueError(str(error)) from None
        if draw and (drawn := draw_of(path, draw)):
            own = drawn.node_types(own)
            latency_seconds *= drawn.latency_ratio(tables.workload.name)
        known |= own
    if not table.nodes:
        raise ValueError("nodes: there are none; give at least one worker and one server.")
    nodes: list[tuple[str, NodeType]] = []
    counts: dict[str, int] = {}
    for group in table.nodes:
        if group.type not in known:
            near = near_names(group.type, known, shown_by="`harness list profiles`")
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
    return Cluster(tuple(nodes), table.discipline, latency_seconds, table.control_queue)


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


def _check_prices(scenario: Scenario, unpriced: str) -> None:
    """Raise ValueError where money counts and the price of something, `unpriced`, is not known."""
    if unpriced and (scenario.target.minimise == "usd" or scenario.budget.usd is not None):
        key = "minimise" if scenario.target.minimise == "usd" else "usd"
        advice = "" if scenario.recorded else " Give usd_per_hour to [cluster] nodes, or to the node type."
        raise ValueError(f"{key}: money cannot be counted, because no price is known of {unpriced}.{advice}")


def _known(table: WorkloadTable, origin: Path, draw: int) -> WorkloadTable:
    names = (*_own_workloads(table, origin, draw), *workloads())
    if table.name not in names:
        near = near_names(table.name, names, shown_by="`harness list workloads`")
        raise ValueError(f"name: no workload {table.name!r}; {near}")
    return table


def _own_workloads(table: WorkloadTable, origin: Path, draw: int) -> dict[str, Any]:
    """The user's own workloads, from the `file` that [workload] names, with drawn constants; none if it names no file."""
    if table.file is None:
        return {}
    path = _beside(origin, table.file)
    try:
        own = load_workloads(path)
    except OSError as error:
        raise ValueError(f"file: {error}") from None
    drawn = draw_of(path, draw) if draw else None
    return drawn.workloads(own) if drawn else own


def workload_of(scenario: Scenario) -> Workload:
    """The scenario's workload, with its data. Raises ValueError if it cannot be made."""
    table = scenario.workload
    data = None if table.data is None else _beside(scenario.origin, table.data)
    try:
        return workload(table.name, table.overrides, data, _own_workloads(table, scenario.origin, scenario.draw))
    except (ValueError, OSError) as error:
        raise ValueError(f"{scenario.origin}: [workload] {error}") from None


def _start(scenario: Scenario) -> Setting:
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
    for name, usual in zip(("batch_size", "learning_rate"), _usual_values(scenario), strict=True):
        if plain[name] is None:
            plain[name] = usual
    start = replace(default, **plain)
    return start if table.global_batch_size is None else _evenly(start, table.global_batch_size, scenario.cluster)


def _usual_values(scenario: Scenario) -> tuple[int, float]:
    table = scenario.workload
    data = None if table.data is None else _beside(scenario.origin, table.data)
    return usual_values(table.name, table.overrides, data, _own_workloads(table, scenario.origin, scenario.draw))


def _check_start(space: Space) -> None:
    """Raise ValueError where a job of this space cannot begin."""
    try:
        space.check(space.base)
    except Rejected as error:
        raise ValueError(str(error)) from None
    _check_policy(space.base.policy)


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


def _space(scenario: Scenario, made: Workload | None) -> Space:
    nodes = tuple(
        Node(n, t.name, t.cores, tuple(d.kind for d in t.devices), t.nic_bytes_per_second, t.memory_bytes)
        for n, t in scenario.cluster.nodes
    )
    for knob in scenario.knobs:
        if knob.name == "worker_count" and not (isinstance(knob, Integer) and 1 <= knob.low <= knob.high < len(nodes)):
            raise ValueError(
                f"worker_count: give integer = [low, high] within [1, {len(nodes) - 1}], so that one node serves."
            )
    # A file is checked before its workload is made; only then it is known whether there are tables.
    tables = made is None or (made.proxy is not None and made.proxy.embedding is not None)
    return Space(_start(scenario), nodes, scenario.knobs, blocks=scenario.costs.model_blocks if tables else 0)


def _knobs(free: Mapping[str, KnobTable], cluster: Cluster, blocks: int) -> Iterator[Knob]:
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


def _target(table: TargetTable) -> Target:
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


def _finite(table: BudgetTable) -> BudgetTable:
    if not math.isfinite(table.seconds):
        raise ValueError(f"seconds: {table.seconds:g} never ends; give a finite number.")
    return table


def _at(origin: Path, table: str, make: Callable[[], T]) -> T:
    """Call `make`; put file and table in front of the message if it raises ValueError."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{origin}: [{table}] {error}") from None
