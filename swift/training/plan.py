"""What a run will do, worked out before it starts: how many steps, how examples share them, where it writes."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

from swift.checkpoint import RunState
from swift.checkpoint.store import SUPERSEDED
from swift.config.commands import SftConfig
from swift.core.errors import UsageError
from swift.data.loader import Layout, TrainLoader

# Examples per optimizer step when the user gives no accumulation.
DEFAULT_EXAMPLES_PER_STEP = 16


def accumulation_steps(config: SftConfig, world_size: int) -> int:
    """Micro-batches per step and rank: the user's, else enough for 16 examples in all."""
    if config.training.gradient_accumulation_steps is not None:
        return config.training.gradient_accumulation_steps
    return max(1, math.ceil(DEFAULT_EXAMPLES_PER_STEP / (config.training.per_device_train_batch_size * world_size)))


def build_layout(config: SftConfig, *, world_size: int, padding_free: bool, pad_token_id: int) -> Layout:
    """How examples share micro-batches, from the settings and what the model allows."""
    batching = config.batching
    packing_length = 0
    if batching.packing:
        packing_length = batching.packing_length or config.template.max_length
        if packing_length < config.template.max_length:
            raise UsageError(
                f"rows of {packing_length} tokens can't hold examples of up to {config.template.max_length}",
                where="--packing_length",
                fix="make packing_length at least max_length, or lower --max_length",
            )
    group = batching.group_by_length
    return Layout(
        units_per_micro_batch=config.training.per_device_train_batch_size,
        micro_batches=accumulation_steps(config, world_size),
        padding_free=padding_free,
        packing_length=packing_length,
        group_by_length=(not padding_free if group is None else group) and not packing_length,
        shuffle=batching.train_dataloader_shuffle,
        pad_token_id=pad_token_id,
    )


def total_steps(config: SftConfig, loader: TrainLoader, state: RunState) -> int:
    """Optimizer steps of the whole run: `max_steps`, else those done plus those left of `num_train_epochs`.

    Counting what is left in units, not in steps, keeps the epochs whole when a resumed run takes larger or smaller
    steps than the first one did. A part of an epoch counts as begun.
    """
    if config.training.max_steps > 0:
        return config.training.max_steps
    whole, part = divmod(config.training.num_train_epochs, 1)
    steps = state.step
    for epoch in range(state.epoch, int(whole) + 1):
        share = 1.0 if epoch < int(whole) else part
        units = math.ceil(share * loader.num_units(epoch) - 1e-9)  # 0.1 of 10 is one, however 0.1 is rounded
        units -= state.consumed if epoch == state.epoch else 0
        steps += -(-max(0, units) // loader.global_units)
    return max(1, steps)


def run_folder(config: SftConfig, model_name: str, continued: Path | None) -> Path:
    """Where the run writes: the continued run's folder, else a new `vN-<time>` in output_dir (or output_dir itself)."""
    if continued is not None:  # a checkpoint that was set aside goes on in the run it came from
        return continued.parent if continued.name == SUPERSEDED else continued
    root = Path(config.checkpoint.output_dir or Path("output") / model_name).expanduser()
    if not config.checkpoint.add_version:
        return root
    taken = [
        int(path.name[1:].partition("-")[0])
        for path in (root.iterdir() if root.is_dir() else [])
        if path.name.startswith("v") and path.name[1:].partition("-")[0].isdigit()
    ]
    return root / f"v{max(taken, default=-1) + 1}-{time.strftime('%Y%m%d-%H%M%S')}"


@dataclass(frozen=True)
class DataIdentity:
    """What must be equal for a resumed run to see the data the first one would have seen."""

    rows: str
    order: str

    @classmethod
    def of(cls, dataset_fingerprint: str, loader: TrainLoader) -> DataIdentity:
        """`rows` identifies the encoded examples, `order` in which order an epoch takes them.

        Only grouping by length makes the order depend on how many examples a step takes.
        """
        layout = loader.layout
        grouped = layout.group_by_length and loader.global_units
        order = (loader.seed, layout.packing_length, layout.shuffle, grouped)
        return cls(dataset_fingerprint, hashlib.sha256(repr(order).encode()).hexdigest()[:16])
