"""From `TunerConfig` to something trainable: every kind, every start, what is refused, and exact continuation."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from fixtures import build_tiny_model
from safetensors.torch import load_file

from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, UsageError
from swift.models.adapters import LoRAConfig, Swift, read_adapter_config
from swift.models.loading import load_model, load_tokenizer
from swift.models.merge import merge_checked
from swift.models.tuner_configs import TUNERS
from swift.models.tuners import (
    adapter_regularizer,
    adapter_state,
    adapter_step_callback,
    apply_tuner,
    load_adapter_state,
    set_total_steps,
    trainable_summary,
)

TOKENS = torch.tensor([[5, 9, 200, 31, 7, 7, 1000, 2000], [1, 2, 3, 4, 5, 6, 7, 8]])
SMALL = {"lora_dropout": 0.0, "lora_rank": 4, "vera_rank": 16, "fourier_n_frequency": 50, "oft_block_size": 8}


def load(folder, **settings):
    return load_model(folder, ModelConfig(**settings), dtype=torch.float32)


def train(model, steps=3, first=1, lr=1e-2):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    after, penalty = adapter_step_callback(model), adapter_regularizer(model)
    losses = []
    for step in range(first, first + steps):
        loss = torch.nn.functional.cross_entropy(model(TOKENS).logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        losses.append(loss.item())
        (loss + penalty() if penalty else loss).backward()
        optimizer.step()
        if after:
            after(step)
        optimizer.zero_grad()
    return losses


VARIANTS = {
    **{name: {"tuner_type": name} for name in TUNERS},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_weights": "gaussian"},
    "orthogonal": {"init_weights": "orthogonal"},
    "pissa": {"init_weights": "pissa"},
    "pissa_niter": {"init_weights": "pissa_niter_4"},
    "olora": {"init_weights": "olora"},
    "mica": {"init_weights": "mica"},
    "bat": {"tuner_type": "miss", "init_weights": "bat"},
    "embedding": {"target_modules": ["all-linear", "all-embedding"]},
    "saved": {"modules_to_save": ["norm"]},
    "regex": {"target_regex": r".*layers\.1\..*(q|v)_proj"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_learns_saves_and_merges(name, tiny_model_dir, tmp_path):
    torch.manual_seed(0)
    base = load(tiny_model_dir)
    expected = base(TOKENS).logits.detach()
    model = apply_tuner(base, TunerConfig(**{**SMALL, **VARIANTS[name]}), total_steps=10)
    assert model.training
    torch.testing.assert_close(model.eval()(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    losses = train(model.train(), steps=4)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        trained = model.eval()(TOKENS).logits
    Swift.save(model, tmp_path)
    fresh = Swift.from_pretrained(load(tiny_model_dir), tmp_path)
    torch.testing.assert_close(fresh(TOKENS).logits, trained, atol=1e-5, rtol=1e-4)
    plain = peft.PeftModel.from_pretrained(load(tiny_model_dir), str(tmp_path)).eval()
    torch.testing.assert_close(plain(TOKENS).logits, trained, atol=1e-5, rtol=1e-4)
    merged, agreement = merge_checked(fresh, TOKENS.tolist(), tolerance=1e-4)
    torch.testing.assert_close(merged(TOKENS).logits, trained, atol=1e-4, rtol=1e-4)
    assert agreement.top1 == 1


@pytest.mark.parametrize("name", ["lora", "dora", "pissa", "olora", "ia3", "vera", "saved", "embedding"])
def test_going_on_from_a_saved_adapter_is_exact(name, tiny_model_dir, tmp_path):
    config = TunerConfig(**{**SMALL, **VARIANTS[name]})
    model = apply_tuner(load(tiny_model_dir), config)
    train(model, steps=2)
    Swift.save(model, tmp_path)
    again = apply_tuner(load(tiny_model_dir), config, adapters=[str(tmp_path)])
    ours = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert list(ours) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert train(again, first=3) == train(model, first=3), "bit for bit"


def test_adalora_prunes_ranks_and_resumes_exactly(tiny_model_dir, tmp_path):
    config = TunerConfig(tuner_type="adalora", lora_dropout=0.0, adalora_init_r=4, adalora_target_r=1)

    def fresh(adapters=()):
        torch.manual_seed(1)
        return apply_tuner(load(tiny_model_dir), config, adapters=adapters, total_steps=12)

    whole = fresh()
    train(whole, steps=12)
    energies = [module.lora_E["default"] for module in whole.modules() if hasattr(module, "lora_E")]
    left = sum(int((energy != 0).sum()) for energy in energies)
    assert left <= len(energies) * 2 < len(energies) * 4, "from rank 4 down to an average of 1"
    with torch.no_grad():
        trained = whole.eval()(TOKENS).logits
    Swift.save(whole, tmp_path / "end")
    torch.testing.assert_close(Swift.from_pretrained(load(tiny_model_dir), tmp_path / "end")(TOKENS).logits, trained)

    first = fresh()
    train(first, steps=6)
    Swift.save(first, tmp_path / "half")
    state = copy.deepcopy(adapter_state(first))
    second = fresh([str(tmp_path / "half")])
    load_adapter_state(second, state)
    assert train(second, steps=3, first=7) == train(first, steps=3, first=7)
    without = fresh([str(tmp_path / "half")])
    train(without, steps=3, first=7)
    scores, right = (next(iter(adapter_state(model)["exp_avg_ipt"].values())) for model in (without, first))
    assert not torch.equal(scores, right), "the state matters"


def test_adalora_regularizer_is_pefts(tiny_model_dir):
    model = apply_tuner(load(tiny_model_dir), TunerConfig(tuner_type="adalora", lora_dropout=0.0), total_steps=10)
    with torch.no_grad():
        plain = model.get_base_model()(input_ids=TOKENS, labels=TOKENS).loss
        theirs = model(input_ids=TOKENS, labels=TOKENS).loss
    assert adapter_regularizer(model)().item() == pytest.approx((theirs - plain).item(), rel=1e-4)
    assert adapter_regularizer(apply_tuner(load(tiny_model_dir), TunerConfig())) is None
    with pytest.raises(UsageError, match="in 1 steps"):
        set_total_steps(model, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_trained_and_saved(tied, tmp_path):
    base = build_tiny_model(tmp_path / "base", tie_word_embeddings=tied)
    settings = ModelConfig(new_special_tokens=["<a>", "<b>"])
    tokenizer = load_tokenizer(base, settings)
    tokens = torch.tensor([tokenizer.encode("<a> x <b>")])
    model = apply_tuner(load(base, new_special_tokens=["<a>", "<b>"]), TunerConfig(**SMALL))
    start = model(tokens).logits
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    trained = model.eval()(tokens).logits
    assert not torch.allclose(trained, start)
    gap = (trained[..., -1] - trained[..., -2]).abs()
    assert gap.min() > 1e-3, "the output head tells the new tokens apart"
    Swift.save(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    shapes = {key: value.shape for key, value in saved.items() if "token_adapter" in key}
    assert len(shapes) == (1 if tied else 2) and set(shapes.values()) == {(2, 64)}, "the new rows and no others"
    fresh = Swift.from_pretrained(load(base, new_special_tokens=["<a>", "<b>"]), tmp_path)
    torch.testing.assert_close(fresh(tokens).logits, trained, atol=1e-5, rtol=1e-4)


def test_new_tokens_in_spare_rows_are_trained_too(tmp_path):
    base = build_tiny_model(tmp_path / "base", vocab_size=2064)
    model = apply_tuner(load(base, new_special_tokens=["<a>", "<b>", "<|im_end|>"]), TunerConfig(**SMALL))
    ids = len(load_tokenizer(base, ModelConfig()))
    wanted = {"model.embed_tokens": [ids, ids + 1], "lm_head": [ids, ids + 1]}
    assert model.peft_config["default"].trainable_token_indices == wanted


@pytest.mark.parametrize("kind", [name for name in TUNERS if name != "lora"])
def test_kinds_that_cannot_train_new_tokens_say_so(kind, tiny_model_dir):
    for saved in ([], ["embed_tokens"], ["lm_head"]):
        with pytest.raises(UsageError, match="can't train the rows of new tokens") as caught:
            apply_tuner(
                load(tiny_model_dir, new_special_tokens=["<a>"]), TunerConfig(tuner_type=kind, modules_to_save=saved)
            )
        assert caught.value.where == "--new_special_tokens"
        assert "--modules_to_save embed_tokens lm_head" in caught.value.fix


def test_new_tokens_beside_an_adapter_on_the_shared_head_are_refused(tmp_path):
    base = build_tiny_model(tmp_path / "base", tie_word_embeddings=True)
    with pytest.raises(UsageError, match="shares its weight"):
        apply_tuner(load(base, new_special_tokens=["<a>"]), TunerConfig(target_modules=["lm_head"]))


def test_new_tokens_and_a_head_with_a_bias_are_refused(tmp_path):
    base = build_tiny_model(tmp_path / "base")
    model = load(base, new_special_tokens=["<a>"])
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features))
    with pytest.raises(UsageError, match="it has a bias"):
        apply_tuner(model, TunerConfig())


def test_target_parameters(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    settings = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    base = MixtralForCausalLM(MixtralConfig(**settings)).eval()
    clone = copy.deepcopy(base)
    tokens = TOKENS % 64
    config = TunerConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"], lora_dropout=0.0)
    model = apply_tuner(base, config)
    assert any("experts" in name for name, p in model.named_parameters() if p.requires_grad)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    trained = model.eval()(tokens).logits
    Swift.save(model, tmp_path)
    loaded = Swift.from_pretrained(copy.deepcopy(clone), tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, trained, atol=1e-5, rtol=1e-4)
    with pytest.raises(UsageError, match="can't have dropout"):
        apply_tuner(copy.deepcopy(clone), TunerConfig(target_parameters=["experts.down_proj"]))
    with pytest.raises(ModelError, match=r"ends in 'experts\.down_prj'") as caught:
        apply_tuner(clone, TunerConfig(target_parameters=["experts.down_prj"], lora_dropout=0.0))
    assert "down_proj" in caught.value.fix


def test_targets_and_summary(tiny_model_dir):
    model = apply_tuner(load(tiny_model_dir), TunerConfig(target_modules=["q_proj", "v_proj"], lora_rank=4))
    names = {
        name.rsplit(".lora_A", 1)[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_A" in name
    }
    assert names == {"q_proj", "v_proj"}
    summary = trainable_summary(model)
    assert summary["trainable"] == 2 * (4 * 64 + 64 * 4 + 4 * 64 + 32 * 4)
    assert summary["percent"] == pytest.approx(100 * summary["trainable"] / summary["total"])
    embedding = apply_tuner(load(tiny_model_dir), TunerConfig(target_modules=["all-embedding"], lora_rank=4))
    assert {name for name, p in embedding.named_parameters() if p.requires_grad} == {
        "base_model.model.model.embed_tokens.lora_embedding_A.default",
        "base_model.model.model.embed_tokens.lora_embedding_B.default",
    }


def test_ia3_scales_the_feed_forward_input(tiny_model_dir):
    model = apply_tuner(load(tiny_model_dir), TunerConfig(tuner_type="ia3"))
    shapes = {name.split(".")[-3]: tuple(p.shape) for name, p in model.named_parameters() if "ia3_l" in name}
    assert shapes["down_proj"] == (1, 128) and shapes["k_proj"] == (32, 1)


@pytest.mark.parametrize(
    ("settings", "flag", "message", "fix"),
    [
        ({"target_modules": ["q_porj"]}, "--target_modules", "'q_porj'", "did you mean q_proj?"),
        ({"target_modules": []}, "--target_modules", "no module is targeted", "all-linear"),
        ({"target_regex": "q_proj"}, "--target_regex", "'q_proj'", "model.layers.0"),
        ({"target_regex": "("}, "--target_regex", "not a regular expression", ""),
        ({"modules_to_save": ["head"]}, "--modules_to_save", "'head'", "lm_head"),
        ({"init_weights": "pisa"}, "--init_weights", "'pisa'", "did you mean pissa?"),
        ({"init_weights": "loftq"}, "--init_weights", "loftq is not supported", "pissa"),
        ({"init_weights": "lora-ga"}, "--init_weights", "lora-ga is not supported", "pissa"),
        ({"init_weights": "orthogonal", "lora_rank": 3}, "--lora_rank", "even rank", "--lora_rank 4"),
        ({"tuner_type": "ia3", "init_weights": "pissa"}, "--init_weights", "not for ia3", "true"),
        ({"tuner_type": "vera", "use_dora": True}, "--use_dora", "vera has no --use_dora", "lora"),
        ({"tuner_type": "hra", "lorap_lr_ratio": 16.0}, "--lorap_lr_ratio", "hra has no", "lora"),
        ({"freeze_parameters": ["model"]}, "--freeze_parameters", "full tuning only", "--tuner_type full"),
        ({"tuner_type": "boft", "boft_n_butterfly_factor": 2}, "--boft_n_butterfly_factor", "CUDA", "1"),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(settings, flag, message, fix, tiny_model_dir):
    with pytest.raises((ModelError, UsageError)) as caught:
        apply_tuner(load(tiny_model_dir), TunerConfig(**settings))
    assert caught.value.where == flag
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


def test_adapters_that_cannot_be_continued(tiny_model_dir, tmp_path):
    Swift.save(Swift.prepare_model(load(tiny_model_dir), LoRAConfig(r=2)), tmp_path)
    folder = str(tmp_path)
    with pytest.raises(UsageError, match="merge-lora"):
        apply_tuner(load(tiny_model_dir), TunerConfig(tuner_type="full"), adapters=[folder])
    with pytest.raises(UsageError, match="2 are given"):
        apply_tuner(load(tiny_model_dir), TunerConfig(), adapters=[folder, folder])
    with pytest.raises(UsageError, match="is a lora adapter") as caught:
        apply_tuner(load(tiny_model_dir), TunerConfig(tuner_type="ia3"), adapters=[folder])
    assert caught.value.fix == "--tuner_type lora"
    build_tiny_model(tmp_path / "wider", hidden_size=32)
    with pytest.raises(ModelError, match=r"size mismatch|shape"):
        apply_tuner(load(tmp_path / "wider"), TunerConfig(), adapters=[folder])
    assert read_adapter_config(tmp_path).r == 2


def test_bf16_base_keeps_fp32_adapters(tiny_model_dir):
    base = load_model(tiny_model_dir, ModelConfig(), dtype=torch.bfloat16)
    model = apply_tuner(base, TunerConfig(**SMALL))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert train(model)[-1] > 0
