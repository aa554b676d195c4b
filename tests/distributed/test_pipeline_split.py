"""How layers are dealt out to stages, and what is left of a model that was cut."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from distributed.equality import COMMON, KINDS, build
from training.architectures import CONFIGS

from swift.config.parallel import ParallelConfig
from swift.core.errors import ModelError, UsageError
from swift.distributed.pipeline.schedules import (
    micro_batches_needed,
    rank_of_stage,
    schedule_notes,
    stages_of_rank,
    stages_per_rank,
)
from swift.distributed.pipeline.split import Costs, keep_stage, model_costs, stage_layers
from swift.models.attention import VARLEN


def sizes(plan: list[range]) -> list[int]:
    assert [layer for layers in plan for layer in layers] == list(range(plan[-1].stop))
    return [len(layers) for layers in plan]


def on_meta(config) -> tf.PreTrainedModel:
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation(VARLEN)
    return model


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        (Costs((1.0,) * 8), 4, [2, 2, 2, 2]),
        (Costs((1.0,) * 10), 4, [2, 2, 3, 3]),  # as even as can be
        (Costs((1.0,) * 9, last=3.0), 3, [4, 4, 1]),  # a head as long as three layers
        (Costs((1.0,) * 8, first=2.0), 2, [3, 5]),
        (Costs((4.0, 1.0, 1.0, 1.0, 1.0)), 2, [1, 4]),  # layers of different cost
        (Costs((1.0,) * 4, last=100.0), 4, [1, 1, 1, 1]),
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(costs, num_stages, expected):
    plan = stage_layers(costs, num_stages)
    assert sorted(sizes(plan)) == sorted(expected) and max(map(costs.of, plan)) == pytest.approx(
        max(costs.of(layers) for layers in ranges(expected))
    )


def ranges(counts: list[int]) -> list[range]:
    return [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]


def test_explicit_layers_are_taken_as_they_are():
    assert stage_layers(Costs((1.0,) * 16), 4, [3, 5, 4, 4]) == ranges([3, 5, 4, 4])


@pytest.mark.parametrize(
    ("explicit", "says"),
    [([3, 5], "names 2 stages, and there are 3"), ([3, 3, 3], "9 layers in all"), ([4, 4, 0], "without a layer")],
)
def test_explicit_layers_that_do_not_fit_are_refused(explicit, says):
    with pytest.raises(UsageError, match=says) as caught:
        stage_layers(Costs((1.0,) * 8), 3, explicit)
    assert "add up to 8" in str(caught.value.fix)


def test_more_stages_than_layers_are_refused_with_the_nearest_number():
    with pytest.raises(UsageError, match="the model has 4") as caught:
        stage_layers(Costs((1.0,) * 4), 6)
    assert "4 stages at most" in str(caught.value.fix)


def test_costs_count_the_experts_a_token_meets_and_the_head():
    moe = model_costs(on_meta(KINDS["moe"]()))
    attention = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 8 + 2 * 64
    assert moe.layers == (attention + 64 * 8 + 2 * 3 * 64 * 32,) * 4  # the router, and 2 of 8 experts
    assert moe.last == 96 * 64 and 0 < moe.first < moe.last
    mixed = model_costs(on_meta(CONFIGS["deepseek-v3-mla"]()))
    assert mixed.layers[0] != mixed.layers[1]  # the first is dense


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_stages_hold_every_parameter_under_its_own_name(kind, tuner):
    whole = {name: p.detach() for name, p in build(kind, tuner).whole.named_parameters()}
    held: dict[str, int] = {}
    for stage in range(3):
        tiny = build(kind, tuner)
        keep_stage(tiny.whole, tiny.causal_lm, ranges([1, 2, 1]), stage)
        for name, parameter in tiny.whole.named_parameters():
            if name in whole:
                assert torch.equal(parameter, whole[name])
            held[name] = held.get(name, 0) + 1
    head = {name for name in held if name.endswith("lm_head.weight")} if kind == "tied" else set()
    assert len(head) == (kind == "tied") and set(held) - head == set(whole)
    assert set(held.values()) == {1}


def test_a_model_on_meta_can_be_cut():
    model = on_meta(KINDS["untied"]())
    keep_stage(model, model, ranges([2, 2]), 1)
    names = {name for name, p in model.named_parameters() if p.is_meta}
    assert "model.layers.2.mlp.up_proj.weight" in names and not any("layers.1." in name for name in names)
    assert len(model.model.layers) == 4 and "lm_head.weight" in names


SMALL = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: tf.GPT2Config(vocab_size=96, n_embd=64, n_layer=4, n_head=4), "wpe beside its layers"),
        (lambda: tf.BloomConfig(**SMALL), "word_embeddings_layernorm"),
        (lambda: tf.Gemma3nTextConfig(vocab_size=96, num_hidden_layers=30), "of other layers"),
        (lambda: tf.FalconConfig(**SMALL), "can't do without its own layers"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_models_that_share_more_than_hidden_states_are_refused_on_every_stage(config, says, stage):
    model = on_meta(config())
    layers = model.config.get_text_config().num_hidden_layers
    with pytest.raises(ModelError, match=says):
        keep_stage(model, model, ranges([layers // 2, layers - layers // 2]), stage)


def test_a_decoder_that_changes_states_on_its_way_is_refused():
    model = on_meta(CONFIGS["granite-scale"]())
    model.model.embedding_multiplier = torch.tensor(3.0)  # not a number that is known to be undone
    with pytest.raises(ModelError, match="changes hidden states between its layers"):
        keep_stage(model, model, ranges([1, 1]), 1)


def test_ranks_hold_the_stages_that_schedules_want():
    for schedule, per_rank in (("1f1b", 1), ("interleaved", 3), ("zbv", 2)):
        held = {rank: stages_of_rank(schedule, rank, 4, per_rank) for rank in range(4)}
        assert sorted(stage for stages in held.values() for stage in stages) == list(range(4 * per_rank))
        assert all(rank_of_stage(schedule, stage, 4) == rank for rank, stages in held.items() for stage in stages)
    assert stages_of_rank("zbv", 1, 4, 2) == [1, 6] and stages_of_rank("interleaved", 1, 4, 2) == [1, 5]


@pytest.mark.parametrize(("schedule", "asked"), [("1f1b", 2), ("gpipe", 3), ("zbv", 3), ("zbv", 1), ("interleaved", 1)])
def test_numbers_of_stages_that_a_schedule_can_not_have_are_refused(schedule, asked):
    with pytest.raises(UsageError, match=f"{schedule} can't have {asked} stages"):
        stages_per_rank(ParallelConfig(pipeline_schedule=schedule, pipeline_stages_per_rank=asked))


def test_steps_are_filled_up_to_what_interleaved_needs_and_the_user_is_told():
    assert [micro_batches_needed("interleaved", count, 4) for count in (1, 3, 4, 9, 10, 11)] == [1, 3, 4, 10, 10, 12]
    assert micro_batches_needed("1f1b", 3, 4) == 3
    config = ParallelConfig(pipeline_schedule="interleaved", pipeline_parallel_size=4)
    added, *_ = schedule_notes(config, 9)
    assert "1 empty micro-batches" in added and "--gradient_accumulation_steps 10" in added
    assert "43 %" in schedule_notes(ParallelConfig(pipeline_parallel_size=4), 4)[0]
    assert schedule_notes(ParallelConfig(), 1) == []
