"""How each matrix of a decoder is to be cut, from the model's own plan and, where that is silent, from names.

A decoder layer is norms and residual additions around *blocks*: attention, and a feed-forward network or experts. All
tensor parallelism happens inside of blocks: each rank computes with its own heads and its own share of the feed-forward
width, and its output is one summand of the block's. So only three things can be done with a matrix in there: cut it
along its outputs, cut it along its inputs, or use it whole. This file decides which; it changes nothing.

The model's plan (`config.base_model_tp_plan`) speaks of communication as well, per matrix. We need it once per block,
so styles that only say where to communicate mean nothing here, and some that gather because a matrix is packed are
replaced by cutting each of its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from swift.core.errors import ModelError

SHARDED_INSTEAD = "shard the weights without cutting matrices: --fsdp fsdp2 with --tensor_parallel_size 1"


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a matrix that are cut among themselves, in units (heads) that stay in one piece."""

    size: int
    units: int


@dataclass(frozen=True)
class Style:
    """What becomes of one linear layer.

    Attributes:
        side: `out` cuts its outputs, `in` its inputs, `whole` leaves it.
        parts: of the side that is cut.
        rejoined: the neighbours need the whole vector: outputs are gathered, or the inputs come whole and are split.
    """

    side: str
    parts: tuple[Part, ...] = ()
    rejoined: bool = False


WHOLE = Style("whole")


@dataclass(frozen=True)
class Slab:
    """What becomes of a parameter that is no linear layer's: cut along `dim`, or `once`: used by one rank alone."""

    dim: int = 0
    parts: tuple[Part, ...] = ()
    once: bool = False


@dataclass
class Block:
    """Attention or a feed-forward network of one layer.

    Attributes:
        name: inside of the decoder.
        linears: name inside of the block -> its style. Adapter layers are named as the layer that they wrap.
        slabs: the same for other parameters that are cut; all further ones are used whole.
        heads, kv_heads: of attention; 0 elsewhere.
        guessed: whether names decided, not the model's plan.
    """

    name: str
    module: nn.Module
    linears: dict[str, Style] = field(default_factory=dict)
    slabs: dict[str, Slab] = field(default_factory=dict)
    heads: int = 0
    kv_heads: int = 0
    guessed: bool = False

    @property
    def packed(self) -> bool:
        return any(len(style.parts) > 1 for style in self.linears.values())


_OUT = {
    *("q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value", "q_b_proj", "kv_b_proj"),
    *("gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc", "fc_in", "dense_h_to_4h"),
}
_IN = {
    *("o_proj", "wo", "out_proj", "dense"),
    *("down_proj", "w2", "fc2", "c_proj", "fc_out", "dense_4h_to_h"),
}
_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate"}
_KV = {"k_proj", "v_proj", "wk", "wv", "key", "value"}

# what the model's plan may say of a linear layer, and of a bare parameter
_OF_LINEAR = {
    "colwise": ("out", False),
    "rowwise": ("in", False),
    "packed_colwise": ("out", False),
    "packed_rowwise": ("in", False),
    "colwise_gather_output": ("out", True),
    "colwise_rep": ("out", True),
    "rowwise_split_input": ("in", True),
    "rowwise_rep": ("in", True),
    "replicated_with_grad_allreduce": ("whole", False),
    "mla_kv_a_proj": ("whole", False),
    "replicate": ("whole", False),
}
_ONLY_COMMUNICATION = {"moe_tp_experts", "local_params", "sequence_parallel", "all_reduce"}


def find_decoder(causal_lm: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The text decoder inside a causal language model, and its layers."""
    text = causal_lm.config.get_text_config()
    for module in causal_lm.modules():
        if isinstance(module, PreTrainedModel) and module.config.get_text_config() is text:
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == text.num_hidden_layers:
                    return module, child
    raise ModelError(f"{type(causal_lm).__name__} has no list of layers to cut", fix=SHARDED_INSTEAD)


def plan_blocks(causal_lm: PreTrainedModel, *, skip_experts: bool) -> list[Block]:
    """All blocks of the layers that this process holds.

    Args:
        skip_experts: leave experts alone: they lie on another axis.

    Raises:
        ModelError: the model has something that can't be cut, named; or a style that isn't known.
    """
    decoder, layers = find_decoder(causal_lm)
    text = causal_lm.config.get_text_config()
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    kind = type(causal_lm).__name__
    planner = _Planner(kind, plan, text, skip_experts)
    prefix = next(name for name, module in decoder.named_modules() if module is layers)
    blocks = []
    for number, layer in enumerate(layers):
        for name, child in layer.named_children():
            if any(parameter.ndim > 1 for parameter in child.parameters()):
                blocks.append(planner.block(f"{prefix}.{number}.{name}", child))
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.ndim > 1:
                raise planner.refusal(f"{prefix}.{number}.{name}", "a matrix outside of attention and feed-forward")
    if not blocks:
        raise ModelError(f"{kind} has no attention or feed-forward block to cut", fix=SHARDED_INSTEAD)
    return blocks


@dataclass
class _Planner:
    kind: str
    plan: dict[str, str]
    text: Any
    skip_experts: bool

    def refusal(self, name: str, why: str) -> ModelError:
        return ModelError(f"{self.kind} can't be cut over ranks: {name} is {why}", where=name, fix=SHARDED_INSTEAD)

    def styled(self, name: str) -> str | None:
        """What the model's plan says of a module or parameter of the decoder."""
        style = self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and style not in _OF_LINEAR and style not in _ONLY_COMMUNICATION:
            raise self.refusal(name, f"of the style {style}, which isn't known here")
        return style

    def block(self, name: str, module: nn.Module) -> Block:
        block = Block(name, module)
        last = name.rsplit(".", 1)[-1]
        if hasattr(module, "is_transposed") or last == "experts":
            raise self.refusal(name, "experts whose router is outside of their block")
        if "attn" in last or "attention" in last:
            block.heads = int(self.text.num_attention_heads)
            block.kv_heads = int(getattr(self.text, "num_key_value_heads", None) or block.heads)
        self.styled(name)
        for inner, unit in units(module):
            full = f"{name}.{inner}" if inner else name
            if isinstance(unit, (nn.Linear, BaseTunerLayer)):
                block.linears[inner] = self._linear(block, full, unit)
            elif hasattr(unit, "is_transposed") and hasattr(unit, "is_concatenated"):
                self.styled(full)
                if not self.skip_experts:
                    self._experts(block, inner, full, unit)
            else:
                self._bare(block, inner, full, unit)
        if block.packed:  # each part was cut: nothing has to be rejoined
            block.linears = {inner: replace(style, rejoined=False) for inner, style in block.linears.items()}
        sides = {style.side for style in block.linears.values()}
        if "out" in sides and "in" not in sides:
            raise self.refusal(name, "a block without a matrix that ends it")
        if not sides & {"out", "in"} and not block.slabs and not (self.skip_experts and _holds_experts(module)):
            raise self.refusal(name, "a block of unknown matrices")
        return block

    def _linear(self, block: Block, name: str, unit: nn.Module) -> Style:
        last = name.rsplit(".", 1)[-1]
        inputs, outputs = linear_sizes(unit)
        said = self.styled(name)
        packed = self._packed_parts(block, last, outputs) if said in (None, "colwise_gather_output") else ()
        if said is None or said in _ONLY_COMMUNICATION:
            side, rejoined = self._by_name(block, name, last), False
            block.guessed |= side != "whole"
        else:
            side, rejoined = _OF_LINEAR[said]
        if side == "whole":
            return WHOLE
        if side == "out":
            if packed:
                return Style("out", packed)
            if said == "packed_colwise":
                return Style("out", (Part(outputs // 2, outputs // 2),) * 2)
            return Style("out", (Part(outputs, self._units(block, last, outputs)),), rejoined)
        if said == "packed_rowwise":
            raise self.refusal(name, "packed along its inputs")
        return Style("in", (Part(inputs, block.heads or inputs),), rejoined)

    def _by_name(self, block: Block, name: str, last: str) -> str:
        if last in _OUT or last in ("qkv_proj", "gate_up_proj"):
            return "out"
        if last in _IN:
            return "in"
        if _chooses(block, name):
            return "whole"
        raise self.refusal(name, "not in its plan, and no name that says how to cut it")

    def _packed_parts(self, block: Block, last: str, outputs: int) -> tuple[Part, ...]:
        """The parts of a matrix that is several in one, if they are known."""
        if last == "gate_up_proj":
            return (Part(outputs // 2, outputs // 2),) * 2
        if last == "qkv_proj" and block.heads:
            head = outputs // (block.heads + 2 * block.kv_heads)
            if head * (block.heads + 2 * block.kv_heads) == outputs:
                return tuple(Part(heads * head, heads) for heads in (block.heads, block.kv_heads, block.kv_heads))
        return ()

    def _units(self, block: Block, last: str, outputs: int) -> int:
        if not block.heads:
            return outputs
        head_dim = getattr(block.module, "head_dim", None)
        if last in _KV:
            block.kv_heads = outputs // head_dim if isinstance(head_dim, int) else block.kv_heads
            return block.kv_heads
        return block.heads

    def _experts(self, block: Block, inner: str, name: str, unit: Any) -> None:
        if unit.has_post_expert_norm:
            raise self.refusal(name, "experts with a norm after each of them")
        width = -1 if unit.is_transposed else -2
        for own, parameter in unit.named_parameters(recurse=False):
            path = f"{inner}.{own}" if inner else own
            if own in ("gate_up_proj", "up_proj", "gate_up_proj_bias", "up_proj_bias"):
                dim = -1 if own.endswith("_bias") else width
                size = parameter.shape[dim]
                halves = own.startswith("gate_up") and unit.is_concatenated
                part = Part(size // 2, size // 2) if own.startswith("gate_up") else Part(size, size)
                block.slabs[path] = Slab(dim, (part, part) if halves else (Part(size, part.units),))
            elif own == "down_proj":
                size = parameter.shape[-3 - width]
                block.slabs[path] = Slab(-3 - width, (Part(size, size),))
            elif own == "down_proj_bias":
                block.slabs[path] = Slab(once=True)
            else:
                raise self.refusal(f"{name}.{own}", "a parameter of experts that isn't known")

    def _bare(self, block: Block, inner: str, name: str, unit: nn.Module) -> None:
        """Parameters of modules that aren't linear layers: norms and routers are used whole, sinks go with heads."""
        said = self.styled(name)
        for own, parameter in unit.named_parameters(recurse=False):
            path, full = (f"{inner}.{own}" if inner else own), f"{name}.{own}"
            style = self.styled(full)
            if style in ("colwise", "rowwise", "packed_colwise", "packed_rowwise"):
                dim = -1 if "rowwise" in style or parameter.ndim == 1 else -2
                size = parameter.shape[dim]
                part = Part(size // 2, size // 2) if "packed" in style else Part(size, block.heads or size)
                block.slabs[path] = Slab(dim, (part,) * (2 if "packed" in style else 1))
            elif own == "sinks" and block.heads:
                block.slabs[path] = Slab(0, (Part(parameter.shape[0], block.heads),))
                block.guessed = True
            elif parameter.ndim > 1 and said is None and not _chooses(block, name):
                raise self.refusal(full, "not in its plan, and no name that says how to cut it")


def units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules inside that hold parameters of their own, with their names; an adapter layer counts as one."""
    if isinstance(module, BaseTunerLayer):
        yield prefix, module
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield prefix, module
    for name, child in module.named_children():
        yield from units(child, f"{prefix}.{name}" if prefix else name)


def linear_sizes(unit: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, perhaps inside an adapter layer."""
    base: Any = unit.get_base_layer() if isinstance(unit, BaseTunerLayer) else unit
    return int(base.in_features), int(base.out_features)


def _chooses(block: Block, name: str) -> bool:
    """Whether a module of the block is, or is inside of, a router or a narrow projection that all ranks compute."""
    return not _WHOLE.isdisjoint(name.removeprefix(block.name).split("."))


def _holds_experts(module: nn.Module) -> bool:
    return any(hasattr(part, "is_transposed") for part in module.modules())
