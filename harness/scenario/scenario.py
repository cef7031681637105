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
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.machines import program_cache
from harness.scenario import recorded as scenario_recorded
from harness.scenario.description import Scenario
from harness.scenario.from_tables import (
    at_table,
    check_calibrated,
    check_engine,
    check_prices,
    check_start,
    cluster_of,
    finite,
    knobs_of,
    known_workload,
    own_model,
    own_workloads,
    space_of,
    staleness_is_idle,
    start_of,
    target_of,
    usual_values_of,
    workload_of,
)
from harness.scenario.tables import (
    RecordedTables,
    StartTable,
    WorkloadTable,
    read,
)
from simulators.cluster.conditions import Conditions, check_lasting, locate_traces
from simulators.cluster.conditions import check as check_conditions
from simulators.cluster.drawn_losses import check_exposed
from simulators.cluster.profiles import NodeType
from simulators.reconfiguration.costs import Costs, check_costs
from simulators.workloads.catalogue import workloads
from simulators.workloads.workload import Workload
from tuners.actions import Job, Setting, System
from tuners.near_names import near_names

if TYPE_CHECKING:
    from simulators.jobs import JobSpec

__all__ = ["embedded", "job", "limits", "load", "matching", "parse", "show", "summaries", "system"]

_ELSEWHERE = {"drawn": "harness.families.drawn:text"}
"""What makes scenarios with such a prefix: "module:function" of the text after the colon, which returns name and file."""


# -------------------------------------------------------------------------------------------------------------- reading


@cache
def embedded() -> tuple[str, ...]:
    """The names of the scenarios that come with the harness, the default first."""
    found = [f.name.removesuffix(".toml") for f in (files("harness") / "scenarios").iterdir() if f.name.endswith(".toml")]
    return tuple(sorted(found, key=lambda name: (name != "digits", name)))


def summaries() -> dict[str, str]:
    """What the embedded scenarios are, by name, as their files say: nothing that they name, as recorded runs, is read."""
    folder = files("harness") / "scenarios"
    told = {name: tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))["summary"] for name in embedded()}
    return {name: " ".join(summary.split()) for name, summary in told.items()}


def matching(name: str) -> list[str]:
    """The embedded scenarios that a pattern such as ``cruise-*`` means, or the files of ``arenas/*.toml``; for any other
    name, and a file's, the name itself.

    Raises ValueError where nothing matches.
    """
    if not set(name) & set("*?[") or "=" in name or ":" in name or Path(name).is_file():
        return [name]
    if name.endswith(".toml"):  # from Python, or in quotation marks: no shell has expanded it
        root = Path(name).anchor
        if not (paths := sorted(map(str, Path(root).glob(str(Path(name).relative_to(root)))))):
            raise ValueError(f"No file matches {name!r}: a pattern is relative to the working folder, {Path.cwd()}.")
        return paths
    if not (found := fnmatch.filter(embedded(), name)):
        raise ValueError(f"No scenario matches {name!r}: `harness list scenarios` shows all.")
    return found


def load(name_or_path: str | Path) -> Scenario:
    """Load the embedded scenario of that name, or the file at that path. Raises ValueError, which says what is wrong.

    Text in brackets after the name replaces lines of the file, as in ``boat-c-speechnet[global_batch_size=8192]``; where
    several tables have the key, with its table: ``digits[start.policy=asp]``. A member of a family is loaded by
    ``drawn:learning[7]``; see `harness.families`.
    """
    if not isinstance(name_or_path, str | Path):
        raise ValueError(f"Cannot read scenario {name_or_path!r}: give one name, or the path of one file.")  # noqa: TRY004
    source, colon, which = str(name_or_path).partition(":")
    if colon and source in _ELSEWHERE:
        name, text = _elsewhere(source)(which)
        return parse(text, name=name, origin=Path(f"{name}.toml"))
    whole = Path(name_or_path).is_file()  # a file's name may have brackets, too
    plain, bracket, changes = (str(name_or_path), "", "") if whole else str(name_or_path).partition("[")
    path = Path(plain)
    if plain in embedded():
        path = Path(str(files("harness") / "scenarios" / f"{plain}.toml"))
    elif path.suffix != ".toml":
        if path.is_dir() and any(path.glob("*.toml")):
            raise ValueError(f"No scenario {plain!r}: it is a folder; name its files, as in {plain.rstrip('/')}/*.toml.")
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
    """Replace the value on the only line that begins with a key, as `change` ("key=value", "table.key=value") says."""
    key, equals, value = (part.strip() for part in change.partition("="))
    if not (key and equals and value):
        raise ValueError(f"{origin}: cannot change {change!r}: write key=value.")
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        value = json.dumps(value, ensure_ascii=False)  # a word, which a shell has stripped of its quotes
    table, _, plain = key.rpartition(".")
    lines, inside, tables = text.splitlines(keepends=True), "", {"": None}
    found, keys = dict[int, str](), dict[str, None]()
    for number, line in enumerate(lines):
        name = line.partition("=")[0].rstrip()
        if header := re.match(r"\[+([^\]]+)\]", line):
            inside = header[1].strip()
            tables[inside] = None
        elif "=" in line and table in ("", inside):
            if name == plain:
                found[number] = inside
            elif re.fullmatch(r"[\w-]+", name):
                keys[name] = None
    if table not in tables:
        near = near_names(table, filter(None, tables))
        raise ValueError(f"{origin}: cannot change {change!r}: it has no table [{table}]; {near}")
    if not found:
        where = f" in [{table}]" if table else ""
        near = f"{near_names(plain, keys)} " if keys else ""
        raise ValueError(
            f"{origin}: cannot change {change!r}: no line{where} begins with {plain!r}; {near}To add a line, edit a copy of "
            "the file."
        )
    if len(found) > 1:
        ways = " or ".join(f"{inside}.{plain}=..." for inside in dict.fromkeys(found.values()) if inside and not table)
        way = f"write {ways}, or " if ways else ""
        raise ValueError(
            f"{origin}: cannot change {change!r}: {len(found)} lines begin with {plain!r}; {way}edit a copy of the file."
        )
    ((number, _),) = found.items()
    lines[number] = f"{plain} = {value}\n"
    return "".join(lines)


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
        at_table(origin, "calibration", lambda: check_calibrated(found, origin, draw))
    cluster = at_table(origin, "cluster", lambda: cluster_of(found, origin, draw))
    made = Scenario(
        name=name,
        origin=origin,
        text=text,
        summary=" ".join(found.summary.split()),
        cluster=cluster,
        workload=at_table(origin, "workload", lambda: known_workload(found.workload, origin, draw)),
        start=found.start,
        knobs=at_table(origin, "free", lambda: tuple(knobs_of(found.free, cluster, found.costs.model_blocks))),
        target=at_table(origin, "target", lambda: target_of(found.target)),
        check_clocks=found.target.check_clocks,
        budget=at_table(origin, "budget", lambda: finite(found.budget)),
        conditions=at_table(origin, "conditions", lambda: locate_traces(found.conditions, origin.parent)),
        costs=found.costs,
        rules=found.rules,
        seeds=found.seeds,
        draw=draw,
    )
    names = tuple(n for n, _ in made.cluster.nodes)
    unpriced = ", ".join(dict.fromkeys(kind.name for _, kind in cluster.nodes if kind.usd_per_hour is None))
    check_prices(origin, made, unpriced)
    at_table(origin, "conditions", lambda: check_conditions(made.conditions, names))
    at_table(origin, "conditions", lambda: check_lasting(made.conditions, names, made.budget.seconds))
    at_table(origin, "conditions", lambda: check_exposed(made.conditions.losses, cluster.nodes))
    if made.conditions.replay is not None:
        from simulators.cluster import trace_driven  # here, because it imports polars, which most scenarios do not need

        at_table(origin, "conditions", lambda: trace_driven.check_replay(made.conditions))
    at_table(origin, "costs", lambda: check_costs(made.costs))
    at_table(origin, "workload", lambda: usual_values_of(made))
    at_table(origin, "start", lambda: start_of(made))
    space = at_table(origin, "free", lambda: space_of(made, None))
    at_table(origin, "start", lambda: check_start(space, made.start))
    check_engine(made, space)
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
        target=at_table(origin, "target", lambda: target_of(found.target)),
        check_clocks=found.target.check_clocks,
        budget=at_table(origin, "budget", lambda: finite(found.budget)),
        conditions=Conditions(),
        costs=Costs(),
        seeds=found.seeds,
        recorded=found.recorded,
        restart_seconds=found.costs.restart_seconds,
    )
    # Making the job reads the trace: a scenario whose recording is missing is refused here, not when it is played.
    recorded = at_table(origin, "recorded", lambda: scenario_recorded.job(made, found.recorded, 0))
    at_table(origin, "target", lambda: scenario_recorded.check_target(made, found.recorded))
    priced = not math.isnan(recorded.prices.highest_usd_per_hour(()))
    check_prices(origin, made, "" if priced else "these recorded runs")
    return made


# ------------------------------------------------------------------------------------------------- the job and the system


def job(scenario: Scenario, seed: int = 0) -> Job:
    """The job as tuners see it. Raises ValueError if the workload cannot be made or the start is not in the space."""
    if scenario.recorded is not None:
        return scenario_recorded.job(scenario, scenario.recorded, seed)
    made = workload_of(scenario)
    space = at_table(scenario.origin, "free", lambda: space_of(scenario, made))
    at_table(scenario.origin, "start", lambda: check_start(space))
    from simulators import jobs  # here, because it imports JAX, which takes seconds and which reading does not need

    return jobs.job(_spec(scenario, made, space.base, seed))


def limits(scenario: Scenario) -> dict[str, Any]:
    """What ends a run and what counts in it, as columns of its score: `budget_seconds`, `budget_usd`, `minimise`."""
    from harness.spending import highest_usd  # imported here, because it imports polars, which reading does not need

    most, recorded = scenario.budget, scenario.recorded
    prices = scenario.cluster.prices if recorded is None else scenario_recorded.job(scenario, recorded, 0).prices
    usd = highest_usd(prices, (name for name, _ in scenario.cluster.nodes), most.seconds)
    return {
        "budget_seconds": most.seconds,
        "budget_usd": min(math.inf if most.usd is None else most.usd, usd),
        "minimise": scenario.target.minimise,
    }


def system(scenario: Scenario, seed: int, start: Setting | None = None) -> System:
    """A fresh system for one run, simulated or recorded, which starts under `start`, or else under the scenario's start."""
    if scenario.recorded is not None:
        return scenario_recorded.system(scenario, scenario.recorded, seed, start)
    from simulators.system import SimulatedSystem

    program_cache.use()
    made = workload_of(scenario)
    at_table(scenario.origin, "free", lambda: space_of(scenario, made))
    return SimulatedSystem(_spec(scenario, made, start or start_of(scenario), seed))


def _spec(scenario: Scenario, made: Workload, start: Setting, seed: int) -> JobSpec:
    """What a simulated system needs to begin the job."""
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


def _size(made: Workload) -> int:
    """Parameters of the model that a workload trains."""
    import jax

    return 0 if made.proxy is None else sum(leaf.size for leaf in jax.tree.leaves(made.proxy.init(0)))


def show(scenario: Scenario) -> str:
    """The scenario's file under a comment that explains its names. The result is a scenario file itself."""
    if scenario.recorded is not None:
        return scenario_recorded.show(scenario, scenario.recorded)
    # Imported here, because only this needs the figures, and JAX.
    from simulators.engine.optimizers import WITH_MOMENTUM
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
        cores = f"{kind.cores} core{'' if kind.cores == 1 else 's'}"
        said.append(f"{len(names)} x {kind.name}{', spot' * kind.spot}: {cores}, {rate}{price} ({where})")
    tables = own_workloads(scenario.workload, scenario.origin, 0)
    own = {name: table["summary"] for name, table in tables.items()}
    said.append(f"{scenario.workload.name}: {(workloads() | own)[scenario.workload.name]}")
    if any(model := own_model(scenario)):
        size = "" if made is None else f", with {_size(made):,} parameters"
        said.append(f"its model is yours, of {model[0]}{size}; its demand is as it is")
    start = start_of(scenario)
    # Loads say what each device computes; no worker has the batch size then.
    batch = f"global batch size {sum(map(sum, start.loads))}" if start.loads else f"batch size {start.batch_size}"
    training = f"{batch}, learning rate {start.learning_rate:g}, momentum {start.momentum:g}"
    counts = ((len(start.workers), "worker"), (len(start.servers), "server"))
    machines = " and ".join(f"{count} {role}{'s' * (count != 1)}" for count, role in counts)
    said.append(f"starts with {machines}, {start.policy}, {training}")
    known = told(scenario.workload.name, scenario.workload.overrides, scenario.target.metric, tables)
    share = " by share" if scenario.target.by_share else ""
    usd = "" if scenario.budget.usd is None else f" and {scenario.budget.usd:g} USD"
    within = f"target: {scenario.target.metric} {scenario.target.value:g}{share} within {scenario.budget.seconds:g} s{usd}"
    within += ", and the cheapest run wins" * (scenario.target.minimise == "usd")
    said.append(f"{within}; on this data: {known}" if known else within)
    families = dict.fromkeys(k.name.partition("/")[0] + "/..." if "/" in k.name else k.name for k in scenario.knobs)
    idle = {"staleness": "no policy that this job can have is bounded by it"} if staleness_is_idle(scenario) else {}
    if made is not None and made.optimizer not in WITH_MOMENTUM:
        idle["momentum"] = f"{made.optimizer} has none"
    families = dict.fromkeys(f"{f} (no effect: {idle[f]})" if f in idle else f for f in families)
    said.append(f"free: {', '.join(families) or 'nothing'}")
    lines = [line for text in said for line in textwrap.wrap(text, 110, subsequent_indent="  ") or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + scenario.text
