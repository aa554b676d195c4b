"""Which block of the KV cache belongs to whom, and which ones hold the beginning of a text that may come again.

A full block is known by what it holds and by the blocks before it: (what came before, its tokens). The keys are
compared in full, so two texts are never taken for each other. A block that nobody uses keeps what it holds until its
place is needed; the one that was let go of longest ago is taken first. Nothing here knows of tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Key = tuple[int, tuple[int, ...]]


class BlockPool:
    """The blocks of one cache.

    Args:
        num_blocks: how many there are.
        block_size: tokens of a block.
        caching: blocks are found again by what they hold.

    A *node* is the number of a text that ends at a block border. Roots (the empty text, one for each adapter) are made
    by `new_root`; `register` gives the node behind a block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._nodes = 0
        self._reset()

    def _reset(self) -> None:
        self._never_used = list(range(self.num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused, but what they hold is known; oldest first
        self._users = [0] * self.num_blocks
        self._known: dict[Key, tuple[int, int]] = {}  # -> block, node
        self._key_of: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be had, those included whose contents would be forgotten."""
        return len(self._never_used) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def new_root(self) -> int:
        """A node with nothing before it. Texts under different roots share nothing."""
        self._nodes += 1
        return self._nodes

    def allocate(self) -> int | None:
        """A block for one user; None when all are in use."""
        if self._never_used:
            block = self._never_used.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            del self._known[self._key_of.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One user more."""
        if self._users[block] == 0:
            del self._kept[block]
        self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user less for each; the last ones of a text are given first, so that its beginning is kept longest."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] < 0:
                raise AssertionError(f"block {block} was released more often than taken")
            if self._users[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._never_used.append(block)

    def find(self, tokens: Sequence[int], root: int, limit: int) -> tuple[list[int], int]:
        """The blocks that hold the beginning of `tokens`, taken for one user.

        Args:
            limit: find this many tokens at most.

        Returns:
            the blocks, all full, and the node behind them.
        """
        found: list[int] = []
        node = root
        if not self.caching:
            return found, node
        size = self.block_size
        for start in range(0, limit - size + 1, size):
            entry = self._known.get((node, tuple(tokens[start : start + size])))
            if entry is None:
                break
            found.append(entry[0])
            node = entry[1]
        for block in found:
            self.share(block)
        return found, node

    def register(self, block: int, node: int, tokens: Sequence[int]) -> int:
        """Say what a full block holds; returns the node behind it.

        Args:
            node: the text before the block.
            tokens: what it holds, `block_size` of them.
        """
        if not self.caching:
            return node
        key = (node, tuple(tokens))
        entry = self._known.get(key)
        if entry is not None:  # computed twice at the same time: the first one is the one to be found
            return entry[1]
        behind = self.new_root()
        self._known[key] = (block, behind)
        self._key_of[block] = key
        return behind

    def forget(self) -> None:
        """Forget what blocks hold; those in use stay with their users, and become free as blank ones."""
        self._never_used += self._kept
        self._kept.clear()
        self._known.clear()
        self._key_of.clear()
