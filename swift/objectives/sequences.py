"""From tokens to sequences: sums over the targets of each sequence, and which sequences of a unit are which.

Where ranks share a sequence (axis `cp`), each has some of its targets: sums are completed over the ranks, the others'
parts as constants, so that each rank's gradient is that of its own targets. Knows nothing of what is summed.
"""

from __future__ import annotations

import torch

from swift.data.loading.batch import Sequences
from swift.data.units import Kind
from swift.distributed.collectives import all_reduce
from swift.distributed.mesh import Axis


def sequence_sums(values: torch.Tensor, sequences: Sequences, axis: Axis | None = None) -> torch.Tensor:
    """Sum of the targets' values in each sequence.

    Args:
        values: [targets], or [targets, n].
        axis: the ranks that share the sequences.

    Returns:
        [sequences] or [sequences, n], complete on every rank, with a gradient to this rank's values.
    """
    own = values.new_zeros(len(sequences.kind), *values.shape[1:]).index_add(0, sequences.target, values)
    if not axis:
        return own
    constant = own.detach()
    return own + (all_reduce(constant.clone(), axis) - constant)


def places(target: torch.Tensor) -> torch.Tensor:
    """int64 [targets]: how many targets of the same sequence come before each.

    Args:
        target: int64 [targets], which sequence each belongs to; all targets of a sequence, in their order.
    """
    order = target.argsort(stable=True)
    grouped = target[order]
    first = torch.searchsorted(grouped, grouped)
    return torch.empty_like(target).index_copy_(0, order, torch.arange(len(target), device=target.device) - first)


def pair_indices(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [units] each: the chosen and the rejected sequence of every unit, which has one of each."""
    found = []
    for kind in (Kind.CHOSEN, Kind.REJECTED):
        of_kind = (sequences.kind == kind).nonzero()[:, 0]
        found.append(of_kind[sequences.unit[of_kind].argsort()])
    return found[0], found[1]
