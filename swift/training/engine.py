"""What turns micro-batches into steps in this run: plain copies, a spread model, or DeepSpeed, with its optimizer.

The one place that knows all three.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from swift.config.commands import TrainConfig
from swift.config.deepspeed import Filling
from swift.models.router import build_router_loss
from swift.optim import LocalParameters, build_optimizer
from swift.training.communication import Communication, build_data_parallel, build_spread
from swift.training.deepspeed import DeepSpeed, make_plan
from swift.training.model import Model
from swift.training.module import TrainModule
from swift.training.session import Session


def build_engine(
    config: TrainConfig, session: Session, model: Model, micro_batches: int
) -> tuple[Communication, torch.optim.Optimizer]:
    """The strategy with what goes along with it, and the optimizer over this process's trained parameters.

    Args:
        micro_batches: of a rank in a step.
    """
    if model.spread is not None and model.making is not None:
        optimizer = _optimizer(config, model.spread.local)
        return build_spread(model.spread, model.making, session), optimizer
    module = TrainModule(
        model.whole,
        decoder=model.decoder,
        head=model.head,
        objectives=session.method.make_objectives(config, session.mesh),
        neftune_alpha=config.objective.neftune_noise_alpha,
        router_loss=build_router_loss(model.causal_lm, config.objective.router_aux_loss_coef, session.mesh),
    )
    optimizer = _optimizer(config, model.whole)
    if config.parallelism.deepspeed:
        strategy = _deepspeed(config, session, model, module, optimizer)
        return Communication(strategy), cast(torch.optim.Optimizer, strategy.optimizer)
    return build_data_parallel(config.parallelism, session, module, optimizer, micro_batches), optimizer


def _optimizer(config: TrainConfig, model: nn.Module | LocalParameters) -> torch.optim.Optimizer:
    return build_optimizer(
        model,
        config.optimizer,
        tuner_type=config.tuner.tuner_type,
        lorap_lr_ratio=config.tuner.lorap_lr_ratio,
    )


def _deepspeed(
    config: TrainConfig, session: Session, model: Model, module: TrainModule, optimizer: torch.optim.Optimizer
) -> DeepSpeed:
    assert config.parallelism.deepspeed is not None
    filling = Filling(
        micro_batch=config.training.per_device_train_batch_size,
        world_size=session.group.world_size,
        clipping=config.training.max_grad_norm,
        dtype=session.precision.name,
        hidden=model.causal_lm.config.get_text_config().hidden_size,
    )
    plan = make_plan(config.parallelism.deepspeed, filling)
    session.notes.append(f"DeepSpeed's ZeRO stage {plan.stage} holds the optimizer's state and averages gradients")
    return DeepSpeed(module, optimizer, plan, session.group, mesh=session.mesh, head=model.head.module.parameters())
