"""The model and its objective as one module: a micro-batch in, loss terms out.

Wrapping both in one `forward` is what lets data-parallel wrappers see every use of every parameter. The decoder runs on
all tokens; the head only where a token is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from swift.config.training import LossConfig
from swift.data.loading.batch import Batch
from swift.distributed.mesh import Mesh
from swift.models.attention import segment_arguments
from swift.models.head import OutputHead
from swift.models.prepare import first_position
from swift.models.router import RouterLoss, Routing
from swift.objectives import LossTerms, build_objective
from swift.training.neftune import EmbeddingNoise

Objective = Callable[[torch.Tensor, OutputHead, Batch], LossTerms]
# The states of targets -> what is wanted of each: [targets, ...]. Runs without gradients.
Probe = Callable[[torch.Tensor, OutputHead, Batch], torch.Tensor]


class Objectives(NamedTuple):
    """What is minimised when training, and what is measured when not."""

    training: Objective
    evaluation: Objective


MakeObjectives = Callable[[Mesh], Objectives]


def next_token(config: LossConfig) -> MakeObjectives:
    """Next-token prediction, with smoothing and DFT where the settings have them."""
    objective = build_objective(config)
    return lambda mesh: Objectives(objective, objective.evaluation())


class TrainModule(nn.Module):
    """Decoder, head and objective of one model.

    Args:
        model: the whole model, adapters included; its parameters are the module's.
        decoder: the part of it that ends in hidden states; `head`: how they become logits.
        objectives: for training and for evaluation.
        router_loss: what is minimised besides, if the experts' load is to be balanced.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decoder: nn.Module,
        head: OutputHead,
        objectives: Objectives,
        neftune_alpha: float | None = None,
        router_loss: RouterLoss | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._decoder = [decoder]  # in lists, so that they aren't registered a second time
        self._head = head
        self._first_position = first_position(decoder)
        self._objectives = objectives
        self._probe: Probe | None = None
        self.router_loss = router_loss
        causal_lm = decoder_owner(model)
        config = causal_lm.config.get_text_config()
        self._needs_lengths = (
            getattr(config, "sliding_window", None) is not None or next(model.parameters()).device.type != "cpu"
        )
        self._noise: EmbeddingNoise | None = None
        if neftune_alpha:
            self._noise = EmbeddingNoise(causal_lm.get_input_embeddings(), neftune_alpha)

    @contextmanager
    def probing(self, probe: Probe) -> Iterator[None]:
        """Inside, `forward` gives `LossTerms` without a loss whose `measured` is what the probe makes of the states."""
        self._probe = probe
        try:
            yield
        finally:
            self._probe = None

    def forward(self, batch: Batch) -> LossTerms:
        """Loss terms of one micro-batch; those of the evaluation objective outside of training mode."""
        arguments: dict[str, Any] = {}
        if batch.borders is not None:
            arguments = segment_arguments(
                batch.borders, batch.input_ids.device, lengths=self._needs_lengths, prefixes=batch.prefixes
            )
        else:
            arguments["attention_mask"] = batch.attention_mask
        if self._noise is not None:
            self._noise.see(batch)
        router_loss = self.router_loss if self.training else None
        recording: AbstractContextManager[list[Routing]] = nullcontext([])
        if router_loss is not None:
            recording = router_loss.recording()
        positions = batch.position_ids + self._first_position if self._first_position else batch.position_ids
        with recording as routings:
            hidden = self._decoder[0](
                input_ids=batch.input_ids, position_ids=positions, use_cache=False, **arguments
            ).last_hidden_state
        predicting = hidden.flatten(0, 1)[batch.target_index]
        if self._probe is not None:
            return LossTerms(predicting.new_zeros(()), 0.0, measured=self._probe(predicting, self._head, batch))
        objective = self._objectives.training if self.training else self._objectives.evaluation
        terms = objective(predicting, self._head, batch)
        if router_loss is not None:
            add_router_loss(terms, router_loss, routings, batch)
        return terms


def add_router_loss(terms: LossTerms, router_loss: RouterLoss, routings: list[Routing], batch: Batch) -> None:
    """Let the auxiliary loss take part in the gradient of `terms`; the loss that is shown stays the objective's.

    The step minimises (sum over micro-batches m of w_m (loss_m + coefficient * auxiliary loss_m)) / (sum of w_m), w_m
    being the target weight of micro-batch m on all ranks.
    """
    term = router_loss.term(routings, real_tokens(batch), batch.weight)
    terms.loss_sum = terms.loss_sum + (term.loss_sum - term.loss_sum.detach()).to(terms.loss_sum.dtype)
    terms.sums["router_aux_loss"] = term.value * batch.weight
    terms.counts["router_aux_loss"] = batch.weight


def real_tokens(batch: Batch) -> torch.Tensor | None:
    """Bool, which tokens are no padding, shaped as the batch's ids; None if all are real.

    A row of segments may carry an `attention_mask` too, where it ends in padding: attention goes by the borders.
    """
    if not batch.num_tokens:  # there for the step's collectives only
        return torch.zeros_like(batch.input_ids, dtype=torch.bool)
    return batch.attention_mask


def decoder_owner(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside an adapter wrapper, or the model itself."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face model, got {type(inner).__name__}")
    return inner
