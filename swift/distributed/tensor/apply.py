"""Cut a model over the ranks of `tp`: every block, the embedding and the head.

Order: check what can be refused, plan, replace parameters, set the borders. Parameter names stay; whole shapes stay
known, as DTensors. Works on real tensors and on meta; the adapters are there already.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from swift.core.errors import ModelError
from swift.distributed.spread import Spread
from swift.distributed.tensor.adapters import check_adapters, inner_modules
from swift.distributed.tensor.blocks import cut_block
from swift.distributed.tensor.borders import border_block, border_embedding, border_end
from swift.distributed.tensor.cut import Cutter
from swift.distributed.tensor.plan import SHARDED_INSTEAD, Block, find_decoder, plan_blocks
from swift.distributed.tensor.prove import prove_blocks, small_model
from swift.distributed.tensor.sizes import check_tensor_parallel, vocabulary_share
from swift.models.kinds import head_parts, task_of


def apply_tensor_parallel(
    whole: nn.Module, causal_lm: PreTrainedModel, spread: Spread, *, sequence_parallel: bool
) -> None:
    """Cut `causal_lm` over the axis `tp` of the mesh; nothing happens where that has one rank.

    Afterwards the decoder's `last_hidden_state` is that of all tokens on every rank, and its gradient is the whole one.
    The head is cut along the vocabulary: make it with `find_head(causal_lm, axis=mesh["tp"])`. That of a classifier
    stays whole on every rank, and so is its gradient. Experts are left alone where the mesh has an axis `ep`.

    Args:
        whole: the model with its adapters, whose parameter names `spread.partial` is given.
        causal_lm: the Hugging Face model inside, real or on meta; un-owned parts may be missing.
        sequence_parallel: norms and residuals on a share of the tokens; rows must be multiples of the axis then.

    Raises:
        UsageError: a size doesn't divide, or an adapter can't be cut.
        ModelError: the model has parts that aren't known, named; or parts that were cut by their names don't add up.
    """
    axis = spread.mesh["tp"]
    if not axis:
        return
    check_tensor_parallel(causal_lm.config, axis.size)
    check_adapters(whole)
    blocks = plan_blocks(causal_lm, skip_experts=bool(spread.mesh["ep"]))
    if any(block.guessed for block in blocks):
        prove_blocks(small_model(causal_lm), axis.size)
    cutter = Cutter(axis)
    for block in blocks:
        cut_block(block, cutter, skip_experts=bool(spread.mesh["ep"]))
        border_block(block.module, axis, sequence_parallel=sequence_parallel)
    _cut_vocabulary(causal_lm, cutter, sequence_parallel)
    if sequence_parallel:
        _share_tokens(causal_lm, blocks, cutter)
    for name, parameter in whole.named_parameters():
        if id(parameter) in cutter.partial:
            spread.mark_partial(name, "tp")


def _cut_vocabulary(causal_lm: PreTrainedModel, cutter: Cutter, sequence_parallel: bool) -> None:
    axis = cutter.axis
    embedding = causal_lm.get_input_embeddings()
    head = causal_lm.get_output_embeddings() if task_of(causal_lm).kind == "causal_lm" else None
    for module in inner_modules(embedding):
        if next(module.parameters(), None) is None:  # another stage of a pipeline has it
            continue
        if not isinstance(module, nn.Embedding):
            raise _unknown(causal_lm, "embedding", module)
        _cut_rows(module, "weight", cutter)
        border_embedding(module, axis, sequence_parallel=sequence_parallel)
    for module in inner_modules(head) if head is not None else []:
        if next(module.parameters(), None) is None:
            continue
        if type(module) is not nn.Linear:
            raise _unknown(causal_lm, "head", module)
        _cut_rows(module, "weight", cutter)
        _cut_rows(module, "bias", cutter)


def _cut_rows(module: nn.Module, name: str, cutter: Cutter) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None:
        cutter.shard(module, name, *vocabulary_share(parameter.shape[0], cutter.axis.size, cutter.axis.rank))


def _unknown(causal_lm: PreTrainedModel, what: str, module: nn.Module) -> ModelError:
    return ModelError(
        f"the {what} of {type(causal_lm).__name__} is a {type(module).__name__}, which can't be cut over ranks",
        fix=SHARDED_INSTEAD,
    )


def _share_tokens(causal_lm: PreTrainedModel, blocks: list[Block], cutter: Cutter) -> None:
    """Norms see a share of the tokens: their gradients are partial; the last one's result is joined."""
    decoder, layers = find_decoder(causal_lm)
    norm = _final_norm(decoder)
    known = {id(p) for block in blocks for p in block.module.parameters()}
    for module in (*layers, norm):
        for part in module.modules() if module is not None else ():
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in known:
                    cutter.whole(part, name)
                    known.add(id(parameter))
    known |= {id(new) for _, new in cutter.done.values()}
    known |= {id(p) for part in head_parts(causal_lm).values() for p in part.parameters()}
    for name, parameter in causal_lm.named_parameters():
        if id(parameter) not in known:
            raise ModelError(
                f"{type(causal_lm).__name__} can't share its tokens between ranks: {name} is outside of layers, "
                "final norm, embedding and head",
                where="--sequence_parallel",
                fix="--sequence_parallel false",
            )
    if norm is not None:
        border_end(norm, cutter.axis)


def _final_norm(decoder: nn.Module) -> nn.Module | None:
    """The decoder's last norm; None where another stage of a pipeline has it."""
    for name, child in decoder.named_children():
        if re.search(r"norm|ln_f", name) and next(child.parameters(), None) is not None:
            return child
    return None
