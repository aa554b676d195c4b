"""DeepSpeed files: what they fix of our settings, what contradicts, what `auto` becomes."""

import json

import pytest

from swift.config import SftConfig, build_config
from swift.config.checks import check, find_problems
from swift.config.deepspeed import PRESETS, Filling, deepspeed_problems, filled, read_deepspeed, zero_stage
from swift.core.errors import UsageError

FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.05}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    },
}
FILLING = Filling(micro_batch=2, world_size=4, clipping=1.0, dtype="float32", hidden=64)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds_zero3.json"
    path.write_text(json.dumps(FILE))
    return path


def config_of(**settings):
    return build_config(SftConfig, {"model": "m", "dataset": ["d"], **settings})


def test_a_file_gives_the_settings_that_nobody_gave(file):
    config = config_of(deepspeed=str(file))
    assert config.training.per_device_train_batch_size == 4
    assert config.training.gradient_accumulation_steps == 2
    assert config.training.max_grad_norm == 0.5
    assert config.optimizer.learning_rate == 3e-4 and config.optimizer.adam_beta2 == 0.99
    assert config.optimizer.weight_decay == 0.05 and config.model.torch_dtype == "bfloat16"


def test_a_setting_that_agrees_is_fine_and_one_that_does_not_is_refused(file):
    config_of(deepspeed=str(file), per_device_train_batch_size=4, optim="adamw_torch_fused")
    with pytest.raises(UsageError, match="per_device_train_batch_size is 8, and train_micro_batch_size_per_gpu") as e:
        config_of(deepspeed=str(file), per_device_train_batch_size=8)
    assert "auto" in e.value.fix
    with pytest.raises(UsageError, match=r"max_grad_norm is 1.0, and gradient_clipping .* 0.5"):
        config_of(deepspeed=str(file), max_grad_norm=1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fix_nothing_of_ours(name):
    assert config_of(deepspeed=name) == config_of(deepspeed=name, per_device_train_batch_size=1)
    assert zero_stage(read_deepspeed(name)) == int(name[4])


def test_auto_is_filled_and_the_loop_keeps_accumulation():
    result = filled(read_deepspeed("zero3"), FILLING)
    assert result["train_batch_size"] == 8 and result["gradient_accumulation_steps"] == 1
    assert result["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert result["bf16"]["enabled"] is False and result["gradient_clipping"] == 1.0
    assert "auto" not in json.dumps(result)
    with pytest.raises(UsageError, match="sub_group_size"):
        filled({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, FILLING)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "zero0"])
def test_presets_pass_and_go_with_lora_and_full_tuning(name):
    for tuner in ("lora", "full"):
        assert not find_problems(config_of(deepspeed=name, tuner_type=tuner))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"deepspeed": "zero0"}, "stage 0 shards nothing"),
        ({"deepspeed": '{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}'}, "scheduler of a"),
        ({"deepspeed": "zero2", "tuner_type": "adalora"}, "adalora looks at gradients"),
        ({"deepspeed": "zero3", "tuner_type": "vera"}, "tuner_type vera reads weights"),
        ({"deepspeed": "zero3", "use_dora": True}, "use_dora True reads weights"),
        ({"deepspeed": "zero1", "optim": "adafactor"}, "adafactor needs whole matrices"),
        ({"deepspeed": "zero2", "grad_compression": '{"intra": "bf16"}'}, "deepspeed"),
        ({"deepspeed": "zero2", "local_updates": '{"kind": "diloco"}'}, "deepspeed"),
        ({"deepspeed": "zero3", "pipeline_parallel_size": 2}, "exclude each other"),
    ],
)
def test_what_does_not_go_with_deepspeed_is_refused_with_everything_else(settings, words):
    with pytest.raises(UsageError, match=words) as refused:
        check(config_of(**settings, learning_rate=-1.0))
    assert "learning_rate must be" in str(refused.value)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb"),
        ({"train_batch_size": 64}, "train_batch_size"),
        ({"zero_optimization": {"stage": 4}}, "stage 4"),
        ({"bf16": {"enabled": True}}, "stage 0 shards nothing"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param to nvme"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "check_grad_overflow"),
    ],
)
def test_what_cannot_be_is_named(values, words):
    assert any(words in problem.message for problem in deepspeed_problems(json.dumps(values)))


def test_a_misspelt_preset_and_broken_json(tmp_path):
    with pytest.raises(UsageError) as e:
        read_deepspeed("zero33")
    assert "did you mean zero3?" in e.value.fix
    broken = tmp_path / "ds.json"
    broken.write_text('{"bf16": {enabled: true}}')
    with pytest.raises(UsageError, match="line 1"):
        read_deepspeed(str(broken))
