"""The scheduler, against a cache of plain numbers: whatever it plans, everyone reads back their own tokens."""

from __future__ import annotations

import random

import pytest

from swift.inference.paged.blocks import BlockPool
from swift.inference.paged.scheduler import Limits, Scheduler
from swift.inference.paged.sequence import Sequence
from swift.inference.requests import Request


class World:
    """A scheduler, and what a model would do with its plans: write tokens, read all of a sequence's tokens."""

    def __init__(self, num_blocks: int = 20, size: int = 4, *, requests: int = 8, tokens: int = 32) -> None:
        self.pool = BlockPool(num_blocks, size)
        self.scheduler = Scheduler(self.pool, Limits(requests, tokens))
        self.root = self.pool.new_root()
        self.cells: dict[tuple[int, int], int] = {}
        self.made = 0
        self.sizes: list[int] = []

    def add(self, prompt: list[int], new: int = 5, *, priority: int = 0, leader: Sequence | None = None) -> Sequence:
        self.made += 1
        request = Request(f"r{self.made}", prompt, priority=priority)
        sequence = Sequence(
            request=request,
            sink=lambda update: None,
            arrival=self.made,
            tokens=list(prompt),
            limit=len(prompt) + new,
            ends=frozenset(),
            root=self.root,
            node=self.root,
            adapter=0,
            state=None,
            text=None,  # type: ignore[arg-type]
            leader=leader,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, choose=lambda sequence: len(sequence.tokens) % 7) -> list[Sequence]:
        """One step; returns the sequences that ended in it."""
        pieces = self.scheduler.plan()
        size = self.pool.block_size
        self.sizes.append(sum(len(piece.tokens) for piece in pieces))
        assert self.sizes[-1] <= self.scheduler.limits.tokens
        assert len(self.scheduler.running) <= self.scheduler.limits.requests
        for piece in pieces:
            for k, token in enumerate(piece.tokens):
                at = piece.start + k
                self.cells[piece.sequence.blocks[at // size], at % size] = token
        for piece in pieces:
            sequence = piece.sequence
            end = piece.start + len(piece.tokens)
            seen = [self.cells[sequence.blocks[at // size], at % size] for at in range(end)]
            assert seen[: len(sequence.tokens)] == sequence.tokens[:end]
        ended = []
        for piece in pieces:
            sequence = piece.sequence
            if piece.wants:
                accepted = 0
                while True:
                    token = choose(sequence)
                    sequence.tokens.append(token)
                    if (
                        accepted == piece.num_drafts
                        or token != piece.tokens[len(piece.tokens) - piece.num_drafts + accepted]
                    ):
                        break
                    if len(sequence.tokens) >= sequence.limit:
                        break
                    accepted += 1
                self.scheduler.done(piece, accepted)
                if len(sequence.tokens) >= sequence.limit:
                    self.scheduler.remove(sequence)
                    ended.append(sequence)
            else:
                self.scheduler.done(piece)
        return ended

    def run(self) -> None:
        for _ in range(10_000):
            if not (self.scheduler.waiting or self.scheduler.running):
                return
            self.step()
        raise AssertionError("it never ends")


def test_prompts_longer_than_a_step_come_in_pieces():
    world = World(tokens=8)
    sequence = world.add(list(range(20)), new=2)
    world.step()
    world.step()
    assert sequence.num_computed == 16 and len(sequence.tokens) == 20
    world.step()
    assert len(sequence.tokens) == 21


def test_who_answers_goes_before_prompts():
    world = World(tokens=8)
    first = world.add([1, 2, 3], new=9)
    world.step()
    world.add(list(range(30)), new=1)
    for k in range(3):
        world.step()
        assert len(first.tokens) == 5 + k
    assert world.sizes == [3, 8, 8, 8]


def test_a_common_beginning_is_computed_once():
    world = World(tokens=100)
    world.add(list(range(12)), new=1)
    world.step()
    late = world.add([*range(12), 50], new=1)
    world.step()
    assert late.num_cached == 12
    assert world.sizes == [12, 1]


def test_members_of_a_group_wait_for_the_first_ones_prompt():
    world = World(tokens=100, requests=4)
    prompt = list(range(13))
    leader = world.add(prompt, new=3)
    others = [world.add(prompt, new=3, leader=leader) for _ in range(2)]
    world.step()
    assert all(other in world.scheduler.waiting for other in others)
    world.step()
    assert [other.num_cached for other in others] == [12, 12]
    assert world.sizes == [13, 3]


def test_nobody_overtakes_a_request_that_waits_for_room():
    world = World(num_blocks=6, size=4, tokens=100)
    world.add(list(range(16)), new=3)
    world.step()
    large = world.add(list(range(100, 112)), new=1)
    small = world.add([1], new=1)
    world.step()
    assert world.scheduler.waiting == [large, small]


def test_priority_goes_before_arrival():
    world = World(requests=1)
    world.add([1, 2], new=1)
    world.step()
    late = world.add([1, 2, 3], new=1)
    urgent = world.add([4, 5], new=1, priority=-1)
    assert world.step() == [urgent]
    assert world.step() == [late]


def test_who_came_last_gives_way_and_finds_its_text_again():
    world = World(num_blocks=8, size=4, tokens=100)
    early, late = world.add([1] * 9, new=20), world.add([2] * 9, new=20)
    world.run()
    assert world.scheduler.preemptions > 0
    assert len(early.tokens) == len(late.tokens) == 29
    assert world.pool.num_used == 0


def test_guesses_that_come_true_are_kept_and_others_overwritten():
    world = World(tokens=100)
    truth = [(k * 5) % 11 for k in range(60)]
    sequence = world.add(truth[:6], new=30)
    draw = random.Random(1)
    steps = 0
    while sequence in world.scheduler.waiting or sequence in world.scheduler.running:
        if sequence.num_pending == 1:
            guess = [truth[len(sequence.tokens) + k] if draw.random() < 0.7 else 99 for k in range(3)]
            sequence.drafts = tuple(guess)
        world.step(lambda s: truth[len(s.tokens)])
        steps += 1
    assert sequence.tokens == truth[:36]
    assert steps < 25
    assert world.pool.num_used == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_everyone_reads_their_own_tokens(seed):
    """Random arrivals, cancellations, limits and guesses over common beginnings, in a cache that is too small."""
    draw = random.Random(seed)
    world = World(num_blocks=draw.choice([8, 13, 40]), size=draw.choice([1, 3, 4]), requests=draw.choice([1, 3, 9]))
    capacity = world.pool.num_blocks * world.pool.block_size
    alive: list[Sequence] = []
    for _ in range(400):
        if draw.random() < 0.4:
            length = draw.randrange(1, max(2, min(30, capacity - 1)))
            prompt = [draw.randrange(2) for _ in range(length)]
            leader = draw.choice(alive) if alive and draw.random() < 0.2 else None
            new = draw.randrange(1, max(2, min(9, capacity - length + 1)))
            alive.append(world.add(prompt, min(new, capacity - length), leader=leader))
        if alive and draw.random() < 0.05:
            world.scheduler.remove(alive.pop(draw.randrange(len(alive))))
        world.scheduler.limits.tokens = draw.choice([1, 2, 7, 32])
        for sequence in world.scheduler.running:
            if sequence.num_pending == 1:
                sequence.drafts = tuple(draw.randrange(2) for _ in range(draw.randrange(3)))
        if world.scheduler.waiting or world.scheduler.running:
            for ended in world.step(lambda s: draw.randrange(2)):
                alive.remove(ended)
        held = {block for sequence in world.scheduler.running for block in sequence.blocks}
        assert len(held) == world.pool.num_used
    world.scheduler.limits.tokens = 32
    world.run()
    assert world.pool.num_used == 0
