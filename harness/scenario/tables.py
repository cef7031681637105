"""The format of a scenario's file, as structs, and the error messages for a file that does not fit it.

Every key that a file may have is a field here, with its unit in its name. Messages read "[table] key: what is wrong".
"""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from simulators.cluster.cluster import Discipline
from simulators.cluster.conditions import (
    Bucket,
    Conditions,
    Episode,
    LinkDelay,
    NodeChange,
    RackLosses,
    Replay,
    ReplayedTrace,
    Sleeps,
    Stragglers,
)
from simulators.reconfiguration.costs import Costs
from tuners.actions import Scalar
from tuners.near_names import keys_with_part, near_names, unknown_key
from tuners.settings import MOST

__all__ = [
    "MOST_SEEDS",
    "TABLES",
    "BudgetTable",
    "CalibrationTable",
    "ClusterTable",
    "KnobTable",
    "NodeGroup",
    "RecordedCosts",
    "RecordedTable",
    "RecordedTables",
    "RulesTable",
    "SeedsTable",
    "StartTable",
    "Tables",
    "TargetTable",
    "WorkloadTable",
    "read",
]

_LARGEST = 1e30  # of all numbers
_MISSPELT = 0.8  # similarity from which a key is taken for another one of its own table, though a second table has it
MOST_SEEDS = 100_000  # of a scenario: the list of all runs is made before the first
_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
_Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class NodeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machines of one type, named prefix0, prefix1, ..."""

    type: str  # a node type of `harness list profiles`, or of the file `cluster.profiles`
    count: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    prefix: str = "n"
    spot: bool = False  # rented at the type's `spot_usd_per_hour`; [conditions] losses say when such machines leave
    usd_per_hour: _Amount | None = None  # of one machine, in place of the type's own price


class ClusterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[cluster]"""

    nodes: tuple[NodeGroup, ...]
    discipline: Discipline = "maxmin"
    latency_seconds: _Amount = 0.0
    control_queue: _Amount = 0.0  # share of the pushes queued at the servers that a pull's request waits for, 0 to 1
    snapshot_clocks: _Whole = 0  # pushes from one snapshot of the servers to the next, at least 4 per worker; 0: none
    independent_flows: bool = False  # each flow of a transfer ends by itself where servers are unlike; else all together
    uneven_bytes: _Amount = 0.0  # with "uneven": flows of that size share by lot, larger ones more evenly; 0: of any size
    switch_bytes_per_second: _Amount = 0.0  # of a switch that all transfers between nodes pass, each way; 0: no limit
    switch_both_ways: bool = False  # pulls and pushes share the switch; else each way has so much
    server_threads: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = (
        1  # of a server's process: each serves one transfer, or one update, at a time
    )
    profiles: str | None = None  # a file with the user's own node types; the path is relative to the scenario's file


class WorkloadTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[workload]"""

    name: str
    overrides: dict[str, Any] = {}
    data: str | None = None  # a folder; the path is relative to the scenario's file
    model: str | None = None  # "FILE.py:FUNCTION", a model of the user's in place of the workload's; relative, too
    model_options: dict[str, Any] = {}  # further arguments of that function
    file: str | None = None  # the user's own workloads (as `harness calibrate` writes them); relative, too


class StartTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[start]: the fields of a `Setting`. A missing key has the workload's value or the default of `Setting`."""

    worker_count: Annotated[int, msgspec.Meta(ge=0, le=MOST)] | None = (
        None  # the first N nodes are workers, the others servers
    )
    workers: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    batch_size: _Whole | None = None
    global_batch_size: _Count | None = None  # samples of all workers together, divided evenly among their devices
    loads: tuple[tuple[_Whole, ...], ...] = ()
    data_shares: tuple[float, ...] = ()
    model_shares: tuple[float, ...] = ()
    policy: str = "asp"
    staleness: _Whole = 0
    intra_threads: _Whole = 0
    inter_threads: _Whole = 0
    transfer_bits: _Whole = 32
    options: dict[str, Scalar] = {}
    learning_rate: float | None = None
    momentum: float = 0.0
    local_steps: _Whole = 1
    node_steps: dict[str, _Whole] = {}  # local steps of single workers, by name; the others take `local_steps`
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    placement: str = "range"
    block_owners: tuple[str, ...] = ()
    cache_rows: _Whole = 0
    cache_clocks: _Whole = 0
    checkpoint_seconds: float = 0.0
    pull_clocks: _Whole = 1
    replicas: _Whole = 1
    hot_blocks: _Whole = 0
    quorum: _Whole = 0
    grace_seconds: float = 0.0


class KnobTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[free] NAME: exactly one of the three."""

    real: tuple[float, float] | None = None
    integer: tuple[_Whole, _Whole] | None = None
    choice: tuple[Scalar, ...] | None = None
    log: bool = False


class TargetTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[target]"""

    metric: Literal["accuracy", "loss", "clocks", "samples"]
    value: float
    by_share: bool = False  # clocks or samples: every worker has to do its own data share of them
    check_clocks: _Count = 50  # pushes between two validations
    minimise: Literal["seconds", "usd"] = "seconds"  # "usd": the winner is the cheapest run that ends within the budget


class BudgetTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[budget]"""

    seconds: _Positive  # simulated
    usd: _Positive | None = None  # a target that cost more does not count as reached


class SeedsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[seeds]"""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_SEEDS)] = 5


class CalibrationTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[calibration]: other values of the constants in the files of `harness calibrate` that the scenario names."""

    draw: _Count  # number of the draw from their bootstrap, from 1 on; without this table, the fitted values count


class RulesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[rules]: what else a tuner may do."""

    install_policies: bool = False  # install policies of its own, also where `policy` is not free


class RecordedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[recorded]: recorded runs answer in place of the simulator; see `traces.replay`."""

    trace: str  # a trace, or a folder of traces; the path is relative to the scenario's file; or "shipped:NAME"
    workload: str  # only the runs of this workload are used
    runs: str = "*"  # and of these, those whose name fits this pattern
    # The start setting, by knob ("option/workers", for example). A missing knob has the value of the first run.
    start: dict[str, Scalar] = {}
    samples: Annotated[int, msgspec.Meta(ge=0, le=MOST)] = 0  # training samples, for tuners that count epochs; 0: unknown


class RecordedCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[costs] of a scenario of recorded runs."""

    # From one recorded run to another; no worker trains meanwhile. Without it: the median stall of the recorded
    # reconfigurations of these runs, or 0 if none was recorded.
    restart_seconds: _Amount | None = None


class RecordedTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file of a scenario of recorded runs, which bring their own cluster, knobs and conditions."""

    summary: str
    recorded: RecordedTable
    target: TargetTable
    budget: BudgetTable
    costs: RecordedCosts = RecordedCosts()
    seeds: SeedsTable = SeedsTable()


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    summary: str
    cluster: ClusterTable
    workload: WorkloadTable
    start: StartTable
    target: TargetTable
    budget: BudgetTable
    free: dict[str, KnobTable] = {}
    conditions: Conditions = Conditions()
    costs: Costs = Costs()
    rules: RulesTable = RulesTable()
    seeds: SeedsTable = SeedsTable()
    calibration: CalibrationTable | None = None


TABLES: dict[str, Any] = {
    "": Tables,
    "recorded": RecordedTable,
    "cluster": ClusterTable,
    "cluster.nodes": NodeGroup,
    "workload": WorkloadTable,
    "start": StartTable,
    "free": KnobTable,
    "target": TargetTable,
    "budget": BudgetTable,
    "seeds": SeedsTable,
    "conditions": Conditions,
    "conditions.sleeps": Sleeps,
    "conditions.stragglers": Stragglers,
    "conditions.episodes": Episode,
    "conditions.delays": LinkDelay,
    "conditions.buckets": Bucket,
    "conditions.nodes": NodeChange,
    "conditions.losses": RackLosses,
    "conditions.replay": Replay,
    **{f"conditions.replay.{role}": ReplayedTrace for role in Replay.__struct_fields__},
    "costs": Costs,
    "rules": RulesTable,
    "calibration": CalibrationTable,
}
"""The struct of every table, by the table's name in messages; "" is the whole file."""


def _line_at(text: str, error: str) -> str:
    """The line that a message of `tomllib` is about, as a sentence; "" if it names none."""
    found = re.search(r"at line (\d+)", error)
    return f" The line is: {text.splitlines()[int(found[1]) - 1].strip()}" if found else ""


def read(text: str) -> Tables | RecordedTables:
    """Parse a scenario's `text`. Raises ValueError, which names table and key, if it does not fit the format."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error).replace("Cannot overwrite a value", "a key is there twice")
        raise ValueError(f"it is no TOML: {said}.{_line_at(text, said)}") from None
    _check_sizes(table)
    free = table.get("free", {})
    for name, knob in free.items() if isinstance(free, dict) else ():
        # One by one, because msgspec's message about a dictionary does not name the key.
        if not isinstance(knob, dict):
            raise ValueError(  # noqa: TRY004 (a mistake in a file)
                f"[free] {name}: give a range, as in {{ real = [0.001, 1.0], log = true }}, not {knob!r}."
            )
        try:
            msgspec.convert(knob, KnobTable)
        except msgspec.ValidationError as error:
            said = _explained(str(error), knob, "free").removeprefix("[free]").lstrip(": ")
            raise ValueError(f"[free] {name}: {said}") from None
    kind: type[Tables | RecordedTables] = RecordedTables if "recorded" in table else Tables
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_explained(str(error), table, kind=kind)) from None


def _check_sizes(value: Any, path: str = "") -> None:
    """Raise ValueError for a number that no quantity of a scenario reaches, and that later computations cannot hold."""
    if isinstance(value, dict):
        for key, part in value.items():
            _check_sizes(part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            _check_sizes(part, path)
    elif isinstance(value, int | float) and _LARGEST < abs(value) < float("inf"):
        parent, _, key = path.rpartition(".")
        raise ValueError(f"{_place(parent, key)}: {value:g} is too large; give at most {_LARGEST:g}.")


def _explained(message: str, given: Any, root: str = "", kind: type[Any] = Tables) -> str:
    """Rewrite msgspec's message about the table `root` as "[table] key: expected, given, similar names"."""
    said, _, path = message.partition(" - at `$")
    value = _value(given, path.rstrip("`"))
    path = re.sub(r"\[[^\]]*\]", "", path.rstrip("`"))
    path = (root + path).strip(".")
    if unknown := unknown_key(message):
        place = _place(path, unknown.key)
        if kind is RecordedTables and not path:
            return f"{place}: recorded runs say that themselves; leave it out."
        return f"{place}: there is no such key; {_advice(path, unknown.key)}"
    missing = re.search(r"missing required field `(.*)`", said)
    if missing:
        which = "every scenario of recorded runs" if kind is RecordedTables else "every scenario"
        return f"{_place(path, missing[1])}: it is missing; {which} says this."
    said = said[0].lower() + said[1:]
    parent, _, key = path.rpartition(".")
    if "enum value" in said:
        choices = next(f.type.values for f in msgspec.inspect.type_info(TABLES[parent]).fields if f.name == key)  # type: ignore[attr-defined]
        return f"{_place(parent, key)}: {said}; choose one of {', '.join(map(str, choices))}."
    note = "; numbers are written without quotes, in the unit that the key names" if "got `str`" in said else ""
    if "expected `bool`" in said:
        note = "; write true or false, without quotes"
    said = said.replace(" | null", "")  # a file has no null: what is left out has its default
    plain = ", not " + repr(value) if isinstance(value, int | float) and "got" not in said else ""
    return f"{_place(parent, key)}: {said}{plain}{note}."


def _advice(path: str, key: str) -> str:
    """What to write in place of `key`, which the table at `path` does not have: one nearly like it, or another table's."""
    own = TABLES[path].__struct_fields__
    if get_close_matches(key, own, cutoff=_MISSPELT):
        return near_names(key, own)
    if within := keys_with_part(key, own):  # "seconds" of [conditions.losses], not of [budget]
        return f"did you mean {' or '.join(within)}?"
    homes = [f"[{name}]" for name, struct in TABLES.items() if name and "." not in name and key in struct.__struct_fields__]
    if homes:
        return f"it belongs in {' or '.join(homes)}."
    return near_names(key, own)


def _value(given: Any, path: str) -> Any:
    """The value at msgspec's `path` (".cluster.nodes[0].count"); None if there is none."""
    for step in re.findall(r"[^.\[\]]+", path):
        try:
            given = given[int(step) if isinstance(given, list) else step]
        except (KeyError, ValueError, IndexError, TypeError):
            return None
    return given


def _place(path: str, key: str) -> str:
    """Format as "[table] key"; a key at the top of the file may be a table itself."""
    if path:
        return f"[{path}] {key}".rstrip()
    return f"[{key}]" if key in TABLES else key
