"""`swift pt`: continued pre-training on plain text. The same run as `sft` with other defaults (see `PtConfig`)."""

from __future__ import annotations

from typing import Any

from swift.commands.sft import TrainResult, show_plan, train
from swift.config import PtConfig, build_config


def pt(config: PtConfig | None = None, **flags: Any) -> TrainResult:
    """Pre-train further: `pt(model="smollm2", dataset=["text.txt"])`. See `swift.sft` for what it gives and raises."""
    return train(config if config is not None else build_config(PtConfig, flags), "pt")


def main(config: PtConfig) -> int:
    """The command's entry."""
    if config.parallelism.dry_run:
        return show_plan(config)
    pt(config)
    return 0
