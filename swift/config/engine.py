"""How a model is run for answers: by which engine, in how much memory, how many requests together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting

InferBackend = Literal["auto", "swift", "transformers", "vllm", "sglang", "lmdeploy", "llamacpp", "openvino"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightFormat = Literal["auto", "bfloat16", "int8"]


@dataclass
class EngineConfig:
    """Engine"""

    infer_backend: InferBackend = setting(
        "auto", help="what runs the model; auto: vllm where it is installed and there is a GPU, else swift"
    )
    engine_python: str | None = setting(
        None,
        help="python of the environment that has the engine of --infer_backend vllm, sglang or lmdeploy; default: ours",
    )
    engine_url: str | None = setting(
        None,
        help="server of vllm, sglang, lmdeploy or llamacpp where it runs already, up to /v1 (its key: the variable "
        "OPENAI_API_KEY)",
    )
    engine_args: list[str] = setting(
        help="further words for the engine's command line, for example: --engine_args=--gpu-memory-utilization=0.8",
        factory=list,
    )
    engine_words: list[str] = setting(
        help="what vllm_…, sglang_… and lmdeploy_… flags of other scripts stand for, each word behind the engine's "
        "name; better said with engine_args",
        factory=list,
    )
    enable_lora: bool = setting(
        False,
        help="let vllm be ready for adapters that are loaded later, which costs it memory and speed; it is where an "
        "adapter is given, and swift always is",
        aliases=("vllm_enable_lora",),
    )
    max_lora_rank: int = setting(
        64, help="highest rank of adapters that are loaded later (vllm)", aliases=("vllm_max_lora_rank",)
    )
    max_batch_size: int = setting(
        32, help="requests computed together at most", aliases=("max_num_seqs", "vllm_max_num_seqs")
    )
    max_batch_tokens: int = setting(
        512, help="tokens of a forward pass at most; longer prompts come in chunks", aliases=("max_num_batched_tokens",)
    )
    kv_cache_gib: float | None = setting(
        None, help="memory for keys and values, GiB; default: a quarter of what is free, 4 at most on a CPU"
    )
    kv_cache_dtype: KVCacheDtype = setting("auto", help="precision of keys and values; auto: the model's")
    block_size: int = setting(16, help="tokens of a block of the KV cache")
    enable_prefix_caching: bool = setting(True, help="prompts that begin alike are computed once")
    weight_format: WeightFormat = setting(
        "auto",
        help="how weights of linear layers are held on a CPU; auto: as they are; fewer bits are read faster, and "
        "multiplied in fp32",
    )
    tensor_parallel_size: int = setting(
        1, help="processes that each hold a share of every matrix; swift deploy starts them, for models that don't fit"
    )
    speculative: Literal["none", "prompt_lookup", "draft"] = setting(
        "none", help="guess tokens ahead, from the text so far or by a smaller model; answers stay the same"
    )
    draft_model: str | None = setting(None, help="smaller model of the same vocabulary, for --speculative draft")
    num_draft_tokens: int = setting(4, help="tokens guessed ahead")
    max_latency_ms: float | None = setting(
        None, help="wanted time between two tokens of an answer; batches adapt to keep it"
    )
    warmup_file: str | None = setting(
        None, help="prompts (any rows that infer reads) computed before the first request, kept in the prefix cache"
    )
    skip_layers: list[int] = setting(
        help="decoder layers left out, counted from 0; answers change, so only for models that were trained for it",
        factory=list,
    )
    adaptive: bool = setting(
        False, help="measure ways to run the model, and take the most exact one that is fast enough and good enough"
    )
    adaptive_latency_ms: float | None = setting(None, help="time between two tokens of an answer that is fast enough")
    adaptive_concurrency: int = setting(1, help="requests computed together for which adaptive_latency_ms is meant")
    adaptive_eval_file: str | None = setting(
        None, help="rows with answers that tell what is good enough; without it only exact ways are tried"
    )
    adaptive_max_loss_increase: float = setting(
        0.01, help="mean loss per token of these answers, in nats, that may be lost; 0.01: a perplexity 1 % higher"
    )
    adaptive_siblings: list[str] = setting(
        help="smaller models of the same tokenizer that may be taken instead, folders or ids", factory=list
    )
    adaptive_skip_layers: list[str] = setting(
        help="layers that may be left out, each a way of its own: last:4 (the last four) or 8,9,10", factory=list
    )
    adaptive_report: str | None = setting(
        None, help="JSON file with what was measured and chosen, read at the next start; default: in the cache folder"
    )
