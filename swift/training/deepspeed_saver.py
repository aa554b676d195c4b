"""Checkpoints of a run by DeepSpeed: a public part like every other run's, and DeepSpeed's own files for going on.

The public part is gathered on rank 0, one tensor after the other, in the precision that was trained in. The private
part is what DeepSpeed's engine writes, every process its own; it can be read back by as many processes with the same
ZeRO stage. The folder gets its name when everything in it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from swift.checkpoint.data import DATA_FILE, write_data_state
from swift.checkpoint.state import FILE_NAME as STATE_FILE
from swift.checkpoint.store import describe_file
from swift.config.saved import DEEPSPEED_FOLDER
from swift.core.errors import CheckpointError
from swift.distributed.gathering import Found
from swift.distributed.process_group import ProcessGroup
from swift.training.checkpoints import check_space, load_best, random_state, resume_random_state
from swift.training.deepspeed import DeepSpeed, shape_of
from swift.training.stored_state import OPTIMIZER_FILE, RANDOM_FILE
from swift.training.together import Written, all_or_none, save_together
from swift.training.trainer import Trainer

TAG = "state"
LAYOUT_FILE = "layout.json"


class EngineTensors:
    """Tensors that DeepSpeed holds, each as a whole on rank 0: a `Gathering`.

    Args:
        tensors: parameters and buffers of the module, by name; all ranks name the same ones.
    """

    def __init__(self, strategy: DeepSpeed, tensors: Mapping[str, torch.Tensor], group: ProcessGroup) -> None:
        self._strategy, self._tensors, self._group = strategy, dict(tensors), group
        self.found = {name: Found(shape_of(t), t.dtype, {}) for name, t in tensors.items()}

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor | None:
        """The tensor in host memory on rank 0; None on other ranks."""
        tensor = self._strategy.whole(self._tensors[name])
        return tensor.to("cpu", copy=True) if self._group.main else None


@dataclass
class DeepSpeedSaver:
    """Writes and reads checkpoints of one run by DeepSpeed; every process makes one and calls it at the same time.

    Attributes:
        model: the whole model, adapters included.
        write_public: writes what anyone can read into a folder; every process calls it.
        load_public: reads the trained tensors back from the public part of a folder into a model that isn't cut.
        whole_model: whether the public part is a whole model, and not an adapter.
    """

    model: nn.Module
    run_dir: Path
    write_public: Callable[[Path, DeepSpeed], None]
    load_public: Callable[[Path], None]
    whole_model: bool
    keep: int | None = None
    only_model: bool = False
    links: bool = False

    def save(self, trainer: Trainer) -> Path | None:
        """Write `checkpoint-<step>`.

        Raises:
            CheckpointError: a process could not write; on all of them, and earlier checkpoints are intact.
        """
        return save_together(
            self.run_dir,
            trainer,
            lambda aside: self._write(aside, trainer),
            needed_bytes=self._needed_bytes(),
            keep=self.keep,
            links=self.links,
        )

    def _write(self, aside: Path, trainer: Trainer) -> Written:
        group, strategy = trainer.parts.group, _engine_of(trainer)
        all_or_none(group, lambda: self.write_public(aside, strategy))
        if self.only_model and trainer.status != "interrupted":  # an interrupted run must be able to go on
            return {}, lambda: None
        folder = aside / DEEPSPEED_FOLDER
        all_or_none(group, lambda: strategy.save(folder, TAG))
        mine = {str(p.relative_to(aside)): describe_file(p) for p in folder.rglob(f"*zero_pp_rank_{group.rank}_*")}
        described = {name: entry for files in group.gather(mine) for name, entry in files.items()}
        randoms = group.gather(random_state(trainer.device))
        state = trainer.state
        state.world_size, state.global_units = group.world_size, trainer.parts.loader.global_units
        state.total_steps, state.optimizer = trainer.parts.length.total_steps, strategy.kind

        def write_rest() -> None:
            layout = {"stage": strategy.plan.stage, "world_size": group.world_size, "names": _names(strategy)}
            (folder / LAYOUT_FILE).write_text(json.dumps(layout))
            torch.save(randoms, aside / RANDOM_FILE)
            write_data_state(aside / DATA_FILE, trainer.parts.loader.state())
            (aside / STATE_FILE).write_text(state.to_json())

        return described, write_rest

    def _needed_bytes(self) -> int:
        """About what all processes will write together: fp32 weights and two numbers beside each."""
        trained = 4 * sum(_size(p) for p in self.model.parameters() if p.requires_grad)
        whole = 4 * sum(_size(p) for p in self.model.parameters()) if self.whole_model else trained
        return whole + (0 if self.only_model else 4 * trained)

    def check_space(self, trainer: Trainer) -> None:
        """Before step 1: is there room for a checkpoint at all? Every process calls it.

        Raises:
            CheckpointError: with the bytes needed and free.
        """
        trainer.parts.group.from_main(lambda: check_space(self.run_dir, self._needed_bytes()))

    def load_trained(self, folder: Path) -> None:
        """Put the public weights of a checkpoint into the model, before DeepSpeed has it."""
        self.load_public(folder)

    def load_best(self, trainer: Trainer) -> None:
        """End with the weights of the best evaluation, as far as computing goes: there is no step after this."""
        opened = [p for p in self.model.parameters() if self.whole_model or p.requires_grad]

        def load(folder: Path) -> None:
            with _engine_of(trainer).opened(opened):
                self.load_public(folder)

        load_best(self.run_dir, trainer, load)

    def resume(self, folder: Path, trainer: Trainer) -> None:
        """Let DeepSpeed read weights, optimizer and loss scale back, then the random generators.

        Raises:
            CheckpointError: the checkpoint is of another kind of run, stage, number of processes, or of other
                parameters.
        """
        strategy, group = _engine_of(trainer), trainer.parts.group
        saved = folder / DEEPSPEED_FOLDER
        if not (saved / LAYOUT_FILE).is_file():
            kept = (folder / OPTIMIZER_FILE).is_file()
            raise CheckpointError(
                "the checkpoint's optimizer state was written without --deepspeed"
                if kept
                else "the checkpoint holds weights only (it was saved with --save_only_model)",
                where=str(folder),
                fix="add --resume_only_model true to start new steps from its weights"
                + ("; or go on with --deepspeed none" if kept else ""),
            )
        layout = json.loads((saved / LAYOUT_FILE).read_text())
        wrong = []
        if layout["world_size"] != group.world_size:
            wrong.append(f"{layout['world_size']} process(es), not {group.world_size}")
        if layout["stage"] != strategy.plan.stage:
            wrong.append(f"ZeRO stage {layout['stage']}, not {strategy.plan.stage}")
        if trainer.state.optimizer != strategy.kind:
            wrong.append(f"{trainer.state.optimizer}, not {strategy.kind}")
        if layout["names"] != _names(strategy):
            wrong.append("other parameters or groups of them")
        if wrong:
            raise CheckpointError(
                f"DeepSpeed's files in the checkpoint are of {', and of '.join(wrong)}",
                where=str(folder),
                fix="resume with the settings and processes of the run, or take only the weights: --resume_only_model "
                "true",
            )
        strategy.load(saved, TAG)
        resume_random_state(folder, trainer)


def _engine_of(trainer: Trainer) -> DeepSpeed:
    return cast(DeepSpeed, trainer.parts.strategy)


def _names(strategy: DeepSpeed) -> list[list[str]]:
    """The trained parameters' names, by the optimizer's groups."""
    return [group["names"] for group in strategy.optimizer.param_groups]


def _size(parameter: torch.Tensor) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
