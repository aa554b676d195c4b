"""Build the trainer of a run from its configuration and its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift.checkpoint import set_aside
from swift.checkpoint.data import read_data_state
from swift.config import save_config
from swift.config.commands import TrainConfig
from swift.core.errors import CheckpointError
from swift.core.files import human_bytes
from swift.data.loading.batch import Examples, WrittenOut
from swift.data.loading.loader import Loader
from swift.data.loading.train_set import Place
from swift.distributed.mesh import Mesh
from swift.distributed.pipeline.schedules import schedule_notes
from swift.models.prepare import seed_everything, without_dropout
from swift.models.tuners import (
    adapter_step_callback,
    set_total_steps,
)
from swift.optim import build_schedule
from swift.training.data import Data, evaluation_rhythm
from swift.training.engine import build_engine
from swift.training.method import Surroundings
from swift.training.model import Model, save_memory
from swift.training.plan import DataIdentity, build_layout, run_length
from swift.training.savers import build_saver
from swift.training.session import Session, model_label
from swift.training.trainer import Trainer
from swift.training.trainer_parts import Callback, TrainerParts


def build_trainer(config: TrainConfig, session: Session, data: Data, model: Model) -> Trainer:
    """Objective, optimizer, schedule, loader and saver; then the position of a resumed run."""
    group = session.group
    method = session.method
    layout = build_layout(
        config,
        world_size=session.mesh["dp"].size,
        padding_free=model.padding_free,
        pad_token_id=int(data.tokenizer.pad_token_id or 0),
        longest=data.longest_unit(written_out=model.why_unshared is not None) if method.units else 0,
    )
    layout = method.arrange(layout, why_unshared=model.why_unshared)
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
    save_memory(config, session, model, loader)
    session.notes += schedule_notes(session.layout.parallelism, layout.micro_batches)
    length = run_length(config, loader, session.state)
    steps = length.total_steps
    set_total_steps(model.whole, steps)
    saver = build_saver(config, session, data, model)
    if session.resumed is not None:
        saver.load_trained(session.resumed.path)
    together, optimizer = build_engine(config, session, model, layout.micro_batches)
    look_ahead = None
    if method.make_look_ahead is not None:
        look_ahead = method.make_look_ahead(Surroundings(config, session, data, model))
    identity = DataIdentity.of(data.train.digest(), loader)
    _check_identity(session, identity)
    if position:
        loader.load_state(position)
    _note_changes(session, loader, steps)
    session.state.data_fingerprint, session.state.layout = identity.rows, identity.order
    step_callback = adapter_step_callback(model.whole)
    evaluation = evaluation_rhythm(config, data.val)
    eval_examples: Examples | None = data.val
    if data.val is not None and layout.units and not layout.share_prefix:
        eval_examples = WrittenOut(data.val)
    parts = TrainerParts(
        strategy=together.strategy,
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
        eval_examples=eval_examples,
        eval_tokens_per_batch=_eval_tokens(config),
        callbacks=[
            *([AfterStep(step_callback)] if step_callback else []),
            *together.callbacks,
            *(look_ahead.callbacks if look_ahead is not None else []),
        ],
        rank_states=together.rank_states | (look_ahead.rank_states if look_ahead is not None else {}),
        shared_weights=together.shared_weights,
        look_ahead=look_ahead,
        metrics=method.metrics,
        annotate_eval=data.annotate_eval,
    )
    if not method.wants_dropout:
        without_dropout(together.strategy.module)
    trainer = Trainer(parts, session.state)
    seed_everything(_dropout_seed(config, session.mesh))
    if session.continues and session.resumed is not None:
        saver.resume(session.resumed.path, trainer)
        trainer.last_checkpoint = session.resumed.path
    if config.checkpoint.save_strategy != "no":
        saver.check_space(trainer)
    if group.main:
        for path in set_aside(session.run_dir, session.state.step) if session.continues else []:
            session.notes.append(f"set aside: {path} (this run goes on from an earlier step)")
        save_config(config, session.run_dir)
    words = loader.outlook(session.state.epoch).words
    session.notes += [words] if words else []
    session.monitor.start(_plan(config, session, data, model, trainer))
    return trainer


def _dropout_seed(config: TrainConfig, mesh: Mesh) -> int:
    """Dropout differs between ranks with other tokens or layers, not between ranks that hold the same (along `tp`)."""
    return config.training.seed + 1 + mesh["loss"].rank + mesh["loss"].size * mesh["pp"].rank


class AfterStep(Callback):
    """Runs something after each optimizer step, while the gradients are still there (AdaLoRA's rank allocation)."""

    def __init__(self, run: Callable[[int], None]) -> None:
        self.run = run

    def after_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "step" and trainer.stepped:
            self.run(trainer.state.step + 1)


def _eval_tokens(config: TrainConfig) -> int:
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


def _plan(config: TrainConfig, session: Session, data: Data, model: Model, trainer: Trainer) -> dict[str, Any]:
    """What is shown and recorded when the run starts."""
    loader, group = trainer.parts.loader, session.group
    layout = loader.layout
    unit = f"rows of {layout.packing_length} tokens" if layout.packing_length else "examples"
    outlook, length = loader.outlook(trainer.state.epoch), trainer.parts.length
    upto = "up to " if not outlook.exact or (outlook.units or 0) % loader.global_units else ""
    batch = f"{upto}{loader.global_units} {unit} a step"
    shares = [f"{layout.units_per_micro_batch} x {layout.micro_batches} accumulated"]
    data_ranks = session.mesh["dp"].size
    if data_ranks > 1:
        shares.append(f"x {data_ranks} {'processes' if data_ranks == group.world_size else 'data-parallel ranks'}")
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
        "layout": session.layout.words(),
        "layout_table": session.layout.table,
        "steps_per_epoch": -(-outlook.units // loader.global_units) if outlook.units else None,
        "estimated": not outlook.exact,
        "run_dir": str(session.run_dir),
        "memory": human_bytes(session.device.memory_bytes),
        "notes": session.notes,
    }
