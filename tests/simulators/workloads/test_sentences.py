"""Generated text: the grammar is a distribution, and nobody predicts its next character better than it does itself."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from simulators.workloads import datasets, sentences
from simulators.workloads.sentences import ALPHABET, best, ngram, text


def said(numbers: np.ndarray) -> str:
    return "".join(ALPHABET[i] for i in numbers)


def states() -> list[tuple[str, ...]]:
    """All states of the grammar that can be reached."""
    found, left = [sentences._START], [sentences._START]
    while left:
        for arc in sentences._arcs(left.pop())[0]:
            if arc.to not in found:
                found.append(arc.to)
                left.append(arc.to)
    return found


def test_public_names_exist() -> None:
    assert all(hasattr(sentences, name) for name in sentences.__all__)


def test_text_is_the_same_everywhere_and_begins_alike_however_long_it_is() -> None:
    assert said(text(34, seed=0)) == FIRST
    np.testing.assert_array_equal(text(500, seed=1)[:100], text(100, seed=1))
    assert not np.array_equal(text(100, seed=1), text(100, seed=2))
    with pytest.raises(ValueError, match="Cannot draw 0 characters"):
        text(0)


FIRST = "the busy workers delay all losses."


def test_the_arcs_of_every_state_are_a_distribution() -> None:
    found = states()
    assert len(found) > 100
    for state in found:
        arcs, cumulated = sentences._arcs(state)
        assert cumulated[-1] == pytest.approx(1.0)
        assert all(arc.word and set(arc.word) <= set(ALPHABET) for arc in arcs)


def test_a_verb_agrees_with_its_subject_also_across_a_clause() -> None:
    """The verb of the sentence is the last one before its object: after the clause, where there is one."""
    seen = 0
    for sentence in said(text(60_000, seed=3)).split(". ")[:-1]:
        first, *_ = sentence.split(" and ")
        words = first.split()
        verbs = [w for w in words if w.removesuffix("s") in sentences._VERBS]
        seen += "that" in words
        assert len(verbs) == 1 + ("that" in words)
        if words[0] in ("every", "a", "this"):
            assert all(verb.endswith("s") for verb in verbs)
        if words[0] in ("two", "all", "most"):
            assert not any(verb.endswith("s") for verb in verbs)
    assert seen > 200


def probability(rest: str, state: tuple[str, ...]) -> float:
    """Of a text that begins in a state, summed over all ways in which the grammar makes it: written for clarity."""
    total = 0.0
    for arc in sentences._arcs(state)[0]:
        if arc.word.startswith(rest):
            total += arc.probability
        elif rest.startswith(arc.word):
            total += arc.probability * probability(rest[len(arc.word) :], arc.to)
    return total


@pytest.mark.parametrize("length", [1, 5, 40, 90])
def test_the_best_prediction_is_the_probability_of_the_text(length: int) -> None:
    drawn = text(length, seed=5)
    expected = -math.log(probability(said(drawn), sentences._START)) / length
    assert best(drawn).loss == pytest.approx(expected, rel=1e-9)


def test_nobody_predicts_better_than_the_grammar() -> None:
    train, valid = text(60_000, seed=0), text(6_000, seed=1)
    counted = [ngram(train, valid, n) for n in (1, 2, 3, 4)]
    assert [a.loss > b.loss for a, b in pairwise(counted)] == [True] * 3
    bound = best(valid)
    assert all(bound.loss < found.loss and bound.accuracy > found.accuracy for found in counted)


def test_a_unigram_and_a_bigram_by_hand() -> None:
    train, valid = np.array([0, 1, 0, 1, 0, 2], np.int32), np.array([0, 1, 0, 2], np.int32)
    assert ngram(train, valid, 1).accuracy == 0.5  # always character 0
    assert ngram(train, valid, 2).accuracy == pytest.approx(2 / 3)  # 0 -> 1, 1 -> 0
    size = len(ALPHABET)
    shares = [2.01 / (3 + 0.01 * size), 2.01 / (2 + 0.01 * size), 1.01 / (3 + 0.01 * size)]
    assert ngram(train, valid, 2).loss == pytest.approx(-np.log(shares).mean())


def test_pieces_follow_each_other_and_labels_are_the_next_characters() -> None:
    made = datasets.sentences(samples=10, length=8, valid_samples=3, seed=2)
    (x, y), whole = made.train, text(81, seed=4)
    np.testing.assert_array_equal(x.reshape(-1), whole[:-1])
    np.testing.assert_array_equal(y.reshape(-1), whole[1:])
    assert (x.dtype, made.shape, made.classes, made.valid[0].shape) == (np.int32, (8,), 28, (3, 8))
