"""The configuration that a run leaves behind, and taking it up again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swift.config import (
    CONFIG_NAME,
    InferConfig,
    MergeLoraConfig,
    PtConfig,
    RlhfConfig,
    SftConfig,
    build_config,
    load_config,
    parse_command_line,
    save_config,
    to_flat,
    with_saved_config,
)
from swift.config.saved import newest_checkpoint
from swift.core.errors import UsageError


@pytest.mark.parametrize("cls", [SftConfig, PtConfig, InferConfig, MergeLoraConfig])
def test_round_trip_keeps_every_value(cls, tmp_path):
    config = build_config(cls, {"model": "owner/name", "adapters": ["a: b", "#c", "no"]})
    path = save_config(config, tmp_path)
    assert path == tmp_path / CONFIG_NAME
    assert load_config(cls, tmp_path) == config


def test_round_trip_of_awkward_values(tmp_path):
    config = build_config(
        SftConfig,
        {
            "system": "first: line\n  second # line\n\ttabbed “quoted” 'x' \"y\" 中文 🎉\n", "learning_rate": 1e-5,
            "adam_epsilon": 1e-12, "max_grad_norm": float("inf"), "model_name": ["no", "1e5"], "save_strategy": "no",
            "columns": {"yes": "no", "1": "2"}, "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
            "target_modules": ["[a]", "null"],
        },
    )  # fmt: skip
    save_config(config, tmp_path / "my.yaml")
    assert load_config(SftConfig, tmp_path / "my.yaml") == config
    assert parse_command_line(SftConfig, [str(tmp_path / "my.yaml")], command="sft").config == config


def test_local_paths_are_written_absolute(tmp_path, monkeypatch):
    for name in ("model", "rows.jsonl", "t.jinja", "odd#name"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    given = {
        "model": "model", "adapters": ["owner/name"], "template": "t.jinja", "system": "be brief",
        "dataset": ["rows.jsonl", "rows.jsonl#5", "rows.jsonl:a#5", "odd#name", "self-cognition#3", "gone.jsonl"],
    }  # fmt: skip
    save_config(build_config(SftConfig, given), tmp_path)
    saved = to_flat(load_config(SftConfig, tmp_path))
    assert saved["model"] == f"{tmp_path}/model" and saved["adapters"] == ["owner/name"]
    assert saved["template"] == f"{tmp_path}/t.jinja" and saved["system"] == "be brief"
    here = [f"{tmp_path}/{name}" for name in ("rows.jsonl", "rows.jsonl#5", "rows.jsonl:a#5", "odd#name")]
    assert saved["dataset"] == [*here, "self-cognition#3", "gone.jsonl"]


@pytest.fixture
def run_dir(tmp_path):
    """A run with one complete checkpoint, as sft leaves it."""
    config = build_config(
        SftConfig,
        {
            "model": "owner/base", "dataset": ["rows.jsonl"], "system": "be brief", "max_steps": 20, "lora_rank": 3,
            "val_dataset": ["v.jsonl"], "resume_from_checkpoint": None, "torch_dtype": "bfloat16", "max_length": 99,
            "model_name": ["Ada"], "strict": False,
        },
    )  # fmt: skip
    folder = tmp_path / "run" / "checkpoint-5"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        save_config(config, place)
    (folder / "complete.json").write_text("{}")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/other"}))
    return folder.parent


def test_resume_takes_what_is_not_given(run_dir):
    checkpoint = str(run_dir / "checkpoint-5")
    parsed = parse_command_line(SftConfig, ["--resume_from_checkpoint", checkpoint, "--max_steps", "40"], command="sft")
    assert parsed.config.model.model == "owner/base" and parsed.config.tuner.lora_rank == 3
    assert parsed.config.training.max_steps == 40, "what is given wins"
    assert parsed.config.training.resume_from_checkpoint == checkpoint
    assert parsed.origins["lora_rank"] == "checkpoint" and CONFIG_NAME in parsed.places["lora_rank"]


def test_resume_latest_and_run_folder(run_dir):
    for values in (
        {"resume_from_checkpoint": str(run_dir)},
        {"resume_from_checkpoint": "latest", "output_dir": str(run_dir.parent)},
        {"resume_from_checkpoint": "true", "output_dir": str(run_dir)},
    ):
        assert build_config(SftConfig, values).tuner.lora_rank == 3


def test_only_the_weights(run_dir):
    config = build_config(SftConfig, {"resume_from_checkpoint": str(run_dir), "resume_only_model": True, "model": "x"})
    assert config.tuner.lora_rank == 8 and config.training.max_steps == -1


def test_inference_takes_model_and_template_only(run_dir):
    config = build_config(InferConfig, {"adapters": [str(run_dir / "checkpoint-5")]})
    assert config.model.model == "owner/base" and config.template.system == "be brief"
    assert config.data.val_dataset == [] and config.model.torch_dtype is None
    config = build_config(
        InferConfig, {"adapters": [str(run_dir / "checkpoint-5")], "load_data_args": True, "system": "x"}
    )
    assert config.data.val_dataset == ["v.jsonl"] and config.template.system == "x"
    assert config.data.model_name == ["Ada"], "self-cognition rows are filled in as they were in training"
    assert "max_length" not in to_flat(config) and "strict" not in to_flat(config)
    assert load_config(InferConfig, run_dir).template.system == "be brief", "what only training has is left out"
    config = build_config(InferConfig, {"adapters": [str(run_dir / "checkpoint-5")], "load_args": False, "model": "y"})
    assert config.model.model == "y" and config.template.system is None


def test_a_checkpoint_has_its_own_copies(run_dir):
    """The template's file may be gone, and a model saved whole has new tokens and rope scaling in its files."""
    folder = run_dir / "checkpoint-5"
    values = {"model": "owner/base", "template": "gone.jinja", "new_special_tokens": ["<x>"], "system": "s"}
    save_config(build_config(SftConfig, values), folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    flat = to_flat(build_config(InferConfig, {"adapters": [str(folder)]}))
    assert flat["template"] is None and flat["new_special_tokens"] == ["<x>"]
    (folder / "adapter_config.json").unlink()
    flat = to_flat(build_config(InferConfig, {"model": str(folder)}))
    assert flat["new_special_tokens"] == [] and flat["system"] == "s" and flat["model"] == str(folder)


def test_adapters_of_other_tools_name_their_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/other"}))
    for cls in (InferConfig, MergeLoraConfig, SftConfig):
        assert build_config(cls, {"adapters": [str(tmp_path)]}).model.model == "owner/other"


def test_with_saved_config(run_dir):
    values = with_saved_config(SftConfig, {"train": {"max_steps": 7}}, run_dir / "checkpoint-5")
    assert values["max_steps"] == 7 and values["lora_rank"] == 3
    assert to_flat(build_config(SftConfig, values))["lora_rank"] == 3
    with pytest.raises(UsageError, match=CONFIG_NAME):
        with_saved_config(SftConfig, {}, run_dir.parent.parent / "nothing")


def test_newest_checkpoint_is_the_last_finished_one(tmp_path):
    for number, (name, complete) in enumerate(
        [("v0/checkpoint-20", True), ("v1/checkpoint-5", True), ("v1/checkpoint-10", False), ("v1/checkpoint-x", True)]
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if complete:
            (folder / "complete.json").write_text("{}")
            os.utime(folder / "complete.json", (1000 + number, 1000 + number))
    assert newest_checkpoint(tmp_path) == tmp_path / "v1/checkpoint-5"
    assert newest_checkpoint(tmp_path / "none") is None


def write_checkpoint(folder, when, **settings):
    """A checkpoint with its settings and a file that the manifest lists."""
    folder.mkdir(parents=True)
    save_config(build_config(SftConfig, {"model": "owner/base", **settings}), folder)
    (folder / "weights").write_text("1234")
    (folder / "complete.json").write_text(json.dumps({"files": {"weights": {"bytes": 4}}}))
    os.utime(folder / "complete.json", (when, when))
    return folder


def test_latest_is_resolved_once(tmp_path, monkeypatch):
    """Settings and weights come from one checkpoint: the configuration names the folder that it was filled from."""
    monkeypatch.chdir(tmp_path)
    mine = write_checkpoint(Path("output/mine/v0/checkpoint-5"), 1000, model="mine", lora_rank=3)
    other = write_checkpoint(Path("output/other/v0/checkpoint-9"), 2000, model="other", lora_rank=5)
    elsewhere = write_checkpoint(Path("runs/checkpoint-2"), 500, model="mine", lora_rank=7)
    for values, folder, rank in (
        ({"model": "owner/mine"}, mine, 3),
        ({}, other, 5),
        ({"model": "owner/mine", "output_dir": "runs"}, elsewhere, 7),
    ):
        config = build_config(SftConfig, {"resume_from_checkpoint": "latest", **values})
        assert config.training.resume_from_checkpoint == str(folder) and config.tuner.lora_rank == rank
    run = build_config(SftConfig, {"resume_from_checkpoint": "output/mine"})
    assert run.training.resume_from_checkpoint == str(mine)
    words = ["--resume_from_checkpoint", "latest", "--output_dir", "runs"]
    assert parse_command_line(SftConfig, words, command="sft").config.training.resume_from_checkpoint == str(elsewhere)


@pytest.mark.parametrize("harm", ["shorter", "missing", "manifest"])
def test_latest_passes_over_a_damaged_checkpoint(harm, tmp_path):
    whole = write_checkpoint(tmp_path / "checkpoint-5", 1000)
    broken = write_checkpoint(tmp_path / "checkpoint-9", 2000)
    assert newest_checkpoint(tmp_path) == broken
    if harm == "missing":
        (broken / "weights").unlink()
    else:
        (broken / ("weights" if harm == "shorter" else "complete.json")).write_text("12")
    assert newest_checkpoint(tmp_path) == whole


@pytest.mark.parametrize(
    ("began", "asked", "flags", "words"),
    [
        (RlhfConfig, SftConfig, {}, "`swift rlhf --rlhf_type dpo`, and supervised tuning"),
        (SftConfig, RlhfConfig, {}, "supervised tuning, and `swift rlhf --rlhf_type dpo`"),
        (
            RlhfConfig,
            RlhfConfig,
            {"rlhf_type": "kto"},
            "`swift rlhf --rlhf_type dpo`, and `swift rlhf --rlhf_type kto`",
        ),
        (SftConfig, SftConfig, {"task_type": "embedding"}, "supervised tuning, and .* --task_type embedding"),
    ],
)
def test_a_run_goes_on_as_what_it_began(began, asked, flags, words, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint-1", 1.0)
    save_config(build_config(began, {"model": "m", "dataset": ["x.jsonl"]}), checkpoint)
    with pytest.raises(UsageError, match=words) as caught:
        build_config(asked, {"resume_from_checkpoint": str(checkpoint), **flags})
    assert "resume_only_model" in (caught.value.fix or "")
    same = build_config(began, {"resume_from_checkpoint": str(checkpoint)})
    assert same.model.model == "m"
