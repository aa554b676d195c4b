"""What a checkpoint of a run consists of, and how a run is put back.

The public part (an adapter in PEFT's format, or a whole model) is for everyone; the private part is what a bit-exact
continuation needs: every trained tensor in the precision it is trained in, the optimizer, the random generators of each
rank and the position in the data.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swift.checkpoint import load_tensors, save_checkpoint, save_tensors
from swift.checkpoint.data import DATA_FILE, write_data_state
from swift.checkpoint.sharded import is_sharded
from swift.checkpoint.state import FILE_NAME as STATE_FILE
from swift.core.errors import CheckpointError
from swift.core.files import disk_errors
from swift.models.tuners import adapter_state, load_adapter_state
from swift.optim import local_parameters
from swift.training.checkpoints import (
    RANK_FILE,
    check_space,
    load_best,
    load_rank_state,
    random_state,
    resume_random_state,
    tidy,
    write_rank_state,
)
from swift.training.stored_state import OPTIMIZER_FILE, RANDOM_FILE, TRAINED_FILE, read_optimizer, read_trained
from swift.training.trainer import Trainer

# where each rank leaves its file until rank 0 moves all of them into the checkpoint
RANK_FOLDER = ".rank_states"


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that differs from a freshly built model: trained parameters, and an adapter's own other tensors."""
    prefixes = tuple(_adapter_prefixes(model))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name in names or any(p in name for p in prefixes)}


def _adapter_prefixes(model: nn.Module) -> set[str]:
    tuner = getattr(model, "base_model", None)
    prefix = getattr(tuner, "prefix", None)
    return {prefix} if isinstance(prefix, str) and prefix else set()


@dataclass
class RunSaver:
    """Writes and reads checkpoints of one run.

    Attributes:
        model: the whole model, adapters included.
        write_public: writes adapter or model, tokenizer, chat template and configuration into a folder.
        trained_is_public: the public part holds the trained tensors exactly (a whole model in fp32), so they aren't
            written twice.
        load_public: reads the trained tensors back from the public part of a folder.
    """

    model: nn.Module
    run_dir: Path
    write_public: Callable[[Path], None]
    load_public: Callable[[Path], None]
    trained_is_public: bool
    keep: int | None = None
    only_model: bool = False
    links: bool = False

    def save(self, trainer: Trainer) -> Path | None:
        """Write `checkpoint-<step>`; every rank calls it, rank 0 writes and gives the path to all."""
        group, state = trainer.parts.group, trainer.state
        keeps_state = not self.only_model or trainer.status == "interrupted"
        if trainer.parts.rank_states and keeps_state:
            self._write_rank_state(trainer)
        random_states = group.gather(random_state(trainer.device))  # which waits for all
        path = group.from_main(lambda: self._save(trainer, random_states))
        trainer.parts.monitor.event("checkpoint", f"saved {path}", path=str(path), step=state.step)
        return path

    def _save(self, trainer: Trainer, random_states: list[dict[str, Any]]) -> Path:
        state = trainer.state
        writers: list[Callable[[Path], None]] = [self.write_public]
        if not self.only_model or trainer.status == "interrupted":  # an interrupted run must be able to go on
            writers.append(lambda folder: self._write_private(folder, trainer, random_states))
        checkpoint = save_checkpoint(self.run_dir, state.step, writers, needed_bytes=self._needed_bytes(trainer))
        tidy(checkpoint.path, state, keep=self.keep, links=self.links)
        return checkpoint.path

    def _write_private(self, folder: Path, trainer: Trainer, random_states: list[dict[str, Any]]) -> None:
        if not self.trained_is_public:
            save_tensors(folder / TRAINED_FILE, trained_tensors(self.model))
        scaler = trainer.scaler.state_dict() if trainer.scaler is not None else None
        state = {
            "optimizer": trainer.parts.optimizer.state_dict(),
            "scaler": scaler,
            "adapter": adapter_state(self.model),
        }
        torch.save(state, folder / OPTIMIZER_FILE)
        torch.save(random_states, folder / RANDOM_FILE)
        if trainer.parts.rank_states:
            for rank in range(trainer.parts.group.world_size):
                name = RANK_FILE.format(rank)
                shutil.move(self.run_dir / RANK_FOLDER / name, folder / name)
            shutil.rmtree(self.run_dir / RANK_FOLDER)
        trainer.state.world_size = trainer.parts.group.world_size
        trainer.state.global_units = trainer.parts.loader.global_units
        trainer.state.total_steps = trainer.parts.length.total_steps
        trainer.state.optimizer = type(trainer.parts.optimizer).__name__
        write_data_state(folder / DATA_FILE, trainer.parts.loader.state())
        (folder / STATE_FILE).write_text(trainer.state.to_json())

    def _write_rank_state(self, trainer: Trainer) -> None:
        """Every rank: leave its file where rank 0 finds it."""
        folder = self.run_dir / RANK_FOLDER
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        write_rank_state(folder, trainer)

    def _needed_bytes(self, trainer: Trainer) -> int:
        trained = sum(p.numel() * p.element_size() for p in trainer.trained)
        public = trained if not self.trained_is_public or self._whole_model() else 0
        whole = sum(p.numel() * p.element_size() for p in self.model.parameters()) if self._whole_model() else public
        private = 0 if self.only_model else 2 * trained + (0 if self.trained_is_public else trained)
        return whole + private

    def check_space(self, trainer: Trainer) -> None:
        """Before step 1: is there room for a checkpoint at all? Every process may call it.

        Raises:
            CheckpointError: with the bytes needed and free.
        """
        check_space(self.run_dir, self._needed_bytes(trainer))

    def _whole_model(self) -> bool:
        return not _adapter_prefixes(self.model)

    def load_trained(self, folder: Path) -> None:
        """Put the trained tensors of a checkpoint, also of a run that was spread over processes, into the model."""
        if is_sharded(folder):
            read_trained(folder, local_parameters(self.model.named_parameters()), {}, self.load_public)
            return
        if not (folder / TRAINED_FILE).is_file():
            self.load_public(folder)
            return
        tensors = load_tensors(folder / TRAINED_FILE)
        own = self.model.state_dict()
        wrong = [n for n in tensors if n not in own or own[n].shape != tensors[n].shape]
        missing = [n for n in trained_tensors(self.model) if n not in tensors]
        if wrong or missing:
            raise CheckpointError(
                f"the checkpoint's trained tensors don't match this model: {', '.join((wrong + missing)[:4])}"
                + (" …" if len(wrong + missing) > 4 else ""),
                where=str(folder),
                fix="resume with the model and tuner settings that the run was started with",
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)

    def load_best(self, trainer: Trainer) -> None:
        """End with the weights of the best evaluation."""
        load_best(self.run_dir, trainer, self.load_trained)

    def resume(self, folder: Path, trainer: Trainer) -> None:
        """Put optimizer, scaler and random generators back; weights and position were given to the trainer before.

        Raises:
            CheckpointError: the checkpoint holds no optimizer state, or one of another model.
        """
        if not (folder / OPTIMIZER_FILE).is_file():
            raise CheckpointError(
                "the checkpoint holds weights only (it was saved with --save_only_model)",
                where=str(folder),
                fix="add --resume_only_model true to start new steps from its weights",
            )
        saved = self._read_optimizer(folder, trainer)
        if trainer.scaler is not None and saved["scaler"]:
            trainer.scaler.load_state_dict(saved["scaler"])
        if "adapter" in saved:
            load_adapter_state(self.model, saved["adapter"])
        load_rank_state(folder, trainer)
        resume_random_state(folder, trainer)

    def _read_optimizer(self, folder: Path, trainer: Trainer) -> dict[str, Any]:
        """Put the optimizer's state back; gives what else its file holds."""
        if is_sharded(folder):
            local = local_parameters(self.model.named_parameters())
            return read_optimizer(folder, trainer.parts.optimizer, local, {})
        saved = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        optimizer = trainer.parts.optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        theirs = [group.get("names") for group in saved["optimizer"]["param_groups"]]
        kind = type(optimizer).__name__
        if trainer.state.optimizer != kind or theirs != [group["names"] for group in groups]:
            same_kind = trainer.state.optimizer == kind
            what = "other parameters" if same_kind else f"{trainer.state.optimizer}, not of {kind}"
            raise CheckpointError(
                f"the saved optimizer state is of {what}",
                where=str(folder),
                fix="resume with the optimizer and tuner settings of the run, or add --resume_only_model true",
            )
        optimizer.load_state_dict(saved["optimizer"])
        for group, today in zip(optimizer.param_groups, groups, strict=True):  # today's rates, betas and decay hold
            group.update({name: value for name, value in today.items() if name != "params"})
        return saved
