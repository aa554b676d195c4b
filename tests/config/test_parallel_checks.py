"""Settings of parallelism that exclude or need one another."""

from __future__ import annotations

import pytest

from swift.config import InferConfig, SftConfig, build_config, parse_command_line
from swift.config.checks import find_problems

BASE = {"model": "m", "dataset": ["rows.jsonl"]}


def messages(**flags) -> list[str]:
    return [problem.message for problem in find_problems(build_config(SftConfig, {**BASE, **flags}))]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sequence_parallel": True}, "tensor_parallel_size is 1"),
        ({"zero_stage": 4, "fsdp": "fsdp2"}, "zero_stage is 1, 2 or 3, not 4"),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload needs fsdp"),
        ({"deepspeed": "zero3", "fsdp": "fsdp2"}, "deepspeed and fsdp fsdp2 exclude each other"),
        ({"deepspeed": "zero3", "tensor_parallel_size": 2}, "deepspeed and tensor_parallel_size 2 exclude"),
        ({"deepspeed": "zero3", "parallel": "auto"}, "not DeepSpeed"),
        ({"torch_dtype": "float16", "fsdp": "fsdp2"}, "float16 needs a loss scale"),
        ({"torch_dtype": "float16", "pipeline_parallel_size": 2}, "float16 needs a loss scale"),
        ({"neftune_noise_alpha": 5, "tensor_parallel_size": 2}, "with tensor_parallel_size 2 ranks share rows"),
        ({"neftune_noise_alpha": 5, "sequence_parallel_size": 2}, "with sequence_parallel_size 2 ranks share rows"),
        ({"torch_compile": True, "tensor_parallel_size": 2}, "torch_compile can't see through"),
        ({"torch_compile": True, "expert_parallel_size": 2}, "inside layers with expert_parallel_size 2"),
        ({"tuner_type": "ia3", "fsdp": "fsdp2"}, "ia3 starts from, or changes, whole matrices"),
        ({"tuner_type": "adalora", "pipeline_parallel_size": 2}, "adalora starts from"),
        ({"use_dora": True, "tensor_parallel_size": 2}, "DoRA needs the length"),
        ({"init_weights": "pissa", "sequence_parallel_size": 2}, "the start pissa comes from whole weights"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
        ({"nnodes": 2, "node_rank": 2}, "numbered from 0 to 1, and node_rank is 2"),
        ({"node_rank": -1}, "node_rank is -1"),
        ({"master_port": 70000}, "is not a port"),
        ({"join_timeout_s": 0}, "join_timeout_s must be above 0"),
    ],
)
def test_refused(flags, words):
    assert [text for text in messages(**flags) if words in text], messages(**flags)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"sequence_parallel": True, "tensor_parallel_size": 2},
        {"parallel": "auto", "sequence_parallel": True, "fsdp_cpu_offload": True},
        {"fsdp": "fsdp2", "fsdp_cpu_offload": True, "zero_stage": 2},
        {"torch_dtype": "float16"},
        {"neftune_noise_alpha": 5, "fsdp": "fsdp2"},
        {"neftune_noise_alpha": 5, "pipeline_parallel_size": 2},
        {"init_weights": "orthogonal", "tensor_parallel_size": 2},
        {"tuner_type": "ia3"},
        {"torch_compile": True, "fsdp": "fsdp2", "pipeline_parallel_size": 2, "sequence_parallel_size": 2},
        {"deepspeed": "zero3"},
        {"nnodes": 2, "node_rank": 1, "master_port": 29500},
    ],
)
def test_allowed(flags):
    assert not messages(**flags)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--zero_stage 2", "zero_stage does nothing without fsdp"),
        ("--reduce_dtype bfloat16", "reduce_dtype does nothing without fsdp"),
        ("--pipeline_schedule zbv", "pipeline_schedule does nothing with pipeline_parallel_size 1"),
        ("--attention_impl ring", "attention_impl does nothing with sequence_parallel_size 1"),
        ("--nnodes 1 --master_addr h", "master_addr does nothing with nnodes 1"),
        ("--zero_stage 2 --fsdp fsdp2", ""),
        ("--zero_stage 2 --parallel auto", ""),
        ("--attention_impl ring --sequence_parallel_size 2", ""),
    ],
)
def test_what_does_nothing_is_said(words, note):
    notes = parse_command_line(SftConfig, words.split(), command="sft").notes
    assert notes == ([f"note: {note}"] if note else [])


def test_commands_without_parallelism_have_none_of_it():
    assert find_problems(build_config(InferConfig, {"model": "m"})) == []
