"""Options of tuners: every one has a type and a meaning, and values that do not fit are refused by name."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal

import pytest
from msgspec import Meta

import tuners
from tuners import embedded, entry_of, registry, resolve
from tuners.actions import Job, Tuner
from tuners.baselines.fixed import dssp
from tuners.factory_options import check, options_of


@pytest.mark.parametrize("name", embedded())
def test_every_option_has_a_type_and_a_meaning(name: str) -> None:
    for option in options_of(resolve(name).plain_factory).values():
        assert option.meaning, option.name
        assert option.default, option.name
        assert option.type or option.name in ("estimator", "surrogate")


@pytest.mark.parametrize("name", embedded())
def test_the_defaults_fit_their_own_types(name: str) -> None:
    import inspect

    factory = resolve(name).plain_factory
    known = options_of(factory)
    defaults = {p.name: p.default for p in inspect.signature(factory).parameters.values() if p.name in known}
    check(name, factory, {k: v for k, v in defaults.items() if v is not None and known[k].hint is not None})


@pytest.mark.parametrize("name", embedded())
def test_every_tuner_says_what_it_tunes(name: str) -> None:
    assert registry()[name].tunes
    assert registry()[name].paper or name in ("fixed", "joint")


def mine(
    job: Job,
    *,
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5,
    count: int | None = None,
    how: Literal["a", "b"] = "a",
    loud: bool = False,
    free=3,  # type: ignore[no-untyped-def]
    table: dict[str, int] = {},  # noqa: B006
) -> Tuner:
    """Do nothing.

    Args:
        job: what is tuned.
        share: of the
            budget: all of it.
        count: of trials.

    Raises nothing.
    """
    yield from ()


def test_types_are_words() -> None:
    known = options_of(mine)
    assert {o.name: o.type for o in known.values()} == {
        "share": "a number, above 0, at most 1",
        "count": "a whole number",
        "how": "a or b",
        "loud": "true or false",
        "free": "any value",
        "table": "",
    }
    assert {o.name: o.default for o in known.values()} == {
        "share": "0.5",
        "count": "not set",
        "how": "a",
        "loud": "false",
        "free": "3",
        "table": "{}",
    }
    assert known["share"].meaning == "of the budget: all of it."
    assert known["how"].meaning == ""


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("share", 0, r"Cannot use share=0 for tuner 'mine': give a number, above 0, at most 1 \(default: 0\.5\)"),
        ("share", math.nan, r"Cannot use share=nan"),
        ("share", "half", r"Cannot use share=half"),
        ("share", True, r"Cannot use share=true"),
        ("count", 1.5, r"Cannot use count=1\.5 .*give a whole number"),
        ("how", "c", r"Cannot use how=c .*give a or b"),
        ("loud", 1, r"Cannot use loud=1 .*give true or false"),
        ("laud", 1, r"has no option 'laud'\. Did you mean 'loud'\? It has share, count"),
        ("table", "x", r"Cannot set option 'table' of tuner 'mine' by text: pass functools\.partial"),
    ],
)
def test_what_does_not_fit_is_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("mine", mine, {option: value})


def test_what_fits_is_taken() -> None:
    check("mine", mine, {"share": 1, "count": 3, "how": "b", "loud": True, "free": "anything"})


def test_options_that_exclude_each_other_are_refused_before_anything_runs() -> None:
    """Also in a function of Python's; a default counts as much as what is given."""
    with pytest.raises(ValueError, match=r"Cannot bound staleness by \[20, 15\]"):
        entry_of(partial(dssp, low=20))
    assert entry_of(partial(dssp, low=20, high=20)).name == "dssp[low=20,high=20]"


def test_annotations_that_cannot_be_resolved_are_any_value() -> None:
    def theirs(job, *, rate: Nowhere = 1):  # type: ignore[name-defined, no-untyped-def]  # noqa: F821
        yield

    assert options_of(theirs)["rate"].type == "any value"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cruise[gain=abc]", r"Cannot use gain=abc for tuner 'cruise\[gain=abc\]': give a number, at least 0"),
        ("cruise[solver=milpp]", r"give exact or milp"),
        ("my_tuners.halving", r"No tuner 'my_tuners\.halving'\. Did you mean 'my_tuners:halving'"),
        ("my/tuners.py", r"Did you mean 'my\.tuners:FUNCTION'"),
        ("cruize", r"Did you mean 'cruise'"),
    ],
)
def test_names_are_refused_with_what_to_write(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name)


class Random:
    """An optimiser as libraries have it."""

    def ask(self) -> dict[str, float]:
        return {}

    def tell(self, values: dict[str, float], score: float) -> None:
        pass


class Greedy:
    """A tuner that keeps state; its objects are called with the job."""

    def __call__(self, job: object) -> object:
        yield


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Random(),
            r"give tuners\.adapters\.from_ask_tell\(make\), and make\(job\) returns a Random",
        ),
        (Random, r"It is a class: it has ask and tell; give tuners\.adapters\.from_ask_tell"),
        (
            Greedy,
            r"It is a class: it is a Greedy, which can be called; give an object, Greedy\(\.\.\.\)",
        ),
        (7, r"Cannot use 7 as a tuner: write a function of a Job that yields actions, or give a name\."),
    ],
)
def test_a_class_or_an_optimiser_is_told_how_it_becomes_a_tuner(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry_of(given)  # type: ignore[arg-type]


def test_functions_have_names_of_their_own() -> None:
    assert entry_of(mine).name == "mine"
    assert entry_of(mine, taken={"mine", "mine-2"}).name == "mine-3"
    assert entry_of(lambda job: mine(job)).name == "lambda"
    assert entry_of(mine).factory is mine
    assert "entry_of" in tuners.__all__
