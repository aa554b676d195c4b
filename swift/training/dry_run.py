"""`--dry_run`: what a run would do to each process, found out in this one, without weights, data or other processes.

A process is played after the other (`swift.distributed.trace_world`): the model is built without numbers, spread over
the mesh as a run would, and one step runs through the run's own strategy on tensors that have shapes only. What is
printed was counted in that step, but for what the text says it followed from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from swift.config.auto_parallel import choose
from swift.config.cluster import read_cluster
from swift.config.commands import RlhfConfig, SftConfig, TrainConfig
from swift.config.degrees import Degrees, read_model_shape, resolve_degrees
from swift.config.nodes import processes_wanted, world_size_expected
from swift.core.devices import detect_device
from swift.core.errors import UsageError
from swift.data.loading.batch import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.distributed.mesh import build_mesh
from swift.distributed.pipeline.runner import Border
from swift.distributed.placement import place_ranks, placement_table
from swift.distributed.trace_world import pretend
from swift.models.attention import VARLEN, varlen_unsupported_reason
from swift.models.empty import build_empty_model
from swift.models.head import find_decoder
from swift.models.loading import resolve_model
from swift.models.prepare import decoder_layers
from swift.models.tuners import apply_tuner
from swift.objectives.linear_cross_entropy import chunk_rows
from swift.optim import build_optimizer
from swift.training.dry_report import Facts, report
from swift.training.dry_step import Stepping, trace_fake
from swift.training.dry_totals import Totals, depths, extend, totals_of
from swift.training.layout import Layout as RunLayout
from swift.training.parallelize import Making, SpreadModel
from swift.training.plan import accumulation_steps
from swift.training.precision import Precision, choose_precision
from swift.training.sharded import check_sharded_tuner


@dataclass(frozen=True)
class _Run:
    """What is to be traced."""

    config: TrainConfig
    folder: Path
    layout: RunLayout
    precision: Precision
    like_cpu: bool
    micro_batches: int
    attention: str

    @property
    def degrees(self) -> Degrees:
        return self.layout.degrees


def dry_run(config: TrainConfig, environ: Mapping[str, str] = os.environ) -> str:
    """The text that `--dry_run` prints.

    Raises:
        UsageError: what is asked for is impossible, or can't be seen into.
    """
    run, notes = _settle(config, environ)
    kinds = _layer_kinds(run)
    few = depths(kinds) if run.degrees.pp == 1 else None
    stages, border = [], None
    for stage in range(run.degrees.pp):
        rank = stage * (run.degrees.world_size // run.degrees.pp)
        if few is None:
            totals, border = _trace_stage(run, rank, border)
        else:
            small, large = (_trace(run, rank, run.micro_batches, depth=depth)[0] for depth in few)
            totals = extend(small, large, (len(kinds) - few[0]) / (few[1] - few[0]))
        stages.append((rank, totals))
    if few is not None:
        notes.append(
            f"{few[0]} and {few[1]} of the {len(kinds)} layers were traced; the others do what these do: counts and "
            "bytes follow exactly, memory part by part of the step"
        )
    return report(_facts(run, notes), stages)


def _settle(config: TrainConfig, environ: Mapping[str, str]) -> tuple[_Run, list[str]]:
    settings = config.parallelism
    for name in ("deepspeed", "grad_compression", "local_updates"):
        if getattr(settings, name):
            raise UsageError(
                f"a dry run can't see what {name} does", where=f"--{name}", fix=f"leave --{name} out of the dry run"
            )
    world, per_node = world_size_expected(config, environ), processes_wanted(config, environ)
    folder = _folder(config)
    shape = read_model_shape(folder)
    device = detect_device(0)
    precision, notes = choose_precision(config.model.torch_dtype, device)
    if settings.parallel == "auto":
        tokens = config.template.max_length * config.training.per_device_train_batch_size
        settings, more = choose(config, shape, world, per_node, device.memory_bytes, tokens)
        notes += [f"parallel auto counts on the memory of this machine's device, {device.name}", *more]
    degrees = resolve_degrees(settings, world, shape, ranks_per_node=per_node)
    layout = RunLayout(settings, degrees, "", notes)
    if layout.spread:
        cluster = read_cluster(settings.cluster_file) if settings.cluster_file else None
        names = [node.host for node in cluster.nodes] if cluster else []
        hosts = [names[r // per_node] if r // per_node < len(names) else f"node{r // per_node}" for r in range(world)]
        placement = place_ranks(degrees, hosts, cluster)
        layout = RunLayout(settings, degrees, placement_table(placement), [*notes, *placement.notes])
    check_sharded_tuner(config.tuner, degrees, fsdp=settings.fsdp != "none")
    if config.training.gradient_checkpointing is None:
        layout.notes.append(
            "gradient_checkpointing isn't set: this is without; a run decides by the memory that it finds free"
        )
    like_cpu = device.type == "cpu" and precision.compute == torch.float32
    where = "a CPU" if like_cpu else "an accelerator"
    if isinstance(config, RlhfConfig) or (isinstance(config, SftConfig) and config.task.task_type != "causal_lm"):
        layout.notes.append(
            "every sequence is taken to be max_length long and to predict its next tokens; passes that look ahead "
            "(reference, teacher, statistics of the step) hold no gradients and come on top of the time"
        )
    layout.notes.append(f"operations are those of {where} (--torch_dtype {precision.name})")
    empty = build_empty_model(folder, config.model, dtype=torch.float32)
    free = config.batching.padding_free is not False and varlen_unsupported_reason(empty) is None
    run = _Run(
        config,
        folder,
        layout,
        Precision(precision.compute, "cpu"),
        like_cpu,
        accumulation_steps(config, degrees.dp),
        VARLEN if free else "sdpa",
    )
    return run, layout.notes


def _folder(config: TrainConfig) -> Path:
    """Where config.json is; weights aren't looked at."""
    given = Path(config.model.model or "").expanduser()
    return given if config.model.model and (given / "config.json").is_file() else resolve_model(config.model)


def _layer_kinds(run: _Run) -> list[object]:
    model = build_empty_model(run.folder, run.config.model, dtype=torch.float32)
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    kinds: list[object] = []
    for number, layer in enumerate(decoder_layers(find_decoder(model))):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        window = getattr(getattr(layer, "self_attn", None), "sliding_window", None)
        kinds.append((type(layer).__name__, types[number] if number < len(types) else "", window, shapes))
    return kinds


def _trace_stage(run: _Run, rank: int, border: Border | None) -> tuple[Totals, Border | None]:
    """A stage with all its layers; of more micro-batches than the pipeline holds, two numbers of them are run."""
    pp, schedule, count = run.degrees.pp, run.layout.parallelism.pipeline_schedule, run.micro_batches
    # one more than are in flight at once: from there on, each further one does what the last did
    fill = 2 * pp if schedule == "interleaved" else (2 * pp if schedule == "zbv" else pp) + 1
    more = fill + (pp if schedule == "interleaved" else 1)
    if pp == 1 or count <= more or (schedule == "interleaved" and count % pp):
        return _trace(run, rank, count, border=border)
    small, border = _trace(run, rank, fill, border=border)
    large, _ = _trace(run, rank, more, border=border)
    return extend(small, large, (count - fill) / (more - fill)), border


def _trace(
    run: _Run, rank: int, micro_batches: int, *, depth: int | None = None, border: Border | None = None
) -> tuple[Totals, Border | None]:
    config, degrees = run.config, run.degrees
    dtype = run.precision.stored(full=config.tuner.tuner_type == "full")

    def build() -> tuple[nn.Module, PreTrainedModel]:
        causal_lm = build_empty_model(run.folder, config.model, dtype=dtype)
        _keep_layers(causal_lm, depth)
        text = causal_lm.config.get_text_config()
        if getattr(text, "_experts_implementation", None) in (None, "eager") and _has_experts(causal_lm):
            causal_lm.set_experts_implementation("grouped_mm")  # eager asks which experts have tokens
        return apply_tuner(causal_lm, config.tuner, adapters=config.model.adapters, fast_lora=run.like_cpu), causal_lm

    def make_optimizer(model: SpreadModel) -> torch.optim.Optimizer:
        return build_optimizer(
            model.local,
            config.optimizer,
            tuner_type=config.tuner.tuner_type,
            lorap_lr_ratio=config.tuner.lorap_lr_ratio,
        )

    objective = config.objective
    if not run.like_cpu and not objective.loss_chunk_size:
        vocab = read_model_shape(run.folder).vocab // degrees.tp
        objective = replace(objective, loss_chunk_size=chunk_rows(vocab, device_type="cuda"))
    making = Making(run.layout.parallelism, objective, run.precision, attention=run.attention)
    stepping = Stepping(
        micro_batches,
        lambda: _micro_batch(run),
        make_optimizer,
        recompute=bool(config.training.gradient_checkpointing),
        max_grad_norm=config.training.max_grad_norm,
        like_cpu=run.like_cpu,
        border=border,
        copies=not run.layout.spread,
    )
    if degrees.world_size == 1:
        trace, border = trace_fake(build, build_mesh(degrees, "cpu"), making, stepping)
    else:
        with pretend(rank, degrees.world_size):
            trace, border = trace_fake(build, build_mesh(degrees, "cpu"), making, stepping)
    return totals_of(trace, micro_batches), border


def _keep_layers(causal_lm: PreTrainedModel, depth: int | None) -> None:
    """Leave the first layers only."""
    if depth is None:
        return
    decoder: Any = find_decoder(causal_lm)
    layers = decoder_layers(decoder)
    name = next(name for name, child in decoder.named_children() if child is layers)
    setattr(decoder, name, nn.ModuleList(list(layers)[:depth]))
    text = causal_lm.config.get_text_config()
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]


def _has_experts(causal_lm: PreTrainedModel) -> bool:
    return bool(getattr(causal_lm.config.get_text_config(), "base_model_ep_plan", None))


def _shape(config: TrainConfig) -> tuple[int, int]:
    """Rows of a micro-batch and their tokens; both answers of a pair are rows."""
    length = config.template.max_length
    if config.batching.packing:
        return config.training.per_device_train_batch_size, config.batching.packing_length or length
    pairs = isinstance(config, RlhfConfig) and config.preference.rlhf_type not in ("kto", "gkd")
    return config.training.per_device_train_batch_size * (2 if pairs else 1), length


def _micro_batch(run: _Run) -> Batch:
    """The largest micro-batch that the settings allow, every token trained on."""
    config = run.config
    rows, length = _shape(config)
    example = (np.ones(length, dtype=np.int32), np.ones(length, dtype=np.float32))
    layout = Layout(padding_free=run.attention == VARLEN)
    return make_batch([example] * rows, [RowRef("dry run", number) for number in range(rows)], layout)


def _facts(run: _Run, notes: list[str]) -> Facts:
    config, degrees = run.config, run.degrees
    rows, length = _shape(config)
    tokens = run.micro_batches * rows * length * degrees.dp
    recompute = "activations recomputed" if config.training.gradient_checkpointing else "activations kept"
    return Facts(
        model=Path(config.model.model or "model").name,
        degrees=degrees,
        ways=run.layout.words() or ("copies of the whole model" if degrees.world_size > 1 else "one process"),
        table=run.layout.table,
        step=f"{run.micro_batches} micro-batch(es) of {rows} x {length} tokens on each of {degrees.dp} data-parallel "
        f"rank(s): {tokens:,} tokens",
        how=f"{run.precision.name}, {config.tuner.tuner_type} tuning, {config.optimizer.optim}, {recompute}",
        notes=notes,
        experts=degrees.ep > 1,
    )
