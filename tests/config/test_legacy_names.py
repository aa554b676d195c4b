"""Flags of ms-swift and Hugging Face scripts: translated, accepted with a note, or refused with advice."""

from __future__ import annotations

import pytest

from swift.config import InferConfig, RlhfConfig, SftConfig, megatron, parse_command_line
from swift.config.legacy import OF_COMMAND, RULES, VALUE_NAMES, VALUES_LATER, judge
from swift.config.schema import names_of, settings_of
from swift.config.values import Words
from swift.core.errors import UsageError


def sft(*words: str):
    return parse_command_line(SftConfig, words, command="sft")


def test_a_script_of_ms_swift_2():
    words = "--model_type qwen --model_id_or_path X --sft_type lora --template_type AUTO --dtype AUTO --dataset a.jsonl"
    config = sft(*words.split(), "--lora_target_modules", "ALL", "--use_flash_attn", "false").config
    assert config.model.model == "X" and config.model.model_type == "qwen"
    assert config.tuner.tuner_type == "lora" and config.template.template is None and config.model.torch_dtype is None


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("--dtype bf16", "bfloat16"),
        ("--dtype fp16", "float16"),
        ("--dtype fp32", "float32"),
        ("--bf16 true", "bfloat16"),
    ],
)
def test_precision(words, dtype):
    assert sft(*words.split()).config.model.torch_dtype == dtype


def test_precision_said_twice_must_agree():
    with pytest.raises(UsageError, match="disagree"):
        sft("--bf16", "true", "--torch_dtype", "float32")


def test_attention():
    assert sft("--attn_impl", "flash_attn").config.model.attn_impl == "flash_attention_2"
    assert sft("--use_flash_attn", "true").config.model.attn_impl == "flash_attention_2"


@pytest.mark.parametrize(
    "words",
    [
        "--load_from_cache_file true", "--lazy_tokenize false", "--dataloader_pin_memory true", "--check_model false",
        "--average_tokens_across_devices true", "--bf16 false", "--fsdp_config {}",
        "--use_liger_kernel false", "--packing_strategy binpack",
        "--tuner_backend peft", "--freeze_vit true", "--push_to_hub false", "--save_safetensors",
    ],
)  # fmt: skip
def test_satisfied_flags_are_accepted_with_a_note(words):
    parsed = sft(*words.split())
    assert len(parsed.notes) == 1 and words.split()[0] in parsed.notes[0] and "\n" not in parsed.notes[0]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--fsdp shard_grad_op", "--zero_stage 2"),
        ("--fsdp_config fsdp.json", "--zero_stage"),
        ("--use_ray true", "--tensor_parallel_size"),
        ("--num_generations 8", "reinforcement learning is being built"),
        ("--use_liger_kernel true", "leave it out"),
        ("--quant_method bnb", "unquantized"),
        ("--average_tokens_across_devices false", "leave it out"),
        ("--vllm_max_model_len 5", "engine_args"),
        ("--report_to wandb", "tensorboard"),
        ("--tuner_type longlora", "lora"),
        ("--optim paged_adamw_8bit", "adamw"),
        ("--dataloader_drop_last true", "leave it out"),
        ("--packing_strategy sequential", "binpack"),
        ("--push_to_hub true", "upload"),
    ],
)
def test_missing_features_are_refused_with_advice(words, advice):
    with pytest.raises(UsageError) as caught:
        sft(*words.split())
    assert "not available yet" in caught.value.message and advice in (caught.value.fix or "")
    assert caught.value.exit_code == 2


def test_in_files_as_well(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("fsdp_config: {offload: true}\nbf16: true\n")
    with pytest.raises(UsageError, match=r"fsdp_config .*not available yet") as caught:
        sft(str(path))
    assert f"{path}:1" in caught.value.render()


def test_no_rule_hides_a_setting():
    ours = set(names_of(SftConfig)) | set(names_of(InferConfig)) | set(names_of(RlhfConfig))
    assert not ours & megatron.names()
    assert not ours & set(RULES), "a setting that exists can't be foreign"


def infer(*words: str):
    return parse_command_line(InferConfig, words, command="infer")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--max_length 100", "--max_model_len"),
        ("--cutoff_len 100", "--max_new_tokens"),
        ("--truncation_strategy left", "never cut"),
        ("--loss_scale all", "only in training"),
        ("--history_turns keep", "only in training"),
        ("--add_non_thinking_prefix false", "only in training"),
        ("--strict false", "line in the results"),
        ("--max_bad_rows 3", "line in the results"),
        ("--dataset_num_proc 4", "rows are read"),
        ("--split_dataset_ratio 0", "no rows are set aside"),
    ],
)
def test_settings_of_training_are_no_settings_of_inference(words, advice):
    """They would change nothing, so they say so, and the help doesn't list them."""
    parsed = infer(*words.split())
    assert parsed.config == InferConfig()
    assert len(parsed.notes) == 1 and words.split()[0] in parsed.notes[0] and advice in parsed.notes[0]
    assert not set(OF_COMMAND["InferConfig"]) & set(names_of(InferConfig))
    assert set(OF_COMMAND["InferConfig"]) <= set(names_of(SftConfig))
    sft(*words.split())


def test_rows_cant_be_set_aside_in_inference():
    with pytest.raises(UsageError, match="flag of `swift sft`") as caught:
        infer("--split_dataset_ratio", "0.1")
    assert caught.value.exit_code == 2 and "--load_data_args" in caught.value.fix
    with pytest.raises(UsageError, match="flag of `swift infer`") as caught:
        sft("--repetition_penalty", "1.1")
    assert caught.value.fix == "remove it"


def test_engines():
    assert infer("--infer_backend", "pt").config.engine.infer_backend == "transformers"
    assert infer().config.engine.infer_backend == "auto"
    for engine in ("vllm", "sglang", "lmdeploy"):
        assert infer("--infer_backend", engine).config.engine.infer_backend == engine
    assert infer("--max_num_seqs", "7").config.engine.max_batch_size == 7


def test_a_file_of_an_earlier_version_groups_the_engine_with_inference(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text("infer:\n  infer_backend: transformers\n  max_batch_size: 9\n")
    config = infer(str(file)).config
    assert (config.engine.infer_backend, config.engine.max_batch_size) == ("transformers", 9)


def test_every_rule_gives_advice_or_a_reason():
    for name, rule in RULES.items():
        assert rule.instead or rule.satisfied == ("*",), f"{name}: refused without advice"
        if rule.satisfied == ("*",):
            assert rule.note, f"{name}: accepted without a reason"
        assert judge(name, Words(("xyzzy",))) is not None


def test_value_tables_name_real_settings_and_values():
    choices: dict[str, set[str]] = {}
    for cls in (SftConfig, InferConfig, RlhfConfig):
        for name, setting in settings_of(cls).items():
            choices.setdefault(name, set()).update(setting.choices)
    for name, table in VALUE_NAMES.items():
        for new in table.values():
            assert new == "none" or not choices[name] or new in choices[name]
    for name, later in VALUES_LATER.items():
        assert not set(later) & choices[name], "that value is there by now"


def test_unknown_flags_stay_unknown():
    assert judge("no_such_flag_anywhere", Words(("1",))) is None


def test_mixing_and_streaming_are_settings_in_training_and_satisfied_in_inference():
    words = "--streaming true --shuffle_buffer_size 9 --interleave_probs 0.5 0.5 --dataloader_num_workers 2"
    config = sft(*words.split()).config
    assert config.data.streaming and config.data.interleave_prob == [0.5, 0.5]
    assert config.data.shuffle_buffer_size == 9 and config.batching.dataloader_num_workers == 2
    parsed = parse_command_line(InferConfig, ["--model", "m", *words.split()], command="infer")
    assert len([note for note in parsed.notes if "rows are answered in their order" in note]) == 4
