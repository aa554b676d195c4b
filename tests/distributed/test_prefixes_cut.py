"""Rows whose segments share a prefix, through models whose heads are cut over ranks."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from architectures import build
from equality import fill, relative, whole_tensor
from pool import on_ranks

from swift.config.degrees import Degrees
from swift.distributed.mesh import build_mesh
from swift.distributed.spread import Spread, finish_gradients
from swift.distributed.tensor import apply_tensor_parallel
from swift.models.attention import VARLEN, segment_arguments
from swift.models.head import find_decoder
from swift.models.prefix_proof import lay_out

NAMES = ["llama", "mistral-window", "gemma2-softcap-window", "qwen3-moe", "deepseek-v3-mla"]
SHAPES = ((11, (5, 3)), (0, (4,)), (2, (9, 1, 6)), (0, (7,)))  # 48 tokens: in sequence parallel, halves of a row


def loss_of(model: tf.PreTrainedModel, spread: Spread | None) -> dict[str, torch.Tensor]:
    """Gradients, and under "loss" the loss: a sum over all hidden states with random factors."""
    borders, prefixes, positions = lay_out(SHAPES)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 97, (1, borders[-1]), generator=generator)
    factors = torch.randn(borders[-1], 64, generator=generator, dtype=torch.float64)
    hidden = find_decoder(model)(
        input_ids=ids,
        position_ids=torch.tensor(positions)[None],
        use_cache=False,
        **segment_arguments(borders, ids.device, prefixes=prefixes),
    ).last_hidden_state[0]
    loss = (hidden * factors).sum()
    loss.backward()
    if spread is not None:
        finish_gradients(model.named_parameters(), spread)
    found = {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def make(name: str) -> tf.PreTrainedModel:
    model = build(name, torch.float64)
    model.set_attn_implementation(VARLEN)
    fill(model)
    return model


def on_two(sequence_parallel: bool) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in NAMES:
        spread, model = Spread(build_mesh(Degrees(tp=2), "cpu")), make(name)
        apply_tensor_parallel(model, model, spread, sequence_parallel=sequence_parallel)
        found[name] = loss_of(model, spread)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tokens-whole", "tokens-cut"])
def test_models_cut_by_heads_share_prefixes(sequence_parallel):
    ranks = on_ranks(2, on_two, sequence_parallel)
    for name in NAMES:
        expected = loss_of(make(name), None)
        for rank in ranks:
            assert set(rank[name]) == set(expected)
            wrong = {key: error for key in expected if not (error := relative(rank[name][key], expected[key])) <= 1e-5}
            assert not wrong, (name, wrong)
