"""Each rank reads its own part of a checkpoint, of any layout, and all parts together are the loaded model."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import transformers as tf
from distributed.pool import on_ranks
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from training.architectures import build

from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, UsageError
from swift.distributed.pieces import pieces_of
from swift.models import fill
from swift.models.adapters import Swift
from swift.models.empty import build_empty_model
from swift.models.fill import Start, fill_model
from swift.models.loading import load_model
from swift.models.prepare import seed_everything
from swift.models.tuners import apply_tuner

LORA = TunerConfig(tuner_type="lora", lora_rank=4)
FULL = TunerConfig(tuner_type="full")


def reference(path: Path, tuner: TunerConfig, dtype: torch.dtype, adapters: tuple[str, ...] = ()) -> nn.Module:
    """What one process makes."""
    config = ModelConfig(model=str(path), adapters=list(adapters))
    model = load_model(path, config, dtype=dtype, attn_implementation="eager")
    seed_everything(7)
    return apply_tuner(model, tuner, adapters=config.adapters)


def cut(model: nn.Module, mesh, placements: dict[str, object]) -> None:
    """Tensor-parallel DTensors by hand: name endings to placements."""
    done: dict[int, nn.Parameter] = {}
    modules = dict(model.named_modules())
    found = {name: p for name in modules for ending, p in placements.items() if name.endswith(ending)}
    for path, placement in found.items():
        for parameter in list(modules[path]._parameters.values()):
            if parameter is not None:
                spread = nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
                done[id(parameter)] = spread.requires_grad_(parameter.requires_grad)
    for part in modules.values():
        for name, parameter in list(part._parameters.items()):
            if id(parameter) in done:
                part._parameters[name] = done[id(parameter)]


CUTS = {
    "q_proj": Shard(0),
    "q_proj.base_layer": Shard(0),
    "q_proj.lora_B.default": Shard(0),
    "o_proj": Shard(1),
    "o_proj.base_layer": Shard(1),
    "o_proj.lora_A.default": Shard(1),
    "embed_tokens": Shard(0),
}
LAYOUTS = ("fsdp", "tp", "fsdp_tp", "packed")


def spread_model(path: Path, tuner: TunerConfig, layout: str, dtype: torch.dtype, adapters: tuple[str, ...] = ()):
    config = ModelConfig(model=str(path), adapters=list(adapters))
    model = build_empty_model(path, config, dtype=dtype, attn_implementation="eager")
    whole = apply_tuner(model, tuner, adapters=config.adapters)
    world = int(os.environ["WORLD_SIZE"])
    sizes = (2, world // 2) if "_" in layout else (1, world) if layout in ("tp", "packed") else (world, 1)
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
    if "tp" in layout:
        cut(model, grid["tp"], CUTS)
    if layout == "packed":
        for part in (module for module in model.modules() if hasattr(module, "gate_up_proj")):
            for name, placement in {"gate_up_proj": _StridedShard(1, split_factor=2), "down_proj": Shard(2)}.items():
                spread = distribute_tensor(getattr(part, name).data, grid["tp"], [placement])
                setattr(part, name, nn.Parameter(spread))
    if "fsdp" in layout:
        for layer in model.model.layers:
            fully_shard(layer, mesh=grid["fsdp"])
        fully_shard(whole, mesh=grid["fsdp"])
    fill_model(whole, model, Start(path, config, tuner, 7, dtype), device="cpu")
    return whole


def compare(path: Path, tuner: TunerConfig, layout: str, dtype: torch.dtype, adapters: tuple[str, ...] = ()) -> int:
    whole = spread_model(path, tuner, layout, dtype, adapters)
    expected = dict(reference(path, tuner, dtype, adapters).named_parameters())
    own = dict(whole.named_parameters())
    assert own.keys() == expected.keys()
    cut_parameters = 0
    for name, parameter in own.items():
        assert parameter.dtype == expected[name].dtype, name
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        cut_parameters += local.numel() < expected[name].numel()
        for piece in pieces_of(parameter):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            assert torch.equal(piece.view(local), expected[name][box]), name
    if layout == "fsdp":  # what fully_shard keeps to itself knows of the numbers as well
        ids = torch.arange(3, 20)[None]
        ours, theirs = (
            model.eval()(input_ids=ids).logits for model in (whole, reference(path, tuner, dtype, adapters))
        )
        assert torch.equal(ours, theirs)
    return cut_parameters


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
@pytest.mark.parametrize("tuner", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2-bias"])
def test_two_ranks(name, tuner, layout, tmp_path):
    build(name).save_pretrained(tmp_path)
    assert min(on_ranks(2, compare, tmp_path, tuner, layout, torch.float32)) > 0


def test_rows_that_do_not_divide_over_three_ranks_in_bf16(tmp_path):
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="40KB")
    assert min(on_ranks(3, compare, tmp_path, LORA, "fsdp", torch.bfloat16)) > 0


def test_sharding_over_tensor_parallelism(tmp_path):
    build("llama-tied").save_pretrained(tmp_path)
    assert min(on_ranks(4, compare, tmp_path, LORA, "fsdp_tp", torch.float32)) > 0


@pytest.mark.parametrize("layout", ["packed", "fsdp"])
def test_experts_of_a_file_each(layout, tmp_path):
    build("qwen3-moe").save_pretrained(tmp_path)
    assert any(".experts.0.gate_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    assert min(on_ranks(2, compare, tmp_path, FULL, layout, torch.float32)) > 0


def test_a_given_adapter_goes_into_the_shards(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build("llama").save_pretrained(base)
    tuned = reference(base, LORA, torch.float32)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    Swift.save(tuned, adapter)
    assert min(on_ranks(2, compare, base, LORA, "fsdp", torch.float32, (str(adapter),))) > 0
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AssertionError, match="lacks tensors"):
        on_ranks(2, compare, base, LORA, "fsdp", torch.float32, (str(adapter),))


def test_trained_modules_beside_the_adapter_start_as_in_the_files(tmp_path):
    build("llama").save_pretrained(tmp_path)
    tuner = TunerConfig(tuner_type="lora", lora_rank=4, modules_to_save=["lm_head"], target_modules=["q_proj"])
    assert min(on_ranks(2, compare, tmp_path, tuner, "fsdp", torch.float32)) > 0


def fill_alone(path: Path, tuner: TunerConfig) -> nn.Module:
    config = ModelConfig(model=str(path))
    model = build_empty_model(path, config, dtype=torch.float32)
    whole = apply_tuner(model, tuner)
    fill_model(whole, model, Start(path, config, tuner, 7, torch.float32), device="cpu")
    return whole


@pytest.mark.parametrize("init", ["gaussian", "true"])
def test_adapters_start_from_the_same_numbers(init, tmp_path):
    build("llama").save_pretrained(tmp_path)
    tuner = TunerConfig(tuner_type="lora", lora_rank=4, init_weights=init, lora_dropout=0.1)
    ours = fill_alone(tmp_path, tuner)
    assert isinstance(ours, PeftModel)
    expected = reference(tmp_path, tuner, torch.float32)
    for (name, mine), theirs in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.requires_grad == theirs.requires_grad, name


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], []], ids=["with layers", "alone"])
def test_adapters_on_experts_start_from_the_same_numbers(targets, tmp_path):
    build("qwen3-moe").save_pretrained(tmp_path)
    tuner = TunerConfig(
        tuner_type="lora",
        lora_rank=4,
        lora_dropout=0.0,
        target_modules=targets,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    ours, expected = fill_alone(tmp_path, tuner), reference(tmp_path, tuner, torch.float32)
    drawn = 0
    for (name, mine), theirs in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        drawn += "experts" in name and "lora_A" in name and bool(mine.abs().sum())
    assert drawn == 4
    assert min(on_ranks(2, compare, tmp_path, tuner, "fsdp", torch.float32)) > 0


def test_starts_from_base_weights_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="DoRA") as caught:
        fill_alone(tmp_path, TunerConfig(tuner_type="lora", use_dora=True))
    assert caught.value.where == "--use_dora"


def test_a_pipeline_stage_reads_the_tied_matrix_for_its_head(tmp_path):
    built = build("llama-tied")
    built.save_pretrained(tmp_path)
    config = ModelConfig(model=str(tmp_path))
    model = build_empty_model(tmp_path, config, dtype=torch.float32)
    model.model.embed_tokens = nn.Identity()
    model.model.layers[0] = nn.Identity()
    fill_model(model, model, Start(tmp_path, config, FULL, 7, torch.float32), device="cpu")
    assert torch.equal(model.lm_head.weight, built.lm_head.weight)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, built.model.layers[1].mlp.up_proj.weight)
    assert torch.equal(model.model.rotary_emb.inv_freq, built.model.rotary_emb.inv_freq)


def test_tied_parameters_stay_one(tmp_path):
    build("llama-tied").save_pretrained(tmp_path)
    whole = fill_alone(tmp_path, FULL)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight


def damaged(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_lack_or_do_not_fit_are_named(tmp_path):
    build("llama").save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    damaged(tmp_path, lambda tensors: tensors.update({name: tensors[name][:5].clone()}))
    with pytest.raises(ModelError, match=f"another shape.*{name}"):
        fill_alone(tmp_path, FULL)
    damaged(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"lacks weights: {name}"):
        fill_alone(tmp_path, FULL)


def test_two_different_tied_matrices_are_refused(tmp_path):
    build("llama-tied").save_pretrained(tmp_path)
    both = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})  # noqa: E731
    damaged(tmp_path, both)
    fill_alone(tmp_path, FULL)
    damaged(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match="two different ones"):
        fill_alone(tmp_path, FULL)


def write_large_checkpoint(path: Path, layers: int, width: int) -> int:
    """A random bf16 llama in one file per layer; returns its bytes."""
    path.mkdir(exist_ok=True)
    config = tf.LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    empty = build_empty_model(path, ModelConfig(model=str(path)), dtype=torch.bfloat16)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in empty.state_dict().items():
        file = f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors"
        files.setdefault(file, {})[name] = tensor
    total = 0
    for file, tensors in files.items():
        values = {name: torch.empty(t.shape, dtype=t.dtype).uniform_(-0.1, 0.1) for name, t in tensors.items()}
        total += sum(value.numel() * 2 for value in values.values())
        save_file(values, path / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def resident_bytes() -> int:
    """Resident memory: what the process itself holds, and pages of files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile")))


def measure_filling(path: Path, block_bytes: int) -> tuple[int, int]:
    """Peak growth of resident memory while a rank fills its shard, and the shard's bytes."""
    fill.BLOCK_BYTES = block_bytes
    config = ModelConfig(model=str(path))
    model = build_empty_model(path, config, dtype=torch.bfloat16)
    grid = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid)
    fully_shard(model, mesh=grid)
    before, peaks, done = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(resident_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    fill_model(model, model, Start(path, config, FULL, 7, torch.bfloat16), device="cpu")
    done.set()
    watcher.join()
    shard = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    return max(peaks), shard


def test_memory_is_that_of_the_shard(tmp_path):
    total = write_large_checkpoint(tmp_path, layers=6, width=1024)
    for peak, shard in on_ranks(2, measure_filling, tmp_path, 1 << 20):
        assert abs(shard - total / 2) < 0.01 * total
        largest = 4 * 1024 * 1024 * 2
        assert peak <= 1.2 * shard + largest, (peak, shard)


@pytest.mark.slow
def test_memory_of_two_gigabytes_on_four_ranks(tmp_path):
    total = write_large_checkpoint(tmp_path, layers=16, width=2048)
    assert total > 2e9
    results = on_ranks(4, measure_filling, tmp_path, fill.BLOCK_BYTES, timeout_s=280)
    print([f"peak {peak / 1e6:.0f} MB, shard {shard / 1e6:.0f} MB" for peak, shard in results])
    for peak, shard in results:
        largest = 4 * 2048 * 2048 * 2
        assert peak <= 1.2 * shard + largest, (peak, shard)
