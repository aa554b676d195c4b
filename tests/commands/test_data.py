"""`swift data check` and `swift data preview`, from words to exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from swift.commands.data import main
from swift.config.parse import HelpRequested
from swift.core.errors import SwiftError, UsageError


@pytest.fixture
def data(tmp_path: Path, write_rows, chat_rows) -> str:
    return str(write_rows(tmp_path / "rows.jsonl", chat_rows(6)))


@pytest.fixture
def bad_data(tmp_path: Path, write_rows, chat_rows) -> str:
    rows = [*chat_rows(2), {"messages": [{"role": "user", "content": "no answer"}]}]
    return str(write_rows(tmp_path / "bad.jsonl", rows))


def test_check_counts_tokens_as_training_would(data, tiny_model_dir, capsys):
    from swift.config.data import TemplateConfig
    from swift.config.model import ModelConfig
    from swift.data.encoding.encode import ChatEncoder
    from swift.data.rows import Row, RowRef
    from swift.models.loading import load_tokenizer

    assert main(["check", data, "--model", str(tiny_model_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    encoder = ChatEncoder(load_tokenizer(tiny_model_dir, ModelConfig()), TemplateConfig())
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    lengths = [len(encoder.encode(Row(RowRef("x", 1), row["messages"]))[0].input_ids) for row in rows]
    assert report["unit"] == "tokens" and report["lengths"]["max"] == max(lengths)
    assert report["lengths"]["min"] == min(lengths)


def test_check_without_a_model_needs_no_tokenizer(data, capsys):
    assert main(["check", data]) == 0
    assert "characters per row" in capsys.readouterr().out


def test_check_returns_one_and_names_the_bad_row(bad_data, tiny_model_dir, tmp_path, capsys):
    folder = tmp_path / "report"
    words = ["check", bad_data, "--model", str(tiny_model_dir), "--report_dir", str(folder)]
    assert main(words) == 1
    assert "bad.jsonl:3" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text())["unit"] == "tokens"
    assert "bad.jsonl" in (folder / "ledger.jsonl").read_text()


def test_check_takes_a_training_file(data, tiny_model_dir, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {tiny_model_dir}\ndataset: [{data}]\nmax_length: 4\nlearning_rate: 1e-4\n")
    main(["check", str(config)])
    assert "dropped 6 too_long" in capsys.readouterr().out


def test_a_json_data_file_is_data(tmp_path, chat_rows, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(chat_rows(3)))
    assert main(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == "characters"


ROW = {"query": "What is red?", "response": "A colour", "system": "Be brief."}


@pytest.mark.parametrize(
    "content", [[ROW, ROW], {"data": [ROW, ROW]}, {"train": [ROW, ROW]}, ROW], ids=["list", "data", "train", "one row"]
)
@pytest.mark.parametrize("first", [True, False], ids=["before the flags", "after the flags"])
def test_a_json_file_of_rows_is_data_wherever_it_stands(content, first, tiny_model_dir, tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content))
    words = [str(path), "--model", str(tiny_model_dir)] if first else ["--model", str(tiny_model_dir), str(path)]
    assert main(["check", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["unit"] == "tokens" and report["sources"][0]["read"] == (1 if content == ROW else 2)


@pytest.mark.parametrize("content", ["flat", "grouped", "misspelt"])
@pytest.mark.parametrize("first", [True, False], ids=["before the flags", "after the flags"])
def test_a_json_file_of_settings_is_a_training_file(content, first, data, tmp_path, capsys):
    settings = {"dataset": [data], "max_length": 4, "lora-rank": 2}
    if content == "grouped":
        settings = {"data": {"dataset": [data]}, "lora": {"rank": 2}, "ENV": {"X_TEST": "1"}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**settings, "max_lenth": 3} if content == "misspelt" else settings))
    words = [str(path), "--json"] if first else ["--json", str(path)]
    if content == "misspelt":
        with pytest.raises(UsageError, match="max_lenth"):
            main(["check", *words])
        return
    assert main(["check", *words]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["read"] == 6


def test_a_data_file_may_follow_a_bare_flag(data, capsys):
    assert main(["check", "--json", data]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["read"] == 6


def test_data_files_may_stand_before_the_training_file(data, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("dataset: [gone.jsonl]\n")
    assert main(["check", data, str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["read"] == 6


def test_preview_shows_n_rows_and_writes_html(data, tiny_model_dir, tmp_path, capsys):
    out = tmp_path / "sub" / "out.html"
    assert main(["preview", data, "--model", str(tiny_model_dir), "--n", "2", "--html", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("rows.jsonl:") == 2 and text.count("⟦Answer ") == 2 and "<|im_end|>⟧" in text
    assert out.read_text().count("<h2>") == 2


@pytest.fixture
def talks(write_rows, tmp_path) -> str:
    """Pairs whose conversations have an earlier answer, which `swift rlhf` doesn't train."""
    words = ["hello", "well?", "where to?", "Paris"]
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
    rows = [{"messages": talk, "rejected_response": "nowhere", "margin": 0.5 * i} for i in range(3)]
    return str(write_rows(tmp_path / "pairs.jsonl", rows))


def test_preview_of_pairs_shows_what_rlhf_trains(talks, tiny_model_dir, capsys):
    assert main(["preview", talks, "--model", str(tiny_model_dir), "--n", "2"]) == 0
    text = capsys.readouterr().out
    assert re.findall("⟦(.*?)⟧", text) == ["Paris<|im_end|>", "nowhere<|im_end|>"] * 2
    assert text.count("— shared prompt: ") == 2 and "; margin 0.5" in text and "⟦well?" not in text
    assert main(["preview", talks, "--model", str(tiny_model_dir), "--n", "1", "--loss_scale", "default"]) == 0
    assert "⟦well?" in capsys.readouterr().out
    assert main(["preview", talks, "--model", str(tiny_model_dir), "--n", "1", "--layout", "chat"]) == 0
    assert "—" not in capsys.readouterr().out


def test_check_of_pairs_counts_what_rlhf_trains(talks, tiny_model_dir, capsys):
    def trained(*more: str) -> int:
        assert main(["check", talks, "--model", str(tiny_model_dir), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["sources"][0]["trained_tokens"]

    assert trained() == trained("--loss_scale", "last_round") < trained("--loss_scale", "default")


def test_preview_follows_template_flags(data, tiny_model_dir, capsys):
    assert main(["preview", data, "--model", str(tiny_model_dir), "--n", "1", "--system", "Be odd."]) == 0
    assert "Be odd." in capsys.readouterr().out


def test_preview_shows_bad_rows_as_such(bad_data, tiny_model_dir, capsys):
    assert main(["preview", bad_data, "--model", str(tiny_model_dir)]) == 1
    text = capsys.readouterr().out
    assert "bad.jsonl:3" in text and "fix:" in text and text.count("⟦") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["preview", "x.jsonl"], "needs a tokenizer"),
        (["check"], "needs data"),
        (["chek"], "did you mean check"),
        (["check", "missing.jsonl"], "missing.jsonl"),
        (["check", "x.jsonl", "--max_lenght", "5"], "max_length"),
        (["preview", "x.jsonl", "--model", "m", "--n", "0"], "--n"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(SwiftError) as error:
        main(words)
    assert message in error.value.render()
    if "missing.jsonl" not in words:
        assert isinstance(error.value, UsageError)


@pytest.mark.parametrize("words", [["--help"], ["check", "--help"], ["preview", "--help"]])
def test_help(words):
    with pytest.raises(HelpRequested) as request:
        main(words)
    assert "swift data" in request.value.text


def test_a_report_folder_that_can_t_be_made_is_named(bad_data, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SwiftError, match="could not write") as caught:
        main(["check", bad_data, "--report_dir", str(tmp_path / "file/report")])
    assert str(tmp_path / "file/report") in caught.value.message


def test_a_missing_file_is_a_wrong_request(tmp_path, capfd):
    from swift.cli import main as swift

    assert swift(["data", "check", str(tmp_path / "nothere.jsonl")]) == 2
    assert "nothere.jsonl" in capfd.readouterr().err
