"""A dry run counts what a run does: collectives by formula and by comparison with real processes, and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from distributed.equality import COMMON, KINDS, build, make_batches
from distributed.pool import on_ranks

from swift.cli import main
from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig, OptimizerConfig
from swift.distributed.mesh import Mesh, build_mesh
from swift.distributed.trace import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from swift.distributed.trace_world import pretend
from swift.optim import build_optimizer
from swift.training.dry_step import Stepping, trace_fake, trace_real
from swift.training.dry_totals import Totals, depths, extend, totals_of
from swift.training.parallelize import Making
from swift.training.precision import Precision

LAYERS, HIDDEN, TOKENS, FP32 = 4, 64, 32, 4
PARAMETERS = 2 * 96 * 64 + LAYERS * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64  # of KINDS["untied"]


def one_row() -> Any:
    """A row of `TOKENS` tokens in two segments."""
    (batch,) = make_batches("packed", 1)
    length = batch.input_ids.shape[1]
    assert length >= TOKENS
    batch.input_ids, batch.position_ids = batch.input_ids[:, :TOKENS], batch.position_ids[:, :TOKENS]
    keep = batch.target_index < TOKENS
    batch.target_index, batch.target_ids = batch.target_index[keep], batch.target_ids[keep]
    batch.target_weights = batch.target_weights[keep]
    batch.borders = [b for b in batch.borders if b < TOKENS] + [TOKENS]
    return batch


def making(sizes: Degrees, settings: dict[str, Any]) -> Making:
    config = ParallelConfig(
        tensor_parallel_size=sizes.tp,
        pipeline_parallel_size=sizes.pp,
        sequence_parallel_size=sizes.cp,
        expert_parallel_size=sizes.ep,
        **settings,
    )
    return Making(config, ObjectiveConfig(), Precision(torch.float32, "cpu"))


def stepping(count: int, *, recompute: bool = False, copies: bool = False) -> Stepping:
    def make_optimizer(model):
        return build_optimizer(model.local, OptimizerConfig(learning_rate=1e-3), tuner_type="full")

    return Stepping(count, one_row, make_optimizer, recompute=recompute, copies=copies)


def empty(kind: str, layers: int = LAYERS):
    config = KINDS[kind]()
    config.num_hidden_layers = layers
    extra = {"experts_implementation": "grouped_mm"} if kind == "moe" else {}
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="varlen", **extra)
    return model, model


def dry(
    sizes: Degrees,
    *,
    count: int = 1,
    kind: str = "untied",
    layers: int = LAYERS,
    rank: int = 0,
    border: Any = None,
    recompute: bool = False,
    copies: bool = False,
    **settings: Any,
) -> Totals:
    """A step of rank `rank`, of which this process plays the part."""
    step = stepping(count, recompute=recompute, copies=copies)
    with pretend(rank, sizes.world_size):
        mesh = build_mesh(sizes, "cpu")
        trace, found = trace_fake(lambda: empty(kind, layers), mesh, making(sizes, settings), step)
        if rank == 0 and sizes.pp > 1:
            assert found is not None and found.width == HIDDEN
    assert not trace.unknown
    return totals_of(trace, count)


ROW = TOKENS * HIDDEN * FP32  # bytes of a row's hidden states


def test_tensor_parallel_layers_sum_twice_each_way() -> None:
    totals = dry(Degrees(tp=2))
    # forward: attention and MLP of each layer, the embedding; backward: the same without the embedding, and the head
    assert totals.calls["tp", "all_reduce"] == (2 * LAYERS + 1) + (2 * LAYERS + 1)
    assert totals.calls["tp", "all_gather"] == 1  # five numbers a token of the loss
    head = len(one_row().target_ids) * HIDDEN * FP32  # its gradient has rows where a token is predicted
    assert totals.bytes["tp", "all_reduce"] == 2 * (1 / 2) * ((4 * LAYERS + 1) * ROW + head)


def test_sequence_parallel_layers_gather_and_scatter_twice_each_way() -> None:
    totals = dry(Degrees(tp=4), sequence_parallel=True)
    # forward: each block gathers its input; backward: each its output's gradient; besides the embedding's gradient, the
    # final norm's states, the loss
    assert totals.calls["tp", "all_gather"] == 4 * LAYERS + 3
    assert totals.calls["tp", "reduce_scatter"] == 4 * LAYERS + 1
    assert totals.bytes["tp", "reduce_scatter"] == (4 * LAYERS + 1) * (3 / 4) * ROW
    assert totals.calls["tp", "all_reduce"] == 2  # the head's gradient, and once a step those of all norms
    norms = (2 * LAYERS + 1) * HIDDEN * FP32
    head = len(one_row().target_ids) * HIDDEN * FP32
    assert totals.bytes["tp", "all_reduce"] == 2 * (3 / 4) * (norms + head)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_layers_are_gathered_as_often_as_the_stage_says(stage: int) -> None:
    count, units = 4, LAYERS + 1
    totals = dry(Degrees(dp_shard=4), count=count, fsdp="fsdp2", zero_stage=stage)
    gathered = {3: count * (2 * LAYERS + 1), 2: units, 1: units}[stage]  # the root, with the head, stays for backward
    assert totals.calls["fsdp", "all_gather"] == gathered
    assert totals.calls["fsdp", "reduce_scatter"] == units * (1 if stage == 1 else count)
    once = 3 / 4 * PARAMETERS * FP32
    assert totals.bytes["fsdp", "reduce_scatter"] == once * (1 if stage == 1 else count)
    local = PARAMETERS * FP32 / 4
    _, memory = totals.peak
    assert memory[OPTIMIZER] == pytest.approx(2 * local, rel=1e-3)
    assert memory[WEIGHTS] == pytest.approx(local, rel=1e-3)
    if stage > 1:
        assert memory[GRADIENTS] <= local
    whole = PARAMETERS * FP32  # a layer's weights are freed after use, or stay
    assert 0 < memory[GATHERED] < whole / 2 if stage == 3 else memory[GATHERED] == pytest.approx(whole, rel=1e-3)


def test_ulysses_exchanges_queries_keys_values_and_outputs() -> None:
    totals = dry(Degrees(ulysses=4))
    assert totals.calls["ulysses", "all_to_all"] == 4 * LAYERS * 2  # forward, and again backward
    assert totals.bytes["ulysses", "all_to_all"] == 4 * LAYERS * 2 * (3 / 4) * ROW / 4


def test_a_ring_sends_keys_and_values_to_all_others() -> None:
    ranks = 4
    totals = dry(Degrees(ring=ranks))
    # keys and values go round forward and backward, their gradients once
    assert totals.calls["ring", "send"] == 3 * 2 * (ranks - 1) * LAYERS
    assert totals.bytes["ring", "send"] == 3 * 2 * (ranks - 1) * LAYERS * ROW / ranks


def test_experts_exchange_counts_and_rows() -> None:
    ranks = 2
    totals = dry(Degrees(dp_shard=ranks, ep=ranks), kind="moe")
    assert totals.calls["ep", "all_to_all"] == 5 * LAYERS
    rows = 2 * ROW  # two experts for each token
    counts = 4 * 8  # own experts, int64, for the other rank
    assert totals.bytes["ep", "all_to_all"] == LAYERS * (4 * rows / 2 + counts)


def test_copies_average_all_gradients_once_a_step() -> None:
    totals = dry(Degrees(dp_replicate=4), count=3, copies=True)
    assert totals.calls == {("dp", "all_reduce"): 1}
    assert totals.bytes["dp", "all_reduce"] == 2 * (3 / 4) * PARAMETERS * FP32
    _, memory = totals.peak
    assert memory[GRADIENTS] == PARAMETERS * FP32
    assert memory[OPTIMIZER] == pytest.approx(2 * PARAMETERS * FP32, rel=1e-3)


def test_a_pipeline_sends_states_and_gradients() -> None:
    count = 3
    first = dry(Degrees(pp=2), count=count)
    assert first.calls["pp", "send"] == count
    assert first.bytes["pp", "send"] == count * ROW


def test_layers_and_micro_batches_follow_from_few() -> None:
    sizes, settings = Degrees(dp_shard=2, tp=2), {"fsdp": "fsdp2", "recompute": True}
    small, large = (dry(sizes, count=3, layers=layers, **settings) for layers in (4, 5))
    whole = dry(sizes, count=3, layers=9, **settings)
    guessed = extend(small, large, 5)
    assert guessed.calls == whole.calls
    assert guessed.bytes == whole.bytes
    assert guessed.flops == whole.flops
    assert guessed.peak[0] == whole.peak[0]
    assert guessed.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipelines_further_micro_batches_do_what_the_last_did(schedule: str) -> None:
    small, large, whole = (dry(Degrees(pp=2), count=count, pipeline_schedule=schedule) for count in (3, 4, 7))
    guessed = extend(small, large, 4)
    assert guessed.calls == whole.calls
    assert guessed.bytes == whole.bytes
    assert guessed.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert guessed.peak[1][GRADIENTS] == whole.peak[1][GRADIENTS]


def test_layers_that_differ_are_told_apart() -> None:
    assert depths(["a"] * 80) == (4, 5)
    assert depths(["dense", *["sparse"] * 60]) == (4, 5)
    assert depths(["dense"] * 5 + ["sparse"] * 60) == (6, 7)
    assert depths(["near", "far"] * 20) == (4, 6)
    assert depths(["near", "far"] * 20 + ["near"]) == (5, 7)
    assert depths(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]) is None


REAL = {
    "FSDP x TP": (Degrees(dp_shard=2, tp=2), {"fsdp": "fsdp2"}),
    "ring": (Degrees(ring=2), {}),
    "pipeline": (Degrees(pp=2), {}),
}


def real(name: str, recompute: bool) -> tuple[dict, dict, float]:
    sizes, settings = REAL[name]
    step = stepping(3, recompute=recompute)
    trace = trace_real(lambda: _whole("untied"), build_mesh(sizes, "cpu"), making(sizes, settings), step)
    totals = totals_of(trace, 3)
    return dict(totals.calls), dict(totals.bytes), totals.peak_bytes


def _whole(kind: str):
    tiny = build(kind)
    return tiny.whole, tiny.causal_lm


@pytest.mark.parametrize(("name", "recompute"), [("FSDP x TP", True), ("ring", False), ("pipeline", False)])
def test_real_processes_do_the_same(name: str, recompute: bool) -> None:
    sizes, settings = REAL[name]
    calls, num_bytes, peak = on_ranks(sizes.world_size, real, name, recompute)[0]
    totals = dry(sizes, count=3, recompute=recompute, **settings)
    assert dict(totals.calls) == calls
    assert dict(totals.bytes) == num_bytes
    assert totals.peak_bytes == pytest.approx(peak, rel=0.03)


def test_one_process_holds_weights_gradients_and_moments() -> None:
    step = stepping(1, copies=True)
    trace, _ = trace_fake(lambda: empty("untied"), Mesh(), making(Degrees(), {}), step)
    totals = totals_of(trace, 1)
    assert not totals.calls
    memory = totals.memory["step"]
    assert memory[GRADIENTS] == PARAMETERS * FP32
    assert memory[WEIGHTS] == pytest.approx(PARAMETERS * FP32, rel=1e-3)
    assert totals.memory["only forward"][ACTIVATIONS] > LAYERS * ROW


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's config.json and nothing else."""
    config = tf.LlamaConfig(**COMMON, tie_word_embeddings=False).to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_plays_sixteen_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"sft --model {folder} --tuner_type full --max_length 64 --nproc_per_node 8 --nnodes 16 --dry_run true"
    code = main((words + " --fsdp fsdp2 --tensor_parallel_size 8 --gradient_checkpointing true").split())
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "128: dp_shard 16 x tp 8, fsdp2 (stage 3)" in shown.out
    assert "16 machines" in shown.out
    cells = [line.split() for line in shown.out.splitlines()]
    rows = {tuple(row[:2]): row[2] for row in cells if len(row) > 3 and row[0] in ("tp", "fsdp")}
    recomputed = LAYERS  # of two sums in a layer, what comes after the last isn't computed again
    assert rows["tp", "all_reduce"] == str(4 * LAYERS + 2 + recomputed)
    assert rows["fsdp", "reduce_scatter"] == str(LAYERS + 1)
    assert "not modelled" in shown.out


def test_the_command_shows_every_stage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"pt --model {folder} --max_length 64 --nproc_per_node 4 --dry_run true --gradient_accumulation_steps 9"
    code = main((words + " --pipeline_parallel_size 2").split())
    shown = capsys.readouterr()
    assert code == 0, shown.err
    for rank in (0, 2):
        assert f"collectives of rank {rank} " in shown.out
    sends = [line.split()[2] for line in shown.out.splitlines() if line.split()[:2] == ["pp", "send"]]
    assert sends == ["9", "9"]


def test_what_cant_be_seen_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"sft --model {folder} --tuner_type full --nproc_per_node 2 --grad_compression bf16 --dry_run true"
    assert main(words.split()) == 2
    assert "--grad_compression" in capsys.readouterr().err
