"""The output head as the objective sees it: hidden states in, logits out, a chunk at a time.

Training needs logits only where there are labels, and never all of them at once, so the decoder and the head are called
apart. What a model's own `forward` does between them (a bias, a scale, a soft cap) is read from its configuration and
then proven: `prove_head` compares with the model's own logits before training starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from swift.core.errors import ModelError
from swift.distributed.mesh import Axis


@dataclass
class OutputHead:
    """How hidden states become logits.

    Attributes:
        module: the head itself; called as it is unless it is a plain `nn.Linear`.
        scale: factor on the logits.
        softcap: cap * tanh(logits / cap), or None.
        axis: the ranks over which the vocabulary is cut, or None. Losses then come from
            `swift.objectives.vocab_parallel`; there is no matrix of logits.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    axis: Axis | None = None

    @property
    def plain(self) -> bool:
        """Whether the head is one matrix (and perhaps a bias), so that the fused cross-entropy applies."""
        return type(self.module) is nn.Linear and not self.module._forward_hooks

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> fp32 (or fp64) [tokens, vocab].

        Raises:
            ModelError: the vocabulary is cut over ranks.
        """
        if self.axis:
            raise ModelError(
                "logits are asked for, and each rank has those of a part of the vocabulary only",
                where="--tensor_parallel_size",
                fix="--tensor_parallel_size 1",
            )
        logits = self.module(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return self.transform(logits)

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply scale and soft cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def find_head(model: PreTrainedModel, *, axis: Axis | None = None) -> OutputHead:
    """The head of a causal language model, with the scale and cap that its configuration names.

    Args:
        axis: the axis `tp` of the mesh, if the head has been cut along it.
    """
    module = model.get_output_embeddings()
    if axis and isinstance(module, ModulesToSaveWrapper):  # trained beside an adapter
        module = module.modules_to_save[module.active_adapters[0]] if module.active_adapters else module.original_module
    if module is None:
        raise ModelError(
            f"{type(model).__name__} has no output head to predict tokens with", fix="use a causal language model"
        )
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(module, scale, float(softcap) if softcap else None, axis or None)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model that ends in hidden states."""
    decoder = model.base_model
    if decoder is model:
        raise ModelError(f"{type(model).__name__} has no separate decoder", fix="use a causal language model")
    return decoder


@torch.no_grad()
def prove_head(model: PreTrainedModel, decoder: nn.Module, head: OutputHead) -> None:
    """Check on random tokens that decoder and head together give the model's own logits.

    Raises:
        ModelError: when they don't; the model then does something between the two that isn't known here.
    """
    was_training = model.training
    model.eval()
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (1, 6), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(model.parameters()).device)
    own = model(input_ids=ids, use_cache=False).logits[0].float()
    ours = head.logits(decoder(input_ids=ids, use_cache=False).last_hidden_state[0]).float()
    model.train(was_training)
    difference = ((own - ours).norm() / own.norm().clamp_min(1e-12)).item()
    if not difference <= (1e-4 if head.module.weight.dtype in (torch.float32, torch.float64) else 5e-2):
        raise ModelError(
            f"{type(model).__name__} changes its logits in a way that is not known here "
            f"(relative difference {difference:.1e})",
            fix="report the model; its loss would be wrong, so nothing was trained",
        )
