"""Ring and Ulysses sizes by the number of heads."""

from __future__ import annotations

import pytest

from swift.config.context import resolve_context
from swift.core.errors import UsageError


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "sizes"),
    [
        (1, 8, 8, (1, 1)),
        (4, 8, 8, (1, 4)),
        (8, 8, 4, (2, 4)),  # no key-value head is sent twice
        (4, 8, 1, (1, 4)),  # there is no other way
        (6, 8, 2, (3, 2)),
        (4, 9, 3, (4, 1)),  # nothing divides
        (6, 9, 3, (2, 3)),
    ],
)
def test_auto_prefers_heads(cp, heads, kv_heads, sizes):
    assert resolve_context("auto", cp, heads, kv_heads) == sizes


def test_a_ring_takes_all():
    assert resolve_context("ring", 4, 8, 8) == resolve_context("allgather", 4, 8, 8) == (4, 1)


def test_ulysses_repeats_key_value_heads():
    assert resolve_context("ulysses", 8, 8, 2) == (1, 8)


@pytest.mark.parametrize(("cp", "nearest", "product"), [(6, 4, "ring 3 x ulysses 2"), (16, 8, "ring 2 x ulysses 8")])
def test_ulysses_that_cannot_be_names_the_nearest(cp, nearest, product):
    with pytest.raises(UsageError) as refusal:
        resolve_context("ulysses", cp, 8, 8)
    assert f"--sequence_parallel_size {nearest}," in refusal.value.fix and product in refusal.value.fix
