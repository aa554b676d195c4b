"""How words and files become settings, and what is said when they can't."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from swift.config import HelpRequested, InferConfig, PtConfig, SftConfig, build_config, parse_command_line, to_flat
from swift.config.fields import setting
from swift.config.parse import require_choice
from swift.core.errors import UsageError


def sft(*words: str):
    return parse_command_line(SftConfig, words, command="sft")


def sft_error(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        sft(*words)
    return caught.value.render()


def config_file(tmp_path, text: str, name: str = "run.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


# --- the command line -----------------------------------------------------------------------------------------------


def test_all_ways_to_write_a_flag():
    config = sft("--save-steps=7", "--packing", "--learning_rate", "1e-5", "--dataset", "a.jsonl", "b c.jsonl").config
    assert config.checkpoint.save_steps == 7
    assert config.batching.packing is True
    assert config.optimizer.learning_rate == 1e-5
    assert config.data.dataset == ["a.jsonl", "b c.jsonl"]


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("1", True), ("YES", True), ("false", False), ("0", False)]
)
def test_booleans(word, value):
    assert sft("--use_dora", word).config.tuner.use_dora is value


def test_a_bare_boolean_leaves_the_file_name_alone(tmp_path):
    path = config_file(tmp_path, "save_steps: 3")
    config = sft("--packing", path).config
    assert config.batching.packing and config.checkpoint.save_steps == 3


def test_negative_numbers_and_values_that_look_like_flags():
    config = sft("--max_steps", "-1", "--system=--be nice", "--columns", '{"ask": "query"}').config
    assert config.training.max_steps == -1
    assert config.template.system == "--be nice"
    assert config.data.columns == {"ask": "query"}


def test_lists_as_json_and_empty():
    assert sft("--target_modules", '["q_proj", "k_proj"]').config.tuner.target_modules == ["q_proj", "k_proj"]
    assert sft("--target_modules", "[]").config.tuner.target_modules == []


def test_whole_numbers_may_be_written_as_floats():
    assert sft("--save_steps", "1e3").config.checkpoint.save_steps == 1000
    assert "'1.5' is not a whole number" in sft_error("--save_steps", "1.5")


def test_typed_exactly():
    flat = to_flat(sft("--lora_alpha", "64", "--num_train_epochs", "1").config)
    assert isinstance(flat["lora_alpha"], float) and isinstance(flat["num_train_epochs"], float)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--learning_rate", "fast"],
            "--learning_rate: 'fast' is not a number\n  fix:   for example --learning_rate 1e-4",
        ),
        (["--max_steps", "two"], "fix:   for example --max_steps 100"),
        (["--learning_rate", "nan"], "'nan' is not a number"),
        (["--save_strategy", "step"], "did you mean steps? choose from: no, steps, epoch"),
        (["--packing", "maybe"], "'maybe' is not true or false"),
        (["--lerning_rate", "1"], "unknown flag --lerning_rate\n  fix:   did you mean --learning_rate?"),
        (["--columns", "{ask: query}"], "--columns: is not JSON"),
        (["--columns", '{"ask": 3}'], "the value of 'ask' must be text, got 3"),
        (["--columns", "[1]"], "wants a JSON object"),
        (["--model"], "--model needs a value\n  fix:   for example --model text"),
        (["--dataset"], "--dataset needs a value"),
        (["--model", "a", "b"], "unexpected 'b'"),
        (["stray"], "unexpected 'stray'"),
        (["--save_steps", "1", "--save_steps", "2"], "--save_steps is given twice"),
        (["--dataset", "a", "--dataset", "b"], "put all values behind one: --dataset a b"),
        (["--lr", "1e-4", "--learning_rate", "1e-5"], "lr and learning_rate mean the same setting and disagree"),
        (["--max_new_tokens", "5"], "--max_new_tokens is a flag of `swift infer`, not of `swift sft`"),
        (["--config"], "--config needs a file name"),
    ],
)
def test_messages(words, message):
    assert message in sft_error(*words)


def test_all_faults_are_reported_together():
    text = sft_error("--learning_rate", "fast", "--lerning_rate", "1", "--save_steps", "x", "stray")
    assert text.startswith("4 faults")
    assert all(part in text for part in ("'fast'", "--lerning_rate", "'x'", "'stray'"))


def test_the_same_value_twice_is_no_fault():
    assert sft("--save_steps", "5", "--save_steps", "5").config.checkpoint.save_steps == 5


def test_help_filters():
    with pytest.raises(HelpRequested) as caught:
        sft("--help")
    assert "--learning_rate" in caught.value.text and "[adamw_torch_fused]" in caught.value.text
    with pytest.raises(HelpRequested) as caught:
        sft("--help", "lora")
    assert "--lora_rank" in caught.value.text and "--save_steps" not in caught.value.text
    with pytest.raises(HelpRequested) as caught:
        sft("--help", "Optimizer")
    assert "--adam_beta2" in caught.value.text and "--lora_rank" not in caught.value.text
    with pytest.raises(HelpRequested) as caught:
        sft("--help", "learnin_rate")
    assert "No setting" in caught.value.text and "--learning_rate" in caught.value.text


@dataclass
class Options:
    """Options of a small command."""

    rows: int = setting(3, help="how many")
    html: str | None = setting(None, help="file to write")


def test_small_commands_use_the_same_parser():
    parsed = parse_command_line(
        Options, ["file.jsonl", "--rows", "5"], command="data x", positionals=("FILE", "[MORE]")
    )
    assert parsed.config == Options(rows=5) and parsed.positionals == ["file.jsonl"]
    with pytest.raises(UsageError, match="needs FILE"):
        parse_command_line(Options, [], command="data x", positionals=("FILE",))
    with pytest.raises(UsageError, match="did you mean --rows"):
        parse_command_line(Options, ["f", "--row", "2"], command="data x", positionals=("FILE",))
    with pytest.raises(HelpRequested, match="how many"):
        parse_command_line(Options, ["-h"], command="data x")


def test_sub_commands():
    assert require_choice("check", {"check": "a", "preview": "b"}, "data") == "check"
    with pytest.raises(HelpRequested):
        require_choice(None, {"check": "a"}, "data")
    with pytest.raises(UsageError, match="did you mean preview"):
        require_choice("previw", {"check": "a", "preview": "b"}, "data")


# --- files ----------------------------------------------------------------------------------------------------------

NESTED = """\
ENV:
  SWIFT_TEST_VARIABLE: 3
model: smollm2
train:
  save_strategy: no
  save_steps: 100
  output_dir: out
  learning_rate: 1e-4
lora: {rank: 16, dropout: 0}
dataset: [a.jsonl, b.jsonl]
columns: {ask: query}
val_dataset: null
padding_free: ~
system: yes
"""


def test_nested_file(tmp_path, monkeypatch):
    monkeypatch.delenv("SWIFT_TEST_VARIABLE", raising=False)
    path = config_file(tmp_path, NESTED)
    parsed = sft("--config", path, "--save_steps", "7")
    flat = to_flat(parsed.config)
    assert flat["model"] == "smollm2" and flat["save_strategy"] == "no" and flat["learning_rate"] == 1e-4
    assert flat["lora_rank"] == 16 and flat["lora_dropout"] == 0 and flat["columns"] == {"ask": "query"}
    assert flat["val_dataset"] == [] and flat["padding_free"] is None
    assert flat["system"] == "yes", "text stays as it was written"
    assert flat["save_steps"] == 7 and parsed.origins["save_steps"] == "command line", "the command line wins"
    assert parsed.places["learning_rate"] == f"{path}:8"
    assert os.environ["SWIFT_TEST_VARIABLE"] == "3"
    monkeypatch.delenv("SWIFT_TEST_VARIABLE")


def test_the_shell_wins_over_the_env_block(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFT_TEST_VARIABLE", "shell")
    sft(config_file(tmp_path, NESTED))
    assert os.environ["SWIFT_TEST_VARIABLE"] == "shell"


def test_yaml_anchors_and_merges(tmp_path):
    text = "training: &base {max_steps: 5, seed: 1}\ncheckpoint:\n  <<: *base\n  seed: 1\n"
    assert sft(config_file(tmp_path, text)).config.training.max_steps == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian:\n  save_steps: 1\n", "unknown setting trian\n  where: {path}:1\n  fix:   did you mean train?"),
        ("model: x\nsave_step: 5\n", "{path}:2"),
        ("train:\n  save_steps: many\n", "save_steps: 'many' is not a whole number\n  where: {path}:2"),
        ("save_steps: 1\nsave_steps: 2\n", "save_steps is written twice"),
        ("model: [a\n", "not valid YAML"),
        ("model: x\n\tseed: 1\n", "{path}:2"),
        ("- a\n", "must hold `key: value`"),
        ("", "is empty"),
        ("max_length: null\n", "can't be null"),
        ("save_steps: {a: 1}\n", "save_steps wants a value, not a mapping"),
        ("deepspeed: {stage: 2}\n", "deepspeed"),
        ("ENV: 3\n", "ENV must be a mapping"),
    ],
)
def test_file_messages(tmp_path, text, message):
    path = config_file(tmp_path, text)
    assert message.format(path=path) in sft_error(path)


def test_rows_are_no_settings(tmp_path):
    path = config_file(tmp_path, '[{"query": "x", "response": "y"}]', "rows.json")
    assert f"--dataset {path}" in sft_error(path)


def test_json_file(tmp_path):
    path = config_file(tmp_path, '{\n\t"model": "x",\n\t"train": {"save_steps": "many"}\n}', "run.json")
    assert f"{path}:3" in sft_error(path)
    assert "not valid JSON" in sft_error(config_file(tmp_path, '{"a": }', "bad.json"))
    assert "written twice" in sft_error(config_file(tmp_path, '{"seed": 1, "seed": 2}', "twice.json"))


def test_missing_and_odd_files(tmp_path):
    config_file(tmp_path, "model: x", "there.yaml")
    assert "there.yaml" in sft_error(str(tmp_path / "gone.yaml"))
    (tmp_path / "latin.yaml").write_bytes("system: é".encode("latin-1"))
    assert "not UTF-8" in sft_error(str(tmp_path / "latin.yaml"))
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfseed: 5\r\n")
    assert sft(str(tmp_path / "bom.yaml")).config.training.seed == 5


# --- Python ---------------------------------------------------------------------------------------------------------


def test_build_config_flat_nested_and_aliases():
    config = build_config(SftConfig, {"train": {"save_steps": 5}, "model": "x", "lr": 1e-5, "padding_free": None})
    assert config.checkpoint.save_steps == 5 and config.model.model == "x" and config.optimizer.learning_rate == 1e-5


def test_build_config_takes_groups_as_dataclasses():
    from swift.config.tuner import TunerConfig

    assert build_config(SftConfig, {"tuner": TunerConfig(lora_rank=2)}).tuner.lora_rank == 2


def test_build_config_messages_name_the_source():
    with pytest.raises(UsageError, match=r"where: sft\(\): modle"):
        build_config(SftConfig, {"modle": "x"}, source="sft()")


def test_pt_has_its_own_defaults():
    config = build_config(PtConfig, {"max_length": 64})
    assert config.template.use_chat_template is False and config.template.loss_scale == "all"
    assert config.tuner.tuner_type == "full" and config.template.max_length == 64


def test_defaults_are_not_shared():
    first = build_config(InferConfig, {})
    first.model.adapters.append("x")
    assert build_config(InferConfig, {}).model.adapters == []
