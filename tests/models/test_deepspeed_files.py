"""Checkpoints that DeepSpeed wrote, by itself and from here, become models; incomplete ones are refused by name."""

import shutil

import pytest
import torch
from distributed.pool import on_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swift.commands.export import export_deepspeed, main
from swift.config import build_config
from swift.config.commands import ExportConfig
from swift.core.errors import CheckpointError, UsageError

pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")


def _train_bare(model_dir: str, folder: str, stage: int) -> dict[str, torch.Tensor]:
    """Two steps of DeepSpeed without `swift`; the fp32 weights."""
    from swift.training.deepspeed import import_deepspeed

    deepspeed = import_deepspeed("cpu")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.arange(2, 22).view(1, 20) + torch.distributed.get_rank()
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder)
    get = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(p).detach().clone() for name, p in engine.module.named_parameters()}


@pytest.fixture(scope="module", params=[2, 3])
def written(request, tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare") / f"stage{request.param}"
    return folder, on_ranks(2, _train_bare, str(tiny_model_dir), str(folder), request.param)[0]


def export(folder, model, output, **more):
    flags = {"deepspeed_checkpoint": str(folder), "model": str(model), "output_dir": str(output), **more}
    return export_deepspeed(build_config(ExportConfig, flags))


def test_a_checkpoint_of_bare_deepspeed_becomes_a_model(written, tiny_model_dir, tmp_path):
    folder, weights = written
    export(folder, tiny_model_dir, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, weights[name]) and not torch.equal(tensor, before[name])
    (inside,) = folder.glob("global_step*")
    export(inside, tiny_model_dir, tmp_path / "half", torch_dtype="bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in half)
    with pytest.raises(UsageError, match="exists"):
        export(folder, tiny_model_dir, tmp_path / "out")


def test_missing_and_damaged_files_are_named(written, tiny_model_dir, tmp_path):
    folder, _ = written
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (shard,) = broken.glob("global_step*/*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"written by 2 process.*1 file.* missing: {shard.name}"):
        export(broken, tiny_model_dir, tmp_path / "out")
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged or incomplete"):
        export(broken, tiny_model_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_model_and_another_folder_are_refused(written, tmp_path):
    from fixtures import build_tiny_model

    other = build_tiny_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(CheckpointError, match="have another shape") as refused:
        export(written[0], other, tmp_path / "out")
    assert "--model" in refused.value.fix
    with pytest.raises(UsageError, match="no files of DeepSpeed's"):
        export(other, other, tmp_path / "out")
    with pytest.raises(UsageError, match="--output_dir"):
        main(build_config(ExportConfig, {"deepspeed_checkpoint": str(written[0]), "model": str(other)}))
