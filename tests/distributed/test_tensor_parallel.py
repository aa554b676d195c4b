"""A model cut over the ranks of `tp` trains as one process does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from equality import Outcome, Tiny, assert_equal, build, make_batches, make_optimizer, single_process, whole_tensor
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from swift.config.degrees import Degrees
from swift.distributed.context.batches import cut_batch
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.spread import Spread, expose_local, finish_gradients, local_tensor
from swift.distributed.tensor import apply_tensor_parallel, fsdp_placement
from swift.distributed.tensor.cut import Cutter
from swift.distributed.tensor.plan import Part
from swift.distributed.traffic import TRAFFIC
from swift.models.elementwise import enable_fast_elementwise
from swift.models.head import find_head
from swift.models.lora_kernel import enable_fast_lora
from swift.models.trained_linear import enable_trained_linear


def cut(tiny: Tiny, tp: int, sequence_parallel: bool) -> Spread:
    spread = Spread(build_mesh(Degrees(tp=tp), "cpu"))
    apply_tensor_parallel(tiny.whole, tiny.causal_lm, spread, sequence_parallel=sequence_parallel)
    return spread


def local_copy(parameter: nn.Parameter) -> nn.Parameter:
    """The local share as a plain parameter on the same memory, for an optimizer."""
    return nn.Parameter(local_tensor(parameter.detach()))


def train(tiny: Tiny, spread: Spread, layout: str, *, count: int = 2, steps: int = 3) -> Outcome:
    module = tiny.train_module(find_head(tiny.causal_lm, axis=spread.mesh["tp"]))
    trained = {name: p for name, p in tiny.whole.named_parameters() if p.requires_grad}
    locals_ = {name: local_copy(p) for name, p in trained.items()}
    optimizer = make_optimizer(list(locals_.values()))
    tp = spread.mesh["tp"].size
    batches = [cut_batch(b, Mesh(), pad_token_id=0, multiple=tp) for b in make_batches(layout, count)]
    weight = sum(batch.weight for batch in batches)
    outcome = Outcome()
    for step in range(steps):
        loss = 0.0
        for batch in batches:
            terms = module(batch)
            (terms.loss_sum / weight).backward()
            loss += terms.loss_sum.item() / weight
        finish_gradients(trained.items(), spread)
        outcome.losses.append(loss)
        if step == 0:
            outcome.gradients = {n: whole_tensor(p.grad).clone() for n, p in trained.items() if p.grad is not None}
        for name, parameter in trained.items():
            locals_[name].grad = None if parameter.grad is None else local_tensor(parameter.grad).clone()
            parameter.grad = None
        optimizer.step()
    outcome.weights = {name: whole_tensor(p.detach()).clone() for name, p in trained.items()}
    return outcome


def run_case(case: tuple) -> Outcome:
    kind, tuner, layout, tp, sequence_parallel = case
    tiny = build(kind, tuner, dtype=precision(tuner))
    enable_fast_elementwise(tiny.whole)  # as a run does
    if tuner == "lora":
        enable_fast_lora(tiny.whole)
    else:
        enable_trained_linear(tiny.decoder)
    return train(tiny, cut(tiny, tp, sequence_parallel), layout)


def run_cases(cases: list[tuple]) -> list[Outcome]:
    return [run_case(case) for case in cases]


def precision(tuner: str) -> torch.dtype:
    """Some gradients of LoRA matrices are so small that Adam turns the rounding of fp32 into steps of 1e-5."""
    return torch.float64 if tuner == "lora" else torch.float32


@cache
def reference(kind: str, tuner: str, layout: str) -> Outcome:
    return single_process(kind, tuner, layout, count=2, dtype=precision(tuner))


def compare(cases: list[tuple], tp: int) -> None:
    for outcomes in on_ranks(tp, run_cases, cases):
        for case, ours in zip(cases, outcomes, strict=True):
            assert_equal(ours, reference(*case[:3]))


ALL = [
    (kind, tuner, layout, tp, sequence_parallel)
    for kind in ("tied", "untied", "gqa", "qk_norm", "moe")
    for tuner in ("full", "lora")
    for layout in ("padded", "packed")
    for tp in (2, 4)
    for sequence_parallel in (False, True)
]
SAMPLE = [
    ("tied", "full", "packed", 2, True),
    ("tied", "lora", "padded", 2, False),
    ("untied", "lora", "packed", 2, True),
    ("gqa", "full", "padded", 2, False),
    ("qk_norm", "full", "packed", 2, True),
    ("qk_norm", "lora", "packed", 2, False),
    ("moe", "full", "packed", 2, True),
    ("moe", "lora", "padded", 2, False),
    ("gqa", "full", "packed", 4, True),
    ("moe", "full", "padded", 4, False),
]


@pytest.mark.parametrize("tp", [2, 4])
def test_equals_one_process(tp):
    compare([case for case in SAMPLE if case[3] == tp], tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["tied", "untied", "gqa", "qk_norm", "moe"])
def test_equals_one_process_in_every_way(kind, tp):
    compare([case for case in ALL if case[0] == kind and case[3] == tp], tp)


def count_collectives(sequence_parallel: bool) -> dict:
    tiny = build("gqa")
    spread = cut(tiny, 2, sequence_parallel)
    module = tiny.train_module(find_head(tiny.causal_lm, axis=spread.mesh["tp"]))
    batch = cut_batch(make_batches("packed", 1)[0], Mesh(), pad_token_id=0, multiple=2)
    TRAFFIC.reset()
    with CommDebugMode() as counter:
        terms = module(batch)
    forward = dict(TRAFFIC.calls)
    TRAFFIC.reset()
    with CommDebugMode() as counter_back:
        terms.loss_sum.backward()
    seen = [sum(c.get_comm_counts().values()) for c in (counter, counter_back)]
    return {"forward": forward, "backward": dict(TRAFFIC.calls), "seen": seen, "bytes": dict(TRAFFIC.bytes)}


def test_two_collectives_per_layer_each_way():
    layers = 4
    plain = on_ranks(2, count_collectives, False)[0]
    # forward: two sums per layer, one for the embedding, and the numbers of the loss; backward: two per layer, and
    # one for what the loss gives the hidden states
    assert plain["forward"] == {("tp", "all_reduce"): 2 * layers + 1, ("tp", "all_gather"): 1}
    assert plain["backward"] == {("tp", "all_reduce"): 2 * layers + 1}
    assert plain["seen"] == [2 * layers + 2, 2 * layers + 1], "a collective that isn't ours"


def test_sequence_parallel_gathers_and_scatters():
    layers = 4
    shared = on_ranks(2, count_collectives, True)[0]
    # forward: the final norm's tokens are gathered too; backward: the embedding's scatter gathers
    assert shared["forward"] == {("tp", "all_gather"): 2 * layers + 2, ("tp", "reduce_scatter"): 2 * layers + 1}
    assert shared["backward"] == {
        ("tp", "all_gather"): 2 * layers + 1,
        ("tp", "reduce_scatter"): 2 * layers,
        ("tp", "all_reduce"): 1,
    }
    assert shared["seen"] == [4 * layers + 3, 4 * layers + 2]


def on_meta(kind: str) -> tuple[dict, dict]:
    """Placements and local shapes of a model on meta, and of the same real model."""
    found = []
    for device in ("meta", "cpu"):
        tiny = build(kind, "lora")
        if device == "meta":
            tiny.whole.to("meta")
            tiny.causal_lm.tie_weights()
        spread = cut(tiny, 2, True)
        shapes = {
            name: (tuple(p.shape), tuple(local_tensor(p).shape), str(getattr(p, "placements", None)))
            for name, p in tiny.whole.named_parameters()
        }
        found.append((shapes, spread.partial, {p.device.type for p in tiny.whole.parameters()}))
    dist.barrier()  # the first rank keeps the store that others still make groups with
    return found[0], found[1]


def test_a_model_on_meta_is_cut_like_a_real_one():
    for kind in ("tied", "moe"):
        meta, real = on_ranks(2, on_meta, kind)[0]
        assert meta[2] == {"meta"} and real[2] == {"cpu"}
        assert meta[:2] == real[:2]


def recompute(_: int) -> Outcome:
    tiny = build("qk_norm")
    tiny.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    return train(tiny, cut(tiny, 2, True), "packed")


def test_activation_recompute_changes_nothing():
    for ours in on_ranks(2, recompute, 0):
        assert_equal(ours, reference("qk_norm", "full", "packed"))


def parts_are_freed(_: int) -> list[int]:
    tiny = build("untied")
    cut(tiny, 2, False)
    held = {p._local_tensor.untyped_storage().nbytes() for p in tiny.whole.parameters() if isinstance(p, DTensor)}
    wanted = {4 * p._local_tensor.numel() for p in tiny.whole.parameters() if isinstance(p, DTensor)}
    dist.barrier()
    return [sorted(held), sorted(wanted)]


def test_the_other_ranks_shares_are_let_go():
    held, wanted = on_ranks(2, parts_are_freed, 0)[1]
    assert held == wanted


def packed_and_sharded(_: int) -> list[bool]:
    """Whether rows cut in two parts are right under `fully_shard`: what runs, the whole weight and its gradient."""
    mesh = build_mesh(Degrees(dp_shard=2, tp=2), "cpu")
    module = nn.Linear(6, 16, bias=False)
    weight = torch.arange(96.0).view(16, 6)
    module.weight = nn.Parameter(weight.clone())
    Cutter(mesh["tp"]).cut(module, "weight", 0, (Part(8, 8), Part(8, 8)))
    expose_local(module)
    fully_shard(module, mesh=mesh.fsdp_mesh(), shard_placement_fn=fsdp_placement)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    output = module(torch.ones(1, 6))
    rank = mesh["tp"].rank
    rows = [*range(4 * rank, 4 * rank + 4), *range(8 + 4 * rank, 12 + 4 * rank)]
    (output * torch.tensor(rows)).sum().backward()
    gradient = 2.0 * torch.arange(16.0)[:, None].expand(16, 6)  # of both data-parallel ranks
    return [
        torch.equal(output[0], weight[rows].sum(1)),
        torch.equal(module.weight.full_tensor(), weight),
        torch.equal(module.weight.grad.full_tensor(), gradient),
    ]


def test_packed_matrices_are_whole_again_under_fsdp():
    for same in on_ranks(4, packed_and_sharded, 0):
        assert same == [True, True, True]
