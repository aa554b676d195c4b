"""The strategy for a model that is spread over processes without a pipeline: any of tp, cp, ep, fsdp, or copies.

Every process runs the same micro-batches' passes at the same time, each with its share of the model, of the sequences
or of the data. Gradients are sums over processes of gradients of a loss that was divided by the step's weight, so no
factor appears anywhere. How the model was cut is not this file's business: it arrives in `module` and its `Spread`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.parallel_checks import tuner_faults
from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError
from swift.data.loading.batch import Batch
from swift.distributed.context.batches import cut_batch, join_targets, number_targets
from swift.distributed.gradients import clip_gradients, cut_axes
from swift.distributed.sharding import GradientSync, UsedParameters
from swift.distributed.spread import Spread, finish_gradients
from swift.objectives import LossTerms
from swift.optim.local import LocalParameters
from swift.training.module import Probe, TrainModule
from swift.training.precision import Precision
from swift.training.strategy import Stepped, ToLoss, as_in_evaluation, measured, step_optimizer


class Sharded:
    """Runs steps of a `TrainModule` whose parts were spread over the mesh of `spread`.

    Args:
        module: with tensor, context and expert parallelism, and `apply_fsdp`, applied as far as asked for.
        local: this process's parts of its parameters, which the optimizer was built over; named as in `module.model`.
        config: for the ZeRO stage and sequence parallelism.
        pad_token_id: fills up rows that ranks share.
    """

    def __init__(
        self,
        module: nn.Module,
        spread: Spread,
        local: LocalParameters,
        precision: Precision,
        config: ParallelConfig,
        *,
        pad_token_id: int = 0,
    ) -> None:
        self.module = module
        self.mesh = spread.mesh
        self.device = next(module.parameters()).device
        self._spread = spread
        self._local = local
        self._precision = precision
        self._named = list(local.named_whole())
        self._pad_token_id = pad_token_id
        self._rows = bool(self.mesh["tp"] or self.mesh["cp"])
        self._multiple = self.mesh["tp"].size if config.sequence_parallel else 1
        self._sync = GradientSync(module, config.zero_stage, spread.replicas)
        if not self._sync.units:
            _mark_unsharded(self._named, spread)
        self._used = UsedParameters(module, self._named)
        self._norm = 0.0

    @property
    def copies(self) -> int:
        return self.mesh["tp"].size * self.mesh["pp"].size

    def prepare(self, batches: list[Batch]) -> list[list[Batch]]:
        """Each micro-batch alone, as this rank's share of one row where ranks share rows or matrices."""
        self._local.drop_gradients()  # of a step that was left out
        return [[self._share(batch)] for batch in batches]

    def _share(self, batch: Batch) -> Batch:
        if not self._rows:
            return batch
        return cut_batch(batch, self.mesh, pad_token_id=self._pad_token_id, multiple=self._multiple)

    def forward(self, portion: list[Batch], to_loss: ToLoss, last: bool) -> list[LossTerms]:
        with self._precision.autocast():
            return [self.module(batch.to(self.device)) for batch in portion]

    def backward(self, terms: list[LossTerms], to_loss: ToLoss, last: bool) -> None:
        """Add gradients; after the last micro-batch the optimizer's parameters have those of the whole step."""
        self._sync.before_backward(last)
        for term in terms:
            to_loss(term.loss_sum).backward()
        if last:
            unused = self._used.unused()
            finish_gradients(((name, p) for name, p in self._named if name not in unused), self._spread)
            for name, parameter in self._named:
                if name in unused:
                    parameter.grad = None
            self._local.hand_over_gradients()

    def evaluate(self, batch: Batch) -> LossTerms:
        with torch.no_grad(), self._precision.autocast():
            terms = self.module(self._share(batch).to(self.device))
        self._sync.free()
        return terms

    @torch.no_grad()
    def measure(self, batch: Batch, probe: Probe) -> torch.Tensor:
        assert isinstance(self.module, TrainModule)
        with as_in_evaluation(self.module), self.module.probing(probe):
            if not self._rows:
                return measured(self.evaluate(batch))
            numbered = number_targets(batch)
            mine = self._share(numbered).to(self.device)
            with self._precision.autocast():
                part = measured(self.module(mine))
        self._sync.free()
        return join_targets(part, mine, len(batch.target_index), self.mesh["cp"])

    def clip(self, limit: float) -> float:
        self._norm = clip_gradients(self._named, self._spread, limit)
        return self._norm

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
        """Change the weights and drop the gradients.

        The loss scaler of fp16 looks for overflows in this rank's gradients only; the norm is the same on all ranks, so
        it decides whether any rank steps.
        """
        if scaler is not None and not math.isfinite(self._norm):
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            stepped = Stepped(False)
        else:
            stepped = step_optimizer(optimizer, scaler)
        self._local.drop_gradients()
        return stepped


def check_sharded_tuner(tuner: TunerConfig, degrees: Degrees, *, fsdp: bool) -> None:
    """Refuse ways of tuning that need whole matrices where no process has them.

    Args:
        fsdp: whether weights are sharded along the axis `fsdp`.

    Raises:
        UsageError: names the flag.
    """
    sizes = {axis: getattr(degrees, axis) for axis in ("tp", "pp", "cp", "ep")}
    for name, message, fix in tuner_faults(vars(tuner), sizes, fsdp=fsdp):
        raise UsageError(message, where=f"--{name} {getattr(tuner, name)}", fix=fix)


def _mark_unsharded(named: list[tuple[str, nn.Parameter]], spread: Spread) -> None:
    """Without `fully_shard`, each rank's gradient is that of its own share of the data."""
    for name, parameter in named:
        if "ep" in cut_axes(parameter):  # the tokens of all ranks along ep came to this one
            for axis in ("efsdp", "dp_replicate"):
                spread.mark_partial(name, axis)
        else:
            spread.mark_partial(name, "loss")
