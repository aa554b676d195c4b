"""The output head as the objective sees it: hidden states in, logits out, a chunk at a time.

Training needs logits only where there are labels, and never all of them at once, so the decoder and the head are called
apart. What a model's own `forward` does between them (a bias, a scale, a soft cap) is read from its configuration and
then proven: `prove_head` compares with the model's own logits before training starts.

A classifier's head takes the hidden states that its objective chose, one for each text or token, as if each were the
one that the model's own `forward` would choose. An embedding model's head gives them back as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from swift.core.errors import ModelError
from swift.distributed.mesh import Axis
from swift.models.kinds import head_parts, own_pooling, task_of


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
    """The head of a model, of a language model with the scale and cap that its configuration names.

    Args:
        axis: the axis `tp` of the mesh, if the head has been cut along it; those of classifiers never are.

    Raises:
        ModelError: there is none, or one whose parts aren't known here.
    """
    if task_of(model).kind != "causal_lm":
        return OutputHead(_task_head(model))
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


def _task_head(model: PreTrainedModel) -> nn.Module:
    """What a classifier does to the state of one text or token; the modules are the model's own.

    Raises:
        ModelError: its parts aren't known here.
    """
    parts = head_parts(model)
    names = set(parts)
    dropout = _dropout(model)
    if not names:
        return nn.Identity()
    if names == {"score"}:
        return _chain(dropout, parts["score"])
    decoder: Any = model.base_model
    pooler: Any = getattr(decoder, "pooler", None)
    if names == {"classifier"}:
        classifier = _inner(parts["classifier"])
        if not isinstance(classifier, nn.Linear):  # RoBERTa, ELECTRA: two layers
            return _two_layers(model, classifier, dropout)
        if task_of(model).kind == "token_cls" or pooler is None:
            return _chain(dropout, parts["classifier"])
        pooler = _inner(pooler)
        if isinstance(pooler, nn.Linear):  # ALBERT
            return _chain(pooler, decoder.pooler_activation, dropout, parts["classifier"])
        return _chain(pooler.dense, pooler.activation, dropout, parts["classifier"])  # BERT
    if names == {"pooler", "classifier"}:  # DeBERTa
        pooler = _inner(parts["pooler"])
        return _chain(pooler.dense, ACT2FN[model.config.pooler_hidden_act], dropout, parts["classifier"])
    if names == {"pre_classifier", "classifier"}:  # DistilBERT
        return _chain(parts["pre_classifier"], nn.ReLU(), dropout, parts["classifier"])
    if names == {"head", "classifier"}:  # ModernBERT
        return _chain(parts["head"], dropout, parts["classifier"])
    raise ModelError(
        f"{type(model).__name__} has a head whose parts aren't known here: {', '.join(sorted(names))}",
        fix="use a model of another family",
    )


def _two_layers(model: PreTrainedModel, head: nn.Module, dropout: nn.Module | None) -> nn.Module:
    if not {"dense", "out_proj"} <= {name for name, _ in head.named_children()}:
        raise ModelError(f"{type(model).__name__} has a head whose parts aren't known here: {type(head).__name__}")
    own = getattr(head, "dropout", None) or dropout
    activation = ACT2FN["gelu"] if model.config.model_type == "electra" else nn.Tanh()
    return _chain(own, head.get_submodule("dense"), activation, own, head.get_submodule("out_proj"))


def _chain(*parts: nn.Module | None) -> nn.Module:
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else nn.Sequential(*present)


def _inner(module: nn.Module) -> nn.Module:
    """The part that takes part in the forward pass, out of peft's wrapper of a module that is trained in full."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]] if module.active_adapters else module.original_module
    return module


_DROPOUTS = (
    "classifier_dropout",
    "classifier_dropout_prob",
    "hidden_dropout",
    "hidden_dropout_prob",
    "seq_classif_dropout",
    "cls_dropout",
)


def _dropout(model: PreTrainedModel) -> nn.Module | None:
    """A head's dropout, where the configuration names it.

    Hugging Face's token classifiers have one of 0.1 also where a family's configuration knows no such setting; it is
    left out here.
    """
    if not any(getattr(model.config, name, None) for name in _DROPOUTS):
        return None
    found = getattr(model, "dropout", None) or getattr(model, "drop", None)
    return found if isinstance(found, nn.Dropout) and found.p else None


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The part of a model that ends in hidden states: of an embedding model, all of it."""
    decoder = model.base_model
    if decoder is model and task_of(model).kind != "embedding":
        raise ModelError(f"{type(model).__name__} has no separate decoder", fix="use a causal language model")
    return decoder


@torch.no_grad()
def prove_head(model: PreTrainedModel, decoder: nn.Module, head: OutputHead) -> None:
    """Check on random tokens that decoder and head together give the model's own logits.

    Raises:
        ModelError: when they don't; the model then does something between the two that isn't known here.
    """
    task = task_of(model)
    if task.kind == "embedding":  # the decoder is the model
        return
    was_training = model.training
    model.eval()
    config = model.config.get_text_config()
    ids = torch.randint(0, config.vocab_size, (1, 6), generator=torch.Generator().manual_seed(0))
    if task.kind == "seq_cls":  # the last token must not be taken for padding
        ids[ids == config.pad_token_id] = (config.pad_token_id or 0) + 1
    ids = ids.to(next(model.parameters()).device)
    own = model(input_ids=ids, use_cache=False).logits[0].float()
    states = decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
    if task.kind == "seq_cls":
        pooled = {"last": states[-1:], "cls": states[:1], "mean": states.mean(0, keepdim=True)}
        ours = head.logits(pooled[own_pooling(model)])[0].float()
    else:
        ours = head.logits(states).float()
    model.train(was_training)
    difference = ((own - ours).norm() / own.norm().clamp_min(1e-12)).item()
    precise = next(head.module.parameters()).dtype in (torch.float32, torch.float64)
    if not difference <= (1e-4 if precise else 5e-2):
        raise ModelError(
            f"{type(model).__name__} changes its logits in a way that is not known here "
            f"(relative difference {difference:.1e})",
            fix="report the model; its loss would be wrong, so nothing was trained",
        )
