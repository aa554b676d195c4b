"""The auxiliary loss that keeps a mixture's experts evenly loaded, exact over all ranks.

Per layer, "Switch Transformers" (arXiv 2101.03961, equations 4 to 6), with more than one expert a token:

    loss = N * sum over experts e of f_e * P_e
    f_e  share of the (token, slot) pairs that were routed to e; no gradient
    P_e  mean over tokens of the router's probability of e

averaged over the layers; 1 where the load is even. Tokens are the real ones of the micro-batches that all data ranks
run at the same time: f and P are taken over all of them, which is not the mean of the ranks' own losses. So it does
depend on how many examples run at a time, by its definition. The library's `load_balancing_loss_func` differs: it takes
f and P over all layers together, and its f adds up to the number of slots.

f and the number of tokens hold no gradient and P is a sum over tokens, so a rank needs only the others' counts: the
loss is a sum of the ranks' shares, and so is its gradient. Router outputs are caught by hooks on the modules that the
model's class names for `output_router_logits`; the model's code stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from swift.core.errors import ModelError, UsageError
from swift.distributed.collectives import all_reduce
from swift.distributed.mesh import Mesh

_FIX = "leave --router_aux_loss_coef out"
_WHERE = "--router_aux_loss_coef"


class Routing(NamedTuple):
    """What one router said: logits [tokens, experts]; weights and chosen experts, both [tokens, slots]."""

    logits: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor


@dataclass
class RouterTerm:
    """The auxiliary loss of one micro-batch.

    Attributes:
        loss_sum: this rank's share of coefficient x loss x target weight of the micro-batch on all ranks, with a
            gradient; shares add up over data ranks, tensor-parallel ranks and stages of a pipeline.
        value: the loss itself without the coefficient, of the layers here, the same on all data ranks; no gradient.
    """

    loss_sum: torch.Tensor
    value: torch.Tensor


def _sigmoid_shares(logits: torch.Tensor) -> torch.Tensor:
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


Scoring = Callable[[torch.Tensor], torch.Tensor]

# How logits become probabilities. DeepSeek-V3's family scores by sigmoid; normalised, as in its own balance loss
# (arXiv 2412.19437, equation 18).
_SCORINGS: tuple[Scoring, ...] = (_softmax, _sigmoid_shares)


class RouterLoss:
    """The auxiliary loss of one model.

    Args:
        causal_lm: the model, or a stage of it; every rank makes one.
        coefficient: weight of the loss beside the objective.
        mesh: ranks along `loss` run other tokens, those along `pp` other layers.

    Raises:
        UsageError: the model has no routers.
        ModelError: its routers aren't ones this loss is defined for.
    """

    def __init__(self, causal_lm: PreTrainedModel, coefficient: float, mesh: Mesh | None = None) -> None:
        self.coefficient = coefficient
        self._mesh = mesh or Mesh()
        self._name = type(causal_lm).__name__
        self._records: list[Routing] | None = None
        self._scorings: list[Scoring] = []  # of each router, found out in the first micro-batch
        self._routers = find_routers(causal_lm)
        for module, index in self._routers:
            module.register_forward_hook(self._catch(index))
        self._num_layers = _over_stages(len(self._routers), self._mesh)
        if not self._num_layers:
            raise UsageError(f"{self._name} has no routers whose load could be balanced", where=_WHERE, fix=_FIX)

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Catch what the routers say meanwhile; what they repeat when activations are recomputed is not caught."""
        records: list[Routing] = []
        self._records = records
        try:
            yield records
        finally:
            self._records = None

    def term(self, records: list[Routing], real: torch.Tensor | None, weight: float) -> RouterTerm:
        """The loss of one micro-batch; all data ranks call it together.

        Args:
            records: of its forward pass.
            real: bool, one for each token that was routed, in any shape; None if all are real, none is padding.
            weight: this rank's target weight, by which micro-batches of a step are averaged.
        """
        if len(records) != len(self._routers):
            raise ModelError(
                f"{len(self._routers)} routers of {self._name} gave {len(records)} answers", where=_WHERE, fix=_FIX
            )
        if not records:  # a stage of dense layers only; its data ranks have none either
            return RouterTerm(torch.zeros(()), torch.zeros(()))
        self._scorings = self._scorings or [_prove_scoring(record, self._name) for record in records]
        tokens, device = len(records[0].chosen), records[0].chosen.device
        mask = torch.ones(tokens, dtype=torch.bool, device=device) if real is None else real.reshape(-1).to(device)
        if len(mask) != tokens:
            raise ModelError(
                f"routers of {self._name} saw {tokens} tokens, not the {len(mask)} of the batch", where=_WHERE, fix=_FIX
            )
        sums, counts = [], []
        for record, scoring in zip(records, self._scorings, strict=True):
            probabilities = scoring(record.logits if record.logits.dtype == torch.float64 else record.logits.float())
            sums.append(probabilities.masked_fill(~mask[:, None], 0.0).sum(0))
            counts.append(torch.bincount(record.chosen[mask].reshape(-1), minlength=probabilities.shape[1]))
        head = torch.stack([mask.sum(dtype=torch.float64), torch.tensor(weight, dtype=torch.float64, device=device)])
        return self._balance(sums, counts, head)

    def _balance(self, sums: list[torch.Tensor], counts: list[torch.Tensor], head: torch.Tensor) -> RouterTerm:
        """The loss, in one collective for all layers.

        Args:
            sums: of probabilities over the real tokens here, [experts] for each layer; counts: of pairs, likewise.
            head: fp64 [2], real tokens and target weight.
        """
        sizes = [len(count) for count in counts]
        flat = torch.cat([head, *(count.double() for count in counts), *(one.detach().double() for one in sums)])
        totals = all_reduce(flat, self._mesh["loss"]).split([2, sum(sizes), sum(sizes)])
        tokens, weight = totals[0]
        shares, values = [], []
        for own, count, whole in zip(sums, totals[1].split(sizes), totals[2].split(sizes), strict=True):
            factor = len(own) * count / (count.sum() * tokens).clamp_min(1)  # N f_e / tokens; without tokens nothing
            shares.append((factor.to(own.dtype) * own).sum())
            values.append((factor * whole).sum())
        # ranks along tp see the same tokens, and gradients within a block are added up over them
        scale = (self.coefficient * weight / self._num_layers / self._mesh["tp"].size).to(shares[0].dtype)
        return RouterTerm(torch.stack(shares).sum() * scale, torch.stack(values).sum() / self._num_layers)

    def _catch(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def catch(module: nn.Module, _: Any, output: Any) -> None:
            if self._records is not None:
                self._records.append(_read(output, index, module))

        return catch


def build_router_loss(causal_lm: PreTrainedModel, coefficient: float, mesh: Mesh | None = None) -> RouterLoss | None:
    """The loss that `--router_aux_loss_coef` asks for; None for 0."""
    return RouterLoss(causal_lm, coefficient, mesh) if coefficient else None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, torch.ones((), dtype=ctx.dtype, device=ctx.device)


def carry(hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """`hidden`, whose backward pass also runs that of the scalar `loss`, as if it had been added to what is minimised.

    A stage of a pipeline hands activations on and no loss; this is how the loss of its routers is learnt from.
    """
    return _Carry.apply(hidden, loss)


def _over_stages(count: int, mesh: Mesh) -> int:
    """The sum along `pp`; every rank calls it."""
    device = mesh.device_mesh.device_type if mesh.device_mesh is not None else "cpu"
    return int(all_reduce(torch.tensor(count, device=device), mesh["pp"]))


def find_routers(causal_lm: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The routers of a model, and which of their outputs holds the logits; in the model's order.

    Raises:
        ModelError: an adapter changes a router's output where it can't be seen.
    """
    recorders: Any = (getattr(type(causal_lm), "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders = recorders if isinstance(recorders, (list, tuple)) else [recorders]
    recorders = [r if isinstance(r, OutputRecorder) else OutputRecorder(r, index=0) for r in recorders]
    routers = []
    for name, module in causal_lm.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, ParamWrapper):
            base = module.get_base_layer()
            if any(isinstance(base, recorder.target_class) for recorder in recorders):
                raise ModelError(
                    "the load of a router with an adapter can't be balanced",
                    where=f"{_WHERE}, {name}",
                    fix=f"{_FIX}, or leave {name.rsplit('.', 1)[-1]} out of --target_modules",
                )
        for recorder in recorders:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                routers.append((module, recorder.index))
                break
    return routers


def _read(output: Any, index: int, module: nn.Module) -> Routing:
    """A router's logits, weights and chosen experts among its outputs.

    Raises:
        ModelError: they aren't all there.
    """
    outputs = [value for value in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(value)]
    chosen = [value for value in outputs if not value.is_floating_point()]
    if len(chosen) == 1 and chosen[0].ndim == 2 and isinstance(output, tuple):
        logits = output[index]
        weights = [v for v in outputs if v.is_floating_point() and v is not logits and v.shape == chosen[0].shape]
        if len(weights) == 1 and logits.ndim == 2 and len(logits) == len(chosen[0]):
            return Routing(logits, weights[0], chosen[0])
    raise ModelError(
        f"{type(module).__name__} doesn't tell which experts it chose in a way that is known here",
        where=_WHERE,
        fix=_FIX,
    )


@torch.no_grad()
def _prove_scoring(record: Routing, name: str) -> Scoring:
    """How this router turns logits into probabilities: its weights must be proportional to those of its choice.

    Raises:
        ModelError: neither softmax nor sigmoid explains the weights.
    """
    weights = record.weights.double()
    counted = weights > 1e-4 * weights.amax(1, keepdim=True)  # what is nearly nothing is mostly rounding
    errors = []
    for scoring in _SCORINGS:
        ratios = weights / scoring(record.logits.double()).gather(1, record.chosen)
        least = ratios.masked_fill(~counted, float("inf")).amin(1)
        most = ratios.masked_fill(~counted, float("-inf")).amax(1)
        errors.append(float((most / least - 1).amax()))
    best = min(range(len(errors)), key=errors.__getitem__)
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in (record.logits, record.weights))
    if not errors[best] <= max(1e-4, 8 * rounding):
        raise ModelError(
            f"the routers of {name} turn logits into weights in a way that is not known here",
            where=_WHERE,
            fix=_FIX,
        )
    return _SCORINGS[best]
