"""The named workloads: reads `workloads.toml`, or a file like it, and makes a `Workload` with the user's overrides.

A table of the file is read into `_WorkloadTable` below; its `model` into the structs of
`simulators.workloads.model_tables`, its `data` into those of `simulators.workloads.data_tables`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

import msgspec

from simulators.programs import own_code
from simulators.workloads.data_tables import (
    BreastCancer,
    Cifar10,
    Classification,
    Clicks,
    Digits,
    EmbeddedClicks,
    GeneratedText,
    Libsvm,
    Mnist,
    Mnist1d,
    Mnist5k,
    Npz,
    Ratings,
    Source,
)
from simulators.workloads.model_tables import FactorisationMachine, Model, OwnModel
from simulators.workloads.workload import Demand, Proxy, Workload
from tuners.near_names import near_keys, near_names

__all__ = [
    "dataset",
    "demand_of",
    "gradients_of",
    "learnt",
    "load_workloads",
    "usual_values",
    "with_own_model",
    "workload",
    "workloads",
]

_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class _WorkloadTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of `workloads.toml`. With `model` and `data` the workload learns; otherwise it only has `samples`."""

    summary: str
    demand: Demand
    source: str = ""
    model: Model | None = None
    data: Source | None = None
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    batch_size: _Whole = 16
    learning_rate: _Amount = 0.01
    optimizer: Literal["sgd", "momentum", "nesterov", "adam", "rmsprop", "adagrad", "adadelta", "adarevision"] = "sgd"
    aggregation: Literal["each", "sum", "mean"] = "each"
    skew: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    @classmethod
    @cache  # msgspec evaluates all annotations again at each call, which was a seventh of the time of a short run
    def choices(cls, field: str) -> tuple[str, ...]:
        """The values that a `Literal` field allows; () for any other field."""
        found = next((f.type for f in msgspec.structs.fields(cls) if f.name == field), None)
        return get_args(found) if get_origin(found) is Literal else ()


_SECTIONS = ("demand", "model", "data")
_TAGGED: dict[str, Any] = {"model": Model, "data": Source}
"""The sections whose keys depend on their `kind`, each with the structs of its kinds."""
_PLAIN = ("samples", "batch_size", "learning_rate", "optimizer", "aggregation", "skew")

# ---------------------------------------------------------------------------------------------------------------- lookup


def workload(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    data: Path | str | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Workload:
    """The named workload with `overrides` applied; `data` is the path of its files, if it reads any.

    `tables` holds workloads besides the embedded ones, as `load_workloads` reads them.

    An override is named as in `workloads.toml`, with its section where the name alone is ambiguous:
    `{"hidden": [256, 256], "optimizer": "adam", "demand.model_bytes": 4e6}`; nested mappings work too. Equal models on
    equal data share one proxy, so that one process compiles it once. Raises ValueError for an unknown name or a wrong
    value, and the errors of `simulators.workloads.files`.
    """
    table = _table(name, tables or {})
    job = _overridden(name, table, dict(_flat(overrides or {})))
    proxy = _proxy_of(name, job, None if data is None else Path(data))
    return Workload(
        name=name,
        demand=job.demand,
        proxy=proxy,
        optimizer=job.optimizer,
        aggregation=job.aggregation,
        samples=job.samples if proxy is None else len(proxy.train[0]),
        skew=job.skew,
        batch_size=job.batch_size,
        learning_rate=job.learning_rate,
        summary=job.summary,
        source=job.source,
    )


def usual_values(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    data: Path | str | None = None,
    tables: Mapping[str, Any] | None = None,
) -> tuple[int, float]:
    """Batch size and learning rate of the named workload with `overrides`. Raises as `workload`, but reads no data."""
    job = _overridden(name, _table(name, tables or {}), dict(_flat(overrides or {})))
    _check_data(name, job, data)
    return job.batch_size, job.learning_rate


def learnt(
    name: str, overrides: Mapping[str, Any] | None = None, tables: Mapping[str, Any] | None = None
) -> tuple[Model | None, Source | None]:
    """Model and data of the named workload with `overrides`; (None, None) if it is timing-only. Raises as `workload`."""
    job = _overridden(name, _table(name, tables or {}), dict(_flat(overrides or {})))
    return job.model, job.data


def demand_of(name: str, overrides: Mapping[str, Any] | None = None, tables: Mapping[str, Any] | None = None) -> Demand:
    """The demand of the named workload with `overrides`. Raises as `workload`."""
    return _overridden(name, _table(name, tables or {}), dict(_flat(overrides or {}))).demand


def gradients_of(
    name: str, overrides: Mapping[str, Any] | None = None, tables: Mapping[str, Any] | None = None
) -> tuple[str, str, bool] | None:
    """Optimizer and aggregation of the named workload's gradients, and whether they are rows of embedding tables; None if
    it is timing-only. Raises as `workload`, but makes no model."""
    job = _overridden(name, _table(name, tables or {}), dict(_flat(overrides or {})))
    return None if job.model is None else (job.optimizer, job.aggregation, isinstance(job.model, FactorisationMachine))


def workloads() -> dict[str, str]:
    """The summary line of each embedded workload, by name."""
    return {name: str(table["summary"]) for name, table in _tables().items()}


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((files("simulators.workloads") / "workloads.toml").read_text("utf-8"))


def load_workloads(path: Path | str) -> dict[str, Any]:
    """The tables of workloads in a file like `workloads.toml`, or in one that `harness calibrate` wrote.

    Raises FileNotFoundError for a missing file, and ValueError, naming the file, for one without valid tables.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Cannot read workloads from {path}: there is no such file; give a TOML file.")
    try:
        tables = tomllib.loads(path.read_text("utf-8-sig"))
        tables = tables.get("workloads", {}) if "calibration" in tables else tables
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read workloads from {path}: {error}.") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(  # noqa: TRY004 (a mistake in a file)
                f"Cannot read workloads from {path}: {name!r} is no table; each workload is one, [NAME], as in the files "
                "that harness calibrate writes. A scenario's file has none."
            )
        try:
            msgspec.convert(table, _WorkloadTable)
        except msgspec.ValidationError as error:
            keys = {"": _WorkloadTable.__struct_fields__, "demand": Demand.__struct_fields__}
            keys |= {section: _keys_of(kinds, table.get(section)) for section, kinds in _TAGGED.items()}
            said = near_keys(str(error), keys) + _kinds(str(error))
            raise ValueError(f"Cannot read workload {name!r} from {path}: {said}") from error
    return {name: _with_place(table, path.parent) for name, table in tables.items()}


def _with_place(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The table; the file of a model of the user's is relative to the folder."""
    if (model := table.get("model", {})).get("kind") != "python":
        return table
    return {**table, "model": {**model, "file": str(folder / Path(model["file"]).expanduser())}}


def with_own_model(
    tables: Mapping[str, Any], name: str, model: tuple[Path, str] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """`tables` in which workload `name` has the user's model, a file and a function of it, in place of its own; None: only
    other options. Raises ValueError where it has no data, or where its model is not the user's and takes no options."""
    table = _table(name, tables)
    own: dict[str, Any] = dict(table.get("model", {}))
    if model is not None:
        if not table.get("data"):
            raise ValueError(f"model: workload {name!r} has no data to train it on; name another workload.")
        own = {"kind": "python", "file": str(model[0]), "function": model[1], "options": dict(options)}
    elif own.get("kind") == "python":
        own["options"] = dict(own.get("options", {})) | dict(options)
    else:
        raise ValueError(
            f"model_options: they are for a model of your own, and workload {name!r} has none; say model = "
            '"FILE.py:FUNCTION", or write keys of its model into overrides.'
        )
    return dict(tables) | {name: {**table, "model": own}}


def _keys_of(kinds: Any, given: Any) -> tuple[str, ...]:
    """The keys of the table `given`, which is of one of `kinds`; only `kind` where it says none of them."""
    said = given.get("kind") if isinstance(given, dict) else None
    found = next((kind for kind in get_args(kinds) if kind.__struct_config__.tag == said), None)
    return ("kind",) if found is None else ("kind", *found.__struct_fields__)


def _kinds(error: str) -> str:
    """What may be written, as a sentence, where msgspec's `error` is about the kind of a model or of data; else ""."""
    for key, kinds in _TAGGED.items():
        if f"$.{key}.kind" in error:
            return f" Choose one of {', '.join(sorted(kind.__struct_config__.tag for kind in get_args(kinds)))}."
    return ""


def _table(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    tables = _tables() | dict(more)
    if name not in tables:
        raise ValueError(f"No workload {name!r}: {near_names(name, tables)}")
    table: dict[str, Any] = tables[name]
    return table


# ------------------------------------------------------------------------------------------------------------- overrides


def _flat(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _overridden(name: str, table: Mapping[str, Any], overrides: Mapping[str, Any]) -> _WorkloadTable:
    """The table with its overrides, checked."""
    paths = _paths(msgspec.convert(table, _WorkloadTable))
    changed = {key: dict(value) if key in _SECTIONS else value for key, value in table.items()}
    for key, value in overrides.items():
        section, _, field = _resolve(name, key, paths).rpartition(".")
        (changed[section] if section else changed)[field] = value
        if (allowed := _WorkloadTable.choices(field)) and value not in allowed:
            raise ValueError(f"Cannot make workload {name!r} with {field} {value!r}: choose one of {', '.join(allowed)}.")
    try:
        job = msgspec.convert(changed, _WorkloadTable)
    except msgspec.ValidationError as error:
        given = ", ".join(f"{key} = {value!r}" for key, value in overrides.items())
        raise ValueError(f"Cannot make workload {name!r} with {given}: {error}") from error
    if job.model is not None and "samples" in overrides:
        raise ValueError(f"Cannot set samples of workload {name!r}: they are those of its data; override data.* instead.")
    return job


def _paths(job: _WorkloadTable) -> tuple[str, ...]:
    """Every name that can be overridden, with its section."""
    parts = [(s, part) for s in _SECTIONS if (part := getattr(job, s)) is not None and not isinstance(part, OwnModel)]
    return _PLAIN + tuple(f"{s}.{f}" for s, part in parts for f in part.__struct_fields__)


def _resolve(name: str, key: str, paths: tuple[str, ...]) -> str:
    if key in paths:
        return key
    matches = [p for p in paths if p.rpartition(".")[2] == key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"Cannot override {key!r} of workload {name!r}: say {' or '.join(matches)}.")
    names = paths if "." in key else tuple(dict.fromkeys(p.rpartition(".")[2] for p in paths))
    near = get_close_matches(key, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(paths)}."
    raise ValueError(f"Cannot override {key!r} of workload {name!r}: {hint}")


# --------------------------------------------------------------------------------------------------------------- proxies


def _check_data(name: str, job: _WorkloadTable, path: Path | str | None) -> None:
    """Raise ValueError where a workload that reads files has no path to them, or another one has."""
    reads = isinstance(job.data, Mnist | Cifar10 | Libsvm | Npz)
    if reads and path is None:
        raise ValueError(f"Cannot make workload {name!r}: it reads files; point to them by data = 'PATH' under [workload].")
    if path is not None and not reads:
        raise ValueError(f"Cannot use the data {path} in workload {name!r}: it reads no files; leave the data path out.")


def _proxy_of(name: str, job: _WorkloadTable, path: Path | None) -> Proxy | None:
    _check_data(name, job, path)
    if job.model is None or job.data is None:
        return None
    data = job.data, "" if path is None else str(path.resolve()), _state(path)
    if not isinstance(job.model, OwnModel):
        return _proxy(job.model, *data)
    # The digest and the options in words are parts of the cache's key: the file may have changed, and 1 is 1.0.
    return _own_proxy(job.model, *data, own_code.read(Path(job.model.file)).digest, repr(job.model.options))


def _state(path: Path | None) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of the files at a path, which differ where data was written again."""
    if path is None or not path.exists():
        return ()
    found = ((str(file), file.stat()) for file in (sorted(path.iterdir()) if path.is_dir() else [path]))
    return tuple((name, seen.st_size, seen.st_mtime_ns) for name, seen in found)


@cache
def _proxy(model: Model, source: Source, path: str, state: tuple[tuple[str, int, int], ...]) -> Proxy:
    # Imported here, so that listing the workloads does not import JAX.
    from simulators.workloads import models

    return models.make_proxy(model, _dataset(source, path, state))


@lru_cache(maxsize=8)  # versions of a file that its author is writing
def _own_proxy(
    model: OwnModel, source: Source, path: str, state: tuple[tuple[str, int, int], ...], digest: str, options: str
) -> Proxy:
    del digest, options
    from simulators.workloads import models

    return models.make_proxy(model, _dataset(source, path, state))


def dataset(source: Source, path: str = "") -> Any:
    """The `datasets.Dataset` of a data table; `path` is the place of its files, if it reads any."""
    return _dataset(source, path, _state(Path(path)) if path else ())


@cache
def _dataset(source: Source, path: str, state: tuple[tuple[str, int, int], ...]) -> Any:
    del state  # it is a part of the cache's key
    from simulators.workloads import datasets, files

    fields = msgspec.structs.asdict(source)
    made: dict[type, Callable[[], Any]] = {
        Digits: lambda: datasets.subset(datasets.digits(fields["seed"]), **fields),
        BreastCancer: lambda: datasets.breast_cancer(**fields),
        Mnist: lambda: datasets.subset(files.mnist(path), **fields),
        Cifar10: lambda: datasets.subset(files.cifar10(path), **fields),
        Libsvm: lambda: files.libsvm(path, **fields),
        Npz: lambda: files.npz(path, **fields),
        Classification: lambda: datasets.classification(**fields),
        Clicks: lambda: datasets.clicks(**fields),
        EmbeddedClicks: lambda: datasets.embedded_clicks(**fields),
        Mnist1d: lambda: datasets.mnist1d(**fields),
        Mnist5k: lambda: datasets.subset(datasets.mnist5k(fields["seed"]), **fields),
        Ratings: lambda: datasets.ratings(**fields),
        GeneratedText: lambda: datasets.sentences(**fields),
    }
    return made[type(source)]()
