"""A model whose dropout was switched off gives the same numbers again in training mode, wherever its family drops."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swift.models.prepare import without_dropout

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {**SMALL, "intermediate_size": 32, "attention_dropout": 0.5},
    "opt": {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.5, "attention_dropout": 0.5},
    "starcoder2": {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "residual_dropout": 0.5},
    "biogpt": {**SMALL, "intermediate_size": 32, "activation_dropout": 0.5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_dropped_any_more(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).train()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        first, second = (model(input_ids=ids).logits for _ in range(2))
        assert not torch.equal(first, second)  # the family drops
        without_dropout(model)
        first, second = (model(input_ids=ids).logits for _ in range(2))
    assert torch.equal(first, second)
