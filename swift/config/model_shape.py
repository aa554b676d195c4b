"""A model's sizes, read from its config.json without transformers. Knows nothing of parallelism."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.core.errors import ModelError

# one thing has many names: those of today's models, of GPT-2 and Falcon, of DeepSeek and Mixtral
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "head_dim": ("head_dim", "kv_channels"),
    "expert_intermediate": ("moe_intermediate_size", "expert_intermediate_size"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "dense_layers": ("first_k_dense_replace",),
}
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class ModelShape:
    """What decides which sizes are possible, and how much memory a model takes.

    Attributes:
        kv_heads: key-value heads; experts: 0 for a dense model.
        vocab, hidden, intermediate: sizes of matrices; tied: one matrix is embedding and head.
        head_dim: of one head; 0 stands for hidden / heads.
        expert_intermediate: of one expert; 0 stands for `intermediate`. experts_per_token: those that a token visits.
        dense_layers: first layers without experts.
    """

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    vocab: int
    experts: int = 0
    tied: bool = False
    head_dim: int = 0
    expert_intermediate: int = 0
    experts_per_token: int = 0
    dense_layers: int = 0

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections."""
        head_dim = self.head_dim or self.hidden // self.heads
        return 2 * self.hidden * head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        if not self.experts:
            return 0
        width = self.expert_intermediate or self.intermediate
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * width

    @property
    def parameters(self) -> int:
        """Weights in all, by formula: gated MLPs, norms and biases left out (they are less than a thousandth)."""
        dense = self.layers if not self.experts else self.dense_layers
        layers = self.layers * self.attention_parameters + dense * 3 * self.hidden * self.intermediate
        return layers + self.expert_parameters + self.vocab * self.hidden * (1 if self.tied else 2)


def read_model_shape(path: str | Path) -> ModelShape:
    """The shape of the model in a folder.

    Args:
        path: the folder, or its config.json. A multimodal model's language part counts.

    Raises:
        ModelError: there is no config.json, it is no JSON, or it doesn't say how large the model is.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the model's config.json can't be read: {error}", where=str(file)) from error
    if not isinstance(data, dict):
        raise ModelError("the model's config.json is not a mapping", where=str(file))
    shape = shape_of(data)
    if shape is None:
        raise ModelError(
            f"config.json of this {data.get('model_type', 'model')} doesn't say how many layers and attention heads "
            "there are: tensor, sequence, pipeline and expert parallelism have no plan for it",
            where=str(file),
            fix="--fsdp fsdp2 shards any model over the same processes",
        )
    return shape


def shape_of(data: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a parsed config.json describes; None where it lacks layers, heads or the hidden size."""
    tied = bool(data.get("tie_word_embeddings", False))
    for part in _PARTS:
        inner = data.get(part)
        if isinstance(inner, dict):
            inner = next((inner[p] for p in _PARTS if isinstance(inner.get(p), dict)), inner)
            tied = bool(inner.get("tie_word_embeddings", tied))
            data = {**data, **inner}
            break
    found = {name: _first(data, spellings) for name, spellings in _NAMES.items()}
    layers, heads, hidden = found["layers"], found["heads"], found["hidden"]
    if not (layers and heads and hidden):
        return None
    return ModelShape(
        layers=layers,
        heads=heads,
        kv_heads=1 if data.get("multi_query") and not found["kv_heads"] else found["kv_heads"] or heads,
        hidden=hidden,
        intermediate=found["intermediate"] or 4 * hidden,
        vocab=found["vocab"] or 0,
        experts=found["experts"] or 0,
        tied=tied,
        head_dim=found["head_dim"] or 0,
        expert_intermediate=found["expert_intermediate"] or 0,
        experts_per_token=found["experts_per_token"] or 0,
        dense_layers=found["dense_layers"] or 0,
    )


def _first(data: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these that is a number; some models have a list, one for each layer, of which the first counts."""
    for name in names:
        value = data.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
