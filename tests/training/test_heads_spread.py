"""Models with the head of a classifier, or none, learn the same whether they are spread over two processes or not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from distributed.equality import Outcome, assert_equal, make_batches, make_optimizer, whole_tensor
from distributed.pool import on_ranks
from torch import nn
from training.architectures import COMMON

from swift.config.degrees import Degrees
from swift.config.model import ModelConfig
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig
from swift.config.tuner import TunerConfig
from swift.core.devices import detect_device
from swift.data.loading.batch import Batch
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.process_group import start_process_group
from swift.models.empty import build_empty_model
from swift.models.fill import Start, fill_model
from swift.models.gathered import write_adapter, write_model
from swift.models.head import OutputHead, find_decoder, find_head
from swift.models.kinds import Task, task_of, write_task
from swift.models.loading import load_model
from swift.models.prepare import seed_everything
from swift.models.tuners import apply_tuner
from swift.objectives import LossTerms
from swift.training.module import Objectives, TrainModule
from swift.training.parallelize import Making, make_strategy, spread_model
from swift.training.precision import choose_precision

TASKS = {
    "seq_cls": Task("seq_cls", num_labels=3),
    "token_cls": Task("token_cls", num_labels=3),
    "embedding": Task("embedding"),
}
LAYOUTS: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "tp": (Degrees(tp=2), {"tensor_parallel_size": 2}),
    "sp": (Degrees(tp=2), {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp": (Degrees(pp=2), {"pipeline_parallel_size": 2}),
    "fsdp": (Degrees(dp_shard=2), {"fsdp": "fsdp2"}),
}
STEPS, SEED = 2, 11


def squares(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> LossTerms:
    """Sum over targets of the squared scores, each weighted by its place in the text so that no two count alike."""
    scores = head.logits(hidden)
    factors = torch.linspace(1.0, 2.0, scores.shape[-1], dtype=scores.dtype)
    return LossTerms((scores.square() * factors).sum(), batch.weight)


def objectives(mesh: Mesh) -> Objectives:
    return Objectives(squares, squares)


def checkpoint(folder: Path) -> Path:
    """A language model without a head for any of the tasks, its matrices tied so that a lost tie would be seen."""
    torch.manual_seed(0)
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    model.save_pretrained(folder)
    return folder


def tuner(kind: str) -> TunerConfig:
    return TunerConfig(tuner_type=kind, lora_rank=2, lora_dropout=0.0) if kind == "lora" else TunerConfig("full")


def batches() -> list[Batch]:
    return make_batches("packed", 4)


def weight() -> float:
    return sum(batch.weight for batch in batches())


def stir(named: list[tuple[str, nn.Parameter]]) -> None:
    """LoRA's second matrices start from zero, and half of the gradients would be zero too."""
    for name, parameter in named:
        if ".lora_B." in name:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            with torch.no_grad():
                local.fill_(0.02)


def reference(path: Path, task: str, kind: str) -> Outcome:
    """One process, by what a run that isn't spread uses, with every parameter named as in the whole model."""
    model = load_model(
        path, ModelConfig(), dtype=torch.float32, attn_implementation="varlen", task=TASKS[task], seed=SEED
    )
    seed_everything(SEED)
    whole = apply_tuner(model, tuner(kind))
    named = list(whole.named_parameters())
    stir(named)
    module = TrainModule(whole, decoder=find_decoder(model), head=find_head(model), objectives=objectives(Mesh()))
    trained = {name: p for name, p in named if p.requires_grad}
    optimizer = make_optimizer(list(trained.values()))
    outcome = Outcome()
    for step in range(STEPS):
        total = 0.0
        for batch in batches():
            terms = module(batch)
            (terms.loss_sum / weight()).backward()
            total += float(terms.loss_sum) / weight()
        outcome.losses.append(total)
        if step == 0:
            outcome.gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: p.detach().clone() for name, p in trained.items()}
    return outcome


def spread(path: Path, task: str, kind: str, layout: str, saved: Path) -> Outcome:
    """Two processes: built empty, cut, sharded, filled, and trained by the strategy of a real run."""
    degrees, flags = LAYOUTS[layout]
    group = start_process_group("cpu")
    mesh = build_mesh(degrees, "cpu")
    settings = tuner(kind)
    start = Start(path, ModelConfig(), settings, SEED, torch.float32, TASKS[task])

    def build() -> tuple[nn.Module, tf.PreTrainedModel]:
        causal_lm = build_empty_model(path, ModelConfig(), dtype=torch.float32, task=TASKS[task])
        return apply_tuner(causal_lm, settings), causal_lm

    def fill(module: nn.Module, causal_lm: tf.PreTrainedModel) -> None:
        fill_model(module, causal_lm, start, device="cpu")
        stir([(f"{name}.", p) for name, p in module.named_parameters()])

    precision, _ = choose_precision("float32", detect_device(0))
    config = ParallelConfig(**({"fsdp": "none"} | flags))
    making = Making(config, ObjectiveConfig(), precision, fill=fill, objectives=objectives)
    model = spread_model(build, mesh, making)
    strategy = make_strategy(model, making)
    optimizer = make_optimizer([p for _, p in model.local.named()])
    mine = batches()[mesh["dp"].rank :: mesh["dp"].size]
    outcome = Outcome()
    for step in range(STEPS):
        total = 0.0
        portions = strategy.prepare(mine)
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            terms = strategy.forward(portion, lambda loss: loss / weight(), last)
            strategy.backward(terms, lambda loss: loss / weight(), last)
            total += sum(float(term.loss_sum) for term in terms)
        outcome.losses.append(group.sum([total])[0] / strategy.copies / weight())
        if step == 0:
            outcome.gradients = {
                name: whole_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
            }
        strategy.step(optimizer, None)
        for _, parameter in model.named_parameters():
            parameter.grad = None
        optimizer.zero_grad()
    outcome.weights = {
        name: whole_tensor(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad
    }
    if kind == "full":
        write_model([chunk.causal_lm for chunk in model.chunks], saved, group, dtype=torch.float32)
    else:
        write_adapter([chunk.whole for chunk in model.chunks], saved, group)
    if group.main:
        write_task(saved, task_of(model.chunks[0].causal_lm))
    return outcome


def everything(path: Path, task: str, kind: str, layouts: tuple[str, ...], saved: Path) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    return {layout: spread(path, task, kind, layout, saved / layout) for layout in layouts}


@functools.cache
def gathered(path: Path, task: str, kind: str, saved: Path) -> dict[str, Outcome]:
    """What the ranks hold together: stages of a pipeline have parameters apart."""
    for layout in LAYOUTS:
        (saved / layout).mkdir(parents=True)
    ranks = on_ranks(2, everything, path, task, kind, tuple(LAYOUTS), saved)
    joined: dict[str, Outcome] = {}
    for layout in LAYOUTS:
        outcomes = [outcome[layout] for outcome in ranks]
        joined[layout] = Outcome(
            outcomes[0].losses,
            {name: g for outcome in outcomes for name, g in outcome.gradients.items()},
            {name: w for outcome in outcomes for name, w in outcome.weights.items()},
        )
        assert outcomes[0].losses == outcomes[1].losses
        for name in set(outcomes[0].weights) & set(outcomes[1].weights):  # the head, whole on each rank, stays one
            assert torch.equal(outcomes[0].weights[name], outcomes[1].weights[name]), name
    return joined


@pytest.mark.parametrize(
    "task, kind", [("seq_cls", "full"), ("seq_cls", "lora"), ("token_cls", "full"), ("embedding", "full")]
)
def test_spread_models_learn_what_one_process_learns(task: str, kind: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    expected = reference(path, task, kind)
    assert any("score" in name for name in expected.gradients) == (task != "embedding")
    for layout, outcome in gathered(path, task, kind, tmp_path / "saved").items():
        try:
            assert_equal(outcome, expected)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error
        if kind == "full":  # and what they write is a model of the same kind, for anyone
            loaded = load_model(tmp_path / "saved" / layout, ModelConfig(), dtype=torch.float32, task=Task(task))  # type: ignore[arg-type]
            weights = dict(loaded.named_parameters())
            assert all(torch.equal(weights[name], outcome.weights[name]) for name in weights)
