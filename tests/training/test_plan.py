"""Steps of a run, worked out before it starts."""

import numpy as np
import pytest

from swift.checkpoint import RunState
from swift.config import SftConfig
from swift.data.loading.batch import Layout
from swift.data.loading.loader import TrainLoader
from swift.training.plan import DataIdentity, run_length


class Rows:
    def __init__(self, count):
        self.lengths = np.full(count, 4, dtype=np.int32)

    def __len__(self):
        return len(self.lengths)


def steps(count, epochs, *, size=1, state=None, packing_length=0):
    config = SftConfig()
    config.training.num_train_epochs = epochs
    loader = TrainLoader(Rows(count), Layout(size, packing_length=packing_length), seed=0)
    return run_length(config, loader, state or RunState()).total_steps


@pytest.mark.parametrize(
    ("count", "epochs", "expected"),
    [(10, 1, 10), (10, 1.1, 11), (10, 0.5, 5), (10, 0.01, 1), (7, 2.5, 18), (10, 3, 30)],
)
def test_epochs_and_parts_of_epochs(count, epochs, expected):
    assert steps(count, epochs) == expected


def test_partial_steps_end_each_epoch():
    assert steps(10, 2, size=4) == 6


def test_packed_rows_are_counted_per_epoch():
    assert steps(9, 2, packing_length=8) == 10


def test_a_resumed_run_counts_what_is_left():
    # 64 rows, 36 used in 9 steps of 4; steps of 8 from here: 4 more
    assert steps(64, 1, size=8, state=RunState(step=9, consumed=36)) == 13
    assert steps(64, 2, size=8, state=RunState(step=9, consumed=36)) == 21
    assert steps(64, 1.5, size=8, state=RunState(step=20, epoch=1, consumed=16)) == 22
    assert steps(64, 1, size=8, state=RunState(step=20, epoch=1)) == 20


def test_grouping_ties_the_order_to_the_step_size_over_all_ranks():
    def order(size, accumulated, world, grouped):
        layout = Layout(size, accumulated, group_by_length=grouped)
        return DataIdentity.of("rows", TrainLoader(Rows(10), layout, seed=0, world_size=world)).order

    assert order(1, 8, 1, True) == order(2, 4, 1, True) == order(2, 2, 2, True)
    assert order(1, 8, 1, True) != order(1, 8, 2, True)
    assert order(1, 8, 1, False) == order(3, 1, 2, False)
