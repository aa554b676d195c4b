"""Linear layers of the engine: packed products, adapters by row, weights that are exchanged."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from architectures import build
from engines import ask, engine, generated, prompts
from torch import nn
from transformers import AutoModelForCausalLM

from swift.core.errors import ModelError, UsageError
from swift.inference.paged import linear
from swift.inference.paged.adapters import AdapterSlots
from swift.inference.paged.linear import MIN_ROWS, Panels, Reordered, ServedLinear, _can_reorder, serve_linears
from swift.inference.paged.weights import ServedWeights
from swift.inference.requests import Request, SamplingParams

GREEDY = SamplingParams(max_new_tokens=16, logprobs=1, ignore_eos=True)


def make_adapter(folder: Path, seed: int, model: str = "llama", **settings) -> Path:
    """A LoRA adapter with random matrices, as training would save it."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], **settings}
    wrapped = peft.get_peft_model(build(model), peft.LoraConfig(**options))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    wrapped.save_pretrained(str(folder))
    return folder


def adapted(folder: Path, prompt: list[int], new: int) -> list[int]:
    """What transformers and peft answer."""
    return generated(peft.PeftModel.from_pretrained(build("llama"), str(folder)).eval(), prompt, new, eos_token_id=None)


SIZES = [(64, 97), (17, 33), (576, 192), (8, 5), (2050, 49)]


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("size", SIZES)
def test_products_are_exact_and_a_rows_bits_dont_depend_on_how_many_rows_there_are(held, size):
    weight, x = torch.randn(size[1], size[0]), torch.randn(300, size[0])
    whole = Panels(weight, held)(x)
    factors = weight.abs().amax(1, keepdim=True).double() / 127
    kept = (weight / factors).round() * factors if held == torch.int8 else weight.to(held).double()
    assert torch.allclose(whole.double(), x.double() @ kept.t(), atol=1e-3 * size[0] ** 0.5, rtol=1e-5)
    assert_rows_alone(Panels(weight, held), x, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_reordered_products_too(dtype, size):
    if not _can_reorder(dtype):
        pytest.skip(f"oneDNN has no products of {dtype} on this machine")
    weight, x = torch.randn(size[1], size[0]).to(dtype), torch.randn(300, size[0]).to(dtype)
    whole = Reordered(weight)(x)
    tolerance = 1e-3 if dtype == torch.float32 else 0.5
    assert torch.allclose(whole.float(), x.float() @ weight.float().t(), atol=tolerance, rtol=0.02)
    assert_rows_alone(Reordered(weight), x, whole)


def assert_rows_alone(packed, x, whole):
    for rows in (1, 2, 3, MIN_ROWS, 5, 16, 31, 64, 299):
        assert torch.equal(packed(x[:rows]), whole[:rows])
        assert torch.equal(packed(x[300 - rows :]), whole[300 - rows :])


def test_threads_change_no_bit():
    weight, x = torch.randn(5000, 700), torch.randn(9, 700)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(Panels(weight, torch.float32)(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_rows_of_any_shape_and_type():
    weight, x = torch.randn(50, 40), torch.randn(2, 3, 40)
    packed = Panels(weight, torch.float32)
    flat = packed(x.view(6, 40))
    assert torch.equal(packed(x), flat.view(2, 3, 50))
    assert torch.equal(packed(x.transpose(0, 1)), flat.view(2, 3, 50).transpose(0, 1))
    assert torch.equal(packed(x[:, :0]), torch.empty(2, 0, 50))
    half = Panels(weight.bfloat16(), torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), x.bfloat16().float() @ weight.bfloat16().float().t(), atol=0.3)


def test_what_isnt_finite_stays_in_its_row():
    weight, x = torch.randn(50, 40), torch.randn(9, 40)
    packed = Panels(weight, torch.float32)
    whole = packed(x)
    x[3, 7] = float("nan")
    x[5, 0] = float("inf")
    found = packed(x)
    assert found[3].isnan().all() and not found[5].isfinite().any()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(found[others], whole[others])


def test_an_owned_models_matrices_are_held_once():
    model = build("llama-tied")
    names = dict(model.named_parameters())
    assert serve_linears(model) > 0
    after = dict(model.named_parameters())
    assert {name: p.shape for name, p in after.items()} == {name: p.shape for name, p in names.items()}
    assert after["model.layers.0.mlp.up_proj.weight"].is_meta
    assert not after["model.embed_tokens.weight"].is_meta
    kept = build("llama")
    serve_linears(kept, owned=False)
    assert not any(p.is_meta for p in kept.parameters())


def test_an_owned_models_file_isnt_held_in_memory(tmp_path):
    build("llama-tied").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    maps = Path("/proc/self/maps")
    if str(tmp_path) not in maps.read_text():
        pytest.skip("weights aren't read as mapped files here")
    if serve_linears(model) == 0:
        pytest.skip("no packed products on this machine")
    assert str(tmp_path) not in maps.read_text()


@pytest.mark.parametrize(("format", "most"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_weights_of_fewer_bits_round_and_nothing_else(format, most):
    model, plain = build("qwen2-bias"), build("qwen2-bias")
    serve_linears(model, weight_format=format)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        rounded, exact = model(ids).logits[0], plain(ids).logits[0]
        layer = model.model.layers[0].self_attn.q_proj
        other = plain.model.layers[0].self_attn.q_proj
        x = torch.randn(6, 64)
        factors = other.weight.abs().amax(1, keepdim=True) / 127
        kept = other.weight.bfloat16().float() if format == "bfloat16" else (other.weight / factors).round() * factors
        assert torch.allclose(layer(x), x @ kept.t() + other.bias, atol=1e-5)
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - exact).norm() / exact.norm()) < most


def test_fewer_bits_need_compiled_loops(monkeypatch):
    monkeypatch.setattr(linear, "has_products", lambda: False)
    with pytest.raises(UsageError, match="compiled loops"):
        serve_linears(build("llama"), weight_format="int8")


def test_without_compiled_loops_answers_are_the_same_tokens(monkeypatch, tokenizer):
    wanted = generated(build("llama"), list(range(3, 30)), 16, eos_token_id=None)
    monkeypatch.setattr(linear, "has_products", lambda: False)
    backend = engine("llama", tokenizer)
    try:
        (answer,) = ask(backend, Request("r", list(range(3, 30)), GREEDY))
        assert answer.tokens == wanted
    finally:
        backend.close()


def test_layers_of_other_classes_stay():
    class Special(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.Sequential(nn.Linear(8, 8), Special(8, 8))
    serve_linears(model)
    assert type(model[0]) is ServedLinear and type(model[1]) is Special


def test_every_request_goes_through_its_own_adapter(tmp_path, tokenizer):
    """Mixed in one batch, with prompts that begin alike; each answer is the one of that adapter alone, bit for bit."""
    folders = {name: make_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))}
    backend = engine("llama", tokenizer, max_batch_tokens=100)
    try:
        for name, folder in folders.items():
            backend.load_adapter(name, folder)
        assert sorted(backend.stats().adapters) == ["one", "two"]
        texts = [*prompts(3), list(range(3, 30))]
        asked = [
            Request(f"{k}-{name}", text, GREEDY, adapter=name)
            for k, text in enumerate(texts)
            for name in (None, "one", "two")
        ]
        answers = {r.id: a for r, a in zip(asked, ask(backend, *asked), strict=True)}
        for request in asked:
            wanted = (
                generated(build("llama"), request.prompt, 16, eos_token_id=None)
                if request.adapter is None
                else adapted(folders[request.adapter], request.prompt, 16)
            )
            assert answers[request.id].tokens == wanted
            (alone,) = ask(backend, replace(request, id="alone"))
            assert alone.logprobs == answers[request.id].logprobs
        assert len({tuple(answers[f"3-{name}"].tokens) for name in (None, "one", "two")}) == 3
    finally:
        backend.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}},
        {"target_modules": "all-linear"},
    ],
)
def test_ranks_and_scales_are_those_of_peft(settings, tmp_path, tokenizer):
    folder = make_adapter(tmp_path / "a", 3, **settings)
    backend = engine("llama", tokenizer)
    try:
        backend.load_adapter("a", folder)
        text = prompts(1, seed=4)[0]
        assert ask(backend, Request("r", text, GREEDY, adapter="a"))[0].tokens == adapted(folder, text, 16)
    finally:
        backend.close()


def test_an_adapter_that_is_gone_leaves_nothing(tmp_path, tokenizer):
    folder = make_adapter(tmp_path / "a", 1)
    backend = engine("llama", tokenizer)
    text = list(range(3, 30))
    try:
        backend.load_adapter("a", folder)
        first = ask(backend, Request("r", text, GREEDY, adapter="a"))[0]
        layer = backend._runner.model.model.layers[0].mlp.down_proj
        held = weakref.ref(next(iter(layer.deltas.values())))
        backend.unload_adapter("a")
        assert held() is None and not layer.deltas
        with pytest.raises(UsageError, match="no adapter called 'a'"):
            backend.submit(Request("r", text, GREEDY, adapter="a"), lambda update: None)
        # another one of the same name must not find the first one's texts
        backend.load_adapter("a", make_adapter(tmp_path / "b", 2))
        second = ask(backend, Request("r", text, GREEDY, adapter="a"))[0]
        assert second.last.num_cached_tokens == 0
        assert second.tokens == adapted(tmp_path / "b", text, 16) != first.tokens
    finally:
        backend.close()


class TestRefusedAdapters:
    """Adapters that can't be served beside others."""

    @pytest.fixture(scope="class")
    def slots(self):
        model = build("llama")
        serve_linears(model)
        return AdapterSlots(model)

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"use_dora": True}, "DoRA"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"target_modules": ["q_proj", "embed_tokens"]}, "more than pairs"),
        ],
    )
    def test_what_is_more_than_pairs_of_matrices(self, settings, why, slots, tmp_path):
        with pytest.raises(ModelError, match=why):
            slots.load("a", make_adapter(tmp_path / "a", 0, **settings))
        assert slots.names == []

    def test_another_kind(self, slots, tmp_path):
        wrapped = peft.get_peft_model(build("llama"), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
        wrapped.save_pretrained(str(tmp_path / "a"))
        with pytest.raises(ModelError, match="IA3"):
            slots.load("a", tmp_path / "a")

    def test_another_model(self, slots, tmp_path):
        with pytest.raises(ModelError, match="doesn't fit"):
            slots.load("a", make_adapter(tmp_path / "a", 0, "phi3", target_modules=["qkv_proj"]))

    def test_no_folder(self, slots, tmp_path):
        with pytest.raises(ModelError, match="no adapter folder"):
            slots.load("a", tmp_path / "nothing")

    def test_a_model_that_carries_one_already(self, tmp_path):
        model = peft.PeftModel.from_pretrained(build("llama"), str(make_adapter(tmp_path / "own", 0))).get_base_model()
        serve_linears(model)
        with pytest.raises(UsageError, match="of its own"):
            AdapterSlots(model).load("a", make_adapter(tmp_path / "a", 1))

    def test_a_name_that_is_taken(self, slots, tmp_path):
        slots.load("a", make_adapter(tmp_path / "a", 0))
        with pytest.raises(UsageError, match="already"):
            slots.load("a", tmp_path / "a")
        slots.unload("a")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2-bias"])
@pytest.mark.parametrize("owned", [True, False])
def test_new_weights_give_the_new_models_numbers_bit_for_bit(name, owned):
    torch.manual_seed(3)
    weights = {key: torch.randn_like(p) * 0.1 for key, p in build(name).named_parameters()}
    fresh = build(name)
    fresh.load_state_dict(weights, strict=False)
    fresh.tie_weights()
    old = build(name)
    for model in (fresh, old):
        serve_linears(model, owned=owned)
    ServedWeights(old).update(weights.items())
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(old(ids).logits, fresh(ids).logits)


def test_weights_that_dont_fit_replace_nothing():
    model = build("llama")
    serve_linears(model)
    weights = ServedWeights(model)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        good = ("model.norm.weight", torch.zeros(64))
        with pytest.raises(ModelError, match="no weight called"):
            weights.update([good, ("model.norm.wait", torch.zeros(64))])
        with pytest.raises(ModelError, match="shape"):
            weights.update([good, ("lm_head.weight", torch.zeros(3, 64))])
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_weights_that_were_let_go_of_must_all_come_back(name):
    model, wanted = build(name), build(name)
    given = {key: p.detach().clone() for key, p in wanted.named_parameters()}
    serve_linears(model)
    weights = ServedWeights(model)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        weights.sleep(2)
        assert all(p.is_meta for p in model.parameters())
        assert weights.missing == set(given)
        some = list(given)[:3]
        weights.update((key, given.pop(key)) for key in some)
        assert weights.missing == set(given)
        weights.update(given.items())
        assert not weights.missing
        assert torch.equal(model(ids).logits, before)
