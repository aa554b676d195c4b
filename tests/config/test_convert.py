"""Files of other tools: what they mean here, what is lost, and that the result loads."""

from __future__ import annotations

import json

import pytest
import yaml

from swift.commands.config import main as config_command
from swift.config import InferConfig, MergeLoraConfig, PtConfig, RlhfConfig, SftConfig, parse_command_line, to_flat
from swift.config.checks import find_problems
from swift.config.convert import convert_file, detect_tool
from swift.core.errors import UsageError

CLASSES = {"rlhf": RlhfConfig, "sft": SftConfig, "pt": PtConfig, "infer": InferConfig, "merge-lora": MergeLoraConfig}

LLAMA_FACTORY = """\
model_name_or_path: owner/model-instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: identity,mine,pairs,hubbed
dataset_dir: {data}
template: llama3
cutoff_len: 1024
max_samples: 3
overwrite_cache: true
preprocessing_num_workers: 4
output_dir: saves/x
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
neat_packing: true
train_on_prompt: true
deepspeed: examples/ds_z3.json
quantization_bit: 4
flash_attn: fa2
some_future_key: 3
"""

AXOLOTL = """\
base_model: owner/model
datasets:
  - path: {data}/rows.jsonl
    type: alpaca
  - path: hub/dataset
    type: chat_template
    split: test
    field_messages: dialogue
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: qlora
lora_model_dir:
sequence_len: 4096
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
"""

MS_SWIFT = """\
ENV: {CUDA_VISIBLE_DEVICES: "0,1"}
model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
dataset: ["a.jsonl#500"]
torch_dtype: bfloat16
lora_rank: 8
target_modules: all-linear
learning_rate: 1e-4
max_length: 2048
system: You are a helper.
template: qwen2_5
deepspeed: zero2
dataloader_num_workers: 4
use_liger_kernel: false
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [{"ask": str(i), "reply": "y"} for i in range(5)]
    (folder / "mine.json").write_text(json.dumps(rows))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    info = {
        "mine": {"file_name": "mine.json", "columns": {"prompt": "ask", "response": "reply"}},
        "pairs": {"file_name": "pairs.json", "ranking": True},
        "hubbed": {"hf_hub_url": "owner/rows", "subset": "en", "split": "test"},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def converted(tmp_path, text: str, **options):
    source = tmp_path / "theirs.yaml"
    source.write_text(text)
    result = convert_file(source, **options)
    target = tmp_path / "ours.yaml"
    target.write_text(result.to_yaml(source.name))
    parsed = parse_command_line(CLASSES[result.command], [str(target)], command=result.command)
    return result, to_flat(parsed.config), target.read_text(), parsed.config


def test_llama_factory(tmp_path, data):
    result, flat, text, config = converted(tmp_path, LLAMA_FACTORY.format(data=data))
    expected = {
        "model": "owner/model-instruct", "trust_remote_code": True, "tuner_type": "lora", "lora_rank": 16,
        "target_modules": ["all-linear"], "max_length": 1024,
        "dataset": ["self-cognition", f"{data}/mine.json#3", "hf::owner/rows:en:test#3"],
        "columns": {"ask": "instruction", "reply": "output"}, "dataset_num_proc": 4, "output_dir": "saves/x",
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
        "torch_dtype": "bfloat16", "split_dataset_ratio": 0.1, "eval_strategy": "steps", "eval_steps": 500,
        "packing": True, "loss_scale": "all", "attn_impl": "flash_attention_2", "deepspeed": "zero3",
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == expected
    defaults = {"lora_alpha": 32.0, "lora_dropout": 0.0, "weight_decay": 0.0, "adam_beta2": 0.999, "strict": False}
    assert {name: flat[name] for name in defaults} == defaults, "its defaults are written out"
    assert set(result.lost) == {
        "dataset identity", "dataset pairs", "quantization_bit", "some_future_key",
    }  # fmt: skip
    for key in result.lost:
        assert f"#   {key}: " in text
    assert "template" in result.satisfied and "plot_loss" in result.satisfied
    assert find_problems(config) == []


def test_llama_factory_pretraining_and_full(tmp_path, data):
    text = (
        f"model_name_or_path: m\nstage: pt\nfinetuning_type: full\ndataset: mine\ndataset_dir: {data}\npure_bf16: true"
    )
    result, flat, _, config = converted(tmp_path, text)
    assert result.command == "pt" and isinstance(config, PtConfig)
    assert flat["tuner_type"] == "full" and flat["lora_alpha"] == 32 and flat["torch_dtype"] == "bfloat16"


def test_llama_factory_inference_and_export(tmp_path):
    text = "model_name_or_path: m\nadapter_name_or_path: saves/a, saves/b\ntemplate: llama3\ntemperature: 0.5"
    result, flat, _, _ = converted(tmp_path, text)
    assert result.command == "infer" and flat["adapters"] == ["saves/a", "saves/b"] and flat["temperature"] == 0.5
    text = "model_name_or_path: m\nadapter_name_or_path: a\ntemplate: x\nexport_dir: out\nexport_size: 2"
    result, flat, _, _ = converted(tmp_path, text)
    assert result.command == "merge-lora" and flat["output_dir"] == "out" and flat["max_shard_size"] == "2GB"


def test_llama_factory_reinforcement_learning_is_listed(tmp_path):
    result, *_ = converted(tmp_path, "model_name_or_path: m\nstage: ppo\nfinetuning_type: lora\nppo_epochs: 4")
    assert {"stage", "ppo_epochs"} <= set(result.lost)


def test_axolotl(tmp_path, data):
    result, flat, _, config = converted(tmp_path, AXOLOTL.format(data=data))
    expected = {
        "model": "owner/model", "tuner_type": "lora", "lora_rank": 32, "lora_alpha": 16.0, "lora_dropout": 0.05,
        "target_modules": ["all-linear"], "split_dataset_ratio": 0.1,
        "dataset": [f"{data}/rows.jsonl", "hf::hub/dataset::test"],
        "columns": {"dialogue": "messages"}, "max_length": 4096, "packing": True, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "num_train_epochs": 4.0, "learning_rate": 2e-4, "lr_scheduler_type": "cosine",
        "warmup_steps": 10, "warmup_ratio": 0.0, "save_strategy": "epoch", "gradient_checkpointing": True,
        "adam_beta2": 0.999, "torch_dtype": None,
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == expected
    assert set(result.lost) == {"optimizer", "load_in_4bit", "special_tokens", "evals_per_epoch"}
    assert find_problems(config) == []


def test_axolotl_full_tuning_completion_and_freezing(tmp_path, data):
    text = f"""
base_model: m
datasets: [{{path: {data}/rows.jsonl, type: completion, field: reply}}]
unfrozen_parameters: ["^lm_head", "layers.1"]
bf16: true
save_steps: 0.1
chat_template: chatml
"""
    result, flat, _, _ = converted(tmp_path, text)
    assert result.command == "pt" and flat["tuner_type"] == "full" and flat["columns"] == {"reply": "text"}
    assert flat["freeze_parameters_ratio"] == 1.0 and flat["trainable_parameters_regex"] == "(^lm_head)|(layers.1)"
    assert flat["torch_dtype"] == "bfloat16" and flat["template"] == "chatml" and "save_steps" in result.lost


def test_llama_factory_streaming_and_mixing(tmp_path, data):
    base = f"model_name_or_path: m\nstage: sft\ndataset: mine,hubbed\ndataset_dir: {data}\nmax_steps: 9\n"
    text = base + "streaming: true\nbuffer_size: 500\ndataloader_num_workers: 3\n"
    result, flat, _, config = converted(tmp_path, text + "mix_strategy: interleave_over\ninterleave_probs: 0.7,0.3\n")
    wanted = {
        "streaming": True, "shuffle_buffer_size": 500, "dataloader_num_workers": 3,
        "interleave_prob": [0.7, 0.3], "stopping_strategy": "all_exhausted",
    }  # fmt: skip
    assert {name: flat[name] for name in wanted} == wanted and not result.lost
    assert find_problems(config) == []
    _, flat, _, _ = converted(tmp_path, base + "mix_strategy: interleave_under\n")
    assert flat["interleave_prob"] == [1.0, 1.0] and flat["stopping_strategy"] == "first_exhausted"
    result, flat, _, _ = converted(tmp_path, base + "mix_strategy: concat\nbuffer_size: 500\n")
    assert not flat["interleave_prob"] and flat["shuffle_buffer_size"] == 1000 and not flat["streaming"]
    result, _, _, _ = converted(tmp_path, base + "mix_strategy: shuffle\n")
    assert "mix_strategy" in result.lost


def test_axolotl_streaming(tmp_path, data):
    text = f"base_model: m\ndatasets: [{{path: {data}/rows.jsonl, type: completion, field: reply}}]\n"
    text += "streaming: true\ndataloader_num_workers: 2\ndataloader_prefetch_factor: 8\ndataloader_pin_memory: true\n"
    result, flat, _, _ = converted(tmp_path, text)
    assert flat["streaming"] and flat["dataloader_num_workers"] == 2 and flat["dataloader_prefetch_factor"] == 8
    assert not result.lost


def test_ms_swift(tmp_path):
    result, flat, text, _ = converted(tmp_path, MS_SWIFT)
    assert result.tool == "ms-swift" and result.command == "sft"
    assert flat["dataset"] == ["a.jsonl#500"] and flat["tuner_type"] == "lora" and flat["learning_rate"] == 1e-4
    assert flat["strict"] is False, "its default"
    assert not result.lost and flat["deepspeed"] == "zero2"
    assert set(result.satisfied) == {"template", "use_liger_kernel"} and flat["dataloader_num_workers"] == 4
    assert yaml.safe_load(text)["ENV"] == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_the_tool_is_told_by_its_words(tmp_path):
    assert detect_tool(yaml.safe_load(LLAMA_FACTORY.format(data="data")), tmp_path) == "llamafactory"
    assert detect_tool(yaml.safe_load(AXOLOTL.format(data="data")), tmp_path) == "axolotl"
    assert detect_tool(yaml.safe_load(MS_SWIFT), tmp_path) == "ms-swift"
    with pytest.raises(UsageError, match="none of the known tools"):
        detect_tool({"x": 1}, tmp_path)


SAYS_THE_DEFAULT = {"stage", "finetuning_type", "train_on_inputs", "tf32", "use_liger_kernel", "adapter"}


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL, MS_SWIFT], ids=["llamafactory", "axolotl", "ms-swift"])
def test_nothing_disappears(tmp_path, data, text):
    """Without any one key of the source, the outcome is another: a setting, a loss or a remark less."""
    source = yaml.safe_load(text.replace("{data}", str(data)))
    path = tmp_path / "theirs.yaml"
    tool = detect_tool(source, path)

    def outcome(values):
        path.write_text(yaml.safe_dump(values))
        result = convert_file(path, tool=tool, command="sft")
        return result.values, result.comments, result.lost, result.satisfied, result.env

    whole = outcome(source)
    for key, value in source.items():
        if value is not None and key not in SAYS_THE_DEFAULT:
            assert outcome({k: v for k, v in source.items() if k != key}) != whole, f"{key} had no effect"


@pytest.mark.parametrize("names", ["gone", "identity", "gone,identity"])
def test_a_cap_that_no_dataset_takes_is_listed(tmp_path, names):
    text = f"model_name_or_path: m\nstage: sft\ndataset: {names}\nmax_samples: 3\n"
    assert converted(tmp_path, text)[0].lost["max_samples"][0] == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.yaml", "model:\n  model: smollm2\nlora:\n  rank: 4\n"),
        ("mine.yaml", "generation:\n  temperature: 0\n"),
        ("swift_config.yaml", "model: smollm2\n"),
    ],
)
def test_our_own_file_stays_as_it_is(tmp_path, capsys, name, text):
    file = tmp_path / name
    file.write_text(text)
    assert config_command(["convert", str(file), "--output", str(tmp_path / "out.yaml")]) == 0
    shown = capsys.readouterr()
    assert "is a swift file already" in shown.err and not shown.out
    assert file.read_text() == text and not (tmp_path / "out.yaml").exists()


def test_a_shell_script_is_run_not_converted(tmp_path):
    file = tmp_path / "ms.sh"
    file.write_text("swift sft --model m\n")
    with pytest.raises(UsageError, match="run the script itself"):
        config_command(["convert", str(file)])


def test_show_names_the_command_that_a_file_is_for(tmp_path, capsys):
    file = tmp_path / "ask.yaml"
    file.write_text("model: m\ntemperature: 0\nmax_new_tokens: 4\n")
    with pytest.raises(UsageError) as caught:
        config_command(["show", str(file)])
    assert caught.value.fix == f"swift config show {file} --command infer"
    assert config_command(["show", str(file), "--command", "infer"]) == 0
    file.write_text("temperature: 0\nlerning_rate: 1\n")
    with pytest.raises(UsageError, match="did you mean learning_rate"):
        config_command(["show", str(file)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deepspeed: deepspeed_configs/zero2.json", {"deepspeed": "zero2", "fsdp": "none"}),
        ("deepspeed: x/ds_z3_offload_config.json", {"deepspeed": "zero3_offload"}),
        ("tensor_parallel_size: 2\ncontext_parallel_size: 4\ndp_shard_size: 2",
         {"tensor_parallel_size": 2, "sequence_parallel_size": 4, "dp_shard_size": 2, "fsdp": "fsdp2"}),
        ("sequence_parallel_degree: 2", {"sequence_parallel_size": 2, "fsdp": "none"}),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: x}",
         {"fsdp": "fsdp2", "fsdp_cpu_offload": True, "zero_stage": 3}),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", {"fsdp": "fsdp2", "zero_stage": 2}),
        ("fsdp: hybrid_shard auto_wrap", {"fsdp": "hsdp"}),
    ],
)  # fmt: skip
def test_parallelism_of_axolotl(tmp_path, data, text, expected):
    head = f"base_model: m\ndatasets: [{{path: {data}/rows.jsonl, type: completion, field: reply}}]\n"
    result, flat, _, _ = converted(tmp_path, head + text + "\n")
    assert {name: flat[name] for name in expected} == expected and not result.lost


def test_parallelism_of_llama_factory(tmp_path, data):
    head = f"model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset_dir: {data}\ndataset: mine\n"
    result, flat, _, _ = converted(
        tmp_path, head + "fsdp: full_shard auto_wrap\nfsdp_config: {fsdp_cpu_offload: true}\n"
    )
    assert flat["fsdp"] == "fsdp2" and flat["fsdp_cpu_offload"] and not result.lost
    result, _, _, _ = converted(tmp_path, head + "fsdp: full_shard\nfsdp_config: my_fsdp.json\n")
    assert set(result.lost) == {"fsdp_config"}
