"""One training step under a `Trace`, with the run's own strategies: on fake tensors, or (to check it) on real ones.

A step's micro-batches differ in three ways: the first allocates gradients, the last exchanges them, all others are like
each other. So at most three are run, and what the middle one did is counted as often as it occurs. A pipeline runs all
micro-batches at once; of many, it runs two numbers of them, from which the rest follows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from swift.data.loading.batch import Batch
from swift.distributed import ProcessGroup
from swift.distributed.experts.dispatch import uniform_routing
from swift.distributed.mesh import Mesh
from swift.distributed.pipeline.runner import Border
from swift.distributed.spread import Spread, local_tensor
from swift.distributed.trace import GRADIENTS, OPTIMIZER, WEIGHTS, Trace
from swift.models.elementwise import disable_fast_elementwise, enable_fast_elementwise
from swift.models.fill import allocate
from swift.models.head import find_decoder, find_head
from swift.models.prepare import decoder_layers, enable_checkpointing
from swift.models.router import build_router_loss
from swift.models.trained_linear import enable_trained_linear
from swift.optim import local_parameters
from swift.training.module import TrainModule
from swift.training.parallelize import Build, Making, SpreadModel, make_strategy, spread_model
from swift.training.pipeline import Pipeline
from swift.training.stage import Chunk
from swift.training.strategy import DataParallel, Strategy

MakeOptimizer = Callable[[SpreadModel], torch.optim.Optimizer]


@dataclass(frozen=True)
class Stepping:
    """How the step is run.

    Attributes:
        micro_batches: of a rank in a step.
        batch: makes a micro-batch.
        recompute: whether activations are computed again in the backward pass.
        max_grad_norm: as for training.
        like_cpu: keep the operations that only a CPU has (they keep less for the backward pass).
        border: what travels between stages of a pipeline; None: found out, by the stage that has the embedding.
        copies: every process holds the whole model, and gradients are averaged by `DataParallel`.
    """

    micro_batches: int
    batch: Callable[[], Batch]
    make_optimizer: MakeOptimizer
    recompute: bool = False
    max_grad_norm: float = 1.0
    like_cpu: bool = True
    border: Border | None = None
    copies: bool = False


def trace_fake(build: Build, mesh: Mesh, making: Making, stepping: Stepping) -> tuple[Trace, Border | None]:
    """A step of the process that the mesh is of, on tensors without numbers.

    Args:
        build: gives the model on the meta device.

    Returns:
        the trace; with a pipeline, what travels between its stages.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fill(module: nn.Module, _: PreTrainedModel) -> None:
        with mode:
            _allocate_fake(module)

    make = whole_model if stepping.copies else spread_model
    model = make(build, mesh, replace(making, fill=fill))
    if not stepping.like_cpu:
        for chunk in model.chunks:
            disable_fast_elementwise(chunk.whole)
    trace = Trace(mesh, fake=True)
    with uniform_routing():
        strategy = _strategy(model, making, stepping, mode, trace)
        run_step(model, strategy, stepping, trace, mode)
    if stepping.copies and mesh["dp"]:
        _add_gradient_buckets(model, mesh["dp"].size, trace)
    borders = strategy.runner.borders if isinstance(strategy, Pipeline) else []
    return trace, borders[0] if borders else None


def trace_real(build: Build, mesh: Mesh, making: Making, stepping: Stepping) -> Trace:
    """The same on real tensors, together with all other processes of the mesh: what `trace_fake` should give."""
    model = (whole_model if stepping.copies else spread_model)(build, mesh, making)
    trace = Trace(mesh, fake=False)
    run_step(model, _strategy(model, making, stepping, nullcontext(), trace), stepping, trace, nullcontext())
    return trace


def whole_model(build: Build, mesh: Mesh, making: Making) -> SpreadModel:
    """A model that every process holds whole, as `build_model` and `build_engine` make it, but for what they prove."""
    whole, causal_lm = build()
    for parameter in whole.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    decoder, head = find_decoder(causal_lm), find_head(causal_lm)
    causal_lm.set_attn_implementation(making.attention)
    enable_fast_elementwise(whole)
    if whole is causal_lm:
        enable_trained_linear(decoder)
    module = TrainModule(
        whole,
        decoder=decoder,
        head=head,
        objectives=making.make_objectives(mesh),
        neftune_alpha=making.objective.neftune_noise_alpha,
        router_loss=build_router_loss(causal_lm, making.objective.router_aux_loss_coef, mesh),
    )
    if making.fill is not None:
        making.fill(module, causal_lm)
    local = local_parameters(whole.named_parameters())
    return SpreadModel(Spread(mesh), [Chunk(0, 1, whole, causal_lm, head)], [module], local)


def _allocate_fake(module: nn.Module) -> None:
    """Memory without numbers for everything in a module; to be called under a `FakeTensorMode`."""
    plain = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if type(parameter) is nn.Parameter
    ]
    for part, name, _ in plain:  # `allocate` keeps objects by swapping, which PyTorch does with these by chance only
        part._parameters[name] = None
    allocate(module, torch.device("cpu"))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part, name, old in plain:
        if old not in made:
            empty = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
            made[old] = nn.Parameter(empty, old.requires_grad)
            vars(made[old]).update(vars(old))
        part._parameters[name] = made[old]


def _strategy(
    model: SpreadModel, making: Making, stepping: Stepping, mode: AbstractContextManager, trace: Trace
) -> Strategy:
    for chunk in model.chunks if stepping.recompute else []:
        enable_checkpointing(chunk.causal_lm)
    strategy: Strategy
    if stepping.copies:
        # PyTorch's wrapper looks at the memory of tensors: one process is run, and what it adds is known
        strategy = DataParallel(model.modules[0], ProcessGroup(0, 1, 0), making.precision)
    else:
        strategy = make_strategy(model, making)
    strategy.module.train()
    if isinstance(strategy, Pipeline) and isinstance(mode, FakeTensorMode):
        border = stepping.border or _find_border(strategy, stepping, mode, trace)
        strategy.runner.borders = [border] * (model.chunks[0].num_stages - 1)
        strategy.names = {True: ["token_accuracy"]}
    return strategy


def _find_border(strategy: Pipeline, stepping: Stepping, mode: FakeTensorMode, trace: Trace) -> Border:
    (portion,) = strategy.prepare([stepping.batch()])
    stage = strategy.stages[0]
    assert stage.chunk.first, "the first stage tells what travels"
    with mode, trace, torch.no_grad():
        stage.eval()
        stage.load(portion)
        states = stage(torch.tensor([0]), torch.tensor([0]))
        stage.train()
    return Border(states.shape[1] / portion[0].input_ids.shape[1], states.shape[2], states.dtype)


def run_step(
    model: SpreadModel, strategy: Strategy, stepping: Stepping, trace: Trace, mode: AbstractContextManager
) -> None:
    """Run a step to warm up (optimizer state, buffers that stay), then the one that is traced."""
    optimizer = stepping.make_optimizer(model)
    for _, parameter in model.local.named_whole():
        parameter.register_post_accumulate_grad_hook(lambda whole: trace.hold([whole.grad], GRADIENTS))
    _mark_halves(model, trace)
    roles = {1: ["only"], 2: ["first", "last"]}.get(stepping.micro_batches, ["first", "middle", "last"])
    if isinstance(strategy, Pipeline):
        roles = ["all"]
    for warm_up in (True, False):
        names = roles[-1:] if warm_up else roles
        count = stepping.micro_batches if isinstance(strategy, Pipeline) else len(names)
        portions = strategy.prepare([stepping.batch() for _ in range(count)])
        with mode, trace:
            _hold(model, optimizer, trace)
            trace.reset()
            for number, (name, portion) in enumerate(zip(names, portions, strict=True)):
                trace.part = f"{name} forward"
                last = number == len(names) - 1
                terms = strategy.forward(portion, _to_loss, last)
                trace.part = f"{name} backward"
                strategy.backward(terms, _to_loss, last)
                del terms
                trace.hold((p.grad for _, p in model.local.named_whole()), GRADIENTS)
            trace.part = "step"
            strategy.clip(stepping.max_grad_norm)
            strategy.step(optimizer, None)
            optimizer.zero_grad(set_to_none=True)


def _add_gradient_buckets(model: SpreadModel, ranks: int, trace: Trace) -> None:
    """What `DistributedDataParallel` adds to one process: gradients live in its buckets, which stay, and are averaged
    once a step (in several calls, of up to 25 MiB each; counted as one, as in `swift.distributed.traffic`)."""
    num_bytes = sum(p.numel() * p.element_size() for _, p in model.local.named())
    for peak in trace.peaks.values():
        peak.total += num_bytes - peak.parts.get(GRADIENTS, 0)
        peak.parts[GRADIENTS] = num_bytes
    trace.counts["step"].calls["dp", "all_reduce"] += 1
    trace.counts["step"].bytes["dp", "all_reduce"] += 2 * (ranks - 1) / ranks * num_bytes


def _to_loss(loss_sum: torch.Tensor) -> torch.Tensor:
    return loss_sum / 1000.0


def _hold(model: SpreadModel, optimizer: torch.optim.Optimizer, trace: Trace) -> None:
    tensors: list[torch.Tensor] = [local_tensor(p.detach()) for m in model.modules for p in m.parameters()]
    trace.hold([*tensors, *(b for m in model.modules for b in m.buffers())], WEIGHTS)
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    trace.hold((value for value in states if isinstance(value, torch.Tensor)), OPTIMIZER)


def _mark_halves(model: SpreadModel, trace: Trace) -> None:
    """Tell the upper half of the layers from the lower one in the backward pass: memory peaks at an end of it."""

    def note(grad: torch.Tensor) -> None:
        if trace.part.endswith(" backward"):
            trace.part = trace.part.replace(" backward", " lower backward")

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(note)

    for chunk in model.chunks:
        layers = list(decoder_layers(find_decoder(chunk.causal_lm)))
        layers[(len(layers) - 1) // 2].register_forward_hook(watch)
