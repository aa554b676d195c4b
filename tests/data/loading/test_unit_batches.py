"""Units in batches: what a companion is, how long the longest sequence is, and what the order depends on."""

from dataclasses import replace

import numpy as np

from swift.data.loading.batch import Layout, Tokens, collate, longest_sequence, make_batch, mismatch
from swift.data.loading.loader import TrainLoader
from swift.data.rows import RowRef
from swift.data.units import Kind, Unit


class Units:
    """Unit i: a prompt of tokens 100 + i, and parts of tokens 200 + i; the parts are trained."""

    def __init__(self, shapes):
        self.shapes = shapes
        self.lengths = np.array([prefix + sum(parts) for prefix, parts in shapes])

    def __len__(self):
        return len(self.shapes)

    def tokens(self, index):
        prefix, parts = self.shapes[index]
        ids = [100 + index] * prefix + [200 + index] * sum(parts)
        return np.array(ids, np.int32), np.array([0] * prefix + [1] * sum(parts), np.float32)

    def notes(self, index):
        prefix, parts = self.shapes[index]
        return Unit(prefix, parts, (int(Kind.CHOSEN),) * len(parts)).notes()

    def ref(self, index):
        return RowRef("rows.jsonl", index + 1)


def test_a_companion_has_the_prompt_of_its_unit_and_the_answer_of_another():
    layout = Layout(units=True, companions=True, shuffle=False)
    batch = collate(Units([(2, (3,)), (4, (1,))]), [0, 1], layout)
    assert batch.companion is not None
    assert batch.companion.input_ids.tolist() == [[100, 100, 201, 101, 101, 101, 101, 200, 200, 200]]
    assert batch.companion.target_ids.tolist() == [201, 200, 200, 200]


def test_a_companion_is_no_longer_than_sequences_may_be():
    layout = Layout(units=True, companions=True, max_length=5)
    batch = collate(Units([(2, (3,)), (4, (1,))]), [1], layout)
    assert batch.companion is not None
    assert batch.companion.input_ids.tolist() == [[101, 101, 101, 101, 200]]


def test_what_is_cut_off_a_completion_is_cut_off_its_notes_too():
    units = Units([(2, (6,)), (4, (5,))])
    long, other = (Tokens(*units.tokens(i), units.notes(i)) for i in range(2))
    cut = mismatch(other, long, 9)
    assert len(cut.ids) == len(cut.weights) == 9
    assert Unit.read(cut.notes).lengths == (5,)
    assert Unit.read(mismatch(other, long).notes).lengths == (6,)


def test_the_longest_sequence_is_a_prompt_and_one_part():
    assert longest_sequence(Units([(2, (3, 9)), (6, (7, 1, 2))])) == 13


def test_rows_that_are_packed_with_other_lengths_are_another_order():
    units = Units([(4, (3, 2))] * 6)
    packed = Layout(units=True, packing_length=16)
    loaders = [TrainLoader(units, replace(packed, share_prefix=share), seed=1) for share in (False, True)]
    assert loaders[0].identity != loaders[1].identity
    plain = [TrainLoader(units, Layout(units=True, share_prefix=share), seed=1) for share in (False, True)]
    assert plain[0].identity == plain[1].identity


def test_emptied_sequences_keep_what_is_known_of_the_step():
    units = Units([(2, (3, 1))])
    batch = make_batch([(*units.tokens(0), units.notes(0))], [units.ref(0)], Layout(units=True))
    assert batch.sequences is not None
    batch.sequences.step["units"] = 5.0
    batch.sequences.facts["value"] = batch.target_weights[:1]
    none = batch.sequences.emptied()
    assert none.step == {"units": 5.0} and none.num_units == len(none) == len(none.target) == 0
    assert none.facts["value"].shape == (0,)
    assert batch.sequences.num_units == 1
