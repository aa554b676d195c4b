"""Train by DeepSpeed: its ZeRO stages and offloading under the same loop, chosen with `--deepspeed`.

DeepSpeed's engine holds weights, gradients and optimizer state, sums gradients over ranks, clips and steps. The loop
keeps what is its own: which micro-batches make a step, the global weight, the schedule, checkpoints. Precision is
DeepSpeed's as well: with bf16 or fp16 it casts the whole module and keeps fp32 copies of what is trained.

On a CPU its kernels for shared memory are left out (building them takes minutes and gains nothing within a test); GPU
runs have not been made yet.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift.config.deepspeed import Filling, filled, read_deepspeed, zero_stage
from swift.core.errors import UsageError
from swift.core.extras import require
from swift.data.loading.batch import Batch
from swift.distributed import ProcessGroup
from swift.distributed.mesh import Mesh
from swift.objectives import LossTerms
from swift.training.module import Probe, TrainModule
from swift.training.strategy import Stepped, ToLoss, as_in_evaluation, measured


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
    """The model as DeepSpeed sees it: its outputs are tensors, for which its hooks look; other terms are kept aside."""

    def __init__(self, module: TrainModule) -> None:
        super().__init__()
        self.model = module.model
        self._run = [module]  # in a list, so that it gets no hooks
        self.terms: LossTerms | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        self.terms = self._run[0](batch)
        return self.terms.loss_sum


class _Writer:
    """DeepSpeed's writer of files, which keeps an error until all ranks have written: they wait for each other."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trouble: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        try:
            self.engine.save(state_dict, path)
        except Exception as error:
            self.trouble = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class EngineOptimizer:
    """What the loop sees of the optimizer: its groups, whose rates it sets, and that gradients are to be forgotten."""

    def __init__(self, strategy: DeepSpeed) -> None:
        self._strategy = strategy

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._strategy.engine.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._strategy.forget_gradients()


class DeepSpeed:
    """A `Strategy` whose gradients and steps are DeepSpeed's.

    Args:
        module: `TrainModule`, with whole parameters.
        optimizer: over its trained parameters; DeepSpeed takes it over and keeps its groups.
        head: the output head's parameters: stage 3 must gather them for the objective, which uses them outside of the
            head's own forward.

    Attributes:
        optimizer: for the loop.
        kind: the optimizer's class by name.

    Raises:
        UsageError: DeepSpeed refuses the configuration.
    """

    def __init__(
        self,
        module: TrainModule,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        group: ProcessGroup,
        *,
        mesh: Mesh | None = None,
        head: Iterable[nn.Parameter] = (),
    ) -> None:
        self.module: nn.Module = module
        self._train_module = module
        self.mesh = mesh or Mesh()
        self.plan = plan
        self.device = next(module.parameters()).device
        self.kind = type(optimizer).__name__
        self._deepspeed = deepspeed = import_deepspeed(self.device.type)
        self._group = group
        self._outer = _LossOnly(module)
        self._pending = False  # whether gradients wait for a step
        _join(deepspeed, self.device)
        if plan.stage == 3:
            for parameter in head:
                deepspeed.zero.register_external_parameter(self._outer, parameter)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        try:
            deepspeed.DeepSpeedConfig(copy.deepcopy(plan.values))
        except ValueError as error:
            raise UsageError(
                f"DeepSpeed refuses its configuration: {' '.join(str(error).split())}",
                where="--deepspeed",
                fix="correct the file",
            ) from error
        self.engine, *_ = deepspeed.initialize(
            model=self._outer, optimizer=optimizer, config=plan.values, model_parameters=trained
        )
        self.optimizer = EngineOptimizer(self)

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
        """DeepSpeed averages over ranks, hence the factor.

        A loss that isn't finite gives gradients that aren't either, whatever its own derivative is: DeepSpeed then
        leaves the step out on all ranks.
        """
        for term in terms:
            loss = to_loss(term.loss_sum) * float(self._group.world_size)
            spoilt = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
            self.engine.backward(loss * spoilt)
        self._pending = True

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossTerms:
        return self._terms(batch)

    @torch.no_grad()
    def measure(self, batch: Batch, probe: Probe) -> torch.Tensor:
        with as_in_evaluation(self.module), self._train_module.probing(probe):
            return measured(self._terms(batch))

    def clip(self, limit: float) -> None:
        """DeepSpeed clips when it steps; the norm is known then."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
        """DeepSpeed leaves a step out whose gradients aren't finite."""
        self._pending = False
        self.engine.step()
        return Stepped(bool(self.engine.was_step_applied()), float(self.engine.get_global_grad_norm()))

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that isn't made, which is one whose loss wasn't finite.

        DeepSpeed keeps gradients in several places, and clears them where it leaves a step out.
        """
        if self._pending:
            self._pending = False
            self.engine.step()
            assert not self.engine.was_step_applied()

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer as a whole, in the precision it is trained in; every rank calls it."""
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            trained = self._deepspeed.utils.safe_get_full_fp32_param(parameter)
            if trained is not None:
                return trained.detach()
        if hasattr(parameter, "ds_id"):
            with self._deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach()

    @contextmanager
    def opened(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters are whole and may be changed, alike on every rank; the optimizer doesn't see it."""
        with self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=self.plan.stage == 3):
            yield

    def save(self, folder: Path, tag: str) -> None:
        """Write what the engine holds of trained weights and optimizer; every rank writes its own part."""
        writer = _Writer(self.engine.checkpoint_engine)
        self.engine.checkpoint_engine = writer
        try:
            self.engine.save_checkpoint(str(folder), tag=tag, exclude_frozen_parameters=True)
        finally:
            self.engine.checkpoint_engine = writer.engine
        if writer.trouble is not None:
            raise writer.trouble

    def load(self, folder: Path, tag: str) -> None:
        """Read back what `save` wrote, in as many processes. Today's rates, betas and decay hold."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        self.engine.load_checkpoint(str(folder), tag=tag, load_module_strict=False)
        for group, today in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in today.items() if name != "params"})


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The whole parameter's shape; stage 3 leaves nothing of it in the module."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _join(deepspeed: Any, device: torch.device) -> None:
    """Let DeepSpeed use the processes' group. A process that is alone gets one of its own, which stays: DeepSpeed keeps
    groups made of it, and can't do with another one later."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        warnings.filterwarnings(
            "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
        )  # calls of DeepSpeed's
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(backend, dist_init_required=False)
