"""Attention over shared sequences, alone: forward and gradients in float64, bytes sent, two models, what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from pool import on_ranks
from test_context_kernels import dense, difference, draw
from torch import nn

from swift.config.degrees import Degrees
from swift.core.errors import ModelError
from swift.distributed.context import attention as context
from swift.distributed.context.batches import join_shares, share_index
from swift.distributed.context.kernels import Inputs, Scores
from swift.distributed.mesh import Axis, Mesh, build_mesh
from swift.distributed.spread import Spread
from swift.distributed.traffic import TRAFFIC
from swift.models.attention import segment_arguments

LENGTH = 96
ROWS = {
    "one document": [0, 96],
    "40 tiny ones": [0, *range(1, 30), *range(31, 53, 2), 96],
    "borders on chunks": [0, 12, 24, 48, 72, 84, 96],
    "shorter than a chunk": [0, 3, 12, 13, 20, 26, 37, 41, 49, 57, 66, 75, 86, 96],
    "very different": [0, 2, 60, 63, 64, 96],
}
PLAIN: dict = {}
EVERYTHING = {"sliding_window": 17, "softcap": 2.0, "s_aux": True}


def sharing(mesh: Mesh, gather_kv: bool) -> nn.Module:
    module = nn.Module()
    context._SHARING[module] = context._Sharing(mesh["ring"], mesh["ulysses"], gather_kv)
    return module


def errors(degrees: Degrees, gather_kv: bool, heads: tuple[int, int], options: dict, value_dim: int) -> dict:
    """Relative differences from the dense attention, per row: of the output, and of the gradients."""
    mesh = build_mesh(degrees, "cpu")
    module = sharing(mesh, gather_kv)
    found = {}
    for name, borders in ROWS.items():
        *whole, sinks = draw(borders, *heads, value_dim)
        scores = Scores(0.3, options.get("sliding_window"), options.get("softcap"))
        has_sinks = "s_aux" in options
        expected = dense(Inputs(*whole), borders, scores, sinks if has_sinks else None)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        theirs = torch.autograd.grad((expected * grad).sum(), [*whole, sinks] if has_sinks else whole)
        mine = share_index(LENGTH, mesh)
        query, key, value = (t.detach()[None, :, mine].requires_grad_() for t in whole)
        arguments = options | ({"s_aux": sinks} if has_sinks else {}) | segment_arguments(borders, query.device)
        output, _ = context.context_attention(module, query, key, value, None, 0.3, **arguments)
        wanted = [query, key, value] + ([sinks] if has_sinks else [])
        ours = torch.autograd.grad((output[0].transpose(0, 1) * grad[:, mine]).sum(), wanted)
        joined = [join_shares(t.transpose(1, 2), mesh)[0].transpose(0, 1) for t in ours[:3]]
        if has_sinks:  # summed over ranks, as every parameter's gradient is
            torch.distributed.all_reduce(ours[3])
            joined.append(ours[3])
        whole_output = join_shares(output, mesh)[0].transpose(0, 1)
        pairs = zip([whole_output, *joined], [expected, *theirs], strict=True)
        found[name] = [difference(a, b) for a, b in pairs]
    return found


WAYS = {
    "ring 2": (Degrees(ring=2), False, (4, 2), PLAIN, 16),
    "ring 3": (Degrees(ring=3), False, (2, 2), PLAIN, 16),
    "ring 4": (Degrees(ring=4), False, (3, 1), PLAIN, 16),
    "ring 2, everything": (Degrees(ring=2), False, (4, 2), EVERYTHING, 24),
    "ring 4, everything": (Degrees(ring=4), False, (4, 2), EVERYTHING, 24),
    "ulysses 2": (Degrees(ulysses=2), False, (4, 2), PLAIN, 16),
    "ulysses 4, heads repeated": (Degrees(ulysses=4), False, (12, 6), PLAIN, 16),
    "ulysses 4, one key head": (Degrees(ulysses=4), False, (4, 1), EVERYTHING, 24),
    "product": (Degrees(ring=2, ulysses=2), False, (6, 3), EVERYTHING, 16),
    "gathered 2": (Degrees(ring=2), True, (4, 2), EVERYTHING, 24),
    "gathered 4": (Degrees(ring=4), True, (3, 1), PLAIN, 16),
}


FAST = {"ring 2, everything", "ring 4", "ulysses 4, one key head", "product", "gathered 2"}


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in FAST else [pytest.mark.slow]) for w in WAYS])
def test_shares_attend_as_the_whole_row_does(way):
    for found in on_ranks(WAYS[way][0].world_size, errors, *WAYS[way]):
        wrong = {row: values for row, values in found.items() if not max(values) < 1e-12}
        assert not wrong, wrong


def test_borders_that_change_in_place_are_read_again():
    sharing = context._Sharing(Axis("ring", 2, 1), Axis("ulysses"), False)
    borders = torch.tensor([0, 4, 8])
    first = sharing.steps(borders, None)
    assert sharing.steps(borders, None) is first and first != sharing.steps(borders, 2)
    borders[1] = 6
    assert sharing.steps(borders, None) != first


HEADS, KV_HEADS, DIM = 4, 2, 16


def sent(degrees: Degrees, gather_kv: bool, dtype: torch.dtype) -> list:
    """Bytes and calls by axis and kind, after the forward pass and after the backward pass."""
    mesh = build_mesh(degrees, "cpu")
    module = sharing(mesh, gather_kv)
    share = LENGTH // degrees.cp
    query = torch.randn(1, HEADS, share, DIM, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, KV_HEADS, share, DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    TRAFFIC.reset()
    counts = []
    arguments = segment_arguments([0, 50, LENGTH], query.device)
    output, _ = context.context_attention(module, query, key, value, None, **arguments)
    counts.append((dict(TRAFFIC.bytes), dict(TRAFFIC.calls)))
    TRAFFIC.reset()
    output.sum().backward()
    counts.append((dict(TRAFFIC.bytes), dict(TRAFFIC.calls)))
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_round_the_ring(dtype):
    size = 4
    kv = 2 * KV_HEADS * (LENGTH // size) * DIM * dtype.itemsize
    gradients = 2 * KV_HEADS * (LENGTH // size) * DIM * 4
    for forward, backward in on_ranks(size, sent, Degrees(ring=size), False, dtype):
        assert forward == ({("ring", "send"): 3 * kv}, {("ring", "send"): 3})
        assert backward == ({("ring", "send"): 3 * (kv + gradients)}, {("ring", "send"): 6})


def test_bytes_of_exchanged_heads():
    share = LENGTH // 2 * DIM * 4
    expected = {("ulysses", "all_to_all"): (2 * HEADS + 2 * KV_HEADS) * share / 2}
    for forward, backward in on_ranks(2, sent, Degrees(ulysses=2), False, torch.float32):
        assert forward == backward == (expected, {("ulysses", "all_to_all"): 4})


def test_bytes_of_gathered_keys():
    kv = 2 * KV_HEADS * LENGTH // 2 * DIM * 4
    for forward, backward in on_ranks(2, sent, Degrees(ring=2), True, torch.float32):
        assert forward == ({("ring", "all_gather"): kv}, {("ring", "all_gather"): 2})
        assert backward == ({("ring", "reduce_scatter"): kv}, {("ring", "reduce_scatter"): 2})


def under_autocast(degrees: Degrees) -> tuple[torch.dtype, float]:
    """Type of the output, and its difference from float64, where queries are left in float32."""
    mesh = build_mesh(degrees, "cpu")
    borders = ROWS["very different"]
    *whole, _ = draw(borders, 4, 2)
    expected = dense(Inputs(*whole), borders, Scores(0.3), None)
    shares = [t.detach()[None, :, share_index(LENGTH, mesh)].float() for t in whole]
    module = sharing(mesh, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = context.context_attention(module, *shares, None, 0.3, **segment_arguments(borders, expected.device))
    return output.dtype, difference(join_shares(output, mesh)[0].transpose(0, 1), expected)


def test_autocast_decides_the_type():
    for dtype, error in on_ranks(2, under_autocast, Degrees(ring=2)):
        assert dtype == torch.bfloat16 and 1e-4 < error < 1e-2


# --- setting it up ---


def llama(**changes) -> tf.LlamaForCausalLM:
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = tf.LlamaConfig(**(shape | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8} | changes))
    return tf.LlamaForCausalLM(config).eval()


def hidden_of(model: nn.Module, ids: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    mine = share_index(ids.shape[1], mesh)
    with torch.no_grad():
        states = model.model(
            input_ids=ids[:, mine],
            position_ids=mine[None],
            use_cache=False,
            **segment_arguments([0, ids.shape[1]], ids.device),
        ).last_hidden_state
    return join_shares(states, mesh)


def two_models() -> list[float]:
    """One shared as a ring, the other by heads, a third not at all; used in turn."""
    ids = torch.arange(24)[None]
    whole = llama()
    whole.set_attn_implementation("eager")
    expected = whole.model(input_ids=ids).last_hidden_state
    models = []
    for degrees in (Degrees(ring=2), Degrees(ulysses=2), Degrees(dp_shard=2)):
        mesh = build_mesh(degrees, "cpu")
        model = llama()
        context.use_context_attention(model, Spread(mesh))
        models.append((model, mesh))
    return [difference(hidden_of(model, ids, mesh), expected) for model, mesh in models * 2]


def test_models_on_different_meshes_keep_apart():
    assert max(max(values) for values in on_ranks(2, two_models)) < 1e-5


def place(ring: int = 1, ulysses: int = 1, tp: int = 1) -> Spread:
    sizes = {"ring": ring, "ulysses": ulysses, "tp": tp}
    return Spread(Mesh(axes={name: Axis(name, size) for name, size in sizes.items()}))


def test_nothing_shared_is_plain_attention():
    model = llama()
    context.use_context_attention(model, place())
    assert model.config._attn_implementation == "varlen"


@pytest.mark.parametrize(
    ("model", "spread", "words"),
    [
        (llama(attention_dropout=0.1), place(ring=2), "ulysses or allgather"),
        (llama(), place(ulysses=3), "4 attention heads"),
        (llama(), place(ulysses=4, tp=2), "2 attention heads"),
        (llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), place(2), "type dynamic"),
    ],
    ids=["dropout", "heads", "heads of a tensor-parallel rank", "rotary"],
)
def test_what_cannot_be_shared_is_refused(model, spread, words):
    with pytest.raises(ModelError, match=words):
        context.use_context_attention(model, spread)


def test_a_recurrent_model_is_refused():
    config = tf.Qwen3NextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"layers of type linear_attention[\s\S]*sequence_parallel_size 1"):
        context.use_context_attention(model, place(ring=2))


def test_a_gathering_model_may_drop_weights():
    model = llama(attention_dropout=0.1)
    context.use_context_attention(model, place(ring=2), gather_kv=True)
    assert model.config._attn_implementation == "context"


def test_a_ring_never_drops_weights_silently():
    module = nn.Module()
    context._SHARING[module] = context._Sharing(Axis("ring", 2), Axis("ulysses"), False)
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ModelError, match="can't drop weights"):
        context.context_attention(module, *tensors, None, dropout=0.1, **segment_arguments([0, 8], tensors[0].device))


def test_borders_are_needed():
    module = nn.Module()
    with pytest.raises(ModelError, match="which ranks share"):
        context.context_attention(module, *[torch.zeros(1, 2, 4, 8)] * 3, None)
