"""Prove what must hold for a model on a small one of its kind, where the model itself lies spread over processes.

The small one has the same class and settings, but one layer of each type, a vocabulary of 256 and narrow feed-forward
matrices, and random numbers. What is proven (that decoder and head give the model's own logits, that examples laid end
to end don't see each other) depends on the model's code and settings, not on its numbers or sizes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from swift.models.head import find_decoder, find_head, prove_head
from swift.models.kinds import CAUSAL_LM, Task, make_empty
from swift.models.quiet import quiet_transformers

_VOCABULARY = 256
_WIDTH = 256  # of feed-forward matrices


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` for a model of the same kind that is small in every size that its code doesn't depend on."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    types = list(getattr(text, "layer_types", None) or [])
    kept = sorted(types.index(kind) for kind in set(types)) or [0]
    first_dense = getattr(text, "first_k_dense_replace", None)
    layers = len(kept) if types else 1 if first_dense is None else 2
    if types:
        text.layer_types = [types[i] for i in kept]
    if first_dense is not None:  # the first layer dense, the second one with experts
        text.first_k_dense_replace = 1
        if types:
            layers = max(layers, 2)
            text.layer_types = (text.layer_types * 2)[:layers]
    text.num_hidden_layers = layers
    text.vocab_size = _VOCABULARY
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size > _WIDTH:
            setattr(text, name, _WIDTH)
    for name in ("bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    if getattr(text, "pad_token_id", None) is not None:  # RoBERTa counts its positions from it
        text.pad_token_id = min(int(text.pad_token_id), _VOCABULARY - 1) if text.pad_token_id >= 0 else None
    return small


def small_model(
    config: PreTrainedConfig, *, trust_remote_code: bool = False, task: Task = CAUSAL_LM
) -> PreTrainedModel:
    """A small random model like the one that `config` describes, in fp32 on the CPU, with its head proven.

    Args:
        task: settled: that of the large model, as `task_of` gives it.

    Raises:
        ModelError: what lies between the decoder and the logits isn't known here.
    """
    state = torch.get_rng_state()
    try:
        with quiet_transformers():
            model: Any = make_empty(
                small_config(config), task, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    finally:
        torch.set_rng_state(state)
    model = model.eval()
    prove_head(model, find_decoder(model), find_head(model))
    return model
