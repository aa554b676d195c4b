"""The proof that a model takes concatenated examples: what it tries, in which precision, and how it fails."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers as tf

from swift.core.errors import ModelError
from swift.models import attention_blocks
from swift.models.attention import VARLEN, SegmentAttentionFunction, prove_varlen, segment_attention
from swift.models.head import find_decoder
from swift.models.prepare import choose_attention

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip


def llama():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE)).eval()


def mistral(window):
    torch.manual_seed(0)
    config = tf.MistralConfig(**SHAPE, num_key_value_heads=4, sliding_window=window)
    return tf.MistralForCausalLM(config).eval()


class Altered(torch.nn.Module):
    """A decoder whose arguments are changed on the way, where examples are concatenated."""

    def __init__(self, decoder, **changes):
        super().__init__()
        self.decoder, self.changes, self.seen = decoder, changes, []

    def forward(self, **arguments):
        self.seen.append(arguments["input_ids"].shape[1])
        return self.decoder(**(arguments | (self.changes if "cu_seq_lens_q" in arguments else {})))


@pytest.mark.parametrize("window", [16, 64])
def test_a_sliding_window_is_tried(window):
    model = mistral(window)
    model.set_attn_implementation(VARLEN)
    prove_varlen(model, find_decoder(model))
    blind = Altered(find_decoder(model), max_length_q=1)  # no segment seems longer than the window
    with pytest.raises(ModelError, match="other hidden states"):
        prove_varlen(model, blind)
    assert max(blind.seen[1:]) > window


def test_a_large_window_is_proven_inside_only():
    model = mistral(200)
    model.set_attn_implementation(VARLEN)
    decoder = Altered(find_decoder(model))
    prove_varlen(model, decoder)
    assert max(decoder.seen[1:]) == 9


def test_the_proof_runs_in_the_precision_of_training():
    model, seen = llama(), []

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    padding_free, notes = choose_attention(model, "auto", padding_free=None, packing=True, autocast=autocast)
    assert padding_free and not notes
    assert set(seen) == {torch.bfloat16}


def test_a_refusal_inside_the_model_is_a_reason_to_pad(monkeypatch):
    model = llama()

    def refuse(*args, **kwargs):
        raise RuntimeError("Q/K/V should have\nthe same head size")

    monkeypatch.setattr("swift.models.attention._attend", refuse)
    padding_free, notes = choose_attention(model, "auto", padding_free=None, packing=False)
    assert not padding_free and "Q/K/V should have the same head size" in notes[0]
    assert model.config._attn_implementation == "sdpa" and not model.training
    with pytest.raises(ModelError, match="can't take concatenated examples") as caught:
        choose_attention(model, "auto", padding_free=None, packing=True)
    assert "--packing false" in caught.value.fix


def test_queries_and_values_of_different_sizes():
    """Latent attention (MLA): 24 numbers a head in queries and keys, 16 in values."""
    torch.manual_seed(0)
    config = tf.DeepseekV3Config(
        **SHAPE, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32,
    )  # fmt: skip
    model = tf.DeepseekV3ForCausalLM(config).eval()
    assert choose_attention(model, "auto", padding_free=None, packing=True) == (True, [])


def written_out(query, key, value, borders, scale):
    """Causal softmax attention within each segment, by plain operations."""
    group = query.shape[1] // key.shape[1]
    parts = []
    for start, end in pairwise(borders):
        q, k, v = (
            t[:, :, start:end] for t in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
        )
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        parts.append((q @ k.mT * scale).masked_fill(future, float("-inf")).softmax(3) @ v)
    return torch.cat(parts, 2)


@pytest.mark.parametrize("attend", [segment_attention, SegmentAttentionFunction.apply], ids=["operator", "function"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(170,), (64, 33), (1, 200, 160, 2), (161, 30)], ids=str)
def test_short_and_long_segments_are_those_of_the_formula(heads, lengths, attend):
    generator = torch.Generator().manual_seed(0)
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shapes = [(1, borders[-1], n, 8) for n in (heads[0], heads[1], heads[1])]
    ours = [torch.randn(s, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_() for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    output, _ = attend(*ours, torch.tensor(borders, dtype=torch.int32), 0.3)
    expected = written_out(*theirs, borders, 0.3)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (output * factor).sum().backward()
    (expected * factor).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-11, atol=1e-11)


def test_blocks_serve_the_lengths_and_types_they_are_faster_for():
    shortest, longest = attention_blocks.SHORTEST, attention_blocks.LONGEST
    lengths = (shortest - 1, shortest, attention_blocks.LONGEST_FORWARD + 1, longest, longest + 1)
    suits = attention_blocks.suits_blocks
    assert [suits(n, torch.float32, backward=True) for n in lengths] == [False, True, True, True, False]
    assert [suits(n, torch.float32, backward=False) for n in lengths] == [False, True, False, False, False]
    assert not suits(shortest, torch.bfloat16, backward=True)
