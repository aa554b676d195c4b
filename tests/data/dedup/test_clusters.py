"""Which members of a band's group become pairs, whether the group is held whole or in parts."""

from __future__ import annotations

import numpy as np
import pytest

from swift.data.dedup.clusters import Keepers, Signatures
from swift.data.dedup.nodes import node_of
from swift.data.dedup.runs import Runs, RunWriter, hash_cuts, records

BAND = np.dtype([("key", "<u8"), ("node", "<u8")])


@pytest.mark.parametrize("memory", [1 << 20, 64 * 3])
def test_members_join_the_first_one_they_are_like(tmp_path, memory):
    """Three kinds of signatures in one band: each kind becomes a star around its own first member."""
    kinds = np.array([0, 1, 0, 2, 1, 0, 2, 1])
    keepers = Keepers(tmp_path, signatures=True, lengths=False)
    keepers.add(np.repeat(kinds[:, None] + 5, 16, axis=1).astype(np.uint32), [""] * len(kinds))
    keepers.close()
    writer = RunWriter(tmp_path / "bands", BAND, hash_cuts(1), 1 << 20)
    writer.add(records(BAND, key=np.full(8, 7), node=np.arange(8)))
    writer.close()
    pairs = Signatures([tmp_path], 16, memory).pairs(Runs([tmp_path / "bands"], BAND, 0, memory), 0.5)
    assert node_of(0, 3) == 3
    assert sorted(row for part in pairs for row in part.tolist()) == [(2, 0), (4, 1), (5, 0), (6, 3), (7, 1)]
