"""What the savers of whole and of spread models do alike: random generators, room on the disk, best and old ones."""

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
from swift.core.files import human_bytes
from swift.training.stored_state import RANDOM_FILE
from swift.training.trainer import Trainer


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
