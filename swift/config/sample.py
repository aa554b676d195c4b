"""Sampling answers, ranking them, and keeping the best as a new data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.config.data import PromptConfig, RowsConfig
from swift.config.engine import EngineConfig
from swift.config.fields import setting
from swift.config.inference import GenerationConfig, InferRunConfig
from swift.config.model import ModelConfig

OutputFormat = Literal["sft", "dpo", "kto", "all"]


@dataclass
class SampleRunConfig:
    """Sampling"""

    output_file: str = setting("samples.jsonl", help="the new data set; what was drawn is beside it (.samples.jsonl)")
    output_format: list[OutputFormat] = setting(
        help="sft: the best answers; dpo: best and worst of a prompt; kto: every answer with its label; all: every "
        "prompt with all answers and rewards, best first; several: a file for each",
        factory=lambda: ["sft"],
    )
    override_exist_file: bool = setting(False, help="replace output_file if it is there")
    reward: list[str] = setting(
        help="what judges answers, added up: match, number, json, schema:FILE, regex:PATTERN, length:FROM-TO, or "
        "FILE.py:FUNCTION; "
        "with a weight as in 0.5*number",
        factory=list,
    )
    orm_model: str | None = setting(None, help="reward model that judges whole answers, added to the others")
    prm_model: str | None = setting(
        None, help="reward model that judges each step of an answer, the steps before it seen; added to the others"
    )
    prm_steps: str = setting(r"\n\s*\n", help="regular expression between two steps; default: a blank line")
    prm_aggregate: Literal["min", "mean", "last", "product"] = setting(
        "min", help="one number out of those of the steps"
    )
    prm_threshold: float | None = setting(None, help="answers whose steps are worth less are never right")
    judge_url: str | None = setting(
        None, help="OpenAI endpoint, up to /v1, whose model marks answers from 0 to 1; added to the others"
    )
    judge_model: str | None = setting(None, help="its name there")
    judge_prompt: str | None = setting(
        None, help="file with the judge's question, with {conversation}, {reference} and {answer}"
    )
    sampler_url: str | None = setting(
        None, help="OpenAI endpoint, up to /v1, that answers are drawn from instead of a model here"
    )
    sampler_model: str | None = setting(None, help="its name there")
    endpoint_key_env: str | None = setting(
        None, help="environment variable that holds the key for sampler_url and judge_url; default: no key is sent"
    )
    endpoint_concurrency: int = setting(8, help="questions to an endpoint at a time")
    samples_file: str | None = setting(
        None,
        help="take the answers from this file (.samples.jsonl of an earlier run) and draw none",
        aliases=("cache_files",),
    )
    reward_threshold: float = setting(0.5, help="answers of at least this much are right", aliases=("orm_threshold",))
    n_best_to_keep: int = setting(1, help="right answers of a prompt that sft keeps, best first, each text once")
    easy_query_threshold: float | None = setting(
        None, help="drop prompts of whose answers more than this share is right"
    )


@dataclass
class SampleConfig:
    """Draw several answers to each prompt, rank them by rewards, and write the best as a data set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: RowsConfig = field(default_factory=RowsConfig)
    template: PromptConfig = field(default_factory=PromptConfig)
    generation: GenerationConfig = field(
        default_factory=lambda: GenerationConfig(num_return_sequences=8, temperature=1.0)
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    infer: InferRunConfig = field(default_factory=InferRunConfig)
    sample: SampleRunConfig = field(default_factory=SampleRunConfig)
