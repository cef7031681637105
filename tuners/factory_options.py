"""The options of a tuner: the keyword arguments of its factory, with type, default and meaning, and a check of values.

The type of an option is the annotation of its argument. A range is part of it, as msgspec writes it:
``gain: Annotated[float, Meta(ge=0)]``; `NonNegative`, `Count`, `Share` and so on are the common ones. Its meaning is the
entry of the section "Args:" of the factory's docstring. What no single value tells, such as two options that exclude each
other, a function beside the factory checks::

    @options_checked_by(_in_order)
    def dssp(job: Job, *, low: Whole = 3, high: Whole = 15) -> Tuner: ...
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tuners.near_names import did_you_mean

__all__ = [
    "AboveZero",
    "Count",
    "NonNegative",
    "Option",
    "Share",
    "Whole",
    "check",
    "check_together",
    "options_checked_by",
    "options_of",
    "with_options",
]

F = TypeVar("F", bound=Callable[..., Any])

Count: TypeAlias = Annotated[int, Meta(ge=1)]
"""A whole number, at least 1."""

Whole: TypeAlias = Annotated[int, Meta(ge=0)]
"""A whole number, at least 0."""

NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
"""A number, at least 0."""

AboveZero: TypeAlias = Annotated[float, Meta(gt=0)]
"""A number above 0."""

Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
"""A number above 0, up to 1."""

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOUNDS = {"ge": "at least {:g}", "gt": "above {:g}", "le": "at most {:g}", "lt": "below {:g}"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a tuner."""

    name: str
    type: str  # in words: "number, at least 0"; "" if it can only be given in Python
    default: str
    meaning: str
    hint: Any  # the annotation, reduced to what can be written in brackets; None if nothing can


def options_of(factory: Callable[..., object]) -> dict[str, Option]:
    """The options by name, in the order of the factory's arguments."""
    known = [p for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY]
    try:
        hints = get_type_hints(factory, include_extras=True)
    except Exception:  # the annotations of another author's tuner: names that exist for a type checker only
        hints = {}
    meanings = dict(_meanings(factory))
    made: dict[str, Option] = {}
    for parameter in known:
        hint = _writable(hints.get(parameter.name, Any))
        default = "" if parameter.default is parameter.empty else _text(parameter.default)
        meaning = meanings.get(parameter.name, "")
        made[parameter.name] = Option(parameter.name, "" if hint is None else _words(hint), default, meaning, hint)
    return made


def check(tuner: str, factory: Callable[..., object], given: Mapping[str, object]) -> None:
    """Raise ValueError, which says what to write, unless the `given` options exist and their values fit."""
    known = options_of(factory)
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(get_close_matches(name, known))
            raise ValueError(f"Tuner {tuner!r} has no option {name!r}.{hint} It has {', '.join(known) or 'none'}.")
        option = known[name]
        if option.hint is None:
            raise ValueError(
                f"Cannot set option {name!r} of tuner {tuner!r} by text: pass functools.partial(..., {name}=...) in Python."
            )
        if not _fits(value, option.hint):
            raise ValueError(
                f"Cannot use {name}={_text(value)} for tuner {tuner!r}: give {option.type} (default: {option.default})."
            )


def options_checked_by(check: Callable[[Mapping[str, Any]], object]) -> Callable[[F], F]:
    """Attach to a tuner's factory a function of all its options that raises ValueError where they do not fit together. It is
    called before anything runs; the factory calls it, too, for those who call the factory themselves."""

    def attach(factory: F) -> F:
        vars(factory)["check_options"] = check
        return factory

    return attach


def check_together(factory: Callable[..., object]) -> None:
    """Raise ValueError where the options of `factory`, its defaults and what a `functools.partial` gives it, do not fit
    together."""
    plain, given = with_options(factory)
    found = getattr(plain, "check_options", None)
    if found is not None:
        found(given)


def with_options(factory: Callable[..., object]) -> tuple[Callable[..., object], dict[str, Any]]:
    """The function behind a factory, and the values of its options: defaults, and what a `functools.partial` gives it."""
    given: dict[str, Any] = {}
    while isinstance(factory, partial):
        given = factory.keywords | given
        factory = factory.func
    defaults = {p.name: p.default for p in inspect.signature(factory).parameters.values() if p.default is not p.empty}
    return factory, defaults | given


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of the annotated type and within its range. What is not a number is within no range."""
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return value == value  # false for nan alone


def _writable(hint: Any) -> Any:
    """The part of an annotation that text in brackets can give: numbers, words, truth values; None if there is none."""
    if hint is Any:
        return Any
    origin = get_origin(hint)
    if origin is Annotated:
        return None if _writable(get_args(hint)[0]) is None else hint
    if origin in (Union, types.UnionType):
        parts = [part for each in get_args(hint) if (part := _writable(each)) is not None]
        return Union[tuple(parts)] if parts else None  # noqa: UP007 (made at run time)
    return hint if origin is Literal or hint in _PLAIN else None


def _words(hint: Any) -> str:
    """The type of an option in words."""
    if hint is Any:
        return "any value"
    origin = get_origin(hint)
    if origin is Annotated:
        base, *notes = get_args(hint)
        bounds = [
            text.format(bound)
            for note in notes
            for name, text in _BOUNDS.items()
            if (bound := getattr(note, name, None)) is not None
        ]
        return ", ".join([_words(base), *bounds])
    if origin is Literal:
        return " or ".join(_text(value) for value in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_words(each) for each in get_args(hint))
    return _PLAIN[hint]


def _text(value: object) -> str:
    """A value as it is written in brackets."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and value:
        return value
    return {None: "not set", "": "not set"}.get(value, repr(value)) if isinstance(value, str | None) else _short(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{type(value).__name__}(...)"


def _meanings(factory: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """The entries of the section "Args:" of a docstring."""
    section = (inspect.getdoc(factory) or "").partition("\nArgs:\n")[2]
    for entry in re.finditer(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE):
        yield entry[1], " ".join(entry[2].split()).replace("``", "`")
