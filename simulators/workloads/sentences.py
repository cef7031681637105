"""Text for language models: sentences that a small grammar draws, and the best prediction of their next character.

The grammar is ours, so the text is free of anybody's rights and needs no download. It is a finite automaton whose arcs are
words: a verb agrees with its subject, also across a relative clause, and prefers objects of its own; within a role words
are popular by a power law. As the automaton is known, so is the probability of every next character: no model can predict
better, and `best` says how well that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALPHABET", "NextCharacter", "best", "ngram", "text"]

ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
"""The characters of the text, in the order of their numbers."""

_NOUNS = (
    "worker", "server", "node", "batch", "model", "clock", "queue", "link", "block", "loss", "trace", "rack",
    "job", "shard", "window", "tuner", "cluster", "replica", "gradient", "barrier",
)  # fmt: skip
_VERBS = ("send", "need", "hold", "pull", "drop", "move", "delay", "read", "follow", "replace", "count", "restore")
_ADJECTIVES = ("slow", "new", "late", "busy", "small", "lost", "idle", "stale", "spare", "remote")
_DETERMINERS = {"one": ("the ", "a ", "every ", "this "), "many": ("the ", "two ", "all ", "most ")}
_NUMBERS = ("one", "many")

_State: TypeAlias = tuple[str, ...]


class _Arc(NamedTuple):
    """A word, with the space before or after it, and where it leads."""

    probability: float
    word: str
    to: _State


class NextCharacter(NamedTuple):
    """How well the next character is predicted, on average over characters."""

    accuracy: float
    loss: float  # nats


def text(characters: int, seed: int = 0) -> NDArray[np.int32]:
    """A text of that length, as numbers of `ALPHABET`, [characters]."""
    if characters < 1:
        raise ValueError(f"Cannot draw {characters} characters of text: give 1 or more.")
    rng = np.random.default_rng(seed)
    words: list[str] = []
    length, state = 0, _START
    while length < characters:
        arcs, cumulated = _arcs(state)
        # One draw a word, and not `choice`, whose algorithm may change between versions of NumPy.
        arc = arcs[min(int(np.searchsorted(cumulated, rng.random() * cumulated[-1], side="right")), len(arcs) - 1)]
        words.append(arc.word)
        length, state = length + len(arc.word), arc.to
    return _numbers("".join(words)[:characters])


def _numbers(said: str) -> NDArray[np.int32]:
    return np.array([ALPHABET.index(c) for c in said], np.int32)


# ------------------------------------------------------------------------------------------------------------ the grammar

_START: _State = ("sentence",)


@cache
def _arcs(state: _State) -> tuple[tuple[_Arc, ...], NDArray[np.float64]]:
    """The arcs of a state, and their cumulated probabilities."""
    arcs = tuple(_grammar(*state))
    return arcs, np.cumsum([arc.probability for arc in arcs])


def _grammar(role: str, *about: str) -> Iterator[_Arc]:
    """The arcs of a state: its role, and what the sentence must remember.

    `about` is the number of the sentence's subject; then, in an object, its verb and whether a clause ends with it.
    """
    if role == "sentence":
        for number in _NUMBERS:
            yield from (_Arc(p / 2, word, ("subject", number)) for p, word in _popular(_DETERMINERS[number]))
    elif role == "subject":
        yield from _noun_phrase(about[0], 0, ("subject", *about), ("after subject", about[0]))
    elif role == "bare subject":
        yield from _nouns(about[0], 0, ("after subject", about[0]))
    elif role == "after subject":
        yield _Arc(0.7, " ", ("verb", about[0]))
        yield _Arc(0.3, " that ", ("clause", about[0]))
    elif role in ("verb", "clause"):
        for p, verb in _popular(_VERBS):
            yield _Arc(p, verb + ("s " if about[0] == "one" else " "), ("object", about[0], verb, role))
    elif role == "object":
        for number in _NUMBERS:
            for p, word in _popular(_DETERMINERS[number]):
                yield _Arc(p / 2, word, ("object noun", *about, number))
    elif role in ("object noun", "bare object noun"):
        subject, verb, clause, number = about
        then = ("after object", subject) if clause == "verb" else ("verb", subject)
        space = "" if clause == "verb" else " "
        if role == "object noun":
            yield from (_Arc(0.3 * p, f"{word} ", ("bare object noun", *about)) for p, word in _popular(_ADJECTIVES))
        share = 0.7 if role == "object noun" else 1.0
        favourite = 1 + _VERBS.index(verb)  # every verb prefers other objects
        yield from (arc._replace(probability=share * arc.probability) for arc in _nouns(number, favourite, then, space))
    else:
        yield _Arc(0.75, ". ", _START)
        yield _Arc(0.25, " and ", ("verb", about[0]))


def _noun_phrase(number: str, favourite: int, same: _State, then: _State) -> Iterator[_Arc]:
    """A noun, with or without an adjective before it."""
    yield from (_Arc(0.4 * p, f"{word} ", ("bare " + same[0], *same[1:])) for p, word in _popular(_ADJECTIVES))
    yield from (arc._replace(probability=0.6 * arc.probability) for arc in _nouns(number, favourite, then))


def _nouns(number: str, favourite: int, then: _State, space: str = "") -> Iterator[_Arc]:
    """Every noun in that number; the one at `favourite` is the most popular, and those after it follow."""
    turned = _NOUNS[favourite:] + _NOUNS[:favourite]
    for p, noun in _popular(turned):
        plural = "es" if noun.endswith(("s", "ch")) else "s"
        yield _Arc(p, noun + ("" if number == "one" else plural) + space, then)


def _popular(words: tuple[str, ...]) -> Iterator[tuple[float, str]]:
    """Words with their probabilities: that of the k-th is proportional to 1 / k."""
    total = sum(1 / k for k in range(1, len(words) + 1))
    return ((1 / k / total, word) for k, word in enumerate(words, 1))


# ----------------------------------------------------------------------------------------------------------- predictions


def best(said: NDArray[np.int32]) -> NextCharacter:
    """The best possible prediction of every character of `said`, which begins with a sentence, from all those before it.

    The forward algorithm over the grammar's automaton: the belief is a distribution over states and characters of arcs.
    """
    belief = {("", _START): 1.0}  # (rest of a word, state after it) -> probability
    right, loss = 0, 0.0
    for number in said:
        following: dict[str, dict[tuple[str, _State], float]] = {}
        for (rest, state), p in belief.items():
            arcs = (_Arc(1.0, rest, state),) if rest else _arcs(state)[0]
            for arc in arcs:
                held = following.setdefault(arc.word[0], {})
                left = (arc.word[1:], arc.to)
                held[left] = held.get(left, 0.0) + p * arc.probability
        masses = {c: sum(held.values()) for c, held in following.items()}
        character = ALPHABET[number]
        right += max(masses, key=lambda c: masses[c]) == character
        total = sum(masses.values())
        loss -= np.log(masses[character] / total)
        belief = {left: p / masses[character] for left, p in following[character].items()}
    return NextCharacter(right / len(said), float(loss) / len(said))


def ngram(train: NDArray[np.int32], valid: NDArray[np.int32], n: int) -> NextCharacter:
    """The next character of `valid` from counts in `train` of the n - 1 before it, with a hundredth added to every count.

    With n = 1, a unigram: the most frequent character, always. With n = 2, a bigram: what softmax regression on the last
    character converges to.
    """
    size = len(ALPHABET)
    contexts = [sum(said[i : len(said) - n + 1 + i] * size ** (n - 2 - i) for i in range(n - 1)) for said in (train, valid)]
    counts = np.full((size ** (n - 1), size), 0.01)
    np.add.at(counts, (contexts[0], train[n - 1 :]), 1.0)
    shares = counts / counts.sum(1, keepdims=True)
    after = shares[contexts[1]] if n > 1 else np.broadcast_to(shares[0], (len(valid), size))
    follows = valid[n - 1 :]
    accuracy = float((after.argmax(1) == follows).mean())
    return NextCharacter(accuracy, float(-np.log(after[np.arange(len(follows)), follows]).mean()))
