"""What a checkpoint of this run consists of: the adapter or model for everyone, and what a continuation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from swift.config import save_config
from swift.config.commands import TrainConfig
from swift.models.adapters import load_adapter_weights, save_adapter
from swift.models.empty import build_empty_model
from swift.models.fill import read_adapter, read_weights
from swift.models.gathered import write_adapter, write_model
from swift.models.kinds import Task, task_of, write_task
from swift.models.loading import load_model
from swift.models.quiet import quiet_transformers
from swift.training.data import Data
from swift.training.deepspeed import DeepSpeed
from swift.training.deepspeed_saver import DeepSpeedSaver, EngineTensors
from swift.training.model import Model
from swift.training.parallelize import SpreadModel
from swift.training.saver import RunSaver
from swift.training.session import Session
from swift.training.sharded_saver import ShardedSaver


def build_saver(
    config: TrainConfig, session: Session, data: Data, model: Model
) -> RunSaver | ShardedSaver | DeepSpeedSaver:
    """The saver of this run: of whole models, or of one that is spread over processes."""
    around = _surroundings(config, session, data, task_of(model.causal_lm))
    if model.spread is not None:
        return _of_spread(config, session, model.spread, around)
    if config.parallelism.deepspeed:
        return _of_deepspeed(config, session, data, model, around)
    full = config.tuner.tuner_type == "full"
    compute = session.precision.compute

    def write_public(folder: Path) -> None:
        if full:
            # tensor by tensor to the host: the accelerator may have no room for a second copy
            state = {name: tensor.to("cpu", compute) for name, tensor in model.causal_lm.state_dict().items()}
            model.causal_lm.config.dtype = compute
            with quiet_transformers():
                model.causal_lm.save_pretrained(str(folder), state_dict=state)
        elif isinstance(model.whole, PeftModel):
            save_adapter(model.whole, folder)
            _write_generation_settings(model.causal_lm, folder)
        around(folder)

    return RunSaver(
        model=model.whole,
        run_dir=session.run_dir,
        write_public=write_public,
        load_public=lambda folder: _load_public(config, data, model, folder),
        trained_is_public=full and compute == torch.float32,
        keep=config.checkpoint.save_total_limit,
        only_model=config.checkpoint.save_only_model,
        links=config.checkpoint.create_checkpoint_symlink,
    )


def _load_public(config: TrainConfig, data: Data, model: Model, folder: Path) -> None:
    """Read the public part of a checkpoint into a model that this process holds as a whole."""
    if isinstance(model.whole, PeftModel):
        load_adapter_weights(model.whole, folder)
        return
    fresh = load_model(
        folder, config.model, dtype=torch.float32, tokenizer=data.tokenizer, task=task_of(model.causal_lm)
    )
    model.causal_lm.load_state_dict(fresh.state_dict())


def _write_generation_settings(causal_lm: PreTrainedModel, folder: Path) -> None:
    if causal_lm.can_generate():
        causal_lm.generation_config.save_pretrained(str(folder))


def _surroundings(config: TrainConfig, session: Session, data: Data, task: Task) -> Callable[[Path], None]:
    """Writes what belongs to a model that anyone can use: tokenizer, chat template, task, configuration."""
    if session.ask_thinking is not None:
        config = replace(config, template=replace(config.template, enable_thinking=session.ask_thinking))

    def write(folder: Path) -> None:
        data.tokenizer.save_pretrained(str(folder))
        if data.encoder.template is not None:
            (folder / "chat_template.jinja").write_text(data.encoder.template)
        write_task(folder, task)
        save_config(config, folder)

    return write


def _of_deepspeed(
    config: TrainConfig, session: Session, data: Data, model: Model, around: Callable[[Path], None]
) -> DeepSpeedSaver:
    group, compute = session.group, session.precision.compute

    def write_public(folder: Path, strategy: DeepSpeed) -> None:
        if not isinstance(model.whole, PeftModel):
            write_model([model.causal_lm], folder, group, dtype=compute, gather=partial(EngineTensors, strategy))
        else:
            trained = {name: p for name, p in model.whole.named_parameters() if p.requires_grad}
            gathered = EngineTensors(strategy, trained, group)
            tensors = {**model.whole.state_dict(), **{name: gathered.whole(name) for name in trained}}
            if group.main:
                save_adapter(model.whole, folder, tensors=tensors)
                _write_generation_settings(model.causal_lm, folder)
        if group.main:
            around(folder)

    return DeepSpeedSaver(
        model=model.whole,
        run_dir=session.run_dir,
        write_public=write_public,
        load_public=lambda folder: _load_public(config, data, model, folder),
        whole_model=config.tuner.tuner_type == "full",
        keep=config.checkpoint.save_total_limit,
        only_model=config.checkpoint.save_only_model,
        links=config.checkpoint.create_checkpoint_symlink,
    )


def _of_spread(
    config: TrainConfig, session: Session, spread: SpreadModel, around: Callable[[Path], None]
) -> ShardedSaver:
    group, compute = session.group, session.precision.compute
    full = config.tuner.tuner_type == "full"
    models = [chunk.causal_lm for chunk in spread.chunks]

    def write_public(folder: Path) -> None:
        if full:
            write_model(models, folder, group, dtype=compute)
        else:
            write_adapter([cast(PeftModel, chunk.whole) for chunk in spread.chunks], folder, group)
            if group.main:
                _write_generation_settings(models[0], folder)
        if group.main:
            around(folder)

    def load_public(folder: Path) -> None:
        for part in models:
            if full:
                empty = build_empty_model(
                    folder, config.model, dtype=torch.float32, attn_implementation="eager", task=task_of(part)
                )
                read_weights(part, folder, empty)
            else:
                read_adapter(part, folder)

    own = {name for name, _ in spread.local.named_whole()}
    tied = {name: source for part in models for name, source in part.all_tied_weights_keys.items() if name in own}
    return ShardedSaver(
        local=spread.local,
        modules=spread.modules,
        run_dir=session.run_dir,
        write_public=write_public,
        load_public=load_public,
        trained_is_public=full and compute == torch.float32,
        aliases=tied,
        keep=config.checkpoint.save_total_limit,
        only_model=config.checkpoint.save_only_model,
        links=config.checkpoint.create_checkpoint_symlink,
    )
