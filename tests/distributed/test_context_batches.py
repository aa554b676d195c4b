"""How a micro-batch is cut for ranks that share its sequences: nothing lost, nothing twice, all in reach."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.data.loading.batch import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.distributed.context.batches import cut_batch, join_shares, rows_length, share_index
from swift.distributed.mesh import Axis, Mesh, build_mesh

PAD = 7


def place(ring: int = 1, ulysses: int = 1, rank: int = 0) -> Mesh:
    """The mesh as rank `rank` of cp sees it; enough for cutting, which talks to nobody."""
    axes = {"ring": Axis("ring", ring, rank // ulysses), "ulysses": Axis("ulysses", ulysses, rank % ulysses)}
    return Mesh(Degrees(ring=ring, ulysses=ulysses), axes=axes)


def batch_of(lengths: list[int], *, padded: bool = False) -> Batch:
    draw = np.random.default_rng(len(lengths))
    examples = []
    for length in lengths:
        weights = (draw.random(length) > 0.3).astype(np.float32) * draw.random(length).astype(np.float32)
        examples.append((draw.integers(10, 90, length).astype(np.int32), weights))
    return make_batch(examples, [RowRef("t", i) for i in range(len(lengths))], Layout(padding_free=not padded))


SHAPES = [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2), (3, 1), (2, 3), (1, 3)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("ring", "ulysses"), SHAPES)
@pytest.mark.parametrize("multiple", [1, 3, 4])
def test_shares_are_the_row(ring, ulysses, multiple, padded):
    batch = batch_of([5, 17, 1, 9], padded=padded)
    cp = ring * ulysses
    shares = [cut_batch(batch, place(ring, ulysses, r), pad_token_id=PAD, multiple=multiple) for r in range(cp)]
    length = rows_length(batch, place(ring, ulysses), multiple)
    index = [share_index(length, place(ring, ulysses, r)) for r in range(cp)]
    assert torch.cat(index).sort().values.tolist() == list(range(length))
    tokens = batch.input_ids.numel()
    row, positions, real = (torch.full((length,), -1) for _ in range(3))
    targets: dict[int, tuple[int, float]] = {}
    for share, mine in zip(shares, index, strict=True):
        assert share.input_ids.shape == share.position_ids.shape == (1, length // cp)
        assert share.input_ids.shape[1] % multiple == 0
        row[mine], positions[mine] = share.input_ids[0], share.position_ids[0]
        real[mine] = (
            torch.ones(len(mine), dtype=torch.long) if share.attention_mask is None else share.attention_mask[0] * 1
        )
        found = zip(share.target_index.tolist(), share.target_ids.tolist(), share.target_weights.tolist(), strict=True)
        for local, target, weight in found:
            assert int(mine[local]) not in targets
            targets[int(mine[local])] = (target, weight)
    assert row[:tokens].tolist() == batch.input_ids.flatten().tolist()
    assert set(row[tokens:].tolist()) <= {PAD}
    assert positions[:tokens].tolist() == batch.position_ids.flatten().tolist()
    expected = zip(batch.target_ids.tolist(), batch.target_weights.tolist(), strict=True)
    assert targets == dict(zip(batch.target_index.tolist(), expected, strict=True))
    assert int(real.sum()) == sum(share.num_tokens for share in shares) == batch.num_tokens == 32
    borders = shares[0].borders
    assert all(share.borders == borders for share in shares) and borders[-1] == length
    own = [0, 17, 34, 51, 68] if padded else [0, 5, 22, 23, 32]
    assert borders[:5] == own
    for start, end in pairwise(borders[4:]):
        assert positions[start:end].tolist() == list(range(end - start))


def test_a_place_of_the_ring_holds_a_chunk_of_each_end():
    assert share_index(16, place(ring=2, rank=0)).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert share_index(16, place(ring=2, rank=1)).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    # two Ulysses ranks end to end are one place of the ring
    pair = [share_index(16, place(2, 2, rank)).tolist() for rank in (2, 3)]
    assert pair == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert share_index(6, place(ulysses=2, rank=1)).tolist() == [3, 4, 5]  # no ring, no chunks


def test_a_row_of_given_length_is_filled_up():
    batch = batch_of([300, 20])
    share = cut_batch(batch, place(), pad_token_id=PAD, length=1000)
    assert share.borders == [0, 300, 320, 620, 920, 1000]  # no position beyond those of examples
    assert int(share.position_ids.max()) == 299
    assert not share.attention_mask[0, 320:].any() and share.num_tokens == 320
    for length in (300, 1001):
        with pytest.raises(ValueError, match=f"a row of {length} tokens"):
            cut_batch(batch, place(ring=2), pad_token_id=PAD, length=length)


def test_the_batch_of_a_rank_without_examples():
    shares = [cut_batch(make_batch([], [], Layout()), place(2, 1, r), pad_token_id=PAD) for r in range(2)]
    assert [share.num_tokens for share in shares] == [0, 0]
    assert all(len(share.target_index) == 0 and share.input_ids.shape == (1, 2) for share in shares)


def test_a_share_without_targets():
    weights = np.zeros(40, dtype=np.float32)
    weights[12:15] = 1  # predicted by tokens 11 to 13, in the second chunk of four
    batch = make_batch([(np.arange(40, dtype=np.int32), weights)], [RowRef("t", 0)], Layout())
    shares = [cut_batch(batch, place(2, 1, r), pad_token_id=PAD) for r in range(2)]
    assert [len(share.target_ids) for share in shares] == [0, 3]
    assert shares[1].target_index.tolist() == [1, 2, 3] and shares[1].target_ids.tolist() == [12, 13, 14]


def test_a_whole_row_needs_no_mask():
    assert cut_batch(batch_of([4, 4]), place(2), pad_token_id=PAD).attention_mask is None


def joined(degrees: Degrees) -> list:
    mesh = build_mesh(degrees, "cpu")
    row = torch.arange(48.0).reshape(1, 24, 2)
    return join_shares(row[:, share_index(24, mesh)], mesh).tolist()


@pytest.mark.parametrize("degrees", [Degrees(ring=2, ulysses=2), Degrees(ring=2)], ids=Degrees.words)
def test_shares_are_joined_in_order(degrees):
    row = torch.arange(48.0).reshape(1, 24, 2).tolist()
    assert on_ranks(degrees.world_size, joined, degrees) == [row] * degrees.world_size
