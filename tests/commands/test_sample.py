"""`swift sample` from the command line: rows that can be trained on, whatever interrupts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift import cli

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {k}."}, {"role": "assistant", "content": str(k)}]} for k in range(6)
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    return file


def run(tiny_model_dir: Path, questions: Path, output: Path, *flags: str) -> int:
    words = ["sample", "--model", str(tiny_model_dir), "--dataset", str(questions), "--output_file", str(output)]
    fixed = [
        *([] if "--num_return_sequences" in flags else ["--num_return_sequences", "4"]),
        "--max_new_tokens",
        "8",
        "--kv_cache_gib",
        "0.01",
        "--device",
        "cpu",
    ]
    return cli.main([*words, *fixed, *flags])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_all_formats_can_be_trained_on(tiny_model_dir, questions, tmp_path, capsys):
    out = tmp_path / "new.jsonl"
    flags = ["--reward", "0.1*length:0-1000", "0.9*regex:[h-k]", "--output_format", "sft", "dpo", "kto"]
    assert run(tiny_model_dir, questions, out, *flags) == 0
    report = json.loads((tmp_path / "new.report.json").read_text())
    assert report["prompts"] == 6 and report["answers"] == 24
    files = {kind: tmp_path / f"new.{kind}.jsonl" for kind in ("sft", "dpo", "kto")}
    assert {kind: len(lines(file)) for kind, file in files.items()} == report["rows"]
    assert len(lines(files["kto"])) == 24 and lines(files["dpo"])
    drawn = lines(tmp_path / "new.samples.jsonl")
    texts = [each["response"] for each in drawn[0]["responses"]]
    assert [each["messages"][-1]["content"] for each in lines(files["kto"])[:4]] == texts
    capsys.readouterr()
    trained = ["--model", str(tiny_model_dir), "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert cli.main(["rlhf", "--rlhf_type", "dpo", "--dataset", str(files["dpo"]), *trained]) == 0


def test_other_rewards_need_no_new_answers(tiny_model_dir, questions, tmp_path, monkeypatch):
    def no_model(self):
        raise AssertionError("answers are drawn again")

    out = tmp_path / "new.jsonl"
    assert run(tiny_model_dir, questions, out, "--reward", "regex:[a-e]", "--output_format", "kto") == 0
    drawn, first = (tmp_path / "new.samples.jsonl").read_text(), lines(out)
    monkeypatch.setattr("swift.inference.loading.Prepared.load", no_model)
    assert run(tiny_model_dir, questions, out, "--reward", "regex:[a-e]") == 2  # it is there
    again = ["--reward", "length:100000-200000", "--output_format", "kto", "--override_exist_file", "true"]
    assert run(tiny_model_dir, questions, out, *again) == 0
    assert (tmp_path / "new.samples.jsonl").read_text() == drawn
    assert [each["messages"] for each in lines(out)] == [each["messages"] for each in first]
    assert not any(each["label"] for each in lines(out))


def test_a_broken_row_has_no_answers_and_stops_nothing(tiny_model_dir, questions, tmp_path):
    questions.write_text(questions.read_text() + '{"messages": [{"role": "user"}]}\n')
    out = tmp_path / "new.jsonl"
    assert run(tiny_model_dir, questions, out, "--reward", "length:0-1000") == 0
    report = json.loads((tmp_path / "new.report.json").read_text())
    assert report["prompts"] == 6 and report["prompts_without_answers"] == 1 and len(lines(out)) == 6


def test_tools_go_with_their_prompts(tiny_model_dir, questions, tmp_path):
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}]
    questions.write_text(json.dumps({**ROWS[0], "tools": tools}) + "\n")
    out = tmp_path / "new.jsonl"
    template = Path(__file__).parents[1] / "assets/templates/qwen2_5.jinja"
    assert run(tiny_model_dir, questions, out, "--reward", "length:0-1000", "--template", str(template)) == 0
    assert lines(out)[0]["tools"] == tools


def test_solutions_may_be_numbers(tiny_model_dir, questions, tmp_path):
    questions.write_text("".join(json.dumps({**each, "solution": 7}) + "\n" for each in ROWS))
    out = tmp_path / "new.jsonl"
    assert run(tiny_model_dir, questions, out, "--reward", "number", "match", "--output_format", "kto") == 0
    assert len(lines(out)) == 24


@pytest.mark.slow
def test_a_reward_model_judges(tiny_model_dir, questions, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({**each, "rejected_response": "no"}) + "\n" for each in ROWS))
    train = ["--model", str(tiny_model_dir), "--max_steps", "2", "--output_dir", str(tmp_path / "rm")]
    assert cli.main(["rlhf", "--rlhf_type", "rm", "--dataset", str(pairs), *train]) == 0
    (checkpoint,) = (tmp_path / "rm").glob("**/checkpoint-2")
    out = tmp_path / "new.jsonl"
    flags = ["--orm_model", str(checkpoint), "--output_format", "dpo"]
    assert run(tiny_model_dir, questions, out, *flags) == 0
    (file,) = tmp_path.glob("new.orm-????????????.jsonl")
    judged = [each["reward"] for each in lines(file)]
    assert len(judged) == 24
    report = json.loads((tmp_path / "new.report.json").read_text())
    assert report["mean_reward"] == pytest.approx(sum(judged) / 24)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing judges"),
        (["--reward", "mach"], "did you mean match"),
        (["--reward", "match", "--output_format", "dpo", "--num_return_sequences", "1"], "two answers"),
        (["--reward", "match", "--output_format", "sft", "sft"], "each format once"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(flags, said, tiny_model_dir, questions, tmp_path, capsys):
    assert run(tiny_model_dir, questions, tmp_path / "new.jsonl", *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new.samples.jsonl").exists()
