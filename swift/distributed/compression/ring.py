"""Collectives made of messages between neighbours on a ring, as a readable reference.

A tensor of n elements is cut into one part for each of w ranks. In w - 1 rounds every rank passes a part on to its
right neighbour and adds the one that comes from its left to its own: afterwards each rank has the sum of one part
(reduce-scatter). In w - 1 more rounds the sums go round (all-gather). Each rank sends 2 (w - 1) / w n elements, which
is the least possible. Every sum is formed by one rank and copied, so all ranks end with the same bits.

Parts are cut into chunks. What is sent in a round is what came in the round before, so a chunk travels on as soon as it
was added up, while the chunks behind it are still on their way: the pipeline is as deep as `in_flight`.

The default everywhere is the library's own collective; this one is for rings over rows and columns of ranks, and for
counting what a ring does. It knows nothing of gradients.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC

CHUNK_BYTES = 1 << 20
IN_FLIGHT = 4


@dataclass
class _Chunk:
    """A message that goes out and one that comes in."""

    incoming: torch.Tensor
    received: torch.Tensor
    works: list[dist.Work] = field(default_factory=list)


def ring_all_reduce(
    tensor: torch.Tensor, axis: Axis, *, chunk_bytes: int = CHUNK_BYTES, in_flight: int = IN_FLIGHT
) -> torch.Tensor:
    """The sum over the ranks of an axis, in place.

    Args:
        tensor: contiguous, of any shape and size, also smaller than the number of ranks; any type that can be added.
        chunk_bytes: most bytes of a message; in_flight: messages that are on their way at a time.
    """
    ring_reduce_scatter(tensor, axis, chunk_bytes=chunk_bytes, in_flight=in_flight)
    ring_all_gather(tensor, axis, chunk_bytes=chunk_bytes, in_flight=in_flight)
    return tensor


def ring_reduce_scatter(
    tensor: torch.Tensor, axis: Axis, *, chunk_bytes: int = CHUNK_BYTES, in_flight: int = IN_FLIGHT
) -> torch.Tensor:
    """Sum over ranks of this rank's part (`own_share`), in place; the other parts hold what was passed on."""
    rounds = [((axis.rank - turn - 1) % axis.size, (axis.rank - turn - 2) % axis.size) for turn in range(axis.size - 1)]
    _go_round(tensor, axis, rounds, add=True, chunk_bytes=chunk_bytes, in_flight=in_flight)
    return own_share(tensor, axis)


def ring_all_gather(
    tensor: torch.Tensor, axis: Axis, *, chunk_bytes: int = CHUNK_BYTES, in_flight: int = IN_FLIGHT
) -> torch.Tensor:
    """Every rank's part (`own_share`) of the tensor, in place, on all ranks."""
    rounds = [((axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size) for turn in range(axis.size - 1)]
    _go_round(tensor, axis, rounds, add=False, chunk_bytes=chunk_bytes, in_flight=in_flight)
    return tensor


def own_share(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of a tensor, as a flat view of it; parts differ by one element at most."""
    return _part(tensor.view(-1), axis, axis.rank)


def _part(flat: torch.Tensor, axis: Axis, number: int) -> torch.Tensor:
    size = flat.numel()
    return flat[number * size // axis.size : (number + 1) * size // axis.size]


def _go_round(
    tensor: torch.Tensor,
    axis: Axis,
    rounds: list[tuple[int, int]],
    *,
    add: bool,
    chunk_bytes: int,
    in_flight: int,
) -> None:
    """Pass parts on, chunk by chunk.

    Args:
        rounds: for each, which part is sent and which one comes; what is sent is what came in the round before.
        add: whether what comes is added to what is there; else it takes its place.
    """
    if not axis:
        return
    flat = tensor.view(-1)
    largest = -(-flat.numel() // axis.size)
    elements = max(1, chunk_bytes // flat.element_size())
    pieces = max(1, -(-largest // elements))
    on_their_way: deque[_Chunk] = deque()
    sent = 0
    for tag, (outgoing, incoming) in enumerate(_messages(flat, axis, rounds, pieces)):
        # a chunk is sent one round, so `pieces` messages, after it came: it must have been added by then
        while len(on_their_way) >= min(pieces, in_flight):
            _arrive(on_their_way.popleft(), add)
        on_their_way.append(_exchange(outgoing, incoming, axis, tag, add))
        sent += outgoing.numel() * outgoing.element_size()
    while on_their_way:
        _arrive(on_their_way.popleft(), add)
    TRAFFIC.count(axis.name, "ring", sent)


def _messages(
    flat: torch.Tensor, axis: Axis, rounds: list[tuple[int, int]], pieces: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for outgoing, incoming in rounds:
        out, into = _part(flat, axis, outgoing), _part(flat, axis, incoming)
        for piece in range(pieces):
            yield _piece(out, piece, pieces), _piece(into, piece, pieces)


def _piece(part: torch.Tensor, number: int, pieces: int) -> torch.Tensor:
    size = part.numel()
    return part[number * size // pieces : (number + 1) * size // pieces]


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, axis: Axis, tag: int, add: bool) -> _Chunk:
    """Start sending to the right and receiving from the left; nothing travels where there is nothing to send."""
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    received = torch.empty_like(incoming) if add else incoming
    operations = []
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, outgoing, group=axis.group, tag=tag, group_peer=right))
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=axis.group, tag=tag, group_peer=left))
    return _Chunk(incoming, received, dist.batch_isend_irecv(operations) if operations else [])


def _arrive(chunk: _Chunk, add: bool) -> None:
    for work in chunk.works:
        work.wait()
    if add:
        chunk.incoming.add_(chunk.received)
