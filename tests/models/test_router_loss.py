"""The routers' auxiliary loss: value and gradient from the paper's formula, what counts as a token, what is refused."""

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from swift.config.training import ObjectiveConfig
from swift.core.errors import ModelError, UsageError
from swift.data.loading.batch import Layout, make_batch
from swift.data.rows import RowRef
from swift.models.attention import VARLEN
from swift.models.head import find_decoder, find_head
from swift.models.prepare import enable_checkpointing
from swift.models.router import RouterLoss, carry
from swift.objectives import build_objective
from swift.training.module import Objectives, TrainModule

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON, num_experts=6, moe_intermediate_size=32),
    "gpt_oss": lambda: tf.GptOssConfig(**COMMON, num_local_experts=6),
    "sigmoid": lambda: tf.Glm4MoeConfig(
        **COMMON, n_routed_experts=6, moe_intermediate_size=32, first_k_dense_replace=1
    ),
}


def build(kind, dtype=torch.float64):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(
        KINDS[kind](), dtype=dtype, attn_implementation=VARLEN, experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(std=0.5)
    return model.train()


def train_module(model, coefficient=1.0):
    objective = build_objective(ObjectiveConfig())
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    return TrainModule(
        model,
        decoder=find_decoder(causal_lm),
        head=find_head(causal_lm),
        objectives=Objectives(objective, objective.evaluation()),
        router_loss=RouterLoss(causal_lm, coefficient),
    ).train()


def batch_of(lengths=(11, 5, 8), padding_free=False):
    generator = torch.Generator().manual_seed(3)
    examples = [
        (torch.randint(3, 97, (n,), generator=generator, dtype=torch.int32).numpy(), torch.ones(n).numpy())
        for n in lengths
    ]
    refs = [RowRef("t", number) for number in range(len(lengths))]
    return make_batch(examples, refs, Layout(padding_free=padding_free))


def by_formula(model, kind, batch):
    """Mean over layers of N sum_e f_e P_e, from the logits that the library records."""
    output = find_decoder(model)(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_router_logits=True, use_cache=False
    )
    layers = []
    for logits in output.router_logits:
        real = logits[batch.attention_mask.flatten()]
        scores = real.sigmoid() if kind == "sigmoid" else real.softmax(-1)
        chosen = scores.topk(2, dim=-1).indices  # the correction bias is zero, and there is one group
        f = [(chosen == e).sum() / chosen.numel() for e in range(6)]
        p = (scores / scores.sum(-1, keepdim=True)).mean(0)
        layers.append(6 * sum(f[e] * p[e] for e in range(6)))
    return sum(layers) / len(layers)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_value_and_gradient_are_the_formula_s(kind):
    batch, model = batch_of(), build(kind)
    module = train_module(model, coefficient=20.0)
    module(batch).loss_sum.backward()
    both = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    module.router_loss, router_loss = None, module.router_loss
    plain = module(batch)
    plain.loss_sum.backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = by_formula(model, kind, batch)
    (expected * 20.0 * batch.weight).backward()
    for name, parameter in model.named_parameters():
        ours = both[name] - alone[name]
        theirs = torch.zeros_like(ours) if parameter.grad is None else parameter.grad
        # models take norms and softmax in fp32 whatever they are loaded in
        assert (ours - theirs).norm() <= 1e-5 * both[name].norm(), name
        if name.endswith(("gate.weight", "router.weight")):
            assert theirs.norm() > 0.1 * alone[name].norm(), name

    module.router_loss = router_loss
    terms = module(batch)
    value = terms.sums["router_aux_loss"] / terms.counts["router_aux_loss"]
    assert float(value) == pytest.approx(expected.item(), rel=1e-6)
    assert float(value) > 1.01
    torch.testing.assert_close(terms.loss_sum, plain.loss_sum)  # what is shown stays the objective's


def test_an_even_router_costs_one():
    model = build("qwen3_moe")
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.zero_()
    terms = train_module(model)(batch_of())
    assert float(terms.sums["router_aux_loss"]) / terms.counts["router_aux_loss"] == pytest.approx(1.0)


def test_padding_is_no_token():
    model = build("qwen3_moe")
    padded, packed = (train_module(model)(batch_of(padding_free=free)) for free in (False, True))
    torch.testing.assert_close(padded.sums["router_aux_loss"], packed.sums["router_aux_loss"])
    segments = batch_of(padding_free=True)  # a row whose last segment is padding
    tail = 7
    more = make_batch(
        [(ids, weights) for ids, weights in _examples(segments)] + [(_zeros(tail), _zeros(tail).astype("float32"))],
        segments.refs,
        Layout(padding_free=True),
    )
    tokens = segments.input_ids.numel()
    more.attention_mask = (torch.arange(tokens + tail) < tokens)[None]
    filled = train_module(model)(more)
    torch.testing.assert_close(filled.sums["router_aux_loss"], packed.sums["router_aux_loss"])


def _examples(batch):
    for start, end in zip(batch.borders, batch.borders[1:]):
        yield batch.input_ids[0, start:end].int().numpy(), torch.ones(end - start).numpy()


def _zeros(count):
    return torch.zeros(count, dtype=torch.int32).numpy()


def test_a_batch_without_examples_adds_nothing():
    module = train_module(build("qwen3_moe"))
    terms = module(make_batch([], [], Layout()))
    terms.loss_sum.backward()
    assert float(terms.sums["router_aux_loss"]) == 0 and terms.counts["router_aux_loss"] == 0
    assert all(p.grad.abs().max() == 0 for p in module.parameters() if p.grad is not None)


def test_recomputed_activations_change_nothing():
    gradients = []
    for recompute in (False, True):
        model = build("qwen3_moe")
        if recompute:
            enable_checkpointing(model)
        module = train_module(model)
        module(batch_of()).loss_sum.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, first in gradients[0].items():
        torch.testing.assert_close(first, gradients[1][name], rtol=1e-9, atol=1e-12, msg=name)


def test_evaluation_has_no_auxiliary_loss():
    module = train_module(build("qwen3_moe")).eval()
    with torch.no_grad():
        assert "router_aux_loss" not in module(batch_of()).sums


def test_half_precision_is_recognised_and_close():
    exact = train_module(build("qwen3_moe", torch.float32))(batch_of())
    half = train_module(build("qwen3_moe", torch.float32).bfloat16())(batch_of())
    assert float(half.sums["router_aux_loss"]) == pytest.approx(float(exact.sums["router_aux_loss"]), rel=0.05)


def test_activations_carry_a_loss_with_them():
    weight = torch.tensor(3.0, requires_grad=True)
    hidden = torch.tensor([1.0, 2.0], requires_grad=True)
    carried = carry(hidden * 2, weight**2)
    carried.backward(torch.tensor([10.0, 20.0]))
    assert hidden.grad.tolist() == [20.0, 40.0] and weight.grad.item() == 6.0


class TestRefusals:
    def test_a_dense_model(self):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON))
        with pytest.raises(UsageError, match="LlamaForCausalLM has no routers"):
            RouterLoss(model, 0.1)

    def test_routers_that_weigh_in_an_unknown_way(self):
        config = tf.PhimoeConfig(**{k: v for k, v in COMMON.items() if k != "head_dim"}, num_local_experts=4)
        model = tf.PhimoeForCausalLM(config)
        model.set_attn_implementation(VARLEN)
        with pytest.raises(ModelError, match=r"Phimoe.* turn logits into weights"):
            train_module(model)(batch_of())

    def test_routers_that_do_not_tell_their_choice(self):
        config = tf.JetMoeConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=16, pad_token_id=0
        )
        model = tf.JetMoeForCausalLM(config)
        with pytest.raises(ModelError, match="JetMoeTopKGating doesn't tell"):
            train_module(model)(batch_of())

    def test_an_adapter_on_a_router(self):
        config = tf.PhimoeConfig(**{k: v for k, v in COMMON.items() if k != "head_dim"}, num_local_experts=4)
        whole = get_peft_model(tf.PhimoeForCausalLM(config), LoraConfig(target_modules=["router"]))
        with pytest.raises(ModelError, match="router with an adapter"):
            RouterLoss(whole.get_base_model(), 0.1)
