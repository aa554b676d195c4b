"""Which model, and how it is held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swift.config.fields import setting


@dataclass
class ModelConfig:
    """Model"""

    model: str | None = setting(
        None,
        help="local folder, hub id (owner/name) or `smollm2` (the packaged 135M model)",
        aliases=("model_id_or_path", "model_name_or_path", "base_model"),
    )
    model_type: str | None = setting(
        None, help="accepted from older scripts and checked against the model's own config; never needed"
    )
    model_revision: str | None = setting(None, help="branch, tag or commit on the hub", aliases=("revision",))
    use_hf: bool = setting(True, help="true: Hugging Face hub; false: ModelScope")
    offline: bool = setting(False, help="never touch the network")
    trust_remote_code: bool = setting(False, help="run Python code that comes with the model")
    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None,
        help="compute precision; default: bfloat16 on GPUs that have it, float32 on a CPU",
        aliases=("dtype",),
    )
    attn_impl: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"] = setting(
        "auto",
        help="attention; auto: per-segment attention where rows are packed, sdpa elsewhere",
        aliases=("attn_implementation",),
    )
    rope_scaling: dict[str, Any] | None = setting(None, help='JSON, such as {"rope_type": "yarn", "factor": 2.0}')
    max_model_len: int | None = setting(None, help="overrides the model's maximal position (tokens)")
    new_special_tokens: list[str] = setting(help="tokens to add to the vocabulary as special tokens", factory=list)
    adapters: list[str] = setting(
        help="adapter folders to load (weights only)", factory=list, aliases=("adapter_name_or_path", "ckpt_dir")
    )
