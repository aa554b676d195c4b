"""What `apply_fsdp` makes of a model: which parts, on meta too, with layers that share, and with other axes."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as tf
from equality import Tiny, build, make_batches, relative, whole_tensor
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.core.errors import ModelError, UsageError
from swift.distributed.gradients import global_norm
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.sharding import GradientSync, apply_fsdp, sharded_modules
from swift.distributed.spread import Spread, finish_gradients
from swift.distributed.traffic import TRAFFIC
from swift.training.module import TrainModule

TWO = Degrees(dp_shard=2)


def shard(tiny: Tiny, mesh: Mesh | None = None, **settings: object) -> tuple[TrainModule, Spread]:
    spread, module = Spread(mesh or build_mesh(TWO, "cpu")), tiny.train_module()
    apply_fsdp(module, tiny.causal_lm, spread, ParallelConfig(fsdp="fsdp2", **settings), compute=torch.float32)
    return module, spread


def gradients(tiny: Tiny, module: TrainModule, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Of this rank's share of two micro-batches, added up by whatever the module does."""
    batches = make_batches("padded", 2)
    weight = sum(batch.weight for batch in batches)
    for batch in batches[rank::ranks]:
        (module(batch).loss_sum / weight).backward()
    return {name: p.grad for name, p in tiny.whole.named_parameters() if p.grad is not None}


def on_meta() -> dict[str, torch.Tensor]:
    """Cut a model without memory, then give each rank its rows."""
    with torch.device("meta"):
        tiny = Tiny(model := tf.AutoModelForCausalLM.from_config(build("tied").causal_lm.config), model)
    tiny.causal_lm.set_attn_implementation("sdpa")
    tiny.whole.train()
    module, spread = shard(tiny)
    assert all(p.is_meta and isinstance(p, DTensor) for p in module.parameters())
    assert tiny.causal_lm.lm_head.weight is tiny.causal_lm.model.embed_tokens.weight
    real = build("tied", attention="sdpa")
    module.to_empty(device="cpu")
    weights = dict(real.whole.named_parameters())
    with torch.no_grad():
        for name, parameter in tiny.whole.named_parameters():
            parameter.to_local().copy_(
                distribute_tensor(weights[name].data, parameter.device_mesh, parameter.placements).to_local()
            )
        for ours, theirs in zip(tiny.whole.buffers(), real.whole.buffers(), strict=True):
            ours.copy_(theirs)
    grads = gradients(tiny, module, spread.mesh["dp"].rank, 2)
    assert tiny.causal_lm.lm_head.weight is tiny.causal_lm.model.embed_tokens.weight
    return {name: whole_tensor(grad).clone() for name, grad in grads.items()}


def test_a_model_on_meta_is_cut_and_filled_later():
    real = build("tied", attention="sdpa")
    expected = gradients(real, real.train_module())
    for grads in on_ranks(2, on_meta):
        assert grads.keys() == expected.keys()
        assert max(relative(grads[name], expected[name]) for name in expected) < 1e-5


def repeating() -> Tiny:
    """A model that calls one of its layers twice."""
    tiny = build("tied")
    tiny.decoder.layers[3] = tiny.decoder.layers[1]
    return tiny


def repeated(stage: int) -> dict[str, torch.Tensor]:
    tiny = repeating()
    module, spread = shard(tiny, zero_stage=stage)
    GradientSync(module, stage).before_backward(True)
    grads = gradients(tiny, module, spread.mesh["dp"].rank, 2)
    return {name: whole_tensor(grad).clone() for name, grad in grads.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_that_runs_twice(stage: int):
    tiny = repeating()
    expected = gradients(tiny, tiny.train_module())
    for grads in on_ranks(2, repeated, stage):
        wrong = {n: e for n in expected if not (e := relative(grads[n], expected[n])) < 1e-5}
        assert grads.keys() == expected.keys() and not wrong


def tied_layers() -> str:
    tiny = build("tied")
    tiny.decoder.layers[2].mlp.up_proj.weight = tiny.decoder.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match="weights in more than one layer") as caught:
        shard(tiny)
    torch.distributed.barrier()
    return str(caught.value.fix)


def test_layers_that_share_a_matrix_are_refused():
    assert "--fsdp none" in on_ranks(2, tied_layers)[0]


class Scaled(nn.Module):
    """A layer with a number that is trained."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden + self.gain * self.layer(hidden, *args, **kwargs)


def with_scalar() -> Tiny:
    tiny = build("tied")
    tiny.decoder.layers[1] = Scaled(tiny.decoder.layers[1])
    return tiny


def scalars() -> dict[str, torch.Tensor]:
    tiny = with_scalar()
    module, spread = shard(tiny)
    gradients(tiny, module, spread.mesh["dp"].rank, 2)
    finish_gradients(tiny.whole.named_parameters(), spread)
    assert not isinstance(tiny.decoder.layers[1].gain, DTensor)
    return {name: whole_tensor(p.grad).clone() for name, p in tiny.whole.named_parameters()}


def test_single_numbers_stay_whole_and_are_added_up():
    tiny = with_scalar()
    expected = gradients(tiny, tiny.train_module())
    for grads in on_ranks(2, scalars):
        assert max(relative(grads[name], expected[name]) for name in expected) < 1e-5


def bad_settings() -> None:
    mesh = build_mesh(TWO, "cpu")
    with pytest.raises(UsageError, match="no ZeRO stage 4"):
        shard(build("tied"), mesh, zero_stage=4)
    with pytest.raises(UsageError, match="in bfloat16 too"):
        shard(build("tied"), mesh, zero_stage=1, reduce_dtype="bfloat16")
    torch.distributed.barrier()


def test_impossible_settings_are_refused():
    on_ranks(2, bad_settings)


def test_one_rank_keeps_the_model_as_it_is():
    tiny = build("tied")
    module = tiny.train_module()
    apply_fsdp(module, tiny.causal_lm, Spread(Mesh()), ParallelConfig(fsdp="fsdp2"), compute=torch.float32)
    assert not sharded_modules(module)


def with_other_cuts(degrees: Degrees) -> tuple[float, list[str]]:
    """Columns over tp, rows over both; experts over ep."""
    tiny = build("moe" if degrees.ep > 1 else "tied")
    mesh = build_mesh(degrees, "cpu")
    for layer in tiny.decoder.layers:
        if degrees.tp > 1:
            cuts = [(layer.self_attn.q_proj, "weight", 0), (layer.self_attn.o_proj, "weight", 1)]
            device_mesh = mesh["tp"].device_mesh
        else:
            cuts = [(layer.mlp.experts, "gate_up_proj", 0), (layer.mlp.experts, "down_proj", 0)]
            device_mesh = mesh.expert_mesh("ep")
        for module, name, dim in cuts:
            cut = distribute_tensor(getattr(module, name).data, device_mesh, [Shard(dim)])
            setattr(module, name, nn.Parameter(cut))
    module, spread = tiny.train_module(), Spread(mesh)
    apply_fsdp(module, tiny.causal_lm, spread, ParallelConfig(fsdp="fsdp2"), compute=torch.float32)
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    named = list(tiny.whole.named_parameters())
    axes = {str(axis) for _, p in named for axis in p.device_mesh.mesh_dim_names}
    return global_norm(named, spread), sorted(axes)


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        (Degrees(dp_shard=2, tp=2), ["fsdp", "tp"]),
        (Degrees(dp_shard=2, ep=2), ["efsdp", "ep", "fsdp"]),
        (Degrees(dp_replicate=2, dp_shard=2, ep=2), ["dp_replicate", "efsdp", "ep", "fsdp"]),
        pytest.param(Degrees(dp_replicate=2, dp_shard=2, tp=2), ["dp_replicate", "fsdp", "tp"], marks=pytest.mark.slow),
        pytest.param(Degrees(dp_shard=4, ep=2), ["efsdp", "ep", "fsdp"], marks=pytest.mark.slow),
    ],
)
def test_weights_that_other_axes_cut_are_cut_further_and_counted_once(degrees: Degrees, axes: list[str]):
    whole = build("moe" if degrees.ep > 1 else "tied").whole
    expected = math.sqrt(sum(float(p.double().square().sum()) for p in whole.parameters()))
    for norm, seen in on_ranks(degrees.world_size, with_other_cuts, degrees):
        assert norm == pytest.approx(expected, rel=1e-6) and seen == axes


def packed(columns: int) -> tuple[bool, list[str]]:
    """Gate and up in one matrix, each of them cut over tp."""
    mesh = build_mesh(Degrees(dp_shard=2, tp=2), "cpu")
    tiny = build("tied")
    mlp = tiny.decoder.layers[0].mlp
    mlp.up_proj = nn.Linear(columns, 8, bias=False)
    rows = torch.arange(8 * columns, dtype=torch.float32).reshape(8, columns)
    own = torch.cat([part.chunk(2)[mesh["tp"].rank] for part in rows.chunk(2)])
    placement = _StridedShard(0, split_factor=2)
    cut = DTensor.from_local(own, mesh["tp"].device_mesh, [placement], shape=rows.shape, stride=rows.stride())
    mlp.up_proj.weight = nn.Parameter(cut)
    try:
        shard(tiny, mesh)
    except ModelError as error:
        torch.distributed.barrier()
        return False, [error.message]
    weight = mlp.up_proj.weight
    return torch.equal(weight.full_tensor(), rows), [str(place) for place in weight.placements]


def test_a_packed_matrix_is_sharded_along_its_other_dimension():
    for equal, placements in on_ranks(4, packed, 6):
        assert equal and placements[0] == "S(1)" and placements[1].startswith("_S")
    _, (message,) = on_ranks(4, packed, 5)[0]
    assert "2 doesn't divide 5" in message


def traffic(degrees: Degrees, stage: int) -> tuple[dict, int, float]:
    """Two micro-batches on each rank: bytes over those of all weights, gathers, and the layers' share of them."""
    tiny = build("tied")
    mesh = build_mesh(degrees, "cpu")
    module, _ = shard(tiny, mesh, zero_stage=stage)
    sync = GradientSync(module, stage)
    num_bytes = 4 * sum(p.numel() for p in module.parameters())
    layers = 4 * sum(p.numel() for p in tiny.decoder.layers.parameters()) / num_bytes
    TRAFFIC.reset()
    for last in (False, True):
        loss = module(make_batches("padded", 1)[0]).loss_sum
        sync.before_backward(last)
        loss.backward()
    sent = {key: round(value / num_bytes, 3) for key, value in TRAFFIC.bytes.items()}
    return sent, TRAFFIC.calls["fsdp", "all_gather"], layers


@pytest.mark.parametrize(
    ("degrees", "stage", "reduces"),
    [(TWO, 1, 1), (TWO, 2, 2), (TWO, 3, 2), (Degrees(dp_replicate=2, dp_shard=2), 3, 2)],
)
def test_bytes_on_the_wire_are_those_of_the_stage(degrees: Degrees, stage: int, reduces: int):
    sent, gathers, layers = on_ranks(degrees.world_size, traffic, degrees, stage)[0]
    # half of the weights each time; stage 3 gathers, for each micro-batch, all of them and then the layers again
    assert gathers == (2 * (4 + 1 + 4) if stage == 3 else 4 + 1)
    assert sent["fsdp", "all_gather"] == pytest.approx(2 * (1 + layers) / 2 if stage == 3 else 1 / 2, abs=0.01)
    assert sent["fsdp", "reduce_scatter"] == reduces / 2
    assert sent.get(("dp_replicate", "all_reduce"), 0) == (0.5 if degrees.dp_replicate > 1 else 0)  # once a step
