"""Packed = separate: loss and every gradient of concatenated examples equal those of one forward per example.

The reference is the model's own `forward` with its own attention and full logits, one example at a time.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import CONFIGS, build

from swift.core.errors import ModelError, UsageError
from swift.data.loading.batch import Layout, collate
from swift.data.rows import RowRef
from swift.data.units import NO_NOTES
from swift.models.attention import prove_varlen, varlen_unsupported_reason
from swift.models.head import find_decoder, find_head, prove_head
from swift.models.prepare import choose_attention, compile_layers, enable_checkpointing
from swift.objectives import CausalLM
from swift.training.module import Objectives, TrainModule


class Examples:
    """A few random examples with prompt parts that aren't trained."""

    def __init__(self, lengths=(13, 5, 21, 2, 9), vocab=97):
        generator = np.random.default_rng(0)
        self.lengths = np.asarray(lengths, dtype=np.int32)
        self.items = []
        for n in lengths:
            weights = np.ones(n, dtype=np.float32)
            weights[: max(1, n // 3)] = 0
            self.items.append((generator.integers(3, vocab, n).astype(np.int32), weights))

    def __len__(self):
        return len(self.items)

    def notes(self, index: int) -> np.ndarray:
        return NO_NOTES

    def tokens(self, index):
        return self.items[index]

    def ref(self, index):
        return RowRef("rows.jsonl", index + 1)


def separate_forwards(model, examples):
    """Loss sum and gradients from one plain forward per example."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    total = 0
    for index in range(len(examples)):
        ids, weights = examples.tokens(index)
        logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0, :-1]
        losses = F.cross_entropy(logits.to(torch.float64), torch.from_numpy(ids).long()[1:], reduction="none")
        total = total + (losses * torch.from_numpy(weights)[1:]).sum()
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def together(model, examples, layout, *, checkpointing=False):
    """Loss sum and gradients through the training module."""
    decoder = find_decoder(model)
    if checkpointing:
        enable_checkpointing(model)
    module = TrainModule(
        model, decoder=decoder, head=find_head(model), objectives=Objectives(CausalLM(chunk=7), CausalLM())
    )
    module.train()
    terms = module(collate(examples, list(range(len(examples))), layout))
    terms.loss_sum.backward()
    return terms.loss_sum.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours, reference, rtol):
    assert ours[0] == pytest.approx(reference[0], rel=rtol)
    assert ours[1].keys() == reference[1].keys()
    for name, gradient in reference[1].items():
        difference = (ours[1][name] - gradient).norm() / gradient.norm().clamp_min(1e-8)
        assert difference <= rtol * 10, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_concatenated_equals_separate(name):
    model = build(name, torch.float64)
    examples = Examples()
    reference = separate_forwards(model, examples)
    prove_head(model, find_decoder(model), find_head(model))
    padding_free, notes = choose_attention(model, "auto", padding_free=None, packing=True)
    assert padding_free, notes
    assert_equal(together(model, examples, Layout()), reference, 1e-7)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2-softcap-window"])
def test_concatenated_equals_separate_in_fp32(name):
    model = build(name)
    examples = Examples()
    reference = separate_forwards(model, examples)
    choose_attention(model, "auto", padding_free=None, packing=True)
    assert_equal(together(model, examples, Layout()), reference, 1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_padded_equals_separate(name):
    model = build(name, torch.float64)
    reference = separate_forwards(model, Examples())
    padding_free, _ = choose_attention(model, "auto", padding_free=False, packing=False)
    assert not padding_free
    assert_equal(together(model, Examples(), Layout(padding_free=False)), reference, 1e-7)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_recompute_changes_nothing(name):
    model = build(name, torch.float64)
    reference = separate_forwards(model, Examples())
    choose_attention(model, "auto", padding_free=None, packing=True)
    assert_equal(together(model, Examples(), Layout(), checkpointing=True), reference, 1e-7)


@pytest.mark.slow
def test_compiled_layers_equal_and_dont_recompile_for_new_lengths():
    from torch._dynamo.utils import counters

    model = build("llama")
    choose_attention(model, "auto", padding_free=None, packing=True)
    decoder = find_decoder(model)
    references = [
        (lengths, separate_forwards(model, Examples(lengths))) for lengths in [(13, 5), (20, 9, 3), (40,), (7,)]
    ]
    compile_layers(decoder)
    graphs = []
    for lengths, reference in references:
        model.zero_grad(set_to_none=True)
        assert_equal(together(model, Examples(lengths), Layout()), reference, 1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], f"compiled again for new lengths: {graphs}"


def test_contamination_would_be_seen():
    """The check itself: without segment borders the proof must fail."""
    model = build("llama")
    choose_attention(model, "auto", padding_free=None, packing=True)

    class Forgetful(torch.nn.Module):
        def __init__(self, decoder):
            super().__init__()
            self.decoder = decoder

        def forward(self, cu_seq_lens_q=None, **kwargs):
            return self.decoder(**kwargs)

    with pytest.raises(ModelError, match="concatenated examples"):
        prove_varlen(model, Forgetful(find_decoder(model)))


def test_models_with_a_recurrent_state_are_padded_or_refused():
    import transformers as tf

    torch.manual_seed(0)
    model = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4))
    assert varlen_unsupported_reason(model)
    padding_free, notes = choose_attention(model, "auto", padding_free=None, packing=False)
    assert not padding_free
    assert "padded" in notes[0]
    with pytest.raises(UsageError, match="--packing"):
        choose_attention(model, "auto", padding_free=None, packing=True)
