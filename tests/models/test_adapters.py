"""`Swift` on any module: in plain loops, compiled, differentiated numerically, saved and loaded both ways with peft."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from swift.core.errors import ModelError
from swift.models import adapters
from swift.models.adapters import LoRAConfig, Swift, load_adapter_weights


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)


def llama(tiny_model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def shake(model, seed=1):
    """Give every trainable parameter a value that matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    return model


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
TOKENS = torch.tensor([[5, 9, 200, 31, 7, 7, 1000]])

CONFIGS = [
    adapters.LoRAConfig(r=2),
    adapters.LoRAConfig(r=2, use_dora=True),
    adapters.LoRAConfig(r=2, use_rslora=True, lora_alpha=7),
    adapters.LoRAConfig(r=2, init_lora_weights="pissa"),
    adapters.LoRAConfig(r=2, init_lora_weights="olora"),
    adapters.AdaLoRAConfig(init_r=3, target_r=2, total_step=10),
    adapters.IA3Config(),
    adapters.VeRAConfig(r=4, target_modules=["0"]),
    adapters.BOFTConfig(boft_block_size=2),
    adapters.OFTConfig(oft_block_size=2),
    adapters.FourierFTConfig(n_frequency=5, scaling=10.0),
    adapters.LoHaConfig(r=2),
    adapters.LoKrConfig(r=2),
    adapters.HRAConfig(r=2),
    adapters.MiSSConfig(r=2),
]


def name_of(config):
    init = getattr(config, "init_lora_weights", True)
    extra = [init if isinstance(init, str) else "", "dora" if getattr(config, "use_dora", False) else ""]
    return "-".join([type(config).__name__, *filter(None, extra)])


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_plain_module_trains_saves_and_loads_everywhere(config, tmp_path):
    base = mlp()
    expected = base(X)
    model = Swift.prepare_model(base, config)
    assert isinstance(model, nn.Module)
    torch.testing.assert_close(model.eval()(X), expected, atol=1e-5, rtol=1e-5)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert any(name.endswith("base_layer.weight") for name in frozen)

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    shake(model)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    trained = model.eval()(X)
    assert not torch.allclose(trained, expected, atol=1e-3)
    Swift.save(model, tmp_path / "a")
    assert {file.name for file in (tmp_path / "a").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    torch.testing.assert_close(Swift.from_pretrained(mlp(), tmp_path / "a")(X), trained, atol=1e-5, rtol=1e-5)
    foreign = peft.PeftModel.from_pretrained(mlp(), tmp_path / "a").eval()
    torch.testing.assert_close(foreign(X), trained, atol=1e-5, rtol=1e-5)
    foreign.save_pretrained(tmp_path / "b")
    torch.testing.assert_close(Swift.from_pretrained(mlp(), tmp_path / "b")(X), trained, atol=1e-5, rtol=1e-5)

    merged = Swift.merge_and_unload(Swift.from_pretrained(mlp(), tmp_path / "a"))
    assert type(merged) is nn.Sequential and not isinstance(merged[0], peft.tuners.tuners_utils.BaseTunerLayer)
    torch.testing.assert_close(merged(X), trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[:3] + CONFIGS[6:7] + CONFIGS[11:], ids=name_of)
def test_gradcheck(config):
    model = shake(Swift.prepare_model(mlp(torch.float64), config))
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert torch.autograd.gradcheck(model, X.double().requires_grad_(), fast_mode=True)


def test_compile_gives_the_same():
    model = shake(Swift.prepare_model(mlp(), LoRAConfig(r=2)))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    model(X).sum().backward()
    compiled(X).sum().backward()
    torch.testing.assert_close(compiled(X), model(X))
    for (name, left), (_, right) in zip(model.named_parameters(), compiled.named_parameters(), strict=True):
        if left.requires_grad:
            torch.testing.assert_close(left.grad, right.grad, msg=name)


def test_works_with_the_transformers_trainer(tiny_model_dir, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = Swift.prepare_model(llama(tiny_model_dir), LoRAConfig(r=2, task_type="CAUSAL_LM"))
    rows = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 4
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_steps=2, disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    loaded = Swift.from_pretrained(llama(tiny_model_dir), tmp_path / "checkpoint-2")
    torch.testing.assert_close(loaded(TOKENS).logits, model.eval()(TOKENS).logits)


def test_all_linear_leaves_the_head_alone(tiny_model_dir):
    model = Swift.prepare_model(llama(tiny_model_dir), LoRAConfig(r=2))
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(names) == 2 * 7 and not any("lm_head" in name for name in names)


def test_several_named_adapters(tmp_path):
    model = Swift.prepare_model(mlp(), {"one": LoRAConfig(r=2), "two": LoRAConfig(r=3)})
    assert list(Swift.adapters(model)) == ["one", "two"]
    for seed, name in enumerate(("one", "two")):
        Swift.set_adapter(model, name)
        assert all((f".{name}." in key) == p.requires_grad for key, p in model.named_parameters())
        shake(model, seed + 5)
    outputs = {}
    for name in ("one", "two"):
        Swift.set_adapter(model, name)
        outputs[name] = model(X)
    Swift.set_adapter(model, ["one", "two"])
    both = model(X)
    assert not any(torch.allclose(both, output, atol=1e-4) for output in outputs.values())
    Swift.deactivate(model)
    torch.testing.assert_close(model(X), mlp()(X))
    Swift.activate(model)
    torch.testing.assert_close(model(X), both)

    Swift.save(model, tmp_path)
    loaded = Swift.from_pretrained(mlp(), {"one": tmp_path / "one", "two": tmp_path / "two"})
    torch.testing.assert_close(loaded(X), outputs["one"])
    Swift.set_adapter(loaded, "two", trainable=False)
    torch.testing.assert_close(loaded(X), outputs["two"])
    assert not any(p.requires_grad for p in loaded.parameters())
    with pytest.raises(ModelError, match="no adapter called 'tow'") as caught:
        Swift.set_adapter(loaded, "tow")
    assert "did you mean two?" in caught.value.fix


def test_merge_and_unmerge():
    model = shake(Swift.prepare_model(mlp(), LoRAConfig(r=2))).eval()
    apart = model(X)
    weight = model.get_base_model()[0].base_layer.weight
    before = weight.clone()
    Swift.merge(model)
    torch.testing.assert_close(model(X), apart)
    assert not torch.equal(weight, before)
    Swift.unmerge(model)
    torch.testing.assert_close(weight, before)
    torch.testing.assert_close(model(X), apart)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
@pytest.mark.parametrize("extra", [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"0": 3}}], ids=str)
def test_split_starts_continue_bit_for_bit(init, extra, tmp_path):
    """The saved adapter works on the original base, and loading it to train brings back the very same tensors."""
    if extra.get("use_rslora") and extra.get("rank_pattern"):
        pytest.skip("not together")
    torch.manual_seed(4)
    model = Swift.prepare_model(mlp(), LoRAConfig(r=2, lora_alpha=5, init_lora_weights=init, **extra))
    torch.testing.assert_close(model(X), mlp()(X), atol=1e-5, rtol=1e-5)
    shake(model)
    Swift.save(model, tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["r"] == 4 and saved["init_lora_weights"] is True
    served = Swift.from_pretrained(mlp(), tmp_path)
    torch.testing.assert_close(served(X), model(X), atol=1e-5, rtol=1e-5)

    again = Swift.from_pretrained(mlp(), tmp_path, is_trainable=True)
    theirs = dict(again.named_parameters())
    assert set(theirs) == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert parameter.requires_grad == theirs[name].requires_grad, name
    assert torch.equal(again(X), model(X))
    Swift.save(again, tmp_path / "second")
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert json.loads((tmp_path / "second" / "adapter_config.json").read_text())["r"] == 4


def test_split_starts_refuse_company_and_switching_off():
    model = Swift.prepare_model(mlp(), LoRAConfig(r=2, init_lora_weights="pissa"))
    with pytest.raises(ModelError, match="must be the only one"):
        Swift.prepare_model(model, LoRAConfig(r=2), "other")
    with pytest.raises(ModelError, match="can't switch its adapter off"):
        Swift.deactivate(model)


@pytest.mark.parametrize("init", [True, "pissa", "olora"], ids=str)
def test_weights_go_back_into_an_adapter(init, tmp_path):
    settings = LoRAConfig(r=2, init_lora_weights=init)
    model = shake(Swift.prepare_model(mlp(), settings))
    Swift.save(model, tmp_path)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    output = model(X).detach()
    shake(model, 9)
    load_adapter_weights(model, tmp_path)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())

    torch.manual_seed(11)
    other = Swift.prepare_model(mlp(), LoRAConfig(r=2, init_lora_weights="pissa_niter_1" if init == "pissa" else init))
    load_adapter_weights(other, tmp_path)
    torch.testing.assert_close(other(X), output, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match=r"size mismatch|shape"):
        load_adapter_weights(Swift.prepare_model(mlp(), LoRAConfig(r=3)), tmp_path)
    with pytest.raises(ModelError, match="another kind"):
        load_adapter_weights(Swift.prepare_model(mlp(), adapters.IA3Config()), tmp_path)


def test_modules_to_save(tiny_model_dir, tmp_path):
    model = Swift.prepare_model(llama(tiny_model_dir), LoRAConfig(r=2, modules_to_save=["lm_head", "embed_tokens"]))
    shake(model)
    Swift.save(model, tmp_path)
    assert any("lm_head" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    loaded = Swift.from_pretrained(llama(tiny_model_dir), tmp_path)
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)
    foreign = peft.PeftModel.from_pretrained(llama(tiny_model_dir), tmp_path)
    torch.testing.assert_close(foreign(TOKENS).logits, model(TOKENS).logits)


def test_adapter_of_another_model_is_refused(tiny_model_dir, tmp_path):
    Swift.save(Swift.prepare_model(mlp(), LoRAConfig(r=2)), tmp_path)
    wide = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    with pytest.raises(ModelError, match="peft can't load this adapter"):
        Swift.from_pretrained(wide, tmp_path)
    deeper = nn.Sequential(*mlp(), nn.Linear(4, 4))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["0", "2", "3"]}))
    with pytest.raises(ModelError, match="lacks tensors for"):
        Swift.from_pretrained(deeper, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["0"]}))
    with pytest.raises(ModelError, match="has tensors without a place"):
        Swift.from_pretrained(mlp(), tmp_path)


def test_damaged_or_missing_adapters(tmp_path):
    Swift.save(Swift.prepare_model(mlp(), LoRAConfig(r=2)), tmp_path / "good")
    with pytest.raises(ModelError, match="no adapter folder") as caught:
        Swift.from_pretrained(mlp(), tmp_path / "godo")
    assert "did you mean good?" in caught.value.fix
    file = tmp_path / "good" / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(ModelError, match="damaged"):
        Swift.from_pretrained(mlp(), tmp_path / "good")
    file.unlink()
    with pytest.raises(ModelError, match=r"missing: adapter_model\.safetensors"):
        Swift.from_pretrained(mlp(), tmp_path / "good")
    with pytest.raises(ModelError, match=f"did you mean {tmp_path}/good") as caught:
        Swift.from_pretrained(mlp(), tmp_path)


def test_old_pickled_adapters_load(tmp_path):
    model = shake(Swift.prepare_model(mlp(), LoRAConfig(r=2)))
    Swift.save(model, tmp_path)
    torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.testing.assert_close(Swift.from_pretrained(mlp(), tmp_path)(X), model(X))


def test_wrong_uses_are_named(tmp_path):
    with pytest.raises(ModelError, match="no adapter configuration"):
        Swift.prepare_model(mlp(), {})
    with pytest.raises(ModelError, match="is configured by"):
        Swift.prepare_model(mlp(), {"a": {"r": 8}})
    with pytest.raises(ModelError, match="can't name an adapter"):
        Swift.prepare_model(mlp(), LoRAConfig(r=2), "a.b")
    with pytest.raises(ModelError, match="can't name an adapter"):
        Swift.prepare_model(mlp(), LoRAConfig(r=2), "lora")
    with pytest.raises(ModelError, match="has no adapter"):
        Swift.merge(mlp())
    with pytest.raises(ModelError, match="of different kinds"):
        Swift.prepare_model(mlp(), {"one": LoRAConfig(r=2), "two": adapters.IA3Config()})
    with pytest.raises(ModelError, match="peft can't add"):
        Swift.prepare_model(mlp(), LoRAConfig(r=2, target_modules=["nothing"]))
    model = Swift.prepare_model(mlp(), LoRAConfig(r=2))
    with pytest.raises(ModelError, match="has an adapter called 'default' already"):
        Swift.prepare_model(model, LoRAConfig(r=2))


def test_public_names():
    import swift

    assert (swift.Swift, swift.LoRAConfig, swift.AdapterConfig) == (Swift, LoRAConfig, peft.PeftConfig)
    code = "import sys, swift\nassert 'Swift' in dir(swift) and not {'torch', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
