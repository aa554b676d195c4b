"""What a run will do, worked out before it starts: how many steps, how examples share them, where it writes."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

from swift.checkpoint import RunState
from swift.checkpoint.store import SUPERSEDED
from swift.config.commands import TrainConfig
from swift.core.errors import UsageError
from swift.data.loading.batch import Layout
from swift.data.loading.loader import Loader, Outlook

# Examples per optimizer step when the user gives no accumulation.
DEFAULT_EXAMPLES_PER_STEP = 16


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-batches per step and data-parallel rank: the user's, else enough for 16 examples in all.

    Raises:
        UsageError: global_batch_size can't be reached with whole micro-batches.
    """
    if config.training.gradient_accumulation_steps is not None:
        return config.training.gradient_accumulation_steps
    wanted = config.training.global_batch_size
    if wanted is not None:
        at_once = config.training.per_device_train_batch_size * world_size
        if wanted % at_once:
            near = max(1, round(wanted / at_once)) * at_once
            raise UsageError(
                f"{wanted} examples a step can't be shared out: {world_size} data-parallel rank(s) take {at_once}",
                where="--global_batch_size",
                fix=f"--global_batch_size {near}, or another --per_device_train_batch_size",
            )
        return wanted // at_once
    return max(1, math.ceil(DEFAULT_EXAMPLES_PER_STEP / (config.training.per_device_train_batch_size * world_size)))


def build_layout(
    config: TrainConfig, *, world_size: int, padding_free: bool, pad_token_id: int, longest: int = 0
) -> Layout:
    """How examples share micro-batches, from the settings and what the model allows.

    Args:
        longest: tokens of the longest unit of several sequences, which may have more than max_length; 0 for others, and
            where nobody knows it.
    """
    batching = config.batching
    packing_length = 0
    if batching.packing:
        needed = max(longest, 0 if longest else config.template.max_length)
        packing_length = batching.packing_length or max(needed, config.template.max_length)
        if packing_length < needed:
            raise UsageError(
                f"rows of {packing_length} tokens can't hold examples of up to {needed}",
                where="--packing_length",
                fix=f"--packing_length {needed}, or lower --max_length",
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
        max_length=config.template.max_length,
    )


@dataclass(frozen=True)
class RunLength:
    """When a run is over.

    Attributes:
        total_steps: its optimizer steps; an estimate where `epochs` decides.
        epochs: passes over the data after which it ends, however many steps they turn out to take; None where the
            number of steps decides.
        units_per_epoch: as far as known.
    """

    total_steps: int
    epochs: float | None = None
    units_per_epoch: int | None = None

    def epochs_done(self, state: RunState) -> float:
        """Epochs that were trained on, such as 1.25."""
        if self.units_per_epoch is None:
            return float(state.epoch)
        return state.epoch + min(state.consumed / self.units_per_epoch, 0.9999)  # the estimate may be too low

    def reached(self, state: RunState) -> bool:
        """Whether a run in this state is over."""
        if self.epochs is None:
            return state.step >= self.total_steps
        return self.epochs_done(state) >= self.epochs - 1e-9


def run_length(config: TrainConfig, loader: Loader, state: RunState) -> RunLength:
    """How long the run is: `max_steps`, else `num_train_epochs`.

    Where the units of an epoch are known, the steps of all epochs are added up: those done plus those left. Counting
    what is left in units, not in steps, keeps the epochs whole when a resumed run takes larger or smaller steps than
    the first one did. A part of an epoch counts as begun. Where they are estimated, the steps are an estimate on which
    the schedule of the learning rate hangs, and the run ends when the data of its epochs do.

    Raises:
        UsageError: nobody can know how long the epochs are, and the schedule would have to.
    """
    training, optimizer = config.training, config.optimizer
    outlook = loader.outlook(state.epoch)
    if training.max_steps > 0:
        return RunLength(training.max_steps, None, outlook.units)
    if outlook.exact:
        return RunLength(_counted_steps(config, loader, state), None, outlook.units)
    if outlook.units is None:
        constant = optimizer.lr_scheduler_type in ("constant", "constant_with_warmup")
        if not constant or (optimizer.warmup_ratio and not optimizer.warmup_steps):
            raise UsageError(
                f"the schedule needs the number of steps, and {outlook.words}",
                where="--max_steps",
                fix="give --max_steps, or --lr_scheduler_type constant (with --warmup_steps for a warm-up)",
            )
        return RunLength(0, training.num_train_epochs, None)
    return RunLength(
        _estimated_steps(training.num_train_epochs, outlook, loader, state), training.num_train_epochs, outlook.units
    )


def _counted_steps(config: TrainConfig, loader: Loader, state: RunState) -> int:
    whole, part = divmod(config.training.num_train_epochs, 1)
    steps = state.step
    for epoch in range(state.epoch, int(whole) + 1):
        share = 1.0 if epoch < int(whole) else part
        if not share:
            break
        units = math.ceil(share * (loader.outlook(epoch).units or 0) - 1e-9)  # 0.1 of 10 is one, however 0.1 is rounded
        units -= state.consumed if epoch == state.epoch else 0
        steps += -(-max(0, units) // loader.global_units)
    return max(1, steps)


def _estimated_steps(epochs: float, outlook: Outlook, loader: Loader, state: RunState) -> int:
    """The same number before and after a resume, as long as a step takes as many units."""
    assert outlook.units is not None
    whole, part = divmod(epochs, 1)
    steps = int(whole) * -(-outlook.units // loader.global_units) + math.ceil(
        part * outlook.units / loader.global_units
    )
    if state.global_units in (0, loader.global_units):
        return max(1, steps)
    left = epochs - state.epoch - min(1.0, state.consumed / outlook.units)
    return max(1, state.step + math.ceil(left * outlook.units / loader.global_units))


def run_folder(config: TrainConfig, model_name: str, continued: Path | None) -> Path:
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
    def of(cls, rows: str, loader: Loader) -> DataIdentity:
        """`rows` identifies the encoded examples; the loader knows what decides in which order an epoch takes them."""
        return cls(rows, hashlib.sha256(repr(loader.identity).encode()).hexdigest()[:16])
