"""Runs of `swift sft --deepspeed`, by real DeepSpeed on two gloo ranks: equal to native ones, resumed, refused."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.pool import on_ranks
from runs import BASE, assert_same_bits, run_cli, start_cli, wait_for_step
from safetensors.torch import load_file

from swift import sft
from swift.checkpoint import verify
from swift.commands.precheck import precheck
from swift.config import SftConfig, build_config
from swift.core import extras
from swift.core.errors import DependencyError, UsageError

pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
slow = pytest.mark.slow


@pytest.fixture
def flags(tiny_model_dir, chat_rows, write_rows, tmp_path):
    return {
        **BASE,
        "model": str(tiny_model_dir),
        "dataset": [str(write_rows(tmp_path / "rows.jsonl", chat_rows(23)))],
        "val_dataset": [str(write_rows(tmp_path / "val.jsonl", chat_rows(5)))],
        "max_steps": 3,
        "lora_dropout": 0.0,
    }


def run(flags: dict, *, ranks: int = 2, **more) -> Path:
    """Train on so many ranks; the run's folder."""
    return Path(on_ranks(ranks, _run, {**flags, **more})[0])


def _run(flags: dict) -> str:
    try:
        return str(sft(**flags).run_dir)
    finally:
        if not dist.is_initialized():  # the pool leaves it at the end
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "logging.jsonl").read_text().splitlines()]


def public(run_dir: Path, step: int = 3) -> dict[str, torch.Tensor]:
    folder = run_dir / f"checkpoint-{step}"
    name = "model.safetensors" if (folder / "model.safetensors").is_file() else "adapter_model.safetensors"
    return load_file(folder / name)


def assert_equal_runs(ours: Path, native: Path) -> None:
    """Losses to 1e-6, norms to 1e-4, weights to 1e-5, relative; rates exactly."""
    for mine, theirs in zip(lines(ours), lines(native), strict=True):
        for name, tolerance in (("loss", 1e-6), ("eval_loss", 1e-6), ("grad_norm", 1e-4), ("learning_rate", 0.0)):
            assert (name in mine) == (name in theirs)
            if name in mine:
                assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=0), name
    mine, theirs = public(ours), public(native)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert (mine[name] - tensor).norm() <= 1e-5 * tensor.norm() + 1e-9, name


@pytest.mark.parametrize(
    "preset, tuner",
    [
        ("zero2", "lora"),
        ("zero3", "full"),
        pytest.param("zero1", "full", marks=slow),
        pytest.param("zero1", "lora", marks=slow),
        pytest.param("zero2", "full", marks=slow),
        pytest.param("zero3", "lora", marks=slow),
        pytest.param("zero2_offload", "full", marks=slow),
        pytest.param("zero3_offload", "full", marks=slow),
        pytest.param("zero3_offload", "lora", marks=slow),
    ],
)
def test_a_run_by_deepspeed_equals_a_native_one(flags, tmp_path, preset, tuner):
    flags |= {"tuner_type": tuner, "max_grad_norm": 0.5}
    native = run(flags, output_dir=str(tmp_path / "native"))
    ours = run(flags, output_dir=str(tmp_path / preset), deepspeed=preset)
    assert_equal_runs(ours, native)
    verify(ours / "checkpoint-3")
    assert (ours / "checkpoint-3" / "deepspeed" / "layout.json").is_file()


def test_the_style_of_file_that_others_use(flags, tmp_path):
    """bf16: DeepSpeed holds bf16 weights and fp32 copies; what is saved is in the forms of a native run."""
    values = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "bf16": {"enabled": True},
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": "auto",
        },
    }
    file = tmp_path / "ds_zero3.json"
    file.write_text(json.dumps(values))
    del flags["per_device_train_batch_size"], flags["learning_rate"]
    flags |= {"tuner_type": "full", "lr_scheduler_type": "constant"}
    ours = run(flags, deepspeed=str(file), output_dir=str(tmp_path / "ours"))
    given = {"per_device_train_batch_size": 1, "learning_rate": 2e-3, "adam_beta2": 0.95, "weight_decay": 0.0}
    native = run(flags, **given, torch_dtype="bfloat16", output_dir=str(tmp_path / "native"))
    for mine, theirs in zip(lines(ours), lines(native), strict=True):
        for name in ("loss", "eval_loss"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=5e-3)
        assert mine.get("learning_rate") == theirs.get("learning_rate")
    mine, theirs = public(ours), public(native)
    assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all((mine[n] - t).norm() <= 0.05 * t.norm() for n, t in theirs.items())


@pytest.mark.parametrize(
    "preset, tuner",
    [
        ("zero3", "lora"),
        pytest.param("zero2", "full", marks=slow),
        pytest.param("zero3", "full", marks=slow),
        pytest.param("zero1", "lora", marks=slow),
        pytest.param("zero2_offload", "lora", marks=slow),
        pytest.param("zero3_offload", "full", marks=slow),
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(flags, tmp_path, preset, tuner):
    flags |= {"tuner_type": tuner, "deepspeed": preset, "max_steps": 4, "save_steps": 2, "lora_dropout": 0.1}
    straight = run(flags, output_dir=str(tmp_path / "straight"))
    resumed = run(flags, output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=str(straight / "checkpoint-2"))
    logged = [
        {k: line.get(k) for k in ("step", "loss", "grad_norm", "eval_loss", "learning_rate")}
        for line in lines(straight)
    ]
    again = [
        {k: line.get(k) for k in ("step", "loss", "grad_norm", "eval_loss", "learning_rate")} for line in lines(resumed)
    ]
    assert again == [line for line in logged if line["step"] > 2 or line in again] and again
    assert_same_bits(public(straight, 4), public(resumed, 4))


@slow
def test_what_cannot_go_on_is_refused_by_name(flags, tmp_path):
    flags |= {"tuner_type": "lora", "max_steps": 1, "save_steps": 1}
    theirs = run(flags, deepspeed="zero2", output_dir=str(tmp_path / "zero2")) / "checkpoint-1"
    flags |= {"max_steps": 2, "resume_from_checkpoint": str(theirs), "output_dir": str(tmp_path / "other")}
    with pytest.raises(AssertionError, match="are of ZeRO stage 2, not 3"):
        run(flags, deepspeed="zero3")
    with pytest.raises(AssertionError, match=r"are of 2 process\(es\), not 1"):
        run(flags, ranks=1)  # with its settings
    with pytest.raises(UsageError, match="was written by DeepSpeed") as refused:
        sft(**flags, deepspeed="none")
    assert "--resume_only_model true" in refused.value.fix
    started = sft(**flags, resume_only_model=True)  # a native run takes the weights
    assert started.status == "finished" and started.steps == 2
    native = started.run_dir / "checkpoint-2"
    with pytest.raises(UsageError, match="was written without DeepSpeed"):
        sft(**{**flags, "resume_from_checkpoint": str(native)}, deepspeed="zero2")
    flags |= {"resume_from_checkpoint": str(native), "output_dir": str(tmp_path / "back")}
    run(flags, ranks=1, deepspeed="zero1", resume_only_model=True)
    assert (tmp_path / "back" / "checkpoint-2").is_dir()


@slow
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_the_best_weights_come_back_and_only_models_are_kept(flags, tmp_path, preset):
    """The rate is so high that the last evaluation isn't the best one."""
    flags |= {"tuner_type": "full", "max_steps": 3, "save_steps": 1, "learning_rate": 0.3, "save_only_model": True}
    flags |= {"load_best_model_at_end": True, "save_total_limit": 1, "lr_scheduler_type": "constant"}
    flags |= {"deepspeed": preset, "early_stop_interval": 2, "output_dir": str(tmp_path / "run")}
    folder = run(flags)
    losses = [line["eval_loss"] for line in lines(folder) if "eval_loss" in line]
    best = losses.index(min(losses)) + 1
    assert best < 3 == len(losses)
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert kept == [f"checkpoint-{best}", "checkpoint-3"] and not list(folder.glob("*/deepspeed"))
    assert f"took the weights of checkpoint-{best} back" in (folder / "logging.jsonl").read_text()


@slow
def test_a_stopped_run_saves_what_it_needs(flags, tmp_path):
    flags |= {"tuner_type": "lora", "deepspeed": "zero2", "max_steps": 400, "save_steps": 400, "nproc_per_node": 2}
    flags |= {"save_only_model": True, "output_dir": str(tmp_path / "run"), "eval_steps": 400}
    process = start_cli(flags)
    wait_for_step(tmp_path / "run", 2, process)
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert (saved / "deepspeed").is_dir() and "resume_from_checkpoint" in out
    assert "DeepSpeed" not in out.replace("DeepSpeed's ZeRO stage", "") and "WARNING" not in out
    step = int(saved.name.rpartition("-")[2])
    done = run_cli({**flags, "max_steps": step + 1, "resume_from_checkpoint": str(saved)})
    assert done.returncode == 0, done.stderr


def test_without_the_package_nothing_is_read(flags, monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="train with --deepspeed") as refused:
        precheck(build_config(SftConfig, {**flags, "deepspeed": "zero2"}))
    assert "swift-llm[deepspeed]" in refused.value.fix


def test_fp16_on_a_cpu_is_refused_by_name(flags):
    with pytest.raises(UsageError, match="can't train in float16"):
        sft(**flags, deepspeed='{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}')


def test_a_key_that_deepspeed_does_not_know_is_refused(flags, tmp_path):
    flags["deepspeed"] = '{"zero_optimization": {"stage": 2, "stages": 3}}'
    with pytest.raises(AssertionError, match=r"DeepSpeed refuses its configuration: .* stages"):
        run(flags, ranks=1, output_dir=str(tmp_path / "run"))
