"""Models trained on shared sequences: losses, gradients and weights are those of one process."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from equality import (
    COMMON,
    KINDS,
    LAYOUTS,
    TUNERS,
    VOCAB,
    Outcome,
    Tiny,
    assert_equal,
    build,
    make_batches,
    make_optimizer,
    relative,
    single_process,
)
from pool import on_ranks

from swift.config.context import resolve_context
from swift.config.degrees import Degrees
from swift.data.loading.batch import Batch, Layout, make_batch
from swift.data.rows import RowRef
from swift.distributed.context.attention import use_context_attention
from swift.distributed.context.batches import cut_batch
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.spread import Spread, finish_gradients

SIX_HEADS = COMMON | {"num_attention_heads": 6, "num_key_value_heads": 3}
KINDS["six_heads"] = lambda: tf.Qwen2Config(**SIX_HEADS, tie_word_embeddings=False)
KINDS["windows"] = lambda: tf.Gemma2Config(
    **(COMMON | {"num_key_value_heads": 4}), sliding_window=7, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
)
KINDS["sinks"] = lambda: tf.GptOssConfig(
    **(COMMON | {"num_key_value_heads": 4}), num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=False,
)  # fmt: skip
# latent attention: keys and values of two head sizes
LATENT = {"head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
KINDS["latent"] = lambda: tf.DeepseekV3Config(
    **(COMMON | LATENT), v_head_dim=6, first_k_dense_replace=4, n_routed_experts=4, n_group=1, topk_group=1,
    num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip

WAYS = {
    "ring 2": (Degrees(ring=2), False),
    "ulysses 2": (Degrees(ulysses=2), False),
    "gathered 2": (Degrees(ring=2), True),
    "ring 4": (Degrees(ring=4), False),
    "ulysses 4": (Degrees(ulysses=4), False),
    "product": (Degrees(ring=2, ulysses=2), False),
    "gathered 4": (Degrees(ring=4), True),
}


@cache
def reference(kind: str, tuner: str, layout: str) -> Outcome:
    """One process in float64: in float32 it is itself up to 6e-6 away from that, where keys hardly matter."""
    dtype = torch.float32 if kind == "sinks" else torch.float64  # its experts have no float64 products
    return single_process(kind, tuner, layout, dtype=dtype)


def share(kind: str, tuner: str, way: tuple[Degrees, bool], **options: object) -> tuple[Tiny, Spread]:
    """A tiny model on this rank, whose trained parameters' gradients are to be added up."""
    degrees, gather_kv = way
    spread = Spread(build_mesh(degrees, "cpu"))
    tiny = build(kind, tuner, **options)  # type: ignore[arg-type]
    use_context_attention(tiny.causal_lm, spread, gather_kv=gather_kv)
    for name in trained(tiny):
        spread.mark_partial(name, "loss")
    return tiny, spread


def trained(tiny: Tiny) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in tiny.whole.named_parameters() if p.requires_grad}


def cut(batches: list[Batch], mesh: Mesh) -> list[Batch]:
    return [cut_batch(batch, mesh, pad_token_id=0) for batch in batches]


def summed(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def train(
    kind: str, tuner: str, layout: str, way: tuple[Degrees, bool], recompute: bool = False, steps: int = 3
) -> Outcome:
    tiny, spread = share(kind, tuner, way)
    if recompute:
        tiny.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    module, named = tiny.train_module(), trained(tiny)
    optimizer = make_optimizer(list(named.values()))
    batches = cut(make_batches(layout, 4), spread.mesh)
    weight = summed(sum(batch.weight for batch in batches))
    outcome = Outcome()
    for step in range(steps):
        loss = 0.0
        for batch in batches:
            terms = module(batch)
            (terms.loss_sum / weight).backward()
            loss += terms.loss_sum.item() / weight
        outcome.losses.append(summed(loss))
        finish_gradients(named.items(), spread)
        if step == 0:
            outcome.gradients = {name: p.grad.detach().clone() for name, p in named.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    outcome.weights = {name: p.detach().clone() for name, p in named.items()}
    return outcome


def check(kind: str, tuner: str, layout: str, way: tuple[Degrees, bool], *options: object) -> None:
    for outcome in on_ranks(way[0].world_size, train, kind, tuner, layout, way, *options):
        assert_equal(outcome, reference(kind, tuner, layout))


def slow(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


SAMPLE = [
    ("ring 2", "gqa", "full", "packed"),
    ("ring 4", "tied", "lora", "padded"),
    ("ulysses 2", "untied", "full", "padded"),
    ("product", "moe", "full", "packed"),
    ("gathered 2", "qk_norm", "lora", "packed"),
]
ALL = list(product(WAYS, ["tied", "untied", "gqa", "qk_norm", "moe"], TUNERS, LAYOUTS))


@pytest.mark.parametrize(("way", "kind", "tuner", "layout"), SAMPLE)
def test_shared_sequences_train_as_one_process(way, kind, tuner, layout):
    check(kind, tuner, layout, WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind", "tuner", "layout"), [case for case in ALL if case not in SAMPLE])
def test_shared_sequences_train_as_one_process_all(way, kind, tuner, layout):
    check(kind, tuner, layout, WAYS[way])


@pytest.mark.slow
def test_heads_that_do_not_divide_make_a_product():
    sizes = resolve_context("auto", 4, 6, 3)
    assert sizes == (2, 2)
    check("six_heads", "full", "packed", (Degrees(ring=sizes[0], ulysses=sizes[1]), False))


UNUSUAL = list(product(["windows", "sinks", "latent"], ["ring 2", "ulysses 2", "gathered 2"]))
FEW = [("sinks", "ring 2")]


@pytest.mark.parametrize(("kind", "way"), FEW)
def test_unusual_attention_is_shared(kind, way):
    check(kind, "full", "packed", WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), [case for case in UNUSUAL if case not in FEW])
def test_unusual_attention_is_shared_all(kind, way):
    check(kind, "full", "packed", WAYS[way])


@pytest.mark.parametrize("way", ["ring 2", *slow("ulysses 2")])
def test_recomputed_activations(way):
    check("gqa", "full", "packed", WAYS[way], True)


# --- rows of every kind, evaluation, other precisions ---

ROWS = {
    "one document": [150],
    "very different": [2, 120, 1, 30, 7],
    "40 tiny ones": [1 + n % 5 for n in range(40)],
    "targets in one chunk": [64],
}


def row(name: str) -> Batch:
    draw = np.random.default_rng(3)
    examples = []
    for length in ROWS[name]:
        weights = (draw.random(length) > 0.2).astype(np.float32)
        if name == "targets in one chunk":
            weights[:] = 0
            weights[20:25] = 1
        examples.append((draw.integers(1, VOCAB, length).astype(np.int32), weights))
    return make_batch(examples, [RowRef("t", n) for n in range(len(examples))], Layout())


def measure(
    way: tuple[Degrees, bool] | None, names: list[str], dtype: torch.dtype, compiled: bool = False
) -> dict[str, tuple[float, float, dict[str, torch.Tensor]]]:
    """Of each row: loss when training, loss when evaluating, gradients; `way` None: in this process, uncut."""
    tiny, spread = share("gqa", "full", way, dtype=dtype) if way else (build("gqa", dtype=dtype), Spread(Mesh()))
    module, named = tiny.train_module(), trained(tiny)
    if compiled:
        for layer in tiny.decoder.layers:
            layer.compile(backend="eager", dynamic=True)
    found = {}
    for name in names:
        batch = cut([row(name)], spread.mesh)[0] if way else row(name)
        module.train()
        loss = module(batch).loss_sum
        loss.backward()
        finish_gradients(named.items(), spread)
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        module.zero_grad(set_to_none=True)
        module.eval()
        with torch.no_grad():
            evaluated = module(batch).loss_sum
        assert not evaluated.requires_grad
        sums = [loss.item(), evaluated.item()]
        found[name] = (*([summed(value) for value in sums] if way else sums), gradients)
    return found


@pytest.mark.parametrize("way", ["product", *slow("ring 4", "ulysses 4", "gathered 2")])
def test_rows_of_every_kind(way):
    expected = measure(None, list(ROWS), torch.float64)
    for found in on_ranks(WAYS[way][0].world_size, measure, WAYS[way], list(ROWS), torch.float64):
        for name, (loss, evaluated, gradients) in expected.items():
            assert found[name][0] == pytest.approx(loss, rel=1e-10)
            assert found[name][1] == pytest.approx(evaluated, rel=1e-10)
            worst = max(relative(found[name][2][key], gradient) for key, gradient in gradients.items())
            assert worst < 1e-10, (name, worst)


@pytest.mark.parametrize("way", ["ring 2", *slow("ulysses 2", "gathered 2")])
def test_half_precision(way):
    """As far from float32 as one process in half precision is, give or take a third."""
    names = ["very different"]
    exact, half = (measure(None, names, dtype)[names[0]] for dtype in (torch.float32, torch.bfloat16))
    ours = on_ranks(2, measure, WAYS[way], names, torch.bfloat16)[0][names[0]]
    assert ours[0] == pytest.approx(exact[0], rel=5e-3)
    flat = [torch.cat([found[2][name].float().flatten() for name in exact[2]]) for found in (exact, half, ours)]
    assert 0 < relative(flat[2], flat[0]) < 1.33 * relative(flat[1], flat[0])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ring 2", "ulysses 2"])
def test_compiled_layers(way):
    names = ["very different", "one document"]
    expected = measure(None, names, torch.float64)
    found = on_ranks(2, measure, WAYS[way], names, torch.float64, True)[0]
    for name in names:
        worst = max(relative(found[name][2][key], gradient) for key, gradient in expected[name][2].items())
        assert found[name][0] == pytest.approx(expected[name][0], rel=1e-10) and worst < 1e-10
