"""Spread a model over the mesh: each way of cutting it, in the one order in which they go together.

    adapters · pipeline stages · matrices (tp) · experts (ep) · sequences (cp) · recompute, compilation · fsdp

The model is an unmodified Hugging Face one, on the meta device or real; its parameters keep their names. Afterwards it
gets its numbers, and a strategy that runs steps on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from swift.config.parallel import ParallelConfig
from swift.config.training import LossConfig
from swift.distributed.context.attention import use_context_attention
from swift.distributed.experts import apply_expert_parallel
from swift.distributed.mesh import Mesh
from swift.distributed.pipeline.schedules import stages_of_rank, stages_per_rank
from swift.distributed.pipeline.split import keep_stage, model_costs, stage_layers
from swift.distributed.sharding import apply_fsdp
from swift.distributed.spread import Spread
from swift.distributed.tensor import apply_tensor_parallel
from swift.models.attention import VARLEN
from swift.models.elementwise import enable_fast_elementwise
from swift.models.head import find_decoder, find_head
from swift.models.router import build_router_loss
from swift.models.trained_linear import enable_trained_linear
from swift.optim.local import LocalParameters, local_parameters
from swift.training.module import MakeObjectives, Objectives, TrainModule, next_token
from swift.training.pipeline import Pipeline, stage_parameters, tie_stages
from swift.training.precision import Precision
from swift.training.sharded import Sharded
from swift.training.stage import Chunk, StageModule
from swift.training.strategy import Strategy

# A whole model with its adapters, and the Hugging Face model inside; a new one with every call.
Build = Callable[[], tuple[nn.Module, PreTrainedModel]]
# Something that is done to a model in passing, or to its outermost module.
Step = Callable[[nn.Module, PreTrainedModel], None]


@dataclass(frozen=True)
class Making:
    """What a spread model is made of beside its own code.

    Attributes:
        attention: the attention's name where no axis decides it.
        prepare: switches recompute and compilation on, before sharding; None for neither.
        fill: gives the numbers, after sharding; None for a model that has them.
        objectives: made for a mesh; default: next-token prediction, as `objective` says.
    """

    parallelism: ParallelConfig
    objective: LossConfig
    precision: Precision
    attention: str = VARLEN
    pad_token_id: int = 0
    prepare: Step | None = None
    fill: Step | None = None
    objectives: MakeObjectives | None = None

    def make_objectives(self, mesh: Mesh) -> Objectives:
        """What is minimised and measured."""
        return (self.objectives or next_token(self.objective))(mesh)


@dataclass
class SpreadModel:
    """What this process holds of a model.

    Attributes:
        chunks: its pieces of layers; one, unless a pipeline gives it several.
        modules: `TrainModule`, or a `StageModule` for each chunk.
        local: its parts of the trained parameters, for the optimizer.
    """

    spread: Spread
    chunks: list[Chunk]
    modules: list[nn.Module]
    local: LocalParameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters of this process under their names in the whole model, each once."""
        return _named(self.modules)


def spread_model(build: Build, mesh: Mesh, making: Making) -> SpreadModel:
    """Cut and shard a model; every process of the mesh calls it.

    Raises:
        UsageError, ModelError: a size doesn't divide, or the model has parts that can't be spread in this way.
    """
    spread = Spread(mesh)
    pipeline = mesh["pp"]
    config = making.parallelism
    stages, plan = [0], [range(0)]
    if pipeline:
        per_rank = stages_per_rank(config)
        stages = stages_of_rank(config.pipeline_schedule, pipeline.rank, pipeline.size, per_rank)
        plan = stage_layers(model_costs(build()[1]), pipeline.size * per_rank, config.pipeline_layers)
    chunks, modules = [], []
    for stage in stages:
        whole, causal_lm = build()
        if pipeline:
            keep_stage(whole, causal_lm, plan, stage)
        _apply_axes(whole, causal_lm, spread, making)
        chunk = Chunk(stage, len(plan), whole, causal_lm, find_head(causal_lm, axis=mesh["tp"] or None))
        chunks.append(chunk)
        modules.append(_module(chunk, mesh, making))
    if pipeline and not mesh["fsdp"]:
        tie_stages([module for module in modules if isinstance(module, StageModule)])
    for chunk, module in zip(chunks, modules, strict=True):
        if making.prepare is not None:
            making.prepare(chunk.whole, chunk.causal_lm)
        if config.fsdp != "none":
            apply_fsdp(module, chunk.causal_lm, spread, config, compute=making.precision.compute)
        if making.fill is not None:
            making.fill(module, chunk.causal_lm)
    return SpreadModel(spread, chunks, modules, local_parameters(_named(modules)))


def _apply_axes(whole: nn.Module, causal_lm: PreTrainedModel, spread: Spread, making: Making) -> None:
    mesh, config = spread.mesh, making.parallelism
    for parameter in whole.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    apply_tensor_parallel(whole, causal_lm, spread, sequence_parallel=config.sequence_parallel)
    apply_expert_parallel(whole, causal_lm, spread)
    if mesh["cp"]:
        use_context_attention(causal_lm, spread, gather_kv=config.attention_impl == "allgather")
    else:
        causal_lm.set_attn_implementation(VARLEN if mesh["tp"] or mesh["pp"] else making.attention)
    enable_fast_elementwise(whole)
    if whole is causal_lm:
        enable_trained_linear(find_decoder(causal_lm))


def _module(chunk: Chunk, mesh: Mesh, making: Making) -> nn.Module:
    objectives = making.make_objectives(mesh)
    router_loss = build_router_loss(chunk.causal_lm, making.objective.router_aux_loss_coef, mesh)
    alpha = making.objective.neftune_noise_alpha
    if mesh["pp"]:
        return StageModule(
            chunk,
            objectives=objectives,
            autocast=making.precision.autocast,
            neftune_alpha=alpha,
            router_loss=router_loss,
        )
    return TrainModule(
        chunk.whole,
        decoder=find_decoder(chunk.causal_lm),
        head=chunk.head,
        objectives=objectives,
        neftune_alpha=alpha,
        router_loss=router_loss,
    )


def _named(modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    stages = [module for module in modules if isinstance(module, StageModule)]
    if stages:
        return stage_parameters(stages)
    return [pair for module in modules for pair in module.get_submodule("model").named_parameters()]


def make_strategy(model: SpreadModel, making: Making) -> Strategy:
    """What runs steps on a spread model."""
    config, mesh = making.parallelism, model.spread.mesh
    stages = [module for module in model.modules if isinstance(module, StageModule)]
    if stages:
        return Pipeline(
            stages,
            model.spread,
            model.local,
            config.pipeline_schedule,
            pad_token_id=making.pad_token_id,
            multiple=mesh["tp"].size if config.sequence_parallel else 1,
        )
    (module,) = model.modules
    return Sharded(module, model.spread, model.local, making.precision, config, pad_token_id=making.pad_token_id)
