"""Settings of `--task_type`: ranges, contradictions, what a task never reads."""

from __future__ import annotations

import pytest

from swift.config import InferConfig, PtConfig, SftConfig, build_config, parse_command_line, save_config
from swift.config.checks import find_problems
from swift.config.convert import convert_file
from swift.config.schema import settings_of
from swift.config.task_checks import READ_BY


def problems(words: str, cls=SftConfig):
    given = ["--model", "smollm2", *(["--dataset", "rows.jsonl"] if cls is not InferConfig else []), *words.split()]
    parsed = parse_command_line(cls, given, command="sft")
    return find_problems(parsed.config, places=parsed.places)


@pytest.mark.parametrize(
    ("words", "flag", "message"),
    [
        ("--num_labels 3", "--num_labels", "num_labels does nothing with task_type causal_lm"),
        ("--task_type reranker --mrl_dims 8", "--mrl_dims", "mrl_dims does nothing with task_type reranker"),
        ("--loss_type infonce", "--loss_type", "infonce is no loss_type of task_type causal_lm"),
        (
            "--task_type embedding --loss_type listwise",
            "--loss_type",
            "listwise is no loss_type of task_type embedding",
        ),
        ("--task_type seq_cls --loss_type cosent", "--loss_type", "cosent is no loss_type of task_type seq_cls"),
        ("--task_type embedding --loss_type cosent --infonce_include_qq true", "--infonce_include_qq", "cosent"),
        ("--task_type embedding --infonce_use_batch false --infonce_include_dd true", "--infonce_include_dd", "step"),
        ("--task_type embedding --infonce_temperature 0", "--infonce_temperature", "must be above 0"),
        ("--task_type embedding --mrl_dims 8 8", "--mrl_dims", "different numbers above 0"),
        ("--task_type token_cls --num_labels 1", "--num_labels", "at least 2"),
        ("--task_type seq_cls --num_labels 0", "--num_labels", "num_labels must be at least 1"),
        ("--task_type seq_cls --num_labels 3 --label_names a b", "--label_names", "has 2 name(s)"),
        ("--task_type seq_cls --label_names a a", "--label_names", "named twice"),
        ("--task_type seq_cls --label_names a b --class_weights 1", "--class_weights", "1 value(s) for 2 classes"),
        ("--task_type seq_cls --class_weights 1 0", "--class_weights", "above 0"),
        ("--task_type seq_cls --problem_type regression --class_weights 1 2", "--class_weights", "is for classes"),
        ("--task_type generative_reranker --positive_word no", "--positive_word", "are the same"),
        ("--task_type seq_cls --enable_dft_loss true", "--enable_dft_loss", "does nothing with task_type seq_cls"),
    ],
)
def test_refused(words, flag, message):
    found = problems(words)
    assert len(found) == 1, found
    assert message in found[0].message and flag in found[0].where


@pytest.mark.parametrize(
    "words",
    [
        "--task_type causal_lm --loss_type cross_entropy",
        "--task_type seq_cls --num_labels 3 --label_names a b c --class_weights 1 2 3 --pooling mean",
        "--task_type seq_cls --num_labels 1 --problem_type regression",
        "--task_type embedding --loss_type infonce --mrl_dims 8 16 --infonce_mask_fake_negative true",
        "--task_type reranker --loss_type listwise_reranker --num_labels 1",
        "--task_type generative_reranker --positive_word ja --negative_word nein",
        "--task_type token_cls --packing true --metric_for_best_model eval_f1_macro",
    ],
)
def test_allowed(words):
    assert problems(words) == []


def test_plain_text_has_no_other_task():
    found = problems("--task_type seq_cls", PtConfig)
    assert ["`swift pt` trains on plain text" in problem.message for problem in found] == [True]


def test_inference():
    assert problems("--task_type embedding --mrl_dim 64", InferConfig) == []
    assert "does nothing with task_type causal_lm" in problems("--mrl_dim 64", InferConfig)[0].message


def test_the_table_names_settings():
    assert set(READ_BY) <= set(settings_of(SftConfig)) | set(settings_of(InferConfig))
    task = {name for name, setting in settings_of(SftConfig).items() if setting.group == "task"}
    assert task - set(READ_BY) == {"task_type", "loss_type"}


def test_inference_takes_the_task_from_the_checkpoint(tmp_path):
    trained = build_config(SftConfig, {"model": "m", "task_type": "embedding", "pooling": "mean"})
    save_config(trained, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    config = build_config(InferConfig, {"adapters": [str(tmp_path)]})
    assert config.task.task_type == "embedding" and config.task.pooling == "mean"


def test_variables_of_ms_swift_become_settings(tmp_path):
    source = tmp_path / "theirs.yaml"
    source.write_text(
        "model: m\ntuner_type: lora\ntask_type: embedding\nloss_type: infonce\n"
        "ENV: {INFONCE_TEMPERATURE: '0.02', MAX_NEGATIVE_SAMPLES: '3', OMP_NUM_THREADS: '1'}\n"
    )
    result = convert_file(source, tool="ms-swift")
    assert result.values["infonce_temperature"] == 0.02 and result.values["max_negative_samples"] == 3
    assert result.env == {"OMP_NUM_THREADS": "1"} and not result.lost
