"""One stage of a pipeline as a module: what `TrainModule` is to a whole model.

It holds the whole Hugging Face tree of its piece of layers, the rest of it identities (`swift.distributed.pipeline.
split`), and looks up the micro-batch that it is told the number of: ids, positions, borders and targets are on every
process, only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swift.data.loading.batch import Batch
from swift.models.attention import segment_arguments
from swift.models.head import OutputHead, find_decoder
from swift.models.router import RouterLoss, Routing, carry
from swift.objectives import LossTerms
from swift.training.module import Objectives, Probe, add_router_loss
from swift.training.neftune import EmbeddingNoise
from swift.training.strategy import ToLoss


@dataclass
class Chunk:
    """A piece of a model's layers on this process.

    Attributes:
        stage: its number among `num_stages`.
        whole: the model with its adapters, cut by `keep_stage`; causal_lm: the Hugging Face model inside.
        head: how hidden states become logits; used by the last stage only.
    """

    stage: int
    num_stages: int
    whole: nn.Module
    causal_lm: PreTrainedModel
    head: OutputHead

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.num_stages - 1


class StageModule(nn.Module):
    """Decoder layers of one stage; on the first the embedding before them, on the last the objective after them.

    This is what `fully_shard` takes as the root of a stage. The loss of a micro-batch is divided inside (`to_loss`),
    because routers on any stage may add to it.

    Args:
        objectives: the last stage's.
        autocast: makes the context that it runs in. The backward pass, which PyTorch's schedule begins, must not be in
            it.
        router_loss: made of this stage's model, if the experts' load is to be balanced.

    Attributes:
        probe: what the last stage makes of the states in place of a loss, or None.
    """

    def __init__(
        self,
        chunk: Chunk,
        *,
        objectives: Objectives,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        neftune_alpha: float | None = None,
        router_loss: RouterLoss | None = None,
    ) -> None:
        super().__init__()
        self.model = chunk.whole
        self.chunk = chunk
        self.router_loss = router_loss
        self.terms: dict[int, LossTerms] = {}
        self._batches: list[Batch] = []
        self._to_loss: ToLoss = _unchanged
        self._decoder = [find_decoder(chunk.causal_lm)]  # in a list, so that it isn't registered a second time
        self._objectives = objectives
        self.probe: Probe | None = None
        self._autocast = autocast
        config = chunk.causal_lm.config.get_text_config()
        self._windowed = getattr(config, "sliding_window", None) is not None
        self._noise: EmbeddingNoise | None = None
        if neftune_alpha and chunk.first:
            self._noise = EmbeddingNoise(chunk.causal_lm.get_input_embeddings(), neftune_alpha)

    def load(self, batches: list[Batch], to_loss: ToLoss | None = None) -> None:
        """The micro-batches that numbers mean from now on: each one row with borders, on this stage's device.

        Args:
            to_loss: a loss sum -> what is differentiated.
        """
        self._batches, self.terms = batches, {}
        self._to_loss = to_loss or _unchanged

    def forward(self, received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, tokens, hidden], or on the last stage the loss; what is shown of it is left in `terms`."""
        batch = self._batches[int(number)]
        assert batch.borders is not None
        device = batch.input_ids.device
        lengths = self._windowed or device.type != "cpu"
        arguments: dict[str, Any] = segment_arguments(batch.borders, device, lengths=lengths, prefixes=batch.prefixes)
        if self.chunk.first:
            arguments["input_ids"] = batch.input_ids
            if self._noise is not None:
                self._noise.see(batch)
        else:
            arguments["inputs_embeds"] = _laid_out(received)
        router_loss = self.router_loss if self.training else None
        recording: AbstractContextManager[list[Routing]] = nullcontext([])
        if router_loss is not None:
            recording = router_loss.recording()
        with self._autocast():
            with recording as routings:
                hidden = self._decoder[0](
                    position_ids=batch.position_ids, use_cache=False, **arguments
                ).last_hidden_state
            if self.chunk.last:
                predicting = hidden.flatten(0, 1)[batch.target_index]
                if self.probe is not None:
                    measured = self.probe(predicting, self.chunk.head, batch)
                    terms = LossTerms(torch.zeros((), device=device), 0.0, measured=measured)
                else:
                    objective = self._objectives.training if self.training else self._objectives.evaluation
                    terms = objective(predicting, self.chunk.head, batch)
            else:
                terms = LossTerms(torch.zeros((), device=device), 0.0)
            if router_loss is not None:
                add_router_loss(terms, router_loss, routings, batch)
        loss_sum, terms.loss_sum = terms.loss_sum, terms.loss_sum.detach()
        self.terms[int(number)] = terms
        if self.chunk.last:
            return self._to_loss(loss_sum)
        if torch.is_grad_enabled():
            if loss_sum.requires_grad:
                hidden = carry(hidden, self._to_loss(loss_sum))
            if not hidden.requires_grad:  # nothing is trained up to here: the gradient that comes back ends here
                hidden = hidden.detach().requires_grad_()
        return _laid_out(hidden)


def _unchanged(loss_sum: torch.Tensor) -> torch.Tensor:
    return loss_sum


def _laid_out(hidden: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous, and its gradient too: what travels between processes has to be."""
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: grad.contiguous())
    return hidden.contiguous()
