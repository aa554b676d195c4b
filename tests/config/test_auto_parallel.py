"""`--parallel auto`: what is chosen for models and machines that one meets, and that it says why."""

from __future__ import annotations

import pytest

from swift.config import SftConfig, build_config
from swift.config.auto_parallel import choose, workload
from swift.config.degrees import ModelShape, resolve_degrees
from swift.config.parallel import ParallelConfig
from swift.core.errors import UsageError

GIB = 1 << 30
SMALL = ModelShape(30, 9, 3, 576, 1536, 49152, tied=True)
SEVEN = ModelShape(32, 32, 8, 4096, 14336, 32000)
SEVENTY = ModelShape(80, 64, 8, 8192, 28672, 128256)
HUGE = ModelShape(126, 128, 8, 16384, 53248, 128256)
MOE = ModelShape(48, 32, 4, 2048, 6144, 151936, experts=128, head_dim=128, expert_intermediate=768, experts_per_token=8)
DEEPSEEK = ModelShape(
    61, 128, 128, 7168, 18432, 129280,
    experts=256, expert_intermediate=2048, experts_per_token=8, dense_layers=3,
)  # fmt: skip


def chosen(shape, world, memory_gib, tokens=2048, *, per_node=8, given=(), **flags):
    config = build_config(SftConfig, {"parallel": "auto", **flags})
    return choose(config, shape, world, per_node, memory_gib * GIB, tokens, given=given)


@pytest.mark.parametrize(
    ("billions", "shape"),
    [(0.135, SMALL), (7.2, SEVEN), (70.6, SEVENTY), (405, HUGE), (30.5, MOE), (671, DEEPSEEK)],
)
def test_weights_by_formula(billions, shape):
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)


FULL = {"tuner_type": "full"}
CASES = {
    "135M, 2 CPUs": ((SMALL, 2, 8), FULL, "dp_replicate 2", "fits on every device"),
    "135M, 2 CPUs, just fits": ((SMALL, 2, 3.5), FULL, "dp_shard 2", "zero_stage 2"),
    "135M, 2 CPUs, too little": ((SMALL, 2, 3), FULL, "dp_shard 2", "don't fit on one device"),
    "7B LoRA, 8 x 80": ((SEVEN, 8, 80), {}, "dp_replicate 8", "fits on every device"),
    "7B full, 8 x 80": ((SEVEN, 8, 80), FULL, "dp_shard 8", "don't fit on one device"),
    "7B full, 64 x 80": ((SEVEN, 64, 80), FULL, "dp_replicate 8 x dp_shard 8", "a machine's 8"),
    "70B full, 64 x 80": ((SEVENTY, 64, 80, 4096), FULL, "dp_shard 64", "don't fit on one device"),
    "70B full, 16 x 80": ((SEVENTY, 16, 80, 4096), FULL, "dp_shard 2 x tp 8", "without it, "),
    "70B full, 512 x 80": ((SEVENTY, 512, 80, 4096), FULL, "dp_shard 256 x tp 2", "in every gathering"),
    "70B LoRA, 8 x 80": ((SEVENTY, 8, 80, 4096), {}, "dp_shard 8", "don't fit on one device"),
    "405B full, 512 x 80": ((HUGE, 512, 80, 8192), FULL, "dp_shard 64 x tp 8", "a layer of 3.2 B"),
    "30B-A3B full, 8 x 80": ((MOE, 8, 80, 4096), FULL, "dp_shard 8 x ep 8 inside", "128 experts hold"),
    "671B full, 256 x 80": ((DEEPSEEK, 256, 80, 4096), FULL, "dp_shard 128 x tp 2 x ep 8 inside", "256 experts hold"),
    "7B LoRA, 128k, 8 x 80": ((SEVEN, 8, 80, 131072), {}, "dp_replicate 2 x ulysses 4", "each device holds 32768"),
}


@pytest.mark.parametrize("case", CASES)
def test_table(case):
    (shape, world, memory, *tokens), flags, sizes, why = CASES[case]
    parallel, reasons = chosen(shape, world, memory, *tokens, per_node=min(8, world), **flags)
    assert resolve_degrees(parallel, world, shape, ranks_per_node=min(8, world)).words() == sizes
    assert any(why in reason for reason in reasons), reasons
    assert parallel.parallel == "manual" and len(reasons) <= 6
    config = build_config(SftConfig, flags)
    load = workload(config, shape, tokens[0] if tokens else 2048)
    assert load.footprint(parallel, world, min(8, world)).total <= 0.85 * memory * GIB


def test_pipeline_is_the_last_resort():
    """Two machines that are not to shard: a machine's eight can't hold the weights."""
    parallel, reasons = chosen(HUGE, 16, 80, 4096, given=["fsdp"])
    assert (parallel.pipeline_parallel_size, parallel.tensor_parallel_size, parallel.fsdp) == (2, 8, "none")
    assert any("across machines" in reason for reason in reasons), reasons


def test_what_was_given_is_kept():
    parallel, reasons = chosen(SEVEN, 8, 80, tensor_parallel_size=4, **FULL)
    assert parallel.tensor_parallel_size == 4 and "as given: tensor_parallel_size 4" in reasons
    parallel, _ = chosen(SEVEN, 8, 80, given=["fsdp"], **FULL)
    assert parallel.fsdp == "none"  # the default, but asked for
    parallel, _ = chosen(SEVEN, 8, 80, 131072, given=["sequence_parallel_size"])
    assert parallel.sequence_parallel_size == 1


def test_what_was_given_and_is_impossible():
    with pytest.raises(UsageError, match="32 attention heads can't be shared by 3"):
        chosen(SEVEN, 3, 80, tensor_parallel_size=3, per_node=3)


def test_one_process():
    parallel, reasons = chosen(SEVEN, 1, 80, per_node=1)
    assert parallel == ParallelConfig() and len(reasons) == 1 and "one process" in reasons[0]


def test_too_large_is_said():
    _, reasons = chosen(SEVENTY, 2, 16, per_node=2, **FULL)
    assert "more than there is" in reasons[-1]


def test_what_other_settings_exclude_is_not_chosen():
    """A long sequence and a large model would be shared, were it not for what sharing can't do."""
    assert chosen(SEVENTY, 8, 80, 65536)[0].sequence_parallel_size > 1
    noisy, _ = chosen(SEVENTY, 8, 80, 65536, neftune_noise_alpha=5.0)
    assert noisy.sequence_parallel_size == noisy.tensor_parallel_size == 1
    ia3, _ = chosen(SEVENTY, 8, 80, 65536, tuner_type="ia3")
    assert ia3.fsdp == "none" and resolve_degrees(ia3, 8, SEVENTY).dp_replicate == 8
