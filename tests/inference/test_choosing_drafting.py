"""Guesses from a text's own tokens."""

from __future__ import annotations

import random

import pytest

from swift.inference.choosing.drafting import PromptLookup


def slow_lookup(tokens: list[int], num: int, sizes: range) -> list[int]:
    """The definition: search the whole text for the latest earlier occurrence, longest group first."""
    for size in sizes:
        last = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(last) == size and tokens[end - size : end] == last:
                out = list(tokens)
                for k in range(num):
                    out.append(out[end + k])
                return out[len(tokens) :]
    return []


@pytest.mark.parametrize("letters", [2, 5, 30])
def test_guesses_are_what_followed_the_latest_occurrence(letters):
    draws = random.Random(letters)
    for _ in range(30):
        text = [draws.randrange(letters) for _ in range(draws.randrange(1, 60))]
        lookup = PromptLookup(4)
        for length in range(1, len(text) + 1, draws.randrange(1, 4)):  # texts grow by more than one token as well
            assert lookup.draft(text[:length], 4) == slow_lookup(text[:length], 4, range(3, 1, -1))


def test_a_longer_agreement_goes_before_a_later_one():
    assert PromptLookup(2).draft([1, 2, 3, 8, 9, 2, 3, 7, 1, 2, 3], 2) == [8, 9]


def test_a_repetition_is_guessed_at_full_length():
    assert PromptLookup(6).draft([4, 5, 4, 5, 4, 5], 6) == [4, 5, 4, 5, 4, 5]


def test_no_more_than_wanted_and_nothing_for_new_tokens():
    lookup = PromptLookup(3)
    assert lookup.draft([1, 2, 3, 1, 2], 2) == [3, 1]
    assert lookup.draft([1, 2, 3, 1, 2, 3], 9) == [1, 2, 3]
    assert lookup.draft([1, 2, 3, 1, 2, 3, 9], 3) == []
    assert lookup.draft([], 3) == []


def test_another_text_starts_over():
    lookup = PromptLookup(2)
    lookup.draft([1, 2, 3, 4, 5, 6], 2)
    assert lookup.draft([7, 8, 9], 2) == []
    assert lookup.draft([7, 8, 9, 7, 8], 2) == [9, 7]
