"""Writes tiny models as GGUF files, as llama.cpp reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL, _CONTROL = 1, 3  # kinds of tokens


def write_gguf(model_dir: Path, file: Path) -> Path:
    """A Llama in a folder as one fp32 GGUF file with its byte-level BPE tokenizer and template."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = model.config
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turned = next((count for part, count in heads.items() if f".{part}." in name), None)
        values = weight.numpy()
        writer.add_tensor(_name(name), np.ascontiguousarray(values if turned is None else _interleaved(values, turned)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(vocab_size))))
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in range(vocab_size)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def _name(name: str) -> str:
    """transformers' name of a Llama's weight in GGUF's words."""
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[part.removesuffix('.weight')]}.weight"


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as ggml's rope wants them: the two halves of a head's rows in turn."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
