"""What happens where a block begins and ends, at the embedding, and after the final norm: the only communication.

Between blocks every rank has the same hidden states, or, with sequence parallelism, its share of the tokens. Inside of
a block each rank computes its own summand of the output from all tokens. So a block begins with an identity whose
gradient is summed (or with gathering tokens), and ends with a sum (or with a sum of which each rank keeps its tokens).
Every gradient in between is one rank's summand, which is why whole parameters inside of blocks are marked as partial.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from swift.core.errors import UsageError
from swift.distributed.collectives import gather, own_part, scatter, sum_backward, sum_forward
from swift.distributed.mesh import Axis
from swift.distributed.spread import expose_local
from swift.distributed.tensor.sizes import vocabulary_share

TOKENS = 1  # the dimension of tokens in [rows, tokens, hidden]


def border_block(module: nn.Module, axis: Axis, *, sequence_parallel: bool) -> None:
    """Make `module`, which takes hidden states first or as `hidden_states` and gives them (first), a block."""
    expose_local(module)
    enter = partial(_enter, axis=axis, sequence_parallel=sequence_parallel)
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(partial(_leave, axis=axis, sequence_parallel=sequence_parallel))


def _enter(_: nn.Module, args: tuple, kwargs: dict, *, axis: Axis, sequence_parallel: bool) -> tuple[tuple, dict]:
    def enter(hidden: torch.Tensor) -> torch.Tensor:
        return gather(hidden, axis, TOKENS, partial=True) if sequence_parallel else sum_backward(hidden, axis)

    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": enter(kwargs["hidden_states"])}
    return (enter(args[0]), *args[1:]), kwargs


def _leave(_: nn.Module, __: Any, output: Any, *, axis: Axis, sequence_parallel: bool) -> Any:
    def leave(hidden: torch.Tensor) -> torch.Tensor:
        return scatter(hidden, axis, TOKENS, partial=True) if sequence_parallel else sum_forward(hidden, axis)

    return (leave(output[0]), *output[1:]) if isinstance(output, tuple) else leave(output)


def rejoin_outputs(module: nn.Module, axis: Axis) -> None:
    """Give a linear layer that is cut along its outputs all of them again."""
    module.register_forward_hook(partial(_rejoin, axis=axis))


def _rejoin(_: nn.Module, __: Any, output: torch.Tensor, *, axis: Axis) -> torch.Tensor:
    return gather(output, axis, output.ndim - 1, partial=True)


def split_inputs(module: nn.Module, axis: Axis) -> None:
    """Give a linear layer that is cut along its inputs its own part of whole vectors."""
    module.register_forward_pre_hook(partial(_split, axis=axis))


def _split(_: nn.Module, args: tuple, *, axis: Axis) -> tuple:
    return (own_part(args[0], axis, args[0].ndim - 1), *args[1:])


def border_embedding(module: nn.Module, axis: Axis, *, sequence_parallel: bool) -> None:
    """Make an embedding whose rows are cut look up its own tokens and add up what the ranks found."""
    share = _VocabularyShare(module, axis, sequence_parallel)
    expose_local(module)
    module.register_forward_pre_hook(share.before)
    module.register_forward_hook(share.after)


class _VocabularyShare:
    """One rank's part of an embedding; between the two hooks it remembers which tokens are other ranks'."""

    def __init__(self, module: Any, axis: Axis, sequence_parallel: bool) -> None:
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.start, self.stop = vocabulary_share(module.num_embeddings, axis.size, axis.rank)
        self.foreign: torch.Tensor | None = None
        padding = module.padding_idx
        if padding is not None:  # its gradient is none, on the rank that has it
            module.padding_idx = padding - self.start if self.start <= padding < self.stop else None

    def before(self, _: nn.Module, args: tuple) -> tuple:
        ids = args[0]
        if self.sequence_parallel and ids.shape[TOKENS] % self.axis.size:
            raise UsageError(
                f"a row of {ids.shape[TOKENS]} tokens can't be shared by {self.axis.size} ranks",
                where="--sequence_parallel",
                fix=f"pad rows to a multiple of {self.axis.size} tokens",
            )
        self.foreign = (ids < self.start) | (ids >= self.stop)
        return ((ids - self.start).masked_fill(self.foreign, 0), *args[1:])

    def after(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        assert self.foreign is not None
        own = output.masked_fill(self.foreign[..., None], 0.0)
        self.foreign = None
        if self.sequence_parallel:
            return scatter(own, self.axis, TOKENS, partial=True)
        return sum_forward(own, self.axis)


def border_end(norm: nn.Module, axis: Axis) -> None:
    """Join the tokens after the final norm, whose result all ranks go on with."""
    norm.register_forward_hook(partial(_join, axis=axis))


def _join(_: nn.Module, __: Any, output: torch.Tensor, *, axis: Axis) -> torch.Tensor:
    return gather(output, axis, TOKENS, partial=False)
