"""LoRA on matrices that are cut: which of its two matrices is cut with them, and which adapters can't be.

    y = x Wᵀ + s · x Aᵀ Bᵀ        W [out, in], A [r, in], B [out, r]

Where W is cut along its outputs, so is B, and A is used whole: its gradient is a sum over ranks. Where W is cut along
its inputs, so is A, and B is used whole: what it gives is one summand, like W's product, and is added up with it.
Dropout before A draws for the inputs that a rank has: the ranks of one tp group need the same random state, as they do
for every dropout on hidden states that they share.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from swift.core.errors import ModelError, UsageError
from swift.distributed.tensor.cut import Cutter
from swift.distributed.tensor.plan import Style, linear_sizes


def check_adapters(whole: nn.Module) -> None:
    """Refuse adapters that can't be cut.

    Raises:
        UsageError: it names the kind of adapter, and what to use instead.
    """
    for name, module in whole.named_modules():
        reason = _refusal(module)
        if reason:
            what, instead = reason
            raise UsageError(f"{what} can't be cut over ranks", where=name, fix=instead)


_PLAIN_LORA = "--tuner_type lora on linear layers, or --fsdp fsdp2 with --tensor_parallel_size 1"


def _refusal(module: nn.Module) -> tuple[str, str] | None:
    if isinstance(module, AuxiliaryTrainingWrapper):
        if isinstance(module, ModulesToSaveWrapper):
            return None
        return "trainable tokens", "--modules_to_save embed_tokens lm_head"
    if not isinstance(module, BaseTunerLayer):
        return None
    if not isinstance(module, LoraLinear):
        package = type(module).__module__.split(".")[-2]
        if package == "lora":
            return f"LoRA on a module of the kind {type(module).__name__.lower()}", _PLAIN_LORA
        return f"an adapter of the kind {package}", _PLAIN_LORA
    if module.lora_variant:
        kind = type(next(iter(module.lora_variant.values()))).__name__.removesuffix("Variant").removesuffix("Linear")
        return f"the LoRA variant {kind}", "--tuner_type lora without it (--use_rslora works)"
    if module.fan_in_fan_out:
        return "LoRA on transposed weights", _PLAIN_LORA
    return None


def cut_linear(module: nn.Module, style: Style, cutter: Cutter, name: str) -> None:
    """Cut a linear layer and the LoRA matrices around it.

    Raises:
        ModelError: it isn't a plain linear layer (a quantized one, for instance).
    """
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if not isinstance(base, nn.Linear) or base.weight.shape != (base.out_features, base.in_features):
        raise ModelError(
            f"a layer of the kind {type(base).__name__} can't be cut over ranks",
            where=name,
            fix="a model that isn't quantized, or --tensor_parallel_size 1",
        )
    linears: list[tuple[Any, str]] = [(base, style.side)]
    if isinstance(module, LoraLinear):
        for adapter in module.lora_A:
            linears.append((module.lora_A[adapter], "in" if style.side == "in" else "whole"))
            linears.append((module.lora_B[adapter], "out" if style.side == "out" else "last"))
    for linear, side in linears:
        if side == "out":
            cutter.cut(linear, "weight", 0, style.parts)
            cutter.cut(linear, "bias", 0, style.parts)
        elif side == "in":
            cutter.cut(linear, "weight", 1, style.parts)
            cutter.once(linear, "bias")
        else:  # used whole; a bias that goes into a sum over ranks may count once only
            cutter.whole(linear, "weight")
            if side == "last" and style.side == "in":
                cutter.once(linear, "bias")
            else:
                cutter.whole(linear, "bias")


def inner_modules(module: nn.Module) -> list[nn.Module]:
    """Embedding or head: itself, or, where it is trained beside an adapter, the original and the trained copies."""
    if isinstance(module, ModulesToSaveWrapper):
        return [module.original_module, *module.modules_to_save.values()]
    return [module]


def vocabulary_sizes(module: nn.Module) -> tuple[int, int]:
    """Tokens and width of an embedding or of a head."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    inputs, outputs = linear_sizes(module)
    return outputs, inputs
