"""Which tokens of which requests the next step computes.

Requests come and go between any two steps. A step first takes the newest token (and guesses) of everyone who is
answering, then prompts in pieces, then new requests, as long as there are blocks and the step has room. Who finds no
block takes one from who came last; that one gives all of its blocks back and starts over later, its tokens kept. The
order is fair: priority, then arrival; nobody overtakes a request that waits for room.

Nothing here knows of models or time: the same requests in the same order give the same steps.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from swift.inference.paged.blocks import BlockPool
from swift.inference.paged.sequence import Piece, Sequence


@dataclass
class Limits:
    """What a step may hold; may change between steps.

    Attributes:
        requests: requests computed together.
        tokens: tokens of a step.
    """

    requests: int
    tokens: int


class Scheduler:
    """Waiting and running requests of one engine.

    Args:
        pool: the blocks of its cache.
        limits: see `Limits`.

    Attributes:
        preemptions: how often a request had to give its blocks back.
    """

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that has nothing computed."""
        insort(self.waiting, sequence, key=Sequence.order)

    def adopt(self, sequence: Sequence) -> None:
        """Take a sequence that has blocks already: a fork."""
        insort(self.running, sequence, key=Sequence.order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give its blocks back."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._free(sequence)

    def plan(self) -> list[Piece[Sequence]]:
        """The pieces of the next step; empty when there is nothing to do."""
        pieces: list[Piece[Sequence]] = []
        room, preemptions = self.limits.tokens, self.preemptions
        for answering in (True, False):
            for sequence in list(self.running):
                if room <= 0:
                    break
                if sequence not in self.running or sequence.num_pending == 0:
                    continue
                if (sequence.num_pending == 1) is not answering:
                    continue
                piece = self._piece(sequence, room)
                if piece is None:
                    continue
                pieces.append(piece)
                room -= len(piece.tokens)
        if preemptions != self.preemptions:  # nobody new while there are too few blocks
            return [piece for piece in pieces if piece.sequence in self.running]
        self._admit(pieces, room)
        return pieces

    def done(self, piece: Piece[Sequence], accepted: int = 0) -> None:
        """Take note that a piece was computed; full blocks become known to the prefix cache.

        Args:
            accepted: how many of its guesses came true; they are among the sequence's tokens by now.
        """
        sequence = piece.sequence
        sequence.num_computed = piece.start + len(piece.tokens) - piece.num_drafts + accepted
        size = self.pool.block_size
        while (sequence.num_registered + 1) * size <= sequence.num_computed:
            at = sequence.num_registered
            tokens = sequence.tokens[at * size : (at + 1) * size]
            sequence.node = self.pool.register(sequence.blocks[at], sequence.node, tokens)
            sequence.num_registered += 1

    def fork(self, sequence: Sequence, copy: Sequence) -> tuple[int, int] | None:
        """Give `copy`, which has the same tokens, the cached tokens of `sequence`: full blocks shared.

        Returns:
            (from, to) when a block that isn't full has to be copied.
        """
        size = self.pool.block_size
        full = sequence.num_computed // size
        copy.blocks = sequence.blocks[:full]
        for block in copy.blocks:
            self.pool.share(block)
        copy.num_computed = full * size
        copy.node, copy.num_registered = sequence.node, sequence.num_registered
        copy.num_cached = sequence.num_cached
        if sequence.num_computed % size == 0:
            return None
        last = self.pool.allocate()
        if last is None:  # its last tokens are computed again, when there is room
            return None
        copy.blocks.append(last)
        copy.num_computed = sequence.num_computed
        return sequence.blocks[full], last

    def _piece(self, sequence: Sequence, room: int) -> Piece[Sequence] | None:
        """What a running sequence computes next; None if it has no blocks for it, or gave them up."""
        start = sequence.num_computed
        drafts = sequence.drafts if sequence.num_pending == 1 else ()
        drafts = drafts[: max(0, min(room - 1, sequence.limit - len(sequence.tokens) - 1))]
        sequence.drafts = drafts
        tokens = [*sequence.tokens[start : start + room], *drafts]
        while not self._reserve(sequence, start + len(tokens)):
            if drafts:
                tokens, drafts, sequence.drafts = tokens[: -len(drafts)], (), ()
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return None
        return self._as_piece(sequence, start, tokens, len(drafts))

    def _as_piece(self, sequence: Sequence, start: int, tokens: list[int], num_drafts: int) -> Piece[Sequence]:
        end = start + len(tokens)
        complete = end - num_drafts == len(sequence.tokens)
        first = len(tokens) - 1 - num_drafts if complete else len(tokens)
        if sequence.prompt_logprobs is not None and start < sequence.num_prompt:
            first = 0
        return Piece(sequence, start, tokens, num_drafts, range(first, len(tokens)))

    def _admit(self, pieces: list[Piece[Sequence]], room: int) -> None:
        """Start waiting requests, in order, while there is room."""
        pool = self.pool
        held: list[Sequence] = []
        while self.waiting and room > 0 and len(self.running) < self.limits.requests:
            sequence = self.waiting[0]
            leader = sequence.leader
            if leader is not None and leader in self.running and not leader.prompt_done:
                held.append(self.waiting.pop(0))
                continue
            # the last token is computed in any case: its logits are wanted
            reusable = 0 if sequence.prompt_logprobs is not None else len(sequence.tokens) - 1
            blocks, node = pool.find(sequence.tokens, sequence.root, reusable)
            needed = -(-len(sequence.tokens) // pool.block_size) - len(blocks)
            # one block to grow for each who runs, so that newcomers don't drive them out at once
            spare = len(self.running) if self.running else 0
            if needed + spare > pool.num_free:
                pool.release(reversed(blocks))
                break
            self.waiting.pop(0)
            sequence.blocks, sequence.node = blocks, node
            sequence.num_registered = len(blocks)
            sequence.num_computed = len(blocks) * pool.block_size
            if not sequence.begun:
                sequence.num_cached = sequence.num_computed
            self.adopt(sequence)
            tokens = sequence.tokens[sequence.num_computed : sequence.num_computed + room]
            if not self._reserve(sequence, len(sequence.tokens)):
                raise AssertionError("blocks were counted and are not there")
            pieces.append(self._as_piece(sequence, sequence.num_computed, tokens, 0))
            room -= len(tokens)
        self.waiting[:0] = held

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens."""
        missing = -(-num_tokens // self.pool.block_size) - len(sequence.blocks)
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            block = self.pool.allocate()
            assert block is not None
            sequence.blocks.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.preemptions += 1
        self.add(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = 0
        sequence.node = sequence.root
        sequence.drafts = ()
