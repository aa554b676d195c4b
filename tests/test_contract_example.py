"""The contract-clause example runs step by step as written, but for the model (a tiny one) and the number of steps."""

import json
from pathlib import Path

import pytest
import yaml

from swift import cli

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/contract_clauses"
STEPS = {"1_pretrain": "pt", "2_clauses": "sft", "3_entities": "sft", "4_evaluate": "infer"}


def test_every_step_is_listed():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(STEPS)
    listing = (ROOT / "examples/README.md").read_text()
    assert "`contract_clauses/`" in listing
    for name, command in STEPS.items():
        assert f"swift {command} examples/contract_clauses/{name}.yaml" in (FOLDER / f"{name}.yaml").read_text()
        assert all(isinstance(key, str) for key in yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


def test_the_contract_steps(monkeypatch, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(ROOT)

    def run(name: str, *flags: str) -> None:
        code = cli.main([STEPS[name], str(FOLDER / f"{name}.yaml"), *flags])
        assert code == 0, capsys.readouterr().err

    def train(name: str, model: Path) -> Path:
        out = tmp_path / name
        run(name, "--model", str(model), "--max_steps", "4", "--output_dir", str(out))
        return max(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))

    read = train("1_pretrain", tiny_model_dir)
    clauses, entities = train("2_clauses", read), train("3_entities", read)
    for checkpoint, measure in ((clauses, "eval_f1/governing_law"), (entities, "eval_f1_micro")):
        lines = map(json.loads, (checkpoint.parent / "logging.jsonl").read_text().splitlines())
        assert any(measure in line for line in lines)
    answers = tmp_path / "answers.jsonl"
    run("4_evaluate", "--adapters", str(clauses), "--result_path", str(answers))
    metrics = json.loads((tmp_path / "answers.jsonl.metrics.json").read_text())
    assert set(metrics) >= {"f1_macro", "accuracy", "auc"} and len(answers.read_text().splitlines()) == 40
