"""Replicas of a sharded model: what each rank sends to those that hold the same share in other replicas.

Within a replica `fully_shard` adds gradients up by reduce-scatter. What a rank then has of a unit of sharding (a layer)
goes to the other replicas by one of the methods, as soon as the unit's backward pass is done. Of several micro-batches
a step, shares are kept until the last one, so they go once a step. A unit keeps its parameters from step to step, so a
method can remember what it left out from the first step on, unlike with the buckets of DistributedDataParallel.

On a GPU `fully_shard` calls this in a stream of its own, beside the backward pass; not yet run on one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from swift.config.communication import read_compression
from swift.core.errors import UsageError
from swift.distributed.compression.exchange import across_nodes
from swift.distributed.compression.methods import Method, load_residuals, residual_state
from swift.distributed.mesh import Axis


class ReplicaExchange:
    """Adds gradients up over replicas.

    Args:
        method: how; it adds up along the axis of the replicas.
        words: what is done, for the user.

    Attributes:
        last: whether the micro-batch that runs backward is the last one of its step.
        remembers: whether the method remembers something from step to step.
    """

    without_it: str | None = "gradients that were still to be sent are lost"

    def __init__(self, method: Method, words: str, *, remembers: bool) -> None:
        self.method = method
        self.words = words
        self.remembers = remembers
        self.last = True
        self._held: dict[str, torch.Tensor] = {}

    def register(self, module: nn.Module) -> None:
        """Exchange the gradients of all units in `module` from now on; they must be sharded within a replica only."""
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                part.set_all_reduce_hook(partial(self.take, name))

    @torch.no_grad()
    def take(self, name: str, share: torch.Tensor) -> None:
        """Replace a rank's share of a unit's gradients by their sum over replicas; by zero if more are to come."""
        if share.is_cuda:  # it was made in another stream, which may not give its memory away meanwhile
            share.record_stream(torch.cuda.current_stream())
        held = self._held.pop(name, None)
        if held is not None:
            share += held
        if self.last:
            self.method.add_up(share, name)
        else:
            self._held[name] = share.clone()
            share.zero_()

    def state_dict(self) -> dict[str, Any]:
        """What this rank has to remember for the next step."""
        return residual_state(self.method)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave on the same rank of the same mesh."""
        load_residuals(self.method, state, torch.device("cpu"))  # each moves to its share when that comes


def build_replica_exchange(value: str, axis: Axis) -> ReplicaExchange:
    """The exchange over replicas that `--grad_compression` asks for.

    Raises:
        UsageError: it asks for more than a method across nodes.
    """
    settings = read_compression(value)
    if settings.method != "two_stage" or settings.intra != "none" or settings.node_size is not None:
        raise UsageError(
            "within a replica fsdp adds gradients up itself: only what goes across replicas can be compressed",
            where="--grad_compression",
            fix='give "inter" alone, such as {"inter": "topk", "ratio": 0.1}',
        )
    method, words = across_nodes(settings, axis, "replicas")
    return ReplicaExchange(method, words, remembers=settings.inter == "topk" and settings.error_feedback)
