"""Names of Megatron scripts: translated, accepted with a note, or refused with advice."""

from __future__ import annotations

import pytest

from swift.cli import main
from swift.config import PtConfig, SftConfig, parse_command_line
from swift.config import commands as classes
from swift.config.catalog import COMMANDS
from swift.config.files import to_flat
from swift.config.schema import settings_of
from swift.core.errors import UsageError
from swift.training.plan import accumulation_steps

SCRIPT = """
--model m --dataset rows.jsonl --micro_batch_size 2 --global_batch_size 16 --train_iters 100 --lr 1e-5 --min_lr 0
--lr_warmup_fraction 0.05 --lr_decay_style cosine --clip_grad 0.5 --tensor_model_parallel_size 2
--pipeline_model_parallel_size 4 --context_parallel_size 2 --expert_model_parallel_size 8 --sequence_parallel true
--virtual_pipeline_model_parallel_size 3 --use_distributed_optimizer true --recompute_granularity full
--recompute_method uniform --recompute_num_layers 1 --overlap_grad_reduce true --attention_backend flash
--moe_grouped_gemm true --moe_permute_fusion true --moe_aux_loss_coeff 1e-3 --moe_token_dispatcher_type alltoall
--cross_entropy_loss_fusion true --finetune true --no_save_optim true --no_save_rng false --save out --save_interval 50
--eval_interval 20 --eval_iters -1 --log_interval 5 --num_workers 4 --optimizer adam --expert_tensor_parallel_size 1
"""


def sft(*words: str):
    return parse_command_line(SftConfig, words, command="sft")


def test_a_script():
    parsed = sft(*SCRIPT.split())
    expected = {
        "per_device_train_batch_size": 2, "global_batch_size": 16, "max_steps": 100, "learning_rate": 1e-5,
        "warmup_ratio": 0.05, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "tensor_parallel_size": 2,
        "pipeline_parallel_size": 4, "sequence_parallel_size": 2, "expert_parallel_size": 8, "sequence_parallel": True,
        "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 3, "fsdp": "fsdp2", "zero_stage": 1,
        "gradient_checkpointing": True, "router_aux_loss_coef": 1e-3, "save_only_model": True, "output_dir": "out",
        "save_steps": 50, "eval_steps": 20, "logging_steps": 5, "dataloader_num_workers": 4,
        "optim": "adamw_torch_fused",
    }  # fmt: skip
    flat = to_flat(parsed.config)
    assert {name: flat[name] for name in expected} == expected
    said = " ".join(parsed.notes)
    for name in ("overlap_grad_reduce", "attention_backend", "finetune", "eval_iters", "min_lr", "recompute_method"):
        assert f"--{name}:" in said, f"{name} was taken in silence"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--min_lr 1e-6", "--min_lr_ratio"),
        ("--decoder_first_pipeline_num_layers 3", "--pipeline_layers"),
        ("--pipeline_model_parallel_layout Et*3|m", "--pipeline_layers"),
        ("--moe_expert_capacity_factor 1.2", "no token is dropped"),
        ("--moe_token_dispatcher_type flex", "alltoall"),
        ("--fp8_format hybrid", "bfloat16"),
        ("--mtp_num_layers 1", "not built"),
        ("--lr_decay_style exotic", "known values: cosine"),
        ("--recompute_granularity some", "known values: full"),
        ("--async_save true", "leave it out"),
        ("--eval_iters 10", "path#100"),
    ],
)
def test_refused_with_advice(words, advice):
    with pytest.raises(UsageError, match="not available yet") as caught:
        sft(*words.split())
    assert advice in caught.value.fix


def test_sharding_strategies():
    words = "--use_megatron_fsdp true --data_parallel_sharding_strategy optim_grads"
    assert to_flat(sft(*words.split()).config)["zero_stage"] == 2
    assert sft("--data_parallel_sharding_strategy", "no_shard").config.parallelism.fsdp == "none"
    config = sft("--optimizer_cpu_offload", "true").config.parallelism
    assert config.fsdp == "fsdp2" and config.fsdp_cpu_offload
    assert sft("--virtual_pipeline_model_parallel_size", "1").config.parallelism.pipeline_schedule == "1f1b"


def test_the_global_batch_becomes_accumulation():
    config = sft("--global_batch_size", "16", "--micro_batch_size", "2").config
    assert accumulation_steps(config, 4) == 2 and accumulation_steps(config, 8) == 1
    with pytest.raises(UsageError, match="3 data-parallel rank") as caught:
        accumulation_steps(config, 3)
    assert "--global_batch_size 18" in caught.value.fix


def test_the_command(capsys):
    assert COMMANDS["megatron sft"].module == "sft" and COMMANDS["megatron pt"].config == "PtConfig"
    assert settings_of(classes.MegatronSftConfig)["tuner_type"].default == "full"
    assert settings_of(PtConfig)["tuner_type"].default == "full"
    assert main(["megatron", "sft", "--help"]) == 0
    assert "usage: swift megatron sft" in capsys.readouterr().out
    assert main(["megatron", "sft", "--tensor_model_parallel_sise", "2"]) == 2
    assert "did you mean --tensor_model_parallel_size" in capsys.readouterr().err
    assert main(["megatron", "export"]) == 2
    assert "swift megatron sft" in capsys.readouterr().err
