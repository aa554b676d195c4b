"""Shared prefixes = sequences written out: hidden states, gradients of inputs and parameters, and the proof of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers as tf

from swift.core.errors import ModelError
from swift.models import attention_segment
from swift.models.attention import VARLEN, segment_arguments, varlen_attention
from swift.models.head import find_decoder
from swift.models.prefix_attention import PrefixAttentionFunction, key_rows, prefix_attention
from swift.models.prefix_proof import lay_out, prove_prefixes, shares_prefixes
from swift.models.prepare import compile_layers, enable_checkpointing

COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen2-bias": lambda: tf.Qwen2Config(**COMMON),
    "qwen3-qk-norm": lambda: tf.Qwen3Config(**COMMON, head_dim=16),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mistral-window": lambda: tf.MistralConfig(**COMMON, sliding_window=8),
    "gemma2-softcap-window": lambda: tf.Gemma2Config(
        **COMMON, head_dim=16, sliding_window=8, attn_logit_softcapping=20.0
    ),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "cohere": lambda: tf.CohereConfig(**COMMON),
    "granite": lambda: tf.GraniteConfig(**COMMON),
    "gpt2-learned-positions": lambda: tf.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "deepseek-v3-mla": lambda: tf.DeepseekV3Config(
        **(COMMON | {"num_key_value_heads": 4}), q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1,
    ),
    "gpt-oss-sinks": lambda: tf.GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
}  # fmt: skip

# Prefixes with one to four parts; without a prefix; one token long; longer than the windows above.
SHAPES = ((7, (5, 3)), (0, (4,)), (1, (2, 1, 6)), (3, (9,)), (0, (2, 3)), (11, (4, 1, 12, 2)))


def build(kind, dtype=torch.float64, attention=VARLEN):
    torch.manual_seed(0)
    config = KINDS[kind]()
    extra = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
    return tf.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention, **extra).eval()


def rows_of_sequences(shapes):
    """For each sequence the rows that it consists of, and how many of them an earlier sequence had already."""
    start, found = 0, []
    for prefix, parts in shapes:
        own = start + prefix
        for number, length in enumerate(parts):
            rows = [*range(start, start + prefix), *range(own, own + length)]
            found.append((rows, prefix if number else 0))
            own += length
        start = own
    return found


def gradients(model, leaf):
    return {"inputs": leaf.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def shared(model, inputs, weights, shapes):
    """Hidden states of all rows, and the gradients of their weighted sum."""
    leaf = inputs.clone().requires_grad_()
    borders, prefixes, positions = lay_out(shapes)
    hidden = find_decoder(model)(
        inputs_embeds=leaf[None],
        position_ids=torch.tensor(positions)[None],
        use_cache=False,
        **segment_arguments(borders, leaf.device, prefixes=prefixes),
    ).last_hidden_state[0]
    model.zero_grad(set_to_none=True)
    (hidden * weights).sum().backward()
    return hidden.detach(), gradients(model, leaf)


def written_out(model, inputs, weights, shapes):
    """The same by a plain forward pass for each sequence, with the model's own attention."""
    leaf = inputs.clone().requires_grad_()
    states = torch.zeros_like(inputs)
    model.zero_grad(set_to_none=True)
    for rows, known in rows_of_sequences(shapes):
        hidden = find_decoder(model)(inputs_embeds=leaf[rows][None], use_cache=False).last_hidden_state[0]
        new = rows[known:]
        states[new] = hidden[known:].detach()
        (hidden[known:] * weights[new]).sum().backward()
    return states, gradients(model, leaf)


def assert_equal(ours, reference, tolerance):
    pairs = {"hidden states": (ours[0], reference[0])}
    assert ours[1].keys() == reference[1].keys()
    pairs |= {name: (ours[1][name], gradient) for name, gradient in reference[1].items()}
    for name, (mine, expected) in pairs.items():
        difference = ((mine - expected).norm() / expected.norm().clamp_min(1e-8)).item()
        assert difference <= tolerance, f"{name}: {difference:.1e}"


def random_rows(shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    tokens = lay_out(shapes)[0][-1]
    return (torch.randn(tokens, 64, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


@pytest.mark.parametrize("kind", KINDS)
def test_sharing_a_prefix_changes_nothing(kind):
    inputs, weights = random_rows(SHAPES)
    reference = written_out(build(kind, attention="eager"), inputs, weights, SHAPES)
    model = build(kind)
    assert shares_prefixes(model) is None
    # norms and router weights are fp32 inside the library
    assert_equal(shared(model, inputs, weights, SHAPES), reference, 2e-6)


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "qwen3-moe"])
def test_layers_that_are_run_again_see_the_prefix_too(kind):
    inputs, weights = random_rows(SHAPES)
    reference = written_out(build(kind, attention="eager"), inputs, weights, SHAPES)
    model = build(kind)
    enable_checkpointing(model)
    runs = []
    find_decoder(model).layers[0].self_attn.register_forward_hook(lambda *args: runs.append(1))
    ours = shared(model.train(), inputs, weights, SHAPES)
    assert len(runs) == 2  # once more for the backward pass
    assert_equal(ours, reference, 2e-6)


def test_long_prefixes_in_single_precision():
    shapes = ((200, (170, 33)), (40, (1, 64)))
    inputs, weights = random_rows(shapes, torch.float32)
    reference = written_out(build("llama", torch.float32, "eager"), inputs, weights, shapes)
    assert_equal(shared(build("llama", torch.float32), inputs, weights, shapes), reference, 1e-5)


def formula(query, key, value, shapes, scale, window=None):
    """Softmax attention of the whole row at once, under a mask that is worked out from whose token is whose."""
    unit, part, place = [], [], []
    for number, (prefix, parts) in enumerate(shapes):
        for own, length in enumerate((prefix, *parts)):
            unit += [number] * length
            part += [own] * length  # 0: the prefix
            place += [i + (prefix if own else 0) for i in range(length)]
    unit, part, place = (torch.tensor(t) for t in (unit, part, place))
    visible = (unit[:, None] == unit) & ((part[:, None] == part) | (part == 0)) & (place[:, None] >= place)
    if window is not None:
        visible &= place[:, None] - place < window
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return (query @ key.mT * scale).masked_fill(~visible, float("-inf")).softmax(3) @ value


def tensors(shapes, heads, dtype=torch.float64):
    """Query, key and value laid out as models lay them out, [1, tokens, heads, head_dim] transposed."""
    generator = torch.Generator().manual_seed(0)
    tokens = lay_out(shapes)[0][-1]
    sizes = [(1, tokens, n, 8) for n in (heads[0], heads[1], heads[1])]
    made = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for s in sizes)
    return [t.requires_grad_() for t in made]


def compare(output, ours, expected, theirs, tolerance):
    factor = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * factor.to(output.dtype)).sum().backward()
    (expected * factor).sum().backward()
    for mine, reference in [
        (output, expected),
        *((t.grad, u.grad) for t, u in zip(ours, theirs, strict=True)),
    ]:
        assert ((mine - reference).norm() / reference.norm().clamp_min(1)).item() < tolerance


LONG = ((33, (40, 0, 7, 1)), (170, (65,)), (0, (165,)), (1, (1, 1)))


@pytest.mark.parametrize("attend", [prefix_attention, PrefixAttentionFunction.apply], ids=["operator", "function"])
@pytest.mark.parametrize("kernel", ["products", "flash"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
def test_the_formula(heads, kernel, attend, monkeypatch):
    if kernel == "flash":  # what half types take; in float64 its merge can be held to the last digits
        monkeypatch.setattr(attention_segment, "_in_blocks", lambda *args, **kwargs: False)
    ours = tensors(LONG, heads)
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    borders, prefixes, _ = lay_out(LONG)
    segments = (torch.tensor(t, dtype=torch.int32) for t in (borders, prefixes))
    output, _ = attend(*ours, *segments, 0.3)
    compare(output, ours, formula(*theirs, LONG, 0.3), theirs, 1e-12)


def test_the_formula_in_half_precision():
    ours = tensors(LONG, (6, 2), torch.bfloat16)
    theirs = [t.detach().double().requires_grad_() for t in ours]
    borders, prefixes, _ = lay_out(LONG)
    output, logsumexp = PrefixAttentionFunction.apply(
        *ours, *(torch.tensor(t, dtype=torch.int32) for t in (borders, prefixes)), 0.3
    )
    assert output.dtype == torch.bfloat16 and logsumexp.dtype == torch.float32
    compare(output, ours, formula(*theirs, LONG, 0.3), theirs, 8e-3)


def test_gradients_of_many_parts_are_added_up_in_single_precision():
    """Sums of as many equal numbers in half a type's digits would stop growing."""
    shapes = ((4, (2,) * 300),)
    ours = tensors(shapes, (2, 2), torch.bfloat16)
    theirs = [t.detach().double().requires_grad_() for t in ours]
    borders, prefixes, _ = lay_out(shapes)
    output, _ = PrefixAttentionFunction.apply(
        *ours, *(torch.tensor(t, dtype=torch.int32) for t in (borders, prefixes)), 0.01
    )
    output.sum().backward()
    formula(*theirs, shapes, 0.01).sum().backward()
    mine, expected = ours[2].grad[:, :, :4].double(), theirs[2].grad[:, :, :4]
    assert ((mine - expected).norm() / expected.norm()).item() < 4e-3


@pytest.mark.parametrize("window", [1, 6, 41, 60])
def test_a_window_counts_the_tokens_of_the_sequence(window):
    ours = tensors(LONG, (4, 2))
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    borders, prefixes, _ = lay_out(LONG)
    arguments = segment_arguments(borders, torch.device("cpu"), prefixes=prefixes)
    module = torch.nn.Identity()
    output, _ = varlen_attention(module, *ours, None, 0.3, sliding_window=window, **arguments)
    compare(output.transpose(1, 2), ours, formula(*theirs, LONG, 0.3, window), theirs, 1e-12)


def test_a_window_matters_where_only_prefix_and_part_together_are_longer():
    shapes = ((6, (5, 4)),)
    ours = tensors(shapes, (2, 2))
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    borders, prefixes, _ = lay_out(shapes)
    arguments = segment_arguments(borders, torch.device("cpu"), prefixes=prefixes)
    assert (arguments["max_length_q"], arguments["max_length_k"]) == (6, 11)
    output, _ = varlen_attention(torch.nn.Identity(), *ours, None, 0.3, sliding_window=8, **arguments)
    compare(output.transpose(1, 2), ours, formula(*theirs, shapes, 0.3, 8), theirs, 1e-12)


def test_dropped_weights_are_those_of_keys_that_are_seen():
    """With one-hot values the output is the weights: about half are 0, the others twice what they were."""
    shapes = ((40, (30, 20)),)
    query, key, _ = (t.detach() for t in tensors(shapes, (4, 4)))
    tokens = query.shape[2]
    value = torch.eye(tokens, dtype=torch.float64).expand(1, 4, tokens, tokens)
    borders, prefixes, _ = lay_out(shapes)
    arguments = segment_arguments(borders, torch.device("cpu"), prefixes=prefixes)
    torch.manual_seed(0)
    output, _ = varlen_attention(torch.nn.Identity(), query, key, value, None, 0.3, dropout=0.5, **arguments)
    weights, expected = output.transpose(1, 2), formula(query, key, value, shapes, 0.3)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], 2 * expected[kept])
    assert 0.45 < kept.sum() / (expected != 0).sum() < 0.55


@pytest.mark.parametrize(
    ("borders", "prefixes", "said"),
    [
        ([0, 4, 6], [(0, 0)], "1 prefixes for 2 segments"),
        ([0, 4, 6], [(0, 0), (0, 5)], "from row 4 can't see rows 0 to 5"),
        ([0, 4, 6], [(0, 2), (0, 4)], "from row 0 can't see rows 0 to 2"),
        ([0, 4, 6], [(0, 0), (3, 2)], "from row 4 can't see rows 3 to 2"),
    ],
)
def test_a_prefix_comes_before_its_segment(borders, prefixes, said):
    with pytest.raises(ValueError, match=said):
        segment_arguments(borders, torch.device("cpu"), prefixes=prefixes)


def test_rows_of_keys_for_kernels_with_borders_of_their_own():
    """What CUDA is given: each sequence's keys end to end, with their borders."""
    borders, prefixes, _ = lay_out(((3, (2, 1)), (0, (2,))))
    arguments = segment_arguments(borders, torch.device("meta"), prefixes=prefixes)
    assert {k: tuple(t.shape) for k, t in zip("rb", arguments["prefix_keys"], strict=True)} == {"r": (14,), "b": (5,)}
    assert key_rows(borders, prefixes) == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]


class Altered(torch.nn.Module):
    """A decoder whose arguments are changed on the way, where prefixes are shared."""

    def __init__(self, decoder, change):
        super().__init__()
        self.decoder, self.change = decoder, change

    def forward(self, **arguments):
        if "prefix_spans" in arguments:
            self.change(arguments)
        return self.decoder(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        lambda arguments: arguments.pop("prefix_spans"),
        lambda arguments: arguments["prefix_spans"][:, 1].sub_(1).clamp_(min=0),
        lambda arguments: arguments.pop("position_ids"),
        lambda arguments: arguments.update(max_length_k=1),  # no sequence seems longer than the window
    ],
    ids=["forgotten", "short", "positions", "window"],
)
def test_the_proof_sees_what_goes_wrong(change):
    model = build("mistral-window", torch.float32)
    prove_prefixes(model, find_decoder(model))
    with pytest.raises(ModelError, match="other hidden states"):
        prove_prefixes(model, Altered(find_decoder(model), change))
    assert model.config._attn_implementation == VARLEN


def test_the_proof_runs_in_the_precision_of_training():
    model, seen = build("llama", torch.float32), []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    prove_prefixes(model, find_decoder(model), autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert set(seen) == {torch.bfloat16}


def test_models_that_cant_share_say_why():
    model = build("llama", torch.float32)
    model.set_attn_implementation("sdpa")
    assert "sdpa" in shares_prefixes(model)
    mamba = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4))
    assert "linear_attention" in shares_prefixes(mamba)
    model = build("llama", torch.float32)
    model.config.is_causal = False
    assert "causal" in shares_prefixes(model)


@pytest.mark.slow
def test_compiled_layers_equal_and_dont_recompile_for_other_shapes():
    from torch._dynamo.utils import counters

    several = [((7, (5, 3)),), SHAPES, ((20, (9, 4, 2)), (3, (2,))), ((40, (1, 30)),), ((0, (3,)), (5, (6, 7)))]
    expected = []
    for shapes in several:
        expected.append(
            written_out(build("llama", torch.float32, "eager"), *random_rows(shapes, torch.float32), shapes)
        )
    model = build("llama", torch.float32)
    compile_layers(find_decoder(model))
    graphs = []
    for shapes, reference in zip(several, expected, strict=True):
        inputs, weights = random_rows(shapes, torch.float32)
        leaf = inputs.clone().requires_grad_()
        borders, prefixes, positions = lay_out(shapes)
        hidden = find_decoder(model)(
            inputs_embeds=leaf[None], position_ids=torch.tensor(positions)[None], use_cache=False,
            **segment_arguments(borders, leaf.device, prefixes=prefixes, lengths=False),
        ).last_hidden_state[0]  # fmt: skip
        model.zero_grad(set_to_none=True)
        (hidden * weights).sum().backward()
        assert_equal((hidden.detach(), gradients(model, leaf)), reference, 1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], f"compiled again for new lengths: {graphs}"


def test_segments_are_laid_out_as_said():
    borders, prefixes, positions = lay_out(((3, (2, 1)), (0, (2,))))
    assert [end - start for start, end in pairwise(borders)] == [3, 2, 1, 2]
    assert prefixes == [(0, 0), (0, 3), (0, 3), (0, 0)]
    assert positions == [0, 1, 2, 3, 4, 3, 0, 1]
