"""Sizes of the axes: what is inferred, and that the impossible is refused with the nearest possible."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from swift.config.degrees import (
    Degrees,
    ModelShape,
    degree_problems,
    is_possible,
    nearest_possible,
    read_model_shape,
    resolve_degrees,
)
from swift.config.model_shape import shape_of
from swift.config.parallel import ParallelConfig
from swift.core.errors import ModelError, UsageError

DENSE = ModelShape(32, 32, 8, 4096, 14336, 32000)
MOE = ModelShape(4, 4, 2, 64, 128, 2000, experts=8)
SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "sequence_parallel_size",
         "ep": "expert_parallel_size", "impl": "attention_impl", "shard": "dp_shard_size",
         "replicate": "dp_replicate_size", "schedule": "pipeline_schedule", "pieces": "pipeline_stages_per_rank",
         "layers": "pipeline_layers"}  # fmt: skip


def parallel(**flags) -> ParallelConfig:
    return ParallelConfig(**{SHORT.get(name, name): value for name, value in flags.items()})


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ({}, 1, Degrees()),
        ({}, 8, Degrees(dp_replicate=8)),
        ({"fsdp": "fsdp2"}, 8, Degrees(dp_shard=8)),
        ({"fsdp": "fsdp2", "shard": 2}, 8, Degrees(dp_replicate=4, dp_shard=2)),
        ({"fsdp": "fsdp2", "replicate": 2}, 8, Degrees(dp_replicate=2, dp_shard=4)),
        ({"fsdp": "hsdp"}, 16, Degrees(dp_replicate=4, dp_shard=4)),
        ({"fsdp": "hsdp", "tp": 2}, 16, Degrees(dp_replicate=4, dp_shard=2, tp=2)),
        ({"fsdp": "hsdp", "pp": 2}, 16, Degrees(pp=2, dp_replicate=2, dp_shard=4)),
        ({"fsdp": "hsdp"}, 4, Degrees(dp_shard=4)),
        ({"fsdp": "fsdp2", "tp": 2, "cp": 2}, 8, Degrees(dp_shard=2, ulysses=2, tp=2)),
        ({"cp": 8, "tp": 4}, 32, Degrees(ring=4, ulysses=2, tp=4)),
        ({"cp": 4, "impl": "ring"}, 4, Degrees(ring=4)),
        ({"cp": 4, "impl": "allgather"}, 8, Degrees(dp_replicate=2, ring=4)),
        ({"pp": 4, "tp": 2}, 8, Degrees(pp=4, tp=2)),
    ],
)
def test_inferred(flags, world, expected):
    found = resolve_degrees(parallel(**flags), world, DENSE, ranks_per_node=4)
    assert found == expected and found.world_size == world


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ({"ep": 2, "fsdp": "fsdp2"}, 4, Degrees(dp_shard=4, ep=2)),
        ({"ep": 2}, 4, Degrees(dp_replicate=2, dp_shard=2, ep=2)),  # as few ranks as it takes
        ({"ep": 2, "cp": 2}, 4, Degrees(dp_replicate=2, ulysses=2, ep=2)),
        ({"ep": 4, "cp": 2, "fsdp": "fsdp2"}, 8, Degrees(dp_shard=4, ulysses=2, ep=4)),
        ({"ep": 2, "pp": 2}, 4, Degrees(pp=2, dp_shard=2, ep=2)),
    ],
)
def test_experts(flags, world, expected):
    found = resolve_degrees(parallel(**flags), world, MOE)
    assert found == expected and found.efsdp * found.ep == found.fsdp


def test_ranks_of_a_node_come_from_the_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve_degrees(parallel(fsdp="hsdp"), 8, DENSE).dp_shard == 2


@pytest.mark.parametrize(
    ("flags", "world", "shape", "message", "fix"),
    [
        ({"tp": 4, "pp": 2}, 12, DENSE, "12 processes can't be shared out as tp 4 x pp 2: 8 doesn't divide 12",
         "--tensor_parallel_size 4 --pipeline_parallel_size 3"),
        ({"tp": 2}, 1, DENSE, "tp 2 needs 2 processes, and there is 1 process",
         "start 2 (--nproc_per_node, --nnodes), or --tensor_parallel_size 1"),
        ({"tp": 16}, 16, DENSE, "8 key-value heads can't be shared by 16 ranks", "--tensor_parallel_size 8"),
        ({"tp": 8}, 8, MOE, "4 attention heads can't be shared by 8 ranks", "--tensor_parallel_size 2"),
        ({"cp": 8, "impl": "ulysses"}, 8, MOE, "4 attention heads (of one tensor-parallel rank) can't be divided among "
         "8 ranks", "--sequence_parallel_size 8 --attention_impl auto"),
        ({"pp": 8}, 8, MOE, "4 layers can't fill 8 pipeline stages", "--pipeline_parallel_size 4"),
        ({"pp": 4, "schedule": "zbv"}, 4, MOE, "4 layers can't fill 4 x 2 pieces pipeline stages",
         "--pipeline_parallel_size 4 --pipeline_schedule 1f1b"),
        ({"pp": 2, "layers": [1, 1, 2]}, 2, MOE, "pipeline_layers gives 3 numbers for 2 stage(s)",
         "--pipeline_parallel_size 2 and without pipeline_layers"),
        ({"pp": 2, "layers": [1, 2]}, 2, MOE, "pipeline_layers adds up to 3, and the model has 4 layers",
         "--pipeline_parallel_size 2 and without pipeline_layers"),
        ({"pp": 2, "layers": [0, 4]}, 2, MOE, "every stage of pipeline_layers needs at least one layer",
         "--pipeline_parallel_size 2 and without pipeline_layers"),
        ({"pp": 2, "pieces": 2}, 2, DENSE, "pipeline_schedule 1f1b has one piece of layers on each rank, not 2",
         "--pipeline_schedule interleaved, or --pipeline_parallel_size 2 and without pipeline_stages_per_rank"),
        ({"pp": 2, "schedule": "zbv", "pieces": 3}, 2, DENSE,
         "pipeline_schedule zbv has exactly 2 pieces of layers on each rank, not 3", None),
        ({"ep": 4}, 4, DENSE, "expert_parallel_size 4, and the model has no experts", "--expert_parallel_size 1"),
        ({"ep": 3}, 6, MOE, "8 experts can't be shared by 3 ranks", "--expert_parallel_size 2"),
        ({"ep": 8, "fsdp": "fsdp2"}, 4, MOE, "experts are shared by ranks that share a model or a sequence: 8 doesn't "
         "divide their 4", "--expert_parallel_size 4"),
        ({"fsdp": "fsdp2", "shard": 3}, 8, DENSE, "dp_shard_size 3 doesn't divide the 8 rank(s) left for data",
         "without dp_shard_size"),
        ({"fsdp": "fsdp2", "shard": 2, "replicate": 2}, 8, DENSE,
         "dp_replicate 2 x dp_shard 2 is 4, and 8 rank(s) are left for data",
         "without dp_replicate_size, dp_shard_size"),
        ({"shard": 4}, 8, DENSE, "dp_shard_size 4 shards nothing without fsdp", None),
        ({"fsdp": "hsdp", "tp": 4}, 16, DENSE, "hsdp shards within a node, and tensor, sequence and pipeline parallel "
         "leave one data-parallel rank there", None),
        ({"tp": 0}, 1, DENSE, "tensor_parallel_size must be at least 1, not 0", "--tensor_parallel_size 1"),
        ({"shard": 0}, 2, DENSE, "dp_shard_size must be at least 1, or -1, not 0", "without dp_shard_size"),
    ],
)  # fmt: skip
def test_impossible(flags, world, shape, message, fix):
    """The first fault says it; its fix can be taken, and then nothing is wrong any more."""
    problems = degree_problems(parallel(**flags), world, shape, ranks_per_node=4)
    assert message in [problem.message for problem in problems]
    assert fix is None or fix in [problem.fix for problem in problems]
    near = nearest_possible(parallel(**flags), world, shape, ranks_per_node=4)
    assert near is not None and is_possible(near, world, shape, ranks_per_node=4)
    with pytest.raises(UsageError):
        resolve_degrees(parallel(**flags), world, shape, ranks_per_node=4)


def test_everything_is_tried_over_small_worlds():
    """What isn't refused multiplies to the world, and what is has a way out."""
    for world in (1, 2, 4, 6, 8, 12):
        for tp in (1, 2, 3):
            for cp in (1, 2, 4):
                for pp in (1, 2, 3):
                    for ep in (1, 2, 4):
                        for fsdp in ("none", "fsdp2", "hsdp"):
                            config = parallel(tp=tp, cp=cp, pp=pp, ep=ep, fsdp=fsdp)
                            if is_possible(config, world, MOE, ranks_per_node=4):
                                found = resolve_degrees(config, world, MOE, ranks_per_node=4)
                                assert found.world_size == world and found.fsdp % found.ep == 0
                            else:
                                near = nearest_possible(config, world, MOE, ranks_per_node=4)
                                assert near is not None and is_possible(near, world, MOE, ranks_per_node=4)


def test_an_unknown_model_is_checked_as_far_as_it_goes():
    assert degree_problems(parallel(tp=3), 8, None)[0].message.startswith("8 processes can't be shared out as tp 3")
    assert not degree_problems(parallel(tp=8), 8, None)


CONFIGS = {
    "llama": ({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
               "intermediate_size": 128, "vocab_size": 10, "tie_word_embeddings": True},
              ModelShape(2, 4, 2, 64, 128, 10, tied=True)),
    "gpt2": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_inner": None},
             ModelShape(12, 12, 12, 768, 3072, 50257)),
    "falcon": ({"num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True,
                "vocab_size": 9}, ModelShape(2, 71, 1, 4544, 18176, 9)),
    "mixtral": ({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
                 "intermediate_size": 128, "vocab_size": 10, "num_local_experts": 8, "num_experts_per_tok": 2},
                ModelShape(2, 4, 2, 64, 128, 10, experts=8, experts_per_token=2)),
    "deepseek": ({"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
                  "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256,
                  "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
                 ModelShape(61, 128, 128, 7168, 18432, 129280, experts=256, expert_intermediate=2048,
                            experts_per_token=8, dense_layers=3)),
    "multimodal": ({"vision_config": {"hidden_size": 9}, "tie_word_embeddings": True,
                    "text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
                                    "intermediate_size": 128, "vocab_size": 10, "head_dim": 32}},
                   ModelShape(2, 4, 4, 64, 128, 10, tied=True, head_dim=32)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_read_from_config_json(kind, tmp_path):
    data, shape = CONFIGS[kind]
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_model_shape(tmp_path) == read_model_shape(tmp_path / "config.json") == shape


def test_config_json_without_sizes(tmp_path):
    with pytest.raises(ModelError, match="can't be read"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    with pytest.raises(ModelError, match="doesn't say how many layers"):
        read_model_shape(tmp_path)
    assert shape_of({"hidden_size": 3}) is None


def test_the_command_line_says_so_before_torch(tiny_model_dir, tmp_path):
    """Both faults of an impossible request, in the words above, without importing torch."""
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    code = "import sys; from swift.cli import main; code = main(sys.argv[1:]); sys.exit('torch' in sys.modules or code)"
    words = ["sft", "--model", str(tiny_model_dir), "--dataset", str(tmp_path / "rows.jsonl"), "--nproc_per_node", "8"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--tensor_parallel_size", "3", "--pipeline_parallel_size", "2"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "8 processes can't be shared out as tp 3 x pp 2: 6 doesn't divide 8" in done.stderr
    assert "4 attention heads can't be shared by 3 ranks" in done.stderr
    assert "--tensor_parallel_size 2 --pipeline_parallel_size 2" in done.stderr
