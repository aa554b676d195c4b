"""Blocks of the KV cache: nobody gets one twice, and what they hold is found again."""

from __future__ import annotations

import random

import pytest

from swift.inference.paged.blocks import BlockPool


def filled(pool: BlockPool, tokens: list[int], root: int) -> list[int]:
    """Blocks for `tokens`, the full ones known, as an engine would have them."""
    blocks, node = pool.find(tokens, root, len(tokens))
    size = pool.block_size
    for start in range(len(blocks) * size, len(tokens), size):
        block = pool.allocate()
        assert block is not None
        blocks.append(block)
        if start + size <= len(tokens):
            node = pool.register(block, node, tokens[start : start + size])
    return blocks


def test_every_block_has_one_user_until_it_is_shared():
    pool = BlockPool(4, 2)
    taken = [pool.allocate() for _ in range(4)]
    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.allocate() is None
    pool.release([taken[0]])
    assert pool.allocate() == taken[0]
    pool.share(taken[1])
    pool.release([taken[1]])
    assert pool.allocate() is None
    pool.release([taken[1]])
    assert pool.allocate() == taken[1]


def test_releasing_too_often_is_noticed():
    pool = BlockPool(1, 2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


def test_a_beginning_is_found_again_in_full_blocks():
    pool = BlockPool(10, 4)
    root = pool.new_root()
    blocks = filled(pool, list(range(10)), root)
    pool.release(reversed(blocks))
    assert pool.num_free == 10
    again, _ = pool.find([*range(8), 99, 98, 97], root, 11)
    assert again == blocks[:2]
    other, _ = pool.find([7, *range(1, 10)], root, 10)
    assert other == []


def test_the_limit_leaves_a_token_to_compute():
    pool = BlockPool(10, 4)
    root = pool.new_root()
    blocks = filled(pool, list(range(8)), root)
    pool.release(reversed(blocks))
    found, _ = pool.find(list(range(8)), root, 7)
    assert found == blocks[:1]


def test_the_same_tokens_elsewhere_in_a_text_are_another_block():
    pool = BlockPool(10, 2)
    root = pool.new_root()
    blocks = filled(pool, [1, 2, 1, 2], root)
    assert len(set(blocks)) == 2
    found, _ = pool.find([1, 2, 9, 9], root, 4)
    assert found == blocks[:1]


def test_roots_share_nothing():
    pool = BlockPool(10, 2)
    one, other = pool.new_root(), pool.new_root()
    filled(pool, [1, 2, 3, 4], one)
    assert pool.find([1, 2, 3, 4], other, 4)[0] == []


def test_the_oldest_is_given_up_first_and_the_end_of_a_text_before_its_beginning():
    pool = BlockPool(4, 2)
    root = pool.new_root()
    old = filled(pool, [1, 2, 3, 4], root)
    pool.release(reversed(old))
    new = filled(pool, [5, 6, 7, 8], root)
    pool.release(reversed(new))
    assert [pool.allocate() for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_a_block_given_up_is_not_found_any_more():
    pool = BlockPool(2, 2)
    root = pool.new_root()
    blocks = filled(pool, [1, 2, 3, 4], root)
    pool.release(reversed(blocks))
    assert pool.allocate() == blocks[1]
    assert pool.find([1, 2, 3, 4], root, 4)[0] == [blocks[0]]


def test_without_caching_nothing_is_found():
    pool = BlockPool(4, 2, caching=False)
    root = pool.new_root()
    blocks = filled(pool, [1, 2, 3, 4], root)
    pool.release(reversed(blocks))
    assert pool.find([1, 2, 3, 4], root, 4)[0] == []
    assert pool.num_free == 4


def test_forgetting_makes_all_unused_blocks_blank():
    pool = BlockPool(4, 2)
    root = pool.new_root()
    blocks = filled(pool, [1, 2, 3, 4], root)
    pool.release(blocks[1:])
    pool.forget()
    assert pool.find([1, 2, 3, 4], root, 4)[0] == []
    pool.release(blocks[:1])
    assert sorted(pool.allocate() for _ in range(4)) == [0, 1, 2, 3]


def test_what_is_found_is_what_was_written():
    """Random texts with common beginnings in a small pool: a found block always holds the tokens asked for."""
    draw = random.Random(0)
    pool = BlockPool(12, 3)
    root = pool.new_root()
    holds: dict[int, list[int]] = {}
    held: list[list[int]] = []
    hits = 0
    for _ in range(3000):
        if held and draw.random() < 0.55:
            pool.release(reversed(held.pop(draw.randrange(len(held)))))
            continue
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
        found, node = pool.find(tokens, root, len(tokens) - 1)
        hits += len(found)
        for k, block in enumerate(found):
            assert holds[block] == tokens[k * 3 : k * 3 + 3]
        blocks = list(found)
        for start in range(len(found) * 3, len(tokens), 3):
            block = pool.allocate()
            if block is None:
                break
            assert all(block not in other for other in held)
            holds[block] = tokens[start : start + 3]
            blocks.append(block)
            if start + 3 <= len(tokens):
                node = pool.register(block, node, tokens[start : start + 3])
        held.append(blocks)
    for blocks in held:
        pool.release(reversed(blocks))
    assert hits > 500
    assert pool.num_free == 12
