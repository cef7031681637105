"""Advice on unknown names, and what msgspec says of an unknown key."""

import msgspec
import pytest

from tuners.near_names import near_keys, near_names, unknown_key


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 0


class Needy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int


class Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parts: list[Part] = []
    demand: Part = Part()
    needed: Needy | None = None


def said_of(table):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(table, Whole)
    return str(caught.value)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"part": 1}, ("part", "")),
        ({"a`b - at": 1}, ("a`b - at", "")),
        ({"demand": {"sise": 1}}, ("sise", "demand")),
        ({"parts": [{}, {"sise": 1}]}, ("sise", "parts[1]")),
        ({"demand": {"size": "one"}}, None),
    ],
)
def test_an_unknown_key_is_told_with_its_table(table, found):
    assert unknown_key(said_of(table)) == found


def test_a_key_that_is_unknown_is_answered_with_the_nearest_of_its_table():
    keys = {"": Whole.__struct_fields__, "demand": Part.__struct_fields__}
    assert near_keys(said_of({"part": 1}), keys) == "there is no key 'part'; did you mean parts?"
    assert near_keys(said_of({"demand": {"sise": 1}}), keys) == "demand has no key 'sise'; did you mean size?"
    assert (
        near_keys(said_of({"demand_size": 1}), keys) == "there is no key 'demand_size'; did you mean demand.size or demand?"
    )
    assert near_keys("anything else", keys) == "anything else"


def test_other_mistakes_are_told_with_their_key():
    assert near_keys(said_of({"parts": [{}, {"size": "one"}]}), {}) == "parts[1].size: expected `int`, got `str`."
    assert near_keys(said_of({"needed": {}}), {}) == "needed lacks the key 'size'; give it."


def test_many_names_are_shown_by_a_command():
    assert near_names("zzz", ["a", "b"]) == "choose one of a, b."
    assert near_names("zzz", map(str, range(13)), shown_by="`list`") == "choose one of the 13 that `list` shows."


def test_a_part_of_keys_is_answered_with_these_keys_where_none_is_similar():
    assert near_names("usd", ["runs", "cost_usd"]) == "did you mean cost_usd?"
    assert near_names("seconds", ["every_seconds", "a_seconds_b", "seconds_c", "d_seconds"]).count("or") == 2
    assert near_names("st", ["runs", "cost_usd"]) == "choose one of runs, cost_usd."
    assert near_names("", ["runs_", "cost_usd"]) == "choose one of runs_, cost_usd."
