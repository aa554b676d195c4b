"""`swift sft`: supervised fine-tuning. `swift pt` is the same with plain text.

This file builds the parts of a run from its configuration, in the order that data sees them, and hands them to the
trainer. It decides nothing that a part can decide.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.commands.precheck import precheck
from swift.config import SftConfig, build_config
from swift.config.commands import TrainConfig


@dataclass
class TrainResult:
    """What a run leaves behind.

    Attributes:
        run_dir: its folder; last_checkpoint, best_checkpoint: folders in it, if there are any.
        status: finished, early_stopped or interrupted.
        steps: optimizer steps done in all.
        metrics: last training and evaluation metrics.
    """

    run_dir: Path
    status: str
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    last_checkpoint: Path | None = None
    best_checkpoint: Path | None = None


def sft(config: SftConfig | None = None, **flags: Any) -> TrainResult:
    """Fine-tune a model.

    Args:
        config: the whole configuration; or give settings by name: `sft(model="smollm2", dataset=["rows.jsonl"])`.

    Raises:
        SwiftError: with what was wrong, where, and what to do.
    """
    return train(config if config is not None else build_config(SftConfig, flags), "sft")


def main(config: SftConfig) -> int:
    """The command's entry: 0 when the run ended well, also by a signal."""
    if config.parallelism.dry_run:
        return show_plan(config)
    sft(config)
    return 0


def show_plan(config: TrainConfig) -> int:
    """`--dry_run`: print what a step would take of each process, and do nothing; 0."""
    precheck(config)
    if os.environ.get("RANK", "0") == "0":  # where a launcher has started all processes, one is enough
        from swift.training.dry_run import dry_run

        print(dry_run(config), end="")
    return 0


def train(config: TrainConfig, command: str) -> TrainResult:
    """Run the configuration: what all commands that train share."""
    precheck(config)
    from swift.methods.choose import choose_method
    from swift.training.session import start_session

    session = start_session(config, choose_method(config, command))
    try:
        return _run(config, session)
    finally:
        session.close()


def _run(config: TrainConfig, session: Any) -> TrainResult:
    from swift.training.assemble import build_trainer
    from swift.training.data import build_data
    from swift.training.model import build_model

    if session.method.settle is not None:
        session.method = session.method.settle(session.method, config, session)
    data = build_data(config, session)
    if session.method.before_model is not None:
        session.method.before_model(config, session, data)
    model = build_model(config, session, data)
    trainer = build_trainer(config, session, data, model)
    return finish(config, session, trainer, trainer.fit())


def finish(config: TrainConfig, session: Any, trainer: Any, result: Any) -> TrainResult:
    """Show how it went and what can be done next."""
    best = session.run_dir / f"checkpoint-{result.state.best_step}"
    best_checkpoint = best if result.state.best_step is not None and best.is_dir() else None
    summary = {
        "status": result.status,
        "steps": result.state.step,
        "resumed_at": session.resumed.step if session.resumed is not None and session.continues else None,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        **{k: v for k, v in result.metrics.items() if k in ("loss", "memory_gib")},
        "last_checkpoint": str(result.last_checkpoint) if result.last_checkpoint else None,
        "best_checkpoint": str(best_checkpoint) if best_checkpoint else None,
        "next": next_commands(config, session.command, result, best_checkpoint),
    }
    session.monitor.finish({key: value for key, value in summary.items() if value is not None})
    return TrainResult(
        session.run_dir, result.status, result.state.step, result.metrics, result.last_checkpoint, best_checkpoint
    )


def next_commands(config: TrainConfig, command: str, result: Any, best: Path | None) -> list[str]:
    """What to type next: resume an interrupted run, or talk to what came out (the best, if that was asked for)."""
    if result.status == "interrupted":
        return [f"swift {command} --resume_from_checkpoint {result.last_checkpoint}"]
    checkpoint = best if best is not None and config.eval.load_best_model_at_end else result.last_checkpoint
    if checkpoint is None:
        return []
    flag = "--model" if config.tuner.tuner_type == "full" else "--adapters"
    commands = [f"swift infer {flag} {checkpoint}"]
    if config.tuner.tuner_type != "full":
        commands.append(f"swift merge-lora --adapters {checkpoint}")
    return commands
