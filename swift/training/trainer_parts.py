"""What a trainer is made of, and what may watch it: the loop's own protocols. The loop is in `trainer`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swift.config.training import CheckpointConfig, EvalConfig, TrainingConfig
from swift.data.loading.batch import Annotate, Examples
from swift.data.loading.loader import Loader
from swift.distributed import ProcessGroup
from swift.monitor import Monitor
from swift.optim.schedules import Schedule
from swift.training.plan import RunLength
from swift.training.precision import Precision
from swift.training.strategy import Strategy

if TYPE_CHECKING:
    from swift.training.method import LookAhead, Metrics
    from swift.training.trainer import Trainer


class Callback:
    """Sees every phase of every step. Override what you need; `trainer` is the running `Trainer`."""

    def before_phase(self, trainer: Trainer, phase: str) -> None: ...

    def after_phase(self, trainer: Trainer, phase: str) -> None: ...


class Saver(Protocol):
    """Writes a checkpoint of the whole run and tells where."""

    def save(self, trainer: Trainer) -> Path | None: ...

    def load_best(self, trainer: Trainer) -> None: ...


class RankState(Protocol):
    """Something that each rank remembers for itself; a checkpoint keeps it for every rank.

    Attributes:
        without_it: what a resumed run is without this state, for a warning; None: it can't go on at all.
    """

    without_it: str | None

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainerParts:
    """What a trainer is made of; `commands/sft.py` builds them.

    Attributes:
        strategy: the model on its processes (see `training/strategy.py`).
        run_dir: where the run writes.
        rank_states: by name, what differs between ranks beside random generators.
        look_ahead: works out what the objective has to know of a whole step.
        metrics: of evaluations, beside the objective's own; annotate_eval: adds facts to the batches of one.
        shared_weights: the context in which the model has the weights that all ranks share, for evaluating and saving.
    """

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loader: Loader
    group: ProcessGroup
    monitor: Monitor
    precision: Precision
    saver: Saver
    run_dir: Path
    training: TrainingConfig
    checkpoint: CheckpointConfig
    evaluation: EvalConfig
    logging_steps: int
    length: RunLength
    eval_examples: Examples | None = None
    eval_tokens_per_batch: int = 4096
    callbacks: list[Callback] = field(default_factory=list)
    rank_states: dict[str, RankState] = field(default_factory=dict)
    shared_weights: Callable[[], AbstractContextManager] = nullcontext
    look_ahead: LookAhead | None = None
    metrics: Metrics | None = None
    annotate_eval: Annotate | None = None
