"""How a step's micro-batches become gradients: the part of the loop that depends on how the model is spread.

The trainer asks a `Strategy` and doesn't know which one it has. `DataParallel` is the plain one: every process holds
the whole model, and gradients are averaged while the last micro-batch runs backward.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift.data.loading.batch import Batch
from swift.distributed import ProcessGroup
from swift.distributed.compression import GradientExchange
from swift.distributed.mesh import Mesh
from swift.distributed.traffic import TRAFFIC
from swift.objectives import LossTerms
from swift.training.module import Probe, TrainModule
from swift.training.precision import Precision

# A loss sum -> the loss that is differentiated: divided by the step's weight, times the loss scale of fp16.
ToLoss = Callable[[torch.Tensor], torch.Tensor]
# Keeps DistributedDataParallel from sending rank 0's buffers round with every forward pass; torch 2.13 renamed it.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class Stepped(NamedTuple):
    """How a step went: whether weights changed (gradients that overflowed leave them as they are), and the gradients'
    norm before clipping where `clip` couldn't tell it."""

    applied: bool
    norm: float | None = None


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
        """The evaluation objective of a micro-batch, without gradients, in the mode that the module is in."""
        ...

    def measure(self, batch: Batch, probe: Probe) -> torch.Tensor:
        """What the probe makes of a whole micro-batch's states: [targets, ...], the same on all ranks that share it.

        Without gradients, as in evaluation (no dropout); draws nothing from the random generators."""
        ...

    def clip(self, limit: float) -> float | None:
        """Scale the gradients so that their norm over the whole model is at most `limit`; gives the norm before. None
        where that happens, and the norm is known, with the step only."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
        """Change the weights."""
        ...


class DataParallel:
    """One process, or several that hold the whole model each.

    Args:
        module: `TrainModule`.
        regularizer: an additional loss per step, such as AdaLoRA's orthogonality term.
        exchange: how gradients are averaged over ranks; None for the library's all-reduce.
        alone: gradients are not exchanged at all (`swift.training.local_updates`). Each rank's are then those of the
            sum of its own losses, divided by what a rank has on average of the step's weight; so their mean over ranks
            is the gradient that all would have agreed on.

    Attributes:
        busy_s: seconds that this rank computed in the latest step's forward and backward passes; with a timed
            `exchange`, without the time in which it waited for other ranks.
        busy_tokens: slots of tokens that it computed for in them.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        precision: Precision,
        *,
        mesh: Mesh | None = None,
        regularizer: Callable[[], torch.Tensor] | None = None,
        exchange: GradientExchange | None = None,
        alone: bool = False,
    ) -> None:
        self.module = module
        self.mesh = mesh or Mesh()
        self._group = group
        self._precision = precision
        self._regularizer = regularizer
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self.device = next(module.parameters()).device
        self._forward_module = module
        self._exchange = exchange
        self._alone = alone and group.world_size > 1
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in self._trained)
        self.busy_s = 0.0
        self.busy_tokens = 0
        if group.world_size > 1 and not alone:
            ids = [group.local_rank] if self.device.type == "cuda" else None
            # buffers are never trained, so they stay as equal as they were loaded
            self._forward_module = wrapped = DistributedDataParallel(
                module, device_ids=ids, gradient_as_bucket_view=True, **_KEEP_BUFFERS
            )
            if exchange is not None:
                exchange.register(wrapped)

    @property
    def copies(self) -> int:
        return 1

    def prepare(self, batches: list[Batch]) -> list[list[Batch]]:
        self.busy_s, self.busy_tokens = 0.0, sum(batch.input_ids.numel() for batch in batches)
        return [[batch] for batch in batches]

    def forward(self, portion: list[Batch], to_loss: ToLoss, last: bool) -> list[LossTerms]:
        start = self._now_s()
        if isinstance(self._forward_module, DistributedDataParallel):
            self._forward_module.require_backward_grad_sync = last
        with self._precision.autocast():
            terms = [self._forward_module(batch.to(self.device)) for batch in portion]
        self.busy_s += self._now_s() - start
        return terms

    def backward(self, terms: list[LossTerms], to_loss: ToLoss, last: bool) -> None:
        """The data-parallel wrapper averages over ranks, hence the factor."""
        start = self._now_s()
        for term in terms:
            loss = to_loss(term.loss_sum * float(self._group.world_size))
            if self._regularizer is not None and last:
                loss = loss + self._regularizer()
            loss.backward()
        if last and self._exchange is None and not self._alone and self._group.world_size > 1:
            size = self._group.world_size
            TRAFFIC.count("dp", "all_reduce", 2 * (size - 1) / size * self._gradient_bytes)
        # what comes after the last bucket is waiting for the others
        timed = self._exchange is not None and self._exchange.timed
        self.busy_s += (self._exchange.handed_over_s if last and self._exchange and timed else self._now_s()) - start

    def _now_s(self) -> float:
        """The time; where it is measured, when the device is done with what it was given."""
        if self._exchange is not None and self._exchange.timed and self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def evaluate(self, batch: Batch) -> LossTerms:
        with self._precision.autocast():
            return self.module(batch.to(self.device))

    @torch.no_grad()
    def measure(self, batch: Batch, probe: Probe) -> torch.Tensor:
        assert isinstance(self.module, TrainModule)
        with as_in_evaluation(self.module), self.module.probing(probe):
            return measured(self.evaluate(batch))

    def clip(self, limit: float) -> float:
        """The norm before; of ranks that step alone, the root mean square of theirs, each clipped by its own."""
        norm = float(nn.utils.clip_grad_norm_(self._trained, limit or math.inf))
        if self._alone:
            norm = math.sqrt(self._group.sum([norm * norm])[0] / self._group.world_size)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
        return step_optimizer(optimizer, scaler)


@contextmanager
def as_in_evaluation(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def measured(terms: LossTerms) -> torch.Tensor:
    """What a probe left in the terms."""
    assert terms.measured is not None
    return terms.measured


def step_optimizer(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
    """Step, through the loss scaler if there is one, which leaves out a step whose gradients overflowed."""
    if scaler is None:
        optimizer.step()
        return Stepped(True)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return Stepped(scaler.get_scale() >= before)  # it shrinks when gradients overflowed
