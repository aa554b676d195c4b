"""Sampling answers, ranking them, and keeping the best as a new data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.config.data import PromptConfig, RowsConfig
from swift.config.engine import EngineConfig
from swift.config.fields import setting
from swift.config.inference import GenerationConfig, InferRunConfig
from swift.config.model import ModelConfig

OutputFormat = Literal["sft", "dpo", "kto"]


@dataclass
class SampleRunConfig:
    """Sampling"""

    output_file: str = setting("samples.jsonl", help="the new data set; what was drawn is beside it (.samples.jsonl)")
    output_format: list[OutputFormat] = setting(
        help="sft: the best answers; dpo: best and worst of a prompt; kto: every answer with its label; several: a "
        "file for each",
        factory=lambda: ["sft"],
    )
    override_exist_file: bool = setting(False, help="replace output_file if it is there")
    reward: list[str] = setting(
        help="what judges answers, added up: match, number, json, regex:PATTERN, length:FROM-TO, or FILE.py:FUNCTION; "
        "with a weight as in 0.5*number",
        factory=list,
    )
    orm_model: str | None = setting(None, help="reward model that judges whole answers, added to the others")
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
