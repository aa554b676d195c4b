"""The model side of a run whose processes hold the whole model each: load, adapt, choose how it attends, prove it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swift.config.commands import TrainConfig
from swift.data.loading.loader import Loader
from swift.models.elementwise import enable_fast_elementwise
from swift.models.head import OutputHead, find_decoder, find_head, prove_head
from swift.models.kinds import Task, fresh_words, task_of
from swift.models.loading import check_context, load_model
from swift.models.memory import decide_checkpointing, estimate_memory, free_memory_bytes
from swift.models.prefix_proof import why_written_out
from swift.models.prepare import (
    choose_attention,
    compile_layers,
    enable_checkpointing,
    first_position,
    fix_ends,
    seed_everything,
)
from swift.models.trained_linear import enable_trained_linear
from swift.models.tuners import (
    apply_tuner,
    trainable_summary,
)
from swift.objectives.linear_cross_entropy import chunk_rows
from swift.training.data import Data
from swift.training.module import decoder_owner
from swift.training.parallelize import Making, SpreadModel
from swift.training.session import Session
from swift.training.spread_build import build_spread, trainable_of


@dataclass
class Model:
    """A model ready to train.

    Attributes:
        whole: the model with its adapters; causal_lm: the Hugging Face model inside.
        padding_free: whether it takes examples laid end to end.
        why_unshared: why sequences can't share the prompt of their unit; None where they can.
        spread: set where this process holds only a part: `whole` and the rest are its first piece's then.
    """

    whole: nn.Module
    causal_lm: PreTrainedModel
    decoder: nn.Module
    head: OutputHead
    padding_free: bool
    trainable: dict[str, Any]
    why_unshared: str | None = None
    spread: SpreadModel | None = None
    making: Making | None = None

    @property
    def parts(self) -> list[PreTrainedModel]:
        """The Hugging Face models that this process holds: stages of a pipeline, or the one."""
        return [self.causal_lm] if self.spread is None else [chunk.causal_lm for chunk in self.spread.chunks]


def build_model(config: TrainConfig, session: Session, data: Data, task: Task | None = None) -> Model:
    """Load, adapt, and choose how it attends; prove that head and attention mean what the model means.

    Args:
        task: which head it gets; default: what the run trains for.
    """
    task = session.method.task if task is None else task
    if session.layout.spread:
        return _spread(config, session, data, task)
    dtype = session.precision.stored(full=config.tuner.tuner_type == "full")
    causal_lm = load_model(
        data.model_path,
        config.model,
        dtype=dtype,
        device=session.device.torch_device,
        tokenizer=data.tokenizer,
        task=task,
        seed=config.training.seed,
    )
    words = None if config.model.adapters else fresh_words(causal_lm)
    session.notes += [words] if words else []
    decoder, head = find_decoder(causal_lm), find_head(causal_lm)
    prove_head(causal_lm, decoder, head)
    padding_free, notes = choose_attention(
        causal_lm,
        config.model.attn_impl,
        padding_free=config.batching.padding_free,
        packing=config.batching.packing,
        autocast=session.precision.autocast,
    )
    session.notes += notes
    why_unshared: str | None = "rows are padded"
    if session.method.units and padding_free:
        why_unshared = why_written_out(causal_lm, decoder, session.precision.autocast)
    beyond = check_context(causal_lm.config, data.train.longest, first_position=first_position(decoder))
    session.notes += [beyond] if beyond else []
    fix_ends(causal_lm, data.encoder.stop_token_ids())
    seed_everything(config.training.seed)  # adapters start from the same numbers whatever was drawn before
    whole = apply_tuner(causal_lm, config.tuner, adapters=config.model.adapters)
    enable_fast_elementwise(whole)
    if whole is causal_lm:
        enable_trained_linear(decoder)
    for parameter in whole.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    head = find_head(decoder_owner(whole))
    summary = trainable_summary(whole)
    return Model(whole, decoder_owner(whole), decoder, head, padding_free, summary, why_unshared=why_unshared)


def _spread(config: TrainConfig, session: Session, data: Data, task: Task) -> Model:
    spread, making, attention = build_spread(config, session, data, task)
    first = spread.chunks[0]
    trainable = trainable_of(spread, session)
    decoder = find_decoder(first.causal_lm)
    padding_free, why = attention.padding_free, attention.why_unshared
    return Model(first.whole, first.causal_lm, decoder, first.head, padding_free, trainable, why, spread, making)


def save_memory(config: TrainConfig, session: Session, model: Model, loader: Loader) -> None:
    """Decide on recompute from an estimate; compile if asked to."""
    causal = task_of(model.causal_lm).kind == "causal_lm"
    vocab = model.causal_lm.config.get_text_config().vocab_size
    estimate = estimate_memory(
        model.whole,
        model.causal_lm.config,
        tokens=loader.largest_micro_batch // session.mesh["cp"].size,
        dtype=session.precision.compute,
        logits_rows=chunk_rows(vocab, config.objective.loss_chunk_size) if causal else 0,
    )
    on, words = decide_checkpointing(
        config.training.gradient_checkpointing,
        estimate,
        free_memory_bytes(session.device),
        processes=session.group.world_size if session.device.type == "cpu" else 1,
    )
    session.notes.append(words)
    if on:
        for part in model.parts:
            enable_checkpointing(part)
    if config.training.torch_compile and model.spread is None:
        compile_layers(model.decoder)
        session.notes.append("the layers are compiled in the first steps, which take half a minute or more")
