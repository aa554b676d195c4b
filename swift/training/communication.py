"""How data-parallel ranks exchange gradients, or agree on weights instead: those that hold the whole model each, and
replicas of a sharded one.

Turns the settings into the strategy and into what goes with it. Which settings exclude each other was checked before
(`swift.config.communication`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from swift.config.communication import read_compression, read_local_updates
from swift.config.parallel import ParallelConfig
from swift.core.errors import UsageError
from swift.distributed.compression import GradientExchange, build_exchange
from swift.distributed.mesh import Axis
from swift.models.tuners import adapter_regularizer
from swift.training.balance import MicroBatchBalance
from swift.training.local_updates import LocalSteps
from swift.training.module import TrainModule
from swift.training.parallelize import Making, SpreadModel, make_strategy
from swift.training.session import Session
from swift.training.strategy import DataParallel, Strategy
from swift.training.trainer_parts import Callback, RankState


@dataclass
class Communication:
    """A strategy, and what the trainer needs to go with it."""

    strategy: Strategy
    callbacks: list[Callback] = field(default_factory=list)
    rank_states: dict[str, RankState] = field(default_factory=dict)
    shared_weights: Callable[[], AbstractContextManager] = nullcontext


def build_data_parallel(
    config: ParallelConfig,
    session: Session,
    module: TrainModule,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
) -> Communication:
    """The strategy of ranks that hold the whole model each. All of them call it.

    Args:
        micro_batches: of a rank in a step.

    Raises:
        UsageError: the ranks can't be laid out as asked, or the precision doesn't allow it.
    """
    group, several = session.group, session.group.world_size > 1
    exchange = _exchange(config, session) if several and not config.local_updates else None
    strategy = DataParallel(
        module,
        group,
        session.precision,
        mesh=session.mesh,
        regularizer=adapter_regularizer(module.model),
        exchange=exchange,
        alone=bool(config.local_updates),
    )
    parts = Communication(strategy)
    if exchange is not None and exchange.averaging.remembers:
        parts.rank_states["grad_compression"] = exchange
    if config.local_updates:
        steps = _local_steps(config.local_updates, session, module, optimizer)
        session.notes.append(steps.words())
        parts.callbacks.append(steps)
        parts.rank_states["local_updates"] = steps
        parts.shared_weights = steps.shared_weights
    if config.balance_micro_batches and several:
        parts.callbacks.append(MicroBatchBalance(strategy, group.world_size, micro_batches))
        if micro_batches == 1:
            session.notes.append(
                "balance_micro_batches has nothing to deal out: a rank runs one micro-batch a step; give more with "
                "--gradient_accumulation_steps"
            )
    if not several and (config.grad_compression or config.balance_micro_batches):
        asked = [name for name in ("grad_compression", "balance_micro_batches") if getattr(config, name)]
        session.notes.append(f"{' and '.join(asked)}: nothing to do for one process")
    return parts


def build_spread(model: SpreadModel, making: Making, session: Session) -> Communication:
    """The strategy of ranks that hold parts of the model, and what its replicas remember of their exchange."""
    parts, replicas = Communication(make_strategy(model, making)), model.spread.replicas
    if replicas is not None:
        session.notes.append(f"gradients: {replicas.words}")
        if replicas.remembers:  # it is of shares, so it fits no other layout: a run that has another won't find it
            parts.rank_states[f"grad_compression on {session.mesh.degrees.words()}"] = replicas
    elif making.parallelism.grad_compression:
        session.notes.append("grad_compression: nothing to do, for there is one replica")
    return parts


def _exchange(config: ParallelConfig, session: Session) -> GradientExchange | None:
    if not config.grad_compression and not config.balance_micro_batches:
        return None
    settings = read_compression(config.grad_compression) if config.grad_compression else None
    exchange = build_exchange(settings, session.mesh["dp"], session.device.type)
    exchange.timed = config.balance_micro_batches
    if settings is not None:
        session.notes.append(f"gradients: {exchange.words}")
    return exchange


def _local_steps(value: str, session: Session, module: TrainModule, optimizer: torch.optim.Optimizer) -> LocalSteps:
    if session.precision.scaler() is not None:
        raise UsageError(
            "float16 scales its loss by what all ranks' gradients are, and with local_updates ranks step alone",
            where="--local_updates",
            fix="--torch_dtype bfloat16 or float32",
        )
    settings = read_local_updates(value)
    axis = session.mesh["dp"]
    if axis and settings.delay:  # what comes late must not hold up the loop's own sums
        axis = Axis(axis.name, axis.size, axis.rank, dist.new_group(), axis.device_mesh)
    named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    return LocalSteps(settings, named, optimizer, axis)
