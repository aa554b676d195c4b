"""Build the parts of a training run from its configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swift.checkpoint import set_aside
from swift.checkpoint.data import read_data_state
from swift.config import save_config
from swift.config.commands import SftConfig
from swift.config.training import EvalConfig
from swift.core.errors import CheckpointError
from swift.core.files import human_bytes
from swift.data.augment.rows import augmenting
from swift.data.dataset import Prepared, TokenDataset, load_prepared, prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.loading.loader import Loader
from swift.data.loading.streaming import StreamSet, open_stream
from swift.data.loading.train_set import Place, PreparedSet, TrainSet
from swift.data.selection import Progress
from swift.data.sources import resolve_sources
from swift.distributed.heartbeat import Heartbeat, Watch
from swift.models.adapters import load_adapter_weights, save_adapter
from swift.models.elementwise import enable_fast_elementwise
from swift.models.head import OutputHead, find_decoder, find_head, prove_head
from swift.models.loading import check_context, load_model, load_tokenizer, resolve_model
from swift.models.memory import decide_checkpointing, estimate_memory, free_memory_bytes
from swift.models.prepare import choose_attention, compile_layers, enable_checkpointing, fix_ends, seed_everything
from swift.models.quiet import quiet_transformers
from swift.models.trained_linear import enable_trained_linear
from swift.models.tuners import (
    adapter_regularizer,
    adapter_step_callback,
    apply_tuner,
    set_total_steps,
    trainable_summary,
)
from swift.objectives import build_objective
from swift.objectives.linear_cross_entropy import chunk_rows
from swift.optim import build_optimizer, build_schedule
from swift.training.module import TrainModule, decoder_owner
from swift.training.plan import DataIdentity, build_layout, run_length
from swift.training.saver import RunSaver
from swift.training.session import Session, model_label
from swift.training.strategy import DataParallel
from swift.training.trainer import Callback, Trainer, TrainerParts

# Seconds between two lines about reading data.
PROGRESS_EVERY_S = 10.0


@dataclass
class Data:
    """Tokenizer, encoding and encoded rows."""

    model_path: Path
    tokenizer: PreTrainedTokenizerBase
    encoder: ChatEncoder
    train: TrainSet
    val: TokenDataset | None
    prepared: Prepared


@dataclass
class Model:
    """A model ready to train.

    Attributes:
        whole: the model with its adapters; causal_lm: the Hugging Face model inside.
        padding_free: whether it takes examples laid end to end.
    """

    whole: nn.Module
    causal_lm: PreTrainedModel
    decoder: nn.Module
    head: OutputHead
    padding_free: bool
    trainable: dict[str, Any]


def build_data(config: SftConfig, session: Session) -> Data:
    """Resolve the model's folder, load its tokenizer, encode the rows (once per node; other ranks map the result)."""
    group = session.group

    def begin() -> Path:
        _pulse(session).unlink(missing_ok=True)  # left by a process that was killed: who waits would call this one dead
        return resolve_model(config.model)

    model_path = group.from_main(begin)
    tokenizer = load_tokenizer(model_path, config.model)
    encoder = ChatEncoder(tokenizer, config.template)
    prepared = _prepare_once(config, session, encoder)
    session.notes += encoder.notices
    train = build_train_set(config, session, encoder, prepared)
    _keep_thinking_switch(config, session, train.encoding)
    if session.group.main and prepared.ledger.sources:
        session.monitor.event("data", prepared.ledger.render(), ledger=prepared.ledger.summary())
    return Data(model_path, tokenizer, encoder, train, prepared.val, prepared)


def _keep_thinking_switch(config: SftConfig, session: Session, encoding: Mapping[str, int]) -> None:
    """Write down how the rows were asked, if all were asked alike, so that inference asks the same way."""
    asked = {kind: encoding.get(f"asked_{kind}", 0) for kind in ("thinking", "not_thinking")}
    if config.template.enable_thinking is None and bool(asked["thinking"]) != bool(asked["not_thinking"]):
        thinking = bool(asked["thinking"])
        session.ask_thinking = thinking
        words = "have thoughts" if thinking else "have no thoughts"
        session.notes.append(f"all answers {words}: the checkpoint asks with enable_thinking {str(thinking).lower()}")


def _pulse(session: Session) -> Path:
    """Rank 0's sign of life while it prepares the data."""
    return session.run_dir / ".preparing"


def _prepare_once(config: SftConfig, session: Session, encoder: ChatEncoder) -> Prepared:
    """Rank 0 reads and encodes into mapped files of the run folder, which all machines share; the other ranks wait for
    as long as it shows signs of life, and map what it wrote."""
    group, cache = session.group, session.run_dir / ".tokens"
    pulse = _pulse(session)
    mine: list[Prepared] = []

    def prepare() -> str:
        with Heartbeat(pulse) as heartbeat:
            prepared = prepare_datasets(
                config.data,
                config.template,
                encoder,
                seed=data_seed(config),
                run_dir=session.run_dir,
                store=cache,
                progress=_show_progress(session, heartbeat),
            )
            mine.append(prepared)
            if group.world_size > 1:
                prepared.save(cache)
        return prepared.fingerprint

    session.at_close.append(lambda: shutil.rmtree(cache, ignore_errors=True))  # mapped until then
    fingerprint = group.from_main(prepare, watch=Watch(pulse, "rank 0 prepares the data").check)
    return mine[0] if group.main else load_prepared(cache, fingerprint)


def build_train_set(config: SftConfig, session: Session, encoder: ChatEncoder, prepared: Prepared) -> TrainSet:
    """What is trained on: the examples that were prepared, or files that are read while training."""
    seed = data_seed(config)
    if not config.data.streaming:
        return PreparedSet(
            prepared.train, prepared.parts, config.data, seed, prepared.difficulty, prepared.ledger.encoding
        )
    sources, held_out = resolve_sources(config.data)
    augmented = augmenting(encoder, config.data, seed=seed, train=sources, validation=held_out)
    saved = None
    if session.resumed is not None and session.continues:
        saved = read_data_state(session.resumed.path).get("facts")

    def look(facts: dict[str, Any] | None, *, from_main: bool = False) -> StreamSet:
        settings = (sources, config.data, config.template, augmented)
        return open_stream(*settings, seed=seed, saved=facts, from_main=from_main)

    found = session.group.from_main(lambda: look(saved).saved_facts())
    train = look(found, from_main=True)
    train.ledger_path = session.run_dir / "ledger.jsonl" if session.group.main else None
    return train


def _show_progress(session: Session, heartbeat: Heartbeat) -> Callable[[Progress], None]:
    """A line now and then while rows are read, with the time left."""
    said_s = 0.0

    def show(progress: Progress) -> None:
        nonlocal said_s
        heartbeat.say(f"{100 * progress.share:.0f} % read, {progress.rows:,} rows")
        if progress.seconds - said_s < PROGRESS_EVERY_S or not progress.share:
            return
        said_s = progress.seconds
        left_s = progress.seconds * (1 - progress.share) / progress.share
        words = f"reading data: {100 * progress.share:.0f} %, {progress.rows:,} rows, about {left_s:.0f} s left"
        session.monitor.event("progress", words)

    return show


def evaluation_rhythm(config: SftConfig, val: TokenDataset | None) -> EvalConfig:
    """When to evaluate: as asked, else whenever a checkpoint is due, else once at the end; never without rows."""
    if val is None:
        return replace(config.eval, eval_strategy="no")
    if config.eval.eval_strategy is None and config.checkpoint.save_strategy == "no":
        return replace(config.eval, eval_strategy="steps", eval_steps=config.eval.eval_steps)  # no steps: at the end
    return replace(
        config.eval,
        eval_strategy=config.eval.eval_strategy or config.checkpoint.save_strategy,
        eval_steps=config.eval.eval_steps or config.checkpoint.save_steps,
    )


def data_seed(config: SftConfig) -> int:
    """Seed of sampling, splitting and order."""
    return config.training.seed if config.data.data_seed is None else config.data.data_seed


def build_model(config: SftConfig, session: Session, data: Data) -> Model:
    """Load, adapt, and choose how it attends; prove that head and attention mean what the model means."""
    dtype = torch.float32 if config.tuner.tuner_type == "full" else session.precision.compute
    causal_lm = load_model(
        data.model_path, config.model, dtype=dtype, device=session.device.torch_device, tokenizer=data.tokenizer
    )
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
    beyond = check_context(causal_lm.config, data.train.longest)
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
    return Model(whole, decoder_owner(whole), decoder, head, padding_free, trainable_summary(whole))


def build_trainer(config: SftConfig, session: Session, data: Data, model: Model) -> Trainer:
    """Objective, optimizer, schedule, loader and saver; then the position of a resumed run."""
    group = session.group
    layout = build_layout(
        config,
        world_size=session.mesh["dp"].size,
        padding_free=model.padding_free,
        pad_token_id=int(data.tokenizer.pad_token_id or 0),
    )
    position = read_data_state(session.resumed.path) if session.resumed is not None and session.continues else {}
    batching = config.batching
    data_ranks = group.along(session.mesh["dp"])
    place = Place(
        data_ranks.rank,
        data_ranks.world_size,
        data_ranks.gather,
        batching.dataloader_num_workers,
        batching.dataloader_prefetch_factor,
    )
    loader = data.train.loader(layout, place, position.get("facts"))
    _save_memory(config, session, data, model, loader)
    objective = build_objective(config.objective)
    module = TrainModule(
        model.whole,
        decoder=model.decoder,
        head=model.head,
        objective=objective,
        evaluation=objective.evaluation(),
        neftune_alpha=config.objective.neftune_noise_alpha,
    )
    length = run_length(config, loader, session.state)
    steps = length.total_steps
    set_total_steps(model.whole, steps)
    saver = build_saver(config, session, data, model)
    if session.resumed is not None:
        saver.load_trained(session.resumed.path)
    optimizer = build_optimizer(
        model.whole,
        config.optimizer,
        tuner_type=config.tuner.tuner_type,
        lorap_lr_ratio=config.tuner.lorap_lr_ratio,
    )
    identity = DataIdentity.of(data.train.digest(), loader)
    _check_identity(session, identity)
    if position:
        loader.load_state(position)
    _note_changes(session, loader, steps)
    session.state.data_fingerprint, session.state.layout = identity.rows, identity.order
    step_callback = adapter_step_callback(model.whole)
    strategy = DataParallel(
        module, group, session.precision, mesh=session.mesh, regularizer=adapter_regularizer(model.whole)
    )
    evaluation = evaluation_rhythm(config, data.val)
    parts = TrainerParts(
        strategy=strategy,
        optimizer=optimizer,
        schedule=build_schedule(config.optimizer, steps),
        loader=loader,
        group=group,
        monitor=session.monitor,
        precision=session.precision,
        saver=saver,
        run_dir=session.run_dir,
        training=config.training,
        checkpoint=config.checkpoint,
        evaluation=evaluation,
        logging_steps=config.monitor.logging_steps,
        length=length,
        eval_examples=data.val,
        eval_tokens_per_batch=_eval_tokens(config),
        callbacks=[AfterStep(step_callback)] if step_callback else [],
    )
    trainer = Trainer(parts, session.state)
    seed_everything(config.training.seed + 1 + group.rank)  # dropout differs between ranks
    if session.continues and session.resumed is not None:
        saver.resume(session.resumed.path, trainer)
        trainer.last_checkpoint = session.resumed.path
    if group.main:
        if config.checkpoint.save_strategy != "no":
            saver.check_space(trainer)
        for path in set_aside(session.run_dir, session.state.step) if session.continues else []:
            session.notes.append(f"set aside: {path} (this run goes on from an earlier step)")
        save_config(config, session.run_dir)
    words = loader.outlook(session.state.epoch).words
    session.notes += [words] if words else []
    session.monitor.start(_plan(config, session, data, model, trainer))
    return trainer


class AfterStep(Callback):
    """Runs something after each optimizer step, while the gradients are still there (AdaLoRA's rank allocation)."""

    def __init__(self, run: Callable[[int], None]) -> None:
        self.run = run

    def after_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "step" and trainer.stepped:
            self.run(trainer.state.step + 1)


def _save_memory(config: SftConfig, session: Session, data: Data, model: Model, loader: Loader) -> None:
    """Decide on recompute from an estimate; compile if asked to."""
    estimate = estimate_memory(
        model.whole,
        model.causal_lm.config,
        tokens=loader.largest_micro_batch,
        dtype=session.precision.compute,
        logits_rows=chunk_rows(model.causal_lm.config.get_text_config().vocab_size, config.objective.loss_chunk_size),
    )
    on, words = decide_checkpointing(
        config.training.gradient_checkpointing,
        estimate,
        free_memory_bytes(session.device),
        processes=session.group.world_size if session.device.type == "cpu" else 1,
    )
    session.notes.append(words)
    if on:
        enable_checkpointing(model.causal_lm)
    if config.training.torch_compile:
        compile_layers(model.decoder)
        session.notes.append("the layers are compiled in the first steps, which take half a minute or more")


def _eval_tokens(config: SftConfig) -> int:
    size = config.eval.per_device_eval_batch_size or config.training.per_device_train_batch_size
    return max(1, size) * config.template.max_length


def _check_identity(session: Session, identity: DataIdentity) -> None:
    """A resumed run must see the rows, and the order, that the first one would have seen."""
    state = session.state
    if not session.continues:
        return
    wrong = []
    if state.data_fingerprint != identity.rows:
        wrong.append("the encoded rows differ (other files, template, max_length or columns)")
    if state.layout != identity.order:
        wrong.append(
            "their order differs (seed, packing, shuffling, grouping, mixing or streaming; or another version of this "
            "program began the run)"
        )
    if wrong:
        raise CheckpointError(
            "this run would not go on with the data that the checkpoint stopped at: " + "; ".join(wrong),
            where=str(session.resumed.path) if session.resumed else None,
            fix="give the settings the run was started with, or take only the weights with --resume_only_model true",
        )


def _note_changes(session: Session, loader: Loader, steps: int) -> None:
    """Say in what a resumed run is not the exact continuation of the first one."""
    state, group = session.state, session.group
    if not session.continues:
        return
    if state.world_size != group.world_size:
        session.notes.append(
            f"{group.world_size} processes go on where {state.world_size} stopped: not bit for bit the same numbers"
        )
    if state.global_units != loader.global_units:
        session.notes.append(
            f"steps take {loader.global_units} examples or rows now, {state.global_units} before: every row is still "
            "seen once an epoch, but it is another run from here on"
        )
    if state.total_steps != steps:
        session.notes.append(
            f"the run has {steps} steps now, {state.total_steps} before: the schedule of the learning rate follows"
        )


def build_saver(config: SftConfig, session: Session, data: Data, model: Model) -> RunSaver:
    """What a checkpoint of this run consists of."""
    full = config.tuner.tuner_type == "full"
    compute = session.precision.compute
    for_checkpoint = config
    if session.ask_thinking is not None:
        for_checkpoint = replace(config, template=replace(config.template, enable_thinking=session.ask_thinking))

    def write_public(folder: Path) -> None:
        if full:
            # tensor by tensor to the host: the accelerator may have no room for a second copy
            state = {name: tensor.to("cpu", compute) for name, tensor in model.causal_lm.state_dict().items()}
            model.causal_lm.config.dtype = compute
            with quiet_transformers():
                model.causal_lm.save_pretrained(str(folder), state_dict=state)
        elif isinstance(model.whole, PeftModel):
            save_adapter(model.whole, folder)
            model.causal_lm.generation_config.save_pretrained(str(folder))
        data.tokenizer.save_pretrained(str(folder))
        if data.encoder.template is not None:
            (folder / "chat_template.jinja").write_text(data.encoder.template)
        save_config(for_checkpoint, folder)

    def load_public(folder: Path) -> None:
        if isinstance(model.whole, PeftModel):
            load_adapter_weights(model.whole, folder)
            return
        fresh = load_model(folder, config.model, dtype=torch.float32, tokenizer=data.tokenizer)
        model.causal_lm.load_state_dict(fresh.state_dict())

    return RunSaver(
        model=model.whole,
        run_dir=session.run_dir,
        write_public=write_public,
        load_public=load_public,
        trained_is_public=full and compute == torch.float32,
        keep=config.checkpoint.save_total_limit,
        only_model=config.checkpoint.save_only_model,
        links=config.checkpoint.create_checkpoint_symlink,
    )


def _plan(config: SftConfig, session: Session, data: Data, model: Model, trainer: Trainer) -> dict[str, Any]:
    """What is shown and recorded when the run starts."""
    loader, group = trainer.parts.loader, session.group
    layout = loader.layout
    unit = f"rows of {layout.packing_length} tokens" if layout.packing_length else "examples"
    outlook, length = loader.outlook(trainer.state.epoch), trainer.parts.length
    upto = "up to " if not outlook.exact or (outlook.units or 0) % loader.global_units else ""
    batch = f"{upto}{loader.global_units} {unit} a step"
    shares = [f"{layout.units_per_micro_batch} x {layout.micro_batches} accumulated"]
    if group.world_size > 1:
        shares.append(f"x {group.world_size} processes")
    how = "packed" if layout.packing_length else "padding-free" if layout.padding_free else "padded"
    used = f", {100 * outlook.efficiency:.1f} % of slots used" if outlook.efficiency is not None else ""
    batch += f" ({' '.join(shares)}; {how}{used})"
    trainable = model.trainable
    return {
        "model": model_label(config),
        "device": session.device.name,
        "precision": session.precision.name,
        "trainable": f"{trainable['trainable']:,} of {trainable['total']:,} parameters ({trainable['percent']:.3g} %), "
        f"{config.tuner.tuner_type}",
        "examples": outlook.examples,
        "tokens_per_epoch": outlook.tokens,
        "batch": batch,
        "total_steps": length.total_steps,
        "steps_per_epoch": -(-outlook.units // loader.global_units) if outlook.units else None,
        "estimated": not outlook.exact,
        "run_dir": str(session.run_dir),
        "memory": human_bytes(session.device.memory_bytes),
        "notes": session.notes,
    }
