"""Settings without effect are named, once, and only when somebody gave them."""

from __future__ import annotations

import logging

import pytest

from swift.config import InferConfig, PtConfig, RlhfConfig, SftConfig, build_config, parse_command_line, save_config
from swift.config.idle import _WORKS_WITH
from swift.config.schema import settings_of
from swift.core.logging import get_logger


def notes(words, cls=SftConfig):
    return parse_command_line(cls, words.split(), command="sft").notes


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--adam_beta2 0.9 --adam_epsilon 1e-6 --optim sgd", "adam_beta2, adam_epsilon do nothing with optim sgd"),
        ("--optim adafactor --adam_beta1 0.9", "adam_beta1 does nothing with optim adafactor"),
        (
            "--min_lr_ratio 0.1 --lr_scheduler_type constant",
            "min_lr_ratio does nothing with lr_scheduler_type",
        ),
        ("--decay_ratio 0.1", "decay_ratio does nothing with lr_scheduler_type cosine"),
        ("--eval_steps 5 --per_device_eval_batch_size 2", "eval_steps, per_device_eval_batch_size do nothing without"),
        ("--eval_strategy epoch", "eval_strategy does nothing without evaluation rows"),
        ("--warmup_steps 5 --warmup_ratio 0.1", "warmup_steps overrides it"),
        ("--max_steps 5 --num_train_epochs 1", "max_steps overrides it"),
        ("--tuner_type full --lora_rank 4 --target_modules q_proj", "lora_rank, target_modules do nothing with"),
        ("--tuner_type ia3 --lora_dropout 0.1", "lora_dropout does nothing with tuner_type ia3"),
        ("--vera_rank 8", "vera_rank does nothing with tuner_type lora"),
        ("--mix_temperature 2 --dataloader_num_workers 2", "dataloader_num_workers does nothing for prepared rows"),
        ('--cached_dataset tokens --augment {"text":{}}', "augment does nothing: cached_dataset holds rows"),
    ],
)
def test_said(words, note):
    found = notes(words)
    assert len(found) == 1 and found[0].startswith("note: ") and note in found[0]


@pytest.mark.parametrize(
    "words",
    [
        "--adam_beta2 0.9 --optim adamw",
        "--min_lr_ratio 0.1",
        "--decay_ratio 0.1 --lr_scheduler_type wsd",
        "--lora_rank 4 --lora_dropout 0 --target_modules q_proj",
        "--warmup_ratio 0 --warmup_steps 3",
        "--eval_strategy no",
        "--eval_steps 5 --eval_strategy steps --split_dataset_ratio 0.1",
        "--eval_steps 5 --val_dataset rows.jsonl",
        "--mix_temperature 2 --streaming true --dataloader_num_workers 2",
        '--cached_dataset tokens --dataset rows.jsonl --augment {"text":{}}',
    ],
)
def test_not_said(words):
    assert notes(words) == []


def test_a_flag_that_shortens_the_run_of_a_file_is_meant(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_train_epochs: 2\n")
    assert notes(f"{file} --max_steps 5") == []
    file.write_text("max_steps: 5\n")
    assert notes(f"{file} --num_train_epochs 2") == ["note: num_train_epochs does nothing: max_steps overrides it"]


def test_pt_is_full_by_default():
    assert notes("--lora_rank 4", PtConfig) == ["note: lora_rank does nothing with tuner_type full"]


def test_from_python_too(caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    with caplog.at_level(logging.INFO, logger="swift"):
        build_config(SftConfig, {"optim": "sgd", "adam_beta1": 0.5})
    assert "adam_beta1 does nothing with optim sgd" in caplog.text


def test_what_a_checkpoint_holds_is_not_said(tmp_path):
    (tmp_path / "complete.json").write_text("{}")
    save_config(build_config(SftConfig, {"model": "x"}), tmp_path)
    assert notes(f"--resume_from_checkpoint {tmp_path}") == []


def test_the_table_names_what_there_is():
    for decider, names in _WORKS_WITH.items():
        settings = settings_of(RlhfConfig if decider == "rlhf_type" else SftConfig)
        settings = {**settings_of(InferConfig), **settings} if decider == "task_type" else settings
        for name, values in names.items():
            assert name in settings
            assert set(values) < set(settings[decider].choices), (name, decider)
