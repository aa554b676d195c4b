"""How answers are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting


@dataclass
class GenerationConfig:
    """Generation"""

    max_new_tokens: int | None = setting(None, help="default: 512, or what the context leaves", aliases=("max_tokens",))
    min_new_tokens: int = setting(0, help="tokens before which nothing ends an answer", aliases=("min_tokens",))
    temperature: float | None = setting(None, help="0: greedy; default: the model's generation_config")
    top_p: float | None = setting(None, help="nucleus sampling")
    top_k: int | None = setting(None, help="sample from the k likeliest")
    min_p: float | None = setting(None, help="leave out tokens below this share of the likeliest one's probability")
    repetition_penalty: float | None = setting(None, help="above 1: fewer repetitions")
    presence_penalty: float = setting(0.0, help="-2 to 2, taken from the scores of tokens that the answer has")
    frequency_penalty: float = setting(0.0, help="-2 to 2, the same for each time that it has them")
    num_beams: int = setting(1, help="beam search width")
    length_penalty: float = setting(1.0, help="of beam search: above 0 longer answers, below 0 shorter ones")
    num_return_sequences: int = setting(1, help="answers to each row, drawn independently", aliases=("n",))
    stop_words: list[str] = setting(help="texts that end an answer", factory=list, aliases=("stop",))
    stop_token_ids: list[int] = setting(help="tokens that end an answer, besides the model's own", factory=list)
    ignore_eos: bool = setting(False, help="the model's own end doesn't end an answer")
    logprobs: bool = setting(False, help="write the log-probability of each token into the results")
    top_logprobs: int | None = setting(None, help="with logprobs: that many of the likeliest tokens as well")
    structured_outputs_json: str | None = setting(
        None, help="answers are JSON of this schema: a .json file or the schema itself; `object`: any JSON object"
    )
    structured_outputs_regex: str | None = setting(None, help="answers match this regular expression as a whole")
    structured_outputs_choice: list[str] = setting(help="answers are one of these texts", factory=list)
    structured_outputs_grammar: str | None = setting(None, help="answers follow the grammar (EBNF) in this file")
    stream: bool | None = setting(None, help="print tokens as they come; default: true when interactive")
    seed: int = setting(42, help="seed of sampling")


@dataclass
class InferRunConfig:
    """Inference"""

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
