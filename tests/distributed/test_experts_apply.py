"""What becomes of a model whose experts are put on several ranks, what it sends, and what is refused."""

import pytest
import torch
from equality import VOCAB
from equality import build as build_dense
from expert_models import Case, build, micro_batch, train_module
from peft import LoraConfig, get_peft_model
from pool import on_ranks
from torch.distributed.tensor import DTensor

from swift.config.degrees import Degrees
from swift.core.errors import SwiftError
from swift.distributed.experts import apply_expert_parallel, expert_parameters
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.spread import Spread
from swift.distributed.traffic import TRAFFIC

TWO = Degrees(dp_shard=2, ep=2)
LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 8, 64, 32


def spread_names(device: str):
    spread = Spread(build_mesh(TWO, "cpu"))
    tiny = build("qwen3_moe", "lora", device=device)
    before = {name: (p.shape, p.requires_grad) for name, p in tiny.whole.named_parameters()}
    apply_expert_parallel(tiny.whole, tiny.causal_lm, spread)
    after = dict(tiny.whole.named_parameters())
    assert {name: (p.shape, p.requires_grad) for name, p in after.items()} == before
    names = expert_parameters(tiny.whole)
    locals_ = {n: p.to_local() if isinstance(p, DTensor) else None for n, p in after.items()}
    assert all((locals_[name] is not None) == (name in names) for name in locals_)
    return {name: (tuple(locals_[name].shape), locals_[name].device.type) for name in names}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_and_whole_shapes_stay_and_half_of_the_experts_are_here(device):
    shapes = {"gate_up_proj": (EXPERTS // 2, 2 * WIDTH, HIDDEN), "down_proj": (EXPERTS // 2, HIDDEN, WIDTH)}
    expected = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{name}": (shape, device)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    assert on_ranks(2, spread_names, device) == [expected] * 2


def memory_kept():
    spread = Spread(build_mesh(TWO, "cpu"))
    tiny = build("qwen3_moe")
    apply_expert_parallel(tiny.whole, tiny.causal_lm, spread)
    return [p.to_local().untyped_storage().nbytes() for p in tiny.whole.parameters() if isinstance(p, DTensor)]


def test_the_other_ranks_experts_are_let_go():
    sizes = {EXPERTS // 2 * 2 * WIDTH * HIDDEN * 4, EXPERTS // 2 * WIDTH * HIDDEN * 4}
    assert [set(found) for found in on_ranks(2, memory_kept)] == [sizes] * 2


def traffic_of_a_step():
    mesh = build_mesh(TWO, "cpu")
    tiny = build("qwen3_moe")
    apply_expert_parallel(tiny.whole, tiny.causal_lm, Spread(mesh))
    module = train_module(tiny, mesh, 0.1)
    batch = micro_batch(0, [mesh["dp"].rank], "packed")
    TRAFFIC.reset()
    module(batch).loss_sum.backward()
    return dict(TRAFFIC.calls), dict(TRAFFIC.bytes), batch.input_ids.numel()


def test_a_layer_sends_rows_twice_each_way():
    results = on_ranks(2, traffic_of_a_step)
    for calls, _, _ in results:
        # counts, rows there and back; backward, rows there and back
        assert calls == {("ep", "all_to_all"): 5 * LAYERS, ("loss", "all_reduce"): 1}
    counts = LAYERS * (EXPERTS // 2) * 8
    sent = sum(num_bytes["ep", "all_to_all"] - counts for _, num_bytes, _ in results)
    tokens = sum(tokens for *_, tokens in results)
    row = HIDDEN * 4
    # what goes there comes back, and each way once more as a gradient; about half of two rows a token leave
    assert sent % (4 * row) == 0
    assert 0.25 < sent / (4 * row) / (LAYERS * 2 * tokens) < 0.75
    per_layer = LAYERS * 2 * EXPERTS * 8
    assert results[0][1]["loss", "all_reduce"] == per_layer + 2 * 8  # counts, sums, tokens and weight, in fp64


def refusal_of(what: str):
    mesh = build_mesh(Degrees(dp_shard=3, ep=3) if what == "uneven" else TWO, "cpu")
    tiny = build_dense("untied") if what == "dense" else build("qwen3_moe")
    whole = tiny.whole
    if what == "parameters":
        target = ["mlp.experts.down_proj"]
        whole = get_peft_model(tiny.causal_lm, LoraConfig(r=2, target_modules=[], target_parameters=target))
    if what == "copy":
        whole = get_peft_model(tiny.causal_lm, LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))
    try:
        apply_expert_parallel(whole, tiny.causal_lm, Spread(mesh))
    except SwiftError as error:
        return error.render()
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("uneven", "8 experts can't be shared evenly by 3 ranks"),
        ("dense", "LlamaForCausalLM has no experts"),
        ("parameters", "adapters on experts can't be combined with expert parallelism"),
        ("copy", "adapters on experts can't be combined with expert parallelism"),
    ],
)
def test_refusals(what, words):
    for message in on_ranks(3 if what == "uneven" else 2, refusal_of, what):
        assert words in message and "--expert_parallel_size" in message


def test_one_rank_changes_nothing():
    tiny = Case().build()
    apply_expert_parallel(tiny.whole, tiny.causal_lm, Spread(Mesh()))
    assert not expert_parameters(tiny.whole)
    tiny.causal_lm(torch.arange(1, 9)[None] % VOCAB)
