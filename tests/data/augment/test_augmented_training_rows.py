"""`--augment`: user messages of training rows are rewritten, once, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift.config import SftConfig
from swift.config.build import build_config
from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import NetworkError, UsageError
from swift.data.augment import build_augmenter
from swift.data.check import run_check
from swift.data.dataset import Prepared, prepare_datasets
from swift.data.encoding.encode import ChatEncoder

CONFIG = {"text": {"random_swap": {"n": 2}}}


def rows(count: int, tag: str) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "system", "content": "one two three four"},
                {"role": "user", "content": f"{tag} row {i} has five more words"},
                {"role": "assistant", "content": f"the answer to row {i} in {tag}"},
                {"role": "user", "content": "and then what comes next"},
                {"role": "assistant", "content": "nothing more comes next"},
            ]
        }
        for i in range(count)
    ]


@pytest.fixture
def files(tmp_path: Path, write_rows) -> tuple[Path, Path]:
    return write_rows(tmp_path / "train.jsonl", rows(300, "train")), write_rows(tmp_path / "val.jsonl", rows(5, "val"))


def prepare(tokenizer: Any, train: Path, val: Path | None = None, *, seed: int = 42, **settings: Any) -> Prepared:
    template = TemplateConfig(max_length=512)
    data = DataConfig(dataset=[str(train)], val_dataset=[str(val)] if val else [], **settings)
    return prepare_datasets(data, template, ChatEncoder(tokenizer, template), seed=seed)


def shown(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False)


def test_user_messages_are_rewritten_and_only_those(tokenizer, files):
    train, val = files
    prepared = prepare(tokenizer, train, val, augment=CONFIG)
    augmenter = build_augmenter(CONFIG, seed=42)
    for i, row in enumerate(rows(300, "train")):
        expected = [dict(message) for message in row["messages"]]
        for number in (1, 3):
            expected[number]["content"] = augmenter(
                row["messages"][number]["content"], row_id=f"{train}:{i + 1}/{number}"
            )
        assert expected != row["messages"]
        assert tokenizer.decode(prepared.train.tokens(i)[0]).strip() == shown(tokenizer, expected).strip()
    assert prepared.val is not None
    for i, row in enumerate(rows(5, "val")):
        assert tokenizer.decode(prepared.val.tokens(i)[0]).strip() == shown(tokenizer, row["messages"]).strip()
    assert prepared.ledger.encoding["augment.random_swap.changed"] == 600
    assert "augment.random_swap.changed: 600" in prepared.ledger.render()


def test_any_number_of_processes_gives_the_same(tokenizer, files):
    one, two = (prepare(tokenizer, files[0], augment=CONFIG, dataset_num_proc=n) for n in (1, 2))
    assert one.train.digest() == two.train.digest()
    assert one.ledger.encoding == two.ledger.encoding


def test_seed_and_settings_decide_and_are_part_of_the_fingerprint(tokenizer, files):
    made = {
        name: prepare(tokenizer, files[0], seed=seed, augment=augment, data_seed=data_seed)
        for name, seed, augment, data_seed in [
            ("plain", 1, None, None),
            ("one", 1, CONFIG, None),
            ("two", 2, CONFIG, None),
            ("data seed", 1, CONFIG, 2),
            ("other", 1, {"text": {"random_swap": {"n": 3}}}, None),
        ]
    }
    digests = {name: prepared.train.digest() for name, prepared in made.items()}
    assert digests["two"] == digests["data seed"]
    assert len(set(digests.values())) == 4
    assert len({prepared.fingerprint for prepared in made.values()}) == 5


def test_plain_texts_are_rewritten(tokenizer, tmp_path, write_rows):
    path = write_rows(tmp_path / "t.jsonl", [{"text": "one two three four five"}])
    template = TemplateConfig(use_chat_template=False)
    data = DataConfig(dataset=[str(path)], augment=CONFIG)
    prepared = prepare_datasets(data, template, ChatEncoder(tokenizer, template), seed=1)
    expected = build_augmenter(CONFIG, seed=1)("one two three four five", row_id=f"{path}:1/0")
    assert expected != "one two three four five"
    assert tokenizer.decode(prepared.train.tokens(0)[0]).startswith(expected)


def test_evaluation_must_be_apart(tokenizer, files):
    with pytest.raises(UsageError, match="split_dataset_ratio takes them"):
        prepare(tokenizer, files[0], augment=CONFIG, split_dataset_ratio=0.1)
    with pytest.raises(UsageError, match=r"train\.jsonl is used for both"):
        prepare(tokenizer, files[0], files[0], augment=CONFIG)


def test_faults_name_the_flag(tokenizer, files):
    with pytest.raises(UsageError) as caught:
        prepare(tokenizer, files[0], augment={"text": {"random_swapp": {}}})
    assert caught.value.where.startswith("--augment") and "did you mean random_swap?" in caught.value.fix
    with pytest.raises(UsageError, match="at least 0"):
        prepare(tokenizer, files[0], augment={"text": {"random_swap": {"n": -1}}})


def test_the_flag_is_json_or_a_mapping():
    for value in (json.dumps(CONFIG), CONFIG):
        assert build_config(SftConfig, {"model": "m", "dataset": ["d"], "augment": value}).data.augment == CONFIG


def test_data_check_sees_what_training_would(tokenizer, files):
    data = DataConfig(dataset=[str(files[0])], augment={"text": {"random_deletion": {"n": 3}}})
    template = TemplateConfig(max_length=512)
    plain = run_check(DataConfig(dataset=[str(files[0])]), template, ChatEncoder(tokenizer, template), seed=42)
    shorter = run_check(data, template, ChatEncoder(tokenizer, template), seed=42)
    assert shorter.summary()["lengths"]["max"] < plain.summary()["lengths"]["max"]
    assert shorter.summary()["encoding"]["augment.random_deletion.changed"] == 600


def test_preview_shows_what_training_would(tiny_model_dir, tmp_path, write_rows, capsys):
    from swift.commands.data import main

    path = write_rows(tmp_path / "r.jsonl", [{"query": "one two", "response": "the answer"}])
    command = ["preview", str(path), "--model", str(tiny_model_dir), "--augment"]
    assert main([*command, json.dumps({"text": {"random_swap": {}}})]) == 0
    assert "two one" in capsys.readouterr().out
    with pytest.raises(UsageError, match="random_swa'"):
        main([*command, json.dumps({"text": {"random_swa": {}}})])
    llm = {"paraphrase_llm": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}
    with pytest.raises(NetworkError, match="--offline"):
        main([*command, json.dumps({"text": llm}), "--offline", "true"])
