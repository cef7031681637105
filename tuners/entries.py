"""One tuner in the registry: its name, its factory and its options, and how these are read and imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from inspect import signature
from typing import TYPE_CHECKING, cast

from tuners.near_names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from tuners.actions import Scalar, TunerFactory

__all__ = ["Entry", "as_module", "entry_of", "parse", "split_names"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tuner: its name, and where its factory is defined."""

    name: str
    where: str  # "package.module:factory"
    summary: str
    contestant: bool = True  # False: reported apart, because it uses knowledge that no tuner can have
    embedded: bool = True  # ships with this distribution
    options: tuple[tuple[str, Scalar], ...] = ()  # keyword arguments of the factory that differ from its defaults
    tunes: str = ""  # what it changes of a running job
    needs: str = ""  # without which the job runs as it is; "" where it needs nothing
    paper: str = ""
    given: TunerFactory | None = None  # a function that the caller has passed, in place of `where`

    @property
    def factory(self) -> TunerFactory:
        """The factory with its options. Raises ValueError if it cannot be imported, needs more than a Job, or if an option
        does not fit."""
        found = self.plain_factory
        if not self.options:
            _check_call(self.name, found)
            return found
        from tuners import factory_options  # here, because it imports msgspec, which listing the names does not need

        factory_options.check(self.name, found, dict(self.options))
        chosen = partial(found, **dict(self.options))
        _check_call(self.name, chosen)
        try:
            factory_options.check_together(chosen)
        except ValueError as error:
            raise ValueError(f"Tuner {self.name!r}: {error}") from None
        return cast("TunerFactory", chosen)

    @property
    def plain_factory(self) -> TunerFactory:
        """The factory without options, imported now. Raises ValueError where module, name or function do not exist."""
        if self.given is not None:
            return self.given
        module_name, _, attribute = self.where.partition(":")
        if not module_name or not attribute:
            raise ValueError(f"Cannot find tuner {self.where!r}: write package.module:factory.")
        if module_name.endswith(".py") or "/" in module_name:
            written = f"{as_module(module_name)}:{attribute}"
            raise ValueError(f"Cannot find tuner {self.where!r}: write {written}, with the module's name.")
        try:
            module = import_module(module_name)
        except (Exception, SystemExit) as error:  # a program that runs as it is imported may end, too
            raise ValueError(
                f"Cannot import tuner {self.where!r} ({type(error).__name__}: {error}): "
                f"is its module free of errors, and installed or on PYTHONPATH?{_hidden(module_name)}"
            ) from error
        if not hasattr(module, attribute):
            near = get_close_matches(attribute, dir(module))
            raise ValueError(
                f"Cannot find tuner {self.where!r}: {module_name} has no {attribute!r}."
                f"{did_you_mean(near)}{_hidden(module_name)}"
            )
        found = getattr(module, attribute)
        if not callable(found):
            raise ValueError(f"Cannot use {self.where!r} as a tuner: it is no function; {_advice(found)}.")  # noqa: TRY004
        return cast("TunerFactory", found)


def entry_of(factory: TunerFactory, *, taken: Container[str] = ()) -> Entry:
    """The entry of a function that the caller has at hand; its name, with a number if that name is `taken`.

    Raises ValueError for what is no function of a Job, and for options of a shipped tuner that exclude each other.
    """
    if isinstance(factory, Generator):
        raise ValueError(f"Cannot use {factory!r} as a tuner: it was called already; give the function itself.")  # noqa: TRY004
    if not callable(factory):
        raise ValueError(f"Cannot use {factory!r} as a tuner: {_advice(factory)}, or give a name.")  # noqa: TRY004
    plain = factory.func if isinstance(factory, partial) else factory
    name = getattr(plain, "__name__", type(plain).__name__).strip("<>")
    if isinstance(factory, partial) and factory.keywords:
        name += f"[{','.join(f'{option}={value}' for option, value in factory.keywords.items())}]"
    _check_call(name, factory)
    if isinstance(factory, partial):
        from tuners.factory_options import check_together

        check_together(factory)
    number = 1
    while (numbered := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return Entry(numbered, "", "a function of your own", embedded=False, given=factory)


def split_names(text: str) -> list[str]:
    """The names in "NAME,NAME,..."; commas within brackets are part of a name."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)]


def parse(name: str) -> tuple[str, tuple[tuple[str, Scalar], ...]]:
    """The name before the brackets in ``cruise[gain=0.1]``, and the options in them. Raises ValueError for bad options."""
    plain, bracket, options = name.partition("[")
    if not bracket:
        return plain, ()
    if not options.endswith("]"):
        raise ValueError(f"Cannot read the options of tuner {name!r}: write {plain}[option=value,...].")
    return plain, tuple(_option(name, o) for o in options[:-1].split(","))


def _option(tuner: str, text: str) -> tuple[str, Scalar]:
    """The name of an option and its value: a number, true or false, or else a word."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise ValueError(f"Cannot read option {text!r} of tuner {tuner!r}: write option=value.")
    for read in (int, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value.lower(), value.strip("\"'"))


def _check_call(name: str, factory: Callable[..., object]) -> None:
    """Raise ValueError unless the factory can be called with a Job alone."""
    try:
        signature(factory).bind(None)
    except TypeError as error:
        way = "Give other arguments a default, or pass functools.partial(...)."
        if isinstance(factory, type) and _advice(factory) != _advice(object):
            way = f"It is a class: {_advice(factory)}."
        raise ValueError(f"Cannot use {name!r} as a tuner ({error}): it is called with a Job alone. {way}") from None
    except ValueError:  # a callable without a signature
        pass


def as_module(path: str) -> str:
    """The name of the module in a file, as an import writes it."""
    return path.removesuffix(".py").replace("/", ".").strip(".")


def _hidden(module_name: str) -> str:
    """A sentence about another module of the same name, which the imported one hides; "" if there is none."""
    top = module_name.partition(".")[0]
    spec = getattr(sys.modules.get(top), "__spec__", None)
    used = getattr(spec, "origin", None)
    if spec is not None and used is None:  # a folder without Python files
        found = (finder.find_spec(top, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        module = next((f.origin for f in found if f is not None and f.origin is not None), None)
        folder = next(iter(spec.submodule_search_locations or ()), top)
        return "" if module is None else f" The folder {folder} hides {module}: run the command in another folder."
    for entry in sys.path:
        other = PathFinder.find_spec(top, [entry])
        if used is not None and other is not None and other.origin not in (None, used):
            return f" {other.origin} is another module {top!r}, hidden by {used}: give your file another name."
    return ""


def _advice(given: object) -> str:
    """`adapters.advice`, imported here because listing the names does not need it."""
    from tuners import adapters

    return adapters.advice(given)
