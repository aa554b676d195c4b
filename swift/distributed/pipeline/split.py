"""Which layers a stage of a pipeline holds, and how a whole model is cut down to them.

The Hugging Face tree stays: what a stage doesn't hold becomes an identity module, so that names, layer numbers and
layer types are the whole model's, and its own `forward` runs everywhere. Stage 0 holds the embedding beside its layers,
the last one the final norm and the head, of whatever kind; rotary tables, which have no parameters, are everywhere.
That is right as long as the decoder does nothing to hidden states outside of these modules, and `keep_stage` checks it.

Works on meta tensors and on models with adapters inside. Knows nothing of schedules, processes or losses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swift.core.errors import ModelError, UsageError
from swift.models.head import find_decoder
from swift.models.kinds import head_parts
from swift.models.prepare import decoder_layers

# What an embedding costs of the head of the same size: no product, but a gradient and an optimizer step.
_EMBEDDING_SHARE = 0.1


class IdentityModule(nn.Module):
    """Stands where another stage holds a module: gives back its first argument, whatever else it is called with."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments else next(iter(named.values()))


@dataclass(frozen=True)
class Costs:
    """What the parts of a model cost per token, in parameters that a token is multiplied with.

    Attributes:
        layers: of each layer; of a mixture of experts, those a token is sent to.
        first: of what stage 0 holds beside its layers; last: of what the last stage does.
    """

    layers: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0

    def of(self, layers: range) -> float:
        """Of the stage that holds these layers."""
        cost = sum(self.layers[layers.start : layers.stop])
        cost += self.first if layers.start == 0 else 0.0
        return cost + (self.last if layers.stop == len(self.layers) else 0.0)


def model_costs(causal_lm: PreTrainedModel) -> Costs:
    """Costs of a whole model, counted in its own modules (meta tensors will do)."""
    config = causal_lm.config.get_text_config()
    layers = tuple(_layer_cost(layer, config) for layer in _layers(causal_lm))
    head = float(sum(map(_num_parameters, head_parts(causal_lm).values())))
    return Costs(layers, _EMBEDDING_SHARE * _num_parameters(causal_lm.get_input_embeddings()), head)


def stage_layers(costs: Costs, num_stages: int, explicit: Sequence[int] = ()) -> list[range]:
    """The layers of each stage, in order.

    The slowest stage sets the pace, so its cost is made as small as possible; of the splits that reach it, the most
    even one is taken. Each stage holds a layer at least.

    Args:
        explicit: numbers of layers of the stages, instead of a split by cost.

    Raises:
        UsageError: there are more stages than layers, or `explicit` doesn't fit.
    """
    total = len(costs.layers)
    if explicit:
        return _explicit_layers(total, num_stages, explicit)
    if num_stages > total:
        raise UsageError(
            f"{num_stages} stages need {num_stages} layers, and the model has {total}",
            where="--pipeline_parallel_size x --pipeline_stages_per_rank",
            fix=f"{total} stages at most",
        )
    slowest = max(costs.of(layers) for layers in _best_split(costs, num_stages, worst=True))
    return _best_split(costs, num_stages, worst=False, limit=slowest)


def _explicit_layers(total: int, num_stages: int, explicit: Sequence[int]) -> list[range]:
    words = " ".join(map(str, explicit))
    problem = None
    if len(explicit) != num_stages:
        problem = f"names {len(explicit)} stages, and there are {num_stages}"
    elif sum(explicit) != total:
        problem = f"has {sum(explicit)} layers in all, and the model has {total}"
    elif min(explicit) < 1:
        problem = "leaves a stage without a layer"
    if problem is not None:
        raise UsageError(
            f"--pipeline_layers {words} {problem}",
            where="--pipeline_layers",
            fix=f"{num_stages} numbers from 1 that add up to {total}, or leave it out: layers are split by cost",
        )
    ends = [sum(explicit[: stage + 1]) for stage in range(num_stages)]
    return [range(end - count, end) for end, count in zip(ends, explicit, strict=True)]


def _best_split(costs: Costs, num_stages: int, *, worst: bool, limit: float = float("inf")) -> list[range]:
    """The split with the smallest largest cost (`worst`), or the smallest sum of squares with none above `limit`."""
    total = len(costs.layers)
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}  # layers dealt out so far -> value, split
    for stage in range(num_stages):
        after: dict[int, tuple[float, list[range]]] = {}
        for start, (value, split) in best.items():
            for end in range(start + 1, total - (num_stages - 1 - stage) + 1):
                layers = range(start, end)
                cost = costs.of(layers)
                if cost > limit * (1 + 1e-9):
                    break
                new = max(value, cost) if worst else value + cost * cost
                if end not in after or new < after[end][0]:
                    after[end] = (new, [*split, layers])
        best = after
    return best[total][1]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _layer_cost(layer: nn.Module, config: Any) -> float:
    """Parameters of a layer that a token meets: of parts named `experts`, those of as many as it is sent to."""
    experts = sum(_num_parameters(part) for name, part in layer.named_modules() if name.rpartition(".")[2] == "experts")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)
    used = int(getattr(config, "num_experts_per_tok", None) or 1)
    return _num_parameters(layer) - experts * (1 - min(1.0, used / count))


def keep_stage(whole: nn.Module, causal_lm: PreTrainedModel, plan: list[range], stage: int) -> None:
    """Replace everything that `stage` doesn't hold by identity modules, in place.

    Args:
        whole: the model with its adapters; causal_lm: the Hugging Face model inside.
        plan: the layers of all stages, from `stage_layers`.

    Raises:
        ModelError: this model can't be cut this way.
    """
    decoder = find_decoder(causal_lm)
    layers, embedding = _layers(causal_lm), causal_lm.get_input_embeddings()
    heads, norm = list(head_parts(causal_lm).values()), _final_norm(causal_lm, decoder)
    inside = {id(parameter) for parameter in causal_lm.parameters()}
    outside = [name for name, p in whole.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise _uncuttable(causal_lm, f"{outside[0]} is trained, and belongs to no layer")
    first, last = stage == 0, stage == len(plan) - 1
    if not first:
        _undo_embedding_scale(decoder)
    for number, layer in enumerate(layers):
        if number not in plan[stage]:
            layers[number] = _stand_in(layer)
    gone = ([] if first else [embedding]) + ([] if last else heads + ([norm] if norm is not None else []))
    gone += [] if first else [child for child in decoder.children() if isinstance(child, nn.Dropout)]
    for parent in list(causal_lm.modules()):
        for name, child in list(parent.named_children()):
            if any(child is module for module in gone):
                setattr(parent, name, _stand_in(child))
    if len(plan) > 1:
        _prove_nothing_between(causal_lm, decoder)


def _layers(causal_lm: PreTrainedModel) -> nn.ModuleList:
    try:
        return decoder_layers(find_decoder(causal_lm))
    except ModelError as error:
        raise _uncuttable(causal_lm, error.message) from error


def _final_norm(causal_lm: PreTrainedModel, decoder: nn.Module) -> nn.Module | None:
    """What comes after the layers; whatever else has parameters is known to no stage."""
    config = causal_lm.config.get_text_config()
    if getattr(config, "num_kv_shared_layers", None):
        raise _uncuttable(causal_lm, "its layers use keys and values of other layers")
    known = [causal_lm.get_input_embeddings(), _layers(causal_lm)]
    others = {
        name: child
        for name, child in decoder.named_children()
        if not any(child is module for module in known) and any(True for _ in child.parameters())
    }
    norms = {name: child for name, child in others.items() if "norm" in name or name.startswith("ln_")}
    if len(norms) > 1 or len(others) > len(norms):
        names = ", ".join(sorted(set(others) - set(norms) or set(norms)))
        raise _uncuttable(causal_lm, f"it has {names} beside its layers, which every stage would need")
    return next(iter(norms.values()), None)


def _stand_in(module: nn.Module) -> IdentityModule:
    """An identity with the plain attributes that a decoder may read off a layer, such as its attention's type."""
    identity = IdentityModule()
    plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int | float)}
    identity.__dict__.update({name: value for name, value in plain.items() if not name.startswith("_")})
    return identity


def _undo_embedding_scale(decoder: nn.Module) -> None:
    """Granite scales what goes into its first layer in the decoder's own `forward`: that is stage 0's to do."""
    if isinstance(getattr(decoder, "embedding_multiplier", None), int | float):
        decoder.embedding_multiplier = 1.0  # type: ignore[assignment]


@torch.no_grad()
def _prove_nothing_between(causal_lm: PreTrainedModel, decoder: nn.Module) -> None:
    """Check that the decoder hands hidden states from module to module unchanged, as a later stage than 0 must.

    With all its modules replaced by identities it must give back what it was given, bit for bit. Every stage checks it,
    so that all processes stop with the same words.
    """
    hollow = copy.copy(decoder)
    _undo_embedding_scale(hollow)
    modules = {name: _stand_in(child) if child is not None else None for name, child in decoder._modules.items()}
    hollow.__dict__["_modules"] = modules
    for name, child in decoder._modules.items():
        if isinstance(child, nn.ModuleList):
            modules[name] = nn.ModuleList(map(_stand_in, child))  # type: ignore[assignment]
    width = causal_lm.config.get_text_config().hidden_size
    states = torch.linspace(-1, 1, 3 * width).view(1, 3, width)
    try:
        output = hollow(
            inputs_embeds=states,
            position_ids=torch.arange(3)[None],
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, 3], dtype=torch.int32),
        ).last_hidden_state
    except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise _uncuttable(causal_lm, f"its decoder can't do without its own layers ({text})") from error
    if output.shape != states.shape or not torch.equal(output, states):
        raise _uncuttable(causal_lm, "its decoder changes hidden states between its layers")


def _uncuttable(causal_lm: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{type(causal_lm).__name__} can't be cut into the stages of a pipeline: {reason}",
        where="--pipeline_parallel_size",
        fix="--pipeline_parallel_size 1, with --fsdp fsdp2 or --tensor_parallel_size for its size",
    )
