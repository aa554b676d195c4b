"""Every example exactly once an epoch, whatever the batch size, the accumulation and the number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from swift.data.loading.batch import Layout, collate
from swift.data.loading.loader import TrainLoader, evaluation_batches
from swift.data.rows import RowRef
from swift.data.units import NO_NOTES


class FakeExamples:
    """Example i holds the token i repeated; all but the first token are trained."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, dtype=np.int32)

    def __len__(self):
        return len(self.lengths)

    def notes(self, index: int) -> np.ndarray:
        return NO_NOTES

    def tokens(self, index):
        n = int(self.lengths[index])
        weights = np.ones(n, dtype=np.float32)
        weights[0] = 0
        return np.full(n, index + 1, dtype=np.int32), weights

    def ref(self, index):
        return RowRef("rows.jsonl", index + 1)


LENGTHS = np.random.default_rng(3).integers(2, 40, 53)


def seen_in_epoch(examples, layout, *, epoch, world_size, seed=7):
    """Examples per step over all ranks, checking that ranks run equally many micro-batches."""
    loaders = [TrainLoader(examples, layout, seed=seed, rank=r, world_size=world_size) for r in range(world_size)]
    consumed, steps = 0, []
    for _ in range(loaders[0].steps_in_epoch(epoch)):
        mine = [loader.step(epoch, consumed) for loader in loaders]
        assert len({len(m) for m in mine}) == 1
        steps.append([e for m in mine for batch in m for e in batch])
        consumed += loaders[0].global_units
    assert consumed >= loaders[0].num_units(epoch)
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("size", "accumulated"), [(1, 1), (4, 1), (1, 4), (3, 5), (64, 1)])
@pytest.mark.parametrize("packing_length", [0, 64])
@pytest.mark.parametrize("group_by_length", [False, True])
def test_each_example_exactly_once_per_epoch(world_size, size, accumulated, packing_length, group_by_length):
    layout = Layout(size, accumulated, packing_length=packing_length, group_by_length=group_by_length)
    for epoch in (0, 1):
        steps = seen_in_epoch(FakeExamples(LENGTHS), layout, epoch=epoch, world_size=world_size)
        assert sorted(e for step in steps for e in step) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("packing_length", [0, 64])
def test_steps_hold_the_same_examples_however_they_are_spread(packing_length):
    examples = FakeExamples(LENGTHS)
    ways = [(8, 1, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)]
    results = [
        [sorted(s) for s in seen_in_epoch(examples, Layout(b, a, packing_length=packing_length), epoch=0, world_size=w)]
        for b, a, w in ways
    ]
    assert all(result == results[0] for result in results)


def test_order_is_a_function_of_seed_and_epoch():
    examples, layout = FakeExamples(LENGTHS), Layout(4)

    def order(seed, epoch):
        return seen_in_epoch(examples, layout, epoch=epoch, world_size=1, seed=seed)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(1, 3) == order(1, 3)


def test_without_shuffle_file_order():
    steps = seen_in_epoch(FakeExamples(LENGTHS), Layout(4, shuffle=False), epoch=2, world_size=1)
    assert [e for step in steps for e in step] == list(range(len(LENGTHS)))


def test_any_step_is_reached_without_the_ones_before():
    layout = Layout(2, 2)
    walked = TrainLoader(FakeExamples(LENGTHS), layout, seed=1)
    for consumed in range(0, 53, 4):
        fresh = TrainLoader(FakeExamples(LENGTHS), layout, seed=1)
        assert fresh.step(1, consumed) == walked.step(1, consumed)


def test_grouping_by_length_saves_padding():
    examples = FakeExamples(np.random.default_rng(0).integers(2, 500, 2000))
    padded = Layout(8, padding_free=False)
    plain = TrainLoader(examples, padded, seed=0).efficiency()
    grouped = TrainLoader(examples, replace(padded, group_by_length=True), seed=0).efficiency()
    assert grouped > 0.95 > 0.8 > plain


def test_the_longest_batch_comes_first_so_that_memory_runs_out_at_once():
    lengths = np.random.default_rng(1).integers(2, 500, 3000)
    layout = Layout(4, padding_free=False, group_by_length=True)
    for epoch in range(3):
        loader = TrainLoader(FakeExamples(lengths), layout, seed=0)
        assert max(lengths[loader.step(epoch, 0)[0]]) == lengths.max()


def targets_of(batch):
    """(predicting token, predicted token, weight) triples of a batch."""
    flat = batch.input_ids.flatten()
    return sorted(
        zip(
            flat[batch.target_index].tolist(),
            batch.target_ids.tolist(),
            batch.target_weights.tolist(),
            strict=True,
        )
    )


def test_padded_and_concatenated_batches_train_the_same_targets():
    examples = FakeExamples([5, 9, 2, 30])
    flat = collate(examples, [0, 1, 2, 3], Layout(4))
    padded = collate(examples, [0, 1, 2, 3], Layout(4, padding_free=False))
    assert targets_of(flat) == targets_of(padded)
    assert flat.num_tokens == padded.num_tokens == 46
    assert flat.borders == [0, 5, 14, 16, 46]
    assert padded.input_ids.shape == (4, 30)
    assert padded.attention_mask.sum() == 46
    assert flat.weight == 4 + 8 + 1 + 29
    # no target crosses a border: the token before each target is of the same example
    assert all(a == b for a, b, _ in targets_of(flat))


def test_positions_start_anew_in_each_example():
    batch = collate(FakeExamples([3, 2]), [0, 1], Layout())
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_empty_batch_weighs_nothing():
    batch = collate(FakeExamples([3]), [], Layout())
    assert batch.weight == 0
    assert batch.num_tokens == 0
    assert batch.input_ids.shape == (1, 1)
    assert batch.target_index.dtype == torch.int64


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_each_example_once(world_size):
    examples = FakeExamples(LENGTHS)
    refs = []
    counts = set()
    for rank in range(world_size):
        batches = list(evaluation_batches(examples, Layout(), tokens_per_batch=100, rank=rank, world_size=world_size))
        counts.add(len(batches))
        refs += [ref.line for batch in batches for ref in batch.refs]
        assert all(batch.num_tokens <= 100 for batch in batches)
    assert len(counts) == 1
    assert sorted(refs) == list(range(1, len(LENGTHS) + 1))
