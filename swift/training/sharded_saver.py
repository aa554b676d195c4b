"""Checkpoints of a run whose model is spread over processes, which a run of any other layout can go on from.

Every process writes its own part of the trained tensors and of the optimizer's state into the unfinished folder; rank 0
begins it, writes what is small, and gives it its name when all have finished. What is read back may have been written
by any layout, one process among them: a process takes the boxes that it holds. An error of any process reaches all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from swift.checkpoint.data import DATA_FILE, write_data_state
from swift.checkpoint.sharded import is_sharded, save_sharded
from swift.checkpoint.state import FILE_NAME as STATE_FILE
from swift.checkpoint.store import describe_file
from swift.core.errors import CheckpointError
from swift.optim.local import LocalParameters
from swift.training.checkpoints import (
    check_space,
    load_best,
    load_rank_state,
    random_state,
    resume_random_state,
    write_rank_state,
)
from swift.training.stored_state import OPTIMIZER_FILE, RANDOM_FILE, TRAINED_FILE, read_optimizer, read_trained
from swift.training.together import Written, all_or_none, save_together
from swift.training.trainer import Trainer


@dataclass
class ShardedSaver:
    """Writes and reads checkpoints of one spread run; every process makes one and calls it at the same time.

    Attributes:
        local: this process's trained parameters, under their names in the whole model.
        aliases: parameters of this process that are second copies of tied ones, and the names that these are kept
            under: a head on another stage than its embedding. Only read, never written.
        modules: the outermost modules, whose weights `fully_shard` may have gathered.
        write_public: writes what anyone can read into a folder; every process calls it.
        load_public: reads the trained tensors back from the public part; every process calls it.
        trained_is_public: the public part holds the trained tensors exactly, so they aren't written twice.
    """

    local: LocalParameters
    modules: list[nn.Module]
    run_dir: Path
    write_public: Callable[[Path], None]
    load_public: Callable[[Path], None]
    trained_is_public: bool
    aliases: Mapping[str, str] = field(default_factory=dict)
    keep: int | None = None
    only_model: bool = False
    links: bool = False

    def save(self, trainer: Trainer) -> Path | None:
        """Write `checkpoint-<step>`.

        Raises:
            CheckpointError: a process could not write; on all of them, and earlier checkpoints are intact.
        """
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        return save_together(
            self.run_dir,
            trainer,
            lambda aside: self._write(aside, trainer),
            needed_bytes=self._needed_bytes(trainer),
            keep=self.keep,
            links=self.links,
        )

    def _write(self, aside: Path, trainer: Trainer) -> Written:
        """What processes write together; size and checksum of their own files, and what rank 0 still has to write."""
        group = trainer.parts.group
        all_or_none(group, lambda: self.write_public(aside))
        if self.only_model and trainer.status != "interrupted":  # an interrupted run must be able to go on
            return {}, lambda: None
        optimizer = trainer.parts.optimizer
        mine = save_sharded(aside, self._state(optimizer))
        if trainer.parts.rank_states:
            all_or_none(group, lambda: mine.update(_describe(write_rank_state(aside, trainer))))
        described = {name: entry for files in group.gather(mine) for name, entry in files.items()}
        randoms = group.gather(random_state(trainer.device))
        groups = merge_groups([g for theirs in group.gather(_groups(optimizer, self.aliases)) for g in theirs])
        state = trainer.state
        state.world_size, state.global_units = group.world_size, trainer.parts.loader.global_units
        state.total_steps, state.optimizer = trainer.parts.length.total_steps, type(optimizer).__name__

        def write_rest() -> None:
            scaler = trainer.scaler.state_dict() if trainer.scaler is not None else None
            torch.save({"groups": groups, "scaler": scaler}, aside / OPTIMIZER_FILE)
            torch.save(randoms, aside / RANDOM_FILE)
            write_data_state(aside / DATA_FILE, trainer.parts.loader.state())
            (aside / STATE_FILE).write_text(state.to_json())

        return described, write_rest

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """What this process keeps of trained tensors and optimizer; numbers become tensors."""
        trained = [] if self.trained_is_public else list(self.local.named_whole())
        state: dict[str, torch.Tensor] = {
            f"model.{name}": parameter for name, parameter in trained if name not in self.aliases
        }
        for name, entries in self.local.state(optimizer).items():
            for key, value in entries.items() if name not in self.aliases else ():
                state[f"optimizer.{name}.{key}"] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        return state

    def _needed_bytes(self, trainer: Trainer) -> int:
        """About what all processes will write together: every trained tensor counts once, wherever it lies."""
        own = {name: p.numel() * p.element_size() for name, p in self.local.named_whole()}
        trained = sum(
            {name: size for theirs in trainer.parts.group.gather(own) for name, size in theirs.items()}.values()
        )
        private = 0 if self.only_model else 2 + (not self.trained_is_public)
        return trained * (1 + private)

    def check_space(self, trainer: Trainer) -> None:
        """Before step 1: is there room for a checkpoint at all? Every process calls it.

        Raises:
            CheckpointError: with the bytes needed and free.
        """
        needed = self._needed_bytes(trainer)
        trainer.parts.group.from_main(lambda: check_space(self.run_dir, needed))

    def load_trained(self, folder: Path) -> None:
        """Put the trained tensors of a checkpoint, of whatever layout, into this process's parts."""
        if (folder / TRAINED_FILE).is_file() or is_sharded(folder):
            read_trained(folder, self.local, self.aliases, self.load_public)
        else:
            self.load_public(folder)

    def load_best(self, trainer: Trainer) -> None:
        """End with the weights of the best evaluation."""
        load_best(self.run_dir, trainer, self.load_trained)

    def resume(self, folder: Path, trainer: Trainer) -> None:
        """Put optimizer, scaler and random generators back, from a checkpoint of whatever layout.

        Raises:
            CheckpointError: the checkpoint holds no optimizer state, or one of another model.
        """
        optimizer = trainer.parts.optimizer
        if trainer.state.optimizer != type(optimizer).__name__:
            raise CheckpointError(
                f"the saved optimizer state is of {trainer.state.optimizer}, not of {type(optimizer).__name__}",
                where=str(folder),
                fix="resume with the optimizer of the run, or add --resume_only_model true",
            )
        saved = read_optimizer(folder, optimizer, self.local, self.aliases)
        if trainer.scaler is not None and saved["scaler"]:
            trainer.scaler.load_state_dict(saved["scaler"])
        load_rank_state(folder, trainer)
        resume_random_state(folder, trainer)


def _describe(path: Path) -> dict[str, dict[str, int]]:
    return {path.name: describe_file(path)}


def _groups(optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """The optimizer's groups without the parameters themselves."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in groups:
        group["names"] = [name for name in group["names"] if name not in aliases]
    return groups


def merge_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of all processes: those with equal settings are one, with the names of all."""
    merged: list[dict[str, Any]] = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "names"}
        same = next((m for m in merged if {k: v for k, v in m.items() if k != "names"} == settings), None)
        if same is None:
            merged.append({**settings, "names": list(group["names"])})
        else:
            same["names"] += [name for name in group["names"] if name not in same["names"]]
    return merged
