"""Blocks told in llama.cpp's cells: every token sees its own text and nothing else, whoever comes, goes or waits.

llama.cpp is stood in for by its rules: cells with a token, a position and the numbers of texts, as many as there are.
"""

from __future__ import annotations

import random

import pytest
import torch
from engines import Answer

from swift.inference.choosing.chooser import Chooser
from swift.inference.gguf.runner import GgufRunner
from swift.inference.paged.adapters import AdapterSlots
from swift.inference.paged.blocks import BlockPool
from swift.inference.paged.core import EngineCore, Parts
from swift.inference.paged.scheduler import Limits, Scheduler
from swift.inference.requests import Request, SamplingParams

VOCAB = 64


class Cells:
    """A cache by llama.cpp's rules; the next token of a text follows from all of its tokens."""

    def __init__(self, size):
        self.size = size
        self.cells = []
        self.computed = 0

    def compute(self, rows):
        self.computed += len(rows)
        for row in rows:
            last = max((cell[1] for cell in self.cells if row.sequence in cell[2]), default=-1)
            assert row.position == last + 1, "a text goes on where its cells end"
            self.cells.append([row.token, row.position, {row.sequence}])
        assert len(self.cells) <= self.size, "no more cells than there are"
        scores = [self._scores(row) for row in rows if row.wanted]
        return torch.stack(scores) if scores else torch.empty(0, VOCAB)

    def _scores(self, row):
        seen = sorted((p, token) for token, p, numbers in self.cells if row.sequence in numbers and p <= row.position)
        assert [p for p, _ in seen] == list(range(row.position + 1)), "one cell for each position"
        return torch.nn.functional.one_hot(torch.tensor(expected([token for _, token in seen])), VOCAB).float()

    def remove(self, sequence, start=0, end=-1):
        for cell in self.cells:
            if start <= cell[1] and (end < 0 or cell[1] < end):
                cell[2].discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]

    def share(self, source, target, start, end):
        for cell in self.cells:
            if source in cell[2] and start <= cell[1] < end:
                cell[2].add(target)


def expected(tokens):
    total = 7
    for token in tokens:
        total = (total * 31 + token + 1) % 1_000_003
    return total % VOCAB


def answer_of(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected(tokens))
    return tokens[len(prompt) :]


def engine(tokenizer, *, blocks, size=4, most=4, kept=6, room=12):
    pool = BlockPool(blocks, size, caching=kept > 0)
    scheduler = Scheduler(pool, Limits(most, room))
    runner = GgufRunner(lambda: scheduler.running, size, numbers=2 * most + kept if kept else most, kept=kept)
    cells = Cells(blocks * size)
    core = EngineCore(
        Parts(
            runner=runner,
            scheduler=scheduler,
            chooser=Chooser(VOCAB, "cpu"),
            adapters=AdapterSlots(torch.nn.Module()),
            tokenizer=tokenizer,
            stop_token_ids=frozenset(),
            context_length=blocks * size,
        )
    )
    runner.forget = core.forget_texts
    runner.cache = cells
    return core, cells


@pytest.mark.parametrize("kept", [0, 1, 6])
@pytest.mark.parametrize("blocks", [16, 40])
def test_every_answer_follows_from_its_own_text(tokenizer, blocks, kept):
    core, _ = engine(tokenizer, blocks=blocks, kept=kept)
    draw = random.Random(blocks + kept)
    begins = [[draw.randrange(VOCAB) for _ in range(13)] for _ in range(3)]
    asked, left = [], set()
    for k in range(60):
        prompt = draw.choice(begins)[: draw.randrange(1, 14)] + [
            draw.randrange(VOCAB) for _ in range(draw.randrange(9))
        ]
        count, answer = draw.randrange(1, 24), Answer()
        core.add(Request(str(k), prompt, SamplingParams(max_new_tokens=count)), answer.take)
        asked.append((prompt, count, answer))
        for _ in range(draw.randrange(4)):
            core.step()
        if draw.random() < 0.15:
            core.cancel(str(k))
            left.add(k)
    while core.has_work:
        core.step()
    for k, (prompt, count, answer) in enumerate(asked):
        whole = answer_of(prompt, count)
        assert answer.tokens == (whole if answer.last.finish_reason == "length" else whole[: len(answer.tokens)])
        assert answer.last.finish_reason == "length" or k in left
    assert core.scheduler.pool.num_used == 0
    assert (core.scheduler.preemptions > 0) == (blocks == 16), "few blocks are taken from who came last"


def test_a_text_that_came_before_is_not_computed_again(tokenizer):
    core, cells = engine(tokenizer, blocks=40)
    for k in range(2):
        before = cells.computed
        core.add(Request(str(k), list(range(20)), SamplingParams(max_new_tokens=1)), Answer().take)
        while core.has_work:
            core.step()
    assert cells.computed - before == 4, "the last block, whose end the answer follows from"
