"""How answers are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting


@dataclass
class GenerationConfig:
    """Generation"""

    max_new_tokens: int | None = setting(None, help="default: 512, or what the context leaves", aliases=("max_tokens",))
    temperature: float | None = setting(None, help="0: greedy; default: the model's generation_config")
    top_p: float | None = setting(None, help="nucleus sampling")
    top_k: int | None = setting(None, help="sample from the k likeliest")
    repetition_penalty: float | None = setting(None, help="above 1: fewer repetitions")
    num_beams: int = setting(1, help="beam search width")
    stop_words: list[str] = setting(help="texts that end an answer", factory=list)
    stream: bool | None = setting(None, help="print tokens as they come; default: true when interactive")
    seed: int = setting(42, help="seed of sampling")


@dataclass
class InferRunConfig:
    """Inference"""

    infer_backend: Literal["transformers"] = setting("transformers", help="generation engine")
    max_batch_size: int = setting(8, help="rows generated together")
    result_path: str | None = setting(
        None, help="default: infer_result/<time>.jsonl in the checkpoint or current folder"
    )
    resume: bool = setting(True, help="go on with an unfinished result file of the same rows and settings")
    merge_lora: bool = setting(False, help="merge the adapter before generating (checked against the unmerged logits)")
    load_args: bool = setting(True, help="take model, template and system from the checkpoint's own configuration")
    load_data_args: bool = setting(False, help="also take its evaluation rows")
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", help="where to run")
    nproc_per_node: int | None = setting(
        None, help="processes on this machine that share the rows; default: NPROC_PER_NODE, else 1"
    )


@dataclass
class MergeConfig:
    """Merge"""

    output_dir: str | None = setting(None, help="default: <adapter folder>-merged")
    exist_ok: bool = setting(False, help="overwrite output_dir")
    max_shard_size: str = setting("5GB", help="size of a safetensors file")
    merge_tolerance: float | None = setting(
        None,
        help="allowed difference of logits by their spread; default: 1e-4 for each in fp32, 5e-2 (rms) in bf16/fp16",
    )
