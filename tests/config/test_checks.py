"""Faults between settings, found together and without torch."""

from __future__ import annotations

import os

import pytest

from swift.config import InferConfig, MergeLoraConfig, PtConfig, SftConfig, build_config
from swift.config.checks import check, find_problems
from swift.core.errors import UsageError


def faults(cls=SftConfig, **values) -> list[str]:
    base = {"model": "smollm2"}
    if issubclass(cls, SftConfig):
        base["dataset"] = ["rows.jsonl"]
    return [problem.message for problem in find_problems(build_config(cls, {**base, **values}))]


def test_defaults_have_no_fault(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert faults() == [] and faults(PtConfig) == [] and faults(InferConfig) == []
    assert faults(MergeLoraConfig, adapters=["a"]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset": []}, "no data given"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, not 0"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps must be at least 1"),
        ({"warmup_ratio": 1.5}, "warmup_ratio must be at least 0 and at most 1"),
        ({"split_dataset_ratio": 1.0}, "split_dataset_ratio must be at least 0 and below 1"),
        ({"learning_rate": -1}, "learning_rate must be at least 0"),
        ({"learning_rate": 0}, "nothing would be learnt"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1"),
        ({"packing": True, "padding_free": False}, "packing true and padding_free false exclude each other"),
        ({"packing": True, "group_by_length": True}, "exclude each other"),
        ({"packing": True, "attn_impl": "eager"}, "would let packed examples see each other"),
        ({"packing_length": 512}, "does nothing without packing"),
        ({"packing": True, "packing_length": 8}, "can't hold examples of up to max_length"),
        ({"truncation_strategy": "split"}, "is for plain text"),
        ({"max_steps": 0}, "max_steps must be above 0"),
        ({"num_train_epochs": 0}, "nothing would be trained"),
        ({"use_dora": True, "tuner_type": "full"}, "use_dora does nothing with tuner_type full"),
        ({"freeze_parameters_ratio": 0.5}, "freeze_parameters_ratio is for full tuning"),
        ({"target_regex": "("}, "is not a regular expression"),
        ({"eval_on_start": True}, "eval_on_start needs evaluation rows"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs evaluation rows"),
        ({"early_stop_interval": 3}, "early_stop_interval needs evaluation rows"),
        ({"load_best_model_at_end": True, "split_dataset_ratio": 0.1, "eval_strategy": "no"}, "eval_strategy is no"),
        ({"load_best_model_at_end": True, "split_dataset_ratio": 0.1, "save_strategy": "no"}, "needs checkpoints"),
        ({"metric_for_best_model": "bleu"}, "is not measured"),
        ({"resume_only_model": True}, "resume_only_model needs a checkpoint"),
        ({"resume_from_checkpoint": "nowhere/checkpoint-3"}, "there is no checkpoint nowhere/checkpoint-3"),
        ({"template": "qwen"}, "neither `chatml` nor a file"),
        ({"system": "gone.txt"}, "there is no file gone.txt"),
        ({"save_steps": 0}, "save_steps must be at least 1"),
        ({"lr_scheduler_type": "wsd", "warmup_ratio": 0.9, "decay_ratio": 0.2}, "add up to more"),
        ({"lr_scheduler_type": "wsd", "warmup_steps": 90, "max_steps": 100, "decay_ratio": 0.2}, "more than the 100"),
        ({"num_train_epochs": "inf"}, "num_train_epochs must be a finite number, not inf"),
        ({"learning_rate": "inf"}, "learning_rate must be a finite number"),
        ({"model_name": ["a", "b", "c"]}, "takes one value, or two"),
        ({"tuner_type": "full", "adapters": ["x"]}, "can't be trained on in full tuning"),
    ],
)
def test_training_faults(values, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = faults(**values)
    assert len(found) == 1 and message in found[0], found


def test_not_a_number_in_a_configuration_made_in_python():
    config = SftConfig()
    config.model.model, config.data.dataset, config.training.num_train_epochs = "x", ["y"], float("nan")
    assert [p.message for p in find_problems(config)] == ["num_train_epochs must be a finite number, not nan"]


def test_warmup_steps_override_the_ratio(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"lr_scheduler_type": "wsd", "warmup_ratio": 0.9, "decay_ratio": 0.2, "warmup_steps": 10}
    assert faults(**values) == [] and faults(**values, max_steps=100) == []


def test_a_misspelt_metric_is_answered_with_the_nearest():
    values = {"model": "smollm2", "dataset": ["x"], "split_dataset_ratio": 0.1, "metric_for_best_model": "perplexty"}
    (problem,) = find_problems(build_config(SftConfig, values))
    assert "did you mean eval_perplexity?" in problem.fix
    for name in ("loss", "eval_loss", "perplexity", "token_accuracy"):
        assert find_problems(build_config(SftConfig, {**values, "metric_for_best_model": name})) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"num_beams": 2, "stream": True}, "beam search can't stream"),
        ({"merge_lora": True}, "merge_lora needs an adapter"),
        ({"load_args": False, "load_data_args": True}, "load_data_args needs load_args"),
    ],
)
def test_inference_faults(values, message):
    found = faults(InferConfig, **values)
    assert len(found) == 1 and message in found[0], found


def test_merge_faults(tmp_path):
    (tmp_path / "file").touch()
    found = faults(MergeLoraConfig, max_shard_size="big", output_dir=str(tmp_path))
    assert [f.split()[0] for f in found] == ["no", "max_shard_size", str(tmp_path)]
    assert faults(MergeLoraConfig, adapters=["a"], output_dir=str(tmp_path), exist_ok=True) == []


def test_all_together_with_their_places():
    config = build_config(SftConfig, {"max_steps": 0, "warmup_ratio": 2})
    with pytest.raises(UsageError) as caught:
        check(config, places={"max_steps": "run.yaml:3", "warmup_ratio": "--warmup_ratio"})
    text = caught.value.render()
    assert text.startswith("3 faults") and "run.yaml:3" in text and "--warmup_ratio" in text


# --- folders --------------------------------------------------------------------------------------------------------


def test_output_dir_that_holds_a_run(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    here = {"output_dir": str(tmp_path), "add_version": False}
    assert "holds another run already (checkpoint-5)" in faults(**here)[0]
    assert faults(**here, overwrite_output_dir=True) == []
    assert faults(output_dir=str(tmp_path)) == []


def test_other_ranks_leave_the_output_dir_to_rank_0(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-5").mkdir()
    monkeypatch.setenv("RANK", "1")
    assert faults(output_dir=str(tmp_path), add_version=False) == []


def test_output_dir_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in faults(output_dir=str(tmp_path / "file" / "run"))[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_dir_without_rights(tmp_path):
    tmp_path.chmod(0o500)
    assert "can't be written" in faults(output_dir=str(tmp_path / "run"))[0]


def checkpoint(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")


def test_resume(tmp_path):
    checkpoint(tmp_path / "run" / "checkpoint-5", "complete.json", "optimizer.pt")
    checkpoint(tmp_path / "run" / "checkpoint-9", "optimizer.pt")  # killed while it was written
    checkpoint(tmp_path / "weights" / "checkpoint-5", "complete.json")
    whole = str(tmp_path / "run" / "checkpoint-5")
    assert faults(resume_from_checkpoint=whole) == []
    assert faults(resume_from_checkpoint=str(tmp_path / "run")) == []
    assert faults(resume_from_checkpoint="latest", output_dir=str(tmp_path / "run")) == []
    assert "not a complete checkpoint" in faults(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-9"))[0]
    weights = str(tmp_path / "weights" / "checkpoint-5")
    assert "holds weights only" in faults(resume_from_checkpoint=weights)[0]
    assert faults(resume_from_checkpoint=weights, resume_only_model=True) == []
    (tmp_path / "run" / "checkpoint-5" / "complete.json").write_text('{"files": {"weights": {"bytes": 4}}}')
    assert "is damaged: weights is missing" in faults(resume_from_checkpoint=whole)[0]
    assert "no complete checkpoint" in faults(resume_from_checkpoint="latest", output_dir=str(tmp_path / "new"))[0]
    values = {"model": "x", "dataset": ["y"], "resume_from_checkpoint": str(tmp_path / "run" / "chekpoint-5")}
    assert find_problems(build_config(SftConfig, values))[0].fix == f"did you mean {whole}?"


@pytest.mark.parametrize("given", [{"eval_strategy": "steps"}, {"eval_steps": 5}, {"per_device_eval_batch_size": 2}])
def test_scripts_may_carry_an_evaluation_without_rows(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "evaluation rows" not in str(faults(**given))
