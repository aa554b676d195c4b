"""What is kept when a step goes wrong, and how much memory a run has used."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path

import torch

from swift.core.files import write_atomic
from swift.data.loading.batch import Batch


def dump_nonfinite(run_dir: Path, step: int, rank: int, batches: list[Batch], losses: list[float]) -> Path:
    """Write the step's micro-batches and their rows, to be looked at or replayed.

    Returns the folder: `rank<r>.pt` holds the tensors, `rank<r>.json` each micro-batch's loss and rows.
    """
    folder = run_dir / f"nonfinite-step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [
        {name: value.cpu() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        | {"borders": batch.borders}
        for batch in batches
    ]
    torch.save(tensors, folder / f"rank{rank}.pt")
    described = [
        {"loss": loss if math.isfinite(loss) else str(loss), "rows": [str(ref) for ref in batch.refs]}
        for batch, loss in zip(batches, losses, strict=False)
    ]
    write_atomic(folder / f"rank{rank}.json", json.dumps(described, indent=1) + "\n")
    return folder


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far: of the accelerator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
