"""Put a model's experts on the ranks of the axis `ep`.

Which modules are experts and which of their parameters have an expert in each row says the model's own plan
(`config.base_model_ep_plan`). These parameters become DTensors, cut along the experts; the modules compute through the
library's experts interface, where `expert_parallel` stands in front of the implementation that was chosen before
(eager, batched_mm, grouped_mm). The model's code stays as it is.

The library has an all-to-all of its own (`transformers.distributed`). It isn't used: its traffic can't be counted here,
it knows only its own meshes, and it has moved with each of the last releases. The experts interface is public.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from swift.core.errors import ModelError, UsageError
from swift.distributed.experts.dispatch import through_experts
from swift.distributed.mesh import Axis
from swift.distributed.spread import Spread, expose_local

EXPERT_PARALLEL = "expert_parallel"
_MARK = "_expert_dispatch"


@dataclass(frozen=True)
class _Dispatch:
    """What a module of experts needs to compute over ranks.

    Attributes:
        implementation: the one that the model was loaded with.
        tp: ranks that hold the same tokens.
    """

    axis: Axis
    tp: Axis
    implementation: str


def _forward(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    dispatch: _Dispatch = getattr(module, _MARK)
    own = type(module).forward.__wrapped__  # what the model's file says: "eager"
    implementation = ExpertsInterface().get_interface(dispatch.implementation, own)

    def compute(*rows: torch.Tensor) -> torch.Tensor:
        return implementation(module, *rows)

    if not dispatch.tp:
        return through_experts(hidden, chosen, weights, dispatch.axis, module.num_experts, compute)
    # each tensor-parallel rank takes other tokens, and the end of the block adds the ranks' outputs up
    share = [part.tensor_split(dispatch.tp.size)[dispatch.tp.rank] for part in (hidden, chosen, weights)]
    output = through_experts(share[0], share[1], share[2], dispatch.axis, module.num_experts, compute)
    others = [hidden.new_zeros(len(part), hidden.shape[1]) for part in hidden.tensor_split(dispatch.tp.size)]
    return torch.cat([*others[: dispatch.tp.rank], output, *others[dispatch.tp.rank + 1 :]])


ExpertsInterface.register(EXPERT_PARALLEL, _forward)


def apply_expert_parallel(whole: nn.Module, causal_lm: PreTrainedModel, spread: Spread) -> None:
    """Cut the experts' parameters along the axis `ep` and let tokens travel to them.

    Works on real and on meta tensors. Names of parameters stay. Afterwards a parameter of `expert_parameters` is a
    DTensor on `mesh.expert_mesh("ep")`, of whose gradient each rank has the sum over the tokens of all ranks along `ep`
    after a backward pass; what is left to add up are `efsdp` and `dp_replicate`, never `loss` as for other parameters.

    Ranks along `tp` hold the same tokens at a block's entry, with `sequence_parallel` and without, and add their
    outputs up at its end: each takes a share of the tokens to the experts, which aren't cut any further. Their
    gradients are marked as partial along `tp`.

    Args:
        whole: the model with its adapters; causal_lm: the Hugging Face model inside.

    Raises:
        UsageError: the model has no experts, or a number of them that `ep` doesn't divide; or `tp` is above 1.
        ModelError: its experts can't be spread; adapters sit on them.
    """
    axis = spread.mesh["ep"]
    if not axis:
        return
    modules = _find_experts(causal_lm)
    if not modules and not spread.mesh["pp"]:  # a stage of a pipeline may hold none
        raise UsageError(
            f"{type(causal_lm).__name__} has no experts that are known to be separable",
            where="--expert_parallel_size",
            fix="leave --expert_parallel_size out",
        )
    implementation = causal_lm.config.get_text_config()._experts_implementation or "eager"
    for module, names in modules.items():
        _cut(module, names, spread)
        module.__dict__[_MARK] = _Dispatch(axis, spread.mesh["tp"], implementation)
        expose_local(module)
    if modules:
        causal_lm.set_experts_implementation(EXPERT_PARALLEL)
    if spread.mesh["tp"]:
        for name in expert_parameters(whole):
            spread.mark_partial(name, "tp")


def expert_parameters(module: nn.Module) -> set[str]:
    """Names, within `module`, of the parameters whose experts are spread over ranks (see `apply_expert_parallel`).

    To shard them further, `fully_shard` takes each module of experts alone, with `mesh.expert_fsdp_mesh()`. Without
    that, their gradients are to be added up along `efsdp` and `dp_replicate` (`Spread.mark_partial`).
    """
    return {f"{prefix}.{name}" if prefix else name for prefix, part in expert_modules(module) for name in _own(part)}


def expert_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the experts in `module` that are spread over ranks, in order."""
    return [(name, part) for name, part in module.named_modules() if _MARK in part.__dict__]


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _find_experts(causal_lm: PreTrainedModel) -> dict[nn.Module, list[str]]:
    """Modules of experts and their parameters that the plan cuts.

    Raises:
        UsageError: an adapter sits in a module's place.
        ModelError: a module has parameters that the plan leaves whole, or doesn't go through the experts interface.
    """
    decoder = causal_lm.base_model
    plan = getattr(causal_lm.config.get_text_config(), "base_model_ep_plan", None) or {}
    patterns = {kind: [_pattern(p) for p, style in plan.items() if style == kind] for kind in set(plan.values())}
    modules: dict[nn.Module, list[str]] = {}
    for name, module in decoder.named_modules():
        if not _matches(name, patterns.get("ep_dispatch_experts", [])):
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise UsageError(
                "adapters on experts can't be combined with expert parallelism",
                where=f"--target_parameters or --modules_to_save, and --expert_parallel_size: {name}",
                fix="leave --expert_parallel_size out (--fsdp fsdp2 shards experts and their adapters), or put the "
                "adapters on attention: --target_modules",
            )
        names = [own for own in _own(module) if _matches(f"{name}.{own}", patterns.get("grouped_gemm", []))]
        if not hasattr(type(module).forward, "__wrapped__") or set(names) != {n for n, _ in module.named_parameters()}:
            raise ModelError(
                f"the experts of {type(causal_lm).__name__} ({type(module).__name__}) can't be put on several ranks: "
                "a part of them isn't divided by experts",
                where=f"--expert_parallel_size, {name}",
                fix="leave --expert_parallel_size out; --fsdp fsdp2 shards them too",
            )
        modules[module] = names
    return modules


def _pattern(plan_name: str) -> re.Pattern[str]:
    return re.compile(re.escape(plan_name).replace(r"\*", r"\d+"))


def _matches(name: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)


def _cut(module: nn.Module, names: list[str], spread: Spread) -> None:
    """Keep this rank's experts of each parameter."""
    axis, device_mesh = spread.mesh["ep"], spread.mesh.expert_mesh("ep")
    total = module.num_experts
    if total % axis.size:  # type: ignore[operator]
        raise UsageError(
            f"{total} experts can't be shared evenly by {axis.size} ranks",
            where=f"--expert_parallel_size {axis.size}",
            fix="choose a divisor of the number of experts",
        )
    module.num_experts = total // axis.size  # type: ignore[operator,assignment]
    for name in names:
        parameter = module._parameters[name]
        assert parameter is not None
        local = parameter.detach().chunk(axis.size, 0)[axis.rank].clone()  # a view would keep all experts in memory
        tensor = DTensor.from_local(
            local, device_mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(module, name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
