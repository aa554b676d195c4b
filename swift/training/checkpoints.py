"""What the savers of whole and of spread models do alike: random generators, what each rank remembers for itself, room
on the disk, best and old ones."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swift.checkpoint import RunState, prune
from swift.checkpoint.store import link
from swift.core.errors import CheckpointError
from swift.core.files import disk_errors, human_bytes
from swift.training.stored_state import RANDOM_FILE
from swift.training.trainer import Trainer

RANK_FILE = "rank_state-{:05d}.pt"


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that training can draw from, as tensors and plain numbers."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def resume_random_state(folder: Path, trainer: Trainer) -> None:
    """Put this process's generators back, if there were as many processes."""
    states = torch.load(folder / RANDOM_FILE, weights_only=True, map_location="cpu")
    rank = trainer.parts.group.rank
    if rank < len(states):
        set_random_state(states[rank], trainer.device)


def write_rank_state(folder: Path, trainer: Trainer) -> Path:
    """Write what this rank alone remembers; too much to send it all to rank 0."""
    path = folder / RANK_FILE.format(trainer.parts.group.rank)
    with disk_errors(folder):
        torch.save({name: part.state_dict() for name, part in trainer.parts.rank_states.items()}, path)
    return path


def load_rank_state(folder: Path, trainer: Trainer) -> None:
    """Put back what `write_rank_state` wrote on the same rank of as many.

    Raises:
        CheckpointError: it isn't there, and the run can't go on without.
    """
    parts, group = trainer.parts.rank_states, trainer.parts.group
    if not parts:
        return
    path = folder / RANK_FILE.format(group.rank)
    same_ranks = trainer.state.world_size == group.world_size
    states = torch.load(path, weights_only=True, map_location="cpu") if same_ranks and path.is_file() else {}
    for name, part in parts.items():
        if name in states:
            part.load_state_dict(states[name])
        elif part.without_it is None:
            raise CheckpointError(
                f"{name} has to go on from what each rank kept for itself, and this checkpoint has it for "
                + (f"{trainer.state.world_size} rank(s), not {group.world_size}" if not same_ranks else "none"),
                where=str(folder),
                fix="resume with as many processes and the settings of the run, or take only the weights with "
                "--resume_only_model true",
            )
        else:
            trainer.parts.monitor.event("warning", f"the checkpoint has no state of {name}: {part.without_it}")


def check_space(run_dir: Path, needed: int) -> None:
    """Before step 1: is there room for a checkpoint at all?

    Raises:
        CheckpointError: with the bytes needed and free.
    """
    free = shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"there is no room for a checkpoint: about {human_bytes(needed)} needed, {human_bytes(free)} free",
            where=str(run_dir),
            fix="free space, choose another --output_dir, or train without checkpoints: --save_strategy no",
        )


def tidy(checkpoint: Path, state: RunState, *, keep: int | None, links: bool) -> None:
    """After a save: remove what is more than `keep`, and point the links at the last and the best."""
    run_dir = checkpoint.parent
    prune(run_dir, keep, newest=state.step, best=state.best_step)
    if not links:
        return
    link(run_dir, "last", checkpoint)
    if state.best_step is not None and (run_dir / f"checkpoint-{state.best_step}").is_dir():
        link(run_dir, "best", run_dir / f"checkpoint-{state.best_step}")


def load_best(run_dir: Path, trainer: Trainer, load: Callable[[Path], None]) -> None:
    """End with the weights of the best evaluation; every process calls it."""
    best = trainer.state.best_step
    if best is None or best == trainer.state.step:
        return
    folder = run_dir / f"checkpoint-{best}"
    if not trainer.parts.group.from_main(folder.is_dir):
        trainer.parts.monitor.event(
            "warning", f"the best evaluation was at step {best}, of which there is no checkpoint: kept the last"
        )
        return
    load(folder)
    trainer.parts.monitor.event("best", f"took the weights of {folder.name} back", step=trainer.state.step)
