"""Prove that the blocks of a model are sums over ranks, in one process, on a small model of its kind.

Where the model's own plan doesn't say how to cut a matrix, its name did (`plan`). That is a guess about code that was
not read, so it is checked: on random numbers, what each rank would compute of a block, added up, must be what the whole
block computes. The gradients are right then too, as they follow from the same sum.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swift.core.errors import ModelError, first_line
from swift.distributed.mesh import Axis
from swift.distributed.spread import expose_local
from swift.distributed.tensor.blocks import cut_block
from swift.distributed.tensor.cut import Cutter
from swift.distributed.tensor.plan import SHARDED_INSTEAD, Block, plan_blocks
from swift.models.proof import small_config

_TOLERANCE = 1e-4  # relative, in fp32


def small_model(model: PreTrainedModel) -> PreTrainedModel:
    """A random model of the same class that is small in what the code of its blocks doesn't depend on, in fp32.

    Raises:
        ModelError: there is no such model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            config = small_config(model.config)
            small: Any = type(model)._from_config(config, dtype=torch.float32, attn_implementation="eager")
        except (TypeError, ValueError, RuntimeError) as error:  # configurations refuse in their own ways
            raise ModelError(
                f"{type(model).__name__} has no plan of its own, and no small one can be built to prove how it is cut "
                f"({first_line(error)})",
                fix=SHARDED_INSTEAD,
            ) from error
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.normal_(std=0.1)
    return small


@torch.no_grad()
def prove_blocks(model: PreTrainedModel, tp: int) -> None:
    """Check the blocks that were cut by their names, one of each kind.

    Args:
        model: a whole one in fp32 or fp64, with numbers; it is left as it is.
        tp: ranks to cut over.

    Raises:
        ModelError: the parts of a block don't add up to the block, which is named.
    """
    was_training = model.training
    model.eval()
    blocks: dict[tuple, Block] = {}
    for block in plan_blocks(model, skip_experts=False):
        if block.guessed:
            blocks.setdefault(_kind(block), block)
    seen: dict[str, tuple[tuple, dict, Any]] = {}

    def remember(name: str) -> Any:
        def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            seen[name] = args, kwargs, output

        return hook

    handles = [block.module.register_forward_hook(remember(block.name), with_kwargs=True) for block in blocks.values()]
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (1, 7), generator=torch.Generator().manual_seed(0))
    try:
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    for block in blocks.values():
        args, kwargs, output = seen[block.name]
        whole = _first(output)
        try:
            parts = sum(_first(_share(block, tp, rank)(*args, **kwargs)) for rank in range(tp))
        except (RuntimeError, ValueError, TypeError) as error:  # shapes refuse in their own ways
            raise _unproven(model, block, f"a part of it doesn't run by itself ({first_line(error)})") from error
        difference = float((parts - whole).norm() / whole.norm().clamp_min(1e-12))
        if not difference <= _TOLERANCE:
            raise _unproven(model, block, f"its parts don't add up to it (relative difference {difference:.1e})")


def _unproven(model: PreTrainedModel, block: Block, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} can't be cut over ranks, {block.name} for one: {why}",
        where=block.name,
        fix=SHARDED_INSTEAD,
    )


def _share(block: Block, tp: int, rank: int) -> nn.Module:
    """A copy of the block as that rank has it."""
    own = copy.copy(block)
    own.module = copy.deepcopy(block.module)
    cut_block(own, Cutter(Axis("tp", tp, rank), plain=True), skip_experts=False)
    expose_local(own.module)
    return own.module


def _kind(block: Block) -> tuple:
    names = *sorted(block.linears), *sorted(block.slabs)
    return type(block.module), names


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
