"""Tiny random models of several architectures, for equalities that must hold whatever the model."""

import torch
import transformers as tf

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """A random model of architecture `name`, seeded, in evaluation mode."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    # the grouped kernel for experts has no float64
    extra = (
        {"experts_implementation": "eager"} if dtype == torch.float64 and hasattr(config, "num_experts_per_tok") else {}
    )
    model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)
    return model.eval()


CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama-tied": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2-bias": lambda: tf.Qwen2Config(**COMMON),
    "qwen3-qk-norm": lambda: tf.Qwen3Config(**COMMON, head_dim=16),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mistral-window": lambda: tf.MistralConfig(**COMMON, sliding_window=8),
    "gemma2-softcap-window": lambda: tf.Gemma2Config(
        **COMMON, head_dim=16, sliding_window=8, attn_logit_softcapping=20.0, final_logit_softcapping=10.0
    ),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "cohere-scale": lambda: tf.CohereConfig(**COMMON, logit_scale=0.25),
    "granite-scale": lambda: tf.GraniteConfig(**COMMON, logits_scaling=4.0),
    "deepseek-v3-mla": lambda: tf.DeepseekV3Config(
        **(COMMON | {"num_key_value_heads": 4}),
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gpt-oss-sinks": lambda: tf.GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
}
