"""How a step's micro-batches become gradients: the part of the loop that depends on how the model is spread.

The trainer asks a `Strategy` and doesn't know which one it has. `DataParallel` is the plain one: every process holds
the whole model, and gradients are averaged while the last micro-batch runs backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift.data.loading.loader import Batch
from swift.distributed import ProcessGroup
from swift.distributed.mesh import Mesh
from swift.objectives import LossTerms
from swift.training.precision import Precision

# A loss sum -> the loss that is differentiated: divided by the step's weight, times the loss scale of fp16.
ToLoss = Callable[[torch.Tensor], torch.Tensor]


class Strategy(Protocol):
    """What the trainer needs of the way a model is spread.

    Attributes:
        mesh: the grid of the run.
        module: what this process holds; its parameters, and `train()` and `eval()`, are used.
        copies: processes that hold the same `LossTerms`, by which sums over the world are divided.
    """

    mesh: Mesh
    module: nn.Module

    @property
    def copies(self) -> int: ...

    def prepare(self, batches: list[Batch]) -> list[list[Batch]]:
        """This rank's share of the micro-batches, in the portions that `forward` takes: one at a time, or all at once
        where they run through a pipeline."""
        ...

    def forward(self, portion: list[Batch], to_loss: ToLoss, last: bool) -> list[LossTerms]:
        """Loss terms of each micro-batch in the portion. A pipeline runs backward here as well."""
        ...

    def backward(self, terms: list[LossTerms], to_loss: ToLoss, last: bool) -> None:
        """Add the gradients of the portion; after the last one, they are summed over all ranks."""
        ...

    def evaluate(self, batch: Batch) -> LossTerms:
        """The plain objective of a micro-batch, without gradients."""
        ...

    def clip(self, limit: float) -> float:
        """Scale the gradients so that their norm over the whole model is at most `limit`; gives the norm before."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Change the weights."""
        ...


class DataParallel:
    """One process, or several that hold the whole model each.

    Args:
        module: `TrainModule`.
        regularizer: an additional loss per step, such as AdaLoRA's orthogonality term.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        precision: Precision,
        *,
        mesh: Mesh | None = None,
        regularizer: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.module = module
        self.mesh = mesh or Mesh()
        self._group = group
        self._precision = precision
        self._regularizer = regularizer
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self.device = next(module.parameters()).device
        self._forward_module = module
        if group.world_size > 1:
            ids = [group.local_rank] if self.device.type == "cuda" else None
            self._forward_module = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)

    @property
    def copies(self) -> int:
        return 1

    def prepare(self, batches: list[Batch]) -> list[list[Batch]]:
        return [[batch] for batch in batches]

    def forward(self, portion: list[Batch], to_loss: ToLoss, last: bool) -> list[LossTerms]:
        if isinstance(self._forward_module, DistributedDataParallel):
            self._forward_module.require_backward_grad_sync = last
        with self._precision.autocast():
            return [self._forward_module(batch.to(self.device)) for batch in portion]

    def backward(self, terms: list[LossTerms], to_loss: ToLoss, last: bool) -> None:
        """The data-parallel wrapper averages over ranks, hence the factor."""
        for term in terms:
            loss = to_loss(term.loss_sum * float(self._group.world_size))
            if self._regularizer is not None and last:
                loss = loss + self._regularizer()
            loss.backward()

    def evaluate(self, batch: Batch) -> LossTerms:
        with self._precision.autocast():
            return self.module(batch.to(self.device))

    def clip(self, limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(self._trained, limit or math.inf))

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        step_optimizer(optimizer, scaler)


def step_optimizer(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Step, through the loss scaler if there is one."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
