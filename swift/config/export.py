"""What `swift export` writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swift.config.data import EncodedRowsConfig, TemplateConfig
from swift.config.fields import setting
from swift.config.model import ModelConfig

# cached_for -> how rows are read; those of the others are conversations or texts
CACHED_LAYOUTS: dict[str, Literal["pairs", "binary"]] = {"rlhf": "pairs", "kto": "binary"}


@dataclass
class ExportTemplateConfig(TemplateConfig):
    """Chat encoding"""

    truncation_strategy: Literal["delete", "right", "left", "split", "raise"] | None = setting(  # type: ignore[assignment]
        None, help="examples over max_length; default: split for pt, else delete"
    )
    loss_scale: Literal["default", "last_round", "all"] | None = setting(  # type: ignore[assignment]
        None, help="train on; default: all for pt, last_round for rlhf and kto, else default (every assistant turn)"
    )

    def of(self, command: str) -> TemplateConfig:
        """The settings with the defaults of `sft`, `pt`, or `swift rlhf` (`rlhf`, `kto`) filled in."""
        text = command == "pt"
        values = {name: value for name, value in vars(self).items() if value is not None}
        scale = "all" if text else "last_round" if command in CACHED_LAYOUTS else "default"
        defaults = {"loss_scale": scale, "truncation_strategy": "split" if text else "delete"}
        if text:
            defaults["use_chat_template"] = False  # type: ignore[assignment]
        return TemplateConfig(**{**defaults, **values})


@dataclass
class ExportRunConfig:
    """Export"""

    to_cached_dataset: bool = setting(False, help="write the rows as token shards, for --cached_dataset")
    cached_for: Literal["sft", "pt", "rlhf", "kto"] = setting(
        "sft",
        help="what trains on them: pt = plain text, every token trained, long texts split; rlhf = pairs of answers "
        "(dpo, orpo, simpo, cpo, rm); kto = answers with a label",
    )
    deepspeed_checkpoint: str | None = setting(
        None, help="folder of a checkpoint that DeepSpeed wrote, of --model: write it as a model folder"
    )
    output_dir: str | None = setting(
        None, help="folder that gets train/ and, with evaluation rows, val/; or the converted model"
    )
    exist_ok: bool = setting(False, help="replace an export of other rows or settings, or a model, in output_dir")
    seed: int = setting(42, help="of sampling and splitting; give the one that training will have")


@dataclass
class ExportConfig:
    """Write a data set as token shards that training maps into memory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: EncodedRowsConfig = field(default_factory=EncodedRowsConfig)
    template: ExportTemplateConfig = field(default_factory=ExportTemplateConfig)
    export: ExportRunConfig = field(default_factory=ExportRunConfig)
