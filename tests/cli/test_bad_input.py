"""Each way in which other tools fail obscurely: here one screen that names file, line or flag, and the remedy."""

import json

import pytest

from swift.cli import main

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}


@pytest.fixture
def run(tiny_model_dir, tmp_path, capfd):
    """`run(rows or text, *flags)`: exit code and stderr of a real `swift sft` on a file of these rows."""

    def go(content, *flags, model=None, dataset=None):
        path = tmp_path / "rows.jsonl"
        if content is not None:
            text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
            path.write_text(text)
        words = ["sft", "--model", model or str(tiny_model_dir), "--dataset", dataset or str(path)]
        code = main([*words, "--output_dir", str(tmp_path / "out"), "--max_steps", "1", *flags])
        error = capfd.readouterr().err
        assert len(error.splitlines()) <= 12, f"more than a screen:\n{error}"
        assert "Traceback" not in error
        return code, error

    return go


def test_malformed_json_line(run):
    lines = [json.dumps(GOOD)] * 40 + ['{"messages": [{"role": "user", "content": "cut o'] + [json.dumps(GOOD)] * 9
    code, error = run("\n".join(lines) + "\n")
    assert code == 1
    assert "rows.jsonl:41" in error
    assert "--strict false" in error


def test_malformed_line_dropped_on_request(run):
    lines = [json.dumps(GOOD)] * 40 + ["{"] + [json.dumps(GOOD)] * 200
    code, _ = run("\n".join(lines) + "\n", "--strict", "false")
    assert code == 0


def test_too_many_bad_lines_stop_all_the_same(run):
    lines = [json.dumps(GOOD)] * 10 + ["{"] * 5
    code, error = run("\n".join(lines) + "\n", "--strict", "false")
    assert code == 1
    assert "--max_bad_rows" in error


def test_message_without_content(run):
    code, error = run([GOOD, {"messages": [{"role": "user"}, GOOD["messages"][1]]}])
    assert code == 1
    assert "rows.jsonl:2" in error
    assert "content" in error


def test_null_content(run):
    code, error = run([GOOD, GOOD, {"messages": [{"role": "user", "content": None}, GOOD["messages"][1]]}])
    assert code == 1
    assert "rows.jsonl:3" in error
    assert "null" in error


def test_unknown_role(run):
    row = {"messages": [{"role": "usr", "content": "Hi"}, GOOD["messages"][1]]}
    code, error = run([GOOD, row])
    assert code == 1
    assert "rows.jsonl:2" in error
    assert "usr" in error
    assert "user" in error


def test_human_and_gpt_are_known(run):
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    assert run([row])[0] == 0


def test_empty_file(run):
    code, error = run("")
    assert code == 1
    assert "rows.jsonl" in error
    assert "empty" in error or "no row" in error


def test_every_row_too_long(run):
    long = {"messages": [{"role": "user", "content": "river " * 500}, GOOD["messages"][1]]}
    code, error = run([long] * 3, "--max_length", "64")
    assert code == 1
    assert "3 of 3" in error
    assert "--max_length" in error


def test_half_too_long_is_counted(run, tmp_path):
    long = {"messages": [{"role": "user", "content": "river " * 500}, GOOD["messages"][1]]}
    code, _ = run([GOOD, long], "--max_length", "64", "--add_version", "false")
    assert code == 0
    ledger = [json.loads(line) for line in (tmp_path / "out/ledger.jsonl").read_text().splitlines()]
    assert any("too_long" in json.dumps(line) and "rows.jsonl" in json.dumps(line) for line in ledger)


def test_all_labels_masked(run):
    masked = {"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "loss": False}]}
    code, error = run([masked] * 2)
    assert code == 1
    assert "no token of the row would be trained" in error


def test_missing_model_path(run, tmp_path):
    code, error = run([GOOD], model=str(tmp_path / "tiny-lama"))
    assert code == 2
    assert "tiny-lama" in error
    assert "--model" in error


def test_missing_data_file(run, tmp_path):
    code, error = run([GOOD], dataset=str(tmp_path / "row.jsonl"))
    assert code == 2
    assert "row.jsonl" in error
    assert "rows.jsonl" in error  # what is there


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lerning_rate", "1e-4"], ["--lerning_rate", "--learning_rate"]),
        (["--learning_rate", "fast"], ["--learning_rate", "fast", "number"]),
        (["--lr_scheduler_type", "cosin"], ["cosin", "cosine"]),
        (["--per_device_train_batch_size", "0"], ["--per_device_train_batch_size"]),
        (["--torch_dtype", "float16"], ["--torch_dtype", "float16"]),
        (["--packing", "true", "--padding_free", "false"], ["--packing", "--padding_free"]),
        (["--resume_from_checkpoint", "nowhere/checkpoint-5"], ["nowhere/checkpoint-5"]),
        (["--target_modules", "q_prj"], ["q_prj", "q_proj"]),
        (["--load_best_model_at_end", "true"], ["--load_best_model_at_end"]),
    ],
)
def test_flags_that_cannot_be_meant(run, flags, words):
    code, error = run([GOOD], *flags)
    assert code in (1, 2)
    for word in words:
        assert word in error


def test_a_template_that_refuses_names_itself(run, tiny_model_copy):
    (tiny_model_copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ range(5) | random }}")
    code, error = run([GOOD], model=str(tiny_model_copy))
    assert code == 1
    assert "template" in error


def test_broken_weights(run, tiny_model_copy):
    path = tiny_model_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    code, error = run([GOOD], model=str(tiny_model_copy))
    assert code in (1, 2)
    assert "model.safetensors" in error
