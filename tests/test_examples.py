"""Every example runs as it is written, but for the model (a tiny one), the output folder and the number of steps."""

import json
from pathlib import Path

import pytest
import yaml

from swift import cli
from swift.monitor import read_history

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TRAINING = {
    "sft_lora": "sft",
    "sft_full": "sft",
    "dora": "sft",
    "packing": "sft",
    "self_cognition": "sft",
    "tools": "sft",
    "pretrain": "pt",
    "dpo": "rlhf",
    "kto": "rlhf",
    "reward_model": "rlhf",
    "self_distillation": "rlhf",
}
RECIPES = {  # rows that are left of their data, and what each operator drops
    "clean_pretraining": (
        5,
        {
            "url_blocklist": {"url_word": 1},
            "language": {"language": 1, "low_score": 2},
            "gopher_quality": {"words": 1},
            "exact_dedup": {"duplicate": 1},
            "near_dedup": {"near_duplicate": 1},
        },
    ),
    "clean_chat": (11, {"chat_checks": {"role_order": 1, "empty_turn": 1}, "exact_dedup": {"duplicate": 1}}),
}
# the fixture's ChatML template knows no tools
EXTRA_FLAGS = {"tools": ["--template", str(ROOT / "tests/assets/templates/qwen2_5.jinja")]}


@pytest.fixture
def in_repository(monkeypatch):
    """Examples name their data relative to the repository's top folder."""
    monkeypatch.chdir(ROOT)


def test_every_example_is_run_by_a_test_and_listed():
    files = {path.stem for path in EXAMPLES.glob("*.yaml")}
    assert files == {*TRAINING, *RECIPES, "infer", "sample"}
    listing = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}.yaml`" in listing for name in files)


@pytest.mark.parametrize("name", TRAINING)
def test_training_example(name, in_repository, tiny_model_dir: Path, tmp_path: Path, capsys):
    file = EXAMPLES / f"{name}.yaml"
    assert f"swift {TRAINING[name]} examples/{name}.yaml" in file.read_text()
    flags = ["--model", str(tiny_model_dir), "--max_steps", "2", "--output_dir", str(tmp_path / "out")]
    code = cli.main([TRAINING[name], str(file), *flags, *EXTRA_FLAGS.get(name, [])])
    assert code == 0, capsys.readouterr().err
    (run_dir,) = (tmp_path / "out").iterdir()
    losses = [record["loss"] for record in read_history(run_dir) if "loss" in record and "event" not in record]
    assert losses and all(loss > 0 for loss in losses)
    assert list(run_dir.glob("checkpoint-*/complete.json"))
    # a setting that the example gives is in force, whatever group it is in
    effective = (run_dir / "swift_config.yaml").read_text()
    for key, value in flat(yaml.safe_load(file.read_text())).items():
        if isinstance(value, (int, float)) and key != "max_steps":
            assert yaml.safe_load(effective) and f"{key}:" in effective
            assert flat(yaml.safe_load(effective))[key] == pytest.approx(float(value))


def test_inference_example(in_repository, tiny_model_dir: Path, tmp_path: Path, capsys):
    answers = tmp_path / "answers.jsonl"
    flags = ["--model", str(tiny_model_dir), "--max_new_tokens", "4", "--result_path", str(answers)]
    assert cli.main(["infer", str(EXAMPLES / "infer.yaml"), *flags]) == 0, capsys.readouterr().err
    questions = (EXAMPLES / "data/questions.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == len(questions)
    assert all(line["status"] == "ok" for line in lines)


def test_sampling_example(in_repository, tiny_model_dir: Path, tmp_path: Path, capsys):
    flags = ["--model", str(tiny_model_dir), "--max_new_tokens", "4", "--output_file", str(tmp_path / "new.jsonl")]
    assert cli.main(["sample", str(EXAMPLES / "sample.yaml"), *flags]) == 0, capsys.readouterr().err
    questions = (EXAMPLES / "data/questions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in (tmp_path / "new.all.jsonl").read_text().splitlines()]
    assert len(rows) == len(questions) and all(len(row["answers"]) == 4 for row in rows)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_example(name, in_repository, tmp_path: Path, capsys):
    file = EXAMPLES / f"{name}.yaml"
    assert f"swift data run examples/{name}.yaml" in file.read_text()
    words = ["data", "run", str(file), "--output", str(tmp_path / "out"), "--num_proc", "1"]
    assert cli.main(words) == 0, capsys.readouterr().err
    rows, dropped = RECIPES[name]
    assert json.loads((tmp_path / "out/_manifest.json").read_text())["rows"] == rows
    entries = json.loads((tmp_path / "out/_ledger.json").read_text())["operators"]
    assert {e["label"]: e["tally"]["dropped"] for e in entries if e["tally"]["dropped"]} == dropped


def flat(values: dict) -> dict:
    """Settings without their groups."""
    result = {}
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("columns", "ENV"):
            result.update(flat(value))
        else:
            result[key] = float(value) if isinstance(value, str) and is_number(value) else value
    return result


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
