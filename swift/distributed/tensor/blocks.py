"""Cut one block as its plan says, and tell its modules the sizes they have now."""

from __future__ import annotations

from typing import Any

from swift.distributed.tensor.adapters import cut_linear
from swift.distributed.tensor.borders import rejoin_outputs, split_inputs
from swift.distributed.tensor.cut import Cutter
from swift.distributed.tensor.plan import Block


def cut_block(block: Block, cutter: Cutter, *, skip_experts: bool) -> None:
    """Give the block's modules their shares, by its plan; parameters that stay whole are noted as partial.

    Its borders are not set: what it computes is one rank's summand.
    """
    module: Any = block.module
    axis = cutter.axis
    for name, style in block.linears.items():
        linear = module.get_submodule(name)
        cut_linear(linear, style, cutter, f"{block.name}.{name}")
        if style.rejoined:
            (rejoin_outputs if style.side == "out" else split_inputs)(linear, axis)
    for name, slab in block.slabs.items():
        owner, own = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if slab.once:
            cutter.once(owner, own)
        else:
            cutter.cut(owner, own, slab.dim, slab.parts)
    replaced = {id(new) for _, new in cutter.done.values()}
    for part in module.modules():
        if skip_experts and hasattr(part, "is_transposed"):  # whoever cuts experts says what their gradients are
            continue
        for own, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in replaced:
                cutter.whole(part, own)
    if block.heads and not any(style.rejoined for style in block.linears.values()):
        localize_heads(block, axis.size)


class LocalConfig:
    """A configuration in which some values are those of one rank."""

    def __init__(self, whole: Any, **local: Any) -> None:
        self.__dict__.update(local, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)


def localize_heads(block: Block, size: int) -> None:
    """Tell an attention module how many heads it has here, wherever it keeps that number."""
    module: Any = block.module
    heads, kv_heads = block.heads // size, max(1, block.kv_heads // size)
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if getattr(module, name, None) == block.heads:
            setattr(module, name, heads)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if getattr(module, name, None) == block.kv_heads:
            setattr(module, name, kv_heads)
    if getattr(module, "num_key_value_groups", None) == block.heads // block.kv_heads:
        module.num_key_value_groups = heads // kv_heads
    if block.packed and hasattr(module, "config"):  # split at a head count of the configuration's
        module.config = LocalConfig(module.config, num_attention_heads=heads, num_key_value_heads=kv_heads)
