"""Train by DeepSpeed: its ZeRO stages and offloading under the same loop, chosen with `--deepspeed`.

DeepSpeed's engine holds weights, gradients and optimizer state, sums gradients over ranks, clips and steps. The loop
keeps what is its own: which micro-batches make a step, the global weight, the schedule, checkpoints. Precision is
DeepSpeed's as well: with bf16 or fp16 it casts the whole module and keeps fp32 copies of what is trained.

On a CPU its kernels for shared memory are left out (building them takes minutes and gains nothing within a test); GPU
runs have not been made yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swift.config.deepspeed import Filling, filled, read_deepspeed, zero_stage
from swift.core.extras import require
from swift.data.loading.loader import Batch
from swift.distributed import ProcessGroup
from swift.distributed.mesh import Mesh
from swift.objectives import LossTerms
from swift.training.strategy import Stepped, ToLoss


def import_deepspeed(device_type: str) -> Any:
    """The package, set up for this kind of device.

    Raises:
        DependencyError: it isn't installed.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = require("deepspeed", extra="deepspeed", purpose="train with --deepspeed")
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@dataclass(frozen=True)
class Plan:
    """A DeepSpeed configuration with every number filled in.

    Attributes:
        values: as DeepSpeed takes it; stage: its ZeRO stage.
    """

    values: dict[str, Any]

    @property
    def stage(self) -> int:
        return zero_stage(self.values)


def make_plan(text: str, filling: Filling) -> Plan:
    """The configuration that `--deepspeed` means, for this run."""
    values = filled(read_deepspeed(text), filling)
    values["steps_per_print"] = 2**62  # the loop logs
    if not torch.cuda.is_available():
        for part in ("offload_optimizer", "offload_param"):
            if part in values["zero_optimization"]:
                values["zero_optimization"][part]["pin_memory"] = False
    return Plan(values)


class _LossOnly(nn.Module):
    """`TrainModule` with a tensor as its output: DeepSpeed's hooks look for tensors; the other terms are kept aside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.terms: LossTerms | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        self.terms = self.module(batch)
        return self.terms.loss_sum


class DeepSpeed:
    """A `Strategy` whose gradients and steps are DeepSpeed's.

    Args:
        module: `TrainModule`, with whole parameters, or with those that `zero.Init` has partitioned.
        optimizer: over its trained parameters; DeepSpeed takes it over and keeps its groups.
        head: the output head's parameters: stage 3 must gather them for the objective, which uses them outside of the
            head's own forward.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        group: ProcessGroup,
        *,
        mesh: Mesh | None = None,
        head: list[nn.Parameter] | None = None,
    ) -> None:
        device = next(module.parameters()).device
        deepspeed = import_deepspeed(device.type)
        if group.world_size > 1:
            deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", dist_init_required=False)
        self.module = module
        self.mesh = mesh or Mesh()
        self.device = device
        self._group = group
        self._outer = _LossOnly(module)
        if plan.stage == 3:
            for parameter in head or []:
                deepspeed.zero.register_external_parameter(self._outer, parameter)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self._outer, optimizer=optimizer, config=plan.values, model_parameters=trained
        )

    @property
    def copies(self) -> int:
        return 1

    def prepare(self, batches: list[Batch]) -> list[list[Batch]]:
        return [[batch] for batch in batches]

    def forward(self, portion: list[Batch], to_loss: ToLoss, last: bool) -> list[LossTerms]:
        self.engine.set_gradient_accumulation_boundary(last)
        return [self._terms(batch) for batch in portion]

    def _terms(self, batch: Batch) -> LossTerms:
        loss_sum = self.engine(batch.to(self.device))
        terms = self._outer.terms
        assert terms is not None
        terms.loss_sum = loss_sum
        return terms

    def backward(self, terms: list[LossTerms], to_loss: ToLoss, last: bool) -> None:
        """DeepSpeed averages over ranks, hence the factor."""
        for term in terms:
            self.engine.backward(to_loss(term.loss_sum) * float(self._group.world_size))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossTerms:
        return self._terms(batch)

    def clip(self, limit: float) -> None:
        """DeepSpeed clips when it steps; the norm is known then."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
        """DeepSpeed leaves a step out whose gradients aren't finite."""
        self.engine.step()
        return Stepped(bool(self.engine.was_step_applied()), float(self.engine.get_global_grad_norm()))

    def gathered(self, parameters: list[nn.Parameter]) -> Any:
        """A context in which these parameters are whole on every rank (stage 3 has them in parts)."""
        return import_deepspeed(self.device.type).zero.GatheredParameters(parameters)
