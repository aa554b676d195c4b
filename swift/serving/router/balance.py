"""Which replica gets a request: one that has the beginning of its prompt in its cache, unless it has too much to do.

Prompts are cut into blocks, and a block is known by the hash of all text up to its end, as in a prefix cache. Each
replica is remembered with the blocks that it was sent. What affinity may cost is bounded as in consistent hashing with
bounded loads (Mirrokni et al. 2016, arXiv:1608.01350): no replica gets more than `slack` times the mean. Pure: knows
nothing of servers, HTTP or time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

BLOCK_BYTES = 128  # about two blocks of a KV cache
_MAX_BLOCKS = 256  # of a prompt: two prompts alike for that long belong together whatever follows


def prefix_chain(prompt: bytes) -> tuple[int, ...]:
    """Hashes of a prompt's beginnings, block by block; the rest of the last block doesn't count."""
    chain, before = [], 0
    for start in range(0, min(len(prompt), _MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        before = hash((before, prompt[start : start + BLOCK_BYTES]))
        chain.append(before)
    return tuple(chain)


@dataclass
class _Load:
    """What is known of one replica.

    Attributes:
        active: requests that it is answering.
        given: requests so far; decides between equals.
        seen: blocks that it was sent, the latest last.
    """

    active: int = 0
    given: int = 0
    seen: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def matched(self, chain: Sequence[int]) -> int:
        """How many blocks of the beginning it has seen."""
        for count, block in enumerate(chain):
            if block not in self.seen:
                return count
        return len(chain)


class Balancer:
    """Chooses replicas by name.

    Args:
        slack: a replica may have this many times the mean of requests, rounded up.
        max_blocks: remembered for each replica, those not seen for longest are forgotten.
    """

    def __init__(self, *, slack: float = 1.25, max_blocks: int = 1 << 16) -> None:
        self._slack = slack
        self._max_blocks = max_blocks
        self._loads: dict[str, _Load] = {}
        self.blocks_matched = 0
        self.blocks_asked = 0

    def active(self, name: str) -> int:
        """Requests that a replica is answering."""
        return self._load(name).active

    def choose(self, chain: Sequence[int], candidates: Collection[str]) -> str:
        """The one of `candidates` that gets a request.

        Among those that aren't overloaded it is the one that has seen most of the prompt's beginning; of equals the one
        with the fewest requests.

        Args:
            chain: of the prompt (`prefix_chain`).
            candidates: at least one.
        """
        loads = {name: self._load(name) for name in candidates}
        total = sum(load.active for load in loads.values())
        most = math.ceil(self._slack * (total + 1) / len(loads))
        free = {name: load for name, load in loads.items() if load.active < most}
        return min(free, key=lambda name: (-free[name].matched(chain), free[name].active, free[name].given))

    def begin(self, name: str, chain: Sequence[int]) -> None:
        """A replica was sent a request."""
        load = self._load(name)
        self.blocks_matched += load.matched(chain)
        self.blocks_asked += len(chain)
        load.active += 1
        load.given += 1
        for block in reversed(chain):  # beginnings are the latest, so that they are forgotten last
            load.seen[block] = None
            load.seen.move_to_end(block)
        while len(load.seen) > self._max_blocks:
            load.seen.popitem(last=False)

    def end(self, name: str) -> None:
        """It has answered, or failed."""
        self._load(name).active -= 1

    def forget(self, name: str) -> None:
        """Its cache is empty: it was started anew."""
        self._load(name).seen.clear()

    def _load(self, name: str) -> _Load:
        return self._loads.setdefault(name, _Load())
