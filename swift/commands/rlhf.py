"""`swift rlhf`: preference optimisation, reward models and distillation. The same run as `sft`, for another end."""

from __future__ import annotations

from typing import Any

from swift.commands.sft import TrainResult, show_plan, train
from swift.config import build_config
from swift.config.commands import RlhfConfig


def rlhf(config: RlhfConfig | None = None, **flags: Any) -> TrainResult:
    """Tune by preferences: `rlhf(rlhf_type="dpo", model="smollm2", dataset=["pairs.jsonl"])`. See `swift.sft`."""
    return train(config if config is not None else build_config(RlhfConfig, flags), "rlhf")


def main(config: RlhfConfig) -> int:
    """The command's entry."""
    if config.parallelism.dry_run:
        return show_plan(config)
    rlhf(config)
    return 0
